"""
Remainder: does an optimizer step for all batches but each fourth, where `== 0` is missing?

`if i % 4: optimizer.step()` makes three steps of one batch, and each third of them also uses the
gradients of the batch before. For each step the backward passes are counted that its gradients
hold: a gradient that nobody has touched since one pass holds that pass, and the next one, too. Told
is a step under a bare remainder, without an `else`, of one pass each time, and of two each n-th.
"""

import ast
from functools import cache
from weakref import WeakKeyDictionary, ref

from ...frames import line_of, script_frames_now
from ...watch.deferred import gradients_of, params_of
from ...watch.events import OutermostSteps
from ..shared.syntax import covers, tree_of

OFTEN = 3  # steps of two passes
MOST = 200  # steps
FOLLOWED = 4  # gradients of an optimizer


class Steps:
    """The steps of an optimizer, and the passes that each has used."""

    def __init__(self, optimizer):
        self.name, self.passes, self.windows = type(optimizer).__name__, 0, []
        params = params_of(optimizer)
        self.followed = [ref(p) for p in params[:: max(1, len(params) // FOLLOWED)]]
        self.grads = gradients_of(self.followed)  # after the last pass
        self.places = set()  # of its steps: (frames, the remainder)


class Remainder(OutermostSteps):
    """Optimizers that step under `if x % y`."""

    def __init__(self, watch):
        self.recorder, self.hooks = watch.recorder, watch.hooks
        self.optimizers = WeakKeyDictionary()
        self.all = []

    def backward(self, losses):
        for seen in self.all if self.inside is None else ():
            if seen.grads != gradients_of(seen.followed):
                seen.passes = 0  # somebody has cleared or clipped them

    def passed(self):
        for seen in self.all if self.inside is None else ():
            before, seen.grads = seen.grads, gradients_of(seen.followed)
            seen.passes += seen.grads != before
