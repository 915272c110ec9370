"""
No influence: does an input of a network change anything that the network makes of a batch?

A mask is applied to scores that nobody uses, a condition is projected and then left out, and
nothing fails. In two of the first steps, and in ever fewer later ones, the call of a network is
made again with the rows of one input exchanged among the samples. It is told if all that the
network returns and holds stays the same bit by bit, also with one row for all samples. Labels, what
the script itself uses afterwards, and what no function reads (an interface that several networks
share) are no such thing; nor is a network that multiplies by the number 0, a switch. At the end of
the script, with all that was switched on since, the last such call is made once more.
"""

import inspect
import re
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ...frames import line_now, line_of
from ...tensors import PLAIN, flat_tensors, mapped, storage_of
from ...watch.calls import ResultRef
from ...watch.events import Events
from ...watch.experiment import Experiment, can_be_made_again, inputs_of, own_kinds, same
from ...watch.following import Follower
from ...watch.functions import COPIES
from ...watch.interrupts import no_evidence

FIRST, LATE = 2, 16  # steps: of the first look, and of the last one at least
OFTEN = 3  # looks
MOST = 8  # inputs of one network, and networks
LABELS = re.compile(r"label|target|tgt|truth|gt|answer|ys?|y_.*|action.*|reward.*|idx|ind(ex|ices)")
PRODUCTS = ("mul", "__mul__", "__rmul__")
ASKED = ("__get__", "__len__", "size", "dim", "numel")  # what reads no number of it
MEANT = re.compile("unused|not used|ignore[ds]? |interface|compatib|for api", re.I)


class NoInfluence(Events):
    """Inputs of the script's own networks."""

    recorded_only = True

    def __init__(self, watch):
        self.recorder = watch.recorder
        self.inputs = WeakKeyDictionary()  # network: {name: Input} without influence so far
        self.last = WeakKeyDictionary()  # network: its last such call

    def before_step(self, optimizer, losses, norm, moved):
        step, recorder = self.recorder.steps, self.recorder
        if step < FIRST or not (step in (2, 5) or step.bit_count() < 2) or not recorder.is_complete:
            return
        if recorder.hooks.world > 1:
            return
        calls = [c for c in recorder.of_this_step if isinstance(c.function, nn.Module) and c.grad]
        for network in dict.fromkeys(c.function for c in calls if c.function.training):
            seen = self.inputs.get(network)
            if seen is None and len(self.inputs) < MOST and _is_looked_at(network):
                seen = self.inputs[network] = {None: Input("")}
            mine = [call for call in calls if call.function is network]
            if seen and len(mine) == 1 and len(inputs_of(mine[0])) > 1:
                self._look(mine[0], seen)

    def _look(self, call, seen):
        """Once more with each of the inputs exchanged. What raises there is no evidence."""
        found = {}  # name: the line that reads it
        is_first = None in seen
        with no_evidence, Experiment(self.recorder, call) as again:
            rows = _rows(call, again.given)
            inputs = {name: t for name, t in rows if is_first or name in seen}
            before = again()
            with Readers(inputs) as readers:
                reproducible = same(before, again())
            if reproducible:
                still = [name for name, t in inputs.items() if _is_still(again, before, name, t)]
                if not is_first or len(still) < len(inputs):  # else it is the network that is dead
                    still = [name for name in still if not self._is_used(call, name)]
                    lines = {} if readers.switched_off else readers.lines
                    found = {name: lines[name] for name in still if name in lines}
                if found:
                    given = mapped(_without_graph, (again.given.args, again.given.kwargs))
                    plain = {
                        "function": None,
                        "carried": (),
                        "states": (),
                        "left": (),
                        "buffers": {},
                    }
                    last = replace(call, args=given[0], kwargs=given[1], **plain)
                    self.last[call.function] = last  # it does not hold the network
        known = {name: seen.get(name) or Input(line_of(call.frames)) for name in found}
        for name, line in found.items():
            known[name].see(self.recorder.steps, line)
        seen.clear()
        seen.update(known)

    def _is_used(self, call, name):
        """Whether the script gives it to something else, too."""
        mine = self._sources(inputs_of(call)[name])
        for other in self.recorder.calls:
            is_module = isinstance(other.function, nn.Module)
            if other is not call and (is_module or other.number > call.number):
                refs = {*other.uses()}
                storages = {storage_of(t) for _, t in other.given()}
                if any((x in refs) if isinstance(x, ResultRef) else storage_of(x) in storages
                       for x in mine):  # fmt: skip
                    return True
        return False

    def _sources(self, x):
        """It, and what it is a copy of."""
        sources = [x]
        makers = {call.number: call for call in self.recorder.calls}
        for source in sources:
            call = makers.get(source.number) if isinstance(source, ResultRef) else None
            if call and COPIES.fullmatch(call.name):
                sources += [a for a in call.args[:1] if isinstance(a, ResultRef | torch.Tensor)]
        return sources

    def sentences(self):
        for network, seen in self.inputs.items():
            often = [name for name, x in seen.items() if x.looks >= OFTEN and x.step >= LATE]
            for name in self._at_the_end(network, often) if often else ():
                one, kind = seen[name], type(network).__name__
                yield (
                    f"the input {name} of {kind} at {one.line} has no influence on the loss: "
                    f"in {one.looks} steps up to step {one.step} its rows were exchanged "
                    f"among the samples, and all that {kind} makes stayed the same: "
                    f"{one.reader} reads it first, and nothing comes of that"
                )

    def _at_the_end(self, network, names):
        """Those of these inputs that have no influence now."""
        still = []
        call = replace(self.last[network], function=network)
        with no_evidence, Experiment(self.recorder, call) as again:
            before, given = again(), again.given.arguments
            still = [name for name in names if _is_still(again, before, name, given[name])]
        return still


class Input:
    """An input without influence so far."""

    def __init__(self, line):
        self.line = line
        self.looks, self.step, self.reader = 0, -1, ""

    def see(self, step, reader):
        self.looks, self.step, self.reader = self.looks + 1, step, reader


class Readers(Follower):
    """The line of the first function that is given each of these inputs; and whether one multiplies
    by the number 0."""

    def __init__(self, inputs):
        super().__init__()
        self.names = {storage_of(t): name for name, t in inputs.items()}
        self.lines, self.switched_off = {}, False

    def function_called(self, func, name, args, kwargs, out):
        self.switched_off |= name in PRODUCTS and any(map(_is_zero, args))
        for t in flat_tensors((args, kwargs)):
            if name not in ASKED and storage_of(t) in self.names:
                self.lines.setdefault(self.names[storage_of(t)], line_now())


def _is_looked_at(network):
    """Whether its forward is the script's, and can be made again."""
    own, code = type(network) in own_kinds(network), _source(network)
    return own and can_be_made_again(network) and not MEANT.search(code)


def _source(network):
    try:
        return inspect.getsource(type(network).forward)
    except (OSError, TypeError):
        return ""


def _is_zero(x):
    """Whether it is the number 0, and nothing that trains."""
    is_tensor = torch.is_tensor(x)
    if is_tensor and (x.requires_grad or x.numel() > 1):
        return False
    return (is_tensor or type(x) in (int, float)) and float(x) == 0


def _without_graph(x):
    return x.detach() if torch.is_tensor(x) else x


def _rows(call, given):
    """(name, tensor) of each input that has a row for each sample, and not the same in all."""
    size = call.shape[:1]
    for name, t in [*given.arguments.items()][:MOST]:
        plain = type(t) in PLAIN and t.layout is torch.strided and t.shape[:1] == size
        if plain and t.numel() and not LABELS.fullmatch(name) and not (t == t[:1]).all():
            yield name, t


def _is_still(again, before, name, t):
    """Whether nothing moves, whatever rows of this input take the place of others."""
    return all(same(before, again(**{name: t[rows]})) for rows in _exchanges(t))


def _exchanges(t):
    """Rows in place of rows: each one further, and for all the one with the least or largest sum.
    So a sum or a maximum of all rows is another, too."""
    sums = t.detach().double().flatten(1).sum(1) if t.dim() > 1 else t.detach().double()
    yield torch.arange(len(t), device=t.device).roll(1)
    for row in (sums.argmin(), sums.argmax()):
        yield row.expand(len(t))
