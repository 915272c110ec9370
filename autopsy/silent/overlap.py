"""
Overlap: are some of the samples of an evaluation trained on?

Two Subsets of one data set may share indices: positions within a split that were never mapped to
those of the whole, say. Nothing fails, and the test looks better than it is. Told are Subsets with
which one network is trained and evaluated, that share some of their samples and not all: who
evaluates what he trains on, or a part of it, means it. Weights that are loaded begin another run.
"""

from weakref import WeakSet, ref

from torch.utils.data import Subset

from ..frames import line_now
from ..watch.deferred import params_of
from ..watch.events import Events

MOST = 16  # Subsets


class Seen:
    """A Subset that a loader iterates."""

    def __init__(self, subset):
        self.line = line_now()
        self.data = ref(subset.dataset)
        self.indices = {int(i) for i in subset.indices}
        self.optimizers, self.networks = WeakSet(), WeakSet()  # that step with it; are evaluated


class Overlap(Events):
    """The Subsets that loaders iterate."""

    def __init__(self, watch):
        self.all, self.last = [], None

    def iterated(self, loader):
        subset, self.last = loader.dataset, None
        if type(subset) is not Subset:
            return
        now = Seen(subset)
        known = [seen for seen in self.all if seen.data() is now.data()]
        self.last = next((seen for seen in known if seen.indices == now.indices), None)
        if self.last is None and len(self.all) < MOST:
            self.last = now
            self.all.append(now)

    def loaded(self, module, state, answer):
        self.all, self.last = [], None

    def evaluated(self, module):
        if self.last and not module.training:
            self.last.networks.add(module)

    def stepped(self, optimizer):
        if self.last:
            self.last.optimizers.add(optimizer)

    def sentences(self):
        for seen in self.all:
            weights = {p for module in seen.networks for p in module.parameters()}
            for other in self.all if weights and not seen.optimizers else ():
                trained = {p for optimizer in other.optimizers for p in params_of(optimizer)}
                if weights.isdisjoint(trained):
                    continue
                shared = len(seen.indices & other.indices) if seen.data() is other.data() else 0
                if 0 < shared < min(len(seen.indices), len(other.indices)):
                    yield (
                        f"{shared} of the {len(seen.indices)} samples that are evaluated at "
                        f"{seen.line} are trained on at {other.line}: both are Subsets of one data "
                        "set, by indices that overlap"
                    )
