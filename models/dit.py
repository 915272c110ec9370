# SPDX-License-Identifier: MIT (finite 4.0.0, 2026-11-28)
"""
DiT: a diffusion transformer that draws images of a class (Peebles & Xie, arXiv 2212.09748), written
anew, on pixels.

Half precision ruins a diffusion model in four places, without one NaN. What this file does about
each:

    timestep     sin(t * f) for t up to 999. bf16 counts exactly to 256: t = 999 becomes 1000, and
                 sin(999) = -0.03 becomes 0.83. fp16 counts to 2048, but its t * f are 0.5 apart
                 there. Here t is int64, the angle fp32.
    schedule     1 - alpha_bar from a bf16 table is 0 for t < 21, where the noise reaches 0.044; O3
                 casts every buffer. Here no table exists: the cosine schedule (arXiv 2102.09672) is
                 an angle, signal = cos, noise = sin.
    modulate     x * (1 + scale) + shift. adaLN-Zero starts at scale = 0. The first bf16 number
                 above 1 is 1 + 2^-7, so a scale under 0.4 % is lost. modulate runs in fp32; so do
                 LayerNorm and the residual stream.
    loss         The mean squared error of the predicted noise ends near 0.1. There, bf16's numbers
                 are 5e-4 apart: two epochs differ by less. Here the loss is fp32, from the
                 prediction on.

A fifth fault needs no half precision: a wrong fused kernel. OpenDiT's modulate gave nearly every
image of a batch the shift and scale of image 0. Its test had batches of 1, where this is right. The
loss fell normally and was NaN around epoch 5 (failures/opendit_modulate_kernel.py). Here a fused
path runs only where it agreed with the plain path, forward and backward, on several images
(`verified`). The label table has `num_classes` rows: label 10 of 10 is an IndexError.

Differences from facebookresearch/DiT: pixels, not latents (and a gated path for wide patches); the
cosine schedule, not the linear one, and its angle at t / 1000, not (t + 1) / 1000; no learned
variance; samples are clamped to the data's range; 25 DDIM steps, not 250 of DDPM; "no class" has a
table of its own; fixed noise in evaluation; fp32 as above.

Copy this file alone: it needs torch and nothing else.

Paste::

    import torch
    from dit import DiT

    model = DiT(num_classes=10, image_size=32, patch_size=4, dim=64, depth=2, heads=2)
    images = torch.randn(8, 3, 32, 32)  # normalised
    labels = torch.zeros(8).long()
    loss, metrics = model(images, labels)
    loss.backward()
    samples = model.sample(labels[:2], steps=5)  # 2, 3, 32, 32
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TIMESTEPS = 1000
# the fractional parts of n * GOLDEN fill [0, 1) evenly for every number of n
GOLDEN = (math.sqrt(5) - 1) / 2

PRESETS = {
    # for tests: 53 thousand parameters at 32 px
    "dit-test": dict(grid=8, dim=32, depth=2, heads=2),
    # 2.8 million. With 64 tokens in bf16 on a CPU, SDPA and its backward took 2.6 to 5 times as
    # long as plain.
    "dit": dict(grid=8, dim=192, depth=4, heads=4, fused=()),
    "dit-s2": dict(patch_size=2, dim=384, depth=12, heads=6),  # 33 million: the paper's DiT-S/2
}


# --- plain and fused paths ------------------------------------------------------------------------


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """adaLN's modulation in fp32: x (B, T, D), shift and scale (B, D) of any float dtype -> fp32
    (B, T, D).
    """
    return x.float() * (1 + scale.float()[:, None]) + shift.float()[:, None]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v for (B, H, T, D): matmuls in the inputs' dtype, softmax in fp32.

    Dividing q comes before the product: in fp16 the product may already be above 65504.
    """
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)  # B, H, T, T
    return scores.float().softmax(-1).to(v.dtype) @ v


PLAIN: dict[str, Callable[..., Tensor]] = {"sdpa": attention, "modulate": modulate}
# built at first use: torch.compile takes seconds
FUSED: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "sdpa": lambda: F.scaled_dot_product_attention,
    "modulate": lambda: torch.compile(modulate),
}


def worst_errors(plain: Callable, fused: Callable, inputs: Sequence[Tensor]) -> dict[str, float]:
    """How far `fused` is from `plain`: relative errors (2-norms) of the output and of each input's
    gradient.

    Each error is that of the worst sample (dimension 0): a mean would hide one wrong sample among
    many. The gradient is taken along a random direction: a direction of ones would not notice a
    permutation.
    """
    results = []
    for path in (plain, fused):
        leaves = [t.detach().clone().requires_grad_() for t in inputs]
        out = path(*leaves)
        direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, direction)])
    whats = ("output", *(f"gradient of input {i}" for i in range(len(inputs))))
    errors = {}
    for what, want, got in zip(whats, *results, strict=True):
        if (want.shape, want.dtype) != (got.shape, got.dtype):
            is_now = f"{got.dtype} {tuple(got.shape)}"
            raise TypeError(f"its {what} is {is_now}, not {want.dtype} {tuple(want.shape)}")
        want = want.float().flatten(1)  # samples, numbers of a sample
        got = got.float().flatten(1)
        error = (got - want).norm(dim=1) / want.norm(dim=1).clamp(min=1e-30)
        errors[what] = error.nan_to_num(math.inf).max().item()  # NaN counts as the largest error
    return errors


def verified(name: str, inputs: Sequence[Tensor]) -> Callable[..., Tensor]:
    """FUSED[name] if it agrees with PLAIN[name], forward and backward; else PLAIN[name], and a
    warning.

    Both run on 5 random samples of the inputs' sizes and dtypes: 1 would not show a kernel that
    uses sample 0 for all.
    """
    generator = torch.Generator().manual_seed(0)  # the global random state does not change
    # Eight roundings of the coarsest input. For fp32 these are TF32's roundings: the policy may
    # have turned TF32 on.
    tolerance = 8 * max(2**-10, *(torch.finfo(t.dtype).eps for t in inputs))
    try:
        with torch.inference_mode(False), torch.enable_grad():
            samples = [
                torch.randn(5, *t.shape[1:], generator=generator).to(t.device, t.dtype)
                for t in inputs
            ]
            fused = FUSED[name]()
            errors = worst_errors(PLAIN[name], fused, samples)
        fault = "; ".join(
            f"its {what} is off by {off:.2g}"
            for what, off in errors.items()
            if not off <= tolerance
        )
    # a kernel or a compiler may raise anything; the plain path always works
    except Exception as error:
        fault = f"it raised {type(error).__name__}: {error}"
    if not fault:
        return fused
    on = f"5 samples, {inputs[0].dtype}, {inputs[0].device.type}, tolerance {tolerance:.2g}"
    warnings.warn(
        f"fused {name} is turned off, the plain path runs instead: {fault} ({on})", stacklevel=2
    )
    return PLAIN[name]


class Fused:
    """Calls a path by name: the fused path if `names` holds the name and the path is verified, else
    the plain path.

    The check runs at first use, for each device and dtype. torch.compile cannot trace it: there an
    earlier choice (of one eager step) holds, else the plain path, which torch.compile fuses itself.
    """

    def __init__(self, names: Sequence[str]):
        if unknown := set(names) - set(FUSED):
            raise ValueError(
                f"unknown fused path {', '.join(sorted(unknown))}: choose from {', '.join(FUSED)}"
            )
        self.names = tuple(names)
        self.chosen: dict[tuple, Callable[..., Tensor]] = {}

    def __call__(self, name: str, *inputs: Tensor) -> Tensor:
        key = (name, inputs[0].device.type, *(t.dtype for t in inputs))
        if name in self.names and key not in self.chosen and not torch.compiler.is_compiling():
            self.chosen[key] = verified(name, inputs)
        return self.chosen.get(key, PLAIN[name])(*inputs)


# --- the network ----------------------------------------------------------------------------------


def sinusoids(x: Tensor, dim: int) -> Tensor:
    """Numbers (N,) -> (N, dim): cos and sin of x / 10000^(i / (dim / 2)), in fp32 in every
    precision.

    For x < 1000 the angle is wrong by at most 6e-5; in fp16 by up to 0.25 radians, in bf16 by up to
    2.
    """
    with torch.autocast(x.device.type, enabled=False):
        powers = torch.arange(dim // 2, device=x.device, dtype=torch.float32) / (dim // 2)
        angles = x.float()[:, None] * torch.exp(-math.log(10000) * powers)  # N, dim / 2
        return torch.cat([angles.cos(), angles.sin()], 1)


def signal_and_noise(t: Tensor) -> tuple[Tensor, Tensor]:
    """sqrt(alpha_bar) and sqrt(1 - alpha_bar) at floating timesteps t in [0, TIMESTEPS), in t's
    dtype (not half).
    """
    # 0.008: t = 0 has noise of about a pixel's rounding
    angle = (t / TIMESTEPS + 0.008) / 1.008 * (math.pi / 2)
    return angle.cos(), angle.sin()


class TimestepEmbedding(nn.Module):
    """Integers (B,) -> (B, dim)."""

    def __init__(self, dim: int):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(256, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, t: Tensor) -> Tensor:
        return self.mlp(sinusoids(t, 256))


class LabelEmbedding(nn.Module):
    """Labels (B,) and a mask (B,) of those to leave out -> (B, dim).

    A label outside the classes is an error.
    """

    def __init__(self, num_classes: int, dim: int):
        super().__init__()
        self.classes = nn.Embedding(num_classes, dim)
        self.null = nn.Embedding(1, dim)

    def forward(self, labels: Tensor, left_out: Tensor) -> Tensor:
        return torch.where(
            left_out[:, None], self.null(torch.zeros_like(labels)), self.classes(labels)
        )


class Attention(nn.Module):
    """Multi-head self-attention over (B, T, D)."""

    def __init__(self, dim: int, heads: int, fused: Fused):
        super().__init__()
        self.heads = heads
        self.fused = fused
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        # B, heads, T, ...
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        # from B, heads, T, D / heads
        return self.proj(self.fused("sdpa", q, k, v).transpose(1, 2).reshape(B, T, D))


class Block(nn.Module):
    """x (B, T, D) in fp32 and the condition (B, D) -> fp32 (B, T, D).

    The identity while its gates are 0.
    """

    def __init__(self, dim: int, heads: int, fused: Fused):
        super().__init__()
        self.fused = fused
        self.adaln = nn.Linear(dim, 6 * dim)
        # the stream is fp32, so the norm is too
        self.norm1 = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        self.attn = Attention(dim, heads, fused)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Linear(4 * dim, dim)
        )

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        # each B, D
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaln(condition).chunk(6, 1)
        x = x + gate1[:, None] * self.attn(self.fused("modulate", self.norm1(x), shift1, scale1))
        return x + gate2[:, None] * self.mlp(self.fused("modulate", self.norm2(x), shift2, scale2))


class FinalLayer(nn.Module):
    """x (B, T, D), the condition (B, D) and noisy patches (B, T, features), fp32 -> their noise; 0
    before any update.

    The noise of a patch with more than D numbers (8x8 has 192) does not fit through the stream.
    Then noisy pixels are also added to the output directly, times a gate for each image. Like the
    other gates, it is 0 at first.
    """

    def __init__(self, dim: int, features: int, fused: Fused):
        super().__init__()
        self.fused = fused
        self.dim = dim
        self.gated = features > dim
        self.adaln = nn.Linear(dim, 2 * dim + self.gated)
        self.norm = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        self.linear = nn.Linear(dim, features)

    def forward(self, x: Tensor, condition: Tensor, patches: Tensor) -> Tensor:
        # gate: 1 wide, or 0
        shift, scale, gate = self.adaln(condition).tensor_split([self.dim, 2 * self.dim], 1)
        # B, T, features
        noise = self.linear(self.fused("modulate", self.norm(x), shift, scale)).float()
        return noise + gate.float()[:, None] * patches if self.gated else noise


class DiT(nn.Module):
    """Class-conditional diffusion on normalised images (B, 3, image_size, image_size).

    Args:
        num_classes: number of classes of the data; labels run from 0 to num_classes - 1.
        patch_size: side of a patch. There are (image_size / patch_size)^2 tokens.
        label_dropout: share of training images without their label, which guidance needs (arXiv
            2207.12598).
        fused: any of "sdpa" and "modulate" (torch.compile). Each runs only where it agrees with the
            plain path.
    """

    judged_by = "-loss"
    needs_classes = True

    def __init__(
        self,
        *,
        num_classes: int,
        image_size: int = 32,
        patch_size: int = 4,
        channels: int = 3,
        dim: int = 96,
        depth: int = 3,
        heads: int = 2,
        label_dropout: float = 0.1,
        fused: Sequence[str] = ("sdpa",),
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
        self.label_dropout = label_dropout
        grid = image_size // patch_size
        features = channels * patch_size**2
        paths = Fused(fused)
        self.patch = nn.Linear(features, dim)
        self.time = TimestepEmbedding(dim)
        self.label = LabelEmbedding(num_classes, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, paths) for _ in range(depth))
        self.final = FinalLayer(dim, features, paths)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        for linear in (self.time.mlp[0], self.time.mlp[2]):
            nn.init.normal_(linear.weight, std=0.02)  # as published
        # adaLN-Zero
        for zero in (*(block.adaln for block in self.blocks), self.final.adaln, self.final.linear):
            nn.init.zeros_(zero.weight)
        # O3 casts both buffers to fp16; their numbers are at most 4, off by at most 2^-10
        side = torch.arange(grid)
        columns, rows = (
            sinusoids(place, dim // 2)
            for place in (side.repeat(grid), side.repeat_interleave(grid))
        )
        # sines first, as published
        waves = [part for axis in (columns, rows) for part in reversed(axis.chunk(2, 1))]
        self.register_buffer("positions", torch.cat(waves, 1), persistent=False)  # tokens, dim
        self.register_buffer("pixel_range", torch.tensor([[-3.0], [3.0]]).repeat(1, channels))

    @torch.no_grad()
    def init_from_data(self, images: Tensor) -> None:
        """Store the range of each channel of normalised images (N, 3, H, W).

        Samples are clamped to this range.
        """
        self.pixel_range.copy_(torch.stack([images.amin((0, 2, 3)), images.amax((0, 2, 3))]))

    def predict(self, noisy: Tensor, t: Tensor, labels: Tensor, left_out: Tensor) -> Tensor:
        """The noise, fp32, of fp32 images (B, 3, H, W) at int64 timesteps (B,); `left_out` masks
        labels to ignore.
        """
        B, C, H, W = noisy.shape
        p = self.patch_size
        patches = (
            noisy.reshape(B, C, H // p, p, W // p, p)
            .permute(0, 2, 4, 3, 5, 1)
            .reshape(B, -1, p * p * C)
        )
        x = self.patch(patches).float() + self.positions.float()  # B, T, dim
        condition = F.silu(self.time(t) + self.label(labels, left_out))  # B, dim
        for block in self.blocks:
            x = block(x, condition)
        noise = self.final(x, condition, patches)  # B, T, p * p * C
        return noise.view(B, H // p, W // p, p, p, C).permute(0, 5, 1, 3, 2, 4).reshape(B, C, H, W)

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Images (B, 3, H, W) and int64 labels (B,) to the mean loss (fp32 scalar) and metrics of
        shape (B,).

        In eval mode, image i of a batch always has the same timestep and the same noise, in every
        precision and on every device. Two evaluations then differ by the weights only. A prediction
        of 0 has loss 1.0.
        """
        images = images.float()
        B = len(images)
        if self.training:
            t = torch.randint(TIMESTEPS, (B,), device=images.device)
            # on channels-last, randn_like takes 8 times longer
            noise = torch.randn(images.shape, device=images.device)
            left_out = torch.rand(B, device=images.device) < self.label_dropout
        else:
            noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0)).to(
                images.device
            )
            t = (
                ((torch.arange(B, dtype=torch.float64) + 0.5) * GOLDEN % 1 * TIMESTEPS)
                .long()
                .to(images.device)
            )
            left_out = torch.zeros_like(labels, dtype=torch.bool)
        signal, sigma = (part.view(B, 1, 1, 1) for part in signal_and_noise(t.float()))
        predicted = self.predict(signal * images + sigma * noise, t, labels, left_out)
        losses = (predicted - noise).square().mean((1, 2, 3))
        return losses.mean(), {"loss": losses.detach()}

    def guided(self, x: Tensor, t: Tensor, labels: Tensor, guidance: float) -> Tensor:
        """Classifier-free guidance (arXiv 2207.12598). 0: the prediction without label; 1: the
        conditional one.
        """
        left_out = torch.arange(2 * len(x), device=x.device) >= len(x)
        # B, 3, H, W
        noise, null = self.predict(
            torch.cat([x, x]), t.repeat(2), labels.repeat(2), left_out
        ).chunk(2)
        return noise + (guidance - 1) * (noise - null)

    @torch.no_grad()
    def sample(
        self, labels: Tensor, *, steps: int = 25, guidance: float = 2.0, seed: int = 0
    ) -> Tensor:
        """Draw one image per label: fp32 (N, C, H, W), within the range of the training images.

        DDIM (arXiv 2010.02502, eq. 12), which needs few steps. The noise comes from a CPU
        generator, so a seed gives the same noise everywhere.
        """
        generator = torch.Generator().manual_seed(seed)
        device = labels.device
        channels = self.pixel_range.shape[1]
        shape = (len(labels), channels, self.image_size, self.image_size)
        low, high = self.pixel_range.float().view(2, 1, channels, 1, 1)
        x = torch.randn(shape, generator=generator).to(device)
        times = torch.linspace(TIMESTEPS - 1, 0, steps).round().double()
        signal, sigma = (level.tolist() for level in signal_and_noise(times))
        levels = [*zip(signal, sigma, strict=True), (1.0, 0.0)]  # the last step ends without noise
        for t, (a, s), (a_next, s_next) in zip(
            times.tolist(), levels[:-1], levels[1:], strict=True
        ):
            noise = self.guided(x, torch.full_like(labels, int(t)), labels, guidance)
            # At t = 999 the signal is 0.0016, so bf16's rounding alone moves the image by 1. The
            # clamp bounds it.
            image = ((x - s * noise) / a).clamp(low, high)
            noise = (x - a * image) / s
            x = a_next * image + s_next * noise
        return x

    @torch.no_grad()
    def show(self, images: Tensor, labels: Tensor) -> Tensor:
        """The model's samples for `labels`: DDIM, 25 steps, guidance 2, fixed noise.

        `images` are not used.
        """
        return self.sample(labels)
