"""The whole fault campaign, every cell asserted: see campaign.py."""

import json

import campaign
import pytest
from helpers import run_ranks, run_script

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


def outcome(ranks, precisions, folder):
    script = [campaign.ROOT / "tests" / "campaign.py", folder / "cells.json", *precisions]
    alone = ranks == 1
    ended = run_script(script, folder) if alone else run_ranks(script, folder, ranks)
    assert (folder / "cells.json").exists(), ended
    return json.loads((folder / "cells.json").read_text())["cells"]


# Every fault in every precision: in two of them alone, in the others on one rank of two.
@pytest.mark.parametrize(("ranks", "precisions"), [(1, ("bf16", "O2")), (2, ("fp32", "O1"))])
def test_every_cell_of_the_campaign_holds_and_the_judge_would_notice(ranks, precisions, tmp_path):
    cells = outcome(ranks, precisions, tmp_path)
    assert len(cells) == len(campaign.CELLS) / 2 > 100
    assert not [c for c in cells if c["holds"] and not c["holds"].startswith("n/a")]
    bad = [c for c in cells if (c["where"], c["kind"]) in campaign.BAD]
    caught = sum(bool(c.get("skipped")) for c in bad)
    assert caught > 0.85 * len(bad), "most faults have to be caught, not harmless"
    if ranks == 2:  # rank-local faults are named with the rank they came from
        places = ("input", "label", "loss")
        local = [c for c in bad if c["where"] in places and c.get("skipped")]
        assert local and all(c["rank"] == 1 for c in local)
    for where, kind, spoiled in SPOILED:
        key = (where, kind, precisions[0])
        cell = next(c for c in cells if (c["where"], c["kind"], c["precision"]) == key)
        assert campaign.judge({**cell, **spoiled}, ranks), (where, kind, spoiled)
