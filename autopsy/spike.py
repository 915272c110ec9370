"""
Spike: has the loss or the gradient norm jumped far above its past, and which rows of the batch
carry it?

It is asked before each optimizer step, with two numbers that the watch has read anyway. Only after
a jump, and at most three times in a run, the forward passes on the tape are made again: each time
some rows stand in for the others, so that every shape stays as it is. Rows are named if without
them the loss is ordinary. It touches no weight and no gradient; buffers, random numbers and what
modules carry are put back.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from .step import StepRecord
from .tape import BACKWARD, SLOPES, Made
from .tensors import batch_size_of, batched, extent, few

PAST = 32  # steps before, of which none was near it
ROWS, ALL = 5.0, 10.0  # times the highest of these: carried by a few rows, by the whole batch
SPREAD = 6.0  # highest by median of these; beyond it tails are heavy, and a jump is no news
SPIKES = 3  # in a run
AGAIN = 48  # forward passes for one spike
BEYOND = 10.0  # times the largest number of any other row


class Spike:
    """Losses and gradient norms of each optimizer, and the jumps among them."""

    def __init__(self, hooks, scaling, tape):
        self.hooks, self.scaling, self.tape = hooks, scaling, tape
        self.past = {}  # optimizer: its last (loss, norm)
        self.highest = {}  # optimizer: the highest loss and norm so far
        self.rates = {}  # optimizer: its last rates
        self.told = []
        self.open = {}  # optimizer: [the spike that has not come back, its last losses]

    def look(self, optimizer, losses, norm):
        """Before the step of this optimizer: these losses have led to its gradients."""
        key = id(optimizer)
        rates = [group.get("lr") for group in optimizer.param_groups]
        rates = [rate for rate in rates if isinstance(rate, float | int)]  # not on a device
        self.rates.setdefault(key, deque(maxlen=PAST)).append(max(rates, default=0.0))
        now = sum(losses), norm
        past = self.past.setdefault(key, deque(maxlen=PAST))
        highest = self.highest.get(key, (0.0, 0.0))
        recent = [max(values) for values in zip(*past, strict=True)] or [0.0, 0.0]
        if key in self.open:
            self._after(key, now)
        elif len(past) == PAST and len(self.told) < SPIKES:
            usual = [median(values) for values in zip(*past, strict=True)]
            all_four = zip(now, recent, highest, usual, strict=True)
            times = [a / b if a > top and 0 < b < SPREAD * m else 0.0 for a, b, top, m in all_four]
            if max(times) > ROWS:
                self._spike(optimizer, now, recent, times)
        if key not in self.open:  # what follows a spike is measured by what was before it
            past.append(now)
        self.highest[key] = tuple(map(max, highest, now))

    def _spike(self, optimizer, now, recent, times):
        k = times.index(max(times))
        spike = {"step": self.tape.steps, "rows": "", "back": None, "times": times[k], "k": k}
        spike["what"] = (
            f"step {self.tape.steps}: the {('loss', 'gradient norm')[k]} jumped to "
            f"{times[k]:.3g} times the highest of the {PAST} steps before"
        )
        if not self.scaling.scaler:
            spike["what"] += f" ({now[k]:.3g} after at most {recent[k]:.3g})"
        spike |= {
            "rates": [*self.rates[id(optimizer)]],
            "limit": recent[k],
            "highest": self.highest[id(optimizer)][k],
        }
        if self.hooks.world == 1 and times[0] > ROWS:
            spike["rows"] = rows_of(self.tape, times[0])
        if spike["rows"] or times[k] > ALL:
            self.told.append(spike)
            self.open[id(optimizer)] = [spike, deque(maxlen=9)]

    def _after(self, key, now):
        spike, last = self.open[key]
        last.append(now[spike["k"]])
        spike["last"] = last
        if last[-1] <= 2 * spike["limit"]:
            spike["back"] = self.tape.steps
            del self.open[key]

    def sentences(self):
        """Of spikes that rows carry, and of those after which all was worse than ever before."""
        for spike in self.told:
            last = spike.get("last", ())
            lost = spike["back"] is None and len(last) > 8 and median(last) > spike["highest"]
            if spike["rows"]:
                back = "; it has not come back"
                if spike["back"] is not None:
                    back = f"; it came back at step {spike['back']}"
                yield f"{spike['what']}{back if last else ''}. {spike['rows']}"
            elif lost:
                usual, most = median(spike["rates"]), max(spike["rates"])
                yield (
                    f"{spike['what']}, and it has not come back: the run is worse than at its "
                    f"start. No rows of the batch carry it. The lr was {usual:g} in most of the "
                    f"{PAST} steps before, and at most {most:g}"
                )


# The rows


def rows_of(tape, times):
    """A sentence on the rows that carry the spike of this step, or ""."""
    try:
        with Forward(tape) as again:
            return _rows_of(again, times) if again.size > 3 else ""
    except Exception:  # a service: whatever cannot be made again names no rows
        return ""


def _rows_of(again, times):
    size = again.size
    whole = again(range(size))
    ordinary = whole / times
    if not abs(again(range(size)) - whole) <= 1e-3 * whole or not whole:
        return ""  # not reproducible
    guilty, groups = [], [list(range(size))]
    while groups and again.passes < AGAIN:
        group = groups.pop(0)
        half = (len(group) + 1) // 2
        for part in (group[:half], group[half:]):
            if again(part) > 2 * ordinary:
                (groups if len(part) > 1 else guilty).append(part)
    guilty = sorted(row for part in guilty for row in part)
    good = [row for row in range(size) if row not in guilty]
    if groups or not guilty or len(guilty) > size // 4:
        return ""
    without = again(good)
    if not without <= 2 * ordinary:
        return ""
    what, carry = ("Row", "carries") if len(guilty) == 1 else ("Rows", "carry")
    text = f"{what} {few(guilty)} of {size} (from 0) {carry} it: without "
    them = "it" if len(guilty) == 1 else "them"
    text += f"{them} the loss is ordinary ({without / whole:.2g} of that)"
    common = [said for t, d in again.rows.items() if (said := _common(t, d, guilty, good))]
    return ". ".join([text, *dict.fromkeys(common)])


def _common(t, d, guilty, good):
    """What the guilty rows of this tensor have in common, and no other row has."""
    rows = t.detach().movedim(d, 0)
    rows = rows.reshape(len(rows), -1)
    bad, others = rows[guilty], rows[good]
    kind = f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"
    if t.is_floating_point():
        largest = [[max(map(abs, extent(row))) for row in part] for part in (bad, others)]
        if max(largest[0]) == 0 < min(largest[1]):
            return f"In {kind} their numbers are all 0"
        if min(largest[0]) > BEYOND * max(largest[1]):
            return (
                f"In {kind} they hold numbers up to {max(largest[0]):.3g} "
                f"(other rows: up to {max(largest[1]):.3g})"
            )
        return ""
    if rows.shape[1] == 1:
        values = set(bad.flatten().tolist())
        alone = len(values) == 1 and not values & set(others.flatten().tolist())
        return f"In {kind} they alone hold {values.pop()}" if alone else ""
    same = [(part == part[:, :1]).all(1) for part in (bad, others)]
    if same[0].all() and not same[1].any():
        return f"In {kind} they hold nothing but {few(sorted(set(bad[:, 0].tolist())))} (padding?)"
    pad = torch.mode(rows.flatten()).values
    lengths = [(part != pad).sum(1).tolist() for part in (bad, others)]
    if min(lengths[0]) > 2 * max(lengths[1]):
        return (
            f"In {kind} they are longer than all others: {few(lengths[0])} numbers that are not "
            f"{pad}, others at most {max(lengths[1])}"
        )
    return ""


class Forward:
    """The forward passes on the tape once more, with rows of the batch in place of others: the sum
    of the losses. Inside of `with`."""

    def __init__(self, tape):
        self.tape, self.passes = tape, 0
        calls = tape.needed(())
        roots = [call for call in calls if call.function is BACKWARD and call.number > tape.latest]
        self.losses = [m.number for call in roots for m in call.uses()]
        last = max(self.losses, default=0)
        self.calls = [call for call in calls if call.number <= last and call.function not in SLOPES]
        first = [call for call in self.calls if call.shape]
        given = [t for call in first for t in tree_leaves((call.args, call.kwargs))]
        self.made = {}
        self.rows = {}  # tensor of the batch: its dimension of rows
        self.size = first[0].shape[0] if first and len(self.losses) == 1 else 0
        sizes = batch_size_of(batched(t for t in given if isinstance(t, Tensor)))
        self.size = sizes if self.size and sizes else self.size
        self.net = nn.Module()
        called = [x for c in self.calls for x in (c.function, *tree_leaves(c.args))]
        for k, module in enumerate(dict.fromkeys(m for m in called if isinstance(m, nn.Module))):
            self.net.add_module(str(k), module)

    def __enter__(self):
        self.undo = ExitStack()
        self.undo.enter_context(_unchanged(self.tape, self.calls, self.net))
        return self

    def __exit__(self, *error):
        return self.undo.__exit__(*error)

    def __call__(self, rows=None):
        self.passes += 1
        self.tape.buffers_back(self.calls)
        rows = list(rows) if rows is not None else None
        if rows is not None:
            rows = [rows[k % len(rows)] for k in range(self.size)]
        made = {}
        for call in self.calls:
            uses = call.uses()
            weights = any(t.requires_grad for _, t in call.given())
            own = isinstance(call.function, nn.Module) or weights
            if rows is not None and (own or not all(x.data for x in uses)):
                pick = self._pick(rows, made)
                args, kwargs = tree_map(pick, (call.args, call.kwargs))
                call = replace(call, args=args, kwargs=kwargs)
            call.repeat(made)
        lost = [t for m, t in made.items() if m.number in self.losses]
        return abs(sum(float(t.detach().float().sum()) for t in lost))

    def _pick(self, rows, made):
        """For a tensor of the batch: the same with these rows."""

        def pick(x):
            t = made.get(x) if isinstance(x, Made) and x.data else x
            if not isinstance(t, Tensor) or t.requires_grad or self.size not in t.shape[:2]:
                return x
            d = t.shape.index(self.size)
            if rows == list(range(self.size)):
                self.rows[t] = d
            return t.index_select(d, torch.tensor(rows, device=t.device))

        return pick


@contextmanager
def _unchanged(tape, calls, net):
    """The script's own graph has saved the buffers: their versions stay, too."""
    now = StepRecord(0, net)
    grads = [(p, p.grad) for p in net.parameters()]
    buffers = tuple(b for b in net.buffers() if not b.is_inference())
    with torch.autograd._unsafe_preserve_version_counter(buffers):
        try:
            yield
        finally:
            now.restore()
            for p, g in grads:
                p.grad = g
