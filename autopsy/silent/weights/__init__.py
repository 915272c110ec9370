"""Weights: weights that do not move."""
