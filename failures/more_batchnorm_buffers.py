"""
BatchNorm: a skipped step leaves its inf in the running statistics

Reported    pytorch 88474, 90342: training under AMP looks fine, every evaluation is NaN.
First bad   bn.running_mean (inf) and bn.running_var (NaN), written by the *forward* of one
            overflowing batch.
Why         GradScaler sees the bad gradients and skips the optimizer. But nobody restores the
            buffers that the forward has written: 0.9 * old + 0.1 * inf = inf, in every later step.
            Training uses the statistics of the batch, so it does not notice. Evaluation divides by
            the running statistics.
Cure        A rejected step gets its buffers back: guards.py copies them before the forward.
Tried, no   GradScaler: it looks at gradients only. More good batches: no average recovers from inf.
Evidence    Mechanism only. Here an image in the wrong units makes the overflow: finite, and too
            large for fp16.
Margin      The bad batch makes the convolution's largest output 329,000, five times 65504.
Run         python failures/more_batchnorm_buffers.py
"""

import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from failures.loops import F16, Case, around, bare, guarded, images, show


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 4, 4)
        self.bn = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 64, 10)
        self.conv.weight.data.mul_(4)  # so that the bad batch overflows by far; bn divides by it

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict]:
        return F.cross_entropy(self.head(F.relu(self.bn(self.conv(x))).flatten(1)).float(), y), {}


@torch.no_grad()
def evaluate(net: Net, batch: tuple) -> float:
    return net.eval()(*batch)[0].item()


def case() -> Case:
    x, y = images(16)
    batches = around([(x, y)], 12)
    batches[4] = (x * 6e4, y)
    torch.manual_seed(0)
    start = Net()
    out = Case("BatchNorm, skipped step")
    published = bare(start, batches, F16, 1e-3)
    run = guarded(start, batches, F16, 1e-3)
    # the guarded step itself: skip, restore the buffers, go on
    cured = guarded(start, batches, F16, 1e-3, stop=False)
    seen = published.losses
    before = evaluate(published.net, (x, y))
    after = evaluate(cured.net, (x, y))
    out.row(
        "fp16",
        f"train loss {seen[-1]:.3g}, eval {before:.3g}; {', '.join(published.sick)}",
        run,
        f"{len(cured.skipped)} step skipped, eval {after:.3g}",
    )
    out.claim(
        "as published: the training loss recovers, the evaluation is NaN",
        all(map(math.isfinite, seen[:4] + seen[5:])) and seen[-1] < seen[0] and math.isnan(before),
    )
    out.claim(
        "the buffers are bad, no weight is", published.sick == ["bn.running_mean", "bn.running_var"]
    )
    out.claim("the guard names the convolution", run.blames("precision", "convolution", "conv"))
    out.claim(
        "cured: one step is skipped, the evaluation is finite",
        cured.skipped == [5] and math.isfinite(after) and not cured.sick,
    )
    return out


if __name__ == "__main__":
    sys.exit(show(case()))
