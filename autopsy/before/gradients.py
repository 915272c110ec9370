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
from torch.utils._pytree import tree_map

from ..frames import line_of, said
from ..modes import InDtype, compiled_code, without_checkpoints
from ..step import unchanged
from ..tensors import HALF, NARROW, numbers_of
from ..watch.calls import BACKWARD, buffers_back
from ..watch.deferred import moved_by
from ..watch.forward import SCALES, SUMS, operands_of
from ..watch.replay import in_no_module, net_of
from ..watch.watch import Watch
from .differences import Checkpoints, Custom, FirstApart, Saved, own_gradients

BEYOND = 8
SHAKEN = 3  # times, with other last bits
FAINT = 1e-6  # of the largest gradient: below it is rounding
DIGIT = 0.1  # of a gradient, which fp32 loses
ZEROS = 0.5  # of a gradient, which fp16 made 0


EAGER = "without compiled code"
CHECKPOINTS = "without checkpoints"
OWN = "with gradients of their own for custom functions and hooks"
WAYS = {  # what is done otherwise: its context
    EAGER: partial(compiled_code, "force_eager"),
    "with plain attention": partial(sdpa_kernel, SDPBackend.MATH),
    CHECKPOINTS: without_checkpoints,
    OWN: own_gradients,
}


KEEPS = {  # what else may be the reason there
    "without checkpoints": " (does the forward depend on a counter, a buffer, or random numbers of "
    "Python or NumPy? It runs twice)"
}
DRAWS = (
    "compiled code and fused attention draw other random numbers than eager code does (for "
    "compiled code set torch._inductor.config.fallback_random = True, or leave out the dropout)"
)


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
            code, text = 4, f"it could not be made again ({said(error)}): nothing is known"
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
        self.redrawn = dict.fromkeys(redrawn)  # sentences on checkpoints
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
            return self._checked({name: _gradient(p) for name, p in self.params.items()})

    def _checked(self, own):
        first, second = self.once(), self.once()
        if not all(_parallel(own[name], g) for name, g in first.items()):
            self.params = {n: p for n, p in self.params.items() if id(p) in self.moved}
        if not self.params or not all(_parallel(own[n], first[n]) for n in self.params):
            if self.redrawn:  # why they differ
                return 3, "\n  ".join(["a gradient is wrong:", *self.redrawn])
            return 4, (
                "made again, it has other gradients than the script: old ones that were not set "
                "to 0, or changed by hand. Nothing is known"
            )
        custom, saved = Custom(), Saved()
        plain = self.once(WAYS, record=(custom, saved))
        reference = "fp32" if self.half else "fp64"
        try:
            truth = self.once(WAYS, torch.float32 if self.half else torch.float64)
        except Exception:  # an operation that knows its own type only
            reference, truth = "its own types", plain
        rounding = {n: float((plain[n] - truth[n]).norm()) for n in truth}
        for n, t in truth.items():
            noise = float((first[n] - second[n]).norm())
            rounding[n] += noise + self.unit * custom.count**0.5 * float(t.norm())
        wrong = self._wrong(first, truth, rounding)
        if wrong:
            for seed in range(SHAKEN):
                shaken = self.once(WAYS, shake=seed)
                for n in truth:
                    rounding[n] = max(rounding[n], float((shaken[n] - truth[n]).norm()))
            wrong = self._wrong(first, truth, rounding)
        blamed = self._who(wrong, truth, rounding) if wrong else ""
        named, unknown, chosen, right = custom.answers()
        told = [*self.redrawn, *saved.changed, *custom.changed, *self._constants()]
        named += dict.fromkeys(told)
        named += dict.fromkeys(self.notes) if blamed == OWN else ()
        if wrong and custom.random and not _draws_alike(blamed):
            wrong = {}
            unknown.append(DRAWS)
        lost = self._lost(first, truth) if self.half is torch.float16 else {}
        redrawn = DRAWS in unknown
        if not (wrong or self.half or redrawn) and (lost := self._rounded(first, truth)):
            named += dict.fromkeys(self._first_apart())
        if named or wrong or lost:
            lines = [*named[:4], *self._lines(wrong | lost, first, truth)]
            if wrong and blamed:
                lines.append(f"it is right {blamed}: look there{KEEPS.get(blamed, '')}")
            head = f"a gradient is wrong, compared in {reference}:"
            return 3, "\n  ".join([head, *lines])
        if redrawn:
            return 4, f"nothing is known: {DRAWS}"
        most = max((_off(first[n], truth[n]) for n in _large(truth, FAINT)), default=0.0)
        agree = f"; {right} custom functions agree with central differences" if right else ""
        agree += f"; not compared: {', '.join(chosen)}"[:300] if chosen else ""
        rest = (
            f"the gradients of {len(first)} tensors are those of the step in {reference}, "
            f"{', '.join(WAYS)}, up to {most:.1e}{agree}"
        )
        if unknown:
            return (
                4,
                f"not compared, so that nothing is known: {'; '.join(unknown)[:600]}\n  {rest}",
            )
        return 0, rest

    def _lines(self, found, first, truth):
        """A line for each of the first tensors of {name: why}."""
        for n, why in [*found.items()][:5]:
            off = f"off by {_off(first[n], truth[n]):.2g} of its norm{why}"
            yield f"gradient of {n.replace('_orig_mod.', '')}: {off}"
        if len(found) > 5:
            yield f"and {len(found) - 5} more"

    def once(self, ways=(), dtype=None, record=(), shake=None):
        """Compute the gradients of the step in these ways; `record`: contexts that look on."""
        buffers_back(self.calls)
        for p in self.params.values():
            p.grad = None
        made, order = {}, []
        of = (*NARROW, torch.float32) if dtype is torch.float64 else NARROW
        with ExitStack() as stack:
            for way in ways:
                notes = stack.enter_context(WAYS[way]())
                self.notes = notes if way == OWN else self.notes
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

    def _wrong(self, grads, truth, rounding):
        """{name: why}, in the order of the backward."""
        found = {}
        for name, t in truth.items():
            apart = float((grads[name] - t).norm())
            if not apart <= BEYOND * rounding[name]:
                norm = float(t.norm()) or 1.0
                found[name] = f" (rounding: {rounding[name] / norm:.1g}){_shape(grads[name], t)}"
        return found

    def _rounded(self, first, truth):
        """Gradients of which fp32 keeps less than one digit."""
        large = _large(truth, 1e-3)
        return {n: ": fp32 has rounded it" for n in large if _off(first[n], truth[n]) > DIGIT}

    def _first_apart(self):
        """A sentence on the first operation whose result fp32 rounds as much."""
        apart = FirstApart(DIGIT / 10)
        self.once(WAYS, record=[apart])
        with suppress(Exception):  # an operation that knows its own type only
            self.once(WAYS, torch.float64, record=[apart])
        if apart.line:
            yield f"{apart.line}: fp32 loses its result (a difference of large numbers?)"

    def _lost(self, first, truth):
        """Gradients that became 0 in fp16."""
        found = {}
        for name in _large(truth, 5e-4):
            zeros = float(((first[name] == 0) & (truth[name] != 0)).double().mean())
            if zeros > ZEROS and _off(first[name], truth[name]) > 0.5:
                words = "it is too small for float16, use torch.amp.GradScaler"
                found[name] = f"; {zeros:.0%} of it is 0: {words}"
        return found

    def _who(self, wrong, truth, rounding):
        """The way that alone makes it right, or ""."""
        for way in WAYS:
            if not self._wrong(self.once([way]), truth, rounding).keys() & wrong.keys():
                return way
        return ""


def _wider(call, dtype, of):
    """The call with its batch in this type: some operations look at it before InDtype can."""

    def one(t):
        batch = isinstance(t, torch.Tensor) and t.dtype in of and not t.requires_grad
        return t.to(dtype) if batch else t

    args, kwargs = tree_map(one, (call.args, call.kwargs))
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
    product, norms = float((own * g).sum()), float(own.norm()) * float(g.norm())
    return product > 0.999 * norms if norms else float(own.norm()) == float(g.norm())


def _off(g, truth):
    norm = float(truth.norm())
    return float((g - truth).norm()) / norm if norm else float(g.norm())


def _large(grads, share):
    """The names of those larger than this share of the largest. Some should be 0, like that of a
    bias before BatchNorm."""
    norms = {name: float(g.norm()) for name, g in grads.items()}
    most = max(norms.values(), default=0.0)
    return [name for name, norm in norms.items() if norm > share * most]


def _draws_alike(way):
    """Whether the step draws the same random numbers in this way as without it."""
    inductor = sys.modules.get("torch._inductor.config")
    compiled = way == EAGER and getattr(inductor, "fallback_random", False)
    return compiled or way in (CHECKPOINTS, OWN)


def _shape(g, truth):
    """How it differs: in length, or in direction."""
    norms = float(g.norm()) * float(truth.norm())
    if not norms:
        return ", one of them is 0"
    cosine = float((g * truth).sum()) / norms
    factor = float(g.norm()) / float(truth.norm())
    return f", cosine {cosine:.3f}, {factor:.3g} times as long"
