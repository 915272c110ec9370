"""
Image folders: decoded once, in parallel, into a memory-mapped cache. Unreadable files are named and
left out.

    DIR/train/<class>/**   DIR/val/<class>/**  (or DIR/test/)
    .jpg .jpeg .png .gif .webp .bmp .tif .tiff .ppm .pgm

A loader that decodes the same JPEG in every epoch repeats work whose result never changes, and
finds a broken file hours after the start. Here every file is decoded before the first step. Each
split becomes one file of bytes (N, S', S', 3), which is mapped into memory. A set larger than
memory works, ranks share one copy, and the next run starts at once. The fingerprint of the cache
covers the names, sizes and times of all files, their order, and S'. The cache is built under a lock
and renamed when it is complete, so a killed run leaves no file that looks finished. Its size is
said before it is built, and a cache that the disk has no room for is refused. A damaged cache is
built again.

S' is the image size S if the images have that size already: nothing is resampled (Tiny ImageNet's
64). Else S' is 8/7 of S (256 for 224): the short side becomes S', a centre square is kept, and the
random crop has some room. Validation images are the centre S x S of this square, the usual
evaluation. One process a core decodes: at 64 pixels two threads are 2.3 times slower than one,
because they wait for Python's lock. JPEGs are decoded at 1/2, 1/4 or 1/8 of their size if the
result has at least twice the wanted size: then photographs have a PSNR of 42 to 47 dB against the
full decode; at once the wanted size it is 36 to 39. torch resizes: within 2 of 255 of Pillow's
bilinear filter, 2.3 times as fast.

Pillow converts unusual files to RGB: greyscale, CMYK, palette, 16 bits (the upper 8 are kept), the
first frame of an animation. Alpha is dropped, as in torchvision. EXIF's rotation is applied;
torchvision ignores it. Links are followed. Hidden files and other extensions are ignored. An image
above 179 megapixels (Pillow's limit, 0.7 GB a process) counts as unreadable. So does what is no
regular file: to open a pipe is to wait for its writer. Class names that differ only in case or
Unicode form are refused, and so is a class without a readable training image.

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

EXTENSIONS = (".jpg", ".jpeg", ".png", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")


class UnreadableImages(ValueError):
    """More files than allowed could not be decoded. `files` maps each path to its reason."""

    def __init__(self, files: dict[str, str], total: int, max_bad_share: float):
        self.files = files
        super().__init__(
            f"{len(files)} of {total} images are unreadable, more than {max_bad_share:.2%}: "
            f"mend or delete them, or raise --max-bad-share{listed(files)}"
        )


class DiskFull(OSError):
    """The cache does not fit on the disk."""


class OtherSize(ValueError):
    """An image of another size in a set of one size: it is not left out, the folder is wrong."""


def listed(files: dict[str, str]) -> str:
    """One line for each of the first hundred paths, with its reason."""
    lines = [f"\n  {printable(path)}: {reason}" for path, reason in list(files.items())[:100]]
    rest = f"\n  and {len(files) - 100} more" if len(files) > 100 else ""
    return "".join(lines) + rest


def printable(path: str) -> str:
    """Linux takes any bytes as a name. Those that are no UTF-8 become a question mark in a box."""
    return os.fsencode(path).decode(errors="replace")


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
        data = bytearray(decode(self.paths[i], self.crop))
        pixels = torch.frombuffer(data, dtype=torch.uint8).view(self.crop.side, -1, 3)
        return pixels.permute(2, 0, 1)


Split = tuple[Tensor | Files, Tensor]  # images uint8 (N, 3, S, S), memory-mapped; labels int64 (N,)


def load(
    folder: str | Path,
    image_size: int | None = None,
    *,
    only: str = "",
    cache_dir: str | Path | None = ".cache",
    max_bad_share: float = 0.01,
    progress: Callable[[list], Iterable] = iter,
    warn: Callable[[str], object] = warnings.warn,
    say: Callable[[str], object] = print,
) -> tuple[Split, Split, list[str]]:
    """Return ((train images, labels), (val images, labels), class names).

    Training images are (N, 3, S', S'), validation images (N, 3, S, S). image_size None: the images'
    own size if a hundred of them have the same square size, else 224. Images are in the order of
    their sorted classes and names. The place of a file that was left out is taken by a file from
    the end of the list.

    Args:
        only: the name of a set whose images all have image_size. An image of another size is an
            error, not resized.
        cache_dir: the folder of the decoded images. None: no cache, and the images are `Files`.
        progress: wraps the list of files that are decoded; pass tqdm to show the progress.
        warn: is called with one sentence a split about the files that were left out.
        say: is called with the place and size of a cache before it is built.

    Raises:
        FileNotFoundError: train/ or val/ is missing: it is another folder that was meant.
        DiskFull: an OSError; the cache has no room.
        ValueError: no images, a single class, a class without images, other classes in val than in
            train, two classes that cannot be told from each other, or a wrong size.
        UnreadableImages: a ValueError; more than max_bad_share of a split cannot be decoded.
    """
    folder = Path(folder)
    train = folder / "train"
    val = next((folder / name for name in ("val", "test") if (folder / name).is_dir()), None)
    if not train.is_dir() or val is None:
        raise FileNotFoundError(
            f"{folder} should hold train/<class>/ and val/<class>/ (or test/<class>/)"
        )
    classes = class_folders(train)
    val_classes = class_folders(val)
    if set(classes) != set(val_classes):
        only_one = ", ".join(sorted(set(classes) ^ set(val_classes)))
        raise ValueError(f"{train} and {val} hold different classes: only one has {only_one}")
    if len(classes) == 1:
        raise ValueError(f"{train} holds one class: there is nothing to tell apart")
    train_files = list_files(classes)
    val_files = list_files(val_classes)
    for where, files in ((train, train_files), (val, val_files)):
        if not files:
            raise ValueError(
                f"{where} holds no images: it should look like {where}/<class>/<image>.jpg"
            )
    own = own_side([path for path, _ in train_files[:: len(train_files) // 100 or 1]])
    side = image_size or own or 224
    short = side if only or side == own else round(side * 8 / 7)
    splits = []
    for where, files, crop in (
        (train, train_files, Crop(short, short, only)),
        (val, val_files, Crop(short, side, only)),
    ):
        if cache_dir is None:
            images, bad = None, decode_all(files, crop, None, progress)
        else:
            images, bad = cached(where, files, crop, Path(cache_dir), progress, say)
        rows = kept_rows(len(files), bad)
        bad = {files[i][0]: reason for i, reason in bad.items()}
        if len(bad) > max_bad_share * len(files) or not rows:
            raise UnreadableImages(bad, len(files), max_bad_share)
        if bad:
            warn(f"{len(bad)} of {len(files)} images in {where} are unreadable and left out:"
                 f"{listed(bad)}")
        if images is None:
            images = Files([files[i][0] for i in rows], crop)
        splits.append((images, torch.tensor([files[i][1] for i in rows])))
    counts = splits[0][1].bincount(minlength=len(classes)).tolist()
    if empty := [name for name, count in zip(classes, counts, strict=True) if not count]:
        raise ValueError(f"{train} holds no readable image of {', '.join(empty)}: add some, or "
                         "delete the folder here and in the validation set")
    return splits[0], splits[1], words(folder / "words.txt", list(classes))


def words(path: Path, classes: list[str]) -> list[str]:
    """ImageNet's folders are WordNet numbers; words.txt beside them has the names."""
    if not path.is_file():
        return classes
    lines = path.read_text("utf-8").splitlines()
    meanings = dict(line.split("\t", 1) for line in lines if "\t" in line)
    names = [meanings.get(number, number).split(",")[0].strip() for number in classes]
    both = zip(names, classes, strict=True)
    return [name if names.count(name) == 1 else number for name, number in both]


def class_folders(folder: Path) -> dict[str, Path]:
    """Class name -> folder, sorted. Names get Unicode's composed form; Macs write the other one."""
    classes, by_folded_name = {}, {}
    for path in folder.iterdir():
        if path.is_dir() and not path.name.startswith("."):
            name = unicodedata.normalize("NFC", printable(path.name))
            other = by_folded_name.setdefault(name.casefold(), path)
            if other != path:
                raise ValueError(
                    f"{printable(other)} and {printable(path)} are one class to some file systems: "
                    "merge or rename them"
                )
            classes[name] = path
    return dict(sorted(classes.items()))


def list_files(classes: dict[str, Path]) -> list[tuple[str, int]]:
    """(path, label) of every image file, in order. Links are followed, each folder is read once."""
    files = []
    for label, top in enumerate(classes.values()):
        seen = {os.path.realpath(top)}
        for folder, folders, names in os.walk(top, followlinks=True):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            real = {name: os.path.realpath(os.path.join(folder, name)) for name in folders}
            folders[:] = [name for name in folders if real[name] not in seen]  # links make circles
            seen.update(real.values())
            for name in sorted(names):
                if not name.startswith(".") and name.lower().endswith(EXTENSIONS):
                    files.append((os.path.join(folder, name), label))
    return files


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
        raise ValueError("this is no regular file")
    return Image.open(path)


def decode(path: str, crop: Crop) -> bytes:
    """RGB, side x side x 3. Raises what Pillow raises: for a broken file any exception."""
    with image_file(path) as image:
        if crop.only and image.size != (crop.side, crop.side):
            width, height = image.size
            raise OtherSize(
                f"{printable(path)} is {width}x{height} pixels; {crop.only} images are "
                f"{crop.side}x{crop.side}"
            )
        # The JPEG decoder itself halves, at most three times.
        image.draft(None, (2 * crop.short, 2 * crop.short))
        image.load()
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
    return pixels if side == crop.short == crop.side else resized(pixels, side, crop)


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


def decode_into(file: str | None, crop: Crop, first: int, paths: list[str]) -> list[str | None]:
    """Decode files and write them to the cache, if any, from row `first` on.

    Returns each file's error, or None.
    """
    rows, reasons = [], []
    for path in paths:
        try:
            rows.append(decode(path, crop))
            reasons.append(None)
        except OtherSize:
            raise
        except Exception as error:
            rows.append(bytes(3 * crop.side**2))
            reason = f"{type(error).__name__}: {error}".replace(repr(path), "")
            reasons.append(" ".join(reason.split()))
    if file:
        data = b"".join(rows)
        cache = opened(file)
        cache.seek(first * 3 * crop.side**2)
        if cache.write(data) != len(data):
            raise DiskFull(f"the disk has no room for {file}")
    return reasons


@functools.cache
def opened(file: str) -> io.FileIO:
    return open(file, "r+b", buffering=0)


def prepare_worker() -> None:
    """Set up a worker: no warnings of Pillow, one thread, and exit when the parent dies.

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
    files: list[tuple[str, int]], crop: Crop, file: str | None, progress
) -> dict[int, str]:
    """Decode every file into its row of `file`, in one process a core.

    Returns the errors: row -> reason.
    """
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
        reasons = itertools.chain.from_iterable(pool.map(job, firsts, chunks))
        numbered = enumerate(zip(progress(files), reasons, strict=True))
        return {i: reason for i, (_, reason) in numbered if reason}


def cached(
    where: Path, files: list[tuple[str, int]], crop: Crop, cache_dir: Path, progress, say
) -> tuple[Tensor, dict[int, str]]:
    """(images in the order of `kept_rows`, reasons of the unreadable files).

    Reads the cache, or builds it first.
    """
    digest = hashlib.sha256(f"3 {crop}".encode())
    for path, _ in files:
        try:
            status = os.stat(path)
            state = f" {status.st_size} {status.st_mtime_ns}\n"
        except OSError:  # a broken link is an unreadable file like any other
            state = " gone\n"
        digest.update(os.fsencode(path.removeprefix(str(where))) + state.encode())
    home = hashlib.sha256(os.fsencode(where.resolve())).hexdigest()[:8]
    # Each folder and size has one cache: a new one replaces the old one.
    name = f"{where.name}-{crop.side}-{home}"
    pixels = cache_dir / f"{name}-{digest.hexdigest()[:16]}.images"
    reasons = pixels.with_suffix(".json")
    cache_dir.mkdir(parents=True, exist_ok=True)
    with locked(cache_dir / f"{name}.lock"):
        bad = unreadable(pixels, reasons, len(files), crop)
        if bad is None:
            for old in cache_dir.glob(f"{name}-*"):  # other files, damaged, or of a killed run
                with contextlib.suppress(PermissionError):  # Windows: another run has it open
                    old.unlink()
            refuse_too_large(len(files), crop, pixels, say)
            build(files, crop, pixels, reasons, progress)
            bad = unreadable(pixels, reasons, len(files), crop)
        size = (len(files) - len(bad)) * 3 * crop.side**2
        if size == 0:
            return torch.empty(0, 3, crop.side, crop.side), bad
        # Shared: a private mapping counts as used memory, and the set may be larger than memory.
        images = torch.from_file(str(pixels), shared=True, size=size, dtype=torch.uint8)
    return images.view(-1, crop.side, crop.side, 3).permute(0, 3, 1, 2), bad


def unreadable(pixels: Path, reasons: Path, total: int, crop: Crop) -> dict[int, str] | None:
    """What the cache says of unreadable files: row -> reason. None: no cache, or a damaged one."""
    try:
        bad = {int(i): str(reason) for i, reason in json.loads(reasons.read_text("utf-8")).items()}
        size = pixels.stat().st_size
    except (OSError, ValueError, AttributeError):
        return None
    rows = total - len(bad)
    in_range = all(0 <= i < total for i in bad)
    return bad if in_range and size == rows * 3 * crop.side**2 else None


def refuse_too_large(count: int, crop: Crop, pixels: Path, say) -> None:
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
    files: list[tuple[str, int]], crop: Crop, pixels: Path, reasons: Path, progress
) -> None:
    """Write the cache of these files under a temporary name, then rename it."""
    row = 3 * crop.side**2
    temporary = f"{pixels}.{os.getpid()}.part"
    try:
        with open(temporary, "x+b", buffering=0) as cache:  # Windows renames what is closed
            bad = decode_all(files, crop, temporary, progress)
            rows = kept_rows(len(files), bad)
            for i, source in enumerate(rows):
                if source != i:
                    cache.seek(source * row)
                    image = cache.read(row)
                    cache.seek(i * row)
                    cache.write(image)
            cache.truncate(len(rows) * row)
            os.fsync(cache.fileno())
        os.replace(temporary, pixels)
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(bad, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, reasons)
    finally:
        Path(temporary).unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time. The lock ends with this process; forked workers do not get it."""
    with open(path, "ab") as file:
        if fcntl:
            fcntl.lockf(file, fcntl.LOCK_EX)
        while not fcntl:
            with contextlib.suppress(OSError):  # after ten seconds: it is asked again
                msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
                break
        yield
