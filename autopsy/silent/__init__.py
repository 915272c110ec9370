"""
Silent: faults that make no NaN. Weights that do not move, a loss that jumps, an inf that goes away.

Delete this folder, and autopsy finds NaN and inf as before: watching/silent.py is its only door.
"""

from torch import nn

from ..tensors import LIMIT
from .reasons import Reasons
from .spike import Spike
from .still import Still
from .swallowed import Swallowed


class Silent:
    """Passes each event of watching/silent.py to those whom it concerns."""

    def __init__(self, watch):
        self.still = Still(watch.names, watch.ledger, watch.tape)
        self.spike = Spike(watch.scaling, watch.tape, watch.names)
        self.swallowed = Swallowed(watch.tape)
        self.called = self.spike.takes
        self.wrote = self.spike.wrote
        self.backward = self.still.begins
        self.passed = self.still.passed
        self.stepped = self.still.stepped
        self.over = self.swallowed.begins

    @property
    def overflows(self):
        return self.swallowed.found

    def wraps(self):
        yield nn.Module, "load_state_dict", self.still.loads

    def before_step(self, optimizer, losses, norm, moved):
        self.swallowed.ends(good=sum(losses) + norm <= LIMIT)
        if norm <= LIMIT:
            self.spike.look(optimizer, losses, norm, moved)

    def sentences(self):
        for room in (Reasons(self.still), self.spike, self.swallowed):
            yield from room.sentences()
