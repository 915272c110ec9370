"""The ladder, end to end through train.py: faults are planted, and the run names them, heals, and goes on."""

import functools
import math

import pytest
import torch

import guards
import train
from data import batches
from models import RECIPE


class Wide(torch.nn.Module):
    """A block whose inputs pass 65504 on the way, and whose result is harmless: only fp16 minds."""

    def __init__(self, width):
        super().__init__()
        self.inner = torch.nn.Linear(width, width)

    def forward(self, x):
        return self.inner(x * 3e5) / 3e5


@pytest.fixture
def wide(monkeypatch):
    def build(names, size):
        net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 32), torch.nn.GELU())
        net.add_module("block", Wide(32))
        net.extend([torch.nn.LayerNorm(32), torch.nn.Linear(32, len(names))])
        return net

    monkeypatch.setitem(train.MODELS, "wide", (build, RECIPE | {"lr": 3e-3, "batch_size": 40}))


def events(lines, kind):
    return [line for line in lines if line.get("event") == kind]


def acted(lines):
    """Cures that did something: not those that only looked at a step afterwards."""
    return [line for line in events(lines, "cure") if not line["action"].startswith("passed over: one step")]


def test_a_block_that_overflows_in_fp16_is_pinned_alone_and_the_run_ends_like_fp32(run, wide):
    flags = ("--model", "wide", "--max-steps", 60)
    precise = run(*flags, out="fp32")[1]
    code, healed, _, lines = run(*flags, "--precision", "O1")
    assert code == 0 and healed["healed"] == ["block"]
    assert healed["skipped"] <= 4 and healed["updates"] == 60 - healed["skipped"]
    assert healed["val_loss"] == pytest.approx(precise["val_loss"], abs=0.1)
    cure = events(lines, "cure")[0]
    assert (cure["verdict"], cure["module"]) == ("precision", "block")
    assert torch.load(run.folder / "last.pt", weights_only=True)["healer"]["pinned"] == ["block"]

    code, stalled, _, _ = run(*flags, "--precision", "O1", "--on-nonfinite", "skip", out="skip")
    assert (code, stalled["status"], stalled["updates"]) == (3, "diverged", 0)


def test_a_pinned_module_stays_pinned_after_a_resume(run, wide):
    flags = ("--model", "wide", "--precision", "fp16")
    run(*flags, "--max-steps", 20)
    code, last, _, lines = run(*flags, "--max-steps", 30, "--resume", "auto")
    assert code == 0 and last["healed"] == ["block"]
    assert not [line for line in events(lines, "skip") if line["step"] > 20]


def test_poisoned_weights_go_back_to_the_last_good_ones(run):
    code, last, _, lines = run("--inject", "nan:param:head.weight@step=15", "--max-steps", 20, "--ckpt-every", 5)
    assert code == 0 and last["status"] == "done"
    assert [cure["verdict"] for cure in events(lines, "cure")] == ["weights"]
    assert "back to the weights of step 15" in events(lines, "cure")[0]["action"] or "step 10" in events(
        lines, "cure")[0]["action"]
    state = torch.load(run.folder / "last.pt", weights_only=True)
    assert all(torch.isfinite(t).all() for _, t in guards.named_tensors(state))


def test_bad_labels_are_named_with_their_samples_and_end_the_run_when_they_are_many(run):
    code, last, _, lines = run("--inject", "big:label@step=3..5", "--max-steps", 12)
    assert code == 0 and last["skipped"] == 3
    named = events(lines, "cure")
    assert named and all(cure["verdict"] == "data" and len(cure["samples"]) == 1 for cure in named)
    code, last, _, _ = run("--inject", "nan:input@step=3..20", "--max-steps", 20, out="many")
    assert (code, last["status"]) == (4, "bad data")


def test_what_is_bad_in_fp32_too_goes_back_and_lowers_the_learning_rate(run):
    code, last, _, lines = run("--inject", "nan:act:groups.1@step=6..8", "--precision", "bf16", "--ckpt-every", 5)
    assert code == 0 and last["skipped"] == 3
    cure = acted(lines)[0]
    assert (cure["verdict"], cure["step"]) == ("divergence", 8) and "learning rate x 0.5" in cure["action"]


def test_a_module_that_fp32_does_not_save_ends_in_a_bounded_number_of_cures(run):
    code, last, _, lines = run("--inject", "inf:act:groups.1@step=3..400", "--max-steps", 200, "--max-cures", 3)
    assert (code, last["status"]) == (3, "diverged") and len(acted(lines)) == 4
    assert math.isfinite(torch.load(run.folder / "last.pt", weights_only=True)["model"]["head.weight"].sum())


def test_a_capsule_replays_the_verdict(run, wide, capsys):
    run("--model", "wide", "--precision", "fp16", "--max-steps", 8)
    capsule = next(run.folder.glob("bad_step_*.pt"))
    capsys.readouterr()
    assert train.main(["--replay", str(capsule)]) == 0
    printed = capsys.readouterr().out
    assert "in block (forward" in printed and "recorded verdict: precision, replayed on the CPU: precision" in printed


class Roomy(torch.nn.Module):
    """Overflows in fp16 by an operation of its own, so that no module can be pinned; out of memory elsewhere from 11
    images on, as a large model in fp32 would be."""

    def __init__(self, classes):
        super().__init__()
        self.head = torch.nn.Linear(3072, classes)
        self.largest = 0

    def forward(self, images):
        half = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.float16
        if not half and self.training:
            if len(images) > 10:
                raise torch.OutOfMemoryError("planted")
            self.largest = max(self.largest, len(images))
        logits = self.head(images.flatten(1))
        return logits * 1e6 / 1e6


def test_out_of_memory_after_a_demotion_halves_the_micro_batch_and_keeps_the_batch(run, monkeypatch):
    nets = []

    def build(names, size):
        nets.append(Roomy(len(names)))
        return nets[-1]

    monkeypatch.setitem(train.MODELS, "roomy", (build, RECIPE | {"batch_size": 40}))
    code, last, _, lines = run("--model", "roomy", "--precision", "O1", "--eval-precision", "same")
    assert code == 0 and last["precision"] in ("bf16", "fp32")
    assert any("from now on 4 micro-batches" in line["text"] for line in events(lines, "warning"))
    assert nets[0].largest == 10 and last["updates"] > 5
    assert torch.load(run.folder / "last.pt", weights_only=True)["healer"]["accum"] == 4


def test_out_of_memory_without_a_cure_ends_with_the_flags_to_try(run, monkeypatch):
    healthy = batches.TrainBatches.at

    def out_of_memory(self, step):
        if step == 3:
            raise torch.OutOfMemoryError("CUDA out of memory: planted")
        return healthy(self, step)

    monkeypatch.setattr(batches.TrainBatches, "at", out_of_memory)
    code, _, err, _ = run()
    assert code == 1 and "planted" in err and "--accum-steps" in err and list(run.folder.glob("last*.pt"))


def test_bad_labels_far_apart_are_each_named_kept_out_for_good_and_end_the_run_when_they_are_many(run):
    spec = ";".join(f"big:label@step={step}" for step in (20, 90, 160))
    code, last, _, lines = run("--inject", spec, "--max-steps", 200, "--precision", "bf16")
    cures = events(lines, "cure")
    assert code == 0 and last["skipped"] == 3
    assert [(cure["of_step"], cure["verdict"], len(cure["samples"])) for cure in cures] == [
        (20, "data", 1), (90, "data", 1), (160, "data", 1)]
    named = sorted(sample for cure in cures for sample in cure["samples"])
    assert last["quarantined"] == named == torch.load(run.folder / "last.pt", weights_only=True)["healer"]["quarantine"]
    flags = ("--model cifarnet-tiny --dataset cifar10 --batch-size 40 --max-steps 300 --precision bf16 --device cpu "
             f"--resume auto --data-dir {run.images} --out-dir {run.folder}").split()
    stream = train.setup(train.flags.parse(flags, "", train.MODELS, train.NAMES)).stream
    drawn = {i for step in range(100) for i in stream.indices(step).tolist()}  # ten epochs
    assert not drawn & set(named) and len(drawn) == 400 - 3
    spec += ";big:label@step=230"
    code, last, _, _ = run("--inject", spec, "--max-steps", 300, "--precision", "bf16", out="many")
    assert (code, last["status"], len(last["quarantined"])) == (4, "bad data", 4)


@pytest.mark.parametrize("flags", [("--model", "vit-test", "--lr", 3), ("--lr", 30, "--clip-grad", 0)])
def test_a_run_lost_with_finite_numbers_turns_back_and_never_ends_done(run, flags):
    code, last, _, lines = run(*flags, "--max-steps", 150)
    turns = [cure for cure in events(lines, "cure") if cure["verdict"] == "divergence"]
    assert turns and "back to the weights of step" in turns[0]["action"] and "x 0.5" in turns[0]["action"]
    assert (code, last["status"]) == (3, "diverged") or last["val_loss"] < 3


def test_a_model_whose_output_ignores_its_input_turns_back_and_never_ends_done(run, monkeypatch):
    class Dying(torch.nn.Module):
        """All of its units die in step 15: the head's bias alone goes on learning, and the loss looks harmless."""

        def __init__(self, classes):
            super().__init__()
            self.steps, self.first, self.head = 0, torch.nn.Linear(3072, 32), torch.nn.Linear(32, classes)

        def forward(self, images):
            if self.training:
                self.steps += 1
                if self.steps >= 15:
                    self.first.bias.data.fill_(-1e9)
            return self.head(self.first(images.flatten(1)).relu())

    monkeypatch.setitem(train.MODELS, "dying", (lambda names, size: Dying(len(names)), RECIPE | {"batch_size": 40}))
    code, last, _, lines = run("--model", "dying", "--max-steps", 40, "--ckpt-every", 10)
    assert (code, last["status"]) == (3, "diverged")
    cures = events(lines, "cure")
    assert cures[0]["verdict"] == "divergence" and "learning rate x 0.5" in cures[0]["action"]
    healthy = run("--max-steps", 40, out="healthy")
    assert healthy[0] == 0 and not events(healthy[3], "cure")


def test_a_loss_that_spikes_and_recovers_turns_nothing_back():
    record = train.Run()
    said = [train.heal.suspect(record, loss, 1.0) for loss in [2.3] * 10 + [1.0] * 50 + [80.0] * 15 + [0.9] * 100]
    assert not any(said) and record.trend["high"] == 0
    said = [train.heal.suspect(record, loss, 1.0) for loss in [80.0] * 20]
    assert not any(said[:19]) and "far above its past for 20 steps" in said[19]


def test_a_dead_gradient_is_noticed_and_a_zero_now_and_then_is_not():
    record = train.Run()
    said = [train.heal.suspect(record, 1.0, norm) for norm in [1.0] * 12 + ([0.0] * 15 + [1.0]) * 5]
    assert not any(said)
    assert "dead for 20 steps" in [train.heal.suspect(record, 1.0, 0.0) for _ in range(20)][-1]


def test_last_good_is_not_moved_while_a_suspicion_is_open(run, monkeypatch):
    saved = []
    monkeypatch.setattr(train.heal, "PATIENCE", 1000)  # open, and never sure
    monkeypatch.setattr(train.checkpoint.Checkpoints, "save",
                        lambda self, state, step, good=False: saved.append((step, good)) or [])
    record = {"seen": 50, "start": 1e-6, "usual": 1e-6, "high": 0, "dead": 0}
    monkeypatch.setattr(train.heal, "suspicious", lambda run: run.trend["high"] >= 5)
    monkeypatch.setattr(train, "Run", functools.partial(train.Run, trend=record))
    code, last, _, _ = run("--ckpt-every", 4, "--max-steps", 12)
    assert [good for step, good in saved if step in (4, 8)] == [True, False]
    assert (code, last["status"]) == (3, "diverged")


class Rootless(torch.nn.Module):
    """Overflows in fp16 by an operation of its own, so that no module but the whole can be kept in fp32."""

    def __init__(self, classes):
        super().__init__()
        self.head = torch.nn.Linear(3072, classes)

    def forward(self, images):
        return overflow(self.head(images.flatten(1)))


def overflow(logits):
    return logits * 1e6 / 1e6


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_fault_outside_of_modules_ends_well_at_every_level_of_fp16(run, monkeypatch, level):
    monkeypatch.setitem(train.MODELS, "rootless", (lambda names, size: Rootless(len(names)), RECIPE))
    code, last, _, lines = run("--model", "rootless", "--precision", level, "--max-steps", 30, "--lr", 1e-3)
    assert (code, last["status"]) == (0, "done") and last["precision"] in ("bf16", "fp32")
    assert last["updates"] >= 25 and acted(lines)[0]["action"].endswith(f"the run goes on in {last['precision']}")
    state = torch.load(run.folder / "last.pt", weights_only=True)
    assert state["model"]["head.weight"].dtype == torch.float32 and not state["optimizer"]["masters"]
    flags = ("--model", "rootless", "--precision", level, "--max-steps", 34, "--lr", 1e-3, "--resume", "auto")
    assert run(*flags)[1]["updates"] == last["updates"] + 4


LEVELS = [("bf16", "O2"), ("O2", "bf16"), ("O2", "fp32"), ("fp32", "O2"), ("O3", "fp32")]


@pytest.mark.parametrize("first, second", LEVELS)
def test_a_run_goes_on_at_another_level_with_the_weights_it_had(run, mlp, first, second, capsys):
    eps = ("--adam-eps", 1e-4)
    run("--model", "mlp", "--precision", first, "--max-steps", 6, *eps)
    state = torch.load(run.folder / "last.pt", weights_only=True)
    capsys.readouterr()
    parsed = train.flags.parse([*map(str, (
        "--model", "mlp", "--dataset", "cifar10", "--data-dir", run.images, "--batch-size", 40, "--max-steps", 12,
        "--device", "cpu", "--precision", second, "--out-dir", run.folder, "--resume", "auto", *eps))],
        "", train.MODELS, train.NAMES)
    record = train.setup(parsed)
    said = capsys.readouterr().out
    assert "weights" in said.split("resumed from")[1] and f"precision: {first} -> {second}" in said
    names = {p: name for name, p in record.net.named_parameters()}
    before = dict(state["model"])
    half = [names[p] for p in record.optimizer.model_params if before[names[p]].dtype == torch.float16]
    before |= dict(zip(half, state["optimizer"]["masters"], strict=first == "O2"))  # O3 keeps none
    for p, master in zip(record.optimizer.model_params, record.optimizer.params, strict=True):
        assert master.dtype == torch.float32 and torch.equal(master, before[names[p]].float()), names[p]
        assert p.dtype == (torch.float16 if second == "O2" else torch.float32)
    code, last, _, _ = run("--model", "mlp", "--precision", second, "--max-steps", 12, "--resume", "auto", *eps)
    assert (code, last["steps"], last["precision"]) == (0, 12, second)


def test_compiled_code_that_makes_a_nan_is_named_and_the_run_goes_on_in_eager_mode(run, monkeypatch):
    def compile(model):
        class Compiled(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self._orig_mod = model

            def forward(self, x, y):
                loss, metrics = self._orig_mod(x, y)
                return loss * float("nan"), metrics

        return Compiled()

    monkeypatch.setattr(torch, "compile", compile)
    code, last, _, lines = run("--compile", "--max-steps", 20)
    assert (code, last["status"], last["healed"]) == (0, "done", ["eager mode"])
    assert [cure["verdict"] for cure in acted(lines)] == ["compiler"] and last["updates"] >= 16
    resumed = run("--compile", "--max-steps", 24, "--resume", "auto")[1]
    assert resumed["updates"] == last["updates"] + 4


def test_a_hostile_or_foreign_capsule_is_refused_in_one_sentence(run, tmp_path, capsys):
    class Hostile:
        def __reduce__(self):
            return print, ("this code was run",)

    (tmp_path / "text.pt").write_text("this is no capsule")
    torch.save({"format": 1, "batches": Hostile()}, tmp_path / "hostile.pt")
    torch.save({"weights": torch.zeros(1)}, tmp_path / "foreign.pt")
    for name in ("text.pt", "hostile.pt", "foreign.pt", "missing.pt"):
        with pytest.raises(SystemExit) as left:
            train.main(["--replay", str(tmp_path / name)])
        printed = capsys.readouterr()
        assert left.value.code == 2 and name in printed.err and len(printed.err.strip().splitlines()) == 1
        assert "weights_only" not in printed.err and "this code was run" not in printed.out
