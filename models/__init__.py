"""
Models: one self-contained file each, and here the table of them. train.py calls every model alike:

    loss, metrics = model(images, labels)

`loss` is an fp32 scalar; `metrics` maps a name to one fp32 number an image; `model.judged_by` says which of them picks
the best weights ("acc1": the higher the better; "-loss": the lower). A model that has something to show, samples,
reconstructions or answers, has `show(images, labels)`: images in the space of the input, or lines of text.
"""

import torchvision

from . import cifarnet, dit, slat_vae, swin, vit, vlm, vmamba
from .classifier import Classifier

RECIPE = {"lr": 1e-3, "lr_scale": {}, "warmup": 0.2, "weight_decay": 0.05, "muon": [], "muon_options": {},
          "batch_size": 256, "label_smoothing": 0.0, "ema": 0.0, "epochs": 30, "cuda_graph": False}
MODELS = {}  # name: (build(class_names, image_size) -> network, recipe)


class DoesNotFit(ValueError):
    """The images do not suit the model: a sentence for the user, not a bug."""


def add(presets, constructor, **recipe):
    for name, preset in presets.items():
        MODELS[name] = lambda names, size, preset=preset: constructor(names, size, preset), RECIPE | recipe


def patches(constructor):
    """For networks on patches: a preset's `grid`, patches a side, becomes the patch size that fits the images."""

    def build(names, size, preset):
        preset = dict(preset)
        grid = preset.pop("grid", None)
        if grid and size % grid:
            raise DoesNotFit(f"--image-size {size} does not divide into {grid} patches a side: take a multiple of it")
        if grid:
            preset["patch_size"] = size // grid
        classes = {"class_names": names} if constructor is vlm.VLM else {"num_classes": len(names)}
        return constructor(**preset | classes | {"image_size": size})

    return build


add(cifarnet.PRESETS, lambda names, size, preset: cifarnet.CifarNet(num_classes=len(names), **preset),
    lr=1.7e-2, lr_scale={"*.bias": 10.0}, warmup=0.025, weight_decay=0.2, muon=["groups.*.weight"],
    muon_options={"momentum": 0.6, "ns_steps": 3}, batch_size=1000, label_smoothing=0.2, epochs=9, cuda_graph=True)
add({name: name for name in ("resnet18", "resnet50")},
    lambda names, size, name: torchvision.models.get_model(name, num_classes=len(names)), label_smoothing=0.1)
add(vit.PRESETS, patches(vit.ViT), lr=2e-3, batch_size=128, label_smoothing=0.1)
add(swin.PRESETS, patches(swin.Swin), lr=2e-3, batch_size=128, label_smoothing=0.1)
add(vmamba.PRESETS, patches(vmamba.VMamba), lr=6e-3, batch_size=128, label_smoothing=0.1)
add(dit.PRESETS, patches(dit.DiT), lr=3e-3, weight_decay=0.0, batch_size=64, ema=0.99)
add(slat_vae.PRESETS, patches(slat_vae.SLatVAE), lr=2e-3, batch_size=128)
add(vlm.PRESETS, patches(vlm.VLM), lr=3e-3, batch_size=128)


def wrap(net, label_smoothing=0.0):
    """The network itself if it speaks the protocol; a classifier's logits get their loss."""
    return net if hasattr(net, "judged_by") else Classifier(net, label_smoothing=label_smoothing)
