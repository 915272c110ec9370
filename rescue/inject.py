# SPDX-License-Identifier: MIT (finite 4.0.0, 2026-11-28)
"""
Inject: plant a fault, because a guard that was never seen to bark is no guard.

    injector = Injector(net, "nan:act:groups.1@step=20..22", model)
                    once; model(images, labels), needed for loss and buffer, returns (loss, metrics)
    injector.begin(step, optimizers, scale)   at the beginning of each step
    images, labels = injector.batch(images, labels)   before the batch is cut into micro-batches

A bad number can enter a step at nine places: input, label, act (a module's output), loss, grad (a
parameter's gradient, before DDP reduces it), param, buffer, optstate, scale. A fault strikes one
element, in sample 0 of micro-batch 0. A step that is run again meets the same fault. Hooks plant
it, so train.py neither compiles nor records a model with a fault.

Two kinds are not bad numbers. "flip" imitates faulty hardware: one bit of the largest number
changes, and the number stays finite. At act and grad a flip strikes one pass only: a repeated step
does not meet it. "oom" imitates a full memory: the forward of a module (act) or the backward at a
parameter (grad) raises torch.OutOfMemoryError for every micro-batch of more than half the images of
the first one. Copy this file alone: it needs torch.

Paste::

    import torch
    from inject import Injector

    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    injector = Injector(net, "nan:act:0@step=2")
    for step in (1, 2, 3):
        injector.begin(step)
        net(torch.randn(8, 3))
        print(step, net[1].running_var.isfinite().all())  # from step 2 on it never recovers
"""

from __future__ import annotations

import fnmatch
import functools
import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

PLACES = ("input", "label", "act", "loss", "grad", "param", "buffer", "optstate", "scale")
KINDS = ("nan", "inf", "big")
ONLY = {"flip": ("act", "grad", "param", "optstate"), "oom": ("act", "grad")}  # of PLACES
PLACES_OF = dict.fromkeys(KINDS, PLACES) | ONLY
SPEC = r"(\w+):(\w+)(?::([^@]+))?@step=(\d+)(?:\.\.(\d+))?(?:,rank=(\d+))?"


class Fault(NamedTuple):
    """One fault to plant in these steps, on one rank or (None) on all."""

    kind: str
    where: str
    name: str  # a pattern
    steps: range
    rank: int | None


def parse_inject(spec: str) -> list[Fault]:
    """`KIND:WHERE[:NAME]@step=N[..M][,rank=R]`, joined by ';' if several. ValueError, one sentence,
    for all else."""
    faults = []
    for part in filter(None, (part.strip() for part in spec.split(";"))):
        match = re.fullmatch(SPEC, part)
        if not match or match[2] not in PLACES_OF.get(match[1], ()):
            known = "; ".join(f"{kind} at {', '.join(PLACES_OF[kind])}" for kind in PLACES_OF)
            raise ValueError(
                f"--inject {part!r} does not read KIND:WHERE[:NAME]@step=N[..M][,rank=R]. There "
                f"are: {known}"
            )
        kind, where, name, first, last, rank = match.groups()
        steps = range(int(first), int(last or first) + 1)
        if not steps:
            raise ValueError(f"--inject {part!r}: the last step comes before the first")
        faults.append(Fault(kind, where, name or "*", steps, rank and int(rank)))
    return faults


def fault_value(kind: str, dtype: torch.dtype) -> float | int:
    """The number to plant. An integer cannot be NaN or inf: it gets its smallest or largest number,
    as the cast of a NaN or inf does. "big": fp16 holds 6e4 but not 6e4 + 6e4; fp32 and bf16 hold
    1e30 but not its square."""
    if dtype.is_floating_point:
        big = 6e4 if dtype == torch.float16 else 1e30
        return {"nan": math.nan, "inf": math.inf, "big": big}[kind]
    if dtype in (torch.uint8, torch.bool):
        raise ValueError(f"--inject: {dtype} cannot hold {kind}; plant it after the conversion")
    info = torch.iinfo(dtype)
    return info.min if kind == "nan" else info.max


def flipped(x: Tensor) -> Tensor:
    """x with the highest bit of the fraction of its largest number flipped: up to a half off, and
    finite. (A flip at 0 would do no harm.)"""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize]
    other = (x.detach().view(bits) ^ int(0.5 / torch.finfo(x.dtype).eps)).view(x.dtype)
    largest = torch.arange(x.numel(), device=x.device).view(x.shape) == x.abs().argmax()
    return torch.where(largest, other, x)


def pick(fault: Fault, named: dict[str, Any]) -> Any:
    """The first of these whose name fits the fault's NAME, a pattern."""
    fits = fnmatch.filter(named, fault.name)
    if not fits:
        there = ", ".join(named) or "none"
        raise ValueError(f"--inject: no {fault.where} is named {fault.name}; there are: {there}")
    return named[fits[0]]


def spoil(tree: Any, kind: str) -> Any:
    """Replace the first element of the first tensor."""
    leaves, shape = tree_flatten(tree)
    i = next(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    x = leaves[i]
    first = torch.zeros_like(x, dtype=torch.bool)
    first[(0,) * x.dim()] = True
    one = first.to(x.dtype)
    if kind == "flip":
        leaves[i] = flipped(x)
    elif kind == "big" or not x.is_floating_point():
        leaves[i] = x.masked_fill(first, fault_value(kind, x.dtype))
    # By arithmetic, as in a model: a NaN that the script itself writes down would be bad data.
    elif kind == "nan":
        leaves[i] = x + (-one).sqrt()
    else:
        leaves[i] = x - (1 - one).log()
    return tree_unflatten(leaves, shape)


class Injector:
    """Plants faults from outside the step. Without faults every method returns its arguments."""

    def __init__(
        self,
        net: nn.Module,
        spec: str = "",
        model: nn.Module | None = None,
        rank: int = 0,
        scales: bool = True,
    ):
        """Raises ValueError for a spec that it cannot parse, or a name that `net` lacks. scales:
        whether there is a loss scale."""
        faults = parse_inject(spec)
        if not scales and any(f.where == "scale" for f in faults):
            raise ValueError("--inject scale: this precision has no loss scale")
        self.net = net
        self.step = -1
        self.micro = 0  # micro-batches of this step so far
        self.repeats = False
        self.faults = [f for f in faults if f.rank in (None, rank)]
        self._struck: set[Fault] = set()  # flips that have been
        self._size = 0  # "oom": images in this micro-batch
        self._room = 0  # and how many of them fit
        if any(f.kind == "oom" for f in self.faults):
            net.register_forward_pre_hook(self._measure)
        for f in self.faults:
            strike = functools.partial(self._strike, f)
            if f.where == "act":  # without a name: the first module that has no modules inside
                modules = {n: m for n, m in net.named_modules() if n}
                if f.name == "*":
                    modules = {n: m for n, m in modules.items() if not any(m.children())}
                pick(f, modules).register_forward_hook(strike)
            elif f.where == "grad":
                params = {n: p for n, p in net.named_parameters() if p.requires_grad}
                pick(f, params).register_hook(strike)
        if self.faults and model is not None:
            model.register_forward_hook(self._strike_loss)

    def _measure(self, net: nn.Module, args: tuple) -> None:
        self._size = len(args[0])
        self._room = self._room or max(1, self._size // 2)

    def _strike(self, f: Fault, *args: Any) -> Any:
        """A hook. Its last argument is what a module returns, or a gradient."""
        if f not in self._due(f.where) or f in self._struck:
            return None
        if f.kind != "oom":
            if f.where == "act" and (self.micro or not self.net.training):
                return None
            if f.kind == "flip":
                self._struck.add(f)
            return spoil(args[-1], f.kind)
        if self._size > self._room:
            size = self._size
            self._size = 0  # once a pass
            raise torch.OutOfMemoryError(
                f"planted: no memory for {size} images at {f.where} {f.name}"
            )
        return None

    def _strike_loss(self, model: nn.Module, args: tuple, out: tuple) -> tuple | None:
        """In training, micro-batch 0 of a step writes the faults of buffers (they stay in later
        micro-batches) and multiplies the loss by its fault, so that the backward is struck too."""
        if not model.training:
            return None
        first = self.micro == 0
        loss, *metrics = out
        if not self.repeats:
            self.micro += 1
        if first and not self.repeats:
            named = self.net.named_buffers()
            floats = {n: b for n, b in named if b.is_floating_point() and b.numel()}
            self._write("buffer", floats)
        for f in self._due("loss") if first else ():
            loss = loss * fault_value(f.kind, loss.dtype)
        return loss, *metrics

    def begin(self, step: int, optimizers: Iterable[Any] = (), scale: Tensor | None = None) -> None:
        """Arm the faults due in `step`; plant those of param, optstate and scale at once. Without
        optimizers: a repeated step, whose weights stay as they are."""
        self.step = step
        self.micro = 0
        self.repeats = False
        self._struck.clear()
        if not self.faults:
            return
        if optimizers:
            self._write("param", dict(self.net.named_parameters()))
        moments = {  # a name is a key of the state, as exp_avg
            name: t
            for optimizer in optimizers
            for state in optimizer.state.values()
            for name, t in state.items()
            if isinstance(t, Tensor) and t.dim()
        }
        if moments:
            self._write("optstate", moments)
        if scale is not None:
            self._write("scale", {"scale": scale})

    def repeat(self, micro: int) -> None:
        """Until the next begin() every forward repeats this micro-batch: the loss is struck again,
        no buffer is."""
        self.micro = micro
        self.repeats = True

    def batch(self, images: Any, labels: Any) -> tuple[Any, Any]:
        """The whole batch, with the faults of input and label in sample 0."""
        for f in self._due("input"):
            images = spoil(images, f.kind)
        for f in self._due("label"):
            labels = spoil(labels, f.kind)
        return images, labels

    def _due(self, where: str) -> list[Fault]:
        return [f for f in self.faults if f.where == where and self.step in f.steps]

    def _write(self, where: str, tensors: dict[str, Tensor]) -> None:
        for f in self._due(where):
            t = pick(f, tensors).data  # a buffer may be saved for a backward to come
            t.copy_(spoil(t, f.kind))
