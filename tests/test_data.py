"""Data: the same everywhere, every image once, dirty folders named."""

import os
import pickle
import shutil
import threading

import numpy
import pytest
import torch
from torchvision.transforms.v2.functional import to_pil_image

import train
from data import batches, cifar10, load, synthetic


def test_synthetic_images_are_the_same_on_every_machine():
    assert synthetic.checksum(*synthetic.draw(0, 100, seed=0)) == synthetic.CHECKSUM
    images, _ = synthetic.draw(60, 40, seed=0)  # and an image depends on its number alone
    assert torch.equal(images, synthetic.draw(0, 100, seed=0)[0][60:])
    assert synthetic.checksum(*synthetic.draw(0, 100, seed=1)) != synthetic.CHECKSUM


@pytest.mark.slow
def test_synthetic_classes_are_balanced_and_a_linear_classifier_stays_below_half():
    images, labels = synthetic.draw(0, 4000, seed=0)
    assert labels.bincount(minlength=10).min() > 300
    x = images.double().flatten(1) / 255 - 0.5
    targets = torch.nn.functional.one_hot(labels).double()
    train_x, val_x = x[:3000], x[3000:]
    ridge = train_x.T @ train_x + 100.0 * torch.eye(3072, dtype=torch.float64)
    weight = torch.linalg.solve(ridge, train_x.T @ (targets[:3000] - 0.1))
    accuracy = ((val_x @ weight).argmax(1) == labels[3000:]).double().mean()
    assert 0.05 < accuracy < 0.5


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_every_validation_image_is_seen_exactly_once_over_all_ranks(world_size):
    images, labels = torch.zeros(101, 3, 4, 4, dtype=torch.uint8), torch.arange(101)
    normalize = batches.Normalize(images)
    seen = [y for rank in range(world_size)
            for _, y in batches.val_batches(images, labels, normalize, batch_size=8, rank=rank, world_size=world_size)]
    assert torch.cat(seen).sort().values.tolist() == list(range(101))


def stream(**kwargs):
    images = synthetic.draw(0, 96, seed=0)[0]
    return batches.TrainBatches(images, torch.arange(96), **{"batch_size": 24, "seed": 5, **kwargs})


@pytest.mark.parametrize("crop", [{}, {"scale": (0.35, 1.0), "size": 24}])
def test_a_batch_is_a_function_of_seed_and_step_alone(crop):
    forwards, backwards = stream(**crop), stream(**crop)
    first = [forwards.at(step) for step in range(8)]
    for step in reversed(range(8)):
        assert all(torch.equal(a, b) for a, b in zip(first[step], backwards.at(step), strict=True))
    assert not torch.equal(first[0][1], stream(seed=6).at(0)[1])
    assert not torch.equal(first[0][1], first[4][1]), "the second epoch has another order"


@pytest.mark.parametrize("crop", [{}, {"scale": (0.35, 1.0), "size": 24}])
def test_an_epoch_shows_every_image_once_and_the_ranks_share_the_batch(crop):
    whole, halves = stream(**crop), [stream(rank=r, world_size=2, **crop) for r in range(2)]
    labels = torch.cat([whole.at(step)[1] for step in range(4)])
    assert labels.sort().values.tolist() == list(range(96))
    for step in range(4):
        x, y = (torch.cat(parts) for parts in zip(*(half.at(step) for half in halves), strict=True))
        assert torch.equal(x, whole.at(step)[0]) and torch.equal(y, whole.at(step)[1])


def test_augmentation_only_moves_and_mirrors_and_the_mirror_alternates():
    images = synthetic.draw(0, 8, seed=0)[0]
    s = batches.TrainBatches(images, torch.arange(8), batch_size=8, pad=0)
    for step in range(4):
        x, y = s.at(step)
        for image, label in zip(x, y, strict=True):
            plain = s.normalize(images[label][None])[0]
            mirrored = s.mirrored_first[label] ^ (step % 2 == 1)
            assert torch.equal(image, plain.flip(2) if mirrored else plain)


def test_a_padded_crop_is_what_padding_and_cutting_give():
    images = synthetic.draw(0, 40, seed=0)[0]
    shift, mirrored = torch.randint(0, 5, (2, 40)), torch.rand(40) < 0.5
    crops = batches.padded_crop(images, shift, mirrored, 2)
    for image, crop, down, right, mirror in zip(images, crops, *shift.tolist(), mirrored, strict=True):
        padded = torch.nn.functional.pad(image.float(), (2,) * 4, mode="reflect").to(torch.uint8)
        window = padded[:, down : down + 32, right : right + 32]
        assert torch.equal(crop, window.flip(2) if mirror else window)


@pytest.mark.parametrize("size", [None, 32])
def test_images_that_have_the_size_wanted_are_padded_by_a_sixteenth_and_cropped_and_never_resampled(size):
    plain, scaled = stream(pad=2), stream(scale=(0.35, 1.0), size=size)
    assert torch.equal(plain.at(3)[0], scaled.at(3)[0])


@pytest.mark.parametrize("size", [None, 32, 24])
def test_flips_alone_show_the_centre_and_no_mirrored_border(size):
    images = synthetic.draw(0, 96, seed=0)[0]
    s, edge = stream(augment="flip", size=size, scale=(0.35, 1.0)), 4 if size == 24 else 0
    for step in range(8):
        x, y = s.at(step)
        for image, label in zip(x, y, strict=True):
            plain = s.normalize(images[label][None])[0, :, edge : 32 - edge, edge : 32 - edge]
            mirrored = s.mirrored_first[label] ^ (step >= 4)
            assert torch.equal(image, plain.flip(2) if mirrored else plain)
    assert not torch.equal(s.at(0)[0], stream(size=size, scale=(0.35, 1.0)).at(0)[0])


def test_an_unknown_augmentation_is_refused_by_name():
    with pytest.raises(ValueError, match="unknown augmentation 'boxes': choose crop or flip"):
        stream(augment="boxes")


def test_a_batch_is_the_same_whether_the_images_are_stored_by_pixels_or_by_channels():
    images, labels = synthetic.draw(0, 96, seed=0)[0], torch.arange(96)
    by_pixels = batches.place(images, torch.device("cpu"))
    assert by_pixels.stride(1) == 1 and torch.equal(by_pixels, images)
    for crop in ({}, {"scale": (0.35, 1.0), "size": 24}):
        a, b = (batches.TrainBatches(x, labels, batch_size=24, **crop).at(1)[0] for x in (images, by_pixels))
        assert torch.equal(a, b) and a.stride() == b.stride()


def test_a_resized_crop_is_what_cutting_and_resizing_give():
    images = synthetic.draw(0, 6, seed=0)[0]
    mirrored = torch.tensor([False, True] * 3)
    whole = batches.resized_crop(images, torch.full((4, 6), 0.5), mirrored, 32, (1.0, 1.0))
    assert (whole[0::2] - images[0::2]).abs().max() < 0.01 and (whole[1::2] - images[1::2].flip(3)).abs().max() < 0.01
    middle = batches.resized_crop(images, torch.full((4, 6), 0.5), mirrored & False, 32, (0.25, 0.25))
    # twice as large, and only the outermost pixels see beyond the cut
    reference = torch.nn.functional.interpolate(images.float()[:, :, 8:24, 8:24], size=32, mode="bilinear")
    assert (middle - reference)[:, :, 1:-1, 1:-1].abs().max() < 0.01


def test_boxes_of_resized_crops_lie_inside_and_have_the_area_and_ratio_asked_for():
    side, drawn = 64, torch.rand(4, 2000, generator=torch.Generator().manual_seed(0))
    ramp = torch.arange(side).expand(side, side)  # pixel values are coordinates: what comes out tells the box
    images = torch.stack([ramp, ramp.T, ramp]).expand(2000, 3, side, side).to(torch.uint8)
    crops = batches.resized_crop(images, drawn, torch.zeros(2000).bool(), 8, (0.35, 1.0))
    width = (crops[:, 0, 4, 6] - crops[:, 0, 4, 1]) / 5 * 8 / side
    height = (crops[:, 1, 6, 4] - crops[:, 1, 1, 4]) / 5 * 8 / side
    left = (crops[:, 0, 4, 1] + 0.5) / side - width * 1.5 / 8
    assert left.min() > -0.01 and (left + width).max() < 1.01
    free = (width < 0.98) & (height < 0.98)  # not cut at the border
    area, ratio = (width * height)[free], (width / height)[free]
    assert 0.345 < area.min() < 0.37 and ratio.min() > 0.745 and ratio.max() < 1.34
    assert (width * height).max() > 0.98 and width.max() < 1.01 and 0.45 < (ratio > 1).float().mean() < 0.55


@pytest.mark.slow
def test_a_set_larger_than_memory_gives_batches_at_once(tmp_path):
    N, side = 1_000_000, 512
    path = tmp_path / "sparse.images"  # 786 GB of zeros that take no room
    path.touch()
    os.truncate(path, N * 3 * side * side)
    images = torch.from_file(str(path), shared=True, size=N * 3 * side * side, dtype=torch.uint8).view(N, 3, side, side)
    s = batches.TrainBatches(images, torch.arange(N), batch_size=4, scale=(0.35, 1.0), size=64)
    images[s.indices(3)] = 255
    x, y = s.at(3)
    assert x.shape == (4, 3, 64, 64) and torch.equal(y, s.indices(3)) and (x > 0).all()
    x, _ = next(batches.val_batches(images, torch.arange(N), s.normalize, batch_size=4))
    assert x.shape == (4, 3, side, side)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to send batches to")
@pytest.mark.parametrize("crop", [{}, {"scale": (0.35, 1.0), "size": 24}])
def test_batches_from_images_left_on_the_host_are_those_from_images_on_the_gpu(crop):
    images, labels, gpu = synthetic.draw(0, 96, seed=0)[0], torch.arange(96), torch.device("cuda")
    host = batches.TrainBatches(images, labels, batch_size=24, **crop, device=gpu)
    device = batches.TrainBatches(batches.place(images, gpu), labels, batch_size=24, **crop, device=gpu)
    for step in range(5):
        for a, b in zip(host.at(step), device.at(step), strict=True):
            assert a.is_cuda and torch.equal(a, b)
    assert batches.place(images, gpu, share=0.0).device.type == "cpu"


def test_normalised_images_have_mean_0_and_deviation_1():
    images = synthetic.draw(0, 1000, seed=0)[0]
    x = batches.Normalize(images)(images)
    assert x.mean((0, 2, 3)).abs().max() < 0.05 and (x.std((0, 2, 3)) - 1).abs().max() < 0.05
    assert x.dtype == torch.float32 and x.is_contiguous(memory_format=torch.channels_last)


def test_folders_and_torchvision_files_give_the_same_images(image_folder, tmp_path, monkeypatch):
    (train_x, train_y), (test_x, test_y), classes, _ = load("cifar10", image_folder, iter, cache_dir=tmp_path / "cache")
    assert train_x.shape == (400, 3, 32, 32) and test_x.shape == (100, 3, 32, 32) and train_x.dtype == torch.uint8
    assert classes == [f"class{i}" for i in range(10)]
    base = tmp_path / "cifar-10-batches-py"
    base.mkdir()
    rows = {f"data_batch_{i}": slice(80 * i - 80, 80 * i) for i in range(1, 6)}
    for name, x, y in [*((n, train_x[s], train_y[s]) for n, s in rows.items()), ("test_batch", test_x, test_y)]:
        entry = {"data": x.flatten(1).numpy().astype(numpy.uint8), "labels": y.tolist()}
        (base / name).write_bytes(pickle.dumps(entry))
    (base / "batches.meta").write_bytes(pickle.dumps({"label_names": classes}))
    monkeypatch.setattr(cifar10.datasets.CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr(cifar10.datasets.cifar, "check_integrity", lambda *args: True)
    again = cifar10.load(tmp_path)
    assert torch.equal(again[0][0], train_x) and torch.equal(again[1][1], test_y) and again[2] == classes


@pytest.fixture
def cifar(image_folder, tmp_path):
    """A copy of the folder of images to damage, and a function that loads it."""
    folder = shutil.copytree(image_folder, tmp_path / "copy")

    def go(progress=iter, cache=tmp_path / "cache", **how):
        return load("cifar10", folder, progress, cache_dir=cache, **how)

    return folder, go


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: shutil.rmtree(f / "test"), ["copy should hold train/<class>/", "test/<class>/"]),
        (lambda f: shutil.rmtree(f / "test" / "class3"), ["different classes", "class3"]),
        (lambda f: to_pil_image(torch.zeros(3, 8, 9)).save(f / "train/class1/odd.png"),
         ["train/class1/odd.png is 9x8 pixels; CIFAR-10 images are 32x32"]),
        (lambda f: [p.unlink() for p in (f / "test").glob("*/*")], ["holds no images"]),
    ],
)
def test_a_broken_folder_is_named_with_what_is_wrong(cifar, damage, words):
    folder, go = cifar
    damage(folder)
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        go()
    for word in words:
        assert word in str(error.value)


def test_an_unreadable_image_of_cifar_is_named_and_left_out_and_too_many_are_an_error(cifar):
    folder, go = cifar
    broken, warnings = next((folder / "train/class1").iterdir()), []
    broken.write_text("text")
    train, test, *_ = go(warn=warnings.append)
    assert len(train[0]) == len(train[1]) == 399 and len(test[1]) == 100
    assert len(warnings) == 1 and "1 of 400 images" in warnings[0] and str(broken) in warnings[0]
    with pytest.raises(ValueError, match="1 of 400 images are unreadable, more than 0") as error:
        go(max_bad_share=0.001)
    assert str(broken) in str(error.value)


@pytest.mark.parametrize("streaming", [False, True])
def test_cifar_is_decoded_once_and_always_whole_in_memory(cifar, monkeypatch, tmp_path, streaming):
    folder, go = cifar
    monkeypatch.chdir(tmp_path)
    before, decoded = sorted(folder.rglob("*")), []
    how = {"progress": lambda files: decoded.append(len(files)) or files, "cache": None if streaming else "cache"}
    first, second = go(**how), go(**how)
    assert decoded == [400, 100] and isinstance(first[0][0], torch.Tensor)
    for (images, labels), (again, same) in zip(first[:2], second[:2], strict=True):
        assert torch.equal(images, again) and torch.equal(labels, same)
    assert sorted(folder.rglob("*")) == before, "the folder of the data may be read-only"


def test_where_no_cache_can_be_kept_cifar_is_decoded_for_this_run(cifar, tmp_path):
    _, go = cifar
    (tmp_path / "file").write_text("not a folder")
    here, nowhere = go(), go(cache=tmp_path / "file" / "cache")
    assert torch.equal(here[0][0], nowhere[0][0]) and torch.equal(here[1][1], nowhere[1][1])


def test_no_data_and_no_network_is_an_error_when_asked_for_and_synthetic_when_not(tmp_path, monkeypatch, run, capsys):
    monkeypatch.setattr(cifar10, "reachable", lambda url: False)
    with pytest.raises(FileNotFoundError, match="--dataset synthetic"):
        cifar10.load(tmp_path)
    import train

    monkeypatch.chdir(tmp_path)
    small = synthetic.load(200, 50)
    monkeypatch.setattr(synthetic, "load", lambda: small)
    args = ["--model", "cifarnet-tiny", "--max-steps", "2", "--batch-size", "40", "--device", "cpu"]
    with pytest.raises(SystemExit) as exit:
        train.main([*args, "--dataset", "cifar10"])
    assert exit.value.code == 4
    assert train.main(args) == 0
    assert "training on the embedded synthetic images" in capsys.readouterr().out


def test_a_name_look_up_that_hangs_does_not_hold_the_run(monkeypatch):
    never = threading.Event()
    monkeypatch.setattr(cifar10.urllib.request, "urlopen", lambda *args, **kwargs: never.wait())
    assert not cifar10.reachable("https://example.invalid", seconds=0.2)


@pytest.mark.parametrize("cutout", [0, 9])
def test_small_batches_are_the_inner_pixels_of_the_whole_ones_until_the_step_that_is_named(cutout):
    images, labels = synthetic.draw(0, 40, seed=0)
    small = batches.TrainBatches(images, labels, batch_size=20, small_until=3, cutout=cutout)
    for step in range(5):
        whole, names = batches.TrainBatches(images, labels, batch_size=20, cutout=cutout).at(step)
        batch, same_names = small.at(step)
        assert torch.equal(batch, whole[:, :, 2:30, 2:30] if step < 3 else whole) and torch.equal(names, same_names)
        assert batch.shape[2:] == ((28, 28) if step < 3 else (32, 32))
        assert batch.is_contiguous(memory_format=torch.channels_last)


def test_a_cifarnet_run_trains_on_small_images_for_the_share_of_its_steps_that_the_recipe_says(image_folder, tmp_path):
    for steps, small in ((10, 6), (25, 15)):
        args = train.flags.parse([
            "--model", "cifarnet-tiny", "--dataset", "cifar10", "--data-dir", str(image_folder), "--batch-size", "40",
            "--max-steps", str(steps), "--precision", "fp32", "--device", "cpu",
            "--out-dir", str(tmp_path / str(steps)),
        ], "", train.MODELS, train.NAMES)  # fmt: skip
        stream = train.setup(args).stream
        assert [stream.at(step)[0].shape[-1] for step in (0, small - 1, small, steps - 1)] == [28, 28, 32, 32]


def test_cutout_takes_one_square_out_of_each_image_the_same_on_any_number_of_ranks():
    images, labels = synthetic.draw(0, 40, seed=0)
    plain = batches.TrainBatches(images, labels, batch_size=20).at(3)[0]
    whole = batches.TrainBatches(images, labels, batch_size=20, cutout=8).at(3)[0]
    halves = [batches.TrainBatches(images, labels, batch_size=20, cutout=8, rank=r, world_size=2).at(3)[0]
              for r in range(2)]
    assert torch.equal(whole, torch.cat(halves))
    for before, after in zip(plain, whole, strict=True):
        gone = (after == 0).all(0) & ~(before == 0).all(0)
        rows, columns = gone.any(1).nonzero().flatten(), gone.any(0).nonzero().flatten()
        height, width = (int(at[-1] - at[0]) + 1 for at in (rows, columns))
        assert 4 <= height <= 8 and 4 <= width <= 8 and (after == 0).all(0)[rows[0]:rows[-1] + 1,
                                                                         columns[0]:columns[-1] + 1].all()
        assert torch.equal(after[:, ~gone], before[:, ~gone])


def test_the_statistics_are_sent_to_a_device_once_and_no_step_waits_for_them():
    normalize = batches.Normalize(synthetic.draw(0, 40, seed=0)[0])
    images = torch.zeros(2, 3, 32, 32)
    first = normalize.lines(images)
    assert normalize.lines(images) is first and normalize.lines(images[..., :16]) is not first
    torch.testing.assert_close(normalize(images), (images - normalize.mean) / normalize.std)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_batch_on_cuda_makes_nobody_wait():
    device = torch.device("cuda")
    images, labels = synthetic.draw(0, 40, seed=0)
    stream = batches.TrainBatches(batches.place(images, device), labels, batch_size=20, device=device, cutout=4)
    stream.at(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        stream.at(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
