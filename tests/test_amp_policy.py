"""The policy does what it says: each level is measured in a real step, each fault is planted and seen caught."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_policy
from amp_policy import (
    POLICIES,
    Capabilities,
    LossScaler,
    capabilities,
    choose_policy,
    refuse,
    self_test,
    set_tf32,
)
from fp32 import fp32_eval, keep_fp32, pinned

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"))
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
both_devices = pytest.mark.parametrize("device", ["cpu", CUDA])


def skip_emulated(device, dtype):
    if device == "cuda" and dtype is BF16 and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU only emulates bfloat16")


def policy_for(name, device="cpu"):
    return choose_policy(name, Capabilities(device))


@pytest.fixture(autouse=True)
def clean_switches():
    torch.manual_seed(0)
    yield
    set_tf32(False)
    torch.backends.cudnn.allow_tf32 = True  # torch's default
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cuda")


class Softmax(nn.Module):
    def forward(self, x):
        return F.softmax(x.float(), -1).to(x.dtype)  # an explicit island


class Net(nn.Module):
    """conv, BatchNorm, LayerNorm, softmax, linear; the call that the check of disagreement expects."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.ln = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.LayerNorm(8)
        self.softmax, self.fc = Softmax(), nn.Linear(8, 4)

    def forward(self, images, labels):
        self.label_dtype = labels.dtype
        x = F.relu(self.bn(self.conv(images))).flatten(2).mean(-1)
        logits = self.fc(self.softmax(self.ln(x)))
        rows = F.cross_entropy(logits.float(), labels, reduction="none")
        hard = labels if labels.ndim == 1 else labels.argmax(-1)
        return rows.mean(), {"loss": rows.detach(), "acc1": (logits.argmax(-1) == hard).float()}


def batch(device="cpu"):
    return torch.randn(6, 3, 6, 6, device=device), torch.arange(6, device=device) % 4


# ---------------------------------------------------------------------------------------------------------------------
# choosing


def never(device, dtype):
    raise AssertionError("the self-test was not needed here")


@pytest.mark.parametrize(
    ("caps", "fault", "name", "word"),
    [
        (Capabilities("cuda", "NVIDIA H200", (9, 0)), None, "bf16", "sm_90"),
        (Capabilities("cuda", "NVIDIA A100-SXM4-80GB", (8, 0)), None, "bf16", "sm_80"),
        (Capabilities("cuda", "Tesla T4", (7, 5)), "", "fp16", "self-test"),
        (Capabilities("cuda", "Tesla V100-SXM2-16GB", (7, 0)), "", "fp16", "loss scaling"),
        (Capabilities("cuda", "NVIDIA GeForce GTX 1660", (7, 5)), "the loss is off by nan", "fp32", "nan"),
        (Capabilities("cuda", "NVIDIA GeForce GTX 1080", (6, 1)), None, "fp32", "sm_61"),
        (Capabilities("cuda", "gfx942"), None, "bf16", "gfx942"),
        (Capabilities("cuda", "gfx1030"), None, "fp32", "gfx1030"),
        (Capabilities("mps", "arm64"), None, "fp32", "mps"),
        (Capabilities("cpu", "x86_64", cpu_bf16=True), None, "bf16", "natively"),
        (Capabilities("cpu", "x86_64"), None, "fp32", "cpu"),
    ],
    ids=lambda v: v.name if isinstance(v, Capabilities) else None,
)
def test_auto_is_a_pure_function_of_the_capabilities(monkeypatch, caps, fault, name, word):
    # the trap: with emulation this says True on a T4 and a V100, and auto must not have asked
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *a, **k: pytest.fail("asked the driver"))
    policy = choose_policy("auto", caps, never if fault is None else lambda device, dtype: fault)
    assert policy.name == name
    assert policy.device == caps.device
    assert word in str(policy) and str(policy).startswith(f"{name}: ")


def test_the_levels_are_frozen_data_with_six_different_meanings():
    rows = [POLICIES[n] for n in ("fp32", "tf32", "bf16", "fp16", "O2", "O3")]
    keys = ("dtype", "param_dtype", "autocasts", "scales", "tf32", "masters", "norms_fp32")
    assert len({tuple(getattr(p, k) for k in keys) for p in rows}) == 6
    assert POLICIES["O0"] is POLICIES["fp32"] and POLICIES["O1"] is POLICIES["fp16"]
    assert "experiment" in str(choose_policy("O3", Capabilities("cuda", "x", (9, 0))))
    with pytest.raises(AttributeError):
        rows[0].tf32 = True


def test_an_explicit_choice_is_obeyed_and_says_what_it_costs():
    t4 = Capabilities("cuda", "Tesla T4", (7, 5))
    assert "emulates" in str(choose_policy("bf16", t4, never))
    assert "no TF32" in str(choose_policy("tf32", t4, never))
    assert "emulates" not in str(choose_policy("bf16", Capabilities("cuda", "A100", (8, 0)), never))
    assert choose_policy("O1", t4, never).name == "fp16"
    with pytest.raises(ValueError, match=r"unknown precision 'half': choose from auto, fp32, tf32, bf16, fp16, O2, O3"):
        choose_policy("half", t4)


@pytest.mark.parametrize(
    ("machine", "avx512_bf16", "mkldnn", "native"),
    [
        ("x86_64", True, True, True),
        ("x86_64", False, True, False),  # Skylake: oneDNN says True, by emulation
        ("aarch64", False, True, True),  # Graviton 3
        ("aarch64", False, False, False),
        ("arm64", False, None, False),  # a build without the operator
    ],
)
def test_cpu_bf16_means_native_on_x86_and_arm(monkeypatch, machine, avx512_bf16, mkldnn, native):
    class Ops:
        if mkldnn is not None:
            _is_mkldnn_bf16_supported = staticmethod(lambda: mkldnn)

    monkeypatch.setattr(amp_policy.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16, raising=False)
    monkeypatch.setattr(torch.ops, "mkldnn", Ops, raising=False)
    assert capabilities("cpu").cpu_bf16 is native
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")
    if machine == "x86_64":
        assert capabilities("cpu").cpu_bf16 is False  # an attribute that a torch lacks is not an error


@both_devices
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_the_self_test_passes_sound_hardware(device, dtype):
    skip_emulated(device, dtype)
    state = torch.get_rng_state()
    assert self_test(device, dtype) == ""
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.5])
def test_the_self_test_catches_a_chip_whose_half_convolutions_are_wrong(monkeypatch, value):
    conv2d = F.conv2d

    def broken(x, *args, **kwargs):
        y = conv2d(x, *args, **kwargs)
        return y * value if y.dtype is F16 else y

    monkeypatch.setattr(amp_policy.F, "conv2d", broken)
    assert "off by" in self_test("cpu", F16)
    gtx = Capabilities("cuda", "GTX 1660", (7, 5))
    policy = choose_policy("auto", gtx, lambda device, dtype: self_test("cpu", dtype))
    assert policy.name == "fp32" and "off by" in policy.reason


# ---------------------------------------------------------------------------------------------------------------------
# the level table, measured

TABLE = {
    # level  conv   norm   gradient Adam  conv  linear island norm stats
    #        weight weight          state out   out    math
    "fp32": (F32, F32, F32, F32, F32, F32, F32, F32),
    "tf32": (F32, F32, F32, F32, F32, F32, F32, F32),
    "bf16": (F32, F32, F32, F32, BF16, BF16, F32, F32),
    "fp16": (F32, F32, F32, F32, F16, F16, F32, F32),
    "O2": (F16, F32, F16, F32, F16, F16, F32, F32),
    "O3": (F16, F16, F16, F16, F16, F16, F32, F16),
}


@both_devices
@pytest.mark.parametrize("name", TABLE)
def test_every_level_has_in_a_real_step_the_dtypes_it_promises(monkeypatch, device, name):
    policy, seen = policy_for(name, device), {}
    skip_emulated(device, policy.dtype)
    net = policy.prepare(Net().to(device))
    for part in ("conv", "fc"):
        getattr(net, part).register_forward_hook(lambda m, a, out, part=part: seen.update({part: out.dtype}))
    softmax, layer_norm = F.softmax, F.layer_norm
    monkeypatch.setattr(F, "softmax", lambda x, *a: seen.update(softmax=x.dtype) or softmax(x, *a))
    monkeypatch.setattr(F, "layer_norm", lambda x, *a: seen.update(ln=x.dtype) or layer_norm(x, *a))
    before = {n: p.detach().float().clone() for n, p in net.named_parameters()}
    scaler = LossScaler(device, init_scale=128.0, enabled=policy.scales)
    with policy.autocast():
        loss, _ = net(*batch(device))
    scaler.scale(loss).backward()
    params = list(net.parameters())
    targets = [p.detach().float() if policy.masters else p for p in params]
    if policy.masters:
        for t, p in zip(targets, params, strict=True):
            t.grad = p.grad.float() / scaler.scale_tensor
    optimizer = torch.optim.AdamW(targets, lr=1e-2, eps=1e-4)
    optimizer.step() if policy.masters else scaler.step(optimizer)
    with torch.no_grad():
        for p, t in zip(params, targets, strict=True):
            p.copy_(t)
    measured = (
        net.conv.weight.dtype, net.ln.weight.dtype, net.conv.weight.grad.dtype,
        optimizer.state[targets[0]]["exp_avg_sq"].dtype,
        seen["conv"], seen["fc"], seen["softmax"], net.bn.running_mean.dtype,
    )  # fmt: skip
    assert measured == TABLE[name]
    assert loss.dtype is F32 and net.label_dtype is torch.int64
    assert (net.bn.weight.dtype, net.bn.bias.dtype) == (net.ln.weight.dtype,) * 2
    if policy.norms_fp32 and not policy.autocasts:
        assert seen["ln"] is F32  # under autocast it depends on the device: see the table in the module's docstring
    assert all(p.isfinite().all() for p in params)
    assert any(not torch.equal(before[n], p.float()) for n, p in net.named_parameters())


@pytest.mark.parametrize("name", ["bf16", "fp16", "O2", "O3"])
@pytest.mark.parametrize("labels", [torch.full((6,), 3), torch.full((6, 4), 0.2501)], ids=["class", "soft"])
def test_labels_are_never_cast(name, labels):
    policy = policy_for(name)
    net = policy.prepare(Net())
    net.pos = nn.Parameter(torch.zeros(1))  # a root that owns parameters itself, like a ViT's class token
    policy.prepare(net)
    with policy.autocast():
        net(batch()[0], labels)
    assert net.label_dtype is labels.dtype


def test_prepare_leaves_wrappers_with_norm_in_their_name_and_float_buffers_alone():
    class PreNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.fn = nn.LayerNorm(4), nn.Linear(4, 4)
            self.register_buffer("table", torch.arange(3000.0))

        def forward(self, x):
            return self.fn(self.norm(x)) + self.table[2049]

    net = policy_for("O2").prepare(nn.Sequential(PreNorm(), nn.Linear(4, 4)))
    assert [net[0].norm.weight.dtype, net[0].fn.weight.dtype] == [F32, F16]
    assert pinned(net) == []  # the level pins its norms by itself: nothing to store for a resume at another level
    assert net[0].table.dtype is F32
    assert net(torch.randn(2, 4)).dtype is F16  # the fp32 sum is cast again at the door of the next layer
    assert policy_for("O3").prepare(PreNorm()).table.dtype is F16


@pytest.mark.parametrize(("name", "on"), [("fp32", False), ("tf32", True), ("bf16", False), ("O2", False)])
def test_prepare_sets_tf32_so_that_both_interfaces_and_inductor_can_read_it(name, on):
    set_tf32(not on)
    policy_for(name).prepare(nn.Linear(1, 1))
    assert torch.backends.cuda.matmul.allow_tf32 is on and torch.backends.cudnn.allow_tf32 is on
    for switch in (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn):
        assert (switch.fp32_precision == "tf32") is on


def test_tf32_off_is_off_under_a_global_tf32():
    torch.backends.fp32_precision = "tf32"
    try:
        set_tf32(False)
        assert torch.backends.cudnn.conv.fp32_precision == torch.backends.cuda.matmul.fp32_precision == "ieee"
    finally:
        torch.backends.fp32_precision = "none"


OPS = {  # the docstring's table: operation -> (on CUDA, on CPU) from half inputs; None is "as it comes"
    "linear": (lambda x: F.linear(x.float(), x.float()), "half", "half"),
    "matmul": (lambda x: x.float() @ x.float(), "half", "half"),
    "conv": (lambda x: F.conv1d(x.float()[None], x.float()[None]), "half", "half"),
    "sdpa": (lambda x: F.scaled_dot_product_attention(*[x.float()[None, None]] * 3), "half", "half"),
    "softmax": (lambda x: F.softmax(x, -1), "fp32", "half"),
    "log_softmax": (lambda x: F.log_softmax(x, -1), "fp32", "half"),
    "layer_norm": (lambda x: F.layer_norm(x, (4,)), "fp32", "half"),
    "group_norm": (lambda x: F.group_norm(x, 2), "fp32", "half"),
    "rms_norm": (lambda x: F.rms_norm(x, (4,)), "fp32", "half"),
    "exp": (torch.exp, "fp32", "half"),
    "pow": (lambda x: x.pow(3), "fp32", "half"),
    "sum": (torch.sum, "fp32", "half"),
    "norm": (torch.norm, "fp32", "half"),
    "logsumexp": (lambda x: torch.logsumexp(x, -1), "fp32", "half"),
    "cumsum": (lambda x: x.cumsum(-1), "fp32", "half"),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long, device=x.device)), "fp32", "fp32"),
    "mse": (lambda x: F.mse_loss(x, x), "fp32", "fp32"),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), "half", "half"),
    "mean": (torch.mean, "half", "half"),
    "gelu": (F.gelu, "half", "half"),
    "max_pool2d": (lambda x: F.max_pool2d(x[None, None], 2), "half", "half"),
    "cat": (lambda x: torch.cat([x, x.float()]), "fp32", "fp32"),
}


@both_devices
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_the_table_of_operations_in_the_docstring_is_true(device, dtype):
    skip_emulated(device, dtype)
    x = torch.rand(4, 4, device=device, dtype=dtype)
    wrong = []
    with torch.autocast(device, dtype=dtype):
        for name, (op, on_cuda, on_cpu) in OPS.items():
            if name == "rms_norm" and device == "cuda" and torch.torch_version.TorchVersion(torch.__version__) < "2.13":
                continue
            want = {"half": dtype, "fp32": F32}[on_cuda if device == "cuda" else on_cpu]
            wrong += [(name, op(x).dtype)] if op(x).dtype is not want else []
    assert wrong == []


# ---------------------------------------------------------------------------------------------------------------------
# loss scaling


def run_steps(scaler, factors, lr=0.1):
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], lr=lr)
    for factor in factors:
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return weight.detach()


def test_166_bad_steps_collapse_the_plain_scaler_and_not_ours():
    plain, ours = torch.amp.GradScaler("cpu"), LossScaler("cpu")
    run_steps(plain, [math.inf] * 165)
    assert plain.get_scale() == 2.0**-149
    factors = [math.inf] * 166 + [1.0]
    assert run_steps(torch.amp.GradScaler("cpu"), factors).isnan().all()
    weight = run_steps(ours, factors)
    assert ours.get_scale() == 1.0
    torch.testing.assert_close(weight, run_steps(torch.amp.GradScaler("cpu"), [1.0]))  # one clean AdamW step


def test_far_from_its_limits_it_is_the_plain_scaler():
    start = 2.0**90
    ours = LossScaler("cpu", init_scale=start, growth_interval=3, ceiling=2.0**120)
    scale, growth = torch.tensor(start), torch.tensor(0, dtype=torch.int32)
    for flag in (torch.rand(200) < 0.3).float():
        torch._amp_update_scale_(scale, growth, flag.clone(), 2.0, 0.5, 3)
        ours.update(flag)
        assert (ours.get_scale(), ours._get_growth_tracker()) == (scale.item(), growth.item())
    assert 1.0 < scale.item() < start


def test_floor_ceiling_and_hysteresis_table():
    scaler = LossScaler("cpu", init_scale=8.0, growth_interval=2, floor=2.0, ceiling=16.0, hysteresis=2)
    table = [(1, 8), (1, 4), (1, 2), (1, 2), (0, 2), (0, 4), (1, 4), (0, 4), (0, 8), (0, 8), (0, 16), (0, 16), (0, 16)]
    for bad, want in table:
        scaler.update(torch.tensor(float(bad)))
        assert scaler.get_scale() == want
    scaler.update(torch.tensor(1.0))
    scaler.update(torch.tensor(math.nan))  # a flag that is NaN is a rejection
    assert scaler.get_scale() == 8.0
    for limits in ({"floor": 0.5}, {"floor": 2.0**20}, {"ceiling": math.inf}):
        with pytest.raises(ValueError, match="needs 1 <= floor"):
            LossScaler("cpu", **limits)


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_a_corrupted_scale_starts_afresh_at_the_next_update(value):
    scaler = LossScaler("cpu")
    scaler.scale_tensor.fill_(value)
    scaler.update(torch.tensor(0.0))
    assert scaler.get_scale() == 2.0**16


def test_the_update_never_syncs():
    scaler = LossScaler("meta")  # a tensor without data: any .item() raises
    identity = scaler.scale_tensor
    for _ in range(3):
        scaler.update(torch.zeros((), device="meta"))
    assert scaler.scale_tensor is identity and scaler._patience.device.type == "meta"


def test_a_disabled_scaler_costs_nothing_and_answers_one():
    scaler = LossScaler("cpu", enabled=False)
    scaler.update(torch.tensor(1.0))
    assert scaler.scale_tensor.item() == 1.0 and scaler.scale_tensor is scaler.scale_tensor
    assert scaler.state_dict() == {}


def test_the_state_round_trips_also_before_the_first_use_and_from_a_plain_scaler():
    first = LossScaler("cpu", growth_interval=4, hysteresis=3)
    for bad in (0, 0, 0, 0, 1, 1, 0):
        first.update(torch.tensor(float(bad)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = LossScaler("cpu", growth_interval=4, hysteresis=3)
        second.load_state_dict(first.state_dict())
        used = LossScaler("cpu")
        used.update(torch.tensor(1.0))
        used.load_state_dict(torch.amp.GradScaler("cpu", init_scale=512.0).state_dict())
    assert second.state_dict() == first.state_dict() and used.get_scale() == 512.0
    for bad in (1, 1, 0, 0, 0, 0, 1):
        first.update(torch.tensor(float(bad)))
        second.update(torch.tensor(float(bad)))
        assert first.state_dict() == second.state_dict()


@pytest.mark.parametrize(
    ("enabled", "state", "note"),
    [
        (False, LossScaler("cpu").state_dict(), "dropped: this precision needs none"),  # fp16 resumed as bf16
        (True, {}, "missing: it starts at 65536"),  # bf16 resumed as fp16
        (True, {"loss_scale": 3}, "missing"),
        (True, LossScaler("cpu").state_dict() | {"scale": 0.0}, "is 0.0: it starts at 65536"),
        (True, LossScaler("cpu").state_dict() | {"scale": math.nan}, "is nan: it starts"),
    ],
)
def test_a_foreign_state_starts_cleanly_with_a_note(enabled, state, note):
    scaler = LossScaler("cpu", enabled=enabled)
    with pytest.warns(UserWarning, match=note):
        scaler.load_state_dict(state)
    assert scaler.scale_tensor.item() == (65536.0 if enabled else 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LossScaler("cpu", enabled=False).load_state_dict({})


# ---------------------------------------------------------------------------------------------------------------------
# refusals


@pytest.mark.parametrize(
    ("level", "dtype", "settings", "sentence"),
    [
        ("O3", F16, {"masters": False}, "eps=1e-08 is 0 in torch.float16"),
        ("bf16", BF16, {"masters": False}, "beta2=0.999 with bfloat16 state"),
        ("O2", F16, {"masters": False, "eps": 1e-4}, "O2 promises fp32 master weights"),
        ("fp16", F16, {"masters": False, "eps": 1e-4}, "loss scaling with fp16 gradients"),
        ("fp32", F32, {"eps": 0.0}, "eps=0 is 0"),
        ("fp32", F32, {"eps": math.nan}, "eps=nan"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(level, dtype, settings, sentence):
    params = [torch.zeros(1, dtype=dtype), torch.zeros(1)]
    with pytest.raises(ValueError, match=sentence) as error:
        refuse(POLICIES[level], params, **{"eps": 1e-8, "beta2": 0.999, "masters": False} | settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("level", list(TABLE))
def test_sound_settings_are_not_refused(level):
    net = policy_for(level).prepare(Net())
    refuse(POLICIES[level], net.parameters(), eps=1e-4 if level == "O3" else 1e-8, beta2=0.999, masters=level == "O2")


@pytest.mark.parametrize(("beta2", "decays"), [(0.996, True), (0.997, False), (0.999, False)])
def test_the_bound_on_beta2_is_where_bfloat16_stops_decaying(beta2, decays):
    v = torch.tensor(1.0, dtype=BF16)
    for _ in range(20000):
        v.mul_(beta2)
    assert (v.item() < 0.5) is decays


# ---------------------------------------------------------------------------------------------------------------------
# CUDA only


def fp32_errors():
    """Relative errors of an fp32 matmul and an fp32 convolution, against float64."""
    a, b = torch.randn(2, 512, 512, device="cuda")
    image, kernel = torch.randn(4, 64, 32, 32, device="cuda"), torch.randn(64, 64, 3, 3, device="cuda")
    want = (a.double() @ b.double(), F.conv2d(image.double(), kernel.double()))
    got = (a @ b, F.conv2d(image, kernel))
    return [float((g - w).norm() / w.norm()) for g, w in zip(got, want, strict=True)]


@needs_cuda
def test_tf32_on_and_off_are_measurably_different_and_fp32_eval_wins():
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this chip has no TF32")
    net = policy_for("tf32", "cuda").prepare(nn.Linear(1, 1).cuda())
    assert fp32_errors()[0] > 1e-4  # 10-bit mantissas; cuDNN may or may not pick a TF32 kernel for the convolution
    with fp32_eval(net):
        assert max(fp32_errors()) < 2e-5
    assert fp32_errors()[0] > 1e-4
    policy_for("fp32", "cuda").prepare(net)
    assert max(fp32_errors()) < 2e-5


@needs_cuda
def test_a_faked_t4_on_this_gpu_trains_in_fp16_with_scaling():
    policy = choose_policy("auto", Capabilities("cuda", "Tesla T4", (7, 5)))
    assert policy.name == "fp16" and policy.scales
    net, (x, y) = policy.prepare(Net().cuda()), batch("cuda")
    optimizer, scaler = torch.optim.AdamW(net.parameters(), lr=1e-2), LossScaler("cuda")
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        with policy.autocast():
            loss, _ = net(x, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and all(map(math.isfinite, losses))


@needs_cuda
def test_the_scaler_and_the_islands_do_not_sync():
    scaler, flag = LossScaler("cuda"), torch.zeros((), device="cuda")
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).cuda(), torch.rand(2, 8, device="cuda")
    keep_fp32(net, ["1"])
    scaler.update(flag)
    net(x)  # the first call initialises cuBLAS, which may sync
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.autocast("cuda", dtype=F16):
            net(x)
        scaler.update(flag)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_cuda
def test_capabilities_of_this_gpu_lead_to_a_policy_that_runs():
    caps = capabilities("cuda")
    assert caps.sm == torch.cuda.get_device_capability() or torch.version.hip
    policy = choose_policy("auto", caps)
    with policy.autocast():
        policy.prepare(Net().cuda())(*batch("cuda"))[0].backward()
