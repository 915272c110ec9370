"""Plant a bad gradient, see nothing move; take good ones, compare with torch.optim, float64 and closed forms."""

from __future__ import annotations

import copy
import io
import math
import statistics

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from extras import muon
from extras.ema import EMA
from optim import ClippedAdamW, fused_works, param_groups, refusal, scaled_lr, total_norm, warmup_cosine

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
SHAPES = [(7, 5), (5,), (4, 3, 3, 3), (1,), (33,)]


def make_params(dtype=torch.float32, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=g).to(device, dtype).requires_grad_() for s in SHAPES]


def set_grads(params, seed, scale=1.0, size=1.0):
    """Gradients of std `size`, multiplied by the loss scale, in the dtype of the parameter."""
    g = torch.Generator().manual_seed(1000 + seed)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=g) * size * scale).to(p.device, p.dtype)


def snapshot(optimizer):
    """Every bit that a rejected step must leave alone."""
    parts = [*optimizer.model_params, *optimizer.params, optimizer.updates, optimizer.history, optimizer.lr_factor]
    for state in optimizer.state.values():
        parts += [state[k] for k in sorted(state)]
    return [p.detach().clone() for p in parts]


def identical(a, b):
    """Bit for bit: NaN equals the same NaN, 0.0 differs from -0.0."""
    return len(a) == len(b) and all(
        x.dtype == y.dtype and torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))
        for x, y in zip(a, b, strict=True)
    )


VARIANTS = {
    "fused": dict(fused=True),
    "foreach": dict(fused=False),
    "masters fp16": dict(masters=True, dtype=torch.float16),
    "masters bf16, foreach": dict(masters=True, dtype=torch.bfloat16, fused=False),
    "half state": dict(masters=False, dtype=torch.float16),
    "amsgrad": dict(amsgrad=True),
    "zclip": dict(zclip=2.5),
    "muon": dict(muon=True),
    "muon, masters": dict(muon=True, masters=True, dtype=torch.bfloat16),
    "muon, half state": dict(muon=True, masters=False, dtype=torch.float16),
}


def build(variant, device="cpu", **more):
    options = VARIANTS[variant] | more
    params = make_params(options.pop("dtype", torch.float32), device)
    if options.pop("muon", False):
        matrices = [p for p in params if p.ndim > 1]
        rest = [p for p in params if p.ndim < 2]
        groups = [{"params": matrices, "muon": True}, {"params": rest}]
        return ClippedAdamW(groups, lr=1e-2, matrix_step=muon.turn, **options)
    return ClippedAdamW(params, lr=1e-2, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("fused", [True, False])
def test_twenty_steps_equal_unscale_clip_and_adamw_in_float64(device, amsgrad, fused):
    params = make_params(device=device)
    exact = [p.detach().cpu().double().requires_grad_() for p in params]
    schedule = warmup_cosine(20, 5)
    ours = ClippedAdamW(params, lr=1e-2, weight_decay=0.1, amsgrad=amsgrad, fused=fused, schedule=schedule, clip=5.0)
    reference = torch.optim.AdamW(exact, lr=1e-2, weight_decay=0.1, amsgrad=amsgrad, foreach=False)
    clipped = 0
    for i in range(20):
        scale = 2.0 ** (16 - i % 3)
        set_grads(params, i, scale, size=1.0 if i % 2 else 0.1)
        for p, q in zip(params, exact, strict=True):
            q.grad = p.grad.cpu().double() / scale
        result = ours.step(grad_scale=torch.tensor(scale, device=device))
        norm = torch.nn.utils.clip_grad_norm_(exact, 5.0)
        reference.param_groups[0]["lr"] = 1e-2 * schedule[i].item()
        reference.step()
        assert result.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
        assert result.lr.item() == pytest.approx(1e-2 * schedule[i].item())
        clipped += result.clip_coef.item() < 1
    assert 5 < clipped < 15  # both sides of the threshold were taken
    for p, q in zip(params, exact, strict=True):
        torch.testing.assert_close(p.detach().cpu().double(), q.detach(), rtol=2e-6, atol=2e-6)


def test_the_gradient_left_after_an_accepted_step_is_the_clipped_one():
    params = make_params()
    set_grads(params, 0, scale=1024.0)
    ClippedAdamW(params, clip=0.5).step(grad_scale=torch.tensor(1024.0))
    assert total_norm([p.grad for p in params]).item() == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fault", ["nan", "inf", "skip flag", "nan flag", "square overflows", "scale 0"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_rejected_step_leaves_every_bit_as_it_was(variant, fault, device):
    optimizer = build(variant, device)
    if fault == "square overflows" and optimizer.model_params[0].dtype == torch.float16:
        pytest.skip("fp16 cannot hold 1e20")
    ema = EMA(optimizer.params)
    for i in range(3):
        set_grads(optimizer.model_params, i)
        ema.update(optimizer.params, optimizer.step().found_inf)
    before = snapshot(optimizer) + [a.clone() for a in ema.average] + [ema.updates.clone()]
    set_grads(optimizer.model_params, 9)
    planted = {"nan": math.nan, "inf": math.inf, "square overflows": 1e20}.get(fault)
    if planted:
        optimizer.model_params[2].grad.view(-1)[0] = planted
    skip = {"skip flag": 1.0, "nan flag": math.nan}.get(fault)
    scale = torch.tensor(0.0 if fault == "scale 0" else 1.0, device=device)
    result = optimizer.step(grad_scale=scale, skip=None if skip is None else torch.tensor(skip, device=device))
    ema.update(optimizer.params, result.found_inf)
    assert result.found_inf == 1 and result.clip_coef == 0
    assert identical(before, [*snapshot(optimizer), *ema.average, ema.updates])
    set_grads(optimizer.model_params, 10)
    assert optimizer.step(grad_scale=torch.ones((), device=device)).found_inf == 0
    assert optimizer.updates == 4
    assert all(torch.isfinite(p).all() for p in optimizer.model_params)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_with_rejected_steps_is_the_run_without_them(variant):
    schedule = warmup_cosine(10, 3)
    clean, dirty = build(variant, schedule=schedule), build(variant, schedule=schedule)
    for i in range(8):
        set_grads(clean.model_params, i)
        set_grads(dirty.model_params, i)
        dirty.model_params[1].grad[0] = math.nan
        dirty.step()
        set_grads(dirty.model_params, i)
        assert clean.step().lr == dirty.step().lr
    assert identical(snapshot(clean), snapshot(dirty))
    assert clean.updates == 8 and dirty.updates == 8


def test_the_first_step_of_all_may_be_rejected():
    optimizer = build("fused")
    before = [p.clone() for p in optimizer.params]
    set_grads(optimizer.params, 0, size=math.nan)
    optimizer.step()
    assert identical(before, optimizer.params)
    set_grads(optimizer.params, 1)
    optimizer.step()
    fresh = build("fused")
    set_grads(fresh.params, 1)
    fresh.step()
    assert identical(snapshot(fresh), snapshot(optimizer))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_updates_that_vanish_in_half_weights_survive_in_masters(dtype):
    torch.manual_seed(0)
    start, direction = torch.full((64,), 1.0), torch.randn(64).sign()

    def train(p, **options):
        optimizer = ClippedAdamW([p], lr=1e-5, weight_decay=0.0, clip=None, **options)
        for _ in range(1000):
            p.grad = direction.to(p.dtype)
            optimizer.step()
        return optimizer

    exact = start.clone()
    train(exact)
    half, plain = start.to(dtype), start.to(dtype)
    optimizer = train(half, masters=True)
    train(plain, masters=False)
    assert (exact - start).abs().min() > 9e-3  # 1,000 steps of 1e-5
    torch.testing.assert_close(optimizer.params[0], exact, rtol=1e-6, atol=1e-7)
    assert torch.equal(half, optimizer.params[0].to(dtype))  # the half copy is the rounded master
    moved = (half.float() - exact).abs().max()
    assert moved <= torch.finfo(dtype).eps / 2
    assert (plain.float() - exact).abs().max() > 9e-3  # every single update was rounded away


def test_masters_follow_fp32_through_a_real_problem():
    torch.manual_seed(0)
    x, y = torch.randn(64, 16), torch.randn(64, 4)
    exact = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    half = copy.deepcopy(exact).bfloat16()
    losses = {}
    for name, net, options in (("fp32", exact, {}), ("bf16", half, dict(masters=True))):
        optimizer = ClippedAdamW(net.parameters(), lr=1e-3, **options)
        for _ in range(300):
            loss = (net(x.to(next(net.parameters()).dtype)).float() - y).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses[name] = loss.item()
    assert losses["fp32"] < 0.8
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.05)


def test_a_parameter_without_a_gradient_is_left_alone():
    for variant in ("fused", "masters fp16", "muon"):
        optimizer = build(variant)
        set_grads(optimizer.model_params, 0)
        optimizer.step()
        before = [p.clone() for p in optimizer.model_params]
        set_grads(optimizer.model_params, 1)
        optimizer.model_params[0].grad = optimizer.model_params[1].grad = None
        optimizer.step()
        moved = [not torch.equal(a, b) for a, b in zip(before, optimizer.model_params, strict=True)]
        assert moved == [False, False, True, True, True], variant
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="backward"):
        optimizer.step()


def test_a_gradient_of_another_memory_layout_still_meets_its_own_weight():
    w, g = torch.randn(4, 3, 5, 5), torch.randn(4, 3, 5, 5)
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        p = w.clone().to(memory_format=layout).requires_grad_()
        p.grad = g.clone()
        ClippedAdamW([p]).step()
        results.append(p.detach().contiguous())
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_norm_is_accumulated_in_fp32_and_exact_over_large_tensors(dtype, device):
    tensors = [torch.randn(2500, 2000).mul_(100).to(device, dtype), torch.randn(64, 64, 3, 3).to(device, dtype)]
    tensors.append(torch.randn(32, 64, 9, 9).to(device, dtype).to(memory_format=torch.channels_last))
    exact = math.sqrt(sum(t.double().square().sum().item() for t in tensors))
    assert exact > 65504  # an fp16 norm would be inf
    assert total_norm(tensors).item() == pytest.approx(exact, rel=3e-6)


def test_the_schedule_has_its_closed_form_and_its_end_goes_on():
    s = warmup_cosine(100, 10, final=0.1)
    assert s.dtype == torch.float32 and len(s) == 101
    assert s[0].item() == pytest.approx(0.1) and s[9].item() == 1 and s[10].item() == 1
    assert s[55].item() == pytest.approx(0.55) and s[100].item() == pytest.approx(0.1)
    assert warmup_cosine(100, 10, 0.2, "linear")[55].item() == pytest.approx(0.6)
    assert warmup_cosine(100, 10, kind="constant")[[10, 55, 100]].tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="cosine, linear, constant"):
        warmup_cosine(1, kind="step")
    params = make_params()
    optimizer = ClippedAdamW(params, lr=1.0, schedule=warmup_cosine(2, final=0.25))
    lrs = []
    for i in range(5):
        set_grads(params, i)
        lrs.append(optimizer.step().lr.item())
    assert lrs == pytest.approx([1, 0.625, 0.25, 0.25, 0.25])
    optimizer.lr_factor.mul_(0.5)
    set_grads(params, 5)
    assert optimizer.step().lr.item() == pytest.approx(0.125)


def test_lr_scaling_says_what_it_does():
    lr, sentence = scaled_lr(1e-3, 1024, 256)
    assert lr == pytest.approx(2e-3) and "sqrt" in sentence and "1024 / 256" in sentence


class Scan(nn.Module):
    def __init__(self):
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(4, 8))
        self.proj = nn.Linear(4, 8)
        self.norm = nn.LayerNorm((2, 4))

    def no_weight_decay(self):
        return {"A_log"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.pos = nn.Parameter(torch.zeros(1, 3, 4))
        self.block = Scan()
        self.conv = nn.Conv2d(3, 4, 3)
        self.frozen = nn.Parameter(torch.zeros(2, 2), requires_grad=False)


def test_groups_by_shape_by_type_by_pattern_and_by_the_models_own_list():
    net = Net()
    groups = param_groups(net, 0.1, no_decay=["pos"], lr_scale={"block.*": 0.5}, muon=["block.proj*", "conv*"])
    names = {id(p): n for n, p in net.named_parameters()}
    found = {g["name"]: {names[id(p)] for p in g["params"]} for g in groups}
    assert found == {
        "no_decay": {"embed.weight", "pos", "conv.bias"},
        "no_decay lr*0.5": {"block.A_log", "block.proj.bias", "block.norm.weight", "block.norm.bias"},
        "muon lr*0.5": {"block.proj.weight"},
        "muon": {"conv.weight"},
    }
    assert all(g["weight_decay"] == (0.1 if g["name"].startswith("decay") else 0.0) for g in groups)
    wrapped = param_groups(nn.Sequential(net))  # DDP prefixes names like this; without the pattern only "pos" decays
    assert sum(len(g["params"]) for g in wrapped if g["weight_decay"] == 0) == 6
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer = ClippedAdamW(groups, lr=1e-2, matrix_step=muon.turn)
    optimizer.step()
    assert {g["name"]: round(g["lr"], 6) for g in optimizer.param_groups}["muon lr*0.5"] == 0.005


@pytest.mark.parametrize("shape", [(64, 32), (8, 12, 3, 3)])
def test_muon_turns_a_matrix_by_the_learning_rates_angle_towards_torchs_direction(shape):
    torch.manual_seed(0)
    w = torch.randn(shape)
    start, direction = w.clone(), torch.zeros(len(w), w[0].numel())
    optimizer = ClippedAdamW([{"params": [w], "muon": True}], lr=1e-3, clip=None, matrix_step=muon.turn)
    torchs = torch.optim.Muon([direction], lr=1.0, weight_decay=0.0)
    for _ in range(3):
        before = w.clone()
        w.grad = torch.randn(shape)
        direction.zero_().grad = w.grad.flatten(1)
        optimizer.step()
        torchs.step()
        moved = before + 1e-2 * start.norm() / math.sqrt(len(w)) * direction.view(shape)
        torch.testing.assert_close(w, moved * start.norm() / moved.norm(), rtol=1e-4, atol=1e-5)
        angle = torch.cosine_similarity(before.flatten().double(), w.flatten().double(), dim=0).acos()
        assert angle.item() == pytest.approx(1e-2, rel=0.3)  # five Newton-Schulz steps reach about 0.7 .. 1.2


def test_muon_gets_no_matrix_whose_norm_is_nothing_to_keep():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    nn.init.zeros_(net[1].weight)
    groups = param_groups(net, muon=["*"])
    assert {g["name"]: len(g["params"]) for g in groups} == {"muon": 1, "no_decay": 2, "decay": 1}
    with pytest.raises(ValueError, match="all zero"):
        ClippedAdamW([{"params": [net[1].weight], "muon": True}], matrix_step=muon.turn)
    for shape in [(3,), ()]:
        with pytest.raises(ValueError, match="no matrix"):
            ClippedAdamW([{"params": [torch.ones(shape)], "muon": True}], matrix_step=muon.turn)
    with pytest.raises(ValueError, match="matrix_step="):
        ClippedAdamW([{"params": [net[0].weight], "muon": True}])


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_zclip_statistics_take_no_nan_and_a_spike_is_cut_to_the_papers_value(poison):
    torch.manual_seed(0)
    p = torch.zeros(1)
    optimizer = ClippedAdamW([p], clip=None, zclip=2.5)
    norms = (1 + 0.1 * torch.randn(25)).abs().tolist()
    for n in norms:
        p.grad = torch.tensor([n])
        assert optimizer.step().clip_coef == 1  # warm-up: nothing is clipped
        p.grad = torch.tensor([poison])
        optimizer.step()
    mean, std = statistics.fmean(norms), statistics.pstdev(norms)
    assert optimizer.history.tolist() == pytest.approx([25, mean, std**2], rel=1e-4)
    p.grad = torch.tensor([10.0])
    z = (10 - mean) / std
    cut = mean + std * 2.5**2 / z
    assert optimizer.step().clip_coef.item() == pytest.approx(cut / 10, rel=1e-4)
    assert optimizer.history[1].item() == pytest.approx(mean + (cut - mean) / 26, rel=1e-4)  # the cut value entered


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_figures_of_each_tensor_equal_those_computed_in_float64_and_measuring_changes_no_bit(variant):
    plain, measured = build(variant), build(variant)
    assert measured.statistics() == {}
    for i in range(3):
        for optimizer in (plain, measured):
            set_grads(optimizer.model_params, i, scale=8.0)
            optimizer.model_params[3].grad = None if i == 1 else optimizer.model_params[3].grad
        params, weights = measured.model_params, measured.params
        grads = [None if p.grad is None else p.grad.double().norm().item() / 8 for p in params]
        old = [t.detach().double() for t in weights]
        plain.step(grad_scale=torch.tensor(8.0))
        measured.step(grad_scale=torch.tensor(8.0), measure=True)
        found = measured.statistics(("abcde"[i], p) for i, p in enumerate(params) if i != 4)
        assert set(found) == {"a", "b", "c", "parameter 3" if i == 1 else "parameter 4"} | ({"d"} if i != 1 else set())
        for name, grad, before, t in zip([*"abcd", "parameter 4"], grads, old, weights, strict=True):
            if grad is not None:
                size, update = before.norm().item(), (t.detach().double() - before).norm().item()
                values = found[name if i != 1 or name != "parameter 4" else "parameter 3"]
                assert values["grad_norm"] == pytest.approx(grad, rel=1e-4)
                assert values["weight_norm"] == pytest.approx(size, rel=1e-4)
                assert values["update_ratio"] == pytest.approx(update / size, rel=2e-3) and update > 0
    assert identical(snapshot(plain), snapshot(measured))


def test_a_rejected_step_shows_which_gradient_was_bad_and_that_no_weight_moved():
    optimizer = build("fused")
    set_grads(optimizer.model_params, 0)
    optimizer.model_params[2].grad.view(-1)[5] = math.inf
    optimizer.step(measure=True)
    figures = [*optimizer.statistics().values()]
    assert [math.isfinite(f["grad_norm"]) for f in figures] == [True, True, False, True, True]
    assert all(f["update_ratio"] == 0 and f["weight_norm"] > 0 for f in figures)


class Operations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("number", [5, 50])
@pytest.mark.parametrize(("options", "most"), [({}, 22), (dict(clip=None), 19), (dict(masters=True), 24)])
def test_a_step_costs_few_operations_however_many_tensors_and_measuring_costs_the_next_step_none(
        options, most, number):
    dtype = torch.bfloat16 if "masters" in options else torch.float32
    params = [torch.randn(3, 3).to(dtype).requires_grad_() for _ in range(number)]
    optimizer = ClippedAdamW(params, **options)
    counts = []
    for i in range(4):
        for p in params:
            p.grad = torch.ones_like(p)
        with Operations() as seen:
            optimizer.step(measure=i == 2)
        counts.append(seen.count)
    assert counts[1] == counts[3] <= most < counts[2], counts


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_resumed_run_is_bit_identical(variant):
    schedule = warmup_cosine(20, 3)
    straight = build(variant, schedule=schedule)
    for i in range(10):
        if i == 5:
            file = io.BytesIO()
            torch.save([straight.state_dict(), straight.model_params], file)
        set_grads(straight.model_params, i)
        straight.step()
    file.seek(0)
    state, weights = torch.load(file, weights_only=True)
    resumed = build(variant, schedule=schedule)
    with torch.no_grad():
        for p, w in zip(resumed.model_params, weights, strict=True):
            p.copy_(w)
    resumed.load_state_dict(state)
    kept = copy.deepcopy(state)
    for i in range(5, 10):
        set_grads(resumed.model_params, i)
        resumed.step()
    assert identical(snapshot(straight), snapshot(resumed))
    for name, saved in kept["state"].items():  # loading copied: the caller's state did not train on
        assert all(torch.equal(saved[k], state["state"][name][k]) for k in saved)


def test_half_or_foreign_masters_are_refused():
    optimizer = build("masters fp16")
    state = optimizer.state_dict()
    assert {m.dtype for m in state["masters"]} == {torch.float32}
    with pytest.raises(ValueError, match="half"):
        optimizer.load_state_dict(state | {"masters": [m.half() for m in state["masters"]]})
    with pytest.raises(ValueError, match="do not fit"):
        optimizer.load_state_dict(state | {"masters": state["masters"][:-1]})


@pytest.mark.parametrize(
    ("dtype", "options", "words"),
    [
        (torch.float16, {}, "eps=1e-08 is exactly 0"),
        (torch.bfloat16, {}, "never decays with beta2=0.999"),
        (torch.bfloat16, {"betas": (0.9, 0.99)}, "lose every update"),
        (torch.float16, {"eps": 1e-4}, "lose every update"),
        (torch.float32, {"eps": 0.0}, "eps=0 is exactly 0"),
    ],
)
def test_the_traps_are_refused_in_one_sentence(dtype, options, words):
    with pytest.raises(ValueError, match=words) as caught:
        ClippedAdamW(make_params(dtype), **options)
    assert "\n" not in str(caught.value)
    if dtype != torch.float32:
        assert "NO, half state" in ClippedAdamW(make_params(dtype), masters=False, **options).description
        assert "yes, 5 tensors" in ClippedAdamW(make_params(dtype), masters=True, **options).description
    for nothing in ([], [{"params": []}]):
        with pytest.raises(ValueError, match=r"no parameters|empty parameter list"):
            ClippedAdamW(nothing)


@pytest.mark.parametrize("kind", [dict(fused=True), dict(foreach=False)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_beta2_limit_is_where_torchs_adamw_stops_decaying(dtype, kind):
    unit = torch.finfo(dtype).eps
    limit = 1 - unit / (2 + 2 * unit)
    for beta2, refused in ((1 - (1 - limit) * 1.001, False), (1 - (1 - limit) * 0.999, True)):
        v = (1 + torch.arange(round(1 / unit)) * unit).to(dtype)  # every number of [1, 2)
        p = torch.zeros_like(v)
        p.grad = torch.zeros_like(v)
        torchs = torch.optim.AdamW([p], lr=0.0, betas=(0.9, beta2), eps=1.0, **kind)
        torchs.step()
        torchs.state[p]["exp_avg_sq"].copy_(v)
        torchs.step()
        stuck = (torchs.state[p]["exp_avg_sq"] >= v).any().item()
        assert stuck == refused == ("never decays" in refusal(dtype, 1.0, beta2)), (dtype, beta2)


@pytest.mark.parametrize("path", ["host", "device"])
def test_ema_has_its_closed_form_and_survives_nan_weights(path):
    p = torch.zeros(3)
    ema = EMA([p], decay=0.5)
    if path == "device":  # the GPU's path, which fused SGD on the CPU can run too
        ema.fused, ema._sgd = True, torch.optim.SGD(ema.average, lr=1.0, fused=True)
    want = torch.zeros(3)
    for i in range(10):
        p += 1
        ema.update([p], torch.zeros(()))
        decay = min(0.5, (1 + i) / (10 + i))
        want = decay * want + (1 - decay) * p
    torch.testing.assert_close(ema.average[0], want)
    before = [ema.average[0].clone(), ema.updates.clone()]
    ema.update([p * math.nan], torch.ones(()))
    assert identical(before, [ema.average[0], ema.updates])
    net = nn.Linear(3, 1, bias=False).half()
    old = net.weight.detach().clone()
    with pytest.raises(RuntimeError, match="planted"), ema.swap([net.weight.view(3)]):
        assert torch.equal(net.weight[0], ema.average[0].half())
        raise RuntimeError("planted")
    assert identical([old], [net.weight.detach()])
    other = EMA([torch.ones(3)])
    other.load_state_dict(copy.deepcopy(ema.state_dict()))
    assert identical(ema.average, other.average) and other.updates == 10
    with pytest.raises(ValueError, match="other parameters"):
        EMA([torch.ones(4)]).load_state_dict(ema.state_dict())


def test_the_description_says_what_runs():
    assert fused_works(torch.zeros(1))
    assert build("fused").description == "fused AdamW, 5 tensors, master weights: no, clip 1.0"
    assert "one host sync" in build("foreach").description
    assert "Muon, 2 matrices" in build("muon").description and "zclip 2.5" in build("zclip").description


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: the CPU has nothing to synchronise with")
@pytest.mark.parametrize("variant", [v for v in VARIANTS if "foreach" not in v])
def test_a_step_never_asks_the_gpu_a_question(variant):
    optimizer = build(variant, "cuda", schedule=warmup_cosine(10, 2))
    ema = EMA(optimizer.params)
    scale, skip = torch.tensor(2.0, device="cuda"), torch.zeros((), device="cuda")
    for i in range(4):
        set_grads(optimizer.model_params, i, size=math.nan if i == 2 else 1.0)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if i else "default")  # the first step may allocate and load kernels
        try:
            result = optimizer.step(grad_scale=scale, skip=skip, measure=i == 3)
            ema.update(optimizer.params, result.found_inf)
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert optimizer.updates == 3


def test_half_moments_survive_a_checkpoint_bit_for_bit():
    def net():
        torch.manual_seed(0)
        return torch.nn.Linear(8, 8).half()

    nets = net(), net()
    optimizers = [ClippedAdamW(n.parameters(), 1e-3, eps=1e-4, masters=False) for n in nets]
    gradients = [torch.randn(8, 8).half() for _ in range(6)]

    def steps(which, some):
        for g in some:
            for p in nets[which].parameters():
                p.grad = g[: len(p)].clone() if p.ndim == 2 else g[0].clone()
            optimizers[which].step()

    steps(0, gradients[:3])
    nets[1].load_state_dict(nets[0].state_dict())
    state = optimizers[0].state_dict()
    assert state["state"][0]["exp_avg"].dtype == torch.float32
    optimizers[1].load_state_dict(state)
    for which in (0, 1):
        steps(which, gradients[3:])
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(a, b) and optimizers[1].state[b]["exp_avg"].dtype == torch.float16


# --- as a torch.optim.Optimizer

def net_and_batch(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(16, 6), torch.randn(16, 3)


def backward(net, x, y, scale=1.0):
    dtype = next(net.parameters()).dtype
    loss = (net(x.to(dtype)).float() - y).square().mean() * scale
    loss.backward()
    return loss


S = torch.optim.lr_scheduler
SCHEDULERS = {
    "LambdaLR": lambda o: S.LambdaLR(o, lambda i: 1 / (1 + i)),
    "LambdaLR, one each": lambda o: S.LambdaLR(o, [lambda i: 1 / (1 + i), lambda i: 0.9**i]),
    "MultiplicativeLR": lambda o: S.MultiplicativeLR(o, lambda i: 0.9),
    "StepLR": lambda o: S.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: S.MultiStepLR(o, [2, 4], 0.5),
    "ConstantLR": lambda o: S.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: S.LinearLR(o, 0.1, total_iters=5),
    "ExponentialLR": lambda o: S.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: S.PolynomialLR(o, 6),
    "CosineAnnealingLR": lambda o: S.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: S.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: S.CyclicLR(o, 1e-4, 1e-2, 3),
    "OneCycleLR": lambda o: S.OneCycleLR(o, 1e-2, 8),
    "SequentialLR": lambda o: S.SequentialLR(o, [S.LinearLR(o, 0.1, total_iters=2), S.ExponentialLR(o, 0.9)], [2]),
    "ChainedScheduler": lambda o: S.ChainedScheduler([S.ExponentialLR(o, 0.9), S.ConstantLR(o, 0.5, 3)]),
    "ReduceLROnPlateau": lambda o: S.ReduceLROnPlateau(o, patience=0),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 1e-4, 3),
}


def two_groups(params):
    return [{"params": params[:2]}, {"params": params[2:], "lr": 2.0**-8, "betas": (0.8, 0.99), "weight_decay": 0.3}]


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_of_torch_moves_it_as_it_moves_torchs_adamw(name, tensor):
    ours, theirs = make_params(), make_params()
    lr = torch.tensor(2.0**-7) if tensor else 2.0**-7
    a = ClippedAdamW(two_groups(ours), copy.deepcopy(lr), clip=None)
    b = torch.optim.AdamW(two_groups(theirs), copy.deepcopy(lr), fused=True)
    schedulers = [SCHEDULERS[name](o) for o in (a, b)]
    rates = set()
    for i in range(7):
        for params, o, scheduler in zip((ours, theirs), (a, b), schedulers, strict=True):
            set_grads(params, i)
            o.step()
            scheduler.step(*[1.0] * (name == "ReduceLROnPlateau"))
        rates.add(float(a.param_groups[0]["lr"]))
        assert [float(g["lr"]) for g in a.param_groups] == [float(g["lr"]) for g in b.param_groups]
        assert [g["betas"] for g in a.param_groups] == [g["betas"] for g in b.param_groups]
    assert len(rates) > 1  # the scheduler moved
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)  # ours rounds the learning rate to fp32


@pytest.mark.parametrize("make", [*SCHEDULERS.values(), lambda o: o.param_groups[0].update(lr=0.5)])
def test_a_schedule_and_a_scheduler_or_a_hand_set_lr_are_refused_together(make):
    params = make_params()
    optimizer = ClippedAdamW(two_groups(params), 1e-2, schedule=warmup_cosine(10, 2))
    set_grads(params, 0)
    optimizer.step()
    scheduler = make(optimizer)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="two owners"):
        for i in range(12):
            set_grads(params, i)
            optimizer.step()
            scheduler.step(1.0)  # ReduceLROnPlateau speaks at the second plateau
    if not isinstance(scheduler, S.ReduceLROnPlateau):
        assert identical(before, snapshot(optimizer))


@pytest.mark.parametrize("lr", [2.0**-5, torch.tensor(2.0**-5), torch.tensor([2.0**-5], dtype=torch.float64)])
def test_a_hand_set_lr_counts(lr):
    ours, theirs = make_params(), make_params()
    a, b = ClippedAdamW(ours, clip=None), torch.optim.AdamW(theirs, fused=True)
    for i in range(3):
        if i == 1:
            a.param_groups[0]["lr"], b.param_groups[0]["lr"] = lr, 2.0**-5
        if i == 2:
            a.param_groups[0]["lr"] = b.param_groups[0]["lr"] = 0.0
            before = [p.detach().clone() for p in ours]
        set_grads(ours, i)
        set_grads(theirs, i)
        a.step()
        b.step()
    assert identical(before, [p.detach() for p in ours])
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_generators_pairs_and_one_group_after_another_train_as_torchs_adamw_does():
    def forms(net):
        a, b = net[0], net[2]
        yield [{"params": a.parameters()}, {"params": b.parameters(), "lr": 1e-2}]
        yield iter([{"params": iter([*a.parameters(), *b.parameters()])}])
        yield net.named_parameters()
        yield net.parameters()

    for form in range(4):
        results = []
        for build in (lambda p: ClippedAdamW(p, clip=None), lambda p: torch.optim.AdamW(p, fused=True)):
            net, x, y = net_and_batch()
            optimizer = build([*forms(net)][form] if form else next(forms(net)))
            for _ in range(5):
                backward(net, x, y)
                optimizer.step()
                optimizer.zero_grad()
            results.append([p.detach() for p in net.parameters()])
        for p, q in zip(*results, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    start = [p.detach() for p in net_and_batch()[0].parameters()]
    assert all((p - q).abs().max() > 1e-3 for p, q in zip(start, results[0], strict=True))


def test_its_defaults_are_torchs():
    ours, theirs = ClippedAdamW(make_params()), torch.optim.AdamW(make_params())
    for key in ("lr", "betas", "eps", "weight_decay", "amsgrad"):
        assert ours.defaults[key] == theirs.defaults[key] == ours.param_groups[0][key]
    assert isinstance(ours, torch.optim.Optimizer) and "clips" in ClippedAdamW.__doc__.splitlines()[0]
    assert [id(p) for p in ours.param_groups[0]["params"]] == [id(p) for p in ours.model_params]


@pytest.mark.parametrize(("group", "words"), [
    ({"momentum": 0.9}, "unknown group key 'momentum'"),
    ({"maximize": True, "foreach": True}, "'foreach', 'maximize'"),
    ({"lr": -1.0}, "must be >= 0"),
    ({"betas": (0.9, 1.0)}, "betas in"),
    ({"eps": 0.0}, "eps=0 is exactly 0"),
])
def test_a_group_that_would_train_wrongly_is_refused_by_name_and_not_kept(group, words):
    p, q = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match=words):
        ClippedAdamW([{"params": [p], **group}])
    optimizer = ClippedAdamW([p])
    with pytest.raises(ValueError, match=words):
        optimizer.add_param_group({"params": [q], **group})
    assert len(optimizer.param_groups) == 1
    p.grad = torch.ones(3)
    optimizer.step()


def test_tied_frozen_and_doubled_parameters():
    net, x, y = net_and_batch()
    net.append(nn.Linear(3, 3))
    net.append(nn.Linear(3, 3))
    net[4].weight = net[3].weight  # tied: parameters() names it once
    for p in net[0].parameters():
        p.requires_grad_(False)
    optimizer = ClippedAdamW(net.parameters())
    before = [p.detach().clone() for p in net.parameters()]
    backward(net, x, y)
    optimizer.step()
    moved = [not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True)]
    assert moved == [False, False] + [True] * 5 and len(optimizer.state) == 5
    p = torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match="more than one parameter group"):
        ClippedAdamW([{"params": [p]}, {"params": [p]}])
    with pytest.warns(UserWarning, match="duplicate"), pytest.raises(ValueError, match="twice"):
        ClippedAdamW([p, p])


def test_a_frozen_half_backbone_is_no_reason_to_refuse_until_it_trains():
    net, _, _ = net_and_batch()
    net[0].half().requires_grad_(False)
    optimizer = ClippedAdamW(net.parameters())
    (net[2](torch.randn(4, 8)).sum()).backward()
    assert optimizer.step().found_inf == 0
    net[0].weight.grad = torch.ones_like(net[0].weight)
    with pytest.raises(ValueError, match="masters=True"):
        optimizer.step()


def test_what_is_not_supported_is_refused_in_one_sentence():
    embedding = nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    before = embedding.weight.detach().clone()
    with pytest.raises(ValueError, match=r"\(5, 3\) parameter is sparse"):
        ClippedAdamW(embedding.parameters()).step()
    assert torch.equal(before, embedding.weight)
    with pytest.raises(ValueError, match="complex"):
        ClippedAdamW([torch.zeros(3, dtype=torch.complex64)])
    with pytest.raises(ValueError, match="several devices"):
        ClippedAdamW([torch.zeros(3), torch.zeros(3, device="meta")])
    with pytest.raises(TypeError, match="iterable of Tensors"):
        ClippedAdamW(torch.zeros(3))


def test_sharded_parameters_are_refused_in_one_sentence(tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        p = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (1,)), [Shard(0)]).requires_grad_()
        with pytest.raises(ValueError, match="sharded"):
            ClippedAdamW([p])
        with pytest.raises(ValueError, match="sharded"):
            EMA([p])
    finally:
        dist.destroy_process_group()


def test_a_closure_is_called_with_gradients_on_and_its_loss_comes_back():
    net, x, y = net_and_batch()
    optimizer = ClippedAdamW(net.parameters(), lr=1e-2)

    def closure():
        optimizer.zero_grad()
        return backward(net, x, y)

    losses = [optimizer.step(closure).item() for _ in range(5)] + [optimizer.step(closure=closure).item()]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] and optimizer.updates == 6


def test_hooks_of_one_optimizer_and_of_all_fire_around_a_step():
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    net, x, y = net_and_batch()
    optimizer, calls = ClippedAdamW(net.parameters()), []
    updates = lambda tag: lambda o, args, kwargs: calls.append((tag, int(o.updates)))  # noqa: E731
    handles = [optimizer.register_step_pre_hook(updates("pre")), optimizer.register_step_post_hook(updates("post")),
               register_optimizer_step_pre_hook(updates("all pre")),
               register_optimizer_step_post_hook(updates("all post"))]
    backward(net, x, y)
    optimizer.step()
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert sorted(calls) == [("all post", 1), ("all pre", 0), ("post", 1), ("pre", 0)]


def test_zero_grad_drops_or_zeroes():
    net, x, y = net_and_batch()
    optimizer = ClippedAdamW(net.parameters())
    backward(net, x, y)
    optimizer.zero_grad(set_to_none=False)
    assert all((p.grad == 0).all() for p in net.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("variant", VARIANTS)
def test_deepcopy_and_pickle_train_on_bit_for_bit(variant):
    optimizer = build(variant, schedule=warmup_cosine(10, 2))
    optimizer.register_step_post_hook(lambda *_: None)  # a hook is not copied, torch's neither
    for i in range(3):
        set_grads(optimizer.model_params, i)
        optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer, file)
    file.seek(0)
    others = [copy.deepcopy(optimizer), torch.load(file, weights_only=False)]
    assert all(o.model_params[0] is not optimizer.model_params[0] for o in others)
    for i in range(3, 6):
        for o in (optimizer, *others):
            set_grads(o.model_params, i)
            o.step()
    assert all(identical(snapshot(optimizer), snapshot(o)) for o in others)


def test_a_group_added_later_trains_and_the_statistics_know_it():
    params = make_params()
    for options in ({}, {"schedule": warmup_cosine(10, 2)}):
        optimizer = ClippedAdamW(params[:2], lr=1e-2, **options)
        set_grads(params, 0)
        optimizer.step()
        optimizer.add_param_group({"params": iter(params[2:]), "lr": 1e-3, "name": "new"})
        before = [p.detach().clone() for p in params]
        result = optimizer.step(measure=True)
        assert all(not torch.equal(p, q) for p, q in zip(before, params, strict=True))
        assert optimizer.updates == 2 and optimizer.statistics()["parameter 4"]["weight_norm"] > 0
        rates = [float(g["lr"]) for g in optimizer.param_groups]
        assert rates[0] == pytest.approx(10 * rates[1]) and result.lr.item() == pytest.approx(rates[0])


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("kind", ["fused", "foreach"])
def test_checkpoints_go_to_torchs_adamw_and_back_bit_for_bit(kind, amsgrad):
    def theirs(params):
        return torch.optim.AdamW(two_groups(params), 2.0**-7, amsgrad=amsgrad, **{kind: True})

    def ours(params):
        return ClippedAdamW(two_groups(params), clip=None, fused=kind == "fused", amsgrad=amsgrad)

    def steps(optimizer, params, some):
        for i in some:
            set_grads(params, i)
            optimizer.step()

    straight = make_params()
    optimizer = theirs(straight)
    steps(optimizer, straight, range(9))
    params = make_params()
    first = theirs(params)
    steps(first, params, range(3))
    second = ours(params)
    second.load_state_dict(first.state_dict())
    assert second.updates == 3 and second.param_groups[0]["lr"] == 2.0**-7
    steps(second, params, range(3, 6))
    file = io.BytesIO()
    torch.save(second.torch_state_dict(), file)
    file.seek(0)
    third = theirs(params)
    third.load_state_dict(torch.load(file, weights_only=True))
    steps(third, params, range(6, 9))
    assert identical([p.detach() for p in straight], [p.detach() for p in params])
    for p, q in zip(straight, params, strict=True):
        assert all(torch.equal(optimizer.state[p][k], third.state[q][k]) for k in optimizer.state[p])
    back = optimizer.state_dict()["param_groups"][0]
    assert {k: v for k, v in third.state_dict()["param_groups"][0].items() if k in back} == back


def test_a_checkpoint_of_another_optimizer_or_other_parameters_changes_nothing():
    params = make_params()
    optimizer = ClippedAdamW(params)
    set_grads(params, 0)
    optimizer.step()
    before = snapshot(optimizer)
    others = {"sgd": torch.optim.SGD(params, 0.1, momentum=0.9), "ams": torch.optim.AdamW(params, amsgrad=True),
              "adam": torch.optim.Adam(params, weight_decay=0.1), "less": torch.optim.AdamW(params[:2]),
              "shape": torch.optim.AdamW([torch.zeros(1, requires_grad=True) for _ in params])}
    for o in others.values():
        for p in o.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        o.step()
    states = {name: o.state_dict() for name, o in others.items()}
    states["ams"]["param_groups"][0]["amsgrad"] = False
    for p, b in zip(params, before, strict=False):
        p.data.copy_(b)
    for state in [*states.values(), {"adamw": {}}]:
        with pytest.raises(ValueError, match="checkpoint"):
            optimizer.load_state_dict(state)
    assert identical(before, snapshot(optimizer))
    with pytest.raises(ValueError, match="no Muon"):
        build("muon").torch_state_dict()


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("variant", ["fused", "foreach", "masters fp16", "masters bf16, foreach", "muon"])
def test_gradscaler_steps_it_as_grad_scale_does_and_skips_what_overflows(variant, unscale):
    ours, theirs = build(variant), build(variant)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000)
    scale = 2.0**8
    if unscale and variant == "masters fp16":
        scaler.scale(torch.ones(()))
        set_grads(ours.model_params, 0)
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):  # torch's own sentence
            scaler.unscale_(ours)
        return
    for i in range(6):
        scaler.scale(torch.ones(()))
        for o in (ours, theirs):
            set_grads(o.model_params, i, scale, size=0.1)
            if i == 3:
                o.model_params[1].grad[0] = math.inf
        before = snapshot(ours)
        if unscale:
            scaler.unscale_(ours)
        result = scaler.step(ours)
        scaler.update()
        theirs.step(grad_scale=torch.tensor(scale))
        assert not hasattr(ours, "grad_scale") and not hasattr(ours, "found_inf")
        if i == 3:
            scale /= 2
            assert scaler.get_scale() == scale and result.found_inf == 1 and identical(before, snapshot(ours))
    assert ours.updates == 5 and identical(snapshot(ours), snapshot(theirs))


def test_a_flag_set_by_a_guard_rejects_too():
    optimizer = build("fused")
    set_grads(optimizer.params, 0)
    before = [p.detach().clone() for p in optimizer.params]
    optimizer.found_inf = torch.ones(())
    assert optimizer.step().found_inf == 1 and identical(before, [p.detach() for p in optimizer.params])


def test_an_lr_scale_that_nobody_applies_is_refused():
    p = torch.ones(3, requires_grad=True)
    p.grad = torch.ones(3)
    optimizer = ClippedAdamW([{"params": [p], "lr_scale": 0.5}])
    with pytest.raises(ValueError, match="nobody applied the lr_scale"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 1e-3 * optimizer.param_groups[0]["lr_scale"]
    assert optimizer.step().lr.item() == pytest.approx(5e-4)


def test_a_scheduler_of_timm_reads_lr_scale_and_moves_it():
    scheduler = pytest.importorskip("timm.scheduler")
    params = make_params()
    optimizer = ClippedAdamW([{"params": params[:2], "lr_scale": 0.5}, {"params": params[2:]}], lr=1e-2)
    cosine = scheduler.CosineLRScheduler(optimizer, t_initial=8, warmup_t=2, warmup_lr_init=1e-5)
    seen = []
    for i in range(8):
        set_grads(params, i)
        seen.append(optimizer.step().lr.item())
        cosine.step(i + 1)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * optimizer.param_groups[1]["lr"])
    assert seen[0] == pytest.approx(5e-6) and max(seen) < 5.1e-3 and seen[-1] < seen[3]


def test_a_scheduler_of_transformers_moves_it():
    transformers = pytest.importorskip("transformers")
    params = make_params()
    optimizer = ClippedAdamW(params, lr=1e-2)
    scheduler = transformers.get_cosine_schedule_with_warmup(optimizer, 2, 8)
    seen = []
    for i in range(8):
        set_grads(params, i)
        seen.append(optimizer.step().lr.item())
        scheduler.step()
    assert seen[:3] == pytest.approx([0, 5e-3, 1e-2]) and seen[-1] < 1e-3


@pytest.mark.parametrize("masters", [False, True])
def test_accelerate_makes_two_updates_where_two_are_asked(masters):
    accelerate = pytest.importorskip("accelerate")
    net, x, y = net_and_batch()
    net = net.bfloat16() if masters else net
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=4, cpu=True)
    plain = ClippedAdamW(net.parameters(), lr=1e-2, masters=masters or None)
    scheduler = S.LinearLR(plain, 0.1, total_iters=2)
    wrapped, optimizer, scheduler = accelerator.prepare(net, plain, scheduler)
    for _ in range(8):
        with accelerator.accumulate(wrapped):
            dtype = next(net.parameters()).dtype
            accelerator.backward((wrapped(x.to(dtype)).float() - y).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert plain.updates == 2 and type(optimizer).__name__ == "AcceleratedOptimizer"
    assert plain.param_groups[0]["lr"] == pytest.approx(1e-2)
