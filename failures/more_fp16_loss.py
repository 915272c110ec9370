"""
A loss in fp16 overflows at scale 65536, whatever the model does

Reported    No thread. The training loops of Swin and VMamba call the criterion outside autocast.
First bad   The gradient of the loss itself, aten._to_copy in its backward, in step 1 and whenever
            the scale has grown back to 65536.
Why         Outside autocast the loss of fp16 logits is an fp16 number, and its gradient is the loss
            scale: 65536 > 65504 is inf. At PyTorch's default scale the first step always overflows.
            One more step is lost every time the scale has grown back to 65536.
Cure        logits.float() before the loss.
Tried, no   A lower learning rate: the gradient of the loss does not depend on it. (Soft labels in
            fp32 promote the logits to fp32, and hide the failure.)
Evidence    Mechanism only, with the same call. The scale grows every 3 steps here, not every 2000.
Margin      None is needed: 65520 and up round to inf in fp16, on every machine.
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
        self.fixed = False
        self.head = nn.Linear(3 * 8 * 8, 10)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict]:
        logits = self.head(F.avg_pool2d(x, 4).flatten(1))
        # the published loops compute the loss after autocast has ended
        with torch.autocast("cpu", enabled=False):
            return F.cross_entropy(logits.float() if self.fixed else logits, y), {}


def case(steps: int = 12) -> Case:
    x, y = images(16)
    batches = around([(x, y)], steps)
    out = Case("loss in fp16")
    torch.manual_seed(0)
    start = Net()
    fixed = copy.deepcopy(start)
    fixed.fixed = True
    published = bare(start, batches, F16, 1e-3, growth_interval=3)

    # with the loss scale: at scale 1 the step is healthy
    def run_step(batch: tuple, fp32: bool) -> Tensor:
        with autocast(torch.float32 if fp32 else F16):
            loss, _ = start(*batch)
        (loss if fp32 else loss * torch.tensor(65536.0)).backward()
        return loss

    record = StepRecord(1, start)
    record.keep(*batches[0])
    report = examine(run_step, record, start, precision="fp16", scale=65536.0)
    cured = guarded(fixed, batches, F16, 1e-2)
    short = bare(fixed, batches, F16, 1e-3, growth_interval=3)
    skips = ", ".join(map(str, published.skipped))
    operation = report.op.removesuffix(".default")
    out.row(
        "fp16",
        f"skipped at steps {skips}: whenever the scale is 65536",
        f"{report.verdict} @ 1: {operation} in the {report.phase} of the loss",
        cured,
    )
    out.claim(
        "as published: step 1 is skipped, and each growth back to 65536",
        published.skipped[:3] == [1, 5, 9],
    )
    out.claim(
        "the autopsy names the loss's backward",
        report.verdict == "calibration"
        and report.phase == "backward"
        and report.result_value == "inf",
    )
    out.claim(
        "cured: step 1 is taken, at 65536 and at twice that",
        not cured.skipped and short.scales[3] > 65536 and not {1, 2, 3, 4} & set(short.skipped),
    )
    return out


if __name__ == "__main__":
    sys.exit(show(case()))
