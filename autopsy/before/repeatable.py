"""
Repeatable: does a function give the same results for the same input and random state?
"""

import torch
from torch import Tensor

from ..step import rng_states, set_rng_states
from ..tensors import device_of, floats_in

ITSELF = 1e-2  # of the norm of a result, by which two calls may differ


def differs_from_itself(function, args, kwargs, rng):
    """Whether two calls of it differ, by more than rounding in another order."""
    device, made = device_of(args), []
    before = rng_states(device)
    try:
        for _ in range(2):
            set_rng_states(rng, device)
            given = [a.clone() if isinstance(a, Tensor) else a for a in args]
            with torch.no_grad():
                made.append([t.double() for t in floats_in(function(*given, **kwargs))])
    except Exception:  # it cannot be called again: nothing is known of it
        return False
    finally:
        set_rng_states(before, device)
    pairs = zip(*made, strict=True)
    return any(float((a - b).norm()) > ITSELF * float(a.norm()) for a, b in pairs)
