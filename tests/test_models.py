"""Models: shapes, what they promise about precision, and that they learn."""

import pytest
import torch

import amp_policy
import models
from data import synthetic
from models.cifarnet import PRESETS, CifarNet
from models.classifier import Classifier

SMALL = [name for name in models.MODELS if name.endswith(("-tiny", "-test"))]


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "O2", "O3"])
def test_every_model_gives_a_finite_fp32_loss_and_one_metric_per_image_in_every_precision(name, precision):
    torch.manual_seed(0)
    policy = amp_policy.choose_policy(precision, amp_policy.capabilities("cpu"))
    model = models.wrap(policy.prepare(models.MODELS[name][0](list("abcdefg"), 32)), 0.1)
    with policy.autocast():
        loss, metrics = model(torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 6]))
    assert loss.dtype == torch.float32 and loss.shape == () and torch.isfinite(loss)
    assert {value.shape for value in metrics.values()} == {(4,)} and "loss" in metrics
    (loss * 1024).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.requires_grad)


def test_the_loss_ignores_half_precision_and_smooths_in_training_only():
    logits = torch.tensor([[300.0, -300.0, 0.0]]).half()
    model = Classifier(torch.nn.Identity(), label_smoothing=0.2)
    labels = torch.tensor([0])
    reference = torch.nn.functional.cross_entropy(logits.double(), labels, label_smoothing=0.2)
    assert model(logits, labels)[0].item() == pytest.approx(reference.item(), rel=1e-6)
    assert model.eval()(logits, labels)[0].item() == 0.0


def test_the_whitening_layer_makes_patches_uncorrelated_with_unit_variance():
    images = synthetic.draw(0, 300, seed=0)[0].float() / 255
    images = (images - images.mean((0, 2, 3), keepdim=True)) / images.std((0, 2, 3), keepdim=True)
    net = CifarNet(**PRESETS["cifarnet-tiny"])
    net.init_from_data(images, eps=0.0)
    assert not net.whiten.weight.requires_grad
    with torch.no_grad():
        out = net.whiten(images)[:, :12].permute(1, 0, 2, 3).flatten(1).double()
    covariance = out @ out.T / out.shape[1]
    torch.testing.assert_close(covariance, torch.eye(12, dtype=torch.float64), rtol=0, atol=1e-3)


def test_a_group_passes_its_input_on_before_the_first_step():
    net = CifarNet(**PRESETS["cifarnet-tiny"])
    conv = net.groups[1].conv2
    x = torch.randn(2, 32, 8, 8)
    torch.testing.assert_close(conv(x), x)


def test_cifarnet_overfits_a_handful_of_images():
    torch.manual_seed(0)
    images, labels = synthetic.draw(0, 40, seed=0)
    images = images.float() / 128 - 1
    net = CifarNet(**PRESETS["cifarnet-tiny"])
    net.init_from_data(images)
    model = Classifier(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        loss, metrics = model(images, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert metrics["acc1"].mean() == 100
