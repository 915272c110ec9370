"""
Hooks: what stands around torch's functions while a script runs, and three promises.

A hook runs in the script's own thread only, and sees nothing of what another hook does. If a hook
raises, the watch ends and the script goes on: one line says so at once, another at the end, and the
exit code is 4. close() restores every function.
"""

import os
import signal
import sys
import threading
import warnings
import weakref
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial, wraps
from inspect import isfunction, ismethod
from unittest import mock

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import _disable_current_modes

from ..frames import HERE, first_line_of
from ..tensors import PLAIN
from .interrupts import came_from_another_thread

OPEN = nullcontext()
WARNINGS = warnings.__file__
DISPATCH = torch.overrides.handle_torch_function.__code__
WEAK = weakref.__file__, torch.utils.weak.__file__
APPLY = vars(torch.autograd.Function)["apply"]  # a class method, not bound to a class yet


def _apply(function, *args, **kwargs):
    return APPLY.__get__(None, function)(*args, **kwargs)


@contextmanager
def calls_through(wrapper):
    """wrapper(function, apply, args, kwargs) in the place of each call of a custom function."""
    original = APPLY

    def apply(function, *args, **kwargs):
        own = original.__get__(None, function)
        if function.__module__.startswith("torch."):
            return own(*args, **kwargs)
        return wrapper(function, own, args, kwargs)

    method = classmethod(apply)
    modules = mock.patch.dict(globals(), APPLY=method)
    with modules, mock.patch.object(torch.autograd.Function, "apply", method):
        yield


def is_of_fabric(module, *args):
    """A wrapper that casts, and wants its own backward: the module within is the outermost."""
    return "_forward_module" in module._modules


def write_error(text):
    """Print a line on standard error, which may be closed or full: the exit code tells then."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"{text}\n")  # a script may replace print
        sys.stderr.flush()


def without_modes():
    """A context without the dispatch modes of the script."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else OPEN


def walk(frame):
    """This frame and those that called it."""
    while frame:
        yield frame
        frame = frame.f_back


def without_us(frames):
    """Those that there were without us, the innermost first: what our function mode sees is called
    twice, and between them through torch's dispatch and the mode."""
    last, ours = None, False
    for frame in frames:
        code = frame.f_code
        if code.co_filename.startswith(HERE):
            ours = True
        elif not (ours and code in (DISPATCH, last)):
            yield frame
            last, ours = code, False


def compiled_by_nobody(function):
    """What torch.compiler.disable does, which would import the compiler: it compiles neither this
    function nor what that calls, where compiled code calls it between two graphs."""
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


class Method:
    """A method of torch.Tensor: of a plain tensor, in a step that is not recorded, around(original,
    t, ...) takes its place. Torch looks methods up in the class: it finds the original."""

    def __init__(self, original, around, hooks):
        self.original, self.around, self.hooks = original, around, hooks

    @compiled_by_nobody
    def __get__(self, t, kind=None):
        hooks = self.hooks
        if type(t) in PLAIN and hooks.reads_are_unseen and t.is_floating_point():
            return partial(self.around, self.original, t)
        return self.original.__get__(t, kind)


class Hooks:
    """Functions of torch that are wrapped, and whether a hook may run now."""

    def __init__(self, budget):
        self.budget = budget
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.thread, self.on, self.busy = threading.get_ident(), True, False
        self.depth = 0  # calls under way of which nothing is written down
        self.within = ()  # contexts for the next of them
        self.recorder = None  # a function mode: on while the script computes outside of modules
        self.writing = False  # whether the recorder goes on after the hook that runs now
        self.in_step = False  # of an optimizer, which reads numbers of its own
        self.locator = None  # where every operation is watched
        self.unwatched = set()  # sentences
        self._moved = False  # whether a warning is told at another line
        self.warned = {}  # line of a RuntimeWarning: its text
        self.failure = ""  # why the watch is off; "" while it is on
        self.undo = ExitStack()
        self._grad = True  # the script's, while a hook runs
        self._signals = []  # that came while a hook ran: (handler of the script, its arguments)

    def close(self):
        """Within a hook, where no mode of torch is on, what was wrapped is as before at its end."""
        self.record(False)
        self.on, self.locator = False, None
        if not self.busy:
            self.undo.close()

    def record(self, on):
        """Switch the recorder on or off: it is off inside modules and optimizers, and in a step
        that is not recorded. Was it on?"""
        if not (torch._C._len_torch_function_stack() or (on and self.budget.recording)):
            return False
        on &= self.budget.recording
        stack = torch.overrides._get_current_function_mode_stack()
        if on and self.recorder not in stack:
            self.recorder.__enter__()
        elif not on and stack and stack[-1] is self.recorder:
            self.recorder.__exit__(None, None, None)
        return self.recorder in stack

    def mine(self):
        # The compiler sees a constant, and traces nothing of this file.
        if torch.compiler.is_compiling() or torch._C._is_tracing():
            return False
        here = threading.get_ident() == self.thread
        if not here and torch._C._current_autograd_node() is None:  # no backward on a GPU
            self.unwatched.add("torch was used in another thread, which is not watched")
        return here and self.on and not self.busy

    @property
    def reads_are_unseen(self):
        """Whether the script may read a number that the recorder does not see."""
        return not (self.budget.recording or self.depth or self.in_step)

    def script_grad(self):
        """Whether the script records gradients now."""
        return self._grad if self.busy else torch.is_grad_enabled()

    def safely(self, hook, *args):
        """Call the hook and return its result. What it computes, no mode or subclass of the
        script sees. If it raises, one line says so, the watch ends, and the script goes on."""
        if not self.mine():
            return
        self.busy, self._grad = True, torch.is_grad_enabled()
        if locator := self.locator:
            locator.paused = True
        self.writing = self.record(False)
        try:
            with torch._C.DisableTorchFunction(), without_modes():
                torch._C._set_grad_enabled(False)
                try:
                    return hook(*args)
                finally:
                    torch._C._set_grad_enabled(self._grad)
        except Exception as error:
            if came_from_another_thread(error):
                raise
            self.failure = f"the watch failed ({first_line_of(error)}) and is switched off"
            self.say(f"{self.failure}; the script goes on", every=True)
            self.close()
        finally:
            self.busy = False
            if locator:
                locator.paused = False
            self.record(self.writing and self.on)
            if not self.on:
                self.close()
            while self._signals:  # what a handler raises is the script's
                handler, args = self._signals.pop(0)
                handler(*args)

    def say(self, text, every=False):
        if self.rank == 0 or every:
            bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
            after = "\n" if getattr(bars, "_instances", None) else ""  # not in the line of a bar
            write_error(f"{after}autopsy: {text}")

    def take_signals(self):
        """Handlers of signals that the script installs wait while a hook runs, and where Python
        ignores what they raise: in the callback of a weak reference."""
        install, installed = signal.signal, signal.getsignal

        def waits(handler):
            @wraps(handler)
            def wrapper(*args):
                frame = args[-1]
                if self.busy or (frame and frame.f_code.co_filename in WEAK):
                    self._signals.append((handler, args))
                else:
                    handler(*args)

            wrapper.waits_for_hooks = True
            return wrapper

        def own(handler):
            return handler.__wrapped__ if hasattr(handler, "waits_for_hooks") else handler

        self.replace(
            signal,
            "signal",
            lambda number, h: own(install(number, waits(h) if isfunction(h) or ismethod(h) else h)),
        )
        self.replace(signal, "getsignal", lambda number: own(installed(number)))

    def take_warnings(self):
        self.replace(warnings, "_showwarnmsg", partial(self.warn, warnings._showwarnmsg))

    def warn(self, original, message):
        """A warning is told at the line that it would name without us, once. What is made again
        says nothing new."""
        if self.busy:
            return None
        if issubclass(message.category, RuntimeWarning):  # NumPy's: "invalid value encountered in"
            at = f"{os.path.basename(message.filename)}:{message.lineno}"
            self.warned[at] = str(message.message)
        inner = sys._getframe(1)
        frames = [frame for frame in walk(inner) if frame.f_code.co_filename != WARNINGS]
        lines = [(frame.f_code.co_filename, frame.f_lineno) for frame in frames]
        named = message.filename, message.lineno
        if self._moved or not self.mine() or named not in lines:
            return original(message)
        level = lines.index(named)
        place = [*without_us(frames)][: level + 1][-1]
        if place is frames[level]:
            return original(message)

        key = str(message.message), message.category, message.lineno
        heard = frames[level].f_globals.get("__warningregistry__", {})
        heard.pop(key, None)  # the next line that does it is heard, too
        space = place.f_globals
        registry = space.setdefault("__warningregistry__", {})
        where = place.f_code.co_filename, place.f_lineno, space.get("__name__")
        self._moved = True
        try:
            warnings.warn_explicit(message.message, message.category, *where, registry, space)
        finally:
            self._moved = False

    # Ways to wrap a function

    def wrap(self, owner, name, around, outermost=False):
        """around(original, *args, **kwargs) takes the place of owner.name; or only where nothing
        else is under way of which nothing is written down."""
        custom = owner is torch.autograd.Function
        original = _apply if custom else getattr(owner, name)

        @wraps(original)
        def wrapper(*args, **kwargs):
            # The compiler must not see the depth.
            nested = outermost and not torch.compiler.is_compiling() and self.depth
            if not nested and self.mine():
                return around(original, *args, **kwargs)
            return original(*args, **kwargs)

        self.replace(owner, name, classmethod(wrapper) if custom else wrapper)

    def replace(self, owner, name, value):
        self.undo.enter_context(mock.patch.object(owner, name, value))

    def wrap_outermost(self, owner, name, begins, ends, unrecorded=None, passes=None):
        """begins(original, args, kwargs) runs before a call and ends(out) after it: only for the
        outermost of nested calls, and for none with passes(*args). In a step that is not recorded
        unrecorded(args, kwargs, out) runs after it instead, if it is given."""

        def around(original, /, *args, **kwargs):
            if passes and passes(*args):
                return original(*args, **kwargs)
            if unrecorded and not self.budget.recording:
                self.depth += 1
                try:
                    out = original(*args, **kwargs)
                finally:
                    self.depth -= 1
                unrecorded(args, kwargs, out)
                return out
            safely = self._recorded if unrecorded else self.safely
            safely(begins, original, args, kwargs)
            out = self.unseen(original, *args, **kwargs)
            safely(ends, out)
            return out

        self.wrap(owner, name, around, outermost=True)

    def _recorded(self, hook, *args):
        began, before = self.budget.clock(), self.budget.spent
        self.safely(hook, *args)
        self.budget.spend(began, before)

    def warnings_before(self):
        """The first RuntimeWarnings, for a report: NumPy warns where it makes a NaN."""
        return [f"a warning before: {at}: {text}" for at, text in self.warned.items()][:2]

    def wrap_reads(self, read):
        """read(t, name) where the script reads a tensor, or asks whether it is bad, in a step that
        is not recorded. (Else the recorder sees it.)"""

        @compiled_by_nobody
        def around(original, *args, **kwargs):
            plain = args and type(args[0]) in PLAIN and args[0] is args[-1]
            if plain and self.reads_are_unseen:
                self.safely(read, args[0], original.__name__)
            return original(*args, **kwargs)

        asks = ("isnan", "isinf", "isfinite")
        for name in ("item", "tolist", "numpy", "__float__", "__ne__", *asks):
            method = Method(getattr(torch.Tensor, name), around, self)
            self.replace(torch.Tensor, name, method)
        builtins = torch.jit._builtins._get_builtin_table()  # what torch.jit.script() knows
        for name in asks:
            known = builtins.get(id(getattr(torch, name)))
            self.wrap(torch, name, around)
            torch.jit._builtins._register_builtin(getattr(torch, name), known)

    def unseen(self, original, /, *args, **kwargs):
        """Call it with the recorder off."""
        was = self.record(False)
        self.depth += 1
        within, self.within = self.within, ()
        try:
            if not within:
                return original(*args, **kwargs)
            with ExitStack() as stack:
                for context in within:
                    stack.enter_context(context)
                return original(*args, **kwargs)
        finally:
            self.depth -= 1
            self.record(was and self.on)

    def children(self, original, process):
        if not getattr(process._target, "__module__", "").startswith("torch.utils.data"):
            self.unwatched.add(
                "the script started processes, which are not watched (those that "
                "torchrun --nproc_per_node=N autopsy SCRIPT starts are)"
            )
        return original(process)

    def around_each_step(self, before, after):
        """before(optimizer, args, kwargs) and after(...) of every optimizer. before() may return
        other arguments for the step."""
        for handle in (
            register_optimizer_step_pre_hook(partial(self.safely, before)),
            register_optimizer_step_post_hook(partial(self.safely, after)),
        ):
            self.undo.enter_context(handle)
