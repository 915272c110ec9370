"""
Viewed: was view() meant to transpose?

Of [128, 28, 9] view(28, 128, 9) takes the numbers in the order in which they lie in memory: each
row mixes samples, or heads and places, and nothing fails. In two steps it looks at what the script
and its networks view or reshape: told is a shape with two dimensions beside each other exchanged,
of different sizes, not the last one. Two of one size show nothing. The shift of relative positions
is made like this on purpose; it pads before, and says so.
"""

import re
from contextlib import suppress

from torch import Tensor

from ..frames import call_at, line_now, line_of, script_frames, script_frames_now
from ..modes import is_compiled
from ..watch.calls import ResultRef
from ..watch.events import Events
from ..watch.following import Follower

LOOKS = (1, 4)  # steps
NAMES = ("view", "reshape")
QUIET = ("squeeze", "unsqueeze", "flatten", "to", "float", "contiguous", "transpose", "permute",
         "clone", "__getitem__", *NAMES)  # fmt: skip
SHIFTS = re.compile("shift|skew|rel|pad|roll", re.I)


class Viewed(Events):
    """Shapes with two dimensions exchanged."""

    recorded_only = True

    def __init__(self, watch):
        self.recorder = watch.recorder
        self.found = {}  # (line, sentence): steps

    def during(self, call, args, kwargs):
        module = call.function
        asked = call.grad and module.training and self.recorder.steps in LOOKS
        return () if not asked or is_compiled([*module.modules()]) else [Views(self.note)]

    def note(self, line, code, before, after):
        k = _exchanged(before, after)
        if k is not None and not SHIFTS.search(code):
            text = (
                f"{before} is viewed as {after} at {line}: the numbers stay in their order, so "
                f"each row mixes several: transpose({k}, {k + 1}) exchanges dimensions"
            )
            self.found.setdefault((line, text), set()).add(self.recorder.steps)

    def backward(self, losses):
        """What the script has viewed outside of modules."""
        if self.recorder.steps not in LOOKS:
            return
        calls = [c for c in self.recorder.of_this_step if c.name in QUIET and not c.writes]
        made = {result: t for t, result in self.recorder.known.items()}
        for call in calls if any(call.name in NAMES for call in calls) else ():
            with suppress(Exception):
                result = ResultRef(call.number, 0, call.frames)
                if result not in made:  # the script holds it no longer
                    call.repeat(made)
                t, out = made.get(call.args[0], call.args[0]), made[result]
                if call.name in NAMES and isinstance(t, Tensor):
                    frames = script_frames(call.frames)
                    code = "".join([call_at(*frames[-1][:2]), frames[-1][2]])
                    self.note(line_of(frames), code, [*t.shape], [*out.shape])

    def sentences(self):
        yield from [text for (_, text), steps in self.found.items() if len(steps) == len(LOOKS)]


class Views(Follower):
    """What a network views."""

    def __init__(self, note):
        super().__init__()
        self.note = note

    def look(self, func, name, args, kwargs, out):
        if name in NAMES:
            frames = script_frames_now()
            code = "".join([call_at(*frames[0][:2]), frames[0][2]])
            self.note(line_now(), code, [*args[0].shape], [*out.shape])


def _exchanged(before, after):
    """The first of two dimensions beside each other that are exchanged, not the last one; or
    None."""
    if before == after or len(before) != len(after) or len(before) < 3:
        return None
    k = next(k for k in range(len(before)) if before[k] != after[k])
    pair = before[k : k + 2]
    others = before[k + 2 :] == after[k + 2 :] and k + 2 < len(before)
    return k if others and after[k : k + 2] == pair[::-1] and min(pair) > 1 else None
