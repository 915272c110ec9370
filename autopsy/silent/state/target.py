"""
Target: is the average of a target network computed, and kept elsewhere?

A copy of a network that stands still may be one on purpose (a reference, a teacher). It is told
only where the script computes (1 - a) * copy + a * source at each of the first steps, and the
result goes into a name, or into clones of the copy, which itself never moves, and is used.
"""

from dataclasses import dataclass, field
from weakref import WeakSet

from torch import Tensor, nn

from ...frames import line_of
from ...tensors import few, is_sharded, storage_of
from ...watch.deferred import params_of
from ...watch.events import Events

EARLY = 8  # steps whose calls are looked at
OFTEN = 3  # of these
SCALES = ("mul", "__mul__", "__rmul__")
MIXES = ("lerp", "lerp_", "add_", "__iadd__", "copy_")


@dataclass
class Average:
    """An average of a copy and of a weight that trains."""

    copy: Tensor
    line: str  # that computes it
    norm: Tensor  # of the copy, when that was seen first
    times: int = 0


@dataclass
class Clone:
    """A clone of a copy, into which the script may write the average."""

    tensor: Tensor
    copy: Tensor
    version: int


@dataclass
class Reading:
    """What the calls of one step have shown."""

    copies: dict  # storage: weight that no optimizer holds
    copied: dict  # ResultRef: the weight that it was copied from, as deepcopy() does
    detached: dict = field(default_factory=dict)  # number of a call: what it detached
    scaled: dict = field(default_factory=dict)  # line: [(copy, or None for a source; factor)]
    sources: dict = field(default_factory=dict)  # shape: the line that mixes such a source in
    made: dict = field(default_factory=dict)  # number of a call: the copy that it cloned


class Target(Events):
    """Weights that no optimizer holds, and averages that are made of them."""

    def __init__(self, watch):
        self.names, self.recorder, self.deferred = watch.names, watch.recorder, watch.deferred
        self.trained = set()  # storages of weights of optimizers
        self.clones = []
        self.averages = {}  # id of a copy: Average
        self.last = 0  # call
        self.used = WeakSet()  # modules that were called since there are averages

    def called(self, module, tensors=()):
        if self.averages:
            self.used.add(module)

    evaluated = called

    def stepped(self, optimizer):
        if self.recorder.steps >= EARLY:
            return
        self.trained |= {storage_of(p) for p in params_of(optimizer)}
        weights = [p for root in list(self.names.roots) for p in root.parameters()]
        weights = [p for p in weights if not is_sharded(p)]
        copies = {storage_of(p): p for p in weights if storage_of(p) not in self.trained}
        if copies:
            memory = self.recorder.memory
            copied = {memory.get(storage_of(p)): p for p in weights}
            copied |= {self.recorder.maker(p): p for p in weights}
            self._look(Reading(copies, copied))
        self.last = self.recorder.number

    def _look(self, reading):
        """Read the calls since the last step, and note the averages among them."""
        for call in self.recorder.calls:
            if call.number > self.last and not isinstance(call.function, nn.Module):
                self._read(call, reading)
        for line, pairs in reading.scaled.items():
            shares = [share for copy, share in pairs if copy is None]
            for copy, share in pairs:
                if copy is not None and any(abs(share + other - 1) < 1e-6 for other in shares):
                    self._note(copy, line)
        for clone in self.clones:
            version = clone.tensor._version
            if version > clone.version and clone.copy.shape in reading.sources:
                self._note(clone.copy, reading.sources[clone.copy.shape])
            clone.version = version
        for t, result in self.recorder.known.items() if reading.made else ():
            if result.number in reading.made:
                self.clones.append(Clone(t, reading.made[result.number], t._version))

    def _read(self, call, reading):
        """Note what a call does with copies and with weights that train."""
        given = [t for _, t in call.given()]
        for made in call.uses():
            if made.number in reading.detached:
                given.append(reading.detached[made.number])
            if made in reading.copied:
                given.append(reading.copied[made])
        if call.name in ("detach", "part_of") and given:  # a part is p.data
            reading.detached[call.number] = given[0]
        storages = [storage_of(t) for t in given]
        copy = next((reading.copies[at] for at in storages if at in reading.copies), None)
        source = next((t for t in given if storage_of(t) in self.trained), None)
        line = line_of(call.frames)
        if copy is not None and call.name == "clone":
            reading.made[call.number] = copy
        if call.name in SCALES and (copy is None) != (source is None):
            factors = [(copy, x) for x in call.args if isinstance(x, float)]
            reading.scaled.setdefault(line, []).extend(factors)
        elif call.name in MIXES and source is not None:
            reading.sources[source.shape] = line
            if copy is not None:
                self._note(copy, line)

    def _note(self, copy, line):
        if id(copy) not in self.averages:
            norm = self.deferred.norms([copy])[0]
            self.averages[id(copy)] = Average(copy, line, norm)
        self.averages[id(copy)].times += 1

    def sentences(self):
        lost = {}
        for average in self.averages.values():
            stands = self.deferred.norms([average.copy])[0] == average.norm
            is_used = any(p is average.copy for net in self.used for p in net.parameters())
            learns = average.copy.grad is not None  # then it is no copy: stalled/ tells
            if average.times >= OFTEN and stands and is_used and not learns:
                lost.setdefault(average.line, []).append(self.names.of(average.copy))
        for line, names in lost.items():
            yield (
                f"{few(names, 4)} never move, though {line} computes an average of them and of "
                "weights that train: the result goes elsewhere; write it into them, with copy_() "
                "or lerp_()"
            )
