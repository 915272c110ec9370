"""
Unused loss: does each step use only the last of the losses that were computed for it?

`if i % 4 == 3: loss.backward(); optimizer.step()` computes four losses, and three of them train
nothing. In some steps it marks what each loss of a place was made of: told is a place of which only
the last one was in a backward pass, each time. No word where a loss shares what it was made of with
another one of its place (a recurrent state, say), or where one step had a single loss.
"""

from dataclasses import dataclass, field
from math import prod

import torch

from ...frames import line_now
from ...tensors import flat_tensors
from ...watch.events import FirstFunctions
from ...watch.graph import nodes_of
from ..shared.place import place_now

LOSSES = (
    "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
    "binary_cross_entropy", "binary_cross_entropy_with_logits",
)  # fmt: skip
SURE = 1000  # to 1: that the last one was not picked by chance
MOST = 9999  # nodes of a graph


@dataclass(eq=False)
class Place:
    """Where the script computes a loss."""

    line: str
    losses: int = 0  # since the last step
    windows: list = field(default_factory=list)  # how many there were, where the last was used
    used_at: str = ""  # the line of that backward pass
    is_fine: bool = False  # or nothing can be known


class UnusedLoss(FirstFunctions):
    """Losses, and those of them that a backward pass begins at."""

    functions = (*LOSSES, "grad")

    def __init__(self, watch):
        super().__init__(watch)
        self.places = {}  # see place_now()
        self.used = set()  # (place, number of a loss), since the last step

    def resumed(self):
        """What was used in between is not known."""
        self._begin()

    def _begin(self):
        self.used = set()
        for place in self.places.values():
            place.losses = 0

    def function_called(self, func, name, args, kwargs, out):
        if name == "grad":
            self.backward(flat_tensors(args[:1]))
        elif out.requires_grad and not out.dim() and not torch._C._current_autograd_node():
            place = self.places.setdefault(place_now(), Place(line_now()))
            if not place.is_fine:
                self._mark(place, out)

    def _mark(self, place, loss):
        """Write its number into the metadata of what it was made of: the graph may die."""
        place.losses += 1
        nodes = [node for node in nodes_of([loss], MOST) if not hasattr(node, "variable")]
        if len(nodes) == MOST or any(place in node.metadata for node in nodes):
            place.is_fine = True
        for node in nodes:
            node.metadata[place] = place.losses

    def backward(self, losses):
        counted = [place for place in self.places.values() if place.losses]
        for node in nodes_of(losses, MOST) if counted else ():
            for place in counted:
                if number := node.metadata.get(place):
                    self.used.add((place, number))
                    place.used_at = place.used_at or line_now()

    def stepped(self, optimizer):
        for place in self.places.values():
            used = {number for where, number in self.used if where is place}
            if used == {place.losses}:
                place.windows.append(place.losses)
            elif used:
                place.is_fine = True
        self._begin()

    def sentences(self):
        for place in self.places.values():
            if prod(place.windows) >= SURE and min(place.windows) > 1 and not place.is_fine:
                yield (
                    f"{place.windows[-1] - 1} of {place.windows[-1]} losses at {place.line} are "
                    f"thrown away before each step: the backward pass at {place.used_at} begins at "
                    "the last one: call it for each of them, or add them up"
                )
