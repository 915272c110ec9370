"""
What --verify-every costs at its default, once an epoch: seconds of a verification / seconds of an epoch's steps.

    python bench/verify_cost.py            three models, two minutes on two cores

A verification is a pass of 32 images, twice (its first in a process: three times), and a checksum of weights and
moments, which several ranks compare. Steps and verifications take turns in one process; an epoch has 50,000 images.
"""

import contextlib
import io
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import flags  # noqa: E402
import train  # noqa: E402
from bench.record import header, write  # noqa: E402
from data import NAMES  # noqa: E402
from models import MODELS  # noqa: E402
from rescue import verify  # noqa: E402

IMAGES, ROUNDS = 50_000, 8


def seconds(function, device):
    began = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def measure(model: str, folder: str) -> dict:
    args = flags.parse(["--model", model, "--dataset", "synthetic", "--max-steps", "1000", "--out-dir", folder,
                        "--no-cuda-graph"], "", MODELS, NAMES)
    with contextlib.redirect_stdout(io.StringIO()):
        run = train.setup(args)
    images, labels = run.stream.at(0)
    run.model.train()
    actions = {
        "step": lambda: train.train_step(run, images, labels),
        "pass twice": lambda: verify.twice(run, images, labels),
        "checksum": lambda: verify.checksums(verify.replica(run).values()).sum().item(),
    }
    rounds = []
    for number in range(ROUNDS + 2):
        row = {}
        for name, action in actions.items():
            if name == "step":
                run.guard.open(number)
            row[name] = seconds(action, run.device)
            if name == "step":
                run.guard.verdict()
        rounds.append(row)
    medians = {name: statistics.median(row[name] for row in rounds[2:]) for name in actions}
    epoch = IMAGES // args.batch_size * medians["step"]
    return {"share": (medians["pass twice"] + medians["checksum"]) / epoch, "medians": medians, "n": ROUNDS,
            "batch_size": args.batch_size, "precision": run.policy.name, "rounds": rounds[2:]}


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record = header("verify_cost", {"rounds": ROUNDS}, device) | {"goal": 0.005, "models": {}}
    for model in ("cifarnet", "vit", "resnet18"):
        with tempfile.TemporaryDirectory() as folder:
            row = record["models"][model] = measure(model, f"{folder}/run")
        print(f"{model:10} {row['precision']}  a step {row['medians']['step']:.3f} s, a verification "
              f"{row['medians']['pass twice'] + row['medians']['checksum']:.3f} s: {row['share']:.2%} of an epoch")
    write(record, ROOT / "bench" / "results", device, samples=("models",))


if __name__ == "__main__":
    main()
