"""
Course: how does the training go?

Gradient norms, learning rates, weights that stand still, and who runs the steps. These explain a
bad number, or are said at the end where there was none. It ends no script.
"""

from __future__ import annotations

from collections import deque

from .advice import GROWN
from .ledger import moved_by
from .tensors import HALF, few, numbers_of


class Course:
    """What the steps so far have in common."""

    def __init__(self):
        self.framework = ""  # that runs the steps: a key of FRAMEWORKS
        self.largest = 0.0  # gradient norm
        self._recent = {}  # optimizer: its last gradient norms
        self._rates = set()
        self._norms = {}  # dtype: {parameter: its norms in some steps}

    def gradients(self, optimizer, norm):
        """Good ones, before a step."""
        self.largest = max(self.largest, norm)
        self._recent.setdefault(id(optimizer), deque(maxlen=5)).append(norm)

    def rated(self, rates):
        """Those of a step."""
        self._rates.update(rates)

    def growth(self):
        """A sentence for each optimizer whose gradients have grown tenfold."""
        for norms in self._recent.values():
            if 0 < 10 * norms[0] < norms[-1]:
                listed = ", ".join(f"{norm:.3g}" for norm in norms)
                lower = self.negative() or "a lower lr may be the cure"
                yield f"{GROWN}: {listed} ({lower})"

    def negative(self):
        """A sentence, where a learning rate is below 0."""
        lowest = min(self._rates, default=1.0)
        return f"a learning rate is negative: {lowest:g}" if lowest < 0 else ""

    def weights(self, optimizer, ledger):
        """After one of a few steps."""
        self._rates.update(float(group.get("lr", 1.0)) for group in optimizer.param_groups)
        for p in moved_by(optimizer):
            if p.is_floating_point() and bool(numbers_of(p.grad).any()):
                norms = self._norms.setdefault(p.dtype, {}).setdefault(id(p), [])
                numbers = numbers_of(p.cpu() if p.is_mps else p)  # MPS has no float64
                norms += ledger.to_host(ledger.norms([numbers.double()]))

    def strange(self):
        """Sentences of what is not bad, and strange."""
        rates = few([f"{rate:g}" for rate in sorted(self._rates)], 4)
        for dtype, norms in self._norms.items():
            read = [set(x) for x in norms.values() if len(x) > 2]
            still = sum(len(x) == 1 for x in read)
            # In fp32 one may stand still: the gradient of a bias before BatchNorm is mere rounding.
            strange = dtype in HALF or still == len(read) or 0 in self._rates
            if still and strange:
                yield (
                    f"{still} {str(dtype).removeprefix('torch.')} tensors had gradients at every "
                    f"step read and never changed (lr {rates})"
                )
        if negative := self.negative():
            yield negative
