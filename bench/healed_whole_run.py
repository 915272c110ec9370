"""
Does an fp16 run that overflows and is healed end where the same run in fp32 ends?

    python bench/healed_whole_run.py --data-dir CIFAR10_FOLDER      # 8 minutes on one core, where fp16 is emulated

Swin V1 with its attention as published and with grown queries and keys, as in bench/died_and_healed.py, for a whole run
of train.py with default flags: once in fp16, once in fp32, for each seed. Same start, same batches. The noise is what
two seeds in fp32 differ by.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import train  # noqa: E402
from bench import died_and_healed, record  # noqa: E402
from models import RECIPE  # noqa: E402


def run(precision: str, seed: int, args: argparse.Namespace) -> dict:
    """The end of one run, its figures after each epoch, and its events."""
    flags = {"model": "swin-published", "dataset": "cifar10", "data-dir": args.data_dir, "precision": precision,
             "seed": seed, "device": args.device, "batch-size": died_and_healed.BATCH, "epochs": args.epochs}
    with tempfile.TemporaryDirectory() as folder:
        argv = [text for name, value in flags.items() if value is not None for text in (f"--{name}", str(value))]
        train.main([*argv, "--out-dir", folder])
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    keep = ("epoch", "train_loss", "val_loss", "val_acc1")
    return {"precision": precision, "seed": seed, "end": lines[-1],
            "epochs": [{key: line[key] for key in keep} for line in lines if "train_loss" in line],
            "events": [line for line in lines if line.get("event") in ("skip", "cure", "spike")]}  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epochs", type=float, default=2.0)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--grown", type=float, default=142.0)
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    args = parser.parse_args(argv)
    train.MODELS["swin-published"] = (lambda names, size: died_and_healed.build(names, size, args.grown),
                                      RECIPE | {"lr": died_and_healed.LR})  # fmt: skip
    runs = [run(precision, seed, args) for seed in range(args.seeds) for precision in ("fp32", "fp16")]
    for one in runs:
        end = one["end"]
        print(f"{one['precision']}  seed {one['seed']}  accuracy {end['val_acc1']:.2f} %  loss {end['val_loss']:.4f}  "
              f"skipped {end['skipped']}  healed {', '.join(end['healed']) or 'nothing'}")  # fmt: skip
    device = torch.device(args.device)
    record.write(record.header("healed_whole_run", vars(args), device) | {"runs": runs}, args.results, device,
                 samples=("runs",))


if __name__ == "__main__":
    main()
