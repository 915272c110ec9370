"""
Scaling: does the loss scale explain it?

It follows the script's GradScaler, which multiplies a loss, skips steps, and takes the optimizer's
step.
"""

from dataclasses import replace

from ..advice import FORGOTTEN, SKIPPED, Verdict

PATIENCE = 20  # skipped steps in a row; from 65536 the scale falls to 1 within 16


class Scaling:
    """The loss scaler, and the steps that it skipped."""

    def __init__(self, recorder):
        self.recorder = recorder
        self.multiplied = {}  # optimizer that stepped with gradients that are: the loss scale
        self.scaler = None
        self.skipped = 0  # steps
        self.in_a_row = 0  # of these, the last ones
        self._last = None  # of these: its last backward pass, its number
        self.unskipped = False  # the scaler knew that this step is bad, and was not asked
        self._undivided = False  # the gradients were not divided by the loss scale
        self._states = None  # what the scaler knew of the optimizers when it multiplied a loss

    def multiplies(self, scaler):
        """The script must divide the gradients before the scaler's next update()."""
        if scaler.is_enabled():
            self.scaler, self._states = scaler, scaler._per_optimizer_states

    @property
    def multiplies_now(self):
        """Whether a loss was multiplied since the scaler's last update()."""
        return bool(self.scaler) and self.scaler._per_optimizer_states is self._states

    def before_step(self, optimizer, divides):
        """Return what the scaler found in the gradients. `divides`: the optimizer unscales them."""
        if not self.scaler:
            return ()
        states = self.scaler._per_optimizer_states  # update() makes new ones
        state = states[id(optimizer)]
        fresh = states is self._states and state["stage"].name == "READY"
        self._undivided |= fresh and not divides
        calls = self.recorder.calls
        seen = fresh and not divides and self.recorder.is_complete
        if seen and not any(call.number > self.recorder.slope for call in calls):
            # else the script may have divided them
            self.multiplied[type(optimizer).__name__] = self.scaler.get_scale()
        return state.get("found_inf_per_device", {}).values()

    def sentences(self):
        """Sentences about what is finite and looks wrong."""
        for name, scale in self.multiplied.items():
            if scale != 1:
                yield f"{name} steps with gradients {scale:g} times too large: {FORGOTTEN.text}"

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
