"""
Verdict: which of nine things was wrong?

examine() repeats the step and asks in turn: is it bad again, where does the bad number come from,
is it finite in fp32, at loss scale 1, in eager mode? cures.py tries the cures.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf
from typing import Any

import torch
from torch import nn

from .advice import VERDICTS, WEAK, Advice, Topic, Verdict, on_exception
from .cures import first_cure
from .facts import Kind, Outcome, Source, Trial
from .labels import labels_in, out_of_range
from .modes import Functions, compiled_code, was_compiled
from .report import Report
from .rerun import Rerun
from .step import StepRecord, rng_states, set_rng_states
from .tensors import bad_rows, extent, few, inner_tensors, running_statistics, stands_alone

SECOND_MOMENT = re.compile("(exp_avg_sq|square_avg|sum)$")  # of which an optimizer takes the root
EXACT = r"(torch\.)?(fp32|float32|float|32|32-true|o0|no|none|fp64|float64|double)"  # no half


def examine(
    run_step: Callable[[tuple[Any, ...], bool], Any],
    record: StepRecord,
    net: nn.Module,
    *,
    state: Any = None,
    num_classes: int | None = None,
    precision: str = "",
    scale: float = 1.0,
    try_cures: bool = True,
    advice: str = "code",
    run_compiled: Callable | None = None,
) -> Report:
    """Repeat the recorded step and say what was wrong. Call it on every rank, with the rank's own
    record; then call agree().

    `run_step(batch, fp32)`: forward and backward of ONE recorded micro-batch on the bare `net` (no
    DDP), no optimizer; returns the 0-dim loss before scaling. `fp32=True`: autocast off, half
    inputs and parameters upcast, no loss scale; if that ran on fp32 copies of the parameters, it
    returns (loss, {name: gradient}). Compiled code in it runs eagerly. `run_compiled`: the same
    through the compiled model, where `run_step` does without. `state`: nest of optimizer tensors.
    `scale`: the step's loss scale; run_step may scale by it or not. `num_classes`: the labels'
    range, where no loss says it. `try_cures` False: the verdict alone. Gradients are None
    afterwards, RNG untouched, buffers as before the step.
    """
    outside = rng_states(record.device)
    about = {
        "step": record.step,
        "rank": record.rank,
        "advice": advice,
        "precision": str(precision),
        "scale": float(scale),
    }
    rerun = Rerun(run_step, record, net, about)
    try:
        with compiled_code("force_eager"):
            report = rerun.watch()
            if report.symptom:
                report = _bad_again(rerun, report, state)
                if try_cures:
                    report = first_cure(rerun, report)
            else:
                report = _finite(rerun, report, state, num_classes, run_compiled)
    finally:
        record.restore()
        set_rng_states(outside, record.device)
    known = record.indices[report.micro_batch]
    indices = tuple(known[i] for i in report.samples) if known else ()
    return replace(report, indices=indices)


def _held(rerun, state):
    """{Source: tensor} before the step: weights and running statistics, and the moments alone."""
    rerun.record.restore()
    parameters = rerun.net.named_parameters()
    held = {Source(Kind.PARAMETER, n): p for n, p in parameters if p.requires_grad}
    if isinstance(state, Mapping):  # an optimizer's is keyed by the parameters themselves
        names = {p: n for n, p in rerun.net.named_parameters()}
        state = {names.get(key, key): value for key, value in state.items()}
    moments = {Source(Kind.MOMENT, n): t for n, t in inner_tensors(state)}
    statistics = running_statistics(rerun.net)
    return held | {Source(Kind.BUFFER, n): b for n, b in statistics.items()}, moments


def _bad_state(rerun, state):
    """What was bad, or hopelessly large, before the step: (Source, what is bad in it)."""
    held, moments = _held(rerun, state)
    bad = [(s, bad_rows(t)) for s, t in (held | moments).items() if extent(t).is_bad]
    bad += [(s, f" holds {extent(t).bad_end}") for s, t in held.items() if extent(t).is_large]
    roots = [s for s, t in moments.items() if SECOND_MOMENT.search(s.name) and extent(t).low < 0]
    return [*bad, *((source, " (below 0: its root is NaN)") for source in roots)]


def _struck(rerun, state):
    """A large number among ordinary ones, as of a bit that flipped: training makes no such. Moments
    hold squares: as a whole they may be large."""
    held, moments = _held(rerun, state)
    spans = {source: (t, extent(t)) for source, t in (held | moments).items()}
    return tuple(
        f"{source} holds {span.bad_end} among smaller ones"
        for source, (t, span) in spans.items()
        if span.is_large and stands_alone(t)
    )


def _bad_again(rerun, report, state):
    """Decide on a step that is bad again."""
    half = rerun.locator.half
    exact = re.fullmatch(EXACT, report.precision.lower())
    if exact and half:  # a forward may enter autocast by itself
        exact = False
        report = replace(report, precision=str(half).removeprefix("torch."))
    if report.verdict_of_source:
        return _ready_made(rerun, report, state)
    if report.op and not report.result_value:  # the step raised, and not because of a bad number
        return _raised(rerun, report, exact)
    if names := _struck(rerun, state):
        return replace(report, verdict=Verdict.WEIGHTS, names=names)
    return _well_known(rerun, report) or _by_precision(rerun, report, exact)


def _ready_made(rerun, report, state):
    """Decide on a number that was bad before any operation used it: data or weights."""
    about = report.source
    weights = report.verdict_of_source is Verdict.WEIGHTS
    names = []
    if weights:
        table = None
        if about.kind is Kind.PARAMETER:
            table = dict(rerun.net.named_parameters()).get(about.name)
        names = [f"{about}{bad_rows(table)}"]
        others = _bad_state(rerun, state)
        names += [f"{source}{what}" for source, what in others if source != about]
    elif about.kind is not Kind.WRITTEN:
        names = [f"{about} holds {report.result_value}"]
    holders = rerun.locator.holders(rerun.record.batches[report.micro_batch])
    holders = ((source or about, *what) for source, *what in holders)
    for source, made, columns, samples in dict.fromkeys(holders):
        if samples and (source, samples) != (about, report.samples):
            names.append(f"{source} holds {made}{columns} in samples {few(samples)}")
        elif source == about and columns:
            names[0] = f"{source} holds {made}{columns}"
    return replace(report, verdict=report.verdict_of_source, names=tuple(names))


def _raised(rerun, report, exact):
    """Decide on an exception: a label, a number that half precision cannot hold, or the code."""
    known = on_exception(rerun.error)
    verdict = known.verdict
    if verdict is Verdict.PRECISION and (exact or rerun(fp32=True)):
        verdict = Verdict.ERROR
    fix = Advice(known.fix) if known.fix else None
    return replace(report, verdict=verdict, fix=fix)


def _well_known(rerun, report):
    """Decide by the operation and its arguments, without another run; or None."""
    labels = rerun.locator.labels
    ignored = labels.all_are
    means = ("nll_loss", "nll_loss2d", "div", "reciprocal")
    no_label = f"every label is ignored ({ignored}): their mean is 0/0"
    roots = ("batch_norm", "sqrt", "rsqrt", "pow")
    statistics = running_statistics(rerun.net).items()
    negative = [name for name, b in statistics if "var" in name and extent(b).low < 0]
    below = f"buffer {few(negative, 1)} is below 0"
    unaligned = "a target that has no alignment with its input"
    op = report.fragile_op
    inf_of_ctc = op == "ctc_loss" and report.result_value == "inf"
    for fits, verdict, name, entry in (
        (ignored is not None and op in means, Verdict.DATA, no_label, "nll_loss"),
        (labels.none and op in means, Verdict.DATA, "no label is left: 0/0", "nll_loss"),
        (negative and op in roots, Verdict.WEIGHTS, below, "batch_norm"),
        (inf_of_ctc, Verdict.DATA, unaligned, "ctc_loss"),
    ):
        if fits:
            return replace(report, verdict=verdict, names=(name,), fix=Advice(WEAK[entry].text))
    return None


def _by_precision(rerun, report, exact):
    """Decide by the step in fp32, and at loss scale 1."""
    if not rerun(fp32=True):
        factor = rerun.loss_factor if rerun.loss_factor < inf else max(report.scale, 2.0**16)
        if factor > 1.5:
            symptom = rerun(Functions(factor=factor))
            outcome = Outcome.STILL_BAD if symptom else Outcome.FINITE
            report = replace(report, tried=(Trial("loss scale 1", outcome, symptom),))
            if not symptom:
                return replace(report, verdict=Verdict.CALIBRATION)
        verdict = Verdict.NOT_REPRODUCIBLE if exact else Verdict.PRECISION
        return replace(report, verdict=verdict)
    if _only_half(report):
        other = rerun.watch(fp32=True)  # something else is bad in fp32, or was left in half
        again = Verdict.PRECISION if _only_half(other) else Verdict.DIVERGENCE
        return replace(other, verdict=other.verdict_of_source or again)
    by_script = report.fix and report.fix.topic is Topic.BAD_SCALAR
    return replace(report, verdict=Verdict.DATA if by_script else Verdict.DIVERGENCE)


def _only_half(report):
    return report.in_half and report.finite_in is torch.float32


def _finite(rerun, report, state, num_classes, run_compiled):
    """Decide on a step that is finite when repeated."""
    if run_compiled or was_compiled():
        with compiled_code("default"):
            rerun.run_step = run_compiled or rerun.run_step
            symptom = rerun()
        if symptom:
            compiled = Trial("compiled", Outcome.BAD, symptom)
            tried = compiled, Trial("in eager mode", Outcome.FINITE)
            return replace(report, verdict=Verdict.COMPILER, tried=tried)
    bad = tuple(f"{source}{what}" for source, what in _bad_state(rerun, state))
    if names := _struck(rerun, state) or bad:
        symptom = f"{names[0]} was bad before the step"
        return replace(report, verdict=Verdict.WEIGHTS, names=names, symptom=symptom)
    where = rerun.locator
    for k, batch in enumerate(rerun.record.batches if num_classes is not None else ()):
        where.take(batch)
        for labels in labels_in(batch):
            allowed = 0, num_classes - 1, where.labels.ignored
            names, wrong = out_of_range("label", labels, *allowed)
            if names:
                samples, size = where.samples.of(labels, wrong), where.samples.size
                report = replace(report, verdict=Verdict.DATA, names=names, micro_batch=k)
                return replace(report, samples=samples, batch_size=size)
    if large := rerun.too_large():  # a guard refuses it
        fix = Advice(VERDICTS[Verdict.DIVERGENCE][report.advice == "code"], Topic.GROWTH)
        return replace(report, verdict=Verdict.DIVERGENCE, symptom=large, fix=fix)
    scaled = report.scale > 1
    return replace(report, verdict=Verdict.CALIBRATION if scaled else Verdict.NOT_REPRODUCIBLE)
