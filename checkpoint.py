"""
Checkpoints: kill the run anywhere, find a whole file, go on bit for bit.

`torch.save(state, "last.pt")` truncates the old file before it writes the new one: die in between (a SIGKILL, a full
disk) and neither exists. It writes a NaN as readily as a number, and auto-resume then loads that NaN again and again.
And a flipped bit can load without a word. Here a file is

  whole      Written in a folder beside the old one, fsynced, renamed over it: a reader sees the old file or the new
             one, never half of one, and a full disk leaves the old one as it was.
  checked    A torch file is a zip archive, and may end in a comment: ours is the sha256 of the bytes before it. `load`
             verifies it; plain torch.load still opens the file. (It finds damage; malice is for weights_only=True.)
  finite     A state that holds a NaN or an inf is never written, and never "repaired": `save` returns the names of the
             tensors, for the guard. (A mask of -inf belongs in a buffer with persistent=False.)
  exact      Adam's moments in half precision lose their small values (v below 2**-25 becomes 0): such a state is
             refused, as is any object that weights_only=True would not read back.
  cheap      The loop waits for the finite check and a copy to host memory; a thread does the rest. No save is dropped:
             it waits while its own file is still being written, so that memory holds one copy for each file.

A folder holds `last.pt` (resume from here), `last-1.pt` (the one before it), `last_good.pt` (the last one that the
caller called good: a hard link, not a second write) and `best.pt`, a plain fp32 state_dict. One process writes to it
(rank 0); every rank may read. To copy: take this file, it needs torch alone. `python checkpoint.py` shows the damage,
the fallback and the resume.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pickle
import random
import re
import shutil
import signal
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

MARK = b"sha256:"
TRAILER = len(MARK) + 64   # the zip comment: the mark, then 64 hexadecimal digits
OPTIMIZER_STATE = re.compile(r"\boptimizer\b|exp_avg|momentum_buffer")


class CheckpointError(RuntimeError):
    """A file that cannot be read or written, or a state that must not be: one sentence with its name and the cause."""


# What may enter a file ------------------------------------------------------------------------------------------------

def tensors(node: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a nest of dicts, lists and tuples, with its dotted name ("optimizer.state.0.exp_avg")."""
    if isinstance(node, torch.Tensor):
        yield name, node
    elif isinstance(node, (Mapping, list, tuple)):
        for key, child in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from tensors(child, f"{name}.{key}" if name else str(key))


@torch.no_grad()
def non_finite(state: Any) -> list[str]:
    """Names of the tensors in `state` that hold a NaN or an inf. One read of each tensor, one host sync per device."""
    extremes: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, t in tensors(state):
        if t.is_complex():
            t = torch.view_as_real(t)
        if t.is_floating_point() and t.numel():
            t = t.float() if t.itemsize == 1 else t   # fp8 has no aminmax
            # Smallest and largest are NaN if any element is; isfinite().all() would take temporaries of t's size.
            extremes.setdefault(t.device, {})[name] = torch.stack(t.aminmax())
    bad = []
    for named in extremes.values():
        finite = torch.stack(list(named.values())).isfinite().all(dim=1).tolist()
        bad += [name for name, ok in zip(named, finite, strict=True) if not ok]
    return bad


def snapshot(state: Any) -> tuple[Any, list[torch.cuda.Event]]:
    """A copy of `state` in host memory, complete once the returned events have passed; training may go on at once.

    CUDA tensors travel on the current stream, behind the kernels that wrote them and ahead of those that will change
    them, into pinned memory, which torch keeps for the next save. Everything else is copied when this returns.
    """
    devices = set()

    def copy(node: Any, name: str) -> Any:   # name: ".optimizer.state.0.exp_avg"
        if isinstance(node, torch.Tensor):
            if node.is_floating_point() and node.itemsize < 4 and OPTIMIZER_STATE.search(name):
                raise CheckpointError(f"not saved: optimizer state {name[1:]} is {node.dtype}, it must be fp32")
            node = node.detach()
            if not node.is_cuda:
                return node.to("cpu", copy=True)   # a copy also sheds the rest of a view's storage
            devices.add(node.device)
            return torch.empty_like(node, device="cpu", pin_memory=True).copy_(node, non_blocking=True)
        if isinstance(node, Mapping):   # keys are checked too
            return {copy(key, f"{name}.{key}"): copy(child, f"{name}.{key}") for key, child in node.items()}
        if type(node) in (list, tuple):
            return type(node)(copy(child, f"{name}.{i}") for i, child in enumerate(node))
        if type(node) in (str, int, float, bool, type(None)):   # exact types: a numpy.float64 is a float too
            return node
        raise CheckpointError(f"not saved: {name[1:]} is {type(node)}, not a tensor, number, string, dict, list, tuple")

    host = copy(state, "")
    return host, [torch.cuda.current_stream(device).record_event() for device in devices]


# Bytes on disk --------------------------------------------------------------------------------------------------------

def _write(path: Path, host: Any, ready: list[torch.cuda.Event], previous: Path | None, good: Path | None) -> None:
    """Write `path`; what stood there becomes `previous`, and `good` a link to the new file.

    Killed at any point, this leaves at least as many whole files as it found.
    """
    for event in ready:
        event.synchronize()
    data = _serialise(host)
    staging = path.with_name(path.name + ".tmp")
    new = staging / path.name
    try:
        # 1. Whatever takes space, in a folder of its own.
        shutil.rmtree(staging, ignore_errors=True)   # a killed save leaves it behind
        staging.mkdir(parents=True)
        new.write_bytes(data)
        _fsync(new)   # without it a power cut may keep the rename and lose the bytes
        if previous and path.exists():
            _link(path, staging / previous.name)
        if good:
            _link(new, staging / good.name)
        # 2. Renames. `previous` goes last, when the new file is in place: the old one may turn out to be damaged.
        for target in (path, good, previous):
            if target and (staging / target.name).exists():
                os.replace(staging / target.name, target)
        with contextlib.suppress(OSError):   # some network file systems cannot; the files are whole
            _fsync(path.parent)
    except OSError as error:
        raise CheckpointError(f"{path} was not saved ({error.strerror or error}); the files before it stand") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _serialise(host: Any) -> memoryview:
    """torch.save's bytes, with the sha256 of all that precedes it as the zip archive's comment."""
    buffer = io.BytesIO()   # not the file: of a full disk torch.save says "unexpected pos 64 vs 0"
    torch.save(host, buffer)
    with buffer.getbuffer() as body:   # its last 22 bytes are the end record, the last 2 the length of the comment
        assert body[-22:-18] == b"PK\5\6" and body[-2:] == b"\0\0"
        body[-2:] = TRAILER.to_bytes(2, "little")
        digest = hashlib.sha256(body).hexdigest()
    buffer.write(MARK + digest.encode())
    return buffer.getbuffer()


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:   # a file system without hard links
        shutil.copyfile(source, target)
        _fsync(target)


def _fsync(path: Path) -> None:   # a file or a folder
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load(path: str | Path) -> Any:
    """What was saved, on the CPU. CheckpointError for a file missing, damaged or foreign; no code in it is run."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error})") from error
    if data[-TRAILER:-64] != MARK:
        raise CheckpointError(f"{path} has no checksum at its end: it is truncated, or another program wrote it")
    if data[-64:] != hashlib.sha256(memoryview(data)[:-TRAILER]).hexdigest().encode():
        raise CheckpointError(f"{path} is damaged: its bytes do not match the checksum at its end")
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:   # the checksum is right: not damage, but a file that somebody else made
        code = re.findall(r"GLOBAL (\S+)", str(error)) or ["more than plain data"]
        raise CheckpointError(f"{path} is refused: it asks for {code[0]}, which was not run") from error


# A folder of them -----------------------------------------------------------------------------------------------------

class Checkpoints:
    """last.pt, last-1.pt, last_good.pt and best.pt in `folder`. Create on every rank, save on rank 0.

    Files are written in the background. If one fails, the next call raises, or `with Checkpoints(...)` at its end.
    """

    def __init__(self, folder: str | Path):
        self.last, self.previous, self.last_good, self.best = (
            Path(folder) / f"{name}.pt" for name in ("last", "last-1", "last_good", "best"))
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: dict[Path, Future] = {}

    def save(self, state: Mapping[str, Any], step: int, good: bool = False) -> list[str]:
        """Write {**state, "step": step} to last.pt and, if the caller calls it good, link last_good.pt to it.

        Returns the names of its non-finite tensors; nothing is written unless there are none. Raises CheckpointError.
        """
        return self._start(self.last, {**state, "step": step}, self.previous, self.last_good if good else None)

    def save_best(self, weights: Mapping[str, Any]) -> list[str]:
        """Write a plain state_dict to best.pt, half precision widened to fp32 (exact). Returns and raises as `save`."""
        half = (torch.float16, torch.bfloat16)
        wide = {name: w.float() if getattr(w, "dtype", None) in half else w for name, w in weights.items()}
        return self._start(self.best, wide)

    def _start(self, path: Path, state: dict, previous: Path | None = None, good: Path | None = None) -> list[str]:
        self.poll()
        if path in self._pending:
            self._pending.pop(path).result()
        if bad := non_finite(state):
            warnings.warn(f"{path} is left alone: not finite in {', '.join(bad[:3])} ({len(bad)} in all)", stacklevel=3)
            return bad
        self._pending[path] = self._writer.submit(_write, path, *snapshot(state), previous, good)
        return []

    def poll(self) -> None:
        """Raise the error of a save that has failed since the last call. Never waits."""
        for path in [path for path, future in self._pending.items() if future.done()]:
            self._pending.pop(path).result()

    def wait(self) -> None:
        """Return when nothing is left to write. Call it before the process ends."""
        while self._pending:
            self._pending.popitem()[1].result()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def newest(self) -> tuple[Path, Any] | None:
        """(path, state) of the newest whole file: last.pt, else last-1.pt, else last_good.pt. None if there is no file.

        CheckpointError if none is whole: starting afresh would overwrite what may still be rescued.
        """
        self.wait()
        files = [path for path in (self.last, self.previous, self.last_good) if path.exists()]
        for path in files:
            try:
                return path, load(path)
            except CheckpointError as error:
                warnings.warn(f"{error}; falling back to the file before it", stacklevel=2)
        if files:
            raise CheckpointError(f"no whole checkpoint is left among {', '.join(map(str, files))}")
        return None


# What a resume needs besides the tensors ------------------------------------------------------------------------------

def rng_state(device: str | torch.device = "cpu") -> dict[str, Any]:
    """This process's generators: Python's, torch's on the CPU and, for a CUDA device, torch's on it. (Not numpy's.)"""
    state = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    if torch.device(device).type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: Mapping[str, Any], device: str | torch.device = "cpu") -> None:
    """Put back what `rng_state` returned. On a CPU a CUDA state is passed over; a missing one leaves CUDA's alone."""
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

    `stop.number` is 0 or the first signal received: an int, so that ranks can agree on it in an all-reduce (MAX), save,
    and leave with 128 + number. A second SIGINT leaves at once. (torchrun passes on SIGTERM and SIGINT, not SIGUSR1.)
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
        if number == signal.SIGINT:   # no clean-up the second time: what is being written has no final name yet
            signal.signal(number, lambda *_: os._exit(128 + number))


def main() -> None:
    def train(folder: str, steps: int = 50) -> torch.Tensor:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        first = 0
        with Checkpoints(folder) as checkpoints:
            if found := checkpoints.newest():
                path, state = found
                net.load_state_dict(state["model"])
                optimizer.load_state_dict(state["optimizer"])
                set_rng_state(state["rng"])
                first = state["step"]
                print(f"   resumed at step {first} from {path.name}")
            for step in range(first + 1, steps + 1):
                optimizer.zero_grad()
                net(torch.randn(32, 8)).square().mean().backward()   # data and dropout both draw from the generator
                optimizer.step()
                if step % 10 == 0:
                    parts = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "rng": rng_state()}
                    checkpoints.save(parts, step)
        return torch.nn.utils.parameters_to_vector(net.parameters())

    with tempfile.TemporaryDirectory() as folder:
        warnings.showwarning = lambda message, *_: print(f"   warning: {message}")
        print("1. a run of 50 steps, never stopped; the same run, dead at step 37")
        whole = train(f"{folder}/a")
        train(f"{folder}/b", steps=37)
        print("2. one bit of the second run's last checkpoint flips, then it is started again")
        last = Path(f"{folder}/b/last.pt")
        raw = bytearray(last.read_bytes())
        raw[len(raw) // 2] ^= 1
        last.write_bytes(raw)
        print(f"   bit-identical to the run that never stopped: {torch.equal(whole, train(f'{folder}/b'))}")
        print("3. a state with a NaN")
        Checkpoints(f"{folder}/b").save({"weight": torch.tensor([1.0, float("nan")])}, step=60)


if __name__ == "__main__":
    main()
