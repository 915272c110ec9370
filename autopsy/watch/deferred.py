"""
Deferred: numbers that wait on the device, and are read together.

A norm reads a tensor once, and is NaN or inf if one of its numbers is. It stays on the device until
the next transfer, which the optimizer step makes anyway: the watch adds no sync of its own. A
tensor that cannot be read (memory of another library, say) counts as 0; the end names it.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ..frames import first_line_of
from ..tensors import HALF, LIMIT, USUAL, numbers_of, storage_of
from .interrupts import came_from_another_thread


class DeferredChecks:
    """Numbers that wait to be read, each with the check to call for a bad one."""

    def __init__(self):
        self._noted = []  # (a number on the device, what to do with it if it is bad)
        self._results = []  # the same of what forwards have made
        self._written = {}  # storage: (weight, what the script wrote into it, check)
        self.clipped = []  # since the last step: (gradients of these, their norm before)
        self.unread = {}  # kind of tensor: why it could not be read
        self._read = 0  # how many norms

    def __len__(self):
        return len(self._noted) + len(self._results)

    def note(self, tensors, check):
        """Read their norms at the next transfer; check(tensor, norm) is called for a bad one."""
        self._noted += self.entries(tensors, check)

    def entries(self, tensors, check, norms=()):
        """`norms`: of all these tensors, if somebody has read them."""
        if norms and tensors:
            return [(norm, partial(check, t)) for t, norm in zip(tensors, norms, strict=True)]
        real = [t for t in tensors if t.is_floating_point() or t.is_complex()]
        norms = self.norms(real)
        return [(norm, partial(check, t)) for t, norm in zip(real, norms, strict=True)]

    def results(self, entries):
        """The same for results of a forward pass."""
        self._results += entries

    def wrote(self, p, write, check):
        """The script writes into this weight, a view of it, or its data. One transfer reads all
        that were written."""
        self._written.setdefault(storage_of(p), (p, [], check))[1].append(write)

    def _entries_of_written(self):
        if not self._written:
            return []
        # a weight whose data was exchanged is noted under the new one
        written = [entry for at, entry in self._written.items() if storage_of(entry[0]) is at]
        self._written = {}
        norms = self.norms(p for p, *_ in written)
        return [
            (norm, partial(check, p, writes, p))
            for (p, writes, check), norm in zip(written, norms, strict=True)
        ]

    def transfer(self, more=(), losses=()):
        """Read all in one transfer, and check what is bad. It returns the values of `more`.

        The order of the checks: what was noted, as it came (an optimizer's weights and moments
        first, because its step came first); then weights that the script has written by hand; then
        what forwards have made, and `losses` (entries), because a bad weight explains these, never
        the other way round."""
        in_order = [*self._noted, *self._entries_of_written(), *self._results, *losses]
        self._noted, self._results = [], []
        values = self.to_host([*(value for value, _ in in_order), *more])
        for (_, check), value in zip(in_order, values, strict=False):
            if not value <= LIMIT:
                check(value)
        return values[len(in_order) :]

    def norms(self, tensors):
        """Their 2-norms, 0-dim, with fp32 accumulators: one read, no sync."""
        norms = self._one_by_one(_norms, tensors, None)
        self._read += sum(norm is not None for norm in norms)
        return [torch.zeros((), device="cpu") if norm is None else norm for norm in norms]

    def largest(self, tensors, of=Tensor.float):
        """The largest number of each, or of its magnitudes, 0-dim on the device; or None."""
        return self._one_by_one(partial(_largest, of), tensors, None)

    def to_host(self, values):
        """0-dim tensors as Python floats, in one transfer."""
        return self._one_by_one(_to_host, values, 0.0)

    @property
    def blind(self):
        """Why nothing at all could be read, or ""."""
        return "" if self._read else "".join([*self.unread.values()][:1])

    def _one_by_one(self, read, tensors, instead):
        """read(tensors), and where that fails, each alone: an error costs its tensor only."""
        tensors = list(tensors)
        try:
            return read(tensors)
        except Exception as error:
            if came_from_another_thread(error):
                raise
            if len(tensors) == 1:
                kind = f"{type(tensors[0]).__name__}, {tensors[0].dtype}"
                self.unread[kind] = first_line_of(error)
                return [instead]
        return [value for t in tensors for value in self._one_by_one(read, [t], instead)]


def _norms(tensors):
    if torch.is_grad_enabled():  # not so within a hook
        with torch.no_grad():
            return _norms(tensors)
    flat = [*map(numbers_of, tensors)]
    types = {t.dtype for t in flat}
    if not types <= USUAL:
        flat = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in flat]
        flat = [t.float() if t.itemsize == 1 else t for t in flat]  # fp8: no norm is made for it
    if len(flat) == 1 and not flat[0].dim():  # a loss
        return [flat[0].abs()]
    wide = None if types.isdisjoint(HALF) else torch.float32  # None is faster
    return list(torch._foreach_norm(flat, 2, dtype=wide)) if flat else []


def _to_host(values):
    device = next((v.device for v in values if not v.is_cpu), None)
    if device is None:  # faster than to stack them
        return [float(torch._C.TensorBase.item(v)) for v in values]
    flat = [v if v.device == device and not v.dim() else v.reshape(()).to(device) for v in values]
    return torch.stack(flat).tolist()


def over_ranks(norms):
    """The norm of all shards of all ranks. A sum keeps NaN and inf."""
    total = torch.stack(norms).square().sum()
    dist.all_reduce(total)
    return total.sqrt()


def _largest(of, tensors):
    flat = [numbers_of(t.detach()) for t in tensors]
    flat = [t.float() if t.numel() and t.is_floating_point() else None for t in flat]
    return [None if t is None else of(t).amax() for t in flat]


def params_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def moved_by(optimizer):
    return [p for p in params_of(optimizer) if p.grad is not None]


def gradients_of(references):
    """The gradients of these parameters that are alive: another tensor, or another version, is
    another gradient."""
    grads = [p.grad for held in references if (p := held()) is not None]
    return tuple(g if g is None else (id(g), g._version) for g in grads)


def held_by(optimizer):
    """(group, parameter, "", parameter) of every parameter, and (group, parameter, key, moment)."""
    for k, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            yield k, p, "", p
            for key, t in optimizer.state.get(p, {}).items():
                if isinstance(t, Tensor) and t.dim():
                    yield k, p, key, t
