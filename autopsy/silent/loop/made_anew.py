"""
Made anew: is an optimizer made again for each step?

Adam within the loop that steps it begins each time without moments, and a rate that is lowered
where it is made falls with each batch. Nothing fails. Told is a line that makes optimizers of the
same weights, each of which makes one step and is followed by the next, if they keep a state. No
word where weights were loaded in between: one step from a start is how some adapt to a task.
"""

from collections import Counter
from weakref import WeakSet, ref

from ...watch.events import Events

OFTEN = 8  # optimizers, one after the other


class MadeAnew(Events):
    """The optimizers that step, in their order."""

    recorded_only = True  # else weights may be brought back unseen

    def __init__(self, watch):
        self.names = watch.names
        self.last = None  # references to the optimizer of the last step and its first weight; made
        self.steps = 0  # in a row, of the same optimizer
        self.known = WeakSet()  # those that have made a step
        self.found = Counter()  # line: optimizers of one step

    def resumed(self):
        self.last = None

    def loaded(self, module, state, answer):
        self.last = None

    def wrote(self, line, weights, name, given):
        self.last = None

    def stepped(self, optimizer):
        params = optimizer.param_groups[0]["params"]
        if not any("exp_avg" in state for state in optimizer.state.values()):
            self.last = None
            return
        before, weight, made = self.last or (lambda: None, lambda: None, "")
        now = self.names.of_optimizer(optimizer)
        if before() is optimizer:
            self.steps += 1
        else:
            follows = made == now and weight() is params[0] and optimizer not in self.known
            self.found[now] += follows and self.steps == 1
            self.steps = 1
            self.known.add(optimizer)
        self.last = ref(optimizer), ref(params[0]), now

    def sentences(self):
        for made, n in self.found.items():
            if n >= OFTEN:
                yield (
                    f"{made} is made anew for each step, {n + 1} times, of the same weights: its "
                    "moments begin with 0 each time: make it once, before the loop"
                )
