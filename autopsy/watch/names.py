"""
Names: what does the script call a module, a weight, a buffer?

A module's place in the module that owns it, or the variable that holds it.
"""

import gc
import re
import sys
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from ..frames import is_own, line_now
from ..tensors import storage_of, type_of

# What gets no gradient on purpose
TARGETS = re.compile(
    r"target|teacher|\bema\b|momentum|frozen|fixed|reference|slow|random|\b(old|rand|rnd|prior)\b"
)
WRAPPED = ("module", "_orig_mod", "_forward_module", "_original_module")  # what a wrapper wraps

FEW = 8  # modules: to ask who holds one is slow


class Names:
    """The outermost modules that the script has called, and its names for what they hold."""

    def __init__(self):
        self.roots = WeakSet()
        self._prefixes = WeakKeyDictionary()  # of the roots
        self._makers = WeakKeyDictionary()  # optimizer: the line that made it

    def makes(self, optimizer):
        """The script makes an optimizer, here."""
        self._makers[optimizer] = line_now()

    @property
    def optimizers(self):
        """Those that live, and that the script has made."""
        return [*self._makers]

    def of_optimizer(self, optimizer):
        """Its class, and the line that made it."""
        line = self._makers.get(optimizer)
        return type(optimizer).__name__ + (f" (made at {line})" if line else "")

    def modules(self):
        """These, and all within them, each once."""
        return dict.fromkeys(m for root in self.roots for m in root.modules())

    def of(self, p):
        """The script's name for a weight or buffer, its data, or a view of it."""
        roots, storage = list(self.roots), storage_of(p)
        if set(self._prefixes) != set(roots):
            self._prefixes = WeakKeyDictionary(names_of(roots))
        for root in roots:
            prefix = self._prefixes[root]
            for name, other in (*root.named_parameters(prefix), *root.named_buffers(prefix)):
                if storage_of(other) is storage:
                    return name
        for owner in modules():  # that the script has not called yet
            for name, other in (*owner._parameters.items(), *owner._buffers.items()):
                if other is not None and storage_of(other) is storage:
                    return ".".join(filter(None, (names_of([owner])[owner], name)))
        kind = f"a parameter {type_of(p)}"
        held = held_as(p)
        return f"{held} ({kind})" if held else kind


def is_target(name):
    """Whether the script calls a weight's module a target, a teacher, ..."""
    return bool(TARGETS.search(name))


def modules():
    """All living modules but ours."""
    living = [x for x in gc.get_objects() if issubclass(type(x), nn.Module)]
    return [module for module in living if type(module) is not nn.Module]


def names_of(roots):
    """The script's name for each module: its place in the module that owns it, whether the script
    calls that or not. If several have weights, the variable that holds each comes first. Or ""."""
    owners = {child: (owner, key) for owner in modules() for key, child in owner._modules.items()}
    paths = {}
    for root in roots:
        top, path = root, []
        while top in owners:
            top, key = owners[top]
            path = path if key in WRAPPED else [key, *path]
        paths[root] = top, path
    tops = dict.fromkeys(top for top, _ in paths.values())
    several = sum(next(iter(top.parameters()), None) is not None for top in tops) > 1
    for top in tops if several else ():
        variables = [*vars(sys.modules["__main__"]).items()]
        tops[top] = next((name for name, value in variables if value is top), "")
        if not tops[top] and len(tops) <= FEW:
            tops[top] = held_as(top)
    names = {}
    for root, (top, path) in paths.items():
        first = tops[top] or ("" if path or not several else type(root).__name__)
        names[root] = ".".join(filter(None, [first, *path]))
    return names


def held_as(value):
    """The attribute under which an object of the script holds this, or ""."""
    for holder in gc.get_referrers(value):
        if type(holder) is dict:
            owners = [x for x in gc.get_referrers(holder) if _space_of(x) is holder]
        else:  # Python keeps attributes beside an object before somebody asks for its dict
            owners = [holder]
        for owner in owners:
            space = _space_of(owner)
            names = [name for name, x in space.items() if x is value] if space else ()
            if names and isinstance(names[0], str):
                return names[0]
    return ""


def _space_of(x):
    """The attributes of an object of a class of the script's own, or None."""
    kind = type(x)
    own = is_own(getattr(sys.modules.get(str(kind.__module__)), "__file__", None) or "<")
    if not own or issubclass(kind, nn.Module) or str(kind.__module__).startswith("autopsy"):
        return None
    return getattr(x, "__dict__", None)


def together(modules):
    """One module that holds these under the script's names. A single module without an owner is
    returned as it is."""
    inner = {m for root in modules for m in root.modules() if m is not root}
    outer = [root for root in dict.fromkeys(modules) if root not in inner]
    names = names_of(outer)
    if len(outer) == 1 and not names[outer[0]]:
        return outer[0]
    net = nn.Module()
    for module in outer:
        *path, name = (names[module] or type(module).__name__).split(".")
        at = net
        for part in path:
            if part not in at._modules:
                at.add_module(part, nn.Module())
            at = at._modules[part]
        at.add_module(name + (f"_{len(at._modules)}" if name in at._modules else ""), module)
    return net
