"""
No influence: does an input of a network change anything that the network makes of a batch?

A mask is applied to scores that nobody uses, a condition is projected and then left out, and
nothing fails. In two of the first steps, and in ever fewer later ones, the call of a network is
made again with the rows of one input exchanged among the samples. It is told if all that the
network returns and holds stays the same bit by bit, also with one row for all samples. Labels, what
the script itself uses afterwards, and what no function reads (an interface that several networks
share) are no such thing; only lengths that nothing reads are, where no other network knows them.
"""

import inspect
import re
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ...frames import is_own, line_now, line_of
from ...tensors import PLAIN, flat_tensors, storage_of
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
ASKED = ("__get__", "__len__", "size", "dim", "numel")  # what reads no number of it
MEANT = re.compile("unused|not used|ignore[ds]? |interface|compatib|for api", re.I)


class NoInfluence(Events):
    """Inputs of the script's own networks."""

    recorded_only = True

    def __init__(self, watch):
        self.recorder = watch.recorder
        self.inputs = WeakKeyDictionary()  # network: {name: Input} without influence so far

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
                    lines = {name: readers.lines.get(name, "") for name in still}
                    found = {name: line for name, line in lines.items() if line or "len" in name}
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
            for name, one in seen.items():
                if one.looks < OFTEN or one.step < LATE:
                    continue
                kind = type(network).__name__
                if one.reader:
                    why = f"{one.reader} reads it first, and nothing comes of that"
                elif not _is_known(network, name):
                    why = "nothing reads it: what it should leave out (padding, say) counts"
                else:
                    continue
                yield (
                    f"the input {name} of {kind} at {one.line} has no influence on the loss: "
                    f"in {one.looks} steps up to step {one.step} its rows were exchanged "
                    f"among the samples, and all that {kind} makes stayed the same: {why}"
                )


class Input:
    """An input without influence so far."""

    def __init__(self, line):
        self.line = line
        self.looks, self.step, self.reader = 0, -1, ""

    def see(self, step, reader):
        self.looks, self.step, self.reader = self.looks + 1, step, reader


class Readers(Follower):
    """The line of the first function that is given each of these inputs."""

    def __init__(self, inputs):
        super().__init__()
        self.names = {storage_of(t): name for name, t in inputs.items()}
        self.lines = {}

    def function_called(self, func, name, args, kwargs, out):
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


def _is_known(network, name):
    """Whether its forward speaks of it, or that of another network of the script's does."""
    code = _source(network)
    if len(re.findall(rf"\b{name}\b", code)) > 1:
        return True
    left = [*nn.Module.__subclasses__()]
    for kind in left:
        left += kind.__subclasses__()
    others = [vars(kind).get("forward") for kind in left if kind is not type(network)]
    codes = [f.__code__ for f in others if inspect.isfunction(f) and is_own(f.__code__.co_filename)]
    return any(name in code.co_varnames[: code.co_argcount] for code in codes)
