"""Data: the same everywhere, every image once; what cannot be loaded is named before the start."""

import hashlib
import json
import pickle
import re
import shutil
import textwrap
import threading

import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, needs_cuda, ranks_agree, run_script, same
from torchvision.transforms.v2.functional import to_pil_image

import train
from data import Dataset, batches, cifar10, fingerprint, load, synthetic

CROPS = [{}, {"scale": (0.35, 1.0), "size": 24}]
IMAGES, CLASSES = synthetic.draw(0, 96, seed=0)
NUMBERS = torch.arange(96)  # as labels: which image is which


def stream(images=IMAGES, **options):
    options = {"batch_size": 24, "seed": 5, **options}
    return batches.TrainBatches(images, NUMBERS, **options)


# --- The synthetic images


def test_synthetic_images_are_the_same_on_every_machine():
    drawn = synthetic.draw(0, 100, seed=0)
    assert synthetic.checksum(*drawn) == synthetic.CHECKSUM

    some, _ = synthetic.draw(60, 36, seed=0)
    assert torch.equal(some, IMAGES[60:]), "by its number alone"

    other, _ = synthetic.draw(0, 96, seed=1)
    assert not torch.equal(other, IMAGES)


# --- Batches


@pytest.mark.parametrize("crop", CROPS)
def test_a_batch_depends_on_seed_and_step_alone_and_an_epoch_shows_each_image_once(crop):
    forwards = stream(**crop)
    backwards = stream(**crop)
    halves = [stream(rank=rank, world_size=2, **crop) for rank in range(2)]

    first = [forwards.at(step) for step in range(8)]
    for step in reversed(range(8)):
        assert same(first[step], backwards.at(step))
        images, labels = zip(*(half.at(step) for half in halves), strict=True)
        of_ranks = torch.cat(images), torch.cat(labels)
        assert same(first[step], of_ranks)

    drawn = [labels for _, labels in first]
    order = torch.cat(drawn).view(2, 96)
    assert (order.sort(1).values == NUMBERS).all(), "each image once"
    assert not torch.equal(*order), "the second epoch has another order"

    _, of_another_seed = stream(seed=6).at(0)
    assert not torch.equal(drawn[0], of_another_seed)


@pytest.mark.parametrize("batch, steps", [(36, 3), (50, 2), (95, 2), (96, 1), (1, 96)])
def test_every_epoch_shows_each_image_and_no_batch_shows_one_twice(batch, steps):
    uneven = stream(batch_size=batch)
    assert uneven.steps_per_epoch == steps
    for epoch in range(2):
        first = epoch * steps
        drawn = [uneven.global_indices(first + step) for step in range(steps)]
        shown = torch.cat(drawn).unique()
        assert shown.tolist() == NUMBERS.tolist()
        assert all(len(some.unique()) == batch for some in drawn)


def test_every_validation_image_is_seen_once_over_all_ranks():
    normalize = batches.Normalize([0.0] * 3, [1.0] * 3)
    images = IMAGES[:95]
    labels = NUMBERS[:95]

    seen = []
    for rank in range(3):
        how = {"batch_size": 7, "rank": rank, "world_size": 3}
        share = batches.val_batches(images, labels, normalize, **how)
        for x, y in share:
            assert torch.equal(x, images[y].float())
            seen += y.tolist()

    assert sorted(seen) == [*range(95)]


MORE_RANKS_THAN_IMAGES = """
from types import SimpleNamespace
import torch
import ranks
from data import batches
from trainer import record, validation

class TopLeft(torch.nn.Linear):
    judged_by = "loss"

    def forward(self, images, labels):
        assert len(images), "a network need not take a batch of nothing"
        loss = images[:, 0, 0, 0]
        return loss.mean(), {"loss": loss, "guess": labels}

device, rank, _, world_size = ranks.join("cpu")
images = torch.full((1, 3, 8, 8), 7, dtype=torch.uint8)
run = record.Run(
    args=SimpleNamespace(workers=0),
    rank=rank,
    world_size=world_size,
    data=SimpleNamespace(val=(images, torch.tensor([4]))),
    stream=SimpleNamespace(normalize=batches.Normalize([0.0] * 3, [1.0] * 3)),
    model=TopLeft(1, 1),
)
rows = []
assert validation.evaluate_all(run, rows) == {"val_loss": 7.0}
labels = [row[0].tolist() for row in rows]
assert ranks.all_values(labels) == [[[4]], [[]]], "the image counts once"
ranks.leave()
print("agreed")
"""


@pytest.mark.slow
def test_a_rank_without_a_validation_image_adds_nothing_to_the_scores(tmp_path):
    ranks_agree(tmp_path, MORE_RANKS_THAN_IMAGES)


@pytest.mark.parametrize(
    "how, edge",
    [
        ({"pad": 0}, 0),
        ({"augment": "flip", "scale": (0.35, 1.0), "size": 24}, 4),
        ({"augment": "flip"}, 0),
    ],
)
def test_without_a_crop_an_image_is_mirrored_in_every_other_epoch_and_else_unchanged(how, edge):
    s = stream(**how)
    kept = slice(edge, 32 - edge)
    for step in range(8):
        for image, label in zip(*s.at(step), strict=True):
            (plain,) = s.normalize(IMAGES[label][None])
            plain = plain[:, kept, kept]
            mirrored = s.mirrored_first[label] ^ (step >= 4)
            want = plain.flip(2) if mirrored else plain
            assert torch.equal(image, want)


def test_a_padded_crop_is_what_padding_and_cutting_give():
    shift = torch.randint(0, 5, (2, 96))
    mirrored = torch.rand(96) < 0.5
    crops = batches.padded_crop(IMAGES, shift, mirrored, 2)

    padded = F.pad(IMAGES.float(), (2, 2, 2, 2), mode="reflect").to(torch.uint8)
    rows = zip(crops, padded, shift.T, mirrored, strict=True)
    for crop, image, (down, right), flips in rows:
        window = image[:, down : down + 32, right : right + 32]
        want = window.flip(2) if flips else window
        assert torch.equal(crop, want)


def test_images_of_the_wanted_size_are_padded_by_a_sixteenth_and_never_resampled():
    padded = stream(pad=2)
    resized = stream(scale=(0.35, 1.0), size=32)
    assert same(padded.at(3), resized.at(3))


def test_a_resized_crop_samples_the_box_that_was_drawn():
    seeded = torch.Generator().manual_seed(0)
    drawn = torch.rand(4, 200, generator=seeded)
    # A pixel's value is its place: it shows the box.
    ramp = torch.arange(64).expand(200, 1, 64, 64)
    images = torch.cat([ramp, ramp.mT], dim=1).to(torch.uint8)
    mirrored = torch.arange(200) % 2 == 1

    crops = batches.resized_crop(images, drawn, mirrored, 8, (0.35, 1.0))
    across = crops[:, 0, 3]
    across[mirrored] = across[mirrored].flip(1)
    down = crops[:, 1, :, 3]

    area = 0.35 + 0.65 * drawn[0]
    ratio = (4 / 3) ** (2 * drawn[1] - 1)
    pixels = torch.linspace(0.5, 7.5, 8)[:, None] / 8
    wide = across, area * ratio, 2
    high = down, area / ratio, 3
    for seen, square, place in (wide, high):
        length = square.sqrt().clamp(max=1)
        begin = (1 - length) * drawn[place]
        centres = length * pixels + begin
        expected = (64 * centres - 0.5).clamp(0, 63)
        error = seen.T - expected
        assert error.abs().max() < 0.01


def test_the_first_batches_of_a_recipe_that_says_so_are_the_inner_pixels_of_the_whole_ones(
    image_folder, tmp_path
):
    line = f"--model cifarnet-tiny --data-dir {image_folder} --batch-size 40 --max-steps 25"
    line += f" --cutout 9 --precision fp32 --device cpu --out-dir {tmp_path / 'run'}"
    args = train.flags.parse(line.split(), "", train.MODELS, train.NAMES)
    run = train.Run(args=args)
    train.prepare.setup(run, train.train_step)

    small = [run.stream.at(step) for step in range(25)]
    run.stream.start_small(0)
    for step, (images, labels) in enumerate(small):
        whole, classes = run.stream.at(step)
        inner = whole[:, :, 2:30, 2:30] if step < 15 else whole
        assert same((images, labels), (inner, classes))
        assert images.is_contiguous(memory_format=torch.channels_last)


def test_cutout_takes_one_square_out_of_each_image_the_same_on_any_number_of_ranks():
    plain, _ = stream().at(3)
    whole, _ = stream(cutout=8).at(3)
    halves = []
    for rank in range(2):
        share, _ = stream(cutout=8, rank=rank, world_size=2).at(3)
        halves.append(share)
    assert torch.equal(whole, torch.cat(halves))

    gone = (whole != plain).any(1)  # B, H, W
    rows = gone.any(2)  # B, H
    columns = gone.any(1)  # B, W
    for side in (rows.sum(1), columns.sum(1)):
        assert side.min() >= 4, "it may reach beyond the image by half"
        assert side.max() == 8

    square = rows[:, None, :, None] & columns[:, None, None, :]
    cut_out = plain.masked_fill(square, 0.0)
    assert torch.equal(whole, cut_out)


def test_normalised_images_of_any_number_of_channels_have_mean_0_and_deviation_1():
    images = torch.randint(0, 256, (400, 6, 16, 16), dtype=torch.uint8)
    darker = torch.arange(1, 7).view(6, 1, 1)
    images //= darker.to(torch.uint8)
    normalize = batches.Normalize(*batches.statistics(images))

    x = normalize(images)
    mean = x.mean((0, 2, 3))
    deviation = x.std((0, 2, 3))

    assert mean.abs().max() < 0.05
    assert (deviation - 1).abs().max() < 0.05
    assert x.dtype == torch.float32
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert normalize.lines(x) is normalize.lines(x), "sent to a device once"


@needs_cuda
def test_a_batch_on_cuda_makes_nobody_wait():
    device = torch.device("cuda")
    images = batches.place(IMAGES, device)
    s = stream(images, device=device, cutout=4)
    s.at(0)

    torch.cuda.set_sync_debug_mode("error")
    try:
        s.at(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- Which data


def test_the_fingerprint_binds_each_image_to_its_label_and_its_place():
    before = fingerprint(IMAGES, CLASSES)
    by_pixels = batches.place(IMAGES, torch.device("cpu"))
    assert before == fingerprint(by_pixels, CLASSES), "the layout in memory says nothing"

    channels_last = by_pixels.permute(0, 2, 3, 1)
    plain = bytes(channels_last.flatten().tolist())
    by_hand = hashlib.blake2b(plain, digest_size=8).hexdigest()
    assert before["pixels"] == by_hand, "the same with any torch"

    exchanged = IMAGES.roll(48, dims=0), CLASSES  # two class folders of equal size
    relabelled = IMAGES, CLASSES.flip(0)
    fewer = IMAGES[1:], CLASSES[1:]
    for changed in (exchanged, relabelled, fewer):
        assert fingerprint(*changed) != before


@pytest.mark.parametrize(
    "change, words",
    [
        ({"train": (IMAGES.float(), CLASSES)}, r"images are torch.float32 \(96, 3, 32, 32\)"),
        ({"train": (IMAGES, CLASSES[1:])}, "96 train images have 95 labels"),
        ({"classes": ["disc", "disc"]}, "two classes are called disc"),
        ({"mean": [120.0], "std": [60.0]}, "mean should be a number from 0 to 255 for each of 3"),
        ({"mean": [0.5] * 3, "std": [0.2] * 3}, "std should be a number from 1 to 255"),
        ({"mean": [float("nan")] * 3, "std": [60.0] * 3}, "mean should be"),
        ({"train": (IMAGES[..., :24], CLASSES)}, r"\(96, 3, 32, 24\): they should be uint8"),
        ({"val": (IMAGES[:0], CLASSES[:0])}, r"val images are torch.uint8 \(0, 3, 32, 32\)"),
        (
            {"val": (F.pad(IMAGES, (8, 8, 8, 8)), CLASSES)},
            "val images have 48 pixels a side: .* 32",
        ),
        ({"train": (IMAGES, CLASSES.int())}, r"train labels are torch.int32 \(96,\)"),
        ({"val": (IMAGES, F.one_hot(CLASSES))}, r"val labels are torch.int64 \(96, 10\)"),
        ({"val": (IMAGES, CLASSES.float())}, "val labels are torch.float32"),
        (
            {"val": (IMAGES, CLASSES.where(NUMBERS != 7, 10))},
            "label of val image 7 is 10: .* 0 to 9",
        ),
        ({"val": (IMAGES, CLASSES.where(NUMBERS < 90, -1))}, "label of val image 90 is -1"),
        (
            {"train": (IMAGES, NUMBERS / 9), "val": (IMAGES, NUMBERS.log())},
            "label of val image 0 is -inf",
        ),
    ],
)
def test_a_dataset_that_makes_no_sense_is_refused(change, words):
    good = {"train": (IMAGES, CLASSES), "val": (IMAGES, CLASSES), "classes": synthetic.CLASSES}
    Dataset("mine", **good)
    with pytest.raises(ValueError, match=words):
        Dataset("mine", **good | change)


def test_labels_that_only_train_may_be_bad_because_the_run_names_and_leaves_out_their_images():
    for labels in (CLASSES.where(NUMBERS != 7, 10), NUMBERS.log()):
        val = CLASSES if labels.dtype is CLASSES.dtype else NUMBERS / 9
        Dataset("mine", (IMAGES, labels), (IMAGES, val), synthetic.CLASSES)


def example(name):
    """The block of CONTRIBUTING.md that begins with this comment."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    pattern = rf"^    # {re.escape(name)}\n((?:    .*\n|\n(?=    ))+)"
    block = re.search(pattern, text, re.M)[1]
    return textwrap.dedent(block)


def test_the_recipe_for_mixup_mixes_images_as_it_mixes_losses():
    text = (ROOT / "docs/data.md").read_text()
    end = text.index("\nIn `models/__init__")
    code = textwrap.dedent(text[text.index("    import torch\n") : end])
    scope = {"__package__": "models", "__name__": "models.mixup"}
    exec(code, scope)

    images = torch.randn(6, 10)
    labels = torch.arange(6)
    torch.manual_seed(0)
    weight = torch.rand(6)[:, None]

    def mixed(x):
        return (1 - weight) * x + weight * x.roll(1, 0)

    targets = F.one_hot(labels, 10)
    want = F.cross_entropy(mixed(images), mixed(targets))

    torch.manual_seed(0)
    model = scope["Mixup"](torch.nn.Flatten())
    loss, _ = model(images[..., None, None], labels)

    torch.testing.assert_close(loss, want)


@pytest.mark.slow
def test_data_of_ones_own_is_two_files_as_contributing_shows(tmp_path):
    tree = tmp_path / "tree"
    skip = shutil.ignore_patterns(".*", "__pycache__", "tests", "bench", "failures", "runs")
    shutil.copytree(ROOT, tree, ignore=skip)
    for name, model, channels, labels, judged_by in (
        ("age", "cifarnet-tiny", 3, torch.arange(150.0), "val_mae"),
        ("tiles", "resnet18", 6, torch.arange(150) % 3, "val_acc1"),
    ):
        file = f"data/{name}.py"
        (tree / file).write_text(example(file))
        images = torch.randint(0, 256, (150, channels, 32, 32), dtype=torch.uint8)
        torch.save((images, labels), tmp_path / f"{name}.pt")

        line = f"train.py --dataset {name} --data-dir {tmp_path} --model {model} --precision bf16"
        line += f" --batch-size 50 --max-steps 4 --device cpu --out-dir {tmp_path / name}"
        code, out, err = run_script(line.split(), tree)

        assert code == 0, err
        last = json.loads(out.splitlines()[-1])
        assert (last["dataset"], last["updates"]) == (name, 4)
        assert last[judged_by] > 0


def test_folders_and_torchvision_files_give_the_same_images(image_folder, tmp_path, monkeypatch):
    loaded = load("cifar10", image_folder, cache_dir=tmp_path / "cache", say=str)
    images, _ = loaded.train
    _, val_labels = loaded.val
    assert images.shape == (400, 3, 32, 32)
    assert len(val_labels) == 100

    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    names = pickle.dumps({"label_names": loaded.classes})
    (folder / "batches.meta").write_bytes(names)
    files = {"data_batch_1": loaded.train, "test_batch": loaded.val}
    for name, (x, y) in files.items():
        content = {"data": x.flatten(1).numpy(), "labels": y.tolist()}
        (folder / name).write_bytes(pickle.dumps(content))

    monkeypatch.setattr(cifar10.datasets.CIFAR10, "train_list", [("data_batch_1", None)])
    monkeypatch.setattr(cifar10.datasets.CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr(cifar10.datasets.cifar, "check_integrity", lambda *args: True)
    again = load("cifar10", tmp_path)

    assert same(again.train, loaded.train)
    assert same(again.val, loaded.val)
    assert again.classes == loaded.classes == [f"class{i}" for i in range(10)]


def test_cifar_is_decoded_once_and_in_memory_and_its_folder_may_be_read_only(
    image_folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    before = sorted(image_folder.rglob("*"))
    decoded = []

    def progress(files):
        decoded.append(len(files))
        return files

    (tmp_path / "file").touch()
    first = load("cifar10", image_folder, progress, cache_dir=None)
    for cache in (None, "file/x"):  # .cache is there now; in a file no cache can be kept
        again = load("cifar10", image_folder, progress, cache_dir=cache)
        assert same(again.train, first.train)
        assert same(again.val, first.val)

    assert decoded == [400, 100, 400, 100]
    assert sorted(image_folder.rglob("*")) == before


def test_without_data_and_network_what_was_asked_for_is_refused_and_the_default_is_synthetic(
    run, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(cifar10, "reachable", lambda url: False)
    small = synthetic.load(200, 50)
    monkeypatch.setattr(synthetic, "load", lambda: small)
    empty = tmp_path / "empty"
    empty.mkdir()

    code, _, err, _ = run("--data-dir", empty)
    assert code == 2
    assert "--dataset synthetic" in err

    monkeypatch.chdir(empty)
    line = "--model cifarnet-tiny --max-steps 2 --batch-size 40 --device cpu"
    assert train.main(line.split()) == 0
    assert "training on synthetic images" in capsys.readouterr().out


def test_a_name_look_up_that_hangs_does_not_hold_the_run(monkeypatch):
    never = threading.Event()
    monkeypatch.setattr(cifar10.urllib.request, "urlopen", lambda *_, **__: never.wait())
    assert not cifar10.reachable("https://example.invalid", seconds=0.2)


def odd_one(folder):
    odd = to_pil_image(torch.zeros(3, 8, 9))
    for path in ("train/class0", "train/class1", "test/class0", "test/class1"):
        (folder / path).mkdir(parents=True)
        odd.save(folder / path / "odd.png")


@pytest.mark.parametrize(
    "make, flags, code, words",
    [
        (str, ("--dataset", "imagefolder"), 2, "data should hold train/<class>/"),
        (str, ("--image-size", 64), 2, "--image-size 64: the images of cifar10 are 32 x 32"),
        (str, ("--val-share", 0.2), 2, "--val-share is for --dataset imagefolder"),
        (odd_one, ("--dataset", "imagefolder", "--image-size", 9**6), 2, "which has"),
        (odd_one, (), 4, "odd.png: ValueError: 9x8 pixels; CIFAR-10 images are 32x32"),
    ],
)
def test_a_wrong_argument_leaves_with_2_and_bad_data_with_4(
    run, tmp_path, make, flags, code, words
):
    folder = tmp_path / "data"
    folder.mkdir()
    make(folder)

    left_with, _, err, _ = run("--data-dir", folder, *flags)

    assert (left_with, words in err) == (code, True), err
    assert not run.folder.exists()
