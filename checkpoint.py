# SPDX-License-Identifier: MIT (finite 2.2.0, 2026-11-22)
"""
Checkpoints: kill the run anywhere, find a whole file, go on bit for bit.

`torch.save(state, "last.pt")` truncates the old file before it writes the new one. A process that dies in between (by
SIGKILL, by a full disk) leaves neither. torch.save writes a NaN as readily as a number, and auto-resume then loads the
same NaN again and again. And torch.load loads a file with a flipped bit without a word. Here every file is

  whole      The bytes go to a folder beside the old file, are fsynced, and are renamed over the old file. A reader sees
             the old file or the new one. A full disk leaves the old file as it was.
  checked    A torch file is a zip archive and holds the CRC-32 of each record. torch.load does not compare it; `load`
             does. (The CRC finds damage. Against malice there is weights_only=True.)
  finite     A state with a non-finite number (NaN, inf, a magnitude above LIMIT) is neither written nor "repaired":
             `save` returns the names of the tensors, for the guard. `non_finite` says which masks of -inf are lawful.
  exact      Adam's moments lose their small values in half precision: v below 2**-25 becomes 0 in fp16. Such optimizer
             state is refused. So is every object that torch.load(weights_only=True) would not read back.
  cheap      The training loop waits for the finite check and a copy to host memory. A thread does the rest.
             A save waits while the same file is still written: no save is dropped, and memory holds one copy a file.

A folder holds `last.pt` (resume from this one), `last-1.pt` (the one before), `last_good.pt` (the last one that the
caller called good: a hard link, not a second write) and `best.pt` (a plain fp32 state_dict). One process writes to the
folder (rank 0); every rank may read. Sharded tensors (DTensor) are refused. Copy this file alone: it needs torch.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import random
import re
import shutil
import signal
import tempfile
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LIMIT = 1.8e19  # just under sqrt(3.4e38): the square of anything above is inf in fp32, so it is as good as infinite
HALF = (torch.float16, torch.bfloat16)
OPTIMIZER_STATE = re.compile(r"\boptimizer\b|exp_avg|momentum_buffer")
NEVER_A_MASK = re.compile(OPTIMIZER_STATE.pattern + r"|\b(weight|bias|running_mean|running_var)$")
# What torch.load(weights_only=True) reads back, besides tensors, dicts, lists and tuples.
PLAIN = (str, int, float, bool, complex, bytes, type(None), torch.Size, torch.device, torch.dtype, torch.layout)


class CheckpointError(RuntimeError):
    """A file cannot be read or written, or a state must not be written: one sentence with the name and the cause."""


def named_tensors(tree: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """(dotted name, tensor) for every tensor in nested mappings, lists, tuples and dataclasses."""
    if isinstance(tree, Tensor):
        yield prefix, tree
        return
    if is_dataclass(tree) and not isinstance(tree, type):
        tree = {f.name: getattr(tree, f.name) for f in fields(tree)}
    if isinstance(tree, Mapping | list | tuple):
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            key = "" if isinstance(key, Tensor) else str(key)  # optimizer.state is keyed by the parameters themselves
            yield from named_tensors(value, ".".join(filter(None, (prefix, key))))


@torch.no_grad()
def non_finite(state: Any) -> list[str]:
    """Names of the tensors in `state` that hold NaN, inf or a magnitude above LIMIT. One host sync for each device.

    A mask may hold -inf: a tensor is a mask when every element is 0 or below -LIMIT, and its name is not that of a
    weight, a running statistic or optimizer state. Other masks are refused: register them with persistent=False.
    """
    found: dict[torch.device, list[tuple[str, Tensor, Tensor]]] = {}
    for name, t in named_tensors(state):
        t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
        if t.is_floating_point() and t.numel():
            t = t.float() if t.itemsize == 1 else t  # fp8 has no aminmax
            # Smallest and largest are NaN if any element is; isfinite().all() would take temporaries of t's size.
            found.setdefault(t.device, []).append((name, t, torch.stack(t.aminmax()).float()))  # LIMIT is inf in fp16
    bad = []
    for tensors in found.values():
        good = (torch.stack([extremes for _, _, extremes in tensors]).abs() <= LIMIT).all(dim=1).tolist()
        bad += [(name, t) for (name, t, _), ok in zip(tensors, good, strict=True) if not ok]
    return [name for name, t in bad if NEVER_A_MASK.search(name) or not bool(((t == 0) | (t < -LIMIT)).all())]


def snapshot(state: Any) -> tuple[Any, list[torch.cuda.Event]]:
    """A copy of `state` in host memory, complete once the returned events have passed; training may go on at once.

    CUDA tensors are copied to pinned memory on the current stream, in its order. Everything else is copied when this
    returns. CheckpointError names what cannot be saved.
    """
    devices = set()

    def copy(node: Any, name: str) -> Any:  # name: ".optimizer.state.0.exp_avg"
        if isinstance(node, Tensor):
            if type(node) not in (Tensor, torch.nn.Parameter) or node.layout is not torch.strided or node.is_nested:
                raise CheckpointError(f"not saved: {name[1:]} is {type(node)}, {node.layout}, not a plain dense tensor "
                                      "(of a sharded DTensor save its full_tensor())")
            if node.dtype.is_floating_point and node.itemsize < 4 and OPTIMIZER_STATE.search(name):
                raise CheckpointError(f"not saved: optimizer state {name[1:]} is {node.dtype}, it must be fp32")
            node = node.detach()
            if not node.is_cuda:
                return node.to("cpu", copy=True)  # a copy also sheds the rest of a view's storage
            devices.add(node.device)
            return torch.empty_like(node, device="cpu", pin_memory=True).copy_(node, non_blocking=True)
        if isinstance(node, Mapping):  # keys are checked too
            return {copy(key, f"{name}.{key}"): copy(child, f"{name}.{key}") for key, child in node.items()}
        if type(node) in (list, tuple):
            return type(node)(copy(child, f"{name}.{i}") for i, child in enumerate(node))
        if type(node) in PLAIN:  # exact types: a numpy.float64 is a float too
            return node
        raise CheckpointError(f"not saved: {name[1:]} is {type(node)}, which torch.load(weights_only=True) cannot read")

    host = copy(state, "")
    return host, [torch.cuda.current_stream(device).record_event() for device in devices]


def _write(path: Path, host: Any, ready: list[torch.cuda.Event], previous: Path | None, good: Path | None) -> None:
    """Write `path`; the old file becomes `previous`, and `good` a link to the new one. A kill leaves whole files."""
    for event in ready:
        event.synchronize()
    data = io.BytesIO()  # not the file: of a full disk torch.save says "unexpected pos 64 vs 0"
    torch.save(host, data)
    staging = path.with_name(path.name + ".tmp")
    new = staging / path.name
    try:
        # 1. Whatever takes space, in a folder of its own.
        shutil.rmtree(staging, ignore_errors=True)  # a killed save leaves it behind
        staging.mkdir(parents=True)
        new.write_bytes(data.getbuffer())
        _fsync(new)  # without it a power cut may keep the rename and lose the bytes
        if previous and path.exists():
            _link(path, staging / previous.name)
        if good:
            _link(new, staging / good.name)
        # 2. Renames. `previous` goes last, when the new file is in place: the old one may turn out to be damaged.
        for target in (path, good, previous):
            if target and (staging / target.name).exists():
                os.replace(staging / target.name, target)
        with contextlib.suppress(OSError):  # some network file systems cannot; the files are whole
            _fsync(path.parent)
    except OSError as error:
        raise CheckpointError(f"{path} was not saved ({error.strerror or error}); the files before it stand") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)
        _fsync(target)


def _fsync(path: Path) -> None:  # a file or a folder
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load(path: str | Path) -> Any:
    """What was saved, on the CPU. CheckpointError for a file missing, damaged or foreign; no code in it is run."""
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip():  # the name of the first record that does not match its CRC-32
                raise zipfile.BadZipFile
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error})") from error
    except pickle.UnpicklingError as error:  # the CRC is right: this is no damage, somebody made the file like this
        code = re.findall(r"GLOBAL (\S+)", str(error)) or ["more than plain data"]
        raise CheckpointError(f"{path} is refused: it asks for {code[0]}, which was not run") from error
    except Exception as error:  # zipfile and torch.load raise many kinds where a header makes no sense
        raise CheckpointError(f"{path} is damaged or truncated, or another program wrote it") from error


class Checkpoints(contextlib.AbstractContextManager):
    """The files in `folder`: create on every rank, save on rank 0. If a write fails, the next call or `wait` raises."""

    def __init__(self, folder: str | Path):
        self.last, self.previous, self.last_good, self.best = (
            Path(folder) / f"{name}.pt" for name in ("last", "last-1", "last_good", "best"))
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: dict[Path, Future] = {}

    def save(self, state: Mapping[str, Any], step: int, good: bool = False) -> list[str]:
        """Write {**state, "step": step} to last.pt; if `good`, link last_good.pt to it. Raises CheckpointError.

        Returns the names of the non-finite tensors. If there is one, nothing is written.
        """
        return self._start(self.last, {**state, "step": step}, self.previous, self.last_good if good else None)

    def save_best(self, weights: Mapping[str, Any]) -> list[str]:
        """Write a state_dict to best.pt, half precision widened to fp32 (exact). Returns and raises as `save`."""
        wide = {name: w.float() if getattr(w, "dtype", None) in HALF else w for name, w in weights.items()}
        return self._start(self.best, wide)

    def _start(self, path: Path, state: dict, previous: Path | None = None, good: Path | None = None) -> list[str]:
        self.poll(path)
        host, ready = snapshot(state)  # first, because it refuses what non_finite cannot look at
        if bad := non_finite(state):
            warnings.warn(f"{path} is left alone: not finite in {', '.join(bad[:3])} ({len(bad)} in all)", stacklevel=3)
            return bad
        self._pending[path] = self._writer.submit(_write, path, host, ready, previous, good)
        return []

    def poll(self, *wanted: Path) -> None:
        """Raise the error of a save that has failed since the last call. Waits only for the files named."""
        for path in [path for path, future in self._pending.items() if future.done() or path in wanted]:
            self._pending.pop(path).result()

    def wait(self, *_: object) -> None:
        """Return when nothing is left to write. Call it before the process ends."""
        self.poll(*self._pending)

    __exit__ = wait

    def newest(self) -> tuple[Path, Any] | None:
        """(path, state) of the newest whole file: last.pt, else last-1.pt, else last_good.pt. None if there is no file.

        CheckpointError if there are files and none is whole: a fresh start would overwrite what may be rescued.
        """
        self.wait()
        files = [path for path in (self.last, self.previous, self.last_good) if path.exists()]
        if not files:
            return None
        for path in files:
            try:
                return path, load(path)
            except CheckpointError as error:
                warnings.warn(f"{error}; falling back to the file before it", stacklevel=2)
        raise CheckpointError(f"no whole checkpoint is left among {', '.join(map(str, files))}")


def rng_state(device: str | torch.device = "cpu") -> dict[str, Any]:
    """This process's generators: Python's, torch's on the CPU and, for a CUDA device, torch's on it. (Not numpy's.)"""
    cuda = {"cuda": torch.cuda.get_rng_state(device)} if torch.device(device).type == "cuda" else {}
    return {"python": random.getstate(), "cpu": torch.get_rng_state(), **cuda}


def set_rng_state(state: Mapping[str, Any], device: str | torch.device = "cpu") -> None:
    """Put back what `rng_state` returned. CUDA's generator changes if `state` has one and `device` is a CUDA device."""
    random.setstate(state["python"])
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.device(device).type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def describe_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """What differs between two flat dicts of facts, as ["world_size: 2 -> 1", ...]; CheckpointError for another run."""
    changed = {key: f"{key}: {saved.get(key)} -> {current.get(key)}"
               for key in {**saved, **current} if saved.get(key) != current.get(key)}
    fixed = ("model", "dataset", "num_classes", "images", "pixels", "labels")
    if refused := [changed[key] for key in fixed if key in changed]:
        raise CheckpointError(f"cannot resume, this is another run ({'; '.join(refused)})")
    return list(changed.values())


class StopSignals:
    """SIGTERM, SIGINT, SIGUSR1 set a number that the loop reads at its step boundaries: `with StopSignals() as stop`.

    `stop.number` is 0 or the first signal, an int: ranks can agree on it (all-reduce MAX), save, and leave with 128 +
    number. A second SIGINT ends the process at once. (torchrun passes on SIGTERM and SIGINT, not SIGUSR1.)
    """

    def __enter__(self) -> StopSignals:
        self.number = 0
        self._previous = {n: signal.signal(n, self._receive) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: object) -> None:
        self.number = self.number or number
        if number == signal.SIGINT:  # the second time nothing is cleaned up: a half-written file has no final name yet
            signal.signal(number, lambda *_: os._exit(128 + number))


def main() -> None:
    """A random walk of 50 steps; one bit of its last file flips; it goes on from the file before, and ends the same."""
    warnings.showwarning = lambda message, *_: print(f"warning: {message}")
    place = torch.zeros(1000)
    with tempfile.TemporaryDirectory() as folder, Checkpoints(folder) as checkpoints:
        for step in range(1, 51):
            place += torch.randn(1000)
            if step in (40, 50):
                checkpoints.save({"place": place, "rng": rng_state()}, step)
        checkpoints.wait()
        raw = bytearray(checkpoints.last.read_bytes())
        raw[len(raw) // 2] ^= 1
        checkpoints.last.write_bytes(raw)
        path, state = checkpoints.newest()
        print(f"resumed at step {state['step']} from {path.name}")
        set_rng_state(state["rng"])
        for _ in range(state["step"], 50):
            state["place"] += torch.randn(1000)
        print(f"bit-identical to the walk that never stopped: {torch.equal(place, state['place'])}")
        checkpoints.save({"weight": torch.tensor([1.0, float("nan")])}, step=60)


if __name__ == "__main__":
    main()
