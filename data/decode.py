# SPDX-License-Identifier: MIT (finite 4.0.0, 2026-11-28)
"""
Decode: one image file, as a viewer shows it, in RGB and of the wanted size.

Training and prediction must decode alike: the same weights give other answers for an image that is
turned, or white where 16 bits became 8 by clipping.

Paste::

    from PIL import Image
    from decode import Crop, read
    Image.linear_gradient("L").save("a.png")
    image = read("a.png", Crop(short=64, side=56))  # the short side becomes 64; the centre of 56
    print(image.shape, image.float().mean())  # uint8 (3, 56, 56)

Pillow converts unusual files to RGB: greyscale, CMYK, palette, the first frame of an animation.
What is transparent gets a white ground. EXIF's rotation is applied; torchvision ignores it. Gray
pixels of 16 or 32 bits are taken for 8, 10, 12, 14 or 16 bits, by the largest value: a camera
writes 12 bits into 16, which would be black. A JPEG that lacks its last bytes is read, if no more
than an eighth of its rows is missing. decode() says which of these it saw.

Unreadable are images above 179 megapixels (Pillow's limit), files that are not regular (to open a
pipe is to wait for its writer), fractions, gray pixels beyond 16 bits, colours of 16 bits of which
only the lowest are used (Pillow drops them), and PostScript, which is a program.

JPEGs are decoded at 1/2, 1/4 or 1/8 of their size, and others are reduced, if the result has at
least twice the wanted size: then photographs have a PSNR of 42 to 47 dB against the full decode; at
once the wanted size it is 36 to 39. torch resizes: within 2 of 255 of Pillow's bilinear filter, 2.3
times as fast.

Copy this file alone: it needs torch, and Pillow, which comes with torchvision.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset

CUT = "without their last bytes"
LONG = "more than twice as long as wide (their ends are cut)"
CLEAR = "transparent (on white)"
BAND = 2**22  # pixels that are converted at once: a large image is not held twice


class Unreadable(ValueError):
    """One image that cannot be decoded: what Pillow says of it."""


class Crop(NamedTuple):
    """The image made from a file: the short side becomes `short`, then the centre square is cut."""

    short: int
    side: int
    only: str = ""  # name of a set whose images all have this size: nothing is resized


class Files(Dataset):
    """Replaces the tensor of images (N, 3, S, S). files[i] and files[a:b:c] decode, into uint8."""

    def __init__(self, paths: list[str], crop: Crop):
        self.paths, self.crop, self.shape = paths, crop, (len(paths), 3, crop.side, crop.side)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int | slice) -> Tensor:
        if isinstance(i, slice):
            return torch.stack([self[k] for k in range(len(self))[i]])
        data, _ = decode(self.paths[i], self.crop)
        pixels = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(self.crop.side, -1, 3)
        return pixels.permute(2, 0, 1)


def image_file(path: str) -> Image.Image:
    """Open a regular file. A pipe would wait for its writer, a device may give bytes for ever."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError("this is not a regular file")
    return Image.open(path)


def own_side(paths: list[str]) -> int | None:
    """The side of these images if all readable ones are square and of one size, else None.

    Reads headers only.
    """
    sizes = set()
    for path in paths:
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with image_file(path) as image:
                sizes.add(image.size)
    width, height = sizes.pop() if len(sizes) == 1 else (0, 1)
    return width if width == height else None


def decode(path: str, crop: Crop) -> tuple[bytes, list[str]]:
    """(RGB, side x side x 3; what is unusual in the file).

    Raises what Pillow raises: for a broken file any exception.
    """
    unusual = []
    with image_file(path) as image:
        if image.format == "EPS":
            raise ValueError("PostScript is a program, and this reader runs none")
        if crop.only and image.size != (crop.side, crop.side):
            size, wanted = "{}x{}".format(*image.size), f"{crop.side}x{crop.side}"
            raise ValueError(f"{size} pixels; {crop.only} images are {wanted}")
        if max(image.size) > 2 * min(image.size):
            unusual.append(LONG)
        keeps_upper_8 = ";16" in str(image.tile) and image.mode.startswith("RGB")
        try:
            load_pixels(image, crop)
        except OSError:
            if image.format not in ("JPEG", "MPO"):
                raise
            image = without_its_end(path, crop)
            unusual.append(CUT)
        square = centre_square(image, crop, unusual)
        if keeps_upper_8 and 0 < max(high for _, high in square.getextrema()) < 2**6:
            raise ValueError("it uses the lowest of its 16 bits: save 8 bits, or all 16")
        if "exif" in image.info or "xmp" in image.info:
            square.info = image.info
            ImageOps.exif_transpose(square, in_place=True)
    pixels = square.tobytes()
    if not square.width == crop.short == crop.side:
        pixels = resized(pixels, square.width, crop)
    return pixels, unusual


def load_pixels(image: Image.Image, crop: Crop) -> None:
    """Read the pixels. The JPEG decoder itself halves, at most three times."""
    image.draft(None, (2 * crop.short, 2 * crop.short))
    image.load()


def without_its_end(path: str, crop: Crop) -> Image.Image:
    """A JPEG that is cut short. Given an end, the decoder leaves what is missing gray."""
    image = Image.open(io.BytesIO(Path(path).read_bytes() + b"\xff\xd9"))
    load_pixels(image, crop)
    seven_eighths = image.height * 7 // 8
    row = image.convert("RGB").crop((0, seven_eighths, image.width, seven_eighths + 1))
    if row.getextrema() == ((128, 128),) * 3:
        raise ValueError("more than its last bytes is missing")
    return image


def centre_square(image: Image.Image, crop: Crop, unusual: list[str]) -> Image.Image:
    """The centre in RGB, reduced if it stays twice as large as wanted. Adds to `unusual`.

    It is made band by band: a PNG of 144 megapixels takes 0.6 GB, and whole it took 1.8.
    """
    side = min(image.size)
    factor = max(1, side // (2 * crop.short))
    side -= side % factor
    left, top = (image.width - side) // 2, (image.height - side) // 2
    convert = to_rgb
    if image.mode == "CMYK":
        unusual.append("CMYK")
    elif image.mode[0] in "1LI" and image.mode != "LAB":
        unusual.append("gray")
    if image.mode[0] in "IF":
        convert = from_16_bits(image, unusual)
    square = Image.new("RGB", (side // factor, side // factor))
    rows = max(1, BAND // (side * factor)) * factor
    for y in range(0, side, rows):
        band = image.crop((left, top + y, left + side, top + min(side, y + rows)))
        band = convert(band)
        if band.mode == "RGBA":
            if band.getextrema()[3][0] < 255 and CLEAR not in unusual:
                unusual.append(CLEAR)
            white = Image.new("RGBA", band.size, "white")
            band = Image.alpha_composite(white, band).convert("RGB")
        square.paste(band.reduce(factor), (0, y // factor))
    return square


def to_rgb(image: Image.Image) -> Image.Image:
    """RGB, or RGBA where some of it may be transparent."""
    clear = image.mode[-1] in "Aa" or "transparency" in image.info
    return image.convert("RGBA" if clear else "RGB")


def from_16_bits(image: Image.Image, unusual: list[str]) -> Callable:
    """The function that makes RGB of a part of this gray image: the upper 8 of the bits in use."""
    low, high = image.getextrema()
    bits = max(8, int(high).bit_length() + int(high).bit_length() % 2)
    if image.mode == "F" or low < 0 or bits > 16:
        raise ValueError("pixels of 32 bits, whose range is unknown: save 8 or 16 bits")
    if bits < 16:
        unusual.append(f"of {bits} bits in 16")
    scale = 2.0 ** (8 - bits)

    def convert(part: Image.Image) -> Image.Image:
        part.info.pop("transparency", None)
        return part.convert("I").point(lambda value: value * scale).convert("L").convert("RGB")

    return convert


def resized(pixels: bytes, side: int, crop: Crop) -> bytes:
    """Resize and crop a square of `side` x `side` x 3.

    torch has vectorised code for uint8 with channels last.
    """
    image = torch.frombuffer(bytearray(pixels), dtype=torch.uint8)
    image = image.view(1, side, side, 3).permute(0, 3, 1, 2)
    image = F.interpolate(image, (crop.short, crop.short), mode="bilinear", antialias=True)
    first = (crop.short - crop.side) // 2
    kept = slice(first, first + crop.side)
    return image[0, :, kept, kept].permute(1, 2, 0).numpy().tobytes()  # side, side, 3


def read(path: str, crop: Crop) -> Tensor:
    """One image, uint8 (3, side, side). Raises Unreadable."""
    try:
        return Files([path], crop)[0]
    except Exception as error:  # for a broken file Pillow raises any kind
        raise Unreadable(f"{type(error).__name__}: {error}") from error
