"""
How fast data arrives: the decoded cache against torchvision's ImageFolder and DataLoader, interleaved.

    python bench/data_speed.py --cifar DIR --small DIR --photos DIR          # about 4 minutes on 2 CPU cores

--cifar is CIFAR-10 as image files, --small an image folder (train/<class>/, val/<class>/) of small images, --photos a
folder of full-size photographs, which stand for a training set by being linked to several times. Measured in images a
second, on all cores:

    decode     the decoder's own limit: Pillow opens a file, makes RGB of it at full size, forgets it
    build      data/imagefolder.py from nothing to a finished cache: list, decode, resize, write, flush
    batches    training batches from that cache: gather, random (resized) crop, flip, normalise
    loader     ImageFolder and DataLoader, num_workers = cores, with the reference transforms (RandomResizedCrop,
               flip, to tensor, normalise), once its workers run

in seconds a batch of 256, what CIFAR-10 and the small images cost beside a training step in bf16; and in seconds, how
long CIFAR-10 takes to load with and without a cache. Both together, as a share of an epoch's training steps, are what
data costs cifarnet (goal: below 0.05 in one epoch).
"""

import argparse
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import datasets, transforms
from torchvision.models import resnet18

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import data  # noqa: E402
import optim  # noqa: E402
from bench.record import header, spread, write  # noqa: E402
from data import batches, imagefolder  # noqa: E402
from models.cifarnet import PRESETS, CifarNet  # noqa: E402

CORES = len(os.sched_getaffinity(0))


def timed(function, *args):
    began = time.perf_counter()
    result = function(*args)
    return time.perf_counter() - began, result


def take(iterator, steps):
    """Each batch is let go before the next comes, as in training."""
    for _ in range(steps):
        next(iterator)


def decode_one(path):
    with Image.open(path) as image:
        image.convert("RGB")


def decode(paths):
    with ProcessPoolExecutor(CORES, mp_context=get_context("fork")) as pool:
        for _ in pool.map(decode_one, paths, chunksize=max(1, min(64, len(paths) // (4 * CORES)))):
            pass


def starts(folder):
    """Seconds until CIFAR-10 is there, the first time and with its cache."""
    with tempfile.TemporaryDirectory() as cache:
        return {start: timed(lambda: data.load("cifar10", folder, iter, cache_dir=cache))[0]
                for start in ("first", "second")}


def speeds(folder, image_size, batch_size, steps):
    """Images a second of each of the four, once around."""
    files = [path for split in ("train", "val") for path in sorted(map(str, (folder / split).glob("*/*")))]
    result = {"decode": len(files) / timed(decode, files)[0]}
    with tempfile.TemporaryDirectory() as cache:
        seconds, (train, val, _) = timed(lambda: imagefolder.load(folder, image_size, cache_dir=cache))
        result["build"] = len(files) / seconds
        size = val[0].shape[-1]
        stream = batches.TrainBatches(*train, batch_size=batch_size, scale=(0.35, 1.0), size=size)
        stream.at(0)
        result["batches"] = steps * batch_size / timed(take, map(stream.at, range(1, steps + 1)), steps)[0]
    transform = transforms.Compose([
        transforms.RandomResizedCrop(size, scale=(0.35, 1.0)), transforms.RandomHorizontalFlip(),
        transforms.ToTensor(), transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ])
    images = datasets.ImageFolder(folder / "train", transform)
    loader = iter(DataLoader(images, batch_size, shuffle=True, num_workers=CORES, drop_last=True))
    take(loader, 2 * CORES)  # until what they read ahead while they started is used up
    few = min(len(images) // batch_size - 2 * CORES, 20)
    result["loader"] = few * batch_size / timed(take, loader, few)[0]
    return result


def shares(net, images, classes, steps, **how):
    """A function that returns seconds of a data batch and of a training step in bf16, on 256 images."""
    stream = batches.TrainBatches(images, torch.arange(len(images)) % classes, batch_size=256, **how)
    optimizer = optim.ClippedAdamW(optim.param_groups(net))
    net = net.to(memory_format=torch.channels_last)
    number = iter(range(10**9))

    def train(x, y):
        with torch.autocast("cpu", torch.bfloat16):
            logits = net(x)
        F.cross_entropy(logits.float(), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    def measure():
        total = {"data": 0.0, "step": 0.0}
        for _ in range(steps):
            seconds, batch = timed(stream.at, next(number))
            total["data"] += seconds / steps
            total["step"] += timed(train, *batch)[0] / steps
        return total

    measure()
    return measure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", type=Path, required=True)
    parser.add_argument("--small", type=Path, required=True)
    parser.add_argument("--photos", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    args = parser.parse_args()
    torch.set_num_threads(CORES)
    with tempfile.TemporaryDirectory() as temporary:
        photos = Path(temporary)
        for split, copies in (("train", 48), ("val", 1)):
            (photos / split / "photograph").mkdir(parents=True)
            for path in sorted(args.photos.glob("*.[jJ]*")):
                for i in range(copies):
                    (photos / split / "photograph" / f"{i}{path.name}").symlink_to(path.resolve())
        train, _, classes = imagefolder.load(args.small, cache_dir=photos / "cache")
        cifar = data.load("cifar10", args.cifar, iter, cache_dir=photos / "cache")[0][0]
        size, steps = train[0].shape[-1], len(cifar) // 256
        measure = {
            "small": lambda: speeds(args.small, None, 256, len(train[1]) // 256 - 1),
            "photos": lambda: speeds(photos, 224, 64, 12),
            "starts": lambda: starts(args.cifar),
            "cifarnet": shares(CifarNet(**PRESETS["cifarnet"]), cifar, 10, steps=3),
            "resnet18": shares(resnet18(num_classes=len(classes)), train[0], len(classes), steps=2, scale=(0.35, 1.0)),
        }
        samples = {name: [] for name in measure}
        for _ in range(args.rounds):
            for name, function in measure.items():
                samples[name].append(function())

    ratios = {}
    for name, label in (("small", f"{size} px"), ("photos", "photographs at 224 px")):
        rates = {kind: spread([sample[kind] for sample in samples[name]])["median"] for kind in samples[name][0]}
        print(f"{label}, images/s: " + ", ".join(f"{kind} {rate:,.0f}" for kind, rate in rates.items()))
        ratios[f"{name}: decode / build"] = [s["decode"] / s["build"] for s in samples[name]]
        ratios[f"{name}: batches / loader"] = [s["batches"] / s["loader"] for s in samples[name]]
    for name in ("cifarnet", "resnet18"):
        ratios[f"{name}: data / step"] = [s["data"] / s["step"] for s in samples[name]]
    for start in ("first", "second"):
        print(f"CIFAR-10, {start} start: {spread([s[start] for s in samples['starts']])['median']:.2f} s")
        ratios[f"cifarnet: {start} start and data / steps of an epoch"] = [
            (s[start] + steps * net["data"]) / (steps * net["step"])
            for s, net in zip(samples["starts"], samples["cifarnet"], strict=True)]
    ratios = {name: spread(values) for name, values in ratios.items()}
    for name, ratio in ratios.items():
        low, high = ratio["quartiles"]
        print(f"{name}: {ratio['median']:.4g} (n = {args.rounds}, quartiles {low:.4g} and {high:.4g})")
    device = torch.device("cpu")
    record = header("data_speed", vars(args), device) | {
        "small": [len(train[1]), size], "ratios": ratios, "samples": samples}
    write(record, args.results, device, samples=("samples",))


if __name__ == "__main__":
    main()
