"""
Too slow: has a classifier learnt nothing, because its steps are too small?

SGD with the learning rate of Adam, or a loop that divides its rate at each step: each matrix gets a
gradient and has moved by less than a thousandth, and the cross-entropy of C classes stays at ln(C),
that of equal guesses. It is read at the steps 0, 64, 128, 256, ... of an optimizer. Nothing is told
of a rate that rises, nor where an ordinary rate would not have moved the weights either: there it
is not the cause. Another cause is a weight decay that is larger than the gradient: told where most
matrices have shrunk to a third.
"""

from math import log
from statistics import median
from weakref import WeakKeyDictionary

from ...tensors import is_sharded, numbers_of
from ...watch.deferred import params_of
from ...watch.events import Events
from ...watch.graph import nodes_of
from ..shared.classification import NEAR, classes_of

FIRST = 12  # backward passes
AS_GUESSES = 0.1  # of ln(C)
STILL, MOVING = 1e-3, 1e-2  # of the norm of a matrix
SHRUNK = 1 / 3  # to so much of the norm
ORDINARY = 1e-2  # learning rate
EARLY = 64  # steps
RISING = 1.2  # times the mean of the rates
SAMPLE = 256  # numbers of a matrix
OPTIMIZERS = 8


class Begun:
    """An optimizer whose first loss was that of equal guesses."""

    def __init__(self, optimizer, classes):
        self.name, self.classes = type(optimizer).__name__, classes
        self.start = _samples(optimizer)
        self.steps, self.rates = 0, 0.0  # rates: their sum
        self.sentence = ""


class TooSlow(Events):
    """Optimizers that hardly move their matrices."""

    def __init__(self, watch):
        self.deferred = watch.deferred
        self.passes, self.classes = 0, set()
        self.begun = WeakKeyDictionary()  # optimizer: Begun, or None
        self.all = []

    def backward(self, losses):
        self.passes += 1
        if self.passes <= FIRST:
            self.classes |= {classes_of(node) for node in nodes_of(losses, NEAR)} - {0}

    def before_step(self, optimizer, losses, norm, moved):
        if not losses:  # those of the very first step were read before it
            return
        if optimizer not in self.begun:
            self.begun[optimizer] = self._begins(optimizer, sum(losses))
        seen = self.begun[optimizer]
        if seen:
            rate = max(group["lr"] for group in optimizer.param_groups)
            seen.rates += rate
            if seen.steps >= EARLY and seen.steps.bit_count() == 1:
                rising = seen.steps * rate > RISING * seen.rates
                seen.sentence = "" if rising else self._look(seen, optimizer, sum(losses), rate)
            seen.steps += 1

    def _begins(self, optimizer, loss):
        near = [classes for classes in self.classes if _are_guesses(loss, classes)]
        # a rate on a device would be waited for
        known = all(isinstance(group.get("lr"), float | int) for group in optimizer.param_groups)
        whole = known and not any(map(is_sharded, params_of(optimizer)))
        if not (near and whole) or len(self.all) == OPTIMIZERS:
            return None
        self.all.append(Begun(optimizer, near[0]))
        return self.all[-1]

    def _look(self, seen, optimizer, loss, rate):
        """A sentence, or ""."""
        now = _samples(optimizer)
        if len(now) != len(seen.start):  # it was given more
            return ""
        apart = [a - b for a, b in zip(now, seen.start, strict=True)]
        sizes = self.deferred.to_host(self.deferred.norms([*apart, *seen.start]))
        pairs = zip(sizes[: len(apart)], sizes[len(apart) :], strict=True)
        moved = max((a / b for a, b in pairs if b), default=1.0)
        decay = max(group.get("weight_decay", 0) for group in optimizer.param_groups)
        kept = sizes[len(apart) :], self.deferred.to_host(self.deferred.norms(now))
        shrunk = median([b / a for a, b in zip(*kept, strict=True) if a] or [1.0])
        if decay and shrunk < SHRUNK and _are_guesses(loss, seen.classes):
            return (
                f"in {seen.steps} updates of {seen.name} most matrices have shrunk to less than "
                f"{SHRUNK:.2g} of their norm, and the cross-entropy is {loss:.3g}, that of equal "
                f"guesses among {seen.classes} classes: its weight_decay, {decay:g}, is larger "
                "than the gradient"
            )
        slow = 0 < moved < STILL and moved * ORDINARY * seen.steps > MOVING * seen.rates
        if not (slow and _are_guesses(loss, seen.classes)):
            return ""
        return (
            f"in {seen.steps} updates {seen.name} has moved no matrix by more than {moved:.1g} of "
            f"its norm, and the cross-entropy is {loss:.3g}, that of equal guesses among "
            f"{seen.classes} classes: its learning rate, {rate:.2g} by then, is too small"
        )

    def sentences(self):
        return filter(None, (seen.sentence for seen in self.all))


def _are_guesses(loss, classes):
    return abs(loss / log(classes) - 1) < AS_GUESSES


def _samples(optimizer):
    """Some numbers of each matrix, copied."""
    matrices = [p for p in params_of(optimizer) if p.dim() > 1 and p.is_floating_point()]
    flat = [numbers_of(p.detach()).reshape(-1) for p in matrices]
    return [t[:: max(1, t.numel() // SAMPLE)].float().clone() for t in flat]
