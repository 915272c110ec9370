"""
Six ways to give Adam half-precision weights, on one small auto-encoder: what TRELLIS teaches.

    python bench/adam_in_half.py               # under a minute on two CPU cores

A user of TRELLIS (microsoft/TRELLIS, issue 162) loaded fp16 weights and handed them to
torch.optim.AdamW: every gradient finite, every weight NaN after one step. This is that model in
miniature: 48-number patches, Linear, two transformer blocks, a bottleneck of 8, two more blocks,
Linear, L1 loss, synthetic images; the blocks' weights and their gradients are fp16. The arithmetic
between them is fp32, so that nothing but the optimizer differs between the rows (and so that a CPU,
whose fp16 products are slow, can follow). All rows start from the same weights and see the same
batches.

    final L1       mean over the last 20 batches
    moved          share of the blocks' weights that are finite and differ from their start
    10 updates     distance travelled in ten updates / fp32's (2-norm over the blocks' weights)
    first step     |first update| / fp32's, weight by weight: 5 % quantile, median, 95 % quantile.
                   It is read from the stored weights, so even a perfect fp16 row carries the
                   rounding of the weight
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bench.record import header, write  # noqa: E402
from optim import ClippedAdamW  # noqa: E402

LR = 1e-4
ROWS = {  # name: half weights, options; "masters" is ours, all others torch.optim.AdamW
    "fp32": (False, dict(foreach=True)),
    "fp16 naive": (True, dict(foreach=True)),
    "fp16 eps=1e-4": (True, dict(foreach=True, eps=1e-4)),
    "fp16 eps=1e-4 amsgrad": (True, dict(foreach=True, eps=1e-4, amsgrad=True)),
    "fp16 fused": (True, dict(fused=True)),
    "fp16 masters (ours)": (True, dict(clip=None, masters=True)),
}


class Linear(nn.Linear):
    """Weights in any dtype, arithmetic in fp32: the cast's backward hands the gradient over in the
    weights' dtype."""

    def forward(self, x):
        return F.linear(x, self.weight.float(), self.bias.float())


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = Linear(width, 3 * width)
        self.out = Linear(width, width)
        self.up = Linear(width, 4 * width)
        self.down = Linear(4 * width, width)

    def forward(self, x):  # B, N, D
        heads = self.qkv(F.layer_norm(x, x.shape[-1:])).unflatten(2, (3, 4, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(F.layer_norm(x, x.shape[-1:]))))


def auto_encoder(width=64, code=8):
    """Patches (B, N, 48), fp32, to patches; the blocks are 1, 2 and 6, 7."""
    norm = nn.LayerNorm(width, elementwise_affine=False)
    return nn.Sequential(nn.Linear(48, width), Block(width), Block(width), norm,
                         nn.Linear(width, code), nn.Linear(code, width), Block(width), Block(width),
                         norm, nn.Linear(width, 48))


def batches(steps, device):
    """Smooth random 32x32 images as 64 patches of 4x4x3: a few waves each, so that 8 numbers a
    patch can hold them."""
    g = torch.Generator().manual_seed(1)
    for _ in range(steps):
        coarse = torch.randn(16, 3, 6, 6, generator=g)
        image = F.interpolate(coarse, size=32, mode="bicubic")
        yield F.unfold(image, 4, stride=4).transpose(1, 2).to(device)  # B, 64, 48


def train(start, half, options, steps, device):
    """Losses of each step, and the blocks' weights (fp32 copies) after 0, 1, 10 and all updates."""
    net = copy.deepcopy(start)
    blocks = [m for m in net if isinstance(m, Block)]
    for block in blocks if half else ():
        block.half()
    ours = "masters" in options
    scale = 2.0**16 if ours else 1.0  # the naive rows use no loss scale, as reported
    optimizer = (ClippedAdamW if ours else torch.optim.AdamW)(
        net.parameters(), LR, weight_decay=0.0, **options)
    optimizer.grad_scale = torch.tensor(scale, device=device) if ours else None

    def weights():
        flat = [p.detach().float().flatten() for block in blocks for p in block.parameters()]
        return torch.cat(flat)

    losses = []
    kept = {0: weights()}
    for i, x in enumerate(batches(steps, device), 1):
        loss = (net(x) - x).abs().mean()
        (loss * scale).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if i in (1, 10, steps):
            kept[i] = weights()
    return losses, kept


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    args = parser.parse_args()
    if args.steps < 10:
        parser.error("--steps: at least 10")
    device = torch.device(args.device)
    torch.manual_seed(0)
    start = auto_encoder().to(device)
    table = {}
    print("AdamW, lr 1e-4: final L1, moved, 10 updates; first step: 5 %, median, 95 %")
    for name, (half, options) in ROWS.items():
        losses, kept = train(start, half, options, args.steps, device)
        first = (kept[1] - kept[0]).abs()
        ten = (kept[10] - kept[0]).norm()
        last = kept[args.steps]
        if name == "fp32":
            exact = first, ten
        ratios = (first / exact[0])[exact[0] > LR / 2].sort().values  # where the gradient is not 0
        numbers = [
            sum(losses[-20:]) / len(losses[-20:]),
            (last.isfinite() & (last != kept[0])).float().mean().item(),
            (ten / exact[1]).item(),
            *(ratios[int(q * (len(ratios) - 1))].item() for q in (0.05, 0.5, 0.95)),
        ]
        print(f"{name:24}" + "".join(f" {n:9.4g}" for n in numbers))
        final, moved, travelled, *quantiles = (n if math.isfinite(n) else str(n) for n in numbers)
        table[name] = {"final_l1": final, "moved": moved, "ten_updates": travelled,
                       "first_step": quantiles}  # as text where JSON has no number
    write(header("adam_in_half", vars(args), device) | {"rows": table}, args.results, device)


if __name__ == "__main__":
    main()
