"""
Predict: a trained model on your own images, computed as the validation computed it.

    python predict.py RUN_FOLDER IMAGE...          prints each image's class and its probability

best.pt holds weights and nothing else. The same weights behind another normalisation, another crop
or TF32 give other answers, and nobody notices. So beside best.pt lies model.json with the rest: the
model, its classes in order, the size, crop, mean and deviation of the images, and what was
evaluated when these weights were kept. This file reads both. It decodes, crops and normalises with
the code of the validation, and computes in fp32.

README.md has ten lines that do it without our files, for a model that torchvision has.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch

import checkpoint
from data import batches, imagefolder
from fp32 import fp32_eval
from models import build
from report import print_line


@torch.no_grad()
def predict(folder: Path, paths: list[str]) -> Iterator[dict[str, float]]:
    """For each image every class with its probability, or the numbers of a regression."""
    facts = folder / "model.json"
    try:
        known = json.loads(facts.read_text("utf-8"))
    except ValueError as error:
        raise OSError(f"{facts} is damaged: {error}") from error
    net = build(known["model"], known["classes"], known["image_size"], known["channels"])
    if hasattr(net, "judged_by"):
        raise SystemExit(f"predict.py: {known['model']} does not name the class of an image")
    if known["channels"] != 3:
        raise SystemExit(f"predict.py: this run's images have {known['channels']} channels, "
                         "image files have 3")
    net.load_state_dict(checkpoint.load(folder / "best.pt"))
    net.to(memory_format=torch.channels_last).eval()
    normalize = batches.Normalize(known["mean"], known["std"])
    crop = imagefolder.Crop(known["resize"], known["image_size"])
    with fp32_eval(net):
        for path in paths:
            try:
                image = imagefolder.Files([path], crop)[0]
            except OSError as error:
                raise OSError(f"{path}: {error}") from error
            numbers = net(normalize(image[None]))[0]
            if not known["regression"]:
                numbers = numbers.softmax(0)
            yield dict(zip(known["classes"], numbers.tolist(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("images", nargs="+")
    args = parser.parse_args()
    try:
        for path, answer in zip(args.images, predict(args.folder, args.images), strict=True):
            best = max(answer, key=answer.get)
            print_line(f"{path}: {best} {answer[best]:.4g}")
    except (OSError, checkpoint.CheckpointError) as error:  # no run, no image
        parser.error(str(error))


if __name__ == "__main__":
    main()
