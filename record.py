"""
Record: what a run is, and all that changes in it. Typed data, no methods.

This file holds each fact once. No field carries a message from one function to another: a function
returns what it finds. All wiring may import this file (train, prepare, validation, rescue/heal,
rescue/verify).
"""

import argparse
import math
import time
from dataclasses import dataclass, field
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
from guards import Guard
from optim import Schedule
from report import MetricsFile


class End(NamedTuple):
    """How a run ended."""

    status: str  # done, failed, diverged, bad data, suspected hardware, stopped by signal 15
    code: int  # the exit code
    reason: str = ""


@dataclass
class Trend:
    """The loss of the accepted steps: what a run has learnt, and whether it still has it."""

    first: list[float] = field(default_factory=list)  # the first ten losses
    start: float = math.inf  # the loss before anything was learnt
    usual: float = 0.0  # moving mean, without the losses that are far above it
    mean: float = math.nan  # moving mean of all losses
    lowest: float = math.inf  # the lowest moving mean
    chance_since: int = 0  # the step from which on all validations were at chance; 0: none
    suspicions: dict[str, int] = field(default_factory=dict)  # open ones: steps in a row


@dataclass
class Healing:
    """What healing has done and what it watches. The checkpoint holds all of it."""

    healed: list[str] = field(default_factory=list)  # modules now in fp32, precisions gone to
    cures: list[str] = field(default_factory=list)  # the verdict of each
    hunt_until: int = 0  # after a bad step: the last step to record before it runs
    examined_until: int = 0  # the last step that ran before the last cure
    extra_steps: int = 0  # that a turn back has added to the run
    trend: Trend = field(default_factory=Trend)
    # Of each tensor the last look at which it had moved, had a gradient, had a learning rate
    signs: dict[str, list[int]] = field(default_factory=dict)
    sample: torch.Tensor | None = None  # some elements of each, as they were at the last look
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
    injector: Any = None  # rescue/inject.py's Injector
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
    updates: int = 0  # accepted steps, as far as the host knows
    scores: dict[str, float] = field(default_factory=dict)  # of the last validation
    best: float | None = None
    speed: Speed = field(default_factory=Speed)
    healing: Healing = field(default_factory=Healing)
