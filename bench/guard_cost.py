"""
What the guard costs: time of a training step as a ratio to the bare loop, beside the peers' ways.

    python bench/guard_cost.py               the GPU if there is one (3 minutes), else the CPU (6)
    python bench/guard_cost.py --smoke       does it run?

The bare loop is the fastest honest one: autocast, backward, torch.optim.AdamW(fused=True). No
clipping, no checks. "ours" is train.train_step itself, "guards.py in the bare loop" the usual loop
with guard.step. The stock AMP recipe is the tutorial's: autocast, GradScaler, unscale_,
clip_grad_norm_, AdamW.

Each contestant has its own copy of the same network and takes the same batches. They take turns in
one process: a round times a block of steps of each in a new random order, and a ratio is the
median of ratios within rounds. Costly peers are timed in every fourth round. On a GPU a block
begins and ends with a synchronisation; any other wait for the device (the peers' `.item()`) is the
contestant's own.

On a CPU one step differs from the next by more than the guard costs, and freeing the gradients
alone by as much. "own" is what a step spends in the calls that contestants differ in (guard, clip,
optimizer, scaler): the difference to the bare loop's, as a share of its step. Where a process's
memory comes to lie matters too, so it is the median of several processes.

A small network on a GPU waits for Python to launch its kernels, and every launch of ours shows.
The pair "CUDA graph" takes Python out; ours is compared with its own bare partner there. Then come
two ranks, and growth in parameters and in tensors with a tiny batch, where the optimizer dominates:
the worst case.
"""

import collections
import contextlib
import copy
import itertools
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from amp_policy import LossScaler, capabilities, choose_policy
from bench import record
from extras.graphs import StepGraph
from guards import Guard
from models import MODELS, wrap
from optim import ClippedAdamW, param_groups
from ranks import agreed, parallel
from train import train_step
from trainer.record import Run, loss_names

GOALS = {  # ours / its partner, at most
    ("ours", "cpu"): 1.02,
    ("ours", "cuda"): 1.10,
    ("ours, CUDA graph", "cuda"): 1.02,
}
TYPES = {"bf16": "bfloat16", "fp32": "float32"}
NAMES = [str(i) for i in range(10)]
STOCK, OWN = "stock AMP recipe (clip)", "guards.py in the bare loop"
TRIO = ("bare", "ours", STOCK)
SLOW = ("isnan().any() a parameter", "detect_anomaly", "underflow/overflow hooks")
PARTNER = {"ours, CUDA graph": "bare, CUDA graph"}  # of all others: "bare"
WORKLOADS = {  # model, batch, pixels
    "cpu": [("cifarnet", 64, 32), ("cifarnet", 256, 32), ("vit", 64, 32), ("vit", 256, 32),
            ("resnet50", 16, 64)],
    "cuda": [("cifarnet", 64, 32), ("cifarnet", 1024, 32), ("vit", 64, 32), ("vit", 1024, 32),
             ("resnet50", 32, 224), ("resnet50", 128, 224)],
}  # fmt: skip
# million parameters, layers
GROWTH = [(1, 3), (10, 3), (50, 3), (100, 3), (200, 3), (10, 25), (10, 250), (10, 2500)]


class Chain(nn.Module):
    """(B, width) -> (B, classes): `depth` times x + Linear(LayerNorm(x)), 4 tensors a layer."""

    def __init__(self, width, depth):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(depth)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x[:, : len(NAMES)]


def network(name, size):
    """For another process: what MODELS holds cannot be sent there."""
    return MODELS[name][0](NAMES, size)


def workloads(kind, smoke):
    """Title -> function that builds the network, shape of a batch."""
    works = {}
    for name, batch, size in WORKLOADS[kind]:
        title = f"{name}, batch {batch}" + (f", {size} px" if size != 32 else "")
        shape = (4 if smoke else batch, 3, size, size)
        works[title] = partial(network, name, size), shape
    works["1,600 tensors, batch 64"] = partial(Chain, 64, 4 if smoke else 400), (64, 64)
    return works


def growth(kind, smoke):
    """The same for chains that grow."""
    works = {}
    for millions, depth in GROWTH:
        if millions > 100 and kind == "cpu" and not smoke:
            print(f"\n{millions} million parameters: left out, they would take 12 GB on a CPU")
            continue
        depth = min(depth, 25) if smoke else depth
        width = max(16, math.isqrt(int(millions * (1e4 if smoke else 1e6) / depth)))
        title = f"{millions} million parameters in {4 * depth:,} tensors"
        works[title] = partial(Chain, width, depth), (8, width)
    return works


def watch_under_and_overflow(net):
    """As transformers' DebugUnderflowOverflow does: a forward hook on every module copies the
    smallest and largest magnitude of weights, inputs and outputs to the host."""
    frames = collections.deque(maxlen=21)

    def hook(module, args, out):
        tensors = [x for x in (*args, out) if isinstance(x, Tensor)]
        sizes = [x.detach().abs() for x in (*module.parameters(recurse=False), *tensors)]
        frames.append([f"{size.min():8.2e} {size.max():8.2e}" for size in sizes])
        if any(x.isnan().any().item() or x.isinf().any().item() for x in tensors):
            raise FloatingPointError(type(module).__name__)

    for module in net.modules():
        module.register_forward_hook(hook)


def all_finite(params):
    return not any(p.grad.isnan().any() for p in params)


class Work:
    """A network that each contestant copies, and the batches that they all take.

    `build` makes the network, `shape` is that of a batch.
    """

    def __init__(self, build, shape, device, precision="bf16"):
        torch.manual_seed(0)
        self.device, self.precision = device, precision
        self.net = build().to(device, memory_format=torch.channels_last)
        layout = torch.channels_last if len(shape) == 4 else torch.contiguous_format
        self.batches = []
        for _ in range(4):
            images = torch.randn(shape, device=device).to(memory_format=layout)
            labels = torch.randint(0, len(NAMES), shape[:1], device=device)
            self.batches.append((images, labels))

    def copied(self):
        """A copy with its loss, and the same in DistributedDataParallel where there are ranks."""
        model = wrap(copy.deepcopy(self.net))
        return model, parallel(model, self.device)

    def autocast(self):
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")

    def fed(self, take, graph=False):
        """A step without arguments: take(images, labels) with the next batch."""
        take = StepGraph(take, warm_up=2) if graph else take
        turns = itertools.cycle(self.batches)
        return lambda: take(*next(turns))


def stock(work, check=None, clip=False, anomaly=False, hooks=False, graph=False):
    """The usual loop; `check`: called with the parameters after backward, False = skip."""
    model, forward = work.copied()
    own = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=1e-4, fused=True, capturable=graph)
    scaler = torch.amp.GradScaler(work.device.type, enabled=False)  # as the recipe is in bf16
    watched = torch.autograd.detect_anomaly if anomaly else contextlib.nullcontext
    if hooks:
        watch_under_and_overflow(model.net)

    def take(images, labels):
        with watched():
            with work.autocast():
                loss, _ = forward(images, labels)
            scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(own, 1.0)
        if check is None or check(own):
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return work.fed(take, graph)


def guarded(work):
    """The usual loop with the lines of guards.py, as README shows them."""
    model, _ = work.copied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    guard = Guard(model, num_classes=len(NAMES))

    def take(images, labels):
        guard.open()
        labels = guard.see_batch(images, labels)
        with work.autocast():
            loss, _ = model(images, labels)
        guard.see_loss(loss)
        loss.backward()
        guard.step(optimizer)
        optimizer.zero_grad()
        guard.verdict()

    return work.fed(take)


def ours(work, graph=False):
    """train.py's step."""
    model, forward = work.copied()
    net = getattr(model, "net", model)  # some networks compute their own loss
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    run = Run(
        net=net, model=model, ddp=forward, compiled=forward, device=work.device, accum=1,
        world_size=ranks,
        policy=choose_policy(work.precision, capabilities(work.device), trial=None, stopwatch=None),
        scaler=LossScaler(work.device.type, enabled=False),
        guard=Guard(net, num_classes=len(NAMES), ignore_index=None, carries=loss_names(ranks)),
        optimizers=[ClippedAdamW(param_groups(net, 0.01), lr=1e-4, clip=None)], clip=1.0,
    )  # fmt: skip
    take = work.fed(partial(train_step, run), graph)

    def step():
        run.guard.open()
        take()
        verdict = run.guard.verdict()
        if verdict and not verdict.accepted:
            raise FloatingPointError(f"a rejected step takes another time: {verdict}")

    return step


CONTESTANTS = {  # name: function of a Work that returns one training step
    "bare": stock,
    "ours": ours,
    OWN: guarded,
    STOCK: partial(stock, clip=True),
    "isnan().any() a parameter": partial(stock, check=all_finite),
    "detect_anomaly": partial(stock, anomaly=True),
    "underflow/overflow hooks": partial(stock, hooks=True),
    "bare, CUDA graph": partial(stock, graph=True),
    "ours, CUDA graph": partial(ours, graph=True),
}


def contestants(*work):
    """Name -> function that copies the network and returns one training step. work: see Work."""
    work = Work(*work)
    return {name: partial(make, work) for name, make in CONTESTANTS.items()}


def warm(make):
    step = make()
    for _ in range(4):  # a graph is recorded at the third
        step()
    return step


OWN_CALLS = [
    (Guard, "open"), (Guard, "see_batch"), (Guard, "see_loss"), (Guard, "step"), (Guard, "verdict"),
    (torch.optim.AdamW, "step"), (nn.utils, "clip_grad_norm_"),
    (torch.amp.GradScaler, "unscale_"), (torch.amp.GradScaler, "step"),
    (torch.amp.GradScaler, "update"), (LossScaler, "update"),
]  # fmt: skip


def measure(steps, device, seconds, least):
    """Rounds of {name: milliseconds a step}, for `seconds` and at least `least` rounds."""
    block = 1
    if device.type == "cuda":  # its queue is full, but with no more than 0.2 seconds of steps
        one = record.timed(steps["bare"], device, 5)
        block = agreed(min(20, max(1, round(200 / one))))
    start = time.perf_counter()

    def go_on(rounds):  # the same on every rank
        return agreed(rounds < least or time.perf_counter() - start < seconds)

    return record.in_turns(steps, device, go_on, block, rare=SLOW)


def own_time(rounds, *work):
    """What each contestant takes in milliseconds for what it does of its own (OWN_CALLS), and the
    median share of a bare step that this is above the bare loop's."""
    makers = contestants(*work)
    steps = {name: warm(makers[name]) for name in (*TRIO, OWN)}
    spent, depth = [], [0]

    def clocked(original):
        def timed(*args, **kwargs):
            depth[0] += 1
            began = time.perf_counter()
            out = original(*args, **kwargs)
            depth[0] -= 1
            if not depth[0]:  # a guard's step calls the optimizer's
                spent.append(time.perf_counter() - began)
            return out

        return timed

    def measured(step):
        spent.clear()
        began = time.perf_counter()
        step()
        return time.perf_counter() - began, sum(spent)

    with contextlib.ExitStack() as patches:
        for owner, name in OWN_CALLS:
            patches.enter_context(patch.object(owner, name, clocked(getattr(owner, name))))
        turns = [random.sample(list(steps), len(steps)) for _ in range(rounds)]
        rows = [{name: measured(steps[name]) for name in turn} for turn in turns]
    bare = statistics.median(row["bare"][0] for row in rows)
    return {
        name: {
            "milliseconds": round(1e3 * statistics.median(row[name][1] for row in rows), 3),
            "share": statistics.median(row[name][1] - row["bare"][1] for row in rows) / bare,
        }
        for name in steps
    }


def in_own_process(_, folder, *args):
    """own_time(); the result is left in `folder`."""
    found = own_time(*args)
    Path(folder, "own.json").write_text(json.dumps(found))


def own_of_several(*work, smoke):
    """own_time() of several processes: {contestant: what each measured, and the median share}."""
    found = []
    for _ in range(1 if smoke else 5):
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(in_own_process, (folder, 2 if smoke else 20, *work))
            found.append(json.loads(Path(folder, "own.json").read_text()))
    rows = {}
    for name in found[0]:
        shares = [one[name]["share"] for one in found]
        above = sorted(one[name]["share"] - one[STOCK]["share"] for one in found)
        rows[name] = {
            "share": statistics.median(shares),
            "above_stock": above,
            "median_above_stock": statistics.median(above),
            "processes": [one[name] for one in found],
        }
    return rows


def table(title, rounds, head, key="ratios"):
    """Print one comparison and put it into `head`."""
    head["milliseconds"][title] = rounds
    ratios = head[key][title] = {}
    print(f"\n{title}\n{'n':>33}{'ms a step':>11}{'ratio':>8}   quartiles", flush=True)
    for name in rounds[0]:
        ratio = ratios[name] = record.ratio(rounds, name, PARTNER.get(name, "bare"))
        low, high = ratio["quartiles"]
        milliseconds = record.spread([row[name] for row in rounds if name in row])["median"]
        goal = GOALS.get((name, head["arguments"]["device"])) if key == "ratios" else None
        verdict = "met" if goal and ratio["median"] <= goal else "MISSED"
        print(
            f"  {name:27}{ratio['n']:4}{milliseconds:11.2f}{ratio['median']:8.3f}   "
            f"{low:.3f} .. {high:.3f}" + (f"   goal {goal} {verdict}" if goal else "")
        )


def alone(build, shape, device, names, seconds, least, precision="bf16"):
    """The rounds of one workload."""
    makers = contestants(build, shape, device, precision)
    steps = {name: warm(makers[name]) for name in names}
    return measure(steps, device, seconds, least)


def on_two_ranks(kind, batch, seconds, least):
    """The rounds of rank 0, in two processes that take the same turns."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(one_of_two, (folder, kind, batch, seconds, least), nprocs=2)
        return json.loads(Path(folder, "rounds.json").read_text())


def one_of_two(rank, folder, kind, batch, seconds, least):
    """A process of the comparison with two ranks; rank 0 leaves its rounds in `folder`."""
    torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, f"file://{folder}/meet", rank=rank, world_size=2)
    build = partial(MODELS["cifarnet"][0], NAMES, 32)
    rounds = alone(build, (batch, 3, 32, 32), device, TRIO, seconds, least)
    if rank == 0:
        Path(folder, "rounds.json").write_text(json.dumps(rounds))
    dist.barrier()
    os._exit(0)  # gloo's threads sometimes abort a process that has ended well


def main(argv=None):
    cuda = torch.cuda.is_available()
    parser = record.arguments(__doc__)
    parser.add_argument("--seconds", type=float, help="a workload; default: 35, on a GPU 3")
    parser.add_argument("--only", nargs="*", help='workloads; "ranks" and "growth" are two more')
    parser.add_argument("--precision", default="bf16", choices=TYPES)
    parser.add_argument("--graph", type=int, default=cuda, help="1: the CUDA graph pair")
    args = parser.parse_args(argv)
    ignored = "Anomaly Detection|This instance was constructed with capturable"
    warnings.filterwarnings("ignore", message=ignored)
    device, smoke = torch.device(args.device), args.smoke
    seconds = 0.0 if smoke else args.seconds or (3.0 if device.type == "cuda" else 35.0)
    least = 2 if smoke else 5
    works = workloads(device.type, smoke)
    chosen = args.only or [*works, "ranks", "growth"]
    if unknown := set(chosen) - {*works, "ranks", "growth"}:
        parser.error(f"--only: {unknown} not in {', '.join(works)}, ranks, growth")

    args.seconds = seconds
    head = record.begin("guard_cost", args, "ratios", "growth", "milliseconds")
    print(f"{head['hardware']}, torch {head['torch']}; ratios to the bare loop")
    names = [*TRIO, OWN, *SLOW]
    names += ["bare, CUDA graph", "ours, CUDA graph"] if args.graph else []

    def compare(title, measured, key="ratios"):
        """Measure a comparison, unless an earlier process did, for table and raw file."""
        if title not in head["milliseconds"]:
            table(title, measured(), head, key)
            record.keep(head, args)

    for title in [title for title in works if title in chosen]:
        rounds = partial(alone, *works[title], device, names, seconds, least, args.precision)
        compare(f"{title}, {TYPES[args.precision]}", rounds)
        if device.type == "cpu":
            apart = own_of_several(*works[title], device, args.precision, smoke=smoke)
            head.setdefault("own", {})[title] = apart
            shares = ", ".join(f"{name} {row['share']:.4f}" for name, row in apart.items())
            print(f"  own calls, above bare: {shares}", flush=True)
            record.keep(head, args)
    if "ranks" in chosen and device.type == "cuda" and torch.cuda.device_count() < 2:
        print("\n2 ranks: left out, this machine has one GPU")
    elif "ranks" in chosen:
        rounds = partial(on_two_ranks, device.type, 4 if smoke else 64, seconds, least)
        compare("cifarnet, batch 64 on each of 2 ranks, bfloat16", rounds)
    for title, work in growth(device.type, smoke).items() if "growth" in chosen else ():
        rounds = partial(alone, *work, device, TRIO, seconds / 6, least)
        compare(title, rounds, "growth")
    record.write(head, args, samples=("milliseconds",))


if __name__ == "__main__":
    main()
