"""
Forward: the forward passes of a step once more, with other rows or other weights: what is the loss?

It repeats only what leads from the weights to a loss; what the script computed without gradients (a
rollout, a target) it computes once, as it was. It restores buffers, gradients, random numbers and
what modules carry.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ..frames import line_of
from ..step import unchanged
from ..tensors import batch_size_of, batched, flat_tensors, mapped
from .calls import BACKWARD, SLOPES, ResultRef, add_hook, buffers_back
from .replay import in_no_module, net_of

SUMS = ("add", "radd", "iadd")
SCALES = ("mul", "rmul", "div", "truediv")


class Forward:
    """Repeats the recorded forward passes, with some rows of the batch in place of others, and
    returns the sum of the losses, or (`slope`) the norm of the gradient. Use it inside of
    `with`."""

    def __init__(self, recorder, slope=False):
        self.passes, self.slope = 0, slope
        calls = recorder.needed(()) if recorder.is_complete else []
        passes = [call for call in calls if call.function is BACKWARD]
        roots = [call for call in passes if call.number > recorder.latest]
        self.losses = [made for call in roots for made in call.uses()]
        numbers = {made.number for made in self.losses}

        forward = []  # up to the last loss
        for k, call in enumerate(calls):
            if call.number in numbers:
                forward = calls[: k + 1]
        self.calls = [call for call in forward if call.function not in SLOPES]
        self.as_it_was = {}  # what they made
        self.results = {}  # the losses of the last pass with all rows
        self.rows = {}  # tensor of the batch: its dimension of rows

        # what may be moved, and is put back
        net = net_of(self.calls)
        self.params = [p for p in net.parameters() if p.requires_grad]
        self.params += in_no_module(self.calls, net)
        self.unchanged = unchanged(net, [*net.parameters()])

        hooked = [*net.modules(), *self.params] if slope else []
        has_hooks = any(x._backward_hooks for x in hooked)
        if has_hooks or any(call.function is add_hook for call in self.calls):
            self.calls = []  # the script's own functions must not run once more

    def __enter__(self):
        self.unchanged.__enter__()
        return self

    def __exit__(self, *error):
        self.unchanged.__exit__(*error)

    def largest(self):
        """Return the largest loss, as it was; from now on repeat only this one."""
        buffers_back(self.calls)
        for call in self.calls:
            call.repeat(self.as_it_was)

        sizes = {made: self._size(t) for made, t in self._losses(self.as_it_was)}
        self.losses = [max(sizes, key=sizes.get)] if sizes else []
        last = max((made.number for made in self.losses), default=0)
        before = [made.number for made in sizes if made.number < last]
        self.turn = len(before)  # of the backward passes of the step
        self.turns = len(sizes)

        earlier = max(before, default=0)
        mine = [call for call in self.calls if earlier < call.number <= last]
        computed = {m.number for m, t in self.as_it_was.items() if t.requires_grad}
        self.computed = {call.number: call for call in mine if call.number in computed}

        first = [call for call in mine if call.shape]
        given = flat_tensors([(call.args, call.kwargs) for call in first])
        self.size = batch_size_of(batched(given)) or (first[0].shape[0] if first else 0)
        return max(sizes.values(), default=0.0)

    def terms(self):
        """(value, line) of each term that the largest loss is the sum of, as it was."""
        calls = self.computed
        values = {m.number: _number(t) for m, t in self.as_it_was.items() if m.number in calls}

        def unscaled(number):
            """What this call multiplies or divides by a number."""
            parts = operands_of(calls[number], calls)
            scales = calls[number].name.strip("_") in SCALES and len(parts) == 1
            return unscaled(parts[0]) if scales else number

        loss = unscaled(self.losses[0].number)
        sums = calls[loss].name.strip("_") in SUMS
        terms = operands_of(calls[loss], calls) if sums else [loss]
        return [(values[term], line_of(calls[unscaled(term)].frames)) for term in terms]

    @property
    def labels(self):
        """Whole numbers of the batch, one a row."""
        return [t for t in self.rows if t.dim() == 1 and not t.is_floating_point()]

    def __call__(self, rows=None):
        """Return the sum of the losses; after largest(), that one with these rows."""
        self.passes += 1
        buffers_back(self.calls)
        made = {}
        if rows is None:
            for call in self.calls:
                call.repeat(made)
            self.results = dict(self._losses(made))
        else:
            made.update(self.as_it_was)
            rows = [*rows] * self.size
            for call in self.computed.values():
                pick = self._pick(rows[: self.size], made, call.uses())
                args, kwargs = mapped(pick, (call.args, call.kwargs))
                replace(call, args=args, kwargs=kwargs).repeat(made)
        return sum(self._size(t) for _, t in self._losses(made))

    def _losses(self, made):
        return [(m, t) for m, t in made.items() if m in self.losses]

    def _size(self, loss):
        if not self.slope:
            return _number(loss)
        ones = torch.ones_like(loss)
        slopes = torch.autograd.grad(loss, self.params, ones, True, allow_unused=True)
        norms = [g.to_dense().double().norm() for g in slopes if g is not None]
        return float(torch.stack(norms).norm())

    def _pick(self, rows, made, uses):
        """For a tensor of the batch, and for what the script makes of it without gradients: the
        same with these rows. Targets that are as long as what the network has made of the batch
        have been flattened like it; without its longest rows a packed batch makes less."""
        results = [x for x in uses if x.number in self.computed]
        lengths = {self.as_it_was[x].shape[:1]: made[x].shape[:1] for x in results}

        def pick(x):
            t = made.get(x) if isinstance(x, ResultRef) and x.number not in self.computed else x
            if not isinstance(t, Tensor) or t.requires_grad or not t.dim():
                return x
            if self.size in t.shape[:2]:
                return one(t)
            if t.shape[:1] in lengths and len(t) % self.size == 0:
                length = lengths[t.shape[:1]][0] // self.size
                return one(t.unflatten(0, (self.size, -1)))[:, :length].flatten(0, 1)
            return x

        def one(t):
            """These rows of it."""
            d = t.shape.index(self.size)
            if rows == list(range(self.size)):
                self.rows[t] = d
            return t.index_select(d, torch.tensor(rows, device=t.device))

        return pick


def operands_of(call, calls):
    """The numbers of those among these calls whose results it uses."""
    return [made.number for made in call.uses() if made.number in calls]


def _number(loss):
    """Its size on the host."""
    return abs(float(loss.detach().float().sum()))
