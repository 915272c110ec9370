"""
Own state: is a target network the trained network itself?

`self.target = self.net` makes no copy: the target moves with every step, and each update of it
gives a network its own tensors. Told is a load_state_dict() between two names of one network, or
under one name that says target, average or the like, again and again with steps in between; and an
average of weights and of these weights themselves. No word of a load that is made once, or where a
wrapper is loaded from what it wraps; nor of a line that also mixes in other weights, or brings a
copy back (of the weights before an average took their place).
"""

import linecache
import re
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...frames import call_at, line_of, script_frames_now
from ...tensors import few, storage_of
from ...watch.calls import ResultRef
from ...watch.events import Events

OFTEN = 2  # loads, with steps in between
MIXES = 3  # steps that mix a weight with itself
SMALL = 1e-6  # difference of a sum of factors from 1
DEEP = 8  # operations that made what is written
LOAD = re.compile(r"([\w.\[\]'\"]+)\.load_state_dict\(\s*([\w.\[\]'\"]+)\.state_dict\(\)")
COPY = re.compile(r"(\w+)(?:\.data)?\.copy_\(\s*(\w+)")
OTHER = re.compile(
    r"target|tgt|old|slow|ema|teacher|momentum|frozen|fixed|delay|lag|prev|ref|best|shadow|"
    r"average|avg|prime|hat|copy|backup|second|dst|dest|_t\b",
    re.I,
)
WRAPS = re.compile(r"module|orig_mod|ddp|parallel|wrap|compile|raw|without|infer|eval", re.I)
SAME = ("detach", "clone", "part_of", "to", "float", "type", "contiguous")
SCALES = ("mul", "__mul__", "__rmul__", "multiply")


@dataclass
class Steps:
    """Before how many steps something was done."""

    what: Any  # the two names of a load, or the weight
    times: int = 0
    last: int = -1

    def add(self, step):
        self.times += step != self.last
        self.last = step


class OwnState(Events):
    """What is loaded into modules, and written into weights by hand."""

    def __init__(self, watch):
        self.recorder, self.names = watch.recorder, watch.names
        self.loads = {}  # line: Steps, of a load between two names of one network
        self.mixed = {}  # line: {id of a storage: Steps, of a weight that was mixed with itself}
        self.copies = set()  # lines of these that copy
        self.others = set()  # lines that mix other weights in
        self.scaled = {}  # id of a storage: the number by which the weight was multiplied last

    def loaded(self, module, state, answer):
        name, p = next(iter(module.named_parameters()), ("", None))
        t = state.get(name)
        if not isinstance(t, Tensor) or storage_of(t) is not storage_of(p):
            return
        mine = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        given = [(mine[n], t) for n, t in state.items() if n in mine and isinstance(t, Tensor)]
        pairs = [(p, t) for p, t in given if p.is_floating_point() and p.numel()]
        if all(storage_of(t) is storage_of(p) for p, t in pairs):
            frames = script_frames_now()
            code = call_at(*frames[0][:2])
            if found := LOAD.search(code):
                trains = any(p.requires_grad for p, _ in pairs)
                self._loads(line_of(frames), found.groups(), trains)

    def _loads(self, line, names, trains):
        name, source = (name.removeprefix("self.") for name in names)
        is_meant = OTHER.search(name) and not any(map(WRAPS.search, names))
        if is_meant and (trains or name == source):
            self.loads.setdefault(line, Steps(names)).add(self.recorder.steps)

    def wrote(self, line, weights, name, given):
        """load_state_dict() copies, too."""
        if line in self.others:
            return
        name, calls = name.removeprefix("_foreach_"), self.recorder.calls
        for p, values in zip(weights, given, strict=True):
            storage = storage_of(p)
            tensors = [self.recorder.maker(x) or x for x in values if isinstance(x, Tensor)]
            numbers = [x for x in values if isinstance(x, int | float)]
            share = _share(tensors[0], storage, calls) if tensors else None
            if name == "mul_" and numbers and not tensors:
                self.scaled[id(storage)] = numbers[0]
            elif name == "copy_" and share == (1.0, 1):
                if _is_between_two() and not _is_backup(tensors[0], calls):
                    self.copies.add(line)
                    self._mixes(line, p, (1.0, 2))
            elif name == "copy_":
                self._mixes(line, p, share)
            elif name == "lerp_":
                self._mixes(line, p, share and (share[0], 2))
            elif name in ("add_", "add", "__iadd__") and tensors:
                factor, alpha = self.scaled.pop(id(storage), 0.0), [*numbers, 1.0][0]
                self._mixes(line, p, share and (factor + alpha * share[0], 2))

    def _mixes(self, line, p, share):
        """`share`: of what is written into p, see _share(). Its factors must add up to 1."""
        if not share or abs(share[0] - 1) > SMALL:
            self.others.add(line)
        elif share[1] > 1:
            weights = self.mixed.setdefault(line, {})
            weights.setdefault(id(storage_of(p)), Steps(p)).add(self.recorder.steps)

    def sentences(self):
        for line, load in self.loads.items():
            to, source = (name.removeprefix("self.") for name in load.what)
            if load.times >= OFTEN and to == source:
                yield (
                    f"{to} loads its own state_dict() at {line}, which changes nothing "
                    f"({load.times} times, with steps in between): was that of the network that "
                    "trains meant?"
                )
            elif load.times >= OFTEN:
                yield (
                    f"{to} is no copy of {source}: they are one network, so load_state_dict() at "
                    f"{line} changes nothing ({load.times} times, with steps in between), and "
                    f"each step moves both: make it with copy.deepcopy({source})"
                )
        for line, weights in self.mixed.items():
            often = [seen.what for seen in weights.values() if seen.times >= MIXES]
            often = [p for p in often if self._trains(p)]
            if not often or line in self.others:
                continue
            names = few([*map(self.names.of, often[:4]), *often[4:]], 4)
            if line in self.copies:
                yield (
                    f"{line} copies {names} into these weights themselves, which changes nothing: "
                    "what is copied there is no copy of them: make one with clone(), or of a "
                    "network with copy.deepcopy()"
                )
            else:
                yield (
                    f"{line} updates {names} by these weights themselves: the target is the "
                    "trained network, not a copy of it, and moves with every step: make it with "
                    "copy.deepcopy()"
                )

    def _trains(self, p):
        weights = (q for root in list(self.names.roots) for q in root.parameters())
        return any(q.requires_grad for q in weights if storage_of(q) is storage_of(p))


def _is_between_two():
    """Whether the line copies one thing into another, by its names, and the lines around say which
    networks these are."""
    file, number, *_ = script_frames_now()[0]
    code = call_at(file, number)
    found = COPY.search(code)
    code = "".join(linecache.getlines(file)[max(0, number - 4) : number])
    return found and len({*found.groups()}) > 1 and OTHER.search(code) and not WRAPS.search(code)


def _is_backup(x, calls):
    """Whether it is a clone: what the weight was, before something else was written there."""
    while isinstance(x, ResultRef):
        call = next((call for call in reversed(calls) if call.number == x.number), None)
        if call is None or call.name in ("clone", "to"):
            return True
        x = next(iter(call.args), None) if call.name in SAME else None
    return False


def _share(x, storage, calls, deep=0):
    """(the sum of the factors, the number of terms), if x is a sum of the weight in this storage
    times numbers; else None."""
    if isinstance(x, Tensor):
        return (1.0, 1) if storage_of(x) is storage else None
    if not isinstance(x, ResultRef) or deep == DEEP:
        return None
    call = next((call for call in reversed(calls) if call.number == x.number), None)
    if call is None or not call.args:
        return None

    given = [a for a in call.args if isinstance(a, Tensor | ResultRef)]
    terms = [_share(a, storage, calls, deep + 1) for a in given]
    numbers = [a for a in call.args if isinstance(a, int | float)]
    if not terms or None in terms:
        return None
    name, first, last = call.name, terms[0], terms[-1]
    if name in SAME:
        return first
    if name in SCALES and len(terms) == len(numbers) == 1:
        return numbers[0] * first[0], first[1]
    if name in ("add", "__add__", "__radd__") and len(terms) == 2:
        alpha = call.kwargs.get("alpha", 1.0)
        return first[0] + alpha * last[0], first[1] + last[1]
    if name == "lerp" and len(terms) == 2 and numbers:
        return first[0] + numbers[0] * (last[0] - first[0]), first[1] + last[1]
    return None
