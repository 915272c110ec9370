"""
Spike: has the loss or the gradient norm jumped far above its past, and which rows of the batch
carry it?

Before each optimizer step it looks at two numbers that the watch reads anyway. After a jump, at
most six times in a run, it repeats the forward passes on the tape; each time some rows replace the
others, so that every shape stays. It names the rows without which the loss is ordinary. If the
whole batch carries a jump, it compares the batch's largest number with earlier ones. It touches no
weight and no gradient, and restores buffers, random numbers and what modules carry.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from weakref import WeakKeyDictionary, ref

import torch

from .forward import Forward
from .tensors import batched, extent, few

PAST = 32  # steps before, of which none was near it
ROWS, ALL = 5.0, 10.0  # times the highest of these: carried by a few rows, by the whole batch
OWN = 3.0  # the loss of these rows by the highest of all, where that was higher
FASTER = 4.0  # by how much the rate rose, where that explains a jump
SPREAD = 6.0  # highest by median of these; beyond it tails are heavy
SPIKES, TRIES = 3, 6  # in a run
AGAIN = 48  # forward passes for one spike
BEYOND = 10.0  # times the largest number of any other row


class Spike:
    """The losses and gradient norms of each optimizer, and the jumps among them."""

    def __init__(self, scaling, tape):
        self.scaling, self.tape = scaling, tape
        self.past = {}  # optimizer: its last (loss, norm)
        self.highest = {}  # optimizer: the highest loss and norm so far
        self.rates = {}  # optimizer: its last rates
        self.given = WeakKeyDictionary()  # module: its batch; the largest number of earlier ones
        self.told, self.tries = [], 0
        self.open = {}  # optimizer: [the spike that has not come back, its last losses]

    def takes(self, module, tensors):
        """A module is called in training: read its batch at the steps 0, 1, 2, 4, 8, ..."""
        real = [t for t in batched(tensors) if t.is_floating_point() and t.numel()]
        _, usual = self.given.get(module, ((), ()))
        if self.tape.steps & (self.tape.steps - 1) == 0:
            sizes = [t.detach().abs().amax() for t in real]
            pairs = zip(sizes, usual or sizes, strict=False)
            usual = [torch.maximum(a, b) if a.dtype == b.dtype else a for a, b in pairs]
        self.given[module] = [ref(t) for t in real], usual

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
        elif len(past) == PAST and len(self.told) < SPIKES and self.tries < TRIES:
            usual = [median(values) for values in zip(*past, strict=True)]
            times = [*map(_times, now, recent, usual)]
            if any(a > b and t > ROWS for a, b, t in zip(now, highest, times, strict=True)):
                times = [t if a > b else 0.0 for a, b, t in zip(now, highest, times, strict=True)]
                self._spike(optimizer, now, recent, times)
            elif times[0] > ROWS:
                self._spike(optimizer, now, recent, [times[0], 0.0], OWN * highest[0])
        if key not in self.open:  # what follows a spike is measured by what was before it
            past.append(now)
        self.highest[key] = tuple(map(max, highest, now))

    def _spike(self, optimizer, now, recent, times, own=0.0):
        """`own`: the least loss of the rows that are named."""
        self.tries += 1
        k = times.index(max(times))
        spike = {"why": "", "back": None, "k": k}
        spike["what"] = (
            f"step {self.tape.steps}: the {('loss', 'gradient norm')[k]} jumped to "
            f"{times[k]:.3g} times the highest of the {PAST} steps before"
        )
        if not self.scaling.scaler:
            spike["what"] += f" ({now[k]:.3g} after at most {recent[k]:.3g})"
        rates = [*self.rates[id(optimizer)]]
        spike |= {
            "rates": rates,
            "limit": recent[k],
            "highest": self.highest[id(optimizer)][k],
        }
        if self.tape.hooks.world == 1 and times[0] > ROWS:
            spike["why"] = rows_of(self.tape, times[0], own)
        if times[k] > ALL and not own:
            spike["why"] = spike["why"] or self._whole()
        faster = times[0] > (ALL if own else ROWS) and max(rates) > FASTER * median(rates)
        if spike["why"] or (times[k] > ALL and not own) or faster:
            self.told.append(spike)
            self.open[id(optimizer)] = [spike, deque(maxlen=9)]

    def _whole(self):
        """A sentence if the batch is larger than all that were read before."""
        for batch, usual in self.given.values():
            for t, size in zip([t() for t in batch], usual, strict=False):
                now = 0.0 if t is None else max(map(abs, extent(t)))
                if now > BEYOND * float(size) > 0:
                    return (
                        f"{_kind(t)} holds numbers up to {now:.3g} (the batches read before: up "
                        f"to {float(size):.3g})"
                    )
        return ""

    def _after(self, key, now):
        spike, last = self.open[key]
        last.append(now[spike["k"]])
        spike["last"] = last
        if last[-1] <= 2 * spike["limit"]:
            spike["back"] = self.tape.steps
            del self.open[key]

    def sentences(self):
        """Sentences on spikes that are explained, or after which the run stayed worse than ever."""
        for spike in self.told:
            last, back = spike.get("last", ()), "; it has not come back"
            if spike["back"] is not None:
                back = f"; it came back at step {spike['back']}"
            lost = spike["back"] is None and len(last) > 8 and median(last) > spike["highest"]
            usual, most = median(spike["rates"]), max(spike["rates"])
            why = spike["why"]
            if not why and most > FASTER * usual > 0:
                why = f"The lr was {usual:g} in most of the {PAST} steps before"
                why += f", and at most {most:g}"
            if why or lost:
                what = f"{spike['what']}{back if last else ''}"
                what += ": the run is worse than at its start" * lost
                yield f"{what}. {why or 'No rows of the batch carry it'}"


def _times(now, recent, usual):
    """How many times the highest of the past; 0 if tails are heavy and a jump is no news."""
    if not usual > 0:
        return 0.0
    times, spread = now / recent, recent / usual
    return times if spread < SPREAD or times > spread**2 else 0.0


# The rows


def rows_of(tape, times, own=0.0):
    """A sentence on the rows that carry the spike of this step, or ""."""
    try:
        with Forward(tape) as again:
            return _rows_of(again, times, own)
    except Exception:  # a service: whatever cannot be made again names no rows
        return ""


def _rows_of(again, times, own):
    whole = again.largest()
    size = again.size
    if size < 4:
        return ""
    ordinary = max(2 * whole / times, whole / 1000)
    if not abs(again(range(size)) - whole) <= 1e-3 * whole or not whole:
        return ""  # not reproducible
    guilty, groups = [], [list(range(size))]
    while groups and again.passes < AGAIN:
        group = groups.pop(0)
        half = (len(group) + 1) // 2
        for part in (group[:half], group[half:]):
            if again(part) > ordinary:
                (groups if len(part) > 1 else guilty).append(part)
    guilty = sorted(row for part in guilty for row in part)
    good = [row for row in range(size) if row not in guilty]
    if groups or not guilty or len(guilty) > size // 4:
        return ""
    without = again(good)
    if not without <= ordinary or again(guilty) < own:
        return ""
    what, carry = ("Row", "carries") if len(guilty) == 1 else ("Rows", "carry")
    text = f"{what} {few(guilty)} of {size}"
    text += f" of backward pass {again.turn}" * (again.turns > 1)
    text += f" (from 0) {carry} it: without "
    them = "it" if len(guilty) == 1 else "them"
    text += f"{them} the loss is {without / whole:.2g} of that"
    common = [said for t, d in again.rows.items() if (said := _common(t, d, guilty, good))]
    if not common:
        labels = [t for t in again.rows if t.dim() == 1 and not t.is_floating_point()]
        common = [f"In {_kind(t)} they hold {few(t[guilty].tolist())}: right?" for t in labels[:1]]
    return ". ".join([text, *[*dict.fromkeys(common)][:2]])


def _common(t, d, guilty, good):
    """Say what the guilty rows of this tensor share and no other row has; or ""."""
    rows = t.detach().movedim(d, 0)
    rows = rows.reshape(len(rows), -1)
    bad, others = rows[guilty], rows[good]
    kind = _kind(t)
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


def _kind(t):
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"
