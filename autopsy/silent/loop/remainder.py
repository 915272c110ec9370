"""
Remainder: does an optimizer step for three of four batches, because `== 0` is missing?

`if i % 4: optimizer.step()` leaves out each fourth batch, whose gradients the next step uses, too.
What was meant is one step for four batches. For each step the backward passes are counted that its
gradients hold: those that nobody has touched since one pass hold that pass, and the next one, too.
Told is a step under a bare remainder and without an `else`, of one pass each time, and of two each
n-th.
"""

import ast
from functools import cache
from itertools import pairwise
from weakref import WeakKeyDictionary, ref

from ...frames import line_of, script_frames_now
from ...watch.deferred import gradients_of, moved_by
from ...watch.events import OutermostSteps
from ..shared.syntax import covers, tree_of

OFTEN = 3  # steps of two passes
MOST = 200  # steps
FOLLOWED = 4  # gradients of an optimizer


class Steps:
    """The steps of an optimizer, and how many passes each has used."""

    def __init__(self, optimizer, params):
        self.owner, self.name = ref(optimizer), type(optimizer).__name__
        self.followed = [ref(p) for p in params[:: max(1, len(params) // FOLLOWED)]]
        self.grads = ()  # after the last pass
        self.passes, self.windows = 0, []  # since the last step, and up to each


class Remainder(OutermostSteps):
    """Optimizers that step under `if x % y`."""

    def __init__(self, watch):
        self.hooks = watch.hooks
        self.optimizers = WeakKeyDictionary()
        self.all, self.frames = [], set()  # of their steps

    def _open(self):
        """Those whose steps are still counted."""
        waiting = self.all if self.inside is None else ()
        return [seen for seen in waiting if len(seen.windows) < MOST and seen.owner()]

    def backward(self, losses):
        for seen in self._open():
            if seen.grads != gradients_of(seen.followed):
                seen.passes = 0  # somebody has cleared them, or clipped them

    def passed(self):
        for seen in self._open():
            before, seen.grads = seen.grads, gradients_of(seen.followed)
            seen.passes += seen.grads != before

    def uses(self, optimizer):
        seen = self.optimizers.get(optimizer)
        if seen is None or len(seen.windows) < MOST:
            self.frames.update(script_frames_now()[-1:])
        if seen is not None:
            seen.windows.append(seen.passes)
            seen.passes = 0
        elif params := moved_by(optimizer):
            self.all = [seen for seen in self.all if seen.owner() or len(seen.windows) > OFTEN]
            self.all.append(Steps(optimizer, params))
            self.optimizers[optimizer] = self.all[-1]

    def sentences(self):
        tests = {_remainder_around(file, number) for file, number, _ in self.frames}
        if len(tests) != 1 or None in tests:
            return
        [test] = tests
        line = line_of([min(self.frames)])
        for seen in self.all:
            if n := _left_out(seen.windows[:MOST]):
                yield (
                    f"{seen.name} at {line} steps after {n - 1} of {n} backward passes, not once "
                    f"for {n}: `{test}` is true where a remainder is left: write `{test} == 0`"
                )
                return


def _left_out(windows):
    """n, if regularly each n-th batch makes no step, and the next step uses its gradients; or 0."""
    two = [k for k, passes in enumerate(windows) if passes == 2]
    gaps = [later - k for k, later in pairwise(two)]
    if {*windows} != {1, 2} or len(two) < OFTEN:
        return 0
    gap = max(gaps)  # less where a pass over the data begins anew
    often = gaps.count(gap) >= max(OFTEN - 1, len(gaps) / 2)
    return gap + 1 if gap > 1 and often and len(windows) - two[-1] <= gap else 0


@cache
def _remainder_around(file, number):
    """`x % y`, if what is on this line runs only where that is not 0."""
    branches = [node for node in ast.walk(tree_of(file)) if isinstance(node, ast.If)]
    around = [node for node in branches if covers(node, number)]
    inner = max(around, key=lambda node: node.lineno, default=None)
    if inner is None or inner.orelse or any(inner in node.orelse for node in around):
        return None
    parts = inner.test.values if isinstance(inner.test, ast.BoolOp) else [inner.test]
    bare = [x for x in parts if isinstance(x, ast.BinOp) and isinstance(x.op, ast.Mod)]
    bare = [x for x in bare if not isinstance(x.left, ast.Constant | ast.JoinedStr)]
    alternates = [x for x in bare if isinstance(x.right, ast.Constant) and x.right.value == 2]
    return ast.unparse(bare[0]) if bare and not alternates else None
