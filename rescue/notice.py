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

A task may be too hard, and you may freeze a backbone on purpose. A sign that fits these too stops
nothing: the last line lists it in `warnings` (`doubts`). This file is wiring: train.py calls it.
"""

from __future__ import annotations

import math
import statistics

import torch
from torch import Tensor

import guards
import optim
from rescue import probes, verify
from trainer import validation
from trainer.record import Run

FIRST = 10  # losses from which the start is known
HIGH = "the loss has been far above its past"
UNLEARNT = "the model has lost what it learnt: the loss has been near its start"
DEAD = "the gradient norm has been below 1e-12"
# Steps in a row. A rate ten times too high brings a loss back to its start, and it recovers.
PATIENCE = {HIGH: 20, UNLEARNT: 50, DEAD: 20}
# Between two looks. A bias of 0 moves by 1e-29 at a rate of 1e-30: that is no movement.
LEAST_MOVE = 1e-9


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


def between_looks(run: Run) -> int:
    """Steps between two looks. A run has at least ten, so a short one shows what stops midway."""
    return max(1, min(100, run.total_steps // 10))


def is_look(run: Run, step: int) -> bool:
    """Whether this step reads all weights and moments: 12 bytes each."""
    return step % between_looks(run) == 0 or step in (1, run.total_steps)


def inspect_step(run: Run, step: int, sampler: probes.Probes | None
                ) -> probes.TensorFigures:
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
    note_signs_of_life(run, step, masters)
    return probes.TensorFigures(named, masters, run.scaler.scale_tensor)


def learning(run: Run) -> tuple[dict[str, Tensor], dict[Tensor, float]]:
    """The parameters that should learn (they need a gradient, or an optimizer holds them), and the
    learning rate of each that an optimizer holds."""
    rates = {}
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            rates |= dict.fromkeys(group["params"], float(group["lr"]))
    named = {name: p for name, p in run.net.named_parameters()
             if p.numel() and (p.requires_grad or p in rates)}  # fmt: skip
    return named, rates


@torch.no_grad()
def note_signs_of_life(run: Run, step: int, masters: dict[Tensor, Tensor]) -> None:
    """Note when each tensor last had moved, had a gradient, had a learning rate."""
    healing = run.healing
    named, rates = learning(run)
    samples = []
    gradients = []
    for p in named.values():
        weight = masters.get(p, p).reshape(-1)
        samples.append(weight[:: max(1, len(weight) // 100)].float())
        gradient = weight.new_zeros(()) if p.grad is None else p.grad
        gradients.append(gradient.any().float())
    before = healing.sample
    numbers = torch.cat([*samples, torch.stack(gradients)]).cpu()
    sample, graded = numbers.tensor_split([-len(named)])
    # It goes into the checkpoint, which takes no bad number.
    healing.sample = sample.nan_to_num(0, 0, 0).clamp(-1e18, 1e18)
    if before is None or len(before) != len(sample):
        before = healing.sample
    changes = (healing.sample - before).abs().split([len(some) for some in samples])
    for (name, p), change, has_gradient in zip(named.items(), changes, graded, strict=True):
        found = (change.max() > LEAST_MOVE, has_gradient, rates.get(p))
        signs = healing.signs.setdefault(name, [0, 0, 0])
        signs[:] = [step if yes else last for yes, last in zip(found, signs, strict=True)]


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
    first = run.healing.trend.first[:1]
    loss = scores["val_loss"]
    if not all(abs(x) <= guards.LIMIT for x in scores.values()):
        return f"the validation is non-finite: {scores}"
    if scores.get(validation.INDEPENDENT):
        return "the outputs no longer depend on the input"
    if first and first[0] > 0 and loss > 20 * first[0]:  # an untrained model does better by far
        return f"the validation loss is {loss:.4g}, the first step had {first[0]:.4g}"
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


def evidence_of_loss(run: Run) -> list[str]:
    """Say why this run did not end well: sentences, [] if it did. Doubts go to the warnings."""
    reasons = [has_not_learnt(run), ended_high(run)]
    if run.guard.skipped > 0.5 * run.guard.steps:
        reasons.append(f"{run.guard.skipped} of {run.guard.steps} steps were rejected")
    reasons = [reason for reason in reasons if reason]
    if not reasons and run.updates >= PATIENCE[DEAD]:
        for sentence in doubts(run):
            run.log.warn(run.step, sentence)
    return reasons


def has_not_learnt(run: Run) -> str:
    """Tensors whose gradient was always 0, so that their moments are, and weights that did not
    move, while there was something left to learn."""
    trend = run.healing.trend
    if run.updates < PATIENCE[DEAD] or trend.mean <= 1e-3 * trend.start:
        return ""
    for name, p in run.net.named_parameters():
        states = [optimizer.state.get(p, {}) for optimizer in run.optimizers]
        moments = [t for state in states for t in state.values() if t.dim()]
        if moments and not any(t.any() for t in moments):
            return f"the gradient of {name} was always 0: it has never learnt"
    named, _ = learning(run)
    signs = run.healing.signs
    is_on = any(rated for _, _, rated in signs.values())
    # A rate of 0 beside others is how some freeze a part.
    still = [name for name in named if name in signs and not signs[name][0]
             and (signs[name][2] or not is_on)]  # fmt: skip
    elements = sum(named[name].numel() for name in still)
    most = max(len(still) / len(named), elements / sum(p.numel() for p in named.values()))
    if most >= 0.5 and trend.lowest > 0.8 * trend.start:
        return (f"{shortened(still)} did not move: the learning rate is as good as 0, or every "
                "update is rounded away or undone")
    return ""


def shortened(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def doubts(run: Run) -> list[str]:
    """Signs of a lost run that a hard task or a frozen part shows too: sentences."""
    trend = run.healing.trend
    scores = run.scores
    val_loss = scores["val_loss"]
    said = lifeless(run)
    knows = False
    if "val_acc1" in scores and len(run.data.classes) > 1:
        labels = run.data.val[1]
        share = 100 * int(labels.bincount().max()) / len(labels)
        deviation = (share * (100 - share) / len(labels)) ** 0.5
        knows = scores["val_acc1"] > share + 2 * deviation
        if not knows:
            said.append(f"accuracy is {scores['val_acc1']:.1f} %: always the most frequent class "
                        f"would have {share:.1f} %")
    # A short run that knows something has not fallen far.
    if trend.mean > (1.0 if knows else 0.95) * trend.start > 0:
        said.append(f"the training loss has hardly fallen: {trend.start:.4g} at the start, "
                    f"{trend.mean:.4g} at the end")
    elif trend.mean > (trend.start + trend.lowest) / 2:
        said.append(f"the training loss is {trend.mean:.4g} at the end, and was {trend.lowest:.4g}")
    if val_loss > 1.5 * trend.mean and val_loss - trend.mean > 0.1 * trend.start:
        said.append(f"validation is far worse than training: a loss of {val_loss:.4g}, and "
                    f"{trend.mean:.4g} in training")
    if forgotten := at_chance(run, scores, kept=0.5):
        said.append(f"the model has lost what it learnt: {forgotten}")
    return said


def lifeless(run: Run) -> list[str]:
    """Tensors without movement, gradient or learning rate at the last three looks or more. (The
    label that a diffusion model drops is used now and then.)"""
    trend = run.healing.trend
    if trend.mean <= 1e-3 * trend.start:  # nothing is left to learn
        return []
    named, rates = learning(run)
    causes = {}
    for name, p in named.items():
        moved, graded, rated = run.healing.signs.get(name, [run.step] * 3)
        for since, what in ((rated, "had a learning rate of 0"), (graded, "had no gradient"),
                            (moved, "did not move")):  # fmt: skip
            if p not in rates:
                what = "was in no optimizer"
            if run.step - since > 2.5 * between_looks(run):
                causes.setdefault((what, since), []).append(name)
                break
    return [f"{shortened(names)} {what} " + (f"after step {since}" if since else "at any look")
            for (what, since), names in causes.items()]


def ended_high(run: Run) -> str:
    """Says if the loss is high in the last steps and validation agrees: a spike is no sign."""
    trend = run.healing.trend
    val_loss = run.scores["val_loss"]
    if not trend.first:
        return ""
    untrained = trend.first[0]
    if "divergence" in run.healing.cures and val_loss > 1.5 * untrained:
        return (f"after a divergence the last validation has a loss of {val_loss:.4g}, the first "
                f"step had {untrained:.4g}")
    suspected = any(steps >= 3 for steps in trend.suspicions.values())
    learnt = trend.start - trend.lowest
    if suspected and val_loss > trend.start - 0.2 * learnt:
        return (f"the model has lost what it learnt: the last validation has a loss of "
                f"{val_loss:.4g}, training had {trend.start:.4g} at the start and "
                f"{trend.lowest:.4g} at best")
    return ""
