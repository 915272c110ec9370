"""
Products: is each result multiplied with the numbers of all samples?

Of a ratio [n] and advantages [n, 1] broadcasting makes [n, n], and its mean has lost which action
had which advantage; so has a product with a difference of both. In the graphs of some losses it
looks for such a product, of a part with a graph and a tensor without, and after it nothing but
signs, bounds and a mean or sum of all. It is told if the tensor without a graph is another one each
time (a grid is not), and as long as the batch, or of several lengths. A line that says None or
unsqueeze means it.
"""

from contextlib import suppress

from torch import nn

from ...frames import call_at, line_of, script_frames
from ...tensors import PLAIN, flat_tensors, storage_of
from ...watch.events import Events
from ...watch.graph import graph_of

FIRST = 12  # backward passes; then those of each step that is a power of 2
MOST = 24
OFTEN = 3  # of one line
NODES = 64  # between a loss and a product
NAMES = ("mul", "__mul__", "__rmul__", "multiply", "div", "__truediv__", "true_divide")
OF_ALL = ("MeanBackward0", "SumBackward0")
SUMS = ("AddBackward0", "SubBackward0")
PRODUCTS = ("MulBackward0", "DivBackward0")
BOUNDS = [
    f"{name}Backward0"
    for name in ("Neg", "Minimum", "Maximum", "Where", "Clamp", "ClampMin", "ClampMax", "Relu")
] + ["ClampBackward1", "ClampMinBackward1", "ClampMaxBackward1"]
ON_PURPOSE = ("None", "unsqueeze", "newaxis", "outer")


class Products(Events):
    """Products of all pairs, in losses."""

    recorded_only = True

    def __init__(self, watch):
        self.recorder, self.passes, self.looks = watch.recorder, 0, 0
        self.found = {}  # line: Square

    def backward(self, losses):
        self.passes += 1
        now = self.passes <= FIRST or self.recorder.steps.bit_count() < 2
        if not now or self.looks == MOST:
            return
        self.looks += 1
        squares = []
        with suppress(RuntimeError):  # a part of the graph is freed
            squares = [square for loss in losses for square in _squares(loss.grad_fn)]
        if squares:
            self._look(squares)

    def _look(self, squares):
        """Note the first call that makes such a product."""
        calls = self.recorder.of_this_step
        networks = [c for c in calls if c.grad and isinstance(c.function, nn.Module)]
        rows = {c.shape[0] for c in networks if c.shape} | {len(networks)}  # one call a sample
        known = {made: t for t, made in self.recorder.known.items()}
        for call in calls:
            for part, other in squares if call.name in NAMES else ():
                given = [known.get(x, x) for x in [*call.uses(), *flat_tensors(call.args)]]
                meant = any(t.shape == other.shape and storage_of(t) is storage_of(other)
                            for t in flat_tensors(given))  # fmt: skip
                if meant and not self._is_same(part, other, calls):
                    self._note(call, part, other, len(other) in rows)
                    return

    def _is_same(self, part, other, calls):
        """Whether the tensor is what a network has made, of which the part is made, too."""
        made = self.recorder.memory.get(storage_of(other))
        call = next((c for c in calls if made and c.number == made.number and c.grad), None)
        if call is None or made.k or not isinstance(call.function, nn.Module):
            return False
        params = {*map(id, call.function.parameters())}
        return any(id(getattr(node, "variable", None)) in params for node in graph_of([part]))

    def _note(self, call, part, other, is_batch):
        frames = script_frames(call.frames)
        text = call_at(*frames[-1][:2]) if frames else "None"
        if any(word in text for word in ON_PURPOSE):
            return
        shapes = str(_shape(part)), str([*other.shape])
        if other.numel() > len(other):
            shapes = self._of_difference(other)
            if not shapes:
                return
        square = self.found.setdefault(line_of(frames), Square(other, shapes))
        square.note(other, shapes, is_batch)

    def _of_difference(self, t):
        """The shapes of [n] and [n, 1] whose difference it is; or None."""
        made = self.recorder.memory.get(storage_of(t))
        calls = {call.number: call for call in self.recorder.of_this_step}
        call = calls.get(made.number) if made else None
        if call is None or call.name.strip("_") not in ("sub", "rsub", "add", "radd"):
            return None
        alive = {ref: [*t.shape] for t, ref in self.recorder.known.items()}
        given = [alive.get(x) or self._before(x, calls, alive) for x in call.uses()]
        plain = flat_tensors(call.args)
        if len({id(storage_of(x)) for x in plain} | {x.memory for x in call.uses()}) < 2:
            return None  # of all pairs of samples
        given += [[*x.shape] for x in plain]
        n = len(t)
        return tuple(map(str, given)) if given in ([[n], [n, 1]], [[n, 1], [n]]) else None

    def _before(self, ref, calls, alive):
        """The shape of what was detached."""
        call = calls.get(ref.number)
        quiet = call is not None and call.name in ("detach", "to", "float")
        given = [x for x in call.uses() if quiet] if call is not None else []
        return alive.get(given[0]) if given else None

    def sentences(self):
        for line, square in self.found.items():
            if square.is_sure:
                one, two = square.shapes
                yield (
                    f"the product at {line} is one of all pairs: {one} and {two} make a square, so "
                    "each result is multiplied with the numbers of all samples: give both one "
                    "shape, with squeeze(1) or [:, None]"
                )


class Square:
    """What was seen of a line that makes a square."""

    def __init__(self, other, shapes):
        self.first, self.shapes = other.detach().clone(), shapes
        self.times, self.lengths, self.is_batch = 0, set(), True
        self.other = []  # on its device: is it another tensor than the first one?

    def note(self, other, shapes, is_batch):
        self.times += 1
        self.lengths.add(len(other))
        self.is_batch &= is_batch
        if other.shape == self.first.shape and other.device == self.first.device:
            self.other.append((other.detach() != self.first).any())

    @property
    def is_sure(self):
        if self.times < OFTEN or not (self.is_batch or len(self.lengths) > 1):
            return False
        return len(self.lengths) > 1 or any(map(bool, self.other))


def _squares(node):
    """(the part with a graph, the tensor without) of each such product before a loss."""
    left = [node] if node else []
    for node in left:
        name, parts = node.name(), [part for part, _ in node.next_functions]
        given = [part for part in parts if part]
        more = name in (*OF_ALL, *BOUNDS)
        if name in PRODUCTS:
            other = _other(node, parts)
            more = other is None or other.dim() == 0
            if not more and _is_square(given, other):
                yield given[0], other
        elif name in SUMS:  # a matrix may be meant, if it is compared with another one
            whole = [part for part in given if len(_shape(part)) > 1 and 1 not in _shape(part)]
            more = len(given) == len(parts) and len(whole) < 2
            more |= not _shape(node)
        if more and len(left) < NODES:
            left += given


def _other(node, parts):
    """Of a product: the tensor without a graph, or None."""
    if len(parts) == 2 and not all(parts):
        return node._saved_self if parts[0] is None else node._saved_other
    return None


def _is_square(given, other):
    """Of [n] and [n, 1], or of one of them and a square."""
    if len(given) != 1 or type(other) not in PLAIN or not other.dim() or len(other) < 3:
        return False
    shapes, n = ([*other.shape], _shape(given[0])), len(other)
    return shapes in (([n], [n, 1]), ([n, 1], [n]), ([n, n], [n]), ([n, n], [n, 1]))


def _shape(node):
    """Of what it has made; of a weight, of itself."""
    return [*getattr(node, "variable", node._input_metadata[0]).shape]
