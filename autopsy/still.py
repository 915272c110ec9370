"""
Still: which weights do not move, though they should, and why?

It reads weights and gradients after the steps 0, 1, 2, 4, 8, ... of each optimizer: norms, and a
few numbers of each tensor, which stay on the device until the script ends. Once, after the third
step, it makes the forward pass again, to see whether the loss depends on weights that get no
gradient; these are moved for that and put back bit by bit. Apart from that it touches nothing.
What may be intended (a frozen part, an optimizer for the head alone) is passed over.
"""

from __future__ import annotations

from math import floor, log2
from statistics import median
from weakref import ref

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from .ledger import moved_by
from .spike import Forward
from .tensors import HALF, few, numbers_of

SAMPLE = 64  # numbers of a tensor that are followed
READ = 3  # times at least
DENSE = (nn.Linear, nn.modules.conv._ConvNd)


class Followed:
    """What was seen of an optimizer, which may be gone at the end."""

    def __init__(self, optimizer):
        self.alive, self.name = ref(optimizer), type(optimizer).__name__
        self.steps = self.fed = 0  # fed: steps in which a parameter had a gradient
        self.zero = {}  # group: the step since which its rate is 0
        self.highest = 0.0  # rate


class Weight:
    """What was read of one parameter."""

    def __init__(self, p, name="", module=None, unlisted=False):
        self.alive, self.name, self.module = ref(p), name, module and ref(module)
        self.unlisted = unlisted  # its module lies in a plain list
        self.optimizer, self.group, self.masters = None, 0, False
        self.norms, self.grads, self.rate = [], [], 0.0
        self.steps = []
        self.first = self.now = self.update = None  # of a sample

    @property
    def p(self):
        return self.alive()

    @property
    def stands(self):
        return len(self.norms) >= READ and len(set(self.norms)) == 1

    @property
    def fed(self):
        """It had a gradient, not 0, whenever it was read."""
        return len(self.grads) >= READ and all(self.grads)

    @property
    def starved(self):
        return not any(grad is not None for grad in self.grads)

    def lost(self):
        """The share of the sampled numbers that have an update and are as they were, because it is
        lost in rounding."""
        if self.update is None or not (moves := self.update != 0).any():
            return 0.0
        lost = (self.now.double() - self.update).to(self.now.dtype) == self.now
        return float((lost & moves & (self.first == self.now)).sum() / moves.sum())


class Still:
    """The weights of all optimizers and modules."""

    def __init__(self, hooks, names, ledger, tape):
        self.hooks, self.names, self.ledger, self.tape = hooks, names, ledger, tape
        self.weights = WeakIdKeyDictionary()  # parameter: Weight, in the order of the forward
        self.optimizers = {}  # id: Followed
        self.cut = []  # weights without a gradient, on which the loss depends

    def stepped(self, optimizer):
        """After a step, before the tape forgets it."""
        seen = self.optimizers.get(id(optimizer))
        if not seen or seen.alive() is not optimizer:
            seen = self.optimizers[id(optimizer)] = Followed(optimizer)
        step = seen.steps
        seen.steps += 1
        seen.fed += bool(moved_by(optimizer))
        for k, group in enumerate(optimizer.param_groups):
            rate = group.get("lr", 1.0)
            known = isinstance(rate, float | int)  # not on a device
            if known and rate == 0:
                seen.zero.setdefault(k, step)
            else:
                seen.zero.pop(k, None)
            seen.highest = max(seen.highest, rate if known else 0.0)
        if step & (step - 1) == 0:
            self._read(optimizer, seen)
        if step == READ - 1 and self.hooks.world == 1:
            self._cut_off(seen)

    def _read(self, optimizer, seen):
        called = [getattr(call.function, "_orig_mod", call.function) for call in self.tape.calls]
        for root in dict.fromkeys([*called, *self.names.roots]):
            if root in self.names.roots:
                self._list(root)
        for k, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                w = self.weights.setdefault(p, Weight(p))
                w.optimizer, w.group, w.rate = seen, k, group.get("lr", 1.0)
                if p.grad is not None and p.is_floating_point():
                    self._sample(w, optimizer, group)
        for p, w in self.weights.items():
            if w.optimizer in (None, seen) and p.is_floating_point():
                data = p.detach().cpu() if p.is_mps else p.detach()  # MPS has no float64
                w.norms += self.ledger.norms([numbers_of(data).double()])
                w.grads += [None] if p.grad is None else self.ledger.norms([p.grad])
                w.steps.append(self.tape.steps)

    def _list(self, root, prefix="", unlisted=False):
        """All parameters under this module, those in plain lists of modules, too."""
        for path, module in root.named_modules(prefix=prefix):
            for name, p in module.named_parameters(path, recurse=False):
                w = self.weights.setdefault(p, Weight(p))
                if not w.module:
                    w.name, w.module, w.unlisted = name, ref(module), unlisted
            for name, value in vars(module).items():
                for k, inner in enumerate(value) if type(value) in (list, tuple) else ():
                    if isinstance(inner, nn.Module) and inner is not root:
                        self._list(inner, f"{path}.{name}.{k}".lstrip("."), True)

    def _sample(self, w, optimizer, group):
        """Some of its numbers, and what a step of torch's own optimizers subtracts from them."""
        p, state = w.p, optimizer.state.get(w.p, {})
        if not type(optimizer).__module__.startswith("torch.optim"):
            wide = [t for t in state.values() if isinstance(t, torch.Tensor) and t.shape == p.shape]
            w.masters = any(t.itemsize > p.itemsize for t in wide)  # as it may be
            return

        def some(t):
            flat = numbers_of(t.detach()).reshape(-1)
            return flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE].clone()

        if "exp_avg_sq" in state and "betas" in group:
            beta1, beta2 = group["betas"]
            mean = some(state["exp_avg"]).double() / (1 - beta1**w.optimizer.steps)
            square = some(state["exp_avg_sq"]).double() / (1 - beta2**w.optimizer.steps)
            update = mean / (square.sqrt() + group["eps"])
        elif state.get("momentum_buffer") is not None:
            update = some(state["momentum_buffer"]).double()
        elif isinstance(optimizer, torch.optim.SGD):
            update = some(p.grad).double()
        else:
            return
        w.now, w.update = some(p), update * group["lr"]
        w.first = w.now if w.first is None else w.first

    def _cut_off(self, seen):
        """Of weights without a gradient: does the loss depend on them?"""
        mine = [w for w in self.weights.values() if w.optimizer is seen and w.module]
        cut = [w for w in mine if w.starved and w.p.requires_grad and w.p.is_floating_point()]
        if not cut or len(cut) == len(mine):
            return
        params, on_purpose = [w.p for w in cut], set()

        def before_forward(module, args):
            if not torch.is_grad_enabled():
                on_purpose.add(module)

        hooks = [w.module().register_forward_pre_hook(before_forward) for w in cut]
        copies = [p.detach().clone() for p in params]
        try:
            with (
                torch.autograd._unsafe_preserve_version_counter(tuple(params)),
                Forward(self.tape) as again,
            ):
                loss = again()
                if again.losses and again() == loss:
                    for p in params:
                        p.mul_(1.5).add_(0.1)
                    self.cut += [w for w in cut if again() != loss]
                for p, copied in zip(params, copies, strict=True):
                    p.copy_(copied)
        except Exception:  # what cannot be made again proves nothing
            for p, copied in zip(params, copies, strict=True):
                p.copy_(copied)
        for hook in hooks:
            hook.remove()
        self.cut = [w for w in self.cut if w.module() not in on_purpose]

    # At the end

    def sentences(self):
        """What is to be said; the first time that the host waits."""
        weights = self.living = [w for w in self.weights.values() if w.p is not None]
        for w in weights:
            w.norms = self.ledger.to_host(w.norms)
            numbers = iter(self.ledger.to_host(g for g in w.grads if g is not None))
            w.grads = [None if g is None else next(numbers) for g in w.grads]
        for seen in self.optimizers.values():
            if seen.steps >= READ:
                yield from self._of(seen, [w for w in weights if w.optimizer is seen])
        if cut := [w for w in self.cut if w.starved]:
            yield (
                f"no gradient has reached {self._names(cut)}, though the loss depends on them: "
                "look between them and the loss for detach(), .data, item(), NumPy, torch.tensor()"
            )
        yield from self._in_no_optimizer()
        yield from self._frozen_between()

    def _names(self, weights):
        names = [w.name if w.unlisted else self.names.of(w.p) for w in weights[:4]]
        return few([*names, *weights[4:]], 4)

    def _of(self, seen, mine):
        """What is said of one optimizer."""
        if not seen.fed and mine:
            why = "it holds other tensors than the modules that were called (was it built before "
            why += "the model was copied, moved or replaced?)"
            if any(w.module for w in mine):
                why = "is zero_grad() called between backward() and step()?"
            yield (
                f"{seen.name} has made {seen.steps} steps, and none of its {len(mine)} parameters "
                f"had a gradient in any: {why}"
            )
        for k, since in seen.zero.items():
            group = [w for w in mine if w.group == k and any(w.grads)]
            late = seen.steps - since
            if group and late >= max(READ, seen.steps / 10) and (since == 0 or late >= 10):
                when = f"since step {since} of {seen.steps}" if since else "at every step"
                yield f"the lr of {self._names(group)} was 0 {when}: they do not move"
        fed = [w for w in mine if w.fed and not w.masters and w.group not in seen.zero]
        still = [w for w in fed if w.stands]
        for dtype in dict.fromkeys(w.p.dtype for w in still):
            some = [w for w in still if w.p.dtype == dtype]
            # In fp32 one may stand still: the gradient of a bias before BatchNorm is mere rounding.
            if dtype in HALF or len(still) == len(fed):
                rates = few(sorted({f"{float(w.rate):g}" for w in some}), 4)
                yield (
                    f"{len(some)} {str(dtype).removeprefix('torch.')} tensors had gradients at "
                    f"every step read and never changed: {self._names(some)} (lr {rates})"
                    + _rounding(some, dtype)
                )
        partly = [w for w in fed if w.p.dtype in HALF and w not in still and w.lost() > 0.5]
        if partly:
            share = few([f"{w.lost():.0%}" for w in partly], 4)
            yield (
                f"most numbers of {self._names(partly)} have not moved since the first step "
                f"({share} of a sample)" + _rounding(partly, partly[0].p.dtype)
            )
        late = [w for w in fed if len(w.norms) > READ and len(set(w.norms[-READ:])) == 1]
        if fed and len(late) == len(fed) and not still:
            since = max(w.steps[-READ] for w in fed)
            yield (
                f"no weight of {seen.name} has moved since step {since} of {seen.steps} at the "
                f"latest: its lr has fallen from {seen.highest:.2g} to {float(fed[0].rate):.2g}"
            )
        yield from self._dead(mine)

    def _dead(self, mine):
        """Whole layers whose gradient is exactly 0, and none like them has another: an expert that
        is not asked is no fault."""
        alive = {tuple(w.p.shape) for w in mine if any(w.grads)}
        dead = [w for w in mine if len(w.grads) > READ and not any(w.grads) and not w.starved]
        dead = [w for w in dead if w.module and isinstance(w.module(), DENSE)]
        if dead and not any(tuple(w.p.shape) in alive for w in dead if w.p.dim() > 1):
            yield (
                f"the gradient of {self._names(dead)} was exactly 0 at every step read: a ReLU "
                "that is 0 for all inputs, a factor 0, or an underflow in fp16 (loss scaling)?"
            )

    def _in_no_optimizer(self):
        """Weights that get gradients and are never written. An optimizer for the last modules
        alone, a network in eval(), an image that is trained through a network: all on purpose."""
        held = [w for w in self.living if w.optimizer and any(w.grads)]
        trained = [k for k, w in enumerate(self.living) if w in held and w.module]
        largest = max((w.p.numel() for w in held if not w.module), default=0)  # masters, perhaps
        left = [
            (k, w)
            for k, w in enumerate(self.living)
            if not w.optimizer and w.fed and w.stands and w.p.numel() > largest
            if w.module() and w.module().training
        ]
        parents = set()  # modules within which something is trained
        for k in trained:
            parents |= {m for root in self.names.roots for m in _above(root, self.living[k].p)}
        early = [w for k, w in left if trained and k < trained[0] and not w.unlisted]
        if any(w.module() not in parents for w in early):  # the first modules, on purpose
            left = [(k, w) for k, w in left if w not in early]
        left = [w for _, w in left] if trained else []
        for unlisted in (True, False):
            if some := [w for w in left if w.unlisted == unlisted]:
                why = "add them, or requires_grad_(False) if they are not meant to train"
                if unlisted:
                    why = "they lie in a plain Python list: use nn.ModuleList"
                yield (
                    f"{self._names(some)} got gradients at every step read, are in no optimizer "
                    f"and never changed: {why}"
                )

    def _frozen_between(self):
        """One alone of several like it has requires_grad=False, and those before and after it
        train. (Frozen on purpose are the first ones, or all of a kind.)"""
        kinds = {}
        for w in self.living:
            if module := w.module and w.module():
                kind = type(module), w.name.rpartition(".")[2], w.p.shape
                kinds.setdefault(kind, []).append(w)
        frozen = []
        for several in kinds.values():
            off = [k for k, w in enumerate(several) if not w.p.requires_grad]
            if len(off) == 1 and 0 < off[0] < len(several) - 1:
                trains = all(any(w.grads) for k, w in enumerate(several) if k != off[0])
                frozen += [several[off[0]]] if trains else []
        if frozen := [w for w in frozen if w.starved and w.stands]:
            yield (
                f"{self._names(frozen)}: requires_grad is False, and all others like them, before "
                "and after, are trained"
            )


def _above(root, p):
    """The modules under this one that hold this parameter, themselves or further down."""
    return [m for m in root.modules() if any(p is other for other in m.parameters())]


def _rounding(weights, dtype):
    """Why they stand still, in numbers, where a sample shows it."""
    if not (shown := [w for w in weights if w.lost() > 0.5]):
        return ""
    size = median(shown[0].now.abs().double().tolist())
    update = float(shown[0].update.abs().max())
    half = torch.finfo(dtype).eps * 2.0 ** floor(log2(size)) / 2 if size else 0.0
    return (
        f". An update of at most {update:.2g} is below half the last bit of {size:.2g}, which is "
        f"{half:.2g}: keep the weights in fp32 (torch.autocast computes in half), or fp32 masters"
    )
