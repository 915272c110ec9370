"""
Spike: has the loss or the gradient norm jumped far above its past, and which rows of the batch
carry it?

Before each optimizer step it looks at two numbers that the watch reads anyway. After a jump, at
most six times in a run, rows.py looks for the rows that carry it. If the whole batch carries a
jump, it compares the batch's largest number with earlier ones; changes.py knows what is new since
the steps before, and unrecorded.py what is known of a step that was not recorded. It touches no
weight and no gradient, and restores all that it repeats.

The loss and the gradient of a step are those of the weights before it: the lr of that very step
explains neither.
"""

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from math import inf
from statistics import median
from weakref import WeakKeyDictionary, ref

import torch

from ...tensors import LIMIT, batched, extent, type_of
from ...watch.deferred import params_of
from ...watch.events import FirstFunctions
from .changes import PAST, Changes, Owner
from .rows import ALL, BEYOND, Rows, rows_of
from .unrecorded import FAR, NOT_RECORDED, Unrecorded

ROWS = 5.0  # times the highest of these: carried by a few rows
STEEP = 100.0  # times the highest gradient norm, while the loss is as before: rare rows do less
OWN = 3.0  # the loss of these rows by the highest of all, where that was higher
FOLD = 2.0  # times the highest loss: here another training begins
FASTER = 4.0  # by how much the rate rose, where that explains a jump
SOON = 3  # steps, within which most of a jump is over that a whole batch carried
SPREAD = 6.0  # highest by median of these; beyond it tails are heavy
LARGER = 2.0  # times the largest target: that a loss is larger, too, is no news
SPIKES, TRIES = 3, 6  # in a run
UNEXPLAINED = (
    "Nothing that was seen explains it: no few rows of the batch, no lr, no write into weights, no "
    "other batch size"
)


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
    recorded: bool = True  # its step
    far: bool = False  # above all that is usual
    larger: str = ""  # why, if nothing else is known: what the loss is given
    rates: str = ""  # why, if that is not so
    whole: str = ""  # why, if the next step is ordinary, too
    soon: bool = False  # it was
    back: int | None = None  # the step at which it had come back
    last: deque = field(default_factory=partial(deque, maxlen=9))


@dataclass(eq=False)
class Past:
    """What was seen of an optimizer's steps."""

    owner: Owner
    last: deque = field(default_factory=partial(deque, maxlen=PAST))  # (loss, norm)
    highest: tuple = (0.0, 0.0)  # loss and norm so far
    rates: deque = field(default_factory=partial(deque, maxlen=PAST))
    before: float = inf  # the highest rate before one that was FASTER
    since: int | None = None  # when that came
    rate: float = 0.0  # the highest
    step: int = 0  # the last
    born: int | None = None  # when it took the place of an equal one
    resumed: bool = False  # had it a state then?
    unlike: str = ""  # what it holds then that is not what that one held
    jump: Jump | None = None  # that has not come back
    noted: list = field(default_factory=list)  # what came with each of the last steps
    lines: dict = field(default_factory=dict)  # all that these steps ran: at which step first


class Spike(FirstFunctions):
    """The losses and gradient norms of each optimizer, and the jumps among them."""

    recorded_only, always = False, True
    functions = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "sub", "__sub__")

    def __init__(self, watch):
        super().__init__(watch)
        self.scaling, self.deferred = watch.scaling, watch.deferred
        self.changes = Changes(watch.recorder, watch.names)
        self.unrecorded = Unrecorded(watch)
        self.targets = {}  # function: the step of its last call, its target; the largest number
        self.pasts = WeakKeyDictionary()  # of each optimizer
        self.kinds = {}  # its class, and shapes of its weights: the latest one's
        self.given = WeakKeyDictionary()  # module: its batch; the largest number of earlier ones
        self.jumps, self.tries = [], 0

    def called(self, module, tensors):
        """A module is called in training: read its batch at the steps 0, 1, 2, 4, 8, ..."""
        real = [t for t in batched(tensors) if t.is_floating_point() and t.numel()]
        _, usual = self.given.get(module, ((), ()))
        if self.recorder.steps.bit_count() < 2:
            sizes = self.deferred.largest(real, torch.abs)
            pairs = zip(sizes, usual or sizes, strict=False)
            usual = [a if a is None or b is None else torch.maximum(a, b) for a, b in pairs]
        self.given[module] = [ref(t) for t in real], usual

    def function_called(self, func, name, args, kwargs, out):
        """A loss is computed from a target: read that as the batches are read."""
        given = [*filter(torch.is_tensor, (*args, *kwargs.values()))][:2]
        plain = [t for t in given if not t.requires_grad and t.is_floating_point() and t.numel()]
        if len(given) == 2 and len(plain) == 1:
            _, _, usual = self.targets.get(name, (0, None, None))
            if self.recorder.steps.bit_count() < 2:
                [size] = self.deferred.largest(plain, torch.abs)
                usual = size if usual is None or size is None else torch.maximum(size, usual)
            self.targets[name] = self.recorder.steps, ref(plain[0]), usual

    def loaded(self, module, state, answer):
        self.unrecorded.loaded(module)

    def before_step(self, optimizer, losses, norm, moved):
        if not norm <= LIMIT:
            return
        self.unrecorded.note()
        past = self.pasts.get(optimizer)
        if not past or past.owner.id != id(optimizer):
            past = self._begins(optimizer, sum(losses))
        rates = [group.get("lr") for group in optimizer.param_groups]
        rates = [rate for rate in rates if isinstance(rate, float | int)]  # not on a device
        raised = self._raised(past, max(rates, default=0.0))
        past.step = self.recorder.steps
        self.changes.note(optimizer, past, moved)
        now, highest = (sum(losses), norm), past.highest
        if past.jump:
            self._after(past, now)
        elif self._is_asked(past) and (recent := _jumped(past.last, now)):
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

    def _is_asked(self, past):
        return len(past.last) == PAST and len(self.jumps) < SPIKES and self.tries < TRIES

    def wrote(self, line, weights, name, given):
        self.changes.wrote(line, weights)

    def _begins(self, optimizer, loss):
        """One that follows an equal one of the step before, as after a resume, has its past; unless
        the loss is another, too, as in the next fold of a cross-validation, which begins without
        moments."""
        kind = type(optimizer), *map(type_of, params_of(optimizer))
        past, step = self.kinds.get(kind), self.recorder.steps
        follows = past and past.step == step - 1 and len(past.last) == PAST
        resumed = bool(optimizer.state)  # no step of its own has filled it
        follows = follows and (resumed or loss <= FOLD * max(last for last, _ in past.last))
        if follows and optimizer not in self.pasts:  # else two equal ones take turns
            past.unlike = past.owner.unlike(optimizer, self.changes.names) if resumed else ""
            past.owner, past.born, past.resumed = Owner(optimizer), step, resumed
            self.recorder.steps_of[id(optimizer)] = step
        else:
            past = Past(Owner(optimizer))
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
        known = raised and any(jump.since == past.since for jump in self.jumps)
        recorded = bool(raised) or self.changes.seen(past)
        moved = self.changes.target_moved if recorded else self.unrecorded.target_moved
        if known or moved(past):
            return
        k, step = times.index(max(times)), self.recorder.steps
        numbers = "" if self.scaling.scaler else f" ({now[k]:.3g} after at most {recent[k]:.3g})"
        what = (
            f"step {step}: the {('loss', 'gradient norm')[k]} jumped to {times[k]:.3g} times the "
            f"highest of the {PAST} steps before{numbers}"
        )
        jump = Jump(what, k, now[k], recent[k], past.highest[k], past.since, recorded=recorded)
        jump.far, jump.larger = times[k] > FAR, self._larger()
        self.hooks.budget.asked |= not recorded
        usual, most = median(past.rates), max([*past.rates][:-1], default=0.0)
        if most > FASTER * usual > 0:
            before = f"in most of the {PAST} steps before"
            jump.rates = f"The lr was {usual:g} {before}, and at most {most:g}"
        rows = self._rows(times, raised, own) if recorded else Rows()
        if rows.rare:
            return

        jump.whole = rows.whole
        if recorded:
            cause = "" if jump.larger and past.since == step else raised
            explanations = self._explanations(past, rows, cause, own, is_large=times[k] > ALL)
        else:
            explanations = self._known(past, is_large=times[k] > ALL)
        jump.why = next(filter(None, explanations), "")
        faster = times[0] > (ALL if own else ROWS) and most > FASTER * usual
        if (jump.why and not raised) or (times[k] > ALL and not own) or faster:
            self.jumps.append(jump)
            past.jump = jump

    def _rows(self, times, raised, own):
        """The rows that carry a jump, if they are looked for."""
        of_norm = not times[0] > ROWS
        sought = not of_norm or times[1] > STEEP
        if self.recorder.hooks.world > 1 or not sought or raised:
            return Rows()
        self.tries += 1
        return rows_of(self.recorder, times[of_norm], own, of_norm)

    def _explanations(self, past, rows, raised, own, is_large):
        """What may explain a jump, the most certain first; "" where that was not so."""
        larger = self._whole() if is_large else ""
        yield raised
        if past.born == self.recorder.steps and past.unlike:
            yield self.changes.sentence(past)
        if not (rows.labels and larger):  # else that says more
            yield rows.text + rows.labels
        if is_large:
            yield "" if own else larger
            yield rows.alike
            yield self.changes.sentence(past)
            yield rows.term

    def _known(self, past, is_large):
        """The same of a step that was not recorded."""
        new = self.changes.new_optimizer(past)
        if is_large or (past.born == self.recorder.steps and past.unlike):
            yield new
        if is_large:
            yield self.unrecorded.sentence(past)

    def _larger(self):
        """A sentence if the loss of this step is given larger numbers than any that were read."""
        for step, t, usual in self.targets.values():
            now = t() if step == self.recorder.steps and usual is not None else None
            if now is not None and extent(now).largest > LARGER * float(usual) > 0:
                return (
                    f"The loss is given larger numbers: {type_of(now)} up to "
                    f"{extent(now).largest:.3g} (those read before: up to {float(usual):.3g})"
                )
        return ""

    def _whole(self):
        """A sentence if the batch is larger than all that were read before."""
        for batch, usual in self.given.values():
            for t, size in zip([t() for t in batch], usual, strict=False):
                now = 0.0 if t is None or size is None else extent(t).largest
                if now > BEYOND * float(size) > 0:
                    return (
                        f"{type_of(t)} holds numbers up to {now:.3g} (the batches read before: up "
                        f"to {float(size):.3g})"
                    )
        return ""

    def _after(self, past, now):
        jump = past.jump
        jump.last.append(now[jump.k])
        if not jump.recorded and len(jump.last) <= SOON:
            jump.larger = jump.larger or self._larger()
            if self.hooks.budget.recording:
                jump.larger = jump.larger or self._whole()
            self.hooks.budget.asked |= not jump.larger
        jump.soon |= len(jump.last) <= SOON and jump.last[-1] * ALL < jump.size
        if jump.last[-1] <= 2 * jump.recent:
            jump.back = self.recorder.steps
            past.jump = None

    def sentences(self):
        """Sentences on jumps that are explained, or after which the run stayed worse than ever."""
        for jump in self.jumps:
            ends = "; it has not come back" if jump.last else ""
            if jump.back is not None:
                ends = f"; it came back at step {jump.back}"
            lost = jump.back is None and len(jump.last) > 8 and median(jump.last) > jump.highest
            whole = jump.whole if jump.soon else ""  # the batch's fault, not that of the weights
            why = jump.why or jump.rates or whole
            far = jump.far and not jump.recorded and jump.larger
            if not (why or lost or far):
                continue
            if jump.larger and not jump.why:
                why, lost = jump.larger, False
            what = f"{jump.what}{ends}{': the run is worse than at its start' * lost}"
            yield f"{what}. {why or (UNEXPLAINED if jump.recorded else NOT_RECORDED)}"


def _jumped(last, now):
    """The highest loss and norm of the last steps, if one of these is far above; else None."""
    if not any(a > ROWS * b for a, b in zip(now, last[-1], strict=True)):
        return None  # asked first: it nearly always ends here
    recent = [max(values) for values in zip(*last, strict=True)]
    return recent if any(a > ROWS * b for a, b in zip(now, recent, strict=True)) else None


def _times(now, recent, usual):
    """How many times the highest of the past; 0 if tails are heavy and a jump is no news."""
    if not usual > 0:
        return 0.0
    times, spread = now / recent, recent / usual
    return times if spread < SPREAD or times > 2 * spread**2 else 0.0
