"""Data: what a loader brings, and in which order."""
