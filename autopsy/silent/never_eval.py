"""
Never eval: is a network evaluated as in training, because nobody called eval()?

Dropout then drops in an evaluation, and BatchNorm takes each batch's own statistics and moves its
running ones, and nothing fails. Told is a network that was trained and never called in eval mode,
of which a loss, or a comparison with whole numbers, was computed without gradients after each of
several calls that follow each other, with no backward pass between. No word where train() was
called just before, of a script that speaks of drawing in an evaluation (MC dropout), nor of one
whose modules work alike in both modes.
"""

from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor
from torch.nn.modules.loss import _Loss

from ..frames import code_of, line_now, script_frames_now
from ..watch.events import Events
from ..watch.following import LOSSES
from .evaluation import MEANT
from .left_in_eval import differs

OFTEN = 3  # calls that follow each other
COMPARES = ("eq", "__eq__")


class Evaluated:
    """A network, in calls without gradients."""

    def __init__(self):
        self.in_eval = False  # ever
        self.judged = 0  # calls since the last backward pass
        self.line, self.most = "", 0  # of the longest row of calls that were judged


class NeverEval(Events):
    """Evaluations in train mode."""

    functions = (*COMPARES, *LOSSES, "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss")

    def __init__(self, watch):
        self.trained = WeakSet()
        self.networks = WeakKeyDictionary()
        self.last = None  # the network that was evaluated last
        self.asked = WeakSet()  # modules of which train() was called since the last backward pass
        self.hooks = watch.hooks

    def called(self, module, tensors):
        self.trained.add(module)

    def switched(self, module, training):
        if training:
            self.asked.update(module.modules())

    def evaluated(self, module):
        if isinstance(module, _Loss):
            self._judge()
        elif module in self.trained and module not in self.asked:
            seen = self.networks.get(module)
            if seen is None:
                seen = self.networks[module] = Evaluated()
            seen.in_eval |= not module.training
            self.last = seen

    def computed(self, func, name, args, kwargs, out):
        judges = name not in COMPARES or all(map(_is_labels, args[:2]))
        if judges and not self.hooks.script_grad():
            self._judge()

    def _judge(self):
        seen, self.last = self.last, None  # once a call
        if seen and not seen.in_eval:
            seen.judged += 1
            if seen.judged > seen.most:
                seen.most = seen.judged
                code = code_of(script_frames_now())
                seen.line = "" if MEANT.search(code) else line_now()

    def backward(self, losses):
        self.asked.clear()
        for seen in self.networks.values():
            seen.judged = 0

    def sentences(self):
        for module, seen in self.networks.items():
            parts = sorted({type(part).__name__ for part in module.modules() if differs(part)})
            if seen.most >= OFTEN and seen.line and parts and not seen.in_eval:
                yield (
                    f"{type(module).__name__} is evaluated in train mode, at {seen.line}, and "
                    f"never in eval mode, so with {' and '.join(parts)} as in training: call "
                    "eval() before an evaluation, and train() after it"
                )


def _is_labels(x):
    return isinstance(x, Tensor) and x.dim() > 0 and not x.is_floating_point()
