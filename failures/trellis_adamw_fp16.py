"""
TRELLIS: AdamW on half weights divides 0 by 0

Reported    microsoft/TRELLIS issue 162: fine-tuning the SLat VAE loaded as "..._fp16", gradients healthy (about 6e-6),
            all fp16 parameters NaN after one optimizer step. TripoSF 5, pytorch 147437: the same.
First bad   the first fp16 weight, written by the optimizer in step 1. Forward, backward and gradients are finite, so
            detect_anomaly sees nothing.
Why         step = m / (sqrt(v) + eps). fp16's smallest number is 5.96e-8, so eps = 1e-8 is exactly 0, and so is
            v = 0.001 * g^2 for |g| < 5.4e-3. What is left is m / 0: inf, and NaN where the gradient is 0.
Cure        fp32 master weights with fp32 moments, the fp16 copy written once a step. (TRELLIS itself does:
            "inflat_all", one flat fp32 master. A user's own loop has to do it too.) ClippedAdamW(..., masters=True).
Tried, no   eps=1e-4: no NaN, because v stays 0 and the step becomes lr * m / eps: far too small below g = 1e-4, far too
            large above; the table says how far the weights travel. amsgrad: the maximum of zeros. GradScaler: refuses
            half gradients. fused=True computes in fp32 and hides the NaN, but still stores v as 0, and the weights
            travel a thousand times too far. Clipping, a lower rate: 0/0 does not care.
Evidence    The VAE's structure distilled (fp32 input and output layers, fp16 blocks, fp32 norms), torch's own AdamW.
            The arithmetic between the fp16 weights is fp32 here, since a CPU emulates fp16; weights and gradients are
            fp16, which is all that the failure needs. bench/adam_in_half.py measures more.
Run         python failures/trellis_adamw_fp16.py
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from autopsy import Report
from failures.loops import F32, Case, Run, around, bare, guarded, images, non_finite, show
from optim import ClippedAdamW

LR = 1e-4


class Linear(nn.Linear):
    """Weights in any dtype, arithmetic in fp32: the cast's backward hands over the gradient in the weights' dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.float(), self.bias.float())


class Block(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.to_qkv, self.to_out = Linear(dim, 3 * dim), Linear(dim, dim)
        self.mlp = nn.Sequential(Linear(dim, 4 * dim), nn.GELU(), Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        B, N, D = x.shape
        q, k, v = self.to_qkv(F.layer_norm(x, (D,))).view(B, N, 3, 4, D // 4).permute(2, 0, 3, 1, 4)
        x = x + self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, D))
        return x + self.mlp(F.layer_norm(x, (D,)))


class VAE(nn.Module):
    """Images as 64 patches of 48 numbers, through 8 numbers a patch, and back."""

    def __init__(self, dim: int = 64, code: int = 8):
        super().__init__()
        self.input_layer, self.code = nn.Linear(48, dim), nn.Linear(dim, 2 * code)
        self.back, self.out_layer = nn.Linear(code, dim), nn.Linear(dim, 48)
        self.encoder, self.decoder = Block(dim), Block(dim)

    def convert_to_fp16(self) -> VAE:
        """What from_pretrained("..._fp16") does: the blocks' weights, nothing else."""
        for block in (self.encoder, self.decoder):
            block.half()
        return self

    def forward(self, images: Tensor, target: Tensor) -> tuple[Tensor, dict]:
        x = F.unfold(images, 4, stride=4).transpose(1, 2)
        h = self.encoder(self.input_layer(x))
        mean, log_variance = self.code(F.layer_norm(h, h.shape[-1:])).chunk(2, -1)
        kl = (mean.square() + log_variance.exp() - 1 - log_variance).mean() / 2
        h = self.decoder(self.back(mean + torch.randn_like(mean) * (log_variance / 2).exp()))
        out = self.out_layer(F.layer_norm(h, h.shape[-1:]))
        return (out - F.unfold(target, 4, stride=4).transpose(1, 2)).abs().mean() + 1e-6 * kl, {}


ROWS = {  # name: torch.optim.AdamW's options
    "fp16, AdamW": dict(foreach=True),
    "fp16, amsgrad": dict(foreach=True, amsgrad=True),
    "fp16, eps=1e-4": dict(foreach=True, eps=1e-4),
    "fp16, eps=1e-4, amsgrad": dict(foreach=True, eps=1e-4, amsgrad=True),
    "fp16, fused": dict(fused=True),
}


def travelled(net: VAE, start: VAE) -> float:
    """Distance that the blocks' weights have gone (2-norm)."""
    now, then = (torch.cat([p.detach().float().flatten() for b in (n.encoder, n.decoder) for p in b.parameters()])
                 for n in (net, start))
    return (now - then).norm().item()


def eps_on(size: float, steps: int = 100) -> float:
    """fp16 state with eps=1e-4 under gradients of about `size`: distance travelled / fp32's."""
    noise, ends = torch.Generator().manual_seed(0), []
    grads = (1 + 0.1 * torch.randn(steps, 256, generator=noise)) * size
    for dtype, eps in ((torch.float16, 1e-4), (F32, 1e-8)):
        w = torch.zeros(256, dtype=dtype)
        optimizer = torch.optim.AdamW([w], LR, eps=eps, weight_decay=0.0, foreach=True)
        for g in grads:
            w.grad = g.to(dtype)
            optimizer.step()
        ends.append(w.float().norm().item())
    return ends[0] / ends[1]


def refused(net: VAE, **options) -> str:
    """What our optimizer says to the unmodified model: it never starts."""
    try:
        ClippedAdamW(net.parameters(), LR, weight_decay=0.0, eps=options.get("eps", 1e-8))
    except ValueError as sentence:
        return str(sentence)
    return ""


def one_step_later(net: VAE, batches: list[tuple]) -> Report | None:
    """Half state forced on our loop, as an experiment: what does the autopsy say of step 2?"""
    optimizer = ClippedAdamW(net.parameters(), LR, weight_decay=0.0, clip=None, masters=False, fused=False)
    return guarded(net, batches, F32, optimizer).report


def case(steps: int = 60) -> Case:
    x, _ = images(64)
    batches = around([(x[i:i + 16], x[i:i + 16]) for i in range(0, 64, 16)], steps)
    out, far = Case("TRELLIS, VAE"), {}
    torch.manual_seed(0)
    start = VAE()
    half = copy.deepcopy(start).convert_to_fp16()

    def run(net: VAE, loop, optimizer) -> Run:
        torch.manual_seed(1)  # the reparametrisation's noise
        return loop(net, batches, F32, optimizer)

    net = copy.deepcopy(start)
    fp32 = run(net, bare, torch.optim.AdamW(net.parameters(), LR, weight_decay=0.0))
    full = travelled(net, start)
    net = copy.deepcopy(half)
    cured = run(net, guarded, ClippedAdamW(net.parameters(), LR, weight_decay=0.0, clip=None, masters=True))
    far["masters"] = travelled(net, half) / full
    for name, options in ROWS.items():
        net = copy.deepcopy(half)
        published = run(net, bare, torch.optim.AdamW(net.parameters(), LR, weight_decay=0.0, **options))
        far[name] = travelled(net, half) / full
        says = refused(net := copy.deepcopy(half), **options)
        out.rows.append((name, published if published.first else f"{published}; travels x{far[name]:.2g}",
                         f"refused: {says.split(';')[0].split(', so')[0]}", f"{cured}; travels x{far['masters']:.2g}"))
        same = all(torch.equal(p, q) for p, q in zip(net.parameters(), half.parameters(), strict=True))
        out.claim(f"{name}: refused before the first step, the weights untouched", bool(says) and same)
        if name in ("fp16, AdamW", "fp16, amsgrad"):
            out.claim(f"{name}: non-finite weights after step 1", published.first == 1 and bool(published.sick))
    net = copy.deepcopy(half)
    loss, _ = net(*batches[0])
    loss.backward()
    grads = torch.cat([p.grad.float().flatten() for p in net.parameters()])
    torch.optim.AdamW(net.parameters(), LR).step()
    gone = {d: torch.cat([p.flatten() for p in net.parameters() if p.dtype is d]).isfinite().logical_not() for d in
            (torch.float16, torch.float32)}
    out.notes.append(f"step 1: largest gradient {grads.abs().max():.2g}, all finite; then "
                     + ", ".join(f"{m.float().mean():.1%} of {str(d)[6:]} weights are not" for d, m in gone.items()))
    out.claim("the gradients are finite, every fp16 weight is gone, no fp32 weight is",
              bool(grads.isfinite().all()) and gone[torch.float16].float().mean() > 0.99
              and not gone[torch.float32].any())
    scaler = torch.amp.GradScaler("cpu")
    net = copy.deepcopy(half)
    scaler.scale(net(*batches[0])[0]).backward()
    try:
        scaler.unscale_(torch.optim.AdamW(net.parameters(), LR))
        says = ""
    except ValueError as error:
        says = str(error)
    out.notes.append(f"GradScaler: ValueError: {says}")
    out.claim("GradScaler refuses", "FP16" in says)
    report = one_step_later(copy.deepcopy(half), batches[:3])
    out.notes.append(f"half state forced on our loop: {str(report).splitlines()[0]}")
    out.claim("forced, the autopsy blames the weights one step later", report is not None
              and report.verdict == "weights" and report.names[0] in {f"parameter {n}" for n in non_finite(net)}
              | {f"parameter {n}" for n, p in half.named_parameters() if p.dtype is torch.float16})
    small, large = eps_on(6e-6), eps_on(1e-3)
    out.notes.append(f"eps=1e-4 in fp16, distance / fp32's: x{small:.2g} where |g| is 6e-6 (as reported), "
                     f"x{large:.2g} where it is 1e-3")
    out.claim("eps=1e-4 trades the NaN for a wrong step: too small for small gradients, too large for large ones",
              small < 0.2 and large > 3)
    out.claim("masters train, as far as fp32 does", cured.trains and 0.8 < far["masters"] < 1.25
              and abs(cured.losses[-1] - fp32.losses[-1]) < 0.02)
    return out


if __name__ == "__main__":
    sys.exit(show(case()))
