"""
Frozen statistics: do the running statistics of a frozen module still move?

requires_grad_(False) freezes weights, and train() of the whole network switches the running
statistics of a frozen part on again: what it computes drifts. Statistics and weights are read at
the steps 1, 2, 4, 8, ...: a part is told whose statistics move and whose weights do not, neither by
an optimizer nor by hand (as those of an average do).
"""

from itertools import pairwise
from weakref import WeakKeyDictionary

import torch

from ..tensors import few, is_sharded, running_statistics
from ..watch.events import Events

OFTEN = 3  # reads


class FrozenStatistics(Events):
    """Parts of networks without a weight to train, and with running statistics."""

    def __init__(self, watch):
        self.names, self.recorder, self.deferred = watch.names, watch.recorder, watch.deferred
        self.reads = WeakKeyDictionary()  # part: (norms of statistics, of weights) at each read

    def stepped(self, optimizer):
        if self.recorder.steps and self.recorder.steps.bit_count() < 2:
            found = [part for root in list(self.names.roots) for part in _frozen(root)]
            for part in {*self.reads} - {*found}:
                del self.reads[part]  # it was not frozen throughout
            for part in found:
                several = _statistics(part), [*part.parameters()]
                norms = [torch.stack(self.deferred.norms(some)) for some in several]
                self.reads.setdefault(part, []).append(norms)

    def sentences(self):
        drifting = []
        for part, reads in self.reads.items():
            statistics, weights = ([norms[k].tolist() for norms in reads] for k in (0, 1))
            moves = all(a != b for a, b in pairwise(statistics))
            if len(reads) >= OFTEN and moves and weights.count(weights[0]) == len(weights):
                drifting.append(self.names.of(_statistics(part)[0]))
        if drifting:
            yield (
                f"running statistics move at each step ({few(drifting, 4)}), though their modules "
                "are frozen (requires_grad is False for all weights): call eval() on these after "
                "each train()"
            )


def _statistics(module):
    return [b for b in running_statistics(module).values() if b.is_floating_point()]


def _frozen(module):
    """The largest parts of it in which no weight trains, and some statistics may move."""
    weights = [*module.parameters()]
    if any(map(is_sharded, weights)):
        return []
    if any(p.requires_grad for p in weights):
        return [part for child in module.children() for part in _frozen(child)]
    whole = any(p.dim() > 1 for p in weights)  # more than a BatchNorm alone
    return [module] * (whole and bool(_statistics(module)))
