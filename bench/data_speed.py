"""
How fast data arrives: the decoded cache against torchvision's ImageFolder and DataLoader.

    python bench/data_speed.py --cifar DIR --small DIR --photos DIR      # 4 minutes on 2 CPU cores

--cifar is CIFAR-10 as image files. --small is an image folder (train/<class>/, val/<class>/) of
7,000 small images or more, --photos one of 1,700 full-size photographs or more (links to a few will
do). Each round measures in turn, on all cores:

    decode     Pillow opens a file, makes RGB of it at full size, forgets it: the decoder's limit
    build      data/ from nothing to a finished cache: list, decode, resize, write
    batches    training batches from that cache: gather, random (resized) crop, flip, normalise
    loader     ImageFolder and DataLoader, num_workers = cores, with the reference transforms
               (RandomResizedCrop, flip, to tensor, normalise), once its workers run
    start      loading CIFAR-10 without and with a cache
    step       a training step of cifarnet in bf16, 256 images; and the batch that it takes

Data costs a start and an epoch's batches, as a share of the epoch's steps (goal: 0.05).
"""

import os
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

sys.path.insert(0, str(Path(__file__).parents[1]))
import data
from bench import record
from data.batches import TrainBatches
from models.cifarnet import PRESETS, CifarNet

CORES = os.cpu_count()


def seconds(function, *args):
    began = time.perf_counter()
    function(*args)
    return time.perf_counter() - began


def take(iterator, count):
    """Drop each batch before the next comes, as training does."""
    for _ in range(count):
        next(iterator)


def decode(path):
    with Image.open(path) as image:
        image.convert("RGB")


def folder_ratios(folder, image_size, batch_size):
    """Speeds: images a second, one beside the other."""
    files = list(folder.glob("*/*/*"))
    with ProcessPoolExecutor(CORES, mp_context=get_context("fork")) as pool:
        decoding = seconds(list, pool.map(decode, files, chunksize=16))
    with tempfile.TemporaryDirectory() as cache:
        load = partial(data.load, "imagefolder", folder, iter, image_size, cache_dir=cache)
        building = seconds(load)
        loaded = load()
    size = loaded.image_size
    stream = TrainBatches(*loaded.train, batch_size=batch_size, scale=loaded.scale, size=size)
    ours = seconds(take, map(stream.at, range(20)), 20)
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(size, scale=loaded.scale),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    images = datasets.ImageFolder(folder / "train", transform)
    loader = iter(DataLoader(images, batch_size, shuffle=True, num_workers=CORES, drop_last=True))
    take(loader, 2 * CORES)  # until they have used up what they read ahead at their start
    theirs = seconds(take, loader, 20)
    return {"decode / build": building / decoding, "batches / loader": theirs / ours}


def cifar_ratios(folder, net):
    """What data costs beside the training steps of an epoch, from its parts."""
    with tempfile.TemporaryDirectory() as cache:
        load = partial(data.load, "cifar10", folder, cache_dir=cache)
        first = seconds(load)
        second = seconds(load)
        stream = TrainBatches(*load().train, batch_size=256)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)

    def train(x, y):
        with torch.autocast("cpu", torch.bfloat16):
            logits = net(x)
        F.cross_entropy(logits.float(), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    train(*stream.at(0))  # warms up
    batch = seconds(stream.at, 1)
    step = seconds(train, *stream.at(2))
    ratios = {"data / step": batch / step}
    for name, start in (("first", first), ("second", second)):
        data_cost = start / stream.steps_per_epoch + batch
        ratios[f"{name} start and data / steps of an epoch"] = data_cost / step
    return ratios


def main():
    parser = record.arguments(__doc__, "cpu")
    for name in ("cifar", "small", "photos"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(CORES)
    net = CifarNet(**PRESETS["cifarnet"]).to(memory_format=torch.channels_last)
    samples = defaultdict(list)
    for _ in range(args.rounds):
        for name, ratios in (
            ("small", folder_ratios(args.small, None, 256)),
            ("photos", folder_ratios(args.photos, 224, 64)),
            ("cifarnet", cifar_ratios(args.cifar, net)),
        ):
            for ratio, value in ratios.items():
                samples[f"{name}: {ratio}"].append(value)
    ratios = {name: record.spread(values) for name, values in samples.items()}
    for name, ratio in ratios.items():
        print(f"{name}: {ratio}")
    head = record.header("data_speed", args) | {"ratios": ratios, "samples": samples}
    record.write(head, args, samples=("samples",))


if __name__ == "__main__":
    main()
