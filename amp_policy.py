"""
Precision policy: which operation runs in which dtype, decided once, with its reason printed.

Half precision does not fail everywhere. It fails where a number leaves the format, and the formats differ:

                          fp16                bf16             fp32
    largest               65504               3.39e38          3.40e38     65520 and up round to inf in fp16
    next after 1          +2^-10              +2^-7            +2^-23      TF32: range of fp32, spacing of fp16
    smallest normal       2^-14  = 6.1e-5     2^-126           2^-126
    smallest subnormal    2^-24  = 6.0e-8     2^-133           2^-149      |g| <= 2^-25 is exactly 0 in fp16
    counts exactly up to  2048                256              2^24        label 999 is 1000 in bf16

So fp16 overflows (a variance, an attention logit, a sum over pixels) and underflows (gradients: hence loss scaling).
bf16 does neither, but rounds eight times as coarsely: an update below |w| * 2^-9 is lost, hence fp32 weights.

Autocast casts for you, from two lists which are not the same (torch >= 2.9, `aten/src/ATen/autocast_mode.*`):

    operation                                                    CUDA      CPU
    linear matmul bmm conv scaled_dot_product_attention          half      half
    softmax log_softmax layer_norm group_norm                    fp32      as it comes
    rms_norm, of which torch 2.9's CUDA list knows nothing       fp32      as it comes
    exp log pow rsqrt sum norm logsumexp cumsum interpolate      fp32      as it comes
    cross_entropy nll mse l1 smooth_l1 huber kl_div              fp32      fp32
    batch_norm mean gelu relu sigmoid add mul, 2-D pooling       as it comes, on both
    cat and stack of half with fp32                              fp32      fp32
    binary_cross_entropy                                         error     fp32

A green CPU test therefore says nothing about CUDA's islands. Write them out, `F.softmax(x.float(), -1).to(x.dtype)`,
and both agree. Nor is "autocast off" fp32: half inputs stay half, an inner `autocast(enabled=True)` wins, and cuDNN
convolutions use TF32 unless told not to. `fp32_eval` closes all three doors.

What the popular snippets get wrong, and why it matters:

    labels.to(torch.bfloat16)         a wrong label: 257 becomes 256. Here labels are never cast, not even soft ones.
    model.half() *and* autocast       the fp32 copy of the weights is gone (w + 1e-4 == w); autocast adds nothing.
    GradScaler with bf16              bf16 has the range of fp32: nothing to rescue, but steps to skip.
    O1 = O2 = O3                      where the weights live is the whole difference: see the table of levels.
    grad norm read before unscaling   65536 times too large: the "explosion" in the plot is the loss scale.
    clip_grad_norm_ before unscale_   clips 65536 * g to 1, then divides by 65536: every step is almost nothing.
    is_bf16_supported()               True on a T4, by emulation. Native means capability 8.0 and up.
    GradScaler as it comes            no floor: 166 bad steps take 2^16 to exactly 0, and the next *good* step, divided
                                      by it, writes NaN into every weight. Run this file to watch it.

This file decides the level (`choose_policy`), applies it (`Policy`), pins modules in fp32 (`keep_fp32`), evaluates in
honest fp32 (`fp32_eval`, `disagreement`), scales the loss (`LossScaler`) and refuses what cannot work (`refuse`). It
never repairs a number. Copy it alone, it needs torch only. Sources: Micikevicius et al. 2018 (arXiv 1710.03740) for
loss scaling and masters, NVIDIA apex for the O-levels, pytorch #99640 for the collapse.
"""

from __future__ import annotations

import contextlib
import platform
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module  # the context that torch.func.functional_call is made of
from torch.utils._pytree import tree_leaves, tree_map

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
HALF = (F16, BF16)


# --- The levels, as data

@dataclass(frozen=True)
class Policy:
    """One level, bound to a device type. `str(policy)` is its name and the reason for choosing it."""

    name: str
    dtype: torch.dtype  # matmuls and convolutions
    param_dtype: torch.dtype  # parameters as they live in the module
    autocasts: bool
    scales: bool  # loss scaling
    tf32: bool
    masters: bool  # the optimizer keeps fp32 copies of half parameters
    norms_fp32: bool  # parameters and statistics of the norms
    means: str
    device: str = "cpu"
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.reason or self.means}"

    def autocast(self) -> torch.autocast:
        """A fresh context; it does nothing at the levels without autocast, so the loop has one path."""
        return torch.autocast(self.device, dtype=self.dtype if self.autocasts else None, enabled=self.autocasts)

    def prepare(self, net: nn.Module) -> nn.Module:
        """Set the TF32 switches and, in O2 and O3, cast `net` in place. Before DDP, torch.compile and the optimizer.

        O2 and O3 run without autocast, so each module that owns parameters gets a forward pre-hook which casts its
        first positional argument, and no other, to their dtype: `net(images, labels)` never has its labels cast. What
        `keep_fp32` pinned before this call keeps fp32 parameters. O2 pins every norm too, and leaves buffers alone (a
        rotary table in fp16 miscounts above 2048); O3 casts all the rest.
        """
        set_tf32(self.tf32)
        if self.param_dtype is F32:
            return net
        for module in net.modules() if self.norms_fp32 else ():
            if "Norm" in type(module).__name__ and not any(module.children()):  # a `PreNorm` with children is no norm
                _pin(module, by_name=False)
        kept = {id(t) for m in net.modules() if _is_pinned(m) for t in (*m.parameters(), *m.buffers())}
        for module in net.modules():
            own = list(module.parameters(recurse=False))
            if own:
                module.register_forward_pre_hook(_cast_first_input)
            for t in own if self.norms_fp32 else [*own, *module.buffers(recurse=False)]:
                if t.is_floating_point() and id(t) not in kept:
                    t.data = t.data.to(self.param_dtype)
        return net


POLICIES: dict[str, Policy] = {
    p.name: p
    for p in (
        #      name   matmuls params autocast scaler tf32  masters norms fp32
        Policy("fp32", F32, F32, False, False, False, False, True, "all fp32, TF32 off everywhere"),
        Policy("tf32", F32, F32, False, False, True, False, True, "fp32 weights, matmuls read 10-bit mantissas"),
        Policy("bf16", BF16, F32, True, False, False, False, True, "autocast to bfloat16, no loss scaling"),
        Policy("fp16", F16, F32, True, True, False, False, True, "autocast to float16, loss scaling"),
        Policy("O2", F16, F16, False, True, False, True, True, "float16 weights, fp32 norms and masters, loss scaling"),
        Policy("O3", F16, F16, False, False, False, False, False, "all float16, no masters, no scaling: an experiment"),
    )
}  # TF32 is off beside half precision: what remains in fp32 there is an island, and an island means fp32
POLICIES |= {"O0": POLICIES["fp32"], "O1": POLICIES["fp16"]}  # apex's names


def _tf32_switches() -> tuple:
    backends = torch.backends
    return backends.cuda.matmul, backends.mkldnn.matmul, backends.cudnn.conv, backends.cudnn.rnn


def set_tf32(on: bool) -> None:
    """TF32 on or off for matmuls (cuBLAS, oneDNN) and for cuDNN's convolutions and RNNs.

    By the older setters, since they keep the newer `fp32_precision` in step. The converse does not hold: after
    `fp32_precision = "tf32"` every read of `allow_tf32` raises, and inductor reads it (pytorch #166387).
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 recommends the newer ones here
        torch.set_float32_matmul_precision("high" if on else "highest")
        torch.backends.cudnn.allow_tf32 = on
    if not on:  # that left "none", which inherits a global "tf32"; "ieee" does not, and the older getters agree with it
        for switch in _tf32_switches():
            switch.fp32_precision = "ieee"


@contextlib.contextmanager
def _tf32_off() -> Iterator[None]:
    """TF32 off inside; outside, every switch as it was, whichever interface had set it."""
    new = [switch.fp32_precision for switch in _tf32_switches()]
    try:
        old = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    except RuntimeError:  # the newer interface was used, the older one cannot be read
        old = None
    set_tf32(False)
    try:
        yield
    finally:
        if old:
            torch.set_float32_matmul_precision(old[0])
            torch.backends.cudnn.allow_tf32 = old[1]
        for switch, value in zip(_tf32_switches(), new, strict=True):
            switch.fp32_precision = value


# --- Choosing a level

@dataclass(frozen=True)
class Capabilities:
    """What the choice depends on and nothing else, so that a test can fake any machine."""

    device: str  # "cuda" (ROCm too), "cpu", "mps", ...
    name: str = ""  # the driver's name for it; on ROCm the gfx architecture, on CPU the machine type
    sm: tuple[int, int] | None = None  # CUDA capability; None on ROCm, whose numbers mean something else
    hip: bool = False
    cpu_bf16: bool = False  # the processor multiplies bfloat16 itself

    def __str__(self) -> str:
        return f"sm_{self.sm[0]}{self.sm[1]}" if self.sm else f"{self.device} {self.name}".strip()


def capabilities(device: str | torch.device) -> Capabilities:
    """Read the machine; only `device` is asked, so a CPU run never wakes CUDA."""
    device = torch.device(device)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        if torch.version.hip:
            return Capabilities("cuda", properties.gcnArchName.split(":")[0], hip=True)
        return Capabilities("cuda", properties.name, (properties.major, properties.minor))
    machine, native = platform.machine(), False
    if device.type == "cpu" and machine.lower() in ("aarch64", "arm64"):
        with contextlib.suppress(AttributeError, RuntimeError):
            native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    elif device.type == "cpu":  # that operator is no answer on x86: True from AVX-512 on, by emulation
        flags = getattr(torch.cpu, "get_capabilities", dict)()
        native = flags.get("amx_bf16") or getattr(torch.cpu, "_is_avx512_bf16_supported", bool)()
    return Capabilities(device.type, machine, cpu_bf16=bool(native))


def self_test(device: str, dtype: torch.dtype) -> str:
    """One step (convolution, norm, attention, loss, backward) in `dtype` and in fp32: "" if they agree, else the fault.

    A GTX 16xx says 7.5 like a T4, and returns NaN from fp16 convolutions (pytorch #58123): only a trial tells.
    """
    draw, runs = torch.Generator().manual_seed(0), []
    shapes = ((8, 16, 16, 16), (32, 16, 3, 3), (10, 32))
    image, kernel, head = (torch.randn(s, generator=draw).to(device) / s[-1] for s in shapes)
    for low in (True, False):
        inputs = [t.clone().requires_grad_() for t in (image, kernel, head)]
        with _tf32_off(), torch.autocast(device, dtype=dtype if low else None, enabled=low):
            y = F.conv2d(F.layer_norm(inputs[0], (16,)), inputs[1] / 4, padding=1)  # the norm first: it would hide a
            y = y.flatten(2).transpose(1, 2)  # wrong scale after the convolution.  8, 256, 32
            y = torch.softmax(y @ y.transpose(1, 2) / 32**0.5, -1) @ y
            loss = F.cross_entropy(F.linear(y.mean(1), inputs[2]).float(), torch.arange(8, device=device))
            (loss * 1024.0).backward()  # or fp16's gradients flush to 0
        runs.append([loss.detach(), *(t.grad for t in inputs)])
    parts = ("loss", "gradient below a norm", "gradient of a convolution", "gradient of a linear")
    for what, got, want in zip(parts, *runs, strict=True):
        error = float((got - want).norm() / want.norm())
        if not error <= 0.05:  # fp16 and bf16 stay below 0.01; written so that NaN fails
            return f"the {what} is off by {error:.3g}"
    return ""


def choose_policy(name: str, caps: Capabilities, self_test: Callable[[str, torch.dtype], str] = self_test) -> Policy:
    """The policy called `name`, or for "auto" what suits this machine, with the reason. ValueError on an unknown name.

    Pure in its arguments: `self_test(device, dtype)` -> "" or a fault is asked only about float16 on CUDA chips of
    capability 7.x. With several processes choose on rank 0 and broadcast the name.
    """
    if name == "auto":
        name, reason = _auto(caps, self_test)
    elif name not in POLICIES:
        raise ValueError(f"unknown precision {name!r}: choose from auto, {', '.join(POLICIES)}")
    else:
        reason = f"as asked: {POLICIES[name].means}"
        ampere = caps.sm is not None and caps.sm >= (8, 0)
        if POLICIES[name].dtype is BF16 and not (ampere or caps.cpu_bf16 or caps.hip or caps.device == "mps"):
            reason += f" ({caps} only emulates bfloat16: slow)"
        if POLICIES[name].tf32 and not ampere:
            reason += f" ({caps} has no TF32: this is fp32)"
    return replace(POLICIES[name], device=caps.device, reason=reason)


def _auto(caps: Capabilities, self_test: Callable[[str, torch.dtype], str]) -> tuple[str, str]:
    if caps.device == "cpu" and caps.cpu_bf16:
        return "bf16", f"this {caps.name} processor multiplies bfloat16 natively; no loss scaling needed"
    if caps.hip and caps.name.startswith(("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")):
        return "bf16", f"{caps.name} has bfloat16 matrix instructions; no loss scaling needed"
    if caps.sm and caps.sm >= (8, 0):
        return "bf16", f"{caps} runs bfloat16 natively and needs no loss scaling"
    if caps.sm and caps.sm >= (7, 0):
        fault = self_test(caps.device, F16)
        if fault:
            return "fp32", f"{caps} ({caps.name}) failed the float16 self-test: {fault}"
        return "fp16", f"{caps} has no native bfloat16, passed the float16 self-test, and needs loss scaling"
    return "fp32", f"{caps} has no half precision that is both native and safe"


# --- fp32 islands

def keep_fp32(net: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Pin every module whose name or type name matches a pattern (fnmatch): it computes in fp32 from now on.

    Inputs are upcast, autocast is off inside, half parameters (O2, O3) are read through fp32 copies which pass the
    gradient back. The output has the dtype that the caller would have had: half if the first floating input was half,
    or from a matmul module under autocast; else fp32. Losses and scalars are never lowered. Only `forward` changes, on
    the instance: parameters and state_dict keys stay, DDP, optimizer and checkpointed blocks do not notice, deepcopy
    rebinds it, and compiled code guards on it, so a module pinned later counts too.

    Returns names without DDP's and compile's prefixes. ValueError if a pattern matches nothing. Not reached: code that
    takes `module.weight` without calling the module; pin its owner. At level tf32 the matmuls of an island are TF32.
    """
    named, names = _named(net), []
    for pattern in patterns:
        hits = [n for n, m in named.items() if fnmatchcase(n, pattern) or fnmatchcase(type(m).__name__, pattern)]
        if not hits:
            raise ValueError(f"keep_fp32: no module matches {pattern!r}; there are {', '.join(list(named)[1:6])}, ...")
        names += [n for n in hits if n not in names]
    for name in names:
        _pin(named[name], by_name=True)
    return names


def pinned(net: nn.Module) -> list[str]:
    """The names pinned by `keep_fp32` so far: for the checkpoint, and for `keep_fp32` again on a resume."""
    return [n for n, m in _named(net).items() if getattr(m, "fp32_island", False)]


def _bare(net: nn.Module) -> nn.Module:
    while isinstance(net, nn.parallel.DistributedDataParallel) or "_orig_mod" in net._modules:
        net = next(net.children())
    return net


def _named(net: nn.Module) -> dict[str, nn.Module]:
    return {n.replace("_orig_mod.", ""): m for n, m in _bare(net).named_modules()}


def _pin(module: nn.Module, by_name: bool) -> None:
    if "forward" in vars(module) and not _is_pinned(module):
        raise ValueError(f"cannot pin a {type(module).__name__} whose forward has already been replaced by others")
    module.forward = types.MethodType(_island_forward, module)  # a bound method, so that copy.deepcopy rebinds it
    module.fp32_island = by_name or getattr(module, "fp32_island", False)  # False: by the level, for its norms
    for buffer in module.buffers():  # for good: statistics updated in a copy would be lost
        if buffer.dtype in HALF:
            buffer.data = buffer.data.float()


def _is_pinned(module: nn.Module) -> bool:
    return hasattr(module, "fp32_island")  # a plain attribute: dynamo (2.9) misreads vars(module)


def _cast(nest, dtype: torch.dtype):
    """Half and fp32 tensors in a nest of tuples, lists and dicts, to `dtype`; integers and fp64 as they are."""
    return tree_map(lambda t: t.to(dtype) if isinstance(t, Tensor) and t.dtype in (*HALF, F32) else t, nest)


def _cast_first_input(module: nn.Module, args: tuple) -> tuple | None:
    if not args or _is_pinned(module):
        return None
    dtype = next(p.dtype for p in module._parameters.values() if p is not None)  # now: inside fp32_eval it is fp32
    return (_cast(args[0], dtype), *args[1:])


def _island_forward(self: nn.Module, *args, **kwargs):
    floats = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_floating_point()]
    device = next((t.device.type for t in (*floats, *self.parameters())), "cpu")
    back = floats[0].dtype if floats else F32
    matmul = isinstance(self, (nn.Linear, nn.modules.conv._ConvNd, nn.MultiheadAttention))
    if matmul and torch.is_autocast_enabled(device):
        back = torch.get_autocast_dtype(device)
    copies = {n: p.float() for n, p in self.named_parameters(remove_duplicate=False) if p.dtype in HALF}
    swap = _reparametrize_module(self, copies) if copies else contextlib.nullcontext()
    with torch.autocast(device, enabled=False), swap:
        args, kwargs = _cast((args, kwargs), F32)
        out = type(self).forward(self, *args, **kwargs)
    if back not in HALF or isinstance(self, nn.modules.loss._Loss):
        return out
    return tree_map(lambda t: t.to(back) if isinstance(t, Tensor) and t.dtype is F32 and t.ndim else t, out)


# --- Evaluation in fp32, and how far the training precision is from it

@contextlib.contextmanager
def fp32_eval(net: nn.Module, masters: Mapping[nn.Parameter, Tensor] | None = None) -> Iterator[None]:
    """Inside, `net` computes in fp32 and nothing else; on exit, and on an exception, all is as it was.

    Autocast is off and stays off (a nested `autocast(enabled=True)` has no effect, in the whole process), TF32 is off,
    half parameters and buffers are replaced by fp32 copies, parameters by `masters[p]` (fp32, same shape) where given;
    the parameters themselves are never written. Compiled code is bypassed, for it remembers its casts. Gradient mode
    and train/eval mode stay the caller's; a backward inside fills the copies' gradients, not the parameters'.
    """
    net, masters, copies = _bare(net), masters or {}, {}
    for name, t in (*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)):
        if t.dtype in HALF:
            # swapped, not `t.data = ...`: another dtype there renews the gradient accumulator, and DDP's hook is lost
            copies[name] = masters.get(t, t).detach().float().requires_grad_(t.requires_grad)
    enable = torch.set_autocast_enabled  # every way into autocast ends in this call; its last argument is the wish
    with contextlib.ExitStack() as stack:
        for device in filter(torch.amp.is_autocast_available, ("cpu", "cuda", "mps", "xpu")):
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(_tf32_off())
        stack.enter_context(_eager())
        stack.enter_context(_reparametrize_module(net, copies))
        stack.callback(setattr, torch, "set_autocast_enabled", enable)
        torch.set_autocast_enabled = lambda *args: enable(*args[:-1], False)
        yield


def _eager() -> contextlib.AbstractContextManager:
    loaded = "torch._dynamo" in sys.modules  # importing it takes seconds; not loaded means nothing compiled
    return torch.compiler.set_stance("force_eager") if loaded else contextlib.nullcontext()


@dataclass(frozen=True)
class Disagreement:
    """One batch in the training precision beside fp32. Shares are of rows (images), losses are means over rows."""

    nonfinite: float  # share of rows whose loss is NaN or inf in the training precision
    nonfinite_fp32: float
    loss: float
    loss_fp32: float
    changed: float  # share of rows whose prediction turned from right to wrong or back
    layer: str  # the first module, in the order of execution, where the two part; "" if none
    parted: bool

    def __str__(self) -> str:
        text = f"loss {self.loss:.4g} ({self.loss_fp32:.4g} in fp32), {self.nonfinite:.1%} of rows non-finite "
        text += f"({self.nonfinite_fp32:.1%} in fp32), {self.changed:.1%} of predictions changed"
        return text + (f"; they part at {self.layer or 'no single layer'}" if self.parted else "")


@torch.no_grad()
def disagreement(
    net: nn.Module,
    images: Tensor,
    labels: Tensor,
    policy: Policy,
    masters: Mapping[nn.Parameter, Tensor] | None = None,
    tolerance: float = 0.05,
) -> Disagreement:
    """Evaluate one batch under `policy` and in fp32: how far apart are they, and from which layer on?

    `net(images, labels)` returns `(loss, metrics)`, metrics a dict of (B,) tensors with "loss" and, where there are
    classes, "acc1". Both runs are eager, in eval mode, and draw the same random numbers. They have parted when more
    rows are non-finite than in fp32, when the loss moved by more than `tolerance` (relative, above 1), or when that
    share of predictions did. `layer` is then the first module with more non-finite outputs than in fp32 or off by more
    than `tolerance` (2-norm, relative, on a sample of its output). It syncs: for a few batches a validation.
    """
    net = _bare(net)
    modes = [(m, m.training) for m in net.modules()]
    net.eval()
    try:
        with _eager():
            rows, hits, trail = _watched(net, images, labels, policy.autocast())
            rows32, hits32, trail32 = _watched(net, images.float(), labels, fp32_eval(net, masters))
    finally:
        for module, mode in modes:
            module.training = mode
    bad, bad32 = ((~r.isfinite()).float().mean().item() for r in (rows, rows32))
    loss, loss32, changed = rows.mean().item(), rows32.mean().item(), (hits != hits32).float().mean().item()
    moved = not abs(loss - loss32) <= tolerance * max(1.0, abs(loss32)) or changed > tolerance
    parted, layer = bad > bad32 or (bad32 == 0 and moved), ""
    for (name, holes, a), (_, holes32, b) in zip(trail, trail32, strict=True) if parted else ():
        both = a.isfinite() & b.isfinite()
        error = torch.where(both, a - b, 0).norm() / torch.where(both, b, 0).norm().clamp(min=1e-30)
        if holes > holes32 or not error <= tolerance:
            layer = name or "the model's own code after its last layer"
            break
    return Disagreement(bad, bad32, loss, loss32, changed, layer, parted)


def _watched(net: nn.Module, images: Tensor, labels: Tensor, context) -> tuple[Tensor, Tensor, list]:
    """Per-row loss and acc1, and for each output (module name, count of non-finite, a sample of up to 64k numbers)."""
    trail: list[tuple[str, Tensor, Tensor]] = []

    def watch(name: str) -> Callable:
        def hook(module: nn.Module, args: tuple, out) -> None:
            for t in (t.detach().flatten() for t in tree_leaves(out) if isinstance(t, Tensor)):
                trail.append((name, (~t.isfinite()).sum(), t[:: t.numel() // 65536 + 1].float()))

        return hook

    hooks = [module.register_forward_hook(watch(name)) for name, module in _named(net).items()]
    try:
        with torch.random.fork_rng([images.device] if images.is_cuda else []), context:
            _, metrics = net(images, labels)
    finally:
        for hook in hooks:
            hook.remove()
    rows = metrics["loss"].float()
    return rows, metrics.get("acc1", torch.zeros_like(rows)), trail


# --- Loss scaling with a floor

class LossScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` (same arguments, calls and checkpoint keys) that cannot collapse.

    The scale stays in [floor, ceiling]. With `hysteresis` = n, the first n - 1 bad steps after each growth leave it
    alone (Megatron's rule: one spike in the data is no reason). `update(found_inf)` works on the device without a sync,
    for optimizers that skip by themselves; `update()` after `step(optimizer)` reads the flags that `step` left.
    `skipped` (0-dim fp32) is 1.0 if the last update saw a rejected step: a falling scale is no sign, at the floor.
    """

    def __init__(
        self,
        device: str = "cuda",
        *args,
        floor: float = 1.0,  # below 1 it would shrink gradients: the step is bad for another reason
        ceiling: float = 2.0**24,  # lifts fp16's smallest number to 1: nothing is left to rescue
        hysteresis: int = 1,
        **kwargs,
    ) -> None:
        super().__init__(device, *args, **kwargs)
        if not self._enabled:  # the base class leaves these out
            self._scale, self._init_scale, self._growth_tracker, self._init_growth_tracker = None, 1.0, None, 0
        elif not 0.0 < floor <= self._init_scale <= ceiling < float("inf"):
            raise ValueError(f"LossScaler needs 0 < floor ({floor}) <= {self._init_scale} <= ceiling ({ceiling})")
        self.floor, self.ceiling, self.hysteresis = floor, ceiling, hysteresis
        self._patience, self.skipped = hysteresis, torch.zeros(())

    @property
    def scale_tensor(self) -> Tensor:
        """The scale, 0-dim fp32 on the device, the same tensor all along; 1.0 when disabled."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        return self._scale

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        """Look again after the division, as the base class does not: with a scale below 1, g / scale can overflow."""
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        if allow_fp16:  # a mere check, for a fused optimizer which divides by itself
            return found
        return super()._unscale_grads_(optimizer, torch.ones_like(inv_scale), found_inf, allow_fp16)

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
        bad = found_inf.to(scale.device, non_blocking=True) != 0
        patience = (self._patience - bad.int()).clamp(min=0)
        clean = torch.where(bad, 0, self._growth_tracker + 1)
        grow = clean >= self._growth_interval
        factor = torch.where(bad & (patience == 0), self._backoff_factor, torch.where(grow, self._growth_factor, 1.0))
        lawful = (scale >= self.floor) & (scale <= self.ceiling)  # False for NaN: a corrupted scale starts afresh
        scale.copy_(torch.where(lawful, scale, self._init_scale) * factor).clamp_(self.floor, self.ceiling)
        self._growth_tracker.copy_(torch.where(grow, 0, clean))
        self._patience = torch.where(grow, self.hysteresis, patience)
        self.skipped = bad.float()
        self._per_optimizer_states.clear()

    def state_dict(self) -> dict:
        """The base class's five entries and "patience"; {} when disabled."""
        return super().state_dict() | {"patience": int(self._patience)} if self._enabled else {}

    def load_state_dict(self, state: dict) -> str:
        """Load, or start afresh where nothing fits (a resume at another level). Returns the note it warns with."""
        note = ""
        if not self._enabled:
            note = "the checkpoint's loss scale is dropped: this precision needs none" if state else ""
        elif not {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"} <= set(state):
            note = f"the checkpoint holds no loss scale: it starts at {self._init_scale:g}"
        elif not self.floor <= state["scale"] <= self.ceiling:  # collapsed (0) or poisoned (NaN)
            note = f"the checkpoint's loss scale {state['scale']:g} is dropped: it starts at {self._init_scale:g}"
        else:
            super().load_state_dict(state)
            self._patience = state.get("patience", self.hysteresis)
        if note:
            warnings.warn(note, stacklevel=2)
        return note


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

class _Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.ln, self.fc = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.LayerNorm(8), nn.Linear(8, 4)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.bn(self.conv(images))
        x = self.ln(x.flatten(2).mean(-1))  # B, 8
        logits = self.fc(F.softmax(x.float(), -1).to(x.dtype))
        loss = F.cross_entropy(logits.float(), labels)
        self.seen = {"norm out": x.dtype, "linear out": logits.dtype, "loss": loss.dtype}
        return loss


def _measured(policy: Policy) -> dict[str, torch.dtype]:
    """One real step at this level; the dtypes that were there."""
    net = policy.prepare(_Tiny().to(policy.device))
    with policy.autocast():
        net(torch.randn(4, 3, 8, 8, device=policy.device), torch.arange(4, device=policy.device)).backward()
    weight = net.fc.weight
    master = weight.detach().float() if policy.masters else weight.detach()
    master.grad = weight.grad.to(master.dtype)
    optimizer = torch.optim.AdamW([master], eps=1e-4)
    optimizer.step()
    state = optimizer.state[master]["exp_avg"]
    stored = {"weight": weight.dtype, "norm weight": net.ln.weight.dtype, "gradient": weight.grad.dtype}
    return stored | {"Adam state": state.dtype} | net.seen


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    caps = capabilities(device)
    print(f"{caps}\n  auto -> {choose_policy('auto', caps)}\n\nDtypes measured in one step on this {device}:")
    for i, name in enumerate(("fp32", "tf32", "bf16", "fp16", "O2", "O3")):
        row = _measured(choose_policy(name, caps))
        if i == 0:
            print("        " + "".join(f"{column:>12}" for column in row))
        print(f"  {name:6}" + "".join(f"{str(dtype)[6:]:>12}" for dtype in row.values()))
    set_tf32(False)
    print("\nA weight of 1.0 after n bad steps in a row and one good one:")
    for n in (10, 166):
        for scaler in (torch.amp.GradScaler(device), LossScaler(device)):
            weight = torch.ones(1, device=device, requires_grad=True)
            optimizer = torch.optim.SGD([weight], lr=0.1)
            for factor in [float("inf")] * n + [1.0]:
                optimizer.zero_grad()
                scaler.scale((weight * factor).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
            print(f"  {type(scaler).__name__:10}  n={n:3}  scale {scaler.get_scale():<8g}  weight {weight.item():.3f}")


if __name__ == "__main__":
    main()
