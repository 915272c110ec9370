# SPDX-License-Identifier: MIT (finite 2.2.0, 2026-11-22)
"""
fp32 on request: keep a module in fp32, evaluate a network in fp32, and see where half precision parts from fp32.

Half precision fails where a number leaves its format. The largest fp16 number is 65504, so a sum of squares over 300
values of 15 is inf. bf16 reaches 3.4e38 and keeps 8 bits, so 257 is stored as 256. Three tools answer this:

    keep_fp32(net, ["attn"])               modules of that name or type compute in fp32; all others stay as they are
    with fp32_eval(net): ...               the whole network computes in fp32; afterwards it is as it was
    disagreement(net, x, y, policy)        one batch in both precisions: do they agree? if not, from which layer on?

`autocast(enabled=False)` alone is not fp32. Half weights stay half, cuDNN uses TF32 (10-bit mantissas) by default, and
an inner `autocast(enabled=True)` wins. `fp32_eval` lends fp32 weights, turns TF32 off, and raises RuntimeError where
the network computes in half precision all the same. The error names the module and the line.

No parameter and no state_dict key changes. Copy this file alone. It needs torch only.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module  # the context that torch.func.functional_call is made of
from torch.overrides import TorchFunctionMode

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
HALF = (torch.float16, torch.bfloat16)


# --- fp32 islands

def keep_fp32(net: nn.Module, patterns: Iterable[str], keep_output: bool = False) -> list[str]:
    """Pin every module whose name or type name matches a pattern (fnmatch): it computes in fp32 from now on.

    Inputs are upcast, autocast is off inside, half parameters (O2, O3) are read through fp32 copies which pass the
    gradient back. The output comes in the dtype that the module would have returned unpinned, so an output above 65504
    is inf in fp16 again; with `keep_output` it stays fp32, for the next operation that takes fp32 (an addition, a norm;
    a matmul lowers it). Only `forward` changes, on the instance: parameters and state_dict keys stay, and DDP, the
    optimizer and compiled code notice by themselves.

    Returns names without DDP's and compile's prefixes. ValueError if a pattern matches nothing. Not reached: code that
    takes `module.weight` without calling the module; pin its owner. At level tf32 the matmuls of an island are TF32.
    """
    named, names = _named(net), {}
    for pattern in patterns:
        hits = {n: m for n, m in named.items() if fnmatchcase(n, pattern) or fnmatchcase(type(m).__name__, pattern)}
        if not hits:
            raise ValueError(f"keep_fp32: no module matches {pattern!r}; there are {', '.join(list(named)[1:6])}, ...")
        names |= hits
    for module in names.values():
        if "forward" in vars(module) and not hasattr(module, "fp32_island"):
            raise ValueError(f"cannot pin a {type(module).__name__} whose forward has already been replaced by others")
        module.forward = types.MethodType(_island_forward, module)  # a bound method, so that copy.deepcopy rebinds it
        module.fp32_island = True  # what others can ask for with hasattr; dynamo (2.9) misreads vars(module)
        module.fp32_by_name, module.fp32_output = True, keep_output
        for buffer in module.buffers():  # for good: statistics updated in a copy would be lost
            if buffer.dtype in HALF:
                buffer.data = buffer.data.float()
    return list(names)


def pinned(net: nn.Module, keep_output: bool = False) -> list[str]:
    """The names pinned by `keep_fp32` so far, or only those that keep their output: for the checkpoint, and for
    `keep_fp32` again on a resume (all names first, then those that keep their output)."""
    return [n for n, m in _named(net).items() if hasattr(m, "fp32_by_name") and (m.fp32_output or not keep_output)]


def _bare(net: nn.Module) -> nn.Module:
    while isinstance(net, nn.parallel.DistributedDataParallel) or "_orig_mod" in net._modules:
        net = next(net.children())
    return net


def _named(net: nn.Module) -> dict[str, nn.Module]:
    return {n.replace("_orig_mod.", ""): m for n, m in _bare(net).named_modules()}


def mapped(f: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """`tree` with f(tensor) for every tensor in nested mappings, lists, tuples and dataclasses."""
    if isinstance(tree, Tensor):
        return f(tree)
    if type(tree) is dict:  # without copy.copy, which torch.compile does not know
        return {key: mapped(f, value) for key, value in tree.items()}
    if isinstance(tree, Mapping):
        out = copy.copy(tree)
        for key in tree:
            out[key] = mapped(f, tree[key])
        return out
    if is_dataclass(tree) and not isinstance(tree, type):
        return replace(tree, **{x.name: mapped(f, getattr(tree, x.name)) for x in fields(tree) if x.init})
    if isinstance(tree, (list, tuple)):  # `list | tuple` is a graph break in torch 2.9
        out = [mapped(f, x) for x in tree]
        return type(tree)(*out) if hasattr(tree, "_fields") else type(tree)(out)
    return tree


def _to_fp32(t: Tensor) -> Tensor:
    return t.float() if t.dtype in HALF else t  # integers, token ids among them, and fp64 as they are


def _island_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    floats = []

    def upcast(t: Tensor) -> Tensor:
        if t.is_floating_point():
            floats.append(t)
        return _to_fp32(t)

    inputs = mapped(upcast, [*args]), mapped(upcast, kwargs)
    device = next((t.device.type for t in (*floats, *self.parameters())), "cpu")
    # the dtype that it would have returned unpinned: autocast's, or that of its first input
    matmul = isinstance(self, (nn.Linear, nn.modules.conv._ConvNd, nn.MultiheadAttention))
    if matmul and torch.is_autocast_enabled(device):
        back = torch.get_autocast_dtype(device)
    else:
        back = floats[0].dtype if floats else F32
    copies = {n: p.float() for n, p in self.named_parameters(remove_duplicate=False) if p.dtype in HALF}
    with torch.autocast(device, enabled=False), _reparametrize_module(self, copies):
        out = type(self).forward(self, *inputs[0], **inputs[1])
    if back not in HALF or self.fp32_output or isinstance(self, nn.modules.loss._Loss):
        return out  # a loss is never lowered, and no scalar is
    return mapped(lambda t: t.to(back) if t.dtype is F32 and t.ndim else t, out)


# --- Evaluation in fp32

@contextlib.contextmanager
def fp32_eval(net: nn.Module, masters: Mapping[nn.Parameter, Tensor] | None = None) -> Iterator[None]:
    """Inside, `net` computes in fp32 and nothing else; on exit, and on an exception, all is as it was.

    Autocast and TF32 are off. Half parameters and buffers are replaced by fp32 copies, parameters by `masters[p]`
    (fp32, same shape) where given; the parameters themselves are never written. Compiled code is bypassed, for it
    remembers its casts. Gradient mode and train/eval mode stay the caller's; a backward fills the copies' gradients.

    RuntimeError where an operation runs under an autocast that was switched on inside, or where an operation of `net`
    returns half precision (its own `.half()`; half inputs). Every call of torch is seen, in modules, between them and
    in checkpointed blocks, at one Python call for each. The inside of TorchScript is not seen.
    """
    net, masters, copies = _bare(net), masters or {}, {}
    for name, t in (*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)):
        if t.dtype in HALF:
            # swapped, not `t.data = ...`: another dtype there renews the gradient accumulator, and DDP's hook is lost
            copies[name] = masters.get(t, t).detach().float().requires_grad_(t.requires_grad)
    with contextlib.ExitStack() as stack:
        for device in filter(torch.amp.is_autocast_available, ("cpu", "cuda", "mps", "xpu")):
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(_tf32_off())
        stack.enter_context(_eager())
        stack.enter_context(_reparametrize_module(net, copies))
        stack.enter_context(_OnlyFp32(net))
        yield


class _OnlyFp32(TorchFunctionMode):
    """Raises where torch is called under autocast, or where a module of `net` makes half precision."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.names = {module: name for name, module in _named(net).items()}
        devices = {t.device.type for t in (*net.parameters(), *net.buffers())} or {"cpu"}
        self.devices = [*filter(torch.amp.is_autocast_available, devices)]

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, tuple) and out else out
        half = isinstance(first, Tensor) and first.dtype in HALF
        autocast = any(map(torch.is_autocast_enabled, self.devices))
        if half or autocast:
            what = "ran under an autocast that was switched on inside" if autocast else f"returned {first.dtype}"
            self.accuse(getattr(func, "__name__", str(func)), what, autocast)
        return out

    def accuse(self, operation: str, what: str, autocast: bool) -> None:
        """Name the innermost module on the stack, and the innermost line that is not torch's."""
        frames = [frame for frame, _ in traceback.walk_stack(None)]
        modules = [f.f_locals.get("self") for f in frames]
        module = next((m for m in modules if isinstance(m, nn.Module) and m in self.names), None)
        if module is None and not autocast:
            return  # the caller's own half precision, outside of the network
        name = "code outside of the network" if module is None else self.names[module] or "the network itself"
        own = (os.path.dirname(torch.__file__), __file__)
        line = next((f"{f.f_code.co_filename}:{f.f_lineno}" for f in frames
                     if not f.f_code.co_filename.startswith(own)), "?")
        raise RuntimeError(f"fp32_eval: {operation} {what} in {name} ({line}): let an inner autocast follow its caller "
                           "with enabled=torch.is_autocast_enabled(device), and take dtypes from the weights")


TF32_SWITCHES = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul,
                 torch.backends.cudnn.conv, torch.backends.cudnn.rnn)


@contextlib.contextmanager
def _tf32_off() -> Iterator[None]:
    """TF32 off inside; outside, every switch as it was, whichever interface had set it."""
    newer = [switch.fp32_precision for switch in TF32_SWITCHES]
    try:
        older = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    except RuntimeError:  # the newer interface was used: the older one cannot be read, and has nothing to restore
        older = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 recommends the newer ones; code inside may read the older ones
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


def _eager() -> contextlib.AbstractContextManager:
    loaded = "torch._dynamo" in sys.modules  # importing it takes seconds; not loaded means nothing compiled
    return torch.compiler.set_stance("force_eager") if loaded else contextlib.nullcontext()


# --- How far the training precision is from fp32

TOLERANCE = 0.05  # as a share of predictions, of the loss (of 1 where that is smaller), of a layer's output in 2-norm


@dataclass(frozen=True)
class Disagreement:
    """One batch in the training precision beside fp32. Shares are of rows (images), losses are means over rows."""

    nonfinite: float  # share of rows whose loss is NaN or inf in the training precision
    nonfinite_fp32: float
    loss: float
    loss_fp32: float
    changed: float  # share of rows whose prediction turned from right to wrong or back
    layer: str = ""  # where they part: the first module, in the order of execution, with more NaN or another output

    @property
    def parted(self) -> bool:
        """More rows are non-finite than in fp32, or, where fp32 is finite, loss or predictions moved."""
        near = abs(self.loss - self.loss_fp32) <= TOLERANCE * max(1.0, abs(self.loss_fp32))  # False for NaN
        moved = not near or self.changed > TOLERANCE
        return self.nonfinite > self.nonfinite_fp32 or (self.nonfinite_fp32 == 0 and moved)

    def __str__(self) -> str:
        text = f"loss {self.loss:.4g} ({self.loss_fp32:.4g} in fp32), {self.nonfinite:.1%} of rows non-finite "
        text += f"({self.nonfinite_fp32:.1%} in fp32), {self.changed:.1%} of predictions changed"
        return text + (f"; they part at {self.layer or 'no single layer'}" if self.parted else "")


@torch.no_grad()
def disagreement(net: nn.Module, inputs: Any, labels: Any, policy: Any,
                 masters: Mapping[nn.Parameter, Tensor] | None = None,
                 loss: Callable[[Tensor, Any], Tensor] | None = None) -> Disagreement:
    """Evaluate one batch in the training precision (`policy.autocast()`, a context) and in fp32: how far apart?

    It calls net(inputs, labels); net(inputs) where `labels` is None or `loss` is given, and net(**inputs) where these
    inputs are a mapping. The net returns one of these: (loss, metrics), where metrics may hold (B,) tensors "loss" and
    "acc1"; an output with .loss, and maybe .logits; logits, for loss(logits, labels). TypeError on anything else.
    Integers stay integers. Both runs are eager, in eval mode, and draw the same random numbers. It syncs: for a few
    batches a validation. Call it outside of `fp32_eval`, inside of which both would be fp32.
    """
    net = _bare(net)
    alone = labels is None or loss is not None
    by_name = alone and isinstance(inputs, Mapping)
    args = () if by_name else (inputs,) if alone else (inputs, labels)

    def run(convert: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        named = mapped(convert, dict(inputs)) if by_name else {}
        return _judged(net(*mapped(convert, args), **named), labels, loss)

    rows, hits, trail = _watched(net, lambda: run(lambda t: t), policy.autocast())
    rows32, hits32, trail32 = _watched(net, lambda: run(_to_fp32), fp32_eval(net, masters))
    bad, bad32 = ((~r.isfinite()).float().mean().item() for r in (rows, rows32))
    changed = (hits != hits32).float().mean().item()
    verdict = Disagreement(bad, bad32, rows.mean().item(), rows32.mean().item(), changed)
    return replace(verdict, layer=_fork(trail, trail32)) if verdict.parted else verdict


def _judged(out: Any, labels: Any, loss: Callable[[Tensor, Any], Tensor] | None) -> tuple[Tensor, Tensor]:
    """Losses, one for each row or one in all, and what tells whether a prediction changed, from a network's output."""
    if loss is not None and isinstance(out, Tensor):
        rows, hits = loss(out, labels), out.argmax(-1)
    elif isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], Mapping):
        rows, hits = out[1].get("loss", out[0]), out[1].get("acc1")
    elif isinstance(getattr(out, "loss", None), Tensor):
        logits = getattr(out, "logits", None)
        rows, hits = out.loss, logits.argmax(-1) if isinstance(logits, Tensor) else None
    else:
        raise TypeError(f"disagreement: the network returned a {type(out).__name__}, which is neither (loss, metrics) "
                        "nor an output with .loss; for logits pass loss=")
    rows = rows.detach().float().reshape(-1)
    return rows, torch.zeros_like(rows) if hits is None else hits


def _fork(trail: list[tuple], trail32: list[tuple]) -> str:
    """The first module whose outputs differ; "" if none do."""
    for (name, holes, half), (_, holes32, full) in zip(trail, trail32, strict=True):
        both = half.isfinite() & full.isfinite()
        error = torch.where(both, half - full, 0).norm() / torch.where(both, full, 0).norm().clamp(min=1e-30)
        if holes > holes32 or error > TOLERANCE:
            return name or "the model's own code after its last layer"
    return ""


def _watched(net: nn.Module, run: Callable[[], tuple[Tensor, Tensor]],
             context: contextlib.AbstractContextManager) -> tuple[Tensor, Tensor, list[tuple]]:
    """What `run` returns; and for each output (module name, count of non-finite, a sample of up to 64k numbers)."""
    trail, modes = [], {module: module.training for module in net.modules()}

    def note(name: str, module: nn.Module, args: tuple, out: Any) -> None:
        def keep(t: Tensor) -> Tensor:
            flat = t.detach().flatten()
            trail.append((name, (~flat.isfinite()).sum(), flat[:: flat.numel() // 65536 + 1].float()))
            return t

        mapped(keep, out)

    hooks = [module.register_forward_hook(functools.partial(note, name)) for name, module in _named(net).items()]
    gpus = {t.device for t in net.parameters() if t.is_cuda}
    try:
        with _eager(), torch.random.fork_rng([*gpus]), context:
            net.eval()
            return *run(), trail
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode


def main() -> None:
    class Squares(nn.Module):
        """Squares near 3e5, and their square roots. The largest fp16 number is 65504."""

        def forward(self, x: Tensor) -> Tensor:
            return (x * 500.0).square().sqrt() / 500.0

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), Squares(), nn.Linear(32, 4))
    x, y = torch.randn(64, 8), torch.randint(4, (64,))
    half = types.SimpleNamespace(autocast=lambda: torch.autocast("cpu", dtype=F16))  # what stands for a policy
    with torch.no_grad(), half.autocast():
        print(f"largest logit in fp16: {net(x).max():.4f}")
        with fp32_eval(net):
            print(f"largest logit in fp32: {net(x).max():.4f}")
    verdict = disagreement(net, x, y, half, loss=functools.partial(F.cross_entropy, reduction="none"))
    print(verdict)
    print(f"kept in fp32: {keep_fp32(net, [verdict.layer])}")
    print(disagreement(net, x, y, half, loss=functools.partial(F.cross_entropy, reduction="none")))


if __name__ == "__main__":
    main()
