"""Forward hooks that look for NaN and inf in the weights, inputs and output of each module, the way
of transformers' DebugUnderflowOverflow, written anew: the first module that they name.

Source: https://huggingface.co/docs/transformers/debugging
"""

import contextlib

from torch import Tensor
from torch.utils._pytree import tree_leaves

from bench.diagnosis.judge import Answer

NAME = "hooks"
RUN = "a forward hook on each module"
SAYS = ("module",)


def diagnose(build):
    step, found = build(), []

    def is_not_finite(t):
        dense = isinstance(t, Tensor) and t.is_floating_point() and not t.is_sparse
        return dense and not t.isfinite().all()

    def look(name, module, args, out):
        tensors = [*module.parameters(recurse=False), *tree_leaves((args, out))]
        if any(is_not_finite(t) for t in tensors):
            found.append(name)

    for name, module in step.net.named_modules():
        module.register_forward_hook(lambda *about, name=name: look(name, *about))
    for batch in step.batches:
        with contextlib.suppress(Exception):
            step.run(batch)
    return Answer(module=found[0] if found else None)
