"""
Held: does each worker of each pass begin with the same copy of a generator that a data set holds?

`self.rng = np.random.default_rng(0)` in a data set, or in its transform: a worker is a copy of the
script, and so is its generator. What a worker draws moves that copy alone, and the workers of the
next pass begin where those of this one began. Read are the states at the start of each worker and
after its first two batches. Told are workers that begin alike and are alike again after a batch of
other samples, while the generator moves with each batch. No word where a worker_init_fn has moved
it, or a method of what holds it may seed it.
"""

import random
import struct
import sys
from collections import defaultdict
from contextlib import ExitStack
from functools import partial, partialmethod
from mmap import mmap
from types import FunctionType, MethodType, ModuleType
from unittest import mock

import torch
from torch.utils.data._utils import fetch

from ....tensors import ATOMS
from ....watch.interrupts import no_evidence

DEEP = 7  # levels below the data set
SHORT = 32  # items of a list that is looked at: transforms, not samples
MOST = 8  # generators
OBJECTS = 500
BATCHES = 2
ROW = struct.Struct("<3Q")  # of a generator in a worker: at its start, after each of the batches
SEEDS = {"seed", "manual_seed", "set_state", "setstate", "state"}  # names in a method
CLOSED = (*ATOMS, bytes, type, ModuleType, torch.Tensor)


def _is_generator(x):
    """Whether it is one of Python, of NumPy, or of torch on the CPU."""
    if isinstance(x, torch.Generator):
        return x.device.type == "cpu"
    numpy = sys.modules.get("numpy.random")
    kinds = (numpy.Generator, numpy.RandomState) if numpy else ()
    return isinstance(x, (random.Random, *kinds)) and not isinstance(x, random.SystemRandom)


def _state(x):
    """A number, the same in all workers."""
    if isinstance(x, torch.Generator):
        state = x.get_state().numpy().tobytes()
    elif isinstance(x, random.Random):
        state = x.getstate()
    elif hasattr(x, "bit_generator"):
        state = str(x.bit_generator.state)
    else:
        _, keys, *rest = x.get_state()
        state = keys.tobytes(), *rest
    return hash(state) % 2**64


def _inner(x):
    """(its name, what x holds): items of a short list, variables of an object or a closure."""
    if isinstance(x, list | tuple | dict):
        items = [*(x.items() if isinstance(x, dict) else enumerate(x))] if len(x) <= SHORT else []
        return [(f"[{key!r}]", value) for key, value in items]
    if isinstance(x, partial):
        return [("", x.func), ("", x.args), ("", x.keywords)]
    if isinstance(x, MethodType):
        return [("", x.__self__)]
    if isinstance(x, FunctionType):
        names, cells = x.__code__.co_freevars, x.__closure__ or ()
        return [(f".{n}", c.cell_contents) for n, c in zip(names, cells, strict=True)]
    return [(f".{name}", value) for name, value in getattr(x, "__dict__", {}).items()]


def _may_seed(x):
    """Whether its function, or a method of its class, may give a generator another state."""
    found = [x] if isinstance(x, FunctionType) else [
        function for kind in type(x).__mro__ for name, function in vars(kind).items()
        if isinstance(function, FunctionType) and name != "__init__"
    ]  # fmt: skip
    return any(SEEDS.intersection(function.__code__.co_names) for function in found)


def held_by(data):
    """(its name, generator) of each that nothing between it and the data set may seed."""
    found, seen, level = [], {id(data)}, [(type(data).__name__, data)]
    for _ in range(DEEP):
        level, deeper = [(name, x) for name, x in level if not _may_seed(x)], []
        for path, x in level:
            for name, value in _inner(x):
                if isinstance(value, CLOSED) or id(value) in seen or len(seen) > OBJECTS:
                    continue
                seen.add(id(value))
                (found if _is_generator(value) else deeper).append((path + name, value))
        level = deeper
    return found[:MOST]


class Held:
    """The generators that the data set of a loader holds, and what its workers note of them."""

    def __init__(self, loader):
        self.found = []
        with no_evidence:
            self.found = [] if loader.persistent_workers else held_by(loader.dataset)
        self.workers = loader.num_workers
        self.size = ROW.size * len(self.found)  # of a worker
        self.memory = mmap(-1, self.size * self.workers or 1)

    def states(self):
        return [_state(generator) for _, generator in self.found]

    def begins(self, worker, before):
        """In the worker. `before`: the states before its worker_init_fn."""
        noted, patches = [self.states()], ExitStack()

        def after_a_batch():
            noted.append(self.states())
            if len(noted) > BATCHES:
                patches.close()
                for k, states in enumerate(zip(*noted, strict=True)):
                    ROW.pack_into(self.memory, worker * self.size + k * ROW.size, *states)

        def fetched(original, fetcher, indices):
            out = original(fetcher, indices)
            with no_evidence:
                after_a_batch()
            return out

        if self.found and noted == [before]:
            kind = fetch._MapDatasetFetcher
            around = partialmethod(partial(fetched, kind.fetch))
            patches.enter_context(mock.patch.object(kind, "fetch", around))

    def rows(self):
        """[(name, worker, its states)], if all workers have made two batches."""
        names = [name for name, _ in self.found]
        places = [(name, worker) for worker in range(self.workers) for name in names]
        states = ROW.iter_unpack(self.memory[:] if names else b"")
        rows = [(*place, row) for place, row in zip(places, states, strict=True)]
        return rows if all(any(row) for *_, row in rows) else []


def repeated(passes, shuffled):
    """The name of a generator of which the workers of these passes draw the same numbers for other
    samples, or "". A pass: what was held in it."""
    several = defaultdict(list)
    for k, held in enumerate(passes):
        for name, worker, states in held.rows():
            several[name].append((k, worker, states))
    return next((name for name, rows in several.items() if _repeats(rows, shuffled)), "")


def _repeats(rows, shuffled):
    """rows: of one generator, (pass, worker, its states)."""
    passes, workers = ({row[k] for row in rows} for k in (0, 1))
    starts = {start for *_, (start, *_) in rows}
    moves = all(len({*states}) == len(states) for *_, states in rows)
    if len(passes) < 2 or len(starts) > 1 or not moves:
        return False
    ends = [end for _, end in {(worker, states[1]) for _, worker, states in rows}]
    if len(workers) > 1:
        return len({*ends}) < len(ends)  # of workers, whose samples differ
    return shuffled and len(ends) == 1
