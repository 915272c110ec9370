"""
Trace: the functions of torch that the forward passes of one step call, and what made each tensor.
"""

import os
import sys
from contextlib import ExitStack
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.utils.weak import WeakIdKeyDictionary

from ..frames import DISTRIBUTIONS, HERE, TORCH, script_frames_now
from ..tensors import extent, few, flat_tensors, numbers_of, type_of
from ..watch.following import Follower, is_loss
from ..watch.names import names_of

PASSIVE = {  # they hand on the numbers that they are given
    "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose", "permute",
    "movedim", "swapaxes", "__getitem__", "contiguous", "clone", "to", "float", "half", "bfloat16",
    "type", "expand", "chunk", "split", "unbind", "dropout", "dropout1d", "dropout2d", "dropout3d",
    "T", "mT", "cat", "stack", "repeat", "repeat_interleave", "select", "narrow", "index_select",
}  # fmt: skip
LISTED = 3  # tensors
MASKED = -1e30  # added to what a mask hides
LOGIC = ("and", "or", "logical_and", "logical_or", "lt", "gt", "le", "ge", "eq", "ne", "invert")
LINEAR = ("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d")


def place(frames=None):
    """(file, line) of the script that is under way, or was in these frames."""
    frames = script_frames_now() if frames is None else frames
    return (os.path.basename(frames[-1][0]), frames[-1][1]) if frames else ("?", 0)


def here():
    file, line = place()
    return f"{file}:{line}"


class Titles:
    """What the script calls its networks: the name of the variable that holds each, where it was
    called first, or of the attribute."""

    def __init__(self, names):
        self.names = names
        self.first = WeakKeyDictionary()  # network: variable
        self._known = WeakKeyDictionary()  # network: title, which takes long to find

    def note(self, module):
        if module not in self.first:
            self.first[module] = _variable(module)

    def of(self, module):
        if module not in self._known:
            name = names_of([module])[module] or self.first.get(module, "")
            kind = type(module).__name__
            self._known[module] = f"{name} ({kind})" if name not in ("", kind) else kind
        return self._known[module]

    def of_weights(self, params):
        """{id of a weight: its name}"""
        wanted = {id(p) for p in params}
        names = {
            id(p): ".".join(filter(None, (prefix, name)))
            for module, prefix in self.parts().items()
            for name, p in module.named_parameters(recurse=False) if id(p) in wanted
        }  # fmt: skip
        return names | {id(p): self.names.of(p) for p in params if id(p) not in names}

    def parts(self):
        """{module: its name} of all within networks that were called."""
        names = {}
        for root in list(self.names.roots):
            prefix = names_of([root])[root] or self.first.get(root, "")
            for name, module in root.named_modules():
                names[module] = ".".join(filter(None, (prefix, name)))
        return names


def _variable(module):
    """The variable of a frame under way, or of its self, that holds a module; or ""."""
    frame = sys._getframe(1)
    while frame:
        held = {**frame.f_locals}
        if not frame.f_code.co_filename.startswith((HERE, TORCH)):
            owner = held.pop("self", None)
            for name, value in (*held.items(), *getattr(owner, "__dict__", {}).items()):
                if value is module:
                    return name
        frame = frame.f_back
    return ""


class Made(NamedTuple):
    """A call of a function."""

    func: Any
    name: str
    line: str
    module: str  # the innermost module
    call: int  # of which outermost module, counted; 0: it is in none
    given: list  # tensors
    out: list
    args: tuple
    kwargs: dict
    is_loss: bool
    grad: bool  # whether gradients were recorded
    before: Any  # if it has written into what it returns: what had made that
    is_check: bool  # of torch's own

    @property
    def at(self):
        return f"{self.name.strip('_')} at {self.line}"


class Called(NamedTuple):
    """A call of a module."""

    module: nn.Module
    name: str
    given: list  # tensors
    out: list
    since: int  # the number of functions called before
    is_outermost: bool

    @property
    def title(self):
        kind = type(self.module).__name__
        return f"{self.name} ({kind})" if self.name not in ("", kind) else kind


class Trace(Follower):
    """Writes down each call of a function, and of a module. names: of the modules."""

    def __init__(self, names):
        super().__init__()
        self.names = names
        self.calls, self.modules = [], []
        self.made = WeakIdKeyDictionary()  # tensor: Made
        self._under_way = []  # (module, number of functions called before)
        self._calls = 0  # of outermost modules
        self._stack = ExitStack()

    def __enter__(self):
        ends = modules.register_module_forward_hook(self._end, with_kwargs=True, always_call=True)
        self._stack.enter_context(modules.register_module_forward_pre_hook(self._begin))
        self._stack.enter_context(ends)
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._stack.close()

    def _begin(self, module, args):
        self._calls += not self._under_way
        self._under_way.append((module, len(self.calls)))

    def _end(self, module, args, kwargs, out):
        _, since = self._under_way.pop()
        given, made = flat_tensors((args, kwargs)), flat_tensors(out)
        name, is_outermost = self.names.get(module, ""), not self._under_way
        self.modules.append(Called(module, name, given, made, since, is_outermost))

    def function_called(self, func, name, args, kwargs, out):
        if name == "__get__":
            name = func.__self__.__name__
        given, tensors = flat_tensors((args, kwargs)), flat_tensors(out)
        if not (given and tensors) or (name in PASSIVE and tensors[0] is given[0]):
            return
        module, call = "", 0
        if self._under_way:
            module, call = self.names.get(self._under_way[-1][0], ""), self._calls
        grad = torch.is_grad_enabled()
        before = self.made.get(given[0]) if tensors[0] is given[0] else None
        checks = TORCH if name.strip("_") in LOGIC else DISTRIBUTIONS
        is_check = sys._getframe(2).f_code.co_filename.startswith(checks)
        made = Made(
            func, name, here(), module, call, given, tensors, args, kwargs, is_loss(func, name),
            grad, before, is_check,
        )  # fmt: skip
        self.calls.append(made)
        self.made.update((t, made) for t in tensors)

    def maker(self, t, made):
        """What has made a tensor that `made` was given."""
        return made.before if t is made.out[0] else self.made.get(t)

    def source(self, made):
        """This call, or the one before it whose numbers it has handed on."""
        while made and made.name in PASSIVE:
            made = self.input_of(made)
        return made

    def input_of(self, made):
        """The call that made its first input that is no weight, or None."""
        inputs = [t for t in made.given if t.is_floating_point()]
        inputs = [t for t in inputs if not isinstance(t, nn.Parameter)]
        return self.maker(inputs[0], made) if inputs else None

    def way(self, t, most=4):
        """What made it one after the other, the last first, up to a linear function."""
        found, made = [], self.source(self.made.get(t))
        while made and len(found) < most:
            found.append(made)
            made = None if made.name in LINEAR else self.source(self.input_of(made))
        return found


@torch.no_grad()
def about(t):
    """A tensor in words: what kind, from where to where, what most of it is."""
    kind, t = type_of(t), numbers_of(t.detach())
    if not t.numel() or t.is_complex():
        return kind
    if t.dtype is torch.bool:
        return f"{kind}, {t.float().mean():.0%} True"
    if t.is_floating_point():
        low, high = extent(t)
        if not low < high:
            return f"{kind}, all {low:.3g}"
        span = f"{kind}, {low:.3g} .. {high:.3g}"
        if low == -torch.inf or high == torch.inf:
            return f"{span}, {t.isinf().float().mean():.0%} of them inf"
        if low < MASKED:
            return f"{span}, {(t == low).float().mean():.0%} of them {low:.3g}"
        wide = t.cpu().double()
        return f"{span}, mean {wide.mean():.2g}, deviation {wide.std():.2g}"
    values, counts = t.unique(return_counts=True)
    most = int(counts.argmax())
    if len(values) == 1:
        return f"{kind}, all {int(values)}"
    often = f", {int(values[most])} is {float(counts[most]) / t.numel():.0%} of them"
    often = often if len(values) < t.numel() else ""
    return f"{kind}, {len(values)} values in {int(values[0])} .. {int(values[-1])}{often}"


def listed(tensors):
    """The first few in words; of two that hold the same numbers the second is told as that."""
    texts, seen = [], []
    for t in tensors[:LISTED]:
        kind = t.shape, t.dtype, t.device
        alike = [other for other in seen if (other.shape, other.dtype, other.device) == kind]
        again = t.numel() > 1 and any(torch.equal(*map(numbers_of, (other, t))) for other in alike)
        texts.append("the same numbers again" if again else about(t))
        seen.append(t)
    return few([*texts, *tensors[LISTED:]], LISTED, "; ")


def number(x):
    """Of a tensor of one number, or a Python number; else None."""
    if isinstance(x, Tensor):
        return float(x.detach()) if x.numel() == 1 else None
    return float(x) if isinstance(x, int | float) else None


def factor_of(made):
    """(a, x), if it has multiplied the tensor x by the number a; or None."""
    name = made.name.strip("_")
    if name == "neg":
        return -1.0, made.given[0]
    if len(made.args) < 2 or name not in ("mul", "rmul", "imul", "div", "truediv", "itruediv"):
        return None
    x, a = made.args[:2]
    if name == "mul" and not isinstance(x, Tensor):
        x, a = a, x
    varies = isinstance(a, Tensor) and a.requires_grad
    if varies or number(a) in (None, 0.0) or not isinstance(x, Tensor):
        return None
    return (1 / number(a) if "div" in name else number(a)), x
