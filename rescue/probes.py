# SPDX-License-Identifier: MIT (finite 2.2.0, 2026-11-22)
"""
Probes: what will go wrong, said before a number is non-finite.

guards.py sees a non-finite number when it is there. Three tools here look earlier. Probes tells how near activations
are to overflow (fp16 ends at 65504) and which gradients underflow (fp16's smallest normal is 6.1e-5).
first_step_checks finds, after the first backward, a parameter without gradient, memory that nobody initialised, a head
of the wrong size. SpikeDetector says when the loss or the gradient norm leaves its own past. None of them rejects a
step or changes a number. To copy this file: it needs torch, nothing else.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class SpikeDetector:
    """z-score of log(value) against a moving mean and variance. Non-finite values never enter these statistics.

    A spike enters the statistics cut down to the threshold, so a lasting new level is learnt in time.
    """

    def __init__(self, threshold: float = 6.0, warmup: int = 50, momentum: float = 0.02):
        self.threshold, self.warmup, self.momentum = threshold, warmup, momentum
        self.seen: dict[str, list[float]] = {}  # name: [count, mean, variance] of the log

    def see(self, name: str, value: float) -> float:
        """Standard deviations above the mean: inf for a non-finite value, 0.0 while warming up."""
        if not math.isfinite(value):
            return math.inf
        x = math.log(max(value, 1e-30))
        count, mean, variance = self.seen.get(name, [0, x, 0.0])
        std = max(math.sqrt(variance), 0.05)  # a loss that moves by less than 5 % has no spikes
        z = (x - mean) / std if count >= self.warmup else 0.0
        x = min(x, mean + self.threshold * std) if count >= self.warmup else x
        rate = max(self.momentum, 1.0 / (count + 1))
        variance = (1 - rate) * (variance + rate * (x - mean) ** 2)
        self.seen[name] = [count + 1, mean + rate * (x - mean), variance]
        return z

    def sentences(self, stats: Mapping[str, float]) -> list[str]:
        """Take in the loss and the gradient norm of an accepted step, and say which of them is a spike."""
        said = []
        for name in ("loss", "grad_norm"):
            if name in stats and not (z := self.see(name, stats[name])) <= self.threshold:
                said.append(f"{name} {stats[name]:.4g} is {z:.1f} standard deviations above its recent mean")
        return said


def first_step_checks(net: nn.Module, num_classes: int | None = None) -> list[str]:
    """Sentences about what will go wrong, after the first backward and before zero_grad. [] = nothing found. Syncs.

    `num_classes`: what the last Linear or Conv2d of `net` has to give; None for a net that does not classify.
    """
    named = [(n, p) for n, p in net.named_parameters() if p.requires_grad and p.numel()]
    unused = [n for n, p in named if p.grad is None]
    learns = {n for n, p in named if p.grad is not None and bool((p.grad != 0).any())}
    some = ", ".join(unused[:5]) + (" ..." if len(unused) > 5 else "")
    said = [f"{len(unused)} parameter(s) got no gradient (unused, or detached): {some}"] if unused else []
    for n, p in named:
        top = float(p.detach().abs().max())
        if not top <= 1e4 or 0 < top < 1e-30:  # what memory held before: no initialiser gives such numbers
            said.append(f"{n} looks uninitialised: its largest magnitude is {top:.3g}")
        elif top == 0 and p.dim() > 1 and n not in learns and len(learns) > len(named) / 2:  # not adaLN-zero's start
            said.append(f"{n} is all zero and its gradient is zero too: it will never learn")
    layers = [(n, len(m.weight)) for n, m in net.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    if num_classes is not None and layers and layers[-1][1] != num_classes:
        said.append("{} has {} outputs but the data has {} classes".format(*layers[-1], num_classes))
    return said


class Reading(NamedTuple):
    """One module at a probed step."""

    name: str
    dtype: torch.dtype
    amax: float
    headroom: float  # largest activation / the dtype's maximum: overflow at 1.0; NaN and inf stay
    underflow: float  # share of the non-zero gradients at its output that are below the dtype's smallest normal


class Probes:
    """How near are activations to overflow, and gradients to underflow? On sampled steps (`--probe-every`).

        with probes: one forward and backward                   # attach, sample, detach
        for line in probes.warnings(loss_scale): print(line)    # the one sync

    The hooks only write to device memory. torch.compile ignores hooks that come after it: attach() before compiling
    (they then stay, 0 graph breaks, activations only), or sample under torch.compiler.set_stance("force_eager").
    """

    def __init__(self, net: nn.Module, device: torch.device | str = "cpu"):
        self.modules = {n: m for n, m in net.named_modules() if n and not any(m.children())}
        self._rows = torch.zeros(len(self.modules), 2, device=device)  # (modules, amax and underflow)
        self._dtypes: dict[str, torch.dtype] = {}
        self._handles: list[Any] = []

    def attach(self) -> Probes:
        self._rows.zero_()
        self._handles = [m.register_forward_hook(self._hook(n, *row.unbind()))
                         for (n, m), row in zip(self.modules.items(), self._rows, strict=True)]
        return self

    def detach(self, *_: object) -> None:
        while self._handles:
            self._handles.pop().remove()

    __enter__, __exit__ = attach, detach

    def _hook(self, name: str, amax: Tensor, underflow: Tensor):
        def on_gradient(g: Tensor) -> None:
            size, tiny = g.abs(), torch.finfo(g.dtype).tiny
            some = size > 0
            underflow.copy_(torch.maximum(underflow, (some & (size < tiny)).sum() / some.sum().clamp(min=1)))

        def on_output(module: nn.Module, args: Any, out: Any) -> None:
            for t in (out,) if isinstance(out, Tensor) else tree_leaves(out):
                if isinstance(t, Tensor) and t.is_floating_point() and t.numel():
                    low, high = torch.aminmax(t.detach())
                    amax.copy_(torch.maximum(amax, torch.maximum(-low, high)))  # maximum propagates NaN
                    self._dtypes[name] = t.dtype
                    if t.requires_grad and not torch.compiler.is_compiling():
                        t.register_hook(on_gradient)
        return on_output

    def read(self) -> list[Reading]:
        """Readings of the last sampled step, the least headroom left first. One sync."""
        rows = dict(zip(self.modules, self._rows.tolist(), strict=True))
        readings = [Reading(name, dtype, rows[name][0], rows[name][0] / torch.finfo(dtype).max, rows[name][1])
                    for name, dtype in self._dtypes.items()]
        return sorted(readings, key=lambda r: math.inf if math.isnan(r.headroom) else r.headroom, reverse=True)

    def warnings(self, loss_scale: float = 1.0) -> list[str]:
        """Sentences for modules over half of the dtype's maximum, or with more than half of their gradients tiny."""
        said = []
        for r in self.read():
            half = str(r.dtype).removeprefix("torch.")
            if not r.headroom <= 0.5:
                said.append(f"{r.name}: activations reach {r.amax:.4g}, {r.headroom:.0%} of {half}'s maximum; "
                            f"try --keep-fp32 '{r.name}' before it overflows")
            if not r.underflow <= 0.5:
                said.append(f"{r.name}: {r.underflow:.0%} of its gradients are below {half}'s smallest normal at loss "
                            f"scale {loss_scale:g}; more scale, or fp32 there")
        return said
