"""The ladder, end to end: faults are planted, and the run names them, heals, and goes on."""

import math
from types import SimpleNamespace

import campaign
import helpers
import pytest
import torch
from helpers import events, last_state, same
from torch import nn

import train
from autopsy import Report, Verdict
from data import batches
from rescue import heal
from trainer.record import Run


class Wide(nn.Module):
    """A block whose inputs pass 65504 on the way, with a harmless result: only fp16 minds."""

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return self.inner(x * 3e5) / 3e5


class Rootless(nn.Module):
    """Overflows in fp16 by an operation of its own, so that no module but the whole can be kept in
    fp32. Elsewhere its memory ends where a micro-batch has more than `room` images."""

    def __init__(self, classes, room=1000):
        super().__init__()
        self.head = nn.Linear(3072, classes)
        self.room = room
        self.largest = 0

    def forward(self, images):
        dtype = torch.get_autocast_dtype("cpu")
        half = torch.is_autocast_enabled("cpu") and dtype == torch.float16
        if not half and self.training:
            if len(images) > self.room:
                raise torch.OutOfMemoryError("planted")
            self.largest = max(self.largest, len(images))
        return self.head(images.flatten(1)) * 1e6 / 1e6


@pytest.fixture
def wide(model):
    def make(classes):
        net = helpers.mlp(classes)
        net[2] = Wide(32)
        return net

    return model("wide", make, lr=3e-3)


def acted(lines):
    """Cures that did something: not those that only looked at a step afterwards."""
    cures = events(lines, "cure")
    return [cure for cure in cures if not cure["action"].startswith("passed over: one step")]


# --- Precision


def test_a_block_that_overflows_in_fp16_is_pinned_alone_and_the_run_ends_like_fp32(
    run, wide, capsys
):
    flags = ("--model", "wide", "--max-steps", 60)
    _, precise, _, _ = run(*flags, out="fp32")
    code, healed, _, lines = run(*flags, "--precision", "O1")
    assert code == 0
    assert healed["healed"] == ["2"]
    assert healed["skipped"] <= 4
    assert healed["updates"] == 60 - healed["skipped"]
    assert healed["val_loss"] == pytest.approx(precise["val_loss"], abs=0.1)
    cure = events(lines, "cure")[0]
    assert (cure["verdict"], cure["module"]) == ("precision", "2")
    assert last_state(run)["pinned"] == ["2"]

    more = ("--max-steps", 70, "--precision", "O1", "--resume", "auto")
    _, resumed, _, lines = run("--model", "wide", *more)
    assert resumed["healed"] == ["2"]
    assert not [line for line in events(lines, "skip") if line["step"] > 60]

    capsule = next(run.folder.glob("bad_step_*.pt"))
    capsys.readouterr()
    assert train.main(["--replay", str(capsule)]) == 0
    printed = capsys.readouterr().out
    assert "in 2 (forward" in printed
    assert "recorded verdict: precision, replayed on the CPU: precision" in printed

    code, stalled, _, _ = run(*flags, "--precision", "O1", "--on-nonfinite", "skip", out="skip")
    assert (code, stalled["status"], stalled["updates"]) == (3, "diverged", 0)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_fault_outside_of_modules_ends_well_at_every_level_of_fp16(run, model, level):
    model("rootless", Rootless)
    flags = ("--model", "rootless", "--precision", level, "--lr", 1e-3)
    # Before the first validation last_good is of step 0, and of the level before.
    spec = "nan:param:head.weight@step=8"
    code, last, _, lines = run(*flags, "--max-steps", 9, "--inject", spec)

    assert (code, last["status"]) == (0, "done")
    assert last["precision"] in ("bf16", "fp32")
    cures = acted(lines)
    assert [cure["verdict"] for cure in cures] == ["precision", "weights"]
    assert cures[0]["action"].endswith(f"the run goes on in {last['precision']}")

    state = last_state(run)
    assert state["model"]["head.weight"].dtype == torch.float32
    assert not any(optimizer.get("masters") for optimizer in state["optimizers"])

    _, resumed, _, _ = run(*flags, "--max-steps", last["steps"] + 4, "--resume", "auto")
    assert resumed["status"] == "done"
    assert resumed["updates"] >= last["updates"] + 4


def test_out_of_memory_after_a_demotion_halves_the_micro_batch_and_keeps_the_batch(run, model):
    nets = model("roomy", lambda classes: Rootless(classes, room=10))
    flags = ("--model", "roomy", "--precision", "O1", "--eval-precision", "same")
    code, last, _, lines = run(*flags)

    assert code == 0
    assert last["precision"] in ("bf16", "fp32")
    warned = [line["text"] for line in events(lines, "warning")]
    assert any("from now on 4 micro-batches" in text for text in warned)
    assert nets[0].largest == 10
    assert last["updates"] > 5
    assert last_state(run)["accum"] == 4


@pytest.mark.parametrize("hunting", [False, True])
def test_a_step_that_is_vetoed_for_ever_ends_with_a_sentence(run, monkeypatch, hunting):
    take = train.train_step

    def vetoed(run, *rest):
        if run.step > 5:
            run.guard.carry("veto", 1)
        return take(run, *rest)

    monkeypatch.setattr(train, "train_step", vetoed)
    spec = ("--inject", "nan:grad:head.weight@step=4") if hunting else ()
    code, last, error, _ = run(*spec)

    assert (code, last["status"], last["updates"]) == (1, "failed", 5 - hunting)
    assert "step 6 did not fit into memory in 6 attempts" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("indices, said", [([3], "never drawn again"), ([], "passed over")])
def test_only_samples_that_were_named_are_said_to_be_left_out(indices, said):
    left_out = set()
    stream = SimpleNamespace(leave_out=left_out.update)
    run = Run(args=SimpleNamespace(max_cures=8), stream=stream)
    report = Report(verdict=Verdict.DATA, step=9, indices=indices)
    cure = heal.respond(run, report)
    assert cure.action.endswith(said)
    assert left_out == set(indices)


ANSWERED = ("precision", "data", "weights", "divergence", "compiler")
FIFTH = ("not reproducible", "calibration")


@pytest.mark.parametrize("verdict", [verdict for verdict in Verdict if verdict not in ANSWERED])
def test_only_what_the_hardware_may_have_done_ends_the_run_at_the_fifth_time(verdict):
    """A verdict that no branch answers is passed over, however often."""
    run = Run(args=SimpleNamespace(max_cures=8))
    ends = []
    for step in range(9):
        cure = heal.respond(run, Report(verdict=verdict, step=step, symptom="it was bad"))
        assert cure.action == "passed over"
        ends.append(cure.end and cure.end.code)
    fifth = 5 if verdict in FIFTH else None
    assert ends == [None] * 4 + [fifth] * 5


# --- Weights, data, divergence


def test_bad_labels_are_each_named_kept_out_for_good_and_end_the_run_when_they_are_many(run, mlp):
    steps = (5, 60, 115, 120)
    spec = ";".join(f"big:label@step={step}" for step in steps)
    flags = ("--model", "mlp", "--max-steps", 122, "--precision", "bf16", "--inject", spec)
    code, last, _, lines = run(*flags)

    assert (code, last["status"]) == (4, "bad data")
    cures = events(lines, "cure")
    assert [(cure["of_step"], cure["verdict"]) for cure in cures] == [(n, "data") for n in steps]
    named = [sample for cure in cures for sample in cure["samples"]]
    assert len(named) == 4
    assert last["quarantined"] == sorted(named)
    assert last_state(run)["quarantine"] == sorted(named[:2]), "it is of step 110"


def test_samples_in_quarantine_are_never_drawn():
    images = torch.zeros(400, 3, 8, 8, dtype=torch.uint8)
    labels = torch.zeros(400, dtype=torch.long)
    stream = batches.TrainBatches(images, labels, batch_size=40)
    stream.leave_out({3, 4, 77})
    drawn = set()
    for step in range(20):  # two epochs
        drawn.update(stream.indices(step).tolist())
    assert drawn == set(range(400)) - {3, 4, 77}


def test_what_is_bad_in_fp32_too_goes_back_and_lowers_the_learning_rate(run):
    spec = "nan:act:groups.1@step=6..8"
    code, last, _, lines = run("--inject", spec, "--precision", "bf16", "--ckpt-every", 5)

    assert code == 0
    assert last["skipped"] == 3
    cure = acted(lines)[0]
    assert (cure["verdict"], cure["step"]) == ("divergence", 8)
    assert "learning rate x 0.5" in cure["action"]
    assert last_state(run)["schedule"]["factor"] == 0.5
    assert f"step 8: {cure['action']}" in last["warnings"]


def test_two_turns_back_to_the_same_weights_count_each_step_once(run):
    spec = "nan:act:groups.1@step=6..8;nan:act:groups.1@step=14..16"
    flags = ("--precision", "bf16", "--max-steps", 40, "--ckpt-every", 40)
    code, last, _, lines = run("--inject", spec, *flags)
    assert code == 0
    back = [cure["action"].split(",")[0] for cure in acted(lines)]
    assert len({*back}) < len(back), "twice to one state"
    state = last_state(run)
    assert (
        state["schedule"]["updates"] == 40 and last["steps"] == 40 + state["healing"]["extra_steps"]
    )


def test_a_module_that_fp32_does_not_save_ends_in_a_bounded_number_of_cures(run):
    spec = "inf:act:groups.1@step=3..400"
    code, last, _, lines = run("--inject", spec, "--max-steps", 200, "--max-cures", 3)
    assert (code, last["status"]) == (3, "diverged")
    assert len(acted(lines)) == 4
    weights = last_state(run)["model"]
    assert math.isfinite(weights["head.weight"].sum())


def test_a_run_that_was_healed_by_eager_mode_resumes_in_eager_mode(run, mlp, monkeypatch):
    monkeypatch.setattr(torch, "compile", campaign.miscompiled)
    flags = ("--model", "mlp", "--compile", "--max-steps")
    code, last, _, _ = run(*flags, 60)  # the 50 steps after a bad one are eager in any case
    assert (code, last["status"], last["healed"]) == (0, "done", ["eager mode"])

    calls = len(campaign.CALLS)  # of compiled code
    _, resumed, _, _ = run(*flags, 64, "--resume", "auto")
    assert resumed["updates"] == last["updates"] + 4
    assert len(campaign.CALLS) == calls


# --- Going on at another level


@pytest.mark.parametrize(("first", "second"), [("bf16", "O2"), ("O2", "bf16"), ("O3", "fp32")])
def test_a_run_goes_on_at_another_level_with_the_weights_it_had(
    run, mlp, monkeypatch, first, second
):
    flags = ("--model", "mlp", "--adam-eps", 1e-4)
    run(*flags, "--precision", first, "--max-steps", 6)
    saved = last_state(run)["model"]
    if first == "O2":  # the masters, not the half weights
        assert any(not torch.equal(weight, weight.half().float()) for weight in saved.values())

    seen = {}
    restore = train.resume.restore

    def watched(run, state):
        restore(run, state)
        masters = train.optim.master_params(run.optimizers)
        for name, p in run.net.named_parameters():
            seen[name] = masters[p].clone()

    monkeypatch.setattr(train.resume, "restore", watched)
    more = ("--precision", second, "--max-steps", 12, "--resume", "auto")
    code, last, _, _ = run(*flags, *more)

    assert (code, last["steps"], last["precision"]) == (0, 12, second)
    wanted = {name: weight.float() for name, weight in saved.items()}
    assert same(seen, wanted)
    dtype = torch.float16 if second == "O2" else torch.float32
    assert {p.dtype for p in mlp[-1].parameters()} == {dtype}


# --- Capsules


def test_a_hostile_or_foreign_capsule_is_refused_in_one_sentence(run, wide, tmp_path, capsys):
    class Hostile:
        def __reduce__(self):
            return print, ("this code was run",)

    run("--model", "wide", "--precision", "fp16", "--max-steps", 8)
    whole = torch.load(next(run.folder.glob("bad_step_*.pt")), weights_only=True)
    capsules = {
        "hostile": whole | {"batches": Hostile()},
        "foreign": {"weights": torch.zeros(1)},
        "empty": whole | {"model": {}},
        "fork": whole | {"model_name": "of_a_fork"},
    }
    for left_out in whole:
        rest = {key: value for key, value in whole.items() if key != left_out}
        capsules[f"no_{left_out}"] = rest
    for name, capsule in capsules.items():
        torch.save(capsule, tmp_path / f"{name}.pt")
    (tmp_path / "text.pt").write_text("this is no capsule")

    for name in (*capsules, "text", "missing"):
        with pytest.raises(SystemExit) as left:
            train.main(["--replay", str(tmp_path / f"{name}.pt")])

        printed = capsys.readouterr()
        assert left.value.code == 2, printed.err
        assert name in printed.err
        assert len(printed.err.strip().splitlines()) == 1
        assert "weights_only" not in printed.err
        assert "this code was run" not in printed.out
