"""Spikes: a loss or a gradient norm that jumps."""
