"""The gallery: every case fails as published, is named by the guards, and trains once cured."""

import math
from pathlib import Path

import pytest
import torch
from helpers import run_script

from data import cifar10
from failures import (
    more_bf16_weights,
    opendit_modulate_kernel,
    run_all,
    through_train,
    trellis_adamw_fp16,
    vmamba_eval_nan,
)
from failures.loops import F32, Case, Outcome, show

SHORT = {  # enough steps for every claim
    vmamba_eval_nan: dict(steps=18),
    trellis_adamw_fp16: dict(steps=40),
    opendit_modulate_kernel: dict(steps=130, dtypes=(F32,)),
    through_train: dict(steps=16),
}


def name(module):
    return module.__name__.split(".")[-1]


@pytest.fixture(autouse=True)
def no_download(monkeypatch):
    monkeypatch.setattr(cifar10, "reachable", lambda *_: False)


@pytest.mark.slow
@pytest.mark.parametrize("module", run_all.FILES, ids=name)
def test_it_breaks_as_published_is_named_by_the_guards_and_trains_when_cured(module):
    made = module.case(**SHORT.get(module, {}))
    for case in made if isinstance(made, list) else [made]:
        assert case.holds, str(case)


def test_the_gallery_runs_every_file_of_its_folder():
    files = {path.stem for path in Path(run_all.__file__).parent.glob("*.py")}
    names = {name(module) for module in run_all.FILES}
    assert files - {"__init__", "loops", "run_all"} == names


def test_a_claim_that_fails_shows_in_the_exit_status_and_in_the_table(capsys):
    good, bad = Case("good"), Case("bad", [("fp16", "nan", "nothing", "nan")])
    good.claim("it holds", True)
    bad.claim("the cure trains", False)
    assert show(good) == 0 and show(good, bad) == 1
    assert "[FAILED] the cure trains" in capsys.readouterr().out
    assert run_all.markdown([("x.py", bad)]).splitlines()[-1].endswith("| **NO** |")
    assert not Case("claims nothing").holds


@pytest.mark.parametrize(
    "losses, weight, cured",
    [
        ([2.0, 1.5, 1.0, 0.5], 1.0, True),
        ([2.0, 2.0, 2.0, 2.0], 1.0, False),
        ([2.0, 1.5, 1.0, math.nan], 1.0, False),
        ([2.0, 1.5, 1.0, 0.5], math.nan, False),
    ],
)
def test_a_cure_is_a_loss_that_falls_and_weights_that_stay_finite(losses, weight, cured):
    net = torch.nn.Linear(1, 1)
    net.weight.data.fill_(weight)
    case = Case("case")
    case.row("fp16", "nan", "named", Outcome(net, losses=losses))
    assert case.holds == cured


def test_a_case_runs_alone_from_anywhere(tmp_path):
    script = Path(more_bf16_weights.__file__).resolve()
    code, out, err = run_script([script], tmp_path)
    assert code == 0, out + err
    assert "bf16 weights stand still" in out and "FAILED" not in out
