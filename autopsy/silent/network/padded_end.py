"""
Padded end: is the last place of padded sequences taken for their end?

pad_packed_sequence() gives all sequences the length of the longest. Its place -1 holds zeros for
each shorter one, and nothing fails. In the first steps it follows what that function returns to an
index: told is one of -1, if sequences of several lengths are in a batch. A line that takes other
places, too, walks through time.
"""

from torch.utils.weak import WeakIdKeyDictionary

from ...frames import line_now
from ...watch.events import FirstFunctions

OFTEN = 3  # steps
SAME = ("index_select", "contiguous", "to", "float", "dropout")  # of an order of samples, say
FIRST = slice(None)


class PaddedEnd(FirstFunctions):
    """Indices of what pad_packed_sequence() returns."""

    functions = ("_pad_packed_sequence", "__getitem__", *SAME)

    def __init__(self, watch):
        super().__init__(watch)
        self.padded = WeakIdKeyDictionary()  # what is padded: (time's dimension, lengths)
        self.found = {}  # line: {step: (how many are shorter, of how many)}
        self.others = set()  # lines that take other places

    def function_called(self, func, name, args, kwargs, out):
        if name == "_pad_packed_sequence":
            padded, lengths = out
            self.padded[padded] = int(args[2]), lengths
        elif args[0] in self.padded and name in SAME:
            self.padded[out] = self.padded[args[0]]
        elif args[0] in self.padded and out.requires_grad:
            dim, lengths = self.padded[args[0]]
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            at = index[dim] if len(index) > dim and index[:dim] == (FIRST,) * dim else None
            shorter = int((lengths < args[0].shape[dim]).sum())
            if type(at) is not int or at != -1:
                self.others.add(line_now())
            elif shorter:
                steps = self.found.setdefault(line_now(), {})
                steps[self.recorder.steps] = shorter, len(lengths)

    def sentences(self):
        for line, steps in self.found.items():
            if len(steps) >= OFTEN and line not in self.others:
                shorter, rows = next(iter(steps.values()))
                yield (
                    f"{line} takes the last place of what pad_packed_sequence() returns: that is "
                    f"padding in {shorter} of {rows} sequences, and not their end: take h_n, or of "
                    "each sequence the place length - 1"
                )
