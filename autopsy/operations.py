"""
Operations: what is known of an aten operation.

Which arguments it writes, where the batch goes in its results, which indices it takes, and what it
computes in wider types.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from .advice import LOG_TARGET, ONLY_LATER, UNDERFLOW, Advice, eps_for
from .facts import Repeat
from .frames import frames_in, line_of
from .tensors import (
    FLOATS,
    Span,
    exchange_dtype,
    extent,
    flat_tensors,
    is_real,
    numbers_of,
    spans_of,
)

DIVIDES = ("aten.div.Tensor", "aten.reciprocal.default", "aten.log.default", "aten.log2.default",
           "aten.log10.default", "aten.rsqrt.default")  # fmt: skip
KEEPS_ZERO = [
    f"{name}Backward{n}" for n in (0, 1)
    for name in ("Pow", "Sqrt", "View", "UnsafeView", "Expand", "Unsqueeze", "Squeeze", "T",
                 "Transpose", "Permute", "Slice", "Select", "Index", "ToCopy", "Clone", "Split",
                 "Unbind")
]  # fmt: skip
MAKES_ZERO = {
    f"{node}Backward{n}": name for n in (0, 1)
    for node, name in {
        "Relu": "relu", "Threshold": "threshold", "Hardtanh": "hardtanh", "ClampMin": "clamp",
        "Clamp": "clamp", "Sub": "a difference", "Softmax": "softmax", "Exp": "exp",
        "Sigmoid": "sigmoid", "Std": "std", "Var": "var", "LinalgVectorNorm": "a norm",
        "Cumprod": "cumprod", "Prod": "prod", "Round": "round", "Floor": "floor",
    }.items()
}  # fmt: skip


MATMUL = "(b|add|badd)?b?mm|(add)?mv"
WRITERS = "^$|fill|full|where|tensor|set|copy|pad|put|nan_to_num"  # functions: the script's own
OVERWRITES = ("copy", "fill", "zero", "normal", "uniform", "random", "bernoulli", "exponential")


class Passage(NamedTuple):
    """The batch goes from dimension `d` of an input of an operation into a result of it."""

    name: str  # of the operation
    given: dict  # its arguments by name
    k: int  # which tensor of the inputs, from the end
    source: Tensor  # that input
    d: int
    result: Tensor


@dataclass(frozen=True, eq=False)
class Rule:
    """What the dispatch needs to know of an operation."""

    name: str  # "addmm": without its overload and without underscores
    names: tuple[str, ...]  # of its arguments
    writes: tuple[str, ...]  # names of those that it writes
    pointwise: bool
    overwrites: bool  # and does not read what it writes
    bias: int  # how many of its inputs come before what it multiplies
    index: Callable | None  # of its arguments, the indices among them: see INDEX
    reorders: bool  # rows, by an index or by their size
    sums: bool
    constant: bool  # fills with a number that it is given
    empty: bool  # gives memory that nothing has written
    joins: bool
    copies: bool  # perhaps into another type, or to another device
    takes_masks: bool  # -inf on purpose
    batch_dim: Callable[[Passage], int | None]  # one of BATCH_DIM
    other_slopes: bool  # results after the first are slopes of weights, which have no batch

    def follow(self, given, k, number, source, d, t):
        """The dimension of result `number` that is dimension `d` of input k (from the end)."""
        if number and self.other_slopes:
            return None
        to = self.batch_dim(Passage(self.name, given, k, source, d, t))
        kept = to is not None and 0 <= to < t.dim() and t.shape[to] == source.shape[d]
        return to if kept else None

    def picks(self, given, source, d, outs):
        """Which rows along dimension d of the source the result has, in their order; None: it is no
        such operation, or each column has an order of its own."""
        if self.name not in PICKED or source is not given.get("self"):
            return None
        return PICKED[self.name](given, source, d, outs)


@cache
def rule_of(func):
    """The Rule of an operation of aten."""
    schema = func._schema
    name = schema.name.partition("::")[2].strip("_")
    names = tuple(a.name for a in schema.arguments)
    writes = tuple(a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write)
    if re.search("(native|cudnn|miopen)_batch_norm$", name):  # the schema does not say so
        writes = "running_mean", "running_var"
    pointwise = torch.Tag.pointwise in func.tags or name == "copy"

    def has(words):
        return bool(re.fullmatch(words, name))

    has_dim = "dim" in names or "dims" in names
    by_name = (function for words, function in BATCH_DIM.items() if has(words))
    batch_dim = next(by_name, _beside_dims if has_dim else _same)
    return Rule(
        name=name,
        names=names,
        writes=writes,
        pointwise=pointwise,
        overwrites=name in OVERWRITES or func._overloadname.endswith("out"),
        bias=int(name.startswith(("addmm", "addmv", "baddbmm"))),
        index=INDEX.get(name),
        reorders=has(".*index|.*(index_select|gather|take|sort|topk|flip|roll|masked_select).*"),
        sums=has(f"{MATMUL}|sum|mean|dot|linear|convolution|(index|scatter)_add"),
        constant=has("(masked_|index_)?fill|(new_)?full(_like)?|scalar_tensor"),
        empty=has("(new_)?empty(_like|_strided)?"),
        joins=has("stack|cat"),
        copies=has("to_copy|clone|copy"),
        takes_masks=has(".*(softmax|logsumexp|attention).*"),
        batch_dim=_broadcast if pointwise else batch_dim,
        other_slopes=has(".*(?<!attention)_backward") and not pointwise,
    )


class Call:
    """One operation of a step, with what it is given."""

    def __init__(self, func, args, kwargs):
        self.func, self.kwargs = func, kwargs
        self.rule = rule_of(func)
        self.given = dict(zip(self.rule.names, args, strict=False)) | kwargs
        self.numbers = [a for a in args if self.rule.pointwise and type(a) in (int, float)]
        written = {id(t): t for t in flat_tensors([self.given.get(n) for n in self.rule.writes])}
        self.written = [*written.values()]
        self.args = [a.clone() if id(a) in written else a for a in args]  # as they were before
        self.inputs = flat_tensors((args, kwargs))
        if self.rule.overwrites:
            self.inputs = [t for t in self.inputs if id(t) not in written]
        if written:
            self.spans = spans_of(self.inputs)  # now: they are overwritten

    @cached_property
    def spans(self):
        return spans_of(self.inputs)

    @property
    def has_bad_number(self):
        """Whether a number of Python among its arguments is no ordinary one."""
        values = *self.args, *self.kwargs.values()
        return any(isinstance(a, float) and not is_real(a) for a in values)


# Where the batch goes in a result: its dimension there, or None


def _broadcast(passage):
    return passage.d + passage.result.dim() - passage.source.dim()


def _product(passage):
    from_end = 1 if passage.k == -2 else 2  # the last dimension of the left factor is summed over
    summed = max(0, passage.source.dim() - from_end)
    bias = passage.k < -2
    return None if bias or passage.d == summed else passage.d


def _index(passage):
    """x[:, i] or x[torch.arange(len(x)), i]: the rows stay where they are. table[i]: a number for
    each sample is looked up."""
    indices = passage.given["indices"]
    if passage.d == 0 and _in_order(indices[0], len(passage.source)):
        return 0
    at = [p for p, index in enumerate(indices) if index is not None]
    if passage.source is passage.given["self"] or len(at) > 1:
        return None
    return passage.d + at[0]


def _in_order(index, size):
    return index is None or torch.equal(index.flatten(), torch.arange(size, device=index.device))


def _index_select(passage):
    table, dim = passage.given["self"], passage.given["dim"]
    if passage.source is table:
        return _beside_dims(passage)
    return passage.d + dim % table.dim()


def _stack(passage):
    new = passage.given.get("dim", 0) % (passage.source.dim() + 1)
    return passage.d + (new <= passage.d)


def _nowhere(passage):
    return None


def _beside_dims(passage):
    """The batch stays where it is unless it is one of the dimensions that the operation names."""
    source, d, result = passage.source, passage.d, passage.result
    dims = passage.given.get("dim", passage.given.get("dims"))
    dims = [dims] if isinstance(dims, int) else dims or range(source.dim())
    dims = [x % source.dim() for x in dims]
    if d in dims:
        return None
    gone = sum(x < d for x in dims) if result.dim() < source.dim() else 0
    return d - gone


def _same(passage):
    other_dims = "nll_loss|embedding$|ctc_loss|linalg"  # the batch stays, the others go
    same = passage.result.dim() == passage.source.dim() or re.search(other_dims, passage.name)
    return passage.d if same else None


# Of what is not pointwise, by the name of the operation. Else: _beside_dims, _same.
BATCH_DIM = {
    MATMUL: _product,
    "index": _index,
    "index_select": _index_select,
    "stack": _stack,
    ".*index|.*(index_put|masked_s|take|convolution_backward).*": _nowhere,
    ".*(embedding|rnn).*backward.*": _nowhere,
}


# Which rows a result has, in their order


def _sorted_rows(given, source, d, outs):
    return outs[1].tolist() if source.dim() == 1 else None


def _selected_rows(given, source, d, outs):
    return given["index"].tolist() if given["dim"] % source.dim() == d else None


def _flipped_rows(given, source, d, outs):
    flipped = [x % source.dim() for x in given["dims"]] == [d]
    return [*range(source.shape[d])][::-1] if flipped else None


def _indexed_rows(given, source, d, outs):
    *before, index = given["indices"]
    if len(before) != d or any(other is not None for other in before):
        return None
    index = index.nonzero().flatten() if index.dtype is torch.bool else index
    return (index % source.shape[d]).tolist() if index.dim() == 1 else None


PICKED = {
    "sort": _sorted_rows,
    "topk": _sorted_rows,
    "index_select": _selected_rows,
    "flip": _flipped_rows,
    "index": _indexed_rows,
}


INDEX = {  # operation: of its arguments (what, index, the lowest, the highest, ignore_index)
    **dict.fromkeys(
        ("nll_loss_forward", "nll_loss2d_forward"),
        lambda x, target, weight, reduction, ignore: [
            ("label", target, 0, x.shape[min(x.dim() - 1, 1)] - 1, ignore)
        ],
    ),
    **dict.fromkeys(
        ("gather", "index_select", "scatter", "scatter_add"),
        lambda x, dim, index, *more: [("index", index, 0, x.shape[dim] - 1)] if x.dim() else [],
    ),
    "embedding": lambda weight, index, *more: [("index", index, 0, len(weight) - 1)],
    "index": lambda x, indices, *more: [
        ("index", i, -x.shape[k], x.shape[k] - 1)
        for k, i in enumerate(indices)
        if i is not None and all(j is None or j.dtype is torch.int64 for j in indices)
    ],
    "binary_cross_entropy": lambda x, target, *more: [("label", target, 0, 1)],
    "one_hot": lambda tensor, num_classes=-1: (
        [("label", tensor, 0, num_classes - 1)] if num_classes > 0 else []
    ),
}


def in_wider_types(call):
    """The call on the same inputs in fp32, and where that is bad in fp64: Repeats."""
    results, func = [], call.func
    if torch.Tag.nondeterministic_seeded in func.tags or func.namespace != "aten":
        return ()  # it would draw random numbers, or wait for another rank
    for dtype in (torch.float32, torch.float64):
        try:
            wide, named = exchange_dtype((call.args, call.kwargs), dtype, FLOATS)
            spans = [extent(t) for t in flat_tensors(func(*wide, **named))]
        except Exception:  # a kernel that knows one dtype only
            break
        bad = next((span for span in spans if span.is_bad), Span())
        results.append(Repeat(dtype, bad))
        if not bad.is_bad:
            break
    return tuple(results)


def origin_of_zero(func, spans):
    """Which function has made the 0 that this one divides by, or takes the logarithm of, and on
    which line ("relu at model.py:57 in forward"), if the graph shows it; or "". In anomaly mode."""
    is_division = str(func) == "aten.div.Tensor"
    if str(func) not in DIVIDES or len(spans) != 1 + is_division or 0 not in spans[-1][1]:
        return ""  # or it divides by a number
    node = spans[-1][0].grad_fn
    while node and node.name() in KEEPS_ZERO:
        node = node.next_functions[0][0]
    if node is None or node.name() not in MAKES_ZERO:
        return ""
    line = line_of(frames_in(node.metadata.get("traceback_", ())))
    return f"{MAKES_ZERO[node.name()]} at {line}" if line else ""


def mistake_in(func, spans):
    """What to do about an operation of the forward, if its inputs themselves show it; or None."""
    if "softmax" in str(func) and spans and _sees_only_later(spans[0][0]):
        return ONLY_LATER
    if "xlogy" in str(func) and spans and spans[0][1].low < 0 and spans[0][1].high <= 0:
        return LOG_TARGET
    least = _underflown_divisor(func, spans)
    return Advice(UNDERFLOW.format(least)) if least else None


def _sees_only_later(scores):
    """Whether -inf leaves in the scores of each place none but those of places after it."""
    if scores.dim() < 3 or not scores.shape[-1] == scores.shape[-2] > 2:
        return False
    seen = (scores > -inf).reshape(-1, *scores.shape[-2:]).any(0)
    return bool(seen.any() and not seen.tril().any())


def _underflown_divisor(func, spans):
    """The smallest size other than 0 in a divisor that is 0 in places, if any eps would replace it.
    Else 0."""
    if str(func) != "aten.div.Tensor" or len(spans) != 2 or 0 not in spans[1][1]:
        return 0
    divisor = numbers_of(spans[1][0]).abs()
    least = float(torch.where(divisor == 0, inf, divisor).amin())
    return least if least < eps_for(divisor) else 0
