"""
Misspelt: has the script set an attribute that looks like requires_grad, and that PyTorch never
reads?

`module.requires_grad = False` freezes nothing, and neither does `p.require_grad = False`. Told is
an attribute whose value is not what the weights have, and which the module's class does not read.
"""

import inspect
import re

from ...tensors import few
from ...watch.events import Events

REQUIRES = re.compile(r"(?i)requ\w{0,4}_?grad(s|ient|ients)?_?")


class Misspelt(Events):
    """Attributes of modules and weights, at the end of the script."""

    def __init__(self, watch):
        self.names = watch.names

    def sentences(self):
        several, misspelt = self.names.modules(), {}
        for module in several:
            yield from self._unread([*module.parameters()], module, "of their module ")
        for p in dict.fromkeys(p for module in several for p in module.parameters(recurse=False)):
            misspelt.setdefault(frozenset(_asked(p).items()), []).append(p)
        for weights in misspelt.values():
            yield from self._unread(weights, weights[0])

    def _unread(self, weights, owner, of=""):
        for name, asked in _asked(owner).items():
            wrong = weights and all(p.requires_grad != asked for p in weights)
            if wrong and not _reads(type(owner), name):
                names = few([*map(self.names.of, weights[:4]), *weights[4:]], 4)
                yield (
                    f"{names}: {name} = {asked} {of}is an attribute that PyTorch does not read; "
                    f"theirs is {not asked}: use requires_grad_({asked})"
                )


def _reads(kind, name):
    """Whether the source of a class reads an attribute of this name."""
    try:
        code = inspect.getsource(kind)
    except (OSError, TypeError):
        return False
    return bool(re.search(rf"self\.{name}\b(?!\s*(=(?!=)|:))", code))


def _asked(owner):
    """{attribute: True or False} of a module or a parameter that look like requires_grad."""
    known = vars(owner).items()
    return {name: x for name, x in known if REQUIRES.fullmatch(name) and x in (True, False)}
