"""
Turns: at which step is the script, and which optimizers take turns?

The two optimizers of a GAN take turns: both make step 7, and what was computed before the step of
one may serve the other. An optimizer that begins when another one has ended (the next fold, a
fine-tuning) goes on with the count of that one. Its second step in a row shows that.
"""


class Turns:
    """The steps of all optimizers. Each is known by its id; updates by hand are one more."""

    def __init__(self):
        self.steps = 0  # of the optimizer that has made the most
        self.steps_of = {}  # optimizer: its steps
        self._calls = {}  # optimizer: how many calls before its last step; the latest is last
        self._in_a_row = False  # were the last two steps of the same optimizer?
        self._uncounted = None  # the optimizer whose first step has not raised `steps`

    @property
    def latest(self):
        """How many calls there were before the last step of any optimizer."""
        return max(self._calls.values(), default=0)

    def forget(self, calls):
        """Nobody needs any of so many calls."""
        self._calls = {None: calls}

    def stepped(self, optimizer, calls, forgets=False):
        """A step, after so many calls. Returns how many of them nobody needs any more: those before
        its own last step, where it does not take turns (or forgets)."""
        was_in_a_row = self._in_a_row
        self._in_a_row = next(reversed(self._calls), None) == optimizer
        if self._in_a_row or forgets:
            self._calls = {}
        self._calls.pop(optimizer, None)
        self._calls[optimizer] = calls
        self._count(optimizer, was_in_a_row)
        return min(self._calls.values())

    def _count(self, optimizer, was_in_a_row):
        steps = self.steps_of.get(optimizer, 0)
        if self._in_a_row:  # it goes on where another one ended, and its first step counts, too
            steps = self.steps + (self._uncounted == optimizer)
        steps += 1
        follows = was_in_a_row and steps <= self.steps
        self._uncounted = optimizer if follows else None
        self.steps_of[optimizer] = steps
        self.steps = max(self.steps, steps)
