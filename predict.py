"""
Predict: a trained model on your own images, computed as the validation computed it.

    python predict.py RUN_FOLDER IMAGE...          prints each image's class and its probability
    python predict.py RUN_FOLDER FOLDER --top 3    of all images in a folder the three best classes
    python predict.py RUN_FOLDER FOLDER --json     a line of JSON for each image

best.pt holds weights and nothing else. The same weights behind another normalisation, another crop
or TF32 give other answers, and nobody notices. So beside best.pt lies model.json with the rest: the
model, its classes in order, the size, crop, mean and deviation of the images, and what was
evaluated when these weights were kept. This file reads both. It decodes, crops and normalises with
the code of the validation, and computes in fp32.

A wrong answer looks like a right one. So a run folder is checked before the first image: model.json
has every key, of the right type and within its bounds; best.pt has the tensors of that model, with
their shapes and dtypes, and all are finite. What does not hold is one sentence and exit code 2. An
image that cannot be read, or whose outputs are not finite, is named on standard error. The other
images are answered, and the exit code is 2.

docs/train.md has ten lines that do it without our files, for a model that torchvision has.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from checkpoint import CheckpointError, load, non_finite
from data import batches, decode, imagefolder, read_description, regular
from fp32 import fp32_eval
from models import MODELS, build, misfits
from report import print_line, strict_json

BATCH = 32  # images; 64 MB of activations in a resnet18 at 224 pixels
Answer = dict[str, float] | Exception


def load_run(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The network of a run folder, in evaluation mode on the CPU, and what model.json says of it.

    Raises OSError and CheckpointError, each with the name of the file.
    """
    facts, file = folder / "model.json", folder / "best.pt"
    try:
        known = read_description(facts)
        name, side = known.get("model"), known["image_size"]
        if name not in [*MODELS]:
            raise ValueError(f"unknown model {name}: `python train.py --help` lists all models")
        if known["channels"] != 3:
            raise ValueError(f"it takes {known['channels']} channels, and image files have 3")
        net = build(name, known["classes"], side, channels=3).eval()
        if hasattr(net, "judged_by"):
            raise ValueError(f"{name} does not classify images")
        with torch.no_grad():
            net(torch.zeros(1, 3, side, side))  # what the sizes do not allow fails here
    except (ValueError, RuntimeError, MemoryError) as error:
        raise CheckpointError(f"{facts}: {error}") from error
    weights = load(regular(file))
    if odd := misfits(weights, net):
        raise CheckpointError(
            f"{file} does not hold the {name} of {facts}: {', '.join(odd[:3])} "
            f"({len(odd)} in all) differ in name, shape or dtype"
        )
    if bad := non_finite(weights):
        raise CheckpointError(f"{file} is non-finite in {', '.join(bad[:3])}")
    net.load_state_dict(weights)
    return net.to(memory_format=torch.channels_last), known


@torch.no_grad()
def predict(net: nn.Module, known: dict[str, Any], paths: list[str]) -> list[Answer]:
    """For each path every class with its probability, or the numbers of a regression; or why there
    is no answer: decode.Unreadable, or FloatingPointError where the outputs are not finite.
    """
    crop = decode.Crop(known["resize"], known["image_size"])
    normalize = batches.Normalize(known["mean"], known["std"])
    answers, images = {}, {}
    for path in paths:
        try:
            images[path] = decode.read(path, crop)
        except decode.Unreadable as error:
            answers[path] = error
    if images:
        with fp32_eval(net):
            rows = net(normalize(torch.stack([*images.values()])))
        for path, numbers in zip(images, rows, strict=True):
            if not numbers.isfinite().all():
                answers[path] = FloatingPointError("the model's outputs are non-finite")
                continue
            if not known["regression"]:
                numbers = numbers.softmax(0)
            answers[path] = dict(zip(known["classes"], numbers.tolist(), strict=True))
    return [answers[path] for path in paths]


def images_of(path: str) -> list[str]:
    """The path, or the images in that folder and in the folders below it, in order."""
    if not os.path.isdir(path):
        return [path]
    found = []
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "@")))
        found += [
            os.path.join(folder, name) for name in sorted(names) if imagefolder.is_image(name)
        ]
    return found


def say(text: object) -> None:
    """One line on standard error, without control characters."""
    print("predict.py:", imagefolder.printable(" ".join(str(text).split())), file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description="A trained model on your own images.")
    parser.add_argument("folder", type=Path, help="folder of a run, with best.pt and model.json")
    parser.add_argument("images", nargs="+", help="files, or folders of images")
    parser.add_argument("--top", type=int, default=1, help="how many classes to print")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each image")
    args = parser.parse_args()
    if args.top < 1:
        parser.error("--top is at least 1")
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that does not know a character
    try:
        net, known = load_run(args.folder)
    except (OSError, CheckpointError) as error:
        say(error)
        return 2
    code, paths = 0, []
    for path in args.images:
        inside = images_of(path)
        if not inside:
            say(f"{path}: no image is in this folder")
            code = 2
        paths += inside
    bar = tqdm(total=len(paths), unit="image", leave=False, disable=None)  # None: on a terminal
    for i in range(0, len(paths), BATCH):
        some = paths[i : i + BATCH]
        for path, answer in zip(some, predict(net, known, some), strict=True):
            if isinstance(answer, Exception):
                say(f"{path}: {answer}")
                code = 2
                line = strict_json({"path": path, "error": str(answer)}) if args.json else ""
            else:
                best = answer
                if not known["regression"]:
                    best = dict(sorted(answer.items(), key=lambda pair: -pair[1])[: args.top])
                numbers = ", ".join(f"{name} {number:.4g}" for name, number in best.items())
                line = imagefolder.printable(f"{path}: {numbers}")
                if args.json:
                    line = strict_json({"path": path, "answer": best})
            if line and not print_line(line, tqdm.write):
                say("standard output is closed: the other images get no answer")
                return 2
        bar.update(len(some))
    bar.close()
    return code


if __name__ == "__main__":
    sys.exit(main())
