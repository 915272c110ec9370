"""
Evaluated loss: does a loss of an evaluation get probabilities where it takes logits?

A network that applies its sigmoid in eval mode only, for its users, is evaluated with
binary_cross_entropy_with_logits, which applies another, and nothing fails: the loss of the
validation, by which a run is stopped or a rate falls, is not that of training. (What losses.py says
of a loss that trains needs its graph.) Told is a line whose loss was always given such numbers.
"""

from collections import Counter

from torch.utils.weak import WeakIdKeyDictionary

from ...frames import line_now
from ...watch.events import FirstFunctions
from ..shared.classification import SIGMOID, SIGMOID_TWICE, SOFTMAX_TWICE

OFTEN = 2  # calls
VIEWS = ("view", "reshape", "flatten", "squeeze", "float", "to", "detach", "__getitem__", "cpu")
TWICE = {
    ("cross_entropy", "softmax"): SOFTMAX_TWICE,
    ("cross_entropy", "sigmoid"): SIGMOID,
    ("binary_cross_entropy_with_logits", "sigmoid"): SIGMOID_TWICE,
}


class EvaluatedLoss(FirstFunctions):
    """Losses without gradients, and what made their input."""

    functions = ("softmax", "sigmoid", "cross_entropy", "binary_cross_entropy_with_logits", *VIEWS)

    def __init__(self, watch):
        super().__init__(watch)
        self.made = WeakIdKeyDictionary()  # tensor: "softmax" or "sigmoid"
        self.looks, self.found = Counter(), Counter()  # line; (line, sentence): calls

    def function_called(self, func, name, args, kwargs, out):
        t = args[0] if args else kwargs["input"]
        if out.requires_grad or self.hooks.script_grad():
            return
        if name in ("softmax", "sigmoid"):
            self.made[out] = name, out._version
        elif name in VIEWS and t in self.made:
            self.made[out] = self.made[t]
        elif name not in VIEWS:
            line = line_now()
            self.looks[line] += 1
            made, version = self.made.get(t, ("", 0))
            same = version == t._version  # nothing has written into it since
            self.found[line, TWICE.get((name, made)) if same else None] += 1

    def sentences(self):
        for (line, text), n in self.found.items():
            if text and OFTEN <= n == self.looks[line]:
                yield f"the loss at {line}, in an evaluation: {text}"
