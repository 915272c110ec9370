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

from torch import nn

from .advice import NOT_FINITE, RAISED, WEAK, WRONG_INDEX, WRONG_LABEL
from .cures import first_cure
from .labels import labels_in, out_of_range
from .modes import Functions, compiled_code, was_compiled
from .origin_names import WRITTEN
from .report import Report
from .rerun import Rerun
from .step import StepRecord, rng_states, set_rng_states
from .tensors import bad_rows, extent, few, inner_tensors, running_statistics

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
                report = _judge(rerun, report, state)
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


def _bad_state(rerun, state):
    """Names of weights, moments and running statistics that were bad before the step, with rows."""
    rerun.record.restore()
    named = {f"parameter {n}": p for n, p in rerun.net.named_parameters() if p.requires_grad}
    if isinstance(state, Mapping):  # an optimizer's is keyed by the parameters themselves
        names = {p: n for n, p in rerun.net.named_parameters()}
        state = {names.get(key, key): value for key, value in state.items()}
    moments = {f"optimizer state {n}": t for n, t in inner_tensors(state)}
    named |= moments | running_statistics(rerun.net)
    bad = [name + bad_rows(t) for name, t in named.items() if extent(t).is_bad]
    roots = [n for n, t in moments.items() if SECOND_MOMENT.search(n) and extent(t)[0] < 0]
    return [*bad, *(f"{name} (below 0: its root is NaN)" for name in roots)]


def _judge(rerun, report, state):
    """Decide on a step that is bad again."""
    half = rerun.locator.half
    exact = re.fullmatch(EXACT, report.precision.lower())
    if exact and half:  # a forward may enter autocast by itself
        exact = False
        report = replace(report, precision=str(half).removeprefix("torch."))
    if report.origin:
        return _ready_made(rerun, report, state)
    if report.op and not report.made:  # the step raised, and not because of a bad number
        return _raised(rerun, report, exact)
    return _well_known(rerun, report) or _by_precision(rerun, report, exact)


def _ready_made(rerun, report, state):
    """Decide on a number that was bad before any operation used it: data or weights."""
    table = dict(rerun.net.named_parameters()).get(report.source.removeprefix("parameter "))
    held = bad_rows(table) if report.origin == "weights" else f" holds {report.made}"
    names = [report.source + held] if report.source != WRITTEN else []
    if report.origin == "weights":
        others = _bad_state(rerun, state)
        names += [name for name in others if not name.startswith(report.source)]
    holders = rerun.locator.holders(rerun.record.batches[report.micro_batch])
    holders = ((name or report.source, made, samples) for name, made, samples in holders)
    for name, made, samples in dict.fromkeys(holders):
        if samples and (name, samples) != (report.source, report.samples):
            names.append(f"{name} holds {made} in samples {few(samples)}")
        elif name == report.source and "columns" in made:
            names[0] = f"{name} holds {made}"
    return replace(report, verdict=report.origin, names=tuple(names))


def _raised(rerun, report, exact):
    """Decide on an exception: a label, a number that half precision cannot hold, or the code."""
    fix = next((fix for words, fix in RAISED.items() if re.search(words, str(rerun.error))), "")
    report = replace(report, fix=fix)
    if fix in (WRONG_INDEX, WRONG_LABEL):
        return replace(report, verdict="data")
    overflow = "without overflow" in report.symptom and not exact
    mended = overflow and not rerun(fp32=True)
    return replace(report, verdict="precision" if mended else "error")


def _well_known(rerun, report):
    """Decide by the operation and its arguments, without another run; or None."""
    ignored = rerun.locator.labels.all_are
    means = ("nll_loss", "nll_loss2d", "div", "reciprocal")
    no_label = f"every label is ignored ({ignored}): their mean is 0/0"
    roots = ("batch_norm", "sqrt", "rsqrt", "pow")
    negative = [
        n for n, b in running_statistics(rerun.net).items() if "var" in n and extent(b)[0] < 0
    ]
    below = f"{few(negative, 1)} is below 0"
    unaligned = "a target that has no alignment with its input"
    for fits, verdict, name, weak in (
        (ignored is not None and report.weak in means, "data", no_label, "nll_loss"),
        (negative and report.weak in roots, "weights", below, "batch_norm"),
        (report.weak == "ctc_loss" and report.made == "inf", "data", unaligned, "ctc_loss"),
    ):
        if fits:
            return replace(report, verdict=verdict, names=(name,), fix=WEAK[weak][0])
    return None


def _by_precision(rerun, report, exact):
    """Decide by the step in fp32, and at loss scale 1."""
    if not rerun(fp32=True):
        factor = rerun.factor if rerun.factor < inf else max(report.scale, 2.0**16)
        if factor > 1.5:
            symptom = rerun(Functions(factor=factor))
            went = f"still bad ({symptom})" if symptom else "finite"
            report = replace(report, tried=(f"loss scale 1: {went}",))
            if not symptom:
                return replace(report, verdict="calibration")
        return replace(report, verdict="not reproducible" if exact else "precision")
    if _only_half(report):
        other = rerun.watch(fp32=True)  # something else is bad in fp32, or was left in half
        verdict = other.origin or ("precision" if _only_half(other) else "divergence")
        return replace(other, verdict=verdict)
    return replace(report, verdict="data" if report.fix == NOT_FINITE else "divergence")


def _only_half(report):
    return "float16" in report.result and report.widened == "finite in float32"


def _finite(rerun, report, state, num_classes, run_compiled):
    """Decide on a step that is finite when repeated."""
    if run_compiled or was_compiled():
        with compiled_code("default"):
            rerun.run_step = run_compiled or rerun.run_step
            symptom = rerun()
        if symptom:
            tried = (f"compiled: {symptom}", "in eager mode: finite")
            return replace(report, verdict="compiler", tried=tried)
    if names := tuple(_bad_state(rerun, state)):
        symptom = f"{names[0]} was bad before the step"
        return replace(report, verdict="weights", names=names, symptom=symptom)
    where = rerun.locator
    for k, batch in enumerate(rerun.record.batches if num_classes is not None else ()):
        where.take(batch)
        for labels in labels_in(batch):
            allowed = 0, num_classes - 1, where.labels.lawful
            names, wrong = out_of_range("label", labels, *allowed)
            if names:
                samples, size = where.samples.of(labels, wrong), where.samples.size
                report = replace(report, verdict="data", names=names, micro_batch=k)
                return replace(report, samples=samples, batch_size=size)
    verdict = "calibration" if report.scale > 1 else "not reproducible"
    return replace(report, verdict=verdict)
