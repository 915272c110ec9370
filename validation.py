"""
Validation: in fp32 whatever the training precision, and beside it what low precision says.

A model may train well and evaluate to NaN: VMamba's loss fell for epochs while every evaluation
under fp16 autocast overflowed, because one module's precision depended on train() and eval(). So
the two numerics are checked separately: the figures come from fp32 weights with autocast off, and a
few batches are evaluated both ways and compared.

Every image is counted once on any number of ranks: ranks' shares differ in size, so sums are added
up, never means. This file is wiring: train.py calls it.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchvision.utils import save_image

import optim
import predict
from amp_policy import HALF, Policy
from data import batches
from extras.graphs import StepGraph
from fp32 import disagreement, fp32_eval
from guards import LIMIT
from ranks import out_of_memory, share_buffers
from record import Run
from rescue import notice

SAMPLE = 500  # images that are evaluated before a checkpoint becomes last_good
INDEPENDENT = "val_input_ignored"  # 1.0: the outputs do not depend on the input


@contextlib.contextmanager
def evaluated_weights(run: Run) -> Any:
    """Inside, run.model computes with what is evaluated: the average where there is one, in fp32
    unless --eval-precision same."""
    masters = optim.master_params(run.optimizers)
    forced = run.args.eval_precision == "fp32"
    weights = masters.values() if forced else masters.keys()
    with (
        run.ema.swap(list(weights)) if run.ema else contextlib.nullcontext(),
        fp32_eval(run.net, masters) if forced else run.policy.autocast(),
    ):
        yield


def validate(run: Run) -> str:
    """Set run.scores, keep the best weights. Returns a warning or "".

    Buffers become rank 0's on every rank. Rank 0 alone compares the precisions, shows what the
    model makes, and writes.
    """
    share_buffers(run.net)
    normalize, warning = run.stream.normalize, ""
    with evaluated_weights(run):
        split = batches.val_batches(
            *run.data.val, normalize, batch_size=500, rank=run.rank, world_size=run.world_size,
            device=run.device, workers=run.args.workers)
        run.scores = evaluate(run.model, split, graph=run.graph)
        if run.rank == 0:
            path = run.folder / f"shown/{run.step:07d}"
            if shown := show(run.model, *some(run, 16), path, normalize):
                run.log.picture(shown, run.step)
    if run.policy.dtype in HALF and run.rank == 0:
        count = min(600, len(run.data.val[1]))
        pieces = zip(*(t.split(200) for t in some(run, count)), strict=True)
        masters = optim.master_params(run.optimizers)
        gaps, warning = both_ways(run.model, pieces, run.policy, masters)
        run.scores |= gaps
    score = judged(run, run.scores)
    is_best = run.best is None or score > run.best
    if math.isfinite(score) and is_best:
        run.best = score
        if run.rank == 0:
            run.checkpoints.save_best(best_weights(run))
            (run.folder / "model.json").write_text(json.dumps(predict.describe(run), indent=1))
    return warning


def judged(run: Run, scores: dict[str, float]) -> float:
    """The score by which models are compared: the higher, the better."""
    name = run.model.judged_by  # "-loss": the lower, the better
    return -scores[f"val_{name[1:]}"] if name[0] == "-" else scores[f"val_{name}"]


def is_lost(run: Run, scores: dict[str, float], patient: bool = False, kept: float = 0.2) -> str:
    """Why these scores say that the model is lost, or "". Measured against what was learnt, of
    which `kept` has to be left.

    patient: accuracy at chance counts when it lasts, or at the end of the run: a rate ten times too
    high, or an epoch of one step, brings it there and back.
    """
    trend, loss = run.healing.trend, scores["val_loss"]
    if not all(abs(x) <= LIMIT for name, x in scores.items() if name.startswith("val_")):
        return f"the validation is not finite: {scores}"
    if scores.get(INDEPENDENT):
        return "the outputs no longer depend on the input"
    if loss > 20 * trend.start > 0:  # an untrained model does better by far
        return (f"the validation loss is {loss:.4g}, and before anything was learnt the training "
                f"loss was {trend.start:.4g}")
    reason = _unlearnt(run, scores, kept)
    if patient:
        trend.chance_since = (trend.chance_since or run.step) if reason else 0
        lasts = run.step - trend.chance_since >= notice.LONG_PATIENCE
        if not lasts and run.step < run.total_steps:
            return ""
    return reason


def _unlearnt(run: Run, scores: dict[str, float], kept: float) -> str:
    """Accuracy that was clearly above chance, and keeps less than this share of that."""
    if "val_acc1" not in scores or run.best is None:
        return ""
    accuracy, images = scores["val_acc1"], len(run.data.val[1])
    chance = 100 / max(1, len(run.data.classes))
    deviation = math.sqrt(chance * (100 - chance) / images)  # of guessing
    learnt = run.best - chance
    if learnt < max(5.0, 4 * deviation) or accuracy > chance + kept * learnt:
        return ""
    return f"accuracy is {accuracy:.1f} %, chance {chance:.1f} %, and it was {run.best:.1f} %"


def sample_is_sound(run: Run) -> bool:
    """Whether a few images are evaluated as well as what was learnt promises: a checkpoint becomes
    last_good by validation, not by silence. Rank 0 looks for all; no random number is drawn."""
    if run.rank or not run.step:
        return True
    count = min(SAMPLE, len(run.data.val[1]))
    kept = torch.get_rng_state()
    with evaluated_weights(run):
        scores = evaluate(run.model, [some(run, count)], alone=True)
    torch.set_rng_state(kept)
    return not is_lost(run, scores, kept=0.8)


def some(run: Run, count: int) -> tuple[Tensor, Tensor]:
    """`count` normalised images (count, C, H, W) and their labels, from all over the set."""
    images, labels = run.data.val
    index = torch.linspace(0, len(labels) - 1, count).long()
    images = torch.stack([images[i] for i in index.tolist()]).to(run.device)
    return run.stream.normalize(images), labels[index].to(run.device)


def best_weights(run: Run) -> dict[str, Tensor]:
    """A state_dict of what was evaluated: fp32, where the network's own weights may be half."""
    masters = optim.master_params(run.optimizers)
    best = run.ema.average if run.ema else masters.values()
    fp32 = {id(p): weight for p, weight in zip(masters, best, strict=True)}
    named = run.net.state_dict(keep_vars=True).items()
    return {name: fp32.get(id(p), p).detach() for name, p in named}


@torch.no_grad()
def evaluate(model: nn.Module, split: Iterable[tuple[Tensor, Tensor]], alone: bool = False,
             graph: StepGraph | None = None) -> dict[str, float]:
    """Mean of every metric over all validation images of all ranks, under the names val_*.

    `alone`: of this rank only. INDEPENDENT is 1 where different images of a label always have the
    same loss, and that loss is not 0.
    """
    model.eval()
    total = 0.0
    for x, y in split:
        parts = [metrics for _, metrics in in_halves(model, x, y, graph)]
        metrics = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        pairs, differ = same_label_pairs(x, y, metrics["loss"])
        rows = torch.stack([torch.ones_like(metrics["loss"]), *metrics.values()])
        sums = rows.double().cpu().sum(1)  # (metrics + 1, B) -> (metrics + 1,)
        total += torch.cat([sums, torch.stack([pairs, differ]).cpu()])
    model.train()
    if dist.is_initialized() and not alone:
        total = total.to(next(model.parameters()).device)
        dist.all_reduce(total)
    count, *sums, pairs, differ = total.tolist()
    scores = {f"val_{name}": x / count for name, x in zip(metrics, sums, strict=True)}
    all_alike = pairs > 0 and differ == 0
    if all_alike and scores["val_loss"] > 1e-6:
        scores[INDEPENDENT] = 1.0
    return scores


def same_label_pairs(x: Tensor, y: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
    """How many neighbours in the order of labels have one label and different images, and how many
    of these differ in their loss."""
    if y.is_floating_point():
        return torch.zeros(2, device=y.device).unbind()
    order = y.argsort()
    content = x.float().flatten(1).square().mean(1)[order]
    same_label = y[order].diff() == 0
    pairs = same_label & (content.diff() != 0)
    differ = pairs & ~(loss[order].diff().abs() <= 1e-6 * loss.abs().max())  # NaN is different
    return pairs.sum(), differ.sum()


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
    return [result for half in halves for result in in_halves(function, *half)]


def both_ways(model: nn.Module, split: Iterable[tuple[Tensor, Tensor]], policy: Policy,
              masters: dict) -> tuple[dict[str, float], str]:
    """What changes in low precision: ({"amp_changed", "amp_nonfinite"}, a warning or "").

    amp_changed: share of predictions that differ from fp32's. amp_nonfinite: share of images whose
    loss is NaN or inf.
    """
    def compare(x: Tensor, y: Tensor) -> Any:
        return disagreement(model, x, y, policy, masters)

    gaps = [gap for x, y in split for gap in in_halves(compare, x, y)]
    parted = [f"{policy.name} and fp32 evaluation differ: {gap}" for gap in gaps if gap.parted]
    changed = sum(gap.changed for gap in gaps) / len(gaps)
    nonfinite = sum(gap.nonfinite for gap in gaps) / len(gaps)
    means = {"amp_changed": changed, "amp_nonfinite": nonfinite}
    return means, parted[0] if parted else ""


def show(model: nn.Module, images: Tensor, labels: Tensor, path: Path, normalize: Any
         ) -> Path | None:
    """Samples, reconstructions or answers for these images, if the model has such: the file written
    at `path` (given without its ending), a picture of rows of 8 or lines of text; or None."""
    if not hasattr(model, "show"):
        return None
    model.eval()
    shown = model.show(images, labels)
    model.train()
    path.parent.mkdir(exist_ok=True)
    if not isinstance(shown, Tensor):
        path = path.with_suffix(".txt")
        path.write_text("".join(f"{line}\n" for line in shown))
        return path
    path = path.with_suffix(".png")
    shown = shown.float() * normalize.std.to(shown) + normalize.mean.to(shown)  # back to 0..255
    save_image(shown.cpu() / 255, path, nrow=8, padding=1)
    return path
