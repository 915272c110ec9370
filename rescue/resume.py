"""
Resume: all of a run that a checkpoint carries, and back again, at another precision level too.

A run that stops may have been healed: modules pinned to fp32, a lower precision given up, samples
left out, a learning rate halved, a verdict not answered yet. A checkpoint without these repeats the
failure that they answer. And a state may be of another level than the run: O2 keeps half weights
with fp32 masters, fp32 keeps fp32 weights; the masters are then the weights. This file is wiring.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

import torch

import amp_policy
import checkpoint
import optim
from fp32 import keep_fp32, pinned
from ranks import parallel
from record import Run, Trend


def whole_state(run: Run, rng: list[dict]) -> dict:
    """All that a run needs to go on, and what is not answered yet."""
    healing = run.healing
    return {
        "healing": asdict(healing) | {"cures": dict(healing.cures)},
        "pinned": pinned(run.net),
        "keep_output": pinned(run.net, keep_output=True),
        "policy": run.policy.name,
        "start_policy": run.facts["precision"],
        "accum": run.accum,
        "quarantine": sorted(run.stream.quarantine),
        "model": run.net.state_dict(),
        "optimizers": [optimizer_state(optimizer) for optimizer in run.optimizers],
        "schedule": run.schedule.state_dict(),
        "scaler": run.scaler.state_dict(),
        "ema": run.ema and run.ema.state_dict(),
        "guard": run.guard.state_dict(),
        "rng": rng,
        "facts": run.facts,
        "updates": run.updates,
        "scores": run.scores,
        "best": run.best,
        "figures": run.log.figures,
    }


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict:
    """Its state_dict with learning rates as numbers: a rate beyond any weight is no bad moment.
    Half moments, which O3 has, as fp32: loading rounds them back to the same bits."""
    state = optimizer.state_dict()
    groups = [group | {"lr": float(group["lr"])} for group in state["param_groups"]]
    moments = {i: {name: t.float() if t.dtype in amp_policy.HALF else t for name, t in of.items()}
               for i, of in state["state"].items()}
    return state | {"param_groups": groups, "state": moments}


def load_whole_state(run: Run, state: dict) -> list[str]:
    """Go on where a whole_state() ends. Returns sentences about what differs."""
    healing = state["healing"]
    for name, value in healing.items():
        setattr(run.healing, name, value)
    run.healing.cures = Counter(healing["cures"])
    run.healing.trend = Trend(**healing["trend"])
    run.total_steps += run.healing.extra_steps
    run.accum = max(run.accum, state["accum"])
    run.stream.leave_out(state["quarantine"])
    keep_fp32(run.net, state["pinned"])  # first: these modules have fp32 weights
    keep_fp32(run.net, state["keep_output"], keep_output=True)
    if "eager mode" in run.healing.healed:
        run.compiled = run.ddp
    run.guard.watch(run.net)  # pinning may have exchanged buffers
    demoted = state["policy"] != state["start_policy"]
    if demoted and state["start_policy"] == run.policy.name:
        adopt(run, state["policy"])
    changes = restore(run, state)
    run.scaler.load_state_dict(state["scaler"])
    run.guard.load_state_dict(state["guard"])
    run.step = state["step"]
    run.scores = state["scores"]
    run.best = state["best"]
    if run.rank < len(state["rng"]):
        checkpoint.set_rng_state(state["rng"][run.rank], run.device)
    return changes


def restore(run: Run, state: dict) -> list[str]:
    """Weights, masters, moments, schedule and average of a state of any precision level. Returns a
    sentence where the level differs."""
    names = {p: name for name, p in run.net.named_parameters()}
    model, optimizers, changes = dict(state["model"]), [], []
    for optimizer, saved in zip(run.optimizers, state["optimizers"], strict=True):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        was_half = [names[p] for p in params if model[names[p]].dtype in amp_policy.HALF]
        is_half = [names[p] for p in params if p.dtype in amp_policy.HALF]
        model |= dict(zip(was_half, saved.get("masters", []), strict=False))  # O3 keeps none
        if was_half != is_half:
            changes.append("half weights become fp32" if was_half else "fp32 weights become half")
        if saved.get("masters") or is_half:
            keeps = bool(getattr(optimizer, "masters", {}))
            masters = [model[name].float() for name in is_half] if keeps else []
            saved = saved | {"masters": masters}
        optimizers.append(saved)
    run.net.load_state_dict(model)
    for optimizer, saved in zip(run.optimizers, optimizers, strict=True):
        optimizer.load_state_dict(saved)
    run.schedule.load_state_dict(state["schedule"])
    if run.ema and state["ema"] is not None:
        run.ema.load_state_dict(state["ema"])
    run.updates = state["updates"]
    return sorted(set(changes))


def adopt(run: Run, precision: str) -> None:
    """Another policy, with a loss scale of its own. Half weights become what their masters hold."""
    caps = amp_policy.capabilities(run.device)
    policy = amp_policy.choose_policy(precision, caps, None, None)
    if run.policy.param_dtype is not policy.param_dtype:
        optim.widen(run.optimizers)
        compiles = run.compiled is not run.ddp
        run.ddp = parallel(run.model, run.device)  # the old one's hooks hang on half weights
        run.compiled = torch.compile(run.ddp) if compiles else run.ddp
    run.policy = policy
    run.scaler = amp_policy.LossScaler(run.device.type, enabled=policy.scales)
