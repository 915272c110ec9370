"""
A bit flips in weights or moments of one rank of three: do they see, name, repair it?

    torchrun --standalone --nproc_per_node=3 bench/flips.py     100 flips in 25 runs, half a minute

Each run takes ten steps and meets four flips, each in a random tensor on a random rank. The fifth
would end the run. All numbers stay finite. It verifies every second step.
"""

import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
import train
from bench import record
from models import MODELS

RUNS, STEPS, MODEL = 25, (2, 4, 6, 8), "vit-test"


def one(folder, chance, names):
    """One run; a row for each flip. The same random numbers on every rank."""
    flips = []
    for step in STEPS:
        place = chance.choice(("param", "optstate"))
        name = chance.choice(names if place == "param" else ("exp_avg", "exp_avg_sq"))
        flips.append({"step": step, "place": place, "name": name, "rank": chance.randrange(3)})
    spec = [f"flip:{f['place']}:{f['name']}@step={f['step']},rank={f['rank']}" for f in flips]
    code, _, lines = record.train_run(
        {
            "model": MODEL,
            "dataset": "synthetic",
            "precision": "fp32",
            "device": "cpu",
            "batch-size": 48,
            "max-steps": 10,
            "verify-every": 2,
            "inject": ";".join(spec),
            "out-dir": folder,
        }
    )
    cures = {line["of_step"]: line for line in lines if line.get("event") == "cure"}
    for flip in flips:
        cure = cures.get(flip["step"], {})
        named = cure.get("rank") == flip["rank"]
        flip |= {"seen": bool(cure), "named": named, "action": cure.get("action", ""), "code": code}
    return flips


def main():
    args = record.arguments(__doc__, "cpu").parse_args()
    rank, chance, rows = int(os.environ["RANK"]), random.Random(0), []
    train.report.draw_curves = lambda path: None
    dist.destroy_process_group = lambda: None  # the next run meets the same processes
    net = MODELS[MODEL][0]([str(i) for i in range(10)], 32)
    names = [name for name, _ in net.named_parameters()]
    # the same on all ranks: torchrun is the parent
    folder = Path(tempfile.gettempdir()) / f"flips-{os.getppid()}"
    for i in range(1 if args.smoke else RUNS):
        rows += one(folder / str(i), chance, names)
        if rank == 0:
            repaired = sum(row["action"].startswith("repaired") for row in rows)
            print(
                f"{len(rows)} flips: {sum(row['seen'] for row in rows)} seen, "
                f"{sum(row['named'] for row in rows)} named, {repaired} repaired",
                flush=True,
            )
    if rank == 0:
        head = record.header("flips", args) | {"n": len(rows), "flips": rows}
        record.write(head, args, samples=("flips",))
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # gloo sometimes aborts a process that has ended well
