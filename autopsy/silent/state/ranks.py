"""
Ranks: do all ranks hold the same weights?

Where gradients are averaged and weights are not the same, each rank trains another network, and no
loss shows it. After the first step and every 64th each rank leaves the norm and a few numbers of
each weight and of its gradient in the store of the process group: nobody waits for it, so that
ranks that make different steps (of a pipeline, say) cannot block each other. Weights are told that
differ though their gradients do not, or though DistributedDataParallel has wrapped their network;
else the ranks may be meant to part.
"""

import json
from math import inf
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ...tensors import few, is_sharded, numbers_of
from ...watch.deferred import moved_by
from ...watch.events import Events
from ...watch.interrupts import no_evidence

EVERY = 64  # steps
SAMPLE = 4  # numbers of a tensor
SAME, APART = 1e-5, 1e-3  # of the largest of them: rounding, and more than that
MOVED = (
    "it averages the gradients of those parameters that a network has when it is wrapped, where "
    "they are then: was one of them exchanged, or the network moved, after that?"
)


class Ranks(Events):
    """The weights of the first optimizer that steps."""

    def __init__(self, watch):
        self.names, self.hooks = watch.names, watch.hooks
        self.wrappers = WeakSet()  # each a DistributedDataParallel
        self.alone = []  # of these: no gradient of the last backward pass is averaged
        self.begun = {}  # weight: its sample before the first step
        self.first = None  # id of an optimizer
        self.steps = self.left = 0  # left: the step of the last sample
        self.sampled = []  # the name of each weight in it, and whether it is wrapped
        self.same = ""  # when no weight differed, the last time
        self.found = ""

    def built(self, made):
        if isinstance(made, DistributedDataParallel):
            self.wrappers.add(made)

    def before_step(self, optimizer, losses, norm, moved):
        if self.hooks.world > 1 and self.first is None and not self.begun:
            self.begun = {p: _some(p) for p in moved_by(optimizer) if not is_sharded(p)}

    def passed(self):
        self.alone = [w for w in self.wrappers if not w.require_backward_grad_sync]

    def stepped(self, optimizer):
        for wrapper in self.alone:  # steps of each rank are meant
            self.wrappers.discard(wrapper)
        if self.hooks.world == 1 or self.found or self.first not in (None, id(optimizer)):
            return
        with no_evidence:  # the process group may be gone
            self._look(optimizer, dist.distributed_c10d._get_default_store())

    def _look(self, optimizer, store):
        self.first, step = id(optimizer), self.steps
        self.steps += 1
        if step % EVERY == 0:
            params = [p for p in moved_by(optimizer) if not is_sharded(p)]
            wrapped = {p for w in self.wrappers if _averages_all(w) for p in w.parameters()}
            self.left = step
            self.sampled = [(self.names.of(p), p in wrapped) for p in params]
            sample = [[_some(p), _some(p.grad), self.begun.get(p)] for p in params]
            self.begun = {}
            store.set(f"autopsy/weights/{step}/{self.hooks.rank}", json.dumps(sample))
        elif (step - self.left).bit_count() == 1 and self.hooks.rank == 0:
            for rank in range(1, self.hooks.world):
                keys = [f"autopsy/weights/{self.left}/{r}" for r in (0, rank)]
                if store.check(keys):
                    self._compare(rank, *(json.loads(store.get(key)) for key in keys))

    def _compare(self, rank, mine, others):
        if len(mine) != len(others) or self.found:
            return
        differ, by_wrapper, began_same = [], False, True
        for (name, wrapped), here, there in zip(self.sampled, mine, others, strict=True):
            (weight, gradient, begun), (weight_there, gradient_there, begun_there) = here, there
            began_same &= bool(begun) and begun == begun_there
            share, gap = _gap(weight, weight_there)
            same = any(gradient) and _gap(gradient, gradient_there)[0] <= SAME
            if share > APART and (wrapped or same):
                by_wrapper |= not same
                differ.append(f"{name} by {gap:.2g}")
        if not differ:
            self.same = f"after step {self.left}"
            return
        if began_same:
            self.same = "before the first step"
        though = "their gradients are the same"
        advice = "broadcast the weights before the first step (DistributedDataParallel does so)"
        if by_wrapper:
            though, advice = "DistributedDataParallel has wrapped their network", MOVED
        elif self.same:
            advice = f"they were the same {self.same}: what has moved them since (another rate)?"
        self.found = (
            f"rank {rank} holds other weights than rank 0 after step {self.left}, though {though}: "
            f"{few(differ, 4)}: {advice}"
        )

    def sentences(self):
        return [self.found] if self.found else []


def _averages_all(wrapper):
    """Whether it averages all gradients, of all ranks, and nothing but that is done with them."""
    hooked = getattr(wrapper, "_comm_hooks", True) or wrapper.parameters_to_ignore
    return not hooked and wrapper.process_group.size() == dist.get_world_size()


def _some(t):
    """Its norm and a few of its numbers."""
    flat = numbers_of(t.detach()).reshape(-1)
    some = flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE].double()
    norm = torch.linalg.vector_norm(flat, dtype=torch.float32)
    return [float(norm), *some.tolist()]


def _gap(here, there):
    """(the largest difference as a share of the norm or of the largest number, itself)"""
    if len(here) != len(there):
        return inf, inf
    norm, *numbers = (abs(a - b) for a, b in zip(here, there, strict=True))
    largest = max(map(abs, here[1:]), default=0.0)
    share = max(norm / (here[0] or 1), max(numbers, default=0.0) / (largest or 1))
    return share, max([norm, *numbers])
