"""
Mixed samples: does the result of one sample depend on the other samples of its batch?

A sum without keepdim broadcasts samples against each other, a cumsum runs along them, a layer takes
them for time, and nothing fails. A loader that shuffles, with torch's own collate, makes rows that
are samples. In some of the first steps the call of a network that is given such rows is made again
in eval mode, with another sample in the first row: the others keep their results, unless samples
meet. (What depends on the largest or longest sample alone is seen in few of the steps.) Not looked
at are a BatchNorm without running statistics, networks whose source speaks of batches, sets, graphs
or the like, and results that compare all samples with all.
"""

import inspect
import re
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.data import RandomSampler, default_collate

from ...frames import line_now, line_of
from ...tensors import PLAIN, flat_tensors
from ...watch.calls import ResultRef
from ...watch.events import Events
from ...watch.experiment import Experiment, can_be_made_again, inputs_of, own_kinds, same
from ...watch.following import Follower
from ...watch.functions import COPIES
from ...watch.graph import nodes_of
from ...watch.interrupts import no_evidence
from ..shared.classification import NEAR, NLL
from ..shared.layers import LAYERS, batch_is_first

FIRST, OFTEN = 2, 4  # step of the first look, and looks
ROWS = 8  # of a batch, at least
MOST = 8  # networks
MUCH = 1e-3  # of the largest number of the result: rounding changes less
MEANT = re.compile(
    r"batch[\s_-]?(stat|mean|std|var|attention|former|hard|wise|size effect|ensemble)"
    r"|(mini|in|intra|cross|within|across|whole|entire|other).{0,7}(batch|samples?)|between.samples"
    r"|\b(npt|deep)?sets?\b|\bset_|graph|\badj|edge|knn|neighbo|proto|episod|support|memory|queue"
    r"|\bbank|expert|capacity|rout|mix|shuffle|perm(utation)?\b|randperm|contrast|pair|triplet"
    r"|\brows?\b.{0,20}(attend|each other)|cholesky|\bqr\(|orthonorm|spectral"
    r"|sinkhorn|transduct|whiten|quant|observer|gaussian process|kernel matrix|cdist|all_gather",
    re.I,
)


class MixedSamples(Events):
    """Networks that are given rows of a loader that shuffles."""

    recorded_only = True

    def __init__(self, watch):
        self.recorder = watch.recorder
        self.size = 0  # of the batches of the loader that was iterated last, if rows are samples
        self.is_nll = False  # a loss of this step
        self.networks = WeakKeyDictionary()  # network: the sentences of each look

    def iterated(self, loader):
        shuffles = type(loader.sampler) is RandomSampler and loader.collate_fn is default_collate
        self.size = loader.batch_size or 0 if shuffles else 0

    def backward(self, losses):
        if self.size and self._is_due():
            self.is_nll |= any(node.name() in NLL for node in nodes_of(losses, NEAR))

    def _is_due(self):
        step = self.recorder.steps
        close = step in range(FIRST, FIRST + OFTEN) or step.bit_count() < 2
        return close and step >= FIRST

    def before_step(self, optimizer, losses, norm, moved):
        recorder = self.recorder
        due = self.size >= ROWS and self._is_due() and recorder.hooks.world == 1
        calls = recorder.of_this_step if due and recorder.is_complete else ()
        calls = [call for call in calls if isinstance(call.function, nn.Module) and call.grad]
        for call in calls[:MOST]:
            looks = self.networks.setdefault(call.function, [])
            if len(looks) < OFTEN and all(looks):
                with no_evidence:  # what cannot be made again is no evidence
                    looks.append(self._look(call) if self._is_looked_at(call) else "")
        self.is_nll = False

    def _is_looked_at(self, call):
        """Whether it is given one batch of the loader, and rows are apart in it."""
        network = call.function
        if not (network.training and can_be_made_again(network) and call.shape[0] == self.size):
            return False
        if self.is_nll and any(isinstance(m, LAYERS) and not batch_is_first(m)
                               for m in network.modules()):  # fmt: skip
            return False  # batch_first.py looks at these
        if any(isinstance(m, _NormBase) and m.running_mean is None for m in network.modules()):
            return False
        own = own_kinds(network)
        return not any(MEANT.search(kind.__name__ + inspect.getsource(kind)) for kind in own)

    def _look(self, call):
        """What to say of it, or ""."""
        with Experiment(self.recorder, call, evaluates=True) as again:
            arguments = again.given.arguments
            inputs = {name: arguments[name] for name in self._of_the_loader(call)}
            before = again()
            if not (inputs and same(before, again())):
                return ""
            place = _place(again, before, inputs)
            if not (place and _are_rows(again, before, inputs)):
                return ""
            return (
                f"{type(call.function).__name__} at {line_of(call.frames)} mixes the samples of a "
                "batch, in eval mode, too: with another sample in row 0 the results of others "
                f"change, first after {place}: dim=0 is the batch"
            )

    def _of_the_loader(self, call):
        """The names of its inputs that no function has made: with a row for each sample."""
        makers = {call.number: call for call in self.recorder.calls}
        for name, x in inputs_of(call).items():
            while isinstance(x, ResultRef) and COPIES.fullmatch(makers[x.number].name):
                x = makers[x.number].args[0]
            if type(x) in PLAIN and x.shape[:1] == (self.size,) and not x.requires_grad:
                yield name

    def sentences(self):
        for looks in self.networks.values():
            if len(looks) >= OFTEN and all(looks):
                yield looks[-1]


class Results(Follower):
    """What each function returns that has a row for each sample, and where."""

    def __init__(self, size):
        super().__init__()
        self.size, self.made = size, []

    def function_called(self, func, name, args, kwargs, out):
        for t in flat_tensors(out):
            if t.is_floating_point() and t.shape[:1] == (self.size,):
                self.made.append((f"{name} at {line_now()}", t.detach().clone()))


def _place(again, before, inputs):
    """With another sample in row 0: the first function whose result changes in other rows, if what
    the network returns does, or ""."""
    size = len(next(iter(inputs.values())))
    rows = torch.arange(size)
    rows[0] = size // 2
    changed = {name: t[rows.to(t.device)] for name, t in inputs.items()}
    if not any(_moves(a, b) for a, b in again.returned(before, again(**changed))):
        return ""
    with Results(size) as first:
        again()
    with Results(size) as second:
        again(**changed)
    pairs = zip(first.made, second.made, strict=True)
    return next((place for (place, a), (_, b) in pairs if _moves(a, b)), "")


def _moves(before, after):
    """Whether another row than 0 changes, by more than rounding."""
    change = (before - after)[1:].abs()
    return bool(change.max() > MUCH * before.abs().max())


def _are_rows(again, before, inputs):
    """Whether half of the batch makes half of the rows, and no result compares all with all."""
    size = len(next(iter(inputs.values())))
    half = again(**{name: t[: size // 2] for name, t in inputs.items()})
    return all(
        size not in a.shape[1:] and b.shape == (size // 2, *a.shape[1:])
        for a, b in again.returned(before, half)
    )
