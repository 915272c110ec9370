# SPDX-License-Identifier: MIT (finite 2.2.0, 2026-11-22)
"""
EMA: averaged weights, in fp32, that a rejected step cannot touch.

One NaN destroys an average for the rest of the run: average * 0.999 + NaN * 0.001 is NaN, and a factor of 0 does not
help, because 0 * NaN = NaN. A bf16 average stands still: 0.001 of a difference is rounded away. So the average is fp32,
of the fp32 masters where the weights are half, and a rejected step leaves every bit as it was. On CUDA the average is
one fused SGD step on (average - weight), which writes nothing where found_inf is 1. Elsewhere the verdict is read on
the host. Sharded weights are refused. Copy this file alone: it needs torch.

    ema = EMA(optimizer.params)  # of optim.py's ClippedAdamW: the masters where the parameters are half
    ema.update(optimizer.params, result.found_inf)
    with ema.swap(optimizer.model_params): evaluate(net)  # BatchNorm's running statistics stay the live ones
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class EMA:
    """Exponential moving average; decay rises as (1 + n) / (10 + n), n = accepted updates, so that the start fades."""

    def __init__(self, params: Sequence[Tensor], decay: float = 0.999):
        if any(hasattr(p, "device_mesh") for p in params):
            raise ValueError("sharded weights (DTensor) are not supported: average p.full_tensor()")
        self.decay = decay
        self.average = [p.detach().float().clone() for p in params]
        self.updates = torch.zeros((), device=self.average[0].device)
        self.fused = self.average[0].is_cuda
        self._sgd = torch.optim.SGD(self.average, lr=1.0, fused=True) if self.fused else None

    @torch.no_grad()
    def update(self, params: Sequence[Tensor], found_inf: Tensor) -> None:
        """Move towards params, in the order of construction, unless found_inf (0-dim fp32, 0. or 1.) is 1."""
        weight = (9 / (self.updates + 10)).clamp(min=1 - self.decay)  # 1 - decay
        params = [p.float() for p in params]
        if self.fused:
            for a, difference in zip(self.average, torch._foreach_sub(self.average, params), strict=True):
                a.grad = difference
            self._sgd.found_inf, self._sgd.param_groups[0]["lr"] = found_inf, weight
            self._sgd.step()
            self._sgd.zero_grad()
        elif not found_inf.item():
            torch._foreach_lerp_(self.average, params, weight.item())
        self.updates += 1 - found_inf

    @contextmanager
    def swap(self, params: Sequence[Tensor]) -> Iterator[None]:
        """Inside, params hold the average in their own dtype; afterwards what they held before, bit for bit."""
        backup = [p.detach().clone() for p in params]
        try:
            torch._foreach_copy_([p.detach() for p in params], self.average)
            yield
        finally:
            torch._foreach_copy_([p.detach() for p in params], backup)

    def state_dict(self) -> dict[str, Any]:
        """The average (live tensors) and its count."""
        return {"average": self.average, "updates": self.updates.clone()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """In place. Raises ValueError if it belongs to other parameters."""
        if [a.shape for a in state["average"]] != [a.shape for a in self.average]:
            raise ValueError("the checkpoint's average belongs to other parameters")
        torch._foreach_copy_([*self.average, self.updates], [*state["average"], state["updates"]])


if __name__ == "__main__":
    moving = torch.zeros(1)
    ema = EMA([moving], decay=0.9)
    for n in (1.0, 2.0, 3.0, float("nan"), 4.0):
        ema.update([moving.fill_(n)], (~moving.isfinite().all()).float())
        print(f"weight {n}: average {ema.average[0].item():.3f}, updates {ema.updates.item():g}")
