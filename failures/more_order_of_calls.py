"""
Right calls, wrong order: the optimizer steps twice, the clip comes before unscale_

Reported    torchvision, pull request 4547, mended by 4874: its reference loop called
            scaler.step(optimizer) and then optimizer.step() again. PyTorch's AMP notes warn against
            clipping before unscale_.
First bad   The weights, in step 1: the scaler skips an overflow, and the second optimizer.step()
            writes it.
Why         scaler.step() checks before it steps; optimizer.step() does not check. A clip before
            unscale_ compares its limit of 1 with a gradient that is 65536 times too large. It
            always clips, and after the division 1/65536 of the limit is left. No number is NaN; SGD
            just does not move.
Cure        One call that unscales, measures, clips and decides, in this order (ClippedAdamW.step).
Tried, no   A larger clipping limit: it would have to follow the scale. A lower learning rate: inf
            stays inf.
Evidence    Mechanism only: torchvision's loop of October 2021 on a small network whose first steps
            overflow at 65536.
Margin      The largest gradient of step 1, times 65536, is 568,000: nine times 65504.
Run         python failures/more_order_of_calls.py
"""

import copy
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from failures.loops import F16, Case, Outcome, around, autocast, guarded, images, show


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 4, 4)
        self.bn = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 64, 10)
        self.head.weight.data.mul_(30)  # so that the first steps overflow at scale 65536

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict]:
        return F.cross_entropy(self.head(F.relu(self.bn(self.conv(x))).flatten(1)).float(), y), {}


def loop(net: Net, batches: list[tuple], wrong: str) -> Outcome:
    outcome = Outcome(net := copy.deepcopy(net))
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu")
    for step, batch in enumerate(batches, 1):
        with autocast(F16):
            loss, _ = net(*batch)
        scaler.scale(loss).backward()
        if wrong == "clip first":
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.unscale_(optimizer)
        outcome.norms.append(
            torch.stack([p.grad.norm() for p in net.parameters()]).norm().item()
            * scaler.get_scale()
        )
        scaler.step(optimizer)
        if wrong == "step twice":
            optimizer.step()
        scaler.update()
        optimizer.zero_grad()
        outcome.losses.append(loss.item())
        if outcome.sick and not outcome.first:
            outcome.first = step
            outcome.what = f"non-finite {outcome.sick[0]}"
    return outcome


def case(steps: int = 10) -> Case:
    x, y = images(16)
    batches = around([(x, y)], steps)
    out = Case("step twice, clip first")
    torch.manual_seed(0)
    start = Net()
    twice, early = (loop(start, batches, wrong) for wrong in ("step twice", "clip first"))
    cured = guarded(start, batches, F16, 1e-2, clip=1.0)
    finite = [norm for norm in early.norms if math.isfinite(norm)]
    constant = sum(0.99 < norm < 1.01 for norm in finite)
    out.row("fp16", twice, f"impossible: one call; {len(cured.skipped)} skipped", cured)
    out.row(
        "fp16, clip first",
        f"loss {early.losses[-4]:.5g} -> {early.losses[-1]:.5g}",
        f"norm * scale is the clip at {constant} of {len(finite)} steps that count",
        cured,
    )
    out.claim("as published: the step that the scaler skipped is taken", twice.first == 1)
    out.claim(
        "clip first: stands still, and its norms show why",
        constant >= 3 and abs(early.losses[-1] - early.losses[-4]) < 0.01 * early.losses[-1],
    )
    out.claim("one call in the right order skips the same overflow", cured.skipped)
    return out


if __name__ == "__main__":
    sys.exit(show(case()))
