"""
Read as a number: weights whose output leaves torch, and that never get a gradient.

item(), tolist(), float() and NumPy give numbers, which have no graph: a loss that is made of them
does not train what made them. At two steps, which weights lead to a number that the script reads
is noted; those that never get a gradient and never move are told, with the line of the read.
"""

from collections import Counter

from ...frames import DISTRIBUTIONS, line_now, script_frames_now
from ...tensors import few, is_sharded, storage_of
from ...watch.deferred import moved_by, params_of
from ...watch.events import Events
from ...watch.names import is_target
from ..shared.graph_ends import leaves

STEPS = (2, 3)  # of which the reads are noted
MOST = 2000  # operations between weights and a number
OFTEN = 3  # times that a gradient was looked for


class ReadAsNumber(Events):
    """Weights that lead to a number that the script reads."""

    def __init__(self, watch):
        self.names, self.recorder, self.deferred = watch.names, watch.recorder, watch.deferred
        self.found = {}  # id of a weight: (weight, line, its norm)
        self.detached = {}  # storage: weights that lead to what was detached
        self.looks = Counter()  # id: steps of its optimizer in which it had no gradient

    def read(self, t, name):
        """The script reads a number, or detaches a tensor to read it."""
        if self.recorder.steps not in STEPS or self.recorder.hooks.world > 1:
            return  # fully_shard() computes with parameters of its own, and frees them
        if any(file.startswith(DISTRIBUTIONS) for file, *_ in script_frames_now()):
            return  # they check what they are given
        weights = leaves([t], MOST) if t.grad_fn else self.detached.get(storage_of(t), ())
        if name == "detach":
            self.detached[storage_of(t)] = weights
        else:
            for p in weights:
                if p.grad is None and id(p) not in self.found and not is_sharded(p):
                    self.found[id(p)] = p, line_now(), self.deferred.norms([p])[0]

    def stepped(self, optimizer):
        """Forget those that have a gradient."""
        self.detached = {}
        mine = {id(p) for p in params_of(optimizer)} if self.found else ()
        for key, (p, *_) in [*self.found.items()]:
            if p.grad is not None:
                del self.found[key]
            elif key in mine and moved_by(optimizer):  # else something else is wrong
                self.looks[key] += 1

    def sentences(self):
        still = {}
        for key, (p, line, norm) in self.found.items():
            if self.looks[key] >= OFTEN and self.deferred.norms([p])[0] == norm:
                name = self.names.of(p)
                if not is_target(name):
                    still.setdefault(line, []).append(name)
        for line, names in still.items():
            yield (
                f"no gradient has reached {few(names, 4)}, though an optimizer holds them: what "
                f"they lead to is read as a number at {line}, and numbers have no graph: keep the "
                "tensor"
            )
