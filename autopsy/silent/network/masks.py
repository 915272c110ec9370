"""
Masks: is a mask read by the network that it is given to?

forward(input_ids, attention_mask) may never use its mask: padding is then averaged in. A mask is an
argument, or a key of a mapping, with "mask" in its name and two kinds of values. In two steps of
training it is noted what torch's functions and custom functions are given while the network runs;
nothing is run again. A mask that the script uses itself, in its loss, is no fault. The backward
pass shows whether what it should hide reaches the loss: ids on both sides of it must. (Under a
causal network with padding at the end, or with lengths, they do not.)
"""

from weakref import WeakKeyDictionary

import torch
from torch.overrides import TorchFunctionMode

from ...modes import is_compiled
from ...tensors import few, flat_tensors, storage_of
from ...watch.calls import named_arguments
from ...watch.events import Events
from ...watch.graph import nodes_of
from ...watch.hooks import calls_through
from ...watch.interrupts import no_evidence

LOOKS = (2, 5)  # steps
ASKED = ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "__len__",
         "size", "dim", "numel")  # fmt: skip


class Masks(Events):
    """Masks that a module in training was given, and never read."""

    def __init__(self, watch):
        self.recorder = watch.recorder
        self.looks = WeakKeyDictionary()  # module: [{name of a mask: was it read?} at each look]
        self.open = []  # (module, call, {name: mask}, what was read) of this step
        self.hooks = []  # on nodes of the backward pass
        self.counts = {}  # id of a mask: does it hide nothing from the loss? On its device

    def during(self, call, args, kwargs):
        module = call.function
        if not (call.grad and module.training and self.recorder.steps in LOOKS):
            return ()
        masks = {
            str(name): t for name, t in named_arguments(module, args, kwargs)
            if "mask" in str(name) and isinstance(t, torch.Tensor) and t.dim() > 1
        }  # fmt: skip
        if not masks or is_compiled([*module.modules()]):
            return ()
        masks = {name: t for name, t in masks.items() if len(t.unique()) == 2}
        used = Used()
        self.open.append((module, call, masks, used))
        return [used, calls_through(used.custom)]

    def backward(self, losses):
        masks = [mask for _, _, masks, _ in self.open for mask in masks.values()]
        for node in nodes_of(losses) if masks else ():
            if node.name() == "EmbeddingBackward0":
                for mask in masks:
                    if mask.shape == node._saved_indices.shape:
                        self.hooks.append(node.register_prehook(self._reached(mask)))

    def _reached(self, mask):
        def note(slopes):
            with no_evidence, torch.no_grad():
                moved = (slopes[0].detach() != 0).any(-1)
                side = mask == mask.flatten()[0]
                self.counts[id(mask)] = (moved & side).any() & (moved & ~side).any()

        return note

    def passed(self):
        for hook in self.hooks:
            hook.remove()
        self.hooks = []

    def stepped(self, optimizer):
        """What else was given them in this step is known now."""
        for module, call, masks, used in self.open if self.recorder.is_complete else ():
            known = self.looks.setdefault(module, [])
            later = [other for other in self.recorder.calls if other.number > call.number]
            refs = {ref for other in later for ref in other.uses()}
            mine = {ref.number for ref in call.uses()}
            made = {ref.number for ref in refs} - mine  # labels, say, of which the mask hides some
            later += [c for c in self.recorder.calls if c.number in made and c is not call]
            refs |= {ref for other in later for ref in other.uses()}
            read = used.storages | {storage_of(t) for other in later for _, t in other.given()}
            known.append({
                name for name, t in masks.items()
                if storage_of(t) not in read and self.recorder.maker(t) not in refs
                and self.counts.get(id(t), False)
            })  # fmt: skip
        self.open, self.counts = [], {}

    def sentences(self):
        for module, looks in self.looks.items():
            if len(looks) >= len(LOOKS) and (names := sorted(set.intersection(*looks))):
                yield (
                    f"{type(module).__name__} is given {few(names)} and reads nothing of it: what "
                    "it should hide (padding, say) counts"
                )


class Used(TorchFunctionMode):
    """The storages of what functions are given."""

    def __init__(self):
        super().__init__()
        self.storages = set()

    def _note(self, args):
        with no_evidence:
            self.storages.update(map(storage_of, flat_tensors(args)))

    def custom(self, function, apply, args, kwargs):
        self._note((args, kwargs))
        return apply(*args, **kwargs)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__
        if name not in ASKED:
            self._note((args, kwargs))
        return func(*args, **(kwargs or {}))
