"""
Counted pairs: does an accuracy compare each prediction with each label?

max(1, keepdim=True) gives [n, 1]; compared with labels [n] it makes [n, n], and the sum counts more
hits than there are samples. Nothing fails. Told is such a comparison of whole numbers whose sum is
larger than n. A line that says None or unsqueeze means it.
"""

from collections import Counter

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...frames import call_at, line_now, script_frames_now
from ...tensors import flat_tensors, storage_of
from ...watch.events import FirstFunctions

OFTEN = 2  # sums
MOST = 8  # that are looked at
CASTS = ("float", "long", "int", "to", "type", "cpu", "double")
TOTALS = ("sum", "mean")
CHOICES = ("argmax", "max", "topk", "round", "sort")
VIEWS = ("view", "reshape", "squeeze", "t", "view_as", "detach", "__getitem__")
ON_PURPOSE = ("None", "unsqueeze", "newaxis", "outer")


class CountedPairs(FirstFunctions):
    """Comparisons that make a square, and their sums."""

    functions = ("eq", "__eq__", *CASTS, *TOTALS, *CHOICES, *VIEWS)
    always = True  # an evaluation comes when it comes

    def __init__(self, watch):
        super().__init__(watch)
        self.predictions = WeakIdKeyDictionary()
        self.squares = WeakIdKeyDictionary()  # comparison: (line, shapes)
        self.found = Counter()  # (line, shapes): sums
        self.looks = 0

    def looks_into(self, module):
        return False

    def function_called(self, func, name, args, kwargs, out):
        t = args[0]
        if name in CHOICES:
            self.predictions.update((x, True) for x in flat_tensors(out) if x.dim())
        elif t in self.predictions and name in (*VIEWS, *CASTS):
            self.predictions[out] = True
        if name in ("eq", "__eq__"):
            is_chosen = t in self.predictions or args[1] in self.predictions
            shapes = is_chosen and _is_square(t, args[1], out)
            frame = script_frames_now()[0]
            if shapes and not any(word in call_at(*frame[:2]) for word in ON_PURPOSE):
                self.squares[out] = line_now(), shapes
        elif about := self.squares.get(t):
            if name in CASTS:
                self.squares[out] = about
            elif out.dim() == 0 and self.looks < MOST:
                self.looks += 1
                self.found[about] += bool(t.sum() > len(t))

    def sentences(self):
        for (line, shapes), n in self.found.items():
            if n >= OFTEN:
                yield (
                    f"{line} compares each prediction with each label, {shapes} make a square, and "
                    "counts more hits than samples: give both one shape, with squeeze(1)"
                )


def _is_square(a, b, out):
    """The shapes of [n, 1] and [n], of whole numbers that are not the same; or ""."""
    if not isinstance(b, Tensor) or a.is_floating_point() or storage_of(a) is storage_of(b):
        return ""
    shapes, n = ([*a.shape], [*b.shape]), len(out)
    is_square = n > 2 and shapes in (([n, 1], [n]), ([n], [n, 1]))
    return f"{shapes[0]} and {shapes[1]}" if is_square else ""
