"""
Frozen statistics: do the running statistics of a frozen module still move, or stand still in an
average?

requires_grad_(False) freezes weights, and train() of the whole network switches the running
statistics of a frozen part on again: what it computes drifts. Statistics and weights are read at
the steps 1, 2, 4, 8, ..., counted anew when another optimizer begins (a teacher was trained, and is
frozen then): a part is told whose statistics move and whose weights do not, neither by an optimizer
nor by hand (as those of an average do). A norm without weights of its own has nothing else to
learn.

A loop over parameters() averages weights, and no running statistic: those are buffers. Told is a
module whose weights the script writes by hand after a step, and no optimizer, that is evaluated in
eval mode, alone or within another module, and none of whose statistics was ever moved from 0 and 1,
while a module of the same class, with tensors of the same names and shapes, has others.
"""

import re
from contextlib import contextmanager
from itertools import pairwise
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from ...frames import code_of, line_now, line_of, script_frames_now
from ...modes import is_compiled
from ...tensors import few, is_sharded, running_statistics, storage_of
from ...watch.events import Events
from ...watch.hooks import without_modes
from ...watch.interrupts import no_evidence

OFTEN = 3  # reads
EARLY = 8  # steps in which writes are noted; an optimizer that begins later begins another part
PARTS = 8  # optimizers: more may be one for each task
ADAPTS = re.compile(r"reset_running_stats|ada_?bn|test.time.(adapt|train)", re.IGNORECASE)
BEGINS = ("zero_", "fill_", "uniform_", "normal_", "trunc_normal_")  # initialise a weight


class FrozenStatistics(Events):
    """Parts of networks without a weight to train, and with running statistics."""

    def __init__(self, watch):
        self.names, self.recorder, self.deferred = watch.names, watch.recorder, watch.deferred
        self.reads = WeakKeyDictionary()  # part: (norms of statistics, of weights) at each read
        self.optimizers, self.begun = WeakSet(), 0  # the step at which the last of them began
        self.is_meant = False  # does the script adapt the statistics alone?
        self.written = WeakSet()  # storages of weights
        self.calls = WeakKeyDictionary()  # outermost modules: evaluations since
        self.known = WeakSet()  # averages, and all within them
        self.averages = {}  # names of statistics: (line, reference to the average)

    def wrote(self, line, weights, name, given):
        if 0 < self.recorder.steps < EARLY and name not in BEGINS:
            self.written.update(map(storage_of, weights))

    def evaluated(self, module):
        if self.written:
            if self._is_asked(module):
                self._look(module, line_now())
            self.calls[module] = self.calls.get(module, 0) + 1

    def _is_asked(self, root):
        calls = self.calls.get(root, 0)
        return calls < OFTEN or calls.bit_count() < 2

    def during(self, call, args, kwargs):
        root = call.function
        if call.grad or not (self.written and self._is_asked(root)):
            return ()
        line = line_of(call.frames)
        return () if is_compiled([*root.modules()]) else [self._looking(line)]

    @contextmanager
    def _looking(self, line):
        """At each module that is called meanwhile."""

        def begins(part, args):
            unseen = torch._C.DisableTorchFunction()
            with no_evidence, unseen, without_modes(), torch.no_grad():
                self._look(part, line)

        with register_module_forward_pre_hook(begins):
            yield

    def _look(self, module, line):
        mine = _statistics(module)
        if module.training or module in self.known or not (mine and _as_made(mine)):
            return
        weights = [*module.parameters()]
        by_hand = any(storage_of(p) in self.written for p in weights)
        if by_hand and not self._trains(weights) and any(map(_moved, self._twins(module))):
            self.known.update(module.modules())
            names = few([*map(self.names.of, mine)], 4)
            self.averages.setdefault(names, (line, ref(module)))

    def _trains(self, weights):
        """Whether an optimizer does."""
        groups = [group for opt in self.names.optimizers for group in opt.param_groups]
        trained = {p for group in groups for p in group["params"] if p.requires_grad}
        return not trained.isdisjoint(weights)

    def _twins(self, module):
        """Other modules that are built as this one is."""
        form = _form(module)
        alike = [m for m in self.names.modules() if type(m) is type(module) and m is not module]
        return [other for other in alike if _form(other) == form]

    def stepped(self, optimizer):
        steps = self.recorder.steps
        if optimizer not in self.optimizers and len(self.optimizers) < PARTS:
            self.optimizers.add(optimizer)
            self.begun = steps if steps > EARLY else 0
        if steps and (steps - self.begun).bit_count() < 2 and not self.is_meant:
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
            still = not any(p.requires_grad for p in part.parameters())
            stands = weights.count(weights[0]) == len(weights)
            if len(reads) >= OFTEN and moves and stands and still:
                drifting.append(self.names.of(_statistics(part)[0]))
        if drifting:
            yield (
                f"running statistics move at each step ({few(drifting, 4)}), though their modules "
                "are frozen (requires_grad is False for all weights): call eval() on these after "
                "each train()"
            )
        for names, (line, average) in self.averages.items():
            module = average()
            if module is not None and _moved(module):
                continue  # by now it has its own
            yield (
                f"an average of weights is evaluated at {line} with running statistics that are "
                f"still 0 and 1 ({names}): they are buffers, and parameters() has none: copy them "
                "from the network that trains"
            )


def _as_made(statistics):
    """Whether each is 0, or 1."""
    return all((t == t.flatten()[0]).all() and t.flatten()[0] in (0, 1) for t in statistics)


def _moved(module):
    """Whether some of its statistics are."""
    return not _as_made(_statistics(module))


def _form(module):
    """The names and shapes of all its tensors."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return {name: t.shape for name, t in tensors}


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
