"""
Batches: gathered and augmented on the device, each one a pure function of (seed, step).

A data loader with workers has a state that nobody can save: which worker holds which half-built batch. Here there is no
state. `TrainBatches.at(step)` computes the same batch whenever it is asked, so that a resumed run continues with the
very batch it would have seen, a bad step can be run again with the same images, and two ranks together see exactly
the batch that one process would have seen: every draw is made for the whole global batch, and a rank takes its slice.

Augmentation works on the whole batch at once: a random crop is one gather from a sliding-window view of the padded
images (no copy is made of the windows), and the flip alternates: an image mirrored in this epoch is plain in the next
(Jordan, arXiv 2404.00498: both views are seen in every two epochs instead of by luck).

Copy this file alone: it needs torch and nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor


class Normalize:
    """uint8 (B, 3, H, W) -> fp32 with mean 0 and deviation 1 per channel, channels-last; statistics of `images`.

    Taken from every tenth image: the sums are integers, so the result does not depend on the number of threads.
    """

    def __init__(self, images: Tensor):
        sample = images[::10].long()
        mean = sample.sum((0, 2, 3)).double() / sample[:, 0].numel()
        variance = (sample * sample).sum((0, 2, 3)).double() / sample[:, 0].numel() - mean**2
        self.mean = mean.float().view(1, 3, 1, 1)
        self.std = variance.clamp(min=1.0).sqrt().float().view(1, 3, 1, 1)

    def __call__(self, images: Tensor) -> Tensor:
        images = images.to(memory_format=torch.channels_last)
        return (images.float() - self.mean.to(images.device)) / self.std.to(images.device)


class TrainBatches:
    """An endless, stateless stream of augmented batches.

    Args:
        images, labels: uint8 (N, 3, H, W) and int64 (N,), on the device the batches are wanted on.
        batch_size: images per update over all ranks; N // batch_size steps make an epoch, the rest waits for
            another epoch's shuffle.
        pad: pixels of reflected border for the random crop.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        pad: int = 2,
    ):
        N, _, H, W = images.shape
        if batch_size > N:
            raise ValueError(f"a batch of {batch_size} images is more than the {N} there are: lower --batch-size")
        self.normalize = Normalize(images)
        padded = F.pad(images.float(), (pad,) * 4, mode="reflect").to(torch.uint8)
        self.windows = padded.unfold(2, H, 1).unfold(3, W, 1)  # a view: N, 3, 2 pad + 1, 2 pad + 1, H, W
        self.labels, self.pad, self.seed = labels, pad, seed
        self.batch_size, self.steps_per_epoch = batch_size, N // batch_size
        self.mine = slice(rank * batch_size // world_size, (rank + 1) * batch_size // world_size)
        self.mirrored_first = torch.rand(N, generator=self.generator("flip", 0)) < 0.5
        self.epoch, self.order = -1, torch.empty(0)

    def generator(self, purpose: str, number: int) -> torch.Generator:
        """A fresh CPU generator for each purpose and number: the draws depend on nothing that happened before.

        Hashed, because torch's CPU generator keeps only the low 32 bits of a seed: seed * 2**40 + n would lose it.
        """
        return torch.Generator().manual_seed(random.Random(f"{self.seed} {purpose} {number}").getrandbits(32))

    def global_indices(self, step: int) -> Tensor:
        """Which images batch number `step` is made of: int64 (batch_size,), on the CPU."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if epoch != self.epoch:
            self.epoch, self.order = epoch, torch.randperm(len(self.labels), generator=self.generator("order", epoch))
        return self.order[position * self.batch_size : (position + 1) * self.batch_size]

    def indices(self, step: int) -> Tensor:
        """This rank's share of them."""
        return self.global_indices(step)[self.mine]

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """This rank's share of batch number `step`: normalised fp32 images and int64 labels, on the device."""
        index, epoch = self.global_indices(step), step // self.steps_per_epoch
        shift = torch.randint(0, 2 * self.pad + 1, (2, self.batch_size), generator=self.generator("crop", step))
        mirrored = self.mirrored_first[index] ^ (epoch % 2 == 1)
        drawn = torch.stack([index, *shift, mirrored.long()])[:, self.mine]
        if self.labels.is_cuda:  # one small copy from pinned memory, which does not wait for the device
            drawn = drawn.pin_memory().to(self.labels.device, non_blocking=True)
        index, down, right, mirrored = drawn
        images = self.windows[index, :, down, right]
        images = torch.where(mirrored.bool()[:, None, None, None], images.flip(3), images)
        return self.normalize(images), self.labels[index]


def val_batches(
    images: Tensor, labels: Tensor, normalize: Normalize, *, batch_size: int, rank: int = 0, world_size: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """Every image exactly once over all ranks, in order: rank r takes images r, r + world_size, ...

    The ranks' shares differ by at most one image, so sums and counts have to be added up over ranks, never means.
    """
    mine = slice(rank, None, world_size)
    for x, y in zip(images[mine].split(batch_size), labels[mine].split(batch_size), strict=True):
        yield normalize(x), y
