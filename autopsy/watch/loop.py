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

CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")


def watch_loop(hooks, deferred, silent):
    """Tell `silent` of each call, but not of one that is made within another."""

    def clear(original, owner, *args, **kwargs):
        if not silent.anybody("cleared"):
            return original(owner, *args, **kwargs)
        out = hooks.unseen(original, owner, *args, **kwargs)
        if not hooks.depth:
            hooks.safely(silent.cleared, owner)
        return out

    within = []  # schedulers under way
    switching = []  # modules

    def switch(original, module, mode=True):
        """Each module calls train() of those within it."""
        switching.append(module)
        try:
            out = original(module, mode)
        finally:
            switching.pop()
        if not (switching or hooks.depth):
            hooks.safely(silent.switched, module, mode)
        return out

    def build(original, made, *args, **kwargs):
        original(made, *args, **kwargs)
        hooks.safely(silent.built, made)

    def iterate(original, loader):
        with ExitStack() as stack:
            for context in hooks.safely(silent.iterated, loader) or ():
                stack.enter_context(context)
            return original(loader)

    def schedule(original, scheduler, *args, **kwargs):
        """What a lambda of the script reads in it is seen."""
        within.append(scheduler)
        try:
            out = original(scheduler, *args, **kwargs)
        finally:
            within.pop()
        if not (within or hooks.depth or original.__name__ == "_initial_step"):
            hooks.safely(silent.scheduled, scheduler)
        return out

    def unscale(original, scaler, optimizer):
        hooks.unseen(original, scaler, optimizer)
        hooks.safely(silent.unscaled, optimizer)

    def clip(original, *args, **kwargs):
        if hooks.depth:
            return original(*args, **kwargs)
        given = signature(original).bind(*args, **kwargs)
        parameters, limit, *_ = given.arguments.values()
        params = [parameters] if isinstance(parameters, torch.Tensor) else [*parameters]
        if isinstance(parameters, GeneratorType):  # it is used up now
            given.arguments["parameters"] = (p for p in params)
        norm = hooks.safely(_norm, deferred, params)
        out = hooks.unseen(original, *given.args, **given.kwargs)
        hooks.safely(silent.clipped, params, limit, norm)
        return out

    def seeding(kind, original):
        """It may run once a sample, and in threads that use no torch."""

        @wraps(original)
        def seed(*args, **kwargs):
            out = original(*args, **kwargs)
            is_off = torch.compiler.is_compiling() or hooks.busy or not hooks.on
            if not is_off and threading.get_ident() == hooks.thread:
                silent.seeded(kind)
            return out

        return seed

    for owner in (torch.optim.Optimizer, nn.Module):
        hooks.wrap(owner, "zero_grad", clear)
    hooks.wrap(nn.Module, "train", switch)
    for kind in (nn.ModuleList, nn.Sequential, *_schedulers()):
        hooks.wrap(kind, "__init__", build)
    hooks.wrap(torch.utils.data.DataLoader, "__iter__", iterate)
    hooks.wrap(torch.amp.GradScaler, "unscale_", unscale)
    hooks.wrap(torch.optim.lr_scheduler.LRScheduler, "_initial_step", schedule)
    for kind in _schedulers():
        hooks.wrap(kind, "step", schedule)
    for name in CLIPS:
        for owner in (nn.utils, nn.utils.clip_grad):
            if hasattr(owner, name):
                hooks.wrap(owner, name, clip)
    for kind, owner, name in seeders():
        hooks.replace(owner, name, seeding(kind, getattr(owner, name)))


def seeders():
    """(generator, owner, name) of each function that seeds a generator of this process."""
    found = [("torch", torch, "manual_seed"), ("torch", torch.random, "manual_seed")]
    if numpy := sys.modules.get("numpy"):
        found.append(("numpy", numpy.random, "seed"))
    return [*found, ("random", random, "seed")]


def _norm(deferred, params):
    """The norm of all gradients of these, for the next step, too."""
    norms = deferred.norms(p.grad for p in params if p.grad is not None)
    norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    deferred.clipped.append((params, norm))
    return norm


def _schedulers():
    """The classes of schedulers that have a step() of their own."""
    module = torch.optim.lr_scheduler
    kinds = [x for x in vars(module).values() if getattr(x, "__module__", "") == module.__name__]
    return {kind for kind in kinds if isinstance(kind, type) and "step" in vars(kind)}
