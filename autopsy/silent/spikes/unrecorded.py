"""
Unrecorded: what is known of a jump whose step was not recorded?

Losses and norms are read at each step, calls are not recorded at each. By which line weights were
loaded shortly before is known all the same. A weight that no optimizer trains (of a target network,
say) is read at the steps 0, 1, 2, 4, 8, ... and at a jump: where it has moved since, the loss may
have another target, and nothing is told.
"""

from dataclasses import dataclass
from itertools import pairwise

from torch.utils.weak import WeakTensorKeyDictionary

from ...frames import line_now
from ...tensors import is_sharded, storage_of
from ...watch.deferred import params_of
from .changes import LATELY

FAR = 1000.0  # times the highest of the past: told though it came back, if the loss was given more
FIRST = 3  # reads: what moves between all of these is an average, which moves at each step
NOT_RECORDED = "Its step was not recorded, so nothing explains it: --share 1 records all"


@dataclass
class Load:
    """What load_state_dict() has written into a module."""

    step: int
    line: str
    is_new: bool  # the first time that this line does it
    written: set  # storages


class Unrecorded:
    """Loads, and weights of others."""

    def __init__(self, watch):
        self.recorder, self.names, self.deferred = watch.recorder, watch.names, watch.deferred
        self.loads, self.lines = [], set()
        self.step = None  # at which the weights of others were read last
        self.reads = WeakTensorKeyDictionary()  # weight: its norms

    def loaded(self, module):
        line, written = line_now(), {storage_of(p) for p in module.parameters()}
        load = Load(self.recorder.steps, line, line not in self.lines, written)
        self.lines.add(line)
        self.loads = [*self.loads, load][-LATELY:]

    def note(self):
        """Before a step: read the weights of others."""
        step = self.recorder.steps
        if step.bit_count() < 2 and step != self.step:
            self.step, others = step, self._others()
            for p, norm in zip(others, self.deferred.norms(others), strict=True):
                self.reads.setdefault(p, []).append(norm)

    def _others(self):
        trained = {storage_of(p) for opt in self.names.optimizers for p in params_of(opt)}
        weights = {p for root in list(self.names.roots) for p in root.parameters()}
        plain = [p for p in weights if p.is_floating_point() and not is_sharded(p)]
        return [p for p in plain if storage_of(p) not in trained]

    def target_moved(self, past):
        """Whether weights of others moved since they were read, and not at each step."""
        others = self._others()
        norms = self.deferred.to_host(self.deferred.norms(others))
        for p, now in zip(others, norms, strict=True):
            reads = self.deferred.to_host(self.reads.get(p, ()))
            first = reads[:FIRST]
            always = len(first) == FIRST and all(a != b for a, b in pairwise(first))
            if not reads or (now != reads[-1] and not always):
                return True
        return False

    def sentence(self, past):
        """A sentence on what was loaded into these weights within the last steps; or ""."""
        optimizer = past.owner.optimizer()
        mine = {storage_of(p) for p in params_of(optimizer)} if optimizer else set()
        for load in reversed(self.loads):
            is_late = self.recorder.steps - load.step < LATELY
            if is_late and load.is_new and load.written & mine:
                return f"Shortly before, weights were loaded at {load.line}"
        return ""
