"""
Penalties: does a gradient penalty train nothing?

autograd.grad() without create_graph=True gives a gradient that has no graph: a penalty on its norm
is a number, and the sum with the loss trains as if it were not there. Among the calls of a step it
follows such gradients, through calls that are given nothing else with a graph, to a sum that is the
loss of a backward pass. What multiplies a part of the loss, or becomes weights (a first-order
meta-gradient), is meant so.
"""

from collections import Counter

import torch
from torch import nn

from ...frames import line_of
from ...tensors import flat_tensors
from ...watch.events import Events
from .constant_term import ADDS, SCALES

OFTEN = 3  # backward passes
CREATES = 4  # where create_graph stands among the arguments


class Penalties(Events):
    """Gradients without a graph that are added to a loss."""

    recorded_only = True

    def __init__(self, watch):
        self.recorder = watch.recorder
        self.found = Counter()  # line of autograd.grad(): backward passes

    def backward(self, losses):
        calls = self.recorder.of_this_step
        if any(map(_is_without_graph, calls)):
            sums = _sums(calls)
            made = [self.recorder.maker(loss) for loss in losses]
            self.found.update({line for ref in made if ref for line in sums.get(ref.number, ())})

    def sentences(self):
        for line, n in self.found.items():
            if n >= OFTEN:
                yield (
                    f"a term of the loss trains nothing: it is made of the gradient that {line} "
                    "takes, which has no graph: create_graph=True"
                )


def _is_without_graph(call):
    if call.function is not torch.autograd.grad:
        return False
    given = call.args[CREATES:] or (call.kwargs.get("create_graph"),)
    return not given[0]


def _sums(calls):
    """{number of a call: the lines of the gradients that are added to something else there}"""
    terms, sums = {}, {}  # number of a call: lines
    for call in calls:
        name, refs = call.name.strip("_"), [ref.number for ref in call.uses()]
        if _is_without_graph(call):
            terms[call.number] = {line_of(call.frames)}
            continue
        lines = [terms[number] for number in refs if number in terms]
        others = [number for number in refs if number not in terms]
        weights = any(t.requires_grad for t in flat_tensors((call.args, call.kwargs)))
        weights |= isinstance(call.function, nn.Module) and any(
            p.requires_grad for p in call.function.parameters()
        )
        if lines and not (others or weights):
            terms[call.number] = set().union(*lines)
        elif name in ADDS and lines and not weights:
            sums[call.number] = set().union(*lines)
        if name in (*ADDS, *SCALES):
            carried = [sums[number] for number in others if number in sums]
            if carried:
                sums[call.number] = sums.get(call.number, set()).union(*carried)
    return sums
