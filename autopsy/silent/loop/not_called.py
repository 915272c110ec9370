"""
Not called: does a statement name a method, and not call it, or call state_dict() to load one?

`optimizer.zero_grad` without parentheses does nothing, and nothing fails; neither does
`net.state_dict(best)`. Told is a statement of the script that is nothing but the name of a method:
of those that a loop must call, or of a function that the same file defines (and that is no
property); and one that gives state_dict() something, and uses no result.
"""

import ast
import os

from ...watch.events import ReadsFiles
from ..shared.syntax import tree_of

METHODS = {"zero_grad", "step", "backward", "eval", "train", "update", "unscale_", "set_epoch"}


class NotCalled(ReadsFiles):
    """Statements that are the name of a method."""

    def sentences(self):
        for file in self.files:
            tree = tree_of(file)
            methods = METHODS | _methods(tree)
            for node in ast.walk(tree):
                value = node.value if isinstance(node, ast.Expr) else None
                if isinstance(value, ast.Attribute) and value.attr in methods:
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


def _methods(tree):
    """The functions of all classes in a file, without its properties."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    functions = [node for c in classes for node in c.body if isinstance(node, ast.FunctionDef)]
    return {f.name for f in functions} - {f.name for f in functions if f.decorator_list}
