"""
Notice: a run can be lost with finite numbers only. What it has learnt is the measure.

A loss of 2.3 says nothing by itself: for ten classes it is chance, for a thousand it is a fine
network. So a loss is compared with what this run has learnt, from `start` (before anything was
learnt) to `lowest` (the best moving mean). Four things are lost:

    the loss       above twice its start, or four times what was usual, for 20 steps in a row;
                   or back within a tenth of its start, for 50
    the gradient   dead for 20 steps (norm below 1e-12) while there is something left to learn;
                   or exactly 0 for one tensor at every look at all tensors
    the weights    they do not move: the learning rate is 0, or every update is rounded away
    validation     not finite; 20 times worse than before anything was learnt; at chance after it
                   was better (validation.is_lost)

A spike that recovers is left alone. While a suspicion is open, last_good does not move, and a run
that ends does not end "done". This file is wiring: train.py calls it.
"""

from __future__ import annotations

import math
import statistics

import checkpoint
from guards import LIMIT
from record import Run, Trend

PATIENCE = 20  # steps in a row that a suspicion takes
STILL = " (does not move)"
LONG_PATIENCE = 50  # a rate ten times too high brings a loss back to its start, and recovers


def loss_is_lost(run: Run, loss: float, grad_norm: float) -> str:
    """Take in an accepted step's numbers. Returns why the run is lost, or ""."""
    trend = run.healing.trend
    trend.epoch_sum += loss
    trend.epoch_count += 1
    if len(trend.first) < 10:
        trend.first.append(loss)
        # A run that blows up within ten steps must not take the blown-up loss for its start.
        trend.start = min(statistics.median(trend.first), 4 * trend.first[0])
        trend.usual = trend.mean = trend.start
        return ""
    return _judge(trend, loss, grad_norm)


def _judge(trend: Trend, loss: float, grad_norm: float) -> str:
    far_above = loss > 2 * trend.start > 0
    far_above |= loss > max(4 * trend.usual, 0.1 * trend.start) > 0
    if not far_above:
        trend.usual += 0.05 * (loss - trend.usual)
    trend.mean += 0.1 * (loss - trend.mean)
    trend.lowest = min(trend.lowest, trend.mean)
    learnt = trend.start - trend.lowest
    something = learnt > 0.2 * trend.start
    back = something and loss > trend.start - 0.1 * learnt
    nothing_left = loss <= 1e-3 * trend.start
    dead = grad_norm < 1e-12 and not nothing_left
    trend.high = trend.high + 1 if far_above else 0
    trend.unlearnt = trend.unlearnt + 1 if back else 0
    trend.dead = trend.dead + 1 if dead else 0
    if trend.dead >= PATIENCE:
        return f"the gradient has been dead for {trend.dead} steps (norm {grad_norm:.3g})"
    if trend.high >= PATIENCE:
        return (f"the loss has been far above its past for {trend.high} steps: {loss:.4g}, before "
                f"that {trend.usual:.4g}, at the start {trend.start:.4g}")
    if trend.unlearnt >= LONG_PATIENCE:
        return (f"what was learnt is lost: the loss has been {loss:.4g} for {trend.unlearnt} "
                f"steps, {trend.start:.4g} at the start and {trend.lowest:.4g} at best")
    return ""


def is_suspicious(run: Run) -> bool:
    """Whether a suspicion is open: then last_good does not move."""
    trend = run.healing.trend
    after_a_cure = run.healing.cures["divergence"] > 0  # then one step is enough
    high = max(trend.high, trend.dead) >= (1 if after_a_cure else PATIENCE // 2)
    return high or trend.unlearnt >= PATIENCE // 2 or run.guard.skipped_in_a_row > 0


def note_figures(run: Run, step: int, figures: dict[str, dict[str, float]]) -> None:
    """A look at all tensors: log what stands out, and keep in mind which have no gradient and
    which do not move."""
    run.log.tensors(step, figures)
    silent = {name for name, of in figures.items() if of["grad_norm"] == 0}
    still = {name + STILL for name, of in figures.items() if of["update_ratio"] == 0}
    if len(still) < 0.5 * len(figures):  # a single table of large numbers may stand still
        still = set()
    healing = run.healing
    now = silent | still
    healing.silent = sorted(now if healing.looks == 0 else now & set(healing.silent))
    healing.looks += 1


def evidence_of_loss(run: Run) -> list[str]:
    """Why this run, at its last step, did not end well: sentences, [] if it did."""
    reasons = []
    moments = [optimizer.state_dict()["state"] for optimizer in run.optimizers]
    tensors = {"model": run.net.state_dict(), "moments": moments}
    if run.ema:
        tensors["ema"] = run.ema.average
    if bad := checkpoint.non_finite(tensors):
        reasons.append(f"not finite at the end: {', '.join(bad[:3])}")
    scores = {name: x for name, x in run.scores.items() if name.startswith("val_")}
    if not all(abs(x) <= LIMIT for x in scores.values()):
        reasons.append(f"the last validation is not finite: {scores}")
    if run.guard.skipped > 0.5 * run.guard.steps:
        reasons.append(f"{run.guard.skipped} of {run.guard.steps} steps were rejected")
    if reason := _has_not_learnt(run):
        reasons.append(reason)
    if reason := _still_lost(run):
        reasons.append(reason)
    return reasons


def _has_not_learnt(run: Run) -> str:
    """Tensors whose gradient was 0 at every look, or that did not move, while there was something
    left to learn."""
    trend, silent = run.healing.trend, run.healing.silent
    nothing_left = trend.mean <= 1e-3 * trend.start
    if run.healing.looks < 2 or nothing_left:
        return ""
    names = {p: name for name, p in run.net.named_parameters()}
    moved = {names[p] for optimizer in run.optimizers for p, state in optimizer.state.items()
             if any(bool(t.any()) for t in state.values() if t.dim())}  # between two looks
    still = [name for name in silent if name.endswith(STILL)]
    dead = [name for name in silent if name not in still and name not in moved]
    if dead:
        return f"the gradient of {', '.join(dead[:3])} was 0 at every look: it has never learnt"
    if still:
        return (f"{', '.join(still[:3])} at every look: the learning rate is 0, or every update is "
                "rounded away")
    return ""


def _still_lost(run: Run) -> str:
    """A loss that is high in the last steps, where the validation agrees: a spike is none."""
    trend, val_loss = run.healing.trend, run.scores.get("val_loss", 0.0)
    untrained = trend.first[0] if trend.first else math.inf
    if run.healing.cures["divergence"] and val_loss > 1.5 * untrained:
        return (f"after a divergence the last validation has a loss of {val_loss:.4g}, the first "
                f"step had {untrained:.4g}")
    if trend.high < 3 and trend.unlearnt < 3 and trend.dead < 3:
        return ""
    learnt = trend.start - min(trend.lowest, trend.start)
    if math.isfinite(trend.start) and val_loss > trend.start - 0.2 * learnt:
        return (f"what was learnt is lost: the last validation has a loss of {val_loss:.4g}, "
                f"training had {trend.start:.4g} at the start and {trend.lowest:.4g} at best")
    return ""
