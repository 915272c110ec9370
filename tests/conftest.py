import json
import os

import helpers
import pytest
import torch
from helpers import read_lines
from torchvision.transforms.v2.functional import to_pil_image

import report
import train
from amp_policy import set_tf32
from data import synthetic
from models import RECIPE
from trainer import plan

os.environ.setdefault("AUTOPSY_SHARE", "1")  # every step is recorded, however long that takes
# The first backward pass counts the devices, and starts a thread for each: under FakeTensorMode
# eight that are not there. A process with these threads cannot fork for another backward pass.
torch.ones(1, requires_grad=True).sum().backward()

# `-m quick` leaves out what is slow: these files (they start processes, or train for long), every
# test that trains through the fixture `run`, and what is marked `@pytest.mark.slow` elsewhere.
SLOW = {
    "test_bench",
    "test_campaign",
    "test_failures",
    "test_foreign",
    "test_graphs",
    "test_heal",
    "test_nodes",
    "test_readme",
    "test_resume",
    "test_time_to_accuracy",
    "test_train",
    "test_verify",
    "test_watch",
    "test_wings",
}
# Wings that these tests need: where one of them was deleted, the tests are left out.
NEEDS = {
    "rescue": ("rescue", "autopsy"),  # it responds to the verdicts of autopsy/
    "failures": ("failures", "rescue", "autopsy"),
    "bench": ("bench",),
    "bench/test_bench.py": ("rescue", "autopsy"),  # runs that are healed, runs that are watched
    "autopsy": ("autopsy",),
    "autopsy/test_autopsy.py": ("bench",),  # its tables of faulty steps and faulty scripts
    "autopsy/test_before.py": ("bench", "autopsy/before"),
    "autopsy/test_describe.py": ("bench", "autopsy/describe"),
    "autopsy/test_diagnosis.py": ("bench",),
    "autopsy/test_folder.py": ("autopsy/silent", "autopsy/before", "autopsy/describe"),
    "autopsy/test_public_reports.py": ("bench", "autopsy/silent"),
    "autopsy/test_shuffled_apart.py": ("autopsy/silent",),
    "autopsy/test_watch.py": ("bench", "autopsy/silent"),
    "autopsy/test_wild.py": ("bench",),
    "test_resume.py": ("bench",),  # what a killed run is compared with
    "test_wings.py": helpers.WINGS,
}
collect_ignore = [tests for tests, wings in NEEDS.items() if not helpers.there(*wings)]
if not helpers.FORKS:  # on Windows: what begins with os.fork, links and signals
    collect_ignore += ["test_checkpoint.py", "test_imagefolder.py", "test_nodes.py"]
LONGEST = [  # they begin, so that no core idles at the end
    "test_wings",
    "test_campaign",
    "test_watch",
    "test_resume",
    "test_nodes",
    "test_readme",
    "test_verify",
    "test_failures",
    "test_house",
    "test_train",
    "test_heal",
]


def pytest_collection_modifyitems(items):
    """Each test is marked slow or quick. The longest files come first, the quick tests last."""
    for item in items:
        file = item.path.stem
        slow = file in SLOW or "run" in item.fixturenames or "slow" in item.keywords
        item.add_marker("slow" if slow else "quick")
        begins = LONGEST.index(file) if file in LONGEST else len(LONGEST)
        item.place = begins, not slow
    items.sort(key=lambda item: item.place)


@pytest.fixture
def clean_switches():
    """Random numbers from 0; afterwards TF32, the default device and autocast are as torch's."""
    torch.manual_seed(0)
    yield
    torch.set_default_device(None)
    set_tf32(False)
    torch.backends.cudnn.allow_tf32 = True
    assert not torch.is_autocast_enabled("cpu")


@pytest.fixture
def one_rank():
    """This process is the only one of a process group."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory):
    """A miniature of CIFAR-10's folder layout: ten classes, 400 training and 100 test images."""
    folder = tmp_path_factory.mktemp("images")
    images, labels = synthetic.draw(0, 500, seed=3)
    for i, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
        split = "train" if i < 400 else "test"
        target = folder / split / f"class{label}" / f"{i:03d}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        to_pil_image(image).save(target)
    return folder


@pytest.fixture(scope="session")
def decoded(tmp_path_factory):
    """One .cache for all runs of `run`: decoding the same 500 images took a sixth of their time."""
    return tmp_path_factory.mktemp("decoded")


DEFAULTS = {
    "--model": "cifarnet-tiny",
    "--dataset": "cifar10",
    "--batch-size": "40",
    "--max-steps": "12",
    "--log-every": "1",
    "--precision": "fp32",
    "--device": "cpu",
}


@pytest.fixture
def run(image_folder, decoded, tmp_path, capsys, monkeypatch):
    """Runs train.main in this process.

    Returns exit code, the JSON of the last line, standard error, the lines of metrics.jsonl.
    """
    for draw in ("draw_curves", "draw_confusion"):  # half a second each
        monkeypatch.setattr(report, draw, lambda path: None)
    trial = plan.seconds_of
    # it is taken, and its seconds do not decide: they are other ones each time
    monkeypatch.setattr(plan, "seconds_of", lambda *args: [0.01, trial(*args)][0])
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".cache").symlink_to(decoded)  # it lies beside the run

    def go(*flags, out="run"):
        folder = tmp_path / out
        defaults = DEFAULTS | {"--data-dir": image_folder, "--out-dir": folder}
        words = [word for pair in defaults.items() for word in pair if pair[0] not in flags]
        try:
            code = train.main([str(word) for word in (*words, *flags)])
        except SystemExit as end:
            code = end.code
        printed = capsys.readouterr()
        last = printed.out.strip().splitlines()[-1] if printed.out.strip() else ""
        summary = json.loads(last) if last.startswith("{") else None
        return code, summary, printed.err, read_lines(folder / "metrics.jsonl")

    go.folder, go.images = tmp_path / "run", str(image_folder)
    return go


@pytest.fixture
def model(monkeypatch):
    """model(name, net from classes): a model of train.py. It returns the list of its networks."""

    def add(name, make, **recipe):
        nets = []

        def build(names, *_):
            nets.append(make(len(names)))
            return nets[-1]

        monkeypatch.setitem(train.MODELS, name, (build, RECIPE | {"batch_size": 40} | recipe))
        return nets

    return add


@pytest.fixture
def mlp(model):
    """The networks of the model "mlp"."""
    return model("mlp", helpers.mlp)
