"""Which classes are confused, which images score worst, and every class counts the same."""

import pytest
import torch
from helpers import events, refused, two_ranks
from PIL import Image

import report
from models import wrap
from models.classifier import Classifier
from trainer import classes, progress
from trainer.record import Run


def test_each_class_has_its_accuracy_and_the_matrix_adds_up_to_the_score(run):
    code, _, _, lines = run("--max-steps", 20)
    (*_, kept) = events(lines, "classes")
    assert code == 0 and kept["classes"] == [f"class{i}" for i in range(10)]
    matrix = torch.tensor(kept["confusion"])
    assert matrix.sum() == 100, "every validation image once"
    score = next(line for line in lines if line.get("step") == kept["step"] and "val_acc1" in line)
    assert matrix.diagonal().sum() == round(score["val_acc1"])
    shares = 100 * matrix.diagonal() / matrix.sum(1)
    assert kept["accuracy"] == pytest.approx(shares.tolist(), abs=0.01)
    losses = [row["loss"] for row in kept["worst"]]
    assert losses == sorted(losses, reverse=True) and len(losses) == 16
    assert Image.open(run.folder / "worst.png").size == (640, 760)
    picture = report.draw_confusion(run.folder / "metrics.jsonl")
    assert Image.open(picture).width > 300


def test_two_ranks_say_of_the_classes_what_one_says(run, mlp, tmp_path, image_folder):
    flags = ("--max-steps", 8, "--adam-eps", 1e-2, "--batch-size", 40)
    *_, alone = run("--model", "mlp", *flags, out="one")
    _, both, _ = two_ranks(tmp_path, image_folder, *flags)
    one, two = (events(lines, "classes")[-1] for lines in (alone, both))
    assert one["confusion"] == two["confusion"]
    assert [row["image"] for row in one["worst"]] == [row["image"] for row in two["worst"]]


def test_odd_names_are_drawn_without_a_word(tmp_path, capfd):
    names = ["$x_", "猫 🐱", "a" * 99]
    (tmp_path / "metrics.jsonl").write_text(report.strict_json({
        "event": "classes", "step": 1, "classes": names, "confusion": [[1, 0, 2]] * 3}))
    assert report.draw_confusion(tmp_path / "metrics.jsonl").exists()
    assert capfd.readouterr() == ("", "")


def test_balanced_weights_give_a_rare_class_the_gradient_of_a_common_one():
    labels = torch.tensor([0] * 90 + [1] * 9 + [2])
    factors = classes.weights(labels, 3)
    assert (factors[labels].mean(), (factors * labels.bincount()).diff().abs().max()) == (
        pytest.approx(1), pytest.approx(0, abs=1e-5))
    net = torch.nn.Linear(4, 3)
    model, x = Classifier(net, class_weights=factors), torch.randn(100, 4)
    want = torch.nn.functional.cross_entropy(net(x), labels, weight=factors)
    torch.testing.assert_close(model(x, labels)[0], want)
    plain = Classifier(net).eval()(x, labels)[0]
    torch.testing.assert_close(model.eval()(x, labels)[0], plain)


def test_class_weights_reach_the_run_or_are_refused(run):
    assert run("--class-weights", "balanced", "--max-steps", 2)[0] == 0
    refused(run("--class-weights", "balanced", "--model", "dit-test", out="b"), "--class-weights")
    with pytest.raises(ValueError, match="numbers"):
        classes.weights(torch.rand(3), 3)
    assert wrap(torch.nn.Linear(2, 2)).class_weights is None


def test_a_log_file_gets_a_line_now_and_then(monkeypatch):
    now, said = [0.0], []
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    run = Run(total_steps=100, log=type("Log", (), {"say": lambda self, text: said.append(text)})())
    lines = progress.Lines(run)
    for run.step in range(1, 100):
        now[0] += 1.0
        lines.set_postfix({"loss": f"{run.step}", "scale": "1"})
        lines.update()
    assert said == [f"step {n} of 100, 0:0{(100 - n) // 60}:{(100 - n) % 60:02d} left  loss {n}"
                    for n in (30, 60, 90)]
