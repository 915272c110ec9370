"""
Evidence: "done" is a claim. What speaks against it at the end of a run?

Some signs are certain, and end the run "diverged": half of the weights did not move and the loss
did not fall, the loss is high at the end, most steps were rejected. Other signs may also come from
a task that is too hard, or from a backbone that you froze on purpose. They stop nothing: the last
line lists them in `warnings` (`doubts`). The validation may be wrong, too: some outputs are counted
again, without its code.
"""

from __future__ import annotations

from autopsy import Verdict
from rescue import movement, notice
from trainer import validation
from trainer.record import Run

ENOUGH = 20  # updates: fewer say nothing


def evidence_of_loss(run: Run) -> list[str]:
    """Say why this run did not end well: sentences, [] if it did. Doubts go to the warnings."""
    reasons = [has_not_learnt(run), ended_high(run)]
    if run.guard.skipped > 0.5 * run.guard.steps:
        reasons.append(f"{run.guard.skipped} of {run.guard.steps} steps were rejected")
    reasons = [reason for reason in reasons if reason]
    if not reasons and run.updates >= ENOUGH:
        for sentence in doubts(run):
            run.log.warn(run.step, sentence)
    return reasons


def has_not_learnt(run: Run) -> str:
    """Tensors whose gradient was always 0, so that their moments are, and weights that did not
    move, while there was something left to learn."""
    trend = run.healing.trend
    if run.updates < ENOUGH or trend.mean <= 1e-3 * trend.start:
        return ""
    signs = run.healing.signs
    for name, p in run.net.named_parameters():
        states = [optimizer.state.get(p, {}) for optimizer in run.optimizers]
        moments = [t for state in states for t in state.values() if t.dim()]
        _, graded, _ = signs.get(name, [0, 0, 0])  # moments in fp16 lose gradients of 1e-9
        if moments and not graded and not any(t.any() for t in moments):
            return f"the gradient of {name} was always 0: it has never learnt"
    named, _ = movement.learning(run)
    is_on = any(rated for _, _, rated in signs.values())
    # A rate of 0 beside others is how some freeze a part.
    still = [name for name in named if name in signs and not signs[name][0]
             and (signs[name][2] or not is_on)]  # fmt: skip
    elements = sum(named[name].numel() for name in still)
    most = max(len(still) / len(named), elements / sum(p.numel() for p in named.values()))
    if most >= 0.5 and trend.lowest > 0.8 * trend.start:
        return (
            f"{shortened(still)} did not move: the learning rate is as good as 0, or every "
            "update is rounded away or undone"
        )
    return ""


def shortened(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def doubts(run: Run) -> list[str]:
    """Signs of a lost run that a hard task or a frozen part shows too: sentences."""
    trend = run.healing.trend
    scores = run.scores
    val_loss = scores["val_loss"]
    said = [*lifeless(run), *validation.contradictions(run)]
    knows = False
    if "val_acc1" in scores and len(run.data.classes) > 1:
        labels = run.data.val[1]
        share = 100 * int(labels.bincount().max()) / len(labels)
        deviation = (share * (100 - share) / len(labels)) ** 0.5
        knows = scores["val_acc1"] > share + 2 * deviation
        if not knows:
            said.append(
                f"accuracy is {scores['val_acc1']:.1f} %: always the most frequent class "
                f"would have {share:.1f} %"
            )
    # A short run that knows something has not fallen far.
    if trend.mean > (1.0 if knows else 0.95) * trend.start > 0:
        said.append(
            f"the training loss has hardly fallen: {trend.start:.4g} at the start, "
            f"{trend.mean:.4g} at the end"
        )
    elif trend.mean > (trend.start + trend.lowest) / 2:
        said.append(f"the training loss is {trend.mean:.4g} at the end, and was {trend.lowest:.4g}")
    if val_loss > 1.5 * trend.mean and val_loss - trend.mean > 0.1 * trend.start:
        said.append(
            f"validation is far worse than training: a loss of {val_loss:.4g}, and "
            f"{trend.mean:.4g} in training"
        )
    if forgotten := notice.at_chance(run, scores, kept=0.5):
        said.append(f"the model has lost what it learnt: {forgotten}")
    return said


def lifeless(run: Run) -> list[str]:
    """Tensors that at the last three looks, or more, did not move, had no gradient, or had a
    learning rate of 0. One or two looks say nothing: a diffusion model uses the embedding of its
    dropped label in some batches only."""
    trend = run.healing.trend
    if trend.mean <= 1e-3 * trend.start:  # nothing is left to learn
        return []
    named, rates = movement.learning(run)
    causes = {}
    for name, p in named.items():
        moved, graded, rated = run.healing.signs.get(name, [run.step] * 3)
        for since, what in ((rated, "had a learning rate of 0"), (graded, "had no gradient"),
                            (moved, "did not move")):  # fmt: skip
            if p not in rates:
                what = "was in no optimizer"
            if run.step - since > 2.5 * notice.between_looks(run):
                causes.setdefault((what, since), []).append(name)
                break
    said = [
        f"{shortened(names)} {what} " + (f"after step {since}" if since else "at any look")
        for (what, since), names in causes.items()
    ]
    known = {name for names in causes.values() for name in names}
    if names := [name for name in movement.put_back(run) if name not in known]:
        said.append(
            f"{shortened(names)} hardly left where training began, though the optimizer's "
            "updates lead far away: does something put weights back?"
        )
    return said


def ended_high(run: Run) -> str:
    """Says if the loss is high in the last steps and validation agrees: a spike is no sign."""
    trend = run.healing.trend
    val_loss = run.scores["val_loss"]
    if not trend.first:
        return ""
    untrained = trend.first[0]
    unknown = run.start is not None  # with --init the first loss may be near 0
    if Verdict.DIVERGENCE in run.healing.cures and not unknown and val_loss > 1.5 * untrained:
        return (
            f"after a divergence the last validation has a loss of {val_loss:.4g}, the first "
            f"step had {untrained:.4g}"
        )
    suspected = any(steps >= 3 for steps in trend.suspicions.values())
    learnt = trend.start - trend.lowest
    if suspected and val_loss > trend.start - 0.2 * learnt:
        return (
            f"the model has lost what it learnt: the last validation has a loss of "
            f"{val_loss:.4g}, training had {trend.start:.4g} at the start and "
            f"{trend.lowest:.4g} at best"
        )
    return ""
