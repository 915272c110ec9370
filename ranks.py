# SPDX-License-Identifier: MIT (finite 4.0.0, 2026-11-28)
"""
Ranks: one program, many processes. Which device is mine, who prints, how do all leave.

Five things go wrong between ranks. One rank sees a NaN and `continue`s: the others hang in the
next all-reduce, or they average gradients of different steps. So facts travel as flags, and all
ranks decide together (guards.py). One rank refuses a file: the others wait for it until a
time-out. So `refusing` asks all ranks, and all of them leave. One rank was started with another
seed or reads other data: the average of the gradients is finite, and wrong. So `must_agree`
compares before the first step. Each rank's BatchNorm keeps its own statistics: the evaluation
depends on the rank that evaluates. So buffers are made equal when they are used. One rank dies:
torchrun restarts all ranks but keeps the store where they met, and the new ranks find the
addresses of the dead ones there (pytorch issue 135712). So every start meets under its own name.

Copy this file alone: it needs torch. `torchrun --nproc_per_node=2 THIS.py`:

Paste::

    import torch
    from ranks import agreed, all_values, backward, is_main_process, join, must_agree, parallel

    ranks = join("cpu")
    must_agree({"seed": 0})
    net = torch.nn.Linear(4, 2)
    ddp = parallel(net, ranks.device)
    backward(ddp(torch.ones(3, 4)).sum(), ddp, lambda: print("the others shall skip this step"))
    if is_main_process():
        print(agreed("the same word on every rank"), all_values(ranks.rank))
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from threading import Thread
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

# A collective that waits longer ends the run: name_missing() says for whom. A rank that dies is
# noticed by torchrun before.
TIMEOUT = timedelta(minutes=10)
PATIENCE = timedelta(hours=2)  # all ranks wait while the first one of a machine decodes images
NO_MEMORY = ("out of memory", "ALLOC_FAILED", "can't allocate memory")  # CUDA and NCCL, cuBLAS, CPU


class Ranks(NamedTuple):
    """This process among the others, by torchrun's environment variables. Without them: alone."""

    device: torch.device
    rank: int
    local_rank: int
    world_size: int


def join(kind: str = "auto") -> Ranks:
    """Choose this rank's device; join the process group (nccl on CUDA, else gloo).

    Raises ValueError for an absent device, and for impossible variables.
    """
    rank = from_torchrun("RANK")
    local_rank = from_torchrun("LOCAL_RANK")
    world_size = from_torchrun("WORLD_SIZE", 1)
    if not (0 <= rank < world_size and 0 <= local_rank < world_size):
        raise ValueError(
            f"RANK {rank} and LOCAL_RANK {local_rank} of WORLD_SIZE {world_size}: "
            "start with torchrun, or unset these variables"
        )
    if kind == "auto":
        fallback = "mps" if torch.backends.mps.is_available() else "cpu"
        kind = "cuda" if torch.cuda.is_available() else fallback
    device = torch.device(kind)
    backend = "gloo"
    bound = None  # NCCL would have to guess the device of a barrier
    if kind == "cuda":
        count = torch.cuda.device_count()
        if not count:
            raise ValueError("--device cuda, but torch sees no GPU here: leave the flag out")
        if local_rank >= count:
            raise ValueError(f"{local_rank + 1} ranks on this machine, but only {count} GPUs")
        device = torch.device(kind, local_rank)
        torch.cuda.set_device(device)
        backend = "nccl"
        bound = device
    if world_size > 1 and not dist.is_available():
        raise ValueError("this torch is built without torch.distributed: start one process")
    if world_size > 1 and not together():
        try:
            store, rank, world_size = next(dist.rendezvous("env://"))
        except RuntimeError as error:  # no address, or one where nobody listens
            reason = str(error).splitlines()[0]
            raise ValueError(f"the ranks do not meet at MASTER_ADDR: {reason}") from error
        if os.environ.get("GROUP_WORLD_SIZE") == "1":
            # The number of this start. Only on one machine: the counts of several may differ.
            start = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
            store = dist.PrefixStore(f"start {start}", store)
        dist.init_process_group(backend, None, TIMEOUT, world_size, rank, store, device_id=bound)
    return Ranks(device, rank, local_rank, world_size)


def together() -> bool:
    """Whether this process belongs to a group. (Some builds of torch have no groups.)"""
    return dist.is_available() and dist.is_initialized()


def from_torchrun(name: str, alone: int = 0) -> int:
    """RANK, LOCAL_RANK or WORLD_SIZE. Raises ValueError if it is not a number."""
    text = os.environ.get(name, alone)
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"the environment variable {name} is {text!r}, not a number") from None


def is_main_process() -> bool:
    """Whether this is rank 0, which alone prints."""
    return from_torchrun("RANK") == 0


def hides_progress() -> bool:
    """Whether to hide progress bars: on all ranks but rank 0, and in a log file."""
    return not (is_main_process() and sys.stderr and sys.stderr.isatty())


def refuse(code: int, sentence: object) -> NoReturn:
    """Leave with one sentence on this rank's standard error instead of a traceback."""
    # A stranger's file may have given it control characters, which a terminal obeys.
    shown = (c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in str(sentence))
    with contextlib.suppress(OSError):  # its disk is full
        print("train.py:", "".join(shown), file=sys.stderr)
    raise SystemExit(code)


@contextlib.contextmanager
def refusing(*errors: type[Exception], code: int = 2, advice: str = "") -> Iterator[None]:
    """Wrap code that reads a user's input, and nothing else: one of `errors` ends the run.

    Every rank must enter it: if one of them meets an error, all leave with its `code`. The sentence
    is the error's text and `advice`, printed once for all ranks with the same sentence.
    """
    mine = None
    try:
        yield
    except errors as error:
        mine = code, f"{error}{advice}"
    answers = all_values(mine)
    refused = [answer for answer in answers if answer]
    rank = dist.get_rank() if together() else 0
    if mine and answers.index(mine) == rank:
        refuse(*mine)
    if refused:
        raise SystemExit(refused[0][0])


def must_agree(facts: Mapping[str, Any]) -> None:
    """Leave with code 2 if a rank's facts differ from rank 0's. That rank says why."""
    first = agreed(facts)
    others = [
        f"{key} {first[key]} there, {facts[key]} here" for key in first if facts[key] != first[key]
    ]
    with refusing(ValueError):
        if others:
            raise ValueError(f"rank {dist.get_rank()} differs from rank 0: {'; '.join(others)}")


@contextlib.contextmanager
def first_on_each_machine(local_rank: int) -> Iterator[None]:
    """The first rank of each machine runs the block first (it downloads); the others follow."""
    if not together():
        yield
        return
    patient = dist.new_group(timeout=PATIENCE, backend="gloo")
    if local_rank:
        dist.barrier(patient)
    try:
        yield
    finally:  # after an error too: the others are waiting
        if not local_rank:
            dist.barrier(patient)
        dist.destroy_process_group(patient)


def name_missing(position: Callable[[], int]) -> None:
    """Start a thread that names on standard error the ranks that this one waits for, when a tenth
    of TIMEOUT is left: NCCL's time-out ends the process without a name.

    position: the number of the step that this rank has begun. Missing is who has not begun it, and
    whose thread is silent, because its process has stopped or its machine is gone.
    """
    if not together():
        return
    store = dist.distributed_c10d._get_default_store()
    keys = [f"where rank {rank} is" for rank in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], "-1 0")
    agreed(None)  # all keys are there
    Thread(target=_watch, args=(store, keys, dist.get_rank(), position), daemon=True).start()


def _watch(store: dist.Store, keys: list[str], own: int, position: Callable[[], int]) -> None:
    at = None
    with contextlib.suppress(RuntimeError):  # the store is gone
        for beat in itertools.count():
            time.sleep(TIMEOUT.total_seconds() / 20)
            step = position()
            store.set(keys[own], f"{step} {beat}")
            said = [store.get(key) for key in keys]
            if step != at:
                at = step
                since = beat
            if beat - since == 9:
                before = said
            if beat - since == 18:
                missing = [
                    str(rank)
                    for rank, now in enumerate(said)
                    if now == before[rank] or int(now.split()[0]) < step
                ]
                if missing:
                    print(
                        f"train.py: rank {own} waits in step {step}, and the time-out is near: "
                        f"rank {', '.join(missing)} is missing",
                        file=sys.stderr,
                    )


def leave() -> None:
    """Leave the group after rank 0 has printed: torchrun ends all processes when one leaves.

    Drop your DDP before (`ddp = None`). If it is the last to hold the group, its end waits for a
    thread of gloo, which may wait for the interpreter: a hang after the last line.
    """
    dist.barrier()
    gc.collect()  # a DDP that is forgotten may stand in a circle
    dist.destroy_process_group()


def all_values(value: Any) -> list[Any]:
    """Every rank's value, by rank. Also a barrier: no rank goes on before all have called this."""
    if not together():
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def agreed(value: Any) -> Any:
    """Rank 0's value, on every rank. Also a barrier."""
    return all_values(value)[0]


def parallel(model: nn.Module, device: torch.device) -> nn.Module:
    """The model under DistributedDataParallel, which does not touch its buffers; alone: itself.

    Gradients are views of what is sent: one copy of them less. static_graph stays off: its first
    backward must not be in no_sync(), where accumulation begins (an internal assert in torch 2.14).
    """
    if not together():
        return model
    known = inspect.signature(DistributedDataParallel).parameters  # torch 2.15 has a new name
    sync = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    devices = [device] if device.type == "cuda" else None
    return DistributedDataParallel(model, devices, gradient_as_bucket_view=True, **{sync: False})


def out_of_memory(error: Exception) -> bool:
    """Whether memory ran out: torch's own error, or one of cuBLAS, NCCL, the driver or the host."""
    known = isinstance(error, torch.OutOfMemoryError)
    return known or any(words in str(error) for words in NO_MEMORY)


def backward(loss: Tensor, ddp: nn.Module, veto: Callable[[], None]) -> None:
    """Call loss.backward(). If memory runs out after DDP's average began, finish the average.

    The other ranks wait for this rank's share of the gradients. It gives zeros for what it has not
    computed, calls veto(), which must make sure that no rank uses the average, and returns.
    Otherwise the error goes to the caller, and no collective has begun.
    """
    if not getattr(ddp, "require_backward_grad_sync", False):  # no DDP, or inside no_sync()
        loss.backward()
        return
    parameters = [p for p in ddp.parameters() if p.requires_grad]
    before = _versions(parameters)
    try:
        loss.backward()
        return
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        veto()
    # Out of the except clause, which holds the memory of the failed backward.
    changes = zip(parameters, before, _versions(parameters), strict=True)
    missing = [p.sum().float() * 0 for p, old, new in changes if old == new]
    if missing:
        torch.stack(missing).sum().backward()


def _versions(parameters: list[Tensor]) -> list[tuple[int, int] | None]:
    """Of each gradient its place in memory, and a number that rises when it is written; None where
    there is none."""
    grads = [p.grad for p in parameters]
    return [None if grad is None else (grad.data_ptr(), grad._version) for grad in grads]


def share_buffers(net: nn.Module) -> None:
    """Copy rank 0's buffers to every rank: BatchNorm's differ, and validation needs one set."""
    if together():
        for buffer in net.buffers():
            dist.broadcast(buffer, 0)
