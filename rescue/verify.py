"""
Verify: find hardware that returns wrong finite numbers.

A guard sees a NaN at once. It cannot see a wrong number that is finite: of a chip that multiplies
wrongly once an hour, or of a bit that flips in memory. The run then ends well with wrong weights
(Dixit et al. 2021, arXiv 2102.11245). So every --verify-every steps (once an epoch) this file
compares two things to the bit:

    a pass run twice   Up to 32 images of the batch go forward and backward twice. The fifth time
                       that the gradients differ the run ends: exit 5, with the rank's name.
    the replicas       All ranks must hold the same weights and moments. Each rank sends a checksum
                       of its own with the guard's flags, in the same all-reduce. Where checksums
                       differ, the majority is right, and the other ranks take its tensors. Two
                       ranks have no majority: all go back to last_good.

Not every device gives the same bits twice. At each new image size and precision the pass first runs
three times. Where these passes differ, later ones are compared within rounding, and a warning says
so.
What one process cannot see: a flipped bit in its own weights (there is no second copy), and a chip
that makes the same mistake each time.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm

import autopsy
import guards
import optim
import ranks
from rescue import heal
from trainer.record import Run

PIECE = 32  # images of the pass that is run twice: 64 of the 50,000 of an epoch are 0.13 %
PRIME = 16_777_213  # the largest below 2^24, so that fp32 holds a checksum exactly
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by a number's size


def checksums(tensors: Iterable[Tensor]) -> Tensor:
    """One number in [0, PRIME) for each tensor, int64 (N,). A flipped bit adds a power of two:
    PRIME divides none."""
    sums = [t.detach().view(BITS[t.itemsize]).sum(dtype=torch.int64) % PRIME for t in tensors]
    return torch.stack(sums)


def replica(run: Run) -> dict[str, Tensor]:
    """Name -> tensor of all that must be the same on every rank: weights, masters, moments."""
    names = {p: name for name, p in run.net.named_parameters()}
    tensors = {name: p.data for p, name in names.items()}
    for p, master in optim.master_params(run.optimizers).items():
        if master is not p:
            tensors[f"{names[p]}'s master"] = master
    for optimizer in run.optimizers:
        for p, state in optimizer.state.items():
            tensors |= {f"{names[p]}'s {key}": t for key, t in state.items() if t.dim()}
    return tensors


def carry_checksum(run: Run) -> None:
    """Put the checksum of this rank's replica into the guard's all-reduce: a MAX over all ranks, so
    that the largest and (negated) the smallest of them arrive."""
    total = (checksums(replica(run).values()).sum() % PRIME).float()
    run.guard.carry("checksum", total)
    run.guard.carry("negative_checksum", -total)


def is_repeated(run: Run, step: int, images: Tensor, labels: Tensor) -> bool:
    """Whether a piece of this batch, run twice, gives the same gradients."""
    images = images[:PIECE]
    labels = labels[:PIECE]
    if run.guard.num_classes is not None:
        labels = labels.clamp(0, run.guard.num_classes - 1)
    kept = autopsy.StepRecord(step, run.net)

    def gradients() -> list[Tensor]:
        run.net.zero_grad()  # of a parameter in no optimizer nobody else does it
        _, by_name = heal.forward_backward(run, (images, labels))
        kept.restore()  # RNG and buffers as before, no gradients
        run.injector.micro = 0  # a planted fault meets each pass, and the step itself
        return [g for g in by_name.values() if g is not None]

    kind = f"{run.policy.name} {tuple(images.shape[1:])}"
    repeatable = run.healing.repeatable
    passes = [gradients() for _ in range(2 if kind in repeatable else 3)]
    outcomes = {tuple(checksums(grads).tolist()) for grads in passes}
    if kind not in repeatable:
        # Of three passes on a CPU two are the same: that is a fault, and the CPU repeats itself.
        fault = len(outcomes) == 2 and run.device.type == "cpu"
        repeatable[kind] = len(outcomes) == 1 or fault
        if not repeatable[kind]:
            run.log.write(
                event="warning", step=step, text="this device does not give the same bits twice"
            )
    rounded = not repeatable[kind] and within_rounding(*passes[:2])
    return len(outcomes) == 1 or rounded


def within_rounding(a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether two gradients differ by less than 1 % of their norm, or both are non-finite."""
    difference = get_total_norm(torch._foreach_sub(a, b))
    return not difference > 0.01 * get_total_norm(a)


def compare_ranks(run: Run, verdict: guards.Verdict) -> heal.Cure:
    """Find out which rank is right, and count: the fifth difference ends the run. Every rank calls
    this, at the same step."""
    if unsure := int(verdict.carried["unsure_rank"]):
        rank = unsure - 1
        symptom = "the same pass gave two gradients"
        action = "passed over"
    elif verdict.step <= run.healing.examined_until:  # it ran before the replicas were repaired
        return heal.Cure(autopsy.Report(step=verdict.step), "")
    else:
        run.healing.examined_until = run.step
        rank, symptom, action = make_equal(run)
    report = autopsy.Report(
        verdict=autopsy.Verdict.NOT_REPRODUCIBLE,
        step=verdict.step,
        rank=rank,
        precision=run.policy.name,
        symptom=symptom,
        advice="flags",
    )
    return heal.respond(run, report)._replace(action=action)


def make_equal(run: Run) -> tuple[int, str, str]:
    """Make the replicas equal. Returns the rank that differed (-1: not known), how it differed, and
    what was done."""
    tensors = replica(run)
    table = ranks.all_values(checksums(tensors.values()).tolist())  # ranks x tensors
    usual = max(table, key=table.count)
    odd = [rank for rank, row in enumerate(table) if row != usual]
    if not odd:  # half weights, say, that their masters have rewritten
        return -1, "the replicas of the ranks differed, and agree again", "passed over"
    names = [
        name
        for name, column in zip(tensors, zip(*table, strict=True), strict=True)
        if len(set(column)) > 1
    ]
    what = ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
    if 2 * table.count(usual) > run.world_size:
        right = table.index(usual)
        for name in names:
            tensor = tensors[name].contiguous()
            dist.broadcast(tensor, right)
            tensors[name].copy_(tensor)
        symptom = f"the replica of rank {', '.join(map(str, odd))} differs in {what}"
        return odd[0], symptom, f"repaired from rank {right}"
    suspect = farthest(run, names)
    symptom = f"the replicas of {run.world_size} ranks differ in {what}"
    if suspect >= 0:
        symptom += f"; suspect rank {suspect}, which is farther from last_good"
    return suspect, symptom, f"no majority knows who is right: {heal.rewind(run)}"


def farthest(run: Run, names: list[str]) -> int:
    """The rank whose weights of these names are farthest from last_good's; -1 where moments or
    masters differ too: all ranks step by the same gradients, so a weight that differs alone was
    changed by itself."""
    now = dict(run.net.named_parameters())
    if not now.keys() >= {*names}:
        return -1
    good = heal.load_last_good(run)["model"]
    distance = sum(float((now[name].detach().cpu() - good[name]).norm()) for name in names)
    distances = ranks.all_values(distance)
    return distances.index(max(distances))
