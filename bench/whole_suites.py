"""
Whole suites of torch, timm, accelerate and Lightning, with our optimizers and our loss scaler in
the place of torch's.

    python bench/whole_suites.py --checkouts FOLDER --of "torch 2.14.1, timm 1.0.28, ..."

It fetches nothing. FOLDER holds a checkout of each, of the tag that is installed, under the names
of SUITES: `git clone --depth 1 --branch v2.14.1 https://github.com/pytorch/pytorch FOLDER/torch`,
huggingface/pytorch-image-models as timm, huggingface/accelerate, Lightning-AI/pytorch-lightning as
lightning. Install them, transformers, pytest, pytest-rerunfailures, expecttest, hypothesis and
parameterized. A test of the last two suites that starts fresh processes is left out: they would not
exchange.

Each suite runs twice, in processes of their own: as it is, and with names exchanged in torch (this
file is the pytest plugin that does it). A test counts if it passes as it is and makes one of ours
when exchanged. A test that does not apply stands under its reason: REASONS maps what the failure
says to it. tests/test_contract.py is the part that always runs.

Not here: safetensors (no test of it makes an optimizer), torch's test_swa_utils.py and timm's
test_models.py. The last two ask for an interface that extras/ema.py and models/ do not have.
"""

import functools
import importlib
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from amp_policy import LossScaler
from bench import record
from extras.muon import Muon
from optim import ClippedAdamW

SUITES = {  # name: folder, files in it, tests (pytest -k), what is exchanged
    "torch, optimizers": ("torch/test", "test_optim.py", "AdamW or Muon", "AdamW Muon"),
    "torch, schedulers": ("torch/test/optim", "test_lrscheduler.py", "", "AdamW SGD"),
    "torch, loss scaling": ("torch/test", "test_torch.py", "grad_scal", "AdamW GradScaler"),
    "timm, optimizers": ("timm/tests", "test_optim.py", "adam", "Adam AdamW"),
    "timm, schedulers": ("timm/tests", "test_scheduler.py", "", "AdamW SGD"),
    "accelerate": (
        "accelerate/tests",
        "test_optimizer.py test_scheduler.py test_grad_sync.py test_accelerator.py test_cpu.py "
        "test_state_checkpointing.py test_kwargs_handlers.py",
        "", "Adam AdamW SGD",
    ),
    "Lightning, Trainer": (
        "lightning/tests/tests_pytorch",
        "trainer/optimization trainer/test_trainer.py loops plugins core checkpointing tuner "
        "callbacks models/test_hooks.py models/test_restore.py",
        "not ddp and not spawn and not spike and not scale_batch_size",
        "Adam AdamW SGD GradScaler",
    ),
    "Lightning, Fabric": (
        "lightning/tests/tests_fabric",
        "plugins strategies utilities/test_optimizer.py test_fabric.py test_wrappers.py",
        "not ddp and not integration and not collective", "Adam AdamW SGD GradScaler",
    ),
}  # fmt: skip
REASONS = {  # what a failure says: why the test does not apply
    r"Muon.__init__\(\) got an unexpected": "Muon: a constant norm, fixed coefficients",
    "a parameter with gaps in memory": "refused: the kernel would write beside the slice",
    "lose small updates|never decays with": "half weights need masters=True",
    "`fused` and `foreach`|`fused` does not support": "refused beside fused=True, in torch too",
    "floating point Tensors": "complex, meta: refused by the fused kernel, in torch too",
    "LossScaler needs 1 <= floor": "a loss scale above 2^24 is refused",
    "No warning should be raised": "a step without any gradient so far warns",
    "KeyError: 'momentum": "AdamW has no momentum",
    "'NoneType' object is not iter": "Muon: asked for errors without parameters",
    r"== \{'lr': 0.1": "the test lists the settings of torch's SGD",
    "must be torch.device, not Mock": "the test gives no device but a Mock",
}
MADE = multiprocessing.RawValue("i")  # how many of ours; forked processes count here, too


class AdamW(ClippedAdamW):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, clip=None, **kwargs)


class Adam(AdamW):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, **kwargs):
        super().__init__(params, lr, betas, eps, weight_decay, **kwargs)


class SGD(AdamW):
    def __init__(self, params, lr=1e-3, momentum=0.0, **kwargs):
        super().__init__(params, lr=lr)


def counted(cls):
    """cls, which now counts what is made of it."""
    plain = cls.__init__

    @functools.wraps(plain)
    def init(self, *args, **kwargs):
        MADE.value += 1
        plain(self, *args, **kwargs)

    cls.__init__ = init
    return cls


def pytest_configure(config):
    """Exchange names in torch, before a test is imported."""
    for name in os.environ["EXCHANGED"].split():
        if name == "GradScaler":
            torch.amp.GradScaler = torch.GradScaler = counted(LossScaler)
        else:
            ours = {"Adam": Adam, "AdamW": AdamW, "SGD": SGD, "Muon": Muon}[name]
            setattr(torch.optim, name, counted(ours))
    importlib.import_module("torch._dynamo")  # reads the files of all modules; that has none

    sys.path.remove(str(Path(__file__).parents[1]))
    if Path("optim").is_dir():  # torch's tests have a package of that name
        del sys.modules["optim"]


@pytest.fixture(autouse=True)
def count(record_property):
    before = MADE.value
    yield
    record_property("made", MADE.value - before)


def outcomes(suite, exchanged, checkouts):
    """{test: (what it said, how many of ours it made)}; it says "" if it passed, "skipped", or the
    head of its error."""
    folder, files, tests, _ = SUITES[suite]
    with tempfile.TemporaryDirectory() as out:
        words = [sys.executable, "-m", "pytest", "-q", "-p", "whole_suites", "--tb=no",
                 *files.split(), "-k", tests, f"--junitxml={out}/all.xml"]  # fmt: skip
        paths = [str(Path(__file__).parent), str(checkouts / "torch" / "test")]
        env = os.environ | {"EXCHANGED": exchanged, "PYTHONPATH": os.pathsep.join(paths)}
        subprocess.run(words, cwd=checkouts / folder, env=env)
        found = {}
        for case in ElementTree.parse(f"{out}/all.xml").iter("testcase"):
            errors = [
                child.get("message") or child.tag
                for child in case
                if child.tag in ("failure", "error")
            ]
            skipped = "skipped" if case.find("skipped") is not None else ""
            said = errors[0][:200] if errors else skipped
            made = sum(int(one.get("value")) for one in case.iterfind(".//property[@name='made']"))
            found[f"{case.get('classname')}.{case.get('name')}"] = said, made
    return found


def main(argv=None):
    parser = record.arguments(__doc__, device="cpu")
    parser.add_argument("--checkouts", type=Path, required=True)
    parser.add_argument("--of", required=True, help="the versions of the checkouts")
    args = parser.parse_args(argv)
    head = record.begin("whole_suites", args, "suites", "tests")
    for name, (*_, exchanged) in SUITES.items():
        plain = outcomes(name, "", args.checkouts.resolve())
        found = {
            test: said
            for test, (said, made) in outcomes(name, exchanged, args.checkouts.resolve()).items()
            if plain[test][0] == "" and made
        }
        head["tests"][name] = {test: said for test, said in found.items() if said}
        reasons = Counter()
        for said in filter(None, found.values()):
            known = [why for pattern, why in REASONS.items() if re.search(pattern, said)]
            reasons[known[0] if known else "FAILED"] += 1
        row = head["suites"][name] = {
            "run": len(found), "pass": [*found.values()].count(""),
            "failed": reasons.pop("FAILED", 0), "does not apply": reasons,
        }  # fmt: skip
        print(f"{name:20} run {row['run']:4}  pass {row['pass']:4}  failed {row['failed']}")
        for why, count in reasons.items():
            print(f"{'':20} {count:3} do not apply: {why}", flush=True)
    record.write(head, args, samples=("tests",))


if __name__ == "__main__":
    main()
