"""
Swin: attention logits outgrow fp16

Reported    microsoft/Swin-Transformer issue 82: Swin-L, apex O1; loss and gradient norm are NaN at
            epoch 1, iteration 880, and at every step after it; fp32 is fine. Also 287 (V1, 100
            classes: NaN) and pull request 345 (use bf16).
First bad   q @ k^T of a window, before the softmax, at the step printed below. The weights are
            healthy.
Why         The logit is a product of two learnt projections, and nothing bounds it: twice the
            weights give four times the logit. Above 65504 the logit is inf in fp16, and softmax
            computes inf - inf = NaN. In fp32 the same logits give an ordinary one-hot row, and the
            loss does not change. Every step is skipped, so the weights stay in the state that
            overflows, and every later loss is NaN. The loss scale halves at every skipped step.
            This does not help: the loss scale multiplies the loss, and this inf is made in the
            forward.
Cure        Compute the logits in fp32: here keep_fp32(net, ["blocks.*.attn"]) on the unchanged
            model. Or use V2's attention (cosine times a scale clamped at 100), whose logits cannot
            overflow. Or use bf16. A lower learning rate, warm-up and clipping keep the logits
            small.
Tried, no   Waiting until the loss scale settles. "--amp-opt-level O3" or "bf16" (Swin has neither).
            Searching the gradients between backward() and step(): they still carry the loss scale,
            so a healthy step shows inf too.
Evidence    The window attention of V1 and V2 in a small pre-norm model, without shift and without
            mask (Swin's mask is -100 and adds no infinity). No thread says which operation it was
            in Swin-L: this mechanism fits "NaN at every step after". In fp32 a learning rate of 0.2
            makes the logits grow within seconds.
Margin      The fp32 training goes on until a logit passes 200,000, which is three times 65504. Each
            of the four batches that follow then reaches 184,000 to 210,000, so the first fp16 step
            is bad, and so is every later one. Cured, the loss falls to 0.73 to 0.85 of its first
            quarter. Measured on torch 2.9.1 and 2.15 with the instruction sets AVX512, AVX2 and
            SSE4.1.
Run         python failures/swin_attention_overflow.py
"""

import copy
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
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
    show,
)
from fp32 import keep_fp32

# learning rates: FAST makes the logits grow, CALM is for the cured runs
FAST = 0.2
CALM = 3e-2


class AttentionV1(nn.Module):
    """(windows, N, D) -> (windows, N, D)"""

    def __init__(self, dim: int, heads: int = 2):
        super().__init__()
        self.heads = heads
        self.largest = 0.0
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.bias = nn.Parameter(torch.zeros(heads, 16, 16))

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        return (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1) + self.bias

    def forward(self, x: Tensor) -> Tensor:
        W, N, D = x.shape
        # each W, heads, N, d
        q, k, v = self.qkv(x).view(W, N, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        logits = self.logits(q, k)
        self.largest = max(self.largest, float(logits.detach().abs().max()))
        return self.proj((logits.softmax(-1).to(v.dtype) @ v).transpose(1, 2).reshape(W, N, D))


class AttentionV2(AttentionV1):
    """The authors' cure: the cosine of q and k times at most 100, plus a bias below 16, in fp32."""

    def __init__(self, dim: int):
        super().__init__(dim)
        self.tau = nn.Parameter(torch.full((self.heads, 1, 1), math.log(10.0)))

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            cosine = F.normalize(q.float(), dim=-1) @ F.normalize(k.float(), dim=-1).transpose(
                -2, -1
            )
        return cosine * self.tau.clamp(max=math.log(100.0)).exp() + 16 * torch.sigmoid(self.bias)


class Block(nn.Module):
    def __init__(self, attention: type, dim: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.attn = attention(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Swin(nn.Module):
    """32x32 images, patches of 4, windows of 4x4 patches."""

    def __init__(self, attention: type = AttentionV1, dim: int = 32):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, 4)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 10)
        self.blocks = nn.ModuleList(Block(attention, dim) for _ in range(2))

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, dict]:
        x = self.patch(images)  # B, D, 8, 8
        # B * 4, 16, D
        x = F.unfold(x, 4, stride=4).view(len(x), -1, 16, 4).permute(0, 3, 2, 1).flatten(0, 1)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x).view(len(images), 64, -1).mean(1)
        return F.cross_entropy(self.head(x).float(), labels), {}

    def largest_logit(self) -> float:  # so far
        return max(block.attn.largest for block in self.blocks)


def peaks(net: Swin, batches: list[tuple]) -> list[float]:
    """The largest logit in fp32 of each batch."""
    largest = []
    for batch in batches:
        trial = copy.deepcopy(net)
        for block in trial.blocks:
            block.attn.largest = 0.0
        with torch.no_grad():
            trial(*batch)
        largest.append(trial.largest_logit())
    return largest


def grow(net: Swin, batches: list[tuple], until: float = 200_000.0) -> int:
    """Train in fp32, no clipping, no warm-up, until a logit passes `until`.

    Returns the steps it took.
    """
    optimizer = torch.optim.AdamW(net.parameters(), FAST, weight_decay=0.0)
    steps = 0
    while steps < len(batches) and net.largest_logit() < until:
        optimizer.zero_grad()
        net(*batches[steps])[0].backward()
        optimizer.step()
        steps += 1
    return steps


def case(steps: int = 40, growth: int = 600) -> Case:
    x, y = images(256)
    many = around([(x[i : i + 32], y[i : i + 32]) for i in range(0, 256, 32)], growth)
    few = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 32, 8)]
    batches = around(few, steps)
    torch.manual_seed(0)
    fresh = Swin()
    fresh_v2 = Swin(AttentionV2)
    out = Case("Swin, V1 attention")
    warm = copy.deepcopy(fresh)
    v2 = copy.deepcopy(fresh_v2)
    took = grow(warm, many)
    grow(v2, many[:took])
    top = warm.largest_logit()
    top_v2 = v2.largest_logit()
    out.notes.append(
        f"largest logit after {took} steps at lr {FAST:g}: V1 {top:.3g}, V2 {top_v2:.3g}"
    )
    out.claim("V1's logits grow by training alone, V2's cannot", top > 200_000 and top_v2 < 117)
    least = min(peaks(warm, few))
    out.notes.append(f"largest logit of the batches that follow: at least {least:.3g} in fp32")
    out.claim("every batch that follows is far above the largest fp16 number", least > 2 * 65504)
    island = copy.deepcopy(warm)
    pinned = keep_fp32(island, ["blocks.*.attn"])

    for dtype in (F16, BF16, F32):
        name = NAMES[dtype]
        published = bare(warm, batches, dtype, FAST)
        run = guarded(warm, batches, dtype, FAST)
        out.row(name, published, run, guarded(island, batches, dtype, CALM, clip=1.0))
        if dtype is not F16:
            out.claim(
                f"{name} has the range: finite as published", not published.first and not run.first
            )
            continue
        last = max(
            (step for step, loss in enumerate(published.losses, 1) if math.isfinite(loss)),
            default=0,
        )
        out.notes.append(
            f"as published: no finite loss after step {last} of {steps}; loss scale 65536 -> "
            f"{published.scales[-1]:g}; weights finite and frozen"
        )
        out.claim(
            "fp16 breaks as published: NaN from step 1 on", published.first == 1 and last == 0
        )
        out.claim("every step halves the loss scale", published.scales[-1] == 65536 * 0.5**steps)
        out.claim("the weights are not NaN", not published.sick)
        out.notes += ["  " + line for line in str(run.report).splitlines()[:3]]
        out.claim(
            "the guard names the attention's product",
            any(run.blames("precision", "bmm", module) for module in pinned),
        )
        other = guarded(fresh_v2, batches, dtype, CALM, clip=1.0)
        out.notes.append(f"V2's attention in fp16: {other}")
        out.claim("V2's attention trains", other.trains)

    params = list(fresh.parameters())
    infinite = []
    # the published diagnosis (search each layer's gradient for inf) on a healthy step
    for scale in (2.0**22, 1.0):
        with autocast(F16):
            loss, _ = fresh(*batches[0])
        infinite.append(
            sum(not bool(g.isfinite().all()) for g in torch.autograd.grad(loss * scale, params))
        )
    out.notes.append(
        f"a healthy step searched for inf: {infinite[0]} of {len(params)} gradients at loss scale "
        f"2^22, {infinite[1]} at scale 1, where the autopsy looks"
    )
    out.claim(
        "scaled gradients overflow in a healthy step, unscaled ones do not",
        infinite[0] and not infinite[1],
    )
    return out


if __name__ == "__main__":
    sys.exit(show(case()))
