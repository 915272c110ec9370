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

The report says module, operation, line of source, samples, and the line to try. This file does not cure and does not
decide when to look. To copy it: it needs torch, nothing else. `python autopsy.py` shows one overflow found and healed.
"""
from __future__ import annotations

import os
import random
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

LIMIT = 1.8e19  # just under sqrt(3.4e38)
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
        if frame and not frame[1].startswith((os.path.dirname(torch.__file__), "<")):
            return f"{os.path.basename(frame[1])}:{frame[2]} in {frame[3]}"
    return ""


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


if __name__ == "__main__":
    demo()
