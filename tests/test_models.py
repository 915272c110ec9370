"""All models: shapes, precision, learning, sizes, recipes. What one model alone risks: its file."""

import re
from functools import partial

import pytest
import torch
from helpers import needs_cuda, policy_for
from nets import NAMES, PRECISIONS, build, pictures, shake

import models
import optim
from fp32 import fp32_eval
from models.classifier import Classifier

SMALL = [name for name in models.MODELS if name.endswith(("-tiny", "-test"))]
STREAMS = ("Block", "SwinBlock", "VSSBlock")


# --- precision ------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", [*SMALL, "slat_vae-half"])
def test_a_model_is_healthy_in_every_precision_and_its_evaluation_repeats(name, precision):
    """Loss, residual stream and gradients; the evaluation is near that of fp32."""
    half_level = precision in ("O2", "O3")
    half_stream = name == "slat_vae-half" or (name.startswith("slat") and half_level)
    policy = policy_for(precision)
    streams = []
    model = models.wrap(policy.prepare(shake(build(name), 0.02)))
    for module in model.modules():
        if type(module).__name__ in STREAMS:
            module.register_forward_hook(lambda _, args, out: streams.append(out.dtype))
    batch = pictures(8)

    with policy.autocast():
        loss, metrics = model(*batch)
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    assert loss.isfinite()
    kinds = {(value.dtype, value.shape) for value in metrics.values()}
    assert kinds == {(torch.float32, (8,))}
    torch.testing.assert_close(metrics["loss"].mean(), loss.detach())
    assert model.judged_by.removeprefix("-") in metrics
    assert half_stream or set(streams) <= {torch.float32}

    (loss * 1024).backward()
    for path, p in model.named_parameters():
        if p.requires_grad:
            assert p.grad.isfinite().all(), path
            assert p.grad.any(), path

    model.eval()
    with torch.no_grad():
        with policy.autocast():
            _, evaluated = model(*batch)
            _, again = model(*batch)
            assert torch.equal(again["loss"], evaluated["loss"])
        with fp32_eval(model):
            _, precise = model(*batch)
            torch.testing.assert_close(evaluated["loss"], precise["loss"], rtol=0.05, atol=0)


def test_the_loss_of_half_logits_is_fp32_and_smoothed_in_training_only():
    logits = torch.tensor([[300.0, -300.0, 0.0]]).half()
    labels = torch.tensor([0])
    model = Classifier(torch.nn.Identity(), label_smoothing=0.2)
    want = torch.nn.functional.cross_entropy(logits.double(), labels, label_smoothing=0.2)

    trained, _ = model(logits, labels)
    evaluated, _ = model.eval()(logits, labels)

    assert trained.item() == pytest.approx(want.item(), rel=1e-6)
    assert evaluated.item() == 0.0


@needs_cuda
@pytest.mark.parametrize("name", SMALL)
def test_the_dtypes_on_cuda_are_those_of_the_cpu(name):
    def note(dtypes, path, module, args, out):
        dtypes[path] = getattr(out, "dtype", None)

    seen = {"cpu": {}, "cuda": {}}
    for device, dtypes in seen.items():
        model = models.wrap(build(name)).to(device)
        for path, module in model.named_modules():
            module.register_forward_hook(partial(note, dtypes, path))
        batch = [t.to(device) for t in pictures(2)]
        with torch.no_grad(), torch.autocast(device, torch.float16):
            model(*batch)

    assert seen["cpu"] == seen["cuda"]


@needs_cuda
@pytest.mark.parametrize("name", SMALL)
def test_every_backward_on_cuda_is_deterministic_and_makes_no_host_wait(name):
    model = models.wrap(build(name)).cuda()
    batch = [t.cuda() for t in pictures(8)]
    loss, _ = model(*batch)
    loss.backward()  # the first step checks the fused paths

    torch.use_deterministic_algorithms(True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss, _ = model(*batch)
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.use_deterministic_algorithms(False)


# --- learning and compiling -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, steps, lr, share",
    [
        ("cifarnet-tiny", 25, 1e-2, 0.4),
        ("vit-test", 40, 5e-3, 0.2),
        ("swin-test", 30, 1e-2, 0.2),
        ("swin-v2-test", 40, 1e-2, 0.2),
        ("vmamba-test", 30, 2e-2, 0.2),
        ("dit-test", 60, 5e-3, 0.7),
        ("slat_vae-test", 60, 1e-2, 0.6),  # vlm: in its own file
    ],
)
def test_the_loss_of_a_few_images_falls_to_a_share_of_what_it_was(name, steps, lr, share):
    net = build(name)
    images, labels = pictures(20)
    if name == "cifarnet-tiny":
        net.init_from_data(images)
    model = models.wrap(net)
    before, _ = model.eval()(images, labels)

    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        loss, _ = model.train()(images, labels)
        loss.backward()
        optimizer.step()

    after, _ = model.eval()(images, labels)
    assert after.item() < share * before.item()


@pytest.mark.parametrize("name", [name for name in SMALL if name != "cifarnet-tiny"])
def test_a_compiled_model_has_the_same_gradients_and_one_graph_unless_it_scans(name):
    def step(model):
        torch.manual_seed(3)
        loss, _ = model(*pictures(4))
        loss.backward()
        gradients = [p.grad for p in model.parameters()]
        return [loss.detach(), *gradients]

    model = models.wrap(shake(build(name)))
    graphs = []
    eager = step(model)
    model.zero_grad()

    def backend(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, backend=backend, fullgraph=name != "vmamba-test")
    torch.testing.assert_close(step(compiled), eager, rtol=1e-4, atol=1e-5)
    if name == "dit-test":  # the attention that the eager step has checked
        assert "scaled_dot_product_attention" in graphs[0].code


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, size, millions",
    [
        ("cifarnet", 32, 2.0),
        ("slat_vae", 32, 0.8),
        ("vlm", 32, 0.4),
        ("vit-s16", 224, 22.0),
        ("vmamba-t", 224, 30.2),
        ("dit-s2", 32, 33.0),  # as published
        ("slat_vae-b", 32, 2 * 12 * 12 * 768**2 / 1e6),
        ("nanovlm", 224, 195.0),
    ],
)
def test_a_preset_has_as_many_parameters_as_it_says(name, size, millions):
    classes = 1000 if name in ("vit-s16", "vmamba-t") else 10
    names = [str(i) for i in range(classes)]
    build_net, _ = models.MODELS[name]
    with torch.device("cpu" if name.startswith("dit") else "meta"):
        net = build_net(names, size)
    count = sum(p.numel() for p in net.parameters())
    assert count / 1e6 == pytest.approx(millions, rel=0.06)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("size, channels", [(64, 3), (32, 1)])
def test_a_model_is_built_for_the_size_and_the_colours_of_the_data(name, size, channels):
    build_net, _ = models.MODELS[name]
    model = models.wrap(build_net(["a", "b", "c"], size, channels))
    images = torch.randn(3, channels, size, size)
    labels = torch.tensor([0, 1, 2])

    if hasattr(model, "init_from_data"):
        model.init_from_data(images)
    loss, _ = model(images, labels)
    assert loss.isfinite()

    if hasattr(model, "show"):
        shown = model.show(images, labels)
        assert len(shown) in (3, 6)


@pytest.mark.parametrize(
    "name, options, sentence",
    [
        ("vit-test", dict(patch_size=5), "patch_size 5"),
        ("vit-test", dict(heads=5), "multiple of heads 5"),
        ("vit-test", dict(dim=6, heads=1), "multiple of 4"),
        ("swin-test", dict(window=3), "stage 0, 8 a side, is not a multiple of window 3"),
        ("swin-test", dict(window=8), "stage 1, 4 a side"),
        ("swin-test", dict(heads=(1, 3)), "stage 1, 32, is not a multiple of its heads 3"),
        ("swin-test", dict(heads=(2,)), "2 depths, but 1"),
        ("swin-test", dict(patch_size=4, image_size=12, window=3), "stage 1 cannot merge"),
        ("swin-v2-test", dict(fp32_logits=False), "needs version 1"),
        ("vmamba-test", dict(dims=(8,)), "1 dims for 2 stages"),
        ("dit-test", dict(fused=("flash",)), "flash"),
        ("slat_vae-test", dict(heads=3), "multiple of heads 3"),
        ("vlm-test", dict(vit_heads=3), "do not split into 3 heads"),
        ("vlm-test", dict(max_length=20), "max_length is 20"),
    ],
)
def test_sizes_that_cannot_work_are_refused_by_name(name, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        build(name, **options)


@pytest.mark.parametrize("name", models.PRESETS)
def test_images_that_do_not_fit_are_refused_with_the_sizes_that_do(name):
    with pytest.raises(models.DoesNotFit, match="--image-size") as refused:
        models.build(name, NAMES, 33, 3)
    taken = str(refused.value).split(" takes ")[1]
    sizes = [int(word) for word in re.findall(r"\d+", taken)]
    with torch.device("cpu" if name.startswith("dit") else "meta"):
        for size in sizes[:3]:
            assert models.build(name, NAMES, size, 3)


def test_class_names_and_targets_that_do_not_fit_are_refused():
    with pytest.raises(models.DoesNotFit, match="class names are too long for vlm"):
        models.build("vlm", ["cat", "c" * 120], 32, 3)
    for name in ("dit-test", "vlm-test"):
        with pytest.raises(models.DoesNotFit, match="targets of this data are numbers"):
            models.wrap(build(name), regression=True)


@pytest.mark.parametrize("name", ["vit-test", "swin-test", "slat_vae-test"])
def test_images_of_another_size_are_refused(name):
    model = models.wrap(build(name))
    large = torch.randn(1, 3, 64, 64)
    with pytest.raises(ValueError, match=r"built for .*32"):
        model(large, torch.zeros(1).long())


def test_the_last_stage_of_a_resnet_sees_more_than_one_pixel():
    build_net, _ = models.MODELS["resnet18"]
    for size in (32, 64):
        net = build_net(list("abc"), size, 1).eval()
        maps = []
        net.layer4.register_forward_hook(lambda _, args, out, maps=maps: maps.append(out.shape[2:]))
        logits = net(torch.randn(2, 1, size, size))
        assert logits.shape == (2, 3)
        assert maps == [(2, 2)]


# --- recipes --------------------------------------------------------------------------------------


def test_every_recipe_has_the_keys_of_the_default_one_and_values_that_work():
    for name, (build_net, recipe) in models.MODELS.items():
        assert recipe.keys() == models.RECIPE.keys(), name
        assert recipe["lr_rule"] in ("sqrt", "linear", "none")

        warmup = int(10 * recipe["warmup"])
        factors = optim.warmup_cosine(10, warmup, kind=recipe["schedule"])
        assert factors[1] > 0

        draws = name.split("-")[0] in ("dit", "slat_vae")
        augment = "flip" if draws else "crop"
        assert recipe["augment"] == augment, f"{name} would draw borders"

        if recipe["small"]:  # it trains on the inner 28 pixels first
            net = build_net(list("abc"), 32).eval()
            logits = net(torch.randn(2, 3, 28, 28))
            assert logits.shape == (2, 3)


@pytest.mark.parametrize(
    "name, free, decayed",
    [
        ("vit-test", ["pos", "norm.weight"], "blocks.0.attn.qkv.weight"),
        ("swin-test", ["stages.0.blocks.0.attn.bias.table"], "stages.0.blocks.0.attn.k.weight"),
        (
            "swin-v2-test",
            ["stages.0.blocks.0.attn.logit_scale", "stages.0.blocks.0.attn.bias.mlp.2.weight"],
            "stages.0.blocks.0.attn.k.weight",
        ),
        (
            "vmamba-test",
            [
                "layers.0.0.op.core.A_logs",
                "layers.0.0.op.core.Ds",
                "layers.0.0.op.core.dt_projs_bias",
            ],
            "layers.0.0.op.core.x_proj",
        ),
        ("vlm-test", ["vision.position"], "vision.patch.weight"),
    ],
)
def test_what_weight_decay_would_harm_is_free_of_it(name, free, decayed):
    net = build(name)
    paths = {p: path for path, p in net.named_parameters()}
    decay = {}
    for group in optim.param_groups(net):
        for p in group["params"]:
            decay[paths[p]] = group["weight_decay"]
    assert [decay[path] for path in free] == [0] * len(free)
    assert decay[decayed] > 0


@pytest.mark.parametrize(
    "name, rising", [("swin-test", [0, 0.1, 0.2, 0.3]), ("vmamba-test", [0, 0.3])]
)
def test_drop_path_drops_whole_samples_in_training_alone(name, rising):
    net = build(name)
    x, _ = pictures(4)
    before = net.train()(x)
    evaluated = net.eval()(x)

    models.set_drop_path(net, 0.3)
    drops = [module for module in net.modules() if type(module).__name__ == "DropPath"]
    assert [drop.p for drop in drops] == pytest.approx(rising)
    assert torch.equal(net.eval()(x), evaluated)
    assert not torch.equal(net.train()(x), before)

    out = drops[-1](torch.ones(4000, 2, 2, 1)).flatten(1)
    kinds, counts = out.unique(dim=0, return_counts=True)
    assert kinds.flatten().tolist() == pytest.approx([0] * 4 + [1 / 0.7] * 4)
    assert counts[0] == pytest.approx(1200, rel=0.15)

    vit = build("vit-test")
    for wrong, share, words in ((net, 1.0, "below 1"), (vit, 0.1, "no drop path")):
        with pytest.raises(models.DoesNotFit, match=words):
            models.set_drop_path(wrong, share)


# --- cifarnet -------------------------------------------------------------------------------------


def test_the_whitening_layer_makes_patches_uncorrelated_and_takes_no_gradient():
    images, _ = pictures(200)
    net = build("cifarnet-tiny")
    net.init_from_data(images, eps=0.0)

    out = net.whiten(images)
    assert not out.requires_grad

    rows = out[:, :12].permute(1, 0, 2, 3).flatten(1).double()
    covariance = rows @ rows.T / rows.shape[1]
    want = torch.eye(12, dtype=torch.float64)
    torch.testing.assert_close(covariance, want, rtol=0, atol=2e-3)


def test_a_group_passes_its_input_on_before_the_first_step():
    conv = build("cifarnet-tiny").groups[1].conv2
    x = torch.randn(2, 32, 8, 8)
    torch.testing.assert_close(conv(x), x)
