"""
A loss in fp16 overflows at scale 65536, whatever the model does

Reported    No thread: read in the training loops of Swin and VMamba, which call the criterion outside autocast.
First bad   the gradient of the loss itself, aten._to_copy in its backward, at step 1 and at each growth back.
Why         The loss of fp16 logits outside autocast is an fp16 number, and its gradient is the loss scale itself:
            65536 > 65504 is inf. At PyTorch's default scale the first step always overflows; every time the scale has
            grown back to 65536 one more step is lost.
Cure        logits.float() before the loss.
Tried, no   A lower rate: the gradient of the loss does not depend on it. (Soft labels in fp32 promote, and hide it.)
Evidence    Mechanism only, with that call. The scale grows every 3 steps here, not every 2000.
Run         python failures/more_fp16_loss.py
"""

import copy
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from autopsy import StepRecord, examine
from failures.loops import F16, Case, around, autocast, bare, guarded, images, show


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fixed, self.head = False, nn.Linear(3 * 8 * 8, 10)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict]:
        logits = self.head(F.avg_pool2d(x, 4).flatten(1))
        with torch.autocast("cpu", enabled=False):  # the published loops compute it after autocast has ended
            return F.cross_entropy(logits.float() if self.fixed else logits, y), {}


def case(steps: int = 12) -> Case:
    x, y = images(16)
    batches, out = around([(x, y)], steps), Case("loss in fp16")
    torch.manual_seed(0)
    start = Net()
    fixed = copy.deepcopy(start)
    fixed.fixed = True
    published = bare(start, batches, F16, 1e-3, growth_interval=3)

    def run_step(batch: tuple, fp32: bool) -> Tensor:  # with its loss scale: at scale 1 the step is healthy
        with autocast(torch.float32 if fp32 else F16):
            loss, _ = start(*batch)
        (loss if fp32 else loss * torch.tensor(65536.0)).backward()
        return loss

    record = StepRecord(1, start)
    record.keep(*batches[0])
    report = examine(run_step, record, start, precision="fp16", scale=65536.0)
    cured, short = guarded(fixed, batches, F16, 1e-2), bare(fixed, batches, F16, 1e-3, growth_interval=3)
    skips = ", ".join(map(str, published.skipped))
    out.row("fp16", f"skipped at steps {skips}: whenever the scale is 65536",
            f"{report.verdict} @ 1: {report.op.removesuffix('.default')} in the {report.phase} of the loss", cured)
    out.claim("as published: step 1 is skipped, and each growth back to 65536", published.skipped[:3] == [1, 5, 9])
    out.claim("the autopsy names the loss's backward",
              report.verdict == "calibration" and report.phase == "backward" and report.made == "inf")
    out.claim("cured: step 1 is taken, at 65536 and at twice that", not cured.skipped and short.scales[3] > 65536
              and not {1, 2, 3, 4} & set(short.skipped))
    return out


if __name__ == "__main__":
    sys.exit(show(case()))
