"""
Padded labels: does a cross-entropy count the padding of its labels?

A mean over padded sequences that knows no ignore_index learns to predict padding, and its numbers
look better than they are. The graphs of the first losses hold the labels, the ids that an embedding
was given, and what is ignored. Labels are padded if they end in runs of the value with which the
ids of the same rows are padded, as long as theirs (but for the one id that was shifted out). Labels
most of which are the ids themselves are an autoencoder's, which may have to write the ends, too.
"""

import torch

from ...frames import line_of
from ...watch.events import FirstPasses
from ...watch.graph import maker_of, nodes_of
from ...watch.interrupts import no_evidence
from ..shared.classification import MEAN, NEAR, NLL
from ..shared.padding import padding_of

OFTEN = 2  # backward passes of one line
MUCH = 0.1  # of the labels


class PaddedLabels(FirstPasses):
    """Labels of the first losses, beside the ids of the same step."""

    def __init__(self, watch):
        super().__init__(watch)
        self.found = {}  # line of backward(): [(value, share, side, shape of the ids)]
        self.lines = {}  # the same: that of the loss, if it is known

    def first(self, losses, line):
        with no_evidence, torch.no_grad():
            self._look(losses, line)

    def _look(self, losses, line):
        means = [node for node in nodes_of(losses, NEAR) if node.name() in NLL]
        means = [node for node in means if node._saved_reduction == MEAN]
        if not means:
            return
        tables = [node for node in nodes_of(losses) if node.name() == "EmbeddingBackward0"]
        for node in means:
            looks = [_counted(node, table._saved_indices) for table in tables]
            if found := [look for look in looks if look]:
                self.found.setdefault(line, []).append(found[0])
                if made := maker_of(node, self.recorder.known):
                    self.lines.setdefault(line, line_of(made.frames))

    def sentences(self):
        for line, found in self.found.items():
            if len(found) >= OFTEN and len({value for value, *_ in found}) == 1:
                value, share, side, shape = found[-1]
                at = self.lines.get(line, line)
                yield (
                    f"the cross-entropy at {at} counts padding: {share:.0%} of its labels are "
                    f"{value}, where rows of the ids {[*shape]} {side} with runs of it, of "
                    "different lengths: leave these out (ignore_index)"
                )


def _counted(node, ids):
    """(the value of padding, its share among the labels, the side on which it is, the shape of the
    ids), if it counts."""
    padding = padding_of(ids)
    labels = node._saved_target
    length, rest = divmod(labels.numel(), len(ids))
    if padding is None or rest or length not in (ids.shape[1], ids.shape[1] - 1):
        return None
    labels = labels.reshape(len(ids), length)
    value, weight = padding.value, node._saved_weight
    if node._saved_ignore_index == value or (weight is not None and weight[value] == 0):
        return None
    if (
        labels.shape == ids.shape
        and 2 * ((labels == ids) & ~padding.at).sum() > (~padding.at).sum()
    ):
        return None
    same = labels == value
    turned = same if padding.side == "begin" else same.flip(1)
    runs = turned.long().cumprod(1).sum(1)
    shorter = padding.at.sum(1) - runs
    share = float(same.float().mean())
    if (shorter.abs() > 1).any() or runs.sum() != same.sum() or share < MUCH:
        return None
    return value, share, padding.side, ids.shape
