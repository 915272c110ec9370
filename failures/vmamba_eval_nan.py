"""
VMamba: evaluation wrote its scan in fp16, training did not

Reported    MzeroMiko/VMamba issue 165: training under AMP is fine, the test loss is NaN. Issues 78
            and 138 ask the same; 252 asks about a gradient norm of inf. The usual story:
            "torch.no_grad() forces float16". But no_grad changes no dtype.
First bad   The scan's output, cast to fp16 as it leaves the scan, at the first evaluation. No
            training step is bad.
Why         From 23 February to 1 March 2024 the model chose the precision by `self.training`: the
            scan's output was fp32 in training and the input's dtype (fp16) in evaluation. y = C * B
            * delta * x is a product of four activations, and nothing bounds it. The four directions
            are summed in the same dtype before the LayerNorm. Above 65504 the sum is inf, inf - inf
            in the norm is NaN, and every logit is NaN. The gradient norm of inf has another cause:
            the loss scale tries too high a value, that step is skipped, and the scale halves. A log
            that averages the norm over such a step prints inf for the rest of the epoch.
Cure        The policy decides the precision, never `self.training`. Scan, sum and norm are one fp32
            island, and the half copy is made after the norm (upstream since 561d3a3). Evaluation
            forced to fp32 (our default) needs no change in the model, and gives the same numbers
            with force_fp32 True and False.
Tried, no   force_fp32=True: it was `self.training and ...`, so it changed training only. Gradient
            clipping, a lower learning rate, more warm-up: the gradients were never bad.
Evidence    Upstream's structure: in_proj, depthwise conv, four-way scan, sum, norm, out_proj;
            d_state 1 as in VMamba-v2. x_proj and the convolution start 30 times too large, in place
            of 300 epochs at 3136 tokens. From a healthy start nothing overflows at this size. The
            loss scale grows every 3 steps, not every 2000.
Margin      In evaluation the scan reaches 4.8e9, which is 73,000 times 65504. Cured, the losses of
            the evaluations in fp16 and in fp32 differ by less than 0.01 (0.1 is allowed).
Run         python failures/vmamba_eval_nan.py
"""

import copy
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from amp_policy import capabilities, choose_policy
from autopsy import StepRecord, examine
from failures.loops import (
    BF16,
    F16,
    F32,
    NAMES,
    Case,
    around,
    autocast,
    bare,
    guarded,
    images,
    rerun,
    show,
    where,
)
from fp32 import disagreement, fp32_eval, keep_fp32

GROWN = 30.0  # how much larger long training made the scan's inputs


class Scan(nn.Module):
    """(B, H, W, D): h' = exp(-delta A) h + delta B x, y = C h + D x in four directions; LayerNorm
    of their sum.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.fixed = self.force_fp32 = False
        # each direction's delta, B, C
        self.x_proj = nn.Parameter(torch.randn(4, dim, 3) * GROWN / dim**0.5)
        self.A = nn.Parameter(torch.zeros(4, dim))
        self.D = nn.Parameter(torch.ones(4, dim))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        B, H, W, D = x.shape
        flat = x.flatten(1, 2)
        turned = x.transpose(1, 2).flatten(1, 2)
        xs = torch.stack([flat, turned, flat.flip(1), turned.flip(1)], 1)  # B, 4, L, D
        delta, b, c = (xs @ self.x_proj).split(1, -1)  # B, 4, L, 1 each, half under autocast
        if self.training and self.force_fp32:  # 0584930
            xs, delta, b, c = xs.float(), delta.float(), b.float(), c.float()
        ys = self.scan(xs, delta, b, c)
        # b20cbf8, ssoflex=self.training; 561d3a3 takes it away
        if not self.fixed and not self.training:
            ys = ys.to(x.dtype)
        a, t, ra, rt = ys.unbind(1)
        t, rt = (y.view(B, W, H, D).transpose(1, 2).flatten(1, 2) for y in (t, rt.flip(1)))
        y = a + t + ra.flip(1) + rt  # the sum comes before the norm
        return self.norm(y).to(x.dtype).view(B, H, W, D)

    def scan(self, x: Tensor, delta: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """(B, 4, L, D), one step of the recurrence for each token.

        Like the kernel it computes in fp32 on any input.
        """
        with torch.autocast("cpu", enabled=False):
            x, b, c, delta = x.float(), b.float(), c.float(), F.softplus(delta.float())
            keep = torch.exp(-delta * self.A.exp()[:, None]).unbind(2)
            put = (delta * b * x).unbind(2)
            states = [put[0]]
            for k, p in zip(keep[1:], put[1:], strict=True):
                states.append(k * states[-1] + p)
            return c * torch.stack(states, 2) + self.D[:, None] * x


class VMamba(nn.Module):
    """32x32 images, patches of 4: 64 tokens.

    Returns (loss, metrics); metrics have one row for each image.
    """

    def __init__(self, dim: int = 16):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, 4)
        self.ln = nn.LayerNorm(dim)
        self.in_proj = nn.Linear(dim, 2 * dim)
        self.conv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.ss2d = Scan(dim)
        self.out_proj = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, 10)
        self.conv.weight.data.mul_(GROWN)

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        tokens = self.patch(images).permute(0, 2, 3, 1)  # B, H, W, D
        x, z = self.in_proj(self.ln(tokens)).chunk(2, -1)
        x = F.silu(self.conv(x.permute(0, 3, 1, 2))).permute(0, 2, 3, 1)
        tokens = tokens + self.out_proj(self.ss2d(x) * F.silu(z))
        logits = self.head(tokens.mean((1, 2)))
        rows = F.cross_entropy(logits.float(), labels, reduction="none")
        return rows.mean(), {"loss": rows, "acc1": (logits.argmax(-1) == labels).float()}


@torch.no_grad()
def evaluate(net: VMamba, batch: tuple, context) -> float:
    net.eval()
    with context:
        return net(*batch)[0].item()


def case(steps: int = 24) -> Case:
    x, y = images(48)
    batches = around([(x[:16], y[:16]), (x[16:32], y[16:32])], steps)
    val = (x[32:], y[32:])
    torch.manual_seed(0)
    start = VMamba()
    out = Case("VMamba, evaluation")
    fixed = copy.deepcopy(start)
    forced = copy.deepcopy(start)
    fixed.ss2d.fixed = forced.ss2d.force_fp32 = True

    for dtype in (F16, BF16, F32):
        name = NAMES[dtype]
        published = bare(start, batches, dtype, 3e-3, clip=1.0, growth_interval=3)
        loss = evaluate(published.net, val, autocast(dtype))
        run = guarded(start, batches, dtype, 3e-3, clip=1.0)
        exact = evaluate(run.net, val, fp32_eval(run.net))
        seen = disagreement(run.net, *val, choose_policy(name, capabilities("cpu")))
        record = StepRecord(steps, run.net)  # evaluate() left the net in evaluation mode
        record.keep(*val)
        report = examine(rerun(run.net, dtype), record, run.net, precision=name)
        named = f"{report.verdict}: {where(report)}" if seen.nonfinite else "agrees"
        cured = guarded(fixed, batches, dtype, 3e-3, clip=1.0)
        mended = evaluate(cured.net, val, autocast(dtype))

        out.row(
            name,
            f"trains ({published.losses[-1]:.3g}), eval loss {loss:.3g}",
            f"{named}; in fp32 {exact:.3g}",
            f"eval loss {mended:.3g}",
        )
        out.claim(
            f"{name} trains, with and without the cure",
            published.trains and run.trains and cured.trains,
        )
        out.claim(f"{name}: cured, evaluation agrees with fp32", abs(mended - exact) < 0.1)
        if dtype is not F16:
            out.claim(
                f"{name} has the range: finite as published",
                math.isfinite(loss) and not seen.nonfinite,
            )
            continue
        out.claim(
            "as published, clipped at 1.0, the fp16 evaluation is NaN; no training loss is",
            math.isnan(loss),
        )
        out.notes.append(f"evaluation beside fp32: {seen}")
        out.claim(
            "the guard names the scan, in evaluation",
            seen.layer.startswith("ss2d")
            and report.module == "ss2d"
            and report.verdict == "precision"
            and "_to_copy" in report.op,
        )
        other = guarded(forced, batches, dtype, 3e-3, clip=1.0).net
        half = evaluate(other, val, autocast(dtype))
        full = evaluate(other, val, fp32_eval(other))
        out.notes.append(
            f"force_fp32=True: eval loss {half:.3g}, in fp32 {full:.6g}; "
            f"force_fp32=False: {exact:.6g}"
        )
        out.claim(
            "force_fp32=True mends nothing; evaluated in fp32, True and False are the same",
            math.isnan(half) and abs(full - exact) < 1e-3,
        )
        keep_fp32(run.net, [report.module])
        healed = evaluate(run.net, val, autocast(dtype))
        out.notes.append(
            f"keep_fp32(net, ['{report.module}']) on the unchanged model: eval loss {healed:.3g}"
        )
        out.claim("keep_fp32 of that module mends the unchanged model", math.isfinite(healed))
        infinite = [step for step, norm in enumerate(published.norms, 1) if norm == math.inf]
        out.notes.append(
            f"gradient norm inf at steps {infinite}, which were skipped; otherwise at most "
            f"{max(norm for norm in published.norms if norm < math.inf):.3g}"
        )
        out.claim(
            "a norm of inf is a skipped step, not the NaN",
            infinite and infinite == published.skipped,
        )
    return out


if __name__ == "__main__":
    sys.exit(show(case()))
