"""Data: every loader returns ((train images, labels), (val images, labels), class names), images uint8 (N, 3, H, W)."""

from pathlib import Path

from . import cifar10, synthetic

NAMES = ("cifar10", "synthetic")


def load(name, folder, progress):
    """(train, val, class names, name of what was loaded).

    name None: CIFAR-10 from `folder` or by download, and the synthetic images where it can be had neither way.
    Raises FileNotFoundError and ValueError with a sentence that names the folder or file.
    """
    if name == "synthetic":
        return *synthetic.load(), "synthetic"
    if folder and not Path(folder).is_dir():
        raise FileNotFoundError(f"--data-dir {folder} is not a folder")
    try:
        return *cifar10.load(folder or ".cache", progress), "cifar10"
    except FileNotFoundError:
        if name or folder:
            raise
        return *synthetic.load(), "synthetic"
