"""The gallery: every case fails as published, is named by the guards, and trains once cured."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from data import cifar10
from failures import (
    nanovlm_masked_rows,
    opendit_modulate_kernel,
    run_all,
    through_train,
    trellis_adamw_fp16,
    vmamba_eval_nan,
)
from failures.loops import F16, F32, Case, Outcome, bare, guarded, show

SHORT = {  # enough steps for every claim
    vmamba_eval_nan: dict(steps=18),
    trellis_adamw_fp16: dict(steps=40),
    opendit_modulate_kernel: dict(dtypes=(F32,)),
    through_train: dict(steps=16),
}


@pytest.fixture(autouse=True)
def no_download(monkeypatch):
    monkeypatch.setattr(cifar10, "reachable", lambda *_: False)


@pytest.mark.slow
@pytest.mark.parametrize("module", run_all.FILES, ids=lambda module: module.__name__.split(".")[-1])
def test_it_breaks_as_published_is_named_by_the_guards_and_trains_when_cured(module):
    made = module.case(**SHORT.get(module, {}))
    for case in made if isinstance(made, list) else [made]:
        assert case.holds, str(case)


def test_the_gallery_runs_every_file_of_its_folder():
    files = {path.stem for path in Path(run_all.__file__).parent.glob("*.py")} - {"__init__", "loops", "run_all"}
    assert files == {module.__name__.split(".")[-1] for module in run_all.FILES}


@pytest.mark.parametrize("module", run_all.FILES, ids=lambda module: module.__name__.split(".")[-1])
def test_every_file_opens_with_the_same_seven_answers(module):
    told = re.findall(r"^([A-Z][a-z]+(?:,? [a-z]+)?) {2,}\S", module.__doc__, re.M)
    told = [answer for answer in told if answer != "Margin"]
    assert told == ["Reported", "First bad", "Why", "Cure", "Tried, no", "Evidence", "Run"]
    assert f"Run         python failures/{Path(module.__file__).name}" in module.__doc__


def test_a_claim_that_fails_shows_in_the_exit_status_and_in_the_table(capsys):
    good, bad = Case("good", [("fp16", "nan", "named", "trains")]), Case("bad", [("fp16", "nan", "nothing", "nan")])
    good.claim("it holds", True)
    bad.claim("the cure trains", False)
    assert show(good) == 0 and show(good, bad) == 1
    assert "[FAILED] the cure trains" in capsys.readouterr().out
    assert run_all.markdown([("x.py", bad)]).splitlines()[-1].endswith("| **NO** |")
    assert not Case("claims nothing").holds


def test_a_loss_that_does_not_fall_is_no_cure():
    net, sick = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    sick.weight.data.fill_(float("nan"))
    assert Outcome(net, losses=[2.0, 1.5, 1.0, 0.5]).trains
    assert not Outcome(net, losses=[2.0, 2.0, 2.0, 2.0]).trains
    assert not Outcome(net, losses=[2.0, 1.5, 1.0, float("nan")]).trains
    assert not Outcome(sick, losses=[2.0, 1.5, 1.0, 0.5]).trains


def test_a_row_of_runs_claims_that_the_cure_trains_and_the_weights_are_finite():
    net, sick = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    sick.bias.data.fill_(float("inf"))
    good, flat = Outcome(net, losses=[2.0, 1.0]), Outcome(net, losses=[2.0, 2.0])
    for watched, cured, holds in ((good, good, True), (Outcome(sick, losses=[2.0]), good, False), (good, flat, False)):
        case = Case("case")
        case.row("fp16", "nan", watched, cured)
        assert case.holds == holds


class Healthy(torch.nn.Linear):
    def forward(self, x, y):
        return torch.nn.functional.cross_entropy(super().forward(x).float(), y), {}


def test_a_healthy_model_is_not_blamed():
    batches = [(torch.randn(8, 3), torch.zeros(8, dtype=torch.long))] * 4
    for run in (bare(Healthy(3, 2), batches, F16, 1e-3), guarded(Healthy(3, 2), batches, F16, 1e-3)):
        assert run.trains and run.report is None and not run.skipped


def test_both_loops_train_a_copy_and_do_the_same_where_nothing_is_bad():
    net, batches = Healthy(3, 2), [(torch.randn(8, 3), torch.zeros(8, dtype=torch.long))] * 4
    before = net.weight.detach().clone()
    published, run = bare(net, batches, F32, 1e-2, clip=1.0), guarded(net, batches, F32, 1e-2, clip=1.0)
    assert torch.equal(net.weight, before) and not torch.equal(run.net.weight, before)
    torch.testing.assert_close(published.net.weight, run.net.weight)


def test_a_case_runs_alone_from_anywhere(tmp_path):
    script = Path(nanovlm_masked_rows.__file__).resolve()
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nanoVLM (a) masked rows" in done.stdout and "FAILED" not in done.stdout
