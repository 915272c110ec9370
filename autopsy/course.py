"""
Course: how does the training go?

It keeps gradient norms, learning rates, and the framework that runs the steps. They explain a bad
number; if there was none, the last lines quote them. It ends no script.
"""

from __future__ import annotations

from collections import deque

from .advice import GROWN


class Course:
    """What the steps so far have in common."""

    def __init__(self):
        self.framework = ""  # that runs the steps: a key of FRAMEWORKS
        self.largest = 0.0  # gradient norm
        self._recent = {}  # optimizer: its last gradient norms
        self._rates = set()  # of all optimizers and steps

    def gradients(self, optimizer, norm):
        """Note a good gradient norm before a step."""
        self.largest = max(self.largest, norm)
        self._recent.setdefault(id(optimizer), deque(maxlen=5)).append(norm)

    def after_step(self, rates, steps):
        """Note the rates: a tensor, which may be on a device, after few steps only."""
        now = steps & (steps - 1) == 0  # 0, 1, 2, 4, 8, ...
        plain = (rate for rate in rates if isinstance(rate, float | int) or (now and rate))
        self._rates.update(map(float, plain))

    def growth(self):
        """A sentence for each optimizer whose gradients have grown tenfold."""
        for norms in self._recent.values():
            if 0 < 10 * norms[0] < norms[-1]:
                listed = ", ".join(f"{norm:.3g}" for norm in norms)
                lower = self.negative() or "a lower lr may be the cure"
                yield f"{GROWN}: {listed} ({lower})"

    def negative(self):
        """A sentence if a learning rate is below 0; else ""."""
        lowest = min(self._rates, default=1.0)
        return f"a learning rate is negative: {lowest:g}" if lowest < 0 else ""

    def strange(self):
        """Sentences on what is finite and strange."""
        if negative := self.negative():
            yield negative
