"""
Optim: clipped AdamW in one pass over memory, safe in every dtype.

AdamW is where half precision dies without a message. Give torch.optim.AdamW float16 parameters, and two numbers vanish.
eps = 1e-8 lies below fp16's smallest subnormal (5.96e-8), so eps becomes exactly 0. (1 - beta2) * g * g becomes 0 for
every |g| below 5.4e-3. What is left is m / (0 + 0): NaN where the gradient is 0, inf elsewhere, after one step, although
every gradient was finite. eps = 1e-4 hides the NaN and makes steps 10 to 50 times too large. amsgrad changes nothing.
bfloat16 keeps 8 bits, so v * 0.999 rounds back to v, and v never decays. The cure is old: fp32 *masters* of the half
parameters, fp32 moments, and the half parameters written once a step.

The second lesson is the order of a step, and its price. unscale_, clip_grad_norm_ and AdamW read the gradients four
times and write them twice. Clipping before the verdict turns one NaN into a model of NaNs. `if finite:` stalls the
device. Here a step is two passes over memory, and no line waits for the device:

    1. norm       One read of the gradients, accumulated in fp32 whatever their dtype, divided by the loss scale.
    2. verdict    The step is rejected when a skip flag is up or the norm is above LIMIT: its square is inf in fp32, and
                  an infinite second moment freezes the weight.
    3. update     The fused kernel gets grad_scale = loss scale / clip coefficient and found_inf = verdict. When the step
                  is rejected the kernel writes nothing: weights, moments and step count stay, bit for bit. Multiplying
                  by 0 is no skip: 0 * NaN = NaN, and lerp with weight 0 is the same multiplication.

Bytes a parameter in fp32: 4 (norm) + 16 read + 12 written = 32. With a loss scale or a clip limit the kernel also stores
the gradient it divided, +4: after an accepted step .grad holds the clipped, unscaled gradient; after a rejected step
.grad is unchanged. Half parameters with masters: 6 (gradient to fp32) + 36 + 6 (half copy) = 48; .grad is unchanged.

ClippedAdamW is a torch.optim.Optimizer: schedulers, GradScaler, closures, hooks and torch's checkpoints work. It refuses
in one sentence: half parameters without masters, an eps that is 0, a beta2 that never decays, unknown group keys,
schedule= together with a scheduler, sparse gradients, sharded or complex parameters, parameters on several devices, a
step without any gradient. Copy this file alone: it needs torch.

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
KEYS = ("params", "param_names", "name", "lr", "lr_multiplier", "lr_scale", "initial_lr", "betas", "eps", "weight_decay",
        "amsgrad", "muon")  # of a group


class StepResult(NamedTuple):
    """What a step did: 0-dim fp32 device tensors, new at each step, so the host may read them a step late."""

    grad_norm: Tensor  # global 2-norm, loss scale removed, before clipping; NaN and inf are shown as they are
    found_inf: Tensor  # 1. = rejected, nothing was written; 0. = accepted
    lr: Tensor  # with schedule=: before a group's lr_multiplier; without: the first group's
    clip_coef: Tensor  # the gradients' factor, <= 1; 0. when rejected


# --- groups, learning rate, schedule

def param_groups(net: nn.Module, weight_decay: float = 0.01, no_decay: Sequence[str] = (),
                 lr_scale: dict[str, float] | None = None, muon: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Trainable parameters of net, grouped by weight decay, learning-rate multiplier and optimizer.

    No weight decay for: tensors of fewer than two dimensions (biases, norm scales, scan parameters), everything directly
    in an embedding or in a module with "Norm" in its class name, names that match a no_decay pattern (fnmatch), and what
    the model lists: any submodule may have a method no_weight_decay() that returns names relative to the submodule.

    Args:
        lr_scale: {pattern: multiplier}; the first pattern that matches a name wins.
        muon: patterns of matrices (decayed, two or more dimensions, not all zero) that go to Muon instead of AdamW. Muon
            keeps the norm of a matrix, so these do not decay.
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
            groups[kind, scale] = dict(name=label, params=[], lr_multiplier=scale, muon=matrix,
                                       weight_decay=weight_decay if kind == "decay" else 0.0)
        groups[kind, scale]["params"].append(p)
    return list(groups.values())


def scaled_lr(lr: float, batch_size: int, base_batch: int) -> tuple[float, str]:
    """The learning rate for another batch size, and the sentence to print. The square root is the rule for Adam: its
    step has unit size, only the noise shrinks (arXiv 2205.10287)."""
    new = lr * (batch_size / base_batch) ** 0.5
    return new, f"lr {new:.3g} = {lr:g} * ({batch_size} / {base_batch}) ** 0.5 (sqrt rule)"


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
    # v = 1 + unit is the hardest to move: v * (1 - beta2) must reach unit / 2, where the tie goes to the even number 1.
    if 1 - beta2 < (least := unit / (2 + 2 * unit)):
        lost.append(f"a {dtype} second moment never decays with beta2={beta2:g} (beta2 <= {1 - least:.4f} does)")
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


class ClippedAdamW(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101) that clips the global gradient norm to 1.0 by itself, and rejects non-finite gradients.

    Args:
        params: parameters, (name, parameter) pairs or groups. Keys that count in a group: lr, betas, eps, weight_decay,
            amsgrad, name (for statistics), muon, lr_multiplier (lr is multiplied by it once, here). lr_scale, a key of
            timm and MAE, is left to whoever sets g["lr"].
        lr: peak learning rate. A step uses g["lr"], a number or a tensor, times self.lr_factor, in fp32.
        schedule: multipliers (N,) by accepted updates, looked up on the device; the last one goes on. A rejected step
            does not move it. Then g["lr"] is written at each step, and nobody else may set it. None: g["lr"] is yours.
        clip: largest global gradient norm. None or 0: no limit.
        zclip: z-score (the paper's: 2.5) above which a norm is a spike in its own history, see _limit. None: off.
        masters: True: fp32 masters of half parameters. None: refuse half parameters. False: half state, an experiment.
            Masters are copied at construction and written to the parameters at each step: load the weights before.
        fused: None: where it works; else foreach, which reads the verdict on the host, one sync a step.
        matrix_step: what steps the groups with muon=True: muon.turn. muon_options: its keyword arguments.
    Raises:
        ValueError: what is refused, in one sentence.
    """

    _step_supports_amp_scaling = True  # GradScaler.step() then sets grad_scale and found_inf and calls step()

    def __init__(self, params: Iterable[Any], lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, weight_decay: float = 0.01, *, schedule: Tensor | None = None,
                 clip: float | None = 1.0, zclip: float | None = None, amsgrad: bool = False,
                 masters: bool | None = None, fused: bool | None = None,
                 matrix_step: Callable[..., None] | None = None, muon_options: dict[str, Any] | None = None):
        self.clip, self.zclip = clip, zclip
        self.lr_factor = torch.ones(())  # a cure lowers it: optimizer.lr_factor.mul_(0.5)
        self.updates = torch.zeros((), dtype=torch.int64)  # accepted steps
        self.history = torch.zeros(3)  # zclip: number, mean, variance of the norms so far
        self._schedule, self._given, self._wants_masters, self._wants_fused = schedule, [], masters, fused
        self._masters: dict[Tensor, Tensor] = {}  # half parameter -> fp32 master
        self._matrix_step = matrix_step and functools.partial(matrix_step, **muon_options or {})
        self._placed = None
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, muon=False))
        if not self.model_params:
            raise ValueError("the optimizer got no parameters")
        self._place()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """torch's add_param_group. Keys that do not count here are refused by name."""
        group = {"name": f"group {len(self.param_groups)}" if self.param_groups else "all"} | param_group
        if unknown := sorted(set(group) - set(KEYS)):
            raise ValueError(f"unknown group key {', '.join(map(repr, unknown))}: ClippedAdamW knows {', '.join(KEYS)}")
        if not isinstance(group["params"], Tensor | set):  # a generator can be read once
            group["params"] = list(group["params"])
        lr, multiplier = group.get("lr", self.defaults["lr"]), group.pop("lr_multiplier", 1.0)
        group["lr"] = lr if multiplier == 1 else lr * multiplier
        super().add_param_group(group)
        try:
            self._check(group)
        except ValueError:
            self.param_groups.pop()
            raise
        if self._wants_masters:
            self._masters |= {p: p.detach().float().clone() for p in group["params"] if p.dtype in HALF}
        self._given.append(group["lr"])

    def _check(self, g: dict[str, Any]) -> None:
        """Refuse a group that would train wrongly, in one sentence. Frozen half parameters are refused once they step."""
        if len(set(g["params"])) < len(g["params"]):
            raise ValueError(f"a parameter stands twice in group {g['name']!r}, so it would be stepped twice")
        if not (g["lr"] >= 0 and g["eps"] >= 0 and g["weight_decay"] >= 0 and all(0 <= b < 1 for b in g["betas"])):
            raise ValueError(f"group {g['name']!r}: lr, eps and weight_decay must be >= 0 and betas in [0, 1), not "
                             + ", ".join(f"{k}={g[k]}" for k in ("lr", "eps", "weight_decay", "betas")))
        for p in g["params"]:
            if hasattr(p, "device_mesh") or hasattr(p, "_fsdp_flattened"):
                raise ValueError("sharded parameters (DTensor, FSDP) are not supported, because the norm must be of all "
                                 "shards: use DDP, or torch.optim.AdamW")
            if p.is_complex():
                raise ValueError("complex parameters are not supported: keep them as real ones, see torch.view_as_real")
            if g["muon"] and (self._matrix_step is None or p.ndim < 2 or not p.any()):
                raise ValueError("a group has muon=True: pass matrix_step=muon.turn" if self._matrix_step is None else
                                 f"Muon turns matrices and keeps their norm, and one of these {tuple(p.shape)} "
                                 "is all zero or no matrix: leave it to AdamW")
            if not p.is_floating_point() or not (p.requires_grad or p.grad is not None):
                continue
            half = p.dtype in HALF
            why = refusal(torch.float32 if self._wants_masters and half else p.dtype, g["eps"], float(g["betas"][1]))
            if why and not (half and self._wants_masters is False):
                raise ValueError(why + ("; masters=True keeps fp32 master weights" if half else ""))

    def _place(self) -> None:
        """Put what a step needs beside the parameters: at first, after add_param_group() and after net.to(device)."""
        devices = {p.device for p in self.model_params}
        if len(devices) > 1:
            raise ValueError(f"parameters on several devices ({', '.join(sorted(map(str, devices)))}) are not supported, "
                             "because one norm is taken of all: put them on one")
        device = devices.pop()
        for name in ("updates", "lr_factor", "history"):
            setattr(self, name, getattr(self, name).to(device))
        self._masters = {p: t.to(device) for p, t in self._masters.items()}
        kinds = {t.dtype: t for t in self.params if t.is_floating_point()}
        self.fused = all(map(fused_works, kinds.values())) if self._wants_fused is None else self._wants_fused
        for state in self.state.values():
            state.update({k: t.to(device if self.fused or k != "step" else "cpu") for k, t in state.items()})
        self._zero, self._one = torch.zeros((), device=device), torch.ones((), device=device)
        self._rejected = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0], device=device)  # step()'s row, see there
        self._sums = torch.zeros(len(self.param_groups) + 1, 5, device=device)  # of such rows, then of each group's
        peaks = [self.defaults["lr"]] + [float(lr) for lr in self._given]
        if self._schedule is not None:  # a row for each number of updates; a column for lr itself and for each group
            self._lrs = self._schedule.to(device, torch.float32)[:, None] * torch.tensor(peaks, device=device)
        else:
            self._lrs, self._seen = torch.zeros(len(self._given), device=device), [None] * len(self._given)
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
        half = any(t.dtype in HALF for t in self.params)
        masters = f"yes, {len(self._masters)} tensors" if self._masters else "NO, half state" if half else "no"
        clip = f"clip {self.clip or 'off'}" + (f", zclip {self.zclip}" if self.zclip else "")
        return f"{kind} AdamW, {len(self.params) - matrices} tensors{muon}, master weights: {masters}, {clip}"

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, grad_scale: Tensor | None = None,
             skip: Tensor | None = None, measure: bool = False) -> StepResult | Any:
        """Remove the loss scale, clip and update, or reject; decided on the device, without a host sync when fused.

        Args:
            closure: computes the loss and the gradients first; then its loss is returned, as torch does.
            grad_scale: what the loss was multiplied by, 0-dim fp32 on the device. None: self.grad_scale if GradScaler
                has set it, else 1.
            skip: 0-dim on the device; anything but 0 (NaN too) rejects the step, whatever the gradients are. So does
                self.found_inf, which GradScaler or a guard may set.
            measure: record per-group norms for statistics(), at the price of a copy of the weights and four reads.
        Raises:
            ValueError: no parameter has a gradient, or a gradient is sparse, or the lr has two owners.
        """
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._placed != (self.model_params[0].device, len(self.param_groups)):
            self._place()
        work = self._work()
        lrs = self._rates()
        grad_scale = getattr(self, "grad_scale", None) if grad_scale is None else grad_scale
        scaled_norm = total_norm(self._gradients(work))
        norm = scaled_norm if grad_scale is None else scaled_norm / grad_scale
        good = norm <= LIMIT  # False for NaN
        for flag in (skip, getattr(self, "found_inf", None)):
            if flag is not None:
                good &= flag == 0

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

        before = self._measure(work, grad_scale) if measure else []
        self._update(work, lrs[1:], good, found_inf, divisor)
        half = [(p, t) for pairs in work for p, t in pairs if p is not t]
        if half:  # half parameters from their masters; after a rejected step the same bits again
            torch._foreach_copy_([p for p, _ in half], [t for _, t in half])
        for _, t in half:  # CUDA's allocator keeps the buffer for the next step; the CPU would fault its pages anew
            t.grad = t.grad if t.is_cpu else None
        self.updates += good
        if measure:
            self._record(work, before, good)
        return StepResult(norm, found_inf, lrs[0], coef) if closure is None else loss

    def _work(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Of each group, the parameters that have a gradient: (parameter, itself or its master). Makes their state."""
        work = [[(p, self._masters.get(p, p)) for p in g["params"] if p.grad is not None] for g in self.param_groups]
        if not any(work):
            raise ValueError("no parameter has a gradient: call backward() before step()")
        for g, pairs in zip(self.param_groups, work, strict=True):
            for p, t in pairs:
                if p.grad.layout is not torch.strided:
                    raise ValueError(f"the gradient of a {tuple(p.shape)} parameter is sparse: use sparse=False")
                if p not in self.state:
                    self._check(g | {"params": [p]})
                    self.state[p] = self._blank(g, t)
        return work

    def _blank(self, g: dict[str, Any], t: Tensor) -> dict[str, Tensor]:
        """State before the first step, under torch's names."""
        if g["muon"]:
            return {"momentum_buffer": torch.zeros_like(t.flatten(1), dtype=torch.float32)}  # (rows, columns)
        step = torch.zeros((), device=t.device if self.fused else "cpu")
        names = ("exp_avg", "exp_avg_sq") + ("max_exp_avg_sq",) * g["amsgrad"]
        return {"step": step} | {name: torch.zeros_like(t) for name in names}

    def _rates(self) -> list[Tensor]:
        """The step's learning rate, then each group's, on the device."""
        groups = self.param_groups
        if self._schedule is not None:
            if any("initial_lr" in g or g["lr"] is not lr for g, lr in zip(groups, self._given, strict=True)):
                raise ValueError("the learning rate has two owners, schedule= and a scheduler or a hand-set g['lr']: "
                                 "leave one of them out")
            # index_select, because _lrs[updates] would read the index on the host; beyond the end the last row goes on
            index = self.updates.clamp(max=len(self._lrs) - 1)
            rates = [*(self._lrs.index_select(0, index)[0] * self.lr_factor).unbind()]
            for i, g in enumerate(groups):
                g["lr"] = self._given[i] = rates[i + 1]
            return rates
        for i, g in enumerate(groups):
            if g.get("lr_scale", 1) != 1 and g["lr"] is self._given[i]:
                raise ValueError(f"nobody applied the lr_scale of group {g['name']!r}: use a scheduler that reads "
                                 "lr_scale, set g['lr'], or call the key lr_multiplier")
            if isinstance(g["lr"], Tensor):
                self._lrs[i].fill_(g["lr"].reshape(()))
            elif g["lr"] != self._seen[i]:  # one small kernel for a number that is new
                self._lrs[i].fill_(g["lr"])
            self._seen[i] = None if isinstance(g["lr"], Tensor) else g["lr"]
        rates = [*(self._lrs * self.lr_factor).unbind()]
        return [rates[0], *rates]

    def _gradients(self, work: list[list[tuple[Tensor, Tensor]]]) -> list[Tensor]:
        """What the update reads. Half gradients are read once, into their masters' .grad; all that follows is fp32."""
        plain, half, wide = [], [], []
        for p, t in (pair for pairs in work for pair in pairs):
            if p is not t:
                t.grad = torch.empty_like(t) if t.grad is None else t.grad
                half.append(p.grad)
                wide.append(t.grad)
                continue
            if p.grad.stride() != p.stride():  # the kernel pairs elements by their place in memory
                p.grad = torch.empty_like(p).copy_(p.grad)
            plain.append(p.grad)
        if half:
            torch._foreach_copy_(wide, half)
        return plain + wide

    def _update(self, work: list[list[tuple[Tensor, Tensor]]], lrs: list[Tensor], good: Tensor, found_inf: Tensor,
                divisor: Tensor | None) -> None:
        """AdamW for its groups, matrix_step for the others."""
        groups = [(g, pairs, lr) for g, pairs, lr in zip(self.param_groups, work, lrs, strict=True) if pairs]
        flags = dict(grad_scale=divisor, found_inf=found_inf) if self.fused else {}
        stays = not self.fused and bool(found_inf.item())  # the host sync that the fused kernel spares
        for g, pairs, lr in groups:
            if g["muon"] or stays:
                continue
            state, grads = [self.state[p] for p, _ in pairs], [t.grad for _, t in pairs]
            if divisor is not None and not self.fused:
                torch._foreach_div_(grads, divisor)
            columns = [[s[k] for s in state if k in s] for k in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")]
            beta1, beta2 = g["betas"]
            adamw([t for _, t in pairs], grads, *columns, foreach=not self.fused, fused=self.fused, **flags,
                  amsgrad=g["amsgrad"], beta1=beta1, beta2=beta2, lr=lr if self.fused else lr.item(),
                  weight_decay=g["weight_decay"], eps=g["eps"], maximize=False)
        turned = [(p, t, lr) for g, pairs, lr in groups if g["muon"] for p, t in pairs]
        if turned:
            grads = [t.grad for _, t, _ in turned]
            grads = grads if divisor is None else torch._foreach_div(grads, divisor)
            self._matrix_step([t for _, t, _ in turned], grads, [self.state[p]["momentum_buffer"] for p, _, _ in turned],
                              [lr for _, _, lr in turned], good)

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

    def _targets(self, g: dict[str, Any]) -> list[Tensor]:
        return [self._masters.get(p, p) for p in g["params"]]

    def _measure(self, work, grad_scale: Tensor | None) -> list[tuple[Tensor, list[Tensor]]]:
        """Of each group, before an update: the gradient's norm, and a copy of the weights."""
        before = []
        for g, pairs in zip(self.param_groups, work, strict=True):
            norm = total_norm([t.grad for _, t in pairs]) if pairs else self._zero
            before.append((norm if grad_scale is None else norm / grad_scale, [t.clone() for t in self._targets(g)]))
        return before

    def _record(self, work, before: list[tuple[Tensor, list[Tensor]]], good: Tensor) -> None:
        for sums, g, (norm, old) in zip(self._sums[1:], self.param_groups, before, strict=True):
            if not old:
                continue
            size, update = total_norm(old), total_norm(torch._foreach_sub(self._targets(g), old))
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

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """torch's, and masters, updates, lr_factor, history. The large tensors are live, not copies."""
        out = super().state_dict()
        out["state"] = {i: {k: t.float() if t.dtype in HALF else t for k, t in s.items()}  # exact: torch casts them back
                        for i, s in out["state"].items()}
        small = {name: getattr(self, name).clone() for name in ("updates", "lr_factor", "history")}
        return out | small | {"masters": [*self._masters.values()]}

    def torch_state_dict(self) -> dict[str, Any]:
        """A state_dict that torch.optim.AdamW loads; the masters are not in it. Reads the learning rates on the host."""
        if any(g["muon"] for g in self.param_groups):
            raise ValueError("torch.optim.AdamW has no Muon: a state with muon=True cannot be written for it")
        own = self.state_dict()
        more = dict(foreach=not self.fused, maximize=False, capturable=False, differentiable=False, fused=self.fused,
                    decoupled_weight_decay=True)
        factor = 1.0 if self._schedule is not None else float(self.lr_factor)  # a schedule's g["lr"] contains it
        groups = [{k: v for k, v in g.items() if k not in ("name", "muon")} | more | {"lr": float(g["lr"]) * factor}
                  for g in own["param_groups"]]
        return {"state": own["state"], "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over (copies of) a state_dict(), or one of torch.optim.AdamW, where masters start from the parameters:
        load the weights first. Without schedule= the checkpoint's lr, betas, eps and weight_decay count, as in torch;
        with schedule= the constructor's, so that a resumed run may change them.

        Raises:
            ValueError: it belongs to other parameters or another optimizer, or its masters are half.
        """
        saved = state_dict.get("param_groups")
        old = [dict(g) for g in self.param_groups]
        if saved is None or [len(g["params"]) for g in saved] != [len(g["params"]) for g in old]:
            raise ValueError("the checkpoint's parameter groups do not fit this optimizer's")
        masters = state_dict.get("masters", [p.float() for p in self._masters])
        if [m.shape for m in masters] != [t.shape for t in self._masters.values()]:
            raise ValueError(f"{len(masters)} master weights in the checkpoint do not fit these {len(self._masters)}")
        if any(m.dtype in HALF for m in masters):
            raise ValueError("the checkpoint's master weights are half precision: their small updates are lost")
        fresh: dict[Tensor, dict[str, Tensor]] = {}
        for g, s in zip(old, saved, strict=True):
            if s.get("maximize") or (s["weight_decay"] and not s.get("decoupled_weight_decay", True)):
                raise ValueError("the checkpoint is of an optimizer that maximizes or adds weight decay to the gradient")
            g = g if self._schedule is not None else g | {"amsgrad": s.get("amsgrad", False)}
            for i, p in zip(s["params"], g["params"], strict=True):
                if i not in state_dict["state"]:
                    continue
                blank, values = self._blank(g, self._masters.get(p, p)), state_dict["state"][i]
                if {k: v.shape for k, v in blank.items()} != {k: torch.as_tensor(v).shape for k, v in values.items()}:
                    raise ValueError(f"the checkpoint's state of parameter {i} ({', '.join(values)}) is not of AdamW with "
                                     f"these options and shapes ({', '.join(blank)}, {tuple(p.shape)})")
                fresh[p] = {k: v.copy_(torch.as_tensor(values[k])) for k, v in blank.items()}
        groups = self.param_groups
        super().load_state_dict({**state_dict, "state": {}})  # the groups
        self.state.update(fresh)
        if self._schedule is not None:
            self.param_groups = groups
        for new, g in zip(self.param_groups, old, strict=True):  # without what only torch's AdamW keeps there
            for key in ("foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay"):
                new.pop(key, None)
            new |= {k: v for k, v in g.items() if k not in new}
        steps = [s["step"] for s in fresh.values() if "step" in s]
        self.updates.copy_(state_dict.get("updates", max(steps, default=self._zero)))
        self.lr_factor.copy_(state_dict.get("lr_factor", self._one))
        self.history.copy_(state_dict.get("history", torch.zeros(3)))
        for (p, t), m in zip(self._masters.items(), masters, strict=True):
            p.copy_(t.copy_(m))

    def __getstate__(self) -> dict[str, Any]:  # deepcopy and pickle: all but hooks and a scheduler's wrapper of step
        return {k: v for k, v in self.__dict__.items() if k not in ("step", "_opt_called") and "_hooks" not in k}


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
    optimizer = ClippedAdamW(net.parameters(), masters=True)
    print(optimizer.description)
    for poison in (1.0, math.inf, math.nan, 1.0):
        for p in net.parameters():
            p.grad = torch.randn_like(p) * poison
        old = net.weight.clone()
        r = optimizer.step(grad_scale=torch.tensor(2.0**10))
        weights = "bit-identical" if torch.equal(old, net.weight) else "moved"
        print(f"  norm {r.grad_norm:.3g}  rejected {r.found_inf:.0f}  weights {weights}")


if __name__ == "__main__":
    main()
