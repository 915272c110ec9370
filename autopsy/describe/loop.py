"""
Loop: in which order does it call what, at which rates, with which data?

All that the script asks of gradients, rates, modes, seeds and files from one step of an optimizer
to its next is one line, with how often it was so.
"""

from collections import Counter, deque
from math import inf
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..tensors import few, flat_tensors, numbers_of
from ..watch.deferred import params_of
from ..watch.events import OutermostSteps
from .trace import here, place

ORDERS = 4  # that are told
KEPT, INPUTS = 999, 99_999  # orders, and inputs of a network, that are told apart
LONGEST = 24  # calls of one
PERIOD = 6  # calls that may come again and again
WRITES = "write into weights"
UNREAD = 99  # losses
LAST = 10  # losses and norms of which the mean is told
SAMPLE = 1024  # numbers of a weight


class Course:
    """The first numbers of a row, the last, the lowest and the highest."""

    def __init__(self, of=LAST):
        self.first, self.last = [], deque(maxlen=of)
        self.low, self.high, self.rises = inf, -inf, 0

    def add(self, value):
        self.rises += bool(self.last) and value > self.last[-1]
        self.first += [value] * (len(self.first) < self.last.maxlen)
        self.last.append(value)
        self.low, self.high = min(self.low, value), max(self.high, value)

    def __str__(self):
        if self.low >= self.high:
            return f"{self.low:.3g}, always" if self.last else "not seen"
        first, last = (sum(part) / len(part) for part in (self.first, self.last))
        return f"{first:.3g} at first, {last:.3g} at the end, {self.low:.3g} to {self.high:.3g}"


class Call(NamedTuple):
    """What is called, and where."""

    what: str
    file: str
    line: int


class Calls:
    """Calls in a row; what comes again and again is one entry, with how often."""

    def __init__(self):
        self.entries = []  # (a call, or several entries; times)

    def add(self, call):
        entries = self.entries
        if len(entries) == LONGEST:
            entries[-1] = (call._replace(what="and more, up to"), 1)
            return
        entries.append((call, 1))
        for n in range(1, PERIOD + 1):
            now, before = entries[-n:], entries[-2 * n : -n]
            one = call if n == 1 else tuple(now)
            if len(entries) > n and entries[-n - 1][0] == one:
                entries[-n - 1 :] = [(one, entries[-n - 1][1] + 1)]
                return
            if now == before and n > 1:
                entries[-2 * n :] = [(one, 2)]
                return

    def drop(self, call):
        """The last entry, if it is this one."""
        if self.entries and self.entries[-1][0] == call:
            self.entries.pop()


def in_words(entries):
    """Entries (call, lowest and highest times). The name of a file is told where it changes."""
    said = None

    def words(one, low, high):
        nonlocal said
        if isinstance(one, Call):
            text = f"{one.what} {'' if one.file == said else one.file}:{one.line}"
            said = one.file
        else:
            text = f"[{', '.join(words(part, n, n) for part, n in one)}]"
        times = low if high == low else f"{low} to {high}"
        return text if times == 1 else f"{text} x {times}"

    return ", ".join(words(*entry) for entry in entries)


class Steps:
    """What was seen of the steps of an optimizer."""

    def __init__(self, optimizer):
        self.line = here()
        self.name = type(optimizer).__name__
        self.count = self.cut = self.clips = 0
        self.since = 0  # steps of the one whose steps part the orders
        self.rates = [Course(of=1) for _ in optimizer.param_groups]
        self.losses, self.norms = Course(), Course()
        self.unread = []  # losses, 0-dim on their device
        told = ("weight_decay", "betas", "momentum", "eps", "nesterov", "amsgrad", "maximize")
        self.groups = [
            f"{len(group['params'])} weights"
            + "".join(f", {key} {group[key]}" for key in told if group.get(key))
            for group in optimizer.param_groups
        ]

    def lines(self):
        times = Counter(self.groups).items()
        groups = few((f"{n} groups of {text}" if n > 1 else text for text, n in times), 3, "; ")
        yield f"{self.name} at {self.line}: {self.count} steps; {groups}"
        rates = (f"{r}{f', rises {r.rises} times' if r.rises else ''}" for r in self.rates)
        yield f"  lr {few(dict.fromkeys(rates), 3, '; ')}"
        yield f"  loss {self.losses}"
        cut = f"; {self.cut} of {self.clips} clips cut it" if self.clips else ""
        yield f"  gradient norm {self.norms}{cut}"


class Loop(OutermostSteps):
    """The calls of a loop, in their order."""

    def __init__(self, watch, titles):
        self.titles = titles
        self.hooks, self.recorder, self.names = watch.hooks, watch.recorder, watch.names
        self.deferred = watch.deferred
        self.calls = Calls()  # since the last step of `first`
        self.number = 0  # of calls, at the last step
        self.first = None  # the optimizer whose steps part the orders
        self.orders = {}  # calls: [how often, [lowest, highest times] of each]
        self.others = 0  # orders beyond those
        self.steps = WeakKeyDictionary()  # optimizer: Steps
        self.all = []
        self.losses, self.norm = [], 0.0  # losses since the last step, 0-dim on their device
        self.loaders = Counter()  # (line, text, data set): iterators
        self.modes = WeakKeyDictionary()  # network: {(its mode, with a graph?): calls}
        # network: {the same: [inputs, what each different one is told by]}
        self.inputs = WeakKeyDictionary()
        self.clips = []  # (parameters, did it cut them?) since the last step
        self.start = WeakIdKeyDictionary()  # weight: some of its numbers before the first step
        self.unheld = WeakIdKeyDictionary()  # the same of those in no optimizer, before a later one
        self.hooks.wrap(torch, "save", self._save)
        self.hooks.wrap(torch, "load", self._load)
        self.hooks.wrap(torch.optim.Optimizer, "load_state_dict", self._load_optimizer)

    def note(self, what, frames=None):
        self.calls.add(Call(what, *place(frames)))

    # Data, modes and files

    def iterated(self, loader):
        size = len(loader.dataset) if hasattr(loader.dataset, "__len__") else "?"
        order = type(loader.sampler).__name__
        if loader.batch_size is None:
            order = type(loader.batch_sampler or loader.sampler).__name__
        text = (
            f"DataLoader of {type(loader.dataset).__name__} ({size} samples), batches of "
            f"{loader.batch_size}, {order}, drop_last={loader.drop_last}, {loader.num_workers} "
            "workers"
        )
        whole = loader.dataset
        while isinstance(whole, torch.utils.data.Subset):
            whole = whole.dataset
        self.loaders[here(), text, id(whole)] += 1
        self.note("iter(DataLoader)")

    def seeded(self, kind):
        self.note(f"seed of {kind}")

    def switched(self, module, training):
        self.note("train()" if training else "eval()")

    def during(self, call, args, kwargs):
        module = call.function
        if any(True for _ in module.parameters()):
            self.titles.note(module)
            given = flat_tensors((args, kwargs))
            learns = any(t.requires_grad for t in (*module.parameters(), *given))
            graph = call.grad and learns
            modes = self.modes.setdefault(module, Counter())
            modes[module.training, graph] += 1
            if not graph:
                mode = "train" if module.training else "eval"
                self.note(f"{self.titles.of(module)} in {mode} mode without a graph")
            if given := [t for t in given if t.numel() > 1]:
                kinds = self.inputs.setdefault(module, {})
                seen = kinds.setdefault((module.training, graph), [0, set()])
                if seen[0] < INPUTS:
                    seen[0] += 1
                    seen[1].add(tuple(map(_told_by, given)))
        return ()

    def _save(self, original, x, *args, **kwargs):
        self.note(f"torch.save({_contents(x)})")
        return original(x, *args, **kwargs)

    def _load(self, original, *args, **kwargs):
        out = original(*args, **kwargs)
        self.note(f"torch.load() of {_contents(out)}")
        return out

    def loaded(self, module, state, answer):
        self.calls.drop(Call(WRITES, *place()))
        self.note(f"load_state_dict() of {self.titles.of(module)}, {len(state)} tensors")

    def _load_optimizer(self, original, optimizer, *args, **kwargs):
        self.note(f"load_state_dict() of {type(optimizer).__name__}")
        return original(optimizer, *args, **kwargs)

    # The order of calls

    def backward(self, losses):
        self.note("backward()")
        self.losses += [numbers_of(t.detach()).float().sum() for t in losses]

    def cleared(self, owner):
        self.note("zero_grad()")

    def unscaled(self, optimizer):
        self.note("unscale_()")

    def clipped(self, params, limit, norm):
        has = any(p.grad is not None for p in params)
        self.note(f"clip to {limit:g}{'' if has else ' of no gradient at all'}")
        self.clips = [*self.clips[-9:], ({id(p) for p in params}, float(norm) > limit)]

    def scheduled(self, scheduler):
        self.note(f"{type(scheduler).__name__}.step()")

    def wrote(self, line, weights, name, given):
        if self.recorder.first < inf:  # else it begins
            self.note(WRITES)

    def before_step(self, optimizer, losses, norm, moved):
        super().before_step(optimizer, losses, norm, moved)
        self.norm = norm
        for call in self.recorder.calls:
            if call.number > self.number and call.name == "grad":
                graph = bool(call.kwargs.get("create_graph"))
                self.note(f"autograd.grad(create_graph={graph})", call.frames)
        self.number = self.recorder.number
        for p in params_of(optimizer):
            if p not in self.start:
                self.start[p] = _sample(p)
        if self.all and not self.unheld:
            self.unheld.update((p, _sample(p)) for p in self._params() if p not in self.start)

    def uses(self, optimizer):
        if optimizer not in self.steps:
            self.steps[optimizer] = Steps(optimizer)
            self.all.append(self.steps[optimizer])
        seen = self.steps[optimizer]
        seen.count += 1
        seen.since += 1
        for course, group in zip(seen.rates, optimizer.param_groups, strict=False):
            course.add(float(group.get("lr", 0.0)))
        mine = {id(p) for p in params_of(optimizer)}
        for params, cut in self.clips:
            if not mine.isdisjoint(params):
                seen.clips += 1
                seen.cut += cut
        self.clips = [clip for clip in self.clips if mine.isdisjoint(clip[0])]
        seen.unread += self.losses
        self.losses = []
        if len(seen.unread) > UNREAD:
            self._read(seen)
        seen.norms.add(self.norm)
        self.note(f"{seen.name}.step()")
        if self.first is None or seen.since > PERIOD:  # the other has ended
            self.first = seen
        if seen is self.first:
            self._is_one_order()

    def skipped(self, optimizer):
        self.note("step skipped by the loss scaler")

    def _is_one_order(self):
        entries, self.calls = self.calls.entries, Calls()
        key = tuple(call for call, _ in entries)
        if key in self.orders or len(self.orders) < KEPT:
            order = self.orders.setdefault(key, [0, [[n, n] for _, n in entries]])
            order[0] += 1
            for span, (_, n) in zip(order[1], entries, strict=True):
                span[:] = min(span[0], n), max(span[1], n)
        else:
            self.others += 1
        for seen in self.all:
            seen.since = 0

    def _read(self, seen):
        """Many losses in one transfer."""
        for loss in self.deferred.to_host(seen.unread):
            seen.losses.add(loss)
        seen.unread = []

    # What to say

    def lines(self):
        first = {}  # data set: the line of its first loader
        for (line, text, whole), n in self.loaders.items():
            same = f", of the data set of {first[whole]}" if whole in first else ""
            first.setdefault(whole, line)
            yield f"{text}; {n} iterators ({line}{same})"
        for module, modes in list(self.modes.items()):
            for (training, graph), n in modes.items():
                how = f"{'with' if graph else 'without'} a graph"
                how += f" in {'train' if training else 'eval'} mode"
                seen = self.inputs.get(module, {}).get((training, graph))
                fed = f"; {len(seen[1])} of {seen[0]} inputs differ" if seen else ""
                yield f"{self.titles.of(module)} is called {_often(n)} {how}{fed}"
        for seen in self.all:
            self._read(seen)
            yield from seen.lines()
        orders = sorted(self.orders.items(), key=lambda order: -order[1][0])
        for key, (n, spans) in orders[:ORDERS]:
            calls = in_words((call, *span) for call, span in zip(key, spans, strict=True))
            yield f"{_often(n)}, up to a step of {self.first.name}: {calls}"
        if (others := len(orders) - ORDERS + self.others) > 0:
            yield f"and {others} other orders"
        if self.calls.entries:
            yield f"after that: {in_words((call, n, n) for call, n in self.calls.entries)}"
        yield from self._weights()

    def _weights(self):
        """How far those of optimizers have moved, and which are in none."""
        params = self._params()
        names = self.titles.of_weights({*params, *self.start})
        moved = {}
        for p, before in list(self.start.items()):
            way = (_sample(p) - before).norm() / (before.norm() + 1e-12)
            moved[names[id(p)]] = float(way)
        still = [name for name, share in moved.items() if share == 0]
        moved = {name: share for name, share in moved.items() if share and share < 1e6}
        if moved:
            least, most = min(moved, key=moved.get), max(moved, key=moved.get)
            yield (
                f"weights have moved by {moved[least]:.2g} ({least}) to {moved[most]:.2g} ({most}) "
                "of their size"
            )
        if still:
            yield f"{len(still)} weights have not moved: {few(still, 6)}"
        held = {id(p) for p in self.start}
        free = {p for p in params if id(p) not in held}
        still_too = {p for p in free if self._stands(p)}
        for text, some in (
            ("in no optimizer", free - still_too),
            ("in no optimizer, and not moved", still_too),
            ("requires_grad=False", [p for p in params if not p.requires_grad]),
        ):
            if some and held:
                yield f"{text}: {few(sorted({names[id(p)] for p in some}), 6)}"

    def _params(self):
        return {p for root in list(self.names.roots) for p in root.parameters()}

    def _stands(self, p):
        return p in self.unheld and torch.equal(_sample(p), self.unheld[p])


def _often(n):
    return "once" if n == 1 else f"{n} times"


@torch.no_grad()
def _told_by(t):
    """Shape and a number that another tensor does not have."""
    some = _sample(t).double()
    weights = torch.arange(1.0, len(some) + 1, dtype=some.dtype, device=some.device).sqrt()
    return (*t.shape, float(some @ weights))  # of whole numbers, too


@torch.no_grad()
def _sample(p):
    flat = numbers_of(p.detach()).flatten()
    return flat[:: max(1, len(flat) // SAMPLE)].float().clone()


def _contents(x):
    """What a file holds, by its first keys."""
    if not isinstance(x, dict):
        return type(x).__name__
    if x and all(isinstance(value, torch.Tensor) for value in x.values()):
        return f"{len(x)} tensors"
    return "{" + few(x, 6) + "}"
