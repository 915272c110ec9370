"""The policy does what it says: each level is measured in a real step, each fault is planted and seen caught."""

import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import amp_policy
from amp_policy import (
    POLICIES,
    Capabilities,
    LossScaler,
    capabilities,
    choose_policy,
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
    return choose_policy(name, Capabilities(device), trial=None, stopwatch=None)


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


def takes(half, fp32=1.0):
    """A stopwatch that finds these seconds for half precision and for fp32."""
    return lambda device, dtypes: tuple({F32: fp32}.get(dtype, half) for dtype in dtypes)


def sound(device, dtype):
    return ""


H200, A100 = Capabilities("cuda", "NVIDIA H200", (9, 0)), Capabilities("cuda", "NVIDIA A100-SXM4-80GB", (8, 0))
T4, V100 = Capabilities("cuda", "Tesla T4", (7, 5)), Capabilities("cuda", "Tesla V100-SXM2-16GB", (7, 0))
GTX = Capabilities("cuda", "NVIDIA GeForce GTX 1660", (7, 5))
OLD_CPU, NEW_CPU = Capabilities("cpu", "x86_64"), Capabilities("cpu", "x86_64", cpu_bf16=True)


@pytest.mark.parametrize(
    ("caps", "trial", "half_seconds", "name", "words"),
    [
        (H200, never, 0.1, "bf16", "needs no loss scaling; it takes 0.1 of fp32's time on this gpu"),
        (A100, never, 0.3, "bf16", "sm_80"),
        (A100, never, 0.91, "fp32", "bf16 would take 0.91 times as long on this gpu"),
        (A100, never, math.nan, "fp32", "bf16 would take nan times"),
        (T4, sound, 0.25, "fp16", "needs loss scaling; it takes 0.25 of fp32's time"),
        (V100, sound, 0.9, "fp16", "passed the float16 self-test"),
        (V100, sound, 1.2, "fp32", "fp16 would take 1.2 times as long on this gpu"),
        (GTX, lambda *a: "off by nan", None, "fp32", "failed the float16 self-test: off by nan"),
        (Capabilities("cuda", "NVIDIA GeForce GTX 1080", (6, 1)), never, None, "fp32", "sm_61"),
        (Capabilities("cuda", "gfx942"), never, 0.2, "bf16", "gfx942 runs bfloat16 natively"),
        (Capabilities("cuda", "gfx1030"), never, None, "fp32", "gfx1030"),
        (Capabilities("mps", "arm64"), never, None, "fp32", "mps"),
        (NEW_CPU, never, 0.4, "bf16", "natively"),  # AMX
        (NEW_CPU, never, 1.73, "fp32", "bf16 would take 1.7 times as long on this cpu"),  # AVX512-BF16 without AMX
        (OLD_CPU, never, None, "fp32", "cpu"),
    ],
    ids=lambda v: v.name if isinstance(v, Capabilities) else None,
)
def test_auto_takes_the_fastest_of_what_is_safe(monkeypatch, caps, trial, half_seconds, name, words):
    # the trap: with emulation this says True on a T4 and a V100, and auto must not have asked
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *a, **k: pytest.fail("asked the driver"))
    policy = choose_policy("auto", caps, trial, never if half_seconds is None else takes(half_seconds))
    assert (policy.name, policy.device, policy.warnings) == (name, caps.device, ())
    assert words in str(policy) and str(policy).startswith(f"{name}: ")


def test_auto_without_a_stopwatch_takes_what_is_safe():
    assert choose_policy("auto", NEW_CPU, None, None).name == "bf16"
    assert choose_policy("auto", T4, sound, None).name == "fp16"
    assert choose_policy("auto", OLD_CPU, None, None).name == "fp32"


def test_the_levels_are_frozen_data_with_six_different_meanings():
    rows = [POLICIES[n] for n in ("fp32", "tf32", "bf16", "fp16", "O2", "O3")]
    keys = ("dtype", "param_dtype", "autocasts", "scales", "tf32", "masters", "norms_fp32")
    assert len({tuple(getattr(p, k) for k in keys) for p in rows}) == 6
    assert POLICIES["O0"] is POLICIES["fp32"] and POLICIES["O1"] is POLICIES["fp16"]
    assert "experiment" in str(policy_for("O3"))
    with pytest.raises(AttributeError):
        rows[0].tf32 = True


def test_an_explicit_choice_is_obeyed_and_says_what_it_costs():
    for name, caps, trial, seconds, note in (
        ("bf16", T4, sound, 3.0, "sm_75 only emulates bfloat16: slow"),
        ("bf16", NEW_CPU, sound, 1.73, "it takes 1.7 times as long as fp32 on this cpu"),
        ("fp16", GTX, lambda *a: "off by nan", 0.5, "sm_75 failed the self-test: off by nan"),
        ("O2", OLD_CPU, sound, 4.0, "it takes 4 times as long as fp32 on this cpu"),
        ("tf32", T4, never, 1.0, "sm_75 has no TF32: this is fp32"),
    ):
        policy = choose_policy(name, caps, trial, takes(seconds))
        assert policy.name == name and any(f"{name}: {note}" in text for text in policy.warnings), name
        assert f"({note}" in str(policy)
    assert choose_policy("bf16", A100, sound, takes(0.5)).warnings == ()
    assert choose_policy("fp32", T4, never, never).warnings == ()
    assert choose_policy("O1", T4, sound, takes(0.5)).name == "fp16"
    with pytest.raises(ValueError, match=r"unknown precision 'half': choose from auto, fp32, tf32, bf16, fp16, O2, O3"):
        choose_policy("half", T4)


@both_devices
def test_the_stopwatch_lets_the_dtypes_take_turns_and_reports_the_least(monkeypatch, device):
    seen, linear = [], F.linear

    def slow_in_bf16(x, w):
        seen.append(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else F32)
        for _ in range(300 if seen[-1] is BF16 else 1):
            out = linear(x, w)
        return out

    monkeypatch.setattr(amp_policy.F, "linear", slow_in_bf16)
    state, layers = torch.get_rng_state(), (((64, 64), (64, 64)),)
    amp_policy.stopwatch.cache_clear()
    fp32, bf16 = amp_policy.stopwatch(device, (F32, BF16), layers, 0.6)
    assert seen == [F32, BF16] * (len(seen) // 2) and len(seen) >= 2
    assert 0 < fp32 < bf16 and torch.equal(torch.get_rng_state(), state)
    count = len(seen)
    assert amp_policy.stopwatch(device, (F32, BF16), layers, 0.6) == (fp32, bf16) and len(seen) == count
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"


CONV = ((1000, 64, 15, 15), (256, 64, 3, 3), (1, 1), (1, 1), (1, 1), 1)
GIANT = (((64, 512, 1024, 1024), (512, 512, 3, 3), (1, 1), (1, 1), (1, 1), 1), ((8192, 16384), (65536, 16384)))


def spied(monkeypatch, seconds_of):
    """A stopwatch's clock that counts `seconds_of(sizes of the round)`, and the sizes of each round."""
    clock, rounds = [0.0], []

    def gradients(device, dtype, layers, inputs):
        rounds.append([tuple(t.shape) for t in inputs])
        clock[0] += seconds_of(rounds[-1])

    monkeypatch.setattr(amp_policy, "_gradients", gradients)
    monkeypatch.setattr(amp_policy.time, "perf_counter", lambda: clock[0])
    amp_policy.stopwatch.cache_clear()
    return clock, rounds


def test_the_stopwatch_takes_the_whole_batch_where_a_round_of_it_fits(monkeypatch):
    clock, rounds = spied(monkeypatch, lambda sizes: 1e-6 * sizes[0][0] + 1e-4)
    seconds = amp_policy.stopwatch("cpu", (F32, BF16), (CONV, ((1000, 256), (10, 256))))
    assert rounds[-1] == [(1000, 64, 15, 15), (256, 64, 3, 3), (1000, 256), (10, 256)]
    assert seconds == pytest.approx([1.1e-3] * 2) and clock[0] < 0.5


@pytest.mark.parametrize("layers", [(CONV,), GIANT], ids=["slow arithmetic", "giant layers"])
def test_the_stopwatch_shrinks_the_batch_until_a_round_fits(monkeypatch, layers):
    def seconds_of(sizes):  # 10^8 products a second, where a small core does 10^10
        images = sizes[0][0] * math.prod(sizes[0][2:]) * math.prod(sizes[1])
        return 1e-8 * (images + (sizes[2][0] * math.prod(sizes[3]) if sizes[2:] else 0))

    clock, rounds = spied(monkeypatch, seconds_of)
    amp_policy.stopwatch("cpu", (F32, BF16), layers)
    assert clock[0] < 4 and len(rounds) >= 4  # 10^13 products of the whole batch would take a day
    assert all(math.prod(size) <= 2**23 for sizes in rounds for size in sizes)
    assert rounds[-1][0][2] >= 3 and rounds[-1][1][1:] == layers[0][1][1:]  # the kernel stays, and fits the image
    assert all(math.prod(sizes[0][2:]) * sizes[0][0] >= 225 and sizes[1][0] >= 16 for sizes in rounds)


class Mixed(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.parts, self.norm, self.drop = nn.ModuleList(parts), nn.BatchNorm2d(3), nn.Dropout(0.5).eval()

    def forward(self, images, labels):
        images = self.norm(images)
        for part in self.parts:
            rows = images if isinstance(part, nn.Conv2d) else images.flatten(1)
            part(self.drop(rows))
        self.seen = self.training, torch.is_grad_enabled()
        return labels.sum()


def test_the_largest_layers_are_those_of_the_most_products_at_the_batch_of_training():
    small, large = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 4, stride=2, padding=1)
    image, rows = (2, 3, 12, 12), (2, 432)
    few, many = nn.Linear(432, 5), nn.Linear(432, 6)
    conv, linear = ((40, *image[1:]), (8, 3, 3, 3), (1, 1), (0, 0), (1, 1), 1), ((40, rows[1]), (6, 432))
    batch = torch.randn(*image), torch.zeros(2, dtype=torch.long)
    for parts, want in (((small, large, few, many), {conv, linear}), ((many, few), {linear}), ((large, small), {conv}),
                        ((), set())):
        net = Mixed(*parts)
        before = {name: t.clone() for name, t in net.state_dict().items()}
        modes = [m.training for m in net.modules()]
        assert set(amp_policy.largest_layers(net, *batch, times=20)) == want
        assert net.seen == (False, False) and [m.training for m in net.modules()] == modes
        assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
        assert not any(m._forward_hooks for m in net.modules())


def test_the_largest_layers_count_the_rows_of_tokens_and_the_channels_of_a_group():
    net = nn.Sequential(nn.Conv2d(4, 8, 2, stride=2, groups=4), nn.Flatten(2), nn.Linear(9, 7))
    conv, linear = amp_policy.largest_layers(net, torch.randn(2, 4, 6, 6), times=3)
    assert conv == ((6, 4, 6, 6), (8, 1, 2, 2), (2, 2), (0, 0), (1, 1), 4) and linear == ((48, 9), (7, 9))
    amp_policy.stopwatch.cache_clear()
    assert all(seconds > 0 for seconds in amp_policy.stopwatch("cpu", (F32, BF16), (conv, linear), 0.05))


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
    policy = choose_policy("auto", GTX, lambda device, dtype: self_test("cpu", dtype), never)
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
# O2 on networks as other projects write them


class Functional(nn.Module):
    """Weights used without calling their module, an fp32 mask, a table in a buffer, a plain tensor as positions."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj, self.norm = nn.Linear(8, 24), nn.Linear(8, 8), nn.LayerNorm(8)
        self.bias_table = nn.Parameter(torch.zeros(9, 1))
        self.register_buffer("index", torch.arange(9).repeat(9, 1).T)
        self.register_buffer("mask", torch.zeros(9, 9).masked_fill(torch.rand(9, 9) > 0.7, -100.0))
        self.register_buffer("cos", torch.rand(9, 8))
        self.position = torch.rand(9, 8)

    def forward(self, x):
        x = x + self.position
        q, k, v = F.linear(self.norm(x), self.qkv.weight, self.qkv.bias).chunk(3, -1)
        q, k = q * self.cos, k * self.cos  # fp32, while v is half
        out = F.scaled_dot_product_attention(q, k, v)
        attention = q @ k.transpose(-2, -1) + self.bias_table[self.index].squeeze(-1) + self.mask
        return x + self.proj(attention.softmax(-1) @ v + out)


class Foreign(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.patch, self.block = nn.Embedding(4096, 8), nn.Conv2d(3, 8, 4, 4), Functional()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.rnn, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 4096, bias=False)
        self.head.weight = self.words.weight  # tied
        self.cls = nn.Parameter(torch.zeros(1, 1, 8))

    def forward(self, images=None, ids=None, labels=None):
        self.seen = images.dtype, ids.dtype, labels.dtype
        x = torch.cat([self.patch(images).flatten(2).transpose(1, 2), self.words(ids)], 1)
        x = self.block(x)
        x = x + self.attention(query=x, key=x, value=x, need_weights=False)[0]
        x = self.rnn(x + self.cls)[0]
        return F.cross_entropy(F.linear(x[:, -1], self.head.weight).float(), labels)


@both_devices
@pytest.mark.parametrize("keywords", [False, True])
def test_o2_trains_a_foreign_network_with_functional_weights_keywords_and_fp32_tables(device, keywords):
    policy, net = policy_for("O2", device), Foreign()
    reference = copy.deepcopy(net).to(device)
    net = policy.prepare(net.to(device))
    net.block.position = net.block.position.to(device)
    reference.block.position = net.block.position
    images = torch.randn(2, 3, 12, 8, device=device)
    ids, labels = torch.tensor([[1, 2049, 3]] * 2, device=device), torch.tensor([2049, 7], device=device)
    with policy.autocast():
        loss = net(images=images, ids=ids, labels=labels) if keywords else net(images, ids, labels)
    loss.backward()
    assert net.seen[1:] == (torch.int64, torch.int64)
    assert net.words.weight is net.head.weight and net.block.norm.weight.dtype is F32
    assert {p.dtype for p in net.parameters()} == {F16, F32} and all(p.grad.isfinite().all() for p in net.parameters())
    torch.testing.assert_close(loss, reference(images, ids, labels), rtol=2e-2, atol=0)


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


def optimizers(weights):
    yield torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    yield torch.optim.AdamW(weights, lr=0.1, fused=True)  # unscales and skips by itself
    yield torch.optim.RMSprop(weights, lr=0.1)  # knows nothing of found_inf


@both_devices
@pytest.mark.parametrize("which", [0, 1, 2], ids=["SGD", "fused AdamW", "RMSprop"])
@pytest.mark.parametrize("unscale", [False, True])
def test_between_its_limits_it_is_torchs_scaler_bit_for_bit(device, which, unscale):
    runs = []
    factors = [(math.inf if bad else 1.0) for bad in (torch.rand(120) < 0.2)]
    for kind, limits in ((torch.amp.GradScaler, {}), (LossScaler, {"ceiling": 2.0**100})):
        scaler = kind(device, init_scale=2.0**40, growth_interval=3, **limits)
        weights = [torch.arange(1.0, 4.0, device=device), torch.ones(2, 2, device=device)]
        for w in weights:
            w.requires_grad_()
        optimizer, trail = list(optimizers(weights))[which], []
        for factor in factors:
            optimizer.zero_grad()
            scaler.scale(sum((w * w * factor).sum() for w in weights)).backward()
            if unscale:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(weights, 1.0)
            scaler.step(optimizer)
            scaler.update()
            trail.append((scaler.get_scale(), [w.detach().clone() for w in weights]))
            assert not hasattr(optimizer, "found_inf") and not hasattr(optimizer, "grad_scale")
        runs.append((trail, scaler.state_dict()))
    assert runs[0][1] == runs[1][1] and len({scale for scale, _ in runs[0][0]}) > 5
    for (scale, ours), (plain_scale, plain) in zip(runs[1][0], runs[0][0], strict=True):
        assert scale == plain_scale and 1.0 < scale < 2.0**100
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_the_update_on_the_device_follows_the_same_scales_as_torchs():
    ours = LossScaler("cpu", init_scale=2.0**90, growth_interval=3, ceiling=2.0**120)
    plain = torch.amp.GradScaler("cpu", init_scale=2.0**90, growth_interval=3)
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for flag in (torch.rand(200) < 0.3).float():
        weight.grad = torch.full((1,), math.inf if flag else 1.0)
        plain.scale(flag), plain.step(optimizer), plain.update()
        ours.update(found_inf=flag)
        assert ours.state_dict() == plain.state_dict()
    assert 1.0 < ours.get_scale() < 2.0**90


def test_floor_and_ceiling_table():
    scaler = LossScaler("cpu", init_scale=8.0, growth_interval=2, floor=2.0, ceiling=16.0)
    for bad, want in [(1, 4), (1, 2), (1, 2), (0, 2), (0, 4), (1, 2), (0, 2), (0, 4), (0, 4), (0, 8), (0, 8), (0, 16),
                      (0, 16), (0, 16), (math.nan, 8)]:  # a flag that is NaN is a skipped step
        scaler.update(found_inf=torch.tensor(float(bad)))
        assert scaler.get_scale() == want
    for limits in ({"floor": 0.5}, {"floor": 2.0**20}, {"ceiling": math.inf}):
        with pytest.raises(ValueError, match="needs 1 <= floor"):
            LossScaler("cpu", **limits)


@pytest.mark.parametrize("new", [128.0, torch.tensor(128.0)])
def test_the_positional_argument_of_update_is_a_new_scale_as_in_torch(new):
    scaler, plain = LossScaler("cpu"), torch.amp.GradScaler("cpu")
    plain.scale(torch.ones(()))
    scaler.update(new)
    plain.update(new)
    assert scaler.get_scale() == plain.get_scale() == 128.0
    scaler.update(0.25)
    assert scaler.get_scale() == 1.0  # the floor


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_a_corrupted_scale_starts_afresh_at_the_next_update(value):
    scaler = LossScaler("cpu")
    scaler.scale_tensor.fill_(value)
    scaler.update(found_inf=torch.tensor(0.0))
    assert scaler.get_scale() == 2.0**16
    weight = torch.ones(1, requires_grad=True)
    scaler.scale(weight.sum()).backward()
    scaler.scale_tensor.fill_(value)
    scaler.step(torch.optim.SGD([weight], lr=0.1))  # a scale of 0 or inf divides gradients into inf: this step is lost
    scaler.update()
    assert scaler.get_scale() >= 2.0**15 and isinstance(scaler, torch.amp.GradScaler)


def test_the_update_never_syncs_and_is_five_operations():
    scaler = LossScaler("meta")  # a tensor without data: any .item() raises
    identity, flag, seen = scaler.scale_tensor, torch.zeros((), device="meta"), []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    for _ in range(3):
        with Count():
            scaler.update(found_inf=flag)
    assert scaler.scale_tensor is identity and 0 < len(seen) <= 3 * 5


def test_scale_takes_tensors_and_nests_and_refuses_the_rest():
    scaler, one = LossScaler("cpu", init_scale=4.0), torch.ones(())
    assert scaler.scale([one, (one, {"a": one})]) == [4.0, (4.0, {"a": 4.0})]
    assert list(scaler.scale(t for t in (one, one))) == [4.0, 4.0]
    for wrong in (1.0, [1.0], {"loss": 1.0}):
        with pytest.raises(ValueError, match="must be a Tensor or an iterable of Tensors"):
            scaler.scale(wrong)


def test_what_torch_refuses_is_refused_in_a_sentence():
    weight = torch.ones(2, requires_grad=True)
    scaler, optimizer = LossScaler("cpu"), torch.optim.SGD([weight], lr=0.1)
    with pytest.raises(AssertionError, match=r"did not use scaler.scale\(loss"):
        scaler.step(optimizer)
    scaler.scale(torch.ones(()))
    with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="no closure"):
        scaler.step(optimizer, closure=lambda: None)
    with pytest.raises(RuntimeError, match="no closure"):
        scaler.step(optimizer, lambda: None)
    scaler = LossScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        scaler.update()
    weight.grad = torch.ones(2)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
        scaler.step(optimizer)
    scaler.update()
    scaler.step(optimizer)  # a new iteration
    half = torch.ones(2, dtype=F16, requires_grad=True)
    half.grad = torch.ones_like(half)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(torch.optim.SGD([half], lr=0.1))


def test_two_optimizers_share_one_scale_and_one_update():
    scaler, weights = LossScaler("cpu"), [torch.ones(1, requires_grad=True) for _ in range(2)]
    pair = [torch.optim.SGD([w], lr=1.0) for w in weights]
    scaler.scale(torch.ones(()))
    for w, value in zip(weights, (math.inf, 65536.0), strict=True):
        w.grad = torch.full((1,), value)
    for optimizer in pair:
        scaler.step(optimizer)
    scaler.update()
    assert [w.item() for w in weights] == [1.0, 0.0] and scaler.get_scale() == 2.0**15


def test_sparse_gradients_are_unscaled():
    table = nn.Embedding(4, 2, sparse=True)
    scaler, optimizer = LossScaler("cpu"), torch.optim.SGD(table.parameters(), lr=1.0)
    scaler.scale(table(torch.tensor([1, 1])).sum()).backward()
    scaler.unscale_(optimizer)
    assert table.weight.grad.to_dense()[1].tolist() == [2.0, 2.0]


def test_a_disabled_scaler_costs_nothing_and_answers_one():
    scaler, weight = LossScaler("cpu", enabled=False), torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update(found_inf=torch.tensor(1.0))
    assert weight.item() == 0.0 and scaler.scale_tensor.item() == scaler.get_scale() == 1.0
    assert scaler.scale_tensor is scaler.scale_tensor and scaler.state_dict() == {} and not scaler.is_enabled()


def test_each_loads_the_others_checkpoint_and_a_copy_goes_on_alike():
    first = LossScaler("cpu", growth_interval=4)
    for bad in (0, 0, 0, 0, 1, 1, 0):
        first.update(found_inf=torch.tensor(float(bad)))
    plain, second = torch.amp.GradScaler("cpu"), LossScaler("cpu")
    third = copy.deepcopy(first)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain.load_state_dict(first.state_dict())
        second.load_state_dict(plain.state_dict())
    assert first.state_dict() == second.state_dict() == plain.state_dict()
    for bad in (1, 1, 0, 0, 0, 0, 1):
        for scaler in (first, second, third):
            scaler.update(found_inf=torch.tensor(float(bad)))
        assert first.state_dict() == second.state_dict() == third.state_dict()


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
    policy = choose_policy("auto", T4, stopwatch=takes(0.5))
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
    scaler.update(found_inf=flag)
    net(x)  # the first call initialises cuBLAS, which may sync
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.autocast("cuda", dtype=F16):
            net(x)
        scaler.update(found_inf=flag)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_cuda
def test_capabilities_of_this_gpu_lead_to_a_policy_that_runs():
    caps = capabilities("cuda")
    assert caps.sm == torch.cuda.get_device_capability() or torch.version.hip
    policy = choose_policy("auto", caps)
    with policy.autocast():
        policy.prepare(Net().cuda())(*batch("cuda"))[0].backward()
