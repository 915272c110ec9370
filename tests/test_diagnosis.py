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
from helpers import ROOT, rows_of
from torch.utils._pytree import tree_leaves

from bench.diagnosis import CASES, FRESH, __main__, by_autopsy, judge
from bench.diagnosis import step as parts
from bench.diagnosis.judge import ASKED, Answer
from bench.diagnosis.tools import msprobe

ALL = CASES | FRESH
PROMISED = {"backward": 12, "half": 12, "data": 8, "state": 6, "divergence": 6, "lawful": 6,
            "exotic": 6}
VERDICTS = {"precision", "data", "weights", "divergence", "not reproducible", "calibration",
            "compiler"}


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
    assert case.cite.startswith("https://") and case.kind in PROMISED
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


@pytest.mark.parametrize("name", [*ALL][::4])
def test_a_report_takes_12_rows_of_a_screen_and_begins_with_the_guilty_line(name):
    case = ALL[name]
    report = by_autopsy(case)
    headline, what_to_do, *_ = str(report).splitlines()
    assert rows_of(str(report)) <= 12 and what_to_do == f"  try: {report.suggestion}", report
    assert set(str(report).splitlines()) < set(report.full.splitlines())
    lines = tuple(f"{case.file}:{line} in " for line in case.lines or ())
    assert headline.startswith(lines or ""), report


@pytest.mark.parametrize("name", [name for name, case in ALL.items() if case.kind == "backward"])
def test_a_bad_backward_has_a_finite_loss(name):
    assert outcome(ALL[name]) == (True, False)


@pytest.mark.parametrize("name", [name for name, case in ALL.items()
                                  if {"precision", "calibration"} & set(case.verdict)])
def test_what_is_said_to_be_precision_is_finite_in_fp32_and_every_island_mends_it(name):
    case = ALL[name]
    assert outcome(case, fp32=True) == (True, True)
    for fix in case.fix:
        if fix.startswith("island:"):
            assert judge.mends(case, [fix.removeprefix("island:")]), fix
    assert not judge.mends(case, ["no such module"])


@pytest.mark.parametrize("name", [name for name, case in ALL.items()
                                  if case.verdict == ("divergence",)])
def test_what_is_said_to_diverge_is_bad_in_fp32_too(name):
    assert not outcome(ALL[name], fp32=True)[1]


def test_what_looks_guilty_is_there_and_what_does_not_come_back_does_not():
    for name, case in CASES.items():
        step = case.build()
        if case.kind == "lawful":
            batch = tree_leaves(step.batches)
            strange = any(judge.beyond(t) for t in [*batch, *step.net.buffers()])
            tensors = [t for t in batch if isinstance(t, torch.Tensor)]
            integers = [t for t in tensors if t.dtype == torch.int64]
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
    words = {"island": f"--keep-fp32 '{fix.removeprefix('island:')}'", "guard": "add an eps",
             "fp32": "x.float()", "state": "--resume last_good.pt", "ctc": "zero_infinity",
             "spread": "unbiased=False", "rate": "lower --lr", "count": "max(1, number of labels)",
             "eigen": "add a jitter", "samples": "leave these samples out"}
    return Answer(verdict=case.verdict[0], module=(case.module or ("",))[0],
                  op=(case.op or ("",))[0], line=line, samples=case.samples or (),
                  micro_batch=case.micro_batch or 0, names=(f"parameter {case.names}",),
                  suggestion=words.get(fix.partition(":")[0], fix))


@pytest.mark.parametrize("name", ALL)
def test_the_expected_report_is_right_and_any_planted_mistake_is_counted_as_wrong(name):
    case = ALL[name]
    assert False not in judge.score(case, perfect(case)).values()
    asked = [what for what, right in judge.score(case, Answer()).items()
             if right is not None]
    mistakes = {"verdict": dict(verdict=("else",)), "module": dict(module=("else",)),
                "op": dict(op=("else",)),
                "line": dict(lines=(1,)), "samples": dict(samples=(77,)),
                "names": dict(names="else"), "fix": dict(fix=("island:else",))}
    for what in asked:
        wrong = judge.score(replace(case, **mistakes[what]), perfect(case))
        assert wrong[what] is False, what


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


def contest(monkeypatch, capsys, tmp_path, *tools, cases=CASES, more=()):
    """The last line of the contest among these tools, and what it printed before."""
    named = {tool.NAME: tool for tool in tools}
    monkeypatch.setattr(__main__, "tools_here", lambda patterns: named)
    monkeypatch.setattr(__main__, "CASES", cases)
    __main__.main(["--results", str(tmp_path), *more])
    printed = capsys.readouterr().out.splitlines()
    return json.loads(printed[-1]), printed


def test_who_is_always_right_wins_and_who_says_nothing_loses(monkeypatch, capsys, tmp_path):
    wise = tool(lambda build: perfect(build.__self__), name="wise")
    half = tool(lambda build: Answer(op=perfect(build.__self__).op), says=("op",),
                name="half")
    mute = tool(lambda build: Answer(), name="mute")
    cases = {name: case for name, case in CASES.items() if case.op}
    last, printed = contest(monkeypatch, capsys, tmp_path, mute, half, wise, cases=cases)
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
    ways = {"RuntimeError: planted": crash, "its process died": lambda build: os._exit(1),
            "hangs": lambda build: time.sleep(60), "no Answer: 'sqrt'": lambda build: "sqrt"}
    case = CASES["ciou_of_a_flat_box"]
    for word, way in ways.items():
        row = judge.trial(tool(way), case)
        assert row["crash"] == word and not row["whole"] and row["right"]["verdict"] is False
    assert judge.trial(tool(patch), case)["right"]["verdict"] and torch.sqrt is not None


def test_where_a_rival_is_right_and_autopsy_is_not_the_file_says_so():
    def answers(ours, theirs):
        right = dict.fromkeys(ASKED)
        return {"tools": {"autopsy": {"right": right | {"op": ours}},
                          "rival": {"right": right | {"op": theirs}}}}

    cases = {"lost": answers(False, True), "won": answers(True, False),
             "hard": answers(False, False)}
    assert __main__.beaten(cases) == {"lost: op": ["rival"]}


def test_a_part_of_the_contest_overwrites_no_result(monkeypatch, capsys, tmp_path):
    mute = tool(lambda build: Answer())
    last, _ = contest(monkeypatch, capsys, tmp_path, mute, more=("--only", "t5*"))
    assert last["totals"]["planted"]["wholly right"] == [0, 1]
    assert [*tmp_path.iterdir()] == []


def test_a_tool_that_is_not_installed_is_left_out_in_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr(msprobe, "NEEDS", "no_such_package")
    tools = __main__.tools_here()
    assert {"autopsy", "hooks", "anomaly mode"} <= tools.keys() and "msprobe" not in tools
    said = "msprobe is left out: no_such_package is not installed here\n"
    assert said in capsys.readouterr().out


@parts.case("backward", "https://github.com/pytorch/pytorch/issues/187297", "divergence",
            module="", op="sqrt", samples=(1,), fix="guard")
def planted_root():
    """A case as a stranger writes it, in a file of their own."""

    def forward(net, x):
        return torch.where(x > 0, torch.sqrt(net.fc(x)), x)  # <- guilty

    fc = torch.nn.Linear(6, 6, bias=False)
    fc.weight.data = torch.eye(6)
    x = torch.ones(4, 6)
    x[1, 2] = -1
    return parts.Step(parts.Net(forward, fc=fc), [(x,)], parts.weighted)


@pytest.mark.parametrize("name", __main__.tools_here())
def test_each_tool_answers_in_form_and_is_judged_on_what_it_says(name):
    entry = __main__.tools_here()[name]
    assert entry.RUN and "Source: " in entry.__doc__ and set(entry.SAYS) <= set(ASKED)
    row = judge.trial(entry, planted_root)
    assert row["crash"] == ""
    judged = {what for what, right in row["right"].items() if right is not None}
    assert judged == set(entry.SAYS) - {"names"}
    if "op" in entry.SAYS:
        assert row["right"]["op"] and row["right"]["line"], row["said"]


def test_the_rivals_see_what_they_can_see():
    tools = __main__.tools_here()

    def said(name, of):
        return judge.trial(tools[name], CASES[of])["said"]

    passed_over = said("anomaly mode", "vae_log_variance")  # it is inf, no NaN
    assert (passed_over["op"], passed_over["line"]) == ("", "")
    assert said("hooks", "t5_feed_forward")["module"] == "ff.wo"
    assert said("hooks", "where_does_not_stop_sqrt")["module"] is None


def test_what_msprobe_reports_is_read_as_it_stands():
    """Its report in a forward, in a backward (which has no stack), and of a module."""
    library = "File /x/site-packages/torch/nn/modules/linear.py, line 134, in forward, \n ..."
    loop = "File /home/me/loop.py, line 9, in <module>, \n loss(net, x)"
    mine = "File /home/me/net.py, line 7, in block, \n return net.wo(h)"
    frames = [library, mine, loop]
    parents = ["Module.ff.Net.forward.0", "Module.ff.wo.Linear.forward.0"]
    call = "Functional.linear.1.forward"
    node = {"op_name": call, "construct_info": [*parents, call], "stack_info": frames}
    read = msprobe.answer(node, {})
    assert (read.op, read.module, read.line) == ("linear", "ff.wo", "net.py:7 in block")
    call = "Tensor.sqrt.0.backward"
    node = {"op_name": call, "construct_info": [call], "stack_info": {}}
    read = msprobe.answer(node, {"0": [["Tensor.sqrt.0.forward"], frames]})
    assert (read.op, read.module, read.line) == ("sqrt", "", "net.py:7 in block")
    call = "Module.bn.BatchNorm1d.forward.0"
    read = msprobe.answer({"op_name": call, "construct_info": [call], "stack_info": frames}, {})
    assert (read.op, read.module) == ("BatchNorm1d", "bn")


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
    page = PAGE
    for entry in __main__.tools_here().values():
        assert f"| {entry.NAME} | {entry.RUN} |" in page
    for bench in ("diagnosis", "diagnosis_fresh"):
        raw = json.loads((ROOT / "bench" / "results" / f"{bench}-cpu.json").read_text())
        assert __main__.table(raw["totals"]) in page, bench
        for lost in raw["rivals right where autopsy is not"]:
            assert lost.split(":")[0] in page, lost
