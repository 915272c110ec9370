"""
One label: is a layer trained with a single class?

Two domains that are both labelled 0, and nothing fails: a head of two classes learns to say the
first. Losses that take their logits from one layer are looked at together, whatever line they are
on, in the first backward passes and some later ones: told is a layer with several classes all of
whose labels were of one of them.
"""

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..watch.events import Events
from ..watch.graph import graph_of, nodes_of
from .losses import NEAR, NLL

OFTEN = 18  # losses of a layer
NODES = 12  # between a loss and the layer
FIRST = 16  # backward passes; then those whose number is a sum of at most two powers of 2


class OneLabel(Events):
    """Labels of the losses of each last layer."""

    def __init__(self, watch):
        self.names, self.passes = watch.names, 0
        self.labels = WeakIdKeyDictionary()  # weight: (classes, [label of a loss, or -1], losses)

    def backward(self, losses):
        self.passes += 1
        if self.passes > FIRST and self.passes.bit_count() > 2:
            return
        for node in nodes_of(losses, NEAR):
            if node.name() in NLL:
                self._look(node)

    def _look(self, node):
        labels, scores = node._saved_target, node._saved_self
        weights = (getattr(other, "variable", None) for other in graph_of([node], NODES))
        weight = next((p for p in weights if isinstance(p, nn.Parameter) and p.dim() > 1), None)
        if weight is None or scores.dim() != 2 or len(weight) != scores.shape[1]:
            return  # what stands for classes is another dimension
        if not labels.numel():
            return
        with torch.no_grad():
            low, high = labels.aminmax()
            label = torch.where(low == high, low, -1)
        _, seen = self.labels.setdefault(weight, (scores.shape[1], []))
        seen.append(label)

    def sentences(self):
        for weight, (classes, seen) in self.labels.items():
            kinds = {int(label) for label in seen}
            if classes > 1 and len(seen) >= OFTEN and len(kinds) == 1 and -1 not in kinds:
                yield (
                    f"each label seen with which {self.names.of(weight)} was trained is "
                    f"{kinds.pop()}, in {len(seen)} losses, though it has {classes} classes"
                )
