"""Which classes are confused, which images score worst, and every class counts the same."""

from types import SimpleNamespace

import pytest
import torch
from helpers import events, refused, two_ranks
from PIL import Image

import report
from models import wrap
from models.classifier import Classifier
from report import draw_confusion  # the fixture `run` replaces report's own
from trainer import classes, progress
from trainer.record import Run


def test_each_class_has_its_accuracy_and_the_matrix_adds_up_to_the_score(run):
    code, _, _, lines = run("--max-steps", 20)
    assert code == 0
    kept = events(lines, "classes")[-1]
    assert kept["classes"] == [f"class{i}" for i in range(10)]

    matrix = torch.tensor(kept["confusion"])
    right = matrix.diagonal()
    assert matrix.sum() == 100, "every validation image once"
    of_step = [line for line in lines if line.get("step") == kept["step"]]
    score = next(line["val_acc1"] for line in of_step if "val_acc1" in line)
    assert right.sum() == round(score)
    shares = 100 * right / matrix.sum(1)
    assert kept["accuracy"] == pytest.approx(shares.tolist(), abs=0.01)

    losses = [row["loss"] for row in kept["worst"]]
    assert len(losses) == 16
    assert losses == sorted(losses, reverse=True)
    assert Image.open(run.folder / "worst.png").size == (640, 760)
    picture = draw_confusion(run.folder / "metrics.jsonl")
    assert Image.open(picture).width > 300


def test_two_ranks_say_of_the_classes_what_one_says(run, mlp, tmp_path, image_folder):
    flags = ("--max-steps", 8, "--adam-eps", 1e-2, "--batch-size", 40)
    _, _, _, alone = run("--model", "mlp", *flags, out="one")
    _, both, _ = two_ranks(tmp_path, image_folder, *flags)

    one = events(alone, "classes")[-1]
    two = events(both, "classes")[-1]
    assert one["confusion"] == two["confusion"]
    for ours, theirs in zip(one["worst"], two["worst"], strict=True):
        assert ours["image"] == theirs["image"]


def test_odd_names_are_drawn_without_a_word(tmp_path, capfd):
    line = {
        "event": "classes",
        "step": 1,
        "classes": ["$x_", "猫 🐱", "a" * 99],
        "confusion": [[1, 0, 2]] * 3,
    }
    (tmp_path / "metrics.jsonl").write_text(report.strict_json(line))
    assert draw_confusion(tmp_path / "metrics.jsonl").exists()
    assert capfd.readouterr() == ("", "")


def test_balanced_weights_give_a_rare_class_the_gradient_of_a_common_one():
    labels = torch.tensor([0] * 90 + [1] * 9 + [2])
    factors = classes.weights(labels, 3)
    of_samples = factors[labels]
    assert of_samples.mean() == pytest.approx(1)
    of_class = factors * labels.bincount()
    torch.testing.assert_close(of_class, of_class[[0, 0, 0]], rtol=0, atol=1e-5)

    net = torch.nn.Linear(4, 3)
    weighted = Classifier(net, class_weights=factors)
    x = torch.randn(100, 4)
    loss, _ = weighted(x, labels)
    want = torch.nn.functional.cross_entropy(net(x), labels, weight=factors)
    torch.testing.assert_close(loss, want)

    evaluated, _ = weighted.eval()(x, labels)
    plain, _ = Classifier(net).eval()(x, labels)
    torch.testing.assert_close(evaluated, plain)


def test_class_weights_reach_the_run_or_are_refused(run):
    code, *_ = run("--class-weights", "balanced", "--max-steps", 2)
    assert code == 0

    ended = run("--class-weights", "balanced", "--model", "dit-test", out="b")
    refused(ended, "--class-weights")

    numbers = torch.rand(3)
    with pytest.raises(ValueError, match="numbers"):
        classes.weights(numbers, 3)

    plain = wrap(torch.nn.Linear(2, 2))
    assert plain.class_weights is None


def test_a_log_file_gets_a_line_now_and_then(monkeypatch):
    said = []
    run = Run(total_steps=100, log=SimpleNamespace(say=said.append))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(run.step))  # a second a step
    run.step = 0

    lines = progress.Lines(run)
    for run.step in range(1, 100):
        lines.set_postfix({"loss": f"{run.step}", "scale": "1"})
        lines.update()

    assert said == [
        "step 30 of 100, 0:01:10 left  loss 30",
        "step 60 of 100, 0:00:40 left  loss 60",
        "step 90 of 100, 0:00:10 left  loss 90",
    ]
