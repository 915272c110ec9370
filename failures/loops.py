"""
What the cases of the gallery share: two training loops and one table.

`bare` is the usual loop: autocast, a GradScaler for fp16, no checks. `guarded` takes the same step
with a Guard and ClippedAdamW, and reads the verdict at once. At the first bad step that is more
than calibration of the loss scale, `guarded` stops and examines the step. Both loops train a copy
of a model with AdamW without weight decay, from the same random state. Both call the model as
train.py does: `net(images, labels)` returns `(loss, metrics)`. A model that needs more inputs finds
them in these two tensors. Both return an Outcome.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import autopsy
from amp_policy import LossScaler
from data import synthetic
from fp32 import fp32_eval
from guards import Guard
from optim import ClippedAdamW

F32 = torch.float32
BF16 = torch.bfloat16
F16 = torch.float16
NAMES = {F32: "fp32", BF16: "bf16", F16: "fp16"}


@dataclass
class Outcome:
    """What one loop did.

    `first` and `what`: step and name of the first bad number; 0 and "" if there was none.
    """

    net: nn.Module
    losses: list[float] = field(default_factory=list)
    # of the unscaled gradient; `bare` measures it when it clips
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)  # the loss scale after each step
    skipped: list[int] = field(default_factory=list)  # steps
    first: int = 0
    what: str = ""
    report: autopsy.Report | None = None

    @property
    def sick(self) -> list[str]:
        """Parameters and buffers that hold a non-finite number at the end."""
        return non_finite(self.net)

    @property
    def trains(self) -> bool:
        """No bad number, and the mean loss of the last quarter is below that of the first."""
        quarter = max(1, len(self.losses) // 4)
        healthy = not self.first and not self.sick
        return healthy and sum(self.losses[-quarter:]) < sum(self.losses[:quarter])

    def blames(self, verdict: str, op: str, module: str) -> bool:
        """Did the autopsy return this verdict, this operation (part of its name), this module?"""
        r = self.report
        return r is not None and r.verdict == verdict and op in r.op and r.module == module

    def __str__(self) -> str:
        if self.report:
            place = where(self.report) if self.report.op else self.what
            return f"{self.report.verdict} @ {self.first}: {place}"
        if self.first:
            return f"{self.what} @ {self.first}"
        return f"finite, loss {self.losses[0]:.3g} -> {self.losses[-1]:.3g}"


@dataclass
class Case:
    """One table.

    Its rows: dtype or variant, bare, guarded, cured; the reported row comes first. Then its claims.
    """

    name: str
    rows: list[tuple[str, Any, Any, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    claims: list[tuple[str, bool]] = field(default_factory=list)

    def row(self, name: str, published: Any, watched: Any, cured: Any) -> None:
        """Add a row of Outcomes or sentences.

        For Outcomes it adds the claims that every case must show.
        """
        self.rows.append((name, published, watched, cured))
        if isinstance(watched, Outcome):
            self.claim(f"{name}: guarded, the weights stay finite", not watched.sick)
        if isinstance(cured, Outcome):
            self.claim(f"{name}: cured, it trains", cured.trains)

    def claim(self, sentence: str, holds: bool) -> None:
        self.claims.append((sentence, bool(holds)))

    @property
    def holds(self) -> bool:
        return bool(self.claims) and all(holds for _, holds in self.claims)

    def __str__(self) -> str:
        table = [
            (self.name, "bare", "guarded", "cured"),
            *(tuple(map(str, row)) for row in self.rows),
        ]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
            for row in table
        ]
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(
            lines + [f"  [{'ok' if ok else 'FAILED'}] {sentence}" for sentence, ok in self.claims]
        )


def show(*cases: Case) -> int:
    """Print; the exit status is 0 if every claim holds."""
    print("\n\n".join(map(str, cases)))
    return int(not all(case.holds for case in cases))


def where(report: autopsy.Report) -> str:
    return f"{report.op.removesuffix('.default')} in {report.module or 'the model itself'}"


def images(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """`count` synthetic images, fp32 (count, 3, 32, 32) in -1..1, and their labels 0..9."""
    pixels, labels = synthetic.draw(0, count, seed)
    return pixels.float() / 127.5 - 1, labels


def around(batches: list[tuple], steps: int) -> list[tuple]:
    """The same few batches again and again: within twenty steps a loss falls only on images seen
    before.
    """
    return [batches[i % len(batches)] for i in range(steps)]


def autocast(dtype: torch.dtype) -> torch.autocast:
    return torch.autocast("cpu", dtype, enabled=dtype is not F32)


def non_finite(net: nn.Module) -> list[str]:
    return [
        n
        for n, t in (*net.named_parameters(), *net.named_buffers())
        if not bool(t.isfinite().all())
    ]


def refusal(net: nn.Module, **options: Any) -> str:
    """The sentence with which ClippedAdamW refuses these weights; "" if it accepts them."""
    try:
        ClippedAdamW(net.parameters(), **options)
    except ValueError as sentence:
        return str(sentence)
    return ""


def bare(
    net: nn.Module,
    batches: list[tuple],
    dtype: torch.dtype,
    lr: float,
    *,
    clip: float | None = None,
    growth_interval: int = 2000,
    **options: Any,
) -> Outcome:
    """The loop as published: it goes on after the first bad step.

    `options` are those of torch's AdamW.
    """
    torch.manual_seed(1)
    outcome = Outcome(copy.deepcopy(net))
    optimizer = torch.optim.AdamW(outcome.net.parameters(), lr, weight_decay=0.0, **options)
    scaler = torch.amp.GradScaler("cpu", growth_interval=growth_interval, enabled=dtype is F16)
    for step, batch in enumerate(batches, 1):
        with autocast(dtype):
            loss, _ = outcome.net(*batch)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            outcome.norms.append(nn.utils.clip_grad_norm_(outcome.net.parameters(), clip).item())
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        outcome.losses.append(loss.item())
        outcome.scales.append(scaler.get_scale())
        if outcome.scales[-1] < before:
            outcome.skipped.append(step)
        if not outcome.first:
            outcome.what = "" if math.isfinite(outcome.losses[-1]) else f"loss {outcome.losses[-1]}"
            outcome.what = outcome.what or next((f"non-finite {n}" for n in outcome.sick), "")
            outcome.first = step if outcome.what else 0
    return outcome


def rerun(net: nn.Module, dtype: torch.dtype) -> Callable:
    """For autopsy.examine: forward and backward of one micro-batch, under autocast or in fp32."""

    def run_step(batch: tuple, fp32: bool):
        with fp32_eval(net) if fp32 else nullcontext():
            with nullcontext() if fp32 else autocast(dtype):
                loss, _ = net(*batch)
            loss.backward()  # outside of autocast, which would cast an island's gradients to half
            return loss, {name: p.grad for name, p in net.named_parameters()}

    return run_step


def guarded(
    net: nn.Module,
    batches: list[tuple],
    dtype: torch.dtype,
    lr: float,
    *,
    clip: float | None = None,
    stop: bool = True,
    **options: Any,
) -> Outcome:
    """The guarded step. It stops at the first bad step that has a cause, with the autopsy's report.

    With `stop=False` bad steps are only skipped. `options` are those of ClippedAdamW, which may
    raise ValueError.
    """
    torch.manual_seed(1)
    net = copy.deepcopy(net)
    outcome = Outcome(net)
    guard = Guard(net, lag=False)
    scaler = LossScaler("cpu", enabled=dtype is F16)
    optimizer = ClippedAdamW(net.parameters(), lr, weight_decay=0.0, clip=None, **options)
    for step, (images, labels) in enumerate(batches, 1):
        record = autopsy.StepRecord(step, net)
        record.keep(images, labels)
        scale = scaler.get_scale()
        guard.open(step)
        safe_labels = guard.see_batch(images, labels)
        with autocast(dtype):
            loss, _ = net(images, safe_labels)
        guard.see_loss(loss)
        scaler.scale(loss).backward()
        found_inf = guard.step(optimizer, scaler, clip=clip)
        scaler.update(found_inf=found_inf)
        optimizer.zero_grad()
        verdict = guard.verdict()
        outcome.losses.append(verdict.stats["loss"])
        outcome.scales.append(scaler.get_scale())
        if verdict.accepted:
            continue
        outcome.skipped.append(step)
        if not stop:
            continue
        report = autopsy.examine(
            rerun(net, dtype),
            record,
            net,
            state=optimizer.state_dict(),
            precision=NAMES[dtype],
            scale=scale,
        )
        if report.verdict != "calibration":  # that is finite at loss scale 1
            outcome.first = step
            outcome.what = " and ".join(verdict.reasons)
            outcome.report = report
            break
    return outcome
