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
from .operations import WRITERS, in_wider_types, mistake_in, origin_of_zero, rule_of
from .report import Report
from .samples import Samples
from .step import attributes_of
from .tensors import (
    HALF,
    STATISTIC,
    Span,
    bad_columns,
    extent,
    flat_tensors,
    inner_tensors,
    is_part,
    is_real,
    non_finite,
    range_of,
    spans_of,
    storage_of,
    type_of,
)

# An origin is (a number in time, a Report). Of a mask, large negative values written on purpose:
INTENDED_MASK = sys.maxsize - 1
NO_ORIGIN = (sys.maxsize, None)  # nothing that this step did
UNINITIALISED = Source(Kind.UNINITIALISED)


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
        # Of a storage, while it lives: its Source, if it was ready-made
        self.known = WeakKeyDictionary()
        # and its origin, if it is bad.
        self.origins = WeakKeyDictionary()
        for source, t in named:  # ready-made, and of no module
            self.known[storage_of(t)] = source
        self.take(batch)

    def take(self, batch: Any, size: int = 0) -> None:
        """These tensors are the batch: by them samples are named. `size`: how many, if known."""
        self.places.begin()
        self.labels.begin()
        self.passed = False
        leaves = dict(inner_tensors(batch))
        if not leaves:
            return  # an earlier micro-batch brought all
        for name, t in leaves.items():
            first, _, rest = name.partition(".")
            plain = {"0": "input", "1": "target"}.get(first, f"item {first} of the batch")
            self.known.setdefault(storage_of(t), Source(Kind.BATCH, rest or plain))
        self.samples.begin(leaves.values(), size)

    def holders(self, batch):
        """(source, what it holds, in which columns, in which samples): of the tensors of this
        batch, and of all that was bad before an operation of the step used it."""
        for _, t in inner_tensors(batch):
            if not (span := extent(t)).is_mask:
                source = self.known.get(storage_of(t))
                yield source, span.bad_end, bad_columns(t), self.samples.of(t)
        for _, origin in self.origins.values():
            if origin and origin.source:
                yield origin.source, origin.result_value, "", origin.samples

    def _name(self, net, prefix=""):
        """What is ready-made, and under which name: weights, buffers, attributes."""
        for name, module in net.named_modules(prefix=prefix):
            self.places.names.setdefault(module, name)
            for key, t in inner_tensors(attributes_of(module), name):
                self.known[storage_of(t)] = Source(Kind.ATTRIBUTE, key)
        for name, b in net.named_buffers(prefix):
            self.known[storage_of(b)] = Source(Kind.BUFFER, name)
        for name, p in net.named_parameters(prefix):
            self.known[storage_of(p)] = Source(Kind.PARAMETER, name)
            if p.grad is not None:  # of a second optimizer, say
                self.known[storage_of(p.grad)] = Source(Kind.OLD_GRADIENT, name)

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

        rule = rule_of(func)
        given = dict(zip(rule.names, args, strict=False)) | kwargs
        self.numbers = [a for a in args if rule.pointwise and type(a) in (int, float)]
        inputs = flat_tensors((args, kwargs))
        written = {id(t): t for t in flat_tensors([given.get(name) for name in rule.writes])}
        kept = [a.clone() if id(a) in written else a for a in args]
        if rule.overwrites:
            inputs = [t for t in inputs if id(t) not in written]
        spans = spans_of(inputs) if written else []  # now: they are overwritten
        if rule.index:
            self._check_index(rule.index(*args), func, inputs)

        try:
            out = func(*args, **kwargs)
        except Exception:
            spans = spans or spans_of(inputs)
            origin = self.describe(func, spans)
            if given.get("api_name"):  # of torch.linalg, whose check it is
                origin = replace(origin, op=f"torch.{given['api_name'].removeprefix('torch.')}")
            self.failed = self.failed or self._earliest(spans, func)[1] or origin
            raise

        before = {storage_of(t) for t in inputs}
        outs = [*flat_tensors(out), *written.values()]
        self.samples.carry(rule, given, inputs, outs, before)
        if rule.copies and not written and self._is_a_copy(inputs[0], out):
            return out

        for t in outs:
            if t.dtype in HALF:
                self.half = self.half or t.dtype
            storage = storage_of(t)
            if rule.name == "lift_fresh" and t.dim() and extent(t).is_bad:
                self.known.setdefault(storage, Source(Kind.PYTHON, line=line_now()))
            if storage in before and not written:
                continue  # a view: it shares what is known of its storage
            if rule.name == "set":  # a file's numbers
                self.known[storage] = Source(Kind.OUTSIDE)
                continue
            if self.known.get(storage) == UNINITIALISED:
                del self.known[storage]  # written now
            if (span := extent(t)).is_bad:
                spans = spans or spans_of(inputs)
                self.origins[storage] = self._origin((func, kept, kwargs), spans, t, span)
            elif storage in self.origins and not is_part(t):
                del self.origins[storage]  # wholly overwritten
            elif rule.empty:
                self.known[storage] = UNINITIALISED
        return out

    def _is_a_copy(self, t, out):
        """A copy to another device or type keeps the name of what is ready-made: it does not use
        it. But a good number that does not fit into the other type is spoilt here."""
        copied = storage_of(t)
        spoilt = out.dtype != t.dtype and not extent(t).is_bad
        if copied not in self.known or copied in self.origins or spoilt:
            return False
        self.known[storage_of(out)] = self.known[copied]
        return True

    def _origin(self, operation, spans, t, span):
        """The origin of the bad result `t` of the operation (func, args, kwargs): (number in time,
        Report)."""
        func, args, kwargs = operation
        rule = rule_of(func)
        given_inf = any(isinstance(a, float) and not is_real(a) for a in (*args, *kwargs.values()))
        time, earlier = self._earliest(spans, func)
        if time < INTENDED_MASK:  # an input was bad already
            return time, self._in_fewer_samples(earlier, t, span)
        if earlier and _consumes_mask(rule, spans, span, earlier):
            return next(self._clock), replace(earlier, consumed_by=str(func))
        if span.is_mask and (given_inf or time == INTENDED_MASK):
            passed_on = rule.copies and spans[0][1].is_bad
            return INTENDED_MASK, earlier or (None if passed_on else self.describe(func, spans, t))
        return next(self._clock), self._made_here(operation, spans, t, span, given_inf)

    def _made_here(self, operation, spans, t, span, given_inf):
        """The Report on an operation that made `t` bad, or that wrote a bad number of the script:
        x[i, j] = nan."""
        rule = rule_of(operation[0])
        origin = self.describe(operation[0], spans, t)
        # Some versions of torch fill with a tensor of one number, or copy it.
        fills = rule.constant or (rule.name == "copy" and spans[-1][0].dim() == 0)
        constant = origin.source and origin.source.kind is Kind.CONSTANT
        number = self.functions.written  # torch makes a tensor of it unseen, where it overflows
        if fills and isinstance(number, int | float) and isfinite(number):
            wide = (Repeat(torch.float32, Span(number, number)),)
            inputs = (f"the number {number:.3g}",)
            return replace(origin, source=None, inputs=inputs, in_wider_types=wide)
        if fills and (constant or (given_inf and not origin.source)):
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
        learns = origin.phase == "backward" or any(x.requires_grad for x, _ in spans)
        if learns or not self.passed:  # what is made of gradients, like their norm, is no cause
            self.lines_of_origins[origin.line] = origin.fragile_op
        return replace(origin, in_wider_types=in_wider_types(*operation))

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
        source = self.known.get(storage)
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
                source = self.known.get(storage_of(node.variable))
                module = source.name.rpartition(".")[0] if source else ""
                nth_call = 0
            elif self.places.at_top_level:
                module, nth_call = self.places.module_of(node)
        line = line or line_of(stack)
        return {"module": module, "nth_call": nth_call, "phase": phase, "node": name, "line": line}

    def describe(self, func, spans, out=None):
        """All that is known at this operation: it made a bad number, or is the first to use one."""
        here = self._here()
        before = [self.known.get(storage_of(t)) if span.is_bad else None for t, span in spans]
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


def _consumes_mask(rule, spans, span, earlier):
    """Whether a mask among the inputs is used as a number here. A -inf that is summed is not a
    mask. Neither is a -inf of the batch that turns into NaN or inf."""
    addends = spans[rule.bias :]  # of what is summed; a bias of -inf is a mask
    added = rule.sums and any(s.is_bad for _, s in addends)
    spoilt = not span.is_mask and not rule.takes_masks
    zeroed = rule.name == "mul" and (-inf, 0) in earlier.spans
    return added or (earlier.source and spoilt and not zeroed)
