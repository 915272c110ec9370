"""
Set back: does load_state_dict() take away, each time, what the steps before it have learnt?

A target network that is copied the wrong way round (the trained one loads the target, which then
never moves) trains for ever from its first weights. Told is a line that loads the same numbers
again and again into weights of one optimizer, which makes steps in between with moments that it
goes on with. Whoever begins anew on purpose (folds, tasks, adaptation to one sample) resets these
too, or moves the rate (back to the best weights with half of it).
"""

from weakref import WeakKeyDictionary

from ..frames import line_now
from ..watch.deferred import params_of
from ..watch.events import Events

LOADS = 6  # that are read; each but the first sets back


class SetBack(Events):
    """Loads into weights that an optimizer trains."""

    def __init__(self, watch):
        self.deferred = watch.deferred
        self.steps = WeakKeyDictionary()  # optimizer: how many
        self.loads = WeakKeyDictionary()  # optimizer: {(line, class): [(steps, rates, norms)]}

    def stepped(self, optimizer):
        self.steps[optimizer] = self.steps.get(optimizer, 0) + 1

    def restored(self, optimizer):
        self.loads.pop(optimizer, None)

    def loaded(self, module, state, answer):
        mine = [p for p in module.parameters() if p.is_floating_point()]
        for optimizer, steps in [*self.steps.items()]:
            trained = {*params_of(optimizer)}
            some = [p for p in mine if p in trained and optimizer.state.get(p)]
            if not some:
                continue
            where = line_now(), type(module).__name__
            seen = self.loads.setdefault(optimizer, {}).setdefault(where, [])
            if len(seen) < LOADS:
                rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
                seen.append((steps, rates, self.deferred.norms(some)))

    def sentences(self):
        for optimizer, lines in self.loads.items():
            for (line, kind), seen in lines.items():
                steps, rates, norms = zip(*seen, strict=True)
                norms = [self.deferred.to_host(several) for several in norms]
                moves = len({*steps}) == LOADS
                if moves and all(x == several[0] for several in (rates, norms) for x in several):
                    yield (
                        f"load_state_dict() at {line} sets the weights of {kind} back to the same "
                        f"numbers each time: what {steps[-1] - steps[0]} steps of "
                        f"{type(optimizer).__name__} learnt between {LOADS} loads is lost. Was it "
                        "meant the other way round?"
                    )
