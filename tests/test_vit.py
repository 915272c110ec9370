"""ViT: torchvision's network, attention in float64, and what grown logits do to half precision."""

import copy

import pytest
import torch
import torchvision
from nets import build, rename, shake

from models.vit import Attention, ViT, sincos


def grown(qk_norm, factor):
    """Attention of two heads of 64 whose q and k have grown, as they slowly do in training."""
    torch.manual_seed(1)
    attention = Attention(128, 2, qk_norm)
    attention.qkv.weight.data[:256] *= factor
    return attention


def in_float64(attention, qk_norm):
    """The same attention with torch's LayerNorm in place of ours."""
    exact = copy.deepcopy(attention)
    for name in ("q_norm", "k_norm") if qk_norm else ():
        norm = torch.nn.LayerNorm(64, eps=1e-6, bias=False)
        norm.load_state_dict(getattr(attention, name).state_dict())
        setattr(exact, name, norm)
    scores = torch.nn.functional.scaled_dot_product_attention
    exact = exact.double()

    def forward(x):
        q, k, v = exact.project(x.double())
        return exact.proj(scores(q, k, v).transpose(1, 2).flatten(2))

    return forward


THEIRS = {  # part of our name -> part of torchvision's
    "embed.proj": "conv_proj",
    "blocks.": "encoder.layers.encoder_layer_",
    "norm1": "ln_1",
    "norm2": "ln_2",
    "norm.": "encoder.ln.",
    "attn.qkv.": "self_attention.in_proj_",
    "attn.proj": "self_attention.out_proj",
    "mlp.2": "mlp.3",
    "head.": "heads.head.",
}


@torch.no_grad()
def test_it_computes_what_torchvisions_encoder_computes():
    torch.manual_seed(0)
    theirs = torchvision.models.VisionTransformer(
        image_size=32,
        patch_size=4,
        num_layers=3,
        num_heads=3,
        hidden_dim=48,
        mlp_dim=192,
        num_classes=7,
    ).eval()
    ours = ViT(num_classes=7, image_size=32, patch_size=4, dim=48, depth=3, heads=3)
    shake(theirs, 0.05)
    theirs.encoder.pos_embedding = torch.nn.Parameter(ours.pos[None])  # and no class token
    given = dict(theirs.named_parameters())
    for name, p in ours.named_parameters():
        if name != "pos":
            p.copy_(given[rename(name, THEIRS)].reshape(p.shape))
    images = torch.randn(2, 3, 32, 32).to(memory_format=torch.channels_last)
    want = theirs.heads(theirs.encoder(theirs._process_input(images)).mean(1))
    torch.testing.assert_close(ours(images), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "qk_norm, factor, right",
    [
        (False, 1, True),
        (False, 30, False),
        (True, 1, True),
        (True, 30, True),
    ],
)
@torch.no_grad()
def test_bf16_attention_is_right_until_logits_grow_and_with_qk_norm_always(qk_norm, factor, right):
    attention, x = grown(qk_norm, factor), torch.randn(4, 64, 128)
    shake(attention.q_norm, 0.3)
    exact = in_float64(attention, qk_norm)(x)
    torch.testing.assert_close(attention(x).double(), exact, rtol=1e-3, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(x)
    error = (out - exact).norm() / exact.norm()
    assert out.isfinite().all() and (error < 0.01 if right else error > 0.04)


def test_positions_differ_and_rows_share_one_half_and_columns_the_other():
    table = sincos(8, 32)
    assert (torch.cdist(table, table) + torch.eye(64) * 9).min() > 0.5
    rows, columns = table.view(8, 8, 32).chunk(2, dim=2)
    assert (rows == rows[:, :1]).all() and (columns == columns[:1]).all()
    torch.testing.assert_close(build("vit-test").pos.detach(), sincos(4, 32))
