"""
Pretrained: a run that starts from weights that were learnt elsewhere: --init FILE or pretrained.

Sixty pictures teach a network little; a network that has seen a million others needs only a new
head. A tensor is loaded where name and shape agree, all others stay new, and both are counted and
named. Three things go wrong in silence elsewhere, and not here:

    normalisation   Weights expect the mean and deviation that they were trained with. They come
                    from the model.json beside the file, or are ImageNet's, not this data's.
    the head        A head of as many classes, but of other ones, is no use: it is new.
    BatchNorm       A frozen module still updates its running statistics in train(). Here it stays
                    in eval().

The head is fitted first, on the features of the loaded weights (Kumar et al., arXiv 2202.10054):
gradients of a random head would spoil what was loaded. Then all learn, the loaded tensors at
plan.SLOW times the rate.
"""

from __future__ import annotations

import fnmatch
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

import checkpoint
from data import read_description, regular
from models import FROM_TORCHVISION
from ranks import refuse

from .record import Run

LEAST = 0.1  # of the numbers of a network: timm's swin shares the last norm's names with ours alone
IMAGENET = {"mean": [123.675, 116.28, 103.53], "std": [58.395, 57.12, 57.375]}  # in 0..255
INSIDE = ("state_dict", "model_state_dict", "model")  # where other programs keep the weights


class Weights(NamedTuple):
    """What --init says, before the network is known."""

    source: str
    tensors: dict[str, Tensor]
    known: dict[str, Any]  # mean and std; of our runs all of model.json


def read(name: str, model: str) -> Weights:
    """Read --init. Raises CheckpointError and OSError, each a sentence that names the file."""
    if name == "pretrained":
        return download(model)
    path = Path(name)
    tree = load(path)
    for key in INSIDE:
        if isinstance(tree, dict) and isinstance(tree.get(key), dict):
            tree = tree[key]
    tensors = {}
    for key, t in tree.items() if isinstance(tree, dict) else ():
        if isinstance(t, Tensor):
            tensors[str(key).removeprefix("module.").removeprefix("_orig_mod.")] = t
    if not tensors:
        raise checkpoint.CheckpointError(f"{path} holds no tensors with names")
    if bad := checkpoint.non_finite(tensors):
        raise checkpoint.CheckpointError(f"{path} is non-finite in {', '.join(bad[:3])}")
    known, facts = IMAGENET, path.with_name("model.json")
    if facts.exists():
        try:
            known = read_description(facts)
        except ValueError as error:
            raise checkpoint.CheckpointError(f"{facts}: {error}") from error
    return Weights(name, theirs_as_ours(model, tensors), known)


def load(path: Path) -> Any:
    """The file's tensors, on the CPU; torch's old format too. It runs no code in the file."""
    regular(path)
    if zipfile.is_zipfile(path):
        return checkpoint.load(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # any kind, as in checkpoint.load
        raise checkpoint.CheckpointError(f"{path} is no file of torch.save's: {error}") from error


def download(model: str) -> Weights:
    """torchvision's weights for this model, from its own cache or the network."""
    theirs = model.replace("-", "_")
    try:
        best = torchvision.models.get_model_weights(theirs).DEFAULT
    except ValueError:
        refuse(
            2,
            f"--init pretrained: torchvision has no weights for {model}; it has some for "
            "resnet18, resnet50, swin-t and swin-v2-t",
        )
    try:
        tensors = best.get_state_dict(progress=False, check_hash=True, weights_only=True)
    except (OSError, RuntimeError) as error:
        refuse(
            2,
            f"--init pretrained: no network, or no {best.url} ({error}): fetch it elsewhere "
            "and pass it as --init FILE",
        )
    made = best.transforms()
    known = {"mean": [255 * x for x in made.mean], "std": [255 * x for x in made.std]}
    return Weights(best.url, theirs_as_ours(model, tensors), known)


def theirs_as_ours(model: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """torchvision's names as ours, where they differ."""
    convert = FROM_TORCHVISION.get(model)
    return convert(tensors) if convert and "features.0.0.weight" in tensors else tensors


def head_of(net: nn.Module, classes: int) -> tuple[str, nn.Module | None]:
    """The name of the last linear layer, if it has an output for each class, and the layer."""
    linear = [(name, m) for name, m in net.named_modules() if isinstance(m, nn.Linear)]
    name, layer = linear[-1] if linear else ("", None)
    return (name, layer) if layer and layer.out_features == classes else ("", None)


def start_from(run: Run, weights: Weights) -> str:
    """Load what fits into run.net, and fit a new head. Returns a sentence about it."""
    mine = run.net.state_dict()
    head, layer = head_of(run.net, len(run.data.classes))
    other_classes = weights.known.get("classes") not in (None, run.data.classes)
    chosen = {}
    for name, t in mine.items():
        given = weights.tensors.get(name)
        is_head = head and name.rpartition(".")[0] == head
        fits = given is not None and given.shape == t.shape
        same_kind = fits and given.is_floating_point() == t.is_floating_point()
        if same_kind and not (is_head and other_classes):
            chosen[name] = given
    new = [name for name in mine if name not in chosen]
    unused = [name for name in weights.tensors if name not in chosen]
    share = sum(mine[name].numel() for name in chosen) / sum(t.numel() for t in mine.values())
    if share < LEAST:
        refuse(
            2,
            f"--init {weights.source} is not for {run.args.model}: {len(chosen)} of its "
            f"{len(weights.tensors)} tensors fit, {share:.1%} of the numbers (it has "
            f"{listed(unused)}; wanted: {listed(new)})",
        )
    run.net.load_state_dict(chosen, strict=False)
    run.start["loaded"] = [*chosen]
    said = (
        f"{weights.source}: {len(chosen)} of {len(mine)} tensors loaded, {share:.1%} of the "
        f"numbers; {len(new)} new: {listed(new)}; {len(unused)} not used: {listed(unused)}"
    )
    classifies = run.model.judged_by == "acc1"
    if classifies and layer and new and {name.rpartition(".")[0] for name in new} == {head}:
        fit_head(run, layer)
        said += f"; {head} was fitted first"
    return said


def listed(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return (", ".join(names[:4]) or "none") + more


def fit_head(run: Run, layer: nn.Linear) -> None:
    """Logistic regression on the features of some training images, with a decay of 1 / images."""
    images, labels = run.data.train
    count = min(len(labels), max(500, 10 * len(run.data.classes)))
    index = torch.linspace(0, len(labels) - 1, count).long()
    margin = (images.shape[-1] - run.data.image_size) // 2
    centre = slice(margin, margin + run.data.image_size)
    features = []
    hook = layer.register_forward_pre_hook(lambda _, args: features.append(args[0].float().cpu()))
    run.net.eval()
    with torch.no_grad():
        for some in index.split(50):
            x = torch.stack([images[i] for i in some.tolist()])[:, :, centre, centre]
            run.net(run.stream.normalize(x.to(run.device)))
    hook.remove()
    run.net.train()
    x, y = torch.cat(features).flatten(0, -2).double(), labels[index].cpu()
    unit = x.square().mean().sqrt()  # the decay is for features of size 1
    x = x / unit
    weight = torch.zeros(layer.out_features, x.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(layer.out_features, dtype=torch.float64, requires_grad=True)
    lbfgs = torch.optim.LBFGS([weight, bias], max_iter=100, line_search_fn="strong_wolfe")

    def closure():
        lbfgs.zero_grad()
        loss = F.cross_entropy(x @ weight.T + bias, y) + weight.square().sum() / (2 * len(y))
        loss.backward()
        return loss

    lbfgs.step(closure)
    with torch.no_grad():
        layer.weight.copy_(weight / unit)
        if layer.bias is not None:
            layer.bias.copy_(bias)


def freeze(net: nn.Module, patterns: list[str]) -> None:
    """No gradient for parameters, and for those in modules, whose name matches a pattern. A
    BatchNorm among these modules stays in eval()."""
    modules, parameters = dict(net.named_modules()), dict(net.named_parameters())
    for pattern in patterns:
        names = fnmatch.filter([*modules, *parameters], pattern)
        if not names:
            refuse(2, f"--freeze {pattern} matches no module or parameter")
        for name in names:
            inside = modules[name].parameters() if name in modules else [parameters[name]]
            for p in inside:
                p.requires_grad_(False)
    if not any(p.requires_grad for p in parameters.values()):
        refuse(2, f"--freeze {' '.join(patterns)} leaves nothing to train")
    for module in modules.values():
        own = [p.requires_grad for p in module.parameters(recurse=False)]
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and own and not any(own):
            module.eval()
            module.train = lambda mode=True, module=module: module  # a parent's train() asks
