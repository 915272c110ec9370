# SPDX-License-Identifier: MIT (finite 2.2.0, 2026-11-22)
"""
Ranks: one program, many processes. Which device is mine, who prints, and how do all processes leave.

Four things go wrong between ranks. One rank sees a NaN and `continue`s: the others hang in the next all-reduce, or they
average gradients of different steps. So facts travel as flags, and all ranks decide together (guards.py). One rank
raises: the others hang until a time-out of 30 minutes. So what can be refused is refused before the first step, by
every rank, for the same reason. Each rank's BatchNorm keeps its own statistics: the evaluation depends on the rank that
evaluates. So buffers are made equal when they are used. One rank dies: torchrun restarts all ranks but keeps the store
where they met, and the new ranks find the addresses of the dead ones there (pytorch issue 135712). So every start meets
under a name of its own.

Copy this file alone: it needs torch and nothing else.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class Ranks(NamedTuple):
    """This process among the others, as torchrun's environment variables say. Without them it is alone."""

    device: torch.device
    rank: int
    local_rank: int
    world_size: int


def join(kind: str = "auto") -> Ranks:
    """Choose this rank's device; join the process group (nccl on CUDA, else gloo). ValueError for an absent device."""
    rank, local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if kind not in ("cpu", "cuda", "mps"):
        raise ValueError(f"--device {kind} is unknown: choose auto, cpu, cuda or mps")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but torch sees no GPU here: leave the flag out to train on the CPU")
    if kind == "cuda" and local_rank >= torch.cuda.device_count():
        raise ValueError(f"{local_rank + 1} ranks on this machine, but only {torch.cuda.device_count()} GPUs")
    device = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    if world_size > 1 and not dist.is_initialized():
        store, rank, world_size = next(dist.rendezvous("env://"))
        if os.environ.get("GROUP_WORLD_SIZE") == "1":
            # The number of this start. Only on one machine: the counts of several machines may differ.
            store = dist.PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        backend = "nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    return Ranks(device, rank, local_rank, world_size)


def speaks() -> bool:
    """Rank 0 alone prints."""
    return os.environ.get("RANK", "0") == "0"


def quiet() -> bool:
    """Whether to hide progress bars: they are shown on rank 0's terminal only, and not in a log file."""
    return not (speaks() and sys.stderr.isatty())


def refuse(code: int, sentence: object) -> NoReturn:
    """Leave with one sentence on standard error instead of a traceback."""
    if speaks():
        print(f"train.py: {sentence}", file=sys.stderr)
    raise SystemExit(code)


@contextlib.contextmanager
def refusing(*errors: type[Exception], code: int = 2, advice: str = "") -> Iterator[None]:
    """Around what reads a user's input, and nothing else: one of `errors` ends the run with its text and `advice`."""
    try:
        yield
    except errors as error:
        refuse(code, f"{error}{advice}")


@contextlib.contextmanager
def first_on_each_machine(local_rank: int) -> Iterator[None]:
    """The first rank of each machine runs the block first (it downloads); the other ranks follow."""
    if dist.is_initialized() and local_rank:
        dist.barrier()
    yield
    if dist.is_initialized() and not local_rank:
        dist.barrier()


def agreed(value: object) -> object:
    """Rank 0's value, on every rank. Also a barrier: no rank goes on before every rank has called this."""
    if not dist.is_initialized():
        return value
    dist.barrier()
    holder = [value]
    dist.broadcast_object_list(holder, 0)
    return holder[0]


def parallel(model: nn.Module, device: torch.device) -> nn.Module:
    """The model under DistributedDataParallel (which does not touch its buffers), or itself in a single process."""
    if not dist.is_initialized():
        return model
    known = inspect.signature(DistributedDataParallel).parameters  # torch 2.15 has a new name for it
    sync = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return DistributedDataParallel(model, [device] if device.type == "cuda" else None, **{sync: False})


def backward(loss: Tensor, ddp: nn.Module, out_of_memory: Callable[[], None]) -> None:
    """loss.backward(). Where this rank runs out of memory after DDP's average has begun, the average is finished.

    The other ranks wait for this rank's share of the gradients. It gives zeros for what it has not computed, calls
    out_of_memory(), which has to see to it that no rank uses the average, and returns. Anywhere else
    torch.OutOfMemoryError goes to the caller, and no collective has begun.
    """
    if not getattr(ddp, "require_backward_grad_sync", False):  # no DDP, or inside no_sync()
        loss.backward()
        return
    parameters = [p for p in ddp.parameters() if p.requires_grad]
    before = [None if p.grad is None else p.grad._version for p in parameters]
    try:
        loss.backward()
        return
    except torch.OutOfMemoryError:
        out_of_memory()
    # Out of the except clause, which holds the memory of the failed backward.
    now = [None if p.grad is None else p.grad._version for p in parameters]
    missing = [p.sum().float() * 0 for p, old, new in zip(parameters, before, now, strict=True) if old == new]
    if missing:
        torch.stack(missing).sum().backward()


def share_buffers(net: nn.Module) -> None:
    """Copy rank 0's buffers to every rank: BatchNorm's statistics differ, and one set is evaluated and saved."""
    if dist.is_initialized():
        for buffer in net.buffers():
            dist.broadcast(buffer, 0)
