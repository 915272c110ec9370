"""
Batch first: does a network take the samples of a batch for something else?

nn.LSTM, nn.GRU, nn.MultiheadAttention and nn.Transformer layers expect (time, batch, features),
unless batch_first=True. Given (batch, time, features) they mix samples, and nothing fails. So does
a softmax over samples, and a view that makes rows of a hidden state, whose first dimension is
layers. In two steps of training the shapes of what is given are compared with the network's own
input, with the batches of a loader that shuffles, and with the number of samples in the loss. Only
where all agree, and the second dimension is another number, is it told: frames in their order, or
the nodes of a graph, do not come from such a loader. A batch of one, or of equal lengths, shows
nothing. Whoever gives the same to a layer with batch_first=True knows the difference.
"""

from contextlib import ExitStack, contextmanager
from weakref import WeakKeyDictionary

from torch import nn
from torch.utils.data import RandomSampler

from ...frames import line_now
from ...modes import is_compiled
from ...tensors import batched, few, flat_tensors, storage_of
from ...watch.events import Events
from ...watch.following import Follower
from ...watch.graph import nodes_of
from ...watch.interrupts import no_evidence
from ..shared.classification import NEAR, NLL
from ..shared.layers import LAYERS, batch_is_first

LOOKS = (1, 4)  # steps
LOOKED_AT = ("softmax", "log_softmax", "view", "reshape")


class BatchFirst(Events):
    """What takes the first dimension, which is the batch, for time or layers."""

    def __init__(self, watch):
        self.recorder, self.names = watch.recorder, watch.names
        self.given = []  # (layer, shape) in the call under way, and in those before it in this step
        self.suspects = WeakKeyDictionary()  # layer: (its name, shape, how often)
        self.over_samples = []  # (sentence, samples) of this step
        self.found = {}  # sentence: steps
        self.shuffled = set()  # sizes of the batches of loaders that shuffle

    def iterated(self, loader):
        if type(loader.sampler) is RandomSampler:
            self.shuffled.add(loader.batch_size)

    def during(self, call, args, kwargs):
        module = call.function
        if not (call.grad and module.training and self.recorder.steps in LOOKS):
            return ()
        if is_compiled([*module.modules()]):
            return ()
        names = {part: name for name, part in module.named_modules()}
        given = [*batched(flat_tensors((args, kwargs)))]
        sizes = {len(t) for t in given}
        sequences = [t.dim() > 2 or not t.is_floating_point() for t in given]
        alone = [[*t.shape].count(len(t)) == 1 for t in given]
        calls = Calls(self._note, *(sizes if all(sequences + alone) and len(sizes) == 1 else ()))
        return [self._looking(names, sizes, calls), calls]

    @contextmanager
    def _looking(self, names, sizes, calls):
        right = set()  # shapes

        def note(layer, args):
            with no_evidence:
                shape = args[0].shape
                if batch_is_first(layer):
                    right.add(shape)
                elif len(shape) == 3 and sizes == {shape[0]} and shape[1] not in (1, shape[0]):
                    self.given.append((layer, names[layer], shape))

        def note_hidden(layer, args, out):
            with no_evidence:
                if args[0].dim() == 3 and not layer.batch_first:
                    calls.sequences.add(args[0].shape[:2])
                calls.hidden.update((storage_of(t), t.shape) for t in flat_tensors(out[1]))

        with ExitStack() as hooks:
            for layer in names:
                if isinstance(layer, LAYERS):
                    hooks.enter_context(layer.register_forward_pre_hook(note))
                if isinstance(layer, nn.RNNBase):
                    hooks.enter_context(layer.register_forward_hook(note_hidden))
            yield
        self.given = [one for one in self.given if one[-1] not in right]

    def _note(self, text, samples=0):
        if samples:
            self.over_samples.append((text, samples))
        else:
            self.found.setdefault(text, set()).add(self.recorder.steps)

    def backward(self, losses):
        """A loss of one number for each of so many samples."""
        if not (self.given or self.over_samples):
            return
        nodes = [node for node in nodes_of(losses, NEAR) if node.name() in NLL]
        targets = {node._saved_target.shape for node in nodes}
        for layer, name, shape in self.given:
            if targets == {shape[:1]} and shape[0] in self.shuffled:
                *_, often = self.suspects.get(layer, (0,))
                self.suspects[layer] = name, shape, often + 1
        for text, samples in self.over_samples:
            if targets == {(samples,)} and samples in self.shuffled:
                self._note(text)
        self.given, self.over_samples = [], []

    def sentences(self):
        told = {}
        for layer, (name, shape, often) in self.suspects.items():
            if often >= len(LOOKS):
                told.setdefault(shape, []).append(f"{type(layer).__name__} {name}".strip())
        for shape, names in told.items():
            yield (
                f"the {shape[0]} samples of a batch are taken for steps in time by "
                f"{few(names, 2)}: given {list(shape)} with batch_first=False, and the loss has "
                f"{shape[0]} samples: make it with batch_first=True"
            )
        yield from [text for text, steps in self.found.items() if len(steps) == len(LOOKS)]


class Calls(Follower):
    """Functions that a network calls; `size`: how many samples, if each is a sequence."""

    def __init__(self, note, size=0):
        super().__init__()
        self.note, self.size = note, size
        self.hidden = {}  # storage: shape of the hidden state of a recurrent layer
        self.sequences = set()  # (time, batch) of what such layers were given

    def function_called(self, func, name, args, kwargs, out):
        if name not in LOOKED_AT:
            return
        t, *more = args
        shape, samples = [*t.shape], len(t)
        if name == "log_softmax":
            dim = (more or [kwargs.get("dim")])[0] % t.dim()
            steps, size = t.shape[:2] if t.dim() == 3 else (0, 0)
            if dim == 1 and steps != size > 1 < shape[-1] and self.sequences == {(steps, size)}:
                self.note(
                    f"log_softmax at {line_now()} is over the {size} samples of the batch (dim=1 "
                    f"of {shape}), as the recurrent layer before it counts them: they read each "
                    "other"
                )
        elif name == "softmax":
            over = (more or [kwargs.get("dim")])[0] in (0, -t.dim())
            if over and t.dim() > 2 and self.size == samples > 1 and shape.count(samples) == 1:
                text = f"softmax at {line_now()} is over the {samples} samples of the batch "
                self.note(f"{text}(dim=0 of {shape}): they read each other", samples)
        elif t.shape == self.hidden.get(storage_of(t)) and out.dim() < 4:
            layers, samples, _ = shape
            if layers != samples == len(out) and min(layers, samples) > 1:
                self.note(
                    f"the hidden state {shape} of a recurrent layer is viewed as {[*out.shape]} at "
                    f"{line_now()}: its first dimension is layers and directions, so each row "
                    "mixes samples: transpose(0, 1) before it"
                )
