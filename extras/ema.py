# SPDX-License-Identifier: MIT (finite 4.0.0, 2026-11-28)
"""
EMA: averaged weights, in fp32, that a rejected step cannot touch.

One NaN destroys an average for the rest of the run: average * 0.999 + NaN * 0.001 is NaN, and a
factor of 0 does not help, because 0 * NaN = NaN. A bf16 average stands still: 0.001 of a difference
is rounded away. So the average is fp32, of the fp32 masters where the weights are half, and a
rejected step leaves every bit as it was: the average is one fused SGD step on (average - weight),
which writes nothing where found_inf is 1. No host sync. Copy this file alone: it needs torch.

Paste::

    import torch
    from ema import EMA

    net = torch.nn.BatchNorm1d(8)  # its running statistics are buffers: they stay the live ones
    ema = EMA(net.parameters(), decay=0.99)
    ema.update(net.parameters(), found_inf=torch.zeros(()))  # after each step; 1.0 = rejected
    with ema.swap(net.parameters()):
        print(net.weight)  # averaged
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm


def numbers(t: Tensor) -> Tensor:
    """A view: this rank's part of a sharded tensor (DTensor); a complex one as (..., 2) real."""
    t = t.to_local() if hasattr(t, "to_local") else t
    return torch.view_as_real(t) if t.is_complex() else t


class EMA:
    """Exponential moving average; decay (0 to 1) rises as (1 + n) / (10 + n), n = accepted updates,
    so that the start fades. params, here and below: the same number, in the same order; of shards
    (DTensor, as FSDP2 makes them) each rank averages its own. Raises ValueError otherwise."""

    def __init__(self, params: Iterable[Tensor], decay: float = 0.999):
        if not 0 <= decay <= 1:
            raise ValueError(f"decay must be in 0 .. 1, not {decay}")
        self.decay = decay
        self.average = [
            p.detach().to(torch.complex64 if p.is_complex() else torch.float32, copy=True)
            for p in params
        ]
        if not self.average:
            raise ValueError("no parameters: a generator is used up after one pass")
        self.updates = torch.zeros((), device=self.average[0].device)

    def _both(self, params: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The numbers of the average and of params, which share memory with both."""
        live = [numbers(p.detach()) for p in params]
        if len(live) != len(self.average):
            raise ValueError(
                f"{len(live)} parameters for an average of {len(self.average)}: "
                "a generator is used up after one pass"
            )
        return [numbers(a) for a in self.average], live

    @torch.no_grad()
    def update(self, params: Iterable[Tensor], found_inf: Tensor | float) -> None:
        """Move towards params, unless found_inf (0-dim fp32, or a number; 0. or 1.) is 1."""
        average, live = self._both(params)
        found_inf = torch.as_tensor(found_inf, dtype=torch.float32, device=self.updates.device)
        on_device = found_inf.is_cuda or found_inf.is_cpu
        if not on_device and found_inf:  # MPS's kernel ignored it (pytorch #186360)
            return
        differences = torch._foreach_sub(average, [p.float() for p in live])
        torch._fused_sgd_(
            average,
            differences,
            [],
            lr=(9 / (self.updates + 10)).clamp(min=1 - self.decay),  # 1 - decay of now
            weight_decay=0.0,
            momentum=0.0,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
            found_inf=found_inf,
        )
        self.updates += 1 - found_inf

    @contextmanager
    def swap(self, params: Iterable[Tensor]) -> Iterator[None]:
        """Inside, params hold the average in their own dtype; afterwards the bits of before."""
        average, live = self._both(params)
        backup = [p.clone() for p in live]
        try:
            torch._foreach_copy_(live, average)
            yield
        finally:
            torch._foreach_copy_(live, backup)

    @torch.no_grad()
    def distance(self, params: Iterable[Tensor]) -> Tensor:
        """|average - params| / |params| (0-dim, on the device; of a shard, its own): above 1 the
        average has lost its weights, and 0 after an update says that nothing moves."""
        average, live = self._both(params)
        live = [p.float() for p in live]
        apart = get_total_norm(torch._foreach_sub(average, live))
        return apart / get_total_norm(live).clamp(min=1e-30)

    def state_dict(self) -> dict[str, Any]:
        """The average and its count: live tensors."""
        return {"average": self.average, "updates": self.updates}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """In place. Raises ValueError if it belongs to other parameters."""
        if [a.shape for a in state["average"]] != [a.shape for a in self.average]:
            raise ValueError("the checkpoint's average belongs to other parameters")
        saved = [*state["average"], state["updates"]]
        for mine, other in zip([*self.average, self.updates], saved, strict=True):
            mine.copy_(other)
