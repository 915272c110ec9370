"""metrics.jsonl and the picture drawn from it."""

import json
import math
import sys
import warnings
from types import SimpleNamespace

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


def figures(**changes):
    """Forty ordinary tensors, t0 ... t39; changes: name -> the figures that differ."""
    ordinary = {f"t{i}": {"grad_norm": 0.1 + 0.01 * i, "weight_norm": 2.0 + i, "update_ratio": 1e-3 + 1e-5 * i}
                for i in range(40)}
    return ordinary | {name: ordinary[name] | change for name, change in changes.items()}


def looks(folder, *some):
    file = report.MetricsFile(folder, {})
    for step, figures in enumerate(some, 1):
        file.tensors(step, figures)
    return [json.loads(line, parse_constant=pytest.fail)["tensors"] for line in file.path.read_text().splitlines()[1:]]


def test_planted_tensors_that_stand_out_are_named_and_the_rest_is_not(tmp_path):
    planted = {"t31": {"grad_norm": math.nan}, "t7": {"weight_norm": math.inf}, "t12": {"grad_norm": 0.0},
               "t20": {"update_ratio": 0.9}, "t3": {"grad_norm": 1e-6}}
    named, = looks(tmp_path, figures(**planted))
    assert set(named) == set(planted) and set([*named][:2]) == {"t31", "t7"} and [*named][2:] == ["t12", "t3", "t20"]
    assert named["t31"] == {"grad_norm": "nan", "weight_norm": 33.0, "update_ratio": 0.00131, "figure": "grad_norm",
                            "decades": "inf", "change": None}
    assert [named[n]["figure"] for n in ("t7", "t12", "t20")] == ["weight_norm", "grad_norm", "update_ratio"]
    far = math.log10(0.9 / 1.2e-3)
    assert named["t12"]["decades"] == -99 and named["t20"]["decades"] == pytest.approx(far, abs=0.01)


def test_a_planted_jump_of_the_weights_is_named_beside_five_that_stand_out_more(tmp_path):
    odd = {f"t{i}": {"grad_norm": 1e-5} for i in range(5)}
    first, second, third = looks(tmp_path, figures(**odd), figures(t33={"weight_norm": 700.0}, **odd),
                                 figures(t33={"weight_norm": 700.0}, **odd))
    assert set(first) == set(odd) == set(third) and set(second) == {"t33", *odd}
    assert second["t33"]["figure"] == "weight_norm" and second["t33"]["weight_norm"] == 700
    assert second["t33"]["change"] == pytest.approx(math.log10(700 / 35), abs=0.01)
    assert all(abs(entry["change"]) < 0.01 for entry in third.values())


def test_biases_that_leave_zero_make_no_other_tensor_jump(tmp_path):
    born = {f"t{i}": {"weight_norm": 0.0, "update_ratio": math.inf} for i in range(22)}
    small = {f"t{i}": {"weight_norm": 1e-3, "update_ratio": 0.05} for i in range(22)}
    first, second = looks(tmp_path, figures(**born), figures(**small))
    assert len(first) == len(second) == 5


def test_a_gradient_that_dies_has_jumped_and_what_moves_every_tensor_has_not(tmp_path):
    odd = {f"t{i}": {"grad_norm": 0.0} for i in range(6)}
    warm = {name: {f: 30 * v for f, v in values.items()} for name, values in figures(**odd).items()}
    dies = figures(t38={"grad_norm": 0.0}, **odd)
    skipped = {name: values | {"update_ratio": 0.0} for name, values in figures(**odd).items()}
    named = looks(tmp_path, figures(**odd), warm, dies, figures(**odd), skipped, figures(**odd))
    assert ["t38" in some for some in named] == [False, False, True, False, False, False]
    assert [len(some) for some in named] == [5, 5, 6, 5, 5, 5]


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_a_look_at_nothing_and_at_nothing_but_bad_figures_is_written(tmp_path, bad):
    one = {"only": {"grad_norm": bad, "weight_norm": bad, "update_ratio": bad}}
    assert [len(some) for some in looks(tmp_path, {}, one, figures(), one)] == [0, 0, 5, 0]


def test_the_board_gets_every_figure_and_the_picture_its_panel(tmp_path, monkeypatch):
    told, drawn = [], []
    board = SimpleNamespace(add_scalar=lambda *args: told.append(args))
    stub = SimpleNamespace(SummaryWriter=lambda folder, purge_step: board)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stub)
    file = report.MetricsFile(tmp_path, {}, tensorboard=True)
    file.tensors(1, figures())
    file.tensors(100, figures(t9={"grad_norm": math.nan}, t8={"grad_norm": 0.0}, t7={"weight_norm": 9e9}))
    assert len(told) == 2 * 40 * 3 and ("weight_norm/t7", 9e9, 100) in told
    plot = report_axes().plot
    monkeypatch.setattr(report_axes(), "plot", lambda axis, x, y, label, **style: (
        drawn.append((label, x, y)), plot(axis, x, y, label=label, **style)))
    report.draw_curves(file.path)
    assert {("t9 grad_norm", (100,), (6.0,)), ("t8 grad_norm", (100,), (-6.0,))} < set(drawn)
    assert "t7 weight_norm" in {label for label, _, _ in drawn} and len(drawn) <= 10


def report_axes():
    from matplotlib.axes import Axes

    return Axes
