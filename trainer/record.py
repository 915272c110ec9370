"""
Record: what a run is, and all that changes in it: typed data; and what a run asks of rescue/.

This file holds each fact once. No field carries a message from one function to another: a function
returns what it finds. Every file may import this one, except those that are copied alone.

`Plain` is the one seam between the trainer and the folder rescue/: it says when train.py asks, and
what happens if nobody answers. rescue.Rescue has the same methods. Delete rescue/ and autopsy/, and
train.py still trains: a bad step is skipped, and --max-skips of them in a row end the run.
"""

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from tqdm import tqdm

from amp_policy import LossScaler, Policy
from checkpoint import Checkpoints
from data import Dataset
from data.batches import TrainBatches
from extras.ema import EMA
from extras.graphs import StepGraph
from guards import Guard, Verdict
from optim import Schedule
from ranks import refuse
from report import MetricsFile


class End(NamedTuple):
    """How a run ended."""

    status: str  # done, failed, diverged, bad data, suspected hardware, stopped by signal 15
    code: int  # the exit code
    reason: str = ""


class Kind(Enum):
    """Of a finding."""

    SIGNAL = auto()  # the run is to stop
    TOO_MANY = auto()  # too many steps in a row were rejected
    LOST = auto()  # the run has lost what it learnt
    # What rescue/ finds
    REJECTED = auto()  # this step
    NO_MEMORY = auto()  # memory has ended on some rank
    MISMATCH = auto()  # a pass differed from itself, or a rank from the others


class Finding(NamedTuple):
    """What the host has learnt about a step and must respond to."""

    kind: Kind
    step: int
    verdict: Verdict | None = None
    reason: str = ""


def loss_names(world_size: int) -> tuple[str, ...]:
    """Names for the guard, by which each rank's loss travels to all; () in one process."""
    return tuple(f"loss of rank {rank}" for rank in range(world_size)) if world_size > 1 else ()


class StepWatch:
    """What is looked at in one step: nothing."""

    inspect: Callable[[], None] | None = None  # call it between the last backward and the decision
    eager = False  # whether to run the step without compiled code

    def end(self):
        """After the step."""


class Plain:
    """What a run does about trouble without the folder rescue/: it skips bad steps, and it ends."""

    carries: tuple[str, ...] = ()  # names for the guard, which brings their maximum of all ranks

    @staticmethod
    def replay(path):
        refuse(2, "--replay needs the folder rescue/")

    def attach(self, run):
        """After the network and its precision are known, before the optimizers are made."""
        if run.args.inject:
            refuse(2, "--inject needs the folder rescue/")

    def begin(self, run, images, labels):
        """Before a step: the batch to train on."""
        return images, labels

    def reads_at_once(self, run):
        """Whether the verdict on this step is read at once, and not a step late."""
        return False

    def watch(self, run, step, images, labels):
        """Before a step: what is looked at in it."""
        return StepWatch()

    def out_of_memory(self, run):
        """In the middle of DDP's average: veto the step on all ranks, or raise."""
        raise torch.OutOfMemoryError("a micro-batch does not fit into memory")

    def make_room(self, run, error):
        """Anywhere else in a step: make the step fit, or raise the error."""
        raise error

    def findings(self, run, verdict):
        """What a verdict says beyond "skipped" and "too many in a row"."""
        loss, trend = verdict.stats["loss"], run.healing.trend
        if verdict.accepted:
            trend.mean = loss if math.isnan(trend.mean) else trend.mean + 0.1 * (loss - trend.mean)
        return []

    def respond(self, run, finding, again):
        """Respond. Returns (the end of the run or None, what was found meanwhile). again(run, step,
        images, labels) takes a step once more and returns what was found."""
        return End("diverged", 3, finding.reason), []

    def unsound(self, run):
        """After a validation: why the model is lost, or ""."""
        finite = all(map(math.isfinite, run.scores.values()))
        return "" if finite else f"the validation is non-finite: {run.scores}"

    def vouches(self, run):
        """Before a save: whether the state may become last_good."""
        return run.guard.skipped_in_a_row == 0

    def objections(self, run):
        """Why this run did not end well: sentences."""
        skipped, steps = run.guard.skipped, run.guard.steps
        mostly = skipped > 0.5 * steps
        return [f"{skipped} of {steps} steps were rejected"] if mostly else []

    def summary(self, run):
        """For the last line: what was done about trouble."""
        return {"healed": run.healing.healed}


@dataclass
class Trend:
    """The loss of the accepted steps: what a run has learnt, and whether it still has it."""

    first: list[float] = field(default_factory=list)  # the first ten losses
    start: float = math.inf  # the loss before anything was learnt
    usual: float = 0.0  # moving mean, without the losses that are far above it
    mean: float = math.nan  # moving mean of all losses
    lowest: float = math.inf  # the lowest moving mean
    chance_since: int = 0  # the step from which on all validations were at chance; 0: none
    suspicions: dict[str, int] = field(default_factory=dict)  # notice.Suspicion: steps in a row
    # "highest", "lowest": the rank with that loss, and for how many steps in a row
    extremes: dict[str, list[int]] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)  # of the last validation
    same_since: int = 0  # the step from which on all validations had these scores


EAGER_MODE = "eager mode"  # in Healing.healed: what is compiled is used no more


@dataclass
class Healing:
    """What healing has done and what it watches. The checkpoint holds all of it."""

    healed: list[str] = field(default_factory=list)  # modules now in fp32, precisions gone to
    cures: list[str] = field(default_factory=list)  # the verdict of each
    hunt_until: int = 0  # after a bad step: the last step to record before it runs
    examined_until: int = 0  # the last step that ran before the last cure
    extra_steps: int = 0  # that a turn back has added to the run
    trend: Trend = field(default_factory=Trend)
    other_set: int = 0  # the step at which it went on with other validation images
    # Of each tensor the last look at which it had moved, had a gradient, had a learning rate
    signs: dict[str, list[int]] = field(default_factory=dict)
    sample: torch.Tensor | None = None  # some elements of each, as they were at the last look
    start: torch.Tensor | None = None  # and at the first
    looked: int = 0  # the step of the last look
    walked: dict[str, float] = field(default_factory=dict)  # of each: the sum of squared updates
    repeatable: dict[str, bool] = field(default_factory=dict)  # by image size and precision


@dataclass
class Speed:
    """Of this process, without validation."""

    images: int = 0
    seconds: float = 0.0


@dataclass(kw_only=True)
class Run:
    """train_step() needs model, policy, scaler, guard and optimizers. All else has a default, so
    that a bench, a test or a notebook takes the same step with five objects of its own."""

    args: argparse.Namespace = field(default_factory=argparse.Namespace)  # recipe filled in
    began: float = field(default_factory=time.time)
    # Where it runs
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    rank: int = 0
    world_size: int = 1
    # The data
    data: Dataset | None = None
    start: dict | None = None  # of --init: mean, std, image_size, and the names it has loaded
    stream: TrainBatches | None = None  # training batches: a pure function of the step
    # One network, four names: bare; with its loss; under DistributedDataParallel; compiled
    net: nn.Module | None = None
    model: nn.Module | None = None  # model(images, labels) -> loss, metrics
    ddp: nn.Module | None = None  # the model itself where there is one process
    compiled: nn.Module | None = None  # ddp itself without --compile
    # What a step uses. A cure may exchange policy, scaler and accum.
    policy: Policy | None = None
    scaler: LossScaler | None = None
    guard: Guard | None = None
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    schedule: Schedule | None = None
    clip: float | None = None  # largest gradient norm
    accum: int = 1  # micro-batches an update
    ema: EMA | None = None
    rescue: Plain = field(default_factory=Plain)  # what it does about trouble
    injector: Any = None  # rescue/inject.py's Injector: Rescue.attach() makes it
    graph: StepGraph | None = None  # the step as one CUDA graph
    # What it leaves behind
    identity: dict = field(default_factory=dict)  # by which a resumed run knows itself again
    folder: Path = Path()
    checkpoints: Checkpoints | None = None
    log: MetricsFile | None = None
    bar: tqdm | None = None
    # Where it stands
    step: int = 0  # attempted
    total_steps: int = 0
    epoch_steps: int = 1
    validate_every: int = 1  # steps: an epoch, or several short ones
    updates: int = 0  # accepted steps, as far as the host knows
    scores: dict[str, float] = field(default_factory=dict)  # of the last validation
    best: list[float] | None = None  # its score and -loss: among equal scores the lower loss wins
    speed: Speed = field(default_factory=Speed)
    healing: Healing = field(default_factory=Healing)

    def veto(self) -> None:
        """For ranks.backward(): memory has ended in the middle of DDP's average."""
        self.rescue.out_of_memory(self)
