"""
OpenDiT: a fused kernel that is right for one sample

Reported    NUS-HPC-AI-Lab/VideoSys issue 74: DiT on CIFAR-10. The loss falls normally and becomes
            NaN around epoch 5, in fp16 and in bf16. The usual story: "1000 classes for 10 make
            probabilities tiny; use bf16; set num_classes".
First bad   The first forward, in the modulate of block 0: its output is finite and wrong. The loss
            explodes later, here at step 66.
Why         x * (1 + scale) + shift has one scale and one shift for each sample. The kernel computed
            the sample from the number of its *block* of rows, block // tokens * BLOCK, instead of
            row // tokens. With one sample the result is 0, which is right. With 36 samples nearly
            all of them get the scale of sample 0. The backward uses the same wrong row for dx, but
            adds the gradient of the scale to the right sample. So it is the gradient of no
            function, and the optimizer follows it uphill.
Cure        row // tokens, or the kernel switched off (upstream it is an option). Before step 1: a
            gradient check with two samples, which needs no reference implementation.
Tried, no   bf16 and fp32: precision is not the cause, fp16 only turns the explosion into NaN.
            Clipping: the direction is wrong, whatever its length. num_classes: labels go through a
            lookup table, there is no softmax over classes, and unused rows move by exactly 0.
            num_classes matters for sampling (the null class is row num_classes) and for fp16
            weights under AdamW, whose 0/0 destroys the unused rows.
Evidence    The kernel's indexing and its backward, emulated in torch (the kernel is Triton), in a
            small pixel DiT. The maintainers confirmed wrong pointers for batches above 1 (issue
            119). Their unit test used a batch of 1.
Margin      In fp32 the loss falls to 0.16 (below 0.5 is claimed), passes 1 at step 66 (after 25 is
            claimed) and reaches 6. Cured, no loss after step 25 is above 0.34 (1), and the last 25
            average 0.16 (0.3). Clipped, the broken kernel ends at 70 times the cured loss or more
            (1.3). Measured on torch 2.9.1 and 2.15 with AVX512, and on 2.15 with SSE4.1.
Run         python failures/opendit_modulate_kernel.py
"""

import copy
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from failures.loops import BF16, F16, F32, NAMES, Case, bare, guarded, images, show

BLOCK = 16  # rows of x that one program of the kernel handles
LR = 2e-2


class FusedModulate(torch.autograd.Function):
    """x (B, T, D), scale and shift (B, D) -> x * (1 + scale) + shift, with upstream's pointers
    unless `fixed`.
    """

    @staticmethod
    def forward(ctx, x, scale, shift, fixed):
        B, T, _ = x.shape
        row = torch.arange(B * T)
        sample = (row // T if fixed else row // BLOCK // T * BLOCK).view(B, T)
        ctx.save_for_backward(x, scale, sample)
        return x * (1 + scale[sample]) + shift[sample]

    @staticmethod
    def backward(ctx, g):
        x, scale, sample = ctx.saved_tensors
        return g * (1 + scale[sample]), (g * x).sum(1), g.sum(1), None


class Modulate(nn.Module):
    fixed = False

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return FusedModulate.apply(x, scale.to(x.dtype), shift.to(x.dtype), self.fixed)


class Block(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.ada = nn.Linear(dim, 6 * dim)
        self.modulate1 = Modulate()
        self.modulate2 = Modulate()
        self.attn = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        nn.init.zeros_(self.ada.weight)  # adaLN-Zero
        nn.init.zeros_(self.ada.bias)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.ada(F.silu(c)).chunk(6, -1)
        h = self.modulate1(F.layer_norm(x, x.shape[-1:]), scale1, shift1)
        x = x + gate1[:, None] * self.attn(h, h, h, need_weights=False)[0]
        return x + gate2[:, None] * self.mlp(
            self.modulate2(F.layer_norm(x, x.shape[-1:]), scale2, shift2)
        )


class DiT(nn.Module):
    """Predicts the noise in 8x8 images of 16 patches, 2x2 each. Class num_classes is the null
    class.

    Its images (B, 6, 8, 8) are the noisy image and its noise, its labels (B, 2) the class and the
    time.
    """

    def __init__(self, num_classes: int = 10, dim: int = 32, depth: int = 4):
        super().__init__()
        self.patch = nn.Linear(12, dim)
        self.out = nn.Linear(dim, 12)
        self.place = nn.Parameter(torch.randn(16, dim) * 0.02)
        self.time = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.label = nn.Embedding(num_classes + 1, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.ada = nn.Linear(dim, 2 * dim)
        self.modulate = Modulate()
        for layer in (self.ada, self.out):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, dict]:
        # B, 3, 8, 8 each; B each
        noisy, noise = images.chunk(2, 1)
        classes, t = labels.unbind(1)
        x = self.patch(F.unfold(noisy, 2, stride=2).transpose(1, 2)) + self.place
        f = t[:, None] * torch.logspace(0, -4, self.place.shape[1] // 2)
        c = self.time(torch.cat([f.cos(), f.sin()], -1)) + self.label(classes)
        for block in self.blocks:
            x = block(x, c)
        x = self.out(
            self.modulate(F.layer_norm(x, x.shape[-1:]), *self.ada(F.silu(c)).chunk(2, -1))
        )
        return F.mse_loss(x.float(), F.unfold(noise, 2, stride=2).transpose(1, 2)), {}


def diffusion(steps: int, size: int = 36) -> list[tuple[Tensor, ...]]:
    """Images and labels as DiT takes them, of synthetic images shrunk to 8x8, linear betas, T =
    1000.
    """
    x, y = images(512)
    x, alpha = F.avg_pool2d(x, 4) * 2, (1 - torch.linspace(1e-4, 2e-2, 1000)).cumprod(0)
    torch.manual_seed(0)
    batches = []
    for _ in range(steps):
        at = torch.randint(len(x), (size,))
        t = torch.randint(1000, (size,))
        noise = torch.randn(size, *x.shape[1:])
        a = alpha[t].view(-1, 1, 1, 1)
        noisy = a.sqrt() * x[at] + (1 - a).sqrt() * noise
        batches.append((torch.cat([noisy, noise], 1), torch.stack([y[at], t], 1)))
    return batches


def gradient_check(net: nn.Module, samples: int) -> str:
    """The first modulate whose backward is not the derivative of its forward; "" if there is none.

    In fp64, with 5 tokens, which do not divide BLOCK. A wrong forward whose backward agrees with it
    would pass.
    """
    torch.manual_seed(0)
    shapes = (samples, 5, 3), (samples, 3), (samples, 3)
    inputs = tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    return next(
        (
            name
            for name, module in net.named_modules()
            if isinstance(module, Modulate)
            and not torch.autograd.gradcheck(module, inputs, raise_exception=False)
        ),
        "",
    )


def exploded(losses: list[float]) -> int:
    """The first step after the 25th with a loss above 1 (that of an untrained model) or NaN; 0 if
    none.
    """
    return next((step for step, loss in enumerate(losses, 1) if step > 25 and not loss <= 1), 0)


def mean(losses: list[float], last: int = 25) -> float:
    return sum(losses[-last:]) / last


def case(steps: int = 200, dtypes: tuple = (F32, F16, BF16)) -> Case:
    batches = diffusion(steps)
    out = Case("OpenDiT, modulate")
    torch.manual_seed(0)
    broken = DiT()
    fixed = copy.deepcopy(broken)
    for module in fixed.modules():
        module.fixed = True
    found = gradient_check(broken, 2)
    out.claim(
        "before step 1 a gradient check with two samples names the first modulate",
        found == "blocks.0.modulate1",
    )
    out.claim(
        "with one sample it passes, as upstream's unit test did; cured it passes with two",
        not gradient_check(broken, 1) and not gradient_check(fixed, 2),
    )

    named = f"before step 1: the gradient of {found}" if found else "nothing"
    for dtype in dtypes:
        name = NAMES[dtype]
        published = bare(broken, batches, dtype, LR)
        run = guarded(broken, batches, dtype, LR)
        at = exploded(published.losses)
        lowest = min(published.losses[:50])
        worst = max(loss for loss in published.losses[25:] if math.isfinite(loss))
        end = f"; {published}" if published.first else ""
        cured = guarded(fixed, batches, dtype, LR)
        out.row(name, f"loss {lowest:.2g}, over 1 @ {at}, then {worst:.3g}{end}", named, cured)
        out.notes.append(f"{name}, guarded without that check: {run}")
        out.claim(f"{name}: falls, then explodes as published", at and lowest < 0.5)
        out.claim(f"{name}: guarded, the weights stay finite", not run.sick)
        out.claim(
            f"{name}: cured, nothing explodes",
            not exploded(cured.losses) and mean(cured.losses) < 0.3,
        )

    clipped, cured = (mean(bare(net, batches, F32, LR, clip=1.0).losses) for net in (broken, fixed))
    out.notes.append(
        f"clipped at 1.0: mean loss at the end {clipped:.3g}, cured and clipped {cured:.3g}"
    )
    out.claim("clipping does not cure", clipped > 1.3 * cured)
    many = copy.deepcopy(fixed)
    many.label = nn.Embedding(1001, 32)
    many.label.weight.data[:11] = fixed.label.weight.data
    few, lots = (bare(net, batches[:60], F32, LR) for net in (fixed, many))
    moved = (lots.net.label.weight - many.label.weight)[11:].abs().max().item()
    out.notes.append(
        f"cured, 60 steps: 10 classes {mean(few.losses):.4f}, "
        f"1000 classes {mean(lots.losses):.4f}; the 990 unused rows moved by {moved:g}"
    )
    out.claim(
        "the number of classes is innocent",
        moved == 0 and abs(mean(few.losses) - mean(lots.losses)) < 0.02,
    )
    table = nn.Embedding(1001, 8).half()
    table(batches[0][1][:, 0]).float().square().sum().backward()
    torch.optim.AdamW(table.parameters(), LR, foreach=True).step()
    lost = table.weight[10:].isnan().all(1).sum().item()
    out.notes.append(
        f"where it matters: {lost} of 991 unused rows are NaN after one AdamW step on fp16 weights"
    )
    out.claim("fp16 weights under AdamW lose the unused rows", lost == 991)
    return out


if __name__ == "__main__":
    sys.exit(show(case()))
