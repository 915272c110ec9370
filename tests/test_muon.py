"""Muon beside torch's; a rejected step; a resumed run; what it costs."""

import copy
import math

import pytest
import torch
from helpers import Operations, same, snapshot
from torch import nn

from extras.muon import Muon, matrices

SHAPES = [(64, 32), (8, 12, 3, 3), (64, 32), (16, 48)]


def build(dtype=torch.float32, **options):
    g = torch.Generator().manual_seed(0)
    weights = [torch.randn(s, generator=g).to(dtype) for s in SHAPES]
    weights[1] = weights[1].to(memory_format=torch.channels_last)  # its gradients are not
    params = [w.requires_grad_() for w in weights]
    return params, Muon(params, 1e-3, momentum=0.6, masters=True, **options)


def set_grads(params, seed, scale=1.0):
    g = torch.Generator().manual_seed(1000 + seed)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=g) * scale).to(p.dtype)


def test_each_matrix_is_turned_towards_torchs_direction_and_keeps_its_norm():
    params, optimizer = build(ns_steps=5)
    directions = [torch.zeros(p.flatten(1).shape) for p in params]
    torchs = torch.optim.Muon(directions, lr=1.0, momentum=0.6, weight_decay=0.0)
    norms = [p.detach().norm() for p in params]
    for i in range(20):
        before = snapshot(params)[0]
        scale = 1024.0 if i % 2 else 2.0  # a scale that never changes would turn nothing
        set_grads(params, i, scale)
        for d, p in zip(directions, params, strict=True):
            d.zero_().grad = p.grad.flatten(1) / scale
        optimizer.grad_scale = torch.tensor(scale)
        optimizer.step()
        torchs.step()
        for p, old, d, norm in zip(params, before, directions, norms, strict=True):
            rate = 1e-2 * norm / math.sqrt(len(d))
            moved = old + rate * d.view(p.shape)
            wanted = moved * norm / moved.norm()
            # A rounding of the direction to bf16 is up to 2e-4 of a weight, a turn about 2e-2.
            torch.testing.assert_close(p.detach(), wanted, rtol=1e-4, atol=5e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rejected_steps_leave_no_trace_and_a_resumed_run_is_bit_identical(dtype):
    straight, first = build(dtype)
    other, second = build(dtype)
    for i in range(6):
        before = snapshot(other, second)
        set_grads(other, i, math.nan)
        second.found_inf = torch.ones(())
        second.step()
        if i:
            assert same(before, snapshot(other, second))
        if i == 3:
            weights, state = snapshot(other, second)
            other, second = build(dtype)
            torch._foreach_copy_([p.detach() for p in other], weights)
            second.load_state_dict(state)
            other, second = copy.deepcopy((other, second))
        second.found_inf = torch.zeros(())
        for params, optimizer in ((straight, first), (other, second)):
            set_grads(params, i)
            optimizer.step()
    assert same(snapshot(straight), snapshot(other))
    for p, q in zip(straight, other, strict=True):
        assert same(first.state[p], second.state[q])
    if dtype is torch.bfloat16:
        assert all(torch.equal(p, m.bfloat16()) for p, m in second.masters.items())
        assert second.state[other[0]]["momentum_buffer"].dtype is torch.float32


class Listed(nn.Linear):
    def no_weight_decay(self):
        return {"weight"}


def test_what_it_gets_and_what_it_refuses():
    net = nn.Sequential(
        nn.Linear(4, 4),
        nn.Linear(4, 4),
        nn.Linear(4, 4),
        nn.Embedding(4, 4),
        nn.LayerNorm((4, 4)),
        Listed(4, 4),
    )
    nn.init.zeros_(net[1].weight)
    net[2].requires_grad_(False)
    assert matrices(net, ["[0-9].*"]) == [net[0].weight]
    assert matrices(net, ["0"]) == []
    for p in (net[1].weight, net[0].bias):
        with pytest.raises(ValueError, match="leave it to AdamW"):
            Muon([nn.Parameter(torch.ones(2, 2))]).add_param_group({"params": [p]})
    with pytest.raises(ValueError, match="masters=True"):
        Muon(net[0].half().parameters())


def test_many_filters_of_one_shape_cost_as_many_operations_as_two_and_none_is_copied():
    counts = []
    for number in (2, 20):
        params = [torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last).requires_grad_()
                  for _ in range(number)]
        optimizer = Muon(params, ns_steps=3)
        optimizer.found_inf = torch.zeros(())
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
        with Operations() as seen:
            optimizer.step()
        counts.append(seen.count)
    assert counts[0] == counts[1] <= 40
