"""
Slope: is the backward of a function the slope of its forward?

It compares the backward with central differences in a few random directions: in float64, or in fp32
if a kernel has no float64. It reports no function whose forward is a step or the identity: there
the backward is a choice (straight-through, gradient reversal). It draws from generators of its own
and writes into copies.
"""

from functools import partial

import torch
from torch import Tensor

from ..step import rng_states, set_rng_states
from ..tensors import device_of, floats_in

DIRECTIONS = 5
# dtype: (relative step, tolerance): the step is near the third root of the last bit
TYPES = {torch.float64: (1e-5, 5e-3), torch.float32: (1e-2, 5e-2)}
CHOICE = object()  # what a forward is that is a step or the identity: its backward is a choice


def differs(function, args, kwargs, wanted, rng):
    """Return "" if they agree, None if that is unknown, CHOICE, else a sentence. `wanted`: whether
    each argument needs a gradient; None if unknown."""
    device = device_of(args)
    before = rng_states(device)
    slope = partial(Slope, function, args, kwargs, wanted, rng)
    try:
        return slope(torch.float64).differs()
    except Exception:  # a kernel that knows no float64
        return slope(torch.float32).differs()
    finally:
        set_rng_states(before, device)


class Slope:
    """One function at one point."""

    def __init__(self, function, args, kwargs, wanted, rng, dtype):
        self.function, self.kwargs, self.rng, self.dtype = function, kwargs, rng, dtype
        self.args = [a.to(dtype) if _real(a) else a for a in args]
        self.known = wanted is not None
        real = [k for k, a in enumerate(args) if _real(a) and a.numel()]
        self.wanted = [k for k in real if not self.known or wanted[k]]
        self.generator = torch.Generator().manual_seed(0)

    def at(self, k=None, shift=None, graph=False):
        """Its real results with argument k shifted."""
        args = [a.clone() if isinstance(a, Tensor) else a for a in self.args]
        if k is not None:
            args[k] = args[k] + shift
        if graph:
            for j in self.wanted:
                args[j].requires_grad_()
        set_rng_states(self.rng, device_of(args))
        # a function may write into what it is given, but not into a leaf
        with torch.set_grad_enabled(graph):
            given = [a * 1 if graph and j in self.wanted else a for j, a in enumerate(args)]
            out = self.function(*given, **self.kwargs)
        return floats_in(out), args

    def differs(self):
        """Compare all arguments that need a gradient."""
        # the backward: gradients of the results' sum with random weights
        outs, args = self.at(graph=True)
        weights = [self._random(t) for t in outs]
        leaves = [args[k] for k in self.wanted]
        both = zip(outs, weights, strict=True)
        live = [(t * w).sum() for t, w in both if t.requires_grad]
        if not live or not leaves:
            return None
        slopes = torch.autograd.grad(sum(live), leaves, allow_unused=True)
        # what has no graph on purpose (mark_non_differentiable) has no slope
        weights = [w * t.requires_grad for t, w in zip(outs, weights, strict=True)]
        # the differences, one argument after the other
        answers = []
        for k, slope in zip(self.wanted, slopes, strict=True):
            if slope is None and not self.known:
                continue
            answer = self._argument(k, slope, weights)
            if answer in (None, CHOICE):
                return answer
            answers.append(answer)
        return next(filter(None, answers), "")

    def _argument(self, k, slope, weights):
        """Compare, along each direction, the backward with central differences."""
        size, tolerance = TYPES[self.dtype]
        x = self.args[k]
        slope = torch.zeros_like(x) if slope is None else slope.to(x.dtype)
        h = size * max(float(x.double().square().mean().sqrt()), 1e-3)
        seen, wrong = 0, []
        for _ in range(DIRECTIONS):
            u = self._random(x)
            coarse = _inner(self._slopes(k, u, h), weights)
            slopes = self._slopes(k, u, h / 4)
            if self._is_choice(x, u, slopes, slope, weights):
                return CHOICE
            fine = _inner(slopes, weights)
            given = _inner([slope * u], [torch.ones_like(u)])
            scale = max(float(slope.double().norm()), abs(fine))
            if abs(coarse - fine) > tolerance * scale / 4:
                continue  # a kink or noise between the two
            seen += 1
            if abs(given - fine) > tolerance * scale:
                wrong.append((abs(given - fine), given, fine))
        if seen < 3:
            return None
        if 2 * len(wrong) <= seen:
            return None if wrong else ""
        _, given, fine = max(wrong)
        return (
            f"its backward gives {given:.4g} for argument {k} along a random direction, central "
            f"differences give {fine:.4g} (so in {len(wrong)} of {seen} directions)"
        )

    def _slopes(self, k, u, h):
        """Central differences of all results, along u."""
        (up, _), (down, _) = self.at(k, h * u), self.at(k, -h * u)
        return [(a - b).double() / (2 * h) for a, b in zip(up, down, strict=True)]

    def _is_choice(self, x, u, slopes, slope, weights):
        """Whether the forward is constant, or the identity, nearby."""
        flat = [s.abs() <= 1e-6 for s in slopes]
        if all(f.all() for f in flat):
            return bool(slope.abs().amax() > 0)
        if len(slopes) != 1 or slopes[0].shape != x.shape:
            return False
        loose = 1e-4 if self.dtype is torch.float64 else 1e-2
        same = (slopes[0] - u).abs() <= loose * (1 + u.abs())
        if same.all():
            return True
        # the identity, and constant elsewhere: its backward may pass everything on
        w = weights[0]
        along = w * (slope * w).sum() / w.square().sum()
        passes = float((slope - along).norm()) <= 1e-3 * float(slope.norm())
        return passes and bool((same | flat[0]).all())

    def _random(self, t):
        """Numbers of the shape of t, from a generator of our own."""
        drawn = torch.randn(t.shape, generator=self.generator, dtype=torch.float64, device="cpu")
        return drawn.to(t.device, self.dtype)


def _inner(slopes, weights):
    return sum(float((s * w.double()).sum()) for s, w in zip(slopes, weights, strict=True))


def _real(a):
    return isinstance(a, Tensor) and a.is_floating_point()
