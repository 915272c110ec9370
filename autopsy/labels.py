"""
Labels: which label or index is out of range, and which labels does a loss leave out?

operations.py says which arguments of an operation are indices.
"""

import re

from .tensors import inner_tensors


def out_of_range(what, index, low, high, ignored=()):
    """("label 3 is not in 0..2", ...), and where these are."""
    wrong = (index < low) | (index > high)
    for value in ignored:
        wrong &= index != value
    values = index[wrong].unique().tolist()
    return tuple(f"{what} {v} is not in {max(low, 0)}..{high}" for v in values), wrong


class Labels:
    """What the losses of a step ignore."""

    def __init__(self):
        self.ignored = {-100}  # every ignore_index seen
        self.all_are = None  # the ignore_index of a loss that ignores every label here
        self.none = False  # is there a loss without a label?

    def begin(self):
        """Another micro-batch."""
        self.all_are, self.none = None, False

    def see(self, index, ignore_index):
        self.ignored.add(ignore_index)
        self.none |= not index.numel()
        if index.numel() and (index == ignore_index).all():
            self.all_are = ignore_index


def labels_in(batch):
    """Integer tensors: of a tuple the later items, of a mapping those called labels or targets."""
    later = re.compile(r"[1-9]\d*|.*\.(labels?|targets?)")
    named = [t for name, t in inner_tensors(batch) if later.fullmatch(name) and t.dim()]
    return [t for t in named if not (t.is_floating_point() or t.is_complex())]
