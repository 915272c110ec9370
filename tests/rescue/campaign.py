"""
The fault campaign: every place x every kind x every precision, one fault a run, in one process and
on one rank of two. After the bad numbers (nan, inf, big): flipped bits, memory that ends, a
compiler that makes a NaN, bad labels every 70 steps, a run that diverges with finite numbers, and
the moments at which nobody looks: before the first save, between two saves, at the last step, and
after the last validation.

    python tests/rescue/campaign.py                       one process; writes campaign-1.json
    python tests/rescue/campaign.py FILE PRECISION ...    only these, to another file
    torchrun --standalone --nproc_per_node=2 tests/rescue/campaign.py
                                                          the fault on rank 1 only

A cell holds when the step with the fault was rejected for the right reason (or the fault provably
did no harm), nothing non-finite is in any file, and the run went on to its end. test_campaign.py
asserts it of every cell.
"""

import contextlib
import io
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import checkpoint  # noqa: E402
import train  # noqa: E402
from data import Dataset, synthetic  # noqa: E402
from models import RECIPE  # noqa: E402
from rescue import inject, notice  # noqa: E402
from trainer import classes  # noqa: E402
from trainer import prepare as preparation  # noqa: E402

PLACES, PRECISIONS = inject.PLACES, ("fp32", "bf16", "O1", "O2")
STEP, STEPS = 6, 12
BAD = list(itertools.product(PLACES, inject.KINDS))
MORE = [(where, kind) for kind, places in inject.ONLY.items() for where in places]
LONG = [("label", "every 70"), ("lr", "diverging"), ("compiler", "nan")]  # of their own length
# Validation and saves are at steps 6 and 12. A fault in a step of these, of weights or moments.
MOMENTS = {"first": 1, "before a save": 5, "after a save": 7, "last but one": 11, "last": 12}
STATE = [(where, moment) for moment in MOMENTS for where in ("param", "optstate", "buffer")]
CELLS = [(*fault, precision) for fault in (*BAD, *MORE, *LONG, *STATE) for precision in PRECISIONS]
# Where a fault first shows. A parameter's and an activation's: by what they do to others.
SEEN_AS = {
    "input": {"input"},
    "label": {"label"},
    "act": {"loss", "grad", "buffer"},
    "loss": {"loss"},
    "grad": {"grad"},
    "param": {"param"},
    "buffer": {"buffer"},
    "optstate": {"optstate"},
    "scale": {"grad"},
}
COMPILE, CALLS = torch.compile, []


def miscompiled(model, **options):
    """What torch.compile returns if its code makes a NaN from step STEP on, compiled anew too."""

    def forward(*args):
        loss, metrics = model(*args)
        CALLS.append(model)
        return loss * (float("nan") if len(CALLS) >= STEP else 1.0), metrics

    return forward


def build(names, *_):
    return nn.Sequential(
        nn.Flatten(), nn.Linear(3072, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, len(names))
    )


def prepare():
    """A small network and few images; all state is looked at in every step but those of STATE, as
    a bad moment must not reach a weight."""
    train.MODELS["campaign"] = build, RECIPE | {"batch_size": 32}
    images, labels = synthetic.draw(0, 240, seed=1)
    names = [str(i) for i in range(10)]
    halves = (images[:200], labels[:200]), (images[200:], labels[200:])
    preparation.load = lambda *_, **__: Dataset("cifar10", *halves, names)
    # Pictures were nearly half of the time of a cell.
    train.report.draw_curves = train.report.draw_confusion = lambda path: None
    classes.TILE = 8  # of worst.png
    end = dist.destroy_process_group  # all groups but the one that every cell uses
    dist.destroy_process_group = lambda group=None: end(group) if group else None


def run_cell(where, kind, precision, folder, rank=None):
    """One run; on rank 0 the outcome as a dict, elsewhere {}."""
    on = "" if rank is None else f",rank={rank}"
    steps, every, more = STEPS, 5, "--verify-every 3"
    notice.CHECK_EVERY = 1
    spec = f"{kind}:{where}@step={STEP}{on}"
    if kind in MOMENTS:
        notice.CHECK_EVERY = 100  # as users run it
        spec = f"nan:{where}@step={MOMENTS[kind]}{on}"
        every, more = 6, "--verify-every 0"
    elif kind == "every 70":
        spec, steps = ";".join(f"big:label@step={step}{on}" for step in (20, 90, 160)), 200
    elif kind == "diverging":
        spec, steps = "", 120
        more = "--lr 30 --clip-grad 0 --warmup-updates 0 --max-cures 3"
    elif where == "compiler":
        spec, more = "", "--compile"
    out, err = io.StringIO(), io.StringIO()
    flags = (
        f"--model campaign --dataset cifar10 --device cpu --precision {precision} "
        f"--max-steps {steps} --log-every 1 --ckpt-every {every} {more}"
    )
    arguments = [*flags.split(), "--inject", spec, "--out-dir", str(folder)]
    torch.compile = miscompiled if where == "compiler" else COMPILE
    CALLS.clear()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = train.main(arguments)
        except SystemExit as end:
            code = end.code
    if int(os.environ.get("RANK", "0")):
        return {}
    cell = {"where": where, "kind": kind, "precision": precision, "code": code}
    if code == 2:
        return {**cell, "error": err.getvalue().strip()}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    events = {
        kind: [line for line in lines if line.get("event") == kind]
        for kind in ("skip", "cure", "warning")
    }
    files = [path for path in folder.glob("*.pt") if "bad_step" not in path.name]
    states = {path.name: torch.load(path, weights_only=True) for path in files}
    bad = [
        name
        for name, state in states.items()
        if not all(torch.isfinite(t).all() for _, t in checkpoint.named_tensors(state))
    ]
    return cell | {
        "summary": json.loads(out.getvalue().strip().splitlines()[-1]),
        "skipped": [line["step"] for line in events["skip"]],
        "reasons": sorted({reason for line in events["skip"] for reason in line["reasons"]}),
        "rank": events["skip"][0]["rank"] if events["skip"] else None,
        "cures": [line["verdict"] for line in events["cure"]],
        "cured_rank": [line["rank"] for line in events["cure"]],
        "warnings": [line["text"] for line in events["warning"]],
        "last step": states["last.pt"]["step"],
        "bad_files": bad,
    }


def judge_more(cell, ranks):
    """The same for what is no bad number in one step."""
    where, kind, summary = cell["where"], cell["kind"], cell["summary"]
    if kind == "diverging":  # turned back, and never "done" while it is lost
        ends_well = cell["code"] == 0 and summary["val_loss"] < 4
        turned = "divergence" in cell["cures"] or cell["code"] == 3
        holds = turned and (ends_well or cell["code"] == 3)
        return "" if holds else f"exit code {cell['code']}, {summary}"
    if cell["code"] != 0:
        return f"exit code {cell['code']}"
    if kind in MOMENTS:
        return judge_moment(cell)
    if kind == "every 70":
        named = cell["cures"].count("data") == 3 and len(summary["quarantined"]) == 3
        holds = named and cell["skipped"] == [20, 90, 160]
        return "" if holds else f"cures {cell['cures']}, {cell['skipped']}"
    if where == "compiler":
        holds = cell["cures"] == ["compiler"] and summary["healed"] == ["eager mode"]
        return "" if holds else f"cures {cell['cures']}"
    if kind == "oom":
        words = f"out of memory at step {STEP}: from now on 2 "
        said = [text for text in cell["warnings"] if text.startswith(words)]
        holds = said and summary["updates"] == STEPS
        return "" if holds else f"{summary['updates']} updates, {cell['warnings']}"
    if where in ("param", "optstate") and ranks == 1:
        return "n/a: no second replica" if not cell["cures"] else f"cures {cell['cures']}"
    if cell["cures"] != ["not reproducible"]:
        return f"cures {cell['cures']}"
    # Of two ranks the guilty one is known where a pass was run twice, or a weight alone differs.
    # O2's masters have rewritten a half weight before the ranks compare.
    weight_alone = where == "param" and cell["precision"] != "O2"
    known = where in ("act", "grad") or weight_alone
    expected = -1 if not known else ranks - 1
    return "" if cell["cured_rank"] == [expected] else f"named rank {cell['cured_rank']}"


def judge_moment(cell):
    """Bad state at a moment when nobody looks: the run ends well and whole, or says that not."""
    summary = cell["summary"]
    if cell["bad_files"]:
        return f"non-finite numbers in {cell['bad_files']}"
    if cell["last step"] != summary["steps"] or summary["updates"] < STEPS - 1:
        return f"last.pt is of step {cell['last step']}, {summary['updates']} updates"
    return "" if abs(summary["val_loss"]) < 1e4 else f"val_loss {summary['val_loss']}"


def judge(cell, ranks=1):
    """ "" if the cell holds, "n/a: why" if it cannot exist, else what is wrong."""
    where, kind, precision = cell["where"], cell["kind"], cell["precision"]
    if (where, kind) not in BAD:
        return judge_more(cell, ranks)
    if where == "scale" and precision in ("fp32", "bf16"):
        refused = cell["code"] == 2 and "no loss scale" in cell["error"]
        return "n/a: no loss scale" if refused else "not refused"
    if cell["code"] != 0:
        return f"exit code {cell['code']}"
    if cell["bad_files"]:
        return f"non-finite numbers in {cell['bad_files']}"
    if cell["summary"]["updates"] + len(cell["skipped"]) < STEPS:
        return "updates are missing"
    if not cell["skipped"]:  # the fault did no harm: all that it led to was finite, in files too
        return "" if kind == "big" else "not caught"
    if cell["skipped"][0] != STEP:
        return f"caught at step {cell['skipped'][0]}, planted at {STEP}"
    # 6e4 is a lawful fp16 weight: its effect is seen
    half_big = (where, kind, precision) == ("param", "big", "O2")
    wanted = SEEN_AS["act" if half_big else where]
    if not set(cell["reasons"]) & wanted:
        return f"named {cell['reasons']}, expected one of {sorted(wanted)}"
    # the half copy is rewritten
    healed_by_masters = where == "param" and precision == "O2" and not cell["cures"]
    of_state = where in ("param", "optstate")
    if of_state and cell["cures"] != ["weights"] and not healed_by_masters:
        return f"attributed as {cell['cures']}, expected weights"
    if len(cell["skipped"]) > 3:
        return f"{len(cell['skipped'])} steps lost"
    return ""


def main():
    prepare()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    # the same on both ranks: they have one parent
    folder = Path(tempfile.gettempdir()) / f"campaign-{os.getppid()}"
    guilty = 1 if ranks > 1 else None
    chosen = sys.argv[2:] or PRECISIONS
    cells = [
        run_cell(*cell, folder / str(i), rank=guilty)
        for i, cell in enumerate(CELLS)
        if cell[2] in chosen
    ]
    if rank:
        return 0
    shutil.rmtree(folder)
    rows = [{**cell, "holds": judge(cell, ranks)} for cell in cells]
    outcome = {f"{row['where']} {row['kind']} {row['precision']}": row["holds"] for row in rows}
    impossible = [key for key, why in outcome.items() if why.startswith("n/a")]
    broken = {key: why for key, why in outcome.items() if why and key not in impossible}
    target = ROOT / "bench" / "results" / f"campaign-{ranks}.json"
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else target
    command = ["git", "-C", ROOT, "rev-parse", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    about = {
        "ranks": ranks,
        "torch": str(torch.__version__),
        "commit": commit,
        "n": len(cells),
        "hardware": f"{platform.machine()} CPU, {os.cpu_count()} cores",
    }
    target.write_text(json.dumps({**about, "cells": rows}, indent=0))
    holds = len(cells) - len(impossible) - len(broken)
    print(
        json.dumps(
            {
                "ranks": ranks,
                "cells": len(cells),
                "holds": holds,
                "cannot exist": len(impossible),
                "broken": broken,
            }
        )
    )
    return int(bool(broken))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # gloo sometimes aborts a process that has ended well
