"""Data: every loader returns ((train images, labels), (val images, labels), class names), images uint8 (N, 3, H, W)."""
