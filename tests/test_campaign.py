"""The whole fault campaign, every cell asserted: see campaign.py."""

import json
import os
import subprocess
import sys

import campaign
import pytest

ONE = pytest.param(1, marks=pytest.mark.xdist_group("campaign-1"))
TWO = pytest.param(2, marks=pytest.mark.xdist_group("campaign-2"))


@pytest.fixture(scope="module", params=[ONE, TWO])
def outcome(request, tmp_path_factory):
    ranks, file = request.param, tmp_path_factory.mktemp("campaign") / "cells.json"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*(launch if ranks > 1 else []), str(campaign.ROOT / "tests/campaign.py"), str(file)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True,
                          timeout=3600,  # not a hang: 200 runs one after the other
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert file.exists(), done.stdout[-2000:] + done.stderr[-4000:]
    return ranks, json.loads(file.read_text())["cells"]


def test_every_cell_of_the_campaign_holds(outcome):
    ranks, cells = outcome
    assert len(cells) == len(campaign.CELLS) > 200
    broken = {(c["where"], c["kind"], c["precision"]): campaign.judge(c, ranks) for c in cells}
    assert not {cell: why for cell, why in broken.items() if why and not why.startswith("n/a")}
    bad = [c for c in cells if (c["where"], c["kind"]) in campaign.BAD]
    caught = sum(bool(c.get("skipped")) for c in bad)
    assert caught > 0.85 * len(bad), "most faults have to be caught, not harmless"
    if ranks == 2:  # rank-local faults are named with the rank they came from
        places = ("input", "label", "loss")
        local = [c for c in bad if c["where"] in places and c.get("skipped")]
        assert local and all(c["rank"] == 1 for c in local)


SPOILED = [
    ("input", "nan", {"summary": {"updates": 10}}), ("input", "nan", {"code": 3}),
    ("input", "nan", {"bad_files": ["last.pt"]}), ("input", "nan", {"skipped": []}),
    ("input", "nan", {"skipped": [7]}), ("input", "nan", {"reasons": ["loss"]}),
    ("input", "nan", {"skipped": [6, 7, 8, 9]}), ("act", "flip", {"cures": []}),
    ("grad", "flip", {"cured_rank": [-1]}), ("act", "oom", {"warnings": []}),
    ("grad", "oom", {"summary": {"updates": 11}}), ("label", "every 70", {"skipped": [20, 90]}),
    ("lr", "diverging", {"cures": [], "code": 0}), ("compiler", "nan", {"cures": ["divergence"]}),
    ("optstate", "last", {"last step": 0}), ("param", "last", {"bad_files": ["best.pt"]}),
]


def test_the_judge_would_notice(outcome):
    ranks, cells = outcome
    for where, kind, spoiled in SPOILED:
        cell = next(c for c in cells if (c["where"], c["kind"], c["precision"])
                    == (where, kind, "bf16"))
        assert not campaign.judge(cell, ranks), (where, kind)
        assert campaign.judge({**cell, **spoiled}, ranks), (where, kind, spoiled)
