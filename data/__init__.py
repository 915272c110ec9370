"""Data: a loader returns ((train images, labels), (val images, labels), class names). Images are uint8 (N, 3, H, W)."""

import contextlib
import math
import os
import tempfile
import warnings
from pathlib import Path

import torch

from . import cifar10, imagefolder, synthetic

NAMES = ("cifar10", "imagefolder", "synthetic")
SCALE = {"imagefolder": (0.35, 1.0)}  # areas of the random resized crop; the other sets' images are padded and shifted


def load(name, folder, progress, image_size=None, max_bad_share=0.01, cache_dir=".cache", warn=warnings.warn):
    """(train, val, class names, name of what was loaded).

    name None: CIFAR-10 from `folder` or by download; the synthetic images if neither works.
    image_size: for imagefolder; the other sets' images are 32 x 32. cache_dir None: imagefolder streams, without cache.
    Raises FileNotFoundError and ValueError with a sentence that names the folder or file.
    """
    if folder and not Path(folder).is_dir():
        raise FileNotFoundError(f"--data-dir {folder} is not a folder")
    how = {"max_bad_share": max_bad_share, "progress": progress, "warn": warn}
    if name == "imagefolder":
        if not folder:
            raise FileNotFoundError("--dataset imagefolder needs --data-dir: a folder with train/<class>/ and val/")
        return *imagefolder.load(folder, image_size, cache_dir=cache_dir, **how), name
    if image_size not in (None, 32):
        raise ValueError(f"--image-size {image_size}: the images of {name or 'cifar10'} are 32 x 32")
    if name == "synthetic":
        return *synthetic.load(), "synthetic"

    def from_images(folder):
        """CIFAR-10 is 184 MB. Without a folder for the cache, one run's cache is temporary: its mapping stays valid."""
        cache = Path(cache_dir or ".cache")
        with tempfile.TemporaryDirectory() as temporary:
            with contextlib.suppress(OSError):
                cache.mkdir(parents=True, exist_ok=True)
            home = cache if os.access(cache, os.W_OK) else temporary
            return imagefolder.load(folder, 32, only="CIFAR-10", cache_dir=home, **how)

    try:
        return *cifar10.load(folder or ".cache", from_images), "cifar10"
    except FileNotFoundError:
        if name or folder:
            raise
        return *synthetic.load(), "synthetic"


def fingerprint(images, labels):
    """Sums by which a resumed run recognises its data. Of a very large set, only every n-th image is summed."""
    some = images[:: 1 + math.prod(images.shape) // 2**28]
    return {"images": len(images), "pixels": int(some.sum(dtype=torch.int64)),
            "labels": int((labels * torch.arange(len(labels))).sum())}
