"""
Calls: what the recorder writes down of one call, and how it is made again from the same line.
"""

import inspect
from collections import namedtuple
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import MappingKey, tree_leaves_with_path

from ..frames import call_from
from ..step import carry, carry_back, put_back, set_rng_states
from ..tensors import device_of, inner_tensors, leaves, mapped, storage_of

BACKWARD = torch.autograd.backward
SLOPES = (BACKWARD, torch.autograd.grad)


@dataclass(frozen=True)
class ResultRef:
    """In the arguments of a call: the k-th tensor that an earlier call made."""

    number: int
    k: int
    frames: tuple = ()
    data: bool = field(default=False, compare=False)  # no weight, no module had a part in it
    memory: int = field(default=0, compare=False)  # id of its storage


# It stands for a PackedSequence, which takes tensors only.
Packed = namedtuple("Packed", PackedSequence._fields)


def is_packed(x):
    return isinstance(x, Packed | PackedSequence)


@dataclass(eq=False)
class Call:
    """A call of an outermost module, of a function of torch outside of modules, or a backward."""

    function: Callable
    number: int
    args: Any = ()  # a ResultRef for what an earlier call made; everything else by reference
    kwargs: Any = field(default_factory=dict)
    frames: tuple = ()  # the innermost first
    grad: bool = False
    autocast: list = ()  # (device, dtype)
    rng: dict | None = None
    carried: list = ()  # of a module, before the call: see carried_by()
    states: list = ()  # what it carries that earlier calls made: (module, name, with ResultRefs)
    left: list = ()  # what the call wrote of these: (module, name)
    buffers: dict = field(default_factory=dict)  # in training: before this step's first call
    shape: tuple = ()  # of a module's first input
    scaler: Any = None  # that multiplies a loss here
    uninitialised: bool = False  # a module was given memory that nothing has written
    raised: bool = False  # while it is under way, and for ever if the script catches what it raises
    writes: set = frozenset()  # ids of the storages into which it writes

    @property
    def name(self):
        """Of the function; of a module it is ""."""
        return getattr(self.function, "__name__", "")

    def given(self):
        """(dotted name, tensor)"""
        return [*inner_tensors((self.args, self.kwargs))]

    def uses(self):
        """The results of other calls among its arguments, and in what it carries."""
        states = [state for *_, state in self.states]
        return [x for x in leaves((self.args, self.kwargs, states)) if isinstance(x, ResultRef)]

    def leads_to(self, numbers):
        """Whether it is one of these calls, or writes into one of these storages."""
        return self.number in numbers or not self.writes.isdisjoint(numbers)

    def named(self):
        """(name of the argument, or its key in a mapping; tensor, or what an earlier call made)"""
        return named_arguments(self.function, self.args, self.kwargs)

    def repeat(self, made):
        """Make this call once more, from the same line."""

        def stand_in(x):
            if isinstance(x, Tensor) and x.grad_fn is not None:
                return x.detach().requires_grad_()  # nothing is known of its history
            if isinstance(x, Packed):
                return PackedSequence(*map(stand_in, x))
            return made[x] if isinstance(x, ResultRef) else x

        try:
            args, kwargs = mapped(stand_in, (self.args, self.kwargs), is_leaf=is_packed)
        except KeyError:
            return  # made before the last step of another optimizer
        function = self.function
        if function is BACKWARD and len(args) == 4:  # as Tensor.backward calls it
            function = Tensor.backward  # which class Calls sees
        for frame in self.frames:
            function = partial(call_from(frame), function)
        carry_back(self.carried)
        for module, name, state in self.states:
            with suppress(KeyError):  # else it is as it was
                carry(module, name, mapped(stand_in, state))
        with ExitStack() as stack:
            stack.enter_context(torch._C._EnableTorchFunction())  # see Hooks.safely
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype))
            if self.rng:
                set_rng_states(self.rng, device_of((args, kwargs)))
            out = function(*args, **kwargs)
        made.update(self.made(out))

    def made(self, out):
        tensors = [out]
        if self.left or not isinstance(out, Tensor):
            left = [vars(module).get(name) for module, name in self.left]
            tensors = [t for _, t in inner_tensors((out, left))]
        given = leaves((self.args, self.kwargs)) if tensors else ()
        weights = isinstance(self.function, nn.Module)
        if self.name != "requires_grad_":  # of a batch, say: it asks for a gradient only now
            weights = weights or any(isinstance(x, Tensor) and x.requires_grad for x in given)
        data = not weights and all(x.data for x in given if isinstance(x, ResultRef))
        return {
            ResultRef(self.number, k, self.frames, data, id(storage_of(t))): t
            for k, t in enumerate(tensors)
        }


def named_arguments(function, args, kwargs):
    """(name of the argument, or its key in a mapping; what is given)"""
    forward = getattr(function, "forward", function)
    with suppress(TypeError, ValueError):  # of a function in C nothing is known
        names = inspect.signature(forward).parameters
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        for path, x in tree_leaves_with_path(given):
            if isinstance(path[-1], MappingKey) and str(path[-1].key).isidentifier():
                yield path[-1].key, x


def buffers_back(calls):
    """The buffers of the modules that were called, as they were before."""
    for call in calls:
        if call.buffers:
            put_back(call.function, call.buffers)


def call_numbers(refs):
    """Of the calls that made these, and of the memory that they are in."""
    return {number for made in refs for number in (made.number, made.memory)}


def leading_to(calls, targets, since=0):
    """Those that lead to losses (of calls after number `since`) and to these."""
    found, needed = [], set(targets)
    for call in reversed(calls):
        if (call.grad and call.number > since) or call.leads_to(needed):
            found.append(call)
            needed |= call_numbers(call.uses())
    return found[::-1]


# What a repetition calls in the place of a function of the script's


def add_hook(t, hook):
    return t.register_hook(hook)  # by its name: a repetition may put something in its place


def part_of(t, dtype, shape, stride, offset):
    """What shares its memory, without a graph."""
    return t.detach().view(dtype).as_strided(shape, stride, offset)


def as_it_is_now(memory):
    """Memory of torch.empty again, with what a kernel that torch does not see has written to it."""
    copy = torch.empty(0, dtype=memory.dtype, device=memory.device)  # it holds nothing by chance
    with _disable_current_modes():  # torch wrote nothing here
        copy.resize_(memory.shape).copy_(memory)
    return copy
