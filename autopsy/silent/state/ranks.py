"""
Ranks: do all ranks hold the same weights?

Where gradients are averaged and weights are not the same, each rank trains another network, and no
loss shows it. After the first step and every 64th each rank leaves a few numbers of each weight and
of its gradient in the store of the process group: nobody waits for it, so that ranks that make
different steps (of a pipeline, say) cannot block each other. Weights are told that differ though
their gradients do not; where gradients differ, too, the ranks may be meant to part.
"""

import json
from contextlib import suppress

import torch.distributed as dist

from ...tensors import few, is_sharded, numbers_of
from ...watch.deferred import moved_by
from ...watch.events import Events

EVERY = 64  # steps
SAMPLE = 4  # numbers of a tensor
SAME, APART = 1e-5, 1e-3  # of the largest of them: rounding, and more than that


class Ranks(Events):
    """The weights of the first optimizer that steps."""

    def __init__(self, watch):
        self.names, self.hooks = watch.names, watch.hooks
        self.first = None  # id of an optimizer
        self.steps = self.left = 0  # left: the step of the last sample
        self.names_of = []
        self.found = ""

    def stepped(self, optimizer):
        if self.hooks.world == 1 or self.found or self.first not in (None, id(optimizer)):
            return
        with suppress(Exception):  # the process group may be gone
            self._look(optimizer, dist.distributed_c10d._get_default_store())

    def _look(self, optimizer, store):
        self.first, step = id(optimizer), self.steps
        self.steps += 1
        if step % EVERY == 0:
            params = [p for p in moved_by(optimizer) if not is_sharded(p)]
            self.left, self.names_of = step, [self.names.of(p) for p in params]
            sample = [[_some(p), _some(p.grad)] for p in params]
            store.set(f"autopsy/weights/{step}/{self.hooks.rank}", json.dumps(sample))
        elif (step - self.left).bit_count() == 1 and self.hooks.rank == 0:
            for rank in range(1, self.hooks.world):
                keys = [f"autopsy/weights/{self.left}/{r}" for r in (0, rank)]
                if store.check(keys):
                    self._compare(rank, *(json.loads(store.get(key)) for key in keys))

    def _compare(self, rank, mine, others):
        if len(mine) != len(others) or self.found:
            return
        pairs = zip(self.names_of, mine, others, strict=True)
        differ = [
            (name, gap)
            for name, (weight, gradient), (weight_there, gradient_there) in pairs
            if (gap := _gap(weight, weight_there)) > APART * max(map(abs, weight))
            if _gap(gradient, gradient_there) <= SAME * max(map(abs, gradient)) > 0
        ]
        if differ:
            named = few([f"{name} by {gap:.2g}" for name, gap in differ], 4)
            self.found = (
                f"rank {rank} holds other weights than rank 0 after step {self.left}, though their "
                f"gradients are the same: {named}: broadcast the weights before the first step "
                "(DistributedDataParallel does so where it wraps the network)"
            )

    def sentences(self):
        return [self.found] if self.found else []


def _some(t):
    """A few of its numbers."""
    flat = numbers_of(t.detach()).reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE].double().tolist()


def _gap(a, b):
    """The largest difference; inf for other shapes."""
    gaps = [abs(x - y) for x, y in zip(a, b, strict=False)]
    return max(gaps, default=0.0) if len(a) == len(b) else float("inf")
