"""
Best is last: is what is kept as the best model the network that goes on to train?

`if accuracy > best: best_model = model` gives the network another name, and keeps nothing. Told is
a name with "best" in it, which a condition within a loop gives to the network, if that trains on
under both names, and the same file uses the name elsewhere. To save it at once is no mistake.
"""

import ast
import os
import re
from functools import cache
from operator import attrgetter

from torch import nn

from ...frames import is_own, script_frame
from ...watch.deferred import params_of
from ...watch.events import Events
from ..shared.syntax import tree_of

BEST = re.compile(r"(?i)(^|[_.])best")


class BestIsLast(Events):
    """What such names stand for, at some steps."""

    def __init__(self, watch):
        self.recorder = watch.recorder
        self.found = {}  # (file, *see _kept()): are they one network, at the last look?

    def stepped(self, optimizer):
        if self.recorder.steps.bit_count() > 2:
            return
        frame, trained = script_frame(), {id(p) for p in params_of(optimizer)}
        while frame:
            file = frame.f_code.co_filename
            for names in _kept(file) if is_own(file) else ():
                best, net = (_value(frame, name) for name in names[:2])
                if isinstance(best, nn.Module):
                    trains = any(id(p) in trained for p in best.parameters())
                    self.found[(file, *names)] = best is net and trains
            frame = frame.f_back

    def sentences(self):
        for (file, best, net, number), same in self.found.items():
            if same:
                yield (
                    f"{os.path.basename(file)}:{number} keeps no copy: {best} is {net} itself, "
                    f"which trained on: copy.deepcopy({net})"
                )


@cache
def _kept(file):
    """(name, the other name, line) of each such statement."""
    tree = tree_of(file)
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While)]
    conditions = {node for loop in loops for node in ast.walk(loop) if isinstance(node, ast.If)}
    found = {}
    for condition in conditions:
        for node in ast.walk(condition):
            if isinstance(node, ast.Assign) and _is_name(node.value) and _is_name(node.targets[0]):
                names = ast.unparse(node.targets[0]), ast.unparse(node.value)
                used = _uses(tree, names[0]) > _uses(condition, names[0])
                if used and [bool(BEST.search(name)) for name in names] == [True, False]:
                    found[(*names, node.lineno)] = True
    return [*found]


def _is_name(node):
    return isinstance(node, ast.Name | ast.Attribute)


def _uses(tree, name):
    """How often it is read in there."""
    reads = [node for node in ast.walk(tree) if isinstance(getattr(node, "ctx", None), ast.Load)]
    return sum(_is_name(node) and ast.unparse(node) == name for node in reads)


def _value(frame, name):
    first, _, rest = name.partition(".")
    value = frame.f_locals.get(first, frame.f_globals.get(first))
    try:
        return attrgetter(rest)(value) if rest else value
    except AttributeError:
        return None
