"""
Time to accuracy on CIFAR-10: the default recipe of train.py beside cifar10-airbench's record, airbench94_muon.py.

    git clone https://github.com/KellerJordan/cifar10-airbench
    python bench/time_to_accuracy.py --airbench cifar10-airbench --data-dir DIR      # on the GPU if there is one
    python bench/time_to_accuracy.py --airbench cifar10-airbench --data-dir DIR --epochs 8 --flags "--lr 8e-3"
    python bench/time_to_accuracy.py --airbench cifar10-airbench --data-dir DIR --steps-only 3     # minutes, on a CPU

Both recipes get the same pixels on the same machine. They take turns, epoch by epoch, so that a slow minute of a shared
machine strikes both. The peer runs its eight epochs, ours the epochs of its recipe or --epochs.
Timed is training alone, as the peer does it: no loading, no evaluation. Ours is what train.py counts, guards and
checkpoints included; the whitening is computed before its clock starts (the peer's clock has it: milliseconds).
After every epoch both are evaluated plainly and with airbench's test-time augmentation ("tta"; on a CPU, where it takes
half a minute, after the last one), ours in fp32, the peer in its own precision.
The goal is the accuracy that the peer ends at, the mean of its seeds. For each recipe the bench prints the first epoch
after which the mean of its seeds is as good, and the seconds until then.

--steps-only ROUNDS asks for the time alone: both recipes run whole, but on the images of one batch of the peer, and no
accuracy counts. An epoch is then one step of the peer, and each phase of a recipe has its share of the steps. The bench
takes the median of each epoch over the rounds. Accuracy does not depend on how busy a machine is: the accuracies may
come from whole runs beside other work, and only the seconds need a quiet machine. It is for CPUs: a GPU runs all in
seconds.

On CUDA the peer's file runs as it is. It knows no CPU: there the substitutions of PORT are made in its source, and it
computes in bf16 where our policy does, else in fp32.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import math
import shlex
import statistics
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import amp_policy  # noqa: E402
import checkpoint  # noqa: E402
import data  # noqa: E402
import flags  # noqa: E402
import train  # noqa: E402
from bench import record  # noqa: E402
from models import MODELS  # noqa: E402

URL = "https://github.com/KellerJordan/cifar10-airbench"
BATCH = 2000  # images in a step of the peer
COLUMNS = {"plain": 2, "tta": 3}  # of a row: epochs, seconds, plain, tta
# On a CPU. HALF is bf16 or fp32. Weights, momentum and Newton-Schulz steps have it too, as they are half on a GPU.
PORT = {
    "@torch.compile\n": "",
    "G.bfloat16()": "G.to(HALF)",
    'torch.device("cuda")': 'torch.device("cpu")',
    "self.images.half()": "self.images.to(HALF)",
    "mod.half()": "mod.to(HALF)",
    "torch.cuda.Event(enable_timing=True)": "Clock()",
    "torch.cuda.synchronize()": "None",
}


class Clock:
    """In the place of a CUDA event."""

    def record(self) -> None:
        self.now = time.perf_counter()

    def elapsed_time(self, later: Clock) -> float:
        return 1e3 * (later.now - self.now)


def import_peer(path: Path, device: torch.device, half: torch.dtype = torch.float32) -> types.ModuleType:
    """The peer's file as a module; its main guard keeps it from running. Raises SystemExit with a sentence."""
    if not path.is_file():
        raise SystemExit(f"--airbench: {path} is not there; git clone {URL}, and name the folder")
    source = path.read_text()
    for text, replacement in PORT.items() if device.type == "cpu" else ():
        if text not in source:
            raise SystemExit(f"{path} has changed: it does not contain {text!r}, so PORT cannot bring it to a CPU")
        source = source.replace(text, replacement)
    peer = sys.modules["airbench94_muon"] = types.ModuleType("airbench94_muon")  # torch.compile looks it up by name
    peer.Clock, peer.HALF = Clock, half
    with patch.object(sys, "argv", [str(path)]):  # it reads its own source from there
        exec(compile(source, str(path), "exec", dont_inherit=True), peer.__dict__)
    missing = {"CifarNet", "main", "evaluate", "CifarLoader", "print_training_details"} - set(vars(peer))
    if missing:
        raise SystemExit(f"{path} is not of the form of airbench94_muon.py: it has no {', '.join(sorted(missing))}")
    return peer


def load(folder: Path | None) -> tuple:
    """What data.load returns, each split in a random order that is always the same.

    An image folder comes sorted by class, and airbench whitens with the first 5,000 images: all of them aeroplanes.
    """

    def shuffled(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        return images[order], labels[order]

    train, test, classes, name = data.load("cifar10", folder, iter)
    return shuffled(*train), shuffled(*test), classes, name


def write_for_peer(splits: tuple, folder: Path) -> Path:
    """The same images as airbench's loader caches them, in `folder`, which is returned."""
    for name, (images, labels) in zip(("train", "test"), splits[:2], strict=True):
        images = images.permute(0, 2, 3, 1).contiguous()
        torch.save({"images": images, "labels": labels, "classes": splits[2]}, folder / f"{name}.pt")
    return folder


@torch.no_grad()
def tta_accuracy(net: nn.Module, split: list[tuple[Tensor, Tensor]]) -> float:
    """Percent, with airbench's tta_level 2: logits averaged over mirror images (1/2 each), and over the image as it is
    (1/2), moved by one pixel down and right (1/4), up and left (1/4). `split`: batches of normalised images, labels."""
    net.eval()
    right = count = 0
    for images, labels in split:
        padded = F.pad(images, (1,) * 4, "reflect")
        views = (0.5, images), (0.25, padded[:, :, :-2, :-2]), (0.25, padded[:, :, 2:, 2:])
        logits = sum(weight / 2 * (net(view) + net(view.flip(-1))) for weight, view in views)
        right, count = right + (logits.argmax(1) == labels).sum().item(), count + len(labels)
    net.train()
    return 100 * right / count


def in_turns(runs: dict[str, Callable], order: list[str], device: torch.device) -> dict[str, list]:
    """What two runs return that change places after every epoch. The first one runs in this thread, as train.py must.

    Each is a function of `change()`, which it calls after an epoch: that comes back when it is its turn again, with its
    random numbers and cudnn's setting as they were. If one fails, so does the other.
    """
    queue, changed = list(order), threading.Condition()

    def wait(name: str) -> None:
        changed.wait_for(lambda: not queue or queue[0] == name)
        if not queue:
            raise RuntimeError("the other run failed")

    def change(name: str) -> None:
        mine = checkpoint.rng_state(device), torch.backends.cudnn.benchmark
        with changed:
            queue.append(queue.pop(0))
            changed.notify_all()
            wait(name)
        checkpoint.set_rng_state(mine[0], device)
        torch.backends.cudnn.benchmark = mine[1]

    def whole(name: str) -> list:
        with changed:
            wait(name)
        try:
            rows = runs[name](partial(change, name))
            queue.remove(name)
            return rows
        except BaseException:
            queue.clear()
            raise
        finally:
            with changed:
                changed.notify_all()

    first, second = runs
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(whole, second)
        try:
            mine = whole(first)
        except RuntimeError:
            other.result()  # if it was the other one that failed, this says why
            raise
        return {first: mine, second: other.result()}


def run_ours(splits: tuple, epochs: float, seed: int, device: torch.device, extra: list[str],
             change: Callable[[], None]) -> list[list[float]]:  # fmt: skip
    """One run of train.py in this process: [epochs, seconds of training, plain, tta], a row for every evaluation."""
    rows, validate, plain = [], train.validation.validate, train.validation.evaluate

    def evaluate(model: nn.Module, split) -> dict[str, float]:
        split = list(split)
        due = device.type == "cuda" or len(rows) + 1 >= epochs
        return plain(model, split) | {"val_tta_acc1": tta_accuracy(model.net, split) if due else math.nan}

    def listen(run) -> str:
        warning = validate(run)
        rows.append([run.step / run.epoch_steps, run.busy, run.scores["val_acc1"], run.scores["val_tta_acc1"]])
        if run.step < run.total_steps:
            change()
        return warning

    torch.backends.cudnn.benchmark = False  # torch's default; airbench sets it when it is imported
    with (tempfile.TemporaryDirectory() as folder, patch.object(train.prepare, "load", lambda *_: splits),
          patch.multiple(train.validation, validate=listen, evaluate=evaluate),
          contextlib.redirect_stdout(io.StringIO())):  # fmt: skip
        arguments = ["--out-dir", folder, "--device", device.type, "--seed", str(seed), *extra, "--epochs", str(epochs)]
        if code := train.main(arguments):
            raise SystemExit(f"train.py {shlex.join(arguments)} ended with code {code}")
    return rows


def peers_model(peer: types.ModuleType, device: torch.device) -> nn.Module:
    """As the peer makes it under its main guard. It is made once, because on CUDA it is compiled for minutes."""
    model = peer.CifarNet().to(device, memory_format=torch.channels_last)
    if device.type == "cuda":
        model.compile(mode="max-autotune")
    return model


def run_peer(peer: types.ModuleType, model: nn.Module, folder: Path, seed: int,
             change: Callable[[], None]) -> list[list[float]]:  # fmt: skip
    """The same of the peer: after every epoch its main() hands its variables to whoever prints them; here we listen."""
    rows, loader = [], peer.CifarLoader

    def listen(variables: dict, is_final_entry: bool) -> None:
        if is_final_entry:
            return
        cuda = next(model.parameters()).is_cuda
        tta = peer.evaluate(model, variables["test_loader"], tta_level=2) if cuda else math.nan
        rows.append([variables["epoch"] + 1, variables["time_seconds"], 100 * variables["val_acc"], 100 * tta])
        if variables["step"] < variables["total_train_steps"]:
            change()

    torch.backends.cudnn.benchmark = True
    torch.manual_seed(seed)
    with patch.multiple(peer, print_training_details=listen, CifarLoader=lambda _, **how: loader(folder, **how)):
        rows[-1][3] = 100 * peer.main(seed, model)
    return rows


def mean_sd(values: Iterable[float]) -> str:
    values = list(values)
    return f"{statistics.mean(values):.2f} +- {statistics.stdev(values) if len(values) > 1 else math.nan:.2f}"


def reached(seeds: list[list], column: int, goal: float) -> list[float] | None:
    """[epochs, mean seconds] of the first evaluation at which the mean of the seeds is at least goal, or None."""
    for rows in zip(*seeds, strict=True):  # the same epoch of every seed
        if statistics.mean(row[column] for row in rows) >= goal:
            return [rows[0][0], statistics.mean(row[1] for row in rows)]
    return None


def report(curves: dict[str, list]) -> dict[str, dict]:
    """Print the table; return the paired ratio of seconds, and what became of the goals. curves: name -> one a seed."""
    print(f"\n{'mean +- sd':16}{'epochs':>7}{'seconds':>20}{'plain %':>16}{'tta %':>16}{'s an epoch':>18}")
    for name, of in curves.items():
        epochs, seconds, plain, tta = zip(*(curve[-1] for curve in of), strict=True)
        each = mean_sd(s / e for s, e in zip(seconds, epochs, strict=True))
        print(f"{name:16}{epochs[0]:7.2f}{mean_sd(seconds):>20}{mean_sd(plain):>16}{mean_sd(tta):>16}{each:>18}")
    ratio = record.spread([a[-1][1] / b[-1][1] for a, b in zip(*curves.values(), strict=True)])
    low, high = ratio["quartiles"]
    print(f"{' / '.join(curves)}, seconds: {ratio['median']:.3f}  ({low:.3f} .. {high:.3f}), n = {ratio['n']}, paired")
    (ours, of_ours), (theirs, of_theirs) = curves.items()
    goals = {}
    for kind, column in COLUMNS.items():
        goal = statistics.mean(curve[-1][column] for curve in of_theirs)
        first = {ours: reached(of_ours, column, goal), theirs: reached(of_theirs, column, goal)}
        seconds = first[ours] and first[ours][1] / first[theirs][1]
        goals[kind] = {"goal": goal, "first": first, "ratio": seconds}
        when = "; ".join(f"{name} after {at[0]:.2f} epochs, {at[1]:.2f} s" if at else f"{name} MISSES it"
                         for name, at in first.items())  # fmt: skip
        print(f"to {goal:.2f} % {kind}, where {theirs} ends: {when}" + (f"; ratio {seconds:.3f}" if seconds else ""))
    return {"ratio": ratio, "goals": goals}


def report_steps(curves: dict[str, list], shares: dict[str, float]) -> dict[str, dict]:
    """The same of --steps-only. shares: by name, steps of a whole run for one step here."""
    whole, totals = {}, {}
    for name, rounds in curves.items():
        ends = [[0.0, *(row[1] for row in curve)] for curve in rounds]  # seconds at the start and after each epoch
        each = [[later - sooner for sooner, later in pairwise(end)] for end in ends]
        medians = [statistics.median(epoch) * shares[name] for epoch in zip(*each, strict=True)]
        totals[name] = [end[-1] * shares[name] for end in ends]
        whole[name] = {"epochs": rounds[0][-1][0], "seconds": sum(medians), "each epoch": medians}
        print(f"{name:16} {whole[name]['epochs']:.2f} epochs; a whole run takes {sum(medians):.1f} s here")
    first, second = whole
    ratio = whole[first]["seconds"] / whole[second]["seconds"]
    rounds = record.spread([a / b for a, b in zip(totals[first], totals[second], strict=True)])
    low, high = rounds["quartiles"]
    print(f"{first} / {second}: {ratio:.3f}  (single rounds {low:.3f} .. {high:.3f}, n = {rounds['n']})")
    return {"whole run": whole, "ratio": ratio, "rounds": rounds}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--airbench", type=Path, help=f"a clone of {URL}")
    parser.add_argument("--data-dir", type=Path, help="CIFAR-10, as train.py reads it; default: .cache, or a download")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, help="of ours; default: its recipe's")
    parser.add_argument("--flags", default="", help='more flags for train.py, in one string: --flags "--lr 8e-3"')
    parser.add_argument("--steps-only", type=int, metavar="ROUNDS", help="measure seconds, not accuracies; CPU only")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    args = parser.parse_args(argv)
    if not args.airbench:
        parser.error(f"--airbench is missing: git clone {URL}, and name the folder")
    if args.steps_only and args.device == "cuda":
        parser.error("--steps-only is for a CPU: on a GPU leave it out, whole runs take seconds there")
    return args


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    device, extra, path = torch.device(args.device), shlex.split(args.flags), args.airbench / "airbench94_muon.py"
    asked = flags.parse(extra, __doc__, MODELS, data.NAMES)
    epochs = args.epochs or asked.epochs or MODELS[asked.model][1]["epochs"]
    policy = amp_policy.choose_policy(asked.precision, amp_policy.capabilities(device))
    if asked.precision == "auto":
        extra += ["--precision", policy.name]  # so that no two seeds choose differently
    half = torch.float32 if policy.dtype is torch.float32 else torch.bfloat16  # a CPU emulates fp16
    peer = import_peer(path, device, half)
    full = load(args.data_dir)
    official = ((args.data_dir or Path(".cache")) / "cifar-10-batches-py").is_dir()
    files = "the official files" if official else "the JPEG copy"
    head = record.header("time_to_accuracy" + ("_steps" if args.steps_only else ""), vars(args), device)
    print(f"{head['hardware']}, torch {head['torch']}, CIFAR-10 from {files}; ours: {policy}")
    if device.type == "cpu":
        print(f"{path.stem} is brought to the CPU, and to {half} instead of half, by substitutions in its source:")
        print("\n".join(f"    {text!r}  ->  {replacement!r}" for text, replacement in PORT.items()))

    curves, names = {}, ("ours", path.stem)
    few = math.lcm(BATCH, asked.batch_size)  # whole steps of both
    few = *((images[:n], labels[:n]) for (images, labels), n in zip(full[:2], (few, 500), strict=True)), *full[2:]
    with tempfile.TemporaryDirectory() as folder:
        model = peers_model(peer, device)

        def both(splits: tuple, seed: int) -> None:
            images = write_for_peer(splits, Path(folder))
            runs = {names[0]: partial(run_ours, splits, epochs, seed, device, extra),
                    names[1]: partial(run_peer, peer, model, images, seed)}  # fmt: skip
            for name, curve in in_turns(runs, list(names)[:: -1 if seed % 2 else 1], device).items():
                curves.setdefault(name, []).append(curve)
                done, seconds, plain, tta = curve[-1]
                print(f"seed {seed}  {name:16} {done:.2f} epochs  {seconds:.2f} s  plain {plain:.2f}  tta {tta:.2f}",
                      flush=True)  # fmt: skip

        if args.steps_only:
            extra += ["--ckpt-every", "1000000"]  # an epoch is a step or two here, and would save too often
        else:
            both(few if device.type == "cpu" else full, 0)  # the warm-up; on a GPU until its clocks have risen
            curves.clear()
        for seed in range(args.steps_only or args.seeds):
            both(few if args.steps_only else full, seed)

    head |= {"files": files, "precision": policy.name, "port": PORT if device.type == "cpu" else {},
             "peer": {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()},
             "columns": ["epochs", "seconds", *COLUMNS], "curves": curves}  # fmt: skip
    if args.steps_only:
        whole, here = ({names[0]: round(epochs * (len(split[0][1]) // asked.batch_size)),
                        names[1]: len(split[0][1]) // BATCH} for split in (full, few))  # fmt: skip
        head |= report_steps(curves, {name: whole[name] / here[name] for name in names})
    else:
        head |= report(curves)
    record.write(head, args.results, device, samples=("curves", "port"))


if __name__ == "__main__":
    main()
