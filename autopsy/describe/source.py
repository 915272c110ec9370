"""
Source: which names do functions of the script set, or are given, and never read?

`alpha = torch.rand(n)` hides an argument of that name; `a, log_pi = policy(x)` without a word of
log_pi later leaves a term out; a second `loss =` throws the first away. All of it may be meant.
"""

import ast
import linecache
import os
import sys

from ..frames import is_own
from ..tensors import few

LISTED = 12
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def unread():
    """Lines on the files of the script, as far as they can be read."""
    files = {getattr(module, "__file__", None) for module in [*sys.modules.values()]}
    found = {}
    for file in sorted(file for file in files if file and is_own(file)):
        try:
            tree = ast.parse("".join(linecache.getlines(file)))
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS) and not _is_empty(node):
                for line, text in sorted(_of_function(node)):
                    found[f"{text} in {node.name} ({os.path.basename(file)}:{line})"] = True
            for body in _blocks(node):
                for line, name in _overwritten(body):
                    found[f"{name} is set, and set again unread ({_at(file, line)})"] = True
    if found:
        yield f"set or given, and never read: {few(found, LISTED, '; ')}"


def _at(file, line):
    return f"{os.path.basename(file)}:{line}"


def _is_empty(function):
    """`pass`, or only a docstring or an exception."""
    plain = ast.Pass, ast.Expr, ast.Raise
    return all(isinstance(statement, plain) for statement in function.body)


def _of_function(function):
    """(line, words) on arguments and local names."""
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    read = {node.id for node in names if isinstance(node.ctx, ast.Load | ast.Del)}
    other = [node for node in ast.walk(function) if isinstance(node, ast.Global | ast.Nonlocal)]
    read |= {name for node in other for name in node.names}
    read |= {node.target.id for node in ast.walk(function)
             if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)}  # fmt: skip
    given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    given = {a.arg: a.lineno for a in given if a.arg not in ("self", "cls") and a.arg[0] != "_"}
    for name, line in given.items():
        if name not in read:
            yield line, f"the argument {name}"
    counts = [n.target for n in ast.walk(function) if isinstance(n, ast.For | ast.comprehension)]
    counts = {node for target in counts for node in ast.walk(target)}
    for node in names:
        unread = node.id not in read and node.id[0] != "_" and node not in counts
        if isinstance(node.ctx, ast.Store) and unread:
            yield node.lineno, node.id
    first = {}
    for node in sorted(names, key=lambda n: (n.lineno, not isinstance(n.ctx, ast.Load))):
        first.setdefault(node.id, node)
    for name in given:
        if name in read and name in first and isinstance(first[name].ctx, ast.Store):
            yield first[name].lineno, f"the argument {name}, set anew,"


def _blocks(node):
    """The lists of statements of a node."""
    for field in ("body", "orelse", "finalbody"):
        body = getattr(node, field, None)
        if isinstance(body, list):
            yield body


def _overwritten(body):
    """(line, name) of what one statement sets and a later one of the same block sets again, with no
    read in between."""
    last = {}  # name: the line that has set it
    for statement in body:
        names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
        for node in names:
            if not isinstance(node.ctx, ast.Store):
                last.pop(node.id, None)
        if not isinstance(statement, ast.Assign | ast.AnnAssign):
            last = {n: line for n, line in last.items() if n not in {node.id for node in names}}
            continue
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            if isinstance(target, ast.Name) and target.id[0] != "_":
                if target.id in last and not isinstance(statement.value, ast.Constant):
                    yield last[target.id], target.id
                last[target.id] = statement.lineno
