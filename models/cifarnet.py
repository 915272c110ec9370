# SPDX-License-Identifier: MIT (finite 4.0.0, 2026-11-28)
"""
CifarNet: a convnet that learns CIFAR-10 in minutes on two CPU cores and in seconds on a GPU.

In the spirit of Keller Jordan's cifar10-airbench (MIT, arXiv 2404.00498), written anew. It rests on
four ideas:

    frozen whitening   The first layer is computed, not learned. Its filters are the eigenvectors of
                       the covariance of 2x2 patches, each divided by the root of its eigenvalue.
                       The first feature maps are uncorrelated.
    three conv groups  conv, pool, norm, GELU, conv, norm, GELU. The scale of every norm stays 1;
                       only its bias learns.
    identity start     Each convolution begins by passing its input channels through unchanged.
    small logits       The head's output is divided by 9, which keeps the loss soft at the start.

Differences from airbench94_muon: AdamW for head and biases, not SGD; batch norm's eps is 1e-5, not
1e-12; evaluation without test-time augmentation. The whitening layer has no bias, so that no
gradient has to go back to it. This saves 6 % of a step. We saw no loss of accuracy (half the
widths, 4 epochs, one pair of runs: 85.2 % with and without). airbench trains that bias for 3 of 8
epochs. The recipe trains on the inner 28x28 pixels for the first 60 % of a run: both sizes pool to
3x3 maps, and a step on the smaller one takes 3/4 of the time. With inner pixels alone, eight epochs
end 2 points lower.

What low precision does to it: nothing here overflows in fp16, because batch norm rescales after
every convolution. A test of overflows needs a planted fault. Autocast leaves BatchNorm's running
statistics in fp32 on every device.

Copy this file alone: it needs torch and nothing else.

Paste::

    import torch
    import torch.nn.functional as F
    from cifarnet import CifarNet

    net = CifarNet(num_classes=10)
    images = torch.randn(64, 3, 32, 32)  # normalised
    labels = torch.zeros(64).long()
    net.init_from_data(images)  # once, before the first step
    loss = F.cross_entropy(net(images).float(), labels)
    loss.backward()
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PRESETS = {
    "cifarnet-tiny": dict(widths=(16, 32, 32)),  # for tests: 30 thousand parameters
    "cifarnet": dict(widths=(64, 256, 256)),  # 2.0 million
}


class BatchNorm(nn.BatchNorm2d):
    """BatchNorm with its scale frozen at 1: the next convolution can learn any scale, but it cannot
    learn the bias.
    """

    def __init__(self, channels: int):
        # Momentum 0.4 forgets within a few steps. The weights move so fast here that older
        # statistics are wrong.
        super().__init__(channels, momentum=0.4)
        self.weight.requires_grad_(False)


class ConvGroup(nn.Module):
    """(B, C_in, H, W) -> (B, C_out, H/2, W/2), or (H-1)/2 when H is odd."""

    def __init__(self, channels_in: int, channels_out: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
        self.norm1 = BatchNorm(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = BatchNorm(channels_out)
        for conv in (self.conv1, self.conv2):
            # the filters after these keep their random start
            nn.init.dirac_(conv.weight[: conv.in_channels])

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm1(F.max_pool2d(self.conv1(x), 2)))  # B, C_out, H/2, W/2
        return F.gelu(self.norm2(self.conv2(x)))


class CifarNet(nn.Module):
    """Normalised images (B, channels, 32, 32) to logits (B, num_classes).

    The images have the dtype of the weights, or are fp32 or half under autocast.

    Args:
        num_classes: width of the head.
        channels: colours of an image.
        widths: output channels of the three groups.
    """

    def __init__(
        self,
        *,
        num_classes: int = 10,
        channels: int = 3,
        widths: tuple[int, int, int] = (64, 256, 256),
    ):
        super().__init__()
        patch = channels * 2 * 2
        # 32x32 -> 31x31; every eigenvector with both signs
        self.whiten = nn.Conv2d(channels, 2 * patch, 2, bias=False)
        self.whiten.weight.requires_grad_(False)
        self.groups = nn.Sequential()
        for channels_in, channels_out in pairwise((2 * patch, *widths)):
            self.groups.append(ConvGroup(channels_in, channels_out))
        self.head = nn.Linear(widths[-1], num_classes, bias=False)

    @torch.no_grad()
    def init_from_data(self, images: Tensor, eps: float = 5e-4) -> None:
        """Compute the whitening filters from normalised fp32 images (N, channels, H, W).

        A few thousand images are enough.
        eps is added to the eigenvalues. The smallest eigenvalues are near 1e-3 and hold mostly JPEG
        and sensor noise. Division by their root alone would make this noise as strong as the image.
        """
        C = images.shape[1]
        P = C * 2 * 2
        if images.is_mps:  # it has no float64
            images = images.cpu()
        patches = images.float().unfold(2, 2, 1).unfold(3, 2, 1)  # N, C, H-1, W-1, 2, 2
        patches = patches.permute(0, 2, 3, 1, 4, 5).reshape(-1, P).double()  # N * (H-1) * (W-1), P
        covariance = patches.T @ patches / len(patches)
        values, vectors = torch.linalg.eigh(covariance.cpu())  # on CUDA it loads cuSOLVER: seconds
        filters = (vectors / (values + eps).sqrt()).T.reshape(P, C, 2, 2)
        self.whiten.weight.copy_(torch.cat([filters, -filters]))  # 2 P, C, 2, 2

    def forward(self, images: Tensor) -> Tensor:
        x = F.gelu(self.whiten(images))  # B, 2 P, 31, 31
        x = self.groups(x)  # B, widths[-1], 3, 3
        # adaptive_max_pool2d does the same, but CUDA has no deterministic backward for it.
        x = F.max_pool2d(x, x.shape[2:]).flatten(1)  # B, widths[-1]
        return self.head(x) / 9
