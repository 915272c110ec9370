"""
Movement: which weights move, and whether by as much as their optimizer says.

A layer may be put back after each step, be rounded, or be moved by a millionth of its update: its
gradient lives, its moments grow, and it learns nothing. How much is nothing? A rate of 1e-30 moves
a bias of 0 by 1e-29. So a movement is compared with the update that the optimizer's moments ask
for. Now and then (notice.is_look) this file reads up to 199 elements of each tensor, and notes

    signs       the last look at which it had moved, had a gradient, had a learning rate
    start       these elements at the first look
    walked      the sum of the squared updates: in random directions they would lead as far as its
                root, and learning leads farther

What moves at each look and is put back between them is at the end where it was at the start.
"""

from __future__ import annotations

import torch
from torch import Tensor

from extras.muon import RADIANS
from trainer.record import Run

# Between two looks. A bias of 0 moves by 1e-29 at a rate of 1e-30: that is no movement.
LEAST_MOVE = 1e-9
# Of the sum of the updates between two looks. A weight that swings to and fro keeps one of 100.
LEAST_SHARE = 1e-4
LEAST_WALK = 0.03  # of a walk in random directions, from the start to the end
LEAST_ELEMENTS = 8  # one alone may come back to where it was by chance


def learning(run: Run) -> tuple[dict[str, Tensor], dict[Tensor, float]]:
    """The parameters that should learn (they need a gradient, or an optimizer holds them), and the
    learning rate of each that an optimizer holds."""
    rates = {}
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            rates |= dict.fromkeys(group["params"], float(group["lr"]))
    named = {name: p for name, p in run.net.named_parameters()
             if p.numel() and (p.requires_grad or p in rates)}  # fmt: skip
    return named, rates


def asked(state: dict, group: dict, p: Tensor) -> Tensor | None:
    """The largest update of p's sample at a rate of 1, as the optimizer's state asks for it. None:
    the optimizer is neither like Adam nor our Muon, so that nobody knows."""
    turns = group.get("stacked") is not None  # Muon turns a matrix by an angle
    is_adam = group.get("betas") and not (state and "exp_avg_sq" not in state)
    if not (turns or is_adam):
        return None
    if not state:
        return p.new_zeros(())
    if turns:
        return RADIANS * sampled(p).square().mean().sqrt()
    beta1, beta2 = (1 - beta ** state["step"] for beta in group["betas"])
    square = sampled(state.get("max_exp_avg_sq", state["exp_avg_sq"])) / beta2
    return (sampled(state["exp_avg"]) / beta1 / (square.sqrt() + group["eps"])).abs().max()


def sampled(t: Tensor) -> Tensor:
    """Up to 199 elements."""
    t = t.detach().reshape(-1)
    return t[:: max(1, len(t) // 100)].float()


@torch.no_grad()
def note_movement(run: Run, step: int, masters: dict[Tensor, Tensor]) -> None:
    """Take in a look: between the last backward of this step and its decision."""
    healing = run.healing
    named, rates = learning(run)
    samples = [sampled(masters.get(p, p)) for p in named.values()]
    updates = {
        p: asked(optimizer.state.get(p), group, p)
        for optimizer in run.optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    }
    unknown = {p for p, update in updates.items() if update is None}
    flags = []
    for p in named.values():
        zero = p.new_zeros(())
        update = zero if p in unknown else updates.get(p, zero)
        flags += [zero if p.grad is None else p.grad.any(), update]
    flags = torch.stack([flag.float() for flag in flags])
    numbers = torch.cat([*samples, flags]).cpu()
    sample, flags = numbers.tensor_split([-len(flags)])
    flags = flags.nan_to_num(0, 0, 0).view(-1, 2).tolist()
    before = healing.sample
    # It goes into the checkpoint, which takes no bad number.
    healing.sample = sample.nan_to_num(0, 0, 0).clamp(-1e18, 1e18)
    if before is None or len(before) != len(sample):
        before = healing.start = healing.sample
        healing.walked = {}
    steps = step - healing.looked
    healing.looked = step
    changes = (healing.sample - before).abs().split([len(some) for some in samples])
    for (name, p), change, (graded, update) in zip(named.items(), changes, flags, strict=True):
        rate = rates.get(p, 0.0)
        update *= rate
        moved = change.max() > max(LEAST_MOVE, LEAST_SHARE * steps * update)
        found = (moved or p in unknown, graded, rate)
        signs = healing.signs.setdefault(name, [0, 0, 0])
        signs[:] = [step if yes else last for yes, last in zip(found, signs, strict=True)]
        healing.walked[name] = healing.walked.get(name, 0.0) + steps * update**2


def put_back(run: Run) -> list[str]:
    """Tensors that are at the last look where they were at the first, though their updates led far
    away."""
    healing = run.healing
    named, _ = learning(run)
    sizes = [len(sampled(p)) for p in named.values()]
    if healing.start is None or len(healing.start) != sum(sizes):
        return []
    changes = (healing.sample - healing.start).abs().split(sizes)
    return [
        name
        for name, change in zip(named, changes, strict=True)
        if len(change) >= LEAST_ELEMENTS
        and float(change.max()) < LEAST_WALK * healing.walked.get(name, 0.0) ** 0.5
    ]
