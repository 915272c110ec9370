"""What the tests of the models share: nets by the name of their preset, images, policies."""

import torch

from data import synthetic
from models import cifarnet, dit, slat_vae, swin, vit, vlm, vmamba

PRECISIONS = ("fp32", "bf16", "fp16", "O2", "O3")
NAMES = [
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
]
KINDS = {
    "cifarnet": (cifarnet.PRESETS, cifarnet.CifarNet),
    "vit": (vit.PRESETS, vit.ViT),
    "swin": (swin.PRESETS, swin.Swin),
    "vmamba": (vmamba.PRESETS, vmamba.VMamba),
    "dit": (dit.PRESETS, dit.DiT),
    "slat_vae": (slat_vae.PRESETS, slat_vae.SLatVAE),
    "vlm": (vlm.PRESETS, vlm.VLM),
    "nanovlm": (vlm.PRESETS, vlm.VLM),
}


def build(name, size=32, **options):
    """The net of a preset, always the same weights; its grid becomes a patch size."""
    presets, constructor = KINDS[name.split("-")[0]]
    options = {"image_size": size} | presets[name] | options
    grid = options.pop("grid", None)
    if grid:
        options.setdefault("patch_size", size // grid)
    if constructor is cifarnet.CifarNet:
        del options["image_size"]
    if constructor is vlm.VLM:
        options.setdefault("class_names", NAMES)
    else:
        options.setdefault("num_classes", len(NAMES))
    torch.manual_seed(0)
    return constructor(**options)


@torch.no_grad()
def shake(net, amount=0.1):
    """Move every parameter off its start: a scale of 0 or a bias of 0 hides what lies behind it."""
    for p in net.parameters():
        p.add_(torch.randn(p.shape) * amount)
    return net


def pictures(count):
    """Synthetic images, fp32 (count, 3, 32, 32) in -2 .. 2, and their labels."""
    images, labels = synthetic.draw(0, count, seed=0)
    return images.float() / 64 - 2, labels


def rename(name, parts):
    """`name` with each of these parts replaced, in their order."""
    for part, other in parts.items():
        name = name.replace(part, other)
    return name
