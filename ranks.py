"""
Ranks: one program, many processes. Which device is mine, who speaks, and how does everybody leave.

Four things go wrong between ranks. One rank sees a NaN and `continue`s: the others wait in the next all-reduce or,
worse, do not wait, and average gradients of different steps. One rank raises: the rest hang until a time-out of half an
hour. Each rank's BatchNorm keeps statistics of its own, so that "the" evaluation depends on who evaluates. And one rank
dies: torchrun starts all again but keeps the store they met in, where the new ones find the addresses of the dead
(pytorch issue 135712), and fail or hang. Hence: facts travel as flags and are decided together (guards.py); what can be
refused is refused before the first step, by every rank, for the same reason; buffers are made equal at the moment they
are used; and every start meets under a name of its own.

Copy this file alone: it needs torch and nothing else.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Ranks(NamedTuple):
    """This process among the others, as torchrun's environment says; alone without it."""

    device: torch.device
    rank: int
    local_rank: int
    world_size: int


def join(kind: str = "auto") -> Ranks:
    """Choose this rank's device and join the process group (nccl on CUDA, gloo elsewhere).

    Raises ValueError, one sentence, for an unknown or absent device.
    """
    rank, local_rank, world_size = (
        int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1))
    )
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
            # torchrun on one machine: the number of this start. On several, the machines' counts may differ.
            store = dist.PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        backend = "nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    return Ranks(device, rank, local_rank, world_size)


def speaks() -> bool:
    """Rank 0 alone prints."""
    return os.environ.get("RANK", "0") == "0"


def quiet() -> bool:
    """No progress bars but on rank 0's terminal: in a log file they are noise."""
    return not (speaks() and sys.stderr.isatty())


def refuse(code: int, sentence: object) -> NoReturn:
    """Leave with one sentence on standard error instead of a traceback."""
    if speaks():
        print(f"train.py: {sentence}", file=sys.stderr)
    raise SystemExit(code)


@contextlib.contextmanager
def refusing(*errors: type[Exception], code: int = 2, advice: str = "") -> Iterator[None]:
    """What these errors say becomes the sentence, with some advice."""
    try:
        yield
    except errors as error:
        refuse(code, f"{error}{advice}")


@contextlib.contextmanager
def first_on_each_machine(local_rank: int) -> Iterator[None]:
    """The first rank of a machine goes first (it downloads), the others follow."""
    if dist.is_initialized() and local_rank:
        dist.barrier()
    yield
    if dist.is_initialized() and not local_rank:
        dist.barrier()


def agreed(value: object) -> object:
    """Rank 0's value, on every rank; no rank leaves this before rank 0 has come, nor rank 0 before all have."""
    if not dist.is_initialized():
        return value
    dist.barrier()
    holder = [value]
    dist.broadcast_object_list(holder, 0)
    return holder[0]


def parallel(model: nn.Module, device: torch.device) -> nn.Module:
    """The model under DistributedDataParallel; alone, the model itself.

    Buffers are made equal when they are used: DDP would put rank 0's in their place at every step.
    """
    if not dist.is_initialized():
        return model
    known = inspect.signature(DistributedDataParallel).parameters  # torch 2.15 has a new name for it
    sync = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return DistributedDataParallel(model, [device] if device.type == "cuda" else None, **{sync: False})


def share_buffers(net: nn.Module) -> None:
    """Give every rank rank 0's buffers: BatchNorm's statistics differ, and one set has to be evaluated and saved."""
    if dist.is_initialized():
        for buffer in net.buffers():
            dist.broadcast(buffer, 0)
