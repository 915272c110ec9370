"""
Workers: with which random numbers do the workers of a DataLoader begin, and do they draw any?

A report takes the place of worker_init_fn while an iterator is made. In the worker it calls the
script's own, notes the state of each generator, and once more after the first batch, in memory that
both processes share. A worker that seeds its generators for that batch reports no draw.
"""

import multiprocessing
import random
import struct
import sys
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from itertools import takewhile
from mmap import mmap
from unittest import mock

import torch
from torch.utils.data._utils import fetch

from ....watch.interrupts import no_evidence
from ....watch.loop import seeders

KINDS = ("torch", "numpy", "random")
ROW = struct.Struct("<7Q")  # of a worker: its seed, the states at its start, those after a batch
FETCHERS = fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher


def states():
    """A number for the state of each generator; 0 for what is not in use."""
    found = {"torch": torch.get_rng_state().numpy().tobytes(), "numpy": b""}
    if numpy := sys.modules.get("numpy"):
        _, keys, *rest = numpy.random.get_state()
        found["numpy"] = keys.tobytes() + str(rest).encode()
    found["random"] = str(random.getstate()).encode()
    return {kind: _number(found[kind]) for kind in KINDS}


def _number(text):
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") if text else 0


class Report:
    """Stands for the worker_init_fn of a loader."""

    def __init__(self, loader):
        self.function = loader.worker_init_fn
        self.memory = mmap(-1, ROW.size * loader.num_workers)  # a worker inherits it

    def __call__(self, worker):
        seed = torch.initial_seed()
        out = self.function(worker) if self.function else None
        with no_evidence:
            self._begins(worker, seed)
        return out

    def _begins(self, worker, seed):
        """In the worker. `seed`: the one that the loader has given it, another in each pass."""
        first, seeded, patches = states(), set(), ExitStack()

        def after_a_batch():
            then = states()
            drawn = [0 if kind in seeded else then[kind] for kind in KINDS]
            numbers = [first[kind] for kind in KINDS]
            ROW.pack_into(self.memory, worker * ROW.size, seed % 2**64, *numbers, *drawn)
            patches.close()

        def watched(original):
            def fetched(fetcher, indices):
                out = original(fetcher, indices)
                with no_evidence:
                    after_a_batch()
                return out

            return fetched

        def noted(kind, original):
            def sets(*args, **kwargs):
                seeded.add(kind)
                return original(*args, **kwargs)

            return sets

        for kind in FETCHERS:
            patches.enter_context(mock.patch.object(kind, "fetch", watched(kind.fetch)))
        for kind, owner, name in seeders():
            function = noted(kind, getattr(owner, name))
            patches.enter_context(mock.patch.object(owner, name, function))

    def seeds(self):
        """Of the workers that have made a batch."""
        return [seed for seed, *_ in self._rows()]

    def numbers(self):
        """{(worker, kind): (the state at its start, has it drawn numbers?)}"""
        found = {}
        for worker, (_, *row) in enumerate(self._rows()):
            for kind, first, then in zip(KINDS, row[:3], row[3:], strict=True):
                found[worker, kind] = first, then not in (0, first)
        return found

    def _rows(self):
        """The first worker makes the first batch, the second the next one."""
        rows = ROW.iter_unpack(self.memory[:])
        return list(takewhile(any, rows))


@contextmanager
def in_place(loader, report):
    """While the iterator is made."""
    with no_evidence:
        loader.worker_init_fn = report
    try:
        yield
    finally:
        with no_evidence:
            loader.worker_init_fn = report.function


def are_forks(loader):
    """Whether its workers are forks of this process: else they inherit nothing."""
    context = loader.multiprocessing_context
    if context is not None:
        return context.get_start_method() == "fork"
    method = multiprocessing.get_start_method(allow_none=True)
    return (method or multiprocessing.get_all_start_methods()[0]) == "fork"
