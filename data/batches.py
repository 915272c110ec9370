"""
Batches: gathered and augmented on the device. Each batch is a pure function of (seed, step).

A data loader with workers has a state that nobody can save: which worker holds which half-built batch. Here there is no
state. `TrainBatches.at(step)` computes the same batch at every call. A resumed run continues with the batch that it
would have seen. A bad step can run again with the same images. Two ranks together see exactly the batch of one process:
every random draw is made for the whole global batch, and each rank takes its slice.

The augmentation works on the whole batch at once. A padded crop is a gather of rows and a gather of columns; their
indices reflect at the border, and run backwards for a mirrored image. A random resized crop, for images larger than the
network wants, is one bilinear grid_sample with a box for each image.
The flip alternates: an image that is mirrored in one epoch is not mirrored in the next (Jordan, arXiv 2404.00498). So
every two epochs show both views; a random flip would leave this to chance.

The images are on the device. If they are too many, they are in a file mapped into memory, or worker processes decode
them when needed. In all three cases the batches are the same to the bit.

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

Images = Tensor | Dataset  # a Dataset has a shape, and decodes images[i] and images[a:b:c] at each access


def place(images: Images, device: torch.device, share: float = 0.25) -> Images:
    """The images on the device, channels last, if they take at most `share` of its free memory; else unchanged."""
    if not isinstance(images, Tensor):
        return images
    if device.type == "cuda" and images.nbytes > share * torch.cuda.mem_get_info(device)[0]:
        return images
    return images.to(device, memory_format=torch.channels_last)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies to the device. A copy to a GPU starts from pinned memory, so that the host does not wait."""
    pin = device.type == "cuda" != tensor.device.type
    return (tensor.pin_memory() if pin else tensor).to(device, non_blocking=True)


def stored(images: Images, batches: Iterable[Tensor], workers: int) -> Iterator[Tensor]:
    """The uint8 images of each of these index batches: gathered, or decoded by processes that read ahead."""
    if isinstance(images, Tensor):
        pixels = images.permute(0, 2, 3, 1)  # N, H, W, 3, as stored: an image is copied in one piece
        return (pixels.index_select(0, send(index, images.device)).permute(0, 3, 1, 2) for index in batches)
    order = (index.tolist() for index in batches)  # without the unused generator, DataLoader draws from the global one
    return iter(DataLoader(images, batch_sampler=order, num_workers=workers, generator=torch.Generator()))


class Normalize:
    """uint8 (B, 3, H, W) -> fp32 with mean 0 and deviation 1 per channel, channels-last, by the statistics of `images`.

    The statistics are those of every tenth image, or of fewer in a large set (64 MB). The sums are integers, so they do
    not depend on the number of threads.
    """

    def __init__(self, images: Images):
        N, _, H, W = images.shape
        sample = images[:: max(10, N * 3 * H * W // 2**26)]
        total, squares, pixels = torch.zeros(3).long(), torch.zeros(3).long(), len(sample) * H * W
        for some in sample.split(256):
            some = some.int()  # 255 ** 2 fits into 32 bits, and torch sums integers in 64
            total, squares = total + some.sum((0, 2, 3)).cpu(), squares + (some * some).sum((0, 2, 3)).cpu()
        mean = total.double() / pixels
        variance = squares.double() / pixels - mean**2
        self.mean = mean.float().view(1, 3, 1, 1)
        self.std = variance.clamp(min=1.0).sqrt().float().view(1, 3, 1, 1)
        self.sent: dict[tuple[torch.device, int], list[Tensor]] = {}

    def lines(self, images: Tensor) -> list[Tensor]:
        """Mean and deviation, each as a line of pixels (1, 3, 1, W). They are sent to a device once, not in each step.

        A line, because a CPU cannot vectorise an innermost loop over the three numbers of one pixel.
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
    """(B, C, H, W): pad by reflection, cut out the window at `shift` (2, B), mirror where `mirrored` (B,) is True."""
    B, C, H, W = images.shape

    def lines(first: Tensor, n: int) -> Tensor:
        line = (first[:, None] - pad + torch.arange(n, device=images.device)).abs()
        return n - 1 - (n - 1 - line).abs()

    down, right = lines(shift[0], H), lines(shift[1], W)  # B, H; B, W: which row and column each pixel comes from
    right = torch.where(mirrored[:, None], right.flip(1), right)
    down = down + H * torch.arange(B, device=images.device)[:, None]  # B, H: rows of the whole batch
    right = C * right[:, :, None] + torch.arange(C, device=images.device)  # B, W, C
    rows = images.permute(0, 2, 3, 1).reshape(B * H, W * C).index_select(0, down.flatten()).view(B, H, W * C)
    columns = right.view(B, 1, W * C).expand_as(rows)
    return rows.gather(2, columns).view(B, H, W, C).permute(0, 3, 1, 2)  # B, C, H, W


def resized_crop(images: Tensor, drawn: Tensor, mirrored: Tensor, size: int, scale: tuple[float, float]) -> Tensor:
    """A random box of each image (B, 3, H, W), resized to fp32 (B, 3, size, size) and mirrored where `mirrored` (B,).

    The box has `scale` of the area and a ratio of 3/4 to 4/3 (Szegedy et al., arXiv 1409.4842), from `drawn` (4, B),
    uniform in [0, 1). A box too long for the image is cut; torchvision draws again. Bilinear without antialiasing is
    enough for boxes hardly larger than `size`, and data/imagefolder.py stores images of that size.
    """
    area = scale[0] + (scale[1] - scale[0]) * drawn[0]
    ratio = (math.log(4 / 3) * (2 * drawn[1] - 1)).exp()
    centres = (torch.arange(size, device=images.device) + 0.5) / size

    def lines(length: Tensor, place: Tensor) -> Tensor:
        length = length.sqrt().clamp(max=1)
        return 2 * (((1 - length) * place)[:, None] + length[:, None] * centres) - 1  # B, size; grid_sample's -1 .. 1

    x, y = lines(area * ratio, drawn[2]), lines(area / ratio, drawn[3])
    x = torch.where(mirrored[:, None], x.flip(1), x)
    grid = torch.stack(torch.broadcast_tensors(x[:, None, :], y[:, :, None]), dim=3)  # B, size, size, 2
    return F.grid_sample(images.float(), grid, padding_mode="border", align_corners=False)


def cut_out(images: Tensor, centre: Tensor, side: int) -> None:
    """Fill a square of `side` pixels around `centre` (2, B) with 0, the mean of normalised images, in place.

    The square may reach beyond the image, as in the paper (DeVries and Taylor, arXiv 1708.04552).
    """
    places = [torch.arange(n, device=images.device) - at[:, None] + side // 2
              for n, at in zip(images.shape[2:], centre, strict=True)]
    down, right = ((place >= 0) & (place < side) for place in places)
    images.masked_fill_((down[:, :, None] & right[:, None, :])[:, None], 0.0)


class TrainBatches:
    """An endless, stateless stream of augmented batches.

    Args:
        images, labels: uint8 (N, 3, H, W), see `place`, and int64 (N,).
        batch_size: images per update over all ranks. An epoch has N // batch_size steps and leaves out the remaining
            images, which differ from epoch to epoch.
        device: where the batches are wanted; default: where the labels are.
        pad: pixels of reflected border for the random crop; default: a sixteenth of the side.
        scale, size: where images are larger than size x size, crop a random box with this range of areas and resize it.
        augment: "crop", as above, and the flip; or "flip": the centre size x size and the flip, for models that draw.
        cutout: side of the square that is cut out of each image, in pixels; 0: none.
        small_until: batches before this step hold the inner 7/8 of each side, 28x28 of 32x32. A convnet takes 3/4 of
            the time for them. Set it where the length of the run is known.
        workers: processes that decode, if the images are not decoded yet.
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
        augment: str = "crop",
        cutout: int = 0,
        small_until: int = 0,
        workers: int = 0,
    ):
        N, _, H, _ = images.shape
        if batch_size > N:
            raise ValueError(f"a batch of {batch_size} images is more than the {N} there are: lower --batch-size")
        if augment not in ("crop", "flip"):
            raise ValueError(f"unknown augmentation {augment!r}: choose crop or flip")
        self.normalize = Normalize(images)
        self.images, self.labels, self.seed, self.workers = images, labels.cpu(), seed, workers
        self.cutout, self.small_until = cutout, small_until
        self.device, self.pad = device or labels.device, H // 16 if pad is None else pad
        self.size, self.scale = (size, scale) if scale and size and size < H else (H, None)
        self.centre = slice(None)  # the rows and columns that are kept before the crop
        if augment == "flip":
            self.pad, self.scale, self.size = 0, None, min(H, size or H)
            self.centre = slice((H - self.size) // 2, (H - self.size) // 2 + self.size)
        self.batch_size, self.steps_per_epoch = batch_size, N // batch_size
        self.mine = slice(rank * batch_size // world_size, (rank + 1) * batch_size // world_size)
        self.mirrored_first = torch.rand(N, generator=self.generator("flip", 0)) < 0.5
        self.epoch, self.order = -1, torch.empty(0)
        self.next_step, self.reader = -1, iter(())
        self.quarantine: set[int] = set()  # images that are never drawn again

    def generator(self, purpose: str, number: int) -> torch.Generator:
        """A fresh CPU generator for each purpose and number, so that no draw depends on an earlier one.

        The seed is hashed, because torch's CPU generator keeps only its low 32 bits: seed * 2**40 + n would be n.
        """
        return torch.Generator().manual_seed(random.Random(f"{self.seed} {purpose} {number}").getrandbits(32))

    def global_indices(self, step: int) -> Tensor:
        """The images of batch number `step`, over all ranks: int64 (batch_size,), on the CPU."""
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
        """This rank's share of global_indices."""
        return self.global_indices(step)[self.mine]

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """This rank's share of batch number `step`: normalised fp32 images and int64 labels, on the device."""
        if step != self.next_step:  # the first step, or not the step that is being read ahead
            self.reader = stored(self.images, map(self.indices, count(step)), self.workers)
        self.next_step = step + 1
        images, index = send(next(self.reader), self.device)[:, :, self.centre, self.centre], self.indices(step)
        mirrored = send(self.mirrored_first[index] ^ (step // self.steps_per_epoch % 2 == 1), self.device)
        random = self.generator("crop", step)
        if self.scale:
            drawn = send(torch.rand(4, self.batch_size, generator=random)[:, self.mine], self.device)
            crop = partial(resized_crop, size=self.size, scale=self.scale)
        else:
            shift = torch.randint(0, 2 * self.pad + 1, (2, self.batch_size), generator=random)
            drawn, crop = send(shift[:, self.mine], self.device), partial(padded_crop, pad=self.pad)
        margin = self.size // 16 if step < self.small_until else 0
        inner = slice(margin, self.size - margin)
        shape = (len(images), 3, *[self.size - 2 * margin] * 2)
        batch = torch.empty(shape, device=self.device, memory_format=torch.channels_last)
        # Pieces that fit into a CPU's cache are 1.4 times as fast.
        piece = max(4, 2**19 // images[0].numel()) if self.device.type == "cpu" else len(images)
        for i in range(0, len(images), piece):
            some = slice(i, i + piece)
            cropped = crop(images[some], drawn[:, some], mirrored[some])
            self.normalize(cropped[:, :, inner, inner], out=batch[some])
        if self.cutout:
            centre = torch.randint(0, self.size, (2, self.batch_size), generator=self.generator("cutout", step))
            cut_out(batch, send(centre[:, self.mine] - margin, self.device), self.cutout)
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

    The ranks' shares may differ by one image, so add up sums and counts over ranks, never means.
    """
    device, shares = device or labels.device, torch.arange(rank, len(labels), world_size).split(batch_size)
    for index, x in zip(shares, stored(images, shares, workers), strict=True):
        yield normalize(send(x, device)), labels[index.to(labels.device)].to(device)
