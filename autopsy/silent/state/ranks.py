"""
Ranks: do all ranks hold the same weights?

Where gradients are averaged and weights are not the same, each rank trains another network, and no
loss shows it. After the first step and every 64th each rank leaves the norm and a few numbers of
each weight and of its gradient in the store of the process group: nobody waits for it, so that
ranks that make different steps (of a pipeline, say) cannot block each other. Weights are told that
differ though their gradients do not, or though DistributedDataParallel has wrapped their network;
else the ranks may be meant to part. Also told are weights that no wrapper holds, of an optimizer
that holds wrapped ones, too, if they began the same and no script file speaks of a collective call
or of a part of each rank's own.

A rank that skips a step parts from the others, too. So the same is left at the backward passes 2,
3, 4, 6, 8, 12, ..., if a step follows: where gradients are the same and weights are not, and the
ranks have made other numbers of steps, that is told.
"""

import json
import re
import sys
from math import inf
from pathlib import Path
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ...tensors import few, is_sharded, numbers_of
from ...watch.deferred import moved_by
from ...watch.events import ReadsFiles
from ...watch.interrupts import no_evidence

EVERY = 64  # steps
SAMPLE = 4  # numbers of a tensor
SAME, APART = 1e-5, 1e-3  # of the largest of them: rounding, and more than that
MEANT = re.compile(
    r"all_gather|all_reduce|reduce_scatter|all_to_all|broadcast|isend|irecv|\.(send|recv)\(|"
    r"distributed\.nn|collectives|shard|partial_?fc|expert|moe|per_rank|each rank|"
    r"(personal|local|private|own)\w*_?(head|layer|classifier)",
    re.I,
)
ALONE = (
    "their gradients are averaged nowhere, and DistributedDataParallel averages those of other "
    "weights of this optimizer: wrap one module that holds all of them"
)
MOVED = (
    "it averages the gradients of those parameters that a network has when it is wrapped, where "
    "they are then: was one of them exchanged, or the network moved, after that?"
)


class Ranks(ReadsFiles):
    """The weights of the first optimizer that steps."""

    def __init__(self, watch):
        super().__init__(watch)
        self.names, self.hooks = watch.names, watch.hooks
        self.wrappers = WeakSet()  # each a DistributedDataParallel
        self.alone = []  # of these: no gradient of the last backward pass is averaged
        self.begun = {}  # weight: its sample before the first step
        self.first = None  # id of an optimizer
        self.steps = self.left = 0  # left: the step of the last sample
        self.sampled = []  # the name of each weight in it, and whether it is wrapped
        self.same = ""  # when no weight differed, the last time
        self.began_same = set()  # ranks whose weights began as those of rank 0
        self.passes, self.open = 0, {}  # passes: names of the weights that were left there
        self.found = ""

    def built(self, made):
        if isinstance(made, DistributedDataParallel):
            self.wrappers.add(made)

    def before_step(self, optimizer, losses, norm, moved):
        if self.hooks.world > 1 and self.first is None and not self.begun:
            self.begun = {p: _some(p) for p in moved_by(optimizer) if not is_sharded(p)}

    def passed(self):
        self.passes += 1
        self.alone = [w for w in self.wrappers if not w.require_backward_grad_sync]

    def stepped(self, optimizer):
        super().stepped(optimizer)
        for wrapper in self.alone:  # steps of each rank are meant
            self.wrappers.discard(wrapper)
        if self.hooks.world == 1 or self.found or self.first not in (None, id(optimizer)):
            return
        with no_evidence:  # the process group may be gone
            store = dist.distributed_c10d._get_default_store()
            self._look(optimizer, store)
            if self.passes > 1 and (self.passes.bit_count() < 2 or _is_three(self.passes)):
                self._look_at_passes(optimizer, store)

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

    def _look_at_passes(self, optimizer, store):
        """Leave how many steps this rank has made, its weights and gradients; and compare what was
        left before."""
        params = [p for p in moved_by(optimizer) if not is_sharded(p)]
        sample = [self.steps, [[_some(p), _some(p.grad)] for p in params]]
        store.set(f"autopsy/passes/{self.passes}/{self.hooks.rank}", json.dumps(sample))
        if self.hooks.rank:
            return
        for at, names in [*self.open.items()]:
            for rank in range(1, self.hooks.world):
                keys = [f"autopsy/passes/{at}/{r}" for r in (0, rank)]
                if store.check(keys):
                    self._compare_steps(at, rank, names, *(json.loads(store.get(k)) for k in keys))
                    self.open.pop(at, None)
        self.open[self.passes] = [self.names.of(p) for p in params]

    def _compare_steps(self, at, rank, names, mine, others):
        (steps, tensors), (steps_there, there) = mine, others
        if steps == steps_there or len(tensors) != len(there) or self.found:
            return
        pairs = [*zip(names, tensors, there, strict=True)]
        same = [_gap(here[1], far[1])[0] <= SAME for _, here, far in pairs if any(here[1])]
        gaps = [(name, *_gap(here[0], far[0])) for name, here, far in pairs]
        differ = [f"{name} by {gap:.2g}" for name, share, gap in gaps if share > APART]
        if differ and same and all(same):
            self.found = (
                f"rank {rank} holds other weights than rank 0 after backward pass {at}, though "
                f"their gradients are the same: {few(differ, 4)}: rank 0 has made {steps} steps "
                f"by then, and rank {rank} {steps_there}: let all ranks decide together whether "
                "to make a step"
            )

    def _is_meant(self):
        """Whether the script may exchange something by itself, or mean ranks to part."""
        kinds = {type(m) for m in self.names.modules()}
        kinds = {kind.__module__ for kind in kinds if not kind.__module__.startswith("torch.")}
        files = {getattr(sys.modules.get(name), "__file__", None) for name in kinds}
        files = {*self.files, *filter(None, files)}
        sources = [Path(file).read_text(errors="ignore") for file in files]
        return any(MEANT.search(code) for code in sources)

    def _compare(self, rank, mine, others):
        if len(mine) != len(others) or self.found:
            return
        differ, by_wrapper, began_same, alone = [], False, True, []
        for (name, wrapped), here, there in zip(self.sampled, mine, others, strict=True):
            (weight, gradient, begun), (weight_there, gradient_there, begun_there) = here, there
            began_same &= bool(begun) and begun == begun_there
            share, gap = _gap(weight, weight_there)
            same = any(gradient) and _gap(gradient, gradient_there)[0] <= SAME
            if share > APART and any(gradient) and any(gradient_there):
                alone += [] if wrapped or same else [f"{name} by {gap:.2g}"]
            if share > APART and (wrapped or same):
                by_wrapper |= not same
                differ.append(f"{name} by {gap:.2g}")
        self.began_same |= {rank} if began_same else set()
        if not differ:
            self.same = self.same if alone else f"after step {self.left}"
            self._compare_unwrapped(rank, alone)
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

    def _compare_unwrapped(self, rank, alone):
        """`alone`: weights that differ, as their gradients do, while all wrapped ones are the
        same."""
        some_wrapped = any(wrapped for _, wrapped in self.sampled)
        if alone and some_wrapped and rank in self.began_same and not self._is_meant():
            self.found = (
                f"rank {rank} holds other weights than rank 0 after step {self.left}, and began "
                f"with the same: {few(alone, 4)}: {ALONE}"
            )

    def sentences(self):
        return [self.found] if self.found else []


def _is_three(number):
    """Whether it is 3, 6, 12, 24, ..."""
    return number % 3 == 0 and (number // 3).bit_count() == 1


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
