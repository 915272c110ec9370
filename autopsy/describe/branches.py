"""
Branches: which lines of the script never ran?

`if step / every == 0:` is never true, and a target network stays as it was. What came up often, and
whose lines did not run once, is told; an error that was not raised is not. Workers of a DataLoader
run lines, too: a fork of this process notes its lines in memory that both share. Of workers that
are no forks nothing is known, so that nothing is told.
"""

import ast
import linecache
import multiprocessing
import os
import sys
from collections import Counter
from mmap import mmap
from textwrap import shorten

from ..frames import is_own
from ..watch.events import Events

LISTED = 12
OFTEN = 2  # times
RAISES = ast.Raise, ast.Assert, ast.Pass
PLACES = 1 << 16  # bytes: two lines that share one are both told to have run


class Branches(Events):
    """Counts the lines of the script's files that run in this thread, unless something else
    (a debugger, a measure of coverage) does so."""

    def __init__(self, hooks):
        self.hooks = hooks
        self.process, self.of_forks = os.getpid(), mmap(-1, PLACES)  # does a line run there?
        self.others_run = False  # code of the script, in processes that are no forks
        self.codes = {}  # id: code of the script that was entered
        self.left = {}  # the same: its lines that have not run; without any, it is no more traced
        self.times = Counter()  # (file, line)
        self.gettrace = sys.gettrace
        if self.gettrace() is None:
            sys.settrace(self._call)
            hooks.replace(sys, "gettrace", self._others)

    def iterated(self, loader):
        if loader.num_workers:
            context = loader.multiprocessing_context or multiprocessing
            method = context.get_start_method(allow_none=True)
            method = method or multiprocessing.get_all_start_methods()[0]
            self.others_run |= method != "fork"

    def _others(self):
        """A script asks whether a debugger is there."""
        found = self.gettrace()
        return None if found == self._call else found

    def _call(self, frame, event, arg):
        code = frame.f_code
        left = self.left.get(id(code))
        if left is None:
            if not is_own(code.co_filename):
                return None
            self.codes[id(code)] = code
            left = self.left[id(code)] = {line for *_, line in code.co_lines() if line}
            left.discard(code.co_firstlineno)  # of its def
        return self._line if left and not self.hooks.busy else None  # no repetition of ours

    def _line(self, frame, event, arg):
        if event == "line":
            code, line = frame.f_code, frame.f_lineno
            self.times[code.co_filename, line] += 1
            left = self.left[id(code)]
            if line in left:
                left.remove(line)
                if os.getpid() != self.process:
                    self.of_forks[_place(code.co_filename, line)] = 1
        return self._line

    def lines(self):
        """Ends it. One line on each branch, those that came up most often first."""
        if self.gettrace() != self._call:
            return  # something else took its place
        sys.settrace(None)
        found = []
        if self.others_run:
            return
        for file in sorted({code.co_filename for code in self.codes.values()}):
            try:
                tree = ast.parse("".join(linecache.getlines(file)))
            except (SyntaxError, ValueError):
                continue
            found += self._in_file(file, tree)
        found.sort(key=lambda row: -row[0])
        for times, text in found[:LISTED]:
            yield f"{text}, {times} times"
        if len(found) > LISTED:
            yield f"and {len(found) - LISTED} more branches that never ran"

    def _in_file(self, file, tree):
        """(how often it came up, words) of each branch that never ran."""
        codes = [code for code in self.codes.values() if code.co_filename == file]
        entered = {line for code in codes for *_, line in code.co_lines() if line}
        ran = {line for f, line in self.times if f == file}
        ran |= {line for line in entered if self.of_forks[_place(file, line)]}

        def of(statement):
            lines = {*range(statement.lineno, statement.end_lineno + 1)} & entered
            return lines, lines & ran

        for node in ast.walk(tree):
            if not isinstance(node, ast.If | ast.For | ast.While):
                continue
            times = self.times[file, node.lineno]
            loops = not isinstance(node, ast.If)
            for body, word in (
                (node.body, "never began" if loops else "was never true"),
                (node.orelse, "never ended by itself" if loops else "was always true"),
            ):
                there = [of(statement) for statement in body]
                idle = any(lines for lines, _ in there) and not any(did for _, did in there)
                if idle and times >= OFTEN and not all(isinstance(s, RAISES) for s in body):
                    head = ast.unparse(node).partition("\n")[0].rstrip(":")
                    at = f"{os.path.basename(file)}:{node.lineno}"
                    yield times, f"`{shorten(head, 70)}` ({at}) {word}"


def _place(file, line):
    """Of a line in the memory that forks share."""
    return hash((file, line)) % PLACES
