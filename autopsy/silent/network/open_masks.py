"""
Open masks: does a mask hide nothing, although the ids of the same call are padded?

A mask of ones for all positions of a padded batch lets padding take part, and nothing fails. In the
first steps a mask is an argument with "mask" in its name, of the network or of a module within. Ids
are padded if one value stands in runs at the ends of rows (or at all beginnings), of different
lengths, and nowhere else. The backward pass shows whether these positions, which have no label,
reach the loss. A network that is causal, or hides them by other means, gives them no gradient. If
any mask has two values, nothing is told.
"""

import inspect
import re
from contextlib import ExitStack, contextmanager, suppress

import torch

from ...frames import line_of
from ...modes import is_compiled
from ...tensors import PLAIN
from ...watch.budget import FIRST
from ...watch.calls import named_arguments
from ...watch.events import Events
from ...watch.graph import nodes_of
from ...watch.interrupts import no_evidence
from ..shared.classification import NEAR, NLL, labels_of
from ..shared.padding import ROWS, padding_of

OFTEN = 4  # steps
OTHER = re.compile("loss|label|target|tgt|causal|head|mlm|drop|span|action|legal|valid")


class OpenMasks(Events):
    """Masks of one value, in calls that are given padded ids."""

    recorded_only = True

    def __init__(self, watch):
        self.recorder = watch.recorder
        self.given = {}  # of this step: shape of ids: names of masks of one value
        self.line = ""
        self.hides = False  # some mask has two values
        self.hooks = []  # on nodes of the backward pass
        self.reached = []  # (step, value, side, names, shape, does padding reach the loss?)

    def during(self, call, args, kwargs):
        module = call.function
        asked = call.grad and module.training and self.recorder.steps < FIRST
        if not asked or self.hides or is_compiled([*module.modules()]):
            return ()
        self.line = line_of(call.frames)
        self._note(module, args, kwargs)
        return [self._looking([part for part in module.modules() if part is not module])]

    @contextmanager
    def _looking(self, parts):
        with ExitStack() as hooks:
            for part in parts:
                with suppress(TypeError, ValueError):
                    if any("mask" in name for name in inspect.signature(part.forward).parameters):
                        hook = part.register_forward_pre_hook(self._note, with_kwargs=True)
                        hooks.enter_context(hook)
            yield

    def _note(self, module, args, kwargs):
        with no_evidence:
            for name, t in named_arguments(module, args, kwargs):
                name = str(name)
                is_mask = "mask" in name and not OTHER.search(name) and type(t) in PLAIN
                if is_mask and 1 < t.dim() < 5 and len(t) >= ROWS:
                    if bool((t == t.flatten()[0]).all()):
                        names = self.given.setdefault((len(t), t.shape[-1]), {})
                        names[f"{name} of {type(module).__name__}"] = True
                    else:
                        self.hides = True

    def backward(self, losses):
        given, self.given = self.given, {}
        if given and not self.hides:
            with no_evidence:
                self._look(given, losses)

    def _look(self, given, losses):
        ends = [node for node in nodes_of(losses, NEAR) if hasattr(node, "_saved_target")]
        for node in nodes_of(losses) if ends else ():
            if node.name() == "EmbeddingBackward0":
                ids = node._saved_indices
                names = given.get(tuple(ids.shape))
                padding = padding_of(ids) if names else None
                if padding and not any(_counts(end, ids, padding.at) for end in ends):
                    self.hooks.append(node.register_prehook(self._reads(padding, names, ids)))

    def _reads(self, padding, names, ids):
        step = self.recorder.steps

        def note(slopes):
            with no_evidence, torch.no_grad():
                reached = (slopes[0].detach()[padding.at] != 0).any()
                about = step, padding.value, padding.side, tuple(names), (*ids.shape,)
                self.reached.append((about, reached))

        return note

    def passed(self):
        for hook in self.hooks:
            hook.remove()
        self.hooks = []

    def sentences(self):
        reached = [about for about, reached in self.reached if reached]
        values = {(value, side) for _, value, side, *_ in reached}
        if self.hides or len(reached) < len(self.reached) or len(values) != 1:
            return
        steps = {step for step, *_ in reached}
        if len(steps) >= OFTEN:
            _, value, side, names, shape = reached[-1]
            yield (
                f"the argument {names[0]}, in the call at {self.line}, has one value and hides "
                f"nothing, in {len(steps)} steps, though rows of the ids {[*shape]} {side} with "
                f"runs of {value} of different lengths (padding?), and these reach the loss: make "
                f"it of ids != {value}"
            )


def _counts(node, ids, at):
    """Whether padding itself may have labels: only a few of each row, or ignored ones, are none."""
    labels = labels_of(node) if node.name() in NLL else node._saved_target
    if labels.numel() == ids.numel() and node.name() in NLL:
        return not (labels.view(ids.shape)[at] < 0).all()
    return labels.shape[:1] != ids.shape[:1] or 2 * labels.numel() > ids.numel()
