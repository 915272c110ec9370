"""
Spike: has the loss or the gradient norm jumped far above its past, and which rows of the batch
carry it?

Before each optimizer step it looks at two numbers that the watch reads anyway. After a jump, at
most six times in a run, it repeats the forward passes on the tape; each time some rows replace the
others, so that every shape stays. It names the rows without which the loss is ordinary. If the
whole batch carries a jump, it compares the batch's largest number with earlier ones. It touches no
weight and no gradient, and restores buffers, random numbers and what modules carry.
"""

from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from statistics import median
from typing import NamedTuple
from weakref import WeakKeyDictionary, ref

import torch

from ..tensors import LIMIT, batched, extent, few, type_of
from ..watch.deferred import params_of
from ..watch.events import Events
from ..watch.forward import Forward
from .changes import PAST, Changes

ROWS, ALL = 5.0, 10.0  # times the highest of these: carried by a few rows, by the whole batch
BARE = 50.0  # by rows of which nothing else is known: rare ones are so in a replay buffer
OWN = 3.0  # the loss of these rows by the highest of all, where that was higher
FOLD = 2.0  # times the highest loss: here another training begins
FASTER = 4.0  # by how much the rate rose, where that explains a jump
BESIDE = 3.0  # times the loss: of half of the rows, twice
SOON = 3  # steps, within which most of a jump is over that a whole batch carried
SPREAD = 6.0  # highest by median of these; beyond it tails are heavy
SPIKES, TRIES = 3, 6  # in a run
AGAIN = 48  # forward passes for one spike
ALIKE = 8  # rows: by chance fewer may have one label
BEYOND = 10.0  # times the largest number of any other row


@dataclass
class Jump:
    """Of the loss (k = 0) or of the gradient norm (k = 1), and what followed."""

    what: str
    k: int
    size: float
    recent: float  # the highest of the steps before
    highest: float  # of all steps before
    since: int | None  # when the rate rose
    why: str = ""
    rates: str = ""  # why, if nothing else is known
    whole: str = ""  # why, if the next step is ordinary, too
    soon: bool = False  # it was
    back: int | None = None  # the step at which it had come back
    last: deque = field(default_factory=partial(deque, maxlen=9))


@dataclass(eq=False)
class Past:
    """What was seen of an optimizer's steps."""

    owner: int  # the optimizer's id
    last: deque = field(default_factory=partial(deque, maxlen=PAST))  # (loss, norm)
    highest: tuple = (0.0, 0.0)  # loss and norm so far
    rates: deque = field(default_factory=partial(deque, maxlen=PAST))
    before: float = inf  # the highest rate before one that was FASTER
    since: int | None = None  # when that came
    rate: float = 0.0  # the highest
    step: int = 0  # the last
    born: int | None = None  # when it took the place of an equal one
    jump: Jump | None = None  # that has not come back
    noted: list = field(default_factory=list)  # what came with each of the last steps
    lines: dict = field(default_factory=dict)  # all that these steps ran: at which step first


class Rows(NamedTuple):
    """Sentences on what carries a jump."""

    text: str = ""  # a few rows
    labels: str = ""  # if no more is known of them
    rare: bool = False  # they may be so
    whole: str = ""  # all rows
    term: str = ""  # all rows, and one term of the loss
    alike: str = ""  # all rows, and all have one label


class Spike(Events):
    """The losses and gradient norms of each optimizer, and the jumps among them."""

    def __init__(self, watch):
        self.scaling, self.recorder = watch.scaling, watch.recorder
        self.changes = Changes(watch.recorder, watch.names)
        self.pasts = WeakKeyDictionary()  # of each optimizer
        self.kinds = {}  # its class, and shapes of its weights: the latest one's
        self.given = WeakKeyDictionary()  # module: its batch; the largest number of earlier ones
        self.told, self.tries = [], 0

    def called(self, module, tensors):
        """A module is called in training: read its batch at the steps 0, 1, 2, 4, 8, ..."""
        real = [t for t in batched(tensors) if t.is_floating_point() and t.numel()]
        _, usual = self.given.get(module, ((), ()))
        if self.recorder.steps.bit_count() < 2:
            sizes = [t.detach().abs().amax() for t in real]
            pairs = zip(sizes, usual or sizes, strict=False)
            usual = [torch.maximum(a, b) if a.dtype == b.dtype else a for a, b in pairs]
        self.given[module] = [ref(t) for t in real], usual

    def before_step(self, optimizer, losses, norm, moved):
        if not norm <= LIMIT:
            return
        past = self.pasts.get(optimizer)
        if not past or past.owner != id(optimizer):
            past = self._begins(optimizer, sum(losses))
        rates = [group.get("lr") for group in optimizer.param_groups]
        rates = [rate for rate in rates if isinstance(rate, float | int)]  # not on a device
        raised = self._raised(past, max(rates, default=0.0))
        past.step = self.recorder.steps
        self.changes.look(optimizer, past, moved)
        now, highest = (sum(losses), norm), past.highest
        recent = [max(values) for values in zip(*past.last, strict=True)] or [0.0, 0.0]
        if past.jump:
            self._after(past, now)
        elif len(past.last) == PAST and len(self.told) < SPIKES and self.tries < TRIES:
            usual = [median(values) for values in zip(*past.last, strict=True)]
            times = [*map(_times, now, recent, usual)]
            new = [t if a > b else 0.0 for a, b, t in zip(now, highest, times, strict=True)]
            if max(new) > ROWS:
                self._spike(past, now, recent, new, raised)
            elif times[0] > ROWS:
                self._spike(past, now, recent, [times[0], 0.0], raised, OWN * highest[0])
        # what follows a spike, or a higher rate, is measured by what was before it
        if not past.jump and not raised:
            past.last.append(now)
        past.highest = tuple(map(max, highest, now))

    def wrote(self, line, weights):
        self.changes.wrote(line, weights)

    def _begins(self, optimizer, loss):
        """One that follows an equal one of the step before, as after a resume, has its past; unless
        the loss is another, too, as in the next fold of a cross-validation."""
        kind = type(optimizer), *(p.shape for p in params_of(optimizer))
        past, step = self.kinds.get(kind), self.recorder.steps
        follows = past and past.step == step - 1 and len(past.last) == PAST
        follows = follows and loss <= FOLD * max(last for last, _ in past.last)
        if follows and optimizer not in self.pasts:  # else two equal ones take turns
            past.owner, past.born = id(optimizer), step
            self.recorder.steps_of[id(optimizer)] = step
        else:
            past = Past(id(optimizer))
        self.pasts[optimizer] = self.kinds[kind] = past
        return past

    def _raised(self, past, rate):
        """A sentence if the rate has risen far above all earlier ones a short while ago."""
        past.rates.append(rate)
        if past.since is None and rate > FASTER * past.rate > 0:
            past.before, past.since = past.rate, self.recorder.steps
        past.rate = max(past.rate, rate)
        if past.since is not None and self.recorder.steps > past.since + PAST:
            past.since = None
        if past.since is None:
            return ""
        return f"At step {past.since} the lr rose from {past.before:g} to {past.rate:g}"

    def _spike(self, past, now, recent, times, raised, own=0.0):
        """`raised`: a sentence on the rate. `own`: the least loss of the rows that are named."""
        known = raised and any(jump.since == past.since for jump in self.told)
        if known or self.changes.target_moved(past):
            return
        k, step = times.index(max(times)), self.recorder.steps
        numbers = "" if self.scaling.scaler else f" ({now[k]:.3g} after at most {recent[k]:.3g})"
        what = (
            f"step {step}: the {('loss', 'gradient norm')[k]} jumped to {times[k]:.3g} times the "
            f"highest of the {PAST} steps before{numbers}"
        )
        jump = Jump(what, k, now[k], recent[k], past.highest[k], past.since, why=raised)
        usual, most = median(past.rates), max(past.rates)
        if most > FASTER * usual > 0:
            before = f"in most of the {PAST} steps before"
            jump.rates = f"The lr was {usual:g} {before}, and at most {most:g}"
        rows = Rows()
        if self.recorder.hooks.world == 1 and times[0] > ROWS and not raised:
            self.tries += 1
            rows = rows_of(self.recorder, times[0], own)
            jump.whole = rows.whole
            if rows.rare:
                return
        larger = self._whole() if times[k] > ALL else ""
        if not (rows.labels and larger):  # else that says more
            jump.why = jump.why or rows.text + rows.labels
        if times[k] > ALL:
            jump.why = jump.why or (not own and larger) or rows.alike
            jump.why = jump.why or self.changes.sentence(past) or rows.term
        faster = times[0] > (ALL if own else ROWS) and most > FASTER * usual
        if (jump.why and not raised) or (times[k] > ALL and not own) or faster:
            self.told.append(jump)
            past.jump = jump

    def _whole(self):
        """A sentence if the batch is larger than all that were read before."""
        for batch, usual in self.given.values():
            for t, size in zip([t() for t in batch], usual, strict=False):
                now = 0.0 if t is None else extent(t).largest
                if now > BEYOND * float(size) > 0:
                    return (
                        f"{type_of(t)} holds numbers up to {now:.3g} (the batches read before: up "
                        f"to {float(size):.3g})"
                    )
        return ""

    def _after(self, past, now):
        jump = past.jump
        jump.last.append(now[jump.k])
        jump.soon |= len(jump.last) <= SOON and jump.last[-1] * ALL < jump.size
        if jump.last[-1] <= 2 * jump.recent:
            jump.back = self.recorder.steps
            past.jump = None

    def sentences(self):
        """Sentences on jumps that are explained, or after which the run stayed worse than ever."""
        for jump in self.told:
            ends = "; it has not come back" if jump.last else ""
            if jump.back is not None:
                ends = f"; it came back at step {jump.back}"
            lost = jump.back is None and len(jump.last) > 8 and median(jump.last) > jump.highest
            whole = jump.whole if jump.soon else ""  # the batch's fault, not that of the weights
            why = jump.why or jump.rates or whole
            if why or lost:
                what = f"{jump.what}{ends}{': the run is worse than at its start' * lost}"
                yield f"{what}. {why or 'No rows of the batch carry it'}"


def _times(now, recent, usual):
    """How many times the highest of the past; 0 if tails are heavy and a jump is no news."""
    if not usual > 0:
        return 0.0
    times, spread = now / recent, recent / usual
    return times if spread < SPREAD or times > 2 * spread**2 else 0.0


# The rows


def rows_of(recorder, times, own):
    """Which rows carry the spike of this step."""
    with suppress(Exception), Forward(recorder) as again:
        return _rows_of(again, times, own)
    return Rows()  # a service: whatever cannot be made again names no rows


def _rows_of(again, times, own):
    whole = again.largest()
    size = again.size
    if size < 4:
        return Rows()
    ordinary = max(2 * whole / times, whole / 1000)
    if not abs(again(range(size)) - whole) <= 1e-3 * whole or not whole:
        return Rows()  # not reproducible
    guilty, groups, calm, most = [], [list(range(size))], 0, 0.0
    while groups and again.passes < AGAIN:
        group = groups.pop(0)
        half = (len(group) + 1) // 2
        for part in (group[:half], group[half:]):
            loss = again(part)
            most = max(most, loss) if len(group) == size else most
            if loss > ordinary:
                (groups if len(part) > 1 else guilty).append(part)
            elif len(part) * 8 >= size:
                calm += 1
    if not calm and most > BESIDE * whole:  # rows meet each other: two equal ones are another loss
        return Rows()
    if not calm:
        same = [t for t in again.labels if (t == t[0]).all()]
        also = "".join(f". In {type_of(t)} all hold {t[0].item()}" for t in same[:1])
        carries = "The whole batch carries it, not a few of its rows"
        term = _term(again.terms(), ordinary / whole) if times > ALL else ""
        alike = carries + also if also and size >= ALIKE and len(again.labels) == 1 else ""
        return Rows(whole=carries + also, term=term and carries + term, alike=alike)
    guilty = sorted(row for part in guilty for row in part)
    good = [row for row in range(size) if row not in guilty]
    if groups or not guilty or len(guilty) > size // 4:
        return Rows()
    without = again(good)
    if not without <= ordinary or again(guilty) < own:
        return Rows()
    words = ("Row", "carries", "it") if len(guilty) == 1 else ("Rows", "carry", "them")
    what, carry, them = words
    turn = f" of backward pass {again.turn}" if again.turns > 1 else ""
    text = (
        f"{what} {few(guilty)} of {size}{turn} (from 0) {carry} it: without {them} the loss is "
        f"{without / whole:.2g} of that"
    )
    common = [said for t, d in again.rows.items() if (said := _common(t, d, guilty, good))]
    labels = "".join(
        f". In {type_of(t)} they hold {few(t[guilty].tolist())}: right?" for t in again.labels[:1]
    )
    if common:
        return Rows(". ".join([text, *[*dict.fromkeys(common)][:2]]))
    return Rows(text, labels, rare=times < (ALL if labels else BARE))


def _term(terms, ordinary):
    """What to add if one term of the loss carries a jump; `ordinary`: the share of all others."""
    total, (most, line) = sum(value for value, _ in terms), max(terms)
    if 0 < total - most <= ordinary * total:
        return f". Of the loss, a sum, {most / total:.0%} is the term of {line}"
    return ""


def _common(t, d, guilty, good):
    """Say what the guilty rows of this tensor share and no other row has; or ""."""
    rows = t.detach().movedim(d, 0)
    rows = rows.reshape(len(rows), -1)
    bad, others = rows[guilty], rows[good]
    kind = type_of(t)
    if t.is_floating_point():
        sizes, usual = ([extent(row).largest for row in part] for part in (bad, others))
        held = f"In {kind} they hold numbers up to {max(sizes):.3g} (other rows: "
        if max(sizes) == 0 < min(usual):
            return f"In {kind} their numbers are all 0"
        if min(sizes) > BEYOND * max(usual):
            return f"{held}up to {max(usual):.3g})"
        if max(sizes) * BEYOND < min(usual):
            return f"{held}at least one of {min(usual):.3g})"
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
