# SPDX-License-Identifier: MIT (finite 2.2.0, 2026-11-22)
"""
Guards: see a non-finite number on the device, and keep it out of the weights.

A check of the gradients is not enough. One forward that overflows writes inf into BatchNorm's running variance: the
optimizer skips the step, the training loss looks fine, and every evaluation from then on is NaN. A label of 1000 for a
10-way head is a device assert on CUDA: the process dies before anything can be saved. A check on one rank alone makes
one replica skip while the others step. So each step is decided once, for all ranks, for any optimizer:

    guard = Guard(net)                              # or Guard([generator, critic])
    ...
    guard.open()                                    # flags down, buffers copied aside (kilobytes)
    labels = guard.see_batch(images, labels)        # inputs finite? labels in range? Returns labels safe to run with
    guard.see_loss(loss)                            # every micro-batch: one NaN of eight poisons the sum
    loss.backward()
    guard.step(optimizer)                           # gradient norm, one verdict of all ranks, step or no step
    verdict = guard.verdict()                       # on the host, one step late: the device never waits

A skipped step leaves weights, optimizer state and buffers as they were, bit for bit. A loop with a step of its own (a
CUDA graph, say) calls the parts: `bad = guard.decide()`, an optimizer that skips where bad is 1, `guard.close(bad)`.

Three rules. (1) Ranks exchange flags, never values: an all-reduce MAX can lose a NaN. (2) A skipped step is a select
(`where`), never a product: 0 * NaN is NaN. (3) A comparison must fail for NaN: write `not (x <= limit)`, because
`x > limit` is False for NaN. "Non-finite" means NaN, inf, or a magnitude above 1.8e19 (see LIMIT).

Also here: check_state (before a save). This file does not find the operation that made the number (autopsy.py does),
does not warn before there is one (probes.py does), and does not cure. It refuses optimizers that need a closure, and
raises when one moved a weight in a skipped step. Copy it alone: it needs torch. `python guards.py` shows it at work.
"""
from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Every flag but the last rejects the step. "veto" is the caller's own; "signal" carries the number of a stop request.
FLAGS = ("input", "label", "loss", "grad", "buffer", "param", "optstate", "veto", "signal")
FAULTS = len(FLAGS) - 1
LABELS = ("label", "labels", "target", "targets")  # in a mapping only these keys hold class labels
LIMIT = 1.8e19  # just under sqrt(3.4e38): the square of anything above is inf in fp32, so it is as good as infinite
CHECKED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def magnitude(x: Tensor) -> Tensor:
    """Largest magnitude of x (any float dtype, not empty) as 0-dim fp32. NaN stays NaN. One read, no sync."""
    x = x.detach()
    if x.is_cpu:  # the CPU's norm is a plain loop: 15 ms for 11 million numbers, which aminmax reads in 1.5
        low, high = torch.aminmax(x) if x.is_contiguous() else (x.amin(), x.amax())  # aminmax would copy it first
        return torch.maximum(low.neg(), high).float()
    return torch.linalg.vector_norm(x, math.inf).float()


def largest(tensors: list[Tensor]) -> Tensor:
    """Largest magnitude of each tensor as 1-D fp32; NaN and inf stay. Same device and dtype: one pass, no sync."""
    if tensors[0].is_cpu:
        return torch.stack([magnitude(t) for t in tensors])
    return torch.stack([norm.float() for norm in torch._foreach_norm([t.detach() for t in tensors], math.inf)])


def _alike(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Groups of one device and dtype, sharded tensors apart: a foreach kernel is one launch only for such a group."""
    groups: dict[Any, list[Tensor]] = {}
    for t in tensors:
        groups.setdefault((t.device, t.dtype, hasattr(t, "full_tensor")), []).append(t)
    return groups.values()


def gradient_norms(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """2-norms, fp32 (N,) on `device`; their own norm is the global one. Half gradients are summed in fp32; complex,
    sparse and sharded ones (DTensor) count too, from several devices. Nothing is written."""
    plain = (g.coalesce().values() if g.is_sparse else g for g in gradients)
    plain = (torch.view_as_real(g) if g.is_complex() else g for g in plain)
    norms = [torch.zeros(0, device=device)]
    for group in _alike(g for g in plain if g.numel()):
        wide = torch.promote_types(group[0].dtype, torch.float32)
        if hasattr(group[0], "full_tensor"):  # torch 2.14 takes no dtype for sharded tensors
            some = torch.linalg.vector_norm(torch.stack(torch._foreach_norm([g.to(wide) for g in group], 2)))
            norms.append(some.full_tensor().reshape(1).to(device, torch.float32))
        else:
            norms.append(torch.stack(torch._foreach_norm(group, 2, dtype=wide)).to(device, torch.float32))
    return torch.cat(norms)


def named_tensors(tree: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """(dotted name, tensor) for every tensor in nested mappings, lists, tuples and dataclasses."""
    if isinstance(tree, Tensor):
        yield prefix, tree
        return
    if is_dataclass(tree) and not isinstance(tree, type):
        tree = {f.name: getattr(tree, f.name) for f in fields(tree)}
    if isinstance(tree, Mapping | list | tuple):
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            key = "" if isinstance(key, Tensor) else str(key)  # optimizer.state is keyed by the parameters themselves
            yield from named_tensors(value, ".".join(filter(None, (prefix, key))))


def beyond(named: Iterable[tuple[str, Tensor]]) -> dict[str, float]:
    """{name: largest magnitude} of the float tensors that hold NaN, inf or more than LIMIT. One sync a dtype."""
    named = [(name, t) for name, t in named if t.dtype in CHECKED and t.numel() and not t.is_meta]
    top: dict[int, float] = {}
    for group in _alike(t for _, t in named):
        top.update(zip(map(id, group), largest(group).tolist(), strict=True))
    return {name: top[id(t)] for name, t in named if not top[id(t)] <= LIMIT}


@dataclass(frozen=True)
class Verdict:
    """What became of one step, on the host. `rank` is the (highest) guilty rank, -1 if no flag names one."""

    step: int
    accepted: bool
    reasons: tuple[str, ...]  # names of FLAGS; () when accepted
    stats: dict[str, float]  # loss and grad_norm from step(), or what close() was given
    told: dict[str, float]  # see Guard.tell
    signal: int = 0
    rank: int = -1
    spikes: tuple[str, ...] = ()  # sentences of the spike detector; a spike alone never rejects a step


class Guard:
    """The flags, the buffers and the verdict of a step. One object a process, made after init_process_group.

    net: the bare network, or a list of networks. device: where the flags live; None: where the network is.
    num_classes: class labels must be in [0, num_classes) or equal `ignore_index`. None: labels are not checked.
    lag: verdict() tells of the step before, and the device never waits. False (while hunting a fault): it tells of this
    step, and waits. Call flush() before changing it. spikes: a SpikeDetector (probes.py), or None.
    told: names of numbers that travel with the flags, see tell().
    """

    def __init__(self, net: nn.Module | Sequence[nn.Module], *, num_classes: int | None = None,
                 device: torch.device | str | None = None, lag: bool = True, ignore_index: int = -100,
                 spikes: Any = None, told: Sequence[str] = ()):
        self._names = (*FLAGS, *told)
        self.lag, self.num_classes, self.ignore_index, self.spikes = lag, num_classes, ignore_index, spikes
        self.together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if self.together else 0
        self.steps = self.skipped = self.skipped_in_a_row = 0
        self.number, self.device, self._asked = -1, None, device and torch.device(device)
        self._pending: deque[tuple[Any, ...]] = deque()  # steps whose numbers are on their way to the host
        self._due = self._opened = self.decided = False
        self._numbers: dict[str, float] = {}
        self._losses: list[Tensor] = []
        self._on_trial: list[Any] = []  # optimizers of this step that must still show that they skip
        self._voters: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # see step()
        self._stepped: WeakKeyDictionary[Any, set[Any]] = WeakKeyDictionary()  # which parameters were updated; "skips"
        self.watch(net)

    def watch(self, net: nn.Module | Sequence[nn.Module]) -> None:
        """Take the buffers of `net` into care. open() calls this when a buffer was exchanged. One sync a dtype.

        `lawful` names float buffers that are infinite from the start and hold no NaN: masks, never running statistics.
        Their infinities raise no flag."""
        self.net = net if isinstance(net, nn.Module) else nn.ModuleList(net)
        self._identity = device, _ = self._look()
        if device != self.device:
            self.flush()
            # Each flag is a sum of squares, and up when that sum is inf or NaN. It then reports 1 + rank, so the MAX
            # over ranks names a guilty machine; while down it reports 0 ("signal": its number).
            self.device, self._row, self._keys = device, None, ()
            self._seen = torch.zeros(2, len(self._names), device=device)
            self._squares, self._down = self._seen.unbind()
            self._squares_of = dict(zip(self._names, self._squares.unbind(), strict=True))
            self._up, self._flags = torch.tensor(self.rank + 1.0, device=device), torch.zeros_like(self._down)
        buffers = dict(self.net.named_buffers())
        bad = beyond(buffers.items())
        self.lawful = {name for name, x in bad.items() if "running_" not in name and x > LIMIT}  # False for NaN
        self._finite = {name: b for name, b in buffers.items() if name not in self.lawful}
        alike: dict[tuple[torch.dtype, bool], list[Tensor]] = {}  # by dtype, and whether they have to be finite
        for name, b in buffers.items():
            expanded = any(stride == 0 and n > 1 for stride, n in zip(b.stride(), b.shape, strict=True))
            if b.numel() and not b.is_meta and not expanded:  # an expanded buffer cannot change
                alike.setdefault((b.dtype, b.dtype in CHECKED and name in self._finite), []).append(b)
        # One kernel copies all buffers, as bytes, into one piece of memory. The widest dtype lies first: each begins at
        # a multiple of its size. Writes through .data count no version, so a later backward does not complain.
        kinds = sorted(alike, key=lambda kind: -kind[0].itemsize)
        self._live = [b.data.unsqueeze(-1).view(torch.uint8) for kind in kinds for b in alike[kind]]
        sizes = [b.numel() for b in self._live]
        room = torch.zeros(2, math.ceil(sum(sizes) / 8), dtype=torch.int64, device=self.device)  # quick to select from
        self._saved, self._now = room  # before the step, and after it
        parts = [row.view(torch.uint8)[: sum(sizes)].split(sizes) for row in room]
        self._saved_parts, self._now_parts = ([p.view(b.shape) for p, b in zip(row, self._live, strict=True)]
                                              for row in parts)
        self._checked, at = [], 0
        for dtype, finite in kinds:
            end = at + sum(b.nbytes for b in alike[dtype, finite])
            self._checked += [self._now.view(torch.uint8)[at:end].view(dtype)] if finite else []
            at = end
        self._copy_now()
        self._mend(self._now_parts)

    def _look(self) -> tuple[torch.device, list[tuple[int, int]]]:
        """Where the network is, and which tensors its buffers are."""
        first = next(self.net.parameters(), next(self.net.buffers(), torch.empty(0)))
        return self._asked or first.device, [(id(b), b.data_ptr()) for b in self.net.buffers()]

    @torch.no_grad()
    def open(self, step: int | None = None) -> None:
        """Begin a step (attempted, not update): flags down, buffers aside. `step`: its number; None: count.

        It syncs only where something wrote to the buffers since the last step. When a buffer is non-finite then, a
        warning names it and the last finite copy comes back. (For F.batch_norm without a module torch counts no
        version: that is noticed after two rejections.)"""
        if self._due:  # nobody asked for the last verdict; it still counts
            self.verdict()
        again, self._opened = self._opened, True
        self.number = self.number + 1 if step is None else step
        if self._look() != self._identity:
            self.watch(self.net)
        elif self._stuck > 1 or self._versions != [b._version for b in self.net.buffers()]:
            self._mend(self._saved_parts if again else self._now_parts)
        if again:
            warnings.warn(f"guard.open() was called again at step {self.number}, before step() or close(): what was "
                          "seen since the first call counts for this step too", stacklevel=3)
        else:
            self._seen.zero_()
            self._losses.clear()
        self.decided = False
        if self._live:
            torch._foreach_copy_(self._saved_parts, self._live)

    @torch.no_grad()
    def _mend(self, last: list[Tensor]) -> None:
        """Something wrote to the buffers outside of a step: when one is non-finite, the `last` copy comes back."""
        bad, self._lost, self._stuck = beyond(self._finite.items()), {}, 0
        if bad:
            torch._foreach_copy_(self._live, last)
            self._lost = beyond(self._finite.items())
            end = "no finite copy exists: load a checkpoint" if self._lost else "all went back to the last finite copy"
            warnings.warn(f"buffer {_list(bad)} was non-finite before step {max(0, self.number)}: a forward in train "
                          f"mode ran outside of guard.open() and guard.step(); {end}", stacklevel=4)
        self._versions = [b._version for b in self.net.buffers()]

    @torch.no_grad()
    def see_batch(self, images: Any, labels: Any = ...) -> Any:
        """Look at one micro-batch. Returns labels that are safe to run with: those out of range become 0.

        see_batch(batch) returns a batch of the same type, and leaves the raw one as it is. Both take tensors, or nests
        of mappings, dataclasses, lists and tuples. Floats must be finite (a mask must be bool: -inf counts as bad).
        Class labels are integers in `labels`, in a mapping or dataclass only under LABELS; all other integers pass. A
        label out of range rejects the step, but the step must run: on CUDA it would be a device assert."""
        batch = self._safe(images, "input", False)
        return batch if labels is ... else self._safe(labels, "label", True)

    def _safe(self, tree: Any, flag: str, classes: bool) -> Any:
        if isinstance(tree, Tensor):
            if tree.dtype in CHECKED and tree.numel():  # among labels: soft labels, regression targets
                self._see(flag, magnitude(tree))
            elif classes and tree.numel() and tree.dtype != torch.bool and self.num_classes is not None:
                wrong = (tree != tree.clamp(0, self.num_classes - 1)) & (tree != self.ignore_index)
                self._squares_of["label"].masked_fill_(wrong.any().to(self.device), math.inf)
                return tree.masked_fill(wrong, 0)
            return tree
        if isinstance(tree, list | tuple):
            new = [self._safe(x, flag, classes) for x in tree]
            if all(a is b for a, b in zip(new, tree, strict=True)):
                return tree
            return type(tree)(*new) if hasattr(tree, "_fields") else type(tree)(new)
        items, put = tree, type(tree).__setitem__ if isinstance(tree, Mapping) else object.__setattr__
        if not isinstance(tree, Mapping):
            items = {f.name: getattr(tree, f.name) for f in fields(tree)} if is_dataclass(tree) else {}
        safe = {key: self._safe(x, *(("label", True) if key in LABELS else (flag, False))) for key, x in items.items()}
        changed = [key for key in safe if safe[key] is not items[key]]
        tree = copy.copy(tree) if changed else tree  # the caller's own batch stays raw
        for key in changed:
            put(tree, key, safe[key])
        return tree

    @torch.no_grad()
    def see_loss(self, loss: Tensor) -> None:
        """The loss of one micro-batch, one number, before the loss scale."""
        if loss.numel() != 1:
            raise ValueError(f"guard.see_loss() takes the mean loss, one number, and got shape {tuple(loss.shape)}")
        self._losses.append(loss.detach().float().reshape(()))
        self._see("loss", self._losses[-1])

    @torch.no_grad()
    def see_state(self, **trees: Any) -> None:
        """Before decide() or step(), now and then: see_state(param=dict(net.named_parameters()),
        optstate=optimizer.state). One read, no sync. A poisoned moment then reaches no weight."""
        for flag, tree in trees.items():
            floats = (t for _, t in named_tensors(tree) if t.dtype in CHECKED and t.numel())
            for tensors in _alike(t for t in floats if t.device.type == self.device.type):
                self._see(flag, largest(tensors).amax())

    def _see(self, flag: str, magnitude: Tensor) -> None:
        if not self._opened:
            raise RuntimeError("guard.open() is missing: call it once at the begin of each step, before see_batch()")
        # One kernel. NaN and inf stay. The factor makes the square of LIMIT, and of anything above, infinite.
        magnitude = magnitude.to(self.device, non_blocking=True)
        self._squares_of[flag].addcmul_(magnitude, magnitude, value=2.0**128 / LIMIT**2)

    @torch.no_grad()
    def raise_flag(self, name: str, value: float | Tensor = 1.0) -> None:
        """Any of FLAGS, between open() and decide() (before decide() of any rank). A value of 0 raises nothing."""
        if isinstance(value, Tensor):
            self._squares_of[name].masked_fill_(value != 0, math.inf)
        elif value and name == "signal":
            self.tell(name, float(value))
        elif value:
            self._squares_of[name].fill_(math.inf)

    @torch.no_grad()
    def tell(self, name: str, value: float | Tensor) -> None:
        """Between open() and decide(): a number (exact up to 2^24) that rejects nothing; 0 where nothing is told.
        `verdict.told[name]` is the largest of all ranks."""
        self._down[self._names.index(name)].fill_(value)

    @torch.no_grad()
    def again(self) -> None:
        """Take this step from its beginning: flags down, buffers as open() found them. Before decide()."""
        self._seen.zero_()
        self._losses.clear()
        if self._live:
            torch._foreach_copy_(self._live, self._saved_parts)

    @torch.no_grad()
    def step(self, optimizer: Any, scaler: Any = None, *, clip: float | None = None) -> Tensor:
        """Measure the gradients, decide once for all ranks, step or do not, put the buffers back.

        Returns the verdict, 0-dim fp32 on the device, 1.0 = rejected. Replaces optimizer.step() and
        scaler.step(optimizer); zero_grad() and scaler.update() stay the caller's.

        optimizer: any torch optimizer, or a list of them for one verdict. Those with `_step_supports_amp_scaling`
            (fused AdamW, Adam, SGD, Adagrad; ClippedAdamW) skip on the device by `found_inf`, without a host sync;
            verdict() raises if a weight moved in the first such skip. For any other, for sharded parameters, and at the
            first update of a parameter (a fused SGD that skips it keeps uninitialised momentum) the verdict is read,
            one sync, and a rejected step() is not called.
        scaler: GradScaler or LossScaler. Gradients are unscaled here, unless the caller has done so. Every rank's
            scaler hears the verdict of all ranks: the loss scales stay equal.
        clip: largest gradient norm. Do not call clip_grad_norm_() before: a norm of inf makes every gradient 0 or NaN,
            and a step of zeros looks fine."""
        if self._lost:
            raise RuntimeError(f"buffer {_list(self._lost)} was non-finite before the step and no finite copy exists: "
                               "load a checkpoint")
        optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        scaler = scaler if scaler is not None and scaler.is_enabled() else None
        scales, norms = [], []
        for o in optimizers:
            scales.append(self._unscale(o, scaler) if scaler else None)
            some = gradient_norms((p.grad for p in _with_gradient(o)), self.device)
            norms.append(some if scales[-1] is None else some / scales[-1])
        norm = torch.linalg.vector_norm(torch.cat(norms))
        self._see("grad", norm)
        bad = self.decide()
        if clip:
            nn.utils.clip_grads_with_norm_([p for o in optimizers for p in _with_gradient(o)], clip, norm)
        if scaler:
            # The scaler hears the verdict of all ranks by public means: update() backs off when any optimizer that it
            # unscaled had an inf. So it unscales one more, whose only gradient is inf where the step is rejected.
            if optimizers[0] not in self._voters:  # one for each: two steps may come before one update()
                self._voters[optimizers[0]] = torch.optim.SGD([torch.zeros_like(bad).requires_grad_()])
            voter = self._voters[optimizers[0]]
            voter.param_groups[0]["params"][0].grad = torch.zeros_like(bad).masked_fill(bad > 0, math.inf)
            scaler.unscale_(voter)
        on_device = [self._skips(o) for o in optimizers]
        rejected = not all(on_device) and float(bad) > 0  # the one host sync
        moved, self._on_trial = torch.zeros((), device=self.device), []
        for o, scale, trusted in zip(optimizers, scales, on_device, strict=True):
            if not rejected:
                moved += self._call(o, scale, bad, trusted)
        stats = {"loss": torch.stack([x.to(self.device) for x in self._losses]).mean()} if self._losses else {}
        self.close(bad, **stats, grad_norm=norm, moved=moved)
        return bad

    def _skips(self, optimizer: Any) -> bool:
        """Whether the verdict may stay on the device: this optimizer skips by itself, and its parameters have state."""
        if optimizer not in self._stepped:
            closure = inspect.signature(optimizer.step).parameters.get("closure")
            if closure and closure.default is closure.empty:
                raise TypeError(f"guard.step() cannot serve {type(optimizer).__name__}: its step(closure) computes new "
                                "gradients inside, where no guard can look")
        parameters, known = _with_gradient(optimizer), self._stepped.setdefault(optimizer, set())
        sharded = any(hasattr(p, "full_tensor") for p in parameters)
        return getattr(optimizer, "_step_supports_amp_scaling", False) and known.issuperset(parameters) and not sharded

    def _call(self, optimizer: Any, scale: Tensor | None, bad: Tensor, trusted: bool) -> Tensor | float:
        """optimizer.step(). Returns 1.0 where it moved something in a rejected step; watched until the first one."""
        witnesses, known = [], self._stepped[optimizer]
        if trusted and "skips" not in known:
            self._on_trial.append(optimizer)
            for group in optimizer.param_groups:  # the smallest parameter of each group, and its state
                p = min((p for p in group["params"] if p.grad is not None), key=Tensor.numel, default=None)
                witnesses += [t for _, t in named_tensors([p, optimizer.state.get(p, {})])]
        before = [t.detach().clone() for t in witnesses]
        if trusted or scale is not None:
            optimizer.grad_scale, optimizer.found_inf = scale, bad
        with torch.enable_grad():
            optimizer.step()
        if trusted or scale is not None:
            del optimizer.grad_scale, optimizer.found_inf
        known.update(_with_gradient(optimizer))
        differ = [(a.nan_to_num() != b.nan_to_num()).any() for a, b in zip(witnesses, before, strict=True)]
        return torch.stack([d.to(self.device) for d in differ]).any() * bad if differ else 0.0

    def _unscale(self, optimizer: Any, scaler: Any) -> Tensor | None:
        """Unscale the gradients. Returns the scale where the kernel must divide: GradScaler refuses fp16 gradients."""
        half = any(p.grad.dtype == torch.float16 for p in _with_gradient(optimizer))
        if half and getattr(optimizer, "_step_supports_amp_scaling", False):
            return scaler.scale(torch.ones((), device=self.device))
        try:
            scaler.unscale_(optimizer)
        except RuntimeError as error:
            if "already been called" not in str(error):  # the caller has unscaled them
                raise
        return None

    @torch.no_grad()
    def decide(self) -> Tensor:
        """After the last backward, on every rank: 0-dim fp32, 1.0 if a flag is up on any rank. A signal is no fault."""
        self._copy_now()
        for buffers in self._checked:
            self._see("buffer", magnitude(buffers))
        torch.where(self._squares < math.inf, self._down, self._up, out=self._flags)  # NaN is not below
        if self.together:
            dist.all_reduce(self._flags, op=dist.ReduceOp.MAX)
        guilty = self._flags[:FAULTS].amax()
        return guilty.clamp(max=1) if self.together else guilty

    def _copy_now(self) -> None:
        self.decided = True
        if self._live:
            torch._foreach_copy_(self._now_parts, self._live)

    @torch.no_grad()
    def close(self, found_inf: Tensor | float, **stats: Tensor | float) -> None:
        """End the step. `found_inf`: 1.0 or True = rejected. `stats`: 0-dim device tensors, or numbers.

        Everything between open() and the end of close() stays on the device, so a CUDA graph can hold it.
        """
        if not isinstance(found_inf, Tensor):
            found_inf = torch.full((), float(found_inf), device=self.device)
        if not self.decided:  # nobody called decide()
            self._copy_now()
        if self._live:
            torch.where(found_inf > 0, self._saved, self._now, out=self._now)
            torch._foreach_copy_(self._live, self._now_parts)
        self._versions = [b._version for b in self.net.buffers()]
        on_device = {name: value for name, value in stats.items() if isinstance(value, Tensor)}
        told = [self._flags, found_inf, *on_device.values()]
        if self._row is None or tuple(on_device) != self._keys:
            wide = torch.float32 if self.device.type == "mps" else torch.float64  # counts updates exactly
            self._row = torch.zeros(len(self._names) + 1 + len(on_device), dtype=wide, device=self.device)
            self._cells = [self._row[: len(self._names)], *self._row[len(self._names) :].unbind()]
            self._keys = tuple(on_device)
            self._hosts = deque(torch.empty_like(self._row, device="cpu", pin_memory=self._row.is_cuda) for _ in "123")
        for dtype in {t.dtype for t in told}:  # one kernel copies all numbers of one dtype
            which = [i for i, t in enumerate(told) if t.dtype == dtype]
            torch._foreach_copy_([self._cells[i] for i in which], [told[i] for i in which])
        self._numbers = {name: float(value) for name, value in stats.items() if name not in on_device}
        self._due, self._opened = True, False

    def verdict(self) -> Verdict | None:
        """Once after each step(), close() or replay of a graph that holds close(): sends this step's numbers to the
        host. Returns the oldest verdict that was not told yet; None if it is too young (lag)."""
        if self._row is None:  # before the first step
            return None
        self._hosts.rotate()  # of three at most two are under way
        host, event = self._hosts[0], None
        host.copy_(self._row, non_blocking=True)
        if self._row.is_cuda:
            event = torch.cuda.current_stream(self._row.device).record_event()
        self._pending.append((self.number, host, event, self._keys, self._numbers, self._on_trial))
        self._due = self._opened = False
        return self._read() if len(self._pending) > (1 if self.lag else 0) else None

    def flush(self) -> Verdict | None:
        """Wait for everything under way; the last verdict, or None."""
        last = self.verdict() if self._due else None
        while self._pending:
            last = self._read()
        return last

    def _read(self) -> Verdict:
        step, host, event, keys, numbers, on_trial = self._pending.popleft()
        if event:
            event.synchronize()  # waits for that step's numbers, not for the device
        row, n = host.tolist(), len(self._names)
        flags, rejected = dict(zip(self._names, row[:n], strict=True)), row[n] > 0
        stats = numbers | dict(zip(keys, row[n + 1 :], strict=True))
        self.steps += 1
        self.skipped += rejected
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if rejected else 0
        self._stuck = self._stuck + 1 if rejected and flags["buffer"] else 0
        if stats.pop("moved", 0.0):
            names = _list(sorted({type(o).__name__ for o in on_trial}))
            raise RuntimeError(f"step {step} was rejected, and {names} moved a weight or its state all the same: its "
                               "step() ignores found_inf. Set optimizer._step_supports_amp_scaling = False before "
                               "training; guard.step() then does not call it in a rejected step")
        reasons = []
        if rejected:
            for optimizer in on_trial:
                self._stepped[optimizer].add("skips")
            reasons = [name for name in FLAGS[:FAULTS] if flags[name] > 0]
            if "grad" not in reasons and (not reasons or not stats.get("grad_norm", 0.0) <= LIMIT):
                reasons.append("grad")
        spikes = self.spikes.sentences(stats) if self.spikes and not rejected else []
        told, guilty = {name: flags[name] for name in self._names[len(FLAGS) :]}, int(max(row[:FAULTS])) - 1
        return Verdict(step, not rejected, tuple(reasons), stats, told, int(flags["signal"]), guilty, tuple(spikes))

    def state_dict(self) -> dict[str, Any]:
        """Counters and spike statistics: plain numbers. Pending verdicts are read (waited for) first."""
        self.flush()
        spikes = self.spikes.seen if self.spikes else {}
        return {"steps": self.steps, "skipped": self.skipped, "skipped_in_a_row": self.skipped_in_a_row,
                "spikes": {name: list(row) for name, row in spikes.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps, self.skipped = int(state["steps"]), int(state["skipped"])
        self.skipped_in_a_row, self.number = int(state["skipped_in_a_row"]), self.steps - 1
        if self.spikes:
            self.spikes.seen = {name: list(row) for name, row in state["spikes"].items()}


def _list(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")


def _with_gradient(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def check_state(net: nn.Module, optimizer_state: Any = None, ema: Any = None,
                lawful: Collection[str] = ()) -> list[str]:
    """Names of tensors beyond LIMIT in parameters, buffers (but `lawful` ones, see Guard.watch), optimizer state, EMA.

    For now and then, and before every save. `optimizer_state`, `ema`: nests of tensors (a state_dict will do), `ema`
    also a module. One read of everything, one sync a device and dtype."""
    ema = ema.state_dict() if isinstance(ema, nn.Module) else ema
    tree = {"param": dict(net.named_parameters()), "optimizer": optimizer_state, "ema": ema,
            "buffer": {name: b for name, b in net.named_buffers() if name not in lawful}}
    return [name.replace(".", " ", 1) for name in beyond(named_tensors(tree))]


def demo() -> None:
    """A BatchNorm network under plain AdamW; an inf behind its first layer at step 3."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    optimizer, guard = torch.optim.AdamW(net.parameters()), Guard(net, num_classes=4, lag=False)
    x, y = torch.randn(32, 8), torch.randint(0, 4, (32,))
    for step in range(5):
        before = copy.deepcopy([net.state_dict(), optimizer.state_dict()])
        guard.open(step)
        hidden = net[0](x) * (math.inf if step == 3 else 1.0)  # one overflow
        loss = nn.functional.cross_entropy(net[1:](hidden), guard.see_batch(x, y))
        guard.see_loss(loss)
        optimizer.zero_grad()
        loss.backward()
        poisoned = check_state(net)
        guard.step(optimizer)
        verdict = guard.verdict()
        print(f"step {step}: {'accepted' if verdict.accepted else 'rejected'} {verdict.reasons} {verdict.stats}")
        if not verdict.accepted:
            old, new = (dict(named_tensors(tree)) for tree in (before, [net.state_dict(), optimizer.state_dict()]))
            same = all(torch.equal(new[name], t) for name, t in old.items())
            print(f"  bad after the forward: {poisoned}\n  {len(new)} tensors are bit-identical to before: {same}")


if __name__ == "__main__":
    demo()
