"""
Answer: what do the repetitions of a step show of its gradients, and how is that said?

decide() reads numbers and types alone. in_words() makes the sentences.
"""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

BEYOND = 8  # times what rounding explains
FAINT = 1e-6  # of the largest gradient: below it is rounding
DIGIT = 0.1  # of a gradient, which fp32 loses
ZEROS = 0.5  # of a gradient, which fp16 made 0
OTHER_STEP = (
    "made again, it has other gradients than the script: old ones that were not set "
    "to 0, or changed by hand. Nothing is known"
)
UNREPEATABLE = (
    "is not repeatable: two calls with the same input and random state differ (a generator of its "
    "own, a counter?), so that the step cannot be made again. Nothing is known"
)
OTHER_DRAWS = (
    "compiled code and fused attention draw other random numbers than eager code does (for "
    "compiled code set torch._inductor.config.fallback_random = True, or leave out the dropout)"
)
COUNTER = (
    " (does the forward depend on a counter, a buffer, or random numbers of "
    "Python or NumPy? It runs twice)"
)


class Way(Enum):
    """What is done otherwise when the step is repeated, in words."""

    EAGER = "without compiled code"
    ATTENTION = "with plain attention"
    CHECKPOINTS = "without checkpoints"
    OWN = "with gradients of their own for custom functions and hooks"


class Answer(Enum):
    """What the repetitions have shown."""

    RIGHT = "the gradients are as in the other ways, and in wider types"
    WRONG = "some are not, or something makes them wrong that no other way shows"
    OTHER_STEP = "a repetition has other gradients than the script"
    OTHER_DRAWS = "the other ways draw other random numbers"
    UNKNOWN = "some custom functions cannot be compared"

    @property
    def code(self):
        """The exit code; 4: nothing is known."""
        return {Answer.RIGHT: 0, Answer.WRONG: 3}.get(self, 4)


class Measured(NamedTuple):
    """What the repetitions have shown. Gradients are {name of a tensor: numbers}, in the order of
    the backward."""

    repeats: bool  # whether the step has the gradients that the script had
    causes: list  # sentences on what makes a gradient wrong
    reference: str = ""  # the types of `truth`
    first: dict | None = None  # gradients of the step as it was
    truth: dict | None = None  # and in all other ways, in wider types
    rounding: dict | None = None  # {name: how far these may be apart}
    beyond: Sequence = ()  # names of those that are further apart
    way: Way | None = None  # that alone brings these back
    other_draws: bool = False  # that may be why they are apart
    zeros: Sequence = ()  # names of those of which fp16 made most numbers 0
    rounded: Sequence = ()  # names of those of which fp32 keeps less than one digit
    unknown: Sequence = ()  # custom functions that could not be compared
    chosen: Sequence = ()  # those whose backward is a choice
    right: int = 0  # how many agree with central differences
    unrepeatable: Sequence = ()  # custom functions whose forward gives other results each time

    @property
    def wrong(self):
        return () if self.other_draws else self.beyond


def decide(measured):
    """(Answer, the Way that alone makes the gradients right, or None)"""
    if not measured.repeats:
        return (Answer.WRONG if measured.causes else Answer.OTHER_STEP), None
    if measured.wrong:
        return Answer.WRONG, measured.way
    if measured.causes or measured.zeros or measured.rounded:
        return Answer.WRONG, None
    if measured.other_draws:
        return Answer.OTHER_DRAWS, None
    return (Answer.UNKNOWN if measured.unknown else Answer.RIGHT), None


def in_words(answer, way, measured):
    if answer is Answer.WRONG:
        compared = f", compared in {measured.reference}" if measured.repeats else ""
        lines = [f"a gradient is wrong{compared}:", *measured.causes, *_differences(measured)]
        if way:
            counter = COUNTER if way is Way.CHECKPOINTS else ""
            lines.append(f"it is right {way.value}: look there{counter}")
        return "\n  ".join(lines)
    if answer is Answer.OTHER_STEP and measured.unrepeatable:
        return f"the forward of {', '.join(measured.unrepeatable)[:300]} {UNREPEATABLE}"
    if answer is Answer.OTHER_STEP:
        return OTHER_STEP
    if answer is Answer.OTHER_DRAWS:
        return f"nothing is known: {OTHER_DRAWS}"
    unknown = "; ".join(measured.unknown)[:600]
    head = f"not compared, so that nothing is known: {unknown}\n  " if unknown else ""
    return head + _agreement(measured)


def _differences(measured):
    """A line for each of the first gradients that are wrong."""
    names = [*dict.fromkeys((*measured.wrong, *measured.zeros, *measured.rounded))]
    for name in names[:5]:
        off = _off(measured.first[name], measured.truth[name])
        shown = name.replace("_orig_mod.", "")
        yield f"gradient of {shown}: off by {off:.2g} of its norm{_why(name, measured)}"
    if len(names) > 5:
        yield f"and {len(names) - 5} more"


def _why(name, measured):
    g, truth = measured.first[name], measured.truth[name]
    if name in measured.zeros:
        words = "it is too small for float16, use torch.amp.GradScaler"
        return f"; {_share_of_zeros(g, truth):.0%} of it is 0: {words}"
    if name in measured.rounded:
        return ": fp32 has rounded it"
    rounding = measured.rounding[name] / (norm(truth) or 1.0)
    return f" (rounding: {rounding:.1g}){_shape(g, truth)}"


def _agreement(measured):
    """Up to which difference all gradients agree, and what was not compared."""
    first, truth = measured.first, measured.truth
    most = max((_off(first[n], truth[n]) for n in _large(truth, FAINT)), default=0.0)
    right, chosen = measured.right, ", ".join(measured.chosen)
    agree = f"; {right} custom functions agree with central differences" if right else ""
    agree += f"; not compared: {chosen}"[:300] if chosen else ""
    ways = ", ".join(way.value for way in Way)
    return (
        f"the gradients of {len(first)} tensors are those of the step in {measured.reference}, "
        f"{ways}, up to {most:.1e}{agree}"
    )


def _shape(g, truth):
    """How it differs: in length, or in direction."""
    norms = norm(g) * norm(truth)
    if not norms:
        return ", one of them is 0"
    cosine = float((g * truth).sum()) / norms
    factor = norm(g) / norm(truth)
    return f", cosine {cosine:.3f}, {factor:.3g} times as long"


def beyond_rounding(grads, truth, rounding):
    """The names of gradients that differ by more than rounding."""
    return [n for n, t in truth.items() if not norm(grads[n] - t) <= BEYOND * rounding[n]]


def rounded_away(first, truth):
    """The names of those of which fp32 keeps less than one digit."""
    return [n for n in _large(truth, 1e-3) if _off(first[n], truth[n]) > DIGIT]


def made_zero(first, truth):
    """The names of those of which fp16 made most numbers 0."""
    far = [n for n in _large(truth, 5e-4) if _off(first[n], truth[n]) > 0.5]
    return [n for n in far if _share_of_zeros(first[n], truth[n]) > ZEROS]


def norm(g):
    return float(g.norm())


def _off(g, truth):
    return norm(g - truth) / (norm(truth) or 1.0)


def _share_of_zeros(g, truth):
    return float(((g == 0) & (truth != 0)).double().mean())


def _large(grads, share):
    """The names of those larger than this share of the largest. Some should be 0, like that of a
    bias before BatchNorm."""
    norms = {name: norm(g) for name, g in grads.items()}
    most = max(norms.values(), default=0.0)
    return [name for name, size in norms.items() if size > share * most]
