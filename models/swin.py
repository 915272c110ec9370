# SPDX-License-Identifier: MIT (finite 4.0.0, 2026-11-28)
"""
Swin: attention in shifted windows. The logits of version 1 overflow fp16; the logits of version 2
cannot.

Version 1 (Liu et al., arXiv 2103.14030) computes softmax(q . k / sqrt(d) + bias). Nothing bounds
q . k: when the weights double, the logit grows four times. Swin-L in fp16
(microsoft/Swin-Transformer, issue 82) trained until epoch 1, iteration 880, and was NaN from there
on. This explanation fits: a logit above 65504 is inf, softmax makes inf - inf = NaN, the loss
scaler skips the step, and the weights do not change. A lower loss scale cannot help, because the
forward makes the inf. Here the logits are an fp32 island, from q @ k^T to the softmax.
`fp32_logits=False` computes the product in half precision, as published, to show the failure.

Version 2 (arXiv 2111.09883) is the authors' own answer. It has two parts:

    cosine attention   scale * cos(q, k) + 16 * sigmoid(bias), with scale <= 100: |logit| <= 116.
                       The cosine itself needs fp32. One q of 256 has a square of 65536, above
                       fp16's range; and normalize's eps of 1e-12 is 0 in fp16, so that a row of
                       zeros gives 0 / 0.
    res-post-norm      x + norm(branch(x)), where the norm's scale starts at 0. In version 1, x +
                       branch(norm(x)), the amplitude of the stream x grows from block to block.

Both versions differ from the papers in three places. The shift brings distant regions of the image
together; here they are hidden from each other by -inf, not by -100, because -100 hides nothing once
logits reach 100. This makes no NaN: every token sees itself. k has no bias: version 2 has none, and
in version 1 softmax ignores it. The residual stream is fp32: in bf16 a branch below 2^-9 of the
stream would be lost. Other differences from microsoft/Swin-Transformer: this file refuses a grid
smaller than its window; there the window shrinks. Nothing is rescaled from a pretrained window.
There is no dropout and no absolute position. Small presets begin with Xavier's init, the published
sizes with the published one.

Copy this file alone: it needs torch and nothing else.

Paste::

    import torch
    import torch.nn.functional as F
    from swin import Swin

    net = Swin(num_classes=10, image_size=32, patch_size=4, dim=48, window=4, version=2)
    images = torch.randn(8, 3, 32, 32)
    labels = torch.zeros(8).long()
    loss = F.cross_entropy(net(images).float(), labels)
    loss.backward()
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TINY = dict(dim=96, depths=(2, 2, 6, 2), heads=(3, 6, 12, 24), patch_size=4, init_std=0.02)
SMALL = dict(dim=96, depths=(2, 2), heads=(3, 6), grid=8, window=4)
TEST = dict(dim=16, depths=(2, 2), heads=(1, 2), grid=8, window=4)
PRESETS = {
    "swin-test": dict(version=1, **TEST),  # for tests: 36 thousand parameters, and 44
    "swin-v2-test": dict(version=2, **TEST),
    "swin": dict(version=1, **SMALL),  # 1.2 million
    "swin-v2": dict(version=2, **SMALL),
    "swin-t": dict(version=1, image_size=224, window=7, **TINY),  # Swin-T and SwinV2-T: 28 million
    "swin-v2-t": dict(version=2, image_size=256, window=8, **TINY),
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
        self.norm = nn.LayerNorm(dim)

    def forward(self, images: Tensor) -> Tensor:
        p = self.patch_size
        x = images.unflatten(3, (-1, p)).unflatten(2, (-1, p))  # B, 3, H/p, p, W/p, p
        # B, H/p, W/p, dim
        return self.norm(self.proj(x.permute(0, 2, 4, 1, 3, 5).flatten(3)).float())


class PatchMerging(nn.Module):
    """(B, H, W, D) -> fp32 (B, H / 2, W / 2, 2 D): joins four neighbours, then one matmul."""

    def __init__(self, dim: int, version: int):
        super().__init__()
        self.version = version
        # version 1: before the matmul; 2: after it
        self.norm = nn.LayerNorm(4 * dim if version == 1 else 2 * dim)
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2))  # B, H/2, 2, W/2, 2, D
        # B, H/2, W/2, 4 D; the published order: down first, then right
        x = x.permute(0, 1, 3, 4, 2, 5).flatten(3)
        if self.version == 1:
            return self.reduction(self.norm(x)).float()
        return self.norm(self.reduction(x).float())


def offsets(window: int) -> Tensor:
    """For each pair of the N tokens of a window, which of the (2 window - 1)^2 relative positions:
    int64 (N, N).
    """
    # each N
    y = torch.arange(window).repeat_interleave(window)
    x = torch.arange(window).repeat(window)
    # each N, N: 0 ... 2 window - 2
    dy = y[:, None] - y + window - 1
    dx = x[:, None] - x + window - 1
    return dy * (2 * window - 1) + dx


class RelativeBias(nn.Module):
    """Version 1: a learnt number for each relative position and head. () -> fp32 (heads, N, N)."""

    def __init__(self, window: int, heads: int):
        super().__init__()
        self.table = nn.Parameter(torch.empty((2 * window - 1) ** 2, heads))
        nn.init.trunc_normal_(self.table, std=0.02)
        self.register_buffer("offsets", offsets(window), persistent=False)

    def no_weight_decay(self) -> set[str]:
        return {"table"}

    def forward(self) -> Tensor:
        return self.table.float()[self.offsets].permute(2, 0, 1)  # N, N, heads -> heads, N, N


class ContinuousBias(nn.Module):
    """Version 2: 16 * sigmoid of a small network that reads the relative position.

    () -> fp32 (heads, N, N).
    """

    def __init__(self, window: int, heads: int):
        super().__init__()
        t = torch.arange(1 - window, window) / (window - 1)
        # -1 ... 1; on a log scale a wider window is a smaller change
        t = t.sign() * torch.log2(1 + 8 * t.abs()) / 3
        # (2 window - 1)^2, 2
        self.register_buffer("at", torch.cartesian_prod(t, t), persistent=False)
        self.register_buffer("offsets", offsets(window), persistent=False)
        self.mlp = nn.Sequential(nn.Linear(2, 512), nn.ReLU(), nn.Linear(512, heads, bias=False))

    def no_weight_decay(self) -> set[str]:
        return {"mlp.0.weight", "mlp.2.weight"}  # as published

    def forward(self) -> Tensor:
        # heads, N, N
        return 16 * self.mlp(self.at).float().sigmoid()[self.offsets].permute(2, 0, 1)


class WindowAttention(nn.Module):
    """(windows, N, D) -> the same.

    A token attends to its window: by dot products in version 1, by cosines in 2.
    """

    def __init__(self, dim: int, heads: int, window: int, version: int, fp32_logits: bool):
        super().__init__()
        self.heads = heads
        self.version = version
        self.fp32_logits = fp32_logits
        self.qv = nn.Linear(dim, 2 * dim)
        self.k = nn.Linear(dim, dim, bias=False)
        self.proj = nn.Linear(dim, dim)
        self.bias = (RelativeBias if version == 1 else ContinuousBias)(window, heads)
        if version == 2:
            # 1-d, so weight decay skips it
            self.logit_scale = nn.Parameter(torch.full((heads,), math.log(10.0)))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, each (windows, heads, N, D / heads)."""
        # each windows, N, D
        q, v = self.qv(x).chunk(2, -1)
        k = self.k(x)
        return tuple(t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        """(windows, heads, N, N) without the bias; fp32 unless fp32_logits is False.

        Call this with autocast off.
        """
        if self.version == 2:
            cosine = F.normalize(q.float(), dim=-1) @ F.normalize(k.float(), dim=-1).transpose(2, 3)
            return cosine * self.logit_scale.float().clamp(max=math.log(100.0)).exp()[:, None, None]
        if self.fp32_logits:
            q, k = q.float(), k.float()
        return (q * q.shape[-1] ** -0.5) @ k.transpose(2, 3)

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        """hidden: bool (windows of an image, 1, N, N), True where two tokens must not see each
        other.
        """
        q, k, v = self.project(x)
        # autocast would cast q and k back to half for the product
        with torch.autocast(x.device.type, enabled=False):
            bias = self.bias()[None]  # 1, heads, N, N
            if hidden is not None:
                bias = bias.masked_fill(hidden, -math.inf)  # windows of an image, heads, N, N
            # B, windows, heads, N, N
            logits = self.logits(q, k).float().unflatten(0, (-1, len(bias))) + bias
            weights = logits.softmax(-1).flatten(0, 1).to(v.dtype)  # B * windows, heads, N, N
        return self.proj((weights @ v).transpose(1, 2).flatten(2))  # B * windows, N, D


class DropPath(nn.Module):
    """Stochastic depth (arXiv 1603.09382): in training, each sample's branch is dropped with
    probability p.
    """

    def __init__(self, p: float = 0.0):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        keep = torch.rand(len(x), 1, 1, 1, device=x.device) >= self.p
        return x * keep / (1 - self.p)


class SwinBlock(nn.Module):
    """fp32 (B, grid, grid, D) -> the same: attention in windows that are rolled by `shift`, then an
    MLP.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        grid: int,
        window: int,
        shift: int,
        version: int,
        fp32_logits: bool,
    ):
        super().__init__()
        self.window = window
        self.shift = shift
        self.version = version
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        if version == 2:  # res-post-norm: every branch adds 0 at first
            nn.init.zeros_(self.norm1.weight)
            nn.init.zeros_(self.norm2.weight)
        self.attn = WindowAttention(dim, heads, window, version, fp32_logits)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.drop = DropPath()
        hidden = None
        # the rolled last windows hold both ends of the image, whose tokens must not see each other
        if shift:
            end = (torch.arange(grid) >= grid - shift).long()  # grid: 1 in the rolled part
            # windows, N: 0 ... 3
            region = self.split((2 * end[:, None] + end)[None, :, :, None]).squeeze(2)
            hidden = (region[:, :, None] != region[:, None])[:, None]  # windows, 1, N, N
        self.register_buffer("hidden", hidden, persistent=False)

    def split(self, x: Tensor) -> Tensor:
        """(B, grid, grid, D) -> (B * windows, N, D)."""
        # B, rows, window, columns, window, D
        x = x.unflatten(2, (-1, self.window)).unflatten(1, (-1, self.window))
        return x.transpose(2, 3).flatten(3, 4).flatten(0, 2)  # B * rows * columns, N, D

    def join(self, x: Tensor, grid: int) -> Tensor:
        """The inverse of split: (B * windows, N, D) -> (B, grid, grid, D)."""
        w = self.window
        n = grid // self.window
        return (
            x.view(-1, n, n, w, w, x.shape[-1]).transpose(2, 3).reshape(-1, grid, grid, x.shape[-1])
        )

    def mix(self, x: Tensor) -> Tensor:
        """Attention in the shifted windows: (B, grid, grid, D) -> fp32, the same shape."""
        grid = x.shape[1]
        shift = self.shift
        if shift:
            x = x.roll((-shift, -shift), (1, 2))
        x = self.join(self.attn(self.split(x), self.hidden), grid)
        if shift:
            x = x.roll((shift, shift), (1, 2))
        return x.float()

    def forward(self, x: Tensor) -> Tensor:
        if self.version == 1:
            x = x + self.drop(self.mix(self.norm1(x)))
            return x + self.drop(self.mlp(self.norm2(x)).float())
        x = x + self.drop(self.norm1(self.mix(x)).float())
        return x + self.drop(self.norm2(self.mlp(x).float()).float())


def from_torchvision(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of torchvision's swin_t or swin_v2_t, with the names and shapes of this file."""
    ours = {}
    for name, t in weights.items():
        place, _, kind = name.rpartition(".")
        if part := re.match(r"features\.(\d+)", name):
            number = int(part[1])  # torchvision keeps stages and merges in one list
            inside = "blocks" if number % 2 else "merge"
            place = place.replace(part[0], f"stages.{number // 2}.{inside}" if number else "embed")
        for theirs, our in (
            ("embed.0", "embed.proj"),
            ("embed.2", "embed.norm"),
            (".mlp.3", ".mlp.2"),
            ("attn.cpb_mlp", "attn.bias.mlp"),
        ):
            place = place.replace(theirs, our)
        if place.endswith("attn.qkv"):
            q, k, v = t.chunk(3)
            ours[f"{place[:-3]}qv.{kind}"] = torch.cat([q, v])
            ours[f"{place[:-3]}k.{kind}"] = k
        elif kind == "relative_position_bias_table":
            ours[f"{place}.bias.table"] = t
        elif not kind.startswith("relative_"):  # what follows from the window's size
            flat = kind == "logit_scale" or place == "embed.proj"
            ours[f"{place}.{kind}"] = t.flatten(int(kind == "weight")) if flat else t
    return {name: t for name, t in ours.items() if not name.endswith("attn.k.bias")}


class Swin(nn.Module):
    """Normalised images (B, 3, image_size, image_size) to logits
    (B, num_classes).

    The weights are fp32, or what Policy.prepare has made of them. The images are fp32 too, or half
    under autocast.

    Args:
        image_size, patch_size: pixels a side.
        channels: colours of an image.
        dim: channels of the first stage. Each further stage has twice the channels on half the
            grid.
        depths, heads: blocks and attention heads of each stage.
        window: tokens a side of a window. Every second block of a stage is shifted by half a
            window.
        version: 1 or 2.
        fp32_logits: False computes version 1's logits in the dtype of q and k, as published.
        drop_path: probability that the last block's branches are dropped; it rises linearly from 0
            in the first.
        init_std: weights begin as a normal distribution of this deviation, cut at 2, as published;
            None: as Xavier's.
    Raises:
        ValueError: half logits in version 2; sizes that do not divide; in the forward, images of
            another size.
    """

    def __init__(
        self,
        *,
        num_classes: int = 10,
        image_size: int = 32,
        patch_size: int = 4,
        channels: int = 3,
        dim: int = 96,
        depths: tuple[int, ...] = (2, 2),
        heads: tuple[int, ...] = (3, 6),
        window: int = 4,
        version: int = 1,
        fp32_logits: bool = True,
        drop_path: float = 0.0,
        init_std: float | None = None,
    ):
        super().__init__()
        if version not in (1, 2):
            raise ValueError(f"version {version} is neither 1 nor 2")
        if version == 2 and not fp32_logits:
            raise ValueError("fp32_logits=False needs version 1: version 2 has fp32 cosines")
        if image_size % patch_size:
            raise ValueError(
                f"image_size {image_size} is not a multiple of patch_size {patch_size}"
            )
        if len(depths) != len(heads):
            raise ValueError(f"{len(depths)} depths, but {len(heads)} numbers of heads")
        self.image_size = image_size
        grid = image_size // patch_size
        self.embed = PatchEmbed(patch_size, dim, channels)
        self.stages = nn.Sequential()
        for stage, depth in enumerate(depths):
            merge = nn.Identity()
            if stage:
                if grid % 2:
                    raise ValueError(
                        f"stage {stage} cannot merge patches two by two on a grid of {grid}"
                    )
                merge = PatchMerging(dim, version)
                grid, dim = grid // 2, 2 * dim
            if grid % window:
                size = f"the grid of stage {stage}, {grid} a side,"
                raise ValueError(f"{size} is not a multiple of window {window}")
            if dim % heads[stage]:
                width = f"the width of stage {stage}, {dim},"
                raise ValueError(f"{width} is not a multiple of its heads {heads[stage]}")
            blocks = nn.Sequential()
            for i in range(depth):
                # a single window has nothing to shift
                shift = window // 2 if i % 2 and grid > window else 0
                blocks.append(
                    SwinBlock(dim, heads[stage], grid, window, shift, version, fp32_logits)
                )
            self.stages.append(nn.Sequential(OrderedDict(merge=merge, blocks=blocks)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)
        for name, module in self.named_modules():
            # The published init leaves out the patches' convolution; ours leaves out the continuous
            # bias.
            if isinstance(module, nn.Linear) and not (
                name == "embed.proj" if init_std else ".bias." in name
            ):
                if init_std:
                    nn.init.trunc_normal_(module.weight, std=init_std)
                else:
                    nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        # a soft start: the loss begins at log(num_classes)
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        self.set_drop_path(drop_path)

    def set_drop_path(self, p: float) -> None:
        """Drop the last block's branches with probability p in training, those of earlier blocks
        linearly less.
        """
        drops = [module for module in self.modules() if isinstance(module, DropPath)]
        for i, drop in enumerate(drops):
            drop.p = p * i / max(1, len(drops) - 1)

    def forward(self, images: Tensor) -> Tensor:
        # another size would run with the wrong mask
        if images.shape[2:] != (self.image_size, self.image_size):
            size = tuple(images.shape[2:])
            raise ValueError(f"images of {size}, but this network was built for {self.image_size}")
        x = self.stages(self.embed(images).float())  # B, last grid, last grid, last dim
        return self.head(self.norm(x).mean((1, 2)))  # B, num_classes
