"""The policy does what it says: levels are measured in a step, faults are planted and caught."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import both_devices, needs_cuda, policy_for
from torch import nn
from torch.nn.utils import parametrizations

import amp_policy
from amp_policy import Capabilities, LossScaler, capabilities, choose_policy, self_test, set_tf32
from fp32 import fp32_eval

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def skip_emulated(device, dtype):
    if device == "cuda" and dtype is BF16 and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU only emulates bfloat16")


pytestmark = pytest.mark.usefixtures("clean_switches")


class Net(nn.Module):
    """As other projects write them: a root that owns a parameter, a weight that is used without its
    module, an fp32 table, torch's own attention, labels that are numbers."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.bn = nn.BatchNorm2d(8)
        self.ln = nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.full((1,), 0.7))
        self.words = nn.Embedding(16, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.register_buffer("table", torch.rand(8))
        self.fc = nn.Linear(8, 4)

    def forward(self, images=None, labels=None):
        self.label_dtype = labels.dtype
        x = self.bn(self.conv(images * self.scale)).flatten(2).mT
        x = self.ln(x + self.words(torch.arange(16, device=x.device)))
        k = F.linear(x, self.words.weight[:8])
        x = F.scaled_dot_product_attention(k * self.table, k, k)  # fp32 and half meet
        x, _ = self.attention(query=x, key=x.float(), value=x.float(), need_weights=False)
        logits = self.fc(x.mean(1))
        return F.cross_entropy(logits.float(), labels)


# --- choosing


def choose(name, caps, fault="", half_seconds=0.5):
    """With what the trial of half precision says, and its time beside a second of fp32."""

    def trial(device, dtype):
        assert dtype is not F32
        return fault

    def stopwatch(device, dtypes):
        assert dtypes[0] is F32
        assert dtypes[1] is not F32
        return 1.0, half_seconds

    return choose_policy(name, caps, trial, stopwatch)


A100 = Capabilities("cuda", "A100", (8, 0))
T4 = Capabilities("cuda", "Tesla T4", (7, 5))
NEW_CPU = Capabilities("cpu", "x86_64", cpu_bf16=True)


@pytest.mark.parametrize(
    "caps, fault, half_seconds, name, words",
    [
        (A100, "", 0.3, "bf16", "needs no loss scaling; it takes 0.3 times as long as fp32"),
        (A100, "", 0.91, "fp32", "bf16 is left out: it takes 0.91 times as long as fp32"),
        (A100, "", math.nan, "fp32", "it takes nan times"),
        (T4, "", 0.25, "fp16", "needs loss scaling; it takes 0.25 times"),
        (Capabilities("cuda", "V100", (7, 0)), "", 1.2, "fp32", "fp16 is left out"),
        (T4, "off by nan", 0.25, "fp32", "failed the self-test: off by nan"),  # GTX 1660
        (Capabilities("cuda", "GTX 1080", (6, 1)), "", 0.2, "fp32", "sm_61"),
        (Capabilities("cuda", "gfx942"), "", 0.2, "bf16", "gfx942 runs bfloat16 natively"),
        (Capabilities("cuda", "gfx1030"), "", 0.2, "fp32", "gfx1030"),
        (NEW_CPU, "", 0.4, "bf16", "natively"),  # AMX
        (NEW_CPU, "", 1.73, "fp32", "1.7 times as long"),  # AVX512-BF16 without AMX
        (Capabilities("cpu", "x86_64"), "", 0.2, "fp32", "cpu"),
    ],
    ids=lambda v: v.name if isinstance(v, Capabilities) else None,
)
def test_auto_takes_the_fastest_of_what_is_safe(caps, fault, half_seconds, name, words):
    policy = choose("auto", caps, fault, half_seconds)
    assert (policy.name, policy.device, policy.warnings) == (name, caps.device, ())
    assert words in str(policy)
    assert str(policy).startswith(f"{name}: ")


def test_an_explicit_choice_is_obeyed_and_says_what_it_costs():
    for name, caps, fault, half_seconds, note in (
        ("bf16", T4, "", 3.0, "sm_75 only emulates bfloat16: slow"),
        ("bf16", NEW_CPU, "", 1.73, "it takes 1.7 times as long as fp32 on this cpu"),
        ("fp16", T4, "off by nan", 0.5, "sm_75 failed the self-test: off by nan"),
        ("tf32", T4, "", 1.0, "sm_75 has no TF32: this is fp32"),
    ):
        policy = choose(name, caps, fault, half_seconds)
        assert policy.name == name
        assert f"{name}: {note}" in policy.warnings
        assert note in str(policy)
    assert choose("bf16", A100).warnings == ()
    with pytest.raises(ValueError, match=r"unknown precision 'fp8': choose from auto, fp32, tf32"):
        choose("fp8", T4)


def test_a_policy_goes_by_its_usual_names_and_finds_its_device():
    for spelling, name in (
        ("half", "fp16"),
        ("16-mixed", "fp16"),
        ("O1", "fp16"),
        ("O0", "fp32"),
        ("bfloat16", "bf16"),
    ):
        policy = choose_policy(spelling, trial=None, stopwatch=None)
        assert policy.name == name
        assert policy.device == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    "machine, avx512_bf16, mkldnn, native",
    [
        ("x86_64", True, True, True),
        ("x86_64", False, True, False),  # Skylake: oneDNN says True, by emulation
        ("x86_64", None, True, False),  # a torch without the attribute
        ("aarch64", False, True, True),  # Graviton 3
        ("arm64", True, None, False),  # a build without the operator
    ],
)
def test_cpu_bf16_means_native_on_x86_and_arm(monkeypatch, machine, avx512_bf16, mkldnn, native):
    operators = {"_is_mkldnn_bf16_supported": lambda: mkldnn} if mkldnn is not None else {}
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace(**operators), raising=False)
    monkeypatch.setattr(amp_policy.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16, raising=False)
    if avx512_bf16 is None:
        monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")
    assert capabilities("cpu").cpu_bf16 is native


@both_devices
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_the_self_test_passes_sound_hardware(device, dtype):
    skip_emulated(device, dtype)
    state = torch.get_rng_state()
    assert self_test(device, dtype) == ""
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("value", [math.nan, 0.5])
def test_the_self_test_catches_a_chip_whose_half_convolutions_are_wrong(monkeypatch, value):
    conv2d = F.conv2d

    def broken(x, *args, **kwargs):
        y = conv2d(x, *args, **kwargs)
        return y * value if y.dtype is F16 else y

    monkeypatch.setattr(amp_policy.F, "conv2d", broken)
    assert "off by" in self_test("cpu", F16)


# --- the levels, measured

TABLE = {
    # level  conv   norm   grad   conv   norm   stats
    #        weight weight        out    out
    "fp32": (F32, F32, F32, F32, F32, F32),
    "tf32": (F32, F32, F32, F32, F32, F32),
    "bf16": (F32, F32, F32, BF16, None, F32),  # None: half on a CPU, fp32 on CUDA
    "fp16": (F32, F32, F32, F16, None, F32),
    "O2": (F16, F32, F16, F16, F32, F32),
    "O3": (F16, F16, F16, F16, F16, F16),
}


@both_devices
@pytest.mark.parametrize("name", TABLE)
def test_every_level_has_in_a_real_step_the_dtypes_it_promises(device, name):
    policy = policy_for(name, device)
    skip_emulated(device, policy.dtype)
    net = Net().to(device)
    batch = {
        "images": torch.randn(6, 3, 6, 6, device=device),
        "labels": torch.full((6, 4), 0.2501, device=device),
    }
    want = copy.deepcopy(net)(**batch)
    policy.prepare(net)

    seen = {}
    for module in (net.conv, net.ln):
        module.register_forward_hook(lambda module, args, out: seen.update({module: out.dtype}))
    scaler = LossScaler(device, init_scale=128.0, enabled=policy.scales)
    with policy.autocast():
        loss = net(*batch.values())
        by_keyword = net(**batch)
    assert torch.equal(loss, by_keyword)
    scaler.scale(loss).backward()

    assert TABLE[name] == (
        net.conv.weight.dtype,
        net.ln.weight.dtype,
        net.conv.weight.grad.dtype,
        seen[net.conv],
        TABLE[name][4] and seen[net.ln],
        net.bn.running_mean.dtype,
    )
    assert (loss.dtype, net.label_dtype) == (F32, F32)
    assert policy.scales is (name in ("fp16", "O2"))
    assert all(p.grad.isfinite().all() for p in net.parameters())
    torch.testing.assert_close(loss, want, rtol=2e-2, atol=0)


def test_prepare_leaves_wrappers_with_norm_in_their_name_and_float_buffers_alone():
    class PreNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.RMSNorm(4)
            self.fn = nn.Linear(4, 4)
            self.register_buffer("table", torch.arange(3000.0))

        def forward(self, x):
            normed = self.norm(x * 1000)
            return self.fn(normed) + self.table[2049]

    net = policy_for("O2").prepare(nn.Sequential(PreNorm(), nn.Linear(4, 4)))
    wrapper = net[0]
    assert [wrapper.norm.weight.dtype, wrapper.fn.weight.dtype] == [F32, F16]
    assert wrapper.table.dtype is F32

    out = net(torch.randn(2, 4))
    assert out.dtype is F16  # the sum is cast again at the next door

    half = policy_for("O3").prepare(PreNorm())
    assert half.table.dtype is F16


@both_devices
@pytest.mark.parametrize("name", ["O2", "O3"])
@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, parametrizations.spectral_norm])
def test_a_layer_with_spectral_norm_computes_in_half_precision(device, name, norm):
    torch.manual_seed(0)
    net = nn.Sequential(norm(nn.Linear(4, 6)), nn.Unflatten(1, (6, 1)), norm(nn.Conv1d(6, 2, 1)))
    net.to(device).train()
    policy = policy_for(name, device)
    half = policy.prepare(copy.deepcopy(net))
    x = torch.randn(5, 4, device=device)

    want = net(x)
    with policy.autocast():
        out = half(x)
    out.float().sum().backward()

    assert out.dtype is F16
    torch.testing.assert_close(out.float(), want, rtol=2e-2, atol=2e-3)
    assert all(p.grad.isfinite().all() for p in half.parameters())


@pytest.mark.parametrize("name, on", [("fp32", False), ("tf32", True), ("O2", False)])
def test_prepare_sets_tf32_so_that_both_interfaces_and_inductor_can_read_it(name, on):
    set_tf32(not on)
    torch.backends.fp32_precision = "tf32"  # a global switch
    policy_for(name).prepare(nn.Linear(1, 1))

    matmul = torch.backends.cuda.matmul
    cudnn = torch.backends.cudnn
    assert matmul.allow_tf32 is on
    assert cudnn.allow_tf32 is on
    wanted = "tf32" if on else "ieee"
    for switch in (matmul, cudnn.conv, cudnn.rnn):
        assert switch.fp32_precision == wanted

    torch.backends.fp32_precision = "none"


# --- loss scaling


@both_devices
@pytest.mark.filterwarnings("error")
def test_between_its_limits_it_is_torchs_scaler_bit_for_bit_and_each_loads_the_other(device):
    options = {"init_scale": 2.0**40, "growth_interval": 3}
    plain = torch.amp.GradScaler(device, **options)
    ours = LossScaler(device, ceiling=2.0**100, **options)
    on_device = LossScaler(device, ceiling=2.0**100, **options)
    bad_steps = torch.rand(120) < 0.2

    scales = set()
    for i, bad in enumerate(bad_steps.float().to(device)):
        if i == 70:
            plain = torch.amp.GradScaler(device)
            plain.load_state_dict(ours.state_dict())
            ours = LossScaler(device, ceiling=2.0**100)
            ours.load_state_dict(plain.state_dict())
        for scaler in (plain, ours, on_device):
            weight = torch.ones(3, device=device, requires_grad=True)
            loss = (weight / (1 - bad)).sum()
            scaler.scale(loss).backward()
            scaler.step(torch.optim.SGD([weight]))
            flag = {"found_inf": bad} if scaler is on_device else {}
            scaler.update(**flag)
        assert plain.state_dict() == ours.state_dict() == on_device.state_dict()
        scales.add(plain.get_scale())

    assert len(scales) > 3
    assert max(scales) < 2.0**100


def test_floor_and_ceiling_table_and_the_way_back_of_a_corrupted_scale():
    scaler = LossScaler("cpu", init_scale=8.0, growth_interval=2, floor=2.0, ceiling=16.0)
    flags_and_scales = [
        (1, 4),
        (1, 2),
        (1, 2),
        (0, 2),
        (0, 4),
        (0, 4),
        (0, 8),
        (0, 8),
        (0, 16),
        (0, 16),
        (0, 16),
        (math.nan, 8),  # a flag that is NaN is a skipped step
    ]
    for bad, want in flags_and_scales:
        scaler.update(found_inf=torch.tensor(float(bad)))
        assert scaler.get_scale() == want

    scaler.update(0.25)  # torch's positional argument is a new scale
    assert scaler.get_scale() == 2.0

    for corrupted in (math.nan, math.inf, 0.0, 1e30):
        scaler.scale_tensor.fill_(corrupted)
        scaler.update(found_inf=torch.tensor(1.0))
        assert scaler.get_scale() == 4.0

    for limits in ({"floor": 0.5}, {"floor": 2.0**20}, {"ceiling": math.inf}):
        with pytest.raises(ValueError, match="needs 1 <= floor"):
            LossScaler("cpu", **limits)


def test_a_disabled_scaler_changes_nothing_and_answers_one_on_its_device():
    scaler = LossScaler("cpu", enabled=False)
    scaler.update(found_inf=torch.tensor(1.0))
    assert scaler.scale_tensor.item() == scaler.get_scale() == 1.0

    elsewhere = LossScaler("meta", enabled=False)
    assert elsewhere.scale_tensor.device.type == "meta"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("state", [{}, {"scale": 0.0}, {"scale": math.nan}])
def test_a_state_that_does_not_fit_starts_afresh_with_a_note(state):
    scaler = LossScaler("cpu")
    with pytest.warns(UserWarning, match="it starts at 65536"):
        scaler.load_state_dict(state)  # bf16 resumed as fp16, a collapsed scale, a poisoned one
    assert scaler.scale_tensor.item() == 65536.0
    LossScaler("cpu", enabled=False).load_state_dict(scaler.state_dict())  # fp16 as bf16


# --- CUDA only


@needs_cuda
def test_tf32_on_and_off_are_measurably_different_and_fp32_eval_wins():
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this chip has no TF32")
    a, b = torch.randn(2, 512, 512, device="cuda")
    want = a.double() @ b.double()

    def error():
        difference = a @ b - want
        return float(difference.norm() / want.norm())

    net = policy_for("tf32", "cuda").prepare(nn.Linear(1, 1).cuda())
    assert error() > 1e-4  # 10-bit mantissas
    with fp32_eval(net):
        assert error() < 2e-5
    assert error() > 1e-4
    policy_for("fp32", "cuda").prepare(net)
    assert error() < 2e-5


class Remembers(nn.BatchNorm1d):
    last = None

    def forward(self, images, labels):
        self.last = super().forward(images) + torch.rand(())
        return self.last.sum(), {}


def test_a_pass_that_is_timed_leaves_no_trace():
    net = Remembers(4)
    images = torch.randn(8, 4)
    rng = torch.get_rng_state()
    buffers = [*net.buffers()]
    before = [b.clone() for b in buffers]

    seconds = amp_policy.seconds_of_pass(net, images, None, torch.bfloat16)

    assert seconds > 0
    assert all(old is new for old, new in zip(buffers, net.buffers(), strict=True))
    assert all(map(torch.equal, buffers, before))
    assert torch.equal(torch.get_rng_state(), rng)
    assert net.last is None
    assert net.weight.grad is None
