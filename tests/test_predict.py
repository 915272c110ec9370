"""predict.py: what it says of an image is what the validation said of it, or it says nothing."""

import importlib.util
import json
import math
import os
import re
import textwrap
from pathlib import Path

import pytest
import torch
from helpers import ROOT
from PIL import Image

import predict
from models import build


@pytest.fixture
def said(monkeypatch, capsys):
    """Runs `python predict.py WORDS`: exit code, standard output, lines of standard error."""

    def go(*words):
        monkeypatch.setattr("sys.argv", ["predict.py", *map(str, words)])
        code = predict.main()
        printed = capsys.readouterr()
        return code, printed.out, printed.err.splitlines()

    return go


def test_the_loss_of_the_predictions_is_the_validations_and_ten_lines_say_the_same(
    run, said, capsys
):
    line = "--dataset imagefolder --image-size 64 --model resnet18 --max-steps 2 --precision bf16"
    code, last, err, _ = run(*line.split())
    assert code == 0, err
    paths = sorted(Path(run.images).glob("test/*/*"))
    net, known = predict.load_run(run.folder)
    answers = predict.predict(net, known, [str(path) for path in paths])
    both = zip(paths, answers, strict=True)
    losses = [-math.log(answer[path.parent.name]) for path, answer in both]
    assert sum(losses) / len(losses) == pytest.approx(last["val_loss"], abs=1e-4)

    page = (ROOT / "docs" / "train.md").read_text()
    lines = re.search(r"torchvision has:\n\n((?:    .+\n)+)", page)[1]
    turned = Image.Exif()
    turned[0x0112] = 6
    with Image.open(paths[77]) as image:
        image.save(run.folder / "on its side.jpg", exif=turned)
        image.convert("L").convert("I;16").point(lambda value: value * 16).save(
            run.folder / "12 bits.png"
        )
    for path in (paths[77], run.folder / "on its side.jpg", run.folder / "12 bits.png"):
        (answer,) = predict.predict(net, known, [str(path)])
        best = max(answer, key=answer.get)
        assert said(run.folder, path) == (0, f"{path}: {best} {answer[best]:.4g}\n", [])
        code = textwrap.dedent(lines).replace("runs/a", str(run.folder))
        exec(code.replace("IMAGE", str(path)), {})
        name, number = capsys.readouterr().out.split()
        assert name == best
        assert float(number) == pytest.approx(answer[best], abs=1e-5)


# --- A run folder that cannot be trusted


@pytest.fixture
def folder(tmp_path):
    """What a run leaves behind that was not trained, and a picture."""
    net = build("cifarnet-tiny", ["a", "b", "c"], 32, 3)
    torch.save(net.state_dict(), tmp_path / "best.pt")
    facts = {
        "model": "cifarnet-tiny",
        "classes": ["a", "b", "c"],
        "regression": False,
        "channels": 3,
        "resize": 36,
        "image_size": 32,
        "mean": [120.0] * 3,
        "std": [60.0] * 3,
    }
    (tmp_path / "model.json").write_text(json.dumps(facts))
    Image.new("RGB", (50, 40), "red").save(tmp_path / "red.png")
    return tmp_path


def facts(**changes):
    """model.json with other facts; None: without this one."""

    def change(path):
        known = json.loads(path.read_text()) | changes
        known = {key: value for key, value in known.items() if value is not None}
        path.write_text(json.dumps(known))

    return "model.json", change


def weights(change):
    """best.pt with other tensors."""

    def write(path):
        torch.save(change(torch.load(path)), path)

    return "best.pt", write


def text(content):
    return "model.json", lambda path: path.write_text(content)


def instead(name, make):
    """Something else in the place of this file."""

    def change(path):
        path.unlink()
        make(path)

    return name, change


def of_each(function):
    return lambda state: {name: function(t) for name, t in state.items()}


def with_nan(state):
    state["groups.0.norm1.running_var"][0] = math.nan
    return state


def to_zero(path):
    path.symlink_to("/dev/zero")


FAULTS = {
    **{
        f"no {key}": (facts(**{key: None}), key)
        for key in (
            "model",
            "classes",
            "regression",
            "channels",
            "resize",
            "image_size",
            "mean",
            "std",
        )
    },
    "one mean": (facts(mean=[120.0]), "mean should be"),
    "deviations of 0..1": (facts(std=[0.2] * 3), "std should be"),
    "nan as mean": (facts(mean=[math.nan, 1.0, 1.0]), "mean should be"),
    "a class less": (facts(classes=["a", "b"]), "head.weight"),
    "one name for two": (facts(classes=["a", "a", "b"]), "same name"),
    "letters as classes": (facts(classes="abc"), "list of names"),
    "another model": (facts(model="resnet18"), "does not hold the resnet18"),
    "no such model": (facts(model="\x1b[31m"), "--help"),
    "a model that draws": (facts(model="dit-test"), "does not classify images"),
    "six channels": (facts(channels=6, mean=[9.0] * 6, std=[9.0] * 6), "image files have 3"),
    "sizes exchanged": (facts(image_size=36, resize=32), "at least image_size"),
    "a size beyond memory": (facts(image_size=10**6, resize=10**6), "4096"),
    "a size too small": (facts(image_size=1, resize=1), "model.json"),
    "patches that do not fit": (facts(model="swin-t", image_size=33), "multiple"),
    "truth as text": (facts(regression="no"), "true or false"),
    "cut": (text('{"model": "cifar'), "damaged"),
    "a list": (text("[]"), "describes no model"),
    "nested": (text("[" * 10**5), "damaged"),
    "long": (text(" " * 2**25), "too long"),
    **{
        f"{name} {kind}": (instead(name, make), "not a regular file")
        for name in ("model.json", "best.pt")
        for kind, make in (("pipe", os.mkfifo), ("endless", to_zero))
    },
    "no weights": (("best.pt", Path.unlink), "No such file"),
    "half the weights": (("best.pt", lambda path: os.truncate(path, 9000)), "damaged"),
    "nan": (weights(with_nan), "non-finite in groups.0.norm1.running_var"),
    "outputs of nan": (weights(of_each(lambda t: t * 10**18)), "outputs are non-finite"),
    "complex": (weights(of_each(lambda t: t * (1 + 0j))), "dtype"),
    "a list of weights": (weights(lambda state: [*state.values()]), "does not hold"),
    "one more": (weights(lambda state: state | {7: 3}), "7"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_run_that_cannot_be_trusted_gives_a_sentence_and_no_answer(folder, said, name):
    (file, plant), words = FAULTS[name]
    plant(folder / file)
    code, out, err = said(folder, folder / "red.png")
    assert (code, out, len(err)) == (2, "", 1)
    assert err[0].startswith("predict.py: ")
    assert words in err[0]
    assert err[0].isprintable()


BAD_IMAGES = {
    "gone": lambda path: None,
    "empty": Path.touch,
    "pipe": os.mkfifo,
    "endless": to_zero,
    "225 megapixels": lambda path: Image.new("1", (15_000, 15_000)).save(path),
    "fractions": lambda path: Image.new("F", (40, 40), 0.5).save(path, "TIFF"),
    "32 bits": lambda path: Image.new("I", (40, 40), 2**30).save(path, "TIFF"),
    "a program": lambda path: Image.new("RGB", (40, 40)).save(path, "EPS"),
    "esc \x1b[31m\n": Path.touch,
}


def test_an_image_without_an_answer_is_named_and_the_others_get_theirs(folder, said):
    for name, make in BAD_IMAGES.items():
        make(folder / f"{name}.png")
    bad = [folder / f"{name}.png" for name in BAD_IMAGES]
    code, out, err = said(folder, *bad, folder / "red.png")
    assert code == 2
    assert out.startswith(f"{folder / 'red.png'}: ")
    assert len(err) == len(bad)
    assert any("PostScript is a program" in line for line in err)
    for name, line in zip(BAD_IMAGES, err, strict=True):
        shown = name.replace("\x1b", r"\x1b").replace("\n", " ")
        assert line.startswith(f"predict.py: {folder}/{shown}.png: ")
        assert line.isprintable()


def test_a_folder_is_read_in_order_in_batches_and_as_json(folder, said, monkeypatch):
    (folder / "in/b").mkdir(parents=True)
    (folder / "in/.hidden").mkdir()
    for i, name in enumerate(["2.png", "b/1.jpg", "1.png", ".hidden/3.png", "notes.txt"]):
        Image.new("RGB", (40, 40), (80 * i, 0, 0)).save(folder / "in" / name, "PNG")
    (folder / "in/3.png").write_bytes(b"")
    alone = [said(folder, folder / "in" / name)[1] for name in ("1.png", "2.png", "b/1.jpg")]
    monkeypatch.setattr(predict, "BATCH", 2)
    code, out, err = said(folder, folder / "in")
    assert (code, out, len(err)) == (2, "".join(alone), 1)
    code, out, _ = said(folder, folder / "in", "--json", "--top", 2)
    lines = [json.loads(line) for line in out.splitlines()]
    assert [Path(line["path"]).name for line in lines] == ["1.png", "2.png", "3.png", "1.jpg"]
    assert "error" in lines[2] and "answer" not in lines[2]
    chances = [*lines[0]["answer"].values()]
    assert chances == sorted(chances, reverse=True) and len(chances) == 2
    (folder / "empty").mkdir()
    assert said(folder, folder / "empty")[2] == [
        f"predict.py: {folder / 'empty'}: no image is in this folder"
    ]


def test_the_lines_of_the_page_export_a_network_that_computes_the_same(folder):
    page = (ROOT / "docs" / "train.md").read_text()
    lines = textwrap.dedent(re.search(r"ONNX:\n\n((?:    .+\n)+)", page)[1])
    lines = lines.replace("runs/a", str(folder))
    whole, names = lines.splitlines(), {}
    onnx = importlib.util.find_spec("onnxscript")
    exec("\n".join(line for line in whole if onnx or "onnx" not in line), names)
    image = torch.rand(1, 3, 32, 32)
    want = names["net"](image)
    saved = torch.export.load(folder / "model.pt2").module()
    torch.testing.assert_close(saved(image), want, atol=1e-5, rtol=1e-4)


def test_names_of_classes_and_files_give_a_terminal_no_orders(folder, said):
    names = ["\x1b[31mred\x07", "a\nb: 1", "\ud800\u202e"]
    facts(classes=names)[1](folder / "model.json")
    path = (folder / "red.png").rename(folder / "\x1b]0;title\x07\udcff.png")
    code, out, err = said(folder, path)
    assert (code, err) == (0, [])
    assert out[:-1].isprintable()
    assert out.endswith("\n")


def test_a_regression_says_all_its_numbers_and_a_closed_output_ends_it(folder, said, monkeypatch):
    facts(regression=True)[1](folder / "model.json")
    _, out, _ = said(folder, folder / "red.png")
    assert re.fullmatch(r".*: a \S+, b \S+, c \S+\n", out)
    monkeypatch.setattr(predict, "print_line", lambda line, write: False)
    code, _, err = said(folder, folder / "red.png", folder / "red.png")
    assert code == 2
    assert "standard output is closed" in err[0]
