"""
Train every model with train.py's defaults for that model: what does its recipe reach?

    python bench/train_models.py --data-dir CIFAR10_FOLDER
    python bench/train_models.py --data-dir CIFAR10_FOLDER --models vit resnet18 --precisions fp32
    python bench/train_models.py --dataset imagefolder --data-dir TINY --models resnet18 swin-v2

Each run is `train.py --model NAME --epochs N` in a folder of its own under --runs; N is the
recipe's. It does not repeat a finished run; a stopped one goes on from its checkpoint. Each leaves
a raw file in bench/results/trained: its recipe, its figures after each epoch, hardware, versions
and commit. The figure of a run is that of its last epoch, not of its best one.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench import record as common
from models import MODELS

GOALS = {  # metric, goal for CIFAR-10, and what a model that has learnt nothing gets
    "resnet18": ("val_acc1", 88.0, "10 (chance)"),
    "vit": ("val_acc1", 72.0, "10 (chance)"),
    "swin": ("val_acc1", 75.0, "10 (chance)"),
    "swin-v2": ("val_acc1", 75.0, "10 (chance)"),
    "vmamba": ("val_acc1", 75.0, "10 (chance)"),
    "vlm": ("val_exact_match", 60.0, "10 (chance)"),
    "slat_vae": ("val_mse", 0.016, "0.179 (background)"),
    "dit": ("val_loss", None, "1.0 (predicting 0)"),
}
HEADER = ("model", "dataset", "seed", "precision", "commit", "hardware", "torch")


def read(folder):
    """(header, events) of a run's metrics.jsonl, or ({}, [])."""
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else "{}"
    header, *lines = [json.loads(line) for line in text.splitlines()]
    return header, lines


def done(folder):
    *_, last = [{}, *read(folder)[1]]
    return last.get("event") == "end" and last["status"] == "done"


def record(folder, epochs):
    """The raw file of a finished run."""
    header, lines = read(folder)
    recipe = dict(MODELS[header["model"]][1])
    recipe |= {key: header["args"][key] for key in recipe if key in header["args"]}
    rows = [line for line in lines if "train_loss" in line and "event" not in line]
    return {
        "bench": "train_models",
        "n": 1,
        **{key: header[key] for key in HEADER},
        "recipe": recipe | {"epochs": epochs},
        "epochs": [{key: row[key] for key in row if key != "step"} for row in rows],
        "events": [line for line in lines if line.get("event") in ("skip", "cure", "spike")],
        "end": lines[-1],
        "resumed": sum(line.get("event") == "end" for line in lines) - 1,
    }


def train(model, precision, seed, args):
    """Run one training to its end, unless it is there. Returns its raw file's content."""
    folder = args.runs / f"{args.dataset}-{model}-{precision}-{seed}"
    epochs = args.epochs or MODELS[model][1]["epochs"]
    if not done(folder):
        flags = {"model": model, "dataset": args.dataset, "data-dir": args.data_dir,
                 "precision": precision, "seed": seed, "epochs": epochs, "out-dir": folder,
                 "resume": "auto"}  # fmt: skip
        words = [f"--{name}={value}" for name, value in flags.items() if value is not None]
        command = [sys.executable, str(common.ROOT / "train.py"), *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    row = record(folder, epochs)
    path = args.results / f"{args.dataset}-{model}-{row['precision']}-{seed}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(row) + "\n")
    for shown in sorted((folder / "shown").glob("*"))[-1:]:  # what it shows after its last epoch
        shutil.copyfile(shown, path.with_suffix(shown.suffix))
    return row


def main():
    parser = common.arguments(__doc__)
    parser.set_defaults(results=common.RESULTS / "trained")
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--data-dir")
    parser.add_argument("--models", nargs="+", default=list(GOALS), choices=GOALS)
    parser.add_argument("--precisions", nargs="+", default=["auto"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--epochs", type=float, help="default: the recipe's")
    parser.add_argument("--runs", type=Path, default=common.ROOT / "runs")
    args = parser.parse_args()
    for model in args.models:
        metric, goal, nothing = GOALS[model]
        goal = goal if args.dataset == "cifar10" else None
        for precision in args.precisions:
            for seed in args.seeds:
                row = train(model, precision, seed, args)
                end = row["end"]
                print(
                    f"{model:10}{row['precision']:6}{metric} {end[metric]:.4g} after "
                    f"{row['recipe']['epochs']:g} epochs (goal {goal or '-'}, learnt nothing "
                    f"{nothing}), {end['updates']} updates, {end['skipped']} skipped",
                    flush=True,
                )


if __name__ == "__main__":
    main()
