"""
Uninitialised: which tensors hold what torch.empty found in memory?
"""

from weakref import WeakKeyDictionary

import torch

from ..frames import line_now
from ..tensors import flat_tensors, storage_of


class Uninitialised:
    """Memory that torch.empty has made, and that nothing has written since."""

    def __init__(self):
        self._lines = WeakKeyDictionary()  # storage: the line that made it

    def made(self, t):
        """The script has made it, or a copy of it."""
        if t.layout is torch.strided:
            self._lines[storage_of(t)] = line_now()

    def written(self, tensors):
        """Something writes into these, or may from now on."""
        for t in flat_tensors(tensors):
            self._lines.pop(storage_of(t), None)

    def line_of(self, t):
        """The line that made its memory; None if it is not of this kind."""
        return self._lines.get(storage_of(t))

    def holds(self, t):
        known = t.numel() > 0 and storage_of(t) in self._lines
        return known and (t.is_inference() or t._version == 0)
