# SPDX-License-Identifier: MIT (finite 4.0.0, 2026-11-28)
"""
Probes: warn of what will go wrong, before a number is non-finite.

guards.py sees a non-finite number when it is there. Three tools here see what comes before it:

    Probes              how near activations are to overflow (fp16 ends at 65504), and which
                        gradients underflow (fp16's smallest normal number is 6.1e-5)
    TensorFigures       of each parameter: gradient norm, weight norm, and how far one step moves it
    first_step_checks   after the first backward: a parameter without gradient, memory that nobody
                        initialised

None of them rejects a step or changes a number. Copy this file alone: it needs torch.
Paste::

    import torch
    from torch import nn
    from probes import Probes, first_step_checks
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    images, labels = 4e4 * torch.rand(4, 8), torch.tensor([0, 1, 1, 0])
    probes = Probes(net)
    with probes, torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(net(images).float(), labels)
        loss.backward()
    for line in probes.warnings() + first_step_checks(net):
        print(line)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def first_step_checks(net: nn.Module) -> list[str]:
    """Sentences about what will go wrong; [] = nothing. Call it after the first backward, before
    zero_grad. Syncs."""
    named = [(n, p) for n, p in net.named_parameters() if p.requires_grad and p.numel()]
    unused = [n for n, p in named if p.grad is None]
    learns = {n for n, p in named if p.grad is not None and p.grad.any()}
    wrong = []
    if unused:
        some = ", ".join(unused[:5])
        wrong.append(f"{len(unused)} parameter(s) got no gradient (unused, or detached): {some}")
    for n, p in named:
        top = float(p.detach().abs().max())
        # What memory held before: no initialiser gives such numbers.
        if not top <= 1e4 or 0 < top < 1e-30:
            wrong.append(f"{n} looks uninitialised: its largest magnitude is {top:.3g}")
        # More than half of the parameters learn, else this is adaLN-zero's start.
        dead = top == 0 and p.dim() > 1 and n not in learns
        if dead and len(learns) > len(named) / 2:
            wrong.append(f"{n} is all zero and its gradient is zero too: it will never learn")
    return wrong


class TensorFigures:
    """Of each parameter with a gradient: gradient norm, weight norm, and the step's relative size.

        figures = TensorFigures(dict(net.named_parameters()))   # after the last backward
        optimizer.step()                                        # or a skipped step
        for name, row in figures.read().items(): ...            # the one sync

    masters: the fp32 copy of a half parameter. scale: the loss scale that is in the gradients. It
    holds a copy of the weights until it goes.
    """

    @torch.no_grad()
    def __init__(
        self, named: Mapping[str, Tensor], masters: Mapping | None = None, scale: Any = 1.0
    ):
        self._rows = {}
        for name, p in named.items():
            if p.grad is not None:
                grad_norm = p.grad.float().norm() / scale
                weight = (masters or {}).get(p, p)
                self._rows[name] = grad_norm, weight, weight.clone()

    @torch.no_grad()
    def read(self) -> dict[str, dict[str, float]]:
        """{name: {"grad_norm": .., "weight_norm": .., "update_ratio": ..}}, {} without gradients.

        weight_norm: before the step. update_ratio = |update| / weight_norm.
        """
        table = []
        for grad_norm, weight, old in self._rows.values():
            size = old.float().norm()
            update = (weight - old).float().norm()
            ratio = torch.where(update == 0, update, update / size)  # a bias may be 0
            table.append(torch.stack([grad_norm, size, ratio]))
        rows = torch.stack(table).tolist() if table else []
        kinds = ("grad_norm", "weight_norm", "update_ratio")
        figures = [dict(zip(kinds, row, strict=True)) for row in rows]
        return dict(zip(self._rows, figures, strict=True))


class Reading(NamedTuple):
    """One module at a probed step."""

    name: str
    dtype: torch.dtype
    amax: float
    headroom: float  # largest activation / the dtype's maximum: overflow at 1.0; inf for NaN
    underflow: float  # share of the non-zero gradients at its output below the smallest normal


class Probes:
    """How near are activations to overflow, and gradients to underflow? On sampled steps.

        with probes: one forward and backward                   # attach, sample, detach
        for line in probes.warnings(loss_scale): print(line)    # the one sync

    The hooks only write to device memory. torch.compile ignores hooks that come after it: attach()
    before compiling (they then stay, 0 graph breaks, activations only), or sample under
    torch.compiler.set_stance("force_eager").
    """

    def __init__(self, net: nn.Module, device: torch.device | str = "cpu"):
        self.modules = {n: m for n, m in net.named_modules() if n and not any(m.children())}
        self._rows = torch.zeros(len(self.modules), 2, device=device)  # amax, underflow
        self._dtypes: dict[str, torch.dtype] = {}
        self._handles: list[Any] = []

    def attach(self) -> Probes:
        self._rows.zero_()
        self._handles = [
            module.register_forward_hook(self._hook(name, *row.unbind()))
            for (name, module), row in zip(self.modules.items(), self._rows, strict=True)
        ]
        return self

    def detach(self, *_: object) -> None:
        while self._handles:
            self._handles.pop().remove()

    __enter__, __exit__ = attach, detach

    def _hook(self, name: str, amax: Tensor, underflow: Tensor):
        def on_gradient(g: Tensor) -> None:
            size, tiny = g.abs(), torch.finfo(g.dtype).tiny
            some = size > 0
            share = (some & (size < tiny)).sum() / some.sum().clamp(min=1)
            underflow.copy_(torch.maximum(underflow, share))

        def on_output(module: nn.Module, args: Any, out: Any) -> None:
            for t in tree_leaves(out):
                if isinstance(t, Tensor) and t.is_floating_point() and t.numel():
                    low, high = torch.aminmax(t.detach())
                    largest = torch.maximum(-low, high)  # maximum propagates NaN
                    amax.copy_(torch.maximum(amax, largest))
                    self._dtypes[name] = t.dtype
                    if t.requires_grad and not torch.compiler.is_compiling():
                        t.register_hook(on_gradient)

        return on_output

    def read(self) -> list[Reading]:
        """Readings of the last sampled step, the least headroom left first. One sync."""
        table = self._rows.nan_to_num(nan=math.inf, posinf=math.inf).tolist()
        rows = dict(zip(self.modules, table, strict=True))
        readings = []
        for name, dtype in self._dtypes.items():
            amax, underflow = rows[name]
            headroom = amax / torch.finfo(dtype).max
            readings.append(Reading(name, dtype, amax, headroom, underflow))
        return sorted(readings, key=lambda reading: -reading.headroom)

    def warnings(self, loss_scale: float = 1.0) -> list[str]:
        """Sentences for modules over half of the maximum, or whose gradients are mostly tiny."""
        lines = []
        for r in self.read():
            half = str(r.dtype).removeprefix("torch.")
            if not r.headroom <= 0.5:
                lines.append(
                    f"{r.name}: activations reach {r.amax:.4g}, {r.headroom:.0%} of {half}'s "
                    f"maximum; try --keep-fp32 '{r.name}' before it overflows"
                )
            if not r.underflow <= 0.5:
                lines.append(
                    f"{r.name}: {r.underflow:.0%} of its gradients are below {half}'s smallest "
                    f"normal at loss scale {loss_scale:g}; more scale, or fp32 there"
                )
        return lines
