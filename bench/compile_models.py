"""
torch.compile under the guards: what it saves a step, what it costs at the start, and whether it stays in one graph.

    python bench/compile_models.py                         # as many models as fit into --seconds
    python bench/compile_models.py --models vit dit        # these
    python bench/compile_models.py --smoke                 # tiny models, traced but not compiled

Compiled is what `train.py --compile` compiles: the wrapped model, its loss included. The guard stands around it, in
eager mode, so it must not cut the graph: the step is run bare first, then with the guard on, and what that adds in
breaks or in graphs compiled anew is a column of its own, which should hold 0. The eager model takes the very same
guarded steps, in turns with the compiled one; the ratio is the median within rounds. Seconds are those of the first
compiled step, with an empty cache. On a CPU inductor needs a C++ compiler; a model that cannot be compiled says why.
"""

from __future__ import annotations

import argparse
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
from torch._dynamo.utils import counters

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from amp_policy import LossScaler, capabilities, choose_policy  # noqa: E402
from bench.record import header, spread, write  # noqa: E402
from guards import Guard  # noqa: E402
from models import MODELS, wrap  # noqa: E402
from optim import ClippedAdamW, param_groups  # noqa: E402
from train import Run, train_step  # noqa: E402

CHOSEN = ["cifarnet", "vit", "resnet18", "dit", "vlm", "vmamba", "slat_vae", "swin", "swin-v2"]
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def steps(name: str, device: torch.device, batch: int, backend: str) -> dict[str, Callable]:
    """{"eager", "compiled"}: functions that take train.py's step, or a bare one when they are called with False."""
    policy = choose_policy("auto", capabilities(device))
    build, recipe = MODELS[name]

    def contestant(compiled: bool) -> Callable:
        torch.manual_seed(0)
        net = build(CLASSES, 32)
        x, labels = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,), device=device)
        if hasattr(net, "init_from_data"):
            net.init_from_data(x)
        net = policy.prepare(net.to(device, memory_format=torch.channels_last))
        x = x.to(device, memory_format=torch.channels_last)
        model = wrap(net, recipe["label_smoothing"])
        forward = torch.compile(model, backend=backend) if compiled else model
        run = Run(
            net=net, model=model, compiled=forward, policy=policy,
            scaler=LossScaler(device.type, enabled=policy.scales), guard=Guard(net, num_classes=10, device=device),
            optimizer=ClippedAdamW(param_groups(net, recipe["weight_decay"], lr_scale=recipe["lr_scale"]), lr=1e-4),
        )

        def step(guarded: bool = True) -> None:
            if guarded:
                run.guard.open()
                train_step(run, x, labels)
                run.guard.verdict()
                return
            with policy.autocast():
                loss, _ = forward(x, labels)
            run.scaler.scale(loss).backward()
            result = run.optimizer.step(grad_scale=run.scaler.scale_tensor)
            run.scaler.update(found_inf=result.found_inf)
            run.optimizer.zero_grad()

        return step

    return {"eager": contestant(False), "compiled": contestant(True)}


def measure(name: str, device: torch.device, args: argparse.Namespace) -> dict:
    """One row. Raises what the compiler raises."""
    torch._dynamo.reset()
    counters.clear()
    sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    ways = steps(name, device, args.batch, "eager" if args.smoke else "inductor")

    def timed(step: Callable, *guarded: bool) -> float:
        sync()
        start = time.perf_counter()
        step(*guarded)
        sync()
        return time.perf_counter() - start

    def counted() -> tuple[int, int]:
        return sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"]

    first = timed(ways["compiled"], False)
    timed(ways["compiled"], False)
    bare = counted()
    why = [text.splitlines()[0] for text in counters["graph_break"]]
    for _ in range(3):
        ways["compiled"]()
        ways["eager"]()
    samples: dict[str, list[float]] = {"eager": [], "compiled": []}
    for i in range(args.rounds):
        for way in random.Random(i).sample(list(ways), 2):
            samples[way].append(statistics.mean(timed(ways[way]) for _ in range(args.block)) * 1e3)
    added = [a - b for a, b in zip(counted(), bare, strict=True)]
    ratio = spread([c / e for c, e in zip(samples["compiled"], samples["eager"], strict=True)])
    return {"compiled / eager": ratio, "first_step_seconds": first, "breaks": bare[0], "graphs": bare[1], "why": why,
            "added by the guard": {"breaks": added[0], "graphs": added[1]}, "milliseconds": samples}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--models", nargs="+", choices=MODELS, metavar="MODEL", help=f"default: {' '.join(CHOSEN)}")
    parser.add_argument("--seconds", type=float, help="begin no further model after so long; default: 80, on a CPU 180")
    parser.add_argument("--batch", type=int, help="default: 256, on a CPU 32")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--block", type=int, help="steps a round; default: 10, on a CPU 1")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--smoke", action="store_true", help="three tiny models, the tracer alone, no file")
    args = parser.parse_args()
    cache = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # torch's own would make the second run look fast
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache.name
    device, cuda = torch.device(args.device), args.device == "cuda"
    args.batch, args.block = args.batch or (256 if cuda else 32), args.block or (10 if cuda else 1)
    args.seconds = args.seconds or (3600 if args.models else 80 if cuda else 180)
    if args.smoke:
        args.models, args.rounds, args.batch = ["cifarnet-tiny", "vit-test", "vmamba-test"], 2, 4
    record = header("compile_models", vars(args), device) | {"n": args.rounds, "models": {}}
    policy = choose_policy("auto", capabilities(device))
    print(f"{policy.name}, batch {args.batch}, n = {args.rounds} rounds; {record['hardware']}, torch {record['torch']}")
    print(f"\n{'':12}{'compiled / eager':>26}{'first step, s':>15}{'graphs':>8}{'breaks':>8}{'added by the guard':>20}",
          flush=True)
    began = time.perf_counter()
    for name in args.models or CHOSEN:
        if time.perf_counter() - began > args.seconds:
            record["models"][name] = {"left out": f"{args.seconds:g} seconds were over"}
            print(f"{name:12}left out: {args.seconds:g} seconds were over (--models {name})")
            continue
        try:
            row = record["models"][name] = measure(name, device, args)
        except Exception as error:  # whatever a compiler may raise: the other models go on
            text = (str(error).strip() or "no message").splitlines()[0][:80]
            record["models"][name] = {"failed": f"{type(error).__name__}: {text}"}
            print(f"{name:12}failed: {type(error).__name__}: {text}", flush=True)
            continue
        ratio, added = row["compiled / eager"], row["added by the guard"]
        quartiles = "{:.3f} .. {:.3f}".format(*ratio["quartiles"])
        print(f"{name:12}{ratio['median']:8.3f} ({quartiles}){row['first_step_seconds']:15.1f}{row['graphs']:8}"
              f"{row['breaks']:8}{added['breaks']:9} + {added['graphs']} graphs  {'; '.join(row['why'])[:90]}",
              flush=True)
    if args.smoke:
        print(json.dumps(record))
    else:
        raw = {name: row.pop("milliseconds", None) for name, row in record["models"].items()}
        write(record | {"milliseconds": raw}, args.results, device, samples=("milliseconds",))


if __name__ == "__main__":
    main()
