"""
Sorted classes: does each batch hold one class, because nobody shuffles?

A folder of images or a table is often sorted by class. With shuffle=False, which is the default of
DataLoader, a network sees one class after the other, and forgets each. Told is a loader in fixed
order, the first batches of which are sorted by label, with one or two classes in each and others in
others, of a loss over several. It is read twice at least (once may be a stream), and each batch has
one such loss, of as many samples as the loader gives (others may be a memory of past classes).
"""

from torch.utils.data import SequentialSampler

from ...watch.events import FirstPasses
from ...watch.graph import nodes_of
from ..shared.classification import NEAR, classes_of
from ..shared.passes import Loops

OFTEN = 6  # batches
CLASSES = 4
SAMPLES = 16  # of a batch
HOLDS = 2  # classes


class SortedClasses(FirstPasses):
    """Labels of the first batches of each loader in fixed order."""

    def __init__(self, watch):
        super().__init__(watch)
        self.loops = Loops()
        self.batches = {}  # loop: [(classes of a batch, of the loss)] of its first pass
        self.over = set()  # loops with a batch of another kind

    def iterated(self, loader):
        loop = self.loops.begin(loader)
        if loop.begun > 1 or not isinstance(getattr(loader, "sampler", None), SequentialSampler):
            self.over.add(loop)

    def first(self, losses, line):
        loop = self.loops.last
        if loop is None or loop in self.over:
            return
        nodes = [node for node in nodes_of(losses, NEAR) if classes_of(node)]
        for node in nodes:
            classes, labels = classes_of(node), node._saved_target
            alone = len(nodes) == 1 and all(len(labels) <= (n or 0) for n in loop.sizes)
            held = _held(labels) if classes >= CLASSES and alone else None
            if not held:
                self.over.add(loop)
                self.batches.pop(loop, None)
            else:
                self.batches.setdefault(loop, []).append((held, classes))

    def sentences(self):
        for loop, batches in self.batches.items():
            seen = set().union(*(held for held, _ in batches))
            few = max(len(held) for held, _ in batches)
            if loop.begun > 1 and len(batches) >= OFTEN and len(seen) > few:
                yield (
                    f"the first {len(batches)} batches of the loader at {loop.line} hold {few} of "
                    f"{batches[0][1]} classes at most, one class after the other: the data are "
                    "sorted, and nothing shuffles them: DataLoader(..., shuffle=True)"
                )


def _held(labels):
    """The classes of a batch that is sorted and holds few; or None."""
    if labels.dim() != 1 or len(labels) < SAMPLES:
        return None
    held = set(labels.unique().tolist())
    turns = int((labels.diff() != 0).sum())
    return held if len(held) <= HOLDS and turns < len(held) else None
