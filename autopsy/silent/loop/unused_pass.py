"""
Unused pass: is a backward pass thrown away before each step, though another one follows it?

`kl.backward(); optimizer.zero_grad(); reconstruction.backward(); optimizer.step()` trains no KL
term. Told is a pass whose gradients, of all weights that it reaches, were cleared before any step
used one of them, each time; all those weights are an optimizer's, which steps after it. A GAN's
pass through the discriminator is used by the generator's optimizer. No word if the script reads or
clips a gradient, or writes into weights, between the pass and the step, if hooks or functions of
its own look at gradients, or if the pass reaches something else (an input, say).
"""

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from ...frames import code_of, line_now, script_frames_now
from ...tensors import is_part
from ...watch.deferred import params_of
from ...watch.events import OutermostSteps
from ...watch.graph import nodes_of
from ..shared.place import place_now

OFTEN = 3  # steps at least
SHARE = 0.75  # of the steps since
MOST = 9999  # nodes of a graph
LOOKS = ("register_hook", "retain_grad")  # at gradients of what is no weight


@dataclass(eq=False)
class Place:
    """Where the script makes a backward pass that was followed by a clear, and by another pass."""

    line: str
    cleared: str = ""  # the last line that did so
    code: str = ""  # of the script's file
    wasted: int = 0  # steps
    weight: int = 0  # the id of one that it reaches
    windows: int = 0  # steps of the optimizer of that weight
    is_fine: bool = False  # or nothing can be known


@dataclass(eq=False)
class Pass:
    """One of these."""

    place: Place
    reads: int  # how often the script had read or set a gradient
    params: set = field(default_factory=set)  # ids of the weights that it reaches
    left: set = field(default_factory=set)  # of these: not cleared yet


class UnusedPass(OutermostSteps):
    """Passes, clears and steps, in their order."""

    recorded_only = True  # steps that follow each other are enough

    def __init__(self, watch):
        self.recorder, self.hooks, self.names = watch.recorder, watch.hooks, watch.names
        self.places = {}  # see place_now()
        self.optimizers = WeakKeyDictionary()  # that step: ids of their parameters
        self.passes = []  # that no step has used yet
        self.before = None  # the pass before: (its place, its line), while no step follows
        self.has_cleared = False  # since that pass
        self.begun = None  # a Pass that is under way

    def resumed(self):
        """What became of the gradients in between is not known."""
        self.inside, self.passes, self.before, self.begun = None, [], None, None

    def backward(self, losses):
        self.begun = None
        if self.inside is not None:
            return
        here = place_now()
        if self.before and self.has_cleared and self.before[0] != here:
            place, line = self.before
            if place not in self.places:
                self.places[place] = Place(line, code=code_of(script_frames_now()))
        self.before, self.has_cleared = (here, line_now()), False
        place = self.places.get(here)
        if place and not place.is_fine:
            self._begin(place, losses)

    def _begin(self, place, losses):
        nodes = nodes_of(losses, MOST)
        ends = [node.variable for node in nodes if hasattr(node, "variable")]
        params = {id(p) for p in ends}
        known = set().union(*self.optimizers.values())
        custom = any(hasattr(node, "_forward_cls") for node in nodes)
        is_known = params and params <= known and len(nodes) < MOST and not custom
        if not is_known or self._are_hooked(ends):
            place.is_fine = True
        else:
            place.weight = place.weight or min(params)
            self.begun = Pass(place, self.recorder.gradient_reads, params, {*params})

    def _are_hooked(self, params):
        """What hooks do with a gradient is not seen, and neither who reads a buffer of all."""
        if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in params):
            return True
        if any(p.grad is not None and is_part(p.grad) for p in params):
            return True
        modules = (m for root in list(self.names.roots) for m in root.modules())
        hooks = ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks")
        return any(getattr(m, name) for m in modules for name in hooks)

    def passed(self):
        if self.begun and self.inside is None:
            self.passes.append(self.begun)
        self.begun = None

    def cleared(self, owner):
        if self.inside is not None or not self.before:
            return
        self.has_cleared = True
        is_optimizer = hasattr(owner, "param_groups")
        params = {id(p) for p in (params_of(owner) if is_optimizer else owner.parameters())}
        for one in self.passes:
            if one.left & params:
                one.left -= params
                one.place.cleared = line_now()

    def clipped(self, params, limit, norm):
        self._excuse()

    def wrote(self, line, weights, name, given):
        """By hand, as one that looks for sharpness does between two passes."""
        self._excuse()

    def _excuse(self):
        for one in self.passes:
            one.place.is_fine = True
        self.passes = []

    def uses(self, optimizer):
        """A step, or one that the loss scaler skipped."""
        params = self.optimizers[optimizer] = {id(p) for p in params_of(optimizer)}
        self.before, self.begun = None, None
        reads = self.recorder.gradient_reads
        open_passes, self.passes = self.passes, []
        for one in open_passes:
            if one.left & params or one.reads != reads:
                one.place.is_fine = True
            elif one.params & params and not one.left:
                one.place.wasted += 1
            else:
                self.passes.append(one)
        for place in self.places.values():
            place.windows += place.weight in params

    def sentences(self):
        for place in self.places.values():
            sure = place.wasted >= max(OFTEN, SHARE * place.windows) and not place.is_fine
            if sure and not any(word in place.code for word in LOOKS):
                yield (
                    f"the backward pass at {place.line} is thrown away before each step: "
                    f"{place.cleared} clears its gradients, and no step has used one: add up the "
                    "losses before one backward(), or clear before the first one"
                )
