"""
Loop: what a training loop does with gradients and rates between a backward pass and a step.

zero_grad(), clip_grad_norm_() and its like, unscale_(), the step of a scheduler, train(), eval(),
the iterators of a DataLoader, the seeds of generators and lists of modules are wrapped: the checks
of the folder silent/ are told of each.
"""

import random
import sys
import threading
from contextlib import ExitStack
from functools import wraps
from inspect import signature
from types import GeneratorType

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")


class LoopHooks:
    """What stands around these functions. It tells `silent` of each call, but not of one that is
    made within another."""

    def __init__(self, hooks, deferred, silent, scaling):
        self.hooks, self.deferred, self.silent = hooks, deferred, silent
        self.scaling = scaling
        self.schedulers, self.switched = [], []  # under way: schedulers, modules that train() is of

    def watch(self):
        wrap = self.hooks.wrap
        for owner in (torch.optim.Optimizer, nn.Module):
            wrap(owner, "zero_grad", self._clear)
        wrap(nn.Module, "train", self._switch)
        for kind in (nn.ModuleList, nn.Sequential, DistributedDataParallel, *_schedulers()):
            wrap(kind, "__init__", self._build)
        wrap(torch.utils.data.DataLoader, "__iter__", self._iterate)
        wrap(torch.amp.GradScaler, "unscale_", self._unscale)
        wrap(torch.amp.GradScaler, "update", self._update)
        wrap(torch.optim.lr_scheduler.LRScheduler, "_initial_step", self._schedule)
        for kind in _schedulers():
            wrap(kind, "step", self._schedule)
        for name in CLIPS:
            for owner in (nn.utils, nn.utils.clip_grad):
                if hasattr(owner, name):
                    wrap(owner, name, self._clip)
        for kind, owner, name in seeders():
            self.hooks.replace(owner, name, self._seeding(kind, getattr(owner, name)))

    def _clear(self, original, owner, *args, **kwargs):
        if not self.silent.anybody("cleared"):
            return original(owner, *args, **kwargs)
        out = self.hooks.unseen(original, owner, *args, **kwargs)
        if not self.hooks.depth:
            self.hooks.safely(self.silent.cleared, owner)
        return out

    def _switch(self, original, module, mode=True):
        """Each module calls train() of those within it."""
        self.switched.append(module)
        try:
            out = original(module, mode)
        finally:
            self.switched.pop()
        if not (self.switched or self.hooks.depth):
            self.hooks.safely(self.silent.switched, module, mode)
        return out

    def _build(self, original, made, *args, **kwargs):
        original(made, *args, **kwargs)
        self.hooks.safely(self.silent.built, made)

    def _iterate(self, original, loader):
        with ExitStack() as stack:
            for context in self.hooks.safely(self.silent.iterated, loader) or ():
                stack.enter_context(context)
            return original(loader)

    def _schedule(self, original, scheduler, *args, **kwargs):
        """What a lambda of the script reads in it is seen."""
        self.schedulers.append(scheduler)
        try:
            out = original(scheduler, *args, **kwargs)
        finally:
            self.schedulers.pop()
        first = original.__name__ == "_initial_step"
        if not (self.schedulers or self.hooks.depth or first):
            self.hooks.safely(self.silent.scheduled, scheduler)
        return out

    def _unscale(self, original, scaler, optimizer):
        self.hooks.unseen(original, scaler, optimizer)
        self.hooks.safely(self.scaling.unscaled, optimizer)
        self.hooks.safely(self.silent.unscaled, optimizer)

    def _update(self, original, scaler, *args, **kwargs):
        self.hooks.unseen(original, scaler, *args, **kwargs)
        self.hooks.safely(self.scaling.updated, scaler)

    def _clip(self, original, *args, **kwargs):
        if self.hooks.depth:
            return original(*args, **kwargs)
        given = signature(original).bind(*args, **kwargs)
        parameters, limit, *_ = given.arguments.values()
        params = [parameters] if isinstance(parameters, torch.Tensor) else [*parameters]
        if isinstance(parameters, GeneratorType):  # it is used up now
            given.arguments["parameters"] = (p for p in params)
        norm = self.hooks.safely(self._norm, params)
        out = self.hooks.unseen(original, *given.args, **given.kwargs)
        self.hooks.safely(self.silent.clipped, params, limit, norm)
        return out

    def _norm(self, params):
        """The norm of all gradients of these, for the next step, too."""
        norms = self.deferred.norms(p.grad for p in params if p.grad is not None)
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        self.deferred.clipped.append((params, norm))
        return norm

    def _seeding(self, kind, original):
        """It may run once a sample, and in threads that use no torch."""
        hooks = self.hooks

        @wraps(original)
        def seed(*args, **kwargs):
            out = original(*args, **kwargs)
            is_off = torch.compiler.is_compiling() or hooks.busy or not hooks.on
            if not is_off and threading.get_ident() == hooks.thread:
                self.silent.seeded(kind)
            return out

        return seed


def seeders():
    """(generator, owner, name) of each function that seeds a generator of this process."""
    found = [("torch", torch, "manual_seed"), ("torch", torch.random, "manual_seed")]
    if numpy := sys.modules.get("numpy"):
        found.append(("numpy", numpy.random, "seed"))
    return [*found, ("random", random, "seed")]


def _schedulers():
    """The classes of schedulers that have a step() of their own."""
    module = torch.optim.lr_scheduler
    kinds = [x for x in vars(module).values() if getattr(x, "__module__", "") == module.__name__]
    return {kind for kind in kinds if isinstance(kind, type) and "step" in vars(kind)}
