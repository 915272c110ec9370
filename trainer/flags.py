"""
Flags: the command line of train.py. Names follow torchvision's references and published reports.

Three rules. A default that depends on the model or on the device is None here: parse() takes it
from the model's recipe, or prepare.py decides and prints the reason. Underscores are accepted for
dashes, because half of the published reports write them. Whatever cannot work is refused with one
sentence before anything is written: a typo that silently trains for a night in fp32 costs more than
an error.
"""

import argparse
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from amp_policy import POLICIES
from models import FINE_TUNE
from ranks import refuse

MANY = 10**7  # steps: the table of learning rates has a row for each


def number(
    kind: type, low: float, above: bool = False, below: float = math.inf
) -> Callable[[str], float]:
    """A converter for argparse: `kind`, at least (or above) `low`, below `below`."""

    def convert(text: str) -> float:
        value = kind(text)
        too_low = value <= low if above else value < low
        if too_low or not value < below:  # NaN is not below
            least = "above" if above else "at least"
            raise argparse.ArgumentTypeError(f"{text} is not {least} {low} and below {below:g}")
        return value

    convert.__name__ = kind.__name__
    return convert


def folder(text: str) -> Path:
    """A converter for argparse: a name that a file system takes."""
    if not text.strip():
        raise argparse.ArgumentTypeError("an empty name")
    if any(len(os.fsencode(part)) > 255 for part in Path(text).parts):
        raise argparse.ArgumentTypeError(f"a part of {text[:20]}... is longer than 255 bytes")
    return Path(text)


def scaled_lr(lr: float, batch_size: int, base_batch: int, rule: str) -> tuple[float, str]:
    """The learning rate for another batch size, and the sentence to print.

    rule: "linear" (SGD, arXiv 1706.02677), "sqrt" (Adam: its step has unit size, only the noise
    shrinks; arXiv 2205.10287) or "none".
    """
    power = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}[rule]
    new = lr * (batch_size / base_batch) ** power
    return new, f"lr {new:.3g} = {lr:g} * ({batch_size} / {base_batch}) ** {power:g} ({rule} rule)"


from_0 = number(int, 0, below=MANY)
count = number(int, 1, below=MANY)
share = number(float, 0, below=1)
positive = number(float, 0, above=True)
at_least_0 = number(float, 0)

# Name, what it takes (a list: one of these; bool: a switch), default, help. None as the default:
# it is decided later, and the help says by what.
TABLE = {
    "data": [
        ("--num-classes", count, None, "default: the data's; anything else is refused"),
        ("--data-dir", folder, None, "folder of CIFAR-10, or train/<class>/* and val/<class>/*"),
        ("--image-size", count, None, "default: the data's own, or 224 where sizes differ"),
        ("--workers", from_0, 0, "load images with N processes, without the cache"),
        ("--cache-dir", folder, Path(".cache"), "folder for the decoded images"),
        ("--cutout", from_0, 0, "cut squares out of images"),
        ("--max-bad-share", at_least_0, 0.01, "largest share of unreadable files to accept"),
        (
            "--val-share",
            number(float, 0, above=True, below=1),
            None,
            "share of each class "
            "for validation, in a folder of <class>/* without train/ and val/; default: 0.2",
        ),
    ],
    "optimizer (defaults: the model's recipe)": [
        (
            "--lr",
            positive,
            None,
            "peak learning rate, not scaled; default: the recipe's, scaled to "
            "--batch-size by the recipe's rule",
        ),
        ("--warmup-updates", from_0, None, "default: the recipe's share of the run"),
        ("--weight-decay", at_least_0, None, ""),
        ("--adam-eps", at_least_0, 1e-8, ""),
        ("--amsgrad", bool, False, ""),
        ("--clip-grad", at_least_0, 1.0, "largest norm of the gradient; 0: off"),
        ("--drop-path", share, None, "drop residual branches of swin and vmamba"),
        (
            "--batch-size",
            count,
            None,
            "images per update, over all ranks and micro-batches; "
            "default: the recipe's, or fewer for a small set",
        ),
        ("--class-weights", ["none", "balanced"], "none", "balanced: every class counts the same"),
        ("--accum-steps", count, 1, "micro-batches per update"),
        ("--ema", share, None, "evaluate averaged weights; 0: off"),
        ("--eval-precision", ["fp32", "same"], "fp32", "same: as in training"),
    ],
    "guards": [
        ("--on-nonfinite", ["heal", "skip", "stop"], "heal", ""),
        ("--max-skips", count, 25, "skipped steps in a row before the run gives up"),
        ("--max-cures", count, 8, "cures before the run gives up"),
        ("--probe-every", count, None, "warn of activations near overflow, every N steps"),
        (
            "--verify-every",
            from_0,
            None,
            "look for hardware that returns wrong finite "
            "numbers, every N steps; default: once an epoch; 0: never",
        ),
        (
            "--detect-anomaly",
            bool,
            False,
            "autograd's own anomaly mode: slow, the first NaN ends the run",
        ),
        ("--inject", str, "", "plant a fault: nan:grad:head.weight@step=5"),
        ("--replay", Path, None, "examine a recorded bad step again, then exit"),
    ],
    "run": [
        ("--out-dir", folder, None, "default: runs/MODEL-DATASET-PRECISION-TIME"),
        ("--ckpt-every", count, None, "steps between two checkpoints; default: an epoch"),
        ("--resume", str, "none", "auto, none, or the path of a checkpoint"),
        ("--seed", number(int, 0, below=2**32), 0, ""),
        ("--deterministic", bool, False, "bit-identical reruns on CUDA too"),
        ("--cuda-graph", bool, True, "run the step as one CUDA graph, on one GPU"),
        ("--device", ["auto", "cpu", "cuda", "mps"], "auto", ""),
        ("--log-every", count, 10, "steps between two lines of metrics.jsonl"),
        ("--tensorboard", bool, False, "the same numbers for TensorBoard, if it is installed"),
    ],
}


def dashed(name: re.Match) -> str:
    return name[0].replace("_", "-")


def parse(
    argv: Sequence[str] | None, about: str, models: dict, datasets: Sequence[str]
) -> argparse.Namespace:
    """The arguments, with the model's recipe filled in.

    argv: None: the command line. about: the help's text. models: name -> (build, recipe).
    Leaves with exit code 2 and one sentence where an argument is wrong.
    """
    parser = argparse.ArgumentParser(
        prog="train.py",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.error = lambda message: refuse(2, f"{message} (python train.py --help lists all flags)")
    add_special(parser, models, datasets)
    add_table(parser)
    words = sys.argv[1:] if argv is None else argv
    # --amp_opt_level O1 is --amp-opt-level O1; what stands behind a "=" is a value and stays
    args = parser.parse_args([re.sub("^--[^=]+", dashed, word) for word in words])
    args.betas = tuple(args.betas)
    args.recipe = models[args.model][1] | (FINE_TUNE if args.init else {})
    for name in ("weight_decay", "drop_path", "ema", "muon"):
        if getattr(args, name) is None:
            setattr(args, name, args.recipe[name])
    return args


def add_special(parser: argparse.ArgumentParser, models: dict, datasets: Sequence[str]):
    """The flags that need more than a row of TABLE."""
    add = parser.add_argument
    precision = parser.add_mutually_exclusive_group()
    length = parser.add_mutually_exclusive_group()
    add("--model", default="cifarnet", choices=models, metavar="NAME", help=", ".join(models))
    add(
        "--init",
        metavar="FILE",
        help="start from these weights: of a run, or a .pth of "
        "torchvision or timm; pretrained: torchvision's own",
    )
    add("--dataset", choices=datasets, help="default: cifar10, else synthetic")
    precision.add_argument(
        "--precision", "--amp-opt-level", default="auto", choices=["auto", *POLICIES]
    )
    precision.add_argument("--disable-amp", dest="precision", action="store_const", const="fp32")
    length.add_argument(
        "--epochs",
        type=number(float, 0, above=True, below=10**5),
        help="default: the recipe's, at least 300 updates; on a CPU what takes two minutes",
    )
    length.add_argument("--max-steps", type=count)
    add("--betas", nargs=2, type=share, default=(0.9, 0.99))
    add("--keep-fp32", nargs="+", default=[], metavar="PATTERN", help="modules to keep in fp32")
    add("--no-decay", nargs="+", default=[], metavar="PATTERN", help="parameters without decay")
    add(
        "--freeze",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="modules and parameters that do not train",
    )
    add("--muon", nargs="*", metavar="PATTERN", help="matrices for Muon; without a pattern: none")
    add(
        "--compile",
        nargs="?",
        const="on",
        default="auto",
        choices=["auto", "on", "off"],
        help="torch.compile; auto: on one GPU, if the run is long enough to gain from it",
    )
    add("--no-compile", dest="compile", action="store_const", const="off")


def add_table(parser: argparse.ArgumentParser):
    for title, rows in TABLE.items():
        group = parser.add_argument_group(title)
        for name, takes, default, text in rows:
            if takes is bool:
                kind = {"action": argparse.BooleanOptionalAction}
            elif isinstance(takes, list):
                kind = {"choices": takes}
            else:
                kind = {"type": takes}
            group.add_argument(name, default=default, help=text, **kind)
