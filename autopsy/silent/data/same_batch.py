"""
Same batch: does next(iter(loader)) train with the first batch for ever?

Each iter() begins anew, so without shuffle=True the loop sees one batch of many. Told is a loader
of several batches in fixed order, a line that says next(iter( and runs in most steps, and a network
whose inputs were equal, as long as a batch and in tensors of their own, at each of the first steps.
A script that says "overfit" means it.
"""

from collections import Counter
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import SequentialSampler

from ...frames import call_at, code_of, line_of, script_frames_now
from ...tensors import batched, storage_of
from ...watch.events import Events

LOOKS = 16  # calls of a network in training
SHARE = 0.9  # of the steps


class SameBatch(Events):
    """What networks are given in training, and who asks a loader for it."""

    def __init__(self, watch):
        self.recorder = watch.recorder
        self.begun = Counter()  # (line, batches of the loader, their size): iterators
        self.looks = WeakKeyDictionary()  # module: (its last input, how many were equal to it)
        self.equal = set()  # the sizes of such inputs

    def iterated(self, loader):
        if isinstance(loader.sampler, SequentialSampler) and len(loader) > 1:
            frames = script_frames_now()
            source_now = call_at(*frames[0][:2]).replace(" ", "")
            code = code_of(frames)
            if "next(iter(" in source_now and "overfit" not in code.lower():
                self.begun[line_of(frames), len(loader), loader.batch_size] += 1

    def called(self, module, tensors):
        last, equal = self.looks.get(module, (None, 0))
        if not self.begun or equal is None or equal == LOOKS:
            return
        t = next((t for t in batched(tensors) if not t.requires_grad), None)
        if last is not None:
            again = t is not None and t.shape == last.shape and t.dtype == last.dtype
            again = again and storage_of(t) is not storage_of(last) and torch.equal(t, last)
            equal = equal + 1 if again else None
            self.equal |= {len(t)} if equal == LOOKS else set()
        self.looks[module] = t if equal is not None and equal < LOOKS else None, equal

    def sentences(self):
        for (line, batches, size), n in self.begun.items():
            if size in self.equal and n >= max(LOOKS, SHARE * self.recorder.steps):
                yield (
                    f"each step trains with the same batch, the first of {batches}: {line} makes a "
                    "new iterator each time: make it once, before the loop"
                )
