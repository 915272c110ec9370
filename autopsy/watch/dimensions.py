"""
Dimensions: which dimension of a result is which of what was given?

Products of two tensors in the letters of einsum, and views by the strides that they have without
numbers.
"""

import re

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


def product_of(name, args):
    """(a, b, letters of a, of b, of the result) as einsum names them; or None."""
    if name == "einsum":
        return _of_einsum(*args)
    if name == "baddbmm":
        return _of_matmul(*args[1:3])
    if name in ("matmul", "__matmul__", "bmm"):
        return _of_matmul(*args[:2])
    return None


def _of_einsum(equation, *tensors):
    equation = equation.replace(" ", "")
    parts = re.split(",|->", equation)
    if len(tensors) == 1:
        tensors = tensors[0]  # a list of them
    if len(parts) != 3 or not parts[2] or len(tensors) != 2:
        return None

    given = zip(tensors, parts[:2], strict=True)
    dots = max(t.dim() - len(part.replace("...", "")) for t, part in given)
    letters = [_letters(part, dots) for part in parts]
    fits = [t.dim() for t in tensors] == [len(part) for part in letters[:2]]
    return (*tensors, *letters) if fits else None


def _of_matmul(a, b):
    if min(a.dim(), b.dim()) < 2:
        return None
    n = max(a.dim(), b.dim()) - 2
    batch = [*map(str, range(n))]
    of_a = batch[n + 2 - a.dim() :]
    of_b = batch[n + 2 - b.dim() :]
    return a, b, [*of_a, "i", "j"], [*of_b, "j", "k"], [*batch, "i", "k"]


def _letters(equation, n):
    """Of one operand; three dots are n dimensions."""
    before, dots, after = equation.partition("...")
    return [*before, *(map(str, range(n)) if dots else ()), *after]
