"""
Notice: a run can be lost with finite numbers only. What it has learnt is the measure.

A loss of 2.3 says nothing by itself: for ten classes it is chance, for a thousand it is a fine
network. So a loss is compared with what this run has learnt, from `start` (before anything was
learnt) to `lowest` (the best moving mean). Four things are lost:

    the loss       above twice its start, or four times what was usual, for 20 steps in a row;
                   or back within a tenth of its start, for 50
    the gradient   dead for 20 steps (norm below 1e-12) while there is something left to learn;
                   or always 0 for one tensor
    the weights    they do not move: the learning rate is 0, or every update is rounded away
    validation     not finite; 20 times worse than before anything was learnt; at chance at the end
                   after it was better (see validation.py)

A spike that recovers is left alone. While a suspicion is open, last_good does not move, and a run
that ends does not end "done". This file is wiring: train.py calls it.
"""

from __future__ import annotations

import statistics

import optim
from record import Run
from rescue import probes, verify

FIRST = 10  # losses from which the start is known
HIGH = "the loss has been far above its past"
UNLEARNT = "what was learnt is lost: the loss has been near its start"
DEAD = "the gradient has been dead"
# Steps in a row. A rate ten times too high brings a loss back to its start, and it recovers.
PATIENCE = {HIGH: 20, UNLEARNT: 50, DEAD: 20}


def judge_loss(run: Run, loss: float, grad_norm: float) -> str:
    """Take in an accepted step's numbers. Returns why the run is lost, or ""."""
    trend = run.healing.trend
    if len(trend.first) < FIRST:
        trend.first.append(loss)
        # A run that blows up within ten steps must not take the blown-up loss for its start.
        trend.start = min(statistics.median(trend.first), 4 * trend.first[0])
        trend.usual = trend.mean = trend.start
        return ""
    limit = max(4 * trend.usual, 0.1 * trend.start)
    far_above = loss > min(2 * trend.start, limit) and trend.start > 0
    if not far_above:
        trend.usual += 0.05 * (loss - trend.usual)
    trend.mean += 0.1 * (loss - trend.mean)
    trend.lowest = min(trend.lowest, trend.mean)
    learnt = trend.start - trend.lowest
    has_learnt = learnt > 0.2 * trend.start
    nothing_left = loss <= 1e-3 * trend.start
    seen = {
        HIGH: far_above,
        UNLEARNT: has_learnt and loss > trend.start - 0.1 * learnt,
        DEAD: grad_norm < 1e-12 and not nothing_left,
    }
    before = trend.suspicions
    trend.suspicions = {reason: before.get(reason, 0) + 1 for reason in seen if seen[reason]}
    for reason, steps in trend.suspicions.items():
        if steps >= PATIENCE[reason]:
            return (f"{reason} for {steps} steps: loss {loss:.4g}, {trend.start:.4g} at the start "
                    f"and {trend.lowest:.4g} at best; gradient norm {grad_norm:.3g}")
    return ""


def is_suspicious(run: Run) -> bool:
    """Whether a suspicion is open: then last_good does not move."""
    enough = 1 if "divergence" in run.healing.cures else 10  # after a cure one step is enough
    suspected = any(steps >= enough for steps in run.healing.trend.suspicions.values())
    return suspected or run.guard.skipped_in_a_row > 0


def inspect_step(run: Run, step: int, sampler: probes.Probes | None
                ) -> probes.TensorFigures:
    """Between the last backward and the decision: what is too dear for every step. It may ask the
    device. Returns the figures of all tensors."""
    moments = [optimizer.state for optimizer in run.optimizers]
    named = dict(run.net.named_parameters())
    run.guard.see_state(param=named, optstate=moments)
    if run.world_size > 1 and run.args.verify_every:
        verify.carry_checksum(run)
    sentences = []
    if step == 1:
        sentences += probes.first_step_checks(run.net)
    if sampler:
        sampler.detach()
        sentences += sampler.warnings(float(run.scaler.scale_tensor))
    for sentence in sentences:
        run.log.warn(step, sentence)
    masters = optim.master_params(run.optimizers)
    return probes.TensorFigures(named, masters, run.scaler.scale_tensor)


def note_figures(run: Run, step: int, figures: dict[str, dict[str, float]]) -> None:
    """Log the three tensors with the smallest gradient norm and the three with the largest, and
    keep in mind which tensors did not move at any look."""
    by_norm = sorted(figures, key=lambda name: figures[name]["grad_norm"])
    ends = {name: figures[name] for name in by_norm[:3] + by_norm[-3:]}
    run.log.write(step=step, tensors=ends)
    still = {name for name, row in figures.items() if row["update_ratio"] == 0}
    if run.healing.still is not None:
        still &= set(run.healing.still)
    run.healing.still = sorted(still)


def evidence_of_loss(run: Run) -> list[str]:
    """Why this run, at its last step, did not end well: sentences, [] if it did."""
    reasons = [has_not_learnt(run), ended_high(run)]
    if run.guard.skipped > 0.5 * run.guard.steps:
        reasons.append(f"{run.guard.skipped} of {run.guard.steps} steps were rejected")
    return [reason for reason in reasons if reason]


def has_not_learnt(run: Run) -> str:
    """Tensors whose gradient was always 0, so that their moments are, and weights that did not
    move, while there was something left to learn."""
    trend = run.healing.trend
    still = run.healing.still or []
    if run.updates < PATIENCE[DEAD] or trend.mean <= 1e-3 * trend.start:
        return ""
    if len(still) >= 0.5 * len(list(run.net.parameters())):  # a single table may stand still
        return (f"{', '.join(still[:3])} does not move: the learning rate is 0, or every update is "
                "rounded away")
    names = {p: name for name, p in run.net.named_parameters()}
    for optimizer in run.optimizers:
        for p, state in optimizer.state.items():
            moments = [t for t in state.values() if t.dim()]
            if moments and not any(t.any() for t in moments):
                return f"the gradient of {names[p]} was always 0: it has never learnt"
    return ""


def ended_high(run: Run) -> str:
    """A loss that is high in the last steps, where the validation agrees: a spike is none."""
    trend = run.healing.trend
    val_loss = run.scores["val_loss"]
    if not trend.first:
        return ""
    untrained = trend.first[0]
    if "divergence" in run.healing.cures and val_loss > 1.5 * untrained:
        return (f"after a divergence the last validation has a loss of {val_loss:.4g}, the first "
                f"step had {untrained:.4g}")
    suspected = any(steps >= 3 for steps in trend.suspicions.values())
    learnt = trend.start - min(trend.lowest, trend.start)
    if suspected and val_loss > trend.start - 0.2 * learnt:
        return (f"what was learnt is lost: the last validation has a loss of {val_loss:.4g}, "
                f"training had {trend.start:.4g} at the start and {trend.lowest:.4g} at best")
    return ""
