# SPDX-License-Identifier: MIT (finite 4.0.0, 2026-11-28)
"""
Precision policy: which operation runs in which dtype, decided once, with its reason printed.

Half precision fails where a number leaves the format, and the formats differ:

                          fp16             bf16       fp32
    largest               65504            3.39e38    3.40e38    fp16: 65520 and up become inf
    next after 1          +2^-10           +2^-7      +2^-23     TF32: fp32's range, this of fp16
    smallest normal       2^-14 = 6.1e-5   2^-126     2^-126
    smallest subnormal    2^-24 = 6.0e-8   2^-133     2^-149     fp16: |g| <= 2^-25 becomes 0
    counts exactly up to  2048             256        2^24       label 257 is 256 in bf16

So fp16 overflows (a variance, an attention logit, a sum over pixels) and underflows (gradients:
hence loss scaling). bf16 does neither, but rounds eight times as coarsely: an update below
|w| * 2^-9 is lost, hence fp32 weights.

Autocast casts for you, from two lists which are not the same (torch's aten/src/ATen/autocast_mode):

    operation                                                    CUDA      CPU
    linear matmul bmm conv scaled_dot_product_attention          half      half
    softmax log_softmax layer_norm group_norm                    fp32      as it comes
    rms_norm (torch 2.9's CUDA list lacks it)                    fp32      as it comes
    exp log pow rsqrt sum norm logsumexp cumsum interpolate      fp32      as it comes
    cross_entropy nll mse l1 smooth_l1 huber kl_div              fp32      fp32
    batch_norm mean gelu relu sigmoid add mul, 2-D pooling       as it comes, on both
    cat and stack of half with fp32                              fp32      fp32
    binary_cross_entropy                                         error     fp32

A green CPU test says nothing about CUDA's fp32 operations. Write them out, as in
`F.softmax(x.float(), -1).to(x.dtype)`, and both devices agree.

What popular snippets get wrong:

    model.half() *and* autocast      no fp32 copy of the weights is left (w + 1e-4 == w)
    clip_grad_norm_ before unscale_  clips 65536 * g to 1, then divides by 65536: almost no step
    GradScaler as it comes           no floor: 166 bad steps take 2^16 to exactly 0, and the next
                                     *good* step, divided by it, writes NaN into every weight
                                     (pytorch #99640)

Half precision is not always faster: a CPU that multiplies bf16 without AMX may take twice fp32's
time. So "auto" times what is safe, and takes half precision where it saves 10 % or more.

Copy this file alone: it needs torch. It never repairs a number.

Paste::

    import torch
    from amp_policy import LossScaler, choose_policy
    policy = choose_policy("auto")          # print(policy) says why
    net = policy.prepare(torch.nn.Linear(8, 2).to(policy.device))
    optimizer = torch.optim.AdamW(net.parameters())
    scaler = LossScaler(policy.device, enabled=policy.scales)
    images = torch.randn(4, 8, device=policy.device)
    with policy.autocast():
        loss = net(images).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)                  # leaves a step out whose gradient is inf or NaN
    scaler.update()

Sources: Micikevicius et al. 2018 (arXiv 1710.03740) for loss scaling and masters, NVIDIA apex for
the names O0 to O3.
"""

from __future__ import annotations

import contextlib
import copy
import math
import platform
import time
import warnings
from collections.abc import Callable
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
    """One level, bound to a device type. `str(policy)` gives its name and the reason."""

    name: str
    dtype: torch.dtype  # matmuls and convolutions
    param_dtype: torch.dtype  # parameters as they live in the module
    means: str
    tf32: bool = False
    autocasts: bool = False
    scales: bool = False  # loss scaling
    masters: bool = False  # half parameters have fp32 copies; norms and buffers stay fp32
    device: str = "cpu"
    reason: str = ""
    warnings: tuple[str, ...] = ()  # what speaks against it; the reason says it too

    def __str__(self) -> str:
        return f"{self.name}: {self.reason or self.means}"

    def autocast(self) -> torch.autocast:
        """A fresh context. It does nothing at the levels without autocast: one path for all."""
        dtype = self.dtype if self.autocasts else None  # disabled, it would still set the default
        return torch.autocast(self.device, dtype=dtype, enabled=self.autocasts)

    def prepare(self, net: nn.Module) -> nn.Module:
        """Set TF32; in O2 and O3 cast `net` in place. Before DDP, torch.compile and the optimizer.

        O2 keeps norms in fp32, and buffers as they are (a rotary table in fp16 miscounts above
        2048), except those of spectral_norm, which multiply a weight. Its autocast lets half
        weights and fp32 tables meet in a matmul. A module that owns parameters casts its inputs to
        their dtype, so a norm computes in fp32. Of torch's own modules all inputs are cast, of any
        other the first, so that the labels of net(images, labels) never are. A module with the
        attribute `fp32_island` stays in fp32 (fp32.py sets it).
        """
        set_tf32(self.tf32)
        if self.param_dtype is F32:
            return net
        kept = set()
        for module in net.modules():
            own = list(module.parameters(recurse=False))
            # A `PreNorm` has children, and _SpectralNorm, a parametrization, no parameters.
            is_norm = own and "Norm" in type(module).__name__ and not any(module.children())
            if hasattr(module, "fp32_island") or (is_norm and self.masters):
                module.float()
                kept.update(module.parameters(), module.buffers())
            if own:
                module.register_forward_pre_hook(_cast_inputs, with_kwargs=True)
        ends = ("weight_u", "weight_v", "._u", "._v") if self.masters else ""  # of spectral_norm
        buffers = (b for name, b in net.named_buffers() if name.endswith(ends))
        for t in (*net.parameters(), *buffers):
            if t.is_floating_point() and t not in kept:
                t.data = t.data.to(self.param_dtype)
        return net


def _cast_inputs(module: nn.Module, args: tuple, kwargs: dict) -> Any:
    """Cast half and fp32 tensors to the dtype of the weights; leave integers and fp64."""
    if hasattr(module, "fp32_island"):
        return None
    # Read at each call: an evaluation in fp32 lends fp32 weights.
    dtype = next(module.parameters(recurse=False)).dtype

    def cast(value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.dtype in (F32, *HALF)
        return value.to(dtype) if floating else value

    if type(module).__module__.startswith("torch.nn."):
        return tree_map(cast, (args, kwargs))
    if args:
        return (tree_map(cast, args[0]), *args[1:]), kwargs
    first = dict([*kwargs.items()][:1])  # {} for a module that is called without arguments
    return args, kwargs | tree_map(cast, first)


LEVELS = (
    Policy("fp32", F32, F32, "all fp32, TF32 off everywhere"),
    Policy("tf32", F32, F32, "fp32 weights, matmuls read 10-bit mantissas", tf32=True),
    Policy("bf16", BF16, F32, "autocast to bfloat16, no loss scaling", autocasts=True),
    Policy("fp16", F16, F32, "autocast to float16, loss scaling", autocasts=True, scales=True),
    Policy(
        "O2",
        F16,
        F16,
        "float16 weights, fp32 norms and masters, loss scaling",
        autocasts=True,
        scales=True,
        masters=True,
    ),
    Policy("O3", F16, F16, "all float16, no masters, no scaling: an experiment"),
)  # TF32 is off beside half precision: what stays in fp32 there is meant to be exact
POLICIES = {p.name: p for p in LEVELS} | {"O0": LEVELS[0], "O1": LEVELS[3]}  # apex's names
SPELLINGS = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "bf16-mixed": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "16-mixed": "fp16",
}


# --- Choosing a level


@dataclass(frozen=True)
class Capabilities:
    """All that the choice depends on, so that a test can fake any machine."""

    device: str  # "cuda" (ROCm too), "cpu", "mps", ...
    name: str = ""  # the driver's; on ROCm the gfx architecture, on a CPU the machine type
    sm: tuple[int, int] | None = None  # CUDA capability; None on ROCm, which numbers otherwise
    cpu_bf16: bool = False  # the processor multiplies bfloat16 itself

    def __str__(self) -> str:
        return f"sm_{self.sm[0]}{self.sm[1]}" if self.sm else f"{self.device} {self.name}"

    @property
    def native_bf16(self) -> bool:
        """Not `torch.cuda.is_bf16_supported()`: that is True on a T4, by emulation."""
        if self.sm:
            return self.sm >= (8, 0)
        rocm = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")
        return self.cpu_bf16 or self.name.startswith(rocm)


def capabilities(device: str | torch.device) -> Capabilities:
    """Read the machine. It touches only `device`, so a CPU run never initializes CUDA."""
    kind = torch.device(device).type
    if kind == "cuda":
        properties = torch.cuda.get_device_properties(device)
        if torch.version.hip:
            return Capabilities(kind, properties.gcnArchName.split(":")[0])
        return Capabilities(kind, properties.name, (properties.major, properties.minor))
    machine, native = platform.machine(), False
    if machine.lower() in ("aarch64", "arm64"):
        with contextlib.suppress(AttributeError, RuntimeError):  # a build without oneDNN
            native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    else:  # x86, where that operator is True from AVX-512 on, by emulation
        native = getattr(torch.cpu, "_is_avx512_bf16_supported", bool)()
    return Capabilities(kind, machine, cpu_bf16=native and kind == "cpu")


def _layers(device: str, samples: int) -> list[Tensor]:
    """Inputs of one convolution and one matrix product: image, kernel, rows, weight."""
    sizes = (samples, 64, 16, 16), (64, 64, 3, 3), (64 * samples, 512), (512, 512)
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(s, generator=generator, device=device, requires_grad=True) for s in sizes]


def _gradients(device: str, dtype: torch.dtype, layers: list[Tensor]) -> tuple[Tensor, ...]:
    """A forward and a backward of these two layers, as autocast runs them."""
    image, kernel, rows, weight = layers
    with torch.autocast(device, dtype=dtype, enabled=dtype in HALF):
        outputs = F.conv2d(image, kernel), F.linear(rows, weight)
    return torch.autograd.grad(outputs, layers, [torch.ones_like(t) for t in outputs])


def self_test(device: str, dtype: torch.dtype) -> str:
    """Compare a convolution's and a matrix product's gradients with fp32: "", or the fault.

    A GTX 16xx says 7.5 like a T4, and returns NaN from fp16 convolutions (pytorch #58123).
    """
    layers = _layers(device, 1)
    half, full = _gradients(device, dtype, layers), _gradients(device, F32, layers)
    for low, high in zip(half, full, strict=True):
        error = (low - high).norm() / high.norm()
        if not error <= 0.05:  # sound hardware stays below 0.01; written so that NaN fails
            return f"a gradient is off by {error:.3g}"
    return ""


def stopwatch(device: str, dtypes: tuple[torch.dtype, ...]) -> tuple[float, ...]:
    """Time a convolution and a matrix product, forward and backward, in each dtype, in seconds.

    The least of six rounds, in which the dtypes take turns. The first round loads kernels.
    """
    layers = _layers(device, 16 if device == "cpu" else 1024)  # 1.3 and 80 billion products
    least = dict.fromkeys(dtypes, math.inf)
    for _ in range(6):
        for dtype in dtypes:
            began = time.perf_counter()
            _gradients(device, dtype, layers)
            if device != "cpu":
                torch.accelerator.synchronize()
            least[dtype] = min(least[dtype], time.perf_counter() - began)
    return tuple(least.values())


def seconds_of_pass(model: nn.Module, images: Tensor, labels: Tensor, dtype: torch.dtype) -> float:
    """Time loss, _ = model(images, labels) and its backward, under autocast to `dtype`.

    Parameters, buffers, what modules carry from call to call, and torch's random numbers stay.
    """
    kept = [(module, {**vars(module)}) for module in model.modules()]
    copies = {}
    for module, _ in kept:
        vars(module)["_buffers"] = copy.deepcopy(module._buffers, copies)
    with torch.random.fork_rng([images.device] if images.is_cuda else []):
        began = time.perf_counter()
        with torch.autocast(images.device.type, dtype, enabled=dtype is not F32):
            loss, _ = model(images, labels)
        loss.backward()
        loss.item()  # waits for the device
        seconds = time.perf_counter() - began
    for module, before in kept:
        vars(module).clear()
        vars(module).update(before)
    model.zero_grad()
    return seconds


def choose_policy(
    name: str,
    caps: Capabilities | None = None,
    trial: Callable[..., str] | None = self_test,
    stopwatch: Callable[..., tuple[float, ...]] | None = stopwatch,
) -> Policy:
    """Return the policy `name`, or for "auto" the fastest safe one, with the reason.

    caps: of the device to use; None for the GPU if there is one, else the CPU. Safe is bf16 where
    the chip multiplies it natively, and fp16 on CUDA chips from capability 7.0 on. It has to pass
    `trial`, and to save 10 % of fp32's time by `stopwatch`: pass one that times your own step. It
    tries and times a half precision that you ask for too: see `policy.warnings`. None for either
    skips it. Two ranks may measure different times, so let rank 0 choose for all. Raises ValueError
    for an unknown name.
    """
    name = SPELLINGS.get(name, name)
    if name not in ("auto", *POLICIES):
        raise ValueError(f"unknown precision {name!r}: choose from auto, {', '.join(POLICIES)}")
    if caps is None:
        caps = capabilities("cuda" if torch.cuda.is_available() else "cpu")
    automatic = name == "auto"
    sm = caps.sm or (0, 0)
    if automatic and caps.native_bf16:
        name, reason = "bf16", f"{caps} runs bfloat16 natively and needs no loss scaling"
    elif automatic and sm >= (7, 0):
        name, reason = "fp16", f"{caps} has no native bfloat16; float16 needs loss scaling"
    elif automatic:
        name, reason = "fp32", f"{caps} has no half precision that is both native and safe"
    else:
        reason = f"as asked: {POLICIES[name].means}"
    level = POLICIES[name]
    half = level.dtype in HALF
    notes = []
    if level.dtype is BF16 and not caps.native_bf16:
        notes.append(f"{caps} only emulates bfloat16: slow")
    if level.tf32 and sm < (8, 0):
        notes.append(f"{caps} has no TF32: this is fp32")
    fault = trial(caps.device, level.dtype) if half and trial else ""
    if fault:
        notes.append(f"{caps} failed the self-test: {fault}")
    elif half and stopwatch:
        full, low = stopwatch(caps.device, (F32, level.dtype))
        times = f"it takes {low / full:.2g} times as long as fp32 on this {caps.device}"
        if not low / full <= (0.9 if automatic else 1.0):  # also where it is NaN
            notes.append(times)
        elif automatic:
            reason = f"{reason}; {times}"
    if automatic and notes:
        level = POLICIES["fp32"]
        reason = f"{name} is left out: {notes[0]}"
        notes = []
    reason = "; ".join([reason, *notes])
    warned = tuple(f"{name}: {note}" for note in notes)
    return replace(level, device=caps.device, reason=reason, warnings=warned)


# --- TF32

TF32_SWITCHES = (
    torch.backends.cuda.matmul,
    torch.backends.mkldnn.matmul,
    torch.backends.cudnn.conv,
    torch.backends.cudnn.rnn,
)


def set_tf32(on: bool) -> None:
    """TF32 on or off for matmuls (cuBLAS, oneDNN), cuDNN's convolutions and RNNs.

    The older setters keep the newer `fp32_precision` in step. The other way round inductor's read
    of `allow_tf32` raises (pytorch #166387).
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 recommends the newer ones here
        torch.set_float32_matmul_precision("high" if on else "highest")
        torch.backends.cudnn.allow_tf32 = on
    if not on:  # the setters left "none", which inherits a global "tf32"; "ieee" inherits nothing
        for switch in TF32_SWITCHES:
            switch.fp32_precision = "ieee"


# --- Loss scaling with a floor


class LossScaler(torch.amp.GradScaler):
    """A GradScaler that cannot collapse: the scale stays in [floor, ceiling].

    Below 1 it would shrink gradients. 2^24 lifts fp16's smallest number to 1, so that nothing is
    left to rescue. Checkpoints are GradScaler's. update(found_inf=flag) is for optimizers that skip
    on the device: no sync.
    """

    def __init__(
        self,
        device: str = "cuda",
        *args: Any,
        floor: float = 1.0,
        ceiling: float = 2.0**24,
        **kwargs: Any,
    ) -> None:
        super().__init__(device, *args, **kwargs)
        absent = device == "cuda" and not torch.cuda.is_available()
        self._one = torch.ones((), device="cpu" if absent else device)
        self.floor, self.ceiling = floor, ceiling
        if self.is_enabled() and not 1.0 <= floor <= self._init_scale <= ceiling < math.inf:
            raise ValueError("LossScaler needs 1 <= floor <= init_scale <= ceiling")

    @property
    def scale_tensor(self) -> Tensor:
        """The scale, 0-dim fp32 on the device: always the same tensor, 1.0 if disabled."""
        if not self.is_enabled():
            return self._one
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        return self._scale

    @torch.no_grad()
    def update(self, *new_scale: Any, found_inf: Tensor | None = None) -> None:
        """Adapt to one attempted step, or set the scale to `new_scale`, as GradScaler does.

        found_inf: 0-dim fp32 on the device; anything but 0 (NaN too) is a skipped step. Without it
        the flags count that `step` left.
        """
        if not self.is_enabled():
            return
        scale = self.scale_tensor
        scale.masked_fill_(scale.clamp(self.floor, self.ceiling) != scale, self._init_scale)
        if found_inf is None:
            super().update(*new_scale)
        else:
            torch._amp_update_scale_(
                scale,
                self._growth_tracker,
                found_inf,
                self._growth_factor,
                self._backoff_factor,
                self._growth_interval,
            )
            self._per_optimizer_states.clear()
        scale.clamp_(self.floor, self.ceiling)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load, or start afresh with a warning if nothing fits (a resume at another level)."""
        scale = state.get("scale", math.nan)
        if self.floor <= scale <= self.ceiling:
            super().load_state_dict(state)
        elif self.is_enabled():  # none, collapsed (0) or poisoned (NaN)
            held = f"holds a loss scale of {scale}" if "scale" in state else "holds no loss scale"
            warnings.warn(f"the checkpoint {held}: it starts at {self._init_scale:g}", stacklevel=2)
