"""Delete each wing with its tests, and all of them: what is left trains, and its tests pass."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from helpers import HIDDEN, ROOT, WINGS, run_ranks, run_script
from test_house import OURS, imported

pytestmark = pytest.mark.xdist_group("wings")
TESTED = {  # a wing that was deleted: the folders of tests of which something is left
    "rescue": {"autopsy", "bench"},
    "autopsy": {"bench"},
    "failures": {"autopsy", "bench", "rescue"},
    "bench": {"autopsy", "failures", "rescue"},
    "autopsy/silent": {"autopsy", "bench", "failures", "rescue"},
    "autopsy/before": {"autopsy", "bench", "failures", "rescue"},
    "autopsy/describe": {"autopsy", "bench", "failures", "rescue"},
}
COLLECT = """
import sys
import pytest
sys.exit(pytest.main(["--collect-only", "-q", "-n", "0", "-p", "no:cacheprovider"]))
"""
SHORT = (
    "--dataset",
    "synthetic",
    "--model",
    "cifarnet-tiny",
    "--batch-size",
    40,
    "--device",
    "cpu",
    "--precision",
    "bf16",
    "--log-every",
    1,
)
BAD_BATCHES = """
import sys
import torch
house = {house!r}
sys.path.insert(0, house)
import train
files = [str(getattr(module, "__file__", "")) for module in sys.modules.values()]
print(sum(file.startswith(house) for file in files))
from data import batches
healthy = batches.TrainBatches.at

def at(self, step):
    images, labels = healthy(self, step)
    return (images * torch.nan if {first} <= step < {end} else images), labels

batches.TrainBatches.at = at
sys.exit(train.main(sys.argv[1:]))
"""


def copied_without(wings, folder):
    """The house without these wings and the folders of their tests."""
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "__pycache__", "runs"))
    for wing in wings:
        shutil.rmtree(folder / wing)
        shutil.rmtree(folder / "tests" / wing, ignore_errors=True)  # silent/ and the like have none
    return folder


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    largest = [wing for wing in WINGS if "/" not in wing]
    folder = copied_without(largest, tmp_path_factory.mktemp("torn") / "house")
    assert not [*folder.glob("*/autopsy"), *folder.glob("rescue")]
    return folder


def summary(out):
    return json.loads(out.strip().splitlines()[-1])


def bad_batches(house, folder, first, end, *flags):
    folder.mkdir(exist_ok=True)
    path = folder / "script.py"
    path.write_text(BAD_BATCHES.format(house=str(house), first=first, end=end))
    code, out, _ = run_script([path, *SHORT, *flags], folder)
    return code, summary(out), int(out.splitlines()[0])


@pytest.mark.parametrize("wing", WINGS)
def test_without_one_wing_the_tests_of_the_others_are_collected_and_it_trains(wing, tmp_path):
    house = copied_without([wing], tmp_path / "house")
    (house / "collect.py").write_text(COLLECT)
    code, out, err = run_script(["collect.py"], house)
    assert code == 0, out[-3000:] + err
    assert set(re.findall(r"^tests/(\w+)/", out, re.M)) == TESTED[wing]
    if wing in ("rescue", "autopsy"):  # train.py imports no other
        words = [house / "train.py", *SHORT, "--max-steps", 4, "--out-dir", tmp_path / "run"]
        code, out, err = run_script(words, tmp_path)
        assert code == 0 and summary(out)["updates"] == 4, err


def meets_a_wing(path):
    """Does a file import a wing, or what imports one?"""
    return bool({name.split(".")[0] for name in imported(path)} & {"train", "trainer", *WINGS})


def test_only_train_and_trainer_import_a_wing():
    met = {path.relative_to(ROOT).parts[0] for path in OURS if meets_a_wing(path)}
    assert met.difference(WINGS) == {"train.py", "trainer"}


def test_the_quick_tests_of_what_is_left_pass(house):
    """But for those that import nothing of train.py, start nothing and read no file of the house:
    they cannot miss a wing, and take most of the time."""
    starts_or_reads = re.compile(r"\b(run_script|run_ranks|two_ranks|subprocess|ROOT)\b")
    apart = [
        path
        for path in house.glob("tests/test_*.py")
        if not meets_a_wing(path) and not starts_or_reads.search(path.read_text())
    ]
    assert {"test_guards.py", "test_models.py"} < {path.name for path in apart}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-n",
        "0",
        "-m",
        "quick",
        *(f"--ignore={path}" for path in apart),
    ]
    done = subprocess.run(command, cwd=house, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(done.stdout.split(" passed")[0].split()[-1]) > 300


def test_it_trains_and_goes_on_where_it_was_with_other_accumulation(house, tmp_path):
    train = [house / "train.py", *SHORT, "--resume", "auto", "--out-dir", tmp_path / "run"]
    for more in (["--max-steps", 6], ["--max-steps", 12, "--accum-steps", 2]):
        code, out, err = run_script([*HIDDEN, *train, *more], tmp_path)
        assert code == 0 and summary(out)["status"] == "done", err
    assert summary(out)["updates"] == 12


def test_two_ranks_train(house, tmp_path):
    ended = run_ranks([house / "train.py", *SHORT, "--max-steps", 4], tmp_path)
    assert [code for code, *_ in ended] == [0, 0], ended[0][2]
    assert summary(ended[0][1])["updates"] == 4


def test_bad_batches_are_skipped_and_many_in_a_row_end_the_run(house, tmp_path):
    code, last, files = bad_batches(house, tmp_path / "two", 6, 8, "--max-steps", 40)
    assert (code, last["status"], last["skipped"], last["updates"]) == (0, "done", 2, 38)
    assert files <= 35
    code, last, _ = bad_batches(house, tmp_path / "many", 6, 99, "--max-steps", 60)
    assert (code, last["status"], last["updates"]) == (3, "diverged", 6)
    assert "in a row" in last["reason"] and last["skipped"] == 25


@pytest.mark.parametrize("flags", [("--inject", "nan:grad@step=2"), ("--replay", "capsule.pt")])
def test_what_needs_a_wing_is_refused_in_one_sentence(house, tmp_path, flags):
    code, _, err = run_script([house / "train.py", *SHORT, *flags], tmp_path)
    assert code == 2 and f"{flags[0]} needs the folder rescue/" in err and "Traceback" not in err


def test_with_the_wings_a_bad_batch_is_examined(tmp_path):
    """So that what is missing above is what the wings do."""
    bad_batches(ROOT, tmp_path, 6, 8, "--max-steps", 12)
    assert [*tmp_path.glob("runs/*/bad_step_*")], os.listdir(tmp_path)
