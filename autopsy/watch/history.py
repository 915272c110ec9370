"""
History: how does the training go?

It keeps gradient norms, learning rates, and the framework that runs the steps. They explain a bad
number; if there was none, the last lines quote them.
"""

from collections import deque
from itertools import pairwise
from math import hypot, inf, isfinite
from weakref import ref

from ..advice import GROWN
from ..tensors import LIMIT, extent, few, storage_of
from .deferred import moved_by, params_of

HUGE = 1e4  # for a weight
SMALL = 0.05  # root mean square of weights
EVERY = 16  # steps: gradients of these are kept, too, five of them


class History:
    """Gradient norms and rates of the steps so far."""

    def __init__(self, names):
        self.names = names
        self.framework = ""  # that runs the steps: a key of FRAMEWORKS
        self.largest = 0.0  # gradient norm
        # id: (optimizer, its last gradient norms, those of every 16th step); each with its tensors'
        self._recent = {}
        self._lowest, self._highest = inf, (-inf, 0)  # rate of all optimizers; its first step
        self._written = {}  # id of a storage: the line that wrote it last, by hand
        self._start = {}  # id: (optimizer, the norms of its weights before its first step)

    def gradients(self, optimizer, step, norm, each):
        """Note a good gradient norm before a step, and that of each tensor."""
        self.largest = max(self.largest, norm)
        start = ref(optimizer), deque(maxlen=5), deque(maxlen=5)
        _, last, some = self._recent.setdefault(id(optimizer), start)
        last.append((norm, each))
        if step % EVERY == 0:
            some.append((norm, each))

    def after_step(self, rates, steps):
        """Note the rates: a tensor, which may be on a device, after few steps only."""
        now = steps.bit_count() < 2  # 0, 1, 2, 4, 8, ...
        plain = (rate for rate in rates if isinstance(rate, float | int) or (now and rate))
        for rate in map(float, plain):
            self._lowest = min(self._lowest, rate)
            if rate > self._highest[0]:
                self._highest = rate, steps

    def begin(self, optimizer, norms):
        """Note the norms of its weights before its first step; they stay on their device."""
        self._start[id(optimizer)] = ref(optimizer), norms

    def began_large(self, optimizer, p):
        """Whether this weight was beyond LIMIT before the first step of its optimizer."""
        _, start = self._start[id(optimizer)]
        began = {id(q): norm for q, norm in zip(params_of(optimizer), start, strict=False)}
        return not float(began.get(id(p), 0.0)) <= LIMIT

    def grown(self, deferred):
        """A sentence for each optimizer whose weights have grown tenfold, with the rates. Those
        that the script writes itself do not count."""
        for alive, start in self._start.values():
            params = params_of(alive()) if alive() else []
            pairs = zip(params, start, strict=False)
            pairs = [(p, x) for p, x in pairs if id(storage_of(p)) not in self._written]
            params, start = [p for p, _ in pairs], [x for _, x in pairs]
            now, before = map(deferred.to_host, (deferred.norms(params), start))
            # its square may be inf
            pairs = zip(params, now, strict=True)
            now = [norm if isfinite(norm) else extent(p).largest for p, norm in pairs]
            now, before = hypot(*filter(isfinite, now)), hypot(*before)
            usual = SMALL * hypot(*(p.numel() ** 0.5 for p in params))  # those near 0 always grow
            low, (high, step) = self._lowest, self._highest
            if low <= high and 0 < 10 * max(before, usual) < now:
                rates = f"{high:g}" if low == high else f"up to {high:g} (step {step})"
                grown = f"the norm of the weights has grown from {before:.3g} to {now:.3g}"
                yield f"{grown} at a rate of {rates}"

    def leaps(self):
        """A sentence for each Adam that moves weights in a step by more than they began with."""
        for alive, start in self._start.values():
            optimizer = alive()
            adam = optimizer and any("exp_avg" in state for state in optimizer.state.values())
            params = params_of(optimizer) if adam else []
            numbers = sum(p.numel() for p in params)
            size = hypot(*map(float, start)) / max(1, numbers) ** 0.5
            groups = optimizer.param_groups if params else ()
            rate = max((float(g.get("initial_lr", g["lr"])) for g in groups), default=0.0)
            if len(params) == len(start) and 0 < size < rate:
                yield (
                    f"{type(optimizer).__name__} moves each weight by up to its rate, {rate:g}, in "
                    f"a step, and they began with a size of {size:.2g}"
                )

    def grew(self):
        """Whether the gradients of an optimizer have grown tenfold in its last steps."""
        return any(_tenfold(last, last) for _, last, _ in self._recent.values())

    def wrote(self, line, weights):
        """The script has written into weights by hand."""
        self._written.update((id(storage_of(p)), line) for p in weights)

    def ran_away(self):
        """A sentence if weights that no optimizer holds, and the script writes, are huge; or ""."""
        alive = [optimizer() for optimizer, _ in self._start.values()]
        held = {p for optimizer in alive if optimizer for p in params_of(optimizer)}
        # Without an optimizer, to write weights is how they train.
        others = [p for p in self._weights() - held if p.grad is None] if alive else []
        for line, found in self._huge(others).items():
            names = few([name for _, name in sorted(found, key=lambda row: row[1])], 2)
            return f"what {line} writes into {names} grows: up to {max(found)[0]:.3g} now"
        return ""

    def by_hand(self):
        """The same if no optimizer trains, and they are finite."""
        weights = [p for p in self._weights() if not extent(p).is_bad] if not self._start else []
        for line, found in self._huge(weights).items():
            return (
                f"the weights that {line} updates have grown to {max(found)[0]:.3g}, with gradient "
                f"norms of up to {self.largest:.3g}"
            )
        return ""

    def _weights(self):
        return {p for root in list(self.names.roots) for p in root.parameters()}

    def _huge(self, weights):
        """{the line that wrote them last: [(largest number, name)]} of those that are huge."""
        huge = {}
        for p in weights:
            line = self._written.get(id(storage_of(p)))
            if line and (largest := extent(p).largest) > HUGE:
                huge.setdefault(line, []).append((largest, self.names.of(p)))
        return huge

    def growth(self):
        """A sentence for each optimizer whose gradients have grown tenfold, in its last steps or
        more slowly, with the tensor that has most of it."""
        for alive, last, some in self._recent.values():
            if _tenfold(last, last):
                lower = self.negative() or "a lower lr may be the cure"
                yield f"{GROWN}: {_listed(n for n, _ in last)} ({lower}){self._most(alive, last)}"
            elif some and _tenfold(some, last):
                some = [*some, last[-1]]
                norms = _listed(n for n, _ in some)
                yield f"gradient norms, of every {EVERY}th step: {norms}{self._most(alive, some)}"

    def _most(self, alive, steps):
        """Name the tensor with the largest gradient at the last of these steps."""
        each = [values for _, values in steps]
        params = moved_by(alive()) if alive() else []
        if len(params) < 2 or any(len(values) != len(params) for values in each):
            return ""  # shards, say
        k = each[-1].index(max(each[-1]))
        return f"; of {self.names.of(params[k])}: {_listed(values[k] for values in each)}"

    def negative(self):
        """A sentence if a learning rate is below 0; else ""."""
        return f"a learning rate is negative: {self._lowest:g}" if self._lowest < 0 else ""

    def sentences(self):
        """Sentences about what is finite and looks wrong."""
        if negative := self.negative():
            yield negative


def _tenfold(before, now):
    """Whether they grow to more than tenfold, and do not just go up and down."""
    norms = [norm for norm, _ in (before if before is now else [*before, now[-1]])]
    rises = all(after > norm / 4 for norm, after in pairwise(norms))
    return rises and 0 < 10 * norms[0] < norms[-1]


def _listed(norms):
    return ", ".join(f"{norm:.3g}" for norm in norms)
