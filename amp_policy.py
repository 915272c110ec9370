# SPDX-License-Identifier: MIT (finite 2.2.0, 2026-11-22)
"""
Precision policy: which operation runs in which dtype, decided once, with its reason printed.

Half precision fails where a number leaves the format, and the formats differ:

                          fp16                bf16             fp32
    largest               65504               3.39e38          3.40e38     65520 and up round to inf in fp16
    next after 1          +2^-10              +2^-7            +2^-23      TF32: range of fp32, spacing of fp16
    smallest normal       2^-14  = 6.1e-5     2^-126           2^-126
    smallest subnormal    2^-24  = 6.0e-8     2^-133           2^-149      |g| <= 2^-25 is exactly 0 in fp16
    counts exactly up to  2048                256              2^24        label 257 is 256 in bf16

So fp16 overflows (a variance, an attention logit, a sum over pixels) and underflows (gradients: hence loss scaling).
bf16 does neither, but rounds eight times as coarsely: an update below |w| * 2^-9 is lost, hence fp32 weights.

Autocast casts for you, from two lists which are not the same (torch >= 2.9, `aten/src/ATen/autocast_mode.*`):

    operation                                                    CUDA      CPU
    linear matmul bmm conv scaled_dot_product_attention          half      half
    softmax log_softmax layer_norm group_norm                    fp32      as it comes
    rms_norm (torch 2.9's CUDA list lacks it)                    fp32      as it comes
    exp log pow rsqrt sum norm logsumexp cumsum interpolate      fp32      as it comes
    cross_entropy nll mse l1 smooth_l1 huber kl_div              fp32      fp32
    batch_norm mean gelu relu sigmoid add mul, 2-D pooling       as it comes, on both
    cat and stack of half with fp32                              fp32      fp32
    binary_cross_entropy                                         error     fp32

A green CPU test says nothing about CUDA's fp32 operations: write them out, `F.softmax(x.float(), -1).to(x.dtype)`, and
both devices agree. Half precision is not always faster: a CPU that multiplies bf16 without AMX may take twice fp32's
time. So `choose_policy("auto", ...)` times what is safe, and takes half precision for a gain of 10 % or more. Give it
the layers of your network: `stopwatch=lambda *a: stopwatch(*a, largest_layers(net, images))`.

What popular snippets get wrong:

    model.half() *and* autocast       no fp32 copy of the weights is left (w + 1e-4 == w): O2 needs fp32 masters.
    clip_grad_norm_ before unscale_   clips 65536 * g to 1, then divides by 65536: every step is almost nothing.
    GradScaler as it comes            no floor: 166 bad steps take 2^16 to exactly 0, and the next *good* step, divided
                                      by it, writes NaN into every weight (pytorch #99640). Run this file to watch it.

This file never repairs a number. Copy it alone, it needs torch only. Sources: Micikevicius et al. 2018 (arXiv
1710.03740) for loss scaling and masters, NVIDIA apex for the O-levels.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import platform
import time
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
HALF = (torch.float16, torch.bfloat16)


# --- The levels, as data

@dataclass(frozen=True)
class Policy:
    """One level, bound to a device type. `str(policy)` is its name and the reason for choosing it."""

    name: str
    dtype: torch.dtype  # matmuls and convolutions
    param_dtype: torch.dtype  # parameters as they live in the module
    means: str
    tf32: bool = False
    autocasts: bool = False
    scales: bool = False  # loss scaling
    masters: bool = False  # the optimizer keeps fp32 copies of half parameters
    norms_fp32: bool = True  # parameters of the norms; if not, all buffers are half as well
    device: str = "cpu"
    reason: str = ""
    warnings: tuple[str, ...] = ()  # what speaks against it; the reason says it too

    def __str__(self) -> str:
        return f"{self.name}: {self.reason or self.means}"

    def autocast(self) -> torch.autocast:
        """A fresh context; it does nothing at the levels without autocast, so the loop has one path."""
        return torch.autocast(self.device, dtype=self.dtype if self.autocasts else None, enabled=self.autocasts)

    def prepare(self, net: nn.Module) -> nn.Module:
        """Set TF32 and, in O2 and O3, cast `net` in place. Before DDP, torch.compile and the optimizer.

        O2 keeps norms in fp32, and buffers as they are (a rotary table in fp16 miscounts above 2048). Its autocast lets
        half weights and fp32 tables meet in a matmul. At both levels a module that owns parameters casts its inputs to
        their dtype: all of torch's own modules, the first of any other, so that labels of net(images, labels) are never
        cast. A module with the attribute `fp32_island` stays fp32 (fp32.py sets it).
        """
        set_tf32(self.tf32)
        if self.param_dtype is F32:
            return net
        for module in net.modules():
            is_norm = "Norm" in type(module).__name__ and not any(module.children())  # a `PreNorm` has children
            if is_norm and self.norms_fp32 and not hasattr(module, "fp32_island"):
                module.float()
                module.forward = types.MethodType(_norm_forward, module)  # a bound method: copy.deepcopy rebinds it
                module.fp32_island = True
            if list(module.parameters(recurse=False)):
                module.register_forward_pre_hook(_cast_inputs, with_kwargs=True)
        kept = {t for m in net.modules() if hasattr(m, "fp32_island") for t in (*m.parameters(), *m.buffers())}
        lowered = [*net.parameters()] if self.norms_fp32 else [*net.parameters(), *net.buffers()]
        for t in lowered:
            if t.is_floating_point() and t not in kept:
                t.data = t.data.to(self.param_dtype)
        return net


def _cast(nest: Any, dtype: torch.dtype) -> Any:
    """Half and fp32 tensors in a nest of tuples, lists and dicts, to `dtype`; integers and fp64 as they are."""
    return tree_map(lambda t: t.to(dtype) if isinstance(t, Tensor) and t.dtype in (*HALF, F32) else t, nest)


def _cast_inputs(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    if hasattr(module, "fp32_island"):
        return None
    dtype = next(module.parameters(recurse=False)).dtype  # asked now: an evaluation in fp32 lends fp32 weights
    if type(module).__module__.startswith("torch.nn."):
        return _cast(args, dtype), _cast(kwargs, dtype)
    if args:
        return (_cast(args[0], dtype), *args[1:]), kwargs
    return args, {name: _cast(value, dtype) if i == 0 else value for i, (name, value) in enumerate(kwargs.items())}


def _norm_forward(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A norm at O2: fp32 inside, the input's dtype outside."""
    with torch.autocast(x.device.type, enabled=False):
        return _cast(type(self).forward(self, x.float(), *args, **kwargs), x.dtype)


LEVELS = (
    Policy("fp32", F32, F32, "all fp32, TF32 off everywhere"),
    Policy("tf32", F32, F32, "fp32 weights, matmuls read 10-bit mantissas", tf32=True),
    Policy("bf16", BF16, F32, "autocast to bfloat16, no loss scaling", autocasts=True),
    Policy("fp16", F16, F32, "autocast to float16, loss scaling", autocasts=True, scales=True),
    Policy("O2", F16, F16, "float16 weights, fp32 norms and masters, loss scaling", autocasts=True, scales=True,
           masters=True),
    Policy("O3", F16, F16, "all float16, no masters, no scaling: an experiment", norms_fp32=False),
)  # TF32 is off beside half precision: what remains in fp32 there is an island, and an island means fp32
POLICIES = {p.name: p for p in LEVELS} | {"O0": LEVELS[0], "O1": LEVELS[3]}  # apex's names


# --- Choosing a level

@dataclass(frozen=True)
class Capabilities:
    """What the choice depends on and nothing else, so that a test can fake any machine."""

    device: str  # "cuda" (ROCm too), "cpu", "mps", ...
    name: str = ""  # the driver's name for it; on ROCm the gfx architecture, on CPU the machine type
    sm: tuple[int, int] | None = None  # CUDA capability; None on ROCm, whose numbers mean something else
    cpu_bf16: bool = False  # the processor multiplies bfloat16 itself

    def __str__(self) -> str:
        return f"sm_{self.sm[0]}{self.sm[1]}" if self.sm else f"{self.device} {self.name}".strip()

    @property
    def native_bf16(self) -> bool:
        """Not `torch.cuda.is_bf16_supported()`: that is True on a T4, by emulation."""
        if self.sm:
            return self.sm >= (8, 0)
        return self.cpu_bf16 or self.name.startswith(("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12"))


def capabilities(device: str | torch.device) -> Capabilities:
    """Read the machine; only `device` is asked, so a CPU run never wakes CUDA."""
    device, machine, native = torch.device(device), platform.machine(), False
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        if torch.version.hip:
            return Capabilities("cuda", properties.gcnArchName.split(":")[0])
        return Capabilities("cuda", properties.name, (properties.major, properties.minor))
    if device.type == "cpu" and machine.lower() in ("aarch64", "arm64"):
        with contextlib.suppress(AttributeError, RuntimeError):  # a build without oneDNN
            native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    elif device.type == "cpu":  # x86, where that operator says True from AVX-512 on, by emulation
        native = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    return Capabilities(device.type, machine, cpu_bf16=native)


# A layer's sizes, hashable. Linear: rows (N, D), weight (D', D). Conv2d: image (N, C, H, W), kernel (C', C, k, k), and
# the arguments stride, padding, dilation, groups.
Layer = tuple[Any, ...]
USUAL = (((64, 128, 32, 32), (128, 128, 3, 3), (1, 1), (1, 1), (1, 1), 1), ((2048, 2048), (2048, 2048)))


def _inputs(device: str, layers: Iterable[Layer], layout: torch.memory_format) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    tensors = [torch.randn(size, generator=generator, device=device) for layer in layers for size in layer[:2]]
    return [(t.to(memory_format=layout) if t.ndim == 4 else t).requires_grad_() for t in tensors]


def _gradients(device: str, dtype: torch.dtype, layers: Iterable[Layer], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """One forward and backward of these layers, as autocast runs them: the gradients of `inputs`."""
    with torch.autocast(device, dtype=dtype, enabled=dtype in HALF):
        outputs = [F.conv2d(x, weight, None, *options) if weight.ndim == 4 else F.linear(x, weight)
                   for (_, _, *options), x, weight in zip(layers, inputs[::2], inputs[1::2], strict=True)]
    return torch.autograd.grad(outputs, inputs, [torch.ones_like(t) for t in outputs])


def self_test(device: str, dtype: torch.dtype) -> str:
    """Gradients of a convolution and a matrix product in `dtype` beside fp32: "" if they agree, else the fault.

    A GTX 16xx says 7.5 like a T4, and returns NaN from fp16 convolutions (pytorch #58123): only a trial tells.
    """
    layers = ((8, 16, 16, 16), (32, 16, 3, 3), 1, 1), ((64, 32), (10, 32))
    inputs = _inputs(device, layers, torch.contiguous_format)
    half, full = (_gradients(device, d, layers, inputs) for d in (dtype, F32))
    for name, low, high in zip(("image", "kernel", "rows", "weight"), half, full, strict=True):
        error = float((low - high).norm() / high.norm())
        if not error <= 0.05:  # sound hardware stays below 0.01; written so that NaN fails
            return f"the gradient of the {name} is off by {error:.3g}"
    return ""


def largest_layers(net: nn.Module, *batch: Any, times: float = 1.0) -> tuple[Layer, ...]:
    """The Conv2d and the Linear that multiply most in net(*batch), for stopwatch(); () if the net has neither.

    `times`: samples of training's batch / samples of `batch`. A forward in evaluation mode; seed afterwards.
    """
    most: dict[int, tuple[int, Layer]] = {}

    def note(layer: nn.Module, args: tuple, out: Tensor) -> None:
        weight, products = tuple(layer.weight.shape), out.numel() * layer.weight[0].numel()
        if products <= most.get(len(weight), (0,))[0] or not args:
            return
        inner = args[0].shape[-3 if len(weight) == 4 else -1 :]  # C, H, W or D
        samples = max(1, round(args[0].numel() / inner.numel() * times))
        options = (layer.stride, layer.padding, layer.dilation, layer.groups) if len(weight) == 4 else ()
        most[len(weight)] = products, ((samples, *inner), weight, *options)

    modes = {module: module.training for module in net.modules()}
    hooks = [m.register_forward_hook(note) for m in modes if isinstance(m, nn.Conv2d | nn.Linear)]
    try:
        with torch.no_grad():
            net.eval()(*batch)
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode
    return tuple(layer for _, layer in most.values())


def _piece(layer: Layer, share: float) -> Layer:
    """The layer with a share of its products. Below 256 rows or pixels one would time the casts of its weights: there
    the outputs are fewer. A Linear gets at most 4 million weights."""
    (N, *inner), (outputs, *weight), *options = layer
    *_, dilation, groups = options or ((), 1)
    rows = max(share, min(1.0, 256 / (N * math.prod(inner[1:]))))  # the share of rows, or of pixels
    if groups == 1:
        outputs = max(min(outputs, 16), int(outputs * share / rows))
    if not options:
        outputs = max(1, min(outputs, 2**22 // weight[0]))
    side = min(1.0, N * rows) ** 0.5
    pixels = [min(n, max(d * (k - 1) + 1, int(n * side)))
              for n, k, d in zip(inner[1:], weight[1:], dilation, strict=True)]
    return (max(1, int(N * rows)), inner[0], *pixels), (outputs, *weight), *options


@functools.cache  # a process that asks again gets the same answer
def stopwatch(device: str, dtypes: tuple[torch.dtype, ...], layers: tuple[Layer, ...] = (),
              budget: float | None = None) -> tuple[float, ...]:
    """Seconds of `layers` (() for USUAL), forward and backward, in each of `dtypes`: the least of several rounds.

    It starts with 2^24 products, and takes four times as many (up to all) while that fits into 1/8 of `budget` seconds
    (0.4 on a CPU, 0.15 elsewhere). TF32 is off afterwards.
    """
    layers, budget = layers or USUAL, budget or (0.4 if device == "cpu" else 0.15)
    products = sum(size[0] * math.prod(size[2:]) * math.prod(weight) for size, weight, *_ in layers)
    share, rounds, end = 2**22 / products, [], 0.0
    set_tf32(False)
    while len(rounds) < 2 or time.perf_counter() < end:
        if not rounds:
            share = min(1.0, 4 * share)
            pieces = [_piece(layer, share) for layer in layers]
            inputs = _inputs(device, pieces, torch.channels_last)  # the layout in which GPUs multiply half precision
        times = [time.perf_counter()]
        for dtype in dtypes:
            _gradients(device, dtype, pieces, inputs)
            if device != "cpu":
                torch.accelerator.synchronize()
            times.append(time.perf_counter())
        rounds.append([after - before for before, after in itertools.pairwise(times)])
        end = end or times[-1] + budget  # the first round of all loads kernels
        if len(rounds) > 1 and share < 1 and 32 * sum(rounds[-1]) < budget:
            rounds = []
    return tuple(min(seconds) for seconds in zip(*rounds[1:], strict=True))  # the first was warm-up


def choose_policy(name: str, caps: Capabilities, trial: Callable[[str, torch.dtype], str] | None = self_test,
                  stopwatch: Callable[[str, tuple[torch.dtype, ...]], tuple[float, ...]] | None = stopwatch) -> Policy:
    """The policy called `name`, or for "auto" the fastest safe one, with the reason. ValueError on an unknown name.

    Safe is bf16 where the chip multiplies it natively, and fp16 on CUDA chips of capability 7.x that pass `trial`. Half
    precision has to save 10 % of fp32's time by `stopwatch`. A half precision that was asked for is tried and timed:
    see `policy.warnings`. None for either leaves it out. Let rank 0 choose for all: two ranks may measure two things.
    """
    if name not in ("auto", *POLICIES):
        raise ValueError(f"unknown precision {name!r}: choose from auto, {', '.join(POLICIES)}")
    sm, here = caps.sm or (0, 0), f"this {'gpu' if caps.device == 'cuda' else caps.device}"

    def ratio(dtype: torch.dtype) -> float:
        fp32, half = stopwatch(caps.device, (F32, dtype)) if stopwatch else (1.0, 0.0)
        return half / fp32

    if name != "auto":
        level, notes = POLICIES[name], []
        if level.dtype is BF16 and not caps.native_bf16 and caps.device != "mps":
            notes.append(f"{caps} only emulates bfloat16: slow")
        if level.tf32 and sm < (8, 0):
            notes.append(f"{caps} has no TF32: this is fp32")
        if level.dtype in HALF and trial and (fault := trial(caps.device, level.dtype)):
            notes.append(f"{caps} failed the self-test: {fault}")
        if level.dtype in HALF and (times := ratio(level.dtype)) > 1:
            notes.append(f"it takes {times:.2g} times as long as fp32 on {here}")
        reason = f"as asked: {level.means}" + "".join(f" ({note})" for note in notes)
        return replace(level, device=caps.device, reason=reason, warnings=tuple(f"{name}: {note}" for note in notes))
    if caps.native_bf16:
        name, reason = "bf16", f"{caps} runs bfloat16 natively and needs no loss scaling"
    elif sm < (7, 0):
        name, reason = "fp32", f"{caps} has no half precision that is both native and safe"
    elif trial and (fault := trial(caps.device, F16)):
        name, reason = "fp32", f"{caps} ({caps.name}) failed the float16 self-test: {fault}"
    else:
        name, reason = "fp16", f"{caps} has no native bfloat16, passed the float16 self-test, and needs loss scaling"
    if name != "fp32" and stopwatch:
        times = ratio(POLICIES[name].dtype)
        if times <= 0.9:
            reason += f"; it takes {times:.2g} of fp32's time on {here}"
        else:  # also where it is NaN
            name, reason = "fp32", f"{name} would take {times:.2g} times as long on {here}"
    return replace(POLICIES[name], device=caps.device, reason=reason)


# --- TF32

TF32_SWITCHES = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul,
                 torch.backends.cudnn.conv, torch.backends.cudnn.rnn)


def set_tf32(on: bool) -> None:
    """TF32 on or off for matmuls (cuBLAS, oneDNN), cuDNN's convolutions and RNNs. The older setters keep the newer
    `fp32_precision` in step; the other way round inductor's read of `allow_tf32` raises (pytorch #166387)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 recommends the newer ones here
        torch.set_float32_matmul_precision("high" if on else "highest")
        torch.backends.cudnn.allow_tf32 = on
    if not on:  # the setters left "none", which inherits a global "tf32"; "ieee" inherits nothing and reads as off
        for switch in TF32_SWITCHES:
            switch.fp32_precision = "ieee"


# --- Loss scaling with a floor

class LossScaler(torch.amp.GradScaler):
    """A GradScaler that cannot collapse: the scale stays in [floor, ceiling].

    Below 1 it would shrink gradients. 2^24 lifts fp16's smallest number to 1, so that nothing is left to rescue.
    update(found_inf=flag) needs no sync, for optimizers that skip on the device. The checkpoint is GradScaler's.
    """

    def __init__(self, device: str = "cuda", init_scale: float = 2.0**16, growth_factor: float = 2.0,
                 backoff_factor: float = 0.5, growth_interval: int = 2000, enabled: bool = True, *,
                 floor: float = 1.0, ceiling: float = 2.0**24) -> None:
        if enabled and not 1.0 <= floor <= init_scale <= ceiling < float("inf"):
            raise ValueError(f"LossScaler needs 1 <= floor ({floor}) <= {init_scale} <= ceiling ({ceiling})")
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self.floor, self.ceiling, self.init_scale = floor, ceiling, init_scale
        absent = device == "cuda" and not torch.cuda.is_available()
        self._one = torch.ones((), device="cpu" if absent else device)  # what a disabled scaler answers

    @property
    def scale_tensor(self) -> Tensor:
        """The scale, 0-dim fp32 on the device: the same tensor all along, 1.0 when disabled."""
        if self.is_enabled() and self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        return self._scale if self.is_enabled() else self._one

    def scale(self, outputs: Any) -> Any:
        """A loss, or a nest of losses, times the scale; mappings too, unlike GradScaler."""
        if isinstance(outputs, Mapping):
            return {name: self.scale(value) for name, value in outputs.items()}
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(map(self.scale, outputs))
        return super().scale(outputs)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """`optimizer.step()`, unless a gradient is non-finite. Fused optimizers skip on the device, else it syncs."""
        if self.is_enabled() and any(map(callable, (*args, *kwargs.values()))):
            raise RuntimeError("LossScaler.step takes no closure: the closure's gradients would be scaled ones")
        return super().step(optimizer, *args, **kwargs)

    @torch.no_grad()
    def update(self, new_scale: float | Tensor | None = None, *, found_inf: Tensor | None = None) -> None:
        """Adapt to one attempted step, or set the scale to `new_scale`. `found_inf`: 0-dim, on the device; anything but
        0 (NaN too) is a skipped step. Without `found_inf` the flags count that `step` left."""
        if not self.is_enabled():
            return
        scale = self.scale_tensor
        scale.masked_fill_(scale.clamp(self.floor, self.ceiling) != scale, self.init_scale)  # corrupted: afresh
        if found_inf is None:
            super().update(new_scale)
        else:
            torch._amp_update_scale_(scale, self._growth_tracker, found_inf.to(scale.device, F32, non_blocking=True),
                                     self._growth_factor, self._backoff_factor, self._growth_interval)
            self._per_optimizer_states.clear()
        scale.clamp_(self.floor, self.ceiling)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load, or start afresh with a warning where nothing fits (a resume at another level)."""
        if self.is_enabled() and self.floor <= state.get("scale", 0.0) <= self.ceiling:
            super().load_state_dict(state)
        elif self.is_enabled():  # none, collapsed (0) or poisoned (NaN)
            found = f"the checkpoint's loss scale is {state.get('scale', 'missing')}"
            warnings.warn(f"{found}: it starts at {self.init_scale:g}", stacklevel=2)
        elif state:
            warnings.warn("the checkpoint's loss scale is dropped: this precision needs none", stacklevel=2)


def main() -> None:
    """The choice on this machine, and the scale that collapses."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    caps = capabilities(device)
    print(f"{caps}\n  auto -> {choose_policy('auto', caps)}\n\nA weight of 1.0 after 166 bad steps and a good one:")
    for scaler in (torch.amp.GradScaler(device), LossScaler(device)):
        weight = torch.ones(1, device=device, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for factor in [float("inf")] * 166 + [1.0]:
            optimizer.zero_grad()
            scaler.scale((weight * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        print(f"  {type(scaler).__name__:10}  scale {scaler.get_scale():<6g}  weight {weight.item():.3f}")


if __name__ == "__main__":
    main()
