"""
Batches: gathered and augmented on the device. Each batch is a pure function of (seed, step).

A data loader with workers has a state that nobody can save: which worker holds which half-built
batch. Here there is no state. `TrainBatches.at(step)` computes the same batch at every call. A
resumed run continues with the batch that it would have seen. A bad step can run again with the same
images. Two ranks together see exactly the batch of one process: every random draw is made for the
whole global batch, and each rank takes its slice.

The augmentation works on the whole batch at once. A padded crop is a gather of rows and a gather of
columns; their indices reflect at the border, and run backwards for a mirrored image. A random
resized crop, for images larger than the network wants, is one bilinear grid_sample with a box for
each image. The flip alternates: an image that is mirrored in one epoch is not mirrored in the next
(Jordan, arXiv 2404.00498). So every two epochs show both views; a random flip would leave this to
chance.

The images are on the device. If they do not fit, they are in a memory-mapped file, or worker
processes decode them when needed. In all three cases the batches are bit-identical.

Images have any number of channels. Labels are int64 classes (N,), or float targets (N,) or (N, T).

Copy this file alone: it needs torch.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

# uint8 (N, C, H, W). A torch Dataset has a shape; images[i] and images[a:b:c] decode.
Images = Tensor | Dataset


def place(images: Images, device: torch.device, share: float = 0.25) -> Images:
    """Move the images to the device, channels last, if they take at most `share` of its free
    memory.

    Else they stay where they are.
    """
    if not isinstance(images, Tensor):
        return images
    if device.type == "cuda" and images.nbytes > share * torch.cuda.mem_get_info(device)[0]:
        return images
    return images.to(device, memory_format=torch.channels_last)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to the device. A copy to a GPU starts from pinned memory: the host does not wait.

    Elsewhere the host waits: MPS may read its memory after it is freed (pytorch #189690).
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def stored(images: Images, batches: Iterable[Tensor], workers: int) -> Iterator[Tensor]:
    """Yield the uint8 images of each batch of indices.

    They are gathered, or processes that read ahead decode them.
    """
    if isinstance(images, Tensor):
        pixels = images.permute(0, 2, 3, 1)  # N, H, W, C: an image is copied in one piece
        for index in batches:
            check_file(images)
            yield pixels.index_select(0, send(index, images.device)).permute(0, 3, 1, 2)
    else:
        order = (index.tolist() for index in batches)
        unused = torch.Generator()  # without one, DataLoader draws from the global generator
        yield from DataLoader(images, batch_sampler=order, num_workers=workers, generator=unused)


def statistics(images: Images) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel, in 0..255.

    This reads every tenth image, or fewer of a large set (64 MB). The sums are integers, so they do
    not depend on the number of threads. A deviation is at least 1.
    """
    N, C, H, W = images.shape
    sample = images[:: max(10, N * C * H * W // 2**26)]
    total = torch.zeros(C, dtype=torch.int64)
    squares = torch.zeros(C, dtype=torch.int64)
    for some in sample.split(256):
        some = some.int()  # 255 ** 2 fits into 32 bits, and torch sums integers in 64
        total += some.sum((0, 2, 3)).cpu()
        squares += (some * some).sum((0, 2, 3)).cpu()
    pixels = len(sample) * H * W
    mean = total.double() / pixels
    variance = squares.double() / pixels - mean**2
    return mean.float().tolist(), variance.clamp(min=1.0).sqrt().float().tolist()


class ImagesLost(OSError):
    """The file that holds the images became shorter. To read on would end the process (SIGBUS)."""


def check_file(images: Tensor) -> None:
    """Raise ImagesLost where `images` are mapped from a file that was cut since."""
    storage = images.untyped_storage()
    file = storage.filename
    if file and os.path.exists(file) and os.path.getsize(file) < storage.nbytes():
        raise ImagesLost(f"{file} was cut while the run read it: --resume auto builds it again")


class Normalize:
    """uint8 (B, C, H, W) -> fp32 with mean 0 and deviation 1 per channel, channels-last.

    mean, std: a number for each channel, in 0..255. See `statistics`.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]):
        self.mean = torch.tensor(mean).view(1, -1, 1, 1)
        self.std = torch.tensor(std).view(1, -1, 1, 1)
        self.sent: dict[tuple[torch.device, int], list[Tensor]] = {}

    def lines(self, images: Tensor) -> list[Tensor]:
        """Mean and deviation, each as a line of pixels (1, C, 1, W), sent to a device once.

        A line, because a CPU cannot vectorise an innermost loop over the few numbers of one pixel.
        """
        key = images.device, images.shape[3]
        if key not in self.sent:
            lines = [x.to(images.device).expand(-1, -1, 1, key[1]) for x in (self.mean, self.std)]
            self.sent[key] = [x.contiguous(memory_format=torch.channels_last) for x in lines]
        return self.sent[key]

    def __call__(self, images: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            layout = torch.channels_last
            out = torch.empty_like(images, dtype=torch.float32, memory_format=layout)
        mean, std = self.lines(out)
        return out.copy_(images).sub_(mean).div_(std)


def padded_crop(images: Tensor, shift: Tensor, mirrored: Tensor, pad: int) -> Tensor:
    """(B, C, H, W): pad by reflection, cut out the window at `shift` (2, B), mirror some.

    `mirrored` (B,) says which.
    """
    B, C, H, W = images.shape

    def lines(first: Tensor, n: int) -> Tensor:
        line = (first[:, None] - pad + torch.arange(n, device=images.device)).abs()
        return n - 1 - (n - 1 - line).abs()

    # Which row and which column each pixel comes from: B, H and B, W.
    down = lines(shift[0], H)
    right = lines(shift[1], W)
    right = torch.where(mirrored[:, None], right.flip(1), right)
    down = down + H * torch.arange(B, device=images.device)[:, None]  # rows of the whole batch
    right = C * right[:, :, None] + torch.arange(C, device=images.device)  # B, W, C
    rows = images.permute(0, 2, 3, 1).reshape(B * H, W * C)
    rows = rows.index_select(0, down.flatten()).view(B, H, W * C)
    columns = right.view(B, 1, W * C).expand_as(rows)
    return rows.gather(2, columns).view(B, H, W, C).permute(0, 3, 1, 2)  # B, C, H, W


def resized_crop(
    images: Tensor, drawn: Tensor, mirrored: Tensor, size: int, scale: tuple[float, float]
) -> Tensor:
    """A random box of each image (B, C, H, W), resized to fp32 (B, C, size, size), some mirrored.

    The box has `scale` of the area and a ratio of 3/4 to 4/3 (Szegedy et al., arXiv 1409.4842),
    from `drawn` (4, B), uniform in [0, 1). `mirrored` (B,) says which are mirrored. A box too long
    for the image is cut; torchvision draws again. Bilinear without antialiasing is enough for boxes
    hardly larger than `size`, and data/decoded_cache.py stores images of that size.
    """
    area = scale[0] + (scale[1] - scale[0]) * drawn[0]
    ratio = (math.log(4 / 3) * (2 * drawn[1] - 1)).exp()
    centres = (torch.arange(size, device=images.device) + 0.5) / size

    def lines(length: Tensor, place: Tensor) -> Tensor:
        """(B, size), in grid_sample's -1 .. 1."""
        length = length.sqrt().clamp(max=1)
        return 2 * (((1 - length) * place)[:, None] + length[:, None] * centres) - 1

    x = lines(area * ratio, drawn[2])
    y = lines(area / ratio, drawn[3])
    x = torch.where(mirrored[:, None], x.flip(1), x)
    grid = torch.broadcast_tensors(x[:, None, :], y[:, :, None])
    grid = torch.stack(grid, dim=3)  # B, size, size, 2
    return F.grid_sample(images.float(), grid, padding_mode="border", align_corners=False)


def cut_out(images: Tensor, centre: Tensor, side: int) -> None:
    """Fill a square of `side` pixels around `centre` (2, B) with 0, in place.

    0 is the mean of normalised images. The square may reach beyond the image, as in the paper
    (DeVries and Taylor, arXiv 1708.04552).
    """

    def inside(n: int, at: Tensor) -> Tensor:
        """(B, n): which rows or columns the square covers."""
        place = torch.arange(n, device=images.device) - at[:, None] + side // 2
        return (place >= 0) & (place < side)

    down = inside(images.shape[2], centre[0])
    right = inside(images.shape[3], centre[1])
    images.masked_fill_((down[:, :, None] & right[:, None, :])[:, None], 0.0)


class TrainBatches:
    """An endless, stateless stream of augmented batches.

    Args:
        images, labels: uint8 (N, C, H, W), see `place`; int64 (N,), or float (N,) or (N, T).
        batch_size: images per update over all ranks. An epoch shows every image: its last batch is
            filled up with images from the epoch's start.
        device: of the batches; default: that of the labels.
        normalize: default: by the statistics of `images`.
        pad: pixels of reflected border for the random crop; default: a sixteenth of the side.
        scale, size: where images are larger than size x size, crop a random box with this range of
            areas and resize it.
        augment: "crop", as above, and the flip; or "flip": the centre size x size and the flip, for
            models that draw.
        cutout: side of the square that is cut out of each image, in pixels; 0: none.
        workers: processes that decode, if the images are not decoded yet.

    Raises ValueError for arguments that cannot work.
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
        normalize: Normalize | None = None,
        pad: int | None = None,
        scale: tuple[float, float] | None = None,
        size: int | None = None,
        augment: str = "crop",
        cutout: int = 0,
        workers: int = 0,
    ):
        N, _, H, _ = images.shape
        if batch_size > N:
            raise ValueError(
                f"a batch of {batch_size} images is more than all {N}: pass a smaller --batch-size"
            )
        if augment not in ("crop", "flip"):
            raise ValueError(f"unknown augmentation {augment!r}: choose crop or flip")
        self.normalize = normalize or Normalize(*statistics(images))
        self.images = images
        self.labels = labels.cpu()
        self.seed = seed
        self.workers = workers
        self.device = device or labels.device
        self.pad = H // 16 if pad is None else pad
        self.size = H
        self.scale = None
        if scale and size and size < H:
            self.size = size
            self.scale = scale
        self.centre = slice(None)  # the rows and columns that are kept before the crop
        if augment == "flip":
            self.pad = 0
            self.scale = None
            self.size = min(H, size or H)
            first = (H - self.size) // 2
            self.centre = slice(first, first + self.size)
        if cutout >= self.size:
            raise ValueError(
                f"--cutout {cutout} leaves nothing of images of {self.size}x{self.size} pixels"
            )
        self.cutout = cutout
        self.small_until = 0
        self.batch_size = batch_size
        self.steps_per_epoch = -(-N // batch_size)
        self.mine = slice(rank * batch_size // world_size, (rank + 1) * batch_size // world_size)
        self.mirrored_first = torch.rand(N, generator=self.generator("flip", 0)) < 0.5
        self.epoch = -1
        self.order = torch.empty(0)
        self.next_step = -1
        self.reader: Iterator[Tensor] = iter(())
        self.quarantine: set[int] = set()  # images that are never drawn again

    def start_small(self, steps: int) -> None:
        """The first `steps` batches hold the inner 7/8 of each side, 28x28 of 32x32.

        A convnet takes 3/4 of the time for them. A run calls this after it has timed a batch: only
        then does it know its number of steps.
        """
        inner = self.size - 2 * (self.size // 16)
        if steps and self.cutout >= inner:
            raise ValueError(
                f"--cutout {self.cutout} leaves nothing of the first {steps} steps' images, which "
                f"are {inner}x{inner} pixels"
            )
        self.small_until = steps

    def generator(self, purpose: str, number: int) -> torch.Generator:
        """A fresh CPU generator for each purpose and number: no draw depends on an earlier one.

        The seed is hashed, because torch's CPU generator keeps only its low 32 bits:
        seed * 2**40 + n would be n.
        """
        hashed = random.Random(f"{self.seed} {purpose} {number}").getrandbits(32)
        return torch.Generator().manual_seed(hashed)

    def global_indices(self, step: int) -> Tensor:
        """The images of batch number `step`, over all ranks: int64 (batch_size,), on the CPU."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if epoch != self.epoch:
            self.epoch = epoch
            order = torch.randperm(len(self.labels), generator=self.generator("order", epoch))
            missing = self.steps_per_epoch * self.batch_size - len(order)
            self.order = torch.cat([order, order[:missing]])
        drawn = self.order[position * self.batch_size : (position + 1) * self.batch_size]
        if not self.quarantine:
            return drawn
        return torch.tensor([self.stand_in(i) for i in drawn.tolist()])

    def stand_in(self, index: int) -> int:
        """The image, or, if it is in quarantine, the next one that is not."""
        while index in self.quarantine:
            index = (index + 1) % len(self.labels)
        return index

    def leave_out(self, indices: Iterable[int]) -> None:
        """Put images into quarantine, in every epoch from now on. One image always stays."""
        room = len(self.labels) - 1 - len(self.quarantine)
        self.quarantine |= set(sorted(indices)[:room])
        self.next_step = -1  # what has been read ahead may hold one of them

    def indices(self, step: int) -> Tensor:
        """This rank's share of global_indices."""
        return self.global_indices(step)[self.mine]

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """This rank's share of batch number `step`, on the device: (images, labels).

        Images are normalised fp32 (B, C, H, W), channels last.
        """
        if step != self.next_step:  # the first step, or not the step that is being read ahead
            self.reader = stored(self.images, map(self.indices, count(step)), self.workers)
        self.next_step = step + 1
        images = send(next(self.reader), self.device)[:, :, self.centre, self.centre]
        index = self.indices(step)
        odd_epoch = step // self.steps_per_epoch % 2 == 1
        mirrored = send(self.mirrored_first[index] ^ odd_epoch, self.device)
        random = self.generator("crop", step)
        if self.scale:
            drawn = torch.rand(4, self.batch_size, generator=random)
            crop = partial(resized_crop, size=self.size, scale=self.scale)
        else:
            drawn = torch.randint(0, 2 * self.pad + 1, (2, self.batch_size), generator=random)
            crop = partial(padded_crop, pad=self.pad)
        drawn = send(drawn[:, self.mine], self.device)
        margin = self.size // 16 if step < self.small_until else 0
        inner = slice(margin, self.size - margin)
        side = self.size - 2 * margin
        shape = (len(images), images.shape[1], side, side)
        batch = torch.empty(shape, device=self.device, memory_format=torch.channels_last)
        piece = len(images)
        if self.device.type == "cpu":  # pieces that fit into its cache are 1.4 times as fast
            piece = max(4, 2**19 // images[0].numel())
        for i in range(0, len(images), piece):
            some = slice(i, i + piece)
            cropped = crop(images[some], drawn[:, some], mirrored[some])
            self.normalize(cropped[:, :, inner, inner], out=batch[some])
        if self.cutout:
            random = self.generator("cutout", step)
            centre = torch.randint(0, self.size, (2, self.batch_size), generator=random)
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
    device = device or labels.device
    shares = torch.arange(rank, len(labels), world_size).split(batch_size)
    for index, x in zip(shares, stored(images, shares, workers), strict=True):
        yield normalize(send(x, device)), labels[index.to(labels.device)].to(device)
