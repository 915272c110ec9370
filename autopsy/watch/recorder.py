"""
Recorder: what the script has computed since its last step.

Calls of modules, and of torch's functions outside of modules, with their arguments.
"""

from functools import partial
from itertools import takewhile
from math import inf
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from ..frames import script_frames_now
from ..step import rng_states
from ..tensors import ATOMS, PLAIN, device_of, extent, flat_tensors, mapped, storage_of
from .calls import (
    SLOPES,
    Call,
    Packed,
    add_hook,
    as_it_is_now,
    call_numbers,
    is_packed,
    leading_to,
    part_of,
)
from .functions import ASKS, COPIES, FOREACH, LENDS, NOTHING_NEW, RANDOM, READS, WRITES
from .turns import Turns
from .uninitialised import Uninitialised

MANY = 500  # calls, after which a step may prove too dear to be recorded
LIMIT_OF_BYTES = 1 << 28  # of tensors that are kept by reference since the last optimizer step
COPIED = LIMIT_OF_BYTES >> 4  # bytes of a memory that is copied before something writes to it


class CallRecorder(TorchFunctionMode):
    """Writes down what the script computes outside of modules, and the calls of modules.

    It holds no result of a call, and everything else (the batch) by reference. `listener`: read(t,
    name) is told of each number that the script reads, wrote(name, [(weight, values)]) of what it
    writes into weights by hand, its `silent` of the functions that some check asks for.
    """

    def __init__(self, hooks):
        super().__init__()
        self.hooks, self.listener = hooks, None
        self.calls, self.number, self.start = [], 0, 0
        self.weights, self.buffers = WeakSet(), WeakSet()  # storages of those of modules
        self.given = WeakKeyDictionary()  # storage that no call made: the calls that were given it
        self.memory = WeakKeyDictionary()  # storage that a call made, or copies: what it is there
        self.met = []  # tensors that no call made, among the arguments of a call
        self.tables = set()  # numbers of calls: see _keep_tables()
        self.first = inf  # the number of calls at the first backward
        self.slope = 0  # and at the last one
        self.known = torch.utils.weak.WeakTensorKeyDictionary()  # what made a tensor
        self.copied = {}  # module: its last call in training, which has the buffers
        self.outer = set()  # ids of tensors that are held
        self.bytes = 0
        self.turns = Turns()
        self.steps_of = self.turns.steps_of  # optimizer: how many steps
        self._gradient_reads = 0
        self.gap = 0  # the number of calls when a part that was not recorded ended
        self.entered = WeakKeyDictionary()  # storages of NumPy's, before the first step: their line
        self.uninitialised = Uninitialised()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, budget = kwargs or {}, self.hooks.budget
        if not (budget.recording and self.hooks.mine()):
            return func(*args, **kwargs)
        began, before = budget.clock(), budget.spent
        with torch._C.DisableTorchFunction():  # a subclass of the script's sees nothing of it
            after = self._before(func, args, kwargs)
        if self.number % MANY == 0 and self.number:
            budget.leave()
        budget.spend(began, before)
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        told = name in self.listener.silent.functions
        if after or told:
            began, before = budget.clock(), budget.spent
            with torch._C.DisableTorchFunction():
                if after:
                    after(out)
            if told:
                self.hooks.safely(self.listener.silent.computed, func, name, args, kwargs, out)
            budget.spend(began, before)
        return out

    def _before(self, func, args, kwargs):
        """Write the call down, if it is to be made again. Returns what its result is given to."""
        name = getattr(func, "__name__", "")
        self._note_read(name, args)
        if name in ("__get__", "__set__"):
            name += func.__self__.__name__
        self._note_weights(name, args)
        random = RANDOM.search(name)
        drawn = random and (kwargs.get("generator") or not flat_tensors(args))  # the script's batch
        if drawn or name in READS or NOTHING_NEW.fullmatch(name):
            if name in LENDS:
                self.uninitialised.written(args[:1])
            return self.uninitialised.made if name == "empty" else None
        given = (*args, *kwargs.values())  # nn.init gives its tensor by name
        writes = WRITES.fullmatch(name) and given and isinstance(given[0], Tensor)
        written = flat_tensors((kwargs.get("out"), given[0] if writes else None))
        self.uninitialised.written(written)
        for t in written:
            if not self.overwritten(name, t, *given[1:]):
                return None
        if name == "__deepcopy__":  # its memo holds all that was copied before: not written down
            if not self.maker(args[0]):
                return None
            return partial(self.done, self.write(Tensor.clone, args[:1], {}))
        call = self.write(add_hook if name == "register_hook" else func, args, kwargs)
        call.writes = {id(storage_of(t)) for t in written}
        if random:
            call.rng = rng_states(device_of(args))
        call.raised = True
        return partial(self._after, call, name, args, writes)

    def _note_read(self, name, args):
        """The script reads a number, detaches a tensor, or asks whether one is bad."""
        asks = name in ASKS and args and args[0] is args[-1]
        if asks or name in READS or name == "detach":
            self.hooks.safely(self.listener.read, args[0], name)

    def _note_weights(self, name, args):
        """What it does with the weights, and the gradients, that the script holds."""
        self._gradient_reads += name in ("__get__grad", "__set__grad")
        if name in ("__get__data", "detach") and isinstance(args[0], nn.Parameter):
            self.weights.add(storage_of(args[0]))  # of a module that was not called yet, too
        if name == "__set__requires_grad" and self.maker(args[0]):
            self.done(self.write(Tensor.requires_grad_, args, {}), args[0])
        if name == "__set__data":
            self.hooks.safely(self.listener.wrote, "data", [(args[1], args[1:])])
        if FOREACH.fullmatch(name):
            self.hooks.safely(self._wrote_together, name, *args)

    def _after(self, call, name, args, writes, out):
        """The call has returned."""
        call.raised = False
        if "empty" in name:
            self.uninitialised.made(out)
            call.function = partial(as_it_is_now, out.detach())
            call.args, call.kwargs = (), {}
        if COPIES.fullmatch(name) and flat_tensors(args[:1]):
            if out is args[0]:  # nothing was to do; it is written to, perhaps, and was not made
                self._drop(call)
                return
            if self.uninitialised.holds(args[0]):
                self.uninitialised.made(out)
        self.done(call, out)
        if not (flat_tensors(out) or writes or name == "register_hook"):
            self._drop(call)

    def _drop(self, call):
        """It is the last one, or near the end."""
        at = len(self.calls) - 1
        while self.calls[at] is not call:
            at -= 1
        del self.calls[at]

    def overwritten(self, name, t, *values):
        """Before an operation in place. False: it is not written down."""
        storage = storage_of(t)
        if self._made(storage) and not self._holds_a_weight(t):
            return True
        if self._is_weight(t):
            self.hooks.safely(self.listener.wrote, name, [(t, values)])
            return False
        if storage in self.buffers:
            for call in self.calls:
                if call.buffers and any(t is b for b in call.function.buffers()):
                    call.buffers = {}  # the next call copies them as they are then
        if _is_plain(t) and storage.nbytes() <= COPIED:
            self._copy(storage, t)
        elif t.numel() <= COPIED >> 2:  # a part of a data set
            self._exchange(t)
        else:
            return False
        return True

    def _copy(self, storage, t):
        """From here on a repetition has a copy of this memory, as it is before the first write, for
        all tensors that share it."""
        whole = [x for x in (t, t._base) if x is not None and x.nbytes == storage.nbytes()]
        whole = whole or [torch.empty(0, dtype=t.dtype, device=t.device).set_(storage)]
        given = self.given.pop(storage, ())
        start = len(self.calls)
        self.done(self.write(Tensor.clone, (whole[0].detach().clone(),), {}), whole[0])
        for call in given:
            call.args, call.kwargs = mapped(
                lambda x: self.symbol(x) if torch.is_tensor(x) and storage_of(x) is storage else x,
                (call.args, call.kwargs),
            )
        self.calls = [*self.calls[start:], *self.calls[:start]]  # the copy, and parts of it

    def _exchange(self, t):
        """The same for this tensor alone: a copy, in all calls that were given it."""
        symbol, before = self.symbol(t), t.detach().clone()
        calls = self.given.get(storage_of(t), ())
        if symbol is not t:  # an earlier call made it
            calls = takewhile(lambda call: call.number > symbol.number, reversed(self.calls))
        for call in calls:
            call.args, call.kwargs = mapped(
                lambda x: before if x is symbol else x, (call.args, call.kwargs)
            )
        self.done(self.write(Tensor.clone, (before,), {}), t)

    def _made(self, storage):
        """What it is in a repetition, if it is made there."""
        made = self.memory.get(storage)
        return made if made and self.holds(made.number) else None

    def _holds_a_weight(self, t):
        return isinstance(t, nn.Parameter) or storage_of(t) in self.weights

    def _is_weight(self, t):
        by_hand = t.requires_grad and t.is_leaf
        return t.is_floating_point() and (self._holds_a_weight(t) or by_hand)

    def _wrote_together(self, name, tensors, *values):
        """A foreach function: into each weight among `tensors`, from the k-th of each list."""
        writes = [
            (t, [x[k] if isinstance(x, list | tuple) else x for x in values])
            for k, t in enumerate(tensors)
            if self._is_weight(t)
        ]
        if writes:
            self.listener.wrote(name, writes)

    def write(self, function, args, kwargs):
        args, kwargs = self._symbols((*args,)), {k: self._symbols(x) for k, x in kwargs.items()}
        call = self.note(function)
        call.args, call.kwargs, call.frames = args, kwargs, script_frames_now()
        call.autocast = [
            (d, torch.get_autocast_dtype(d))
            for d in ("cpu", "cuda")
            if torch.is_autocast_enabled(d)
        ]
        met, self.met = self.met, []
        for t in met:
            self.given.setdefault(storage_of(t), []).append(call)
        return call

    def note(self, function):
        """Only that it was called: in a step that is not recorded."""
        if self.calls and self.calls[-1].raised:  # the script has caught that, and goes on
            self.calls.pop()
        self.number += 1
        if function in SLOPES:
            self.first, self.slope = min(self.first, self.number), self.number
        call = Call(function, self.number, grad=self.hooks.script_grad())
        self.calls.append(call)
        return call

    def done(self, call, out):
        for made, t in call.made(out).items():
            self.known[t] = made
            storage = storage_of(t)
            if storage not in self.given and not self._made(storage):
                self.memory[storage] = made

    def _symbols(self, tree):
        if type(tree) is tuple:  # faster than mapped()
            return tuple(map(self._symbols, tree))
        if isinstance(tree, Tensor):
            return self.symbol(tree)
        return tree if type(tree) in ATOMS else mapped(self.symbol, tree, is_leaf=is_packed)

    def symbol(self, t):
        """What stands for this tensor in a call."""
        if isinstance(t, PackedSequence):
            return Packed(*map(self.symbol, t))
        if not isinstance(t, Tensor):
            return t
        if made := self.maker(t):
            return made
        if t.requires_grad and t.is_leaf:
            return t
        made = _is_plain(t) and not t.requires_grad and self._made(storage_of(t))
        if made:  # t.data, or a part of it
            call = self.write(part_of, (made, t.dtype, t.shape, t.stride(), t.storage_offset()), {})
            self.done(call, t)
            return self.known[t]
        if id(t) not in self.outer:
            self.outer.add(id(t))
            self.bytes += t.numel() * t.element_size()
        self.met.append(t)
        return t

    def maker(self, t):
        """What made this tensor, if it can be made again: with set_() or t.data = ..., which nobody
        sees, it has got other memory."""
        made = self.known.get(t)
        if made and made.memory == id(storage_of(t)) and self.holds(made.number):
            return made
        return None

    def holds(self, number):
        return number > self.start or number in self.tables

    def _keep_tables(self):
        """At the end of the first step: what made a small tensor, before the training, that is bad
        already (a schedule, a table of weights) stays, because a later step may be the first to use
        it."""
        early = {call.number for call in self.calls if call.number < self.first}
        for t, made in self.known.items():
            # no fake tensor of a compiler, and not what came from NumPy
            small = type(t) is Tensor and t.numel() < 1 << 16 and made.number in early
            if small and (span := extent(t)).is_bad and not span.is_mask:
                self.tables |= call_numbers([made])
        for call in reversed(self.calls):
            if call.leads_to(self.tables):
                self.tables |= {call.number, *call_numbers(call.uses())}

    def needed(self, targets, since=0):
        """The calls that lead to losses (of calls after number `since`) and to these: without a
        validation that came before."""
        return leading_to(self.calls, targets, since)

    @property
    def steps(self):
        """How many steps the script has made."""
        return self.turns.steps

    @property
    def latest(self):
        """The number of calls at the last step of any optimizer."""
        return self.turns.latest

    @property
    def of_this_step(self):
        """The calls since then."""
        latest = self.latest
        return [call for call in self.calls if call.number > latest]

    @property
    def gradient_reads(self):
        """How often the script has read or set one by hand: in a step that is not recorded, once
        more at each look, because nobody knows."""
        self._gradient_reads += not self.hooks.budget.recording
        return self._gradient_reads

    @property
    def is_complete(self):
        """Whether all that was computed since the last step was recorded."""
        return self.hooks.budget.recording and self.gap <= self.start

    @property
    def full(self):
        return self.bytes > LIMIT_OF_BYTES or len(self.calls) > 9999

    def stepped(self, optimizer):
        self._forget(self.turns.stepped(optimizer, self.number, forgets=self.full))

    def forget(self):
        """All that was computed so far."""
        self.turns.forget(self.number)
        self._forget(self.number)

    def _forget(self, start):
        """The calls up to this number."""
        if not self.start:
            self._keep_tables()
        self.start = start
        self.calls = [call for call in self.calls if self.holds(call.number)]
        self.copied = {m: call for m, call in self.copied.items() if self.holds(call.number)}
        # In two passes, because torch 2.9 warns where a storage dies that Python holds by a weak
        # reference alone: here calls end, and with them tensors, and no storage is named.
        for calls in self.given.values():
            calls[:] = [call for call in calls if self.holds(call.number)]
        for storage in [storage for storage, calls in self.given.items() if not calls]:
            del self.given[storage]
        self.outer, self.bytes = set(), 0


def _is_plain(t):
    return type(t) in PLAIN and t.layout is torch.strided
