"""
Step: what one step needs to be run again, and how that is put back.

Random states, buffers, and what modules carry outside of buffers.
"""

import random
import sys
from collections.abc import Iterable, Mapping
from contextlib import contextmanager, suppress
from copy import copy
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .tensors import device_of

INTERNAL = vars(nn.Module()).keys() - {"training"}  # attributes that are torch's
KEPT = (list, dict)  # attributes that are written in place
SMALL = 1 << 18  # numbers of a tensor that is copied at each call


class StepRecord:
    """What is needed to run one step again, apart from the weights (a rejected step kept those).

    Create it before the step's first forward; keep() every micro-batch with the labels as they
    came, and the samples' indices in the data set where they are known. Costs a copy of the
    buffers and the RNG states; no sync.
    """

    def __init__(self, step: int, net: nn.Module, *, rank: int = 0):
        self.step, self.rank, self.net = step, rank, net
        self.device = device_of(list(net.parameters()))
        self.buffers = copied_buffers(net)
        self.carried = carried_by(net)
        self.rng = rng_states(self.device)
        self.batches = []
        self.indices = []
        self.named = []  # tensors that are no part of the batch

    def keep(self, *batch: Any, indices: Iterable[int] | None = None) -> None:
        self.batches.append(batch)
        self.indices.append([] if indices is None else [int(i) for i in indices])

    @torch.no_grad()
    def restore(self) -> None:
        """RNG, buffers and attributes as they were before the step; no gradients."""
        set_rng_states(self.rng, self.device)
        put_back(self.net, self.buffers)
        carry_back(self.carried)
        self.net.zero_grad(set_to_none=True)


@contextmanager
def unchanged(net, tensors):
    """At the end all is as it was: random numbers, the network's buffers and attributes, and the
    gradients of these tensors."""
    now = StepRecord(0, net)
    grads = [(t, t.grad) for t in tensors]
    buffers = tuple(b for b in net.buffers() if not b.is_inference())
    # The script's own graph has saved them: its backward may be still to come.
    with torch.autograd._unsafe_preserve_version_counter(buffers):
        try:
            yield
        finally:
            now.restore()
            for t, grad in grads:
                t.grad = grad


def copied_buffers(net):
    """{name: a copy}, without those that some versions of torch cannot copy (float4)."""
    copies = {}
    for name, b in net.named_buffers():
        if has_numbers(b):
            with suppress(NotImplementedError):
                copies[name] = b.detach().clone()
    return copies


def has_numbers(b):
    """Whether they can be copied and put back."""
    if is_lazy(b) or b.is_meta or b.is_inference() or b._is_zerotensor():
        return False
    # of an expanded one, several numbers are one: torch writes into none of them
    return b.layout is not torch.strided or b.is_nested or 0 not in b.stride()


@torch.no_grad()
def put_back(net, copies):
    for name, b in net.named_buffers():
        if name in copies:
            b.copy_(copies[name])


def attributes_of(module):
    """What a module carries without a buffer: hidden states, counters, short lists."""
    return {
        name: value
        for name, value in vars(module).items()
        if name not in INTERNAL and (not isinstance(value, tuple | list | dict) or len(value) < 99)
    }


def carried_by(net):
    """Of each module: its attributes, and these as they are now: what lists and dicts hold, the
    states of generators, and the numbers of small tensors, if something has written into them."""
    return [
        (m, {name: (value, _as_it_is(value)) for name, value in attributes_of(m).items()})
        for m in net.modules()
    ]


def _as_it_is(value):
    if type(value) in KEPT:
        return copy(value)
    if type(value) is torch.Generator:
        return value.get_state()
    plain = type(value) is torch.Tensor and not (value.requires_grad or value.is_inference())
    if plain and value._version and value.numel() <= SMALL:
        return value.clone()
    return value


def carry_back(carried):
    for module, before in carried:
        for name, (value, held) in before.items():
            vars(module)[name] = value
            if type(value) in KEPT:
                carry(module, name, held)
            elif type(value) is torch.Generator:
                value.set_state(held)
            elif held is not value:
                with torch.autograd._unsafe_preserve_version_counter(value):
                    value.copy_(held)


def carry(module, name, value):
    """The module carries this from now on; a list or dict stays the same object, filled again."""
    own = vars(module)[name]
    if type(own) in KEPT:
        own.clear()
        own.__init__(value)
    else:
        vars(module)[name] = value


def rng_states(device: torch.device | str) -> dict[str, Any]:
    """Of Python, torch's CPU and `device`; of NumPy where it is loaded (in plain types)."""
    states = {"python": random.getstate(), "cpu": torch.get_rng_state(), "cuda": None}
    if torch.device(device).type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random.get_state(legacy=False)
        key = {"key": numpy["state"]["key"].tolist(), "pos": int(numpy["state"]["pos"])}
        states["numpy"] = numpy | {"state": key}
    return states


def set_rng_states(states: Mapping[str, Any], device: torch.device | str) -> None:
    random.setstate(states["python"])
    torch.set_rng_state(states["cpu"])
    if states["cuda"] is not None and torch.device(device).type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(states["numpy"])
