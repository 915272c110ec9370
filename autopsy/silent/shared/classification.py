"""
Classification: how many classes and which labels has a cross-entropy, and what made its input?

The nodes of the graph say so to contracts.py, losses.py, one_label.py, padded_labels.py,
shifted_labels.py, too_slow.py, batch_first.py and sorted_classes.py. The sentences are those of
losses.py, on the losses that train, and of evaluated_loss.py, on those of evaluations.
"""

from torch import nn

NEAR = 64  # operations between a loss and what it is a sum of
MEAN = 1  # of nll_loss's reduction
NLL = ("NllLossBackward0", "NllLoss2DBackward0")
SAME_NUMBERS = [
    f"{view}Backward0"
    for view in ("View", "ReshapeAlias", "Transpose", "Permute", "T", "Squeeze", "Unsqueeze",
                 "ToCopy", "Slice", "Select", "Clone", "Alias", "UnsafeView")
]  # fmt: skip
LINEAR = ("AddmmBackward0", "MmBackward0", "ConvolutionBackward0", "LinearBackward0")
SOFTMAX_TWICE = "its input went through softmax already, and cross_entropy takes logits"
SIGMOID_TWICE = (
    "its input went through sigmoid already, and binary_cross_entropy_with_logits takes logits"
)
SIGMOID = "a sigmoid keeps each logit in 0..1 before it: leave it out after the last layer"


def node_before(node):
    """The node that made its input, apart from views and casts."""
    while node and node.next_functions:
        node = node.next_functions[0][0]
        if not node or node.name() not in SAME_NUMBERS:
            return node
    return None


def layer_of(node):
    """The weight of the linear layer that made it, apart from views and casts; or None."""
    node = _computed(node)
    if node and node.name() == "AddBackward0" and hasattr(node.next_functions[1][0], "variable"):
        node = _computed(node.next_functions[0][0])  # a bias
    parts = node.next_functions if node and node.name() in LINEAR else ()
    leaves = [getattr(_computed(part), "variable", None) for part, _ in parts]
    return next((p for p in leaves if isinstance(p, nn.Parameter) and p.dim() > 1), None)


def _computed(node):
    while node and node.name() in SAME_NUMBERS:
        node = node.next_functions[0][0]
    return node


def classes_of(node):
    """Of a mean cross-entropy; 0 for any other node."""
    if node.name() not in NLL or node._saved_reduction != MEAN or node._saved_weight is not None:
        return 0
    before, scores = node_before(node), node._saved_self
    several = scores.dim() > 1 and scores.shape[1] > 1
    return scores.shape[1] * (several and before and before.name() == "LogSoftmaxBackward0")


def labels_of(node):
    """Of a cross-entropy, also one that is made by gather(); those that do not count are -1."""
    if node.name() in NLL:
        ignored = node._saved_ignore_index
        ignored -= 2**64 * (ignored >= 2**63)  # it is told without its sign
        return node._saved_target.masked_fill(node._saved_target == ignored, -1)
    if node.name() == "GatherBackward0" and node._saved_index.shape[-1] == 1:
        return node._saved_index
    return None
