"""
The precision ladder: fp32, tf32, bf16, O1, O2, O3 on one recipe, and beside them the way without any net.

    python bench/precision_ladder.py                  # about 4 minutes on 2 CPU cores, a minute on a GPU
    python bench/precision_ladder.py --dataset cifar10 --data-dir DIR --steps 1500 --seeds 0 1 2 3 4
    python bench/precision_ladder.py --smoke          # seconds: does it run?

Each rung is `train.py --precision ...` with its default recipe, called in this process; what it refuses stands in the
table with its reason. `raw half weights` is how the speed records on CIFAR-10 are run (airbench): the network itself in
half precision, its norms in fp32, SGD on the half weights, and no autocast, masters, loss scale, clipping or check. It
takes the same batches in its own plain loop, with airbench's optimizer and schedule, so it is another recipe: read its
accuracy as what such a recipe reaches in these few steps, and its speed beside `O2, no graph`, for it launches kernel
by kernel, where train.py makes one CUDA graph of cifarnet's step.

Images a second are of training alone, after each rung has warmed up, with train.py's last save; ratios are taken
within a seed. Memory is the peak of a few steps kernel by kernel, data included, on CUDA only: a process has one
high-water mark. A rung that the machine can only emulate is left out, and the table says so.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import data  # noqa: E402
import report  # noqa: E402
import train  # noqa: E402
from amp_policy import Capabilities, capabilities  # noqa: E402
from bench.record import header, spread, write  # noqa: E402
from data.batches import TrainBatches, place, val_batches  # noqa: E402
from models.classifier import Classifier  # noqa: E402

RUNGS = {
    "fp32": ("--precision", "fp32"),
    "tf32": ("--precision", "tf32"),
    "bf16": ("--precision", "bf16"),
    "O1 (fp16)": ("--precision", "O1"),
    "O2": ("--precision", "O2"),
    "O2, no graph": ("--precision", "O2", "--no-cuda-graph"),
    "O3": ("--precision", "O3"),  # with Adam's own eps, 1e-8
    "O3, eps 1e-4": ("--precision", "O3", "--adam-eps", "1e-4"),
}
RAW = "raw half weights"


def left_out(rung: str, caps: Capabilities) -> str:
    """Why this machine cannot run a rung for what it is; "" if it can. (O3 with eps 1e-8 is refused before it runs.)"""
    if rung == "tf32" and not (caps.sm and caps.sm >= (8, 0)):
        return f"{caps} has no TF32"
    if caps.device == "cpu" and rung in ("O1 (fp16)", "O2", "O2, no graph", "O3, eps 1e-4"):
        return "a CPU only emulates fp16, about 100 times slower"
    if caps.device == "cpu" and rung in ("bf16", RAW) and not caps.cpu_bf16:
        return f"this {caps.name} processor only emulates bf16"
    return ""


def watch_memory() -> list[tuple[str, int]]:
    """Hook into train.py where it wraps its model and where it evaluates: the first entry is the peak between."""
    peaks, wrap, evaluate = [], train.prepare.wrap, train.validation.evaluate

    def begin(*args: object) -> nn.Module:
        peaks.clear()
        torch.cuda.reset_peak_memory_stats()
        return wrap(*args)

    def end(*args: object) -> dict:
        peaks.append(("peak_mb", torch.cuda.max_memory_allocated() >> 20))
        return evaluate(*args)

    train.prepare.wrap, train.validation.evaluate = begin, end
    return peaks


def through_train(flags: tuple[str, ...], steps: int, seed: int, device: torch.device) -> dict:
    """What train.py's last line says; where it refuses, its sentence as "refused"."""
    out, err = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            train.main([*flags, "--max-steps", str(steps), "--seed", str(seed), "--device", device.type,
                        "--ckpt-every", str(steps), "--out-dir", folder])
        except SystemExit:
            why = err.getvalue().strip().removeprefix("train.py: ")
            return {"refused": why, "status": why, "precision": flags[1], "healed": [], "skipped": 0,
                    "images_per_second": 0.0}
    return json.loads(out.getvalue().splitlines()[-1])


def raw_half_weights(loaded: tuple, steps: int, seed: int, device: torch.device) -> dict:
    """airbench's step (legacy/airbench94.py, numbers and all), with nothing of ours but the batches and the network."""
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
    (images, labels), (val_images, val_labels), names, _ = loaded
    build, recipe = train.MODELS["cifarnet"]
    B = recipe["batch_size"]
    torch.manual_seed(seed)
    stream = TrainBatches(place(images, device), labels, batch_size=B, seed=seed, device=device)
    net = build(names, images.shape[-1])
    net.init_from_data(stream.normalize(images[:: max(10, len(images) // 5000)]))
    net.to(device, dtype, memory_format=torch.channels_last)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.float()
    model = Classifier(net, label_smoothing=0.2)
    norms, others = ([p for name, p in net.named_parameters() if p.requires_grad and ("norm" in name) == wanted]
                     for wanted in (True, False))
    kilostep = 1024 * (1 + 1 / (1 - 0.85))  # by what momentum 0.85 enlarges a step, for 1024 images
    lr, decay = 11.5 / kilostep, 0.0153 * B / kilostep
    groups = [{"params": norms, "lr": 64 * lr, "weight_decay": decay / (64 * lr)},
              {"params": others, "lr": lr, "weight_decay": decay / lr}]
    optimizer = torch.optim.SGD(groups, momentum=0.85, nesterov=True)
    top = 0.23 * steps
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min(0.2 + 0.8 * i / top, 1 - 0.93 * (i - top) / (steps - top))
    )
    lost = torch.zeros((), device=device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for step in range(steps):
        x, y = stream.at(step)
        loss, _ = model(x.to(dtype), y)
        (loss * B).backward()  # the sum over the batch, which is the only loss scale there is
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        lost += ~loss.isfinite()
    lost = int(lost)  # waits for the device
    seconds = time.perf_counter() - start
    memory = torch.cuda.max_memory_allocated() >> 20 if device.type == "cuda" else 0
    model.eval()
    with torch.no_grad():
        val = val_batches(place(val_images, device), val_labels, stream.normalize, batch_size=500, device=device)
        hits = sum(model(x.to(dtype), y)[1]["acc1"].sum().item() for x, y in val)
    status = f"done, {lost} non-finite losses into the weights" if lost else "done"
    return {"status": status, "precision": str(dtype)[6:], "healed": [], "skipped": 0,
            "val_acc1": hits / len(val_labels), "images_per_second": steps * B / seconds, "peak_mb": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dataset", default="synthetic", choices=["synthetic", "cifar10"])
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--steps", type=int, help="default: 125 on a GPU, 15 on a CPU")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: 0 1 2 on a GPU, 0 1 on a CPU")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--smoke", action="store_true", help="two steps, one seed, few images, no file")
    args = parser.parse_args()
    device, caps = torch.device(args.device), capabilities(args.device)
    args.steps = 2 if args.smoke else args.steps or (125 if device.type == "cuda" else 15)
    args.seeds = [0] if args.smoke else args.seeds or list(range(3 if device.type == "cuda" else 2))
    if args.smoke:
        loaded = *data.synthetic.load(120, 100), "synthetic"
        build, recipe = train.MODELS["cifarnet"]
        train.MODELS["cifarnet"] = build, recipe | {"batch_size": 50}
    else:
        loaded = data.load(args.dataset, args.data_dir, iter)
    train.prepare.load = lambda *_: loaded  # once for all runs
    report.draw_curves = lambda path: None  # half a second each, and nobody looks

    notes = {rung: f"left out: {why}" for rung in (*RUNGS, RAW) if (why := left_out(rung, caps))}
    runs = {rung: [] for rung in (*RUNGS, RAW) if rung not in notes}
    peaks = watch_memory() if device.type == "cuda" else []

    def run(rung: str, steps: int, seed: int, *flags: str) -> dict:
        gc.collect()  # what the run before has left in reference cycles would count as this one's memory
        if rung == RAW:
            return raw_half_weights(loaded, steps, seed, device)
        return {"peak_mb": 0} | through_train((*RUNGS[rung], *flags), steps, seed, device) | dict(peaks[:1])

    memory = {}
    for rung in list(runs):  # two steps of each: the warm-up, its memory, and whether it runs at all
        first = run(rung, 2, 0, "--no-cuda-graph")
        memory[rung] = first["peak_mb"] or None
        if "refused" in first:
            notes[rung] = f"refused: {first['refused']}"
            del runs[rung]
    record = header("precision_ladder", vars(args), device) | {"n": len(args.seeds), "rungs": {}, "runs": runs}
    batch = train.MODELS["cifarnet"][1]["batch_size"]
    print(f"cifarnet, {loaded[3]}, {args.steps} steps of {batch} images, n = {len(args.seeds)} seeds; "
          f"{record['hardware']}, torch {record['torch']}", flush=True)
    for seed in args.seeds:
        for rung in random.Random(seed).sample(list(runs), len(runs)):
            runs[rung].append({"seed": seed} | run(rung, args.steps, seed))

    print(f"\n{'':18}{'images/s':>10}{'/ fp32':>8}{'peak MB':>9}{'accuracy, % (half spread)':>28}{'skipped':>9}")
    for rung in (*RUNGS, RAW):
        if rung in notes:
            record["rungs"][rung] = notes[rung]
            print(f"{rung:18}{notes[rung]}")
            continue
        speeds, scores = ([r[key] for r in runs[rung] if key in r] for key in ("images_per_second", "val_acc1"))
        ratios = [a / b["images_per_second"] for a, b in zip(speeds, runs["fp32"], strict=True)]
        ends = {f"{r['status']} in {r['precision']}{' after healing' * bool(r['healed'])}" for r in runs[rung]}
        row = record["rungs"][rung] = {
            "images_per_second": spread(speeds), "speed / fp32": spread(ratios), "ended": sorted(ends),
            "peak_mb": memory[rung],
            "val_acc1": statistics.mean(scores) if scores else None,  # a run that diverged has none
            "half_spread": (max(scores) - min(scores)) / 2 if scores else None,
            "skipped": sum(r["skipped"] for r in runs[rung]),
        }
        accuracy = f"{row['val_acc1']:.2f} ({row['half_spread']:.2f})" if scores else "-"
        print(f"{rung:18}{row['images_per_second']['median']:10.0f}{row['speed / fp32']['median']:8.2f}"
              f"{memory[rung] or '-':>9}{accuracy:>28}{row['skipped']:>9}  {'; '.join(row['ended'])}")
    if args.smoke:
        print(json.dumps({k: v for k, v in record.items() if k != "runs"}))
    else:
        write(record, args.results, device, samples=("runs",))


if __name__ == "__main__":
    main()
