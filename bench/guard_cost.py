"""
What the guard costs: time per training step as a ratio to the bare loop, beside the peers' ways to see a NaN.

    python bench/guard_cost.py                 # the GPU if there is one (about 2 minutes), else the CPU (about 6)
    python bench/guard_cost.py --smoke         # does it run?
    python bench/guard_cost.py --net my_model.py:build --shape 32 3 224 224     # your network: build() -> logits (B, C)

The bare loop is the fastest honest one: autocast, backward, torch.optim.AdamW(fused=True). No clipping, no checks. Ours
is train.train_step itself: Guard, loss scale, ClippedAdamW (measure, clip, skip and step in one pass), verdict. The
stock AMP recipe is the PyTorch tutorial's: autocast, GradScaler, unscale_, clip_grad_norm_, AdamW.

Every contestant has its own copy of the same network and takes the same batches. They are interleaved in one process: a
round times a block of steps of each in a new random order, and a ratio is the median of ratios within rounds. Costly
peers are timed in every fourth round. On a GPU, time is taken with a synchronisation around a block; whatever else
waits for the device (the peers' `.item()`) does so by its own doing. Beside the time of a step stand its

    host syncs   On a GPU those that torch.cuda.set_sync_debug_mode reports; on a CPU, where nothing waits, the calls
                 that would: a number read by Python (.item(), bool()), a shape that depends on numbers.
    MB added     over the bare loop. On a GPU what is kept between steps, and the step's peak above it (a CUDA graph
                 keeps its memory where torch does not count: left out); on a CPU, which knows no peak, what is kept.

A small network on a GPU waits for Python to launch its kernels, and every launch of ours shows. Two pairs take Python
out: "CUDA graph" (train_step recorded once and replayed) and "compiled" (torch.compile of the model);
each of ours is compared with its own bare partner. Then come two ranks, and growth in parameters and in tensors, with
a tiny batch, so that the optimizer dominates: the worst case.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import gc
import importlib.util
import inspect
import itertools
import json
import math
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from amp_policy import LossScaler, capabilities, choose_policy  # noqa: E402
from bench.record import header, spread, write  # noqa: E402
from extras.graphs import StepGraph  # noqa: E402
from guards import Guard  # noqa: E402
from models import MODELS  # noqa: E402
from models.classifier import Classifier  # noqa: E402
from optim import ClippedAdamW, param_groups  # noqa: E402
from ranks import agreed  # noqa: E402
from rescue.probes import Probes, SpikeDetector  # noqa: E402
from train import CHECK_EVERY, Run, train_step  # noqa: E402

GOAL = {"cpu": 1.02, "cuda": 1.01}  # ours / bare, at most
NAMES = [str(i) for i in range(10)]
TRIO = ("bare", "ours", "stock AMP recipe (clip)")
OWN = "guards.py in the bare loop"
SLOW = ("ours, state seen each step", "ours, probes each step", "isnan().any() a parameter", "detect_anomaly",
        "underflow/overflow hooks")
PARTNER = {"ours, CUDA graph": "bare, CUDA graph", "ours, compiled": "bare, compiled"}  # of all others: "bare"
GRAPH, COMPILED = [pair[::-1] for pair in PARTNER.items()]
WORKLOADS = {  # model, batch, pixels
    "cpu": [("cifarnet", 64, 32), ("cifarnet", 256, 32), ("vit", 64, 32), ("vit", 256, 32), ("resnet50", 16, 64)],
    "cuda": [("cifarnet", 64, 32), ("cifarnet", 1024, 32), ("vit", 64, 32), ("vit", 1024, 32), ("resnet50", 32, 224),
             ("resnet50", 128, 224)],
}
GROWTH = [(1, 3), (10, 3), (50, 3), (100, 3), (200, 3), (10, 25), (10, 250), (10, 2500)]  # million parameters, layers


class Chain(nn.Module):
    """(B, width) -> (B, classes): `depth` times x + Linear(LayerNorm(x)). 4 tensors a layer, as many as you like."""

    def __init__(self, width: int, depth: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x[:, : len(NAMES)]


def watch_under_and_overflow(net: nn.Module) -> None:
    """The way of transformers.debug_utils.DebugUnderflowOverflow: a forward hook on every module takes the smallest and
    largest magnitude of its weights, inputs and outputs to the host, and looks for NaN and inf in them."""
    frames = collections.deque(maxlen=21)

    def hook(module, args, out):
        tensors = [x for x in (*args, out) if isinstance(x, Tensor)]
        sizes = [x.detach().abs() for x in (*module.parameters(recurse=False), *tensors)]
        frames.append([f"{size.min():8.2e} {size.max():8.2e}" for size in sizes])
        if any(x.isnan().any().item() or x.isinf().any().item() for x in tensors):
            raise FloatingPointError(type(module).__name__)

    for module in net.modules():
        module.register_forward_hook(hook)


def contestants(build, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> dict:
    """Name -> function that copies the network and returns a function without arguments: one training step."""
    torch.manual_seed(0)
    original = build().to(device, memory_format=torch.channels_last)
    with torch.no_grad():
        classes = original.eval()(torch.zeros(2, *shape[1:], device=device)).shape[-1]
    original.train()
    batches = [(torch.randn(shape, device=device), torch.randint(0, classes, shape[:1], device=device))
               for _ in range(4)]
    if len(shape) == 4:
        batches = [(x.to(memory_format=torch.channels_last), y) for x, y in batches]
    scales = dtype is torch.float16
    autocast = partial(torch.autocast, device.type, dtype)

    def copied(compiled):
        model = Classifier(copy.deepcopy(original))
        if dist.is_initialized():  # as train.py wraps it; torch 2.15 has a new name for broadcast_buffers
            known = inspect.signature(DistributedDataParallel).parameters
            sync = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
            return model, DistributedDataParallel(model, **{sync: False})
        return model, torch.compile(model) if compiled else model

    def stock(check=None, clip=False, anomaly=False, hooks=False, graph=False, compiled=False):
        """The usual loop; `check`: called with the parameters after backward, False = skip the step."""
        model, forward = copied(compiled)
        own = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(own, lr=1e-4, fused=True, capturable=graph)
        scaler = torch.amp.GradScaler(device.type, enabled=scales and clip)
        count = itertools.count()
        if hooks:
            watch_under_and_overflow(model.net)

        def run(x, y):
            with torch.autograd.set_detect_anomaly(True) if anomaly else contextlib.nullcontext():
                with autocast():
                    loss, _ = forward(x, y)
                scaler.scale(loss).backward()
            if clip:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(own, 1.0)
            if check is None or check(own):
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        run = StepGraph(run, warm_up=2) if graph else run
        return lambda: run(*batches[next(count) % 4])

    def guarded():
        """The usual loop with the seven lines of guards.py, as README shows them."""
        model, _ = copied(False)
        optimizer, guard = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), Guard(model, num_classes=classes)
        scaler = torch.amp.GradScaler(device.type, enabled=scales)
        count = itertools.count()

        def run():
            x, y = batches[next(count) % 4]
            guard.open()
            y = guard.see_batch(x, y)
            with autocast():
                loss, _ = model(x, y)
            guard.see_loss(loss)
            scaler.scale(loss).backward()
            guard.step(optimizer, scaler)
            scaler.update()
            optimizer.zero_grad()
            guard.verdict()

        return run

    def ours(probe=False, look=False, graph=False, compiled=False):
        """train.py's step. `probe`: at every step (--probe-every 1). `look`: at every step, not at each 100th."""
        model, forward = copied(compiled)
        net = model.net
        run = Run(
            net=net, model=model, compiled=forward, log=SimpleNamespace(write=lambda **fields: None),
            policy=choose_policy("fp16" if scales else "bf16", capabilities(device), None, None),
            scaler=LossScaler(device.type, enabled=scales),
            guard=Guard(net, num_classes=classes, device=device, spikes=SpikeDetector()),
            optimizer=ClippedAdamW(param_groups(net, 0.01), lr=1e-4, clip=1.0),
        )
        replay = StepGraph(partial(train_step, run), warm_up=2) if graph else None
        count = itertools.count()

        def step():
            i = next(count)
            looks = look or i % CHECK_EVERY == CHECK_EVERY - 1
            if probe:
                run.probes = Probes(net, device)
                run.probes.attach()
            run.guard.open()
            run.guard.raise_flag("signal", 0)
            if replay and not looks:
                replay(*batches[i % 4])
            else:
                train_step(run, *batches[i % 4], look=looks, watched=probe)
            verdict = run.guard.verdict()
            if verdict and not verdict.accepted and not scales:  # fp16 may: its loss scale finds its place
                raise FloatingPointError(f"a step was rejected, so this measures something else: {verdict}")

        return step

    return {
        "bare": stock, "ours": ours, OWN: guarded, "stock AMP recipe (clip)": partial(stock, clip=True),
        "ours, state seen each step": partial(ours, look=True), "ours, probes each step": partial(ours, probe=True),
        "isnan().any() a parameter": partial(stock, lambda own: not any(p.grad.isnan().any() for p in own)),
        "detect_anomaly": partial(stock, anomaly=True), "underflow/overflow hooks": partial(stock, hooks=True),
        "bare, CUDA graph": partial(stock, graph=True), "ours, CUDA graph": partial(ours, graph=True),
        "bare, compiled": partial(stock, compiled=True), "ours, compiled": partial(ours, compiled=True),
    }


class Questions(TorchDispatchMode):
    """Counts the calls that would wait for a GPU."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero)
        return func(*args, **(kwargs or {}))


def host_syncs(step, device: torch.device) -> int:
    if device.type == "cpu":
        with Questions() as asked:
            step()
        return asked.count
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        step()
        torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(w.message) for w in caught)


def held_bytes(device: torch.device) -> int:
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated()
    storages = [t.untyped_storage() for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter)]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def enter(make, device: torch.device):
    """A contestant's step, warm, and what it takes besides time."""
    before = held_bytes(device)
    step = make()
    for _ in range(3):
        step()
    needs = held_bytes(device) - before
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        now = torch.cuda.memory_allocated()
        step()
        needs += torch.cuda.max_memory_allocated() - now
    return step, {"host_syncs": host_syncs(step, device), "bytes": needs}


def measure(steps: dict, device: torch.device, seconds: float, least: int) -> list[dict]:
    """Rounds of {name: milliseconds a step}, for `seconds` and at least `least` rounds; as many on every rank."""

    def timed(step, block):
        sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        sync()
        start = time.perf_counter()
        for _ in range(block):
            step()
        sync()
        return (time.perf_counter() - start) * 1e3 / block

    # On a GPU many steps at once, so that its queue is full, but not more than 0.2 seconds of them
    block = 1 if device.type == "cpu" else agreed(min(20, max(1, round(200 / timed(steps["bare"], 5)))))
    rounds: list[dict] = []
    start = time.perf_counter()
    while agreed(len(rounds) < least or time.perf_counter() - start < seconds):
        order = [name for name in steps if name not in SLOW or len(rounds) % 4 == 0]
        random.Random(len(rounds)).shuffle(order)
        rounds.append({name: timed(steps[name], block) for name in order})
    return rounds


def table(title: str, rounds: list[dict], goal: float, record: dict, key: str = "ratios", facts=None) -> None:
    """Print one comparison and put it into `record`. `facts`: contestant -> what `enter` said, or why it failed."""
    facts = facts or {name: {} for name in TRIO}
    record["milliseconds"][title], record["facts"][title] = rounds, facts
    ratios = record[key][title] = {}
    print(f"\n{title}\n{'n':>33}{'ms a step':>11}{'ratio':>8}   quartiles       host syncs  MB added", flush=True)
    for name, fact in facts.items():
        if "failed" in fact:
            print(f"  {name:27} failed: {fact['failed']}")
            continue
        own = [r for r in rounds if name in r]
        ratio = ratios[name] = spread([r[name] / r.get(PARTNER.get(name, "bare"), math.nan) for r in own])
        low, high = ratio["quartiles"]
        print(f"  {name:27}{ratio['n']:4}{spread([r[name] for r in own])['median']:11.2f}{ratio['median']:8.3f}   "
              f"{low:.3f} .. {high:.3f}", end="")
        print(f"{fact['host_syncs']:13}" if fact else "", end="")
        print(f"{(fact['bytes'] - facts['bare']['bytes']) / 1e6:10.2f}" if fact and "graph" not in name else "", end="")
        met = "met" if ratio["median"] <= goal else "MISSED"
        print(f"   goal {goal} {met}" if key == "ratios" and name in ("ours", *PARTNER) else "")


def compare(title, build, shape, device, dtype, names, seconds, least, record, key="ratios") -> None:
    makers = contestants(build, shape, device, dtype)
    if device.type == "cuda":
        enter(makers["bare"], device)  # the libraries' workspaces stay allocated: they are nobody's
    steps, facts = {}, {}
    for name in names:
        try:
            steps[name], facts[name] = enter(makers[name], device)
        except Exception as error:
            if name not in GRAPH + COMPILED:
                raise
            facts[name] = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    table(title, measure(steps, device, seconds, least), GOAL[device.type], record, key, facts)
    torch.compiler.reset()


def one_of_two(rank: int, folder: str, kind: str, batch: int, seconds: float, least: int) -> None:
    """A process of the comparison with two ranks; rank 0 leaves its rounds in `folder`."""
    torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    makers = contestants(partial(MODELS["cifarnet"][0], NAMES, 32), (batch, 3, 32, 32), device, torch.bfloat16)
    rounds = measure({name: enter(makers[name], device)[0] for name in TRIO}, device, seconds, least)
    if rank == 0:
        Path(folder, "rounds.json").write_text(json.dumps(rounds))
    dist.barrier()
    os._exit(0)  # gloo's threads sometimes abort a process that has ended well


def yours(spec: str) -> Callable[[], nn.Module]:
    """The function of FILE.py:FUNCTION; its network is called with images and returns logits."""
    path, _, name = spec.partition(":")
    found = importlib.util.spec_from_file_location("yours", path)
    module = importlib.util.module_from_spec(found)
    sys.path.insert(0, str(Path(path).resolve().parent))
    found.loader.exec_module(module)
    return getattr(module, name or "build")


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--seconds", type=float, help="for each workload; default: 35, on a GPU 3")
    parser.add_argument("--only", nargs="*", help='workloads to run; "ranks" and "growth" are two more')
    parser.add_argument("--graph", action=argparse.BooleanOptionalAction, default=cuda, help="the CUDA graph pair")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=cuda, help="the compiled pair")
    parser.add_argument("--net", metavar="FILE.py:FUNCTION", help="your own network instead; no file is written")
    parser.add_argument("--shape", type=int, nargs="+", default=[32, 3, 224, 224], help="of a batch, with --net")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--smoke", action="store_true", help="tiny batches, two rounds, no file")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="Anomaly Detection|This instance was constructed with capturable")
    device = torch.device(args.device)
    seconds = 0.0 if args.smoke else args.seconds or (3.0 if device.type == "cuda" else 35.0)
    least = 2 if args.smoke else 5
    works = {}  # title: (function that builds the network, shape of a batch)
    for name, batch, size in WORKLOADS[device.type]:
        title = f"{name}, batch {batch}" + (f", {size} px" if size != 32 else "")
        works[title] = partial(MODELS[name][0], NAMES, size), (4 if args.smoke else batch, 3, size, size)
    works["1,600 tensors, batch 64"] = partial(Chain, 64, 4 if args.smoke else 400), (64, 64)
    if args.net:
        works = {args.net: (yours(args.net), tuple(args.shape))}
    chosen = [args.net] if args.net else args.only or [*works, "ranks", "growth"]
    if unknown := set(chosen) - {*works, "ranks", "growth"}:
        parser.error(f"--only: {unknown} not in {', '.join(works)}, ranks, growth")

    record = header("guard_cost", vars(args) | {"seconds": seconds}, device)
    record |= {"ratios": {}, "growth": {}, "facts": {}, "milliseconds": {}}
    print(f"{record['hardware']}, torch {record['torch']}; ratios to the bare loop")
    for name in [name for name in works if name in chosen]:
        names = [*TRIO, OWN, *(() if args.net else SLOW), *(GRAPH if args.graph else ())]
        if args.compile and name in ("cifarnet, batch 64", "vit, batch 64"):  # compiling takes half a minute
            names += COMPILED
        compare(f"{name}, bfloat16", *works[name], device, torch.bfloat16, names, seconds, least, record)
        if device.type == "cuda":  # a CPU only emulates fp16
            compare(f"{name}, float16", *works[name], device, torch.float16, TRIO, seconds / 2, least, record)
    if "ranks" in chosen and device.type == "cuda" and torch.cuda.device_count() < 2:
        print("\n2 ranks: left out, this machine has one GPU")
    elif "ranks" in chosen:
        with tempfile.TemporaryDirectory() as folder:
            what = (folder, device.type, 4 if args.smoke else 64, seconds, least)
            torch.multiprocessing.spawn(one_of_two, what, nprocs=2)
            rounds = json.loads(Path(folder, "rounds.json").read_text())
        table("cifarnet, batch 64 on each of 2 ranks, bfloat16", rounds, GOAL[device.type], record)
    for millions, depth in GROWTH if "growth" in chosen else ():
        if millions > 100 and device.type == "cpu" and not args.smoke:
            print(f"\n{millions} million parameters: left out on a CPU, three contestants would take 12 GB")
            continue
        depth = min(depth, 25) if args.smoke else depth
        width = max(16, math.isqrt(int(millions * (1e4 if args.smoke else 1e6) / depth)))
        title = f"{millions} million parameters in {4 * depth:,} tensors"
        what = title, partial(Chain, width, depth), (8, width), device, torch.bfloat16
        compare(*what, TRIO, seconds / 6, least, record, "growth")
    if not args.smoke and not args.net:
        write(record, args.results, device, samples=("milliseconds",))


if __name__ == "__main__":
    main()
