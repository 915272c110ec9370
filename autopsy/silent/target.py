"""
Target: is the average of a target network computed, and kept elsewhere?

A copy of a network that stands still may be one on purpose (a reference, a teacher). It is told
only where the script computes (1 - a) * copy + a * source at each of the first steps, and the
result goes into a name, or into clones of the copy, which itself never moves.
"""

from torch import nn

from ..frames import line_of
from ..tensors import few, is_sharded, storage_of
from ..watch.deferred import params_of
from ..watch.events import Events

EARLY = 8  # steps whose calls are looked at
OFTEN = 3  # of these
SCALES = ("mul", "__mul__", "__rmul__")
MIXES = ("lerp", "lerp_", "add_", "__iadd__", "copy_")


class Target(Events):
    """Weights that no optimizer holds, and averages that are made of them."""

    def __init__(self, watch):
        self.names, self.recorder, self.deferred = watch.names, watch.recorder, watch.deferred
        self.trained = set()  # storages of weights of optimizers
        self.clones = []  # [clone, its version, weight]
        self.averages = {}  # id of a weight: [weight, line, norm, how often]
        self.last = 0  # call

    def stepped(self, optimizer):
        if self.recorder.steps < EARLY:
            self.trained |= {storage_of(p) for p in params_of(optimizer)}
            weights = [p for root in list(self.names.roots) for p in root.parameters()]
            weights = [p for p in weights if not is_sharded(p)]
            copies = {storage_of(p): p for p in weights if storage_of(p) not in self.trained}
            calls = [c for c in self.recorder.calls if c.number > self.last and copies]
            memory = self.recorder.memory
            copied = {memory.get(storage_of(p)): p for p in weights}  # what deepcopy() made
            copied |= {self.recorder.maker(p): p for p in weights}
            self._look([c for c in calls if not isinstance(c.function, nn.Module)], copies, copied)
            self.last = self.recorder.number

    def _look(self, calls, copies, copied):
        scaled, sources, made, detached = {}, {}, {}, {}
        for call in calls:
            given = [t for _, t in call.given()]
            given += [detached[ref.number] for ref in call.uses() if ref.number in detached]
            given += [copied[ref] for ref in call.uses() if ref in copied]
            if call.name in ("detach", "_part") and given:  # a part is p.data
                detached[call.number] = given[0]
            p = next((copies[at] for t in given if (at := storage_of(t)) in copies), None)
            line = line_of(call.frames)
            if p is not None and call.name == "clone":
                made[call.number] = p
            source = next((t for t in given if storage_of(t) in self.trained), None)
            if call.name in SCALES and (p is None) != (source is None):
                pairs = [(p, x) for x in call.args if isinstance(x, float)]
                scaled.setdefault(line, []).extend(pairs)
            elif call.name in MIXES and source is not None:
                sources[source.shape] = line
                if p is not None:
                    self._note(p, line)
        for line, pairs in scaled.items():
            shares = [share for p, share in pairs if p is None]
            for p, share in pairs:
                if p is not None and any(abs(share + other - 1) < 1e-6 for other in shares):
                    self._note(p, line)
        for clone in self.clones:
            t, version, p = clone
            if t._version > version and p.shape in sources:
                self._note(p, sources[p.shape])
            clone[1] = t._version
        for t, result in self.recorder.known.items() if made else ():
            if result.number in made:
                self.clones.append([t, t._version, made[result.number]])

    def _note(self, p, line):
        average = self.averages.setdefault(id(p), [p, line, self.deferred.norms([p])[0], 0])
        average[-1] += 1

    def sentences(self):
        lost = {}
        for p, line, norm, n in self.averages.values():
            if n >= OFTEN and self.deferred.norms([p])[0] == norm:
                lost.setdefault(line, []).append(self.names.of(p))
        for line, names in lost.items():
            yield (
                f"{few(names, 4)} never move, though {line} computes an average of them and of "
                "weights that train: the result goes elsewhere; write it into them, with copy_() "
                "or lerp_()"
            )
