"""
Validation: in fp32 whatever the training precision, and beside it what low precision would have said.

A model may train well and evaluate to NaN: VMamba's loss fell for epochs while every evaluation under fp16 autocast
overflowed, because one module's precision depended on train() and eval(). So the two numerics are checked separately:
the figures come from fp32 weights with autocast off, and a few batches are evaluated both ways and compared.

Every image is counted once on any number of ranks: ranks' shares differ in size, so sums are added up, never means.

Like train.py this file is wiring, kept apart because the loop should be readable at one sitting.
"""

import torch
import torch.distributed as dist
from torchvision.utils import save_image

import amp_policy


@torch.no_grad()
def evaluate(model, split):
    """Mean of every metric over all validation images, under the names val_*."""
    model.eval()
    total = 0.0
    for x, y in split:
        _, metrics = model(x, y)
        total += torch.stack([torch.ones_like(y), *metrics.values()]).cpu().double().sum(1)
    model.train()
    if dist.is_initialized():
        total = total.to(next(model.parameters()).device)
        dist.all_reduce(total)
    return {f"val_{name}": value for name, value in zip(metrics, (total[1:] / total[0]).tolist(), strict=True)}


def both_ways(model, split, policy, masters):
    """What changes in low precision, over the batches of `split`: ({"amp_changed", "amp_nonfinite"}, a warning or "").

    amp_changed: share of predictions that differ from fp32's; amp_nonfinite: share of images whose loss is NaN or inf.
    """
    gaps = [amp_policy.disagreement(model, x, y, policy, masters) for x, y in split]
    parted = [f"{policy.name} and fp32 evaluation differ: {gap}" for gap in gaps if gap.parted]
    means = {f"amp_{what}": sum(getattr(gap, what) for gap in gaps) / len(gaps) for what in ("changed", "nonfinite")}
    return means, parted[0] if parted else ""


def show(model, images, labels, path, normalize):
    """Samples, reconstructions or answers for these images, if the model has such: the file written at `path`, or None.

    A picture (its rows are 8 wide) or lines of text; `path` comes without its ending.
    """
    if not hasattr(model, "show"):
        return None
    model.eval()
    shown = model.show(images, labels)
    model.train()
    path.parent.mkdir(exist_ok=True)
    if isinstance(shown, torch.Tensor):
        path = path.with_suffix(".png")
        shown = shown.float() * normalize.std.to(shown) + normalize.mean.to(shown)
        save_image(shown.cpu() / 255, path, nrow=8, padding=1)
    else:
        path = path.with_suffix(".txt")
        path.write_text("".join(f"{line}\n" for line in shown))
    return path
