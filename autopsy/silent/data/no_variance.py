"""
No variance: is a norm given numbers that vary at all?

BatchNorm divides by sqrt(variance + eps). Images that are divided by 255 twice vary by less than
eps, so that nothing normalises them, and nothing fails. In the first steps, and then in ever fewer,
the first norm of a network is looked at, with what the first layer before it is given. Told is only
that no channel had the variance of eps at any look, and the data had it neither: far below it, or
with the 256 levels of an image. Zeros, a norm after small weights, and what grows later are no such
thing.
"""

from contextlib import ExitStack, contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from ...frames import line_of
from ...modes import is_compiled
from ...tensors import PLAIN
from ...watch.budget import FIRST
from ...watch.events import Events
from ...watch.hooks import without_modes
from ...watch.interrupts import no_evidence

NORMS = (_BatchNorm, _InstanceNorm, nn.GroupNorm, nn.LayerNorm)
LAYERS = (_ConvNd, nn.Linear)
OFTEN, LATE = 6, 16  # looks, and the step of the last one at least
LEVELS = range(32, 257)  # of the bytes of an image, if it is not dark
SAMPLE = 1 << 16  # numbers, whose levels are counted once
FAR = 5.0  # times below eps
NEAR = 10.0  # times eps: 32 levels of a byte that was divided once have more than 100
USUAL = 1e-5  # eps: a larger one, like 0.8, is meant, or another fault


class Look:
    """A norm at each look."""

    def __init__(self, name, eps, data, line):
        self.name, self.eps, self.line = name, eps, line
        self.variances, self.inputs, self.steps = [], [], set()  # the largest of each look
        self.is_deep = data.dim() > 2
        some = (data[:, 0] if self.is_deep else data).flatten()[:SAMPLE]
        self.is_image = len(some) > 8 * LEVELS.stop and len(some.unique()) in LEVELS


class NoVariance(Events):
    """First norms of networks, and the data before them."""

    recorded_only = True

    def __init__(self, watch):
        self.recorder = watch.recorder
        self.looks = WeakKeyDictionary()  # norm: Look

    def during(self, call, args, kwargs):
        module, step = call.function, self.recorder.steps
        if not (call.grad and module.training and (step < FIRST or step.bit_count() < 2)):
            return ()
        return () if is_compiled([*module.modules()]) else [self._looking(call)]

    @contextmanager
    def _looking(self, call):
        first = []  # what the first layer is given

        def note(part, args):
            unseen = torch._C.DisableTorchFunction()
            with no_evidence, unseen, without_modes(), torch.no_grad():
                x = args[0].detach()
                if not first:
                    first.append(None if args[0].requires_grad else x)
                if isinstance(part, NORMS) and len(first) == 1:
                    first.append(part)
                    if first[0] is not None and type(x) in PLAIN and part.training:
                        self._note(part, x, first[0], call)

        with ExitStack() as hooks:
            for part in call.function.modules():
                if isinstance(part, NORMS + LAYERS):
                    hooks.enter_context(part.register_forward_pre_hook(note))
            yield

    def _note(self, norm, x, data, call):
        if norm not in self.looks:
            names = {part: name for name, part in call.function.named_modules()}
            name = f"{type(norm).__name__} {names[norm]}".strip()
            self.looks[norm] = Look(name, norm.eps, data, line_of(call.frames))
        look = self.looks[norm]
        look.variances.append(_variances(norm, x).amax())
        look.inputs.append(_by_channel(data.float()).amax())
        look.steps.add(self.recorder.steps)

    def sentences(self):
        for look in [*self.looks.values()]:
            if len(look.steps) < OFTEN or max(look.steps) < LATE:
                continue
            variances, data = torch.stack(look.variances), float(torch.stack(look.inputs).amax())
            most, least = float(variances.amax()), float(variances.amin())
            limit = min(look.eps, USUAL) / (1 if look.is_image else FAR)
            little = data < limit * (NEAR if look.is_image else look.is_deep)
            if little and 0 < least <= most < limit:
                yield (
                    f"{look.name} normalises nothing: in {len(look.steps)} steps up to step "
                    f"{max(look.steps)} no channel had the variance of its eps, {look.eps:g} (at "
                    f"most {most:.1e}), and the data of the network that {look.line} calls have "
                    f"{data:.1e}: are they scaled twice (divided by 255 twice, say)?"
                )


def _variances(norm, x):
    x = x.float()
    if isinstance(norm, nn.LayerNorm):
        return x.flatten(-len(norm.normalized_shape)).var(-1)
    if isinstance(norm, nn.GroupNorm):
        return x.reshape(len(x), norm.num_groups, -1).var(-1)
    if isinstance(norm, _InstanceNorm):
        return x.flatten(2).var(-1)
    return _by_channel(x)


def _by_channel(x):
    return x.transpose(0, 1).flatten(1).var(1) if x.dim() > 1 else x.var()
