"""
Synthetic images: a data set that needs no download. Code draws it, the same on every machine.

32x32 RGB, ten classes: five shapes (disc, ring, square, cross, triangle), each either striped or
checked. Place, size, rotation and colours are random and say nothing about the class. Rectangles of
clutter lie over the picture, and noise over everything. A linear classifier on the pixels stays
below half, because no pixel has the same meaning in two images. A convnet learns edges, then
shapes, and reaches above 95 %.

All arithmetic is in integers: a counter-based hash gives the random numbers, a table the sines and
cosines. In floating point, sin() and even torch.rand may differ in the last bit between machines,
and two machines would train on different data. A test compares the images with CHECKSUM.

    python data/synthetic.py     draws a sheet of examples to synthetic.png

Copy this file alone: it needs torch (and torchvision to save the sheet).
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

SIDE = 32
SHAPES = ("disc", "ring", "square", "cross", "triangle")
TEXTURES = ("striped", "checked")
CLASSES = [f"{texture} {shape}" for shape in SHAPES for texture in TEXTURES]
# SHA-256 of draw(0, 100, seed=0)
CHECKSUM = "a13e7d2b7ded1ff303e08b0d1acec6b343965651ff96c6dfe664582b4dc0f7ff"

# 256 times cosine and sine of 32 directions. None is near a tie: every libm rounds to the same one.
COSINES = torch.tensor([round(256 * math.cos(2 * math.pi * k / 32)) for k in range(32)])
SINES = torch.tensor([round(256 * math.sin(2 * math.pi * k / 32)) for k in range(32)])


def hashed(counter: Tensor, seed: int) -> Tensor:
    """Non-negative pseudo-random int64 below 2^31: a pure function of (counter, seed).

    This is the finalizer of splitmix64. int64 products wrap around in the same way on every
    machine. The masks make the right shift logical.
    """
    z = counter * -7046029254386353131 + (seed * -4658895280553007687 + 1) % (1 << 62)
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * -4658895280553007687
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * -7723592293110705685
    return ((z ^ ((z >> 31) & ((1 << 33) - 1))) >> 16) & ((1 << 31) - 1)


def shape_masks(u: Tensor, v: Tensor, radius: Tensor) -> Tensor:
    """One boolean mask per shape, stacked: (5, N, 32, 32).

    u, v: rotated coordinates, in eighths of a pixel, like the radii.
    """
    square_of_distance = u * u + v * v
    a = u.abs()
    b = v.abs()
    disc = square_of_distance <= radius * radius
    ring = disc & (4 * square_of_distance >= radius * radius)
    square = torch.maximum(a, b) * 5 <= 4 * radius
    cross = (torch.minimum(a, b) * 3 <= radius) & (torch.maximum(a, b) <= radius)
    # 4/7 is near tan 30 degrees: equilateral, point up.
    triangle = (a * 7 <= (v + radius) * 4) & (2 * v <= radius)
    return torch.stack([disc, ring, square, cross, triangle])


def draw(first: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images number first .. first + count: uint8 (count, 3, 32, 32) and int64 labels (count,)."""
    index = torch.arange(first, first + count)
    field = iter(range(1000))

    def number(low: int, high: int, *shape: int) -> Tensor:
        """Uniform integers in [low, high), (count, *shape, 1, 1), from the next random field."""
        lanes = math.prod(shape)
        counter = (index[:, None] * 1000 + next(field)) * 64 + torch.arange(lanes)
        return (low + hashed(counter, seed) % (high - low)).view(count, *shape, 1, 1)

    labels = (hashed(index, seed + 1) % len(CLASSES)).long()
    middles = torch.arange(SIDE) * 8 + 4  # of the pixels, in eighths of a pixel
    y, x = torch.meshgrid(middles, middles, indexing="ij")

    # The object: place, size and rotation. The texture has the object's rotation.
    dx = x - number(80, 176)
    dy = y - number(80, 176)
    angle = number(0, 32)
    u = (dx * COSINES[angle] + dy * SINES[angle]) >> 8
    v = (dy * COSINES[angle] - dx * SINES[angle]) >> 8
    radius = number(56, 96)  # 7 to 12 pixels
    inside = shape_masks(u, v, radius)[labels // 2, torch.arange(count)]
    period = number(16, 28)  # 2 to 3.5 pixels a band
    bands_u = (u + 1024) // period
    bands_v = (v + 1024) // period
    bright = torch.where((labels % 2 == 0)[:, None, None], bands_u & 1, (bands_u + bands_v) & 1)

    # Colours: the background is a gradient; the object has two tones, half the range apart.
    background = number(0, 200, 3) + (x * number(-40, 40, 3) + y * number(-40, 40, 3)) // 256
    tone = number(0, 256, 3)
    tones = torch.where(bright[:, None] == 1, tone, (tone + 128) % 256)
    image = torch.where(inside[:, None], tones, background)

    for _ in range(5):  # clutter lies over the object too
        left = number(0, 240)
        top = number(0, 240)
        in_columns = (x >= left) & (x < left + number(16, 64))
        in_rows = (y >= top) & (y < top + number(16, 64))
        image = torch.where((in_columns & in_rows)[:, None], number(0, 256, 3), image)

    pixels = index[:, None] * (3 * SIDE * SIDE) + torch.arange(3 * SIDE * SIDE)
    noise = (hashed(pixels, seed + 2) % 65 - 32).view(count, 3, SIDE, SIDE)
    return (image + noise).clamp(0, 255).to(torch.uint8), labels


def load(train_size: int = 20_000, val_size: int = 2_000, seed: int = 0):
    """Return ((train images, labels), (val images, labels), class names).

    Images are uint8 (N, 3, 32, 32).
    """

    def split(first: int, size: int) -> tuple[Tensor, Tensor]:
        # Larger temporaries leave the CPU's cache: 2.7 times as long.
        starts = range(first, first + size, 100)
        chunks = [draw(start, min(100, first + size - start), seed) for start in starts]
        images, labels = zip(*chunks, strict=True)
        return torch.cat(images), torch.cat(labels)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small operations: beside other work two threads wait for each other
    try:
        return split(0, train_size), split(train_size, val_size), CLASSES
    finally:
        torch.set_num_threads(threads)


def checksum(images: Tensor, labels: Tensor) -> str:
    """SHA-256 of the bytes of uint8 images and int64 labels."""
    return hashlib.sha256(bytes(images.flatten().tolist()) + bytes(labels.tolist())).hexdigest()


if __name__ == "__main__":
    from torchvision.utils import make_grid, save_image

    images, labels = draw(0, 100, seed=0)
    save_image(make_grid(images[labels.argsort()].float() / 255, nrow=10), "synthetic.png")
    print(f"wrote synthetic.png: the first 100 images in the order of their classes {CLASSES}")
    print(f"sha256 {checksum(images, labels)}, as recorded: {checksum(images, labels) == CHECKSUM}")
