"""
Graph ends: of which tensors was a result made, and where did it lose its graph to some weights?

stalled/ and constant_term.py look for the operation that has no graph, though it
was given weights. stalled/ and read_as_number.py ask what the graph of a result ends at.
"""

from math import inf
from typing import NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ...frames import line_now
from ...tensors import flat_tensors
from ...watch.functions import READS
from ...watch.graph import nodes_of


class End(NamedTuple):
    """An operation whose result has no graph, though it was made of weights."""

    name: str
    line: str
    no_grad: bool

    def __str__(self):
        what = "runs under torch.no_grad()" if self.no_grad else "gives no gradient"
        return f"{self.name} at {self.line} {what}"

    @property
    def is_cut(self):
        """Whether it had one if the script had not said that it shall have none."""
        return self.no_grad or self.name in ("detach", "data")


class DetachFinder(TorchFunctionMode):
    """Follow what is computed from these weights; of(t) is where t lost its graph to them."""

    def __init__(self, params):
        super().__init__()
        self.live = WeakIdKeyDictionary(dict.fromkeys(params, True))  # what has a graph to them
        self.ends = WeakIdKeyDictionary()  # what was made of them without: {End: True}
        self.read = {}  # where Python read a number that was made of them

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = flat_tensors((args, kwargs))
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        live = any(t in self.live for t in given)
        ends = {end: True for t in given for end in self.ends.get(t, ())}
        made = flat_tensors(out)
        lost = {}
        if live and not (made and all(t.requires_grad for t in made)):
            if name == "__get__":
                name = func.__self__.__name__
            end = End(name.strip("_"), line_now(), not torch.is_grad_enabled())
            lost[end] = True
            if not made and name in READS:
                self.read[end] = True
        elif name in READS:
            self.read |= ends
        for t in made:
            if live and t.requires_grad:
                self.live[t] = True
            if mine := ends if t.requires_grad else ends | lost:
                self.ends[t] = mine
        return out

    def of(self, losses):
        """Say which operations give no gradient, or which one reads a number in Python; or ""."""
        if any(t in self.live for t in losses):
            return ""
        ends = [*dict.fromkeys(end for t in losses for end in self.ends.get(t, ()))]
        cuts = [end for end in ends if end.is_cut]  # a draw has no gradient by its nature
        if not ends and len(self.read) == 1:
            ends = [*self.read]
        return " and ".join(map(str, cuts[:2] or ends[:1]))


def leaves(tensors, most=inf):
    """What these tensors were made of, in at most so many operations."""
    return [node.variable for node in nodes_of(tensors, most) if hasattr(node, "variable")]
