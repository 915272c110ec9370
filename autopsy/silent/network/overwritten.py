"""
Overwritten: is what trained weights compute lost, because its name is assigned again?

    q, k = self.wq(x), self.wk(x)
    q = self.q_norm(q)
    k = self.k_norm(q)    # meant: k_norm(k)

Nothing fails, and wk never gets a gradient. A result is lost where its name is assigned again in
the same block, before anything can read it. In the first steps it is noted which modules run on
such a line. Told are those that never have a gradient, though the optimizer that holds them steps
with others. No word where a comment says that it is meant.
"""

import ast
import linecache
import re
import sys
from functools import cache
from itertools import islice
from typing import NamedTuple
from weakref import WeakSet

from torch import nn

from ...frames import is_own, line_of
from ...tensors import few, flat_tensors
from ...watch.deferred import params_of
from ...watch.events import FirstFunctions
from ...watch.hooks import walk
from ..shared.syntax import tree_of

OFTEN = 3  # steps
CALL = nn.Module._call_impl.__code__
MEANT = re.compile(
    r"#.*(ablat|debug|disab|dummy|ignor|instead|\bold\b|overw|overr|replac|skip|unused|warm)",
    re.IGNORECASE,
)
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith)
STRAIGHT = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Assert, ast.Pass)
READERS = {"locals", "globals", "vars", "eval", "exec"}  # of any name


class Lost(NamedTuple):
    """A result that nothing reads: on which line, and which one assigns its name again."""

    name: str
    value: ast.expr
    frame: tuple
    again: ast.stmt

    @property
    def is_meant(self):
        lines = linecache.getlines(self.frame[0])
        code = "".join(lines[max(self.frame[1] - 2, 0) : self.again.end_lineno])
        return bool(MEANT.search(code))


class Found:
    """A module that runs on such a line."""

    def __init__(self, lost):
        self.lost, self.weight, self.steps = lost, "", 0
        self.ran = True  # since the last step of its optimizer


class Overwritten(FirstFunctions):
    """Modules whose results are lost."""

    recorded_only = False  # a gradient may come at any step
    outside = False
    functions = (
        "linear", "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
        "conv_transpose3d", "embedding", "batch_norm", "group_norm", "layer_norm", "rms_norm",
        "lstm", "gru", "rnn_tanh", "rnn_relu", "multi_head_attention_forward", "matmul",
        "__matmul__", "einsum",
    )  # fmt: skip

    def __init__(self, watch):
        super().__init__(watch)
        self.names = watch.names
        self.found, self.trained = {}, WeakSet()  # modules

    def function_called(self, func, name, args, kwargs, out):
        if not any(t.requires_grad for t in flat_tensors(out)):
            return
        module = None
        for frame in walk(sys._getframe(1)):
            file = frame.f_code.co_filename
            if frame.f_code is CALL:
                module = frame.f_locals["self"]
            elif module is not None and is_own(file):
                for lost in lost_in(file):
                    if _runs(frame, lost.value) and module not in self.trained:
                        self.found.setdefault(module, Found(lost)).ran = True

    def before_step(self, optimizer, losses, norm, moved):
        mine = {id(p) for p in params_of(optimizer)} if self.found else ()
        for module, found in [*self.found.items()]:
            params = [p for p in module.parameters() if p.requires_grad]
            if not params or any(p.grad is not None for p in params):
                self.trained.add(module)
                del self.found[module]
            elif moved and found.ran and not mine.isdisjoint(map(id, params)):
                found.steps, found.ran = found.steps + 1, False
                if found.steps == OFTEN:
                    found.weight = self.names.of(params[0])

    def sentences(self):
        weights = {}
        for found in self.found.values():
            if found.steps >= OFTEN and not found.lost.is_meant:
                weights.setdefault(found.lost, []).append(found.weight)
        for lost, some in weights.items():
            again = lost.again.lineno
            yield (
                f"nothing reads `{lost.name}` of {line_of([lost.frame])}: line {again} assigns it "
                f"again (`{ast.unparse(lost.again)}`), and no gradient reaches {few(some, 4)}: "
                f"should line {again} use `{lost.name}`?"
            )


def _runs(frame, node):
    """Whether the call under way in a frame is a part of this expression."""
    if not node.lineno <= frame.f_lineno <= node.end_lineno:
        return False
    if not hasattr(frame.f_code, "co_positions"):  # Python 3.10
        return True
    at, _, column, _ = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    first, last = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
    return None not in (at, column) and first <= (at, column) < last


@cache
def lost_in(file):
    """All that are lost by the syntax of this file."""
    return [
        Lost(name, value, (file, value.lineno, getattr(scope, "name", "<module>")), again)
        for scope in ast.walk(tree_of(file))
        if isinstance(scope, ast.Module | ast.FunctionDef) and not _names(scope) & READERS
        for block in _blocks(scope)
        for name, value, again in _lost_in(block, _read_elsewhere(scope))
    ]


def _names(node, kind=ast.expr_context):
    """The names in it that are read, written or deleted."""
    found = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
    return {n.id for n in found if isinstance(n.ctx, kind)}


def _read_elsewhere(scope):
    """What others than its own statements may read."""
    nodes = [*ast.walk(scope)]
    inner = [node for node in nodes if isinstance(node, SCOPES) and node is not scope]
    declared = [node.names for node in nodes if isinstance(node, ast.Global | ast.Nonlocal)]
    return set().union(*map(_names, inner), *declared)


def _blocks(node):
    """Statements that run one after the other, without those of functions and `try` within."""
    for block in (node.body, getattr(node, "orelse", ())):
        yield block
        for statement in block:
            if isinstance(statement, BRANCHES):
                yield from _blocks(statement)


def _lost_in(block, elsewhere):
    """(name, what is lost, the statement that assigns it again)"""
    unread = {}
    for statement in block:
        if not isinstance(statement, STRAIGHT):
            unread = {}
            continue
        for name in _names(statement, ast.Load | ast.Del):
            unread.pop(name, None)
        for name in unread.keys() & _names(statement, ast.Store):
            value = unread.pop(name)
            if isinstance(statement, ast.Assign) and _computes(statement.value):
                yield name, value, statement
        for name, value in _assigned(statement):
            if _computes(value) and name[0] != "_" and name not in elsewhere:
                unread[name] = value


def _assigned(statement):
    """(name, the expression that it alone is given)"""
    if not isinstance(statement, ast.Assign) or len(statement.targets) > 1:
        return []
    targets, values = [statement.targets[0]], [statement.value]
    if isinstance(targets[0], ast.Tuple) and isinstance(values[0], ast.Tuple):
        targets, values = targets[0].elts, values[0].elts
    if len(targets) != len(values):
        return []
    pairs = zip(targets, values, strict=True)
    return [(target.id, value) for target, value in pairs if isinstance(target, ast.Name)]


def _computes(value):
    kinds = {type(node) for node in ast.walk(value)}
    return ast.Call in kinds and kinds.isdisjoint((ast.NamedExpr, ast.Await, ast.Yield))
