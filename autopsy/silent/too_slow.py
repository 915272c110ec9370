"""
Too slow: has a classifier learnt nothing, because its steps are too small?

SGD with the learning rate of Adam, or a loop that divides its rate at each step: each matrix gets a
gradient and has moved by less than a thousandth, and the cross-entropy of C classes stays at ln(C),
that of equal guesses. It is read at the steps 0, 64, 128, 256, ... of an optimizer. Nothing is told
of a rate that rises, nor where an ordinary rate would not have moved the weights either: there it
is not the cause.
"""

from math import log
from weakref import WeakKeyDictionary

from ..tensors import numbers_of
from ..watch.deferred import params_of
from ..watch.events import Events
from .gradient_path import nodes_of
from .losses import FIRST, NEAR, classes_of

AS_GUESSES = 0.1  # of ln(C)
STILL, MOVING = 1e-3, 1e-2  # of the norm of a matrix
ORDINARY = 1e-2  # learning rate
EARLY = 64  # steps
RISING = 1.2  # times the mean of the rates
SAMPLE = 256  # numbers of a matrix
OPTIMIZERS = 8


class Begun:
    """An optimizer whose first loss was that of equal guesses."""

    def __init__(self, optimizer, classes):
        self.name, self.classes = type(optimizer).__name__, classes
        self.start = [(p, _sample(p)) for p in params_of(optimizer) if p.dim() > 1]
        self.steps, self.rates = 0, 0.0  # rates: their sum
        self.told = ""


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
            rates = [group.get("lr") for group in optimizer.param_groups]
            seen.rates += max((x for x in rates if isinstance(x, float | int)), default=1.0)
            if seen.steps >= EARLY and seen.steps.bit_count() == 1:
                rising = seen.steps * rates[0] > RISING * seen.rates
                seen.told = "" if rising else self._look(seen, sum(losses), rates[0])
            seen.steps += 1

    def _begins(self, optimizer, loss):
        near = [classes for classes in self.classes if _are_guesses(loss, classes)]
        if not near or len(self.all) == OPTIMIZERS:
            return None
        self.all.append(Begun(optimizer, near[0]))
        return self.all[-1]

    def _look(self, seen, loss, rate):
        """A sentence, or ""."""
        apart = [_sample(p) - start for p, start in seen.start]
        sizes = self.deferred.norms([*apart, *(start for _, start in seen.start)])
        sizes = self.deferred.to_host(sizes)
        pairs = zip(sizes[: len(apart)], sizes[len(apart) :], strict=True)
        moved = max((a / b for a, b in pairs if b), default=1.0)
        slow = 0 < moved < STILL and moved * ORDINARY * seen.steps > MOVING * seen.rates
        if not (slow and _are_guesses(loss, seen.classes)):
            return ""
        return (
            f"in {seen.steps} updates {seen.name} has moved no matrix by more than {moved:.1g} of "
            f"its norm, and the cross-entropy is {loss:.3g}, that of equal guesses among "
            f"{seen.classes} classes: its learning rate, {rate:.2g} by then, is too small"
        )

    def sentences(self):
        return filter(None, (seen.told for seen in self.all))


def _are_guesses(loss, classes):
    return abs(loss / log(classes) - 1) < AS_GUESSES


def _sample(p):
    flat = numbers_of(p.detach()).reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)].float().clone()
