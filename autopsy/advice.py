"""
Advice: what to write instead.

It has a sentence for each verdict, each weak operation and each kind of exception, and for an
operation also a change of its arguments to try. advice_on() picks what fits a report. It reads the
report alone: no tensor, no step.
"""

import linecache
import re
import traceback
from collections.abc import Callable
from enum import Enum
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from .facts import MADE_ELSEWHERE, Kind


class Verdict(str, Enum):
    """What was wrong; the gravest first: it counts when ranks differ."""

    DATA = "data"
    WEIGHTS = "weights"
    ERROR = "error"
    OPTIMIZER = "optimizer"
    DIVERGENCE = "divergence"
    PRECISION = "precision"
    COMPILER = "compiler"
    CALIBRATION = "calibration"
    NOT_REPRODUCIBLE = "not reproducible"
    NONE = ""  # not decided

    __str__ = str.__str__


class Topic(Enum):
    """What an advice is about, where somebody asks."""

    OTHER = 0
    RATE = 1  # a lower learning rate
    GROWTH = 2  # the same, because the numbers have grown
    BAD_SCALAR = 3  # a number that was bad before torch saw it


class Advice(NamedTuple):
    """What to do."""

    text: str
    topic: Topic = Topic.OTHER


class Weak(NamedTuple):
    """An operation that is easily given too much: what to write, and how to change the arguments of
    the call."""

    why: str
    code: str = ""  # what to write instead; or what to do
    change: Callable | None = None

    @property
    def text(self):
        return f"{self.why}: {self.code}" if self.code else self.why

    @property
    def is_call(self):
        return "(" in self.code


EPS = 1e-6
EPS_IN_HALF = 1e-4  # float16 rounds anything below 6e-8 to 0, and 1 / 1e-6 is inf there
GREW = "the numbers have grown"
RISES = "make it positive (look at the schedule, and at the sign of the loss)"
# What to do, in train.py's flags and as code.
VERDICTS = {
    Verdict.DATA: (
        "look at these samples; leave them out, or, where NaN or a fill value stands for what is "
        "missing, fill it in before the arithmetic (NaN * 0 is NaN)",
    )
    * 2,
    Verdict.WEIGHTS: (
        "--resume last_good.pt, and look at what the steps before this one did",
        "reset it, and all that is named as bad, or load a checkpoint in which they are finite; "
        "look at what wrote it: an earlier step, the code that fills it (or never does: "
        "torch.empty), or the checkpoint that was loaded",
    ),
    Verdict.ERROR: ("mend the code at this line",) * 2,
    Verdict.OPTIMIZER: ("a lower lr, and weights and moments in fp32",) * 2,
    Verdict.DIVERGENCE: (
        "--resume last_good.pt with a lower --lr, a longer --warmup-updates, --clip-grad 1.0",
        f"{GREW}: an earlier checkpoint, a lower learning rate, longer warm-up, clipping",
    ),
    Verdict.PRECISION: (
        "x.float() before that line, or --precision bf16",
        "that line in fp32: torch.autocast(x.device.type, enabled=False) around it, "
        "x.float() before it",
    ),
    Verdict.COMPILER: (
        "train without --compile",
        "run the step under torch.compiler.set_stance('force_eager')",
    ),
    Verdict.CALIBRATION: (
        "nothing: the loss scale falls by itself",
        "skip the step and halve the loss scale, as torch.amp.GradScaler does",
    ),
    Verdict.NOT_REPRODUCIBLE: (
        "the same step once more with --deterministic; if it recurs, suspect this machine's "
        "hardware",
        "look for what another run of the step does not repeat: a random generator of its own, a "
        "counter, a file; else torch.use_deterministic_algorithms(True), and if it recurs, suspect "
        "this machine's hardware",
    ),
}


def eps_for(x):
    return EPS_IN_HALF if x.dtype is torch.float16 else EPS


def _clamp(**bounds):
    """Bound the first argument of a call."""
    return lambda x, *args, **kwargs: ((x.clamp(**bounds), *args), kwargs)


CLAMP = _clamp(min=EPS)
INSIDE = _clamp(min=-1 + EPS, max=1 - EPS)
UNMASK = Weak(
    "over a wholly masked row (let each row see one place, its own, say)",
    "write -1e4 into the mask instead of -inf",
    _clamp(min=-1e4),
)
NO_LABEL = Weak(
    "a mean over no label at all", "divide the sum of the losses by max(1, number of labels)"
)
NOTHING = Weak("a mean over nothing", "test numel() before it, or divide the sum by max(1, count)")
EQUAL = Weak(
    "equal eigenvalues or singular values",
    "the slope holds 1 / (their difference), which is 1 / 0; add a small distinct diagonal",
)
ONE = Weak(
    "the spread of one number is 0 / 0",
    "no batch of one, or correction=0",
    lambda *a, **k: (a, k | {"correction": 0}),
)


class Raised(NamedTuple):
    """An exception of torch, of which only its words tell what it is."""

    words: str
    fix: str = ""
    verdict: Verdict = Verdict.ERROR


RAISED = (
    Raised(
        r"index -?\d+ is (not in|out)|index out of range in",
        "mend these numbers, or make the table or layer larger",
        Verdict.DATA,
    ),
    Raised(
        r"label \S*\.\S* is not in",  # of a class it is a whole number
        "binary_cross_entropy takes targets in 0..1: mend these, where they are made (what "
        "torch.Tensor(n, 1) holds before something is written into it may be any number)",
        Verdict.DATA,
    ),
    Raised(
        r"label \S+ is not in|Target -?\d+ is out|Class values",
        "mend these labels, or leave them out: ignore_index= where one means 'no label'; or the "
        "last layer has too few classes",
        Verdict.DATA,
    ),
    Raised("without overflow", verdict=Verdict.PRECISION),
    Raised(
        "backward through the graph a second time",
        "something of an earlier step is used again (a hidden state, a loss that adds up, what was "
        "computed before the loop): x = x.detach() between the steps, or compute it in each; "
        "retain_graph=True only where one step has several backward passes",
    ),
    Raised(
        "modified by an inplace operation",
        "what the backward needs was written over after it was used: x = x + y instead of x += y, "
        "or clone() before; backward() before step()",
    ),
    Raised(
        "does not require grad and does not have a grad_fn",
        "the loss does not depend on a weight that learns: detach(), .data, item(), no_grad, a new "
        "tensor of numbers, or requires_grad is False",
    ),
    Raised("more than 1 value per channel", "a batch of one has no spread: drop_last=True"),
    Raised(
        "not positive-definite",
        "print torch.linalg.eigvalsh(x).min(): if it is further below 0 than 1e-5 of the largest, "
        "a sign is wrong in how the matrix is made (a variance or a noise that is learnt has gone "
        "below 0: softplus or exp of it); if it is nearer, it is rounding: add a diagonal, 1e-6 to "
        "1e-4 of its mean (x + c * torch.eye(n)), or take float64",
    ),
    Raised(
        "should be between 0 and 1",
        "probabilities are wanted: look at what leaves 0..1 (a resize, a sum, no sigmoid), "
        "clamp(0, 1) it, or take the loss that takes logits",
    ),
    Raised(
        "satisfy the constraint",
        "this parameter of a distribution is out of its range: a scale needs softplus or a lower "
        "bound, probabilities a softmax",
    ),
    Raised(
        "singular",
        "this matrix has no inverse: look at how it is made (equal rows, too few samples); else "
        "add a small diagonal, or take torch.linalg.lstsq",
    ),
)
ANGLE = Weak("an angle at 0 has no slope", "x + eps, or torch.where before it")
GROWN = "the gradient norm has grown"
TINY = (
    "this number is not 0 but as small as {}: find out why (a product of many factors, a "
    "determinant, an exp of a large negative number): take logarithms (logsumexp, logdet), shorter "
    "pieces or float64; an eps or a clamp of 1e-6 would replace it, and its gradient"
)
TOO_LOW = Advice("torch.finfo(x.dtype).min for this number of a mask, which does not fit into half")
NOT_FINITE = Advice(
    "this number was bad before torch saw it: mend it where it is made (a ratio, a schedule, "
    "a count of 0)",
    Topic.BAD_SCALAR,
)
WHERE = (
    "what is masked after it still has a gradient of 0 * inf: torch.where(ok, x, 1) before the "
    "operation, and the mask after it, too (a clamp is finite, but it changes the step)"
)
ANOTHER = "another step"  # a cure is finite, and computes something else
SUBTRACT = (
    "exp beyond 88 is inf: subtract the maximum before it, as softmax and logsumexp do: {} (it was "
    "compared with the step in float64)"
)
UNDERFLOWN_SUM = (
    "log of a sum of exp(x) that is 0, because exp below -104 is 0: torch.logsumexp(x, dim), which "
    "subtracts the maximum first"
)
UNDERFLOW = (
    "the divisor is 0 in places and as small as {:.3g} elsewhere, where an eps of 1e-6 would "
    "replace it: if a product of many factors or an exp has underflowed, take logarithms, shorter "
    "pieces or float64; if 0 is right there, torch.where, or an eps well below that"
)
BY_ZERO = Advice(
    "it divides by the number 0: find out why it is 0 (a count, a correction, a schedule)"
)
ALL_BAD = (
    "every sample is bad: look at how they are made (a column without spread, a mean over a gap, a "
    "wrong file), not at single ones"
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
ENTERED = (
    "-inf is a mask up to a softmax or a maximum only: where nothing is left "
    "(a row without entries), write 0 before the sum or product; label_smoothing gives "
    "masked classes a share, too: none there"
)
NEGATIVE = (
    "{} of a negative number ({:.3g}): find out why it is "
    "negative (a sign, a formula, a difference that was rounded): a clamp hides "
    "it; where it may be negative by right, the clamp is the cure"
)
ALL_ZERO = (
    "{} of 0, and its argument is 0 in each place: find out why (a constant, a variance, a product "
    "that underflows): a clamp hides it; where it may be 0 by right, the clamp is the cure"
)
ROUNDED = "sqrt of {:.3g}: if it is 0 that was rounded, {}; if not, find out why it is negative"
ONLY_LATER = Advice(
    "a causal mask that is the wrong way round: each place sees only those after it, the last one "
    "none (is masked what should be seen, or == 0 for != 0?); to fill the last row hides it"
)
LOG_TARGET = Advice(
    "the target of kl_div is negative, and its logarithm NaN: it takes probabilities as target, "
    "or log_target=True with log-probabilities"
)
NOT_SEEN = "no operation was seen that made it: it was made in another thread or library"
TOO_LARGE = (
    "the result is too large for float32, not for float64: "
    "clamp or mask the inputs before it, or compute with its logarithm"
)
NO_VALUE = (
    "this operation has no finite value at these inputs: "
    "clamp or mask them before it, or write it otherwise"
)
UNWRITTEN = (
    "memory that no operation of torch wrote: torch.zeros instead of torch.empty; "
    "or an opaque kernel (Triton, C++) wrote this: look into it"
)
WEAK: dict[str, Weak] = {
    "sqrt": Weak("sqrt has no finite slope at 0", "sqrt(x.clamp(min=1e-6))", CLAMP),
    "rsqrt": Weak("rsqrt of 0 or less", "rsqrt(x.clamp(min=1e-6))", CLAMP),
    "log": Weak(
        "log of 0 or less (take logsigmoid or log_softmax after a sigmoid or softmax, logsumexp "
        "after exp and sum)",
        "log(x.clamp(min=1e-6))",
        CLAMP,
    ),
    "log2": Weak("log2 of 0 or less", "log2(x.clamp(min=1e-6))", CLAMP),
    "log10": Weak("log10 of 0 or less", "log10(x.clamp(min=1e-6))", CLAMP),
    "log1p": Weak("log1p of -1 or less", "log1p(x.clamp(min=-1 + 1e-6))", _clamp(min=-1 + EPS)),
    "pow": Weak("a power of 0 or of a negative base", "x.clamp(min=1e-6) ** p", CLAMP),
    "div": Weak(
        "division by zero",
        "x / (y + eps), eps = 1e-6",
        lambda x, y, *a, **k: ((x, y + (eps_for(y) if isinstance(y, Tensor) else EPS), *a), k),
    ),
    "addcdiv": Weak(
        "division by zero in addcdiv",
        "eps in its denominator, eps = 1e-8",
        lambda x, y, z, *a, **k: ((x, y, z + EPS, *a), k),
    ),
    "reciprocal": Weak(
        "division by zero",
        "1 / (x + eps), eps = 1e-6",
        lambda x, *a, **k: ((x + eps_for(x), *a), k),
    ),
    "exp": Weak(
        "exp beyond 88 is inf, and beyond 44 its square: in a softmax or a sum subtract the "
        "maximum first (logsumexp does); find out why it is given so much (inputs that are not "
        "normalised, a high rate), or bound it",
        "exp(x.clamp(max=40))",
        lambda x, *a, **k: ((x.clamp(max=10 if x.dtype is torch.float16 else 40), *a), k),
    ),
    "acosh": Weak("no finite slope at 1", "acosh(x.clamp(min=1 + 1e-6))", _clamp(min=1 + EPS)),
    "acos": Weak("no finite slope at -1 and 1", "acos(x.clamp(-1 + 1e-6, 1 - 1e-6))", INSIDE),
    "asin": Weak("no finite slope at -1 and 1", "asin(x.clamp(-1 + 1e-6, 1 - 1e-6))", INSIDE),
    "atanh": Weak("inf at -1 and 1", "atanh(x.clamp(-1 + 1e-6, 1 - 1e-6))", INSIDE),
    "softmax": UNMASK,
    "log_softmax": UNMASK,
    "logsumexp": UNMASK,
    "logaddexp": UNMASK,
    "layer_norm": Weak(
        "a row of equal numbers, and an eps too small for it",
        "eps=1e-5",
        lambda x, s, w=None, b=None, eps=0, **k: ((x, s, w, b, 1e-5), k),
    ),
    "ctc_loss": Weak(
        "a target that needs more frames than its input has",
        "one for each letter, and one more for each that equals the one before; look at these "
        "lengths, or zero_infinity=True",
        lambda *a, **k: (a[:6], k | {"zero_infinity": True}),
    ),
    "std": ONE,
    "var": ONE,
    "mean": NOTHING,
    "nll_loss": NO_LABEL,
    "nll_loss2d": NO_LABEL,
    "batch_norm": Weak(
        "running_var must be 0 or more",
        "a momentum outside of 0..1 brings it below; then set the running statistics back",
    ),
    "mul": Weak(
        "0 * inf is NaN",
        "choose with torch.where before the inf is made, do not multiply by a mask",
    ),
    "eigh": EQUAL,
    "svd": EQUAL,
    "eig": EQUAL,
    "angle": ANGLE,
    "atan2": ANGLE,
    "weight_norm_interface": Weak(
        "a weight of norm 0 has no direction (v / |v|)",
        "keep it away from 0 where it is initialised, pruned or decayed",
    ),
    "empty": Weak(UNWRITTEN),
    "to_copy": Weak(
        "this number does not fit into half", "do not convert it, or make it smaller before"
    ),
    "lgamma": Weak("lgamma is inf at 0", "lgamma(x.clamp(min=1e-6))", CLAMP),
    "logdet": Weak(
        "a determinant of 0 or less",
        "of a Jacobian or a rotation take torch.slogdet, for any sign; a covariance build as "
        "L @ L.T with a positive diagonal in L (slogdet would hide the sign)",
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
FORGOTTEN = Advice(
    "scaler.step(optimizer), and scaler.update() after it, in place of optimizer.step(): it "
    "divides the gradients by the loss scale, and skips a bad step"
)
SKIPPED = Advice(
    "nothing is wrong with this step: without this error scaler.step(optimizer) skips it, and "
    "scaler.update() lowers the loss scale; check for NaN only after scaler.step(), or do not "
    "raise (clip_grad_norm_ without error_if_nonfinite), or begin with a lower init_scale"
)
# A part of the path of a framework's files: what it calls another precision than float16, than
# bfloat16, and a lower rate.
RATE_OF_TRAINER = "TrainingArguments(learning_rate=..., warmup_steps=..., max_grad_norm=1.0)"
RATE_OF_LIGHTNING = "a lower lr in configure_optimizers, Trainer(gradient_clip_val=1.0)"
FRAMEWORKS = {
    "/accelerate/": (
        'Accelerator(mixed_precision="bf16")',
        'Accelerator(mixed_precision="no")',
        "a lower lr, accelerator.clip_grad_norm_(model.parameters(), 1.0)",
    ),
    "/ultralytics/": ("train(amp=False)", "train(amp=False)", "train(lr0=..., warmup_epochs=...)"),
    "/transformers/": (
        "TrainingArguments(bf16=True)",
        "TrainingArguments(bf16=False)",
        RATE_OF_TRAINER,
    ),
    "/lightning/fabric/": (
        'Fabric(precision="bf16-mixed")',
        'Fabric(precision="32-true")',
        "a lower lr, fabric.clip_gradients(model, optimizer, max_norm=1.0)",
    ),
    "/lightning/pytorch/": (
        'Trainer(precision="bf16-mixed")',
        'Trainer(precision="32-true")',
        RATE_OF_LIGHTNING,
    ),
}
FRAMEWORKS["/lightning_fabric/"] = FRAMEWORKS["/lightning/fabric/"]
FRAMEWORKS["/pytorch_lightning/"] = FRAMEWORKS["/lightning/pytorch/"]


def framework_of(files):
    """The outermost framework among the files of a stack, the innermost first; or ""."""
    at = [part for file in files for part in FRAMEWORKS if part in file.replace("\\", "/")]
    return at[-1] if at else ""


def in_its_words(framework, report):
    """The advice in the words of the framework that runs the step, or ""."""
    precision = report.verdict is Verdict.PRECISION
    rated = advice_on(report).topic in (Topic.RATE, Topic.GROWTH)
    if not framework or not (rated or precision):
        return ""
    in_half, in_bf16, rate = FRAMEWORKS[framework]
    words = in_bf16 if report.precision == "bfloat16" else in_half
    words = words if precision else rate
    return f"; in the words of {framework.split('/')[1]}: {words}"


def names_bad_number(error):
    """Whether its text speaks of NaN or inf, or the line that raised it asks for them."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    asks = "".join(linecache.getlines(frame.f_code.co_filename)[max(0, line - 2) : line])
    known = re.search(r"\b(nan|inf)\b", str(error), re.I)
    return bool(known or re.search(r"is_?(nan|inf|finite)\(", asks))


def on_exception(error):
    """What is known of an exception of torch."""
    return next((known for known in RAISED if re.search(known.words, str(error))), Raised(""))


def advice_on(report) -> Advice:
    """What to do. Advice on the source comes first, then on the batch, on the operation, and last
    on the verdict."""
    found = (
        report.fix
        or _of_source(report)
        or _of_batch(report)
        or _of_operation(report)
        or _of_verdict(report)
    )
    return found if isinstance(found, Advice) else Advice(found)


def _of_source(report):
    source = report.source
    if not source:
        return None
    if source.kind is Kind.WRITTEN:
        return (
            f"the script writes this number itself, at {report.line}: "
            "leave it out of the loss, or write another"
        )
    if source.kind is Kind.EARLIER_STEP:
        return "that line made it or passed it on: --from-step 0 names the operation"
    if source.kind in MADE_ELSEWHERE:
        where = f", at {source.line}" if source.line else ": NumPy, a constant, a table"
        return f"mend this number where it is made{where}"
    return None


def _of_batch(report):
    every = 0 < len(report.samples) == report.batch_size
    return ALL_BAD if every and report.verdict is Verdict.DATA else None


def _of_operation(report):
    if report.consumed_by and report.verdict is not Verdict.DATA:
        return ENTERED
    weak = report.fragile_op
    of_operation = report.verdict in (Verdict.DIVERGENCE, Verdict.PRECISION)
    if not of_operation or not weak or report.source:
        return None
    lowest = [low for low, _ in report.spans] or [0.0]  # of whole numbers nothing is known
    if WEAK[weak].change is CLAMP and report.phase == "forward":
        if lowest[0] < -1e-3 * report.largest:  # not 0, or its rounding
            return NEGATIVE.format(weak, lowest[0])
        if lowest[0] < 0 and weak == "sqrt":
            return ROUNDED.format(lowest[0], cure_of(report).code)
        if report.spans[:1] == ((0.0, 0.0),):
            return ALL_ZERO.format(weak)
    divides = weak == "div" or weak.startswith("log")
    if divides and lowest[-1] > 0 and lowest[1:]:
        return TINY.format(f"{lowest[-1]:.3g}")
    if report.no_cure_helped:
        return None
    cure = cure_of(report)
    if report.phase == "backward" and weak.startswith("log") and report.result_value == "nan":
        return Advice(f"{cure.why}: {WHERE}")  # else the loss would be inf
    tried = [trial for trial in report.tried if trial.what == cure.code]
    if any(trial.same_step is False for trial in tried):
        other = f"{cure.code} is finite, but {ANOTHER} than in float64: see what was tried"
        return f"{cure.why}; {other}"
    return cure.text


def cure_of(report):
    """The entry of WEAK on the operation, with the limits of this dtype."""
    weak = WEAK[report.fragile_op]
    return weak._replace(why=_limits(report, weak.why), code=_limits(report, weak.code))


def _limits(report, text):
    if not report.step:  # nothing has been trained yet
        text = text.replace(", a high rate", "")
    for number, in_half in IN_HALF.items() if report.dtype is torch.float16 else ():
        text = text.replace(number, in_half)
    return text


def _of_verdict(report):
    in_flags, in_code = VERDICTS[report.verdict]
    advice = in_flags if report.advice == "flags" else in_code
    if report.verdict is Verdict.OPTIMIZER:
        return Advice(advice, Topic.RATE)
    if report.verdict is not Verdict.DIVERGENCE:
        return advice
    if report.inputs_are_huge:
        return _of_growth(report, advice)
    if not report.op:
        return NOT_SEEN
    if report.source and report.source.kind is Kind.UNINITIALISED:
        return UNWRITTEN
    if any(lowest == -inf for lowest, _ in report.spans):
        return MASKED
    wide = report.in_wider_types[1:]
    in_float64 = wide and not wide[0].span.is_bad
    return TOO_LARGE if in_float64 else NO_VALUE


def _of_growth(report, advice):
    """The numbers have grown until they overflow."""
    advice = advice if report.step else UNTRAINED
    topic = Topic.GROWTH if report.step else Topic.OTHER
    few_samples = 0 < 4 * len(report.samples) <= report.batch_size
    if few_samples and not report.grew:
        first = "look at these samples, no other does this; else "
        return Advice(first + advice, Topic.RATE if report.step else topic)
    return Advice(advice, topic)
