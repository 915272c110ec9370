"""
Pairs: does a loss compare each result with each target?

Of [n, 1] and [n] broadcasting makes [n, n], and its mean trains a network to guess the mean of all
targets. In the graphs of the first losses it looks for such a difference, of a part with a graph
and a target of the batch without (or what is computed under no_grad), as long as the batch, and
after it nothing but numbers of each pair and a mean or sum of all. A loss that compares all
results with each other as well (an energy distance) means all pairs.
"""

from collections import Counter

import torch
from torch import nn

from ...frames import line_of
from ...tensors import leaves, storage_of
from ...watch.events import FirstPasses
from ...watch.graph import maker_of
from ...watch.interrupts import no_evidence

OFTEN = 3  # of one line
OF_ALL = ("MeanBackward0", "SumBackward0")
ALONE = (
    "Neg",
    "Pow",
    "Abs",
    "Sqrt",
    "Log",
    "Exp",
    "Clamp",
    "ClampMin",
    "Maximum",
    "Minimum",
)  # numbers of one pair alone
SCALED, SUMS = ("MulBackward0", "DivBackward0"), ("AddBackward0", "SubBackward0")
OF_EACH = [*(f"{name}Backward0" for name in ALONE), *SCALED, *SUMS]
LOSSES = ("MseLossBackward0", "SmoothL1LossBackward0", "HuberLossBackward0")
PARTS = ("__getitem__", "index_select", "gather", "view", "reshape", "squeeze", "to", "float")
BY_HAND = ("sub", "__sub__", "rsub", "__rsub__", "l1_loss")  # of products: products.py


class Pairs(FirstPasses):
    """Losses that are made of all pairs."""

    def __init__(self, watch):
        super().__init__(watch)
        self.found = Counter()  # (line, shape of the results, of the targets): passes
        self.lines = {}  # line of backward(): that of the loss

    def first(self, losses, here):
        calls = self.recorder.of_this_step
        rows = {c.shape[0] for c in calls if c.grad and c.shape} - {1}
        by_hand = []  # (shape of the results, of the targets)
        nodes = [node for loss in losses if rows for node in _each(loss.grad_fn)]
        if any(map(_of_results_alone, nodes)):
            return
        for node in nodes:
            ours = _results(node)
            n = ours[0] if ours else 0
            if n in rows and ours in ([n], [n, 1]):
                theirs = [n] if ours == [n, 1] else [n, 1]
                other = node._saved_target if node.name() in LOSSES else None
                if node.name() in SUMS:
                    by_hand.append((ours, theirs, _memory(node, nodes)))
                elif other is not None and (shape := _other(ours, theirs, other)):
                    made = maker_of(node, self.recorder.known) or self.recorder.maker(losses[0])
                    if made:
                        self.lines.setdefault(here, line_of(made.frames))
                    self.found[here, str(ours), str(shape)] += 1
        if by_hand:
            self._look(by_hand, calls)

    def _look(self, by_hand, calls):
        """If no more calls than nodes have such targets, it is these; else those whose results the
        next node has kept."""
        alive = {made: t for t, made in self.recorder.known.items()}
        quiet = _quiet(self.recorder.calls)
        targets = {made: t for made, t in alive.items() if made.data or made.number in quiet}
        memories = {memory for *_, memory in by_hand}
        kept = {made.number for c in calls for made in c.uses() if made.memory in memories}
        found, certain = [], []
        for call in calls:
            computed = any(not (m.data or m.number in quiet) for m in call.uses())
            if computed and (call.name in BY_HAND or isinstance(call.function, nn.L1Loss)):
                freed = {m.number for m in call.uses() if m not in alive} & quiet
                for other in calls if freed else ():
                    if other.number in freed and _is_plain(other):  # a part of the targets
                        with no_evidence:
                            other.repeat(targets)
                given = [targets.get(x, x) for x in leaves(call.args)]
                shapes = [[*x.shape] for x in given if isinstance(x, torch.Tensor)]
                pairs = [pair for pair in by_hand if [pair[1]] == shapes]
                for ours, theirs, _ in pairs[:1]:
                    found.append((line_of(call.frames), str(ours), str(theirs)))
                    certain += found[-1:] if call.number in kept else []
        self.found.update(found if len(found) <= len(by_hand) else certain)

    def sentences(self):
        for (line, ours, theirs), passes in self.found.items():
            if passes >= OFTEN:
                at = self.lines.get(line, line)
                yield (
                    f"the loss at {at} compares each result with each target: {ours} and {theirs} "
                    "make a square: give both one shape, with squeeze(1) or [:, None]"
                )


def _quiet(calls):
    """The numbers of those that run under no_grad, or take nothing but their results, data and what
    was there before without a graph."""
    quiet = set()
    for call in calls:
        refs = call.uses()
        taken = all(made.data or made.number in quiet for made in refs)
        plain = not isinstance(call.function, nn.Module) and call.name != "detach"
        older = refs or not any(t.requires_grad for _, t in call.given())
        if not call.grad or (taken and plain and older):
            quiet.add(call.number)
    return quiet


def _is_plain(call):
    """Whether nothing changes if it is made again."""
    return call.name in PARTS and not call.writes and not call.rng


def _each(node):
    """From the loss on: those that make one number of all, or of each pair of numbers one."""
    left = [node] if node else []
    for node in left:
        if node.name() in (*LOSSES, *OF_EACH):
            yield node
        more = node.name() in (*OF_ALL, *OF_EACH) and len(left) < 64
        parts = [part for part, _ in node.next_functions if part]
        if more and node.name() in SUMS and len(_shape(node)) > 1:
            # A matrix may be meant, which is compared with another; a number is added to it.
            parts = [part for part in parts if not _shape(part)]
        elif more and node.name() in SCALED:
            more = getattr(node._saved_other, "shape", ()) == ()
        if more:
            left += parts


def _memory(node, nodes):
    """The id of the storage that holds what a node has made, if the next one keeps it."""
    for other in nodes:
        kept = getattr(other, "_saved_self", None)
        if isinstance(kept, torch.Tensor) and other.next_functions[0][0] is node:
            return id(storage_of(kept))
    return None


def _other(ours, theirs, target):
    """The shape of a target that a loss of torch was given: it was expanded the other way, or is a
    square already, and the results alone are expanded. Or None."""
    if target.stride()[len(theirs) - 1] == 0:
        return theirs
    return [*target.shape] if ours == [len(target), 1] and 0 not in target.stride() else None


def _results(node):
    """Of a square: the shape of its one part with a graph; else []."""
    made = [*node._saved_self.shape] if node.name() in LOSSES else _shape(node)
    parts = [part for part, _ in node.next_functions if part]
    while len(parts) == 1 and parts[0].name() == "ExpandBackward0":
        parts = [part for part, _ in parts[0].next_functions]
    square = len(made) == 2 and made[0] == made[1] and len(parts) == 1
    return _shape(parts[0]) if square else []


def _of_results_alone(node):
    """Whether it compares each result with each other result."""
    parts = [_shape(part) for part, _ in node.next_functions if part]
    if node.name() not in SUMS or len(parts) != 2:
        return False
    n = max(map(max, filter(None, parts)), default=0)
    return _shape(node) == [n, n] and [n, 1] in parts and n > 1


def _shape(node):
    """Of what it has made; of a weight, of itself."""
    return [*getattr(node, "variable", node._input_metadata[0]).shape]
