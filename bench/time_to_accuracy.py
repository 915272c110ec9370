"""
Time to accuracy on CIFAR-10: the default recipe beside cifar10-airbench's record, airbench94_muon.

    git clone https://github.com/KellerJordan/cifar10-airbench
    python bench/time_to_accuracy.py --airbench cifar10-airbench --data-dir DIR
    python bench/time_to_accuracy.py --airbench cifar10-airbench --data-dir DIR --flags "--lr 8e-3"

Both recipes get the same pixels on the same machine. Whole runs take turns, seed by seed. (An
earlier version, which took turns after every epoch, made the raw files.) The bench writes its raw
file after every run, with the means so far: if it is cut short, it goes on with the next run. What
max-autotune compiled for the peer is in .cache/inductor.

The bench times training alone, as the peer does: no loading, no evaluation. It reads both clocks
when the device has done its work: the peer synchronises itself, for ours the bench does. Our time
is what train.py counts, guards and checkpoints included; the whitening is computed before its clock
starts (the peer's clock has it: milliseconds). After every epoch both are evaluated plainly and
with airbench's test-time augmentation ("tta"; on a CPU, where it takes half a minute, after the
last one), ours in fp32, the peer in its own precision. The goal is the accuracy that the peer ends
at, the mean of its seeds: for each recipe the bench prints the first epoch after which the mean of
its seeds is as good, and the seconds until then.

On CUDA the peer's file runs as it is. It knows no CPU: there PORT's substitutions change its
source, and it computes in bf16 where our policy does, else in fp32. --smoke takes 100 drawn images
and one seed.
"""

import hashlib
import math
import os
import shlex
import statistics
import sys
import tempfile
import time
import types
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
import amp_policy
import data
import train
from bench import record
from data import batches
from models import MODELS

URL = "https://github.com/KellerJordan/cifar10-airbench"
BATCH = 2000  # images in a step of the peer
COLUMNS = {"plain": 2, "tta": 3}  # of a row: epochs, seconds, plain, tta
# On a CPU. HALF is bf16 or fp32. Weights, momentum and Newton-Schulz steps have it too, as they
# are half on a GPU.
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

    def record(self):
        self.now = time.perf_counter()

    def elapsed_time(self, later):
        return 1e3 * (later.now - self.now)


def import_peer(path, device, half, batch_size=BATCH):
    """The peer's file as a module; its main guard keeps it from running. `half`: a dtype."""
    if not path.is_file():
        raise SystemExit(f"--airbench: {path} is not there; git clone {URL}, and name the folder")
    source = path.read_text()
    for text, replacement in PORT.items():
        if text not in source:
            raise SystemExit(f"{path} has changed: without {text!r} it is not the file that this "
                             "bench knows how to time")
        source = source.replace(text, replacement) if device.type == "cpu" else source
    source = source.replace(f"batch_size = {BATCH}", f"batch_size = {batch_size}")
    # torch.compile looks it up by name
    peer = sys.modules["airbench94_muon"] = types.ModuleType("airbench94_muon")
    peer.Clock, peer.HALF = Clock, half
    with patch.object(sys, "argv", [str(path)]):  # it reads its own source from there
        exec(compile(source, str(path), "exec", dont_inherit=True), peer.__dict__)
    return peer


def load(folder, smoke=False):
    """CIFAR-10, each split in a random order that is always the same.

    An image folder is sorted by class, and airbench whitens with the first 5,000 images.
    """
    dataset = data.load("synthetic" if smoke else "cifar10", folder, iter)
    for name in ("train", "val"):
        images, labels = getattr(dataset, name)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        setattr(dataset, name, (images[order], labels[order]))
    return dataset


def cut(dataset, count):
    """The first images of each split."""
    few = {name: tuple(t[:count] for t in getattr(dataset, name)) for name in ("train", "val")}
    return data.Dataset(dataset.name, classes=dataset.classes, **few)


def write_for_peer(dataset, folder):
    """The same images as airbench's loader caches them."""
    for name, (images, labels) in {"train": dataset.train, "test": dataset.val}.items():
        images = images.permute(0, 2, 3, 1).contiguous()
        content = {"images": images, "labels": labels, "classes": dataset.classes}
        torch.save(content, folder / f"{name}.pt")


@torch.no_grad()
def tta_accuracy(net, split):
    """Percent, with airbench's tta_level 2: logits averaged over mirror images (1/2 each), and over
    the image as it is (1/2), moved by one pixel down and right (1/4), up and left (1/4)."""
    net.eval()
    right = count = 0
    for images, labels in split:
        padded = F.pad(images, (1,) * 4, "reflect")
        views = (0.5, images), (0.25, padded[:, :, :-2, :-2]), (0.25, padded[:, :, 2:, 2:])
        logits = sum(weight / 2 * (net(view) + net(view.flip(-1))) for weight, view in views)
        right += (logits.argmax(1) == labels).sum().item()
        count += len(labels)
    net.train()
    return 100 * right / count


def run_ours(dataset, flags):
    """One run of train.py: [epochs, seconds of training, plain, tta] for every evaluation."""
    rows, validate, end_of_step = [], train.validation.validate, train.end_of_step

    def read_clock(run, end, began):
        """The host may be a step ahead of the device: until the last kernel it is our time."""
        if run.step % run.epoch_steps == 0 or run.step >= run.total_steps:
            record.wait(run.device)
        return end_of_step(run, end, began)

    def listen(run):
        warning = validate(run)
        last, tta = run.step >= run.total_steps, math.nan
        if last or run.device.type == "cuda":
            split = batches.val_batches(*run.data.val, run.stream.normalize, batch_size=500,
                                        device=run.device)
            with train.validation.evaluated_weights(run):
                tta = tta_accuracy(run.net, split)
        plain = run.scores["val_acc1"]
        rows.append([run.step / run.epoch_steps, run.speed.seconds, plain, tta])
        return warning

    torch.backends.cudnn.benchmark = False  # torch's default; airbench sets it when imported
    with (
        patch.object(train.prepare, "load", lambda *args, **options: dataset),
        patch.object(train.validation, "validate", listen),
        patch.object(train, "end_of_step", read_clock),
    ):
        code, end, _ = record.train_run({}, *flags)
    if code:
        raise SystemExit(f"train.py {shlex.join(flags)}: {end}")
    return rows


def peers_model(peer, device):
    """As the peer makes it under its main guard. Made once: on CUDA it compiles for minutes."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(record.ROOT / ".cache" / "inductor"))
    model = peer.CifarNet().to(device, memory_format=torch.channels_last)
    if device.type == "cuda":
        model.compile(mode="max-autotune")
    return model


def run_peer(peer, model, folder, seed):
    """The same of the peer: after every epoch its main() passes its variables to a printer, which
    we replace."""
    rows, loader = [], peer.CifarLoader

    def listen(variables, is_final_entry):
        if is_final_entry:
            return
        tta = math.nan
        if next(model.parameters()).is_cuda:
            tta = peer.evaluate(model, variables["test_loader"], tta_level=2)
        plain = 100 * variables["val_acc"]
        rows.append([variables["epoch"] + 1, variables["time_seconds"], plain, 100 * tta])

    torch.backends.cudnn.benchmark = True
    torch.manual_seed(seed)
    replaced = {"CifarLoader": lambda _, **options: loader(folder, **options)}
    with patch.multiple(peer, print_training_details=listen, **replaced):
        rows[-1][3] = 100 * peer.main(seed, model)
    return rows


def reached(seeds, column, goal):
    """[epochs, mean seconds] of the first evaluation at which the mean of the seeds is as good."""
    for rows in zip(*seeds, strict=True):  # the same epoch of every seed
        if statistics.mean(row[column] for row in rows) >= goal:
            return [rows[0][0], statistics.mean(row[1] for row in rows)]
    return None


def report(curves):
    """Print the means; return the paired ratio of seconds, and what became of the goals."""
    for name, seeds in curves.items():
        ends = zip(*(curve[-1] for curve in seeds), strict=True)
        epochs, seconds, plain, tta = (statistics.mean(values) for values in ends)
        print(f"{name:16} {epochs:.2f} epochs {seconds:8.2f} s  plain {plain:.2f}  tta {tta:.2f}")
    (ours, of_ours), (theirs, of_theirs) = curves.items()
    pairs = zip(of_ours, of_theirs, strict=True)
    ratio = record.spread([a[-1][1] / b[-1][1] for a, b in pairs])
    print(f"{ours} / {theirs}, seconds: {ratio['median']:.3f}, n = {ratio['n']}, paired")
    goals = {}
    for kind, column in COLUMNS.items():
        goal = statistics.mean(curve[-1][column] for curve in of_theirs)
        first = {name: reached(seeds, column, goal) for name, seeds in curves.items()}
        seconds = first[ours] and first[ours][1] / first[theirs][1]
        goals[kind] = {"goal": goal, "first": first, "ratio": seconds}
        print(f"to {goal:.2f} % {kind}: {ours} "
              + (f"in {seconds:.3f} of its time" if seconds else "MISSES it"))
    return {"ratio": ratio, "goals": goals}


def main(argv=None):
    parser = record.arguments(__doc__)
    parser.add_argument("--airbench", type=Path, required=True, help=f"a clone of {URL}")
    parser.add_argument("--data-dir", type=Path, help="CIFAR-10, as train.py reads it")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, help="of ours; default: its recipe's")
    parser.add_argument("--flags", default="", help="more flags for train.py, in one string")
    args = parser.parse_args(argv)
    device, path = torch.device(args.device), args.airbench / "airbench94_muon.py"
    policy = amp_policy.choose_policy("auto", amp_policy.capabilities(device))
    # a CPU emulates fp16
    half = torch.float32 if policy.dtype is torch.float32 else torch.bfloat16
    batch_size = 100 if args.smoke else BATCH
    peer = import_peer(path, device, half, batch_size)
    full = load(args.data_dir, args.smoke)
    few = cut(full, batch_size)
    if args.smoke:
        full, args.seeds, args.flags = few, 1, f"--batch-size={batch_size} {args.flags}"
    flags = [f"--device={device.type}", f"--precision={policy.name}", *shlex.split(args.flags)]
    flags.append(f"--epochs={args.epochs or MODELS['cifarnet'][1]['epochs']}")
    of_peer = {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    head = record.begin("time_to_accuracy", args, precision=policy.name, peer=of_peer)
    curves = head.setdefault("curves", {"ours": [], path.stem: []})
    left = [(seed, name) for seed in range(args.seeds) for name in list(curves)[:: (-1) ** seed]
            if len(curves[name]) <= seed]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        model = peers_model(peer, device)

        def run(name, dataset, seed):
            write_for_peer(dataset, Path(folder))
            record.wait(device)
            if name == "ours":
                return run_ours(dataset, [*flags, f"--seed={seed}"])
            return run_peer(peer, model, Path(folder), seed)

        for name in curves if left and not args.smoke else ():
            # the warm-up; on a GPU until its clocks have risen
            began = time.perf_counter()
            run(name, few if device.type == "cpu" else full, 0)
            head.setdefault("warm_up_seconds", {})[name] = round(time.perf_counter() - began, 1)
            record.keep(head, args)
        for seed, name in left:
            curves[name].append(run(name, full, seed))
            print(f"seed {seed}  {name:16} {curves[name][-1][-1]}", flush=True)
            if len({len(curve) for curve in curves.values()}) == 1:
                head |= {"columns": ["epochs", "seconds", *COLUMNS]} | report(curves)
            record.keep(head, args)
    record.write(head, args, samples=("curves",))


if __name__ == "__main__":
    main()
