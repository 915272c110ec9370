"""
ViT: the plain pre-norm vision transformer, where attention logits are what grows.

A logit is the product of two learnt projections, q . k / sqrt(d), and nothing bounds it: twice the weights, four times
the logit. Layer norm bounds what goes into the projections, not what comes out. Three things follow:

    fp16     a hand-written q @ k^T is inf beyond 65504, and softmax makes inf - inf = NaN. scaled_dot_product_attention
             keeps its logits in fp32, in registers, so there is no inf to see; what follows is still true of it.
    bf16     q and k carry 8 bits. Where logits reach 1400 they are wrong by up to 6, and softmax turns an error of 6
             into a factor of 400: attention looks at the wrong token, finite and without a warning.
    any      where one logit leads by 20, softmax is one-hot and its gradient 2e-9: there is no way back. At 8 billion
             parameters this made the loss diverge (ViT-22B, arXiv 2302.05442).

`qk_norm=True` is ViT-22B's cure: a layer norm over each head's q and k. Then |q| = |k| = sqrt(d) before the norm's
learnt scale, so |logit| <= sqrt(d) whatever the projections do: 8 for heads of 64.

The other fp32 place is the residual stream. Branches are added to it 2 * depth times; in bf16, a branch below 2^-9 of
the stream is not added at all, and in fp16 the few giant channels that ViTs grow have 65504 as their ceiling.

What is plain here (Beyer et al., arXiv 2205.01580): no class token but the mean over tokens, positions that begin as
sines and cosines, one linear head. Matmuls run in whatever dtype autocast or the parameters say.

Copy this file alone: it needs torch and nothing else.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PRESETS = {
    "vit-test": dict(grid=4, dim=32, depth=2, heads=2),  # for tests: 32 thousand parameters
    "vit": dict(grid=8, dim=128, depth=3, heads=2),  # 0.6 million
    "vit-s16": dict(image_size=224, patch_size=16, dim=384, depth=12, heads=6),  # ViT-S/16: 22 million
}


class PatchEmbed(nn.Module):
    """(B, 3, H, W) -> (B, H / patch_size, W / patch_size, dim).

    A convolution whose stride is its kernel, written as the matmul that it is: CPUs only emulate fp16 convolutions.
    """

    def __init__(self, patch_size: int, dim: int):
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Linear(3 * patch_size**2, dim)

    def forward(self, images: Tensor) -> Tensor:
        p = self.patch_size
        x = images.unflatten(3, (-1, p)).unflatten(2, (-1, p))  # B, 3, H/p, p, W/p, p
        return self.proj(x.permute(0, 2, 4, 1, 3, 5).flatten(3))


class HeadNorm(nn.Module):
    """Layer norm without bias over the last dimension, of any float dtype; computed in fp32, returned as it came."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        # .float(): a q of 300 has squares beyond 65504, and CPU autocast would leave the norm in half precision
        return F.layer_norm(x.float(), self.weight.shape, self.weight.float(), eps=1e-6).to(x.dtype)


class Attention(nn.Module):
    """(B, N, D) -> (B, N, D), each token looking at all.

    Args:
        qk_norm: normalise q and k in each head, so that no logit exceeds sqrt(D / heads) times the norms' scales.
    """

    def __init__(self, dim: int, heads: int, qk_norm: bool):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.q_norm = HeadNorm(dim // heads) if qk_norm else nn.Identity()
        self.k_norm = HeadNorm(dim // heads) if qk_norm else nn.Identity()

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, each (B, heads, N, D / heads), q and k normalised if that was asked for."""
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.q_norm(q), self.k_norm(k), v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        if x.is_cpu:  # fp32 there: the half-precision backward takes three times as long (57 ms, not 19, a layer)
            with torch.autocast("cpu", enabled=False):
                x = F.scaled_dot_product_attention(q.float(), k.float(), v.float()).to(v.dtype)
        else:
            x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm: x + attn(norm1(x)), then x + mlp(norm2(x)). x is fp32 (B, N, D); a branch may be half."""

    def __init__(self, dim: int, heads: int, qk_norm: bool):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, heads, qk_norm)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x)).float()
        return x + self.mlp(self.norm2(x)).float()


def sincos(grid: int, dim: int) -> Tensor:
    """fp32 (grid * grid, dim): a quarter of the channels each for sin y, cos y, sin x, cos x (arXiv 2104.02057)."""
    frequency = 10_000.0 ** -torch.linspace(0, 1, dim // 4)
    angle = torch.arange(grid)[:, None] * frequency
    waves = torch.cat([angle.sin(), angle.cos()], 1)  # grid, dim / 2
    y, x = waves[:, None].expand(-1, grid, -1), waves[None].expand(grid, -1, -1)
    return torch.cat([y, x], 2).flatten(0, 1)


class ViT(nn.Module):
    """Normalised images (B, 3, image_size, image_size), any float dtype, to logits (B, num_classes).

    Args:
        num_classes: width of the head.
        image_size, patch_size: pixels a side; the first is a multiple of the second.
        dim: width of a token, a multiple of `heads` and of 4.
        depth: number of blocks.
        qk_norm: ViT-22B's normalised queries and keys; without it the attention logits are unbounded.
    Raises:
        ValueError: one of the sizes does not divide the other; in the forward, images of another size.
    """

    def __init__(
        self,
        *,
        num_classes: int = 10,
        image_size: int = 32,
        patch_size: int = 4,
        dim: int = 128,
        depth: int = 3,
        heads: int = 2,
        qk_norm: bool = False,
    ):
        super().__init__()
        if image_size % patch_size:
            raise ValueError(f"image_size {image_size} is not a multiple of patch_size {patch_size}")
        if dim % heads:
            raise ValueError(f"dim {dim} is not a multiple of heads {heads}")
        if dim % 4:
            raise ValueError(f"dim {dim} is not a multiple of 4, which the sines and cosines of two axes need")
        self.image_size = image_size
        self.embed = PatchEmbed(patch_size, dim)
        self.pos = nn.Parameter(sincos(image_size // patch_size, dim))
        self.blocks = nn.ModuleList(Block(dim, heads, qk_norm) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.trunc_normal_(self.head.weight, std=0.02)  # a soft start: the loss begins at log(num_classes)

    def no_weight_decay(self) -> set[str]:
        """Decay would pull every position towards the same one."""
        return {"pos"}

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[2:] != (self.image_size, self.image_size):
            raise ValueError(f"images of {tuple(images.shape[2:])}, but this network was built for {self.image_size}")
        x = self.embed(images).flatten(1, 2).float() + self.pos.float()  # the residual stream, fp32 from here on
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))
