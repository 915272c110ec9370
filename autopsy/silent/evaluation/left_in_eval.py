"""
Left in eval: does training go on in eval mode after an evaluation?

A validation calls eval(), and nobody calls train() after it: nothing drops, and BatchNorm takes its
running statistics. Told is a network that was trained in train mode, then evaluated, and then
trained from the same line again, with no train() or eval() in between. Where train() came after the
first evaluations, and from some step on never again, the last epochs are meant so; and where it
stands under an `if` of its own.
"""

import ast
from functools import cache
from weakref import WeakKeyDictionary, WeakSet

from ...frames import line_now, script_frames_now
from ...tensors import storage_of
from ...watch.deferred import moved_by
from ...watch.events import Events
from ..shared.eval_mode import differs
from ..shared.syntax import covers, tree_of

OFTEN = 3  # steps


class Network:
    """An outermost module."""

    def __init__(self):
        self.lines = set()  # frames that train it in train mode
        self.parts = ()  # which train() and eval() make a difference to
        self.evaluated = False  # since the last switch
        self.line = ""  # of the last eval()
        self.steps, self.wrong, self.since = 0, 0, ""
        self.returned = False  # has train() come after an evaluation, before any wrong step?
        self.again = False  # has it come after a wrong step?


class LeftInEval(Events):
    """The mode of what is trained."""

    def __init__(self, watch):
        self.networks = WeakKeyDictionary()
        self.on_condition = WeakSet()  # modules whose train() stands under an `if`
        self.open = {}  # network: was it left in eval mode? Of this step
        self.written = set()  # memory of the weights that the script has written by hand in it

    def switched(self, module, training):
        for file, number, *_ in script_frames_now()[:1] if training else ():
            if _is_on_condition(file, number):
                self.on_condition.update(module.modules())
        parts = {*module.modules()} if self.networks else ()
        for root, seen in self.networks.items():
            if root in parts:
                if training:
                    seen.again |= seen.wrong > 0
                    seen.returned |= seen.evaluated and not seen.wrong
                seen.evaluated, seen.line = False, "" if training else line_now()

    def during(self, call, args, kwargs):
        root = call.function
        if root not in self.networks:
            self.networks[root] = Network()
        seen = self.networks[root]
        if not call.grad:
            seen.evaluated |= not root.training
        elif root.training:
            if call.frames not in seen.lines:
                seen.lines.add(call.frames)
                seen.parts = [part for part in root.modules() if part.training and differs(part)]
            self.open[root] = False
        elif seen.evaluated and call.frames in seen.lines:
            self.open[root] = bool(seen.parts) and not any(p.training for p in seen.parts)
        return ()

    def wrote(self, line, weights, name, given):
        if self.open:
            self.written |= {*map(storage_of, weights)}

    def over(self):
        if self.written:
            self._count(self.written)
        self.written = set()

    def stepped(self, optimizer):
        self._count({*map(storage_of, moved_by(optimizer))} if any(self.open.values()) else ())

    def _count(self, moved):
        """A step that moves the weights in this memory."""
        for root, left in self.open.items():
            seen = self.networks[root]
            seen.steps += 1
            if left and any(storage_of(p) in moved for p in root.parameters()):
                seen.wrong += 1
                seen.since = seen.since or seen.line
        self.open = {}

    def sentences(self):
        for root, seen in self.networks.items():
            is_meant = (seen.returned or root in self.on_condition) and not seen.again
            if seen.wrong >= OFTEN and not is_meant:
                kinds = " and ".join(sorted({type(part).__name__ for part in seen.parts}))
                yield (
                    f"{seen.wrong} of {seen.steps} steps train {type(root).__name__} in eval mode: "
                    f"eval() at {seen.since} was for an evaluation, and no train() came after it: "
                    f"{kinds} did not work as in training"
                )


@cache
def _is_on_condition(file, number):
    """Whether the innermost block that this line is in is an `if` (not that of `__main__`)."""
    around = [node for node in ast.walk(tree_of(file)) if hasattr(node, "body")]
    around = [node for node in around if covers(node, number)]
    last = around[-1] if around else None
    code = ast.unparse(last.test) if isinstance(last, ast.If) else "__name__"
    return "__name__" not in code
