"""
Inject: plant a fault, because a guard that was never seen to bark is no guard.

    injector = Injector(net, parse_inject("nan:act:groups.1@step=20..22"))    before torch.compile: it hooks modules
    injector.begin(step)                                                     arms what is due in this step

Every door by which a bad number enters a step has a call: input, label, loss, params, optstate, scale and buffers; a
module's output and a parameter's gradient have hooks. A hook replaces one element by a select on a flag that lives on
the device, so nothing waits, nothing is compiled anew, and a step that is run again meets the same fault.

Copy this file alone: it needs torch and nothing else. `python inject.py` shows one NaN on its way through a network.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

KINDS = ("nan", "inf", "big")
PLACES = ("input", "label", "act", "loss", "grad", "param", "buffer", "optstate", "scale")


class Fault(NamedTuple):
    """One fault to plant in steps first..last, on one rank or (None) on all."""

    kind: str
    where: str
    name: str | None
    first: int
    last: int
    rank: int | None = None


def parse_inject(spec: str) -> tuple[Fault, ...]:
    """`KIND:WHERE[:NAME]@step=N[..M][,rank=R]`, joined by ';' if several. ValueError, one sentence, for all else."""
    faults = []
    for part in filter(None, (p.strip() for p in (spec or "").split(";"))):
        m = re.fullmatch(r"(\w+):(\w+)(?::([^@]+))?@step=(\d+)(?:\.\.(\d+))?(?:,rank=(\d+))?", part)
        if not m:
            raise ValueError(f"--inject {part!r} does not read KIND:WHERE[:NAME]@step=N[..M][,rank=R], "
                             "e.g. nan:grad:head.weight@step=5,rank=1")
        kind, where, name, first, last, rank = m.groups()
        if kind not in KINDS or where not in PLACES:
            raise ValueError(f"--inject {part!r}: KIND is one of {', '.join(KINDS)}; WHERE one of {', '.join(PLACES)}")
        if int(last or first) < int(first):
            raise ValueError(f"--inject {part!r}: the last step comes before the first")
        faults.append(Fault(kind, where, name, int(first), int(last or first), None if rank is None else int(rank)))
    return tuple(faults)


def fault_value(kind: str, dtype: torch.dtype) -> float | int:
    """What is planted. An integer cannot be NaN or inf: it gets what a cast of one leaves behind. 6e4: fp16 holds it
    and no sum of two; 1e30: fp32 and bf16 hold it and not its square."""
    if dtype.is_floating_point:
        return {"nan": math.nan, "inf": math.inf, "big": 6e4 if dtype == torch.float16 else 1e30}[kind]
    if dtype in (torch.uint8, torch.bool):
        raise ValueError(f"--inject: {dtype} cannot hold {kind}; plant it after the conversion to float")
    info = torch.iinfo(dtype)
    return {"nan": info.min, "inf": info.max, "big": min(10**9, info.max)}[kind]


def pick(fault: Fault, names: Iterable[str]) -> str:
    """The first name that fits the fault's NAME (exact, then pattern); the first of all if it has none."""
    names = list(names)
    fits = names if fault.name is None else [n for n in names if n == fault.name] or fnmatch.filter(names, fault.name)
    if not fits:
        raise ValueError(f"--inject: no {fault.where} is named {fault.name}; there are: {', '.join(names) or 'none'}")
    return fits[0]


def spoil(t: Tensor, kind: str, gate: Tensor) -> Tensor:
    """`t` with its first element replaced where `gate` (0-dim bool) is set: no branch, no sync, no recompiling."""
    where = torch.zeros_like(t, dtype=torch.bool)
    where[(0,) * t.dim()] = gate
    return t.masked_fill(where, fault_value(kind, t.dtype))


class Injector:
    """Plants faults where the loop calls it; without faults every method is a pass-through.

    begin(step) first. input(x, micro), label(y, micro), loss(loss, micro) plant in micro-batch 0, sample 0, and return.
    params(), optstate(state), scale(tensor), or state(...) for all three, write in place, before the forward; buffers()
    after it. "act" (a module's output) and "grad" (a parameter's gradient, before DDP reduces it) are hooks.
    """

    def __init__(self, net: nn.Module, faults: Iterable[Fault] = (), rank: int = 0, scales: bool = True):
        if not scales and any(f.where == "scale" for f in faults):
            raise ValueError("--inject scale: this precision has no loss scale")
        self.net, self.step = net, -1
        self.faults = [f for f in faults if f.rank in (None, rank)]
        self._gates: list[tuple[Fault, Tensor]] = []
        modules = {n: m for n, m in net.named_modules() if n}
        leaves = {n: m for n, m in modules.items() if not any(m.children())}
        params = {n: p for n, p in net.named_parameters() if p.requires_grad}
        for f in self.faults:
            gate = torch.zeros((), dtype=torch.bool, device=next(net.parameters()).device)
            if f.where == "act":
                module = modules[pick(f, modules if f.name else leaves)]
                module.register_forward_hook(lambda m, args, out, f=f, gate=gate: _first(
                    out, lambda t: spoil(t, f.kind, gate)))
            elif f.where == "grad":
                params[pick(f, params)].register_hook(lambda g, f=f, gate=gate: spoil(g, f.kind, gate))
            self._gates.append((f, gate))

    def attach(self, model):
        self.micro = 0
        def hook(module, args, out):
            if not module.training:
                return out
            loss = self.loss(out[0], self.micro)
            if self.micro == 0:
                self.buffers()
            self.micro += 1
            return (loss, *out[1:])
        if self.faults:
            model.register_forward_hook(hook)

    def batch(self, x, y):
        return self.input(x), self.label(y)

    def begin(self, step: int, optimizer=None, scale=None) -> None:
        self.step, self.micro = step, 0
        if optimizer is not None:
            self.state(optimizer, scale)
        for f, gate in self._gates:
            gate.fill_(f.first <= step <= f.last)

    def _due(self, where: str) -> list[Fault]:
        return [f for f in self.faults if f.where == where and f.first <= self.step <= f.last]

    def _plant(self, where: str, tree: Any, micro: int) -> Any:
        for f in self._due(where) if micro == 0 else ():
            tree = _first(tree, lambda t, f=f: spoil(t, f.kind, torch.ones((), dtype=torch.bool, device=t.device)))
        return tree

    def input(self, x: Any, micro: int = 0) -> Any:
        return self._plant("input", x, micro)

    def label(self, y: Any, micro: int = 0) -> Any:
        return self._plant("label", y, micro)

    def loss(self, loss: Tensor, micro: int = 0) -> Tensor:
        for f in self._due("loss") if micro == 0 else ():
            loss = loss * fault_value(f.kind, loss.dtype)  # a product, so that the backward is hit as well
        return loss

    @torch.no_grad()
    def _write(self, where: str, named: Mapping[str, Tensor]) -> list[str]:
        hit = [(pick(f, named), f) for f in self._due(where)]
        for name, f in hit:
            named[name][(0,) * named[name].dim()] = fault_value(f.kind, named[name].dtype)
        return [name for name, _ in hit]

    def params(self) -> list[str]:
        return self._write("param", dict(self.net.named_parameters())) if self._due("param") else []

    def buffers(self) -> list[str]:
        if not self._due("buffer"):  # before anything is gathered: it is asked at every step
            return []
        return self._write("buffer", {n: b for n, b in self.net.named_buffers() if b.is_floating_point() and b.numel()})

    def optstate(self, state: Mapping[Any, Mapping[str, Any]]) -> list[str]:
        """`state`: a torch optimizer's, tensors and not copies. A name is a key of it, as exp_avg."""
        if not self._due("optstate"):
            return []
        moments = {n: t for of in state.values() for n, t in of.items() if isinstance(t, Tensor) and t.dim()}
        return self._write("optstate", moments)

    def scale(self, scale: Tensor) -> list[str]:
        return self._write("scale", {"scale": scale})

    def state(self, optimizer: Any, scale: Tensor) -> None:
        self.params()
        self.scale(scale)
        if self._due("optstate"):
            self.optstate(optimizer.state)


def _first(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    leaves, shape = tree_flatten(tree)
    i = next(i for i, t in enumerate(leaves) if isinstance(t, Tensor))
    return tree_unflatten([*leaves[:i], change(leaves[i]), *leaves[i + 1 :]], shape)


def demo() -> None:
    """A NaN in the output of the first layer, and whom it reaches."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    injector = Injector(net, parse_inject("nan:act:0@step=2"))
    for step in (1, 2, 3):
        injector.begin(step)
        net.zero_grad()
        logits = net(torch.randn(8, 3, 8, 8))
        logits.square().mean().backward()
        bad = [name for name, b in net.named_buffers() if not b.isfinite().all()]
        bad += [f"{name}.grad" for name, p in net.named_parameters() if not p.grad.isfinite().all()]
        print(f"step {step}: {8 - int(logits.isfinite().all(1).sum())} of 8 outputs are not finite, nor is any of: "
              f"{', '.join(bad) or 'none'}")
    print("Nothing was planted in step 3: BatchNorm's running statistics are still bad, and every evaluation will be.")


if __name__ == "__main__":
    demo()
