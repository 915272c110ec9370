"""VMamba: the scan against its definition in float64, what it promises about precision, and that the network learns."""

import math

import pytest
import torch
import torch.nn.functional as F

import amp_policy
import optim
from data import synthetic
from fp32 import fp32_eval, keep_fp32
from models import vmamba
from models.classifier import Classifier
from models.vmamba import PRESETS, VMamba, cross_merge, cross_scan, selective_scan, selective_scan_loop

TEST = {k: v for k, v in PRESETS["vmamba-test"].items() if k != "grid"} | {"patch_size": 8}


def inputs(L, N, K=2, batch=3, D=5, dtype=torch.float64):
    """u, delta, A, B, C, D with ordinary values, all of them requiring a gradient."""
    torch.manual_seed(L * 100 + N)

    def draw(*shape):
        return torch.randn(*shape, dtype=dtype)

    tensors = (draw(K, batch, L, D), F.softplus(draw(K, batch, L, D) - 2), -torch.exp(draw(K, D, N) / 2),
               draw(K, batch, L, N), draw(K, batch, L, N), draw(K, D))
    return [t.requires_grad_() for t in tensors]


def assert_same_values_and_gradients(args, atol):
    """selective_scan in the dtype of args against the loop in float64, gradients relative to their largest element."""
    doubles = [t.detach().double().requires_grad_() for t in args]
    y, reference = selective_scan(*args), selective_scan_loop(*doubles)
    weights = torch.randn_like(reference)
    got = torch.autograd.grad((y * weights).sum(), args)
    want = torch.autograd.grad((reference * weights).sum(), doubles)
    for name, a, b in zip(("y", "u", "delta", "A", "B", "C", "D"), (y, *got), (reference, *want), strict=True):
        assert torch.isfinite(a).all(), name
        scale = b.abs().max().clamp(min=1e-30)
        torch.testing.assert_close(a.double() / scale, b / scale, rtol=0, msg=lambda m, n=name: f"{n}: {m}", atol=atol)


@pytest.mark.parametrize("N", [1, 3, 16])
@pytest.mark.parametrize("L", [1, 2, 16, 17, 63, 300, 1030])
def test_the_scan_and_its_gradients_are_those_of_the_definition_at_every_length(L, N):
    assert_same_values_and_gradients(inputs(L, N), atol=1e-12)


@pytest.mark.parametrize("full_step", [1, 2**8, 2**30])
def test_neither_the_length_of_a_chunk_nor_the_blocks_of_a_batch_change_the_result(monkeypatch, full_step):
    monkeypatch.setattr(vmamba, "FULL_STEP", full_step)  # one chunk, few, as many as there may be (and chunks of those)
    monkeypatch.setattr(vmamba, "CACHED", 100)  # every image by itself
    assert_same_values_and_gradients(inputs(333, 2), atol=1e-12)


@pytest.mark.parametrize("exponent", [-50.0, -1.0, -1e-6, 0.0, "mixed"])
def test_extreme_decays_are_right_in_fp32_where_dividing_by_their_product_is_not(exponent):
    u, delta, A, B, C, D = inputs(200, 2, dtype=torch.float32)
    with torch.no_grad():
        A.fill_(-1.0)
        delta.fill_(50.0 if exponent == "mixed" else -exponent)
        if exponent == "mixed":
            delta[:, :, ::2] = 1e-6
    assert_same_values_and_gradients([u, delta, A, B, C, D], atol=2e-5)
    if exponent in (-50.0, "mixed"):
        P = torch.exp((delta[..., None] * A[:, None, None]).cumsum(2))
        b = (delta * u)[..., None] * B[..., None, :]
        assert not torch.isfinite(P * (b / P).cumsum(2)).all()


def test_gradients_are_those_of_finite_differences():
    assert torch.autograd.gradcheck(selective_scan, inputs(35, 2, K=1, batch=1, D=2))


def test_half_inputs_under_autocast_are_scanned_in_fp32():
    args = [t.detach().bfloat16() for t in inputs(100, 2, dtype=torch.float32)]
    with torch.autocast("cpu", torch.bfloat16):
        y = selective_scan(*args)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), selective_scan_loop(*(t.double() for t in args)), rtol=1e-4, atol=1e-5)


def test_what_the_scan_keeps_for_its_backward_pass_grows_with_the_length_and_not_faster():
    def kept(L):
        sizes = {}

        def pack(t):
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        args = inputs(L, 4, dtype=torch.float32)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = selective_scan(*args)
        del y
        return sum(sizes.values())

    ratio = kept(2048) / kept(512)
    assert 3.9 < ratio <= 4.01


def test_the_four_directions_are_rows_columns_and_both_backwards_and_merging_brings_each_token_home():
    x = torch.arange(6.0).view(1, 2, 3, 1)
    xs = cross_scan(x)
    assert xs.flatten(1).tolist() == [[0, 1, 2, 3, 4, 5], [0, 3, 1, 4, 2, 5], [5, 4, 3, 2, 1, 0], [5, 2, 4, 1, 3, 0]]
    directions = torch.tensor([1.0, 10.0, 100.0, 1000.0]).view(4, 1, 1, 1)
    torch.testing.assert_close(cross_merge(xs * directions, 2, 3), x * 1111)


def test_a_state_forgets_within_10_to_1000_tokens_at_the_start_and_weight_decay_leaves_it_alone():
    core = VMamba(num_classes=10, **TEST).layers[0][0].op.core
    dt = F.softplus(core.dt_projs_bias)
    assert 0.00099 < dt.min() < 0.01 < dt.max() < 0.101
    torch.testing.assert_close(torch.exp(core.A_logs[0, 0]), torch.tensor([1.0, 2.0]))
    exempt = [g for g in optim.param_groups(core) if g["weight_decay"] == 0]
    ids = {id(p) for g in exempt for p in g["params"]}
    assert {id(core.A_logs), id(core.Ds), id(core.dt_projs_bias)} < ids and id(core.x_proj) not in ids


def grown(force_fp32, factor=30.0):
    """A network whose scan inputs have grown as after long training, the same weights for both choices."""
    torch.manual_seed(0)
    net = VMamba(num_classes=10, force_fp32=force_fp32, **TEST)
    with torch.no_grad():
        for name, p in net.named_parameters():
            if name.endswith(("conv2d.weight", "x_proj", "in_proj.weight")):
                p.mul_(factor)
    return net


@pytest.mark.parametrize("training", [False, True])
def test_large_activations_overflow_the_sum_of_four_directions_in_fp16_unless_it_is_an_fp32_island(training):
    images, logits = torch.randn(4, 3, 32, 32), {}
    for force in (True, False):
        net = grown(force).train(training)  # published, the choice hung on this; here it must not matter
        with torch.no_grad(), torch.autocast("cpu", torch.float16):
            logits[force] = net(images)
    assert torch.isfinite(logits[True]).all()
    assert not torch.isfinite(logits[False]).all()


def test_evaluation_in_fp32_gives_the_same_numbers_with_force_fp32_true_and_false():
    images = torch.randn(4, 3, 32, 32)
    policy = amp_policy.choose_policy("fp16", amp_policy.capabilities("cpu"))
    a, b = (policy.prepare(grown(force)).eval() for force in (True, False))
    with torch.no_grad(), policy.autocast(), fp32_eval(a), fp32_eval(b):
        torch.testing.assert_close(a(images), b(images), rtol=0, atol=0)


def test_pinning_the_core_mends_the_network_that_overflows():
    net = grown(False).eval()
    assert keep_fp32(net, ["layers.*.op.core"]) == ["layers.0.0.op.core", "layers.1.0.op.core"]
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        assert torch.isfinite(net(torch.randn(4, 3, 32, 32))).all()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "O2", "O3"])
def test_the_loss_is_finite_and_every_parameter_gets_a_finite_gradient_in_every_precision(precision):
    torch.manual_seed(0)
    policy = amp_policy.choose_policy(precision, amp_policy.capabilities("cpu"))
    model = Classifier(policy.prepare(VMamba(num_classes=7, **TEST)))
    with policy.autocast():
        loss, _ = model(torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 6]))
    assert loss.dtype == torch.float32 and torch.isfinite(loss)
    (loss * 1024).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and torch.isfinite(p.grad).all(), name
        assert precision == "O3" or p.grad.abs().max() > 0, name


@pytest.mark.slow
def test_a_compiled_network_gives_the_same_loss_and_gradients():
    torch.manual_seed(0)
    net, x = VMamba(num_classes=10, **TEST), torch.randn(2, 3, 32, 32)
    want = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    got = torch.autograd.grad(torch.compile(net, backend="aot_eager")(x).square().sum(), list(net.parameters()))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_weights_survive_a_round_trip_and_impossible_sizes_are_refused():
    a, b, x = VMamba(num_classes=10, **TEST), VMamba(num_classes=10, **TEST), torch.randn(2, 3, 32, 32)
    b.load_state_dict(a.state_dict())
    assert torch.equal(a(x), b(x))
    with pytest.raises(ValueError, match="multiple of patch_size 5"):
        VMamba(num_classes=10, image_size=32, patch_size=5)
    with pytest.raises(ValueError, match="2 dims for 1 stages"):
        VMamba(num_classes=10, dims=(8, 16), depths=(1,))


def test_the_presets_have_the_sizes_they_claim():
    with torch.device("meta"):
        count = {name: sum(p.numel() for p in VMamba(
            num_classes=1000 if name == "vmamba-t" else 10,
            **{"patch_size": 4} | {k: v for k, v in PRESETS[name].items() if k != "grid"}).parameters())
            for name in PRESETS}  # fmt: skip
    assert count["vmamba-test"] < 100_000
    assert math.isclose(count["vmamba-t"], 30.2e6, rel_tol=0.005)  # the published table's 30.2 million


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "O2", "O3"])
def test_the_residual_stream_is_fp32_in_every_precision(precision):
    policy, seen = amp_policy.choose_policy(precision, amp_policy.capabilities("cpu")), []
    net = policy.prepare(VMamba(num_classes=7, **TEST))
    for module in net.modules():
        if isinstance(module, vmamba.VSSBlock):
            module.register_forward_hook(lambda _, inputs, out: seen.extend([inputs[0].dtype, out.dtype]))
    with policy.autocast():
        net(torch.randn(2, 3, 32, 32))
    assert set(seen) == {torch.float32} and len(seen) == 4


def test_a_stem_of_two_convolutions_makes_patches_of_4_only():
    net = VMamba(num_classes=10, stem=2, dims=(8, 16), depths=(1, 1))
    assert net.patch_embed(torch.randn(2, 32, 32, 3)).shape == (2, 8, 8, 8)
    with pytest.raises(ValueError, match="stem of 2 convolutions cannot make patches of 8"):
        VMamba(num_classes=10, stem=2, patch_size=8)


@pytest.mark.parametrize("gate, mlp_ratio", [(True, 0.0), (False, 2.0)])
def test_both_kinds_of_block_overfit_forty_images(gate, mlp_ratio):
    torch.manual_seed(0)
    images, labels = synthetic.draw(0, 40, seed=0)
    images = images.float() / 128 - 1
    model = Classifier(VMamba(num_classes=10, **TEST | {"patch_size": 4, "gate": gate, "mlp_ratio": mlp_ratio}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(80):
        loss, metrics = model(images, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert metrics["acc1"].mean() == 100


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: its autocast has other lists than the CPU's")
def test_on_a_gpu_too_the_scan_agrees_with_float64_and_the_island_holds():
    args = [t.detach().cuda() for t in inputs(1030, 2, dtype=torch.float32)]
    torch.testing.assert_close(selective_scan(*args).double(), selective_scan_loop(*(t.double() for t in args)),
                               rtol=1e-4, atol=1e-5)  # fmt: skip
    for force in (True, False):
        with torch.no_grad(), torch.autocast("cuda", torch.float16):
            logits = grown(force).cuda().eval()(torch.randn(4, 3, 32, 32, device="cuda"))
        assert torch.isfinite(logits).all() == force
