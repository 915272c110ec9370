"""
Truncated: are numbers between 0 and 1 made integers, and given to a loss as its target?

`image.long()` of what a loader has scaled to 0..1 is 0 everywhere, and so is `target.long()` of a
share. The loss is finite. Told is a target all of which became 0 so, in each step and evaluation
that was looked at.
"""

from ...frames import line_now
from ...tensors import storage_of
from ...watch.events import FirstFunctions

CASTS = ("long", "int", "to", "type", "type_as")
LOSSES = ("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
OFTEN, LEAST = 3, 8  # losses, numbers of a target
KEPT = 4  # casts


class Truncated(FirstFunctions):
    """Casts, and losses that are given their results."""

    functions = (*CASTS, *LOSSES)

    def __init__(self, watch):
        super().__init__(watch)
        self.casts = []  # (memory of a result, line, was all of it lost? 0-dim)
        self.found = {}  # line of a cast: (line of a loss, losses, was all lost in each?)

    def function_called(self, func, name, args, kwargs, out):
        if name in CASTS:
            t = args[0]
            if t.is_floating_point() and t.numel() >= LEAST and not out.is_floating_point():
                lost = (t >= 0).all() & (t < 1).all() & (t > 0).any()
                self.casts = [*self.casts[-KEPT:], (storage_of(out), line_now(), lost)]
            return
        target = kwargs.get("target", args[1] if args[1:] else None)
        for memory, line, lost in self.casts:
            if memory is storage_of(target):
                _, times, all_lost = self.found.get(line, ("", 0, True))
                self.found[line] = line_now(), times + 1, lost & all_lost

    def over(self):
        self.casts = []  # they hold memory

    def sentences(self):
        for line, (loss, times, lost) in self.found.items():
            if times >= OFTEN and lost:
                yield (
                    f"the target of the loss at {loss} is 0 everywhere: {line} makes integers of "
                    "numbers from 0 to 1; scale them before it, or leave them as they are"
                )
