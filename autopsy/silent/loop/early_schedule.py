"""
Early schedule: does a learning rate scheduler step before the first update, and use up a milestone?

Since PyTorch 1.1 a scheduler that steps at the top of each round loses the first value of its
schedule. Told is one that lets the rate fall far before anything was trained, at a line at which
it goes on to step in turn with the updates: no update has the first rate. No word of a function
(which may count from 1), where the rate rises or hardly falls, where it was 0, where a scheduler
goes on from an earlier run, or where several steps in a row do so.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import Tensor

from ...frames import line_of, script_frames_now
from ...watch.events import Events

OFTEN = 3  # rounds
KINDS = ("StepLR", "MultiStepLR")
FALL = 0.5  # to this share of the first rate, or less


@dataclass(eq=False)
class Early:
    """A scheduler that was built before any training."""

    kind: str = ""
    name: str = ""  # of its optimizer
    first: float = 0.0  # rate
    then: float = 0.0  # after its first step
    frames: tuple = ()  # of that
    highest: float = 0.0  # rate of an update
    rounds: int = 0  # that begin with a step there
    over: bool = False  # nothing is wrong, or nothing can be known
    has_trained: bool = False  # since its last step


class EarlySchedule(Events):
    """The first steps of all schedulers."""

    def __init__(self, watch):
        self.schedulers = WeakKeyDictionary()
        self.all = []

    def built(self, made):
        if hasattr(made, "optimizer") and made not in self.schedulers:
            fresh = getattr(made, "last_epoch", None) == 0
            kind = type(made).__name__
            seen = Early(kind, first=_highest(made), over=not fresh or kind not in KINDS)
            self.schedulers[made] = seen
            self.all += [] if seen.over else [seen]

    def _of(self, optimizer):
        """What may be told of its schedulers."""
        for scheduler, seen in [*self.schedulers.items()]:
            if scheduler.optimizer is optimizer and not seen.over:
                yield seen

    def passed(self):
        """Before its first step it must not be: something has trained."""
        for seen in self.schedulers.values():
            seen.over |= not seen.frames

    def restored(self, optimizer):
        for seen in self._of(optimizer):
            seen.over |= not seen.rounds

    def scheduled(self, scheduler):
        seen = self.schedulers.get(scheduler)
        if seen is None or seen.over:
            return
        frames = script_frames_now()
        if not seen.frames:
            seen.frames, seen.then = frames, _highest(scheduler)
            seen.name = type(scheduler.optimizer).__name__
            is_first = scheduler.last_epoch == 1
            seen.over = not (is_first and 0 < seen.then <= FALL * seen.first)
        elif not seen.has_trained or frames != seen.frames:
            seen.over = True
        seen.rounds += 1
        seen.has_trained = False

    def stepped(self, optimizer):
        for seen in self._of(optimizer):
            if not seen.frames:
                seen.over = True
            seen.has_trained = True
            seen.highest = max(seen.highest, _highest_of(optimizer))

    skipped = stepped

    def sentences(self):
        for seen in self.all:
            sure = seen.rounds >= OFTEN and 0 < seen.highest <= FALL * seen.first
            if sure and not seen.over:
                yield (
                    f"{seen.kind} at {line_of(seen.frames)} steps before the first step of "
                    f"{seen.name}: no update has the first lr, {seen.first:.3g}: it is "
                    f"{seen.then:.3g} from the first update on: call step() of the scheduler "
                    "after the updates of each round"
                )


def _highest(scheduler):
    return _highest_of(scheduler.optimizer)


def _highest_of(optimizer):
    """The rate of the fastest group. A rate on a device would be waited for."""
    rates = [group.get("lr", 0.0) for group in optimizer.param_groups]
    return max((float(r) for r in rates if not isinstance(r, Tensor) or r.is_cpu), default=0.0)
