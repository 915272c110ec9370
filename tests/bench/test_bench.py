"""The benches run, and say what they are supposed to say."""

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

import train
from amp_policy import capabilities
from bench import (
    died_and_healed,
    gpu,
    gpu_parts,
    guard_cost,
    odd_runs,
    precision_ladder,
    record,
    train_models,
    watch_cost,
)
from data import synthetic


@pytest.fixture(autouse=True)
def quickly(monkeypatch, tmp_path):
    few = (synthetic.draw(0, 200, seed=1), synthetic.draw(200, 100, seed=1), synthetic.CLASSES)
    monkeypatch.setattr(synthetic, "load", lambda *sizes: few)  # the 22,000 take seconds
    monkeypatch.setattr(train.report, "draw_curves", lambda path: None)
    monkeypatch.chdir(tmp_path)
    with mock.patch.dict(train.MODELS):  # the models of a bench go away again
        yield


def test_a_refused_rung_of_the_ladder_shows_the_refusal_and_an_emulated_one_its_reason(capsys):
    precision_ladder.main(["--smoke", "--device", "cpu", "--model", "cifarnet-tiny"])
    rows = {line[:14].strip(): line[14:] for line in capsys.readouterr().out.splitlines()}
    assert "eps=1e-08 is exactly 0 in torch.float16" in rows["O3"]
    assert rows["tf32"].startswith("left out") and rows["O2"].startswith("left out")
    assert rows["fp32"].endswith("done in fp32")
    native = capabilities("cpu").cpu_bf16
    assert rows["bf16"].endswith("done in bf16" if native else "only emulates bf16")


def test_each_contestant_is_compared_with_its_own_bare_partner(capsys, monkeypatch):
    works = [("cifarnet-tiny", 8, 32)]
    monkeypatch.setitem(guard_cost.WORKLOADS, "cpu", works)
    guard_cost.main(["--smoke", "--device", "cpu", "--only", "cifarnet-tiny, batch 8", "ranks"])
    printed = capsys.readouterr().out
    for name in ("ours", guard_cost.OWN, guard_cost.STOCK, *guard_cost.SLOW):
        assert f"  {name} " in printed, name
    assert "on each of 2 ranks" in printed and "failed" not in printed
    head = {"ratios": {}, "milliseconds": {}, "arguments": {"device": "cpu"}}
    rounds = [{"bare": 2.0, "ours": 3.0, "bare, CUDA graph": 1.0, "ours, CUDA graph": 1.2}] * 3
    guard_cost.table("title", rounds, head)
    medians = {name: row["median"] for name, row in head["ratios"]["title"].items()}
    assert medians["ours"] == 1.5 and medians["ours, CUDA graph"] == pytest.approx(1.2)


@pytest.mark.parametrize("kind", watch_cost.STEPS)
def test_the_watch_changes_no_figure_of_small_steps_and_has_its_price(kind, capsys):
    watch_cost.main(["--smoke", "--device", "cpu", "--model", kind])
    head = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert head["watched / alone"][kind]["n"] == 1 and head["printed figures"] == "the same"


def test_the_raw_file_of_a_trained_model_holds_its_recipe_and_every_epoch(tmp_path):
    header = dict.fromkeys(train_models.HEADER, "x") | {
        "model": "vit",
        "args": {"lr": 7e-3, "data_dir": "/where/it/lies"},
    }
    epochs = [{"step": 5 * i, "epoch": i, "train_loss": 1.0, "val_acc1": 70.0} for i in (1, 2)]
    end = {"event": "end", "status": "done", "val_acc1": 70.0}
    lines = [header, {"step": 3, "loss": 2.0}, epochs[0], {"event": "skip"}, epochs[1], end]
    for count, done in ((5, False), (6, True)):  # stopped before its end, the bench goes on with it
        text = "".join(json.dumps(line) + "\n" for line in lines[:count])
        (tmp_path / "metrics.jsonl").write_text(text)
        assert train_models.done(tmp_path) == done
    row = train_models.record(tmp_path, 2.0)
    assert [line["epoch"] for line in row["epochs"]] == [1, 2] and len(row["events"]) == 1
    assert row["recipe"]["lr"] == 7e-3 and "/where/it/lies" not in json.dumps(row)


def test_a_healed_run_stands_beside_the_same_run_in_fp32(image_folder, tmp_path):
    died_and_healed.main(
        [
            "--whole",
            "--data-dir",
            str(image_folder),
            "--device",
            "cpu",
            "--seeds",
            "1",
            "--grown",
            "400",
            "--results",
            str(tmp_path),
        ]
    )
    fp32, fp16 = json.loads((tmp_path / "healed_whole_run-cpu.json").read_text())["runs"]
    assert fp32["end"]["skipped"] == 0 and fp32["end"]["healed"] == [] and len(fp32["epochs"]) == 2
    assert fp16["end"]["skipped"] >= 1 and fp16["end"]["healed"] == ["stages.0.blocks.0.attn"]
    assert {event["event"] for event in fp16["events"]} >= {"skip", "cure"}
    assert str(tmp_path) not in json.dumps(fp16)


ODD = {  # a run: how it ends, and what is said of it; "": it is healthy, and left alone
    **dict.fromkeys(
        [
            "one class",
            "same in class",
            "loss 0",
            "batch 1",
            "1 steps",
            "random labels",
            "body frozen by rate 0",
            "frozen backbone",
        ],
        ("done", ""),
    ),
    "rate 1e-30": ("diverged", "did not move: the learning rate is as good as 0"),
    "no step": ("diverged", "did not move: the learning rate is as good as 0"),
    "gradient 0 in the head": ("diverged", "the gradient of head.weight was always 0"),
    "rate 0 from step 20": ("done", "had a learning rate of 0 after step 18"),
    "frozen from step 20": (
        "done",
        "body.weight, body.bias, middle.weight and 1 more had no gradient after",
    ),
    "head in no optimizer": ("done", "head.weight was in no optimizer"),
    "no step from step 20": ("done", "did not move after step"),
    "a layer put back now and then": ("done", "middle.weight hardly left where training began"),
    "a layer moved by a millionth": ("done", "body.weight did not move at any look"),
    "noise for gradients": ("done", "hardly fallen"),
    "labels shuffled": ("done", "always the most frequent class would have 10.0 %"),
    "validation's labels shifted": ("done", "validation is far worse than training"),
    "validation exchanged": ("done", "the validation images are not those of the start"),
    "an old copy is validated": ("done", "the same scores to the last digit"),
    "an accuracy of 99 %": ("done", "counted again, have an accuracy of"),
    "a tenth of the loss": ("done", "counted again, have an accuracy of"),
    "last.pt: head x -3": ("failed", "last.pt holds another model.head.weight"),
    "last.pt: the first weights": ("failed", "last.pt holds another model."),
    "last.pt: the first moments": ("failed", "last.pt holds another optimizers."),
    "last.pt: the first average": ("failed", "last.pt holds another ema."),
    "best.pt: head x -3": ("failed", "best.pt scores"),
    "best.pt: the first weights": ("failed", "best.pt scores"),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_run_is_left_alone_or_says_that_it_learns_nothing(name):
    row = odd_runs.run(name)
    status, words = ODD[name]
    assert (row["status"], row["cures"]) == (status, [])
    assert words in "; ".join(row["said"]) and odd_runs.is_right(row)


@pytest.fixture
def gpu_args(tmp_path, monkeypatch):
    """Options of bench/gpu.py. `digest["code"]` stands for the code that is measured."""
    digest = {"code": "as it was"}
    monkeypatch.setattr(record, "code", lambda: digest["code"])
    args = record.arguments("").parse_args(["--device", "cpu", "--results", str(tmp_path)])
    return args, digest


def test_a_part_for_the_gpu_is_not_repeated_with_the_same_code(gpu_args, monkeypatch, capsys):
    args, digest = gpu_args
    end = {"code": 3}
    monkeypatch.setattr(
        gpu,
        "command",
        lambda part, args: [
            sys.executable,
            "-c",
            f"print('its last line'); raise SystemExit({end['code']})",
        ],
    )
    assert not gpu.run("models", args, 60)  # it failed, so it is run again
    end["code"] = 0
    assert gpu.run("models", args, 60)
    assert gpu.run("models", args, 0)
    assert "models: is there" in capsys.readouterr().out
    outcome = json.loads((args.results / "gpu" / "models.json").read_text())
    assert outcome["last"] == "its last line"
    digest["code"] = "changed"
    assert not gpu.run("models", args, 0)


def alive(pid):
    """Z: dead, and nobody has asked for its exit code yet."""
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().split()[2] != "Z"


GRANDCHILDREN = """
import subprocess, sys
for alone in (False, True):  # True: as torchrun starts its workers
    sleeper = subprocess.Popen(["sleep", "60"], start_new_session=alone)
    print(sleeper.pid, flush=True)
sleeper.wait()
"""


def test_a_part_that_is_timed_out_leaves_no_grandchild_running(gpu_args, monkeypatch):
    args, _ = gpu_args
    inner = [sys.executable, "-c", GRANDCHILDREN]
    outer = f"import subprocess; subprocess.run({inner!r})"
    monkeypatch.setattr(gpu, "command", lambda part, args: [sys.executable, "-c", outer])
    assert not gpu.run("models", args, 10)
    outcome = json.loads((args.results / "gpu" / "models.json").read_text())
    assert outcome["exit"] == 124
    pids = [int(line) for line in (args.results / "gpu" / "models.txt").read_text().split()]
    assert len(pids) == 2
    for pid in pids:
        for _ in range(100):  # a killed process needs a moment
            time.sleep(0.1 * alive(pid))
        assert not alive(pid)


def test_every_part_of_the_plan_exists_and_bad_samples_are_in_it(gpu_args):
    args, _ = gpu_args
    args.airbench = args.hiverge = args.data_dir = args.results
    for part in [part for parts in gpu.STAGES.values() for part in parts]:
        _, program, *words = gpu.command(part, args)
        assert (record.ROOT / "bench" / program).exists()
        assert Path(program).stem == part or words[0] in gpu_parts.PARTS
    assert {"bf16", "fp16"} <= gpu_parts.survival(args).keys()


def test_a_part_goes_on_with_the_rows_that_are_missing_or_not_well(gpu_args, monkeypatch, tmp_path):
    made = []

    def row(name, well=True):
        made.append(name)
        if not well:
            raise RuntimeError("CUDA error")
        return {"well": True}

    def call(code, **rows):
        made.clear()
        table = {name: partial(row, name, well) for name, well in rows.items()}
        monkeypatch.setitem(gpu_parts.PARTS, "steps", lambda args: table)
        with pytest.raises(SystemExit) as end:
            gpu_parts.main(["steps", "--device", "cpu", "--results", str(tmp_path)])
        assert end.value.code == code
        return made

    assert call(1, first=True, second=False, third=True) == ["first", "second", "third"]
    assert "unfinished" in json.loads((tmp_path / "gpu_steps-cpu.json").read_text())
    assert call(0, first=True, second=True, third=True) == ["second"]
    assert "unfinished" not in json.loads((tmp_path / "gpu_steps-cpu.json").read_text())
    assert call(1, first=False) == ["first"]  # what is complete is measured anew
    gpu_args[1]["code"] = "changed"
    assert call(0, first=True, second=True) == ["first", "second"]


def test_bad_samples_in_the_data_are_judged_by_what_became_of_them(monkeypatch):
    args = argparse.Namespace(device="cpu", smoke=True)
    row = gpu_parts.planted(args, "fp32", steps=80)
    assert row["well"], row
    assert row["cures"][75]["action"].startswith("back to the weights")
    args.device = "cuda"  # there each has to be met in a replay, and here is no graph
    monkeypatch.setattr(
        record,
        "train_run",
        lambda flags: (
            0,
            {"status": "done"},
            [cure | {"of_step": step} for step, cure in row["cures"].items()],
        ),
    )
    assert gpu_parts.planted(args, "fp32", steps=80)["wrong"] == ["step 70, wild"]
    del row["cures"][75]
    assert gpu_parts.planted(args, "fp32", steps=80)["wrong"][-1] == "step 75, wild"
