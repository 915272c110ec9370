"""
Prepare: everything that is decided before the first step, each decision with its reason.

train.py calls setup(), which calls the functions of this file in their order. Each takes the record
of the run and fills in its part of it. Two rules:

    Refuse early    What a user gave (flags, paths, files) is checked here, before a file is written
                    and before the first step. A refusal is one sentence and exit code 2, or 4 for
                    data. Every rank comes to every refusal, and all leave together.
    Only that       A refusal wraps only what reads a user's input. An error in a model's own code
                    is not wrapped: whoever forks this repository needs its traceback.
"""

import contextlib
import fnmatch
import functools
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import amp_policy
import autopsy
import checkpoint
import flags
import fp32
import guards
import optim
import report
from data import WrongArgument, batches, fingerprint, imagefolder, load
from extras import ema, graphs, muon
from models import MODELS, DoesNotFit, set_drop_path, wrap
from ranks import (
    agreed,
    first_on_each_machine,
    hides_progress,
    join,
    must_agree,
    out_of_memory,
    parallel,
    refuse,
    refusing,
)
from record import Run
from rescue import inject, resume

Saved = dict[str, Any] | None  # the content of the checkpoint to go on from, and its "path"
CARRIED = ("micro_batches", "unsure_rank", "checksum", "negative_checksum")
NEEDED = ("facts", "healing", "model", "optimizers", "schedule", "scaler", "guard", "rng", "scores")
# What torch says where BatchNorm sees one value, or a convolution less than its kernel.
TOO_SMALL = re.compile("more than 1 value per channel|too small|greater than actual input size")


def setup(run: Run, train_step: Callable) -> tuple[list[str], list[str]]:
    """Make `run` ready for its first step. Returns lines to print, and warnings."""
    seconds = {"torch": time.process_time()}  # its import, before anything of ours ran

    def timed(phase: Callable, *more: Any) -> Any:
        began = time.perf_counter()
        result = phase(run, *more)
        seconds[phase.__name__] = time.perf_counter() - began
        return result

    local_rank = timed(process)
    saved = timed(read_checkpoint)
    unreadable = timed(data, local_rank)
    timed(network)
    step_seconds = timed(precision, saved)
    torch.manual_seed(run.args.seed + run.rank)  # from here on ranks draw different noise
    plan, warmup = length(run, saved, step_seconds)
    timed(training, warmup)
    observed = run.args.inject or run.args.detect_anomaly
    alone_on_a_gpu = run.device.type == "cuda" and run.world_size == 1
    if run.args.cuda_graph and alone_on_a_gpu and not observed:
        run.graph = graphs.StepGraph(functools.partial(train_step, run))
    note = timed(folder, saved)
    run.bar = tqdm(total=run.total_steps, initial=run.step, disable=hides_progress(), unit="step")
    spans = [f"{name} {span:.1f}" for name, span in seconds.items() if span >= 0.05]
    start = f"{sum(seconds.values()):.1f} s: {', '.join(spans)}"
    more = {"length": plan, "output": f"{run.folder}{note}", "start": start}
    return [*start_lines(run, warmup, more)], [*unreadable, *run.policy.warnings]


def process(run: Run) -> int:
    """Device, ranks, seeds and torch's own switches. Returns this process's rank on its machine."""
    args = run.args
    with refusing(ValueError):
        run.device, run.rank, local_rank, run.world_size = join(args.device)
    must_agree(vars(args) | {"data_dir": None})  # it may have another name on another machine
    torch.manual_seed(args.seed)  # the same weights on every rank
    random.seed(args.seed)
    torch.autograd.set_detect_anomaly(args.detect_anomaly)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    return local_rank


def read_checkpoint(run: Run) -> Saved:
    """The checkpoint to go on from, before anything is decided; None: a new run."""
    args = run.args
    if args.resume == "none":
        return None
    if args.resume == "auto" and not args.out_dir:
        refuse(2, "--resume auto goes on in a folder: say which with --out-dir")
    with refusing(checkpoint.CheckpointError, OSError):
        if args.resume != "auto":
            return checkpoint.load_run(args.resume, NEEDED) | {"path": args.resume}
        newest = checkpoint.Checkpoints(args.out_dir).newest(NEEDED)
        if newest is None and report.holds_a_run(args.out_dir):
            raise checkpoint.CheckpointError(f"{args.out_dir} holds a run without its checkpoints")
        return newest and newest[1] | {"path": newest[0]}


def data(run: Run, local_rank: int) -> list[str]:
    """Data and the stream of batches. Returns a sentence for each file that could not be read.

    Here alone is decided what data's errors mean: a wrong argument leaves with 2, bad data with 4.
    """
    args = run.args
    left_out = []
    wrong_argument = (WrongArgument, FileNotFoundError, imagefolder.DiskFull)
    bad_data = (OSError, ValueError)
    with refusing(*bad_data, code=4), refusing(*wrong_argument), first_on_each_machine(local_rank):
        run.data = load(
            args.dataset,
            args.data_dir,
            functools.partial(
                tqdm, desc="decoding", unit="image", leave=False, disable=hides_progress()
            ),
            args.image_size,
            args.max_bad_share,
            None if args.workers else ".cache",
            warn=left_out.append,
            say=print if run.rank == 0 else str,
        )
    dataset = run.data
    if dataset.name == "synthetic" and args.dataset is None and run.rank == 0:
        print("CIFAR-10 is neither here nor reachable: training on the embedded synthetic images\n"
              "  (--data-dir DIR names a folder that has it; .cache is looked at too)", flush=True)
    outputs = len(dataset.classes)
    if args.num_classes not in (None, outputs):
        refuse(2, f"--num-classes {args.num_classes}, but {dataset.name} has {outputs} classes: "
                  "leave the flag out")
    pieces = run.world_size * args.accum_steps
    if args.batch_size % pieces:
        refuse(2, f"--batch-size {args.batch_size} does not split evenly over {run.world_size} "
                  f"rank(s) and --accum-steps {args.accum_steps}: make it a multiple of {pieces}")
    run.accum = args.accum_steps
    train_images, train_labels = dataset.train
    val_images, val_labels = dataset.val
    dataset.train = batches.place(train_images, run.device), train_labels
    dataset.val = batches.place(val_images, run.device), val_labels
    with refusing(ValueError):
        run.stream = batches.TrainBatches(
            *dataset.train,
            batch_size=args.batch_size,
            rank=run.rank,
            world_size=run.world_size,
            seed=args.seed,
            device=run.device,
            normalize=batches.Normalize(dataset.mean, dataset.std),
            scale=dataset.scale,
            size=dataset.image_size,
            cutout=args.cutout,
            workers=args.workers,
            augment=MODELS[args.model][1]["augment"],
        )
    return left_out


def network(run: Run) -> None:
    """The network, bare and with its loss, on the device."""
    args, (build, recipe) = run.args, MODELS[run.args.model]
    with refusing(DoesNotFit):
        net = build(run.data.classes, run.data.image_size)
        set_drop_path(net, args.drop_path)
    names = [name for name, _ in net.named_parameters()]
    for flag, patterns in (("--no-decay", args.no_decay), ("--muon", args.muon)):
        for pattern in patterns:
            if not fnmatch.filter(names, pattern):
                refuse(2, f"{flag} {pattern} names no parameter of {args.model}")
    if hasattr(net, "init_from_data"):
        images, labels = run.data.train
        net.init_from_data(run.stream.normalize(images[:: max(10, len(labels) // 5000)]))
    run.net = net.to(run.device, memory_format=torch.channels_last)
    run.model = wrap(run.net, recipe["label_smoothing"], run.data.regression)
    margin = run.data.image_size // 16 if recipe["small"] else 0  # as the run begins
    inner = slice(margin, run.data.image_size - margin)
    micro_batch = args.batch_size // run.world_size // run.accum
    try:
        seconds_of(run, torch.float32, min(2, micro_batch), inner)
    except (RuntimeError, ValueError) as error:
        if TOO_SMALL.search(str(error)):
            refuse(2, f"--image-size or --batch-size is too small for {args.model}: {error}")
        raise


def seconds_of(run: Run, dtype: torch.dtype, count: int, inner: slice = slice(None)) -> float:
    """Of a forward and backward on `count` images. Weights, buffers and random numbers stay."""
    kept = autopsy.StepRecord(0, run.net)
    images, labels = run.stream.at(0)
    began = time.perf_counter()
    with torch.autocast(run.device.type, dtype, enabled=dtype is not torch.float32):
        loss, _ = run.model(images[:count, :, inner, inner], torch.zeros_like(labels[:count]))
    loss.backward()
    loss.item()  # waits for the device
    seconds = time.perf_counter() - began
    kept.restore()
    return seconds


def precision(run: Run, saved: Saved) -> float | None:
    """The precision. Returns the seconds of a step; None where nothing had to be timed.

    Two ranks may measure two things, so rank 0 decides.
    """
    args, wanted = run.args, run.args.precision
    caps = amp_policy.capabilities(run.device)
    resumes = saved is not None and wanted == "auto"
    if resumes:  # nothing measured may change a run that goes on
        wanted = saved["facts"]["precision"]
    images = args.batch_size // run.world_size
    count = min(images // run.accum, 64)

    @functools.cache
    def step(dtype: torch.dtype) -> float:
        size = count
        while True:
            try:
                seconds_of(run, dtype, size)  # the first one warms up
                return seconds_of(run, dtype, size) * images / size
            except RuntimeError as error:  # what just fits in half precision may not fit in fp32
                if size == 1 or not out_of_memory(error):
                    raise
                size //= 2

    def stopwatch(_: str, dtypes: tuple[torch.dtype, ...]) -> tuple[float, ...]:
        return tuple(step(dtype) for dtype in dtypes)

    policy = seconds = None
    if run.rank == 0:
        fast = caps.native_bf16 and run.device.type == "cuda"  # known to gain: nothing to measure
        watch = None if fast or resumes else stopwatch
        policy = amp_policy.choose_policy(wanted, caps, stopwatch=watch)
        seconds = None if fast else step(policy.dtype)
    run.policy, seconds = agreed((policy, seconds))
    with refusing(ValueError):
        fp32.keep_fp32(run.net, args.keep_fp32)
        run.net = run.policy.prepare(run.net)
        faults = inject.parse_inject(args.inject)
        run.injector = inject.Injector(run.net, faults, run.rank, scales=run.policy.scales)
    # Adam's state has the dtype of the weights, or of their fp32 masters.
    state = torch.float32 if run.policy.masters else run.policy.param_dtype
    if why := optim.refusal(state, args.adam_eps, args.betas[1]):
        advice = ": take --precision O2, which keeps fp32 masters"
        refuse(2, why + (advice if state is torch.float16 else ""))
    run.injector.attach(run.model)
    return seconds


LADDER = (10, 15, 20, 30, 40, 50, 77, 100, 150, 200, 300, 500, 700, 1000)  # for all machines


def length(run: Run, saved: Saved, seconds: float | None) -> tuple[str, int]:
    """The number of steps. Returns a sentence about it, and the updates of warm-up.

    A GPU gets the whole recipe, a CPU as much of it as two minutes hold.
    """
    args, (_, recipe) = run.args, MODELS[run.args.model]
    run.epoch_steps = run.stream.steps_per_epoch
    if args.verify_every is None:
        args.verify_every = run.epoch_steps
    whole = recipe["epochs"] * run.epoch_steps
    seconds = seconds and seconds * (1 - recipe["small"] * (1 - (7 / 8) ** 2))
    why = "as asked"
    if args.max_steps:
        steps = args.max_steps
    elif args.epochs:
        steps = max(1, round(args.epochs * run.epoch_steps))
    elif saved:
        steps = saved["facts"]["total_steps"]
        why = "as the checkpoint says"
    elif run.device.type == "cpu":
        steps = min(whole, max((n for n in LADDER if n * seconds <= 120), default=LADDER[0]))
        epochs = recipe["epochs"]
        why = f"--epochs {epochs} is the whole recipe, about {duration(whole * seconds)}"
    else:
        steps = whole
        why = "the whole recipe"
    if steps >= flags.MANY:
        refuse(2, f"--epochs {args.epochs:g} are {steps} steps: more than a run can have")
    run.total_steps = steps
    with refusing(ValueError):
        run.stream.start_small(round(steps * recipe["small"]))
    warmup = args.warmup_updates
    if warmup is None:
        warmup = int(steps * recipe["warmup"])
    takes = f", about {duration(steps * seconds)} of training here" if seconds else ""
    return f"{steps} steps = {steps / run.epoch_steps:.1f} epochs{takes}; {why}", warmup


def duration(seconds: float) -> str:
    """Two hours and more in hours, two minutes and more in minutes, else in seconds."""
    if seconds >= 7200:
        return f"{seconds / 3600:.0f} hours"
    return f"{seconds / 60:.0f} minutes" if seconds >= 100 else f"{max(1, seconds):.0f} seconds"


def training(run: Run, warmup: int) -> None:
    """Optimizers, schedule, loss scale, guard, averaged weights, DistributedDataParallel."""
    args, (_, recipe) = run.args, MODELS[run.args.model]
    masters = run.policy.masters if run.policy.param_dtype in amp_policy.HALF else None
    matrices = muon.matrices(run.net, args.muon)
    groups = optim.param_groups(
        run.net, args.weight_decay, args.no_decay, recipe["lr_scale"], skip=matrices
    )
    adamw = optim.ClippedAdamW(
        groups, args.lr, args.betas, args.adam_eps, amsgrad=args.amsgrad, clip=None, masters=masters
    )
    run.optimizers = [adamw]
    if matrices:
        options = recipe["muon_options"]
        run.optimizers.append(muon.Muon(matrices, args.lr, masters=masters, **options))
    rates = optim.warmup_cosine(run.total_steps, warmup, kind=recipe["schedule"])
    run.schedule = optim.Schedule(run.optimizers, rates)
    run.clip = args.clip_grad or None
    run.scaler = amp_policy.LossScaler(run.device.type, enabled=run.policy.scales)
    run.guard = guards.Guard(
        run.net,
        num_classes=None if run.data.regression else len(run.data.classes),
        device=run.device,
        carries=CARRIED,
    )
    if args.ema:
        run.ema = ema.EMA(optim.master_params(run.optimizers).values(), args.ema)
    run.ddp = parallel(run.model, run.device)
    run.compiled = torch.compile(run.ddp) if args.compile and not args.inject else run.ddp


def folder(run: Run, saved: Saved) -> str:
    """Go on from the checkpoint; the folder and its files. Returns what to say about both."""
    args = run.args
    run.facts = {
        "model": args.model, "dataset": run.data.name, "num_classes": len(run.data.classes),
        **fingerprint(*run.data.train), "precision": run.policy.name,
        "world_size": run.world_size, "batch_size": args.batch_size,
        "accum_steps": args.accum_steps, "lr": args.lr, "drop_path": args.drop_path,
        "total_steps": run.total_steps, "ema": args.ema, "seed": args.seed,
        "torch": str(torch.__version__),
    }
    must_agree(run.facts)
    cuda = run.device.type == "cuda"
    processor = f"{run.device.type}, {os.cpu_count()} cores"
    run.facts["hardware"] = torch.cuda.get_device_name(run.device) if cuda else processor
    note = ""
    with refusing(checkpoint.CheckpointError, RuntimeError, ValueError):
        if saved:
            changes = checkpoint.describe_changes(saved["facts"], run.facts)
            if args.resume == "auto" and run.rank == 0:
                check_last_good(args.out_dir / "last_good.pt", run.facts)
            changes += resume.load_whole_state(run, saved)
            note = "; ".join([f", resumed from {saved['path']} after step {run.step}", *changes])
    with refusing(checkpoint.CheckpointError, OSError):
        if run.rank == 0:
            run.folder = make_folder(run)
    run.folder = agreed(run.folder)
    run.checkpoints = checkpoint.Checkpoints(run.folder)
    header = {"args": vars(args), **run.facts}
    with refusing(checkpoint.CheckpointError):
        if run.rank == 0:
            run.checkpoints.lock()
    with refusing(ImportError, advice="; --tensorboard needs it: pip install tensorboard"):
        run.log = report.MetricsFile(run.folder, header, run.step, args.tensorboard, run.rank == 0)
    if saved:
        run.log.figures = saved.get("figures", {})
    return note


def check_last_good(path: Path, facts: dict[str, Any]) -> None:
    """What a cure would turn back to is of this run. A damaged one makes room for another."""
    try:
        good = checkpoint.load(path)
    except checkpoint.CheckpointError:
        if path.exists():
            path.replace(path.with_suffix(".damaged"))
        return
    checkpoint.describe_changes(good["facts"], facts)


def make_folder(run: Run) -> Path:
    """--out-dir, which must not hold another run, or a new folder under runs/."""
    args = run.args
    if args.out_dir:
        if args.resume == "none" and report.holds_a_run(args.out_dir):
            raise checkpoint.CheckpointError(f"--out-dir {args.out_dir} holds another run: name a "
                                             "new folder, or go on with --resume auto")
        args.out_dir.mkdir(parents=True, exist_ok=True)
        return args.out_dir
    now = time.strftime("%Y%m%d-%H%M%S")
    name = f"{args.model}-{run.data.name}-{run.policy.name}-{now}"
    for ending in ("", *(f"-{n}" for n in range(2, 1000))):  # runs may start in the same second
        path = Path("runs") / (name + ending)
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            break
    return path


def start_lines(run: Run, warmup: int, more: dict[str, str]) -> Iterator[str]:
    """A line for each decision."""
    args, (_, recipe) = run.args, MODELS[run.args.model]
    names = " and ".join(type(optimizer).__name__ for optimizer in run.optimizers)
    micro_batch = args.batch_size // (run.world_size * args.accum_steps)
    small = run.stream.small_until
    batch = f"{args.batch_size} images = {micro_batch} a micro-batch x {args.accum_steps}"
    batch += f" x {run.world_size} rank(s)"
    if small:
        batch += f"; the first {small} steps see the inner 7/8 of each side"
    islands = ", ".join(fp32.pinned(run.net))
    lines = {
        "device": f"{run.facts['hardware']}, torch {torch.__version__}",
        "precision": f"{run.policy}{'; fp32 islands: ' if islands else ''}{islands}",
        "evaluation": "in fp32" if args.eval_precision == "fp32" else "as in training",
        "data": f"{run.data.name}: {len(run.data.train[1]):,} training and "
                f"{len(run.data.val[1]):,} validation images, {len(run.data.classes)} classes",
        "model": f"{args.model}, {sum(p.numel() for p in run.net.parameters()):,} parameters",
        "optimizer": f"{names}, {args.lr_reason}; {warmup} updates of warm-up, then "
                     f"{recipe['schedule']}",
        "batch": batch,
        "step": "one CUDA graph, guards included" if run.graph else "kernel by kernel",
        **more,
    }
    for name, decision in lines.items():
        yield f"{name:<11} {decision}"
