"""The ladder, end to end through train.py: faults are planted, and the run names them, heals, and goes on."""

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
    assert all(torch.isfinite(t).all() for _, t in guards.named_floats(state))


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
    cure = events(lines, "cure")[0]
    assert (cure["verdict"], cure["step"]) == ("divergence", 8) and "learning rate x 0.5" in cure["action"]


def test_a_module_that_fp32_does_not_save_ends_in_a_bounded_number_of_cures(run):
    code, last, _, lines = run("--inject", "inf:act:groups.1@step=3..400", "--max-steps", 200, "--max-cures", 3)
    assert (code, last["status"]) == (3, "diverged") and len(events(lines, "cure")) == 4
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
    cures = events(lines, "cure")
    assert code == 0 and last["precision"] in ("bf16", "fp32")
    assert cures[-1]["action"].endswith("in micro-batches 4 times smaller")
    assert nets[0].largest == 10 and last["updates"] > 5
    assert torch.load(run.folder / "last.pt", weights_only=True)["healer"]["accum"] == 4


def test_out_of_memory_without_a_cure_ends_with_the_flags_to_try(run, monkeypatch):
    def out_of_memory(self, step):
        raise torch.OutOfMemoryError("CUDA out of memory: planted")

    monkeypatch.setattr(batches.TrainBatches, "at", out_of_memory)
    code, _, err, _ = run()
    assert code == 1 and "planted" in err and "--accum-steps" in err and list(run.folder.glob("last*.pt"))
