"""
Optim: clipped AdamW in one pass over memory, safe in every dtype.

AdamW is where half precision dies without a sound. Give torch.optim.AdamW float16 parameters and two numbers vanish at
once: eps = 1e-8 lies below fp16's smallest subnormal (5.96e-8) and becomes exactly 0, and (1 - beta2) * g * g becomes 0
for every |g| below 5.4e-3. What is left is m / (0 + 0): NaN where the gradient is 0, infinity elsewhere, after one
step, with every gradient finite. eps = 1e-4 hides the NaN and makes steps 10 to 50 times too large; amsgrad changes
nothing; clipping and a lower learning rate cannot help 0/0. bfloat16 keeps 8 bits, so v * 0.999 rounds back to v and v
never decays. The cure is old: fp32 *masters* of the half parameters, fp32 moments, the half copy written once.

The second lesson is the order of a step, and its price. unscale_, clip_grad_norm_ and AdamW read the gradients four
times and write them twice; clipping before the verdict turns one NaN into a model of NaNs; `if finite:` stalls the
device. Here a step is two passes over memory, and nothing asks the device a question:

    1. norm       one read of the gradients, accumulated in fp32 whatever their dtype, divided by the loss scale
    2. verdict    rejected = skip flag, or norm >= 2**64: its square is inf, which would make v infinite and freeze w
    3. update     the fused kernel with grad_scale = loss scale / clip coefficient and found_inf = verdict. Rejected, it
                  writes nothing: weights, moments and step count stay, bit for bit. Multiplying by 0 is no skip:
                  0 * NaN = NaN, and lerp with weight 0 is the same multiplication.

Bytes a parameter in fp32: 4 (norm) + 16 read + 12 written = 32. Given a divisor the kernel also stores the gradient
it divided, +4: an accepted .grad then holds the clipped, unscaled gradient, a rejected one is untouched. Half weights
with masters: 6 (upcast; the kernel wants one dtype) + 36 + 6 (half copy) = 48, and no .grad is changed.

The learning rate is a device tensor looked up by `updates`, the device's count of *accepted* steps: a rejected step
cannot move the schedule. Refused at construction: half parameters without masters, an eps that is 0 or a beta2 that
never decays in the state's dtype; masters=False says "I want to see it happen". Copy this file alone: it needs torch.

    optimizer = ClippedAdamW(param_groups(net), lr=1e-3, schedule=warmup_cosine(10_000, 500), clip=1.0)
    result = optimizer.step(grad_scale=scale, skip=flag)  # 0-dim device tensors, or None
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

HALF = (torch.float16, torch.bfloat16)
LIMIT = 2.0**64  # 1.84e19: the first number whose square is infinite in fp32
ANGLE = 10.0  # Muon turns a matrix by 10 * lr radians, about what AdamW's update (0.2 * lr) does to weights around 0.02


class StepResult(NamedTuple):
    """What a step did: 0-dim fp32 device tensors, new at each step, so they may be read a step late."""

    grad_norm: Tensor  # global 2-norm, loss scale removed, before clipping; NaN and inf are shown as they are
    found_inf: Tensor  # 1. = rejected, nothing was written; 0. = accepted
    lr: Tensor  # of this step, before a group's own lr_scale
    clip_coef: Tensor  # the gradients' factor, <= 1; 0. when rejected


# --- groups, learning rate, schedule

def param_groups(net: nn.Module, weight_decay: float = 0.05, no_decay: Sequence[str] = (),
                 lr_scale: dict[str, float] | None = None, muon: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Trainable parameters of net, grouped by weight decay, learning-rate multiplier and optimizer.

    No decay for: tensors of fewer than two dimensions (biases, norm scales, scan parameters), everything directly in an
    embedding or in a module with "Norm" in its class name, names that match a no_decay pattern (fnmatch), and what the
    model lists itself: any submodule may have a method no_weight_decay() returning names relative to it.

    Args:
        lr_scale: {pattern: multiplier}; the first pattern that matches a name wins.
        muon: patterns of matrices (decayed, two or more dimensions, not all zero) that go to Muon instead of AdamW; it
            keeps their norm, so they do not decay.
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
        if (kind, scale) not in groups:
            label = kind + (f" lr*{scale:g}" if scale != 1 else "")
            groups[kind, scale] = dict(name=label, params=[], lr_scale=scale, muon=matrix,
                                       weight_decay=weight_decay if kind == "decay" else 0.0)
        groups[kind, scale]["params"].append(p)
    return list(groups.values())


def scaled_lr(lr: float, batch_size: int, base_batch: int, rule: str = "sqrt") -> tuple[float, str]:
    """The learning rate for another batch size, and the sentence to print. rule: "linear" (SGD, arXiv 1706.02677),
    "sqrt" (Adam: its step has unit size, only the noise shrinks; arXiv 2205.10287) or "none"."""
    powers = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}
    if rule not in powers:
        raise ValueError(f"unknown lr scaling rule {rule!r}: choose from {', '.join(powers)}")
    new = lr * (batch_size / base_batch) ** powers[rule]
    return new, f"lr {new:.3g} = {lr:g} * ({batch_size} / {base_batch}) ** {powers[rule]:g} ({rule} rule)"


def warmup_cosine(total_updates: int, warmup_updates: int = 0, final: float = 0.0, kind: str = "cosine") -> Tensor:
    """Learning-rate multipliers, fp32 (total_updates + 1,), index = updates done. The warm-up is linear and never 0;
    entry [warmup_updates] is 1; the last one (`final`; "constant": 1) serves every later update too."""
    u = torch.arange(total_updates + 1, dtype=torch.float64)
    t = ((u - warmup_updates) / max(1, total_updates - warmup_updates)).clamp(0, 1)
    falls = {"cosine": (1 - torch.cos(math.pi * t)) / 2, "linear": t, "constant": torch.zeros_like(t)}
    if kind not in falls:
        raise ValueError(f"unknown schedule {kind!r}: choose from {', '.join(falls)}")
    return torch.where(u < warmup_updates, (u + 1) / max(1, warmup_updates), 1 - (1 - final) * falls[kind]).float()


# --- the optimizer

def refusal(dtype: torch.dtype, eps: float, beta2: float) -> str | None:
    """Why AdamW must not keep weights and moments in dtype with this eps and beta2, in one sentence. None: it may."""
    unit = torch.finfo(dtype).eps  # distance from 1 to the next number; rounding moves by half of it at most
    if torch.tensor(eps).to(dtype) == 0:
        return f"eps={eps:g} is exactly 0 in {dtype}, so AdamW divides 0 by 0 wherever a gradient is 0"
    lost = [f"{dtype} weights lose every update smaller than {unit / 4:.1e} of the weight"] if dtype in HALF else []
    if 1 - beta2 < unit / 2:
        lost.append(f"a {dtype} second moment never decays with beta2={beta2:g} (beta2 <= {1 - unit / 2:.4f} does)")
    return "; ".join(lost) or None


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """2-norm over all tensors (one device), 0-dim fp32: one read, fp32 accumulators, nothing written, no sync."""
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    norms = []
    if tensors[0].is_cpu:
        # Over 1e8 elements at once a CPU's norm is 1.1 % too small (CUDA sums in chunks); row by row it is exact.
        large = [t for t in tensors if t.numel() > 2**16 and t.ndim > 1]
        norms = [torch.linalg.vector_norm(t, dim=tuple(range(1, t.ndim)), dtype=dtype) for t in large]
        tensors = [t for t in tensors if t.numel() <= 2**16 or t.ndim < 2] if large else tensors
    if tensors:
        norms.append(torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype)))
    return torch.linalg.vector_norm(torch.cat(norms) if len(norms) > 1 else norms[0]).float()


def fused_works(p: Tensor) -> bool:
    """Whether fused AdamW exists for p's device and dtype and obeys found_inf: tried, not looked up."""
    try:
        q = torch.ones(2, device=p.device, dtype=p.dtype)
        q.grad = torch.full_like(q, math.nan)
        trial = torch.optim.AdamW([q], lr=1.0, fused=True)
        trial.grad_scale = trial.found_inf = torch.ones((), device=p.device)
        trial.step()
        return bool((q == 1).all())
    except (RuntimeError, NotImplementedError):
        return False


class ClippedAdamW:
    """AdamW (decoupled decay, arXiv 1711.05101); loss-scale removal, clipping and rejection are part of its pass.

    Args:
        params: parameters on one device, or groups as param_groups() makes them.
        lr: peak learning rate; a group's is lr * its lr_scale * schedule[updates] * lr_factor.
        schedule: multipliers (N,) by accepted updates; the last one goes on. None: constant.
        clip: largest global gradient norm. None or 0: no limit.
        zclip: z-score (the paper's: 2.5) above which a norm is a spike in its own history, see _limit. None: off.
        masters: True: fp32 masters of half parameters. None: refuse half parameters. False: half state, an experiment.
        muon_options: arguments of torch.optim.Muon, say dict(momentum=0.6, ns_steps=3).
        fused: None: where it works; else foreach, which reads the verdict on the host, one sync a step.
    Raises:
        ValueError: no parameters, or a refusal.
    """

    def __init__(self, params: Iterable[Tensor] | Iterable[dict[str, Any]], lr: float = 1e-3,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.05, *,
                 schedule: Tensor | None = None, clip: float | None = 1.0, zclip: float | None = None,
                 amsgrad: bool = False, masters: bool | None = None, fused: bool | None = None,
                 muon_options: dict[str, Any] | None = None):
        groups = list(params)
        if groups and isinstance(groups[0], Tensor):
            groups = [{"params": groups}]
        defaults = dict(name="all", weight_decay=weight_decay, lr_scale=1.0, muon=False)
        self.param_groups = [defaults | g for g in groups if g["params"]]
        self.model_params: list[Tensor] = [p for g in self.param_groups for p in g["params"]]
        if not self.model_params:
            raise ValueError("the optimizer got no parameters")
        for dtype in {p.dtype for p in self.model_params}:
            why = refusal(torch.float32 if masters and dtype in HALF else dtype, eps, betas[1])
            if why and not (dtype in HALF and masters is False):
                raise ValueError(why + ("; masters=True keeps fp32 master weights" if dtype in HALF else ""))

        # params: what the update is computed on, in model_params' order: the parameter itself or its fp32 master.
        self.params = [p.detach().float().clone() if masters and p.dtype in HALF else p for p in self.model_params]
        pairs = list(zip(self.model_params, self.params, strict=True))
        self._plain = [p for p, t in pairs if p is t]
        self._half = [(p, t) for p, t in pairs if p is not t]
        target = dict(pairs)
        for g in self.param_groups:
            g["params"] = [target[p] for p in g["params"]]

        device = self.params[0].device
        self.clip, self.zclip = clip, zclip
        self.lr_factor = torch.ones((), device=device)  # a cure lowers it: optimizer.lr_factor.mul_(0.5)
        self.updates = torch.zeros((), dtype=torch.int64, device=device)  # accepted steps
        self.history = torch.zeros(3, device=device)  # zclip: number, mean, variance of the norms so far
        # Learning rates: a row for each number of updates, a column for each group, and one for lr itself
        peaks = torch.tensor([lr * g["lr_scale"] for g in self.param_groups] + [lr], device=device)
        self._lrs = peaks[None] if schedule is None else schedule.to(device, torch.float32)[:, None] * peaks
        self._zero, self._one = torch.zeros((), device=device), torch.ones((), device=device)
        self._rejected = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0], device=device)  # step()'s row, see there
        self._sums = torch.zeros(len(self.param_groups) + 1, 5, device=device)  # of such rows, then of each group's

        kinds = {(p.device, p.dtype): p for p in self.params}
        self.fused = all(map(fused_works, kinds.values())) if fused is None else fused
        graph = self.fused and device.type == "cuda"  # a CUDA graph may hold the step
        inner = [{k: g[k] for k in ("params", "weight_decay")} for g in self.param_groups if not g["muon"]]
        self.adamw = torch.optim.AdamW(inner, lr=lr, betas=betas, eps=eps, amsgrad=amsgrad, fused=self.fused,
                                       foreach=not self.fused, capturable=graph) if inner else None
        if inner and graph:  # not every step is in a graph, and that is no mistake
            self.adamw._warned_capturable_if_run_uncaptured = True
        # Muon steps shadow matrices, with lr 1, which makes them directions; _muon_step applies those on the device.
        matrices = [p for g in self.param_groups if g["muon"] for p in g["params"]]
        if not all(p.any() for p in matrices):
            raise ValueError("Muon keeps a matrix's norm, and one of these is all zero: leave it to AdamW")
        self._shadows = {p: torch.zeros(p.flatten(1).shape, device=device) for p in matrices}
        self.muon = torch.optim.Muon(list(self._shadows.values()), lr=1.0, weight_decay=0.0,
                                     **muon_options or {}) if matrices else None
        for shadow in self._shadows.values():
            self.muon.state[shadow]["momentum_buffer"] = torch.zeros_like(shadow)

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """The inner optimizers' own tensors, as torch keeps them: moments and step counts of every parameter."""
        return {p: s for inner in (self.adamw, self.muon) if inner for p, s in inner.state.items()}

    @property
    def description(self) -> str:
        """One line for the log."""
        kind = "fused" if self.fused else "foreach (no fused kernel: one host sync a step)"
        muon = f" + Muon, {len(self._shadows)} matrices" if self._shadows else ""
        half = any(p.dtype in HALF for p in self._plain)
        masters = f"yes, {len(self._half)} tensors" if self._half else "NO, half state" if half else "no"
        clip = f"clip {self.clip or 'off'}" + (f", zclip {self.zclip}" if self.zclip else "")
        return f"{kind} AdamW, {len(self.params) - len(self._shadows)} tensors{muon}, master weights: {masters}, {clip}"

    def zero_grad(self) -> None:
        """Drop the gradients: cheaper than writing zeros."""
        for p in self.model_params:
            p.grad = None

    @torch.no_grad()
    def step(self, grad_scale: Tensor | None = None, skip: Tensor | None = None, measure: bool = False) -> StepResult:
        """Remove the loss scale, clip and update, or reject; decided on the device, without a host sync when fused.

        Args:
            grad_scale: what the loss was multiplied by, 0-dim fp32 on the device. None: 1.
            skip: 0-dim on the device; anything but 0 (NaN too) rejects the step, whatever the gradients are.
            measure: record per-group norms for statistics(), at the price of a copy of the weights and four reads.
        """
        scaled_norm = total_norm(self._gradients())
        norm = scaled_norm if grad_scale is None else scaled_norm / grad_scale
        good = norm < LIMIT  # False for NaN
        if skip is not None:
            good &= skip == 0

        divisor, coef = grad_scale, self._one
        limit = self._limit(norm, good)
        if limit is not None:
            scale = self._one if grad_scale is None else grad_scale
            divisor = torch.maximum(scaled_norm / limit, scale)
            coef = scale / divisor

        # norm, clipped norm, clip coefficient, accepted, rejected; by where(), because 0 * NaN is NaN
        row = torch.where(good, torch.stack([norm, norm * coef, coef, self._one, self._zero]), self._rejected)
        self._sums[0].add_(row)
        _, _, coef, _, found_inf = row.unbind()

        # index_select, because _lrs[updates] would read the index on the host; beyond the end the last row goes on
        index = self.updates.clamp(max=len(self._lrs) - 1)
        *lrs, lr = (self._lrs.index_select(0, index)[0] * self.lr_factor).unbind()
        for group, group_lr in zip(self.param_groups, lrs, strict=True):
            group["lr"] = group_lr

        before = self._measure(grad_scale) if measure else []
        self._adamw_step(found_inf, divisor)
        self._muon_step(good, divisor)
        self._write_half()
        self.updates += good
        if measure:
            self._record(before, good)
        return StepResult(norm, found_inf, lr, coef)

    def _gradients(self) -> list[Tensor]:
        """What the update reads. Half gradients are read once, into their masters' .grad; all that follows is fp32."""
        grads = []
        for p in self._plain:
            g = p.grad
            if g is not None:
                if g.stride() != p.stride():  # the kernel pairs elements by their place in memory
                    g = p.grad = torch.empty_like(p).copy_(g)
                grads.append(g)
        for p, t in self._half:
            t.grad = None if p.grad is None else torch.empty_like(t) if t.grad is None else t.grad
        half = [p.grad for p, _ in self._half if p.grad is not None]
        wide = [t.grad for _, t in self._half if t.grad is not None]
        if half:
            torch._foreach_copy_(wide, half)
        if not grads + wide:
            raise ValueError("no parameter has a gradient: call backward() before step()")
        return grads + wide

    def _write_half(self) -> None:
        """Half parameters from their masters; after a rejected step the same bits again."""
        half = [(p, t) for p, t in self._half if t.grad is not None]
        if half:
            torch._foreach_copy_([p for p, _ in half], [t for _, t in half])
        for _, t in half:  # CUDA's allocator keeps the buffer for the next step; the CPU would fault its pages anew
            t.grad = t.grad if t.is_cpu else None

    def _adamw_step(self, found_inf: Tensor, divisor: Tensor | None) -> None:
        if self.adamw is None:
            return
        lrs = [g["lr"] for g in self.param_groups if not g["muon"]]
        if self.fused:
            self.adamw.grad_scale, self.adamw.found_inf = divisor, found_inf
        elif found_inf.item():  # the host sync that the fused kernel spares
            return
        else:
            lrs = [lr.item() for lr in lrs]  # foreach takes a tensor only with capturable=True, which the CPU lacks
            grads = [p.grad for g in self.adamw.param_groups for p in g["params"] if p.grad is not None]
            if divisor is not None and grads:
                torch._foreach_div_(grads, divisor)
        for group, lr in zip(self.adamw.param_groups, lrs, strict=True):
            group["lr"] = lr
        self.adamw.step()

    def _muon_step(self, good: Tensor, divisor: Tensor | None) -> None:
        """Turn each matrix, a filter being a row, by an angle of ANGLE * lr towards the direction of torch's Muon.

        Its norm stays: where a normalisation follows, only the direction of a matrix counts, and a norm that grows
        would make each step turn it less. So the schedule alone decides, and every layer learns at the same speed.
        (cifar10-airbench's Muon recipe fixes the norms of its filters likewise.)

        Muon takes no found_inf and no tensor lr: rejected, it is fed its own momentum, which leaves that as it was, and
        its direction is dropped.
        """
        muon = [(g, p) for g in self.param_groups if g["muon"] for p in g["params"] if p.grad is not None]
        if not muon:
            return
        matrices, shadows = [p for _, p in muon], [self._shadows[p] for _, p in muon]
        grads = [p.grad.reshape(shadow.shape) for p, shadow in zip(matrices, shadows, strict=True)]
        if divisor is not None:
            grads = torch._foreach_div(grads, divisor)
        for shadow, grad in zip(shadows, grads, strict=True):
            shadow.grad = torch.where(good, grad, self.muon.state[shadow]["momentum_buffer"])
        torch._foreach_zero_(shadows)
        self.muon.step()
        self.muon.zero_grad()
        norms = torch._foreach_norm(matrices, 2, dtype=torch.float32)
        lengths = torch._foreach_mul(norms, [ANGLE / math.sqrt(len(p)) for p in matrices])  # a direction's: sqrt(rows)
        torch._foreach_mul_(lengths, [g["lr"] for g, _ in muon])
        moved = [torch.addcmul(p, shadow.view(p.shape), length)
                 for p, shadow, length in zip(matrices, shadows, lengths, strict=True)]
        ratios = torch._foreach_div(norms, torch._foreach_norm(moved))
        for p, new, ratio in zip(matrices, moved, ratios, strict=True):
            p.copy_(torch.where(good, new * ratio, p))

    def _limit(self, norm: Tensor, good: Tensor) -> Tensor | float | None:
        """The norm to clip to: `clip`, or ZClip's (arXiv 2504.02507), or the smaller of the two. None: no limit.

        ZClip: z = (norm - mean) / std over the accepted norms. A spike, z > zclip, is cut to mean + std * zclip**2 / z:
        the worse, the closer to the mean. The first 25 norms count equally, later ones 3 % each; only what is finite,
        accepted and already clipped enters, and where() drops the rest (a product with 0 would let a NaN in).
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

    def _measure(self, grad_scale: Tensor | None) -> list[tuple[Tensor, list[Tensor]]]:
        """Of each group, before an update: the gradient's norm, and a copy of the weights."""
        before = []
        for g in self.param_groups:
            grads = [p.grad for p in g["params"] if p.grad is not None]
            norm = total_norm(grads) if grads else self._zero
            before.append((norm if grad_scale is None else norm / grad_scale, [p.clone() for p in g["params"]]))
        return before

    def _record(self, before: list[tuple[Tensor, list[Tensor]]], good: Tensor) -> None:
        for sums, g, (norm, old) in zip(self._sums[1:], self.param_groups, before, strict=True):
            size, update = total_norm(old), total_norm(torch._foreach_sub(g["params"], old))
            row = torch.stack([norm, size, update / size, self._one, self._zero])
            sums += torch.where(good & row.isfinite().all(), row, self._zero)

    def statistics(self) -> dict[str, float]:
        """Means over the accepted steps since the last call, the rejected ones counted beside them. One host read.

        grad_norm (before clipping), grad_norm_clipped, accepted, rejected; and, over the steps with measure=True, each
        group's NAME/grad_norm, NAME/param_norm, NAME/update_ratio (|update| / |weights|). A mean of nothing is NaN.
        """
        (norm, clipped, _, accepted, rejected), *rows = self._sums.tolist()
        self._sums.zero_()
        n = accepted or math.nan
        out = dict(grad_norm=norm / n, grad_norm_clipped=clipped / n, accepted=accepted, rejected=rejected)
        for g, (*sums, n, _) in zip(self.param_groups, rows, strict=True):
            keys = [f"{g['name']}/{key}" for key in ("grad_norm", "param_norm", "update_ratio")]
            out |= {key: s / n for key, s in zip(keys, sums, strict=True) if n}
        return out

    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers; the large ones are live, not copies. Hyper-parameters are the constructor's."""
        small = {name: getattr(self, name).clone() for name in ("updates", "lr_factor", "history")}
        inner = {name: o.state_dict()["state"] if o else {} for name, o in (("adamw", self.adamw), ("muon", self.muon))}
        for name, state in inner.items():  # half moments travel as fp32: exact, and torch casts them back
            inner[name] = {i: {k: v.float() if isinstance(v, Tensor) and v.dtype in HALF else v for k, v in s.items()}
                           for i, s in state.items()}
        return small | inner | {"masters": [t for _, t in self._half]}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over (copies of) a state_dict(), in place, and rewrite the half parameters from the masters.

        Raises:
            ValueError: it belongs to other parameters, or its masters are half.
        """
        masters = state["masters"]
        if [m.shape for m in masters] != [t.shape for _, t in self._half]:
            raise ValueError(f"{len(masters)} master weights in the checkpoint do not fit these {len(self._half)}")
        if any(m.dtype in HALF for m in masters):
            raise ValueError("the checkpoint's master weights are half precision: their small updates are lost")
        for inner, name in ((self.adamw, "adamw"), (self.muon, "muon")):
            if inner is not None:
                inner.load_state_dict(inner.state_dict() | {"state": copy.deepcopy(state[name])})
        for name in ("updates", "lr_factor", "history"):
            getattr(self, name).copy_(state[name])
        for (p, t), saved in zip(self._half, masters, strict=True):
            p.copy_(t.copy_(saved))


# --- averaged weights

class EMA:
    """Exponential moving average of the weights, in fp32, that a rejected step cannot touch.

        ema = EMA(optimizer.params)  # the masters where the parameters are half
        ema.update(optimizer.params, result.found_inf)
        with ema.swap(optimizer.model_params): evaluate(net)  # BatchNorm's running statistics stay the live ones

    decay is reached along (1 + n) / (10 + n), n = accepted updates, so that the first weights do not linger. On a GPU
    the average is one fused SGD step on (average - weight): that kernel, too, writes nothing when found_inf is 1, even
    if the weights are NaN. On the CPU, where a read costs nothing, the verdict is read.
    """

    def __init__(self, params: Sequence[Tensor], decay: float = 0.999):
        self.decay = decay
        self.average = [p.detach().float().clone() for p in params]
        self.updates = torch.zeros((), device=self.average[0].device)
        self.fused = not self.average[0].is_cpu and fused_works(self.average[0])
        self._sgd = torch.optim.SGD(self.average, lr=1.0, fused=True) if self.fused else None

    @torch.no_grad()
    def update(self, params: Sequence[Tensor], found_inf: Tensor) -> None:
        """Move towards params, in the order of construction, unless found_inf (0-dim fp32, 0. or 1.) is 1."""
        weight = (9 / (self.updates + 10)).clamp(min=1 - self.decay)  # 1 - decay
        params = [p.float() for p in params]
        if self.fused:
            for a, difference in zip(self.average, torch._foreach_sub(self.average, params), strict=True):
                a.grad = difference
            self._sgd.found_inf, self._sgd.param_groups[0]["lr"] = found_inf, weight
            self._sgd.step()
            self._sgd.zero_grad()
        elif not found_inf.item():
            torch._foreach_lerp_(self.average, params, weight.item())
        self.updates += 1 - found_inf

    @contextmanager
    def swap(self, params: Sequence[Tensor]) -> Iterator[None]:
        """Inside, params hold the average in their own dtype; afterwards what they held before, bit for bit."""
        backup = [p.detach().clone() for p in params]
        try:
            with torch.no_grad():
                torch._foreach_copy_(list(params), self.average)
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(list(params), backup)

    def state_dict(self) -> dict[str, Any]:
        """The average (live tensors) and its count."""
        return {"average": self.average, "updates": self.updates.clone()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """In place. Raises ValueError if it belongs to other parameters."""
        if [a.shape for a in state["average"]] != [a.shape for a in self.average]:
            raise ValueError("the checkpoint's average belongs to other parameters")
        torch._foreach_copy_([*self.average, self.updates], [*state["average"], state["updates"]])


def main() -> None:
    """The eps trap, the refusal, and four steps of which two are bad."""
    torch.manual_seed(0)
    print("One step of torch.optim.AdamW at lr 1e-3; the right answer is 0, 1e-3, 1e-3")
    for dtype, eps in ((torch.float32, 1e-8), (torch.float16, 1e-8), (torch.float16, 1e-4)):
        p = torch.zeros(3, dtype=dtype)
        p.grad = torch.tensor([0.0, 1e-3, 1.0], dtype=dtype)
        torch.optim.AdamW([p], lr=1e-3, eps=eps, foreach=False).step()
        print(f"  {dtype!s:13}  eps {eps:g}:  gradient 0, 1e-3, 1  ->  step {(0 - p).tolist()}")
    print(f"ClippedAdamW refuses it: {refusal(torch.float16, 1e-8, 0.999)}\n")
    net = nn.Linear(64, 64).half()
    optimizer = ClippedAdamW(param_groups(net), schedule=warmup_cosine(100, 4), masters=True)
    print(optimizer.description)
    for poison in (1.0, math.inf, math.nan, 1.0):
        for p in net.parameters():
            p.grad = torch.randn_like(p) * 0.1
        net.weight.grad[0, 0] *= poison
        old = net.weight.clone()
        r = optimizer.step(grad_scale=torch.tensor(2.0**10))
        weights = "bit-identical" if torch.equal(old, net.weight) else "moved"
        print(f"  norm {r.grad_norm:.3g}  rejected {r.found_inf:.0f}  lr {r.lr:.2e}  weights {weights}")
    print(optimizer.statistics())


if __name__ == "__main__":
    main()
