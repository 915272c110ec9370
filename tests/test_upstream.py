"""True to the originals: frozen outputs of VMamba, DiT, nanoVLM and TRELLIS. Swin and ViT have
torchvision beside them.

The nets are small, their weights are sines: nothing else has to be stored. The numbers in
tests/upstream.json are those of the ORIGINAL code, never of ours: it ran on the CPU in fp32 (torch
2.14) with our weights copied in. models/README.md names the commits and the script. Largest
differences then: 9e-7.
"""

import json

import pytest
import torch
from helpers import ROOT

from models import dit, slat_vae, vlm, vmamba

# of outputs of order 1: fp32 sums in another order. The other GELU, an eps of 1e-4, two scan
# directions exchanged, another order of channels: each moves them by 1e-4 or more.
TOLERANCE = 1e-5

FROZEN = json.loads((ROOT / "tests/upstream.json").read_text())


def chirp(*shape, start=7):
    """Numbers in [-1, 1] from a formula: sin(0.37 i^2 + i), i counted from `start`.

    In fp64 no machine differs.
    """
    i = torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float64)
    return torch.sin(0.37 * i * i + i).view(shape).float()


def filled(net):
    """The net in eval mode, weights by formula: matrices of gain about 1, scales around 1."""
    for k, (name, p) in enumerate(net.named_parameters()):
        if p.dim() > 1:
            p.copy_(chirp(*p.shape, start=1000 * k) * 1.5 * (p.numel() / len(p)) ** -0.5)
        else:
            p.copy_(0.2 * chirp(*p.shape, start=1000 * k) + name.endswith("weight"))
    return net.eval()


def logits_of_vmamba(**options):
    net = vmamba.VMamba(num_classes=5, stem=2, dims=(16, 32), depths=(1, 2), **options)
    return filled(net)(chirp(2, 3, 32, 32))


def noise_of_dit():
    net = dit.DiT(num_classes=5, image_size=16, patch_size=4, dim=64, depth=2, heads=4, fused=())
    t = torch.tensor([3, 500, 999])
    labels = torch.tensor([0, 4, 2])
    left_out = torch.tensor([False, False, True])
    return filled(net).predict(chirp(3, 3, 16, 16), t, labels, left_out)


def logits_of_vlm():
    """Of three tokens."""
    net = vlm.VLM(
        class_names=["cat", "dog"],
        image_size=16,
        patch_size=4,
        vit_dim=32,
        vit_depth=2,
        vit_heads=2,
        vit_mlp=64,
        lm_dim=32,
        lm_depth=2,
        lm_heads=4,
        lm_kv_heads=2,
        lm_mlp=48,
    )
    rows = [[*net.prompt("What? "), *b"cat"], [vlm.PAD, vlm.PAD, *net.prompt("Is it"), *b"no"]]
    images = filled(net).image_tokens(chirp(2, 3, 16, 16))
    return net.decoder(torch.tensor(rows), images, 3)


def moments_of_slat_vae():
    net = slat_vae.SLatVAE(
        num_classes=1, image_size=32, patch_size=4, dim=64, depth=2, heads=4, latent=4
    )
    coords = torch.tensor(
        [[[0, 0], [1, 7], [2, 3], [5, 4], [7, 7]], [[0, 3], [3, 0], [4, 4], [6, 1], [7, 2]]]
    )
    return filled(net).encoder(chirp(2, 5, 48), coords)


OURS = {
    "VMamba": lambda: logits_of_vmamba(**vmamba.BLOCK),
    "VMamba, gated": lambda: logits_of_vmamba(d_state=4, gate=True, mlp_ratio=0.0),
    "DiT": noise_of_dit,
    "nanoVLM": logits_of_vlm,
    "TRELLIS": moments_of_slat_vae,
}


@pytest.mark.parametrize("name", FROZEN)
@torch.no_grad()
def test_our_model_returns_what_the_original_returned(name):
    out = OURS[name]().flatten(1)
    five = out[:, :: max(1, out.shape[1] // 5)][:, :5]  # of each image, spread over the output
    torch.testing.assert_close(five, torch.tensor(FROZEN[name]), rtol=0, atol=TOLERANCE)
