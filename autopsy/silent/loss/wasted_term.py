"""
Wasted term: does a term of the loss train only weights whose gradients nobody uses?

With D(fake.detach()) in the loss of a generator, the adversarial term has a graph, but only to the
discriminator. Its gradients are cleared before the discriminator's own pass, and the generator
learns from the other terms alone. In some steps the weights that each term of a sum reaches are
compared with those of the optimizer that steps next. A term is told if it reaches none of them, no
other term shares its weights, detach() or no_grad has cut it off (seen when one step's forward pass
is made again), and its weights' own optimizer clears them before it steps.
"""

from collections import Counter

import torch
from torch import nn

from ...frames import line_now, line_of
from ...modes import is_compiled
from ...watch.deferred import params_of
from ...watch.events import Events
from ...watch.following import Follower
from ...watch.forward import Forward
from ...watch.graph import graph_of
from ...watch.interrupts import no_evidence
from ..shared.graph_ends import DetachFinder

FIRST, LATER = range(2, 6), 1024  # steps; then those that are a power of 2, up to here
OFTEN = 3
NODES, TERMS = 9999, 16  # of a graph, and of a loss
SUMS = ("AddBackward0", "SubBackward0")
ALONE = ("MulBackward0", "DivBackward0", "NegBackward0", "SumBackward0", "MeanBackward0",
         "StackBackward0", "SqueezeBackward0", "UnsqueezeBackward0")  # fmt: skip


class WastedTerm(Events):
    """Terms of losses, and what becomes of the gradients that they give."""

    recorded_only = True

    def __init__(self, watch):
        self.recorder, self.names = watch.recorder, watch.names
        self.losses = []  # (line, weights of each term) since the last step
        self.cut = {}  # line: what cut a term off, or ""
        self.open = []
        self.wasted = Counter()  # line: steps
        self.reached = {}  # line: names of the weights
        self.used = set()  # lines with a term of which a step uses something

    def backward(self, losses):
        steps = self.recorder.steps
        now = steps in FIRST or (steps.bit_count() == 1 and FIRST[-1] < steps <= LATER)
        now &= self.recorder.hooks.world == 1
        if not (now or self.open):
            return
        made = self.recorder.maker(losses[0]) if losses else None
        line = line_of(made.frames) if made else line_now()
        for term in self.open:
            term.again |= line == term.line and not term.left
        if now and len(losses) == 1:
            terms = _terms(losses[0].grad_fn)
            weights = [_weights(term) for term in terms] if len(terms) > 1 else []
            if len(weights) > 1 and None not in weights:
                self.losses.append((line, weights))

    def before_step(self, optimizer, losses, norm, moved):
        looked, self.losses = self.losses, []
        mine = {id(p) for p in params_of(optimizer)} if looked else ()
        for line, weights in looked:
            fed = any(not mine.isdisjoint(reached) for reached in weights)
            for k, reached in enumerate(weights):
                others = [other for j, other in enumerate(weights) if j != k]
                apart = all(reached.keys().isdisjoint(other) for other in others)
                if not (fed and reached and apart and mine.isdisjoint(reached)):
                    continue
                if line not in self.cut and len(self.cut) < 2:
                    self.cut[line] = self._cut_by(optimizer, reached)
                if self.cut.get(line):
                    self.open.append(Term(line, reached, self.recorder.gradient_reads))

    def _cut_by(self, optimizer, reached):
        """What cuts the term that reaches these off from weights of this optimizer, or ""."""
        called = [c.function for c in self.recorder.calls if isinstance(c.function, nn.Module)]
        if not self.recorder.is_complete or is_compiled(
            [m for root in called for m in root.modules()]
        ):
            return ""
        params = [p for p in params_of(optimizer) if p.requires_grad]
        with no_evidence:  # what cannot be made again is no evidence
            with Forward(self.recorder) as again, DetachFinder(params) as cuts, Made(cuts) as made:
                again()
            terms = [term for loss in again.results.values() for term in _terms(loss.grad_fn)]
            mine = [t for t in terms if (_weights(t) or {}).keys() & reached.keys()]
            ends = {end for term in mine for end in made.ends.get(term, ()) if end.is_cut}
            return str(min(ends, default=""))
        return ""

    def cleared(self, owner):
        params = owner.parameters() if isinstance(owner, nn.Module) else params_of(owner)
        mine = {id(p) for p in params} if self.open else ()
        for term in self.open:
            term.left = {key: p for key, p in term.left.items() if key not in mine}

    def stepped(self, optimizer):
        mine = {id(p) for p in params_of(optimizer)} if self.open else ()
        for term in [*self.open]:
            if mine.isdisjoint(term.reached):
                continue
            self.open.remove(term)
            if term.left or term.again or term.reads != self.recorder.gradient_reads:
                self.used.add(term.line)
            else:
                self.wasted[term.line] += 1
                if term.line not in self.reached:
                    self.reached[term.line] = self.names.of(next(iter(term.reached.values())))

    def skipped(self, optimizer):
        mine = {id(p) for p in params_of(optimizer)} if self.open else ()
        self.open = [term for term in self.open if term.reached.keys().isdisjoint(mine)]

    def resumed(self):
        self.open, self.losses = [], []  # what became of them was not seen

    def sentences(self):
        for line, steps in self.wasted.items():
            if steps >= OFTEN and line not in self.used:
                yield (
                    f"a term of the loss at {line} trains nothing: it reaches only "
                    f"{self.reached[line]} and other weights whose gradients are cleared before "
                    f"their optimizer steps: {self.cut[line]}"
                )


class Term:
    """A term, the weights that it reaches, and those of them that are not cleared yet."""

    def __init__(self, line, reached, reads):
        self.line, self.reached, self.reads = line, reached, reads
        self.left = reached
        self.again = False  # has its line been reached once more, after they were cleared?


def _terms(node):
    """The nodes that a loss of one number is the sum of."""
    left, terms = [node] if node else [], []
    for node in left:
        parts = [part for part, _ in node.next_functions if part]
        name = node.name()
        one = not [*node._input_metadata[0].shape] if node._input_metadata else False
        scaled = name in ALONE and (len(parts) == 1 or name == "StackBackward0")
        if ((name in SUMS and one) or scaled) and len(left) < TERMS:
            left += parts
        else:
            terms.append(node)
    return terms


def _weights(node):
    """{id: weight} of all that a term reaches, or None if that is not known."""
    reached = {}
    nodes = graph_of([node], NODES)
    for one in nodes:
        if hasattr(one, "variable"):
            reached[id(one.variable)] = one.variable
        elif hasattr(one, "_forward_cls") or "Checkpoint" in one.name():
            return None  # a custom function, which may hide what it reaches
    known = len(nodes) < NODES and all(isinstance(p, nn.Parameter) for p in reached.values())
    return reached if known else None


class Made(Follower):
    """What cut off that of which each node has made its result."""

    def __init__(self, cuts):
        super().__init__()
        self.cuts, self.ends = cuts, {}

    def function_called(self, func, name, args, kwargs, out):
        if isinstance(out, torch.Tensor) and out.grad_fn and out in self.cuts.ends:
            self.ends[out.grad_fn] = self.cuts.ends[out]
