"""
Uncleared: do the gradients of many steps add up, because nobody clears them?

After some steps the norm of each gradient is noted, and again after each backward pass. A gradient
that has the same norm when the next pass begins was not cleared in between, in whatever way. One
for which that holds before every pass up to the next step, and to which a pass adds, still has all
that steps have used. An optimizer of the script's own may want that sum.
"""

import inspect
from weakref import WeakKeyDictionary, ref

import torch

from ...frames import is_own, line_now
from ...tensors import few, is_sharded
from ...watch.deferred import moved_by
from ...watch.events import Events

OFTEN = 3  # steps at least
SHARE = 0.75  # of the steps


class Gradients:
    """The gradients that an optimizer has used."""

    def __init__(self, optimizer):
        self.owner = ref(optimizer)
        self.name, self.line, self.steps = type(optimizer).__name__, "", 0
        self.params, self.norms, self.kept = (), None, None  # kept: which were not cleared?
        self.added = False  # which a backward pass has changed
        self.is_cleared = False  # now and then, by zero_grad()
        self.windows = []  # (parameters, which were not cleared) between two steps
        # (weak references, all of these: parameters end with their network)


class Uncleared(Events):
    """The gradients of all optimizers, from step to step."""

    def __init__(self, watch):
        self.watch, self.names, self.deferred = watch, watch.names, watch.deferred
        self.optimizers = WeakKeyDictionary()
        self.all = []
        self.inside = None  # the optimizer whose step is under way, with all that it calls

    def _open(self):
        """(what was seen of an optimizer, its parameters) after some steps of each."""
        for seen in self.all if self.inside is None else ():
            if seen.owner() is None:
                continue
            params = [p() for p in seen.params]
            if params and all(p is not None for p in params):
                yield seen, params

    def backward(self, losses):
        for seen, params in self._open():
            kept = (seen.norms == self._norms(params)) & (seen.norms > 0)
            seen.kept = kept if seen.kept is None else seen.kept & kept

    def passed(self):
        for seen, params in self._open():
            before, seen.norms = seen.norms, self._norms(params)
            seen.added = seen.added | (seen.norms != before)

    def cleared(self, owner):
        """What the passes so far have added is gone."""
        if seen := self.optimizers.get(owner):
            seen.kept = None
            seen.is_cleared = True

    def _norms(self, params):
        """Of their gradients; 0 of those that have none."""
        norms = iter(self.deferred.norms(p.grad for p in params if p.grad is not None))
        zero = torch.zeros((), device=params[0].device)
        return torch.stack([zero if p.grad is None else next(norms).to(zero) for p in params])

    def before_step(self, optimizer, losses, norm, moved):
        if self.inside is None:
            self.inside = optimizer
            seen = self.optimizers.get(optimizer)
            if seen and seen.kept is not None and not self.watch.with_closure:
                seen.windows.append((seen.params, seen.kept & seen.added))
            if seen:
                seen.params, seen.kept, seen.added = (), None, False

    def stepped(self, optimizer):
        if self.inside is not optimizer:
            return
        self.inside = None
        if optimizer not in self.optimizers:
            self.optimizers[optimizer] = Gradients(optimizer)
            self.all = [seen for seen in self.all if seen.owner() is not None or seen.windows]
            self.all.append(self.optimizers[optimizer])
        seen = self.optimizers[optimizer]
        step, seen.steps = seen.steps, seen.steps + 1
        if step.bit_count() < 2:  # 0, 1, 2, 4, 8, ...
            params = [p for p in moved_by(optimizer) if not is_sharded(p)]
            code = inspect.unwrap(type(optimizer).step).__code__
            if params and not is_own(code.co_filename):
                seen.params, seen.line = [ref(p) for p in params], line_now()
                seen.norms = self._norms(params)

    def sentences(self):
        for seen in self.all:
            kept = {}
            for params, which in seen.windows:
                for p, uncleared in zip(params, which.tolist(), strict=True):
                    if (alive := p()) is not None:
                        kept[alive] = kept.get(alive, 0) + uncleared
            most = max(OFTEN, SHARE * len(seen.windows))
            params = [p for p, n in kept.items() if n >= most]
            if params:
                names = few([*map(self.names.of, params[:4]), *params[4:]], 4)
                clears = f"nobody clears those of {names} before the next backward pass"
                if seen.is_cleared:
                    clears = f"those of {names} are not cleared before each backward pass"
                yield (
                    f"the gradients of {seen.steps} steps add up: {clears}: call zero_grad() of "
                    f"{seen.name}, whose step is at {seen.line}"
                )

    causes = sentences
