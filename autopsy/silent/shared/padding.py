"""
Padding: which value are ids padded with, and where?

Ids are padded if one value stands in runs at the ends of rows (or at all beginnings), of different
lengths, and nowhere else. padded_labels.py and wrong_side.py ask for it.
"""

from typing import NamedTuple

import torch

from ...tensors import PLAIN

ROWS, VALUES = 4, 8  # of ids, at least


class Padding(NamedTuple):
    """What ids are padded with."""

    value: int
    side: str
    at: torch.Tensor  # True there


def padding_of(ids):
    """One value that stands at the ends of rows only, or at their beginnings; or None."""
    if ids.dim() != 2 or len(ids) < ROWS or type(ids) not in PLAIN:
        return None
    for side, turned in (("end", ids.flip(1)), ("begin", ids)):
        value = turned[:, 0].mode().values
        same = turned == value
        runs = same.long().cumprod(1).sum(1)
        lengths = runs[runs > 0].unique()
        if runs.sum() != same.sum() or len(lengths) < 2 or lengths[-1] < 2:
            continue
        moves = turned.diff().masked_fill(same[:, 1:] | same[:, :-1], 0)
        mixed = (moves > 0).any(1) & (moves < 0).any(1)  # else they count: segments, positions
        if len(ids.unique()) > VALUES and 2 * mixed.sum() > len(ids):
            return Padding(int(value), side, ids == value)
    return None
