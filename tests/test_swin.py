"""Swin: torchvision's networks of both versions, and the overflow that version 1 is known for."""

import pytest
import torch
import torchvision
from nets import build, shake

from models.swin import WindowAttention, from_torchvision

HALF = torch.float16


@pytest.mark.parametrize("name, size", [("swin-t", 224), ("swin-v2-t", 256)])
@torch.no_grad()
def test_the_published_networks_compute_what_torchvisions_do(name, size):
    torch.manual_seed(0)
    ours = build(name, num_classes=1000).eval()
    for path, module in ours.named_modules():
        if path.endswith(("qv", "mlp.0", "reduction")):  # begins with the published deviation
            # the smallest has 1,024 numbers: 10 % is 4.5 deviations of their deviation
            assert module.weight.std().item() == pytest.approx(0.02, rel=0.1), path

    make_theirs = getattr(torchvision.models, name.replace("-", "_"))
    theirs = make_theirs().eval()
    for path, p in theirs.named_parameters():
        # the small tables most: a misplaced number shows
        small = path.endswith(("table", "cpb_mlp.2.weight"))
        amount = 0.4 if small else 0.02
        p.add_(torch.randn_like(p) * amount)
    ours.load_state_dict(from_torchvision(theirs.state_dict()))

    images = torch.randn(2, 3, size, size)
    images = images.to(memory_format=torch.channels_last)
    got = ours(images)
    want = theirs(images)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_grown_logits_overflow_fp16_in_version_1_unless_they_are_an_island():
    torch.manual_seed(0)
    published = WindowAttention(64, 2, 4, version=1, fp32_logits=False)
    published.qv.weight[:64] *= 300
    published.k.weight *= 300
    island = WindowAttention(64, 2, 4, version=1, fp32_logits=True)
    island.load_state_dict(published.state_dict())

    x = torch.randn(8, 16, 64)
    exact = island(x)
    with torch.autocast("cpu", HALF):
        q, k, _ = island.project(x)
        logits = island.logits(q, k)
        overflown = published(x)
        error = island(x) - exact

    assert q.dtype == HALF
    assert q.isfinite().all()  # healthy weights
    assert k.isfinite().all()
    assert logits.abs().max() > 65504
    assert not overflown.isfinite().all()
    assert error.norm() < 0.05 * exact.norm()


@torch.no_grad()
def test_version_2_bounds_its_logits_by_116_whatever_it_has_learnt():
    attention = WindowAttention(32, 2, 4, version=2, fp32_logits=True)
    attention.logit_scale.fill_(9.0)  # e^9 = 8103
    attention.bias.mlp[2].weight.fill_(1e4)
    q = torch.randn(3, 2, 16, 16).half() * 300  # squares beyond 65504

    logits = attention.logits(q, q)
    diagonal = logits.diagonal(dim1=2, dim2=3)
    torch.testing.assert_close(diagonal, torch.full((3, 2, 16), 100.0))

    assert 15.9 < attention.bias().max() <= 16

    of_zeros = attention.logits(q * 0, q)  # normalize's eps is 0 in fp16: 0 / 0
    assert not of_zeros.any()


@torch.no_grad()
def test_version_2_begins_with_branches_of_nothing():
    net = build("swin-v2-test").eval()
    x = torch.randn(2, 8, 8, 16)
    stage = net.stages[0]
    assert torch.equal(stage(x), x)
    shake(net)
    assert not torch.equal(stage(x), x)
