"""
Constant term: is a term of the loss made without a graph?

kl_div(teacher, teacher) has a value and no gradient, and the sum with another term trains all the
same. Where a term of a sum has no graph, the forward pass of two steps is made once more, and torch
functions of losses without a graph are followed to the sum. Told is a term that compares the same
numbers, or one that lost its graph to weights of the optimizer by detach() or no_grad. Other
constants may be meant (the loss of a frozen network); so is a term that has a graph in some steps.
"""

from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ...frames import line_now
from ...modes import is_compiled
from ...tensors import flat_tensors
from ...watch.deferred import params_of
from ...watch.events import Events
from ...watch.following import Follower, is_loss
from ...watch.forward import Forward
from ...watch.interrupts import no_evidence
from ..shared.graph_ends import DetachFinder

LOOKS = (2, 5)  # recorded steps of an optimizer, at the earliest
MOST = 4  # looks in all
NODES = 32  # of a loss
SUMS = ("AddBackward0", "SubBackward0", "StackBackward0", "CatBackward0")
LINEAR = (*SUMS, "MulBackward0", "DivBackward0", "MeanBackward0", "MeanBackward1", "SumBackward0",
          "SumBackward1", "SqueezeBackward0", "SqueezeBackward1", "ViewBackward0")  # fmt: skip
SCALES = ("mul", "rmul", "imul", "div", "truediv")
KEEPS = (*SCALES, "mean", "sum", "abs", "pow", "square", "squeeze", "view", "reshape", "nanmean")
ADDS = ("add", "radd", "iadd", "stack", "cat", "sum")
LIKE = (
    "zeros_like",
    "ones_like",
    "full_like",
    "empty_like",
    "rand_like",
    "randn_like",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_empty",
    "new_tensor",
)  # its numbers are not used


class ConstantTerm(Events):
    """Terms without a graph, in the losses of each optimizer."""

    def __init__(self, watch):
        self.recorder, self.left = watch.recorder, MOST
        self.forms = []  # of the losses since the last step
        self.suspect = False
        self.optimizers = WeakKeyDictionary()
        self.suspects = []  # the same, of which there is something to tell

    def backward(self, losses):
        if self.suspects or self.recorder.hooks.budget.recording:
            forms = [_form(loss.grad_fn) for loss in losses if loss.grad_fn]
            self.forms = [*self.forms, *forms][-8:]
            self.suspect |= any(None in form for form in forms)

    def before_step(self, optimizer, losses, norm, moved):
        if not (self.suspects or self.recorder.hooks.budget.recording):
            return
        if optimizer not in self.optimizers:
            self.optimizers[optimizer] = Seen()
        seen = self.optimizers[optimizer]
        for other in self.suspects:
            other.alone &= other is seen
        if seen.constant:
            seen.changes |= not self.suspect
            seen.changes |= seen.looks == len(LOOKS) and not seen.forms.issuperset(self.forms)
        if seen.looks < len(LOOKS):
            seen.forms.update(self.forms)
        due = seen.looks < len(LOOKS) and seen.steps >= LOOKS[seen.looks]
        if due and self.suspect and self.left and self.recorder.is_complete:
            self.left -= 1
            seen.add_look(_terms(self.recorder, optimizer, self.optimizers))
            self.suspects = [*{*self.suspects, seen}] if seen.constant else self.suspects
        seen.steps += 1
        self.forms, self.suspect = [], False

    def sentences(self):
        sentences = {}
        for seen in self.suspects:
            if seen.looks == len(LOOKS) and not seen.changes:
                sentences |= {text: True for text, same in seen.constant if same or seen.alone}
        for text in sentences:
            yield f"a term of the loss trains nothing: {text}"


class Seen:
    """What was seen of the losses of an optimizer."""

    def __init__(self):
        self.steps = self.looks = 0
        self.forms = set()  # of its losses, until the last look
        self.changes = False  # has a later loss another form?
        self.alone = True  # has no other optimizer made a step since?
        self.constant = set()  # (sentence, does it compare the same?) of all looks so far

    def add_look(self, found):
        self.constant = self.constant & found if self.looks else found
        self.looks = len(LOOKS) if not self.constant else self.looks + 1


def _form(node):
    """The names of the nodes that a loss is a sum of, None for a term that has no graph."""
    left, names = [node], []
    for node in left:
        name = node.name()
        names.append(name)
        if name in LINEAR and len(left) < NODES:
            parts = [part for part, _ in node.next_functions]
            if name in SUMS and not all(parts):
                names.append(None)
            left += filter(None, parts)
    return tuple(names)


def _terms(recorder, optimizer, optimizers):
    """{(sentence, does it compare the same?)} on terms of the losses of this step."""
    modules = [call.function for call in recorder.calls if isinstance(call.function, nn.Module)]
    parts = [part for module in modules for part in module.modules()]
    if recorder.hooks.world > 1 or is_compiled(parts):
        return set()
    params = [p for p in params_of(optimizer) if p.requires_grad]
    others = [p for other in list(optimizers) for p in params_of(other)]
    with no_evidence:  # what cannot be made again is no evidence
        with Forward(recorder) as again, DetachFinder(params) as cuts, Terms(cuts) as terms:
            again()
        linear = {node for loss in again.results.values() for node in _linear(loss.grad_fn)}
        found = {origin for origin, total in terms.added if total.grad_fn in linear}
        frozen = not all(p.requires_grad for p in others)  # two phases, perhaps
        return {(text, same) for text, same in found if same or not frozen}
    return set()


def _linear(node):
    """From a loss on: what it is a sum of."""
    left = [node] if node else []
    for node in left:
        if node.name() in LINEAR and len(left) < NODES:
            left += [part for part, _ in node.next_functions if part]
    return left


class Terms(Follower):
    """Follows losses without a graph until they are added to what has one."""

    def __init__(self, cuts):
        super().__init__()
        self.cuts = cuts  # what lost its graph to the weights
        self.chosen = WeakIdKeyDictionary()  # rows that indices chose which lost their graph
        self.followed = WeakIdKeyDictionary()  # tensor: {(sentence, does it compare the same?)}
        self.added = []  # (the same, the sum)

    def function_called(self, func, name, args, kwargs, out):
        name = name.strip("_")
        given = flat_tensors((args, kwargs))
        chosen = any(t in self.chosen for t in given)
        indices = [t for t in given if not t.is_floating_point()]
        if chosen or any(self.cuts.ends.get(t) for t in indices):
            self.chosen.update((t, True) for t in flat_tensors(out))
        if not isinstance(out, torch.Tensor) or not torch.is_grad_enabled():
            return
        origins = {origin for t in given for origin in self.followed.get(t, ())}
        if out.requires_grad:
            if name in ADDS:
                self.added += [(origin, out) for origin in origins]
            return
        off = name in SCALES and any(isinstance(x, int | float) and x <= 0 for x in args)
        if origins and name in (*KEEPS, *ADDS) and not off:
            self.followed[out] = origins
        of_loss = is_loss(func, name)
        text = self._of(name, args, kwargs, of_loss) if of_loss or name in ("sub", "rsub") else None
        if text:
            self.followed[out] = {text}

    def _of(self, name, args, kwargs, of_loss):
        """(sentence, whether both hold the same numbers) or None."""
        given = [t for t in flat_tensors((args, kwargs)) if t.is_floating_point()]
        at = f"{name} at {line_now()}"
        weight = any(isinstance(t, torch.nn.Parameter) for t in given)  # a frozen one, of a penalty
        if len(given) > 1 and not weight and _same(name, *given[:2], **kwargs):
            return (
                f"{at} compares the same numbers, whatever the weights are: "
                "should one of the two come from another network?", True
            )  # fmt: skip
        ends = {end for t in given for end in self.cuts.ends.get(t, ())}
        ends = {end for end in ends if end.name not in LIKE}
        if any(t in self.chosen for t in given):  # an average of them may be all that moves
            return None
        if of_loss and ends and all(end.is_cut for end in ends):
            return f"{at} has no graph: {min(ends)}: leave that out, or the term", False
        return None


def _same(name, a, b, log_target=False, **kwargs):
    """Whether a loss is given one thing twice, which is not the same number everywhere."""
    if a.shape != b.shape or a.numel() < 4 or bool((b == b.flatten()[0]).all()):
        return False
    if name == "kl_div":
        a = a if log_target else a.exp()
    elif name == "cross_entropy":
        a = a.softmax(1 if a.dim() > 1 else 0)
    return torch.allclose(a.float(), b.float(), 1e-4, 1e-6)
