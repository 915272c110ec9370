"""Swin: the published networks of both versions, the overflow that version 1 is known for, and that they learn."""

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformer, SwinTransformerBlockV2

import amp_policy
import optim
from data import synthetic
from fp32 import keep_fp32
from models.swin import PRESETS, DropPath, Swin, SwinBlock, WindowAttention


def build(name, image_size=32, **options):
    """The network of a preset, with the patch size that its grid makes."""
    preset = PRESETS[name] | dict(image_size=image_size) | options
    if "grid" in preset:
        preset["patch_size"] = image_size // preset.pop("grid")
    return Swin(**preset)


@torch.no_grad()
def shake(theirs, amount):
    """Move every parameter from the value it starts at: a bias of 0 or a table of 0.02 hides that it is misplaced."""
    for name, p in theirs.named_parameters():
        p.add_(torch.randn_like(p) * amount * (20 if name.endswith(("table", "cpb_mlp.2.weight")) else 1))


@torch.no_grad()
def copy_torchvisions_weights(theirs, ours):
    """torchvision's Swin to ours: what it keeps in one list of features, we keep in stages."""
    conv, _, norm = theirs.features[0]
    ours.embed.proj.weight.copy_(conv.weight.flatten(1))
    ours.embed.proj.bias.copy_(conv.bias)
    ours.embed.norm.load_state_dict(norm.state_dict())
    for i, stage in enumerate(ours.stages):
        if i:
            stage.merge.load_state_dict(theirs.features[2 * i].state_dict())
        for mine, other in zip(stage.blocks, theirs.features[2 * i + 1], strict=True):
            for name in ("norm1", "norm2"):
                getattr(mine, name).load_state_dict(getattr(other, name).state_dict())
            mine.mlp[0].load_state_dict(other.mlp[0].state_dict())
            mine.mlp[2].load_state_dict(other.mlp[3].state_dict())
            weight, bias = other.attn.qkv.weight.chunk(3), other.attn.qkv.bias.chunk(3)
            mine.attn.qv.weight.copy_(torch.cat([weight[0], weight[2]]))
            mine.attn.qv.bias.copy_(torch.cat([bias[0], bias[2]]))
            mine.attn.k.weight.copy_(weight[1])  # its bias: softmax ignores it in version 1, version 2 zeroes it
            mine.attn.proj.load_state_dict(other.attn.proj.state_dict())
            if mine.version == 1:
                mine.attn.bias.table.copy_(other.attn.relative_position_bias_table)
            else:
                mine.attn.logit_scale.copy_(other.attn.logit_scale.flatten())
                mine.attn.bias.mlp.load_state_dict(other.attn.cpb_mlp.state_dict())
    ours.norm.load_state_dict(theirs.norm.state_dict())
    ours.head.load_state_dict(theirs.head.state_dict())


def small(version):
    """Three stages of 16, 8 and 4 tokens a side with windows of 4, of torchvision's blocks and of ours."""
    v2 = dict(block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2) if version == 2 else {}
    theirs = SwinTransformer([2, 2], 24, [2, 2, 2], [2, 3, 4], [4, 4], num_classes=7, stochastic_depth_prob=0.0, **v2)
    sizes = dict(num_classes=7, patch_size=2, dim=24, depths=(2, 2, 2), heads=(2, 3, 4), window=4, version=version)
    return theirs, sizes


@pytest.mark.parametrize(
    "name, image_size",
    [
        ("swin-t", 224),
        ("swin-t", 448),  # 14 tokens a side in the last stage, where 224 leaves a single window: shifted there too
        ("swin-v2-t", 256),
        ("swin-v2-t", 512),
    ],
)
def test_the_published_networks_compute_what_torchvisions_do(name, image_size):
    torch.manual_seed(0)
    theirs = {"swin-t": torchvision.models.swin_t, "swin-v2-t": torchvision.models.swin_v2_t}[name]().eval()
    ours = build(name, num_classes=1000, image_size=image_size).eval()
    assert sum(p.numel() for p in ours.parameters()) / 1e6 == pytest.approx(28.3, abs=0.1)
    shake(theirs, 0.02)
    copy_torchvisions_weights(theirs, ours)
    images = torch.randn(1, 3, image_size, image_size).to(memory_format=torch.channels_last)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("fault", ["none", "regions meet", "crooked offsets", "wrong way round"])
def test_torchvisions_small_network_agrees_and_every_planted_fault_shows(version, fault):
    torch.manual_seed(0)
    theirs, sizes = small(version)
    ours = Swin(**sizes).eval()
    shake(theirs, 0.05)
    copy_torchvisions_weights(theirs, ours)
    for block in (m for m in ours.modules() if isinstance(m, SwinBlock)):
        if fault == "regions meet":
            block.hidden = None
        elif fault == "crooked offsets":
            block.attn.bias.offsets = block.attn.bias.offsets.T
        elif fault == "wrong way round":
            block.shift = -block.shift
    images = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        off = float((ours(images) - theirs.eval()(images)).abs().max())
    assert off < 2e-5 if fault == "none" else off > 2e-3


@torch.no_grad()
def test_grown_logits_overflow_fp16_in_version_1_and_neither_its_island_nor_version_2_do():
    torch.manual_seed(0)
    published = WindowAttention(64, 2, 4, version=1, fp32_logits=False)
    published.qv.weight[:64] *= 300
    published.k.weight *= 300
    island = WindowAttention(64, 2, 4, version=1, fp32_logits=True)
    island.load_state_dict(published.state_dict())
    v2 = WindowAttention(64, 2, 4, version=2, fp32_logits=True)
    v2.load_state_dict({k: v for k, v in published.state_dict().items() if "bias.table" not in k}, strict=False)
    x, out, logits = torch.randn(8, 16, 64), {}, {}
    for dtype in (torch.float16, torch.bfloat16):
        for name, attention in (("published", published), ("island", island), ("v2", v2)):
            with torch.autocast("cpu", dtype):
                q, k, _ = attention.project(x)
                assert q.dtype == dtype and q.isfinite().all() and k.isfinite().all()  # the weights are healthy
                out[name, dtype] = attention(x)
            logits[name, dtype] = attention.logits(q, k)
    half = torch.float16
    assert logits["published", half].isinf().any() and out["published", half].isnan().any()
    assert logits["island", half].dtype == torch.float32 and logits["island", half].abs().max() > 65504
    assert logits["v2", half].abs().max() <= 10.01  # 100 at most; it starts at 10
    assert all(out[name, dtype].isfinite().all() for name, dtype in out if (name, dtype) != ("published", half))
    exact = island(x)
    assert (out["island", half] - exact).norm() < 0.05 * exact.norm()  # not only finite: right


@torch.no_grad()
def test_pinning_the_attention_mends_the_published_overflow():
    torch.manual_seed(0)
    net = build("swin-test", fp32_logits=False)
    for stage in net.stages:
        stage.blocks[1].attn.qv.weight.mul_(300)
        stage.blocks[1].attn.k.weight.mul_(300)
    x = torch.randn(2, 3, 32, 32)
    with torch.autocast("cpu", torch.float16):
        assert not net(x).isfinite().any()
        pinned = keep_fp32(net, ["stages.*.blocks.1.attn"])
        assert pinned == ["stages.0.blocks.1.attn", "stages.1.blocks.1.attn"]
        assert net(x).isfinite().all()


@torch.no_grad()
def test_version_2_clamps_its_scale_at_100_and_its_bias_at_16():
    attention = WindowAttention(32, 2, 4, version=2, fp32_logits=True)
    attention.logit_scale.fill_(9.0)  # e^9 = 8103
    attention.bias.mlp[2].weight.fill_(1e4)
    q = torch.randn(3, 2, 16, 16).half() * 300  # squares beyond 65504
    logits = attention.logits(q, q)
    assert logits.abs().max() <= 100.01
    torch.testing.assert_close(logits.diagonal(dim1=2, dim2=3), torch.full((3, 2, 16), 100.0))
    assert 15.9 < attention.bias().max() <= 16
    assert not attention.logits(q * 0, q).any()  # normalize's eps is 0 in fp16: 0 / 0


@torch.no_grad()
def test_tokens_that_the_shift_brought_together_do_not_see_each_other():
    torch.manual_seed(0)
    block = SwinBlock(16, 2, grid=8, window=4, shift=2, version=1, fp32_logits=True)
    x = torch.randn(1, 8, 8, 16)
    moved = x.clone()
    moved[0, 7, 7] += torch.randn(16)  # rolled by 2 it shares a window with 7, 0 and 0, 0, but no region
    change = (block(moved) - block(x)).abs().sum(-1)[0]
    assert change[7, 7] > 0.1 and change[6:, 6:].all()
    change[6:, 6:] = 0
    assert not change.any()


@pytest.mark.parametrize("name", ["swin-t", "swin-v2-t"])
def test_the_published_sizes_begin_with_the_published_deviation_of_0_02(name):
    torch.manual_seed(0)
    net = build(name, image_size=PRESETS[name]["image_size"])
    for path, module in net.named_modules():
        if isinstance(module, torch.nn.Linear) and module.weight.numel() > 4000 and path != "embed.proj":
            assert module.weight.std().item() == pytest.approx(0.02, rel=0.05), path  # torch cuts at +-2, not at 2 stds


def test_version_2_begins_with_branches_of_nothing():
    torch.manual_seed(0)
    net = build("swin-v2-test").eval()
    x = torch.randn(2, 8, 8, 16)
    assert torch.equal(net.stages[0](x), x)


def test_drop_path_leaves_out_whole_samples_and_keeps_the_mean():
    torch.manual_seed(0)
    drop = DropPath(0.25)
    x = torch.ones(4000, 2, 2, 1)
    out = drop(x).flatten(1)
    assert (out == out[:, :1]).all() and out.unique().tolist() == pytest.approx([0, 4 / 3])
    assert out.mean() == pytest.approx(1, abs=0.04)
    assert drop.eval()(x) is x
    net = build("swin-test", drop_path=0.3)
    assert [round(m.p, 3) for m in net.modules() if isinstance(m, DropPath)] == [0, 0.1, 0.2, 0.3]


@pytest.mark.parametrize("version", ["swin-test", "swin-v2-test"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "O2", "O3"])
def test_loss_and_every_gradient_are_finite_in_every_precision(precision, version):
    torch.manual_seed(0)
    policy = amp_policy.choose_policy(precision, amp_policy.capabilities("cpu"))
    net = build(version, num_classes=7)
    with torch.no_grad():
        for block in (m for m in net.modules() if isinstance(m, SwinBlock)):
            block.norm1.weight.fill_(0.5)  # or the branches of version 2, which begin as nothing, would test nothing
            block.norm2.weight.fill_(0.5)
    net = policy.prepare(net)
    with policy.autocast():
        logits = net(torch.randn(4, 3, 32, 32))
    loss = F.cross_entropy(logits.float(), torch.tensor([0, 1, 2, 6]))
    (loss * 1024).backward()
    assert loss.isfinite()
    for name, p in net.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.any(), name


@pytest.mark.parametrize("name", ["swin", "swin-v2"])
def test_a_preset_by_grid_costs_the_same_at_every_image_size(name):
    for image_size in (32, 64):
        net = build(name, image_size)
        images = torch.randn(1, 3, image_size, image_size)
        assert net.embed(images).shape[1:3] == (8, 8) and net(images).shape == (1, 10)


@pytest.mark.parametrize(
    "wrong, sentence",
    [
        (dict(patch_size=5), "patch_size 5"),
        (dict(window=3), "stage 0, 8 a side, is not a multiple of window 3"),
        (dict(window=8), "stage 1, 4 a side"),
        (dict(heads=(3, 5)), "stage 1, 192, is not a multiple of its heads 5"),
        (dict(heads=(2,)), "2 depths, but 1"),
        (dict(image_size=12, window=3), "stage 1 cannot merge"),
        (dict(version=3), "version 3"),
        (dict(version=2, fp32_logits=False), "version 1's"),
    ],
)
def test_what_cannot_work_is_refused_by_name(wrong, sentence):
    with pytest.raises(ValueError, match=sentence):
        Swin(**wrong)


def test_images_of_another_size_are_refused_instead_of_masked_wrongly():
    with pytest.raises(ValueError, match="built for 32"):
        build("swin-test")(torch.randn(1, 3, 64, 64))


def test_position_biases_and_the_scale_are_not_decayed():
    for name in ("swin-test", "swin-v2-test"):
        net = build(name)
        groups = {g["name"]: {id(p) for p in g["params"]} for g in optim.param_groups(net)}
        attention = net.stages[0].blocks[0].attn
        free = [*attention.bias.parameters(), *([attention.logit_scale] if name == "swin-v2-test" else [])]
        assert {id(p) for p in free} <= groups["no_decay"]
        assert {id(attention.qv.weight), id(attention.k.weight)} <= groups["decay"]


@pytest.mark.parametrize("name", ["swin-test", "swin-v2-test"])
def test_it_overfits_a_handful_of_images(name):
    torch.manual_seed(0)
    images, labels = synthetic.draw(0, 40, seed=0)
    images = images.float() / 128 - 1
    net = build(name)
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    for _ in range(60):
        logits = net(images)
        optimizer.zero_grad()
        F.cross_entropy(logits, labels).backward()
        optimizer.step()
    assert (logits.argmax(1) == labels).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA's autocast casts by another list than the CPU's")
@pytest.mark.parametrize("name", ["swin-test", "swin-v2-test"])
def test_the_dtypes_on_cuda_are_those_of_the_cpu(name):
    seen = {}
    for device in ("cpu", "cuda"):
        net, seen[device] = build(name).to(device), {}
        for path, module in net.named_modules():
            module.register_forward_hook(
                lambda _, inputs, out, path=path, device=device: seen[device].update({path: out.dtype})
            )
        with torch.no_grad(), torch.autocast(device, torch.float16):
            net(torch.randn(2, 3, 32, 32, device=device))
    assert seen["cpu"] == seen["cuda"]
