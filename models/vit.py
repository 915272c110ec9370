# SPDX-License-Identifier: MIT (finite 4.0.0, 2026-11-28)
"""
ViT: the plain pre-norm vision transformer. Its attention logits grow during training.

A logit is the product of two learnt projections, q . k / sqrt(d), and nothing bounds it. When the
weights double, the logit grows four times. Layer norm bounds the input of the projections, not
their output. This has three consequences:

    fp16     A hand-written q @ k^T is inf beyond 65504, and softmax makes inf - inf = NaN.
             scaled_dot_product_attention keeps its logits in fp32 registers, so it makes no inf.
             The next two remain.
    bf16     q and k have 8 significant bits. Logits of 1400 are wrong by up to 6, and softmax turns
             an error of 6 into a factor of 400. Attention then looks at the wrong token, without an
             inf, a NaN or a warning.
    any      When one logit leads by 20, softmax is one-hot and its gradient is 2e-9. The weights no
             longer learn. With 8 billion parameters the loss diverged for this reason (ViT-22B,
             arXiv 2302.05442).

`qk_norm=True` is ViT-22B's cure: a layer norm over the q and the k of each head. Then |q| = |k| =
sqrt(d) before the norm's learnt scale, so |logit| <= sqrt(d) for any projection: 8 for heads of 64.

The residual stream is fp32 too. Branches are added to the stream 2 * depth times. In bf16, a branch
below 2^-9 of the stream is not added at all. In fp16, the few very large channels that ViTs grow
would end at 65504.

This is the plain ViT of Beyer et al. (arXiv 2205.01580): the mean over tokens instead of a class
token, positions that begin as sines and cosines, one linear head. Differences from big_vision's:
the positions learn on, the head does not start at 0, and there is no RandAugment or mixup. Matmuls
run in the dtype of autocast or of the parameters.

Copy this file alone: it needs torch and nothing else.

Paste::

    import torch
    import torch.nn.functional as F
    from vit import ViT

    net = ViT(num_classes=10, image_size=32, patch_size=4, dim=64, depth=2, heads=2, qk_norm=True)
    images = torch.randn(8, 3, 32, 32)
    labels = torch.zeros(8).long()
    loss = F.cross_entropy(net(images).float(), labels)
    loss.backward()
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PRESETS = {
    "vit-test": dict(grid=4, dim=32, depth=2, heads=2),  # for tests: 32 thousand parameters
    "vit": dict(grid=8, dim=128, depth=3, heads=2),  # 0.6 million
    # ViT-S/16: 22 million
    "vit-s16": dict(image_size=224, patch_size=16, dim=384, depth=12, heads=6),
}


class PatchEmbed(nn.Module):
    """(B, 3, H, W) -> (B, H / patch_size, W / patch_size, dim).

    A convolution whose stride equals its kernel is a matmul. It is written as one: CPUs only
    emulate fp16 convolutions.
    """

    def __init__(self, patch_size: int, dim: int, channels: int):
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Linear(channels * patch_size**2, dim)

    def forward(self, images: Tensor) -> Tensor:
        p = self.patch_size
        x = images.unflatten(3, (-1, p)).unflatten(2, (-1, p))  # B, 3, H/p, p, W/p, p
        # B, H/p, W/p, 3 p^2 -> B, H/p, W/p, dim
        return self.proj(x.permute(0, 2, 4, 1, 3, 5).flatten(3))


class HeadNorm(nn.Module):
    """Layer norm without bias over the last dimension.

    Computed in fp32; the result has the input's dtype.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        # .float(): a q of 300 has a square above 65504, and CPU autocast would leave the norm in
        # half precision.
        return F.layer_norm(x.float(), self.weight.shape, self.weight.float(), eps=1e-6).to(x.dtype)


class Attention(nn.Module):
    """(B, N, D) -> (B, N, D). Every token attends to all tokens.

    Args:
        qk_norm: normalise q and k in each head. No logit then exceeds sqrt(D / heads) times the
            norms' scales.
    """

    def __init__(self, dim: int, heads: int, qk_norm: bool):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.q_norm = HeadNorm(dim // heads) if qk_norm else nn.Identity()
        self.k_norm = HeadNorm(dim // heads) if qk_norm else nn.Identity()

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, each (B, heads, N, D / heads). q and k are normalised if qk_norm is True."""
        # each B, heads, N, D / heads
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.q_norm(q), self.k_norm(k), v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        # in fp32: the backward in half precision takes 57 ms a layer on a CPU, in fp32 19 ms
        if x.is_cpu:
            with torch.autocast("cpu", enabled=False):
                x = F.scaled_dot_product_attention(q.float(), k.float(), v.float()).to(v.dtype)
        else:
            x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).flatten(2))  # B, heads, N, D / heads -> B, N, D


class Block(nn.Module):
    """Pre-norm: x + attn(norm1(x)), then x + mlp(norm2(x)). x is fp32 (B, N, D); a branch may be
    half.
    """

    def __init__(self, dim: int, heads: int, qk_norm: bool):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, heads, qk_norm)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x)).float()
        return x + self.mlp(self.norm2(x)).float()


def sincos(grid: int, dim: int) -> Tensor:
    """fp32 (grid * grid, dim): sin y, cos y, sin x and cos x have a quarter of the channels each
    (arXiv 2104.02057).
    """
    frequency = 10_000.0 ** -torch.linspace(0, 1, dim // 4)
    angle = torch.arange(grid)[:, None] * frequency  # grid, dim / 4
    waves = torch.cat([angle.sin(), angle.cos()], 1)  # grid, dim / 2
    # each grid, grid, dim / 2
    y = waves[:, None].expand(-1, grid, -1)
    x = waves[None].expand(grid, -1, -1)
    return torch.cat([y, x], 2).flatten(0, 1)  # grid^2, dim


class ViT(nn.Module):
    """Normalised images (B, 3, image_size, image_size) to logits
    (B, num_classes).

    The weights are fp32, or what Policy.prepare has made of them. The images are fp32 too, or half
    under autocast.

    Args:
        num_classes: width of the head.
        image_size, patch_size: pixels a side. image_size is a multiple of patch_size.
        channels: colours of an image.
        dim: width of a token, a multiple of `heads` and of 4.
        depth: number of blocks.
        qk_norm: ViT-22B's normalised queries and keys. Without it the attention logits have no
            bound.
    Raises:
        ValueError: sizes that do not divide; in the forward, images of another size.
    """

    def __init__(
        self,
        *,
        num_classes: int = 10,
        image_size: int = 32,
        patch_size: int = 4,
        channels: int = 3,
        dim: int = 128,
        depth: int = 3,
        heads: int = 2,
        qk_norm: bool = False,
    ):
        super().__init__()
        if image_size % patch_size:
            raise ValueError(
                f"image_size {image_size} is not a multiple of patch_size {patch_size}"
            )
        if dim % heads:
            raise ValueError(f"dim {dim} is not a multiple of heads {heads}")
        if dim % 4:
            raise ValueError(
                f"dim {dim} is not a multiple of 4, which the sines and cosines of two axes need"
            )
        self.image_size = image_size
        self.embed = PatchEmbed(patch_size, dim, channels)
        self.pos = nn.Parameter(sincos(image_size // patch_size, dim))
        self.blocks = nn.ModuleList(Block(dim, heads, qk_norm) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        # a soft start: the loss begins at log(num_classes)
        nn.init.trunc_normal_(self.head.weight, std=0.02)

    def no_weight_decay(self) -> set[str]:
        """Weight decay would make all positions alike."""
        return {"pos"}

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[2:] != (self.image_size, self.image_size):
            size = tuple(images.shape[2:])
            raise ValueError(f"images of {size}, but this network was built for {self.image_size}")
        # B, N, dim: the residual stream, in fp32
        x = self.embed(images).flatten(1, 2).float() + self.pos.float()
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))  # B, dim -> B, num_classes
