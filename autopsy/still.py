"""
Still: what do weights and their gradients do while a script trains?

It reads weights and gradients after the steps 0, 1, 2, 4, 8, ... of each optimizer: norms, and a
few numbers of each tensor, which stay on the device until the script ends. Once, after the third
step of the first few optimizers, it repeats the forward pass to see whether the loss depends on
weights that get no gradient; to do so it moves them, and restores them bit by bit. It touches
nothing else. Then, and while no optimizer has made a step, it looks for idle optimizers. reasons.py
says what all this means.
"""

from __future__ import annotations

import gc
from contextlib import suppress
from weakref import ref

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from .forward import Forward
from .frames import frames_now, line_of
from .ledger import moved_by
from .path import Anew, Cuts, Without, leaves, where_zero
from .step import attributes_of
from .tensors import numbers_of

SAMPLE = 64  # numbers of a tensor that are followed
READ = 3  # times at least
LATELY, FAR = 8, 100  # steps
FEW = 8  # operations
FIRST = 8  # optimizers that are looked at closely: some scripts build one for each task


class Followed:
    """What was seen of an optimizer, which may no longer exist at the end."""

    def __init__(self, optimizer):
        self.alive, self.name = ref(optimizer), type(optimizer).__name__
        self.steps = self.fed = 0  # fed: steps in which a parameter had a gradient
        self.zero = {}  # group: the step since which its rate is 0
        self.highest = 0.0  # rate
        self.end = ""  # of the graph of all its weights
        # The first weights whose gradient has become 0, all or not, though the loss is not: since
        self.dead = None  # when, and where it becomes 0
        self.strays = 0  # parameters without a gradient, which no module holds
        self.empty = False  # is one of its groups?
        self.closely = True


class Weight:
    """What was read of one parameter."""

    def __init__(self, p, name="", module=None, unlisted=""):
        self.alive, self.name, self.module = ref(p), name, module and ref(module)
        self.unlisted = unlisted  # why no parameters() lists it
        self.optimizer = None
        self.shared = False  # by two optimizers
        self.idle = ""  # the optimizer that holds it and has made no step
        self.without = ""  # what its forward ran in, in place of a graph
        self.frozen = False  # on purpose
        self.end = ""  # of its graph, or of its gradient
        self.group = 0
        self.trains = False  # has it been read in train() mode?
        self.masters = False  # it may have wider ones
        self.norms = []
        self.grads = []  # None: no gradient
        self.rate = 0.0
        self.steps = []
        self.first = self.now = self.update = None  # of a sample

    @property
    def p(self):
        """The parameter; None if it is gone."""
        return self.alive()

    @property
    def often(self):
        """Whether it was read often enough, or over many steps (if it was made late)."""
        far = len(self.steps) > 1 and self.steps[-1] - self.steps[0] > FAR
        return far or len(self.norms) >= READ

    @property
    def stands(self):
        """Whether it has not moved."""
        return self.often and len(set(self.norms)) == 1

    @property
    def fed(self):
        """Whether it had a gradient that was not 0 at each read."""
        return self.often and all(self.grads)

    @property
    def fed_zero(self):
        """Whether it had a gradient at each read, be it 0."""
        return self.often and None not in self.grads

    @property
    def starved(self):
        """Whether it had no gradient at any read."""
        return not any(grad is not None for grad in self.grads)

    def lost(self):
        """The share of sampled numbers with an update that did not change, because rounding loses
        the update."""
        if self.update is None or not (moves := self.update != 0).any():
            return 0.0
        lost = (self.now.double() - self.update).to(self.now.dtype) == self.now
        return float((lost & moves & (self.first == self.now)).sum() / moves.sum())


class Still:
    """The weights of all optimizers and modules."""

    def __init__(self, names, ledger, tape):
        self.names = names
        self.ledger = ledger
        self.tape = tape
        self.weights = WeakIdKeyDictionary()  # parameter: Weight, in the order of the forward
        self.optimizers = {}  # id: Followed
        # modules and optimizers of the last steps: they live until the end of the script
        self.called = {}
        self.cut = []  # weights without a gradient, on which the loss depends
        self.leaf = ""  # where backward() was called of a tensor without a graph
        self.seen = 0  # optimizers
        self.anew = Anew(tape, names, at=READ)
        self.passes = 0  # backward, before the first step of any optimizer
        self.unloaded = {}  # line: a sentence on a load_state_dict() that has loaded nothing

    def stepped(self, optimizer):
        """After a step, before the tape forgets it."""
        seen = self.optimizers.get(id(optimizer))
        if not seen or seen.alive() is not optimizer:
            seen = self.optimizers[id(optimizer)] = Followed(optimizer)
            self.seen += 1
            seen.closely = self.seen <= FIRST
        step = seen.steps
        seen.steps += 1
        late = {m: at for m, at in self.called.items() if at > self.tape.steps - LATELY}
        called = [call.function for call in self.tape.calls if call.grad]
        roots = [root for root in called if isinstance(root, nn.Module)]
        self.called = late | dict.fromkeys((*roots, optimizer), self.tape.steps)
        seen.fed += bool(moved_by(optimizer))
        for k, group in enumerate(optimizer.param_groups):
            rate = group.get("lr", 1.0)
            known = isinstance(rate, float | int)  # not on a device
            if known and rate == 0:
                seen.zero.setdefault(k, step)
            else:
                seen.zero.pop(k, None)
            seen.highest = max(seen.highest, rate if known else 0.0)
            seen.empty |= not group["params"]
        if step & (step - 1) == 0:
            self._read(optimizer, seen)
        if step == READ - 1 and seen.closely:
            self._find_idle()
            if self.tape.hooks.world == 1:
                self._cut_off(seen)
        if self.tape.hooks.world == 1 and seen.closely:
            if step == READ + 1:
                self._zero(seen)
            elif step > READ and step & (step - 1) == 0 and not seen.dead:
                self._zero(seen, lately=True)

    def loads(self, original, module, state, *args, **kwargs):
        """module.load_state_dict(state), which with strict=False may pass over every name."""
        answer = original(module, state, *args, **kwargs)
        missing, others = answer or ((), ())
        if missing and len(others) >= len(state) > 0:
            self.unloaded[line_of(frames_now())] = (
                f"has loaded none of {len(state)} tensors: they have names like {others[0]}, "
                f"and those of {type(module).__name__} are like {missing[0]}"
            )
        return answer

    def begins(self, losses):
        """Before a backward pass."""
        if all(t.is_leaf for t in losses):
            self.leaf = line_of(frames_now())
        self.anew.look(losses, self.weights)

    def passed(self):
        """After a backward pass, before the first step of any optimizer."""
        self.passes += 1
        if self.passes > READ and self.passes & (self.passes - 1) == 0:
            self._find_idle()
            self._read()

    def _find_idle(self):
        """Find optimizers that have made no step."""
        optimizers = [x for x in gc.get_objects() if issubclass(type(x), torch.optim.Optimizer)]
        for x in optimizers:
            params = [p for group in x.param_groups for p in group["params"]]
            for p in params if id(x) not in self.optimizers else ():
                self.weights.setdefault(p, Weight(p)).idle = type(x).__name__

    def _read(self, optimizer=None, seen=None):
        """Read the weights of this optimizer, and those of none."""
        called = [getattr(call.function, "_orig_mod", call.function) for call in self.tape.calls]
        for root in dict.fromkeys([*called, *self.names.roots]):
            if root in self.names.roots:
                self._list(root)
                self._list_hidden(root)
        for k, group in enumerate(optimizer.param_groups if optimizer else ()):
            for p in group["params"]:
                w = self.weights.setdefault(p, Weight(p))
                w.shared |= w.optimizer not in (None, seen)
                w.optimizer, w.group, w.rate = seen, k, group.get("lr", 1.0)
                if p.grad is not None and p.is_floating_point():
                    self._sample(w, optimizer, group)
        if seen:
            mine = [w for w in self.weights.values() if w.optimizer is seen]
            seen.strays = sum(not w.module and w.starved for w in mine)
        for p, w in self.weights.items():
            if w.optimizer in (None, seen) and p.is_floating_point():
                data = p.detach().cpu() if p.is_mps else p.detach()  # MPS has no float64
                w.norms += self.ledger.norms([numbers_of(data).double()])
                w.grads += [None] if p.grad is None else self.ledger.norms([p.grad])
                w.steps.append(self.tape.steps)
                w.trains |= bool(w.module and w.module() and w.module().training)

    def _list(self, root, prefix="", unlisted=""):
        """List all parameters under this module, also what parameters() does not list: modules
        and tensors in plain lists and dicts, and plain tensors that need a gradient."""
        for path, module in root.named_modules(prefix=prefix):
            for name, p in module.named_parameters(path, recurse=False):
                self._add(p, name, module, unlisted)
            for name, value in attributes_of(module).items():
                own = f"{path}.{name}".lstrip(".")
                pairs = {list: enumerate, tuple: enumerate, dict: dict.items}.get(type(value))
                kind = "Dict" if type(value) is dict else "List"
                where = f"they lie in a plain Python {kind.lower()}: use nn."
                for k, x in pairs(value) if pairs else ():
                    if isinstance(x, nn.Module) and x is not root:
                        self._list(x, f"{own}.{k}", f"{where}Module{kind}")
                    elif isinstance(x, nn.Parameter):
                        self._add(x, f"{own}.{k}", module, f"{where}Parameter{kind}")
                if isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf:
                    self._add(value, own, module, "plain tensors are no parameters: nn.Parameter")

    def _list_hidden(self, root):
        """List the weights of which a module holds only what was made of them."""
        for path, module in root.named_modules():
            for name, value in attributes_of(module).items():
                if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                    for p in leaves([value], FEW):
                        why = "what their module holds was made of an nn.Parameter, and is none: "
                        why += "make nn.Parameter the last step"
                        self._add(p, f"{path}.{name}".lstrip("."), module, why)

    def _add(self, p, name, module, unlisted):
        """The first name that is found for a weight stays."""
        w = self.weights.setdefault(p, Weight(p))
        if not w.module:
            w.name, w.module, w.unlisted = name, ref(module), unlisted

    def _sample(self, w, optimizer, group):
        """Keep some of its numbers, and what a step of torch's own optimizers subtracts from
        them."""
        p, state = w.p, optimizer.state.get(w.p, {})
        if not type(optimizer).__module__.startswith("torch.optim"):
            wide = [t for t in state.values() if isinstance(t, torch.Tensor) and t.shape == p.shape]
            w.masters = any(t.itemsize > p.itemsize for t in wide)
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
        """Find out whether the loss depends on weights that get no gradient."""
        mine = [w for w in self.weights.values() if w.optimizer is seen and w.module]
        cut = [w for w in mine if w.starved and w.p.requires_grad and w.p.is_floating_point()]
        if not cut:
            return
        params = [w.p for w in cut]
        modules = dict.fromkeys(m for root in self.names.roots for m in root.modules())
        whole = [m for m in modules if (held := {*m.parameters()}) and held <= {*params}]
        without = Without({*whole, *(w.module() for w in cut)})
        copies = [p.detach().clone() for p in params]
        unchanged = torch.autograd._unsafe_preserve_version_counter(tuple(params))
        end = ""
        with suppress(Exception), unchanged:  # what cannot be made again proves nothing
            try:
                with Forward(self.tape) as again, Cuts(params) as cuts, without:
                    loss = again()
                    end = cuts.of(again.results)
                    if again.losses and again() == loss:
                        for p in params:
                            p.copy_(_others(p))
                        self.cut += [w for w in cut if again() != loss]
            finally:
                for p, copied in zip(params, copies, strict=True):
                    p.copy_(copied)
        found = without.found
        others = next(filter(None, found.values()), "")
        for w in self.cut:  # some modules are not called: attention reads the weights of its own
            w.without = found.get(w.module(), others)
            w.end = end
            around = [found[m] for m in whole if m in found and w.module() in {*m.modules()}]
            # It is on purpose if the script calls a module that holds nothing else like this
            w.frozen = around[:1] == ["no_grad"]
        if len(cut) == len(mine):
            seen.end, self.cut = end, []
            if self.leaf:
                seen.end = f"at {self.leaf} backward() begins at a new tensor, which has no graph"

    def _is_first(self, dead, mine):
        """Whether these are the first weights of a network: a later one may not be in use now."""
        whole = any(w.p.dim() > 1 for w in dead)
        return dead[0] is mine[0] and whole and all(w.p.requires_grad for w in dead)

    def _zero(self, seen, lately=False):
        """Find out where a gradient becomes 0 that was so at each read; or lately, if those of the
        first layers are."""
        mine = [w for w in self.weights.values() if w.optimizer is seen and w.module and w.fed_zero]
        reads = -READ if lately else 0
        total = self.ledger.to_host(sum(w.grads[reads:]) for w in mine)
        dead = [w for w, norm in zip(mine, total, strict=True) if norm == 0]
        if not dead or (lately and not self._is_first(dead, mine)):
            return
        end, loss = "", 0.0
        anomaly = torch.autograd.set_detect_anomaly(True, check_nan=False)
        with suppress(Exception), anomaly, Forward(self.tape) as again:
            loss = again()
            end = where_zero(again.results, [w.p for w in dead])
        if lately and loss:
            seen.dead = dead, min(w.steps[-READ] for w in dead), end
        for w in dead if not lately else ():
            w.end = end


def _others(p):
    """Other numbers, in another order: that may be all that a choice among them depends on."""
    added = torch.linspace(0.1, 0.5, p.numel(), device=p.device, dtype=p.dtype)
    return (1.5 * p.flatten().flip(0) + added).view(p.shape)
