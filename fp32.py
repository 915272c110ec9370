# SPDX-License-Identifier: MIT (finite 4.0.0, 2026-11-28)
"""
fp32 on request: a module in fp32, an evaluation in fp32, and where half precision differs.

Half precision fails where a number leaves its format. The largest fp16 number is 65504, so a sum of
squares over 300 values of 15 is inf. bf16 reaches 3.4e38 and keeps 8 bits, so 257 is stored as 256.
Three tools answer this:

    keep_fp32(net, ["attn", nn.Softmax])   modules of that name or type compute in fp32: islands
    with fp32_eval(net): ...               the whole network computes in fp32, and no longer after
    disagreement(net, x, y, policy)        one batch in both precisions: from which layer on do the
                                           results differ?

`autocast(enabled=False)` alone is not fp32. Half weights stay half, cuDNN uses TF32 (10-bit
mantissas) by default, and an inner `autocast(enabled=True)` wins. `fp32_eval` lends fp32 weights,
turns TF32 off, and raises RuntimeError if the network computes in half precision all the same. The
error names the module.

No parameter and no state_dict key changes. Copy this file alone: it needs torch.

Paste::

    import torch
    from torch import nn
    from fp32 import disagreement, fp32_eval, keep_fp32
    net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    keep_fp32(net, [nn.LayerNorm, "2"])
    images, labels = torch.randn(4, 8), torch.tensor([0, 1, 1, 0])
    half = torch.autocast("cpu", dtype=torch.bfloat16)
    loss = nn.CrossEntropyLoss(reduction="none")
    print(disagreement(net, images, labels, half, loss=loss))
    with torch.no_grad(), fp32_eval(net):
        print(net(images).argmax(-1))
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.stateless import _reparametrize_module  # what functional_call is made of
from torch.nn.utils.weight_norm import WeightNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
HALF = (torch.float16, torch.bfloat16)


# --- fp32 islands


def keep_fp32(
    net: nn.Module, patterns: str | type | Iterable[str | type], keep_output: bool = False
) -> list[str]:
    """Pin modules: they compute in fp32 from now on. Returns their names.

    A pattern is a name, a type, or the name of a type (fnmatch). Inputs are upcast, autocast is off
    inside, half parameters (O2, O3) are read through fp32 copies which pass the gradient back. The
    output comes in autocast's dtype (of a linear layer or a convolution), else in that of the first
    floating input, else in that of the weights, so an output above 65504 is inf in fp16 again. With
    `keep_output` it stays fp32, for the next operation that takes fp32 (an addition, a norm; a
    matmul lowers it). Only `forward` changes, on the instance: parameters
    and state_dict keys stay, and DDP, the optimizer and compiled code notice by themselves.

    Names are without DDP's and compile's prefixes. ValueError if a pattern matches nothing. Not
    reached: code that takes `module.weight` without calling the module; pin its owner. At level
    tf32 the matmuls of an island are TF32.
    """
    names = _names(net)
    chosen = {}
    if isinstance(patterns, str | type):
        patterns = [patterns]
    for pattern in patterns:
        hits = {module: name for module, name in names.items() if _matches(module, name, pattern)}
        if not hits:
            raise ValueError(
                f"keep_fp32: no module matches {pattern!r}; "
                f"there are {', '.join([*names.values()][1:6])}, ..."
            )
        chosen |= hits
    for module in chosen:
        if "forward" in vars(module) and not hasattr(module, "fp32_island"):
            raise ValueError(f"cannot pin {module}: its forward has already been replaced")
        module.forward = functools.partial(_island_forward, module)  # copy and pickle rebind it
        module.fp32_island = keep_output  # asked for with hasattr; dynamo (2.9) misreads vars()
        beside = {f"{name}_{end}" for name in _normed(module) for end in "uv"}  # of spectral_norm
        for name, buffer in module.named_buffers():  # for good: a copy would lose statistics
            if buffer.dtype in HALF and name not in beside:
                buffer.data = buffer.data.float()
    return list(chosen.values())


def _matches(module, name, pattern):
    if isinstance(pattern, type):
        return isinstance(module, pattern)
    return fnmatchcase(name, pattern) or fnmatchcase(type(module).__name__, pattern)


def pinned(net: nn.Module, keep_output: bool = False) -> list[str]:
    """The names of the pinned modules, or only those that keep their output.

    For the checkpoint, and for `keep_fp32` on a resume: all names first, then those that keep
    their output.
    """
    islands = {m: name for m, name in _names(net).items() if hasattr(m, "fp32_island")}
    return [name for m, name in islands.items() if m.fp32_island or not keep_output]


def _bare(net):
    while isinstance(net, nn.parallel.DistributedDataParallel) or "_orig_mod" in net._modules:
        net = next(net.children())
    return net


def _names(net: nn.Module) -> dict[nn.Module, str]:
    return {m: name.replace("_orig_mod.", "") for name, m in _bare(net).named_modules()}


def _cast(tree: Any, old: tuple, new: torch.dtype) -> Any:
    """Tensors of an old dtype in nested lists, tuples and dicts become `new`; scalars stay."""

    def cast(value: Any) -> Any:
        concerned = isinstance(value, Tensor) and value.dtype in old and value.ndim
        return value.to(new) if concerned else value

    return tree_map(cast, tree)


def _normed(module):
    """Weights that a hook of weight_norm or spectral_norm computes before each forward."""
    hooks = module._forward_pre_hooks.values()
    names = [hook.name for hook in hooks if isinstance(hook, WeightNorm | SpectralNorm)]
    return {name: getattr(module, name) for name in names}


def _island_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    leaves = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    device = next((t.device.type for t in (*leaves, *self.parameters())), "cpu")
    # The dtype that it would have returned unpinned: autocast's, or that of its first input, or,
    # where these are whole numbers, of its weights.
    numbers = (t.dtype for t in (*leaves, *self.parameters()) if t.is_floating_point())
    back = next(numbers, F32)
    matmul = isinstance(self, (nn.Linear, nn.modules.conv._ConvNd))
    if matmul and torch.is_autocast_enabled(device):
        back = torch.get_autocast_dtype(device)
    copies = {
        name: p.float()
        for name, p in (*self.named_parameters(remove_duplicate=False), *_normed(self).items())
        if p.dtype in HALF
    }
    args, kwargs = _cast((args, kwargs), HALF, F32)
    with torch.autocast(device, enabled=False), _reparametrize_module(self, copies):
        out = type(self).forward(self, *args, **kwargs)
    if back not in HALF or self.fp32_island:
        return out
    return _cast(out, (F32,), back)


# --- Evaluation in fp32


@contextlib.contextmanager
def fp32_eval(net: nn.Module, masters: Mapping | None = None) -> Iterator[None]:
    """Inside, `net` computes only in fp32; afterwards everything is as before.

    Autocast and TF32 are off. Half parameters and buffers are replaced by fp32 copies, parameters
    by `masters[p]` (fp32, same shape) where given; the parameters themselves are never written.
    Compiled code is bypassed, for it remembers its casts. Gradient mode and train/eval mode stay
    the caller's; a backward fills the copies' gradients.

    RuntimeError where an operation runs under an autocast that was switched on inside, or where an
    operation of `net` returns half precision (its own `.half()`; half inputs). Every call of torch
    is seen, in modules, between them and in checkpointed blocks, at one Python call for each. The
    inside of TorchScript is not seen.
    """
    net = _bare(net)
    copies = {}
    parameters = net.named_parameters(remove_duplicate=False)
    for name, t in (*parameters, *net.named_buffers(remove_duplicate=False)):
        if t.dtype in HALF:
            # Swapped, not `t.data = ...`: another dtype there renews the gradient accumulator, and
            # DDP's hook on it is lost.
            weights = (masters or {}).get(t, t).detach().float()
            copies[name] = weights.requires_grad_(t.requires_grad)
    device = next((p.device.type for p in net.parameters()), "cpu")
    with (
        torch.autocast(device, enabled=False),
        _tf32_off(),
        _eager(),
        _reparametrize_module(net, copies),
        _OnlyFp32(net, device),
    ):
        yield


class _OnlyFp32(TorchFunctionMode):
    """Raise if torch is called under autocast, or if a module of `net` returns half precision."""

    def __init__(self, net: nn.Module, device: str):
        super().__init__()
        self.names = _names(net)
        self.device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, tuple) and out else out
        autocast = torch.is_autocast_enabled(self.device)
        half = isinstance(first, Tensor) and first.dtype in HALF
        if autocast or half:
            owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_stack(None)]
            modules = [m for m in owners if isinstance(m, nn.Module) and m in self.names]
            name = self.names[modules[0]] if modules else "outside of the network"
            if autocast or modules:  # else it is the caller's own half precision
                raise RuntimeError(
                    f"fp32_eval: {getattr(func, '__name__', func)} "
                    f"{'ran under autocast' if autocast else f'returned {first.dtype}'} in "
                    f"{name or 'the network itself'}: let an inner autocast follow its caller with "
                    "enabled=torch.is_autocast_enabled(device), and take dtypes from the weights"
                )
        return out


TF32_SWITCHES = (
    torch.backends.cuda.matmul,
    torch.backends.mkldnn.matmul,
    torch.backends.cudnn.conv,
    torch.backends.cudnn.rnn,
)


@contextlib.contextmanager
def _tf32_off():
    """Turn TF32 off inside; then restore every switch, whichever interface had set it."""
    newer = [switch.fp32_precision for switch in TF32_SWITCHES]
    try:
        older = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    except RuntimeError:  # the newer interface was used: the older one cannot be read
        older = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 recommends the newer one; others read the older
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
    for switch in TF32_SWITCHES:
        switch.fp32_precision = "ieee"
    try:
        yield
    finally:
        if older:
            torch.set_float32_matmul_precision(older[0])
            torch.backends.cudnn.allow_tf32 = older[1]
        for switch, value in zip(TF32_SWITCHES, newer, strict=True):
            switch.fp32_precision = value


def _eager():
    if "torch._dynamo" not in sys.modules:  # nothing is compiled; the import would take seconds
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


# --- How far the training precision is from fp32

TOLERANCE = 0.05  # as a share of predictions, of the loss (at least of 1), of a layer's 2-norm


@dataclass(frozen=True)
class Disagreement:
    """One batch in the training precision and in fp32. Shares count rows, losses are means."""

    nonfinite: float  # share of rows whose loss is NaN or inf in the training precision
    nonfinite_fp32: float
    loss: float
    loss_fp32: float
    changed: float  # share of rows whose prediction turned from right to wrong or back
    layer: str = ""  # the first module, in the order of execution, whose output differs

    @property
    def parted(self) -> bool:
        """More rows are non-finite than in fp32; or fp32 is finite, and loss or answers moved."""
        gap = abs(self.loss - self.loss_fp32)
        near = gap <= TOLERANCE * max(1.0, abs(self.loss_fp32))  # False for NaN
        moved = not near or self.changed > TOLERANCE
        return self.nonfinite > self.nonfinite_fp32 or (self.nonfinite_fp32 == 0 and moved)

    def __str__(self) -> str:
        text = (
            f"loss {self.loss:.4g} ({self.loss_fp32:.4g} in fp32), "
            f"{self.nonfinite:.1%} of rows non-finite ({self.nonfinite_fp32:.1%} in fp32), "
            f"{self.changed:.1%} of predictions changed"
        )
        return f"{text}; they part at {self.layer or 'no single layer'}" if self.parted else text


@torch.no_grad()
def disagreement(
    net: nn.Module,
    inputs: Any,
    labels: Any,
    policy: Any,
    masters: Mapping | None = None,
    loss: Any = None,
) -> Disagreement:
    """Evaluate one batch in the training precision and in fp32: how far do they differ?

    policy: anything with .autocast(), or an autocast context. It calls net(inputs, labels);
    net(inputs) where `labels` is None or `loss` is given, and net(**inputs) where these inputs are
    a mapping. The net returns one of these: (loss, metrics), where metrics may hold (B,) tensors
    "loss" and "acc1"; a mapping with "loss", and maybe "logits"; logits, for
    loss(logits, labels). TypeError on anything else. Both runs are eager,
    in eval mode, and draw the same random numbers. It syncs: for a few batches a validation. Call
    it outside of `fp32_eval`, inside of which both would be fp32.
    """
    net = _bare(net)
    context = policy.autocast() if hasattr(policy, "autocast") else policy
    alone = labels is None or loss is not None
    call = functools.partial(net, *([inputs] if alone else [inputs, labels]))
    if alone and isinstance(inputs, Mapping):
        call = functools.partial(net, **inputs)
    try:
        inspect.signature(net.forward).bind(*call.args, **call.keywords)
    except TypeError as error:
        raise TypeError(
            f"disagreement: {type(net).__name__}: {error}; "
            "for a network that takes no labels pass loss="
        ) from error

    def run() -> Any:
        return _rows(call(), labels, loss)

    rows, hits, trail = _watched(net, run, context)
    rows32, hits32, trail32 = _watched(net, run, fp32_eval(net, masters))
    both = torch.stack([rows, rows32])  # (2, B)
    nonfinite = 1 - both.isfinite().float().mean(1)
    changed = (hits != hits32).float().mean()
    verdict = Disagreement(*nonfinite.tolist(), *both.mean(1).tolist(), changed.item())
    return replace(verdict, layer=_fork(trail, trail32)) if verdict.parted else verdict


def _rows(out, labels, loss):
    """Losses, one for each row or one in all, and what shows whether a prediction changed."""
    if loss is not None:
        out = {"loss": loss(out, labels), "logits": out}
    elif isinstance(out, tuple) and isinstance(out[-1], Mapping):
        out = {"loss": out[0], **out[-1]}
    if not isinstance(out, Mapping) or "loss" not in out:
        raise TypeError(
            "disagreement: the network returned neither (loss, metrics) nor a mapping with a loss; "
            "for logits pass loss="
        )
    rows = out["loss"].float().reshape(-1)
    if "logits" in out:
        return rows, out["logits"].argmax(-1)
    return rows, out.get("acc1", rows.new_zeros(1))


def _fork(trail, trail32):
    """The first module whose outputs differ; "" if none do."""
    for (name, half), (_, full) in zip(trail, trail32, strict=True):
        known = full.isfinite()
        gap = torch.where(known, half - full, 0).norm()  # inf or NaN where only `half` is
        size = torch.where(known, full, 0).norm()
        if not gap <= TOLERANCE * size.clamp(min=1e-30):
            return name or "the model's own code after its last layer"
    return ""


def _watched(net, run, context):
    """What `run` returns, and for each output its module's name, up to 64k numbers and the sum."""
    trail = []
    names = _names(net)

    def note(module, args, out):
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and module in names:
                flat = t.flatten()
                sample = flat[:: len(flat) // 65536 + 1].float()
                total = flat.sum(dtype=F32)
                trail.append((names[module], torch.cat([sample, total[None]])))

    modes = {module: module.training for module in names}
    hook = register_module_forward_hook(note)
    gpus = {p.device for p in net.parameters() if p.is_cuda}
    try:
        with _eager(), torch.random.fork_rng(gpus), context:
            net.eval()
            return *run(), trail
    finally:
        hook.remove()
        for module, mode in modes.items():
            module.training = mode
