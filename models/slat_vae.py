# SPDX-License-Identifier: MIT (finite 4.0.0, 2026-11-28)
"""
SLatVAE: a structured-latent autoencoder. AdamW once wrote NaN into every half weight of its
original.

After TRELLIS (arXiv 2412.01506), written anew for images. In TRELLIS a shape is a sparse set of
active voxels with a small latent on each. One transformer encodes the set, another decodes it. Here
the voxels are patches:

    thumbnail    The mean colour of every patch, enlarged bilinearly. This is the background. The
                 decoder gets it for free.
    active       The share of the patches that the background renders worst, half of them or three
                 quarters: the same number in every image of a batch.
    latent       A few numbers (mean, log-variance) for each active patch. They hold what the
                 background lacks.
    picture      The background, plus the decoded detail at the active coordinates. The loss covers
                 active patches only.

What half precision does to it, and what this file does about it:

    exp(logvar)  It is inf in fp16 above logvar = 11.09 = ln 65504. fp32 and the usual clamp at 20
                 keep the KL finite, but then std = e^10 = 22026. The 0.3 % of draws beyond 2.97
                 deviations are inf when the decoder reads them in fp16. Here: fp32, clamped at 10,
                 where std is 148.
    e^v - 1 - v  The KL near the prior is a cancellation. In bf16, e^v is wrong by up to 2^-8: more
                 than the whole KL for |v| < 0.06. Here: fp32, by expm1.
    top-k        A rounding selects other patches. bf16 makes energies equal that differ by 0.4 %,
                 so an evaluation in bf16 would reconstruct other patches than one in fp32. Here:
                 chosen in fp32.
    positions    They are computed in fp32 from integer coordinates at every call. No level can
                 round a table of them.
    half_torso   This is the published configuration, TRELLIS's convert_to_fp16: the weights of both
                 torsos are fp16, input and output layers are fp32. torch.optim.AdamW(eps=1e-8)
                 computes 0/0 on them in step one (microsoft/TRELLIS issue 162). They need fp32
                 masters and a loss scale (TRELLIS: 2^20), since half gradients below 3e-8 are 0. O2
                 with --keep-fp32 '*.input_layer' '*.out_layer' does all of this.

The residual stream has the dtype of the torso's weights: fp32 under autocast, half at O2, O3 and in
a half torso.

Differences from TRELLIS: images for voxels, so 2 coordinates for 3 and patches for DINOv2 features;
a background, which the decoder reads; full attention for shifted windows of 8; the loss is a mean
squared error of patches, not L1, SSIM and LPIPS of renderings; KL weight 1e-5, not 1e-6; logvar is
clamped; the last layers of encoder and decoder do not start at 0; one decoder, of patches, not of
Gaussians, radiance fields or meshes.

Copy this file alone: it needs torch and nothing else.

Paste::

    import torch
    from slat_vae import PRESETS, SLatVAE

    options = dict(PRESETS["slat_vae-test"])
    grid = options.pop("grid")  # patches a side
    model = SLatVAE(num_classes=10, image_size=32, patch_size=32 // grid, **options)
    images = torch.randn(8, 3, 32, 32)
    labels = torch.zeros(8).long()
    loss, metrics = model(images, labels)
    loss.backward()
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PRESETS = {
    # 44 thousand parameters at 32 pixels
    "slat_vae-test": dict(grid=4, dim=32, depth=1, heads=2, latent=4),
    # 0.8 million. On CIFAR-10 the patches that are not active have a mse of 0.023 at a share of
    # 0.5, of 0.005 at 0.75.
    "slat_vae": dict(grid=8, dim=128, depth=2, heads=4, latent=12, active=0.75),
    # The same with fp16 torsos. The default precision refuses it: --precision O2 has the masters
    # that it needs.
    "slat_vae-half": dict(
        grid=8, dim=128, depth=2, heads=4, latent=12, active=0.75, half_torso=True
    ),
    # TRELLIS: 12 blocks, 768 wide, 8 channels
    "slat_vae-b": dict(patch_size=4, dim=768, depth=12, heads=12, latent=8),
}

# of the KL in nats a token: it bounds the latents, and a larger one blurs the picture
KL_WEIGHT = 1e-5
# std 4.5e-5 to 148: z stays far below 65504. Outside this range logvar has no gradient
LOGVAR = (-20.0, 10.0)


def take(images: Tensor, coords: Tensor, patch_size: int) -> Tensor:
    """The patches of images (B, C, H, W) at coords (B, K, 2), int64 (row, column): (B, K, C *
    patch_size**2).
    """
    patches = F.pixel_unshuffle(images, patch_size)  # B, P, H / patch_size, W / patch_size
    index = coords[..., :1] * patches.shape[3] + coords[..., 1:]
    # B, K, P
    return patches.flatten(2).transpose(1, 2).gather(1, index.expand(-1, -1, patches.shape[1]))


def put(images: Tensor, coords: Tensor, values: Tensor, patch_size: int) -> Tensor:
    """The inverse of take: a copy of images (B, C, H, W) whose patches at coords are values (B, K,
    P).
    """
    patches = F.pixel_unshuffle(images, patch_size)  # B, P, H / patch_size, W / patch_size
    index = coords[..., :1] * patches.shape[3] + coords[..., 1:]
    # B, patches, P
    flat = patches.flatten(2).transpose(1, 2).scatter(1, index.expand_as(values), values)
    return F.pixel_shuffle(flat.transpose(1, 2).reshape(patches.shape), patch_size)  # B, C, H, W


def positions(coords: Tensor, dim: int) -> Tensor:
    """Integer coords (..., 2) -> fp32 (..., dim): sines and cosines of row and column, a quarter of
    dim each.
    """
    k = torch.arange(dim // 4, device=coords.device, dtype=torch.float32)
    # ..., 2, dim / 4
    angles = coords.float()[..., None] * torch.exp(-math.log(1e4) * k / (dim // 4))
    return torch.cat([angles.sin(), angles.cos()], -1).flatten(-2)


class LayerNorm32(nn.Module):
    """LayerNorm without parameters. The statistics are fp32; the result has the input's dtype."""

    def __init__(self, eps: float = 1e-6):
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype)


class Attention(nn.Module):
    """Multi-head self-attention over a set (B, K, dim). The order of the tokens has no effect.

    It is written out because the tokens are few. With scaled_dot_product_attention, whose backward
    took a third of the step, the whole model trained 1.7 times as slowly on 2 CPU cores.
    """

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(dim, 3 * dim)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        B, K, D = x.shape
        # B, heads, K, ...
        q, k, v = self.to_qkv(x).view(B, K, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        # B, heads, K, K; scaled first: far from 65504
        logits = (q * (D // self.heads) ** -0.5) @ k.transpose(-2, -1)
        x = torch.softmax(logits.float(), -1).to(v.dtype) @ v  # B, heads, K, D / heads
        return self.to_out(x.transpose(1, 2).reshape(B, K, D))


class Block(nn.Module):
    """Pre-norm transformer block.

    Each branch is cast to the stream's dtype: under autocast the stream stays fp32.
    """

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.norm1 = LayerNorm32()
        self.norm2 = LayerNorm32()
        self.attn = Attention(dim, heads)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Linear(4 * dim, dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x)).to(x.dtype)
        return x + self.mlp(self.norm2(x)).to(x.dtype)


class SparseTransformer(nn.Module):
    """Tokens (B, K, dim_in) at coords (B, K, 2) -> (B, K, dim_out). Permuted tokens give the
    permuted output.

    `blocks` is the torso, which half_torso makes fp16. input_layer and out_layer are not part of
    the torso.
    """

    def __init__(self, dim_in: int, dim: int, dim_out: int, depth: int, heads: int):
        super().__init__()
        self.input_layer = nn.Linear(dim_in, dim)
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(depth)))
        self.norm = LayerNorm32(1e-5)  # the published eps of the last norm
        self.out_layer = nn.Linear(dim, dim_out)

    def forward(self, tokens: Tensor, coords: Tensor) -> Tensor:
        x = self.input_layer(tokens)  # B, K, dim
        x = x.float() + positions(coords, x.shape[-1])
        # read at each call: fp32_eval lends fp32 weights
        x = self.blocks(x.to(next(self.blocks.parameters()).dtype))
        # B, K, dim_out; the norm and its result are fp32
        return self.out_layer(self.norm(x.float()))


class KLLatent(nn.Module):
    """Moments (B, K, 2 * latent), any float dtype -> a latent (B, K, latent) and its KL to N(0, 1)
    (B, K), both fp32.

    The KL is in nats a token: 1/2 sum(mean^2 + e^logvar - 1 - logvar), equation 10 of arXiv
    1312.6114. In training the latent is drawn from torch's global generator. In evaluation it is
    the mean.
    """

    def forward(self, moments: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(moments.device.type, enabled=False):
            mean, logvar = moments.float().chunk(2, -1)  # each B, K, latent
            logvar = logvar.clamp(*LOGVAR)
            kl = (mean.square() + torch.expm1(logvar) - logvar).sum(-1) / 2  # B, K
            z = mean + torch.randn_like(mean) * (logvar / 2).exp() if self.training else mean
        return z, kl


class SLatVAE(nn.Module):
    """Autoencoder of images (B, 3, image_size, image_size), fp32 and normalised. Labels are not
    used.

    Args:
        num_classes: not used. Every model of this folder takes it.
        patch_size: side of a patch in pixels.
        dim, depth, heads: width, number of blocks and attention heads of the encoder and of the
            decoder.
        latent: numbers in the latent of an active patch.
        active: share of the patches that are active.
        half_torso: store both torsos' parameters in fp16. The optimizer then needs fp32 masters.
    Raises:
        ValueError: sizes that do not divide; in the forward, images of another size.
    """

    judged_by = "-loss"

    def __init__(
        self,
        *,
        num_classes: int,
        image_size: int = 32,
        patch_size: int,
        channels: int = 3,
        dim: int,
        depth: int,
        heads: int,
        latent: int,
        active: float = 0.5,
        half_torso: bool = False,
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
                f"dim {dim} is not a multiple of 4: sine and cosine of row and column share it"
            )
        self.image_size = image_size
        self.patch_size = patch_size
        self.active = max(1, round(active * (image_size // patch_size) ** 2))
        pixels = channels * patch_size**2
        self.encoder = SparseTransformer(pixels, dim, 2 * latent, depth, heads)
        self.latent = KLLatent()
        self.decoder = SparseTransformer(latent + pixels, dim, pixels, depth, heads)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        # The first picture is nearly the background. With TRELLIS's 0 the torso's first gradient
        # would be exactly 0.
        self.decoder.out_layer.weight.data.mul_(0.1)
        if half_torso:
            self.encoder.blocks.half()
            self.decoder.blocks.half()

    @torch.no_grad()
    def structure(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The active patches' (row, column), int64 (B, K, 2), and the background, fp32 and shaped
        like images.

        The active patches are those with the most energy in image - background. Everything here is
        fp32.
        """
        size = images.shape[2:]
        if size != (self.image_size, self.image_size):
            built = f"this network was built for image_size={self.image_size}"
            raise ValueError(f"images of {tuple(size)}, but {built}")
        with torch.autocast(images.device.type, enabled=False):
            images = images.float()
            # as images
            background = F.interpolate(
                F.avg_pool2d(images, self.patch_size), size=size, mode="bilinear"
            )
            # B, rows, columns
            energy = F.avg_pool2d((images - background).square().sum(1), self.patch_size)
            index = energy.flatten(1).topk(self.active).indices  # B, K
        return torch.stack([index // energy.shape[2], index % energy.shape[2]], -1), background

    def code(
        self, images: Tensor, coords: Tensor, background: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Encode and decode the active patches. fp32: their detail and its copy (B, K, P), and the
        KL (B, K).
        """
        detail = take(images.float() - background, coords, self.patch_size)
        z, kl = self.latent(self.encoder(detail, coords))  # B, K, latent; B, K
        known = take(background, coords, self.patch_size)  # B, K, P
        return detail, self.decoder(torch.cat([z, known], -1), coords).float(), kl

    def assemble(self, background: Tensor, coords: Tensor, detail: Tensor) -> Tensor:
        """The picture, fp32 (B, C, H, W): the background, plus detail (B, K, P) at coords (B, K,
        2).
        """
        return put(
            background, coords, take(background, coords, self.patch_size) + detail, self.patch_size
        )

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Images to the mean loss (fp32 scalar) and metrics of shape (B,). labels are not used.

        loss: mean squared error of the active patches + KL_WEIGHT * kl. mse: that of the whole
        picture. kl: nats an active patch. Errors are in units of the normalised images.
        """
        coords, background = self.structure(images)
        detail, decoded, kl = self.code(images, coords, background)
        with torch.autocast(images.device.type, enabled=False):
            kl = kl.mean(1)  # B
            losses = (decoded - detail).square().mean((1, 2)) + KL_WEIGHT * kl  # B
            picture = self.assemble(background, coords, decoded.detach())
            mse = (picture - images.float()).square().mean((1, 2, 3))
        return losses.mean(), {"loss": losses.detach(), "mse": mse, "kl": kl.detach()}

    @torch.no_grad()
    def show(self, images: Tensor, labels: Tensor) -> Tensor:
        """fp32 (2 B, C, H, W): eight originals, their reconstructions, and so on."""
        training = self.training
        self.eval()  # the latent is its mean
        coords, background = self.structure(images)
        pictures = self.assemble(background, coords, self.code(images, coords, background)[1])
        self.train(training)
        pairs = zip(images.float().split(8), pictures.split(8), strict=True)
        return torch.cat([half for pair in pairs for half in pair])
