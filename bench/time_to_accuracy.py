"""
Time to accuracy on CIFAR-10: the default run of train.py beside cifar10-airbench's 94 % recipe.

    git clone https://github.com/KellerJordan/cifar10-airbench
    python bench/time_to_accuracy.py --airbench cifar10-airbench --data-dir DIR      # on the GPU if there is one
    python bench/time_to_accuracy.py --airbench cifar10-airbench --data-dir DIR --epochs 8 --flags "--lr 8e-3"
    python bench/time_to_accuracy.py --airbench cifar10-airbench --data-dir DIR --smoke      # a minute: does it run?

Both get the same pixels on the same machine and take turns, epoch by epoch, so that a slow minute of a shared machine
strikes both; a warm-up of each is not counted.
Timed is training alone, as the peer does it: no loading, no evaluation. Ours is what train.py counts, guards and
checkpoints included; the whitening is computed before its clock starts (airbench's clock has it: milliseconds).
After every epoch both are evaluated plainly and with airbench's test-time augmentation ("tta"; on a CPU, where it takes
half a minute, after the last one), ours in fp32, the peer in its own precision. --recipe takes any file of airbench's
that is built alike: legacy/airbench95.py, 96.

On CUDA the peer's file runs as it is. It knows no CPU: there the substitutions of PORT are made in its source.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import itertools
import json
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
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import checkpoint  # noqa: E402
import data  # noqa: E402
import flags  # noqa: E402
import train  # noqa: E402
from bench import record  # noqa: E402
from models import MODELS  # noqa: E402

URL = "https://github.com/KellerJordan/cifar10-airbench"
GOALS = {  # mean accuracy in percent; on the JPEG copy these are what the peer's recipe reaches with 9.9 epochs
    "the JPEG copy": {"plain": 89.9, "tta": 90.6},
    "the official files": {"tta": 94.0},
}
# On a CPU: bfloat16, because half is emulated there. Weights and momentum are bfloat16 too, as they are half on a GPU;
# in one epoch that cost nothing (68.4 % plain, with fp32 weights under autocast 68.6 %, both in 63 s).
PORT = {
    "torch.device(gpu)": "torch.device('cpu')",
    "self.images.half()": "self.images.bfloat16()",
    "net.half().cuda()": "net.bfloat16()",
    "(torch.half, torch.float)": "(torch.bfloat16, torch.float)",
    "torch.cuda.Event(enable_timing=True)": "Clock()",
    "torch.cuda.synchronize()": "None",
}


class Clock:
    """In the place of a CUDA event."""

    def record(self) -> None:
        self.now = time.perf_counter()

    def elapsed_time(self, later: Clock) -> float:
        return 1e3 * (later.now - self.now)


def import_peer(path: Path, device: torch.device) -> types.ModuleType:
    """The peer's file as a module; its main guard keeps it from running. Raises SystemExit with a sentence."""
    if not path.is_file():
        raise SystemExit(f"--airbench: {path} is not there; git clone {URL}, and name the folder")
    source = path.read_text()
    for text, replacement in PORT.items() if device.type == "cpu" else ():
        if text not in source:
            raise SystemExit(f"{path} has changed: it does not contain {text!r}, so PORT cannot bring it to a CPU")
        source = source.replace(text, replacement)
    peer = types.ModuleType("airbench")
    peer.Clock = Clock
    exec(compile(source, str(path), "exec", dont_inherit=True), peer.__dict__)
    missing = {"hyp", "main", "evaluate", "CifarLoader", "print_training_details"} - set(vars(peer))
    if missing:
        raise SystemExit(f"{path} is not of the form of legacy/airbench94.py: it has no {', '.join(sorted(missing))}")
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
    plain, evaluation = train.validation.evaluate, itertools.count(1)

    def evaluate(model: nn.Module, split) -> dict[str, float]:
        split, done = list(split), next(evaluation)
        due = device.type == "cuda" or done >= epochs
        scores = plain(model, split) | {"val_tta_acc1": tta_accuracy(model.net, split) if due else math.nan}
        if done < epochs:
            change()
        return scores

    torch.backends.cudnn.benchmark = False  # torch's default; airbench sets it when it is imported
    with (tempfile.TemporaryDirectory() as folder, patch.object(train.prepare, "load", lambda *_: splits),
          patch.object(train.validation, "evaluate", evaluate), contextlib.redirect_stdout(io.StringIO())):
        arguments = ["--out-dir", folder, "--device", device.type, "--seed", str(seed), *extra, "--epochs", str(epochs)]
        if code := train.main(arguments):
            raise SystemExit(f"train.py {shlex.join(arguments)} ended with code {code}")
        header, *lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    end = lines[-1]
    seconds = header["batch_size"] / end["images_per_second"]  # a step; of training time alone, see `busy` in train.py
    return [[line["epoch"], seconds * line["step"], line["val_acc1"], float(line["val_tta_acc1"])]
            for line in lines if "val_tta_acc1" in line and "event" not in line]  # fmt: skip


def run_peer(peer: types.ModuleType, folder: Path, epochs: float, seed: int,
             change: Callable[[], None]) -> list[list[float]]:  # fmt: skip
    """The same of the peer: after every epoch its main() hands its variables to whoever prints them; here we listen."""
    rows, loader = [], peer.CifarLoader

    def listen(variables: dict, is_final_entry: bool) -> None:
        if not is_final_entry:
            done = min(variables["epoch"] + 1, epochs)
            due = torch.cuda.is_available() or done >= epochs
            tta = peer.evaluate(variables["model"], variables["test_loader"], tta_level=2) if due else math.nan
            rows.append([done, variables["total_time_seconds"], 100 * variables["val_acc"], 100 * tta])
            if done < epochs:
                change()

    torch.backends.cudnn.benchmark = True
    torch.manual_seed(seed)
    peer.hyp["opt"]["train_epochs"] = epochs
    peer.hyp["net"]["tta_level"] = 0  # of the evaluation after the last epoch, which `listen` has done already
    with patch.multiple(peer, print_training_details=listen, CifarLoader=lambda _, **how: loader(folder, **how)):
        peer.main(seed)
    return rows


def mean_sd(values: Iterable[float]) -> str:
    values = list(values)
    return f"{statistics.mean(values):.2f} +- {statistics.stdev(values) if len(values) > 1 else math.nan:.2f}"


def report(curves: dict[str, list], files: str) -> dict[str, dict]:
    """Print the table; return the paired ratio of seconds, and what became of the goals. curves: name -> one a seed."""
    print(f"\n{'mean +- sd':14}{'epochs':>7}{'seconds':>20}{'plain %':>16}{'tta %':>16}{'s an epoch':>18}")
    for name, of in curves.items():
        epochs, seconds, plain, tta = zip(*(curve[-1] for curve in of), strict=True)
        each = mean_sd(s / e for s, e in zip(seconds, epochs, strict=True))
        print(f"{name:14}{epochs[0]:7.2f}{mean_sd(seconds):>20}{mean_sd(plain):>16}{mean_sd(tta):>16}{each:>18}")
    ratio = record.spread([a[-1][1] / b[-1][1] for a, b in zip(*curves.values(), strict=True)])
    low, high = ratio["quartiles"]
    print(f"{' / '.join(curves)}, seconds: {ratio['median']:.3f}  ({low:.3f} .. {high:.3f}), n = {ratio['n']}, paired")
    goals = {}
    for (kind, goal), (name, of) in itertools.product(GOALS[files].items(), curves.items()):
        column = {"plain": 2, "tta": 3}[kind]
        got = statistics.mean(curve[-1][column] for curve in of)
        first = [next((row[:2] for row in curve if row[column] >= goal), None) for curve in of]  # epochs and seconds
        reached = [times for times in first if times]
        goals[f"{name}, {goal} % {kind}"] = {"mean": got, "met": got >= goal, "first": first}
        when = "; at the latest after {:.1f} epochs and {:.2f} s".format(*max(reached)) if reached else ""
        print(f"goal {goal} % {kind} on {files}: {name:12} {got:.2f}, {'met' if got >= goal else 'MISSED'}; "
              f"{len(reached)} of {len(of)} seeds reach it{when}")
    return {"ratio": ratio, "goals": goals}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--airbench", type=Path, help=f"a clone of {URL}")
    parser.add_argument("--recipe", default="legacy/airbench94.py", help="the file in it")
    parser.add_argument("--data-dir", type=Path, help="CIFAR-10, as train.py reads it; default: .cache, or a download")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, help="for both; default: each its own recipe")
    parser.add_argument("--flags", default="", help='more flags for train.py, in one string: --flags "--lr 8e-3"')
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--smoke", action="store_true", help="one epoch of 2,048 images, one seed, no file")
    args = parser.parse_args(argv)
    if not args.airbench:
        parser.error(f"--airbench is missing: git clone {URL}, and name the folder")
    device, extra, path = torch.device(args.device), shlex.split(args.flags), args.airbench / args.recipe
    peer, asked = import_peer(path, device), flags.parse(extra, __doc__, MODELS, data.NAMES)
    epochs = {"ours": args.epochs or asked.epochs or MODELS[asked.model][1]["epochs"],
              path.stem: args.epochs or peer.hyp["opt"]["train_epochs"]}  # fmt: skip
    full = load(args.data_dir)
    few = *((images[:2048], labels[:2048]) for images, labels in full[:2]), *full[2:]
    if args.smoke:
        args.seeds, full, epochs = 1, few, dict.fromkeys(epochs, 1)
    official = ((args.data_dir or Path(".cache")) / "cifar-10-batches-py").is_dir()
    files = "the official files" if official else "the JPEG copy"
    head = record.header("time_to_accuracy", vars(args), device)
    print(f"{head['hardware']}, torch {head['torch']}, CIFAR-10 from {files}, {args.seeds} seed(s)")
    if device.type == "cpu":
        print(f"{path.stem} is brought to the CPU, and to bfloat16 instead of half, by substitutions in its source:")
        print("\n".join(f"    {text}  ->  {replacement}" for text, replacement in PORT.items()))

    curves = {name: {} for name in epochs}
    with tempfile.TemporaryDirectory() as folder:

        def both(splits: tuple, epochs: dict[str, float], seed: int) -> dict[str, list]:
            images = write_for_peer(splits, Path(folder))
            runs = {"ours": partial(run_ours, splits, epochs["ours"], seed, device, extra),
                    path.stem: partial(run_peer, peer, images, epochs[path.stem], seed)}  # fmt: skip
            return in_turns(runs, list(runs)[:: -1 if seed % 2 else 1], device)

        both(few if device.type == "cpu" else full, dict.fromkeys(epochs, 1), 0)  # on a GPU until its clocks have risen
        for seed in range(args.seeds):
            for name, curve in both(full, epochs, seed).items():
                curves[name][seed] = curve
                done, seconds, plain, tta = curve[-1]
                print(f"seed {seed}  {name:12} {done:.2f} epochs  {seconds:.2f} s  plain {plain:.2f}  tta {tta:.2f}",
                      flush=True)  # fmt: skip

    curves = {name: list(of.values()) for name, of in curves.items()}
    head |= {"files": files, "peer": {"file": args.recipe, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()},
             "port": PORT if device.type == "cpu" else {}, **report(curves, files),
             "columns": ["epochs", "seconds", "plain", "tta"], "curves": curves}  # fmt: skip
    if not args.smoke:
        record.write(head, args.results, device, samples=("curves", "port"))


if __name__ == "__main__":
    main()
