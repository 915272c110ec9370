"""metrics.jsonl and the picture drawn from it."""

import json

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
