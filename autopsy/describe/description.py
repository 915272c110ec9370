"""
Description: the facts of a run, printed after its last line: the loop, a step, an evaluation.
"""

from weakref import WeakKeyDictionary

import torch
from torch.overrides import TorchFunctionMode

from ..frames import said
from ..tensors import few, flat_tensors
from ..watch.calls import BACKWARD, SLOPES
from ..watch.deferred import params_of
from ..watch.events import Events
from ..watch.forward import Forward
from ..watch.graph import nodes_of
from ..watch.names import names_of
from .forward import of_forward
from .loop import Loop
from .loss import of_functions, of_loss, of_rest
from .trace import Trace, about, called_as, here

LOOK = 2  # the step of each optimizer whose forward passes are made once more
MANY = 2000  # calls


class Description:
    """`listeners`: what must be told of the events of a script."""

    def __init__(self, watch):
        self.loop, self.step, self.evaluation = Loop(watch), OneStep(watch), Evaluation(watch)
        self.listeners = [self.loop, self.step, self.evaluation]

    def __str__(self):
        lines = ["what this run did, to compare with what was meant"]
        for title, found in (
            ("the loop", self.loop.lines()),
            *self.step.parts,
            ("the first evaluation", self.evaluation.lines()),
        ):
            if found := [*found]:
                lines += [f"  {title}", *(f"    {line}" for line in found)]
        return "\n".join(lines)


class OneStep(Events):
    """What the forward passes before one step of each optimizer compute."""

    def __init__(self, watch):
        self.recorder, self.names = watch.recorder, watch.names
        self.seen = WeakKeyDictionary()  # optimizer: steps
        self.parts = []  # (title, lines)

    def before_step(self, optimizer, losses, norm, moved):
        if self.recorder.slope <= self.recorder.latest:
            return  # the passes of a closure are still to come, or another's step has used them
        step = self.seen[optimizer] = self.seen.get(optimizer, -1) + 1
        if step != LOOK:
            return
        title = f"step {step} (from 0) of {type(optimizer).__name__} at {here()}, made once more"
        try:
            lines = self._made_again(optimizer)
        except Exception as error:
            lines = [f"it cannot be made again ({said(error)})"]
        self.parts.append((title, lines))

    def _made_again(self, optimizer):
        calls = self.recorder.calls
        if not self.recorder.whole or len(calls) > MANY:
            return ["it was not recorded as a whole"]
        names = {}
        for root, prefix in names_of(list(self.names.roots)).items():
            names |= {m: ".".join(filter(None, (prefix, n))) for n, m in root.named_modules()}
        with Forward(self.recorder) as again:
            if not again.calls:
                return ["it cannot be made again: there is no loss, or a hook of the script"]
            mine = len({*again.losses})
            passes = [call for call in calls if call.function is BACKWARD]
            again.losses = {made for call in passes for made in call.uses()}
            again.calls = [call for call in calls if call.function not in SLOPES]
            with Trace(names) as trace:
                again()
            losses = again.results[-mine:]  # the others are those of other optimizers
            params = [p for p in params_of(optimizer) if p.requires_grad]
            with torch.enable_grad():
                return [
                    *of_forward(trace),
                    *of_loss(trace, losses, params),
                    *of_functions(trace, {*nodes_of(losses)}),
                    *of_rest(trace, again.results),
                ]


class Evaluation(Events):
    """What networks are given in evaluation, and what drops there."""

    def __init__(self, watch):
        self.names = watch.names
        self.given = WeakKeyDictionary()  # network: what it is given
        self.drops = {}  # lines

    def during(self, call, args, kwargs):
        module = call.function
        if call.grad or module in self.given or not any(True for _ in module.parameters()):
            return ()
        mode = "train" if module.training else "eval"
        text = few(map(about, flat_tensors((args, kwargs))), 3, "; ")
        self.given[module] = f"in {mode} mode at {here()} is given {text}"
        return [] if module.training else [Drops(self.drops)]

    def lines(self):
        for module, text in self.given.items():
            yield f"{called_as(self.names, module)} {text}"
        if self.drops:
            yield f"it drops in eval mode at {few(self.drops, 6)}"


class Drops(TorchFunctionMode):
    """Notes where a dropout drops."""

    def __init__(self, lines):
        super().__init__()
        self.lines = lines

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if "dropout" in getattr(func, "__name__", "") and kwargs.get("training"):
            self.lines[here()] = True
        return func(*args, **kwargs)
