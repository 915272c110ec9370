"""
Checkpoints: kill the run anywhere, find a whole file, go on bit for bit.

`torch.save(state, "last.pt")` truncates the old file before it writes the new one. Die in between (a SIGKILL, a full
disk, the scheduler) and neither exists. It writes a NaN as readily as a number, so a run that diverged at step 900
keeps its checkpoint of step 1000, NaN, which auto-resume loads again and again. And a flipped bit can load without a
word. What this file does about it:

  whole      Bytes go to a temporary name in the same folder, are fsynced, then renamed over the old file. A reader sees
             the old file or the new one, never half of one. A full disk leaves the old one as it was.
  checked    A torch file is a zip archive, and a zip archive may end in a comment: ours is the sha256 of every byte
             before it (`unzip -z last.pt` prints it). Plain `torch.load(path, weights_only=True)` still opens the file;
             `load` below verifies it first. A checksum finds damage, not malice: that is what weights_only=True is for.
  finite     A state that holds a NaN or an inf is never written, under any name, and never "repaired": `save` returns
             the names of the tensors, for the guard. (A mask of -inf belongs in a buffer with persistent=False.)
  exact      Adam's moments in half precision lose their small values (v below 2**-25 becomes 0): such a save is
             refused, as is any object that weights_only=True would not read back.
  cheap      The loop waits for the finite check and for a copy to host memory (pinned and asynchronous on CUDA); a
             thread does the rest. One file is written at a time. A save waits while the one before it *of the same
             name* is still being written, so that memory holds one copy for each name, and no save is ever dropped.

A folder holds `last.pt` (resume from here), `last-1.pt` ... (the ones before it, `keep` files in all), `last_good.pt`
(the last one that the caller called good: a hard link, not a second write) and `best.pt`, a plain fp32 state_dict:

    net.load_state_dict(torch.load("best.pt", weights_only=True))

One process writes to a folder (rank 0); every rank may read. To copy: take this file, it needs torch alone.
`python checkpoint.py` shows a save, the damage, the fallback and the resume.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import random
import re
import shutil
import signal
import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

MARK = b"sha256:"
TRAILER = len(MARK) + 64   # the zip comment: the mark, then 64 hexadecimal digits
OPTIMIZER_STATE = re.compile(r"(^|\.)(optimizer|exp_avg|exp_avg_sq|max_exp_avg_sq|momentum_buffer)(\.|$)")


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
    flags: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, t in tensors(state):
        if t.numel() and (t.is_floating_point() or t.is_complex()):
            t = torch.view_as_real(t) if t.is_complex() else t.float() if t.itemsize == 1 else t   # fp8 has no aminmax
            low, high = t.aminmax()   # NaN if any element is: exact, and without the temporaries of isfinite().all()
            flags.setdefault(t.device, {})[name] = ~(low.isfinite() & high.isfinite())
    return [name for of_one in flags.values()
            for name, bad in zip(of_one, torch.stack(list(of_one.values())).tolist(), strict=True) if bad]


@torch.no_grad()
def snapshot(state: Any) -> tuple[Any, list[torch.cuda.Event]]:
    """Copy `state` (nested dicts, lists, tuples, tensors, numbers, strings) to host memory, so that training may go on.

    CUDA tensors travel to pinned memory on the current stream, behind the kernels that wrote them and ahead of those
    that will change them; the copy is ready when the returned events have passed. Everything else is copied at once.
    Raises CheckpointError, with the name, for what `torch.load(weights_only=True)` would not give back and for
    optimizer state in fewer than 32 bits.
    """
    devices = set()

    def copy(node: Any, name: str) -> Any:
        if isinstance(node, torch.Tensor):
            if node.is_floating_point() and node.itemsize < 4 and OPTIMIZER_STATE.search(name):
                raise CheckpointError(f"not saved: optimizer state {name} is {node.dtype}, it must be fp32")
            if not node.is_cuda:
                return node.detach().to("cpu", copy=True)   # a copy also sheds the rest of a view's storage
            devices.add(node.device)
            return torch.empty_like(node, device="cpu", pin_memory=True).copy_(node.detach(), non_blocking=True)
        if isinstance(node, Mapping):
            return {copy(key, f"{name}.{key}"): copy(child, f"{name}.{key}".lstrip(".")) for key, child in node.items()}
        if type(node) in (list, tuple):
            return type(node)(copy(child, f"{name}.{i}".lstrip(".")) for i, child in enumerate(node))
        if type(node) in (str, int, float, bool, type(None)):   # exact types: a numpy.float64 is a float too
            return node
        raise CheckpointError(f"not saved: {name} is a {type(node).__module__}.{type(node).__qualname__}, "
                              "not a tensor, number, string, dict, list or tuple")

    host = copy(state, "")
    return host, [torch.cuda.current_stream(device).record_event() for device in devices]


# Bytes on disk --------------------------------------------------------------------------------------------------------

def save(path: str | Path, state: Any) -> None:
    """Write `state` to `path`, all of it or nothing, with its checksum. Does not look for NaNs: `Checkpoints` does.

    Raises CheckpointError, with the file at `path` as it was, if the disk or the state does not allow it.
    """
    _write(Path(path), *snapshot(state))


def _write(path: Path, host: Any, ready: Iterable[torch.cuda.Event], older: Iterable[Path] = (),
           good: Path | None = None) -> None:
    """Write `path`; what stood there goes to older[0], that to older[1] and so on; `good` links to the new file.

    Whatever takes space comes before the first rename, and the new file is in place before an old one goes: killed at
    any point, this leaves at least as many whole files as it found.
    """
    def temporary(target: Path) -> Path:   # always the same name: the next save sweeps up what a killed one left
        return target.with_name(target.name + ".tmp")

    older = list(older) if path.exists() else []
    linked = [*older[:1], *([good] if good else [])]
    for event in ready:
        event.synchronize()
    data = _serialise(host)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary(path).unlink(missing_ok=True)
        with open(temporary(path), "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())   # without it a power cut may keep the rename and lose the bytes
        for target in linked:
            _link(temporary(path) if target == good else path, temporary(target))
        os.replace(temporary(path), path)
        for newer, target in reversed(list(pairwise(older))):
            if newer.exists():
                os.replace(newer, target)
        for target in linked:
            os.replace(temporary(target), target)
        folder = os.open(path.parent, os.O_RDONLY)
        with contextlib.suppress(OSError):   # some network file systems have none for folders; the files are whole
            os.fsync(folder)
        os.close(folder)
    except OSError as error:
        raise CheckpointError(f"{path} was not saved ({error.strerror or error}); the files before it stand") from error
    finally:
        for target in (path, *linked):
            with contextlib.suppress(OSError):
                temporary(target).unlink()


def _serialise(host: Any) -> memoryview:
    """torch.save's bytes, with the sha256 of all that precedes it as the zip archive's comment.

    In memory, since a disk that fills up under torch.save gives "unexpected pos 64 vs 0" instead of its cause.
    """
    buffer = io.BytesIO()
    torch.save(host, buffer)
    with buffer.getbuffer() as body:
        assert body[-22:-18] == b"PK\5\6" and body[-2:] == b"\0\0"   # the archive's end record: no comment so far
        body[-2:] = TRAILER.to_bytes(2, "little")
        digest = hashlib.sha256(body).hexdigest()
    buffer.write(MARK + digest.encode())
    return buffer.getbuffer()


def _link(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:   # a file system without hard links
        shutil.copyfile(source, target)
        with open(target, "rb") as file:
            os.fsync(file.fileno())


def load(path: str | Path, map_location: str | torch.device = "cpu") -> Any:
    """Verify the checksum of a file that `save` wrote, then read it. Runs no code from the file.

    Raises CheckpointError for a file that is missing, truncated, damaged, foreign, or asks for more than plain data.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error})") from error
    if data[:4] != b"PK\3\4":
        raise CheckpointError(f"{path} is not a checkpoint: it is empty, damaged at the start, or no torch file at all")
    if data[-TRAILER:-64] != MARK:
        raise CheckpointError(f"{path} has no checksum at its end: it is truncated, or another program wrote it")
    if data[-64:] != hashlib.sha256(memoryview(data)[:-TRAILER]).hexdigest().encode():
        raise CheckpointError(f"{path} is damaged: its bytes do not match the checksum at its end")
    try:
        return torch.load(io.BytesIO(data), map_location=map_location, weights_only=True)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:   # the checksum is right: not damage, but a file that somebody else made
        asks_for = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it asks for {asks_for[1]}, which was not run" if asks_for else str(error).partition("\n")[0]
        raise CheckpointError(f"{path} is refused: {reason}") from error


# A folder of them -----------------------------------------------------------------------------------------------------

class Checkpoints:
    """last.pt, the `keep - 1` before it, last_good.pt and best.pt in `folder`. Create on every rank, save on rank 0."""

    def __init__(self, folder: str | Path, keep: int = 2):
        self.last, self.last_good, self.best = (Path(folder) / f"{name}.pt" for name in ("last", "last_good", "best"))
        self.older = [Path(folder) / f"last-{i}.pt" for i in range(1, keep)]
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: dict[Path, Future] = {}

    def save(self, state: Mapping[str, Any], step: int, good: bool = False, background: bool = True) -> list[str]:
        """Write {**state, "step": step} to last.pt and, if the caller calls it good, link last_good.pt to it.

        Returns [] when the state is finite and on its way to the disk; otherwise the names of its non-finite tensors,
        and nothing was written. Raises CheckpointError if the state, or the disk (now or in an earlier background
        save), does not allow it. With background=False the file is on the disk when this returns.
        """
        return self._start(self.last, {**state, "step": step}, f"step {step}", background,
                           older=self.older, good=self.last_good if good else None)

    def save_best(self, weights: Mapping[str, Any], background: bool = True) -> list[str]:
        """Write a plain state_dict to best.pt, half precision widened to fp32 (exact). Returns and raises as `save`."""
        half = (torch.float16, torch.bfloat16)
        plain = {name: w.float() if getattr(w, "dtype", None) in half else w for name, w in weights.items()}
        return self._start(self.best, plain, "the state_dict", background)

    def _start(self, path: Path, state: dict, what: str, background: bool, **where: Any) -> list[str]:
        self.poll()
        if path in self._pending:
            self._pending.pop(path).result()
        if bad := non_finite(state):
            more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
            warnings.warn(f"{path} stays as it was: {what} is not finite in {', '.join(bad[:3])}{more}", stacklevel=3)
            return bad
        self._pending[path] = self._writer.submit(_write, path, *snapshot(state), **where)
        if not background:
            self.wait()
        return []

    def poll(self) -> None:
        """Raise the error of a background save that has failed since the last call. Never waits."""
        for path in [path for path, future in self._pending.items() if future.done()]:
            self._pending.pop(path).result()

    def wait(self) -> None:
        """Return when nothing is left to write; raises as `poll`. Call it before the process ends."""
        while self._pending:
            self._pending.pop(next(iter(self._pending))).result()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever ends the run, what was being written is finished."""
        self.wait()

    def newest(self, map_location: str | torch.device = "cpu") -> tuple[Path, Any] | None:
        """The newest whole state and where it was read: last.pt, else the ones before it, else last_good.pt.

        Warns about every file it passes over. None if there is no file; CheckpointError if there are some and none is
        whole, since starting afresh would overwrite what may still be rescued.
        """
        self.wait()
        damaged = []
        for path in (self.last, *self.older, self.last_good):
            if path.exists():
                try:
                    state = load(path, map_location)
                except CheckpointError as error:
                    damaged.append(str(error))
                    continue
                for sentence in damaged:
                    warnings.warn(f"{sentence}; falling back to {path}", stacklevel=2)
                return path, state
        if damaged:
            raise CheckpointError("no whole checkpoint is left: " + "; ".join(damaged))
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
    torch.set_rng_state(state["cpu"].cpu())
    if "cuda" in state and torch.device(device).type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


def describe_changes(saved: Mapping[str, Any], current: Mapping[str, Any],
                     fixed: Iterable[str] = ("model", "dataset", "num_classes", "images", "pixels", "labels"),
                     ) -> list[str]:
    """What differs between two flat dicts of facts, as ["world_size: 2 -> 1", ...].

    Raises CheckpointError that names what differs among `fixed`: with those changed it would not be the same run.
    """
    changed = {key: f"{key}: {saved.get(key)} -> {current.get(key)}"
               for key in dict.fromkeys((*saved, *current)) if saved.get(key) != current.get(key)}
    if refused := [changed[key] for key in fixed if key in changed]:
        raise CheckpointError(f"cannot resume, this is another run ({'; '.join(refused)})")
    return list(changed.values())


class StopSignals:
    """SIGTERM, SIGINT, SIGUSR1 set a number that the loop reads at its step boundaries: `with StopSignals() as stop`.

    `stop.number` is 0, or the first signal received: an int, so that ranks can agree on it in an all-reduce (MAX),
    save, and leave with 128 + number. A second SIGINT leaves at once with 130. For the main thread; the old handlers
    return on exit. (torchrun passes SIGTERM and SIGINT on to its workers; send SIGUSR1 to the workers themselves.)
    """

    def __init__(self) -> None:
        self.number = self._interrupts = 0

    def __enter__(self) -> StopSignals:
        self._previous = {n: signal.signal(n, self._receive) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: object) -> None:
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            os._exit(128 + signal.SIGINT)   # no clean-up: what is being written has a temporary name
        self.number = self.number or int(number)


def main() -> None:
    import tempfile

    def train(folder: Path, steps: int = 50, dies_at: int | None = None) -> torch.Tensor:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        checkpoints, step = Checkpoints(folder), 0
        if found := checkpoints.newest():
            path, state = found
            net.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            set_rng_state(state["rng"])
            step = state["step"]
            print(f"   resumed at step {step} from {path.name}")
        while step < steps and step != dies_at:
            loss = net(torch.randn(32, 8)).square().mean()   # data and dropout both draw from the generator
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 10 == 0:
                state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "rng": rng_state()}
                checkpoints.save(state, step)
        checkpoints.wait()
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        warnings.showwarning = lambda message, *_: print(f"   warning: {message}")
        print("1. a run of 50 steps, never stopped; the same run, dead at step 37")
        whole, _ = train(Path("a")), train(Path("b"), dies_at=37)
        print("2. one bit of the second run's last checkpoint flips, then it is started again")
        raw = bytearray(Path("b/last.pt").read_bytes())
        raw[len(raw) // 2] ^= 1
        Path("b/last.pt").write_bytes(raw)
        print(f"   bit-identical to the run that never stopped: {torch.equal(whole, train(Path('b')))}")
        print("3. a state with a NaN")
        print(f"   refused: {Checkpoints('b').save({'model': {'weight': torch.tensor([1.0, float('nan')])}}, 60)}")


if __name__ == "__main__":
    main()
