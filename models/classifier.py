# SPDX-License-Identifier: MIT (finite 4.0.0, 2026-11-28)
"""
Classifier: wraps a net that returns logits into a model that returns its loss and its metrics.

    loss, metrics = model(images, labels)

`loss` is an fp32 scalar to call backward on. `metrics` maps a name to one fp32 number per image.
The caller adds these numbers up over batches, ranks and an uneven last batch, and so counts every
image exactly once.

The loss is computed from `logits.float()`, inside the model, whatever autocast says. Cross entropy
in half precision is where many fp16 runs break first. CUDA's autocast runs log_softmax in fp32; the
CPU's autocast does not. And a loss in fp16 receives the loss scale as its gradient: 65536 is above
fp16's largest number, 65504.

Copy this file alone: it needs torch and nothing else.

Paste::

    import torch
    from classifier import Classifier

    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10))
    model = Classifier(net, label_smoothing=0.1)
    images = torch.randn(8, 3, 32, 32)
    labels = torch.zeros(8).long()
    loss, metrics = model(images, labels)
    loss.backward()
    print(metrics["acc1"].mean())
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Classifier(nn.Module):
    """Cross entropy and top-1 accuracy around `net`.

    Args:
        net: maps images (B, C, H, W) to logits (B, num_classes) in any float dtype.
        label_smoothing: share of the target spread over all classes, in training only.
        class_weights: a factor for the loss of each class (num_classes,), in training only.
    """

    judged_by = "acc1"

    def __init__(
        self, net: nn.Module, *, label_smoothing: float = 0.0, class_weights: Tensor | None = None
    ):
        super().__init__()
        self.net = net
        self.label_smoothing = label_smoothing
        self.register_buffer("class_weights", class_weights, persistent=False)

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Images (B, 3, H, W) and int64 labels (B,) to the mean loss (fp32 scalar) and metrics of
        shape (B,), in evaluation also "guess", the number of the class with the largest logit.
        """
        logits = self.net(images).float()  # B, num_classes
        smoothing = self.label_smoothing if self.training else 0.0
        losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
        guess = logits.argmax(1)
        metrics = {"loss": losses.detach(), "acc1": (guess == labels).float() * 100}  # 0 or 100
        if not self.training:
            return losses.mean(), metrics | {"guess": guess}
        if self.class_weights is not None:
            losses = losses * self.class_weights[labels]
        return losses.mean(), metrics
