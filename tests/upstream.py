"""
Small nets with weights from a formula, for the comparison with the originals.

Nothing has to be stored: the weights are sines. tests/test_upstream.py holds a few outputs of the
originals with these weights. models/README.md says how they were made.
"""

import torch

from models import dit, slat_vae, vlm, vmamba


def chirp(*shape, start=0):
    """Numbers in [-1, 1] from a formula: sin(0.37 i^2 + i), i counted from `start`.

    In fp64 no machine differs.
    """
    i = torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float64)
    return torch.sin(0.37 * i * i + i).view(shape).float()


@torch.no_grad()
def filled(net):
    """The net in eval mode, weights by formula: matrices of gain about 1, scales around 1."""
    for k, (name, p) in enumerate(net.named_parameters()):
        if p.dim() > 1:
            p.copy_(chirp(*p.shape, start=1000 * k) * 1.5 * (p.numel() / len(p)) ** -0.5)
        else:
            p.copy_(0.2 * chirp(*p.shape, start=1000 * k) + name.endswith("weight"))
    return net.eval()


def vmamba_case(**options):
    net = vmamba.VMamba(num_classes=5, stem=2, dims=(16, 32), depths=(1, 2), **options)
    return filled(net), (chirp(2, 3, 32, 32, start=7),)


def dit_case():
    net = dit.DiT(num_classes=5, image_size=16, patch_size=4, dim=64, depth=2, heads=4, fused=())
    t = torch.tensor([3, 500, 999])
    labels = torch.tensor([0, 4, 2])
    left_out = torch.tensor([False, False, True])
    return filled(net), (chirp(3, 3, 16, 16, start=7), t, labels, left_out)


def vlm_case():
    net = vlm.VLM(
        class_names=["cat", "dog"], image_size=16, patch_size=4,
        vit_dim=32, vit_depth=2, vit_heads=2, vit_mlp=64,
        lm_dim=32, lm_depth=2, lm_heads=4, lm_kv_heads=2, lm_mlp=48,
    )  # fmt: skip
    rows = [[*net.prompt("What? "), *b"cat"], [vlm.PAD, vlm.PAD, *net.prompt("Is it"), *b"no"]]
    return filled(net), (chirp(2, 3, 16, 16, start=7), torch.tensor(rows))


def slat_vae_case():
    net = slat_vae.SLatVAE(
        num_classes=1, image_size=32, patch_size=4, dim=64, depth=2, heads=4, latent=4
    )
    coords = torch.tensor(
        [[[0, 0], [1, 7], [2, 3], [5, 4], [7, 7]], [[0, 3], [3, 0], [4, 4], [6, 1], [7, 2]]]
    )
    return filled(net), (chirp(2, 5, 48, start=7), coords)


CASES = {
    "VMamba": lambda: vmamba_case(**vmamba.BLOCK),
    "VMamba, gated": lambda: vmamba_case(d_state=4, gate=True, mlp_ratio=0.0),
    "DiT": dit_case,
    "nanoVLM": vlm_case,
    "TRELLIS": slat_vae_case,
}


@torch.no_grad()
def ours(name):
    """What our net returns, (images, numbers): logits, noise, logits of 3 tokens, moments."""
    net, inputs = CASES[name]()
    if name == "DiT":
        return net.predict(*inputs).flatten(1)
    if name == "nanoVLM":
        images, ids = inputs
        return net.decoder(ids, net.image_tokens(images), 3).flatten(1)
    if name == "TRELLIS":
        return net.encoder(*inputs).flatten(1)
    return net(*inputs)


def five(out):
    """Five numbers of each image, spread over the whole output."""
    return out[:, :: max(1, out.shape[1] // 5)][:, :5]
