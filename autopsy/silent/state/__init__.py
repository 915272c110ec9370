"""State: what is kept beside the weights that train, and what differs from it."""
