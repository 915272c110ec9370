"""
VMamba: evaluation wrote its scan in fp16, training did not

Reported    MzeroMiko/VMamba issue 165: training under AMP is fine, the test loss is NaN; 78 and 138 ask the same.
            Usually told as "torch.no_grad() forces the data to float16". It does not: no_grad changes no dtype.
First bad   the scan's output, cast to fp16 as it leaves the scan, at the first evaluation; no step has any.
Why         Between 23 February and 1 March 2024 the model itself chose the precision by `self.training`: fp32 out of
            the scan in training, the input's dtype (fp16) in evaluation. y = C * B * delta * x is a product of four
            activations and nothing bounds it. The four directions are then summed, in the same dtype, and only then
            comes the LayerNorm. Beyond 65504 the sum is inf, inf - inf in the norm is NaN, and every logit is NaN.
Cure        Precision is decided by the policy, never by `self.training`: scan, sum and norm are one fp32 island, and
            the half copy is made after the norm (upstream since 561d3a3). Evaluation forced to fp32 (our default)
            needs no change in the model, and gives the same numbers with force_fp32 True and False.
Tried, no   force_fp32=True (it was `self.training and ...`, so it changed training only); gradient clipping, a lower
            learning rate, more warm-up (the gradients were never bad).
Evidence    Upstream's structure distilled: in_proj, depthwise conv, four-way scan, sum, norm, out_proj; d_state 1 as in
            VMamba-v2. x_proj and the convolution start 30 times too large: that stands in for 300 epochs at 3136
            tokens. From a healthy start nothing overflows at this size.
Run         python failures/vmamba_eval_nan.py
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from amp_policy import capabilities, choose_policy, disagreement, fp32_eval, keep_fp32
from autopsy import StepRecord, examine
from failures.loops import BF16, F16, F32, NAMES, Case, Run, around, bare, guarded, images, rerun, show
from optim import ClippedAdamW

GROWN = 30.0  # what training for long did to the scan's inputs


class Scan(nn.Module):
    """Four directions of h' = exp(-delta A) h + delta B x, y = C h + D x; (B, H, W, D) -> LayerNorm of their sum."""

    def __init__(self, dim: int, fixed: bool, force_fp32: bool = False):
        super().__init__()
        self.fixed, self.force_fp32 = fixed, force_fp32
        self.x_proj = nn.Parameter(torch.randn(4, dim, 3) * GROWN / dim**0.5)  # each direction's delta, B, C
        self.A, self.D = nn.Parameter(torch.zeros(4, dim)), nn.Parameter(torch.ones(4, dim))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        B, H, W, D = x.shape
        flat, turned = x.flatten(1, 2), x.transpose(1, 2).flatten(1, 2)
        xs = torch.stack([flat, turned, flat.flip(1), turned.flip(1)], 1)  # B, 4, L, D
        delta, b, c = (xs @ self.x_proj).split(1, -1)  # B, 4, L, 1 each, half under autocast
        if self.training and self.force_fp32:  # 0584930
            xs, delta, b, c = xs.float(), delta.float(), b.float(), c.float()
        ys = scan(xs, delta, b, c, self.A, self.D)  # the kernel counts in fp32, whatever it reads
        if not self.fixed and not self.training:  # b20cbf8: ssoflex=self.training
            ys = ys.to(x.dtype)
        a, t, ra, rt = ys.unbind(1)
        back = [y.view(B, W, H, D).transpose(1, 2).flatten(1, 2) for y in (t, rt.flip(1))]
        y = a + back[0] + ra.flip(1) + back[1]  # the sum comes before the norm
        if self.fixed:  # 561d3a3: one fp32 island from the scan to the norm
            return F.layer_norm(y, (D,), self.norm.weight, self.norm.bias).to(x.dtype).view(B, H, W, D)
        return self.norm(y).to(x.dtype).view(B, H, W, D)


def scan(x: Tensor, delta: Tensor, b: Tensor, c: Tensor, A: Tensor, D: Tensor) -> Tensor:
    """(B, 4, L, D), fp32 inside and out; one step of the recurrence a token, d_state 1."""
    with torch.autocast("cpu", enabled=False):
        x, b, c = x.float(), b.float(), c.float()
        delta = F.softplus(delta.float())
        keep, put = torch.exp(-delta * A.exp()[:, None]).unbind(2), (delta * b * x).unbind(2)
        h, states = torch.zeros_like(x[:, :, 0]), []
        for k, p in zip(keep, put, strict=True):
            h = k * h + p
            states.append(h)
        return c * torch.stack(states, 2) + D[:, None] * x


class VMamba(nn.Module):
    """32x32 images, patches of 4: 64 tokens. Returns (loss, metrics), metrics a row per image."""

    def __init__(self, fixed: bool, force_fp32: bool = False, dim: int = 16):
        super().__init__()
        self.patch, self.ln, self.in_proj = nn.Conv2d(3, dim, 4, 4), nn.LayerNorm(dim), nn.Linear(dim, 2 * dim)
        self.conv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.ss2d, self.out_proj, self.head = Scan(dim, fixed, force_fp32), nn.Linear(dim, dim), nn.Linear(dim, 10)
        self.conv.weight.data.mul_(GROWN)

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        tokens = self.patch(images).permute(0, 2, 3, 1)  # B, H, W, D
        x, z = self.in_proj(self.ln(tokens)).chunk(2, -1)
        x = F.silu(self.conv(x.permute(0, 3, 1, 2))).permute(0, 2, 3, 1)
        tokens = tokens + self.out_proj(self.ss2d(x) * F.silu(z))
        logits = self.head(tokens.mean((1, 2)))
        rows = F.cross_entropy(logits.float(), labels, reduction="none")
        return rows.mean(), {"loss": rows, "acc1": (logits.argmax(-1) == labels).float()}


def evaluate(net: VMamba, batch: tuple, context) -> float:
    net.eval()
    with torch.no_grad(), context:
        loss = net(*batch)[0].item()
    net.train()
    return loss


def case(steps: int = 24) -> Case:
    x, y = images(48)
    batches, val = around([(x[:16], y[:16]), (x[16:32], y[16:32])], steps), (x[32:], y[32:])
    torch.manual_seed(0)
    start = VMamba(fixed=False)
    out, forced = Case("VMamba, evaluation"), {}

    def trained(dtype: torch.dtype, **options) -> tuple[VMamba, Run]:
        net = VMamba(**({"fixed": False} | options))
        net.load_state_dict(start.state_dict())
        return net, guarded(net, batches, dtype, ClippedAdamW(net.parameters(), 3e-3, weight_decay=0.01, clip=1.0))

    for dtype in (F16, BF16, F32):
        policy = choose_policy(NAMES[dtype], capabilities("cpu"))
        net = copy.deepcopy(start)
        run = bare(net, batches, dtype, torch.optim.AdamW(net.parameters(), 3e-3), clip=1.0)
        loss = evaluate(net, val, policy.autocast())
        published = f"trains ({run.losses[-1]:.3g}), eval loss {loss:.3g}"

        net, run = trained(dtype)
        seen = disagreement(net, *val, policy)
        net.eval()
        record = StepRecord(steps, net)
        record.keep(*val)
        report = examine(rerun(net, policy), record, net, num_classes=10, precision=policy.name) if seen.nonfinite \
            else None
        net.train()
        name = f"{report.verdict}: {report.op.removesuffix('.default')} in {report.module}" if report else "agrees"
        precise = evaluate(net, val, fp32_eval(net))
        fixed, fixed_run = trained(dtype, fixed=True)
        cured = evaluate(fixed, val, policy.autocast())
        out.rows.append((NAMES[dtype], published, f"{name}; in fp32 {precise:.3g}", f"eval loss {cured:.3g}"))
        out.claim(f"{NAMES[dtype]} trains, with and without the cure", run.trains and fixed_run.trains)
        out.claim(f"{NAMES[dtype]}: cured, evaluation agrees with fp32", abs(cured - precise) < 0.1)
        if dtype is F16:
            out.notes.append(f"evaluation beside fp32: {seen}")
            out.claim("as published, the fp16 evaluation is NaN while the training loss is finite", loss != loss)
            out.claim("the guard names the scan, in evaluation", bool(report) and seen.layer.startswith("ss2d")
                      and report.module == "ss2d" and report.verdict == "precision" and "_to_copy" in report.op)
            out.claim("the weights are finite", not run.sick)
            keep_fp32(net, [report.module if report else "ss2d"])
            healed = evaluate(net, val, policy.autocast())
            out.notes.append(f"keep_fp32(net, ['ss2d']) on the unchanged model: eval loss {healed:.3g} under autocast")
            out.claim("keep_fp32 of that module mends the unchanged model", healed == healed)
            for force in (True, False):
                other, _ = trained(dtype, force_fp32=force)
                forced[force] = (evaluate(other, val, policy.autocast()), evaluate(other, val, fp32_eval(other)))
            out.notes += [f"force_fp32={force}: eval loss {a:.3g} under autocast, {b:.6g} forced to fp32"
                          for force, (a, b) in forced.items()]
            out.claim("force_fp32 True or False: both NaN under autocast, the same once evaluation is forced to fp32",
                      all(a != a for a, _ in forced.values()) and abs(forced[True][1] - forced[False][1]) < 1e-3)
        else:
            out.claim(f"{NAMES[dtype]} has the range: finite as published", loss == loss)
    return out


if __name__ == "__main__":
    sys.exit(show(case()))
