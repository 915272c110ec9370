"""
Bursts: does a learning rate scheduler step several times in a row for one update?

`if updates % 60 == 0: scheduler.step()` in a loop over micro-batches stays true until the next
update: a rate that should fall by a factor falls by its eighth power. Told are such rows of steps,
at one line and with no update in between, that come at least twice between many updates, where the
rate has died of them, and one step in place of each row would have left it alive. No word before
the first update (a resume), of a row as long as the updates before it (a schedule for batches that
catches up), and of a loop that does nothing else.
"""

import ast
from dataclasses import dataclass, field
from statistics import median_low
from weakref import WeakKeyDictionary

from torch import Tensor

from ...frames import line_of, script_frames_now
from ...watch.events import Events
from ..shared.syntax import covers, tree_of

LEAST = 10  # updates between two rows, and twice as many as a row has steps
DEAD, ALIVE = 1e-4, 1e-3  # of the highest rate
LATE = 0.1  # share of the updates that a dead rate has
MANY = 99_999  # steps of a scheduler
MEASURES = "ReduceLROnPlateau"  # how far it goes is not the number of its steps


@dataclass(eq=False)
class Rate:
    """That of an optimizer."""

    name: str
    updates: int = 0
    dead: int = 0  # updates
    now: float = 0.0
    highest: float = 0.0


@dataclass(eq=False)
class Moves:
    """The steps of a scheduler."""

    kind: str
    rate: Rate
    after: list = field(default_factory=list)  # the rate after each step
    alone: int = 0  # steps that are in no row
    rows: list = field(default_factory=list)  # (steps, updates before, frames)
    row: list = field(default_factory=list)  # the frames of the steps since the last update
    begun: int = 0  # updates before this row
    earlier: int = 0  # the same of the one before

    def close(self):
        """A row is over."""
        if len(self.row) > 1 and self.begun:
            one = self.row[0] if len({*self.row}) == 1 else ()
            self.rows.append((len(self.row), self.begun - self.earlier, one))
        else:
            self.alone += len(self.row)
        self.row, self.earlier = [], self.begun

    def is_sure(self):
        """Whether the rate has died of rows that nobody meant."""
        lines = {frames for *_, frames in self.rows}
        far = all(updates >= max(LEAST, 2 * n) for n, updates, _ in self.rows)
        rate = self.rate
        died = rate.now < DEAD * rate.highest and rate.dead > LATE * rate.updates
        if len(self.rows) < 2 or len(lines) > 1 or not (far and died):
            return False
        return self.left() > ALIVE * rate.highest and _trains(*lines)

    def left(self):
        """The rate with one step in place of each row."""
        return self.after[self.alone + len(self.rows) - 1]


class Bursts(Events):
    """The steps of all schedulers, and the updates between them."""

    def __init__(self, watch):
        self.rates = WeakKeyDictionary()  # optimizer: Rate
        self.moves = WeakKeyDictionary()  # scheduler: Moves
        self.all = []

    def _of(self, optimizer):
        return self.rates.setdefault(optimizer, Rate(type(optimizer).__name__))

    def stepped(self, optimizer):
        rate = self._of(optimizer)
        rate.now = _highest(optimizer)
        rate.highest = max(rate.highest, rate.now)
        rate.dead += rate.now < DEAD * rate.highest
        rate.updates += 1

    def skipped(self, optimizer):
        self._of(optimizer).updates += 1

    def scheduled(self, scheduler):
        if type(scheduler).__name__ == MEASURES:
            return
        moves, rate = self.moves.get(scheduler), self._of(scheduler.optimizer)
        if moves is None:
            moves = self.moves[scheduler] = Moves(type(scheduler).__name__, rate)
            self.all.append(moves)
        if len(moves.after) < MANY:
            if moves.row and moves.begun != rate.updates:
                moves.close()
            moves.begun = rate.updates
            moves.row.append(script_frames_now())
            moves.after.append(_highest(scheduler.optimizer))

    def sentences(self):
        for moves in self.all:
            moves.close()
            if len(moves.after) < MANY and moves.is_sure():
                rate, (*_, frames) = moves.rate, moves.rows[0]
                times = median_low([n for n, *_ in moves.rows])
                yield (
                    f"{moves.kind} at {line_of(frames)} steps {times} times in a row, with no "
                    f"update in between, {len(moves.rows)} times: the lr of {rate.name} has fallen "
                    f"from {rate.highest:.3g} to {rate.now:.3g}, and one step each would have left "
                    f"{moves.left():.3g}: is its condition true for several rounds of the loop? "
                    "Call it beside the update, once"
                )


def _highest(optimizer):
    """The rate of the fastest group. A rate on a device would be waited for."""
    rates = [group.get("lr", 0.0) for group in optimizer.param_groups]
    return max((float(r) for r in rates if not isinstance(r, Tensor) or r.is_cpu), default=0.0)


def _trains(frames):
    """Whether the innermost loop around this line does more than to call it."""
    if not frames:
        return False
    file, line, _ = frames[-1]
    loops = [node for node in ast.walk(tree_of(file))
             if isinstance(node, ast.For | ast.While) and covers(node, line)]  # fmt: skip
    inner = max(loops, key=lambda node: node.lineno, default=None)
    return any(getattr(node, "attr", "") == "backward" for node in ast.walk(inner or ast.Pass()))
