"""
CIFAR-10: from torchvision's files, from a folder of images, or by download.

    DIR/cifar-10-batches-py/            torchvision's files (torchvision checks their MD5 sums)
    DIR/train/<class>/*  DIR/test/<class>/*   image files (test may be called val)
    neither                             torchvision downloads 170 MB into DIR

`load` returns the 60,000 images as two uint8 tensors (184 MB). They fit on the device, so the step
needs no loader process, no pinned copy and no queue. The caller passes the function that reads
image files: data/imagefolder.py's, which decodes each file once.

Copy this file alone: it needs torch and torchvision.
"""

from __future__ import annotations

import contextlib
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torchvision import datasets

Split = tuple[Tensor, Tensor]  # images uint8 (N, 3, 32, 32), labels int64 (N,)
Sets = tuple[Split, Split, list[str]]


def load(folder: str | Path, from_images: Callable[[Path], Sets] | None = None) -> Sets:
    """Return ((train images, labels), (test images, labels), class names).

    from_images: reads a folder with train/<class>/* and test/<class>/*. Without it such a folder is
        ignored.

    Raises:
        FileNotFoundError: nothing usable in `folder` and no download possible. It says what to do.
        ValueError: torchvision's files are damaged. from_images may raise errors of its own.
    """
    folder = Path(folder)
    if (folder / "cifar-10-batches-py").is_dir():
        return from_torchvision(folder, download=False)
    if from_images and (folder / "train").is_dir():
        return from_images(folder)
    if not reachable(datasets.CIFAR10.url):
        raise FileNotFoundError(
            f"no CIFAR-10 in {folder} (neither cifar-10-batches-py/ nor train/<class>/ and "
            f"test/<class>/), no answer from {datasets.CIFAR10.url}: put the files there, name "
            "another folder with --data-dir, or take --dataset synthetic"
        )
    return from_torchvision(folder, download=True)


def reachable(url: str, seconds: float = 6.0) -> bool:
    """Whether `url` answers in time. Proxies are used.

    A thread tries it, because a name look-up has no time-out.
    """
    answered = threading.Event()

    def knock() -> None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=seconds):
            answered.set()

    thread = threading.Thread(target=knock, daemon=True)
    thread.start()
    thread.join(seconds)
    return answered.is_set()


def from_torchvision(folder: Path, download: bool) -> Sets:
    try:
        train = datasets.CIFAR10(folder, train=True, download=download)
        test = datasets.CIFAR10(folder, train=False, download=download)
    except (RuntimeError, EOFError, OSError) as error:
        broken = folder / "cifar-10-batches-py"
        sentence = f"{broken} is incomplete or damaged ({error}): delete it and run again"
        raise ValueError(sentence) from error

    def split(part: datasets.CIFAR10) -> Split:
        images = torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous()  # N, 3, 32, 32
        return images, torch.tensor(part.targets)

    return split(train), split(test), list(train.classes)
