"""
Autopsy: find the operation that made the first bad number, and say which of five things it was.

A rejected step tells that something is wrong, not what. The loss names nobody; a forward hook names the module that
*received* the inf (between two Linears, `log(h * 0 - 1)` makes the second one look guilty); autograd's anomaly mode
passes over inf, and in fp16 it shouts at every calibration overflow. And `sqrt` at 0 has a finite loss: only its
backward is infinite. So, after the fact, when time does not matter, the step is put back and run again:

    record = StepRecord(step, net)            before the forward: RNG states and buffers are copied
    record.keep(images, labels)               each micro-batch, by reference, as the loader gave it
    report = examine(run_step, record, net)   after a rejected step; the weights are still those from before it

1. Weights, buffers or optimizer state already bad?                         -> weights
2. A value in the batch bad, or a label out of range?                       -> data
3. Run again under a dispatch mode that looks at the result of every aten operation, forward and backward.
   Nothing bad this time?                                                   -> not reproducible
   A mean over labels that are all ignored, 0 / 0?                          -> data
4. Run again in fp32.        Finite?   -> precision        Bad as well?     -> divergence

An operation with good inputs and a bad result is a birth. Births are only suspects: every bad result inherits those of
its inputs, and the guilty one is the first among the ancestors of the loss (or, if that is finite, of the gradients).
So what is swallowed on the way is never blamed: -inf written by a mask and turned to 0 by softmax, log(0) behind a
`where`, the padding of a max-pool. "Bad" is NaN, inf, or beyond 1.8e19, whose square is inf in fp32.

The report says module, operation, line of source, samples, and the line to try. A capsule holds the step, the weights
and the report; on another machine, a CPU too, it gives the verdict again. This file does not cure and does not decide
when to look. To copy it: it needs torch, nothing else. `python autopsy.py` shows one overflow found and healed.
"""
from __future__ import annotations

import gc
import os
import random
import re
import runpy
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.module_tracker import ModuleTracker

LIMIT = 1.8e19  # just under sqrt(3.4e38)
HALF = (torch.float16, torch.bfloat16)
IGNORED = -100  # cross_entropy's default ignore_index
VERDICTS = {  # and what to try; the gravest first: when ranks differ, that one counts
    "data": "look at these samples; leave them out",
    "weights": "--resume last_good.pt, and look at what the steps before this one did",
    "divergence": "--resume last_good.pt with a lower --lr, a longer --warmup-updates, --clip-grad 1.0",
    "precision": "x.float() before that line, or --precision bf16",
    "not reproducible": "the same step once more with --deterministic; if it recurs, suspect this machine's hardware",
}
FRAGILE = {  # operations whose result or slope is bad at some ordinary number, and what to write instead
    "sqrt": "sqrt has no finite slope at 0: sqrt(x + eps)",
    "rsqrt": "rsqrt of 0 or less: rsqrt(x + eps)",
    "log": "log of 0 or less: log(x.clamp(min=eps))",
    "div": "division by zero: divide by x + eps",
    "reciprocal": "division by zero: add an eps",
    "pow": "a power of 0 or of a negative base: clamp the base",
    "exp": "exp beyond 88 is inf: clamp before it",
    "acos": "no finite slope at -1 and 1: clamp inside",
    "softmax": "softmax over a wholly masked row",
    "log_softmax": "log_softmax over a wholly masked row",
    "nll_loss_forward": "a mean over no label at all: divide the sum of the losses by max(1, number of labels)",
    "nll_loss2d_forward": "a mean over no label at all: divide the sum of the losses by max(1, number of labels)",
}


# --- The evidence

class StepRecord:
    """What is needed to run one step again, apart from the weights (a rejected step has not touched those).

    Create it before the step's first forward; keep() every micro-batch with the labels as they came, and the samples'
    indices in the data set where they are known. Costs a copy of the buffers and the RNG states; no sync.
    """

    def __init__(self, step: int, net: nn.Module, *, rank: int = 0):
        self.step, self.rank, self.net = step, rank, net
        self.device = next(net.parameters()).device
        self.buffers = {name: b.detach().clone() for name, b in net.named_buffers()}
        self.rng = rng_states(self.device)
        self.batches: list[tuple[Any, ...]] = []
        self.indices: list[list[int] | None] = []

    def keep(self, *batch: Any, indices: Iterable[int] | None = None) -> None:
        self.batches.append(batch)
        self.indices.append(None if indices is None else [int(i) for i in indices])

    @torch.no_grad()
    def restore(self) -> None:
        """RNG and buffers as they were before the step; no gradients."""
        set_rng_states(self.rng, self.device)
        for name, b in self.net.named_buffers():
            b.copy_(self.buffers[name])
        self.net.zero_grad(set_to_none=True)

    def indices_of(self, micro_batch: int, samples: tuple[int, ...]) -> tuple[int, ...]:
        """Where in the data set these samples of a micro-batch are, if that is known."""
        known = self.indices[micro_batch] if samples else None
        return tuple(known[i] for i in samples) if known else ()


def rng_states(device: torch.device | str) -> dict[str, Any]:
    cuda = torch.device(device).type == "cuda"
    return {"python": random.getstate(), "cpu": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state(device) if cuda else None}


def set_rng_states(states: Mapping[str, Any], device: torch.device | str) -> None:
    random.setstate(states["python"])
    torch.set_rng_state(states["cpu"])
    if states["cuda"] is not None and torch.device(device).type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


# --- The verdict

@dataclass(frozen=True)
class Birth:
    """An operation with good inputs and a bad result. Empty where there is none."""

    op: str = ""  # "aten.log.default"
    module: str = ""  # the innermost module whose forward it belongs to; "" = the model's own
    phase: str = ""  # "forward" or "backward"
    node: str = ""  # backward: autograd's name for the function
    line: str = ""  # file:line in function
    made: str = ""  # what the result holds
    inputs: tuple[str, ...] = ()
    samples: tuple[int, ...] = ()  # positions in the micro-batch

    @property
    def weak(self) -> str:
        """The key of FRAGILE for a node like "LogBackward0" or an operation like "aten.log_.default", or ""."""
        forward = re.sub(r"Backward\d*$", "", self.node).lower()
        own = self.op.partition(".")[2].partition(".")[0].strip("_")
        return forward if forward in FRAGILE else own if own in FRAGILE else ""


@dataclass(frozen=True, kw_only=True)
class Report(Birth):
    """The outcome, with the guilty operation's birth. str(report) is the text for a tired person."""

    verdict: str  # one of VERDICTS
    step: int
    rank: int
    precision: str = ""
    scale: float = 1.0
    symptom: str = ""  # "loss is nan", "gradient of head.weight is inf", ...
    micro_batch: int = 0
    indices: tuple[int, ...] = ()  # of the samples in the data set, if the record knew them
    names: tuple[str, ...] = ()  # bad tensors (weights), or what is wrong with the batch (data)
    norms: tuple[tuple[str, float], ...] = ()  # largest gradients of the re-run, as run_step left them
    unused: tuple[str, ...] = ()  # parameters without a gradient

    @property
    def suggestion(self) -> str:
        if self.verdict == "precision" and self.module:
            return f"--keep-fp32 '{self.module}'"
        if self.verdict in ("data", "divergence") and self.weak:
            return FRAGILE[self.weak]
        return VERDICTS[self.verdict]

    def __str__(self) -> str:
        lines = [f"{self.symptom or 'the step was bad'} at step {self.step} ({self.precision or 'precision not told'}, "
                 f"scale {self.scale:g}, rank {self.rank}) -> {self.verdict}"]
        if self.op:
            node = f" of {self.node}" if self.node else ""
            line = f", {self.line}" if self.line else ""
            lines.append(f"first bad op: {self.op} in {self.module or 'the model itself'} "
                         f"({self.phase}{node}{line}) made {self.made}")
        if self.inputs:
            lines.append("its inputs: " + "; ".join(self.inputs))
        if self.names:
            lines.append(("already bad: " if self.verdict == "weights" else "in the batch: ") + _few(self.names, 5))
        if self.samples:
            known = f" (in the data set: {_few(self.indices)})" if self.indices else ""
            lines.append(f"samples {_few(self.samples)} of micro-batch {self.micro_batch}, rank {self.rank}{known}")
        if self.verdict in ("precision", "divergence"):
            lines.append("the same batch in fp32: " + ("finite" if self.verdict == "precision" else "bad as well"))
        if self.norms:
            lines.append("largest gradients: " + ", ".join(f"{name} {norm:.3g}" for name, norm in self.norms))
        lines.append("causes: " + ", ".join(f"[{'x' if hit else ' '}] {cause}" for cause, hit in self._causes()))
        lines.append(f"try: {self.suggestion}")
        return "\n  ".join(lines)

    def _causes(self) -> list[tuple[str, bool]]:
        """The usual ones, and whether it was that."""
        diverged = self.verdict == "divergence"
        unused = f" (unused: {_few(self.unused)})" if self.unused else ""
        weak = f" ({self.weak})" if self.weak else ""
        return [(f"uninitialised or unused parameters{unused}", self.verdict == "weights"),
                (f"division by zero, log, sqrt{weak}", diverged and bool(weak)),
                ("bad input or label", self.verdict == "data"),
                ("learning rate", diverged and not weak),
                ("dtype", self.verdict == "precision")]


def examine(run_step: Callable[[tuple[Any, ...], bool], Any], record: StepRecord, net: nn.Module, *,
            state: Any = None, num_classes: int | None = None, precision: str = "", scale: float = 1.0) -> Report:
    """Run the recorded step again and say what was wrong. On every rank, each with its own record; then agree().

    `run_step(batch, fp32)`: forward and backward of ONE recorded micro-batch on the bare `net` (no DDP, no compile), no
    optimizer; returns the 0-dim loss before scaling. `fp32=True`: autocast off, half inputs and parameters upcast, no
    loss scale; if that ran on fp32 copies of the parameters, it returns (loss, {name: gradient}). `state`: nest of
    optimizer tensors. `scale`, the step's loss scale, is only told in the report. Labels are integer tensors after the
    first item of a batch, checked if `num_classes` is given. Gradients are None afterwards, RNG untouched, buffers as
    before the step.
    """
    told = {"step": record.step, "rank": record.rank, "precision": precision, "scale": float(scale)}
    if names := _bad_state(net, state):
        return Report(verdict="weights", **told, symptom=f"{names[0]} was bad before the step", names=names)
    for k, batch in enumerate(record.batches):
        names, samples = _bad_batch(batch, num_classes)
        if names:
            return Report(verdict="data", **told, symptom=names[0], names=names, micro_batch=k, samples=samples,
                          indices=record.indices_of(k, samples))
    outside = rng_states(record.device)
    try:
        return _run_again(run_step, record, net, told)
    finally:
        record.restore()
        set_rng_states(outside, record.device)


def _run_again(run_step: Callable, record: StepRecord, net: nn.Module, told: dict[str, Any]) -> Report:
    """The micro-batches up to the first bad one, with every operation watched; then the same ones in fp32."""
    record.restore()
    symptom, birth, ran = "", Birth(), []
    for batch in record.batches:
        ran.append(batch)
        symptom, birth = _watch(run_step, batch, net)
        if symptom:
            break
    unused = tuple(n for n, p in net.named_parameters() if p.requires_grad and p.grad is None)
    norms = [(n, float(p.grad.float().norm())) for n, p in net.named_parameters() if p.grad is not None]
    norms.sort(key=lambda row: row[1] if row[1] <= LIMIT else float("inf"), reverse=True)  # NaN is the largest
    names: tuple[str, ...] = ()
    if not symptom:
        verdict = "not reproducible"
    elif birth.op.startswith("aten.nll_loss") and any((t == IGNORED).all() for t in _integers(ran[-1][1:])):
        verdict, names = "data", (f"every label is ignored ({IGNORED}): their mean is 0/0",)
    else:
        record.restore()
        bad = any(_symptom(_results(run_step, batch, True, net)) for batch in ran)
        verdict = "divergence" if bad else "precision"
        if verdict == "precision" and told["precision"] in ("fp32", "O0"):
            verdict = "not reproducible"  # it was fp32 already: two equal runs, two answers
    last = len(ran) - 1
    return Report(verdict=verdict, **told, **asdict(birth), symptom=symptom, micro_batch=last, names=names,
                  indices=record.indices_of(last, birth.samples), norms=tuple(norms[:5]), unused=unused)


def agree(report: Report) -> Report:
    """The same report on every rank: the gravest verdict's, of the lowest rank that has it. A collective."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return report
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, report)
    return min(every, key=lambda r: (list(VERDICTS).index(r.verdict), r.rank))


# --- Before the re-run: bad weights, bad data

def _bad_state(net: nn.Module, state: Any) -> tuple[str, ...]:
    """Names of bad parameters, optimizer tensors and buffers. A mask may be a buffer; a running statistic is none."""
    named = {f"parameter {n}": p for n, p in net.named_parameters()}
    named |= {f"optimizer state {n}": t for n, t in _named_tensors(state)}
    named |= {f"buffer {n}": b for n, b in net.named_buffers() if "running_" in n or not is_mask(extent(b))}
    return tuple(name for name, t in named.items() if is_bad(extent(t)))


def _bad_batch(batch: tuple[Any, ...], num_classes: int | None) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """(what is wrong with it, in which samples)."""
    names, samples = [], set()
    for k, item in enumerate(batch):
        for t in _tensors(item):
            if is_bad(extent(t)):
                names.append(f"{'target' if k else 'input'} holds {_made(extent(t))}")
                samples.update(_rows(_beyond(t)))
        for t in _integers(item) if k and num_classes is not None else ():
            wrong = ((t < 0) | (t >= num_classes)) & (t != IGNORED)
            names += [f"label {int(v)} is not in 0..{num_classes - 1}" for v in t[wrong].unique()]
            samples.update(_rows(wrong))
    return tuple(names), tuple(sorted(samples))


# --- The re-run: which operation was it

def _watch(run_step: Callable, batch: tuple[Any, ...], net: nn.Module) -> tuple[str, Birth]:
    """Run one micro-batch and look at every operation: (what is bad in the end, or ""; the operation that made it)."""
    size = next((t.shape[0] for t in _tensors(batch) if t.dim()), 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # anomaly mode says that it is slow; it is on for its tracebacks only
        with torch.autograd.set_detect_anomaly(True, check_nan=False), Locator(net, size) as locator:
            results = _results(run_step, batch, False, net)
    birth = locator.blame([results["loss"]]) or locator.blame(results.values())
    return _symptom(results), birth or Birth()


def _results(run_step: Callable, batch: tuple[Any, ...], fp32: bool, net: nn.Module) -> dict[str, Tensor]:
    """Run one micro-batch: {"loss": ..., "gradient of head.weight": ..., ...}."""
    out = run_step(batch, fp32)
    loss, grads = out if isinstance(out, tuple) else (out, {n: p.grad for n, p in net.named_parameters()})
    return {"loss": loss.detach()} | {f"gradient of {n}": g for n, g in grads.items() if g is not None}


def _symptom(results: Mapping[str, Tensor]) -> str:
    """The first bad result, or ""."""
    return next((f"{name} is {_made(extent(t))}" for name, t in results.items() if is_bad(extent(t))), "")


# What a bad tensor descends from: the index of its first birth, or, larger than any, one of these.
LAWFUL = sys.maxsize - 1  # a mask: only large negative values, written on purpose
NOBODY = sys.maxsize  # nothing that this step did


class Locator(TorchDispatchMode):
    """Looks at the result of every aten operation while it is entered; blame(tensors) then names the birth.

    Modules are followed by hooks. For the backward, the autograd graph between a module's inputs and its output is
    marked with the module's name as soon as the module is done: inner ones first, so that what is left over for the
    outer one are its own functional operations.
    """

    def __init__(self, net: nn.Module, batch_size: int = 0):
        super().__init__()
        self.net, self.batch_size = net, batch_size
        self.births: list[Birth] = []
        self._causes: dict[int, int] = {}  # address of a storage: index of the first birth it descends from
        self._stack: list[tuple[str, set[Any]]] = []  # modules under way: name, autograd nodes of the inputs
        self._marked: set[Any] = set()  # autograd nodes that have a module
        self._mark: tuple[str, str, Mapping[str, Any]] = ("", "", {})  # backward: module, node's name, its metadata
        self._handles: list[Any] = []
        self._is_backward = ModuleTracker()  # only for its is_bw

    def __enter__(self) -> Locator:
        for name, module in self.net.named_modules():
            enter = partial(self._enter_module, name)
            self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave_module, always_call=True))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        while self._handles:  # DDP keeps some of the graph's nodes alive: nothing of ours may stay on them
            self._handles.pop().remove()
        self._marked.clear()

    def _enter_module(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._stack.append((name, {t.grad_fn for t in _tensors((args, kwargs))}))

    def _leave_module(self, module: nn.Module, args: Any, out: Any) -> None:
        name, seen = self._stack.pop()
        todo = [t.grad_fn for t in _tensors(out)]
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
            if node not in self._marked:
                self._marked.add(node)
                mark = (name, node.name(), node.metadata)
                self._handles.append(node.register_prehook(partial(self._enter_node, mark)))

    def _enter_node(self, mark: tuple[str, str, Mapping[str, Any]], grads: Any) -> None:
        self._mark = mark

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        inputs = [(t, extent(t)) for t in _tensors(leaves)]  # now: an in-place operation overwrites its evidence
        first = min((self._cause(t, span) for t, span in inputs), default=NOBODY)
        out = func(*args, **kwargs or {})
        for t in _tensors(out):
            span = extent(t)
            if not is_bad(span):
                continue
            if "empty" in str(func):  # memory as it was found: nobody's fault
                cause = NOBODY
            elif first < LAWFUL:
                cause = first
            elif is_mask(span) and (first == LAWFUL or any(isinstance(a, float) and is_bad((a, a)) for a in leaves)):
                cause = LAWFUL
            else:
                cause = len(self.births)
                self.births.append(self._birth(func, t, span, inputs))
            self._causes[t.untyped_storage().data_ptr()] = cause
        return out

    def _cause(self, t: Tensor, span: tuple[float, float]) -> int:
        """What `t` descends from. The step may also find a bad tensor ready-made: a mask, or a constant."""
        if not is_bad(span):
            return NOBODY
        return self._causes.get(t.untyped_storage().data_ptr(), LAWFUL if is_mask(span) else NOBODY)

    def _birth(self, func: Any, t: Tensor, span: tuple[float, float], inputs: Iterable[Any]) -> Birth:
        described = tuple(f"{str(i.dtype).removeprefix('torch.')}{list(i.shape)} {low:.3g} .. {high:.3g}"
                          for i, (low, high) in inputs if i.is_floating_point())
        told = {"op": str(func), "made": _made(span), "inputs": described}
        if self._is_backward.is_bw and not self._stack:  # a module under way: a checkpoint repeats its forward
            module, node, metadata = self._mark
            line = _line(metadata.get("traceback_", ()))
            return Birth(module=module, phase="backward", node=node, line=line, **told)
        module = self._stack[-1][0] if self._stack else ""
        by_sample = t.dim() > 1 and self.batch_size > 1 and t.shape[0] % self.batch_size == 0
        samples = _rows(_beyond(t).reshape(self.batch_size, -1)) if by_sample else ()
        line = _line(traceback.format_stack(sys._getframe(2)))  # 0 is this function, 1 the dispatch
        return Birth(module=module, phase="forward", line=line, samples=samples, **told)

    def blame(self, tensors: Iterable[Tensor]) -> Birth | None:
        """The earliest birth among the ancestors of these tensors."""
        first = min((self._cause(t, extent(t)) for t in tensors), default=NOBODY)
        return self.births[first] if first < LAWFUL else None


# --- Looking at tensors, and naming what is found

def extent(t: Tensor) -> tuple[float, float]:
    """(lowest, highest) as Python floats; NaN in both if there is one; (0, 0) for what holds no real numbers."""
    if not t.numel() or t.layout != torch.strided or not (t.is_floating_point() or t.is_complex()):
        return 0.0, 0.0
    low, high = torch.aminmax((torch.view_as_real(t) if t.is_complex() else t).detach())
    return float(low), float(high)


def is_bad(span: tuple[float, float]) -> bool:
    return not (span[0] >= -LIMIT and span[1] <= LIMIT)  # True for NaN


def is_mask(span: tuple[float, float]) -> bool:
    """Bad, but only at the negative end: what -inf or finfo.min in a mask looks like."""
    return span[0] < -LIMIT and span[1] <= LIMIT


def _made(span: tuple[float, float]) -> str:
    """The bad end of a span, as text."""
    return f"{span[1]:.3g}" if span[1] > LIMIT else f"{span[0]:.3g}"


def _beyond(t: Tensor) -> Tensor:
    return (t.detach().float().abs() <= LIMIT).logical_not()  # True for NaN


def _rows(wrong: Tensor) -> tuple[int, ...]:
    """Where along the first dimension anything is True."""
    if not wrong.dim() or not wrong.any():
        return ()
    return tuple(wrong.reshape(len(wrong), -1).any(1).nonzero().flatten().tolist())


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


def _integers(tree: Any) -> list[Tensor]:
    return [t for t in _tensors(tree) if not (t.is_floating_point() or t.is_complex() or t.dtype is torch.bool)]


def _named_tensors(tree: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """("state.5.exp_avg", tensor) for each tensor in a nest of dicts, lists and tuples."""
    if isinstance(tree, Tensor):
        yield prefix, tree
    elif isinstance(tree, Mapping | list | tuple):
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from _named_tensors(value, f"{prefix}.{key}" if prefix else str(key))


def _few(items: Iterable[Any], n: int = 8) -> str:
    items = list(items)
    return ", ".join(map(str, items[:n])) + (f" and {len(items) - n} more" if len(items) > n else "")


def _line(stack: Iterable[str]) -> str:
    """file:line of the innermost frame outside torch. `stack` as format_stack() and anomaly mode write it."""
    for entry in reversed(list(stack)):
        frame = re.search(r'File "(.+)", line (\d+), in (\S+)', entry)
        if frame and not frame[1].startswith((os.path.dirname(torch.__file__), os.path.abspath(__file__), "<")):
            return f"{os.path.basename(frame[1])}:{frame[2]} in {frame[3]}"
    return ""


# --- Capsules

def save_capsule(path: str | os.PathLike, record: StepRecord, report: Report, **more: Any) -> None:
    """The step on disk: weights, buffers, RNG, micro-batches, report, and `more` (plain values and tensors: arguments,
    optimizer state). Written whole or not at all; read by load_capsule without running any code."""
    capsule = {"format": 1, "step": record.step, "rank": record.rank, "model": record.net.state_dict(),
               "buffers": record.buffers, "rng": record.rng, "batches": record.batches, "indices": record.indices,
               "report": asdict(report), **more}
    torch.save(tree_map(lambda v: v.detach().cpu() if isinstance(v, Tensor) else v, capsule), f"{path}.part")
    os.replace(f"{path}.part", path)


def load_capsule(path: str | os.PathLike) -> dict[str, Any]:
    """ValueError if the file is no capsule. Tensors on the CPU."""
    capsule = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(capsule, dict) or capsule.get("format") != 1 or "batches" not in capsule:
        raise ValueError(f"{path} is no capsule of a bad step")
    return capsule


def unpack(capsule: Mapping[str, Any], net: nn.Module) -> StepRecord:
    """Weights into `net` (same architecture, any device); the record, ready for examine(). A CUDA generator's state
    means nothing on a CPU: there, dropout draws other masks."""
    net.load_state_dict(capsule["model"])
    record = StepRecord(capsule["step"], net, rank=capsule["rank"])
    record.rng, record.indices = capsule["rng"], capsule["indices"]
    kept = capsule["buffers"], capsule["batches"]
    record.buffers, record.batches = tree_map(lambda v: v.to(record.device) if isinstance(v, Tensor) else v, kept)
    return record


# --- python autopsy.py

def demo() -> None:
    """A Linear whose fp16 result passes 65504 from step 3 on: found, named, put into fp32; training goes on."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.GELU())
    net.add_module("wide", nn.Linear(64, 64))
    net.extend([nn.LayerNorm(64), nn.Linear(64, 4)])
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    x, y = torch.randn(32, 16), torch.randint(0, 4, (32,))

    def run_step(batch: tuple[Any, ...], fp32: bool) -> Tensor:
        with torch.autocast("cpu", torch.float16, enabled=not fp32):
            logits = net(batch[0])
        loss = nn.functional.cross_entropy(logits.float(), batch[1])
        loss.backward()
        return loss

    def heal(module: nn.Module) -> None:
        forward = module.forward
        module.forward = torch.autocast("cpu", enabled=False)(lambda x: forward(x.float()))

    for step in range(8):
        if step == 3:
            net.wide.weight.data *= 3e5  # the fault
        record = StepRecord(step, net)
        record.keep(x, y)
        loss = run_step((x, y), False)
        if any(is_bad(extent(t)) for t in (loss, *(p.grad for p in net.parameters()))):
            report = examine(run_step, record, net, num_classes=4, precision="fp16")
            heal(net.get_submodule(report.module))
            print(f"{report}\nhealed: {report.module} is an fp32 island")
        else:
            optimizer.step()
            print(f"step {step}: loss {loss.item():.4f}")
        optimizer.zero_grad()


# --- python autopsy.py YOUR_SCRIPT.py

USAGE = """python autopsy.py [--from-step N] [--report FILE] YOUR_SCRIPT.py ARGS...    (or: -m package.module ARGS...)
Runs the script as it is and looks at losses, gradients, weights and evaluation outputs. At the first bad step the script
ends. Then it runs again from the start, quietly (files that it writes are written again), and every operation of the bad
step is watched. --from-step N watches from optimizer step N in the first run: for scripts that take hours.
Exit 3: found; the report is printed and written to FILE (autopsy.txt). Exit 0: nothing non-finite. Else the script's."""
RERUN = "AUTOPSY_RERUN"  # the environment of the second run: "backward passes before the watch:report file"
RUNNING = {"running_mean", "running_var", "num_batches_tracked"}  # what BatchNorm's forward writes
IN_A_SCRIPT = {
    "data": "look at these samples and at what made them; leave them out",
    "weights": "look at what wrote these values: initialisation, a checkpoint, an update by hand",
    "divergence": "a lower learning rate, a longer warm-up, torch.nn.utils.clip_grad_norm_(parameters, 1.0)",
    "precision": "this operation in fp32: x.float() before it, inside torch.autocast(device, enabled=False); or bf16",
    "not reproducible": "make the script repeatable (seeds, order of the data), or run it with --from-step",
}


class Found(SystemExit):
    """Ends the script at its first bad step."""


class Operations(Locator):
    """A Locator that repeats the guilty operation in fp32 and fp64, and keeps the bad inputs that were there before it."""

    def __init__(self, watch: Watch):
        super().__init__(nn.Module())
        self.watch, self.told, self.read = watch, {}, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, before = kwargs or {}, len(self.births)
        if self.watch.inside:
            return func(*args, **kwargs)
        kept = (args, kwargs)
        if func._schema.is_mutable:  # an in-place operation overwrites its inputs
            kept = tree_map(lambda t: t.detach().clone() if isinstance(t, Tensor) else t, kept)
        if func is torch.ops.aten._local_scalar_dense.default and is_bad(extent(args[0])):
            self.read = [args[0].detach()]  # loss.item(): a script that ends soon ends because of this number
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self.births) > before:
            bad = [(t.data_ptr(), k) for t, k in zip(_tensors((args, kwargs)), _tensors(kept), strict=True)
                   if is_bad(extent(k)) and not is_mask(extent(k))]
            ignored = any(k.numel() and bool((k == IGNORED).all()) for k in _integers(kept))
            self.told[before] = "" if bad else self._again(func, *kept), bad, ignored
        return out

    def _again(self, func: Any, args: Any, kwargs: Any) -> str:
        """The first of float32 and float64 in which the operation is finite on the same inputs, or ""."""
        for dtype in (torch.float32, torch.float64):
            def wide(v: Any, dtype: torch.dtype = dtype) -> Any:
                if isinstance(v, Tensor):
                    return v.detach().to(dtype, copy=True) if v.is_floating_point() else v.detach().clone()
                return dtype if isinstance(v, torch.dtype) and v.is_floating_point else v
            try:
                again = tree_map(wide, (args, kwargs))
                if not any(is_bad(extent(t)) for t in _tensors(func(*again[0], **again[1]))):
                    return str(dtype).removeprefix("torch.")
            except (RuntimeError, NotImplementedError):
                return ""
        return ""


class Watch:
    """The hooks around a script. Every operation is watched after `first` backward passes or `from_step` steps."""

    def __init__(self, argv: list[str], path: str, first: int | None = None, from_step: int | None = None):
        self.argv, self.path, self.first, self.from_step = argv, path, first, from_step
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.home, self.environment, self.started = os.getcwd(), dict(os.environ), time.monotonic()
        self.thread, self.on, self.inside, self.depth, self.grad_mode = threading.get_ident(), True, False, 0, True
        self.passes = self.fired = self.skips = self.skipped = self.bad_losses = 0
        self.last: dict[int, tuple[int, int]] = {}  # optimizer: its steps, backward passes at the end of the last one
        self.pending: list[tuple[str, str, int, Tensor, Any]] = []  # kind, name, passes before it, value, evidence
        self.roots: dict[int, weakref.ref] = {}  # the outermost modules
        self.names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self.stats: list[tuple[Tensor, Tensor]] = []  # BatchNorm's buffers, and what they held after the last good step
        self.gradient = self.activation = 0.0  # the largest
        self.scale, self.optimizer, self.locator, self.stepped = 1.0, None, None, set()
        self.read_bad, self.symptom, self.at, self.report = False, "", 0, ""

    def __enter__(self) -> Watch:
        self.enter, self.leave = self._safe(self._enter), self._safe(self._leave)
        warnings.filterwarnings("ignore", message=".*there are global hooks")
        self.undo = [register_module_forward_pre_hook(self._count_in).remove,
                     register_module_forward_hook(self._count_out, always_call=True).remove,
                     register_optimizer_step_pre_hook(self._before_step).remove,
                     register_optimizer_step_post_hook(self._safe(self._after_step)).remove]
        self._wrap(torch.autograd, "backward", self._backward)
        self._wrap(torch.amp.GradScaler, "step", self._scaler_step)
        self._wrap(torch.Tensor, "item", self._item)
        os.register_at_fork(after_in_child=self.off)  # the workers of a DataLoader
        if self.first is not None or self.from_step is not None:
            torch.compiler.set_stance("force_eager")
        self._safe(self._watch_operations)()
        return self

    def __exit__(self, *error: Any) -> None:
        self.off()

    def off(self) -> None:
        self.on = False
        self._let_go()
        while self.undo:
            self.undo.pop()()

    def mine(self) -> bool:
        return self.on and threading.get_ident() == self.thread and not torch.compiler.is_compiling()

    def _wrap(self, owner: Any, name: str, around: Callable) -> None:
        original = getattr(owner, name)

        @wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs) if self.mine() else original(*args, **kwargs)
        setattr(owner, name, wrapper)
        self.undo.append(partial(setattr, owner, name, original))

    def _safe(self, hook: Callable) -> Callable:
        """The hook; its own error is told in one line and ends the watch, never the script."""
        def call(*args: Any) -> Any:
            if self.inside or not self.mine():
                return None
            self.inside, self.grad_mode = True, torch.is_grad_enabled()
            try:
                with torch.no_grad():
                    return hook(*args)
            except Exception as error:
                self.say(f"the watcher failed ({type(error).__name__}: {error}) and is off; the script goes on")
                self.off()
            finally:
                self.inside = False
        return call

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(f"autopsy: {text}", file=sys.stderr, flush=True)

    # Modules

    def _count_in(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling() and threading.get_ident() == self.thread:
            self.depth += 1
            if self.depth == 1 or self.locator:
                self.enter(module, args)

    def _count_out(self, module: nn.Module, args: Any, out: Any) -> None:
        if not torch.compiler.is_compiling() and threading.get_ident() == self.thread:
            self.depth -= 1
            if self.depth == 0 or self.locator or self._sampled():
                self.leave(module, args, out)

    def _sampled(self) -> bool:
        """Activations are read in the steps 0, 1, 2, 4, 8, ..."""
        return self.steps() & (self.steps() - 1) == 0

    def steps(self) -> int:
        return max((n for n, _ in self.last.values()), default=self.passes)

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self.depth == 1 and id(module) not in self.roots:
            self.roots[id(module)] = weakref.ref(module)
            self.stats += [(b, b.clone()) for n, b in module.named_buffers() if n.rpartition(".")[2] in RUNNING]
            bare = getattr(module, "module", getattr(module, "_orig_mod", module))  # DDP, torch.compile
            for name, inner in bare.named_modules():
                self.names.setdefault(inner, ".".join(filter(None, (type(bare).__name__, name))))
        if self.locator:
            if self.depth == 1:
                self.locator.batch_size = next((t.shape[0] for t in _tensors(args) if t.dim()), 0)
            self.locator._enter_module(self.names.get(module, type(module).__name__), module, args, {})

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        if self.locator:
            self.locator._leave_module(module, args, out)
        kind = "activation" if self.depth else "output" if self.grad_mode or not any(True for _ in module.parameters()) else "evaluation"
        for t in _tensors(out):
            if t.is_floating_point() and t.numel():
                if self._sampled():
                    self._note("activation", "", torch.linalg.vector_norm(t, float("inf")))
                if not self.depth:  # the largest, because -inf alone is a mask
                    told = f"the output of {type(module).__name__}" + " under no_grad" * (kind == "evaluation")
                    self._note(kind, told, t.amax(), [t])

    # Steps

    def _backward(self, original: Callable, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        self._safe(self._before_backward)(tensors)
        out = original(tensors, *args, **kwargs)
        self.passes += 1
        self._safe(self._after_backward)()
        return out

    def _before_backward(self, tensors: Any) -> None:
        for t in _tensors(tensors):
            self._note("loss", "loss", t.detach() if t.dim() == 0 else t.abs().amax(), [t.detach()])

    def _after_backward(self) -> None:
        if self.locator and self.first is not None:
            self._judge([p for p in self._named().values() if p.grad is not None])
        if not self.last:  # without an optimizer, every backward pass is a step
            self._read([]) if self.passes % 16 == 0 else None
            self._watch_operations()
        elif not self.locator:
            self._watch_operations()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        closure = kwargs.get("closure") or next(iter(args[1:]), None)
        if not callable(closure):
            self._safe(self._check)(optimizer)
            return None

        def watched() -> Any:
            loss = closure()
            self._safe(self._check)(optimizer)
            return loss
        return args[:1], {**kwargs, "closure": watched}

    def _check(self, optimizer: Any) -> None:
        """Before an optimizer step: one read of the gradients, one transfer of everything noted since the last one."""
        self.fired, self.optimizer = self.fired + 1, optimizer
        scaled = [t for t in [getattr(optimizer, "grad_scale", None)] if t is not None]  # a fused step unscales itself
        values = self._read([*_norms([p.grad for p in _moved(optimizer)]), *scaled], calm=bool(scaled))
        self.scale = values.pop() if scaled else 1.0
        norm = sum(v * v for v in values) ** 0.5 / self.scale
        if norm <= LIMIT:
            self.gradient, self.skips, self.bad_losses, self.read_bad = max(self.gradient, norm), 0, 0, False
        elif scaled:
            self._skip(optimizer, self.scale, 0.5)
        else:
            self._judge(_moved(optimizer))

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """The weights and moments: read on the device now, looked at with the next step's gradients."""
        self._end(optimizer)
        held = [t for p in _moved(optimizer) for t in (p, *_moments(optimizer, p).values())]
        for value in _norms(held):
            self._note("update", "", value, optimizer)
        if self.stats:
            torch._foreach_copy_([copy for _, copy in self.stats], [b for b, _ in self.stats])

    def _end(self, optimizer: Any) -> None:
        self.last[id(optimizer)] = self.last.get(id(optimizer), (0, 0))[0] + 1, self.passes
        if not self.locator or len(self.last) == 1 or id(optimizer) in self.stepped:
            self.stepped.clear()
            self._watch_operations()
        self.stepped.add(id(optimizer))

    def _scaler_step(self, original: Callable, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        fired = self.fired
        out = original(scaler, optimizer, *args, **kwargs)
        if self.fired == fired:
            self._safe(self._skip)(optimizer, scaler.get_scale(), scaler.get_backoff_factor())
        return out

    def _skip(self, optimizer: Any, scale: float, backoff: float) -> None:
        """The loss scaler skipped a step: calibration, unless it goes on."""
        self.optimizer, self.scale, losses = optimizer, scale, self.bad_losses
        self.skips, self.skipped = self.skips + 1, self.skipped + 1
        self._read([], calm=True)
        self.bad_losses *= self.bad_losses > losses
        why = (f"{self.skips} skipped steps in a row" if self.skips > 20 else "the loss scale falls under 1"
               if scale * backoff < 1 else "the third non-finite loss in a row" if self.bad_losses > 2 else "")
        if why or self.first is not None:
            self._judge(_moved(optimizer), why)
        self._end(optimizer)

    def _item(self, original: Callable, t: Tensor) -> Any:
        value = original(t)
        self.read_bad |= type(value) is float and not abs(value) <= LIMIT
        return value

    # What is found

    def _note(self, kind: str, name: str, value: Tensor, evidence: Any = None) -> None:
        """`value` is asked at the next transfer; at once in the second run."""
        keep = evidence if self.locator or kind == "update" else None
        if self.locator and (kind == "update" or self.first is not None and kind in ("loss", "evaluation")):
            self._settle(kind, name, self.passes, float(value), keep)
        else:
            self.pending.append((kind, name, self.passes, value, keep))
            if len(self.pending) > 4096:
                self._read([])

    def _read(self, more: list[Tensor], calm: bool = False, end: bool = False) -> list[float]:
        pending, self.pending = self.pending, []
        values = _host([value for _, _, _, value, _ in pending] + more)
        for (kind, name, passes, _, evidence), value in zip(pending, values, strict=False):
            if kind == "activation":
                self.activation = max(self.activation, value) if value <= LIMIT else self.activation
            elif kind == "loss" and calm:
                self.bad_losses += not abs(value) <= LIMIT
            elif kind != "output" or end:
                self._settle(kind, name, passes, value, evidence)
        return values[len(pending):]

    def _settle(self, kind: str, name: str, passes: int, value: float, evidence: Any) -> None:
        if abs(value) <= LIMIT or (kind != "loss" and value < 0):
            return
        if kind == "update":
            self._blame_update(evidence)
        elif self.world == 1:  # a bad loss on one rank makes bad gradients on all: there the ranks decide together
            self._found(f"{name} is {value:.3g}", evidence, passes - (not self.last and kind == "loss"))
        elif kind == "evaluation":
            self.say(f"{name} is {value:.3g} on rank {self.rank}: run on one process to have it examined")

    def _judge(self, params: list[Tensor], why: str = "") -> None:
        """A finding if any of these gradients is bad."""
        norms = _host(_norms([p.grad for p in params]))
        if bad := [p for p, norm in zip(params, norms, strict=True) if not norm <= LIMIT]:
            last = self.last.get(id(self.optimizer), (0, 0))[1] if self.optimizer or self.last else self.passes - 1
            self._found(f"the gradient of {self._called(bad[0])}" + f" and {len(bad) - 1} more" * (len(bad) > 1) +
                        f" is {_made(extent(bad[0].grad))}" + f", {why}" * bool(why), [p.grad for p in bad], last)

    def _blame_update(self, optimizer: Any) -> None:
        """Good gradients and bad weights or moments are the optimizer's own doing: that needs no second run."""
        for group in optimizer.param_groups:
            for p in group["params"]:
                held = {"": p, **{f"'s {key}": t for key, t in _moments(optimizer, p).items()}}
                bad = [key for key, t in held.items() if not _host(_norms([t]))[0] <= LIMIT]
                if bad:
                    lr, eps, beta2 = float(group["lr"]), group.get("eps", 1.0), float(group.get("betas", (0, 0))[1])
                    rate = f"lr={lr:g} is too much for gradients whose norm is up to {self.gradient:.3g}"
                    self.symptom = f"{self._called(p)}{bad[0]} is {_made(extent(held[bad[0]]))} after a step with finite gradients"
                    self.report = (f"{self.symptom}, at step {self.last[id(optimizer)][0] - 1} of {self.argv[0]} -> weights\n"
                                   f"  made by {type(optimizer).__name__}: weights in {p.dtype}, lr={lr:g}, eps={eps:g}\n"
                                   f"  {refusal(p.dtype, eps, beta2) or rate}\n"
                                   "  try: weights and moments in fp32 (autocast for the forward), eps=1e-8, a lower learning rate")
                    self._found(self.symptom, (), 0)

    def _found(self, symptom: str, evidence: Any, passes: int) -> None:
        self.symptom, self.at = symptom, max(0, passes)
        if not self.report and (self.first is not None or self.from_step is not None):
            self.report = self._tell(evidence or ())
        for p in _moved(self.optimizer) if self.optimizer else ():
            p.grad = None  # a script that goes on all the same steps over these parameters
        for b, copy in self.stats:
            b.copy_(copy)
        self.off()
        raise Found(3)

    def _tell(self, evidence: Any) -> str:
        birth, verdict, lines = None, "not reproducible", ["no watched operation made it"]
        if self.locator and (birth := self.locator.blame(evidence)):
            wide, bad, ignored = self.locator.told[self.locator.births.index(birth)]
            owned = {t.data_ptr(): n for n, t in self._named(buffers=True).items()}
            weights = [owned[at] for at, _ in bad if at in owned]
            ignored = ignored and "nll_loss" in birth.op
            verdict = "weights" if weights else "data" if bad or ignored else "precision" if wide == "float32" else "divergence"
            where = ", ".join(filter(None, (birth.phase, f"of {birth.node}" * bool(birth.node), birth.line)))
            lines = [f"first bad op: {birth.op} in {birth.module or 'the script itself'} ({where}) made {birth.made}",
                     "its inputs: " + "; ".join(birth.inputs)]
            if bad:
                lines.append("already bad: " + _few(weights or [f"a tensor of shape {list(t.shape)}" for _, t in bad], 5))
            elif ignored:
                lines.append(f"every label is ignored ({IGNORED}): their mean is 0/0")
            else:
                lines.append("the same operation on the same inputs: " + (f"finite in {wide}" if wide else "bad in float64 too"))
            samples = _rows(_beyond(bad[0][1])) if verdict == "data" and bad else birth.samples
            lines += [f"samples {_few(samples)} of the batch"] if samples else []
        weak = birth.weak if birth and verdict == "divergence" else ""
        head = f"{self.symptom} at step {self.steps()} of {self.argv[0]} (loss scale {self.scale:g}) -> {verdict}"
        report = "\n  ".join([head, *lines, f"try: {FRAGILE[weak] if weak else IN_A_SCRIPT[verdict]}"])
        if self.world > 1 and dist.is_initialized():  # the other ranks received what the guilty rank made
            received = birth is None or (birth.phase == "backward" and bool(bad)) or birth.op.startswith("c10d")
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, (received, self.rank, report))
            received, rank, report = min(every)
            report += f"\n  guilty: rank {rank} of {len(every)}"
        return report

    def _named(self, buffers: bool = False) -> dict[str, Tensor]:
        roots = [module for ref in self.roots.values() if (module := ref()) is not None]
        return {f"{type(root).__name__}.{n}": t for root in roots
                for n, t in (*root.named_parameters(), *(root.named_buffers() if buffers else ()))}

    def _called(self, p: Tensor) -> str:
        return next((n for n, other in self._named().items() if other is p), f"a parameter of shape {list(p.shape)}")

    def _watch_operations(self) -> None:
        """Begin, or begin anew, to watch every operation, if the time has come."""
        self._let_go()
        if self.passes >= self.first if self.first is not None else self.steps() >= (self.from_step or 0) and self.from_step is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.anomaly = torch.autograd.set_detect_anomaly(True, check_nan=False)
            self.locator = Operations(self).__enter__()

    def _let_go(self) -> None:
        if self.locator:
            self.locator.__exit__(None, None, None)
            self.anomaly.__exit__()
            self.locator = None

    # From start to end

    def run(self) -> int:
        """The exit code: 3 for a finding. Otherwise the script's own exit code and exceptions pass through."""
        failure: BaseException | None = None
        try:
            with self:
                try:
                    run_script(self.argv)
                except Found:
                    raise
                except BaseException as error:
                    failure = error
                self._safe(self._last_look)(isinstance(failure, Exception) or getattr(failure, "code", None))
        except Found:
            pass
        if isinstance(failure, Exception) and self.symptom:
            traceback.print_exception(failure)
        elif failure and not self.symptom:
            raise failure
        if not self.symptom:
            share = f" = {self.activation / 65504:.0%} of fp16's range" if self.activation else ""
            skipped = f", {self.skipped} skipped by the loss scaler" * bool(self.skipped)
            self.say(f"{self.steps()} steps{skipped}, nothing non-finite, largest gradient norm {self.gradient:.3g}, "
                     f"largest activation {self.activation:.3g}{share}")
            return 0
        self.report = self.report or self._second_run()
        if self.rank == 0:
            with open(os.path.join(self.home, self.path), "w") as file:
                file.write(self.report + "\n")
        if self.first is None:
            self.say(self.report)
        time.sleep(3 * (self.rank > 0))  # torchrun ends every rank as soon as one has ended
        return 3

    def _last_look(self, failed: Any) -> None:
        self._read([], end=bool(failed))
        if failed and self.read_bad:
            self._found("the last number that the script read", self.locator.read if self.locator else (), self.passes)

    def _second_run(self) -> str:
        self.say(f"{self.symptom} at step {self.steps()}, after {time.monotonic() - self.started:.0f} s. This step did not reach the weights. "
                 "The script runs again from the start, quietly and in eager mode, for about as long; that step is watched.")
        if torch.cuda.is_initialized():
            vars(sys.modules["__main__"]).clear()  # the memory is needed
            gc.collect()
            torch.cuda.empty_cache()
        with tempfile.TemporaryDirectory() as folder:
            path, errors = os.path.join(folder, "report"), os.path.join(folder, "errors")
            environment = {**self.environment, RERUN: f"{self.at}:{path}"}
            if self.world > 1:  # a rendezvous of its own
                port = str(1024 + (int(environment["MASTER_PORT"]) + 7919) % 60000)
                environment |= {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "False"}
            with open(errors, "w") as file:
                code = subprocess.run([sys.executable, *sys.orig_argv[1:]], env=environment, cwd=self.home, stderr=file,
                                      stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL).returncode
            if os.path.exists(path):
                with open(path) as file:
                    return file.read().rstrip()
            with open(errors) as file:
                last = (file.read().strip().splitlines() or ["no error output"])[-1]
        return (f"{self.symptom} -> not reproducible\n  the second run met no bad step and ended with exit code {code} ({last})\n"
                f"  try: {IN_A_SCRIPT['not reproducible']}")


def refusal(dtype: torch.dtype, eps: float, beta2: float) -> str | None:
    """Why AdamW must not keep weights and moments in dtype with this eps and beta2, in one sentence. None: it may."""
    unit = torch.finfo(dtype).eps  # distance from 1 to the next number; rounding moves by half of it at most
    if torch.tensor(eps).to(dtype) == 0:
        return f"eps={eps:g} is exactly 0 in {dtype}, so AdamW divides 0 by 0 wherever a gradient is 0"
    lost = [f"{dtype} weights lose every update smaller than {unit / 4:.1e} of the weight"] if dtype in HALF else []
    if 1 - beta2 < unit / 2:
        lost.append(f"a {dtype} second moment never decays with beta2={beta2:g} (beta2 <= {1 - unit / 2:.4f} does)")
    return "; ".join(lost) or None


def _moved(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _moments(optimizer: Any, p: Tensor) -> dict[str, Tensor]:
    state = optimizer.state.get(p, {}).items()
    return {k: t for k, t in state if isinstance(t, Tensor) and t.dim() and t.is_floating_point()}


def _norms(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The 2-norms, 0-dim, with fp32 accumulators, nothing written, no sync."""
    flat = []
    for t in tensors:
        t = t.detach().to_local() if hasattr(t, "to_local") else t.detach()
        t = t.coalesce().values() if t.is_sparse else t
        flat.append(torch.view_as_real(t.resolve_conj()) if t.is_complex() else t)
    wide = torch.float64 if any(t.dtype == torch.float64 for t in flat) else torch.float32
    return list(torch._foreach_norm(flat, 2, dtype=wide)) if flat else []


def _host(values: list[Tensor]) -> list[float]:
    """0-dim tensors as floats: one transfer for each device."""
    out = dict.fromkeys(range(len(values)), 0.0)
    for device in {t.device for t in values}:
        at = [i for i, t in enumerate(values) if t.device == device]
        out.update(zip(at, torch.stack([values[i].detach().float().reshape(()) for i in at]).tolist(), strict=True))
    return list(out.values())


def run_script(argv: list[str]) -> None:
    """What `python SCRIPT.py ARGS` or `python -m MODULE ARGS` does, in this process."""
    if argv[0] == "-m":
        sys.argv, sys.path[0] = argv[1:], os.getcwd()
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    sys.argv, sys.path[0] = argv, os.path.dirname(os.path.realpath(argv[0]))
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = os.path.abspath(argv[0])
    with open(argv[0], "rb") as file:
        exec(compile(file.read(), main.__file__, "exec", dont_inherit=True), main.__dict__)


def main() -> int:
    argv, from_step, path = sys.argv[1:], None, "autopsy.txt"
    first, _, rerun = os.environ.pop(RERUN, "").partition(":")
    while argv and argv[0] in ("--from-step", "--report"):
        from_step, path = (int(argv[1]), path) if argv[0] == "--from-step" else (from_step, argv[1])
        argv = argv[2:]
    if not argv or argv[0].startswith("-") and argv[0] != "-m":
        print(USAGE, end="\n\n")
        return demo() or 0
    return Watch(argv, rerun or path, int(first) if rerun else None, from_step if not rerun else None).run()


if __name__ == "__main__":
    sys.exit(main())
