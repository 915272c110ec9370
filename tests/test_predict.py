"""predict.py: what it says of an image is what the validation said of it."""

import math
import re
import shutil
import textwrap
from pathlib import Path

import pytest

import predict


def said(monkeypatch, capsys, *words):
    """What `python predict.py WORDS` prints."""
    monkeypatch.setattr("sys.argv", ["predict.py", *map(str, words)])
    predict.main()
    return capsys.readouterr().out


def test_the_loss_of_the_predictions_is_the_validations_and_ten_lines_say_the_same(
    run, monkeypatch, capsys
):
    line = "--dataset imagefolder --image-size 64 --model resnet18 --max-steps 2 --precision bf16"
    code, last, err, _ = run(*line.split())
    assert code == 0, err
    folder, paths = run.folder, sorted(Path(run.images).glob("test/*/*"))
    answers = list(predict.predict(folder, map(str, paths)))
    both = zip(paths, answers, strict=True)
    losses = [-math.log(answer[path.parent.name]) for path, answer in both]
    assert sum(losses) / len(losses) == pytest.approx(last["val_loss"], abs=1e-4)

    path, answer = paths[77], answers[77]
    best = max(answer, key=answer.get)
    assert said(monkeypatch, capsys, folder, path) == f"{path}: {best} {answer[best]:.4g}\n"
    page = Path(predict.__file__).with_name("README.md").read_text()
    lines = re.search(r"torchvision has:\n\n((?:    .+\n)+)", page)[1]
    exec(textwrap.dedent(lines).replace("runs/a", str(folder)).replace("IMAGE", str(path)), {})
    name, chance = capsys.readouterr().out.split()
    assert name == best and float(chance) == pytest.approx(answer[best], abs=0.02)

    for words in (("nowhere", path), (folder, "nowhere")):
        with pytest.raises(SystemExit) as exit:
            said(monkeypatch, capsys, *words)
        assert exit.value.code == 2
        assert "nowhere" in capsys.readouterr().err.splitlines()[-1], "one sentence"
    copy = shutil.copy(path, folder / "copy.png")
    for damaged in (copy, folder / "best.pt", folder / "model.json"):
        damaged.write_bytes(damaged.read_bytes()[:99])
        with pytest.raises(SystemExit, match="2"):
            said(monkeypatch, capsys, folder, copy)
        assert str(damaged) in capsys.readouterr().err.splitlines()[-1], "one sentence"
