"""
Unit columns: are features compared that were normalised over the samples?

A contrastive loss compares samples by their cosines: each row of the features [n, d] is divided by
its own norm. normalize(x, dim=0) divides each column by its norm over the batch, and nothing fails:
the products [n, n] are no cosines, and each sample depends on the others. The graphs of the first
losses show such a product, of features that were divided so on both sides. A product of columns
[d, d] is not told (that is what a decorrelation of features is made of).
"""

from collections import Counter

from ...frames import line_of
from ...watch.events import FirstPasses
from ...watch.graph import maker_of, nodes_of

OFTEN = 3  # backward passes of one line
MOST = 1024  # nodes, of a whole episode, say
ROWS = 4
NORMS = ("LinalgVectorNormBackward0", "NormBackward1", "NormBackward2")
BEFORE = ("Expand", "ClampMin", "Clamp", "Maximum", "Add", "Sqrt", "Unsqueeze")  # a divisor
TURNS = ("T", "Transpose", "Permute")
PARTS = ("Cat", "Stack", "View", "Slice", "Split", "Chunk", "Index", "IndexSelect", "ToCopy",
         "Select", "UnsafeView", "ReshapeAlias", "Unbind", "Mul", "Div")  # fmt: skip
FIRST_OF_TWO = (0, 2**64 - 2)  # as dimensions are saved: -2 without its sign


class UnitColumns(FirstPasses):
    """Products of samples whose features were divided by norms over the batch."""

    def __init__(self, watch):
        super().__init__(watch)
        self.found = Counter()  # (line, shape of the features): passes

    def first(self, losses, line):
        for node in nodes_of(losses, MOST):
            shape = _product(node) if node.name() == "MmBackward0" else None
            if shape:
                made = maker_of(node, self.recorder.known) or self.recorder.maker(losses[0])
                self.found[line_of(made.frames) if made else line, str([*shape])] += 1
                return

    def sentences(self):
        for (line, shape), passes in self.found.items():
            if passes >= OFTEN:
                yield (
                    f"the loss at {line} compares samples by features {shape} that were divided by "
                    "their norm over the batch: no sample has norm 1, and each depends on the "
                    "others: normalize with dim=1"
                )
                return


def _product(node):
    """The shape of the features, if both sides are divided by norms over the samples and it is a
    product of samples with samples."""
    sides = [part for part, _ in node.next_functions]
    found = [_divided(side) for side in sides if side]
    if len(found) != 2 or not all(found) or found[0][-1] != found[1][-1]:
        return None
    made, shape = _shape(node), found[0]
    n, d = shape
    of_samples = [_shape(side) for side in sides] == [[made[0], d], [d, made[0]]]
    return shape if n != d and of_samples and made[0] % n == 0 else None


def _divided(node):
    """The shape of what was divided by its norms over the samples, if this is made of such alone;
    else None."""
    left, shapes = [node], set()
    for node in left:
        name = node.name().removesuffix("Backward0")
        parts = [part for part, _ in node.next_functions if part]
        if name == "Div" and len(parts) == 2:
            shape = _shape(node)
            if len(shape) != 2 or shape[0] < ROWS or not _is_norm(parts[1], shape):
                return None
            shapes.add(tuple(shape))
        elif name in (*TURNS, *PARTS) and parts and len(left) < MOST:
            left += parts
        else:
            return None
    return shapes.pop() if len(shapes) == 1 else None


def _is_norm(node, shape):
    """Of each column; a sum of squares has a root after it."""
    rooted = False
    while node:
        rooted |= node.name() == "SqrtBackward0"
        if node.name() in NORMS or (rooted and node.name() == "SumBackward1"):
            dims, made = getattr(node, "_saved_dim", None), _shape(node)
            return made in ([1, shape[1]], [shape[1]]) and bool(dims) and dims[0] in FIRST_OF_TWO
        if node.name().removesuffix("Backward0").rstrip("1") not in BEFORE:
            return False
        node = node.next_functions[0][0]
    return False


def _shape(node):
    about = node._input_metadata
    return [*about[0].shape] if about else []
