"""
Overlap: are some of the samples of an evaluation trained on before it?

Two Subsets of one data set may share indices: positions within a split that were never mapped to
those of the whole, say. Nothing fails, and the test looks better than it is. Told are Subsets with
which one network was trained and then evaluated, that share some of their samples and not all: who
evaluates what he trains on, or a part of it, means it. Weights that are loaded, and a new
optimizer, begin another run.
"""

from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch.utils.data import Subset

from ...frames import line_now
from ...watch.deferred import params_of
from ...watch.events import Events

MOST = 16  # Subsets


class Seen:
    """A Subset that a loader iterates."""

    def __init__(self, subset):
        self.line, self.data = line_now(), ref(subset.dataset)
        self.indices = frozenset(torch.as_tensor(subset.indices).tolist())
        self.optimizers = WeakSet()  # that step with it
        self.shared = {}  # line of a training before its evaluation: how many samples are in both


class Overlap(Events):
    """The Subsets that loaders iterate."""

    def __init__(self, watch):
        self.all, self.last = [], None
        self.of = WeakKeyDictionary()  # Subset: one of these; of the same indices the same
        self.known = WeakSet()  # optimizers
        self.found = {}

    def iterated(self, loader):
        subset, self.last = loader.dataset, None
        if type(subset) is Subset:
            if subset not in self.of:
                self.of[subset] = self._add(_seen(subset))
            self.last = self.of[subset]

    def _add(self, new):
        same = [seen for seen in self.all if new and seen.data() is new.data()]
        same = [seen for seen in same if seen.indices == new.indices]
        if new and not same and len(self.all) < MOST:
            same = [new]
            self.all.append(new)
        return next(iter(same), None)

    def _begin(self):
        for seen in self.all:
            seen.optimizers.clear()

    def loaded(self, module, state, answer):
        self._begin()

    def stepped(self, optimizer):
        if optimizer not in self.known:
            self._begin()
            self.known.add(optimizer)
        if self.last:
            self.last.optimizers.add(optimizer)

    def evaluated(self, module):
        seen = self.last
        if module.training or not seen or seen.optimizers:
            return
        weights = {*module.parameters()}
        for other in self.all:
            if other.line not in seen.shared and other.data() is seen.data():
                trained = {p for optimizer in other.optimizers for p in params_of(optimizer)}
                if not weights.isdisjoint(trained):
                    self._compare(seen, other)

    def _compare(self, seen, other):
        shared = seen.shared[other.line] = len(seen.indices & other.indices)
        if 0 < shared < min(len(seen.indices), len(other.indices)):
            self.found.setdefault((seen.line, other.line), (
                f"{shared} of the {len(seen.indices)} samples that are evaluated at {seen.line} "
                f"are trained on before, at {other.line}: both are Subsets of one data set, by "
                "indices that overlap"
            ))  # fmt: skip

    def sentences(self):
        yield from self.found.values()


def _seen(subset):
    """None if its indices are no numbers, or nothing refers to its data set."""
    try:
        return Seen(subset)
    except (TypeError, ValueError, RuntimeError):
        return None
