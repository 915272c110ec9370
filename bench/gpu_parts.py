"""
The parts of bench/gpu.py that are not benches themselves. Each is a table of rows.

    python bench/gpu_parts.py PART                  one of PARTS, at the end of this file
    python bench/gpu_parts.py PART --device cpu --smoke

A row is one measurement. Its "well" says whether all is as it should be. A part writes its raw file
after each row. A part that was cut short goes on with the next row; one that did not end well
repeats the rows that were not well.
"""

import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
import train as program
from bench import guard_cost, record
from bench.kill_resume import Job, differences, draw_images, result
from data import Dataset, batches, synthetic
from extras.graphs import StepGraph
from models import MODELS

ROOT = record.ROOT
CLASSES = [str(k) for k in range(10)]
NETS = ("cifarnet", "resnet18", "vit", "swin", "swin-v2", "vmamba", "dit", "slat_vae", "vlm")


def nets(args):
    return ("cifarnet-tiny", "vit-test") if args.smoke else NETS


def train(args, *more, **flags):
    """A row: the end of a run of train.py, its warnings, the seconds of its validations."""
    flags = {name.replace("_", "-"): value for name, value in flags.items()}
    few = {"batch-size": 8, "max-steps": 3} if args.smoke else {}
    flags = {"dataset": "synthetic", "device": args.device} | flags | few
    seconds, validate = [], program.validation.validate

    def timed(run):
        record.wait(run.device)
        began = time.perf_counter()
        warning = validate(run)
        record.wait(run.device)
        seconds.append(round(time.perf_counter() - began, 4))
        return warning

    with patch.object(program.validation, "validate", timed):
        _, end, lines = record.train_run(flags, *more)
    warnings = [line["text"] for line in lines if line.get("event") == "warning"]
    well = end.get("status") == "done"
    return end | {"warnings": warnings, "validations": seconds, "well": well}


# --- Bad samples in the data

EPOCH = 300  # steps
# Step: what is wrong with one of its images, the verdict, a part of the action. After a rejected
# step the next 50 are recorded, kernel by kernel; the fourth after them is a graph again.
FAULTS = {
    70: ("wild", "divergence", "one step alone"),
    75: ("wild", "divergence", "back to the weights"),
    140: ("label", "data", "never drawn again"),
    210: ("units", "precision", "kept in fp32"),
    280: ("pixel", "data", "never drawn again"),
}
# Two more channels, 0 in all other images. A fault of 255 in the first is 85,000, more than fp16
# holds ("units"). In the second it is 2.6e19, whose square fp32 does not hold ("pixel"), and a 1 is
# 1e17: every number is finite, and the variance of a BatchNorm is not ("wild").
DEVIATIONS = 3e-3, 1e-17


def spoiled(batch_size):
    """(The data set, {step: number of its bad image})."""
    count = EPOCH * batch_size
    images, labels = synthetic.draw(0, count + 200, seed=1)
    images = torch.cat([images, torch.zeros_like(images[:, :2])], 1)
    stream = batches.TrainBatches(images[:count], labels[:count], batch_size=batch_size)
    again = torch.cat([stream.global_indices(EPOCH + k) for k in range(EPOCH)]).tolist()
    places = {}
    for step, (fault, *_) in FAULTS.items():
        drawn = stream.global_indices(step - 1).tolist()
        # The statistics read every tenth image: take another. In the second epoch it comes late.
        bad = places[step] = max((i for i in drawn if i % 10), key=again.index)
        if fault == "label":
            labels[bad] = 77
        else:
            images[bad, 3 if fault == "units" else 4] = 1 if fault == "wild" else 255
    mean, std = batches.statistics(images[:, :3])
    split = (images[:count], labels[:count]), (images[count:], labels[count:])
    ones = [1.0] * len(DEVIATIONS)
    data = Dataset("spoiled", *split, classes=synthetic.CLASSES, mean=[*mean, 0.0, 0.0],
                   std=[*std, *ones])  # fmt: skip
    data.std[3:] = DEVIATIONS  # train.py refuses these with your own data set
    return data, places


def planted(args, precision, steps=2 * EPOCH, **flags):
    """Two epochs over data that has bad samples in it, with the CUDA graph on: rejections inside of
    replays, a healing, a turn back, a validation in between, and the same wild images again."""
    batch_size = 8 if args.smoke else 20
    data, places = spoiled(batch_size)
    replayed, call = set(), StepGraph.__call__

    def watched(graph, images, labels):
        call(graph, images, labels)
        if graph.graph:
            replayed.add(graph.take.args[0].step)

    flags |= {"device": args.device, "model": nets(args)[0], "precision": precision,
              "batch-size": batch_size, "max-steps": steps, "ckpt-every": 50}  # fmt: skip
    with (
        patch.object(program.prepare, "load", lambda *args, **options: data),
        patch.object(StepGraph, "__call__", watched),
    ):
        _, end, lines = record.train_run(flags)
    cures = {line["of_step"]: line for line in lines if line.get("event") == "cure"}
    if args.device == "cpu" or "RANK" in os.environ:  # no graph: any step will do
        replayed = {*FAULTS, *cures}
    wrong = []
    for step, (fault, verdict, action) in FAULTS.items():
        harmless = fault == "units" and precision != "fp16"
        cure = cures.get(step, {"verdict": "none", "action": "none", "samples": []})
        well = cure["verdict"] == verdict and action in cure["action"]
        well &= verdict != "data" or cure["samples"] == [places[step]]
        well &= step in replayed or step == 75  # which is recorded
        if step <= steps and not well and not harmless:
            wrong.append(f"step {step}, {fault}")
    if steps > EPOCH and not any(step in replayed for step in cures if step > EPOCH):
        wrong.append("no step was rejected in a replay after the validation")
    if end.get("status") != "done":
        wrong.append("the end")
    return {
        "well": not wrong,
        "wrong": wrong,
        "replays": len(replayed),
        "places": places,
        "cures": cures,
        "end": end,
    }


def one_of_two(args):
    """One process of the row of two ranks: NCCL refuses one GPU for both, so they use gloo."""
    if args.device == "cuda" and torch.cuda.device_count() < 2:
        os.environ["LOCAL_RANK"] = "0"
        dist.init_process_group("gloo")
    folder = Path(tempfile.gettempdir(), "run")  # the same on both
    row = planted(args, "bf16", 160, **{"out-dir": folder, "verify-every": 20})
    if os.environ["RANK"] == "0":
        print(json.dumps(row), flush=True)
    os._exit(0)  # gloo's threads sometimes abort a process that has ended well


def two_ranks():
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, *launch, *sys.argv], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": folder},
        )  # fmt: skip
    if done.returncode:
        return {"well": False, "code": done.returncode}
    return json.loads(done.stdout.splitlines()[-1])


def killed(args):
    """Killed with SIGKILL and resumed, beside the same run left alone: the same bits?"""
    with tempfile.TemporaryDirectory() as name:
        images = draw_images(Path(name, "images"))
        flags = ("--device", args.device, "--precision", "bf16", "--deterministic", "--batch-size",
                 20, "--max-steps", 100, "--ckpt-every", 2, "--model", nets(args)[0])  # fmt: skip
        whole, part = Path(name, "whole"), Path(name, "killed")
        codes = Job(images, whole, *flags).end()
        job = Job(images, part, *flags)
        trains = job.until('"step": 3')
        codes += [trains - 1, job.kill()[0] + signal.SIGKILL, *Job(images, part, *flags).end()]
        wrong = ["codes"] if any(codes) else differences(result(whole), result(part))
    return {"well": not wrong, "wrong": wrong, "codes": codes}


# --- What it costs

WAYS = ("bare", "ours", guard_cost.OWN, guard_cost.STOCK, "bare, CUDA graph", "ours, CUDA graph")
LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaMemcpy", "cudaMemset", "cudaGraphLaunch")


def step_of(args, name):
    """A step of a model, each way: kernels, launches, memory; and milliseconds, in turns."""
    device, row, steps = torch.device(args.device), {}, {}
    shape = (8 if args.smoke else 256, 3, 32, 32)
    makers = guard_cost.contestants(partial(MODELS[name][0], CLASSES, 32), shape, device)
    for way in [way for way in WAYS if device.type == "cuda" or "graph" not in way]:
        gc.collect()
        torch.cuda.empty_cache()
        before = memory()
        steps[way] = guard_cost.warm(makers[way])
        for kind, megabytes in memory().items():
            row[f"{way}: {kind}, MB"] = round(megabytes - before[kind], 3)
        for kind, count in counted(steps[way], device).items():
            row[f"{way}: {kind}"] = count
    rounds, block = (1, 1) if args.smoke else (5, 20)
    rows = record.in_turns(steps, device, lambda done: done < rounds, block)
    for way in steps:
        row[f"{way}: ms"] = round(record.spread([turn[way] for turn in rows])["median"], 3)
    return row | {"well": True}


def memory():
    """What tensors hold, and what a step and a graph took from the GPU."""
    gc.collect()
    held, taken = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    return {"held": held / 2**20, "taken": taken / 2**20}


def counted(step, device):
    """Kernels on the device and launches by the host; on a CPU operations. Prints the table."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as watched:
        step()
        record.wait(device)
    by_time = f"self_{device.type}_time_total"
    print(watched.key_averages().table(sort_by=by_time, row_limit=40, max_name_column_width=60))
    events = watched.events()
    if device.type == "cpu":
        return {"operations": sum(event.name.startswith("aten::") for event in events)}
    return {
        "kernels": sum(event.device_type.name == "CUDA" for event in events),
        "launches": sum(event.name.startswith(LAUNCHES) for event in events),
    }


# --- The parts: name -> function that returns {name of a row: function that makes it}


def tests(args):
    """All tests that name CUDA, a row a file."""

    def passed(path):
        words = [sys.executable, "-m", "pytest", "-q", "-k", "cuda", str(path)]
        code = subprocess.run(words, cwd=ROOT).returncode
        return {"well": code in (0, 5), "code": code}  # 5: no test

    files = [
        path
        for path in sorted((ROOT / "tests").glob("**/test_*.py"))
        if "cuda" in path.read_text() and (path.stem == "test_graphs" or not args.smoke)
    ]
    return {path.stem: partial(passed, path) for path in files}


def survival(args):
    rows = {precision: partial(planted, args, precision) for precision in ("bf16", "fp16")}
    return rows | {"two ranks": two_ranks, "killed and resumed": partial(killed, args)}


def models(args):
    """Every model for 25 steps: CUDA graph, verified twice."""
    row = partial(train, args, max_steps=25, verify_every=10)
    return {
        f"{name}, {precision}": partial(row, model=name, precision=precision)
        for name, precision in itertools.product(nets(args), ("bf16", "fp16", "O2"))
    }


def steps(args):
    return {name: partial(step_of, args, name) for name in nets(args)}


def runs(args):
    """The default run; fp16 beside bf16, large batches, compiled in the graph."""
    few = partial(train, args, max_steps=150, ckpt_every=150)
    names = ("cifarnet-tiny",) if args.smoke else ("cifarnet", "resnet50", "vit")
    dataset = "cifar10" if args.data_dir else "synthetic"
    rows = {f"whole, evaluated in {precision}":
            partial(train, args, data_dir=args.data_dir, dataset=dataset, eval_precision=precision)
            for precision in ("fp32", "same")}  # fmt: skip
    for name, precision in itertools.product(names, ("bf16", "fp16")):
        rows[f"{name}, {precision}"] = partial(few, model=name, precision=precision)
    for batch, graph in itertools.product((64, 1000, 2000), ("--cuda-graph", "--no-cuda-graph")):
        rows[f"batch {batch}, {graph}"] = partial(few, graph, model=names[0], batch_size=batch)
    if not args.smoke:  # minutes on a CPU
        rows["compiled, in the graph"] = partial(few, "--compile", "--cuda-graph")
    return rows


PARTS = {"survival": survival, "tests": tests, "runs": runs, "models": models, "steps": steps}


def main(argv=None):
    parser = record.arguments(__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--data-dir", type=Path, help="CIFAR-10")
    args = parser.parse_args(argv)
    if args.smoke:
        record.draw_few()
    if "RANK" in os.environ:
        one_of_two(args)
    head = record.begin(f"gpu_{args.part}", args, "rows")
    rows = head["rows"]
    for name, make in PARTS[args.part](args).items():
        if rows.get(name, {}).get("well"):  # an earlier process has it
            continue
        gc.collect()  # else the row before still holds memory in reference cycles
        if args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        try:
            rows[name] = make()
        except Exception as error:  # the other rows are worth as much
            rows[name] = {"well": False, "error": f"{type(error).__name__}: {error}"}
        print(f"{name}: {json.dumps(rows[name])}", flush=True)
        record.keep(head, args)
    wrong = [name for name in rows if not rows[name]["well"]]
    if not wrong:
        record.write(head, args, samples=("rows",))
    print(
        f"{args.part}: {len(rows) - len(wrong)} of {len(rows)} rows are well"
        + (f", not {', '.join(wrong)}" if wrong else "")
    )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
