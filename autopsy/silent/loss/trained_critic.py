"""
Trained critic: does the loss of a policy train the critic, too?

log_prob * (reward - V(state)) should train the policy alone. Where V has a graph there, the
gradient of the policy's loss moves it as well, wherever that makes a likely action look good, and
nothing fails. In some steps it looks at products: told is a factor that is rewards without a graph
minus a result, if the same backward pass fits a result of the same weights to numbers without a
graph (another pass may clear its gradients first), and if the other factor is the log-probability
of choices, and depends on other weights. Only in scripts that speak of rewards.
"""

import re

from ...frames import code_of, line_now, script_frames_now
from ...watch.events import FirstFunctions
from ...watch.graph import graph_of, nodes_of

OFTEN = 3  # steps
LOSSES = ("mse_loss", "smooth_l1_loss", "huber_loss")
SQUARES = ("pow", "__pow__", "square")
PRODUCTS = ("mul", "__mul__", "__rmul__")
VIEWS = re.compile("(Squeeze|Unsqueeze|View|Where|Expand|Clone|ToCopy|Select|Slice)Backward")
LOGS = {"LogSoftmaxBackward0", "LogsumexpBackward0", "LogBackward0"}
NODES = 256  # between a product and the choices in it


class TrainedCritic(FirstFunctions):
    """Advantages with a graph."""

    functions = (*LOSSES, *SQUARES, *PRODUCTS)

    def __init__(self, watch):
        super().__init__(watch)
        self.fits, self.products = [], []  # since the last backward pass: (node, weights, line)
        self.found = {}  # line: steps

    def function_called(self, func, name, args, kwargs, out):
        nodes = [getattr(x, "grad_fn", None) for x in (*args[:2], *kwargs.values())]
        if not out.requires_grad:
            return
        if name in PRODUCTS:
            pairs = (nodes, nodes[::-1]) if len(nodes) == 2 and all(nodes) else ()
            for factor, other in pairs:
                weights = _weights_before(_subtracted(factor))
                chosen = weights and _weights_before(other) - weights and _is_of_choices(other)
                code = code_of(script_frames_now()).lower() if chosen else ""
                if "reward" in code:
                    self.products.append((out.grad_fn, weights, line_now()))
        elif name in SQUARES:
            self.fits.append((out.grad_fn, _weights_before(_subtracted(nodes[0])), ""))
        elif len(alone := [*filter(None, nodes)]) == 1:
            self.fits.append((out.grad_fn, _weights_before(alone[0]), ""))

    def backward(self, losses):
        fits, products, self.fits, self.products = self.fits, self.products, [], []
        graph = {*nodes_of(losses)} if fits and products else {}
        fitted = [weights for node, weights, _ in fits if node in graph]
        for node, weights, line in products:
            if node in graph and weights in fitted:
                self.found.setdefault(line, set()).add(self.recorder.steps)

    def stepped(self, optimizer):
        self.fits, self.products = [], []  # they hold the graphs

    def sentences(self):
        for line, steps in self.found.items():
            if len(steps) >= OFTEN:
                yield (
                    f"the product at {line} trains the critic, too: what it subtracts from the "
                    "rewards has a gradient there, and the same backward pass fits it to them: "
                    "detach() it in this product"
                )


def _is_of_choices(node):
    """Whether it takes one log-probability of each row."""
    names = {other.name() for other in graph_of([node], NODES)}
    return "GatherBackward0" in names and not LOGS.isdisjoint(names)


def _subtracted(node):
    """The result with a graph in a difference with something without one; or None."""
    while node is not None and (VIEWS.match(node.name()) or node.name() == "NegBackward0"):
        node = _only_part(node)
    is_difference = node is not None and node.name() == "SubBackward0"
    return _only_part(node) if is_difference else None


def _only_part(node):
    """What alone has a graph of what it was made of, or None."""
    parts = [part for part, _ in node.next_functions if part]
    return parts[0] if len(parts) == 1 else None


def _weights_before(node):
    """The ids of the leaves that it depends on."""
    nodes = graph_of([node] if node else [])
    return {id(n.variable) for n in nodes if hasattr(n, "variable")}
