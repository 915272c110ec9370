"""Plant every fault, see it flagged, and see that nothing of it stays."""

import gc
import math

import pytest
import torch
from helpers import same, snapshot
from torch import nn

import guards
from amp_policy import LossScaler
from extras.muon import Muon
from guards import Guard
from optim import ClippedAdamW


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)
    )


@pytest.mark.parametrize("factor, flag", [(0.999, 0), (1.001, 1), (-1.001, 1), (math.nan, 1)])
def test_a_flag_goes_up_at_the_limit_in_any_micro_batch(factor, flag):
    guard = Guard(network())
    for order in (1, -1):
        guard.open()
        for loss in [factor * 1.8e19, 1.0][::order]:
            guard.see_loss(torch.tensor(loss))
        assert guard.decide() == flag


def reasons_of(guard, *batch):
    guard.open()
    safe = guard.see_batch(*batch)
    guard.close(guard.decide())
    return guard.verdict().reasons, safe


def test_labels_out_of_range_are_made_safe_and_ignored_ones_are_not_touched():
    guard = Guard(network(), num_classes=10, lag=False)
    y = torch.tensor([3, -100, 9, 0])
    reasons, safe = reasons_of(guard, torch.ones(4), y)
    assert reasons == ()
    assert torch.equal(safe, y)

    for bad in (10, -1, 2**40):
        raw = torch.tensor([3, bad, -100])
        reasons, safe = reasons_of(guard, torch.ones(4), raw)
        assert reasons == ("label",)
        assert 0 <= safe[1] < 10
        assert safe[[0, 2]].tolist() == [3, -100]
        assert raw[1] == bad, "the caller's own batch stays raw, for a post-mortem"

    targets = torch.tensor([0.5, math.nan])
    reasons, _ = reasons_of(guard, torch.ones(2), targets)
    assert reasons == ("label",)

    pixels = torch.zeros(2, dtype=torch.uint8)
    reasons, _ = reasons_of(guard, pixels, torch.rand(2, 10))
    assert reasons == ()


def test_a_nested_batch_is_looked_into_and_comes_back_in_its_form():
    guard = Guard(network(), num_classes=10, lag=False)
    ids = torch.tensor([139, 10_000])
    bad = torch.tensor([3, 10_000])

    nested = {"inputs": [torch.ones(2), {"label": bad}], "image_id": ids}
    reasons, safe = reasons_of(guard, nested)
    assert reasons == ("label",)
    assert safe["inputs"][1]["label"].tolist() == [3, 9]
    assert safe["image_id"] is ids

    packed = nn.utils.rnn.pack_sequence([torch.tensor([1.0, math.inf]), torch.ones(1)])
    reasons, safe = reasons_of(guard, packed, [{"labels": ids % 10, "image_id": ids}])
    assert reasons == ("input",)
    assert safe[0]["image_id"] is ids


def closed(guard, found_inf=0.0, **stats):
    stats = {name: torch.tensor(value) for name, value in stats.items()}
    guard.open()
    guard.decide()
    guard.close(torch.tensor(found_inf), **stats)
    return guard.verdict()


def test_the_verdict_comes_one_step_late_and_flush_brings_the_last():
    guard = Guard(network())
    assert guard.verdict() is None

    nothing, *verdicts = [closed(guard, float(n in (1, 2))) for n in range(4)]
    assert nothing is None
    assert [(v.step, v.accepted) for v in verdicts] == [(0, True), (1, False), (2, False)]
    assert guard.skipped_in_a_row == 2

    last = guard.flush()
    guard.set_lag(False)
    assert (last.step, last.accepted) == (3, True)
    assert (guard.skipped_in_a_row, guard.steps) == (0, 4)
    assert guard.flush() is None

    assert closed(guard).step == 4

    guard.open(100)
    guard.decide()
    guard.close(torch.tensor(1.0))
    assert guard.verdict().step == 100


def test_a_step_that_a_cuda_graph_replays_has_its_verdict():
    guard = Guard(network(), lag=False)
    for step in (1, 2, 3):
        guard.open(step)
        if step == 1:  # recorded here; a replay runs the same kernels and no line of Python
            guard.decide()
            guard.close(torch.tensor(1.0))
        assert guard.verdict().step == step
    assert guard.skipped == 3
    assert guard.verdict() is None


def test_a_signal_and_a_carried_number_reject_nothing_and_a_veto_does():
    guard = Guard(network(), lag=False, carries=["worst"])
    guard.open()
    guard.carry("signal", 15)
    guard.carry("worst", 2**24)
    assert guard.decide() == 0
    guard.close(torch.zeros(()), note=torch.tensor(0.5))
    verdict = guard.verdict()
    carried = {"signal": 15, "worst": 2.0**24}
    assert verdict[1:] == (True, (), {"note": 0.5}, carried, -1)

    guard.open()
    guard.carry("veto", guard.rank + 1)
    guard.close(guard.decide())
    assert guard.verdict()[2:5] == (("veto",), {}, {"signal": 0, "worst": 0})


def test_bad_weights_and_moments_are_seen_before_they_spread():
    net = nn.Linear(3, 2)
    optimizer = ClippedAdamW(net.parameters())
    guard = Guard(net, lag=False)
    net(torch.ones(4, 3)).sum().backward()
    guard.step(optimizer)
    assert guard.verdict().accepted

    moment = optimizer.state[net.bias]["exp_avg_sq"]
    for where, tensor in (("param", net.bias.data), ("optstate", moment)):
        good = tensor.clone()
        tensor[1] = math.inf
        guard.open()
        guard.see_state(param=dict(net.named_parameters()), optstate=optimizer.state)
        before = snapshot(net)

        guard.step(optimizer)

        assert guard.verdict().reasons == (where,)
        assert same(before, snapshot(net))
        tensor.copy_(good)


def test_restart_takes_the_step_from_its_beginning():
    net = network()
    guard = Guard(net, lag=False)
    net[1].running_mean.fill_(3)  # by a checkpoint that was loaded, say
    guard.open(7)
    before = snapshot(net)

    net[1].running_mean = torch.full((4,), math.inf)  # as a forward may
    guard.see_loss(torch.tensor(math.nan))
    guard.carry("veto", guard.rank + 1)
    guard.restart()
    assert same(before, snapshot(net))
    assert guard.number == 7

    net[1].running_mean.fill_(math.inf)  # and here the script raises, and goes on
    with pytest.warns(match="has not ended"):
        guard.open()
    assert same(before, snapshot(net))
    assert guard.decide() == 0


def test_buffers_of_every_dtype_are_looked_at_and_go_back_and_masks_raise_no_flag():
    buffers = {}
    for dtype in (*guards.CHECKED, torch.int64, torch.int8, torch.bool):
        buffers[f"some_{len(buffers)}"] = torch.arange(3).to(dtype)
    whole = torch.arange(64.0).view(8, 8)
    buffers |= {
        "number": torch.tensor(3.0),
        "empty": whole[:0],
        "every_other": whole[:, ::2],
        "last": torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "mask": torch.full((4, 4), -math.inf).triu(1),
        "one": torch.ones(1).expand(5),
    }
    net = nn.Linear(2, 2)
    for name, buffer in buffers.items():
        net.register_buffer(name, buffer)
    guard = Guard(net)
    before = snapshot(net)
    changing = {name: b for name, b in net.named_buffers() if name not in ("one", "empty")}

    def change(which, value):
        guard.open()
        for b in which:
            b.fill_(value)
        bad = guard.decide()
        guard.close(torch.ones(()))
        assert same(before, snapshot(net))
        return bad

    assert change(changing.values(), 1) == 0
    for name, b in changing.items():
        if b.dtype in guards.CHECKED and name != "mask":
            part = b.view(-1)[-1:] if b.is_contiguous() else b
            assert change([part], math.nan) == 1, name

    guard.open()
    net.every_other.zero_()
    guard.close(torch.zeros(()))
    assert not net.every_other.any()


def test_a_single_buffer_goes_back_and_infinite_running_statistics_are_no_mask():
    net = nn.Linear(2, 2)
    net.register_buffer("running_mean", torch.zeros(3))
    guard = Guard(net)
    guard.open()
    net.running_mean[1] = math.inf
    assert Guard(net).decide() == 1
    bad = guard.decide()
    guard.close(bad)
    assert bad == 1
    assert not net.running_mean.any()


def test_a_backward_that_began_before_the_buffers_went_back_still_works():
    net = network()
    guard = Guard(net)
    guard.open()
    loss = net(torch.randn(2, 3, 8, 8)).sum()
    guard.decide()
    guard.close(torch.ones(()))
    loss.backward()


def test_buffers_that_were_exchanged_or_moved_are_watched_anew():
    net = network()
    guard = Guard(net, lag=False)
    net.double()
    net[1].register_buffer("more", torch.ones(3))
    before = snapshot(net)

    images = torch.full((2, 3, 8, 8), math.inf, dtype=torch.float64)
    guard.open()
    net(images)
    net[1].more.fill_(math.nan)
    guard.close(guard.decide())

    assert guard.verdict().reasons == ("buffer",)
    assert same(before, snapshot(net))


class Centre(nn.Module):
    """DINO's: the forward assigns another tensor to its buffer. And a cache that comes and goes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("centre", torch.ones(4))
        self.register_buffer("cache", torch.zeros(4))

    def forward(self, x):
        y = self.layer(x) * self.centre
        self.centre = 0.9 * self.centre + 0.1 * y.detach().mean(0)
        self.cache = None
        return (y - self.centre).square().mean()


def test_a_buffer_that_the_forward_assigns_goes_back_too():
    net = Centre()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    guard = Guard(net, lag=False)
    for k in range(6):
        good = k != 3
        before = net.centre.clone()
        x = torch.randn(3, 4)

        loss = net(x / good)
        (wanted,) = torch.autograd.grad(loss, net.layer.weight, retain_graph=True)
        guard.see_loss(loss)  # writes to no buffer that the backward needs
        loss.backward()
        assert not good or torch.equal(net.layer.weight.grad, wanted)

        guard.step(optimizer)
        optimizer.zero_grad()
        accepted = guard.verdict().accepted
        moved = not torch.equal(net.centre, before)
        assert accepted == moved == good


@pytest.mark.parametrize("lag", [True, False])
def test_a_module_that_comes_with_a_bad_batch_costs_that_step_alone(lag):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4))
    guard = Guard(net, lag=lag)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)

    def step(x):
        net(x).square().mean().backward()
        guard.step(optimizer)
        optimizer.zero_grad()

    step(torch.randn(8, 4))
    net.append(nn.BatchNorm1d(4))
    optimizer.add_param_group({"params": net[1].parameters()})
    with pytest.warns(UserWarning, match="1.running_mean, 1.running_var.* reset"):
        step(torch.full((8, 4), math.inf))
    assert net[1].running_mean.tolist() == [0] * 4
    assert net[1].running_var.tolist() == [1] * 4

    for _ in range(3):
        step(torch.randn(8, 4))
    guard.flush()
    assert (guard.steps, guard.skipped) == (5, 1)
    assert net[1].running_mean.any()


@pytest.mark.parametrize(
    "make",
    [ClippedAdamW, lambda params: torch.optim.SGD(params, 0.1)],
    ids=["ClippedAdamW", "SGD"],
)
def test_an_optimizer_that_raises_in_a_step_of_the_guard_is_the_scripts_own_again(make):
    nets = [nn.Linear(2, 2), nn.Linear(2, 2)]
    optimizers = [make(net.parameters()) for net in nets]
    guard = Guard(nets, lag=False)

    def backward(factor=1.0):
        for net in nets:
            net.zero_grad()
            (net(torch.ones(1, 2)) * factor).sum().backward()

    backward()
    guard.step(optimizers)
    hook = optimizers[0].register_step_pre_hook(lambda *_: 1 / 0)
    backward()
    with pytest.raises(ZeroDivisionError):
        guard.step(optimizers)
    hook.remove()
    assert not any({"found_inf", "grad_scale"} & vars(o).keys() for o in optimizers)

    before = snapshot(*nets)
    backward(math.nan)
    if make is ClippedAdamW:  # with the verdict of the step before it took this one
        optimizers[0].step()
        assert same(before, snapshot(*nets))
    backward()
    with pytest.warns(UserWarning, match="together take each update twice"):
        optimizers[1].step()


def test_a_sparse_buffer_is_passed_over_and_a_tuple_of_optimizers_is_taken():
    net = network()
    for layout in (torch.sparse_csr, torch.sparse_coo):
        net.register_buffer(str(layout)[6:], torch.eye(3).to_sparse(layout=layout))
    guard = Guard(net, lag=False)
    net(torch.ones(2, 3, 8, 8)).sum().backward()
    before = net[4].bias.clone()
    assert guard.step((torch.optim.SGD(net.parameters(), 0.1),)) == 0
    assert guard.verdict().accepted
    assert not torch.equal(net[4].bias, before)


class Growing(Centre):
    """Its cache is another one after each forward."""

    def forward(self, x):
        loss = super().forward(x)
        weights = self.layer.weight.numel()
        more = int(100 * torch.rand(()))
        self.cache = x.new_zeros(len(x) + weights + more)
        return loss


class Norm(nn.BatchNorm1d):
    """Beside its statistics a mask, and numbers that something loads between two steps."""

    def __init__(self):
        super().__init__(4)
        self.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))
        self.register_buffer("loaded", torch.zeros(3))

    def forward(self, x):
        return super().forward(x).square().mean()


@pytest.mark.parametrize("kind, count", [(Centre, 1), (Growing, 1), (Norm, 2)])
@pytest.mark.parametrize("opens", [True, False])
@pytest.mark.parametrize("lag", [True, False])
def test_a_poison_between_two_steps_costs_two_steps_at_most(kind, opens, lag, count, recwarn):
    torch.manual_seed(0)
    net = kind()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    guards = [Guard(net, lag=lag) for _ in range(count)]
    loads = kind is Norm and opens

    net(torch.ones(3, 4))
    for step in range(12):
        if step == 5:
            with torch.no_grad():
                net(torch.full((3, 4), math.inf))  # an evaluation that was left in train mode
        if loads:
            net.loaded.fill_(step)
            net.mask[0, 0] = step
        for guard in guards:
            if opens:
                guard.open()
            net(torch.randn(6, 4)).backward()
            guard.step(optimizer)
            optimizer.zero_grad()
            guard.verdict()
        if loads:
            assert net.loaded.eq(step).all()
            assert net.mask[0, 0] == step

    most = 2 if opens and lag else 1
    for guard in guards:
        guard.flush()
        assert guard.skipped <= most
        assert guard.skipped_in_a_row == 0
    assert all(b.isfinite().all() for name, b in net.named_buffers() if name != "mask")
    told = ["and no step did it" in str(w.message) for w in recwarn]
    assert sum(told) == (opens or kind is Growing)


@pytest.mark.parametrize(
    "make",
    [
        lambda net: torch.optim.SGD(net.parameters(), 0.1),
        lambda net: torch.optim.AdamW(net.parameters(), fused=True),
        lambda net: ClippedAdamW(net.parameters()),
        lambda net: Muon([net.weight]),
    ],
    ids=["SGD", "AdamW", "ClippedAdamW", "Muon"],
)
@pytest.mark.parametrize("scaled", [None, torch.amp.GradScaler, LossScaler])
def test_of_two_optimizers_the_one_with_gradients_moves_and_none_when_bad(make, scaled, recwarn):
    nets = [nn.Linear(4, 4), nn.Linear(4, 4)]
    optimizers = [make(net) for net in nets]
    guard = Guard(nets, lag=False)
    scaler = scaled and scaled("cpu")
    steps = [
        (1.0, ()),  # nobody has a gradient
        (1.0, (0,)),
        (math.nan, (1,)),
        (1.0, (1,)),
        (1.0, ()),
        (math.inf, (0, 1)),
        (1.0, (0, 1)),
    ]
    for factor, turns in steps:
        before = [snapshot(net) for net in nets]
        for i in turns:
            out = nets[i](torch.ones(2, 4))
            loss = out.square().mean() * factor
            (scaler.scale(loss) if scaler else loss).backward()
        bad = guard.step(optimizers, scaler, clip=1.0)
        if scaler:
            scaler.update()

        good = math.isfinite(factor)
        moved = {i for i in range(2) if not same(before[i], snapshot(nets[i]))}
        assert moved == (set(turns) if good else set())
        assert bad == (not good)
        assert guard.verdict()
        for optimizer in optimizers:
            optimizer.zero_grad()

    [warning] = recwarn
    assert warning.filename == __file__
    assert "changes nothing" in str(warning.message)


def test_a_bad_batch_rejects_a_step_without_gradients_too():
    net = network()
    guard = Guard(net, lag=False)
    guard.see_batch(torch.tensor(math.nan))
    with pytest.warns(UserWarning, match="no parameter has had a gradient"):
        assert guard.step(ClippedAdamW(net.parameters())) == 1
    assert guard.verdict().reasons == ("input",)


def test_guard_step_refuses_a_second_step_without_an_update_of_the_scaler():
    net = nn.Linear(4, 1)
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    guard = Guard(net)

    def backward():
        loss = net(torch.ones(2, 4)).sum()
        scaler.scale(loss).backward()

    for _ in range(2):
        guard.see_loss(torch.tensor(10.0))
        backward()
        guard.see_loss(torch.tensor(20.0))
        guard.step(optimizer, scaler)
        scaler.update()
    assert guard.flush().stats["loss"] == 15

    backward()
    with pytest.raises(ValueError, match="above 0"):
        guard.step(optimizer, scaler, clip=math.nan)
    guard.step(optimizer, scaler)
    with pytest.raises(RuntimeError, match="after a rejected one, too"):
        guard.step(optimizer, scaler)


@pytest.mark.parametrize("made, used, told", [(0, 0, 0), (0, 3, 3), (5, 6, 8)])
def test_a_grad_scaler_beside_the_guard_is_named_whenever_it_is_used(made, used, told, recwarn):
    gc.collect()  # scalers of other tests
    net = nn.Linear(4, 1)
    scaler = None
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    guard = Guard(net, lag=False)
    for step in range(told + 1):
        if step == made:
            scaler = torch.amp.GradScaler("cpu")
        loss = net(torch.ones(2, 4)).sum()
        (scaler.scale(loss) if step >= used else loss).backward()

        recwarn.clear()
        guard.step(optimizer)
        optimizer.zero_grad()
        guard.verdict()
        warned = any("call guard.step(optimizer, scaler)" in str(w.message) for w in recwarn)
        assert warned == (step >= told), step


def test_all_living_objects_are_gone_through_twice_and_no_more(monkeypatch):
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    guard = Guard(net)
    scans = []
    monkeypatch.setattr(guards.gc, "get_objects", lambda: scans.append(guard.number) or [])
    for _ in range(70):
        net(torch.ones(2, 4)).sum().backward()
        guard.step(optimizer)
    assert len(scans) == 2


def scaled_step(net, scaler):
    scaler.step(net.optimizer)
    scaler.update()


def first(net, other, scaler, guard):
    """A step of the other network, whole."""
    scaler.scale(other.loss()).backward()
    scaled_step(other, scaler)
    net.loss().backward()
    guard.step(net.optimizer)


def accumulated(net, other, scaler, guard):
    """The other network never steps while we look."""
    scaler.scale(other.loss()).backward()
    net.loss().backward()
    guard.step(net.optimizer)


def between(net, other, scaler, guard):
    """Both backward passes come first."""
    accumulated(net, other, scaler, guard)
    scaled_step(other, scaler)


def once(net, other, scaler, guard):
    """The other network was trained before, and its optimizer is gone."""
    if hasattr(other, "optimizer"):
        scaler.scale(other.loss()).backward()
        scaled_step(other, scaler)
        del other.optimizer
    net.loss().backward()
    guard.step(net.optimizer)


@pytest.mark.parametrize("take", [first, between, accumulated, once])
def test_a_grad_scaler_of_another_network_is_not_named(take, recwarn):
    gc.collect()
    nets = [nn.Linear(4, 1), nn.Linear(4, 1)]
    for net in nets:
        net.optimizer = torch.optim.SGD(net.parameters(), 0.01)
        net.loss = lambda net=net: net(torch.ones(2, 4)).sum()

    scaler = torch.amp.GradScaler("cpu")
    guard = Guard(nets[0], lag=False)
    for _ in range(9):
        take(*nets, scaler, guard)
        for net in nets:
            net.zero_grad()

    assert not [*recwarn]


def test_the_counters_and_the_verdict_under_way_survive_a_round_trip():
    guard = Guard(network())
    for n in range(21):
        closed(guard, float(n == 20), loss=n)

    state = guard.state_dict()
    other = Guard(network())
    other.load_state_dict(state)
    assert other.state_dict() == state

    for one in (guard, other):
        last = one.flush()
        assert (last.step, last.accepted, last.stats["loss"]) == (20, False, 20.0)
        assert (one.steps, one.skipped, one.skipped_in_a_row) == (21, 1, 1)
