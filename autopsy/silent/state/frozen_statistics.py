"""
Frozen statistics: do the running statistics of a frozen module still move, or stand still in an
average?

requires_grad_(False) freezes weights, and train() of the whole network switches the running
statistics of a frozen part on again: what it computes drifts. Statistics and weights are read at
the steps 1, 2, 4, 8, ...: a part is told whose statistics move and whose weights do not, neither by
an optimizer nor by hand (as those of an average do). A norm without weights of its own has nothing
else to learn.

A loop over parameters() averages weights, and no running statistic: those are buffers. Told is a
module whose weights the script writes by hand, that is evaluated in eval mode, and none of whose
statistics was ever moved from 0 and 1, while a module of the same class has others.
"""

import re
from itertools import pairwise
from weakref import WeakKeyDictionary, WeakSet

import torch

from ...frames import code_of, line_now, script_frames_now
from ...tensors import few, is_sharded, running_statistics, storage_of
from ...watch.events import Events

OFTEN = 3  # reads
EARLY = 8  # steps in which writes are noted
ADAPTS = re.compile(r"reset_running_stats|ada_?bn|test.time.(adapt|train)", re.IGNORECASE)
BEGINS = ("zero_", "fill_", "uniform_", "normal_", "trunc_normal_")  # initialise a weight


class FrozenStatistics(Events):
    """Parts of networks without a weight to train, and with running statistics."""

    def __init__(self, watch):
        self.names, self.recorder, self.deferred = watch.names, watch.recorder, watch.deferred
        self.reads = WeakKeyDictionary()  # part: (norms of statistics, of weights) at each read
        self.is_meant = False  # does the script adapt the statistics alone?
        self.written = WeakSet()  # storages of weights
        self.looks = WeakKeyDictionary()  # averages: how often they were looked at
        self.averages = {}  # names of statistics: line

    def wrote(self, line, weights, name, given):
        if self.recorder.steps < EARLY and name not in BEGINS:
            self.written.update(map(storage_of, weights))

    def evaluated(self, module):
        looks = self.looks.get(module, 0)
        if module.training or looks == OFTEN or not self.written:
            return
        if any(storage_of(p) in self.written for p in module.parameters()):
            self.looks[module] = looks + 1
            mine = _statistics(module)
            others = [root for root in self.names.roots if type(root) is type(module)]
            moved = any(not _as_made(_statistics(root)) for root in others)
            if mine and moved and _as_made(mine):
                self.averages.setdefault(few([*map(self.names.of, mine)], 4), line_now())

    def stepped(self, optimizer):
        if self.recorder.steps and self.recorder.steps.bit_count() < 2 and not self.is_meant:
            code = code_of(script_frames_now())
            self.is_meant = bool(ADAPTS.search(code))
            found = [part for root in list(self.names.roots) for part in _frozen(root)]
            for part in {*self.reads} - {*found}:
                del self.reads[part]  # it was not frozen throughout
            for part in found:
                several = _statistics(part), [*part.parameters()]
                norms = [torch.stack(self.deferred.norms(some)) for some in several]
                self.reads.setdefault(part, []).append(norms)

    def sentences(self):
        drifting = []
        for part, reads in self.reads.items() if not self.is_meant else ():
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
        for names, line in self.averages.items():
            yield (
                f"an average of weights is evaluated at {line} with running statistics that are "
                f"still 0 and 1 ({names}): they are buffers, and parameters() has none: copy them "
                "from the network that trains"
            )


def _as_made(statistics):
    """Whether each is 0, or 1."""
    return all((t == t.flatten()[0]).all() and t.flatten()[0] in (0, 1) for t in statistics)


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
    norms = [module.get_submodule(n.rpartition(".")[0]) for n in running_statistics(module)]
    return [module] * (whole and any([*norm.parameters(recurse=False)] for norm in norms))
