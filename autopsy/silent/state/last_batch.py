"""
Last batch: are the running statistics of a BatchNorm those of the last batch?

torch's momentum is the share of the new batch, and that of other frameworks of the old ones: 0.99
from there makes running statistics that forget all but the last batch, and nothing fails in
training. Told is a network with such a layer that was trained, and evaluated in eval mode. (Not
where each batch is all data, or statistics are made again before the evaluation.)
"""

from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from ...tensors import few, type_of
from ...watch.events import Events

MOST = 0.9  # and below 1, which takes the last batch on purpose


class LastBatch(Events):
    """Networks that were trained, and those that were evaluated."""

    def __init__(self, watch):
        self.evaluated_ones, self.again = WeakSet(), WeakSet()
        self.batches = WeakKeyDictionary()  # network in training: memories of its first few batches

    def called(self, module, tensors):
        memories = self.batches.setdefault(module, set())
        if tensors and tensors[0].layout is torch.strided and len(memories) < 2:
            memories.add((tensors[0].data_ptr(), type_of(tensors[0])))

    def evaluated(self, module):
        (self.again if module.training else self.evaluated_ones).add(module)

    def sentences(self):
        trained = {root for root, memories in self.batches.items() if len(memories) > 1}
        for root in trained & {*self.evaluated_ones} - {*self.again}:
            norms = {m: name for name, m in root.named_modules() if isinstance(m, _BatchNorm)}
            norms = {m: name for m, name in norms.items() if MOST <= (m.momentum or 0) < 1}
            for norm in [norm for norm in norms if norm.track_running_stats][:1]:
                yield (
                    f"{type(norm).__name__} {few([*norms.values()], 2)} of {type(root).__name__} "
                    f"has momentum {norm.momentum:g}, and is evaluated with little more than the "
                    "statistics of the last batch: torch's momentum is the share of that, 1 minus "
                    "that of other frameworks"
                )
