"""ViT: the published network, its bounded logits, and that it learns."""

import pytest
import torch
import torchvision

import amp_policy
import optim
from data import synthetic
from models.vit import PRESETS, Attention, HeadNorm, ViT, sincos


def build(name, image_size=32, **options):
    """The network of a preset, with the patch size that its grid makes."""
    preset = dict(image_size=image_size) | PRESETS[name] | options
    if "grid" in preset:
        preset["patch_size"] = image_size // preset.pop("grid")
    return ViT(**preset)


def grown(attention, factor):
    """Multiply what projects q and k, as training does slowly."""
    with torch.no_grad():
        attention.qkv.weight[: 2 * len(attention.qkv.weight) // 3] *= factor
    return attention


def reference(attention, x):
    """The same attention in float64, written out."""
    B, N, D = x.shape
    qkv = x.double() @ attention.qkv.weight.double().T + attention.qkv.bias.double()
    q, k, v = qkv.view(B, N, 3, attention.heads, -1).permute(2, 0, 3, 1, 4)
    if isinstance(attention.q_norm, HeadNorm):
        q, k = q - q.mean(-1, keepdim=True), k - k.mean(-1, keepdim=True)
        q = q / (q.square().mean(-1, keepdim=True) + 1e-6).sqrt() * attention.q_norm.weight.double()
        k = k / (k.square().mean(-1, keepdim=True) + 1e-6).sqrt() * attention.k_norm.weight.double()
    weights = (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).softmax(-1)
    out = (weights @ v).transpose(1, 2).reshape(B, N, D)
    return out @ attention.proj.weight.double().T + attention.proj.bias.double()


def test_it_computes_what_torchvisions_encoder_computes():
    torch.manual_seed(0)
    theirs = torchvision.models.VisionTransformer(
        image_size=32, patch_size=4, num_layers=3, num_heads=3, hidden_dim=48, mlp_dim=192, num_classes=7
    ).eval()
    ours = ViT(num_classes=7, image_size=32, patch_size=4, dim=48, depth=3, heads=3)
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(torch.randn_like(p) * 0.05)  # no bias and no scale may keep a value under which it is not noticed
        theirs.encoder.pos_embedding = torch.nn.Parameter(ours.pos[None])  # and no class token
        ours.embed.proj.weight.copy_(theirs.conv_proj.weight.flatten(1))
        ours.embed.proj.bias.copy_(theirs.conv_proj.bias)
        for mine, other in zip(ours.blocks, theirs.encoder.layers, strict=True):
            mine.norm1.load_state_dict(other.ln_1.state_dict())
            mine.norm2.load_state_dict(other.ln_2.state_dict())
            mine.attn.qkv.weight.copy_(other.self_attention.in_proj_weight)
            mine.attn.qkv.bias.copy_(other.self_attention.in_proj_bias)
            mine.attn.proj.load_state_dict(other.self_attention.out_proj.state_dict())
            mine.mlp[0].load_state_dict(other.mlp[0].state_dict())
            mine.mlp[2].load_state_dict(other.mlp[3].state_dict())
        ours.norm.load_state_dict(theirs.encoder.ln.state_dict())
        ours.head.load_state_dict(theirs.heads.head.state_dict())
        images = torch.randn(2, 3, 32, 32).to(memory_format=torch.channels_last)
        expected = theirs.heads(theirs.encoder(theirs._process_input(images)).mean(1))
        torch.testing.assert_close(ours(images), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name, millions", [("vit-test", 0.033), ("vit", 0.61), ("vit-s16", 22.05)])
def test_the_presets_have_the_size_they_say(name, millions):
    with torch.device("meta"):
        net = build(name, num_classes=1000 if name == "vit-s16" else 10)
    assert sum(p.numel() for p in net.parameters()) / 1e6 == pytest.approx(millions, rel=0.02)


@pytest.mark.parametrize("qk_norm", [False, True])
@torch.no_grad()
def test_attention_agrees_with_float64(qk_norm):
    torch.manual_seed(0)
    attention = Attention(32, 2, qk_norm)
    x = torch.randn(2, 9, 32)
    if qk_norm:
        torch.nn.init.uniform_(attention.q_norm.weight, 0.5, 2)
    torch.testing.assert_close(attention(x).double(), reference(attention, x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_grown_logits_overflow_fp16_and_qk_norm_bounds_them():
    torch.manual_seed(0)
    largest = {}
    for qk_norm in (False, True):
        torch.manual_seed(1)
        attention = grown(Attention(128, 2, qk_norm), 1000)
        with torch.autocast("cpu", torch.float16):
            q, k, _ = attention.project(torch.randn(2, 16, 128))
        assert q.dtype == k.dtype == torch.float16 and q.isfinite().all() and k.isfinite().all()
        logits = (q * 64**-0.5) @ k.transpose(2, 3)
        assert logits.isfinite().all() == qk_norm
        assert logits.softmax(-1).isnan().any() != qk_norm
        largest[qk_norm] = float((q.float() @ k.float().transpose(2, 3)).abs().max() / 8)
    assert largest[False] > 65504 and largest[True] <= 8.01  # sqrt(64), and the rounding of q and k


@torch.no_grad()
def test_bf16_attention_goes_wrong_without_a_warning_when_logits_grow_and_qk_norm_keeps_it_right():
    error = {}
    for qk_norm in (False, True):
        for factor in (1, 30):
            torch.manual_seed(1)
            attention = grown(Attention(128, 2, qk_norm), factor)
            x = torch.randn(4, 64, 128)
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                out = attention(x)
            assert out.isfinite().all()
            exact = reference(attention, x)
            error[qk_norm, factor] = float((out - exact).norm() / exact.norm())
    assert error[False, 1] < 0.01 and error[True, 1] < 0.01 and error[True, 30] < 0.01
    assert error[False, 30] > 0.04


def test_the_residual_stream_keeps_what_bf16_would_lose():
    net = build("vit-test").eval()
    block = net.blocks[0]
    with torch.no_grad():
        for branch in (block.attn.proj, block.mlp[2]):
            branch.weight.zero_()
            branch.bias.fill_(2.0**-10)  # a quarter of the distance to the next bf16 number after 1, so half is lost
        x = torch.ones(1, 16, 32)
        with torch.autocast("cpu", torch.bfloat16):
            out = block(x)
    assert out.dtype == torch.float32 and (out == 1 + 2 * 2.0**-10).all()
    assert (x.bfloat16() + torch.tensor(2.0**-10).bfloat16() == 1).all()


def test_no_two_positions_are_alike():
    table = sincos(8, 32)
    assert table.shape == (64, 32)
    assert (torch.cdist(table, table) + torch.eye(64) * 9).min() > 0.5
    # y and x are the two halves: a row of patches shares the first, a column the second
    grid = table.view(8, 8, 32)
    assert (grid[3, :, :16] == grid[3, :1, :16]).all() and (grid[:, 3, 16:] == grid[:1, 3, 16:]).all()


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "O2", "O3"])
def test_loss_and_every_gradient_are_finite_in_every_precision(precision, qk_norm):
    torch.manual_seed(0)
    policy = amp_policy.choose_policy(precision, amp_policy.capabilities("cpu"))
    net = policy.prepare(build("vit-test", num_classes=7, qk_norm=qk_norm))
    with policy.autocast():
        logits = net(torch.randn(4, 3, 32, 32))
    loss = torch.nn.functional.cross_entropy(logits.float(), torch.tensor([0, 1, 2, 6]))
    (loss * 1024).backward()
    assert loss.isfinite()
    for name, p in net.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.any(), name


@pytest.mark.parametrize("image_size", [32, 64])
def test_a_preset_by_grid_costs_the_same_at_every_image_size(image_size):
    net = build("vit", image_size)
    assert net.embed(torch.randn(1, 3, image_size, image_size)).shape == (1, 8, 8, 128)
    assert net(torch.randn(1, 3, image_size, image_size)).shape == (1, 10)


@pytest.mark.parametrize(
    "wrong, sentence",
    [(dict(patch_size=5), "patch_size 5"), (dict(heads=5), "heads 5"), (dict(dim=6, heads=1), "multiple of 4")],
)
def test_sizes_that_do_not_divide_are_refused_by_name(wrong, sentence):
    with pytest.raises(ValueError, match=sentence):
        ViT(**wrong)


def test_positions_and_norms_are_not_decayed():
    net = build("vit-test", qk_norm=True)
    groups = {g["name"]: {id(p) for p in g["params"]} for g in optim.param_groups(net)}
    assert {id(net.pos), id(net.blocks[0].attn.q_norm.weight)} <= groups["no_decay"]
    assert id(net.blocks[0].attn.qkv.weight) in groups["decay"]


def test_it_overfits_a_handful_of_images():
    torch.manual_seed(0)
    images, labels = synthetic.draw(0, 40, seed=0)
    images = images.float() / 128 - 1
    net = build("vit-test")
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for _ in range(80):
        logits = net(images)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, labels).backward()
        optimizer.step()
    assert (logits.argmax(1) == labels).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA's autocast casts by another list than the CPU's")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_dtypes_on_cuda_are_those_of_the_cpu(dtype):
    seen = {}
    for device in ("cpu", "cuda"):
        net, seen[device] = build("vit-test", qk_norm=True).to(device), {}
        for name, module in net.named_modules():
            module.register_forward_hook(
                lambda _, inputs, out, name=name, device=device: seen[device].update({name: out.dtype})
            )
        with torch.no_grad(), torch.autocast(device, dtype):
            net(torch.randn(2, 3, 32, 32, device=device))
    assert seen["cpu"] == seen["cuda"]
