"""
Outside: weights that get gradients, or could, and that no optimizer moves.

It ignores what is done on purpose: an optimizer for the last modules alone, a network in eval(), an
image that is trained through a network, the first layers frozen, or all of a kind.
"""

from ....watch.names import is_target
from .weight_history import READ, names_of


class Outside:
    """Sentences about the weights that live at the end of a script."""

    def __init__(self, living, stalled):
        self.living, self.names = living, stalled.names
        self.optimizers, self.passes = [*stalled.optimizers.values()], stalled.passes
        self.lines = stalled.lines  # idle optimizer: where gradients reach it

    def sentences(self):
        yield from self._idle()
        yield from self._in_no_optimizer()
        yield from self._frozen_between()

    def _names(self, weights):
        return names_of(weights, self.names)

    def _idle(self):
        """Optimizers that make no step, though their weights get gradients."""
        idle = [
            w for w in self.living if not w.optimizer and w.always_had_gradient and w.never_changed
        ]
        none = not self.optimizers and not any(w.idle for w in self.living)
        if idle and none and all(w.read_in_train_mode for w in idle):
            yield (
                f"{self._names(idle)} got gradients in {self.passes} backward passes and "
                "never changed: an update without an optimizer has to be in place (p -= ...)"
            )
        for name in dict.fromkeys(w.idle for w in idle if w.idle):
            some = [w for w in idle if w.idle == name]
            at = f" (by backward() at {self.lines[name]})" if name in self.lines else ""
            yield (
                f"{name} has made no step, though {self._names(some)}, which it holds, got "
                f"gradients at every step read{at} and never changed: does the script reach step()?"
            )

    def _in_no_optimizer(self):
        """Weights that get gradients, are in no optimizer and never change."""
        held = [w for w in self.living if w.optimizer and w.had_nonzero_gradient]
        trained = [w for w in held if w.module]
        if not trained:
            return
        largest = max((w.p.numel() for w in held if not w.module), default=0)  # masters, perhaps
        left = [w for w in self.living if self._is_left_out(w) and w.p.numel() > largest]
        early = self._first_layers(left, trained)
        slip = self._slip_of_an_optimizer(early)
        if not slip and self._are_other_modules(early, trained):
            left = [w for w in left if w not in early]  # frozen on purpose
        groups = {}
        for w in left:
            groups.setdefault((w.unlisted, w.got_gradient_late), []).append(w)
        for (unlisted, late), some in sorted(groups.items(), reverse=True):
            why = "add them, or requires_grad_(False) if they are not meant to train"
            if late:
                why = "were they unfrozen after it was built? add_param_group()"
            elif unlisted:
                why = unlisted
            elif slip:
                why = slip
            elif twin := self._trained_twin(some, trained):
                why = f"another {twin} is trained: if these are its target, copy its weights now "
                why += "and then (load_state_dict), and compute it under no_grad"
            yield (
                f"{self._names(some)} got gradients at every step read{' of late' * late}, are in "
                f"no optimizer and never changed: {why}"
            )

    @staticmethod
    def _is_left_out(w):
        has_gradient = w.always_had_gradient or w.got_gradient_late
        outside = not (w.optimizer or w.idle)
        return outside and has_gradient and w.never_changed and w.read_in_train_mode

    def _first_layers(self, left, trained):
        """Those before the first one that trains."""
        before = self.living[: self.living.index(trained[0])]
        return [w for w in before if w in left and w.always_had_gradient and not w.unlisted]

    def _are_other_modules(self, early, trained):
        """Whether these weights are in modules that hold nothing that trains."""
        inner = {w.p for w in trained}
        parents = [m for m in self.names.modules() if not inner.isdisjoint(m.parameters())]
        return any(w.module() not in parents for w in early)

    def _slip_of_an_optimizer(self, early):
        """What shows that an optimizer was meant to hold these weights; or ""."""
        for seen in self.optimizers:
            if seen.steps > READ and seen.orphans:
                return (
                    f"{seen.name} holds {seen.orphans} tensors that no module holds: build it "
                    "after the model is complete"
                )
        if shared := [w for w in self.living if w.other_optimizer]:
            holders = [shared[0].optimizer, shared[0].other_optimizer]
            one, two = (seen.made for seen in self.optimizers if seen in holders)
            return f"{one} and {two} both hold {self._names(shared)}"
        for seen in self.optimizers:
            if seen.steps > READ and seen.empty:
                return (
                    f"a parameter group of {seen.name} is empty (a generator like parameters() is "
                    "used up after one pass: list() it)"
                )
        shapes = {w.p.shape for w in early}
        frozen = [w for w in self.living if w.optimizer and not w.p.requires_grad]
        frozen = [w for w in frozen if w.never_had_gradient]
        if frozen := [w for w in frozen if w.p.shape in shapes and w.p.dim() > 1]:
            return (
                f"{frozen[0].optimizer.name} holds {self._names(frozen)} instead, whose "
                "requires_grad is False"
            )
        return ""

    def _trained_twin(self, weights, trained):
        """The class of two networks: these weights are one, and the other trains. Or ""."""
        mine, others = {w.p for w in weights}, {w.p for w in trained}
        roots = [(root, {*root.parameters()}) for root in list(self.names.roots)]
        idle = {type(root) for root, held in roots if held and held <= mine}
        twins = idle & {type(root) for root, held in roots if held & others and not held & mine}
        return next((kind.__name__ for kind in twins), "")

    def _frozen_between(self):
        """A layer that alone among several like it has requires_grad=False, while those before and
        after it train. (On purpose one freezes the first ones, or all of a kind.)"""
        kinds = {}
        roots = {part: id(root) for root in list(self.names.roots) for part in root.modules()}
        for w in self.living:
            if module := w.module and w.module():
                kind = roots.get(module), type(module), w.name.rpartition(".")[2], w.p.shape
                kinds.setdefault(kind, []).append(w)
        frozen = []
        for several in kinds.values():
            trained = [w for w in several if w.p.requires_grad and w.had_nonzero_gradient]
            off = [w for w in several if w not in trained]
            alone = len(off) == 1 and not off[0].p.requires_grad
            if alone and several[0] in trained and several[-1] in trained:
                off = [w for w in off if not is_target(self.names.of(w.p))]
                off = [w for w in off if not self._in_frozen_part(w)]
                frozen += [w for w in off if w.never_had_gradient and w.never_changed]
        if frozen:
            yield (
                f"{self._names(frozen)}: requires_grad is False, and all others like them, before "
                "and after, are trained"
            )

    def _in_frozen_part(self, w):
        """Whether a part of several layers, which holds it, is frozen as a whole: on purpose."""
        parts = [part for root in list(self.names.roots) for part in root.modules()]
        return any(
            w.module() in {*part.children()} and not any(p.requires_grad for p in part.parameters())
            and sum(any(True for _ in child.parameters()) for child in part.children()) > 1
            for part in parts
        )  # fmt: skip
