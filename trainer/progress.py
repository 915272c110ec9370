"""Progress in a log file, where a bar would be noise: a line every half minute."""

import time
from contextlib import AbstractContextManager
from datetime import timedelta

from .record import Run

EVERY = 30.0  # seconds


class Lines(AbstractContextManager):
    """In place of tqdm's bar: the step, the time left, and the last numbers."""

    def __init__(self, run: Run):
        self.run = run
        self.first = run.step
        self.began = self.said = time.monotonic()
        self.numbers: dict[str, str] = {}

    def __exit__(self, *_) -> None:
        """The last validation has said the rest."""

    def set_postfix(self, numbers: dict[str, str]) -> None:
        self.numbers = numbers

    def update(self) -> None:
        """After each step."""
        now, run = time.monotonic(), self.run
        if now - self.said < EVERY:
            return
        self.said = now
        seconds = (now - self.began) / max(1, run.step - self.first)
        left = timedelta(seconds=round(seconds * (run.total_steps - run.step)))
        shown = "  ".join(
            f"{name} {self.numbers[name]}"
            for name in ("loss", "acc1", "lr")
            if name in self.numbers
        )
        run.log.say(f"step {run.step} of {run.total_steps}, {left} left  {shown}".rstrip())
