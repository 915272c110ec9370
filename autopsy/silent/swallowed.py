"""
Swallowed: did an operation overflow float16 while the loss stayed finite?

h / inf is 0, exp(-inf) is 0, and a minimum or a clamp removes an inf: then no loss and no gradient
shows it, and the numbers are wrong. So in some steps this room reads the result of every operation
in float16, as the script computes it. An inf counts if finite numbers made it, weights had a part
in it, and float32 can hold it: the inf of a mask, a constant or a logarithm of 0 is intended. A
step that the loss scaler skips does not count. It changes no number and ends no script.
"""

import re
from math import inf

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..frames import line_now
from ..modes import Operations, was_compiled
from ..operations import in_wider_types, rule_of
from ..tensors import extent, flat_tensors

LARGEST = 65504.0  # of float16
CONSTANT = 1e8  # what is larger, in float32, stands for inf
FIRST, EVERY = 32, 64  # steps: each of the first ones, then one of so many
MOVES = re.compile("where|fill|full|put|scatter|cat|stack|pad|set|copy$")  # they compute nothing


class Swallowed(Operations):
    """Reads the results of operations in float16 while it is entered."""

    supports_higher_order_operators = True  # they pass

    def __init__(self, tape):
        super().__init__()
        self.hooks, self.tape = tape.hooks, tape
        self.hooks.undo.callback(self.ends, good=False)
        self.half = True  # whether the step that was looked at last has computed in float16
        self.looked = 0  # at so many steps
        self.now = {}  # what overflowed in this step: line: name of the operation
        self.found = {}  # in good steps: (line, name): numbers of the steps

    def begins(self):
        """After a step: look at the next one?"""
        self.ends(good=False)  # it was skipped
        steps = self.tape.steps
        due = self.half and (steps < FIRST or steps % EVERY == 0)
        alone = self.hooks.world == 1 and not self.hooks.locator
        # what is compiled must stay so
        if due and alone and not was_compiled() and not _get_current_dispatch_mode_stack():
            self.half = False
            self.__enter__()

    def ends(self, good):
        """Before the next step: its losses and gradients are finite, or not."""
        if _get_current_dispatch_mode_stack()[-1:] != [self]:
            return  # it is not entered, or in a mode of the script
        self.__exit__(None, None, None)
        self.looked += 1
        for line, name in self.now.items() if good else ():
            self.found.setdefault((line, name), []).append(self.tape.steps)
        self.now = {}

    def operation(self, func, args, kwargs):
        """Make it, and look at its results in float16."""
        backward = torch._C._current_autograd_node() is not None
        ours = self.hooks.busy or not self.hooks.on
        if ours or backward or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        inputs = flat_tensors((args, kwargs))
        writes = rule_of(func).writes
        before = self._finite(func, args, inputs) if writes else None
        out = func(*args, **kwargs)
        halves = [t for t in flat_tensors(out) if t.dtype is torch.float16]
        self.half |= bool(halves)
        if halves and any(t.requires_grad for t in inputs):
            self._see(func, args, kwargs, inputs, halves, before)
        return out

    def _see(self, func, args, kwargs, inputs, halves, before):
        try:
            spans = [extent(t) for t in halves]
            sums = rule_of(func).sums  # else a -inf may be a mask
            if not any(high == inf or (sums and low == -inf) for low, high in spans):
                return
            if before is None:  # else it has overwritten what it was given
                before = self._finite(func, args, inputs)
                before = before and in_wider_types(func, args, kwargs) == "finite in float32"
            if before:
                self.now[line_now()] = str(func)
        except Exception:  # a service: it never raises into the step
            self.now = {}

    def _finite(self, func, args, inputs):
        """Whether the inputs are finite and fit into float16, and the operation computes."""
        rule = rule_of(func)
        name = func._schema.name.partition("::")[2]
        if MOVES.search(name) and not rule.copies:
            return False
        if rule.writes and re.search("div|reciprocal|log|pow|sqrt", name):
            return False  # of 0, perhaps
        numbers = [abs(x) for x in args if type(x) in (int, float)]
        numbers += [extent(t).largest for t in inputs if not t.dim()]
        spans = [extent(t) for t in inputs]
        low = min((low for low, _ in spans), default=0.0)
        high = max((high for _, high in spans), default=0.0)
        meant = rule.sums and low <= -LARGEST
        if rule.copies:  # into another type
            meant = max(high, -low) >= CONSTANT
        finite = all(-inf < low and high < inf for low, high in spans)  # False for NaN
        return finite and not meant and all(x <= LARGEST for x in numbers)

    def sentences(self):
        """Sentences for the end of the script."""
        for (line, name), steps in self.found.items():
            when = f"step {steps[0]}"
            if steps[1:]:
                when += f" and at {len(steps) - 1} more of the {self.looked} steps looked at"
            yield (
                f"{line}: {name} made inf in float16 at {when}, and what follows removes it "
                "(h / inf is 0): the loss is finite, and wrong. x.float() before that line, with "
                "autocast off there"
            )
