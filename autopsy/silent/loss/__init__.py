"""Loss: what a loss is given, and what of it trains."""
