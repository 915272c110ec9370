# SPDX-License-Identifier: MIT (finite 4.0.0, 2026-11-28)
"""
VMamba: a state space model. It reads the image in four directions; a selective scan takes the place
of attention.

Liu et al., "VMamba: Visual State Space Model" (arXiv 2401.10166), on Mamba's selective scan (arXiv
2312.00752), written anew. Along a sequence of tokens every channel keeps d_state numbers h. Each
token decides what h forgets and stores:

    h_t = exp(delta_t A) h_{t-1} + delta_t B_t x_t
    y_t = C_t h_t + D x_t                               A = -exp(A_log) < 0 < delta

What half precision breaks here, and what this file does about it:

    range     y is a product of four activations, C * B * delta * x, and nothing bounds the product:
              16^4 = 65536 is above fp16's 65504. The four directions are added *before* out_norm,
              so inf - inf makes every logit NaN. With `force_fp32=True` the scan, the sum and the
              norm are one fp32 island; the cast to half follows the norm. With False the cast
              precedes the sum, as when VMamba trained well and evaluated to NaN: there
              `self.training` chose (failures/vmamba_eval_nan.py). Here training and evaluation do
              the same.
    memory    delta starts between 0.001 and 0.1. A decay of exp(-0.001) = 0.9990 is 1.0 in bf16,
              whose numbers below 1 are 0.0039 apart. Such a state never forgets, although after
              1,024 tokens e^-1 = 0.36 should be left.
    division  A popular parallel form is h = P * cumsum(b / P), where P is the cumulative product of
              decays. P reaches 0: at delta A = -50 the third P is e^-150, which is 0 even in fp32.
              This file never divides, and never takes exp of a positive number. `linear_scan` cuts
              the sequence into chunks and computes them in parallel.

The residual stream is fp32, as the original's is under CUDA's autocast, where layer norm returns
fp32. O3 has no fp32 norms by definition: it casts out_norm's input to fp16, so there the island
ends at the sum.

Differences from MzeroMiko/VMamba: channels last everywhere; the stacked projections are transposed;
the scan is as wide as the block (ssm_ratio 1), so the first version, of ratio 2, cannot be built;
no dropout, post-norm or position. `vmamba-t` is VMamba-T (vssm1_tiny_0230s). `vmamba` has its
blocks in two stages behind a stem of one convolution: the published stem of two makes patches of 4
pixels only. `vmamba` begins with Xavier's init, `vmamba-t` with the published.

Copy this file alone: it needs torch and nothing else.

Paste::

    import torch
    import torch.nn.functional as F
    from vmamba import VMamba

    net = VMamba(num_classes=10, image_size=32, patch_size=4, dims=(32, 64), depths=(1, 1))
    images = torch.randn(8, 3, 32, 32)
    labels = torch.zeros(8).long()
    loss = F.cross_entropy(net(images).float(), labels)
    loss.backward()
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# the published second version's
BLOCK = dict(d_state=1, gate=False, conv_bias=False, mlp_ratio=4.0)
PRESETS = {
    # gate, bias and MLP
    "vmamba-test": dict(grid=4, dims=(16, 24), depths=(1, 1), d_state=2, mlp_ratio=2.0),
    "vmamba": dict(grid=8, dims=(64, 128), depths=(2, 2), init_std=None, **BLOCK),  # 0.5 million
    # 30 million
    "vmamba-t": dict(patch_size=4, stem=2, dims=(96, 192, 384, 768), depths=(2, 2, 8, 2), **BLOCK),
}
# numbers in one step of the recurrence; with fewer, the call of the kernel costs more than its work
FULL_STEP = 2**15
SHORTEST_CHUNK = 16
# numbers of h (2 MiB) that a CPU processes at once: its cache then serves all ten passes over them
CACHED = 2**19


# --- the selective scan ---------------------------------------------------------------------------


# a graph break is cheap; inductor unrolls the steps, compiles for 95 s and runs half as fast
@torch.compiler.disable
def selective_scan(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """h_t = exp(delta_t A) h_{t-1} + delta_t B_t u_t, y_t = C_t h_t + D u_t, from h = 0; parallel
    over the length.

    Args:
        u, delta: (K, batch, L, D); K is the number of directions, each with its own parameters.
            delta >= 0.
        A: (K, D, N), negative. B, C: (K, batch, L, N). D: (K, D).
    Returns:
        y (K, batch, L, D) in fp32, whatever autocast says and whatever half dtypes the inputs have;
        fp64 if u is fp64. It can be differentiated once.
    """
    dtype = torch.promote_types(u.dtype, torch.float32)
    A, D = A.to(dtype), D.to(dtype)[:, None, None]  # K, D, N; K, 1, 1, D
    parts = [(u, delta, B, C)]
    if u.is_cpu and not is_traced():  # the batch is cut into this many
        count = max(1, u.numel() * A.shape[-1] // CACHED)
        parts = zip(*(t.chunk(count, 1) for t in (u, delta, B, C)), strict=True)
    ys = []
    with torch.autocast(u.device.type, enabled=False):
        for part in parts:
            u, delta, B, C = (t.to(dtype) for t in part)
            y, _ = SelectiveScan.apply(u, delta, A, B, C)
            ys.append(torch.addcmul(y, u, D))
    return ys[0] if len(ys) == 1 else torch.cat(ys, 1)


def selective_scan_loop(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor
) -> Tensor:
    """The same by its definition, one token after the other.

    The tests compare `selective_scan` with this loop.
    """
    # h: K, batch, D, 1; K, batch, D, N after the first token
    h = torch.zeros_like(u[:, :, 0, :, None])
    ys = []
    for u_t, delta_t, B_t, C_t in zip(*(t.unbind(2) for t in (u, delta, B, C)), strict=True):
        h = (
            torch.exp(delta_t[..., None] * A[:, None]) * h
            + (delta_t * u_t)[..., None] * B_t[..., None, :]
        )
        ys.append((h * C_t[..., None, :]).sum(-1))
    return torch.stack(ys, 2) + D[:, None, None] * u


class SelectiveScan(torch.autograd.Function):
    """y_t = C_t h_t of selective_scan.

    Inside, states precede channels: (K, batch, L, N, D), and D is contiguous.
    """

    @staticmethod
    def forward(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor):
        A = A.transpose(1, 2).contiguous()[:, None, None]  # K, 1, 1, N, D
        # K, batch, L, N, D, in (0, 1]: underflow to 0 is the right answer
        a = (delta.unsqueeze(3) * A).exp_()
        h = linear_scan(a, (delta * u).unsqueeze(3) * B.unsqueeze(4))  # K, batch, L, N, D
        return sum_states(h * C.unsqueeze(4)), h

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs, output[1])  # to compute a again is cheaper than to keep it

    @staticmethod
    def vmap(info, in_dims, *inputs):
        """More directions: what torch.vmap stacks goes into K."""
        stacked = [
            t.expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0)
            for t, d in zip(inputs, in_dims, strict=True)
        ]
        outputs = SelectiveScan.apply(*(t.flatten(0, 1) for t in stacked))
        return tuple(t.unflatten(0, (info.batch_size, -1)) for t in outputs), (0, 0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gy: Tensor, _):
        u, delta, A, B, C, h = ctx.saved_tensors
        A = A.transpose(1, 2).contiguous()[:, None, None]
        # the decay from t to t + 1
        later = (F.pad(delta[:, :, 1:], (0, 0, 0, 1)).unsqueeze(3) * A).exp_()
        # dL/dh_t, through all later tokens too
        g = linear_scan(later, gy.unsqueeze(3) * C.unsqueeze(4), reverse=True)
        gC = (gy.unsqueeze(3) * h).sum(4)  # K, batch, L, N
        gB = ((delta * u).unsqueeze(3) * g).sum(4)  # K, batch, L, N
        g_written = sum_states(g * B.unsqueeze(4))  # K, batch, L, D: the gradient of delta * u
        # of delta_t A for t >= 1: decay_t h_{t-1} g_t
        g_exponent = later.mul_(h)[:, :, :-1].mul_(g[:, :, 1:])
        g_delta = g_written * u
        g_delta[:, :, 1:] += sum_states(g_exponent * A)
        # sum((1, 2)) is 50 times slower on a CPU
        gA = g_exponent.mul_(delta[:, :, 1:].unsqueeze(3)).sum(2).sum(1)
        return g_written.mul_(delta), g_delta, gA.transpose(1, 2), gB, gC


def sum_states(t: Tensor) -> Tensor:
    """(K, batch, L, N, D) -> (K, batch, L, D).

    One state is not summed: a CPU would pass over memory three times.
    """
    return t.squeeze(3) if t.shape[3] == 1 else t.sum(3)


def linear_scan(a: Tensor, b: Tensor, reverse: bool = False) -> Tensor:
    """h_t = a_t h_{t-1} + b_t along dim 2 of (K, batch, L, N, D), or from h_{t+1} in reverse. |a|
    <= 1. Overwrites b.

    All chunks run in parallel, twice. The first pass starts from 0 and finds what each chunk adds
    to its end. A scan over these ends gives the state before each chunk. The second pass starts
    from it. Work and memory are linear.
    """
    if is_traced():
        return doubling_scan(a, b)
    return chunked_scan(a.flatten(0, 1).flatten(2), b.flatten(0, 1).flatten(2), reverse).view(
        b.shape
    )


def chunked_scan(a: Tensor, b: Tensor, reverse: bool) -> Tensor:
    """linear_scan on contiguous (M, L, W), in C chunks of T tokens.

    C is just large enough to fill a step.
    """
    M, L, W = b.shape
    T = max(SHORTEST_CHUNK, math.ceil(L * M * W / FULL_STEP))
    C = math.ceil(L / T)
    T = math.ceil(L / C)  # chunks of equal length, so that the last one needs few zeros
    if C * T > L:  # zeros after the end: forwards nothing reads them, backwards they add nothing
        a, b = (F.pad(t, (0, 0, 0, C * T - L)) for t in (a, b))
    a, b = a.view(M, C, T, W), b.view(M, C, T, W)
    steps = list(zip(a.unbind(2), b.unbind(2), strict=True))  # T pairs, each tensor M, C, W
    if reverse:
        steps.reverse()
    h = None
    if C > 1:  # a single chunk really begins with h = 0
        end = steps[0][1]
        for a_t, b_t in steps[1:]:
            end = torch.addcmul(b_t, a_t, end)
        # M, C, W: the same scan over C chunks instead of L tokens
        ends = chunked_scan(a.prod(2), end, reverse)
        h = F.pad(ends[:, 1:], (0, 0, 0, 1)) if reverse else F.pad(ends[:, :-1], (0, 0, 1, 0))
    for a_t, b_t in steps:
        h = b_t if h is None else b_t.addcmul_(a_t, h)
    return b.view(M, C * T, W)[:, :L]


def is_traced() -> bool:
    """Whether the calls become a graph that is saved: for any batch, and with a gradient."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing()


def doubling_scan(a: Tensor, b: Tensor) -> Tensor:
    """linear_scan in log2(L) steps of all tokens, which write nothing in place."""
    shift = 1
    while shift < a.shape[2]:
        past_a, past_b = (F.pad(t[:, :, :-shift], (0, 0, 0, 0, shift, 0)) for t in (a, b))
        a, b = a * past_a, torch.addcmul(b, a, past_b)
        shift *= 2
    return b


# --- four directions ------------------------------------------------------------------------------


def cross_scan(x: Tensor) -> Tensor:
    """(B, H, W, D) -> (4, B, H * W, D): by rows, by columns, and both backwards."""
    # each B, H * W, D
    rows = x.flatten(1, 2)
    columns = x.transpose(1, 2).flatten(1, 2)
    return torch.stack([rows, columns, rows.flip(1), columns.flip(1)])


def cross_merge(ys: Tensor, H: int, W: int) -> Tensor:
    """(4, B, H * W, D) -> (B, H, W, D): adds the four results of a token, in their own dtype."""
    # each B, H * W, D
    rows = ys[0] + ys[2].flip(1)
    columns = ys[1] + ys[3].flip(1)
    return rows.unflatten(1, (H, W)) + columns.unflatten(1, (W, H)).transpose(1, 2)


class LayerNorm(nn.LayerNorm):
    """In fp32 on every device (CPU autocast would compute it in half).

    The result has the input's dtype.
    """

    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(
            x.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps
        )
        return y.to(x.dtype)


class CrossSelectiveScan(nn.Module):
    """The part of SS2D that overflows. It is a module of its own, so that a report can name it and
    keep_fp32 pin it.

    (B, H, W, D) of any float dtype -> the same, normalised. Each of the four directions has its own
    parameters.
    """

    def __init__(self, dim: int, d_state: int, force_fp32: bool):
        super().__init__()
        self.d_state = d_state
        self.force_fp32 = force_fp32
        self.dt_rank = math.ceil(dim / 16)
        bound = dim**-0.5
        self.x_proj = nn.Parameter(
            torch.empty(4, dim, self.dt_rank + 2 * d_state).uniform_(-bound, bound)
        )
        bound = self.dt_rank**-0.5
        self.dt_projs = nn.Parameter(torch.empty(4, self.dt_rank, dim).uniform_(-bound, bound))
        # Mamba's init: softplus(bias) is log-uniform in [0.001, 0.1], which is a memory of 10 to
        # 1,000 tokens.
        dt = torch.exp(torch.empty(4, dim).uniform_(math.log(0.001), math.log(0.1)))
        # the inverse of softplus
        self.dt_projs_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.A_logs = nn.Parameter(torch.log(torch.arange(1.0, d_state + 1)).repeat(4, dim, 1))
        self.Ds = nn.Parameter(torch.ones(4, dim))
        self.out_norm = LayerNorm(dim)

    def no_weight_decay(self) -> set[str]:
        """Decay would pull A to -1, delta to softplus(0) = 0.69 and the skip D to 0.

        None of these is neutral.
        """
        return {"A_logs", "Ds", "dt_projs_bias"}

    def forward(self, x: Tensor) -> Tensor:
        B, H, W, _ = x.shape
        xs = cross_scan(x)  # 4, B, L, D
        dt, Bs, Cs = (xs.flatten(1, 2) @ self.x_proj).split(
            [self.dt_rank, self.d_state, self.d_state], -1
        )
        # 4, B * L, D; both projections are ordinary matmuls, half under autocast
        dt = dt @ self.dt_projs
        with torch.autocast(x.device.type, enabled=False):
            delta = F.softplus(dt.float() + self.dt_projs_bias.float()[:, None])
            A = -torch.exp(self.A_logs.float())
            # 4, B, L, D or d_state
            delta, Bs, Cs = (t.unflatten(1, (B, H * W)) for t in (delta, Bs, Cs))
            ys = selective_scan(xs, delta, A, Bs, Cs, self.Ds)  # 4, B, L, D
            if not self.force_fp32:
                # the published mistake: the sum overflows before the norm can help
                ys = ys.to(x.dtype)
            return self.out_norm(cross_merge(ys, H, W)).to(x.dtype)  # B, H, W, D


# --- the network ----------------------------------------------------------------------------------


class SS2D(nn.Module):
    """2D selective scan: (B, H, W, dim) -> the same."""

    def __init__(self, dim: int, d_state: int, gate: bool, conv_bias: bool, force_fp32: bool):
        super().__init__()
        self.gate = gate
        self.in_proj = nn.Linear(dim, 2 * dim if gate else dim, bias=False)
        self.conv2d = nn.Conv2d(dim, dim, 3, padding=1, groups=dim, bias=conv_bias)
        self.core = CrossSelectiveScan(dim, d_state, force_fp32)
        self.out_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.in_proj(x)
        if self.gate:
            x, z = x.chunk(2, -1)  # each B, H, W, dim
        y = self.core(F.silu(self.conv2d(x.permute(0, 3, 1, 2))).permute(0, 2, 3, 1))
        return self.out_proj(y * F.silu(z) if self.gate else y)


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


class VSSBlock(nn.Module):
    """x + SS2D(norm(x)), then x + MLP(norm2(x)) where mlp_ratio is above 0. fp32 (B, H, W, dim) ->
    the same.
    """

    def __init__(self, dim: int, mlp_ratio: float, **op):
        super().__init__()
        self.norm = LayerNorm(dim)
        self.op = SS2D(dim, **op)
        self.drop = DropPath()
        self.hidden = int(mlp_ratio * dim)
        if self.hidden:
            self.norm2 = LayerNorm(dim)
            self.mlp = nn.Sequential(
                nn.Linear(dim, self.hidden), nn.GELU(), nn.Linear(self.hidden, dim)
            )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.op(self.norm(x)).float())
        return x + self.drop(self.mlp(self.norm2(x)).float()) if self.hidden else x


class Downsample(nn.Module):
    """A strided convolution and a norm, channels last: (B, H, W, C) -> fp32 (B, H', W', dim)."""

    def __init__(self, channels: int, dim: int, **conv):
        super().__init__()
        self.conv = nn.Conv2d(channels, dim, **conv)
        self.norm = LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1).float()).float()


class VMamba(nn.Module):
    """Normalised images (B, 3, H, W) to logits (B, num_classes).

    The weights are fp32, or what Policy.prepare has made of them. The images are fp32 too, or half
    under autocast.

    Args:
        patch_size: side of a token in pixels. Each further stage halves the grid.
        stem: convolutions that make the tokens: 1, or the published 2, which need a patch_size of
            4.
        dims, depths: width and number of blocks of each stage.
        d_state: numbers that a channel remembers (N): 16 in the paper's first version, 1 in the
            second.
        mlp_ratio: hidden width of the MLP divided by the block's. 0: no MLP, as in the first
            version.
        gate: multiply the scan's result by SiLU of a second projection, as in the first version.
        conv_bias: bias of the depthwise convolution, as in the first version.
        force_fp32: the scan's results are added and normalised in fp32, in training and in
            evaluation alike.
        drop_path: probability that the last block's branches are dropped; it rises linearly from 0
            in the first.
        init_std: weights begin as a normal distribution of this deviation, cut at 2, as published;
            None: as Xavier's. At a width of 64 the published branches begin at a few hundredths of
            the stream.

    torch.export, torch.func (vmap, grad) and jit.trace take it. torch.compile breaks the graph at
    each scan, and so refuses it with fullgraph=True; give dynamic=False, because with sizes that
    vary inductor (torch 2.14, CPU) raises a TypeError.
    """

    def __init__(
        self,
        *,
        num_classes: int,
        image_size: int = 32,
        patch_size: int = 4,
        channels: int = 3,
        stem: int = 1,
        dims: Sequence[int] = (64, 128),
        depths: Sequence[int] = (2, 2),
        d_state: int = 1,
        mlp_ratio: float = 0.0,
        gate: bool = True,
        conv_bias: bool = True,
        force_fp32: bool = True,
        drop_path: float = 0.0,
        init_std: float | None = 0.02,
    ):
        super().__init__()
        if image_size % patch_size:
            raise ValueError(
                f"image_size {image_size} is not a multiple of patch_size {patch_size}"
            )
        if len(dims) != len(depths):
            raise ValueError(f"{len(dims)} dims for {len(depths)} stages")
        if (stem, patch_size) != (2, 4) and stem != 1:
            sentence = f"a stem of {stem} convolutions cannot make patches of {patch_size}"
            raise ValueError(f"{sentence}: take a stem of 1")
        down = dict(kernel_size=3, stride=2, padding=1)
        self.patch_embed = Downsample(channels, dims[0], kernel_size=patch_size, stride=patch_size)
        if stem == 2:
            half = dims[0] // 2
            self.patch_embed = nn.Sequential(
                Downsample(channels, half, **down), nn.GELU(), Downsample(half, dims[0], **down)
            )
        op = dict(d_state=d_state, gate=gate, conv_bias=conv_bias, force_fp32=force_fp32)
        self.layers = nn.ModuleList(
            nn.Sequential(*(VSSBlock(dim, mlp_ratio, **op) for _ in range(depth)))
            for dim, depth in zip(dims, depths, strict=True)
        )
        self.downsamples = nn.ModuleList(Downsample(a, b, **down) for a, b in pairwise(dims))
        self.norm = LayerNorm(dims[-1])
        self.head = nn.Linear(dims[-1], num_classes)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                if init_std or module is self.head:
                    nn.init.trunc_normal_(module.weight, std=init_std or 0.02)
                else:
                    nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        self.set_drop_path(drop_path)

    def set_drop_path(self, p: float) -> None:
        """Drop the last block's branches with probability p in training, those of earlier blocks
        linearly less.
        """
        drops = [module for module in self.modules() if isinstance(module, DropPath)]
        for i, drop in enumerate(drops):
            drop.p = p * i / max(1, len(drops) - 1)

    def forward(self, images: Tensor) -> Tensor:
        # B, H / patch_size, W / patch_size, dims[0]
        x = self.patch_embed(images.permute(0, 2, 3, 1))
        for i, blocks in enumerate(self.layers):
            if i:
                x = self.downsamples[i - 1](x)  # B, half the rows, half the columns, dims[i]
            x = blocks(x)
        return self.head(self.norm(x).mean((1, 2)))  # B, dims[-1] -> B, num_classes
