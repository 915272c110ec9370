"""
Differences: what a step's repetitions are watched for.

It records the calls of custom autograd.Functions and of operations that are not torch's, whose
backward slope.py then compares with differences. It also finds what makes a backward wrong unseen:
writes to what the forward saved, or to a gradient; results that fp32 rounds away; checkpoints that
draw other random numbers.
"""

from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..frames import first_line_of, frames_now, line_now
from ..modes import Operations
from ..step import rng_states
from ..tensors import device_of, flat_tensors, floats_in
from ..watch.hooks import calls_through
from .repeatable import differs_from_itself
from .slope import CHOICE, differs

ROOM, RESULTS = 1 << 20, 4096  # numbers of a result, and results, that are compared
MOST = 16  # calls of custom functions that are compared
TORCH = ("aten", "prims", "prim", "c10d", "_c10d_functional", "quantized", "mkldnn", "profiler")


class Custom(Operations):
    """Count operations, and keep the calls of those that are not torch's."""

    def __init__(self):
        super().__init__()
        self.count, self.calls, self.depth = 0, {}, 0
        self.random = False  # whether an operation drew random numbers
        self.changed = []  # sentences on what a forward keeps, and something writes to

    def contexts(self):
        yield calls_through(self.applied)

    def applied(self, function, own, args, kwargs):
        """A custom function is called, perhaps within another one."""
        if not self.depth:
            wanted = [isinstance(a, Tensor) and a.requires_grad for a in args]
            used = any(wanted)  # else the step makes no use of its backward
            self.keep(function.__name__, own, args, kwargs, wanted if used else None, used)
        self.depth += 1
        try:
            out = own(*args, **kwargs)
        finally:
            self.depth -= 1
        for node in _nodes_of(out):
            self.look_after(node, f"{line_now()}: {function.__name__}")
        return out

    def look_after(self, node, name):
        """Is what the forward has put on `ctx` still the same at the backward?"""
        kept = [(key, t, t._version) for key, t in vars(node).items() if isinstance(t, Tensor)]

        def before(grads):
            self.changed += [
                f"{name} keeps ctx.{key}, to which something writes before the backward "
                "(ctx.save_for_backward() would notice)"
                for key, t, version in kept
                if t._version != version
            ]

        if kept:
            node.register_prehook(before)

    def operation(self, func, args, kwargs):
        """Count it, and make it."""
        self.count += 1
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        forward = torch._C._current_autograd_node() is None and not self.depth
        if forward and func.namespace not in TORCH:
            self.keep(str(func), func, args, kwargs, None)
        return func(*args, **kwargs)

    def keep(self, name, function, args, kwargs, wanted, used=True):
        line = line_now()
        if (name, line) in self.calls or len(self.calls) >= MOST:
            return
        held = [a.detach().clone() if isinstance(a, Tensor) else a for a in args]
        rng = rng_states(device_of(args))
        self.calls[name, line] = (function, held, kwargs, wanted, rng), used

    def answers(self):
        """Compare all: (sentences on wrong ones, names of unknown ones, names of those that nobody
        can compare, number of right ones)."""
        named, unknown, chosen, right = [], [], [], 0
        for (name, line), (call, used) in self.calls.items():
            try:
                with torch.enable_grad():
                    answer = differs(*call)
            except Exception as error:
                unknown += [f"{name} ({first_line_of(error)})"] if used else []
                continue
            if answer in (None, CHOICE) and not used:
                continue
            if answer is None:
                unknown.append(f"{name} (not smooth enough for differences)")
            elif answer is CHOICE:
                chosen.append(f"{name} (its forward is a step or an identity: a choice)")
            elif answer:
                unused = "" if used else "; no argument needs a gradient in this step"
                named.append(f"{line}: {name}: {answer}{unused}")
            right += answer == ""
        return named, unknown, chosen, right

    def unrepeatable(self):
        """Names of those whose forward gives other results for the same input and random state."""
        return [
            f"{name} ({line})"
            for (name, line), ((function, args, kwargs, _, rng), _) in self.calls.items()
            if differs_from_itself(function, args, kwargs, rng)
        ]


class FirstDraw(Operations):
    """The random state before the first operation that draws; `what`: where that is."""

    def __init__(self):
        super().__init__()
        self.state, self.what = None, ""

    def operation(self, func, args, kwargs):
        if self.what or torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        device = device_of((args, kwargs))
        before = _torch_states(device)
        out = func(*args, **kwargs)
        if before != _torch_states(device):  # with p=0 nothing is drawn
            functions = [name for file, _, name in frames_now() if file == F.__file__]
            self.state, self.what = before, f"{[*functions, func][0]} at {line_now()}"
        return out


def _torch_states(device):
    states = rng_states(device)
    return [states[key].tolist() for key in ("cpu", "cuda") if states[key] is not None]


class Checkpoints:
    """Finds checkpoints that draw other random numbers in the backward than in the forward."""

    def __init__(self):
        self.found = []  # sentences

    def __call__(self, original, function, *args, **kwargs):
        """In place of torch.utils.checkpoint.checkpoint()."""
        if kwargs.get("preserve_rng_state", True):
            return original(function, *args, **kwargs)
        line, draws = line_now(), []

        def watched(*args, **kwargs):
            draws.append(FirstDraw())
            try:
                with draws[-1]:
                    return function(*args, **kwargs)
            finally:  # the second time it may be stopped early
                first, last = draws[0], draws[-1]
                if last.what and first.what and last.state != first.state:
                    self.found.append(
                        f"{line}: in the backward this checkpoint draws other random numbers than "
                        f"in the forward ({first.what}): leave out preserve_rng_state=False"
                    )

        return original(watched, *args, **kwargs)


@contextmanager
def own_gradients():
    """Each custom function's backward gets a contiguous copy of its gradient, and each hook of a
    tensor a copy. Yields sentences on those to which that may matter."""
    notes = []
    register = Tensor.register_hook

    def wrapper(function, own, args, kwargs):
        line, name = line_now(), function.__name__
        given = []

        def before(grads):
            scattered = any(g is not None and not g.is_contiguous() for g in grads)
            if scattered:
                notes.append(f"{line}: {name} is given a gradient that is not contiguous")
            given[:] = [g if g is None else _copy(g) for g in grads]
            return tuple(given)

        def after(*_):
            if any(g is not None and g._version for g in given):
                notes.append(f"{line}: the backward of {name} writes into the gradient it is given")

        out = own(*args, **kwargs)
        for node in _nodes_of(out):
            node.register_prehook(before)
            node.register_hook(after)
        return out

    def hooked(t, hook):
        line, name = line_now(), getattr(hook, "__qualname__", type(hook).__name__)

        def with_copy(grad):
            given = _copy(grad)
            out = hook(given)
            if given._version:
                notes.append(f"{line}: the hook {name} writes into the gradient it is given")
            return out

        return register(t, with_copy)

    with calls_through(wrapper), mock.patch.object(Tensor, "register_hook", hooked):
        yield notes


def _nodes_of(out):
    return {t.grad_fn for t in flat_tensors(out)} - {None}


def _copy(g):
    return g.clone(memory_format=torch.contiguous_format)


class FirstDifference(Operations):
    """Entered twice, it compares the results of a step's forward with those of the first time:
    `line` is the first operation that differs."""

    def __init__(self, tolerance):
        super().__init__()
        self.tolerance, self.kept, self.line = tolerance, [], ""
        self.rest = None

    def __enter__(self):
        self.rest = iter(self.kept) if self.kept else None
        return super().__enter__()

    def operation(self, func, args, kwargs):
        """Make it, and compare its results."""
        out = func(*args, **kwargs)
        forward = torch._C._current_autograd_node() is None
        forward = forward and func is not torch.ops.aten._to_copy.default  # ours, too
        made = [t for t in floats_in(out) if t.numel() <= ROOM]
        if forward and self.rest is None and len(self.kept) < RESULTS:
            self.kept.append((func, [t.detach().double() for t in made]))
        elif forward and self.rest and not self.line:
            same, before = next(self.rest, (None, ()))
            pairs = zip(made, before, strict=False)
            if same is not func:
                self.rest = ()  # another way: nothing can be compared
            elif any(
                float((t - b).norm()) > self.tolerance * float(t.norm()) > 0 for t, b in pairs
            ):
                self.line = f"{line_now()}: {func}"
        return out


class Saved(torch.autograd.graph.saved_tensors_hooks):
    """Find what a forward has saved for its backward, and what was written to afterwards without
    autograd's knowledge (by `.data`, or by NumPy): `changed` says so."""

    def __init__(self):
        super().__init__(self.pack, self.unpack)
        self.changed = []

    def pack(self, t):
        plain = type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided
        copy = t.detach().clone() if plain else None
        return t.detach(), copy, t.requires_grad, line_now()

    def unpack(self, saved):
        t, before, learns, line = saved
        node = torch._C._current_autograd_node().name()
        statistic = "BatchNorm" in node and t.dim() == 1 and not learns  # it updates these itself
        kept = before is None or statistic
        if not kept and ((t != before) & (before == before)).any():
            self.changed.append(
                f"{line}: {node} reads a tensor that was written to after the forward without "
                "autograd's knowledge (through .data or NumPy?)"
            )
        return t
