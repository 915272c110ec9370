"""
Every model really trained on CIFAR-10, by train.py's defaults for that model: what does its recipe reach?

    python bench/train_models.py --data-dir CIFAR10_FOLDER
    python bench/train_models.py --data-dir CIFAR10_FOLDER --models vit resnet18 --precisions fp32
    python bench/train_models.py --dataset imagefolder --data-dir TINY --models resnet18 swin-v2 --epochs 4

Each run is `train.py --model NAME --epochs N` in a folder of its own under --runs; N is the recipe's. A run that is
there already is not repeated, and one that was stopped goes on from its checkpoint. Each run leaves one raw file in
bench/results/trained: its recipe, its figures after each epoch, hardware, versions and commit. The figure of a run is
that of its last epoch, not of its best one. What a model has to show after its last epoch goes there too.

bench/recognised.py says how many of the diffusion model's samples a classifier recognises.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from models import MODELS  # noqa: E402

GOALS = {  # metric, goal, and what a model that has learnt nothing gets; these goals are for CIFAR-10
    "resnet18": ("val_acc1", 88.0, "10 (chance)"), "vit": ("val_acc1", 72.0, "10 (chance)"),
    "swin": ("val_acc1", 75.0, "10 (chance)"), "swin-v2": ("val_acc1", 75.0, "10 (chance)"),
    "vmamba": ("val_acc1", 75.0, "10 (chance)"), "vlm": ("val_exact_match", 60.0, "10 (chance)"),
    "slat_vae": ("val_mse", 0.016, "0.179 (background)"), "dit": ("val_loss", None, "1.0 (predicting 0)"),
}  # fmt: skip


def read(folder):
    """(header, events) of a run's metrics.jsonl, or (None, [])."""
    path = folder / "metrics.jsonl"
    header, *lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else [None]
    return header, lines


def done(folder):
    *_, last = [{}, *read(folder)[1]]
    return last.get("event") == "end" and last["status"] == "done"


def record(folder, epochs):
    """The raw file of a finished run."""
    header, lines = read(folder)
    recipe = {key: header["args"][key] for key in MODELS[header["model"]][1] if key in header["args"]}
    kept = [{key: value for key, value in line.items() if key not in ("event", "step")} for line in lines
            if "train_loss" in line and "event" not in line]
    events = [line for line in lines if line.get("event") in ("skip", "cure", "spike")]
    return {
        "bench": "train_models", "n": 1, "model": header["model"], "dataset": header["dataset"], "seed": header["seed"],
        "precision": header["precision"], "commit": header["commit"], "hardware": header["hardware"],
        "torch": header["torch"], "recipe": MODELS[header["model"]][1] | recipe | {"epochs": epochs},
        "epochs": kept, "events": events, "end": lines[-1],
        "resumed": sum(line.get("event") == "end" for line in lines) - 1,
    }  # fmt: skip


def train(model, precision, seed, args):
    """Run one training to its end, unless it is there. Returns its raw file's content."""
    folder = args.runs / f"{args.dataset}-{model}-{precision}-{seed}"
    epochs = args.epochs or MODELS[model][1]["epochs"]
    if not done(folder):
        flags = {"model": model, "dataset": args.dataset, "data-dir": args.data_dir, "precision": precision,
                 "seed": seed, "epochs": epochs, "out-dir": folder, "resume": "auto"}
        command = [sys.executable, str(ROOT / "train.py")]
        for name, value in flags.items():
            command += [f"--{name}", str(value)] if value is not None else []
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    args.results.mkdir(parents=True, exist_ok=True)
    row = record(folder, epochs)
    path = args.results / f"{args.dataset}-{model}-{row['precision']}-{seed}.json"
    path.write_text(json.dumps(row) + "\n")
    for shown in sorted((folder / "shown").glob("*"))[-1:]:
        shutil.copyfile(shown, path.with_suffix(shown.suffix))
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--data-dir")
    parser.add_argument("--models", nargs="+", default=list(GOALS), choices=GOALS)
    parser.add_argument("--precisions", nargs="+", default=["auto"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--epochs", type=float, help="default: the recipe's")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results" / "trained")
    args = parser.parse_args()
    print(f"{'model':<10}{'precision':<11}{'metric':<17}{'learnt nothing':<21}{'goal':>7}{'reached':>9}{'epochs':>8}"
          f"{'updates':>9}{'skipped':>9}")
    for model in args.models:
        metric, goal, nothing = GOALS[model]
        for precision in args.precisions:
            for seed in args.seeds:
                row = train(model, precision, seed, args)
                end, goal = row["end"], goal if args.dataset == "cifar10" else None
                print(f"{model:<10}{row['precision']:<11}{metric:<17}{nothing:<21}{goal or '-':>7}{end[metric]:>9.4g}"
                      f"{row['recipe']['epochs']:>8g}{end['updates']:>9}{end['skipped']:>9}", flush=True)
    print(json.dumps({"bench": "train_models", "dataset": args.dataset, "models": args.models,
                      "files": len(list(args.results.glob("*.json")))}))


if __name__ == "__main__":
    main()
