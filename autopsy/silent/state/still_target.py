"""
Still target: is one of several target networks never updated?

`soft_update(critic, target_critic)` and no line for the actor: the other target stays as it was
made. Told are target networks that never move while another one does, if both are called after
networks that train ("actor" and "target_actor").
"""

import re

from ...tensors import few
from ...watch.deferred import params_of
from ...watch.events import Events
from ...watch.names import names_of

FIRST, LEAST = 8, 64  # steps: of the look at them, and of the script
TARGET = re.compile(r"_?targ(et)?_?")


class StillTarget(Events):
    """Networks that no optimizer holds, as they were after some steps."""

    def __init__(self, watch):
        self.names, self.recorder, self.deferred = watch.names, watch.recorder, watch.deferred
        self.trained = set()  # ids of weights of optimizers
        self.before = []  # (network, norms of its weights)

    def stepped(self, optimizer):
        if self.recorder.steps < FIRST:
            self.trained |= {id(p) for p in params_of(optimizer)}
        elif not self.before:
            self.before = [(net, self._norms(net)) for net in list(self.names.roots)]

    def _norms(self, net):
        return [float(norm) for norm in self.deferred.norms(net.parameters())]

    def sentences(self):
        if self.recorder.steps < LEAST:
            return
        known = names_of([net for net, _ in self.before])
        trained = {
            known[net] for net, _ in self.before
            if any(id(p) in self.trained for p in net.parameters())
        }  # fmt: skip
        targets = [
            (name, norms == self._norms(net))
            for net, norms in self.before
            if norms and (name := known[net]) not in trained and TARGET.sub("", name) in trained
        ]
        still = [name for name, stands in targets if stands]
        if still and len(still) < len(targets):
            moves = next(name for name, stands in targets if not stands)
            yield (
                f"{few(still)} never {'moves' if len(still) == 1 else 'move'}, and {moves} does: "
                f"nothing updates {'it' if len(still) == 1 else 'them'}"
            )
