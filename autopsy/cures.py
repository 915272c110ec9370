"""
Cures: what helps?

Each cure is a way to run the recorded step; those that fit the verdict are tried in turn, up to the
first with which the step is finite. Finite is not cured: InfoNCE with its exp clamped is finite,
and its gradient has the cosine 0.19 to the true one. So what changes values (an eps, a clamp) is
compared with the step in float64, where that is finite. Only what was tried is said to help.
"""

import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from math import isnan
from typing import NamedTuple

import torch

from .advice import SUBTRACT, UNDERFLOWN_SUM, WEAK, Advice, Verdict, cure_of
from .facts import Cure, Outcome, Trial, Where
from .frames import line_now
from .locator import Locator
from .modes import AtLines, InDtype, islands
from .report import on_ranks
from .step import rng_states
from .tensors import HALF, NARROW, numbers_of


class Change(NamedTuple):
    """What a cure changes in the step."""

    what: str
    context: AbstractContextManager | None  # of a run; None: the whole step in fp32
    cure: Cure
    advice: str | Callable = ""  # what to do if it helps; "": as WEAK says of the operation
    where: str = ""  # the lines
    needs_proof: bool = False  # it counts only where it is shown to be the same step
    needs_place: bool = False  # it counts only where there is such an operation


def first_cure(rerun, report):
    """The report with the cures that were tried, up to the first that was finite and the same step:
    the module in fp32, its parents, an eps or fp32 at that line, bf16, fp32."""
    exact = None
    # At a true 0 / 0 float64 has a value by its rounding alone: no measure.
    measured = report.fragile_op.startswith(("exp", "log")) or report.finite_in
    measured = measured and not on_ranks()  # see below
    for change in _cures(rerun, report):
        trial = _trial(rerun, change, report)
        if trial.outcome is Outcome.FINITE and change.cure.where is Where.EPS and measured:
            cured = _outcome(rerun)
            exact = exact or _in_float64(rerun)
            trial = compared(trial, cured, exact)
        unproven = change.needs_proof and trial.same_step is None
        if unproven or (change.needs_place and trial.outcome is Outcome.UNSEEN):
            continue  # there is no such sum, or nothing shows that this is the same step
        report = replace(report, tried=(*report.tried, trial))
        if trial.helps:
            advice = change.advice() if callable(change.advice) else change.advice
            fix = report.fix or (Advice(advice) if advice else None)
            return replace(report, cure=change.cure, fix=fix)
    return report


def _trial(rerun, change, report):
    """Run the step with this change."""
    context = change.context
    symptom = rerun(context, fp32=context is None)
    outcome = Outcome.STILL_BAD if symptom else Outcome.FINITE
    if rerun.error and type(rerun.error) is not report.error:
        outcome = Outcome.FAILED
    if isinstance(context, AtLines) and not context.hits:
        outcome, symptom = Outcome.UNSEEN, ""
    rerun.outcome = outcome
    return Trial(change.what, outcome, symptom, change.where)


def _cures(rerun, report):
    """The changes to try, one after the other."""
    line, weak = report.line, report.fragile_op
    precision = report.verdict is Verdict.PRECISION
    if precision:
        yield from _islands(rerun, report)
    change = WEAK[weak].change if weak else None
    # 0 / 0, log of 0: half precision has rounded an eps to 0
    was_nan = len(report.in_wider_types) == 2 and isnan(report.in_wider_types[0].span.low)
    rounded = weak.startswith("log") or (weak == "div" and was_nan)
    if change and (rounded or not precision) and not report.fix:
        cure = Cure(Where.EPS, weak)
        for code, kind in STABLE.items() if weak == "exp" else ():
            yield Change(code, kind([line], weak), cure, SUBTRACT.format(code), line, True)
        if weak == "log":
            anywhere = LogSumExp((), weak, of=line)
            yield Change(LOG_SUM_EXP, anywhere, cure, UNDERFLOWN_SUM, line, needs_place=True)
        where, context = _lines(rerun, line, weak)
        yield Change(cure_of(report).code, context, cure, where=where)
    if not precision:
        return
    late = ""
    if line:
        where, context = _lines(rerun, line)
        before = f"x.float() before {where}, with autocast off there"
        yield Change("x.float()", context, Cure(Where.LINE, where), before, where)
        if weak != "to_copy" and rerun.outcome is Outcome.STILL_BAD:
            late = f": float() at {line} is not enough, or its operands are rounded before"
    known = ""
    if weak.startswith(("log", "to_copy")):
        entry = cure_of(report)  # its words, without the code that did not help
        known = f"{entry.why if entry.is_call else entry.text}, or "
    kinds = {"fp32": None}
    half = any(p.dtype is torch.float16 for p in rerun.net.parameters())
    # On ranks no parameter may have another dtype for a while: autograd drops its accumulator, and
    # with it DDP's hook, so that this rank would average its gradients no more.
    if report.dtype is torch.float16 and not (half and on_ranks()):
        kinds = {"bf16": InDtype(torch.bfloat16, (torch.float16,), rerun.net), **kinds}
    for kind, context in kinds.items():
        whole = f"the whole step in {kind}"
        what_to_do = f"--precision {kind}" if report.advice == "flags" else whole
        yield Change(whole, context, Cure(Where.PRECISION, kind), known + what_to_do + late)


def _outcome(rerun):
    """The loss and the gradients of the step, and the random states after it."""
    slopes = rerun.gradients.items()
    numbers = {n: numbers_of(g.detach()).double().flatten() for n, g in slopes}
    loss = float(numbers_of(rerun.loss).double().mean())
    return loss, numbers, rng_states(rerun.record.device)


def _in_float64(rerun):
    """The outcome of the step in float64: no gradients where that is bad, or cannot be made."""
    context = InDtype(torch.float64, (torch.float32, *NARROW), rerun.net)
    symptom = rerun(context, fp32=True)
    outcome = (0.0, {}, None) if symptom else _outcome(rerun)
    rerun.loss, rerun.gradients = None, {}
    rerun.record.restore()  # no gradient in float64 is left
    return outcome


def compared(trial, cured, exact):
    """The trial, with a comparison of its outcome with the one in float64, where there is one."""
    (loss, ours, drawn), (there, true, drawn_there) = cured, exact
    names = [name for name in ours if name in true]
    if not names:
        return trial
    on_cpu = drawn["cuda"] is None  # else float64 may draw other numbers from the same state
    if not on_cpu or not torch.equal(drawn["cpu"], drawn_there["cpu"]):
        return trial
    slope, slope_there = (torch.cat([numbers[n] for n in names]) for numbers in (ours, true))
    lengths = slope.norm() * slope_there.norm()
    cosine = float(slope @ slope_there / lengths) if lengths else float(slope.equal(slope_there))
    longer = float(slope.norm() / slope_there.norm()) if lengths else 1.0
    about = f"loss {loss:.3g}, in float64 {there:.3g}; cosine of the gradients {cosine:.2g}"
    same = abs(loss - there) <= 0.02 * max(abs(there), 1e-3)
    same = same and cosine > 0.95 and 0.8 < longer < 1.25
    return trial._replace(same_step=same, compared=about)


LOG_SUM_EXP = "torch.logsumexp(x, dim) for the logarithm of the sum of exp(x)"


class LogSumExp(AtLines):
    """log(exp(x).sum(dim)) is torch.logsumexp(x, dim), where the exp is at one of these lines, or
    at any, if there are none. of: the line of the logarithm; None: any."""

    def __init__(self, lines, weak, of=None):
        super().__init__(lines, weak)
        self.of = of
        self.known = []  # (result, x, what was done: "" or the dim of a sum)

    def _perform(self, func, args, kwargs):
        held = next((entry for entry in self.known if args and args[0] is entry[0]), None)
        if held and self.name == "log" and held[2] and self.of in (None, line_now()):
            self.hits += 1
            return torch.logsumexp(held[1], **held[2])
        out = func(*args, **kwargs)
        if self.name == "exp" and (not self.lines or line_now() in self.lines):
            self.known.append((out, args[0], {}))
        elif held and self.name == "sum":
            dims = dict(zip(("dim", "keepdim"), args[1:], strict=False)) | kwargs
            self.known.append((out, held[1], dims))
        return out


class Subtract(AtLines):
    """exp(x - x.amax(dim, keepdim=True)) at these lines."""

    def __init__(self, dim, lines, weak):
        super().__init__(lines, weak)
        self.mend = lambda x: ((x - x.amax(dim, keepdim=True),), {})


STABLE = {  # of an exp that is too large: the same step, written otherwise
    "exp(x - x.amax(-1, keepdim=True))": partial(Subtract, -1),
    "exp(x - x.amax(0, keepdim=True))": partial(Subtract, 0),
    LOG_SUM_EXP: LogSumExp,
}


def _islands(rerun, report):
    """The module in fp32, all that are like it, then its parents; the result goes back to
    half, or does not."""
    modules, flags = dict(rerun.net.named_modules()), report.advice == "flags"
    # a loss around the network is not part of it
    name = report.module if report.module in modules else ""
    half = report.dtype
    alike = [other for other in modules if name and _pattern(other) == _pattern(name)]
    while name:
        for names in ([name], alike) if len(alike) > 1 else ([name],):
            title = name if names == [name] else _pattern(name)
            weights = any(p.dtype in HALF for each in names for p in modules[each].parameters())
            for stays in (False, True) if flags else (True, False):
                back = None if stays else half
                seen = []
                context = islands([modules[each] for each in names], back, seen)
                called = [name_in_script(rerun.net), *names]
                advice = partial(_in_fp32, title, called, weights, back, seen)
                if flags:
                    advice = f"--keep-fp32 '{title}'"
                what = f"{title} in fp32, result in fp32" if stays else f"{title} in fp32"
                yield Change(what, context, Cure(Where.MODULE, title, stays), advice)
        name, alike = name.rpartition(".")[0], []


def _pattern(name):
    return re.sub(r"\b\d+\b", "*", name)


def name_in_script(net):
    """The variable of the script that holds the network, where it is a global one; or ""."""
    variables = [*vars(sys.modules["__main__"]).items()]
    return next((name for name, value in variables if value is net), "")


def _in_fp32(title, called, weights, back, seen):
    """Advice in words, and as code where the module takes one tensor and returns one: the code is
    what was tried."""
    net, *names = called
    path = ".".join(filter(None, (net, names[0])))
    code = re.sub(r"\.(\d+)(?![^.])", r"[\1]", path)  # net.blocks[9].fc1
    begin = "with torch.autocast(x.device.type, enabled=False)"
    if weights:
        begin = f"{code}.float(), and then {begin}"
    simple, went_back = zip(*seen, strict=True)
    if all(simple) and len(names) == 1:
        to_half = f".to({back})" if all(went_back) else ""
        return f"{title} in fp32: {begin}: y = {code}(x.float()){to_half}"
    of_all = f", for each of the {len(names)}" if len(names) > 1 else ""
    results = f", its results .to({back})" if any(went_back) else ""
    return (
        f"{title} in fp32{of_all}: {begin} around its call, its floating-point arguments "
        f".float(){results}"
    )


def _lines(rerun, line, weak=""):
    """The context of a cure at this line, and at those that make the next bad number: the same weak
    operation once more, or for fp32 another that might hide it (1 / inf is 0). As text, too."""
    meant, lines = [], [line]
    if not weak:
        rerun.watch(fp32=True)
        meant = rerun.locator.lines_of_origins  # bad in fp32 too: meant so
    while len(lines) < 4:
        with Locator(rerun.net) as where:
            symptom = rerun(AtLines(lines, weak))
        origins = where.lines_of_origins.items() if symptom or not weak else ()
        more = [at for at, kind in origins if at not in (*meant, *lines) and weak in ("", kind)]
        # no line of a library: nobody can mend that
        more = [at for at in more if not at.is_of_library]
        if not more:
            break
        lines.append(more[0])
    if len(lines) > 1 and not rerun(AtLines(lines[-1:], weak)):
        lines = lines[-1:]  # what it made was the cause of the others
    return " and ".join(lines), AtLines(lines, weak)
