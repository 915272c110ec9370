"""
Models: one self-contained file each, and here the table of them. train.py calls every model in the
same way:

    loss, metrics = model(images, labels)

`loss` is an fp32 scalar. `metrics` maps a name to one fp32 number per image. `model.judged_by`
names the metric that picks the best weights ("acc1": higher is better; "-loss": lower is better). A
model that has samples, reconstructions or answers to show has `show(images, labels)`, which returns
images in the space of the input, or lines of text.

To add a model, add one line to MODELS: its name, a function build(class_names, image_size) -> net
(which also takes `channels` if images may have more or fewer than 3), and its recipe.

    "mine": (lambda names, size: MyNet(len(names)), RECIPE | {"lr": 3e-4}),

A net that returns logits is enough: `wrap` adds the loss and the accuracy.
"""

import re
from contextlib import contextmanager

import torchvision
from torch import Tensor, nn

from . import cifarnet, dit, slat_vae, swin, vit, vlm, vmamba
from .classifier import Classifier
from .regressor import Regressor

PRESETS = vit.PRESETS | swin.PRESETS | vmamba.PRESETS | dit.PRESETS | slat_vae.PRESETS | vlm.PRESETS
# Patches a side that belong together, if more than one: a window of the last stage, after three
# merges two by two; the patches that become one token.
TOGETHER = {"swin-t": 7 * 2**3, "swin-v2-t": 8 * 2**3, "nanovlm": vlm.FOLD}

# What torch says when BatchNorm gets one value, or a convolution less than its kernel.
TOO_SMALL = re.compile(
    "more than 1 value per channel|too small|greater than actual input size|maximum size for tensor"
)


class DoesNotFit(ValueError):
    """What the user asked for does not suit the model: a sentence for the user, not a bug."""


@contextmanager
def fitting(name):
    """Raise DoesNotFit for what torch says inside about sizes. A bug keeps its own error."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if not isinstance(error, DoesNotFit) and TOO_SMALL.search(str(error)):
            sentence = f"--image-size or --batch-size is too small for {name}: {error}"
            raise DoesNotFit(sentence) from error
        raise


def resnet(name):
    """torchvision's.

    Below 64 pixels its first convolution keeps the resolution, as in the paper's nets for CIFAR-10:
    else the last stage would see a single pixel.
    """

    def build(names, size, channels=3):
        net = torchvision.models.get_model(name, num_classes=len(names))
        if size < 64:
            net.conv1 = nn.Conv2d(channels, 64, kernel_size=3, padding=1, bias=False)
        elif channels != 3:
            net.conv1 = nn.Conv2d(channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
        if size < 64 or channels != 3:
            nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
        return net

    return build


def convnet(name):
    def build(names, size, channels=3):
        preset = cifarnet.PRESETS[name]
        return cifarnet.CifarNet(num_classes=len(names), channels=channels, **preset)

    return build


def cut(name, size, channels):
    """The options of a net that cuts images of `size` pixels a side into patches.

    Its preset has a patch size, or `grid`, the patches a side: those grow with the image.
    """
    options = dict(PRESETS[name])
    grid = options.pop("grid", None)
    unit = grid or options["patch_size"] * TOGETHER.get(name, 1)
    if size % unit:
        raise DoesNotFit(
            f"{name} takes images of {unit}, {2 * unit} or other multiples of {unit} "
            f"pixels a side, not of {size}: see --image-size"
        )
    if grid:
        options["patch_size"] = size // grid
    return options | {"image_size": size, "channels": channels}


def patches(constructor, name):
    def build(names, size, channels=3):
        return constructor(num_classes=len(names), **cut(name, size, channels))

    return build


def writer(name):
    """A net that writes the name of the class."""

    def build(names, size, channels=3):
        try:
            return vlm.VLM(class_names=names, **cut(name, size, channels))
        except vlm.TooLong as error:
            sentence = f"images of {size} pixels and these class names are too long for {name}"
            raise DoesNotFit(f"{sentence}: {error}") from error

    return build


def set_drop_path(net, p):
    """In training, drop the last block's branches with probability p, earlier ones less."""
    if not p < 1:
        raise DoesNotFit(f"--drop-path {p:g} drops every branch: take a probability below 1")
    if hasattr(net, "set_drop_path"):
        net.set_drop_path(p)
    elif p:
        raise DoesNotFit(
            f"--drop-path {p:g}: {type(net).__name__} has no drop path, only swin and vmamba have"
        )


# lr is the peak rate for batch_size images; lr_rule says how the published recipe scales it with
# the batch: "sqrt", "linear" or "none". warmup is a share of the run. augment is "crop" (a random
# crop and the flip) or "flip" (the centre and the flip): a generative model would learn to draw the
# mirrored borders of padded crops. small is the share of the run, from its start, that trains on
# the inner 7/8 of each side (a convnet that takes images of any size). updates: fewer teach little,
# however many epochs they are.
RECIPE = {
    "lr": 1e-3,
    "lr_rule": "sqrt",
    "lr_scale": {},
    "warmup": 0.2,
    "schedule": "linear",
    "weight_decay": 0.05,
    "muon": [],
    "muon_options": {},
    "batch_size": 256,
    "label_smoothing": 0.0,
    "drop_path": 0.0,
    "ema": 0.0,
    "augment": "crop",
    "small": 0.0,
    "epochs": 30,
    "updates": 300,
}
# With --init. AdamW, as published: nothing was learnt with Muon's steps.
FINE_TUNE = {
    "lr": 1e-3,
    "lr_rule": "sqrt",
    "lr_scale": {},
    "warmup": 0.05,
    "schedule": "cosine",
    "weight_decay": 0.05,
    "muon": [],
    "batch_size": 64,
    "small": 0.0,
    "epochs": 10,
    "updates": 100,
}
# Models whose weights torchvision has under other names: name -> their tensors as ours
FROM_TORCHVISION = {"swin-t": swin.from_torchvision, "swin-v2-t": swin.from_torchvision}
CIFARNET = RECIPE | {
    "lr": 2e-2,
    "lr_scale": {"*.bias": 10.0},
    "warmup": 0.025,
    "weight_decay": 0.2,
    "muon": ["groups.*.weight"],
    "muon_options": {"momentum": 0.6, "ns_steps": 3},
    "batch_size": 1000,
    "label_smoothing": 0.2,
    "small": 0.6,
    "epochs": 10,
}
RESNET = RECIPE | {"label_smoothing": 0.1}
RESNET18 = RESNET | {
    "lr": 8e-3,
    "lr_scale": {"fc.*": 0.2},
    "small": 0.6,
    "epochs": 10,
    "muon": ["layer?.*.conv?.weight", "layer?.*.downsample.0.weight"],
    "muon_options": {"momentum": 0.6, "ns_steps": 3},
}
TRANSFORMER = RECIPE | {"lr": 2e-3, "batch_size": 128, "label_smoothing": 0.1}
VMAMBA = TRANSFORMER | {"lr": 6e-3}
DIT = RECIPE | {"lr": 3e-3, "weight_decay": 0.0, "batch_size": 64, "ema": 0.99, "augment": "flip"}
SLAT_VAE = RECIPE | {"lr": 2e-3, "batch_size": 128, "augment": "flip"}
VLM = RECIPE | {"lr": 3e-3, "batch_size": 128}

# Recipes for CIFAR-10 (their runs: bench/results/trained): Muon for the matrices of the blocks. One
# epoch of swin reached 54.6 % with it and 47.5 % with AdamW alone. Epochs are those of these runs.
VIT = TRANSFORMER | {"lr": 3e-3, "muon": ["blocks.*.weight"], "epochs": 5}
SWIN = TRANSFORMER | {"lr": 3e-3, "muon": ["stages.*.weight"], "epochs": 7}
VMAMBA_CIFAR = TRANSFORMER | {
    "lr": 4e-3,
    "muon": ["layers.*_proj.weight", "layers.*.mlp.*.weight"],
    "epochs": 5,
}
DIT_CIFAR = DIT | {
    "lr": 2e-3,
    "muon": ["blocks.*.attn.*.weight", "blocks.*.mlp.*.weight"],
    "batch_size": 128,
    "epochs": 15,
}
SLAT_VAE_CIFAR = SLAT_VAE | {"lr": 3e-3, "muon": ["*.blocks.*.weight"], "epochs": 2}
VLM_CIFAR = VLM | {"muon": ["*.blocks.*.weight", "projector.proj.weight"], "epochs": 5}

# Recipes of the published sizes, on ImageNet. models/README.md lists what we left out.
SWIN_T = TRANSFORMER | {
    "lr": 1e-3,
    "lr_rule": "linear",
    "batch_size": 1024,
    "warmup": 20 / 300,
    "schedule": "cosine",
    "drop_path": 0.2,
    "epochs": 300,
}
VMAMBA_T = SWIN_T  # VMamba took Swin's recipe
DIT_S2 = DIT | {
    "lr": 1e-4,
    "lr_rule": "none",
    "batch_size": 256,
    "warmup": 0.0,
    "schedule": "constant",
    "ema": 0.9999,
    "epochs": 80,
}
SLAT_VAE_B = SLAT_VAE | {
    "lr": 1e-4,
    "lr_rule": "none",
    "batch_size": 32,
    "warmup": 0.0,
    "schedule": "constant",
    "weight_decay": 0.0,
    "ema": 0.9999,
}

MODELS = {  # name: (build(class_names, image_size, channels=3) -> net, recipe)
    "cifarnet-tiny": (convnet("cifarnet-tiny"), CIFARNET),
    "cifarnet": (convnet("cifarnet"), CIFARNET),
    "resnet18": (resnet("resnet18"), RESNET18),
    "resnet50": (resnet("resnet50"), RESNET),
    "vit-test": (patches(vit.ViT, "vit-test"), TRANSFORMER),
    "vit": (patches(vit.ViT, "vit"), VIT),
    "vit-s16": (patches(vit.ViT, "vit-s16"), TRANSFORMER),
    "swin-test": (patches(swin.Swin, "swin-test"), TRANSFORMER),
    "swin-v2-test": (patches(swin.Swin, "swin-v2-test"), TRANSFORMER),
    "swin": (patches(swin.Swin, "swin"), SWIN | {"epochs": 11}),
    "swin-v2": (patches(swin.Swin, "swin-v2"), SWIN),
    "swin-t": (patches(swin.Swin, "swin-t"), SWIN_T),
    "swin-v2-t": (patches(swin.Swin, "swin-v2-t"), SWIN_T),
    "vmamba-test": (patches(vmamba.VMamba, "vmamba-test"), VMAMBA),
    "vmamba": (patches(vmamba.VMamba, "vmamba"), VMAMBA_CIFAR),
    "vmamba-t": (patches(vmamba.VMamba, "vmamba-t"), VMAMBA_T),
    "dit-test": (patches(dit.DiT, "dit-test"), DIT),
    "dit": (patches(dit.DiT, "dit"), DIT_CIFAR),
    "dit-s2": (patches(dit.DiT, "dit-s2"), DIT_S2),
    "slat_vae-test": (patches(slat_vae.SLatVAE, "slat_vae-test"), SLAT_VAE),
    "slat_vae": (patches(slat_vae.SLatVAE, "slat_vae"), SLAT_VAE_CIFAR),
    "slat_vae-half": (patches(slat_vae.SLatVAE, "slat_vae-half"), SLAT_VAE),
    "slat_vae-b": (patches(slat_vae.SLatVAE, "slat_vae-b"), SLAT_VAE_B),
    "vlm-test": (writer("vlm-test"), VLM),
    "vlm": (writer("vlm"), VLM_CIFAR),
    "nanovlm": (writer("nanovlm"), VLM),
}  # fmt: skip


def build(name, class_names, image_size, channels):
    """The bare network of MODELS for images of this kind."""
    more = () if channels == 3 else (channels,)
    return MODELS[name][0](class_names, image_size, *more)


def wrap(net, label_smoothing=0.0, regression=False, class_weights=None):
    """Return `net` if it returns (loss, metrics) already, else add a loss to it.

    The loss is a classifier's, or with `regression` the mean squared error.
    """
    if class_weights is not None and hasattr(net, "judged_by"):
        raise DoesNotFit("--class-weights is for a network that classifies images")
    if regression and getattr(net, "needs_classes", False):
        raise DoesNotFit(
            f"{type(net).__name__} learns from classes, and the targets of this data "
            "are numbers: take another --model"
        )
    if hasattr(net, "judged_by"):
        return net
    if regression:
        return Regressor(net)
    return Classifier(net, label_smoothing=label_smoothing, class_weights=class_weights)


def misfits(weights, net):
    """Names of a state_dict's tensors that do not match this network's, in order.

    load_state_dict casts in silence, even complex or whole numbers.
    """

    def kinds(state):
        tensors = state.items() if isinstance(state, dict) else ()
        return {
            name: isinstance(t, Tensor) and (t.shape, t.dtype, t.layout, t.device)
            for name, t in tensors
        }

    odd = kinds(weights).items() ^ kinds(net.state_dict()).items()
    return sorted({str(name) for name, _ in odd})
