"""The cases of bench/diagnosis are what they say they are, its judge can say no, and each tool is
judged."""

import json
import os
import re
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT
from torch.utils._pytree import tree_leaves

from bench.diagnosis import CASES, FRESH, __main__, judge
from bench.diagnosis.judge import ASKED, Answer
from bench.diagnosis.tools import msprobe

ALL = CASES | FRESH
KINDS = {"backward", "half", "data", "state", "divergence", "lawful", "exotic"}
VERDICTS = {
    "precision",
    "data",
    "weights",
    "divergence",
    "not reproducible",
    "calibration",
    "compiler",
}


def outcome(case, fp32=False):
    """(all losses finite, all losses and gradients finite) of the step run plainly."""
    step, losses, results = case.build(), [], []
    for batch in step.batches:
        out = step.run(batch, fp32)
        losses.append(out[0] if isinstance(out, tuple) else out)
        gradients = [p.grad for p in step.net.parameters()]
        results.append(out[1] if isinstance(out, tuple) else gradients)
    everything = tree_leaves((losses, results))
    return not any(map(judge.beyond, losses)), not any(map(judge.beyond, everything))


@pytest.mark.parametrize("name", ALL)
def test_a_case_is_well_formed_and_really_bad(name):
    case = ALL[name]
    assert case.cite.startswith("https://") and case.kind in KINDS
    assert set(case.verdict) <= VERDICTS
    assert case.fix and all(fix.startswith("island:") or fix in judge.FIXES for fix in case.fix)
    assert case.op is None or case.lines, "an operation without its line: the marker is missing"
    step = case.build()
    modules = dict(step.net.named_modules())
    islands = {fix.removeprefix("island:") for fix in case.fix if fix.startswith("island:")}
    accused = islands | set(case.module or ())
    assert all(module in modules or "parametrizations" in module for module in accused)
    assert set(case.samples or ()) <= set(range(4)), "a micro-batch has four samples"
    assert judge.is_bad(step)


CLAIMS = {"backward", "precision", "calibration", "divergence"}


@pytest.mark.parametrize(
    "name", [name for name, case in ALL.items() if CLAIMS & {case.kind, *case.verdict}]
)
def test_a_case_is_what_it_is_said_to_be(name):
    """A bad backward has a finite loss, an error of precision is finite in fp32 and is mended by
    every island, a divergence is bad in fp32 too."""
    case = ALL[name]
    if case.kind == "backward":
        assert outcome(case) == (True, False)
    if case.verdict == ("divergence",):
        assert not outcome(case, fp32=True)[1]
    if {"precision", "calibration"} & set(case.verdict):
        assert outcome(case, fp32=True) == (True, True)
        islands = [fix.removeprefix("island:") for fix in case.fix if fix.startswith("island:")]
        assert all(judge.mends(case, [island]) for island in islands), islands
        assert not judge.mends(case, ["no such module"])


def test_what_looks_guilty_is_there_and_what_does_not_come_back_does_not():
    for name, case in CASES.items():
        step = case.build()
        if case.kind == "lawful":
            batch = tree_leaves(step.batches)
            strange = any(judge.beyond(t) for t in [*batch, *step.net.buffers()])
            integers = [t for t in batch if getattr(t, "dtype", None) == torch.int64]
            assert strange or any((t >= step.num_classes).any() for t in integers), name
        if case.verdict == ("not reproducible",):
            assert judge.is_bad(step)
            assert not any(judge.beyond(step.run(b, False)) for b in step.batches)
        if case.verdict == ("compiler",):
            with torch.compiler.set_stance("force_eager"):
                assert outcome(case) == (True, True)


def perfect(case):
    """A report that says just what is expected."""
    line = f"{case.file}:{case.lines[0]} in loss" if case.lines else ""
    fix = case.fix[0]
    words = {
        "island": f"--keep-fp32 '{fix.removeprefix('island:')}'",
        "guard": "add an eps",
        "fp32": "x.float()",
        "state": "--resume last_good.pt",
        "ctc": "zero_infinity",
        "spread": "unbiased=False",
        "rate": "lower --lr",
        "count": "max(1, number of labels)",
        "eigen": "add a jitter",
        "samples": "leave these samples out",
    }
    return Answer(
        verdict=case.verdict[0],
        module=(case.module or ("",))[0],
        op=(case.op or ("",))[0],
        line=line,
        samples=case.samples or (),
        micro_batch=case.micro_batch or 0,
        names=(f"parameter {case.names}",),
        suggestion=words.get(fix.partition(":")[0], fix),
    )


MISTAKES = {
    "verdict": ("else",),
    "module": ("else",),
    "op": ("else",),
    "line": (1,),
    "samples": (77,),
    "names": "else",
    "fix": ("island:else",),
}


@pytest.mark.parametrize("name", ALL)
def test_the_expected_report_is_right_and_any_planted_mistake_is_counted_as_wrong(name):
    case = ALL[name]
    assert False not in judge.score(case, perfect(case)).values()
    for what, right in judge.score(case, Answer()).items():
        if right is not None:
            field = "lines" if what == "line" else what
            changed = replace(case, **{field: MISTAKES[what]})
            assert judge.score(changed, perfect(case))[what] is False, what


def test_each_marker_of_a_guilty_line_is_counted_once_for_its_case():
    marked = {}
    for path in ROOT.glob("bench/diagnosis/cases/*.py"):
        lines = enumerate(path.read_text().splitlines(), 1)
        marked[path.name] = [number for number, line in lines if line.endswith("# <- guilty")]
    known = {file: [] for file in marked}
    for case in ALL.values():
        known[case.file] += case.lines
    assert marked == known


def tool(diagnose, says=ASKED, name="planted"):
    return SimpleNamespace(NAME=name, RUN="", SAYS=says, diagnose=diagnose)


@pytest.fixture
def contest(monkeypatch, capsys, tmp_path):
    """The last line of a contest among tools, and what it printed before."""

    def go(*tools, cases=CASES, more=()):
        named = {tool.NAME: tool for tool in tools}
        monkeypatch.setattr(__main__, "tools_here", lambda patterns: named)
        monkeypatch.setattr(__main__, "CASES", cases)
        __main__.main(["--results", str(tmp_path), *more])
        printed = capsys.readouterr().out.splitlines()
        return json.loads(printed[-1]), printed

    return go


def test_who_is_always_right_wins_and_who_says_nothing_loses(contest, tmp_path):
    wise = tool(lambda build: perfect(build.__self__), name="wise")
    half = tool(lambda build: Answer(op=perfect(build.__self__).op), ("op",), "half")
    mute = tool(lambda build: Answer(), name="mute")
    cases = {name: case for name, case in CASES.items() if case.op}
    last, printed = contest(mute, half, wise, cases=cases)
    n = len(cases)
    sums = last["totals"]
    assert sums["wise"]["wholly right"] == sums["wise"]["line"] == [n, n] and n == 61
    assert sums["half"]["op"] == [n, n] and "line" not in sums["half"]
    assert sums["mute"]["wholly right"] == sums["mute"]["op"] == [0, n]
    ranks = [line.split("|")[1].strip() for line in printed if " of " in line]
    assert ranks == ["wise", "half", "mute"]
    written = json.loads((tmp_path / "diagnosis-cpu.json").read_text())
    assert written["totals"] == sums and len(written["cases"]) == n


def test_a_tool_that_crashes_hangs_dies_or_patches_torch_is_wrong_and_hurts_nobody(monkeypatch):
    def crash(build):
        raise RuntimeError("planted")

    def patch(build):
        torch.sqrt = None
        return Answer(verdict="divergence")

    monkeypatch.setattr(judge, "SECONDS", 2)
    ways = {
        "RuntimeError: planted": crash,
        "its process died": lambda build: os._exit(1),
        "hangs": lambda build: time.sleep(60),
        "no Answer: 'sqrt'": lambda build: "sqrt",
    }
    case = CASES["ciou_of_a_flat_box"]
    for word, way in ways.items():
        row = judge.trial(tool(way), case)
        assert row["crash"] == word and not row["whole"] and row["right"]["verdict"] is False
    assert judge.trial(tool(patch), case)["right"]["verdict"] and torch.sqrt is not None


def test_where_a_rival_is_right_and_autopsy_is_not_the_file_says_so():
    def answers(ours, theirs):
        right = dict.fromkeys(ASKED)
        return {
            "tools": {
                "autopsy": {"right": right | {"op": ours}},
                "rival": {"right": right | {"op": theirs}},
            }
        }

    cases = {
        "lost": answers(False, True),
        "won": answers(True, False),
        "hard": answers(False, False),
    }
    assert __main__.beaten(cases) == {"lost: op": ["rival"]}


def test_a_part_of_the_contest_overwrites_no_result(contest, tmp_path):
    last, _ = contest(tool(lambda build: Answer()), more=("--only", "t5*"))
    assert last["totals"]["planted"]["wholly right"] == [0, 1]
    assert [*tmp_path.iterdir()] == []


TOOLS = __main__.tools_here()


def test_a_tool_that_is_not_installed_is_left_out_in_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr(msprobe, "NEEDS", "no_such_package")
    tools = __main__.tools_here()
    assert {"autopsy", "hooks", "anomaly mode"} <= tools.keys() and "msprobe" not in tools
    said = "msprobe is left out: no_such_package is not installed here\n"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("name", TOOLS)
def test_each_tool_answers_in_form_and_is_judged_on_what_it_says(name):
    entry = TOOLS[name]
    assert entry.RUN and "Source: " in entry.__doc__ and set(entry.SAYS) <= set(ASKED)
    row = judge.trial(entry, CASES["where_does_not_stop_sqrt"])
    assert row["crash"] == ""
    judged = {what for what, right in row["right"].items() if right is not None}
    assert judged == set(entry.SAYS) - {"names"}
    if "op" in entry.SAYS:
        assert row["right"]["op"] and row["right"]["line"], row["said"]


@pytest.mark.parametrize(
    ("name", "case", "seen"),
    [
        ("anomaly mode", "vae_log_variance", {"op": "", "line": ""}),  # it is inf, no NaN
        ("hooks", "t5_feed_forward", {"module": "ff.wo"}),
        ("hooks", "where_does_not_stop_sqrt", {"module": None}),
    ],
)
def test_the_rivals_see_what_they_can_see(name, case, seen):
    assert judge.trial(TOOLS[name], CASES[case])["said"].items() >= seen.items()


LIBRARY = "File /x/site-packages/torch/nn/modules/linear.py, line 134, in forward, \n ..."
LOOP = "File /home/me/loop.py, line 9, in <module>, \n loss(net, x)"
FRAMES = [LIBRARY, "File /home/me/net.py, line 7, in block, \n return net.wo(h)", LOOP]


@pytest.mark.parametrize(
    ("call", "parents", "op", "module"),
    [
        ("Functional.linear.1.forward", ["Module.ff.wo.Linear.forward.0"], "linear", "ff.wo"),
        ("Tensor.sqrt.0.backward", [], "sqrt", ""),
        ("Module.bn.BatchNorm1d.forward.0", [], "BatchNorm1d", "bn"),
    ],
)
def test_what_msprobe_reports_is_read_as_it_stands(call, parents, op, module):
    """Its report in a forward, in a backward (which has no stack), and of a module."""
    backward = "backward" in call
    outer = ["Module.ff.Net.forward.0", *parents] if parents else []
    node = {
        "op_name": call,
        "construct_info": [*outer, call],
        "stack_info": {} if backward else FRAMES,
    }
    read = msprobe.answer(node, {"0": [["Tensor.sqrt.0.forward"], FRAMES]})
    assert (read.op, read.module, read.line) == (op, module, "net.py:7 in block")


PAGE = (ROOT / "bench" / "diagnosis" / "README.md").read_text()


def test_the_tool_and_the_case_of_the_page_are_as_short_as_it_says_and_run(tmp_path):
    adapter, shown = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(adapter.splitlines()) <= 30 and len(shown.splitlines()) <= 20
    source = (ROOT / "bench" / "diagnosis" / "cases" / "backward.py").read_text()
    assert shown in source
    entry = SimpleNamespace()
    exec(adapter, vars(entry))
    right = judge.trial(entry, CASES["overflow_that_soils_batch_norm"])
    wrong = judge.trial(entry, CASES["t5_feed_forward"])  # the first parameter is innocent
    assert entry.RUN in PAGE
    assert right["right"]["module"] is True and wrong["right"]["module"] is False


def test_the_table_of_the_page_is_that_of_the_raw_file():
    assert all(f"| {entry.NAME} | {entry.RUN} |" in PAGE for entry in TOOLS.values())
    for bench in ("diagnosis", "diagnosis_fresh"):
        raw = json.loads((ROOT / "bench" / "results" / f"{bench}-cpu.json").read_text())
        assert __main__.table(raw["totals"]) in PAGE, bench
        for lost in raw["rivals right where autopsy is not"]:
            assert lost.split(":")[0] in PAGE, lost
