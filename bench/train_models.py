"""
Every model really trained, in bf16 and in fp32, two seeds each: is the end within noise?

    python bench/train_models.py --data-dir CIFAR10_FOLDER
    python bench/train_models.py --dataset imagefolder --data-dir TINY --models vit swin vmamba resnet18 --epochs 4

Each run is `train.py` with default flags but these, in a folder of its own under --runs. A run that is there already is
not repeated, so the bench goes on where it was stopped. The table holds mean and half the difference of the two seeds;
every run's loss curve goes into bench/results, and what the first seed's model has to show into bench/results/shown.
"""

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODELS = {  # the metric, and what a model that has learnt nothing gets: chance; predicting 0; a grey picture
    "cifarnet": "val_acc1", "resnet18": "val_acc1", "vit": "val_acc1", "swin": "val_acc1", "swin-v2": "val_acc1",
    "vmamba": "val_acc1", "dit": "val_loss", "slat_vae": "val_mse", "vlm": "val_exact_match",
}


def summary(folder):
    """The last line of a finished run, or None."""
    path = folder / "metrics.jsonl"
    last = json.loads(path.read_text().splitlines()[-1]) if path.exists() else {}
    return last if last.get("event") == "end" and last["status"] == "done" else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--data-dir")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp32"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    args = parser.parse_args()
    rows = []
    for model in args.models:
        for seed in args.seeds:
            for precision in args.precisions:
                folder = args.runs / f"{args.dataset}-{model}-{precision}-{seed}-{args.epochs:g}"
                if not (end := summary(folder)):
                    command = [sys.executable, str(ROOT / "train.py"), "--model", model, "--dataset", args.dataset,
                               "--precision", precision, "--seed", str(seed), "--epochs", str(args.epochs),
                               "--out-dir", str(folder), "--resume", "auto"]
                    command += ["--data-dir", args.data_dir] if args.data_dir else []
                    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                    end = summary(folder)
                header, *lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
                curve = [[line["step"], float(line["loss"])] for line in lines if "lr" in line and "event" not in line]
                rows.append({"seed": seed, "epochs": args.epochs, "hardware": header["hardware"],
                             "torch": header["torch"], "commit": header["commit"], **end})
                print(json.dumps(rows[-1]), flush=True)
                rows[-1]["curve"] = curve
                for shown in sorted((folder / "shown").glob("*"))[-1:] if seed == args.seeds[0] else ():
                    copy = args.results / "shown" / f"{args.dataset}-{model}-{precision}{shown.suffix}"
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(shown, copy)

    print(f"\n{args.dataset}, {args.epochs:g} epochs, {len(args.seeds)} seeds: mean (half of the spread)")
    print(f"  {'':<10}{'metric':<18}" + "".join(f"{p:>22}" for p in args.precisions) + f"{'skipped':>9}")
    for model in args.models:
        cells = []
        for precision in args.precisions:
            ends = [r[MODELS[model]] for r in rows if (r["model"], r["precision"]) == (model, precision)]
            cells.append(f"{statistics.mean(ends):.4g} ({(max(ends) - min(ends)) / 2:.2g})")
        skipped = sum(r["skipped"] for r in rows if r["model"] == model)
        print(f"  {model:<10}{MODELS[model]:<18}" + "".join(f"{cell:>22}" for cell in cells) + f"{skipped:>9}")
    record = {"bench": "train_models", "dataset": args.dataset, "n": len(args.seeds),
              "python": platform.python_version(), "runs": rows}
    args.results.mkdir(parents=True, exist_ok=True)
    path = args.results / f"train_models-{args.dataset}-{args.epochs:g}.json"
    old = json.loads(path.read_text())["runs"] if path.exists() else []
    kept = [r for r in old if r["model"] not in args.models]
    path.write_text(json.dumps(record | {"runs": kept + rows}) + "\n")
    print(json.dumps({"bench": "train_models", "file": path.name, "runs": len(kept + rows)}))


if __name__ == "__main__":
    main()
