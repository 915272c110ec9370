"""
Replay: the step on the tape once more, for the examination.

The calls that lead to a loss become a recorded step, and examine() speaks of it. Whatever the
repeat changes is put back.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import frexp

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from .frames import line_of
from .modes import InDtype
from .names import names_of
from .rerun import Rerun
from .sources import EARLIER, OUTSIDE, UNKNOWN
from .step import StepRecord
from .tape import BACKWARD
from .tensors import NARROW, extent, is_bad, is_mask, storage_of, type_of
from .verdict import examine


def replay(tape, targets, step):
    """examine() what is on the tape, and leave no trace. `targets`: numbers of calls whose results
    are judged, beside the losses."""
    calls = tape.needed(targets)
    called = [x for c in calls for x in (c.function, *tree_leaves(c.args))]
    modules = [x for x in called if isinstance(x, nn.Module)]
    net = _together([getattr(module, "_orig_mod", module) for module in modules])
    params = dict(net.named_parameters())
    within = set(params.values())
    leaves = dict.fromkeys(t for call in calls for _, t in call.given() if t.is_leaf)
    free = [t for t in leaves if t.requires_grad and t not in within]
    params |= {f"{type_of(t)}, number {k}": t for k, t in enumerate(free)}  # in no module
    now = StepRecord(step, net)
    grads = [(t, t.grad) for t in (*params.values(), *leaves)]
    if any(g is not None and is_bad(extent(g)) for _, g in grads):
        # what was made of them, like their norm, is no cause
        backward = max((c.number for c in calls if c.function is BACKWARD), default=0)
        targets = [number for number in targets if number < backward]
    buffers = tuple(b for b in net.buffers() if not b.is_inference())
    # The script's own graph has saved them: its backward may be still to come.
    with torch.autograd._unsafe_preserve_version_counter(buffers):
        try:
            tape.buffers_back(calls)
            return _replayed(tape, calls, targets, net, params, step)
        finally:
            now.restore()
            for p, g in grads:
                p.grad = g


def _replayed(tape, calls, targets, net, params, step):
    """The report on these calls, or None: there is nothing to judge."""
    record = StepRecord(step, net)
    record.rng = next((call.rng for call in calls if call.rng), record.rng)
    record.named = [(f"parameter {name}", p) for name, p in params.items()]
    part, made, scale = [], {}, _loss_scale(calls)
    for call in calls:
        part.append(call)
        ends = call.function is BACKWARD and call.number > tape.latest
        if ends or (targets and call is calls[-1]):
            batch, named = _batch(tape, part)
            record.named += named
            record.keep(*batch, partial(_play, part, made, net, params, targets, scale))
            part = []

    def run_step(batch, fp32):
        if batch is record.batches[0]:
            made.clear()
            for p in params.values():
                p.grad = None
        return batch[-1](fp32)

    sharded = any(hasattr(p, "to_local") for p in params.values())
    if not record.batches or (sharded and targets):  # one rank alone has read it
        return None
    if sharded:  # all ranks do the same, once: its collectives then meet
        birth = Rerun(run_step, record, net, {}).watch()
        return verdict_on_birth(birth) if birth.op else None
    kinds = [dtype for call in calls for _, dtype in call.autocast]
    kinds += [*(p.dtype for p in params.values()), torch.float32]
    precision = str(kinds[0]).removeprefix("torch.")
    report = examine(run_step, record, net, precision=precision, scale=scale)
    p = params.get(report.source.removeprefix("parameter "))
    room = tape.rooms.get(storage_of(p)) if p is not None and p._version == 0 else None
    if room:
        fix = "initialise it: torch.empty leaves what was in memory"
        report = replace(report, names=(report.source, f"never written since {room}"), fix=fix)
    for name, b in net.named_buffers():
        made_by = tape.known.get(b) if is_bad(extent(b)) else None
        if not made_by:
            continue
        line, number = line_of(made_by.frames), made_by.number
        guilty = report.source == f"buffer {name}"
        if guilty and tape.holds(number) and number not in targets:
            # made outside of its module: what is bad in it is this very write
            b.nan_to_num_(0.0, 0.0, 0.0)
            why = _replayed(tape, tape.needed([number]), [number], net, params, step)
            if why and why.op and not why.source:
                return replace(why, names=(*why.names, f"it went into {report.source}"))
        if not report.source and f"(buffer {name})" in " ".join(report.inputs):
            names = (*report.names, f"buffer {name} was written at {line}")
            report = replace(report, names=names)
        loaded = report.source == OUTSIDE and report.line == line  # a checkpoint
        if loaded or guilty:
            fix = "mend this number where it is made"
            names = (f"buffer {name}", f"made at {line}")
            report = replace(report, verdict="weights", names=names, fix=fix)
    return report


def _batch(tape, calls):
    """Of the tensors that the calls were given: the batch, and others by their names."""
    first = sorted(calls, key=lambda call: (not call.shape, not call.grad))  # of modules
    names = {t: name for call in reversed(first) for name, t in call.given()}
    given = dict.fromkeys(t for call in first for _, t in call.given())
    given = [t for t in given if t.grad_fn is not None or not t.requires_grad]
    shape = first[0].shape
    batch, named = [], []
    for t in given:
        # in time-major data the batch comes second; what differs in the first dimension alone
        # is the data set that the batch was cut from
        second = t.dim() > 2 and t.shape[1:2] == shape[1:2] and t.shape[1:] != shape[1:]
        like = not shape or t.shape[:1] == shape[:1] or second  # (): no module was called
        made = tape.known.get(t)
        early = not made or made.data or made.number <= tape.first
        if not made and t.grad_fn is not None:
            named.append((UNKNOWN, t))
        elif early and t.dim() and like:
            batch.append(t)
            name = names[t].rpartition(".")[2]  # of an argument, or a key: "labels"
            named += [(name, t)] if name.isidentifier() else []
        elif made:
            when = "a tensor before this step" if made.number <= tape.first else EARLIER
            named.append((f"{when} ({line_of(made.frames)})", t))
        else:
            named.append((OUTSIDE, t))
    return batch, named


def verdict_on_birth(birth):
    """The verdict on what was seen while every operation was watched."""
    half = "float16" in birth.result and not birth.widened
    finite = not birth.source and (half or birth.widened == "finite in float32")
    verdict = birth.origin or ("precision" if finite else "divergence")
    precision = birth.result.partition("[")[0]
    return replace(birth, verdict=verdict, precision=precision, repeated=False)


def _together(modules):
    """One module that holds these, by the names that the script has for them. A single one without
    an owner is itself."""
    inner = {m for root in modules for m in root.modules() if m is not root}
    outer = [root for root in dict.fromkeys(modules) if root not in inner]
    names = names_of(outer)
    if len(outer) == 1 and not names[outer[0]]:
        return outer[0]
    net = nn.Module()
    for module in outer:
        *path, name = (names[module] or type(module).__name__).split(".")
        at = net
        for part in path:
            if part not in at._modules:
                at.add_module(part, nn.Module())
            at = at._modules[part]
        at.add_module(name + (f"_{len(at._modules)}" if name in at._modules else ""), module)
    return net


def _play(calls, made, net, params, targets, scale, fp32):
    """For examine(): these calls once more; what is judged, and the gradients."""
    with InDtype(torch.float32, NARROW, net) if fp32 else nullcontext():
        for call in calls:
            call.repeat(made)
    judged = [t for m, t in made.items() if m.number in targets]
    if len(judged) > 1:  # whatever was made: there may be masks
        judged = [t for t in judged if not is_mask(extent(t))]
    backward = calls[-1].function is BACKWARD
    roots = [made[m] for m in calls[-1].uses() if m in made] if backward else []
    bad = [t for t in (*judged, *roots) if is_bad(extent(t))]
    loss = (bad or roots or judged or [torch.zeros((), device="cpu")])[0].detach()
    return loss / scale, {name: p.grad for name, p in params.items()}


def _loss_scale(calls):
    """The power of two by which the script multiplies its loss before the backward, or 1."""
    roots = {m.number for call in calls if call.function is BACKWARD for m in call.uses()}
    losses = [call for call in calls if call.number in roots]
    products = [call for call in losses if "mul" in getattr(call.function, "__name__", "")]
    factors = [x for call in products for x in call.args if type(x) in (int, float)]
    return max([1.0, *(x for x in factors if x >= 8 and frexp(x)[0] == 0.5)])
