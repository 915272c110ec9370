"""
Guards: see a non-finite number on the device, and keep it out of the weights.

A NaN in the loss is the last symptom. The inf that made it was born several modules upstream, and it leaves by doors
that no gradient check watches: one overflowing forward writes inf into BatchNorm's running variance, the optimizer
skips the step, the training loss looks fine, and every evaluation from then on is NaN. A label of 1000 for a 10-way
head is no NaN at all: on CUDA it is a device assert, and the process is gone before anything can be saved.

So one small vector of flags lives on the device. Every check only raises a flag; nothing is read by the host:

    guard.open(step)                                flags down, buffers copied aside (kilobytes)
    labels = guard.see_batch(images, labels)        inputs finite? labels in range? -> labels that are safe to use
    guard.see_loss(loss)                            every micro-batch: one NaN of eight poisons the sum all the same
    bad = guard.decide()                            buffers looked at; the ranks agree: ONE all-reduce, of flags
    result = optimizer.step(skip=bad)               the gradient's own verdict joins here: result.found_inf
    guard.close(result.found_inf, loss=loss, ...)   rejected? the buffers go back, by a select on the device
    verdict = guard.verdict()                       on the host, one step late: nobody waited for it

Three rules are behind it. (1) Flags travel between ranks, never values: an all-reduce MAX may lose a NaN. (2) A
rejection is a select (`where`), never a product: 0 * NaN is NaN, and `lerp` with weight 0 is no better. (3) Compare so
that NaN fails: `not (x <= limit)`; `x > limit` is False for NaN. And "finite" means below 1.8e19 (see LIMIT).

Also here: SpikeDetector, check_state (before a save), first_step_checks, and Probes (headroom before anything
overflows). What this file does not do: it does not find the operation that made the number (autopsy.py does), and it
does not cure. To copy it: it needs torch, nothing else. `python guards.py` puts an inf into a small network and shows
that nothing of it stays.
"""
from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

# All but the last reject the step. "veto" is the caller's own; "signal" carries the number of a stop request.
FLAGS = ("input", "label", "loss", "grad", "buffer", "act", "param", "optstate", "veto", "signal")
LIMIT = 1.8e19  # just under sqrt(3.4e38): the square of anything above is inf in fp32, so it is as good as infinite
CHECKED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SLOTS = 2  # steps whose numbers are on their way to the host: this one and the one before


def magnitude(x: Tensor) -> Tensor:
    """Largest magnitude of x (any float dtype, not empty) as 0-dim fp32, NaN if it holds one: one read, no sync."""
    x = x.detach()
    if x.is_cpu:  # where the norm is a plain loop: 15 ms for 11 million numbers, which aminmax reads in 1.5
        low, high = torch.aminmax(x) if x.is_contiguous() else (x.amin(), x.amax())  # aminmax would copy it first
        return torch.maximum(low.neg(), high).float()
    return torch.linalg.vector_norm(x, math.inf).float()


def largest(tensors: list[Tensor]) -> Tensor:
    """Largest magnitude of each tensor as 1-D fp32; NaN and inf stay. Same device and dtype: one pass, no sync."""
    if tensors[0].is_cpu:
        return torch.stack([magnitude(t) for t in tensors])
    return torch.stack([norm.float() for norm in torch._foreach_norm([t.detach() for t in tensors], math.inf)])


def named_floats(tree: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """(dotted name, tensor) for every non-empty float tensor in nested dicts and lists."""
    if isinstance(tree, Tensor):
        if tree.dtype in CHECKED and tree.numel():
            yield prefix, tree
    elif isinstance(tree, Mapping | list | tuple):
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            key = "" if isinstance(key, Tensor) else str(key)  # optimizer.state is keyed by the parameters themselves
            yield from named_floats(value, ".".join(filter(None, (prefix, key))))


@dataclass(frozen=True)
class Verdict:
    """What became of one step, on the host. `rank` is the (highest) guilty rank, -1 if no flag tells."""

    step: int
    accepted: bool
    reasons: tuple[str, ...]  # names of FLAGS; () when accepted
    stats: dict[str, float]  # what close() was given
    signal: int = 0
    rank: int = -1
    spikes: tuple[str, ...] = ()  # sentences of the SpikeDetector; a spike never rejects by itself


class SpikeDetector:
    """z-score of log(value), against a moving mean and variance that nothing non-finite or spiking can drag along.

    `see(name, value)` returns the number of standard deviations above the mean (inf for a non-finite value, 0.0 while
    warming up). A spike enters the statistics cut down to the threshold, so a lasting new level is learnt in time.
    """

    def __init__(self, threshold: float = 6.0, warmup: int = 50, momentum: float = 0.02):
        self.threshold, self.warmup, self.momentum = threshold, warmup, momentum
        self.seen: dict[str, list[float]] = {}  # name: [count, mean, variance] of the log

    def see(self, name: str, value: float) -> float:
        if not math.isfinite(value):
            return math.inf
        x = math.log(max(value, 1e-30))
        count, mean, variance = self.seen.get(name, [0, x, 0.0])
        std = max(math.sqrt(variance), 0.05)  # a loss that moves by less than 5% spikes at nothing
        z = (x - mean) / std if count >= self.warmup else 0.0
        x = min(x, mean + self.threshold * std) if count >= self.warmup else x
        rate = max(self.momentum, 1.0 / (count + 1))
        variance = (1 - rate) * (variance + rate * (x - mean) ** 2)
        self.seen[name] = [count + 1, mean + rate * (x - mean), variance]
        return z


class Guard:
    """The flags, the buffers and the verdict of a step. One object a process; see the top of the file for its order.

    `net`: the bare module (no DDP or compile wrapper, so that names are its own). `num_classes`: labels must be in
    [0, num_classes) or equal `ignore_index`; None: labels are no classes. `lag=True`: verdict() tells of the step
    before and never stalls the device; `lag=False` (hunting): of this step, and waits. Before changing `lag`: flush().
    Create it after init_process_group.
    """

    def __init__(self, net: nn.Module, *, num_classes: int | None = None, device: torch.device | str = "cpu",
                 lag: bool = True, ignore_index: int = -100, spikes: SpikeDetector | None = None):
        self.device, self.lag = torch.device(device), lag
        self.num_classes, self.ignore_index = num_classes, ignore_index
        self.together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if self.together else 0
        self.spikes = spikes or SpikeDetector()
        self.steps = self.skipped = self.skipped_in_a_row = 0
        self.step = 0
        # For each flag the sum of the squares of what was seen: it is up unless that is finite. Beside it what the flag
        # says while it is down: 0, but "signal" its number. Up, it says 1 + rank: MAX names a guilty machine too.
        self._seen = torch.zeros(2, len(FLAGS), device=self.device)
        self._squares, self._down = self._seen.unbind()
        self._squares_of = dict(zip(FLAGS, self._squares.unbind(), strict=True))
        self._up = torch.tensor(self.rank + 1.0, device=self.device)
        self._flags = torch.zeros(len(FLAGS), device=self.device)
        self._pending: deque[tuple[int, int, dict[str, float]]] = deque()
        self._keys: tuple[str, ...] | None = None
        self._due = False
        self.watch(net)

    def watch(self, net: nn.Module) -> None:
        """Take `net`'s buffers into care; again after one was exchanged for another tensor. Syncs once.

        `lawful` collects float buffers that are infinite from the start and hold no NaN: masks. They are put back
        like the others, but their infinities are no news. Running statistics are never lawful.
        """
        self.lawful: set[str] = set()
        alike: dict[tuple[torch.dtype, bool], list[Tensor]] = {}  # by dtype, and whether they have to be finite
        for name, b in net.named_buffers():
            expanded = any(stride == 0 and n > 1 for stride, n in zip(b.stride(), b.shape, strict=True))
            if not b.numel() or b.device.type != self.device.type or expanded:  # what is expanded cannot change
                continue
            if b.dtype in CHECKED and "running_" not in name and float(magnitude(b)) > LIMIT:  # False for NaN
                self.lawful.add(name)
            alike.setdefault((b.dtype, b.dtype in CHECKED and name not in self.lawful), []).append(b)
        # As bytes they all go into one piece of memory, and one kernel copies them. The widest dtype lies first: each
        # then begins at a multiple of its size, and can be read there as what it is.
        kinds = sorted(alike, key=lambda kind: -kind[0].itemsize)
        self._live = [b.unsqueeze(-1).view(torch.uint8) for kind in kinds for b in alike[kind]]
        self._saved, self._saved_parts = _room_for(self._live, self.device)  # before the step
        self._now, self._now_parts = _room_for(self._live, self.device)  # after it
        self._checked, at = [], 0
        for dtype, finite in kinds:
            end = at + sum(b.nbytes for b in alike[dtype, finite])
            if finite:
                self._checked.append(self._now.view(torch.uint8)[at:end].view(dtype))
            at = end

    @torch.no_grad()
    def open(self, step: int) -> None:
        """Begin a step (attempted, not update): flags down, buffers aside."""
        if self._due:  # nobody asked for the last one's verdict: it still counts
            self.verdict()
        self.step = step
        self._seen.zero_()
        if self._live:
            torch._foreach_copy_(self._saved_parts, self._live)

    @torch.no_grad()
    def see_batch(self, images: Any, labels: Any) -> Any:
        """Look at one micro-batch (tensors, or nests of them); returns labels safe to run with: out of range becomes 0.

        The step is rejected all the same. But it must *run*: an index out of range is a device assert on CUDA. Keep the
        raw labels for a post-mortem. A mask that travels in the batch has to be bool: its -inf would count as bad.
        """
        for x in tree_leaves(images):
            if isinstance(x, Tensor) and x.dtype in CHECKED and x.numel():
                self._see("input", magnitude(x))
        return tree_map(self._safe_labels, labels)

    def _safe_labels(self, y: Any) -> Any:
        if not isinstance(y, Tensor) or not y.numel() or y.dtype == torch.bool:
            return y
        if y.dtype in CHECKED:  # soft labels, regression targets
            self._see("label", magnitude(y))
            return y
        if self.num_classes is None:
            return y
        wrong = (y != y.clamp(0, self.num_classes - 1)) & (y != self.ignore_index)
        self._squares_of["label"].masked_fill_(wrong.any(), math.inf)
        return y.masked_fill(wrong, 0)

    @torch.no_grad()
    def see_loss(self, loss: Tensor) -> None:
        """0-dim loss of one micro-batch, before the loss scale."""
        self._see("loss", loss.float())

    @torch.no_grad()
    def see_state(self, **trees: Any) -> None:
        """On steps of your choice, before decide(): `see_state(param=dict(net.named_parameters()), optstate=...)`.

        One foreach read of the tensors on this device; no sync. It keeps a poisoned moment from reaching a weight.
        """
        for flag, tree in trees.items():
            for tensors in _alike(t for _, t in named_floats(tree) if t.device.type == self.device.type):
                self._see(flag, largest(tensors).amax())

    def _see(self, flag: str, magnitude: Tensor) -> None:
        # One kernel; NaN and inf stay. The factor makes the square of LIMIT, and of anything above, infinite.
        self._squares_of[flag].addcmul_(magnitude, magnitude, value=2.0**128 / LIMIT**2)

    @torch.no_grad()
    def raise_flag(self, name: str, value: float | Tensor = 1.0) -> None:
        """Raise a flag unless `value` (0-dim) is 0: a veto, a probe's finding; "signal" keeps the highest number."""
        if isinstance(value, Tensor):
            self._squares_of[name].masked_fill_(value != 0, math.inf)
        elif value and name == "signal":
            self._down[-1].clamp_(min=float(value))
        elif value:
            self._squares_of[name].fill_(math.inf)

    @torch.no_grad()
    def decide(self) -> Tensor:
        """After the last backward, on every rank: 0-dim fp32, 1.0 if a flag is up on any rank. A signal is no fault."""
        if self._live:
            torch._foreach_copy_(self._now_parts, self._live)
        for buffers in self._checked:
            self._see("buffer", magnitude(buffers))
        torch.where(self._squares < math.inf, self._down, self._up, out=self._flags)  # NaN is not below
        if self.together:
            dist.all_reduce(self._flags, op=dist.ReduceOp.MAX)
        guilty = self._flags[:-1].amax()
        return guilty.clamp(max=1) if self.together else guilty

    @torch.no_grad()
    def close(self, found_inf: Tensor, **stats: Tensor | float) -> None:
        """End the step. `found_inf`: 1.0 = rejected (0-dim, device). `stats`: 0-dim device tensors, or numbers.

        Everything from open() to here stays on the device, so that a CUDA graph can hold it.
        """
        if self._live:
            torch.where(found_inf > 0, self._saved, self._now, out=self._now)
            torch._foreach_copy_(self._live, self._now_parts)
        on_device = {name: value for name, value in stats.items() if isinstance(value, Tensor)}
        told = [self._flags, found_inf, *on_device.values()]
        if tuple(on_device) != self._keys:
            self._make_room(tuple(on_device), told)
        for which, cells in self._cells:
            torch._foreach_copy_(cells, [told[i] for i in which])
        self._numbers = {name: float(value) for name, value in stats.items() if name not in on_device}
        self._due = True

    def _make_room(self, keys: tuple[str, ...], told: list[Tensor]) -> None:
        while self._pending:  # the old layout's numbers are read before its memory goes
            self._read()
        cuda, width = self.device.type == "cuda", len(FLAGS) + 1 + len(keys)
        self._keys, self._slot = keys, -1
        wide = torch.float32 if self.device.type == "mps" else torch.float64  # counts updates exactly
        self._row = torch.zeros(width, dtype=wide, device=self.device)
        self._host = torch.zeros(SLOTS, width, dtype=wide, pin_memory=cuda)
        self._events = [torch.cuda.Event() for _ in range(SLOTS)] if cuda else []
        cells = [self._row[: len(FLAGS)], *self._row[len(FLAGS) :].unbind()]
        self._cells = []  # by dtype, because one kernel copies only what is of one: which of `told`, and where to
        for dtype in {t.dtype for t in told}:
            which = [i for i, t in enumerate(told) if t.dtype == dtype]
            self._cells.append((which, [cells[i] for i in which]))

    def verdict(self) -> Verdict | None:
        """Call once after each close(), or after the replay of a graph that holds it: sends this step's numbers to the
        host, and returns the oldest verdict not told yet; None if that is too young (lag)."""
        slot = self._slot = (self._slot + 1) % SLOTS
        self._host[slot].copy_(self._row, non_blocking=True)
        if self._events:
            self._events[slot].record(torch.cuda.current_stream(self._row.device))
        self._pending.append((self.step, slot, self._numbers))
        self._due = False
        return self._read() if len(self._pending) > (1 if self.lag else 0) else None

    def flush(self) -> Verdict | None:
        """Wait for everything under way; the last verdict, or None."""
        last = self.verdict() if self._due else None
        while self._pending:
            last = self._read()
        return last

    def _read(self) -> Verdict:
        step, slot, numbers = self._pending.popleft()
        if self._events:
            self._events[slot].synchronize()  # waits for that step's numbers, not for the device
        row, n = self._host[slot].tolist(), len(FLAGS)
        flags, rejected = dict(zip(FLAGS, row[:n], strict=True)), row[n] > 0
        stats = numbers | dict(zip(self._keys, row[n + 1 :], strict=True))
        self.steps += 1
        self.skipped += rejected
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if rejected else 0
        reasons, spikes = [], []
        if rejected:
            reasons = [name for name in FLAGS[:-1] if flags[name] > 0]
            if "grad" not in reasons and (not reasons or not stats.get("grad_norm", 0.0) <= LIMIT):
                reasons.append("grad")
        for name in ("loss", "grad_norm"):
            if name in stats and not rejected:
                z = self.spikes.see(name, stats[name])
                if not z <= self.spikes.threshold:
                    spikes.append(f"{name} {stats[name]:.4g} is {z:.1f} standard deviations above its recent mean")
        guilty = int(max(row[: n - 1])) - 1
        return Verdict(step, not rejected, tuple(reasons), stats, int(flags["signal"]), guilty, tuple(spikes))

    def state_dict(self) -> dict[str, Any]:
        """Counters and spike statistics: plain numbers. Pending verdicts are read (waited for) first."""
        self.flush()
        return {"steps": self.steps, "skipped": self.skipped, "skipped_in_a_row": self.skipped_in_a_row,
                "spikes": {name: list(row) for name, row in self.spikes.seen.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps, self.skipped = int(state["steps"]), int(state["skipped"])
        self.skipped_in_a_row = int(state["skipped_in_a_row"])
        self.spikes.seen = {name: list(row) for name, row in state["spikes"].items()}


def _room_for(live: list[Tensor], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Memory for these bytes: all of it as int64, which is quicker to select from, and views of the tensors' shapes."""
    sizes = [b.numel() for b in live]
    room = torch.zeros(math.ceil(sum(sizes) / 8), dtype=torch.int64, device=device)
    parts = room.view(torch.uint8)[: sum(sizes)].split(sizes)
    return room, [part.view(b.shape) for part, b in zip(parts, live, strict=True)]


def _alike(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Grouped by device and dtype: foreach kernels are one launch only for lists of a kind."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for t in tensors:
        groups.setdefault((t.device, t.dtype), []).append(t)
    return groups.values()


def check_state(net: nn.Module, optimizer_state: Any = None, ema: Any = None,
                lawful: Collection[str] = ()) -> list[str]:
    """Names of tensors beyond LIMIT in parameters, buffers (but `lawful` ones, see Guard.watch), optimizer state, EMA.

    For every N-th step and before every save. `optimizer_state`, `ema`: nests of tensors (a state_dict will do), or a
    module. One read of everything in foreach kernels, one sync a device and dtype.
    """
    ema = ema.state_dict() if isinstance(ema, nn.Module) else ema
    named = dict(named_floats({"param": dict(net.named_parameters()), "optimizer": optimizer_state, "ema": ema,
                               "buffer": {k: b for k, b in net.named_buffers() if k not in lawful}}))
    bad: set[int] = set()
    for group in _alike(named.values()):
        bad.update(id(t) for t, top in zip(group, largest(group).tolist(), strict=True) if not top <= LIMIT)
    return [name.replace(".", " ", 1) for name, t in named.items() if id(t) in bad]


def first_step_checks(net: nn.Module, num_classes: int | None = None) -> list[str]:
    """Sentences about what will go wrong, after the first backward and before zero_grad. [] = nothing found. Syncs.

    `num_classes`: what the last Linear or Conv2d of `net` has to give; None for a net that does not classify.
    """
    named = [(n, p) for n, p in net.named_parameters() if p.requires_grad and p.numel()]
    unused = [n for n, p in named if p.grad is None]
    learns = {n for n, p in named if p.grad is not None and bool((p.grad != 0).any())}
    said = []
    if unused:
        said.append(f"{len(unused)} parameter(s) got no gradient (unused, or detached on the way): "
                    + ", ".join(unused[:5]) + (" ..." if len(unused) > 5 else ""))
    for n, p in named:
        top = float(p.detach().abs().max())
        if not top <= 1e4 or 0 < top < 1e-30:  # what memory held before: no initialiser gives such numbers
            said.append(f"{n} looks uninitialised: its largest magnitude is {top:.3g}")
        elif top == 0 and p.dim() > 1 and n not in learns and len(learns) > len(named) / 2:  # not adaLN-zero's start
            said.append(f"{n} is all zero and its gradient is zero too: it will never learn")
    layers = [(n, len(m.weight)) for n, m in net.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    if num_classes is not None and layers and layers[-1][1] != num_classes:
        name, outputs = layers[-1]
        said.append(f"{name} has {outputs} outputs but the data has {num_classes} classes")
    return said


class Reading(NamedTuple):
    """One module at a probed step. `headroom`: largest activation / the dtype's maximum (overflow at 1.0, NaN and inf
    stay). `underflow`: share of the non-zero gradients at its output that are below the dtype's smallest normal."""

    name: str
    dtype: torch.dtype
    amax: float
    headroom: float
    underflow: float


class Probes:
    """How near are activations to overflow, and gradients to underflow? On sampled steps (`--probe-every`).

        with probes: one forward and backward                   # attach, sample, detach
        for line in probes.warnings(loss_scale): print(line)    # the one sync

    Hooks only write device rows. torch.compile ignores hooks that come after it: attach() before compiling (they then
    stay, 0 graph breaks, activations only), or run the sampled step under torch.compiler.set_stance("force_eager").
    """

    def __init__(self, net: nn.Module, device: torch.device | str = "cpu"):
        self.modules = {n: m for n, m in net.named_modules() if n and not any(m.children())}
        self._rows = torch.zeros(len(self.modules), 2, device=device)
        self._dtypes: dict[str, torch.dtype] = {}
        self._handles: list[Any] = []

    def attach(self) -> None:
        self._rows.zero_()
        self._handles = [m.register_forward_hook(self._hook(n, *row.unbind()))
                         for (n, m), row in zip(self.modules.items(), self._rows, strict=True)]

    def detach(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def __enter__(self) -> Probes:
        self.attach()
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def _hook(self, name: str, amax: Tensor, underflow: Tensor):
        def on_gradient(g: Tensor) -> None:
            size, tiny = g.abs(), torch.finfo(g.dtype).tiny
            some = size > 0
            underflow.copy_(torch.maximum(underflow, (some & (size < tiny)).sum() / some.sum().clamp(min=1)))

        def on_output(module: nn.Module, args: Any, out: Any) -> None:
            for t in (out,) if isinstance(out, Tensor) else tree_leaves(out):
                if isinstance(t, Tensor) and t.is_floating_point() and t.numel():
                    low, high = torch.aminmax(t.detach())
                    amax.copy_(torch.maximum(amax, torch.maximum(-low, high)))  # maximum propagates NaN
                    self._dtypes[name] = t.dtype
                    if t.requires_grad and not torch.compiler.is_compiling():
                        t.register_hook(on_gradient)
        return on_output

    def read(self) -> list[Reading]:
        """Readings of the last sampled step, the least headroom left first. One sync."""
        readings = []
        for name, (amax, underflow) in zip(self.modules, self._rows.tolist(), strict=True):
            if name in self._dtypes:
                dtype = self._dtypes[name]
                readings.append(Reading(name, dtype, amax, amax / torch.finfo(dtype).max, underflow))
        return sorted(readings, key=lambda r: math.inf if math.isnan(r.headroom) else r.headroom, reverse=True)

    def warnings(self, loss_scale: float = 1.0) -> list[str]:
        """Sentences for modules over half of the dtype's maximum, or with more than half of their gradients tiny."""
        said = []
        for r in self.read():
            half = str(r.dtype).removeprefix("torch.")
            if not r.headroom <= 0.5:
                said.append(f"{r.name}: activations reach {r.amax:.4g}, {r.headroom:.0%} of {half}'s maximum; "
                            f"try --keep-fp32 '{r.name}' before it overflows")
            if not r.underflow <= 0.5:
                said.append(f"{r.name}: {r.underflow:.0%} of its gradients are below {half}'s smallest normal at loss "
                            f"scale {loss_scale:g}; more scale, or fp32 there")
        return said


def demo() -> None:
    """A BatchNorm network under fused AdamW; an inf behind its first layer at step 3."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
    optimizer.grad_scale = None
    guard = Guard(net, num_classes=10, lag=False)
    images, labels = torch.randn(32, 3, 8, 8), torch.randint(0, 10, (32,))

    def everything() -> list[Tensor]:
        return [*net.state_dict().values(), *dict(named_floats(optimizer.state_dict())).values()]

    for step in range(6):
        before = [t.clone() for t in everything()]
        guard.open(step)
        hidden = net[0](images) * (math.inf if step == 3 else 1.0)  # one overflow
        loss = nn.functional.cross_entropy(net[1:](hidden), guard.see_batch(images, labels))
        guard.see_loss(loss)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in net.parameters()])
        found_inf = torch.maximum(guard.decide(), (norm <= LIMIT).logical_not().float())
        poisoned = [name for name in check_state(net) if name.startswith("buffer")]
        optimizer.found_inf = found_inf  # the fused kernel itself skips: no branch, no sync
        optimizer.step()
        guard.close(found_inf, loss=loss, grad_norm=norm)
        optimizer.zero_grad()
        v = guard.verdict()
        print(f"step {v.step}: {'accepted' if v.accepted else 'rejected: ' + ' and '.join(v.reasons)}, {v.stats}")
        if not v.accepted:
            same = all(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))
            print(f"  bad after the forward: {', '.join(poisoned)}\n"
                  f"  now {len(before)} tensors (weights, moments, buffers) are bit-identical to before: {same}")


if __name__ == "__main__":
    demo()
