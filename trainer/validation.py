"""
Validation: always in fp32, and beside it what half precision says.

A model may train well and evaluate to NaN: VMamba's loss fell for epochs while every evaluation
under fp16 autocast overflowed, because one module's precision depended on train() and eval(). So a
run checks both: it computes the metrics with fp32 weights and autocast off, then evaluates a few
images both ways and compares.

Every image counts once on any number of ranks: the ranks' shares differ in size, so they add up
sums, never means.
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
from data import batches, fingerprint
from extras.graphs import StepGraph
from fp32 import disagreement, fp32_eval
from models.classifier import Classifier
from ranks import agreed, out_of_memory, share_buffers, together

from . import classes
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


def validate(run: Run) -> None:
    """Set run.scores and log them; keep the best weights.

    Every rank takes rank 0's buffers. Only rank 0 compares the precisions, shows what the model
    makes, and writes.
    """
    share_buffers(run.net)
    if run.ema:
        look_at_average(run)
    with evaluated_weights(run):
        rows = []
        run.scores = evaluate_all(run, rows)
        scores = {**run.scores}
        if scores != run.healing.trend.scores:
            run.healing.trend.scores = scores
            run.healing.trend.same_since = run.step
        score = rank_scores(run, scores)
        real = all(abs(x) <= checkpoint.LIMIT for x in score)
        is_best = real and (run.best is None or score > run.best)
        if is_best:
            run.best = score
            if rows:
                classes.write(run, rows)
        if run.rank == 0:
            if is_best:
                run.checkpoints.save_best(run.net.state_dict())
                content = json.dumps(describe(run), indent=1).encode()
                checkpoint.write(run.folder / "model.json", content)
            if hasattr(run.model, "show"):
                path = show(run)
                run.log.write(event="shown", step=run.step, file=f"shown/{path.name}")
    if run.rank == 0 and run.policy.dtype in HALF:
        gap = both_ways(run)
        if gap.parted:
            run.log.warn(run.step, f"{run.policy.name} and fp32 evaluation differ: {gap}")
    log_scores(run)


def log_scores(run: Run) -> None:
    epoch = run.step / run.epoch_steps
    loss = run.healing.trend.mean
    run.log.write(step=run.step, epoch=epoch, train_loss=loss, **run.scores)
    shown = "  ".join(f"{name} {x:.4g}" for name, x in run.scores.items())
    run.log.say(f"epoch {epoch:.2f}  step {run.step}  loss {loss:.4g}  {shown}")


def evaluate_all(run: Run, rows: list | None = None) -> dict[str, float]:
    """The scores of all validation images, on all ranks. rows: see evaluate()."""
    spare = run.rank >= len(run.data.val[1])  # no image is left for this rank: it takes rank 0's
    split = batches.val_batches(
        *run.data.val,
        run.stream.normalize,
        batch_size=500,
        rank=0 if spare else run.rank,
        world_size=run.world_size,
        device=run.device,
        workers=run.args.workers,
    )
    return evaluate(run.model, split, graph=run.graph, rows=rows, spare=spare)


def rank_scores(run: Run, scores: dict[str, float]) -> list[float]:
    """What picks the best weights, the higher, the better. Of equal scores the lower loss wins: of
    few images many are equal."""
    judged_by = run.model.judged_by
    sign = -1 if judged_by[0] == "-" else 1  # -: the lower, the better
    return [sign * scores["val_" + judged_by.removeprefix("-")], -scores["val_loss"]]


def score_again(run: Run, weights: dict[str, Tensor]) -> list[float]:
    """What the weights in best.pt score. If they are the network's, the last validation says it."""
    with evaluated_weights(run):
        now = run.net.state_dict()
        if agreed(all(weights[name].equal(t.to(weights[name])) for name, t in now.items())):
            return rank_scores(run, run.scores)
        before = {name: t.clone() for name, t in now.items()}
        run.net.load_state_dict(weights)
        scores = evaluate_all(run)
        run.net.load_state_dict(before)
    return rank_scores(run, scores)


def look_at_average(run: Run):
    """Log how far the averaged weights are from those that train."""
    distance = float(run.ema.distance(optim.master_params(run.optimizers).values()))
    run.log.write(event="average", step=run.step, distance=distance)
    if not distance <= 1:
        run.log.warn(
            run.step,
            f"the average is {distance:.3g} times the weights' norm away from "
            "them: it no longer follows them",
        )


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
def evaluate(
    model: nn.Module,
    split: Iterable[tuple[Tensor, Tensor]],
    alone: bool = False,
    graph: StepGraph | None = None,
    rows: list | None = None,
    spare: bool = False,
) -> dict[str, float]:
    """Mean of every metric over all validation images of all ranks (`alone`: of this rank only),
    under the names val_*.

    rows: gets the labels, guesses and losses of each batch of a classifier. spare: no image counts.
    INDEPENDENT is 1 where different images of a label always have the same loss, and it is not 0.
    """
    model.eval()
    total = 0.0
    for x, y in split:
        parts = [metrics for _, metrics in in_halves(model, x, y, graph)]
        counted = slice(0 if spare else None)
        x, y = x[counted], y[counted]
        metrics = {name: torch.cat([part[name] for part in parts])[counted] for name in parts[0]}
        guess = metrics.pop("guess", None)
        if guess is not None and rows is not None:
            rows.append((y, guess, metrics["loss"]))
        counts = same_label_pairs(x, y, metrics["loss"])
        counts["images"] = torch.ones_like(metrics["loss"])
        added_up = metrics | counts  # by name, of each image: (B,)
        table = torch.stack([*added_up.values()])
        total += table.cpu().double().sum(1)  # (metrics + 3, B) -> (metrics + 3,)
    model.train()
    if together() and not alone:
        total = total.to(next(model.parameters()).device)
        dist.all_reduce(total)
    sums = dict(zip(added_up, total.tolist(), strict=True))
    # Six digits: what is printed is what is compared.
    scores = {f"val_{name}": float(f"{sums[name] / sums['images']:.6g}") for name in metrics}
    if sums["pairs"] and not sums["differ"] and scores["val_loss"] > 1e-6:
        scores[INDEPENDENT] = 1.0
    return scores


def same_label_pairs(x: Tensor, y: Tensor, loss: Tensor) -> dict[str, Tensor]:
    """Compare each image with the next one in the order of labels. (B,) each; the last image has no
    next one. "pairs": the two have one label, different contents, and a loss that is not small.
    "differ": these two have different losses as well."""
    if y.is_floating_point() or not len(y):
        return dict.fromkeys(("pairs", "differ"), torch.zeros_like(loss))
    order = y.argsort()
    content = x.float().flatten(1).square().mean(1)[order]
    pairs = (y[order].diff() == 0) & (content.diff() != 0)
    pairs &= loss[order][1:] > 0.1 * loss.max()  # what is well learnt has the loss 0
    differ = pairs & ~(loss[order].diff().abs() <= 1e-6 * loss.abs().max())  # NaN is different
    return {"pairs": F.pad(pairs, (0, 1)), "differ": F.pad(differ, (0, 1))}


def in_halves(
    function: Callable[[Tensor, Tensor], Any], x: Tensor, y: Tensor, graph: StepGraph | None = None
) -> list[Any]:
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


def describe_set(run: Run) -> dict[str, int | str]:
    """By which the validation set is known again."""
    return {f"val_{key}": value for key, value in fingerprint(*run.data.val).items()}


def contradictions(run: Run) -> list[str]:
    """Why the last validation cannot be believed: sentences, of rank 0. The outputs of a classifier
    for a sample are counted here, without evaluate()."""
    trend = run.healing.trend
    said = []
    if run.rank:
        return said
    learns = run.scores["val_loss"] > 1e-3 * trend.start > 0  # else nothing may be left to learn
    if learns and trend.same_since and run.step - trend.same_since >= 0.2 * run.total_steps:
        said.append(
            f"since step {trend.same_since} each validation has had the same scores to the "
            "last digit: it does not see the weights"
        )
    now = describe_set(run)
    if run.healing.other_set or any(now[key] != run.identity[key] for key in now):
        said.append("the validation images are not those of the start")
    if not isinstance(run.model, Classifier):
        return said
    accuracy, loss = run.scores["val_acc1"], run.scores["val_loss"]

    def outputs(images: Tensor, labels: Tensor) -> Tensor:  # (B, 2): is it right, loss
        logits = run.net(images).float()
        losses = F.cross_entropy(logits, labels, reduction="none")
        return torch.stack([(logits.argmax(1) == labels).float(), losses], 1)

    run.model.eval()
    with torch.no_grad(), torch.random.fork_rng(devices=[]), evaluated_weights(run):
        counted = torch.cat(in_halves(outputs, *sample(run, SAMPLE))).cpu().double()
    run.model.train()
    n, total = len(counted), len(run.data.val[1])
    own, own_loss = counted.mean(0).tolist()
    expected = (n * own + 1) / (n + 2)  # neither 0 nor 1
    deviation = math.sqrt(expected * (1 - expected) / n * (1 - n / total))
    differs = abs(100 * own - accuracy) > 600 * deviation + 150 / n  # six, and one image
    differs |= n == total and abs(own_loss - loss) > 0.02 * own_loss + 1e-3
    # What is wrong has at most half of the probability: a loss of ln 2 or more.
    if differs or (1 - accuracy / 100) * math.log(2) > 1.01 * loss + 1e-3:
        said.append(
            f"{n} validation images, counted again, have an accuracy of {100 * own:.4g} % "
            f"and a loss of {own_loss:.4g}: the validation says {accuracy:.4g} % and "
            f"{loss:.4g} of all"
        )
    return said


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
