"""
Capsule: a bad step in one file, to be examined again on any machine.

A step that was bad on the GPU of a night is gone in the morning. So the first time that a step is
examined, the guilty rank writes it down: weights, moments, buffers, random numbers, micro-batches,
and the report. `python train.py --replay FILE` puts the step together again, on a CPU too, examines
it, and prints both verdicts. No code in the file is run. This file is wiring: heal.py calls it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import amp_policy
import autopsy
import checkpoint
from fp32 import keep_fp32
from models import MODELS, build, set_drop_path, wrap
from record import Run
from rescue import inject, resume


class Capsule(NamedTuple):
    """What the file holds: the state of the run, and the step."""

    state: dict  # see resume.whole_state
    step: int
    rank: int
    buffers: dict
    rng: dict
    batches: list
    indices: list
    report: dict
    class_names: list[str]
    num_classes: int | None  # None: a regression
    image_size: int
    inject: str


def save(path: Path, run: Run, kept: autopsy.StepRecord, report: autopsy.Report) -> None:
    """The step on disk, whole or not at all."""
    content = Capsule(
        state=resume.whole_state(run, rng=[]),
        step=kept.step,
        rank=kept.rank,
        buffers=kept.buffers,
        rng=kept.rng,
        batches=kept.batches,
        indices=kept.indices,
        report=asdict(report),
        class_names=run.data.classes,
        num_classes=run.guard.num_classes,
        image_size=kept.batches[0][0].shape[-1],
        inject=run.args.inject,
    )
    on_cpu = tree_map_only(Tensor, lambda t: t.detach().cpu(), content._asdict())
    torch.save(on_cpu, f"{path}.part")
    os.replace(f"{path}.part", path)


def replay(path: Path, rerun: Callable) -> int:
    """Examine the step in a capsule again, on the CPU, and print both verdicts; 0 if they agree.

    rerun: heal.rerun. A CUDA generator's state means nothing on a CPU: there, dropout draws other
    masks. CheckpointError or ValueError, one sentence: this is no capsule, or not of these models.
    """
    try:
        content = Capsule(**checkpoint.load(path))
    except TypeError as error:
        raise ValueError(f"{path} is no capsule of a bad step: {error}") from error
    state = content.state
    about = state["identity"]
    if about["model"] not in MODELS:
        raise ValueError(f"{path} is of the model {about['model']}, which is not here")
    recipe = MODELS[about["model"]][1]
    channels = content.batches[0][0].shape[1]
    net = build(about["model"], content.class_names, content.image_size, channels)
    set_drop_path(net, about["drop_path"])
    keep_fp32(net, state["pinned"])
    caps = amp_policy.capabilities("cpu")
    policy = amp_policy.choose_policy(state["policy"], caps, None, None)
    net = policy.prepare(net)
    try:
        net.load_state_dict(state["model"])
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        raise ValueError(f"{path} does not fit this {about['model']}: {why}") from error
    kept = autopsy.StepRecord(content.step, net, rank=content.rank)
    for name in ("buffers", "rng", "batches", "indices"):
        setattr(kept, name, getattr(content, name))
    faults = inject.parse_inject(content.inject)
    injector = inject.Injector(net, faults, kept.rank, scales=policy.scales)
    injector.begin(kept.step, state=False)
    model = wrap(net, recipe["label_smoothing"], regression=content.num_classes is None)
    injector.attach(model)
    run = Run(net=net, model=model, policy=policy, injector=injector)
    report = autopsy.examine(
        rerun(run, kept), kept, net, state=dict(enumerate(state["optimizers"])),
        num_classes=content.num_classes, precision=policy.name, advice="flags",
    )
    recorded = content.report["verdict"]
    print(f"{report}\nrecorded verdict: {recorded}, replayed on the CPU: {report.verdict}")
    return int(report.verdict != recorded)
