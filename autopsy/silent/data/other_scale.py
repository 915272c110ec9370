"""
Other scale: is a network evaluated with images of the scale that it was trained with?

A Normalize that only one of two transforms has makes a network look bad, and nothing fails. Images
are (N, C, H, W) with few channels. The quantiles of some of their numbers are compared, in training
and in evaluations: told is where one are those of the other times a factor, plus a shift, and only
one of both is below 0, and the other 0..1 or 0..255, as images are stored. Noise that is added in
training has no shift, and another form. A network that asks for its mode may normalise by itself.
"""

from weakref import WeakKeyDictionary

import torch
from torch import nn

from ...frames import line_now
from ...tensors import PLAIN, batched, flat_tensors
from ...watch.events import Events

LOOKS = 4  # calls of each kind
OFTEN = 2  # of them, or one of so many images
MANY = 32
SIDE = 8  # pixels, at least
CHANNELS = 16
NUMBERS = 4096  # of a batch
ALIKE = 0.98  # correlation of the quantiles from 5 to 95 %
SHIFT = 0.3  # of the means, in deviations
FACTOR = 1.3  # of the deviations


class OtherScale(Events):
    """What networks are given, in training and in evaluations."""

    def __init__(self, watch):
        self.looks = WeakKeyDictionary()  # network: {in training?: [(quantiles, shape)]}
        self.lines = WeakKeyDictionary()  # network: the line of its last evaluation

    def during(self, call, args, kwargs):
        module = call.function
        is_network = isinstance(module, nn.Module) and call.grad == module.training
        if not is_network or _asks_for_its_mode(module):
            return ()
        looks = self.looks.setdefault(module, {True: [], False: []})[call.grad]
        if len(looks) < LOOKS:
            t = next(batched(flat_tensors((args, kwargs))), None)
            if t is not None and _are_images(t):
                looks.append((_quantiles(t), t.shape))
                if not call.grad:
                    self.lines[module] = line_now()
        return ()

    def sentences(self):
        for module, looks in self.looks.items():
            if all(map(_are_enough, looks.values())) and _same_shape(*looks.values()):
                trained, evaluated = (torch.stack([q for q, _ in looks[k]]).mean(0).cpu()
                                      for k in (True, False))  # fmt: skip
                if _is_scaled(trained, evaluated):
                    yield (
                        f"{type(module).__name__} is trained with images of {_words(trained)}, and "
                        f"evaluated at {self.lines[module]} with images of {_words(evaluated)}: "
                        "does one of both lack a Normalize?"
                    )


def _asks_for_its_mode(module):
    """Whether its forward() does: it may normalise by itself, in evaluations."""
    names = getattr(getattr(type(module).forward, "__code__", None), "co_names", ())
    return "training" in names


def _are_images(t):
    is_plain = type(t) in PLAIN and t.layout is torch.strided and not t.is_meta
    is_given = t.is_floating_point() and not t.requires_grad and t.dim() == 4
    return is_plain and is_given and t.shape[1] <= CHANNELS and min(t.shape[2:]) >= SIDE


def _are_enough(looks):
    return len(looks) >= OFTEN or sum(shape[0] for _, shape in looks) >= MANY


def _same_shape(*kinds):
    channels = {shape[1] for looks in kinds for _, shape in looks}
    return len(channels) == 1


@torch.no_grad()
def _quantiles(t):
    flat = t.detach().float().flatten()
    flat = flat[:: max(1, flat.numel() // NUMBERS)]
    return flat.quantile(torch.linspace(0, 1, 41, device=t.device))


def _is_scaled(a, b):
    """Whether the quantiles of one are a scaled and shifted copy of the other's."""
    if (a[0] < 0) == (b[0] < 0) or min(a.std(), b.std()) == 0:
        return False
    if not _is_raw(max(a, b, key=lambda q: float(q[0]))):
        return False
    factor, shift = a.std() / b.std(), (a.mean() - b.mean()).abs() / min(a.std(), b.std())
    alike = torch.corrcoef(torch.stack([a, b])[:, 2:-2])[0, 1] > ALIKE
    return bool(alike and shift > SHIFT and max(factor, 1 / factor) > FACTOR)


def _is_raw(quantiles):
    """Whether these are pixels as they are stored."""
    low, high = float(quantiles[0]), float(quantiles[-1])
    return low < 0.2 * high and (high <= 1.01 or high > CHANNELS)


def _words(quantiles):
    return f"{quantiles[0]:.3g} .. {quantiles[-1]:.3g}"
