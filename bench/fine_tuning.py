"""
Sixty pictures of three classes: --init, the same from scratch, and the loop of a tutorial.

    python bench/fine_tuning.py --start runs/tiny38/last.pt --data-dir TINY --device cpu \\
        --timm CLONE

TINY holds train/CLASS/* and val/CLASS/* of Tiny ImageNet; --start is a resnet18 trained on classes
that are not in `HELD_OUT` (the raw file holds what is known of it). Each seed takes other classes:
20 pictures of each to train on, of which finite validates on four, and 50 to test. The run with
--init makes 60 updates; the others get as many seconds of the CPU (of all threads and processes:
what else runs on the machine does not count). The tutorial is torchvision's (Transfer
Learning for Computer Vision): SGD, batches of 4, 25 epochs, the best of its validations, here on
the same images as ours, from the same weights, with the same normalisation.

CLONE is a checkout of huggingface/pytorch-image-models: its own train.py, in bf16 as ours, trains
on the same images for as many epochs as fit into the seconds, and its own validate.py judges its
best checkpoint on the test images. Two rows from scratch (its defaults but for the batch of 16; and
AdamW at 1e-3, a rate that suits the batch), one from the same weights.
"""

import contextlib
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torchvision
from torch import nn
from torchvision.transforms import v2

sys.path.insert(0, str(Path(__file__).parents[1]))
import predict
from bench import record
from data import imagefolder
from trainer import pretrained

HELD_OUT = [
    ["n02124075", "n04146614", "n07749582"], ["n01443537", "n02058221", "n03085013"],
    ["n03838899", "n04008634", "n07753592"],
]  # fmt: skip
UPDATES, EPOCHS = (("accuracy", "seconds", unit) for unit in ("updates", "epochs"))
FLAGS = ("--model", "resnet18", "--dataset", "imagefolder", "--image-size", "64", "--device", "cpu")


def folders(tiny, classes, home, seed):
    """sixty/CLASS/* and test/CLASS/*, as links."""
    draw = random.Random(seed)
    for split, name, count in (("train", "sixty", 20), ("val", "test", 50)):
        for number in classes:
            files = sorted((tiny / split / number).glob("*.JPEG"))
            (home / name / number).mkdir(parents=True)
            for file in draw.sample(files, count):
                (home / name / number / file.name).symlink_to(file.resolve())
    return home / "sixty", sorted((home / "test").glob("*/*"))


def seconds():
    """Of the CPU, so far."""
    return sum(os.times()[:4])


def accuracy(answers, tests):
    right = [answer == path.parent.name for answer, path in zip(answers, tests, strict=True)]
    return 100 * sum(right) / len(right)


def fitting(train, most, few, more):
    """How many updates or epochs fit into `most` seconds, if train(n) takes the seconds of n. Two
    runs tell: a start takes as long as some of them."""
    short = train(few)
    each = (train(more) - short) / (more - few)
    return few + max(0, int((most - short) / each))


def ours(name, home, sixty, tests, *flags):
    """(accuracy, seconds, updates, images a second) of train.py, judged through predict.py."""
    began = seconds()
    words = [*FLAGS, *flags]
    _, end, _ = record.train_run({"data-dir": sixty, "out-dir": home / name}, *map(str, words))
    spent = seconds() - began
    net, known = predict.load_run(home / name)
    best = [
        max(answer, key=answer.get)
        for answer in predict.predict(net, known, [str(path) for path in tests])
    ]
    return accuracy(best, tests), spent, end["updates"]


def split_of(sixty):
    """(training images, validation images, classes), as finite splits them."""
    with contextlib.redirect_stdout(io.StringIO()):
        return imagefolder.find(sixty, 0.2, print, print)


def tutorial(start, sixty, tests, most, seed):
    """(accuracy, seconds, epochs) of the tutorial's loop."""
    began = seconds()
    torch.manual_seed(seed)
    weights = pretrained.read(str(start), "resnet18")
    norm = v2.Normalize(
        [x / 255 for x in weights.known["mean"]], [x / 255 for x in weights.known["std"]]
    )
    ends = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), norm]
    moves = v2.Compose([v2.RandomResizedCrop(64), v2.RandomHorizontalFlip(), *ends])
    still = v2.Compose([v2.Resize(64), v2.CenterCrop(64), *ends])
    train, val, classes = split_of(sixty)
    outputs = len(weights.known["classes"])
    net = torchvision.models.resnet18(num_classes=outputs)
    net.load_state_dict(weights.tensors)
    net.fc = nn.Linear(net.fc.in_features, len(classes))

    def batch(files, transform):
        images = [transform(imagefolder.Image.open(path).convert("RGB")) for path, _ in files]
        return torch.stack(images), torch.tensor([label for _, label in files])

    optimizer = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.1)
    draw, best, kept, epochs = random.Random(seed), -1.0, None, 0
    while epochs < 25 and seconds() - began < most:
        net.train()
        files = draw.sample(train.files, len(train.files))
        for i in range(0, len(files), 4):
            x, y = batch(files[i : i + 4], moves)
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
        schedule.step()
        epochs += 1
        net.eval()
        with torch.no_grad():
            x, y = batch(val.files, still)
            right = (net(x).argmax(1) == y).float().mean().item()
        if right > best:
            best, kept = right, {name: t.clone() for name, t in net.state_dict().items()}
    spent = seconds() - began
    net.load_state_dict(kept)
    with torch.no_grad():
        x, _ = batch([(path, 0) for path in tests], still)
        answers = [classes[i] for i in net(x).argmax(1).tolist()]
    return accuracy(answers, tests), spent, epochs


class Timm:
    """timm's own train.py and validate.py, on the same images."""

    def __init__(self, clone, start, home, sixty, seed):
        self.clone, self.home, self.seed = clone, home, seed
        weights = pretrained.read(str(start), "resnet18")
        torch.save(weights.tensors, home / "start.pth")
        self.norm = []
        for name in ("mean", "std"):
            self.norm += [f"--{name}", *(str(x / 255) for x in weights.known[name])]
        adamw = ["--opt", "adamw", "--weight-decay", "0.05"]
        self.rows = {
            "timm": [],
            "timm, AdamW": [*adamw, "--lr", "1e-3"],
            "timm, from the same weights": [
                *adamw, "--lr", "3e-4", "--warmup-epochs", "1",
                *self.norm, "--pretrained", "--pretrained-path", str(home / "start.pth"),
            ],
        }  # fmt: skip
        train, val, classes = split_of(sixty)
        for split, images in (("train", train), ("validation", val)):
            for path, label in images.files:
                link = home / "split" / split / classes[label] / Path(path).name
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(Path(path).resolve())

    def call(self, script, *words):
        common = [
            "--model",
            "resnet18",
            "--num-classes",
            "3",
            "--input-size",
            "3",
            "64",
            "64",
            "--device",
            "cpu",
            "--amp",
            "--amp-dtype",
            "bfloat16",
            "--workers",
            "2",
        ]
        done = subprocess.run(
            [sys.executable, str(self.clone / script), *common, *words],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"{script}: {done.stderr[-2000:]}")
        return done.stdout

    def train(self, flags, epochs):
        began = seconds()
        self.call(
            "train.py",
            *flags,
            "--batch-size",
            "16",
            "--epochs",
            str(epochs),
            "--data-dir",
            str(self.home / "split"),
            "--seed",
            str(self.seed),
            "--output",
            str(self.home / "timm"),
            "--experiment",
            str(epochs),
        )
        return seconds() - began

    def run(self, name, most):
        """(accuracy, seconds, epochs) of as many epochs as fit into the seconds."""
        flags = self.rows[name]
        epochs = fitting(lambda n: self.train(flags, n), most, 5, 40)
        shutil.rmtree(self.home / "timm")
        spent = self.train(flags, epochs)
        best = self.home / "timm" / str(epochs) / "model_best.pth.tar"
        norm = self.norm if self.norm[0] in flags else []
        printed = self.call(
            "validate.py", "--data-dir", str(self.home / "test"), "--checkpoint", str(best), *norm
        )
        shutil.rmtree(self.home / "timm")
        return float(re.search(r'"top1": ([0-9.]+)', printed).group(1)), spent, epochs


def main():
    parser = record.arguments(__doc__, device="cpu")
    parser.add_argument("--start", type=Path, required=True)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--timm", type=Path, help="a checkout of pytorch-image-models")
    args = parser.parse_args()
    state = torch.load(args.start, weights_only=True)
    about = {name: state["identity"][name] for name in ("model", "images", "num_classes")}
    raw = record.header("fine_tuning", args) | {
        "torchvision": torchvision.__version__, "rows": [],
        "start": about | {"updates": state["updates"], "scores": state["scores"]},
    }  # fmt: skip
    for seed, classes in enumerate(HELD_OUT[: 1 if args.smoke else None]):
        with tempfile.TemporaryDirectory() as home:
            home = Path(home)
            sixty, tests = folders(args.data_dir, classes, home, seed)
            common = (home, sixty, tests, "--seed", seed, "--max-steps")
            count = 4 if args.smoke else 60
            init = ours("init", *common, count, "--init", args.start)

            def tried(n, common=common):
                return ours(f"try{n}", *common, n)[1]

            updates = fitting(tried, init[1], count // 4, count)
            scratch = ours("scratch", *common, updates)
            theirs = tutorial(args.start, sixty, tests, init[1], seed)
            peers = {}
            if args.timm:
                timm = Timm(args.timm, args.start, home, sixty, seed)
                peers = {name: timm.run(name, init[1]) for name in timm.rows}
        row = {"seed": seed, "classes": classes, "tests": len(tests)}
        row |= {
            "init": dict(zip(UPDATES, init, strict=True)),
            "scratch": dict(zip(UPDATES, scratch, strict=True)),
            "tutorial": dict(zip(EPOCHS, theirs, strict=True)),
        }
        row |= {name: dict(zip(EPOCHS, peer, strict=True)) for name, peer in peers.items()}
        print(json.dumps(row), flush=True)
        raw["rows"].append(row)
        record.keep(raw, args)
    record.write(raw, args, samples=("rows",))


if __name__ == "__main__":
    main()
