"""The whole fault campaign, every cell asserted: see campaign.py."""

import json

import campaign
import pytest
from helpers import run_ranks, run_script

# A cell (where, kind) that holds, and what of its outcome is changed: the judge must see it.
SPOILED = {
    "input nan": [
        {"summary": {"updates": 10}},
        {"code": 3},
        {"bad_files": ["last.pt"]},
        {"skipped": []},
        {"skipped": [7]},
        {"reasons": ["loss"]},
        {"skipped": [6, 7, 8, 9]},
    ],
    "act flip": [{"cures": []}],
    "grad flip": [{"cured_rank": [-1]}],
    "act oom": [{"warnings": []}],
    "grad oom": [{"summary": {"updates": 11}}],
    "label every 70": [{"skipped": [20, 90]}],
    "lr diverging": [{"cures": [], "code": 0}],
    "compiler nan": [{"cures": ["divergence"]}],
    "optstate last": [{"last step": 0}],
    "param last": [{"bad_files": ["best.pt"]}],
}


def outcome(ranks, precisions, folder):
    program = campaign.ROOT / "tests" / "rescue" / "campaign.py"
    script = [program, folder / "cells.json", *precisions]
    alone = ranks == 1
    ended = run_script(script, folder) if alone else run_ranks(script, folder, ranks)
    assert (folder / "cells.json").exists(), ended
    written = json.loads((folder / "cells.json").read_text())
    return written["cells"]


# Every fault in every precision: in two of them alone, in the others on one rank of two.
@pytest.mark.parametrize(("ranks", "precisions"), [(1, ("bf16", "O2")), (2, ("fp32", "O1"))])
def test_every_cell_of_the_campaign_holds_and_the_judge_would_notice(ranks, precisions, tmp_path):
    cells = outcome(ranks, precisions, tmp_path)
    assert len(cells) == len(campaign.CELLS) / 2
    assert len(cells) > 100
    broken = [c for c in cells if c["holds"] and not c["holds"].startswith("n/a")]
    assert not broken

    bad = [c for c in cells if (c["where"], c["kind"]) in campaign.BAD]
    caught = [c for c in bad if c.get("skipped")]
    assert len(caught) > 0.85 * len(bad), "most faults have to be caught, not harmless"
    if ranks == 2:  # rank-local faults are named with the rank they came from
        local = [c for c in caught if c["where"] in ("input", "label", "loss")]
        assert {c["rank"] for c in local} == {1}

    of_first_precision = [c for c in cells if c["precision"] == precisions[0]]
    first = {f"{c['where']} {c['kind']}": c for c in of_first_precision}
    for name, changes in SPOILED.items():
        unseen = [x for x in changes if not campaign.judge(first[name] | x, ranks)]
        assert not unseen, name
