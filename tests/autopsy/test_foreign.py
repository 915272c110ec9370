"""Loops in the manner of public projects, guarded: a clean run keeps its bits, no fault gets in."""

import gc
import math
import os
from functools import partial

import pytest
import torch
from helpers import run_ranks, same, script, snapshot
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.nn import functional as F

from amp_policy import LossScaler
from extras.muon import Muon
from guards import Guard
from optim import ClippedAdamW

SGD = torch.optim.SGD


def matrices(net, optimizer):
    """`optimizer` for the matrices, SGD for the rest: what Muon is given everywhere."""
    whole = [p for p in net.parameters() if p.ndim > 1]
    rest = [p for p in net.parameters() if p.ndim < 2]
    return [optimizer(whole), SGD(rest, lr=0.05, momentum=0.9)]


def of_torch(name, **options):
    return lambda net: [getattr(torch.optim, name)(net.parameters(), **options)]


OPTIMIZERS = {
    **{
        name: of_torch(name)
        for name in (
            "AdamW",
            "Adam",
            "Adagrad",
            "Adamax",
            "NAdam",
            "RAdam",
            "Rprop",
            "ASGD",
            "Adadelta",
            "RMSprop",
        )
    },
    "SGD": of_torch("SGD", lr=0.05, momentum=0.9, nesterov=True),
    **{f"fused {name}": of_torch(name, fused=True) for name in ("AdamW", "Adam", "Adagrad")},
    "fused SGD": of_torch("SGD", lr=0.05, momentum=0.9, fused=True),
    "fused SGD without momentum": of_torch("SGD", lr=0.05, fused=True),
    "torch's Muon": lambda net: matrices(net, torch.optim.Muon),
    "our Muon": lambda net: matrices(net, Muon),
    "ClippedAdamW": lambda net: [ClippedAdamW(net.parameters(), clip=None)],
}
ON_DEVICE = [name for name in OPTIMIZERS if "fused" in name or "Clipped" in name]
FAULTS = ("input", "label", "loss", "grad", "buffer")


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(48, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10)
    )


def state_of(net, optimizers):
    """All that training changes. Zeros made by a skipped first step are no trace."""
    moments = []
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for name, value in state.items():
                if torch.as_tensor(value).count_nonzero():
                    moments.append((name, value))
    return snapshot(net.state_dict(), moments)


def batch_of(step, rank, planted):
    """Images and labels, other ones in each step of each rank; one of them may be bad."""
    g = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(8, 3, 4, 4, generator=g)
    y = torch.randint(0, 10, (8,), generator=g)
    if planted == "input":
        x.view(-1)[3] = math.nan
    if planted == "label":
        y[0] = 10_000
    return x, y


def classify(make, guarded, fault="", at=2, scaler=None, clip=1e9, by_hand=False, rank=None):
    """The plain loop of pytorch/examples, with one fault in one step.

    by_hand: it opens each step and unscales. Returns its end, and (verdict, moved) of each step.
    """
    net = network()
    ranks = partial(nn.parallel.DistributedDataParallel, broadcast_buffers=False)
    model = net if rank is None else ranks(net)
    optimizers = make(net)
    guard = Guard([net[:2], net[2:]], num_classes=10, lag=False)
    history = []
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)

    for step in range(5):
        planted = fault if step == at else ""
        before = state_of(net, optimizers)
        x, y = batch_of(step, rank or 0, planted)
        if guarded and by_hand:
            guard.open()
        if guarded:
            y = guard.see_batch(x, y)
        factor = math.inf if planted == "loss" else 1.0
        loss = F.cross_entropy(model(x), y) * factor
        net.zero_grad()
        scaler.scale(loss).backward()
        if planted == "grad":
            net[1].weight.grad[0, 0] = math.inf
        if planted == "buffer":
            net[2].running_mean[0] = math.inf
        for o in optimizers if by_hand or not guarded else ():
            scaler.unscale_(o)
        if guarded:
            guard.see_loss(loss)
            guard.step(optimizers, scaler, clip=clip)
            verdict = guard.verdict()
            moved = not same(before, state_of(net, optimizers))
            history.append((verdict, moved))
        else:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
            for o in optimizers:
                scaler.step(o)
        scaler.update()
    return state_of(net, optimizers), history


def kept_out(history, reason, at=2):
    """The step of the fault is named and left no trace; all others moved."""
    for step, (verdict, moved) in enumerate(history):
        assert verdict.accepted is moved is (step != at), (step, verdict)
        assert (reason in verdict.reasons) == (step == at), verdict


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_clean_run_keeps_its_bits_and_no_fault_gets_in_under_any_optimizer(name):
    make = OPTIMIZERS[name]

    guarded, history = classify(make, True)
    bare, _ = classify(make, False)
    assert same(bare, guarded)
    assert all(verdict.accepted and moved for verdict, moved in history)

    for at in (0, 2):
        for fault in FAULTS:
            _, history = classify(make, True, fault, at)
            kept_out(history, fault, at)


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("kind", [torch.amp.GradScaler, LossScaler])
@pytest.mark.parametrize("name", ["AdamW", "fused AdamW", "fused SGD", "torch's Muon", "our Muon"])
def test_a_scaler_hears_the_verdict_and_a_clean_run_keeps_its_bits(name, kind, by_hand):
    make = OPTIMIZERS[name]
    of_bare = kind("cpu", init_scale=1024.0)
    of_guarded = kind("cpu", init_scale=1024.0)
    bare, _ = classify(make, False, scaler=of_bare)
    guarded, _ = classify(make, True, scaler=of_guarded, by_hand=by_hand)
    assert same(bare, guarded)
    assert of_bare.state_dict() == of_guarded.state_dict()

    for fault in FAULTS:  # the scaler sees "grad" alone by itself
        scaler = kind("cpu", init_scale=1024.0)
        _, history = classify(make, True, fault, scaler=scaler, by_hand=by_hand)
        kept_out(history, fault)
        assert scaler.get_scale() == 512.0


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("name", ["AdamW", "fused AdamW", "ClippedAdamW"])
def test_clipping_is_that_of_torch(name, scaled):
    scalers = [torch.amp.GradScaler("cpu", 64.0, enabled=scaled) for _ in range(2)]
    bare, _ = classify(OPTIMIZERS["AdamW"], False, scaler=scalers[0], clip=0.1)
    guarded, history = classify(OPTIMIZERS[name], True, scaler=scalers[1], clip=0.1)

    assert all(verdict.stats["grad_norm"] > 0.2 for verdict, _ in history)
    weights, _ = guarded
    wanted, _ = bare
    for key in ("1.weight", "4.weight", "4.bias"):  # the gradient of 1.bias is 0 but for rounding
        torch.testing.assert_close(weights[key], wanted[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ON_DEVICE)
def test_an_optimizer_that_skips_by_itself_is_not_waited_for(name, monkeypatch):
    reads = []
    plain = torch.Tensor.__bool__
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda t: reads.append(t) or plain(t))
    net = network()
    optimizers = OPTIMIZERS[name](net)
    guard = Guard(net)

    for _ in range(4):
        net(torch.randn(8, 48)).square().mean().backward()
        reads.clear()
        guard.step(optimizers)
    assert bool(reads) is (name == "fused SGD without momentum")  # it never has state

    for optimizer in optimizers:
        optimizer.param_groups[0]["fused"] = False  # as an older checkpoint brings it
    guard.step(optimizers)


# --- Gradients of every kind


def test_gradients_of_every_kind_are_measured_as_a_whole(one_rank):
    def shards(value):
        whole = torch.full((4, 2), value)
        return distribute_tensor(whole, init_device_mesh("cpu", (1,)), [Shard(0)])

    table = nn.Embedding(5, 3, sparse=True)
    turn = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    half = nn.Parameter(torch.ones(60).half())
    sharded = nn.Parameter(shards(1.0))
    unused = nn.Parameter(torch.ones(2))  # it has no gradient
    others = [turn, half, sharded, unused]
    rows = table(torch.tensor([1, 1, 2]))
    (1e5 * rows * turn).abs().sum().backward()
    half.grad = torch.full_like(half, 20000)  # the norm is 154919
    sharded.grad = shards(3e4)

    guard = Guard(nn.ParameterList([table.weight, *others]), lag=False)
    guard.step([torch.optim.SparseAdam(table.parameters()), SGD(others)])

    parts = (
        table.weight.grad.to_dense(),
        torch.view_as_real(turn.grad),
        half.grad,
        sharded.grad.full_tensor(),
    )
    norm = torch.cat([part.double().flatten() for part in parts]).norm().item()
    assert guard.verdict().stats["grad_norm"] == pytest.approx(norm, rel=1e-6)


# --- Two ranks: each fault on one rank only, a gradient even after the all-reduce


def two_ranks():
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    out = {}
    for name in ("AdamW", "fused AdamW", "ClippedAdamW"):
        for fault in FAULTS:
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
            here = fault if rank else ""
            end, history = classify(OPTIMIZERS[name], True, here, scaler=scaler, rank=rank)
            kept_out(history, fault)
            verdict, _ = history[2]
            assert verdict.rank == 1
            assert scaler.get_scale() == 32.0
            weights, _ = end
            out[name, fault] = {key: t for key, t in weights.items() if "running" not in key}
    torch.save(out, f"rank{rank}.pt")
    torch.distributed.barrier()
    os._exit(0)  # now and then one of gloo's threads aborts the interpreter at its exit


def test_a_fault_on_one_rank_is_rejected_on_both_and_the_replicas_stay_equal(tmp_path):
    program = script(tmp_path, "import test_foreign; test_foreign.two_ranks()")
    ended = run_ranks([program], tmp_path)
    assert [code for code, _, _ in ended] == [0, 0], ended
    of_rank_0 = torch.load(tmp_path / "rank0.pt")
    of_rank_1 = torch.load(tmp_path / "rank1.pt")
    assert same(of_rank_0, of_rank_1)


# --- Misuse is told


def small():
    net = nn.Linear(3, 2)
    return net, SGD(net.parameters(), lr=0.1)


def one_step(net, *steps):
    net(torch.ones(4, 3)).sum().backward()
    for step in steps:
        step()


@pytest.mark.filterwarnings("error")
def test_a_second_step_beside_the_guards_is_told():
    net, optimizer = small()
    guard = Guard(net)
    one_step(net, lambda: guard.step(optimizer))
    one_step(net, lambda: Guard(net).step(optimizer))  # another guard's step is none beside
    with pytest.warns(UserWarning, match="delete optimizer.step"):
        one_step(net, lambda: guard.step(optimizer), optimizer.step)


def test_a_guard_of_another_network_is_told():
    net, optimizer = small()
    another, _ = small()
    with pytest.warns(UserWarning, match="with the network that you train"):
        one_step(net, lambda: Guard(another).step(optimizer))


@pytest.mark.filterwarnings("error")
def test_a_scaler_that_is_left_out_is_told_before_the_update_unless_it_is_disabled():
    net, optimizer = small()
    off = LossScaler("cpu", enabled=False)
    scaler = LossScaler("cpu")
    gc.collect()  # scalers of other tests
    one_step(net, lambda: off.scale(net.bias.sum()), lambda: Guard(net).step(optimizer))

    before = net.weight.detach().clone()
    optimizer.zero_grad()
    loss = net(torch.ones(4, 3)).sum()
    scaler.scale(loss).backward()
    with pytest.raises(UserWarning, match=r"call guard.step\(optimizer, scaler\)"):
        Guard(net).step(optimizer)
    assert torch.equal(net.weight, before)

    Guard(net).step(optimizer, scaler)
    change = net.weight - before
    assert 0 < change.norm() < 2  # and not 65536 times that


@pytest.mark.parametrize("reads", [False, True])
def test_the_first_skip_and_ten_in_a_row_are_told_unless_verdicts_are_read(reads, recwarn):
    gc.collect()  # scalers of other tests
    net, optimizer = small()
    guard = Guard(net)
    for _ in range(14):
        one_step(net, lambda: net.weight.grad.fill_(math.nan), lambda: guard.step(optimizer))
        if reads:
            guard.verdict()

    begun = [str(w.message)[:31] for w in recwarn]
    wanted = ["step 0 was skipped, 1 in a row:", "step 9 was skipped, 10 in a row"]
    assert begun == ([] if reads else wanted)
    guard.flush()
    assert guard.skipped == 14
