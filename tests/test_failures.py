"""The gallery: every case fails as published, is named by the guards, and trains once cured."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from data import cifar10
from failures import (
    more_of_the_kind,
    nanovlm_masked_rows,
    opendit_modulate_kernel,
    run_all,
    swin_attention_overflow,
    through_train,
    trellis_adamw_fp16,
    vmamba_eval_nan,
)
from failures.loops import F32, Case, Run, guarded, show
from optim import ClippedAdamW

SHORT = {  # enough steps for every claim
    vmamba_eval_nan: dict(steps=12),
    swin_attention_overflow: dict(),
    nanovlm_masked_rows: dict(),
    trellis_adamw_fp16: dict(steps=40),
    opendit_modulate_kernel: dict(steps=260, dtypes=(F32,)),
    through_train: dict(steps=16),
}


@pytest.fixture(autouse=True)
def no_download(monkeypatch):
    monkeypatch.setattr(cifar10, "reachable", lambda *_: False)


@pytest.mark.parametrize("module", SHORT, ids=lambda module: module.__name__.split(".")[-1])
def test_it_breaks_as_published_is_named_by_the_guards_and_trains_when_cured(module):
    made = module.case(**SHORT[module])
    for case in made if isinstance(made, list) else [made]:
        assert case.holds, str(case)


@pytest.mark.parametrize("one", more_of_the_kind.CASES, ids=lambda one: one.__name__)
def test_the_small_ones_hold(one):
    case = one()
    assert case.holds, str(case)


def test_the_gallery_runs_every_file_of_its_folder():
    files = {path.stem for path in Path(run_all.__file__).parent.glob("*.py")} - {"__init__", "loops", "run_all"}
    assert files == {module.__name__.split(".")[-1] for module in run_all.FILES}
    assert {*SHORT, more_of_the_kind} == set(run_all.FILES)


def test_a_claim_that_fails_shows_in_the_exit_status_and_in_the_table(capsys):
    good, bad = Case("good", [("fp16", "nan", "named", "trains")]), Case("bad", [("fp16", "nan", "nothing", "nan")])
    good.claim("it holds", True)
    bad.claim("the cure trains", False)
    assert show(good) == 0 and show(good, bad) == 1
    assert "[FAILED] the cure trains" in capsys.readouterr().out
    assert run_all.markdown([("x.py", bad)]).splitlines()[-1].endswith("| **NO** |")
    assert not Case("claims nothing").holds


def test_a_loss_that_does_not_fall_is_no_cure():
    assert Run(losses=[2.0, 1.5, 1.0, 0.5]).trains
    assert not Run(losses=[2.0, 2.0, 2.0, 2.0]).trains
    assert not Run(losses=[2.0, 1.5, 1.0, float("nan")]).trains
    assert not Run(losses=[2.0, 1.5, 1.0, 0.5], sick=["head.weight"]).trains


def test_a_healthy_model_is_not_blamed():
    x, y = torch.randn(8, 3), torch.zeros(8, dtype=torch.long)

    class Healthy(torch.nn.Linear):
        def forward(self, x, y):
            return torch.nn.functional.cross_entropy(super().forward(x).float(), y), {}

    net = Healthy(3, 2)
    run = guarded(net, [(x, y)] * 4, torch.float16, ClippedAdamW(net.parameters()))
    assert run.trains and run.report is None and run.skipped == 0


def test_a_case_runs_alone_from_anywhere(tmp_path):
    script = Path(nanovlm_masked_rows.__file__).resolve()
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nanoVLM (a) masked rows" in done.stdout and "FAILED" not in done.stdout
