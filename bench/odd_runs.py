"""
Healthy but odd: short runs that look lost and are not. Each must end "done", without a cure.

    python bench/odd_runs.py                            all of them, three minutes on two cores
    python bench/odd_runs.py "one class" "batch 1"      these

A watch that cries wolf is switched off. So each row is a run that a rule for lost runs could take
for one: batches of one to four images, wrong labels, classes that hardly occur, no image or every
image to learn from, runs of one step, losses that are no cross entropy, a rate that jumps.
"""

import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
import train
from bench import record
from data import Dataset, synthetic
from models import MODELS, RECIPE

BASE = {"model": "cifarnet-tiny", "dataset": "synthetic", "batch-size": 64, "max-steps": 60,
        "precision": "fp32", "device": "cpu"}  # fmt: skip
Split = tuple[Tensor, Tensor]


def linear(names, size):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * size * size, len(names)))


def noisy(images, labels):
    wrong = torch.rand(len(labels)) < 0.5
    return images, torch.where(wrong, torch.randint(0, 10, labels.shape), labels)


def imbalanced(images, labels):
    return images, torch.where(torch.rand(len(labels)) < 0.97, 0, labels)


def one_class(images, labels):
    return images, torch.zeros_like(labels)


def same_in_class(images, labels):
    first = torch.stack([images[labels == k][0] for k in range(10)])
    return first[labels], labels


def colours(images, labels):
    """Each class has one colour: a linear network comes to a loss of exactly 0."""
    labels = labels % 8
    bits = torch.stack([labels // place % 2 for place in (1, 2, 4)], 1)
    return (bits * 255).to(torch.uint8)[..., None, None].repeat(1, 1, 32, 32), labels


def sorted_by_class(images, labels):
    order = labels.argsort()
    return images[order], labels[order]


def outliers(images, labels):
    """One image in forty is noise with any label: the loss has spikes, and recovers."""
    noise = torch.rand(len(labels)) < 0.025
    images = torch.where(noise.view(-1, 1, 1, 1), torch.randint_like(images, 0, 256), images)
    return images, torch.where(noise, labels.roll(1), labels)


SETS = (noisy, imbalanced, one_class, same_in_class, colours, sorted_by_class, outliers)
ROWS = {  # name: (flags, what is done to the data, flags of a second leg that resumes the first)
    **{function.__name__.replace("_", " "): ({}, function) for function in SETS},
    **{f"batch {n}": ({"batch-size": n},) for n in (1, 2)},
    **{f"{n} steps": ({"max-steps": n},) for n in (1, 2, 12)},
    **{name: ({"model": name},) for name in ("vit-test", "swin-test", "swin-v2-test",
                                             "vmamba-test", "dit-test", "slat_vae-test",
                                             "vlm-test")},
    "dit, batch 2": ({"model": "dit-test", "batch-size": 2},),
    "one class, one step": ({"max-steps": 1}, one_class),
    "loss 0": ({"model": "linear", "lr": 0.02, "max-steps": 150}, colours),
    "rate 100 times lower": ({"lr": 2e-4},),
    "no clipping": ({"clip-grad": 0},),
    "clipped to 0.001": ({"clip-grad": 1e-3},),
    "weight decay 2": ({"weight-decay": 2.0},),
    "averaged weights": ({"ema": 0.999},),
    "ten times the rate, resumed": ({"ckpt-every": 30}, None, {"max-steps": 90, "lr": 0.2}),
    "a tenth of the rate, resumed": ({}, None, {"max-steps": 90, "lr": 2e-3}),
    "bf16, resumed": ({}, None, {"max-steps": 90, "precision": "bf16"}),
}


def run(name):
    """(status, what is wrong or ""). A cure is wrong too."""
    flags, change, resumed = (*ROWS[name], None, None)[:3]
    torch.manual_seed(0)
    images, labels = synthetic.draw(0, 900, seed=1)
    split = (images[:700], labels[:700]), (images[700:], labels[700:])
    if change:
        split = tuple(change(*part) for part in split)
    classes = ["only"] if change is one_class else [str(k) for k in range(10)]
    dataset = Dataset("synthetic", *split, classes=classes)
    MODELS["linear"] = linear, RECIPE
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(train.prepare, "load", lambda *args, **options: dataset),
        patch.object(train.report, "draw_curves", lambda path: None),
    ):
        flags = BASE | flags | {"out-dir": f"{folder}/run"}
        _, end, lines = record.train_run(flags)
        if resumed and end.get("status") == "done":
            _, end, lines = record.train_run(flags | resumed | {"resume": "auto"})
    status = end.get("status", "refused")
    cures = [line["action"] for line in lines if line.get("event") == "cure"]
    reasons = [end.get("reason") or end.get("refused") or "", *end.get("warnings", []), *cures]
    return status, "; ".join(filter(None, reasons)) if cures or status != "done" else ""


def main():
    names = sys.argv[1:] or list(ROWS)
    wrong = 0
    for name in names:
        status, why = run(name)
        wrong += bool(why) or status != "done"
        print(f"{name:32}{status:10}{why}", flush=True)
    print(f"{len(names) - wrong} of {len(names)} were left alone")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
