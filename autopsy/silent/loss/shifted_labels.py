"""
Shifted labels: is each token trained on the next one, which it does not see?

A language model shifts its labels in its loss. Shifted in the data as well, position t learns token
t + 2, and nothing fails. Not shifted at all, or without a causal mask, it copies what it sees. The
graphs of the first losses hold the labels, and the ids that an embedding was given. If labels are
exactly the ids, moved by one number, a step is made again, once a run: the gradients of three
positions show on which ids each depends. Told is the id after the next one; the last id that it
sees, if it sees earlier ones too; and the next id, if the position sees it by more than a summary
of all (that of an autoencoder has no dimension of time). Neither where a code is drawn or chosen.
The ids may be those of an encoder, which sees the last label too: then the next id is told only if
the script speaks of a causal mask. Labels at several places, or a slice from 2 on in the script,
are meant so, and labels two places on that were not cut by one place in the loss.
"""

import re
from collections import Counter
from contextlib import contextmanager
from enum import Enum

import torch
from torch.nn import functional as F

from ...frames import code_of, line_now, script_frames_now
from ...tensors import PLAIN
from ...watch.events import Events
from ...watch.following import Follower
from ...watch.forward import Forward
from ...watch.graph import nodes_of
from ...watch.interrupts import no_evidence
from ..shared.classification import NEAR, labels_of

PASSES = 12  # backward passes
OFTEN = 3  # of them
LONG = 8  # ids in a row
MANY = 16  # labels
FAR = 64  # how many labels more than ids: of an image before the text, say
ALIKE = 0.9  # share of labels that are ids at any other shift
ON_PURPOSE = re.compile(r"\[[^\]\n]*(?<![-\w.])2 *:(?!:)|horizon|ahead|delay|\bgap\b|\blag\b"
                        r"|\boffset\b|speculat|:-[A-Za-z_]", re.I)  # fmt: skip
OTHER = re.compile(r"(shape|size\(\)|argv)\[2 *:")  # slices
DRAWS = ("randn", "randn_like", "normal", "normal_", "argmin", "argmax", "multinomial", "bernoulli",
         "round")  # fmt: skip
CAUSAL = re.compile(r"causal|\btril\b|\btriu\b|subsequent")


class Learnt(Enum):
    """Which id each position learns, and what to say of labels that teach it."""

    NEXT = "the next ids"  # as it is meant
    NEXT_BUT_ONE = (
        "the ids two places on: a position that sees the ids up to t learns id t + 2, and none "
        "learns the next one: they are shifted twice, so leave one shift out"
    )
    LAST = (
        "the last ids that a position sees, and it sees none after them: it learns to copy: shift "
        "the labels"
    )
    SEEN = (
        "the next ids, and each position sees its own: it learns to copy: hide what comes later "
        "from it (a causal mask; one direction of a recurrent layer)"
    )


class ShiftedLabels(Events):
    """Labels that are ids of the same step, at another place than the next."""

    recorded_only = True

    def __init__(self, watch):
        self.recorder = watch.recorder
        self.passes, self.shifts = 0, Counter()  # passes in which labels are moved so far
        self.is_meant = self.is_due = False
        self.found = None  # (what is learnt, line of the loss), if all losses say the same

    def backward(self, losses):
        if self.is_meant or self.passes == PASSES:
            return
        self.passes += 1
        with no_evidence:
            self._look(losses)

    def _look(self, losses):
        labels = [t for t in map(labels_of, nodes_of(losses, NEAR)) if t is not None]
        if not labels:
            return
        nodes = [node for node in nodes_of(losses) if node.name() == "EmbeddingBackward0"]
        tables = [node._saved_indices for node in nodes]
        found = {shift for t in labels for ids in tables for shift, *_ in _shifts(t, ids)}
        self.shifts.update(found)
        self.is_meant = len(self.shifts) > 1 or (bool(found - {1}) and _is_written())
        self.is_due = max(self.shifts.values(), default=0) >= OFTEN

    def before_step(self, optimizer, losses, norm, moved):
        self._look_closely()

    def passed(self):
        if {*self.recorder.steps_of} == {id(None)}:  # the script updates by hand
            self._look_closely()

    def _look_closely(self):
        alone = self.recorder.is_complete and self.recorder.hooks.world == 1
        if self.is_due and alone and not self.is_meant:
            self.is_due, self.passes = False, PASSES
            with no_evidence, Forward(self.recorder, slope=True) as again:
                seen = Seen()
                with seen:
                    again()
                found = {(learnt, line) for learnt, line in seen.learnt() if learnt}
                self.found = found.pop() if len(found) == 1 else None

    def sentences(self):
        learnt, line = self.found or (Learnt.NEXT, "")
        if learnt is not Learnt.NEXT and not self.is_meant:
            yield f"the labels of the loss at {line} are {learnt.value}"


class Seen(Follower):
    """What losses and embeddings are given."""

    def __init__(self):
        super().__init__()
        self.losses, self.tables = [], []  # (logits, labels, line); (ids, their rows)
        self.is_causal = False  # does the script speak of a causal mask?
        self.draws = False  # is something drawn or chosen on the way, which may hide the ids?

    def function_called(self, func, name, args, kwargs, out):
        self.draws |= name in DRAWS
        if name in ("cross_entropy", "nll_loss"):
            scores, target = args[:2] if len(args) > 1 else (kwargs["input"], kwargs["target"])
            labels = target.masked_fill(target == kwargs.get("ignore_index", -100), -1)
            self.losses.append((scores.movedim(1, -1), labels, line_now()))
        elif name == "gather":
            scores, _, index = args[:3]
            self.losses.append((scores, index, line_now()))
        elif name == "embedding":
            self.tables.append((args[0] if args else kwargs["input"], out))
            code = code_of(script_frames_now())
            self.is_causal |= bool(CAUSAL.search(code))

    @torch.enable_grad()
    def learnt(self):
        """(what is learnt, line) for each loss and embedding; None where that is not known."""
        for scores, labels, line in self.losses:
            for ids, rows in self.tables if scores.requires_grad else ():
                for shift, dim, moved in _shifts(labels, ids):
                    yield self._learnt(scores.flatten(0, -2), rows, shift, dim, moved), line

    def _learnt(self, scores, rows, shift, dim, labels):
        ids, length = rows.shape[dim], labels.shape[1]
        first, end = max(0, -shift), min(length, ids - shift)
        end = min(end, int((labels >= 0).any(0).nonzero()[-1]) + 1)  # the longest row may be short
        gaps, copied = set(), not self.draws
        # an encoder is given all that is to be decoded
        seen = bool((labels[:, ids - shift :] >= 0).any())
        seen = shift == 1 and (seen or self.is_causal) and not self.draws
        for quarter in (1, 2, 3):
            t = first + (end - first) * quarter // 4
            row = (labels[:, t] >= 0).nonzero().flatten()
            at = row * length + t if dim else t * len(labels) + row
            part = scores[at]
            on = _depends(part, rows, dim)
            gaps.add(t + shift - on[-1])
            copied &= len(on) > 1
            seen &= t + shift in on
            if seen:
                with _no_summaries(part, {length, ids, length * len(labels), ids * len(labels)}):
                    seen &= t + shift in _depends(part, rows, dim)
        if gaps == {2}:  # meant, if more or less than one place was cut off
            ends = bool((labels[:, -1] < 0).all())
            is_cut = length == ids - 1 or (length == ids and ends)
            return Learnt.NEXT_BUT_ONE if is_cut else None
        if gaps == {0} and copied:
            return Learnt.LAST
        if seen:
            return Learnt.SEEN
        return Learnt.NEXT if gaps == {1} else None


def _depends(part, rows, dim):
    """The places of the ids on which these numbers depend."""
    seed = torch.arange(part.numel(), device=part.device).cos().view_as(part).to(part)
    (slope,) = torch.autograd.grad(part, rows, seed, retain_graph=True)
    return (slope != 0).any(-1).any(1 - dim).nonzero().flatten().tolist()


@contextmanager
def _no_summaries(part, lengths):
    """Inside, no gradient flows through what has no dimension of one of these lengths: a summary
    of all ids, such as an autoencoder's."""
    hooks = []
    for node in nodes_of([part])[1:]:
        shapes = [getattr(about, "shape", ()) for about in node._input_metadata]
        if shapes and not any(lengths & {*shape} for shape in shapes):
            hooks.append(node.register_prehook(_zeros))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _zeros(slopes):
    return tuple(slope if slope is None else torch.zeros_like(slope) for slope in slopes)


def _shifts(labels, ids):
    """(by how many places these labels are moved ids, the ids' dimension of time, labels [rows,
    time]), if they are so at one place only."""
    if ids.dim() != 2 or type(ids) not in PLAIN or labels.numel() < MANY:
        return
    for dim in (1, 0):
        rows = ids.shape[1 - dim]
        flat = labels.flatten()
        if dim and len(flat) % rows == rows - 1:  # all rows in one, moved by one
            flat = F.pad(flat, (0, 1), value=-1)
        far = abs(len(flat) // rows - ids.shape[dim])
        if len(flat) % rows or far > FAR or min(len(flat) // rows, ids.shape[dim]) < LONG:
            continue
        moved = flat.view(rows, -1) if dim else flat.view(-1, rows).T
        given = ids if dim else ids.T
        shares = {s: _share(moved, given, s) for s in range(-far - 2, far + 4)}
        exact = [s for s, share in shares.items() if share == 1]
        others = [share for s, share in shares.items() if s not in exact]
        if len(exact) == 1 and max(others) < ALIKE and len(moved.unique()) > LONG // 2:
            yield exact[0], dim, moved


def _share(labels, ids, shift):
    """Of the labels that are there at this shift; 0 if they are few."""
    first, end = max(0, -shift), min(labels.shape[1], ids.shape[1] - shift)
    if end - first < LONG // 2:
        return 0.0
    labels, ids = labels[:, first:end], ids[:, first + shift : end + shift]
    counts = labels >= 0
    same, of = torch.stack([(counts & (labels == ids)).sum(), counts.sum()]).tolist()
    return same / of if of >= MANY else 0.0


def _is_written():
    """Whether the script says that it means the next but one."""
    code = code_of(script_frames_now())
    code = OTHER.sub("", code)
    return bool(ON_PURPOSE.search(code))
