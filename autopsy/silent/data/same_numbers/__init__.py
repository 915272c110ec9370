"""
Same numbers: does each epoch draw the random numbers of the one before?

manual_seed(0) in the loop over epochs or in an evaluation, or a worker_init_fn with a seed of its
own: the order of the samples, the noise and the dropout come again. The generators are looked at
after the first and the second step of the first passes over a training loader, in workers at their
start and after a batch. Told are three passes in a row that begin alike and draw numbers. No word
of an evaluation, of one step a pass, of a seed within a pass (one for each sample, say), and of
states that were put back (fork_rng) or that weights were put back with.
"""

import linecache
import os
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, WeakSet

from torch.utils.data import IterableDataset, RandomSampler

from ....frames import line_now, script_frames_now
from ....watch.events import Events
from ...shared.passes import Loop, Loops, writes_to
from .workers import Report, are_forks, in_place, states

OFTEN = 3  # passes in a row
LOOKS = 8  # passes
OPTIMIZERS = 8
MANY = 1000  # seeds: a script that seeds each sample is not asked for its lines
SEEDS = {"torch": "torch.manual_seed()", "numpy": "numpy.random.seed()", "random": "random.seed()"}


@dataclass(eq=False)
class Begun:
    """An iterator of a loader."""

    seeds: int = 0  # before it
    is_random: bool = False  # is the order of its samples?
    shuffles: bool = False  # by the generator of torch
    report: Report | None = None  # of its workers


@dataclass(eq=False)
class Pass:
    """A pass over a training loader."""

    begun: Begun
    seeded: dict  # kind: (the line that seeded it before the first step, how many seeds until then)
    seeds: int  # until the first step
    first: dict  # kind: state after the first step
    steps: int = 1
    drawn: set = field(default_factory=set)  # kinds of which the second step has drawn

    def draws(self, kind):
        """Whether it draws numbers that follow from the seed, in this process or in workers. Those
        of an order that nobody shuffles may be meant to be the same ones."""
        if not self.begun.is_random:
            return False
        _, seeds = self.seeded[kind]
        shuffles = kind == "torch" and self.begun.shuffles and seeds <= self.begun.seeds
        numbers = self.begun.report.numbers() if kind == "torch" and self.begun.report else {}
        return kind in self.drawn or shuffles or any(drawn for _, drawn in numbers.values())


@dataclass(eq=False)
class Trained:
    """An optimizer, and the loader that it trains with."""

    loop: Loop
    over: bool
    writes: int = 0  # to its first weight, so far
    of_a_step: int = 0
    begun: int = 0
    passes: list = field(default_factory=list)

    def windows(self):
        """Passes that follow each other."""
        for k in range(len(self.passes) - OFTEN + 1):
            found = self.passes[k : k + OFTEN]
            if all(one.steps > 1 for one in found):
                yield found


class SameNumbers(Events):
    """Seeds, generators and the passes over training loaders."""

    def __init__(self, watch):
        self.loops = Loops()
        self.optimizers = WeakKeyDictionary()
        self.all = []
        self.begun = WeakKeyDictionary()  # loop: its last iterator
        self.evaluates = WeakSet()  # loops that do not train
        self.is_fresh = False  # has no backward pass come since the last iterator?
        self.seeds = 0
        self.lines = {}  # kind: (line that has seeded it since the last step, seeds until then)

    def seeded(self, kind):
        self.seeds += 1
        of_data = [name for *_, name in script_frames_now()[-1:]] == ["__iter__"]
        if self.seeds <= MANY and not of_data:  # a stream is the same in each pass, as a file is
            self.lines[kind] = line_now(), self.seeds

    def iterated(self, loader):
        loop, self.is_fresh = self.loops.begin(loader), True
        begun = self.begun[loop] = Begun(self.seeds)
        if loop.begun > LOOKS:
            return ()
        sampler = loader.sampler
        own = getattr(sampler, "generator", None) is None and loader.generator is None
        begun.is_random = isinstance(sampler, RandomSampler)
        begun.shuffles = own and begun.is_random
        streams = isinstance(loader.dataset, IterableDataset)  # the same in each pass, as a file is
        if streams or not loader.num_workers or not are_forks(loader):
            return ()
        begun.report = Report(loader)
        return [in_place(loader, begun.report)]

    def backward(self, losses):
        self.is_fresh = False

    def evaluated(self, module):
        if self.is_fresh and not module.training:
            self.evaluates.add(self.loops.last)

    def loaded(self, module, state, answer):
        """Weights come back: it may be another run."""
        for seen in self.optimizers.values():
            seen.passes = []

    def stepped(self, optimizer):
        seen = self.optimizers.get(optimizer)
        if seen is None:
            over = self.loops.last is None or len(self.all) == OPTIMIZERS
            seen = self.optimizers[optimizer] = Trained(self.loops.last, over)
            if not over:
                self.all.append(seen)
        if not seen.over:
            first = next((p for g in optimizer.param_groups for p in g["params"]), None)
            self._look(seen, 0 if first is None else writes_to(first))
        if self.lines:
            self.lines = {}

    def _look(self, seen, writes):
        since, seen.writes = writes - seen.writes, writes
        if seen.begun != seen.loop.begun:
            seen.begun = seen.loop.begun
            if seen.passes and seen.of_a_step not in (0, since):
                seen.passes = []  # weights have begun anew: it may be another run
            if seen.loop in self.evaluates:
                seen.over, seen.passes = True, []
            elif len(seen.passes) == LOOKS:
                seen.over = True
            else:
                begun = self.begun[seen.loop]
                seen.passes.append(Pass(begun, self.lines, self.seeds, states()))
        elif seen.passes:
            last, seen.of_a_step = seen.passes[-1], since
            last.steps += 1
            if last.seeds != self.seeds:
                seen.over, seen.passes = True, []
            elif last.steps == 2:
                now = states()
                last.drawn = {kind for kind in now if now[kind] != last.first[kind]}

    def sentences(self):
        return dict.fromkeys(text for seen in self.all if (text := self._about(seen)))

    def _about(self, seen):
        for passes in seen.windows():
            for kind, (line, _) in passes[-1].seeded.items():
                alike = len({one.first[kind] for one in passes}) == 1
                alike &= all(one.seeded.get(kind, ("",))[0] == line for one in passes[1:])
                if alike and passes[-1].draws(kind):
                    within = " (or within torch.random.fork_rng())" if kind == "torch" else ""
                    return (
                        f"each pass over the loader at {seen.loop.line} draws the same random "
                        f"numbers: {SEEDS[kind]} at {line} runs before each with the same seed: "
                        f"call it once, before the first pass{within}"
                    )
            if line := _of_workers([one.begun.report for one in passes]):
                return (
                    f"the workers of the loader at {seen.loop.line} draw the same random numbers "
                    f"in each pass: {line} seeds them alike: add torch.initial_seed() % 2**31 to "
                    "that seed, which is another in each pass"
                )
        return ""


def _of_workers(reports):
    """The line of a worker_init_fn that gives its workers the same seed, though those of the loader
    differ; or ""."""
    if not all(report and report.function for report in reports):
        return ""
    seeds = {tuple(report.seeds()[:1]) for report in reports}
    first, *_, last = numbers = [report.numbers() for report in reports]
    alike = [
        key for key, (state, drawn) in last.items()
        if drawn and all(other.get(key, (0,))[0] == state for other in numbers)
    ]  # fmt: skip
    if len(seeds) < len(reports) or not alike or not first:
        return ""

    function = reports[-1].function
    while hasattr(function, "func"):  # a partial
        function = function.func
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None) or type(function).__call__.__code__
    file, first = code.co_filename, code.co_firstlineno
    lines = dict.fromkeys(n for *_, n in code.co_lines() if n)
    seeding = [n for n in lines if "seed(" in linecache.getline(file, n)]
    return f"{os.path.basename(file)}:{[*seeding, first][0]} in {code.co_name}"
