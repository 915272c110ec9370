"""
Module stack: in which module is the step?

The module under way, which call of it this is, and to which module a node of autograd belongs: to
the one that was under way when the node got its sequence number.
"""

from bisect import bisect_right
from collections import Counter, deque
from contextlib import contextmanager

import torch
from torch.nn.modules import module as modules


@contextmanager
def around_modules(before, after):
    """before(module, args) and after(module, args, out) of each call of any module."""
    begins = modules.register_module_forward_pre_hook(before)
    with begins, modules.register_module_forward_hook(after, always_call=True):
        yield


class ModuleStack:
    """The modules of a step: (name, which call of it), the innermost last."""

    def __init__(self):
        self.names = {}  # of modules
        self._times = Counter()  # how often each was called in this step
        self._under_way = [("", 0)]
        # Autograd's sequence number where a module begins or ends, and the module from there on.
        self._since = deque([(0, ("", 0))], maxlen=1 << 18)

    @property
    def current(self):
        return self._under_way[-1]

    @property
    def at_top_level(self):
        """No module is under way."""
        return len(self._under_way) == 1

    def begin(self):
        """Another micro-batch: calls are counted anew."""
        self._times.clear()

    def enter(self, module, counts=True):
        name = self.names.get(module, self.current[0])
        repeated = torch._C._current_autograd_node() is not None  # a checkpoint runs its forward
        if module in self.names and counts and not repeated:
            self._times[name] += 1
        self._under_way.append((name, self._times[name]))
        self._mark()

    def leave(self):
        self._under_way.pop()
        self._mark()

    def _mark(self):
        number = torch._C._autograd._get_sequence_nr()
        if number >= self._since[-1][0]:  # the thread of a GPU's backward counts anew
            self._since.append((number, self.current))

    def module_of(self, node):
        """Where this node of autograd was made."""
        at = bisect_right(self._since, node._sequence_nr(), key=lambda mark: mark[0])
        return self._since[at - 1][1]
