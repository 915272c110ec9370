"""
Sources: what held a number before any operation of the step?

Weights, buffers and the tensors of the batch have names; of a file's numbers, of Python's, and of
memory that nothing has written yet, the kind is known.
"""

from weakref import WeakKeyDictionary

from .facts import Kind, Source
from .step import attributes_of
from .tensors import extent, inner_tensors, storage_of

UNINITIALISED = Source(Kind.UNINITIALISED)


class Sources(WeakKeyDictionary):
    """{storage: its Source} of what is ready-made, while the storage lives."""

    def name_net(self, net, prefix):
        """Name weights, buffers, and tensors in attributes."""
        for name, module in net.named_modules(prefix=prefix):
            for key, t in inner_tensors(attributes_of(module), name):
                self[storage_of(t)] = Source(Kind.ATTRIBUTE, key)
        for name, b in net.named_buffers(prefix):
            self[storage_of(b)] = Source(Kind.BUFFER, name)
        for name, p in net.named_parameters(prefix):
            is_constant = (
                not p.requires_grad and extent(p).is_mask
            )  # a -inf that fills what is masked
            kind = Kind.BUFFER if is_constant else Kind.PARAMETER
            self[storage_of(p)] = Source(kind, name)
            if p.grad is not None:  # of a second optimizer, say
                self[storage_of(p.grad)] = Source(Kind.OLD_GRADIENT, name)

    def name_batch(self, named):
        """Name these {dotted name: tensor} as a reader does: "0" is the input."""
        for name, t in named.items():
            first, _, rest = name.partition(".")
            plain = {"0": "input", "1": "target"}.get(first, f"item {first} of the batch")
            self.setdefault(storage_of(t), Source(Kind.BATCH, rest or plain))

    def mark_written(self, storage):
        """An operation has written to it: its memory is uninitialised no more."""
        if self.get(storage) == UNINITIALISED:
            del self[storage]
