"""Network: what a network takes its dimensions and masks for."""
