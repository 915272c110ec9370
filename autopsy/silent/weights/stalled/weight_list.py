"""
Weight list: which weights does a script have, and what does it call them?

What parameters() lists, and what it does not: modules and tensors in plain lists and dicts, plain
tensors that need a gradient, weights of which a module holds only what was made of them.
"""

from weakref import ref

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ....step import attributes_of
from ...shared.graph_ends import leaves
from .weight_history import WeightHistory

MAX_OPERATIONS = 8  # between such a tensor and its parameter


class WeightList(WeakIdKeyDictionary):
    """{parameter: WeightHistory}, in the order of the forward."""

    def of(self, p):
        return self.setdefault(p, WeightHistory(p))

    def add(self, p, name, module, unlisted):
        """The first name that is found for a weight stays. unlisted: why no parameters() has it."""
        w = self.of(p)
        if not w.module:
            w.name, w.module, w.unlisted = name, ref(module), unlisted

    def add_all(self, root, prefix="", unlisted="", private=False):
        """All under this module. private: also of lists whose name begins with _."""
        for path, module in root.named_modules(prefix=prefix):
            for name, p in module.named_parameters(path, recurse=False):
                self.add(p, name, module, unlisted)
            for name, value in attributes_of(module).items():
                own = f"{path}.{name}".lstrip(".")
                if name[0] == "_" and not private:
                    continue  # hidden on purpose: a frozen network, say
                if type(value) in (list, tuple):
                    self._add_plain(root, module, own, [*enumerate(value)], "List")
                elif type(value) is dict:
                    self._add_plain(root, module, own, [*value.items()], "Dict")
                elif isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf:
                    self.add(value, own, module, "plain tensors are no parameters: nn.Parameter")

    def _add_plain(self, root, module, path, items, kind):
        """What a module keeps in a plain list, tuple or dict."""
        if kind == "List" and len(items) == 1 and isinstance(items[0][1], nn.Module):
            return  # hidden on purpose
        where = f"they lie in a plain Python {kind.lower()}: use nn."
        for k, x in items:
            if isinstance(x, nn.Module) and x is not root:
                self.add_all(x, f"{path}.{k}", f"{where}Module{kind}")
            elif isinstance(x, nn.Parameter):
                self.add(x, f"{path}.{k}", module, f"{where}Parameter{kind}")

    def add_hidden(self, root):
        """Those of which a module holds only what was made of them."""
        for path, module in root.named_modules():
            for name, value in attributes_of(module).items():
                if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                    for p in leaves([value], MAX_OPERATIONS):
                        why = "what their module holds was made of an nn.Parameter, and is none: "
                        why += "make nn.Parameter the last step"
                        self.add(p, f"{path}.{name}".lstrip("."), module, why)
