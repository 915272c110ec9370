"""Loop: what a loop does, and in which order: clear, backward, clip, step, schedule."""
