"""
Locator: which operation made the first bad number?

It reads the result of every operation, remembers the origin of each bad storage, and names the
earliest origin among all that a tensor was computed from.
"""

import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import count, takewhile
from math import inf, isfinite
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .advice import BY_ZERO, NOT_FINITE, TOO_LOW
from .facts import STATE, Kind, Repeat, Source
from .frames import NOWHERE, frames_in, frames_now, line_now, line_of
from .labels import Labels, out_of_range
from .modes import Functions, Operations
from .module_stack import ModuleStack, around_modules
from .operations import WRITERS, Call, in_wider_types, mistake_in, origin_of_zero
from .report import Report
from .samples import Samples
from .sources import UNINITIALISED, Sources
from .tensors import (
    HALF,
    STATISTIC,
    Span,
    bad_columns,
    extent,
    flat_tensors,
    inner_tensors,
    is_part,
    non_finite,
    range_of,
    spans_of,
    storage_of,
    type_of,
)

# An origin is (a number in time, a Report). Of a mask, large negative values written on purpose:
INTENDED_MASK = sys.maxsize - 1
NO_ORIGIN = (sys.maxsize, None)  # nothing that this step did


class Locator(Operations):
    """Reads the result of every aten operation while it is entered; origin_of(tensors) names the
    operation that made them bad.

    `net` may be None: then modules are named as they are met. `batch`: the micro-batch, so that
    samples can be named. What it remembers of a tensor it forgets with the tensor's storage, so it
    may stay entered for many steps. Anomaly mode is on meanwhile (without its check of NaN): it
    keeps the lines of the forward for the backward.
    """

    def __init__(self, net: nn.Module | None = None, batch: Any = (), named: Iterable = ()):
        super().__init__()
        self.net = net
        self.paused = False
        self.functions = Functions(self._check_index)
        self.places = ModuleStack()
        self.samples = Samples()
        self.labels = Labels()
        self.failed = None  # the operation that raised
        self.half = None  # the first half type that an operation has computed in
        self.step = 0  # of what is named; set it where many steps are watched
        self.numbers = []  # among the arguments of the operation under way
        self.lines_of_origins = {}  # where a bad number was made: the operation, if it is fragile
        self.passed = False  # a backward has run in this micro-batch
        self._clock = count()
        self.sources = Sources()
        self.origins = WeakKeyDictionary()  # of storages that are bad, while they live
        for source, t in named:  # ready-made, and of no module
            self.sources[storage_of(t)] = source
        self.take(batch)

    def take(self, batch: Any, size: int = 0) -> None:
        """These tensors are the batch: by them samples are named. `size`: how many, if known."""
        self.places.begin()
        self.labels.begin()
        self.passed = False
        leaves = dict(inner_tensors(batch))
        if not leaves:
            return  # an earlier micro-batch brought all
        self.sources.name_batch(leaves)
        self.samples.begin(leaves.values(), size)

    def holders(self, batch):
        """(source, what it holds, in which columns, in which samples): of the tensors of this
        batch, and of all that was bad before an operation of the step used it."""
        for _, t in inner_tensors(batch):
            if not (span := extent(t)).is_mask:
                source = self.sources.get(storage_of(t))
                yield source, span.bad_end, bad_columns(t), self.samples.of(t)
        for _, origin in self.origins.values():
            if origin and origin.source:
                yield origin.source, origin.result_value, "", origin.samples

    def _name(self, net, prefix=""):
        """Give names to modules, and to what they hold."""
        for name, module in net.named_modules(prefix=prefix):
            self.places.names.setdefault(module, name)
        self.sources.name_net(net, prefix)

    def contexts(self):
        yield torch.autograd.set_detect_anomaly(True, check_nan=False)
        yield around_modules(self._enter_module, self._leave_module)

    def __enter__(self):
        if self.net is not None:
            self._name(self.net)
        return super().__enter__()

    def _enter_module(self, module, args):
        inner = getattr(module, "_orig_mod", module)  # what was compiled
        outermost = self.places.at_top_level
        if outermost and inner not in self.places.names:  # a teacher beside the net, too
            self._name(inner, "" if self.net is None else type(inner).__name__)
        self.samples.enter(inner, flat_tensors(args), outermost)
        self.places.enter(inner, counts=inner is module)

    def _leave_module(self, module, args, out):
        self.places.leave()

    # Operations

    def operation(self, func, args, kwargs):
        """Make it, and remember what made a bad result."""
        if self.paused:
            return func(*args, **kwargs)
        self.passed |= torch._C._current_autograd_node() is not None
        call = Call(func, args, kwargs)
        self.numbers = call.numbers
        if call.rule.index:
            self._check_index(call.rule.index(*args), func, call.inputs)
        try:
            out = func(*args, **kwargs)
        except Exception:
            self._raises(call)
            raise
        self._read_results(call, out)
        return out

    def _raises(self, call):
        """An operation raises: it has failed, or what made its bad input."""
        origin = self.describe(call.func, call.spans)
        if name := call.given.get("api_name"):  # of torch.linalg, whose check it is
            origin = replace(origin, op=f"torch.{name.removeprefix('torch.')}")
        self.failed = self.failed or self._earliest(call.spans, call.func)[1] or origin

    def _read_results(self, call, out):
        before = {storage_of(t) for t in call.inputs}
        outs = [*flat_tensors(out), *call.written]
        self.samples.carry(call.rule, call.given, call.inputs, outs, before)
        if call.rule.copies and not call.written and self._is_a_copy(call.inputs[0], out):
            return
        for t in outs:
            if t.dtype in HALF:
                self.half = self.half or t.dtype
            storage = storage_of(t)
            if call.rule.name == "lift_fresh" and t.dim() and extent(t).is_bad:
                self.sources.setdefault(storage, Source(Kind.PYTHON, line=line_now()))
            is_view = storage in before and not call.written
            if not is_view:  # a view shares what is known of its storage
                self._read_result(call, t, storage)

    def _read_result(self, call, t, storage):
        if call.rule.name == "set":  # a file's numbers
            self.sources[storage] = Source(Kind.OUTSIDE)
            return
        self.sources.mark_written(storage)
        if (span := extent(t)).is_bad:
            self.origins[storage] = self._origin(call, t, span)
        elif storage in self.origins and not is_part(t):
            del self.origins[storage]  # wholly overwritten
        elif call.rule.empty:
            self.sources[storage] = UNINITIALISED

    def _is_a_copy(self, t, out):
        """A copy to another device or type keeps the name of what is ready-made: it does not use
        it. But a good number that does not fit into the other type is spoilt here."""
        copied = storage_of(t)
        spoilt = out.dtype != t.dtype and not extent(t).is_bad
        if copied not in self.sources or copied in self.origins or spoilt:
            return False
        self.sources[storage_of(out)] = self.sources[copied]
        return True

    def _origin(self, call, t, span):
        """The origin of the bad result `t`: (number in time, Report)."""
        time, earlier = self._earliest(call.spans, call.func)
        if time < INTENDED_MASK:  # an input was bad already
            return time, self._in_fewer_samples(earlier, t, span)
        if earlier and _consumes_mask(call, span, earlier):
            return next(self._clock), replace(earlier, consumed_by=str(call.func))
        if span.is_mask and (call.has_bad_number or time == INTENDED_MASK):
            if not earlier and not (call.rule.copies and call.spans[0][1].is_bad):
                earlier = self.describe(call.func, call.spans, t)
            return INTENDED_MASK, earlier
        return next(self._clock), self._made_here(call, t, span)

    def _made_here(self, call, t, span):
        """The Report on an operation that made `t` bad, or that wrote a bad number of the script:
        x[i, j] = nan."""
        rule = call.rule
        origin = self.describe(call.func, call.spans, t)
        # Some versions of torch fill with a tensor of one number, or copy it.
        fills = rule.constant or (rule.name == "copy" and call.spans[-1][0].dim() == 0)
        constant = origin.source and origin.source.kind is Kind.CONSTANT
        number = self.functions.written  # torch makes a tensor of it unseen, where it overflows
        if fills and isinstance(number, int | float) and isfinite(number):
            wide = (Repeat(torch.float32, Span(number, number)),)
            inputs = (f"the number {number:.3g}",)
            return replace(origin, source=None, inputs=inputs, in_wider_types=wide)
        if fills and (constant or (call.has_bad_number and not origin.source)):
            # A function that fills with NaN by itself is an operation.
            name = self.functions.name
            if re.search(WRITERS, name):
                return replace(origin, source=Source(Kind.WRITTEN))
            return replace(origin, op=f"torch.{name}")
        if not all(map(isfinite, self.numbers)):
            origin = replace(origin, fix=NOT_FINITE)
        if span.is_mask and t.dtype is torch.float16 and min(self.numbers, default=0) < -65504:
            origin = replace(origin, fix=TOO_LOW)
        if rule.empty:  # which of it is used is not known yet
            origin = replace(origin, samples=())
        learns = origin.phase == "backward" or any(x.requires_grad for x, _ in call.spans)
        if learns or not self.passed:  # what is made of gradients, like their norm, is no cause
            self.lines_of_origins[origin.line] = origin.fragile_op
        return replace(origin, in_wider_types=in_wider_types(call))

    def _in_fewer_samples(self, origin, t, span):
        """Made elsewhere, it enters the batch here; or a -inf of many rows is NaN in some. Else all
        rows count: a step in time, say, may show some of them only."""
        spreads = origin.samples and (origin.result_value != "-inf" or span.is_mask)
        samples, size = self.samples.of(t), self.samples.size
        enters = not (self.samples.holds_few(t) and non_finite(t).all())
        if not spreads and enters and 0 < len(samples) < (len(origin.samples) or size):
            return replace(origin, samples=samples, batch_size=size)
        return origin

    def origin_of(self, tensors: Iterable[Tensor]) -> Report | None:
        """The earliest origin among all that these tensors were computed from."""
        number, origin = self._earliest(spans_of(tensors))
        return origin if number < INTENDED_MASK else None

    def _earliest(self, spans, func=None):
        """The earliest origin among these tensors, which `func` uses."""
        used = [entry for entry in spans if entry[1].is_bad or entry[1].is_mask]
        bad = (self._origin_of_input(t, span, func, spans) for t, span in used)
        return min(bad, default=NO_ORIGIN, key=lambda origin: origin[0])

    def _origin_of_input(self, t, span, func, spans):
        """What made `t` bad. It may be ready-made: a weight, a mask, an input, a constant."""
        if (storage := storage_of(t)) in self.origins:
            return self.origins[storage]
        source = self.sources.get(storage)
        never = source and (source.kind is Kind.PARAMETER or STATISTIC.search(source.name))
        mask = span.is_mask and not never
        if mask and (not span.is_bad or not source or source.kind in STATE):
            return INTENDED_MASK, None
        if not source or not func or not span.is_bad:
            return NO_ORIGIN
        self.samples.cut(t)
        origin = replace(self.describe(func, spans, t), source=source)
        number = INTENDED_MASK if mask else next(self._clock)
        return self.origins.setdefault(storage, (number, origin))

    def _here(self):
        """Where an operation runs, as fields of a Report."""
        module, nth_call = self.places.current
        node = torch._C._current_autograd_node()
        name, line, phase = "", NOWHERE, "forward"
        # In the backward: a hook, a custom function, a checkpoint
        stack = list(takewhile(lambda frame: frame[2] != "_engine_run_backward", frames_now()))
        checkpoints = any(file.endswith("checkpoint.py") for file, *_ in stack)
        repeats = checkpoints and torch.is_grad_enabled()
        if node is not None and not repeats:
            phase, name, line = "backward", node.name().rpartition(":")[2], line_of(stack)
            stack = frames_in(node.metadata.get("traceback_", ()))
            if name == "AccumulateGrad":
                source = self.sources.get(storage_of(node.variable))
                module = source.name.rpartition(".")[0] if source else ""
                nth_call = 0
            elif self.places.at_top_level:
                module, nth_call = self.places.module_of(node)
        line = line or line_of(stack)
        return {"module": module, "nth_call": nth_call, "phase": phase, "node": name, "line": line}

    def describe(self, func, spans, out=None):
        """All that is known at this operation: it made a bad number, or is the first to use one."""
        here = self._here()
        before = [self.sources.get(storage_of(t)) if span.is_bad else None for t, span in spans]
        shown = [f"{type_of(t)} {range_of(t, span)}" for t, span in spans]
        named = zip(shown, before, strict=True)
        shown = [f"{text} ({source})" if source else text for text, source in named]

        origin = Report(
            op=str(func),
            **here,
            spans=tuple(span for _, span in spans),
            inputs=(*shown, *(f"the number {a:.3g}" for a in self.numbers)),
            step=self.step,
            called="" if here["node"] else self.functions.name,
            batch_size=self.samples.size,
            bad_inputs=tuple(filter(None, before)),
            fix=BY_ZERO if "aten.div" in str(func) and self.numbers[:1] == [0] else None,
        )
        if out is None:
            return origin

        bad = [span for _, span in spans if span.is_bad]
        nan = out != out if bad and (out != out).any() else None  # its -inf may be a mask
        if here["phase"] == "forward" and (fix := mistake_in(func, spans)):
            origin = replace(origin, fix=fix)
        return replace(
            origin,
            result_value=extent(out).bad_end,
            dtype=out.dtype,
            source=None if all(span.is_mask for span in bad) else Source(Kind.CONSTANT),
            samples=self.samples.of(out, nan),
            names=self.samples.why_none(out),
            zero=origin_of_zero(func, spans) if here["phase"] == "forward" else "",
        )

    def _check_index(self, ranges, func, inputs):
        """A label or an index out of range: on a GPU the kernel would end the CUDA context."""
        for what, index, low, high, *ignore in ranges:
            if ignore:
                self.labels.see(index, *ignore)
            names, wrong = out_of_range(what, index, low, high, ignore)
            if names:
                self.samples.cut(index)
                origin = self.describe(func, spans_of(inputs))
                self.failed = replace(origin, names=names, samples=self.samples.of(index, wrong))
                raise IndexError(names[0])


def _consumes_mask(call, span, earlier):
    """Whether a mask among the inputs is used as a number here. A -inf that is summed is not a
    mask. Neither is a -inf of the batch that turns into NaN or inf."""
    addends = call.spans[call.rule.bias :]  # of what is summed; a bias of -inf is a mask
    added = call.rule.sums and any(s.is_bad for _, s in addends)
    spoilt = not span.is_mask and not call.rule.takes_masks
    zeroed = call.rule.name == "mul" and (-inf, 0) in earlier.spans
    return added or (earlier.source and spoilt and not zeroed)
