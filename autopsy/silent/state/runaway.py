"""
Runaway: does a copy of weights run away, because a share of them is added to it at each step and
nothing is taken away?

An average is (1 - a) * copy + a * source. Without the first factor the copy grows with each step.
Told is a copy that no optimizer trains, which began as large as its source, into which the script
adds a share of that source at each of the first steps, and writes nothing else; and which is at the
end twice as large as it was, and as its source is, and whose network is called. A sum that began at
0 may be meant.
"""

from dataclasses import dataclass, field

from torch import Tensor

from ...tensors import few, is_sharded, storage_of
from ...watch.calls import ResultRef
from ...watch.deferred import params_of
from ...watch.events import Events

EARLY = 8  # steps whose writes are looked at
OFTEN = 3  # of these
GROWN = 2.0  # times
SUMS = ("add_", "add", "__iadd__")
SCALES = ("mul", "__mul__", "__rmul__")


@dataclass
class Copy:
    """Weights into which the script writes."""

    weight: Tensor
    line: str
    norm: Tensor  # before the first write
    source: Tensor | None = None
    source_norm: Tensor | None = None  # then
    share: float = 0.0
    steps: set = field(default_factory=set)
    is_meant: bool = False  # something else was written, too


class Runaway(Events):
    """Weights that no optimizer trains, and what is added to them."""

    def __init__(self, watch):
        self.names, self.recorder, self.deferred = watch.names, watch.recorder, watch.deferred
        self.copies = {}  # by the id of a storage

    def wrote(self, line, weights, name, given):
        if not 0 < self.recorder.steps < EARLY:
            return
        trained = {storage_of(p): p for opt in self.names.optimizers for p in params_of(opt)}
        for p, values in zip(weights, given, strict=True):
            if storage_of(p) in trained or is_sharded(p):
                continue
            key = id(storage_of(p))
            if key not in self.copies:
                self.copies[key] = Copy(p, line, self.deferred.norms([p])[0])
            copy, (source, share) = self.copies[key], self._added(name, values, trained)
            if source is None or source.shape != p.shape or copy.line != line:
                copy.is_meant = True
                continue
            if copy.source is None:
                copy.source, copy.source_norm = source, self.deferred.norms([source])[0]
            copy.share = share
            copy.steps.add(self.recorder.steps)

    def _added(self, name, values, trained):
        """(weight, share of it that is added), or (None, 0.0)."""
        tensors = [x for x in values if isinstance(x, Tensor)]
        numbers = [x for x in values if type(x) is float]
        if name.removeprefix("_foreach_") not in SUMS or len(tensors) != 1 or len(numbers) > 1:
            return None, 0.0
        source, made = trained.get(storage_of(tensors[0])), self.recorder.maker(tensors[0])
        if source is None and made:  # (1 - decay) * source
            source, numbers = self._scaled(made, trained) if not numbers else (None, ())
        is_share = len(numbers) == 1 and 0 < numbers[0] < 1
        return (source, numbers[0]) if is_share else (None, 0.0)

    def _scaled(self, made, trained):
        """(weight, numbers) if it is one times some."""
        numbers = []
        while isinstance(made, ResultRef):
            at = made.number
            call = next((c for c in reversed(self.recorder.calls) if c.number == at), None)
            if call is None or call.name not in (*SCALES, "detach", "part_of"):
                return None, ()
            given = [x for x in call.args if isinstance(x, Tensor | ResultRef)]
            numbers += [x for x in call.args if type(x) is float]
            made = given[0] if len(given) == 1 else None
        return trained.get(storage_of(made)) if made is not None else None, numbers

    def sentences(self):
        lines = {}
        called = {id(p) for net in list(self.names.roots) for p in net.parameters()}
        for copy in self.copies.values():
            if (
                id(copy.weight) not in called
                or copy.is_meant
                or len(copy.steps) < OFTEN
                or copy.weight.dim() < 2
            ):
                continue
            now = self.deferred.norms([copy.weight, copy.source])
            values = self.deferred.to_host([copy.norm, copy.source_norm, *now])
            began, source_began, ends, source_ends = values
            began_alike = source_began < GROWN * began < GROWN * GROWN * source_began
            if began_alike and ends > GROWN * max(began, source_ends):
                lines.setdefault((copy.line, copy.share), []).append((copy, began, ends))
        for (line, share), found in lines.items():
            names = few([self.names.of(copy.weight) for copy, *_ in found], 4)
            _, began, ends = found[0]
            yield (
                f"{names} run away from the weights that train: {line} adds {share:.3g} of these "
                f"at each step and takes nothing away: the norm of the first has grown from "
                f"{began:.3g} to {ends:.3g}; multiply by {1 - share:.3g} before, or use lerp_()"
            )
