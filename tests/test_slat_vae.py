"""SLatVAE: which patches are active, where they go, that the latent survives half precision, and the half torso."""

import math

import pytest
import torch
import torch.nn.functional as F

import amp_policy
from data import synthetic
from fp32 import fp32_eval, keep_fp32
from models import slat_vae
from models.slat_vae import PRESETS, SLatVAE
from optim import ClippedAdamW, param_groups

PRECISIONS = ["fp32", "bf16", "fp16", "O2", "O3"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs CUDA: other kernels, and autocast lists that differ from the CPU's"))]


def build(name="slat_vae-test", image_size=32, **options):
    torch.manual_seed(0)
    sizes = dict(PRESETS[name])
    if "grid" in sizes:
        sizes["patch_size"] = image_size // sizes.pop("grid")
    return SLatVAE(num_classes=10, image_size=image_size, **(sizes | options))


def pictures(count, seed=0):
    images, labels = synthetic.draw(0, count, seed=seed)
    return images.float() / 64 - 2, labels


def policy_of(name, device="cpu"):
    return amp_policy.choose_policy(name, amp_policy.capabilities(device))


# --- structure


def test_the_active_patches_are_those_with_planted_texture():
    net = build("slat_vae", active=0.5)
    planted = torch.randperm(64, generator=torch.Generator().manual_seed(1))[:net.active].sort().values
    images = torch.linspace(-1, 1, 32).expand(1, 3, 32, 32).clone()  # a ramp: it varies, but the thumbnail knows it
    checks = (torch.arange(4)[:, None] + torch.arange(4)) % 2 - 0.5  # mean 0: the thumbnail does not see it
    for n in planted.tolist():
        row, column = 4 * (n // 8), 4 * (n % 8)
        images[0, :, row:row + 4, column:column + 4] += checks
    coords, _ = net.structure(images)
    assert coords.dtype == torch.int64 and coords.shape == (1, 32, 2)
    assert torch.equal((coords[0, :, 0] * 8 + coords[0, :, 1]).sort().values, planted)


def test_the_active_patches_are_those_of_float64_in_every_precision_though_half_would_tie_their_energies():
    images = torch.randn(64, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    exact = images.double()
    exact = exact - F.interpolate(F.avg_pool2d(exact, 4), scale_factor=4, mode="bilinear")
    energy = F.pixel_unshuffle(exact, 4).square().mean(1).flatten(1)
    want, rounded = (e.topk(32).indices.sort().values for e in (energy, energy.bfloat16()))
    assert not torch.equal(rounded, want)  # the danger is real
    for name in PRECISIONS:
        policy = policy_of(name)
        net = policy.prepare(build("slat_vae", active=0.5))
        with policy.autocast():
            coords, background = net.structure(images)
        assert background.dtype == torch.float32
        assert torch.equal((coords[..., 0] * 8 + coords[..., 1]).sort().values, want), name


def test_take_and_put_use_rows_and_columns_as_slices_do():
    images = torch.arange(2 * 3 * 24 * 32.0).view(2, 3, 24, 32)  # taller than wide would swap unnoticed in a square
    coords = torch.tensor([[[2, 3], [0, 1], [1, 0]], [[0, 0], [2, 0], [1, 3]]])
    values = -torch.arange(2 * 3 * 192.0).view(2, 3, 192) - 1
    patches, out, want = slat_vae.take(images, coords, 8), slat_vae.put(images, coords, values, 8), images.clone()
    for b in range(2):
        for k, (row, column) in enumerate((8 * coords[b]).tolist()):
            square = want[b, :, row:row + 8, column:column + 8]
            assert torch.equal(patches[b, k], square.flatten())
            square.copy_(values[b, k].view(3, 8, 8))
    assert torch.equal(out, want)


def test_the_picture_is_exact_at_active_patches_when_the_decoder_is_and_background_elsewhere():
    net, (images, _) = build("slat_vae", active=0.5), pictures(3)
    coords, background = net.structure(images)
    picture = net.assemble(background, coords, slat_vae.take(images - background, coords, 4))
    active = slat_vae.put(torch.zeros_like(images), coords, torch.ones(3, 32, 48), 4).bool()
    assert active.float().mean() == 0.5
    torch.testing.assert_close(picture[active], images[active])
    assert torch.equal(picture[~active], background[~active])


def test_the_order_of_the_tokens_does_not_matter_and_their_coordinates_do():
    net, (images, _) = build("slat_vae").eval(), pictures(2)
    coords, background = net.structure(images)

    def picture(coords):
        return net.assemble(background, coords, net.code(images, coords, background)[1])

    shuffled = coords[:, torch.randperm(coords.shape[1])]
    torch.testing.assert_close(picture(shuffled), picture(coords), rtol=0, atol=1e-5)
    tokens = slat_vae.take(images - background, coords, 4)
    assert (net.encoder(tokens, coords) - net.encoder(tokens, shuffled)).abs().max() > 1e-2


def test_positions_tell_all_places_apart_and_are_fp32_under_autocast():
    coords = torch.cartesian_prod(torch.arange(64), torch.arange(64))
    with torch.autocast("cpu", torch.bfloat16):
        table = slat_vae.positions(coords, 32)
    assert table.dtype == torch.float32
    frequencies = 1e4 ** -(torch.arange(8, dtype=torch.float64) / 8)
    for axis in (0, 1):
        angles = coords[:, axis, None].double() * frequencies
        want = torch.cat([angles.sin(), angles.cos()], 1)
        torch.testing.assert_close(table[:, 16 * axis:16 * axis + 16].double(), want, rtol=0, atol=1e-5)
    assert torch.unique(table, dim=0).shape[0] == 64 * 64


# --- latent


def test_the_kl_is_that_of_torch_distributions_in_float64_even_close_to_the_prior():
    draw = torch.Generator().manual_seed(0)
    for size in (1e-2, 1.0, 3.0):  # 1e-2: e^v - 1 - v is 5e-5, which a rounded e^v swallows
        moments = torch.randn(4, 6, 16, generator=draw) * size
        mean, logvar = moments.double().chunk(2, -1)
        normal = torch.distributions.Normal(mean, (logvar / 2).exp())
        want = torch.distributions.kl_divergence(normal, torch.distributions.Normal(0.0, 1.0)).sum(-1)
        with torch.autocast("cpu", torch.bfloat16):
            _, kl = slat_vae.KLLatent()(moments)
        assert kl.dtype == torch.float32
        torch.testing.assert_close(kl.double(), want, rtol=2e-5, atol=0)


def test_the_latent_has_the_right_mean_and_deviation_in_training_and_none_in_evaluation():
    moments = torch.tensor([0.5, -2.0, 0.0, math.log(9.0)]).expand(20000, 1, 4)
    torch.manual_seed(0)
    layer = slat_vae.KLLatent()
    z = layer(moments)[0][:, 0]
    torch.testing.assert_close(z.mean(0), torch.tensor([0.5, -2.0]), rtol=0, atol=0.08)
    torch.testing.assert_close(z.std(0), torch.tensor([1.0, 3.0]), rtol=0.03, atol=0)
    assert torch.equal(layer.eval()(moments)[0], moments[..., :2])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_log_variance_of_100_stays_finite_in_every_precision(precision, device):
    assert math.isinf(torch.tensor(11.1).exp().half()) and torch.tensor(100.0).exp().isinf()
    policy = policy_of(precision, device)
    net = build().to(device)
    with torch.no_grad():
        net.encoder.out_layer.bias.chunk(2)[1].fill_(100.0)
    net = policy.prepare(net)
    images, labels = (t.to(device) for t in pictures(8))
    with policy.autocast():
        loss, metrics = net(images, labels)
    (loss * 16).backward()
    assert all(value.isfinite().all() for value in metrics.values())
    assert all(p.grad.isfinite().all() for p in net.parameters())
    torch.testing.assert_close(metrics["kl"].cpu(), torch.full((8,), 4 * (math.exp(10) - 11) / 2), rtol=0.01, atol=0)


def test_draws_at_the_clamp_fit_into_fp16_as_those_at_the_usual_clamp_of_20_do_not():
    noise = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    assert (noise * math.exp(20 / 2)).half().isinf().any()
    assert (noise * math.exp(slat_vae.LOGVAR[1] / 2)).half().isfinite().all()


# --- protocol


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_loss_metrics_and_every_gradient_are_finite_and_evaluation_repeats(precision, device):
    policy = policy_of(precision, device)
    net = policy.prepare(build().to(device))
    images, labels = (t.to(device) for t in pictures(8))
    with policy.autocast():
        loss, metrics = net(images, labels)
    assert loss.dtype == torch.float32 and loss.shape == () and metrics.keys() == {"loss", "mse", "kl"}
    assert all(v.shape == (8,) and v.dtype == torch.float32 and v.isfinite().all() for v in metrics.values())
    torch.testing.assert_close(metrics["loss"].mean(), loss.detach())
    (loss * 1024).backward()
    for name, p in net.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.any(), name
    with torch.no_grad(), policy.autocast():
        first, second = (net.eval()(images, labels)[1]["loss"] for _ in range(2))
        assert torch.equal(first, second)
    with torch.no_grad(), fp32_eval(net):
        precise = net(images, labels)[1]["loss"]
    torch.testing.assert_close(first, precise, rtol=0.02, atol=0.0)


def test_matmuls_run_in_half_and_the_stream_stays_fp32_under_autocast():
    net, seen = build(), {}
    for name, module in net.named_modules():
        module.register_forward_hook(lambda m, i, out, name=name: seen.update({name: out}))
    with torch.autocast("cpu", torch.bfloat16):
        net(*pictures(2))
    dtypes = {name: out.dtype for name, out in seen.items() if isinstance(out, torch.Tensor)}
    for side in ("encoder", "decoder"):
        for name in ("input_layer", "blocks.0.attn.to_qkv", "blocks.0.attn.to_out", "blocks.0.mlp", "out_layer"):
            assert dtypes[f"{side}.{name}"] == torch.bfloat16, name
        assert dtypes[f"{side}.blocks"] == torch.float32
    assert [t.dtype for t in seen["latent"]] == [torch.float32] * 2


def test_show_puts_eight_originals_above_their_reconstructions():
    net, (images, labels) = build("slat_vae"), pictures(12)
    out = net.show(images, labels)
    assert net.training and out.shape == (24, 3, 32, 32) and torch.equal(out, net.show(images, labels))
    assert torch.equal(out[:8], images[:8]) and torch.equal(out[16:20], images[8:])
    mse = net.eval()(images, labels)[1]["mse"]
    shown = torch.cat([out[8:16], out[20:]])
    torch.testing.assert_close((shown - images).square().mean((1, 2, 3)), mse)


@pytest.mark.parametrize("image_size", [32, 64])
def test_the_preset_has_as_many_tokens_at_64_pixels_and_refuses_other_sizes(image_size):
    net = build("slat_vae", image_size)
    images = torch.randn(2, 3, image_size, image_size)
    assert net.structure(images)[0].shape == (2, 48, 2)  # three quarters of 64
    assert net(images, torch.zeros(2, dtype=torch.int64))[0].isfinite()
    with pytest.raises(ValueError, match=f"image_size={image_size}"):
        net(F.pad(images, (8, 8, 8, 8)), torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("options", [dict(patch_size=5), dict(heads=3), dict(dim=30)])
def test_sizes_that_do_not_divide_are_refused(options):
    with pytest.raises(ValueError, match="not a multiple"):
        build(**options)


def test_the_published_size_has_twelve_blocks_of_768_and_the_test_preset_is_small():
    with torch.device("meta"):
        net = build("slat_vae-b", 64)
    assert len(net.encoder.blocks) == len(net.decoder.blocks) == 12 and net.encoder.out_layer.out_features == 2 * 8
    assert 165e6 < sum(p.numel() for p in net.parameters()) < 175e6  # 2 * 12 * 12 * 768**2 = 170 million
    assert sum(p.numel() for p in build().parameters()) < 100_000


def test_it_is_one_graph_for_torch_compile():
    net = build().eval()
    images, labels = pictures(4)
    compiled = torch.compile(net, backend="eager", fullgraph=True)  # fullgraph: a graph break raises
    torch.testing.assert_close(compiled(images, labels)[0], net(images, labels)[0])


def test_a_few_images_are_learnt_far_better_than_their_background():
    net, (images, labels) = build(), pictures(40)
    _, background = net.structure(images)
    trivial = (background - images).square().mean()
    optimizer = ClippedAdamW(param_groups(net), lr=5e-3)
    for _ in range(200):
        net(images, labels)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        mse = net.eval()(images, labels)[1]["mse"].mean()
    inactive = net.assemble(*reversed(net.structure(images)), torch.zeros(40, net.active, 192))
    assert torch.equal(inactive, background)
    assert mse < 0.7 * trivial, (mse, trivial)


# --- half torso


def train_half(net, steps=40, **options):
    images, labels = pictures(40)
    optimizer = ClippedAdamW(param_groups(net), lr=3e-3, **options)
    scaler, losses = amp_policy.LossScaler("cpu", init_scale=2.0**10), []
    for _ in range(steps):
        loss, _ = net(images, labels)
        scaler.scale(loss).backward()
        result = optimizer.step(grad_scale=scaler.scale_tensor)
        scaler.update(found_inf=result.found_inf)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_half_torso_is_fp16_in_the_blocks_and_fp32_at_both_ends():
    net = build(half_torso=True)
    for name, p in net.named_parameters():
        assert p.dtype == (torch.float16 if ".blocks." in name else torch.float32), name
    loss, _ = net(*pictures(4))
    assert loss.dtype == torch.float32 and loss.isfinite()
    clone = build(half_torso=True)
    clone.load_state_dict(net.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), clone.parameters(), strict=True))


def test_a_half_torso_without_masters_is_refused_by_the_optimizer_and_dies_in_adamw():
    net = build(half_torso=True)
    with pytest.raises(ValueError, match="masters=True"):
        ClippedAdamW(param_groups(net))
    net(*pictures(8))[0].backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())
    torch.optim.AdamW(net.parameters(), lr=1e-4, foreach=True).step()
    dead = {name for name, p in net.named_parameters() if not p.isfinite().all()}
    assert dead == {name for name, p in net.named_parameters() if ".blocks." in name}


def test_a_half_torso_trains_with_masters_as_the_fp32_net_does():
    half, full = train_half(build(half_torso=True), masters=True), train_half(build())
    assert half[-1] < 0.8 * half[0] and abs(half[-1] - full[-1]) < 0.05 * full[0]


@pytest.mark.parametrize("precision", ["bf16", "fp16", "O2"])
def test_a_half_torso_runs_at_every_level_and_in_fp32_evaluation(precision):
    policy = policy_of(precision)
    net = policy.prepare(build(half_torso=True)).eval()
    images, labels = pictures(8)
    with policy.autocast():
        loss, _ = net(images, labels)
    loss.backward()
    with torch.no_grad(), fp32_eval(net):
        torch.testing.assert_close(net(images, labels)[0], loss.detach(), rtol=0.02, atol=0.0)


def test_o2_with_pinned_ends_stores_what_half_torso_stores():
    net = build()
    keep_fp32(net, ["*.input_layer", "*.out_layer"])
    policy_of("O2").prepare(net)
    half = build(half_torso=True)
    for (name, p), q in zip(net.named_parameters(), half.parameters(), strict=True):
        assert p.dtype == q.dtype and torch.equal(p, q), name
    images, labels = pictures(8)
    torch.testing.assert_close(net.eval()(images, labels)[0], half.eval()(images, labels)[0], rtol=1e-3, atol=0)
