"""
Capsule: a bad step in one file, to be examined again on any machine.

A step that went bad on a GPU at night is gone in the morning. So the first time that a run examines
a step, the guilty rank writes it down: weights, moments, buffers, random numbers, micro-batches,
and the verdict. `python train.py --replay FILE` rebuilds the step, on a CPU too, examines it, and
prints both verdicts. It runs no code in the file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from torch import Tensor

import amp_policy
import autopsy
import checkpoint
from data import LARGEST
from fp32 import keep_fp32
from models import MODELS, build, set_drop_path, wrap
from report import print_line
from rescue import inject
from trainer import resume, schema
from trainer.record import Run


class Recorded(TypedDict):
    """Of a StepRecord."""

    step: int
    rank: int
    buffers: dict[str, Tensor]
    rng: dict[str, Any]
    batches: list[tuple[Tensor, ...]]  # images, labels
    indices: list[list[int]]


class Capsule(NamedTuple):
    """What the file holds: the state of the run, the step, and the verdict."""

    state: schema.State
    record: Recorded
    verdict: str
    class_names: list[str]
    num_classes: int | None  # None: a regression
    inject: str


def save(path: Path, run: Run, kept: autopsy.StepRecord, report: autopsy.Report) -> None:
    """Write the step to disk, whole or not at all."""
    content = Capsule(
        state=resume.whole_state(run, rng=[]),
        record={name: getattr(kept, name) for name in Recorded.__annotations__},
        verdict=str(report.verdict),
        class_names=run.data.classes,
        num_classes=run.guard.num_classes,
        inject=run.args.inject,
    )
    checkpoint.write(path, checkpoint.packed(*checkpoint.snapshot(content._asdict())))


def replay(path: Path, rerun: Callable) -> int:
    """Examine the step in a capsule again, on the CPU, and print both verdicts; 0 if they agree.

    rerun: heal.rerun. A CUDA generator's state means nothing on a CPU: there, dropout draws other
    masks. CheckpointError or ValueError, one sentence: this is no capsule, or not of these models.
    """
    found = checkpoint.load(path)
    with schema.reading(path):
        try:
            schema.require(found, Capsule, "its content")
        except ValueError as error:
            raise ValueError(f"this is not a capsule of a bad step: {error}") from error
        schema.refuse_unsound(found["state"])
        content = Capsule(**found)
        state = content.state
        about = state["identity"]
        if about["model"] not in MODELS:
            raise ValueError(f"the model {about['model']} is not here")
        names = content.class_names
        if not 0 < len(names) < 10**5 or content.num_classes not in (None, len(names)):
            raise ValueError(f"it has {len(names)} names for {content.num_classes} classes")
        record = content.record
        size = record["batches"][0][0].shape[1:]
        channels, side, _ = size
        for (images, labels), indices in zip(record["batches"], record["indices"], strict=True):
            if images.shape != (len(labels), *size) or len(indices) not in (0, len(labels)):
                raise ValueError("its batches are not images with labels and indices")
        if not (images.is_floating_point() and 0 < side <= LARGEST and 0 < channels <= LARGEST):
            raise ValueError(f"images of {tuple(size)} are none")
    net = build(about["model"], names, side, channels)
    set_drop_path(net, about["drop_path"])
    keep_fp32(net, state["pinned"])
    keep_fp32(net, state["keep_output"], keep_output=True)
    caps = amp_policy.capabilities("cpu")
    policy = amp_policy.choose_policy(state["policy"], caps, None, None)
    net = policy.prepare(net)
    kept = autopsy.StepRecord(0, net)
    with schema.reading(path):
        schema.load_weights(net, state["model"])
        vars(kept).update(content.record)
        kept.restore()
    recipe = MODELS[about["model"]][1]
    model = wrap(net, recipe["label_smoothing"], regression=content.num_classes is None)
    injector = inject.Injector(net, content.inject, model, kept.rank, policy.scales)
    injector.begin(kept.step)
    run = Run(net=net, model=model, policy=policy, injector=injector)
    report = autopsy.examine(
        rerun(run, kept),
        kept,
        net,
        state=dict(enumerate(state["optimizers"])),
        num_classes=content.num_classes,
        precision=policy.name,
        advice="flags",
    )
    print_line(
        f"{report}\nrecorded verdict: {content.verdict[:80]}, replayed on the CPU: {report.verdict}"
    )
    return int(report.verdict != content.verdict)
