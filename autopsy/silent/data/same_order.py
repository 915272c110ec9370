"""
Same order: does a DistributedSampler shuffle the data anew in each epoch?

It draws its order from a seed and the number of the epoch, which only set_epoch() moves: without
it each pass has the order of the first, and the same share on the same rank. Told is a loader that
shuffles, with steps of an optimizer in at least three passes of one number, before another loader
begins. No word of one that is iterated without gradients, or where the script writes into a tensor
with a row for each sample of the pass: what it keeps may follow their order.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch.utils.data import DistributedSampler

from ...frames import line_now
from ...watch.events import FirstFunctions

OFTEN = 3  # passes


@dataclass
class Passes:
    """Those with one sampler, which have trained."""

    line: str
    number: int = -1  # of the epoch, and the seed
    begun: int = 0  # steps before the last one
    trained: int = 0
    moves: bool = False  # its number; or the order is kept
    samples: int = 0


class SameOrder(FirstFunctions):
    """Passes over loaders with a DistributedSampler."""

    recorded_only = False
    functions = ("__setitem__",)

    def __init__(self, watch):
        super().__init__(watch)
        self.samplers = WeakKeyDictionary()  # sampler: Passes
        self.last = Passes("")  # of the loader that was iterated last
        self.repeated = {}  # line: how many passes

    def iterated(self, loader):
        sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
        self._end()
        self.last = Passes("")
        shuffles = isinstance(sampler, DistributedSampler) and sampler.shuffle
        shuffles = shuffles and type(sampler).__iter__ is DistributedSampler.__iter__
        if shuffles and self.hooks.script_grad():
            seen = self.last = self.samplers.setdefault(sampler, Passes(line_now()))
            number = sampler.epoch + sampler.seed
            seen.moves |= seen.trained > 0 and number != seen.number
            seen.number, seen.begun = number, self.recorder.steps
            seen.samples = sampler.num_samples

    def function_called(self, func, name, args, kwargs, out):
        self.last.moves |= args[0].dim() > 0 and len(args[0]) == self.last.samples

    def _end(self):
        """Another pass begins, or the script ends."""
        seen = self.last
        seen.trained += self.recorder.steps > seen.begun
        if seen.moves:
            self.repeated.pop(seen.line, None)
        elif seen.line and seen.trained >= OFTEN:
            self.repeated[seen.line] = seen.trained

    def sentences(self):
        self._end()
        for line, passes in self.repeated.items():
            yield (
                f"each of {passes} passes over the loader at {line} has the order of the first: "
                "call set_epoch(epoch) of its DistributedSampler before each"
            )
