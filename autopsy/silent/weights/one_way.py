"""
One way: does a bidirectional RNN learn in one direction only?

The way back ends at the first place. Whoever takes `out[:, -1]` of both directions takes the first
step of the way back, which has seen one place, and its recurrent weights never have a gradient.
Told are those of a last layer whose way forth has one, in each of several steps.
"""

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ...watch.events import Events

OFTEN = 4  # steps


class OneWay(Events):
    """Gradients of the recurrent weights of both directions."""

    def __init__(self, watch):
        self.names, self.budget = watch.names, watch.budget
        self.still = WeakIdKeyDictionary()  # RNN: (steps, was it so in all? 0-dim)

    def before_step(self, optimizer, losses, norm, moved):
        modules = self.names.modules() if self.budget.is_close else ()
        for module in modules:
            if isinstance(module, nn.RNNBase) and module.bidirectional:
                name = f"weight_hh_l{module.num_layers - 1}"
                forth, back = (getattr(module, key).grad for key in (name, f"{name}_reverse"))
                if forth is not None and back is not None:
                    steps, before = self.still.get(module, (0, True))
                    self.still[module] = steps + 1, forth.any() & ~back.any() & before

    def sentences(self):
        for module, (steps, still) in self.still.items():
            if steps >= OFTEN and still:
                weight = getattr(module, f"weight_hh_l{module.num_layers - 1}_reverse")
                yield (
                    f"the gradient of {self.names.of(weight)} was exactly 0 at each step read: "
                    "only the first step of the way back is used. It ends at the first place: take "
                    "h_n, or out[:, 0] for its half and out[:, -1] for the other"
                )
