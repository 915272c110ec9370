"""
Flags: the command line of train.py. Names follow torchvision's references and the published reports.

Three rules. A default that depends on the model or on the device is None here: parse() takes it from the model's
recipe, or prepare.py decides and prints the reason. Underscores are accepted for dashes, because half of the published
reports write them. Whatever cannot work is refused with one sentence before anything is written: a typo that silently
trains for a night in fp32 costs more than an error.
"""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from amp_policy import POLICIES
from ranks import refuse


def number(kind: type, low: float, above: bool = False, below: float = math.inf) -> Callable[[str], float]:
    """A converter for argparse: `kind` (int or float), finite, at least (or above) `low`, and below `below`."""

    def convert(text: str) -> float:
        value = kind(text)
        if not math.isfinite(value) or value < low or (above and value == low):
            raise argparse.ArgumentTypeError(f"{text} is not {'above' if above else 'at least'} {low}")
        if value >= below:
            raise argparse.ArgumentTypeError(f"{text} is not below {below}")
        return value

    convert.__name__ = kind.__name__
    return convert


def parse(argv: Sequence[str] | None, about: str, models: dict, datasets: Sequence[str]) -> argparse.Namespace:
    """The arguments, with the model's recipe filled in.

    argv: None: the command line. about: the help's text. models: name -> (build, recipe). datasets: their names.
    Leaves with exit code 2 and one sentence where an argument is wrong.
    """
    parser = argparse.ArgumentParser(
        prog="train.py", description=about, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.error = lambda message: refuse(2, f"{message} (python train.py --help lists every flag)")
    count, positive, share = number(int, 1), number(float, 0, above=True), number(float, 0)
    switch = argparse.BooleanOptionalAction

    what = parser.add_argument_group("what to train")
    what.add_argument("--model", default="cifarnet", help=f"one of {', '.join(models)}")
    what.add_argument("--num-classes", type=count, help="default: the data's; anything else is refused")
    data = parser.add_argument_group("data")
    data.add_argument("--dataset", help=f"{', '.join(datasets)}; default: cifar10, else synthetic")
    data.add_argument("--data-dir", type=Path, help="folder with CIFAR-10, or with train/<class>/* and val/<class>/*")
    data.add_argument("--image-size", type=count, help="default: the data's own, or 224 where sizes differ")
    data.add_argument("--workers", type=number(int, 0), default=0, help="stream with N processes instead of caching")
    data.add_argument("--cutout", type=number(int, 0), default=0, metavar="PIXELS", help="cut squares out of images")
    data.add_argument("--max-bad-share", type=share, default=0.01, help="unreadable files to put up with")
    precision = parser.add_argument_group("precision")
    precision.add_argument("--precision", default="auto", help="auto, fp32, tf32, bf16, fp16, O0, O1, O2 or O3")
    precision.add_argument("--amp-opt-level", metavar="LEVEL", help="the same as --precision, as Swin spells it")
    precision.add_argument("--disable-amp", action=switch, default=False, help="the same as --precision fp32")
    precision.add_argument("--keep-fp32", nargs="+", default=[], metavar="PATTERN", help="modules to keep in fp32")
    precision.add_argument("--eval-precision", default="fp32", choices=["fp32", "same"])
    optimizer = parser.add_argument_group("optimizer (defaults: the model's recipe)")
    optimizer.add_argument("--lr", type=positive, help="peak learning rate for the whole batch; never scaled silently")
    optimizer.add_argument("--warmup-updates", type=number(int, 0), help="default: the recipe's share of the run")
    optimizer.add_argument("--weight-decay", type=share)
    optimizer.add_argument("--no-decay", nargs="+", default=[], metavar="PATTERN", help="parameters without decay")
    optimizer.add_argument("--betas", nargs=2, type=number(float, 0, below=1), default=(0.9, 0.99), metavar="BETA")
    optimizer.add_argument("--adam-eps", type=share, default=1e-8)
    optimizer.add_argument("--amsgrad", action=switch, default=False)
    optimizer.add_argument("--clip-grad", type=share, default=1.0, help="largest global norm of the gradient; 0: off")
    optimizer.add_argument("--zclip", type=positive, metavar="Z", help="clip norms Z deviations above their history")
    optimizer.add_argument("--muon", nargs="*", metavar="PATTERN", help="matrices for Muon; no name: none")
    optimizer.add_argument("--drop-path", type=share, metavar="P", help="drop residual branches of swin and vmamba")
    optimizer.add_argument("--batch-size", type=count, help="images per update, over all ranks and micro-batches")
    optimizer.add_argument("--accum-steps", type=count, default=1, help="micro-batches per update")
    optimizer.add_argument("--ema", type=share, metavar="DECAY", help="evaluate averaged weights; 0: off")
    length = parser.add_argument_group("length (default: the recipe's epochs on a GPU, minutes on a CPU)")
    length = length.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=positive)
    length.add_argument("--max-steps", type=count)
    guard = parser.add_argument_group("guards")
    guard.add_argument("--on-nonfinite", default="heal", choices=["heal", "skip", "stop"])
    guard.add_argument("--max-skips", type=count, default=25, help="rejected steps in a row before giving up")
    guard.add_argument("--max-cures", type=count, default=8, help="healings before giving up")
    guard.add_argument("--probe-every", type=count, metavar="STEPS", help="warn of activations near the dtype's limit")
    guard.add_argument("--verify-every", type=number(int, 0), metavar="STEPS", help="look for hardware that lies with "
                       "finite numbers; default: once an epoch; 0: never")
    guard.add_argument("--detect-anomaly", action=switch, default=False, help="autograd's own anomaly mode; slow")
    guard.add_argument("--inject", default="", metavar="SPEC", help="plant a fault: nan:grad:head.weight@step=5,rank=1")
    guard.add_argument("--replay", type=Path, metavar="FILE", help="examine a recorded bad step again and leave")
    run = parser.add_argument_group("run")
    run.add_argument("--out-dir", type=Path, help="default: runs/MODEL-DATASET-PRECISION-TIME")
    run.add_argument("--ckpt-every", type=count, metavar="STEPS", help="default: every epoch")
    run.add_argument("--resume", default="none", metavar="auto|PATH|none")
    run.add_argument("--seed", type=number(int, 0), default=0)
    run.add_argument("--deterministic", action=switch, default=False, help="bit-identical reruns on CUDA too")
    run.add_argument("--compile", action=switch, default=False, help="torch.compile; minutes at the start")
    run.add_argument("--cuda-graph", action=switch, help="the step as one CUDA graph; default: the model's recipe")
    run.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    run.add_argument("--log-every", type=count, default=10, metavar="STEPS")
    run.add_argument("--tensorboard", action=switch, default=False, help="scalars and pictures, if it is installed")
    # --amp_opt_level O1 is --amp-opt-level O1; what stands behind a "=" is a value and stays
    words = [word.partition("=") for word in (sys.argv[1:] if argv is None else argv)]
    args = parser.parse_args(["".join((name.replace("_", "-") if name.startswith("--") else name, *value))
                              for name, *value in words])
    args.betas = tuple(args.betas)
    if args.model not in models:
        refuse(2, f"--model {args.model} is unknown: choose from {', '.join(models)}")
    if args.dataset not in (None, *datasets):
        refuse(2, f"--dataset {args.dataset} is unknown: choose from {', '.join(datasets)}")
    if (args.precision != "auto") + bool(args.amp_opt_level) + args.disable_amp > 1:
        refuse(2, "--precision, --amp-opt-level and --disable-amp say the same thing: give one of them")
    args.precision = "fp32" if args.disable_amp else args.amp_opt_level or args.precision
    if args.precision not in ("auto", *POLICIES):
        refuse(2, f"--precision {args.precision} is unknown: choose from auto, {', '.join(POLICIES)}")
    for name in ("lr", "weight_decay", "batch_size", "drop_path", "ema", "muon", "cuda_graph"):
        if getattr(args, name) is None:
            setattr(args, name, models[args.model][1][name])
    return args
