"""
Threshold: are logits compared with 0.5?

A network that is trained with binary_cross_entropy_with_logits returns logits, whose threshold is
0: an accuracy that asks whether they are above 0.5, or rounds them, counts fewer hits, and nothing
fails. Told is such a comparison of what a network has returned, with no sigmoid between, and which
is compared with no other number.
"""

from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.modules.loss import _Loss

from ...frames import line_now
from ...watch.events import FirstFunctions

HALF = ("gt", "__gt__", "ge", "__ge__", "lt", "__lt__")
LOSS = "binary_cross_entropy_with_logits"
OTHER_LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
VIEWS = ("squeeze", "view", "reshape", "flatten", "detach", "cpu", "float")
FAR = 3.0  # beyond probabilities


class Threshold(FirstFunctions):
    """What is done with the results of networks."""

    functions = (LOSS, "round", *HALF, *OTHER_LOSSES)
    always = True  # an evaluation comes when it comes

    def __init__(self, watch):
        super().__init__(watch)
        self.logits = WeakKeyDictionary()  # network: which of its results are trained as logits
        self.compared = WeakKeyDictionary()  # network: {result: line of a comparison with 0.5}
        self.meant = WeakKeyDictionary()  # network: results that are compared with other numbers

    def looks_into(self, module):
        """Only losses: within a network nothing is its result."""
        return isinstance(module, _Loss)

    def function_called(self, func, name, args, kwargs, out):
        t = args[0] if args else kwargs.get("input")
        network, k = self._network(self.recorder.maker(t))
        if network is None:
            return
        if name == LOSS:
            self.logits.setdefault(network, set()).add(k)
        elif name in OTHER_LOSSES or [*args[1:], *kwargs.values()] not in ([], [0.5]):
            self.meant.setdefault(network, set()).add(k)
        elif bool(t.abs().amax() > FAR):
            self.compared.setdefault(network, {})[k] = line_now()

    def _network(self, ref):
        """Whose result this is, but for its shape, and which of them."""
        calls = {call.number: call for call in self.recorder.of_this_step} if ref else {}
        while ref:
            call = calls.get(ref.number)
            if call is None or isinstance(call.function, nn.Module):
                return call and call.function, ref.k
            ref = next(iter(call.uses()), None) if call.name in VIEWS else None
        return None, 0

    def sentences(self):
        for network, lines in self.compared.items():
            logits = self.logits.get(network, set()) - self.meant.get(network, set())
            for k in lines.keys() & logits:
                line = lines[k]
                yield (
                    f"{line} compares the logits of {type(network).__name__} with 0.5, which is "
                    f"the threshold of probabilities: they are trained with {LOSS}, and their "
                    "threshold is 0"
                )
