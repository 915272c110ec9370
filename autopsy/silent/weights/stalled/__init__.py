"""
Stalled: what do weights and their gradients do while a script trains?

It reads weights and gradients after the steps 0, 1, 2, 4, 8, ... of each optimizer: norms, and a
few numbers of each tensor, which stay on the device until the script ends. Once, after the third
step of the first few optimizers, it repeats the forward pass to see whether the loss depends on
weights that get no gradient; to do so it moves them, and restores them bit by bit.
Then, and while no optimizer has made a step, it looks for idle optimizers. reasons.py
says what all this means.
"""

from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ....frames import line_now
from ....tensors import numbers_of, type_of
from ....watch.deferred import gradients_of, moved_by, params_of
from ....watch.events import Events
from ....watch.forward import Forward
from ....watch.interrupts import no_evidence
from ...shared.graph_ends import DetachFinder, leaves
from .gradient_path import RecreatedParameters, where_zero, without_graph
from .reasons import Reasons
from .weight_history import READ, OptimizerHistory
from .weight_list import WeightList

RECENT_STEPS = 8
MAX_OPTIMIZERS = 8  # optimizers that are looked at closely: some scripts build one for each task
FOLLOWED = 4  # gradients of an optimizer
MAX_LOSSES = 8  # whose graphs are followed to their ends


class StalledWeights(Events):
    """The weights of all optimizers and modules."""

    def __init__(self, watch):
        self.names = watch.names
        self.deferred = watch.deferred
        self.recorder = watch.recorder
        self.weights = WeightList()
        self.norms_before = WeakIdKeyDictionary()  # weight: its norm before the first step
        self.optimizers = {}  # id: OptimizerHistory
        # optimizer: at how many steps each gradient was 0, and the last one at which not
        self.zeros = WeakKeyDictionary()
        # modules and optimizers of the last steps: they live until the end of the script
        self.called = {}
        self.cut = []  # weights without a gradient, on which the loss depends
        self.leaf = ""  # where backward() was called of a tensor without a graph
        self.elsewhere = []  # for each of the first backward passes: where it ends if at no weight
        self.seen = self.all_steps = 0  # optimizers; steps of all
        self.recreated = RecreatedParameters(self.recorder, self.names)
        self.passes = 0  # backward, before the first step of any optimizer
        # idle optimizer: (references to some of its parameters, their gradients before a pass)
        self.idle = WeakKeyDictionary()
        self.lines = {}  # idle optimizer, as w.idle names it: where gradients reach it

    def before_step(self, optimizer, losses, norm, moved):
        zeros, live = self.zeros.get(optimizer, (0, -1))
        seen = self.optimizers.get(id(optimizer))
        step = seen.steps if seen else 0
        self.zeros[optimizer] = (zeros + 1, live) if moved and norm == 0 else (zeros, step)
        if not seen and self.seen < MAX_OPTIMIZERS:
            for p in params_of(optimizer):  # one step of LBFGS may be all that they take
                if p not in self.norms_before:
                    self.norms_before[p] = self.norms_of(p)

    def stepped(self, optimizer):
        """After a step, before the recorder forgets it."""
        seen = self.optimizers.get(id(optimizer))
        if not seen or seen.alive() is not optimizer:
            seen = self.optimizers[id(optimizer)] = OptimizerHistory(optimizer, self.names)
            self.seen += 1
            seen.first = self.all_steps
            seen.is_followed_closely = self.seen <= MAX_OPTIMIZERS
        seen.last = self.all_steps
        self.all_steps += 1
        seen.zeros, seen.live = self.zeros.get(optimizer, (0, -1))

        step = seen.steps
        seen.steps += 1
        now = self.recorder.steps
        self.called[optimizer] = now
        for call in self.recorder.calls:
            if call.grad and isinstance(call.function, nn.Module):
                self.called[call.function] = now
        if now % RECENT_STEPS == 0:
            self.called = {m: at for m, at in self.called.items() if at > now - RECENT_STEPS}

        seen.had_gradient = seen.had_gradient or bool(moved_by(optimizer))
        self._note_groups(seen, optimizer)
        if step.bit_count() < 2:  # 0, 1, 2, 4, 8, ...
            self._read(optimizer, seen)
        if seen.is_followed_closely:
            self._look_closely(seen, step)

    def _note_groups(self, seen, optimizer):
        """Note what a reading at a few steps would miss."""
        for group in optimizer.param_groups:
            rate = group.get("lr", 1.0)
            known = isinstance(rate, float | int)  # not on a device
            seen.highest = max(seen.highest, rate if known else 0.0)
            seen.empty |= not group["params"]

    def _look_closely(self, seen, step):
        """At a few steps, repeat the forward pass: in one process only."""
        if step == READ - 1:
            self._find_idle()
        if self.recorder.hooks.world > 1:
            return
        if step >= READ - 1 and not seen.was_repeated and self.recorder.is_complete:
            seen.was_repeated = True
            self._cut_off(seen)
        if step == READ + 1:
            self._zero(seen)
        elif step > READ and step.bit_count() < 2 and not seen.dead:
            self._zero(seen, lately=True)

    def backward(self, losses):
        """Before a backward pass."""
        for optimizer, (params, _) in [*self.idle.items()]:
            self.idle[optimizer] = params, gradients_of(params)
        if all(t.is_leaf for t in losses):
            self.leaf = f"at {line_now()} backward() begins at a new tensor, which has no graph"
        elif self.weights and self.recorder.steps < READ and len(self.elsewhere) < MAX_LOSSES:
            self.elsewhere.append(self._no_weight(leaves(losses)))
        for p in self.recreated.before_backward(losses, self.weights):
            for root in self.names.roots:
                self.weights.add_all(root, private=True)
            why = "no module lists them (an object that is no nn.Module holds them?)"
            self.weights.add(p, f"a parameter {type_of(p)}", next(iter(self.names.roots)), why)

    @property
    def leads_nowhere(self):
        """Where the backward passes begin or end, if that leads to no weight; or ""."""
        return self.leaf or (all(self.elsewhere) and "".join(self.elsewhere[:1])) or ""

    def _no_weight(self, ends):
        """Say where the graph of a loss ends, which is at these, if that is at no weight."""
        if not ends or any(t in self.weights or isinstance(t, nn.Parameter) for t in ends):
            return ""
        return (
            f"the graph of the loss at {line_now()} ends at a {type_of(ends[0])} that is no "
            "weight: is there a detach() or torch.tensor(), and then requires_grad, between?"
        )

    def passed(self):
        """After a backward pass: those before the first step of any optimizer count."""
        for optimizer, (params, before) in [*self.idle.items()]:
            if before and gradients_of(params) != before:
                self.lines[self.names.of_optimizer(optimizer)] = line_now()
                del self.idle[optimizer]
        if self.recorder.steps_of:
            return
        self.passes += 1
        if self.passes > READ and self.passes.bit_count() < 2:
            self._find_idle()
            self._read()

    def sentences(self):
        return Reasons(self).sentences()

    def _find_idle(self):
        """Find optimizers that have made no step."""
        for optimizer in self.names.optimizers:
            if id(optimizer) in self.optimizers:
                continue
            params, name = params_of(optimizer), self.names.of_optimizer(optimizer)
            for p in params:
                self.weights.of(p).idle = name
            if name not in self.lines:
                self.idle[optimizer] = [ref(p) for p in params[:FOLLOWED]], ()

    def _read(self, optimizer=None, seen=None):
        """Read the weights of this optimizer, and those of none."""
        functions = [call.function for call in self.recorder.calls]
        called = [getattr(function, "_orig_mod", function) for function in functions]
        for root in dict.fromkeys([*called, *self.names.roots]):
            if root in self.names.roots:
                self.weights.add_all(root)
                self.weights.add_hidden(root)
        for group in optimizer.param_groups if optimizer else ():
            for p in group["params"]:
                w = self.weights.of(p)
                if w.optimizer not in (None, seen):
                    w.other_optimizer = w.optimizer
                w.optimizer, w.rate = seen, group.get("lr", 1.0)
                w.norm_before = self.norms_before.get(p, [])
                if p.grad is not None and p.is_floating_point():
                    w.sample(optimizer, group)

        if seen:
            mine = [w for w in self.weights.values() if w.optimizer is seen]
            seen.orphans = sum(not w.module and w.never_had_gradient for w in mine)
        for p, w in self.weights.items():
            if w.optimizer in (None, seen) and p.is_floating_point():
                w.norms += self.norms_of(p)
                if p.grad is None:
                    w.grads.append(None)
                else:
                    w.grads += self.deferred.norms([p.grad])
                w.steps.append(self.recorder.steps)
                w.read_in_train_mode |= bool(w.module and w.module() and w.module().training)

    def norms_of(self, p):
        data = p.detach().cpu() if p.is_mps else p.detach()  # MPS has no float64
        return self.deferred.norms([numbers_of(data).double()])

    def _cut_off(self, seen):
        """Find out whether the loss depends on weights that get no gradient."""
        mine = [w for w in self.weights.values() if w.optimizer is seen and w.module]
        cut = [
            w for w in mine if w.never_had_gradient or not seen.had_gradient
        ]  # another backward may have given them one
        cut = [w for w in cut if w.p.requires_grad and w.p.is_floating_point()]
        if not cut:
            return

        params = [w.p for w in cut]
        modules = self.names.modules()
        whole = [m for m in modules if (held := {*m.parameters()}) and held <= {*params}]
        # Some modules are not called: attention reads the weights of its own.
        look = without_graph({*whole, *(w.module() for w in cut)})
        copies = [p.detach().clone() for p in params]

        versions = torch.autograd._unsafe_preserve_version_counter(tuple(params))
        found, end = {}, ""
        with no_evidence, versions:  # what cannot be made again proves nothing
            try:
                with Forward(self.recorder) as again, DetachFinder(params) as cuts, look as found:
                    loss = again()
                    end = cuts.of([*again.results.values()])
                    if again.losses and again() == loss:
                        for p in params:
                            p.copy_(_others(p))
                        self.cut += [w for w in cut if again() != loss]
            finally:
                for p, copied in zip(params, copies, strict=True):
                    p.copy_(copied)
        self._explain(found, whole, end)
        if len(cut) == len(mine) and not seen.had_gradient:  # that is told of all of them
            seen.end, self.cut = end, []

    def _explain(self, found, whole, end):
        """`found`: in what each module was called. `whole`: modules that hold such weights only."""
        others = next(filter(None, found.values()), "")
        for w in self.cut:
            w.without = found.get(w.module(), others)
            w.end = end
            around = [found[m] for m in whole if m in found and w.module() in {*m.modules()}]
            # It is on purpose if the script calls a module that holds nothing else like this
            w.frozen = around[:1] == ["no_grad"]

    def _is_first(self, dead, mine):
        """Whether these are the first weights of a network: a later one may not be in use now."""
        whole = any(w.p.dim() > 1 for w in dead)
        return dead[0] is mine[0] and whole and all(w.p.requires_grad for w in dead)

    def _zero(self, seen, lately=False):
        """Find out where a gradient becomes 0 that was so at each read; or lately, if those of the
        first layers are."""
        mine = [
            w
            for w in self.weights.values()
            if w.optimizer is seen and w.module and w.gradient_always_present
        ]
        reads = -READ if lately else 0
        total = self.deferred.to_host(sum(w.grads[reads:]) for w in mine)
        dead = [w for w, norm in zip(mine, total, strict=True) if norm == 0]
        if not dead or (lately and not self._is_first(dead, mine)):
            return

        end, is_off, loss = "", False, 0.0
        anomaly = torch.autograd.set_detect_anomaly(True, check_nan=False)
        with no_evidence, anomaly, Forward(self.recorder) as again:
            loss = again()
            end, is_off = where_zero([*again.results.values()], [w.p for w in dead])
        if lately and loss:
            seen.dead = dead, min(w.steps[-READ] for w in dead), end, is_off
        for w in dead if not lately else ():
            w.end, w.is_off = end, is_off


def _others(p):
    """Other numbers, in another order: that may be all that a choice among them depends on."""
    added = torch.linspace(0.1, 0.5, p.numel(), device=p.device, dtype=p.dtype)
    return (1.5 * p.flatten().flip(0) + added).view(p.shape)
