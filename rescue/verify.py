"""
Verify: hardware that lies with finite numbers.

A NaN is seen at once. A chip that multiplies wrongly once an hour, or a bit that flips in memory, gives a number that
looks like any other, and the run ends well with weights that nobody computed (Dixit et al. 2021, arXiv 2102.11245). So
every --verify-every steps (once an epoch) two things are compared to the bit:

    a pass run twice   Up to 32 images of the batch go forward and backward twice. Where the gradients differ, a third
                       run decides. The fifth time the run ends: exit 5, with the rank's name.
    the replicas       All ranks hold the same weights and moments. A checksum of them travels with the guard's flags,
                       in the same all-reduce. Where ranks differ, the majority is right, and the others take its
                       tensors. Two ranks have no majority: all go back to last_good.

Not every device gives the same bits twice. The first comparison runs three times: where these differ, later
comparisons are within rounding, and a warning says so. What one process cannot see: a flipped bit in its own weights
(there is no second copy), and a chip that makes the same mistake each time. This file is wiring: train.py calls it.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import autopsy
import checkpoint
from rescue import heal

PIECE = 32  # images of the pass that is run twice: 64 of the 50,000 of an epoch are 0.13 %
PRIME = 16_777_213  # the largest below 2^24, so that fp32 holds a checksum exactly
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksums(tensors: Iterable[Tensor]) -> Tensor:
    """One number in [0, PRIME) for each tensor, int64 (N,). A flipped bit adds a power of two: PRIME divides none."""
    return torch.stack([t.detach().view(BITS[t.itemsize]).sum(dtype=torch.int64) % PRIME for t in tensors])


def replica(run: Any) -> dict[str, Tensor]:
    """Name -> tensor of all that must be the same on every rank: weights, masters, moments."""
    names = {p: name for name, p in run.net.named_parameters()}
    tensors = {name: p.data for p, name in names.items()}
    for p, master in zip(run.optimizer.model_params, run.optimizer.params, strict=True):
        tensors |= {} if master is p else {f"{names[p]}'s master": master}
        tensors |= {f"{names[p]}'s {key}": t for key, t in run.optimizer.state.get(p, {}).items() if t.dim()}
    return tensors


def tell_replica(run: Any) -> None:
    """The checksum of this rank's replica, into the guard's all-reduce: the largest and the smallest of all ranks."""
    total = (checksums(replica(run).values()).sum() % PRIME).float()
    run.guard.tell("checksum", total)
    run.guard.tell("-checksum", -total)


def twice(run: Any, images: Tensor, labels: Tensor) -> float:
    """A piece of this batch, twice. 0: the gradients agree; 1: a third run agrees with one; 1.5: with neither."""
    images, labels = images[:PIECE], labels[:PIECE].clamp(0, len(run.classes) - 1)
    kept = autopsy.StepRecord(run.step, run.net)

    def same_bits(a: list[Tensor], b: list[Tensor]) -> bool:
        return bool((checksums(a) == checksums(b)).all())

    def gradients() -> list[Tensor]:
        run.injector.micro = 0  # a planted fault meets each pass, and the step itself
        heal.in_pieces(run, (images, labels))
        grads = [p.grad for p in run.net.parameters() if p.grad is not None]
        kept.restore()  # RNG and buffers as before, no gradients
        run.injector.micro = 0
        return grads

    first, second = gradients(), gradients()
    same = same_bits(first, second)
    if same and run.exact is not None:
        return 0
    third = gradients()
    alike = same, same_bits(first, third), same_bits(second, third)
    if run.exact is None:  # the first comparison of this process: two of three alike, on a CPU, are a fault
        run.exact = all(alike) or (any(alike) and run.device.type == "cpu")
        if not run.exact:
            run.log.write(event="warning", step=run.step, text="this device does not give the same bits twice")
    if all(alike) or (not run.exact and within_rounding(first, second)):
        return 0
    return 1 if any(alike) else 1.5


def within_rounding(a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether two gradients differ by less than 1 % of their norm, or both are non-finite."""
    difference = torch.stack(torch._foreach_norm(torch._foreach_sub(a, b))).norm()
    return not difference > 0.01 * torch.stack(torch._foreach_norm(a)).norm()


def differs(told: dict[str, float]) -> bool:  # as a verdict tells it
    return bool(told["unsure"]) or told["checksum"] != -told["-checksum"]


def settle(run: Any) -> heal.Cure:
    """Find out who is right, and count. Every rank calls this, at the same step."""
    if unsure := run.apart.told["unsure"]:
        one = "neither" if unsure % 1 else "one"
        return unreliable(run, int(unsure) - 1, f"the same pass gave two gradients; a third run agreed with {one}")
    tensors = replica(run)
    mine = checksums(tensors.values())
    every = [torch.empty_like(mine) for _ in range(run.world_size)]
    dist.all_gather(every, mine)
    table = [tuple(row.tolist()) for row in every]  # ranks x tensors
    usual = max(table, key=table.count)
    odd = [rank for rank, row in enumerate(table) if row != usual]
    if len(set(table)) == 1:  # half weights, say, that their masters have rewritten
        return unreliable(run, -1, "the replicas of the ranks differed, and agree again")
    names = [name for i, name in enumerate(tensors) if len({row[i] for row in table}) > 1]
    what = ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
    if 2 * table.count(usual) > run.world_size:
        right, guilty = table.index(usual), odd[0]
        for name in names:
            whole = tensors[name].contiguous()
            dist.broadcast(whole, right)
            tensors[name].copy_(whole)
        symptom = f"the replica of rank {', '.join(map(str, odd))} differs in {what}"
        action = f"repaired from rank {right}"
    else:
        guilty = farthest(run, names)
        symptom = f"the replicas of {run.world_size} ranks differ in {what}"
        symptom += f"; suspect rank {guilty}, which is farther from last_good" if guilty >= 0 else ""
        action = "no majority knows who is right: " + heal.rewind(run, 1.0)
    return unreliable(run, guilty, symptom, action)


def unreliable(run: Any, rank: int, symptom: str, action: str = "passed over") -> heal.Cure:
    """The fifth time the run ends."""
    report = autopsy.Report(verdict="not reproducible", step=run.apart.step, rank=rank, precision=run.policy.name,
                            symptom=symptom, advice="flags")
    heal.respond(run, report)
    return heal.Cure(report, action)


def farthest(run: Any, names: list[str]) -> int:
    """The rank whose weights of these names are farthest from last_good's; -1 where moments or masters differ too: all
    ranks step by the same gradients, so a weight that differs alone was changed by itself."""
    now = dict(run.net.named_parameters())
    if any(name not in now for name in names):
        return -1
    run.checkpoints.wait()
    dist.barrier()
    good = checkpoint.load(run.checkpoints.last_good)["model"]
    gap = torch.tensor(sum(float((now[name].detach().cpu() - good[name]).norm()) for name in names), device=run.device)
    every = [torch.empty_like(gap) for _ in range(run.world_size)]
    dist.all_gather(every, gap)
    return int(torch.stack(every).argmax())
