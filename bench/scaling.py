"""
Scaling: what a second rank and smaller micro-batches cost, with the guards and without.

    python bench/scaling.py            # about 3 minutes on 2 CPU cores; one rank a GPU where there are two
    python bench/scaling.py --smoke    # seconds: does it run?

Every way is timed twice: `bare` is the plain loop (autocast, backward, fused AdamW, DDP where there are two ranks),
`guarded` is train.train_step. Strong scaling halves the batch between two ranks, weak scaling gives each a whole one;
accumulation cuts one rank's batch into micro-batches. All ways live in the same processes and are interleaved: a round
times a block of steps of each, in a new random order, while a rank that has no part in it waits at a barrier. Ratios
are medians of ratios within rounds. On a CPU a rank has one thread; on CUDA it has a GPU of its own, and steps go
kernel by kernel, as train.py takes them on several ranks.

The last table is arithmetic where it says "calculated". The guard adds ONE all-reduce of a dozen floats to a step
(guards.Guard.decide, after the last backward, where nothing hides it): it costs its latency, whatever the model. The
gradients' all-reduce takes 2 (N - 1) / N * bytes / bandwidth, mostly hidden behind the backward.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from amp_policy import LossScaler, capabilities, choose_policy  # noqa: E402
from bench.record import header, spread, write  # noqa: E402
from guards import FLAGS, Guard  # noqa: E402
from models.cifarnet import CifarNet  # noqa: E402
from models.classifier import Classifier  # noqa: E402
from optim import ClippedAdamW, param_groups  # noqa: E402
from train import Run, train_step  # noqa: E402

PIECES = (2, 4, 8)
# GPUs: (ms for a tiny all-reduce, bytes a second), assumed. NCCL's latency was seen as 6 us between 2 H100 in a CUDA
# graph (NVIDIA/nccl #1259) and 75 us between nodes (nccl #1453): rounded up here, for a step is launched by the host.
# Bandwidth: 8 H100 on NVLink reach 476 GB/s, a 400 Gb/s card 46 to 48 (nccl-tests #290), and a node has 8 of them.
CLUSTERS = {8: (0.030, 450e9), 64: (0.100, 8 * 46e9)}


def contestant(guarded: bool, batch: int, device: torch.device, together: bool = False, accum: int = 1) -> Callable:
    """A function that takes one training step: `batch` images of this rank, in `accum` micro-batches."""
    torch.manual_seed(0)
    x = torch.randn(batch, 3, 32, 32, device=device).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (batch,), device=device)
    net = CifarNet().to(device, memory_format=torch.channels_last)
    ddp = model = Classifier(net, label_smoothing=0.2)
    if together:  # as in train.py, for both: DDP's default would send BatchNorm's buffers around at each step
        known = inspect.signature(DistributedDataParallel).parameters
        sync = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        ddp = DistributedDataParallel(model, [device] if device.type == "cuda" else None, **{sync: False})

    if not guarded:
        adamw = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-4, fused=True)

        def bare() -> None:
            for images, y in zip(x.chunk(accum), labels.chunk(accum), strict=True):
                with torch.autocast(device.type, torch.bfloat16):
                    loss, _ = ddp(images, y)
                (loss * (len(images) / batch)).backward()
            adamw.step()
            adamw.zero_grad()

        return bare
    run = Run(net=net, model=model, ddp=ddp, compiled=ddp, world_size=2 if together else 1, accum=accum,
              policy=choose_policy("bf16", capabilities(device), None, None),
              scaler=LossScaler(device.type, enabled=False), guard=Guard(net, num_classes=10, device=device),
              optimizer=ClippedAdamW(param_groups(net), lr=1e-4, clip=1.0))
    run.guard.together = together  # where rank 0 runs alone, it decides alone

    def step() -> None:
        run.guard.open()
        run.guard.raise_flag("signal", 0)
        train_step(run, x, labels)
        run.guard.verdict()

    return step


def worker(rank: int, world: int, args: argparse.Namespace, folder: str) -> None:
    """One rank: every way, in rounds. Rank 0 writes the milliseconds a step of each round, and two latencies."""
    device = torch.device("cuda", rank) if args.device == "cuda" else torch.device("cpu")
    if args.device == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    sync = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    if world > 1:
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo", rank=rank, world_size=world,
                                init_method=f"file://{folder}/meeting")
    barrier = dist.barrier if world > 1 else lambda: None
    alone = {"1 rank": {}} | {f"accumulation {n}": {"accum": n} for n in PIECES}
    ways = {name: {"batch": args.batch, **how} for name, how in alone.items()} if rank == 0 else dict.fromkeys(alone)
    if world > 1:
        ways["2 ranks, strong"] = {"batch": args.batch // 2, "together": True}
        ways["2 ranks, weak"] = {"batch": args.batch, "together": True}
    steps = {(way, kind): contestant(kind == "guarded", device=device, **how) if how else None
             for way, how in ways.items() for kind in ("bare", "guarded")}
    rounds = {f"{way}, {kind}": [] for way, kind in steps}
    for i in range(-2, args.rounds):  # two rounds of warm-up
        for way, kind in random.Random(i).sample(list(steps), len(steps)):
            step = steps[way, kind]
            barrier()
            start = time.perf_counter()
            for _ in range(args.block if step else 0):
                step()
            sync()
            if i >= 0:
                rounds[f"{way}, {kind}"].append((time.perf_counter() - start) * 1e3 / args.block)
    numbers, latency = sum(p.numel() for p in CifarNet().parameters() if p.requires_grad), {}
    for name, size in {"flags": len(FLAGS), "gradients": numbers}.items() if world > 1 else ():
        tensor, samples = torch.zeros(size, device=device), []
        for _ in range(args.rounds * 10):
            barrier()
            start = time.perf_counter()
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
            sync()
            samples.append((time.perf_counter() - start) * 1e3)
        latency[name] = samples[len(samples) // 5 :]
    if rank == 0:
        Path(folder, "rank0.json").write_text(json.dumps({"rounds": rounds, "latency": latency, "bytes": 4 * numbers}))
    if world > 1:
        barrier()
        os._exit(0)  # gloo's threads sometimes abort a process that has ended well


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--batch", type=int, help="images a step of one rank; default: 64 on a CPU, 2048 on CUDA")
    parser.add_argument("--rounds", type=int, help="default: 60 on a CPU, 30 on CUDA")
    parser.add_argument("--block", type=int, help="steps a round; default: 1 on a CPU, 10 on CUDA")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--smoke", action="store_true", help="16 images, two rounds, no file")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    args.block = args.block or (10 if cuda else 1)
    args.batch, args.rounds = args.batch or (2048 if cuda else 64), args.rounds or (30 if cuda else 60)
    if args.smoke:
        args.batch, args.rounds = 16, 2
    world = min(2, torch.cuda.device_count()) if cuda else 2
    record = header("scaling", vars(args), torch.device(args.device)) | {"ranks": world}
    with tempfile.TemporaryDirectory() as folder:
        if world > 1:
            torch.multiprocessing.spawn(worker, (world, args, folder), nprocs=world)
        else:
            worker(0, 1, args, folder)
        record |= json.loads(Path(folder, "rank0.json").read_text())
    rounds = record["rounds"]
    print(f"cifarnet in bf16, {args.batch} images, n = {args.rounds} rounds; {record['hardware']}, torch "
          f"{record['torch']}{'' if cuda else ', one thread a rank'}\n\n{'':16}{'bare, ms a step':>16}"
          f"{'guarded / bare, time':>22}{'bare, images/s':>24}{'guarded, images/s':>27}")
    record |= {"guarded / bare": {}, "images/s / 1 rank": {}, "communication": []}
    for way in dict.fromkeys(name.rsplit(", ", 1)[0] for name in rounds):
        bare, guarded = rounds[f"{way}, bare"], rounds[f"{way}, guarded"]
        cost = record["guarded / bare"][way] = spread([g / b for g, b in zip(guarded, bare, strict=True)])
        images = 2 if way.endswith("weak") else 1
        faster = record["images/s / 1 rank"][way] = {
            kind: spread([images * one / ms for one, ms in zip(rounds[f"1 rank, {kind}"], own, strict=True)])
            for kind, own in (("bare", bare), ("guarded", guarded))}
        print(f"{way:16}{statistics.median(bare):16.2f}{cost['median']:22.3f}" + "".join(
            f"{r['median']:{width}.3f} of 1 rank" for r, width in zip(faster.values(), (14, 17), strict=True)))
    if world == 1:
        record["skipped"] = "2 ranks: this machine has one GPU, and two ranks on it would time how they share it"
        print(f"skipped: {record['skipped']}")

    table = record["communication"]
    if world > 1:
        latency = {name: statistics.median(ms) for name, ms in record["latency"].items()}
        table.append(["measured: 2 ranks, cifarnet", latency["gradients"], latency["flags"],
                      latency["flags"] / statistics.median(rounds["2 ranks, weak, bare"])])
    here = {"cifarnet, its step as above": (statistics.median(rounds["1 rank, bare"]), record["bytes"])} if cuda else {}
    for gpus, (latency, bandwidth) in CLUSTERS.items():
        for name, (step, size) in (here | {"ResNet-50, 100 ms a step assumed": (100.0, 4 * 25.6e6)}).items():
            gradients = 2e3 * (gpus - 1) / gpus * size / bandwidth
            table.append([f"calculated: {gpus} GPUs, {name}", gradients, latency, latency / step])
    print(f"\n{'':52}{'gradients, ms':>14}{'flags, ms':>11}{'flags / step':>14}")
    for name, gradients, flags, share in table:
        print(f"{name:52}{gradients:14.3f}{flags:11.3f}{share:14.3%}")
    record["assumed"] = {f"{gpus} GPUs": f"{latency:g} ms for a tiny all-reduce, {bandwidth / 1e9:g} GB/s; the flags "
                         f"take less than 1 % of any step over {latency * 100:g} ms"
                         for gpus, (latency, bandwidth) in CLUSTERS.items()}
    print("\n".join(f"assumed for {gpus}: {what}" for gpus, what in record["assumed"].items()))
    if args.smoke:
        print(json.dumps({k: v for k, v in record.items() if k not in ("rounds", "latency")}))
    else:
        write(record, args.results, torch.device(args.device), samples=("rounds", "latency"))


if __name__ == "__main__":
    main()
