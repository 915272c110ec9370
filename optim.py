# SPDX-License-Identifier: MIT (finite 2.2.0, 2026-11-22)
"""
Optim: clipped AdamW in one pass over memory, safe in every dtype.

AdamW is where half precision dies without a message. Give torch.optim.AdamW float16 parameters, and two numbers vanish.
eps = 1e-8 lies below fp16's smallest subnormal (5.96e-8), so eps becomes exactly 0. (1 - beta2) * g * g becomes 0 for
every |g| below 5.4e-3. What is left is m / (0 + 0): NaN where the gradient is 0, inf elsewhere, after one step. eps =
1e-4 hides the NaN and makes steps 10 to 50 times too large; amsgrad changes nothing. bfloat16 keeps 8 bits: v * 0.999
rounds back to v, and v never decays. The cure is old: fp32 *masters* of the half parameters, and fp32 moments.

The second lesson is the order of a step, and its price. unscale_, clip_grad_norm_ and AdamW read the gradients four
times and write them twice. Clipping before the verdict turns one NaN into a model of NaNs. `if finite:` stalls the
device. Here a step is two passes over memory, and no line waits for the device:

    1. norm       One read of the gradients, accumulated in fp32 whatever their dtype, divided by the loss scale.
    2. verdict    The step is rejected when a skip flag is up or the norm is above LIMIT: an infinite second moment
                  freezes the weight.
    3. update     The fused kernel gets grad_scale = loss scale / clip coefficient and found_inf = verdict. When the
                  step is rejected, the kernel writes nothing: weights, moments and step count stay, bit for bit.
                  Multiplying by 0 is no skip: 0 * NaN = NaN.

Bytes a parameter in fp32: 4 (norm) + 16 read + 12 written = 32. With a loss scale or a clip limit the kernel also
stores the gradient it divided, +4: .grad is then clipped and unscaled, unless the step was rejected. Half parameters
with masters: 6 (gradient to fp32) + 36 + 6 (half copy) = 48, and .grad is unchanged.

ClippedAdamW is a torch.optim.Optimizer: schedulers, GradScaler, closures, hooks and torch's checkpoints work. What it
cannot do it refuses in one sentence. Copy this file alone: it needs torch.

    optimizer = ClippedAdamW(param_groups(net), lr=1e-3, schedule=warmup_cosine(10_000, 500), clip=1.0)
    result = optimizer.step(grad_scale=scale, skip=flag)  # 0-dim device tensors, or None
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatch
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

HALF = (torch.float16, torch.bfloat16)
LIMIT = 1.8e19  # just under sqrt(3.4e38): the square of anything above is inf in fp32, so it is as good as infinite
KEYS = ("params", "param_names", "name", "lr", "lr_multiplier", "lr_scale", "initial_lr", "betas", "eps",
        "weight_decay", "amsgrad", "muon")  # a group's
TORCHS = ("foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay")  # AdamW's keys too
Pairs = list[tuple[Tensor, Tensor]]  # (parameter, itself or its master)


class StepResult(NamedTuple):
    """What a step did: 0-dim fp32 device tensors, new at each step, so the host may read them a step late."""

    grad_norm: Tensor  # global 2-norm, loss scale removed, before clipping; NaN and inf are shown as they are
    found_inf: Tensor  # 1. = rejected, nothing was written; 0. = accepted
    lr: Tensor  # with schedule=: before a group's lr_multiplier; without: the first group's
    clip_coef: Tensor  # the gradients' factor, <= 1; 0. when rejected


def param_groups(net: nn.Module, weight_decay: float = 0.01, no_decay: Sequence[str] = (),
                 lr_scale: dict[str, float] | None = None, muon: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Trainable parameters of net, grouped by weight decay, learning-rate multiplier and optimizer.

    No weight decay for: tensors of fewer than two dimensions (biases, norm scales), everything directly in an embedding
    or in a module with "Norm" in its class name, names that match a no_decay pattern (fnmatch), and what a submodule's
    no_weight_decay() returns, names relative to it. lr_scale: {pattern: multiplier}; the first that matches wins.
    muon: patterns of matrices (decayed, not all zero) for Muon. Muon keeps a matrix's norm, so these do not decay.
    """
    listed: set[str] = set()  # names without decay
    for prefix, module in net.named_modules():
        names = list(module.no_weight_decay()) if hasattr(module, "no_weight_decay") else []
        if isinstance(module, nn.Embedding) or "Norm" in type(module).__name__:
            names += [name for name, _ in module.named_parameters(recurse=False)]
        listed |= {f"{prefix}.{name}" if prefix else name for name in names}
    groups: dict[tuple[str, float], dict[str, Any]] = {}
    for name, p in net.named_parameters():
        if not p.requires_grad:
            continue
        decays = p.ndim > 1 and name not in listed and not any(fnmatch(name, pattern) for pattern in no_decay)
        matrix = decays and any(fnmatch(name, pattern) for pattern in muon) and bool(p.any())
        scale = next((s for pattern, s in (lr_scale or {}).items() if fnmatch(name, pattern)), 1.0)
        kind = "muon" if matrix else "decay" if decays else "no_decay"
        group = dict(name=kind + (f" lr*{scale:g}" if scale != 1 else ""), params=[], lr_multiplier=scale, muon=matrix,
                     weight_decay=weight_decay if kind == "decay" else 0.0)
        groups.setdefault((kind, scale), group)["params"].append(p)
    return list(groups.values())


def scaled_lr(lr: float, batch_size: int, base_batch: int, rule: str = "sqrt") -> tuple[float, str]:
    """The learning rate for another batch size, and the sentence to print. rule: "linear" (SGD, arXiv 1706.02677),
    "sqrt" (Adam: its step has unit size, only the noise shrinks; arXiv 2205.10287) or "none"."""
    power = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}[rule]
    new = lr * (batch_size / base_batch) ** power
    return new, f"lr {new:.3g} = {lr:g} * ({batch_size} / {base_batch}) ** {power:g} ({rule} rule)"


def warmup_cosine(total_updates: int, warmup_updates: int = 0, final: float = 0.0, kind: str = "cosine") -> Tensor:
    """Learning-rate multipliers, fp32 (total_updates + 1,), index = updates done. The warm-up is linear and never 0;
    entry [warmup_updates] is 1; the last one (`final`; "constant": 1) serves every later update too."""
    u = torch.arange(total_updates + 1, dtype=torch.float64)
    t = ((u - warmup_updates) / max(1, total_updates - warmup_updates)).clamp(0, 1)
    falls = {"cosine": (1 - torch.cos(math.pi * t)) / 2, "linear": t, "constant": torch.zeros_like(t)}
    if kind not in falls:
        raise ValueError(f"unknown schedule {kind!r}: choose from {', '.join(falls)}")
    return torch.where(u < warmup_updates, (u + 1) / max(1, warmup_updates), 1 - (1 - final) * falls[kind]).float()


def refusal(dtype: torch.dtype, eps: float, beta2: float) -> str:
    """Why AdamW must not keep its state in dtype with this eps and beta2, in one sentence; "": it may."""
    unit = torch.finfo(dtype).eps  # distance from 1 to the next number; rounding moves by half of it at most
    if torch.tensor(eps).to(dtype) == 0:
        return f"eps={eps:g} is exactly 0 in {dtype}, so AdamW divides 0 by 0 wherever a gradient is 0"
    # v = 1 + unit is the hardest to move: v * (1 - beta2) must reach unit / 2, where the tie goes to the even number 1.
    if 1 - beta2 < (least := unit / (2 + 2 * unit)):
        return f"a {dtype} second moment never decays with beta2={beta2:g} (beta2 <= {1 - least:.4f} does)"
    return ""


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """2-norm of each tensor (one device): (N,), one read, fp32 accumulators, nothing written, no sync."""
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.promote_types(tensors[0].dtype, torch.float32)))


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """2-norm over all tensors together, 0-dim fp32."""
    parts = []
    if tensors[0].is_cpu:
        # Over 1e8 elements at once a CPU's norm is 1.1 % too small (CUDA sums in chunks); row by row it is exact.
        large = [t for t in tensors if t.numel() > 2**16 and t.ndim > 1]
        dtype = torch.promote_types(tensors[0].dtype, torch.float32)
        parts = [torch.linalg.vector_norm(t, dim=tuple(range(1, t.ndim)), dtype=dtype) for t in large]
        tensors = [t for t in tensors if t.numel() <= 2**16 or t.ndim < 2]
    if tensors:
        parts.append(norms(tensors))
    return torch.linalg.vector_norm(torch.cat(parts) if len(parts) > 1 else parts[0]).float()


def fused_works(p: Tensor) -> bool:
    """Whether fused AdamW exists for p's device and dtype and obeys found_inf: tried, not looked up."""
    q = torch.ones(2, device=p.device, dtype=p.dtype)
    q.grad = torch.full_like(q, math.nan)
    try:
        trial = torch.optim.AdamW([q], lr=1.0, fused=True)
        trial.grad_scale = trial.found_inf = torch.ones((), device=p.device)
        trial.step()
    except RuntimeError:
        return False
    return bool((q == 1).all())


class ClippedAdamW(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101) that clips the global gradient norm to 1.0 by itself, and rejects non-finite gradients.

    Args:
        params: parameters, (name, parameter) pairs or groups with the KEYS above. lr_multiplier multiplies a group's lr
            once, here; lr_scale, a key of timm and MAE, is left to whoever sets g["lr"].
        lr: the peak. A step uses g["lr"], a number or a tensor, times self.lr_factor, in fp32.
        schedule: multipliers (N,) by accepted updates, looked up on the device; the last one goes on. Each step writes
            g["lr"], and nobody else may. None: g["lr"] is yours or a scheduler's.
        clip: largest global gradient norm. zclip: z-score (the paper's: 2.5) of a spike, see _limit. None: no limit.
        masters: True: fp32 masters of half parameters, copied here: load weights before. None: refuse half parameters.
            False: half state, an experiment.
        fused: None: where it works; else foreach, which reads the verdict on the host, one sync a step.
        matrix_step: what steps the groups with muon=True, say muon.turn; muon_options: its keyword arguments.
    """

    _step_supports_amp_scaling = True  # GradScaler.step() then sets grad_scale and found_inf, and calls step()

    def __init__(self, params: Iterable[Any], lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, weight_decay: float = 0.01, *, schedule: Tensor | None = None,
                 clip: float | None = 1.0, zclip: float | None = None, amsgrad: bool = False,
                 masters: bool | None = None, fused: bool | None = None,
                 matrix_step: Callable[..., None] | None = None, muon_options: dict[str, Any] | None = None):
        self.clip, self.zclip = clip, zclip
        self.lr_factor = torch.ones(())  # a cure lowers it: optimizer.lr_factor.mul_(0.5)
        self.updates = torch.zeros((), dtype=torch.int64)  # accepted steps
        self.history = torch.zeros(3)  # zclip: number, mean, variance of the norms so far
        self._schedule, self._wants_masters, self._wants_fused = schedule, masters, fused
        self._matrix_step = matrix_step and functools.partial(matrix_step, **muon_options or {})
        self._masters: dict[Tensor, Tensor] = {}  # half parameter -> fp32 master
        self._peaks, self._placed = [], None  # each group's lr at the start; what _place() has seen
        self._measured: tuple[list[Tensor], Tensor] = ([], torch.zeros(0, 3))  # parameters, and a row for each
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, muon=False)
        super().__init__(params, defaults)
        if not self.model_params:
            raise ValueError("the optimizer got no parameters")
        self._place()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """torch's, and a refusal of what would train wrongly."""
        g = self.defaults | {"name": f"group {len(self.param_groups)}" if self.param_groups else "all"} | param_group
        if unknown := sorted(set(param_group) - set(KEYS)):
            raise ValueError(f"unknown group key {', '.join(map(repr, unknown))}: ClippedAdamW knows {', '.join(KEYS)}")
        if (multiplier := g.pop("lr_multiplier", 1.0)) != 1:
            g["lr"] = g["lr"] * multiplier
        if not (min(g["lr"], g["eps"], g["weight_decay"]) >= 0 and all(0 <= b < 1 for b in g["betas"])):
            values = ", ".join(f"{key}={g[key]}" for key in ("lr", "eps", "weight_decay", "betas"))
            raise ValueError(f"lr, eps and weight_decay must be >= 0 and betas in [0, 1), not {values}")
        super().add_param_group(g)
        try:
            if len(set(g["params"])) < len(g["params"]):
                raise ValueError(f"a parameter stands twice in group {g['name']!r}, so it would be stepped twice")
            for p in g["params"]:
                self._check(g, p)
        except ValueError:
            self.param_groups.pop()
            raise
        if self._wants_masters:
            self._masters |= {p: p.detach().float().clone() for p in g["params"] if p.dtype in HALF}
        self._peaks.append(g["lr"])
        self._mark()

    def _check(self, g: dict[str, Any], p: Tensor) -> None:
        """Refuse a parameter that would train wrongly. A frozen half parameter is refused when it gets a gradient."""
        half, why = p.dtype in HALF, ""
        if hasattr(p, "device_mesh") or hasattr(p, "_fsdp_flattened"):
            why = "sharded parameters (DTensor, FSDP) are not supported, because the norm is of one shard: use DDP"
        elif p.is_complex():
            why = "complex parameters are not supported: keep them as real ones, see torch.view_as_real"
        elif g["muon"] and self._matrix_step is None:
            why = "a group has muon=True: pass matrix_step=muon.turn"
        elif g["muon"] and (p.ndim < 2 or not p.any()):
            why = f"Muon keeps a matrix's norm, and this {tuple(p.shape)} is all zero or no matrix: leave it to AdamW"
        elif (p.is_floating_point() and (p.requires_grad or p.grad is not None)
              and not (half and self._wants_masters is False)):
            why = refusal(torch.float32 if half and self._wants_masters else p.dtype, g["eps"], float(g["betas"][1]))
            if half and not self._wants_masters:
                lost = torch.finfo(p.dtype).eps / 4  # of a weight just below a power of two
                lost = f"{p.dtype} weights lose every update smaller than {lost:.1e} of the weight"
                why = why if why.startswith("eps") else "; ".join(filter(None, (lost, why)))  # NaN comes first
                why += "; masters=True keeps fp32 master weights"
        if why:
            raise ValueError(why)

    def _place(self) -> None:
        """Put what a step needs beside the parameters: at first, after add_param_group() and after net.to(device)."""
        devices = {p.device for p in self.model_params}
        if len(devices) > 1:
            raise ValueError(f"parameters on several devices, {sorted(map(str, devices))}: put all of them on one")
        device = devices.pop()
        for name in ("updates", "lr_factor", "history"):
            setattr(self, name, getattr(self, name).to(device))
        self._masters = {p: t.to(device) for p, t in self._masters.items()}
        kinds = {t.dtype: t for t in self.params if t.is_floating_point()}
        self.fused = all(map(fused_works, kinds.values())) if self._wants_fused is None else self._wants_fused
        for state in self.state.values():
            state.update({k: t.to("cpu" if k == "step" and not self.fused else device) for k, t in state.items()})
        self._zero, self._one = torch.zeros((), device=device), torch.ones((), device=device)
        # Peak learning rates: of the step, then of each group. With a schedule a row for each number of updates.
        self._lrs = torch.tensor([float(lr) for lr in (self.defaults["lr"], *self._peaks)], device=device)
        if self._schedule is not None:
            self._lrs = self._schedule.to(device, torch.float32)[:, None] * self._lrs
        self._seen = [*self._peaks]  # what _lrs holds of each group
        self._placed = (device, len(self.param_groups))

    @property
    def model_params(self) -> list[Tensor]:
        """The parameters of all groups."""
        return [p for g in self.param_groups for p in g["params"]]

    @property
    def params(self) -> list[Tensor]:
        """What the update is computed on, in model_params' order: the parameter itself or its fp32 master."""
        return [self._masters.get(p, p) for p in self.model_params]

    @property
    def description(self) -> str:
        """One line for the log."""
        kind = "fused" if self.fused else "foreach (no fused kernel: one host sync a step)"
        matrices = sum(len(g["params"]) for g in self.param_groups if g["muon"])
        muon = f" + Muon, {matrices} matrices" if matrices else ""
        half_state = any(t.dtype in HALF for t in self.params)
        masters = f"yes, {len(self._masters)} tensors" if self._masters else "NO, half state" if half_state else "no"
        return (f"{kind} AdamW, {len(self.params) - matrices} tensors{muon}, master weights: {masters}, "
                f"clip {self.clip or 'off'}" + (f", zclip {self.zclip}" if self.zclip else ""))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, grad_scale: Tensor | None = None,
             skip: Tensor | None = None, measure: bool = False) -> StepResult | Any:
        """Remove the loss scale, clip and update, or reject; decided on the device, without a host sync when fused.

        grad_scale: what the loss was multiplied by, 0-dim fp32 on the device. None: what GradScaler says, or 1.
        skip: 0-dim; anything but 0 (NaN too) rejects the step. So does self.found_inf; GradScaler or a guard sets it.
        measure: take the figures of statistics(), at the price of a copy of the weights and four reads.
        With a closure, which computes loss and gradients, step() returns the loss, as torch's optimizers do.
        """
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._placed != (self.model_params[0].device, len(self.param_groups)):
            self._place()
        work, half, grads = self._gather()
        step_lr, *lrs = self._rates()
        grad_scale = getattr(self, "grad_scale", None) if grad_scale is None else grad_scale
        scaled_norm = total_norm(grads)
        norm = scaled_norm if grad_scale is None else scaled_norm / grad_scale
        good = norm <= LIMIT  # False for NaN
        for flag in (skip, getattr(self, "found_inf", None)):
            if flag is not None:
                good &= flag == 0
        divisor, coef, limit = grad_scale, self._one, self._limit(norm, good)
        if limit is not None:
            scale = self._one if grad_scale is None else grad_scale
            divisor = torch.maximum(scaled_norm / limit, scale)
            coef = scale / divisor
        coef = torch.where(good, coef, self._zero)  # where(), because 0 * NaN is NaN
        found_inf = torch.where(good, self._zero, self._one)
        if measure:
            tensors = [t for pairs in work for _, t in pairs]
            old, sizes = [t.clone() for t in tensors], norms([t.grad for t in tensors])
        self._update(work, lrs, good, found_inf, divisor)
        if measure:
            update, weight = norms(torch._foreach_sub(tensors, old)), norms(old)
            rows = [sizes if grad_scale is None else sizes / grad_scale, weight, update / weight]
            self._measured = [p for pairs in work for p, _ in pairs], torch.stack(rows, dim=1)
        if half:  # half parameters from their masters; after a rejected step the same bits again
            torch._foreach_copy_([p for p, _ in half], [t for _, t in half])
        for _, t in half:  # CUDA's allocator keeps the buffer for the next step; the CPU would fault its pages anew
            t.grad = t.grad if t.is_cpu else None
        self.updates += good
        return StepResult(norm, found_inf, step_lr, coef) if closure is None else loss

    def _gather(self) -> tuple[list[Pairs], Pairs, list[Tensor]]:
        """Of each group the parameters with a gradient, as (parameter, itself or its master); those with a master; all
        gradients. Half gradients are read once, into their masters' .grad: what follows is fp32."""
        work: list[Pairs] = []
        half, plain = [], []
        for g in self.param_groups:
            work.append([(p, self._masters.get(p, p)) for p in g["params"] if p.grad is not None])
            for p, t in work[-1]:
                if p.grad.layout is not torch.strided:
                    raise ValueError(f"the gradient of a {tuple(p.shape)} parameter is sparse: use sparse=False")
                if p not in self.state:
                    self._check(g, p)
                    self.state[p] = self._blank(g, t)
                if p is not t:
                    t.grad = torch.empty_like(t) if t.grad is None else t.grad
                elif p.grad.stride() != p.stride():  # the kernel pairs elements by their place in memory
                    p.grad = torch.empty_like(p).copy_(p.grad)
                (plain if p is t else half).append((p, t))
        if not plain and not half:
            raise ValueError("no parameter has a gradient: call backward() before step()")
        if half:
            torch._foreach_copy_([t.grad for _, t in half], [p.grad for p, _ in half])
        return work, half, [t.grad for _, t in plain + half]

    def _blank(self, g: dict[str, Any], t: Tensor) -> dict[str, Tensor]:
        """State before the first step, under torch's names; t: the parameter or its master."""
        if g["muon"]:
            return {"momentum_buffer": torch.zeros_like(t.flatten(1), dtype=torch.float32)}  # (rows, columns)
        names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 3 if g["amsgrad"] else 2]
        step = torch.zeros((), device=t.device if self.fused else "cpu")
        return {"step": step, **{name: torch.zeros_like(t) for name in names}}

    def _mark(self) -> None:
        """Remember each learning rate: a scheduler replaces a number, and writes into a tensor."""
        self._marks = [(g["lr"], getattr(g["lr"], "_version", 0)) for g in self.param_groups]

    def _rates(self) -> list[Tensor]:
        """Learning rates on the device: the step's, then each group's."""
        groups = self.param_groups
        if self._schedule is not None:
            if any("initial_lr" in g or g["lr"] is not lr or getattr(lr, "_version", 0) != version
                   for g, (lr, version) in zip(groups, self._marks, strict=True)):
                raise ValueError("the learning rate has two owners, schedule= and a hand-set g['lr']: leave one out")
            # index_select, because _lrs[updates] would read the index on the host; beyond the end the last row goes on
            index = self.updates.clamp(max=len(self._lrs) - 1)
            rates = (self._lrs.index_select(0, index)[0] * self.lr_factor).unbind()
            for g, rate in zip(groups, rates[1:], strict=True):
                g["lr"] = rate
            self._mark()
            return list(rates)
        for i, g in enumerate(groups):
            lr = g["lr"]
            if lr is self._peaks[i] and g.get("lr_scale", 1) != 1:
                raise ValueError(f"nobody applied the lr_scale of group {g['name']!r}: set its lr or use lr_multiplier")
            if isinstance(lr, Tensor) or lr is not self._seen[i]:  # a new number costs one small kernel and no sync
                self._lrs[i + 1].fill_(lr.reshape(()) if isinstance(lr, Tensor) else lr)
            self._seen[i] = lr
        rates = (self._lrs * self.lr_factor).unbind()
        return [rates[1], *rates[1:]]

    def _update(self, work: list[Pairs], lrs: list[Tensor], good: Tensor, found_inf: Tensor,
                divisor: Tensor | None) -> None:
        """torch's AdamW kernels for most groups, one call of matrix_step for all matrices with muon=True."""
        kind = dict(fused=True, grad_scale=divisor, found_inf=found_inf) if self.fused else dict(foreach=True)
        stays = not self.fused and found_inf.item()  # the host sync that the fused kernel spares
        turned: list[tuple[Tensor, ...]] = []  # matrix, gradient, momentum, learning rate
        for g, pairs, lr in zip(self.param_groups, work, lrs, strict=True):
            if not pairs:
                continue
            weights, grads, state = [t for _, t in pairs], [t.grad for _, t in pairs], [self.state[p] for p, _ in pairs]
            if g["muon"]:
                grads = grads if divisor is None else torch._foreach_div(grads, divisor)
                turned += [(w, d, s["momentum_buffer"], lr) for w, d, s in zip(weights, grads, state, strict=True)]
            elif not stays:
                if divisor is not None and not self.fused:
                    torch._foreach_div_(grads, divisor)
                columns = [[s[k] for s in state if k in s] for k in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")]
                beta1, beta2 = g["betas"]
                adamw(weights, grads, *columns, **kind, lr=lr if self.fused else lr.item(), beta1=beta1, beta2=beta2,
                      eps=g["eps"], weight_decay=g["weight_decay"], amsgrad=g["amsgrad"], maximize=False)
        if turned:
            self._matrix_step(*zip(*turned, strict=True), good)

    def _limit(self, norm: Tensor, good: Tensor) -> Tensor | float | None:
        """The norm to clip to: `clip`, or ZClip's (arXiv 2504.02507), or the smaller of the two. None: no limit.

        ZClip: z = (norm - mean) / std over the accepted norms. A spike, z > zclip, is cut to mean + std * zclip**2 / z.
        The first 25 norms count equally, later ones 3 % each, clipped; where() drops rejected ones (0 * NaN is NaN).
        """
        if not self.zclip:
            return self.clip or None
        limit = torch.full_like(norm, self.clip or math.inf)
        count, mean, var = self.history.unbind()
        std = var.sqrt().clamp(min=1e-12)
        z = (norm - mean) / std
        spike = (count >= 25) & (z > self.zclip)
        limit = torch.where(spike, torch.minimum(limit, mean + std * self.zclip**2 / z), limit)
        weight = (1 / (count + 1)).clamp(min=0.03)
        delta = torch.minimum(norm, limit) - mean
        new = torch.stack([count + 1, mean + weight * delta, (1 - weight) * (var + weight * delta * delta)])
        self.history.copy_(torch.where(good, new, self.history))
        return limit

    def statistics(self, named: Iterable[tuple[str, Tensor]] = ()) -> dict[str, dict[str, float]]:
        """Of each tensor with a gradient at the last step(measure=True), by its name in `named`; one host read.

        grad_norm (before clipping), weight_norm (before the update), update_ratio: |update| / |weights|.
        """
        names = {p: name for name, p in named}
        params, rows = self._measured
        return {names.get(p, f"parameter {i}"): {"grad_norm": grad, "weight_norm": size, "update_ratio": ratio}
                for i, (p, (grad, size, ratio)) in enumerate(zip(params, rows.tolist(), strict=True))}

    def state_dict(self) -> dict[str, Any]:
        """torch's, with masters, updates, lr_factor and history beside it. The large tensors are live, not copies."""
        out = super().state_dict()
        out["state"] = {i: {k: t.float() if t.dtype in HALF else t for k, t in s.items()}  # load_state_dict casts back
                        for i, s in out["state"].items()}
        small = {name: getattr(self, name).clone() for name in ("updates", "lr_factor", "history")}
        return out | small | {"masters": [*self._masters.values()]}

    def torch_state_dict(self) -> dict[str, Any]:
        """A state_dict for torch.optim.AdamW, without masters. Reads the learning rates on the host."""
        if any(g["muon"] for g in self.param_groups):
            raise ValueError("torch.optim.AdamW has no Muon: a state with muon=True cannot be written for it")
        own, factor = self.state_dict(), float(self.lr_factor) if self._schedule is None else 1.0  # g["lr"] contains it
        more = dict.fromkeys(TORCHS, False) | dict(fused=self.fused or None, foreach=not self.fused or None,
                                                   decoupled_weight_decay=True)
        groups = [{k: v for k, v in g.items() if k not in ("name", "muon")} | more | {"lr": float(g["lr"]) * factor}
                  for g in own["param_groups"]]
        return {"state": own["state"], "param_groups": groups}

    @torch.no_grad()
    def widen(self) -> None:
        """Half parameters become fp32 in place, with what their masters hold."""
        for p in self.model_params:
            if p.dtype in HALF:
                p.grad = None  # of the old dtype
                p.data = self._masters.get(p, p).detach().float()
                self.state[p] = {k: t.float() if t.dtype in HALF else t for k, t in self.state.get(p, {}).items()}
        self._masters.clear()
        self._place()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over copies of a state_dict(), or of torch.optim.AdamW's; then masters start from the parameters.

        Load the weights first. Without schedule= the checkpoint's lr, betas, eps and weight_decay count, as in torch;
        with it the constructor's. ValueError, and nothing changed: other parameters, another optimizer, half masters.
        """
        groups, saved = self.param_groups, state_dict.get("param_groups", [])
        if [len(g["params"]) for g in saved] != [len(g["params"]) for g in groups]:
            raise ValueError("the checkpoint's parameter groups do not fit this optimizer's")
        masters = state_dict.get("masters", [p.detach().float() for p in self._masters])
        if [m.shape for m in masters] != [t.shape for t in self._masters.values()]:
            raise ValueError(f"{len(masters)} master weights in the checkpoint do not fit these {len(self._masters)}")
        if any(m.dtype in HALF for m in masters):
            raise ValueError("the checkpoint's master weights are half precision: their small updates are lost")
        fresh: dict[Tensor, dict[str, Tensor]] = {}
        for g, s in zip(groups, saved, strict=True):
            if s.get("maximize") or (s["weight_decay"] and not s.get("decoupled_weight_decay", True)):
                raise ValueError("the checkpoint is of an optimizer that maximizes, or decays through the gradient")
            amsgrad = g["amsgrad"] if self._schedule is not None else s.get("amsgrad", False)
            for i, p in zip(s["params"], g["params"], strict=True):
                values = {k: torch.as_tensor(v) for k, v in state_dict["state"].get(i, {}).items()}
                if not values:
                    continue
                blank = self._blank(g | {"amsgrad": amsgrad}, self._masters.get(p, p))
                if {k: v.shape for k, v in values.items()} != {k: v.shape for k, v in blank.items()}:
                    raise ValueError(f"the checkpoint's state of parameter {i} ({', '.join(values)}) does not fit "
                                     f"{tuple(p.shape)} and {', '.join(blank)}")
                fresh[p] = {k: t.copy_(values[k]) for k, t in blank.items()}
        if self._schedule is not None:
            saved = [{"params": s["params"]} for s in saved]
        merged = [g | {k: v for k, v in s.items() if k not in TORCHS} for g, s in zip(groups, saved, strict=True)]
        super().load_state_dict({**state_dict, "state": {}, "param_groups": merged})  # torch's share: groups and hooks
        self.state.update(fresh)
        steps = [s["step"] for s in fresh.values() if "step" in s]
        for name, value in (("updates", max(steps, default=0)), ("lr_factor", 1), ("history", 0)):
            getattr(self, name).copy_(torch.as_tensor(state_dict.get(name, value)))
        for (p, t), m in zip(self._masters.items(), masters, strict=True):
            p.copy_(t.copy_(m))

    def __getstate__(self) -> dict[str, Any]:  # deepcopy and pickle: no hooks, no scheduler's wrapper of step
        return {k: v for k, v in self.__dict__.items() if k not in ("step", "_opt_called") and "_hooks" not in k}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark()


def main() -> None:
    """The eps trap, the refusal, and a step with masters."""
    p = torch.zeros(3, dtype=torch.float16)
    p.grad = torch.tensor([0.0, 1e-3, 1.0], dtype=p.dtype)
    print("One step of AdamW at lr 1e-3, gradient 0, 1e-3, 1; the right answer is 0, 1e-3, 1e-3")
    for eps in (1e-8, 1e-4):
        torch.optim.AdamW([p.zero_()], lr=1e-3, eps=eps, foreach=False).step()
        print(f"  float16, eps {eps:g}: step {(0 - p).tolist()}")
    print(f"ClippedAdamW refuses it: {refusal(torch.float16, 1e-8, 0.999)}")
    ClippedAdamW([p.zero_()], masters=True).step()
    print(f"  with masters: step {(0 - p).tolist()}")


if __name__ == "__main__":
    main()
