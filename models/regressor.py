# SPDX-License-Identifier: MIT (finite 4.0.0, 2026-11-28)
"""
Regressor: wraps a net that returns numbers into a model that returns its loss and its metrics.

    loss, metrics = model(images, targets)

`loss` is the mean squared error, an fp32 scalar to call backward on. It is computed from
`net(images).float()`, whatever autocast says: in fp16 the square of an error of 256 is inf. Keep
targets near 1 (divide by their deviation): half precision has three digits, and Adam's step does
not grow with the target.

Copy this file alone: it needs torch and nothing else.

Paste::

    import torch
    from regressor import Regressor

    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 2))
    model = Regressor(net)
    images = torch.randn(8, 3, 32, 32)
    targets = torch.randn(8, 2)
    loss, metrics = model(images, targets)
    loss.backward()
    print(metrics["mae"].mean())
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Regressor(nn.Module):
    """Mean squared and mean absolute error around `net`, which maps images to (B, T)."""

    judged_by = "-loss"

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, images: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Images (B, C, H, W), float targets (B, T) or (B,) -> loss, metrics of shape (B,)."""
        outputs = self.net(images).float()  # B, T
        targets = targets.float().view_as(outputs)  # (B,) becomes (B, 1)
        squares = F.mse_loss(outputs, targets, reduction="none").mean(1)
        distances = F.l1_loss(outputs, targets, reduction="none").mean(1)
        return squares.mean(), {"loss": squares.detach(), "mae": distances.detach()}
