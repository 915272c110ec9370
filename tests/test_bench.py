"""The benches of precision, scaling and compilation run, and say what they are supposed to say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train
from amp_policy import capabilities
from bench import healed_whole_run, recognised, train_models

BENCH = Path(__file__).parent.parent / "bench"


def smoke(name):
    """What a bench prints, and the record in its last line."""
    command = [sys.executable, str(BENCH / f"{name}.py"), "--smoke", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(done.stdout.splitlines()[-1])


def test_a_refused_rung_of_the_ladder_shows_the_refusal_and_an_emulated_one_its_reason():
    table, record = smoke("precision_ladder")
    assert "eps=1e-08 is exactly 0 in torch.float16" in record["rungs"]["O3"] and record["rungs"]["O3"] in table
    assert record["rungs"]["tf32"].startswith("left out") and record["rungs"]["O2"].startswith("left out")
    assert record["rungs"]["fp32"]["ended"] == ["done in fp32"]
    if capabilities("cpu").cpu_bf16:
        assert record["rungs"]["raw half weights"]["ended"] == ["done in bfloat16"]


def test_scaling_times_two_ranks_and_marks_what_is_calculated():
    _, record = smoke("scaling")
    assert {"1 rank", "2 ranks, strong", "2 ranks, weak", "accumulation 8"} <= set(record["guarded / bare"])
    measured, *calculated = record["communication"]
    assert measured[0].startswith("measured") and 0 < measured[2] < measured[1]  # a dozen floats beat 8 MB
    assert calculated and all(row[0].startswith("calculated") for row in calculated)


def test_the_guard_adds_no_graph_break_and_the_counter_counts():
    _, record = smoke("compile_models")
    for name, row in record["models"].items():
        assert row["added by the guard"] == {"breaks": 0, "graphs": 0}, name
    assert record["models"]["cifarnet-tiny"]["breaks"] == 0 and record["models"]["cifarnet-tiny"]["graphs"] == 1
    assert record["models"]["vmamba-test"]["breaks"] > 0  # its scan is kept out of the compiler on purpose


def test_the_raw_file_of_a_trained_model_holds_its_recipe_and_the_figures_of_every_epoch(tmp_path):
    header = {"model": "vit", "dataset": "cifar10", "seed": 0, "precision": "bf16", "commit": "abc", "hardware": "cpu",
              "torch": "2", "args": {"lr": 7e-3, "muon": [], "data_dir": "/where/it/lies"}}
    best, last = ({"step": 5 * i, "epoch": i, "train_loss": 1.0, "val_acc1": a} for i, a in ((1, 71.0), (2, 70.0)))
    end = {"event": "end", "status": "done", "updates": 8, "skipped": 1, "val_acc1": 70.0}
    lines = [header, {"step": 3, "loss": 2.0, "lr": 1e-3}, best, {"event": "skip", "step": 6}, last, end]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:-1]))
    assert not train_models.done(tmp_path)  # stopped before its end: the bench goes on with it
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert train_models.done(tmp_path)
    row = train_models.record(tmp_path, 2.0)
    assert [line["val_acc1"] for line in row["epochs"]] == [71.0, 70.0] and row["end"]["val_acc1"] == 70.0
    assert [event["step"] for event in row["events"]] == [6]
    assert (row["recipe"]["lr"], row["recipe"]["muon"], row["recipe"]["batch_size"]) == (7e-3, [], 128)
    assert "/where/it/lies" not in json.dumps(row)


def test_a_judge_counts_the_images_that_show_what_was_asked_for():
    images, labels = torch.zeros(300, 3, 4, 4), torch.arange(300) % 3
    images[:, 0, 0, 0] = torch.where(torch.arange(300) < 150, labels, 2).float()  # from 150 on all show class 2

    def judge(some):
        return torch.eye(3)[some[:, 0, 0, 0].long()]

    share, by_class = recognised.recognised(judge, images, labels)
    assert share == pytest.approx(100 * (150 + 50) / 300) and by_class == [50.0, 50.0, 100.0]


def test_a_healed_run_stands_beside_the_same_run_in_fp32(image_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(train.MODELS, "swin-published", None)  # goes away again
    monkeypatch.setattr(train.report, "draw_curves", lambda path: None)
    monkeypatch.chdir(tmp_path)
    healed_whole_run.main(["--data-dir", str(image_folder), "--device", "cpu", "--epochs", "2", "--seeds", "1",
                           "--grown", "400", "--results", str(tmp_path)])
    fp32, fp16 = json.loads((tmp_path / "healed_whole_run-cpu.json").read_text())["runs"]
    assert fp32["end"]["skipped"] == 0 and fp32["end"]["healed"] == [] and len(fp32["epochs"]) == 2
    assert fp16["end"]["skipped"] >= 1 and fp16["end"]["healed"] == ["stages.0.blocks.0.attn"]
    assert {event["event"] for event in fp16["events"]} >= {"skip", "cure"}
    assert "healed stages.0.blocks.0.attn" in capsys.readouterr().out and str(tmp_path) not in json.dumps(fp16)
