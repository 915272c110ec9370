# SPDX-License-Identifier: MIT (finite 2.2.0, 2026-11-22)
"""
Autopsy: find the operation that made the first bad number, and say which of a few things was wrong.

A bad loss names nobody. A forward hook names the module that *received* the inf: between two Linears, `log(h * 0 - 1)`
makes the second Linear look guilty. Autograd's anomaly mode passes over inf. And `sqrt` at 0 has a finite loss: only
its backward is infinite. So the step is run again:

    record = StepRecord(step, net)            before the forward: RNG states, buffers, tensors that modules carry over
    record.keep(images, labels)               each micro-batch, by reference, as the loader gave it
    report = examine(run_step, record, net)   after a rejected step; the weights are still those from before it

1. The record is put back, and the step runs under a dispatch mode that looks at the result of every aten operation,
   forward and backward. An operation with good inputs and a bad result is a birth. Every bad result inherits the births
   of its inputs. The guilty birth is the first among the ancestors of the loss (if the loss is finite: of the
   gradients). So what is swallowed on the way is never blamed: a mask of -inf that softmax turns to 0, log(0) behind a
   `where`, a NaN target that is left out. "Bad" is NaN, inf, or beyond 1.8e19, whose square is inf in fp32.
2. The verdict follows from where the guilty result comes from:

    weights            from a parameter, buffer or hidden state that was bad before the step
    data               from a bad value in the batch, a label out of range, or labels that are all ignored
    precision          from an operation; in fp32 the step is finite
    divergence         from an operation; the step is bad in fp32 too
    calibration        nothing is bad at loss scale 1
    compiler           nothing is bad in eager mode, but the compiled step is
    not reproducible   nothing is bad the second time
    error              the step raised an exception, and the data is not the cause

3. The guilty operation is repeated on the same inputs in fp32 and fp64. In a loop cures are tried on the recorded step:
   the guilty module in fp32, its parents, an eps at that line, bf16, fp32.

This file changes no weights. To copy it: it needs torch, nothing else. `python autopsy.py` shows one overflow mended.
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
import warnings
from bisect import bisect_right
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import cache, partial, wraps
from itertools import chain, count
from math import inf
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

LIMIT = 1.8e19  # just under sqrt(3.4e38): the square of anything above is inf in fp32, so it is as good as infinite
TORCH, LIBRARY = os.path.dirname(torch.__file__), os.path.dirname(os.__file__)
HALF = (torch.float16, torch.bfloat16)
FLOATS = tuple(d for d in vars(torch).values() if isinstance(d, torch.dtype) and d.is_floating_point)
STATISTIC = re.compile("(running_mean|running_var|num_batches_tracked)$")  # what a buffer of a norm is called
EPS = 1e-6
EXACT = r"(torch\.)?(fp32|float32|float|32|32-true|o0|no|none|fp64|float64|double)"  # names of a step without half
VERDICTS = {  # what to do, in train.py's flags and as code; the gravest first: when ranks differ, that one counts
    "data": ("look at these samples; leave them out",) * 2,
    "weights": ("--resume last_good.pt, and look at what the steps before this one did",
                "reset it, or load the last checkpoint that is finite; examine the step that wrote it"),
    "error": ("mend the code at this line",) * 2,
    "divergence": ("--resume last_good.pt with a lower --lr, a longer --warmup-updates, --clip-grad 1.0",
                   "the numbers have grown: an earlier checkpoint, a lower learning rate, longer warm-up, clipping"),
    "precision": ("x.float() before that line, or --precision bf16",
                  "that line in fp32: torch.autocast(x.device.type, enabled=False) around it, x.float() before it"),
    "compiler": ("train without --compile", "run the step under torch.compiler.set_stance('force_eager')"),
    "calibration": ("nothing: the loss scale falls by itself", "skip the step and halve the loss scale"),
    "not reproducible": ("the same step once more with --deterministic; if it recurs, suspect this machine's hardware",
                         "torch.use_deterministic_algorithms(True); if it recurs, suspect this machine's hardware"),
}


def _first(mend: Callable[[Any], Any]) -> Callable[..., tuple]:
    return lambda x, *args, **kwargs: ((mend(x), *args), kwargs)


CLAMP, INSIDE = _first(lambda x: x.clamp(min=EPS)), _first(lambda x: x.clamp(-1 + EPS, 1 - EPS))
UNMASK = "over a wholly masked row: write -1e4 into the mask instead of -inf", _first(lambda x: x.clamp(min=-1e4))
NO_LABEL = "a mean over no label at all: divide the sum of the losses by max(1, number of labels)"
EQUAL = "equal eigenvalues: the slope holds 1 / (their difference), which is 1 / 0; add a small distinct diagonal", None
ONE = "the spread of one number is 0 / 0: no batch of one, or correction=0", lambda *a, **k: (a, k | {"correction": 0})
WEAK: dict[str, tuple[str, Callable | None]] = {  # operation: what to write, and how to change the call's arguments
    "sqrt": ("sqrt has no finite slope at 0: sqrt(x.clamp(min=1e-6))", CLAMP),
    "rsqrt": ("rsqrt of 0 or less: rsqrt(x.clamp(min=1e-6))", CLAMP),
    "log": ("log of 0 or less: log(x.clamp(min=1e-6))", CLAMP),
    "pow": ("a power of 0 or of a negative base: x.clamp(min=1e-6) ** p", CLAMP),
    "div": ("division by zero: x / (y + eps), eps = 1e-6", lambda x, y, *a, **k: ((x, y + EPS, *a), k)),
    "reciprocal": ("division by zero: 1 / (x + eps), eps = 1e-6", _first(lambda x: x + EPS)),
    "exp": ("exp beyond 88 is inf: exp(x.clamp(max=80))", _first(lambda x: x.clamp(max=80))),
    "acos": ("no finite slope at -1 and 1: acos(x.clamp(-1 + 1e-6, 1 - 1e-6))", INSIDE),
    "asin": ("no finite slope at -1 and 1: asin(x.clamp(-1 + 1e-6, 1 - 1e-6))", INSIDE),
    "atanh": ("inf at -1 and 1: atanh(x.clamp(-1 + 1e-6, 1 - 1e-6))", INSIDE),
    "softmax": UNMASK, "log_softmax": UNMASK, "logsumexp": UNMASK,
    "layer_norm": ("a row of equal numbers, and an eps too small for it: eps=1e-5",
                   lambda x, s, w=None, b=None, eps=0, **k: ((x, s, w, b, 1e-5), k)),
    "ctc_loss": ("a target longer than its input has no alignment: look at the lengths, or zero_infinity=True",
                 lambda *a, **k: (a[:6], k | {"zero_infinity": True})),
    "std": ONE, "var": ONE,
    "nll_loss": (NO_LABEL, None), "nll_loss2d": (NO_LABEL, None),
    "batch_norm": ("running_var must be 0 or more: set the running statistics back", None),
    "mul": ("0 * inf is NaN: choose with torch.where before the inf is made, do not multiply by a mask", None),
    "eigh": EQUAL, "svd": EQUAL, "eig": EQUAL,
    "weight_norm_interface": ("a weight of norm 0 has no direction (g * v / |v|): initialise v away from 0", None),
    "empty": ("memory that nobody wrote: torch.zeros instead of torch.empty", None),
}
SAME = {"truediv": "div", "divide": "div", "true_divide": "div", "rdiv": "reciprocal", "rtruediv": "reciprocal"}


# --- The record

class StepRecord:
    """What is needed to run one step again, apart from the weights (a rejected step has not touched those).

    Create it before the step's first forward; keep() every micro-batch with the labels as they came, and the samples'
    indices in the data set where they are known. Costs a copy of the buffers and the RNG states; no sync.
    """

    def __init__(self, step: int, net: nn.Module, *, rank: int = 0):
        self.step, self.rank, self.net = step, rank, net
        self.device = next((p.device for p in net.parameters()), torch.device("cpu"))
        self.buffers = {name: b.detach().clone() for name, b in net.named_buffers()}
        self.carried = [(m, name, value) for m in net.modules() for name, value in _attributes(m)]
        self.rng = rng_states(self.device)
        self.batches: list[tuple[Any, ...]] = []
        self.indices: list[list[int] | None] = []

    def keep(self, *batch: Any, indices: Iterable[int] | None = None) -> None:
        self.batches.append(batch)
        self.indices.append(None if indices is None else [int(i) for i in indices])

    @torch.no_grad()
    def restore(self) -> None:
        """RNG, buffers and carried tensors as they were before the step; no gradients."""
        set_rng_states(self.rng, self.device)
        for name, b in self.net.named_buffers():
            if name in self.buffers:
                b.copy_(self.buffers[name])
        for module, name, value in self.carried:
            setattr(module, name, value)
        self.net.zero_grad(set_to_none=True)


def _attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """What a module carries from step to step without a buffer: `self.hidden = h`, `self.state = (h, c)`."""
    values = [(n, v) for n, v in vars(module).items() if isinstance(v, Tensor | tuple | list)]
    return [(n, v) for n, v in values if (isinstance(v, Tensor) or len(v) < 99) and any(named_tensors(v))]


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
    """The first operation with a bad result. Empty where there is none."""

    op: str = ""  # "aten.log.default"
    module: str = ""  # the innermost module whose forward it belongs to; "" = the model's own
    phase: str = ""  # "forward" or "backward"
    node: str = ""  # backward: autograd's name for the function
    line: str = ""  # file:line in function
    made: str = ""  # what the result holds; "" = the operation raised
    result: str = ""  # dtype and shape of the result
    inputs: tuple[str, ...] = ()
    largest: float = 0.0  # the largest finite magnitude among the inputs
    samples: tuple[int, ...] = ()  # positions in the micro-batch
    source: str = ""  # "parameter head.weight", "input", ...: bad before the step; the operation is the first to use it
    again: str = ""  # the operation repeated on the same inputs: "finite in float32", "nan in float32, nan in float64"
    call: int = 0  # which call of the module in this step; 0 = not known
    caller: str = ""  # the line of that call

    @property
    def origin(self) -> str:
        """The verdict, where the source alone says it."""
        state = self.source.startswith(("parameter ", "buffer ", "attribute "))
        return "weights" if state else "data" if self.source not in ("", CONSTANT) else ""

    @property
    def written(self) -> bool:
        return self.source == WRITTEN

    @property
    def grown(self) -> bool:
        """Finite inputs so large that their result overflows."""
        return self.made != "nan" and self.largest > 1e6 and not self.source

    @property
    def weak(self) -> str:
        """The key of WEAK for a node like "LogBackward0" or an operation like "aten.log_.default", or ""."""
        plain = {key.replace("_", ""): key for key in WEAK}
        for name in (self.node, self.op.partition(".")[2].partition(".")[0]):
            name = re.sub(r"Backward\d*$|_forward|_backward_data|_backward|_like", "", name).lower()
            name = re.sub("_|native|linalg|^new", "", name)
            if name in plain and not (name == "mul" and self.made != "nan") and not (name == "pow" and self.grown):
                return plain[name]
        return ""


@dataclass(frozen=True, kw_only=True)
class Report(Birth):
    """The outcome, with the guilty operation's birth. str(report) is the text for a tired person."""

    verdict: str  # one of VERDICTS
    step: int
    rank: int
    precision: str = ""
    scale: float = 1.0
    advice: str = "code"  # or "flags": those of this repository's train.py
    symptom: str = ""  # "loss is nan", "gradient of head.weight is inf", "IndexError: ...", ...
    micro_batch: int = 0
    indices: tuple[int, ...] = ()  # of the samples in the data set, if the record knew them
    names: tuple[str, ...] = ()  # bad tensors (weights), or what is wrong with the batch (data)
    gradients: tuple[tuple[str, str, int, int], ...] = ()  # bad ones, as the backward made them: name, type, bad, of
    calls: int = 0  # how often the module is called in a step
    tried: tuple[str, ...] = ()  # "block in fp32: finite"
    cure: tuple[str, str] = ("", "")  # the first that was finite: ("module, result in fp32", "block")

    @property
    def suggestion(self) -> str:
        (kind, name), flags = self.cure, self.advice == "flags"
        if kind.startswith("module"):
            back = "" if "result" in kind else f".to(torch.{self.result.partition('[')[0]})"
            code = f"{name} in fp32: with torch.autocast(x.device.type, enabled=False): y = {name}(x.float()){back}"
            return f"--keep-fp32 '{name}'" if flags else code
        if kind == "precision":
            whole = f"--precision {name}" if flags else f"the whole step in {name}"
            return whole if self.module else f"x.float() before {self.line or 'that line'}, or {whole}"
        if self.written:
            return f"the script writes this number itself, at {self.line}: leave it out of the loss, or write another"
        if self.verdict == "data" and self.made and not self.source:
            return NO_LABEL
        if self.verdict in ("divergence", "precision") and self.weak and not self.source:
            return WEAK[self.weak][0]
        if self.verdict != "divergence" or self.grown:
            return VERDICTS[self.verdict][not flags]
        if not self.op:
            return "no operation was found: the bad number was made where none is seen (another thread or library)"
        if self.source:
            return ("an input of this operation was bad when the step began, and it is no parameter, buffer or part of "
                    "the batch: a constant, or a state carried over from an earlier step")
        return "this operation has no finite value at these inputs: clamp or mask them before it, or write it otherwise"

    def __str__(self) -> str:
        lines = [f"{self.symptom or 'the step was bad'} at step {self.step} ({self.precision or 'precision not told'}, "
                 f"scale {self.scale:g}, rank {self.rank}) -> {self.verdict}"]
        if self.op:
            node, line = f" of {self.node}" if self.node else "", f", {self.line}" if self.line else ""
            call = f", call {self.call} of {self.calls} from {self.caller}" if self.call and self.calls > 1 else ""
            first = f"first to use {self.source}" if self.source and not self.written else "first bad op"
            made = f"{'writes' if self.written else 'made'} {self.made}" if self.made else "raised"
            lines.append(f"{first}: {self.op} in {self.module or 'the model itself'}{call} "
                         f"({self.phase}{node}{line}) {made}")
        if self.inputs:
            lines.append("its inputs: " + "; ".join(self.inputs))
        if self.again:
            lines.append(f"repeated on the same inputs: {self.again}")
        if self.names:
            lines.append(("already bad: " if self.verdict == "weights" else "in the batch: ") + _few(self.names, 5))
        if self.samples:
            known = f" (in the data set: {_few(self.indices)})" if self.indices else ""
            lines.append(f"samples {_few(self.samples)} of micro-batch {self.micro_batch}, rank {self.rank}{known}")
        if self.verdict in ("precision", "divergence"):
            lines.append("the same batch in fp32: " + ("finite" if self.verdict == "precision" else "bad as well"))
        if self.gradients:
            told = (f"{name} {kind} ({bad} of {of} values)" for name, kind, bad, of in self.gradients)
            lines.append(f"bad gradients in the order of the backward, {len(self.gradients)} in all: {_few(told, 4)}")
        return "\n  ".join([*lines, *(f"tried: {sentence}" for sentence in self.tried), f"try: {self.suggestion}"])


def agree(report: Report, received: bool = False) -> Report:
    """The same report on every rank: the gravest verdict's, of the lowest rank that has it. A collective.

    `received`: this rank's bad number came from another rank, whose report is preferred."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return report
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (received, list(VERDICTS).index(report.verdict), report.rank, asdict(report)))
    return Report(**min(every, key=lambda told: told[:3])[3])


# --- The examination

def examine(run_step: Callable[[tuple[Any, ...], bool], Any], record: StepRecord, net: nn.Module, *,
            state: Any = None, num_classes: int | None = None, precision: str = "", scale: float = 1.0,
            try_cures: bool = True, advice: str = "code", run_compiled: Callable | None = None) -> Report:
    """Run the recorded step again and say what was wrong. On every rank, each with its own record; then agree().

    `run_step(batch, fp32)`: forward and backward of ONE recorded micro-batch on the bare `net` (no DDP), no optimizer;
    returns the 0-dim loss before scaling. `fp32=True`: autocast off, half inputs and parameters upcast, no loss scale;
    if that ran on fp32 copies of the parameters, it returns (loss, {name: gradient}). Compiled code in it runs eagerly.
    `run_compiled`: the same through the compiled model, where `run_step` does without. `state`: nest of optimizer
    tensors. `scale`: the step's loss scale; run_step may scale by it or not. `num_classes`: the labels' range, where no
    loss says it. Gradients are None afterwards, RNG untouched, buffers as before the step.
    """
    outside, more = rng_states(record.device), {}
    try:
        with _stance("force_eager"):
            rerun = Rerun(run_step, record, net)
            symptom, birth = rerun.watch()
            if symptom:
                verdict, birth, more = _judge(rerun, symptom, birth, precision, scale)
                if try_cures and (verdict == "precision" or (verdict == "divergence" and birth.weak)):
                    kinds = sorted(("module", "module, result in fp32"), reverse=advice != "flags")
                    more["tried"], more["cure"] = _try(rerun, birth, verdict == "precision", kinds)
            else:
                verdict, birth, more = _finite(rerun, state, num_classes, scale, run_compiled)
    finally:
        record.restore()
        set_rng_states(outside, record.device)
    told = {"symptom": symptom, "micro_batch": rerun.last, "gradients": rerun.gradients} | asdict(birth) | more
    known = record.indices[told["micro_batch"]]
    return Report(verdict=verdict, step=record.step, rank=record.rank, precision=str(precision), scale=float(scale),
                  advice=advice, calls=rerun.locator.calls[birth.module],
                  indices=tuple(known[i] for i in birth.samples) if known else (), **told)


def _judge(rerun: Rerun, symptom: str, birth: Birth, precision: Any, scale: float) -> tuple[str, Birth, dict[str, Any]]:
    """(verdict, birth, what else to report) of a step that is bad again."""
    where = rerun.locator
    if birth.origin:
        holds = birth.source if birth.origin == "weights" else f"{birth.source} holds {birth.made}"
        return birth.origin, birth, {"names": () if birth.written else (holds,)}
    if birth.op and not birth.made:  # the step raised, and not because of a bad number
        data = where.wrong or re.search(r"(Target|index) -?\d+ is out|index out of range in|Class values", symptom)
        return "data" if data else "error", birth, {"names": where.wrong}
    if where.ignored is not None and birth.weak in ("nll_loss", "nll_loss2d", "div", "reciprocal"):
        return "data", birth, {"names": (f"every label is ignored ({where.ignored}): their mean is 0/0",)}
    if not rerun(fp32=True):
        factor = rerun.factor if rerun.factor < inf else max(scale, 2.0**16)
        if factor > 1.5 and not rerun(Calls(factor)):
            return "calibration", birth, {"tried": ("loss scale 1: finite",)}
        return "not reproducible" if re.fullmatch(EXACT, str(precision).lower()) else "precision", birth, {}
    if "float16" in birth.result and birth.again == "finite in float32":  # something else is bad in fp32
        symptom, other = rerun.watch(fp32=True)
        half = "float16" in other.result and other.again == "finite in float32"  # run_step leaves this one in half
        return other.origin or ("precision" if half else "divergence"), other, {"symptom": symptom}
    return "divergence", birth, {}


def _finite(rerun: Rerun, state: Any, num_classes: int | None, scale: float, run_compiled: Callable | None) -> tuple:
    """The same for a step that is not bad again."""
    if run_compiled or "torch._dynamo" in sys.modules:
        with _stance("default"):
            if said := Rerun(run_compiled or rerun.run_step, rerun.record, rerun.net)():
                return "compiler", Birth(), {"tried": (f"compiled: {said}", "in eager mode: finite")}
    named = {f"parameter {n}": p for n, p in rerun.net.named_parameters() if p.requires_grad}
    named |= {f"optimizer state {n}": t for n, t in named_tensors(state)} | _statistics(rerun.net)
    if names := tuple(name for name, t in named.items() if is_bad(extent(t))):
        return "weights", Birth(), {"names": names, "symptom": f"{names[0]} was bad before the step"}
    for k, batch in enumerate(rerun.record.batches if num_classes is not None else ()):
        for name, t in named_tensors(batch):  # labels: the later items of a tuple; in a mapping what is called so
            label = re.search(r"\.(labels?|targets?)$", name) if "." in name else name != "0"
            if label and not (t.is_floating_point() or t.is_complex() or t.dtype is torch.bool):
                wrong = ((t < 0) | (t >= num_classes)) & ~sum(t == i for i in rerun.locator.lawful).bool()
                if wrong.any():
                    rows = tuple(wrong.reshape(len(t), -1).any(1).nonzero().flatten().tolist())
                    names = tuple(f"label {v} is not in 0..{num_classes - 1}" for v in t[wrong].unique().tolist())
                    return "data", Birth(samples=rows), {"names": names, "micro_batch": k}
    if scale > 1:
        return "calibration", Birth(), {"tried": ("loss scale 1: finite",)}
    return "not reproducible", Birth(), {}


class Rerun:
    """The recorded step, as often as needed, each time from the same buffers and random numbers."""

    def __init__(self, run_step: Callable, record: StepRecord, net: nn.Module):
        if not record.batches:
            raise ValueError("the record holds no micro-batch: call record.keep(...) before the step")
        self.run_step, self.record, self.net = run_step, record, net
        self.factor, self.last, self.gradients = 1.0, 0, ()

    def __call__(self, context: AbstractContextManager | None = None, fp32: bool = False) -> str:
        """Run it up to the first bad micro-batch: what is bad, "" for nothing."""
        self.record.restore()
        try:
            with context or nullcontext():
                for k, batch in enumerate(self.record.batches):
                    if isinstance(context, Locator):
                        self.last = k
                        context.take(batch, len(self.record.indices[k] or ()))
                    self.results = self.run(batch, fp32)
                    for name, t in self.results.items():
                        if is_bad(span := extent(t)):
                            return f"{name} is {_made(span)}"
        except Exception as error:
            self.error = error
            return _said(error)
        return ""

    def run(self, batch: tuple[Any, ...], fp32: bool) -> dict[str, Tensor]:
        """Run one micro-batch: {"loss": ..., "gradient of head.weight": ..., "buffer norm.running_var": ...}."""
        clean = [name for name, b in _statistics(self.net).items() if not is_bad(extent(b))]
        out = self.run_step(batch, fp32)
        loss, grads = out if isinstance(out, tuple) else (out, {n: p.grad for n, p in self.net.named_parameters()})
        after, grads = _statistics(self.net), {f"gradient of {n}": g for n, g in grads.items() if g is not None}
        return {"loss": torch.as_tensor(loss).detach()} | grads | {name: after[name] for name in clean}

    def watch(self, fp32: bool = False) -> tuple[str, Birth]:
        """Run it with every operation watched: (what is bad, who made it)."""
        where, calls, self.error = Locator(self.net), Calls(), None
        self.locator = where
        with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True, check_nan=False), calls:
            warnings.simplefilter("ignore")  # a compiled module fires a hook twice and says so; it is harmless
            symptom = self(where, fp32)
        if isinstance(self.error, torch.OutOfMemoryError):
            raise self.error
        if self.error:
            line = _line(traceback.format_tb(self.error.__traceback__))
            return symptom, where.failed or Birth(type(self.error).__name__, phase="forward", line=line)
        if not symptom:
            return "", Birth()
        loss = float(self.results["loss"].float().mean())
        self.factor = max(1.0, calls.root / loss) if loss else 1.0  # by how much run_step scaled its loss; 1 for NaN
        bad = [(n[12:], t) for n, t in self.results.items() if n.startswith("gradient of ") and is_bad(extent(t))]
        order = {storage: k for k, storage in enumerate(where.causes)}  # as they became bad
        bad.sort(key=lambda row: order.get(_storage(row[1]), len(order)))
        self.gradients = tuple((n, _type(t), int(_beyond(_values(t)).sum()), _values(t).numel())
                               for n, t in bad)
        return symptom, where.blame([self.results["loss"]]) or where.blame(self.results.values()) or Birth()


# --- Which operation was it

CONSTANT = "a constant"
WRITTEN = "a number that the script writes"  # fill_, full, ...: a bad scalar, and no bad tensor
LAWFUL = (sys.maxsize - 1, None)  # the cause of a mask: only large negative values, written on purpose
NOBODY = (sys.maxsize, None)  # no cause: nothing that this step did


class Locator(TorchDispatchMode):
    """Looks at the result of every aten operation while it is entered; blame(tensors) then names the birth.

    `net` may be None: then modules are named as they are met. `batch`: the micro-batch, so that samples can be named.
    What it remembers of a tensor it forgets with the tensor's storage, so it may stay entered for many steps.
    """

    def __init__(self, net: nn.Module | None = None, batch: Any = ()):
        super().__init__()
        self.net, self.paused, self._clock = net, False, count()
        self.names, self.calls = {}, Counter()  # modules: their names, how often each was called for this batch
        self.failed: Birth | None = None  # the operation that raised
        self.wrong: tuple[str, ...] = ()  # "label 3 is not in 0..2"
        self.lawful = {-100}  # every ignore_index seen
        self._stack: list[tuple[str, int]] = [("", 0)]  # modules under way: name, number of the call
        self._since = deque([(0, ("", 0))], maxlen=1 << 18)  # autograd's sequence number where a module begins or ends
        # Of a storage, while it lives: its name if it was ready-made; what made it bad; bytes from sample to sample.
        self._known, self.causes, self._rows = WeakKeyDictionary(), WeakKeyDictionary(), WeakKeyDictionary()
        self.take(batch)

    def take(self, batch: Any, size: int = 0) -> None:
        """These tensors are the batch: by them samples are named. `size`: how many samples, if that is known."""
        leaves = dict(named_tensors(batch))
        for name, t in leaves.items():
            first, _, rest = name.partition(".")
            name = rest or {"0": "input", "1": "target"}.get(first, f"item {first} of the batch")
            self._known.setdefault(_storage(t), name)
        shapes = [t.shape for t in leaves.values()]
        counts = Counter(n for shape in shapes for n in dict.fromkeys(shape[:2]))  # most have it first, or after time
        self.size = size or max(counts, key=lambda n: (counts[n], n in [s[0] for s in shapes if s]), default=0)
        self.calls.clear()
        self._rows.clear()
        self.ignored: int | None = None  # the ignore_index of a loss that ignores every label of this batch
        for t in leaves.values() if self.size > 1 else ():
            if self.size in t.shape[:2] and t.layout is torch.strided:
                self._carries(t, t.shape.index(self.size), 1)

    def _name(self, net: nn.Module) -> None:
        for name, module in net.named_modules():
            self.names.setdefault(module, name)
            for key, t in named_tensors(dict(_attributes(module)), name):
                self._known[_storage(t)] = f"attribute {key}"
        self._known.update({_storage(b): f"buffer {n}" for n, b in net.named_buffers()})
        self._known.update({_storage(p): f"parameter {n}" for n, p in net.named_parameters()})

    def __enter__(self) -> Locator:
        if self.net is not None:
            self._name(self.net)
        self._handles = (hooks.register_module_forward_pre_hook(self._enter_module),
                         hooks.register_module_forward_hook(self._leave_module, always_call=True))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()

    # Modules. An autograd node belongs to the module that was under way when the node got its sequence number.

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if self.net is None and len(self._stack) == 1 and module not in self.names:
            self._name(module)
        name = self.names.get(module, self._stack[-1][0])
        if module in self.names and torch._C._current_autograd_node() is None:  # else a checkpoint repeats its forward
            self.calls[name] += 1
        self._stack.append((name, self.calls[name]))
        self._mark()

    def _leave_module(self, module: nn.Module, args: Any, out: Any) -> None:
        self._stack.pop()
        self._mark()

    def _mark(self) -> None:
        if (number := torch._C._autograd._get_sequence_nr()) >= self._since[-1][0]:  # a GPU's backward counts anew
            self._since.append((number, self._stack[-1]))

    # Operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(t, "__tensor_flatten__") for t in types):
            return NotImplemented  # a tensor that wraps others: their operations come here next
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        rule, given, inputs = _rule(func), dict(enumerate(args)) | kwargs, _flat((args, kwargs))
        written = _flat([given.get(k) for k in rule.writes])
        kept = tuple(a.clone() if any(a is t for t in written) else a for a in args)
        if rule.overwrites:
            inputs = [t for t in inputs if not any(t is w for w in written)]
        told = _told(inputs) if written else []  # now: an in-place operation overwrites its evidence
        if rule.index:
            self._check_index(rule, func, args, inputs)
        try:
            out = func(*args, **kwargs)
        except Exception:
            told = told or _told(inputs)
            self.failed = self.failed or self._earliest(told, func)[1] or self._birth(func, told)
            raise
        before, outs = {_storage(t) for t in inputs}, _flat(out) + written
        if self._rows:
            try:
                self._carry(rule, given, inputs, outs, before)
            except Exception:  # following samples is a service: it never raises into the step
                self._rows.clear()
        for t in outs:
            if (storage := _storage(t)) in before and not written:
                continue  # a view: it shares what is known of its storage
            if is_bad(span := extent(t)):
                cause = self._earliest(told := told or _told(inputs), func)
                asked = any(isinstance(a, float) and is_bad((a, a)) for a in given.values())
                if cause >= LAWFUL and is_mask(span) and (cause == LAWFUL or asked):
                    cause = LAWFUL
                elif cause >= LAWFUL:
                    cause = next(self._clock), self._birth(func, told, t, _again(func, kept, kwargs))
                    if rule.constant and asked and not cause[1].source:
                        cause = cause[0], replace(cause[1], source=WRITTEN, again="")
                elif not cause[1].samples and 0 < len(met := self._samples(t)) < self.size:
                    cause = cause[0], replace(cause[1], samples=met)  # born elsewhere, it enters the batch here
                self.causes[storage] = cause
            elif storage in self.causes and _values(t).nbytes >= storage.nbytes():
                del self.causes[storage]  # wholly overwritten
        return out

    def blame(self, tensors: Iterable[Tensor]) -> Birth | None:
        """The earliest birth among the ancestors of these tensors."""
        return self._earliest(_told(tensors))[1]

    def _earliest(self, told: list, func: Any = None) -> tuple[int, Birth | None]:
        """The first cause among these tensors, which `func` uses: (its number, its birth)."""
        bad = (self._cause(t, span, func, told) for t, span in told if is_bad(span))
        return min(bad, default=NOBODY, key=lambda cause: cause[0])

    def _cause(self, t: Tensor, span: tuple[float, float], func: Any, told: list) -> tuple[int, Birth | None]:
        """What made `t` bad. The step may also find a bad tensor ready-made: a weight, a mask, an input, a constant."""
        if (storage := _storage(t)) in self.causes:
            return self.causes[storage]
        name = self._known.get(storage, "")
        if is_mask(span) and not name.startswith("parameter ") and not STATISTIC.search(name):
            return LAWFUL
        if not name or not func:
            return NOBODY
        birth = replace(self._birth(func, told, t), source=name, samples=self._samples(t))
        return self.causes.setdefault(storage, (next(self._clock), birth))

    def _birth(self, func: Any, told: list, out: Tensor | None = None, again: str = "") -> Birth:
        stack, (module, call), node = traceback.format_stack(), self._stack[-1], torch._C._current_autograd_node()
        name, line, phase = "", "", "forward"
        if node is not None:  # Python frames inside the backward: a hook, a custom function's backward, a checkpoint
            stack = stack[max((k + 1 for k, frame in enumerate(stack) if "_engine_run_backward" in frame), default=0):]
        if node is not None and not (torch.is_grad_enabled() and any("checkpoint.py" in frame for frame in stack)):
            phase, name, line = "backward", node.name().rpartition(":")[2], _line(stack)
            stack = [*node.metadata.get("traceback_", ())]
            if isinstance(variable := getattr(node, "variable", None), Tensor):
                owner = self._known.get(_storage(variable), "").removeprefix("parameter ")
                module, call = owner.rpartition(".")[0], 0
            elif len(self._stack) == 1:
                at = bisect_right(self._since, node._sequence_nr(), key=lambda mark: mark[0])
                module, call = self._since[at - 1][1]
        calling = [k for k, frame in enumerate(stack) if "in _call_impl" in frame]
        bad = [s for _, s in told if is_bad(s)]
        about = {} if out is None else dict(
            made=_made(extent(out)), result=_type(out), source="" if all(map(is_mask, bad)) else CONSTANT,
            samples=self._samples(out, out.isnan() if bad and out.isnan().any() else None))  # its -inf may be a mask
        return Birth(
            op=str(func), module=module, phase=phase, node=name, line=line or _line(stack), call=call, again=again,
            inputs=tuple(f"{_type(t)} {low:.3g} .. {high:.3g}" for t, (low, high) in told),
            largest=max((abs(v) for _, s in told for v in s if not is_bad((v, v))), default=0.0),
            caller=_line(stack[: calling[-1]]) if calling else "", **about)

    def _check_index(self, rule: SimpleNamespace, func: Any, args: Any, inputs: list[Tensor]) -> None:
        """A label or an index out of range: on a GPU the kernel would end the process's CUDA context."""
        for index, size, low, ignore in rule.index(*args):
            if ignore is not None:
                self.lawful.add(ignore)
                self.ignored = ignore if bool((index == ignore).all()) else self.ignored
            wrong = ((index < low) | (index >= size)) & (index != ignore)
            if wrong.any():
                what = "index" if ignore is None else "label"
                self.wrong = tuple(f"{what} {v} is not in 0..{size - 1}" for v in index[wrong].unique().tolist())
                self.failed = replace(self._birth(func, _told(inputs)), samples=self._samples(index, wrong))
                raise IndexError(self.wrong[0])

    # Samples. A storage carries the batch dimension where it came from the batch through operations that keep it: then
    # one step along the batch is a fixed number of bytes there, whatever the shape through which it is viewed.

    def _carries(self, t: Tensor, d: int, inner: int) -> None:
        if t.stride(d):
            self._rows[_storage(t)] = t.stride(d) * inner * t.element_size()

    def _dim(self, t: Tensor) -> tuple[int, int] | None:
        """(the dimension of `t` that is the batch, elements of this dimension a sample), or None."""
        step = self._rows.get(_storage(t), 0) // t.element_size() if t.layout is torch.strided else 0
        for d, (n, stride) in enumerate(zip(t.shape, t.stride(), strict=True) if step else ()):
            if stride and n > 1 and step % stride == 0 and n % (self.size * (step // stride)) == 0:
                return d, step // stride
        return None

    def _samples(self, t: Tensor, wrong: Tensor | None = None) -> tuple[int, ...]:
        """The samples for which `wrong` is true, or without it those of which `t` has a bad number."""
        try:
            if (found := self._dim(t)) is None:
                return ()
            wrong = _beyond(t) if wrong is None else wrong
            wrong = wrong.unflatten(found[0], (-1, self.size, found[1])).movedim(found[0] + 1, 0)  # B, ...
            return tuple(wrong.reshape(self.size, -1).any(1).nonzero().flatten().tolist())
        except Exception:
            return ()

    def _carry(self, rule: SimpleNamespace, given: Any, inputs: list[Tensor], outs: list[Tensor], before: set) -> None:
        """Mark the results that still have the batch dimension."""
        found = [(k - len(inputs), t, found) for k, t in enumerate(inputs) if (found := self._dim(t))]
        for number, t in enumerate(outs):
            if (storage := _storage(t)) in self._rows and storage in before:
                continue  # a view
            self._rows.pop(storage, None)  # overwritten
            for k, source, (d, inner) in found if t.layout is torch.strided else ():
                if (to := rule.follow(given, k, number, source, d, t)) is not None:
                    self._carries(t, to, inner)
                    break


STAYS = re.compile("nll_loss|embedding$|ctc_loss|linalg")  # fewer or more dimensions, but the batch's is where it was
LOST = re.compile("index$|index_put|masked_s|take|convolution_backward|embedding.*backward|rnn.*backward")
CONSTANTS = ("fill", "masked_fill", "index_fill", "full", "full_like", "new_full", "scalar_tensor")
OVERWRITES = ("copy", "fill", "zero", "normal", "uniform", "random", "bernoulli", "exponential")


@cache
def _rule(func: Any) -> SimpleNamespace:
    """What the dispatch needs to know of an operation, found once."""
    schema, name = func._schema, func._schema.name.partition("::")[2].strip("_")
    pointwise = torch.Tag.pointwise in func.tags or name == "copy"
    writes = [key for k, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write
              for key in (k, a.name)]
    if re.search("(native|cudnn|miopen)_batch_norm$", name) and not writes:
        writes = [3, 4]  # the running statistics, of which the schema does not say so
    over = next(((k, a.name) for k, a in enumerate(schema.arguments) if a.name in ("dim", "dims")), None)

    def follow(given: Any, k: int, number: int, source: Tensor, d: int, t: Tensor) -> int | None:
        """The dimension of result `number` that is dimension `d` of the k-th last input, or None."""
        size = source.shape[d]  # before d moves
        if pointwise:
            d += t.dim() - source.dim()
        elif re.fullmatch("(b|add|badd)?b?mm", name):
            if k < -2 or d == source.dim() - (1 if k == -2 else 2):
                return None  # summed over
        elif LOST.search(name) or (number and name.endswith("backward") and "attention" not in name):
            return None  # the slope of a weight
        elif over:
            dims = given.get(over[0], given.get(over[1]))
            dims = [dims] if isinstance(dims, int) else dims or range(source.dim())
            dims = [x % max(source.dim() + (name == "stack"), 1) for x in dims]
            if name != "stack" and d in dims:
                return None
            d += dims[0] <= d if name == "stack" else -sum(x < d for x in dims) * (t.dim() < source.dim())
        elif t.dim() != source.dim() and not STAYS.search(name):
            return None
        return d if 0 <= d < t.dim() and t.shape[d] == size else None

    return SimpleNamespace(writes=writes, follow=follow, index=INDEX.get(name), overwrites=name in OVERWRITES,
                           constant=name in CONSTANTS)


INDEX = {  # operation: (index, what it must be below, what it must not be below, ignore_index) of its arguments
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), lambda x, target, weight, reduction, ignore: [
        (target, x.shape[min(x.dim() - 1, 1)], 0, ignore)]),
    **dict.fromkeys(("gather", "index_select", "scatter", "scatter_add"), lambda x, dim, index, *more: [
        (index, x.shape[dim], 0, None)] if x.dim() else []),
    "embedding": lambda weight, index, *more: [(index, len(weight), 0, None)],
    "index": lambda x, indices, *more: [(i, x.shape[k], -x.shape[k], None) for k, i in enumerate(indices)
                                        if i is not None and all(j is None or j.dtype is torch.int64 for j in indices)],
}


def _again(func: Any, args: Any, kwargs: Any) -> str:
    """The operation on the same inputs in fp32 and fp64: "finite in float32", "nan in float32, finite in float64"."""
    told: list[str] = []
    if torch.Tag.nondeterministic_seeded in func.tags or func.namespace != "aten":
        return ""  # it would draw random numbers, or wait for another rank
    for dtype in (torch.float32, torch.float64):
        try:
            wide, named = _exchange((args, kwargs), dtype, FLOATS)
            spans = [extent(t) for t in _flat(func(*wide, **named))]
        except Exception:  # a kernel that knows one dtype only
            break
        bad = next((_made(s) for s in spans if is_bad(s)), "finite")
        told.append(f"{bad} in {str(dtype).removeprefix('torch.')}")
        if bad == "finite":
            break
    return ", ".join(told)


# --- Cures, tried on the recorded step

def _try(rerun: Rerun, birth: Birth, precision: bool, kinds: list[str]) -> tuple[tuple[str, ...], tuple[str, str]]:
    """(how each went, the first that was finite): the guilty module in fp32, its parents, an eps, bf16, fp32."""
    cures, tried, name = [], [], birth.module if precision else ""
    while name:
        module = rerun.net.get_submodule(name)
        cures += [(f"{name} in fp32{kind.removeprefix('module')}", island(module, keep="result" in kind), (kind, name))
                  for kind in kinds]
        name = name.rpartition(".")[0]
    advice, mend = WEAK.get(birth.weak, ("", None))
    if mend:
        what = f"{advice.rpartition(': ')[2]} at {birth.line}"
        cures.append((what, Calls(weak=birth.weak, line=birth.line), ("eps", birth.weak)))
    if precision and birth.result.startswith("float16"):
        cures.append(("the whole step in bf16", InBf16(), ("precision", "bf16")))
    for what, context, cure in cures:
        said, missed = rerun(context), isinstance(context, Calls) and not context.hits
        went = "not tried, the call was not found" if missed else f"still bad ({said})" if said else "finite"
        tried.append(f"{what}: {went}")
        if went == "finite":
            return tuple(tried), cure
    if not precision:
        return tuple(tried), ("", "")
    return (*tried, "the whole step in fp32: finite"), ("precision", "fp32")


def island(module: nn.Module, keep: bool = False) -> AbstractContextManager:
    """Inside, `module` computes in fp32. Its result goes back to half, or, with `keep`, stays fp32."""
    inner = nn.Module()
    inner.inner, inner.forward = module, module.forward  # functional_call exchanges the parameters under this module

    def forward(*args: Any, **kwargs: Any) -> Any:
        floats = [t for t in _flat((args, kwargs)) if t.is_floating_point()]
        device = next((t.device.type for t in (*floats, *module.parameters())), "cpu")
        back = floats[0].dtype if floats else torch.float32
        if isinstance(module, nn.Linear | nn.modules.conv._ConvNd) and torch.is_autocast_enabled(device):
            back = torch.get_autocast_dtype(device)
        own = (*module.named_parameters(), *module.named_buffers())
        with torch.autocast(device, enabled=False):
            args, kwargs = _exchange((args, kwargs), torch.float32, HALF)
            half = {f"inner.{n}": t.float() for n, t in own if t.dtype in HALF}
            out = torch.func.functional_call(inner, half, args, kwargs)
        return out if keep or back not in HALF else _exchange(out, back, (torch.float32,))

    return mock.patch.object(module, "forward", forward)


class Calls(TorchFunctionMode):
    """Sees torch's functions as the step calls them. It reads the number of which the backward is taken, divides its
    gradient by `factor`, and changes the arguments of the weak operation at one line as WEAK says."""

    def __init__(self, factor: float = 1.0, weak: str = "", line: str = ""):
        super().__init__()
        self.factor, self.weak, self.line, self.hits, self.root = factor, weak, line, 0, 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.__name__.strip("_")
        if func is Tensor.backward and args[0].numel() == 1 and len(args) == 1 and kwargs.get("gradient") is None:
            self.root, gradient = float(args[0].detach()), torch.ones_like(args[0]) / self.factor
            if self.weak and not any(kwargs.values()):
                with self:  # a checkpoint repeats its forward in there; func itself would switch this mode off
                    return torch.autograd.graph._engine_run_backward(
                        args, (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)
            kwargs = kwargs | {"gradient": gradient} if self.factor > 1 else kwargs
        if self.weak and SAME.get(name, name) == self.weak and _line(traceback.format_stack()) == self.line:
            self.hits += 1
            args, kwargs = WEAK[self.weak][1](*args, **kwargs)
        return func(*args, **kwargs)


class InBf16(TorchDispatchMode):
    """What would be fp16 is bf16."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func._schema.is_mutable:
            args, kwargs = _exchange((args, kwargs or {}), torch.bfloat16, (torch.float16,))
        return func(*args, **kwargs or {})


def _stance(stance: str) -> AbstractContextManager:
    """How compiled code runs. Importing the compiler takes seconds; where it is not loaded, nothing is compiled."""
    return torch.compiler.set_stance(stance) if "torch._dynamo" in sys.modules else nullcontext()


# --- Looking at tensors, and naming what is found

def _values(t: Tensor) -> Tensor:
    """The numbers of a sparse or nested tensor, this rank's part of a sharded one, or the tensor."""
    t = t.to_local() if hasattr(t, "to_local") else t
    if t.layout is torch.strided:
        return t.values() if t.is_nested else t
    return t._values() if t.layout is torch.sparse_coo else t.to_dense() if t.is_mkldnn else t.values()


def _storage(t: Tensor) -> torch.UntypedStorage:
    """One object for all views of a storage. It lives as long as the storage."""
    return _values(t).untyped_storage()


def _told(tensors: Iterable[Tensor]) -> list[tuple[Tensor, tuple[float, float]]]:
    """(tensor, extent) of those with real numbers."""
    return [(t, extent(t)) for t in tensors if t.is_floating_point() or t.is_complex()]


@torch.no_grad()
def extent(t: Tensor) -> tuple[float, float]:
    """(lowest, highest) as Python floats; NaN in both if there is one; (0, 0) for what holds no real numbers."""
    t = _values(t)
    if not t.numel() or t.is_meta or not (t.is_floating_point() or t.is_complex()):
        return 0.0, 0.0
    t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t if t.element_size() > 1 else t.float()
    low, high = torch.aminmax(t)
    return float(low), float(high)


def is_bad(span: tuple[float, float]) -> bool:
    return not (span[0] >= -LIMIT and span[1] <= LIMIT)  # True for NaN


def is_mask(span: tuple[float, float]) -> bool:
    """Bad, but only at the negative end: what -inf or finfo.min in a mask looks like."""
    return span[0] < -LIMIT and span[1] <= LIMIT


def _made(span: tuple[float, float]) -> str:
    """The bad end of a span, as text."""
    return f"{span[1]:.3g}" if span[1] > LIMIT else f"{span[0]:.3g}"


def _type(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"


def _beyond(t: Tensor) -> Tensor:
    return (t.detach().abs().float() <= LIMIT).logical_not()  # True for NaN


def named_tensors(tree: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """(dotted name, tensor) for every tensor in nested mappings, lists, tuples and dataclasses."""
    if isinstance(tree, Tensor):
        yield prefix, tree
        return
    if is_dataclass(tree) and not isinstance(tree, type):
        tree = {f.name: getattr(tree, f.name) for f in fields(tree)}
    if isinstance(tree, Mapping | list | tuple):
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            key = "" if isinstance(key, Tensor) else str(key)  # optimizer.state is keyed by the parameters themselves
            yield from named_tensors(value, ".".join(filter(None, (prefix, key))))


def _flat(tree: Any) -> list[Tensor]:
    """The tensors among an operation's arguments or results."""
    return [a for a in tree_leaves(tree) if isinstance(a, Tensor)]


def _exchange(tree: Any, to: torch.dtype, of: tuple[torch.dtype, ...]) -> Any:
    """The same with every tensor, and every dtype, that is one of `of` exchanged for `to`."""
    def one(v: Any) -> Any:
        if isinstance(v, Tensor):
            return v.to(to, copy=True) if v.dtype in of else v
        return to if isinstance(v, torch.dtype) and v in of else v
    return tree_map(one, tree)


def _statistics(net: nn.Module) -> dict[str, Tensor]:
    """Running statistics: buffers that can never hold a mask or an inf on purpose."""
    return {f"buffer {n}": b for n, b in net.named_buffers() if STATISTIC.search(n)}


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _few(items: Iterable[Any], n: int = 8) -> str:
    items = list(items)
    return ", ".join(map(str, items[:n])) + (f" and {len(items) - n} more" if len(items) > n else "")


def _line(stack: Iterable[str]) -> str:
    """file:line of the innermost frame outside torch. `stack` as format_stack() and anomaly mode write it."""
    inner = ""
    for entry in reversed(list(stack)):
        frame = re.search(r'File "(.+)", line (\d+), in (\S+)', entry)
        own = frame and frame[1] == __file__ and frame[3] not in ("demo", "run_step")
        if not frame or own or frame[1].startswith((TORCH, "<")) or frame[3] == "__torch_function__":
            continue
        at = f"{os.path.basename(frame[1])}:{frame[2]} in {frame[3]}"
        if not frame[1].startswith(LIBRARY) and "-packages" not in frame[1]:
            return f"{inner}, called from {at}" if inner else at
        inner = inner or at  # a library's line: the script's line is wanted too
    return inner


# --- python autopsy.py

def demo() -> None:
    """A Linear whose fp16 result passes 65504: found, named, and finite in fp32."""
    torch.manual_seed(0)
    layers = nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 4)
    net = nn.Sequential(OrderedDict(zip(("0", "1", "wide", "3", "4"), layers, strict=True)))
    net.wide.weight.data *= 3e5  # the fault
    batch, record = (torch.randn(32, 16), torch.randint(0, 4, (32,))), StepRecord(1, net)
    record.keep(*batch)

    def run_step(batch: tuple[Any, ...], fp32: bool) -> Tensor:
        with torch.autocast("cpu", torch.float16, enabled=not fp32):
            logits = net(batch[0])
        loss = nn.functional.cross_entropy(logits.float(), batch[1])
        loss.backward()
        return loss

    print(f"loss {run_step(batch, False).item():.4f}")
    print(report := examine(run_step, record, net, precision="fp16"))
    with island(net.get_submodule(report.cure[1]), keep="result" in report.cure[0]):
        print(f"healed: {report.module} is an fp32 island\nloss {run_step(batch, False).item():.4f}")


# --- python autopsy.py YOUR_SCRIPT.py

USAGE = """python autopsy.py [--from-step N] [--report FILE] YOUR_SCRIPT.py ARGS...   (or: -m package.module ARGS...)
Runs the script as it is and looks at losses, gradients, weights and evaluation outputs. It draws no random number.
At the first bad step the script ends. Then it runs again from the start, quietly (files that it writes are written
again), and every operation of the bad step is watched. --from-step N watches every operation from optimizer step N on,
in the first run: for scripts that take hours. Exit code 3: found; the report is printed and written to FILE
(autopsy.txt). Exit code 0: no such was non-finite. Any other exit code is the script's."""
RERUN = "AUTOPSY_RERUN"  # set for the second run: "backward passes before the watch:file for the report"


class Watch:
    """The hooks around a script. Every operation is watched from optimizer step `begin` on, if that is not None.

    In the second run (`again`), `begin` counts backward passes, and everything noted is looked at at once.
    """

    def __init__(self, argv: list[str], path: str, begin: int | None, again: bool):
        self.argv, self.path, self.begin, self.again = argv, os.path.abspath(path), begin, again
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.home, self.environment, self.started = os.getcwd(), dict(os.environ), time.monotonic()
        self.thread, self.on, self.busy, self.depth, self.undo = threading.get_ident(), True, False, 0, ExitStack()
        self.passes = self.fired = self.skips = self.skipped = self.bad_losses = 0
        self.last: dict[int, tuple[int, int]] = {}  # optimizer: its steps, backward passes at the end of the last one
        self.pending: list[tuple[str, str, int, Tensor, Any]] = []  # kind, name, passes before it, value, evidence
        self.roots = WeakKeyDictionary()  # the outermost modules: (statistic, its copy from the last good step), ...
        self.gradient = self.activation = 0.0  # the largest
        self.optimizer, self.stepping, self.locator, self.read, self.scale = None, None, None, [], 1.0
        self.symptom, self.at, self.step, self.report = "", 0, 0, ""

    def __enter__(self) -> Watch:
        warnings.filterwarnings("ignore", message=".*there are global hooks")  # fired twice when compiled: harmless
        for handle in (hooks.register_module_forward_pre_hook(self._enter),
                       hooks.register_module_forward_hook(self._leave, always_call=True),
                       register_optimizer_step_pre_hook(self._before_step),
                       register_optimizer_step_post_hook(partial(self._safely, self._after_step))):
            self.undo.callback(handle.remove)
        self._wrap(torch.autograd, "backward", self._backward)
        self._wrap(torch.amp.GradScaler, "step", self._scaler_step)
        self._wrap(Tensor, "item", self._item)
        os.register_at_fork(after_in_child=self.__exit__)  # the workers of a DataLoader
        if self.begin is not None:
            torch.compiler.set_stance("force_eager")
        self._watch_operations()
        return self

    def __exit__(self, *error: Any) -> None:
        self.on, self.locator = False, None
        self.undo.close()

    def _watch_operations(self) -> None:
        """Begin to watch every operation, if the time has come."""
        now = self.passes if self.again else self.steps
        if self.on and not self.locator and self.begin is not None and now >= self.begin:
            self.undo.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=False))
            self.locator = self.undo.enter_context(Locator())

    def _mine(self) -> bool:
        # is_compiling() first: the compiler then sees a constant, and traces a graph without any of this
        return not torch.compiler.is_compiling() and self.on and threading.get_ident() == self.thread

    def _wrap(self, owner: Any, name: str, around: Callable) -> None:
        original = getattr(owner, name)

        @wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs) if self._mine() else original(*args, **kwargs)
        self.undo.enter_context(mock.patch.object(owner, name, wrapper))

    def _safely(self, hook: Callable, *args: Any) -> None:
        """Calls the hook. An error of the hook is told in one line and ends the watch, never the script."""
        if self.busy or not self._mine():
            return
        self.busy, self.training, locator = True, torch.is_grad_enabled(), self.locator or SimpleNamespace()
        locator.paused = True
        try:
            with torch.no_grad():
                hook(*args)
        except Exception as error:
            self._say(f"the watcher failed ({_said(error)}) and is switched off; the script goes on")
            self.__exit__()
        finally:
            self.busy = locator.paused = False

    def _say(self, text: str) -> None:
        if self.rank == 0:
            print(f"autopsy: {text}", file=sys.stderr, flush=True)

    # What the script does: modules, backward passes, steps

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._mine():
            self.depth += 1
            if self.depth == 1 and (self.locator or module not in self.roots):
                self._safely(self._outermost, module, args)

    def _outermost(self, module: nn.Module, args: Any) -> None:
        if module not in self.roots:
            self.roots[module] = [(b, b.clone()) for b in _statistics(module).values()]
        if self.locator:
            self.locator.take(args)

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        if self._mine():
            self.depth -= 1
            sampled = self.steps & (self.steps - 1) == 0  # steps 0, 1, 2, 4, 8, ...: every activation is read
            if sampled or not self.depth:
                self._safely(self._outputs, module, out, sampled)

    def _outputs(self, module: nn.Module, out: Any, sampled: bool) -> None:
        evaluation = not self.training and next(module.parameters(), None) is not None
        name = f"the output of {type(module).__name__}" + " under no_grad" * evaluation
        for t in (t for _, t in named_tensors(out) if t.is_floating_point() and t.numel()):
            if sampled:
                self._note("activation", "", torch.linalg.vector_norm(t, inf), None)
            if not self.depth:  # its largest number, because -inf alone is a mask
                self._note("evaluation" if evaluation else "output", name, t.amax(), [t])

    @property
    def steps(self) -> int:
        return max((n for n, _ in self.last.values()), default=self.passes)

    def _backward(self, original: Callable, tensors: Any, *args: Any, **kwargs: Any) -> None:
        self._safely(self._losses, tensors)
        original(tensors, *args, **kwargs)
        self.passes += 1
        self._safely(self._after_backward)

    def _losses(self, tensors: Any) -> None:
        for t in (t.detach() for _, t in named_tensors(tensors)):
            self._note("loss", "loss", t.abs().amax(), [t])

    def _after_backward(self) -> None:
        if self.stepping:
            self._check(self.stepping)
        if self.locator and self.again:
            self._judge([p for p in self._named().values() if p.grad is not None])
        if not self.last:  # a script without an optimizer, or before its first step; else the watch begins after a step
            self._watch_operations()
            if self.passes % 16 == 0:
                self._ask()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        closure = kwargs.get("closure") or next(iter(args[1:]), None)
        self.stepping = optimizer if callable(closure) else None  # then backward passes are still to come
        self._safely(self._check, optimizer)

    def _check(self, optimizer: Any) -> None:
        """Before an optimizer step: one read of the gradients, one transfer of everything noted since the last one."""
        self.fired, self.optimizer = self.fired + 1, optimizer
        scales = [t for t in [getattr(optimizer, "grad_scale", None)] if t is not None]  # a fused step unscales itself
        values = self._ask([*_norms(p.grad for p in _moved(optimizer)), *scales], calm=bool(scales))
        self.scale = values.pop() if scales else 1.0
        norm = sum(v * v for v in values) ** 0.5 / self.scale
        if norm <= LIMIT:
            self.gradient, self.skips, self.bad_losses, self.read = max(self.gradient, norm), 0, 0, []
        elif scales:
            self._skip(optimizer, self.scale, 0.5)
        else:
            self._judge(_moved(optimizer))

    def _after_step(self, optimizer: Any, args: Any = (), kwargs: Any = None) -> None:
        """Its weights and moments are read now, on the device, and asked with the next step's gradients."""
        self.stepping = None
        self._count(optimizer)
        for value in _norms(t for _, p, _, t in _held(optimizer) if p.grad is not None):
            self._note("update", "", value, optimizer)
        if pairs := [*chain(*self.roots.values())]:
            torch._foreach_copy_([copy for _, copy in pairs], [statistic for statistic, _ in pairs])

    def _count(self, optimizer: Any) -> None:
        self.last[id(optimizer)] = self.last.get(id(optimizer), (0, 0))[0] + 1, self.passes
        self._watch_operations()

    def _scaler_step(self, original: Callable, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        fired = self.fired
        out = original(scaler, optimizer, *args, **kwargs)
        if self.fired == fired:
            self._safely(self._skip, optimizer, scaler.get_scale(), scaler.get_backoff_factor())
        return out

    def _skip(self, optimizer: Any, scale: float, backoff: float) -> None:
        """The loss scaler skipped a step: calibration, unless it goes on."""
        self.optimizer, self.scale, losses = optimizer, scale, self.bad_losses
        self.skips, self.skipped = self.skips + 1, self.skipped + 1
        self._ask(calm=True)
        self.bad_losses *= self.bad_losses > losses
        why = (f"{self.skips} skipped steps in a row" if self.skips > 20 else "the loss scale falls under 1"
               if scale * backoff < 1 else "the third non-finite loss in a row" if self.bad_losses > 2 else "")
        if why or (self.locator and self.again):
            self._judge(_moved(optimizer), why)
        self._count(optimizer)

    def _item(self, original: Callable, t: Tensor) -> Any:
        value = original(t)
        if type(value) is float and not abs(value) <= LIMIT:
            self.read = [t.detach()]  # a script that ends soon ends because of this number
        return value

    # What is found

    def _note(self, kind: str, name: str, value: Tensor, evidence: Any) -> None:
        """This value is asked at the next transfer; in the second run at once."""
        self.pending.append((kind, name, self.passes, value, evidence if self.locator or kind == "update" else None))
        if len(self.pending) > 9999 or (self.locator and (kind == "update" or self.again)):
            self._ask()

    def _ask(self, more: Iterable[Tensor] = (), calm: bool = False, end: bool = False) -> list[float]:
        """The values of `more`. What is pending is judged; `calm`: the loss scaler judges the losses."""
        pending, self.pending = self.pending, []
        values = _host([*(entry[3] for entry in pending), *more])
        for (kind, name, passes, _, evidence), value in zip(pending, values, strict=False):
            if kind == "activation":
                self.activation = max(self.activation, value) if value <= LIMIT else self.activation
            elif abs(value) <= LIMIT or (kind == "output" and not end) or (kind != "loss" and value < 0):
                continue
            elif kind == "update":
                self._blame_update(evidence)
            elif kind == "loss" and calm:
                self.bad_losses += 1
            elif self.world == 1:  # else a bad loss makes the gradients of all ranks bad, and they decide together
                self._found(f"{name} is {value:.3g}", evidence, passes - (kind == "loss" and not self.last))
            elif kind == "evaluation":
                self._say(f"{name} is {value:.3g} on rank {self.rank}: run on one process to have it examined")
        return values[len(pending):]

    def _judge(self, params: list[Tensor], why: str = "") -> None:
        """A finding if any of these gradients is bad."""
        norms = _host(_norms(p.grad for p in params))
        if bad := [p for p, norm in zip(params, norms, strict=True) if not norm <= LIMIT]:
            more = f" and {len(bad) - 1} more" * (len(bad) > 1)
            made = _made(extent(bad[0].grad)) + (why and f", {why}")
            symptom = f"the gradient of {self._called(bad[0])}{more} is {made}"
            self._found(symptom, [p.grad for p in bad], self.passes - 1)

    def _blame_update(self, optimizer: Any) -> None:
        """Good gradients and bad weights or moments: the optimizer made them. That needs no second run."""
        for group, p, key, t in _held(optimizer):
            if not _host(_norms([t]))[0] <= LIMIT:
                lr, eps, beta2 = float(group["lr"]), group.get("eps", 1.0), float(group.get("betas", (0, 0))[1])
                why = refusal(p.dtype, eps, beta2) or f"lr={lr:g}; the gradient norm was up to {self.gradient:.3g}"
                symptom = f"{self._called(p)}{key and f' ({key})'} is {_made(extent(t))}"
                self.report = (f"{symptom} after step {self.steps - 1}, whose gradients were finite -> optimizer\n"
                               f"  made by {type(optimizer).__name__} (lr={lr:g}, eps={eps:g}) on {_type(p)}\n  {why}\n"
                               "  try: weights and moments in fp32 (autocast for the forward), eps=1e-8, a lower lr")
                self._found(symptom, (), 0)

    def _found(self, symptom: str, evidence: Any, passes: int) -> None:
        ended = self.last.get(id(self.optimizer), (0, 0))[1] if self.optimizer else passes  # where this step began
        self.symptom, self.at = symptom, max(0, min(passes, ended))
        self.step = self.steps if self.last else self.at
        if not self.report and self.begin is not None:
            try:
                self.report = self._tell(evidence or ())
            except Exception as error:
                self.report = f"{symptom} at step {self.step}; the report failed ({_said(error)})"
        for p in _moved(self.optimizer) if self.optimizer else ():
            p.grad = None  # a script that goes on all the same steps over these parameters
        for statistic, copy in chain(*self.roots.values()):
            statistic.copy_(copy)
        self.__exit__()
        raise SystemExit(3)

    def _tell(self, evidence: Any) -> str:
        birth = (self.locator.blame(evidence) if self.locator else None) or Birth()
        if "aten.set_." in birth.op:
            birth = replace(birth, source="the batch that a worker sent", again="")
        ignored = self.locator and self.locator.ignored is not None and birth.weak.startswith("nll")
        verdict = ("not reproducible" if not birth.op else birth.origin if birth.origin else
                   "data" if birth.source or ignored else
                   "precision" if birth.again == "finite in float32" else "divergence")
        received = not birth.op or "c10d" in birth.op or birth.source == CONSTANT  # from the guilty rank
        report = agree(Report(verdict=verdict, step=self.step, rank=self.rank, scale=self.scale, symptom=self.symptom,
                              precision=birth.result.partition("[")[0], **asdict(birth)), received)
        lines = [line for line in str(report).split("\n") if "the same batch in fp32" not in line]  # not tried
        return "\n".join(lines) + f"\n  guilty: rank {report.rank} of {self.world}" * (self.world > 1)

    def _named(self) -> dict[str, Tensor]:
        return {n: p for root in list(self.roots) for n, p in root.named_parameters()}

    def _called(self, p: Tensor) -> str:
        return next((n for n, other in self._named().items() if other is p), f"a parameter {_type(p)}")

    # From start to end

    def run(self) -> int:
        """The exit code: 3 for a finding, else 0; the script's own exit code and exceptions pass through."""
        failure: BaseException | None = None
        with suppress(SystemExit), self:
            try:
                run_script(self.argv)
            except BaseException as error:
                failure = error
            if not self.symptom:
                self._safely(self._last_look, isinstance(failure, Exception) or getattr(failure, "code", None))
        if failure and not self.symptom:
            raise failure
        if not self.symptom:
            skipped = f", {self.skipped} of them skipped by the loss scaler" * bool(self.skipped)
            norm = f", largest gradient norm {self.gradient:.3g}" * bool(self.last)
            self._say(f"{self.steps} steps{skipped}, nothing non-finite{norm}, "
                      f"largest activation {self.activation:.3g} = {self.activation / 65504:.2%} of fp16's range "
                      "(outputs of modules, not of each operation)")
            return 0
        if isinstance(failure, Exception):
            traceback.print_exception(failure)
        self.report = self.report or (self._second_run() if self.begin is None else self.symptom)
        if self.rank == 0:
            with open(self.path, "w") as file:
                file.write(self.report + "\n")
        if not self.again:
            self._say(self.report)
        time.sleep(3 * (self.rank > 0))  # torchrun ends every rank as soon as one has ended
        return 3

    def _last_look(self, failed: Any) -> None:
        self._ask(end=bool(failed))
        if failed and self.read:
            self._found("the last number that the script read is not finite", self.read, self.passes)

    def _second_run(self) -> str:
        spent = time.monotonic() - self.started
        self._say(f"{self.symptom} at step {self.step}, after {spent:.0f} s. The script runs "
                  "again, quietly, in eager mode, for about as long. Then every operation of that step is watched.")
        if torch.cuda.is_initialized():
            vars(sys.modules["__main__"]).clear()  # the second run needs the memory
            gc.collect()
            torch.cuda.empty_cache()
        environment = dict(self.environment)
        if "MASTER_PORT" in environment:  # a meeting place of its own
            port = str(1024 + (int(environment["MASTER_PORT"]) + 7919) % 60000)
            environment |= {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "False"}
        with tempfile.TemporaryDirectory() as folder:
            environment[RERUN] = f"{self.at}:{(path := os.path.join(folder, 'report'))}"
            done = subprocess.run([sys.executable, *sys.orig_argv[1:]], env=environment, cwd=self.home, text=True,
                                  stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            if os.path.exists(path):
                with open(path) as file:
                    return file.read().rstrip()
        last = (done.stderr.strip().splitlines() or ["no error output"])[-1]
        return (f"{self.symptom} at step {self.step} -> not reproducible\n"
                f"  the second run met no bad step; its exit code was {done.returncode} ({last})\n"
                f"  try: seeds and a fixed order of the data, or --from-step {max(0, self.step - 1)}")


def refusal(dtype: torch.dtype, eps: float, beta2: float) -> str:
    """Why AdamW must not keep its state in dtype with this eps and beta2, in one sentence; "": it may."""
    unit = torch.finfo(dtype).eps  # distance from 1 to the next number; rounding moves by half of it at most
    if torch.tensor(eps).to(dtype) == 0:
        return f"eps={eps:g} is exactly 0 in {dtype}, so AdamW divides 0 by 0 wherever a gradient is 0"
    # v = 1 + unit is the hardest to move: v * (1 - beta2) must reach unit / 2, where the tie goes to the even number 1.
    if 1 - beta2 < (least := unit / (2 + 2 * unit)):
        return f"a {dtype} second moment never decays with beta2={beta2:g} (beta2 <= {1 - least:.4f} does)"
    return ""


def _moved(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _held(optimizer: Any) -> Iterator[tuple[dict, Tensor, str, Tensor]]:
    """(group, parameter, "", parameter) of every parameter, and (group, parameter, key, moment)."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            yield group, p, "", p
            for key, t in optimizer.state.get(p, {}).items():
                if isinstance(t, Tensor) and t.dim() and t.is_floating_point():
                    yield group, p, key, t


def _norms(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The 2-norms, 0-dim, with fp32 accumulators: one read, no sync."""
    flat = [_values(t.detach()) for t in tensors]
    flat = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in flat]
    wide = torch.float64 if any(t.dtype is torch.float64 for t in flat) else torch.float32
    return list(torch._foreach_norm(flat, 2, dtype=wide)) if flat else []


def _host(values: list[Tensor]) -> list[float]:
    """0-dim tensors as Python floats, in one transfer."""
    device = next((v.device for v in values if v.device.type != "cpu"), "cpu")
    return torch.stack([v.detach().float().reshape(()).to(device) for v in values]).tolist() if values else []


def run_script(argv: list[str]) -> None:
    """What `python SCRIPT.py ARGS` or `python -m MODULE ARGS` does, in this process."""
    if argv[0] == "-m":
        sys.argv, sys.path[0] = argv[1:], os.getcwd()
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    sys.argv, sys.path[0] = argv, os.path.dirname(os.path.realpath(argv[0]))
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = os.path.abspath(argv[0])
    with open(argv[0], "rb") as file:
        exec(compile(file.read(), main.__file__, "exec", dont_inherit=True), vars(main))


def main() -> int:
    argv, told = sys.argv[1:], {"--report": "autopsy.txt", "--from-step": None}
    first, _, report = os.environ.pop(RERUN, "").partition(":")
    while len(argv) > 1 and argv[0] in told:
        told[argv[0]], argv = argv[1], argv[2:]
    if not argv or (argv[0].startswith("-") and argv[0] != "-m"):
        print(USAGE, end="\n\n")
        return demo() or 0
    if argv[0] != "-m" and not os.path.isfile(argv[0]):
        sys.exit(f"autopsy: {argv[0]} is no file")
    begin = first if report else told["--from-step"]
    return Watch(argv, report or told["--report"], None if begin is None else int(begin), bool(report)).run()


if __name__ == "__main__":
    sys.exit(main())
