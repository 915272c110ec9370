"""
The parts of bench/gpu.py that are no bench of their own. Each is a table of rows.

    python bench/gpu_parts.py PART                  one of PARTS, at the end of this file
    python bench/gpu_parts.py PART --device cpu --smoke

A row is one measurement. It says "well": whether all is as it should be. The raw file is written
after each row. A part that was cut short goes on with the next row, and a part that did not end
well takes those rows again that were not well.
"""

import functools
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
from data import Dataset, batches, synthetic
from extras.graphs import StepGraph
from models import MODELS, wrap

ROOT = record.ROOT
CLASSES = [str(k) for k in range(10)]
NETS = ("cifarnet", "resnet18", "vit", "swin", "swin-v2", "vmamba", "dit", "slat_vae", "vlm")
KEPT = ("status", "precision", "steps", "skipped", "healed", "val_acc1", "val_loss", "seconds",
        "images_per_second", "peak_memory_mb", "refused")  # fmt: skip


def nets(args):
    return ("cifarnet-tiny", "vit-test") if args.smoke else NETS


def train(args, *more, **flags):
    """A row: what the end of a run of train.py says."""
    flags = {name.replace("_", "-"): value for name, value in flags.items()}
    few = {"batch-size": 8, "max-steps": 3} if args.smoke else {}
    flags = {"dataset": "synthetic", "device": args.device} | flags | few
    end = record.train_run(flags, *more)[1]
    return {key: end[key] for key in KEPT if key in end} | {"well": end.get("status") == "done"}


# --- Bad samples in the data

EPOCH = 300  # steps
# Step: what is wrong with one of its images. After a rejected step the next 50 are recorded, kernel
# by kernel, and the graph is recorded anew at the fourth after them.
FAULTS = {70: "wild", 75: "wild", 140: "label", 210: "units", 280: "pixel"}
VERDICTS = {"wild": "divergence", "label": "data", "units": "precision", "pixel": "data"}
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
    for step, fault in FAULTS.items():
        drawn = stream.global_indices(step - 1).tolist()
        # Every tenth image is looked at before the first step. In the second epoch it comes late.
        bad = places[step] = max((i for i in drawn if i % 10), key=again.index)
        if fault == "label":
            labels[bad] = 77
        else:
            images[bad, 3 if fault == "units" else 4] = 1 if fault == "wild" else 255
    mean, std = batches.statistics(images[:, :3])
    split = (images[:count], labels[:count]), (images[count:], labels[count:])
    data = Dataset("spoiled", *split, classes=synthetic.CLASSES, mean=[*mean, 0.0, 0.0],
                   std=[*std, *DEVIATIONS])  # fmt: skip
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

    flags |= {"device": args.device, "model": "cifarnet-tiny" if args.smoke else "cifarnet",
              "precision": precision, "batch-size": batch_size, "max-steps": steps,
              "ckpt-every": 50}  # fmt: skip
    with (
        patch.object(program.prepare, "load", lambda *args, **options: data),
        patch.object(StepGraph, "__call__", watched),
    ):
        _, end, lines = record.train_run(flags)
    events = [line for line in lines if line.get("event") in ("skip", "cure")]
    in_graph = args.device == "cuda" and "RANK" not in os.environ  # one process has one
    wrong = list(judged(precision, steps, places, events, replayed if in_graph else None))
    if end.get("status") != "done":
        wrong.append(f"ended with {end}")
    return {"well": not wrong, "wrong": wrong, "replays": len(replayed), "places": places,
            "events": events, "end": {key: end[key] for key in KEPT if key in end}}


def judged(precision, steps, places, events, replayed):
    """What is not as it should be: sentences. `replayed`: steps, or None where there is no graph"""
    rejected = {event["step"] for event in events if event["event"] == "skip"}
    cures = {event["of_step"]: event for event in events if event["event"] == "cure"}
    for step, fault in FAULTS.items():
        harmless = fault == "units" and precision != "fp16"
        if step > steps or harmless:
            continue
        cure = cures.get(step, {"verdict": "missing", "samples": []})
        if step not in rejected:
            yield f"step {step} ({fault}) was not rejected"
        if replayed is not None and step != 75 and step not in replayed:
            yield f"step {step} ({fault}) was no replay"
        if cure["verdict"] != VERDICTS[fault]:
            yield f"step {step} ({fault}): the verdict is {cure['verdict']}"
        if cure["verdict"] == "data" and cure["samples"] != [places[step]]:
            yield f"step {step} ({fault}): samples {cure['samples']}, not {places[step]}"
    if "back to the weights" not in cures.get(75, {}).get("action", ""):
        yield "no turn back after step 75"
    if precision == "fp16" and "kept in fp32" not in cures.get(210, {}).get("action", ""):
        yield "no module was healed after step 210"
    late = {step for step in rejected if step > EPOCH}
    if steps > EPOCH and not (late if replayed is None else late & replayed):
        yield "no step was rejected after the validation"


def one_of_two(args):
    """A process of the row of two ranks: on one GPU, which NCCL refuses, they talk by gloo."""
    if args.device == "cuda" and torch.cuda.device_count() < 2:
        os.environ["LOCAL_RANK"] = "0"
        dist.init_process_group("gloo")
    folder = Path(tempfile.gettempdir(), f"ranks-{os.getppid()}")
    row = planted(args, "bf16", 160, **{"out-dir": folder, "verify-every": 20})
    if os.environ["RANK"] == "0":
        print(json.dumps(row), flush=True)
    os._exit(0)  # gloo's threads sometimes abort a process that has ended well


def two_ranks():
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    words = [sys.executable, *launch, *sys.argv]
    done = subprocess.run(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
                          stdout=subprocess.PIPE)  # fmt: skip
    if done.returncode:
        return {"well": False, "code": done.returncode}
    return json.loads(done.stdout.splitlines()[-1])


# --- The same again

def twice(args):
    """One deterministic run, two times."""
    rows = [train(args, "--deterministic", max_steps=40, precision="bf16") for _ in range(2)]
    losses = [row["val_loss"] for row in rows if row["well"]]
    return {"well": len(losses) == 2 and losses[0] == losses[1], "val_loss": losses}


def command_line(args, folder, *more):
    return [sys.executable, str(ROOT / "train.py"), f"--device={args.device}",
            "--dataset=synthetic", "--batch-size=100", f"--out-dir={folder}", *more]


def killed(args):
    """Killed with SIGKILL and resumed, beside the same run left alone: the same bits?"""
    steps = 6 if args.smoke else 60
    with tempfile.TemporaryDirectory() as folder:

        def start(name, *more):
            command = command_line(args, Path(folder, name), f"--max-steps={steps}",
                                   "--deterministic", "--precision=bf16", "--ckpt-every=2", *more)
            return subprocess.Popen(command, stdout=subprocess.DEVNULL)

        whole = start("whole").wait()
        run = start("killed")
        last = Path(folder, "killed", "last.pt")
        while run.poll() is None and not last.exists():
            time.sleep(0.05)
        time.sleep(0.3)
        run.send_signal(signal.SIGKILL)
        run.wait()
        resumed = start("killed", "--resume=auto").wait()
        a, b = (torch.load(Path(folder, name, "last.pt"), weights_only=True)["model"]
                for name in ("whole", "killed"))
    same = all(torch.equal(a[name], b[name]) for name in a)
    return {"well": same and whole == resumed == 0, "codes": [whole, resumed], "same": same}


def passes(args, name):
    """Is the same pass the same bits, 200 times? That is what verify leans on."""
    device, sums = torch.device(args.device), set()
    torch.manual_seed(0)
    model = wrap(MODELS[name][0](CLASSES, 32)).to(device)
    images, labels = torch.randn(32, 3, 32, 32).to(device), torch.arange(32).to(device) % 10
    for _ in range(3 if args.smoke else 200):
        torch.manual_seed(1)
        model.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss, _ = model(images, labels)
        loss.backward()
        grads = [p.grad.double().sum() for p in model.parameters() if p.grad is not None]
        sums.add(torch.stack(grads).sum().item())
    return {"well": True, "results": len(sums)}


# --- What it costs

WAYS = ("bare", "ours", guard_cost.STOCK, "bare, CUDA graph", "ours, CUDA graph")
LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaMemcpy", "cudaMemset", "cudaGraphLaunch")


def step_of(args, name):
    """A step of a model, each way: kernels, launches, memory; and milliseconds, in turns."""
    device, row, steps = torch.device(args.device), {}, {}
    shape = (8 if args.smoke else 256, 3, 32, 32)
    makers = guard_cost.contestants(partial(MODELS[name][0], CLASSES, 32), shape, device)
    cuda = device.type == "cuda"
    for way in [way for way in WAYS if cuda or "graph" not in way]:
        gc.collect()
        before = memory(cuda)
        steps[way] = guard_cost.warm(makers[way])
        row |= {f"{way}: {kind}, MB": round(after - before[kind], 1)
                for kind, after in memory(cuda).items()}  # fmt: skip
        row |= {f"{way}: {kind}": count for kind, count in counted(steps[way], device).items()}
    rounds = record.in_turns(steps, device, lambda done: done < (1 if args.smoke else 5),
                             1 if args.smoke else 20)  # fmt: skip
    for way in steps:
        row[f"{way}: ms"] = round(record.spread([turn[way] for turn in rounds])["median"], 3)
    return row | {"well": True}


def memory(cuda):
    """What tensors hold, and what was taken from the GPU: a graph's own memory too."""
    if not cuda:
        return {}
    held = torch.cuda.memory_allocated()
    taken = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    return {"held": held / 2**20, "taken": taken / 2**20}


def counted(step, device):
    """Kernels on the device and launches by the host; on a CPU operations. The table is printed."""
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
    return {"kernels": sum(event.device_type.name == "CUDA" for event in events),
            "launches": sum(event.name.startswith(LAUNCHES) for event in events)}


def validated(args, name, precision):
    """Seconds of a validation of 2,000 images, after the first."""
    seconds, validate = [], program.validation.validate

    def timed(run):
        record.wait(run.device)
        began = time.perf_counter()
        warning = validate(run)
        record.wait(run.device)
        seconds.append(time.perf_counter() - began)
        return warning

    with patch.object(program.validation, "validate", timed):
        row = train(args, model=name, eval_precision=precision, epochs=4)
    return row | {"validation": record.spread(seconds[1:] or seconds)}


def start(args):
    """Seconds of a run of two steps: almost all of it is the start."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command_line(args, folder, "--max-steps=2"), capture_output=True)
    return {"well": done.returncode == 0, "seconds": time.perf_counter() - began}


# --- The parts: name -> function that returns {name of a row: function that makes it}

def tests(args):
    """All tests that name CUDA, a row a file."""

    def passed(path):
        words = [sys.executable, "-m", "pytest", "-q", "-k", "cuda", str(path)]
        code = subprocess.run(words, cwd=ROOT).returncode
        return {"well": code in (0, 5), "code": code}  # 5: there is none

    files = [path for path in sorted((ROOT / "tests").glob("test_*.py"))
             if "cuda" in path.read_text() and (path.stem == "test_graphs" or not args.smoke)]
    return {path.stem: partial(passed, path) for path in files}


def planted_faults(args):
    return {precision: partial(planted, args, precision) for precision in ("bf16", "fp16")}


def ranks(args):
    return {"two ranks": two_ranks}


def repeated(args):
    rows = {f"the same pass, {name}": partial(passes, args, name) for name in nets(args)}
    return {"killed and resumed": partial(killed, args), "twice": partial(twice, args), **rows}


def models(args):
    """Every model for 25 steps: CUDA graph, verified twice."""
    return {
        f"{name}, {precision}": partial(train, args, model=name, precision=precision, max_steps=25,
                                        verify_every=10)
        for name, precision in itertools.product(nets(args), ("bf16", "fp16", "O2"))
    }  # fmt: skip


def whole(args):
    """The default run, to its end."""
    dataset = "cifar10" if args.data_dir else "synthetic"
    return {dataset: partial(train, args, data_dir=args.data_dir, dataset=dataset)}


def steps(args):
    return {name: partial(step_of, args, name) for name in nets(args)}


def validation(args):
    names = ("cifarnet-tiny",) if args.smoke else ("cifarnet", "vit")
    return {f"{name}, evaluated in {precision}": partial(validated, args, name, precision)
            for name, precision in itertools.product(names, ("fp32", "same"))}  # fmt: skip


def speeds(args):
    """fp16 beside bf16, large batches, compiled in the graph."""
    row = partial(train, args, max_steps=150, ckpt_every=150)
    names = ("cifarnet-tiny",) if args.smoke else ("cifarnet", "resnet50", "vit")
    rows = {f"{name}, {precision}": partial(row, model=name, precision=precision)
            for name, precision in itertools.product(names, ("bf16", "fp16"))}  # fmt: skip
    for batch, graph in itertools.product((64, 1000, 2000), ("--cuda-graph", "--no-cuda-graph")):
        rows[f"batch {batch}, {graph}"] = partial(row, graph, model=names[0], batch_size=batch)
    if not args.smoke:  # minutes on a CPU
        rows["compiled, in the graph"] = partial(row, "--compile", "--cuda-graph")
    return rows | {"start": partial(start, args)}


PARTS = {"tests": tests, "planted": planted_faults, "ranks": ranks, "repeated": repeated,
         "models": models, "whole": whole, "steps": steps, "validation": validation,
         "speeds": speeds}  # fmt: skip


def main():
    parser = record.arguments(__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--data-dir", type=Path, help="CIFAR-10")
    args = parser.parse_args()
    if args.smoke:
        synthetic.load = functools.cache(partial(synthetic.load, 200, 100))
    if "RANK" in os.environ:
        one_of_two(args)
    head = record.begin(record.header(f"gpu_{args.part}", args), args)
    rows = head.setdefault("rows", {})
    for name, make in PARTS[args.part](args).items():
        if rows.get(name, {}).get("well"):  # an earlier process has it
            continue
        try:
            rows[name] = make()
        except Exception as error:  # the other rows are worth as much
            rows[name] = {"well": False, "error": f"{type(error).__name__}: {error}"}
        print(f"{name}: {json.dumps(rows[name])}", flush=True)
        record.keep(head, args)
    wrong = [name for name in rows if not rows[name]["well"]]
    if not wrong:
        record.write(head, args, samples=("rows",))
    print(f"{args.part}: {len(rows) - len(wrong)} of {len(rows)} rows are well"
          + (f", not {', '.join(wrong)}" if wrong else ""))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
