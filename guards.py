# SPDX-License-Identifier: MIT (finite 4.0.0, 2026-11-28)
"""
Guards: see a non-finite number on the device, and keep it out of the weights.

A check of the gradients is not enough. If one forward overflows, it writes inf into BatchNorm's
running variance: the optimizer skips the step, the training loss looks fine, and every evaluation
from then on is NaN. A label of 1000 for a 10-way head is a device assert on CUDA: the process dies
before anything can be saved. A check on one rank alone makes one replica skip while the others
step. So a Guard decides once a step, for all ranks and for any optimizer. A skipped step leaves
weights, optimizer state and buffers as they were, bit for bit.

The short way: one line before the loop, and guard.step(optimizer) in place of optimizer.step(). The
guard watches the gradients and the buffers on all ranks, and warns of skipped steps.

Paste::

    import torch
    from guards import Guard
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32))
    optimizer = torch.optim.AdamW(net.parameters())
    guard = Guard(net)  # when the weights are loaded
    for step in range(20):
        x = torch.randn(64, 8) * (float("inf") if step == 7 else 1.0)
        net(x).square().mean().backward()
        guard.step(optimizer)  # not taken at step 7; with a GradScaler: (optimizer, scaler)
        optimizer.zero_grad()

The long way sees the batch and the loss too, and says which of them was bad:

    guard = Guard(net, num_classes=10)          # or Guard([encoder, head])
    guard.open()                                # flags down, buffers copied aside (kilobytes)
    labels = guard.see_batch(images, labels)    # finite? in range? Returns labels safe to run with
    guard.see_loss(loss)                        # every micro-batch: one NaN of eight poisons all
    loss.backward()
    guard.step(optimizer)
    verdict = guard.verdict()                   # one step late, so that the device never waits

Without open() a step begins where the last one ended, and a rejected step restores the buffers to
that point. Call open() if something else has written to the buffers (you loaded a checkpoint), or
if a forward replaces buffers. A buffer that changes its shape (a cache that grows), or that a step
creates, stays as that step left it.

Three rules. (1) Ranks exchange flags, never values: an all-reduce MAX can lose a NaN. (2) A skipped
step is a select (`where`), never a product: 0 * NaN is NaN. (3) A comparison must fail for NaN:
`not (x <= limit)`, because `x > limit` is False for NaN. "Non-finite" means NaN, inf, or a
magnitude above 1.8e19 (see LIMIT).

Two kinds of optimizer skip without a host sync: torch's own fused ones, and any class that declares
`skips_on_device = True`. Such a class reads torch's two attributes `found_inf` (1.0: change
nothing) and `grad_scale` (divide the gradients by it; None: as they are) in its step(). For any
other optimizer the guard reads the verdict on the host, once a step, and does not call step() if
the step is rejected.

This file does not find the operation that made the number (autopsy/ does), and does not fix it.
Copy it alone: it needs torch.
"""

from __future__ import annotations

import gc
import operator
import warnings
from collections.abc import Mapping
from typing import NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_with_path

# Every flag but the last rejects the step. "veto" is the caller's own; "signal" carries the number
# of a stop request.
FLAGS = ("input", "label", "loss", "grad", "buffer", "param", "optstate", "veto", "signal")
FAULTS = len(FLAGS) - 1
LABELS = ("label", "labels", "target", "targets")  # in a mapping these keys hold class labels
# Just under sqrt(3.4e38): the square of anything above is inf in fp32, so it is as good as inf.
LIMIT = 1.8e19
CACHED = 2**23  # numbers in fp32 that a CPU's cache holds
CHECKED = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)
STATISTICS = ("running_mean", "running_var")
COUNTERS = ("number", "steps", "skipped", "skipped_in_a_row")


def magnitude(x: Tensor) -> Tensor:
    """2-norm of x, 0-dim, summed in fp32 or wider. No element is larger, NaN stays NaN. No sync."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x.detach(), dtype=wide)


def scalar(x):
    """x, which holds one number, 0-dim and fp32."""
    return x if x.ndim == 0 and x.dtype is torch.float32 else x.float().reshape(())


def total(norms):
    """The norm of all tensors that have these norms, 0-dim."""
    return magnitude(torch.stack(norms)) if norms[1:] else norms[0]


def end_to_end(tensors, out=None):
    """All numbers of these tensors of one device, one after the other. One kernel."""
    return torch.cat([t if t.ndim == 1 else t.flatten() for t in tensors], out=out)


def with_gradient(optimizer):
    return [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]


def are_cached(params):
    """Whether their gradients have just been read into a CPU's cache. To clip them there is faster
    than to have AdamW write them too; from memory it is slower."""
    plain = (p.is_cpu and p.dtype is torch.float32 and type(p.grad) is Tensor for p in params)
    return all(plain) and sum(p.numel() for p in params) <= CACHED


def skips_on_device(optimizer, params):
    """Whether step() changes nothing if the attribute found_inf is 1. The class decides. params:
    those with a gradient.

    torch's fused SGD leaves uninitialised momentum if its first step is skipped, so torch's own
    optimizers need state first. Shards (DTensor) do not accept a plain found_inf. MPS's kernels
    ignored it (pytorch #186360).
    """
    if not type(optimizer).__module__.startswith("torch.optim."):
        return getattr(optimizer, "skips_on_device", False)
    if not optimizer.param_groups[0].get("fused"):  # a checkpoint may have changed it
        return False
    sharded = any(hasattr(kind, "full_tensor") for kind in {type(p) for p in params})
    return not sharded and all(p in optimizer.state and not p.is_mps for p in params)


class Verdict(NamedTuple):
    """What became of one step, on the host."""

    step: int
    accepted: bool
    reasons: tuple  # names of FLAGS; () when accepted
    stats: dict  # loss and grad_norm from step(), and what the caller sent along
    carried: dict  # see Guard.carry
    rank: int  # the (highest) guilty one; -1: no flag names one


class Buffers:
    """The buffers of a network, and two copies: of before the step, and of after the last accepted
    one.

    A buffer that is non-finite from the start is a mask, unless it is a running statistic.
    """

    def __init__(self, net):
        modules = [*net.modules()]
        self.holders = [held for m in modules for held in (m._buffers, m._modules)]
        self.held = self.hold()
        self.owners = [
            (m._buffers, name, b)
            for m in modules
            for name, b in m._buffers.items()
            if b is not None
        ]
        self.checked = {}  # device: what has to be finite
        self.last_accepted = {}  # buffer that is checked: (its memory, the second copy of it)
        kinds = {}
        for _, name, b in self.owners:
            if b.layout is not torch.strided or 0 in b.stride():  # sparse, expanded: they stay
                continue
            live = b.data  # counts no version: a backward that is under way goes on
            live = live.view(-1) if live.is_contiguous() else live
            if b.dtype in CHECKED and ("running_" in name or magnitude(b) <= LIMIT):
                self.checked.setdefault(b.device, []).append(live)
                self.last_accepted[b] = None
            if live.is_contiguous():  # as bytes: one kernel for all dtypes
                live = live.view(torch.uint8)
            kinds.setdefault((b.device, live.dtype), {})[b] = live
        self.is_saved = True  # else the last accepted step left what was before this one
        self.groups = []  # (buffers of one device, both copies, views into the first copy)
        for group in kinds.values():
            live = [*group.values()]
            copies = torch.stack(2 * [end_to_end(live)])
            before_step, accepted = (_unflatten_dense_tensors(copy, live) for copy in copies)
            self.groups.append((live, copies, before_step))
            for b, *pair in zip(group, live, accepted, strict=True):
                if b in self.last_accepted:
                    self.last_accepted[b] = pair

    def hold(self):
        """All buffers and modules of the network."""
        return [x for held in self.holders for x in held.values()]

    def are_others(self):
        """Whether a buffer or a module came, went or was replaced."""
        now = self.hold()
        return len(now) != len(self.held) or not all(map(operator.is_, now, self.held))

    def save(self):
        """A step begins."""
        for live, copies, _ in self.groups:
            end_to_end(live, out=copies[0])
        self.is_saved = True

    def restore(self):
        """As they were before the step."""
        self.take_back()
        for live, copies, before_step in self.groups:
            if not self.is_saved:
                copies[0].copy_(copies[1])
            torch._foreach_copy_(live, before_step)
        self.is_saved = True

    def end_step(self, found_inf):
        """Keep what the step has left, or restore. The next step begins here."""
        if found_inf.device.type == "cpu":  # nothing to wait for
            if found_inf.item() != 0:
                self.restore()
                return
            for live, copies, _ in self.groups:
                end_to_end(live, out=copies[1])
            self.is_saved = False
            return
        for live, copies, before_step in self.groups:
            torch.where(found_inf != 0, copies, end_to_end(live), out=copies)
            torch._foreach_copy_(live, before_step)

    def take_back(self):
        """Where the script assigned a tensor to a buffer, copy it into the old one and put that
        back."""
        for owner, name, b in self.owners:
            new = owner.get(name)
            if new is b or new is None:
                continue
            if new.is_same_size(b) and new.type() == b.type():
                b.data.copy_(new)
                owner[name] = b

    def repair(self, net):
        """Restore each buffer that something made non-finite between two steps; reset the running
        statistics of a module that is new, whose first batch it was. Returns names."""
        repaired = []
        for name, b in net.named_buffers():
            is_new = b not in self.last_accepted
            if (is_new and not name.endswith(STATISTICS)) or magnitude(b) <= LIMIT:
                continue
            if is_new:
                b.data.fill_(name.endswith("var"))
            else:
                live, accepted = self.last_accepted[b]
                live.copy_(accepted)
            if magnitude(b) <= LIMIT:  # else it never was finite
                repaired.append(name)
        return repaired


class Guard:
    """The flags, the buffers and the verdict of a step. One a process, after init_process_group.

    net: the bare network, or a list of all networks that a step runs through (a GAN's two).
    num_classes: class labels must be in [0, num_classes) or be `ignore_index`, if that is not None.
        None: no check.
    carries: names for carry().
    lag: verdict() is of the step before, and nothing waits. False: of this step, and it waits.
    """

    _stepping = False  # inside of some guard's step()
    steps = skipped = skipped_in_a_row = 0
    number = -1
    state = "new"  # then "open", "decided", "closed" and "sent", step by step
    _is_read = False
    _pending = None  # numbers on their way to the host
    _unread = ()  # (flag, tensor) of this step, read together: see decide()

    def __init__(
        self,
        net: nn.Module | list[nn.Module],
        *,
        num_classes: int | None = None,
        lag=True,
        ignore_index=-100,
        carries=(),
    ):
        self.num_classes = num_classes
        self.ignore_index = ignore_index
        self.lag = lag
        self.names = (*FLAGS, *carries)
        self.together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if self.together else 0
        self._have_stepped = set()  # optimizers
        self._living = WeakSet()  # scalers and optimizers of the script
        self._calls = 0  # of step(), in this process
        self.watch(net)

    def watch(self, net):
        """Watch the buffers of `net`. A step does this again after a buffer was replaced."""
        self.net = net if isinstance(net, nn.Module) else nn.ModuleList(net)
        self._buffers = Buffers(self.net)
        self.device = next(self.net.parameters()).device
        constants = torch.tensor([0, 1, self.rank + 1.0], device=self.device)
        self._zero, self._one, self._rank_mark = constants
        self._carried = constants.new_zeros(len(self.names))
        self._has_carried = False
        self._row = constants.new_zeros(len(self.names) + 32)  # what a step sends to the host
        self._flags = self._row[: len(self.names)]

    def open(self, step=None):
        """Begin an attempted step exactly here. step: its number; None: count on.

        Without it a step begins where the last one ended. If the last step was opened and not ended
        (an exception, a `continue`), the guard restores its buffers and warns. A buffer that is
        non-finite here gets the value that the last accepted step left, as soon as that step's
        verdict is read (with lag this costs two steps, else one); a warning names the buffer.
        """
        if self.state == "open":
            warnings.warn(
                "guard.step() or close() has not ended the last step: the guard restores "
                "its buffers",
                stacklevel=2,
            )
            self.restart()
        self._begin(step)
        if self.skipped_in_a_row:  # perhaps for that
            self._repair_buffers()
        self._buffers.save()

    def _repair_buffers(self):
        if repaired := self._buffers.repair(self.net):
            warnings.warn(
                f"non-finite before step {self.number}, and no step did it: "
                f"{', '.join(repaired)} (an evaluation in training mode?). The guard has "
                "restored the values of the last accepted step, and reset a new module",
                stacklevel=3,
            )

    def _begin(self, step=None):
        self._start_copy()  # nobody has asked for the last verdict; it still counts
        self._buffers.take_back()
        self.number = self.number + 1 if step is None else step
        if self._buffers.are_others():
            self._repair_buffers()
            self.watch(self.net)
        if self._has_carried:
            self._carried.zero_()
            self._has_carried = False
        self.state = "open"

    def restart(self):
        """This step from its beginning: flags down, buffers as they were."""
        self._unread = ()
        self._buffers.restore()
        self._begin(self.number)

    def see_batch(self, images, labels=...):
        """Check one micro-batch. Returns labels that are safe to run with (see_batch(batch): a
        batch).

        It takes tensors, or nests of dicts, lists and tuples; it passes over other objects. Floats
        must be finite (a mask must be bool). Class labels are the integers in `labels`, in a
        mapping those under LABELS. A label out of range rejects the step. The step still runs, so
        the labels returned are safe: on CUDA a bad label is a device assert. Your own batch stays
        unchanged. decide() reads it.
        """
        if isinstance(images, Tensor) and isinstance(labels, Tensor):
            self._safe(images)
            return self._safe(labels, is_label=True)
        batch = dict(images) if isinstance(images, Mapping) else images  # a tokenizer's is no dict
        safe = tree_map_with_path(self._safe_at, {"images": batch, "labels": labels})
        return safe["images" if labels is ... else "labels"]

    def _safe_at(self, path, x):
        keys = [entry.key for entry in path if hasattr(entry, "key")]
        return self._safe(x, keys[-1] in LABELS) if isinstance(x, Tensor) else x

    def _safe(self, x, is_label=False):
        if x.dtype in CHECKED:  # among labels: soft labels, regression targets
            # One with gaps would make the foreach kernel a kernel a tensor.
            dense = torch.ops.aten.is_non_overlapping_and_dense.default(x)
            self._see("label" if is_label else "input", x if dense else magnitude(x))
        elif is_label and self.num_classes and not self._are_classes(x):
            safe = x.clamp(0, self.num_classes - 1).to(x.dtype)  # bool stays bool
            if self.ignore_index is not None:
                safe = torch.where(x == self.ignore_index, x, safe)
            self._see("label", (safe != x) * 1e38)
            return safe
        return x

    def _are_classes(self, labels):
        """Whether the host, which has these labels, sees at once that all are in range."""
        if labels.device.type != "cpu" or not labels.numel():
            return False
        low, high = labels.aminmax()
        return low.item() >= 0 and high.item() < self.num_classes

    def see_loss(self, loss: Tensor):
        """Check the loss of one micro-batch: one number, before you scale it."""
        # No buffer is touched here: a backward may still need what it holds.
        self._unread += (("loss", loss.detach()),)

    def see_state(self, **trees):
        """Now and then: see_state(param=dict(net.named_parameters()), optstate=optimizer.state)."""
        for flag, tree in trees.items():
            for t in tree_leaves(tree):
                if getattr(t, "dtype", None) in CHECKED:
                    self._see(flag, t)

    def _see(self, flag, t):
        if self.state != "open":
            self._begin()
        self._unread += ((flag, t),)

    def carry(self, name: str, value: float):
        """A number (exact up to 2^24), between open() and decide(): "signal" or one of `carries`
        rejects nothing, and verdict.carried[name] is the largest of all ranks, 0 where none was
        given. Any other of FLAGS rejects the step; its number is guard.rank + 1."""
        self._carried[self.names.index(name)] = value
        self._has_carried = True

    @torch.no_grad()
    def decide(self, gradients=()):
        """After the last backward, on every rank. Returns 0-dim fp32: 1.0 = a flag is up on some
        rank.

        It reads all that the guard has seen, and these gradients: one launch for each dtype.
        Sparse, complex and sharded gradients (DTensor) count too.
        """
        if self.state != "open":
            self._begin()
        self._buffers.take_back()
        self._norms = self._measure(gradients)
        self._unread = ()
        self.state = "decided"
        if self._is_good():
            self._flags.zero_()
            return self._zero.clone()
        row = torch.stack([self._norms.get(name, self._zero) for name in self.names])
        # NaN: not below
        torch.where(row <= LIMIT, self._carried, self._rank_mark, out=self._flags)
        if self.together:
            dist.all_reduce(self._flags, op=dist.ReduceOp.MAX)
        found_inf = self._flags[:FAULTS].amax()
        return found_inf.clamp(max=1) if self.together else found_inf

    def _is_good(self):
        """Whether the host, which has all numbers of a step, sees at once that no flag goes up."""
        alone = self.device.type == "cpu" and not (self.together or self._has_carried)
        return alone and all(norm.item() <= LIMIT for norm in self._norms.values())

    def _measure(self, gradients):
        """{flag: norm of all tensors under it, 0-dim fp32 on the guard's device}."""
        checked = self._buffers.checked.values()
        seen = [("buffer", end_to_end(live)) for live in checked]
        seen += [("grad", g) for g in gradients]
        kinds = {}
        for flag, t in (*self._unread, *seen):
            t = t.coalesce().values() if t.is_sparse else t
            kind = t.device, t.dtype, hasattr(type(t), "full_tensor") and flag
            kinds.setdefault(kind, []).append((flag, t))
        norms = {}
        for (_, dtype, sharded), group in kinds.items():
            flags, tensors = zip(*group, strict=True)
            if sharded:
                each = [nn.utils.get_total_norm(tensors).full_tensor()]
            else:  # half numbers are summed in fp32
                each = torch._foreach_norm(tensors, 2, torch.promote_types(dtype, torch.float32))
            of_kind = {}
            for flag, norm in zip(flags, each, strict=False):
                of_kind.setdefault(flag, []).append(norm)
            for flag, each in of_kind.items():
                norms.setdefault(flag, []).append(total(each).to(self.device, torch.float32))
        return {flag: total(each) for flag, each in norms.items()}

    @torch.no_grad()
    def close(self, found_inf: Tensor, **stats: Tensor):
        """End the step; decide unless you have. found_inf: 1.0 = rejected. stats: 0-dim, at most
        31.

        From open() to here all stays on the device, so that a CUDA graph can hold it.
        """
        if self.state == "open":
            self.decide()
        self._buffers.end_step(found_inf)
        numbers = [scalar(x) for x in (found_inf, *stats.values())]
        first = len(self.names)
        torch.stack(numbers, out=self._row[first : first + len(numbers)])
        self._stat_names = list(stats)
        self.state = "closed"

    def step(
        self,
        optimizers,
        scaler: GradScaler | None = None,
        *,
        clip: float | None = None,
        **stats: Tensor,
    ):
        """Measure the gradients and decide once for all ranks; then clip and step, or restore the
        buffers. Returns the verdict, 0-dim fp32 on the device: 1.0 = rejected.

        Call it in place of optimizer.step() and scaler.step(optimizer); you still call zero_grad()
        and scaler.update(). optimizers: one, or a list for one verdict. scaler: GradScaler or
        LossScaler; each rank's scaler gets the verdict of all ranks. clip: largest gradient norm.
        Do not call clip_grad_norm_() before: it turns a norm of inf into a step of zeros. stats:
        see close().
        """
        optimizers = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
        with_gradients = {o: with_gradient(o) for o in optimizers}
        moving = [o for o in optimizers if with_gradients[o]]  # the others pass, as in torch
        params = [p for o in moving for p in with_gradients[o]]
        if clip and not clip > 0:
            raise ValueError(f"clip={clip}: give a limit above 0 (0 or None: none)")
        self._check_use(moving, scaler)
        scaler = scaler if scaler and scaler.is_enabled() else None
        on_device = all(skips_on_device(o, ps) for o, ps in with_gradients.items())
        losses = [loss for flag, loss in self._unread if flag == "loss"]
        if losses and "loss" not in stats:
            mean = torch.stack(list(map(scalar, losses))).mean() if losses[1:] else losses[0]
            stats["loss"] = mean
        scale = self._unscale(moving, scaler, on_device) if scaler else None
        found_inf = self.decide(p.grad for p in params)
        norm = self._norms.get("grad", self._zero)
        norm = norm if scale is None else norm / scale
        if scaler:
            self._tell(scaler, optimizers, found_inf)
        if clip:
            scale = self._clip(params, clip, norm, scale, on_device)
        self._update(optimizers, found_inf, scale, on_device)
        self.close(found_inf, **stats, grad_norm=norm)
        return found_inf

    def _clip(self, params, clip, norm, scale, on_device):
        """Returns what the kernels divide by: `scale`, or that and the clip coefficient in one."""
        if are_cached(params):
            if clip < norm <= LIMIT:
                nn.utils.clip_grads_with_norm_(params, clip, norm)
        elif on_device:
            factor = (norm if clip == 1 else norm / clip).clamp(min=1)
            scale = factor if scale is None else factor * scale
        else:
            nn.utils.clip_grads_with_norm_(params, clip, norm)
        return scale

    def _unscale(self, optimizers, scaler, on_device):
        """The loss scale, if the optimizers divide by it in their kernels; else divide here."""
        stages = {o: scaler._per_optimizer_states[id(o)]["stage"] for o in optimizers}
        if OptState.STEPPED in stages.values():
            raise RuntimeError(
                "no scaler.update() after step(): call it after each guard.step(), "
                "after a rejected one, too"
            )
        if not stages or (on_device and OptState.UNSCALED not in stages.values()):
            return scaler.scale(self._one)
        for o, stage in stages.items():
            if stage is OptState.READY:
                scaler.unscale_(o)

    def _tell(self, scaler, optimizers, found_inf):
        """Give the scaler the verdict of all ranks, for its update()."""
        for o in optimizers:
            scaler._per_optimizer_states[id(o)] = {
                "stage": OptState.STEPPED,
                "found_inf_per_device": {self.device: found_inf.clone()},  # update() adds to it
            }

    def _update(self, optimizers, found_inf, scale, on_device):
        if not on_device and found_inf:  # the one host sync
            return
        for o in optimizers:
            if on_device:
                o.found_inf, o.grad_scale = found_inf, scale
            Guard._stepping = True
            try:
                o.step()
            finally:  # out of memory, say: the script may go on
                Guard._stepping = False
                if on_device:
                    del o.found_inf, o.grad_scale

    def _check_use(self, optimizers, scaler):
        """Warn of mistakes that nothing else would show: of an optimizer's at its first step, of a
        GradScaler beside the guard when it has scaled a loss."""
        if not optimizers and not self._calls:
            warnings.warn(
                "guard.step() changes nothing: no parameter has had a gradient so far "
                "(was backward() called?)",
                stacklevel=3,
            )
        for o in {*optimizers} - self._have_stepped:
            if hasattr(o, "_optimizer_step_pre_hooks"):  # a wrapper may have none
                o.register_step_pre_hook(self._warn_double_step)
            if set(with_gradient(o)).isdisjoint(self.net.parameters()):
                warnings.warn(
                    "the optimizer holds no parameter of the guard's network: call "
                    "Guard(net) with the network that you train",
                    stacklevel=3,
                )
        self._have_stepped.update(optimizers)
        self._calls += 1
        if scaler:
            return
        # In a large process it takes 0.2 s. The ninth: one that is made after the first step, too.
        if self._calls in (1, 9):
            self._living = WeakSet(
                x for x in gc.get_objects() if issubclass(type(x), (GradScaler, Optimizer))
            )
        used = [x for x in self._living if getattr(x, "_scale", None) is not None]
        if not all(map(self._serves_another, used)):
            warnings.warn(
                "a GradScaler has scaled a loss, and the guard does not divide by its "
                "scale: call guard.step(optimizer, scaler)",
                stacklevel=3,
            )

    def _serves_another(self, scaler):
        """Whether it has counted a step, or there is an optimizer of another network."""
        own = set(self.net.parameters())
        others = [o for o in self._living - self._have_stepped if isinstance(o, Optimizer)]
        return scaler._get_growth_tracker() or any(own.isdisjoint(with_gradient(o)) for o in others)

    def _warn_double_step(self, *_):
        if not Guard._stepping:
            warnings.warn(
                "guard.step() and optimizer.step() together take each update twice: "
                "delete optimizer.step()",
                stacklevel=4,
            )

    def verdict(self) -> Verdict | None:
        """Once after each step() or close(). Returns the oldest unread one; None: too early (lag).

        If you never call it, the guard warns of the first skipped step and of ten in a row.
        """
        self._is_read = True
        if self.state == "open":  # a CUDA graph has replayed the rest of the step
            self.state = "closed"
        return self._start_copy()

    def _start_copy(self):
        if self.state != "closed":
            return None
        last = self._next_verdict()
        if self._row.is_cuda:
            row = self._row.to("cpu", non_blocking=True)  # pinned
            event = torch.cuda.current_stream().record_event()
        else:
            row, event = self._row.tolist(), None
        self._pending = self.number, row, event, self._stat_names
        self.state = "sent"
        return last if self.lag else self._next_verdict()

    def flush(self):
        """Wait for every pending verdict. Returns the last one, or None."""
        last = self._start_copy()
        return self._next_verdict() or last

    def set_lag(self, lag):
        """Switch lag on or off. Call flush() before: it returns the verdict under way."""
        self.lag = lag

    def _finish_copy(self):
        step, row, event, keys = self._pending
        if event:
            event.synchronize()  # waits for that step's numbers, not for the device
            row = row.tolist()
        return step, [*row], keys

    def _next_verdict(self):
        if not self._pending:
            return None
        step, row, keys = self._finish_copy()
        self._pending = None
        flags = dict(zip(self.names, row, strict=False))
        found_inf, *numbers = row[len(flags) :]
        stats = dict(zip(keys, numbers, strict=False))
        rejected = found_inf != 0
        self.steps += 1
        self.skipped += rejected
        self.skipped_in_a_row = (self.skipped_in_a_row + 1) * rejected
        reasons = tuple(name for name in FLAGS[:FAULTS] if rejected and flags[name])
        due = rejected and (self.skipped == 1 or self.skipped_in_a_row == 10)
        if due and not self._is_read:
            why = ", ".join(reasons) or "found_inf"
            warnings.warn(
                f"step {step} was skipped, {self.skipped_in_a_row} in a row: non-finite "
                f"{why}. guard.verdict() reports each",
                stacklevel=6,
            )
        return Verdict(
            step,
            not rejected,
            reasons,
            stats,
            {name: flags[name] for name in self.names[FAULTS:]},
            int(max(row[:FAULTS])) - 1,
        )

    def state_dict(self):
        """Counters and the pending verdict, as plain numbers; a resumed run reads that verdict at
        its next step. Waits for the device. Call verdict() before: it returns None afterwards."""
        self._start_copy()
        pending = None
        if self._pending:
            pending = [*self._finish_copy()]
            pending[1][FAULTS] = 0.0  # the signal: it has been obeyed
        return {name: getattr(self, name) for name in COUNTERS} | {"pending": pending}

    def load_state_dict(self, state):
        for name in COUNTERS:
            setattr(self, name, state[name])
        self._pending = None
        if state["pending"]:
            step, row, keys = state["pending"]
            self._pending = step, row, None, keys
