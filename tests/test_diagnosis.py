"""The cases of bench/diagnosis.py are what they say they are, and its scoring can say no."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_leaves

from bench import diagnosis, diagnosis_cases
from bench.diagnosis_cases import CASES, FRESH

ALL = CASES | FRESH
PROMISED = {"backward": 12, "half": 12, "data": 8, "state": 6, "divergence": 6, "lawful": 6,
            "exotic": 6}
VERDICTS = {"precision", "data", "weights", "divergence", "not reproducible", "calibration",
            "compiler"}


def outcome(case, fp32=False):
    """(all losses finite, all losses and gradients finite) of the step run plainly."""
    step, losses, results = diagnosis.build(case), [], []
    for batch in step.batches:
        out = step.run(batch, fp32)
        losses.append(out[0] if isinstance(out, tuple) else out)
        gradients = [p.grad for p in step.net.parameters()]
        results.append(out[1] if isinstance(out, tuple) else gradients)
    everything = tree_leaves((losses, results))
    return not any(map(diagnosis.beyond, losses)), not any(map(diagnosis.beyond, everything))


@pytest.mark.parametrize("name", ALL)
def test_a_case_is_well_formed_and_really_bad(name):
    case = ALL[name]
    assert case.cite.startswith("https://") and case.kind in PROMISED
    assert set(case.verdict) <= VERDICTS
    assert case.fix and all(fix.startswith("island:") or fix in diagnosis.FIXES for fix in case.fix)
    assert case.op is None or case.lines, "an operation without its line: the marker is missing"
    step = diagnosis.build(case)
    modules = dict(step.net.named_modules())
    islands = {fix.removeprefix("island:") for fix in case.fix if fix.startswith("island:")}
    accused = islands | set(case.module or ())
    assert all(module in modules or "parametrizations" in module for module in accused)
    assert set(case.samples or ()) <= set(range(4)), "a micro-batch has four samples"
    assert diagnosis.is_bad(step)


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
            assert diagnosis.mends(case, [fix.removeprefix("island:")]), fix
    assert not diagnosis.mends(case, ["no such module"])


@pytest.mark.parametrize("name", [name for name, case in ALL.items()
                                  if case.verdict == ("divergence",)])
def test_what_is_said_to_diverge_is_bad_in_fp32_too(name):
    assert not outcome(ALL[name], fp32=True)[1]


def test_what_looks_guilty_is_there_and_what_does_not_come_back_does_not():
    for name, case in CASES.items():
        step = diagnosis.build(case)
        if case.kind == "lawful":
            batch = tree_leaves(step.batches)
            strange = any(diagnosis.beyond(t) for t in [*batch, *step.net.buffers()])
            tensors = [t for t in batch if isinstance(t, torch.Tensor)]
            integers = [t for t in tensors if t.dtype == torch.int64]
            assert strange or any((t >= step.num_classes).any() for t in integers), name
        if case.verdict == ("not reproducible",):
            assert diagnosis.is_bad(step)
            assert not any(diagnosis.beyond(step.run(b, False)) for b in step.batches)
        if case.verdict == ("compiler",):
            with torch.compiler.set_stance("force_eager"):
                assert outcome(case) == (True, True)


def perfect(case):
    """A report that says just what is expected."""
    line = f"diagnosis_cases.py:{case.lines[0]} in loss" if case.lines else ""
    fix = case.fix[0]
    words = {"island": f"--keep-fp32 '{fix.removeprefix('island:')}'", "guard": "add an eps",
             "fp32": "x.float()", "state": "--resume last_good.pt", "ctc": "zero_infinity",
             "spread": "unbiased=False", "rate": "lower --lr", "count": "max(1, number of labels)",
             "eigen": "add a jitter", "samples": "leave these samples out"}
    return SimpleNamespace(verdict=case.verdict[0], module=(case.module or ("",))[0],
                           op=(case.op or ("",))[0], node="", line=line,
                           samples=case.samples or (), micro_batch=case.micro_batch or 0,
                           names=(f"parameter {case.names}",),
                           suggestion=words.get(fix.partition(":")[0], fix))


@pytest.mark.parametrize("name", ALL)
def test_the_expected_report_is_right_and_any_planted_mistake_is_counted_as_wrong(name):
    case = ALL[name]
    assert False not in diagnosis.score(case, perfect(case)).values()
    asked = [what for what, right in diagnosis.score(case, diagnosis.said()).items()
             if right is not None]
    mistakes = {"verdict": dict(verdict=("else",)), "module": dict(module=("else",)),
                "op": dict(op=("else",)),
                "line": dict(lines=(1,)), "samples": dict(samples=(77,)),
                "names": dict(names="else"), "fix": dict(fix=("island:else",))}
    for what in asked:
        wrong = diagnosis.score(replace(case, **mistakes[what]), perfect(case))
        assert wrong[what] is False, what


def test_a_guilty_line_is_that_of_the_file_and_a_traceback_names_it():
    source = Path(diagnosis_cases.__file__).read_text().splitlines()
    for name, case in ALL.items():
        assert len(case.lines) == case.text.count("# <- guilty"), name
        assert all("# <- guilty" in source[line - 1] for line in case.lines), name
    case = CASES["vae_log_variance"]
    step = diagnosis.build(replace(case, text=case.text.replace("kl = 1", "kl = unknown")))
    with pytest.raises(NameError) as raised:
        step.run(step.batches[0], False)
    frame = raised.traceback[-1]
    assert frame.path.name == "diagnosis_cases.py" and frame.lineno + 1 == case.lines[0]


def test_a_tool_that_crashes_is_wrong_and_the_bench_goes_on(monkeypatch, tmp_path, capsys):
    def crash(*args, **more):
        raise RuntimeError("planted")

    monkeypatch.setattr(diagnosis.autopsy, "examine", crash)
    diagnosis.main(["--only", "*box*", "--results", str(tmp_path)])
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    n = last["totals"]["crashes"]
    assert n >= 3 and last["totals"]["wholly right"] == [0, n]


def test_anomaly_mode_and_the_hooks_see_what_they_can_see():
    smape = CASES["smape_masked_after_the_division"]
    accused = diagnosis.by_anomaly_mode(smape)
    assert accused.op == "DivBackward0" and diagnosis.on_line(smape, accused.line)
    passed_over = diagnosis.by_anomaly_mode(CASES["vae_log_variance"])  # it is inf, no NaN
    assert (passed_over.op, passed_over.line) == ("", "")
    assert diagnosis.by_hooks(CASES["t5_feed_forward"]).module == "ff.wo"
    assert diagnosis.by_hooks(CASES["where_does_not_stop_sqrt"]).module is None
