"""
Syntax: what does Python read in a file of the script?

Some checks ask which statement stands on a line (left_in_eval.py, one_in_list.py, unused.py,
wrong_way.py), some read whole files (best_is_last.py, not_called.py, shuffled_apart.py).
"""

import ast
import linecache
from functools import cache


@cache
def tree_of(file):
    """What is written in it; nothing, if that is no Python."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):  # a cell of a notebook with magic in it
        return ast.Module([], [])


def covers(node, number):
    """Whether this line is a part of it."""
    return getattr(node, "lineno", number + 1) <= number <= node.end_lineno
