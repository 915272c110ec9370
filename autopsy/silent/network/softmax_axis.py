"""
Softmax axis: are the weights of an attention normalised over what it sums?

Of scores [n, n] of queries and keys, softmax takes either dimension, and nothing fails. In two
steps of training each product of two projections of one input is followed by the names of its
dimensions, through views, scales, masks and one softmax, to the product with values of that input.
What is divided again, multiplied with other weights, or has no projection of its own (slots,
routing, a graph's transitions) is not told, and neither are scores with two different softmaxes,
nor what the script calls competition.
"""

import re
from itertools import count
from typing import NamedTuple

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ...frames import code_of, line_now, script_frames_now
from ...modes import is_compiled
from ...tensors import flat_tensors
from ...watch.dimensions import VIEWS, product_of, viewed
from ...watch.events import Events
from ...watch.following import Follower

LOOKS = (1, 4)  # steps
MEANT = re.compile(r"compet|\bslots?\b|routing|capsule", re.I)
NEAR = 64  # operations between a projection and what it is made of
SAME = ("to", "float", "half", "bfloat16", "double", "type", "type_as", "contiguous", "clone",
        "dropout", "dropout_")  # fmt: skip
SCALES = ("mul", "mul_", "__mul__", "__rmul__", "__imul__", "div", "div_", "__truediv__",
          "__itruediv__", "true_divide")  # fmt: skip
MASKS = ("add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__", "__isub__",
         "masked_fill", "masked_fill_", "where")  # fmt: skip
PROJECTIONS = ("linear", "conv1d", "conv2d", "conv3d", "matmul", "bmm", "addmm", "einsum")


class SoftmaxAxis(Events):
    """Weights of attention that are normalised over another dimension than the one summed."""

    recorded_only = True

    def __init__(self, watch):
        self.recorder = watch.recorder
        self.right, self.wrong = set(), {}  # lines of a softmax; {(line, sentence): steps}

    def during(self, call, args, kwargs):
        module = call.function
        if not (call.grad and module.training and self.recorder.steps in LOOKS):
            return ()
        return () if is_compiled([*module.modules()]) else [Attention(self)]

    def sentences(self):
        for (line, text), steps in self.wrong.items():
            if line not in self.right and len(steps) == len(LOOKS):
                yield text


class Made(NamedTuple):
    """A tensor on the way to another."""

    number: int
    size: int
    projected: bool


class Weights(NamedTuple):
    """Scores, or what softmax has made of them, with a name for each dimension: "query" and "key"
    as they come, a letter for any other, None if it is not known."""

    dims: list
    origins: list  # what both were made of
    softmaxes: set  # names of dimensions of these scores
    over: str | None = None  # once softmax was taken
    line: str = ""
    shape: tuple = ()  # at the softmax
    names: tuple = ()


class Attention(Follower):
    """Follows scores and weights while a network runs."""

    def __init__(self, check):
        super().__init__()
        self.check, self.numbers = check, count()
        self.origins = WeakIdKeyDictionary()  # tensor: what alone it was made of, the last first
        self.weights = WeakIdKeyDictionary()  # tensor: Weights
        self.wrong = []  # (weights, sentence)

    def __exit__(self, *error):
        super().__exit__(*error)
        for weights, text in self.wrong:
            if len(weights.softmaxes) == 1:
                steps = self.check.wrong.setdefault((weights.line, text), set())
                steps.add(self.check.recorder.steps)

    def function_called(self, func, name, args, kwargs, out):
        if name == "__get__":
            name = func.__self__.__name__
        given = [t for t in flat_tensors((args, kwargs)) if t.is_floating_point()]
        tracked = [t for t in (given[:1] if name in SAME else given) if t in self.weights]
        if name == "__setitem__" and tracked and self.weights[args[0]].over:
            self.weights.pop(args[0])
        if not given or not all(t.is_floating_point() for t in flat_tensors(out)):
            return
        weights = self._next(func, name, args, kwargs, tracked, out)
        made = self._made_of(given)
        projected = name in PROJECTIONS and any(isinstance(x, nn.Parameter) for x in given)
        projected |= name in VIEWS + SAME and bool(made) and made[0].projected
        for t in flat_tensors(out):
            self.weights.pop(t, None)
            self.origins[t] = [Made(next(self.numbers), t.numel(), projected), *made][:NEAR]
        if weights:
            self.weights[out] = weights

    def _of(self, t):
        """What alone it was made of, itself first; nothing for a weight of the network."""
        if isinstance(t, nn.Parameter):
            return []
        if t not in self.origins:
            self.origins[t] = [Made(next(self.numbers), t.numel(), False)]
        return self.origins[t]

    def _made_of(self, given):
        inputs = [t for t in given if not isinstance(t, nn.Parameter)]
        inputs = [t for t in inputs if t.requires_grad] or inputs
        return _common([*map(self._of, inputs)])

    def _next(self, func, name, args, kwargs, tracked, out):
        """The weights that this call makes of others, or None."""
        product = product_of(name, args)
        if product:
            a, b, *letters = product
            if not tracked:
                return self._scores(a, b, *letters, out)
            if len(tracked) == 1:
                self._sum(a, b, *letters)
            return None
        if len(tracked) != 1:
            return None
        before = self.weights[tracked[0]]
        if name == "softmax":
            return None if before.over else _softmax(before, args, kwargs)
        if name in VIEWS:
            return before._replace(dims=viewed(func, args, kwargs, before.dims))
        others = [x for x in (*args[1:], *kwargs.values()) if isinstance(x, Tensor)]
        known = name in SAME or (name in SCALES and not others)
        known |= not before.over and name in SCALES + MASKS
        return before if known and out.shape == tracked[0].shape else None

    def _scores(self, a, b, of_a, of_b, of_out, out):
        queries = [x for x in of_out if x in of_a and x not in of_b]
        keys = [x for x in of_out if x in of_b and x not in of_a]
        origins = _common([self._of(a), self._of(b)])
        if len(queries) != 1 or len(keys) != 1 or not origins:
            return None
        names = {queries[0]: "query", keys[0]: "key"}
        dims = [names.get(x, x) for x in of_out]
        n = out.shape[dims.index("query")]
        if not n == out.shape[dims.index("key")] > 1:
            return None
        return Weights(dims, origins, set())

    def _sum(self, a, b, of_a, of_b, of_out):
        """A product of weights with values: is it a sum over the dimension of the softmax?"""
        t, values, letters = (a, b, of_a) if a in self.weights else (b, a, of_b)
        weights = self.weights[t]
        summed = {x for x in of_a if x in of_b and x not in of_out}
        dims = [name for name, x in zip(weights.dims, letters, strict=True) if x in summed]
        if not weights.over or dims not in (["query"], ["key"]):
            return
        if weights.over in dims:
            self.check.right.add(weights.line)
            return
        way = self._of(values)
        common = _common([way, weights.origins])
        own = way[: way.index(common[0])] if common else []
        part = common and values.numel() < common[0].size and common[0].projected
        if part or any(made.projected for made in own):
            over, right = (weights.names.index(x) for x in (weights.over, dims[0]))
            self.wrong.append((weights, (
                f"softmax at {weights.line} is over dimension {over} of {weights.shape}, and the "
                f"weighted sum at {line_now()} runs over dimension {right}: the weights of a sum "
                f"do not add up to 1: softmax with dim={right - len(weights.names)}"
            )))  # fmt: skip


def _common(ways):
    first, *others = ways or [[]]
    return [made for made in first if all(made in way for way in others)]


def _softmax(before, args, kwargs):
    """Of scores; without a dimension torch takes the first of three, or the second."""
    dim = (*args[1:], kwargs.get("dim"))[0]
    dim = int(len(before.dims) != 3) if dim is None else dim
    over = before.dims[dim]
    code = code_of(script_frames_now())
    if MEANT.search(code):
        return None
    before.softmaxes.add(over)
    names, shape = tuple(before.dims), [*args[0].shape]
    return before._replace(over=over, line=line_now(), shape=shape, names=names) if over else None
