"""
Gradient path: where does the gradient end on its way from the loss to some weights?

It finds modules that are called without a graph, and the operation whose backward makes 0 of a
gradient. (graph_ends.py finds the operation whose result has no graph.) It also finds weights that
a forward makes anew at each step.
"""

from contextlib import ExitStack, contextmanager
from functools import partial
from weakref import ref

import torch
from torch import nn
from torch.utils import checkpoint

from ....frames import frames_in, frames_now, line_of
from ....watch.graph import nodes_of
from ...shared.graph_ends import leaves
from .weight_history import READ

VECTORS = ("StackBackward0", "CatBackward0")  # of the terms of a loss: some may have the factor 0
PADDING = ", where only its padding_idx is reached: does a mask hide all but the padding?"


@contextmanager
def without_graph(modules):
    """Yields in what each module is called without a graph: "checkpoint", "no_grad", else ""."""
    found = {}

    def begins(module, args):
        found[module] = ""
        if not torch.is_grad_enabled():
            saves = any(file == checkpoint.__file__ for file, *_ in frames_now())
            found[module] = "checkpoint" if saves else "no_grad"

    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(module.register_forward_pre_hook(begins))
        yield found


class RecreatedParameters:
    """Finds weights that a forward makes anew at each step: no optimizer can hold them."""

    def __init__(self, recorder, names):
        self.recorder, self.names = recorder, names
        self.found = {}  # step, READ or the next one: {weight: shape}

    def before_backward(self, losses, held):
        """Before a backward pass of these losses. It returns those that are the same as before."""
        step = self.recorder.steps
        if step not in (READ, READ + 1) or step in self.found or not self.names.roots:
            return []
        if not self.recorder.is_complete:
            return []  # what calls were given is not known
        known = {p for root in self.names.roots for p in root.parameters()} | {*held}
        if any(hasattr(p, "full_tensor") for p in known):
            return []  # fully_shard() computes with parameters of its own, and frees them
        known |= {t for call in self.recorder.calls for _, t in call.given()}
        new = [p for p in leaves(losses) if isinstance(p, nn.Parameter) and p not in known]
        self.found[step] = {ref(p): list(p.shape) for p in new}
        return [p for p in new if ref(p) in self.found.get(step - 1, ())]

    @property
    def shapes(self):
        first, second = (self.found.get(READ + k, {}) for k in (0, 1))
        same = [*first.values()] == [*second.values()]
        return [*first.values()] if same and first.keys().isdisjoint(second) else []


def where_zero(losses, params):
    """(in whose backward the gradient on the way to these weights becomes 0, or ""; whether that is
    meant). The forward must have run in anomaly mode, which keeps the lines."""
    found = []

    def after(node, to_inputs, to_outputs):
        on = [g for g in to_inputs if g is not None]
        came = any(g is not None and g.any() for g in to_outputs)
        if came and on and not any(g.any() for g in on):
            line = line_of(frames_in(node.metadata.get("traceback_", ())))
            why = PADDING if _is_of_padding(node, to_outputs[0]) else ""
            text = f"in {node.name()}{f' of {line}' if line else ''}{why}"
            found.append((text, _is_off(node)))
        elif came and node.name() in VECTORS and any(g.numel() == 1 and not g.any() for g in on):
            found.append(("", True))

    with ExitStack() as stack:
        for node in nodes_of(losses):
            stack.enter_context(node.register_hook(partial(after, node)))
        ones = [torch.ones_like(t) for t in losses]
        slopes = torch.autograd.grad(losses, params, ones, allow_unused=True)
    by_hand = any(p._backward_hooks for p in params) or any(
        g is not None and g.any() for g in slopes
    )
    # before the last one the gradient may go on by another way
    return found[-1] if found else ("", by_hand)


def _is_off(node):
    """Whether it multiplies by the number 0, as for a term of the loss or a branch that is switched
    off; is a function of the script's own, as one that reverses gradients; or is over one class."""
    name = node.name()
    if name == "MulBackward0":
        factors = [x for x in (node._saved_self, node._saved_other) if x is not None]
        numbers = [x for x in factors if x.numel() == 1 and not x.requires_grad]
        return any(float(x) == 0 for x in numbers)
    if name == "LogSoftmaxBackward0":
        return node._saved_result.shape[node._saved_dim] == 1
    return not name[-1].isdigit()


def _is_of_padding(node, gradient):
    """Whether each row of a table that is given a gradient is the one of its padding_idx."""
    if node.name() != "EmbeddingBackward0":
        return False
    rows = node._saved_indices[gradient.any(-1)]
    return bool((rows == node._saved_padding_idx).all())
