"""
Warm-up: does the learning rate begin anew with each pass over the loader?

A warm-up that counts the steps within an epoch, or a scheduler that is built in each epoch, raises
the rate from its first value again and again. Told is a rate that only rises within each pass, and
is back at its first value at each start so far. No word if somebody wrote to the weights or to the
moments between two passes (ReLoRA, a range test), if other weights train then, if the batches
become larger, or if a scheduler of torch counts on and comes back all the same: its schedule is
periodic.
"""

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch import Tensor

from ...watch.deferred import params_of
from ...watch.events import Events
from ..shared.passes import Loop, Loops, writes_to

OFTEN = 2  # returns: three passes begin with the same rate
RISES = 3  # steps of a pass with a higher rate than the step before
HIGH = 1.5  # times the first rate
SAME = 1e-6  # of it: a scheduler that is built again multiplies once more
PLACES = 2  # first steps of a pass: some loops set the rate after the step


@dataclass(eq=False)
class Rates:
    """The rates of an optimizer, pass by pass, as long as they may begin anew."""

    name: str
    loop: Loop  # over the loader
    over: bool  # it is known that they do not, or nothing can be known
    begun: int = 0  # times that this loop has begun
    weights: set = frozenset()  # ids
    passes: int = 0
    steps: int = 0  # of this pass
    first: list = field(default_factory=list)  # rates of the first places of the first pass
    last: float = 0.0
    low: float = 0.0  # to which they come back
    high: float = 0.0
    rises: int = 0  # in a row
    returns: int = 0
    is_back: bool = False  # in this pass
    versions: dict = field(default_factory=dict)  # at the start of the pass: see _versions()
    moves: dict = field(default_factory=dict)  # id of a scheduler: (its steps in this pass, count)
    counts: dict = field(default_factory=dict)  # of these, after the pass before


class WarmUp(Events):
    """The rates of all optimizers, and where loaders begin."""

    def __init__(self, watch):
        self.optimizers = WeakKeyDictionary()
        self.all = []
        self.loops = Loops()

    def iterated(self, loader):
        self.loops.begin(loader)

    def loaded(self, module, state, answer):
        """Weights come back, too."""
        for seen in self.optimizers.values():
            seen.over = True

    def wrote(self, line, weights, name, given):
        written = {id(w) for w in weights}
        for seen in self.optimizers.values():
            seen.over |= not seen.weights.isdisjoint(written)

    def scheduled(self, scheduler):
        seen = self.optimizers.get(scheduler.optimizer)
        if seen and not seen.over:
            steps, _ = seen.moves.get(id(scheduler), (0, 0))
            seen.moves[id(scheduler)] = steps + 1, scheduler.last_epoch

    def before_step(self, optimizer, losses, norm, moved):
        seen = self.optimizers.get(optimizer)
        if seen is None:
            seen = Rates(type(optimizer).__name__, self.loops.last, over=not self.loops.last)
            self.optimizers[optimizer] = seen
            self.all.append(seen)
        if not seen.over and seen.begun != seen.loop.begun:
            seen.begun = seen.loop.begun
            seen.over = self._is_restart(seen, optimizer)
            seen.weights = {id(p) for p in params_of(optimizer)}
            seen.passes += 1
            seen.steps, seen.is_back = 0, False

    def _is_restart(self, seen, optimizer):
        """Before the first step of a pass: does something else begin anew, or is it a period?"""
        before, seen.versions = seen.versions, _versions(optimizer)
        moves, seen.moves = seen.moves, {}
        counts = [(key, n) for key, (steps, n) in moves.items() if steps >= RISES]
        periodic = any(n > seen.counts.get(key, n) for key, n in counts)
        seen.counts = dict(counts)
        now, steps = seen.versions, max(1, seen.steps)
        kept = all(key in now and (now[key] - n) % steps == 0 for key, n in before.items())
        return periodic or not kept

    def stepped(self, optimizer):
        seen = self.optimizers.get(optimizer)
        if seen is None or seen.over:
            return
        rates = [group.get("lr") for group in optimizer.param_groups]
        if not all(isinstance(rate, float | int) for rate in rates):  # on a device
            seen.over = True
            return

        rate = max(rates, default=0.0)
        seen.steps += 1
        if seen.passes == 1 and seen.steps <= PLACES:
            seen.first.append(rate)
        elif rate < seen.last:
            self._fell(seen, rate)
        elif rate > seen.last:
            seen.rises += 1
        if seen.passes > 1 and seen.steps == PLACES and not seen.is_back:
            seen.over = True  # it goes on
        seen.last = rate

    def _fell(self, seen, rate):
        first = seen.first[seen.steps - 1] if seen.steps <= len(seen.first) else seen.last
        again = abs(rate - first) <= SAME * first and seen.last > HIGH * first
        if again and seen.rises >= RISES:
            seen.returns += 1
            seen.low, seen.high = rate, max(seen.high, seen.last)
            seen.rises, seen.is_back = 0, True
        else:
            seen.over = True

    def sentences(self):
        for seen in self.all:
            if seen.returns >= OFTEN and len(seen.loop.sizes) < 2:
                yield (
                    f"the learning rate of {seen.name} begins anew with each pass over the loader "
                    f"at {seen.loop.line}: it rose to {seen.high:.3g} and fell back to its "
                    f"first value, {seen.low:.3g}, {seen.returns} times: count the steps of "
                    "the warm-up over the whole run, and build its scheduler once"
                )


def _versions(optimizer):
    """How often something wrote into each weight and moment: each step does it equally often. That
    a weight trains counts as well."""
    found = {}
    for p in params_of(optimizer):
        found[id(p), p.requires_grad] = writes_to(p)
        state = optimizer.state.get(p)
        for key, t in state.items() if isinstance(state, dict) else ():
            if isinstance(t, Tensor):
                found[id(p), key, id(t)] = writes_to(t)
    return found
