"""
Description: the facts of a run, printed after its last line: the loop, a step, an evaluation.
"""

from collections import Counter
from weakref import WeakKeyDictionary

import torch

from ..frames import first_line_of
from ..tensors import extent, few, flat_tensors
from ..watch.calls import BACKWARD
from ..watch.deferred import params_of
from ..watch.events import Events
from ..watch.following import Follower, drops
from ..watch.forward import Forward
from ..watch.graph import nodes_of
from .branches import Branches
from .forward import of_forward
from .loop import Loop
from .loss import idle_in, of_functions, of_loss, of_rest
from .source import unread
from .trace import Titles, Trace, here, listed

LOOK = 2  # the step of each optimizer whose forward passes are made once more
MANY = 5000  # calls


class Description:
    """`listeners`: what must be told of the events of a script."""

    def __init__(self, watch):
        titles = Titles(watch.names)
        self.loop, self.step = Loop(watch, titles), OneStep(watch, titles)
        self.evaluation = Evaluation(titles, self.step.described)
        self.branches = Branches(watch.hooks)
        self.listeners = [self.loop, self.step, self.evaluation, self.branches]

    def __str__(self):
        lines = ["what this run did, to compare with what was meant"]
        for title, found in (
            ("the loop", self.loop.lines()),
            *self.step.lines(),
            ("the first calls without a graph", self.evaluation.lines()),
            ("the source of the script", (*unread(), *self.branches.lines())),
        ):
            if found := [*found]:
                lines += [f"  {title}", *(f"    {line}" for line in found)]
        return "\n".join(lines)


class OneStep(Events):
    """What the forward passes before one step of each optimizer compute."""

    def __init__(self, watch, titles):
        self.recorder, self.titles = watch.recorder, titles
        self.seen = WeakKeyDictionary()  # optimizer: steps
        self.parts = []  # (title, the name of the first weight, lines)
        self.described = WeakKeyDictionary()  # network: the spans of what it is given
        self.idle = []  # of each of these, what is in no loss

    def before_step(self, optimizer, losses, norm, moved):
        if self.recorder.slope <= self.recorder.latest:
            return  # the passes of a closure are still to come, or another's step has used them
        step = self.seen[optimizer] = self.seen.get(optimizer, -1) + 1
        if step != LOOK:
            return
        title = f"step {step} (from 0) of {type(optimizer).__name__} at {here()}, made once more"
        names = self.titles.of_weights(params_of(optimizer)[:1]).values()
        try:
            lines = self._made_again(optimizer)
        except Exception as error:
            lines = [f"it cannot be made again ({first_line_of(error)})"]
        self.parts.append((title, next(iter(names), "no weight"), lines))

    def _made_again(self, optimizer):
        calls = self.recorder.calls
        if len(calls) > MANY:
            return [f"it makes {len(calls)} calls, which are too many to be made again"]
        if not self.recorder.is_complete:
            return ["it was not recorded as a whole: --share 1 records all"]
        with Forward(self.recorder) as again:
            if not again.calls:
                return ["it cannot be made again: there is no loss, or a hook of the script"]
            mine = {*again.losses}
            passes = [call for call in calls if call.function is BACKWARD]
            again.losses = {made for call in passes for made in call.uses()}
            again.calls = [call for call in calls if call.function is not BACKWARD]
            with Trace(self.titles.parts()) as trace:
                again()
            losses = [t for made, t in again.results.items() if made in mine]
            params = [p for p in params_of(optimizer) if p.requires_grad]
            self.idle.append(idle_in(trace, [*again.results.values()]))
            with torch.enable_grad():
                return [
                    *of_forward(trace, self.described),
                    *of_loss(trace, losses, params),
                    *of_functions(trace, {*nodes_of(losses)}),
                    *of_rest(trace),
                ]

    def lines(self):
        """(title, lines) of each optimizer's step, and of what is in no loss of any."""
        idle = []
        if self.parts and len(self.idle) == len(self.parts):  # else another's loss is not known
            idle = [text for text in self.idle[0] if all(text in one for one in self.idle)]
        last = [f"computed, and in no loss: {few(idle, 6, '; ')}"] if idle else []
        times = Counter(title for title, *_ in self.parts)
        parts = [
            (f"{title} (with {first})" if times[title] > 1 else title, lines)
            for title, first, lines in self.parts
        ]
        return [*parts, ("in none of these steps", last)]


class Evaluation(Events):
    """What networks are given in evaluation, and what drops there. `trained`: {network: the spans
    of what it is given in a step}."""

    def __init__(self, titles, trained):
        self.titles, self.trained = titles, trained
        self.given = WeakKeyDictionary()  # network: (what it is given, in words; the spans of it)
        self.drops = {}  # lines

    def during(self, call, args, kwargs):
        module = call.function
        if call.grad or module in self.given or not any(True for _ in module.parameters()):
            return ()
        mode = "train" if module.training else "eval"
        given = flat_tensors((args, kwargs))
        text = f"in {mode} mode at {here()} is given {listed(given) or 'no tensor'}"
        self.given[module] = text, [*map(extent, given)]
        return [] if module.training else [Drops(self.drops)]

    def lines(self):
        for module, (text, spans) in self.given.items():
            yield f"{self.titles.of(module)} {text}"
            pairs = zip(spans, self.trained.get(module, ()), strict=False)
            for i, (now, then) in enumerate(pairs):
                if _is_other(now, then):
                    numbers = f"{_span(now)}; in the step above {_span(then)}"
                    yield f"  tensor {i} (from 0) holds {numbers}"
        if self.drops:
            yield f"it drops in eval mode at {few(self.drops, 6)}"


def _span(span):
    return " .. ".join(dict.fromkeys(f"{x:.3g}" for x in span))


def _is_other(now, then):
    """Whether a span lies far beyond another one, or fills little of it."""
    width = then.high - then.low
    beyond = max(then.low - now.low, now.high - then.high) > max(width, 1e-6)
    return width > 0 and (beyond or 0 < now.high - now.low < width / 10)


class Drops(Follower):
    """Notes where a dropout drops."""

    def __init__(self, lines):
        super().__init__()
        self.lines = lines

    def function_called(self, func, name, args, kwargs, out):
        if drops(func, kwargs):
            self.lines[here()] = True
