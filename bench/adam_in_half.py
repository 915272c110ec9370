"""
Six ways to give Adam half-precision weights, on one small auto-encoder: what TRELLIS teaches.

    python bench/adam_in_half.py               # under a minute on two CPU cores

A user of TRELLIS (microsoft/TRELLIS, issue 162) loaded fp16 weights and handed them to torch.optim.AdamW: every
gradient finite, every weight NaN after one step. This is that model in miniature: 48-number patches, Linear, two
transformer blocks, a bottleneck of 8, two more blocks, Linear, L1 loss, synthetic images; the blocks' weights and their
gradients are fp16. The arithmetic between them is fp32, so that nothing but the optimizer differs between the rows (and
so that a CPU, whose fp16 products are slow, can follow). All rows start from the same weights and see the same batches.

    final L1       mean over the last 20 batches
    moved          share of the blocks' weights that are finite and differ from their start
    10 updates     distance travelled in ten updates / fp32's (2-norm over the blocks' weights)
    first step     |first update| / fp32's, weight by weight: 5 % quantile, median, 95 % quantile. It is read from the
                   stored weights, so even a perfect fp16 row carries the rounding of the weight
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bench.record import header, write  # noqa: E402
from optim import ClippedAdamW  # noqa: E402

LR, EPS = 1e-4, 1e-8
ROWS = {  # name: half weights, options; "masters" is ours, all others torch.optim.AdamW
    "fp32": (False, dict(foreach=True)),
    "fp16 naive": (True, dict(foreach=True)),
    "fp16 eps=1e-4": (True, dict(foreach=True, eps=1e-4)),
    "fp16 eps=1e-4 amsgrad": (True, dict(foreach=True, eps=1e-4, amsgrad=True)),
    "fp16 fused": (True, dict(fused=True)),
    "fp16 masters (ours)": (True, None),
}


class Linear(nn.Linear):
    """Weights in any dtype, arithmetic in fp32: the cast's backward hands the gradient over in the weights' dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.float(), self.bias.float())


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.qkv, self.out = Linear(width, 3 * width), Linear(width, width)
        self.up, self.down = Linear(width, 4 * width), Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, N, D = x.shape
        q, k, v = self.qkv(F.layer_norm(x, (D,))).view(B, N, 3, 4, D // 4).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, D))
        return x + self.down(F.gelu(self.up(F.layer_norm(x, (D,)))))


class AutoEncoder(nn.Module):
    """Patches (B, N, 48), fp32, to patches."""

    def __init__(self, width: int = 64, code: int = 8):
        super().__init__()
        self.inp, self.code = nn.Linear(48, width), nn.Linear(width, code)
        self.back, self.outp = nn.Linear(code, width), nn.Linear(width, 48)
        self.encoder, self.decoder = (nn.Sequential(Block(width), Block(width)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.code(F.layer_norm(self.encoder(self.inp(x)), (64,)))
        return self.outp(F.layer_norm(self.decoder(self.back(h)), (64,)))


def batches(steps: int, device: torch.device):
    """Smooth random 32x32 images as 64 patches of 4x4x3: a few waves each, so that 8 numbers a patch can hold them."""
    g = torch.Generator().manual_seed(1)
    for _ in range(steps):
        coarse = torch.randn(16, 3, 6, 6, generator=g)
        image = F.interpolate(coarse, size=32, mode="bicubic")
        yield F.unfold(image, 4, stride=4).transpose(1, 2).to(device)  # B, 64, 48


def train(start: AutoEncoder, half: bool, options: dict | None, steps: int, device: torch.device) -> dict:
    """One row: losses per step, and the blocks' weights (fp32 copies) after 0, 1, 10 and all updates."""
    net = copy.deepcopy(start)
    if half:
        net.encoder.half()
        net.decoder.half()
    blocks = [*net.encoder.parameters(), *net.decoder.parameters()]
    scale = torch.tensor(1.0 if options else 2.0**16, device=device)  # the naive rows use no loss scale, as reported
    if options is None:
        optimizer = ClippedAdamW(net.parameters(), LR, eps=EPS, weight_decay=0.0, clip=None, masters=True)
    else:
        optimizer = torch.optim.AdamW(net.parameters(), LR, weight_decay=0.0, **({"eps": EPS} | options))

    def weights() -> Tensor:
        return torch.cat([p.detach().float().flatten() for p in blocks])

    row = {0: weights(), "losses": []}
    for i, x in enumerate(batches(steps, device), 1):
        loss = (net(x) - x).abs().mean()
        (loss * scale).backward()
        if options is None:
            optimizer.step(grad_scale=scale)
        else:
            optimizer.step()
        optimizer.zero_grad()
        row["losses"].append(loss.item())
        if i in (1, 10, steps):
            row[i] = weights()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    args = parser.parse_args()
    if args.steps < 10:
        parser.error("--steps: at least 10")
    device = torch.device(args.device)
    torch.manual_seed(0)
    start = AutoEncoder().to(device)
    table = {}
    print(f"{'AdamW, lr 1e-4':24} {'final L1':>9} {'moved':>8} {'10 updates':>11}   first step: 5 %, median, 95 %")
    for name, (half, options) in ROWS.items():
        row = train(start, half, options, args.steps, device)
        if name == "fp32":
            first, ten = (row[1] - row[0]).abs(), (row[10] - row[0]).norm()
        step = ((row[1] - row[0]).abs() / first)[first > LR / 2]  # where the gradient is not 0
        quantiles = step.sort().values[[int(q * (len(step) - 1)) for q in (0.05, 0.5, 0.95)]].tolist()
        moved = (torch.isfinite(row[args.steps]) & (row[args.steps] != row[0])).float().mean().item()
        final = sum(row["losses"][-20:]) / len(row["losses"][-20:])
        travelled = ((row[10] - row[0]).norm() / ten).item()
        print(f"{name:24} {final:9.4f} {moved:8.1%} {travelled:11.3g}   " + "  ".join(f"{q:.3g}" for q in quantiles))
        numbers = [final, travelled, *quantiles]
        final, travelled, *quantiles = (n if math.isfinite(n) else str(n) for n in numbers)  # JSON has no NaN
        table[name] = {"final_l1": final, "moved": moved, "ten_updates": travelled, "first_step": quantiles}
    write(header("adam_in_half", vars(args), device) | {"rows": table}, args.results, device)


if __name__ == "__main__":
    main()
