"""
GradScaler: the loss scale falls to 0, and the next good step writes NaN

Reported    pytorch 99640, 40497: after many bad steps the scale is 0 and the weights are NaN.
First bad   The weights, at the first *healthy* step after 166 bad ones or more.
Why         Each bad step halves the scale, and there is no floor. 65536 is 2^16 and the smallest
            number of fp32 is 2^-149, so the 166th halving gives exactly 0. In the next healthy step
            0 * g is finite, so the step is not skipped. Unscaling multiplies by 1/0 = inf, and 0 *
            inf is NaN, in every weight.
Cure        A floor: amp_policy.LossScaler stops at 1. A step that is bad at scale 1 has another
            cause.
Tried, no   Waiting: the scale cannot help a forward that overflows. A higher init_scale: each
            doubling gains one step.
Evidence    Mechanism only: a batch too large for fp16, 170 times, then good batches.
Margin      Every bad batch has a logit of 337,000 or more, five times 65504. The rest is arithmetic
            with powers of 2, the same on every machine.
Run         python failures/more_loss_scale_zero.py
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from failures.loops import F16, Case, bare, guarded, images, show


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3 * 32 * 32, 10)
        self.head.weight.data.mul_(10)  # so that the first bad batch overflows

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict]:
        return F.cross_entropy(self.head(x.flatten(1)).float(), y), {}


def case(bad: int = 170, good: int = 8) -> Case:
    x, y = images(4)
    storm = [(x * 6e4, y)] * bad
    calm = [(x, y)] * good
    torch.manual_seed(0)
    start = Net()
    out = Case("loss scale falls to 0")
    before = bare(start, storm, F16, 1e-3)
    after = bare(start, storm + calm[:1], F16, 1e-3)
    run = guarded(start, storm + calm, F16, 1e-3)
    cured = guarded(start, storm + calm, F16, 1e-3, stop=False)
    first = cured.losses[bad]
    gone = "weights nan" if after.sick else "weights finite"
    out.row(
        "fp16",
        f"scale {before.scales[-1]:g} after {bad} bad steps; one good step: {gone}",
        run,
        f"scale never below {min(cured.scales):g}, loss {first:.3g} -> {cured.losses[-1]:.3g}",
    )
    out.claim("as published: the scale is 0 from bad step 166 on", before.scales.index(0.0) == 165)
    out.claim(
        "as published: a healthy step makes the finite weights NaN", not before.sick and after.sick
    )
    out.claim(
        "the guard names the product at the first of them, and keeps the weights",
        run.first == 1 and run.blames("precision", "addmm", "head") and not run.sick,
    )
    out.claim(
        "cured: the scale stops at 1, the bad steps are skipped, the good ones train",
        min(cured.scales) == 1
        and len(cured.skipped) == bad
        and cured.losses[-1] < cured.losses[bad]
        and not cured.sick,
    )
    return out


if __name__ == "__main__":
    sys.exit(show(case()))
