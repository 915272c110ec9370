"""
Gradients: is a gradient that is finite also right?

It repeats one step: twice as it was, and then eagerly, with plain attention, without checkpoints,
in the same types and in wider ones. A tensor's gradient may differ from the wide one by rounding:
BEYOND times what the other way in the same types shows (where that is not enough, with weights that
are shaken by their last bit, too), what two runs of the same show, and sqrt(n) * u for the n
operations of the step (u: half of the last bit). What is not torch's own is compared with central
differences. It puts back weights, buffers, gradients and random numbers; the script ends.
"""

import sys
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache, partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..frames import first_line_of, line_of
from ..modes import InDtype, compiled_code, without_checkpoints
from ..step import unchanged
from ..tensors import HALF, NARROW, mapped, numbers_of
from ..watch.calls import BACKWARD, buffers_back
from ..watch.deferred import moved_by
from ..watch.forward import SCALES, SUMS, operands_of
from ..watch.replay import in_no_module, net_of
from ..watch.watch import Watch
from .answer import (
    DIGIT,
    Measured,
    Way,
    beyond_rounding,
    decide,
    in_words,
    made_zero,
    norm,
    rounded_away,
)
from .differences import Checkpoints, Custom, FirstDifference, Saved, own_gradients

SHAKEN = 3  # times, with other last bits
CONTEXTS = {
    Way.EAGER: partial(compiled_code, "force_eager"),
    Way.ATTENTION: partial(sdpa_kernel, SDPBackend.MATH),
    Way.CHECKPOINTS: without_checkpoints,
    Way.OWN: own_gradients,
}


class GradientCheck(Watch):
    """Watches a script up to the optimizer step number `at`. `code` and `text` are its answer."""

    def __init__(self, at=1):
        super().__init__()
        self.at = at
        self.checkpoints = Checkpoints()
        self.hooks.wrap(torch.utils.checkpoint, "checkpoint", self.checkpoints)
        self.answer = 4, f"no step {at} of an optimizer was seen (from 0): nothing is known"

    def check(self, optimizer):
        """Replace what the watch does before a step."""
        late = [call for call in self.recorder.calls if call.number > self.recorder.latest]
        passes = [call for call in late if call.function is BACKWARD]  # none before a closure
        if not passes or self.recorder.steps_of.get(id(optimizer), 0) < self.at:
            super().check(optimizer)
            return
        step = f"step {self.at}"
        if self.hooks.world > 1:
            self.answer = 4, f"{step}: run one process for this check; nothing is known"
            raise SystemExit
        try:
            code, text = Step(self.recorder, optimizer, self.checkpoints.found).check()
        except Exception as error:
            code, text = 4, f"it could not be made again ({first_line_of(error)}): nothing is known"
        self.answer = code, f"{step}: {text}"
        raise SystemExit

    @property
    def code(self):
        return 3 if self.findings.symptom else self.answer[0]

    @property
    def text(self):
        """At most 12 lines."""
        if self.findings.symptom:  # of a step before
            return self.findings.text or self.findings.symptom
        return self.hooks.failure or self.answer[1]


class Step:
    """The recorded step, to be repeated as often as needed."""

    def __init__(self, recorder, optimizer, redrawn=()):
        self.notes = []  # on custom functions
        self.redrawn = [*dict.fromkeys(redrawn)]  # sentences on checkpoints
        # Earlier passes belong to other optimizers, and their gradients were set to 0.
        self.calls = recorder.needed((), since=recorder.latest)
        self.net = net_of(self.calls)
        self.params = {n: p for n, p in self.net.named_parameters() if p.grad is not None}
        free = [t for t in in_no_module(self.calls, self.net) if t.grad is not None]
        self.params |= {f"tensor {k}": t for k, t in enumerate(free)}
        self.moved = {id(p) for p in moved_by(optimizer)}
        kinds = {dtype for call in self.calls for _, dtype in call.autocast}
        kinds |= {p.dtype for p in self.params.values()}
        self.half = next((kind for kind in HALF if kind in kinds), None)
        self.unit = max((torch.finfo(kind).eps / 2 for kind in kinds), default=0.0)

    def check(self):
        """(exit code, text)"""
        with unchanged(self.net, self.params.values()):
            measured = self.measure({name: _gradient(p) for name, p in self.params.items()})
        answer, way = decide(measured)
        return answer.code, in_words(answer, way, measured)

    def measure(self, own):
        """Repeat the step in several ways. `own`: the gradients that the script had."""
        first, second = self.once(), self.once()
        if not self._repeats(own, first):
            return self._not_repeated()
        custom, saved = Custom(), Saved()
        plain = self.once(Way, record=(custom, saved))
        reference, truth = self._in_wider_types(plain)
        unit = self.unit * custom.count**0.5
        rounding = {
            n: norm(plain[n] - t) + norm(first[n] - second[n]) + unit * norm(t)
            for n, t in truth.items()
        }
        beyond = beyond_rounding(first, truth, rounding)
        if beyond:
            self._shake(truth, rounding)
            beyond = beyond_rounding(first, truth, rounding)
        way = self._way_back(beyond, truth, rounding) if beyond else None
        wrong, unknown, chosen, right = custom.answers()
        causes = [*wrong, *self._causes(custom, saved, way)]
        rounded = [] if beyond or self.half else rounded_away(first, truth)
        if rounded:
            causes += self._first_difference()
        return Measured(
            repeats=True,
            causes=causes[:4],
            reference=reference,
            first=first,
            truth=truth,
            rounding=rounding,
            beyond=beyond,
            way=way,
            other_draws=bool(beyond) and custom.random and not _draws_alike(way),
            zeros=made_zero(first, truth) if self.half is torch.float16 else (),
            rounded=rounded,
            unknown=unknown,
            chosen=chosen,
            right=right,
        )

    def _not_repeated(self):
        """The step has other gradients: is it a custom function that differs each time?"""
        custom = Custom()
        if not self.redrawn:
            self.once(record=[custom])
        return Measured(False, self.redrawn, unrepeatable=custom.unrepeatable())

    def _causes(self, custom, saved, way):
        """Sentences on what makes gradients wrong, beside those on custom functions."""
        seen = *self.redrawn, *saved.changed, *custom.changed, *self._constants()
        yield from dict.fromkeys(seen)
        if way is Way.OWN:
            yield from dict.fromkeys(self.notes)

    def _repeats(self, own, first):
        """Whether these are the script's gradients, at least those that its optimizer uses."""
        if not all(_parallel(own[n], g) for n, g in first.items()):
            self.params = {n: p for n, p in self.params.items() if id(p) in self.moved}
        return bool(self.params) and all(_parallel(own[n], first[n]) for n in self.params)

    def _in_wider_types(self, plain):
        """(name of the types, gradients)"""
        try:
            if self.half:
                return "fp32", self.once(Way, torch.float32)
            return "fp64", self.once(Way, torch.float64)
        except Exception:  # an operation that knows its own type only
            return "its own types", plain

    def _shake(self, truth, rounding):
        """Add to the rounding what other last bits of the weights change."""
        for seed in range(SHAKEN):
            shaken = self.once(Way, shake=seed)
            for n, t in truth.items():
                rounding[n] = max(rounding[n], norm(shaken[n] - t))

    def _way_back(self, beyond, truth, rounding):
        """The way that alone makes these gradients right, or None."""
        for way in Way:
            if not {*beyond_rounding(self.once([way]), truth, rounding)} & {*beyond}:
                return way
        return None

    def once(self, ways=(), dtype=None, record=(), shake=None):
        """Compute the gradients of the step in these ways; `record`: contexts that look on."""
        buffers_back(self.calls)
        for p in self.params.values():
            p.grad = None
        made, order = {}, []
        of = (*NARROW, torch.float32) if dtype is torch.float64 else NARROW
        with ExitStack() as stack:
            for way in ways:
                notes = stack.enter_context(CONTEXTS[way]())
                if way is Way.OWN:
                    self.notes = notes
            if shake is not None:
                stack.enter_context(self._shaken(shake))
            if dtype:
                stack.enter_context(InDtype(dtype, of, self.net))
            for context in record:
                stack.enter_context(context)
            for name, p in self.params.items():
                told = p.register_post_accumulate_grad_hook(lambda _, n=name: order.append(n))
                stack.callback(told.remove)
            for call in self.calls:
                (_wider(call, dtype, of) if dtype else call).repeat(made)
        self.learns = {m.number for m, t in made.items() if t.requires_grad}
        # the gradient that was ready first comes first
        names = dict.fromkeys((*order, *self.params))
        return {name: _gradient(self.params[name]) for name in names}

    def _constants(self):
        """Sentences on terms of the loss that are made of a gradient which has no graph."""
        calls = {call.number: call for call in self.calls}

        @cache
        def slope_of(number):
            """The call of torch.autograd.grad that this is made of."""
            call = calls[number]
            if call.function is torch.autograd.grad:
                return call
            return next(filter(None, map(slope_of, operands_of(call, calls))), None)

        def look(number):
            call = calls[number]
            name = call.name.strip("_")
            parts = {*operands_of(call, calls)}
            for part in parts if name in (*SUMS, "sub", "rsub") else ():
                if slope := part not in self.learns and slope_of(part):
                    yield (
                        f"{line_of(call.frames)}: this term of the loss has no gradient: "
                        f"autograd.grad() at {line_of(slope.frames)} without create_graph=True"
                    )
            for part in parts & self.learns if name in (*SUMS, *SCALES) else ():
                yield from look(part)

        roots = [m.number for c in self.calls if c.function is BACKWARD for m in c.uses()]
        return [sentence for number in roots for sentence in look(number)]

    @contextmanager
    def _shaken(self, seed):
        """Change weights in their last bit, to see what rounding does to this step."""
        generator = torch.Generator().manual_seed(seed)
        held = [(p, p.data) for p in self.params.values() if p.layout is torch.strided]
        for p, data in held:
            signs = torch.randint(0, 2, p.shape, generator=generator, device="cpu") * 2 - 1
            p.data = data * (1 + 2 * self.unit * signs.to(data.device, data.dtype))
        try:
            yield
        finally:
            for p, data in held:
                p.data = data

    def _first_difference(self):
        """A sentence on the first operation whose result fp32 rounds as much."""
        first = FirstDifference(DIGIT / 10)
        self.once(Way, record=[first])
        with suppress(Exception):  # an operation that knows its own type only
            self.once(Way, torch.float64, record=[first])
        if first.line:
            yield f"{first.line}: fp32 loses its result (a difference of large numbers?)"


def _wider(call, dtype, of):
    """The call with its batch in this type: some operations look at it before InDtype can."""

    def one(t):
        batch = isinstance(t, torch.Tensor) and t.dtype in of and not t.requires_grad
        return t.to(dtype) if batch else t

    args, kwargs = mapped(one, (call.args, call.kwargs))
    return replace(call, args=args, kwargs=kwargs)


def _gradient(p):
    """Its gradient in float64 on the CPU; zeros if there is none."""
    g = p.grad
    if g is None:
        return torch.zeros(p.shape, dtype=torch.float64, device="cpu")
    g = g.detach().to_dense() if g.layout is torch.sparse_coo else numbers_of(g.detach())
    return g.cpu().double()


def _parallel(own, g):
    """Whether they are equal up to a factor: the script may have clipped or unscaled one."""
    product, norms = float((own * g).sum()), norm(own) * norm(g)
    return product > 0.999 * norms if norms else norm(own) == norm(g)


def _draws_alike(way):
    """Whether the step draws the same random numbers in this way as without it."""
    inductor = sys.modules.get("torch._inductor.config")
    compiled = way is Way.EAGER and getattr(inductor, "fallback_random", False)
    return compiled or way in (Way.CHECKPOINTS, Way.OWN)
