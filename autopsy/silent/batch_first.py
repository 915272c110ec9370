"""
Batch first: does a recurrent or an attention layer take the samples of a batch for steps in time?

nn.LSTM, nn.GRU, nn.MultiheadAttention and nn.Transformer layers expect (time, batch, features),
unless batch_first=True. Given (batch, time, features) they mix samples, and nothing fails. In two
steps of training the shapes of what they are given are compared with the network's own input and
with the number of samples in the loss. Only where all three agree, and the second dimension is
another number, is it told; a batch of one, or of equal lengths, shows nothing.
"""

from contextlib import contextmanager, suppress
from weakref import WeakKeyDictionary

from torch import nn

from ..modes import is_compiled
from ..tensors import batched, few, flat_tensors
from ..watch.events import Events
from .gradient_path import nodes_of
from .losses import NEAR, NLL

LOOKS = (1, 4)  # steps
LAYERS = (nn.RNNBase, nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


class BatchFirst(Events):
    """Layers whose first dimension is the batch, though they take it for time."""

    def __init__(self, watch):
        self.recorder, self.names = watch.recorder, watch.names
        self.given = []  # (layer, shape) in the call under way, and in those before it in this step
        self.suspects = WeakKeyDictionary()  # layer: (its name, shape, how often)

    def during(self, call, args, kwargs):
        module = call.function
        if not (call.grad and module.training and self.recorder.steps in LOOKS):
            return ()
        layers = [part for part in module.modules()
                  if isinstance(part, LAYERS) and not batch_is_first(part)]  # fmt: skip
        if not layers or is_compiled([*module.modules()]):
            return ()
        names = {part: name for name, part in module.named_modules()}
        sizes = {len(t) for t in batched(flat_tensors((args, kwargs)))}
        return [self._looking(layers, names, sizes)]

    @contextmanager
    def _looking(self, layers, names, sizes):
        def note(layer, args):
            with suppress(Exception):
                shape = args[0].shape
                if len(shape) == 3 and sizes == {shape[0]} and shape[1] not in (1, shape[0]):
                    self.given.append((layer, names[layer], shape))

        handles = [layer.register_forward_pre_hook(note) for layer in layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def backward(self, losses):
        """A loss of one number for each of so many samples."""
        if not self.given:
            return
        nodes = [node for node in nodes_of(losses, NEAR) if node.name() in NLL]
        targets = [node._saved_target.shape for node in nodes]
        for layer, name, shape in self.given:
            if targets and all(t == shape[:1] for t in targets):
                *_, often = self.suspects.get(layer, (0,))
                self.suspects[layer] = name, shape, often + 1
        self.given = []

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


def batch_is_first(layer):
    attention = getattr(layer, "self_attn", layer)
    return attention.batch_first
