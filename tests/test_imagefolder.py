"""Image folders: what is dirty is named, what is odd but decodable is right, and a cache is never half built."""

import io
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image

from data import batches, imagefolder, load, synthetic
from data.imagefolder import Crop

ROOT = Path(__file__).parent.parent
PICTURE = to_pil_image(synthetic.draw(5, 1, seed=0)[0][0]).crop((0, 0, 16, 16))


def smooth(width, height):
    """A picture of large soft shapes, which resampling hardly changes."""
    small = torch.randint(0, 256, (3, 5, 5), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    return to_pil_image(small).resize((width, height), Image.Resampling.BICUBIC)


SAME = Crop(16, 16)


def rgb(path, crop=SAME):
    return imagefolder.Files([str(path)], crop)[0]


def transparent(mode):
    image = PICTURE.convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize((16, 16)))
    return image.convert(mode)


@pytest.mark.parametrize(
    ("name", "image"),
    [
        ("a.jpg", PICTURE), ("a.png", PICTURE), ("a.webp", PICTURE), ("a.bmp", PICTURE), ("a.tif", PICTURE),
        ("grey.jpg", PICTURE.convert("L")), ("grey.png", PICTURE.convert("L")), ("bits.png", PICTURE.convert("1")),
        ("cmyk.jpg", PICTURE.convert("CMYK")), ("cmyk.tif", PICTURE.convert("CMYK")),
        ("palette.png", PICTURE.quantize(16)), ("palette.gif", PICTURE.quantize(16)),
        ("alpha.png", transparent("RGBA")), ("grey alpha.png", transparent("LA")), ("alpha.webp", transparent("RGBA")),
        ("wrong name.jpg", "PNG"), ("ünïcödé 猫.png", PICTURE), ("new\nline.PNG", PICTURE),
    ],
)  # fmt: skip
def test_what_is_decodable_becomes_the_rgb_that_pillow_makes_of_it(tmp_path, name, image):
    if image == "PNG":
        PICTURE.save(tmp_path / name, "PNG")
    else:
        image.save(tmp_path / name)
    with Image.open(tmp_path / name) as again:
        assert torch.equal(rgb(tmp_path / name), pil_to_tensor(again.convert("RGB")))


def test_sixteen_bits_keep_their_upper_eight(tmp_path):
    values = torch.arange(0, 65536, 256).view(16, 16) + 255
    Image.frombytes("I;16", (16, 16), values.to(torch.uint16).numpy().tobytes()).save(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        assert image.mode.startswith("I"), "else this test shows nothing"
    assert torch.equal(rgb(tmp_path / "a.png"), (values >> 8).to(torch.uint8).expand(3, 16, 16))


def test_an_animation_is_its_first_frame(tmp_path):
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "green", "blue")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert rgb(tmp_path / "a.gif").flatten(1).T.unique(dim=0).tolist() == [[255, 0, 0]]


@pytest.mark.parametrize("kind", ["jpg", "png", "tif", "webp"])
def test_exif_turns_the_picture_as_a_viewer_would(tmp_path, kind):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise to see it upright
    smooth(16, 16).save(tmp_path / f"a.{kind}", exif=exif)
    with Image.open(tmp_path / f"a.{kind}") as image:
        stored = pil_to_tensor(image.convert("RGB"))
    if kind == "tif":  # Pillow turns these itself
        stored = stored.rot90(1, (1, 2))
    assert torch.equal(rgb(tmp_path / f"a.{kind}"), stored.rot90(-1, (1, 2)))


@pytest.mark.parametrize(("width", "height"), [(300, 200), (200, 301), (1200, 800), (40, 64)])
def test_resizing_and_cropping_agree_with_torchvision(tmp_path, width, height):
    smooth(width, height).save(tmp_path / "a.jpg", quality=95)
    with Image.open(tmp_path / "a.jpg") as image:
        reference = v2.CenterCrop(56)(v2.Resize(64)(image.convert("RGB")))
    difference = rgb(tmp_path / "a.jpg", Crop(64, 56)).int() - pil_to_tensor(reference).int()
    assert difference.abs().float().mean() < 1.5 and difference.abs().max() < 12


@pytest.mark.parametrize("side", [24, 64, 97, 500])
def test_resizing_is_that_of_pillow_even_of_noise(tmp_path, side):
    noise = torch.randint(0, 256, (3, side, side), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    to_pil_image(noise).save(tmp_path / "a.png")
    reference = pil_to_tensor(to_pil_image(noise).resize((64, 64), Image.Resampling.BILINEAR)).int()
    for crop, expected in ((Crop(64, 64), reference), (Crop(64, 56), reference[:, 4:60, 4:60])):
        assert (rgb(tmp_path / "a.png", crop).int() - expected).abs().max() <= (0 if side == 64 else 2)


@pytest.mark.parametrize("size", [(1, 1), (1, 500), (3, 2)])
def test_the_tiniest_images_are_enlarged(tmp_path, size):
    Image.new("RGB", size, (10, 20, 30)).save(tmp_path / "a.png")
    assert rgb(tmp_path / "a.png").flatten(1).T.unique(dim=0).tolist() == [[10, 20, 30]]


def test_a_hundred_megapixels_of_jpeg_take_little_memory_and_a_bomb_is_refused(tmp_path):
    Image.new("RGB", (12_000, 9_000), (200, 100, 50)).save(tmp_path / "huge.jpg")
    code = """if True:
        import resource, sys
        from data import imagefolder
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert imagefolder.decode_into(None, imagefolder.Crop(64, 64), 0, [sys.argv[1]]) == [None]
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print(grown // (2**20 if sys.platform == "darwin" else 2**10))"""
    command = [sys.executable, "-W", "ignore", "-c", code, tmp_path / "huge.jpg"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 60, "megabytes; whole, it takes 412"
    Image.new("1", (14_000, 14_000)).save(tmp_path / "bomb.png")
    assert "DecompressionBomb" in imagefolder.decode_into(None, Crop(64, 64), 0, [str(tmp_path / "bomb.png")])[0]


def folder_of(where, count=6, side=8):
    """Two classes, `count` images each in train/, two in val/; every image has a colour of its own."""
    for split, number in (("train", count), ("val", 2)):
        for label, name in enumerate(("cat", "dog")):
            (where / split / name).mkdir(parents=True)
            for i in range(number):
                Image.new("RGB", (side, side), (label, i, 7)).save(where / split / name / f"{i:03d}.png")
    return where


@pytest.fixture
def folder(tmp_path):
    return folder_of(tmp_path / "set")


def read(folder, cache="cache", **kwargs):
    cache = cache and folder.parent / cache
    return imagefolder.load(folder, **{"cache_dir": cache, "warn": lambda text: pytest.fail(text), **kwargs})


def colours(split):
    return sorted((*image[:, 0, 0].tolist(), label) for image, label in zip(split[0], split[1].tolist(), strict=True))


@pytest.fixture
def decoding(monkeypatch):
    """The number of files of each call that decoded."""
    calls, whole = [], imagefolder.decode_all
    monkeypatch.setattr(imagefolder, "decode_all", lambda files, *rest: calls.append(len(files)) or whole(files, *rest))
    return calls


@pytest.mark.parametrize("cache", ["cache", None])
def test_every_image_has_its_own_label(folder, cache):
    train, val, classes = read(folder, cache)
    assert classes == ["cat", "dog"] and train[0].shape == (12, 3, 8, 8) and val[0].shape == (4, 3, 8, 8)
    assert colours(train) == [(label, i, 7, label) for label in range(2) for i in range(6)]
    assert colours(val) == [(label, i, 7, label) for label in range(2) for i in range(2)]
    assert train[0][0].dtype == torch.uint8 and train[1].dtype == torch.int64


def test_the_second_run_decodes_nothing_and_a_change_decodes_again(folder, decoding):
    first = read(folder)
    assert torch.equal(read(folder)[0][0], first[0][0]) and decoding == [12, 4]
    file = folder / "train/cat/000.png"
    Image.new("RGB", (8, 8), (99, 99, 99)).save(file)
    assert (99, 99, 99, 0) in colours(read(folder)[0]) and decoding == [12, 4, 12]
    assert (99, 99, 99, 0) not in colours(first[0]), "an image that is in use does not change under it"
    file.rename(file.with_name("zzz.png"))
    assert read(folder)[0][0][5, 0, 0, 0] == 99 and decoding == [12, 4, 12, 12]
    file.with_name("zzz.png").unlink()
    assert len(read(folder)[0][1]) == 11 and decoding == [12, 4, 12, 12, 11]
    assert read(folder, image_size=4)[0][0].shape == (11, 3, 5, 5) and decoding[5:] == [11, 4]
    read(folder)
    assert decoding[7:] == [], "another size is another cache"
    assert len([*(folder.parent / "cache").glob("*.images")]) == 4, "what is out of date was deleted"


DIRT = {
    "truncated.jpg": lambda path: path.write_bytes(encoded("JPEG")[:-300]),
    "truncated.png": lambda path: path.write_bytes(encoded("PNG")[:-300]),
    "empty.jpg": lambda path: path.write_bytes(b""),
    "text.jpg": lambda path: path.write_text("this is not the picture you are looking for"),
    "nowhere.jpg": lambda path: path.symlink_to("/nowhere/at/all.jpg"),
    "folder.jpg": lambda path: (path / "inside").mkdir(parents=True),  # holds nothing: passed over
}


def encoded(kind):
    file = io.BytesIO()
    smooth(64, 64).save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize("cache", ["cache", None])
def test_what_is_unreadable_is_named_counted_and_left_out(folder, cache):
    healthy = colours(read(folder, cache)[0])
    for name, plant in DIRT.items():
        plant(folder / "train/cat" / name)
    warnings = []
    train, val, _ = read(folder, cache, max_bad_share=0.4, warn=warnings.append)
    assert colours(train) == healthy and len(val[1]) == 4
    assert len(warnings) == 1 and "5 of 17 images" in warnings[0]
    assert all(name in warnings[0] for name in DIRT if name != "folder.jpg")


def test_too_many_unreadable_files_are_an_error_that_lists_them(folder, decoding):
    for name, plant in DIRT.items():
        plant(folder / "val/dog" / name)
    with pytest.raises(imagefolder.UnreadableImages, match="5 of 9 images are unreadable, more than 10") as error:
        read(folder, max_bad_share=0.1)
    assert isinstance(error.value, ValueError)
    assert {Path(path).name for path in error.value.files} == {*DIRT} - {"folder.jpg"}
    assert str(folder / "val/dog/text.jpg") in str(error.value)
    read(folder, max_bad_share=0.6, warn=str)
    assert decoding == [12, 9], "the second attempt need not decode again"
    shutil.rmtree(folder / "val/cat")
    (folder / "val/cat").mkdir()
    for path in (folder / "val/dog").glob("0*"):
        path.unlink()
    with pytest.raises(imagefolder.UnreadableImages, match="5 of 5"):
        read(folder, max_bad_share=1.0)


def test_hidden_files_other_files_and_circles_are_passed_over_and_links_are_followed(folder):
    before = colours(read(folder)[0])
    cat = folder / "train/cat"
    for name in (".hidden.png", "._000.png", "notes.txt", "Thumbs.db", "000.png.part"):
        (cat / name).write_text("nothing")
    (folder / "train/.git").mkdir()
    (cat / "circle").symlink_to(cat)
    assert colours(read(folder)[0]) == before
    outside = folder.parent / "elsewhere"
    (outside / "deeper").mkdir(parents=True)
    Image.new("RGB", (8, 8), (50, 60, 70)).save(outside / "deeper/ö.png")
    (cat / "link").symlink_to(outside)
    assert colours(read(folder)[0]) == sorted([*before, (50, 60, 70, 0)])
    Image.new("RGB", (8, 8), (51, 60, 70)).save(outside / "deeper/ö.png")
    assert (51, 60, 70, 0) in colours(read(folder)[0]), "a change behind a link is a change"


@pytest.mark.parametrize(
    ("damage", "kind", "words"),
    [
        (lambda f: shutil.rmtree(f / "train"), FileNotFoundError, ["should hold train/<class>/"]),
        (lambda f: shutil.rmtree(f / "val"), FileNotFoundError, ["val/<class>/ (or test/<class>/)"]),
        (lambda f: shutil.rmtree(f / "val/dog"), ValueError, ["different classes", "dog"]),
        (lambda f: [p.unlink() for p in (f / "val").glob("*/*")], FileNotFoundError, ["val holds no images"]),
        (lambda f: (f / "train/Cat").mkdir(), ValueError, ["Cat", "one class to some file systems"]),
        (lambda f: [(f / "train" / n).mkdir() for n in ("\u00e9", "e\u0301")], ValueError, ["merge or rename"]),
    ],
)
def test_a_folder_that_makes_no_sense_is_refused_in_a_sentence(folder, damage, kind, words):
    damage(folder)
    with pytest.raises(kind) as error:
        read(folder)
    assert all(word in str(error.value) for word in words)


def test_composed_and_decomposed_names_of_a_class_are_the_same_class(folder):
    for split, name in (("train", "caf\u00e9"), ("val", "cafe\u0301")):
        (folder / split / "cat").rename(folder / split / name)
    assert read(folder)[2] == ["caf\u00e9", "dog"]


def test_the_default_size_is_the_images_own_or_224(folder):
    assert read(folder)[0][0].shape == (12, 3, 8, 8)
    train, val, _ = read(folder, image_size=14)
    assert train[0].shape == (12, 3, 16, 16) and val[0].shape == (4, 3, 14, 14)
    Image.new("RGB", (9, 8)).save(folder / "train/dog/other.png")
    train, val, _ = read(folder)
    assert train[0].shape == (13, 3, 256, 256) and val[0].shape == (4, 3, 224, 224)


def started(*args):
    process = multiprocessing.get_context("fork").Process(target=build_elsewhere, args=args)
    process.start()
    return process


def build_elsewhere(folder, log, die):
    def progress(files):
        with open(log, "a") as file:
            file.write(f"{len(files)}\n")
        for i, file in enumerate(files):
            if die and i == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            yield file

    imagefolder.load(folder, cache_dir=folder.parent / "cache", progress=progress)


def test_a_build_that_is_killed_leaves_nothing_that_looks_finished(folder, tmp_path):
    process = started(folder, tmp_path / "log", True)
    process.join(20)
    assert process.exitcode == -signal.SIGKILL
    assert not [*(tmp_path / "cache").glob("*.images")] and [*(tmp_path / "cache").glob("*.part")]
    assert len(colours(read(folder)[0])) == 12
    assert not [*(tmp_path / "cache").glob("*.part")]


def test_a_disk_that_fills_up_is_an_error_and_leaves_nothing_that_looks_finished(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: len(data) - 1)  # a full disk takes what it can
    with pytest.raises(OSError, match="no room"):
        read(folder)
    assert not [*(tmp_path / "cache").glob("*.images"), *(tmp_path / "cache").glob("*.part")]


def test_processes_that_start_together_build_once(folder, tmp_path):
    processes = [started(folder, tmp_path / "log", False) for _ in range(4)]
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 4
    assert sorted((tmp_path / "log").read_text().split()) == ["12", "4"]
    assert len(colours(read(folder)[0])) == 12


def test_a_cache_that_was_cut_short_is_refused(folder, tmp_path):
    read(folder)
    os.truncate(next((tmp_path / "cache").glob("train*.images")), 100)
    with pytest.raises(ValueError, match="damaged"):
        read(folder)


def test_batches_without_a_cache_are_the_same_from_any_step_and_leave_the_random_numbers_alone(tmp_path):
    folder = folder_of(tmp_path / "set", count=20, side=24)
    (folder / "train/cat/broken.png").write_text("text")
    how = {"batch_size": 8, "rank": 1, "world_size": 2, "scale": (0.35, 1.0), "size": 21}
    sets = [read(folder, cache, image_size=21, max_bad_share=0.1, warn=str) for cache in ("cache", None)]
    (train, val), (files, val_files) = ((s[0], s[1]) for s in sets)
    cached, streamed = batches.TrainBatches(*train, **how), batches.TrainBatches(*files, **how, workers=2)
    before = torch.get_rng_state()
    for step in (3, 4, 5, 6, 1):  # over the end of an epoch, and back
        for a, b in zip(cached.at(step), streamed.at(step), strict=True):
            assert torch.equal(a, b)
    assert torch.equal(torch.get_rng_state(), before)
    pairs = zip(batches.val_batches(*val, cached.normalize, batch_size=3),
                batches.val_batches(*val_files, cached.normalize, batch_size=3, workers=1), strict=True)
    assert all(torch.equal(x, z) and torch.equal(y, w) for (x, y), (z, w) in pairs)


def test_load_by_name(folder, tmp_path):
    train, val, classes, name = load("imagefolder", folder, iter, image_size=7, cache_dir=tmp_path / "c")
    assert name == "imagefolder" and classes == ["cat", "dog"]
    assert train[0].shape == (12, 3, 8, 8) and val[0].shape == (4, 3, 7, 7)
    with pytest.raises(FileNotFoundError, match="--data-dir"):
        load("imagefolder", None, iter)
    with pytest.raises(ValueError, match="32 x 32"):
        load("synthetic", None, iter, image_size=64)


def test_words_txt_names_the_classes_and_what_is_ambiguous_or_unknown_keeps_its_number(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("n01\tgoldfish, Carassius auratus\nn02\tcrane\nn03\tcrane\n")
    assert imagefolder.words(path, ["n01", "n02", "n03", "n04"]) == ["goldfish", "n02", "n03", "n04"]
    assert imagefolder.words(tmp_path / "none.txt", ["n01"]) == ["n01"]
