"""
Batches: gathered and augmented on the device, each one a pure function of (seed, step).

A data loader with workers has a state that nobody can save: which worker holds which half-built batch. Here there is no
state. `TrainBatches.at(step)` computes the same batch whenever it is asked, so that a resumed run continues with the
very batch it would have seen, a bad step can be run again with the same images, and two ranks together see exactly
the batch that one process would have seen: every draw is made for the whole global batch, and a rank takes its slice.

Augmentation works on the whole batch at once: a padded crop is a gather of rows and one of columns, whose indices
reflect at the border and run backwards for a mirrored image; a random resized crop, where images are larger than the
network wants them, is one bilinear grid_sample with a box of its own for each.
The flip alternates: an image mirrored in this epoch is plain in the next (Jordan, arXiv 2404.00498: both views are seen
in every two epochs instead of by luck).

The images lie on the device whole, or in a file mapped into memory when they are too many for that, or are decoded by
worker processes as they are needed: whichever it is, the batches are the same to the bit.

Copy this file alone: it needs torch and nothing else.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

Images = Tensor | Dataset  # a data set knows its shape and decodes images[i] and images[a:b:c] when asked


def place(images: Images, device: torch.device, share: float = 0.25) -> Images:
    """The images on the device, if they take at most `share` of its free memory; else as they are. Channels last."""
    if not isinstance(images, Tensor):
        return images
    if device.type == "cuda" and images.nbytes > share * torch.cuda.mem_get_info(device)[0]:
        return images
    return images.to(device, memory_format=torch.channels_last)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """To the device, from pinned memory where that is a GPU, so that nobody waits for it."""
    pin = device.type == "cuda" != tensor.device.type
    return (tensor.pin_memory() if pin else tensor).to(device, non_blocking=True)


def stored(images: Images, batches: Iterable[Tensor], workers: int) -> Iterator[Tensor]:
    """The uint8 images of each of these index batches: gathered, or decoded by processes that read ahead."""
    if isinstance(images, Tensor):
        pixels = images.permute(0, 2, 3, 1)  # as they are stored: an image is copied in one piece
        return (pixels.index_select(0, send(index, images.device)).permute(0, 3, 1, 2) for index in batches)
    order = (index.tolist() for index in batches)  # the generator, unused, keeps it from drawing from the global one
    return iter(DataLoader(images, batch_sampler=order, num_workers=workers, generator=torch.Generator()))


class Normalize:
    """uint8 (B, 3, H, W) -> fp32 with mean 0 and deviation 1 per channel, channels-last; statistics of `images`.

    Taken from every tenth image, or fewer of a large set (64 MB): the sums are integers, so the result does not depend
    on the number of threads.
    """

    def __init__(self, images: Images):
        N, _, H, W = images.shape
        sample = images[:: max(10, N * 3 * H * W // 2**26)]
        total, squares, pixels = torch.zeros(3).long(), torch.zeros(3).long(), len(sample) * H * W
        for some in sample.split(256):
            some = some.int()  # 255 ** 2 fits, and torch sums integers in 64 bits
            total, squares = total + some.sum((0, 2, 3)).cpu(), squares + (some * some).sum((0, 2, 3)).cpu()
        mean = total.double() / pixels
        variance = squares.double() / pixels - mean**2
        self.mean = mean.float().view(1, 3, 1, 1)
        self.std = variance.clamp(min=1.0).sqrt().float().view(1, 3, 1, 1)
        self.sent: dict[tuple[torch.device, int], list[Tensor]] = {}

    def lines(self, images: Tensor) -> list[Tensor]:
        """Mean and deviation as a line of pixels each, sent to a device once: a copy in each step would make it wait.

        A line, because over the three numbers of a pixel alone a CPU's innermost loop is too short to be vectorised.
        """
        key = images.device, images.shape[3]
        if key not in self.sent:
            lines = (x.to(images.device).expand(1, 3, 1, images.shape[3]) for x in (self.mean, self.std))
            self.sent[key] = [x.contiguous(memory_format=torch.channels_last) for x in lines]
        return self.sent[key]

    def __call__(self, images: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty_like(images, dtype=torch.float32, memory_format=torch.channels_last)
        mean, std = self.lines(out)
        return out.copy_(images).sub_(mean).div_(std)


def padded_crop(images: Tensor, shift: Tensor, mirrored: Tensor, pad: int) -> Tensor:
    """Pad by reflection, cut out the window at `shift` (2, B), mirror where `mirrored` (B,), by gathering."""
    B, C, H, W = images.shape

    def lines(first: Tensor, n: int) -> Tensor:
        line = (first[:, None] - pad + torch.arange(n, device=images.device)).abs()
        return n - 1 - (n - 1 - line).abs()

    down, right = lines(shift[0], H), lines(shift[1], W)
    right = torch.where(mirrored[:, None], right.flip(1), right)
    down = down + H * torch.arange(B, device=images.device)[:, None]
    right = C * right[:, :, None] + torch.arange(C, device=images.device)
    rows = images.permute(0, 2, 3, 1).reshape(B * H, W * C).index_select(0, down.flatten()).view(B, H, W * C)
    columns = right.view(B, 1, W * C).expand_as(rows)
    return rows.gather(2, columns).view(B, H, W, C).permute(0, 3, 1, 2)


def resized_crop(images: Tensor, drawn: Tensor, mirrored: Tensor, size: int, scale: tuple[float, float]) -> Tensor:
    """A random box of each image (B, 3, H, W), resized to fp32 (B, 3, size, size) and mirrored where `mirrored` (B,).

    The box has `scale` of the area and a ratio of 3/4 to 4/3 (Szegedy et al., arXiv 1409.4842), from `drawn` (4, B),
    uniform in [0, 1); a box too long for the image is cut, where torchvision draws again. Bilinear, not antialiased:
    enough while boxes are hardly larger than `size`, and data/imagefolder.py sees to that.
    """
    area = scale[0] + (scale[1] - scale[0]) * drawn[0]
    ratio = (math.log(4 / 3) * (2 * drawn[1] - 1)).exp()
    centres = (torch.arange(size, device=images.device) + 0.5) / size

    def lines(length: Tensor, place: Tensor) -> Tensor:
        length = length.sqrt().clamp(max=1)
        return 2 * (((1 - length) * place)[:, None] + length[:, None] * centres) - 1  # grid_sample's -1 .. 1

    x, y = lines(area * ratio, drawn[2]), lines(area / ratio, drawn[3])
    x = torch.where(mirrored[:, None], x.flip(1), x)
    grid = torch.stack(torch.broadcast_tensors(x[:, None, :], y[:, :, None]), dim=3)
    return F.grid_sample(images.float(), grid, padding_mode="border", align_corners=False)


def cut_out(images: Tensor, centre: Tensor, side: int) -> None:
    """Fill a square of `side` pixels around `centre` (2, B) with 0, the mean of normalised images, in place.

    Parts outside the image are lost, as in the paper (DeVries and Taylor, arXiv 1708.04552).
    """
    places = [torch.arange(n, device=images.device) - at[:, None] + side // 2
              for n, at in zip(images.shape[2:], centre, strict=True)]
    down, right = ((place >= 0) & (place < side) for place in places)
    images.masked_fill_((down[:, :, None] & right[:, None, :])[:, None], 0.0)


class TrainBatches:
    """An endless, stateless stream of augmented batches.

    Args:
        images, labels: uint8 (N, 3, H, W), see `place`, and int64 (N,).
        batch_size: images per update over all ranks; N // batch_size steps make an epoch, the rest waits for
            another epoch's shuffle.
        device: where the batches are wanted; default: where the images are.
        pad: pixels of reflected border for the random crop; default: a sixteenth of the side.
        scale, size: of images larger than size x size crop instead a random box with this range of areas, and resize.
        cutout: side of the square that is cut out of each image, in pixels; 0: none.
        workers: processes that decode, where the images are not decoded yet.
    """

    def __init__(
        self,
        images: Images,
        labels: Tensor,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        device: torch.device | None = None,
        pad: int | None = None,
        scale: tuple[float, float] | None = None,
        size: int | None = None,
        cutout: int = 0,
        workers: int = 0,
    ):
        N, _, H, _ = images.shape
        if batch_size > N:
            raise ValueError(f"a batch of {batch_size} images is more than the {N} there are: lower --batch-size")
        self.normalize = Normalize(images)
        self.images, self.labels, self.seed, self.workers = images, labels.cpu(), seed, workers
        self.cutout = cutout
        self.device, self.pad = device or labels.device, H // 16 if pad is None else pad
        self.size, self.scale = (size, scale) if scale and size and size < H else (H, None)
        self.batch_size, self.steps_per_epoch = batch_size, N // batch_size
        self.mine = slice(rank * batch_size // world_size, (rank + 1) * batch_size // world_size)
        self.mirrored_first = torch.rand(N, generator=self.generator("flip", 0)) < 0.5
        self.epoch, self.order = -1, torch.empty(0)
        self.next_step, self.reader = -1, iter(())
        self.quarantine: set[int] = set()  # images that are never drawn again

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
        drawn = self.order[position * self.batch_size : (position + 1) * self.batch_size]
        return torch.tensor([self.stand_in(i) for i in drawn.tolist()]) if self.quarantine else drawn

    def stand_in(self, index: int) -> int:
        """The image itself; for one in quarantine the next one in the data set that is not."""
        while index in self.quarantine:
            index = (index + 1) % len(self.labels)
        return index

    def leave_out(self, indices: Iterable[int]) -> None:
        """Put images into quarantine, in every epoch from now on. One image always stays."""
        self.quarantine |= set(sorted(indices)[: len(self.labels) - 1 - len(self.quarantine)])
        self.next_step = -1  # what has been read ahead may hold one of them

    def indices(self, step: int) -> Tensor:
        """This rank's share of them."""
        return self.global_indices(step)[self.mine]

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """This rank's share of batch number `step`: normalised fp32 images and int64 labels, on the device."""
        if step != self.next_step:  # the first one, or another than those which are being read ahead
            self.reader = stored(self.images, map(self.indices, count(step)), self.workers)
        self.next_step = step + 1
        images, index = send(next(self.reader), self.device), self.indices(step)
        mirrored = send(self.mirrored_first[index] ^ (step // self.steps_per_epoch % 2 == 1), self.device)
        random = self.generator("crop", step)
        if self.scale:
            drawn = send(torch.rand(4, self.batch_size, generator=random)[:, self.mine], self.device)
            crop = partial(resized_crop, size=self.size, scale=self.scale)
        else:
            shift = torch.randint(0, 2 * self.pad + 1, (2, self.batch_size), generator=random)
            drawn, crop = send(shift[:, self.mine], self.device), partial(padded_crop, pad=self.pad)
        shape = (len(images), 3, self.size, self.size)
        batch = torch.empty(shape, device=self.device, memory_format=torch.channels_last)
        # What fits into a CPU's cache goes 1.4 times as fast.
        piece = max(4, 2**19 // images[0].numel()) if self.device.type == "cpu" else len(images)
        for i in range(0, len(images), piece):
            some = slice(i, i + piece)
            self.normalize(crop(images[some], drawn[:, some], mirrored[some]), out=batch[some])
        if self.cutout:
            centre = torch.randint(0, self.size, (2, self.batch_size), generator=self.generator("cutout", step))
            cut_out(batch, send(centre[:, self.mine], self.device), self.cutout)
        return batch, send(self.labels[index], self.device)


def val_batches(
    images: Images,
    labels: Tensor,
    normalize: Normalize,
    *,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | None = None,
    workers: int = 0,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Every image exactly once over all ranks, in order: rank r takes images r, r + world_size, ...

    The ranks' shares differ by at most one image, so sums and counts have to be added up over ranks, never means.
    """
    device, shares = device or labels.device, torch.arange(rank, len(labels), world_size).split(batch_size)
    for index, x in zip(shares, stored(images, shares, workers), strict=True):
        yield normalize(send(x, device)), labels[index.to(labels.device)].to(device)
