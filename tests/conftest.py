import functools
import inspect
import json
import re
from pathlib import Path

import pytest
import torch
from torchvision.transforms.v2.functional import to_pil_image

import amp_policy
import report
import train
from data import synthetic
from models import RECIPE

HERE = str(Path(__file__).parent)
LONG = re.compile(r"\bsubprocess\.|\bspawn\(|\bfork\(|\btrain\.main\(")


@functools.cache
def look(thing):
    """Whether it starts a process or runs train.py itself, and the helpers and fixtures of ours that it names."""
    source = inspect.getsource(thing)
    known = {**globals(), **vars(inspect.getmodule(thing))}
    named = [inspect.unwrap(known[word]) for word in re.findall(r"\w+", source) if callable(known.get(word))]
    named = {x for x in named if inspect.isfunction(x) or inspect.isclass(x)}
    ours = {x for x in named if str(getattr(inspect.getmodule(x), "__file__", "")).startswith(HERE)}
    return bool(LONG.search(source)), ours


def is_long(thing, seen):
    """The same of a test, with all that it leads to."""
    seen.add(thing)
    long, named = look(thing)
    return long or any(is_long(helper, seen) for helper in named - seen)


def pytest_itemcollected(item):
    """`-m quick` takes every test that starts no process, does not run train.py and is not marked slow (over 5 s)."""
    if not item.get_closest_marker("slow") and not is_long(inspect.unwrap(item.function), set()):
        item.add_marker("quick")


def pytest_collection_modifyitems(items):
    """The long ones first: no process shall wait at the end while another one's last test takes minutes."""
    items.sort(key=lambda item: item.get_closest_marker("quick") is not None)


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory):
    """A miniature of CIFAR-10's folder layout: ten classes, 400 training and 100 test images, written as PNG."""
    folder = tmp_path_factory.mktemp("images")
    images, labels = synthetic.draw(0, 500, seed=3)
    for i, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
        target = folder / ("train" if i < 400 else "test") / f"class{label}" / f"{i:03d}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        to_pil_image(image).save(target)
    return folder


@pytest.fixture(scope="session")
def decoded(tmp_path_factory):
    """One .cache for all runs of `run`: decoding the same 500 images each time took a sixth of their time."""
    return tmp_path_factory.mktemp("decoded")


@pytest.fixture
def run(image_folder, decoded, tmp_path, capsys, monkeypatch):
    """Runs train.main in this process: (exit code, the JSON of the last line, standard error, metrics lines)."""

    monkeypatch.setattr(report, "draw_curves", lambda path: None)  # half a second each
    monkeypatch.setattr(amp_policy, "stopwatch", lambda *args: (1.0, 1.0))  # half a second, and another one each time
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".cache").symlink_to(decoded)  # it lies beside the run

    def go(*flags, out="run"):
        folder = tmp_path / out
        flags = [str(flag) for flag in flags]
        for flag, value in {"--model": "cifarnet-tiny", "--dataset": "cifar10", "--data-dir": str(image_folder),
                            "--batch-size": "40", "--max-steps": "12", "--log-every": "1", "--precision": "fp32",
                            "--device": "cpu", "--out-dir": str(folder)}.items():
            if flag not in flags:
                flags += [flag, value]
        try:
            code = train.main(flags)
        except SystemExit as exit:
            code = exit.code
        printed = capsys.readouterr()
        last = printed.out.strip().splitlines()[-1] if printed.out.strip() else ""
        metrics = folder / "metrics.jsonl"
        lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        return code, json.loads(last) if last.startswith("{") else None, printed.err, lines

    go.folder, go.images = tmp_path / "run", str(image_folder)
    return go


@pytest.fixture
def mlp(monkeypatch):
    """A network without BatchNorm, whose gradient does not depend on how the batch is cut; its instances are listed."""
    nets = []

    def build(names, size):
        nets.append(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 32), torch.nn.GELU(),
                                        torch.nn.Linear(32, len(names))))
        return nets[-1]

    monkeypatch.setitem(train.MODELS, "mlp", (build, RECIPE | {"batch_size": 40}))
    return nets
