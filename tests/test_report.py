"""metrics.jsonl, the last line, and the picture drawn from it."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import needs_unix

import report

NAN, INF = math.nan, math.inf


def lines_of(file):
    return [json.loads(line, parse_constant=pytest.fail) for line in file.path.open()]


def test_a_resumed_file_is_cut_back_to_its_checkpoint_and_garbled_lines_are_left_out(tmp_path):
    file = report.MetricsFile(tmp_path, {"model": "x"})
    for step in range(1, 8):
        file.write(step=step, loss=1.0 / step)
    with open(file.path, "ab") as stream:
        stream.write(b"[" * 100_000 + b'\n[1]\n{"step": "x"}\n\xff\xfe\n{"step": 8, "lo')
    again = report.MetricsFile(tmp_path, {"model": "never written"}, step=5)
    again.write(step=6, loss=0.0)
    header, *steps = lines_of(again)
    assert header["model"] == "x" and [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert report.draw_curves(again.path).stat().st_size > 5000
    again.path.write_bytes(b"\xff garbled \x00\n" + again.path.read_bytes().partition(b"\n")[2])
    header, *steps = lines_of(report.MetricsFile(tmp_path, {"model": "y"}, step=5))
    assert header["model"] == "y" and len(steps) == 5
    again.path.write_text('{"loss": [1], "val_loss": "x"}\n{"event": "skip"}\n')
    assert report.draw_curves(again.path)
    again.path.unlink()
    os.mkfifo(again.path)  # nobody waits for its writer
    assert report.read_lines(again.path) == []


def test_what_a_killed_run_has_warned_of_stands_there_once(tmp_path):
    for _ in range(2):
        log = report.MetricsFile(
            tmp_path, {}, step=20 if (tmp_path / "metrics.jsonl").exists() else 0
        )
        log.warn(20, "hardly fallen")
        assert log.warnings == ["hardly fallen"]
    log.warn(30, "hardly fallen")
    lines = report.read_lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if "event" in line] == [20, 30]


def test_nan_is_a_word_in_every_line(tmp_path):
    file = report.MetricsFile(tmp_path, {"lr": INF})
    file.write(step=1, loss=NAN, nested={"a": [-INF], "where": Path("x")})
    header, line = lines_of(file)
    assert header["lr"] == "inf"
    assert line == {"step": 1, "loss": "nan", "nested": {"a": ["-inf"], "where": "x"}}


def test_a_number_in_a_tensor_is_written_as_a_number(tmp_path):
    file = report.MetricsFile(tmp_path, {})
    third, array = torch.tensor([1 / 3]), np.ones(2)
    file.write(step=1, loss=third, norm=np.float32(0.5), nan=torch.tensor(NAN), rest=array)
    _, line = lines_of(file)
    assert line == {"step": 1, "loss": third.item(), "norm": 0.5, "nan": "nan", "rest": "[1. 1.]"}


CLOSED = """
import os, sys, time
from report import MetricsFile, print_last, print_line
log = MetricsFile(sys.argv[1], {})
for step in range(1, 60):
    if not print_line(f"step {step}"):
        log.write(event="warning", step=step, text="closed")
    log.write(step=step, loss=1.0)
    time.sleep(0.01)
print_last({"status": "done"})
"""
LAST = '{"status": "done"}\n'


@needs_unix
@pytest.mark.parametrize(
    "pipe, out, err",
    [
        ("| head -2", "step 1\nstep 2\n", LAST),
        ("2>&1 | head -2", "step 1\nstep 2\n", ""),
        ("> /dev/full", "", LAST),
        ("> /dev/full 2> /dev/full", "", ""),
        (">&-", "", LAST),
    ],
)
def test_standard_output_that_fails_is_said_once_and_ends_nothing(tmp_path, pipe, out, err):
    script = tmp_path / "script.py"
    script.write_text(CLOSED)
    command = f"{sys.executable} {script} {tmp_path} {pipe}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        timeout=100,
        env={"PYTHONPATH": str(Path(report.__file__).parent)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, out, err)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert sum("event" in line for line in lines) == (pipe != ">&-")
    assert lines[-1] == {"step": 59, "loss": 1.0}


@pytest.mark.parametrize(
    "name, values",
    {
        "all bad": [NAN, INF, -INF, NAN],
        "dead": [0.0, 0.0],
        "too large": [1.0, 1e38, 1e300, -1e300],
        "tiny": [1e-300, 5e-324, NAN],
        "none": [],
    }.items(),
)
@pytest.mark.filterwarnings("error")
def test_a_diverged_run_is_drawn_without_a_warning(tmp_path, name, values):
    file = report.MetricsFile(tmp_path, {})
    for step, value in enumerate(values, 1):
        file.write(step=step, loss=value, acc1=value, grad_norm=value, scale=value)
        file.write(event="skip", step=step, reasons=["loss"])
    file.write(step=1, epoch=1.0, val_loss=NAN, val_acc1=NAN)
    file.write(event="save refused", step=1, tensors=["model.weight"])
    assert report.draw_curves(file.path).read_bytes().startswith(b"\x89PNG")
