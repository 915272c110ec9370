"""Plant every fault, see it flagged, and see that nothing of it stays."""
import math
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode

import guards
from amp_policy import LossScaler, capabilities, choose_policy
from guards import Guard, check_state
from optim import ClippedAdamW, param_groups
from rescue.inject import KINDS, Injector, parse_inject
from rescue.probes import Probes, SpikeDetector, first_step_checks
from train import Run, train_step


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))


def data(count=2, size=8, seed=1):
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, 3, 8, 8, generator=g), torch.randint(0, 10, (size,), generator=g))
            for _ in range(count)]


def fused(net):
    optimizer = AdamW(net.parameters(), lr=1e-2, fused=True)
    optimizer.grad_scale = None
    return optimizer


def everything(net, optimizer):
    state = [t for group in optimizer.state.values() for t in group.values()]
    return [t.detach().clone() for t in (*net.state_dict().values(), *state)]


def same(before, after):
    return len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


class Losses(nn.Module):
    """The model that train.py's step calls, without metrics."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, y):
        return F.cross_entropy(self.net(x), y), {}


def record(net, lag=False, device="cpu", spec="", rank=0):
    """What train.py's step needs: two micro-batches, AdamW, no loss scale. `spec`: the faults, see inject.py."""
    model, injector = Losses(net), Injector(net, parse_inject(spec), rank)
    injector.attach(model)
    return Run(net=net, model=model, injector=injector, accum=2, device=torch.device(device),
               policy=choose_policy("fp32", capabilities(device), None, None), scaler=LossScaler(enabled=False),
               guard=Guard(net, num_classes=10, device=device, lag=lag),
               optimizer=ClippedAdamW(net.parameters(), lr=1e-2, clip=None))


def step(n, run, batch=None):
    """train.py's step, with the faults of this step planted from outside, as its loop does."""
    run.injector.begin(n, run.optimizer)
    run.guard.open(n)
    train_step(run, *run.injector.batch(*batch or data(1, 16)[0]))
    return run.guard.verdict()


REJECTED = [(where, kind) for where in ("input", "label", "act", "loss", "grad", "buffer") for kind in KINDS]


@pytest.mark.parametrize(("where", "kind"), REJECTED)
def test_a_fault_in_one_of_two_micro_batches_leaves_everything_bit_identical(where, kind):
    net = network()
    run = record(net, spec=f"{kind}:{where}@step=2")
    for n in range(2):
        assert step(n, run).accepted
    before = everything(net, run.optimizer)
    verdict = step(2, run)
    assert not verdict.accepted
    assert ("buffer" if where == "act" else where) in verdict.reasons  # BatchNorm is what an activation meets next
    assert same(before, everything(net, run.optimizer))
    assert step(3, run).accepted
    assert not same(before, everything(net, run.optimizer))
    assert check_state(net, run.optimizer.state_dict()) == []
    assert (run.guard.steps, run.guard.skipped, run.guard.skipped_in_a_row) == (4, 1, 0)


def test_the_same_steps_without_the_rejected_one_give_the_same_weights():
    nets = []
    for steps, spec in ((4, "inf:act@step=2"), (3, "")):
        net = network()
        run = record(net, lag=True, spec=spec)
        for n in range(steps):
            step(n, run)
        nets.append(everything(net, run.optimizer))
    assert same(*nets)


def test_a_gradient_fault_alone_is_called_grad():
    verdict = step(0, record(network(), spec="nan:grad:4.weight@step=0"))
    assert verdict.reasons == ("grad",)
    assert math.isnan(verdict.stats["grad_norm"])


@pytest.mark.parametrize("where", ["param", "optstate"])
@pytest.mark.parametrize("kind", KINDS)
def test_bad_state_is_named_and_a_poisoned_moment_is_kept_from_the_weights(where, kind):
    net = network()
    optimizer, guard = fused(net), Guard(net, num_classes=10, lag=False)
    assert advance(net, guard, optimizer, *data()[0]).accepted
    injector = Injector(net, parse_inject(f"{kind}:{where}@step=1"))
    planted = injector.begin(1, optimizer)
    assert len(planted) == 1
    named = check_state(net, optimizer.state_dict())
    assert len(named) == 1
    assert named[0].split(" ")[0] == {"param": "param", "optstate": "optimizer"}[where]
    if where == "param":
        assert named == [f"param {planted[0]}"]
    weights = [p.detach().clone() for p in net.parameters()]
    guard.open(1)
    F.cross_entropy(net(data()[0][0]), data()[0][1]).backward()
    guard.see_state(param=dict(net.named_parameters()), optstate=optimizer.state_dict())
    bad = guard.decide()
    optimizer.found_inf = bad
    optimizer.step()
    guard.close(bad)
    assert where in guard.verdict().reasons
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(weights, net.parameters(), strict=True))


def test_check_state_looks_into_the_ema_and_finds_nothing_in_good_state():
    net = network()
    assert check_state(net, fused(net).state_dict(), network(3)) == []
    ema = network(3)
    ema[1].running_var[2] = math.inf
    assert check_state(net, None, ema) == ["ema 1.running_var"]


@pytest.mark.parametrize("dtype", guards.CHECKED)
def test_a_magnitude_is_beyond_the_limit_where_a_number_is_not_finite_in_every_dtype(dtype):
    x = torch.linspace(-3, 3, 1000).to(dtype)
    assert guards.magnitude(x) == x.double().abs().max()
    assert guards.magnitude(torch.full((3,), 65504.0, dtype=dtype)) <= guards.LIMIT
    for position in (0, 517, 999):
        for value in (math.nan, math.inf, -math.inf):
            y = x.clone()
            y[position] = value
            assert not guards.magnitude(y) <= guards.LIMIT
            assert not float(guards.largest([x, y])[1]) <= guards.LIMIT
    assert float(guards.largest([x])[0]) == float(x.double().abs().max())


def test_a_label_out_of_range_is_made_safe_and_ignored_labels_are_not_touched():
    guard = Guard(network(), num_classes=10, lag=False)
    guard.open(0)
    y = torch.tensor([3, -100, 9, 0])
    assert torch.equal(guard.see_batch(torch.ones(4), y), y)
    assert guard.decide() == 0
    guard.close(False)
    guard.open(1)
    assert guard.see_batch(torch.ones(4), torch.tensor([3, 10, -1, -100])).tolist() == [3, 0, 0, -100]
    assert guard.decide() == 1
    guard.close(True)
    assert guard.verdict().reasons == ("label",)
    guard.open(2)
    images = {"pixels": torch.zeros(2, 3, dtype=torch.uint8), "mask": torch.tensor([0.0, math.nan])}
    soft = torch.rand(2, 10)
    assert torch.equal(guard.see_batch(images, soft), soft)
    assert guard.decide() == 1


def test_the_verdict_comes_one_step_late_and_flush_brings_the_last():
    run = record(network(), lag=True, spec="nan:loss@step=1..2")
    told, guard = [step(n, run) for n in range(4)], run.guard
    assert told[0] is None
    assert [(v.step, v.accepted) for v in told[1:]] == [(0, True), (1, False), (2, False)]
    assert guard.skipped_in_a_row == 2
    last = guard.flush()
    assert (last.step, last.accepted, guard.skipped_in_a_row, guard.steps) == (3, True, 0, 4)
    assert guard.flush() is None


def test_verdicts_that_nobody_asks_for_are_counted_all_the_same():
    guard = Guard(network(), num_classes=10)
    for n in range(20):
        guard.open(n)
        guard.close(torch.tensor(float(n % 4 == 0)), loss=torch.tensor(float(n)))
    guard.flush()
    assert (guard.steps, guard.skipped) == (20, 5)


def test_a_signal_reaches_the_verdict_and_rejects_nothing():
    guard = Guard(network(), lag=False)
    guard.open(0)
    guard.raise_flag("signal", 15)
    assert guard.decide() == 0
    guard.close(torch.zeros(()), updates=torch.tensor(2**24 + 1), note=0.5)
    verdict = guard.verdict()
    assert (verdict.accepted, verdict.signal, verdict.reasons) == (True, 15, ())
    assert verdict.stats == {"updates": 2**24 + 1, "note": 0.5}
    guard.open(1)
    guard.raise_flag("veto", torch.tensor(1.0))
    assert guard.decide() == 1


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
        self.register_buffer("coarse", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("one", torch.ones(1).expand(5))
        self.norm = nn.BatchNorm1d(4)


def test_a_mask_of_infinities_is_lawful_and_running_statistics_never_are():
    net = Masked()
    guard = Guard(net)
    assert guard.lawful == {"mask"}
    guard.open(0)
    assert guard.decide() == 0
    assert check_state(net, lawful=guard.lawful) == []
    assert check_state(net) == ["buffer mask"]
    net.norm.running_var[0] = math.inf
    with pytest.warns(UserWarning, match=r"buffer norm.running_var was non-finite .* no finite copy exists"):
        guard = Guard(net)
    assert guard.lawful == {"mask"}
    guard.open(0)
    assert guard.decide() == 1


def advance(net, guard, optimizer, x, y):
    guard.open()
    y = guard.see_batch(x, y)
    loss = F.cross_entropy(net(x), y)
    guard.see_loss(loss)
    optimizer.zero_grad()
    loss.backward()
    guard.step(optimizer)
    return guard.verdict()


@pytest.mark.parametrize("kind", [AdamW, partial(AdamW, fused=True)])
def test_an_overflow_outside_of_a_step_is_named_and_the_last_finite_buffers_come_back(kind):
    net = network()
    optimizer, guard = kind(net.parameters()), Guard(net, num_classes=10, lag=False)
    assert advance(net, guard, optimizer, *data()[0]).accepted
    before = {name: b.clone() for name, b in net.named_buffers()}
    net(torch.full((2, 3, 8, 8), math.inf))  # a forward in train mode
    assert check_state(net) == ["buffer 1.running_mean", "buffer 1.running_var"]
    with pytest.warns(UserWarning, match=r"1\.running_mean, 1\.running_var was non-finite .* the last finite copy"):
        guard.open()
    assert all(torch.equal(b, before[name]) for name, b in net.named_buffers())
    guard.close(False)
    for _ in range(3):
        assert advance(net, guard, optimizer, *data()[0]).accepted
    net(data()[0][0])  # a finite one is left alone, without a word
    count = int(net[1].num_batches_tracked)
    assert advance(net, guard, optimizer, *data()[0]).accepted
    assert net[1].num_batches_tracked == count + 1


def test_a_backward_that_began_before_the_buffers_went_back_still_works():
    net = network()
    guard = Guard(net)
    loss = net(torch.full((2, 3, 8, 8), math.inf)).sum()
    with pytest.warns(UserWarning, match="last finite copy"):
        guard.open()
    loss.backward()
    assert torch.isfinite(net[1].running_var).all()


def test_buffers_that_no_copy_can_mend_stop_the_run_in_a_sentence_and_never_reject_for_ever():
    net = network()
    net[1].running_var[0] = math.nan
    with pytest.warns(UserWarning, match="no finite copy exists"):
        guard = Guard(net, lag=False)
    with pytest.raises(RuntimeError, match=r"1\.running_var was non-finite before the step"):
        advance(net, guard, fused(net), *data()[0])
    net.load_state_dict(network().state_dict())
    with pytest.warns(UserWarning, match="called again"):
        assert advance(net, guard, fused(net), *data()[0]).accepted

    class Own(nn.Module):  # no BatchNorm module: torch counts no version of these buffers
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(3, 2)
            self.register_buffer("mean", torch.zeros(3))
            self.register_buffer("var", torch.ones(3))

        def forward(self, x):
            return self.head(F.batch_norm(x, self.mean, self.var, training=True))

    net = Own()
    guard, told = Guard(net, lag=False), []
    net(torch.full((4, 3), math.inf))
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
    with (pytest.raises(RuntimeError, match="mean, var was non-finite before the step"),
          pytest.warns(UserWarning, match="no finite copy exists")):
        while len(told) < 9:
            told.append(advance(net, guard, torch.optim.SGD(net.parameters(), lr=0.1), x, y))
    assert [v.reasons for v in told] == [("buffer",)] * 2


def test_open_twice_is_said_and_what_was_seen_before_still_counts():
    net = network()
    optimizer, guard = fused(net), Guard(net, num_classes=10, lag=False)
    guard.open()
    guard.see_loss(torch.tensor(math.nan))
    net(torch.full((2, 3, 8, 8), math.inf))
    with (pytest.warns(UserWarning, match="called again at step 1"),
          pytest.warns(UserWarning, match="last finite copy")):
        guard.open()
    assert check_state(net) == []
    F.cross_entropy(net(data()[0][0]), data()[0][1]).backward()
    guard.step(optimizer)
    assert guard.verdict().reasons == ("loss",)
    assert advance(net, guard, optimizer, *data()[0]).accepted


def test_buffers_exchanged_after_the_guard_was_made_are_watched_anew():
    net = network()
    guard = Guard(net, num_classes=10, lag=False)
    net.double()
    net[1].register_buffer("more", torch.ones(3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x, y = data()[0]
    assert advance(net, guard, optimizer, x.double(), y).accepted
    before = everything(net, optimizer)
    net[1].more.fill_(2.0)
    guard.open()
    net(torch.full((2, 3, 8, 8), math.inf, dtype=torch.float64))
    net[1].more.fill_(math.nan)
    guard.decide()
    guard.close(True)
    assert net[1].more.tolist() == [2.0] * 3
    net[1].more.fill_(1.0)
    assert same(before, everything(net, optimizer))
    net.to("meta").to_empty(device="cpu").load_state_dict(network().double().state_dict(), strict=False)
    net[1].more.fill_(1.0)
    assert advance(net, guard, torch.optim.SGD(net.parameters(), lr=0.1), x.double(), y).accepted


@pytest.mark.parametrize("kind", [LossScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("bad", [(0, 0), (1, 0), (0, 1)])
def test_two_steps_before_one_update_share_a_scaler_and_one_bad_step_lowers_its_scale_once(kind, bad):
    net, scaler, told = network(), kind("cpu"), []
    pair = [torch.optim.SGD(net[i].parameters(), lr=0.1) for i in (0, 4)]
    guard = Guard(net, num_classes=10, lag=False)
    for optimizer, fault in zip(pair, bad, strict=True):
        guard.open()
        loss = F.cross_entropy(net(data()[0][0]), data()[0][1])
        guard.see_loss(loss * (math.nan if fault else 1))
        net.zero_grad()
        scaler.scale(loss).backward()
        guard.step(optimizer, scaler)
        told.append(guard.verdict().accepted)
    scaler.update()
    assert told == [not fault for fault in bad]
    assert scaler.get_scale() == (2.0**15 if any(bad) else 2.0**16)


def test_a_verdict_may_be_closed_as_a_bool_and_a_step_without_number_counts():
    guard = Guard(network(), lag=False)
    assert guard.verdict() is None
    for n, found_inf in enumerate([True, False, torch.tensor(True), torch.tensor(False), 1.0, 0]):
        guard.open()
        guard.close(found_inf)
        verdict = guard.verdict()
        assert (verdict.step, verdict.accepted) == (n, n % 2 == 1)
    guard.open(100)
    guard.close(False)
    assert guard.verdict().step == 100


def test_integer_and_half_buffers_go_back_too():
    net = Masked()
    guard = Guard(net)
    guard.open(0)
    net.norm(torch.full((2, 4), math.inf))
    net.coarse.mul_(math.nan)
    guard.decide()
    guard.close(torch.ones(()))
    assert net.norm.num_batches_tracked == 0
    assert torch.equal(net.norm.running_var, torch.ones(4))
    assert torch.equal(net.coarse, torch.ones(3, dtype=torch.bfloat16))
    guard.open(1)
    net.norm(torch.randn(2, 4))
    guard.decide()
    guard.close(torch.zeros(()))
    assert net.norm.num_batches_tracked == 1


def test_buffers_of_every_dtype_and_layout_are_looked_at_and_go_back():
    net, whole = nn.Module(), torch.arange(64.0).view(8, 8)
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.int8)
    buffers = {f"some_{str(dtype)[6:]}": torch.arange(3).to(dtype) for dtype in dtypes}
    buffers |= {"flags": torch.tensor([True, False]), "number": torch.tensor(3.0), "strided": whole[:, ::2].clone(),
                "every_other": whole[:, ::2], "turned": torch.ones(4, 5).t(),
                "last": torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)}
    for name, buffer in buffers.items():
        net.register_buffer(name, buffer)
    guard = Guard(net)
    before = {name: b.clone() for name, b in net.named_buffers()}
    guard.open(0)
    for b in net.buffers():
        b.copy_(b + 1 if b.dtype != torch.bool else ~b)
    assert guard.decide() == 0
    guard.close(torch.ones(()))
    assert all(torch.equal(b, before[name]) for name, b in net.named_buffers())
    for i, (name, b) in enumerate(net.named_buffers(), start=1):
        if b.is_floating_point():
            guard.open(i)
            b[(-1,) * b.ndim] = math.nan if i % 2 else math.inf
            assert guard.decide() == 1, name
            guard.close(torch.ones(()))
            assert torch.equal(b, before[name])
    guard.open(99)
    net.every_other.zero_()
    assert guard.decide() == 0
    guard.close(torch.zeros(()))
    assert not net.every_other.any()


@pytest.mark.parametrize("factor, flag", [(0.999, 0), (1.001, 1), (-1.001, 1)])
def test_a_flag_goes_up_at_the_limit(factor, flag):
    guard = Guard(network())
    guard.open(0)
    guard.see_loss(torch.tensor(factor * guards.LIMIT))
    assert guard.decide() == flag


class Launches(TorchDispatchMode):
    """Counts what would be a kernel on a GPU: all operations but views and allocations."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        nothing = ("detach", "empty", "empty_like", "promote_types", "select", "slice", "split", "unbind", "view")
        name = func.overloadpacket.__name__
        self.count += not (name in nothing or name.startswith("_record_function"))
        return func(*args, **(kwargs or {}))


def test_the_guards_and_the_optimizer_add_few_launches_to_a_step():
    net = network()
    guard, optimizer = Guard(net, num_classes=10), ClippedAdamW(param_groups(net))
    scale, (x, y) = torch.ones(()), data(1)[0]
    counts = []
    for n in range(4):
        with Launches() as outside:
            guard.open(n)
            y = guard.see_batch(x, y)
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        with Launches() as decided:
            guard.see_loss(loss)
            bad = guard.decide()
        with Launches() as stepped:
            result = optimizer.step(grad_scale=scale, skip=bad)
        with Launches() as closed:
            guard.close(result.found_inf, loss=loss, grad_norm=result.grad_norm, lr=result.lr,
                        updates=optimizer.updates)
        counts = [outside.count, decided.count, stepped.count, closed.count]
        guard.verdict()
    assert guard.flush().accepted
    # flags, buffers; images, labels | loss; buffers, flags | norm, verdict, coefficient, lr, two groups | buffers, row
    assert all(count <= most for count, most in zip(counts, (13, 9, 24, 5), strict=True)), counts


def test_no_nan_enters_the_spike_statistics_and_a_spike_is_seen():
    torch.manual_seed(0)
    detector = SpikeDetector(warmup=50)
    values = torch.exp(0.2 * torch.randn(400)).tolist()
    scores = [detector.see("loss", v) for v in values]
    assert max(scores) < 6
    count, mean, variance = detector.seen["loss"]
    assert count == 400
    assert abs(mean) < 0.1  # the moving mean of 50 or so normals of width 0.2
    assert 0.1 < math.sqrt(variance) < 0.3
    before = list(detector.seen["loss"])
    assert [detector.see("loss", v) for v in (math.nan, math.inf)] == [math.inf, math.inf]
    assert detector.seen["loss"] == before
    assert detector.see("loss", 100.0) > 6
    assert detector.see("loss", 1.0) < 2  # one spike has not moved the mean by much
    for _ in range(300):
        last = detector.see("loss", 100.0)
    assert last < 6  # a new level is learnt


def test_a_spike_stands_in_the_verdict_without_rejecting():
    guard = Guard(network(), lag=False, spikes=SpikeDetector(warmup=10))
    for n in range(20):
        guard.open(n)
        guard.close(torch.zeros(()), loss=torch.tensor(1.0 if n < 19 else 50.0))
        verdict = guard.verdict()
    assert verdict.accepted
    assert "loss 50" in verdict.spikes[0]


def test_the_state_survives_a_round_trip():
    guard = Guard(network(), lag=False)
    for n in range(7):
        guard.open(n)
        guard.close(torch.tensor(float(n >= 5)), loss=torch.tensor(1.0 + n))
    state = guard.state_dict()
    other = Guard(network())
    other.load_state_dict(state)
    assert (other.steps, other.skipped, other.skipped_in_a_row) == (7, 2, 2)
    assert other.state_dict() == state


def test_the_first_step_says_what_will_go_wrong():
    net = network()
    net.register_parameter("forgotten", nn.Parameter(torch.ones(3)))
    F.cross_entropy(net(data()[0][0]), data()[0][1]).backward()
    assert [s for s in first_step_checks(net, 10) if "no gradient" not in s] == []
    with torch.no_grad():
        net[0].weight[0, 0, 0, 0] = 3e7
        net[4].bias[1] = math.nan
    said = first_step_checks(net, 7)
    assert any("forgotten" in s and "no gradient" in s for s in said)
    assert any("0.weight" in s and "uninitialised" in s for s in said)
    assert any("4.bias" in s and "uninitialised" in s for s in said)
    assert "4 has 10 outputs but the data has 7 classes" in said


def test_probes_report_headroom_before_anything_overflows():
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[200.0, 0.0], [0.0, 1.0]]))
        net[2].weight.fill_(1e-3)
    probes = Probes(net)
    with probes, torch.autocast("cpu", torch.float16):
        out = net(torch.tensor([[200.0, 1.0], [-2.0, 1.0]]))
        (out.float() * 1e-3).sum().backward()
    first = probes.read()[0]
    assert (first.name, first.dtype) == ("0", torch.float16)
    assert first.headroom == 40000.0 / 65504
    assert first.underflow == 1.0  # 1e-3 * 1e-3 = 1e-6 is below 6.1e-5
    text = "\n".join(probes.warnings(loss_scale=1.0))
    assert "0: activations reach 4e+04, 61% of float16's maximum; try --keep-fp32 '0'" in text
    assert "more scale" in text
    assert not net[0]._forward_hooks
    with probes, torch.autocast("cpu", torch.float16):
        net(torch.tensor([[400.0, 1.0]]))
    assert probes.read()[0].headroom == math.inf
    with probes:
        net(torch.tensor([[1.0, 1.0]])).sum().backward()
    assert probes.warnings() == []


@pytest.mark.parametrize("spec", ["nan", "nan:grad", "nan:grad@step=", "odd:grad@step=1", "nan:sky@step=1",
                                  "nan:grad@step=5..3", "nan:grad@step=1,rank=x", "nan:grad@step=-1"])
def test_a_wrong_inject_spec_is_refused_in_one_sentence(spec):
    with pytest.raises(ValueError, match="--inject") as caught:
        parse_inject(spec)
    assert "\n" not in str(caught.value)


def test_inject_specs_mean_what_they_say():
    a, b = parse_inject("nan:grad:head.weight@step=5,rank=1; inf:act:stages.2@step=5..8")
    assert a == ("nan", "grad", "head.weight", 5, 5, 1)
    assert b == ("inf", "act", "stages.2", 5, 8, None)
    assert parse_inject("") == ()
    net = network()
    assert Injector(net, (a,), rank=0).faults == []
    with pytest.raises(ValueError, match="no grad is named"):
        Injector(net, (a,), rank=1)
    injector = Injector(net, parse_inject("big:param:*.bias@step=2"))
    assert injector.begin(1) == []
    assert injector.begin(2) == ["0.bias"]
    assert net[0].bias[0] == 1e30
    with pytest.raises(ValueError, match="uint8"):
        injector = Injector(net, parse_inject("nan:input@step=0"))
        injector.begin(0)
        injector.batch(torch.zeros(2, dtype=torch.uint8), torch.zeros(2))


def test_compile_sees_no_graph_break_and_the_hooks_still_work():
    net = network()
    run, probes = record(net, spec="nan:act:0@step=1"), Probes(net)
    probes.attach()
    run.compiled = torch.compile(run.model, backend="aot_eager", fullgraph=True)  # fullgraph: a break is an error
    assert step(0, run).accepted
    assert probes.read()[0].amax > 0
    before = everything(net, run.optimizer)
    assert not step(1, run).accepted
    assert same(before, everything(net, run.optimizer))
    assert step(2, run).accepted


FAULTS = ("nan:input", "inf:label", "nan:act", "big:loss", "inf:grad", "nan:buffer")


def two_ranks(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    net = network()
    spec = ";".join(f"{fault}@step={2 * i + 1},rank=1" for i, fault in enumerate(FAULTS))
    run, told = record(net, spec=spec, rank=rank), []
    run.ddp = run.compiled = nn.parallel.DistributedDataParallel(run.model, broadcast_buffers=False)
    run.rank, run.world_size = rank, 2
    for n in range(2 * len(FAULTS) + 1):
        before = everything(net, run.optimizer)
        verdict = step(n, run, data(1, seed=10 * n + rank)[0])
        kept = same(before, everything(net, run.optimizer))
        told.append((verdict.accepted, kept, verdict.reasons, verdict.rank))
    torch.save((told, [p.detach() for p in net.parameters()], check_state(net)), f"{folder}/rank{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)  # now and then one of gloo's threads aborts the interpreter at its exit; the results are on disk


def test_a_fault_on_rank_1_is_rejected_on_both_and_the_replicas_stay_equal(tmp_path):
    mp.spawn(two_ranks, (str(tmp_path),), nprocs=2)
    (told0, weights0, bad0), (told1, weights1, bad1) = (torch.load(tmp_path / f"rank{r}.pt") for r in range(2))
    assert [t[:3] for t in told0] == [t[:3] for t in told1]
    for n, (accepted, kept, reasons, guilty) in enumerate(told0):
        assert accepted is not kept
        assert accepted == (n % 2 == 0)
        if not accepted:
            where = FAULTS[n // 2].split(":")[1]
            assert {"act": "loss"}.get(where, where) in reasons
            assert where == "grad" or guilty == 1
    assert same(weights0, weights1)
    assert bad0 == bad1 == []


def test_copied_alone_it_demonstrates_itself(tmp_path):
    shutil.copy(Path(guards.__file__), tmp_path / "guards.py")
    out = subprocess.run([sys.executable, "guards.py"], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert out.returncode == 0, out.stderr
    assert "step 3: rejected" in out.stdout
    assert "running_var" in out.stdout
    assert "bit-identical to before: True" in out.stdout


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: the CPU has no host syncs to forbid")
def test_a_whole_guarded_step_makes_no_host_sync_on_cuda():
    net = network().cuda()
    run = record(net, lag=True, device="cuda", spec="inf:act@step=3;inf:label@step=4")
    batch = [t.cuda() for t in data(1, 16)[0]]
    step(0, run, batch)  # allocates, makes the optimizer's state
    told = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for n in range(1, 6):
            told.append(step(n, run, batch))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    told.append(run.guard.flush())
    assert [v.accepted for v in told] == [True, True, True, False, False, True]
    assert check_state(net, run.optimizer.state_dict()) == []
