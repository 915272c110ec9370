"""Models: shapes, what they promise about precision, and that they learn."""

import pytest
import torch
from torch import nn

import amp_policy
import models
import optim
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


def test_every_recipe_has_the_keys_of_the_default_one_and_values_that_work():
    for name, (_, recipe) in models.MODELS.items():
        assert recipe.keys() == models.RECIPE.keys(), name
        assert recipe["augment"] in ("crop", "flip") and recipe["lr_rule"] in ("sqrt", "linear", "none")
        assert optim.warmup_cosine(10, int(10 * recipe["warmup"]), kind=recipe["schedule"])[1] > 0
        draws = name.split("-")[0] in ("dit", "slat_vae")
        assert recipe["augment"] == ("flip" if draws else "crop"), f"{name}: mirrored borders would be drawn"


@pytest.mark.parametrize("size", [32, 64])
def test_the_last_stage_of_a_resnet_sees_more_than_one_pixel(size):
    net, maps = models.MODELS["resnet18"][0](list("abc"), size).eval(), []
    net.layer4.register_forward_hook(lambda module, args, out: maps.append(out.shape[2:]))
    assert net(torch.randn(2, 3, size, size)).shape == (2, 3) and maps == [(2, 2)]
    assert net.conv1.stride == ((1, 1) if size == 32 else (2, 2))


@pytest.mark.parametrize("name", [name for name, (_, recipe) in models.MODELS.items() if recipe["small"]])
def test_a_net_whose_recipe_has_small_images_takes_them(name):
    net = models.MODELS[name][0](list("abc"), 32).eval()
    assert [net(torch.randn(2, 3, size, size)).shape for size in (28, 32)] == [(2, 3)] * 2


@pytest.mark.parametrize("name, lr, batch_size, drop_path, schedule, weight_decay", [
    ("swin-t", 1e-3, 1024, 0.2, "cosine", 0.05), ("swin-v2-t", 1e-3, 1024, 0.2, "cosine", 0.05),
    ("vmamba-t", 1e-3, 1024, 0.2, "cosine", 0.05), ("dit-s2", 1e-4, 256, 0.0, "constant", 0.0),
    ("slat_vae-b", 1e-4, 32, 0.0, "constant", 0.0)])  # fmt: skip
def test_the_published_sizes_carry_the_published_recipes(name, lr, batch_size, drop_path, schedule, weight_decay):
    recipe = models.MODELS[name][1]
    published = dict(lr=lr, batch_size=batch_size, drop_path=drop_path, schedule=schedule, weight_decay=weight_decay)
    assert {key: recipe[key] for key in published} == published


@pytest.mark.parametrize("name, expected", [("swin-test", [0.0, 0.1, 0.2, 0.3]), ("vmamba-test", [0.0, 0.3])])
def test_drop_path_rises_from_block_to_block_and_changes_training_alone(name, expected):
    torch.manual_seed(0)
    net, x = models.MODELS[name][0](list("abcdefg"), 32), torch.randn(4, 3, 32, 32)
    before, evaluated = net.train()(x), net.eval()(x)
    models.set_drop_path(net, 0.3)
    drops = [m.p for m in net.modules() if type(m).__name__ == "DropPath"]
    assert drops == pytest.approx(expected)
    assert torch.equal(net.eval()(x), evaluated) and not torch.equal(net.train()(x), before)


def test_drop_path_is_refused_where_there_is_none_and_at_1():
    net = models.MODELS["vit-test"][0](list("abc"), 32)
    models.set_drop_path(net, 0.0)
    with pytest.raises(ValueError, match="ViT has no drop path"):
        models.set_drop_path(net, 0.1)
    with pytest.raises(ValueError, match="below 1"):
        models.set_drop_path(net, 1.0)


def test_a_newcomer_s_line_in_the_table_is_a_model(monkeypatch):
    monkeypatch.setitem(models.MODELS, "mine", (lambda names, size: nn.Sequential(nn.Flatten(), nn.Linear(
        3 * size * size, len(names))), models.RECIPE | {"lr": 3e-4}))  # fmt: skip
    build, recipe = models.MODELS["mine"]
    model = models.wrap(build(["a", "b"], 8), recipe["label_smoothing"])
    loss, metrics = model(torch.ones(4, 3, 8, 8), torch.zeros(4).long())
    assert loss.dtype == torch.float32 and metrics["acc1"].shape == (4,)


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


def test_no_gradient_goes_back_to_the_whitening_layer():
    net = CifarNet(**PRESETS["cifarnet-tiny"])
    seen = []
    net.whiten.register_forward_hook(lambda module, inputs, output: seen.append(output.requires_grad))
    net(torch.randn(4, 3, 32, 32)).sum().backward()
    assert seen == [False] and net.whiten.bias is None and net.whiten.weight.grad is None


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
    for _ in range(40):
        loss, metrics = model(images, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert metrics["acc1"].mean() == 100
