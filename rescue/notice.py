"""
Notice: a run can be lost with finite numbers only. What it has learnt is the measure.

A loss of 2.3 says nothing by itself: for ten classes it is chance, for a thousand it is a fine
network. So this file compares a loss with what the run has learnt, from `start` (before it learnt
anything) to `lowest` (the best moving mean). Certain signs send the run back, or end it "diverged":

    the loss       above twice its start, or four times what was usual, for 20 steps in a row;
                   or back within a tenth of its start, for 50
    the gradient   dead for 20 steps (norm below 1e-12) while there is something left to learn;
                   or always 0 for one tensor
    the weights    half of them do not move, and the loss does not fall: the rate is as good as 0,
                   they are in no optimizer, or every update is rounded away or undone
    validation     not finite; 20 times worse than before anything was learnt; at chance at the end
                   after it was better

A spike that recovers does nothing. While a suspicion is open, last_good does not move, and no run
ends "done".

One rank of several that trains on noise leaves the gradient finite, and wrong. So the ranks' losses
travel with the guard's flags. A warning names a rank whose loss parts from the others' for long.
evidence.py judges a run at its end.
"""

from __future__ import annotations

import math
import statistics
from enum import Enum

import torch

import guards
import optim
from autopsy import Verdict
from rescue import movement, probes, verify
from trainer import validation
from trainer.record import Run

FIRST = 10  # losses from which the start is known
PARTED = 30  # steps in a row
LEAST = 1e-6  # a loss that is no sign: weights of --init may know all images
CHECK_EVERY = 100  # steps between two looks at all weights and moments, or fewer


class Suspicion(Enum):
    """That a run is lost. A checkpoint holds these values, with the steps in a row."""

    HIGH = "high"
    UNLEARNT = "unlearnt"
    DEAD = "dead"


# Steps in a row. A rate ten times too high brings a loss back to its start, and it recovers.
PATIENCE = {Suspicion.HIGH: 20, Suspicion.UNLEARNT: 50, Suspicion.DEAD: 20}
WORDS = {
    Suspicion.HIGH: "the loss has been far above its past",
    Suspicion.UNLEARNT: "the model has lost what it learnt: the loss has been near its start",
    Suspicion.DEAD: "the gradient norm has been below 1e-12",
}


def judge_loss(run: Run, loss: float, grad_norm: float) -> str:
    """Take in an accepted step's numbers. Returns why the run is lost, or ""."""
    trend = run.healing.trend
    if len(trend.first) < FIRST:
        trend.first.append(loss)
        # A run that blows up within ten steps must not take the blown-up loss for its start.
        trend.start = min(statistics.median(trend.first), 4 * trend.first[0])
        trend.usual = trend.mean = trend.lowest = trend.start
        return ""
    limit = max(4 * trend.usual, 0.1 * trend.start)
    far_above = loss > max(min(2 * trend.start, limit), LEAST) and trend.start > 0
    if not far_above:
        trend.usual += 0.05 * (loss - trend.usual)
    trend.mean += 0.1 * (loss - trend.mean)
    trend.lowest = min(trend.lowest, trend.mean)
    learnt = trend.start - trend.lowest
    has_learnt = learnt > 0.2 * trend.start
    nothing_left = loss <= 1e-3 * trend.start
    seen = {
        Suspicion.HIGH: far_above,
        Suspicion.UNLEARNT: has_learnt and loss > max(trend.start - 0.1 * learnt, LEAST),
        Suspicion.DEAD: grad_norm < 1e-12 and not nothing_left,
    }
    # What an older checkpoint calls otherwise ends here: that count begins again.
    before = trend.suspicions
    trend.suspicions = {s.value: before.get(s.value, 0) + 1 for s in seen if seen[s]}
    for suspicion, patience in PATIENCE.items():
        steps = trend.suspicions.get(suspicion.value, 0)
        if steps >= patience:
            return (
                f"{WORDS[suspicion]} for {steps} steps: loss {loss:.4g}, {trend.start:.4g} at "
                f"the start and {trend.lowest:.4g} at best; gradient norm {grad_norm:.3g}"
            )
    return ""


def parted_rank(run: Run, losses: list[float]) -> str:
    """Take in the ranks' losses of an accepted step. Says once if one rank has parted from the
    others; or "".

    Ranks draw from one permutation, so which of them has the highest loss is chance: of two, the
    same 30 times in a row once in a billion.
    """
    known = run.healing.trend.extremes
    # Of two ranks the lower one may be the one that trains on a single image: both are told.
    for kind, loss in [("highest", max(losses)), ("lowest", min(losses))][: len(losses) - 1]:
        rank, steps = known.get(kind, (-1, 0))
        if losses.count(loss) > 1 or losses.index(loss) != rank:
            rank, steps = losses.index(loss), 0
        known[kind] = [rank, steps + 1]
        if steps + 1 == PARTED:
            rest = sorted(losses[:rank] + losses[rank + 1 :])
            return (
                f"rank {rank} had the {kind} loss in each of {PARTED} steps, {loss:.4g} in the "
                f"last one, and the others {rest[0]:.4g} to {rest[-1]:.4g}: it trains on other "
                "images or labels, or computes wrongly"
            )
    return ""


def is_suspicious(run: Run) -> bool:
    """Whether a suspicion is open: then last_good does not move."""
    enough = 1 if Verdict.DIVERGENCE in run.healing.cures else 10  # after a cure one step is enough
    suspected = any(steps >= enough for steps in run.healing.trend.suspicions.values())
    return suspected or run.guard.skipped_in_a_row > 0


def between_looks(run: Run) -> int:
    """Steps between two looks. A run has at least ten, so a short one shows what stops midway."""
    return max(1, min(CHECK_EVERY, run.total_steps // 10))


def is_look(run: Run, step: int) -> bool:
    """Whether this step reads all weights and moments: 12 bytes each."""
    return step % between_looks(run) == 0 or step in (1, run.total_steps)


def inspect_step(run: Run, step: int, sampler: probes.Probes | None) -> probes.TensorFigures:
    """Between the last backward and the decision, check what costs too much for every step. It may
    wait for the device. Returns the figures of all tensors."""
    moments = [optimizer.state for optimizer in run.optimizers]
    named = dict(run.net.named_parameters())
    run.guard.see_state(param=named, optstate=moments)
    if run.world_size > 1 and run.args.verify_every:
        verify.carry_checksum(run)
    sentences = probes.first_step_checks(run.net) if step == 1 else []
    if sampler:
        sampler.detach()
        sentences += sampler.warnings(float(run.scaler.scale_tensor))
    for sentence in sentences:
        run.log.warn(step, sentence)
    masters = optim.master_params(run.optimizers)
    movement.note_movement(run, step, masters)
    return probes.TensorFigures(named, masters, run.scaler.scale_tensor)


def note_figures(run: Run, step: int, figures: dict[str, dict[str, float]]) -> None:
    """Log the three tensors with the smallest gradient norm and the three with the largest."""
    by_norm = sorted(figures, key=lambda name: figures[name]["grad_norm"])
    ends = {name: figures[name] for name in by_norm[:3] + by_norm[-3:]}
    run.log.write(step=step, tensors=ends)


def unsound_validation(run: Run) -> str:
    """Why the model is lost, by the last validation; or ""."""
    trend = run.healing.trend
    chance = at_chance(run, run.scores, kept=0.2)
    trend.chance_since = (trend.chance_since or run.step) if chance else 0
    lasts = run.step - trend.chance_since >= 50  # a high rate may bring a model there and back
    is_last = run.step >= run.total_steps
    return unsound(run, run.scores) or (chance if lasts or is_last else "")


def unsound(run: Run, scores: dict[str, float]) -> str:
    """Why these scores cannot be those of a model that learns, or ""."""
    first = run.healing.trend.first[:1] if not run.start else []  # with --init it may be near 0
    loss = scores["val_loss"]
    if not all(abs(x) <= guards.LIMIT for x in scores.values()):
        return f"the validation is non-finite: {scores}"
    if scores.get(validation.INDEPENDENT):
        return "the outputs no longer depend on the input"
    untrained = first[0] if first else 0.0
    if "val_acc1" in scores and run.healing.trend.first:
        untrained = max(untrained, math.log(len(run.data.classes)))
    if untrained > 0 and loss > 20 * untrained:  # an untrained model does better by far
        return f"the validation loss is {loss:.4g}, an untrained model has {untrained:.4g}"
    return ""


def at_chance(run: Run, scores: dict[str, float], kept: float) -> str:
    """Says if the accuracy was clearly above chance and keeps less than the share `kept` of that;
    or ""."""
    if "val_acc1" not in scores or run.best is None:
        return ""
    accuracy = scores["val_acc1"]
    chance = 100 / len(run.data.classes)
    deviation = math.sqrt(chance * (100 - chance) / len(run.data.val[1]))  # of guessing
    best = run.best[0]
    learnt = best - chance
    was_better = learnt >= max(5.0, 4 * deviation)
    if was_better and accuracy <= chance + kept * learnt:
        return f"accuracy is {accuracy:.1f} %, chance {chance:.1f} %, and it was {best:.1f} %"
    return ""


def sample_is_sound(run: Run) -> bool:
    """Whether a few images score as well as the run's loss promises: a checkpoint becomes last_good
    by validation, not by silence. Rank 0 decides for all; it draws no random number."""
    if run.rank or not run.step:
        return True
    with torch.random.fork_rng(devices=[]), validation.evaluated_weights(run):
        batch = validation.sample(run, validation.SAMPLE)
        scores = validation.evaluate(run.model, [batch], alone=True)
    return not (unsound(run, scores) or at_chance(run, scores, kept=0.8))
