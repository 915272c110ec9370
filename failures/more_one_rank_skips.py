"""
One rank sees a NaN and skips alone

Reported    pytorch/audio 3749: a rank finds its loss NaN and `continue`s before backward. Later the
            job hangs until NCCL's time-out.
First bad   Step 3: the gradients of the other rank are averaged with this rank's gradients of step
            4.
Why         backward() is a collective, and the rank that skips takes no part in it. The other
            rank's all-reduce waits and meets the first rank's *next* backward. From then on two
            different steps are averaged, without an error and without a NaN. In the end one rank
            has no steps left, and the other rank waits for nobody.
Cure        No rank leaves early. Each rank raises a flag, the flags are all-reduced once after the
            last backward, and all ranks skip together (Guard.decide, in train.py's step).
Tried, no   A longer time-out. The same `continue` on every rank: each rank decides on its own loss.
Evidence    Mechanism only: two processes, gloo. The gradient of `stamp` is the number of the step,
            so it shows which steps DDP averaged.
Margin      None is needed: the numbers of the steps are small integers, which DDP averages exactly.
Run         python failures/more_one_rank_skips.py
"""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from failures.loops import Case, non_finite, show
from guards import Guard
from optim import ClippedAdamW


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 1)
        self.stamp = nn.Parameter(torch.zeros(()))

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, dict]:
        return self.head(images).square().mean() + self.stamp * labels.float().mean(), {}


def train(rank: int, folder: str, guarded: bool, steps: int = 6) -> None:
    """One of two ranks; rank 1 gets a NaN at step 3.

    It writes to a file which pairs of steps were averaged.
    """
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet{guarded}", rank=rank, world_size=2
    )
    torch.manual_seed(0)
    net = Net()
    mixed = []
    said = ""
    ddp = nn.parallel.DistributedDataParallel(net)
    optimizer = ClippedAdamW(net.parameters())
    optimizer.register_step_pre_hook(
        lambda *_: mixed.append((step, 2 * net.stamp.grad.item() - step))
    )
    guard = Guard(net, lag=False)
    try:
        for step in range(1, steps + 1):
            images = torch.randn(8, 4)
            if (rank, step) == (1, 3):
                images *= float("nan")
            labels = torch.full((8,), step)
            guard.open(step)
            guard.see_batch(images, labels)
            loss, _ = ddp(images, labels)
            guard.see_loss(loss)
            if not guarded and not bool(loss.isfinite()):
                continue  # this rank alone
            loss.backward()
            if guarded:
                guard.step(optimizer)
                verdict = guard.verdict()
                if not verdict.accepted:
                    reasons = " and ".join(verdict.reasons)
                    said = f"step {step} rejected by both: {reasons} on rank {verdict.rank}"
            else:
                optimizer.step()
            optimizer.zero_grad()
    except RuntimeError:  # the other rank has ended: without that, this rank waits for half an hour
        said = f"rank {rank} hangs in the all-reduce of step {step}"
    torch.save(
        {"mixed": mixed, "said": said, "weight": net.head.weight.detach(), "sick": non_finite(net)},
        f"{folder}/{guarded}{rank}.pt",
    )
    # closes the connections at once: the rank that still waits gets an error, not a time-out
    os._exit(0)


def case() -> Case:
    out = Case("one rank skips alone")
    with tempfile.TemporaryDirectory() as folder:
        for guarded in (False, True):
            mp.spawn(train, (folder, guarded), nprocs=2)
        (alone, _), (one, two) = (
            [torch.load(f"{folder}/{guarded}{rank}.pt") for rank in (0, 1)]
            for guarded in (False, True)
        )
    wrong = [(mine, other) for mine, other in alone["mixed"] if mine != other]
    right = [(mine, other) for mine, other in one["mixed"] if mine == other]
    first = "nothing mixed"
    if wrong:
        first = "rank 0's step {} was averaged with rank 1's step {:g}".format(*wrong[0])
    out.row(
        "fp32",
        f"{first}; {alone['said'] or 'no hang'}",
        one["said"],
        f"{len(right)} steps averaged, each with its own",
    )
    out.claim(
        "as published: different steps are averaged, then a rank waits for nobody",
        wrong and "hangs" in alone["said"],
    )
    out.claim(
        "guarded: both ranks reject step 3, and rank 1 is named",
        one["said"] == two["said"] == "step 3 rejected by both: input and loss and grad on rank 1",
    )
    out.claim(
        "cured: all other steps are averaged with their own; weights finite, equal on both ranks",
        len(right) >= 5 and not one["sick"] and torch.equal(one["weight"], two["weight"]),
    )
    return out


if __name__ == "__main__":
    sys.exit(show(case()))
