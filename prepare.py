"""
Prepare: everything that is decided before the first step, each decision with its reason.

train.py's setup() calls these functions in this order: process, data, network, length, training, folder, card. Each
takes the record of the run (train.Run) and fills in its part of it. Two rules:

    Refuse early    What a user gave (flags, paths, files) is checked here, before a file is written and before the
                    first step. A refusal is one sentence and exit code 2, or 4 for data.
    Only that       A refusal wraps only what reads a user's input. An error in a model's own code is not wrapped:
                    whoever forks this repository needs the traceback of that error.

Like train.py this file is wiring: it knows the core files, and only train.py knows it.
"""

import functools
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import amp_policy
import autopsy
import checkpoint
import fp32
import guards
import optim
import report
from data import SCALE, batches, fingerprint, load
from extras import ema, muon
from models import MODELS, DoesNotFit, set_drop_path, wrap
from ranks import agreed, first_on_each_machine, join, parallel, quiet, refuse, refusing
from rescue import heal, inject, probes


def process(run: Any) -> int:
    """Device, ranks, seeds and torch's own switches. Returns this process's rank on its machine."""
    args = run.args
    with refusing(ValueError):
        run.device, run.rank, local_rank, run.world_size = join(args.device)
    cuda = run.device.type == "cuda"
    run.hardware = torch.cuda.get_device_name(run.device) if cuda else f"{run.device.type}, {os.cpu_count()} cores"
    torch.manual_seed(args.seed)  # the same weights on every rank
    random.seed(args.seed)
    torch.autograd.set_detect_anomaly(args.detect_anomaly)
    torch.backends.cudnn.benchmark = cuda and not args.deterministic  # the fastest kernel may change from run to run
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    return local_rank


def find(run: Any) -> None:
    """Read the checkpoint to go on from, before anything is decided: run.found is (path, state), or None."""
    args = run.args
    if args.resume == "auto" and not args.out_dir:
        refuse(2, "--resume auto goes on in a folder: say which with --out-dir")
    with refusing(checkpoint.CheckpointError, OSError):
        if args.resume == "auto":
            run.found = checkpoint.Checkpoints(args.out_dir).newest()
        elif args.resume != "none":
            run.found = args.resume, checkpoint.load(args.resume)


def data(run: Any, local_rank: int) -> list[str]:
    """Data and the stream of batches. Returns a sentence for each file that could not be read."""
    args, left_out = run.args, []
    with refusing(OSError, ValueError, code=4), first_on_each_machine(local_rank):
        progress = functools.partial(tqdm, desc="decoding", unit="image", leave=False, disable=quiet())
        cache = None if args.workers else ".cache"
        run.train, run.val, classes, run.dataset = load(args.dataset, args.data_dir, progress, args.image_size,
                                                        args.max_bad_share, cache, left_out.append)
    run.classes = [str(name) for name in classes]
    if run.dataset == "synthetic" != args.dataset and run.rank == 0:
        print("CIFAR-10 is neither here nor reachable: training on the embedded synthetic images instead\n"
              "  (--data-dir DIR names a folder that has it; .cache is looked at too)", flush=True)
    if args.num_classes not in (None, len(classes)):
        refuse(2, f"--num-classes {args.num_classes}, but {run.dataset} has {len(classes)} classes: "
                  "leave the flag out")
    pieces = run.world_size * args.accum_steps
    if args.batch_size % pieces:
        refuse(2, f"--batch-size {args.batch_size} does not split evenly over {run.world_size} rank(s) and "
                  f"--accum-steps {args.accum_steps}: make it a multiple of {pieces}")
    run.accum = args.accum_steps
    with refusing(ValueError):
        run.train, run.val = ((batches.place(x, run.device), labels) for x, labels in (run.train, run.val))
        run.stream = batches.TrainBatches(
            *run.train, batch_size=args.batch_size, rank=run.rank, world_size=run.world_size, seed=args.seed,
            device=run.device, scale=SCALE.get(run.dataset), size=run.val[0].shape[-1], cutout=args.cutout,
            workers=args.workers, augment=MODELS[args.model][1]["augment"],
        )
    return left_out


def precision(run: Any, net: torch.nn.Module) -> None:
    """The precision: what is timed is the network's own layers. Two ranks may measure two things, so rank 0 decides."""
    args, wanted = run.args, run.args.precision
    before = run.found and run.found[1].get("facts", {}).get("precision")
    if before and wanted == "auto":  # nothing measured may change a run that goes on
        wanted = before

    def stopwatch(device: str, dtypes: tuple[torch.dtype, ...]) -> tuple[float, ...]:
        images = run.stream.normalize(run.val[0][:2]).to(run.device)
        labels = torch.zeros(len(images), dtype=torch.long, device=run.device)
        times = args.batch_size / run.world_size / run.accum / len(images)
        layers = amp_policy.largest_layers(wrap(net), images, labels, times=times)
        return amp_policy.stopwatch(device, dtypes, layers)

    policy = None
    if run.rank == 0:
        policy = amp_policy.choose_policy(wanted, amp_policy.capabilities(run.device),
                                          stopwatch=None if wanted == before else stopwatch)
    run.policy = agreed(policy)
    run.asked = run.policy.name


def network(run: Any) -> None:
    """The network: bare, with its loss, under DistributedDataParallel, compiled."""
    args, (build, recipe) = run.args, MODELS[run.args.model]
    with refusing(DoesNotFit):
        net = build(run.classes, run.val[0].shape[-1])
        set_drop_path(net, args.drop_path)
    if hasattr(net, "init_from_data"):
        images, labels = run.train
        net.init_from_data(run.stream.normalize(images[:: max(10, len(labels) // 5000)]))
    net = net.to(run.device, memory_format=torch.channels_last)
    precision(run, net)
    with refusing(ValueError):
        fp32.keep_fp32(net, args.keep_fp32)
        net = run.policy.prepare(net)
        run.injector = inject.Injector(net, inject.parse_inject(args.inject), run.rank, scales=run.policy.scales)
    # Adam's state has the dtype of the weights, or of their fp32 masters.
    state = torch.float32 if run.policy.masters else run.policy.param_dtype
    if why := optim.refusal(state, args.adam_eps, args.betas[1]):
        refuse(2, f"{why}: take --precision O2, which keeps fp32 masters" if state is torch.float16 else why)
    run.net, run.model = net, wrap(net, recipe["label_smoothing"])
    run.injector.attach(run.model)


LADDER = (10, 15, 20, 30, 40, 50, 77, 100, 150, 200, 300, 500, 700, 1000)  # steps; machines of a kind take the same


def pace(run: Any) -> float:
    """Seconds of a training step, by two timed pieces of one batch. Weights, buffers and RNG stay as they are."""
    kept = autopsy.StepRecord(0, run.net)
    images, labels = run.stream.at(0)
    size = min(len(images), 256)
    piece = images[:size], labels[:size].clamp(0, len(run.classes) - 1)
    for _ in range(2):  # the first one warms up
        began = time.perf_counter()
        loss, *_ = heal.in_pieces(run, piece)
        loss.item()  # waits for the device
        seconds = (time.perf_counter() - began) * len(images) / size
        kept.restore()
    return agreed(seconds)


def length(run: Any) -> tuple[str, int]:
    """The number of steps. Returns a sentence about it, and the updates of warm-up.

    A GPU gets the whole recipe, a CPU as much of it as two minutes hold.
    """
    args, (_, recipe) = run.args, MODELS[run.args.model]
    run.epoch_steps = run.stream.steps_per_epoch
    args.verify_every = run.epoch_steps if args.verify_every is None else args.verify_every
    whole, seconds = recipe["epochs"] * run.epoch_steps, pace(run) * (1 - recipe["small"] * (1 - (7 / 8) ** 2))
    if args.epochs or args.max_steps:
        run.total_steps, why = args.max_steps or max(1, round(args.epochs * run.epoch_steps)), "as asked"
    elif run.found and "total_steps" in run.found[1].get("facts", {}):
        run.total_steps, why = run.found[1]["facts"]["total_steps"], "as the checkpoint says"
    elif run.device.type == "cpu":
        run.total_steps = min(whole, max((n for n in LADDER if n * seconds <= 120), default=LADDER[0]))
        why = f"--epochs {recipe['epochs']} is the whole recipe, about {duration(whole * seconds)}"
    else:
        run.total_steps, why = whole, "the whole recipe"
    warmup = int(run.total_steps * recipe["warmup"]) if args.warmup_updates is None else args.warmup_updates
    run.stream.small_until = round(run.total_steps * recipe["small"])
    epochs = f"{run.total_steps} steps = {run.total_steps / run.epoch_steps:.1f} epochs"
    return f"{epochs}, about {duration(run.total_steps * seconds)} of training here; {why}", warmup


def duration(seconds: float) -> str:
    """Two hours and more in hours, two minutes and more in minutes, else in seconds."""
    count, unit = (seconds / 3600, "hours") if seconds >= 7200 else (seconds / 60, "minutes")
    return f"{count:.0f} {unit}" if seconds >= 100 else f"{max(1, seconds):.0f} seconds"


def training(run: Any, warmup: int) -> None:
    """Optimizer, loss scale, guard and averaged weights: with the network, all that a checkpoint has to carry."""
    args, (_, recipe) = run.args, MODELS[run.args.model]
    run.optimizer = optim.ClippedAdamW(
        optim.param_groups(run.net, args.weight_decay, args.no_decay, lr_scale=recipe["lr_scale"], muon=args.muon),
        lr=args.lr, betas=args.betas, eps=args.adam_eps, amsgrad=args.amsgrad,
        clip=args.clip_grad or None, zclip=args.zclip, matrix_step=muon.turn, muon_options=recipe["muon_options"],
        schedule=optim.warmup_cosine(run.total_steps, warmup, kind=recipe["schedule"]),
        masters=None if run.policy.param_dtype is torch.float32 else run.policy.masters,
    )
    run.scaler = amp_policy.LossScaler(run.device.type, enabled=run.policy.scales)
    run.guard = guards.Guard(run.net, num_classes=len(run.classes), device=run.device, spikes=probes.SpikeDetector(),
                             told=("micro-batches", "unsure", "checksum", "-checksum"))
    run.average = ema.EMA(run.optimizer.params, args.ema) if args.ema else None
    run.ddp = parallel(run.model, run.device)
    run.compiled = torch.compile(run.ddp) if args.compile and not args.inject else run.ddp


def folder(run: Any) -> str:
    """Where to write, and what to go on from. Returns what there is to say about the latter."""
    args = run.args
    name = f"{args.model}-{run.dataset}-{run.policy.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    run.folder = Path(agreed(str(args.out_dir or Path("runs") / name)))  # the clock may tick between two ranks
    if args.resume == "none" and report.holds_a_run(run.folder):
        refuse(2, f"--out-dir {run.folder} holds another run: name a new folder, or go on with --resume auto")
    agreed(None)  # nobody writes before everybody has looked
    run.facts = {
        "model": args.model, "dataset": run.dataset, "num_classes": len(run.classes), **fingerprint(*run.train),
        "precision": run.policy.name, "world_size": run.world_size, "batch_size": args.batch_size,
        "accum_steps": args.accum_steps, "lr": args.lr, "drop_path": args.drop_path,
        "total_steps": run.total_steps, "ema": args.ema, "seed": args.seed, "torch": str(torch.__version__),
    }
    note = ""
    with refusing(checkpoint.CheckpointError, OSError, ValueError, RuntimeError):
        run.folder.mkdir(parents=True, exist_ok=True)
        run.checkpoints = checkpoint.Checkpoints(run.folder)
        if run.found:
            changes = resume(run, *run.found)
            note = "; ".join([f", resumed from {run.found[0]} after step {run.step}", *changes])
    with refusing(ImportError, advice="; --tensorboard needs it: pip install tensorboard"):
        header = {"args": vars(args), **run.facts, "hardware": run.hardware,
                  "commit": report.commit() if run.rank == 0 else ""}
        run.log = report.MetricsFile(run.folder, header, run.step, args.tensorboard, speaks=run.rank == 0)
    run.log.figures = run.found[1].get("figures", {}) if run.found else {}
    return note


def resume(run: Any, path: str | Path, state: dict) -> list[str]:
    """Continue where a checkpoint ends. Returns what differs between that run and this one, as sentences."""
    if "facts" not in state:
        raise checkpoint.CheckpointError(f"{path} holds weights, not a run: resume from a last.pt")
    changes = checkpoint.describe_changes(state["facts"], run.facts)
    heal.load_state_dict(run, state["healer"])  # first: the modules that it pins have fp32 weights
    changes += other_level(run, state)
    run.net.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    run.guard.load_state_dict(state["guard"])
    if run.average and state["average"] is not None:
        run.average.load_state_dict(state["average"])
    run.best = state["validator"]["best"]
    run.step, run.losses, run.scores = state["step"], state["losses"], state["scores"]
    if run.rank < len(state["rng"]):
        checkpoint.set_rng_state(state["rng"][run.rank], run.device)
    return changes


def other_level(run: Any, state: dict) -> list[str]:
    """Weights and masters of a run at another level, changed in `state` to what this level keeps. Returns a line."""
    names = {p: name for name, p in run.net.named_parameters()}
    order = [names[p] for p in run.optimizer.model_params]
    model, optimizer = state["model"], state["optimizer"]
    was_half = [name for name in order if model[name].dtype in (torch.float16, torch.bfloat16)]
    is_half = [name for name, p in zip(order, run.optimizer.model_params, strict=True) if p.dtype is not torch.float32]
    if was_half == is_half:
        return []
    state["model"] = model | dict(zip(was_half, optimizer["masters"], strict=False))  # O3 keeps none
    optimizer["masters"] = [state["model"][name].float() for name in is_half] if run.policy.masters else []
    if run.policy.masters:
        return ["master weights are taken from the checkpoint's weights"]
    return ["the checkpoint's master weights become the weights" if was_half and not is_half else "no master weights"]


def card(run: Any, why: str, warmup: int, note: str) -> Iterator[str]:
    """A line for each decision."""
    args, (_, recipe) = run.args, MODELS[run.args.model]
    pinned, rule = fp32.pinned(run.net), ""
    if args.lr == recipe["lr"] and args.batch_size != recipe["batch_size"]:
        _, rule = optim.scaled_lr(args.lr, args.batch_size, recipe["batch_size"], recipe["lr_rule"])
        rule = f"; the lr is not scaled, the rule would be {rule}"
    islands = f"; fp32 islands: {', '.join(pinned)}" if pinned else ""
    pieces = f"{args.batch_size // (run.world_size * args.accum_steps)} a micro-batch x {args.accum_steps} x "
    small = run.stream.small_until
    inner = f"; the first {small} steps see the inner 7/8 of each side" if small else ""
    for name, decision in {
        "device": f"{run.hardware}, torch {torch.__version__}",
        "precision": f"{run.policy}{islands}",
        "evaluation": "fp32, whatever the training precision" if args.eval_precision == "fp32" else "as in training",
        "data": f"{run.dataset}: {len(run.train[1]):,} training and {len(run.val[1]):,} validation images, "
                f"{len(run.classes)} classes",
        "model": f"{args.model}, {sum(p.numel() for p in run.net.parameters()) / 1e6:.2f} million parameters",
        "optimizer": f"{run.optimizer.description}; lr {args.lr:g} after {warmup} updates of warm-up, "
                     f"then {recipe['schedule']}",
        "batch": f"{args.batch_size} images = {pieces}{run.world_size} rank(s){inner}{rule}",
        "step": "one CUDA graph, guards included" if run.graph else "kernel by kernel",
        "length": why,
        "output": f"{run.folder}{note}",
    }.items():
        yield f"{name:<11} {decision}"
