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

A green CPU test says nothing about CUDA's islands: write them out, `F.softmax(x.float(), -1).to(x.dtype)`, and both
agree. And "autocast off" is not fp32: half inputs stay half, an inner `autocast(enabled=True)` wins, and cuDNN uses
TF32 unless told not to. `fp32_eval` closes all three doors.

What popular snippets get wrong:

    model.half() *and* autocast       the fp32 copy of the weights is gone (w + 1e-4 == w); autocast adds nothing.
    clip_grad_norm_ before unscale_   clips 65536 * g to 1, then divides by 65536: every step is almost nothing.
    GradScaler with bf16              bf16 has the range of fp32: nothing to rescue, but steps to skip.
    GradScaler as it comes            no floor: 166 bad steps take 2^16 to exactly 0, and the next *good* step, divided
                                      by it, writes NaN into every weight (pytorch #99640). Run this file to watch it.

This file never repairs a number. Copy it alone, it needs torch only. Sources: Micikevicius et al. 2018 (arXiv
1710.03740) for loss scaling and masters, NVIDIA apex for the O-levels.
"""

from __future__ import annotations

import platform
import types
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
HALF = (F16, BF16)


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

    def __str__(self) -> str:
        return f"{self.name}: {self.reason or self.means}"

    def autocast(self) -> torch.autocast:
        """A fresh context; it does nothing at the levels without autocast, so the loop has one path."""
        return torch.autocast(self.device, dtype=self.dtype if self.autocasts else None, enabled=self.autocasts)

    def prepare(self, net: nn.Module) -> nn.Module:
        """Set TF32 and, in O2 and O3, cast `net` in place. Before DDP, torch.compile and the optimizer.

        O2 and O3 have no autocast: each module that owns parameters casts its first positional argument to their dtype,
        and no other, so `net(images, labels)` never has its labels cast. O2 keeps norms in fp32, and buffers as they
        are (a rotary table in fp16 miscounts above 2048). A module with an attribute `fp32_island` stays fp32 in both.
        """
        set_tf32(self.tf32)
        if self.param_dtype is F32:
            return net
        for module in net.modules():
            if list(module.parameters(recurse=False)):
                module.register_forward_pre_hook(_cast_first_input)
            is_norm = "Norm" in type(module).__name__ and not any(module.children())  # a `PreNorm` has children
            if is_norm and self.norms_fp32 and not hasattr(module, "fp32_island"):
                module.float()
                module.forward = types.MethodType(_norm_forward, module)  # a bound method: copy.deepcopy rebinds it
                module.fp32_island = True
        kept = {t for m in net.modules() if hasattr(m, "fp32_island") for t in (*m.parameters(), *m.buffers())}
        lowered = [*net.parameters()] if self.norms_fp32 else [*net.parameters(), *net.buffers()]
        for t in lowered:
            if t.is_floating_point() and t not in kept:
                t.data = t.data.to(self.param_dtype)
        return net


def _cast(nest, dtype: torch.dtype):
    """Half and fp32 tensors in a nest of tuples, lists and dicts, to `dtype`; integers and fp64 as they are."""
    return tree_map(lambda t: t.to(dtype) if isinstance(t, Tensor) and t.dtype in (*HALF, F32) else t, nest)


def _cast_first_input(module: nn.Module, args: tuple) -> tuple | None:
    if not args or hasattr(module, "fp32_island"):
        return None
    weight = next(module.parameters(recurse=False))  # asked now: an evaluation in fp32 lends fp32 weights
    return (_cast(args[0], weight.dtype), *args[1:])


def _norm_forward(self: nn.Module, x: Tensor, *args, **kwargs):
    return _cast(type(self).forward(self, x.float(), *args, **kwargs), x.dtype)


LEVELS = (
    Policy("fp32", F32, F32, "all fp32, TF32 off everywhere"),
    Policy("tf32", F32, F32, "fp32 weights, matmuls read 10-bit mantissas", tf32=True),
    Policy("bf16", BF16, F32, "autocast to bfloat16, no loss scaling", autocasts=True),
    Policy("fp16", F16, F32, "autocast to float16, loss scaling", autocasts=True, scales=True),
    Policy("O2", F16, F16, "float16 weights, fp32 norms and masters, loss scaling", masters=True, scales=True),
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
    device = torch.device(device)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        if torch.version.hip:
            return Capabilities("cuda", properties.gcnArchName.split(":")[0])
        return Capabilities("cuda", properties.name, (properties.major, properties.minor))
    machine = platform.machine()
    if device.type != "cpu":
        native = False
    elif machine.lower() in ("aarch64", "arm64"):
        try:
            native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        except (AttributeError, RuntimeError):  # a build without oneDNN
            native = False
    else:  # x86, where that operator is no answer: True from AVX-512 on, by emulation. A chip with AMX has this too
        native = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    return Capabilities(device.type, machine, cpu_bf16=native)


def self_test(device: str, dtype: torch.dtype) -> str:
    """Gradients of a small convnet in `dtype` beside fp32: "" if they agree, else the fault.

    A GTX 16xx says 7.5 like a T4, and returns NaN from fp16 convolutions (pytorch #58123): only a trial tells.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = (8, 16, 16, 16), (32, 16, 3, 3), (10, 32)
    image, kernel, head = inputs = [torch.randn(s, generator=generator).to(device).requires_grad_() for s in shapes]
    gradients = []
    for low in (True, False):
        with torch.autocast(device, dtype=dtype, enabled=low):
            features = F.gelu(F.conv2d(image, kernel / 12, padding=1)).mean((2, 3))
            loss = F.cross_entropy(F.linear(features, head).float(), torch.arange(8, device=device))
        gradients.append(torch.autograd.grad(1024.0 * loss, inputs))  # unscaled they would flush to 0 in fp16
    for of, half, full in zip(("the input", "a convolution", "a linear"), *gradients, strict=True):
        error = float((half - full).norm() / full.norm())
        if not error <= 0.05:  # sound hardware stays below 0.01; written so that NaN fails
            return f"the gradient of {of} is off by {error:.3g}"
    return ""


def choose_policy(name: str, caps: Capabilities, trial: Callable[[str, torch.dtype], str] = self_test) -> Policy:
    """The policy called `name`, or for "auto" what suits this machine, with the reason. ValueError on an unknown name.

    `trial` runs only for "auto" on CUDA chips of capability 7.x. With several processes choose on rank 0 and broadcast
    the name.
    """
    sm = caps.sm or (0, 0)
    if name not in ("auto", *POLICIES):
        raise ValueError(f"unknown precision {name!r}: choose from auto, {', '.join(POLICIES)}")
    if name != "auto":
        reason = f"as asked: {POLICIES[name].means}"
        if POLICIES[name].dtype is BF16 and not caps.native_bf16 and caps.device != "mps":
            reason += f" ({caps} only emulates bfloat16: slow)"
        if POLICIES[name].tf32 and sm < (8, 0):
            reason += f" ({caps} has no TF32: this is fp32)"
    elif caps.native_bf16:
        name, reason = "bf16", f"{caps} runs bfloat16 natively and needs no loss scaling"
    elif sm < (7, 0):
        name, reason = "fp32", f"{caps} has no half precision that is both native and safe"
    elif fault := trial(caps.device, F16):
        name, reason = "fp32", f"{caps} ({caps.name}) failed the float16 self-test: {fault}"
    else:
        name, reason = "fp16", f"{caps} has no native bfloat16, passed the float16 self-test, and needs loss scaling"
    return replace(POLICIES[name], device=caps.device, reason=reason)


# --- TF32

TF32_SWITCHES = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul,
                 torch.backends.cudnn.conv, torch.backends.cudnn.rnn)


def set_tf32(on: bool) -> None:
    """TF32 on or off for matmuls (cuBLAS, oneDNN) and for cuDNN's convolutions and RNNs.

    By the older setters, which keep the newer `fp32_precision` in step. Not so the other way round: after
    `fp32_precision = "tf32"` every read of `allow_tf32` raises, and inductor reads it (pytorch #166387).
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 recommends the newer ones here
        torch.set_float32_matmul_precision("high" if on else "highest")
        torch.backends.cudnn.allow_tf32 = on
    if not on:  # the setters left "none", which inherits a global "tf32"; "ieee" inherits nothing and reads as off
        for switch in TF32_SWITCHES:
            switch.fp32_precision = "ieee"


# --- Loss scaling with a floor

class LossScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` (same arguments, calls and checkpoint keys) that cannot collapse.

    The scale stays in [floor, ceiling]: below 1 it would shrink gradients, and 2^24 lifts fp16's smallest number to 1,
    so that nothing is left to rescue. With `hysteresis` = n, the first n - 1 bad steps after each growth leave it
    alone (Megatron's rule: one spike in the data is no reason). `update(found_inf)` works on the device without a sync,
    for optimizers that skip by themselves; `update()` after `step(optimizer)` reads the flags that `step` left.
    """

    _scale = _growth_tracker = None  # the base class leaves these four out when it is disabled
    _init_scale, _init_growth_tracker = 1.0, 0

    def __init__(self, device: str = "cuda", *args, floor: float = 1.0, ceiling: float = 2.0**24, hysteresis: int = 1,
                 **kwargs) -> None:
        super().__init__(device, *args, **kwargs)
        if self._enabled and not 1.0 <= floor <= self._init_scale <= ceiling < float("inf"):
            raise ValueError(f"LossScaler needs 1 <= floor ({floor}) <= {self._init_scale} <= ceiling ({ceiling})")
        self.floor, self.ceiling, self.hysteresis = floor, ceiling, hysteresis
        self._patience = torch.tensor(hysteresis)  # bad steps left until the scale falls

    @property
    def scale_tensor(self) -> Tensor:
        """The scale, 0-dim fp32 on the device, the same tensor all along; 1.0 when disabled."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        return self._scale

    def _lazy_init_scale_growth_tracker(self, device: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(device)
        self._patience = self._patience.to(device)

    @torch.no_grad()
    def update(self, found_inf: Tensor | None = None) -> None:
        """Adapt to one attempted step. `found_inf`: 0-dim, on the device; anything but 0 (NaN too) is a rejection."""
        if not self._enabled:
            return
        scale = self.scale_tensor
        if found_inf is None:
            flags = [f for s in self._per_optimizer_states.values() for f in s["found_inf_per_device"].values()]
            if not flags:
                raise AssertionError("LossScaler.update() needs a step(optimizer) before it, or found_inf")
            found_inf = sum(f.to(scale.device, non_blocking=True) for f in flags)
        found_inf = found_inf.to(scale.device, torch.float32, non_blocking=True)
        scale.masked_fill_(scale.clamp(self.floor, self.ceiling) != scale, self._init_scale)  # corrupted: afresh
        before = scale.clone() if self.hysteresis > 1 else scale
        torch._amp_update_scale_(scale, self._growth_tracker, found_inf, self._growth_factor, self._backoff_factor,
                                 self._growth_interval)
        if self.hysteresis > 1:
            bad = found_inf != 0
            self._patience.sub_(bad.int()).clamp_(min=0)
            scale.copy_(torch.where(bad & (self._patience > 0), before, scale))
            self._patience.masked_fill_(~bad & (self._growth_tracker == 0), self.hysteresis)  # it has just grown
        scale.clamp_(self.floor, self.ceiling)
        self._per_optimizer_states.clear()

    def state_dict(self) -> dict:
        """The base class's five entries and "patience"; {} when disabled."""
        return super().state_dict() | {"patience": int(self._patience)} if self._enabled else {}

    def load_state_dict(self, state: dict) -> None:
        """Load, or start afresh with a warning where nothing fits (a resume at another level)."""
        if self._enabled and self.floor <= state.get("scale", 0.0) <= self.ceiling:
            super().load_state_dict(state)
            self._patience.fill_(state.get("patience", self.hysteresis))
        elif self._enabled:  # none, collapsed (0) or poisoned (NaN)
            found = f"the checkpoint's loss scale is {state.get('scale', 'missing')}"
            warnings.warn(f"{found}: it starts at {self._init_scale:g}", stacklevel=2)
        elif state:
            warnings.warn("the checkpoint's loss scale is dropped: this precision needs none", stacklevel=2)


# --- Refusals

def refuse(policy: Policy, parameters: Iterable[Tensor], *, eps: float, beta2: float, masters: bool) -> None:
    """Raise ValueError, in one sentence, on Adam settings that cannot work. Call it after `policy.prepare`.

    `masters`: the optimizer keeps fp32 masters and state for half parameters, and unscales the gradients into fp32.
    """
    dtypes = {p.dtype for p in parameters}
    if policy.masters and not masters and dtypes & {*HALF}:
        raise ValueError(f"{policy.name} promises fp32 master weights, and this optimizer keeps none")
    if policy.scales and not masters and F16 in dtypes:
        raise ValueError("loss scaling with fp16 gradients: unscaled in fp16 they flush to 0 again; keep fp32 masters")
    for dtype in {F32} if masters else dtypes:
        if not torch.tensor(eps, dtype=dtype) > 0:
            raise ValueError(f"eps={eps:g} is 0 in {dtype}, the dtype of Adam's state: 0/0 is NaN; keep fp32 masters")
        if dtype is BF16 and beta2 > 0.996:  # above, v * beta2 rounds back to v
            raise ValueError(f"beta2={beta2:g} with bfloat16 state: the second moment never decays; keep fp32 masters")


# --- python amp_policy.py

def measured(policy: Policy) -> dict[str, torch.dtype]:
    """One real step at this level: the dtypes that were there."""
    device = policy.device
    net = policy.prepare(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)).to(device))
    with policy.autocast():
        features = net[:2](torch.randn(4, 8, device=device))
        logits = net[2](features)
        loss = F.cross_entropy(logits.float(), torch.arange(4, device=device))
    loss.backward()
    weight = net[2].weight
    master = weight.detach().float() if policy.masters else weight
    master.grad = weight.grad.to(master.dtype)
    optimizer = torch.optim.AdamW([master], eps=1e-4)
    optimizer.step()
    tensors = {"weight": weight, "norm weight": net[1].weight, "linear out": logits, "norm out": features, "loss": loss,
               "gradient": weight.grad, "Adam state": optimizer.state[master]["exp_avg"]}
    return {name: t.dtype for name, t in tensors.items()}


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    caps = capabilities(device)
    print(f"{caps}\n  auto -> {choose_policy('auto', caps)}")
    print(f"\nDtypes measured in one step on this {device}:")
    rows = {level.name: measured(choose_policy(level.name, caps)) for level in LEVELS}
    print("        " + "".join(f"{column:>12}" for column in rows["fp32"]))
    for name, row in rows.items():
        print(f"  {name:6}" + "".join(f"{str(dtype).removeprefix('torch.'):>12}" for dtype in row.values()))
    print("\nA weight of 1.0 after 166 bad steps in a row and a good one:")
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
