# SPDX-License-Identifier: MIT (finite 4.0.0, 2026-11-28)
"""
Optim: clipped AdamW in one pass over memory, safe in every dtype.

AdamW is where half precision dies without a message. Give torch.optim.AdamW float16 parameters,
and two numbers vanish. eps = 1e-8 lies below fp16's smallest subnormal (5.96e-8), so eps becomes
exactly 0. (1 - beta2) * g * g becomes 0 for every |g| below 5.4e-3. What is left is m / (0 + 0):
NaN where the gradient is 0, inf elsewhere, after one step. eps = 1e-4 hides the NaN and makes steps
10 to 50 times too large; amsgrad changes nothing. bfloat16 keeps 8 bits: v * 0.999 rounds back to
v, and v never decays. The cure is old: fp32 *masters* of the half parameters, and fp32 moments.

The second lesson is the order of a step, and its price. unscale_, clip_grad_norm_ and AdamW read
the gradients four times and write them twice. Clipping before the verdict turns one NaN into a
model of NaNs. `if finite:` stalls the device. Here a step is two passes over memory, and no line
waits for the device:

    1. norm       One read of the gradients, accumulated in fp32, divided by the loss scale.
    2. verdict    The step is rejected when a flag is up or the norm is above LIMIT: an infinite
                  second moment freezes the weight.
    3. update     The fused kernel gets grad_scale = loss scale / clip coefficient and found_inf =
                  verdict. When the step is rejected, the kernel writes nothing: weights, moments
                  and step count stay, bit for bit. Multiplying by 0 is no skip: 0 * NaN = NaN.

Bytes a parameter in fp32: 4 (norm) + 16 read + 12 written = 32. With a loss scale or a clip limit
the kernel also stores the gradient that it divided, +4: .grad is then clipped and unscaled, unless
the step was rejected. Half parameters with masters: 6 (gradient to fp32) + 36 + 6 (half copy) = 48,
and .grad is unchanged.

Shards (DTensor of fully_shard, FSDP2) are parameters like any other. The norm is of all shards, by
one all-reduce of one number, so all ranks skip together; the kernel gets the local shards. Keep
the parameters in fp32, let MixedPrecisionPolicy cast them, and save with
torch.distributed.checkpoint. (It leaves out masters, which start from the half weights then.)

Any torch optimizer can take its place. The training loop uses four members of an optimizer. The
first three are torch's own, written for GradScaler (_step_supports_amp_scaling):

    step()        updates, or leaves every bit as it was
    found_inf     set before step(): 0-dim fp32 on the device, 1.0 = reject
    grad_scale    set before step(): 0-dim fp32 on the device; the gradients are divided by it
    masters       optional: {half parameter: fp32 master}, empty where the weights are fp32

Schedule sets the learning rate of any of them. Copy this file alone: it needs torch.

Paste::

    import torch
    from optim import ClippedAdamW, Schedule, param_groups, warmup_cosine

    net = torch.nn.Linear(8, 1)
    optimizer = ClippedAdamW(param_groups(net, weight_decay=0.05), lr=1e-2, clip=1.0)
    schedule = Schedule([optimizer], warmup_cosine(total_updates=100, warmup_updates=10))
    for _ in range(100):
        loss = net(torch.randn(32, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        schedule.update(optimizer.step().found_inf)
"""

from __future__ import annotations

import math
import traceback
import warnings
from collections.abc import Iterable
from fnmatch import fnmatch
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.optimizer import _device_dtype_check_for_fused

HALF = (torch.float16, torch.bfloat16)
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
LIMIT = 1.8e19  # just under sqrt(3.4e38): the square of anything above is inf in fp32


class StepResult(NamedTuple):
    """What a step did: 0-dim fp32 device tensors, new at each step."""

    grad_norm: Tensor | None  # 2-norm, loss scale removed, before clipping; None: not measured
    found_inf: Tensor  # 1. = rejected, nothing was written; 0. = accepted


def param_groups(
    net: nn.Module,
    weight_decay: float = 0.01,
    no_decay: Iterable[str] = (),
    lr_scale: dict[str, float] | None = None,
    skip: Iterable[Tensor] = (),
) -> list[dict[str, Any]]:
    """Group the trainable parameters of net by weight decay and learning-rate multiplier.

    No weight decay for: tensors of fewer than two dimensions (biases, norm scales), everything
    directly in an embedding or in a module with "Norm" in its class name, names that match a
    no_decay pattern (fnmatch), and what a submodule's no_weight_decay() returns, names relative to
    it. lr_scale: {pattern: multiplier}; the first that matches wins; Schedule applies it. skip:
    parameters of other optimizers. ValueError for a pattern that matches no name in net.
    """
    patterns = list(no_decay)
    scales = lr_scale or {}
    # Other names of tied parameters, and the buffers of a checkpoint, are no typos.
    every = dict(remove_duplicate=False)
    named = dict((*net.named_parameters(**every), *net.named_buffers(**every)))
    for pattern in (*patterns, *scales):
        if not any(fnmatch(name, pattern) for name in named):
            raise ValueError(
                f"no parameter matches {pattern!r}; there are {', '.join([*named][:5])}, ..."
            )
    for prefix, module in net.named_modules():
        names = set(getattr(module, "no_weight_decay", set)())
        if isinstance(module, nn.Embedding) or "Norm" in type(module).__name__:
            names |= set(module._parameters)
        patterns += [f"{prefix}.{name}".lstrip(".") for name in names]
    groups = {}
    others = set(skip)
    for name, p in net.named_parameters():
        if not p.requires_grad or p in others:
            continue
        decays = p.ndim > 1 and not any(fnmatch(name, pattern) for pattern in patterns)
        scale = next((s for pattern, s in scales.items() if fnmatch(name, pattern)), 1.0)
        decay = weight_decay if decays else 0.0
        group = {"params": [], "weight_decay": decay, "lr_scale": scale}
        groups.setdefault((decay, scale), group)["params"].append(p)
    return list(groups.values())


def warmup_cosine(
    total_updates: int, warmup_updates: int = 0, final: float = 0.0, kind: str = "cosine"
) -> Tensor:
    """Learning-rate multipliers, fp32 (total_updates + 1,), index = updates done.

    The warm-up is linear and never 0; entry [warmup_updates] is 1; the last one (`final`) serves
    every later update too. kind: "cosine", "linear" or "constant", which ends at 1; ValueError for
    any other.
    """
    u = torch.arange(total_updates + 1, dtype=torch.float64, device="cpu")  # MPS has no float64
    t = ((u - warmup_updates) / max(1, total_updates - warmup_updates)).clamp(0, 1)
    falls = {"cosine": (1 - torch.cos(math.pi * t)) / 2, "linear": t, "constant": 0 * t}
    if kind not in falls:
        raise ValueError(f"unknown kind {kind!r}: choose from {', '.join(falls)}")
    rise = (u + 1) / max(1, warmup_updates)
    return torch.where(u < warmup_updates, rise, 1 - (1 - final) * falls[kind]).float()


class Schedule:
    """Learning rates on the device, by accepted updates, for any torch optimizers.

    torch's schedulers count a rejected step as an update, or need the verdict on the host. Here
    each group's "lr" becomes a 0-dim tensor on the device that only this schedule writes:

        lr * lr_scale * multipliers[updates] * factor      the group's lr and lr_scale at the start

    The last multiplier stays. Call update() after each step. Load its checkpoint after those of the
    optimizers. Optimizers that are not fused read the rate from the device at each step; torch's
    Adam and AdamW refuse such a rate with foreach=True. A group that add_param_group() adds later
    is taken over by the next update(), or at once by slow_down(1).
    """

    def __init__(self, optimizers: Iterable[Optimizer], multipliers: Tensor):
        self.optimizers = list(optimizers)
        device = self.optimizers[0].param_groups[0]["params"][0].device
        self._multipliers = multipliers.to(device, torch.float32)  # else whole numbers make 0
        self.factor = self._multipliers.new_ones(())
        self.updates = torch.zeros_like(self.factor, dtype=torch.int64)
        self._rates = ()  # one a group
        self._write()

    def update(self, found_inf: Tensor):
        """Count the step if it was accepted (found_inf, 0-dim, is 0), and set the next rates."""
        self.updates += found_inf == 0
        self._write()

    def slow_down(self, factor):
        """Multiply all rates from now on."""
        self.factor *= factor
        self._write()

    def _write(self):
        groups = [g for optimizer in self.optimizers for g in optimizer.param_groups]
        if len(groups) > len(self._rates):  # the start, or add_param_group()
            # As in torch: the rate that a checkpoint has brought is one of a later step.
            peaks = [g.setdefault("initial_lr", g["lr"]) * g.get("lr_scale", 1.0) for g in groups]
            self._table = self._multipliers[:, None] * self._multipliers.new_tensor(peaks)
            self._rates = self._table[0].clone()
            self.lr = self._rates[0]  # the first group's, 0-dim; the next update() writes into it
        # index_select, because table[updates] would read the index on the host.
        row = self._table.index_select(0, self.updates.clamp(max=len(self._table) - 1))
        torch.mul(row[0], self.factor, out=self._rates)
        for g, rate in zip(groups, self._rates, strict=True):
            g["lr"] = rate  # at each update, because load_state_dict() exchanges it

    def state_dict(self):
        return {"updates": self.updates.clone(), "factor": self.factor.clone()}

    def load_state_dict(self, state):
        self.updates.copy_(state["updates"])
        self.factor.copy_(state["factor"])
        self._write()


def refusal(dtype, eps, beta2):
    """Why AdamW must not keep its state in dtype with this eps and beta2; "" if it may."""
    if torch.tensor(eps).to(dtype) == 0:
        return f"eps={eps:g} is exactly 0 in {dtype}: AdamW divides 0 by 0 where a gradient is 0"
    # Distance from 1 to the next number; rounding moves by half of it at most. v = 1 + unit is the
    # hardest to move: v * (1 - beta2) must reach unit / 2, where the tie goes to the even number 1.
    unit = torch.finfo(dtype).eps
    least = unit / (2 + 2 * unit)
    if 1 - beta2 < least:
        return (
            f"a {dtype} second moment never decays with beta2={beta2:g} "
            f"(beta2 <= {1 - least:.4f} does)"
        )
    return ""


def local(t):
    """This rank's shard of a DTensor; any other tensor itself."""
    return t.to_local() if hasattr(t, "to_local") else t


def layout(t):
    """What two tensors must share to be read side by side, by memory."""
    return t.dtype, t.stride(), getattr(t, "placements", None)


def total_norm(grads):
    """2-norm of all tensors, 0-dim, summed in fp32 or wider; of shards too: the same number on each
    rank."""
    groups = {}
    for grad in grads:
        wide = torch.float64 if grad.dtype is torch.float64 else torch.float32
        kind = wide, getattr(grad, "device_mesh", None), getattr(grad, "placements", ())
        groups.setdefault(kind, []).append(local(grad))
    norms = []
    for (wide, mesh, placements), some in groups.items():
        norm = torch.stack(torch._foreach_norm(some, 2, dtype=wide)).norm().float()
        for i, placement in enumerate(placements):  # none without a mesh
            if not placement.is_replicate():
                square = norm.square()
                dist.all_reduce(square, group=mesh.get_group(i))
                norm = square.sqrt()
        norms.append(norm)
    return torch.stack(norms).norm() if norms[1:] else norm


class ClippedAdamW(AdamW):
    """AdamW (arXiv 1711.05101) that clips the global gradient norm and rejects non-finite steps.

    Args:
        args, kwargs: those of torch.optim.AdamW: params, lr, betas, eps, weight_decay, amsgrad
            (which cures no NaN) and so on. It is fused and can be captured, whatever they say;
            foreach=True raises RuntimeError, as torch's fused AdamW does.
        clip: largest global gradient norm. None: no limit, and where found_inf is set from
            outside, no norm is read.
        masters: True: fp32 masters of half parameters, copied here: load weights before.
            None: refuse half parameters. False: half state, an experiment.

    On a device that is neither CUDA nor a CPU the host reads the verdict, once a step.
    """

    skips_on_device = True

    def __init__(self, *args, clip: float | None = 1.0, masters: bool | None = None, **kwargs):
        makers = (frame.f_locals.get("self") for frame, _ in traceback.walk_stack(None))
        if any(isinstance(o, Optimizer) and getattr(o, "world_size", 1) > 1 for o in makers):
            raise ValueError(
                "in ZeroRedundancyOptimizer norm and verdict would be of one rank's "
                "share: give it torch.optim.AdamW, and call guard.step(it, clip=...)"
            )
        self.clip = clip
        self.makes_masters = masters
        self.masters = {}  # half parameter -> fp32 master
        super().__init__(*args, **{"fused": True} | kwargs)
        *_, p = master_params([self])
        # MPS's kernel ignored found_inf and grad_scale (pytorch #186360); others nobody has tried.
        self.waits = not (p.is_cuda or p.is_cpu)
        # Skipped steps, and those in a row. The copy on the host may be late; nothing waits for it.
        self._skipped = torch.zeros(2, device=p.device)
        self._skipped_on_host = torch.zeros(2, device="cpu", pin_memory=p.is_cuda)
        self._warned = 0  # of: 0.5 no gradient, 1 a skipped step, 2 ten in a row

    def add_param_group(self, param_group):
        """torch's; the constructor, too, adds its groups by this."""
        super().add_param_group(param_group)
        for p in param_group["params"]:
            if self.makes_masters and p.dtype in HALF:
                self.masters[p] = p.detach().float().clone()
            if p.requires_grad:
                self._check(p)

    def _check(self, p):
        """Refuse a parameter that would train wrongly."""
        _device_dtype_check_for_fused(p)  # RuntimeError: complex, meta
        if hasattr(p, "_fsdp_flattened"):
            raise ValueError("parameters of FSDP (version 1) are not supported: use fully_shard")
        if p in self.masters and local(p) is not p:
            raise ValueError(
                "no masters of sharded parameters (DTensor): keep the parameters in "
                "fp32, and let MixedPrecisionPolicy of fully_shard cast them"
            )
        if not torch.ops.aten.is_non_overlapping_and_dense(local(p)):  # it would write beside it
            raise ValueError("a parameter with gaps in memory (a slice of a tensor): clone() it")
        dtype = self.masters.get(p, p).dtype
        if dtype in HALF and self.makes_masters is False:
            return
        why = refusal(dtype, self.defaults["eps"], self.defaults["betas"][1])
        if dtype in HALF:
            why = f"{why or f'{dtype} weights lose small updates'}; masters=True keeps fp32 masters"
        if why:
            raise ValueError(why)

    @torch.no_grad()
    def step(self, closure=None, *, grad_scale: Tensor | None = None):
        """Remove the loss scale, clip and update, or reject. The device decides, without a sync.

        grad_scale: what the loss was multiplied by, 0-dim fp32 on the device. None: the attribute
        grad_scale, if GradScaler or a guard has set it. The attribute found_inf = 1 rejects the
        step. With a closure, which computes loss and gradients, step() returns the loss, as torch's
        optimizers do.
        """
        with torch.enable_grad():
            loss = closure and closure()
        if grad_scale is None:
            grad_scale = getattr(self, "grad_scale", None)
        found_inf = getattr(self, "found_inf", None)
        alone = found_inf is None
        work = [row for row in map(self._work, self.param_groups) if row[1]]
        if not work:  # torch's optimizers pass, too
            result = self._nothing(found_inf)
            return result if closure is None else loss
        grads = [grad for _, _, grads, *_ in work for grad in grads]
        norm = None
        if alone or self.clip:
            scaled_norm = total_norm(grads)
            scale = 1.0 if grad_scale is None else grad_scale
            norm = scaled_norm / scale
            too_large = (~(norm <= LIMIT)).float()  # NaN is not below
            found_inf = too_large if alone else too_large.maximum(found_inf)
            if self.clip:
                if not self.clip > 0:
                    raise ValueError(f"clip={self.clip}: give a limit above 0 (0 or None: none)")
                grad_scale = (scaled_norm / self.clip).clamp(min=scale)
        if self.waits and found_inf:  # the host reads the verdict
            work = []
        elif self.waits and grad_scale is not None:
            torch._foreach_div_(grads, grad_scale)
            grad_scale = None
        self._update(work, grad_scale, found_inf)
        if self.masters:  # after a rejected step the same bits again
            torch._foreach_copy_(list(self.masters), list(self.masters.values()))
        if alone:
            self._warn(found_inf)
        return StepResult(norm, found_inf) if closure is None else loss

    def _nothing(self, found_inf):
        """The result where no parameter has a gradient."""
        alone = found_inf is None
        if alone and not self.state and not self._warned:
            self._warned = 0.5
            warnings.warn(
                "step() changes nothing: no parameter of this optimizer has had a "
                "gradient so far (was backward() called?)",
                stacklevel=5,
            )
        norm = self._skipped.new_zeros(())
        return StepResult(norm, norm if alone else norm + found_inf)  # GradScaler's is the number 0

    def _update(self, work, grad_scale, found_inf):
        """AdamW, and the division by grad_scale, in one pass over memory. Where found_inf is 1 it
        writes nothing."""
        steps = [step for *_, steps in work for step in steps]
        if steps:
            torch._foreach_add_(steps, [1 - found_inf] * len(steps))
        for g, *columns in work:
            columns = [[*map(local, column)] for column in columns]
            options = ("lr", "eps", "weight_decay", "amsgrad", "maximize")
            beta1, beta2 = g["betas"]
            for tensors, _ in self._group_tensors_by_device_and_dtype(columns).values():
                torch._fused_adamw_(
                    *tensors,
                    **{name: g[name] for name in options},
                    beta1=beta1,
                    beta2=beta2,
                    grad_scale=grad_scale,
                    found_inf=found_inf,
                )

    def _work(self, g):
        """A group; what is updated in it, gradients of that dtype and memory layout, state."""
        params = [p for p in g["params"] if p.grad is not None]
        targets = [self.masters.get(p, p) for p in params]
        grads = [p.grad for p in params]
        if [*map(layout, grads)] != [*map(layout, targets)]:
            grads = [torch.empty_like(t) for t in targets]
            torch._foreach_copy_(grads, [p.grad for p in params])
        states = [self.state[p] for p in params]
        for p, t, state in zip(params, targets, states, strict=True):
            if not state:
                self._check(p)
                state["step"] = torch.zeros((), device=t.device)
            # New, or the network has been given another memory format.
            if len(state) == 1 or state["exp_avg"].stride() != t.stride():
                for name in MOMENTS[: 2 + g["amsgrad"]]:
                    state[name] = torch.zeros_like(t).add_(state.get(name, 0))
        columns = [[s[name] for s in states if name in s] for name in (*MOMENTS, "step")]
        return g, targets, grads, *columns

    def _warn(self, found_inf):
        """Without a guard, warn of the first skipped step, and of ten in a row."""
        self._skipped += found_inf
        self._skipped[1] *= found_inf
        self._skipped_on_host.copy_(self._skipped, non_blocking=self._skipped.is_cuda)
        skipped, in_a_row = self._skipped_on_host.tolist()
        level = min(skipped, 1) + (in_a_row >= 10)
        if level > self._warned:
            self._warned = level
            warnings.warn(
                f"{skipped:.0f} steps skipped, the last {in_a_row:.0f} in a row: "
                "a gradient is non-finite",
                stacklevel=5,
            )

    def __getstate__(self):
        """For copy and pickle: everything but hooks, as in torch. A scheduler of torch gives an
        instance its own step(), bound to that instance: a copy would step the original."""
        kept = {key: value for key, value in vars(self).items() if "hook" not in key}
        kept.pop("step", None)
        return kept

    def state_dict(self):
        """The state_dict of torch.optim.AdamW, which can load it, plus masters. The tensors are
        live."""
        return super().state_dict() | {"masters": list(self.masters.values())}

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Copy a state_dict(), or that of torch.optim.AdamW; then masters start from the
        parameters. Load the weights first. As in torch, the checkpoint's groups count.
        """
        super().load_state_dict(state_dict | {"state": {}})  # it would cast the moments to half
        # Torch numbers parameters; torch.distributed.checkpoint names them.
        keys = [key for g in state_dict["param_groups"] for key in g["params"]]
        for key, (p, t) in zip(keys, master_params([self]).items(), strict=True):
            for name, saved in state_dict["state"].get(key, {}).items():
                if name == "step":  # a number in old files, and a half one stays at 256 for ever
                    saved = torch.as_tensor(saved).reshape(())
                    self.state[p][name] = saved.to(t.device, torch.float32, copy=True)
                else:
                    self.state[p][name] = torch.empty_like(t).copy_(saved)
        masters = state_dict.get("masters") or self.masters  # the parameters themselves
        for (p, master), saved in zip(self.masters.items(), masters, strict=True):
            p.copy_(master.copy_(saved))


def master_params(optimizers: Iterable[Optimizer]) -> dict[Tensor, Tensor]:
    """Each parameter's fp32 master, or itself, in the order of the optimizers."""
    both = {}
    for optimizer in optimizers:
        masters = getattr(optimizer, "masters", {})
        both |= {p: masters.get(p, p) for g in optimizer.param_groups for p in g["params"]}
    return both
