"""
Precision: in which type a run computes, and how long a step takes then.

What the user did not choose is measured: a step of the network in each type that the device has.
Two ranks may measure different times, so rank 0 decides for all.
"""

from __future__ import annotations

import dataclasses
import functools
import time

import torch
from torch import nn

import amp_policy
import fp32
import optim
from extras import muon
from ranks import agreed, refuse, refusing

from .record import Run


def seconds_of(run: Run, dtype: torch.dtype, count: int, model: nn.Module | None = None) -> float:
    """Time a forward and backward pass on `count` images."""
    images, labels = (t[:count] for t in run.stream.at(0))
    labels = torch.zeros_like(labels)
    return amp_policy.seconds_of_pass(model or run.model, images, labels, dtype)


def precision(run: Run, saved: dict | None) -> float | None:
    """Choose the precision. Returns the seconds of a step, or None if it timed nothing."""
    args = run.args
    wanted = args.precision
    caps = amp_policy.capabilities(run.device)
    resumes = saved is not None and wanted == "auto"
    if resumes:  # nothing measured may change a run that goes on
        wanted = saved["identity"]["precision"]
    images = args.batch_size // run.world_size
    micro_batch = images // run.accum
    # A quarter of it: what just fits in half precision has to fit in fp32 here.
    count = max(min(2, micro_batch), min(micro_batch // 4, 64))

    @functools.cache
    def step(dtype):
        seconds_of(run, dtype, count)  # the first one warms up
        return seconds_of(run, dtype, count) * images / count

    norms = [m for m in run.net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    policy = seconds = None
    if run.rank == 0:
        gains = caps.native_bf16 and run.device.type == "cuda"  # known: nothing to measure
        own_step = None if gains or resumes else lambda _, dtypes: tuple(map(step, dtypes))
        policy = amp_policy.choose_policy(wanted, caps, stopwatch=own_step)
        if norms and gains and wanted == "auto" and policy.name == "bf16":
            # cuDNN has a BatchNorm for float16 and none for bfloat16.
            other = amp_policy.choose_policy("fp16", caps, stopwatch=None)
            ratio = step(torch.float16) / step(torch.bfloat16)
            if ratio < 0.9 and not other.warnings:
                why = f"this network's step takes {ratio:.2g} of its time in bfloat16"
                policy = dataclasses.replace(other, reason=why)
        seconds = None if gains else step(policy.dtype) + seconds_of_muon(run)
    policy, seconds = agreed((policy, seconds))
    run.policy = policy
    with refusing(ValueError):
        fp32.keep_fp32(run.net, args.keep_fp32)
        run.net = policy.prepare(run.net)
    # Adam's state has the dtype of the weights, or of their fp32 masters.
    state = torch.float32 if policy.masters else policy.param_dtype
    if why := optim.refusal(state, args.adam_eps, args.betas[1]):
        refuse(2, f"{why}: take another --adam-eps, --betas or --precision")
    return seconds


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
