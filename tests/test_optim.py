"""Plant a bad gradient, see nothing move; take good ones, compare with torch.optim, float64 and closed forms."""

from __future__ import annotations

import copy
import io
import math
import statistics

import pytest
import torch
from torch import nn

import muon
from ema import EMA
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
    assert dirty.statistics()["rejected"] == 8 and dirty.statistics()["accepted"] == 0  # the first call started anew


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
    with pytest.raises(ValueError, match="matrix_step=muon.turn"):
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


def test_statistics_average_accepted_steps_and_count_rejected_ones():
    params = make_params()
    groups = [{"params": params[:2], "name": "a"}, {"params": params[2:], "name": "b"}]
    optimizer = ClippedAdamW(groups, lr=1e-2, clip=1.0)
    norms, ratios = [], []
    for i in range(4):
        set_grads(params, i)
        if i == 2:
            params[0].grad[0, 0] = math.inf
        grads = [p.grad.clone() for p in params]
        old = [p.detach().clone() for p in params]
        optimizer.step(measure=True)
        if i != 2:
            norms.append(math.sqrt(sum(g.square().sum().item() for g in grads)))
            a, b = (torch.cat([t.flatten() for t in ts]) for ts in (old[:2], [p.detach() for p in params[:2]]))
            ratios.append(((a - b).norm() / a.norm()).item())
    report = optimizer.statistics()
    assert report["accepted"] == 3 and report["rejected"] == 1
    assert report["grad_norm"] == pytest.approx(statistics.fmean(norms), rel=1e-5)
    assert report["grad_norm_clipped"] == pytest.approx(1.0, rel=1e-5)
    assert report["a/update_ratio"] == pytest.approx(statistics.fmean(ratios), rel=1e-4)
    assert report["b/param_norm"] > 0 and report["b/grad_norm"] > 0
    assert math.isnan(optimizer.statistics()["grad_norm"])  # nothing since: not 0


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
        with pytest.raises(ValueError, match="no parameters|empty parameter list"):
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
