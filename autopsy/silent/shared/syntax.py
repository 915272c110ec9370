"""
Syntax: what does Python read in a file of the script?

Some checks ask which statement stands on a line (not_called.py, one_in_list.py, overwritten.py,
remainder.py, unused.py), some read whole files (not_called.py, shuffled_apart.py).
"""

import ast
import linecache
import sys
from functools import cache

from ...frames import script_frames_now
from ...watch.events import Events


class ReadsFiles(Events):
    """Collects the files of the script in which steps are made, and its main one."""

    def __init__(self, watch):
        self.recorder, self.files = watch.recorder, {}

    def stepped(self, optimizer):
        if self.recorder.steps.bit_count() < 2:
            main = getattr(sys.modules.get("__main__"), "__file__", None)
            files = [main, *(file for file, *_ in script_frames_now()[-1:])]
            self.files.update(dict.fromkeys(filter(None, files)))


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
