"""
What one optimizer step costs: ours beside the stock sequences, interleaved, in milliseconds.

    python bench/optim_step.py                 # the GPU if there is one, else the CPU
    python bench/optim_step.py --smoke         # seconds: does it run?

Every contestant owns fp32 parameters and moments; all of them take the same gradients, restored
(untimed) before every sample, because unscaling and clipping write them. A round times each
contestant once, in a new random order; ratios are medians of ratios within rounds. The memory limit
is 32 bytes a parameter (norm: read g; AdamW: read p, g, m, v, write p, m, v) at the bandwidth of a
copy of the same size, timed in the same rounds.

On a GPU a sample is up to 20 steps between two synchronisations: throughput with a full queue, not
latency. (20 unscalings make the gradients tiny; a GPU takes no longer for it.)
"""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path

import torch
import torchvision

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench import record
from optim import ClippedAdamW

SCALE = 2.0**16
GOALS = {  # ours / other, at most
    ("ours fp16", "unscale+clip+fused"): 0.75,
    ("ours", "clip+fused"): 0.9,
    ("ours fp16", "unscale+clip+foreach"): 0.45,
    ("ours", "memory limit"): 1.3,
    ("ours fp16", "memory limit"): 1.3,
}


def workloads(smoke):
    """Name -> shapes. "N tensors": square matrices that share the 25.6 million elements of
    ResNet-50 (within 3 %)."""
    total = 100_000 if smoke else 25_600_000
    counts = (10, 100) if smoke else (10, 100, 1000, 10_000)
    equal = {f"{n} tensors": [(math.isqrt(total // n),) * 2] * n for n in counts}
    if smoke:
        return equal
    with torch.device("meta"):
        resnet = torchvision.models.resnet50()
        layer = torch.nn.TransformerEncoderLayer(768, 12, 4 * 768)
        embedding = torch.nn.Embedding(20_480 + 512, 768)
        gpt = torch.nn.ModuleList([embedding, torch.nn.TransformerEncoder(layer, 12)])
    networks = {"resnet50": resnet, "transformer-100M": gpt}
    return {name: [p.shape for p in net.parameters()] for name, net in networks.items()} | equal


def contestants(shapes, device):
    """Name -> function that takes one step; the gradients that they share."""
    torch.manual_seed(0)
    grads = [torch.randn(s, device=device) * 1e-3 for s in shapes]
    scale = torch.tensor(SCALE, device=device)

    def params():
        new = [torch.randn(s, device=device) * 0.02 for s in shapes]
        for p, g in zip(new, grads, strict=True):
            p.grad = g
        return new

    def stock(scaled, **kind):
        own = params()
        optimizer = torch.optim.AdamW(own, lr=1e-4, **kind)
        scaler = torch.amp.GradScaler(
            device.type, init_scale=SCALE, growth_interval=10**9, enabled=scaled
        )
        scaler.scale(torch.ones((), device=device))  # creates its state

        def step():
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(own, 1.0)
            scaler.step(optimizer)
            scaler.update()

        return step

    ours = ClippedAdamW(params(), lr=1e-4)
    ours_fp16 = ClippedAdamW(params(), lr=1e-4)
    source = torch.randn(sum(g.numel() for g in grads), device=device)
    target = torch.empty_like(source)
    return {
        "copy": lambda: target.copy_(source),
        "ours": ours.step,
        "ours fp16": lambda: ours_fp16.step(grad_scale=scale),
        "clip+fused": stock(False, fused=True),
        "unscale+clip+fused": stock(True, fused=True),
        "unscale+clip+foreach": stock(True, foreach=True),
    }, grads


def measure(shapes, device, rounds, warmup=2):
    """Milliseconds a step, one sample a round for every contestant."""
    steps, grads = contestants(shapes, device)
    pristine = [g.clone() for g in grads]
    samples, block = [], dict.fromkeys(steps, 1)
    for i in range(warmup + rounds):
        row = {}
        for name in random.Random(i).sample(list(steps), len(steps)):
            torch._foreach_copy_(grads, pristine)
            if "fp16" in name or "unscale" in name:
                torch._foreach_mul_(grads, SCALE)
            row[name] = record.timed(steps[name], device, block[name])
            if i < warmup and device.type == "cuda":
                block[name] = min(20, max(1, round(30 / row[name])))  # 30 ms a sample
        # 4 bytes read and 4 written an element of the copy, 32 a parameter of the step.
        row["memory limit"] = 4 * row["copy"]
        samples.append(row)
    return samples[warmup:]


def main():
    parser = record.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    device = torch.device(args.device)
    rounds = 3 if args.smoke else args.rounds
    head = record.begin("optim_step", args, "milliseconds", "ratios")
    print(f"{head['hardware']}, torch {torch.__version__}, n {rounds}; ms, median")
    for name, shapes in workloads(args.smoke).items():
        if name in head["ratios"]:  # an earlier process has it
            continue
        samples = head["milliseconds"][name] = measure(shapes, device, rounds)
        print(f"\n{name}: {len(shapes)} tensors")
        for contestant in samples[0]:
            milliseconds = record.spread([row[contestant] for row in samples])["median"]
            print(f"  {contestant:22} {milliseconds:9.3f}")
        ratios = head["ratios"][name] = {}
        for (a, b), goal in GOALS.items():
            ratio = ratios[f"{a} / {b}"] = record.ratio(samples, a, b)
            verdict = "met" if ratio["median"] <= goal else "MISSED"
            print(f"  {a + ' / ' + b:42} {ratio['median']:.3f}  goal {goal}  {verdict}")
        record.keep(head, args)
    record.write(head, args, samples=("milliseconds",))


if __name__ == "__main__":
    main()
