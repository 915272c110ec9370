"""
Events: what the watch tells whoever looks for faults that make no NaN.

`Events` names each event once, and does nothing. A check in the folder silent/ (or in a folder of
it) is a file with one subclass of it, which overrides the events that it needs; or a folder, with
that subclass in its __init__.py. Delete that file, or that folder, and nothing else notices. If a
check needs a file that is not there, a sentence at the end says that it is off. Delete silent/, and
autopsy finds NaN and inf as before.
"""

import importlib
import pkgutil
import sys
from collections import Counter
from functools import partial

from ..frames import first_line_of, line_now, script_frames_now
from ..modes import is_compiled
from ..tensors import few
from .budget import FIRST
from .following import Follower
from .interrupts import came_from_another_thread, no_evidence


class Events:
    """The events of a script, in their order within a step."""

    recorded_only = False  # whether it is told nothing of a step that is not recorded

    def __init__(self, watch):
        """`watch`: its recorder, deferred, names, scaling and hooks may be read."""

    def loaded(self, module, state, answer):
        """module.load_state_dict(state) has returned `answer`."""

    def restored(self, optimizer):
        """load_state_dict() of an optimizer is over."""

    def switched(self, module, training):
        """train() or eval() of a module and all within it is over."""

    def built(self, made):
        """An nn.ModuleList, nn.Sequential, DistributedDataParallel or learning rate scheduler was
        made."""

    def iterated(self, loader):
        """An iterator of a DataLoader begins. Returns contexts that are open while it is made: they
        must raise nothing."""

    def seeded(self, kind):
        """The script has seeded the generator of "torch", "numpy" or "random"."""

    def read(self, t, name):
        """The script reads a number, or detaches a tensor."""

    def called(self, module, tensors):
        """An outermost module is called in training."""

    def evaluated(self, module):
        """An outermost module was called without gradients, in a step that is recorded or not."""

    def during(self, call, args, kwargs):
        """An outermost module is about to be called with these. Returns contexts that are open
        while it runs: they must raise nothing."""

    def wrote(self, line, weights, name, given):
        """The script has written into weights by hand, with the function of this name. given: for
        each weight, what it was given."""

    def backward(self, losses):
        """A backward pass begins."""

    def passed(self):
        """A backward pass is over."""

    def cleared(self, owner):
        """zero_grad() of an optimizer or a module is over."""

    def unscaled(self, optimizer):
        """A loss scaler has divided the gradients of this optimizer by its scale."""

    def clipped(self, params, limit, norm):
        """The script has clipped gradients. norm: the norm of all of them before, on its device."""

    def scheduled(self, scheduler):
        """A learning rate scheduler has made a step, of its own: not within that of another."""

    def before_step(self, optimizer, losses, norm, moved):
        """Before a step of an optimizer. norm: of all gradients; it may be non-finite. moved: how
        many tensors have one."""

    def stepped(self, optimizer):
        """An optimizer has made its step; the recorder still holds it."""

    def skipped(self, optimizer):
        """A loss scaler has skipped a step of this optimizer."""

    def over(self):
        """A step is over, with or without an update."""

    def resumed(self):
        """After steps that were not recorded, the next one is."""

    def causes(self):
        """Those of its sentences that may explain a NaN: each is the advice of its report."""
        return ()

    def sentences(self):
        """What to say at the end of the script."""
        return ()


SAID = ("causes", "sentences")  # what is asked for at the end


class OutermostSteps(Events):
    """Calls uses(optimizer) for each step that is not made within that of another optimizer, or
    that the loss scaler has skipped."""

    inside = None  # the optimizer whose step is under way, with all that it calls

    def uses(self, optimizer):
        """It uses the gradients as they are."""

    def before_step(self, optimizer, losses, norm, moved):
        if self.inside is None:
            self.inside = optimizer

    def stepped(self, optimizer):
        if self.inside is optimizer:
            self.inside = None
            if not self.hooks.depth:
                self.uses(optimizer)

    def skipped(self, optimizer):
        if self.inside is None:
            self.uses(optimizer)


class FirstPasses(Events):
    """Calls first(losses, line) before the first backward passes of each line that makes some: a
    script may train in several phases."""

    most = 12  # of one line

    def __init__(self, watch):
        self.recorder = watch.recorder

    def first(self, losses, line):
        """One of them begins."""


class FirstFunctions(Events):
    """Calls function_called(func, name, args, kwargs, out) after each of its functions, outside of
    modules and within, in the first steps, at the steps 8, 16, 32, ..., and in the first
    evaluations. What raises there is no evidence."""

    recorded_only = True
    functions = ()  # their names
    outside = True  # of modules, too
    always = False  # there in any step that is recorded

    def __init__(self, watch):
        self.recorder, self.hooks = watch.recorder, watch.hooks

    def function_called(self, func, name, args, kwargs, out):
        """One of them was called."""

    def looks_into(self, module):
        """Whether it looks at what runs within an outermost module."""
        return True


class ReadsFiles(Events):
    """Collects the files of the script in which steps are made, and its main one."""

    def __init__(self, watch):
        self.recorder, self.files = watch.recorder, {}

    def stepped(self, optimizer):
        if self.recorder.steps.bit_count() < 2:
            main = getattr(sys.modules.get("__main__"), "__file__", None)
            files = [main, *(file for file, *_ in script_frames_now()[-1:])]
            self.files.update(dict.fromkeys(filter(None, files)))


class Within(Follower):
    """Tells such checks of what runs within a module."""

    def __init__(self, checks):
        super().__init__()
        self.checks = checks

    def function_called(self, func, name, args, kwargs, out):
        for check in self.checks:
            if name in check.functions:
                with no_evidence:
                    check.function_called(func, name, args, kwargs, out)


NAMES = [name for name in vars(Events) if not name.startswith("_")]
NAMES = [name for name in NAMES if callable(getattr(Events, name))]


class Listeners:
    """Passes each event to those of `checks` that override it. A check that raises ends, and it
    alone: the others and the watch go on, and `failures` says so at the end."""

    def __init__(self, checks, hooks):
        self.failures = []  # sentences
        self.hooks, self.budget = hooks, hooks.budget
        self._evaluations = 0  # calls of modules without gradients
        self._passes = Counter()  # line of backward(): how many
        self._listen(checks)
        for name in NAMES:
            if name not in vars(Listeners):
                setattr(self, name, partial(self._tell, name))

    def _listen(self, checks):
        """Who is told of an event in a step that is recorded, and in any other?"""
        self._recorded, self._unrecorded = {}, {}
        for name in NAMES:
            told = [c for c in checks if getattr(type(c), name) is not getattr(Events, name)]
            always = [c for c in told if name in SAID or not c.recorded_only]
            self._recorded[name] = [(check, getattr(check, name)) for check in told]
            self._unrecorded[name] = [(check, getattr(check, name)) for check in always]
        self._checks = checks
        self._of_passes = [check for check in checks if isinstance(check, FirstPasses)]
        self._of_functions = [check for check in checks if isinstance(check, FirstFunctions)]
        self.functions = {}  # name: the checks that are told of this function
        for check in self._of_functions:
            for name in check.functions if check.outside else ():
                self.functions.setdefault(name, []).append(check)

    def anybody(self, event):
        """Whether somebody is told of it in the step under way."""
        return bool((self._recorded if self.budget.recording else self._unrecorded)[event])

    def _tell(self, event, *args):
        listening = self._recorded if self.budget.recording else self._unrecorded
        return self._ask(listening[event], *args)

    def _ask(self, listening, *args):
        """Returns what they answer, one after the other."""
        answers = []
        for check, method in listening:
            try:
                answers += method(*args) or ()
            except Exception as error:
                if came_from_another_thread(error):
                    raise
                name = type(check).__name__
                self.failures.append(
                    f"the check {name} failed ({first_line_of(error)}) and ended there"
                )
                self._listen([other for other in self._checks if other is not check])
        return answers

    def backward(self, losses):
        line = line_now()
        first = [c for c in self._of_passes if self._passes[line] < c.most]
        self._passes[line] += 1
        self._ask([(check, check.first) for check in first], losses, line)
        self._tell("backward", losses)

    def _is_first(self, grad):
        """Whether the step under way is looked at closely, or an evaluation."""
        return self.budget.is_close or (self._evaluations <= FIRST and not grad)

    def computed(self, func, name, args, kwargs, out):
        """One of `functions` was called outside of modules, in a step that is recorded."""
        is_first = self._is_first(self.hooks.script_grad())
        for check in self.functions[name]:
            if is_first or check.always:
                with no_evidence:
                    check.function_called(func, name, args, kwargs, out)

    def during(self, call, args, kwargs):
        contexts = self._tell("during", call, args, kwargs)
        self._evaluations += not call.grad
        module = call.function
        looking = [check for check in self._of_functions if check.looks_into(module)]
        if looking and self._is_first(call.grad) and not is_compiled([*module.modules()]):
            contexts.append(Within(looking))
        return contexts


def find_checks():
    """The classes of all checks of the folder silent/ and of its folders, if it is there; and
    sentences on checks that lack a file."""
    try:
        from .. import silent
    except ImportError:
        return [], []
    found, off = [], {}  # off: missing module: the checks that need it
    for entry in pkgutil.walk_packages(silent.__path__, f"{silent.__name__}."):
        try:
            module = importlib.import_module(entry.name)
        except ModuleNotFoundError as error:
            name = error.name or ""  # of what is missing
            if not name.startswith(silent.__name__):
                raise
            check = entry.name.removeprefix(f"{silent.__name__}.")
            off.setdefault(name, []).append(check.replace(".", "/"))
            continue
        for value in vars(module).values():
            is_check = isinstance(value, type) and issubclass(value, Events)
            if is_check and value.__module__ == module.__name__:
                found.append(value)
    return found, [_off(checks, missing) for missing, checks in off.items()]


def _off(checks, missing):
    """A sentence on the checks that need a missing module."""
    which = f"check {checks[0]} is" if len(checks) == 1 else f"checks {few(checks)} are"
    return f"the {which} off: {missing.replace('.', '/')} is not there"


def silent_faults(watch, more=()):
    """All checks that are found, and these."""
    found, off = find_checks()
    listeners = Listeners([*more, *(check(watch) for check in found)], watch.hooks)
    listeners.failures += off
    return listeners
