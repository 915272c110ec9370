"""Evaluation: what an evaluation does otherwise than training."""
