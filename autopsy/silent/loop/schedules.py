"""
Schedules: does a learning rate scheduler move with the updates, and why is a rate 0?

A schedule for so many updates whose step() runs once a micro-batch ends too early, and one that
never steps leaves a warm-up at its start (not one whose step() stands in the script, for a longer
run). A cosine for as many steps as there are epochs, which moves with each batch, falls and rises
all the time; one for as many as there are batches, which moves once an epoch, hardly falls. And a
rate that falls by a factor each time dies early.
"""

import linecache
import os
import re
from collections import Counter
from statistics import median_low
from weakref import WeakKeyDictionary, ref

from torch import Tensor

from ...frames import code_of, line_now, script_frames_now
from ...tensors import few
from ...watch.events import Events
from ..shared.passes import Loops

FIRST = 3  # steps; then the schedulers are built
MOST = 8  # optimizers: some scripts build one for each task
LONG = 50  # steps in which a scheduler should step once
PERIODS = 4  # of a cosine, each half of a wave
FACTORS = ("StepLR", "MultiStepLR", "ExponentialLR", "MultiplicativeLR")
BATCHES = re.compile(r"CosineAnnealingLR\([^\n]*\blen\([^)\n]*(load|batch|train|data|iter|_dl)")
EPOCHS = re.compile(r"CosineAnnealingLR\([^)]*(epoch|pass|round)", re.IGNORECASE)
DEAD = 1e-4  # of the highest rate
# step() of something that is called a scheduler
STEPS = re.compile(r"(?i)\b\w*(sched|lr_|_lr\b|anneal|warm)\w*(\[[^]\n]*\])?\.step\(")
SETS = re.compile(r"""^[^#]*\[["']lr["']\]\s*[-+*/]?=(?!=)""")  # a rate
COUNTS = ("last_epoch", "_step_count")  # of a scheduler: not the length of its schedule
LOW = 0.05  # of the highest rate: a schedule has ended
LATE = 10  # steps, and a tenth of all, with a rate of 0


class Scheduled:
    """What moves the rates of one optimizer."""

    def __init__(self, optimizer):
        self.alive, self.name, self.steps = ref(optimizer), type(optimizer).__name__, 0
        self.groups = 0
        self.zero = {}  # group: the step since which its rate is 0
        self.late = {}  # group: the first step with another rate, if all before had 0
        self.rate = self.highest = 0.0
        self.built = ()  # (class of a scheduler, line that made it)
        self.file = ""  # in which its steps are made
        self.share = 1.0  # of the rate that the optimizer was made with, that it has at first
        self.awaits = False  # does the script call step() of one by name?
        self.since = Counter()  # (class, line, updates it is made for): steps since an update
        self.turns = {}  # the same: {steps for an update: how often}
        self.moves = {}  # the same: (steps in all, the loop over a loader that was under way)
        self.ends = {}  # the same, of a class of the script's own: the rate after that many steps

    def updated(self):
        """A step of the optimizer, or one that the loss scaler skipped."""
        for key, n in self.since.items():
            self.turns.setdefault(key, Counter())[n] += 1
        self.since.clear()

    def often(self):
        """(updates that it is made for, what is wrong) of a scheduler that steps several times for
        most updates; else None."""
        for (kind, line, length), turns in self.turns.items():
            usual = median_low(turns.elements())
            if usual > 1 and turns.total() > self.steps / 2:
                if self.ends.get((kind, line, length), 0.0) > LOW * self.highest:
                    length = 0  # who knows?
                return length, f"{kind} steps {usual} times an update, at {line}: once is enough"
        return None

    def why_zero(self):
        """Why a rate is 0."""
        if often := self.often():
            return often[1]
        for kind, line, _ in (*self.turns, *self.since):
            return f"so {kind} sets it, at {line}: is its schedule shorter than the run?"
        never = f"{self.built[0][0]} never steps" if self.built else ""
        lines = _that_set_rates(self.file)
        who = f"{os.path.basename(self.file)}:{lines[0]}" if len(lines) == 1 else "the script"
        return never or f"{who} sets it, and no scheduler of torch moves it"


class Schedules(Events):
    """The rates of all optimizers."""

    def __init__(self, watch):
        self.names, self.optimizers = watch.names, {}
        self.loops = Loops()
        self.made = WeakKeyDictionary()  # scheduler: (the line that made it, see _length())
        self.counts_batches = False  # does the script give a cosine the length of something?
        self.counts_epochs = False  # or what it calls epochs?

    def iterated(self, loader):
        self.loops.begin(loader)

    def built(self, made):
        if hasattr(made, "optimizer"):
            self.made[made] = line_now(), _length(made)

    def _of(self, optimizer):
        found = self.optimizers.get(id(optimizer))
        if not found or found.alive() is not optimizer:
            found = self.optimizers[id(optimizer)] = Scheduled(optimizer)
        return found

    def scheduled(self, scheduler):
        is_own = _is_own(scheduler)
        length = self.made.get(scheduler, ("", 0))[1] if is_own else _length(scheduler)
        seen, key = self._of(scheduler.optimizer), (type(scheduler).__name__, line_now(), length)
        seen.since[key] += 1
        if is_own:
            seen.ends.setdefault(key, seen.highest)
            if scheduler.last_epoch == length:
                seen.ends[key] = _highest(scheduler.optimizer)
        if key not in seen.moves:
            code = code_of(script_frames_now())
            self.counts_batches |= bool(BATCHES.search(code))
            self.counts_epochs |= bool(EPOCHS.search(code))
        seen.moves[key] = seen.moves.get(key, (0,))[0] + 1, self.loops.last

    def skipped(self, optimizer):
        self._of(optimizer).updated()

    def stepped(self, optimizer):
        seen = self._of(optimizer)
        seen.updated()
        rates = [_known(group.get("lr")) for group in optimizer.param_groups]
        seen.groups = len(rates)
        seen.rate = max((rate for rate in rates if rate is not None), default=0.0)
        seen.highest = max(seen.highest, seen.rate)
        for k, (group, rate) in enumerate(zip(optimizer.param_groups, rates, strict=True)):
            if rate == 0 and any(p.grad is not None for p in group["params"]):
                seen.zero.setdefault(k, seen.steps)
            elif rate != 0 and seen.zero.pop(k, None) == 0:
                seen.late[k] = seen.steps
        seen.steps += 1
        if seen.steps == FIRST and len(self.optimizers) <= MOST:
            mine = {x: line for x, (line, _) in self.made.items() if x.optimizer is optimizer}
            inner = [x for outer in mine for x in getattr(outer, "_schedulers", ())]
            kinds = [type(x).__name__ for x in mine]
            frames = script_frames_now()
            code = code_of(frames)
            seen.file = frames[-1][0] if frames else ""
            names = [re.search(rf"(\w+) *= *[\w.]*{kind}\(", code) for kind in kinds]
            written = any(re.search(rf"\b{x[1]}\.step\(", code) for x in names if x)
            outer = [(type(x).__name__, line) for x, line in mine.items() if x not in inner]
            seen.built, seen.awaits = outer, written or bool(STEPS.search(code))
            made_with = [_known(group.get("initial_lr")) or 0 for group in optimizer.param_groups]
            seen.share = seen.rate / max(made_with) if max(made_with, default=0) else 1.0

    def sentences(self):
        return dict.fromkeys(text for s in self.optimizers.values() for text in self._about(s))

    def _about(self, seen):
        often = seen.often()
        yield from self._zero(seen)
        yield from self._late(seen)
        as_long = often and 0.9 * seen.steps <= often[0] <= 1.1 * seen.steps
        if not seen.zero and as_long:
            yield f"the schedule of {seen.name} is made for {often[0]} updates, and {often[1]}"
        for (kind, line, length), (n, loop) in seen.moves.items():
            if kind in FACTORS and loop and not often:
                yield from _of_batches(seen, f"{kind} at {line}", n, loop)
            if kind == "CosineAnnealingLR" and loop:
                about = f"{kind} at {line} has T_max={length}, as many as"
                yield from self._cosine(seen, about, length, n, loop, often)
        moved = seen.turns or seen.since or seen.zero
        if seen.built and not (moved or seen.awaits) and seen.steps >= LONG:
            kind, line = seen.built[0]
            rate = f": its lr stays at {seen.rate:.3g}"
            if seen.share != 1:
                rate += f", {seen.share:.3g} times the rate that it was given"
            yield (
                f"{kind} (made at {line}) has made no step in {seen.steps} steps of "
                f"{seen.name}{rate}: call its step()"
            )

    def _zero(self, seen):
        """Groups whose rate is 0."""
        for k, since in seen.zero.items():
            late = seen.steps - since
            some = since > 0 and len(seen.zero) < seen.groups  # frozen one by one
            enough = since == 0 or (late >= LATE and not some)
            if late >= max(FIRST, seen.steps / 10) and enough:
                when = f"since step {since} of {seen.steps}" if since else "at every step"
                params = seen.alive().param_groups[k]["params"] if seen.alive() else ()
                names = few([*map(self.names.of, params[:4]), *params[4:]], 4) or f"group {k}"
                yield f"the lr of {names} was 0 {when}: they do not move ({seen.why_zero()})"

    def _late(self, seen):
        """A rate that was 0 for long, and then was not."""
        late = min(seen.late.values(), default=0)
        if len(seen.late) == seen.groups and late >= max(LATE, seen.steps / 10):
            moves = [(kind, line, n) for (kind, line, _), (n, _) in seen.moves.items()]
            made = [f"{kind} at {line} made {n} steps" for kind, line, n in moves]
            yield (
                f"the lr of {seen.name} was 0 in its first {late} steps, of {seen.steps}: "
                f"{few(made, 2) or 'the script sets it'}: is a schedule that is meant for each "
                "update called once a pass?"
            )

    def _cosine(self, seen, about, length, n, loop, often):
        """A cosine of n steps that is as long as there were passes, or batches of a pass."""
        of_epochs = length == loop.begun > 1 and length != loop.batches
        if of_epochs and self.counts_epochs and n >= PERIODS * length and not often:
            yield (
                f"{about} there were passes over the loader at {loop.line}, and made {n} steps: "
                f"the lr of {seen.name} falls and rises in turn, {length} steps each: call it once "
                f"a pass, or give it T_max={n}"
            )
        few_moves = n <= loop.begun and 4 * n < 3 * length
        if length == loop.batches and self.counts_batches and few_moves:
            yield (
                f"{about} the batches of the loader at {loop.line}, and made {n} steps, one a "
                f"pass: the lr of {seen.name} ends at {seen.rate:.3g} of {seen.highest:.3g}: give "
                "it the number of passes, or call it with each batch"
            )


def _of_batches(seen, scheduler, n, loop):
    """A rate that has died, because it falls by a factor with each update."""
    many = loop.begun > 1 and n > 0.9 * seen.steps
    if many and 0 < seen.rate < DEAD * seen.highest:
        yield (
            f"{scheduler} has let the lr of {seen.name} fall from {seen.highest:.3g} to "
            f"{seen.rate:.3g}: it made a step with each update, {n} in all: is once a pass over "
            f"the loader at {loop.line} meant ({loop.begun} passes)?"
        )


def _that_set_rates(file):
    """The numbers of the lines of a file that set a rate."""
    lines = linecache.getlines(file) if file else ()
    return [n for n, code in enumerate(lines, 1) if SETS.search(code)]


def _is_own(scheduler):
    """Whether its class is the script's own."""
    return not type(scheduler).__module__.startswith("torch.")


def _length(scheduler):
    """The steps that its schedule is made for, or 0. Of a class of the script's own: the largest
    number that it holds."""
    known = vars(scheduler)
    if not _is_own(scheduler):
        return known.get("T_max") or known.get("total_iters") or 0
    names = [name for name in known if name not in COUNTS and "warm" not in name.lower()]
    numbers = [known[name] for name in names if type(known[name]) in (int, float)]
    return max((n for n in numbers if n > 1), default=0)


def _highest(optimizer):
    rates = [_known(group.get("lr")) for group in optimizer.param_groups]
    return max((rate for rate in rates if rate is not None), default=0.0)


def _known(rate):
    """None for a rate on a device: a number there would be waited for."""
    if isinstance(rate, Tensor):
        return float(rate) if rate.is_cpu else None
    return rate
