# SPDX-License-Identifier: MIT (finite 2.2.0, 2026-11-22)
"""
Muon: turn a matrix towards the orthogonalised momentum, at a constant norm, without a host sync.

AdamW scales every number of a gradient by itself. A weight matrix then follows the few directions that dominate its
gradient. Muon (kellerjordan.github.io/posts/muon) replaces the singular values of the momentum by about 1 (0.7 to 1.2
after five Newton-Schulz steps), so that every direction of the matrix learns. On CIFAR-10 the same accuracy takes fewer
epochs.

torch.optim.Muon takes no found_inf and no learning rate on the device: a skipped step, and a schedule by accepted
updates, would need a host sync. The few lines are therefore written out here, with the verdict as a device tensor and
torch.where. A rejected step leaves matrix and momentum as they were, bit for bit.

The norm of a matrix stays as it is. Where a normalisation follows, only the direction of a matrix counts, and a
growing norm would make each step turn it less. So the schedule alone decides how far a step turns, and every layer
learns at the same speed. (cifar10-airbench's Muon recipe fixes the norms of its filters likewise.) A matrix that is all
zero has no norm to keep: leave it to AdamW. Weight decay has no effect on a constant norm.

Copy this file alone: it needs torch. `turn` is what optim.py's ClippedAdamW takes as matrix_step:

    ClippedAdamW(param_groups(net, muon=["blocks.*"]), matrix_step=turn, muon_options=dict(momentum=0.6))
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ANGLE = 10.0  # Muon turns a matrix by 10 * lr radians, about what AdamW's update (0.2 * lr) does to weights around 0.02


def newton_schulz(matrix: Tensor, steps: int = 5, coefficients: Sequence[float] = (3.4445, -4.7750, 2.0315),
                  eps: float = 1e-7) -> Tensor:
    """U V^T of matrix = U S V^T (rows, columns), roughly, in bf16: each step applies a*s + b*s^3 + c*s^5 to S."""
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.bfloat16().T if tall else matrix.bfloat16()  # (short side, long side)
    x = x / x.norm().clamp(min=eps)  # no singular value is above 1 now
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


@torch.no_grad()
def turn(matrices: Sequence[Tensor], gradients: Sequence[Tensor], momenta: Sequence[Tensor], lrs: Sequence[Tensor],
         good: Tensor, *, momentum: float = 0.95, nesterov: bool = True, ns_steps: int = 5, eps: float = 1e-7,
         ns_coefficients: Sequence[float] = (3.4445, -4.7750, 2.0315)) -> None:
    """One step of Muon in place: each matrix turns by an angle of about ANGLE * lr, unless good is False.

    Args:
        matrices: weights of two or more dimensions; a filter (out, ...) is one row.
        gradients: the loss scale is removed and the norm is clipped; may be non-finite when good is False.
        momenta: fp32 (rows, columns), 0 at the start; updated here.
        lrs: 0-dim, one for each matrix.
        good: 0-dim bool on the device.
        others: torch.optim.Muon's, with its defaults.
    """
    directions = []
    for g, buffer in zip(gradients, momenta, strict=True):
        g = g.reshape(buffer.shape).to(buffer.dtype)  # (out, ...) -> (rows, columns)
        g = torch.where(good, g, buffer)  # a rejected gradient is replaced by the momentum, which then stays as it was
        buffer.lerp_(g, 1 - momentum)
        update = newton_schulz(g.lerp(buffer, momentum) if nesterov else buffer, ns_steps, ns_coefficients, eps)
        directions.append(update.to(buffer.dtype) * -math.sqrt(max(1, g.shape[0] / g.shape[1])))  # norm: sqrt(rows)
    norms = torch._foreach_norm(matrices, 2, dtype=torch.float32)
    lengths = torch._foreach_mul(norms, [ANGLE / math.sqrt(len(p)) for p in matrices])
    torch._foreach_mul_(lengths, list(lrs))
    moved = [torch.addcmul(p, d.view(p.shape), length)  # (rows, columns) -> (out, ...)
             for p, d, length in zip(matrices, directions, lengths, strict=True)]
    ratios = torch._foreach_div(norms, torch._foreach_norm(moved))
    for p, new, ratio in zip(matrices, moved, ratios, strict=True):
        p.copy_(torch.where(good, new * ratio, p))


def main() -> None:
    """Singular values before and after Newton-Schulz; three steps of which one is rejected."""
    torch.manual_seed(0)
    gradient = torch.randn(64, 4) @ torch.randn(4, 32) + 0.1 * torch.randn(64, 32)
    for name, matrix in (("gradient", gradient / gradient.norm()), ("Newton-Schulz", newton_schulz(gradient).float())):
        values = torch.linalg.svdvals(matrix)
        print(f"singular values of the {name:13}: largest {values[0]:.3f}, median {values.median():.3f}")
    w, buffer = torch.randn(64, 32) * 0.02, torch.zeros(64, 32)
    for poison in (1.0, math.nan, 1.0):
        old, g = w.clone(), gradient * poison
        turn([w], [g], [buffer], [torch.tensor(1e-3)], g.isfinite().all())
        angle = torch.cosine_similarity(old.flatten().double(), w.flatten().double(), dim=0).clamp(max=1).acos()
        print(f"gradient times {poison}: turned by {angle:.4f} rad at lr 1e-3, norm {old.norm():.4f} -> {w.norm():.4f}")


if __name__ == "__main__":
    main()
