"""
The precision ladder: fp32, tf32, bf16, O1, O2 and O3 on one recipe.

    python bench/precision_ladder.py                 5 minutes on 2 CPU cores, a minute on a GPU
    python bench/precision_ladder.py --dataset cifar10 --data-dir DIR --steps 1500 --seeds 5

Each rung is `train.py --precision ...` with its default recipe, called in this process; if it
refuses, the table gives the reason. The bench leaves out a rung that the machine can only emulate,
and says so. Images a second count training alone, after each rung has warmed up; ratios are within
a seed. Memory is the peak of a run, on CUDA only.
"""

import gc
import random
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from amp_policy import capabilities
from bench import record

RUNGS = {
    "fp32": ("--precision=fp32",),
    "tf32": ("--precision=tf32",),
    "bf16": ("--precision=bf16",),
    "O1 (fp16)": ("--precision=O1",),
    "O2": ("--precision=O2",),
    "O2, no graph": ("--precision=O2", "--no-cuda-graph"),
    "O3": ("--precision=O3",),  # with Adam's own eps, 1e-8
    "O3, eps 1e-4": ("--precision=O3", "--adam-eps=1e-4"),
}


def left_out(rung, caps):
    """Why this machine cannot run a rung for what it is; "" if it can.

    O3 with eps 1e-8 is refused before it runs.
    """
    if rung == "tf32" and not (caps.sm and caps.sm >= (8, 0)):
        return f"{caps} has no TF32"
    if caps.device == "cpu" and rung.startswith(("O1", "O2", "O3,")):
        return "a CPU only emulates fp16, about 100 times slower"
    if caps.device == "cpu" and rung == "bf16" and not caps.cpu_bf16:
        return f"this {caps.name} processor only emulates bf16"
    return ""


def main(argv=None):
    parser = record.arguments(__doc__)
    parser.add_argument("--model", default="cifarnet")
    parser.add_argument("--dataset", default="synthetic")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--steps", type=int, help="default: 125 on a GPU, 15 on a CPU")
    parser.add_argument("--seeds", type=int, help="how many; default: 3 on a GPU, 2 on a CPU")
    args = parser.parse_args(argv)
    caps, cuda = capabilities(args.device), args.device == "cuda"
    args.steps = 2 if args.smoke else args.steps or (125 if cuda else 15)
    if args.smoke:
        record.draw_few()
    args.seeds = 1 if args.smoke else args.seeds or (3 if cuda else 2)

    def run(rung, steps, seed):
        gc.collect()  # else the run before still holds memory in reference cycles
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        flags = {"model": args.model, "dataset": args.dataset, "data-dir": args.data_dir,
                 "device": args.device, "max-steps": steps, "seed": seed, "ckpt-every": steps,
                 "batch-size": 50 if args.smoke else None}  # fmt: skip
        return record.train_run(flags, *RUNGS[rung])[1]

    head = record.begin("precision_ladder", args, n=args.seeds) | {"rungs": {}}
    notes = {rung: f"left out: {why}" for rung in RUNGS if (why := left_out(rung, caps))}
    for rung in [rung for rung in RUNGS if rung not in notes]:  # the warm-up
        first = run(rung, 2, 0)
        if "refused" in first:
            notes[rung] = f"refused: {first['refused']}"
    runs = head.setdefault("runs", {rung: [] for rung in RUNGS if rung not in notes})
    for seed in range(args.seeds):
        for rung in random.Random(seed).sample(list(runs), len(runs)):
            if len(runs[rung]) == seed:
                runs[rung].append({"seed": seed} | run(rung, args.steps, seed))
                record.keep(head, args)

    print(
        f"{args.model}, {args.steps} steps, n = {args.seeds} seeds; {head['hardware']}, torch "
        f"{head['torch']}\n\n{'':14}{'images/s':>10}{'/ fp32':>8}{'peak MB':>9}"
        f"{'accuracy, % (half spread)':>28}{'skipped':>9}"
    )
    for rung in RUNGS:
        if rung in notes:
            head["rungs"][rung] = notes[rung]
            print(f"{rung:14}{notes[rung]}")
            continue
        speeds = [end["images_per_second"] for end in runs[rung]]
        scores = [end["val_acc1"] for end in runs[rung] if "val_acc1" in end]  # unless it diverged
        ratios = [a / b["images_per_second"] for a, b in zip(speeds, runs["fp32"], strict=True)]
        row = head["rungs"][rung] = {
            "images_per_second": record.spread(speeds),
            "speed / fp32": record.spread(ratios),
            "ended": sorted({f"{end['status']} in {end['precision']}" for end in runs[rung]}),
            "peak_mb": max(end["peak_memory_mb"] for end in runs[rung]) if cuda else None,
            "val_acc1": statistics.mean(scores) if scores else None,
            "half_spread": (max(scores) - min(scores)) / 2 if scores else None,
            "skipped": sum(end["skipped"] for end in runs[rung]),
        }
        accuracy = f"{row['val_acc1']:.2f} ({row['half_spread']:.2f})" if scores else "-"
        print(
            f"{rung:14}{row['images_per_second']['median']:10.0f}"
            f"{row['speed / fp32']['median']:8.2f}{row['peak_mb'] or '-':>9}{accuracy:>28}"
            f"{row['skipped']:>9}  {'; '.join(row['ended'])}"
        )
    record.write(head, args, samples=("runs",))


if __name__ == "__main__":
    main()
