"""
CIFAR-10, from whatever is there: torchvision's files, a folder of images, or a download.

    DIR/cifar-10-batches-py/            torchvision's files (checked against their MD5 sums by torchvision)
    DIR/train/<class>/*  DIR/test/<class>/*   image files in ten class folders (test may be called val)
    neither                             torchvision downloads 170 MB into DIR

The 60,000 images are decoded once and returned as two uint8 tensors (184 MB): small enough to live on the
device whole, so that no loader process, no pinned copy and no queue stands between the data and the step.

Copy this file alone: it needs torch and torchvision.
"""

from __future__ import annotations

import contextlib
import threading
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor
from torchvision import datasets

Split = tuple[Tensor, Tensor]  # images uint8 (N, 3, 32, 32), labels int64 (N,)


def load(folder: str | Path, progress: Callable[[list], Iterable] = iter) -> tuple[Split, Split, list[str]]:
    """Return ((train images, labels), (test images, labels), class names).

    progress: wraps the list of files that are decoded from image folders; pass tqdm to see it advance.

    Raises:
        FileNotFoundError: nothing usable in `folder` and no download possible; the sentence says what to do.
        ValueError: the folder holds something else (classes that differ in train and test, odd sizes, broken files).
    """
    folder = Path(folder)
    if (folder / "cifar-10-batches-py").is_dir():
        return from_torchvision(folder, download=False)
    if (folder / "train").is_dir():
        return from_folders(folder, progress)
    if not reachable(datasets.CIFAR10.url):
        raise FileNotFoundError(
            f"no CIFAR-10 in {folder} (neither cifar-10-batches-py/ nor train/<class>/ and test/<class>/), no answer "
            f"from {datasets.CIFAR10.url}: put the files there, name another folder with --data-dir, or take "
            "--dataset synthetic"
        )
    return from_torchvision(folder, download=True)


def reachable(url: str, seconds: float = 6.0) -> bool:
    """Whether `url` answers in time. In a thread, because a name look-up obeys no time-out; proxies are honoured."""
    answered = threading.Event()

    def knock() -> None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=seconds):
            answered.set()

    thread = threading.Thread(target=knock, daemon=True)
    thread.start()
    thread.join(seconds)
    return answered.is_set()


def from_torchvision(folder: Path, download: bool) -> tuple[Split, Split, list[str]]:
    try:
        train, test = (datasets.CIFAR10(folder, train=train, download=download) for train in (True, False))
    except (RuntimeError, EOFError, OSError) as error:
        broken = folder / "cifar-10-batches-py"
        raise ValueError(f"{broken} is incomplete or damaged ({error}): delete it and run again") from error
    splits = [
        (torch.from_numpy(split.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(split.targets))
        for split in (train, test)
    ]
    return splits[0], splits[1], list(train.classes)


def from_folders(folder: Path, progress: Callable[[list], Iterable]) -> tuple[Split, Split, list[str]]:
    """Decode DIR/train/<class>/* and DIR/test/<class>/* (or val), classes in alphabetical order."""
    val = next((folder / name for name in ("test", "val") if (folder / name).is_dir()), None)
    if val is None:
        raise FileNotFoundError(f"{folder} has train/ but neither test/ nor val/: put the validation images there")
    classes, val_classes = (sorted(d.name for d in f.iterdir() if d.is_dir()) for f in (folder / "train", val))
    if classes != val_classes:
        only = sorted(set(classes) ^ set(val_classes))
        raise ValueError(f"{folder / 'train'} and {val} hold different classes: only one of them has {', '.join(only)}")
    return decode(folder / "train", classes, progress), decode(val, classes, progress), classes


def decode(folder: Path, classes: list[str], progress: Callable[[list], Iterable]) -> Split:
    """Decode every file of every class, about 6,000 a second; in one thread: two would quarrel over Python's lock."""
    files = [(path, label) for label, name in enumerate(classes) for path in sorted((folder / name).iterdir())]
    if not files:
        raise FileNotFoundError(f"{folder} holds no images: it should look like {folder}/<class>/<image>.jpg")

    images = torch.empty(len(files), 32, 32, 3, dtype=torch.uint8)
    for row, (path, _) in zip(images, progress(files), strict=True):
        try:
            image = datasets.folder.default_loader(str(path))  # RGB, whatever the file holds
        except OSError as error:
            raise ValueError(f"{path} is not a readable image ({error}): mend or delete it") from error
        if image.size != (32, 32):
            raise ValueError(f"{path} is {image.width}x{image.height} pixels; CIFAR-10 images are 32x32")
        row.copy_(torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(32, 32, 3))
    return images.permute(0, 3, 1, 2).contiguous(), torch.tensor([label for _, label in files])
