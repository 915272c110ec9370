"""
Scaling: does the loss scale explain it?

It follows the script's GradScaler, which multiplies a loss, skips steps, and takes the optimizer's
step. Gradients are multiplied as long as they are what the backward pass of such a loss has left:
another optimizer may train beside it with plain losses.
"""

from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary, ref

from ..advice import FORGOTTEN, SKIPPED, Verdict
from ..frames import line_now
from ..tensors import flat_tensors
from .deferred import params_of
from .graph import nodes_of

PATIENCE = 20  # skipped steps in a row; from 65536 the scale falls to 1 within 16
SCALED = "autopsy: a loss scaler made this"  # in the metadata of a node
NEAR = 32  # nodes of a graph, from its end: a sum of scaled losses is scaled
FOLLOWED = 8  # gradients of an optimizer
MOST = 16  # optimizers


@dataclass(eq=False)
class Used:
    """What a script does with a scaler."""

    line: str  # of its last scale()
    losses: int = 0
    updates: int = 0

    @property
    def never_updated(self):
        """What to say if its update() is never called."""
        if self.updates or self.losses <= PATIENCE:
            return ""
        return f" (scale() was called {self.losses} times, at {self.line}, and update() never)"


class Scaling:
    """The loss scaler, and the steps that it skipped."""

    def __init__(self, recorder):
        self.recorder = recorder
        # (optimizer, line of its step) with gradients that are multiplied: (the loss scale, Used)
        self.multiplied = {}
        self.scaler = None
        self.skipped = 0  # steps
        self.in_a_row = 0  # of these, the last ones
        self._last = None  # of these: its last backward pass, its number
        self.unskipped = False  # the scaler knew that this step is bad, and was not asked
        self._undivided = False  # the gradients were not divided by the loss scale
        self._states = None  # what the scaler knew of the optimizers when it multiplied a loss
        self.used = WeakKeyDictionary()  # scaler: Used
        # optimizer: (scaler, what that knew, some gradients as the pass of a scaled loss left them)
        self._left = WeakKeyDictionary()
        self._under_way = None  # a pass of a scaled loss: (scaler, gradients before it)

    def multiplies(self, scaler, outputs):
        """The script must divide the gradients before the scaler's next update()."""
        if not scaler.is_enabled():
            return
        self.scaler, self._states = scaler, scaler._per_optimizer_states
        used = self.used.setdefault(scaler, Used(""))
        used.line = line_now()
        used.losses += 1
        for t in flat_tensors(outputs):
            if t.grad_fn is not None:
                t.grad_fn.metadata[SCALED] = ref(scaler)

    def updated(self, scaler):
        """Its update() is over."""
        if scaler in self.used:
            self.used[scaler].updates += 1

    def backward(self, losses, optimizers):
        """A backward pass begins. optimizers: all that there are."""
        self._under_way = None
        if self.scaler:
            marks = (node.metadata.get(SCALED) for node in nodes_of(losses, NEAR))
            scaler = next((mark() for mark in marks if mark), None)
            if scaler:
                before = [(o, *_gradients_of(o)) for o in optimizers[-MOST:]]
                self._under_way = scaler, before

    def passed(self):
        """It is over: which gradients has it changed?"""
        scaler, before = self._under_way or (None, ())
        self._under_way = None
        for optimizer, params, old in before:
            now = [_gradient_of(p()) for p in params]
            changed = [(p, b) for p, a, b in zip(params, old, now, strict=True) if not _same(a, b)]
            if changed:
                self._left[optimizer] = scaler, scaler._per_optimizer_states, changed

    def unscaled(self, optimizer):
        """The gradients of this optimizer are divided by the scale, whoever else holds them."""
        mine = {id(p) for p in params_of(optimizer)}
        for other, (scaler, states, left) in [*self._left.items()]:
            left = [(p, grad) for p, grad in left if id(p()) not in mine]
            self._left[other] = scaler, states, left

    @property
    def multiplies_now(self):
        """Whether a loss was multiplied since the scaler's last update()."""
        return bool(self.scaler) and self.scaler._per_optimizer_states is self._states

    def before_step(self, optimizer, divides, clipped=False):
        """Return what the scaler found in the gradients. `divides`: the optimizer unscales them.
        `clipped`: the script has clipped them."""
        if not self.scaler:
            return ()
        multiplying = None if divides else self._multiplies(optimizer, clipped)
        self._undivided |= bool(multiplying)
        calls = self.recorder.calls
        seen = multiplying and self.recorder.is_complete
        if seen and not any(call.number > self.recorder.slope for call in calls):
            # else the script may have divided them
            key = type(optimizer).__name__, line_now()
            if key not in self.multiplied:
                self.multiplied[key] = multiplying.get_scale(), self.used[multiplying]
        if divides:
            self.unscaled(optimizer)
        state = self.scaler._per_optimizer_states.get(id(optimizer), {})
        return state.get("found_inf_per_device", {}).values()

    def _multiplies(self, optimizer, clipped):
        """The scaler that multiplies the gradients of this optimizer now, or None."""
        scaler, states, left = self._left.get(optimizer, (None, None, ()))
        if not scaler or scaler._per_optimizer_states is not states:  # update() makes new ones
            return None
        state = states.get(id(optimizer))
        stage = state["stage"].name if state else "READY"
        if stage == "UNSCALED":
            return None
        for p, grad in left:
            now = _gradient_of(p())
            same = _same(grad, now) or (clipped and stage == "READY" and _same(grad[:1], now[:1]))
            if now and same:
                return scaler
        return None

    def sentences(self):
        """Sentences about what is finite and looks wrong."""
        for (name, line), (scale, used) in self.multiplied.items():
            if scale != 1:
                yield (
                    f"{name} steps with gradients {scale:g} times too large, at {line}: "
                    f"{FORGOTTEN.text}{used.never_updated}"
                )
        for used in [*self.used.values()] if not self.recorder.steps_of else ():
            if used.never_updated:
                yield (
                    f"no step is made{used.never_updated}: call step(optimizer) of the loss "
                    "scaler, and its update() after that: it skips a bad step, and lowers the "
                    "loss scale"
                )

    def skip(self):
        """The scaler skips a step: calibration. It returns why that cannot go on, or ""."""
        self.skipped += 1
        self.in_a_row += 1
        self._last = self.recorder.slope, self.recorder.steps
        if self.in_a_row > PATIENCE:
            return f", {self.in_a_row} skipped steps in a row"
        if self.scaler and self.scaler.get_scale() * self.scaler.get_backoff_factor() < 1:
            return ", the loss scale falls under 1"
        return ""

    def step_of_gradients(self):
        """The number of the step whose backward pass has made the gradients: of one that was
        skipped, where a step follows it without another pass."""
        slope, step = self._last or (None, 0)
        return step if slope == self.recorder.slope else self.recorder.steps

    def overrule(self, report, raised):
        """Return the report with its scale. The verdict is calibration if the script bypassed the
        scaler. `raised`: the script raised before the scaler could skip the step."""
        report = replace(report, scale=self.scaler.get_scale() if self.scaler else report.scale)
        overflow = self.unskipped and report.verdict is Verdict.PRECISION
        if report.scale != 1 and (self._undivided or overflow):
            return replace(report, verdict=Verdict.CALIBRATION, fix=FORGOTTEN)
        if raised and self.scaler and report.verdict is Verdict.CALIBRATION:
            return replace(report, fix=SKIPPED)
        return report


def _gradient_of(p):
    """(reference to it, its version), or () if there is none."""
    grad = None if p is None else p.grad
    if grad is None:
        return ()
    return ref(grad), 0 if grad.is_inference() else grad._version


def _gradients_of(optimizer):
    """(references to some of its parameters, their gradients)"""
    params = params_of(optimizer)
    some = params[:: max(1, len(params) // FOLLOWED)]
    return [ref(p) for p in some], [_gradient_of(p) for p in some]


def _same(first, second):
    """Whether these are one gradient, which is alive, in one version."""
    alive = first and second and first[0]() is second[0]() is not None
    return (not first and not second) or (alive and first[1:] == second[1:])
