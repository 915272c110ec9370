"""
Loss: of which terms is it the sum, what are they given, and what is computed and in none of them?
"""

from contextlib import suppress
from itertools import islice

import torch
from torch import Tensor

from ..tensors import few, storage_of, type_of
from ..watch.graph import nodes_of
from .trace import LOGIC, about, factor_of, number

SUMS = ("add", "radd", "iadd", "sub", "rsub", "isub")
BROADCAST = ("add", "radd", "sub", "rsub", "mul", "rmul", "div", "truediv", "maximum", "minimum",
             "min", "max", "where")  # fmt: skip
TERMS = 12
STEPS = 5  # from a term to what it compares
LISTED = 6
USUAL = {"reduction": "mean", "label_smoothing": 0.0}


def of_loss(trace, losses, params):
    """Lines about the losses of a step, and about the functions of losses that it has called."""
    told = {}  # the terms, without their values: the first of these losses, and how many
    for loss in losses:
        terms = [*islice(_terms(trace, loss, trace.made.get(loss)), TERMS)]
        at = tuple(made.at if made else "" for _, _, made in terms)
        told.setdefault(at, [loss, terms, 0])[2] += 1
    for loss, terms, times in told.values():
        values = " + ".join(_term(*term) for term in terms)
        more = f" (and {times - 1} more)" if times > 1 else ""
        yield f"loss {number(loss.sum()):.4g} = {values}{more}"
        for _, _, made in terms:
            yield from _compared(trace, made)
        with suppress(RuntimeError):  # a graph that the script itself has freed
            norms = [_gradient(factor, t, params) for factor, t, _ in terms]
            if len(terms) > 1:
                norms = ", ".join(f"{norm:.2g}" for norm in norms)
                yield f"  gradient norm of each term: {norms}"


def of_functions(trace, nodes):
    """Lines about the functions of losses that are called on the way to the losses."""
    called = {}  # line: calls
    for made in trace.calls:
        if made.is_loss and (made.out[0].grad_fn in nodes or not made.out[0].requires_grad):
            called.setdefault(made.at, []).append(made)
    for at, calls in islice(called.items(), LISTED):
        made, times = calls[0], f" (the first of {len(calls)})" if len(calls) > 1 else ""
        value = number(made.out[0])
        said = {k: v for k, v in made.kwargs.items() if isinstance(v, int | float | str)}
        ignored = said.pop("ignore_index", None)
        said = [f", {k}={v}" for k, v in said.items() if v and USUAL.get(k) != v]
        value = type_of(made.out[0]) if value is None else f"{value:.4g}"
        yield f"{at} = {value}{times}{''.join(said)}"
        for name, t in zip(("input", "target"), made.given, strict=False):
            trains = ", and it has a gradient, too" * (name == "target" and t.requires_grad)
            yield f"  {name} {_origin(trace, t)}{trains}"
        yield from _shifts(trace, made.given[-1])
        if ignored is not None and not made.given[1].is_floating_point():
            left_out = int((made.given[1] == ignored).sum())
            yield f"  ignore_index={ignored} leaves out {left_out} of {made.given[1].numel()}"
        for key, t in made.kwargs.items():
            if isinstance(t, Tensor) and not any(t is other for other in made.given[:2]):
                yield f"  {key} {about(t)}"


def _compared(trace, made):
    """Lines about the two tensors that a term compares, whose loss is written by hand."""
    way = []
    while made and not made.is_loss and len(way) < STEPS:
        way.append(made)
        several = [t for t in made.given if t.numel() > 1]
        if len(several) > 1:
            if made.name.strip("_") in BROADCAST:
                names = " <- ".join(m.name.strip("_") for m in way)
                sides = "; and ".join(_origin(trace, t) for t in several[:2])
                yield f"  {names} of {sides}"
            return
        made = trace.source(trace.input_of(made))


def _origin(trace, t):
    """A tensor, what has made it, and which networks are given it too."""
    way = "".join(f" <- {m.name.strip('_')}" for m in trace.way(t))
    networks = [c for c in trace.modules if c.is_outermost and [*c.module.parameters()]]
    given = dict.fromkeys(c.title for c in networks if any(_is_same(x, t) for x in c.given))
    also = f", which {few(given, 3)} is given too" if given else ""
    graph = " with a graph" if t.requires_grad and not way else ""
    return f"{about(t)}{graph}{way}{also}"


def _shifts(trace, target):
    """A line for each row of whole numbers that a network is given: is the target its next ones?"""
    for called in trace.modules:
        for x in called.given if called.is_outermost and not target.is_floating_point() else ():
            if x.is_floating_point() or x.numel() != target.numel() or _is_same(x, target):
                continue
            if x.dim() > 1 and x.shape[-1] > 2:
                y = target.reshape(x.shape)
                pairs = (x[..., 1:], y[..., :-1]), (x, y), (x[..., :-1], y[..., 1:])
                shares = (f"{float((a == b).float().mean()):.0%}" for a, b in pairs)
                next_one, same, before = shares
                yield (
                    f"  of the target {next_one} are the next number of what {called.title} is "
                    f"given, {same} the same, {before} the one before"
                )


def _is_same(x, t):
    """Whether they are the same numbers in memory, in one shape or another."""
    alike = x.numel() == t.numel() and x.storage_offset() == t.storage_offset()
    return alike and storage_of(x) is storage_of(t)


def _terms(trace, t, made, factor=1.0):
    """(factor, tensor, what made it) of each term of a sum."""
    made = trace.source(made)
    name = made.name.strip("_") if made else ""
    if name in SUMS and made.out[0].numel() == 1:
        signs = (-1, 1) if name == "rsub" else (1, -1 if "sub" in name else 1)
        for sign, x in zip(signs, made.args[:2], strict=True):
            if isinstance(x, Tensor):
                yield from _terms(trace, x, trace.maker(x, made), factor * sign)
    elif made and (found := factor_of(made)):
        yield from _terms(trace, found[1], trace.maker(found[1], made), factor * found[0])
    else:
        yield factor, t, made


def _term(factor, t, made):
    times = f"{factor:.4g} * " if factor != 1 else ""
    at = f" ({made.at})" if made else ""
    without = "" if t.requires_grad else " without a gradient"
    return f"{times}{float(t.detach().float().sum()):.4g}{at}{without}"


def _gradient(factor, t, params):
    if not t.requires_grad:
        return 0.0
    found = torch.autograd.grad(t.sum(), params, retain_graph=True, allow_unused=True)
    norms = [g.to_dense().float().norm() for g in found if g is not None]
    return abs(factor) * float(torch.stack(norms).norm()) if norms else 0.0


def idle_in(trace, losses):
    """What has a graph and is in none of these losses: {line: True}"""
    nodes = {*nodes_of(losses)}
    idle = [m for m in trace.calls if m.grad and any(t.grad_fn for t in m.out)]
    idle = [m for m in idle if not m.is_check]
    idle = [m for m in idle if all(t.grad_fn not in nodes for t in m.out)]
    slopes = [m for m in trace.calls if m.name == "grad"]  # of a penalty
    handed_on = {id(t) for m in (*idle, *slopes, *_ends(trace)) for t in m.given}
    last = [m for m in idle if not any(id(t) in handed_on for t in m.out)]
    return dict.fromkeys(f"{m.at}, {type_of(m.out[0])}" for m in last)


def _ends(trace):
    """Calls at which a graph ends, and whose numbers are used."""
    used = {id(t) for m in trace.calls if m.grad for t in m.given}
    for m in trace.calls:
        cut = any(t.requires_grad for t in m.given) and not any(t.requires_grad for t in m.out)
        is_shape = m.name.endswith(("_like", "_as")) or m.name.startswith("new_")
        goes_on = any(t.is_floating_point() and id(t) in used for t in m.out)
        if cut and goes_on and not (is_shape or m.is_check):
            yield m


def of_rest(trace):
    """A line for where a graph ends, and one for what broadcasting makes."""
    ends = {f"{m.at}{'' if m.grad else ' under no_grad'}": True for m in _ends(trace)}
    if ends:
        yield f"the graph ends, and its numbers are used: {few(ends, LISTED, '; ')}"
    one = {
        f"{m.at}, {about(m.out[0])}": True
        for m in trace.calls
        if m.name.strip("_") in LOGIC and m.out[0].numel() > 2 and not m.is_check
        and bool((m.out[0] == m.out[0].flatten()[0]).all())
    }  # fmt: skip
    if one:
        yield f"the same everywhere: {few(one, LISTED, '; ')}"
    wide = {}
    for m in trace.calls:
        sizes = [t.numel() for t in m.given]
        learns = m.name.strip("_") in BROADCAST and m.out[0].requires_grad
        if learns and len(sizes) > 1 < min(sizes[:2]) and m.out[0].numel() > max(sizes):
            shapes = " and ".join(str([*t.shape]) for t in m.given[:2])
            wide[f"{m.at} of {shapes} is {[*m.out[0].shape]}"] = True
    if wide:
        yield f"larger than what it is made of: {few(wide, LISTED, '; ')}"
