# SPDX-License-Identifier: MIT (finite 4.0.0, 2026-11-28)
"""
Checkpoints: kill the run anywhere, find a whole file, go on bit for bit.

`torch.save(state, "last.pt")` truncates the old file before it writes the new one. A process that
dies in between (by SIGKILL, by a full disk) leaves neither. torch.save writes a NaN as readily as a
number, and auto-resume then loads the same NaN again and again. And torch.load loads a file with a
flipped bit without a word. Here every file is

  whole      The bytes go to a new folder beside the old file, are fsynced, and are renamed over the
             old file. A reader sees the old file or the new one. A full disk leaves the old file.
             A link that lies at the name is replaced, and never written through.
  checked    A torch file is a zip archive and holds the CRC-32 of each record. torch.load does not
             compare it; `load` does. (The CRC finds damage. Against malice: weights_only=True, and
             bounds: a small file becomes no large state. Errors hold no control characters.)
             `compare` reads back what was saved: a run calls it before it says "done".
  finite     A state with a non-finite number (NaN, inf, a magnitude above LIMIT) is neither written
             nor "repaired": `save` returns the names of the tensors. `non_finite` says which masks
             of -inf are lawful. A file with such numbers is refused by `load_run`.
  exact      Adam's moments lose their small values in half precision: v below 2**-25 becomes 0 in
             fp16. Such optimizer state is refused. So is every object that is no tensor, dict,
             list, tuple or plain value (PLAIN). OrderedDict and Counter stay what they are,
             any other mapping comes back as a dict; tied tensors are written once, and come
             back tied.
  cheap      The training loop waits for the finite check and a copy to host memory. A thread does
             the rest. A save waits while the same file is still written: no save is dropped, and
             host memory holds two copies a file: the tensors, and the bytes of the file.
  one run's  `lock` refuses a folder in which another process writes, for as long as that lives.

A folder holds `last.pt` (resume from this one), `last-1.pt` (the one before), `last_good.pt` (the
last one that the caller called good: a hard link, not a second write) and `best.pt` (a plain fp32
state_dict). One process writes to the folder (rank 0); every rank may read. Sharded tensors
(DTensor) are refused. Copy this file alone: it needs torch.

Paste::

    import torch
    from checkpoint import Checkpoints, StopSignals, rng_state, set_rng_state

    net, step = torch.nn.Linear(4, 2), 0
    with StopSignals() as stop, Checkpoints("run") as checkpoints:
        if found := checkpoints.newest():
            net.load_state_dict(found[1]["model"])
            set_rng_state(found[1]["rng"])
            step = found[1]["step"]
        while step < 10 and not stop.number:  # train here
            step += 1
            checkpoints.save({"model": net.state_dict(), "rng": rng_state()}, step, good=True)
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pickle
import random
import re
import shutil
import signal
import stat
import warnings
import zipfile
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

try:
    import fcntl
except ImportError:  # Windows
    import msvcrt

    fcntl = None

# Just under sqrt(3.4e38): the square of anything above is inf in fp32, so it is as good as inf.
LIMIT = 1.8e19
HALF = (torch.float16, torch.bfloat16)
# "state.0.sum" is an optimizer's, "state.0.weight" a layer's in a list of that name.
OPTIMIZER_STATE = re.compile(
    r"\boptimizers?\b|\bstate\.\d+\.(?!.*(weight|bias|running_))|exp_avg|momentum_buffer"
)
NEVER_A_MASK = re.compile(OPTIMIZER_STATE.pattern + r"|\b(weight|bias|running_mean|running_var)$")
State = Mapping[str, Any]  # of a run: names, and what is known by them
# What is saved besides tensors, dicts, lists and tuples: torch.load(weights_only=True) reads it
# back, in every torch from 2.9 on.
PLAIN = (
    str, int, float, bool, complex, bytes, type(None),
    torch.Size, torch.device, torch.dtype, torch.layout,
)  # fmt: skip
KEPT_MAPPINGS = (OrderedDict, Counter)
# What users, terminals and batch systems send to end a process that may still save.
STOPS = (
    "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGPWR", "SIGBREAK",
)  # fmt: skip
# Of dicts, lists and tuples in a file: the generators of 1,000 ranks are 640,000.
MOST_ENTRIES = 2**22
# Open through no link, and do not wait for who reads a pipe. (Windows has neither.)
NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class CheckpointError(RuntimeError):
    """A file cannot be read or written, or a state must not be written. Names file and cause, in
    one line: the names in a file are a stranger's, and a terminal would obey their control
    characters."""

    def __init__(self, sentence: str):
        shown = (c if c.isprintable() else ascii(c)[1:-1] for c in sentence[:1000])
        super().__init__("".join(shown))


def named_tensors(tree: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """(dotted name, tensor) for every tensor in nested mappings, lists and tuples."""
    if isinstance(tree, Tensor):
        yield prefix, tree
    elif isinstance(tree, (Mapping, list, tuple)):
        items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        for key, value in items:
            # optimizer.state is keyed by the parameters themselves
            name = prefix if isinstance(key, Tensor) else f"{prefix}.{key}".lstrip(".")
            yield from named_tensors(value, name)


@torch.no_grad()
def non_finite(state: Any) -> list[str]:
    """Names of the tensors with NaN, inf or a magnitude above LIMIT. One host sync.

    A mask may hold -inf: a tensor is a mask if every element is 0 or below -LIMIT, and its name is
    not that of a weight, a running statistic or optimizer state. It lists other masks too: register
    them with persistent=False.
    """
    tensors, extremes = [], []
    for name, t in named_tensors(state):
        if t.is_complex():
            t = torch.view_as_real(t.resolve_conj())
        has_inf = t.is_floating_point() and t.dtype is not torch.float4_e2m1fn_x2
        if has_inf and t.numel():
            if t.itemsize == 1:  # fp8 has no aminmax
                t = t.float()
            # Smallest and largest are NaN if any element is. isfinite().all() would take
            # temporaries of t's size. In fp32, because LIMIT is inf in fp16.
            extremes.append(torch.stack(t.aminmax()).float())
            tensors.append((name, t))
    if not tensors:
        return []
    device = next((pair.device for pair in extremes if pair.is_cuda), "cpu")
    pairs = torch.stack([pair.to(device, non_blocking=device != "cpu") for pair in extremes])
    good = (pairs.abs() <= LIMIT).all(dim=1).tolist()  # False for NaN
    bad = [tensor for tensor, finite in zip(tensors, good, strict=True) if not finite]
    return [name for name, t in bad if NEVER_A_MASK.search(name) or not _is_mask(t)]


def _is_mask(t):
    return bool(((t == 0) | (t < -LIMIT)).all())


def _is_dense(t):
    """What is saved, and what is loaded again."""
    return t.layout is torch.strided and not (t.is_nested or t.is_quantized or t.is_meta)


def snapshot(state: Any) -> tuple[Any, list[torch.cuda.Event]]:
    """A copy of `state` in host memory, complete once the returned events have passed.

    You may go on training at once: this copies CUDA tensors to pinned memory on the current stream,
    in its order, and everything else before it returns. CheckpointError names what cannot be saved.
    """
    devices = set()
    copies = {}  # memory: (the first tensor that lies there, its copy); tied ones share it

    def copy(node: Any, name: str) -> Any:  # name: ".optimizer.state.0.exp_avg"
        if isinstance(node, Tensor):
            plain = type(node) in (Tensor, torch.nn.Parameter)
            if not plain or not _is_dense(node):
                raise CheckpointError(
                    f"not saved: {name[1:]} is {type(node)}, {node.dtype}, {node.layout}, on "
                    f"{node.device}, and not a plain dense tensor (save sharded ones, DTensor, "
                    "with torch.distributed.checkpoint)"
                )
            narrow = node.is_floating_point() and node.itemsize < 4
            if narrow and OPTIMIZER_STATE.search(name):
                raise CheckpointError(
                    f"not saved: optimizer state {name[1:]} is {node.dtype}, it must be fp32"
                )
            dense = torch.ops.aten.is_non_overlapping_and_dense(node) and not node.is_conj()
            seen_as = () if dense else (node.shape, node.stride(), node.is_conj(), node.is_neg())
            place = node.device, node.data_ptr(), node.numel(), node.dtype, seen_as
            if not node.numel() or place not in copies:
                copies[place] = node, on_host(node.detach(), name)  # a node that died would share
            host = copies[place][1]
            return host.as_strided(node.shape, node.stride()) if dense else host
        if isinstance(node, Mapping):  # keys are checked too
            items = {
                copy(key, f"{name}.{key}"): copy(child, f"{name}.{key}")
                for key, child in node.items()
            }
            return type(node)(items) if type(node) in KEPT_MAPPINGS else items
        if type(node) in (list, tuple):
            return type(node)(copy(child, f"{name}.{i}") for i, child in enumerate(node))
        if type(node) in PLAIN:  # exact types: a numpy.float64 is a float too
            return node
        raise CheckpointError(
            f"not saved: {name[1:]} is {type(node)}, no tensor, dict, list, tuple or plain value"
        )

    def on_host(t: Tensor, name: str) -> Tensor:
        try:
            if not t.is_cuda:
                return t.to("cpu", copy=True)  # a copy also sheds the rest of a view's storage
            devices.add(t.device)
            host = torch.empty_like(t, device="cpu", pin_memory=True)
            return host.copy_(t, non_blocking=True)
        except NotImplementedError as error:  # int4, float4, ...
            raise CheckpointError(f"not saved: torch cannot copy {name[1:]}, {t.dtype}") from error

    host = copy(state, "")
    return host, [torch.cuda.current_stream(device).record_event() for device in devices]


def packed(host: Any, ready: list[torch.cuda.Event]) -> memoryview:
    """The bytes of what snapshot() returned."""
    for event in ready:
        event.synchronize()
    content = io.BytesIO()  # not the file: of a full disk torch.save says "unexpected pos 64 vs 0"
    torch.save(host, content)
    return content.getbuffer()


def write(
    path: Path,
    content: bytes | memoryview,
    previous: Path | None = None,
    good: Path | None = None,
) -> int:
    """Write `path`, whole or not at all; returns the CRC-32. The old file becomes `previous`,
    `good` a link to the new one. Everything is made in a new folder, so that no link at one of
    these names leads a write elsewhere."""
    staging = path.with_name(path.name + ".tmp")
    new = staging / path.name
    try:
        # 1. Whatever takes space, in a folder of its own.
        with contextlib.suppress(OSError):
            staging.unlink()  # a link
        shutil.rmtree(staging, ignore_errors=True)  # a killed save leaves it behind
        staging.mkdir(parents=True)
        new.write_bytes(content)
        _fsync(new)  # without it a power cut may keep the rename and lose the bytes
        if previous and path.exists():
            _link(path, staging / previous.name)
        if good:
            _link(new, staging / good.name)
        # 2. Renames. `previous` goes last, when the new file is in place: the old one may turn out
        #    to be damaged.
        for target in (path, good, previous):
            if target and (staging / target.name).exists():
                os.replace(staging / target.name, target)
        with contextlib.suppress(OSError):  # some network file systems cannot; the files are whole
            _fsync(path.parent)
    except OSError as error:
        why = error.strerror or error
        raise CheckpointError(f"{path} was not saved ({why}); earlier files are intact") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return zlib.crc32(content)


def _link(source: Path, target: Path):
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)
        _fsync(target)


def _fsync(path: Path):  # a file or a folder (on Windows: a file)
    # Windows flushes only what is open for writing; nobody else opens a folder for writing.
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _entries_left(tree, left):
    """`left`, less the entries of nested containers. Below 0 it stops: a list of ten times the same
    list, and so on, takes 200 bytes, and no loop over it ends."""
    if isinstance(tree, (dict, list, tuple)):
        left -= len(tree)
        for child in tree.values() if isinstance(tree, dict) else tree:
            if left < 0:
                break
            left = _entries_left(child, left)
    return left


def load(path: str | Path) -> Any:
    """Load a saved file, on the CPU. It runs no code in the file.

    Raises CheckpointError for a missing, damaged or foreign file, and for any non-regular file.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would wait for its writer
            raise OSError("it is not a regular file")
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            # torch takes a record with the bit of a folder for one, and leaves its tensor
            # uninitialised. It compresses none, and no two lie at one place: a small file is no
            # large one.
            odd = any(record.external_attr or record.compress_type for record in records)
            overlap = sum(record.file_size for record in records) > os.path.getsize(path)
            # testzip() names the first record that does not match its CRC-32
            if odd or overlap or archive.testzip():
                raise zipfile.BadZipFile
        state = torch.load(path, map_location="cpu", weights_only=True)
        if _entries_left(state, MOST_ENTRIES) < 0:
            raise ValueError
        for _, t in named_tensors(state):  # as snapshot() makes them
            if not _is_dense(t) or t.numel() * t.itemsize > t.untyped_storage().nbytes():
                raise ValueError
        return state
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error})") from error
    except pickle.UnpicklingError as error:  # the CRC is right: somebody made the file like this
        code = re.findall(r"GLOBAL (\S+)", str(error)) or ["more than plain data"]
        why = f"{path} is refused: it asks for {code[0]}, which was not run"
        raise CheckpointError(why) from error
    except Exception as error:  # zipfile and torch.load raise many kinds for a senseless header
        raise CheckpointError(f"{path} is damaged, truncated or of another program") from error


def load_run(path: str | Path) -> State:
    """Load a state that `save` wrote, and check that it is finite."""
    state = load(path)
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, not a run")
    check_step(state.get("step"), path)
    if bad := non_finite(state):
        raise CheckpointError(f"{path} is non-finite in {', '.join(bad[:3])}")
    return state


def check_step(step: Any, path: Path | str):
    if type(step) is not int or step < 0:
        raise CheckpointError(f"{path} claims step {step}: a step is 0, 1, 2, ...")


class Checkpoints(contextlib.AbstractContextManager):
    """The files in `folder`: create on every rank, save on rank 0.

    If a write fails, the next call or `wait` raises.
    """

    def __init__(self, folder: str | Path):
        folder = Path(folder)
        self.last = folder / "last.pt"
        self.previous = folder / "last-1.pt"
        self.last_good = folder / "last_good.pt"
        self.best = folder / "best.pt"
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending = {}  # path: the Future of its write
        self._written = {}  # path: the CRC-32 of what was saved last

    def lock(self):
        """CheckpointError if another process has locked the folder and is alive."""
        path = self.last.with_name(".lock")
        if path.is_symlink():
            path.unlink()
        self._lock = os.open(path, os.O_CREAT | os.O_WRONLY | NO_LINK)
        try:
            if fcntl:
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # children do not inherit it
            else:
                msvcrt.locking(self._lock, msvcrt.LK_NBLCK, 1)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):  # else: a file system without locks
                folder = self.last.parent
                raise CheckpointError(f"{folder} is in use: another run writes to it") from error

    def save(self, state: State, step: int, good: bool = False) -> list[str]:
        """Write {**state, "step": step} to last.pt; if `good`, link last_good.pt to it.

        Do not call a state good because a signal stops the run: the resumed run would go back to
        another state than a run that was never stopped.

        Returns the names of the non-finite tensors. If there is one, nothing is written. Raises
        CheckpointError.
        """
        check_step(step, self.last)
        good_path = self.last_good if good else None
        return self._start(self.last, {**state, "step": step}, self.previous, good_path)

    def save_best(self, weights: State) -> list[str]:
        """Write a state_dict to best.pt, half precision widened to fp32 (exact). As `save`."""
        wide = {
            name: w.float() if getattr(w, "dtype", None) in HALF else w
            for name, w in weights.items()
        }
        return self._start(self.best, wide)

    def _start(self, path, state, *links):
        self.poll(path)
        host, ready = snapshot(state)  # first, because it refuses what non_finite cannot look at
        if bad := non_finite(state):
            names = f"{', '.join(bad[:3])} ({len(bad)} in all)"
            warnings.warn(f"{path} is kept: the new state is non-finite in {names}", stacklevel=3)
            return bad
        self._pending[path] = self._writer.submit(lambda: write(path, packed(host, ready), *links))
        return []

    def poll(self, *wanted: Path):
        """Raise the error of a save that has failed since. Waits only for the named files."""
        for path, future in [*self._pending.items()]:
            if future.done() or path in wanted:
                del self._pending[path]
                self._written[path] = future.result()

    def wait(self, *_):
        """Return when nothing is left to write. Call it before the process ends."""
        self.poll(*self._pending)

    __exit__ = wait

    def compare(self):
        """Raise CheckpointError if a file is not what was saved here last. Call wait() before."""
        for path, checksum in self._written.items():
            if zlib.crc32(path.read_bytes()) != checksum:
                raise CheckpointError(f"{path} is not what this run saved: something else wrote it")

    def newest(self, load: Callable[[Path], State] = load_run) -> tuple[Path, State] | None:
        """(path, state) of the newest whole file: last.pt, else last-1.pt, else last_good.pt.

        None if there is no file. Raises CheckpointError if there are files and none is whole: a
        fresh start would overwrite what you may rescue. load: may refuse a file with that error
        too.
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


def rng_state(device: str | torch.device = "cpu") -> State:
    """This process's generators: Python's, torch's on the CPU and on a CUDA device. (No numpy.)"""
    state = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    if torch.device(device).type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: State, device: str | torch.device = "cpu"):
    """Restore what `rng_state` returned; CUDA's if `state` has one and `device` is CUDA."""
    random.setstate(state["python"])
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.device(device).type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


class Stopped(BaseException):
    """This signal came while `StopSignals.at_once` was set. No Exception: nobody swallows it."""


class StopSignals:
    """The signals of STOPS set a number that the loop reads: `with StopSignals()`.
    (On Windows: SIGINT and SIGBREAK, by Ctrl-C and Ctrl-Break.)

    `stop.number` is 0 or the first signal, an int: ranks can agree on it (all-reduce MAX), save,
    and leave with 128 + number. A second SIGINT ends the process at once. While at_once is True (in
    a set-up, which has nothing to save) a signal raises Stopped instead. SIGHUP stays ignored under
    nohup. (torchrun passes on SIGTERM and SIGINT only.)
    """

    def __init__(self, at_once: bool = False):
        self.at_once = at_once
        self.number = 0

    def __enter__(self):
        self._previous = {}
        for name in STOPS:
            number = getattr(signal, name, None)  # Windows has few
            ignored = name == "SIGHUP" and number and signal.getsignal(number) is signal.SIG_IGN
            if number and not ignored:
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number, _):
        self.number = self.number or number
        if self.at_once:
            self.at_once = False
            raise Stopped(number)
        if number == signal.SIGINT:
            # Nothing is cleaned up the second time: a half-written file has no final name yet.
            signal.signal(number, lambda *_: os._exit(128 + number))
