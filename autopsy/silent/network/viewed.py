"""
Viewed: was view() meant to transpose?

Of [128, 28, 9] view(28, 128, 9) takes the numbers in the order in which they lie in memory: each
row mixes samples, or heads and places, and nothing fails. In the first steps it looks at what the
script and its networks view or reshape: told is a shape with two dimensions beside each other
exchanged, of different sizes, not the last one, and images [n, h, w, 3] that become [n, 3, h, w].
Two of one size show nothing. No word where labels [n, t] are viewed so, too, nor of the shift of
relative positions, which is made like this on purpose; it pads before, and says so.
"""

import re

from ...frames import call_at, line_now, script_frames_now
from ...watch.events import FirstFunctions

OFTEN = 2  # steps
SHIFTS = re.compile("shift|skew|rel|pad|roll", re.I)
COLOURS, SIDE = 4, 8  # of an image: at most, pixels at least


class Viewed(FirstFunctions):
    """Shapes with dimensions in another order."""

    functions = ("view", "reshape")

    def __init__(self, watch):
        super().__init__(watch)
        self.found = {}  # (sentence, the first two dimensions before): steps
        self.rows = set()  # first two dimensions, of two in all, that are exchanged, too: labels

    def function_called(self, func, name, args, kwargs, out):
        before, after = [*args[0].shape], [*out.shape]
        if len(before) == 2 and after == before[::-1]:
            self.rows.add(tuple(before))
        how = _mended(before, after)
        file, number, function = script_frames_now()[0]
        code = "".join([call_at(file, number), function]) if how else ""
        if how and not SHIFTS.search(code):
            text = (
                f"{before} is viewed as {after} at {line_now()}: the numbers stay in their order, "
                f"so each row mixes several: {how}"
            )
            self.found.setdefault((text, tuple(before[:2])), set()).add(self.recorder.steps)

    def sentences(self):
        for (text, rows), steps in self.found.items():
            if len(steps) >= OFTEN and rows not in self.rows:
                yield text


def _mended(before, after):
    """What would have moved the dimensions, if two beside each other are exchanged, not the last
    one, or the colours of images come first; or ""."""
    if before == after or len(before) != len(after) or len(before) < 3:
        return ""
    *samples, high, wide, colours = before
    is_image = min(high, wide) >= SIDE and 1 < colours <= COLOURS
    if is_image and after == [*samples, colours, high, wide]:
        return "movedim(-1, -3) brings the colours first"
    k = next(k for k in range(len(before)) if before[k] != after[k])
    pair = before[k : k + 2]
    others = before[k + 2 :] == after[k + 2 :] and k + 2 < len(before)
    is_other = others and after[k : k + 2] == pair[::-1] and min(pair) > 1
    return f"transpose({k}, {k + 1}) exchanges dimensions" if is_other else ""
