"""
Schema: what a checkpoint must hold, so that a run can go on from it.

A file may come from anywhere: an older version, a bug, a stranger. The checksums say that it is
whole, not that it is ours. torch converts weights of another type without a word; a counter that is
a string breaks the night in which a cure adds to it; a NaN in the trend silences every comparison
with it. So before a run takes anything over, `State` checks names and types, and `refuse_unsound`
the bounds. Whether a state fits the network shows when it is loaded: `reading` makes a sentence of
the error.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import Any, TypedDict, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_policy import POLICIES
from checkpoint import LIMIT, CheckpointError, load_run, named_tensors

from .record import Healing

FIXED = (  # of a run
    "val_share", "model", "dataset", "num_classes", "images", "pixels", "labels", "muon",
    "no_decay", "amsgrad", "init", "freeze", "class_weights",
)  # fmt: skip
MOST = 10**7  # steps
MOST_ENTRIES = 10**5  # of a list, or of a dict
MOMENTS = {  # of a parameter, by an option of its optimizer
    "betas": ("step", "exp_avg", "exp_avg_sq"),
    "amsgrad": ("max_exp_avg_sq",),
    "ns_steps": ("momentum_buffer",),
}


class Start(TypedDict):
    """What --init has brought."""

    mean: list[float]
    std: list[float]
    image_size: int | None
    loaded: list[str]


class Identity(TypedDict):
    """Of resume.identity() what is read before the rest is compared."""

    model: str
    precision: str
    total_steps: int
    batch_size: int
    images: int
    drop_path: float
    start: Start | None


class OptimizerState(TypedDict):
    param_groups: list[dict[str, Any]]
    state: dict[int, dict[str, Tensor]]


class Counters(TypedDict):
    """Of the guard, and the verdict under way: step, row, names."""

    number: int
    steps: int
    skipped: int
    skipped_in_a_row: int
    pending: list[Any] | None


class State(TypedDict):
    """What resume.whole_state() returns."""

    step: int
    updates: int
    healing: Healing
    pinned: list[str]
    keep_output: list[str]
    policy: str
    accum: int
    quarantine: list[int]
    model: dict[str, Tensor]
    optimizers: list[OptimizerState]
    schedule: dict[str, Tensor]
    scaler: dict[str, float]
    ema: dict[str, Any] | None
    guard: Counters
    rng: list[dict[str, Any]]
    identity: Identity
    scores: dict[str, float]
    best: list[float] | None


def require(value: Any, kind: Any, name: str) -> None:
    """Raise ValueError, a sentence, if `value` is not as the type `kind` says. No int is below
    -1."""
    if isinstance(kind, UnionType):  # X | None
        if value is None:
            return
        kind = get_args(kind)[0]
    if kind is Any:
        return
    parts = get_args(kind)
    is_record = hasattr(kind, "__annotations__") and kind is not Tensor
    wanted = dict if is_record else get_origin(kind) or kind
    # An OrderedDict, as torch's state_dict() is, is a dict; a bool is no int.
    kinds = {dict: (dict, OrderedDict), float: (float, int)}.get(wanted, (wanted,))
    fits = type(value) in kinds
    if not fits or (wanted is int and value < -1):
        raise ValueError(f"{name} is {str(value)[:40]!r}")
    if wanted in (dict, list) and len(value) > MOST_ENTRIES:
        raise ValueError(f"{name} has {len(value)} entries")
    if is_record:
        for key, part in get_type_hints(kind).items():
            if key not in value:
                raise ValueError(f"{name} lacks {key}")
            require(value[key], part, f"{name}.{key}")
    elif wanted is dict:
        for key, child in value.items():
            require(key, parts[0], f"a name in {name}")
            require(child, parts[1], f"{name}.{key}")
    elif parts:
        for i, child in enumerate(value):
            require(child, parts[0], f"{name}.{i}")


def load(path: str | Path) -> dict[str, Any]:
    """Load a checkpoint that a run can go on from. Raises CheckpointError."""
    state = load_run(path)
    with reading(path):
        refuse_unsound(state)
    return state


def refuse_unsound(state: dict) -> None:
    """Raise ValueError or its like if no run can go on from this state."""
    require(state, State, "its state")
    about, healing, schedule = state["identity"], state["healing"], state["schedule"]
    trend = healing["trend"]
    learnt = [*trend["first"], trend["start"], trend["usual"], trend["mean"]]
    moments = dict(named_tensors([state["optimizers"], state["ema"]]))
    steps = range(state["step"] + 1)
    left_out = {*state["quarantine"]}
    sound = {
        "step": state["step"] < MOST,
        "identity": len(about) < 100 and not [*named_tensors(about)],
        "identity.precision": about["precision"] in POLICIES,
        "identity.total_steps": 0 < about["total_steps"] < MOST,
        "policy": state["policy"] in POLICIES,
        "accum": 0 < state["accum"] <= about["batch_size"],
        "guard": all(state["guard"][key] >= 0 for key in ("steps", "skipped", "skipped_in_a_row")),
        "quarantine": len(left_out) < about["images"]  # one image stays
        and all(0 <= i < about["images"] for i in left_out),
        "updates": state["updates"] in steps and int(schedule["updates"]) in steps,
        "healing.extra_steps": healing["extra_steps"] <= state["step"] * len(healing["cures"])
        and healing["extra_steps"] < MOST,
        "healing.cures": len(healing["cures"]) <= 4 * len(steps),
        "healing": max(healing["hunt_until"] - 50, healing["examined_until"]) <= state["step"],
        "healing.trend": not trend["first"] or all(map(math.isfinite, learnt)),
        "healing.trend.first": len(trend["first"]) <= 10,
        "healing.trend.extremes": all(len(pair) == 2 for pair in trend["extremes"].values()),
        "healing.trend.lowest": trend["lowest"] > -math.inf,
        "healing.signs": all(len(steps_of) == 3 for steps_of in healing["signs"].values()),
        "scores": len(state["scores"]) < 32 and all(map(str.isidentifier, state["scores"])),
        "best": state["best"] is None or [abs(x) <= LIMIT for x in state["best"]] == [True, True],
        "ema": "ema" not in about or bool(about["ema"]) == (state["ema"] is not None),
        "schedule.factor": 0 < float(schedule["factor"]) <= 1,
        "optimizers or ema": all(t.is_floating_point() for t in moments.values()),
    }
    for generators in state["rng"]:
        random.Random().setstate(generators["python"])
        torch.Generator().set_state(generators["cpu"])
    for name, holds in sound.items():
        if not holds:
            raise ValueError(f"its {name} cannot be")


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Turn the error that a strange file causes into a sentence. Wraps only code that reads it."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as e:
        words = " ".join(str(e).split())[:300]
        raise CheckpointError(f"{path} does not fit this run: {words}") from e


def load_weights(net: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """net.load_state_dict(), which would also take integers for numbers."""
    for name, mine in net.state_dict().items():
        if weights[name].is_floating_point() != mine.is_floating_point():
            raise ValueError(f"{name} is {weights[name].dtype}, here {mine.dtype}")
    net.load_state_dict(weights)


def refuse_moments(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Raise ValueError or its like if these are not the moments of its parameters. Of an optimizer
    that is not ours nothing is known."""
    if not hasattr(optimizer, "masters"):
        return
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for option, names in MOMENTS.items():
        for i, moments in saved["state"].items() if optimizer.defaults.get(option) else ():
            for name in names:
                t = moments[name]
                size = 1 if name == "step" else params[i].numel()
                if t.numel() != size or (name.endswith(("step", "sq")) and (t < 0).any()):
                    raise ValueError(f"the {name} of parameter {i} cannot be")


def describe_changes(saved: dict[str, Any], current: dict[str, Any], path: str | Path) -> list[str]:
    """What differs between two flat dicts of facts, as ["world_size: 2 -> 1", ...].

    CheckpointError for another run: one of FIXED differs. path: of the checkpoint.
    """
    changed = {
        key: f"{key[:40]}: {str(saved.get(key))[:80]} -> {current.get(key)}"
        for key in saved | current
        if saved.get(key) != current.get(key)
    }
    if refused := [changed[key] for key in FIXED if key in changed]:
        best = Path(path).with_name("best.pt")
        raise CheckpointError(
            f"cannot resume, this is another run ({'; '.join(refused)}): go on with the data and "
            f"flags as they were, or start a new run from its weights: --init {best} and another "
            "--out-dir"
        )
    return list(changed.values())
