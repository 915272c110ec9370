"""
Changes: what has the script done before this step that it had not done before?

Before each optimizer step it notes a few things that cost nothing: how large the batch is, how many
backward passes lead to it, train() or eval(), writes into weights by hand, and the optimizer's
state. They may explain a jump of the loss.
"""

from weakref import ref

import torch
from torch import nn

from ...frames import line_of
from ...tensors import few, storage_of
from ...watch.calls import BACKWARD
from ...watch.deferred import params_of

PAST = 32  # steps
LATELY = 3  # of these: what a change has led to
APART = 4  # times as many rows


class Owner:
    """An optimizer, its weights and its state: to compare them with those of one that follows."""

    def __init__(self, optimizer):
        self.id, self.optimizer = id(optimizer), ref(optimizer)
        self.params = [ref(p) for p in params_of(optimizer)]

    def unlike(self, other, names):
        """The tensors of `other`, of the same shapes, that are new; "" if that is not known. Within
        a few steps the watch keeps the one before alive."""
        old = self.optimizer()
        pairs = [(p(), q) for p, q in zip(self.params, params_of(other), strict=True)]
        if old is None or any(p is None for p, _ in pairs):
            return ""
        new = [names.of(q) for p, q in pairs if p is not q and not torch.equal(p, q)]
        for p, q in pairs:
            before, now = old.state.get(p, {}), other.state.get(q, {})
            for key, t in before.items():
                same = key in now and torch.equal(torch.as_tensor(t), torch.as_tensor(now[key]))
                new += [] if same else [f"{key} of {names.of(q)}"]
        return f": {few(new, 4)} differ from those of the one before (not loaded?)" if new else ""


class Changes:
    """What an optimizer's steps have brought: noted in its past."""

    def __init__(self, recorder, names):
        self.recorder, self.names = recorder, names
        self.written = []  # since the last step: (line, weights)

    def wrote(self, line, weights):
        """This line of the script writes into these weights."""
        self.written.append((line, {storage_of(p) for p in weights}))

    def note(self, optimizer, past, moved):
        """Before a step of this optimizer, which moves so many weights. In one that is not recorded
        not all is seen: it says nothing of what came before the next one."""
        if not self.recorder.hooks.budget.recording:
            past.noted, self.written = [], []
            return
        mine = set()
        if self.written:
            mine = {storage_of(p) for p in params_of(optimizer)}
        more = past.noted and moved > past.noted[-1]["moved"]
        calls, nets, passes = self.recorder.of_this_step, [], 0
        for call in calls:
            if call.function is BACKWARD:
                passes += 1
            elif call.grad and isinstance(call.function, nn.Module):
                nets.append(call)
        now = {
            "shape": next((tuple(c.shape) for c in nets if c.shape), (0,)),
            "passes": passes,
            "eval": tuple(dict.fromkeys(not c.function.training for c in nets)),
            "state": (id(optimizer.state), bool(optimizer.state)),
            "written": {line for line, written in self.written if written & mine},
            "others": any(not written & mine for _, written in self.written),
            "moved": moved,
            "fresh": self._fresh(optimizer) if more else {},
            "whole": self.recorder.is_complete,
        }
        self.written = []
        for call in calls:
            for frame in call.frames[-1:]:  # of the script
                past.lines.setdefault(frame, self.recorder.steps)
        past.noted = [*past.noted, now][-PAST - LATELY :]

    def _fresh(self, optimizer):
        """{name: rate} of the weights that move for the first time, if the optimizer shows it."""
        moving = [
            (p, group)
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        fresh = [(p, group) for p, group in moving if not optimizer.state.get(p)]
        if len(fresh) == len(moving):
            return {}  # it keeps no state
        return {self.names.of(p): f"{float(group['lr']):g}" for p, group in fresh}

    def target_moved(self, past):
        """Whether only weights of others, as of a target network, were written just before."""
        others = [step["others"] and not step["written"] for step in past.noted]
        return any(others[-LATELY:]) and not all(others[:-LATELY])

    def new_optimizer(self, past):
        """Whether one took the place of an equal one a few steps ago; or ""."""
        if past.born is None or self.recorder.steps - past.born >= LATELY:
            return ""
        without = "" if past.resumed else ", which began without the state of the one before"
        return f"The optimizer is a new one since step {past.born}{past.unlike or without}"

    def seen(self, past):
        """Whether the last few steps were recorded: else writes by hand were not seen."""
        late = past.noted[-LATELY:]
        return len(late) == LATELY and all(step["whole"] for step in late)

    def sentence(self, past):
        """What is new since a few steps, or lines that ran for the first time; or ""."""
        before, late = past.noted[:-LATELY], past.noted[-LATELY:]
        if not before:
            return ""

        def earlier(what):
            return {step[what] for step in before}

        now, passes = late[-1], earlier("passes")
        if new := self.new_optimizer(past):
            return new
        if size := _unusual(now["shape"], earlier("shape")):
            return size
        if now["passes"] not in range(min(passes), max(passes) + 1):
            return f"{now['passes']} backward passes led to it, {_span(passes)} to those before"
        if now["eval"] in ((True,), (False,)) and now["eval"] not in earlier("eval"):
            modes = ("eval()", "train()") if now["eval"][0] else ("train()", "eval()")
            return "The network was in {} mode, and in {} mode before".format(*modes)
        known = {line for step in before for line in step["written"]}
        whole = len(past.noted) > PAST and all(step["whole"] for step in past.noted)
        lines = [line for step in late for line in step["written"] if line not in known]
        if whole and lines:
            return f"Shortly before, weights were written at {lines[0]}"
        if fresh := {name: rate for step in late for name, rate in step["fresh"].items()}:
            rates = few(sorted({*fresh.values()}), 4)
            return f"Shortly before, {few(fresh, 4)} moved for the first time, with lr {rates}"
        if late[-1]["state"] not in earlier("state"):
            return "The optimizer's state is a new one: cleared, or loaded"
        ran = past.lines.items()
        new = [frame for frame, step in ran if step == self.recorder.steps]
        if whole and new:
            return f"It was the first step to run {line_of(new[:1])}"
        return ""


def _unusual(shape, earlier):
    """A sentence if a batch of this shape is far larger than those, or has far fewer rows."""
    same = [other for other in earlier if len(other) == len(shape)]
    for d, sizes in enumerate(zip(*same, strict=True)):
        fewer = d == 0 and shape[d] * APART <= min(sizes) > 0
        if fewer or shape[d] >= APART * max(sizes) > 0:
            where = "rows" if d == 0 else f"in dimension {d}"
            return f"Its batch has {shape[d]} {where}, those before had {_span(set(sizes))}"
    return ""


def _span(numbers):
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low} to {high}"
