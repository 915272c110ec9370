"""
Following: a mode of torch that looks at each call after it was made.
"""

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .interrupts import no_evidence

LOSSES = ("cross_entropy", "kl_div", "binary_cross_entropy", "binary_cross_entropy_with_logits")
DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout,
            F.feature_alpha_dropout)  # fmt: skip


class Follower(TorchFunctionMode):
    """Calls function_called(func, name, args, kwargs, out) after each function. What raises there
    is no evidence, and no error of the script."""

    def function_called(self, func, name, args, kwargs, out):
        """name: of the function, as Python has it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        with no_evidence, torch._C.DisableTorchFunction():
            self.function_called(func, getattr(func, "__name__", ""), args, kwargs, out)
        return out


def is_loss(func, name):
    """Whether it is a loss of torch.nn.functional."""
    is_functional = getattr(func, "__module__", "") == F.__name__
    return is_functional and (name in LOSSES or name.endswith("_loss"))


def drops(func, kwargs):
    """Whether it is a dropout that drops now: torch's modules give all by name."""
    return func in DROPOUTS and bool(kwargs.get("training") and kwargs.get("p"))


def drops_attention(name, args, kwargs):
    """Whether it is an attention, of torch.nn.functional, that drops now."""
    if name == "scaled_dot_product_attention":
        return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p"))
    if name == "multi_head_attention_forward":
        return bool(args[10] and kwargs.get("training", True))
    return False
