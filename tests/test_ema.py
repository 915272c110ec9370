"""The average beside its closed form; NaN weights behind a rejected step."""

import copy
import math

import pytest
import torch
from helpers import same, snapshot
from torch import nn

from extras.ema import EMA


def test_the_average_has_its_closed_form_and_survives_nan_weights():
    p = torch.zeros(3)
    ema = EMA((t for t in [p]), decay=0.5)  # a generator, as net.parameters() is
    wanted = torch.zeros(3)
    accepted = torch.zeros(())
    for i in range(10):
        p += 1
        ema.update([p], accepted)
        decay = min(0.5, (1 + i) / (10 + i))
        wanted = decay * wanted + (1 - decay) * p
    torch.testing.assert_close(ema.average[0], wanted)

    before = snapshot(ema)
    rejected = torch.ones(())
    ema.update((t for t in [p * math.nan]), rejected)
    assert same(before, snapshot(ema))
    assert ema.updates == 10

    state = ema.state_dict()
    other = EMA([torch.ones(3)])
    other.load_state_dict(copy.deepcopy(state))
    assert same(before, snapshot(other))

    stranger = EMA([torch.ones(4)])
    with pytest.raises(ValueError, match="other parameters"):
        stranger.load_state_dict(state)


def test_half_weights_hold_the_average_inside_swap_and_their_own_bits_after_an_error():
    net = nn.Linear(3, 1).half()
    ema = EMA(net.parameters())
    ema.average[0] += 1
    old = snapshot(net)

    with pytest.raises(RuntimeError, match="planted"), ema.swap(net.parameters()):
        assert torch.equal(net.weight, ema.average[0].half())
        raise RuntimeError("planted")

    assert same(old, snapshot(net))
