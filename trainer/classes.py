"""
Classes: which classes a classifier confuses, and the validation images that it scores worst.

A mean accuracy of 90 % may be 99 % of one class and 0 % of another. So with each best.pt a line of
metrics.jsonl holds the accuracy of each class and the confusion matrix, of which report.py draws
confusion.png; worst.png shows the images with the highest loss: a wrong label is often among them.
"""

from __future__ import annotations

import io
from typing import NamedTuple

import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torchvision.transforms.v2.functional import to_pil_image

import checkpoint
from models import DoesNotFit
from ranks import all_values

from .record import Run

MATRIX = 50  # classes: a larger matrix nobody reads
SHOWN = 16  # images
TILE = 160  # pixels a side, with a line of text below


def weights(labels: Tensor, classes: int) -> Tensor:
    """A factor for the loss of each class, so that all count the same: mean 1 over the images.
    DoesNotFit for numbers."""
    if labels.is_floating_point():
        raise DoesNotFit("--class-weights is for classes, and this data has numbers")
    counts = labels.cpu().bincount(minlength=classes).clamp(min=1)
    return len(labels) / (classes * counts.float())


class Seen(NamedTuple):
    """What the validation images of a rank have shown."""

    confusion: Tensor | None  # (classes * classes,): how often label * classes + guess
    images: Tensor  # (classes,): of each class
    right: Tensor  # (classes,): of these, the right guesses
    worst: list[tuple[float, int, int, int]]  # loss, number of the image, label, guess


def write(run: Run, rows: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    """Log what the validation has seen of each class. rows: label, guess and loss of this rank's
    images, in their order. Every rank calls it; rank 0 writes."""
    columns = [torch.cat(column).cpu() for column in zip(*rows, strict=True)]
    parts = all_values(seen_by(run, *columns))
    if run.rank:
        return
    about = in_words(run.data.classes, parts)
    run.log.write(event="classes", step=run.step, **about)
    if run.data.channels in (1, 3):
        content = io.BytesIO()
        sheet(run, about["worst"]).save(content, "PNG")
        checkpoint.write(run.folder / "worst.png", content.getvalue())


def seen_by(run: Run, labels: Tensor, guesses: Tensor, losses: Tensor) -> Seen:
    count = len(run.data.classes)
    confusion = None
    if count <= MATRIX:
        confusion = (labels * count + guesses).bincount(minlength=count * count)
    worst = [
        (losses[i].item(), run.rank + i * run.world_size, labels[i].item(), guesses[i].item())
        for i in losses.argsort(descending=True)[:SHOWN].tolist()
    ]
    right = labels[labels == guesses]
    return Seen(confusion, labels.bincount(minlength=count), right.bincount(minlength=count), worst)


def in_words(names: list[str], parts: list[Seen]) -> dict:
    """What all ranks have seen, for metrics.jsonl."""
    images = sum(part.images for part in parts).tolist()
    right = sum(part.right for part in parts).tolist()
    about = {
        "classes": names,
        "accuracy": [
            round(100 * r / n, 2) if n else None for n, r in zip(images, right, strict=True)
        ],
    }
    if parts[0].confusion is not None:
        total = sum(part.confusion for part in parts)
        about["confusion"] = total.view(len(names), len(names)).tolist()
    worst = sorted((row for part in parts for row in part.worst), reverse=True)
    about["worst"] = [
        {"image": i, "class": names[label], "guess": names[guess], "loss": loss}
        for loss, i, label, guess in worst[:SHOWN]
    ]
    return about


def sheet(run: Run, worst: list[dict]) -> Image.Image:
    """The images in rows of four; below each its class, the guess and the loss."""
    picture = Image.new("RGB", (4 * TILE, -(-len(worst) // 4) * (TILE + 30)), "white")
    draw = ImageDraw.Draw(picture)
    for k, row in enumerate(worst):
        x, y = k % 4 * TILE, k // 4 * (TILE + 30)
        image = to_pil_image(run.data.val[0][row["image"]].cpu()).resize((TILE - 4, TILE - 4))
        picture.paste(image, (x + 2, y + 2))
        colour = "black"
        text = f"{row['class'][:20]}, loss {row['loss']:.2g}"
        if row["class"] != row["guess"]:
            colour = "darkred"
            text += f"\ntaken for {row['guess'][:16]}"
        text = text.encode("latin-1", "replace").decode("latin-1")  # what Pillow's own font has
        draw.text((x + 4, y + TILE - 1), text, fill=colour)
    return picture
