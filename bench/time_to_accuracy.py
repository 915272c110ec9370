"""
Time to accuracy on CIFAR-10: the default recipe beside the records, airbench94_muon and hiverge's.

    git clone https://github.com/KellerJordan/cifar10-airbench
    git clone https://github.com/hiverge/cifar10-speedrun
    python bench/time_to_accuracy.py --airbench cifar10-airbench --hiverge cifar10-speedrun \
        --data-dir DIR
    python bench/time_to_accuracy.py --airbench cifar10-airbench --data-dir DIR --flags "--lr 8e-3"

All recipes get the same pixels on the same machine. Whole runs take turns, seed by seed. The bench
writes its raw file after every run, with the means so far: if it is cut short, it goes on with the
next run. What max-autotune compiled for a peer is in .cache/inductor.

The bench times training alone: no loading, no evaluation (hiverge's clock counts its test-time
views; the bench takes them off). It reads all clocks when the device has done its work: the peers
synchronise themselves, for ours the bench does. Our time is what train.py counts, guards and
checkpoints included; the whitening is computed before its clock starts (the peers' clocks have it:
milliseconds). Each recipe is evaluated plainly and with test-time views, a peer with its own: "tta"
is airbench's, "gated" is hiverge's, for the quarter of the images that the network is least sure
of. Ours has both, in fp32; a peer computes in its own precision. (On a CPU, views come after the
last epoch alone.) The goal is the accuracy that the peer ends at, the mean of its seeds: for each
recipe the bench prints the first evaluation at which the mean of its seeds is as good, and the
seconds until then. hiverge evaluates at its end only.

On CUDA a peer's file runs as it is. It knows no CPU: there its substitutions (PEERS) change its
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
from functools import partial
from pathlib import Path
from typing import NamedTuple
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

COLUMNS = {"plain": 2, "tta": 3, "gated": 4}  # of a row; before them epochs and seconds


class Peer(NamedTuple):
    url: str
    file: str
    batch: str  # the statement that sets the images of a step, but for their number
    batch_size: int
    views: str  # the column of its test-time views
    port: dict[str, str]  # what else a CPU needs; see PORT


# On a CPU. HALF is bf16 or fp32. Weights, momentum and Newton-Schulz steps have it too, as they
# are half on a GPU.
PORT = {
    "torch.compile": "uncompiled",
    'torch.device("cuda")': 'torch.device("cpu")',
    "self.images.half()": "self.images.to(HALF)",
    "mod.half()": "mod.to(HALF)",
    "torch.cuda.Event(enable_timing=True)": "Clock()",
    "torch.cuda.synchronize()": "None",
}
PEERS = {
    "airbench": Peer(
        "https://github.com/KellerJordan/cifar10-airbench", "airbench94_muon.py",
        "batch_size = ", 2000, "tta", {"G.bfloat16()": "G.to(HALF)"},
    ),
    "hiverge": Peer(
        "https://github.com/hiverge/cifar10-speedrun", "cifar10_speedrun.py",
        "training_batch_size = ", 1536, "gated",
        {"torch.half": "HALF", ".pin_memory()": "", 'device="cuda"': 'device="cpu"'},
    ),
}  # fmt: skip


class Clock:
    """In the place of a CUDA event."""

    def record(self):
        self.now = time.perf_counter()

    def elapsed_time(self, later):
        return 1e3 * (later.now - self.now)


def uncompiled(function=None, **options):
    """In the place of torch.compile, as a decorator with or without options."""
    return function or uncompiled


def import_peer(peer, folder, device, half, batch_size=None):
    """The peer's file as a module; its main guard keeps it from running. `half`: a dtype."""
    path = folder / peer.file
    if not path.is_file():
        raise SystemExit(f"{path} is not there; git clone {peer.url}, and name the folder")
    source = path.read_text()
    for text, replacement in (PORT | peer.port).items():
        if text not in source:
            raise SystemExit(
                f"{path} has changed: without {text!r} it is not the file that this "
                "bench knows how to time"
            )
        source = source.replace(text, replacement) if device.type == "cpu" else source
    source = source.replace(f"{peer.batch}{peer.batch_size}",
                            f"{peer.batch}{batch_size or peer.batch_size}")  # fmt: skip
    # torch.compile looks it up by name
    module = sys.modules[path.stem] = types.ModuleType(path.stem)
    module.Clock, module.HALF, module.uncompiled = Clock, half, uncompiled
    with patch.object(sys, "argv", [str(path)]):  # it reads its own source from there
        exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    return module


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
    """The same images as the peers' loaders cache them."""
    for name, (images, labels) in {"train": dataset.train, "test": dataset.val}.items():
        images = images.permute(0, 2, 3, 1).contiguous()
        content = {"images": images, "labels": labels, "classes": dataset.classes}
        torch.save(content, folder / f"{name}.pt")


def views(images):
    """As it is; moved by one pixel down and right; up and left; then the mirror images of these."""
    padded = F.pad(images, (1,) * 4, "reflect")
    moved = [images, padded[:, :, :-2, :-2], padded[:, :, 2:, 2:]]
    return [*moved, *(view.flip(-1) for view in moved)]


def mean_logits(net, images, weights):
    """The mean over the views; `weights`: of the image as it is, of each moved one."""
    as_it_is, moved = weights
    both = (as_it_is, moved, moved) * 2
    return sum(w / 2 * net(view) for w, view in zip(both, views(images), strict=True))


@torch.no_grad()
def accuracies(net, split):
    """Percent, with the views of each peer: airbench's tta_level 2, which counts the image as it is
    as much as both moved ones; hiverge's, a plain mean, for the least confident quarter alone.
    `split`: (images, labels) batches."""
    net.eval()
    plain, right = [], 0
    for images, labels in split:
        plain.append(net(images))
        logits = mean_logits(net, images, (0.5, 0.25))
        right += (logits.argmax(1) == labels).sum().item()
    plain = torch.cat(plain)
    labels = torch.cat([labels for _, labels in split])
    unsure = plain.softmax(1).amax(1).topk(len(plain) // 4, largest=False).indices
    images = torch.cat([images for images, _ in split])[unsure]
    plain[unsure] = torch.cat([mean_logits(net, x, (1 / 3, 1 / 3)) for x in images.split(500)])
    net.train()
    gated = (plain.argmax(1) == labels).sum().item()
    return {"tta": 100 * right / len(labels), "gated": 100 * gated / len(labels)}


def run_ours(dataset, flags):
    """One run of train.py: [epochs, seconds of training, *COLUMNS] for every evaluation."""
    rows, validate, end_of_step = [], train.validation.validate, train.end_of_step

    def read_clock(run, end, began):
        """The host may be a step ahead of the device: until the last kernel it is our time."""
        if run.step % run.epoch_steps == 0 or run.step >= run.total_steps:
            record.wait(run.device)
        return end_of_step(run, end, began)

    def listen(run):
        warning = validate(run)
        with_views = {"tta": math.nan, "gated": math.nan}
        if run.step >= run.total_steps or run.device.type == "cuda":
            split = batches.val_batches(
                *run.data.val, run.stream.normalize, batch_size=500, device=run.device
            )
            with train.validation.evaluated_weights(run):
                with_views = accuracies(run.net, [*split])
        plain = run.scores["val_acc1"]
        epochs = run.step / run.epoch_steps
        rows.append([epochs, run.speed.seconds, plain, with_views["tta"], with_views["gated"]])
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


def peers_model(module, device):
    """As the peer makes it under its main guard. Made once: on CUDA it compiles for minutes."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(record.ROOT / ".cache" / "inductor"))
    model = module.CifarNet().to(device, memory_format=torch.channels_last)
    if device.type == "cuda":
        model.compile(mode="max-autotune")
    return model


def run_peer(peer, module, model, folder, seed):
    """The same of a peer: its main() passes its variables to a printer, which we replace. airbench
    prints after every epoch, and both print at the end."""
    rows, loader, evaluate, spent = [], module.CifarLoader, module.evaluate, []
    device = next(model.parameters()).device

    def timed(net, images, tta_level=0):
        record.wait(device)
        began = time.perf_counter()
        accuracy = evaluate(net, images, tta_level=tta_level)
        if tta_level:
            spent.append(time.perf_counter() - began)
        return accuracy

    def add(epochs, seconds, plain, with_views=math.nan):
        row = [epochs, seconds, 100 * plain, math.nan, math.nan]
        row[COLUMNS[peer.views]] = 100 * with_views
        rows.append(row)

    def listen(variables, is_final_entry):
        plain, seconds = variables["val_acc"], variables["time_seconds"]
        if not is_final_entry:
            with_views = math.nan
            if device.type == "cuda":
                with_views = evaluate(model, variables["test_loader"], tta_level=2)
            add(variables["epoch"] + 1, seconds, plain, with_views)
        elif rows:
            rows[-1][COLUMNS[peer.views]] = 100 * variables["tta_val_acc"]
        else:  # hiverge's clock goes on while it looks at the views
            epochs = variables["step"] / len(variables["train_loader"])
            add(epochs, seconds - sum(spent), plain, variables["tta_val_acc"])

    torch.backends.cudnn.benchmark = True
    torch.manual_seed(seed)
    replaced = {"CifarLoader": lambda _, **options: loader(folder, **options), "evaluate": timed}
    with patch.multiple(module, print_training_details=listen, **replaced):
        module.main(seed, model)
    return rows


def reached(seeds, column, goal):
    """[epochs, mean seconds] of the first evaluation at which the mean of the seeds is as good."""
    for rows in zip(*seeds, strict=True):  # the same epoch of every seed
        if statistics.mean(row[column] for row in rows) >= goal:
            return [rows[0][0], statistics.mean(row[1] for row in rows)]
    return None


def report(curves):
    """Print the means; return for each peer the paired ratio of seconds, and what became of the
    goals."""
    for name, seeds in curves.items():
        ends = zip(*(curve[-1] for curve in seeds), strict=True)
        epochs, seconds, *percent = (statistics.mean(values) for values in ends)
        shown = (f"{kind} {x:.2f}" for kind, x in zip(COLUMNS, percent, strict=True) if x == x)
        print(f"{name:16} {epochs:.2f} epochs {seconds:8.2f} s ", *shown)
    return {name: beside(curves, name) for name in curves if name != "ours"}


def beside(curves, name):
    """Ours beside this peer: the paired ratio of seconds, and the goals."""
    pairs = zip(curves["ours"], curves[name], strict=True)
    ratio = record.spread([ours[-1][1] / theirs[-1][1] for ours, theirs in pairs])
    print(f"ours / {name}, seconds: {ratio['median']:.3f}, n = {ratio['n']}, paired")
    goals = {}
    for kind, column in COLUMNS.items():
        goal = statistics.mean(curve[-1][column] for curve in curves[name])
        if math.isnan(goal):  # another peer's views
            continue
        first = {who: reached(curves[who], column, goal) for who in ("ours", name)}
        seconds = first["ours"] and first["ours"][1] / first[name][1]
        goals[kind] = {"goal": goal, "first": first, "ratio": seconds}
        print(
            f"to {goal:.2f} % {kind}: ours "
            + (f"in {seconds:.3f} of {name}'s time" if seconds else "MISSES it")
        )
    return {"ratio": ratio, "goals": goals}


def main(argv=None):
    parser = record.arguments(__doc__)
    for name, peer in PEERS.items():
        parser.add_argument(f"--{name}", type=Path, help=f"a clone of {peer.url}")
    parser.add_argument("--data-dir", type=Path, help="CIFAR-10, as train.py reads it")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, help="of ours; default: its recipe's")
    parser.add_argument("--flags", default="", help="more flags for train.py, in one string")
    args = parser.parse_args(argv)
    folders = {name: folder for name in PEERS if (folder := getattr(args, name))}
    if not folders:
        parser.error("name at least one peer: --airbench CLONE, --hiverge CLONE")
    device = torch.device(args.device)
    policy = amp_policy.choose_policy("auto", amp_policy.capabilities(device))
    # a CPU emulates fp16
    half = torch.float32 if policy.dtype is torch.float32 else torch.bfloat16
    batch_size = 100 if args.smoke else None
    modules = {name: import_peer(PEERS[name], folder, device, half, batch_size)
               for name, folder in folders.items()}  # fmt: skip
    full = load(args.data_dir, args.smoke)
    few = cut(full, batch_size or 2000)
    if args.smoke:
        full, args.seeds, args.flags = few, 1, f"--batch-size={batch_size} {args.flags}"
    flags = [f"--device={device.type}", f"--precision={policy.name}", *shlex.split(args.flags)]
    flags.append(f"--epochs={args.epochs or MODELS['cifarnet'][1]['epochs']}")
    peers = {
        name: {"file": PEERS[name].file, "sha256": sha256(folder / PEERS[name].file)}
        for name, folder in folders.items()
    }
    head = record.begin("time_to_accuracy", args, precision=policy.name, peers=peers)
    curves = head.setdefault("curves", {"ours": [], **{name: [] for name in peers}})
    left = [(seed, name) for seed in range(args.seeds) for name in list(curves)[:: (-1) ** seed]
            if len(curves[name]) <= seed]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        runs = {"ours": lambda dataset, seed: run_ours(dataset, [*flags, f"--seed={seed}"])}
        for name, module in modules.items():
            peer = partial(run_peer, PEERS[name], module, peers_model(module, device), Path(folder))
            runs[name] = lambda dataset, seed, peer=peer: peer(seed)

        def run(name, dataset, seed):
            write_for_peer(dataset, Path(folder))
            record.wait(device)
            return runs[name](dataset, seed)

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
                head |= {"columns": ["epochs", "seconds", *COLUMNS], "beside": report(curves)}
            record.keep(head, args)
    record.write(head, args, samples=("curves",))


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
