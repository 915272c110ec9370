"""
Penalties: does a gradient penalty train nothing?

autograd.grad() without create_graph=True gives a gradient that has no graph: a penalty on its norm
is a number, and the sum with the loss trains as if it were not there. Among the calls of a step it
follows such gradients, through calls that are given nothing else with a graph, to a sum that is the
loss of a backward pass; a second derivative (of a gradient that has a graph) through squares and
losses, too. What multiplies a part of the loss, or becomes weights (a first-order meta-gradient),
is meant so.
"""

from collections import Counter

import torch
from torch import nn
from torch.nn.modules.loss import _Loss

from ...frames import line_of
from ...tensors import flat_tensors
from ...watch.deferred import params_of
from ...watch.events import Events

OFTEN = 3  # backward passes
CREATES = 4  # where create_graph stands among the arguments
ADDS = ("add", "radd", "iadd", "stack", "cat", "sum")
SCALES = ("mul", "rmul", "imul", "div", "truediv")
SUBTRACTS = ("sub", "rsub", "isub")
SIZES = ("pow", "square", "abs", "mean", "sum", "norm", "mse_loss", "l1_loss", "smooth_l1_loss",
         "huber_loss")  # fmt: skip


class Penalties(Events):
    """Gradients without a graph that are added to a loss."""

    recorded_only = True

    def __init__(self, watch):
        self.recorder, self.names = watch.recorder, watch.names
        self.found = Counter()  # line of autograd.grad(): backward passes

    def backward(self, losses):
        calls = self.recorder.of_this_step
        if any(map(_is_without_graph, calls)):
            sums = _sums(calls, *self._trained(calls))
            made = [self.recorder.maker(loss) for loss in losses]
            self.found.update({line for ref in made if ref for line in sums.get(ref.number, ())})

    def _trained(self, calls):
        """The numbers of calls that weights have a part in, and of those that are given weights."""
        held = {id(p) for optimizer in self.names.optimizers for p in params_of(optimizer)}
        trained, own = set(), set()
        for call in calls:
            given = flat_tensors((call.args, call.kwargs))
            weights = any(isinstance(t, nn.Parameter) or id(t) in held for t in given)
            is_network = isinstance(call.function, nn.Module) and any(
                p.requires_grad for p in call.function.parameters()
            )
            if weights or is_network:
                own.add(call.number)
            if call.number in own or any(ref.number in trained for ref in call.uses()):
                trained.add(call.number)
        return trained, own

    def sentences(self):
        for line, n in self.found.items():
            if n >= OFTEN:
                yield (
                    f"a term of the loss trains nothing: it is made of the gradient that {line} "
                    "takes, which has no graph: create_graph=True"
                )


def _has_graph(call):
    """Whether it is a gradient that has a graph; None: it is none."""
    if call.function is not torch.autograd.grad:
        return None
    given = call.args[CREATES:] or (call.kwargs.get("create_graph"),)
    return bool(given[0])


def _is_without_graph(call):
    return _has_graph(call) is False


def _second_derivatives(calls):
    """The lines of gradients without a graph, of what was made of gradients with one."""
    made, lines = set(), set()  # made: numbers of calls
    for call in calls:
        has_graph, of_gradient = _has_graph(call), any(r.number in made for r in call.uses())
        if has_graph or (of_gradient and has_graph is None):
            made.add(call.number)
        elif of_gradient:
            lines.add(line_of(call.frames))
    return lines


def _sums(calls, trained, own):
    """{number of a call: the lines of the gradients that are added to something else there}"""
    terms, sums = {}, {}  # number of a call: lines
    second = _second_derivatives(calls)
    for call in calls:
        name = call.name.strip("_")
        refs = [ref.number for ref in call.uses() if ref.number in trained]
        lines = [terms[number] for number in refs if number in terms]
        others = [number for number in refs if number not in terms]
        if _is_without_graph(call):
            if refs:
                terms[call.number] = {line_of(call.frames)}
            continue
        if lines and not others and call.number not in own:
            terms[call.number] = set().union(*lines)
        elif lines and name in ADDS and call.number not in own:
            sums[call.number] = set().union(*lines)
        carried = set().union(*(sums[number] for number in others if number in sums))
        if name in SIZES or isinstance(call.function, _Loss):
            carried &= second
        elif name not in (*ADDS, *SUBTRACTS, *SCALES):
            continue
        if carried:
            sums[call.number] = sums.get(call.number, set()) | carried
    return sums
