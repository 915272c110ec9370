"""
Swin: attention logits outgrow fp16

Reported    microsoft/Swin-Transformer issue 82: Swin-L, apex O1, loss and gradient norm are NaN at epoch 1, iteration
            880, and at every step after; fp32 is fine. 287 (V1, 100 classes: NaN), pull request 345 (bf16 instead).
First bad   q @ k^T of a window, before the softmax, at the step printed below; the weights are healthy.
Why         The logit is a product of two learnt projections, and nothing bounds it: twice the weights, four times the
            logit. Beyond 65504 it is inf in fp16, and softmax makes inf - inf = NaN. In fp32 the same logits are an
            ordinary one-hot row and the loss does not move. Every step is skipped, so the weights freeze in the state
            that overflows: NaN "ever since". The loss scale halves at each of them, in vain: it multiplies the loss,
            and this inf is born in the forward.
Cure        An fp32 island from q @ k^T to the softmax; or V2's attention (cosine, times a scale that is clamped at
            100), whose logits cannot overflow; or bf16. Warm-up, clipping and a lower rate keep the logits small.
Tried, no   Waiting for the loss scale to settle. "--amp-opt-level O3" or "bf16" (neither exists there). Searching the
            gradients between backward() and step(): they still carry the loss scale, and a healthy step shows inf too.
Evidence    V1's and V2's attention distilled (windows of 4, shift 2, -100 mask, relative bias, pre-norm). No thread
            says which operation it was in Swin-L: this is the mechanism that fits "NaN for ever after". A learning rate
            of 0.2 makes the logits grow in seconds; that growth runs in fp32, where fp16 is emulated and slow.
Run         python failures/swin_attention_overflow.py
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from amp_policy import keep_fp32
from failures.loops import BF16, F16, F32, NAMES, Case, around, bare, guarded, images, show
from optim import ClippedAdamW

CALM = 3e-2  # the rate of the cured runs, which go on from the grown weights


class AttentionV1(nn.Module):
    """(windows, N, D). `island`: logits and softmax in fp32, whatever autocast says."""

    def __init__(self, dim: int, heads: int, window: int = 4):
        super().__init__()
        self.heads, self.island, self.seen = heads, False, 0.0
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.bias = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        at = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        apart = at[:, :, None] - at[:, None] + window - 1
        self.register_buffer("index", apart[0] * (2 * window - 1) + apart[1])

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        return (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1) + self.bias[self.index].permute(2, 0, 1)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        W, N, D = x.shape
        q, k, v = self.qkv(x).view(W, N, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        if self.island:
            with torch.autocast("cpu", enabled=False):
                weights = self.weights(q.float(), k.float(), mask)
        else:
            weights = self.weights(q, k, mask)
        return self.proj((weights.to(v.dtype) @ v).transpose(1, 2).reshape(W, N, D))

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        logits = self.logits(q, k)
        self.seen = float(logits.detach().abs().max())
        if mask is not None:  # -100, as upstream: no infinity of their own making
            logits = (logits.unflatten(0, (-1, len(mask))) + mask[:, None]).flatten(0, 1)
        return logits.softmax(-1)


class AttentionV2(AttentionV1):
    """The authors' own answer: cosine of q and k, times at most 100, in fp32."""

    def __init__(self, dim: int, heads: int):
        super().__init__(dim, heads)
        self.tau = nn.Parameter(torch.full((heads, 1, 1), 10.0).log())

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        cosine = F.normalize(q.float(), dim=-1) @ F.normalize(k.float(), dim=-1).transpose(-2, -1)
        bias = 16 * torch.sigmoid(self.bias[self.index].permute(2, 0, 1))
        return cosine * self.tau.clamp(max=torch.tensor(100.0).log()).exp() + bias


class Block(nn.Module):
    def __init__(self, attention: type, dim: int, shift: int):
        super().__init__()
        self.shift, self.v2 = shift, attention is AttentionV2
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = attention(dim, 2)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        if self.v2:  # res-post-norm: a branch starts at 0
            nn.init.zeros_(self.norm1.weight)
            nn.init.zeros_(self.norm2.weight)
        side = torch.zeros(8, 8)
        side[:, -shift:] += 1
        side[-shift:] += 2
        side = windows(side[None, :, :, None]).squeeze(-1)  # 4, 16
        self.register_buffer("mask", (side[:, None] != side[:, :, None]) * -100.0 if shift else None)

    def forward(self, x: Tensor) -> Tensor:
        def mix(x: Tensor) -> Tensor:
            w = self.attn(windows(x.roll((-self.shift, -self.shift), (1, 2))), self.mask)
            return windows(w, back=True).roll((self.shift, self.shift), (1, 2))

        x = x + (self.norm1(mix(x)) if self.v2 else mix(self.norm1(x)))
        return x + (self.norm2(self.mlp(x)) if self.v2 else self.mlp(self.norm2(x)))


def windows(x: Tensor, back: bool = False) -> Tensor:
    """(B, 8, 8, D) -> (B * 4, 16, D), and back."""
    if back:
        return x.view(-1, 2, 2, 4, 4, x.shape[-1]).transpose(2, 3).reshape(-1, 8, 8, x.shape[-1])
    return x.view(-1, 2, 4, 2, 4, x.shape[-1]).transpose(2, 3).reshape(-1, 16, x.shape[-1])


class Swin(nn.Module):
    def __init__(self, attention: type = AttentionV1, dim: int = 32):
        super().__init__()
        self.patch, self.norm, self.head = nn.Conv2d(3, dim, 4, 4), nn.LayerNorm(dim), nn.Linear(dim, 10)
        self.blocks = nn.ModuleList(Block(attention, dim, shift) for shift in (0, 2))

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, dict]:
        x = self.patch(images).permute(0, 2, 3, 1)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x).mean((1, 2))).float(), labels), {}

    def largest_logit(self) -> float:
        return max(block.attn.seen for block in self.blocks)


def grown(net: Swin, lr: float, x: Tensor, y: Tensor, steps: int, until: float = 60000.0) -> tuple[int, float]:
    """Train in fp32, no clipping, no warm-up; stop when a logit passes `until`. (steps, largest logit)."""
    optimizer, top = torch.optim.AdamW(net.parameters(), lr, weight_decay=0.0), 0.0
    for step in range(1, steps + 1):
        at = step * 32 % len(x)
        optimizer.zero_grad()
        net(x[at:at + 32], y[at:at + 32])[0].backward()
        optimizer.step()
        top = max(top, net.largest_logit())
        if top > until:
            break
    return step, top


def case(steps: int = 40, growth: int = 600) -> Case:
    x, y = images(256)
    out, lr = Case("Swin, V1 attention"), 0.2
    torch.manual_seed(0)
    warm, calm, v2 = Swin(), Swin(), Swin(AttentionV2)
    fresh = copy.deepcopy(warm)
    made, top = grown(warm, lr, x, y, growth)
    _, top_calm = grown(calm, 1e-3, x, y, made)
    _, top_v2 = grown(v2, lr, x, y, made)
    out.notes.append(f"largest logit after {made} steps: V1 at lr {lr:g} {top:.3g}, V2 at the same lr {top_v2:.3g}, "
                     f"V1 at lr 1e-3 {top_calm:.3g}; fp16 ends at 65504")
    out.claim("the logits of V1 grow by training alone, those of V2 cannot", top > 60000 and top_v2 < 120)
    batches = around([(x[i:i + 8], y[i:i + 8]) for i in range(0, 32, 8)], steps)

    for dtype in (F16, BF16, F32):
        net = copy.deepcopy(warm)
        published = bare(net, batches, dtype, torch.optim.AdamW(net.parameters(), lr, weight_decay=0.0))
        net = copy.deepcopy(warm)
        run = guarded(net, batches, dtype, ClippedAdamW(net.parameters(), lr, weight_decay=0.0, clip=None))
        fixed = copy.deepcopy(warm)
        for block in fixed.blocks:
            block.attn.island = True
        cured = guarded(fixed, batches, dtype, ClippedAdamW(fixed.parameters(), CALM, clip=1.0))
        out.rows.append((NAMES[dtype], published, run, cured))
        out.claim(f"{NAMES[dtype]}: the cure trains", cured.trains)
        if dtype is F16:
            dead = next((i for i, loss in enumerate(reversed(published.losses)) if loss == loss), steps)
            out.notes.append(f"as published: first NaN at step {published.first}, nothing else in the last {dead} of "
                             f"{steps} steps; loss scale 65536 -> {published.scale:g}, weights finite and frozen")
            out.claim("fp16 breaks as published: NaN for ever after, the scale falls, the weights are not NaN",
                      dead >= steps // 3 and published.scale < 1 and not published.sick)
            out.claim("the guard names the attention's product, and the weights stay finite", run.report is not None
                      and run.report.verdict == "precision" and "bmm" in run.report.op
                      and run.report.module.endswith(".attn") and not run.sick)
            out.notes += ["  " + line for line in str(run.report).splitlines()[:3]]
            keep_fp32(net, [run.report.module])
            healed = guarded(net, batches, dtype, ClippedAdamW(net.parameters(), CALM, clip=1.0))
            out.notes.append(f"keep_fp32(net, ['{run.report.module}']) on the unchanged model: {healed}")
            out.claim("keep_fp32 of that module mends the unchanged model", healed.trains)
            other = guarded(v2, batches[:8], dtype, ClippedAdamW(v2.parameters(), 1e-3, clip=1.0))
            out.notes.append(f"V2 after the same ordeal: {other}"
                             + (" (its values, which nothing bounds before their norm)" if other.first else ""))
            out.claim("V2: it is not the logits that overflow", not other.first or other.report.module[-4:] == "proj")
        else:
            out.claim(f"{NAMES[dtype]} has the range: finite as published", not published.first and not run.first)

    # The write-up's diagnosis, layer by layer, on a healthy network whose loss scale has grown for a while.
    inf = {}
    for scale in (2.0**22, 1.0):
        fresh.zero_grad()
        with torch.autocast("cpu", F16):
            loss, _ = fresh(*batches[0])
        (loss * scale).backward()
        inf[scale] = sum(not bool(p.grad.isfinite().all()) for p in fresh.parameters())
    out.notes.append(f"a healthy step searched for inf before unscaling: {inf[2.0**22]} gradients of "
                     f"{len(list(fresh.parameters()))} at loss scale 2^22, {inf[1.0]} at 1, where the autopsy looks")
    out.claim("scaled gradients overflow in a healthy step, unscaled ones do not", inf[2.0**22] > 0 and inf[1.0] == 0)
    return out


if __name__ == "__main__":
    sys.exit(show(case()))
