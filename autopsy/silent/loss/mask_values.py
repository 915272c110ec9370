"""
Mask values: is a mask of 0 and 255 compared with probabilities in a Dice or IoU loss?

An image file holds a mask as 0 and 255. A Dice loss 1 - 2 sum(p y) / (sum(p) + sum(y)) takes 0 and
1: with 255 its ratio goes up to 2, the loss below 0, and p grows wherever it can. In the graphs of
some losses it looks for such a ratio: above, a sum of a product of what a sigmoid or a softmax has
made and of a tensor without a graph, of the same shape, that holds 0 and 255 alone; below, a sum of
the same probabilities. Told are ratios that pass 1 over a denominator that has the sum of the mask,
too, or the product. (An average with weights has neither, and a scaled prediction is no
probability.)
"""

from contextlib import suppress
from dataclasses import dataclass

import torch

from ...frames import line_now, line_of
from ...watch.events import Events
from ...watch.graph import nodes_of
from ..shared.classification import SAME_NUMBERS, node_before

FIRST = 8  # backward passes; then those that are a power of 2
OFTEN = 3  # of one line
NODES = 256  # from a loss on
NEAR = 16  # from a ratio on
ABOVE = 1.001
PROBABILITIES = ("SigmoidBackward0", "SoftmaxBackward0")
ARITHMETIC = tuple(
    f"{name}Backward{k}"
    for name in ("Add", "Sub", "Rsub", "Mul", "Sum", "Mean", "Pow", "Clamp", "ClampMin")
    for k in (0, 1)
)
SAYS = (
    "the loss at {} compares probabilities with a mask of 0 and 255: its ratio of sums passes 1 "
    "(it was {:.3g}), where 1 would be the best: divide the mask by 255"
)


@dataclass
class Ratios:
    """What was seen of the loss of a line."""

    looks: int = 0
    wrong: int = 0
    largest: float = 0.0


class MaskValues(Events):
    """Ratios of sums, in losses."""

    recorded_only = True

    def __init__(self, watch):
        self.recorder, self.passes = watch.recorder, 0
        self.lines = {}  # line: Ratios

    def backward(self, losses):
        self.passes += 1
        if self.passes > FIRST and self.passes.bit_count() > 1:
            return
        for loss in losses:
            with suppress(RuntimeError), torch.no_grad():  # a part of the graph is freed
                found = [row for node in nodes_of([loss], NODES) for row in _looks(node)]
                if found:
                    made = self.recorder.maker(loss)
                    line = line_of(made.frames) if made else line_now()
                    seen = self.lines.setdefault(line, Ratios())
                    seen.looks += 1
                    seen.wrong += all(is_wrong for is_wrong, _ in found)
                    seen.largest = max(seen.largest, *(ratio for _, ratio in found))

    def sentences(self):
        for line, seen in self.lines.items():
            if seen.looks == seen.wrong >= OFTEN and seen.largest > ABOVE:
                yield SAYS.format(line, seen.largest)


def _looks(node):
    """(does it divide by a sum of such a mask? its ratio), if it is a ratio of such sums."""
    parts = [part for part, _ in node.next_functions]
    if node.name() != "DivBackward0" or len(parts) != 2 or not all(parts):
        return
    below, probabilities = _near(parts[1])
    for product in _near(parts[0])[0]:
        core, mask = _product(product)
        if core is None or core not in probabilities or not mask.any():
            continue  # an empty mask says nothing
        under = node._saved_other
        has_mask = product in below or bool(under.sum() >= mask.sum())
        ratio = float((node._saved_self / under).abs().amax())
        yield has_mask and _is_0_and_255(mask), ratio


def _near(node):
    """The arithmetic that has made it, and the probabilities before that."""
    found, probabilities, left = [], set(), [node]
    for at in left:
        if at.name() in PROBABILITIES:
            probabilities.add(at)
        elif at.name() in (*ARITHMETIC, *SAME_NUMBERS):
            found.append(at)
            more = [part for part, _ in at.next_functions if part and part not in left]
            left += more if len(left) < NEAR else []
    return found, probabilities


def _product(node):
    """Of a product of probabilities and a tensor without a graph: (the node of these, it)."""
    parts = [part for part, _ in node.next_functions]
    if node.name() != "MulBackward0" or all(parts):
        return None, None
    one = parts[0] or parts[1]
    other = node._saved_self if parts[0] is None else node._saved_other
    core = one if one.name() not in SAME_NUMBERS else node_before(one)
    shape = [*one._input_metadata[0].shape]
    is_given = core is not None and core.name() in PROBABILITIES
    return (core, other) if is_given and shape == [*other.shape] else (None, None)


def _is_0_and_255(t):
    return bool(((t == 0) | (t == 255)).all())
