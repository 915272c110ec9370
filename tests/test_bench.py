"""The benches of precision, scaling and compilation run, and say what they are supposed to say."""

import json
import os
import subprocess
import sys
from pathlib import Path

from amp_policy import capabilities

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
