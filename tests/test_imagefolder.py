"""Image folders: what is dirty is named, what is odd but decodable is right, no half a cache."""

import hashlib
import io
import json
import os
import pickle
import shutil
import signal
import struct
import zlib

import pytest
import torch
from helpers import ROOT, run_script, script
from PIL import Image
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image

from data import batches, decode, decoded_cache, imagefolder, synthetic
from data.decode import CLEAR, CUT, LONG, Crop

PICTURE = to_pil_image(synthetic.draw(5, 1, seed=0)[0][0]).crop((0, 0, 16, 16))


SAME = Crop(16, 16)


def rgb(path, crop=SAME):
    return decode.Files([str(path)], crop)[0]


def as_pillow(path):
    with Image.open(path) as image:
        return pil_to_tensor(image.convert("RGB"))


# --- One file


@pytest.mark.parametrize(
    "name, mode",
    [
        ("a.jpg", "RGB"),
        ("grey.png", "L"),
        ("cmyk.jpg", "CMYK"),
        ("palette.gif", "P"),
        ("ünïcödé\n猫.png", "RGBA"),
    ],
)
def test_what_is_decodable_becomes_the_rgb_that_pillow_makes_of_it(tmp_path, name, mode):
    PICTURE.convert(mode).save(tmp_path / name)
    assert torch.equal(rgb(tmp_path / name), as_pillow(tmp_path / name))


def gray_ramp(bits, mode="I;16"):
    """16 x 16 pixels, from 0 to the largest number of so many bits."""
    numbers = [i * (2**bits - 1) // 255 for i in range(256)]
    size, code = (4, "<I") if mode == "I" else (2, "<H")
    return Image.frombytes(mode, (16, 16), b"".join(struct.pack(code, n)[:size] for n in numbers))


def with_alpha(mode, alpha):
    image = Image.new("RGBA", (16, 16), (0, 0, 0, 255))
    image.putalpha(alpha)
    return image.convert(mode)


def colours_of_16_bits(largest):
    """A PNG that Pillow cannot write."""
    row = b"\0" + b"".join(struct.pack(">HHH", x * largest // 15, 0, 0) for x in range(16))
    head = struct.pack(">IIBBBBB", 16, 16, 16, 2, 0, 0, 0)
    file = b"\x89PNG\r\n\x1a\n"
    for kind, data in ((b"IHDR", head), (b"IDAT", zlib.compress(row * 16)), (b"IEND", b"")):
        file += struct.pack(">I", len(data)) + kind + data
        file += struct.pack(">I", zlib.crc32(kind + data))
    return file


def as_jpeg(share=1, **options):
    """This share of the bytes of a JPEG."""
    file = io.BytesIO()
    noise = torch.randint(0, 256, (3, 96, 64), generator=torch.Generator().manual_seed(0))
    to_pil_image(noise.byte()).save(file, "JPEG", **options)
    return file.getvalue()[: round(len(file.getvalue()) * share)]


MASK = Image.linear_gradient("L").resize((16, 16))
ODD = {  # name -> (a picture or bytes, what it becomes, the words for it)
    "palette.gif": (PICTURE.convert("P"), "as it is", []),
    "animation.webp": (PICTURE, "the first frame", []),
    "photo.jfif": (as_jpeg(), "as it is", []),
    "photo.jpe": (as_jpeg(), "as it is", []),
    "photo.jp2": (PICTURE, "as it is", []),
    "photo.avif": (PICTURE, "as it is", []),
    "print.jpg": (PICTURE.convert("CMYK"), "RGB", ["CMYK"]),
    "gray.png": (MASK, "RGB", ["gray"]),
    "16 bits.png": (gray_ramp(16), "0 to 255", ["gray"]),
    "14 bits.tif": (gray_ramp(14), "0 to 255", ["gray", "of 14 bits in 16"]),
    "12 bits.png": (gray_ramp(12), "0 to 255", ["gray", "of 12 bits in 16"]),
    "10 bits.png": (gray_ramp(10), "0 to 255", ["gray", "of 10 bits in 16"]),
    "8 bits.tif": (gray_ramp(8, "I"), "0 to 255", ["gray", "of 8 bits in 16"]),
    "logo.png": (with_alpha("RGBA", Image.new("L", (16, 16), 0)), "white", [CLEAR]),
    "shade.webp": (with_alpha("RGBA", MASK), "a gradient to black", [CLEAR]),
    "shade.png": (with_alpha("LA", MASK), "a gradient to black", ["gray", CLEAR]),
    "opaque.png": (PICTURE.convert("RGBA"), "as it is", []),
    "long.png": (PICTURE.resize((90, 30)), "the centre square", [LONG]),
    "last bytes.jpg": (as_jpeg()[:-2], "as it is", [CUT]),
    "last tenth.jpg": (as_jpeg(0.93), "gray below", [CUT]),
    "progressive.jpg": (as_jpeg(0.9, progressive=True), "less sharp", [CUT]),
    "half.jpg": (as_jpeg(0.5), "unreadable", "more than its last bytes"),
    "fractions.tif": (MASK.convert("F"), "unreadable", "range is unknown"),
    "32 bits.tif": (gray_ramp(31, "I"), "unreadable", "range is unknown"),
    "colours of 12 bits in 16.png": (colours_of_16_bits(4095), "unreadable", "lowest of its 16"),
    "colours of 16 bits.png": (colours_of_16_bits(65535), "RGB", []),
    "black of 16 bits.png": (colours_of_16_bits(0), "black", []),
    "program.eps": (PICTURE, "unreadable", "PostScript"),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_file_is_what_a_viewer_shows_or_unreadable_and_the_page_says_which(tmp_path, name):
    content, becomes, words = ODD[name]
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content.save(path, **{"lossless": True} if path.suffix == ".webp" else {})
    if becomes == "unreadable":
        with pytest.raises(decode.Unreadable, match=words):
            decode.read(str(path), SAME)
        said = words
    else:
        pixels, said = decode.decode(str(path), Crop(16, 16))
        assert said == words
        first, last, mean = pixels[0], pixels[-1], sum(pixels) / len(pixels)
        if becomes == "0 to 255":
            assert (first, last) == (0, 255) and len({*pixels}) == 256
        if becomes in ("white", "black"):
            assert {*pixels} == {255 if becomes == "white" else 0}
        if becomes == "a gradient to black":
            assert first == 255 - MASK.getpixel((0, 0)) and last < 10
        assert becomes == "black" or mean > 40, "not black"
        said = ", ".join(said)
    page = (ROOT / "docs" / "data.md").read_text()
    assert f"| `{name}` | {becomes} | {said} |" in page


@pytest.mark.parametrize("kind", ["jpg", "tif"])
def test_exif_turns_the_picture_as_a_viewer_would(tmp_path, kind):
    path, exif = tmp_path / f"a.{kind}", Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise to see it upright
    PICTURE.save(path, exif=exif)
    turns = 0 if kind == "tif" else -1  # Pillow turns TIFF itself
    assert torch.equal(rgb(path), as_pillow(path).rot90(turns, (1, 2)))


@pytest.mark.parametrize(
    "width, height, detail, largest",
    [
        (24, 24, 24, 2),  # noise
        (1200, 800, 5, 12),
        (1, 500, 1, 0),  # soft shapes, as JPEG, which is halved before
    ],
)
def test_resizing_and_cropping_agree_with_torchvision(tmp_path, width, height, detail, largest):
    noise = torch.Generator().manual_seed(1)
    image = torch.randint(0, 256, (3, detail, detail), generator=noise, dtype=torch.uint8)
    path = tmp_path / ("a.jpg" if detail == 5 else "a.png")
    to_pil_image(image).resize((width, height), Image.Resampling.BICUBIC).save(path, quality=95)
    with Image.open(path) as image:
        reference = v2.CenterCrop(56)(v2.Resize(64)(image.convert("RGB")))
    gap = (rgb(path, Crop(64, 56)).int() - pil_to_tensor(reference).int()).abs()
    assert gap.max() <= largest and gap.float().mean() < 1.5


@pytest.mark.parametrize(
    "name, size, most",
    [
        ("huge.jpg", (12_000, 9_000), 60),
        ("huge.png", (6_000, 6_000), 200),
    ],
)
def test_a_hundred_megapixels_take_little_memory(tmp_path, name, size, most):
    Image.new("RGB", size, (200, 100, 50)).save(tmp_path / name)
    measure = script(
        tmp_path,
        """
import resource
from data.decode import Crop, decode
from data.decoded_cache import decode_into
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert decode_into(None, Crop(64, 64), decode, 0, [sys.argv[1]])[0].error == ""
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(grown // (2**20 if sys.platform == "darwin" else 2**10))
""",
    )
    code, megabytes, err = run_script([measure, name], tmp_path)
    assert code == 0 and int(megabytes) < most, f"{megabytes} {err}"


# --- A folder


@pytest.fixture
def folder(tmp_path):
    """Two classes, ten images each in train/, two in val/; every image has a colour of its own."""
    for split, count in (("train", 10), ("val", 2)):
        for label, name in enumerate(("cat", "dog")):
            path = tmp_path / "set" / split / name
            path.mkdir(parents=True)
            for i in range(count):
                blue = 7 if split == "train" else 8
                Image.new("RGB", (8, 8), (label, i, blue)).save(path / f"{i:03d}.png")
    return tmp_path / "set"


def read(folder, **options):
    how = {"cache_dir": folder.parent / "cache", "warn": lambda text: pytest.fail(text)}
    return imagefolder.load(folder, **how | {"say": str} | options)


def read_with_a_warning(folder, *words, **options):
    """(train, val) of a folder with one thing to warn of: a sentence with these words."""
    warnings = []
    train, val, _ = read(folder, warn=warnings.append, **options)
    (said,) = warnings
    assert all(word in said for word in words), said
    return train, val


def colours(split):
    both = zip(split[0], split[1].tolist(), strict=True)
    return sorted((*image[:, 0, 0].tolist(), label) for image, label in both)


EXPECTED = [(label, i, 7, label) for label in range(2) for i in range(10)]


@pytest.fixture
def decoding(monkeypatch):
    """The number of files of each call that decoded."""
    calls, decode_all = [], decoded_cache.decode_all

    def counted(files, *rest):
        calls.append(len(files))
        return decode_all(files, *rest)

    monkeypatch.setattr(decoded_cache, "decode_all", counted)
    return calls


def test_the_second_run_decodes_nothing_and_a_change_decodes_again(folder, decoding):
    first = read(folder)
    assert colours(first[0]) == EXPECTED and first[2] == ["cat", "dog"]
    assert colours(read(folder)[0]) == EXPECTED and decoding == [20, 4]
    file = folder / "train/cat/000.png"
    before = file.stat()
    Image.new("RGB", (8, 8), (9, 0, 7)).save(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size, "another picture of the same size and time"
    assert (9, 0, 7, 0) in colours(read(folder)[0]) and decoding[2:] == [20]
    assert colours(first[0]) == EXPECTED, "an image that is in use does not change under it"
    read(folder, image_size=4)
    read(folder)
    assert decoding[3:] == [20, 4], "another size is another cache"
    caches = [*(folder.parent / "cache").glob("*.images")]
    assert len(caches) == 4, "what is out of date was deleted"


def not_utf8(path):
    with open(os.fsencode(path.parent) + b"/\xff.png", "w") as file:
        file.write("no picture")


DIRT = {
    "truncated.png": lambda path: path.write_bytes((path.parent / "001.png").read_bytes()[:-30]),
    "empty.jpg": lambda path: path.touch(),
    "text.jpg": lambda path: path.write_text("this is not the picture you are looking for"),
    "nowhere.jpg": lambda path: path.symlink_to("/nowhere/at/all.jpg"),
    "000 pipe.jpg": os.mkfifo,
    "bomb.png": lambda path: Image.new("1", (14_000, 14_000)).save(path),
    "endless.jpg": lambda path: path.symlink_to("/dev/zero"),
    "\ufffd.png": not_utf8,
}


@pytest.mark.parametrize("cached", [True, False])
def test_what_is_unreadable_is_named_counted_and_left_out_and_too_much_is_refused(
    folder, cached, decoding
):
    for name, plant in DIRT.items():
        plant(folder / "train/cat" / name)
    options = {} if cached else {"cache_dir": None}
    words = (f"{len(DIRT)} of 28 images", *DIRT)
    train, _ = read_with_a_warning(folder, *words, max_bad_share=0.4, **options)
    assert colours(train) == EXPECTED
    with pytest.raises(imagefolder.UnreadableImages, match="more than 10") as error:
        read(folder, max_bad_share=0.1, **options)
    assert str(folder / "train/cat/text.jpg") in str(error.value)
    assert not cached or decoding == [28, 4], "the second attempt need not decode again"


def test_other_files_are_passed_over_and_a_class_may_be_a_link(folder):
    cat, outside = folder / "train/cat", folder.parent / "elsewhere"
    for name in (".hidden.png", "notes.txt", "000.png.part"):
        (cat / name).write_text("nothing")
    (folder / "train/.git").mkdir()
    cat.rename(outside)
    cat.symlink_to(outside)
    (outside / "deeper").mkdir()
    for red in (50, 51):  # a change behind a link is a change
        Image.new("RGB", (8, 8), (red, 60, 70)).save(outside / "deeper/ö.png")
        assert colours(read(folder)[0]) == sorted([*EXPECTED, (red, 60, 70, 0)])


@pytest.mark.parametrize(
    "link, target",
    [
        ("train/cat/circle", "."),
        ("train/cat/top", "/"),
        ("train/cat/other", "../dog"),
        ("val/dog/leak", "../../train/dog"),
        ("train/cat/missing", "/nowhere"),
        ("train/missing", "/nowhere"),
    ],
)
def test_any_other_link_to_a_folder_is_named_and_not_followed(folder, link, target):
    (folder / link).symlink_to(target)
    train, val = read_with_a_warning(folder, f"{folder / link}: ")
    assert colours(train) == EXPECTED
    assert len(val[1]) == 4


@pytest.mark.parametrize(
    "place, words",
    [
        ("train/cat/x.png", "0 in both splits, 2 with two labels"),
        ("val/dog/x.png", "1 in both splits, 0 with two labels"),
    ],
)
@pytest.mark.parametrize("copy", [os.link, shutil.copy])
def test_a_file_with_two_labels_or_in_both_splits_is_named(folder, place, words, copy):
    copy(folder / "train/dog/000.png", folder / place)
    (folder / "train/dog/again.png").symlink_to("000.png")  # drawn more often: that is allowed
    read_with_a_warning(folder, words, str(folder / place))


def gigabytes(path):
    with open(path, "wb") as file:
        file.truncate(2 * 2**30)  # a sparse file


def deep(folder):
    """A folder whose path is too long to be read."""
    here = os.getcwd()
    os.chdir(folder)
    for _ in range(25):
        os.mkdir("n" * 200)
        os.chdir("n" * 200)
    os.chdir(here)


def emptied(folder):
    for path in folder.glob("*.png"):
        path.write_bytes(b"")


@pytest.mark.parametrize(
    "damage, kind, words",
    [
        (lambda f: shutil.rmtree(f / "train"), FileNotFoundError, "should hold train/<class>/"),
        (
            lambda f: shutil.rmtree(f / "val"),
            FileNotFoundError,
            "val/<class>/ \\(or test/<class>/\\)",
        ),
        (
            lambda f: (f / "val/owl").mkdir(),
            ValueError,
            "val holds folders .* no classes of .*: owl",
        ),
        (
            lambda f: [shutil.rmtree(p) for p in f.glob("*/dog")],
            ValueError,
            "train holds one class",
        ),
        (
            lambda f: [p.unlink() for p in (f / "val").glob("*/*")],
            ValueError,
            "val holds no images",
        ),
        (lambda f: emptied(f / "train/dog"), ValueError, "train holds no readable image of dog"),
        (
            lambda f: (f / "train/Cat").mkdir(),
            ValueError,
            "are one class to some file systems: merge",
        ),
        (lambda f: deep(f / "train/cat"), OSError, "File name too long"),
        (
            lambda f: gigabytes(f / "words.txt"),
            ValueError,
            "words.txt is too long to hold the names",
        ),
    ],
)
def test_a_folder_that_makes_no_sense_is_refused_in_a_sentence(folder, damage, kind, words):
    damage(folder)
    with pytest.raises(kind, match=words):
        read(folder, max_bad_share=0.6, warn=str)


def test_names_of_a_class_are_one_in_every_unicode_form_and_words_txt_names_them_better(folder):
    for split, name in (("train", "caf\u00e9"), ("val", "cafe\u0301")):
        (folder / split / "cat").rename(folder / split / name)
    assert read(folder)[2] == ["caf\u00e9", "dog"]
    (folder / "words.txt").write_text("dog\thound, good boy\nn02\tcrane\nn03\tcrane\n")
    assert read(folder)[2] == ["caf\u00e9", "hound"]
    names = imagefolder.readable_names(folder / "words.txt", ["n02", "n03", "n04"])
    assert names == ["n02", "n03", "n04"], "what is ambiguous or unknown keeps its number"


def test_the_default_size_is_the_images_own_or_224(folder):
    Image.new("RGB", (9, 8)).save(folder / "train/dog/other.png")
    train, val, _ = read(folder)
    assert train[0].shape[2:] == (256, 256) and val[0].shape[2:] == (224, 224)


def test_what_is_unusual_is_counted_in_a_line_and_a_class_without_validation_is_named(folder):
    Image.new("L", (8, 8)).save(folder / "train/cat/grey.png")
    Image.new("CMYK", (8, 8)).save(folder / "val/cat/print.jpg")
    for name in ("broken.png", "phone.heic"):
        (folder / "train/cat" / name).touch()
    emptied(folder / "val/dog")
    for _ in range(2):  # decoded, and from the cache
        said, warnings = [], []
        read(folder, max_bad_share=0.6, say=said.append, warn=warnings.append)
        assert "of 27 images: 1 gray, 3 unreadable, 1 CMYK" in said[-1]
        assert "train: files that this reader does not take for images: 1 .heic" in " ".join(said)
        assert "val holds no readable image of dog" in warnings[-1]


FOREIGN = (
    "@eaDir",
    "#recycle",
    "$RECYCLE.BIN",
    "__MACOSX",
    ".thumbnails",
    ".ipynb_checkpoints",
    "System Volume Information",
    "lost+found",
)


@pytest.mark.parametrize("name", [*FOREIGN, "old run", "runs/a"])
def test_folders_of_a_disk_an_editor_or_a_run_are_no_data(folder, name):
    for place in ("train", "train/cat", "val/dog"):
        foreign = folder / place / name
        (foreign / "000.png").mkdir(parents=True)
        Image.new("RGB", (8, 8), (99, 9, 9)).save(foreign / "000.png" / "thumb.png")
        if name not in FOREIGN:
            (foreign / "metrics.jsonl").touch()
    warnings, said = [], []
    train, val, classes = read(folder, warn=warnings.append, say=said.append)
    assert (colours(train), len(val[1]), classes) == (EXPECTED, 4, ["cat", "dog"])
    hidden = name.startswith(".")
    assert hidden or name.split("/")[0] in "".join(warnings)
    assert hidden or f"1 {name.split('/')[0]}/" in "".join(said)


@pytest.mark.parametrize("name", ["@", "#1", "recycle", "thumbnails", "runs", "$"])
def test_a_class_with_such_a_name_is_a_class(folder, name):
    for split in ("train", "val"):
        (folder / split / "cat").rename(folder / split / name)
    assert read(folder)[2] == sorted([name, "dog"])


@pytest.mark.parametrize(
    "train, val",
    [
        ("Train", "Val"),
        ("training", "validation"),
        ("TRAIN", "valid"),
        ("train", "Testing"),
    ],
)
def test_splits_have_several_names(folder, train, val):
    (folder / "train").rename(folder / train)
    (folder / "val").rename(folder / val)
    assert colours(read(folder)[0]) == EXPECTED


@pytest.mark.parametrize("empty", [True, False])
def test_a_class_that_is_missing_in_val_is_named_like_an_empty_one(folder, empty):
    shutil.rmtree(folder / "val/dog")
    if empty:
        (folder / "val/dog").mkdir()
    train, val = read_with_a_warning(folder, "val holds no readable image of dog")
    assert colours(train) == EXPECTED and val[1].tolist() == [0, 0]


def flat(folder):
    for path in [*folder.rglob("*.png")]:
        path.rename(folder / f"{path.parent.parent.name} {path.parent.name} {path.name}")
    for path in ("train/cat", "train/dog", "val/cat", "val/dog", "train", "val"):
        (folder / path).rmdir()


def wrapped(name):
    def wrap(folder):
        moved = folder.rename(folder.with_name("inner"))
        (folder / name).parent.mkdir(parents=True)
        moved.rename(folder / name)

    return wrap


@pytest.mark.parametrize("share", [None, 0.5])
@pytest.mark.parametrize(
    "change, words",
    [
        (flat, "is a flat folder of 24 pictures"),
        (wrapped("dataset"), "dataset has a split: pass --data-dir .*/dataset"),
        (wrapped("archive/dataset"), "dataset has a split: pass --data-dir .*/archive/dataset"),
    ],
)
def test_a_folder_that_is_another_one_is_told_what_it_is(folder, change, words, share):
    change(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        read(folder, val_share=share, warn=str)


def test_three_bad_files_of_few_do_not_end_a_run_and_none_may_be_wanted(folder):
    for i in range(3):
        (folder / f"train/cat/{i:03d}.png").write_bytes(b"")
    assert len(read(folder, warn=str)[0][1]) == 17
    with pytest.raises(imagefolder.UnreadableImages):
        read(folder, warn=str, max_bad_share=0)
    (folder / "train/cat/003.png").write_bytes(b"")
    with pytest.raises(imagefolder.UnreadableImages, match="4 of 20"):
        read(folder, warn=str)


# --- A folder without a split


@pytest.fixture
def photos(tmp_path):
    """Two classes of a hundred photos; the red of each is its number."""
    for label, name in enumerate(("cat", "train")):  # a class may have this name
        (tmp_path / "set" / name).mkdir(parents=True)
        for i in range(100):
            Image.new("RGB", (8, 8), (i, 0, label)).save(tmp_path / "set" / name / f"{i:03d}.png")
    return tmp_path / "set"


def test_a_folder_without_a_split_is_split_by_class_and_a_new_photo_moves_at_most_one(photos):
    said = []
    train, val, classes = read(photos, val_share=0.2, say=said.append)
    assert classes == ["cat", "train"]
    assert len(train[1]) + len(val[1]) == 200
    assert val[1].tolist() == [0] * 20 + [1] * 20
    assert not {*colours(train)} & {*colours(val)}
    assert f"--val-share 0.2 takes {len(train[1])} images for training" in said[0]
    assert "2 classes: cat, train" in said[0]
    copy = photos.rename(photos.with_name("moved"))
    Image.new("RGB", (8, 8), (255, 0, 0)).save(copy / "cat/000 new.png")
    for cache in (photos.parent / "cache", None):
        again = read(copy, val_share=0.2, cache_dir=cache)
        assert len({*colours(again[1])} ^ {*colours(val)}) <= 2
    more = read(copy, val_share=0.5)
    assert {*colours(val)} < {*colours(more[1])}, "a larger share keeps what was validated"


def test_the_same_names_are_validated_on_every_machine(photos):
    composed, mac = imagefolder.hash_of("/caf\u00e9.png"), imagefolder.hash_of("/cafe\u0301.png")
    assert composed == mac == hashlib.sha256("/caf\u00e9.png".encode()).digest()
    by_hand = sorted(range(100), key=lambda i: hashlib.sha256(b"/%03d.png" % i).digest())[:7]
    _, val, _ = read(photos, val_share=0.07)
    assert sorted(colours(val)) == sorted((i, 0, label, label) for i in by_hand for label in (0, 1))


@pytest.mark.parametrize("count, share, validated", [(1, 0.5, 0), (2, 0.01, 1), (5, 0.99, 4)])
def test_a_class_of_few_gives_one_image_and_keeps_one(photos, count, share, validated):
    for path in sorted((photos / "cat").iterdir())[count:]:
        path.unlink()
    warnings = []
    _, val, _ = read(photos, val_share=share, warn=warnings.append)
    assert val[1].tolist().count(0) == validated
    assert len(warnings) == (validated == 0)


def as_split(folder, *names):
    for name in names:
        shutil.copytree(folder / "cat", folder / name / "cat")


@pytest.mark.parametrize(
    "share, change, kind, words",
    [
        (None, str, FileNotFoundError, "--val-share 0.2"),
        (
            0.2,
            lambda f: as_split(f, "Test", "Val"),
            imagefolder.WrongShare,
            "has one: train/ and Val/",
        ),
        (
            0.2,
            lambda f: [as_split(f, "Valid"), shutil.rmtree(f / "train")],
            FileNotFoundError,
            "hold",
        ),
        (0.2, lambda f: (f / "val").mkdir(), imagefolder.WrongShare, "Leave the flag out"),
        (0.2, lambda f: (f / "notes").mkdir(), ValueError, "no readable image of notes"),
        (0.2, lambda f: shutil.rmtree(f / "cat"), ValueError, "one class"),
        (
            0.9,
            lambda f: [path.unlink() for path in f.glob("*/*.png") if path.stem != "007"],
            imagefolder.WrongShare,
            "2 for training and 0 for validation",
        ),
    ],
)
def test_what_cannot_be_split_is_refused(photos, share, change, kind, words):
    change(photos)
    with pytest.raises(kind, match=words):
        read(photos, val_share=share)


def test_a_run_remembers_its_share_and_does_not_go_on_with_another(run, tmp_path):
    folder = tmp_path / "photos"
    shutil.copytree(f"{run.images}/train", folder)
    line = ("--dataset", "imagefolder", "--data-dir", folder, "--resume", "auto", "--val-share")
    code, _, err, _ = run(*line, 0.2, "--max-steps", 2)
    assert code == 0, err
    assert json.loads((run.folder / "model.json").read_text())["val_share"] == 0.2
    code, _, err, _ = run(*line, 0.2 + 1e-9, "--max-steps", 3)  # it would split in the same way
    assert code == 2
    assert "val_share: 0.2 -> 0.200000001" in err
    code, _, err, _ = run(*line, 0.2, "--max-steps", 3)
    assert code == 0, err


# --- The cache


def build_elsewhere(folder, log, die):
    def progress(files):
        with open(log, "a") as file:
            file.write(f"{len(files)}\n")
        for i, file in enumerate(files):
            if die and i == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            yield file

    read(folder, progress=progress)


@pytest.mark.parametrize(
    "die, ends, built",
    [
        (False, {0}, ["20", "4"]),
        (True, {signal.SIGKILL}, ["20"] * 3),
    ],
)
def test_processes_that_start_together_build_once_and_what_a_kill_leaves_is_no_cache(
    folder, tmp_path, die, ends, built
):
    log, children = tmp_path / "log", []
    for _ in range(3):
        children.append(os.fork())
        if children[-1] == 0:
            build_elsewhere(folder, log, die)
            os._exit(0)
    assert {os.waitpid(child, 0)[1] for child in children} == ends
    assert log.read_text().split() == built
    assert colours(read(folder)[0]) == EXPECTED
    assert not [*(tmp_path / "cache").glob("*.part")]


def test_the_size_of_a_cache_is_said_first_and_what_does_not_fit_is_refused(folder, monkeypatch):
    said, cache = [], folder.parent / "cache"
    with pytest.raises(decoded_cache.NoCache, match="pixels take 3,840,000"):
        read(folder, image_size=7 * 10**6, say=said.append)  # S' is 8/7 of it
    size = "8000000x8000000 pixels into"
    assert said == [f"decoding 20 images of {size} {cache}: 3,840,000.00 GB"]

    class Full(io.FileIO):  # it filled up since
        def write(self, data):
            return len(data) - 1

    monkeypatch.setattr(decoded_cache, "open_cache", lambda file: Full(file, "r+"))
    with pytest.raises(decoded_cache.NoCache, match="no room"):
        read(folder)
    assert {path.suffix for path in cache.iterdir()} == {".lock"}, "nothing that looks finished"


WHOLE = decode.decode


def dies(path, crop):
    if path.endswith(("cat/003.png", "dog/007.png")):
        os.kill(os.getpid(), signal.SIGKILL)
    return WHOLE(path, crop)


@pytest.mark.parametrize("cached", [True, False])
def test_a_picture_that_kills_its_decoder_is_named_and_left_out(folder, monkeypatch, cached):
    monkeypatch.setattr(imagefolder, "decode", dies)
    options = {} if cached else {"cache_dir": None}
    monkeypatch.setattr(decode.Files, "__getitem__", lambda self, i: torch.zeros(3, 8, 8))
    words = "2 of 20 images", "cat/003.png: the process that decoded it died"
    train, _ = read_with_a_warning(folder, *words, **options)
    assert len(train[1]) == 18
    assert not cached or colours(train) == [c for c in EXPECTED if c[:2] not in ((0, 3), (1, 7))]


def test_a_decoder_that_no_process_can_be_given_is_an_error_and_not_a_wait(folder, monkeypatch):
    monkeypatch.setattr(imagefolder, "decode", lambda path, crop: WHOLE(path, crop))
    with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):
        read(folder)


def test_a_cache_that_shrinks_is_a_sentence_and_one_that_is_replaced_is_none(folder):
    train, val, _ = read(folder)
    stream = batches.TrainBatches(*train, batch_size=8)
    stream.at(0)
    files = [*(folder.parent / "cache").glob("*.images")]
    for path in files:
        os.truncate(path, 100)
    with pytest.raises(batches.ImagesLost, match="was cut while the run read it"):
        stream.at(1)
    with pytest.raises(batches.ImagesLost):
        next(batches.val_batches(*val, stream.normalize, batch_size=2))
    again = read(folder)
    stream = batches.TrainBatches(*again[0], batch_size=8)
    for path in (folder.parent / "cache").glob("*.images"):
        path.unlink()
    stream.at(0)


def test_a_folder_that_cannot_hold_a_cache_is_a_sentence(folder):
    (folder.parent / "file").touch()
    with pytest.raises(decoded_cache.NoCache, match="file/x cannot be written"):
        read(folder, cache_dir=folder.parent / "file/x")


@pytest.mark.parametrize("inside", ["run", "train/class0/run", "."])
def test_a_run_writes_nothing_into_its_data(run, tmp_path, inside):
    folder = tmp_path / "photos"
    shutil.copytree(run.images, folder)
    before = sorted(tmp_path.rglob("*"))
    line = ("--dataset", "imagefolder", "--data-dir", folder, "--out-dir", folder / inside)
    code, _, err, _ = run(*line)
    assert code == 2
    assert "lies in --data-dir" in err
    assert sorted(tmp_path.rglob("*")) == before


def test_data_and_runs_may_lie_in_the_working_folder(run, tmp_path, monkeypatch):
    folder = tmp_path / "photos"
    shutil.copytree(f"{run.images}/train", folder)
    monkeypatch.chdir(folder)
    line = ("--dataset", "imagefolder", "--data-dir", ".", "--val-share", 0.2, "--max-steps", 2)
    line += ("--cache-dir", tmp_path / "cache")
    for name in ("first", "second"):  # the second time runs/ is there
        out = tmp_path / "out" / name
        code, last, err, _ = run(*line, "--out-dir", out)
        assert code == 0, err
        shutil.copytree(out, folder / "runs" / name)
    assert last["warnings"] == [] or "runs" in last["warnings"][0]


def with_one_bit(path):
    state = path.stat()
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def of_one_file_more(path):
    known = json.loads(path.read_text())
    path.write_text(json.dumps(known | {"seen": [*known["seen"], ["", [], ""]]}))


@pytest.mark.parametrize(
    "kind, damage",
    [
        ("images", lambda path: path.write_bytes(b"cut short")),
        ("images", with_one_bit),
        ("images", pipe),
        ("json", lambda path: path.write_bytes(b"[]")),
        ("json", lambda path: path.write_text("[" * 10**5)),
        ("json", of_one_file_more),
        ("json", pipe),
    ],
)
def test_a_damaged_cache_is_built_again(folder, decoding, kind, damage):
    read(folder)
    for path in (folder.parent / "cache").glob(f"*.{kind}"):
        damage(path)
    assert colours(read(folder)[0]) == EXPECTED
    assert decoding == [20, 4] * 2


def test_batches_without_a_cache_are_the_same_and_leave_the_random_numbers_alone(folder):
    both, before = [], torch.get_rng_state()
    for cache in (folder.parent / "cache", None):
        train, val, _ = read(folder, image_size=7, cache_dir=cache)
        stream = batches.TrainBatches(*train, batch_size=8, scale=(0.35, 1.0), size=7, workers=1)
        seen = [stream.at(step) for step in (1, 2, 0)]  # over the end of an epoch, and back
        seen += batches.val_batches(*val, stream.normalize, batch_size=3, workers=1)
        both.append([tensor for batch in seen for tensor in batch])
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))
    assert torch.equal(torch.get_rng_state(), before)
