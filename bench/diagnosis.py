"""
How often is the diagnosis right? The autopsy on faulty steps rebuilt from other people's published
bug reports.

    python bench/diagnosis.py                  # seconds on two CPU cores
    python bench/diagnosis.py --fresh          # ten cases that were held out until the end

The cases (diagnosis_cases.py) cite their reports and say what a right diagnosis is: verdict,
module, operation, source line, samples, and what the advice must speak of. A case is wholly right
when all that it asks is right. A tool that crashes is wrong on all of it. Three other tools run
beside the autopsy on the same steps:

    anomaly mode  torch.autograd.set_detect_anomaly(True): does its error name the function, does
                  its traceback the line?
    hooks         forward hooks that look for NaN and inf in weights, inputs and outputs of each
                  module, the way of transformers' DebugUnderflowOverflow, written anew: is the
                  first module that they name the guilty one?
    DebugMode     torch's own list of operations (newer versions have it), with a hook that asks
                  each result for NaN and inf: is the first one the guilty operation, is its line
                  right?

They are asked only what they can say. A step is handled as in a run: the record is made, the step
is run and goes bad (and writes into buffers what it writes), then the tool is called. Where the
advice is an fp32 island, the bench follows it to the letter on a fresh copy of the step and says
whether that is finite.
"""

import contextlib
import re
import sys
import warnings
from collections import Counter
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parents[1]))
import autopsy
from autopsy.tensors import LIMIT
from bench import diagnosis_cases, record

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

def score(case, report):
    """{what is asked: right?}; None where the case does not ask. `report`: a tool's answer.

    A verdict on data or state needs no operation.
    """
    right = dict.fromkeys(ASKED)
    right["verdict"] = report.verdict in case.verdict
    no_op = right["verdict"] and report.verdict in ("data", "weights") and not report.op
    if case.module is not None and not no_op:
        right["module"] = report.module in case.module
    if case.op is not None and not no_op:
        place = f"{report.op} {report.node}".lower()
        right["op"] = any(word.lower() in place for word in case.op)
    if case.lines and not no_op:
        right["line"] = on_line(case, report.line)
    if case.samples is not None or case.micro_batch is not None:
        same = case.samples in (None, tuple(report.samples))
        right["samples"] = same and case.micro_batch in (None, report.micro_batch)
    if case.names is not None:
        right["names"] = any(case.names in name for name in report.names)
    if case.fix is not None:
        right["fix"] = any(advises(fix, report.suggestion) for fix in case.fix)
    return right


def on_line(case, line):
    """`line`: "a.py:123 in step", or "library.py:4 in forward, called from a.py:123 in step"."""
    numbers = re.findall(r"diagnosis_cases\.py:(\d+)", line)
    return any(int(number) in case.lines for number in numbers)


def islands(suggestion):
    """The modules that a suggestion puts into fp32, as flags or as code."""
    flags = re.findall(r"--keep-fp32 '?([\w.*]+)'?", suggestion)
    return flags or re.findall(r"^([\w.]+) in fp32:", suggestion)


def advises(fix, suggestion):
    if fix.startswith("island:"):
        return any(fnmatch(fix.removeprefix("island:"), pattern) for pattern in islands(suggestion))
    return re.search(FIXES[fix], suggestion) is not None


# --- The four tools

def build(case):
    torch.manual_seed(0)
    return case.build()


def is_bad(step):
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


def beyond(t):
    if not isinstance(t, Tensor) or not (t.is_floating_point() or t.is_complex()):
        return False
    t = t.detach().coalesce().values() if t.is_sparse else t.detach()
    return bool((~(t.abs().float() <= LIMIT)).any())


def by_autopsy(case):
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


def said(op="", line="", module=None):
    """The answer of a tool that says no more than this."""
    return SimpleNamespace(op=op, line=line, module=module, node="", verdict="", suggestion="",
                           samples=(), names=(), micro_batch=0)


def last_line(trace):
    """"file.py:123 in function" of the innermost frame that is not a library's, or ""."""
    line = ""
    for file, number, function in re.findall(r'File "(.+)", line (\d+), in (\S+)', trace):
        if "site-packages" not in file and not file.startswith("<"):
            line = f"{Path(file).name}:{number} in {function}"
    return line


def by_anomaly_mode(case):
    """The function and the line that anomaly mode accuses."""
    step = build(case)
    with warnings.catch_warnings(record=True) as caught, torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("always")
        for batch in step.batches:
            try:
                step.run(batch, False)
            except Exception as error:
                function = re.search(r"Function '(\w+)' returned nan", str(error))
                trace = "\n".join(str(warning.message) for warning in caught)
                return said(function[1], last_line(trace)) if function else said()
    return said()


def by_debug_mode(case):
    """The operation and the line of the first bad result that DebugMode lists."""
    try:
        from torch.utils._debug_mode import DebugMode
    except ImportError:
        return said()
    step = build(case)

    def look(func, types, args, kwargs, result):
        return {"bad": any(beyond(t) for t in tree_leaves(result))}

    with DebugMode(record_stack_trace=True) as mode, DebugMode.dispatch_hooks(record_hook=look):
        for batch in step.batches:
            with contextlib.suppress(Exception):
                step.run(batch, False)
    for call in mode.operators:
        if (getattr(call, "record", None) or {}).get("bad"):
            trace = getattr(call, "fwd_stack_trace", None) or call.stack_trace or ""
            return said(str(call.op), last_line(trace))
    return said()


def by_hooks(case):
    """The first module with a NaN or inf in its weights, inputs or output."""
    step, found = build(case), []

    def is_not_finite(t):
        dense = isinstance(t, Tensor) and t.is_floating_point() and not t.is_sparse
        return dense and not t.isfinite().all()

    def look(name, module, args, out):
        tensors = [*module.parameters(recurse=False), *tree_leaves((args, out))]
        if any(is_not_finite(t) for t in tensors):
            found.append(name)

    for name, module in step.net.named_modules():
        module.register_forward_hook(lambda *about, name=name: look(name, *about))
    for batch in step.batches:
        with contextlib.suppress(Exception):
            step.run(batch, False)
    return said(module=found[0] if found else None)


PEERS = {  # name: (the tool, what it is asked)
    "anomaly mode": (by_anomaly_mode, ("op", "line")),
    "hooks": (by_hooks, ("module",)),
    "DebugMode": (by_debug_mode, ("op", "line")),
}


def mends(case, patterns):
    """Follow the advice to the letter on a fresh step: these modules get fp32 inputs, and their
    result stays fp32.
    """
    step = build(case)

    def in_fp32(forward, *args):
        wide = [t.float() if isinstance(t, Tensor) and t.is_floating_point() else t for t in args]
        with torch.autocast("cpu", enabled=False):
            return forward(*wide)

    for name, module in list(step.net.named_modules()):
        if any(fnmatch(name, pattern) for pattern in patterns):
            module.forward = partial(in_fp32, module.float().forward)
    return not is_bad(step)


# --- The table

def row(name, case):
    """All that is known of one case, for the raw file."""
    report = by_autopsy(case)
    crash = f"{type(report).__name__}: {report}" if isinstance(report, Exception) else ""
    right = score(case, said() if crash else report)
    if crash:
        right = {what: None if asked is None else False for what, asked in right.items()}
    whole = False not in right.values()
    out = {"kind": case.kind, "cite": case.cite, "right": right, "whole": whole,
           "crash": crash[:200]}
    for peer, (ask, about) in PEERS.items():
        answer = ask(case)
        judged = score(case, answer)
        out[peer] = {what: (getattr(answer, what), judged[what]) for what in about}
    if not crash:
        parts = ("verdict", "module", "op", "node", "line", "samples", "names", "suggestion")
        out["said"] = {what: getattr(report, what) for what in parts}
        out["said"]["tried"] = str(report.tried)
        patterns = islands(report.suggestion)
        out["island mends"] = mends(case, patterns) if patterns else None
    signs = "  ".join({True: "+", False: "-", None: "."}[right[what]] for what in ASKED)
    mistake = "" if whole else crash or " | ".join(map(str, list(out["said"].values())[:6]))
    print(f"{name:50} {signs}  {'right' if whole else 'wrong':6} {mistake}"[:200])
    return out


def count(answers):
    """[right, asked]"""
    return [answers.count(True), len(answers) - answers.count(None)]


def totals(rows):
    """[right, asked] of every tool."""
    sums = {"wholly right": count([r["whole"] for r in rows])}
    for what in ASKED:
        sums[what] = count([r["right"][what] for r in rows])
    sums["crashes"] = sum(bool(r["crash"]) for r in rows)
    sums["islands that mend"] = count([r.get("island mends") for r in rows])
    sums["by kind"] = {kind: count([r["whole"] for r in rows if r["kind"] == kind])
                       for kind in Counter(r["kind"] for r in rows)}
    for peer, (_, about) in PEERS.items():
        sums[peer] = {what: count([r[peer][what][1] for r in rows]) for what in about}
    return sums


def main(argv=None):
    parser = record.arguments(__doc__, "cpu")
    parser.add_argument("--fresh", action="store_true", help="the ten cases that were held out")
    parser.add_argument("--only", default="*", help="pattern of case names")
    args = parser.parse_args(argv)
    name = "diagnosis_fresh" if args.fresh else "diagnosis"
    cases = diagnosis_cases.FRESH if args.fresh else diagnosis_cases.CASES
    warnings.simplefilter("ignore")
    initials = "  ".join(what[0] for what in ASKED)
    print(f"{'':50} {initials}  whole   ({', '.join(ASKED)}; . = not asked)")
    rows = {name: row(name, case) for name, case in cases.items() if fnmatch(name, args.only)}
    summary = totals([*rows.values()])
    print()
    for what, value in summary.items():
        print(f"{what:20} {value}")
    head = record.header(name, args) | {"totals": summary, "cases": rows}
    record.write(head, args, ("cases",))


if __name__ == "__main__":
    main()
