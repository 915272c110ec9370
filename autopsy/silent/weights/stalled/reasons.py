"""
Reasons: which weights do not move, though they should, and why?

At the end of the script it looks once at what __init__.py read. It ignores what you may have
intended (a frozen part, an optimizer for the head alone).
"""

import gc
from collections import Counter
from math import floor, log2
from statistics import median

import torch
from torch import nn

from ....tensors import HALF, few
from ....watch.names import is_target
from .outside import Outside
from .weight_history import READ, names_of

CUTS = {
    "": "look between them and the loss for detach(), .data, item(), NumPy, torch.tensor()",
    "no_grad": "they run under torch.no_grad()",
    "checkpoint": "they run in a checkpoint whose inputs need no gradient: use_reentrant=False",
}
TINY = 1e-6  # of the highest rate
FALLEN = 0.1  # of the same
DENSE = (nn.Linear, nn.modules.conv._ConvNd, nn.Embedding)


class Reasons:
    """Sentences about the weights of all optimizers and modules."""

    def __init__(self, stalled):
        self.stalled, self.names = stalled, stalled.names
        self.living = []  # weights

    def sentences(self):
        """All sentences. Here the host waits for the device for the first time."""
        if len({w.optimizer for w in self.stalled.weights.values()}) > 1:
            gc.collect()  # what the script has let go is no fault, also in a cycle
        weights = self.living = [w for w in self.stalled.weights.values() if w.p is not None]
        for w in weights:
            w.norms = self.stalled.deferred.to_host(w.norms)
            w.norm_before = self.stalled.deferred.to_host(w.norm_before)
            numbers = iter(self.stalled.deferred.to_host(g for g in w.grads if g is not None))
            w.grads = [None if g is None else next(numbers) for g in w.grads]
        if shapes := self.stalled.recreated.shapes:
            yield (
                f"a forward makes weights of the shapes {few(shapes, 4)} anew at each step, and no "
                "optimizer holds them: make them once, in __init__()"
            )
        for seen in self.stalled.optimizers.values():
            if seen.steps >= READ:
                yield from self._of(seen, [w for w in weights if w.optimizer is seen])
        for without, why in CUTS.items():
            cut = [
                w
                for w in self.stalled.cut
                if w.never_had_gradient and w.never_changed and w.without == without
            ]
            # what is in eval() is not to be trained
            cut = [w for w in cut if not without or (w.read_in_train_mode and not w.frozen)]
            cut = [w for w in cut if not is_target(self.names.of(w.p))]
            if cut:
                yield (
                    f"no gradient has reached {self._names(cut)}, though an optimizer holds them "
                    f"and the loss depends on them: {(not without and cut[0].end) or why}"
                )
        yield from Outside(self.living, self.stalled).sentences()

    def _names(self, weights):
        return names_of(weights, self.names)

    def _of(self, seen, mine):
        """Sentences about one optimizer."""
        # the weights of two optimizers are moved by the one in use
        others = [w.other_optimizer for w in mine]
        if not seen.had_gradient and not all(o and o.last > seen.first for o in others):
            yield self._without_gradient(seen, mine)
        with_gradient = [
            w for w in mine if w.always_had_gradient and not w.may_have_masters and float(w.rate)
        ]
        unchanged = [w for w in with_gradient if w.never_changed]
        yield from self._rounded(with_gradient, unchanged)
        yield from self._slow(seen, with_gradient, unchanged)
        yield from self._dead_since(seen, mine)
        yield from self._dead(mine)

    def _without_gradient(self, seen, mine):
        why = "no backward pass has reached them"
        if self.names.roots:
            why = "it holds other tensors than the modules that were called (was it built "
            why += "before the model was copied, moved or replaced?)"
        if not any(w.p.requires_grad for w in mine):
            why = "requires_grad is False for each"
        elif end := self.stalled.leads_nowhere or seen.end:
            why = end
        elif any(w.module and w.module() for w in mine):
            why = "is zero_grad() called between backward() and step()?"
        return (
            f"{seen.made} has made {seen.steps} steps, and none of its {len(mine)} parameters "
            f"had a gradient in any: {why}"
        )

    def _rounded(self, with_gradient, unchanged):
        """Weights that do not change though they have gradients, or most of their numbers do."""
        for dtype in dict.fromkeys(w.p.dtype for w in unchanged):
            some = [w for w in unchanged if w.p.dtype == dtype]
            # In fp32 one may not change: the gradient of a bias before BatchNorm is mere rounding.
            if dtype in HALF or len(unchanged) == len(with_gradient):
                rates = few(sorted({f"{float(w.rate):g}" for w in some}), 4)
                tensors = "tensor" if len(some) == 1 else "tensors"
                yield (
                    f"{len(some)} {str(dtype).removeprefix('torch.')} {tensors} had gradients at "
                    f"every step read and never changed: {self._names(some)} (lr {rates})"
                    + _rounding(some, dtype)
                )
        partly = [
            w
            for w in with_gradient
            if w.p.dtype in HALF and w not in unchanged and w.rounded_away() > 0.5
        ]
        if partly:
            share = few([f"{w.rounded_away():.0%}" for w in partly], 4)
            yield (
                f"most numbers of {self._names(partly)} have not moved since the first step "
                f"({share} of a sample)" + _rounding(partly, partly[0].p.dtype)
            )

    def _dead_since(self, seen, mine):
        """Gradients that have become 0."""
        dead, since, end, is_off = seen.dead or ((), 0, "", False)
        if not any(w.had_nonzero_gradient for w in dead) or any(w.grads[-1] for w in dead):
            return
        becomes = f": it becomes 0 {end}" if end else ""
        whole = len(dead) == len([w for w in mine if w.gradient_always_present])
        if whole and seen.live < since:
            yield (
                f"each gradient of {seen.name} is exactly 0 since step {seen.live + 1} of "
                f"{seen.steps}, though the loss is not{becomes}"
            )
        elif seen.zeros > seen.steps / 2:
            yield (
                f"each gradient of {seen.name} is exactly 0 in {seen.zeros} of {seen.steps} "
                f"steps, though the loss is not{becomes}"
            )
        elif not (whole or is_off):
            yield (
                f"the gradient of {self._names(dead)} is exactly 0 at each step read since "
                f"step {since} of {seen.steps}, though the loss is not{becomes}"
            )

    def _slow(self, seen, with_gradient, unchanged):
        """Whether all weights have stopped, because the rate is too small."""
        late = [w for w in with_gradient if len(w.norms) > READ and len(set(w.norms[-READ:])) == 1]
        late = [w for w in late if float(w.rate) < FALLEN * seen.highest]  # else it has converged
        since = max((w.steps[-READ] for w in late), default=0)
        often = ""
        if not late and all(float(w.rate) < TINY * seen.highest for w in with_gradient):
            late = [w for w in with_gradient if abs(w.norms[-1] - w.norms[-2]) < TINY * w.norms[-1]]
            since = max((w.steps[-2] for w in late), default=0)
            often = " (is the scheduler called once a batch, and not once an epoch?)"
        if with_gradient and len(late) == len(with_gradient) and not unchanged:
            rate = float(with_gradient[0].rate)
            yield (
                f"no weight of {seen.name} has moved since step {since} of {seen.steps} at the "
                f"latest: its lr has fallen from {seen.highest:.2g} to {rate:.2g}{often}"
            )

    def _dead(self, mine):
        """Whole layers whose gradient is exactly 0, if no layer of the same shape has another one:
        an expert that no token chose is no fault. In a module of the script's own, one such tensor
        may be unused on purpose."""
        alive = {w.p.shape for w in mine if w.had_nonzero_gradient}
        read = [w for w in mine if w.module and len(w.grads) > READ]
        dead = [w for w in read if not w.had_nonzero_gradient and not w.never_had_gradient]
        whole = [w for w in dead if w.p.dim() > 1]  # that of a bias alone may have to be 0
        if any(map(self._moves_now, whole)):
            return  # what was switched off at each read came late
        if alive:
            owners = Counter(w.module() for w in whole)
            whole = [w for w in whole if isinstance(w.module(), DENSE) or owners[w.module()] > 1]
            dead = [w for w in dead if w.module() in {w.module() for w in whole}]
        off = alive and whole and whole[0].is_off
        if whole and not off and not any(w.p.shape in alive for w in whole):
            why = "a ReLU that is 0 for all inputs, a factor 0, or an underflow in fp16 (loss "
            why += "scaling)?"
            if whole[0].end:
                why = f"it becomes 0 {whole[0].end}"
            if len(zeros := [w for w in whole if not any(w.norms)]) > 1:
                why += f"; {self._names(zeros)} hold nothing but 0: begin with other numbers in one"
            yield f"the gradient of {self._names(dead)} was exactly 0 at every step read: {why}"

    def _moves_now(self, w):
        """Whether it has a gradient at the end, or has moved for the first time since the last
        read."""
        last = [] if w.p.grad is None else self.stalled.deferred.norms([w.p.grad])
        *grads, norm = self.stalled.deferred.to_host([*last, *self.stalled.norms_of(w.p)])
        return any(grads) or {*w.norms} - {norm} == {w.norms[0]}


def _rounding(weights, dtype):
    """Say in numbers why they do not change, if a sample shows it."""
    if not (shown := [w for w in weights if w.rounded_away() > 0.5]):
        return ""
    size = median(shown[0].last.abs().double().tolist())
    update = float(shown[0].update.abs().max())
    half = torch.finfo(dtype).eps * 2.0 ** floor(log2(size)) / 2 if size else 0.0
    cure = "is the lr too low, or the gradient clipped to almost nothing?"
    if dtype in HALF:
        cure = "keep the weights in fp32 (torch.autocast computes in half), or fp32 masters"
    return (
        f". An update of at most {update:.2g} is below half the last bit of {size:.2g}, which is "
        f"{half:.2g}: {cure}"
    )
