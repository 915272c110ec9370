"""
Evaluation: does eval() reach all of the network?

F.dropout(x) drops in evaluation, too, and so do a Dropout that forward() makes, and the attention
of torch.nn.functional with dropout_p=0.1: nobody tells them of eval(). torch's spectral_norm
divides by a number that only a forward pass in training computes. The first two evaluations of each
network are looked at while they run; nothing is run again. A call that says when it drops means it,
and so does a Dropout within that was set to train(), and whoever evaluates one batch twice in a row
or each of its rows several times (to average over what drops). So does a source that says so beside
it.
"""

import ast
import linecache
import re
import textwrap
from contextlib import suppress
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.nn.utils.spectral_norm import SpectralNorm

from ...frames import call_at, line_of, script_frames_now
from ...modes import is_compiled
from ...tensors import batched, few, flat_tensors, numbers_of
from ...watch.events import Events
from ...watch.following import Follower, drops, drops_attention
from ..shared.eval_mode import MEANT

LOOKS = 2
SAMPLE = 64  # numbers of a batch
NEAR = 4  # lines
ASKED = re.compile(r"training(?!\s*=\s*True)")  # in a call of an attention


class Evaluation(Events):
    """What drops, and what is not ready, in modules that are called in eval mode: without a graph,
    or after they were called in training."""

    def __init__(self, watch):
        self.names, self.recorder = watch.names, watch.recorder
        self.looks = WeakKeyDictionary()  # module: how often it was looked at
        self.last = WeakKeyDictionary()  # module: (step, numbers it was given) at the last
        self.sampled = WeakSet()  # modules that are evaluated with one batch again and again
        self.trained = WeakSet()  # modules that were called in training, or loaded
        self.drops = WeakKeyDictionary()  # module: sentences on its lines, in their order
        self.unready = []  # (module, its weight)

    def loaded(self, module, state, answer):
        self.trained.update(module.modules())

    def during(self, call, args, kwargs):
        module = call.function
        if module.training:
            if module not in self.trained:
                self.trained.update(module.modules())
            return ()
        looks = self.looks[module] = self.looks.get(module, 0) + 1
        if looks > LOOKS or (call.grad and module not in self.trained):
            return ()
        parts = [*module.modules()]
        if any(part.training for part in parts) or is_compiled(parts):
            return ()
        if looks == 1 and not self.recorder.gap:  # else it may have been trained unseen
            self.unready += [
                (part, part._parameters[f"{hook.name}_orig"])
                for part in parts if part not in self.trained
                for hook in part._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)
            ]  # fmt: skip
        now = [_some(t) for t in flat_tensors((args, kwargs))]
        step, before = self.last.get(module, (-1, []))
        same = step == self.recorder.steps and len(now) == len(before) > 0
        if (same and all(map(torch.equal, now, before))) or _repeats(flat_tensors((args, kwargs))):
            self.sampled.add(module)
        self.last[module] = self.recorder.steps, now
        return [Drops(self.drops.setdefault(module, {}))]

    def sentences(self):
        told = [texts for module, texts in self.drops.items() if module not in self.sampled]
        yield from dict.fromkeys(text for texts in told for text in texts)
        unready = [self.names.of(p) for part, p in self.unready if part in self.trained]
        if unready:
            yield (
                f"{few(unready, 4)} of spectral_norm were evaluated before the first forward pass "
                "in training: until then they are divided by the norm of a random direction"
            )


def _repeats(tensors):
    """Whether a batch holds each of its rows several times."""
    t = next(batched(tensors), torch.zeros(1, 0))
    with suppress(RuntimeError):  # not for each dtype
        rows = numbers_of(t.detach())
        rows = rows.reshape(len(rows), -1)[:, :SAMPLE]
        return bool((rows.unique(dim=0, return_counts=True)[1] > 1).all())
    return False


def _some(t):
    flat = numbers_of(t.detach()).reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE].clone()


class Drops(Follower):
    """Notes what to say of the lines of the script that drop."""

    def __init__(self, texts):
        super().__init__()
        self.texts = texts

    def function_called(self, func, name, args, kwargs, out):
        is_attention = drops_attention(name, args, kwargs)
        if not (is_attention or drops(func, kwargs)):
            return
        frames = script_frames_now()
        file, number, function = frames[0]
        code = call_at(file, number)
        above = linecache.getlines(file)[max(0, number - NEAR - 1) : number]
        source_now = "".join([*above, function])
        meant = ASKED.search(code) if is_attention else _says_when(code)
        if code and not (meant or MEANT.search(source_now)):
            at = f"{name if is_attention else 'dropout'} at {line_of(frames)}"
            self.texts[f"{at} drops in eval mode, too: {_mended(name)}"] = True


def _mended(name):
    """What to do about it."""
    if name == "scaled_dot_product_attention":
        return "give it dropout_p=p if self.training else 0.0"
    also = "" if name == "multi_head_attention_forward" else ", or make the Dropout in __init__()"
    return f"give it training=self.training{also}"


def _says_when(code):
    """Whether a call of dropout is told when to drop."""
    with suppress(SyntaxError):
        for call in ast.walk(ast.parse(textwrap.dedent(code))):
            name = getattr(call, "func", None)
            name = getattr(name, "attr", getattr(name, "id", ""))
            if "dropout" in name:
                return len(call.args) > 2 or any(k.arg == "training" for k in call.keywords)
    return "training" in code or "True" in code
