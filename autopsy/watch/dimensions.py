"""
Dimensions: which dimension of a view is which of what was given? By the strides that it has without
numbers.
"""

import torch

VIEWS = ("transpose", "permute", "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze",
         "movedim", "moveaxis", "swapaxes", "swapdims", "__getitem__", "T", "mT")  # fmt: skip


def viewed(func, args, kwargs, dims):
    """The names of the dimensions of a view, by the strides that it has without numbers."""
    t = torch.empty(args[0].shape, device="meta")
    view = func(t, *args[1:], **kwargs)
    names = []
    for size, stride in zip(view.shape, view.stride(), strict=True):
        within = [
            name for name, n, step in zip(dims, t.shape, t.stride(), strict=True)
            if n > 1 and step <= stride and stride * (size - 1) < step * n
        ]  # fmt: skip
        names.append(within[0] if len(within) == 1 and size > 1 else None)
    return names
