"""
One label: is a layer trained with a single class?

Two domains that are both labelled 0, and nothing fails: a head of two classes learns to say the
first. Losses that take their logits from one layer are looked at together, whatever line they are
on, in the first backward passes and some later ones: told is a layer with several classes all of
whose labels were of one of them.
"""

from torch.utils.weak import WeakIdKeyDictionary

from ...watch.events import Events
from ...watch.graph import nodes_of
from ..shared.classification import NEAR, NLL, layer_of, node_before

OFTEN = 18  # losses of a layer
FIRST = 16  # backward passes; then those whose number is a sum of at most two powers of 2


class Labels:
    """Those with which a layer was trained."""

    def __init__(self, classes, label):
        self.classes, self.losses = classes, 0
        self.label = label  # on its device, as the next one
        self.are_same = label == label

    def note(self, low, high):
        self.losses += 1
        self.are_same = self.are_same & (low == self.label) & (high == self.label)


class OneLabel(Events):
    """Labels of the losses of each last layer."""

    def __init__(self, watch):
        self.names, self.passes = watch.names, 0
        self.labels = WeakIdKeyDictionary()  # weight: Labels
        self.suspects = set()  # Labels: while there are any, each backward pass is looked at

    def backward(self, losses):
        self.passes += 1
        if self.passes > FIRST and self.passes.bit_count() > 2 and not self.suspects:
            return
        for node in nodes_of(losses, NEAR):
            if node.name() in NLL:
                self._look(node)

    def _look(self, node):
        labels, scores = node._saved_target, node._saved_self
        before = node_before(node)  # log_softmax
        weight = layer_of(before.next_functions[0][0]) if before and before.next_functions else None
        if weight is None or scores.dim() != 2 or len(weight) != scores.shape[1]:
            return  # what stands for classes is another dimension
        if labels.numel():
            low, high = labels.detach().aminmax()
            seen = self.labels.setdefault(weight, Labels(scores.shape[1], low))
            seen.note(low, high)
            if seen.losses == OFTEN or (seen in self.suspects and seen.losses.bit_count() == 1):
                (self.suspects.add if seen.are_same else self.suspects.discard)(seen)

    def sentences(self):
        for weight, seen in self.labels.items():
            if seen.classes > 1 and seen.losses >= OFTEN and seen.are_same:
                yield (
                    f"each label seen with which {self.names.of(weight)} was trained is "
                    f"{int(seen.label)}, in {seen.losses} losses, though it has {seen.classes} "
                    "classes"
                )
