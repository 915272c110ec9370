"""SLatVAE: which patches are active, where they go, a latent that survives half precision."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import policy_for
from nets import PRECISIONS, build, pictures

from fp32 import keep_fp32
from models import slat_vae
from optim import ClippedAdamW, param_groups

# --- structure ------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_active_patches_are_those_of_float64_though_half_would_tie_their_energies(precision):
    seeded = torch.Generator().manual_seed(0)
    images = torch.randn(64, 3, 32, 32, generator=seeded)
    exact = images.double()
    coarse = F.avg_pool2d(exact, 4)
    blurred = F.interpolate(coarse, scale_factor=4, mode="bilinear")
    details = F.pixel_unshuffle(exact - blurred, 4)
    energy = details.square().mean(1).flatten(1)

    def highest(energy):
        return energy.topk(32).indices.sort().values

    want = highest(energy)
    tied = highest(energy.bfloat16())
    assert not torch.equal(tied, want)  # the danger is real

    policy = policy_for(precision)
    net = policy.prepare(build("slat_vae", active=0.5))
    with policy.autocast():
        coords, background = net.structure(images)

    assert background.dtype == torch.float32
    assert coords.dtype == torch.int64
    places = coords[..., 0] * 8 + coords[..., 1]
    assert torch.equal(places.sort().values, want)


def test_take_and_put_use_rows_and_columns_as_torchs_unfold_does():
    images = torch.randn(2, 3, 24, 32)  # a square would hide a swap
    coords = torch.tensor(
        [
            [[2, 3], [0, 1], [1, 0]],
            [[0, 0], [2, 0], [1, 3]],
        ]
    )
    places = coords[..., 0] * 4 + coords[..., 1]
    chosen = torch.arange(2)[:, None], places
    cells = F.unfold(images, 8, stride=8).mT.clone()  # 2, 12 patches, 192 numbers

    taken = slat_vae.take(images, coords, 8)
    assert torch.equal(taken, cells[chosen])

    values = torch.randn(2, 3, 192)
    cells[chosen] = values
    whole = F.fold(cells.mT, (24, 32), 8, stride=8)
    filled = slat_vae.put(images, coords, values, 8)
    assert torch.equal(filled, whole)


# --- latent ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-2, 1.0, 2.0])  # 1e-2: a rounded e^v swallows e^v - 1 - v
def test_the_kl_is_that_of_torch_distributions_in_float64_close_to_the_prior_too(size):
    seeded = torch.Generator().manual_seed(0)
    moments = torch.randn(4, 6, 16, generator=seeded) * size
    mean, logvar = moments.double().chunk(2, -1)
    deviation = (logvar / 2).exp()
    normal = torch.distributions.Normal(mean, deviation)
    prior = torch.distributions.Normal(0.0, 1.0)
    want = torch.distributions.kl_divergence(normal, prior).sum(-1)

    with torch.autocast("cpu", torch.bfloat16):
        _, kl = slat_vae.KLLatent()(moments)

    torch.testing.assert_close(kl, want.float(), rtol=2e-5, atol=0)


def test_the_latent_has_the_right_mean_and_deviation_in_training_and_none_in_evaluation():
    mean = torch.tensor([0.5, -2.0])
    deviation = torch.tensor([1.0, 3.0])
    logvar = 2 * deviation.log()
    moments = torch.cat([mean, logvar]).expand(20000, 1, 4)
    torch.manual_seed(0)
    layer = slat_vae.KLLatent()

    drawn, _ = layer(moments)
    torch.testing.assert_close(drawn.mean((0, 1)), mean, rtol=0, atol=0.08)
    torch.testing.assert_close(drawn.std((0, 1)), deviation, rtol=0.03, atol=0)

    kept, _ = layer.eval()(moments)
    assert torch.equal(kept, moments[..., :2])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_log_variance_of_100_stays_finite_in_every_precision(precision):
    policy = policy_for(precision)
    net = build("slat_vae-test")
    _, logvar_bias = net.encoder.out_layer.bias.data.chunk(2)
    logvar_bias.fill_(100.0)
    net = policy.prepare(net)

    with policy.autocast():
        loss, metrics = net(*pictures(8))
    (loss * 16).backward()

    assert all(p.grad.isfinite().all() for p in net.parameters())

    limit = 10  # of a log variance
    kl = (math.exp(limit) - 1 - limit) / 2
    clamped = torch.full((8,), 4 * kl)
    torch.testing.assert_close(metrics["kl"], clamped, rtol=0.01, atol=0)


# --- show, half torso -----------------------------------------------------------------------------


def test_a_half_torso_is_what_o2_with_pinned_ends_stores_and_plain_adamw_is_refused():
    net = build("slat_vae-test")
    half = build("slat_vae-test", half_torso=True)
    keep_fp32(net, ["*.input_layer", "*.out_layer"])
    policy_for("O2").prepare(net)

    pairs = zip(net.named_parameters(), half.parameters(), strict=True)
    for (name, p), q in pairs:
        dtype = torch.float16 if ".blocks." in name else torch.float32
        assert p.dtype == dtype, name
        assert q.dtype == dtype, name
        assert torch.equal(p, q), name

    loss, _ = net.eval()(*pictures(8))
    half_loss, _ = half.eval()(*pictures(8))
    torch.testing.assert_close(half_loss, loss, rtol=1e-3, atol=0)

    groups = param_groups(half)
    with pytest.raises(ValueError, match="masters=True"):
        ClippedAdamW(groups)
