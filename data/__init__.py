"""Data: every loader returns ((train images, labels), (val images, labels), class names), images uint8 (N, 3, H, W)."""

import warnings
from pathlib import Path

from . import cifar10, imagefolder, synthetic

NAMES = ("cifar10", "imagefolder", "synthetic")
SCALE = {"imagefolder": (0.35, 1.0)}  # area of the random resized crop; the others' images are padded and shifted


def load(name, folder, progress, image_size=None, max_bad_share=0.01, cache_dir=".cache", warn=warnings.warn):
    """(train, val, class names, name of what was loaded).

    name None: CIFAR-10 from `folder` or by download, and the synthetic images where it can be had neither way.
    image_size, max_bad_share, cache_dir, warn: of imagefolder; the others' images are 32 x 32 and whole.
    Raises FileNotFoundError and ValueError with a sentence that names the folder or file.
    """
    if folder and not Path(folder).is_dir():
        raise FileNotFoundError(f"--data-dir {folder} is not a folder")
    if name == "imagefolder":
        if not folder:
            raise FileNotFoundError("--dataset imagefolder needs --data-dir: a folder with train/<class>/ and val/")
        return *imagefolder.load(folder, image_size, cache_dir=cache_dir, max_bad_share=max_bad_share,
                                 progress=progress, warn=warn), name
    if image_size not in (None, 32):
        raise ValueError(f"--image-size {image_size}: the images of {name or 'cifar10'} are 32 x 32")
    if name == "synthetic":
        return *synthetic.load(), "synthetic"
    try:
        return *cifar10.load(folder or ".cache", progress), "cifar10"
    except FileNotFoundError:
        if name or folder:
            raise
        return *synthetic.load(), "synthetic"
