"""VMamba: the scan against its definition in float64, and the overflow that evaluation met."""

import pytest
import torch
import torch.nn.functional as F
from helpers import both_devices
from nets import build

from models import vmamba
from models.vmamba import selective_scan, selective_scan_loop


def inputs(L, N, dtype=torch.float64, device="cpu"):
    """u, delta, A, B, C, D of two directions with ordinary values; all require a gradient."""
    torch.manual_seed(L * 100 + N)
    K = 2
    batch = 3
    D = 5
    tensors = [
        torch.randn(K, batch, L, D, dtype=dtype),
        F.softplus(torch.randn(K, batch, L, D, dtype=dtype) - 2),
        -torch.exp(torch.randn(K, D, N, dtype=dtype) / 2),
        torch.randn(K, batch, L, N, dtype=dtype),
        torch.randn(K, batch, L, N, dtype=dtype),
        torch.randn(K, D, dtype=dtype),
    ]
    return [t.to(device).requires_grad_() for t in tensors]


def assert_same_values_and_gradients(args, atol):
    """The scan in the dtype of args beside the loop in float64, relative to the largest number."""
    doubles = [t.detach().double().requires_grad_() for t in args]
    y = selective_scan(*args)
    want = selective_scan_loop(*doubles)

    weights = torch.randn_like(want)
    slopes = torch.autograd.grad((y * weights).sum(), args)
    wanted = torch.autograd.grad((want * weights).sum(), doubles)

    got = [y, *slopes]
    exact = [want, *wanted]
    names = ("y", "u", "delta", "A", "B", "C", "D")
    for name, a, b in zip(names, got, exact, strict=True):
        error = (a.double() - b).abs().max()
        largest = b.abs().max().clamp(min=1e-30)
        assert a.isfinite().all(), name
        assert error <= atol * largest, name


@pytest.mark.parametrize(
    "L, N",
    [
        (1, 1),
        (2, 3),
        (16, 1),
        (17, 3),
        (63, 16),
        (300, 1),
        (1030, 3),
    ],
)
def test_the_scan_and_its_gradients_are_those_of_the_definition_at_every_length(L, N):
    assert_same_values_and_gradients(inputs(L, N), atol=1e-12)


@pytest.mark.parametrize("full_step", [1, 2**8, 2**30])
def test_neither_the_chunks_nor_the_parts_of_a_batch_change_the_result(monkeypatch, full_step):
    monkeypatch.setattr(vmamba, "FULL_STEP", full_step)  # one chunk, some, chunks of chunks
    monkeypatch.setattr(vmamba, "CACHED", 100)  # every image by itself
    assert_same_values_and_gradients(inputs(333, 2), atol=1e-12)


@pytest.mark.parametrize("exponent", [-50.0, -1e-6, 0.0, "mixed"])
def test_extreme_decays_are_right_in_fp32_where_a_division_by_their_product_is_not(exponent):
    args = inputs(200, 2, dtype=torch.float32)
    u, delta, A, B, *_ = args
    with torch.no_grad():
        A.fill_(-1.0)
        delta.fill_(50.0 if exponent == "mixed" else -exponent)
        if exponent == "mixed":
            delta[:, :, ::2] = 1e-6

    assert_same_values_and_gradients(args, atol=2e-5)

    if exponent in (-50.0, "mixed"):
        decays = delta[..., None] * A[:, None, None]
        product = torch.exp(decays.cumsum(2))
        b = (delta * u)[..., None] * B[..., None, :]
        by_division = product * (b / product).cumsum(2)
        assert not by_division.isfinite().all()


@both_devices
def test_half_inputs_under_autocast_are_scanned_in_fp32(device):
    args = [t.detach().bfloat16() for t in inputs(1030, 2, torch.float32, device)]
    doubles = [t.double() for t in args]
    want = selective_scan_loop(*doubles)

    with torch.autocast(device, torch.bfloat16):
        y = selective_scan(*args)

    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), want, rtol=1e-4, atol=1e-4)


def test_what_is_kept_for_the_backward_pass_grows_with_the_length_and_not_faster():
    def kept(L):
        sizes = {}

        def pack(t):
            storage = t.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            return t

        args = inputs(L, 4, dtype=torch.float32)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = selective_scan(*args)
        del y
        return sum(sizes.values())

    ratio = kept(2048) / kept(512)
    assert 3.9 < ratio <= 4.01


def test_a_state_forgets_within_10_to_1000_tokens_at_the_start():
    first_block = build("vmamba-test").layers[0][0]
    core = first_block.op.core

    dt = F.softplus(core.dt_projs_bias)
    assert 0.00099 < dt.min() < 0.01
    assert 0.01 < dt.max() < 0.101

    decays = torch.exp(core.A_logs[0, 0])
    torch.testing.assert_close(decays, torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize("training", [False, True])
@torch.no_grad()
def test_grown_activations_overflow_the_sum_of_directions_unless_it_is_an_island(training):
    images = torch.randn(4, 3, 32, 32)
    for force_fp32 in (True, False):
        net = build("vmamba-test", force_fp32=force_fp32)
        for name, p in net.named_parameters():
            if name.endswith(("conv2d.weight", "x_proj", "in_proj.weight")):
                p.mul_(30.0)
        net.train(training)  # published, the choice hung on this; here it must not matter

        with torch.autocast("cpu", torch.float16):
            out = net(images)

        finite = bool(out.isfinite().all())
        assert finite == force_fp32


def two_nets():
    """25 tokens, and 9 in the second stage."""
    torch.manual_seed(0)
    small = {"num_classes": 3, "image_size": 20, "dims": (16, 24), "depths": (1, 1), "d_state": 2}
    nets = [vmamba.VMamba(**small) for _ in range(2)]
    images = torch.randn(5, 3, 20, 20)
    return nets, images


def test_it_is_exported_for_any_batch():
    nets, x = two_nets()
    net = nets[0]
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(net, (x[:3],), dynamic_shapes=({0: batch},))
    exported = program.module()

    got = exported(x)
    want = net(x)
    torch.testing.assert_close(got, want)

    slopes = torch.autograd.grad(got.sum(), list(exported.parameters()))
    wanted = torch.autograd.grad(want.sum(), list(net.parameters()))
    torch.testing.assert_close(slopes, wanted, rtol=1e-3, atol=1e-5)


def test_torch_func_differentiates_it_for_each_image_and_stacks_its_nets():
    nets, x = two_nets()
    net = nets[0]
    wanted = torch.autograd.grad(net(x).sum(), list(net.parameters()))

    def loss(params, image):
        return torch.func.functional_call(net, params, (image[None],)).sum()

    slopes_of_each = torch.vmap(torch.func.grad(loss), (None, 0))
    slopes = slopes_of_each(dict(net.named_parameters()), x)
    summed = tuple(slope.sum(0) for slope in slopes.values())
    torch.testing.assert_close(summed, wanted, rtol=1e-3, atol=1e-5)

    params, _ = torch.func.stack_module_state(nets)  # decays are stacked, too

    def logits(params):
        return torch.func.functional_call(net, params, (x,))

    stacked = torch.vmap(logits)(params)
    of_each = torch.stack([net(x) for net in nets])
    torch.testing.assert_close(stacked, of_each)
