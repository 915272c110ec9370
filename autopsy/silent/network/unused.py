"""
Unused: is something computed, and its result thrown away in the same line?

`x + self.pe` as a statement of its own adds nothing, and nothing fails: so do x.relu() and
x.masked_fill(...), where x = ... was meant. In the first steps each function of a network is looked
at whose result needs a gradient: told is a line of the script that is nothing but that expression.
"""

import ast
from collections import Counter
from functools import cache

from ...frames import line_of, script_frames_now
from ...watch.events import FirstFunctions
from ..shared.syntax import covers, tree_of

OFTEN = 3  # calls
ARITHMETIC = {
    "add": ast.Add, "radd": ast.Add, "sub": ast.Sub, "mul": ast.Mult, "rmul": ast.Mult,
    "truediv": ast.Div, "div": ast.Div, "matmul": ast.MatMult,
}  # fmt: skip
METHODS = (
    "relu", "sigmoid", "tanh", "softmax", "log_softmax", "dropout",
    "masked_fill", "where", "clamp", "view", "reshape", "transpose", "permute", "squeeze",
    "unsqueeze", "flatten", "normalize", "layer_norm",
)  # fmt: skip


class Unused(FirstFunctions):
    """Statements that are an expression."""

    outside = False  # there somebody may only warm up
    functions = (*METHODS, *ARITHMETIC, *(f"__{name}__" for name in ARITHMETIC))

    def __init__(self, watch):
        super().__init__(watch)
        self.found = Counter()  # (line, its source): calls

    def function_called(self, func, name, args, kwargs, out):
        if not out.requires_grad or out is args[0]:
            return
        frames = script_frames_now()
        file, number, _ = frames[0]
        if text := _alone(file, number, name):
            self.found[line_of(frames), text] += 1

    def sentences(self):
        for (line, text), n in self.found.items():
            if n >= OFTEN:
                yield f"nothing uses what {line} computes, which is only `{text}`: assign it"


@cache
def _alone(file, number, name):
    """The source of the statement on this line, if it is nothing but a call of this function, or
    this sum; else ""."""
    around = [n for n in ast.walk(tree_of(file)) if isinstance(n, ast.stmt) and covers(n, number)]
    innermost = max(around, key=lambda node: node.lineno, default=None)
    value = innermost.value if isinstance(innermost, ast.Expr) else None
    plain = name.strip("_")
    if isinstance(value, ast.BinOp) or plain in ARITHMETIC:  # add() may be a method of its own
        is_sum = isinstance(getattr(value, "op", None), ARITHMETIC.get(plain, ()))
        return ast.unparse(value) if is_sum else ""
    calls = [node for node in ast.walk(value or ast.Pass()) if isinstance(node, ast.Call)]
    named = [node for node in calls if _name(node.func) == name]
    return ast.unparse(value) if named == [value] else ""


def _name(func):
    return getattr(func, "attr", getattr(func, "id", ""))
