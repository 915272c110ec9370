"""
Checks: which number is bad, and what is it called?

deferred.py calls a check (check_loss, check_update, ...) with a tensor and its norm, if that is not
finite; the arguments before these say what was true when the number was noted. A check names the
symptom and hands it to findings.py, which may end the script.
"""

from dataclasses import replace
from functools import wraps
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..advice import NOT_FINITE, RISES, SAME, Advice, Topic, Verdict, advice_on
from ..facts import Kind, Source
from ..operations import OVERWRITES
from ..report import Report
from ..tensors import (
    HALF,
    LARGE,
    LIMIT,
    bad_rows,
    extent,
    few,
    floats_in,
    is_real,
    rows_beyond,
    storage_of,
    type_of,
)
from .deferred import held_by, moved_by
from .functions import COPIES
from .names import modules

FALLS = (
    "the loss falls without end: look for a wrong sign, and for a term without a lower bound (a "
    "log-variance, a distance to get away from); "
)
NUMPY = Advice("look at what made this NumPy array (a log of a negative number, 0/0, a file)")
DECAYS = ("alpha", "momentum")  # that torch lets be 1 and more


class Update(NamedTuple):
    """A step of an optimizer."""

    optimizer: Any
    rates: list  # of its groups, at that step
    gradient: float  # the largest gradient norm up to it
    follows: bool  # a step after which weights and moments were read
    line: str


class Write(NamedTuple):
    """What the script writes into a weight by hand."""

    name: str  # of the function
    step: int
    line: str
    values: list  # tensors that recorded calls made
    numbers: list | None  # the numbers given; None: a tensor, too, of which nothing is known
    before: Tensor  # the weight's norm

    @property
    def plain(self):
        return self.name.removeprefix("_foreach").strip("_")

    @property
    def overwrites(self):
        return self.plain in (*OVERWRITES, "constant", "setitem", "data")

    def cannot_make_bad(self, p):
        """Whether the write can only bring zeros, a good number, or random ones."""
        largest = torch.finfo(p.dtype).max / 100
        known = self.numbers is not None and not self.values
        return self.overwrites and known and all(abs(x) <= largest for x in self.numbers)


def given_to(values, maker):
    """Split what a script writes into (tensors made by recorded calls, plain numbers). The
    numbers are None if some tensor is unknown."""
    given = floats_in(values)
    made = [t for t in given if maker(t)]
    numbers = [x for x in tree_leaves(values) if isinstance(x, int | float)]
    known = len(given) == len(made) or not all(map(isfinite, numbers))
    return made, numbers if known else None


def _of_elements(check):
    """The norm of `t` may be inf where each of its numbers is finite: that is no finding."""

    @wraps(check)
    def judge(self, *args):
        *about, t, norm = args
        span, is_lost = extent(t), False
        if span.is_large and check.__name__ == "check_update" and isinstance(t, nn.Parameter):
            is_lost = not self.findings.history.began_large(about[0].optimizer, t)
        if norm != norm or span.is_bad or is_lost:
            check(self, *args)
        elif check.__name__ == "check_loss":
            self.findings.finite("the loss", t)
            self.findings.falls |= span.is_large and span.high < 0
        elif isinstance(t, nn.Parameter) or check.__name__ == "check_buffer":
            self.findings.finite(self.names.of(t), t)  # a moment holds squares, which are large

    return judge


class Checks:
    """One method for each kind of number that is read."""

    def __init__(self, findings, names):
        self.findings, self.names = findings, names
        self.hooks = findings.hooks
        self.recorder, self.deferred = findings.recorder, findings.deferred
        self.unasked = torch.utils.weak.WeakIdKeyDictionary()  # table: rows

    @_of_elements
    def check_loss(self, loss, value):
        self.findings.stop(f"loss is {value:.3g}", self.findings.explain(results=[loss]))

    def check_output(self, call, value):
        """A bad number under no_grad does not end a script: autopsy reports it at the end."""
        if isfinite(value):
            return
        symptom = f"the output of {type(call.function).__name__} under no_grad is {value:.3g}"
        if call.uninitialised:  # a warm-up, a count of operations
            why = "its input is what torch.empty found in memory"
            self.hooks.unwatched.add(f"{symptom}: passed over, {why}")
        elif call.number > self.recorder.first:
            if not self.findings.later(symptom, [call.number]):
                self.hooks.unwatched.add(f"{symptom}; its cause was not found")
        else:  # a count of operations, or of memory
            self.hooks.unwatched.add(f"{symptom}, before any backward pass: passed over")

    @_of_elements
    def check_buffer(self, call, b, value):
        """The forward pass spoilt it; the loss may show it in a later step or in evaluation."""
        names = [n for n, other in call.function.named_buffers() if other is b]
        before = [extent(call.buffers[name]) for name in names]
        span = extent(b)
        if not (span.is_mask or any(s.is_bad for s in before)):
            about = Source(Kind.BUFFER, self.names.of(b))
            symptom = f"{about} is {span.bad_end}"
            self.findings.later(symptom, [call.number], [b], about=about)

    def _unasked(self, p, t, write=None):
        """Note bad rows of a table that no sample looked up: a line at the end, no verdict. A
        sample that looks one up makes the loss bad."""
        rows, known = set(rows_beyond(t)), self.unasked.get(p, set())
        if not rows or len(t) != len(p):
            return False
        if rows <= known:
            return True
        owner = next((m for m in modules() for q in m.parameters(recurse=False) if q is p), None)
        table = isinstance(owner, nn.Embedding | nn.EmbeddingBag)
        if type(owner).__module__.startswith(nn.__name__) and not table:
            return False  # of a layer, which asks for each row
        # any() is True for NaN
        asked = not table if p.grad is None else p.grad.to_dense()[sorted(rows)].any()
        if asked:
            return False
        self.unasked[p] = rows | known
        written = f"written at {write.line}" if write else "bad before the watch"
        source = Source(Kind.PARAMETER, self.names.of(p))
        self.findings.unasked[source] = bad_rows(t).strip(), written
        return True

    def _is_computed(self, t):
        """Whether `t` is more than a copy of what was loaded."""
        made = self.recorder.known.get(t)
        calls = (call for call in self.recorder.calls if made and call.number == made.number)
        return any(c.name != "detach" and not COPIES.fullmatch(c.name) for c in calls)

    @_of_elements
    def check_write(self, p, writes, t, value):
        """A weight is bad after writes by hand: report the last one before which it was good. Ends
        the script, unless nothing asks for the bad rows."""
        before = self.deferred.to_host(write.before for write in writes)
        good = [k for k, norm in enumerate(before) if norm <= LIMIT]
        write = writes[good[-1] if good else -1]
        bad_values = [x for x in write.values if extent(x).is_bad]
        if not any(map(self._is_computed, bad_values)) and self._unasked(p, t, write):
            return
        made = extent(t).bad_end
        holds = f"{self.names.of(p)} is {made}{bad_rows(p)}"
        written = f"what the script writes into {holds}"
        if bad_values and (good or write.name == "data"):  # what is bad in it is this very write
            p.nan_to_num_(0.0, 0.0, 0.0)
        if report := next(filter(None, map(self._value_was_bad, bad_values)), None):
            symptom = written
        elif not good and (report := self._was_bad_from_the_first(p, write, made)):
            symptom = holds
        elif write.cannot_make_bad(p):
            symptom, report = holds, _written_unseen(write, made)
        else:
            symptom, report = written, _write_itself(write, made)
        self.findings.stop(symptom, report, write.step)

    def _was_bad_from_the_first(self, p, write, made):
        """The report on NumPy, which brought these numbers, or on the operation that made them."""
        if entered := self.recorder.entered.get(storage_of(p)):
            about = {"step": write.step, "result_value": made, "repeated": False, "fix": NUMPY}
            about["names"] = tuple(self.hooks.warnings_before())
            return Report(Verdict.WEIGHTS, op="torch.from_numpy", line=entered, **about)
        began = self.recorder.memory.get(storage_of(p))
        report = began and self.findings.explain([began.number], [p])
        return report if report and report.op else None

    def _value_was_bad(self, value):
        """The report on the operation that made a bad value, before it was written into a weight;
        or None: it was loaded, and no operation has used it."""
        made_by = self.recorder.known.get(value)
        report = self.findings.explain([made_by.number], [value])
        kind = report.source.kind if report and report.source else None
        if kind in (Kind.WRITTEN, Kind.OUTSIDE):  # not a number of the batch
            report = replace(report, verdict=Verdict.WEIGHTS, fix=NOT_FINITE)
        return report if report and report.op else None

    def check_gradients(self, optimizer, why=""):
        params = moved_by(optimizer)
        norms = self.deferred.to_host(self.deferred.norms(p.grad for p in params))
        beyond = [p for p, norm in zip(params, norms, strict=True) if not norm <= LIMIT]
        bad = [p for p in beyond if extent(p.grad).is_bad]
        for p in beyond if not bad else ():
            history = self.findings.history
            history.largest = max(history.largest, extent(p.grad).largest)
            self.findings.finite(f"the gradient of {self.names.of(p)}", p.grad)
        if bad or (self.hooks.world > 1 and not beyond):
            name = few([self.names.of(p) for p in bad] or ["a shard of another rank"], 1)
            made = extent(bad[0].grad).bad_end if bad else "nan"
            report = self.findings.explain(results=[p.grad for p in bad])
            step = self.findings.scaling.step_of_gradients()
            self.findings.stop(f"the gradient of {name} is {made}{why}", report, step)

    def _held(self, optimizer, t):
        """(group, parameter, name) of a bad tensor that the optimizer holds; None if it no longer
        does."""
        for k, p, key, held in held_by(optimizer):
            if held is t:
                return k, p, f"{key} of {self.names.of(p)}" if key else self.names.of(p)
        return None

    @_of_elements
    def check_moment(self, optimizer, origin, t, value):
        """A checkpoint brought it: no step of the optimizer made it."""
        held = self._held(optimizer, t)
        if held and held[1] is t:
            self._unasked(t, t)  # else the loss tells
        elif held:
            symptom = f"{held[-1]} is {extent(t).bad_end} {origin}"
            self.findings.stop(symptom, Report(Verdict.WEIGHTS))

    @_of_elements
    def check_update(self, update, t, value):
        """The gradients were good and the weights or moments are bad: the optimizer made that."""
        optimizer = update.optimizer
        held = self._held(optimizer, t)
        if not held:
            return
        k, p, name = held
        rows = set(rows_beyond(t))
        if rows and rows <= self.unasked.get(p, set()):
            return  # bad before the first step
        span = extent(t)
        symptom = f"{name} is {span.bad_end}{f' ({LARGE})' if span.is_large else ''}"
        if not update.follows:
            symptom += " (perhaps for longer: the steps before were not recorded)"
        group, rate = optimizer.param_groups[k], update.rates[k]
        origin = self.hooks.locator and self.hooks.locator.origin_of([t])
        grown = next(self.findings.history.grown(self.deferred), "")
        first = f"a lower learning rate: {grown}; " if grown else ""
        first = FALLS if self.findings.falls else first
        why, fix = _why_bad(group, p, rate, update.gradient, first)
        if origin and origin.fragile_op and not origin.source and fix.topic is Topic.RATE:
            fix = origin.fix or advice_on(replace(origin, verdict=Verdict.DIVERGENCE))
            fix = fix._replace(text=f"{fix.text}, at {origin.line}")
        report = None
        if origin or torch.optim.__name__ in type(optimizer).__module__:
            hyper = {n: group[n] for n in ("eps", "betas", "momentum") if n in group}
            has = ", ".join(f"{n}={v}" for n, v in {"lr": rate, **hyper}.items())
            made = f"made by {type(optimizer).__name__} ({has}) on {type_of(p)}"
            made += f", {update.line}" if origin else ""
            origin = origin or Report(line=update.line)
            report = replace(origin, verdict=Verdict.OPTIMIZER, names=(made, why), fix=fix)
        steps = self.recorder.steps
        # Where it is not counted, others stepped more often.
        counted = self.recorder.steps_of.get(id(optimizer)) == steps
        step = max(0, steps - counted)
        self.findings.stop(f"{symptom} after good gradients", report, step)

    @_of_elements
    def bad_at_the_end(self, t, value):
        is_constant = not t.requires_grad and extent(t).is_mask  # a -inf that fills what is masked
        if is_constant or self._unasked(t, t):
            return
        report = self.findings.explain(results=[t])
        self.findings.stop(f"{self.names.of(t)} is bad at the end", report)


def _written_unseen(write, made):
    """The write left the weight finite; something wrote it later, past torch."""
    unseen = f"{write.line} left it finite, and what wrote it after that was not seen"
    fix = Advice("look for what writes weights past torch: NumPy, a kernel, another library")
    about = {"step": write.step, "result_value": made, "repeated": False}
    return Report(Verdict.WEIGHTS, names=(unseen,), fix=fix, **about)


def _write_itself(write, made):
    """The write made the weight bad."""
    op = f"torch.{SAME.get(write.plain, write.plain)}"
    about = {"step": write.step, "result_value": made, "repeated": False}
    report = Report(Verdict.WEIGHTS, op=op, line=write.line, **about)
    if not all(map(isfinite, write.numbers or ())):
        return replace(report, fix=NOT_FINITE)
    return replace(report, verdict=Verdict.WEIGHTS if write.overwrites else Verdict.DIVERGENCE)


def _why_bad(group, p, rate, gradient, first):
    """Say why this group's update of `p` was bad, and what to do. first: what is more likely."""
    why = f"the gradient norm was up to {gradient:.3g}"
    fix, topic = "a lower lr", Topic.RATE
    if "eps" in group and float(torch.tensor(group["eps"], dtype=p.dtype, device="cpu")) == 0:
        why = f"eps={group['eps']:g} is exactly 0 in {p.dtype}: it divides 0 by 0"
        fix, topic = "eps=1e-8", Topic.OTHER
    elif gradient > LIMIT:
        why += f": {LARGE}"
        fix = "find what makes gradients of this size (an exp, a product, an input, a loss scale); "
        fix += "clip_grad_value_ bounds them, clip_grad_norm_ needs a finite norm"
        fix = f"{first}else {fix}" if first else fix
    if p.dtype in HALF:
        fix += ", and weights and moments in fp32"
    if group.get("centered"):  # E[g^2] - E[g]^2
        fix = "centered=False: rounding makes the variance negative, and its root NaN"
        topic = Topic.OTHER
    for name in DECAYS:
        if not 0 <= float(group.get(name) or 0) < 1:
            why += f", {name}={group[name]:g}"
            fix = f"{name} must be in 0..1: below 1 what it decays shrinks, else it grows"
            topic = Topic.OTHER
    if not is_real(float(rate or 0)):
        fix, topic = "look at the schedule", Topic.OTHER
    elif float(rate or 0) < 0:
        fix, topic = f"the learning rate is negative: {RISES}", Topic.RATE
    return why, Advice(fix, topic)
