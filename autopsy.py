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

import os
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.module_tracker import ModuleTracker

LIMIT = 1.8e19  # just under sqrt(3.4e38)
LAWFUL = -1  # the mark of a mask: only large negative values, written on purpose
TORCH = os.path.dirname(torch.__file__)
VERDICTS = ("data", "weights", "divergence", "precision", "not reproducible")  # when ranks differ, the first one counts
FRAGILE = {"sqrt": "sqrt has no finite slope at 0: sqrt(x + eps)", "rsqrt": "rsqrt of 0 or less: rsqrt(x + eps)",
           "log": "log of 0 or less: log(x.clamp(min=eps))", "div": "division by zero: divide by x + eps",
           "reciprocal": "division by zero: add an eps", "pow": "a power of 0 or of a negative base: clamp the base",
           "linalg_vector_norm": "a norm has no slope at 0: add an eps", "exp": "exp beyond 88 is inf: clamp before it",
           "acos": "no finite slope at -1 and 1: clamp inside", "softmax": "softmax over a wholly masked row",
           "nll_loss_forward": "a mean over no target at all: every label is ignored"}


def fragile(op: str, node: str) -> str:
    """The key of FRAGILE that an operation such as "aten.log.default" under "LogBackward0" goes by, or ""."""
    names = [re.sub(r"Backward\d*$", "", node).lower(), *op.split(".")[1:2]]
    names = [re.sub(r"^log(2|10)$", "log", n.strip("_").replace("log_softmax", "softmax")) for n in names]
    return next((n for n in names if n in FRAGILE), "")


def extent(t: Tensor) -> tuple[float, float]:
    """(lowest, highest) as Python floats; NaN in both if there is one; (0, 0) for what holds no real numbers."""
    if not t.numel() or t.layout != torch.strided or not (t.is_floating_point() or t.is_complex()):
        return 0.0, 0.0
    t = torch.view_as_real(t) if t.is_complex() else t
    low, high = torch.aminmax(t.detach() if t.element_size() > 1 else t.detach().float())
    return float(low), float(high)


def is_bad(span: tuple[float, float]) -> bool:
    return not (span[0] >= -LIMIT and span[1] <= LIMIT)


def is_mask(span: tuple[float, float]) -> bool:
    """Bad, but only at the negative end: what -inf or finfo.min in a mask looks like."""
    return span[0] < -LIMIT and span[1] <= LIMIT


def named_floats(tree: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Tensor) and tree.is_floating_point():
        yield prefix, tree
    elif isinstance(tree, Mapping | list | tuple):
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from named_floats(value, f"{prefix}.{key}" if prefix else str(key))


def rng_states(device: torch.device | str) -> dict[str, Any]:
    cuda = torch.device(device).type == "cuda"
    return {"python": random.getstate(), "cpu": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state(device) if cuda else None}


def set_rng_states(states: Mapping[str, Any], device: torch.device | str) -> None:
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(states["cpu"])
    if states["cuda"] is not None and torch.device(device).type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


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
        """RNG and buffers as they were before the step."""
        set_rng_states(self.rng, self.device)
        for name, b in self.net.named_buffers():
            b.copy_(self.buffers[name])


@dataclass(frozen=True)
class Birth:
    """An operation with good inputs and a bad result."""

    op: str
    module: str  # the innermost module whose forward it belongs to; "" = the model's own
    phase: str  # "forward", "backward", or "outside" (a tensor that came from nowhere in the step)
    node: str = ""  # backward: autograd's name for the function
    line: str = ""  # file:line in function
    made: str = ""  # what the result holds
    inputs: tuple[str, ...] = ()
    samples: tuple[int, ...] = ()


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
        self._causes: dict[int, frozenset[int]] = {}  # storage: indices of births (or LAWFUL)
        self._known = {t.untyped_storage().data_ptr(): name for name, t in net.named_parameters()}
        self._stack: list[tuple[str, set[Any]]] = []
        self._marked: set[Any] = set()
        self._node: tuple[str, str, Mapping[str, Any]] = ("", "", {})
        self._handles: list[Any] = []
        self._is_backward = ModuleTracker()

    def __enter__(self) -> Locator:
        for name, m in self.net.named_modules():
            self._handles += [
                m.register_forward_pre_hook(lambda m, args, kwargs, name=name: self._stack.append(
                    (name, {t.grad_fn for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)})),
                    with_kwargs=True),
                m.register_forward_hook(self._leave, always_call=True)]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        while self._handles:  # DDP keeps some of the graph's nodes alive: nothing of ours may stay on them
            self._handles.pop().remove()
        self._marked.clear()

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        name, seen = self._stack.pop()
        todo = [t.grad_fn for t in tree_leaves(out) if isinstance(t, Tensor)]
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node not in self._marked:
                self._marked.add(node)
                mark = (name, node.name(), node.metadata)
                self._handles.append(node.register_prehook(lambda grads, mark=mark: setattr(self, "_node", mark)))
            todo += [n for n, _ in node.next_functions]

    def causes(self, t: Tensor, span: tuple[float, float]) -> frozenset[int]:
        """Births that `t` descends from. A bad tensor that no operation of this step wrote came from outside."""
        if not is_bad(span):
            return frozenset()
        where = t.untyped_storage().data_ptr()
        if where not in self._causes:
            name = self._known.get(where)
            if is_mask(span) and name is None:
                self._causes[where] = frozenset((LAWFUL,))
            else:
                self.births.append(Birth("none", name or "", "outside", made=_made(span)))
                self._causes[where] = frozenset((len(self.births) - 1,))
        return self._causes[where]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        ins = [t for t in leaves if isinstance(t, Tensor)]
        # An in-place operation overwrites its evidence: look first. Elsewhere the inputs can wait for a bad result.
        spans = [extent(t) for t in ins] if func._schema.is_mutable else None
        before = [self.causes(t, s) for t, s in zip(ins, spans, strict=True)] if spans else None
        out = func(*args, **kwargs)
        for t in tree_leaves(out):
            span = extent(t) if isinstance(t, Tensor) else (0.0, 0.0)
            if not is_bad(span):
                continue
            where = t.untyped_storage().data_ptr()
            if "empty" in str(func):  # memory as it was found: nobody's fault
                self._causes[where] = frozenset()
                continue
            if before is None:
                spans = [extent(i) for i in ins]
                before = [self.causes(i, s) for i, s in zip(ins, spans, strict=True)]
            inherited = frozenset().union(*before)
            planted = any(isinstance(a, float) and not abs(a) <= LIMIT for a in leaves)
            if inherited - {LAWFUL}:
                self._causes[where] = inherited - {LAWFUL}
            elif is_mask(span) and (inherited or planted):
                self._causes[where] = frozenset((LAWFUL,))
            else:
                self.births.append(self._birth(func, t, span, zip(ins, spans, strict=True)))
                self._causes[where] = frozenset((len(self.births) - 1,))
        return out

    def _birth(self, func: Any, t: Tensor, span: tuple[float, float], ins: Iterable[Any]) -> Birth:
        inputs = tuple(f"{str(i.dtype).removeprefix('torch.')}{list(i.shape)} {s[0]:.3g} .. {s[1]:.3g}"
                       for i, s in ins if i.is_floating_point())
        if self._stack or not self._is_backward.is_bw:
            rows: list[int] = []
            if t.dim() > 1 and self.batch_size > 1 and t.shape[0] % self.batch_size == 0:
                bad = (t.detach().float().abs() <= LIMIT).logical_not().reshape(self.batch_size, -1).any(1)
                rows = bad.nonzero().flatten().tolist()
            name = self._stack[-1][0] if self._stack else ""
            return Birth(str(func), name, "forward", "", _line(sys._getframe(2)), _made(span), inputs, tuple(rows))
        name, node, meta = self._node
        return Birth(str(func), name, "backward", node, _line_of(meta.get("traceback_", ())), _made(span), inputs)

    def blame(self, tensors: Iterable[Tensor]) -> Birth | None:
        """The earliest birth among the ancestors of these (bad) tensors."""
        found = frozenset().union(*(self.causes(t, extent(t)) for t in tensors)) - {LAWFUL}
        return self.births[min(found)] if found else None


def _made(span: tuple[float, float]) -> str:
    return "nan" if span[0] != span[0] else f"{span[1]:.3g}" if span[1] > LIMIT else f"{span[0]:.3g}"


def _line(frame: Any) -> str:
    """file:line of the innermost frame outside torch."""
    while frame is not None and frame.f_code.co_filename.startswith((TORCH, "<")):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}" if frame else ""


def _line_of(stack: Iterable[str]) -> str:
    """The same from the traceback that autograd kept when the node was made in the forward."""
    hits = [m.groups() for m in (re.search(r'File "(.+)", line (\d+), in (\S+)', s) for s in stack) if m]
    hits = [h for h in hits if not h[0].startswith((TORCH, "<"))]
    return f"{os.path.basename(hits[-1][0])}:{hits[-1][1]} in {hits[-1][2]}" if hits else ""


@dataclass(frozen=True)
class Report:
    """The outcome. str(report) is the text for a tired person."""

    verdict: str  # precision | data | weights | divergence | not reproducible
    step: int
    rank: int
    precision: str = ""
    scale: float = 1.0
    symptom: str = ""  # "loss is nan", "gradient of head.weight is inf", ...
    op: str = ""
    module: str = ""
    phase: str = ""
    node: str = ""
    line: str = ""
    made: str = ""
    inputs: tuple[str, ...] = ()
    micro_batch: int = 0
    samples: tuple[int, ...] = ()  # positions in the micro-batch
    indices: tuple[int, ...] = ()  # the same in the data set, if the record knew them
    names: tuple[str, ...] = ()  # bad tensors (weights), or what is wrong with the batch (data)
    norms: tuple[tuple[str, float], ...] = ()  # largest gradients of the re-run, as run_step left them
    unused: tuple[str, ...] = ()  # parameters without a gradient
    suggestion: str = ""

    def __str__(self) -> str:
        fp32 = {"precision": "finite", "divergence": "bad as well"}.get(self.verdict)
        weak = fragile(self.op, self.node)
        checks = {"uninitialised or unused parameters": (self.verdict == "weights",
                                                         self.unused and f"unused: {_few(self.unused)}"),
                  "division by zero, log, sqrt": (bool(weak) and self.verdict == "divergence", weak),
                  "bad input or label": (self.verdict == "data", ""),
                  "learning rate": (self.verdict == "divergence" and not weak, ""),
                  "dtype": (self.verdict == "precision", "")}
        return "\n  ".join(filter(None, [
            f"{self.symptom or 'the step was bad'} at step {self.step} ({self.precision or 'precision not told'}, "
            f"scale {self.scale:g}, rank {self.rank}) -> {self.verdict}",
            self.op and f"first bad op: {self.op} in {self.module or 'the model itself'} ({self.phase}"
            + (f" of {self.node}" if self.node else "") + (f", {self.line}" if self.line else "")
            + f") made {self.made}",
            self.inputs and "its inputs: " + "; ".join(self.inputs),
            self.names and ("already bad: " if self.verdict == "weights" else "in the batch: ") + _few(self.names, 5),
            self.samples and f"samples {_few(self.samples)} of micro-batch {self.micro_batch}, rank {self.rank}"
            + (f" (in the data set: {_few(self.indices)})" if self.indices else ""),
            fp32 and f"the same batch in fp32: {fp32}",
            self.norms and "largest gradients: " + ", ".join(f"{n} {v:.3g}" for n, v in self.norms),
            "causes: " + ", ".join(f"[{'x' if hit else ' '}] {what}" + (f" ({more})" if more else "")
                                   for what, (hit, more) in checks.items()),
            f"try: {self.suggestion}"]))


def _few(items: Iterable[Any], n: int = 8) -> str:
    items = list(items)
    return ", ".join(map(str, items[:n])) + (f" and {len(items) - n} more" if len(items) > n else "")


def examine(run_step: Callable[[tuple[Any, ...], bool], Any], record: StepRecord, net: nn.Module, *,
            state: Any = None, num_classes: int | None = None, ignore_index: int = -100, precision: str = "",
            scale: float = 1.0) -> Report:
    """Run the recorded step again and say what was wrong. On every rank, each with its own record; then agree().

    `run_step(batch, fp32)`: forward and backward of ONE recorded micro-batch on the bare `net` (no DDP, no compile), no
    optimizer; returns the 0-dim loss before scaling. `fp32=True`: autocast off, half inputs and parameters upcast, no
    loss scale; if that ran on fp32 copies of the parameters, it returns (loss, {name: gradient}). `state`: nest of
    optimizer tensors. `scale`, the step's loss scale, is only told in the report. Labels are integer tensors after the
    first item of a batch, checked if `num_classes` is given. Gradients are None afterwards, RNG untouched, buffers as
    before the step.
    """
    told = {"step": record.step, "rank": record.rank, "precision": precision, "scale": float(scale)}
    if names := _sick(net, state):
        return Report("weights", **told, symptom=f"{names[0]} was bad before the step", names=names,
                      suggestion="--resume last_good.pt, and look at what the steps before this one did")
    for k, batch in enumerate(record.batches):
        names, rows = _sick_batch(batch, num_classes, ignore_index)
        if names:
            return Report("data", **told, symptom=names[0], names=names, micro_batch=k, samples=rows,
                          indices=_indices(record, k, rows), suggestion="look at these samples; leave them out")
    now = rng_states(record.device)
    try:
        record.restore()
        net.zero_grad(set_to_none=True)
        birth, symptom, micro = None, "", -1
        while not symptom and micro + 1 < len(record.batches):
            micro += 1
            birth, symptom = _probe(run_step, record.batches[micro], net)
        unused = tuple(n for n, p in net.named_parameters() if p.requires_grad and p.grad is None)
        norms = {n: float(p.grad.float().norm()) for n, p in net.named_parameters() if p.grad is not None}
        top = sorted(norms.items(), key=lambda kv: (kv[1] == kv[1] and kv[1] <= LIMIT, -kv[1]))[:5]
        told |= {"symptom": symptom, "micro_batch": micro, "unused": unused, "norms": tuple(top)}
        verdict = "not reproducible"
        if birth and fragile(birth.op, birth.node) == "nll_loss_forward" and \
                any(_ignored(item, ignore_index) for item in record.batches[micro][1:]):
            return Report("data", **told, names=(f"every label is ignored ({ignore_index}): their mean is 0/0",),
                          suggestion="divide the sum of the losses by max(1, number of labels)",
                          **{k: v for k, v in asdict(birth).items() if k != "samples"})
        if symptom:
            record.restore()
            net.zero_grad(set_to_none=True)
            runs = [_loss_and_grads(run_step(batch, True), net) for batch in record.batches[: micro + 1]]
            verdict = "divergence" if any(_symptom(*run) for run in runs) else "precision"
            if verdict == "precision" and precision in ("fp32", "O0"):
                verdict = "not reproducible"  # it was fp32 already: two equal runs, two answers
    finally:
        record.restore()
        set_rng_states(now, record.device)
        net.zero_grad(set_to_none=True)
    birth = birth or Birth("", "", "")
    found = {k: v for k, v in asdict(birth).items() if k != "samples"}
    return Report(verdict, **told, **found, samples=birth.samples, indices=_indices(record, micro, birth.samples),
                  suggestion=_suggest(verdict, birth))


def _probe(run_step: Callable[..., Tensor], batch: tuple[Any, ...], net: nn.Module) -> tuple[Birth | None, str]:
    size = next((t.shape[0] for t in tree_leaves(batch) if isinstance(t, Tensor) and t.dim()), 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # anomaly mode says that it is slow; it is on for its tracebacks only
        with torch.autograd.set_detect_anomaly(True, check_nan=False), Locator(net, size) as locator:
            loss, grads = _loss_and_grads(run_step(batch, False), net)
    symptom = _symptom(loss, grads)
    bad = [g for g in grads.values() if is_bad(extent(g))]
    return (locator.blame([loss]) or locator.blame(bad) if symptom else None), symptom


def _loss_and_grads(result: Any, net: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    loss, grads = result if isinstance(result, tuple) else (result, {n: p.grad for n, p in net.named_parameters()})
    return loss.detach(), {n: g for n, g in grads.items() if g is not None}


def _symptom(loss: Tensor, grads: Mapping[str, Tensor]) -> str:
    if is_bad(extent(loss)):
        return f"loss is {float(loss):.3g}"
    return next((f"gradient of {n} is {_made(extent(g))}" for n, g in grads.items() if is_bad(extent(g))), "")


def _sick(net: nn.Module, state: Any) -> tuple[str, ...]:
    named = {f"parameter {n}": p for n, p in net.named_parameters()}
    named |= {f"optimizer state {n}": t for n, t in named_floats(state)}
    buffers = {f"buffer {n}": b for n, b in net.named_buffers() if "running_" in n or not is_mask(extent(b))}
    return tuple(n for n, t in (named | buffers).items() if is_bad(extent(t)))


def _sick_batch(batch: tuple[Any, ...], num_classes: int | None,
                ignore: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    said, rows = [], set()
    for k, item in enumerate(batch):
        for t in (t for t in tree_leaves(item) if isinstance(t, Tensor)):
            if is_bad(extent(t)):
                said.append(f"{'input' if k == 0 else 'target'} holds {_made(extent(t))}")
                wrong = (t.float().abs() <= LIMIT).logical_not()
            elif k and num_classes is not None and t.dtype not in (torch.bool,) and not t.is_floating_point():
                wrong = ((t < 0) | (t >= num_classes)) & (t != ignore)
                said += [f"label {int(v)} is not in 0..{num_classes - 1}" for v in t[wrong].unique()]
            else:
                continue
            rows.update(wrong.reshape(wrong.shape[0], -1).any(1).nonzero().flatten().tolist() if wrong.dim() else ())
    return tuple(said), tuple(sorted(rows))


def _ignored(item: Any, ignore: int) -> bool:
    """Whether an item of a batch holds labels, and nothing but ignored ones."""
    labels = [t for t in tree_leaves(item) if isinstance(t, Tensor) and t.dtype == torch.int64 and t.numel()]
    return bool(labels) and all(bool((t == ignore).all()) for t in labels)


def _indices(record: StepRecord, micro: int, rows: Iterable[int]) -> tuple[int, ...]:
    known = record.indices[micro] if record.indices else None
    return tuple(known[r] for r in rows) if known else ()


def _suggest(verdict: str, birth: Birth) -> str:
    if verdict == "precision":
        return f"--keep-fp32 '{birth.module}'" if birth.module else "x.float() before that line, or --precision bf16"
    if verdict == "divergence":
        return FRAGILE.get(fragile(birth.op, birth.node)) or (
            "--resume last_good.pt with a lower --lr, a longer --warmup-updates, --clip-grad 1.0")
    return "the same step once more with --deterministic; if it recurs, suspect this machine's hardware"


def agree(report: Report) -> Report:
    """The same report on every rank: the gravest verdict's, of the lowest rank that has it. A collective."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return report
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, report)
    return min(every, key=lambda r: (VERDICTS.index(r.verdict), r.rank))


def save_capsule(path: str | os.PathLike, record: StepRecord, report: Report, **more: Any) -> None:
    """The step on disk: weights, buffers, RNG, micro-batches, report, and `more` (plain values and tensors: arguments,
    optimizer state). Written whole or not at all; read by load_capsule without running any code."""
    capsule = {"format": 1, "step": record.step, "rank": record.rank, "model": record.net.state_dict(),
               "buffers": record.buffers, "rng": record.rng, "batches": record.batches, "indices": record.indices,
               "report": asdict(report), **more}
    capsule = tree_map(lambda v: v.detach().cpu() if isinstance(v, Tensor) else v, capsule)
    torch.save(capsule | {"model": dict(capsule["model"])}, f"{path}.part")
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
    to = lambda v: v.to(record.device) if isinstance(v, Tensor) else v  # noqa: E731
    record.buffers = tree_map(to, capsule["buffers"])
    record.rng, record.indices = capsule["rng"], capsule["indices"]
    record.batches = [tuple(tree_map(to, b)) for b in capsule["batches"]]
    return record


def demo() -> None:
    """A Linear whose fp16 result passes 65504 from step 3 on: found, named, pinned to fp32; training goes on."""
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

    for step in range(8):
        if step == 3:
            net.wide.weight.data *= 3e5  # it had grown by itself, in the run this is taken from
        record = StepRecord(step, net)
        record.keep(x, y)
        loss = run_step((x, y), False)
        if not any(is_bad(extent(t)) for t in (loss, *(p.grad for p in net.parameters()))):
            optimizer.step()
            print(f"step {step}: loss {loss.item():.4f}")
        else:
            report = examine(run_step, record, net, num_classes=4, precision="fp16")
            print(report)
            island, inner = net.get_submodule(report.module), net.get_submodule(report.module).forward

            def forward(v: Tensor, inner: Callable = inner) -> Tensor:
                with torch.autocast("cpu", enabled=False):
                    return inner(v.float())
            island.forward = forward
            print(f"healed: {report.module} is an fp32 island")
        optimizer.zero_grad()


if __name__ == "__main__":
    demo()
