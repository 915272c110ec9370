"""
Whole suites of torch and timm, with our optimizers and our loss scaler in the place of torch's.

    python bench/whole_suites.py --torch FOLDER --timm FOLDER --of "torch 2.14.1, timm 1.0.31"

It fetches nothing. FOLDER is a checkout of the tag that is installed (`git clone --depth 1 --branch
v2.14.1 https://github.com/pytorch/pytorch`, `--branch v1.0.31
https://github.com/huggingface/pytorch-image-models`). Install pytest, expecttest, hypothesis and
timm. Each suite runs in a process of its own, which first exchanges names in torch: this file is
the pytest plugin that does it. A test that does not apply stands under its reason: REASONS maps
what the failure says to it. tests/test_contract.py is the part that always runs.
"""

import importlib
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from amp_policy import LossScaler
from bench import record
from extras.muon import Muon
from optim import ClippedAdamW

SUITES = {  # name: checkout, file, tests (pytest -k), what is exchanged
    "torch, optimizers": ("torch", "test/test_optim.py", "AdamW or Muon", "AdamW Muon"),
    "torch, schedulers": ("torch", "test/optim/test_lrscheduler.py", "", "AdamW SGD"),
    "torch, loss scaling": ("torch", "test/test_torch.py", "grad_scal", "AdamW GradScaler"),
    "timm, optimizers": ("timm", "tests/test_optim.py", "adamw", "AdamW"),
    "timm, schedulers": ("timm", "tests/test_scheduler.py", "", "AdamW SGD"),
}
REASONS = {  # what a failure says: why the test does not apply
    "is no matrix or all zero": "Muon takes no vectors (nor does torch's)",
    r"Muon.__init__\(\) got an unexpected": "Muon: a constant norm, fixed coefficients",
    "a parameter with gaps in memory": "refused: the kernel would write beside the slice",
    "lose small updates|never decays with": "half weights need masters=True",
    "`fused` and `foreach`|`fused` does not support": "refused beside fused=True, in torch too",
    "floating point Tensors": "complex, meta: refused by the fused kernel, in torch too",
    "LossScaler needs 1 <= floor": "a loss scale above 2^24 is refused",
    "No warning should be raised": "a step without any gradient so far warns",
    "KeyError: 'momentum": "AdamW has no momentum",
    "argument 'verbose'|'NoneType' object is not iter": "the test is of another version of torch",
}


class AdamW(ClippedAdamW):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, clip=None, **kwargs)


class SGD(AdamW):
    def __init__(self, params, lr=1e-3, momentum=0.0, **kwargs):
        super().__init__(params, lr=lr)


def pytest_configure(config):
    """Exchange names in torch, before a test is imported."""
    for name in os.environ["EXCHANGED"].split():
        if name == "GradScaler":
            torch.amp.GradScaler = torch.GradScaler = LossScaler
        else:
            setattr(torch.optim, name, {"AdamW": AdamW, "SGD": SGD, "Muon": Muon}[name])
    importlib.import_module("torch._dynamo")  # reads the files of all modules; that has none

    sys.path.remove(str(Path(__file__).parents[1]))
    del sys.modules["optim"]  # torch's tests have a package of that name


def failures(file, tests, exchanged, folder):
    """{test: "" if it passed, "skipped", or the head of its error} of one suite."""
    with tempfile.TemporaryDirectory() as out:
        words = [sys.executable, "-m", "pytest", "-q", "-p", "whole_suites", "--tb=no", file.name,
                 "-k", tests, f"--junitxml={out}/all.xml"]  # fmt: skip
        paths = f"{Path(__file__).parent}{os.pathsep}{folder / 'test'}"
        env = os.environ | {"EXCHANGED": exchanged, "PYTHONPATH": paths}
        subprocess.run(words, cwd=(folder / file).parent, env=env)
        found = {}
        for case in ElementTree.parse(f"{out}/all.xml").iter("testcase"):
            said = [child.get("message") or child.tag for child in case
                    if child.tag in ("failure", "error")]
            skipped = "skipped" if case.find("skipped") is not None else ""
            name = f"{case.get('classname')}.{case.get('name')}"
            found[name] = said[0][:200] if said else skipped
    return found


def main(argv=None):
    parser = record.arguments(__doc__, device="cpu")
    parser.add_argument("--torch", type=Path, required=True)
    parser.add_argument("--timm", type=Path, required=True)
    parser.add_argument("--of", required=True, help="the versions of the two checkouts")
    args = parser.parse_args(argv)
    head = record.begin("whole_suites", args, "suites", "tests")
    for name, (checkout, file, tests, exchanged) in SUITES.items():
        found = failures(Path(file), tests, exchanged, getattr(args, checkout))
        head["tests"][name] = {test: said for test, said in found.items() if said}
        reasons = Counter()
        for said in found.values():
            if said not in ("", "skipped"):
                known = [why for pattern, why in REASONS.items() if re.search(pattern, said)]
                reasons[known[0] if known else "FAILED"] += 1
        ran = [said for said in found.values() if said != "skipped"]
        row = head["suites"][name] = {
            "run": len(ran), "pass": ran.count(""), "failed": reasons.pop("FAILED", 0),
            "does not apply": reasons,
        }  # fmt: skip
        print(f"{name:20} run {row['run']:4}  pass {row['pass']:4}  failed {row['failed']}")
        for why, count in reasons.items():
            print(f"{'':20} {count:3} do not apply: {why}", flush=True)
    record.write(head, args, samples=("tests",))


if __name__ == "__main__":
    main()
