"""
fp32 on request: keep a module in fp32, evaluate a network in fp32, and see where half precision parts from fp32.

Half precision fails where a number leaves its format. The largest fp16 number is 65504, so a sum of squares over 300
values of 15 is inf. bf16 reaches 3.4e38 and keeps 8 bits, so 257 is stored as 256. Three tools answer this:

    keep_fp32(net, ["attn"])     the modules of that name or type compute in fp32; all others stay as they are
    with fp32_eval(net): ...     the whole network computes in fp32; afterwards it is as it was
    disagreement(net, x, y, policy)    one batch in both precisions: do they agree, and if not, from which layer on?

`autocast(enabled=False)` alone is not fp32. Half inputs stay half, half weights stay half, an inner
`autocast(enabled=True)` wins, and cuDNN uses TF32 (10-bit mantissas) by default. `fp32_eval` closes these doors.

Nothing here changes parameters or state_dict keys. Copy this file alone. It needs torch only.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module  # the context that torch.func.functional_call is made of
from torch.utils._pytree import tree_leaves, tree_map

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
HALF = (F16, BF16)

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


@contextlib.contextmanager
def _tf32_off() -> Iterator[None]:
    """TF32 off inside; outside, every switch as it was, whichever interface had set it."""
    newer = [switch.fp32_precision for switch in TF32_SWITCHES]
    try:
        older = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    except RuntimeError:  # the newer interface was used: the older one cannot be read, and has nothing to restore
        older = None
    set_tf32(False)
    try:
        yield
    finally:
        if older:
            torch.set_float32_matmul_precision(older[0])
            torch.backends.cudnn.allow_tf32 = older[1]
        for switch, value in zip(TF32_SWITCHES, newer, strict=True):
            switch.fp32_precision = value


# --- fp32 islands

def keep_fp32(net: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Pin every module whose name or type name matches a pattern (fnmatch): it computes in fp32 from now on.

    Inputs are upcast, autocast is off inside, half parameters (O2, O3) are read through fp32 copies which pass the
    gradient back. The output comes in the dtype that the module would have returned unpinned. Only `forward` changes,
    on the instance: parameters and state_dict keys stay, and DDP, the optimizer and compiled code notice by themselves.

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
        _pin(module)
        module.fp32_by_name = True  # for pinned(); the norms that O2 pins by itself lack it
    return list(names)


def pinned(net: nn.Module) -> list[str]:
    """The names pinned by `keep_fp32` so far: for the checkpoint, and for `keep_fp32` again on a resume."""
    return [n for n, m in _named(net).items() if hasattr(m, "fp32_by_name")]


def _bare(net: nn.Module) -> nn.Module:
    while isinstance(net, nn.parallel.DistributedDataParallel) or "_orig_mod" in net._modules:
        net = next(net.children())
    return net


def _named(net: nn.Module) -> dict[str, nn.Module]:
    return {n.replace("_orig_mod.", ""): m for n, m in _bare(net).named_modules()}


def _pin(module: nn.Module) -> None:
    if "forward" in vars(module) and not hasattr(module, "fp32_island"):
        raise ValueError(f"cannot pin a {type(module).__name__} whose forward has already been replaced by others")
    module.forward = types.MethodType(_island_forward, module)  # a bound method, so that copy.deepcopy rebinds it
    module.fp32_island = True  # what compiled code can ask for with hasattr; dynamo (2.9) misreads vars(module)
    for buffer in module.buffers():  # for good: statistics updated in a copy would be lost
        if buffer.dtype in HALF:
            buffer.data = buffer.data.float()


def _cast(nest, dtype: torch.dtype):
    """Half and fp32 tensors in a nest of tuples, lists and dicts, to `dtype`; integers and fp64 as they are."""
    return tree_map(lambda t: t.to(dtype) if isinstance(t, Tensor) and t.dtype in (*HALF, F32) else t, nest)


def _island_forward(self: nn.Module, *args, **kwargs):
    floats = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_floating_point()]
    device = next((t.device.type for t in (*floats, *self.parameters())), "cpu")
    # the dtype that it would have returned unpinned: autocast's, or that of its first input
    matmul = isinstance(self, (nn.Linear, nn.modules.conv._ConvNd, nn.MultiheadAttention))
    if matmul and torch.is_autocast_enabled(device):
        back = torch.get_autocast_dtype(device)
    else:
        back = floats[0].dtype if floats else F32
    copies = {n: p.float() for n, p in self.named_parameters(remove_duplicate=False) if p.dtype in HALF}
    with torch.autocast(device, enabled=False), _reparametrize_module(self, copies):
        args, kwargs = _cast((args, kwargs), F32)
        out = type(self).forward(self, *args, **kwargs)
    if back not in HALF or isinstance(self, nn.modules.loss._Loss):
        return out  # a loss is never lowered, and no scalar is
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
    enable = torch.set_autocast_enabled
    with contextlib.ExitStack() as stack:
        for device in filter(torch.amp.is_autocast_available, ("cpu", "cuda", "mps", "xpu")):
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(_tf32_off())
        stack.enter_context(_eager())
        stack.enter_context(_reparametrize_module(net, copies))
        # every way into autocast ends in this call, (device, on) or (on): from here on it switches off
        stack.callback(setattr, torch, "set_autocast_enabled", enable)
        torch.set_autocast_enabled = lambda *args: enable(*args[:-1], False)
        yield


def _eager() -> contextlib.AbstractContextManager:
    loaded = "torch._dynamo" in sys.modules  # importing it takes seconds; not loaded means nothing compiled
    return torch.compiler.set_stance("force_eager") if loaded else contextlib.nullcontext()


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
def disagreement(net: nn.Module, images: Tensor, labels: Tensor, policy: Any,
                 masters: Mapping[nn.Parameter, Tensor] | None = None) -> Disagreement:
    """Evaluate one batch under `policy` and in fp32: how far apart are they, and from which layer on?

    `net(images, labels)` returns `(loss, metrics)`, metrics a dict of (B,) tensors with "loss" and, where there are
    classes, "acc1". Both runs are eager, in eval mode, and draw the same random numbers. It syncs: for a few batches a
    validation. Call it outside of `fp32_eval`, inside of which both would be fp32.
    """
    net = _bare(net)
    rows, hits, trail = _watched(net, images, labels, policy.autocast())
    rows32, hits32, trail32 = _watched(net, images.float(), labels, fp32_eval(net, masters))
    bad, bad32 = ((~r.isfinite()).float().mean().item() for r in (rows, rows32))
    changed = (hits != hits32).float().mean().item()
    verdict = Disagreement(bad, bad32, rows.mean().item(), rows32.mean().item(), changed)
    return replace(verdict, layer=_fork(trail, trail32)) if verdict.parted else verdict


def _fork(trail: list[tuple], trail32: list[tuple]) -> str:
    """The first module whose outputs differ; "" if none do."""
    for (name, holes, half), (_, holes32, full) in zip(trail, trail32, strict=True):
        both = half.isfinite() & full.isfinite()
        error = torch.where(both, half - full, 0).norm() / torch.where(both, full, 0).norm().clamp(min=1e-30)
        if holes > holes32 or error > TOLERANCE:
            return name or "the model's own code after its last layer"
    return ""


def _watched(net: nn.Module, images: Tensor, labels: Tensor, context) -> tuple[Tensor, Tensor, list[tuple]]:
    """Per-row loss and acc1; and for each output (module name, count of non-finite, a sample of up to 64k numbers)."""
    trail, modes = [], {module: module.training for module in net.modules()}

    def note(name: str, module: nn.Module, args: tuple, out) -> None:
        for t in (t.detach().flatten() for t in tree_leaves(out) if isinstance(t, Tensor)):
            trail.append((name, (~t.isfinite()).sum(), t[:: t.numel() // 65536 + 1].float()))

    hooks = [module.register_forward_hook(functools.partial(note, name)) for name, module in _named(net).items()]
    try:
        with _eager(), torch.random.fork_rng([images.device] if images.is_cuda else []), context:
            _, metrics = net.eval()(images, labels)
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode
    rows = metrics["loss"].float()
    return rows, metrics.get("acc1", torch.zeros_like(rows)), trail


# --- python fp32.py

def main() -> None:
    class Squares(nn.Module):
        """Squares near 3e5, and their square roots. The largest fp16 number is 65504."""

        def forward(self, x: Tensor) -> Tensor:
            return (x * 500.0).square().sqrt() / 500.0

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.body, self.head = nn.Linear(8, 32), Squares(), nn.Linear(32, 4)

        def forward(self, x: Tensor, y: Tensor):
            logits = self.head(self.body(self.stem(x)))
            rows = F.cross_entropy(logits.float(), y, reduction="none")
            return rows.mean(), {"loss": rows, "acc1": (logits.argmax(-1) == y).float()}

    class Half:
        """What disagreement() needs of a policy: a context for the training precision."""

        @staticmethod
        def autocast() -> torch.autocast:
            return torch.autocast("cpu", dtype=F16)

    torch.manual_seed(0)
    net, x, y = Net(), torch.randn(64, 8), torch.randint(4, (64,))
    with torch.no_grad(), Half.autocast():
        print(f"loss in fp16: {net(x, y)[0]:.4f}")
        with fp32_eval(net):
            print(f"loss in fp32: {net(x, y)[0]:.4f}")
    verdict = disagreement(net, x, y, Half)
    print(verdict)
    print(f"kept in fp32: {keep_fp32(net, [verdict.layer])}")
    print(disagreement(net, x, y, Half))


if __name__ == "__main__":
    main()
