"""
Late clip: are gradients clipped after the step that has used them?

A clip limits what the next step uses. One without a backward pass since the last step limits
nothing, if the gradients are cleared before the next step, or were cleared already. A limit of inf
or of thousands is there to read the norm. No word of an optimizer whose gradients are also clipped
in time, or read in between.
"""

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, ref

from ...frames import line_now
from ...watch.deferred import gradients_of, params_of
from ...watch.events import OutermostSteps

OFTEN = 3  # clips at least
MEANT = 100  # a limit of at most this is no way to read the norm
FOLLOWED = 4  # gradients of an optimizer


@dataclass(eq=False)
class Used:
    """What became of an optimizer's gradients after its last step."""

    name: str
    line: str = ""  # of that step
    ids: set = field(default_factory=set)  # of its parameters
    followed: list = ()  # references to some of them
    after: tuple = ()  # their gradients after the step
    reads: int = 0  # how often the script had read or set a gradient
    known: bool = True  # has every call since then been seen?
    fresh: bool = True  # has a backward pass come since then?
    cleared: bool = False
    in_time: bool = False  # has a clip ever come before a step?
    late: dict = field(default_factory=dict)  # (line, limit, cleared before) of a clip: how often


@dataclass(eq=False)
class Late:
    """A clip of gradients that a step has used. They are not cleared yet."""

    owners: list
    key: tuple
    reads: int


class LateClip(OutermostSteps):
    """Clips, and the steps before them."""

    recorded_only = True  # steps that follow each other are enough

    def __init__(self, watch):
        self.recorder, self.hooks = watch.recorder, watch.hooks
        self.optimizers = WeakKeyDictionary()
        self.all = []
        self.waiting = []

    def resumed(self):
        """What became of the gradients in between is not known."""
        self.inside, self.waiting = None, []
        for seen in self.all:
            seen.known = False

    def passed(self):
        for seen in self.all:
            seen.fresh = True

    def clipped(self, params, limit, norm):
        if not isinstance(limit, int | float) or limit > MEANT:
            return
        ids = {id(p) for p in params}
        owners = [s for s in self.optimizers.values() if not ids.isdisjoint(s.ids)]
        if not all(seen.known for seen in owners):
            return
        reads = self.recorder.gradient_reads
        used = [seen for seen in owners if not seen.fresh and seen.reads == reads]
        if len(used) < len(owners):
            for seen in owners:
                seen.in_time |= seen not in used
            return

        filled = {id(p) for p in params if p.grad is not None}
        if owners and filled <= set().union(*(seen.ids for seen in owners)):
            cleared = all(seen.cleared for seen in owners)
            late = Late(owners, (line_now(), limit, cleared), reads)
            if cleared:
                self._count(late)
            else:
                self.waiting.append(late)

    def cleared(self, owner):
        if self.inside is not None:
            return
        for seen in self.optimizers.values():
            if seen.known and not seen.fresh:
                pairs = zip(gradients_of(seen.followed), seen.after, strict=False)
                seen.cleared |= all(now != after for now, after in pairs)
        if self.waiting:
            params = params_of(owner) if hasattr(owner, "param_groups") else owner.parameters()
            ids = {id(p) for p in params}
            for late in [*self.waiting]:
                if all(seen.ids <= ids for seen in late.owners):
                    self.waiting.remove(late)
                    if late.reads == self.recorder.gradient_reads:
                        self._count(late)

    def _count(self, late):
        counts = late.owners[0].late
        counts[late.key] = counts.get(late.key, 0) + 1

    def before_step(self, optimizer, losses, norm, moved):
        """It uses what was clipped, after all."""
        super().before_step(optimizer, losses, norm, moved)
        ids = {id(p) for p in params_of(optimizer)} if self.waiting else ()
        for late in [*self.waiting]:
            if any(not seen.ids.isdisjoint(ids) for seen in late.owners):
                self.waiting.remove(late)
                for seen in late.owners:
                    seen.in_time = True

    def uses(self, optimizer):
        """A step, or one that the loss scaler skipped."""
        if optimizer not in self.optimizers:
            self.optimizers[optimizer] = Used(type(optimizer).__name__)
            self.all.append(self.optimizers[optimizer])
        seen, params = self.optimizers[optimizer], params_of(optimizer)
        some = [p for p in params if p.grad is not None]
        some = some[:: max(1, len(some) // FOLLOWED)]
        seen.line, seen.ids = line_now(), {id(p) for p in params}
        seen.followed = [ref(p) for p in some]
        seen.after, seen.reads = gradients_of(seen.followed), self.recorder.gradient_reads
        seen.known, seen.fresh, seen.cleared = True, not some, False

    def sentences(self):
        for seen in self.all:
            for (line, limit, cleared), n in seen.late.items() if not seen.in_time else ():
                if n >= OFTEN:
                    used = f"the step of {seen.name} at {seen.line}"
                    why = f"only after {used} has used them, and they are cleared before the next"
                    if cleared:
                        why = f"when those of {used} are cleared, and there are no new ones yet"
                    yield (
                        f"the gradients are clipped to {limit:g} at {line} {why}, so it limits "
                        f"nothing (seen {n} times): clip between backward() and step()"
                    )
