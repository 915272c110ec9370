"""
What the guard costs: time per training step as a ratio to the bare loop, beside the peers' ways to see a NaN.

    python bench/guard_cost.py                 # the GPU if there is one, else the CPU; about 3 minutes
    python bench/guard_cost.py --smoke         # seconds: does it run?

The bare loop is the fastest honest one: autocast, backward, torch.optim.AdamW(fused=True). No clipping, no checks. Ours
is train.py's step: Guard, loss scale, ClippedAdamW (measure, clip, skip and step in one pass), verdict. Every
contestant has its own copy of the same network and takes the same batches. They are interleaved in one process: a
round times a block of steps of each in a new random order, and a ratio is the median of ratios within rounds. The peers
that cost a lot are timed in every `--slow-every`th round. On a GPU, time is taken with a synchronisation around a
block; whatever else waits for the device (the peers' `.item()`) does so by its own doing.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import json
import platform
import random
import statistics
import subprocess
import sys
import time
import warnings
from datetime import datetime, timezone
from pathlib import Path

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from amp_policy import LossScaler  # noqa: E402
from guards import Guard, Probes  # noqa: E402
from models.cifarnet import CifarNet  # noqa: E402
from models.classifier import Classifier  # noqa: E402
from optim import ClippedAdamW, param_groups  # noqa: E402

GOAL = {"cpu": 1.02, "cuda": 1.01}  # ours / bare, at most
CLASSES = 10


class ViT(nn.Module):
    """A plain vision transformer for 32x32 images: 64 patches of 4x4, width 192, depth 6. 2.7 million parameters."""

    def __init__(self, width: int = 192, depth: int = 6):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.position = nn.Parameter(torch.randn(1, 64, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, 3, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.blocks(x)).mean(1))


WORKLOADS = {"cifarnet, batch 64": (CifarNet, 64), "cifarnet, batch 256": (CifarNet, 256), "vit, batch 64": (ViT, 64)}


class UnderflowOverflow:
    """The way of transformers.debug_utils.DebugUnderflowOverflow: a forward hook on every module takes the smallest and
    largest magnitude of its weights, inputs and outputs to the host, and looks for NaN and inf in them."""

    def __init__(self, net: nn.Module):
        self.frames: collections.deque[list[str]] = collections.deque(maxlen=21)
        for name, module in net.named_modules():
            module.register_forward_hook(self._hook(name))

    @staticmethod
    def _line(name: str, x: Tensor) -> str:
        size = x.detach().abs()
        return f"{size.min():8.2e} {size.max():8.2e} {name}"

    def _hook(self, name: str):
        def hook(module: nn.Module, args: tuple, out: object) -> None:
            tensors = [(f"input[{i}]", x) for i, x in enumerate(args) if isinstance(x, Tensor)]
            tensors += [("output", out)] if isinstance(out, Tensor) else []
            parameters = list(module.named_parameters(recurse=False))
            self.frames.append([name, *(self._line(n, x) for n, x in (*parameters, *tensors))])
            for n, x in tensors:
                if x.isnan().any().item() or x.isinf().any().item():
                    raise FloatingPointError(f"{name} {n}")

        return hook


def contestants(build, batch: int, device: torch.device, dtype: torch.dtype) -> dict:
    """Name -> function that takes training step number i."""
    torch.manual_seed(0)
    original = build().to(device, memory_format=torch.channels_last)
    images = [torch.randn(batch, 3, 32, 32, device=device).to(memory_format=torch.channels_last) for _ in range(4)]
    labels = [torch.randint(0, CLASSES, (batch,), device=device) for _ in range(4)]
    scales = dtype is torch.float16

    def autocast():
        return torch.autocast(device.type, dtype)

    def stock(check=None, clip=False, anomaly=False, hooks=False):
        """The usual loop; `check`: called with the parameters after backward, False = skip the step."""
        model = Classifier(copy.deepcopy(original))
        own = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(own, lr=1e-4, fused=True)
        scaler = torch.amp.GradScaler(device.type, enabled=scales and clip)
        if hooks:
            UnderflowOverflow(model.net)

        def step(i: int) -> None:
            with torch.autograd.set_detect_anomaly(True) if anomaly else contextlib.nullcontext():
                with autocast():
                    loss, _ = model(images[i % 4], labels[i % 4])
                scaler.scale(loss).backward()
            if clip:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(own, 1.0)
            if check is None or check(own):
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        return step

    def ours(probe=False, look=False):
        """train.py's step. `probe`: at every step (--probe-every 1). `look`: see_state each step, not each 100th."""
        model = Classifier(copy.deepcopy(original))
        net = model.net
        optimizer = ClippedAdamW(param_groups(net, 0.01), lr=1e-4, clip=1.0)
        scaler = LossScaler(device.type, enabled=scales)
        guard = Guard(net, num_classes=CLASSES, device=device)

        def step(i: int) -> None:
            probes = Probes(net, device) if probe else None
            guard.open(i)
            guard.raise_flag("signal", 0)
            x, y = images[i % 4], labels[i % 4]
            y = guard.see_batch(x, y)
            with probes or contextlib.nullcontext():
                with autocast():
                    loss, metrics = model(x, y)
                guard.see_loss(loss)
                scaler.scale(loss).backward()
            sums = {"loss": loss.detach(), "acc1": metrics["acc1"].mean()}
            if probes:
                probes.warnings(float(scaler.scale_tensor))
            if look or i % 100 == 99:
                guard.see_state(param=dict(net.named_parameters()), optstate=dict(optimizer.adamw.state))
            bad = guard.decide()
            result = optimizer.step(grad_scale=scaler.scale_tensor, skip=bad)
            guard.close(result.found_inf, **sums, grad_norm=result.grad_norm, lr=result.lr, scale=scaler.scale_tensor,
                        updates=optimizer.updates)
            scaler.update(result.found_inf)
            optimizer.zero_grad()
            guard.verdict()

        return step

    return {
        "bare": stock(),
        "ours": ours(),
        "stock AMP recipe (clip)": stock(clip=True),
        "ours, state seen each step": ours(look=True),
        "ours, probes each step": ours(probe=True),
        "isnan().any() a parameter": stock(check=lambda own: not any(p.grad.isnan().any() for p in own)),
        "detect_anomaly": stock(anomaly=True),
        "underflow/overflow hooks": stock(hooks=True),
    }


FAST = ("bare", "ours", "stock AMP recipe (clip)")  # in every round


def measure(steps: dict, device: torch.device, seconds: float, least: int, block: int, slow_every: int) -> list[dict]:
    """Rounds of {name: milliseconds a step}, for `seconds` and at least `least` rounds."""
    sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    rounds: list[dict] = []
    done = collections.Counter()
    end = None
    while end is None or len(rounds) < least or time.perf_counter() < end:
        warm_up = end is None and done["bare"] < 2 * block
        if not warm_up and end is None:
            end = time.perf_counter() + seconds
        order = [name for name in steps if warm_up or name in FAST or len(rounds) % slow_every == 0]
        random.Random(len(rounds)).shuffle(order)
        samples = {}
        for name in order:
            sync()
            start = time.perf_counter()
            for _ in range(block):
                steps[name](done[name])
                done[name] += 1
            sync()
            samples[name] = (time.perf_counter() - start) * 1e3 / block
        if not warm_up:
            rounds.append(samples)
    return rounds


def spread(values: list[float]) -> dict:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return {"n": len(values), "median": middle, "quartiles": [low, high]}


def hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    models = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return f"{models[0].split(':')[1].strip() if models else platform.processor()}, {torch.get_num_threads()} threads"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=55.0, help="for each workload and precision")
    parser.add_argument("--block", type=int, help="steps timed together; default: 1, on a GPU 20")
    parser.add_argument("--slow-every", type=int, default=4, help="rounds between two samples of the costly peers")
    parser.add_argument("--only", nargs="*", help="workloads to run")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--smoke", action="store_true", help="batches of 8, two rounds, no file")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="Anomaly Detection")
    device = torch.device(args.device)
    block = args.block or (1 if args.smoke or device.type == "cpu" else 20)
    dtypes = [torch.bfloat16, *([torch.float16] if device.type == "cuda" else [])]  # fp16 on a CPU is emulated
    chosen = {name: work for name, work in WORKLOADS.items() if not args.only or name in args.only}
    if not chosen:
        parser.error(f"--only: choose from {', '.join(WORKLOADS)}")
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout
    record = {
        "bench": "guard_cost", "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit.strip(), "arguments": vars(args) | {"results": None, "block": block},
        "hardware": hardware(device), "torch": str(torch.__version__), "python": platform.python_version(),
        "milliseconds": {}, "ratios": {},
    }
    print(f"{record['hardware']}, torch {torch.__version__}, {block} step(s) a block; ratios to the bare loop")
    for name, (build, batch) in chosen.items():
        for dtype in dtypes:
            title = f"{name}, {str(dtype).removeprefix('torch.')}"
            steps = contestants(build, 8 if args.smoke else batch, device, dtype)
            rounds = measure(steps, device, 0 if args.smoke else args.seconds, 2, block, args.slow_every)
            record["milliseconds"][title] = rounds
            ratios = record["ratios"][title] = {}
            print(f"\n{title}\n  {'':28}{'n':>5}{'ms a step':>12}{'ratio':>9}   quartiles")
            for contestant in steps:
                ms = spread([r[contestant] for r in rounds if contestant in r])
                ratio = spread([r[contestant] / r["bare"] for r in rounds if contestant in r])
                ratios[contestant] = ratio
                low, high = ratio["quartiles"]
                verdict = ""
                if contestant == "ours" and not args.smoke:
                    goal = GOAL.get(device.type, 1.02)
                    verdict = f"   goal {goal}: {'met' if ratio['median'] <= goal else 'MISSED'}"
                print(f"  {contestant:28}{ratio['n']:5}{ms['median']:12.2f}{ratio['median']:9.3f}   "
                      f"{low:.3f} .. {high:.3f}{verdict}")
    if not args.smoke:
        args.results.mkdir(parents=True, exist_ok=True)
        path = args.results / f"guard_cost-{device.type}-{record['time'].replace(':', '')}.json"
        path.write_text(json.dumps(record) + "\n")
        print(f"\nraw samples: {path}")
    print(json.dumps({k: v for k, v in record.items() if k != "milliseconds"}))


if __name__ == "__main__":
    main()
