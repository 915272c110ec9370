"""Other people's frameworks, where they are installed: their training programs under the command,
and the recipes of docs/recipes.md. tests/autopsy/wild/table.txt says what is run."""

import importlib.util
import json
import re

import pytest
import torch
from helpers import ROOT, run_together, same, script
from test_readme import blocks
from wild import run as wild

pytestmark = pytest.mark.slow
RESULTS = json.loads(wild.RESULTS.read_text())


def rows():
    """Those that are known to be missed are expected to be, so that a mended one is seen."""
    for row in wild.table():
        missed = RESULTS["missed"].get(str(row))
        marks = [pytest.mark.xfail(strict=True, reason="; ".join(missed))] if missed else []
        yield pytest.param(row, id=str(row), marks=marks)


def test_the_page_says_what_the_raw_file_holds():
    made, *by_hand = wild.PAGE.read_text().split(wild.PUBLIC)
    assert wild.page(RESULTS) == made and len(by_hand) == 1
    assert RESULTS["missed"].keys() <= {str(row) for row in wild.table()}


@pytest.mark.parametrize("row", rows())
def test_a_program_of_a_framework_is_watched_and_its_fault_is_named(row, tmp_path):
    if lacking := wild.missing(row):
        pytest.skip(f"not installed: {lacking}")
    assert wild.judge(row, tmp_path) == []


FRAMEWORK = r"^(?:from|import) (transformers|accelerate|lightning)"
RECIPES = {
    found[1]: block
    for block in blocks((ROOT / "docs" / "recipes.md").read_text())
    if (found := re.search(FRAMEWORK, block, re.M))
}
CHANGES = {  # the same recipe in another precision, and with accumulation
    "transformers": [
        ("", ""),
        ("max_steps=20", "max_steps=10, gradient_accumulation_steps=2"),
        ("max_steps=20", "max_steps=20, bf16=True, use_cpu=True"),
    ],
    "lightning": [
        ("", ""),
        ("max_epochs=1", "max_epochs=1, accumulate_grad_batches=2"),
        ("max_epochs=1", "max_epochs=1, precision='bf16-mixed'"),
    ],
    "accelerate": [("", ""), ("_steps=2)", "_steps=2, mixed_precision='bf16')")],
}


def without_guard(block):
    block = re.sub(r"^ *(y = |print\()?(callback\.)?guard\b(?!\.step).*\n", "", block, flags=re.M)
    return block.replace("guard.step(optimizer)", "optimizer.step()").replace("[callback]", "[]")


@pytest.mark.parametrize(("name", "change"), [(x, c) for x, some in CHANGES.items() for c in some])
def test_a_recipe_keeps_a_bad_sample_out_and_a_clean_run_its_bits(name, change, tmp_path):
    if not importlib.util.find_spec(name):
        pytest.skip(f"not installed: {name}")
    block = RECIPES[name].replace(*change)
    bad = re.search(r"^.*# a bad sample\n", block, re.M)[0]
    clean = block.replace(bad, "")
    kinds = {
        "guarded": clean,
        "bare": without_guard(clean),
        "inf": block,
        "nan": block.replace("inf  # a", "nan  # a"),
        "lost": without_guard(block),
    }
    jobs = []
    for kind, text in kinds.items():
        (tmp_path / kind).mkdir()
        text = f"import torch\ntorch.manual_seed(0)\n{text}torch.save(net.state_dict(), 'end.pt')\n"
        jobs.append(([script(tmp_path / kind, text)], tmp_path / kind, {}))
    ended = run_together(jobs, tmp_path)
    assert [code for code, _, _ in ended] == [0] * 5, ended
    states = {kind: torch.load(tmp_path / kind / "end.pt") for kind in kinds}
    finite = {
        kind: all(t.isfinite().all() for t in state.values()) for kind, state in states.items()
    }
    assert finite == {kind: kind != "lost" for kind in kinds}
    assert same(states["guarded"], states["bare"])
    assert not same(states["guarded"], states["inf"])
    for kind, skipped in (("guarded", "0 of"), ("inf", "1 of"), ("nan", "1 of")):
        assert f"\n{skipped}" in "\n" + ended[[*kinds].index(kind)][1], kind
