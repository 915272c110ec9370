"""checkpoint.py: every fault is planted (a cut, a bit, a kill, a full disk, a NaN), and a whole file must remain."""

import errno
import hashlib
import io
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import warnings
import zipfile
from pathlib import Path

import pytest
import torch

import checkpoint
from checkpoint import CheckpointError, Checkpoints, StopSignals, describe_changes, load, non_finite, snapshot

NAN, INF = float("nan"), float("inf")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def python(*arguments, **kwargs):
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=600, **kwargs)


def save(path, state):
    checkpoint._write(path, *snapshot(state), None, None)


def wrote(checkpoints, state, step, good=False):
    """A save that is on the disk when this returns."""
    bad = checkpoints.save(state, step, good=good)
    checkpoints.wait()
    return bad


def toy(value=1.0):
    return {"model": {"weight": torch.full((4, 3), value), "half": torch.full((2,), value, dtype=torch.float16)},
            "optimizer": {"state": {0: {"exp_avg": torch.full((4, 3), value), "step": torch.tensor(value)}}}}


@pytest.fixture
def folder(tmp_path):
    """step 1 in last-1.pt and last_good.pt, step 2 in last.pt."""
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.save(toy(1.0), 1, good=True) == [] and checkpoints.save(toy(2.0), 2) == []
    checkpoints.wait()
    return tmp_path


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def flip(path, position, bit=0):
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1 << bit
    path.write_bytes(raw)


# Whole files ----------------------------------------------------------------------------------------------------------

def test_a_state_comes_back_with_its_types_dtypes_and_strides(tmp_path):
    base = torch.arange(1000.0)
    state = {"a": [1, 2.5, True, None, "x", (1, (2,))], 7: {"t": torch.randn(3, 4).t(), "view": base[:2]},
             "empty": torch.empty(0, 3), "scalar": torch.tensor(3, dtype=torch.int64), "inf": INF,
             "bf16": torch.randn(5).bfloat16(), "parameter": torch.nn.Parameter(torch.ones(2))}
    save(tmp_path / "x.pt", state)
    back = load(tmp_path / "x.pt")
    assert back["a"] == state["a"] and type(back["a"][5]) is tuple and back["inf"] == INF
    for got, want in ((back[7]["t"], state[7]["t"]), (back["bf16"], state["bf16"]), (back["scalar"], state["scalar"])):
        assert torch.equal(got, want) and got.dtype == want.dtype and got.stride() == want.stride()
    assert back[7]["view"].untyped_storage().nbytes() == 8   # a view of a big buffer does not drag it into the file
    assert type(back["parameter"]) is torch.Tensor and not back["parameter"].requires_grad


def test_plain_torch_and_plain_zip_tools_open_the_file(tmp_path):
    save(tmp_path / "x.pt", toy(3.0))
    for mmap in (False, True):
        assert torch.load(tmp_path / "x.pt", weights_only=True, mmap=mmap)["model"]["weight"][0, 0] == 3
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        assert archive.testzip() is None


def test_a_file_of_the_older_format_with_its_checksum_in_the_archives_comment_loads_too(tmp_path):
    buffer = io.BytesIO()
    torch.save(toy(3.0), buffer)
    body = buffer.getvalue()[:-2] + (71).to_bytes(2, "little")
    (tmp_path / "old.pt").write_bytes(body + b"sha256:" + hashlib.sha256(body).hexdigest().encode())
    assert load(tmp_path / "old.pt")["model"]["weight"][0, 0] == 3


def test_a_file_cut_at_any_byte_is_refused(tmp_path):
    save(tmp_path / "x.pt", toy())
    whole = (tmp_path / "x.pt").read_bytes()
    cut = tmp_path / "cut.pt"
    for length in range(len(whole)):
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.pt"):
            load(cut)


def same(a, b):
    """Whether two states hold the same names and bits."""
    a, b = (dict(checkpoint.named_tensors(state)) for state in (a, b))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


def test_a_flipped_bit_at_any_byte_is_refused_or_does_not_matter(tmp_path):
    save(tmp_path / "x.pt", toy())
    whole, dice, harmless = (tmp_path / "x.pt").read_bytes(), random.Random(0), []
    assert len(whole) > 1500
    for position in range(len(whole)):
        bad = bytearray(whole)
        bad[position] ^= 1 << dice.randrange(8)
        (tmp_path / "bad.pt").write_bytes(bad)
        try:
            assert same(load(tmp_path / "bad.pt"), toy()), position
            harmless.append(position)
        except CheckpointError as error:
            assert "bad.pt" in str(error)
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:  # what is harmless lies between the records: padding, dates
        for record in archive.infolist():
            start = whole.index(archive.read(record), record.header_offset)
            assert not set(range(start, start + record.file_size)) & set(harmless), record.filename
    assert len(harmless) < 0.7 * len(whole)


def test_plain_torch_load_misses_a_flipped_bit_that_the_checksum_sees(tmp_path):
    save(tmp_path / "x.pt", {"weight": torch.ones(1000)})
    one = bytes(torch.ones(1).view(torch.uint8).tolist())
    flip(tmp_path / "x.pt", (tmp_path / "x.pt").read_bytes().index(100 * one) + 3, bit=6)
    weight = torch.load(tmp_path / "x.pt", weights_only=True)["weight"]
    assert weight[0] != 1 and weight[1:].eq(1).all()   # loaded without a word
    with pytest.raises(CheckpointError, match="damaged"):
        load(tmp_path / "x.pt")


@pytest.mark.parametrize("data", [b"", b"PK\3\4", b"hello", b"\x80\x02}q\0.", bytes(5000), "zip", "legacy", "folder",
                                  None])
def test_a_foreign_file_gives_one_sentence_with_its_name(tmp_path, data):
    path = tmp_path / "foreign.pt"
    if data == "folder":
        path.mkdir()
    elif data == "legacy":
        torch.save(toy(), path, _use_new_zipfile_serialization=False)
    elif data == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("hello.txt", "hello")
    elif data is not None:
        path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 250


class Evil:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_code_in_a_file_with_a_right_checksum_is_not_run(tmp_path):
    path, planted = tmp_path / "evil.pt", tmp_path / "planted"
    torch.save({"model": Evil(planted)}, path)
    with pytest.raises(CheckpointError, match=r"evil\.pt is refused.*mkdir"):
        load(path)
    assert not planted.exists()
    torch.load(path, weights_only=False)   # the trap is live: an unguarded load springs it
    assert planted.exists()


@pytest.mark.parametrize("thing", [signal.SIGTERM, Path("x"), {1, 2}, slice(1), object()],
                         ids=lambda thing: type(thing).__name__)
def test_what_could_not_be_read_back_is_refused_by_name(tmp_path, thing):
    with pytest.raises(CheckpointError, match=r"guard\.seen"):
        save(tmp_path / "x.pt", {"guard": {"seen": thing}})
    assert not any(tmp_path.iterdir())


# Fallback -------------------------------------------------------------------------------------------------------------

def test_newest_is_last(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path, state = Checkpoints(folder).newest()
    assert path.name == "last.pt" and state["step"] == 2 and state["model"]["weight"][0, 0] == 2


def test_an_empty_or_missing_folder_has_no_newest(tmp_path):
    assert Checkpoints(tmp_path).newest() is None and Checkpoints(tmp_path / "missing").newest() is None
    assert not any(tmp_path.iterdir())


def test_a_damaged_last_falls_back_with_a_warning_to_the_one_before(folder):
    flip(folder / "last.pt", 200)
    with pytest.warns(UserWarning, match=r"last\.pt is damaged.*falling back to the file before it"):
        path, state = Checkpoints(folder).newest()
    assert path.name == "last-1.pt" and state["step"] == 1


def test_a_missing_last_falls_back_to_last_good(folder):
    for name in ("last.pt", "last-1.pt"):
        (folder / name).unlink()
    assert Checkpoints(folder).newest()[0].name == "last_good.pt"


def test_no_whole_file_at_all_is_an_error_and_not_a_fresh_start(folder):
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    error = pytest.raises(CheckpointError, match=r"no whole checkpoint is left.*last\.pt.*last-1\.pt.*last_good\.pt")
    with error, pytest.warns(UserWarning, match="is damaged or truncated"):
        Checkpoints(folder).newest()


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "a file system without hard links"])
def test_a_folder_keeps_the_last_two_and_the_last_good(tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(errno.EPERM, "no links here")))
    checkpoints = Checkpoints(tmp_path)
    for step in range(1, 7):
        checkpoints.save(toy(step), step, good=step in (1, 3))
    checkpoints.wait()
    steps = {path.name: load(path)["step"] for path in tmp_path.iterdir()}
    assert steps == {"last.pt": 6, "last-1.pt": 5, "last_good.pt": 3}
    wrote(checkpoints, toy(7), 7, good=True)
    assert os.path.samefile(checkpoints.last, checkpoints.last_good) == links   # linked: written once


# Kills ----------------------------------------------------------------------------------------------------------------

KILLED_AT_RANDOM = """
import os, random, signal, sys, time, warnings
import torch
from checkpoint import Checkpoints, load
warnings.simplefilter("error")   # not even a fallback is needed: last.pt itself is whole after every kill
folder, dice, first = sys.argv[1], random.Random(0), 0
for kill in range(40):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        checkpoints, step = Checkpoints(folder), first
        while True:
            step += 1
            weight = torch.full((20000,), float(step))
            checkpoints.save({"weight": weight}, step, good=step % 3 == 0)
            checkpoints.save_best({"weight": weight})
            weight.fill_(-1)                       # the loop goes on while the thread writes
            if step % 4 == 0:
                checkpoints.wait()
                os.write(write, step.to_bytes(4, "big"))
    durable = int.from_bytes(os.read(read, 4), "big")
    time.sleep(dice.random() * 0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(write)
    while later := os.read(read, 4):
        durable = int.from_bytes(later, "big")
    os.close(read)
    path, state = Checkpoints(folder).newest()
    assert path.name == "last.pt" and state["step"] >= durable, (kill, path, state["step"], durable)
    assert (state["weight"] == state["step"]).all()
    for name in os.listdir(folder):
        if name.endswith(".pt"):
            weight = load(os.path.join(folder, name))["weight"]
            assert weight[0] >= 0 and (weight == weight[0]).all(), (kill, name)
    first = state["step"]
print("steps", first)
"""


def test_kill_9_in_the_middle_of_saves_always_leaves_whole_files(tmp_path):
    result = python("-c", KILLED_AT_RANDOM, tmp_path, cwd=Path(checkpoint.__file__).parent)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split()[1]) > 80
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(toy(), 1, good=True)
        checkpoints.save_best({"weight": torch.ones(2)})
    assert not list(tmp_path.glob("*.tmp"))   # what the kills left lying about is swept up


KILLED_AT_CALL = """
import os, shutil, sys, warnings
import torch
import checkpoint
from checkpoint import Checkpoints
source, target, nth = sys.argv[1], sys.argv[2], 0
warnings.simplefilter("ignore")
while True:
    nth += 1
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    child = os.fork()
    if child == 0:
        calls = 0
        def deadly(function):
            def wrapper(*arguments, **kwargs):
                global calls
                calls += 1
                if calls == nth:
                    os._exit(9)
                return function(*arguments, **kwargs)
            return wrapper
        for name in ("mkdir", "link", "replace", "fsync", "open", "rmdir"):
            setattr(os, name, deadly(getattr(os, name)))
        checkpoint.Path.write_bytes = deadly(checkpoint.Path.write_bytes)
        host, ready = checkpoint.snapshot({"step": 3})
        checkpoints = Checkpoints(target)
        checkpoint._write(checkpoints.last, host, ready, checkpoints.previous, checkpoints.last_good)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(nth, status, Checkpoints(target).newest()[1]["step"])
    if status == 0:
        break
"""


@pytest.mark.parametrize("damaged", [False, True], ids=["last is whole", "last is damaged"])
def test_a_kill_before_any_system_call_of_a_save_leaves_a_whole_file(folder, tmp_path_factory, damaged):
    (folder / "last_good.pt").unlink()
    if damaged:
        flip(folder / "last.pt", 200)   # a damaged last.pt must not push out last-1.pt before the new one is there
    result = python("-c", KILLED_AT_CALL, folder, tmp_path_factory.mktemp("x") / "copy",
                    cwd=Path(checkpoint.__file__).parent)
    assert result.returncode == 0, result.stderr
    rows = [tuple(map(int, line.split())) for line in result.stdout.splitlines()]
    assert len(rows) >= 12 and [status for _, status, _ in rows] == [9] * (len(rows) - 1) + [0]
    assert {step for _, _, step in rows} == {1 if damaged else 2, 3} and rows[-1][2] == 3


def test_bytes_reach_the_disk_before_the_name_and_the_name_before_the_return(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *arguments, name=name, real=real: calls.append(
            (name, os.path.basename(os.readlink(f"/proc/self/fd/{arguments[0]}")) if name == "fsync" else None)
        ) or real(*arguments))
    save(tmp_path / "x.pt", toy())
    assert calls == [("fsync", "x.pt"), ("replace", None), ("fsync", tmp_path.name)]


# Disks that refuse ----------------------------------------------------------------------------------------------------

def failing(code):
    def call(*_, **__):
        raise OSError(code, os.strerror(code))
    return call


@pytest.mark.parametrize(("owner", "call", "code"), [
    (os, "fsync", errno.ENOSPC), (os, "replace", errno.EIO), (Path, "write_bytes", errno.EROFS),
    (Path, "mkdir", errno.EACCES), (checkpoint, "_link", errno.EDQUOT)])
def test_a_full_or_read_only_disk_leaves_every_file_as_it_was(folder, monkeypatch, owner, call, code):
    checkpoints, before = Checkpoints(folder), contents(folder)
    monkeypatch.setattr(owner, call, failing(code))
    with pytest.raises(CheckpointError) as caught:
        wrote(checkpoints, toy(3.0), 3, good=True)
    monkeypatch.undo()
    assert "last.pt was not saved" in str(caught.value) and os.strerror(code) in str(caught.value)
    assert contents(folder) == before   # bytes and names: nothing changed, nothing left lying about
    wrote(checkpoints, toy(3.0), 3)   # space again: the next save works
    assert checkpoints.newest()[1]["step"] == 3


def test_a_write_that_the_kernel_cuts_short_leaves_every_file_as_it_was(folder):
    before, limits = contents(folder), resource.getrlimit(resource.RLIMIT_FSIZE)
    state = {"model": {"weight": torch.ones(50_000)}}
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))   # half of the file fits: as on a full disk
        with pytest.raises(CheckpointError, match=r"last\.pt was not saved \(File too large\)"):
            wrote(Checkpoints(folder), state, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(folder) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to a read-only folder")
def test_a_folder_without_write_permission_is_named(folder):
    before = contents(folder)
    folder.chmod(0o500)
    try:
        with pytest.raises(CheckpointError, match=r"last\.pt was not saved \(Permission denied\)"):
            wrote(Checkpoints(folder), toy(3.0), 3)
    finally:
        folder.chmod(0o700)
    assert contents(folder) == before


@pytest.mark.parametrize("notice", ["save", "save_best", "poll", "wait", "newest"])
def test_an_error_in_the_background_surfaces_once_at_the_next_call(folder, monkeypatch, notice):
    checkpoints = Checkpoints(folder)
    monkeypatch.setattr(os, "fsync", failing(errno.ENOSPC))
    checkpoints.save(toy(3.0), 3)
    checkpoints._pending[checkpoints.last].exception()   # finished
    monkeypatch.undo()
    calls = {"save": lambda: checkpoints.save(toy(4.0), 4), "save_best": lambda: checkpoints.save_best(toy()["model"]),
             "poll": checkpoints.poll, "wait": checkpoints.wait, "newest": checkpoints.newest}
    with pytest.raises(CheckpointError, match="No space left on device"):
        calls[notice]()
    checkpoints.poll()
    assert checkpoints.newest()[1]["step"] == 2


# The loop goes on -----------------------------------------------------------------------------------------------------

def test_the_loop_goes_on_and_changes_its_tensors_while_the_disk_is_slow(tmp_path, monkeypatch):
    disk, real = threading.Event(), torch.save
    monkeypatch.setattr(torch, "save", lambda *args: disk.wait(600) and real(*args))
    checkpoints, state = Checkpoints(tmp_path), toy(1.0)
    checkpoints.save(state, 1)                          # comes back although the disk does not move
    for _, tensor in checkpoint.named_tensors(state):
        tensor.fill_(9)
    checkpoints.save_best({"w": torch.ones(2)})         # another name: queues behind it, does not wait either
    checkpoints.poll()
    assert not any(tmp_path.iterdir())
    disk.set()
    checkpoints.wait()
    saved = load(tmp_path / "last.pt")
    assert all((tensor == 1).all() for _, tensor in checkpoint.named_tensors({**saved, "step": 1}))


def test_a_save_waits_for_the_one_before_it_of_the_same_name(tmp_path, monkeypatch):
    disk, real, in_memory = threading.Event(), torch.save, []
    monkeypatch.setattr(torch, "save", lambda *args: disk.wait(600) and real(*args))
    monkeypatch.setattr(checkpoint, "snapshot", lambda state: in_memory.append(disk.is_set()) or snapshot(state))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(toy(), 1)
    threading.Timer(0.2, disk.set).start()
    checkpoints.save(toy(), 2)
    assert in_memory == [False, True]   # the second copy was taken only once the first was written
    checkpoints.wait()
    assert [load(tmp_path / name)["step"] for name in ("last-1.pt", "last.pt")] == [1, 2]   # none was dropped


@needs_cuda
def test_a_cuda_tensor_may_change_right_after_the_snapshot():
    x = torch.randn(1 << 26, device="cuda")
    want = x.cpu()
    host, ready = snapshot({"x": x, "t": x[:6].view(2, 3).t()})
    x.zero_()
    for event in ready:
        event.synchronize()
    assert host["x"].is_pinned() and torch.equal(host["x"], want) and torch.equal(host["t"], want[:6].view(2, 3).t())


@needs_cuda
def test_a_cuda_state_is_saved_and_loads_on_the_cpu(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert wrote(checkpoints, {"w": torch.ones(3, device="cuda"), "cpu": torch.zeros(2)}, 1) == []
    assert checkpoints.newest()[1]["w"].device.type == "cpu"
    assert checkpoints.save({"w": torch.tensor([1, NAN], device="cuda"), "b": torch.tensor(INF)}, 2) == ["w", "b"]


# What may enter a file ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_non_finite_agrees_with_isfinite_wherever_it_is_planted(dtype):
    dice = random.Random(0)
    largest = min(torch.finfo(dtype).max, 1.7e19)
    for shape in ((), (1,), (7, 5), (3, 1000)):
        clean = torch.full(shape, largest, dtype=dtype)
        clean.view(-1)[0] = -largest
        assert non_finite({"w": clean, "ids": torch.arange(3), "none": torch.empty(0, dtype=dtype)}) == []
        for bad in (NAN, INF, -INF) + (() if dtype == torch.float16 else (1.9e19, -1.9e19)):
            poisoned = clean.clone()
            poisoned.view(-1)[dice.randrange(clean.numel())] = bad
            assert bad in (1.9e19, -1.9e19) or not poisoned.isfinite().all()
            assert non_finite({"weight": clean, "b": [clean, {"weight": poisoned}]}) == ["b.1.weight"]


def test_non_finite_holds_no_number_of_a_mixed_state_against_another():
    """All extremes are looked at in one tensor: none may overflow in another's dtype, none may hide."""
    dtypes = (torch.float16, torch.float64, torch.bfloat16, torch.float32)
    state = {str(dtype): torch.full((3,), min(torch.finfo(dtype).max, 1.7e19), dtype=dtype) for dtype in dtypes}
    assert non_finite(state) == []
    for dtype in dtypes:
        assert non_finite({**state, str(dtype): torch.tensor([0, INF, 0], dtype=dtype)}) == [str(dtype)]


@pytest.mark.parametrize("low", [-INF, torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min])
def test_a_mask_may_hold_minus_infinity_and_nothing_else_may(tmp_path, low):
    causal = torch.full((5, 5), low).triu(1)
    assert wrote(Checkpoints(tmp_path), {"model": {"attn.mask": causal, "attn.fill": torch.tensor(low)}}, 1) == []
    assert torch.equal(load(tmp_path / "last.pt")["model"]["attn.mask"], causal)
    for name in ("head.weight", "weight", "bn.running_mean", "bn.running_var", "head.bias", "optimizer.state.0.buf"):
        assert non_finite({name: causal}) == [name]  # zeros and -inf, but the name says what it is
    for number in (NAN, INF, 1e30, 0.5):  # a statistic of any name that overflowed has other numbers too
        spoiled = causal.clone()
        spoiled[3, 0] = number
        assert non_finite({"attn.mask": spoiled}) == ["attn.mask"]


def test_two_tensors_of_one_name_are_both_looked_at():
    weight, bias = torch.ones(2), torch.ones(3)
    state = {weight: {"exp_avg": torch.tensor([NAN])}, bias: {"exp_avg": torch.zeros(1)}}  # as optimizer.state is keyed
    assert non_finite(state) == ["exp_avg"]


def test_what_weights_only_reads_back_is_saved(tmp_path):
    state = {"size": torch.Size([2, 3]), "device": torch.device("cpu"), "dtype": torch.float16, "number": 1j,
             "bytes": b"x", "layout": torch.strided}
    waves = torch.complex(torch.ones(3), torch.zeros(3))
    save(tmp_path / "x.pt", {**state, "waves": waves, "conjugate": waves.conj()})
    back = load(tmp_path / "x.pt")
    assert {key: back[key] for key in state} == state and type(back["size"]) is torch.Size
    assert torch.equal(back["waves"], waves) and torch.equal(back["conjugate"], waves.conj())
    assert non_finite({"w": waves.conj(), "v": waves * INF}) == ["v"]


class Wrapped(torch.Tensor):
    pass


def test_a_sharded_tensor_and_other_kinds_of_tensor_are_refused_in_one_sentence_with_their_name(tmp_path):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

        sharded = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])
        for tensor, word in ((sharded, "DTensor"), (torch.ones(2).to_sparse(), "sparse"),
                             (torch.ones(2).as_subclass(Wrapped), "Wrapped")):
            with pytest.raises(CheckpointError, match=rf"not saved: model\.w is .*{word}") as caught:
                Checkpoints(tmp_path).save({"model": {"w": tensor}}, 1)
            assert "\n" not in str(caught.value) and "full_tensor()" in str(caught.value)
    finally:
        torch.distributed.destroy_process_group()
    assert not any(tmp_path.iterdir())


def test_non_finite_sees_a_nan_in_fp8():
    assert non_finite([torch.tensor([1.0, NAN]).to(torch.float8_e4m3fn), torch.ones(2).to(torch.float8_e5m2)]) == ["0"]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("place", ["model.weight", "model.half", "optimizer.state.0.exp_avg"])
def test_a_state_with_one_bad_number_is_refused_and_the_files_stay_byte_for_byte(folder, place, bad):
    before, state = contents(folder), toy(3.0)
    dict(checkpoint.named_tensors(state))[place].view(-1)[-1] = bad
    checkpoints = Checkpoints(folder)
    with pytest.warns(UserWarning, match=rf"last\.pt is left alone: not finite in {place} \(1 in all\)"):
        assert checkpoints.save(state, 3, good=True) == [place]
    checkpoints.wait()
    assert contents(folder) == before
    assert dict(checkpoint.named_tensors(state))[place].view(-1)[-1].isfinite() == False   # noqa: E712  reported, not repaired


def test_bad_best_weights_are_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save_best({"w": torch.ones(2)})
    checkpoints.wait()
    before = contents(tmp_path)
    with pytest.warns(UserWarning, match=r"best\.pt is left alone"):
        assert checkpoints.save_best({"w": torch.tensor([1.0, INF]), "b": torch.ones(1)}) == ["w"]
    assert contents(tmp_path) == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("state", [lambda t: {"optimizer": {"state": {0: {"mine": t}}}},
                                   lambda t: {"optimizer": {"masters": [t]}},
                                   lambda t: {"adam": {"exp_avg_sq": t}}])
def test_optimizer_state_in_half_precision_is_refused_by_name(folder, dtype, state):
    before = contents(folder)
    with pytest.raises(CheckpointError, match=r"(optimizer\.|exp_avg_sq).* is torch\.b?float16, it must be fp32"):
        Checkpoints(folder).save(state(torch.ones(2, dtype=dtype)), 3)
    assert contents(folder) == before


def test_the_moments_that_fp16_would_lose():
    v = torch.tensor([2.0 ** -25, 2.0 ** -25 * 1.01])
    assert v.half().tolist() == [0.0, 2.0 ** -24]   # the docstring's number: half of the smallest subnormal rounds to 0


# Resume ---------------------------------------------------------------------------------------------------------------

def test_generators_come_back_bit_for_bit(tmp_path):
    random.seed(3)
    torch.manual_seed(3)
    random.gauss(0, 1)   # leaves a cached second value, which belongs to the state
    save(tmp_path / "rng.pt", checkpoint.rng_state())

    def draw():
        return [random.random(), random.gauss(0, 1), torch.rand(5).tolist(), torch.randperm(9).tolist()]

    want = draw()
    draw()
    checkpoint.set_rng_state(load(tmp_path / "rng.pt"))
    assert draw() == want


@needs_cuda
def test_the_cuda_generator_comes_back_bit_for_bit(tmp_path):
    save(tmp_path / "rng.pt", checkpoint.rng_state("cuda"))
    want = torch.rand(5, device="cuda")
    checkpoint.set_rng_state(load(tmp_path / "rng.pt"), "cuda")
    assert torch.equal(torch.rand(5, device="cuda"), want)


def test_changes_are_described_and_another_model_is_refused_by_name():
    saved = {"model": "vit", "dataset": "cifar10", "num_classes": 10, "precision": "fp16", "world_size": 2}
    assert describe_changes(saved, dict(saved)) == []
    assert describe_changes(saved, {**saved, "world_size": 1, "precision": "bf16"}) == ["precision: fp16 -> bf16",
                                                                                        "world_size: 2 -> 1"]
    with pytest.raises(CheckpointError, match="another run \\(model: vit -> swin; num_classes: 10 -> 100\\)"):
        describe_changes(saved, {**saved, "model": "swin", "num_classes": 100, "world_size": 1})


def test_best_loads_into_the_bare_model_with_torch_alone(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).half()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save_best(net.state_dict())
    code = ("import torch; net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2));"
            "state = torch.load('best.pt', weights_only=True); net.load_state_dict(state);"
            "assert {v.dtype for v in state.values()} == {torch.float32, torch.int64};"
            "print(net.eval()(torch.ones(1, 3)).tolist())")
    result = python("-I", "-c", code, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(net.float().eval()(torch.ones(1, 3)).tolist())


def test_the_file_runs_alone_and_resumes_bit_for_bit(tmp_path):
    shutil.copy(checkpoint.__file__, tmp_path)
    result = python("-I", "checkpoint.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "bit-identical to the walk that never stopped: True" in result.stdout
    assert "falling back to" in result.stdout and "resumed at step 40 from last-1.pt" in result.stdout


# Signals --------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], ids=lambda n: n.name)
def test_a_signal_sets_the_number_and_the_old_handler_returns(number):
    received = []
    before = signal.signal(number, lambda n, _: received.append(n))
    try:
        with StopSignals() as stop:
            assert stop.number == 0
            os.kill(os.getpid(), number)
            assert stop.number == number and type(stop.number) is int and received == []
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.number == number   # the first one names the exit code
        os.kill(os.getpid(), number)
        assert received == [number]
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_a_second_sigint_leaves_at_once(first):
    child = os.fork()
    if child == 0:
        with StopSignals():
            os.kill(os.getpid(), first)
            os.kill(os.getpid(), signal.SIGINT)
            if first == signal.SIGINT:
                os._exit(1)   # the second one did not leave
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130
