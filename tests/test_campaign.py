"""The whole fault campaign, every cell asserted: see campaign.py."""

import json
import os
import subprocess
import sys

import campaign
import pytest

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


def outcome(ranks, file):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*(launch if ranks > 1 else []), str(campaign.ROOT / "tests/campaign.py"), str(file)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True,
                          timeout=3600,  # not a hang: 200 runs one after the other
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert file.exists(), done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(file.read_text())["cells"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_cell_of_the_campaign_holds_and_the_judge_would_notice(ranks, tmp_path):
    cells = outcome(ranks, tmp_path / "cells.json")
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
    for where, kind, spoiled in SPOILED:
        key = (where, kind, "bf16")
        cell = next(c for c in cells if (c["where"], c["kind"], c["precision"]) == key)
        assert campaign.judge({**cell, **spoiled}, ranks), (where, kind, spoiled)
