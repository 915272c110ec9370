"""
Watch: what a script does with backward passes, steps, loss scalers and weights, by its hooks.

The recorder keeps the calls; deferred.py keeps what is to be read: losses, gradients, weights and
moments, buffers, evaluation outputs. checks.py decides whether a number is bad, findings.py why.
"""

import os
from functools import partial
from math import inf
from multiprocessing.process import BaseProcess
from weakref import WeakSet

import torch
from torch import nn

from ..advice import framework_of
from ..frames import frames_now, line_now
from ..locator import Locator
from ..tensors import LIMIT, extent, inner_tensors
from .budget import Budget
from .calls import BACKWARD
from .checks import Checks, Update, Write, given_to
from .deferred import DeferredChecks, held_by, moved_by, over_ranks, params_of
from .events import silent_faults
from .findings import Findings
from .history import History
from .hooks import Hooks
from .loop import LoopHooks
from .names import Names
from .outermost import OutermostCalls
from .recorder import CallRecorder
from .scaling import Scaling

# Steps that are not recorded: in them a module that trains is noted, and weights are read, once
TOGETHER = 4


class Watch:
    """The hooks around a script."""

    def __init__(self, begin=None, is_second_run=False, share=1.0, description=None):
        self.begin = begin  # from this optimizer step on every operation is watched
        self.is_second_run = is_second_run
        self.budget = Budget(share, begin)
        self.hooks = Hooks(self.budget)
        self.deferred = DeferredChecks()
        self.names = Names()
        self.history = History(self.names)
        self.recorder = self.hooks.recorder = CallRecorder(self.hooks)
        self.scaling = Scaling(self.recorder)
        self.recorder.listener = self
        self.findings = Findings(
            self.hooks, self.recorder, self.deferred, self.scaling, self.history
        )
        self.checks = Checks(self.findings, self.names)
        self.description = description(self) if description else None
        also = self.description.listeners if description else ()
        self.silent = self.findings.silent = silent_faults(self, also)
        self.losses = []  # of the backward passes since the last step
        self.outermost = OutermostCalls(self)
        self.begun = WeakSet()  # optimizers
        self.optimizer = None  # whose step is under way
        self.with_closure = None  # the same, while its closure is still to run
        self.was_read = True  # all that the last step has made

    def __enter__(self):
        hooks = self.hooks
        hooks.around_each_step(self._before_step, self._stepped)
        LoopHooks(hooks, self.deferred, self.silent, self.scaling).watch()
        self.outermost.watch_calls()
        hooks.wrap_outermost(torch.autograd, "backward", self._backward_begins, self._backward_ends)
        hooks.wrap(torch.optim.Optimizer, "__init__", self._make)
        hooks.wrap(torch.optim.Optimizer, "load_state_dict", self._load)
        hooks.wrap(nn.Module, "load_state_dict", self._load_module)
        hooks.wrap(torch.amp.GradScaler, "scale", self._scale)
        hooks.wrap(torch.amp.GradScaler, "step", self._scaler_step)
        hooks.wrap(torch.utils.data.dataloader._BaseDataLoaderIter, "__next__", hooks.unseen)
        hooks.wrap(BaseProcess, "start", hooks.children)
        hooks.wrap_reads(self.findings.read)
        hooks.take_warnings()
        hooks.take_signals()
        if hasattr(os, "register_at_fork"):  # not on Windows: no process is a fork there
            os.register_at_fork(after_in_child=hooks.close)  # the workers of a DataLoader
        if self.begin is not None:
            torch.compiler.set_stance("force_eager")
        self._watch_operations()
        hooks.record(True)
        return self

    def __exit__(self, *error):
        self.hooks.close()

    def _watch_operations(self):
        """Begin to watch every operation, if the time has come; not in the middle of a backward."""
        hooks, steps = self.hooks, self.recorder.steps
        due = self.begin is not None and steps >= self.begin
        if hooks.on and not hooks.locator and due and not hooks.depth:
            hooks.locator = hooks.undo.enter_context(Locator())
        if hooks.locator:
            hooks.locator.step = steps

    def transfer(self, more=(), calm=False, norms=()):
        """Read what is noted, and the values of `more`; `calm`: losses wait, for the scaler.
        `norms`: of the losses, if somebody has read them."""
        losses = []
        if not calm and self.hooks.world == 1:  # else all ranks decide by the gradients
            losses, self.losses = self.losses, []
        entries = self.deferred.entries(losses, self.checks.check_loss, norms)
        return self.deferred.transfer(more, entries)

    # Outside of modules

    def read(self, t, name):
        """The script reads a number, or detaches a tensor."""
        if name != "detach":
            self.findings.read(t, name)
        self.silent.read(t, name)

    def wrote(self, name, written):
        """The script writes by hand: an update, an average, a copy. `written`: of each weight (it,
        the values). All that were written are read together, at the next transfer."""
        step, line = self.recorder.steps, line_now()
        weights = [p if p._base is None else p._base for p, _ in written]
        self.silent.wrote(line, weights, name, [values for _, values in written])
        self.history.wrote(line, weights)
        norms = self.deferred.norms(weights)
        writes = [
            (p, Write(name, step, line, *given_to(values, self.recorder.maker), before))
            for p, (_, values), before in zip(weights, written, norms, strict=True)
        ]
        if self.recorder.slope > self.recorder.latest:  # it ends the step, and comes after this
            for p, write in writes:
                self.deferred.note(write.values, partial(self.checks.check_write, p, [write]))
            params = {p for root in list(self.names.roots) for p in root.parameters()} | {*weights}
            norms = self.deferred.norms(p.grad for p in params if p.grad is not None)
            norm = sum(value * value for value in self.transfer(norms)) ** 0.5
            if norm <= LIMIT:
                self.history.largest = max(self.history.largest, norm)
            self._count(None)
        for p, write in writes:
            self.deferred.wrote(p, write, self.checks.check_write)

    # Backward passes and steps

    def _backward_begins(self, function, args, kwargs):
        """The losses are noted; they are read with the gradients."""
        if self.recorder.first == inf:
            self.history.framework = framework_of(file for file, *_ in frames_now())
        if self.budget.recording:
            self.recorder.write(BACKWARD, args, kwargs)
        else:
            self.recorder.note(BACKWARD)
        losses = [t for _, t in inner_tensors(args[0] if args else kwargs["tensors"])]
        self.losses += [t.detach() for t in losses]
        if len(self.losses) > 99 and not self.budget.recording:
            self.go_on()  # there may be steps by hand, which only the recorder sees
        self.scaling.backward(losses, self.names.optimizers)
        self.silent.backward(losses)

    def _backward_ends(self, out):
        if self.with_closure:
            self.check(self.with_closure)
        if not self.recorder.steps_of:  # without an optimizer, or before its first step
            self.transfer()
        self.scaling.passed()
        self.silent.passed()
        self._watch_operations()

    def _before_step(self, optimizer, args, kwargs):
        closure = kwargs.get("closure") or next(iter(args[1:]), None)
        self.with_closure = optimizer if callable(closure) else None  # its passes are still to come
        self.optimizer = optimizer
        self.check(optimizer)
        self.hooks.writing, self.hooks.in_step = False, True
        if not self.with_closure:
            return None
        watched = partial(self._closure, closure, self.recorder.number)
        if args[1:]:
            return (args[0], watched, *args[2:]), kwargs
        return args, {**kwargs, "closure": watched}

    def _closure(self, closure, start, *args, **kwargs):
        """The script's forward and backward within a step of an optimizer, which may ask for it
        several times, and moves the weights in between."""
        if self.recorder.number > start and self.with_closure:
            self.recorder.calls = [call for call in self.recorder.calls if call.number <= start]
            self.hooks.safely(self._note_update, self.with_closure)
        if self.hooks.mine() and not self.hooks.depth:
            self.hooks.record(True)
        self.hooks.in_step = False
        out = closure(*args, **kwargs)  # where it raises, the step is over
        self.hooks.record(False)
        self.hooks.in_step = True
        return out

    def check(self, optimizer):
        """Before an optimizer step: one read of the gradients, one transfer of everything noted."""
        if optimizer not in self.begun:  # its id may be that of one that is gone
            self.begun.add(optimizer)
            self.recorder.steps_of[id(optimizer)] = 0
            self._note_moments(optimizer, "before the optimizer's first step")
            self.history.begin(optimizer, self.deferred.norms(params_of(optimizer)))
        scale = getattr(optimizer, "grad_scale", None)  # a fused step unscales by itself
        scales = [] if scale is None else [scale]
        moved = moved_by(optimizer)
        grads = [p.grad for p in moved]
        norms = self.deferred.norms(grads)
        if self.hooks.world > 1 and any(hasattr(g, "to_local") for g in grads):
            norms = [over_ranks(norms)]  # each of a shard
        losses = self.deferred.norms(self.losses)
        clipped = [n for params, n in self.deferred.clipped if {*params} & {*moved}]
        wanted = [*losses, *clipped, *norms, *scales]
        values = self.transfer(wanted, calm=bool(scales), norms=losses)
        losses, values = values[: len(losses)], values[len(losses) :]
        before, values = values[: len(clipped)], values[len(clipped) :]
        scale = values.pop() if scales else 1.0
        found = self.scaling.before_step(optimizer, bool(scales), bool(before))
        norm = sum(v * v for v in values) ** 0.5 / scale
        if norm <= LIMIT:  # as it was before the script clipped it
            norm = max([norm, *(v / scale for v in before if v <= LIMIT)])
            self.history.gradients(optimizer, self.recorder.steps, norm, values)
        self.silent.before_step(optimizer, losses, norm, len(values))
        if norm <= LIMIT:
            self.scaling.in_a_row = 0
        elif scales:
            self._skip(optimizer)
        else:
            self.scaling.unskipped = any(self.deferred.to_host(found))
            self.checks.check_gradients(optimizer)

    def _make(self, original, optimizer, *args, **kwargs):
        original(optimizer, *args, **kwargs)
        self.hooks.safely(self.names.makes, optimizer)

    def _load(self, original, optimizer, *args, **kwargs):
        """What it loads is read, and checked with the next gradients."""
        out = original(optimizer, *args, **kwargs)
        self.hooks.safely(self._note_moments, optimizer, f"as loaded at {line_now()}")
        self.hooks.safely(self.silent.restored, optimizer)
        return out

    def _load_module(self, original, module, state, *args, **kwargs):
        answer = original(module, state, *args, **kwargs)
        self.hooks.safely(self.silent.loaded, module, state, answer)
        return answer

    def _note_moments(self, optimizer, origin):
        """No step of this optimizer has made them, nor its weights."""
        held = [t for *_, t in held_by(optimizer)]
        self.deferred.note(held, partial(self.checks.check_moment, optimizer, origin))

    def _stepped(self, optimizer, args, kwargs):
        """Its weights and moments are read now, and checked with the next gradients."""
        self.hooks.writing, self.hooks.in_step = not self.hooks.depth, False
        self.with_closure = self.optimizer = None
        if self.hooks.depth:
            self.outermost.look_through()
        self.silent.stepped(optimizer)
        self._count(optimizer)
        self._note_update(optimizer)
        if self.hooks.locator:
            self.transfer()

    def _note_update(self, optimizer):
        """Weights and moments, as this update has left them."""
        rates = [group.get("lr") for group in optimizer.param_groups]  # a schedule moves them
        self.history.after_step(rates, self.recorder.steps)
        if self.budget.recording:
            held = [t for _, p, _, t in held_by(optimizer) if p.grad is not None]
        elif self.recorder.steps_of[id(optimizer)] % TOGETHER == 0:
            held = moved_by(optimizer)
        else:  # good gradients make no bad weights, but for a few kinds; those stay bad
            self.was_read = False
            return
        follows, self.was_read = self.was_read, self.budget.recording
        update = Update(optimizer, rates, self.history.largest, follows, line_now())
        self.deferred.note(held, partial(self.checks.check_update, update))

    def _count(self, optimizer):
        """A step is over, with or without an update."""
        self.recorder.stepped(id(optimizer))
        was_recorded = self.budget.recording
        self.budget.over(self.recorder.steps, by_hand=id(None) in self.recorder.steps_of)
        if not was_recorded:
            self.go_on(self.budget.recording)
        self.losses, self.deferred.clipped = [], []
        if was_recorded or self.budget.steps % TOGETHER == 0:
            self.outermost.noted.clear()
        self._watch_operations()
        self.silent.over()

    def go_on(self, recording=True):
        """After a part that was not recorded, is the next one?"""
        self.budget.recording = recording
        if recording:
            self.silent.resumed()
        self.recorder.gap = self.recorder.number
        self.hooks.writing = not self.hooks.depth

    # The loss scaler

    def _scale(self, original, scaler, outputs):
        """What it multiplies is to be scaled again in a repetition."""
        before = self.recorder.number
        out = original(scaler, outputs)
        self.hooks.safely(self.scaling.multiplies, scaler, out)
        for call in self.recorder.calls:
            if call.number > before and scaler.is_enabled():
                call.scaler = scaler
        return out

    def _scaler_step(self, original, scaler, optimizer, *args, **kwargs):
        """If no optimizer has stepped, the scaler has skipped the step."""
        before = dict(self.recorder.steps_of)
        out = original(scaler, optimizer, *args, **kwargs)
        if self.recorder.steps_of == before:
            self.hooks.safely(self._skip, optimizer)
        return out

    def _skip(self, optimizer):
        """The loss scaler skipped a step: calibration, unless it goes on."""
        why = self.scaling.skip()
        bad = [t for t in self.losses if extent(t).is_bad]
        self.transfer(calm=True)
        if bad:  # it is not its scale that made it so; the scaler hides it
            self.findings.later(f"loss is {extent(bad[0]).bad_end}", [], bad)
        if why or (self.hooks.locator and self.is_second_run):
            self.checks.check_gradients(optimizer, why)
        if not bad:
            self.findings.forget_reads()
        self.silent.skipped(optimizer)
        self._count(optimizer)
