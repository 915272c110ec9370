"""--init and --freeze: what fits is loaded with its normalisation, all else is new, and said so."""

import json
import shutil
import urllib.error
from types import SimpleNamespace

import pytest
import torch
import torchvision
from helpers import last_state, refused

from data import batches
from models import build
from trainer import plan, pretrained, record

CLASSES = [f"class{i}" for i in range(10)]


@pytest.fixture
def learnt(run):
    """A run folder to start from: what a run leaves behind."""
    assert run("--max-steps", 2, out="learnt")[0] == 0
    return run.folder.with_name("learnt")


def rewrite(path, change, **how):
    torch.save(change(torch.load(path, weights_only=True)), path, **how)


FORMS = {
    "best.pt": lambda folder: None,
    "last.pt": lambda folder: shutil.copy(folder / "last.pt", folder / "best.pt"),
    "old": lambda folder: rewrite(folder / "best.pt", dict, _use_new_zipfile_serialization=False),
    "wrapped": lambda folder: rewrite(
        folder / "best.pt",
        lambda state: {
            "epoch": 3,
            "state_dict": {
                f"module.{name}": t.half() if t.ndim else t for name, t in state.items()
            },
        },
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_file_loads_and_brings_its_normalisation(run, learnt, form):
    FORMS[form](learnt)
    facts = json.loads((learnt / "model.json").read_text())
    facts["mean"] = [1.0, 2.0, 3.0]
    (learnt / "model.json").write_text(json.dumps(facts))
    code, _, error, lines = run("--init", learnt / "best.pt", "--max-steps", 1)
    assert code == 0, error
    assert json.loads((run.folder / "model.json").read_text())["mean"] == [1.0, 2.0, 3.0]
    start = lines[0]["start"]
    assert len(start["loaded"]) == len(torch.load(run.folder / "best.pt", weights_only=True))
    rates = {group["lr_scale"] for group in last_state(run)["optimizers"][0]["param_groups"]}
    assert rates == {plan.SLOW}, "nothing is new"


def other_classes(folder):
    facts = json.loads((folder / "model.json").read_text())
    facts["classes"] = [f"other{i}" for i in range(10)]
    (folder / "model.json").write_text(json.dumps(facts))


def fewer_classes(folder):
    other_classes(folder)
    rewrite(
        folder / "best.pt",
        lambda state: (
            state | {name: t[:7] for name, t in state.items() if name.startswith("head.")}
        ),
    )


def no_facts(folder):
    (folder / "model.json").unlink()
    rewrite(
        folder / "best.pt",
        lambda state: {name: t for name, t in state.items() if not name.startswith("head.")},
    )


@pytest.mark.parametrize("change", [other_classes, fewer_classes, no_facts])
def test_a_head_for_other_classes_is_new_and_fitted_before_the_first_step(
    run, learnt, change, monkeypatch
):
    change(learnt)
    said = []
    monkeypatch.setattr("trainer.prepare.tqdm.write", lambda text, **_: said.append(text))
    still = ("--max-steps", 1, "--lr", 1e-9, "--freeze", "groups.*", "whiten")
    code, _, error, lines = run("--init", learnt / "best.pt", *still)
    assert code == 0, error
    assert "head.weight" not in lines[0]["start"]["loaded"]
    (line,) = [text for text in said if text.startswith("init")]
    assert "1 new: head.weight" in line and "head was fitted first" in line
    mean = json.loads((run.folder / "model.json").read_text())["mean"]
    assert (mean == pretrained.IMAGENET["mean"]) == (change is no_facts)


def test_the_fitted_head_separates_what_its_features_separate():
    net = torch.nn.Sequential(
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 3)
    )
    labels = torch.arange(60) % 3
    images = torch.randint(0, 60, (60, 3, 12, 12), dtype=torch.uint8)
    images[range(60), labels] += 100
    data = SimpleNamespace(train=(images, labels), classes="abc", image_size=8)
    stream = SimpleNamespace(normalize=batches.Normalize([80.0] * 3, [5000.0] * 3))  # tiny features
    pretrained.fit_head(record.Run(net=net, data=data, stream=stream), net[2])
    loss = torch.nn.functional.cross_entropy(net(stream.normalize(images)), labels)
    assert loss < 0.3


REFUSED = {
    "nothing fits": (
        lambda state: {"a.weight": torch.ones(3), "b": torch.ones(2)},
        ["is not for cifarnet-tiny: 0 of its 2 tensors fit", "a.weight, b"],
    ),
    "a norm": (
        lambda state: {name: t for name, t in state.items() if "groups.0.norm1" in name},
        ["is not for cifarnet-tiny: 5 of its 5 tensors"],
    ),
    "non-finite": (
        lambda state: state | {"head.weight": state["head.weight"] * torch.nan},
        ["non-finite in head.weight"],
    ),
    "no names": (lambda state: [*state.values()], ["no tensors with names"]),
    "code": (lambda state: pytest, ["best.pt is refused", "was not run"]),
    "numbers": (lambda state: {"lr": 3}, ["no tensors with names"]),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_a_file_that_cannot_begin_a_run_is_refused(run, learnt, fault):
    change, words = REFUSED[fault]
    if fault == "code":
        torch.save(shutil.rmtree, learnt / "best.pt")
    else:
        rewrite(learnt / "best.pt", change)
    refused(run("--init", learnt / "best.pt"), *words)
    assert not run.folder.exists()


@pytest.mark.parametrize(
    "path, words",
    [
        ("/nowhere.pt", "/nowhere.pt"),
        ("pretrained", "no weights for cifarnet-tiny"),
        ("/dev/zero", "not a regular file"),
    ],
)
def test_a_file_that_is_not_there_is_refused(run, path, words):
    refused(run("--init", path), words)


def test_pretrained_takes_torchvisions_weights_or_says_that_there_is_no_network(run, monkeypatch):
    theirs = torchvision.models.resnet18().state_dict()
    monkeypatch.setattr(
        torchvision.models.ResNet18_Weights,
        "get_state_dict",
        lambda self, **how: theirs if how["weights_only"] else None,
    )
    code, _, error, lines = run("--init", "pretrained", "--model", "resnet18", "--max-steps", 1)
    assert code == 0, error
    assert lines[0]["start"]["mean"] == pytest.approx(pretrained.IMAGENET["mean"])
    new = theirs.keys() - lines[0]["start"]["loaded"]
    assert new == {"conv1.weight", "fc.weight", "fc.bias"}, "images of 32 have another conv1"

    def unplugged(self, **how):
        raise urllib.error.URLError("no route")

    monkeypatch.setattr(torchvision.models.ResNet18_Weights, "get_state_dict", unplugged)
    refused(run("--init", "pretrained", "--model", "resnet18", out="b"), "no network", "--init F")


@pytest.mark.parametrize("name, theirs", [("resnet18", "resnet18"), ("swin-t", "swin_t")])
def test_weights_of_torchvision_compute_here_what_they_compute_there(name, theirs, tmp_path):
    torch.manual_seed(0)
    net = getattr(torchvision.models, theirs)(num_classes=10).eval()
    torch.save(net.state_dict(), tmp_path / "theirs.pth")
    found = pretrained.read(str(tmp_path / "theirs.pth"), name)
    ours = build(name, CLASSES, 224, 3).eval()
    ours.load_state_dict(found.tensors)
    x = torch.randn(1, 3, 224, 224)
    torch.testing.assert_close(ours(x), net(x), rtol=1e-4, atol=1e-4)
    assert found.known == pretrained.IMAGENET


def test_what_is_frozen_keeps_every_bit_its_running_statistics_too(run, learnt):
    before = torch.load(learnt / "best.pt", weights_only=True)
    flags = ("--init", learnt / "best.pt", "--freeze", "groups.0", "whit*", "--lr", 1e-2)
    code, last, error, _ = run(*flags, "--max-steps", 12)
    assert code == 0 and not last["warnings"], error
    after = torch.load(run.folder / "best.pt", weights_only=True)
    same = {name for name in before if torch.equal(before[name], after[name])}
    frozen = {name for name in before if name.startswith(("groups.0.", "whiten"))}
    assert frozen and frozen <= same
    assert {"groups.1.norm1.running_mean", "head.weight"}.isdisjoint(same)


@pytest.mark.parametrize(
    "patterns, words",
    [
        (["no.such"], "no.such matches no module"),
        (["*"], "leaves nothing to train"),
    ],
)
def test_patterns_that_freeze_nothing_or_everything_are_refused(run, patterns, words):
    refused(run("--freeze", *patterns), words)


def test_a_run_that_began_so_goes_on_without_the_file_and_not_without_the_flag(run, learnt):
    other_classes(learnt)
    flags = ("--init", learnt / "best.pt", "--freeze", "groups.0", "--max-steps", 12)
    assert run(*flags, out="whole")[0] == 0
    assert run(*flags[:-1], 5, "--ckpt-every", 5, out="half")[0] == 0
    shutil.rmtree(learnt)
    code, _, error, _ = run(*flags, "--resume", "auto", out="half")
    assert code == 0, error
    refused(run("--resume", "auto", out="half"), "init: ", "-> None")


def test_weights_and_other_data_say_which_two_ways_there_are(run, learnt):
    refused(run("--resume", learnt / "best.pt"), f"--init {learnt / 'best.pt'}")
    few = run.folder.with_name("few")
    shutil.copytree(run.images, few)
    next((few / "train" / "class0").iterdir()).unlink()
    answer = run("--data-dir", few, "--resume", "auto", out="learnt")
    refused(answer, "images: 400 -> 399", f"--init {learnt / 'best.pt'}", "as they were")
