"""
Validation: in fp32 whatever the training precision, and beside it what low precision would have said.

A model may train well and evaluate to NaN: VMamba's loss fell for epochs while every evaluation under fp16 autocast
overflowed, because one module's precision depended on train() and eval(). So the two numerics are checked separately:
the figures come from fp32 weights with autocast off, and a few batches are evaluated both ways and compared.

Every image is counted once on any number of ranks: ranks' shares differ in size, so sums are added up, never means.

Like train.py this file is wiring, kept apart because the loop should be readable at one sitting.
"""

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchvision.utils import save_image

from amp_policy import Policy
from data import batches
from fp32 import disagreement, fp32_eval
from ranks import share_buffers


def validate(run: Any) -> str:
    """Set run.scores: figures from fp32 weights, and how far low precision is from them; run.lost if the model is lost.
    Returns a warning or "".

    `run` is train.py's record of the run. What is evaluated is the average where there is one. Buffers become rank 0's
    on every rank. Rank 0 alone compares the precisions, shows what the model makes, and keeps the best weights.
    """
    share_buffers(run.net)
    optimizer, normalize = run.optimizer, run.stream.normalize
    masters = dict(zip(optimizer.model_params, optimizer.params, strict=True))
    forced, warning = run.args.eval_precision == "fp32", ""
    weights = optimizer.params if forced else optimizer.model_params
    with run.average.swap(weights) if run.average else contextlib.nullcontext():
        with fp32_eval(run.net, masters) if forced else run.policy.autocast():
            split = batches.val_batches(*run.val, normalize, batch_size=500, rank=run.rank, device=run.device,
                                        world_size=run.world_size, workers=run.args.workers)
            run.scores = evaluate(run.model, split)
            run.lost = run.scores.pop("lost", "")
            if run.rank == 0:
                path = run.folder / f"shown/{run.step:07d}"
                if shown := show(run.model, *some(run, 16), path, normalize):
                    run.log.picture(shown, run.step)
        if run.policy.dtype is not torch.float32 and run.rank == 0:  # a model may train well and evaluate to NaN
            pieces = zip(*(t.split(200) for t in some(run, min(600, len(run.val[1])))), strict=True)
            gaps, warning = both_ways(run.model, pieces, run.policy, masters)
            run.scores |= gaps
    name = run.model.judged_by  # "-loss": the lower, the better
    score = -run.scores[f"val_{name[1:]}"] if name[0] == "-" else run.scores[f"val_{name}"]
    if score == score and (run.best is None or score > run.best):  # NaN is never best
        run.best = score
        if run.rank == 0:
            run.checkpoints.save_best(evaluated(run))
    return warning


def some(run: Any, count: int) -> tuple[Tensor, Tensor]:
    """`count` images (count, 3, H, W), normalised, and their labels (count,), from all over the validation set."""
    images, labels = run.val
    index = torch.linspace(0, len(labels) - 1, count).long()
    images = torch.stack([images[i] for i in index.tolist()]).to(run.device)
    return run.stream.normalize(images), labels[index].to(run.device)


def evaluated(run: Any) -> dict[str, Tensor]:
    """A state_dict of what was evaluated: fp32, where the network's own weights may be half."""
    best = run.average.average if run.average else run.optimizer.params
    fp32 = {id(p): w for p, w in zip(run.optimizer.model_params, best, strict=True)}
    return {name: fp32.get(id(p), p).detach() for name, p in run.net.state_dict(keep_vars=True).items()}


@torch.no_grad()
def evaluate(model: nn.Module, split: Iterable[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Mean of every metric over all validation images of all ranks, under the names val_*.

    "lost" is a sentence where the outputs do not depend on the input: all images of a label have the same loss.
    """
    model.eval()
    total = 0.0
    for x, y in split:
        parts = [metrics for _, metrics in in_halves(model, x, y)]
        metrics = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        # (metrics + 1, B) -> (metrics + 1,): the first row counts the images
        sums = torch.stack([torch.ones_like(y), *metrics.values()]).cpu().double().sum(1)
        order = y.argsort()
        gaps, same = metrics["loss"][order].diff().abs(), y[order].diff() == 0
        differ = same & ~(gaps <= 1e-6 * metrics["loss"].abs().max())  # NaN counts as different
        total += torch.cat([sums, torch.stack([same.sum(), differ.sum()]).cpu()])
    model.train()
    if dist.is_initialized():
        total = total.to(next(model.parameters()).device)
        dist.all_reduce(total)
    count, *sums, same, differ = total.tolist()
    scores = {f"val_{name}": value / count for name, value in zip(metrics, sums, strict=True)}
    return scores | ({"lost": "the outputs no longer depend on the input"} if same > 0 == differ else {})


def in_halves(function: Callable[[Tensor, Tensor], Any], x: Tensor, y: Tensor) -> list[Any]:
    """[function(x, y)]; where memory ends, the results for the halves, or for their halves."""
    try:
        return [function(x, y)]
    except torch.OutOfMemoryError:
        if len(x) == 1:
            raise
    halves = zip(x.chunk(2), y.chunk(2), strict=True)
    return [result for half in halves for result in in_halves(function, *half)]


def both_ways(model: nn.Module, split: Iterable[tuple[Tensor, Tensor]], policy: Policy,
              masters: dict) -> tuple[dict[str, float], str]:
    """What changes in low precision, over the batches of `split`: ({"amp_changed", "amp_nonfinite"}, a warning or "").

    amp_changed: share of predictions that differ from fp32's. amp_nonfinite: share of images whose loss is NaN or inf.
    """
    gaps = [gap for x, y in split
            for gap in in_halves(lambda x, y: disagreement(model, x, y, policy, masters), x, y)]
    parted = [f"{policy.name} and fp32 evaluation differ: {gap}" for gap in gaps if gap.parted]
    means = {f"amp_{what}": sum(getattr(gap, what) for gap in gaps) / len(gaps) for what in ("changed", "nonfinite")}
    return means, parted[0] if parted else ""


def show(model: nn.Module, images: Tensor, labels: Tensor, path: Path, normalize: Any) -> Path | None:
    """Samples, reconstructions or answers for these images, if the model has such: the file written at `path`, or None.

    A picture (its rows are 8 wide) or lines of text; `path` comes without its ending.
    """
    if not hasattr(model, "show"):
        return None
    model.eval()
    shown = model.show(images, labels)
    model.train()
    path.parent.mkdir(exist_ok=True)
    if isinstance(shown, Tensor):
        path = path.with_suffix(".png")
        shown = shown.float() * normalize.std.to(shown) + normalize.mean.to(shown)  # back to 0..255
        save_image(shown.cpu() / 255, path, nrow=8, padding=1)
    else:
        path = path.with_suffix(".txt")
        path.write_text("".join(f"{line}\n" for line in shown))
    return path
