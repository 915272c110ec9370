"""
Clones: is the average of a target network written into clones that nobody uses?

state_dict() gives the tensors of a network itself; a clone of them does not. Told is a network that
no optimizer trains and that never moves, and is called, where the script clones its weights at each
of the first steps, makes (1 - a) * clone + a * source of these in place, and then gives the result
to no other function, copies it nowhere and keeps it not. It looks outside of modules and within.
"""

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet, ref

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ...frames import line_now
from ...modes import is_compiled
from ...tensors import few, is_sharded, storage_of
from ...watch.deferred import params_of
from ...watch.events import FirstFunctions
from ...watch.following import Follower

OFTEN = 3  # steps
SCALES = ("mul", "mul_", "__mul__", "__rmul__", "__imul__")
SUMS = ("add_", "__iadd__")


@dataclass
class Share:
    """What a tensor is: a copy times a number, plus a source times a number."""

    copy: Tensor | None
    of_copy: float
    of_source: float

    @property
    def is_average(self):
        return self.of_copy > 0 < self.of_source and abs(self.of_copy + self.of_source - 1) < 1e-6


@dataclass
class Result:
    """An average that was made in place since the last step."""

    tensor: Any  # a weak reference
    copy: Tensor
    line: str
    made: Any  # what stands for it in the arguments of recorded calls
    is_used: bool = False


@dataclass
class Lost:
    """The averages of a copy that nobody has used."""

    copy: Tensor
    line: str
    norm: Tensor  # of the copy, when that was seen first
    steps: set = field(default_factory=set)


class Looks(Follower):
    """At all functions within a module."""

    def __init__(self, check):
        super().__init__()
        self.check = check

    def function_called(self, func, name, args, kwargs, out):
        self.check.function_called(func, name, args, kwargs, out)


class Clones(FirstFunctions):
    """Clones of weights that no optimizer trains."""

    functions = ("clone", *SCALES, *SUMS, "lerp_", "copy_")

    def __init__(self, watch):
        super().__init__(watch)
        self.names, self.deferred = watch.names, watch.deferred
        self.step, self.copies, self.trained = None, {}, set()  # storages, at that step
        self.shares = WeakTensorKeyDictionary()  # clone, or a weight times a number: Share
        self.results, self.of_clones = [], WeakTensorKeyDictionary()  # clone: its Result
        self.lost = {}  # by the id of a copy
        self.used = WeakSet()  # modules that were called since

    def called(self, module, tensors=()):
        if self.lost:
            self.used.add(module)

    evaluated = called

    def looks_into(self, module):
        return False  # by during(), at all functions

    def during(self, call, args, kwargs):
        is_first = self.hooks.budget.is_close and self.recorder.steps
        return [Looks(self)] if is_first and not is_compiled([*call.function.modules()]) else []

    def function_called(self, func, name, args, kwargs, out):
        """What does it make of a clone?"""
        given = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        first = next(iter(given), None)
        share = self._share(name, given, args, kwargs)
        for t in given:
            self._use(t)
        if share is None:
            if name.endswith("_") and first is not None:
                self.shares.pop(first, None)
            return
        self.shares[out] = share
        if out is first and share.is_average and share.copy is not None:
            made = self.recorder.known.get(out)
            self.of_clones[out] = Result(ref(out), share.copy, line_now(), made)
            self.results.append(self.of_clones[out])

    def _use(self, t):
        if self.results and (result := self.of_clones.get(t)):
            result.is_used = True

    def read(self, t, name):
        self._use(t)

    def _share(self, name, given, args, kwargs):
        """Of what this function makes of these tensors; None if that is nothing of the kind."""
        if not given or not self.recorder.steps or name not in self.functions:
            return None
        shares = [*map(self._share_of, given)]
        numbers = [x for x in (*args, *kwargs.values()) if type(x) is float]
        first, last = shares[0], shares[-1]
        if None in shares:
            return None
        if name == "clone":
            return first
        if name in SCALES and len(shares) == len(numbers) == 1:
            return Share(first.copy, first.of_copy * numbers[0], first.of_source * numbers[0])
        if len(shares) != 2 or given[0] not in self.shares or last.copy is not None:
            return None  # into a weight itself, or of two copies
        if name in SUMS:
            alpha = [*numbers, 1.0][0]
            return Share(first.copy, first.of_copy, first.of_source + alpha * last.of_source)
        if name == "lerp_" and numbers:
            rest = 1 - numbers[0]
            of_source = rest * first.of_source + numbers[0] * last.of_source
            return Share(first.copy, rest * first.of_copy, of_source)
        return None

    def _share_of(self, t):
        if t in self.shares:
            return self.shares[t]
        if self.step != self.recorder.steps:
            self._read_weights()
        storage = storage_of(t)
        if storage in self.trained:
            return Share(None, 0.0, 1.0)
        copy = self.copies.get(storage)
        return copy if copy is None else Share(copy, 1.0, 0.0)

    def _read_weights(self):
        self.step = self.recorder.steps
        self.trained = {storage_of(p) for opt in self.names.optimizers for p in params_of(opt)}
        weights = [p for root in list(self.names.roots) for p in root.parameters()]
        weights = [p for p in weights if p.is_floating_point() and not is_sharded(p)]
        self.copies = {storage_of(p): p for p in weights if storage_of(p) not in self.trained}

    def stepped(self, optimizer):
        results, self.results, self.step = self.results, [], None
        if not results:
            return
        used = {made.number for call in self.recorder.calls for made in call.uses()}
        for result in results:
            is_kept = result.tensor() is not None
            if is_kept or result.is_used or (result.made and result.made.number in used):
                continue
            copy = result.copy
            if id(copy) not in self.lost:
                norm = self.deferred.norms([copy])[0]
                self.lost[id(copy)] = Lost(copy, result.line, norm)
            self.lost[id(copy)].steps.add(self.recorder.steps)

    def wrote(self, line, weights, name, given):
        """Is such an average written into weights?"""
        living = [(result, t) for result in self.results if (t := result.tensor()) is not None]
        written = {storage_of(t) for values in given for t in values if isinstance(t, Tensor)}
        for result, t in living:
            result.is_used |= storage_of(t) in written

    def sentences(self):
        lines = {}
        for lost in self.lost.values():
            stands = self.deferred.norms([lost.copy])[0] == lost.norm
            is_used = any(p is lost.copy for net in self.used for p in net.parameters())
            if len(lost.steps) >= OFTEN and stands and is_used and lost.copy.grad is None:
                lines.setdefault(lost.line, []).append(self.names.of(lost.copy))
        for line, names in lines.items():
            yield (
                f"{few(names, 4)} never move, though {line} computes an average of them and of "
                "weights that train: it is written into clones that nobody uses; write it into "
                "them, with copy_() or lerp_()"
            )
