"""
Budget: which steps are recorded?

To write a call down takes 20 to 100 us, whatever the call computes. A step of many small calls (an
RL loop, an ODE solver) would take several times as long. So the watch measures how long it records.
Once that is more than its share of the script's time, some steps are not recorded. Their losses,
gradients, weights and evaluation outputs are read as ever, so that a bad number is found: only what
made it needs a second run of the script.
"""

from math import inf
from time import perf_counter

SHARE = 0.01  # of the time of the script: what is not measured (how torch calls us) takes as much
FREE = 0.3  # seconds that are never refused, and LONGER within the first steps
LONGER = 1.0
FIRST = 6  # steps; then those of 8, 16, 32, ... on, which the checks of silent/ look at closely
TOGETHER = 2  # steps: optimizers may take turns, and one may use what was made before another's


class Budget:
    """How long the watch has recorded, and whether the step under way is recorded."""

    def __init__(self, share, begin=None, clock=perf_counter):
        self.share, self.begin, self.clock = share, inf if begin is None else begin, clock
        self.recording = True
        self.steps = self.recorded = 0
        self.is_close = True  # do the checks of silent/ look closely at the step under way?
        self.asked = False  # has a check of silent/ asked for the next step?
        self.spent, self._since = 0.0, clock()
        self._must = self._is_asked_for(0)

    def _is_asked_for(self, step):
        """Whether all of this step is recorded, whatever it takes."""
        return self.share >= 1 or step >= self.begin - 1

    def spend(self, began, before):
        """The watch has recorded since then; it had spent so much before."""
        self.spent = before + self.clock() - began

    def over(self, step, by_hand=False):
        """A step is over: is the next one recorded? `by_hand`: only what is recorded shows where
        the next step ends."""
        self.steps += 1
        self.recorded += self.recording
        self._must = by_hand or self._is_asked_for(step)
        self.is_close = step < FIRST or step.bit_count() < 2
        asked, self.asked = self.asked, False
        if self._must or self.is_close or asked:
            self.recording = True
        elif step % TOGETHER == 0:
            self.recording = self._is_cheap()

    def leave(self):
        """Within a step of very many calls: is the rest of it not recorded?"""
        free = LONGER if self.steps < FIRST else FREE
        self.recording = self._must or self._is_cheap(free)

    def _is_cheap(self, free=FREE):
        script = self.clock() - self._since - self.spent
        return self.spent <= max(free * (self.share > 0), self.share * script)

    def in_words(self):
        """For the last line of a script, or ""."""
        if self.recorded == self.steps:
            return ""
        return (
            f" ({self.recorded} of {self.steps} updates were recorded, the others only read: to "
            "record takes long here; --share 1 records all)"
        )
