"""
Passes: which loops of the script begin anew over the same data set?

A loop is a line that iterates a DataLoader, and its data set: one function may train with one
loader and validate with another, and each task of a sequence has data of its own. The loader itself
may be built again for each pass. same_numbers/, sorted_classes.py and schedules.py
count such passes.
"""

from dataclasses import dataclass, field
from weakref import ref

from ...frames import line_of, script_frames_now
from ...watch.interrupts import no_evidence


@dataclass(eq=False)
class Loop:
    """A line that iterates loaders of one data set."""

    frames: tuple
    data: ref  # to the data set, or to the loader of what takes no reference (a list)
    begun: int = 0
    sizes: set = field(default_factory=set)  # of batches
    batches: int = 0  # of the last pass

    @property
    def line(self):
        return line_of(self.frames)


class Loops:
    """All of them that live."""

    def __init__(self):
        self.last = None  # the loop that began last
        self._of = {}  # frames: loops

    def begin(self, loader):
        """An iterator of this loader begins. Returns its loop."""
        try:
            data = ref(loader.dataset)
        except TypeError:
            data = ref(loader)
        frames = script_frames_now()
        loops = [loop for loop in self._of.get(frames, ()) if loop.data() is not None]
        same = [loop for loop in loops if loop.data() is data()]
        self.last = same[0] if same else Loop(frames, data)
        self._of[frames] = loops if same else [*loops, self.last]
        self.last.begun += 1
        self.last.sizes.add(getattr(loader, "batch_size", None))
        with no_evidence:  # an IterableDataset has no length
            self.last.batches = len(loader)
        return self.last


def writes_to(t):
    """How often something has written into it."""
    return 0 if t.is_inference() else t._version
