"""
Prepare: every decision before the first step, each with its reason.

train.py calls setup(), which calls the functions of this file in their order. Each takes the record
of the run and fills in its part of it. Two rules:

    Refuse early    What a user gave (flags, paths, files) is checked here, before a file is written
                    and before the first step. A refusal is one sentence and exit code 2, or 4 for
                    data. Every rank comes to every refusal, and all leave together.
    Only that       A refusal wraps only what reads a user's input. An error in a model's own code
                    is not wrapped: whoever forks this repository needs its traceback.
"""

from __future__ import annotations

import fnmatch
import functools
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

import amp_policy
import checkpoint
import guards
import optim
import report
from data import WrongArgument, batches, load
from extras import ema, graphs, muon
from models import DoesNotFit, build, fitting, set_drop_path, wrap
from ranks import (
    agreed,
    first_on_each_machine,
    hides_progress,
    join,
    must_agree,
    parallel,
    refuse,
    refusing,
)

from . import classes, plan, resume
from .record import Plain, Run, loss_names

if TYPE_CHECKING:
    from .pretrained import Weights


def setup(run: Run, train_step: Callable):
    """Prepare `run` for its first step, and print each decision."""
    args = run.args
    spent = {"torch": time.process_time()}  # seconds: its import, before anything of ours

    def timed(phase, *more):
        began = time.perf_counter()
        result = phase(run, *more)
        spent[phase.__name__] = time.perf_counter() - began
        return result

    local_rank = timed(process)
    saved = resume.read_checkpoint(run)
    weights = read_init(run, saved, local_rank)
    unreadable = timed(data, saved, local_rank)
    began = timed(network, weights)
    seconds = timed(plan.precision, saved)
    with refusing(ValueError):
        run.rescue = rescuer()
        run.rescue.attach(run)
    torch.manual_seed(args.seed + run.rank)  # from here on ranks draw different noise
    length, too_short = plan.length(run, saved, seconds)
    timed(training)
    observed = args.inject or args.detect_anomaly
    alone_on_a_gpu = run.device.type == "cuda" and run.world_size == 1
    if args.cuda_graph and alone_on_a_gpu and not observed:
        run.graph = graphs.StepGraph(functools.partial(train_step, run))
    compiled = timed(compilation)
    resumed = timed(folder, saved)
    hidden = hides_progress()
    run.bar = tqdm(total=run.total_steps, initial=run.step, disable=hidden, unit="step")
    if hidden and run.rank == 0:
        from .progress import Lines

        run.bar = Lines(run)
    decided = {
        "device": f"{run.identity['hardware']}, torch {torch.__version__}",
        "precision": str(run.policy),
        "data": f"{run.data.name}, {len(run.data.train[1]):,} training images",
        "model": f"{args.model}, {sum(p.numel() for p in run.net.parameters()):,} parameters, "
        + compiled,
        "init": began,
        "optimizer": f"{args.lr_reason}; {args.warmup_updates} updates of warm-up"
        + (f"; {plan.SLOW} times the rate for what was loaded" if began else ""),
        "length": length,
        "output": f"{run.folder}{resumed}",
        "start": f"{sum(spent.values()):.1f} s: "
        + ", ".join(f"{name} {t:.1f}" for name, t in spent.items() if t >= 0.05),
    }
    for name, decision in decided.items():
        if decision:
            run.log.say(f"{name:<11} {decision}")
    for warning in (*unreadable, *run.policy.warnings, *filter(None, [too_short])):
        run.log.warn(run.step, warning)


def rescuer() -> Plain:
    """What a run does about trouble: rescue/, if that folder and autopsy/ are there."""
    here = Path(__file__).parents[1]
    if not all((here / wing / "__init__.py").is_file() for wing in ("rescue", "autopsy")):
        return Plain()
    from rescue import Rescue

    return Rescue()


def process(run: Run) -> int:
    """Set device, ranks, seeds and torch's switches. Returns this process's rank on its machine."""
    args = run.args
    with refusing(ValueError):
        run.device, run.rank, local_rank, run.world_size = join(args.device)
    must_agree(vars(args) | {"data_dir": None, "cache_dir": None})  # each machine has its own
    torch.manual_seed(args.seed)  # the same weights on every rank
    random.seed(args.seed)
    torch.autograd.set_detect_anomaly(args.detect_anomaly)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    return local_rank


def read_init(run: Run, saved: dict | None, local_rank: int) -> Weights | None:
    """Read --init, unless the run goes on from a checkpoint. The normalisation goes with the
    weights, and the size of the images too."""
    if saved:
        run.start = saved["identity"]["start"]
    elif run.args.init:
        with (
            refusing(checkpoint.CheckpointError, OSError),
            first_on_each_machine(local_rank),
        ):
            from . import pretrained  # for nobody else

            weights = pretrained.read(run.args.init, run.args.model)
        facts = ("mean", "std", "image_size")
        run.start = {name: weights.known.get(name) for name in facts}
        return weights
    return None


def data(run: Run, saved: dict | None, local_rank: int) -> list[str]:
    """Load the data and make the stream of batches. Returns a sentence for each unreadable file.

    Only this function maps errors of data to exit codes: 2 for a wrong argument, 4 for bad data.
    """
    args = run.args
    left_out = []
    size = args.image_size
    if run.start and args.dataset == "imagefolder":
        size = size or run.start["image_size"]
    refuse_output_in_data(args)
    decoding = functools.partial(tqdm, desc="decoding", leave=False, disable=hides_progress())
    with (
        refusing(OSError, ValueError, code=4),
        refusing(WrongArgument, FileNotFoundError),
        first_on_each_machine(local_rank),
    ):
        run.data = load(
            args.dataset,
            args.data_dir,
            decoding,
            size,
            args.max_bad_share,
            None if args.workers else args.cache_dir,
            warn=left_out.append,
            say=report.print_line if run.rank == 0 else str,
            val_share=args.val_share,
        )
    args.dataset, args.val_share = run.data.name, run.data.val_share
    if run.start:
        run.data.mean, run.data.std = run.start["mean"], run.start["std"]
    refuse_other_data(run)
    run.accum = args.accum_steps
    plan.choose_batch(run, saved)
    run.data.place(run.device)
    make_stream(run)
    return left_out


def refuse_output_in_data(args):
    if args.dataset == "imagefolder" and args.data_dir and args.out_dir:
        data_dir = args.data_dir.resolve()
        if data_dir in (args.out_dir.resolve(), *args.out_dir.resolve().parents):
            refuse(
                2,
                f"--out-dir {args.out_dir} lies in --data-dir {args.data_dir}: what the run "
                "writes would become data. Name a folder elsewhere",
            )


def refuse_other_data(run: Run):
    """Refuse data that do not fit --init or --num-classes."""
    args = run.args
    if run.start and len(run.data.mean) != run.data.channels:
        refuse(
            2,
            f"--init {args.init} is for images of {len(run.data.mean)} channels, and "
            f"{run.data.name} has {run.data.channels}",
        )
    outputs = len(run.data.classes)
    if args.num_classes not in (None, outputs):
        refuse(
            2,
            f"--num-classes {args.num_classes}, but {run.data.name} has {outputs} classes: "
            "leave the flag out",
        )


def make_stream(run: Run):
    args, recipe = run.args, run.args.recipe
    with refusing(ValueError):
        run.stream = batches.TrainBatches(
            *run.data.train,
            batch_size=args.batch_size,
            rank=run.rank,
            world_size=run.world_size,
            seed=args.seed,
            device=run.device,
            normalize=batches.Normalize(run.data.mean, run.data.std),
            scale=run.data.scale,
            size=run.data.image_size,
            cutout=args.cutout,
            workers=args.workers,
            augment=recipe["augment"],
        )
        # For the trials of a step: how many of these there are is known only after them.
        run.stream.start_small(1 if recipe["small"] else 0)


def network(run: Run, weights: Weights | None) -> str:
    """Build the network, bare and with its loss, on the device. Returns a sentence about --init."""
    args = run.args
    recipe = args.recipe
    with refusing(DoesNotFit), fitting(args.model):
        net = build(args.model, run.data.classes, run.data.image_size, run.data.channels)
        set_drop_path(net, args.drop_path)
        balance = None
        if args.class_weights == "balanced":
            balance = classes.weights(run.data.train[1], len(run.data.classes)).to(run.device)
        run.model = wrap(net, recipe["label_smoothing"], run.data.regression, balance)
        for flag, patterns in (("--no-decay", args.no_decay), ("--muon", args.muon)):
            for pattern in patterns:
                if not fnmatch.filter(dict(net.named_parameters()), pattern):
                    refuse(2, f"{flag} {pattern} matches no parameter of {args.model}")
        if hasattr(net, "init_from_data"):
            images, labels = run.data.train
            net.init_from_data(run.stream.normalize(images[:: max(10, len(labels) // 5000)]))
        run.net = net.to(run.device, memory_format=torch.channels_last)
        plan.seconds_of(run, torch.float32, min(2, args.batch_size // run.world_size // run.accum))
    if not (weights or args.freeze):
        return ""
    from . import pretrained

    began = pretrained.start_from(run, weights) if weights else ""
    pretrained.freeze(run.net, args.freeze)
    return began


def training(run: Run):
    """Make optimizers, schedule, loss scale, guard, averaged weights, DistributedDataParallel."""
    args, recipe = run.args, run.args.recipe
    masters = run.policy.masters
    matrices = muon.matrices(run.net, args.muon)
    loaded = dict.fromkeys(run.start["loaded"] if run.start else (), plan.SLOW)
    groups = optim.param_groups(
        run.net, args.weight_decay, args.no_decay, loaded | recipe["lr_scale"], skip=matrices
    )
    adamw = optim.ClippedAdamW(
        groups, args.lr, args.betas, args.adam_eps, amsgrad=args.amsgrad, clip=None, masters=masters
    )
    run.optimizers = [adamw]
    if matrices:
        run.optimizers.append(
            muon.Muon(matrices, args.lr, masters=masters, **recipe["muon_options"])
        )
    rates = optim.warmup_cosine(run.total_steps, args.warmup_updates, kind=recipe["schedule"])
    run.schedule = optim.Schedule(run.optimizers, rates)
    run.clip = args.clip_grad
    run.scaler = amp_policy.LossScaler(run.device.type, enabled=run.policy.scales)
    run.guard = guards.Guard(
        run.net,
        num_classes=None if run.data.regression else len(run.data.classes),
        ignore_index=None,  # in a data set of classes every picture has one
        carries=(*run.rescue.carries, *loss_names(run.world_size)),
    )
    if args.ema:
        run.ema = ema.EMA(optim.master_params(run.optimizers).values(), args.ema)
    run.ddp = parallel(run.model, run.device)
    run.compiled = run.ddp


def compilation(run: Run) -> str:
    """Compile the network if you asked for it or if it pays. Returns a sentence about it.

    Planted faults need eager mode. Without a CUDA graph the host, not the network, takes the time
    of a step.
    """
    args = run.args
    if args.compile == "on" and not args.inject:
        run.compiled = torch.compile(run.ddp, dynamic=False)
        return "compiled"
    if args.compile != "auto" or not run.graph:
        return "not compiled"
    trial = functools.partial(plan.seconds_of, run, run.policy.dtype, args.batch_size // run.accum)
    shapes = 2 if args.recipe["small"] else 1
    run.compiled, why = graphs.compile_if_it_pays(run.ddp, run.total_steps // shapes, trial)
    return why


def folder(run: Run, saved: dict | None) -> str:
    """Resume from the checkpoint; make the folder and its files. Returns a note on the resume."""
    args = run.args
    run.identity = resume.identity(run)
    with refusing(checkpoint.CheckpointError, OSError, RuntimeError, ValueError):
        note = resume.load_whole_state(run, saved) if saved else ""
        if run.rank == 0:
            run.folder = resume.make_folder(run, saved)
            checkpoint.Checkpoints(run.folder).lock()  # for as long as this process lives
    run.folder = agreed(run.folder)
    run.checkpoints = checkpoint.Checkpoints(run.folder)
    resume.check_folder(run, saved)
    with (
        refusing(OSError),
        refusing(ImportError, advice="; --tensorboard needs it: pip install tensorboard"),
    ):
        run.log = report.MetricsFile(
            run.folder,
            {"args": vars(args), **run.identity},
            run.step,
            args.tensorboard,
            writes=run.rank == 0,
            print_with=tqdm.write,
        )
    return note
