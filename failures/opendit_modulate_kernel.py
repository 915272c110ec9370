"""
OpenDiT: a fused kernel that is right for one sample

Reported    NUS-HPC-AI-Lab/VideoSys issue 74: DiT on CIFAR-10, the loss falls normally and turns NaN around epoch 5, in
            fp16 and in bf16. Usually told as "1000 classes for 10 make probabilities tiny; use bf16; set num_classes".
First bad   the first forward, in the modulate of block 0: finite, and wrong. The loss explodes hundreds of steps later.
Why         x * (1 + scale) + shift, a scale and a shift per sample. The kernel took the sample from the number of its
            *block* of rows, block // tokens * BLOCK, instead of row // tokens. One sample: 0, which is right. With 36,
            nearly all get sample 0's. The backward uses the same wrong row for dx but books the scale's gradient on the
            right sample: it is the gradient of no function, and the optimizer follows it uphill.
Cure        row // tokens, or the kernel switched off (upstream it is an option). Before step 1: a check with a batch.
Tried, no   bf16, fp32: arithmetic is innocent. Clipping tames the explosion, not the error. num_classes: labels go
            through a lookup table, there is no softmax over classes, and unused rows move by exactly 0. It matters for
            sampling (the null class is row num_classes) and with fp16 weights under AdamW, whose 0/0 hits those rows.
Evidence    The kernel's indexing and its backward, emulated in torch (the kernel is Triton), in a small pixel DiT. The
            maintainers confirmed wrong pointers for batches above 1 (issue 119); its unit test used a batch of 1.
Run         python failures/opendit_modulate_kernel.py
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from failures.loops import BF16, F32, NAMES, Case, bare, guarded, images, show
from optim import ClippedAdamW

BLOCK = 16  # rows of x that one program of the kernel handles


def rows_of(x: Tensor, fixed: bool) -> Tensor:
    """For each row of x.view(B * T, D), the sample whose scale and shift it gets."""
    B, T, _ = x.shape
    row = torch.arange(B * T)
    return row // T if fixed else row // BLOCK // T * BLOCK


class FusedModulate(torch.autograd.Function):
    """x (B, T, D), scale and shift (B, D) -> x * (1 + scale) + shift, with upstream's pointers."""

    @staticmethod
    def forward(ctx, x, scale, shift, fixed):
        rows = rows_of(x, fixed)
        ctx.save_for_backward(x, scale)
        ctx.fixed = fixed
        return x * (1 + scale[rows].view_as(x)) + shift[rows].view_as(x)

    @staticmethod
    def backward(ctx, g):
        x, scale = ctx.saved_tensors
        return g * (1 + scale[rows_of(x, ctx.fixed)].view_as(x)), (g * x).sum(1), g.sum(1), None


class Modulate(nn.Module):
    def __init__(self, fixed: bool):
        super().__init__()
        self.fixed = fixed

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return FusedModulate.apply(x, scale.to(x.dtype), shift.to(x.dtype), self.fixed)


# --- the two checks that need no training


def gradient_check(fixed: bool, samples: int) -> bool:
    """Is the backward the derivative of the forward? Odd sizes, fp64: 5 tokens are no multiple of BLOCK."""
    g = torch.Generator().manual_seed(0)
    x, scale, shift = (torch.randn(s, generator=g, dtype=torch.float64, requires_grad=True)
                       for s in ((samples, 5, 3), (samples, 3), (samples, 3)))
    return torch.autograd.gradcheck(lambda *t: FusedModulate.apply(*t, fixed), (x, scale, shift), raise_exception=False)


@torch.no_grad()
def batch_check(net: nn.Module, batch: tuple[Tensor, ...]) -> str:
    """The first module whose output for a sample depends on the other samples; "" if none. Wants no reference.

    On a copy with every parameter redrawn: adaLN-Zero starts all scales at 0, where the wrong one is right by chance.
    """
    net, outputs = copy.deepcopy(net).eval(), []
    for p in net.parameters():
        p.normal_(std=0.1, generator=torch.Generator().manual_seed(p.numel()))
    for name, module in net.named_modules():
        module.register_forward_hook(lambda m, args, out, name=name: outputs.append((name, out)))
    net(*(t[:4] for t in batch))
    together = outputs[:]
    outputs.clear()
    net(*(t[3:4] for t in batch))
    return next((f"{name}, off by {(a[3] - b[0]).abs().max():.2g}" for (name, a), (_, b) in
                 zip(together, outputs, strict=True) if isinstance(a, Tensor) and a.dim() and len(a) == 4
                 and not torch.allclose(a[3], b[0], rtol=1e-4, atol=1e-4)), "")


# --- the model


class Block(nn.Module):
    def __init__(self, dim: int, fixed: bool):
        super().__init__()
        self.ada, self.modulate1, self.modulate2 = nn.Linear(dim, 6 * dim), Modulate(fixed), Modulate(fixed)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        nn.init.zeros_(self.ada.weight)  # adaLN-Zero
        nn.init.zeros_(self.ada.bias)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        B, T, D = x.shape
        shift1, scale1, gate1, shift2, scale2, gate2 = self.ada(F.silu(c)).chunk(6, -1)
        h = self.modulate1(F.layer_norm(x.float(), (D,)), scale1, shift1)
        q, k, v = self.qkv(h).view(B, T, 3, 2, D // 2).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, D)
        x = x + gate1[:, None] * self.proj(h)
        return x + gate2[:, None] * self.mlp(self.modulate2(F.layer_norm(x.float(), (D,)), scale2, shift2))


class DiT(nn.Module):
    """8x8 images, 16 patches of 2x2: predicts the noise. Class num_classes is the null class."""

    def __init__(self, fixed: bool, num_classes: int = 10, dim: int = 32, depth: int = 4):
        super().__init__()
        self.patch, self.out = nn.Linear(12, dim), nn.Linear(dim, 12)
        self.place = nn.Parameter(torch.randn(16, dim) * 0.02)
        self.time = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.label = nn.Embedding(num_classes + 1, dim)
        self.blocks = nn.ModuleList(Block(dim, fixed) for _ in range(depth))
        self.ada, self.modulate = nn.Linear(dim, 2 * dim), Modulate(fixed)
        for zero in (self.out, self.ada):
            nn.init.zeros_(zero.weight)
            nn.init.zeros_(zero.bias)

    def forward(self, noisy: Tensor, labels: Tensor, t: Tensor, noise: Tensor) -> tuple[Tensor, dict]:
        x = self.patch(F.unfold(noisy, 2, stride=2).transpose(1, 2)) + self.place
        f = t[:, None] * torch.logspace(0, -4, self.place.shape[1] // 2)
        c = self.time(torch.cat([f.cos(), f.sin()], -1)) + self.label(labels)
        for block in self.blocks:
            x = block(x, c)
        scale, shift = self.ada(F.silu(c)).chunk(2, -1)
        x = self.out(self.modulate(F.layer_norm(x.float(), x.shape[-1:]), scale, shift))
        return F.mse_loss(x.float(), F.unfold(noise, 2, stride=2).transpose(1, 2)), {}


def diffusion(steps: int, size: int = 36) -> list[tuple[Tensor, ...]]:
    """(noisy, labels, t, noise) of synthetic images shrunk to 8x8, linear betas, T = 1000."""
    x, y = images(512)
    x, g = F.avg_pool2d(x, 4) * 2, torch.Generator().manual_seed(0)
    alpha = (1 - torch.linspace(1e-4, 2e-2, 1000)).cumprod(0)
    batches = []
    for _ in range(steps):
        at, t = torch.randint(len(x), (size,), generator=g), torch.randint(1000, (size,), generator=g)
        noise, a = torch.randn(size, *x.shape[1:], generator=g), alpha[t].view(-1, 1, 1, 1)
        batches.append((a.sqrt() * x[at] + (1 - a).sqrt() * noise, y[at], t.float(), noise))
    return batches


def mean(losses: list[float], last: int = 25) -> float:
    return sum(losses[-last:]) / last


def exploded(losses: list[float]) -> int:
    """The first step whose loss is over 5 times the lowest 25-step mean so far, and over the start's; 0 if none."""
    lowest = losses[0]
    for step in range(25, len(losses)):
        lowest = min(lowest, mean(losses[step - 25:step]))
        if not losses[step] <= max(5 * lowest, losses[0]):
            return step + 1
    return 0


def case(steps: int = 300, dtypes: tuple = (F32, BF16)) -> Case:
    batches, lr = diffusion(steps), 1e-2
    out = Case("OpenDiT, modulate")
    torch.manual_seed(0)
    broken, fixed, many = DiT(fixed=False), DiT(fixed=True), DiT(fixed=True, num_classes=1000)
    fixed.load_state_dict(broken.state_dict())
    for name, p in many.named_parameters():
        p.data[:11].copy_(fixed.get_parameter(name)) if name == "label.weight" else p.data.copy_(
            fixed.get_parameter(name))
    right, wrong = ([gradient_check(f, n) for n in (1, 2)] for f in (True, False))
    found = batch_check(broken, batches[0])
    out.notes.append(f"gradient check of the kernel: 1 sample {'passes' if wrong[0] else 'fails'}, 2 samples "
                     f"{'pass' if wrong[1] else 'fail'}; cured: {'passes' if all(right) else 'fails'}")
    out.claim("with one sample the kernel passes its gradient check, with two it fails; cured it passes both",
              wrong == [True, False] and right == [True, True])
    out.claim("before step 1 the batch check names the modulate of block 0, and nothing in the cured model",
              found.startswith("blocks.0.modulate1,") and not batch_check(fixed, batches[0]))

    for dtype in dtypes:
        net = copy.deepcopy(broken)
        published = bare(net, batches, dtype, torch.optim.AdamW(net.parameters(), lr, weight_decay=0.0))
        net = copy.deepcopy(broken)
        run = guarded(net, batches, dtype, ClippedAdamW(net.parameters(), lr, weight_decay=0.0, clip=None))
        net = copy.deepcopy(fixed)
        cured = guarded(net, batches, dtype, ClippedAdamW(net.parameters(), lr, weight_decay=0.0, clip=None))
        lowest = min(mean(published.losses[:i]) for i in range(25, steps))
        at = exploded(published.losses)
        bang = f"loss {lowest:.2g}, then {max(published.losses[25:]):.3g} @ {at}" if at else str(published)
        out.rows.append((NAMES[dtype], bang, f"before step 1: {found}", cured))
        spikes = [s for s in run.spikes if ": loss" in s]
        out.notes.append(f"{NAMES[dtype]}, guarded but not stopped: {(spikes or run.spikes or ['no spike'])[0]}; mean "
                         f"loss at the end {mean(run.losses):.3g}, cured {mean(cured.losses):.3g}")
        if dtype is F32:
            net = copy.deepcopy(broken)
            clipped = guarded(net, batches, dtype, ClippedAdamW(net.parameters(), lr, weight_decay=0.0, clip=1.0))
            out.notes.append(f"clipped at 1.0: mean loss at the end {mean(clipped.losses):.3g}")
            out.claim("clipping does not cure", mean(clipped.losses) > 1.3 * mean(cured.losses))
        out.claim(f"{NAMES[dtype]}: falls, then explodes as published", at > 50 or published.first > 50)
        out.claim(f"{NAMES[dtype]}: the spike is told, the weights stay finite", bool(run.spikes) and not run.sick)
        out.claim(f"{NAMES[dtype]}: the cure trains below it", cured.trains and not exploded(cured.losses)
                  and mean(cured.losses) < 0.7 * mean(run.losses))

    rows = many.label.weight.detach()[11:].clone()
    few, lots = (mean(bare(net, batches[:150], F32, torch.optim.AdamW(net.parameters(), lr, weight_decay=0.0)).losses)
                 for net in (fixed, many))
    moved = (many.label.weight.detach()[11:] - rows).abs().max().item()
    out.notes.append(f"cured, 150 steps: 10 classes {few:.4f}, 1000 classes {lots:.4f}; "
                     f"the 990 unused rows moved by {moved:g}")
    out.claim("the number of classes is innocent", moved == 0 and abs(few - lots) < 0.02)
    table = nn.Embedding(1001, 8).half()
    table(batches[0][1]).float().square().sum().backward()
    torch.optim.AdamW(table.parameters(), lr, foreach=True).step()
    lost = table.weight[10:].isnan().all(1).sum().item()
    out.notes.append(f"where it matters: {lost} of 991 unused rows are NaN after one AdamW step on fp16 weights")
    out.claim("fp16 weights under AdamW lose the unused rows", lost == 991)
    return out


if __name__ == "__main__":
    sys.exit(show(case()))
