"""The whole fault campaign, every cell asserted: see campaign.py."""

import json
import os
import subprocess
import sys

import campaign
import pytest


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.xdist_group("campaign-1")),
                                        pytest.param(2, marks=pytest.mark.xdist_group("campaign-2"))])
def outcome(request, tmp_path_factory):
    ranks, file = request.param, tmp_path_factory.mktemp("campaign") / "cells.json"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"] if ranks > 1 else []
    done = subprocess.run([sys.executable, *launch, str(campaign.ROOT / "tests" / "campaign.py"), str(file)],
                          capture_output=True, text=True, timeout=3600,  # not a hang: 200 runs one after the other
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert file.exists(), done.stdout[-2000:] + done.stderr[-4000:]
    return ranks, json.loads(file.read_text())["cells"]


def test_every_cell_of_the_campaign_holds(outcome):
    ranks, cells = outcome
    assert len(cells) == len(campaign.CELLS) > 140
    broken = {(c["where"], c["kind"], c["precision"]): campaign.judge(c, ranks) for c in cells}
    assert not {cell: why for cell, why in broken.items() if why and not why.startswith("n/a")}
    bad = [c for c in cells if (c["where"], c["kind"]) in campaign.BAD]
    assert sum(bool(c.get("skipped")) for c in bad) > 0.85 * len(bad), "most faults have to be caught, not harmless"
    if ranks == 2:  # rank-local faults are named with the rank they came from
        local = [c for c in bad if c["where"] in ("input", "label", "loss") and c.get("skipped")]
        assert local and all(c["rank"] == 1 for c in local)


def test_the_judge_would_notice(outcome):
    _, cells = outcome
    cell = next(c for c in cells if (c["where"], c["kind"], c["precision"]) == ("input", "nan", "bf16"))
    cell = {**cell, "summary": {"updates": 11}}
    assert not campaign.judge(cell)
    for spoiled in ({"code": 3}, {"bad_files": ["last.pt"]}, {"skipped": []}, {"skipped": [7]}, {"reasons": ["loss"]},
                    {"skipped": [6, 7, 8, 9]}):
        assert campaign.judge({**cell, **spoiled}), spoiled


@pytest.mark.parametrize(("fault", "spoiled"), [
    (("act", "flip"), {"cures": []}), (("grad", "flip"), {"cured_rank": [-1]}), (("act", "oom"), {"warnings": []}),
    (("grad", "oom"), {"summary": {"updates": 11}}), (("label", "every 70"), {"skipped": [20, 90]}),
    (("lr", "diverging"), {"cures": [], "code": 0}), (("compiler", "nan"), {"cures": ["divergence"]}),
])
def test_the_judge_would_notice_what_is_no_bad_number(outcome, fault, spoiled):
    ranks, cells = outcome
    cell = next(c for c in cells if (c["where"], c["kind"], c["precision"]) == (*fault, "bf16"))
    assert not campaign.judge(cell, ranks) and campaign.judge({**cell, **spoiled}, ranks)
