"""
Validation: always in fp32, and beside it what half precision says.

A model may train well and evaluate to NaN: VMamba's loss fell for epochs while every evaluation
under fp16 autocast overflowed, because one module's precision depended on train() and eval(). So a
run checks both: it computes the metrics with fp32 weights and autocast off, then evaluates a few
images both ways and compares.

Every image counts once on any number of ranks: the ranks' shares differ in size, so they add up
sums, never means. This file is wiring: train.py calls it.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.utils import save_image

import checkpoint
import optim
from amp_policy import HALF
from data import batches
from extras.graphs import StepGraph
from fp32 import disagreement, fp32_eval
from ranks import out_of_memory, share_buffers, together

from .record import Run

SAMPLE = 500  # images that are compared in both precisions, and evaluated before a good save
INDEPENDENT = "val_input_ignored"  # 1.0: the outputs do not depend on the input


@contextmanager
def evaluated_weights(run: Run) -> Iterator[None]:
    """Inside, run.model computes with the weights to evaluate: the average if there is one, in fp32
    unless --eval-precision same. run.net.state_dict() then holds the same weights."""
    masters = optim.master_params(run.optimizers)
    forced = run.args.eval_precision == "fp32"
    weights = masters.values() if forced else masters.keys()
    with (
        run.ema.swap(list(weights)) if run.ema else nullcontext(),
        fp32_eval(run.net, masters) if forced else run.policy.autocast(),
    ):
        yield


def validate(run: Run) -> str:
    """Set run.scores, keep the best weights. Returns a warning or "".

    Every rank takes rank 0's buffers. Only rank 0 compares the precisions, shows what the model
    makes, and writes.
    """
    share_buffers(run.net)
    with evaluated_weights(run):
        split = batches.val_batches(
            *run.data.val, run.stream.normalize, batch_size=500, rank=run.rank,
            world_size=run.world_size, device=run.device, workers=run.args.workers)
        run.scores = evaluate(run.model, split, graph=run.graph)
        judged_by = run.model.judged_by
        sign = -1 if judged_by[0] == "-" else 1  # -: the lower, the better
        value = sign * run.scores["val_" + judged_by.removeprefix("-")]
        score = [value, -run.scores["val_loss"]]  # few images: many scores are equal
        is_best = all(map(math.isfinite, score)) and (run.best is None or score > run.best)
        if is_best:
            run.best = score
        if run.rank == 0:
            if is_best:
                run.checkpoints.save_best(run.net.state_dict())
                content = json.dumps(describe(run), indent=1).encode()
                checkpoint.write(run.folder / "model.json", content)
            if hasattr(run.model, "show"):
                path = show(run)
                run.log.write(event="shown", step=run.step, file=f"shown/{path.name}")
    if run.rank or run.policy.dtype not in HALF:
        return ""
    gap = both_ways(run)
    return f"{run.policy.name} and fp32 evaluation differ: {gap}" if gap.parted else ""


def describe(run: Run) -> dict:
    """What model.json says of the weights in best.pt."""
    return {
        "model": run.args.model,
        **run.data.describe(),
        "precision": "fp32",
        "evaluated": {"step": run.step, "ema": run.args.ema, **run.scores},
    }


def sample(run: Run, count: int) -> tuple[Tensor, Tensor]:
    """`count` normalised images (count, C, H, W) and their labels, from all over the set."""
    images, labels = run.data.val
    index = torch.linspace(0, len(labels) - 1, min(count, len(labels))).long()
    images = torch.stack([images[i] for i in index.tolist()]).to(run.device)
    return run.stream.normalize(images), labels[index].to(run.device)


@torch.no_grad()
def evaluate(model: nn.Module, split: Iterable[tuple[Tensor, Tensor]], alone: bool = False,
             graph: StepGraph | None = None) -> dict[str, float]:
    """Mean of every metric over all validation images of all ranks (`alone`: of this rank only),
    under the names val_*.

    INDEPENDENT is 1 where different images of a label always have the same loss, and it is not 0.
    """
    model.eval()
    total = 0.0
    for x, y in split:
        parts = [metrics for _, metrics in in_halves(model, x, y, graph)]
        metrics = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        pairs, differ = same_label_pairs(x, y, metrics["loss"])
        rows = torch.stack([torch.ones_like(metrics["loss"]), pairs, differ, *metrics.values()])
        total += rows.cpu().double().sum(1)  # (metrics + 3, B) -> (metrics + 3,)
    model.train()
    if together() and not alone:
        total = total.to(next(model.parameters()).device)
        dist.all_reduce(total)
    count, pairs, differ, *sums = total.tolist()
    # Six digits: what is printed is what is compared.
    scores = {f"val_{name}": float(f"{x / count:.6g}")
              for name, x in zip(metrics, sums, strict=True)}
    if pairs and not differ and scores["val_loss"] > 1e-6:
        scores[INDEPENDENT] = 1.0
    return scores


def same_label_pairs(x: Tensor, y: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
    """Of neighbours in the order of labels, (B,) each: have they one label and different images?
    And different losses besides?"""
    if y.is_floating_point():
        return torch.zeros_like(loss), torch.zeros_like(loss)
    order = y.argsort()
    content = x.float().flatten(1).square().mean(1)[order]
    pairs = (y[order].diff() == 0) & (content.diff() != 0)
    differ = pairs & ~(loss[order].diff().abs() <= 1e-6 * loss.abs().max())  # NaN is different
    return F.pad(pairs, (0, 1)), F.pad(differ, (0, 1))


def in_halves(function: Callable[[Tensor, Tensor], Any], x: Tensor, y: Tensor,
              graph: StepGraph | None = None) -> list[Any]:
    """[function(x, y)]; where memory ends, the results for the halves, or for their halves. The
    step's CUDA graph gives back its pool first."""
    try:
        return [function(x, y)]
    except RuntimeError as error:
        holds_memory = graph and graph.graph
        if not out_of_memory(error) or (len(x) == 1 and not holds_memory):
            raise
    if holds_memory:
        graph.drop()
        return in_halves(function, x, y, graph)
    halves = zip(x.chunk(2), y.chunk(2), strict=True)
    return [result for half in halves for result in in_halves(function, *half, graph)]


def both_ways(run: Run) -> Any:
    """Compare half precision with fp32. Sets amp_changed, the share of predictions that differ from
    fp32's, and amp_nonfinite, the share of images whose loss is NaN or inf, in run.scores. Returns
    the largest Disagreement."""
    masters = optim.master_params(run.optimizers)

    def compare(x: Tensor, y: Tensor) -> Any:
        return disagreement(run.model, x, y, run.policy, masters)

    gaps = in_halves(compare, *sample(run, SAMPLE))
    run.scores["amp_changed"] = sum(gap.changed for gap in gaps) / len(gaps)
    run.scores["amp_nonfinite"] = sum(gap.nonfinite for gap in gaps) / len(gaps)
    return max(gaps, key=lambda gap: gap.parted)


def show(run: Run) -> Path:
    """Samples, reconstructions or answers for 16 images: a picture of rows of 8, or lines of text.
    Returns the file."""
    run.model.eval()
    shown = run.model.show(*sample(run, 16))
    run.model.train()
    folder = run.folder / "shown"
    if folder.is_symlink():
        folder.unlink()
    if isinstance(shown, Tensor):
        path = folder / f"{run.step:07d}.png"
        normalize = run.stream.normalize
        shown = shown.float() * normalize.std.to(shown) + normalize.mean.to(shown)  # to 0..255
        content = io.BytesIO()
        save_image(shown.cpu() / 255, content, format="png", nrow=8, padding=1)
        checkpoint.write(path, content.getvalue())
    else:
        path = folder / f"{run.step:07d}.txt"
        checkpoint.write(path, "\n".join([*shown, ""]).encode())
    return path
