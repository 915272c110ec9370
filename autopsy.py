# SPDX-License-Identifier: MIT (finite 3.0.0, 2026-11-22)
"""
Autopsy: name the operation that made the first bad number, and say which of a few things was wrong.

A bad loss names nobody. A forward hook names the module that *received* the inf: between two
Linears, `log(h * 0 - 1)` makes the second Linear look guilty. Autograd's anomaly mode passes over
inf. And `sqrt` at 0 has a finite loss: only its backward is infinite. So the step is run again,
and the result of every aten operation is read, forward and backward:

Paste::

    import torch
    from autopsy import Locator
    net = torch.nn.Linear(4, 1)
    with Locator(net) as where:
        loss = net(torch.randn(8, 4)).sub(99).log().mean()
        loss.backward()
    print(where.blame([loss]))

1. An operation with good inputs and a bad result is a birth. Every bad result inherits the births
   of its inputs. The guilty birth is the first among the ancestors of the loss (if the loss is
   finite: of the gradients). So what is swallowed on the way is never blamed: a mask of -inf that
   softmax turns to 0, log(0) behind a `where`, a NaN target that is left out. A -inf that enters a
   sum or a matrix product is no mask: then its maker is guilty. "Bad" is NaN, inf, or beyond
   1.8e19, whose square is inf in fp32.
2. The verdict follows from where the guilty result comes from:

    weights            from a parameter, buffer or hidden state that was bad before the step
    data               from a bad value in the batch, a label out of range, labels that are all
                       ignored, NumPy, or a number that the script writes itself
    precision          from an operation; in fp32 the step is finite
    divergence         from an operation; the step is bad in fp32 too
    calibration        nothing is bad at loss scale 1
    compiler           nothing is bad in eager mode, but the compiled step is
    not reproducible   nothing is bad the second time
    error              the step raised an exception, and no bad number is the cause
    optimizer          good gradients, and bad weights after the step (class Watch alone says so)

3. The guilty operation is repeated on the same inputs in fp32 and fp64, and cures are tried: for
   precision the guilty module in fp32, its parents, fp32 at that line, bf16; for divergence an eps.

In a loop of your own, the step is recorded and examined (docs/recipes.md):

    record = StepRecord(step, net)            before the forward: RNG states, buffers, hidden states
    record.keep(images, labels)               each micro-batch, by reference, as the loader gave it
    report = examine(run_step, record, net)   after a rejected step; the weights are still those

`python autopsy.py YOUR_SCRIPT.py` needs no change of the script (class Watch). This file changes no
weights. To copy it: it needs torch, nothing else.
"""

from __future__ import annotations

import argparse
import gc
import json
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
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from copy import copy
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache, partial, wraps
from itertools import count, takewhile
from math import frexp, inf, isfinite
from multiprocessing.process import BaseProcess
from textwrap import shorten
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import module as hooks
from torch.nn.utils.rnn import PackedSequence
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

LIMIT = 1.8e19  # just under sqrt(3.4e38): the square of anything above is inf in fp32
TORCH = os.path.dirname(torch.__file__)
LIBRARY = os.path.dirname(os.__file__)
# Of torch's own files, those whose arithmetic is no operation that the script has called.
NAMED = re.compile(re.escape(TORCH) + ".(nn.utils.(parametriz|weight_norm|spectral)|distributions)")
HALF = (torch.float16, torch.bfloat16)
NARROW = (*HALF, torch.float8_e4m3fn, torch.float8_e5m2)
FLOATS = (*NARROW, torch.float32, torch.float64)
STATISTIC = re.compile("(running_mean|running_var|num_batches_tracked)$")  # buffers of a norm
INTERNAL = vars(nn.Module()).keys() - {"training"}  # attributes that are torch's
KEPT = (list, dict)  # attributes that are written in place
EPS = 1e-6
EPS_IN_HALF = 1e-4  # float16 rounds anything below 6e-8 to 0, and 1 / 1e-6 is inf there
SECOND_MOMENT = re.compile("(exp_avg_sq|square_avg|sum)$")  # of which an optimizer takes the root
EXACT = r"(torch\.)?(fp32|float32|float|32|32-true|o0|no|none|fp64|float64|double)"  # no half

# What to do, in train.py's flags and as code; the gravest first: it counts when ranks differ.
VERDICTS = {
    "data": (
        "look at these samples; leave them out, or, where NaN or a fill value stands for what is "
        "missing, fill it in before the arithmetic (NaN * 0 is NaN)",
    )
    * 2,
    "weights": (
        "--resume last_good.pt, and look at what the steps before this one did",
        "reset it, and all that is named as bad, or load a checkpoint in which they are finite; "
        "look at what wrote it: an earlier step, the code that fills it (or never does: "
        "torch.empty), or the checkpoint that was loaded",
    ),
    "error": ("mend the code at this line",) * 2,
    "optimizer": ("a lower lr, and weights and moments in fp32",) * 2,
    "divergence": (
        "--resume last_good.pt with a lower --lr, a longer --warmup-updates, --clip-grad 1.0",
        "the numbers have grown: an earlier checkpoint, a lower learning rate, longer warm-up, "
        "clipping",
    ),
    "precision": (
        "x.float() before that line, or --precision bf16",
        "that line in fp32: torch.autocast(x.device.type, enabled=False) around it, "
        "x.float() before it",
    ),
    "compiler": (
        "train without --compile",
        "run the step under torch.compiler.set_stance('force_eager')",
    ),
    "calibration": (
        "nothing: the loss scale falls by itself",
        "skip the step and halve the loss scale, as torch.amp.GradScaler does",
    ),
    "not reproducible": (
        "the same step once more with --deterministic; if it recurs, suspect this machine's "
        "hardware",
        "look for what another run of the step does not repeat: a random generator of its own, a "
        "counter, a file; else torch.use_deterministic_algorithms(True), and if it recurs, suspect "
        "this machine's hardware",
    ),
}


def _eps(x):
    return EPS_IN_HALF if x.dtype is torch.float16 else EPS


def _clamp(**bounds):
    """Bounds the first argument of a call."""
    return lambda x, *args, **kwargs: ((x.clamp(**bounds), *args), kwargs)


CLAMP = _clamp(min=EPS)
INSIDE = _clamp(min=-1 + EPS, max=1 - EPS)
UNMASK = (
    "over a wholly masked row: write -1e4 into the mask instead of -inf",
    _clamp(min=-1e4),
)
NO_LABEL = "a mean over no label at all: divide the sum of the losses by max(1, number of labels)"
NOTHING = "a mean over nothing: test numel() before it, or divide the sum by max(1, count)", None
EQUAL = (
    "equal eigenvalues or singular values: the slope holds 1 / (their difference), which is 1 / 0; "
    "add a small distinct diagonal",
    None,
)
ONE = (
    "the spread of one number is 0 / 0: no batch of one, or correction=0",
    lambda *a, **k: (a, k | {"correction": 0}),
)
WRONG_INDEX = "mend these numbers, or make the table or layer larger"
WRONG_LABEL = (
    "mend these labels, or leave them out: ignore_index= where one means 'no label'; or the last "
    "layer has too few classes"
)
RAISED = {  # words of the exception
    r"index -?\d+ is (not in|out)|index out of range in": WRONG_INDEX,
    r"label \S+ is not in|Target -?\d+ is out|Class values": WRONG_LABEL,
    "more than 1 value per channel": "a batch of one has no spread: drop_last=True",
    "not positive-definite": "print torch.linalg.eigvalsh(x).min(): if it is further below 0 than "
    "1e-5 of the largest, a sign is wrong in how the matrix is made (a variance or a noise that is "
    "learnt has gone below 0: softplus or exp of it); if it is nearer, it is rounding: add a "
    "diagonal, 1e-6 to 1e-4 of its mean (x + c * torch.eye(n)), or take float64",
    "should be between 0 and 1": "probabilities are wanted: look at what leaves 0..1 (a resize, a "
    "sum, no sigmoid), clamp(0, 1) it, or take the loss that takes logits",
    "satisfy the constraint": "this parameter of a distribution is out of its range: a scale needs "
    "softplus or a lower bound, probabilities a softmax",
    "singular": "this matrix has no inverse: look at how it is made (equal rows, too few samples); "
    "else add a small diagonal, or take torch.linalg.lstsq",
}
ANGLE = "an angle at 0 has no slope: x + eps, or torch.where before it", None
GROWN = "the gradient norm has grown"
TINY = (
    "this number is not 0 but as small as {}: find out why (a product of many factors, a "
    "determinant, an exp of a large negative number): take logarithms (logsumexp, logdet), shorter "
    "pieces or float64; an eps or a clamp of 1e-6 would replace it, and its gradient"
)
TOO_LOW = "torch.finfo(x.dtype).min for this number of a mask, which does not fit into half"
NOT_FINITE = (
    "this number was bad before torch saw it: mend it where it is made (a ratio, a schedule, "
    "a count of 0)"
)
UNDERFLOW = (
    "the divisor is 0 in places and as small as {:.3g} elsewhere, where an eps of 1e-6 would "
    "replace it: if a product of many factors or an exp has underflowed, take logarithms, shorter "
    "pieces or float64; if 0 is right there, torch.where, or an eps well below that"
)
BY_ZERO = "it divides by the number 0: find out why it is 0 (a count, a correction, a schedule)"
ALL_BAD = (
    "every sample is bad: look at how they are made (a column without spread, a wrong file), "
    "not at single ones"
)
MASKED = (
    "the -inf of a mask is a number in here: look at what comes of it (a label or a path that is "
    "forbidden, in these samples, or a sum over all classes, as for label smoothing), or leave "
    "masked entries out before it"
)
UNTRAINED = (
    "the numbers grow through the layers, and nothing has been trained yet: look at how the "
    "weights are initialised (a smaller std), at the inputs' scale, or add a normalisation"
)
UNWRITTEN = (
    "memory that no operation of torch wrote: torch.zeros instead of torch.empty; "
    "or an opaque kernel (Triton, C++) wrote this: look into it"
)

# operation: what to write, and how to change the call's arguments
WEAK: dict[str, tuple[str, Callable | None]] = {
    "sqrt": ("sqrt has no finite slope at 0: sqrt(x.clamp(min=1e-6))", CLAMP),
    "rsqrt": ("rsqrt of 0 or less: rsqrt(x.clamp(min=1e-6))", CLAMP),
    "log": (
        "log of 0 or less (after a sigmoid or softmax take logsigmoid or log_softmax): "
        "log(x.clamp(min=1e-6))",
        CLAMP,
    ),
    "log2": ("log2 of 0 or less: log2(x.clamp(min=1e-6))", CLAMP),
    "log10": ("log10 of 0 or less: log10(x.clamp(min=1e-6))", CLAMP),
    "log1p": (
        "log1p of -1 or less: log1p(x.clamp(min=-1 + 1e-6))",
        _clamp(min=-1 + EPS),
    ),
    "pow": ("a power of 0 or of a negative base: x.clamp(min=1e-6) ** p", CLAMP),
    "div": (
        "division by zero: x / (y + eps), eps = 1e-6",
        lambda x, y, *a, **k: ((x, y + (_eps(y) if isinstance(y, Tensor) else EPS), *a), k),
    ),
    "addcdiv": (
        "division by zero in addcdiv: eps in its denominator, eps = 1e-8",
        lambda x, y, z, *a, **k: ((x, y, z + EPS, *a), k),
    ),
    "reciprocal": (
        "division by zero: 1 / (x + eps), eps = 1e-6",
        lambda x, *a, **k: ((x + _eps(x), *a), k),
    ),
    "exp": (
        "exp beyond 88 is inf, and beyond 44 its square: find out why it is given so much (inputs "
        "that are not normalised, a high rate); of a sum of them take logsumexp; or bound it: "
        "exp(x.clamp(max=40))",
        lambda x, *a, **k: ((x.clamp(max=10 if x.dtype is torch.float16 else 40), *a), k),
    ),
    "acosh": (
        "no finite slope at 1: acosh(x.clamp(min=1 + 1e-6))",
        _clamp(min=1 + EPS),
    ),
    "acos": ("no finite slope at -1 and 1: acos(x.clamp(-1 + 1e-6, 1 - 1e-6))", INSIDE),
    "asin": ("no finite slope at -1 and 1: asin(x.clamp(-1 + 1e-6, 1 - 1e-6))", INSIDE),
    "atanh": ("inf at -1 and 1: atanh(x.clamp(-1 + 1e-6, 1 - 1e-6))", INSIDE),
    "softmax": UNMASK,
    "log_softmax": UNMASK,
    "logsumexp": UNMASK,
    "logaddexp": UNMASK,
    "layer_norm": (
        "a row of equal numbers, and an eps too small for it: eps=1e-5",
        lambda x, s, w=None, b=None, eps=0, **k: ((x, s, w, b, 1e-5), k),
    ),
    "ctc_loss": (
        "a target that needs more frames than its input has: one for each letter, and one more for "
        "each that equals the one before; look at these lengths, or zero_infinity=True",
        lambda *a, **k: (a[:6], k | {"zero_infinity": True}),
    ),
    "std": ONE,
    "var": ONE,
    "mean": NOTHING,
    "nll_loss": (NO_LABEL, None),
    "nll_loss2d": (NO_LABEL, None),
    "batch_norm": ("running_var must be 0 or more: set the running statistics back", None),
    "mul": (
        "0 * inf is NaN: choose with torch.where before the inf is made, do not multiply by a mask",
        None,
    ),
    "eigh": EQUAL,
    "svd": EQUAL,
    "eig": EQUAL,
    "angle": ANGLE,
    "atan2": ANGLE,
    "weight_norm_interface": (
        "a weight of norm 0 has no direction (v / |v|): keep it away from 0 where it is "
        "initialised, pruned or decayed",
        None,
    ),
    "empty": (UNWRITTEN, None),
    "to_copy": (
        "this number does not fit into half: do not convert it, or make it smaller before",
        None,
    ),
    "logdet": (
        "a determinant of 0 or less: of a Jacobian or a rotation take torch.slogdet, for any sign; "
        "a covariance build as L @ L.T with a positive diagonal in L (slogdet would hide the sign)",
        None,
    ),
}
IN_HALF = {  # the same numbers for float16
    "eps = 1e-6": "eps = 1e-4 (one below 6e-8 is 0 in float16)",
    "beyond 88": "beyond 11",
    "beyond 44": "beyond 5.5",
    "max=40": "max=10",
}
SAME = {
    "truediv": "div",
    "divide": "div",
    "true_divide": "div",
    "rdiv": "reciprocal",
    "rtruediv": "reciprocal",
    "itruediv": "div",
}


# --- The record


class StepRecord:
    """What is needed to run one step again, apart from the weights (a rejected step kept those).

    Create it before the step's first forward; keep() every micro-batch with the labels as they
    came, and the samples' indices in the data set where they are known. Costs a copy of the
    buffers and the RNG states; no sync.
    """

    def __init__(self, step: int, net: nn.Module, *, rank: int = 0):
        self.step, self.rank, self.net = step, rank, net
        self.device = _device(list(net.parameters()))
        self.buffers = _copied_buffers(net)
        self.carried = _carried(net)
        self.rng = rng_states(self.device)
        self.batches = []
        self.indices = []
        self.named = []  # tensors that are no part of the batch

    def keep(self, *batch: Any, indices: Iterable[int] | None = None) -> None:
        self.batches.append(batch)
        self.indices.append([] if indices is None else [int(i) for i in indices])

    @torch.no_grad()
    def restore(self) -> None:
        """RNG, buffers and attributes as they were before the step; no gradients."""
        set_rng_states(self.rng, self.device)
        _put_back(self.net, self.buffers)
        _carry_back(self.carried)
        self.net.zero_grad(set_to_none=True)


def _copied_buffers(net):
    return {n: b.detach().clone() for n, b in net.named_buffers() if not b.is_inference()}


@torch.no_grad()
def _put_back(net, copies):
    for name, b in net.named_buffers():
        if name in copies:
            b.copy_(copies[name])


def _attributes(module):
    """What a module carries without a buffer: hidden states, counters, short lists."""
    return {
        name: value
        for name, value in vars(module).items()
        if name not in INTERNAL and (not isinstance(value, tuple | list | dict) or len(value) < 99)
    }


def _carried(net):
    """Of each module: its attributes, and these as they are now, with what lists and dicts hold."""
    return [
        (m, {n: (v, copy(v) if type(v) in KEPT else v) for n, v in _attributes(m).items()})
        for m in net.modules()
    ]


def _carry_back(carried):
    for module, before in carried:
        for name, (value, held) in before.items():
            if type(value) in KEPT:
                value.clear()
                value.__init__(held)  # the same object, filled again
            vars(module)[name] = value


def rng_states(device: torch.device | str) -> dict[str, Any]:
    """Of Python, torch's CPU and `device`; of NumPy where it is loaded (in plain types)."""
    states = {"python": random.getstate(), "cpu": torch.get_rng_state(), "cuda": None}
    if torch.device(device).type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random.get_state(legacy=False)
        key = {"key": numpy["state"]["key"].tolist(), "pos": int(numpy["state"]["pos"])}
        states["numpy"] = numpy | {"state": key}
    return states


def set_rng_states(states: Mapping[str, Any], device: torch.device | str) -> None:
    random.setstate(states["python"])
    torch.set_rng_state(states["cpu"])
    if states["cuda"] is not None and torch.device(device).type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(states["numpy"])


# --- The verdict


@dataclass(frozen=True)
class Report:
    """What was wrong, and which operation made the first bad number; str() is for a tired person.

    Without a verdict: the operation alone, as Locator.blame() returns it.
    """

    verdict: str = ""  # one of VERDICTS
    step: int = 0
    rank: int = 0
    precision: str = ""
    scale: float = 1.0
    advice: str = "code"  # or "flags": those of this repository's train.py
    symptom: str = ""  # "loss is nan", "gradient of head.weight is inf", "IndexError: ...", ...
    op: str = ""  # "aten.log.default"; "" = no operation is guilty
    module: str = ""  # the innermost module whose forward it belongs to; "" = the model's own
    call: int = 0  # which call of the module in this step; 0 = not known, or outside of any module
    phase: str = "forward"  # or "backward", "optimizer"
    node: str = ""  # backward: autograd's name for the function
    line: str = ""  # file:line in function
    made: str = ""  # what the result holds; "" = the operation raised
    result: str = ""  # dtype and shape of the result
    inputs: tuple[str, ...] = ()
    spans: tuple[tuple[float, float], ...] = ()  # (lowest, highest) of each input that is a tensor
    source: str = ""  # "parameter head.weight", "input", ...: bad before the operation used it
    again: str = ""  # repeated on the same inputs: "finite in float32", "nan in float32, ..."
    entered: str = ""  # the sum or product which the -inf that was made here went into
    micro_batch: int = 0
    samples: tuple[int, ...] = ()  # positions in the micro-batch
    batch_size: int = 0  # by what they were counted
    indices: tuple[int, ...] = ()  # of the samples in the data set, if the record knew them
    names: tuple[str, ...] = ()  # bad tensors (weights), what is wrong with the batch (data)
    repeated: bool = True  # the step was run again, in fp32 too
    tried: tuple[str, ...] = ()  # "block in fp32: finite"
    cure: tuple[str, str] = ("", "")  # the first finite one: ("module, result in fp32", "block")
    fix: str = ""  # what to do, where it is known without looking at the operation

    @property
    def origin(self) -> str:
        """The verdict, where the source alone says it."""
        if self.source in ("", OPAQUE):
            return ""
        return "weights" if self.source.startswith(STATE) else "data"

    @property
    def failed(self) -> bool:
        """Cures were tried, in vain."""
        return "still bad" in "".join(self.tried) and not self.cure[0]

    @property
    def largest(self) -> float:
        """The largest finite magnitude among the inputs."""
        return max((abs(v) for span in self.spans for v in span if _is_real(v)), default=0.0)

    @property
    def grown(self) -> bool:
        """Finite inputs so large that their result overflows."""
        large = self.largest > (1e3 if self.failed else 1e6)
        return self.made != "nan" and large and not self.source

    @property
    def weak(self) -> str:
        """The key of WEAK for a node "LogBackward0" or an operation "aten.log_", or ""."""
        plain = {key.replace("_", ""): key for key in WEAK}
        for name in (self.node, *self.op.split(".")[1:2]):
            other = r"backward(_data)?\d*$|_backward|_forward|_like|_|native|linalg|^new"
            name = re.sub(other, "", name.lower())
            harmless = name in ("mul", "mean") and self.made != "nan"
            if ".parametrizations." in f".{self.module}" and name in ("div", "reciprocal"):
                return "weight_norm_interface"
            if name in plain and not harmless and not (name == "pow" and self.grown):
                return plain[name]
        return ""

    @property
    def cure_of_weak(self) -> str:
        """What WEAK says, with the numbers of this dtype."""
        text = WEAK[self.weak][0]
        for number, in_half in IN_HALF.items() if self.result.startswith("float16") else ():
            text = text.replace(number, in_half)
        return text

    @property
    def suggestion(self) -> str:
        if self.fix:
            return self.fix
        if self.source == WRITTEN:
            return (
                f"the script writes this number itself, at {self.line}: "
                "leave it out of the loss, or write another"
            )
        if self.source.startswith(EARLIER):
            return "that line made it or passed it on: --from-step 0 names the operation"
        if self.source.startswith("a "):
            return "mend this number where it is made: NumPy, a constant, a table"
        if self.verdict == "data" and 0 < len(self.samples) == self.batch_size:
            return ALL_BAD
        if self.entered and self.verdict != "data":
            return (
                "-inf is a mask up to a softmax or a maximum only: where nothing is left "
                "(a row without entries), write 0 before the sum or product; label_smoothing gives "
                "masked classes a share, too: none there"
            )
        if self.verdict in ("divergence", "precision") and self.weak and not self.source:
            lowest = [low for low, _ in self.spans] or [0.0]  # of whole numbers nothing is known
            below_0 = self.phase == "forward" and lowest[0] < -1e-3 * self.largest
            if WEAK[self.weak][1] is CLAMP and below_0:  # not 0, or its rounding
                return (
                    f"{self.weak} of a negative number ({lowest[0]:.3g}): find out why it is "
                    "negative (a sign, a formula, a difference that was rounded): a clamp hides "
                    "it; where it may be negative by right, the clamp is the cure"
                )
            divides = self.weak == "div" or self.weak.startswith("log")
            if divides and lowest[-1] > 0 and lowest[1:]:
                return TINY.format(f"{lowest[-1]:.3g}")
            if not self.failed:
                return self.cure_of_weak
        advice = VERDICTS[self.verdict][self.advice != "flags"]
        if self.verdict != "divergence":
            return advice
        if self.grown:
            few = 0 < 4 * len(self.samples) <= self.batch_size and GROWN not in str(self.names)
            first = "look at these samples, no other does this; else " if few else ""
            return first + (advice if self.step else UNTRAINED)
        if not self.op:
            return "no operation was seen that made it: it was made in another thread or library"
        if self.source == OPAQUE:
            return UNWRITTEN
        if any(lowest == -inf for lowest, _ in self.spans):
            return MASKED
        if re.search(r"\d in float64", self.again):
            return (
                "the result is too large for float32, not for float64: "
                "clamp or mask the inputs before it, or compute with its logarithm"
            )
        return (
            "this operation has no finite value at these inputs: "
            "clamp or mask them before it, or write it otherwise"
        )

    def operation(self) -> Iterator[str]:
        """The lines that speak of the operation."""
        if self.op:
            node = f" of {self.node}" if self.node else ""
            line = f", {self.line}" if self.line else ""
            module = self.module or ("the model itself" if self.call else "")
            call = f", call {self.call} of this step" if self.call > 1 else ""
            place = f"in {module}{call}" if module else "outside of any module"
            named = self.source not in ("", WRITTEN)
            first = f"first to use {self.source}" if named else "first bad op"
            verb = {"": "made", CONSTANT: "made", WRITTEN: "writes"}.get(self.source, "is given")
            made = f"{verb} {self.made}" if self.made else "raised"
            yield f"{first}: {self.op} {place} ({self.phase}{node}{line}) {made}"
        if self.entered:
            yield f"its -inf entered {self.entered}, where it is no mask"
        if self.inputs:
            yield "its inputs: " + _few(self.inputs, 4, "; ")
        if self.again:
            yield f"repeated on the same inputs: {self.again}"

    def lines(self) -> Iterator[str]:
        if not self.verdict:
            yield from self.operation()
            return
        precision = f"{self.precision}, " if self.precision else ""
        about = f"{precision}scale {self.scale:g}, rank {self.rank}"
        symptom = self.symptom or "the step was bad"
        yield f"{symptom} at step {self.step} ({about}) -> {self.verdict}"
        yield from self.operation()
        if self.names:
            where = {"weights": "already bad: ", "data": "in the batch: "}.get(self.verdict, "")
            yield where + _few(self.names, 5)
        if self.samples:
            known = f": positions in the batch of {self.batch_size}"
            if self.indices:
                known = f" (in the data set: {_few(self.indices)})"
            place = f"of micro-batch {self.micro_batch}, rank {self.rank}"
            yield f"samples {_few(self.samples)} {place}{known}"
        elif self.micro_batch:
            yield f"in micro-batch {self.micro_batch}, rank {self.rank}"
        in_fp32 = {"precision": "finite", "divergence": "bad as well"}
        if self.repeated and self.verdict in in_fp32:
            yield "the same batch in fp32: " + in_fp32[self.verdict]
        yield from (f"tried: {sentence}" for sentence in self.tried)
        yield f"try: {self.suggestion}"

    def __str__(self) -> str:
        return "\n  ".join(self.lines())


def agree(report: Report) -> Report:
    """The same report on every rank: the gravest verdict's, of the lowest rank that has it.

    A collective: every rank must call it."""
    if not (dist.is_available() and dist.is_initialized()):
        return report
    every, verdicts = [None] * dist.get_world_size(), list(VERDICTS)
    dist.all_gather_object(every, report)
    return min(every, key=lambda other: (verdicts.index(other.verdict), other.rank))


# --- The examination


def examine(
    run_step: Callable[[tuple[Any, ...], bool], Any],
    record: StepRecord,
    net: nn.Module,
    *,
    state: Any = None,
    num_classes: int | None = None,
    precision: str = "",
    scale: float = 1.0,
    try_cures: bool = True,
    advice: str = "code",
    run_compiled: Callable | None = None,
) -> Report:
    """Run the recorded step again and say what was wrong. On every rank, each with its own record;
    then agree().

    `run_step(batch, fp32)`: forward and backward of ONE recorded micro-batch on the bare `net` (no
    DDP), no optimizer; returns the 0-dim loss before scaling. `fp32=True`: autocast off, half
    inputs and parameters upcast, no loss scale; if that ran on fp32 copies of the parameters, it
    returns (loss, {name: gradient}). Compiled code in it runs eagerly. `run_compiled`: the same
    through the compiled model, where `run_step` does without. `state`: nest of optimizer tensors.
    `scale`: the step's loss scale; run_step may scale by it or not. `num_classes`: the labels'
    range, where no loss says it. Gradients are None afterwards, RNG untouched, buffers as before
    the step.
    """
    outside = rng_states(record.device)
    about = {
        "step": record.step,
        "rank": record.rank,
        "advice": advice,
        "precision": str(precision),
        "scale": float(scale),
    }
    rerun = Rerun(run_step, record, net, about)
    try:
        with _stance("force_eager"):
            report = rerun.watch()
            if report.symptom:
                report = _judge(rerun, report, state)
                if try_cures:
                    report = _try(rerun, report)
            else:
                report = _finite(rerun, report, state, num_classes, run_compiled)
    finally:
        record.restore()
        set_rng_states(outside, record.device)
    known = record.indices[report.micro_batch]
    indices = tuple(known[i] for i in report.samples) if known else ()
    return replace(report, indices=indices)


def _bad_state(rerun, state):
    """Weights, moments and running statistics that were bad before the step, with their rows."""
    rerun.record.restore()
    named = {f"parameter {n}": p for n, p in rerun.net.named_parameters() if p.requires_grad}
    if isinstance(state, Mapping):  # an optimizer's is keyed by the parameters themselves
        names = {p: n for n, p in rerun.net.named_parameters()}
        state = {names.get(key, key): value for key, value in state.items()}
    moments = {f"optimizer state {n}": t for n, t in inner_tensors(state)}
    named |= moments | _statistics(rerun.net)
    bad = [name + _bad_rows(t) for name, t in named.items() if is_bad(extent(t))]
    roots = [n for n, t in moments.items() if SECOND_MOMENT.search(n) and extent(t)[0] < 0]
    return [*bad, *(f"{name} (below 0: its root is NaN)" for name in roots)]


def _judge(rerun, report, state):
    """The verdict on a step that is bad again."""
    where = rerun.locator
    exact = re.fullmatch(EXACT, report.precision.lower())
    if origin := report.origin:
        table = dict(rerun.net.named_parameters()).get(report.source.removeprefix("parameter "))
        held = _bad_rows(table) if origin == "weights" else f" holds {report.made}"
        holds = report.source + held
        names = [holds] if report.source != WRITTEN else []
        if origin == "weights":
            others = _bad_state(rerun, state)
            names += [name for name in others if not name.startswith(report.source)]
        batch = [t for _, t in inner_tensors(rerun.record.batches[report.micro_batch])]
        entries = [
            (where._known.get(_storage(t), report.source), _made(extent(t)), where._samples(t))
            for t in batch
            if not is_mask(extent(t))
        ]
        used = [birth for _, birth in where.causes.values() if birth and birth.source]
        entries += [(birth.source, birth.made, birth.samples) for birth in used]
        for name, made, samples in dict.fromkeys(entries):
            if samples and (name, samples) != (report.source, report.samples):
                names.append(f"{name} holds {made} in samples {_few(samples)}")
        return replace(report, verdict=origin, names=tuple(names))
    if report.op and not report.made:  # the step raised, and not because of a bad number
        fix = next((fix for words, fix in RAISED.items() if re.search(words, str(rerun.error))), "")
        report = replace(report, fix=fix)
        if fix in (WRONG_INDEX, WRONG_LABEL):
            return replace(report, verdict="data")
        overflow = "without overflow" in report.symptom and not exact
        mended = overflow and not rerun(fp32=True)
        return replace(report, verdict="precision" if mended else "error")
    means = ("nll_loss", "nll_loss2d", "div", "reciprocal")
    ignored = f"every label is ignored ({where.ignored}): their mean is 0/0"
    roots = ("batch_norm", "sqrt", "rsqrt", "pow")
    negative = [n for n, b in _statistics(rerun.net).items() if "var" in n and extent(b)[0] < 0]
    below = f"{_few(negative, 1)} is below 0"
    unaligned = "a target that has no alignment with its input"
    for fits, verdict, name, weak in (
        (where.ignored is not None and report.weak in means, "data", ignored, "nll_loss"),
        (negative and report.weak in roots, "weights", below, "batch_norm"),
        (report.weak == "ctc_loss" and report.made == "inf", "data", unaligned, "ctc_loss"),
    ):
        if fits:
            return replace(report, verdict=verdict, names=(name,), fix=WEAK[weak][0])
    if not rerun(fp32=True):
        factor = rerun.factor if rerun.factor < inf else max(report.scale, 2.0**16)
        if factor > 1.5:
            symptom = rerun(Calls(factor))
            went = f"still bad ({symptom})" if symptom else "finite"
            report = replace(report, tried=(f"loss scale 1: {went}",))
            if not symptom:
                return replace(report, verdict="calibration")
        return replace(report, verdict="not reproducible" if exact else "precision")
    if _only_half(report):
        other = rerun.watch(fp32=True)  # something else is bad in fp32, or was left in half
        verdict = other.origin or ("precision" if _only_half(other) else "divergence")
        return replace(other, verdict=verdict)
    return replace(report, verdict="data" if report.fix == NOT_FINITE else "divergence")


def _only_half(report):
    return "float16" in report.result and report.again == "finite in float32"


def _finite(rerun, report, state, num_classes, run_compiled):
    """The verdict on a step that is not bad again."""
    dynamo = sys.modules.get("torch._dynamo")
    if run_compiled or (dynamo and dynamo.utils.counters["frames"]):  # something was compiled
        with _stance("default"):
            rerun.run_step = run_compiled or rerun.run_step
            symptom = rerun()
        if symptom:
            tried = (f"compiled: {symptom}", "in eager mode: finite")
            return replace(report, verdict="compiler", tried=tried)
    if names := tuple(_bad_state(rerun, state)):
        symptom = f"{names[0]} was bad before the step"
        return replace(report, verdict="weights", names=names, symptom=symptom)
    where = rerun.locator
    for k, batch in enumerate(rerun.record.batches if num_classes is not None else ()):
        where.take(batch)
        for labels in _labels(batch):
            names, wrong = _outside_of("label", labels, 0, num_classes - 1, where.lawful)
            if names:
                found = {"samples": where._samples(labels, wrong), "batch_size": where.size}
                return replace(report, verdict="data", names=names, micro_batch=k, **found)
    verdict = "calibration" if report.scale > 1 else "not reproducible"
    return replace(report, verdict=verdict)


def _labels(batch):
    """Whole numbers among the later items of a tuple; in a mapping what is called so."""
    later = re.compile(r"[1-9]\d*|.*\.(labels?|targets?)")
    named = [t for name, t in inner_tensors(batch) if later.fullmatch(name) and t.dim()]
    return [t for t in named if not (t.is_floating_point() or t.is_complex())]


def _outside_of(what, index, low, high, lawful):
    """("label 3 is not in 0..2", ...), and where these are."""
    wrong = (index < low) | (index > high)
    for ignored in lawful:
        wrong &= index != ignored
    values = index[wrong].unique().tolist()
    return tuple(f"{what} {v} is not in {max(low, 0)}..{high}" for v in values), wrong


class Rerun:
    """The recorded step, as often as needed, each time from the same buffers and random numbers."""

    def __init__(self, run_step, record, net, about):
        if not record.batches:
            raise ValueError("the record holds no micro-batch: call record.keep(...)")
        self.run_step, self.record, self.net, self.about = run_step, record, net, about
        self.factor, self.last = 1.0, 0

    def __call__(self, context=None, fp32=False):
        """Run it up to the first bad micro-batch: what is bad, "" for nothing."""
        self.record.restore()
        self.error = None
        clean = [name for name, b in self.net.named_buffers() if not is_bad(extent(b))]
        # Fused attention knows half only; its plain mathematics knows fp32.
        attention = sdpa_kernel(SDPBackend.MATH) if fp32 else nullcontext()
        try:
            with warnings.catch_warnings(), context or nullcontext(), attention:
                warnings.simplefilter("ignore")  # all has been said once
                for k, batch in enumerate(self.record.batches):
                    if isinstance(context, Locator):
                        self.last = k
                        context.take(batch, len(self.record.indices[k]))
                    out = self.run_step(batch, fp32)
                    if not isinstance(out, tuple):
                        out = out, {n: p.grad for n, p in self.net.named_parameters()}
                    results = {"loss": torch.as_tensor(out[0]).detach()}
                    results |= {f"gradient of {n}": g for n, g in out[1].items() if g is not None}
                    buffers = dict(self.net.named_buffers())
                    results |= {f"buffer {name}": buffers[name] for name in clean}
                    self.results = results
                    for name, t in results.items():
                        span = extent(t)
                        mask = name.startswith("buffer ") and not STATISTIC.search(name)
                        if is_bad(span) and not (mask and is_mask(span)):
                            return f"{name} is {_made(span)}"
        except Exception as error:
            self.error = error
            return _said(error)
        return ""

    def watch(self, fp32=False):
        """Run it with every operation watched: what is bad, and who made it."""
        where = Locator(self.net)
        where._known.update({_storage(t): name for name, t in self.record.named})
        self.locator = where
        with where.functions:
            symptom = self(where, fp32)
        birth = None
        if isinstance(self.error, torch.OutOfMemoryError):
            raise self.error
        if self.error:
            line = _line(_frames_in(traceback.format_tb(self.error.__traceback__)))
            frames = [frame for frame, _ in traceback.walk_tb(self.error.__traceback__)]
            inner = [frame.f_locals.get("self") for frame in reversed(frames)]
            modules = [where.names.get(m) for m in inner if isinstance(m, nn.Module)]
            module = next(filter(None, modules), "")
            raised = Report(op=type(self.error).__name__, module=module, line=line)
            variables = [v for frame in frames for v in frame.f_locals.values()]
            birth = where.failed or where.blame(filter(torch.is_tensor, variables)) or raised
        elif symptom:
            if loss := float(self.results["loss"].float().mean()):  # run_step may have scaled it
                self.factor = max(1.0, where.functions.root / loss)  # 1 for NaN
            birth = where.blame([self.results["loss"]]) or where.blame(self.results.values())
        about = {"symptom": symptom, "micro_batch": self.last, **self.about}
        return replace(birth or Report(), **about)


# --- Which operation was it

CONSTANT = "a number made outside of torch, or before the watch"
WRITTEN = "a number that the script writes"  # fill_, full, ...: a bad scalar, and no bad tensor
OUTSIDE = "a tensor from outside of torch (NumPy, a file)"
OPAQUE = "memory of torch.empty that no operation of torch wrote"
UNKNOWN = "what compiled code or another library made"
EARLIER = "a tensor of an earlier step"
STATE = ("parameter ", "buffer ", "attribute ", "old gradient ", EARLIER)
LAWFUL = sys.maxsize - 1  # number of a mask: only large negative values, written on purpose
NOBODY = (sys.maxsize, None)  # no cause: nothing that this step did


class Locator(TorchDispatchMode):
    """Reads the result of every aten operation while it is entered; blame(tensors) names the birth.

    `net` may be None: then modules are named as they are met. `batch`: the micro-batch, so that
    samples can be named. What it remembers of a tensor it forgets with the tensor's storage, so it
    may stay entered for many steps. Anomaly mode is on meanwhile (without its check of NaN): it
    keeps the lines of the forward for the backward.
    """

    def __init__(self, net: nn.Module | None = None, batch: Any = ()):
        super().__init__()
        self.net, self.paused, self._clock = net, False, count()
        self.functions = Calls(locator=self)
        self.names, self.calls = {}, Counter()  # modules: names; how often each was called
        self.failed = None  # the operation that raised
        self.step = 0  # of what is named; set it where many steps are watched
        self.numbers = []  # among the arguments of the operation under way
        self.births = {}  # "file:line in function" of all that made a bad number, and Report.weak

        self.lawful = {-100}  # every ignore_index seen
        self._stack = [("", 0)]  # modules under way: name, which call
        # Autograd's sequence number where a module begins or ends, and the module from there on.
        self._since = deque([(0, ("", 0))], maxlen=1 << 18)
        # Of a storage, while it lives: its name if it was ready-made; what made it bad (a number in
        # time and the birth); bytes from sample to sample.
        self._known, self.causes = WeakKeyDictionary(), WeakKeyDictionary()
        self._rows, self.size = WeakKeyDictionary(), 0
        self.take(batch)

    def take(self, batch: Any, size: int = 0) -> None:
        """These tensors are the batch: by them samples are named. `size`: how many, if known."""
        self.calls.clear()
        self.ignored = None  # the ignore_index of a loss that ignores every label here
        leaves = dict(inner_tensors(batch))
        if not leaves:
            return  # an earlier micro-batch brought all
        for name, t in leaves.items():
            first, _, rest = name.partition(".")
            plain = {"0": "input", "1": "target"}.get(first, f"item {first} of the batch")
            self._known.setdefault(_storage(t), rest or plain)
        self._rows.clear()
        self.size = size or _batch_size(leaves.values())
        self.follow(leaves.values())

    def follow(self, tensors: Iterable[Tensor]) -> None:
        """Those with the size of the batch hold a row for each sample."""
        for t in tensors if self.size > 1 else ():
            # not within vmap, where a row is no sample
            if self.size in t.shape[:2] and _values(t) is t:
                self._carries(t, t.shape.index(self.size), 1)

    def _name(self, net, prefix=""):
        for name, module in net.named_modules(prefix=prefix):
            self.names.setdefault(module, name)
            for key, t in inner_tensors(_attributes(module), name):
                self._known[_storage(t)] = f"attribute {key}"
        self._known.update({_storage(b): f"buffer {n}" for n, b in net.named_buffers(prefix)})
        for name, p in net.named_parameters(prefix):
            self._known[_storage(p)] = f"parameter {name}"
            if p.grad is not None:  # of a second optimizer, say
                self._known[_storage(p.grad)] = f"old gradient of {name}"

    def __enter__(self):
        if self.net is not None:
            self._name(self.net)
        self._anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
        torch.set_anomaly_enabled(True, check_nan=False)
        self._handles = (
            hooks.register_module_forward_pre_hook(self._enter_module),
            hooks.register_module_forward_hook(self._leave_module, always_call=True),
        )
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        torch.set_anomaly_enabled(*self._anomaly)
        for handle in self._handles:
            handle.remove()

    # Modules. An autograd node belongs to the module under way when it got its sequence number.

    def _enter_module(self, module, args):
        if len(self._stack) == 1 and module not in self.names:  # a teacher beside the net, too
            self._name(module, "" if self.net is None else type(module).__name__)
        name = self.names.get(module, self._stack[-1][0])
        repeated = torch._C._current_autograd_node() is not None  # a checkpoint runs its forward
        if module in self.names and not repeated:
            self.calls[name] += 1
        given = _flat(args)
        if len(self._stack) == 1:
            # 0: the batch was cut out by operations that were watched
            self.size = self.size or _batch_size(_batched(given))
            self.follow(given)
        sequence = given and given[0].dim() == 3 and len(given[0]) == self.size
        if sequence and getattr(module, "batch_first", True) is False:
            # time was taken for the batch
            self.size = given[0].shape[1]
            self._rows.clear()
            self.follow(given)
        self._stack.append((name, self.calls[name]))
        self._mark()

    def _leave_module(self, module, args, out):
        self._stack.pop()
        self._mark()

    def _mark(self):
        number = torch._C._autograd._get_sequence_nr()
        if number >= self._since[-1][0]:  # the thread of a GPU's backward counts anew
            self._since.append((number, self._stack[-1]))

    # Operations

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(t, "__tensor_flatten__") for t in types):
            return NotImplemented  # a tensor that wraps others: their operations come here next
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        rule = _rule(func)
        given = dict(zip(rule.names, args, strict=False)) | kwargs
        self.numbers = [a for a in args if rule.pointwise and type(a) in (int, float)]
        inputs = _flat((args, kwargs))
        written = {id(t): t for t in _flat([given.get(name) for name in rule.writes])}
        kept = [a.clone() if id(a) in written else a for a in args]
        if rule.overwrites:
            inputs = [t for t in inputs if id(t) not in written]
        spans = _spans(inputs) if written else []  # now: it overwrites its evidence
        if rule.index:
            self._check_index(rule.index(*args), func, inputs)
        try:
            out = func(*args, **kwargs)
        except Exception:
            spans = spans or _spans(inputs)
            self.failed = self.failed or self._earliest(spans, func)[1] or self._birth(func, spans)
            raise
        before = {_storage(t) for t in inputs}
        outs = [*_flat(out), *written.values()]
        if self._rows:
            try:
                self._carry(rule, given, inputs, outs, before)
            except Exception:  # following samples is a service: it never raises into the step
                self._rows.clear()
        copied = _storage(inputs[0]) if func is torch.ops.aten.clone.default else None
        if copied in self._known and copied not in self.causes:  # a copy is no use of it
            self._known[_storage(out)] = self._known[copied]
            return out
        for t in outs:
            storage = _storage(t)
            if storage in before and not written:
                continue  # a view: it shares what is known of its storage
            if rule.loads:  # a file's numbers
                self._known[storage] = OUTSIDE
                continue
            if self._known.get(storage) == OPAQUE:
                del self._known[storage]  # written now
            if is_bad(span := extent(t)):
                spans = spans or _spans(inputs)
                self.causes[storage] = self._bad((func, kept, kwargs), spans, t, span)
            elif storage in self.causes and not _is_part(t):
                del self.causes[storage]  # wholly overwritten
            elif rule.empty:
                self._known[storage] = OPAQUE
        return out

    def _bad(self, call, spans, t, span):
        """What made the bad result `t` of the call (func, args, kwargs)."""
        func, args, kwargs = call
        rule = _rule(func)
        wanted = any(isinstance(a, float) and not _is_real(a) for a in (*args, *kwargs.values()))
        number, birth = self._earliest(spans, func)
        if number < LAWFUL:
            samples = self._samples(t)
            # Born elsewhere, it enters the batch here; or a -inf of many rows is NaN in some. Else
            # all rows count: a step in time, say, may show some of them only.
            spreads = birth.samples and not (birth.made == "-inf" and not is_mask(span))
            if not spreads and 0 < len(samples) < (len(birth.samples) or self.size):
                birth = replace(birth, samples=samples, batch_size=self.size)
            return number, birth
        addends = spans[rule.bias :]  # of what is summed; a bias of -inf is a mask
        added = rule.sums and any(is_bad(s) for _, s in addends)
        spoilt = not is_mask(span) and not rule.takes_masks
        if birth and (added or (birth.source and spoilt)):
            # a mask that is added up is none, nor a -inf of the batch that makes NaN or inf
            return next(self._clock), replace(birth, entered=str(func))
        if is_mask(span) and (wanted or number == LAWFUL):
            passed_on = rule.copies and is_bad(spans[0][1])
            return LAWFUL, birth or (None if passed_on else self._birth(func, spans, t))
        birth = self._birth(func, spans, t)
        # x[i, j] = nan: some versions of torch fill with a tensor of one number, or copy it
        fills = rule.constant or (func is torch.ops.aten.copy_.default and spans[-1][0].dim() == 0)
        if fills and (birth.source == CONSTANT or (wanted and not birth.source)):
            by = self.functions.name  # a function that fills with NaN by itself is an operation
            maker = {"source": WRITTEN} if re.search(WRITERS, by) else {"op": f"torch.{by}"}
            return next(self._clock), replace(birth, **maker)
        if not all(map(isfinite, self.numbers)):
            birth = replace(birth, fix=NOT_FINITE)
        if is_mask(span) and t.dtype is torch.float16 and min(self.numbers, default=0) < -65504:
            birth = replace(birth, fix=TOO_LOW)
        if rule.empty:  # which of it is used is not known yet
            birth = replace(birth, samples=())
        self.births[birth.line] = birth.weak
        return next(self._clock), replace(birth, again=_again(*call))

    def blame(self, tensors: Iterable[Tensor]) -> Report | None:
        """The earliest birth among the ancestors of these tensors."""
        number, birth = self._earliest(_spans(tensors))
        return birth if number < LAWFUL else None

    def _earliest(self, spans, func=None):
        """The first cause among these tensors, which `func` uses: (its number, its birth)."""
        bad = (self._cause(t, span, func, spans) for t, span in spans if is_bad(span))
        return min(bad, default=NOBODY, key=lambda cause: cause[0])

    def _cause(self, t, span, func, spans):
        """What made `t` bad. It may be ready-made: a weight, a mask, an input, a constant."""
        if (storage := _storage(t)) in self.causes:
            return self.causes[storage]
        name = self._known.get(storage, "")
        lawful = not name.startswith("parameter ") and not STATISTIC.search(name)
        mask = is_mask(span) and lawful
        if mask and (not name or name.startswith(STATE)):
            return LAWFUL, None
        if not name or not func:
            return NOBODY
        self._cut(t)
        birth = replace(self._birth(func, spans, t), source=name)
        number = LAWFUL if mask else next(self._clock)
        return self.causes.setdefault(storage, (number, birth))

    def _birth(self, func, spans, out=None):
        module, call = self._stack[-1]
        node = torch._C._current_autograd_node()
        name, line, phase = "", "", "forward"
        # In the backward: a hook, a custom function, a checkpoint
        stack = list(takewhile(lambda frame: frame[2] != "_engine_run_backward", _frames()))
        checkpoints = any(file.endswith("checkpoint.py") for file, *_ in stack)
        repeats = checkpoints and torch.is_grad_enabled()
        if node is not None and not repeats:
            phase, name, line = "backward", node.name().rpartition(":")[2], _line(stack)
            stack = _frames_in(node.metadata.get("traceback_", ()))
            if name == "AccumulateGrad":
                owner = self._known.get(_storage(node.variable), "").removeprefix("parameter ")
                module, call = owner.rpartition(".")[0], 0
            elif len(self._stack) == 1:
                number = node._sequence_nr()
                at = bisect_right(self._since, number, key=lambda mark: mark[0])
                module, call = self._since[at - 1][1]
        birth = Report(
            op=str(func),
            module=module,
            phase=phase,
            node=name,
            line=line or _line(stack),
            call=call,
            spans=tuple(span for _, span in spans),
            inputs=(
                *(self._shown(t, span) for t, span in spans),
                *(f"the number {a:.3g}" for a in self.numbers),
            ),
            step=self.step,
            batch_size=self.size,
            fix=BY_ZERO if "aten.div" in str(func) and self.numbers[:1] == [0] else "",
        )
        if out is None:
            return birth
        bad = [span for _, span in spans if is_bad(span)]
        nan = out != out if bad and (out != out).any() else None  # its -inf may be a mask
        if str(func) == "aten.div.Tensor" and phase == "forward" and len(spans) == 2:
            divisor = _values(spans[-1][0]).abs()
            least = float(torch.where(divisor == 0, inf, divisor).amin())
            if least < _eps(divisor) and 0 in spans[-1][1]:
                birth = replace(birth, fix=UNDERFLOW.format(least))
        return replace(
            birth,
            made=_made(extent(out)),
            result=_type(out),
            source="" if all(map(is_mask, bad)) else CONSTANT,
            samples=self._samples(out, nan),
        )

    def _shown(self, t, span):
        """Type, shape and span of an input; its name, where it is bad and was there before."""
        name = self._known.get(_storage(t)) if is_bad(span) else None
        return f"{_type(t)} {span[0]:.3g} .. {span[1]:.3g}" + (f" ({name})" if name else "")

    def _check_index(self, ranges, func, inputs):
        """A label or an index out of range: on a GPU the kernel would end the CUDA context."""
        for what, index, low, high, *ignore in ranges:
            self.lawful.update(ignore)
            if ignore and bool((index == ignore[0]).all()):
                self.ignored = ignore[0]
            names, wrong = _outside_of(what, index, low, high, ignore)
            if names:
                self._cut(index)
                birth = self._birth(func, _spans(inputs))
                self.failed = replace(birth, names=names, samples=self._samples(index, wrong))
                raise IndexError(names[0])

    # Samples. A storage carries the batch dimension where it came from the batch through operations
    # that keep it: then one step along the batch is a fixed number of bytes there, whatever the
    # shape through which it is viewed.

    def _carries(self, t, d, inner):
        if t.layout is torch.strided and t.stride(d):
            self._rows[_storage(t)] = t.stride(d) * inner * t.element_size()

    def _cut(self, t):
        """A piece of a table that is as long as the batch holds its samples, too."""
        if _storage(t) not in self._rows and _is_part(t):
            self.follow([t])

    def _dim(self, t):
        """(the dimension of `t` that is the batch, its elements a sample), or None."""
        step = self._rows.get(_storage(t), 0) // t.element_size()
        strided = step and t.layout is torch.strided
        for d, stride in enumerate(t.stride() if strided else ()):
            inner = step // max(stride, 1)
            if inner * stride == step and t.shape[d] % (self.size * inner) == 0:
                return d, inner
        return None

    def _samples(self, t, wrong=None):
        """The samples for which `wrong` is true; without it, those with a bad number in `t`."""
        try:
            if (found := self._dim(t)) is None:
                return ()
            wrong = _beyond(t) if wrong is None else wrong
            d, inner = found
            wrong = wrong.unflatten(d, (-1, self.size, inner)).movedim(d + 1, 0)  # B, ...
            return tuple(wrong.reshape(self.size, -1).any(1).nonzero().flatten().tolist())
        except Exception:
            return ()

    def _carry(self, rule, given, inputs, outs, before):
        """Mark the results that still have the batch dimension."""
        sources = [(k - len(inputs), t, self._dim(t)) for k, t in enumerate(inputs)]
        sources = [entry for entry in sources if entry[2]]
        for number, t in enumerate(outs):
            storage = _storage(t)
            if storage in self._rows and (storage in before or _is_part(t)):
                continue  # a view, or written in part
            self._rows.pop(storage, None)  # overwritten
            for k, source, (d, inner) in sources:
                if (to := rule.follow(given, k, number, source, d, t)) is not None:
                    self._carries(t, to, inner)
                    break
            # What a loop over the samples has made is put together.
            if rule.joins and not sources and len(given["tensors"]) == self.size:
                d = given.get("dim", 0)
                if t.shape[d] == self.size:
                    self._carries(t, d % t.dim(), 1)


def _in_order(index, size):
    """x[:, i] or x[torch.arange(len(x)), i]: the rows stay where they are."""
    return index is None or torch.equal(index.flatten(), torch.arange(size, device=index.device))


# Of operations: the batch does not stay in the results of the first; in those of the second it
# does, in other dimensions.
DROPS = "index$|index_put|masked_s|take|convolution_backward|embedding.*backward|rnn.*backward"
STAYS = "nll_loss|embedding$|ctc_loss|linalg"
MATMUL = "(b|add|badd)?b?mm|(add)?mv"
SUMS = f"{MATMUL}|sum|mean|dot|linear|convolution|(index|scatter)_add"
CONSTANTS = "(masked_|index_)?fill|(new_)?full(_like)?|scalar_tensor"
WRITERS = "^$|fill|full|where|tensor|set|copy|pad|put|nan_to_num"  # functions: the script's own
OVERWRITES = ("copy", "fill", "zero", "normal", "uniform", "random", "bernoulli", "exponential")


@cache
def _rule(func):
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

    return SimpleNamespace(
        names=names,
        writes=writes,
        pointwise=pointwise,
        follow=follow,
        index=INDEX.get(name),
        overwrites=name in OVERWRITES,
        constant=re.fullmatch(CONSTANTS, name),
        empty=re.fullmatch("(new_)?empty(_like|_strided)?", name),
        joins=name in ("stack", "cat"),
        copies=name in ("to_copy", "clone", "copy"),
        loads=name == "set",
        sums=re.fullmatch(SUMS, name),
        takes_masks=re.search("softmax|logsumexp|attention", name),
        bias=int(name.startswith(("addmm", "addmv", "baddbmm"))),
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


def _again(func, args, kwargs):
    """The operation on the same inputs in fp32 and fp64: "nan in float32, finite in float64"."""
    results = []
    if torch.Tag.nondeterministic_seeded in func.tags or func.namespace != "aten":
        return ""  # it would draw random numbers, or wait for another rank
    for dtype in (torch.float32, torch.float64):
        try:
            wide, named = _exchange((args, kwargs), dtype, FLOATS)
            spans = [extent(t) for t in _flat(func(*wide, **named))]
        except Exception:  # a kernel that knows one dtype only
            break
        bad = next((_made(s) for s in spans if is_bad(s)), "finite")
        results.append(f"{bad} in {str(dtype).removeprefix('torch.')}")
        if bad == "finite":
            break
    return ", ".join(results)


# --- Cures, tried on the recorded step


def _try(rerun, report):
    """The report with the cures that were tried, up to the first that was finite: the guilty module
    in fp32, its parents, an eps or fp32 at that line, bf16, fp32."""
    tried = list(report.tried)
    for what, context, cure, advice in _cures(rerun, report):
        symptom = rerun(context, fp32=context is None)
        went = f"still bad ({symptom})" if symptom else "finite"
        if rerun.error and type(rerun.error).__name__ not in report.symptom:
            went = f"could not be tried ({symptom})"
        if isinstance(context, Calls) and not context.hits:
            went = "not tried, the call was not seen"
        tried.append(f"{what}: {went}")
        report = replace(report, tried=tuple(tried))
        if went == "finite":
            return replace(report, cure=cure, fix=report.fix or advice)
    return report


def _cures(rerun, report):
    """(as text, the context of a run, Report.cure, the advice if it helps), one after the other."""
    line, weak = report.line, report.weak
    precision = report.verdict == "precision"
    if precision:
        yield from _islands(rerun, report)
    advice, mend = WEAK.get(weak, ("", None))
    # 0 / 0: half precision has rounded the divisor's eps to 0
    rounded = weak == "div" and report.again.startswith("nan in float32,")
    if mend and (rounded or not precision) and not report.fix:
        where, calls = _lines(rerun, line, weak)
        what = report.cure_of_weak.rpartition(": ")[2]
        yield f"{what} at {where}", calls, ("eps", weak), ""
    if not precision:
        return
    late = ""
    if line:
        where, calls = _lines(rerun, line)
        before = f"x.float() before {where}, with autocast off there"
        yield f"x.float() at {where}", calls, ("line", where), before
        if weak != "to_copy":
            late = f": float() at {line} is not enough, or its operands are rounded before"
    known = f"{advice}, or " if weak.startswith(("log", "to_copy")) else ""
    kinds = {"fp32": None}
    half = any(p.dtype is torch.float16 for p in rerun.net.parameters())
    ranks = dist.is_available() and dist.is_initialized()
    if report.result.startswith("float16") and not (half and ranks):  # see island()
        kinds = {"bf16": InDtype(torch.bfloat16, (torch.float16,), rerun.net), **kinds}
    for kind, context in kinds.items():
        whole = f"--precision {kind}" if report.advice == "flags" else f"the whole step in {kind}"
        yield f"the whole step in {kind}", context, ("precision", kind), known + whole + late


def _islands(rerun, report):
    """The guilty module in fp32, then its parents; its result goes back to half, or does not."""
    modules, flags = dict(rerun.net.named_modules()), report.advice == "flags"
    # a loss around the network is not part of it
    name = report.module if report.module in modules else ""
    half = report.result.partition("[")[0]
    while name:
        code = re.sub(r"\.(\d+)(?![^.])", r"[\1]", f"net.{name}")  # net.blocks[9].fc1
        begin = "with torch.autocast(x.device.type, enabled=False)"
        weights = ""
        if any(p.dtype in HALF for p in modules[name].parameters()):
            weights = ", half weights"
            begin = f"{code}.float(), and then {begin}"
        for stays in sorted(("", ", result in fp32"), reverse=not flags):
            context = island(modules[name], None if stays else getattr(torch, half, None))
            back = "" if stays else f".to(torch.{half})"
            advice = f"{name} in fp32: {begin}: y = {code}(x.float()){back}"
            if flags:
                advice = f"--keep-fp32 '{name}'"
            yield f"{name} in fp32{stays}", context, (f"module{stays}{weights}", name), advice
        name = name.rpartition(".")[0]


def _lines(rerun, line, weak=""):
    """The context of a cure at this line, and at those that make the next bad number: the same weak
    operation once more, or for fp32 another that might hide it (1 / inf is 0). As text, too."""
    meant, lines = [], [line]
    if not weak:
        rerun.watch(fp32=True)
        meant = rerun.locator.births  # bad in fp32 too: meant so
    while len(lines) < 4:
        with Locator(rerun.net) as where:
            symptom = rerun(Calls(weak=weak, lines=lines))
        births = where.births.items() if symptom or not weak else ()
        more = [at for at, kind in births if at not in (*meant, *lines) and weak in ("", kind)]
        # no line of a library: nobody can mend that
        more = [at for at in more if ", called from" not in at]
        if not more:
            break
        lines.append(more[0])
    if len(lines) > 1 and not rerun(Calls(weak=weak, lines=lines[-1:])):
        lines = lines[-1:]  # what it made was the cause of the others
    return " and ".join(lines), Calls(weak=weak, lines=lines)


def island(module: nn.Module, back: torch.dtype | None = None) -> AbstractContextManager:
    """Inside, `module` computes in fp32. Its result goes back to the dtype `back`, or stays."""
    inner = nn.Module()
    # functional_call exchanges the parameters under this module. Their own data is not exchanged:
    # a parameter that has once had another dtype has lost the hook by which DDP averages it.
    inner.inner, inner.forward = module, module.forward

    def forward(*args, **kwargs):
        own = (*module.named_parameters(), *module.named_buffers())
        wide = {f"inner.{n}": t.float() for n, t in own if t.dtype in HALF}

        def call(*args, **kwargs):
            return torch.func.functional_call(inner, wide, args, kwargs)

        out = _in_fp32(call, args, kwargs)
        return _exchange(out, back, (torch.float32,)) if back in HALF else out

    return mock.patch.object(module, "forward", forward)


def _in_fp32(function, args, kwargs):
    """This call without autocast, and with fp32 in place of half."""
    args, kwargs = _exchange((args, kwargs), torch.float32, HALF)
    with torch.autocast(torch.device(_device((args, kwargs))).type, enabled=False):
        return function(*args, **kwargs)


class Calls(TorchFunctionMode):
    """Sees torch's functions as the step calls them. It reads the number of which the backward is
    taken, divides its gradient by `factor`, and at some lines changes the arguments: of the weak
    operation as WEAK says, or, where none is named, of every operation to fp32."""

    def __init__(self, factor=1.0, weak="", lines=(), locator=None):
        super().__init__()
        self.factor, self.weak, self.lines, self.locator = factor, weak, lines, locator
        self.hits, self.root, self.name = 0, 0.0, ""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.__name__.strip("_")
        self.name = name
        if name == "one_hot" and self.locator:  # it is no operation of aten
            ranges = INDEX[name](*args, **kwargs)
            self.locator._check_index(ranges, "torch.one_hot", ())
        if func is Tensor.backward and args[0].numel() == 1 and kwargs["gradient"] is None:
            self.root = float(args[0].detach())
            slope = torch.ones_like(args[0]) / self.factor
            create, inputs = kwargs["create_graph"], tuple(_flat(kwargs["inputs"]))
            keep = bool(kwargs["retain_graph"] or create)
            with self:  # a checkpoint repeats its forward in there; func would switch this off
                return torch.autograd.graph._engine_run_backward(
                    args,
                    (slope,),
                    keep,
                    create,
                    inputs,
                    allow_unreachable=True,
                    accumulate_grad=True,
                )
        meant = SAME.get(name, name) == self.weak if self.weak else name != "get"
        if not self.lines or not meant or _line(_frames()) not in self.lines:
            return func(*args, **kwargs)
        self.hits += 1
        if not self.weak:
            return _in_fp32(func, args, kwargs)
        args, kwargs = WEAK[self.weak][1](*args, **kwargs)
        return func(*args, **kwargs)


class InDtype(TorchDispatchMode):
    """What would be one of the types `of` is `to`, weights and buffers too: the whole step in bf16,
    or in fp32."""

    def __init__(self, to, of, net):
        super().__init__()
        self.to, self.of = to, of
        self.held = {t: t.data for t in (*net.parameters(), *net.buffers()) if t.dtype in of}

    def __enter__(self):
        for t, data in self.held.items():
            t.data = data.to(self.to)
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        for t, data in self.held.items():
            t.data = data

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func._schema.is_mutable:
            args, kwargs = _exchange((args, kwargs or {}), self.to, self.of)
        if "_scaled_mm." in str(func) and self.to is torch.float32:  # it knows no fp32
            a, b, scale_a, scale_b = args[:4]
            return (a * scale_a) @ (b * scale_b)
        return func(*args, **kwargs or {})


def _stance(stance):
    """How compiled code runs. Where the compiler is not loaded, nothing is compiled."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance(stance)


# --- Reading tensors, and naming them


def _values(t):
    """The numbers of a sparse or nested tensor, this rank's of a sharded one, or the tensor."""
    while torch._C._functorch.is_functorch_wrapped_tensor(t):  # within torch.func's vmap or grad
        t = torch._C._functorch.get_unwrapped(t)
    t = t.to_local() if hasattr(t, "to_local") else t
    if t.layout is torch.strided and not t.is_nested:
        return t
    return t._values() if t.layout is torch.sparse_coo else t.values()


def _storage(t):
    """One object for all views of a storage. It lives as long as the storage."""
    return _values(t).untyped_storage()


def _is_part(t):
    """A view of a piece of its storage."""
    return _values(t).nbytes < _storage(t).nbytes()


def _spans(tensors):
    """(tensor, extent) of those with real numbers."""
    return [(t, extent(t)) for t in tensors if t.is_floating_point() or t.is_complex()]


@torch.no_grad()
def extent(t: Tensor) -> tuple[float, float]:
    """(lowest, highest) as floats; NaN in both if there is one; (0, 0) without real numbers."""
    t = _values(t)
    if not t.numel() or t.is_meta or not (t.is_floating_point() or t.is_complex()):
        return 0.0, 0.0
    if t.is_complex():
        t = torch.view_as_real(t.resolve_conj())
    elif t.element_size() == 1:
        t = t.float()
    low, high = torch.aminmax(t)
    number = torch._C.TensorBase.item  # class Watch replaces Tensor.item
    return float(number(low)), float(number(high))


def _is_real(x):
    return isinstance(x, int | float) and abs(x) <= LIMIT


def is_bad(span: tuple[float, float]) -> bool:
    return not (span[0] >= -LIMIT and span[1] <= LIMIT)  # True for NaN


def is_mask(span: tuple[float, float]) -> bool:
    """Bad, but only at the negative end: what -inf or finfo.min in a mask looks like."""
    return span[0] < -LIMIT and span[1] <= LIMIT


def _made(span):
    """The bad end of a span, as text."""
    return f"{span[1]:.3g}" if span[1] > LIMIT else f"{span[0]:.3g}"


def _type(t):
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"


def _beyond(t):
    return (t.detach().abs().float() <= LIMIT).logical_not()  # True for NaN


def _bad_rows(table):
    """Of a table (an embedding, say) with good rows and bad ones: which are bad."""
    plain = type(table) in (Tensor, nn.Parameter) and table.layout is torch.strided
    if not plain or table.dim() < 2 or table.element_size() == 1:  # not of shards, nor of fp8
        return ""
    rows = _beyond(table).flatten(1).any(1).nonzero().flatten().tolist()
    return f" in rows {_few(rows)} of {len(table)}" if 0 < len(rows) < len(table) else ""


def inner_tensors(tree: Any, prefix: str = "", depth: int = 9) -> Iterator[tuple[str, Tensor]]:
    """(dotted name, tensor) for every tensor in nested mappings, lists, tuples, dataclasses, and in
    the variables of plain objects (a batch of PyG or detectron2)."""
    if isinstance(tree, Tensor):
        yield prefix, tree
        return
    if isinstance(tree, list | tuple):
        tree = dict(enumerate(tree))
    elif not isinstance(tree, Mapping):
        closed = isinstance(tree, nn.Module | type | ModuleType) or depth < 6
        tree = {} if closed else getattr(tree, "__dict__", {})
    for key, value in tree.items() if depth else ():
        # optimizer.state is keyed by the parameters themselves
        key = "" if isinstance(key, Tensor) or str(key).startswith("_") else str(key)
        yield from inner_tensors(value, ".".join(filter(None, (prefix, key))), depth - 1)


def _flat(tree):
    """The tensors among an operation's arguments or results."""
    return [a for a in tree_leaves(tree) if isinstance(a, Tensor)]


def _batched(tensors):
    """Those with a batch dimension: a row of real numbers may be one observation."""
    return (t for t in tensors if t.dim() > 1 or (t.dim() and not t.is_floating_point()))


def _batch_size(tensors):
    """Most tensors have the batch first, or after time; 0: there are none."""
    # of two dimensions of real numbers the second is no time, but columns
    heads = [t.shape[: 1 if t.dim() == 2 and t.is_floating_point() else 2] for t in tensors]
    counts = Counter(n for head in heads for n in dict.fromkeys(head))
    return max(counts, key=counts.get, default=0)  # of equals the one that came first


def _exchange(tree, to, of):
    """The same with every tensor, and every dtype, that is one of `of` exchanged for `to`."""

    def one(v):
        if isinstance(v, Tensor):
            return v.to(to, copy=True) if v.dtype in of else v
        return to if isinstance(v, torch.dtype) and v in of else v

    return tree_map(one, tree)


def _statistics(net):
    """Running statistics: buffers that can never hold a mask or an inf on purpose."""
    return {f"buffer {n}": b for n, b in net.named_buffers() if STATISTIC.search(n)}


def _said(error):
    text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return shorten(text, 160, placeholder=" ...")


def _few(items, n=8, between=", "):
    items = list(items)
    more = f" and {len(items) - n} more" if len(items) > n else ""
    return between.join(map(str, items[:n])) + more


def _frames():
    """What is under way, the innermost first."""
    frame = sys._getframe(1)
    while frame:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def _frames_in(text):
    """The same of what traceback.format_stack() has written."""
    return re.findall(r'File "(.+)", line (\d+), in (\S+)', "".join(text))[::-1]


def _script(frames):
    """The script's line, and before it the lines of libraries that it has called, without torch."""
    found = []
    for frame in frames:
        file = frame[0]
        if NAMED.match(file) or not (file == __file__ or file.startswith((TORCH, "<"))):
            found.append(frame)
            if not file.startswith((LIBRARY, TORCH)) and "-packages" not in file:
                break
    return found


def _line(frames):
    """file:line in function, of a library and of the script that has called it."""
    at = [f"{os.path.basename(file)}:{n} in {name}" for file, n, name in _script(frames)]
    return ", called from ".join([*at[:1], *at[1:][-1:]])


# --- python autopsy.py YOUR_SCRIPT.py

USAGE = """python autopsy.py [--from-step N] [--one-run] [--report FILE] YOUR_SCRIPT.py ARGS...
(or: -m package.module ARGS...)
Runs the script as it is and reads losses, gradients, weights, evaluation outputs and the numbers
that the script reads. It draws no random number. What a step computes is written down: the calls of
modules, and of torch's functions outside of modules. At the first bad step they are made again,
here and now, with every operation watched, then in fp32: the report names the operation, and the
script ends. Only what cannot be made again (an optimizer of your own, a counter outside of the
modules) needs a second, quiet run of the script (files that it writes are written again); --one-run
refuses that. --from-step N watches every operation from optimizer step N on. Exit code 3: the
report is printed and written to FILE (autopsy.txt). 0: nothing that was read was NaN. Any other
exit code is the script's."""
RERUN = "AUTOPSY_RERUN"  # set for the second run: the folder with its start, and for its report
ROOM = 1 << 28  # bytes of tensors that are kept by reference since the last optimizer step
WAIT = 60  # seconds for the reports of other ranks
RANDOM = re.compile(
    "empty|rand|normal|uniform|bernoulli|multinomial|dropout|exponential|poisson|gumbel"
)
WRITES = re.compile(r"(?!requires_grad)[a-z]\w*[a-z0-9]_|__(setitem|i(add|sub|mul|truediv|pow))__")
# Attributes, and what only torch itself calls
NOTHING_NEW = re.compile(r"backward|__set__|__get__(?!(m?T|H|real|imag)$).*|_(?!_|.*pack).*")
READS = ("item", "tolist", "numpy", "__float__", "__repr__", "__format__")
FORGOTTEN = (
    "scaler.step(optimizer), and scaler.update() after it, in place of optimizer.step(): it "
    "divides the gradients by the loss scale, and skips a bad step"
)
ASKS = ("isnan", "isinf", "isfinite")  # a script that passes over bad batches asks so
BACKWARD = torch.autograd.backward
SLOPES = (BACKWARD, torch.autograd.grad)
APPLY = vars(torch.autograd.Function)["apply"]  # a class method, not bound to a class yet


def _apply(function, *args, **kwargs):
    return APPLY.__get__(None, function)(*args, **kwargs)


@dataclass(frozen=True)
class Made:
    """In the arguments of a call: the k-th tensor that an earlier call made."""

    number: int
    k: int
    frames: tuple = ()
    data: bool = field(default=False, compare=False)  # no weight, no module had a part in it


class Packed(NamedTuple):
    """Stands for a PackedSequence, which takes tensors only."""

    data: Any
    batch_sizes: Any
    sorted_indices: Any
    unsorted_indices: Any


def _is_packed(x):
    return isinstance(x, Packed | PackedSequence)


@dataclass(eq=False)
class Call:
    """A call of an outermost module, of a function of torch outside of modules, or a backward."""

    function: Callable
    number: int
    args: Any  # Made(...) for what an earlier call made; everything else by reference
    kwargs: Any
    frames: tuple  # the innermost first
    grad: bool
    autocast: list[tuple[str, torch.dtype]]
    rng: dict | None = None
    carried: list = ()  # of a module, before the call: see _carried()
    left: list = ()  # what the call wrote of these: (module, name)
    buffers: dict = field(default_factory=dict)  # in training: before this step's first call
    shape: tuple[int, ...] = ()  # of a module's first input

    def given(self):
        return [t for _, t in inner_tensors((self.args, self.kwargs))]

    def uses(self):
        """What other calls made."""
        return [x for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, Made)]

    def again(self, made):
        """Make this call once more, from the same line."""

        def stand_in(x):
            if isinstance(x, Tensor) and x.grad_fn is not None:
                return x.detach().requires_grad_()  # nothing is known of its history
            if isinstance(x, Packed):
                return PackedSequence(*map(stand_in, x))
            return made[x] if isinstance(x, Made) else x

        try:
            args, kwargs = tree_map(stand_in, (self.args, self.kwargs), is_leaf=_is_packed)
        except KeyError:
            return  # made before the last step of another optimizer
        function = self.function
        if function is BACKWARD and len(args) == 4:  # as Tensor.backward calls it
            function = Tensor.backward  # which class Calls sees
        for frame in self.frames:
            function = partial(_from(frame), function)
        _carry_back(self.carried)
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype))
            if self.rng:
                set_rng_states(self.rng, _device((args, kwargs)))
            out = function(*args, **kwargs)
        made.update(self.made(out))

    def made(self, out):
        out = out, [vars(module).get(name) for module, name in self.left]
        tensors = enumerate(inner_tensors(out))
        weights = isinstance(self.function, nn.Module) or any(t.requires_grad for t in self.given())
        data = not weights and all(x.data for x in self.uses())
        return {Made(self.number, k, self.frames, data): t for k, (_, t) in tensors}


def _device(tree):
    return next((t.device for t in _flat(tree)), "cpu")


@cache
def _from(frame):
    """Calls a function as if from this line of the script: every traceback then says so."""
    file, line, name = frame
    space = {}
    text = "\n" * (line - 1) + "def f(call, *args, **kwargs): return call(*args, **kwargs)"
    exec(compile(text, file, "exec"), space)
    space["f"].__code__ = space["f"].__code__.replace(co_name=name)
    return space["f"]


class Tape(TorchFunctionMode):
    """Writes down what the script computes outside of modules, and the calls of modules; again()
    makes the step once more from that.

    What a call made is not held. The rest is, by reference: the batch.
    """

    def __init__(self, watch):
        super().__init__()
        self.watch, self.calls, self.number, self.start = watch, [], 0, 0
        self.tables = set()  # numbers of calls: see keep_tables()
        self.first = inf  # the number of calls at the first backward
        self.known = torch.utils.weak.WeakTensorKeyDictionary()  # what made a tensor
        self.outer = set()  # ids of tensors that are held
        self.bytes = 0
        self.turns = {}  # optimizer: the number of calls at its last step
        self.rooms = WeakKeyDictionary()  # storages of torch.empty: the line that made them

    def turn(self, on):
        """Inside of modules and optimizers nothing is written down. It returns what was before."""
        stack = torch.overrides._get_current_function_mode_stack()
        if on and self not in stack:
            self.__enter__()
        elif not on and stack and stack[-1] is self:
            self.__exit__(None, None, None)
        return self in stack

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self.watch._mine():
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in READS or name in ASKS:
            self.watch._safely(self.watch._reads, args[0], name)
        if name == "__get__":
            name += func.__self__.__name__
        random = RANDOM.search(name)
        drawn = random and (kwargs.get("generator") or not _flat(args))  # the script's batch
        if drawn or name in READS or NOTHING_NEW.fullmatch(name):
            out = func(*args, **kwargs)
            if name == "empty" and out.layout is torch.strided:
                self.rooms[_storage(out)] = _line(_frames())
            return out
        given = (*args, *kwargs.values())  # nn.init gives its tensor by name
        writes = WRITES.fullmatch(name) and given and isinstance(given[0], Tensor)
        if writes and not self._writes(name, *given):
            return func(*args, **kwargs)
        call = self.write(func, args, kwargs)
        if random:
            call.rng = rng_states(_device(args))
        out = func(*args, **kwargs)
        if "empty" in name:
            call.function = partial(_as_it_is_now, out.detach())
            call.args, call.kwargs = (), {}
        self.done(call, out)
        if not (_flat(out) or writes or name == "register_hook"):
            self.calls.remove(call)
        return out

    def _writes(self, name, t, *values):
        """Before an operation in place. False: it is not written down."""
        symbol = self.symbol(t)
        base = t if t._base is None else t._base  # a part of what is held changes with it
        made = isinstance(symbol, Made) and isinstance(self.symbol(base), Made)
        if made and not isinstance(t, nn.Parameter):
            return True
        if self.watch._is_weight(t):
            self.watch._safely(self.watch._by_hand, name, t, values)
            return False
        if t.numel() > ROOM >> 6:
            return False
        before = t.detach().clone()
        for call in self.calls:
            if call.buffers and any(t is b for b in call.function.buffers()):
                call.buffers = {}  # the next call copies them as they are then
            # what they were given
            call.args, call.kwargs = tree_map(
                lambda x: before if x is symbol else x, (call.args, call.kwargs)
            )
        self.done(self.write(Tensor.clone, (before,), {}), t)
        return True

    def write(self, function, args, kwargs):
        self.number += 1
        if function in SLOPES:
            self.first = min(self.first, self.number)
        casts = [
            (d, torch.get_autocast_dtype(d))
            for d in ("cpu", "cuda")
            if torch.is_autocast_enabled(d)
        ]
        args, kwargs = tree_map(self.symbol, (tuple(args), kwargs), is_leaf=_is_packed)
        grad = self.watch.training if self.watch.busy else torch.is_grad_enabled()
        frames = tuple(_script(_frames()))
        self.calls.append(Call(function, self.number, args, kwargs, frames, grad, casts))
        return self.calls[-1]

    def done(self, call, out):
        for made, t in call.made(out).items():
            self.known[t] = made

    def symbol(self, t):
        """What stands for this tensor in a call."""
        if isinstance(t, PackedSequence):
            return Packed(*map(self.symbol, t))
        if not isinstance(t, Tensor):
            return t
        made = self.known.get(t)
        if made and self.holds(made.number):
            return made
        if id(t) not in self.outer and not (t.requires_grad and t.is_leaf):
            self.outer.add(id(t))
            self.bytes += t.numel() * t.element_size()
        return t

    def holds(self, number):
        return number > self.start or number in self.tables

    def keep_tables(self):
        """At the end of the first step: what made a small tensor, before the training, that is bad
        already (a schedule, a table of weights) stays, because a later step may be the first to use
        it."""
        early = {call.number for call in self.calls if call.number < self.first}
        for t, made in self.known.items():
            # no fake tensor of a compiler, and not what came from NumPy
            small = type(t) is Tensor and t.numel() < 1 << 16 and made.number in early
            if small and is_bad(span := extent(t)) and not is_mask(span):
                self.tables.add(made.number)
        for call in reversed(self.calls):
            if call.number in self.tables:
                self.tables.update(made.number for made in call.uses())

    def needed(self, targets):
        """The calls that lead to losses and to these: without a validation that came before."""
        calls, needed = [], set(targets)
        for call in reversed(self.calls):
            if call.grad or call.number in needed:
                calls.append(call)
                needed.update(made.number for made in call.uses())
        return calls[::-1]

    @property
    def latest(self):
        """The number of calls at the last step of any optimizer: they may take turns."""
        return max(self.turns.values(), default=0)

    @property
    def full(self):
        return self.bytes > ROOM or len(self.calls) > 9999

    def stepped(self, optimizer):
        """Forget what was computed before the last step of every optimizer. One that steps twice
        in a row does not take turns with another: then that one's is forgotten. It returns whether
        it did."""
        if not self.start:
            self.keep_tables()
        twice = next(reversed(self.turns), None) == optimizer
        if twice or self.full:
            self.turns = {}
        self.turns.pop(optimizer, None)
        self.turns[optimizer] = self.number
        self.start = min(self.turns.values())
        self.calls = [call for call in self.calls if self.holds(call.number)]
        self.outer, self.bytes = set(), 0
        return twice

    def buffers_back(self, calls):
        for call in calls:
            if call.buffers:
                _put_back(call.function, call.buffers)

    def again(self, targets):
        """examine() what is on the tape, and leave no trace. `targets`: numbers of calls whose
        results are judged, beside the losses."""
        calls = self.needed(targets)
        called = [x for c in calls for x in (c.function, *tree_leaves(c.args))]
        net = _together([x for x in called if isinstance(x, nn.Module)])
        params = dict(net.named_parameters())
        within = set(params.values())
        leaves = dict.fromkeys(t for call in calls for t in call.given() if t.is_leaf)
        free = [t for t in leaves if t.requires_grad and t not in within]
        params |= {f"{_type(t)}, number {k}": t for k, t in enumerate(free)}  # in no module
        now = StepRecord(self.watch.steps, net)
        grads = [(t, t.grad) for t in (*params.values(), *leaves)]
        if any(g is not None and is_bad(extent(g)) for _, g in grads):
            # what was made of them, like their norm, is no cause
            backward = max((c.number for c in calls if c.function is BACKWARD), default=0)
            targets = [number for number in targets if number < backward]
        buffers = tuple(b for b in net.buffers() if not b.is_inference())
        # The script's own graph has saved them: its backward may be still to come.
        with torch.autograd._unsafe_preserve_version_counter(buffers):
            try:
                self.buffers_back(calls)
                return self._replayed(calls, targets, net, params)
            finally:
                now.restore()
                for p, g in grads:
                    p.grad = g

    def _replayed(self, calls, targets, net, params):
        """The report on these calls, or None: there is nothing to judge."""
        record = StepRecord(self.watch.steps, net)
        record.rng = next((call.rng for call in calls if call.rng), record.rng)
        record.named = [(f"parameter {name}", p) for name, p in params.items()]
        part, made, scale = [], {}, _loss_scale(calls)
        for call in calls:
            part.append(call)
            ends = call.function is BACKWARD and call.number > self.latest
            if ends or (targets and call is calls[-1]):
                batch, named = self._batch(part)
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
            return _seen(birth) if birth.op else None
        kinds = [dtype for call in calls for _, dtype in call.autocast]
        kinds += [*(p.dtype for p in params.values()), torch.float32]
        precision = str(kinds[0]).removeprefix("torch.")
        report = examine(run_step, record, net, precision=precision, scale=scale)
        p = params.get(report.source.removeprefix("parameter "))
        room = self.rooms.get(_storage(p)) if p is not None and p._version == 0 else None
        if room:
            fix = "initialise it: torch.empty leaves what was in memory"
            report = replace(report, names=(report.source, f"never written since {room}"), fix=fix)
        for name, b in net.named_buffers():
            made_by = self.known.get(b) if is_bad(extent(b)) else None
            if not made_by:
                continue
            line, number = _line(made_by.frames), made_by.number
            guilty = report.source == f"buffer {name}"
            if guilty and self.holds(number) and number not in targets:
                # made outside of its module: what is bad in it is this very write
                b.nan_to_num_(0.0, 0.0, 0.0)
                why = self._replayed(self.needed([number]), [number], net, params)
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

    def _batch(self, calls):
        """Of the tensors that the calls were given: the batch, and others by their names."""
        first = sorted(calls, key=lambda call: (not call.shape, not call.grad))  # of modules
        given = dict.fromkeys(t for call in first for t in call.given())
        given = [t for t in given if t.grad_fn is not None or not t.requires_grad]
        shape = first[0].shape
        batch, named = [], []
        for t in given:
            # in time-major data the batch comes second; what differs in the first dimension alone
            # is the data set that the batch was cut from
            second = t.dim() > 2 and t.shape[1:2] == shape[1:2] and t.shape[1:] != shape[1:]
            like = not shape or t.shape[:1] == shape[:1] or second  # (): no module was called
            made = self.known.get(t)
            early = not made or made.data or made.number <= self.first
            if not made and t.grad_fn is not None:
                named.append((UNKNOWN, t))
            elif early and t.dim() and like:
                batch.append(t)
            elif made:
                when = "a tensor before this step" if made.number <= self.first else EARLIER
                named.append((f"{when} ({_line(made.frames)})", t))
            else:
                named.append((OUTSIDE, t))
        return batch, named


def _as_it_is_now(room):
    """Memory of torch.empty again, with what a kernel that torch does not see has written to it."""
    again = torch.empty(0, dtype=room.dtype, device=room.device)  # it holds nothing by chance
    with _disable_current_modes():  # torch wrote nothing here
        again.resize_(room.shape).copy_(room)
    return again


class Watch:
    """The hooks around a script: what is read of it, and judged. Every operation is watched from
    optimizer step `begin` on.

    `again`: this is the second run.
    """

    def __init__(self, argv, path, begin, again, one_run):
        self.argv, self.path, self.begin = argv, os.path.abspath(path), begin
        self.again, self.one_run = again, one_run
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.home, self.environment = os.getcwd(), dict(os.environ)
        self.rng = rng_states("cpu")
        self.thread, self.on, self.busy = threading.get_ident(), True, False
        self.depth = 0  # calls under way of which nothing is written down
        self.training = True
        self.undo, self.tape = ExitStack(), Tape(self)
        self.skips = self.skipped = self.guilty = 0
        self.last = {}  # optimizer: its steps
        # Read at the next transfer: (a number on the device, what to do with it if it is bad)
        self.pending = []
        self.losses = []
        self.roots, self.weights = WeakSet(), WeakSet()  # outermost modules; storages of theirs
        self.writers = WeakSet()  # modules that write into what they are given
        self.written = {}  # weight: what the script wrote into it, see _by_hand()
        self.call = self.trained = self.stepping = self.optimizer = self.locator = None
        self.gradient = 0.0  # the largest norm
        self.recent = {}  # optimizer: its last norms
        self.norms = {}  # dtype: {parameter: its norms in some steps}
        self.rates = set()
        # The loss scaler; what it knew of the optimizers when it last multiplied a loss
        self.scaler, self.states, self.forgotten = None, None, False
        self.unskipped = False  # the scaler knew that this step is bad, and was not asked
        self.reads = Counter()
        self.unwatched = set()  # sentences
        self.symptom, self.step, self.reports = "", 0, {}

    def __enter__(self):
        for handle in (
            register_optimizer_step_pre_hook(partial(self._safely, self._before_step)),
            register_optimizer_step_post_hook(partial(self._safely, self._stepped)),
        ):
            self.undo.callback(handle.remove)
        call = partial(self._around, self._call_begins, self._call_ends)
        module = partial(self._around, self._module_begins, self._module_ends)
        backward = partial(self._around, self._backward_begins, self._backward_ends)
        self._wrap(nn.Module, "__call__", module)
        self._wrap(torch.autograd, "backward", backward)
        self._wrap(torch.nn.utils.stateless, "_functional_call", call)
        self._wrap(torch.autograd.Function, "apply", call)
        self._wrap(torch._functorch.apis, "vmap_impl", call)
        self._wrap(torch._functorch.eager_transforms, "grad_impl", call)
        self._wrap(torch.amp.GradScaler, "scale", self._scale)
        self._wrap(torch.amp.GradScaler, "step", self._scaler_step)
        self._wrap(torch.utils.data.dataloader._BaseDataLoaderIter, "__next__", self._unseen)
        self._wrap(BaseProcess, "start", self._children)
        self._wrap(torch, "from_numpy", self._from_numpy)
        os.register_at_fork(after_in_child=self.__exit__)  # the workers of a DataLoader
        if self.begin is not None:
            torch.compiler.set_stance("force_eager")
        self._watch_operations()
        self.tape.turn(True)
        return self

    def __exit__(self, *error):
        self.tape.turn(False)
        self.on, self.locator = False, None
        self.undo.close()

    def _watch_operations(self):
        """Begin to watch every operation, if the time has come; not in the middle of a backward."""
        due = self.begin is not None and self.steps >= self.begin
        if self.on and not self.locator and due and not self.depth:
            self.locator = self.undo.enter_context(Locator())
        if self.locator:
            self.locator.step = self.steps

    def _mine(self):
        # The compiler sees a constant, and traces nothing of this file.
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return False
        here = threading.get_ident() == self.thread
        if not here and torch._C._current_autograd_node() is None:  # no backward on a GPU
            self.unwatched.add("torch was used in another thread, which is not watched")
        return here and self.on and not self.busy

    def _wrap(self, owner, name, around):
        custom = owner is torch.autograd.Function
        original = _apply if custom else getattr(owner, name)

        @wraps(original)
        def wrapper(*args, **kwargs):
            if self._mine():
                return around(original, *args, **kwargs)
            return original(*args, **kwargs)

        patch = classmethod(wrapper) if custom else wrapper
        self.undo.enter_context(mock.patch.object(owner, name, patch))

    def _safely(self, hook, *args):
        """Calls the hook. An error of it is one line and ends the watch, never the script."""
        if not self._mine():
            return
        self.busy, self.training = True, torch.is_grad_enabled()
        locator = self.locator or SimpleNamespace()
        locator.paused = True
        self.writing = self.tape.turn(False)  # the hook may set what is after it
        try:
            with torch.no_grad():
                hook(*args)
        except Exception as error:
            self._say(
                f"the watcher failed ({_said(error)}) and is switched off; the script goes on",
                every=True,
            )
            self.__exit__()
        finally:
            self.busy = locator.paused = False
            self.tape.turn(self.writing and self.on)

    def _say(self, text, every=False):
        if self.rank == 0 or every:
            sys.stderr.write(f"autopsy: {text}\n")  # a script may replace print
            sys.stderr.flush()

    # What the script does: modules, backward passes, steps

    def _unseen(self, original, /, *args, **kwargs):
        """What happens in there is not written down."""
        was = self.tape.turn(False)
        self.depth += 1
        try:
            return original(*args, **kwargs)
        finally:
            self.depth -= 1
            self.tape.turn(was and self.on)

    def _around(self, begins, ends, original, /, *args, **kwargs):
        """A call of which only the outermost is written down."""
        if self.depth:
            return original(*args, **kwargs)
        self._safely(begins, original, args, kwargs)
        out = self._unseen(original, *args, **kwargs)
        self._safely(ends, out)
        return out

    def _from_numpy(self, original, array):
        """No mode of torch sees it. Of a table, the line where it enters torch is noted."""
        t = original(array)
        self.tape.known[t] = Made(0, 0, tuple(_script(_frames())), data=True)
        return t

    def _call_begins(self, function, args, kwargs):
        """torch.func's vmap, grad or functional_call, a custom autograd.Function."""
        self.call = self.tape.write(function, args, kwargs)
        self.call.rng = rng_states(_device((args, kwargs)))

    def _call_ends(self, out):
        self.tape.done(self.call, out)

    def _children(self, original, process):
        if not getattr(process._target, "__module__", "").startswith("torch.utils.data"):
            self.unwatched.add("the script started processes, which are not watched (those that "
                               "torchrun --nproc_per_node=N autopsy.py SCRIPT starts are)")
        return original(process)

    def _module_begins(self, function, args, kwargs):
        module, *args = args
        self.optimizer = None  # what raises from here on is not its step
        if isinstance(module, nn.parallel.DistributedDataParallel):
            module = module.module
        fresh = module not in self.roots
        if fresh:
            self.roots.add(module)
            self.weights.update(_storage(p) for p in module.parameters())
        if self.tape.full:
            self._transfer(calm=True)
            self.tape.stepped(0)
        given = [t for _, t in inner_tensors((args, kwargs))]
        for t in given if fresh or module in self.writers else ():
            if not t.requires_grad:
                self.tape._writes("", t)
        call = self.call = self.tape.write(module, args, kwargs)
        self.versions = [(t, t._version) for t in given if not t.is_inference()]
        call.rng = rng_states(_device(given))
        call.shape = next((t.shape for t in _batched(given)), ())
        call.carried = _carried(module)
        if call.grad and module.training:
            earlier = (c.buffers for c in self.tape.calls if c.function is module)
            call.buffers = next(filter(None, earlier), None) or _copied_buffers(module)
        if self.locator:
            self.locator.take([*args, kwargs] if kwargs else args)

    def _module_ends(self, out):
        call = self.call
        module = call.function
        call.left = [
            (m, name)
            for m, before in call.carried
            for name, value in _attributes(m).items()
            if type(value) in KEPT or value is not before.get(name, (None,))[0]
        ]
        self.tape.done(call, out)
        written = [b for n, b in module.named_buffers() if n in call.buffers]
        self._note(written, partial(self._bad_buffer, call))
        if any(t._version != before for t, before in self.versions):
            self.writers.add(module)  # it writes into its inputs: the next ones are copied
        if call.grad:
            self.trained = module  # so that it lives until the end of the script
        elif next(module.parameters(), None) is not None:
            outs = [t for _, t in inner_tensors(out) if t.is_floating_point() and t.numel()]
            if outs:  # the largest number, because -inf alone is a mask
                largest = torch.stack([t.amax().float() for t in outs]).amax()
                self.pending.append((largest, partial(self._bad_output, call)))
            if len(self.pending) > 999:  # a script that trains nothing
                self._transfer(calm=True)

    @property
    def steps(self):
        return max(self.last.values(), default=0)

    def _backward_begins(self, function, args, kwargs):
        self.tape.write(BACKWARD, args, kwargs)
        losses = args[0] if args else kwargs["tensors"]
        self.losses += [t.detach() for _, t in inner_tensors(losses)]

    def _backward_ends(self, out):
        if self.stepping:
            self._check(self.stepping)
        if not self.last:  # without an optimizer, or before its first step
            self._transfer()
        self._watch_operations()

    def _before_step(self, optimizer, args, kwargs):
        closure = kwargs.get("closure") or next(iter(args[1:]), None)
        self.stepping = optimizer if callable(closure) else None  # its passes are still to come
        self.optimizer = optimizer
        self._check(optimizer)
        if not self.stepping:
            self.writing = False

    def _check(self, optimizer):
        """Before an optimizer step: one read of the gradients, one transfer of everything noted."""
        if id(optimizer) not in self.last:
            self.last[id(optimizer)] = 0
            moments = [t for _, _, key, t in _held(optimizer) if key]
            self._note(moments, partial(self._bad_update, optimizer, None, ""))
        scale = getattr(optimizer, "grad_scale", None)  # a fused step unscales by itself
        scales = [] if scale is None else [scale]
        grads = [p.grad for p in _moved(optimizer)]
        norms = _norms(grads)
        if self.world > 1 and any(hasattr(g, "to_local") for g in grads):  # norms of shards
            total = torch.stack(norms).square().sum()
            dist.all_reduce(total)  # a sum keeps NaN and inf
            norms = [total.sqrt()]
        values = self._transfer([*norms, *scales], calm=bool(scales))
        scale = values.pop() if scales else 1.0
        state = {}
        if self.scaler:
            states = self.scaler._per_optimizer_states  # update() makes new ones
            state = states[id(optimizer)]
            plain = states is self.states and state["stage"].name == "READY"  # not divided
            self.forgotten |= plain and not scales
        norm = sum(v * v for v in values) ** 0.5 / scale
        if norm <= LIMIT:
            self.gradient, self.skips = max(self.gradient, norm), 0
            self.recent.setdefault(id(optimizer), deque(maxlen=5)).append(norm)
        elif scales:
            self._skip(optimizer)
        else:
            self.unskipped = any(_host(state.get("found_inf_per_device", {}).values()))
            self._bad_gradients(optimizer)

    def _stepped(self, optimizer, args, kwargs):
        """Its weights and moments are read now, and judged with the next gradients."""
        self.writing = not self.depth
        self.stepping = self.optimizer = None
        if self.steps & (self.steps - 1) == 0:  # steps 0, 1, 2, 4, 8, ...
            self.rates.update(float(group.get("lr", 1.0)) for group in optimizer.param_groups)
            for p in _moved(optimizer):
                if p.is_floating_point() and bool(_values(p.grad).any()):
                    norms = self.norms.setdefault(p.dtype, {}).setdefault(id(p), [])
                    norms.append(float(_norms([p.double()])[0]))
        self._count(optimizer)
        rates = [group.get("lr") for group in optimizer.param_groups]  # a schedule moves them
        held = [t for _, p, _, t in _held(optimizer) if p.grad is not None]
        self._note(held, partial(self._bad_update, optimizer, rates, _line(_frames())))
        if self.locator:
            self._transfer()

    def _by_hand(self, name, p, values):
        """The script writes these values into a weight: an update, an average, a copy. All that
        were written are read together, at the next transfer."""
        new = [call.function for call in self.tape.calls if call.number > self.tape.latest]
        values = [t for t in _flat(values) if isinstance(self.tape.symbol(t), Made)]
        write = name, self.steps, _line(_frames()), values, _norms([p] if values else [])
        if any(function in SLOPES for function in new):  # it ends the step, and comes after this
            self._note(values, partial(self._bad_write, p, [write]))
            self._transfer()
            self._count(None)
        self.written.setdefault(p, []).append(write)

    def _buffer_by_hand(self, t):
        """The calls that come made it so: their module's buffers are copied once more."""
        if owner := self.owners.get(_storage(t)):
            self.buffers.pop(owner(), None)

    def _is_weight(self, t):
        known = isinstance(t, nn.Parameter) or _storage(t) in self.weights
        return t.is_floating_point() and (known or t.requires_grad)

    def _count(self, optimizer):
        key = id(optimizer)
        twice = self.tape.stepped(key)  # it does not take turns, but may have followed another
        self.last[key] = 1 + (self.steps if twice else self.last.get(key, 0))
        self.losses = []
        self._watch_operations()

    def _scaler_step(self, original, scaler, optimizer, *args, **kwargs):
        before = dict(self.last)
        out = original(scaler, optimizer, *args, **kwargs)
        if self.last == before:
            self._safely(self._skip, optimizer)
        return out

    def _scale(self, original, scaler, outputs):
        """It multiplies the loss. The gradients are to be divided before its next update()."""
        if scaler.is_enabled():
            self.scaler, self.states = scaler, scaler._per_optimizer_states
        return original(scaler, outputs)

    def _skip(self, optimizer):
        """The loss scaler skipped a step: calibration, unless it goes on."""
        self.skips, self.skipped = self.skips + 1, self.skipped + 1
        bad = [t for t in self.losses if is_bad(extent(t))]
        self._transfer(calm=True)
        if bad:  # it is not its scale that made it so; the scaler hides it
            self._later(f"loss is {_made(extent(bad[0]))}", [], bad)
        why = ""
        if self.skips > 20:
            why = f", {self.skips} skipped steps in a row"
        elif self.scaler and self.scaler.get_scale() * self.scaler.get_backoff_factor() < 1:
            why = ", the loss scale falls under 1"
        if why or (self.locator and self.again):
            self._bad_gradients(optimizer, why)
        if not bad:
            self.reads = Counter()  # what was read of this step was the loss scale's
            if self.step == self.steps and self.symptom.startswith("the script read"):
                self.reports, self.symptom = {}, ""
        self._count(optimizer)

    # What is bad

    def _note(self, tensors, judge):
        """Their norms are read at the next transfer. judge(tensor, norm) speaks of a bad one."""
        real = [t for t in tensors if t.is_floating_point() or t.is_complex()]
        for t, norm in zip(real, _norms(real), strict=True):
            self.pending.append((norm, partial(judge, t)))

    def _transfer(self, more=(), calm=False):
        """The values of `more`. What is pending is judged; `calm`: losses wait, for the scaler."""
        written, self.written = self.written, {}
        for (p, writes), norm in zip(written.items(), _norms(written), strict=True):
            self.pending.append((norm, partial(self._bad_write, p, writes, p)))
        if not calm and self.world == 1:  # all ranks decide by the gradients
            self._note(self.losses, self._bad_loss)
            self.losses = []
        pending, self.pending = self.pending, []
        values = _host([*(value for value, _ in pending), *more])
        for (_, judge), value in zip(pending, values, strict=False):
            if not value <= LIMIT:
                judge(value)
        return values[len(pending) :]

    def _bad_loss(self, loss, value):
        self._stop(f"loss is {value:.3g}", self._explain(evidence=[loss]))

    def _bad_output(self, call, value):
        """Nothing under no_grad ends a script by itself: what is bad there is said at the end."""
        symptom = f"the output of {type(call.function).__name__} under no_grad is {value:.3g}"
        if call.number > self.tape.first:
            self._later(symptom, [call.number])
        else:  # a count of operations, or of memory: its input may be what torch.empty holds
            self._say(f"{symptom}, before any backward pass: passed over")

    def _bad_buffer(self, call, b, value):
        """The forward has spoilt it; the loss may show it in a later step, or in evaluation."""
        names = [n for n, other in call.function.named_buffers() if other is b]
        before = [extent(call.buffers[name]) for name in names]
        span = extent(b)
        if not (is_mask(span) or any(map(is_bad, before))):
            self._later(f"buffer {self._called(b)} is {_made(span)}", [call.number], [b])

    def _bad_write(self, p, writes, t, value):
        """A bad value explains it. If all are good, which of several writes it was is not known:
        the last one is named, and all lines."""
        made = _made(extent(t))
        symptom = f"what the script writes into {self._called(p)} is {made}{_bad_rows(p)}"
        for *_, values, before in writes:
            bad = [x for x in values if is_bad(extent(x))]
            if bad:
                if float(before[0]) <= LIMIT:  # what is bad in it is this very write
                    p.nan_to_num_(0.0, 0.0, 0.0)
                self._stop(symptom, self._explain([self.tape.known.get(bad[0]).number], bad))
        lines = dict.fromkeys(line for _, _, line, *_ in writes)
        name, step, *_ = writes[-1]
        plain = name.strip("_")
        filled = plain in (*OVERWRITES, "constant", "setitem")  # with a number that was bad
        report = Report(
            verdict="weights" if filled else "divergence",
            step=step,
            op=f"torch.{SAME.get(plain, plain)}",
            phase="forward",
            line=" or ".join(lines),
            made=made,
            repeated=False,
        )
        self._stop(symptom, report)

    def _bad_gradients(self, optimizer, why=""):
        params = _moved(optimizer)
        norms = _host(_norms(p.grad for p in params))
        bad = [p for p, norm in zip(params, norms, strict=True) if not norm <= LIMIT]
        if bad or self.world > 1:
            name = _few([self._called(p) for p in bad] or ["a shard of another rank"], 1)
            made = _made(extent(bad[0].grad)) if bad else "nan"
            report = self._explain(evidence=[p.grad for p in bad])
            self._stop(f"the gradient of {name} is {made}{why}", report)

    def _bad_update(self, optimizer, rates, line, t, value):
        """Good gradients, bad weights or moments: the optimizer made them. Before its first step
        (without `rates`) a checkpoint brought them."""
        held = [entry for entry in _held(optimizer) if entry[-1] is t]
        if not held:
            return
        k, p, key, _ = held[0]
        whose = f"{key} of " if key else ""
        symptom = f"{whose}{self._called(p)} is {_made(extent(t))}"
        if rates is None:
            symptom += " before the optimizer's first step"
            self._stop(symptom, Report("weights"))
        group = optimizer.param_groups[k]
        hyper = {n: group[n] for n in ("eps", "betas", "momentum") if n in group}
        has = ", ".join(f"{n}={v}" for n, v in {"lr": rates[k], **hyper}.items())
        made = f"made by {type(optimizer).__name__} ({has}) on {_type(p)}, {line}"
        why = f"the gradient norm was up to {self.gradient:.3g}"
        fix = "a lower lr"
        if "eps" in hyper and float(torch.tensor(hyper["eps"], dtype=p.dtype)) == 0:
            why = f"eps={hyper['eps']:g} is exactly 0 in {p.dtype}: it divides 0 by 0"
            fix = "eps=1e-8"
        if p.dtype in HALF:
            fix += ", and weights and moments in fp32"
        if group.get("centered"):  # E[g^2] - E[g]^2
            fix = "centered=False: rounding makes the variance negative, and its root NaN"
        if not _is_real(float(rates[k] or 0)):
            fix = "look at the schedule"
        birth = self.locator and self.locator.blame([t])
        if birth and birth.weak and not birth.source:
            fix = birth.fix or replace(birth, verdict="divergence").suggestion
            fix += f", at {birth.line}"
        report = None
        if birth or torch.optim.__name__ in type(optimizer).__module__:
            about = {"verdict": "optimizer", "names": (made, why), "fix": fix}
            report = replace(birth or Report(), **about)
        counted = self.last.get(id(optimizer)) == self.steps  # else others have stepped more often
        self._stop(f"{symptom} after good gradients", report, max(0, self.steps - counted))

    def _reads(self, t, name):
        if type(t) not in (Tensor, nn.Parameter) or not t.is_floating_point():
            return
        loss = t.requires_grad and t.numel() == 1
        if (name in ASKS and not loss) or t.numel() > 1 << 16 or not is_bad(span := extent(t)):
            return
        read = f"{_made(span)} at {_line(_frames())}"
        self.reads[read + (" (an array)" if t.numel() > 1 else "")] += 1
        made = self.tape.known.get(t)
        single = t.numel() == 1 or self.tape.first == inf  # torch.func: a loss for each network
        if made and (loss or (read.startswith("nan") and single)):
            evidence = [t.detach()] if loss and not is_mask(span) else ()
            self._later(f"the script read {read}", [made.number], evidence)

    def _called(self, p):
        roots = list(self.roots)
        named = (pair for r in roots for pair in (*r.named_parameters(), *r.named_buffers()))
        return next((n for n, other in named if other is p), f"a parameter {_type(p)}")

    # What made it

    def _later(self, symptom, targets, evidence=()):
        """Explain it now, and say it at the end. Only a loss is worth a second run."""
        self._transfer(calm=True)  # weights that were bad before are the cause
        if not self.reports and self.reads.total() < 4:
            report = self._explain(targets, evidence)
            if (report and report.op) or evidence:
                self._finding(symptom, report)

    def _stop(self, symptom, report, step=None):
        """It would reach the weights: the report, and the end."""
        self._finding(symptom, report, step)
        if self.world > 1:
            self._agree(report)
        self.tape.buffers_back(self.tape.calls)
        self.__exit__()
        raise SystemExit(3)

    def _finding(self, symptom, report, step=None):
        self.step = self.steps if step is None else step
        if report:
            names = list(report.names)
            if report.op and report.step < self.step:
                names.append(f"it was made at step {report.step}")
            for norms in self.recent.values() if report.verdict == "divergence" else ():
                if 0 < 10 * norms[0] < norms[-1]:
                    listed = ", ".join(f"{norm:.3g}" for norm in norms)
                    names.append(f"{GROWN}: {listed} (a lower lr may be the cure)")
            scale = self.scaler.get_scale() if self.scaler else report.scale
            overflow = self.unskipped and report.verdict == "precision"
            if scale != 1 and (self.forgotten or overflow):
                report = replace(report, verdict="calibration", fix=FORGOTTEN)
            about = {"symptom": symptom, "step": self.step, "rank": self.rank}
            about |= {"scale": scale, "names": tuple(names)}
            key = report.op or symptom, report.line
            told = (old.symptom.startswith(f"{report.source} is") for old in self.reports.values())
            if report.source and any(told):
                pass  # a report says what made it so
            elif key not in self.reports or self.reports[key].step == self.step:  # a step's last
                self.reports[key] = replace(report, **about)
            self.guilty = self.rank
        self.symptom = f"{symptom} at step {self.step}"
        if self.step < (self.begin or 0):
            self._say(f"this is before step {self.begin}, from which every operation is watched")

    def _explain(self, targets=(), evidence=(), raised="no error"):
        """The cause, here and now: the step is made again. Or by what was watched."""
        try:
            # An optimizer that steps within the backward would step again.
            report = None if self.depth else self.tape.again(targets)
        except Exception as error:
            report = None
            self._say(f"the step could not be made again ({_said(error)})", every=True)
        birth = self.locator and self.locator.blame(evidence)
        earlier = report and report.source.startswith(STATE) and not (birth and birth.source)
        if report and report.source != UNKNOWN and not (birth and earlier):
            unknown = ("not reproducible", "calibration", "error")
            if report.verdict not in unknown or report.tried or report.symptom == raised:
                return report
        return _seen(birth) if birth else None

    def _agree(self, report):
        """Only the guilty rank speaks. No collective: a rank that has left is waited for WAIT s."""
        received = not report or not report.op or "c10d" in report.op or report.source == CONSTANT
        store = dist.distributed_c10d._get_default_store()
        keys = [f"autopsy/{rank}" for rank in range(self.world)]
        store.set(keys[self.rank], json.dumps([received, self.rank, self._text()]))
        with suppress(Exception):
            store.wait(keys, timedelta(seconds=WAIT))
        every = [json.loads(store.get(key)) for key in keys if store.check([key])]
        _, self.guilty, text = min(every)
        guilty = f"{text}\n  guilty: rank {self.guilty} of {self.world}"
        self.reports = {"": guilty} if text else {}

    def _text(self):
        return "\n".join(map(str, self.reports.values()))

    # From start to end

    def run(self):
        """The exit code: 3 for a finding, else 0; the script's exit code and exceptions pass."""
        failure = None
        with suppress(SystemExit), self:
            try:
                run_script(self.argv)
            except BaseException as error:
                failure = error
            self._safely(self._last_look, failure)
        if isinstance(failure, Exception) and self.symptom:
            sys.excepthook(type(failure), failure, failure.__traceback__)
        elif failure and not self.symptom:
            raise failure
        text = self._text()
        if self.symptom and not text:
            unseen = f"{self.symptom} -> not reproducible"
            text = unseen if self.again else self._second_run()
        if not text:
            self._clean()
            bad = [read for read in self.reads if read.startswith("nan") and "array" not in read]
            return 3 if bad else 0
        if self.rank == self.guilty or self.again:
            with open(self.path, "w") as file:
                file.write(text + "\n")
            if not self.again:
                self._say(text, every=True)
        time.sleep(3 * (self.rank != self.guilty))  # torchrun ends all ranks as soon as one has
        return 3

    def _last_look(self, failure):
        """At the end of the script: what is still pending, and all that it leaves."""
        self._transfer()
        for root in list(self.roots) if not getattr(failure, "code", failure) else ():
            self._note([*root.parameters(), *_statistics(root).values()], self._bad_end)
        self._transfer()
        if not isinstance(failure, Exception):
            return
        raised = _said(failure)
        if self.optimizer:
            rate = self.optimizer.param_groups[0].get("lr")
            report = Report(
                "error",
                op=type(failure).__name__,
                phase="optimizer",
                line=_line(_frames_in(traceback.format_tb(failure.__traceback__))),
                names=(f"raised by {type(self.optimizer).__name__}.step() (lr={rate})",),
            )
        else:  # whatever the step has made is judged
            report = self._explain([call.number for call in self.tape.calls], raised=raised)
        if report and report.verdict == "error":
            about = {"symptom": raised, "step": self.steps, "rank": self.rank}
            self._say(str(replace(report, **about)), every=True)
        elif report:
            self._finding(raised, report)

    def _bad_end(self, t, value):
        self._stop(f"{self._called(t)} is bad at the end", self._explain(evidence=[t]))

    def _clean(self):
        for text in self.unwatched:
            self._say(text)
        for text, n in self.reads.items():
            self._say(f"the script read {text}" + (f", {n} times" if n > 1 else ""))
        rates = _few([f"{rate:g}" for rate in sorted(self.rates)], 4)
        for dtype, norms in self.norms.items():
            read = [set(x) for x in norms.values() if len(x) > 2]
            still = sum(len(x) == 1 for x in read)
            # In fp32 one may stand still: the gradient of a bias before BatchNorm is mere rounding.
            strange = dtype in HALF or still == len(read) or 0 in self.rates
            if still and strange:
                self._say(
                    f"{still} {str(dtype).removeprefix('torch.')} tensors had gradients at every "
                    f"step read and never changed (lr {rates})"
                )
        if min(self.rates, default=1.0) < 0:
            self._say(f"a learning rate is negative: {min(self.rates):g}")
        if self.tape.first == inf and not self.last:
            self._say("I saw no training (no backward pass in this thread and process)")
            return
        skipped = f", {self.skipped} of them skipped by the loss scaler" if self.skipped else ""
        norm = f", largest gradient norm {self.gradient:.3g}" if self.last else ""
        nothing = "no gradient or weight non-finite" if self.reads else "nothing non-finite"
        self._say(f"{self.steps} steps{skipped}, {nothing}{norm}")

    def _second_run(self):
        at = max(0, self.step - 1)
        if self.one_run:
            return (
                f"{self.symptom} -> not reproducible\n"
                "  the step was made again, and it was finite\n"
                f"  try: --from-step {at}, or without --one-run"
            )
        self._say(
            f"{self.symptom}. The step cannot be made again. Last resort: the script runs again, "
            "quietly, in eager mode, for about as long as it has run (--one-run refuses this). "
            "Then every operation of that step is watched."
        )
        main = vars(sys.modules["__main__"])
        if torch.cuda.is_initialized() and main is not globals():  # as it is with -m
            main.clear()  # the second run needs the memory
            gc.collect()
            torch.cuda.empty_cache()
        environment = self.environment
        if "MASTER_PORT" in environment:  # a meeting place of its own
            port = str(1024 + (int(environment["MASTER_PORT"]) + 7919) % 60000)
            environment |= {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "False"}
        with tempfile.TemporaryDirectory() as folder:
            torch.save((at, self.rng), os.path.join(folder, "start"))
            environment[RERUN] = folder
            done = subprocess.run(
                [sys.executable, *sys.orig_argv[1:]],
                env=environment,
                cwd=self.home,
                text=True,
                stdin=subprocess.DEVNULL,
                capture_output=True,
            )
            path = os.path.join(folder, "report")
            if os.path.exists(path):
                with open(path) as file:
                    return file.read().rstrip() + "\n  (seen in a second run)"
        last = (done.stderr.strip().splitlines() or ["no error output"])[-1]
        return (
            f"{self.symptom} -> not reproducible\n"
            f"  the second run met no bad step; its exit code was {done.returncode} ({last})\n"
            f"  try: seeds and a fixed order, or --from-step {at}"
        )


def _seen(birth):
    """The verdict on what was seen while every operation was watched."""
    half = "float16" in birth.result and not birth.again
    finite = not birth.source and (half or birth.again == "finite in float32")
    verdict = birth.origin or ("precision" if finite else "divergence")
    precision = birth.result.partition("[")[0]
    return replace(birth, verdict=verdict, precision=precision, repeated=False)


def _together(modules):
    """One module that holds these. A single one is itself."""
    inner = {m for root in modules for m in root.modules() if m is not root}
    outer = [root for root in dict.fromkeys(modules) if root not in inner]
    if len(outer) == 1:
        return outer[0]
    net = nn.Module()
    for module in outer:
        name = type(module).__name__
        net.add_module(name + (f"_{len(net._modules)}" if name in net._modules else ""), module)
    return net


def _play(calls, made, net, params, targets, scale, fp32):
    """For examine(): these calls once more; what is judged, and the gradients."""
    with InDtype(torch.float32, NARROW, net) if fp32 else nullcontext():
        for call in calls:
            call.again(made)
    judged = [t for m, t in made.items() if m.number in targets]
    if len(judged) > 1:  # whatever was made: there may be masks
        judged = [t for t in judged if not is_mask(extent(t))]
    backward = calls[-1].function is BACKWARD
    roots = [made[m] for m in calls[-1].uses() if m in made] if backward else []
    bad = [t for t in (*judged, *roots) if is_bad(extent(t))]
    loss = (bad or roots or judged or [torch.zeros(())])[0].detach()
    return loss / scale, {name: p.grad for name, p in params.items()}


def _loss_scale(calls):
    """The power of two by which the script multiplies its loss before the backward, or 1."""
    roots = {m.number for call in calls if call.function is BACKWARD for m in call.uses()}
    losses = [call for call in calls if call.number in roots]
    products = [call for call in losses if "mul" in getattr(call.function, "__name__", "")]
    factors = [x for call in products for x in call.args if type(x) in (int, float)]
    return max([1.0, *(x for x in factors if x >= 8 and frexp(x)[0] == 0.5)])


def _moved(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _held(optimizer):
    """(group, parameter, "", parameter) of every parameter, and (group, parameter, key, moment)."""
    for k, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            yield k, p, "", p
            for key, t in optimizer.state.get(p, {}).items():
                if isinstance(t, Tensor) and t.dim():
                    yield k, p, key, t


def _norms(tensors):
    """The 2-norms, 0-dim, with fp32 accumulators: one read, no sync."""
    flat = [_values(t.detach()) for t in tensors]
    flat = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in flat]
    wide = torch.float32 if any(t.itemsize < 4 for t in flat) else None  # None is faster
    return list(torch._foreach_norm(flat, 2, dtype=wide)) if flat else []


def _host(values):
    """0-dim tensors as Python floats, in one transfer."""
    device = next((v.device for v in values if v.device.type != "cpu"), torch.device("cpu"))
    flat = [v if v.device == device and not v.dim() else v.reshape(()).to(device) for v in values]
    return torch.stack(flat).tolist() if flat else []


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


def without_our_frames(original, kind, error, tb):
    """For sys.excepthook: the traceback that the script has without the watch."""
    frames = []
    while tb:
        if tb.tb_frame.f_code.co_filename not in (__file__, runpy.__file__, "<frozen runpy>"):
            frames.append(tb)
        tb = tb.tb_next
    for frame in reversed(frames):
        frame.tb_next, tb = tb, frame
    original(kind, error.with_traceback(tb), tb)


def main() -> int:
    parser = argparse.ArgumentParser(usage=USAGE)
    parser.add_argument("--report", default="autopsy.txt")
    parser.add_argument("--from-step", type=int)
    parser.add_argument("--one-run", action="store_true")
    parser.add_argument("-m", nargs=argparse.REMAINDER, default=[])
    parser.add_argument("script", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    argv = ["-m", *args.m] if args.m else args.script
    if not argv:
        parser.error("name a script")
    if not (args.m or os.path.isfile(argv[0])):
        sys.exit(f"autopsy: {argv[0]} is no file")
    begin, path = args.from_step, args.report
    folder = os.environ.pop(RERUN, "")
    if folder:
        path = os.path.join(folder, "report")
        begin, states = torch.load(os.path.join(folder, "start"), weights_only=False)
        set_rng_states(states, "cpu")
    sys.excepthook = partial(without_our_frames, sys.excepthook)
    return Watch(argv, path, begin, bool(folder), args.one_run).run()


if __name__ == "__main__":
    sys.exit(main())
