"""
Query mask: does a mask hide whole queries, and so no key at all?

Scores of attention are [.., queries, keys]. A padding mask [batch, 1, queries, 1] adds the same
number to all scores of a query: softmax takes no notice of it, and each query still sees the
padding. In the first steps square scores are followed from the product of queries and keys through
masks and softmax to the product with values. Told is a softmax whose only mask is one such, where
the values of what it should hide are not 0. What is done to the weights afterwards may hide keys.
"""

import sys
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ...frames import line_now
from ...watch.dimensions import product_of
from ...watch.events import FirstFunctions
from ...watch.hooks import walk

OFTEN = 3  # steps
NEAR = 32  # operations between queries, or keys, and what both are made of
HIDDEN = -1e3  # scores that a mask has left
FAR = 30  # between two scores of a query: e**-30 is nothing
CALL = nn.Module._call_impl.__code__
PRODUCTS = ("matmul", "__matmul__", "bmm", "baddbmm", "einsum")
MASKS = ("masked_fill", "masked_fill_", "where", "add", "add_", "__add__", "__radd__", "__iadd__",
         "sub", "sub_", "__sub__", "__isub__")  # fmt: skip
SAME = ("mul", "mul_", "__mul__", "__rmul__", "__imul__", "div", "div_", "__truediv__",
        "__itruediv__", "view", "reshape", "unflatten", "flatten", "to", "float", "contiguous",
        "clone", "dropout", "type_as")  # fmt: skip
TURNED = ("TBackward0", "TransposeBackward0", "PermuteBackward0", "ToCopyBackward0")


class Scores(NamedTuple):
    """Square scores of an attention, or the weights that softmax has made of them."""

    mask: str = ""  # the line that hides whole queries
    place: tuple = ()  # of the softmax: (module, line)
    hidden: Tensor | None = None  # which queries are, once softmax was taken


class QueryMask(FirstFunctions):
    """Masks of attentions that hide no key."""

    outside = False
    functions = (*PRODUCTS, *MASKS, *SAME, "softmax", "__setitem__")

    def __init__(self, watch):
        super().__init__(watch)
        self.followed = WeakIdKeyDictionary()  # tensor: Scores
        self.wrong = {}  # (line of the mask, place): steps
        self.right = set()  # places where keys are hidden, or values

    def function_called(self, func, name, args, kwargs, out):
        if product := product_of(name, args):
            self._multiplied(product, out)
            return
        given = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        tracked = [t for t in given if t in self.followed]
        if len(tracked) != 1:
            return
        scores, others = self.followed[tracked[0]], [t for t in given if t is not tracked[0]]
        if name == "softmax":
            dim = (*args[1:], kwargs.get("dim"))[0]
            if scores.mask and dim in (-1, out.dim() - 1):
                self._normalised(scores.mask, args[0].detach(), out)
        elif scores.hidden is None:
            masked = name in MASKS and any(_is_of_queries(t, out) for t in others)
            scores = scores._replace(mask=line_now()) if masked else scores
            if out is not None and out.shape[-2:] == tracked[0].shape[-2:]:
                self.followed[out] = scores
        elif others or out is None:
            self.right.add(scores.place)  # it hides some weights after softmax, perhaps
            self.followed.pop(tracked[0])
        elif out.shape[-2:] == tracked[0].shape[-2:]:
            self.followed[out] = scores._replace(hidden=scores.hidden.reshape(out.shape[:-1]))

    def _multiplied(self, product, out):
        """Queries with keys of the same, or weights with values."""
        a, b = product[:2]
        weights = [t for t in (a, b) if getattr(self.followed.get(t), "hidden", None) is not None]
        if weights:
            self._summed(weights[0], *product)
        elif out.dim() > 2 and out.shape[-1] == out.shape[-2] > 1 and out.requires_grad:
            other = _way(b)
            if any(node in other for node in _way(a)):
                self.followed[out] = Scores()

    def _normalised(self, mask, scores, out):
        hidden = scores < HIDDEN
        queries = hidden.any(-1)
        far = scores.amax(-1) - scores.amin(-1) > FAR  # another mask, perhaps
        modules = [f.f_locals["self"] for f in walk(sys._getframe()) if f.f_code is CALL]
        place = id(modules[0]), line_now()
        if (far & ~hidden.all(-1)).any():
            self.right.add(place)
        elif (queries.any(-1) & ~queries.all(-1)).any():
            self.followed[out] = Scores(mask, place, queries)

    def _summed(self, weights, a, b, of_a, of_b, of_out):
        """Are the values not 0 where the mask hides the query at the same place?"""
        scores = self.followed[weights]
        values, mine, theirs = (b, of_a, of_b) if weights is a else (a, of_b, of_a)
        key = mine[-1]
        if key not in theirs or key in of_out:
            return
        number = {letter: k for k, letter in enumerate({*mine, *theirs})}
        hidden, sizes = scores.hidden.float(), values.detach().abs().float()
        at = [number[x] for x in (*mine[:-2], key)]
        if torch.einsum(hidden, at, sizes, [number[x] for x in theirs], []) > 0:
            steps = self.wrong.setdefault((scores.mask, scores.place), set())
            steps.add(self.recorder.steps)
        else:
            self.right.add(scores.place)

    def sentences(self):
        said = set()
        for (mask, place), steps in self.wrong.items():
            if len(steps) >= OFTEN and place not in self.right and place[1] not in said:
                said.add(place[1])
                yield (
                    f"the mask at {mask} hides whole queries, and no key: softmax at {place[1]} "
                    "takes no notice of what all scores of a query have in common, and padding is "
                    "attended to: let the last dimension of the mask be that of the keys "
                    "([batch, 1, 1, keys])"
                )


def _is_of_queries(mask, scores):
    """Whether it holds one number for all keys of a query, and not the same for all queries."""
    if mask.dim() < 2 or mask.shape[-2] != scores.shape[-2]:
        return False
    first = mask[..., :1]
    return bool((mask == first).all() and (first != first.flatten()[0]).any())


def _way(t):
    """The nodes that alone it was made of, the last first, without those of weights."""
    way, node = [], t.grad_fn
    while node and len(way) < NEAR:
        way.append(node)
        parts = [part for part, _ in node.next_functions if part and not _is_weight(part)]
        node = parts[0] if len(parts) == 1 else None
    return way


def _is_weight(node):
    if node.name() in TURNED:
        [(node, _)] = node.next_functions
    return hasattr(node, "variable")
