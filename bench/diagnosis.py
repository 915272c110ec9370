"""
How often is the diagnosis right? The autopsy on faulty steps rebuilt from other people's published
bug reports.

    python bench/diagnosis.py                  # seconds on two CPU cores
    python bench/diagnosis.py --fresh          # ten cases that were held out until the end

The cases (diagnosis_cases.py, diagnosis_more.py) cite their reports and say what a right diagnosis
is: verdict, module, operation, source line, samples, and what the advice must speak of. A case is
wholly right when all that it asks is right. A tool that crashes is wrong on all of it. Three other
tools run beside the autopsy on the same steps:

    anomaly     torch.autograd.set_detect_anomaly(True): does its error name the function, does its
                traceback the line?
    hooks       forward hooks that look for NaN and inf in weights, inputs and outputs of each
                module, the way of transformers' DebugUnderflowOverflow, written anew: is the first
                module that they name the guilty one?
    DebugMode   torch's own list of operations (newer versions have it), with a hook that asks each
                result for NaN and inf: is the first one the guilty operation, is its line right?

They are asked only what they can say. A step is handled as in a run: the record is made, the step
is run and goes bad (and writes into buffers what it writes), then the tool is called. Where the
advice is an fp32 island, the bench follows it to the letter on a fresh copy of the step and says
whether that is finite.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import warnings
from collections import Counter
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import autopsy  # noqa: E402
from bench import diagnosis_cases, diagnosis_more  # noqa: E402, F401
from bench.diagnosis_cases import Case, Step  # noqa: E402
from bench.record import header, write  # noqa: E402

ASKED = ("verdict", "module", "op", "line", "samples", "names", "fix")
FIXES = {  # what the advice must speak of
    # keep the number out
    "guard": r"\beps\b|clamp|where|mask|before the|inside|xlogy|nan_to_num|maximum|minimum",
    "mask": r"mask",
    "count": r"max\(1|count|number of|no label|empty|every label|ignored",  # a mean over nothing
    "ctc": r"zero_infinity|length|longer|short",
    # a standard deviation of one number
    "spread": r"one value|one number|single|n - 1|unbiased|correction|two",
    "eigen": r"eigen|degenerate|jitter|diagonal|noise|\beps\b",
    "fp32": r"float\(\)|fp32|float32|bf16",
    "samples": r"sample|label|target|input|batch|leave",
    # with a lower rate it is another advice
    "state": r"^(?!.*--lr).*(last_good|initiali|checkpoint|reset|restore)",
    "statistics": r"running_var|variance|statistics",
    "rate": r"--lr|learning rate|clip",
    "nothing": r"nothing|scale",
    "eager": r"eager",
    "hardware": r"hardware|deterministic",
}


# --- What is right

def score(case: Case, report: Any) -> dict[str, bool | None]:
    """{what is asked: right?}; None where the case does not ask.

    A verdict on data or state needs no operation.
    """
    told = report is not None
    verdict = told and report.verdict in case.verdict
    no_op = verdict and report.verdict in ("data", "weights") and not report.op
    right: dict[str, bool | None] = dict.fromkeys(ASKED)
    right["verdict"] = verdict
    if case.module is not None and not no_op:
        right["module"] = told and report.module in case.module
    if case.op is not None and not no_op:
        right["op"] = told and named(case.op, f"{report.op} {report.node}")
    if case.lines and not no_op:
        right["line"] = told and on_line(case, report.line)
    if case.samples is not None or case.micro_batch is not None:
        same = told and case.samples in (None, tuple(report.samples))
        right["samples"] = same and case.micro_batch in (None, report.micro_batch)
    if case.names is not None:
        right["names"] = told and any(case.names in name for name in report.names)
    if case.fix is not None:
        right["fix"] = told and any(advises(fix, report.suggestion) for fix in case.fix)
    return right


def named(words: tuple[str, ...], text: str) -> bool:
    return any(word.lower() in text.lower() for word in words)


def on_line(case: Case, line: str) -> bool:
    """`line` as the autopsy writes it: "file.py:123 in function"."""
    file, _, number = line.partition(" ")[0].rpartition(":")
    if Path(file).name != Path(case.file).name:
        return False
    return number.isdigit() and int(number) in case.lines


def islands(suggestion: str) -> list[str]:
    """The modules that a suggestion puts into fp32, as flags or as code."""
    flags = re.findall(r"--keep-fp32 '?([\w.*]+)'?", suggestion)
    return flags or re.findall(r"^([\w.]+) in fp32:", suggestion)


def advises(fix: str, suggestion: str) -> bool:
    if fix.startswith("island:"):
        return any(fnmatch(fix.removeprefix("island:"), pattern) for pattern in islands(suggestion))
    return re.search(FIXES[fix], suggestion) is not None


def asked(case: Case) -> set[str]:
    return {what for what, right in score(case, None).items() if right is not None}


# --- The four tools

def build(case: Case) -> Step:
    torch.manual_seed(0)
    return case.build()


def is_bad(step: Step) -> bool:
    """Run the step plainly, as a loop would; is the loss, a gradient or the optimizer's state bad,
    or does it raise?
    """
    bad = any(beyond(t) for t in tree_leaves(step.state))
    for batch in step.batches:
        try:
            out = step.run(batch, False)
        except Exception:
            return True
        results = out if isinstance(out, tuple) else (out, [p.grad for p in step.net.parameters()])
        bad |= any(beyond(t) for t in tree_leaves(results))
    return bad


def beyond(t: Any) -> bool:
    if not isinstance(t, Tensor) or not (t.is_floating_point() or t.is_complex()):
        return False
    t = t.detach().coalesce().values() if t.is_sparse else t.detach()
    return bool((~(t.abs().float() <= autopsy.LIMIT)).any())


def by_autopsy(case: Case) -> Any:
    """The report, or the exception of a tool that crashed."""
    step = build(case)
    record = autopsy.StepRecord(7, step.net)
    for batch in step.batches:
        record.keep(*batch)
    is_bad(step)
    try:
        return autopsy.examine(step.run, record, step.net, state=step.state,
                               num_classes=step.num_classes, precision=step.precision,
                               scale=step.scale)
    except Exception as error:
        return error


def by_anomaly_mode(case: Case) -> tuple[str, str]:
    """(name of the function, "file.py:123 in function") that anomaly mode accuses, or ("", "")."""
    step = build(case)
    with warnings.catch_warnings(record=True) as caught, torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("always")
        for batch in step.batches:
            try:
                step.run(batch, False)
            except Exception as error:
                function = re.search(r"Function '(\w+)' returned nan", str(error))
                text = "\n".join(str(w.message) for w in caught)
                frames = [frame for frame in re.findall(r'File "(.+)", line (\d+), in (\S+)', text)
                          if "site-packages" not in frame[0] and not frame[0].startswith("<")]
                line = ""
                if frames:
                    file, number, place = frames[-1]
                    line = f"{Path(file).name}:{number} in {place}"
                return (function[1], line) if function else ("", "")
    return "", ""


def by_hooks(case: Case) -> str | None:
    """Name of the first module with a NaN or inf in its weights, inputs or output; None if there is
    none.
    """
    step, found = build(case), []

    def is_not_finite(t: Any) -> bool:
        dense = isinstance(t, Tensor) and t.is_floating_point() and not t.is_sparse
        return dense and not t.isfinite().all()

    def look(name: str, module: nn.Module, args: Any, out: Any) -> None:
        tensors = [*module.parameters(recurse=False), *tree_leaves((args, out))]
        if any(is_not_finite(t) for t in tensors):
            found.append(name)

    for name, module in step.net.named_modules():
        module.register_forward_hook(lambda *about, name=name: look(name, *about))
    for batch in step.batches:
        with contextlib.suppress(Exception):
            step.run(batch, False)
    return found[0] if found else None


def by_debug_mode(case: Case) -> tuple[str, str]:
    """(operation, "file.py:123 in function") of the first bad result that DebugMode lists."""
    try:
        from torch.utils._debug_mode import DebugMode
    except ImportError:
        return "", ""
    step = build(case)

    def look(func: Any, types: Any, args: Any, kwargs: Any, result: Any) -> dict[str, bool]:
        return {"bad": any(beyond(t) for t in tree_leaves(result))}

    with DebugMode(record_stack_trace=True) as mode, DebugMode.dispatch_hooks(record_hook=look):
        for batch in step.batches:
            with contextlib.suppress(Exception):
                step.run(batch, False)
    for call in mode.operators:
        if (getattr(call, "record", None) or {}).get("bad"):
            trace = getattr(call, "fwd_stack_trace", None) or call.stack_trace or ""
            frames = re.findall(r'File "(.+)", line (\d+), in (\S+)', trace)
            frames = [frame for frame in frames if "site-packages" not in frame[0]]
            file, number, place = frames[-1] if frames else ("", "", "")
            return str(call.op), f"{Path(file).name}:{number} in {place}"
    return "", ""


def mends(case: Case, patterns: list[str]) -> bool:
    """Follow the advice to the letter on a fresh step: these modules get fp32 inputs, and their
    result stays fp32.
    """
    step = build(case)

    def in_fp32(forward: Any, *args: Any) -> Any:
        wide = [t.float() if isinstance(t, Tensor) and t.is_floating_point() else t for t in args]
        with torch.autocast("cpu", enabled=False):
            return forward(*wide)

    for name, module in list(step.net.named_modules()):
        if any(fnmatch(name, pattern) for pattern in patterns):
            module.forward = partial(in_fp32, module.float().forward)
    return not is_bad(step)


# --- The table

def row(name: str, case: Case) -> dict[str, Any]:
    """All that is known of one case, for the raw file."""
    report = by_autopsy(case)
    crash = f"{type(report).__name__}: {report}" if isinstance(report, Exception) else ""
    right = score(case, None if crash else report)
    function, line = by_anomaly_mode(case)
    hooked = by_hooks(case)
    listed, listed_line = by_debug_mode(case)
    out = {"kind": case.kind, "cite": case.cite, "right": right,
           "whole": False not in right.values(),
           "crash": crash[:200], "anomaly": function, "anomaly line": line, "hooks": hooked,
           "anomaly op right": None if case.op is None else named(case.op, function),
           "anomaly line right": None if not case.lines else on_line(case, line),
           "debug mode": listed, "debug mode line": listed_line,
           "debug mode op right": None if case.op is None else named(case.op, listed),
           "debug mode line right": None if not case.lines else on_line(case, listed_line),
           "hooks right": None if case.module is None else hooked in case.module}
    if not crash:
        parts = ("verdict", "module", "op", "node", "line", "samples", "names", "suggestion")
        patterns = islands(report.suggestion)
        out["said"] = {what: getattr(report, what) for what in parts}
        out["said"]["tried"] = str(getattr(report, "tried", ""))
        out["island mends"] = mends(case, patterns) if patterns else None
    signs = "  ".join({True: "+", False: "-", None: "."}[right[what]] for what in ASKED)
    said = ""
    if not out["whole"]:
        parts = ("verdict", "module", "op", "line", "samples")
        said = crash or " | ".join(str(out["said"][what]) for what in parts)
    print(f"{name:50} {signs}  {'right' if out['whole'] else 'wrong':6} {said}"[:200])
    return out


def totals(rows: dict[str, dict]) -> dict[str, Any]:
    """[right, asked] of every tool."""
    def count(answers: list[bool | None]) -> list[int]:
        return [sum(a is True for a in answers), sum(a is not None for a in answers)]

    values = list(rows.values())
    ours = {what: count([r["right"][what] for r in values]) for what in ASKED}
    return {"wholly right": count([r["whole"] for r in values]), **ours,
            "crashes": sum(bool(r["crash"]) for r in values),
            "islands that mend": count([r.get("island mends") for r in values]),
            "by kind": {kind: count([r["whole"] for r in values if r["kind"] == kind])
                        for kind in Counter(r["kind"] for r in values)},
            "anomaly mode": {"op": count([r["anomaly op right"] for r in values]),
                             "line": count([r["anomaly line right"] for r in values])},
            "DebugMode": {"op": count([r["debug mode op right"] for r in values]),
                          "line": count([r["debug mode line right"] for r in values])},
            "hooks": {"module": count([r["hooks right"] for r in values])}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fresh", action="store_true", help="the ten cases that were held out")
    parser.add_argument("--only", default="*", help="pattern of case names")
    parser.add_argument("--name", default="",
                        help="of the raw file; default: diagnosis, or diagnosis_fresh")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    args = parser.parse_args()
    cases = diagnosis_cases.CASES
    if args.fresh:
        from bench.diagnosis_fresh import FRESH as cases  # nobody looks at them by accident
    warnings.simplefilter("ignore")
    initials = "  ".join(what[0] for what in ASKED)
    print(f"{'':50} {initials}  whole   ({', '.join(ASKED)}; . = not asked)")
    rows = {name: row(name, case) for name, case in cases.items() if fnmatch(name, args.only)}
    summary = totals(rows)
    print()
    for what, value in summary.items():
        print(f"{what:20} {value}")
    name = args.name or ("diagnosis_fresh" if args.fresh else "diagnosis")
    device = torch.device("cpu")
    result = header(name, vars(args), device) | {"totals": summary, "cases": rows}
    write(result, args.results, device, ("cases",))


if __name__ == "__main__":
    main()
