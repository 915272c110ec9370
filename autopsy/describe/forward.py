"""
Forward: what do the forward passes of a step compute, and what depends on what?
"""

from collections import Counter
from contextlib import suppress

import torch
from torch import nn

from ..tensors import extent, few, storage_of
from ..watch.dimensions import viewed
from .trace import LINEAR, about, listed

LISTED = 6
BATCH_NORM = nn.modules.batchnorm._BatchNorm
OVER = {  # function: the position of its dimension among the arguments
    "mean": 1, "sum": 1, "std": 1, "var": 1, "amax": 1, "amin": 1, "max": 1, "min": 1,
    "softmax": 1, "log_softmax": 1, "logsumexp": 1, "cumsum": 1, "prod": 1,
    "norm": 2, "vector_norm": 2, "normalize": 2,
}  # fmt: skip
ORDERED = (nn.RNNBase, nn.MultiheadAttention)  # batch_first says which dimension is which


def of_forward(trace, told):
    """Lines about the modules that were called, but not those that were told: {module: the spans of
    what it is given}."""
    outermost = [c for c in trace.modules if c.is_outermost and [*c.module.parameters()]]
    for called in {c.module: c for c in outermost if c.module not in told}.values():
        told[called.module] = [*map(extent, called.given)]
        yield f"{called.title} is given {listed(called.given) or 'no tensor'}"
        yield f"  and returns {listed(called.out)}"
        with suppress(RuntimeError):  # a graph that the script itself has freed
            yield from [*_dependence(trace, called)]
    yield from _repeated(trace)
    yield from _dimensions(trace)
    yield from _pairs(trace)
    yield from _ordered(trace)
    yield from _attention(trace)
    yield from _across_rows(trace)


def _repeated(trace):
    roots, within = {}, Counter()  # outermost: [its calls, those of each within it]
    for c in trace.modules:  # in the order in which they end
        within[c.module] += 1
        if c.is_outermost:
            root = roots.setdefault(c.module, [0, Counter()])
            root[0] += 1
            root[1] += within
            within = Counter()
    called = {c.module for c in trace.modules}
    titles = {c.module: c.title for c in trace.modules}
    used = {id(p) for made in trace.calls if made.call for p in made.given}
    for root, (n, times) in roots.items():
        own = [m for m in root.modules() if [*m.parameters(recurse=False)]]
        often = [f"{titles[m]} {times[m] / n:g} times" for m in own if times[m] > n]
        if often:
            yield f"called in one call of its network: {few(often, LISTED)}"
        idle = [m for m in own if m not in called]
        idle = [m for m in idle if used.isdisjoint(map(id, m.parameters(recurse=False)))]
        if idle:
            names = (trace.names.get(m, type(m).__name__) for m in idle)
            yield f"has weights, and is not called in this step: {few(names, LISTED)}"


def _dimensions(trace):
    """Views in which a dimension keeps its size and its place, and is another one; and tables whose
    rows are added along a dimension."""
    other, added = {}, {}
    tables = {storage_of(t): name for name, t in _tables(trace)}
    for made in trace.calls:
        if made.name in ("view", "reshape"):
            with suppress(Exception):  # a nested tensor has no shape
                other.update(_other_dimensions(made))
        elif made.name.strip("_") in ("add", "iadd", "radd") and len(made.given) > 1:
            for t in made.given[:2]:
                name, out = tables.get(storage_of(t)), [*made.out[0].shape]
                if name and 1 < t.dim() == len(out) and [*t.shape] != out:
                    added[f"{name}, {[*t.shape]} to {out} ({made.line})"] = True
    if other:
        yield f"a view: {few(other, LISTED, '; ')}"
    if added:
        yield f"added with broadcasting: {few(added, LISTED, '; ')}"


def _other_dimensions(made):
    shape, out = [*made.args[0].shape], [*made.out[0].shape]
    names = viewed(made.func, made.args, made.kwargs, range(len(shape)))
    return {
        f"{made.at} of {shape} is {out}, whose dimension {d} is another {n}": True
        for d, (n, m) in enumerate(zip(shape, out, strict=False)) if n == m > 1 and names[d] != d
    }  # fmt: skip


def _tables(trace):
    """(name, tensor) of the weights and buffers of all modules that were called."""
    for module in dict.fromkeys(c.module for c in trace.modules):
        prefix = trace.names.get(module, "")
        mine = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        for name, t in mine:
            yield ".".join(filter(None, (prefix, name))), t


def _pairs(trace):
    """A linear layer that is given what another has made."""
    found = {}
    for made in trace.calls:
        before = trace.source(trace.input_of(made)) if made.name in LINEAR else None
        if before and before.name in LINEAR and before.call == made.call:
            first, second = (m.module or m.name for m in (before, made))
            found[f"{first} -> {second} ({made.line})"] = True
    if found:
        yield f"linear after linear, with no nonlinearity: {few(found, LISTED)}"


def _ordered(trace):
    """Which dimension of a recurrent layer, or an attention, is which?"""
    for called in {c.module: c for c in trace.modules if isinstance(c.module, ORDERED)}.values():
        shape = [*called.given[0].shape] if called.given else []
        if len(shape) == 3:
            first = called.module.batch_first
            samples, positions = shape[:2] if first else shape[1::-1]
            yield (
                f"{called.title} with batch_first={first} is given {shape}: {samples} samples of "
                f"{positions} positions"
            )


def _attention(trace):
    """Axes of softmax, masks of attention."""
    found = {}
    for made in trace.calls:
        kwargs, shape, text = made.kwargs, [*made.given[0].shape], ""
        if made.name in ("softmax", "log_softmax"):
            text = f"{made.name} over dimension {(*made.args[1:], kwargs.get('dim'))[0]} of {shape}"
        elif made.name == "scaled_dot_product_attention":
            mask = kwargs.get("attn_mask", (*made.args[3:], None)[0])
            places = f"{shape[-2]} places of {made.given[1].shape[-2]}"
            text = f"attention of {places}, {_mask(mask, kwargs, 'True is seen')}"
        elif made.name == "multi_head_attention_forward":
            mask, padding = (kwargs.get(key) for key in ("attn_mask", "key_padding_mask"))
            places = f"{shape[0]} places of {made.given[1].shape[0]}"
            text = f"attention of {places}, {_mask(mask, kwargs, 'True is hidden')}"
            if padding is not None:
                text += f", padding mask {_mask(padding, {}, 'True is hidden')}"
        if text:
            found[f"{text} ({made.line})"] = True
    yield from [*found][:LISTED]


def _across_rows(trace):
    """What is computed over the dimension of the samples, and not over all."""
    rows = {t.shape[0] for c in trace.modules if c.is_outermost for t in c.given if t.dim()} - {1}
    found = {}
    for made in trace.calls:
        x, at = made.given[0], OVER.get(made.name)
        if at is None or x.dim() < 2 or x.shape[0] not in rows or not made.out[0].requires_grad:
            continue
        dims = made.kwargs.get("dim", (*made.args[at:], None)[0])
        dims = dims if isinstance(dims, tuple | list) else [dims]
        if {0, -x.dim()} & {*dims} and len(dims) < x.dim():
            found[f"{made.at} of {[*x.shape]}"] = True
    if found:
        yield f"over dimension 0, that of the samples: {few(found, LISTED, '; ')}"


def _mask(mask, kwargs, meaning):
    if kwargs.get("is_causal"):
        return "causal"
    if mask is None:
        return "no mask"
    return f"{about(mask)}{f' ({meaning})' if mask.dtype is torch.bool else ''}"


def _dependence(trace, called):
    """On which rows, and which positions, of its first layer does one row of the result depend?"""
    out = next((t for t in called.out if t.requires_grad and t.dim() > 1), None)
    maker, first = next(
        ((made, t) for made in trace.calls[called.since :] for t in made.out
         if t.requires_grad and any(isinstance(x, nn.Parameter) for x in made.given)),
        (None, None),
    )  # fmt: skip
    if out is None or first is None or out.shape[0] != first.shape[0] or len(out) < 2:
        return
    n, row = len(out), 1
    rows = _reached(out[row], first).any(1).nonzero().flatten().tolist()
    norm = any(isinstance(m, BATCH_NORM) and m.training for m in called.module.modules())
    on = f"{len(rows)} of {n} rows"
    on = f"all {n} rows{' (BatchNorm)' * norm}" if len(rows) == n else on
    if len(rows) != 1:
        yield f"  row {row} of the result depends on {on}"
    is_sequence = out.dim() == 3 == first.dim() and not maker.name.startswith("conv")
    if is_sequence and out.shape[1] == first.shape[1] > 2:
        length = out.shape[1]
        at = length // 2
        seen = _reached(out[row, at], first)[row].view(length, -1).any(1).nonzero().flatten()
        span = f"{int(seen[0])} to {int(seen[-1])}" if len(seen) else "none"
        yield f"  place {at} of {length} in dimension 1 depends on places {span}"


def _reached(part, first):
    """Which numbers of the first layer's result have a part in it, row by row."""
    weights = torch.arange(1, part.numel() + 1, device=part.device).sin().view_as(part).to(part)
    (slope,) = torch.autograd.grad(part, first, weights, retain_graph=True, allow_unused=True)
    return torch.zeros_like(first).flatten(1) > 0 if slope is None else slope.flatten(1) != 0
