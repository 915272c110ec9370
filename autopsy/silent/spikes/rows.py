"""
Rows: which rows of the batch carry a jump of the loss, or of the gradient norm?

It repeats the forward passes of the step; each time some rows replace the others, so that every
shape stays. It names the rows without which the loss is ordinary, and what they alone hold.
"""

from typing import NamedTuple

import torch

from ...tensors import extent, few, type_of
from ...watch.forward import Forward
from ...watch.interrupts import no_evidence

ALL = 10.0  # times the highest of the past: carried by the whole batch
BARE = 50.0  # by rows of which nothing else is known: rare ones are so in a replay buffer
BESIDE = 3.0  # times the loss: of half of the rows, twice
AGAIN = 48  # forward passes for one spike
ALIKE = 8  # rows: by chance fewer may have one label
BEYOND = 10.0  # times the largest number of any other row


class Rows(NamedTuple):
    """Sentences on what carries a jump."""

    text: str = ""  # a few rows
    labels: str = ""  # if no more is known of them
    rare: bool = False  # they may be so
    whole: str = ""  # all rows
    term: str = ""  # all rows, and one term of the loss
    alike: str = ""  # all rows, and all have one label


def rows_of(recorder, times, own, slope):
    """Which rows carry the spike of this step: of the loss or (`slope`) of the gradient norm."""
    with no_evidence, Forward(recorder, slope) as again:
        return _rows_of(again, times, own)
    return Rows()  # a service: whatever cannot be made again names no rows


def _rows_of(again, times, own):
    whole = again.largest()
    size = again.size
    if size < 4:
        return Rows()
    ordinary = max(2 * whole / times, whole / 1000)
    if not abs(again(range(size)) - whole) <= 1e-3 * whole or not whole:
        return Rows()  # not reproducible
    guilty, groups, calm, most = [], [list(range(size))], 0, 0.0
    while groups and again.passes < AGAIN:
        group = groups.pop(0)
        half = (len(group) + 1) // 2
        for part in (group[:half], group[half:]):
            loss = again(part)
            most = max(most, loss) if len(group) == size else most
            if loss > ordinary:
                (groups if len(part) > 1 else guilty).append(part)
            elif len(part) * 8 >= size:
                calm += 1
    if not calm and most > BESIDE * whole:  # rows meet each other: two equal ones are another loss
        return Rows()
    if not calm:
        same = [t for t in again.labels if (t == t[0]).all()]
        also = "".join(f". In {type_of(t)} all hold {t[0].item()}" for t in same[:1])
        carries = "The whole batch carries it, not a few of its rows"
        of_loss = times > ALL and not again.slope
        term = _term(again.terms(), ordinary / whole) if of_loss else ""
        alike = carries + also if also and size >= ALIKE and len(again.labels) == 1 else ""
        return Rows(whole=carries + also, term=term and carries + term, alike=alike)
    guilty = sorted(row for part in guilty for row in part)
    good = [row for row in range(size) if row not in guilty]
    if groups or not guilty or len(guilty) > size // 4:
        return Rows()
    without = again(good)
    if not without <= ordinary or again(guilty) < own:
        return Rows()
    words = ("Row", "carries", "it") if len(guilty) == 1 else ("Rows", "carry", "them")
    what, carry, them = words
    turn = f" of backward pass {again.turn}" if again.turns > 1 else ""
    number = "gradient norm" if again.slope else "loss"
    text = (
        f"{what} {few(guilty)} of {size}{turn} (from 0) {carry} it: without {them} the {number} is "
        f"{without / whole:.2g} of that"
    )
    common = [said for t, d in again.rows.items() if (said := _common(t, d, guilty, good))]
    labels = "".join(
        f". In {type_of(t)} they hold {few(t[guilty].tolist())}: right?" for t in again.labels[:1]
    )
    if common:
        return Rows(". ".join([text, *[*dict.fromkeys(common)][:2]]))
    return Rows(text, labels, rare=times < (ALL if labels else BARE))


def _term(terms, ordinary):
    """What to add if one term of the loss carries a jump; `ordinary`: the share of all others."""
    total, (most, line) = sum(value for value, _ in terms), max(terms)
    if 0 < total - most <= ordinary * total:
        return f". Of the loss, a sum, {most / total:.0%} is the term of {line}"
    return ""


def _common(t, d, guilty, good):
    """Say what the guilty rows of this tensor share and no other row has; or ""."""
    rows = t.detach().movedim(d, 0)
    rows = rows.reshape(len(rows), -1)
    bad, others = rows[guilty], rows[good]
    kind = type_of(t)
    if t.is_floating_point() and rows.shape[1] == 1 and len(rows.unique()) < 3:
        return ""  # two classes, of which one is rare
    if t.is_floating_point():
        sizes, usual = ([extent(row).largest for row in part] for part in (bad, others))
        held = f"In {kind} they hold numbers up to {max(sizes):.3g} (other rows: "
        if max(sizes) == 0 < min(usual):
            return f"In {kind} their numbers are all 0"
        if min(sizes) > BEYOND * max(usual):
            return f"{held}up to {max(usual):.3g})"
        if max(sizes) * BEYOND < min(usual):
            return f"{held}at least one of {min(usual):.3g})"
        return ""
    if rows.shape[1] == 1:
        values = set(bad.flatten().tolist())
        alone = len(values) == 1 and not values & set(others.flatten().tolist())
        return f"In {kind} they alone hold {values.pop()}" if alone else ""
    same = [(part == part[:, :1]).all(1) for part in (bad, others)]
    if same[0].all() and not same[1].any():
        return f"In {kind} they hold nothing but {few(sorted(set(bad[:, 0].tolist())))} (padding?)"
    pad = torch.mode(rows.flatten()).values
    lengths = [(part != pad).sum(1).tolist() for part in (bad, others)]
    if min(lengths[0]) > 2 * max(lengths[1]):
        return (
            f"In {kind} they are longer than all others: {few(lengths[0])} numbers that are not "
            f"{pad}, others at most {max(lengths[1])}"
        )
    return ""
