"""
Not called: does a statement name a method, and not call it, or call state_dict() to load one?

`optimizer.zero_grad` without parentheses does nothing, and nothing fails; neither does
`net.state_dict(best)`. Told is a statement of the script that is nothing but the name of a method
that a loop must call; and one that gives state_dict() something, and uses no result. Outside of
functions a notebook shows what such a statement names: there it must be a method, and no data.
"""

import ast
import inspect
import os
import sys

from ...watch.events import ReadsFiles
from ..shared.syntax import tree_of

METHODS = {"zero_grad", "step", "backward", "eval", "train", "update", "unscale_", "set_epoch"}


class NotCalled(ReadsFiles):
    """Statements that are the name of a method."""

    def sentences(self):
        for file in self.files:
            tree = tree_of(file)
            for node in ast.walk(tree):
                value = node.value if isinstance(node, ast.Expr) else None
                if isinstance(value, ast.Attribute) and _is_method(value):
                    text = ast.unparse(value)
                    line = f"{os.path.basename(file)}:{node.lineno}"
                    yield f"{line} names a method and does not call it: write `{text}()`"
                elif isinstance(value, ast.Call) and _gives_state(value):
                    line = f"{os.path.basename(file)}:{node.lineno}"
                    yield f"{line} loads nothing, `{ast.unparse(value)}`: write load_state_dict()"


def _gives_state(call):
    """Whether it gives state_dict() one thing (a destination has a name, or a prefix beside it)."""
    name = getattr(call.func, "attr", "")
    return name == "state_dict" and len(call.args) == 1 and not call.keywords


def _is_method(attribute):
    """Whether it names one. What the script's main module does not hold is known in a function."""
    names, x = [], attribute
    while isinstance(x, ast.Attribute):
        names, x = [x.attr, *names], x.value
    held = vars(sys.modules["__main__"])
    name = getattr(x, "id", "")
    thing = held.get(name)
    for part in names:
        thing = inspect.getattr_static(thing, part, None)
    return attribute.attr in METHODS and (name not in held or callable(thing))
