"""
Call order: does each backward pass lead to one step?

A loop is a protocol: clear, (forward, backward) for each micro-batch, unscale, clip, step. The
state of a few gradients of each optimizer shows what was done to them, whoever did it. Three
things are never right: a second step with gradients that were used, a clear that throws away a pass
like the one that is used, and a clip while the loss scale multiplies them.
"""

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, ref

from ...frames import line_now
from ...tensors import is_part
from ...watch.deferred import gradients_of, params_of
from ...watch.events import OutermostSteps
from ..shared.place import place_now

OFTEN = 3  # steps at least
SHARE = 0.75  # of the steps
FOLLOWED = 4  # gradients of an optimizer
TIGHT = 100  # a limit of the loss scale / 100 and more is meant for gradients that it multiplies


@dataclass
class Pass:
    """A backward pass that no step has used yet."""

    where: tuple  # see place_now()
    reads: int  # how often the script had read or set a gradient
    clipped: bool = False


@dataclass
class Gradients:
    """What became of an optimizer's gradients."""

    name: str
    line: str = ""  # of its last step
    followed: list = ()  # references to some of its parameters
    passes: int = 0  # backward passes of the script before that
    reads: int = 0
    led: bool = False  # did one lead to that step?
    used: tuple = ()  # the gradients after that
    latest: tuple = ()  # the gradients after the last call that was seen
    repeated: dict = field(default_factory=dict)  # lines of two steps with one gradient: how often
    pending: list = field(default_factory=list)  # passes since a step or a clear
    thrown: list = field(default_factory=list)  # (pass, line that cleared it) since the last step
    windows: int = 0  # steps that used a pass
    wasted: dict = field(default_factory=dict)  # line: (thrown away, all) of each such step


class CallOrder(OutermostSteps):
    """The order of backward passes, clears, clips and steps."""

    recorded_only = True  # steps that follow each other are enough

    def __init__(self, watch):
        self.recorder, self.hooks, self.scaling = watch.recorder, watch.hooks, watch.scaling
        self.names = watch.names
        self.optimizers = WeakKeyDictionary()
        self.all = []
        self.passes = 0
        self.clip = ()  # (parameters, limit, line), while the loss scale may multiply them
        self.scaled = {}  # (line, limit, loss scale): how often

    def resumed(self):
        """What became of the gradients in between is not known."""
        self.inside, self.clip = None, ()
        for seen in self.all:
            seen.pending, seen.thrown, seen.led = [], [], False
            seen.latest = gradients_of(seen.followed)

    # Passes and clears

    def passed(self):
        self.passes += 1
        self.clip = ()
        if self.inside is None:
            where = place_now()
            for seen in self.optimizers.values():
                if seen.latest != (now := gradients_of(seen.followed)):
                    seen.pending.append(Pass(where, self.recorder.gradient_reads))
                seen.latest = now

    def cleared(self, owner):
        if self.inside is not None:
            return
        for seen in self.optimizers.values():
            now = gradients_of(seen.followed)
            if now != seen.latest:
                unread = [p for p in seen.pending if p.reads == self.recorder.gradient_reads]
                seen.thrown += [(p.where, line_now()) for p in unread if not p.clipped]
                seen.pending, seen.used, seen.latest = [], (), now

    def wrote(self, line, weights, name, given):
        """By hand, as one that looks for sharpness does between two passes."""
        for seen in self.all:
            seen.thrown, seen.pending = [], []

    # Clips

    def clipped(self, params, limit, norm):
        for seen in self.all:
            for one in seen.pending:
                one.clipped = True
        if self.scaling.multiplies_now and isinstance(limit, int | float):
            self.clip = params, limit, line_now()

    def unscaled(self, optimizer):
        """After a clip of the same gradients?"""
        params, limit, line = self.clip or ((), 0.0, "")
        first = next((p for p in params if p.grad is not None), None)
        self.clip = ()
        if any(p is first for p in params_of(optimizer)):
            known = [key for key in self.scaled if key[0] == line]
            key = known[0] if known else (line, limit, self.scaling.scaler.get_scale())
            self.scaled[key] = self.scaled.get(key, 0) + 1

    # Steps

    def uses(self, optimizer):
        """A step, or one that the loss scaler skipped, uses what all passes have left."""
        if optimizer not in self.optimizers:
            self.optimizers[optimizer] = Gradients(type(optimizer).__name__)
            self.all.append(self.optimizers[optimizer])
        seen, line = self.optimizers[optimizer], line_now()
        params = params_of(optimizer)
        some = params[:: max(1, len(params) // FOLLOWED)]
        seen.followed = [ref(p) for p in (*some, *params[-1:])]
        now, reads = gradients_of(seen.followed), self.recorder.gradient_reads
        again = seen.led and self.passes == seen.passes and any(now)
        if again and now == seen.used and reads == seen.reads:
            lines = seen.line, line
            seen.repeated[lines] = seen.repeated.get(lines, 0) + 1
        else:
            seen.led = self.passes > seen.passes
        if seen.pending:
            self._count_wasted(optimizer, seen)
        for other in self.all:
            other.pending = []
        seen.thrown = []
        seen.line, seen.passes, seen.reads, seen.used = line, self.passes, reads, now
        seen.latest = now

    def _count_wasted(self, optimizer, seen):
        """Of passes of one line, some were used and the others thrown away."""
        used = {one.where for one in seen.pending}
        lost = [line for where, line in seen.thrown if where in used]
        seen.windows += 1
        if lost and not self._are_hooked(params_of(optimizer)):
            several = len(lost), len(lost) + len(seen.pending)
            seen.wasted.setdefault(lost[0], []).append(several)

    def _are_hooked(self, params):
        """What hooks do with a gradient is not seen, and neither who reads a buffer of all."""
        if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in params):
            return True
        if any(p.grad is not None and is_part(p.grad) for p in params):
            return True
        modules = (m for root in list(self.names.roots) for m in root.modules())
        return any(m._backward_hooks or m._backward_pre_hooks for m in modules)

    # What to say

    def sentences(self):
        for seen in self.all:
            for (first, second), n in seen.repeated.items():
                if n >= OFTEN:
                    yield (
                        f"{seen.name} makes two steps with the gradients of one backward pass, at "
                        f"{first} and at {second}, at least {n} times: remove one of them"
                    )
            for line, times in seen.wasted.items():
                if len(times) >= max(OFTEN, SHARE * seen.windows):
                    lost, of = times[-1]
                    yield (
                        f"{lost} of {of} backward passes are thrown away before each step of "
                        f"{seen.name}: {line} clears their gradients: do so once a step"
                    )
        for (line, limit, scale), n in self.scaled.items():
            if n >= OFTEN and limit * TIGHT < scale:
                yield (
                    f"the gradients were still {scale:g} times too large when they were clipped to "
                    f"{limit:g} at {line}: call unscale_(optimizer) of the loss scaler before it"
                )

    causes = sentences
