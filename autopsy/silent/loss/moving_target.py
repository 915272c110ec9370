"""
Moving target: does a temporal difference train its own target?

reward + gamma * V(next state) is what V(state) should become. With a graph of its own the target
moves towards the result as well, and nothing fails. In some steps it looks at what a squared
difference compares: told is a side that is something without a graph plus a discount times a
result, whose weights the other side has too. The discount is one number between 0.5 and 1, or 0
where an episode ends. Only in scripts that speak of rewards; one that says "residual" means it.
"""

import re

import torch

from ...frames import code_of, line_now, script_frames_now
from ...watch.events import FirstFunctions
from ..shared.graph_parts import REWARDS, only_part, weights_before, without_views

OFTEN = 3  # steps
LOSSES = ("mse_loss", "smooth_l1_loss", "huber_loss")
SQUARES = ("pow", "__pow__", "square")
DISCOUNTS = 0.5, 1  # one of them lies between
ON_PURPOSE = re.compile("residual", re.I)


class MovingTarget(FirstFunctions):
    """Temporal differences with a graph on both sides."""

    functions = (*LOSSES, *SQUARES)

    def __init__(self, watch):
        super().__init__(watch)
        self.found = {}  # line: {step: the discount, or 0}

    def function_called(self, func, name, args, kwargs, out):
        sides = _sides(name, args, kwargs) if out.requires_grad else []
        if len(sides) == 2:
            discounts = [_discount(*pair) for pair in (sides, sides[::-1])]
            steps = self.found.setdefault(line_now(), {})
            steps[self.recorder.steps] = next(filter(None, discounts), 0)

    def sentences(self):
        for line, steps in self.found.items():
            discounts = {*steps.values()}
            if len(steps) >= OFTEN and len(discounts) == 1 and discounts != {0}:
                yield (
                    f"the target of the loss at {line} has a gradient: {discounts.pop():.4g} times "
                    "a later result of the same weights, so each step moves the target towards the "
                    "result, too: compute the target under no_grad, or detach() it"
                )


def _sides(name, args, kwargs):
    """The nodes of what is compared, both with a graph; or []."""
    if name in LOSSES:
        given = (*args[:2], *(kwargs[key] for key in ("input", "target") if key in kwargs))
        nodes = [t.grad_fn for t in given]
    else:
        node = args[0].grad_fn
        nodes = [n for n, _ in node.next_functions] if node and "SubB" in node.name() else []
    code = code_of(script_frames_now()) if nodes and all(nodes) else ""
    return nodes if REWARDS.search(code) and not ON_PURPOSE.search(code) else []


def _discount(target, other):
    """By how much the target counts a later result, if it is such a target; else 0."""
    node = without_views(target)
    if node is None or node.name() != "AddBackward0" or not only_part(node):
        return 0
    node, factor = without_views(only_part(node)), 1.0
    while node is not None and node.name() == "MulBackward0" and only_part(node):
        factor = factor * (node._saved_other if node.next_functions[0][0] else node._saved_self)
        node = without_views(only_part(node))
    values = factor[factor != 0].unique().tolist() if isinstance(factor, torch.Tensor) else []
    low, high = DISCOUNTS
    is_one = len(values) == 1 and low < values[0] < high
    return values[0] if is_one and weights_before(node) & weights_before(other) else 0
