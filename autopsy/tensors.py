"""
Tensors: what does a tensor hold?

Its numbers whatever its layout, its lowest and highest, whether these are bad, and the tensors
within a batch of any shape.
"""

import re
from collections import Counter
from collections.abc import Mapping
from math import inf, isfinite
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

LIMIT = 1.8e19  # just under sqrt(3.4e38): the square of anything above is inf in fp32
LARGE = "finite, but its square is not in float32"  # what is beyond LIMIT, in words
MASK = -1e29  # -1e30 and finfo.min stand for -inf in a mask
ALONE = 1e12  # times the median
HALF = (torch.float16, torch.bfloat16)
NARROW = (*HALF, torch.float8_e4m3fn, torch.float8_e5m2)
FLOATS = (*NARROW, torch.float32, torch.float64)
USUAL = {*HALF, torch.float32, torch.float64}
PLAIN = (Tensor, nn.Parameter)
ATOMS = (int, float, bool, str, type(None))
STATISTIC = re.compile("(running_mean|running_var|num_batches_tracked)$")  # buffers of a norm


def is_ordinary(t):
    """Whether it holds its numbers itself, as nearly all do: asked first, because it is quick."""
    usual = type(t) in PLAIN and t.dtype in USUAL and t.layout is torch.strided
    return usual and not (is_wrapped(t) or t.is_meta or t.is_nested)


def parts_of(t):
    """The plain tensors that hold its numbers in this process: of a sparse or nested tensor the
    values, of a sharded one this rank's, of one that wraps others (a quantised moment, say) these,
    of one without memory none."""
    while is_wrapped(t):  # within torch.func's vmap or grad
        t = get_unwrapped(t)
    if type(t) not in PLAIN:
        if is_lazy(t):
            return []
        if hasattr(t, "get_mask"):
            return [t.get_data()[t.get_mask()]]
        if hasattr(t, "to_local"):
            return parts_of(t.to_local())
        if hasattr(t, "trigger_wait"):  # a collective that is under way
            return parts_of(t.trigger_wait())
        if is_traceable_wrapper_subclass(t):
            names, _ = t.__tensor_flatten__()
            return [part for name in names for part in parts_of(getattr(t, name))]
    if t.is_meta or "float4" in str(t.dtype):  # two in a byte: torch reads none of them
        return []
    if t.layout is torch.strided and not t.is_nested:
        return [t]
    if t.layout is torch._mkldnn:
        return [t.to_dense()]
    return [t._values() if t.layout is torch.sparse_coo else t.values()]


def numbers_of(t):
    """The same as one tensor. Of several parts those that are floating-point, and wider than a
    byte: a block of quantised numbers is as good as its scale."""
    if is_ordinary(t):
        return t
    parts = parts_of(t)
    if len(parts) == 1:
        return parts[0]
    wide = [part for part in parts if part.is_floating_point() and part.itemsize > 1]
    wide = [part.flatten().float() for part in wide]
    return torch.cat(wide) if wide else torch.zeros(0, device="cpu")


def storage_of(t):
    """One object for all views of a storage. It lives as long as the storage."""
    with torch._C.DisableTorchFunctionSubclass():  # a lazy parameter refuses otherwise
        return [*parts_of(t), t][0].untyped_storage()


def is_part(t):
    """A view of a piece of its storage."""
    return numbers_of(t).nbytes < storage_of(t).nbytes()


def spans_of(tensors):
    """(tensor, extent) of those with real numbers."""
    return [(t, extent(t)) for t in tensors if t.is_floating_point() or t.is_complex()]


class Span(NamedTuple):
    """The lowest and the highest number of a tensor: NaN in both if there is one."""

    low: float = 0.0
    high: float = 0.0

    @property
    def is_bad(self):
        return not (isfinite(self.low) and isfinite(self.high))

    @property
    def is_large(self):
        """Finite, and its square is not."""
        return LIMIT < self.largest < inf

    @property
    def is_mask(self):
        """Beyond all use, but only at the negative end: -inf or finfo.min in a mask."""
        return self.low < MASK and self.high <= LIMIT

    @property
    def bad_end(self):
        """As text; of what is finite, the larger one."""
        high = self.high == inf or (not self.is_bad and self.high > -self.low)
        return f"{self.high if high else self.low:.3g}"

    @property
    def largest(self):
        """The largest magnitude."""
        return max(map(abs, self))


@torch.no_grad()
def extent(t):
    """The span of a tensor; 0 to 0 if it has no real numbers."""
    t = numbers_of(t)
    if not t.numel() or not (t.is_floating_point() or t.is_complex()):
        return Span()
    if t.is_complex():
        t = torch.view_as_real(t.resolve_conj())
    elif t.element_size() == 1:
        t = t.float()
    number = torch._C.TensorBase.item  # class Watch replaces Tensor.item
    if t.numel() == 1:
        value = float(number(t))
        return Span(value, value)
    low, high = torch.aminmax(t)
    return Span(float(number(low)), float(number(high)))


def stands_alone(t):
    """Whether the largest number is beyond anything that training does to one among others."""
    sizes = numbers_of(t).detach().abs().flatten().float()
    return sizes.numel() > 1 and bool(sizes.max() > ALONE * sizes.median())


def is_real(x):
    return isinstance(x, int | float) and abs(x) <= LIMIT


def type_of(t):
    """Its dtype and shape; a nested tensor of strided layout has none."""
    shape = ["nested"] if has_no_shape(t) else [*t.shape]
    return f"{str(t.dtype).removeprefix('torch.')}{shape}"


def non_finite(t):
    t = t.detach()
    return (t.float() if t.itemsize == 1 else t).isfinite().logical_not()


def rows_beyond(table):
    """Of a table (an embedding, say) with good rows and bad ones: the numbers of the bad."""
    plain = type(table) in PLAIN and table.layout is torch.strided
    if not plain or table.dim() < 2 or table.element_size() == 1:  # not of shards, nor of fp8
        return []
    rows = non_finite(table).flatten(1).any(1).nonzero().flatten().tolist()
    return rows if len(rows) < len(table) else []


def bad_rows(table):
    """The same as text."""
    rows = rows_beyond(table)
    return f" in rows {few(rows)} of {len(table)}" if rows else ""


def bad_columns(table):
    """Of a table in which each row is bad, but not each column: which columns, as text."""
    if table.dim() != 2 or not (wrong := non_finite(table)).any(1).all():
        return ""
    columns = wrong.any(0).nonzero().flatten().tolist()
    return f" in columns {few(columns)} of {len(wrong[0])}" * (len(columns) < len(wrong[0]))


def range_of(t, span):
    """The extent as text; of what holds NaN, that of its other numbers."""
    t = numbers_of(t)
    real = span.low != span.low and t.is_floating_point()
    if real and (good := t[t == t]).numel():
        return f"nan, else {range_of(good, extent(good))}"
    return f"{span.low:.3g} .. {span.high:.3g}"


def inner_tensors(tree, prefix="", depth=9):
    """(dotted name, tensor) for every tensor in nested mappings, lists, tuples, dataclasses, and in
    the variables of plain objects (a batch of PyG or detectron2)."""
    if isinstance(tree, Tensor):
        yield prefix, tree
        return
    if isinstance(tree, list | tuple):
        tree = dict(enumerate(tree))
    elif not isinstance(tree, Mapping):
        closed = isinstance(tree, nn.Module | type | ModuleType) or depth < 6
        tree = {} if closed else variables_of(tree)
    for key, value in tree.items() if depth else ():
        # optimizer.state is keyed by the parameters themselves
        key = "" if isinstance(key, Tensor) or str(key).startswith("_") else str(key)
        yield from inner_tensors(value, ".".join(filter(None, (prefix, key))), depth - 1)


def variables_of(x):
    """Those of an object, in its slots too."""
    slots = [name for kind in type(x).__mro__ for name in vars(kind).get("__slots__", ())]
    return {n: getattr(x, n) for n in slots if hasattr(x, n)} | getattr(x, "__dict__", {})


def flat_tensors(tree):
    """The tensors among an operation's arguments or results."""
    return [a for a in leaves(tree) if isinstance(a, Tensor)]


def mapped(function, tree, is_leaf=None):
    """tree_map(), to which a torch.Size is a leaf: x.new(torch.Size([10])) makes ten numbers, and
    of a tuple it makes one."""

    def is_whole(x):
        return isinstance(x, torch.Size) or (is_leaf is not None and is_leaf(x))

    return tree_map(function, tree, is_leaf=is_whole)


def leaves(tree):
    """tree_leaves(), faster for what is plain: it runs several times a call."""
    if isinstance(tree, Tensor) or type(tree) in ATOMS:
        return [tree]
    if type(tree) is dict:
        tree = [*tree.values()]
    if type(tree) in (tuple, list):
        return [x for part in tree for x in leaves(part)]
    return tree_leaves(tree)


def floats_in(tree):
    """Those of them that are floating-point."""
    return [t for t in flat_tensors(tree) if t.is_floating_point()]


def has_no_shape(t):
    return t.is_nested and t.layout is torch.strided


def batched(tensors):
    """Those with a batch dimension: a row of real numbers may be one observation."""
    plain = (t for t in tensors if not has_no_shape(t))
    return (t for t in plain if t.dim() > 1 or (t.dim() and not t.is_floating_point()))


def batch_size_of(tensors):
    """Most tensors have the batch first, or after time; 0: there are none."""
    # of two dimensions of real numbers the second is no time, but columns
    shaped = [t for t in tensors if not has_no_shape(t)]
    shaped = [t for t in shaped if not _is_adjacency(t, shaped)]
    heads = [t.shape[: 1 if t.dim() == 2 and t.is_floating_point() else 2] for t in shaped]
    counts = Counter(n for head in heads for n in dict.fromkeys(head))
    return max(counts, key=counts.get, default=0)  # of equals the one that came first


def batch_shape(tensors):
    """The shape of the first one with a batch dimension; (): there is none."""
    several = [*batched(tensors)]
    return next((t.shape for t in several if not _is_adjacency(t, several)), ())


def _is_adjacency(t, others):
    """Whether it is a matrix over the second dimension of another one: a graph of the nodes (batch,
    nodes, ...) has no samples."""
    if t.dim() != 2 or len(t) != t.shape[1] or not t.is_floating_point():
        return False
    return any(x.dim() > 2 and x.shape[1] == len(t) != len(x) for x in others)


def exchange_dtype(tree, to, of, convert=None):
    """The same with every tensor, and every dtype, that is one of `of` exchanged for `to`.
    `convert`: how a tensor becomes one of the other dtype; as a rule it is copied."""
    convert = convert or (lambda t: t.to(to, copy=True))

    def one(v):
        if isinstance(v, Tensor):
            return convert(v) if v.dtype in of else v
        return to if isinstance(v, torch.dtype) and v in of else v

    return mapped(one, tree)


def running_statistics(net):
    """Running statistics: buffers that can never hold a mask or an inf on purpose."""
    return {n: b for n, b in net.named_buffers() if STATISTIC.search(n)}


def is_sharded(t):
    """Whether ranks hold parts of it: to read it is a collective."""
    return hasattr(t, "to_local")


def few(items, n=8, between=", "):
    items = list(items)
    more = f" and {len(items) - n} more" if len(items) > n else ""
    return between.join(map(str, items[:n])) + more


def device_of(tree):
    return next((t.device for t in flat_tensors(tree)), "cpu")
