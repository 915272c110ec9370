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
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import optim
from amp_policy import POLICIES
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
    if max(len(part.encode()) for part in Path(text).parts) > 255:
        raise argparse.ArgumentTypeError(f"a part of {text[:20]}... is longer than 255 bytes")
    return Path(text)


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
    number_of = number(int, 0, below=MANY)  # may be 0
    count = number(int, 1, below=MANY)
    share = number(float, 0, below=1)
    positive = number(float, 0, above=True)
    at_least_0 = number(float, 0)
    switch = {"action": argparse.BooleanOptionalAction, "default": False}

    flag = parser.add_argument_group("what to train").add_argument
    flag("--model", default="cifarnet", choices=models, metavar="NAME", help=", ".join(models))
    flag("--num-classes", type=count, help="default: the data's; anything else is refused")

    flag = parser.add_argument_group("data").add_argument
    flag("--dataset", choices=datasets, help="default: cifar10, else synthetic")
    flag("--data-dir", type=folder, help="folder of CIFAR-10, or train/<class>/* and val/<class>/*")
    flag("--image-size", type=count, help="default: the data's own, or 224 where sizes differ")
    flag("--workers", type=number_of, default=0, help="stream with N processes instead of caching")
    flag("--cutout", type=number_of, default=0, help="cut squares out of images")
    flag("--max-bad-share", type=at_least_0, default=0.01, help="unreadable files to put up with")

    flag = parser.add_argument_group("precision").add_argument
    flag("--precision", default="auto", choices=["auto", *POLICIES])
    flag("--amp-opt-level", choices=POLICIES, help="the same as --precision, as Swin spells it")
    flag("--disable-amp", **switch, help="the same as --precision fp32")
    flag("--keep-fp32", nargs="+", default=[], metavar="PATTERN", help="modules to keep in fp32")
    flag("--eval-precision", default="fp32", choices=["fp32", "same"])

    flag = parser.add_argument_group("optimizer (defaults: the model's recipe)").add_argument
    flag("--lr", type=positive, help="peak learning rate, as it is; default: the recipe's, scaled "
         "to --batch-size by the recipe's rule")
    flag("--warmup-updates", type=number_of, help="default: the recipe's share of the run")
    flag("--weight-decay", type=at_least_0)
    flag("--no-decay", nargs="+", default=[], metavar="PATTERN", help="parameters without decay")
    flag("--betas", nargs=2, type=share, default=(0.9, 0.99))
    flag("--adam-eps", type=at_least_0, default=1e-8)
    flag("--amsgrad", **switch)
    flag("--clip-grad", type=at_least_0, default=1.0, help="largest norm of the gradient; 0: off")
    flag("--muon", nargs="*", metavar="PATTERN", help="matrices for Muon; no name: none")
    flag("--drop-path", type=share, help="drop residual branches of swin and vmamba")
    flag("--batch-size", type=count, help="images per update, over all ranks and micro-batches")
    flag("--accum-steps", type=count, default=1, help="micro-batches per update")
    flag("--ema", type=share, help="evaluate averaged weights; 0: off")

    group = parser.add_argument_group("length (default: the recipe; on a CPU what takes 2 minutes)")
    flag = group.add_mutually_exclusive_group().add_argument
    flag("--epochs", type=number(float, 0, above=True, below=MANY))
    flag("--max-steps", type=count)

    flag = parser.add_argument_group("guards").add_argument
    flag("--on-nonfinite", default="heal", choices=["heal", "skip", "stop"])
    flag("--max-skips", type=count, default=25, help="rejected steps in a row before giving up")
    flag("--max-cures", type=count, default=8, help="healings before giving up")
    flag("--probe-every", type=count, help="warn of activations near the limit")
    flag("--verify-every", type=number_of, metavar="STEPS", help="look for hardware that lies with "
         "finite numbers; default: once an epoch; 0: never")
    flag("--detect-anomaly", **switch, help="autograd's own anomaly mode; slow")
    flag("--inject", default="", metavar="SPEC", help="plant a fault: nan:grad:head.weight@step=5")
    flag("--replay", type=Path, help="examine a recorded bad step again and leave")

    flag = parser.add_argument_group("run").add_argument
    flag("--out-dir", type=folder, help="default: runs/MODEL-DATASET-PRECISION-TIME")
    flag("--ckpt-every", type=count, metavar="STEPS", help="default: every epoch")
    flag("--resume", default="none", metavar="auto|PATH|none")
    flag("--seed", type=number(int, 0, below=2**32), default=0)
    flag("--deterministic", **switch, help="bit-identical reruns on CUDA too")
    flag("--compile", **switch, help="torch.compile; minutes at the start")
    flag("--cuda-graph", action=argparse.BooleanOptionalAction, default=True,
         help="the step as one CUDA graph where it runs on one GPU")
    flag("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"])
    flag("--log-every", type=count, default=10)
    flag("--tensorboard", **switch, help="scalars and pictures, if it is installed")

    # --amp_opt_level O1 is --amp-opt-level O1; what stands behind a "=" is a value and stays
    words = []
    for word in sys.argv[1:] if argv is None else argv:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        words.append(name + equals + value)
    args = parser.parse_args(words)
    args.betas = tuple(args.betas)
    spellings = [args.precision != "auto", args.amp_opt_level is not None, args.disable_amp]
    if sum(spellings) > 1:
        refuse(2, "--precision, --amp-opt-level and --disable-amp say the same: give one of them")
    args.precision = "fp32" if args.disable_amp else args.amp_opt_level or args.precision
    recipe = models[args.model][1]
    for name in ("weight_decay", "batch_size", "drop_path", "ema", "muon"):
        if getattr(args, name) is None:
            setattr(args, name, recipe[name])
    args.lr_reason = f"lr {args.lr} as asked"
    if args.lr is None:
        args.lr, args.lr_reason = optim.scaled_lr(
            recipe["lr"], args.batch_size, recipe["batch_size"], recipe["lr_rule"]
        )
    return args
