"""
Plan: in which precision a run computes, how many images a step takes, how many steps there are, and
when it validates.

A network learns by updates, not by epochs. Ten epochs of 60 pictures in batches of 256 would be ten
updates: the run would end well and know nothing. So the plan is in updates where an epoch has few
steps. A precision that nobody chose is measured, and what a step takes then.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from datetime import timedelta

import torch
from torch import nn

import amp_policy
import fp32
import optim
from extras import muon
from models import FINE_TUNE
from ranks import agreed, refuse, refusing

from .flags import scaled_lr
from .record import Run

SLOW = 0.02  # of the rate, for weights that --init has loaded
FEW = 32  # images in a batch, of a set of less than 256


def choose_batch(run: Run, saved: dict | None = None):
    """Set the batch size and the learning rate, and a reason for them. The recipe's batch may be
    larger than a small set: four batches an epoch, of 16 images or more, also learn from it. A run
    that goes on (`saved`) gives Muon what it had."""
    args, recipe, total = run.args, run.args.recipe, len(run.data.train[1])
    pieces = run.world_size * args.accum_steps
    quarter = 2 ** max(4, int(math.log2(max(total, 4) / 4)))
    suits = min(recipe["batch_size"], quarter, total)
    suits = max(pieces, suits - suits % pieces)
    why, usual = "", recipe
    alone = not saved["identity"].get("muon") if saved else args.batch_size is None
    if args.batch_size is None:
        args.batch_size = suits
        if suits != recipe["batch_size"]:
            why = f"batch {suits}, not {recipe['batch_size']}, for {total:,} images; "
    few = args.batch_size <= FEW and args.batch_size < recipe["batch_size"]
    if alone and few and recipe["muon"] and args.muon == recipe["muon"]:
        # Muon turns each matrix once a step: that takes longer than so few images.
        args.muon, usual, why = [], FINE_TUNE, f"AdamW alone, {why}"
    if args.batch_size % pieces:
        refuse(
            2,
            f"--batch-size {args.batch_size} does not split evenly over {run.world_size} "
            f"rank(s) and --accum-steps {args.accum_steps}: make it a multiple of {pieces}",
        )
    if args.batch_size > total:
        refuse(
            2,
            f"--batch-size {args.batch_size} is more than all {total} training images: "
            f"leave the flag out (it will be {suits}), or take at most {total}",
        )
    rate = f"lr {args.lr} as asked"
    if args.lr is None:
        args.lr, rate = scaled_lr(
            usual["lr"], args.batch_size, usual["batch_size"], usual["lr_rule"]
        )
    args.lr_reason = why + rate


def length(run: Run, saved: dict | None, seconds: float | None) -> tuple[str, str]:
    """Set the number of steps, and what is a share of it. Returns a sentence about it, and a
    warning or "".

    A GPU gets the whole recipe, and its least number of updates: ten epochs of 60 images are 40. A
    CPU gets as many steps as take two minutes.
    """
    args, recipe = run.args, run.args.recipe
    run.epoch_steps = run.stream.steps_per_epoch
    epochs = max(recipe["epochs"], math.ceil(recipe["updates"] / run.epoch_steps))
    why = "as asked"
    if args.max_steps:
        steps = args.max_steps
    elif args.epochs:
        steps = max(1, round(args.epochs * run.epoch_steps))
    elif saved:
        steps = saved["identity"]["total_steps"]
        why = "as the checkpoint says"
    else:
        steps = epochs * run.epoch_steps
        why = "the whole recipe"
        if epochs > recipe["epochs"]:
            why = f"the recipe's {recipe['epochs']} epochs would be too few updates"
        if run.device.type == "cpu" and steps * seconds > 120:
            # In tens, so that a second run has the same number.
            steps = min(steps, max(10, int(120 / seconds) // 10 * 10))
            why = f"short, for a CPU; the whole recipe is --epochs {epochs}"
    run.total_steps = steps
    # Several epochs of few steps have one validation and one save.
    together = min(math.ceil(20 / run.epoch_steps), steps // run.epoch_steps // 20)
    run.validate_every = run.epoch_steps * max(1, together)
    if args.verify_every is None:
        args.verify_every = run.validate_every
    run.stream.start_small(round(steps * recipe["small"]))
    if args.warmup_updates is None:
        args.warmup_updates = int(steps * recipe["warmup"])
    takes = f", about {timedelta(seconds=round(steps * seconds))} here" if seconds else ""
    warning = ""
    images = steps * args.batch_size  # half an epoch of a large set teaches as much
    few = steps < recipe["updates"] and images < 32 * recipe["updates"]
    if few and not args.max_steps:
        warning = (
            f"{steps} updates are few to learn from: --epochs {epochs} makes "
            f"{epochs * run.epoch_steps}"
        )
    return f"{steps} steps = {steps / run.epoch_steps:.1f} epochs{takes}; {why}", warning


def seconds_of(run: Run, dtype: torch.dtype, count: int, model: nn.Module | None = None) -> float:
    """Time a forward and backward pass on `count` images."""
    images, labels = (t[:count] for t in run.stream.at(0))
    labels = torch.zeros_like(labels)
    return amp_policy.seconds_of_pass(model or run.model, images, labels, dtype)


def precision(run: Run, saved: dict | None) -> float | None:
    """Choose the precision and cast the network. Returns the seconds of a step, or None if it timed
    nothing.

    Two ranks may measure different times, so rank 0 decides.
    """
    policy, seconds = _choose(run, saved) if run.rank == 0 else (None, None)
    run.policy, seconds = agreed((policy, seconds))
    with refusing(ValueError):
        fp32.keep_fp32(run.net, run.args.keep_fp32)
        run.net = run.policy.prepare(run.net)
    _refuse_half_moments(run)
    return seconds


def _choose(run, saved):
    """(policy, seconds of a step or None)"""
    caps = amp_policy.capabilities(run.device)
    step = functools.cache(functools.partial(seconds_of_step, run))

    def stopwatch(_, dtypes):
        return tuple(map(step, dtypes))

    wanted = run.args.precision
    resumes = saved is not None and wanted == "auto"
    if resumes:  # nothing measured may change a run that goes on
        wanted = saved["identity"]["precision"]
    known = caps.native_bf16 and run.device.type == "cuda"  # bfloat16 gains
    timer = None if known or resumes else stopwatch
    policy = amp_policy.choose_policy(wanted, caps, stopwatch=timer)
    if not known:
        return policy, step(policy.dtype) + seconds_of_muon(run)
    has_norms = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in run.net.modules())
    if has_norms and wanted == "auto" and policy.name == "bf16":
        # cuDNN has a BatchNorm for float16 and none for bfloat16.
        other = amp_policy.choose_policy("fp16", caps, stopwatch=None)
        ratio = step(torch.float16) / step(torch.bfloat16)
        if ratio < 0.9 and not other.warnings:
            why = f"this network's step takes {ratio:.2g} of its time in bfloat16"
            policy = dataclasses.replace(other, reason=why)
    return policy, None


def _refuse_half_moments(run):
    """Adam's state has the dtype of the weights, or of their fp32 masters."""
    state = torch.float32 if run.policy.masters else run.policy.param_dtype
    if why := optim.refusal(state, run.args.adam_eps, run.args.betas[1]):
        refuse(2, f"{why}: take another --adam-eps, --betas or --precision")


def seconds_of_step(run: Run, dtype: torch.dtype) -> float:
    """Of all micro-batches of a rank, from the second of two passes on fewer images."""
    images = run.args.batch_size // run.world_size
    micro_batch = images // run.accum
    # A quarter of it: what just fits in half precision has to fit in fp32 here.
    count = max(min(2, micro_batch), min(micro_batch // 4, 64))
    seconds_of(run, dtype, count)  # the first one warms up
    return seconds_of(run, dtype, count) * images / count


def seconds_of_muon(run: Run) -> float:
    """Seconds in which Muon turns the matrices: on a CPU most of a step of few images."""
    turned = muon.matrices(run.net, run.args.muon) if run.device.type == "cpu" else []
    if not turned:
        return 0.0
    copies = [nn.Parameter(p.detach().float().clone()) for p in turned]
    for p in copies:
        p.grad = p.detach().clone()
    optimizer = muon.Muon(copies, **run.args.recipe["muon_options"])
    began = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - began
