"""checkpoint.py: a fault is planted (a cut, a bit, a kill, a full disk), a whole file remains."""

import errno
import os
import random
import signal
import threading
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path

import pytest
import torch
from helpers import needs_cuda, run_script, same, script

import checkpoint
from checkpoint import CheckpointError, Checkpoints, StopSignals, load, non_finite, snapshot

NAN, INF = float("nan"), float("inf")


def fork(folder, text, *arguments):
    """(Exit code, what it prints) of a script whose children are killed."""
    code, out, err = run_script([script(folder, text), *arguments], folder)
    assert code <= 0, err
    return code, out


def save(path, state):
    checkpoint.write(path, checkpoint.packed(*snapshot(state)))


def wrote(checkpoints, state, step, good=False):
    """A save that is on the disk when this returns."""
    bad = checkpoints.save(state, step, good=good)
    checkpoints.wait()
    return bad


def toy(value=1.0):
    weight = torch.full((4, 3), value)
    moments = {"exp_avg": weight.clone(), "step": torch.tensor(value)}
    return {
        "model": {"weight": weight, "half": weight[0].half()},
        "optimizer": {"state": {0: moments}},
    }


@pytest.fixture
def folder(tmp_path):
    """step 1 in last-1.pt and last_good.pt, step 2 in last.pt."""
    checkpoints = Checkpoints(tmp_path)
    wrote(checkpoints, toy(1.0), 1, good=True)
    wrote(checkpoints, toy(2.0), 2)
    return tmp_path


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def flip(path, position=200, bit=0):
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1 << bit
    path.write_bytes(raw)


# --- Whole files


def test_a_state_comes_back_with_its_types_dtypes_and_strides(tmp_path):
    waves = torch.complex(torch.ones(3), torch.zeros(3)).conj()
    state = {
        "list": [1, 2.5, True, None, "x", (1, (2,)), 1j, b"x"],
        "inf": INF,
        "size": torch.Size([2, 3]),
        "device": torch.device("cpu"),
        "dtype": torch.float16,
        "t": torch.randn(3, 4).t(),
        "empty": torch.empty(0, 3),
        7: torch.tensor(3),
        "bf16": torch.ones(5, dtype=torch.bfloat16),
        "view": torch.arange(1000.0)[:2],
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    save(tmp_path / "x.pt", state | {"waves": waves})
    back = load(tmp_path / "x.pt")
    assert torch.equal(back.pop("waves"), waves) and same(back, state)
    assert back["t"].stride() == state["t"].stride()
    assert back["view"].untyped_storage().nbytes() == 8  # a view does not drag its buffer along
    assert type(back["parameter"]) is torch.Tensor


def test_a_file_cut_anywhere_is_refused(tmp_path):
    save(tmp_path / "x.pt", toy())
    whole = (tmp_path / "x.pt").read_bytes()
    cut = tmp_path / "cut.pt"
    for length in [*range(0, len(whole), 29), *range(len(whole) - 30, len(whole))]:
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.pt"):
            load(cut)


def test_a_flipped_bit_anywhere_is_refused_or_does_not_matter(tmp_path):
    """Of all 8 x 2397 flips in this file none is read wrongly; here a part of them is tried."""
    path, dice, refused = tmp_path / "x.pt", random.Random(0), 0
    save(path, toy())
    whole = path.read_bytes()
    flips = [(position, dice.randrange(8)) for position in range(0, len(whole), 9)]
    # the bit of a folder: torch.load skips the record, without a word
    flips += [(whole.rindex(b"archive/data/%d" % record) - 8, 4) for record in range(4)]
    for position, bit in flips:
        flip(path, position, bit)
        try:
            assert same(load(path), toy()), (position, bit)
        except CheckpointError as error:
            assert "x.pt" in str(error)
            refused += 1
        path.write_bytes(whole)
    assert refused > 0.3 * len(flips)


def circle():
    state = {}
    state["again"] = state
    return state


def bomb(path):
    """A small file that unpacks to a large one."""
    save(path, toy() | {"step": 1})
    with zipfile.ZipFile(path) as whole:
        records = {name: whole.read(name) for name in whole.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in records.items():
            packed.writestr(name, content)
        for record in packed.infolist():
            record.external_attr = 0  # as torch writes it


def of_model(make):
    return lambda path: torch.save({"step": 1, "model": make()}, path)


FOREIGN = {
    "empty": Path.touch,
    "absent": str,
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "bomb": bomb,
    "a pickle": lambda path: path.write_bytes(b"\x80\x02}q\0."),
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "circle": of_model(circle),
    "expanded": of_model(lambda: torch.zeros(1).expand(100, 100)),
    "sparse": of_model(lambda: torch.ones(2).to_sparse()),
    "on meta": of_model(lambda: torch.zeros(2, device="meta")),
}


@pytest.mark.parametrize("make", FOREIGN.values(), ids=FOREIGN)
def test_what_save_would_not_write_is_refused_at_once_in_one_sentence(tmp_path, make):
    path = tmp_path / "foreign.pt"
    make(path)
    with pytest.raises(CheckpointError, match=r"foreign\.pt") as caught:
        checkpoint.load_run(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250


def test_a_file_that_is_not_what_was_saved_is_seen(folder):
    checkpoints = Checkpoints(folder)
    wrote(checkpoints, toy(3.0), 3)
    checkpoints.compare()
    save(folder / "last.pt", {**toy(4.0), "step": 3})
    with pytest.raises(CheckpointError, match=r"last\.pt is not what this run saved"):
        checkpoints.compare()


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
    torch.load(path, weights_only=False)  # the trap is live: an unguarded load springs it
    assert planted.exists()


@pytest.mark.parametrize(
    "state, why",
    [
        ([1], "holds a list"),
        ({"model": 1}, "step None"),
        ({"step": -5}, "step -5"),
        ({"step": 2.0}, "step 2.0"),
        ({"step": 2, "exp_avg": torch.tensor([NAN])}, "non-finite in exp_avg"),
    ],
)
def test_a_file_that_no_run_can_go_on_from_is_refused(tmp_path, state, why):
    save(tmp_path / "last.pt", state)
    with pytest.raises(CheckpointError, match=f"last.pt .*{why}"):
        checkpoint.load_run(tmp_path / "last.pt")
    with pytest.warns(UserWarning, match=why), pytest.raises(CheckpointError, match="no whole"):
        Checkpoints(tmp_path).newest()


# --- Which file


def test_the_newest_whole_file_is_found_and_no_fresh_start_is_made_of_damaged_ones(folder):
    assert Checkpoints(folder / "missing").newest() is None
    path, state = Checkpoints(folder).newest()
    assert path.name == "last.pt" and state["step"] == 2
    flip(folder / "last.pt")
    with pytest.warns(UserWarning, match=r"last\.pt is damaged.*falling back to the file before"):
        path, state = Checkpoints(folder).newest()
    assert path.name == "last-1.pt" and state["step"] == 1
    for name in ("last.pt", "last-1.pt"):
        (folder / name).unlink()
    assert Checkpoints(folder).newest()[0].name == "last_good.pt"
    flip(folder / "last_good.pt")
    with pytest.warns(UserWarning), pytest.raises(CheckpointError, match="no whole checkpoint is"):
        Checkpoints(folder).newest()


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "no hard links"])
def test_a_folder_keeps_the_last_two_and_the_last_good(tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr(os, "link", failing(errno.EPERM))
    checkpoints = Checkpoints(tmp_path)
    for step in range(1, 7):
        checkpoints.save(toy(step), step, good=step in (1, 3))
    checkpoints.wait()
    steps = {path.name: load(path)["step"] for path in tmp_path.iterdir()}
    assert steps == {"last.pt": 6, "last-1.pt": 5, "last_good.pt": 3}


HOLD = """
import os, sys
from checkpoint import CheckpointError, Checkpoints
first = Checkpoints(sys.argv[1])
first.lock()
if os.fork() == 0:  # a child does not inherit the lock, it is another process
    try:
        Checkpoints(sys.argv[1]).lock()
    except CheckpointError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
os.kill(os.getpid(), 9) if sys.argv[2] == "die" else None
"""


def test_a_folder_is_locked_while_its_run_lives_and_not_after_its_death(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    assert fork(tmp_path, HOLD, run, "die") == (-9, f"{run} is in use: another run writes to it\n")
    Checkpoints(run).lock()


# --- Kills

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
        content = checkpoint.packed(*checkpoint.snapshot({"step": 3}))
        checkpoints = Checkpoints(target)
        paths = checkpoints.previous, checkpoints.last_good
        checkpoint.write(checkpoints.last, content, *paths)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(nth, status, Checkpoints(target).newest()[1]["step"])
    if status == 0:
        break
"""


@pytest.mark.parametrize("damaged", [False, True], ids=["last is whole", "last is damaged"])
def test_a_kill_before_any_system_call_of_a_save_leaves_a_whole_file(folder, tmp_path, damaged):
    (folder / "last_good.pt").unlink()
    if damaged:  # it must not push out last-1.pt before the new one is there
        flip(folder / "last.pt")
    _, printed = fork(tmp_path.parent, KILLED_AT_CALL, folder, tmp_path.with_name("copy"))
    rows = [tuple(map(int, line.split())) for line in printed.splitlines()]
    statuses = [status for _, status, _ in rows]
    assert len(rows) >= 12 and statuses == [9] * (len(rows) - 1) + [0]
    assert {step for _, _, step in rows} == {1 if damaged else 2, 3} and rows[-1][2] == 3


def test_bytes_reach_the_disk_before_the_name_and_the_name_before_the_return(tmp_path, monkeypatch):
    calls, fsync, replace = [], os.fsync, os.replace

    def watched_fsync(number):
        calls.append(os.path.basename(os.readlink(f"/proc/self/fd/{number}")))
        fsync(number)

    def watched_replace(*paths):
        calls.append("rename")
        replace(*paths)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    save(tmp_path / "x.pt", toy())
    assert calls == ["x.pt", "rename", tmp_path.name]


# --- Disks that refuse


def failing(code):
    def call(*_, **__):
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.parametrize(
    "owner, call",
    [(os, "fsync"), (os, "replace"), (Path, "write_bytes"), (Path, "mkdir"), (checkpoint, "_link")],
)
def test_a_disk_that_refuses_leaves_every_file_as_it_was(folder, monkeypatch, owner, call):
    checkpoints, before = Checkpoints(folder), contents(folder)
    monkeypatch.setattr(owner, call, failing(errno.ENOSPC))
    with pytest.raises(CheckpointError, match=r"last\.pt was not saved \(No space left"):
        wrote(checkpoints, toy(3.0), 3, good=True)
    monkeypatch.undo()
    assert contents(folder) == before  # bytes and names: nothing is left lying about
    wrote(checkpoints, toy(3.0), 3)  # space again
    assert checkpoints.newest()[1]["step"] == 3


@pytest.mark.parametrize("call", ["save", "poll", "wait", "newest"])
def test_an_error_in_the_background_surfaces_once_at_the_next_call(folder, monkeypatch, call):
    checkpoints = Checkpoints(folder)
    monkeypatch.setattr(os, "fsync", failing(errno.ENOSPC))
    checkpoints.save(toy(3.0), 3)
    checkpoints._pending[checkpoints.last].exception()  # finished
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="No space left on device"):
        getattr(checkpoints, call)(*[toy(4.0), 4] if call == "save" else [])
    checkpoints.poll()
    assert checkpoints.newest()[1]["step"] == 2


# --- The loop goes on


def test_the_loop_goes_on_and_changes_its_tensors_while_the_disk_is_slow(tmp_path, monkeypatch):
    disk, real = threading.Event(), torch.save
    monkeypatch.setattr(torch, "save", lambda *args: disk.wait(600) and real(*args))
    checkpoints, state = Checkpoints(tmp_path), toy(1.0)
    checkpoints.save(state, 1)  # comes back although the disk does not move
    for _, tensor in checkpoint.named_tensors(state):
        tensor.fill_(9)
    checkpoints.save_best({"w": torch.ones(2)})  # another name: queues, does not wait either
    checkpoints.poll()
    assert not any(tmp_path.iterdir())
    threading.Timer(0.2, disk.set).start()
    checkpoints.save(toy(2.0), 2)  # the same name: waits for the one before it
    assert disk.is_set()
    checkpoints.wait()
    assert load(tmp_path / "last.pt")["step"] == 2
    assert same(load(tmp_path / "last-1.pt"), {**toy(1.0), "step": 1})


@needs_cuda
def test_a_cuda_state_may_change_right_after_the_snapshot_and_loads_on_the_cpu(tmp_path):
    x, checkpoints = torch.randn(1 << 26, device="cuda"), Checkpoints(tmp_path)
    want = x.cpu()
    assert checkpoints.save({"x": x, "t": x[:6].view(2, 3).t(), "cpu": torch.zeros(2)}, 1) == []
    x.zero_()
    state = checkpoints.newest()[1]
    assert torch.equal(state["x"], want) and torch.equal(state["t"], want[:6].view(2, 3).t())
    bad = {"w": torch.tensor([1, NAN], device="cuda"), "b": torch.tensor(INF)}
    with pytest.warns(UserWarning):
        assert checkpoints.save(bad, 2) == ["w", "b"]


# --- What may enter a file


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.float8_e5m2,
    ],
)
def test_non_finite_agrees_with_isfinite_wherever_it_is_planted(dtype):
    """Beside tensors of other dtypes: none may overflow in another's dtype, none may hide."""
    largest = min(torch.finfo(dtype).max, 1.7e19)
    others = [torch.full((3,), 6e4, dtype=torch.float16), torch.full((3,), 1e18).double()]
    clean = torch.full((35,), largest).to(dtype)
    assert non_finite([*others, clean, torch.arange(3), clean[:0]]) == []
    for bad in (NAN, INF, -INF):
        poisoned = clean.clone()
        poisoned[17] = bad
        state = {"weight": clean, "b": [*others, {"weight": poisoned}]}
        assert non_finite(state) == ["b.2.weight"]
    assert non_finite([torch.tensor(1.9e19)]) == ["0"]  # its square is inf


@pytest.mark.parametrize("low", [-INF, torch.finfo(torch.bfloat16).min])
def test_a_mask_may_hold_minus_infinity_and_nothing_else_may(low):
    causal = torch.full((5, 5), low).triu(1)
    assert non_finite({"attn.mask": causal, "attn.fill": torch.tensor(low)}) == []
    for name in ("head.weight", "bn.running_var", "head.bias", "optimizers.0.state.0.buf"):
        assert non_finite({name: causal}) == [name]  # the name says what it is
    for number in (NAN, INF, 0.5):  # a statistic that overflowed has other numbers too
        causal[3, 0] = number
        assert non_finite({"attn.mask": causal}) == ["attn.mask"]


def sharded():
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    return distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])


@pytest.mark.parametrize(
    "name, make, why",
    [
        ("model", sharded, r"DTensor.*torch\.distributed\.checkpoint"),
        ("model", lambda: torch.ones(2).to_sparse(), "sparse"),
        ("model", lambda: torch.ones(2, device="meta"), "on meta"),
        ("guard", lambda: bytearray(b"x"), "bytearray.* no tensor, dict"),
        ("guard", lambda: signal.SIGTERM, "Signals"),
        ("guard", lambda: {1, 2}, "set"),
        ("optimizers", lambda: torch.ones(2).half(), "float16, it must be fp32"),
        ("exp_avg_sq", lambda: torch.ones(2).bfloat16(), "it must be fp32"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_name_in_one_sentence(folder, one_rank, name, make, why):
    before = contents(folder)
    why = rf"not saved: .*{name}\.0\.w is .*{why}"
    with pytest.raises(CheckpointError, match=why) as caught:
        Checkpoints(folder).save({name: [{"w": make()}]}, 3)
    assert "\n" not in str(caught.value) and contents(folder) == before


def test_a_half_layer_in_a_list_named_state_is_saved_and_half_moments_are_not(folder):
    half = torch.ones(2).half()
    weights = {"state.0.weight": half, "state.1.norm.running_mean": half}
    for state in ({"model": weights}, {"state": {"0.bias": half}}):
        Checkpoints(folder).save(state, 3)
    for name in ("sum", "square_avg", "exp_avg"):
        with pytest.raises(CheckpointError, match=rf"state\.0\.{name} is torch.float16"):
            Checkpoints(folder).save({"adam": {"state": {0: {name: half}}}}, 3)


def test_a_dtype_that_torch_cannot_copy_is_named(folder):
    number = torch.zeros(4, dtype=torch.uint8).view(torch.int4)
    with pytest.raises(CheckpointError, match=r"cannot copy q\.w, torch\.int4"):
        Checkpoints(folder).save({"q": {"w": number}}, 3)


def test_float4_is_saved_where_torch_can_copy_it_and_else_named(folder):
    number = torch.arange(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    try:
        number.clone()
    except NotImplementedError:  # torch 2.9
        with pytest.raises(CheckpointError, match=r"cannot copy q\.w, torch\.float4"):
            Checkpoints(folder).save({"q": {"w": number}}, 3)
        return
    with Checkpoints(folder) as checkpoints:
        checkpoints.save({"q": {"w": number}}, 3)
        loaded = checkpoints.newest()[1]["q"]["w"]
    assert loaded.dtype == number.dtype and loaded.view(torch.uint8).tolist() == [0, 1, 2, 3]


def test_tied_tensors_are_written_once_and_come_back_tied_and_mappings_keep_their_type(tmp_path):
    big, z = torch.randn(300, 200), torch.randn(4, dtype=torch.complex64)
    state = {
        "embed": big,
        "head": big.detach(),
        "turned": big.t(),
        "row": big[2],
        "e": big[:0],
        "gaps": big[:, ::2],
        "z": z,
        "conj": z.conj(),
        "imag": z.conj().imag,
        "o": OrderedDict(b=1, a=big),
        "c": Counter("aab"),
    }
    save(tmp_path / "x.pt", state)
    assert os.path.getsize(tmp_path / "x.pt") < 1.6 * big.nbytes  # once, and the gaps' half
    back = load(tmp_path / "x.pt")
    assert torch.equal(back.pop("conj"), state.pop("conj"))
    assert same({**back, "o": dict(back["o"])}, {**state, "o": dict(state["o"])})
    tied = {back[name].data_ptr() for name in ("embed", "head", "turned")}
    assert tied == {back["o"]["a"].data_ptr()} and back["row"].data_ptr() not in tied
    assert type(back["o"]) is OrderedDict and type(back["c"]) is Counter
    back["head"][0, 0] = 7.0
    assert back["embed"][0, 0] == back["turned"][0, 0] == 7.0


@pytest.mark.parametrize("place", ["model.weight", "model.half", "optimizer.state.0.exp_avg"])
def test_a_state_with_one_bad_number_is_refused_and_the_files_stay_byte_for_byte(folder, place):
    state, checkpoints = toy(3.0), Checkpoints(folder)
    checkpoints.save_best({"w": torch.ones(2)})
    checkpoints.wait()
    before = contents(folder)
    dict(checkpoint.named_tensors(state))[place].view(-1)[-1] = NAN
    why = rf"last\.pt is kept: the new state is non-finite in {place} \(1 in all\)"
    with pytest.warns(UserWarning, match=why):
        assert checkpoints.save(state, 3, good=True) == [place]
    with pytest.warns(UserWarning, match=r"best\.pt is kept"):
        assert checkpoints.save_best({"w": torch.tensor([1.0, INF])}) == ["w"]
    checkpoints.wait()
    assert contents(folder) == before


# --- Signals


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2, signal.SIGXCPU, signal.SIGPWR],
)
def test_a_signal_sets_the_number_and_the_old_handler_returns(number):
    received = []
    before = signal.signal(number, lambda n, _: received.append(n))
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.number == number and received == []  # the first one names the exit code
        os.kill(os.getpid(), number)
        assert received == [number]
    finally:
        signal.signal(number, before)


def test_a_second_sigint_leaves_at_once():
    child = os.fork()
    if child == 0:
        with StopSignals():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(1)  # it did not leave
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130
