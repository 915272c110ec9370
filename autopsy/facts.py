"""
Facts: the types of what an examination finds.

Decisions compare these types. The sentences about them are made in report.py and advice.py, and no
other file reads a sentence back.
"""

from enum import Enum
from typing import NamedTuple

import torch

from .frames import NOWHERE, Line
from .tensors import Span


class Kind(Enum):
    """What held a bad number before an operation of the step used it, in words."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    ATTRIBUTE = "attribute"
    OLD_GRADIENT = "old gradient of"
    MOMENT = "optimizer state"
    EARLIER_STEP = "a tensor of an earlier step"
    BATCH = ""  # the name alone: "input"
    BEFORE_TRAINING = "a tensor before this step"
    OUTSIDE = "a tensor from outside of torch (NumPy, a file)"
    PYTHON = "a tensor of Python's numbers"
    CONSTANT = "a number made outside of torch, or before the watch"
    WRITTEN = "a number that the script writes"  # fill_, full, ...: a bad scalar, no bad tensor
    UNINITIALISED = "memory of torch.empty that no operation of torch wrote"
    UNSEEN = "what compiled code or another library made"


STATE = Kind.PARAMETER, Kind.BUFFER, Kind.ATTRIBUTE, Kind.OLD_GRADIENT, Kind.EARLIER_STEP
MADE_ELSEWHERE = Kind.BEFORE_TRAINING, Kind.OUTSIDE, Kind.PYTHON, Kind.CONSTANT


class Source(NamedTuple):
    """Where a bad number was before an operation of the step used it."""

    kind: Kind
    name: str = ""  # "head.weight"
    line: Line = NOWHERE  # that made it

    def __str__(self):
        words = " ".join(filter(None, (self.kind.value, self.name)))
        return f"{words} ({self.line})" if self.line else words


class Outcome(Enum):
    """Of a run of the step in another way."""

    FINITE = "finite"
    STILL_BAD = "still bad"
    BAD = "bad"  # in the way in which it was run first
    UNSEEN = "not tried, the call was not seen"
    FAILED = "could not be tried"  # it raised


class Trial(NamedTuple):
    """A run of the step in another way, and what came of it."""

    what: str  # "block in fp32"
    outcome: Outcome
    symptom: str = ""  # what was bad, or raised
    where: str = ""  # the lines that were changed
    same_step: bool | None = None  # whether loss and gradients are as in float64; None: not known
    compared: str = ""  # the numbers of that

    @property
    def helps(self):
        return self.outcome is Outcome.FINITE and self.same_step is not False

    @property
    def was_made(self):
        return self.outcome not in (Outcome.UNSEEN, Outcome.FAILED)


class Where(Enum):
    """What a cure changes."""

    MODULE = "module"
    EPS = "eps"
    LINE = "line"
    PRECISION = "precision"


class Cure(NamedTuple):
    """The first trial that was finite: what it changed."""

    where: Where
    name: str  # of the module or modules, the operation, the lines, the precision
    keeps_output: bool = False  # the result of the module stays in fp32


class Repeat(NamedTuple):
    """An operation on the same inputs in a wider type."""

    dtype: torch.dtype
    span: Span  # of a bad result; of finite ones 0 to 0

    def __str__(self):
        holds = self.span.bad_end if self.span.is_bad else "finite"
        return f"{holds} in {str(self.dtype).removeprefix('torch.')}"
