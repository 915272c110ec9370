"""
Losses: does a loss get the numbers that it is defined for, and how large is the first one?

The graph of a loss shows what made its input. cross_entropy applies a softmax itself, and
binary_cross_entropy_with_logits a sigmoid: after another one the network trains badly, and never
fails. A ReLU before them cuts every negative logit off. nll_loss takes logarithms of probabilities,
and not logits. An untrained classifier of C classes has a cross-entropy near ln(C). Far above that
it begins sure of wrong answers. The graphs of the first backward passes are looked at; a weight of
the loss, a sum in place of a mean, weights that were loaded, or logits that are no layer's (scaled,
similarities) say nothing about the first loss.
"""

from collections import Counter
from math import log

import torch
from torch.nn import functional as F

from ...frames import line_of
from ...tensors import few
from ...watch.events import FirstPasses
from ...watch.graph import maker_of, nodes_of
from ..shared.classification import (
    LINEAR,
    NEAR,
    NLL,
    SIGMOID,
    SIGMOID_TWICE,
    SOFTMAX_TWICE,
    classes_of,
    layer_of,
    node_before,
)

OFTEN = 3  # of one line
MOST = 1024  # of a whole episode, say
SURE, LEARNT = 3.0, 0.1  # times ln(C)
SOFTMAX_AS_LOGITS = (
    "its logits went through softmax already: Categorical(probs=...) takes probabilities"
)
RELU = "a ReLU makes each negative logit 0 before it: leave it out after the last layer"
ROWS = ("IndexBackward0", "IndexSelectBackward0", "SliceBackward0")
SOFTMAX = "SoftmaxBackward0"
OF_PROBABILITIES = (
    "LogBackward0",
    "AddBackward0",
    "ClampBackward1",
    "ClampMinBackward0",
    "DivBackward0",
)  # between a softmax and a log-probability
OTHER_DIMENSION = "its input was normalised over dimension {}, and the classes are dimension {}"
NO_LOGARITHM = (
    "nll_loss takes log-probabilities, and its input is {}: take log_softmax before it, or "
    "cross_entropy in its place"
)


LINEAR_AS_LOGARITHM = NO_LOGARITHM.format("what a linear layer makes")


class Losses(FirstPasses):
    """What stands before the loss, in the graphs of the first backward passes."""

    def __init__(self, watch):
        super().__init__(watch)
        self.is_fresh = True  # nothing was loaded, no backward pass was made
        self.found = {}  # what is wrong: {(line, is it the loss's, or that of backward()?): passes}
        self.untrained = ""  # of the first cross-entropy

    def loaded(self, module, state, answer):
        self.is_fresh = False

    def first(self, losses, here):
        for loss in losses:
            made = self.recorder.maker(loss)
            line = line_of(made.frames) if made else here
            nodes = nodes_of([loss], MOST)
            misused = {}
            for node in nodes:
                what = _misused(node)
                if what and not (what == LINEAR_AS_LOGARITHM and _has_other_half(nodes)):
                    own = maker_of(node, self.recorder.known)
                    misused[what, line_of(own.frames) if own else line] = True
            for what, at in misused:
                self.found.setdefault(what, Counter())[at, bool(made)] += 1
            for node in nodes[:NEAR]:
                if self.is_fresh and node.name() in NLL:
                    self.untrained = self.untrained or _first(node, line)
        self.is_fresh = False

    def backward(self, losses):
        """Where almost all is learnt, the ReLU is no harm."""
        if RELU in self.found and self.recorder.steps.bit_count() < 2:
            nodes = [node for node in nodes_of(losses, NEAR) if classes_of(node)]
            if any(_mean(node) < LEARNT * log(classes_of(node)) for node in nodes):
                del self.found[RELU]

    def sentences(self):
        for what, lines in self.found.items():
            often = [at for at, passes in lines.items() if passes >= OFTEN]
            often = [line for line, is_known in often if is_known] or [line for line, _ in often]
            if often:
                yield f"the loss at {few(often, 4)}: {what}"
        if self.untrained:
            yield self.untrained


def _has_other_half(nodes):
    """Whether the logarithm of the sum is subtracted by hand."""
    return any(node.name() == "LogsumexpBackward0" for node in nodes)


def _other_dimension(node):
    """(the dimension over which its input was normalised, that of the classes), if they differ."""
    is_loss, before = node.name() in NLL, node.next_functions[0][0]
    scores, labels = node._saved_self, node._saved_target if is_loss else node._saved_index
    while before and before.name() in (*ROWS, *OF_PROBABILITIES):
        before = before.next_functions[0][0]
    if scores.dim() < 2 or not before or before.name() not in ("LogSoftmaxBackward0", SOFTMAX):
        return None
    classes = 1 if is_loss else scores.dim() - 1
    kinds = len(labels.unique())
    if kinds == len(scores) == scores.shape[classes] or (not is_loss and kinds == labels.numel()):
        return None  # pairs, that are found both ways
    made = before._saved_result
    dim = before._saved_dim % made.dim() if before._saved_dim < 2**63 else made.dim() - 1
    same = made.dim() == scores.dim() and made.shape[1:] == scores.shape[1:]
    return (dim, classes) if same and dim != classes else None


def _misused(node):
    """A sentence, or ""."""
    name, before = node.name(), node_before(node)
    made = before.name() if before else ""
    if name == "BinaryCrossEntropyWithLogitsBackward0":
        return {"SigmoidBackward0": SIGMOID_TWICE, "ReluBackward0": RELU}.get(made, "")
    if name == "LogsumexpBackward0" and made == SOFTMAX and node._saved_keepdim:
        return SOFTMAX_AS_LOGITS  # of Categorical(logits=...)
    if (name in NLL or _is_of_choices(node)) and (other := _other_dimension(node)):
        return OTHER_DIMENSION.format(*other)
    if name not in NLL:
        return ""
    if made == "LogSoftmaxBackward0":
        logits = node_before(before)
        made = logits.name() if logits else ""
        return {SOFTMAX: SOFTMAX_TWICE, "ReluBackward0": RELU, "SigmoidBackward0": SIGMOID}.get(
            made, ""
        )
    if made == SOFTMAX:
        return NO_LOGARITHM.format("a softmax")
    if made in LINEAR and bool((node._saved_self > 0).any()):
        return LINEAR_AS_LOGARITHM
    return ""


def _is_of_choices(node):
    """Whether it takes one log-probability of each row, as Categorical does."""
    if node.name() != "GatherBackward0" or not node.next_functions[0][0]:
        return False
    is_log = node.next_functions[0][0].name() in ("LogBackward0", "LogSoftmaxBackward0")
    return is_log and node._saved_index.shape[-1] == 1


@torch.no_grad()
def _mean(node):
    ignored = node._saved_ignore_index
    ignored -= 2**64 * (ignored >= 2**63)  # it is told without its sign
    return float(F.nll_loss(node._saved_self, node._saved_target, ignore_index=ignored))


def _first(node, line):
    """A sentence if the mean is far above that of equal guesses."""
    classes = classes_of(node)
    weight = layer_of(node_before(node).next_functions[0][0]) if classes else None
    if weight is None or len(weight) != classes:
        return ""
    loss = _mean(node)
    if not SURE * log(classes) < loss < float("inf"):
        return ""
    return (
        f"the first cross-entropy was {loss:.3g}, at {line}: equal guesses among {classes} classes "
        f"have ln({classes}) = {log(classes):.3g}, so the network begins sure of wrong answers (a "
        "last layer that starts too large, or inputs that are not normalised)"
    )
