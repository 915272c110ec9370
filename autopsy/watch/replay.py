"""
Replay: what does the examination say of the recorded calls?

The calls that lead to a loss become a step record for examine(). Whatever the repeat changes is put
back.
"""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import frexp

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from ..advice import Advice, Verdict
from ..facts import Kind, Source
from ..frames import line_of
from ..modes import InDtype
from ..rerun import Rerun
from ..step import StepRecord, unchanged
from ..tensors import NARROW, extent, has_no_shape, type_of
from ..verdict import examine
from .calls import BACKWARD, ResultRef, buffers_back
from .functions import COPIES
from .names import together

LARGE = 1e6  # what torch.empty finds may be finite


def replay(recorder, targets):
    """examine() the recorded calls, and leave no trace. `targets`: numbers of calls whose results
    are examined, beside the losses."""
    if not recorder.is_complete:
        return None  # a step that was not recorded
    calls = recorder.needed(targets)
    net = net_of(calls)
    params = dict(net.named_parameters())
    free = in_no_module(calls, net)
    params |= {f"{type_of(t)}, number {k}": t for k, t in enumerate(free)}
    uninitialised = _never_written(recorder, params, net)
    if any(p.grad is not None and extent(p.grad).is_bad for p in params.values()):
        # what was made of them, like their norm, is no cause
        passes = [call.number for call in calls if call.function is BACKWARD]
        backward = max(passes, default=0)
        targets = [number for number in targets if number < backward]
    with unchanged(net, params.values()):
        buffers_back(calls)
        return Replay(recorder, calls, targets, net, params, uninitialised).report()


def _never_written(recorder, params, net):
    """{Source: (tensor, line)} of weights and buffers that are still as torch.empty has left
    them."""
    held = {Source(Kind.PARAMETER, name): p for name, p in params.items()}
    held |= {Source(Kind.BUFFER, name): b for name, b in net.named_buffers()}
    unwritten = [(source, t) for source, t in held.items() if not (t.is_inference() or t._version)]
    found = {source: (t, recorder.uninitialised.line_of(t)) for source, t in unwritten}
    return {source: (t, line) for source, (t, line) in found.items() if line}


def net_of(calls):
    """One module that holds all that were called or given to a call."""
    called = [x for c in calls for x in (c.function, *tree_leaves(c.args))]
    modules = [x for x in called if isinstance(x, nn.Module)]
    return together([getattr(module, "_orig_mod", module) for module in modules])


def in_no_module(calls, net):
    """What the calls were given that needs a gradient, and is no parameter of the network."""
    params = set(net.parameters())
    leaves = dict.fromkeys(t for call in calls for _, t in call.given() if t.is_leaf)
    return [t for t in leaves if t.requires_grad and t not in params]


class Replay:
    """Recorded calls as a step record: for each backward one micro-batch."""

    def __init__(self, recorder, calls, targets, net, params, uninitialised):
        self.recorder, self.calls, self.targets = recorder, calls, targets
        self.net, self.params, self.uninitialised = net, params, uninitialised
        self.made = {}  # by the calls, so far
        self.scale = _loss_scale(calls)

    def report(self):
        """The report on these calls, or None: there is nothing to examine."""
        record = self._record()
        sharded = any(hasattr(p, "to_local") for p in self.params.values())
        if not record.batches or (sharded and self.targets):  # one rank alone has read it
            return None
        run_step = partial(self._run_step, record)
        if sharded:  # all ranks do the same, once: its collectives then meet
            origin = Rerun(run_step, record, self.net, {}).watch()
            return verdict_on_origin(origin) if origin.op else None

        # The first in use: it is the step's precision.
        kinds = [dtype for call in self.calls for _, dtype in call.autocast]
        kinds += [p.dtype for p in self.params.values()]
        kinds.append(torch.float32)
        report = examine(
            run_step,
            record,
            self.net,
            precision=str(kinds[0]).removeprefix("torch."),
            scale=self.scale,
        )
        report = self._never_written(report)

        for name, b in self.net.named_buffers():
            made_by = self.recorder.known.get(b) if extent(b).is_bad else None
            if not made_by:
                continue
            buffer = Source(Kind.BUFFER, name)
            new = report.source == buffer and made_by.number not in self.targets
            why = self._why_written(b, made_by.number) if new else None
            if why:
                return replace(why, names=(*why.names, f"it went into {report.source}"))
            report = _with_its_line(report, buffer, line_of(made_by.frames))
        return report

    def _record(self):
        """The recorded step: its random numbers, its micro-batches and how each of them is
        played."""
        record = StepRecord(self.recorder.steps, self.net)
        record.rng = next((call.rng for call in self.calls if call.rng), record.rng)
        record.named = [(Source(Kind.PARAMETER, name), p) for name, p in self.params.items()]
        part = []
        for call in self.calls:
            part.append(call)
            ends = call.function is BACKWARD and call.number > self.recorder.latest
            if ends or (self.targets and call is self.calls[-1]):
                batch, named = _batch(self.recorder, part)
                record.named += named
                record.keep(*batch, partial(self._play, part))
                part = []
        return record

    def _run_step(self, record, batch, fp32):
        """For examine(). The last item of a batch plays its calls."""
        if batch is record.batches[0]:
            self.made.clear()
            for p in self.params.values():
                p.grad = None
        return batch[-1](fp32)

    def _play(self, calls, fp32):
        """These calls once more: what is examined, and the gradients."""
        made = self.made
        with InDtype(torch.float32, NARROW, self.net) if fp32 else nullcontext():
            for call in calls:
                call.repeat(made)

        roots = []
        if calls[-1].function is BACKWARD:
            roots = [made[m] for m in calls[-1].uses() if m in made]
        targets = [t for m, t in made.items() if m.number in self.targets]
        with _disable_current_modes():  # these reads are no part of the step
            if len(targets) > 1:  # whatever was made: there may be masks
                targets = [t for t in targets if not extent(t).is_mask]
            bad = [t for t in (*targets, *roots) if extent(t).is_bad]

        loss = (bad or roots or targets or [torch.zeros((), device="cpu")])[0].detach()
        if self.scale != 1:  # a division would be an operation of the step
            loss = loss / self.scale
        return loss, {name: p.grad for name, p in self.params.items()}

    def _never_written(self, report):
        """A weight or buffer of torch.empty that nothing has written since: a bad one, or one of
        large numbers where numbers have grown."""
        fix = Advice("initialise it: torch.empty leaves what was in memory")
        for source, (t, made_at) in self.uninitialised.items():
            span = extent(t)
            meant = report.inputs_are_huge or report.source == source
            if meant and not span.largest <= LARGE:  # True for NaN
                holds = f"{source} holds {span.low:.3g} .. {span.high:.3g}"
                names = str(source) if report.source else holds, f"never written since {made_at}"
                return replace(report, verdict=Verdict.WEIGHTS, names=names, fix=fix)
        return report

    def _why_written(self, b, number):
        """A buffer made outside of its module: the report on what wrote it, if that is known."""
        if not self.recorder.holds(number):
            return None
        b.nan_to_num_(0.0, 0.0, 0.0)  # what is bad in it is this very write
        calls = self.recorder.needed([number])
        again = Replay(self.recorder, calls, [number], self.net, self.params, self.uninitialised)
        why = again.report()
        return why if why and why.op and not why.source else None


def _with_its_line(report, buffer, line):
    """The line that has made a bad buffer, where the report speaks of the buffer."""
    if not report.source and buffer in report.bad_inputs:
        names = (*report.names, f"{buffer} was written at {line}")
        report = replace(report, names=names)
    loaded = report.source == Source(Kind.OUTSIDE) and report.line == line  # a checkpoint
    if loaded or report.source == buffer:
        fix = Advice("mend this number where it is made")
        names = (str(buffer), f"made at {line}")
        report = replace(report, verdict=Verdict.WEIGHTS, names=names, fix=fix)
    return report


def _batch(recorder, calls):
    """Of the tensors that the calls were given: the batch, and others by their names."""
    used = {made.number for made in calls[-1].uses()} | {calls[-1].number}
    for call in reversed(calls):
        if call.leads_to(used):
            used.update(made.number for made in call.uses())
    # Of modules, of those that lead to the loss: a policy that acts has a batch of its own.
    first = sorted(calls, key=lambda c: (not c.shape, c.number not in used, not c.grad))
    names = _names(first)
    given = dict.fromkeys(t for call in first for _, t in call.given())

    batch, named = [], []
    for t in given:
        if t.grad_fn is None and t.requires_grad:
            continue  # a weight
        made = recorder.known.get(t)
        early = not made or made.data or made.number <= recorder.first
        if not made and t.grad_fn is not None:
            named.append((Source(Kind.UNSEEN), t))
        elif early and t.dim() and _is_like(t, first[0].shape):
            nth = f"item {len(batch)} of the batch" if batch else "input"
            named.append((Source(Kind.BATCH, names.get(t, nth)), t))
            batch.append(t)
        elif made:
            before = Kind.BEFORE_TRAINING if made.number else Kind.OUTSIDE
            kind = before if made.number <= recorder.first else Kind.EARLIER_STEP
            named.append((Source(kind, line=line_of(made.frames)), t))
        else:
            named.append((Source(Kind.OUTSIDE), t))
    return batch, named


def _names(calls):
    """What the calls, the first of which counts most, call a tensor, or a copy of it: "labels"."""
    names = {}
    for call in reversed(calls):
        names |= {t: name.rpartition(".")[2] for name, t in call.given()}
        names |= {x: name for name, x in call.named() if isinstance(x, Tensor | ResultRef)}
    for call in sorted(calls, key=lambda call: -call.number):
        copies = COPIES.fullmatch(call.name)
        copy = ResultRef(call.number, 0, call.frames)
        if copies and copy in names and call.args:
            names[call.args[0]] = names[copy]
    return {x: name for x, name in names.items() if name.isidentifier()}


def _is_like(t, shape):
    """As long as the batch; (): no module was called."""
    if has_no_shape(t):
        return False
    if not shape or t.shape[:1] == shape[:1]:
        return True
    # In time-major data the batch comes second. What differs in the first dimension alone is the
    # data set that the batch was cut from.
    second = t.dim() > 2 and t.shape[1:2] == shape[1:2]
    return second and t.shape[1:] != shape[1:]


def verdict_on_origin(origin):
    """The verdict on what was seen while every operation was watched."""
    half = origin.in_half and not origin.in_wider_types
    finite = not origin.source and (half or origin.finite_in is torch.float32)
    verdict = origin.verdict_of_source or (Verdict.PRECISION if finite else Verdict.DIVERGENCE)
    precision = str(origin.dtype or "").removeprefix("torch.")
    return replace(origin, verdict=verdict, precision=precision, repeated=False)


def _loss_scale(calls):
    """By what the script multiplies its loss before the backward: by its GradScaler, by a power of
    two, or 1."""
    passes = [call for call in calls if call.function is BACKWARD]
    roots = {made.number for call in passes for made in call.uses()}
    scale = 1.0
    for call in calls:
        if call.number not in roots or "mul" not in call.name:
            continue
        if call.scaler:
            scale = max(scale, call.scaler.get_scale())
        for x in call.args:
            power = type(x) in (int, float) and x >= 8 and frexp(x)[0] == 0.5
            if power:
                scale = max(scale, x)
    return scale
