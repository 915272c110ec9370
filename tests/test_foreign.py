"""Loops in the manner of public projects, with guards.py copied in: a clean run keeps its bits, no fault gets in."""

import copy
import dataclasses
import math
import os
from collections import UserDict

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

from guards import Guard, check_state, named_tensors
from optim import ClippedAdamW

AdamW, SGD = torch.optim.AdamW, torch.optim.SGD


class Orthogonal(torch.optim.Optimizer):
    """A foreign Muon as airbench has one: momentum, an orthogonal direction, a step count. It reads no found_inf."""

    def __init__(self, params, lr=0.02, momentum=0.9):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                buffer = state.setdefault("momentum_buffer", torch.zeros_like(p))
                state["step"] = state.get("step", 0) + 1
                buffer.mul_(group["momentum"]).add_(p.grad)
                x = buffer.flatten(1) / (buffer.norm() + 1e-7)
                for _ in range(3):
                    x = 1.5 * x - 0.5 * x @ x.T @ x
                p.add_(x.view_as(p), alpha=-group["lr"])


def matrices(net, optimizer):
    """`optimizer` for the weights of two or more dimensions, SGD for the rest: what Muon is given everywhere."""
    flat = [p for p in net.parameters() if p.ndim < 2]
    return [optimizer([p for p in net.parameters() if p.ndim > 1]), SGD(flat, lr=0.05, momentum=0.9, nesterov=True)]


OPTIMIZERS = {
    **{name: (lambda net, name=name: getattr(torch.optim, name)(net.parameters()))
       for name in ("AdamW", "Adam", "Adagrad", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD", "Adadelta", "RMSprop")},
    "SGD": lambda net: SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    **{f"fused {name}": (lambda net, name=name: getattr(torch.optim, name)(net.parameters(), fused=True))
       for name in ("AdamW", "Adam", "Adagrad")},
    "fused SGD": lambda net: SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True, fused=True),
    "fused SGD without momentum": lambda net: SGD(net.parameters(), lr=0.05, fused=True),
    "Muon": lambda net: matrices(net, torch.optim.Muon) if all(p.ndim < 3 for p in net.parameters()) else None,
    "a foreign Muon": lambda net: matrices(net, Orthogonal),
    "ClippedAdamW": lambda net: ClippedAdamW(net.parameters()),
}


def everything(*parts):
    """Every tensor and number of networks and optimizers, copied."""
    out = {}
    for i, part in enumerate(parts):
        state = copy.deepcopy(part.state_dict())
        out |= {f"{i}.{name}": t for name, t in named_tensors(state)}
        out |= {f"{i}.{p}.{key}": value for p, numbers in state.get("state", {}).items() if isinstance(numbers, dict)
                for key, value in numbers.items() if isinstance(value, int | float)}
    return out


def differ(a, b):
    """Names of what is not the same to the bit, NaN included."""
    def same(x, y):
        if not isinstance(x, torch.Tensor):
            return x == y
        return x.dtype == y.dtype and torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) and not x.isnan().any()
    return sorted(name for name in a.keys() | b.keys() if name not in a or name not in b or not same(a[name], b[name]))


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))


def batches(count, seed=1):
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(8, 3, 4, 4, generator=g), torch.randint(0, 10, (8,), generator=g)) for _ in range(count)]


class Poison:
    """Plants one fault at one step of a loop, at the door that its name tells."""

    def __init__(self, net, fault="", at=2):
        self.net, self.fault, self.at = net, fault, at

    def __call__(self, step, images, labels):
        self.on = step == self.at
        images, labels = images.clone(), labels.clone()
        if self.on and self.fault == "input":
            images.view(-1)[3] = math.nan
        if self.on and self.fault == "label":
            labels.view(-1)[0] = 10_000
        return images, labels

    def loss(self, loss):
        return loss * (math.inf if self.on and self.fault == "loss" else 1.0)

    def after_backward(self):
        if self.on and self.fault == "grad":
            next(p for p in self.net.parameters() if p.grad is not None).grad.view(-1)[0] = math.inf
        if self.on and self.fault == "buffer":
            next(b for b in self.net.buffers() if b.is_floating_point()).view(-1)[0] = math.inf


def as_list(optimizers):
    return optimizers if isinstance(optimizers, list) else [optimizers]


def classify(make, guarded, fault="", steps=5, watch=None, scaler=None):
    """The plain loop of pytorch/examples and of torchvision's references."""
    net = network()
    optimizers = make(net)
    poison = Poison(net, fault)
    if guarded:
        guard = Guard(net, num_classes=10, lag=False)
    told = []
    for step, (x, y) in enumerate(batches(steps)):
        before = everything(net, *as_list(optimizers))
        x, y = poison(step, x, y)
        if guarded:
            guard.open()
            y = guard.see_batch(x, y)
        loss = poison.loss(F.cross_entropy(net(x), y))
        for optimizer in as_list(optimizers):
            optimizer.zero_grad()
        (scaler.scale(loss) if scaler else loss).backward()
        poison.after_backward()
        if guarded:
            guard.see_loss(loss)
            guard.step(optimizers, scaler=scaler)
            told.append((guard.verdict(), differ(before, everything(net, *as_list(optimizers)))))
        else:
            for optimizer in as_list(optimizers):
                scaler.step(optimizer) if scaler else optimizer.step()
        if scaler:
            scaler.update()
    return everything(net, *as_list(optimizers)), told


def kept_out(told, reason, at=2):
    """The verdicts of a run with one fault at step `at`: that step is named and left no trace, all others moved."""
    for step, (verdict, moved) in enumerate(told):
        assert verdict.step == step
        assert verdict.accepted == (step != at), verdict
        assert bool(moved) == (step != at), moved
        assert (reason in verdict.reasons) == (step == at), verdict
    return True


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_clean_run_is_bit_identical_with_and_without_the_guard(name):
    bare, _ = classify(OPTIMIZERS[name], guarded=False)
    guarded, told = classify(OPTIMIZERS[name], guarded=True)
    assert differ(bare, guarded) == []
    assert len(told) == 5
    assert all(v.accepted and moved for v, moved in told)


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("fault", ["input", "label", "loss", "grad", "buffer"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_fault_is_named_and_leaves_no_trace_under_any_optimizer(name, fault, at, monkeypatch):
    monkeypatch.setattr(Poison.__init__, "__defaults__", ("", at))
    after, told = classify(OPTIMIZERS[name], guarded=True, fault=fault)
    assert kept_out(told, fault, at)
    assert not any(torch.isnan(t).any() for t in after.values() if isinstance(t, torch.Tensor))


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if "fused" not in name and "Clipped" not in name])
def test_the_faults_are_real_without_the_guard_they_reach_the_state(name):
    after, _ = classify(OPTIMIZERS[name], guarded=False, fault="input")
    assert any(torch.isnan(t).any() for t in after.values() if isinstance(t, torch.Tensor))


@pytest.mark.parametrize("name", ["AdamW", "fused AdamW", "fused SGD", "RMSprop", "Muon", "ClippedAdamW"])
def test_under_a_gradscaler_the_same_holds_and_the_scale_backs_off(name):
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(3)]
    bare, _ = classify(OPTIMIZERS[name], guarded=False, scaler=scalers[0])
    guarded, _ = classify(OPTIMIZERS[name], guarded=True, scaler=scalers[1])
    assert differ(bare, guarded) == []
    assert scalers[0].state_dict() == scalers[1].state_dict()
    for fault in ("label", "grad", "buffer"):  # only "grad" is seen by the scaler itself
        scalers[2] = torch.amp.GradScaler("cpu", init_scale=1024.0)
        _, told = classify(OPTIMIZERS[name], guarded=True, fault=fault, scaler=scalers[2])
        assert kept_out(told, fault)
        assert scalers[2].get_scale() == 512.0


# --- nanoGPT: hand-set learning rates, tied weights, ignore_index -1, GradScaler, accumulation, clipping

class GPT(nn.Module):
    def __init__(self, vocab=17, dim=16, block=8):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, dim), nn.Embedding(block, dim)
        self.block = nn.TransformerEncoderLayer(dim, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.wte.weight = self.head.weight
        mask = torch.full((block, block), torch.finfo(torch.float32).min).triu(1)
        self.register_buffer("mask", mask)
        self.register_buffer("tokens_seen", torch.zeros(()))

    def forward(self, tokens, targets):
        if self.training:
            self.tokens_seen += tokens.numel()
        h = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        logits = self.head(self.block(h, src_mask=self.mask))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def train_gpt(guarded, fault="", steps=4, accumulation=2, scaled=True, lazy=False):
    torch.manual_seed(0)
    net = GPT()
    decay = [p for p in net.parameters() if p.dim() >= 2]
    plain = [p for p in net.parameters() if p.dim() < 2]
    optimizer = AdamW([{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaled)
    poison, told = Poison(net, fault), []
    if guarded:
        guard = Guard(net, num_classes=17, ignore_index=-1, lag=False)
    for step in range(steps):
        before = everything(net, optimizer)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (step + 1) / steps
        if guarded:
            guard.open()
        for micro in range(accumulation):
            x = torch.randint(0, 17, (2, 8), generator=torch.Generator().manual_seed(10 * step + micro))
            y = torch.cat([x[:, 1:], torch.full((2, 1), -1)], dim=1)
            if micro == 0:
                _, y = poison(step, x, y)
            if guarded:
                y = guard.see_batch(x, y)
                assert (y == -1).sum() == 2
            loss = net(x, y) / accumulation
            loss = poison.loss(loss) if micro == 0 else loss
            if guarded:
                guard.see_loss(loss)
            scaler.scale(loss).backward()
        poison.after_backward()
        if not lazy:
            scaler.unscale_(optimizer)
        if guarded:
            guard.step(optimizer, scaler=scaler, clip=0.5)
            changed = differ(before, everything(net, optimizer))
            told.append((guard.verdict(), changed))
        else:
            if lazy:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    return everything(net, optimizer), told, scaler


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("lazy", [True, False])
def test_nanogpt_keeps_its_bits_whether_it_unscales_before_or_leaves_that_to_the_guard(scaled, lazy):
    bare, _, scaler = train_gpt(False, scaled=scaled)
    guarded, told, other = train_gpt(True, scaled=scaled, lazy=lazy)
    assert differ(bare, guarded) == []
    assert scaler.state_dict() == other.state_dict()
    assert all(v.accepted for v, _ in told)
    for fault in ("label", "loss", "grad"):
        _, told, scaler = train_gpt(True, fault, scaled=scaled, lazy=lazy)
        verdicts = [(v, [n for n in moved if "param_groups" not in n]) for v, moved in told]
        assert kept_out(verdicts, fault)
        assert scaler.get_scale() == (128.0 if scaled else 1.0)


# --- Swin and timm: groups from a generator, a scheduler that writes g["lr"], clipping before the step

def test_groups_from_a_generator_and_a_scheduler_that_writes_the_lr():
    def run(guarded, fault=""):
        net = network()
        groups = ({"params": [p], "lr_scale": 0.5} for p in net.parameters() if p.requires_grad)
        optimizer = AdamW(groups, lr=1e-2, weight_decay=0.05, fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=9)
        poison, told, rates = Poison(net, fault), [], []
        guard = Guard(net, num_classes=10, lag=False)
        for step, (x, y) in enumerate(batches(6)):
            before = everything(net, optimizer)
            x, y = poison(step, x, y)
            for group in optimizer.param_groups:  # timm writes it by hand
                group["lr"] *= group["lr_scale"] if step == 0 else 1.0
            rates.append(optimizer.param_groups[0]["lr"])
            if guarded:
                guard.open()
                y = guard.see_batch(x, y)
            loss = poison.loss(F.cross_entropy(net(x), y))
            optimizer.zero_grad()
            loss.backward()
            poison.after_backward()
            if guarded:
                guard.see_loss(loss)
                guard.step(optimizer, clip=1.0)
                told.append((guard.verdict(), differ(before, everything(net, optimizer))))
            else:
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
            schedule.step()
        return everything(net, optimizer), told, rates

    (bare, _, rates), (guarded, _, same_rates) = run(False), run(True)
    assert differ(bare, guarded) == []
    assert rates == same_rates
    assert len(set(rates)) == 6
    for fault in ("input", "loss", "grad", "buffer"):
        assert kept_out(run(True, fault)[1], fault)


# --- nanoVLM: a frozen backbone, groups with learning rates of their own

def test_a_frozen_backbone_and_groups_with_their_own_lr():
    def run(guarded, fault=""):
        net = network()
        for p in net[1].parameters():
            p.requires_grad_(False)
        optimizer = AdamW([{"params": net[1].parameters(), "lr": 5e-5}, {"params": net[2].parameters(), "lr": 1e-3},
                           {"params": net[4].parameters(), "lr": 1e-2}])
        poison, told = Poison(net, fault), []
        guard = Guard(net, num_classes=10, lag=False)
        for step, (x, y) in enumerate(batches(5)):
            before = everything(net, optimizer)
            x, y = poison(step, x, y)
            batch = {"images": x, "labels": y, "image_id": torch.full((8,), 139)}
            if guarded:
                guard.open()
                batch = guard.see_batch(batch)
                assert batch["image_id"] is not None and (batch["image_id"] == 139).all()
            loss = poison.loss(F.cross_entropy(net(batch["images"]), batch["labels"]))
            optimizer.zero_grad()
            loss.backward()
            poison.after_backward()
            if guarded:
                guard.see_loss(loss)
                guard.step(optimizer)
                told.append((guard.verdict(), differ(before, everything(net, optimizer))))
            else:
                optimizer.step()
        return everything(net, optimizer), told, net

    bare, _, net = run(False)
    guarded, _, _ = run(True)
    assert differ(bare, guarded) == []
    assert torch.equal(net[1].weight, network()[1].weight)
    for fault in ("input", "label", "loss", "grad", "buffer"):
        assert kept_out(run(True, fault)[1], fault)


# --- GAN: two networks, two optimizers

class Generator(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 12))


class Critic(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.LeakyReLU(), nn.Linear(16, 1))


def train_gan(guards, fault="", steps=5):
    """guards: 0, 1 for both networks, or 2. `fault`: where an inf enters at step 2."""
    torch.manual_seed(0)
    generator, critic = Generator(), Critic()
    opt_g, opt_c = (torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.5, 0.999)) for net in (generator, critic))
    one = Guard([generator, critic], lag=False) if guards == 1 else None
    guard_g, guard_c = (Guard(generator, lag=False), Guard(critic, lag=False)) if guards == 2 else (one, one)
    told = []
    for step in range(steps):
        g = torch.Generator().manual_seed(step)
        real, noise = torch.randn(8, 12, generator=g), torch.randn(8, 6, generator=g)
        if fault == "input" and step == 2:
            real[0, 0] = math.inf
        if fault == "noise" and step == 2:
            noise[0, 0] = math.inf
        before = everything(generator, critic, opt_g, opt_c)
        if guards:
            guard_c.open()
            guard_c.see_batch(real)
        fake = generator(noise)
        opt_c.zero_grad()
        loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
        loss.backward()
        if guards:
            guard_c.see_loss(loss)
        if guards == 2:
            guard_c.step(opt_c)
            told.append(guard_c.verdict())
            guard_g.open()
        elif not guards:
            opt_c.step()
        opt_g.zero_grad()
        loss = F.softplus(-critic(fake)).mean()
        loss.backward()
        if guards:
            guard_g.see_loss(loss)
            guard_g.step(opt_g if guards == 2 else [opt_c, opt_g])
            told.append(guard_g.verdict())
        else:
            opt_g.step()
        changed = differ(before, everything(generator, critic, opt_g, opt_c))
        told[-1:] = [(verdict, changed) for verdict in told[-1:]]
    return everything(generator, critic, opt_g, opt_c), told, (generator, critic)


def test_a_gan_under_one_guard_takes_both_steps_or_none():
    _, told, _ = train_gan(1)
    assert all(verdict.accepted for verdict, _ in told)
    for fault, flag in (("input", "input"), ("noise", "loss")):
        _, told, nets = train_gan(1, fault)
        assert kept_out(told, flag)
        assert check_state(nn.ModuleList(nets)) == []


@pytest.mark.filterwarnings("ignore:.*outside of guard.open")
def test_a_gan_with_a_guard_for_each_network_keeps_its_bits_and_does_not_reject_for_ever():
    bare, _, _ = train_gan(0)
    guarded, _, _ = train_gan(2)
    assert differ(bare, guarded) == []
    for fault in ("input", "noise"):
        _, told, nets = train_gan(2, fault, steps=8)
        verdicts = [v[0] if isinstance(v, tuple) else v for v in told]
        rejected = [i // 2 for i, v in enumerate(verdicts) if not v.accepted]
        assert rejected, fault
        assert set(rejected) <= {2, 3}, verdicts  # step 2, and never again after the last finite copy came back
        assert check_state(nn.ModuleList(nets)) == []


# --- cleanrl: several epochs over one rollout, clipping

def test_ppo_takes_several_epochs_over_one_rollout():
    def run(guarded, fault=""):
        torch.manual_seed(0)
        actor, value = nn.Linear(4, 3), nn.Linear(4, 1)
        agent = nn.ModuleList([actor, value])
        optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3, eps=1e-5)
        told, guard = [], Guard(agent, lag=False)
        g = torch.Generator().manual_seed(1)
        seen, taken, returns = torch.randn(32, 4, generator=g), torch.randint(0, 3, (32,), generator=g), torch.ones(32)
        if fault == "input":
            seen[0, 0] = math.inf
        with torch.no_grad():
            old = F.log_softmax(actor(seen.clamp(-9, 9)), -1).gather(1, taken[:, None])[:, 0]
        for step in range(4 * 3):
            rows = torch.arange(32).chunk(4)[step % 4]
            before = everything(agent, optimizer)
            if guarded:
                guard.open()
                guard.see_batch((seen[rows], returns[rows]))
            ratio = (F.log_softmax(actor(seen[rows]), -1).gather(1, taken[rows, None])[:, 0] - old[rows]).exp()
            loss = -torch.min(ratio, ratio.clamp(0.8, 1.2)).mean()
            loss = loss + (value(seen[rows])[:, 0] - returns[rows]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if guarded:
                guard.see_loss(loss)
                guard.step(optimizer, clip=0.5)
                told.append((guard.verdict(), differ(before, everything(agent, optimizer))))
            else:
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        return everything(agent, optimizer), told

    assert differ(run(False)[0], run(True)[0]) == []
    for step, (verdict, moved) in enumerate(run(True, "input")[1]):
        bad = step % 4 == 0  # the minibatch with the bad observation, once an epoch
        assert verdict.accepted is not bad
        assert bool(moved) is not bad
        assert ("input" in verdict.reasons) is bad


# --- dict batches, LSTM

class BatchEncoding(UserDict):
    """Like transformers': a Mapping that is no dict, with attributes of its own."""

    def __init__(self, data, encodings=None):
        super().__init__(data)
        self.encodings = encodings


@dataclasses.dataclass(frozen=True)
class Sample:
    pixels: torch.Tensor
    target: torch.Tensor
    image_id: torch.Tensor


def test_a_batch_of_any_class_is_looked_into_and_comes_back_as_the_same_class():
    guard = Guard(network(), num_classes=10, ignore_index=-1, lag=False)
    ids, bad = torch.tensor([139, 10_000]), torch.tensor([3, 10_000])
    nested = {"inputs": [torch.ones(2), {"label": bad}], "image_id": ids}
    batches = [BatchEncoding({"input_ids": ids, "labels": bad}, encodings="kept"), Sample(torch.ones(2), bad, ids),
               nested]
    got = []
    for batch in batches:
        guard.open()
        got.append(guard.see_batch(batch))
        assert guard.decide() == 1
        guard.close(True)
        assert guard.verdict().reasons == ("label",)
        assert type(got[-1]) is type(batch)
    assert got[0]["labels"].tolist() == got[1].target.tolist() == got[2]["inputs"][1]["label"].tolist() == [3, 0]
    assert got[0]["input_ids"].tolist() == got[1].image_id.tolist() == got[2]["image_id"].tolist() == [139, 10_000]
    assert got[0].encodings == "kept"
    assert bad.tolist() == [3, 10_000], "the caller's own batch stays raw, for a post-mortem"
    detection = [{"boxes": torch.ones(1, 4), "labels": bad, "image_id": ids}]
    guard.open()
    assert guard.see_batch(ids, detection)[0]["labels"].tolist() == [3, 0]
    guard.close(True)
    for clean in (BatchEncoding({"input_ids": ids, "labels": torch.tensor([-1, 9])}), (ids, {"image_id": ids})):
        guard.open()
        guard.see_batch(clean)
        assert guard.decide() == 0
        guard.close(False)
    for x in (BatchEncoding({"pixel_values": torch.tensor(math.nan)}), Sample(torch.tensor([math.inf]), bad, ids)):
        guard.open()
        guard.see_batch(x)
        guard.decide()
        guard.close(True)
        assert "input" in guard.verdict().reasons


def test_an_lstm_with_packed_sequences_and_a_loss_of_shape_one():
    def run(guarded, fault=""):
        torch.manual_seed(0)
        net = nn.ModuleDict({"lstm": nn.LSTM(5, 8, batch_first=True), "head": nn.Linear(8, 4)})
        optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3)
        told, guard = [], Guard(net, num_classes=4, lag=False)
        for step in range(5):
            g = torch.Generator().manual_seed(step)
            x, y = torch.randn(3, 6, 5, generator=g), torch.randint(0, 4, (3,), generator=g)
            if fault and step == 2:
                x[0, 0, 0] = math.inf
            before = everything(net, optimizer)
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([6, 4, 2]), batch_first=True)
            if guarded:
                guard.open()
                y = guard.see_batch(packed, y)
            _, (h, _) = net["lstm"](packed)
            loss = F.cross_entropy(net["head"](h[-1]), y).reshape(1)
            optimizer.zero_grad()
            loss.backward()
            if guarded:
                guard.see_loss(loss)
                guard.step(optimizer)
                told.append((guard.verdict(), differ(before, everything(net, optimizer))))
            else:
                optimizer.step()
        return everything(net, optimizer), told

    assert differ(run(False)[0], run(True)[0]) == []
    assert kept_out(run(True, "input")[1], "input")


# --- gradients of every kind

def test_sparse_complex_half_and_missing_gradients_are_measured():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 3, sparse=True)
            self.turn = nn.Parameter(torch.ones(3, dtype=torch.complex64))
            self.unused = nn.Parameter(torch.ones(2))

    for bad in (False, True):
        net = Odd()
        optimizers = [torch.optim.SparseAdam(net.table.parameters()), SGD([net.turn, net.unused], lr=0.1)]
        guard = Guard(net, lag=False)
        before = everything(net, *optimizers)
        guard.open()
        loss = (net.table(torch.tensor([1, 1, 2])) * net.turn).abs().sum()
        loss.backward()
        if bad:
            net.turn.grad[1] = complex(0, math.inf)
        dense = torch.cat([torch.view_as_real(net.turn.grad).flatten(), net.table.weight.grad.to_dense().flatten()])
        guard.step(optimizers)
        verdict = guard.verdict()
        assert verdict.accepted is not bad
        assert bool(differ(before, everything(net, *optimizers))) is not bad
        if not bad:
            assert verdict.stats["grad_norm"] == pytest.approx(float(dense.norm()), rel=1e-6)
    assert verdict.reasons == ("grad",)


def test_half_gradients_under_a_loss_scale_are_summed_in_fp32():
    p = nn.Parameter(torch.ones(64, dtype=torch.float16))
    optimizer, guard = AdamW([p], lr=1e-2, eps=1e-4, fused=True), Guard(nn.ParameterList([p]), lag=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    for step in range(3):
        guard.open()
        scaler.scale((p.float() * 2).sum()).backward()  # 32768 each: their norm, 262144, is more than fp16 holds
        before = p.detach().clone()
        if step == 2:
            p.grad[3] = math.inf
        guard.step(optimizer, scaler=scaler)
        scaler.update()
        optimizer.zero_grad()
        verdict = guard.verdict()
        assert verdict.accepted is (step < 2)
        assert torch.equal(before, p.detach()) is (step == 2)
        assert step == 2 or verdict.stats["grad_norm"] == 16.0
    assert scaler.get_scale() == 2.0**13


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_sharded_gradients_are_measured_as_a_whole(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        p = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
        q = nn.Parameter(torch.ones(2))
        for fused in (False, True):
            optimizer, guard = AdamW([p, q], fused=fused), Guard(nn.ParameterList([p, q]), lag=False)
            for bad in (False, True):
                p.grad = distribute_tensor(torch.full((4, 2), math.nan if bad else 3.0), mesh, [Shard(0)])
                q.grad = torch.full((2,), 6.0)
                before = p.full_tensor().detach().clone()
                guard.open()
                if fused and not bad:
                    with pytest.raises(RuntimeError):  # torch itself: one fused list of sharded and plain tensors
                        guard.step(optimizer)
                    guard.close(False)
                    break
                guard.step(optimizer)
                verdict = guard.verdict()
                assert verdict.accepted is not bad
                assert torch.equal(before, p.full_tensor().detach()) is bad
                assert bad or verdict.stats["grad_norm"] == pytest.approx(12.0, rel=1e-6)
    finally:
        torch.distributed.destroy_process_group()


# --- two ranks: a gradient that goes bad after the all-reduce, on one rank only

def two_ranks(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    out = {}
    for name, make in {"AdamW": lambda net: AdamW(net.parameters()),
                       "fused AdamW": lambda net: AdamW(net.parameters(), fused=True),
                       "RMSprop": lambda net: torch.optim.RMSprop(net.parameters())}.items():
        for clips in (False, True):
            net = network()
            model = nn.parallel.DistributedDataParallel(net)
            optimizer, guard = make(net), Guard(net, num_classes=10, lag=False)
            scaler, told = torch.amp.GradScaler("cpu", init_scale=64.0), []
            for step, (x, y) in enumerate(batches(4, seed=rank + 1)):
                before = everything(net, optimizer)
                guard.open()
                y = guard.see_batch(x, y)
                loss = F.cross_entropy(model(x), y)
                guard.see_loss(loss)
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                if rank == 1 and step == 2:  # a bit flips: the other rank's gradient is good
                    net[1].weight.grad[0, 0] = math.nan
                if clips:
                    scaler.unscale_(optimizer)
                guard.step(optimizer, scaler=scaler, clip=1.0 if clips else None)
                scaler.update()
                verdict = guard.verdict()
                moved = differ(before, everything(net, optimizer))
                told.append((verdict.accepted, verdict.reasons, verdict.rank, bool(moved), scaler.get_scale()))
            out[f"{name}{' clipped' if clips else ''}"] = told, [p.detach() for p in net.parameters()]
    torch.save(out, f"{folder}/rank{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)  # now and then one of gloo's threads aborts the interpreter at its exit; the results are on disk


def test_a_gradient_that_is_bad_on_one_rank_after_the_all_reduce_is_rejected_on_both(tmp_path):
    mp.spawn(two_ranks, (str(tmp_path),), nprocs=2)
    ranks = [torch.load(tmp_path / f"rank{r}.pt") for r in range(2)]
    assert len(ranks[0]) == 6
    for name, (told, weights) in ranks[0].items():
        other, same = ranks[1][name]
        assert told == other, name
        assert [t[0] for t in told] == [True, True, False, True]
        assert told[2] == (False, ("grad",), 1, False, 32.0)
        assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))


# --- what is refused, and what is found out

class Liar(torch.optim.RMSprop):
    """Says that it skips on the device, and does not."""

    def __init__(self, params):
        super().__init__(params)
        self._step_supports_amp_scaling = True


def test_an_optimizer_that_moves_weights_in_a_rejected_step_is_found_out_and_named():
    with pytest.raises(RuntimeError, match=r"Liar moved a weight .*_step_supports_amp_scaling = False"):
        classify(lambda net: Liar(net.parameters()), guarded=True, fault="label")

    def honest(net):
        optimizer = Liar(net.parameters())
        optimizer._step_supports_amp_scaling = False
        return optimizer

    assert kept_out(classify(honest, guarded=True, fault="label")[1], "label")


def test_a_closure_is_refused_in_a_sentence():
    net = network()
    guard, optimizer = Guard(net), torch.optim.LBFGS(net.parameters())
    guard.open()
    with pytest.raises(TypeError, match=r"LBFGS: its step\(closure\) computes new gradients"):
        guard.step(optimizer)


def test_a_forgotten_open_is_refused_in_a_sentence():
    net = network()
    guard, optimizer = Guard(net), SGD(net.parameters(), lr=0.1)
    x = torch.ones(2)
    for call in (lambda: guard.step(optimizer), lambda: guard.see_loss(x[0]), lambda: guard.see_batch(x)):
        with pytest.raises(RuntimeError, match=r"guard.open\(\) is missing"):
            call()
    with pytest.raises(ValueError, match="one number, and got shape"):
        guard.open()
        guard.see_loss(torch.ones(3))


@pytest.mark.parametrize("name", ["fused AdamW", "fused SGD", "ClippedAdamW"])
def test_an_optimizer_that_skips_by_itself_needs_no_read_after_its_first_step(name, monkeypatch):
    net = network()
    optimizer, guard, reads = OPTIMIZERS[name](net), Guard(net, num_classes=10), []
    monkeypatch.setattr(torch.Tensor, "__float__", lambda t: reads.append(guard.number) or t.item())
    for x, y in batches(4):
        guard.open()
        F.cross_entropy(net(x), guard.see_batch(x, y)).backward()
        guard.step(optimizer)
        optimizer.zero_grad()
    assert set(reads) == {0}
