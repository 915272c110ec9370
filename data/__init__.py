"""
Data: what a run trains on, as one `Dataset`, from one function `load`.

A file data/NAME.py with a function `load(folder, image_size) -> Dataset` is the dataset NAME: you
change no list. The three files here return less than a Dataset, because you can copy each alone;
`load` below adds the rest.
"""

import hashlib
import importlib
import json
import math
import os
import stat
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import batches, cifar10, synthetic

NAMES = {path.stem for path in Path(__file__).parent.glob("[a-z]*.py")}
NAMES = sorted(NAMES - {"batches", "decode", "decoded_cache"})

LARGEST = 4096  # pixels a side of what read_description accepts: more would fill the memory first


class WrongArgument(ValueError):
    """An argument is wrong, whatever the data is. The message names the flag."""


@dataclass
class Dataset:
    """What a run trains on.

    train, val: images uint8 (N, C, S, S), a tensor or lazily decoded (`decode.Files`), and
        labels: int64 (N,), or for a regression float (N,) or (N, T).
    classes: a name for each output of the network: the classes in order, or what the numbers of a
        float target are called.
    mean, std: of each channel, in 0..255. Default: those of the training images. scale: areas of
    the random resized crop. None: images are padded and shifted. val_share: the share of validation
    images, if load() split the folder.
    """

    name: str
    train: tuple[batches.Images, Tensor]
    val: tuple[batches.Images, Tensor]
    classes: list[str]
    mean: list[float] = field(default_factory=list)
    std: list[float] = field(default_factory=list)
    scale: tuple[float, float] | None = None
    val_share: float | None = None

    def __post_init__(self):
        self.classes = [str(name) for name in self.classes]
        counts = Counter(self.classes)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"{self.name}: two classes are called {', '.join(twice)}")
        for split, (images, labels) in (("train", self.train), ("val", self.val)):
            if sentence := self.wrong_split(split, images, labels):
                raise ValueError(f"{self.name}: {sentence}")
        if not self.mean:
            self.mean, self.std = batches.statistics(self.train[0])
        self.mean = [float(x) for x in self.mean]
        self.std = [float(x) for x in self.std]
        if sentence := wrong_statistics(self.mean, self.std, self.channels):
            raise ValueError(f"{self.name}: {sentence}")

    def wrong_split(self, split: str, images: batches.Images, labels: Tensor) -> str:
        """Say what is wrong with a split, or "". A bad label that only trains is named in its step,
        and its image left out."""
        kind, shape = getattr(images, "dtype", torch.uint8), tuple(images.shape)
        if kind is not torch.uint8 or len(shape) != 4 or shape[2] != shape[3] or not shape[0]:
            wanted = "they should be uint8 (N, C, S, S), one or more squares"
            return f"the {split} images are {kind} {shape}: {wanted}"
        if len(images) != len(labels):
            return f"{len(images)} {split} images have {len(labels)} labels"
        is_class = labels.dtype is torch.int64 and labels.ndim == 1
        if self.regression != labels.is_floating_point() or not (self.regression or is_class):
            wanted = "they should be int64 (N,) in both splits, or float in both"
            return f"the {split} labels are {labels.dtype} {tuple(labels.shape)}: {wanted}"
        if split == "train":
            return ""
        side = self.train[0].shape[-1]
        if shape[-1] > side:
            wanted = f"they should have at most the {side} of the training images"
            return f"the val images have {shape[-1]} pixels a side: {wanted}"
        bad = labels != labels.clamp(0, len(self.classes) - 1)
        if self.regression:
            bad = ~labels.isfinite()
        for i in bad.nonzero()[:1, 0].tolist():
            wanted = "finite" if self.regression else f"one of 0 to {len(self.classes) - 1}"
            return f"the label of val image {i} is {labels[i].tolist()}: it should be {wanted}"
        return ""

    def place(self, device: torch.device) -> None:
        """Move the images to the device, if they fit."""
        images, labels = self.train
        self.train = batches.place(images, device), labels
        images, labels = self.val
        self.val = batches.place(images, device), labels

    @property
    def regression(self) -> bool:
        return self.train[1].is_floating_point()

    @property
    def channels(self) -> int:
        return self.train[0].shape[1]

    @property
    def image_size(self) -> int:
        """The side of validation images. Training images may be larger."""
        return self.val[0].shape[-1]

    def describe(self) -> dict:
        """What a trained network must know of its images and outputs.

        A run writes it to model.json; `read_description` reads it.
        """
        return {
            "dataset": self.name,
            "classes": self.classes,
            "regression": self.regression,
            "channels": self.channels,
            "resize": self.train[0].shape[-1],  # of the short side, before the centre is cut out
            "image_size": self.image_size,
            "mean": self.mean,  # in 0..255
            "std": self.std,
            "val_share": self.val_share,
        }


def read_description(path: Path) -> dict[str, Any]:
    """Read a model.json, which anybody may have changed since `Dataset.describe`.

    Raises OSError, and ValueError with a sentence on what is wrong.
    """
    if regular(path).stat().st_size > 2**24:  # 22,000 classes take 1 MB
        raise ValueError("it is too long to describe a model")
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is damaged: {error}") from error
    needed = ("classes", "regression", "channels", "resize", "image_size", "mean", "std")
    if not isinstance(known, dict):
        raise ValueError("it describes no model")
    if missing := [key for key in needed if key not in known]:
        raise ValueError(f"it lacks {', '.join(missing)}")
    names = known["classes"]
    if not isinstance(names, list) or not names or any(type(name) is not str for name in names):
        raise ValueError("classes should be a list of names")
    if len(set(names)) < len(names):
        raise ValueError("two of its classes have the same name")
    if type(known["regression"]) is not bool:
        raise ValueError("regression should be true or false")
    for key in ("channels", "resize", "image_size"):
        if type(known[key]) is not int or not 1 <= known[key] <= LARGEST:
            raise ValueError(f"{key} should be a whole number from 1 to {LARGEST}")
    if known["resize"] < known["image_size"]:
        raise ValueError("resize should be at least image_size")
    if sentence := wrong_statistics(known["mean"], known["std"], known["channels"]):
        raise ValueError(sentence)
    return known


def regular(path: Path) -> Path:
    """Return `path`. A pipe would wait for its writer, and /dev/zero never ends."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{path} is not a regular file")
    return path


def wrong_statistics(mean: Any, std: Any, channels: int) -> str:
    """Say what is wrong with the mean and standard deviation of each channel, or ""."""
    for name, numbers, low in (("mean", mean, 0), ("std", std, 1)):
        good = isinstance(numbers, list) and len(numbers) == channels
        # NaN fails the comparison
        if not good or not all(type(x) in (int, float) and low <= x <= 255 for x in numbers):
            return f"{name} should be a number from {low} to 255 for each of {channels} channel(s)"
    return ""


def load(
    name: str | None,
    folder: str | Path | None = None,
    progress: Callable[[list], Iterable] = iter,
    image_size: int | None = None,
    max_bad_share: float = 0.01,
    cache_dir: str | None = ".cache",
    warn: Callable[[str], object] = warnings.warn,
    say: Callable[[str], object] = print,
    val_share: float | None = None,
) -> Dataset:
    """Load the dataset `name`.

    name None: CIFAR-10 from `folder` or by download; the synthetic images if neither works.
    image_size: for imagefolder; the images of cifar10 and synthetic are 32 x 32. cache_dir None:
    imagefolder decodes at every access. val_share: for a folder without a split: 0.2. Raises
    WrongArgument and FileNotFoundError for a wrong argument, OSError and ValueError for bad data:
    each a sentence that names the folder or file.
    """
    if folder and not Path(folder).is_dir():
        raise WrongArgument(f"--data-dir {folder} is not a folder")
    how = {"max_bad_share": max_bad_share, "progress": progress, "warn": warn, "say": say}
    if name == "imagefolder":
        return own_images(folder, image_size, val_share, cache_dir, how)
    if val_share is not None:
        raise WrongArgument("--val-share is for --dataset imagefolder")
    if name not in (None, "cifar10", "synthetic"):
        return importlib.import_module(f"{__name__}.{name}").load(folder, image_size)
    if image_size not in (None, 32):
        raise WrongArgument(
            f"--image-size {image_size}: the images of {name or 'cifar10'} are 32 x 32"
        )
    if name == "synthetic":
        return Dataset(name, *synthetic.load())

    def from_images(folder):
        """CIFAR-10 takes 184 MB. Without a writable folder the cache is temporary (Windows
        keeps it: it is mapped)."""
        from . import imagefolder

        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
            home = writable(cache_dir or ".cache", temporary)
            return imagefolder.load(folder, 32, only="CIFAR-10", cache_dir=home, **how)

    try:
        return Dataset("cifar10", *cifar10.load(folder or ".cache", from_images))
    except FileNotFoundError:
        if name or folder:
            raise
        say(
            "CIFAR-10 is neither on disk nor reachable: training on synthetic images\n"
            "  (if you have a copy, pass its folder as --data-dir; .cache has none)"
        )
        return Dataset("synthetic", *synthetic.load())


def own_images(
    folder: str | Path | None,
    image_size: int | None,
    val_share: float | None,
    cache_dir: str | None,
    how: dict[str, Any],
) -> Dataset:
    """The images of an image folder, as load() says. how: what is passed on."""
    if not folder:
        raise WrongArgument(
            "--dataset imagefolder needs --data-dir: a folder with train/<class>/ and val/, "
            "or with <class>/"
        )
    from . import decoded_cache, imagefolder  # for nobody else

    if val_share is None and None in imagefolder.split_folders(Path(folder)):
        val_share = 0.2
    try:
        loaded = imagefolder.load(
            folder, image_size, val_share=val_share, cache_dir=cache_dir, **how
        )
    except imagefolder.WrongShare as error:
        raise WrongArgument(error) from error
    except decoded_cache.NoCache as error:
        raise WrongArgument(
            f"{error}. --cache-dir names another folder; --workers 2 decodes at every access, "
            "without a cache"
        ) from error
    return Dataset("imagefolder", *loaded, scale=(0.35, 1.0), val_share=val_share)


def writable(folder: str | Path, otherwise: str) -> str | Path:
    """Return `folder`, made if needed, or `otherwise` if nothing can be written there."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError:
        return otherwise
    return folder if os.access(folder, os.W_OK) else otherwise


def fingerprint(images: batches.Images, labels: Tensor) -> dict[str, int | str]:
    """Hash the images, in order, and their labels: a resumed run recognises its data by them.

    Together the hashes bind every image to its label and its place. They cover all labels, and
    every n-th image of a set above 256 MB. They are of bytes, so torch's version does not matter.
    """
    some = images[:: 1 + math.prod(images.shape) // 2**28]
    pixels = hashlib.blake2b(digest_size=8)
    for chunk in some.split(256):
        pixels.update(chunk.permute(0, 2, 3, 1).contiguous().cpu().numpy())
    return {
        "images": len(images),
        "pixels": pixels.hexdigest(),
        "labels": hashlib.blake2b(labels.cpu().contiguous().numpy(), digest_size=8).hexdigest(),
    }
