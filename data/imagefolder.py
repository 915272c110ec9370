"""
Image folders: which image is of which class. Whatever is odd is counted, named or refused.

    DIR/train/<class>/**   DIR/val/<class>/**  (or DIR/test/)
    DIR/<class>/**         with val_share: the share of the validation
    train/ may be called training/, val/ valid/, validation/, test/ or testing/, in any case
    .jpg .jpeg .jpe .jfif .png .gif .webp .bmp .tif .tiff .ppm .pgm .jp2 .avif

data/decoded_cache.py decodes every file once, before the first step. What data/decode.py cannot
read is named and left out. Each split becomes one cache of images (N, S', S', 3).

S' is the image size S if the images have that size already: nothing is resampled (Tiny ImageNet's
64). Else S' is 8/7 of S (256 for 224): the short side becomes S', a centre square is kept, and the
random crop has some room. Validation images are the centre S x S of this square, the usual
evaluation.

In a folder without a split each class gives its share to the validation, and one image at least:
the names with the lowest hashes. So every machine makes the same split, and a new photo moves at
most one other one.

Hidden files and other extensions are ignored. `load` refuses class names that differ only in case
or Unicode form, and a class without a readable training image. A class folder may be a link. `load`
names and skips any other link to a folder: it may lead upwards, or into another class. (torchvision
includes hidden files and follows a circular link 40 times.)

Without a cache the images are `Files`, decoded at each access, and a DataLoader reads ahead. Here
too every file is decoded once before the first step, because the order of the images depends on
which are readable.
"""

from __future__ import annotations

import hashlib
import os
import re
import unicodedata
import warnings
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

from .decode import CUT, Crop, Files, decode, own_side
from .decoded_cache import Progress, Say, Seen, cached, decode_all, kept_rows

EXTENSIONS = tuple(  # of what this Pillow can read
    name
    for name, kind in Image.registered_extensions().items()
    if kind in ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF"]
)
TRAIN = ("train", "training")
VAL = ("val", "valid", "validation", "test", "testing")
SPLITS = {*TRAIN, *VAL}  # no classes
FOREIGN = {  # thumbnails, bins and snapshots
    "@eadir", "@recycle", "@recently-snapshot", "@tmp", "#recycle", "#snapshot", "$recycle.bin",
    "recycler", "recycled", "system volume information", "lost+found", "__macosx", "__pycache__",
    "network trash folder", "temporary items",
}  # fmt: skip


class UnreadableImages(ValueError):
    """More files than allowed could not be decoded."""


class WrongShare(ValueError):
    """val_share does not suit this folder."""


def listed(files: dict[str, str]) -> str:
    """One line for each of the first hundred paths, with its reason."""
    lines = [f"\n  {printable(path)}: {reason}" for path, reason in list(files.items())[:100]]
    rest = f"\n  and {len(files) - 100} more" if len(files) > 100 else ""
    return "".join(lines) + rest


def printable(text: str) -> str:
    """The path for a terminal. Linux takes any bytes as a name: this writes out control
    characters, which a terminal would obey, and replaces bytes that are not UTF-8."""
    text = re.sub("[\ud800-\udfff]", "\ufffd", text)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


Split = tuple[Tensor | Files, Tensor]  # images uint8 (N, 3, S, S), memory-mapped; labels int64 (N,)


class Part(NamedTuple):
    """The files of a split, before they are decoded."""

    where: Path  # the folder that holds them
    name: str  # of its cache
    files: list[tuple[str, int]]  # path, label

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.files]


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
        NoCache: an OSError; the cache cannot be written.
        OSError: a folder cannot be read.
        ValueError: no images, a single class, a class without training images, one in val that is
            not in train, or two classes that cannot be told from each other.
        UnreadableImages: a ValueError; more than max_bad_share of a split cannot be decoded.
    """
    folder = Path(folder)
    train, val, classes = find(folder, val_share, warn, say)
    crops = choose_crops(train, image_size, only)
    splits, seen = [], []
    counts = Counter()
    for part, crop in zip((train, val), crops, strict=True):
        if cache_dir is None:
            images, notes = None, decode_all(part.paths, crop, decode, None, progress)
        else:
            images, notes = cached(
                part.where, part.paths, crop, decode, part.name, cache_dir, progress, say
            )
        splits.append(with_labels(part, crop, images, notes, max_bad_share, warn))
        seen.append(notes)
        counts.update(chain.from_iterable(one.unusual for one in notes))
        counts["unreadable"] += sum(bool(one.error) for one in notes)
    if odd := [f"{count:,} {kind}" for kind, count in counts.items() if count]:
        total = len(train.files) + len(val.files)
        say(f"of {total:,} images: {', '.join(odd)}")
    name_duplicates((train, val), seen, warn)
    check_every_class(train, val, splits, classes, warn)
    return splits[0], splits[1], readable_names(folder / "words.txt", classes)


def find(
    folder: Path, val_share: float | None, warn: Say, say: Say
) -> tuple[Part, Part, list[str]]:
    """The files of both splits, and the names of the classes."""
    train, val = split_folders(folder)
    if not train or not val:
        return split_by_name(folder, val_share, warn, say)
    if val_share is not None:
        raise WrongShare(
            f"--val-share is for a folder without a split, and {folder} has one: "
            f"{train.name}/ and {val.name}/. Leave the flag out"
        )
    classes, val_classes = class_folders(train, warn), class_folders(val, warn)
    if unknown := sorted(val_classes.keys() - classes):
        raise ValueError(
            f"{val} holds folders that are no classes of {train}: "
            f"{', '.join(unknown[:10])}. Add them to {train.name}/, or move their "
            f"images, or split by --data-dir {train} --val-share 0.2"
        )
    train_files = list_files(train, classes, warn, say)
    val_files = list_files(val, {name: val_classes.get(name) for name in classes}, warn, say)
    return Part(train, "train", train_files), Part(val, "val", val_files), list(classes)


def split_folders(folder: Path) -> tuple[Path | None, Path | None]:
    """The folders of training and of validation, by their names in any case."""
    by_name = {path.name.casefold(): path for path in folders_to_read(folder)}
    train, val = (
        next((by_name[name] for name in names if name in by_name), None) for names in (TRAIN, VAL)
    )
    return train, val


def folders_to_read(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if path.is_dir() and not is_foreign(path)]


def is_foreign(path: Path) -> bool:
    """Whether a folder holds no data: hidden, of a disk or an editor, or of runs of train.py."""
    name = path.name.casefold()
    is_run = (path / "metrics.jsonl").exists()
    return (
        name.startswith(".")
        or name in FOREIGN
        or is_run
        or (name == "runs" and any(path.glob("*/metrics.jsonl")))
    )


def what_it_is(folder: Path) -> str:
    """What to say of a folder that is not as it should be; or ""."""
    inner = folders_to_read(folder)
    for path in [*inner, *chain.from_iterable(map(folders_to_read, inner))]:
        if all(split_folders(path)):
            return f". {path} has a split: pass --data-dir {path}"
    pictures = sum(map(is_image, os.listdir(folder)))
    if pictures and not inner:
        return (
            f". {folder} is a flat folder of {pictures} pictures: move those of each class "
            "into a folder of its own"
        )
    if len(inner) == 1 and len(folders_to_read(inner[0])) > 1:
        return f". If the folders in {inner[0]} are the classes, pass --data-dir {inner[0]}"
    return ""


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
            f"holds <class>/ without a split, pass --val-share 0.2{what_it_is(folder)}"
        )
    files = list_files(folder, classes, warn, say)
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
    say(
        f"{folder} has no split: --val-share {val_share:g} takes {len(train):,} images for "
        f"training and {len(val):,} for validation, by class and a hash of each file's name\n"
        f"  {len(classes)} classes: {names}"
    )
    return Part(folder, "train", train), Part(folder, "val", val), list(classes)


def hash_of(name: str) -> bytes:
    """The same for each spelling of a path: Macs and Windows have others."""
    name = unicodedata.normalize("NFC", name.replace(os.sep, "/"))
    return hashlib.sha256(os.fsencode(name)).digest()


def name_duplicates(parts: Sequence[Part], seen: Sequence[list[Seen]], warn: Say) -> None:
    """Warn of files that are equal, byte for byte, in both splits or with two labels."""
    first, same = {}, {}
    both_splits = two_labels = 0
    for part, notes in zip(parts, seen, strict=True):
        for (path, label), one in zip(part.files, notes, strict=True):
            if one.error:
                continue
            other, split, other_label = first.setdefault(one.content, (path, part.name, label))
            both_splits += split != part.name
            two_labels += label != other_label
            if (split, other_label) != (part.name, label):
                same[path] = f"is {printable(other)}"
    if same:
        warn(
            f"{len(same)} files are there twice, byte for byte: {both_splits} in both splits, "
            f"{two_labels} with two labels{listed(same)}"
        )


def choose_crops(train: Part, image_size: int | None, only: str) -> tuple[Crop, Crop]:
    """How training and validation images are cut out."""
    few = train.files[:: len(train.files) // 100 or 1]
    own = own_side([path for path, _ in few])
    side = image_size or own or 224
    short = side if only or side == own else round(side * 8 / 7)
    return Crop(short, short, only), Crop(short, side, only)


def with_labels(
    part: Part, crop: Crop, images: Tensor | None, seen: list[Seen], max_bad_share: float, warn: Say
) -> Split:
    """A split's images and labels. Names unreadable files, or raises if they are too many."""
    files = part.files
    rows = kept_rows(seen)
    noted = list(zip(part.paths, seen, strict=True))
    bad = {path: one.error for path, one in noted if one.error}
    cut = {path: "is used" for path, one in noted if CUT in one.unusual}
    allowed = max_bad_share and max(3, max_bad_share * len(files))
    if len(bad) > allowed or not rows:
        raise UnreadableImages(
            f"{len(bad)} of {len(files)} images are unreadable, more than {max_bad_share:.2%}: "
            f"mend or delete them, or raise --max-bad-share{listed(bad)}"
        )
    for some, words in ((bad, "unreadable and left out"), (cut, CUT)):
        if some:
            warn(f"{len(some)} of {len(files)} images in {part.where} are {words}:{listed(some)}")
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
        raise ValueError(
            f"{train.where} holds no readable image of {empty[0]} for training: add "
            "some, or delete the class"
        )
    if empty[1]:
        warn(
            f"{val.where} holds no readable image of {empty[1]} for validation: the scores say "
            "nothing about it"
        )


def readable_names(path: Path, classes: list[str]) -> list[str]:
    """ImageNet's folders are WordNet numbers; words.txt beside them has the names."""
    if not path.is_file():
        return classes
    if path.stat().st_size > 2**24:  # ImageNet's has 3 MB
        raise ValueError(f"{path} is too long to hold the names of classes: rename or delete it")
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
        if path.is_dir() and is_foreign(path):
            loose[str(path)] = "of a disk, an editor or a run"
        elif path.is_dir():
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
        warn(f"{len(loose)} files or folders in {folder} are not used:{listed(loose)}")
    return dict(sorted(classes.items()))


def list_files(
    where: Path, classes: dict[str, Path | None], warn: Say, say: Say
) -> list[tuple[str, int]]:
    """(path, label) of every image file, in order."""
    if len(classes) == 1:
        raise ValueError(
            f"{where} holds one class, {next(iter(classes))}: a classifier needs two "
            f"or more{what_it_is(where)}"
        )
    files, passed_over, others = [], {}, Counter()
    for label, top in enumerate(classes.values()):
        if top is None:  # no images of it to validate
            continue
        for folder, folders, names in os.walk(top, onerror=raise_error):
            foreign = {name for name in folders if is_foreign(Path(folder, name))}
            others.update(f"{name}/" for name in foreign if not name.startswith("."))
            folders[:] = sorted({*folders} - foreign)
            for name in folders:
                path = os.path.join(folder, name)
                if os.path.islink(path):
                    passed_over[path] = f"leads to {printable(os.path.realpath(path))}"
            for name in sorted(names):
                path = os.path.join(folder, name)
                if is_image(name):
                    files.append((path, label))
                elif os.path.islink(path) and not os.path.exists(path):
                    passed_over[path] = "leads nowhere"
                elif not name.startswith("."):
                    others[Path(name).suffix or "without an extension"] += 1
    if passed_over:
        warn(
            f"{len(passed_over)} links in the classes of {where} are not followed: only a class "
            f"folder may be a link to a folder{listed(passed_over)}"
        )
    if others:
        counted = printable(", ".join(f"{n:,} {kind}" for kind, n in others.most_common()))
        say(f"{where}: files that this reader does not take for images: {counted}")
    if not files:
        has = f" (it has {counted})" if others else ""
        raise ValueError(
            f"{where} holds no images{has}: it should look like {where}/<class>/<image>.jpg"
            f"{what_it_is(where)}"
        )
    return files


def raise_error(error: OSError) -> None:
    """os.walk would pass over a folder that it cannot read, in silence."""
    raise error
