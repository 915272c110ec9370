"""
Image folders: decoded once, in parallel, into a memory-mapped cache. Unreadable files are named and
left out.

    DIR/train/<class>/**   DIR/val/<class>/**  (or DIR/test/)
    DIR/<class>/**         with val_share: the share of the validation
    .jpg .jpeg .png .gif .webp .bmp .tif .tiff .ppm .pgm

A loader that decodes the same JPEG in every epoch repeats work whose result never changes, and
finds a broken file hours after the start. Here every file is decoded before the first step. Each
split becomes one file of bytes (N, S', S', 3), which is mapped into memory. A set larger than
memory works, ranks share one copy, and the next run starts at once. The fingerprint of the cache
covers the names, sizes and times of all files, their order, and S'. The cache is built under a lock
and renamed when it is complete, so a killed run leaves no file that looks finished. `load` says its
size before it builds it, and refuses it if the disk has no room. At every start it compares a
checksum of the bytes (0.6 s a GB; above 4 GB of every n-th image), and builds a damaged cache
again.

S' is the image size S if the images have that size already: nothing is resampled (Tiny ImageNet's
64). Else S' is 8/7 of S (256 for 224): the short side becomes S', a centre square is kept, and the
random crop has some room. Validation images are the centre S x S of this square, the usual
evaluation. One process a core decodes: at 64 pixels two threads are 2.3 times slower than one,
because they wait for Python's lock. JPEGs are decoded at 1/2, 1/4 or 1/8 of their size if the
result has at least twice the wanted size: then photographs have a PSNR of 42 to 47 dB against the
full decode; at once the wanted size it is 36 to 39. torch resizes: within 2 of 255 of Pillow's
bilinear filter, 2.3 times as fast.

In a folder without a split each class gives its share to the validation, and one image at least:
the names with the lowest hashes. So every machine makes the same split, and a new photo moves at
most one other one.

Pillow converts unusual files to RGB: greyscale, CMYK, palette, 16 bits (the upper 8 are kept), the
first frame of an animation. Alpha is dropped, as in torchvision. EXIF's rotation is applied;
torchvision ignores it. Hidden files and other extensions are ignored. An image above 179 megapixels
(Pillow's limit, 0.7 GB a process) counts as unreadable. So do files that are not regular (to open a
pipe is to wait for its writer), pixels of 32 bits (their range is unknown), and PostScript, which
is a program. `load` refuses class names that differ only in case or Unicode form, and a class
without a readable training image.

`load` follows a link to a folder once. It names and skips a link that leads upwards or into a
class: such a link would give images a second label, or show validation images to the training.

Without a cache (if the disk has no room), the same images are decoded at each access. `Files`
replaces the tensor, and a DataLoader reads ahead. Here too every file is decoded once before the
first step, because the order of the images depends on which are readable. (torchvision's
ImageFolder cannot make the list of files: it includes hidden files, follows a circular link 40
times, and all three of its methods would have to be replaced.)

Copy this file alone: it needs torch and Pillow, which comes with torchvision.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import stat
import sys
import threading
import unicodedata
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset

try:
    import fcntl
except ImportError:  # Windows
    import msvcrt

    fcntl = None

# Open no link, and do not wait for the other end of a pipe. (Windows has neither.)
NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
EXTENSIONS = (".jpg", ".jpeg", ".png", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
SPLITS = {"train", "training", "val", "valid", "validation", "test", "testing"}  # no classes


class UnreadableImages(ValueError):
    """More files than allowed could not be decoded. `files` maps each path to its reason."""

    def __init__(self, files: dict[str, str], total: int, max_bad_share: float):
        self.files = files
        super().__init__(
            f"{len(files)} of {total} images are unreadable, more than {max_bad_share:.2%}: "
            f"mend or delete them, or raise --max-bad-share{listed(files)}"
        )


class Unreadable(ValueError):
    """One image that cannot be decoded: what Pillow says of it."""


class DiskFull(OSError):
    """The cache does not fit on the disk."""


class WrongShare(ValueError):
    """val_share does not suit this folder."""


class OtherSize(ValueError):
    """An image has another size than the rest of its set: the folder is wrong."""


def listed(files: dict[str, str]) -> str:
    """One line for each of the first hundred paths, with its reason."""
    lines = [f"\n  {printable(path)}: {reason}" for path, reason in list(files.items())[:100]]
    rest = f"\n  and {len(files) - 100} more" if len(files) > 100 else ""
    return "".join(lines) + rest


def printable(text: str) -> str:
    """The path for a terminal. Linux takes any bytes as a name: this writes out control
    characters, which a terminal would obey, and replaces bytes that are not UTF-8."""
    return "".join(map(_printable, text))


def _printable(character: str) -> str:
    if "\ud800" <= character <= "\udfff":
        return "\ufffd"
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode()


def reason(error: Exception, path: str) -> str:
    """What Pillow says of a file, in one line, without the path."""
    text = f"{type(error).__name__}: {error}".replace(repr(path), "")
    return " ".join(text.split()).rstrip(": ")


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


Say = Callable[[str], object]
Progress = Callable[[list], Iterable]
Split = tuple[Tensor | Files, Tensor]  # images uint8 (N, 3, S, S), memory-mapped; labels int64 (N,)


class Part(NamedTuple):
    """The files of a split, before they are decoded."""

    where: Path  # the folder that holds them
    name: str  # of its cache
    files: list[tuple[str, int]]  # path, label
    inodes: list[int | None]  # which file each path leads to; None: to none
    digest: str  # of names, sizes and times


class Notes(NamedTuple):
    """What was seen while a split was decoded."""

    unreadable: dict[int, str]  # row -> reason
    unusual: dict[str, int]  # "gray" -> how many


def load(
    folder: str | Path,
    image_size: int | None = None,
    *,
    val_share: float | None = None,
    only: str = "",
    cache_dir: str | Path | None = ".cache",
    max_bad_share: float = 0.01,
    progress: Progress = iter,
    warn: Say = warnings.warn,
    say: Say = print,
) -> tuple[Split, Split, list[str]]:
    """Return ((train images, labels), (val images, labels), class names).

    Training images are (N, 3, S', S'), validation images (N, 3, S, S). image_size None: the images'
    own size if a hundred of them have the same square size, else 224. Images are in the order of
    their sorted classes and names. A file from the end of the list takes the place of one that was
    left out.

    Args:
        val_share: the share of a folder without a split that validates.
        only: the name of a set whose images all have image_size. Another size is an error.
        cache_dir: the folder of the decoded images. None: no cache, and the images are `Files`.
        progress: wraps the list of files that are decoded; pass tqdm to show the progress.
        warn: gets a sentence about files that were left out, links that were not followed, and
            classes without validation images.
        say: gets the place and size of a cache before it is built, how a folder was split, and the
            numbers of unusual images and of other files.

    Raises:
        FileNotFoundError: train/ or val/ is missing, and there is no val_share.
        WrongShare: a ValueError; the folder has a split, or val_share leaves one side empty.
        DiskFull: an OSError; the cache has no room.
        OSError: a folder cannot be read.
        ValueError: no images, a single class, a class without images, other classes in val than in
            train, two classes that cannot be told from each other, or a wrong size.
        UnreadableImages: a ValueError; more than max_bad_share of a split cannot be decoded.
    """
    folder = Path(folder)
    train, val, classes = find(folder, val_share, warn, say)
    crops = choose_crops(train, image_size, only)
    splits = []
    counts = Counter()
    for part, crop in zip((train, val), crops, strict=True):
        if cache_dir is None:
            images, notes = None, decode_all(part.files, crop, None, progress)
        else:
            images, notes = cached(part, crop, Path(cache_dir), progress, say)
        splits.append(labelled(part, crop, images, notes, max_bad_share, warn))
        counts.update(notes.unusual, unreadable=len(notes.unreadable))
    if odd := [f"{count:,} {kind}" for kind, count in counts.items() if count]:
        total = len(train.files) + len(val.files)
        say(f"of {total:,} images: {', '.join(odd)} (gray and CMYK become RGB)")
    check_every_class(train, val, splits, classes, warn)
    return splits[0], splits[1], words(folder / "words.txt", classes)


def find(
    folder: Path, val_share: float | None, warn: Say, say: Say
) -> tuple[Part, Part, list[str]]:
    """The files of both splits, and the names of the classes."""
    train, val = split_folders(folder)
    if train is None or val is None:
        return split_by_name(folder, val_share, warn, say)
    if val_share is not None:
        raise WrongShare(f"--val-share is for a folder without a split, and {folder} has one: "
                         f"{train.name}/ and {val.name}/. Leave the flag out")
    classes, val_classes = class_folders(train, warn), class_folders(val, warn)
    if set(classes) != set(val_classes):
        only_one = ", ".join(sorted(set(classes) ^ set(val_classes)))
        raise ValueError(f"{train} and {val} hold different classes: only one has {only_one}")
    tops = Tops([*classes.values(), *val_classes.values()], warn)
    train_files = list_files(train, classes, tops, warn, say)
    val_files = list_files(val, val_classes, tops, warn, say)
    parts = make_part(train, "train", train_files), make_part(val, val.name, val_files)
    name_shared_files(*parts, warn)
    return *parts, list(classes)


def split_folders(folder: Path) -> tuple[Path | None, Path | None]:
    """Its folders of training and of validation images."""

    def first(*names: str) -> Path | None:
        return next((folder / name for name in names if (folder / name).is_dir()), None)

    return first("train"), first("val", "test")


def split_by_name(
    folder: Path, val_share: float | None, warn: Say, say: Say
) -> tuple[Part, Part, list[str]]:
    """The same for a folder of classes: each file's name decides whether it validates."""
    classes = {} if val_share is None else class_folders(folder, warn)
    like_splits = [path for name, path in classes.items() if name.casefold() in SPLITS]
    holds_folders = [path for path in like_splits if not any(map(is_image, os.listdir(path)))]
    if not classes or len(like_splits) > 1 or holds_folders:  # or no val_share
        raise FileNotFoundError(
            f"{folder} should hold train/<class>/ and val/<class>/ (or test/<class>/); if it "
            "holds <class>/ without a split, pass --val-share 0.2"
        )
    files = list_files(folder, classes, Tops(classes.values(), warn), warn, say)
    by_class = [[] for _ in classes]
    for path, label in files:
        top = [*classes.values()][label]
        by_class[label].append((hash_of(path.removeprefix(str(top))), path))
    validated = set()
    for ranked in by_class:  # each class: its share, one at least, and never all
        count = min(max(1, round(val_share * len(ranked))), len(ranked) - 1)
        validated.update(path for _, path in sorted(ranked)[: max(0, count)])
    train = [file for file in files if file[0] not in validated]
    val = [file for file in files if file[0] in validated]
    if not train or not val:
        raise WrongShare(
            f"--val-share {val_share:g} splits the {len(files)} images of {folder} into "
            f"{len(train)} for training and {len(val)} for validation: take another share"
        )
    names = ", ".join([*classes][:10] + (["..."] if len(classes) > 10 else []))
    say(f"{folder} has no split: --val-share {val_share:g} takes {len(train):,} images for "
        f"training and {len(val):,} for validation, by class and a hash of each file's name\n"
        f"  {len(classes)} classes: {names}")
    parts = make_part(folder, "train", train), make_part(folder, "val", val)
    name_shared_files(*parts, warn)
    return *parts, list(classes)


def hash_of(name: str) -> bytes:
    """The same for each spelling of a path: Macs and Windows have others."""
    name = unicodedata.normalize("NFC", name.replace(os.sep, "/"))
    return hashlib.sha256(os.fsencode(name)).digest()


def make_part(where: Path, name: str, files: list[tuple[str, int]]) -> Part:
    """Look at every file once: names, sizes and times identify a cache."""
    digest = hashlib.sha256()
    inodes = []
    for path, _ in files:
        try:
            state = os.stat(path)
            inodes.append(hash((state.st_dev, state.st_ino)))
            # ctime too: an archive that is unpacked gives new bytes their old mtime
            facts = f" {state.st_size} {state.st_mtime_ns} {state.st_ctime_ns}\n"
        except OSError:  # a broken link is an unreadable file like any other
            inodes.append(None)
            facts = " gone\n"
        digest.update(os.fsencode(path.removeprefix(str(where))) + facts.encode())
    return Part(where, name, files, inodes, digest.hexdigest())


def name_shared_files(train: Part, val: Part, warn: Say) -> None:
    """Warn of a file that has two labels or is in both splits, through links."""
    known, repeated = set(), set()
    for inode in (*train.inodes, *val.inodes):
        (repeated if inode in known else known).add(inode)
    first, shared = {}, {}
    for split in (train, val) if repeated - {None} else ():
        for (path, label), inode in zip(split.files, split.inodes, strict=True):
            if inode in repeated and inode is not None:
                other, place = first.setdefault(inode, (path, (split.name, label)))
                if place != (split.name, label):
                    shared[path] = f"is {printable(other)} too"
    if shared:
        warn(f"{len(shared)} files have two labels, or are in both splits:{listed(shared)}")


def choose_crops(train: Part, image_size: int | None, only: str) -> tuple[Crop, Crop]:
    """How training and validation images are cut out."""
    few = train.files[:: len(train.files) // 100 or 1]
    own = own_side([path for path, _ in few])
    side = image_size or own or 224
    short = side if only or side == own else round(side * 8 / 7)
    return Crop(short, short, only), Crop(short, side, only)


def labelled(
    part: Part, crop: Crop, images: Tensor | None, notes: Notes, max_bad_share: float, warn: Say
) -> Split:
    """A split's images and labels. Names unreadable files, or raises if they are too many."""
    files = part.files
    rows = kept_rows(len(files), notes.unreadable)
    bad = {files[i][0]: reason for i, reason in notes.unreadable.items()}
    if len(bad) > max_bad_share * len(files) or not rows:
        raise UnreadableImages(bad, len(files), max_bad_share)
    if bad:
        warn(f"{len(bad)} of {len(files)} images in {part.where} are unreadable and left out:"
             f"{listed(bad)}")
    if images is None:
        images = Files([files[i][0] for i in rows], crop)
    return images, torch.tensor([files[i][1] for i in rows])


def check_every_class(
    train: Part, val: Part, splits: list[Split], classes: list[str], warn: Say
) -> None:
    """Refuse a class without a training image; name one without a validation image."""
    empty = []
    for _, labels in splits:
        counts = labels.bincount(minlength=len(classes)).tolist()
        without = [name for name, count in zip(classes, counts, strict=True) if not count]
        empty.append(", ".join(without))
    if empty[0]:
        raise ValueError(f"{train.where} holds no readable image of {empty[0]} for training: add "
                         "some, or delete the class")
    if empty[1]:
        warn(f"{val.where} holds no readable image of {empty[1]} for validation: the scores say "
             "nothing about it")


def words(path: Path, classes: list[str]) -> list[str]:
    """ImageNet's folders are WordNet numbers; words.txt beside them has the names."""
    if not path.is_file():
        return classes
    lines = path.read_text("utf-8", errors="replace").splitlines()
    meanings = dict(line.split("\t", 1) for line in lines if "\t" in line)
    names = [meanings.get(number, number).split(",")[0].strip() for number in classes]
    count = Counter(names)
    both = zip(names, classes, strict=True)
    return [printable(name) if name and count[name] == 1 else number for name, number in both]


def is_image(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS) and not name.startswith(".")


def class_folders(folder: Path, warn: Say) -> dict[str, Path]:
    """Class name -> folder, sorted. Names get Unicode's composed form; Macs write the other one."""
    classes, by_folded_name, loose = {}, {}, {}
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        if path.is_dir():
            name = unicodedata.normalize("NFC", printable(path.name))
            other = by_folded_name.setdefault(name.casefold(), path)
            if other != path:
                raise ValueError(
                    f"{printable(str(other))} and {printable(str(path))} are one class to some "
                    "file systems: merge or rename them"
                )
            classes[name] = path
        elif is_image(path.name):
            loose[str(path)] = "in no class"
        elif not path.exists():
            loose[str(path)] = "a link that leads nowhere"
    if loose:
        warn(f"{len(loose)} files in {folder} are not used:{listed(loose)}")
    return dict(sorted(classes.items()))


class Tops:
    """The class folders of both splits: no link may lead above one of them, or into one.

    Folders are known by their real paths.
    """

    def __init__(self, folders: Iterable[Path], warn: Say):
        self.seen: set[str] = set()  # every folder that is read
        self.above: set[str] = set()
        by_path = {}
        for folder in folders:
            real = os.path.realpath(folder)
            other = by_path.setdefault(real, folder)
            if other != folder:
                sentence = f"{printable(str(other))} and {printable(str(folder))} are one folder"
                if other.parent == folder.parent:
                    raise ValueError(f"{sentence}: delete one of the links")
                warn(f"{sentence}: the validation shows no new images")
            self.above.update(outer_folders(real))
        if inner := by_path.keys() & self.above:
            names = ", ".join(printable(str(by_path[real])) for real in sorted(inner))
            raise ValueError(f"{names} holds other class folders: no class may lie in another")
        self.tops = set(by_path)

    def leads_back(self, target: str, here: str) -> bool:
        """Whether a link to `target`, in the folder `here`, leads upwards, or into a class."""
        upwards = target == here or target in outer_folders(here) or target in self.above
        return upwards or target in self.tops or not self.tops.isdisjoint(outer_folders(target))


def outer_folders(real: str) -> list[str]:
    return [str(path) for path in Path(real).parents]


def list_files(
    where: Path, classes: dict[str, Path], tops: Tops, warn: Say, say: Say
) -> list[tuple[str, int]]:
    """(path, label) of every image file, in order. Each folder is read once."""
    if len(classes) == 1:
        raise ValueError(f"{where} holds one class: a classifier needs two or more")
    files, passed_over, others = [], {}, Counter()
    for label, top in enumerate(classes.values()):
        for folder, folders, names in os.walk(top, onerror=give_up, followlinks=True):
            folders[:] = followed(folder, folders, tops, passed_over)
            for name in sorted(names):
                path = os.path.join(folder, name)
                if is_image(name):
                    files.append((path, label))
                elif os.path.islink(path) and not os.path.exists(path):
                    passed_over[path] = "leads nowhere"
                elif not name.startswith("."):
                    others[Path(name).suffix or "without an extension"] += 1
    if passed_over:
        warn(f"{len(passed_over)} folders or links in {where} are not followed: they lead nowhere, "
             f"upwards, into a class, or to what has been read{listed(passed_over)}")
    if others:
        counted = ", ".join(f"{count:,} {kind}" for kind, count in others.most_common(5))
        say(f"{where}: files that this reader does not take for images: {printable(counted)}")
    if not files:
        raise ValueError(
            f"{where} holds no images: it should look like {where}/<class>/<image>.jpg"
        )
    return files


def followed(
    folder: str, names: list[str], tops: Tops, passed_over: dict[str, str]
) -> list[str]:
    """Which of these folders in `folder` are read, in order. The others go to `passed_over`."""
    here = os.path.realpath(folder)
    kept = []
    for name in sorted(names):
        if name.startswith("."):
            continue
        path = os.path.join(folder, name)
        real = os.path.realpath(path)
        known = real in tops.seen or real in tops.tops
        if known or (os.path.islink(path) and tops.leads_back(real, here)):
            passed_over[path] = f"leads to {printable(real)}"
        else:
            tops.seen.add(real)
            kept.append(name)
    return kept


def give_up(error: OSError) -> None:
    """os.walk would pass over a folder that it cannot read, in silence."""
    raise error


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


def image_file(path: str) -> Image.Image:
    """Open a regular file. A pipe would wait for its writer, a device may give bytes for ever."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError("this is not a regular file")
    return Image.open(path)


def decode(path: str, crop: Crop) -> tuple[bytes, str]:
    """(RGB, side x side x 3; what is unusual in the file or "").

    Raises what Pillow raises: for a broken file any exception.
    """
    with image_file(path) as image:
        if image.format == "EPS":
            raise ValueError("PostScript is a program, and this reader runs none")
        if crop.only and image.size != (crop.side, crop.side):
            width, height = image.size
            raise OtherSize(
                f"{printable(path)} is {width}x{height} pixels; {crop.only} images are "
                f"{crop.side}x{crop.side}"
            )
        # The JPEG decoder itself halves, at most three times.
        image.draft(None, (2 * crop.short, 2 * crop.short))
        image.load()
        unusual = "CMYK" if image.mode == "CMYK" else ""
        if image.mode.startswith(("1", "L", "I")) and image.mode != "LAB":
            unusual = "gray"
        if image.mode == "F" or (image.mode == "I" and image.getextrema()[1] >= 2**16):
            raise ValueError("pixels of 32 bits, whose range is unknown: save 8 or 16 bits")
        if image.mode.startswith("I"):  # 16 bits: a conversion to RGB alone would clip at 255
            image = image.convert("I").point(lambda value: value / 256).convert("L")
        if image.mode != "RGB":
            image = image.convert("RGB")
        side = min(image.size)
        if image.width != image.height:
            left, top = (image.width - side) // 2, (image.height - side) // 2
            image = image.crop((left, top, left + side, top + side))
        if "exif" in image.info or "xmp" in image.info:
            ImageOps.exif_transpose(image, in_place=True)
        pixels = image.tobytes()
    if not side == crop.short == crop.side:
        pixels = resized(pixels, side, crop)
    return pixels, unusual


def read(path: str, crop: Crop) -> Tensor:
    """One image, uint8 (3, side, side). Raises Unreadable."""
    try:
        return Files([path], crop)[0]
    except Exception as error:  # for a broken file Pillow raises any kind
        raise Unreadable(reason(error, path)) from error


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


def decode_into(file: str | None, crop: Crop, first: int, paths: list[str]) -> list[tuple]:
    """Decode files and write them to the cache, if any, from row `first` on.

    Returns for each file (its error or None, what is unusual in it or "").
    """
    rows, found = [], []
    for path in paths:
        try:
            pixels, unusual = decode(path, crop)
            rows.append(pixels)
            found.append((None, unusual))
        except OtherSize:
            raise
        except Exception as error:
            rows.append(bytes(3 * crop.side**2))
            found.append((reason(error, path), ""))
    if file:
        data = b"".join(rows)
        cache = opened(file)
        cache.seek(first * 3 * crop.side**2)
        if cache.write(data) != len(data):
            raise DiskFull(f"the disk has no room for {file}")
    return found


@functools.cache
def opened(file: str) -> io.FileIO:
    return open(file, "r+b", buffering=0, opener=own_file)


def prepare_worker() -> None:
    """Set up a worker: no Pillow warnings, one thread, and exit when the parent dies.

    Allocating and freeing 32 MB once raises the size up to which glibc keeps freed memory in the
    process. Without it, glibc returns 100 pages per image to the system, which must zero them
    again: 10 % of the time.
    """

    def follow_parent():
        multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
        os._exit(1)

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    bytes(2**25 - 2**13)
    threading.Thread(target=follow_parent, daemon=True).start()


def decode_all(
    files: list[tuple[str, int]], crop: Crop, file: str | None, progress: Progress
) -> Notes:
    """Decode every file into its row of `file`, in one process a core."""
    # Forked workers start in milliseconds. Outside Linux forking is unsafe.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    affinity = getattr(os, "sched_getaffinity", None)
    workers = len(affinity(0)) if affinity else min(os.cpu_count(), 61)  # Windows takes no more
    chunk = max(1, min(2**20 // (3 * crop.side**2), len(files) // (4 * workers)))
    firsts = range(0, len(files), chunk)
    paths = [path for path, _ in files]
    chunks = (paths[i : i + chunk] for i in firsts)
    job = functools.partial(decode_into, file, crop)
    with ProcessPoolExecutor(workers, mp_context=context, initializer=prepare_worker) as pool:
        found = itertools.chain.from_iterable(pool.map(job, firsts, chunks))
        found = [seen for _, seen in zip(progress(files), found, strict=True)]
    unreadable = {i: reason for i, (reason, _) in enumerate(found) if reason}
    return Notes(unreadable, Counter(unusual for _, unusual in found if unusual))


def cached(
    part: Part, crop: Crop, cache_dir: Path, progress: Progress, say: Say
) -> tuple[Tensor, Notes]:
    """(images in the order of `kept_rows`, what was seen when they were decoded).

    Reads the cache, or builds it first.
    """
    where, files = part.where, part.files
    digest = hashlib.sha256(f"4 {crop} {part.digest}".encode())
    home = hashlib.sha256(os.fsencode(where.resolve())).hexdigest()[:8]
    # Each folder and size has one cache: a new one replaces the old one.
    name = f"{part.name}-{crop.side}-{home}"
    pixels = cache_dir / f"{name}-{digest.hexdigest()[:16]}.images"
    notes = pixels.with_suffix(".json")
    cache_dir.mkdir(parents=True, exist_ok=True)
    with locked(cache_dir / f"{name}.lock"):
        found = whole(pixels, notes, len(files), crop)
        if found is None:
            for old in cache_dir.glob(f"{name}-*"):  # of other files, damaged, or a killed run's
                with contextlib.suppress(PermissionError):  # Windows: another run has it open
                    old.unlink()
            refuse_too_large(len(files), crop, pixels, say)
            build(files, crop, pixels, notes, progress)
            found = whole(pixels, notes, len(files), crop)
            if found is None:
                raise OSError(f"{pixels} is not what was written to it: the disk may be damaged")
    images, seen = found
    return images.permute(0, 3, 1, 2), seen


def whole(pixels: Path, notes: Path, total: int, crop: Crop) -> tuple[Tensor, Notes] | None:
    """(images (N, S, S, 3), what was seen) of the cache. None: no cache, or a damaged one."""
    try:
        if not notes.is_file():
            return None
        known = json.loads(notes.read_text("utf-8"))
        bad = {int(i): str(reason) for i, reason in known["unreadable"].items()}
        unusual = {str(kind): int(count) for kind, count in known["unusual"].items()}
        size = pixels.stat().st_size
    except (OSError, ValueError, AttributeError, LookupError, TypeError, RecursionError):
        return None
    rows = total - len(bad)
    in_range = all(0 <= i < total for i in bad)
    if not in_range or size != rows * 3 * crop.side**2:
        return None
    images = mapped(pixels, rows, crop)
    return (images, Notes(bad, unusual)) if checksum(images) == known.get("checksum") else None


def mapped(pixels: Path, count: int, crop: Crop) -> Tensor:
    """The images of a cache, (N, S, S, 3)."""
    if count == 0:
        return torch.empty(0, crop.side, crop.side, 3, dtype=torch.uint8)
    # Shared: a private mapping counts as used memory, and the set may be larger than memory.
    size = count * 3 * crop.side**2
    images = torch.from_file(str(pixels), shared=True, size=size, dtype=torch.uint8)
    return images.view(-1, crop.side, crop.side, 3)


def checksum(images: Tensor) -> int:
    """CRC-32 of the bytes; in a set above 4 GB, of every n-th image."""
    crc = 0
    for some in images[:: 1 + images.nbytes // 2**32].split(256):
        crc = zlib.crc32(some.contiguous().numpy(), crc)
    return crc


def refuse_too_large(count: int, crop: Crop, pixels: Path, say: Say) -> None:
    """Say how large the cache will be. Raise DiskFull where the disk has no room for it."""
    need = count * 3 * crop.side**2
    free = shutil.disk_usage(pixels.parent).free
    say(f"decoding {count:,} images of {crop.side}x{crop.side} pixels into {pixels.parent}: "
        f"{need / 1e9:,.2f} GB")
    if need > free:
        raise DiskFull(
            f"{count:,} images of {crop.side}x{crop.side} pixels take {need / 1e9:,.1f} GB in "
            f"{pixels.parent}, which has {free / 1e9:,.1f} GB: lower --image-size, or decode at "
            "every access with --workers"
        )


def kept_rows(total: int, bad: Iterable[int]) -> list[int]:
    """Which file each row holds after the last rows have moved into the places of the bad rows."""
    rows = list(range(total))
    for i in sorted(bad, reverse=True):
        rows[i] = rows[-1]
        rows.pop()
    return rows


def build(
    files: list[tuple[str, int]], crop: Crop, pixels: Path, notes: Path, progress: Progress
) -> None:
    """Write the cache of these files under a temporary name, then rename it."""
    row = 3 * crop.side**2
    temporary = f"{pixels}.{os.getpid()}.part"
    try:
        with open(temporary, "x+b", buffering=0) as cache:  # Windows renames closed files
            seen = decode_all(files, crop, temporary, progress)
            rows = kept_rows(len(files), seen.unreadable)
            for i, source in enumerate(rows):
                if source != i:
                    cache.seek(source * row)
                    image = cache.read(row)
                    cache.seek(i * row)
                    cache.write(image)
            cache.truncate(len(rows) * row)
            os.fsync(cache.fileno())
        os.replace(temporary, pixels)
        crc = checksum(mapped(pixels, len(rows), crop))
        with open(temporary, "x", encoding="utf-8") as file:
            json.dump(seen._asdict() | {"checksum": crc}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, notes)
    finally:
        Path(temporary).unlink(missing_ok=True)


def own_file(path: str, flags: int) -> int:
    """For open(): follow no link."""
    return os.open(path, flags | NO_LINK, 0o666)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time. The lock ends with this process; forked workers do not get it."""
    if path.is_symlink():
        path.unlink()
    with open(path, "ab", opener=own_file) as file:
        if fcntl:
            fcntl.lockf(file, fcntl.LOCK_EX)
        while not fcntl:
            with contextlib.suppress(OSError):  # gives up after ten seconds: ask again
                msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
                break
        yield
