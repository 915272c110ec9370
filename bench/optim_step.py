"""
What one optimizer step costs: ours beside the stock sequences, interleaved, in milliseconds.

    python bench/optim_step.py                 # the GPU if there is one, else the CPU
    python bench/optim_step.py --smoke         # seconds: does it run?

Every contestant owns fp32 parameters and moments; all of them take the same gradients, restored (untimed) before every
sample, because unscaling and clipping write them. A round times each contestant once, in a new random order; ratios are
medians of ratios within rounds. The memory limit is 32 bytes a parameter (norm: read g; AdamW: read p, g, m, v, write
p, m, v) at the bandwidth of a copy of the same size, timed in the same rounds.

On a GPU a sample is up to 20 steps between two synchronisations: throughput with a full queue, not latency. (Unscaled
20 times the gradients get tiny, which takes a GPU no longer.) The per-parameter loop, which may take seconds a step
there, is timed in every fifth round.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bench.record import header, spread, write  # noqa: E402
from optim import ClippedAdamW  # noqa: E402

SCALE = 2.0**16
GOALS = {  # ours / other, at most
    ("ours fp16", "unscale+clip+fused"): 0.75,
    ("ours", "clip+fused"): 0.9,
    ("ours fp16", "unscale+clip+foreach"): 0.45,
    ("ours", "memory limit"): 1.3,
    ("ours fp16", "memory limit"): 1.3,
}


def workloads(smoke: bool) -> dict[str, list[tuple[int, ...]]]:
    """Name -> shapes. "N tensors": square matrices that share the 25.6 million elements of ResNet-50 (within 3 %)."""
    import torchvision

    with torch.device("meta"):
        resnet = [tuple(p.shape) for p in torchvision.models.resnet50().parameters()]
    d = 768
    block = [(d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,), (d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)]
    transformer = [(20_480, d), (512, d), *(block * 12), (d,), (d,)]  # 101 million: a 12-layer GPT of width 768
    total = 100_000 if smoke else 25_600_000
    counts = (10, 100) if smoke else (10, 100, 1000, 10_000)
    equal = {f"{n} tensors": [(math.isqrt(total // n),) * 2] * n for n in counts}
    return equal if smoke else {"resnet50": resnet, "transformer-100M": transformer, **equal}


def contestants(shapes: list[tuple[int, ...]], device: torch.device) -> tuple[dict, list[Tensor], list[Tensor]]:
    """Name -> function that takes one step; the gradients they share; their pristine values."""
    torch.manual_seed(0)
    grads = [torch.randn(s, device=device) * 1e-3 for s in shapes]
    pristine = [g.clone() for g in grads]
    scale = torch.tensor(SCALE, device=device)

    def params() -> list[Tensor]:
        new = [torch.randn(s, device=device) * 0.02 for s in shapes]
        for p, g in zip(new, grads, strict=True):
            p.grad = g
        return new

    def stock(scaled: bool, **kind):
        own = params()
        optimizer = torch.optim.AdamW(own, lr=1e-4, **kind)
        scaler = torch.amp.GradScaler(device.type, init_scale=SCALE, growth_interval=10**9, enabled=scaled)
        scaler.scale(torch.ones((), device=device))  # creates its state

        def step() -> None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(own, 1.0)
            scaler.step(optimizer)
            scaler.update()

        return step

    def loop():
        """The write-ups' recipe: look at every gradient on the host, clip, step parameter by parameter."""
        own = params()
        optimizer = torch.optim.AdamW(own, lr=1e-4, foreach=False)

        def step() -> None:
            if all(bool(torch.isfinite(p.grad).all()) for p in own):
                norm = sum(p.grad.norm(2).item() ** 2 for p in own) ** 0.5
                for p in own:
                    p.grad.mul_(min(1.0, 1.0 / (norm + 1e-6)))
                optimizer.step()

        return step

    ours, ours_fp16 = ClippedAdamW(params(), lr=1e-4), ClippedAdamW(params(), lr=1e-4)
    source = torch.randn(sum(g.numel() for g in grads), device=device)
    target = torch.empty_like(source)
    half = [torch.randn(s, device=device).half() for s in shapes]
    for p, g in zip(half, grads, strict=True):
        p.grad = g.half()  # its own copy: with masters no step writes it
    masters = ClippedAdamW(half, lr=1e-4, masters=True)
    steps = {
        "copy": lambda: target.copy_(source),
        "ours": lambda: ours.step(),
        "ours fp16": lambda: ours_fp16.step(grad_scale=scale),
        "ours O2 masters": lambda: masters.step(grad_scale=scale),
        "clip+fused": stock(False, fused=True),
        "clip+foreach": stock(False, foreach=True),
        "unscale+clip+fused": stock(True, fused=True),
        "unscale+clip+foreach": stock(True, foreach=True),
        "per-parameter loop": loop(),
    }
    return steps, grads, pristine


def measure(shapes: list[tuple[int, ...]], device: torch.device, rounds: int, warmup: int) -> dict[str, list[float]]:
    """Milliseconds a step, one sample a round for every contestant."""
    steps, grads, pristine = contestants(shapes, device)
    cuda = device.type == "cuda"
    sync = torch.cuda.synchronize if cuda else lambda: None
    samples: dict[str, list[float]] = {name: [] for name in steps}
    block = dict.fromkeys(steps, 1)
    order = list(steps)
    for i in range(warmup + rounds):
        random.Random(i).shuffle(order)
        for name in order:
            if cuda and name == "per-parameter loop" and i >= warmup and (i - warmup) % 5:
                continue
            torch._foreach_copy_(grads, pristine)
            if "fp16" in name or "unscale" in name:
                torch._foreach_mul_(grads, SCALE)
            sync()
            start = time.perf_counter()
            for _ in range(block[name]):
                steps[name]()
            sync()
            ms = (time.perf_counter() - start) * 1e3 / block[name]
            if i >= warmup:
                samples[name].append(ms)
            elif cuda:
                block[name] = min(20, max(1, round(30 / ms)))  # 30 ms a sample
    elements = sum(g.numel() for g in grads)
    bandwidth = [8 * elements / ms for ms in samples["copy"]]  # bytes a millisecond
    samples["memory limit"] = [32 * elements / b for b in bandwidth]
    return samples


def ratio(samples: dict[str, list[float]], a: str, b: str) -> float:
    return statistics.median(x / y for x, y in zip(samples[a], samples[b], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="*", help="workloads to run")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--smoke", action="store_true", help="tiny tensors, three rounds, no file")
    args = parser.parse_args()
    device, rounds = torch.device(args.device), 3 if args.smoke else args.rounds
    chosen = {n: s for n, s in workloads(args.smoke).items() if not args.only or n in args.only}
    if not chosen:
        parser.error(f"--only: choose from {', '.join(workloads(args.smoke))}")
    record = header("optim_step", vars(args), device) | {"n": rounds, "milliseconds": {}, "ratios": {}}
    print(f"{record['hardware']}, torch {torch.__version__}, n = {rounds} rounds, milliseconds: median (quartiles)")
    for name, shapes in chosen.items():
        samples = measure(shapes, device, rounds, warmup=2)
        record["milliseconds"][name] = samples
        millions = sum(torch.Size(s).numel() for s in shapes) / 1e6
        print(f"\n{name}: {len(shapes)} tensors, {millions:.1f} million parameters")
        for contestant, ms in samples.items():
            low, high = spread(ms)["quartiles"]
            print(f"  {contestant:22} {statistics.median(ms):9.3f}  ({low:.3f} .. {high:.3f})  n {len(ms)}")
        record["ratios"][name] = {}
        for (a, b), goal in GOALS.items():
            r = ratio(samples, a, b)
            record["ratios"][name][f"{a} / {b}"] = r
            print(f"  {a + ' / ' + b:42} {r:.3f}  goal {goal}  {'met' if r <= goal else 'MISSED'}")
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if not args.smoke:
        write(record, args.results, device, samples=("milliseconds",))


if __name__ == "__main__":
    main()
