"""
Outermost: the calls of modules, functions and transforms that the script itself makes.

What runs within such a call is not looked at. In a step that is recorded the call is written down,
with all that is needed to make it again; in any other it is noted that the module was called. What
it has made and written is noted, to be read with the next gradients.
"""

import sys
from functools import partial
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from ..frames import line_now, script_frames_now
from ..step import KEPT, attributes_of, carried_by, copied_buffers, rng_states
from ..tensors import batch_shape, device_of, flat_tensors, inner_tensors, mapped, storage_of
from .calls import ResultRef, named_arguments
from .hooks import is_of_fabric, walk

CALL = nn.Module._call_impl.__code__


class OutermostCalls:
    """The call under way, and what is known of modules."""

    def __init__(self, watch):
        self.watch = watch
        self.hooks, self.recorder, self.deferred = watch.hooks, watch.recorder, watch.deferred
        self.call = None  # under way
        self.versions = []  # of the tensors that it was given
        self.writers = WeakSet()  # modules that write into what they are given
        self.left = WeakKeyDictionary()  # module: names under which its calls have left tensors
        self.noted = set()  # (module, its mode) of a step that is not recorded
        self.trainers = WeakSet()  # modules whose forward makes steps of an optimizer
        self.trained = None  # the last module that was trained: it lives until the script's end

    def watch_calls(self):
        module = self._module_begins, self._module_ends, self._module_called
        self.hooks.wrap_outermost(nn.Module, "__call__", *module, passes=self._passes)
        function = self._call_begins, self._call_ends, self._called
        for owner, name in (
            (torch.nn.utils.stateless, "_functional_call"),
            (torch.autograd.Function, "apply"),
            (torch._functorch.apis, "vmap_impl"),
            (torch._functorch.eager_transforms, "grad_impl"),
        ):
            self.hooks.wrap_outermost(owner, name, *function)
        for name in ("from_numpy", "frombuffer", "from_dlpack"):
            self.hooks.wrap(torch, name, self._enters)

    def _passes(self, module, *args):
        return is_of_fabric(module) or module in self.trainers

    def look_through(self):
        """A step is made within the call of a module: from its next call on, what it calls is
        outermost (a MAML whose forward trains)."""
        inside = [frame for frame in walk(sys._getframe()) if frame.f_code is CALL]
        self.trainers.update(frame.f_locals["self"] for frame in inside)

    def _enters(self, original, *args, **kwargs):
        """No mode of torch sees it. Of a table, the line where it enters torch is noted."""
        t = original(*args, **kwargs)
        if self.watch.budget.recording:
            self.recorder.known[t] = ResultRef(0, 0, script_frames_now(), data=True)
        if not self.recorder.steps:
            self.recorder.entered[storage_of(t)] = line_now()
        return t

    def _call_begins(self, function, args, kwargs):
        """torch.func's vmap, grad or functional_call, a custom autograd.Function."""
        self.call = self.recorder.write(function, args, kwargs)
        self.call.rng = rng_states(device_of((args, kwargs)))

    def _call_ends(self, out):
        """Its results can be made again."""
        self.recorder.done(self.call, out)

    def _called(self, args, kwargs, out):
        """In a step that is not recorded."""

    def _known(self, module):
        """(what the script calls, is it the first time?)"""
        self.watch.optimizer = None  # what raises from here on is not its step
        if isinstance(module, nn.parallel.DistributedDataParallel):
            module = module.module
        root = getattr(module, "_orig_mod", module)  # what was compiled
        fresh = root not in self.watch.names.roots
        if fresh:
            self.watch.names.roots.add(root)
            self.recorder.weights.update(map(storage_of, module.parameters()))
            self.recorder.buffers.update(map(storage_of, module.buffers()))
        if self.recorder.full:
            self.watch.transfer(calm=True)
            self.recorder.forget()
            if not self.watch.budget.recording:
                self.watch.go_on()
        return module, fresh

    def _module_called(self, args, kwargs, out):
        """In a step that is not recorded: a module that trains is noted once."""
        mode = args[0], args[0].training
        if not (mode in self.noted and torch.is_grad_enabled()):
            self.noted.add(mode)
            self.hooks.safely(self._note_call, args, kwargs, out)

    def _note_call(self, args, kwargs, out):
        """Only what it has made is noted."""
        module, _ = self._known(args[0])
        call = self.recorder.note(module)
        given = [t for t in (*args[1:], *kwargs.values()) if isinstance(t, Tensor)]
        call.shape = batch_shape(given)
        self._note_output(call, out)

    def _module_begins(self, function, args, kwargs):
        """The call is written down, with what is needed to make it again."""
        module, *args = args
        module, fresh = self._known(module)
        given = [t for _, t in inner_tensors((args, kwargs))]
        for t in given if fresh or module in self.writers else ():
            if not t.requires_grad:
                self.recorder.overwritten("", t)
        call = self.call = self.recorder.write(module, args, kwargs)
        self.versions = [(t, t._version) for t in given if not t.is_inference()]
        call.rng = rng_states(device_of(given))
        call.shape = batch_shape(given)
        call.uninitialised = any(map(self.recorder.uninitialised.holds, given))
        call.carried = carried_by(module)
        call.states = [
            (m, name, self._with_makers(before[name][1]))
            for m, before in call.carried
            for name in self.left.get(m, set()) & before.keys()
        ]
        if call.grad and module.training:
            earlier = self.recorder.copied.setdefault(module, call)
            call.buffers = earlier.buffers or copied_buffers(module)
            self.recorder.copied[module] = call
            self.watch.silent.called(module, given)
        self.hooks.within = self.watch.silent.during(call, args, kwargs)
        if self.hooks.locator:
            named = [{name: x} for name, x in named_arguments(module, args, kwargs)]
            self.hooks.locator.take(named or args)

    def _with_makers(self, tree):
        """The same with what made each tensor in its place, where that can be made again."""

        def made(x):
            return (isinstance(x, Tensor) and self.recorder.maker(x)) or x

        return mapped(made, tree)

    def _module_ends(self, out):
        """What it has made and written is noted, to be read."""
        call = self.call
        module = call.function
        call.left = [
            (m, name)
            for m, before in call.carried
            for name, value in attributes_of(m).items()
            if type(value) in KEPT or value is not before.get(name, (None,))[0]
        ]
        for m, name in call.left:
            if flat_tensors(vars(m).get(name)):
                self.left.setdefault(m, set()).add(name)
        self.recorder.done(call, out)
        written = [b for n, b in module.named_buffers() if n in call.buffers]
        entries = self.deferred.entries(written, partial(self.watch.checks.check_buffer, call))
        if any(t._version != before for t, before in self.versions):
            self.writers.add(module)  # it writes into its inputs: the next ones are copied
        self.deferred.results(entries)
        self._note_output(call, out)

    def _note_output(self, call, out):
        """What a module has made without gradients, as in an evaluation."""
        if call.grad:
            self.trained = call.function  # so that it lives until the end of the script
            return
        self.watch.silent.evaluated(call.function)
        if any(True for _ in call.function.parameters()):
            made = [t for _, t in inner_tensors(out) if t.is_floating_point()]
            check = partial(self.watch.checks.check_output, call)
            # because -inf alone is a mask
            largest = self.deferred.largest(made)
            self.deferred.results([(size, check) for size in largest if size is not None])
        if len(self.deferred) > 999:  # a script that trains nothing
            self.watch.transfer(calm=True)
