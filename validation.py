"""
Validation: in fp32 whatever the training precision, and beside it what low precision would have said.

A model may train well and evaluate to NaN: VMamba's loss fell for epochs while every evaluation under fp16 autocast
overflowed, because one module's precision depended on train() and eval(). So the two numerics are checked separately:
the figures come from fp32 weights with autocast off, and a few batches are evaluated both ways and compared.

Every image is counted once on any number of ranks: ranks' shares differ in size, so sums are added up, never means.

Like train.py this file is wiring, kept apart because the loop should be readable at one sitting.
"""

import contextlib

import torch
import torch.distributed as dist
from torchvision.utils import save_image

from data import batches
from fp32 import disagreement, fp32_eval
from ranks import share_buffers


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
    gaps = [disagreement(model, x, y, policy, masters) for x, y in split]
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


class Validation:
    """What an epoch ends with, on every rank: figures from fp32 weights, a look both ways, something to look at.

    Args:
        images, labels: the validation set, uint8 (N, 3, H, W) and int64 (N,).
        normalize: the training stream's.
        forced: whether the figures come from fp32, or from the training precision.
        checkpoints: where the best weights go.
    """

    def __init__(self, model, net, optimizer, average, images, labels, normalize, checkpoints, *, forced, rank,
                 world_size, device, workers):
        self.model, self.net, self.optimizer, self.average = model, net, optimizer, average
        self.images, self.labels, self.normalize, self.checkpoints = images, labels, normalize, checkpoints
        self.forced, self.rank, self.best = forced, rank, None
        self.share = {"rank": rank, "world_size": world_size, "device": device, "workers": workers}
        self.masters = dict(zip(optimizer.model_params, optimizer.params, strict=True))

    def state_dict(self):
        return {"best": self.best}

    def load_state_dict(self, state):
        self.best = state["best"]

    def some(self, count):
        """So many images and labels, from all over the set."""
        index = torch.linspace(0, len(self.labels) - 1, count).long()
        images = torch.stack([self.images[i] for i in index.tolist()]).to(self.share["device"])
        return self.normalize(images), self.labels[index].to(images.device)

    def run(self, policy, step, log):
        """(scores, a warning or ""). Rank 0 alone looks both ways, shows (`log` is told), and keeps the best weights.

        Buffers become rank 0's; what is evaluated is the average where there is one.
        """
        share_buffers(self.net)
        weights = self.optimizer.params if self.forced else self.optimizer.model_params
        warning = ""
        with self.average.swap(weights) if self.average else contextlib.nullcontext():
            with fp32_eval(self.net, self.masters) if self.forced else policy.autocast():
                split = batches.val_batches(self.images, self.labels, self.normalize, batch_size=500, **self.share)
                scores = evaluate(self.model, split)
                if self.rank == 0:
                    path = log.path.parent / f"shown/{step:07d}"
                    if shown := show(self.model, *self.some(16), path, self.normalize):
                        log.picture(shown, step)
            if policy.dtype is not torch.float32 and self.rank == 0:  # a model may train well and evaluate to NaN
                pieces = zip(*(t.split(200) for t in self.some(600)), strict=True)
                gaps, warning = both_ways(self.model, pieces, policy, self.masters)
                scores |= gaps
        name = self.model.judged_by
        score = -scores[f"val_{name[1:]}"] if name[0] == "-" else scores[f"val_{name}"]
        if score == score and (self.best is None or score > self.best):  # NaN is never best
            self.best = score
            if self.rank == 0:
                self.checkpoints.save_best(self.weights())
        return scores, warning

    def weights(self):
        """A state_dict of what was evaluated: fp32, where the network's own weights may be half."""
        best = self.average.average if self.average else self.optimizer.params
        fp32 = {id(p): w for p, w in zip(self.optimizer.model_params, best, strict=True)}
        return {name: fp32.get(id(p), p).detach() for name, p in self.net.state_dict(keep_vars=True).items()}
