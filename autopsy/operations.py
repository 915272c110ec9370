"""
Operations: what is known of an aten operation.

Which arguments it writes, where the batch goes in its results, which indices it takes, and what it
computes in wider types.
"""

import re
from functools import cache
from math import inf
from types import SimpleNamespace

import torch

from .advice import LOG_TARGET, ONLY_LATER, UNDERFLOW, Advice, eps_for
from .facts import Repeat
from .frames import frames_in, line_of
from .tensors import FLOATS, Span, exchange_dtype, extent, flat_tensors, numbers_of

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


def _in_order(index, size):
    """x[:, i] or x[torch.arange(len(x)), i]: the rows stay where they are."""
    return index is None or torch.equal(index.flatten(), torch.arange(size, device=index.device))


# Of operations: the batch does not stay in the results of the first; in those of the second it
# does, in other dimensions.
DROPS = "index$|index_put|masked_s|take|convolution_backward|embedding.*backward|rnn.*backward"
STAYS = "nll_loss|embedding$|ctc_loss|linalg"
MATMUL = "(b|add|badd)?b?mm|(add)?mv"
KINDS = {  # what an operation does, by its name
    "reorders": ".*index|.*(index_select|gather|take|sort|topk|flip|roll|masked_select).*",
    "sums": f"{MATMUL}|sum|mean|dot|linear|convolution|(index|scatter)_add",
    "constant": "(masked_|index_)?fill|(new_)?full(_like)?|scalar_tensor",
    "empty": "(new_)?empty(_like|_strided)?",
    "joins": "stack|cat",
    "copies": "to_copy|clone|copy",
    "loads": "set",
    "fresh": "lift_fresh",
    "takes_masks": ".*(softmax|logsumexp|attention).*",
}
WRITERS = "^$|fill|full|where|tensor|set|copy|pad|put|nan_to_num"  # functions: the script's own
OVERWRITES = ("copy", "fill", "zero", "normal", "uniform", "random", "bernoulli", "exponential")


@cache
def rule_of(func):
    """What the dispatch needs to know of an operation, computed once."""
    schema = func._schema
    name = schema.name.partition("::")[2].strip("_")
    pointwise = torch.Tag.pointwise in func.tags or name == "copy"
    names = [a.name for a in schema.arguments]
    writes = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    if re.search("(native|cudnn|miopen)_batch_norm$", name):  # the schema does not say so
        writes = ["running_mean", "running_var"]

    def follow(given, k, number, source, d, t):
        """The dimension of result `number` that is dimension `d` of input k (from the end)."""
        size = source.shape[d]  # before d moves
        if pointwise:
            d += t.dim() - source.dim()
        elif re.fullmatch(MATMUL, name):
            if k < -2 or d == max(0, source.dim() - (1 if k == -2 else 2)):
                return None  # summed over
        elif name == "index" and d == 0 and _in_order(given["indices"][0], size):
            pass
        elif name in ("index", "index_select") and source is not given["self"]:
            # a number for each sample, looked up in a table
            indices = given.get("indices", [given.get("index")])
            at = [p for p, index in enumerate(indices) if index is not None]
            if len(at) > 1:
                return None
            d += at[0] if name == "index" else given["dim"] % given["self"].dim()
        elif re.search(DROPS, name) or (number and re.search("(?<!attention)_backward$", name)):
            return None  # the slope of a weight
        elif "dim" in names or "dims" in names:
            dims = given.get("dim", given.get("dims"))
            dims = [dims] if isinstance(dims, int) else dims or range(source.dim())
            dims = [x % max(source.dim() + (name == "stack"), 1) for x in dims]
            if name == "stack":
                d += dims[0] <= d
            elif d in dims:
                return None
            elif t.dim() < source.dim():
                d -= sum(x < d for x in dims)
        elif t.dim() != source.dim() and not re.search(STAYS, name):
            return None
        return d if 0 <= d < t.dim() and t.shape[d] == size else None

    def picks(given, source, d, outs):
        """Which rows along dimension d of the source the result has, in their order; None: it is no
        such operation, or each column has an order of its own."""
        if source is not given.get("self"):
            return None
        if name in ("sort", "topk") and source.dim() == 1:
            return outs[1].tolist()
        if name == "index_select" and given["dim"] % source.dim() == d:
            return given["index"].tolist()
        if name == "flip" and [x % source.dim() for x in given["dims"]] == [d]:
            return [*range(source.shape[d])][::-1]
        if (
            name == "index"
            and len(given["indices"]) == d + 1
            and not any(index is not None for index in given["indices"][:d])
        ):
            index = given["indices"][d]
            index = index.nonzero().flatten() if index.dtype is torch.bool else index
            return (index % source.shape[d]).tolist() if index.dim() == 1 else None
        return None

    return SimpleNamespace(
        name=name,
        names=names,
        writes=writes,
        pointwise=pointwise,
        follow=follow,
        picks=picks,
        index=INDEX.get(name),
        overwrites=name in OVERWRITES or func._overloadname.endswith("out"),
        bias=int(name.startswith(("addmm", "addmv", "baddbmm"))),
        **{kind: re.fullmatch(words, name) for kind, words in KINDS.items()},
    )


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


def in_wider_types(func, args, kwargs):
    """The operation on the same inputs in fp32, and where that is bad in fp64: Repeats."""
    results = []
    if torch.Tag.nondeterministic_seeded in func.tags or func.namespace != "aten":
        return ()  # it would draw random numbers, or wait for another rank
    for dtype in (torch.float32, torch.float64):
        try:
            wide, named = exchange_dtype((args, kwargs), dtype, FLOATS)
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
    if str(func) not in DIVIDES or not spans or 0 not in spans[-1][1]:
        return ""
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
