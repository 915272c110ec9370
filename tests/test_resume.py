"""
Kill the training where it stands, start it again: what comes out is the run that was never killed.

The kills are real: `python train.py` in processes of its own and SIGKILL from outside, at chosen
lines of metrics.jsonl and at random moments. Compared is all of last.pt (weights, moments, average,
loss scale, counters, generators), best.pt and every line of metrics.jsonl. bench/kill_resume.py
does the same a hundred times.
"""

import copy
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import needs_rescue, policy_for, refused, run_ranks, same, script
from torch import nn

import checkpoint
import guards
import optim
import report
import train
from bench.kill_resume import ROOT, Job, children, differences, draw_images, result
from data import batches
from models.classifier import Classifier
from trainer import prepare, record, resume, schema

EPOCH = 6  # steps: 120 images in batches of 20
PACE = ("--batch-size", 20, "--max-steps", 20, "--ckpt-every", 4)
FLAGS = ("--precision", "fp16", "--accum-steps", 2, "--ema", 0.9, *PACE)


@pytest.fixture(scope="session")
def few_images(tmp_path_factory):
    return draw_images(tmp_path_factory.mktemp("few") / "images")


@pytest.fixture
def few(few_images):
    """Options: the few images, in batches of 20."""
    return "--data-dir", few_images, "--batch-size", 20


def test_a_planted_difference_is_seen():
    a = {"last": {"w": torch.tensor([1.0, 0.0]), "n": [1, {"x": 2.0}]}}
    b = {"last": {"w": torch.tensor([1.0, 1e-45]), "n": [1, {"x": 2.5}]}}
    assert differences(a, a) == [] and differences(a, b) == ["last.w", "last.n.1.x"]
    assert differences([1, 2], [1]) and differences({"a": 1}, {"b": 1})


# --- Killed


def test_a_run_killed_again_and_again_ends_bit_for_bit_like_the_one_never_killed(
    few_images, tmp_path
):
    """Killed three times; before the second start half of last.pt is cut off."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert Job(few_images, whole, *FLAGS).end() == [0]
    jobs = []
    for line, more in (('"step": 9,', 0), ('"epoch": 2.0', 0), ("", random.Random(0).random() / 2)):
        if len(jobs) == 1:
            os.truncate(killed / "last.pt", (killed / "last.pt").stat().st_size // 2)
        jobs.append(job := Job(few_images, killed, *FLAGS))
        job.until(line)  # that step is over
        time.sleep(more)
        assert job.kill() == [-9] or more, job.err()
    jobs.append(Job(few_images, killed, *FLAGS))
    assert jobs[-1].end() == [0], jobs[-1].err()
    assert ["resumed from" in job.out() for job in jobs] == [False, True, True, True]
    assert "last.pt is damaged, truncated" in jobs[1].err()
    assert "last-1.pt after step" in jobs[1].out()
    assert differences(result(whole), result(killed)) == []
    epochs = [line["epoch"] for line in result(whole)["lines"] if "epoch" in line]
    assert epochs == [1, 2, 3, 20 / EPOCH]
    assert not list(killed.glob("*.tmp"))


def test_best_loads_into_the_bare_model_with_torch_alone(run, few, tmp_path):
    run("--precision", "O2", *few, "--max-steps", EPOCH)
    shutil.copy(ROOT / "models" / "cifarnet.py", tmp_path)
    script = """
import sys
import torch
from cifarnet import PRESETS, CifarNet
for path in sys.argv[1:]:
    net = CifarNet(num_classes=10, **PRESETS["cifarnet-tiny"])
    state = torch.load(path, weights_only=True)
    net.load_state_dict(state)
    floats = [t.dtype for t in state.values() if t.is_floating_point()]
    assert len(floats) > 20 and set(floats) == {torch.float32}, floats
    assert net.eval()(torch.ones(2, 3, 32, 32)).isfinite().all()
assert not {"train", "checkpoint", "models", "torchvision"} & sys.modules.keys()
"""
    command = [sys.executable, "-c", script, run.folder / "best.pt"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        timeout=600,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds torchrun's workers there")
def test_two_ranks_outlive_the_death_of_one_and_of_all(few_images, run):
    folder = run.folder
    folder.mkdir()
    whole = Job(few_images, folder / "whole", *FLAGS, ranks=2)
    assert whole.end() == [0, 0], whole.err()
    job = Job(few_images, folder / "killed", *FLAGS, torchrun=2)
    job.until('"step": 9,')
    os.kill(children(job.processes[0].pid)[1], signal.SIGKILL)
    job.until('"step": 13,', starts=2)  # torchrun has started both again, and they went on
    assert job.kill() == [-9]
    first = int(re.search(r"last\.pt after step (\d+)", job.out())[1])
    assert first in (8, 12)  # the kill may strike later than step 9
    shutil.copytree(folder / "killed", folder / "other")
    job = Job(few_images, folder / "killed", *FLAGS, ranks=2)
    assert job.end() == [0, 0], job.err()
    assert int(re.search(r"last\.pt after step (\d+)", job.out())[1]) in (12, 16)
    assert differences(result(folder / "whole"), result(folder / "killed")) == []

    # The same checkpoint, on one rank and in another precision: it says so and goes on.
    code, last, _, lines = run(
        "--precision",
        "bf16",
        "--ema",
        0.9,
        "--data-dir",
        few_images,
        *PACE,
        "--resume",
        "auto",
        out="run/other",
    )
    assert (code, last["precision"], last["steps"], last["updates"]) == (0, "bf16", 20, 20)
    assert [line["step"] for line in lines[1:] if "lr" in line] == list(range(1, 21))


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_run_that_gives_up_half_weights_has_none_left_that_is_frozen_or_a_buffer(level):
    policy = policy_for(level)
    net = policy.prepare(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    net[0].requires_grad_(False)
    guard = guards.Guard(net)
    adamw = optim.ClippedAdamW(net[1].parameters(), eps=1e-4, clip=None, masters=policy.masters)
    run = record.Run(policy=policy, net=net, model=net, optimizers=[adamw], guard=guard)

    resume.adopt(run, "fp32")

    kinds = {t.dtype for t in net.state_dict().values() if t.is_floating_point()}
    assert kinds == {torch.float32}
    guard.open(1)
    mean = net[1].running_mean.clone()
    loss = net(torch.full((8, 4), 9.0)).sum() * torch.nan
    loss.backward()
    guard.see_loss(loss)
    guard.step([adamw])
    assert same(mean, net[1].running_mean), "the guard restores the buffers of now"


# --- Stopped


@needs_rescue
@pytest.mark.parametrize(
    "fault, step",
    [
        ("nan:param@step=7", 6),  # before a turn back
        ("nan:loss@step=6", 6),  # in a rejected step
        ("", EPOCH - 1),
        ("", 11),  # at the end of an epoch, and of the run
    ],
)
def test_a_run_that_was_stopped_by_a_signal_ends_like_the_one_that_was_not(
    run, few, monkeypatch, fault, step
):
    flags = (*few, "--precision", "bf16", "--ckpt-every", 4, "--inject", fault)
    whole = run(*flags, out="whole")[1]
    healthy = batches.TrainBatches.at

    def interrupted(self, number):
        if number == step - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return healthy(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(batches.TrainBatches, "at", interrupted)
        code, last, _, _ = run(*flags)
    ends = step == 11  # the signal came in the last step but one: nothing was left to be stopped
    assert code == (0 if ends else 143), last
    assert last["status"] == ("done" if ends else "stopped by signal 15")
    assert step <= last["steps"] == checkpoint.load(run.folder / "last.pt")["step"] <= step + 1
    for _ in range(2):  # the finished run changes nothing, and reports
        code, last, _, _ = run(*flags, "--resume", "auto")
        assert code == 0
        assert [last[key] == whole[key] for key in ("healed", "val_loss")] == [True, True]
        assert differences(result(run.folder.with_name("whole")), result(run.folder)) == []


def test_a_signal_to_one_rank_of_two_stops_both_at_the_same_step(few_images, tmp_path):
    endless = ("--max-steps", 100_000, "--precision", "bf16", "--batch-size", 20)
    job = Job(few_images, tmp_path / "job", *endless, ranks=2)
    job.until('"step": 3,')
    job.processes[1].send_signal(signal.SIGUSR1)
    assert job.end() == [128 + signal.SIGUSR1] * 2, job.err()
    steps = int(re.search(r'"steps": (\d+)', job.out())[1])
    assert checkpoint.load(job.folder / "last.pt")["step"] == steps >= 4


def test_a_signal_during_set_up_ends_the_run_with_its_number_and_writes_nothing(run, monkeypatch):
    monkeypatch.setattr(prepare, "network", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    code, last, error, lines = run()
    assert code == 143 and last["status"] == "stopped by signal 15" and lines == []
    assert error.strip() == "train.py: stopped by signal 15 during set-up, nothing is saved"


def test_a_signal_while_the_run_is_finished_does_not_cost_its_last_line(run, monkeypatch):
    monkeypatch.setattr(report, "draw_curves", lambda path: os.kill(os.getpid(), signal.SIGTERM))
    assert run("--max-steps", 1)[1]["status"] == "done"


# --- What is refused: one sentence, exit code 2, nothing is written


@pytest.fixture
def change_data(monkeypatch):
    """change_data(f): all data goes through f(images, labels); the cache keeps its own."""
    load = prepare.load

    def through(change):
        def changed(*args, **more):
            data = load(*args, **more)
            splits = [change(x.clone(), y.clone()) for x, y in (data.train, data.val)]
            return replace(data, train=splits[0], val=splits[1])

        monkeypatch.setattr(prepare, "load", changed)

    return through


@pytest.mark.parametrize("model, side, batch", [("cifarnet-tiny", 8, 40), ("resnet18", 8, 1)])
def test_images_and_batches_too_small_for_the_model_are_refused(
    run, change_data, model, side, batch
):
    """A convolution without a pixel, and a BatchNorm that sees one value."""
    change_data(lambda images, labels: (images[:, :, :side, :side], labels))
    refused(run("--model", model, "--batch-size", batch), "is too small for")
    assert not run.folder.exists()


def test_ranks_that_differ_say_why_and_all_leave(few_images, tmp_path):
    other_seed = script(
        tmp_path,
        """
import os, train
train.main([*sys.argv[1:], "--seed", os.environ["RANK"]])
""",
    )
    first, second = run_ranks(
        [
            other_seed,
            "--model",
            "cifarnet-tiny",
            "--data-dir",
            few_images,
            "--out-dir",
            tmp_path / "run",
        ],
        few_images.parent,
    )
    assert first[0] == second[0] == 2 and first[2] == ""
    assert "rank 1 differs from rank 0: seed 0 there, 1 here" in second[2]
    assert not (tmp_path / "run").exists()


@pytest.fixture
def finished(run, few):
    pace = (*few, "--max-steps", EPOCH)
    assert run(*pace)[0] == 0
    return pace


def retouched(images, labels):
    images[7, 0, 3, 3] ^= 1
    return images, labels


@pytest.mark.parametrize(
    "change, words",
    [
        (retouched, "pixels: "),
        (lambda images, labels: (images, labels.where(labels > 1, 1 - labels)), "labels: "),
        (lambda images, labels: (images[:100], labels[:100]), "images: 120 -> 100"),
    ],
)
def test_other_data_is_refused_by_name(run, finished, change_data, change, words):
    change_data(change)
    refused(run(*finished, "--resume", "auto"), words)


def test_a_run_that_goes_on_beyond_its_new_end_is_validated_and_concluded(run, monkeypatch):
    whole = train.log_verdict

    def log_verdict(run, verdict):
        if run.step == 5:
            raise RuntimeError("a bug before the first validation")
        return whole(run, verdict)

    monkeypatch.setattr(train, "log_verdict", log_verdict)
    assert run("--ckpt-every", "2")[0] == 1
    code, last, _, _ = run("--max-steps", "2", "--resume", "auto")
    assert (code, last["status"], last["steps"]) == (0, "done", 4), last
    assert "val_loss" in last


def test_files_that_no_run_can_go_on_from_are_refused(run, finished):
    for file in (run.folder / "best.pt", run.folder / "metrics.jsonl"):
        refused(run(*finished, "--resume", file, out="new"), file.name)
    assert not run.folder.with_name("new").exists()
    other = ("--model", "resnet18", *finished, "--resume", "auto")
    refused(run(*other), "model: cifarnet-tiny -> resnet18")
    good = checkpoint.load(run.folder / "last_good.pt")
    good["identity"]["model"] = "vit"
    os.unlink(run.folder / "last_good.pt")
    torch.save(good, run.folder / "last_good.pt")
    refused(run(*finished, "--resume", "auto"), "model: vit -> cifarnet-tiny")
    for path in run.folder.glob("*.pt"):
        path.unlink()
    refused(run(*finished, "--resume", "auto"), "a run without its checkpoints")


def places(node, *above):
    """The path to each value of nested dicts and lists."""
    for key, child in node.items() if isinstance(node, dict) else enumerate(node):
        yield *above, key
        if isinstance(child, (dict, list)):
            yield from places(child, *above, key)


def put(state, place, *value):
    """A copy in which another value is at this place; none: nothing is there."""
    state = copy.copy(state)
    key, *rest = place
    if rest:
        state[key] = put(state[key], rest, *value)
    elif value:
        state[key] = value[0]
    else:
        del state[key]
    return state


# Left to the comparison with this run, and to what takes it over: the tests below.
MISTYPED = re.compile(r"identity\..+|.*param_groups.*|ema|guard\.pending")
MISSING = re.compile(
    r"(identity|model|optimizers|scores|healing.(repeatable|signs|walked|trend.scores))\..*|.*\.\d+"
)


BOUNDS = {
    "updates": 10**9,
    "quarantine": [*range(120)],
    "accum": 10**9,
    "best": [math.nan, 1.0],
    "policy": "fp17",
    "healing.trend.mean": math.nan,
    "healing.extra_steps": 10**12,
    "schedule.factor": torch.tensor(9.0),
    "schedule.updates": torch.tensor(99),
    "identity.total_steps": 10**12,
    "identity.model": torch.ones(2),
    "rng": [{"python": (3, (1,), None), "cpu": torch.ones(3)}],
}


def refusal_of(state):
    with schema.reading("last.pt"):
        schema.refuse_unsound(state)


def test_a_field_that_is_missing_mistyped_or_out_of_bounds_is_refused(run, finished):
    state = checkpoint.load(run.folder / "last.pt")
    refusal_of(state)
    tried = 0
    for place in places(state):
        for value in ((), ("x",), ([[]],), ({"x": [1]},)):
            tried += 1
            try:
                refusal_of(put(state, place, *value))
                passes = MISTYPED if value else MISSING
                assert passes.fullmatch(".".join(map(str, place))), (place, value)
            except checkpoint.CheckpointError as error:
                assert str(error).startswith("last.pt does not fit") and "\n" not in str(error)
    assert tried > 500
    for place, value in BOUNDS.items():
        with pytest.raises(checkpoint.CheckpointError, match=r"last\.pt"):
            refusal_of(put(state, place.split("."), value))


def test_weights_and_moments_that_do_not_fit_are_refused_in_last_good_too(run, finished):
    state = checkpoint.load(run.folder / "last.pt")
    weight = next(name for name, t in state["model"].items() if t.dim() > 1)
    moments = "optimizers", 0, "state", 0
    size = state["optimizers"][0]["state"][0]["exp_avg_sq"].shape
    faults = [
        (("model", weight), state["model"][weight].long()),
        (("guard", "pending"), [1, [0.0], ["loss"]]),  # of last.pt alone: a turn back has none
        (("model", weight), state["model"][weight].cfloat()),
        ((*moments, "exp_avg"),),
        ((*moments, "exp_avg_sq"), -torch.ones(size)),
        ((*moments, "exp_avg"), torch.ones(1)),
        (("optimizers",), []),
    ]
    for name in ("last.pt", "last_good.pt"):
        whole = (run.folder / name).read_bytes()
        for place, *value in faults[:: 1 if name == "last.pt" else 3]:
            os.unlink(run.folder / name)  # the other one is a link to it
            torch.save(put(state, place, *value), run.folder / name)
            refused(run(*finished, "--resume", "auto"), f"{name} does not fit this run")
        (run.folder / name).write_bytes(whole)
    assert run(*finished, "--resume", "auto")[0] == 0


def test_a_verdict_that_was_under_way_on_two_ranks_is_read_by_one(run, finished):
    state = checkpoint.load(run.folder / "last.pt")
    state["updates"] -= 1  # of this verdict
    flags = len(guards.FLAGS) + len(prepare.rescuer().carries)
    row = [0.0] * flags + [1.5, 2.5] + [0.0, 1.5] + [1.0] * 30
    state["guard"]["pending"] = [EPOCH, row, ["loss", "grad_norm"]]
    torch.save(state, run.folder / "two.pt")
    again = ("--resume", run.folder / "two.pt", *finished, "--max-steps", EPOCH + 2)
    code, last, _, lines = run(*again, out="one")
    assert (code, last["updates"]) == (0, EPOCH + 2), last
    assert next(line["loss"] for line in lines if line.get("step") == EPOCH) == 1.5


@pytest.mark.parametrize("variables", ["RANK=5", "WORLD_SIZE=0", "LOCAL_RANK=-1", "RANK=x"])
def test_ranks_that_cannot_be_are_refused(run, monkeypatch, variables):
    monkeypatch.setenv(*variables.split("="))
    refused(run(), variables.split("=")[0])


def test_a_folder_whose_name_is_no_text_holds_a_run_like_any_other(run, few):
    name = os.fsdecode(b"run \xff\n")
    assert run(*few, "--max-steps", 2, out=name)[0] == 0
    assert run(*few, "--max-steps", 4, "--resume", "auto", out=name)[1]["steps"] == 4


@needs_rescue
def test_what_a_run_goes_back_to_and_its_best_weights_are_never_those_of_later_steps(run, finished):
    early = run.folder / "early.pt"
    shutil.copy(run.folder / "last.pt", early)
    few, later = finished[:-1], 3 * EPOCH
    assert run(*few, later, "--resume", "auto")[0] == 0
    goes_on = (*few, later, "--resume", early)
    code, last, _, _ = run(*goes_on, "--lr", 1e-9, "--inject", f"nan:param@step={EPOCH + 2}")
    assert (code, last["status"]) == (0, "done"), last
    back = [text for text in last["warnings"] if "back to the weights of step" in text]
    assert [text.split()[-1] for text in back] == [f"{EPOCH}"]
    assert checkpoint.load(run.folder / "last.pt")["healing"]["extra_steps"] > 0
    code, last, _, _ = run(*finished, "--resume", early)
    assert (code, last["steps"]) == (0, EPOCH), last
    assert same(checkpoint.load(run.folder / "best.pt"), {**checkpoint.load(early)["model"]})


def test_a_checkpoint_of_another_folder_does_not_overwrite_the_run_in_this_one(run, finished):
    assert run(*finished, out="other")[0] == 0
    folder = run.folder.with_name("other")
    before = tree(folder)
    from_outside = run(*finished, "--resume", run.folder / "last.pt", out="other")
    refused(from_outside, "holds another run")
    assert tree(folder) == before
    assert run(*finished, "--resume", folder / "last.pt", out="other")[0] == 0


def test_an_average_that_a_resume_switches_on_begins_with_the_weights_of_now(run, few):
    flags = (*few, "--max-steps", EPOCH)
    before = run(*flags)[1]
    (run.folder / "best.pt").unlink()
    code, last, _, _ = run(*flags, "--resume", "auto", "--ema", 0.99)
    assert (code, last["val_loss"]) == (0, before["val_loss"])


def test_a_resume_keeps_the_micro_batches_that_healing_has_added_and_no_others(
    run, finished, monkeypatch
):
    seen = []

    def ends_at_once(run, stop):
        seen.append(run.accum)
        return record.End("done", 0)

    monkeypatch.setattr(train, "train", ends_at_once)
    state = checkpoint.load(run.folder / "last.pt")
    file = run.folder / "early.pt"
    for before, healed, asked, wanted in ((4, 4, 1, 1), (1, 4, 1, 4), (2, 4, 2, 4), (1, 2, 4, 4)):
        state["accum"], state["identity"]["accum_steps"] = healed, before
        torch.save(state, file)
        assert run(*finished, "--accum-steps", asked, "--resume", file)[0] == 0
        assert seen.pop() == wanted


# --- Links

written = None  # a set: names are collected


def collect(event, args):
    """An audit hook: what is opened for writing, made, linked or renamed."""
    if written is None:
        return
    if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR):
        written.add(args[0])
    elif event in ("os.rename", "os.link", "os.mkdir"):
        written.update(args[:2])


sys.addaudithook(collect)
draw_curves = report.draw_curves


@needs_rescue
def test_no_link_that_lies_in_a_folder_leads_a_write_elsewhere(run, few, tmp_path, monkeypatch):
    """At each name that a first run has written: a link to a file outside, or to nothing."""
    global written
    monkeypatch.setattr(report, "draw_curves", draw_curves)
    monkeypatch.setattr(Classifier, "show", lambda self, x, y: x, raising=False)
    (tmp_path / ".cache").unlink()
    flags = (*few, "--ckpt-every", 2)
    written = set()
    assert run(*flags, "--max-steps", 7, "--inject", "nan:input@step=3")[0] == 0
    names, written = written, None
    homes = run.folder, tmp_path / ".cache"
    paths = {Path(tmp_path, os.fsdecode(name)) for name in names if not isinstance(name, int)}
    entries = {
        home / path.relative_to(home).parts[0]
        for home in homes
        for path in paths
        if home in path.parents
    }
    seen = {path.name for path in entries}
    assert len(entries) > 20 and {"bad_step_3_rank0.pt", "curves.png", ".lock", "shown"} <= seen
    kept = tmp_path / "kept"
    for home in homes:
        shutil.copytree(home, kept / home.name)
    for kind in ("link", "hard link", "nothing"):
        outside = tmp_path / f"outside, {kind}"
        outside.mkdir()
        for home in homes:
            shutil.rmtree(home)
            shutil.copytree(kept / home.name, home)
        for path in entries:
            target = outside / path.name
            inside = [other.name for other in paths if other.parent == path]
            if inside:
                shutil.rmtree(path, ignore_errors=True)
                target.mkdir()
                for name in inside:
                    (target / name).write_text("mine")
            elif path.exists():
                path.rename(target)
            else:
                target.write_text("mine")
            if kind == "hard link" and not inside:
                path.hardlink_to(target)
            else:
                path.symlink_to(target)
            if kind == "nothing":  # what is read to go on stays
                path.unlink()
                if path.suffix == ".pt" and target.exists():
                    target.rename(path)
                else:
                    shutil.rmtree(target) if inside else target.unlink()
                    path.symlink_to(target)
        before = tree(outside)
        assert run(*flags, "--max-steps", 9, "--resume", "auto")[0] == 0, kind
        assert tree(outside) == before, kind


def tree(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_belongs_to_one_run_at_a_time(run, few, monkeypatch):
    def locked(self):  # test_checkpoint.py has another process that holds it
        raise checkpoint.CheckpointError(f"{self.last.parent} is in use")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Checkpoints, "lock", locked)
        refused(run(*few), "in use")
    two = SimpleNamespace(
        args=SimpleNamespace(out_dir=None, model="m"),
        data=SimpleNamespace(name="d"),
        policy=SimpleNamespace(name="p"),
    )
    # Runs that start in the same second.
    names = [resume.make_folder(two, None).name for _ in range(3)]
    assert len(set(names)) == 3 and all((Path("runs") / name).is_dir() for name in names)
