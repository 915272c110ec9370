"""
Experiment: what does a module return when one recorded call of it is made again with other inputs?

What made its inputs is made once more, and then the call alone, as often as asked. Each time begins
with the same random numbers, buffers and attributes; afterwards all is as it was. What the module
prints meanwhile is lost.
"""

import inspect
import io
import random
import re
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from math import inf

import torch
from torch.overrides import TorchFunctionMode

from ..frames import is_own
from ..modes import is_compiled
from ..step import attributes_of, carried_by, copied_buffers, put_back, unchanged
from ..tensors import leaves, mapped
from .calls import ResultRef, is_packed, leading_to
from .replay import net_of

# What a module may do that cannot be put back
OUTWARD = re.compile(
    r"\b(global|nonlocal) |\bopen\(|\.(write|put|send|add_scalar|dump|savez?|tofile)\("
    r"|\b(wandb|logg\w*|writer|envs?|time|socket|requests|queue|subprocess)\.\w+\("
)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Experiment:
    """Makes one recorded call of a module again. Use it inside of `with`. `evaluates`: in eval
    mode."""

    def __init__(self, recorder, call, evaluates=False):
        self.call, self.net, self.evaluates = call, call.function, evaluates
        self.before = leading_to(recorder.calls, {call.number}, inf)[:-1]
        nets = net_of([*self.before, call])
        self.unchanged = unchanged(nets, [*nets.parameters()])

    def __enter__(self):
        self.unchanged.__enter__()
        made = {}
        with Generators():
            for call in self.before:
                call.repeat(made)

        def as_made(x):
            return made[x] if isinstance(x, ResultRef) else x

        call = self.call
        args, kwargs = mapped(as_made, (call.args, call.kwargs), is_leaf=is_packed)
        self.given = inspect.signature(self.net.forward).bind(*args, **kwargs)
        for part in self.net.modules():
            part.training &= not self.evaluates
        self.carried = carried_by(self.net)
        self.buffers = copied_buffers(self.net)
        return self

    def __exit__(self, *error):
        self.unchanged.__exit__(*error)

    def __call__(self, **inputs):
        """Returns all that the module returns, and all that it holds afterwards, in a list.
        `inputs`: those that take the place of what was given."""
        given = inspect.BoundArguments(self.given.signature, self.given.arguments | inputs)
        results = []

        def run(*args, **kwargs):
            results.extend(leaves(self.net(*args, **kwargs)))
            self.results = len(results)
            results.extend(leaves([attributes_of(part) for part in self.net.modules()]))
            results.extend(self.net.buffers())

        put_back(self.net, self.buffers)
        call = replace(self.call, function=run, args=given.args, kwargs=given.kwargs, left=())
        unseen = io.StringIO()
        with redirect_stdout(unseen), redirect_stderr(unseen), Generators():
            replace(call, carried=self.carried).repeat({})
        return [x.detach().clone() if torch.is_tensor(x) else x for x in results]

    def returned(self, before, after):
        """Pairs of the tensors of real numbers that the module has returned twice."""
        pairs = [*zip(before, after, strict=True)][: self.results]
        return [(a, b) for a, b in pairs if torch.is_tensor(a) and a.is_floating_point()]


class Generators(TorchFunctionMode):
    """At the end the script's own generators of random numbers are as they were."""

    def __init__(self):
        super().__init__()
        self.states = {}  # generator: its state before it was used

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        if generator is not None and generator not in self.states:
            self.states[generator] = generator.get_state()
        return func(*args, **kwargs)

    def __exit__(self, *error):
        super().__exit__(*error)
        for generator, state in self.states.items():
            generator.set_state(state)


def inputs_of(call):
    """{name: tensor, or what an earlier call made} of what a module was given directly."""
    given = inspect.signature(call.function.forward).bind(*call.args, **call.kwargs).arguments
    return {name: x for name, x in given.items() if isinstance(x, ResultRef | torch.Tensor)}


def can_be_made_again(module):
    """Whether no code of the script hears of it beside the module, and torch sees all of it."""
    parts = [*module.modules()]
    held = leaves([attributes_of(part) for part in parts])
    if any(OUTWARD.search(inspect.getsource(kind)) for kind in own_kinds(module)):
        return False
    draws = any(isinstance(x, random.Random) or _is_of_numpy(x) for x in held)
    hooked = any(vars(part).get(name) for part in parts for name in HOOKS)
    return not (draws or hooked or is_compiled(parts))


def own_kinds(module):
    """The classes in it whose forward is code of the script."""
    kinds = {type(part) for part in module.modules()}
    codes = {kind: getattr(inspect.unwrap(kind.forward), "__code__", None) for kind in kinds}
    return [kind for kind, code in codes.items() if code and is_own(code.co_filename)]


def _is_of_numpy(x):
    """Whether it is a generator of NumPy's."""
    return type(x).__module__.startswith("numpy.random")


def same(before, after):
    """Whether two lists of results are the same, bit by bit."""
    return len(before) == len(after) and all(map(_same, before, after))


def _same(a, b):
    if torch.is_tensor(a) and torch.is_tensor(b):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    return a is b or (type(a) is type(b) and type(a) in (int, float, str, bool) and a == b)
