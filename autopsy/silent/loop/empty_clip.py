"""
Empty clip: are no gradients given to the function that clips them?

`params = net.parameters()` is used up by whoever loops over it first, and a clip of what is left
clips nothing. Told is a line that clips no parameter before steps that have gradients.
"""

from collections import Counter

from ...frames import line_now
from ...watch.events import Events

OFTEN = 3  # steps


class EmptyClip(Events):
    """Clips of no parameters, and the steps after them."""

    def __init__(self, watch):
        self.last = ""  # the line of the last clip, if it had no parameters
        self.empty, self.full = Counter(), Counter()  # line: clips

    def clipped(self, params, limit, norm):
        self.last = "" if params else line_now()
        self.full[line_now()] += bool(params)

    def before_step(self, optimizer, losses, norm, moved):
        self.empty[self.last] += moved > 0
        self.last = ""

    def sentences(self):
        for line, n in self.empty.items():
            if line and n >= OFTEN and self.full[line] < 2:  # a generator may be whole once
                yield (
                    f"{line} clips the gradients of no parameter, before {n} steps: is it given "
                    "a generator that was used up? Pass net.parameters() itself, or a list"
                )
