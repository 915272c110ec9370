"""
bf16 weights that never move

Reported    vllm-project/speculators 765: all norm weights are still exactly 1.0 after training.
First bad   No number is NaN. The first update of a weight of 1.0 is lost, and so is every later update.
Why         bf16 has 8 bits of significand: below 1 the next number is 1 - 2^-8 = 0.996. AdamW moves a weight by about
            lr = 1e-3. This is less than half of the gap (2^-9 = 0.00195), so 1 - 0.001 rounds to 1.0, in every step.
Cure        fp32 master weights. The updates add up in the master, and the bf16 copy follows when their sum is large
            enough for bf16.
Tried, no   More epochs: no update is kept, so nothing adds up.
Evidence    Mechanism only: the gain of a LayerNorm under a steady gradient.
Run         python failures/more_bf16_weights.py
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from failures.loops import BF16, F32, Case, bare, guarded, refusal, show

LR = 1e-3


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.norm = nn.LayerNorm(8, dtype=dtype)

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, dict]:
        return 0.1 * self.norm.weight.float().sum() + 0.1 * self.norm.bias.float().sum(), {}


def case(steps: int = 60) -> Case:
    batches, out = [(torch.zeros(1), torch.zeros(1))] * steps, Case("bf16 weights stand still")
    published, longer = (bare(Net(BF16), batches * times, F32, LR, foreach=True) for times in (1, 4))
    cured, fp32 = guarded(Net(BF16), batches, F32, LR, masters=True), bare(Net(F32), batches, F32, LR)
    stuck, later, moved, exact = (run.net.norm.weight[0].item() for run in (published, longer, cured, fp32))
    says = refusal(Net(BF16), lr=LR)
    out.row("bf16", f"a gain of 1.0 is {stuck:g} after {steps} steps", f"refused: {says}",
            f"{moved:.3g} (fp32: {exact:.3g})")
    out.claim("as published: exactly 1.0, and after four times as many steps too", stuck == later == 1.0)
    out.claim("refused before the first step", "masters=True" in says)
    out.claim("masters move as far as fp32", moved < 0.99 and abs(moved - exact) < 2**-8)
    return out


if __name__ == "__main__":
    sys.exit(show(case()))
