"""
Six more: small, silent, and in many loops

1 BatchNorm     pytorch 88474, 90342. One overflowing batch: the scaler skips the step, but the forward has already
                written inf into running_mean and NaN into running_var. Training looks fine, every evaluation is NaN.
                Cure: a rejected step gives its buffers back (guards.py).
2 loss scale 0  pytorch 99640, 40497. GradScaler has no floor: 166 bad steps in a row halve 65536 to exactly 0. Then a
                healthy step: 0 * g is finite, 1/0 is inf, 0 * inf is NaN, in the weights. Cure: a floor (LossScaler).
3 bf16 weights  vllm-project/speculators 765 (all norm weights still 1.0 after training). Near 1 bf16 steps by 2^-8
                downwards: an update of lr = 1e-3 rounds away, for ever. Cure: fp32 masters. Tried, no: more epochs.
4 one rank      pytorch/audio 3749. One rank sees a NaN and `continue`s before backward. The other's all-reduce waits,
                meets the first rank's *next* step, and averages two different steps; the last one waits for nobody.
                Cure: flags travel, one all-reduce, all ranks skip (Guard.decide).
5 order         torchvision, pull request 4547, mended by 4874: scaler.step(optimizer), then optimizer.step() again. The
                second does not ask and writes the inf that the first one skipped. And a clip before unscale_ compares
                1.0 with 65536 times the gradient. Cure: one call that unscales, clips and decides, in this order.
6 fp16 loss     the loss of fp16 logits outside autocast is an fp16 number, and its gradient is the loss scale itself:
                65536 > 65504 is inf. At PyTorch's default scale the first step always overflows, and each growth back.
                Cure: logits.float(). Tried, no: a lower rate.

Evidence        mechanism only, distilled, each from the threads named (6: Swin's and VMamba's loops, read).
Run             python failures/more_of_the_kind.py
"""

from __future__ import annotations

import copy
import datetime
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from amp_policy import LossScaler
from autopsy import StepRecord, examine
from failures.loops import BF16, F16, F32, Case, around, bare, guarded, images, show
from guards import Guard
from optim import ClippedAdamW


class Net(nn.Module):
    """Convolution, BatchNorm, head. `half_loss`: the loss as in 6."""

    def __init__(self, half_loss: bool = False):
        super().__init__()
        self.half_loss = half_loss
        self.conv, self.bn, self.head = nn.Conv2d(3, 8, 4, 4), nn.BatchNorm2d(8), nn.Linear(8 * 64, 10)

    def logits(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.bn(self.conv(x))).flatten(1))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict]:
        logits = self.logits(x)
        if not self.half_loss:
            return F.cross_entropy(logits.float(), y), {}
        with torch.autocast("cpu", enabled=False):  # CUDA and CPU autocast would both do it in fp32: this is outside
            return F.cross_entropy(logits, y), {}


def fresh(**options) -> tuple[Net, list[tuple[Tensor, Tensor]]]:
    x, y = images(16)
    torch.manual_seed(0)
    return Net(**options), [(x, y)]


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), 1e-3)


def batchnorm() -> Case:
    out, (start, batches) = Case("BatchNorm, skipped step"), fresh()
    batches = around(batches, 12)
    batches[4] = (batches[4][0] * 6e4, batches[4][1])  # an image in the wrong units: finite, and too large for fp16

    def score(net: Net) -> float:
        with torch.no_grad():
            return F.cross_entropy(net.eval().logits(batches[0][0]), batches[0][1]).item()

    net = copy.deepcopy(start)
    published = bare(net, batches, F16, adam(net))
    value = score(net)
    seen = [*published.losses[:4], *published.losses[5:]]
    net = copy.deepcopy(start)
    run = guarded(net, batches[:6], F16, ClippedAdamW(net.parameters()))
    net = copy.deepcopy(start)
    guard, optimizer, scaler = Guard(net, num_classes=10), ClippedAdamW(net.parameters()), LossScaler("cpu")
    for step, batch in enumerate(batches):  # the cure is the guarded step itself, not stopped by an examination
        guard.open(step)
        with torch.autocast("cpu", F16):
            loss, _ = net(*batch)
        guard.see_loss(loss)
        scaler.scale(loss).backward()
        result = optimizer.step(scaler.scale_tensor, guard.decide())
        guard.close(result.found_inf)
        scaler.update(result.found_inf)
        optimizer.zero_grad()
    guard.flush()
    healed = score(net)
    out.rows.append(("fp16", f"train loss {seen[-1]:.3g}, eval {value:.3g}; {', '.join(published.sick)}", run,
                     f"{guard.skipped} step skipped, eval {healed:.3g}"))
    out.claim("as published: the training loss recovers, the evaluation is NaN",
              all(loss == loss for loss in seen) and value != value and "bn.running_var" in published.sick)
    out.claim("the guard names the convolution, weights and buffers stay finite",
              run.blames("precision", "convolution", "conv") and not run.sick)
    out.claim("cured: the step is skipped, the evaluation finite", guard.skipped == 1
              and healed == healed and bool(net.bn.running_var.isfinite().all()))
    return out


def collapsed_scale(bad: int = 170) -> Case:
    """A batch too large for fp16, 170 times; then healthy ones."""
    out, (start, batches) = Case("loss scale falls to 0"), fresh()
    start.bn = nn.Identity()
    start.conv.weight.data.mul_(10)
    (x, y), = batches
    x, y = x[:2], y[:2]
    batches = [(x * 6e4, y)] * bad + [(x, y)] * 8
    net = copy.deepcopy(start)
    published = bare(net, batches[:-8], F16, adam(net))
    scale, alive = published.scale, not published.sick
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(scaler.state_dict() | {"scale": scale})
    optimizer = adam(net)
    with torch.autocast("cpu", F16):
        loss, _ = net(*batches[-1])
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    gone = not bool(net.head.weight.isfinite().all())
    net = copy.deepcopy(start)
    run = guarded(net, batches, F16, ClippedAdamW(net.parameters()))
    net = copy.deepcopy(start)
    optimizer, scaler, losses = ClippedAdamW(net.parameters()), LossScaler("cpu"), []
    lowest = float(scaler.scale_tensor)
    for batch in batches:
        with torch.autocast("cpu", F16):
            loss, _ = net(*batch)
        scaler.scale(loss).backward()
        scaler.update(optimizer.step(scaler.scale_tensor).found_inf)
        optimizer.zero_grad()
        losses.append(loss.item())
        lowest = min(lowest, float(scaler.scale_tensor))
    out.rows.append(("fp16", f"scale {scale:g} after {bad} bad steps; one good step: weights nan", run,
                     f"scale never below {lowest:g}, loss {losses[bad]:.3g} -> {losses[-1]:.3g}"))
    out.claim("as published: the scale is 0, weights finite until a healthy step makes them NaN",
              scale == 0 and alive and gone)
    out.claim("the guard names the convolution at the first of them", run.blames("precision", "convolution", "conv")
              and run.first == 1 and not run.sick)
    out.claim("cured: the scale stops at 1 and the good steps train", lowest == 1 and losses[-1] < losses[bad])
    return out


def weights_that_never_move(steps: int = 60) -> Case:
    """A bf16 norm gain of 1.0 under a steady gradient."""
    out = Case("bf16 weights stand still")
    gains = {}
    for name in ("bare", "cured", "fp32"):
        net = nn.LayerNorm(8, dtype=F32 if name == "fp32" else BF16)
        if name == "cured":
            optimizer = ClippedAdamW(net.parameters(), 1e-3, weight_decay=0.0, masters=True)
        else:
            optimizer = torch.optim.AdamW(net.parameters(), 1e-3, weight_decay=0.0, foreach=True)
        for _ in range(steps):
            net.weight.grad = torch.full_like(net.weight, 0.1)
            optimizer.step()
        gains[name] = net.weight[0].item()
    try:
        ClippedAdamW(nn.LayerNorm(8, dtype=BF16).parameters(), 1e-3)
        refusal = ""
    except ValueError as sentence:
        refusal = str(sentence)
    out.rows.append(("bf16", f"a gain of 1.0 is {gains['bare']:g} after {steps} steps", f"refused: {refusal}",
                     f"{gains['cured']:.3g} (fp32: {gains['fp32']:.3g})"))
    out.claim("as published: exactly 1.0", gains["bare"] == 1.0)
    out.claim("refused before the first step", "masters=True" in refusal)
    out.claim("masters move as far as fp32", abs(gains["cured"] - gains["fp32"]) < 2**-8)
    return out


def one_rank(rank: int, folder: str, guarded: bool, steps: int = 6) -> None:
    """A rank of two. The gradient of `stamp` is the step's number: whatever is averaged shows which steps they were."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet{guarded}", rank=rank, world_size=2,
                            timeout=datetime.timedelta(seconds=4))
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    net.stamp = nn.Parameter(torch.zeros(()))
    ranks = nn.parallel.DistributedDataParallel(Stamped(net))
    optimizer, guard, mixed, said = ClippedAdamW(net.parameters(), 1e-2), Guard(net, lag=False), [], ""
    try:
        for step in range(1, steps + 1):
            x = torch.randn(8, 4) * (float("nan") if (rank, step) == (1, 3) else 1.0)
            guard.open(step)
            loss = ranks(x, step)
            guard.see_loss(loss)
            if not guarded and not bool(loss.isfinite()):
                continue  # this rank alone
            loss.backward()
            mixed.append((step, 2 * net.stamp.grad.item() - step))
            result = optimizer.step(skip=guard.decide() if guarded else None)
            guard.close(result.found_inf)
            verdict = guard.verdict()
            if not verdict.accepted and guarded:
                said = f"step {verdict.step} rejected by both: {' and '.join(verdict.reasons)} on rank {verdict.rank}"
            optimizer.zero_grad()
    except RuntimeError:  # gloo's time-out
        said = f"rank {rank} hangs in the all-reduce of step {step}"
    torch.save({"mixed": mixed, "said": said, "weight": net.weight.detach(), "finite":
                all(bool(p.isfinite().all()) for p in net.parameters())}, f"{folder}/{guarded}{rank}.pt")
    os._exit(0)  # a group that timed out cannot be destroyed in peace


class Stamped(nn.Module):
    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, step: int) -> Tensor:
        return self.net(x).square().mean() + self.net.stamp * step


def rank_that_skips_alone() -> Case:
    out = Case("one rank skips alone")
    with tempfile.TemporaryDirectory() as folder:
        for mode in (False, True):
            mp.spawn(one_rank, (folder, mode), nprocs=2)
        told = {(mode, rank): torch.load(f"{folder}/{mode}{rank}.pt") for mode in (False, True) for rank in (0, 1)}
    wrong = [(a, int(b)) for a, b in told[False, 0]["mixed"] if a != b]
    run = told[True, 0]["said"]
    fine = [a == b for a, b in told[True, 0]["mixed"] if b == b]
    first = "rank 0's step {} was averaged with rank 1's step {}".format(*wrong[0]) if wrong else "nothing mixed"
    out.rows.append(("fp32", f"{first}; {told[False, 0]['said'] or 'no hang'}", run,
                     f"{len(fine)} steps averaged, each with its own"))
    out.claim("as published: different steps are averaged, then a rank waits for nobody",
              bool(wrong) and "hangs" in told[False, 0]["said"])
    out.claim("guarded: both ranks reject step 3, and rank 1 is named", told[True, 0]["said"] == told[True, 1]["said"]
              and "step 3" in run and "loss" in run and run.endswith("rank 1"))
    out.claim("the weights are finite and equal on both ranks", told[True, 0]["finite"]
              and torch.equal(told[True, 0]["weight"], told[True, 1]["weight"]) and all(fine))
    return out


def order_of_calls(steps: int = 10) -> Case:
    """torchvision's reference loop of October 2021, and the clip in the wrong place."""
    out, (start, batches) = Case("step twice, clip first"), fresh()
    batches = around(batches, steps)
    start.head.weight.data.mul_(30)  # so that the first step overflows at scale 65536, as calibration does

    def loop(wrong: str) -> tuple[list[float], list[float], bool]:
        net, losses, norms = copy.deepcopy(start), [], []
        optimizer, scaler = torch.optim.SGD(net.parameters(), 0.01), torch.amp.GradScaler("cpu")
        for batch in batches:
            with torch.autocast("cpu", F16):
                loss, _ = net(*batch)
            scaler.scale(loss).backward()
            if wrong == "clip first":
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.unscale_(optimizer)
            norms.append(torch.stack([p.grad.norm() for p in net.parameters()]).norm().item() * scaler.get_scale())
            scaler.step(optimizer)
            if wrong == "step twice":
                optimizer.step()
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, norms, bool(net.head.weight.isfinite().all())

    twice, _, finite = loop("step twice")
    first, norms, _ = loop("clip first")
    at = next(i for i, loss in enumerate(twice) if loss != loss)
    net = copy.deepcopy(start)
    run = guarded(net, batches, F16, ClippedAdamW(net.parameters(), 1e-2, clip=1.0))
    skipped = [n for n in norms if not n < 2]
    constant = [n for n in norms if 0.99 < n < 1.01]
    named = f"norm * scale is the clip at {len(constant)} of {steps} steps, {len(skipped)} skipped"
    out.rows.append(("fp16", f"weights nan @ {at}", f"impossible: one call; {run.skipped} skipped", run))
    out.rows.append(("fp16, clip first", f"loss {first[-4]:.5g} -> {first[-1]:.5g}", named, run))
    out.claim("as published: the step that the scaler skipped is taken", not finite and at <= 2)
    out.claim("clip first: stands still, and its norms show why", len(constant) >= 3
              and abs(first[-1] - first[-4]) < 0.01 * first[-1])
    out.claim("one call in the right order: the same overflow is skipped, and it trains",
              run.skipped >= 1 and run.trains)
    return out


def half_loss() -> Case:
    out, (start, batches) = Case("loss in fp16"), fresh(half_loss=True)
    batches = around(batches, 12)
    net = copy.deepcopy(start)
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    optimizer, skips = adam(net), []
    for step, batch in enumerate(batches, 1):
        with torch.autocast("cpu", F16):
            loss, _ = net(*batch)
        before = scaler.get_scale()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skips += [step] * (scaler.get_scale() < before)

    net = copy.deepcopy(start)
    record = StepRecord(1, net)
    record.keep(*batches[0])

    def run_step(batch: tuple, fp32: bool) -> Tensor:  # with its loss scale: at scale 1 the step is healthy
        with torch.autocast("cpu", F16, enabled=not fp32):
            loss, _ = net(*batch)
        (loss if fp32 else loss * torch.tensor(65536.0)).backward()
        return loss

    report = examine(run_step, record, net, precision="fp16", scale=65536.0)
    cured = copy.deepcopy(start)
    cured.half_loss = False
    run = guarded(cured, batches, F16, ClippedAdamW(cured.parameters()))
    line = f"{report.verdict} @ 1: {report.op.removesuffix('.default')} in the {report.phase} of the loss"
    out.rows.append(("fp16", f"skipped at steps {', '.join(map(str, skips))}: whenever the scale is 65536", line, run))
    out.claim("as published: step 1 is skipped, and each growth back to 65536", len(skips) >= 3 and skips[0] == 1)
    out.claim("the autopsy names the loss's backward", report.verdict == "precision" and report.phase == "backward"
              and "made inf" in str(report))
    out.claim("cured: nothing is skipped", run.trains and run.skipped == 0)
    return out


CASES = (batchnorm, collapsed_scale, weights_that_never_move, rank_that_skips_alone, order_of_calls, half_loss)


def case() -> list[Case]:
    return [one() for one in CASES]


if __name__ == "__main__":
    sys.exit(show(*case()))
