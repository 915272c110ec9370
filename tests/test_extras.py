"""Muon and EMA: what they refuse; stacks and shards beside the same matrices, whole."""

import math
from itertools import pairwise

import pytest
import torch
from helpers import ranks_agree
from torch import nn

from extras.ema import EMA
from extras.muon import Muon


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lr", math.nan),
        ("lr", -1.0),
        ("lr", math.inf),
        ("lr", torch.ones(2)),
        ("momentum", 5),
        ("momentum", -0.1),
        ("momentum", math.nan),
        ("momentum", 1.0),
        ("ns_steps", -1),
        ("ns_steps", 0),
        ("ns_steps", 100),
    ],
)
def test_an_option_that_would_spoil_the_matrices_is_refused_in_one_sentence(option, value):
    matrix = nn.Parameter(torch.ones(2, 2))
    for group in ([matrix], [{"params": [matrix], option: value}]):
        with pytest.raises(ValueError, match=f"^(Tensor )?{option} must be [^\n]+$"):
            Muon(group, **{option: value} if group == [matrix] else {})
    Muon([matrix], lr=0.0, momentum=0.0, ns_steps=1)
    Muon([matrix], lr=torch.tensor(1e-2))


def test_a_stack_is_turned_as_its_matrices_are():
    whole = nn.Parameter(torch.randn(3, 4, 6))
    single = [nn.Parameter(matrix.clone()) for matrix in whole.detach()]
    stacked, apart = Muon([whole], stacked=True), Muon(single)
    for step in range(3):
        grad = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(step))
        whole.grad = grad
        for p, g in zip(single, grad, strict=True):
            p.grad = g
        stacked.step(), apart.step()
    assert torch.equal(whole, torch.stack(single))
    with pytest.raises(ValueError, match="no stack of matrices"):
        Muon(single, stacked=True)


def test_a_state_that_knows_no_stacks_leaves_a_groups_own_choice():
    def start():
        params = [nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(3, 4, 6))]
        optimizer = Muon([{"params": params[:1]}, {"params": params[1:], "stacked": True}])
        for p in params:
            p.grad = torch.arange(float(p.numel())).view_as(p)
        return params, optimizer

    (params, straight), (others, resumed) = start(), start()
    state = resumed.state_dict()
    for group in state["param_groups"]:
        del group["stacked"]
        group["lr"] = 0.5
    resumed.load_state_dict(state)
    for group in straight.param_groups:
        group["lr"] = 0.5
    straight.step(), resumed.step()
    assert all(map(torch.equal, params, others))


def test_an_average_refuses_what_it_could_not_average():
    net = nn.Linear(3, 2)
    for decay in (math.nan, -1, 1.5):
        with pytest.raises(ValueError, match=r"decay must be in 0 \.\. 1"):
            EMA(net.parameters(), decay)
    used_up = net.parameters()
    ema = EMA(used_up)
    for call in (
        lambda: EMA(used_up),
        lambda: ema.update(used_up, 0.0),
        lambda: ema.swap(used_up).__enter__(),
        lambda: ema.distance([net.weight]),
    ):
        with pytest.raises(ValueError, match="used up after one pass"):
            call()
    assert ema.updates == 0


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float64])
def test_complex_numbers_keep_their_imaginary_part_and_a_verdict_may_be_a_number(dtype):
    p = torch.zeros(2, dtype=dtype)
    ema, twin = EMA([p], 0.5), EMA([p], 0.5)
    p += 3 + 4j if dtype.is_complex else 5
    ema.update([p], 0.0), twin.update([p], torch.zeros(()))
    ema.update([p * math.nan], 1.0), twin.update([p], True)
    assert torch.equal(ema.average[0], twin.average[0]) and ema.updates == 1
    torch.testing.assert_close(ema.average[0].to(dtype), 0.9 * p)  # of 1 / 10, the first decay
    with ema.swap([p]):
        torch.testing.assert_close(p, ema.average[0].to(dtype))


def test_the_distance_shows_an_average_that_runs_away_or_does_not_move():
    p, moving = torch.ones(4), torch.ones(4)
    ema, stuck = EMA([p], 0.9), EMA([moving], 1.0)
    away, seen = EMA([p], 0.9), []
    for _ in range(40):
        ema.update([p], 0.0)
        away.average[0] += 0.3 * (away.average[0] - 0.99 * p)  # the sign is wrong
        moving *= 1.1
        stuck.updates.zero_()  # it begins anew each time
        seen.append(float(away.distance([p])))
    assert ema.distance([p]) == 0 and seen[-1] > 1 and all(a < b for a, b in pairwise(seen))
    assert 0.5 < stuck.distance([moving]) < 1


SHARDS = """
import os
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh
from extras.ema import EMA
from extras.muon import Muon

def build(sharded, dtype):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1))  # rank 1 has none of the last
    net.experts = nn.Parameter(torch.randn(3, 5, 4))
    net.to(dtype)
    if sharded:
        fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    masters = None if dtype is torch.float32 else True
    groups = [{"params": [net[0].weight, net[2].weight]},
              {"params": [net.experts], "stacked": True}]
    return net, Muon(groups, lr=1e-2, masters=masters), EMA(net.parameters(), 0.9)

def train(net, muon, ema, steps):
    for step in steps:
        x = torch.randn(8, 7, generator=torch.Generator().manual_seed(step)).to(net.experts.dtype)
        (net(x).square().mean() + (x[:, :5] @ whole(net.experts).sum(0)).square().mean()).backward()
        muon.found_inf = torch.tensor(float(step == 2))
        muon.step()
        ema.update(net.parameters(), float(step == 2))
        muon.zero_grad()
        net.zero_grad()

def whole(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t

def numbers(net, muon, ema):
    momenta = [muon.state[p]["momentum_buffer"] for g in muon.param_groups for p in g["params"]]
    return [whole(t.detach()) for t in (*net.parameters(), *momenta, *ema.average)]

for dtype in (torch.float32, torch.bfloat16):
    plain, shards = build(False, dtype), build(True, dtype)
    for run in (plain, shards):
        train(*run, range(4))
    again = build(True, dtype)
    again[0].load_state_dict(shards[0].state_dict())
    again[1].load_state_dict(shards[1].state_dict())
    again[2].load_state_dict(shards[2].state_dict())
    train(*shards, range(4, 6)); train(*again, range(4, 6)); train(*plain, range(4, 6))
    for a, b, c in zip(numbers(*plain), numbers(*shards), numbers(*again), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-2, atol=1e-3 if dtype is torch.bfloat16 else 1e-5)
        assert torch.equal(b, c)
print("agreed", flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_shards_are_turned_and_averaged_as_whole_matrices_are(tmp_path):
    ranks_agree(tmp_path, SHARDS)
