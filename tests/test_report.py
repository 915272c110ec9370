"""metrics.jsonl and the picture drawn from it."""

import json
import warnings

import pytest

import report


def test_a_resumed_file_is_cut_back_to_its_checkpoint_and_survives_a_half_written_line(tmp_path):
    file = report.MetricsFile(tmp_path, {"model": "x"})
    for step in range(1, 8):
        file.write(step=step, loss=1.0 / step)
    with open(file.path, "a") as stream:
        stream.write('{"step": 8, "lo')
    again = report.MetricsFile(tmp_path, {"model": "never written"}, step=5)
    again.write(step=6, loss=0.0)
    lines = [json.loads(line) for line in again.path.read_text().splitlines()]
    assert lines[0] == {"model": "x"} and [line["step"] for line in lines[1:]] == [1, 2, 3, 4, 5, 6]


def test_nan_is_written_as_a_word_and_never_left_out(tmp_path):
    file = report.MetricsFile(tmp_path, {})
    file.write(step=1, loss=float("nan"), grad_norm=float("-inf"))
    assert json.loads(file.path.read_text().splitlines()[-1]) == {"step": 1, "loss": "nan", "grad_norm": "-inf"}


def test_curves_are_drawn_with_gaps_even_when_every_step_was_skipped(tmp_path):
    for name, losses in (("some", [2.0, float("nan"), 1.0]), ("none", [float("nan")] * 3)):
        (tmp_path / name).mkdir()
        file = report.MetricsFile(tmp_path / name, {})
        for step, loss in enumerate(losses, 1):
            file.write(step=step, loss=loss, acc1=10.0, grad_norm=loss, scale=1.0)
            if loss != loss:
                file.write(event="skip", step=step, reasons=["loss"])
        picture = report.draw_curves(file.path)
        assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5000


@pytest.mark.parametrize("name, values", {
    "all bad": [float("nan"), float("inf"), float("-inf")], "dead": [0.0, 0.0, 0.0], "now and then": [0.0, 1.0, 0.0],
    "too large": [1.0, 1e38, 1e300, -1e300], "tiny": [1e-300, 5e-324, 0.0], "below zero": [-1.0, -2.0], "none": [],
}.items())
def test_a_diverged_run_is_drawn_without_a_warning(tmp_path, name, values):
    file = report.MetricsFile(tmp_path, {})
    for step, value in enumerate(values, 1):
        file.write(step=step, loss=value, acc1=value, grad_norm=value, scale=value)
        file.write(event="skip", step=step, reasons=["loss"])
    file.write(step=1, epoch=1.0, val_loss=float("nan"), val_acc1=float("nan"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert report.draw_curves(file.path).read_bytes().startswith(b"\x89PNG")


def test_a_folder_holds_a_run_from_its_first_logged_step_or_checkpoint_on(tmp_path):
    assert not report.holds_a_run(tmp_path / "missing") and not report.holds_a_run(tmp_path)
    file = report.MetricsFile(tmp_path, {"model": "x"})
    file.write(event="warning", step=0, text="left out")
    file.write(event="end", status="failed", steps=0)
    assert not report.holds_a_run(tmp_path)
    file.write(step=1, loss=1.0)
    assert report.holds_a_run(tmp_path)
    file.path.unlink()
    (tmp_path / "last.pt").touch()
    assert report.holds_a_run(tmp_path)
