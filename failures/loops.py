"""
What the cases of the gallery share: two training loops and one table.

`bare` is everybody's loop: autocast, GradScaler where it is fp16, no questions asked. `guarded` is train.py's step with
the verdict read at once; at the first bad step that is no mere calibration of the loss scale it stops and examines.
Both take the same model (`net(*batch)` returns `(loss, metrics)`), the same batches and a dtype, and return a Run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import amp_policy
import autopsy
import guards
from data import synthetic
from optim import ClippedAdamW

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
NAMES = {F32: "fp32", BF16: "bf16", F16: "fp16"}


@dataclass
class Run:
    """What one loop did. `first` and `what`: step and name of the first bad thing, 0 and "" if there was none."""

    losses: list[float] = field(default_factory=list)
    first: int = 0
    what: str = ""
    scale: float = 1.0
    skipped: int = 0
    report: autopsy.Report | None = None
    sick: list[str] = field(default_factory=list)  # non-finite parameters and buffers at the end
    spikes: list[str] = field(default_factory=list)

    @property
    def trains(self) -> bool:
        """Nothing bad, and the loss fell: the mean of the last quarter is below that of the first."""
        quarter = max(1, len(self.losses) // 4)
        return not self.first and not self.sick and sum(self.losses[-quarter:]) < sum(self.losses[:quarter])

    def blames(self, verdict: str, op: str, module: str) -> bool:
        """Did the autopsy return this verdict, this operation (a part of its name) and this module?"""
        r = self.report
        return r is not None and r.verdict == verdict and op in r.op and r.module == module

    def __str__(self) -> str:
        if self.report:
            where = f"{self.report.op.removesuffix('.default')} in {self.report.module or 'the model itself'}"
            return f"{self.report.verdict} @ {self.first}: {where if self.report.op else self.what}"
        if self.first:
            return f"{self.what} @ {self.first}"
        return f"finite, loss {self.losses[0]:.3g} -> {self.losses[-1]:.3g}"


@dataclass
class Case:
    """One table: rows (dtype or variant, bare, guarded, cured), the reported one first; then the claims, checked."""

    name: str
    rows: list[tuple[str, Any, Any, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    claims: list[tuple[str, bool]] = field(default_factory=list)

    def claim(self, sentence: str, holds: bool) -> None:
        self.claims.append((sentence, bool(holds)))

    @property
    def holds(self) -> bool:
        return bool(self.claims) and all(holds for _, holds in self.claims)

    def __str__(self) -> str:
        table = [(self.name, "bare", "guarded", "cured"), *(tuple(map(str, row)) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in table]
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines + [f"  [{'ok' if ok else 'FAILED'}] {sentence}" for sentence, ok in self.claims])


def show(*cases: Case) -> int:
    """Print; the exit status is 0 if every claim holds."""
    print("\n\n".join(map(str, cases)))
    return int(not all(case.holds for case in cases))


def images(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """`count` synthetic images, fp32 (count, 3, 32, 32) in -1..1, and their labels 0..9."""
    pixels, labels = synthetic.draw(0, count, seed)
    return pixels.float() / 127.5 - 1, labels


def around(batches: list[tuple], steps: int) -> list[tuple]:
    """The same few batches again and again: in twenty steps a loss can fall only on images that it has seen."""
    return [batches[i % len(batches)] for i in range(steps)]


def non_finite(net: nn.Module) -> list[str]:
    return [n for n, t in (*net.named_parameters(), *net.named_buffers()) if not bool(t.isfinite().all())]


def bare(net: nn.Module, batches: Iterable[tuple], dtype: torch.dtype, optimizer: torch.optim.Optimizer, *,
         scaled: bool = True, clip: float | None = None) -> Run:
    """The loop as published. It goes on after the first bad step, as those runs did."""
    run = Run()
    scaler = torch.amp.GradScaler("cpu", enabled=scaled and dtype is F16)
    for step, batch in enumerate(batches, 1):
        with torch.autocast("cpu", dtype, enabled=dtype is not F32):
            loss, _ = net(*batch)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        run.skipped += scaler.get_scale() < before
        optimizer.zero_grad()
        run.losses.append(loss.item())
        if not run.first:
            run.what = "" if math.isfinite(run.losses[-1]) else f"loss {run.losses[-1]}"
            run.what = run.what or next((f"non-finite {n}" for n in non_finite(net)), "")
            run.first = step if run.what else 0
    run.scale, run.sick = scaler.get_scale(), non_finite(net)
    return run


def rerun(net: nn.Module, policy: amp_policy.Policy) -> Callable:
    """For autopsy.examine: forward and backward of one micro-batch, in the policy's precision or in fp32."""

    def run_step(batch: tuple, fp32: bool):
        with amp_policy.fp32_eval(net) if fp32 else policy.autocast():
            loss, _ = net(*batch)
            loss.backward()
            return loss, {name: p.grad for name, p in net.named_parameters()}

    return run_step


def guarded(net: nn.Module, batches: Iterable[tuple], dtype: torch.dtype, optimizer: ClippedAdamW, *,
            scaled: bool = True, num_classes: int | None = None) -> Run:
    """train.py's step. It stops at the first bad step that has a cause, with the autopsy's report."""
    run = Run()
    policy = amp_policy.choose_policy(NAMES[dtype], amp_policy.capabilities("cpu"))
    scaler = amp_policy.LossScaler("cpu", enabled=scaled and policy.scales)
    guard = guards.Guard(net, num_classes=num_classes, lag=False)
    for step, batch in enumerate(batches, 1):
        record = autopsy.StepRecord(step, net)
        record.keep(*batch)
        guard.open(step)
        guard.see_batch(batch[0], batch[1:])
        with policy.autocast():
            loss, _ = net(*batch)
        guard.see_loss(loss)
        scaler.scale(loss).backward()
        result = optimizer.step(grad_scale=scaler.scale_tensor, skip=guard.decide())
        guard.close(result.found_inf, loss=loss, grad_norm=result.grad_norm)
        scale = float(scaler.scale_tensor)
        scaler.update(result.found_inf)
        optimizer.zero_grad()
        run.losses.append(loss.item())
        verdict = guard.verdict()
        run.spikes += [f"step {step}: {sentence}" for sentence in verdict.spikes]
        if verdict.accepted:
            continue
        report = autopsy.examine(rerun(net, policy), record, net, state=optimizer.state_dict(),
                                 num_classes=num_classes, precision=policy.name, scale=scale)
        if report.verdict != "not reproducible" or scale <= scaler.floor:  # else: finite at scale 1, calibration
            run.first, run.what, run.report = step, " and ".join(verdict.reasons), report
            break
    run.scale, run.skipped, run.sick = float(scaler.scale_tensor), guard.skipped, non_finite(net)
    return run
