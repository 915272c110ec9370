"""
Report: what is said.

The data of a report and its lines. It runs nothing and reads no tensor. The words of its advice are
those of advice.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist

from .advice import VERDICTS, WEAK, suggestion
from .sources import CONSTANT, OPAQUE, STATE, WRITTEN
from .tensors import few, is_real


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
    called: str = ""  # the function of torch that the script called: "cross_entropy"
    module: str = ""  # the innermost module whose forward it belongs to; "" = the model's own
    nth_call: int = 0  # of the module in this step; 0 = not known, or outside of any module
    phase: str = "forward"  # or "backward", "optimizer"
    node: str = ""  # backward: autograd's name for the function
    line: str = ""  # file:line in function
    made: str = ""  # what the result holds; "" = the operation raised
    result: str = ""  # dtype and shape of the result
    inputs: tuple[str, ...] = ()
    spans: tuple[tuple[float, float], ...] = ()  # (lowest, highest) of each input that is a tensor
    source: str = ""  # "parameter head.weight", "input", ...: bad before the operation used it
    widened: str = ""  # repeated in wider types: "finite in float32", "nan in float32, ..."
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
        return max((abs(v) for span in self.spans for v in span if is_real(v)), default=0.0)

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
    def suggestion(self) -> str:
        return suggestion(self)

    def operation(self) -> Iterator[str]:
        """The lines that speak of the operation."""
        if self.op:
            node = f" of {self.node}" if self.node else ""
            line = f", {self.line}" if self.line else ""
            module = self.module or ("the model itself" if self.nth_call else "")
            nth = f", call {self.nth_call} of this step" if self.nth_call > 1 else ""
            place = f"in {module}{nth}" if module else "outside of any module"
            named = self.source not in ("", WRITTEN)
            first = f"first to use {self.source}" if named else "first bad op"
            verb = {"": "made", CONSTANT: "made", WRITTEN: "writes"}.get(self.source, "is given")
            made = f"{verb} {self.made}" if self.made else "raised"
            inner = re.match(r"aten\._|.*_(forward|ex|backward)\b", self.op)
            of = f" of {self.called}" if inner and self.called else ""
            yield f"{first}: {self.op}{of} {place} ({self.phase}{node}{line}) {made}"
        if self.entered:
            yield f"its -inf entered {self.entered}, where it is no mask"
        if self.inputs:
            yield "its inputs: " + few(self.inputs, 4, "; ")
        if self.widened:
            rounded = self.verdict == "precision" and "finite" not in self.widened
            why = " (an operand had been rounded before, to half precision)" if rounded else ""
            yield f"repeated on the same inputs: {self.widened}{why}"

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
            yield where + few(self.names, 5)
        if self.samples:
            known = f": positions in the batch of {self.batch_size}"
            if self.indices:
                known = f" (in the data set: {few(self.indices)})"
            place = f"of micro-batch {self.micro_batch}, rank {self.rank}"
            yield f"samples {few(self.samples)} {place}{known}"
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
