"""
Loads: does load_state_dict() of a module bring what it should?

With strict=False it may pass over every name. And state_dict() gives the tensors of the module
itself: the best state, if it was not copied, is the last one.

And what was loaded may be lost before it is used: told is a load all of whose matrices the script
overwrites (init_weights() after it) before the module is called.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary, WeakSet

import torch

from ...frames import line_now
from ...tensors import storage_of
from ...watch.deferred import params_of
from ...watch.events import Events

FILLS = ("normal_", "uniform_", "fill_", "zero_", "kaiming_uniform_", "kaiming_normal_",
         "trunc_normal_", "orthogonal_", "eye_")  # fmt: skip


@dataclass(eq=False)
class Unused:
    """A load of a module that was not called yet."""

    line: str
    matrices: int
    left: int  # of them, that nothing has overwritten


class Loads(Events):
    """What load_state_dict() did to the modules of a script."""

    def __init__(self, watch):
        self.recorder = watch.recorder
        self.tried = WeakKeyDictionary()  # module: lines that have loaded nothing into it
        self.unloaded = {}  # line: what is wrong with a load that has loaded nothing
        self.optimizers = WeakSet()  # that have made steps
        self.unused = {}  # id of a storage that was loaded and not called yet: (Unused, it)
        self.overwritten = {}  # Unused of which something was overwritten: the line that did

    def stepped(self, optimizer):
        self.optimizers.add(optimizer)

    def wrote(self, line, weights, name, given):
        """Into weights that were loaded, and not called yet?"""
        for p in weights if name in FILLS else ():
            load, storage = self.unused.pop(id(storage_of(p)), (None, None))
            if storage is storage_of(p):
                load.left -= 1
                self.overwritten[load] = line

    def called(self, module, tensors):
        self.unused.clear()

    def evaluated(self, module):
        self.unused.clear()

    def loaded(self, module, state, answer):
        where = line_now(), type(module).__name__
        matrices = {id(storage_of(p)): storage_of(p) for p in module.parameters() if p.dim() > 1}
        load = Unused(where[0], len(matrices), len(matrices))
        self.unused.update((key, (load, storage)) for key, storage in matrices.items())
        missing = getattr(answer, "missing_keys", ())
        others = getattr(answer, "unexpected_keys", ())
        if missing and len(others) >= len(state) > 0:
            self.unloaded[where[0]] = (
                f"has loaded none of {len(state)} tensors: they have names like {others[0]}, "
                f"and those of {where[1]} are like {missing[0]}"
            )
            self.tried.setdefault(module, []).append(where[0])
        else:  # of several names the right ones were found
            for line in (where[0], *self.tried.pop(module, ())):
                self.unloaded.pop(line, None)
        if _is_its_own(module, state) and self._is_older(state) and self._trains(module):
            self.unloaded[where[0]] = (
                f"has changed nothing: it was given the tensors of {where[1]} itself, which steps "
                "have moved since then (state_dict() makes no copy): keep "
                "copy.deepcopy(net.state_dict())"
            )

    def _trains(self, module):
        trained = {storage_of(p) for optimizer in self.optimizers for p in params_of(optimizer)}
        return any(storage_of(p) in trained for p in module.parameters())

    def _is_older(self, state):
        """Whether a step was made since state_dict() has given it."""
        made = [self.recorder.known.get(t) for t in state.values() if isinstance(t, torch.Tensor)]
        return all(m and m.number < self.recorder.latest for m in made)

    def sentences(self):
        for line, what in self.unloaded.items():
            yield f"load_state_dict() at {line} {what}"
        for load, line in self.overwritten.items():
            if load.matrices > 1 and not load.left:
                yield (
                    f"all {load.matrices} matrices that load_state_dict() at {load.line} has "
                    f"brought were overwritten at {line} before any call: load after that"
                )


def _is_its_own(module, state):
    """Whether each tensor of a state lies in the memory of the module's tensor of this name."""
    mine = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    pairs = [(t, mine[n]) for n, t in state.items() if n in mine and isinstance(t, torch.Tensor)]
    return bool(pairs) and all(storage_of(t) is storage_of(p) for t, p in pairs)
