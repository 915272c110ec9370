"""
Other order: are results and labels flattened in the same order?

Of results [time, batch, classes] view(-1, classes) counts the batch first, of labels [batch, time]
view(-1) the time: each result is compared with the label of another place, and nothing fails. So it
is if [batch, time, classes] is viewed as [batch, classes, time], which a cross-entropy takes. Views
are followed to the loss; told is one whose two parts had their first dimensions the other way
round. Two dimensions of one size show nothing.
"""

from collections import Counter

from torch.utils.weak import WeakIdKeyDictionary

from ...frames import line_now
from ...watch.events import FirstFunctions

OFTEN = 3  # calls at one line
CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
VIEWS = ("view", "reshape", "flatten")
SAME = ("log_softmax", "softmax", "sigmoid", "float", "long", "to", "contiguous", "cpu", "type",
        "linear", "relu", "dropout", "squeeze", "clone")  # fmt: skip
LOSSES = ("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss",
          "binary_cross_entropy", "binary_cross_entropy_with_logits")  # fmt: skip


class OtherOrder(FirstFunctions):
    """What losses compare, and what that was flattened from."""

    functions = (*CONVOLUTIONS, *VIEWS, *SAME, *LOSSES)

    def __init__(self, watch):
        super().__init__(watch)
        self.flat = WeakIdKeyDictionary()  # tensor: the shape of what was first viewed as it
        self.channels_first = WeakIdKeyDictionary()  # what a convolution made, and views of it
        self.looks, self.wrong = Counter(), Counter()  # line: calls
        self.text = {}  # line: a sentence

    def function_called(self, func, name, args, kwargs, out):
        if name in LOSSES:
            results, labels = (*args, *kwargs.values())[:2]
            line, text = line_now(), self._compared(results, labels)
            self.looks[line] += 1
            self.wrong[line] += bool(text)
            self.text.setdefault(line, text)
        elif name in CONVOLUTIONS:
            self.channels_first[out] = True
        else:
            if args[0] in self.channels_first:
                self.channels_first[out] = True
            if name in VIEWS:
                self.flat[out] = self.flat.get(args[0], [*args[0].shape])
            elif args[0] in self.flat and out.shape[:1] == args[0].shape[:1]:
                self.flat[out] = self.flat[args[0]]

    def _compared(self, results, labels):
        """A sentence, or ""."""
        ours, theirs = self.flat.get(results, []), self.flat.get(labels, [*labels.shape])
        if len(ours) < 2 or min(ours[:2]) < 2:
            return ""
        n, m, *rest = ours
        shape, places = [*results.shape], labels.numel()
        if n != m and labels in self.flat and len(labels) == n * m and theirs[:2] == [m, n]:
            return (
                f"compares {ours} with {theirs}, each flattened as it lies: a result meets the "
                "label of another place: transpose(0, 1) one of both before"
            )
        exchanged = [n, *rest, m] == shape and theirs == [n, m]  # [n, classes, places]
        flat = len(rest) == 1 and shape == [n * rest[0], m] and places == n * rest[0]
        flat &= results in self.channels_first
        if len(rest) == 1 and m != rest[0] and (exchanged or flat):
            return (
                f"takes {shape}, a view of {ours} whose numbers stay in their order: "
                "transpose(1, 2) exchanges dimensions"
            )
        return ""

    def sentences(self):
        for line, n in self.wrong.items():
            if OFTEN <= n == self.looks[line]:
                yield f"the loss at {line} {self.text[line]}"
