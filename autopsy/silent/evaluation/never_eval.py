"""
Never eval: is a network evaluated as in training, because nobody called eval()?

Dropout then drops in an evaluation, and BatchNorm takes each batch's own statistics and moves its
running ones, and nothing fails. Told is a network that was trained and never called in eval mode,
of which a loss, or a comparison with whole numbers, was computed without gradients: after each of
several calls that follow each other, with no backward pass between, or with the same batch again
and again. Told is also one that is evaluated so because train() came right after eval().
No word where train() alone was called before, where a copy is evaluated in eval mode, or such calls
come before each step (to choose samples, or how far it goes; not where the script calls train()
again and again, which only eval() gives a reason for), of a script that speaks of drawing in an
evaluation (MC dropout), nor of one whose modules work alike in both modes.
"""

import re
from collections import Counter
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor
from torch.nn.modules.loss import _Loss

from ...frames import code_of, line_now, script_frames_now
from ...tensors import batched, flat_tensors, numbers_of
from ...watch.events import FirstFunctions
from ...watch.following import LOSSES
from ..shared.eval_mode import MEANT, differs

OFTEN = 3  # calls that follow each other, or rows with one batch
SAMPLE, MOST = 16, 1000  # numbers of a batch, batches that are kept
PASSES = 6  # backward passes for one such row, at least
COMPARES = ("eq", "__eq__")
ALSO_MEANT = re.compile("transductiv|batch stat|test[- _]?time|ensembl|thompson|pix2pix|armijo|"
                        "line[- _]?search", re.I)  # fmt: skip


class Evaluated:
    """A network, in calls without gradients."""

    def __init__(self):
        self.in_eval = False  # ever
        self.calls = 0  # calls since the last backward pass
        self.rows = 0  # of such calls
        self.batches = Counter()  # a few numbers of what it was given: in how many rows
        self.batch_numbers = set()  # those of the row under way
        self.undone = ""  # line of a train() right after eval(), before these
        self.line, self.because = "", ""  # of the first row that is long enough; its `undone`


class NeverEval(FirstFunctions):
    """Evaluations in train mode."""

    functions = (*COMPARES, *LOSSES, "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss")
    recorded_only, always = False, True

    def __init__(self, watch):
        super().__init__(watch)
        self.passes = 0
        self.trained = WeakSet()
        self.networks = WeakKeyDictionary()
        self.last = None  # the network that was evaluated last
        self.given = None  # a few numbers of what a network was given last, on their device
        self.copies = set()  # shapes of those that do not train, and are evaluated in eval mode
        self.in_eval = WeakSet()  # modules that were not called since their eval()
        self.train_calls = WeakKeyDictionary()  # module: how often train() was called of it
        # Since the last backward pass:
        self.asked = WeakSet()  # modules of which train() was called
        self.undone = WeakKeyDictionary()  # those where it came right after eval(): its line

    def called(self, module, tensors):
        self.trained.add(module)

    def switched(self, module, training):
        parts = {*module.modules()} & {*self.trained}
        if training:
            self.train_calls[module] = self.train_calls.get(module, 0) + 1
            line = line_now()
            self.undone.update((part, line) for part in parts if part in self.in_eval)
            self.asked.update(parts)
            self.in_eval -= parts
        else:
            self.in_eval |= parts

    def during(self, call, args, kwargs):
        if not call.grad and call.function in self.trained and call.function.training:
            t = next(batched(flat_tensors((args, kwargs))), None)
            self.given = None if t is None else _some(t)
        return ()

    def evaluated(self, module):
        self.in_eval.discard(module)
        if isinstance(module, _Loss):
            self._judge()
        elif not module.training and module not in self.trained:
            self.copies.add(_shapes(module))
        elif module in self.trained and (module not in self.asked or module in self.undone):
            if module not in self.networks:
                self.networks[module] = Evaluated()
            self.last = seen = self.networks[module]
            seen.in_eval |= not module.training
            seen.undone = self.undone.get(module, "")

    def looks_into(self, module):
        return False

    def function_called(self, func, name, args, kwargs, out):
        judges = name not in COMPARES or all(map(_is_labels, args[:2]))
        if judges and not self.hooks.script_grad():
            self._judge()

    def _judge(self):
        seen, self.last = self.last, None  # once a call
        if seen and (seen.undone or not seen.in_eval):
            seen.calls += 1
            given = () if self.given is None else tuple(self.given.tolist())
            seen.batch_numbers.add(given)
            again = given and seen.batches[given] == OFTEN - 1
            if (seen.calls == OFTEN or again) and not seen.line:
                code = code_of(script_frames_now())
                meant = MEANT.search(code) or ALSO_MEANT.search(code)
                seen.line, seen.because = "" if meant else line_now(), seen.undone

    def backward(self, losses):
        self.asked.clear()
        self.undone.clear()
        self.passes += self.hooks.budget.recording  # else no evaluation is seen between them
        for seen in self.networks.values():
            seen.rows += seen.calls > 0
            seen.calls = 0
            if seen.batch_numbers and len(seen.batches) < MOST:
                seen.batches.update(seen.batch_numbers)
            seen.batch_numbers.clear()

    def wrote(self, line, weights, name, given):
        """A search along a line tries weights."""
        for seen in self.networks.values():
            seen.calls = 0

    def sentences(self):
        for module, seen in self.networks.items():
            parts = sorted({type(part).__name__ for part in module.modules() if differs(part)})
            name = type(module).__name__
            rare = PASSES * seen.rows <= self.passes or self.train_calls.get(module, 0) >= OFTEN
            if not (seen.line and parts and rare):
                continue
            if seen.because:
                yield (
                    f"{name} is evaluated in train mode, at {seen.line}: train() at {seen.because} "
                    f"undoes the eval() before it, so with {' and '.join(parts)} as in training"
                )
            elif not (seen.in_eval or _shapes(module) in self.copies):
                yield (
                    f"{name} is evaluated in train mode, at {seen.line}, and never in eval mode, "
                    f"so with {' and '.join(parts)} as in training: call eval() before an "
                    "evaluation, and train() after it"
                )


def _some(t):
    flat = numbers_of(t.detach()).reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE].clone()


def _shapes(module):
    return tuple(p.shape for p in module.parameters())


def _is_labels(x):
    return isinstance(x, Tensor) and x.dim() > 0 and not x.is_floating_point()
