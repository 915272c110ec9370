"""
Report: what autopsy prints.

It holds the data of a report and turns it into lines: first the line of the script, then what to
do, then the details. A screen shows at most 12 rows; Report.full has all of them. The advice comes
from advice.py.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

import torch
import torch.distributed as dist

from .advice import ANOTHER, WEAK, Advice, Verdict, advice_on
from .facts import STATE, Cure, Kind, Outcome, Repeat, Source, Trial
from .frames import NOWHERE, Line
from .tensors import HALF, few

COLUMNS, ROWS = 80, 12  # of a screen
PREFIX = len("autopsy: ")  # what the command writes before a report
FIRST = ("  try: ", "  guilty: ", "  (seen ")  # before any detail
SUMS = "attention|mm|mv|dot|linear|conv|sum|mean"  # operations that add up products or numbers
ORDINARY = ("", "fp32", "float32")  # precisions that need no mention


@dataclass(frozen=True)
class Report:
    """What was wrong, and which operation made the first bad number. str() fits a screen; `full`
    has everything.

    Locator.origin_of() returns one without a verdict: the operation alone.
    """

    verdict: Verdict = Verdict.NONE
    step: int = 0
    rank: int = 0
    precision: str = ""
    scale: float = 1.0
    advice: str = "code"  # or "flags": those of this repository's train.py
    symptom: str = ""  # "loss is nan", "gradient of head.weight is inf", "IndexError: ...", ...
    error: type[Exception] | None = None  # that the step raised
    op: str = ""  # "aten.log.default"; "" = no operation made it
    called: str = ""  # the function of torch that the script called: "cross_entropy"
    module: str = ""  # the innermost module whose forward it belongs to; "" = the model's own
    nth_call: int = 0  # of the module in this step; 0 = not known, or outside of any module
    phase: str = "forward"  # or "backward", "optimizer"
    node: str = ""  # backward: autograd's name for the function
    line: Line = NOWHERE
    result_value: str = ""  # what the result holds; "" = the operation raised
    dtype: torch.dtype | None = None  # of the result
    inputs: tuple[str, ...] = ()
    bad_inputs: tuple[Source, ...] = ()  # where these were bad before
    spans: tuple[tuple[float, float], ...] = ()  # (lowest, highest) of each input that is a tensor
    source: Source | None = None  # what was bad before the operation used it
    in_wider_types: tuple[Repeat, ...] = ()  # the operation in float32; if that is bad, in float64
    zero: str = ""  # what has made the 0 that it divides by
    consumed_by: str = ""  # the sum or product which the -inf that was made here went into
    micro_batch: int = 0
    micro_batches: int = 1  # how many the step has
    samples: tuple[int, ...] = ()  # positions in the micro-batch
    batch_size: int = 0  # by what they were counted
    indices: tuple[int, ...] = ()  # of the samples in the data set, if the record knew them
    names: tuple[str, ...] = ()  # bad tensors (weights), what is wrong with the batch (data)
    repeated: bool = True  # the step was run again, in fp32 too
    grew: bool = False  # the gradient norm, in the steps before
    tried: tuple[Trial, ...] = ()
    cure: Cure | None = None
    fix: Advice | None = None  # what to do, where it is known without looking at the operation

    @property
    def verdict_of_source(self) -> Verdict:
        """The verdict, if the source alone decides it."""
        if not self.source or self.source.kind is Kind.UNINITIALISED:
            return Verdict.NONE
        return Verdict.WEIGHTS if self.source.kind in STATE else Verdict.DATA

    @property
    def no_cure_helped(self) -> bool:
        """Whether cures were tried and none helped."""
        return any(t.outcome is Outcome.STILL_BAD for t in self.tried) and not self.cure

    @property
    def in_half(self) -> bool:
        """Whether the result is in half precision."""
        return self.dtype in HALF

    @property
    def finite_in(self) -> torch.dtype | None:
        """The first wider type in which the operation is finite."""
        return next((again.dtype for again in self.in_wider_types if not again.span.is_bad), None)

    @property
    def largest(self) -> float:
        """The largest finite magnitude among the inputs."""
        return max((abs(v) for span in self.spans for v in span if isfinite(v)), default=0.0)

    @property
    def inputs_are_huge(self) -> bool:
        """Finite inputs so large that their result overflows; of sums it is inf - inf, too."""
        large = self.largest > (1e3 if self.no_cure_helped else 1e6)
        overflows = self.result_value != "nan" or (self.largest > 1e6 and re.search(SUMS, self.op))
        return bool(overflows) and large and not self.source

    @property
    def fragile_op(self) -> str:
        """The key of WEAK for a node "LogBackward0" or an operation "aten.log_", or ""."""
        plain = {key.replace("_", ""): key for key in WEAK}
        for name in (self.node, *self.op.split(".")[1:2]):
            other = r"backward(_data)?\d*$|_backward|_forward|_like|_|native|linalg|^new"
            name = re.sub(other, "", name.lower())
            harmless = name in ("mul", "mean") and self.result_value != "nan"
            if ".parametrizations." in f".{self.module}" and name in ("div", "reciprocal"):
                return "weight_norm_interface"
            if name in plain and not harmless and not (name == "pow" and self.inputs_are_huge):
                return plain[name]
        return ""

    @property
    def suggestion(self) -> str:
        return advice_on(self).text

    @property
    def script_line(self) -> str:
        """The script's line: where the number was made, if that is known; else where it is used."""
        made_at = self.source.line if self.source else NOWHERE
        return (made_at or self.line).script

    def operation(self) -> Iterator[str]:
        """Lines about the operation. A line for the file alone begins with a space."""
        if self.op:
            node = f" of {self.node}" if self.node else ""
            line = f", {self.line}" if self.line != self.script_line else ""
            module = self.module or ("the model itself" if self.nth_call else "")
            nth = f", call {self.nth_call} of this step" if self.nth_call > 1 else ""
            place = f"in {module}{nth}" if module else "outside of any module"
            kind = self.source and self.source.kind
            named = kind not in (None, Kind.WRITTEN)
            first = f"first to use {self.source}" if named else "first bad op"
            verbs = {None: "made", Kind.CONSTANT: "made", Kind.WRITTEN: "writes"}
            verb = verbs.get(kind, "is given")
            made = f"{verb} {self.result_value}" if self.result_value else "raised"
            inner = re.match(r"aten\._|.*_(forward|ex|backward)\b", self.op)
            of = f" of {self.called}" if inner and self.called else ""
            yield f"{first}: {self.op}{of} {place} ({self.phase}{node}{line}) {made}"
        if self.zero:
            yield f"its 0 was made by {self.zero}"
        if self.consumed_by:
            yield f"its -inf entered {self.consumed_by}, where it is no mask"

    def details(self) -> Iterator[str]:
        """The inputs of the operation, and its result on them in wider types."""
        if self.inputs:
            yield "its inputs: " + few(self.inputs, 4, "; ")
        if self.in_wider_types:
            precision = self.verdict is Verdict.PRECISION
            rounded = precision and not self.finite_in
            why = " (an operand had been rounded before, to half precision)" if rounded else ""
            if precision:  # the verdict has said it already
                known = self.finite_in is torch.float32
            else:
                ends = {again.span.bad_end for again in self.in_wider_types}
                known = len(self.in_wider_types) == 2 and len(ends) == 1
            deeper = "  " if known and not why else ""
            results = ", ".join(map(str, self.in_wider_types))
            yield f"{deeper}repeated on the same inputs: {results}{why}"

    def where(self) -> Iterator[str]:
        """The samples, and the micro-batch if the step has several."""
        several = self.micro_batches > 1 or self.micro_batch
        place = f" in micro-batch {self.micro_batch} of {self.micro_batches}" if several else ""
        known = f"in the data set: {few(self.indices)}" if self.indices else "from 0"
        if self.samples:
            yield f"samples {few(self.samples)} of {self.batch_size}{place} ({known})"
        elif several:
            yield f"{place.strip()} (from 0)"

    def lines(self) -> Iterator[str]:
        """The most useful line first; a line for the file alone begins with a space."""
        place = f"{self.script_line}: " if self.script_line else ""
        if not self.verdict:
            for line in (*self.operation(), *self.details()):
                yield place + line
                place = ""
            return
        about = {
            self.precision: self.precision not in ORDINARY,
            f"scale {self.scale:g}": self.scale != 1,
            f"rank {self.rank}": self.rank or on_ranks(),
        }
        shown = ", ".join(text for text, needed in about.items() if needed)
        symptom = self.symptom or "the step was bad"
        about_step = f" ({shown})" if shown else ""
        yield f"{place}{symptom} at step {self.step}{about_step} -> {self.verdict}"
        yield f"try: {self.suggestion}"
        yield from self.operation()
        if self.names:
            where = {Verdict.WEIGHTS: "already bad: ", Verdict.DATA: "in the batch: "}
            yield where.get(self.verdict, "") + few(self.names, 5)
        yield from self.where()
        yield from self.details()
        for trial in self.tried:
            deeper = "" if trial.was_made else "  "
            yield f"{deeper}tried: {in_words(trial)}"
        in_fp32 = {Verdict.PRECISION: "finite", Verdict.DIVERGENCE: "bad as well"}
        if self.repeated and self.verdict in in_fp32:
            yield "  the same batch in fp32: " + in_fp32[self.verdict]
        yield f"  {', '.join(filter(None, about))}, micro-batch {self.micro_batch}"

    @property
    def full(self) -> str:
        """Everything that is known, for the file."""
        return "\n  ".join(self.lines())

    def __str__(self) -> str:
        return on_screen(self.full)


def in_words(trial: Trial) -> str:
    """ "block in fp32: finite" """
    what = f"{trial.what} at {trial.where}" if trial.where else trial.what
    shown = trial.symptom if trial.outcome is Outcome.BAD else trial.outcome.value
    if trial.symptom and trial.outcome is not Outcome.BAD:
        shown += f" ({trial.symptom})"
    if trial.same_step is not None:
        same = "as in float64" if trial.same_step else f"but {ANOTHER}"
        shown += f", {same} ({trial.compared})"
    return f"{what}: {shown}"


def with_rank(text: str, rank: int, world: int) -> str:
    """The text of a report, with the rank that it is about."""
    headline, _, rest = text.partition("\n")
    return f"{headline}\n  guilty: rank {rank} of {world}\n{rest}"


def on_screen(text: str, rows: int = ROWS) -> str:
    """Shorten the full text of reports to a screen: keep each headline and what to do, then as much
    details as fit. It cuts no line."""
    lines, headline, order = text.splitlines(), 0, []
    for k, line in enumerate(lines):
        headline = headline if line.startswith(" ") else k
        first = k == headline or line.startswith(FIRST)
        if not line.startswith("    "):
            order.append((not first, k, headline))
    shown = set()
    for _, k, headline in sorted(order):
        needed = -(-(len(lines[k]) + (PREFIX if k == 0 else 0)) // COLUMNS)
        of_first = len(shown) < 2  # the headline, and what to do
        if of_first or (needed <= rows and (k == headline or headline in shown)):
            shown.add(k)
            rows -= needed
    return "\n".join(lines[k] for k in sorted(shown))


def on_ranks():
    """Whether several ranks train together."""
    return dist.is_available() and dist.is_initialized()


def agree(report: Report) -> Report:
    """Return the same report on every rank: the gravest one, from the lowest rank that has it.

    A collective: every rank must call it."""
    if not on_ranks():
        return report
    every, gravest_first = [None] * dist.get_world_size(), list(Verdict)
    dist.all_gather_object(every, report)
    return min(every, key=lambda other: (gravest_first.index(other.verdict), other.rank))
