"""
Classifier: gives any network from images to logits the one small protocol that train.py trains.

    loss, metrics = model(images, labels)

`loss` is an fp32 scalar to call backward on. `metrics` maps a name to one fp32 number per image, so that whoever adds
them up (over batches, over ranks, over an uneven last batch) can count every image exactly once.

The loss is computed on `logits.float()`, inside the model, whatever autocast says. Cross entropy in half precision is
where many fp16 runs break first: CUDA's autocast would run log_softmax in fp32 and CPU's would not, and a loss that is
itself fp16 receives the loss scale as its gradient: 65536 is more than fp16's largest number, 65504.

Copy this file alone: it needs torch and nothing else.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Classifier(nn.Module):
    """Cross entropy and top-1 accuracy around `net`.

    Args:
        net: maps images (B, 3, H, W) to logits (B, num_classes) in any float dtype.
        label_smoothing: share of the target spread over all classes, in training only.
    """

    judged_by = "acc1"

    def __init__(self, net: nn.Module, *, label_smoothing: float = 0.0):
        super().__init__()
        self.net, self.label_smoothing = net, label_smoothing

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Images (B, 3, H, W) and int64 labels (B,) to the mean loss (fp32 scalar) and metrics of shape (B,)."""
        logits = self.net(images).float()
        smoothing = self.label_smoothing if self.training else 0.0
        losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
        acc1 = (logits.argmax(1) == labels).float() * 100
        return losses.mean(), {"loss": losses.detach(), "acc1": acc1}
