"""
The judge: is a tool's answer right? Each case is run in a process of its own, so that a tool may
patch torch, crash or hang, and nobody else notices.
"""

import multiprocessing
import os
import re
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from autopsy.tensors import LIMIT

SECONDS = 300  # for one case: compiling takes most of them
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


@dataclass
class Answer:
    """What a tool says of a step. What it cannot say stays as it is here."""

    verdict: str = ""
    module: str | None = None  # the name in named_modules(); "" is the network itself or the loss
    op: str = ""  # of torch, of aten or of autograd: "sqrt", "aten.sqrt.default", "SqrtBackward0"
    node: str = ""  # a second name of the operation
    line: str = ""  # "file.py:123 in function"
    samples: tuple[int, ...] = ()
    micro_batch: int = 0
    names: tuple[str, ...] = ()  # tensors that were bad before the step
    suggestion: str = ""
    more: str = ""  # what else it says; not judged


# --- What is right


def score(case, answer):
    """{what is asked: right?}; None where the case does not ask.

    A verdict on data or state needs no operation.
    """
    right = dict.fromkeys(ASKED)
    right["verdict"] = answer.verdict in case.verdict
    no_op = right["verdict"] and answer.verdict in ("data", "weights") and not answer.op
    if case.module is not None and not no_op:
        right["module"] = answer.module in case.module
    if case.op is not None and not no_op:
        place = f"{answer.op} {answer.node}".lower()
        right["op"] = any(word.lower() in place for word in case.op)
    if case.lines and not no_op:
        right["line"] = on_line(case, answer.line)
    if case.samples is not None or case.micro_batch is not None:
        same = case.samples in (None, tuple(answer.samples))
        right["samples"] = same and case.micro_batch in (None, answer.micro_batch)
    if case.names is not None:
        right["names"] = any(case.names in name for name in answer.names)
    if case.fix is not None:
        right["fix"] = any(advises(fix, answer.suggestion) for fix in case.fix)
    return right


def on_line(case, line):
    """`line`: "a.py:123 in step", or "library.py:4 in forward, called from a.py:123 in step"."""
    numbers = re.findall(rf"\b{re.escape(case.file)}:(\d+)", line)
    return any(int(number) in case.lines for number in numbers)


def islands(suggestion):
    """The modules that a suggestion puts into fp32, as flags or as code."""
    flags = re.findall(r"--keep-fp32 '?([\w.*]+)'?", suggestion)
    return flags or re.findall(r"^([\w.]+) in fp32:", suggestion)


def advises(fix, suggestion):
    if fix.startswith("island:"):
        return any(fnmatch(fix.removeprefix("island:"), pattern) for pattern in islands(suggestion))
    return re.search(FIXES[fix], suggestion) is not None


def mends(case, patterns):
    """Follow the advice to the letter on a fresh step: these modules get fp32 inputs, and their
    result stays fp32.
    """
    step = case.build()

    def in_fp32(forward, *args):
        wide = [t.float() if isinstance(t, Tensor) and t.is_floating_point() else t for t in args]
        with torch.autocast("cpu", enabled=False):
            return forward(*wide)

    for name, module in list(step.net.named_modules()):
        if any(fnmatch(name, pattern) for pattern in patterns):
            module.forward = partial(in_fp32, module.float().forward)
    return not is_bad(step)


# --- What tools may use


def is_bad(step):
    """Run the step plainly, as a loop would; is the loss, a gradient or the optimizer's state bad,
    or does it raise?
    """
    bad = any(beyond(t) for t in tree_leaves(step.state))
    for batch in step.batches:
        try:
            out = step.run(batch)
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


def own_frame(frames):
    """ "file.py:123 in function" of the innermost frame that is no library's, or "".

    `frames`: (file, line, function), the innermost last.
    """
    line = ""
    for file, number, function in frames:
        if "site-packages" not in file and not file.startswith("<"):
            line = f"{Path(file).name}:{number} in {function}"
    return line


def own_line(traceback):
    """The same of a traceback's text."""
    return own_frame(re.findall(r'File "(.+)", line (\d+), in (\S+)', traceback))


# --- One case, one tool


def trial(tool, case):
    """What the tool said of the case, and what of it is right, for the raw file."""
    here, there = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=ask, args=(tool, case, there))
    child.start()
    there.close()
    try:
        answer, crash, mended = here.recv() if here.poll(SECONDS) else (Answer(), "hangs", None)
    except EOFError:
        answer, crash, mended = Answer(), "its process died", None
    child.kill()
    child.join()
    right = score(case, answer)
    if crash:
        right = {what: None if asked is None else False for what, asked in right.items()}
    whole = False not in right.values()
    said = {what: right[what] if what in tool.SAYS else None for what in ASKED}
    row = {"right": said, "whole": whole, "said": asdict(answer), "crash": crash[:200]}
    return row | {"island mends": mended}


def ask(tool, case, back):
    """In the child, in silence: (answer, crash, does the advised island mend the step)."""
    torch.set_num_threads(1)
    for printed in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), printed)
    try:
        answer = tool.diagnose(case.build)
        crash = "" if isinstance(answer, Answer) else f"no Answer: {answer!r}"
    except Exception as error:
        crash = f"{type(error).__name__}: {error}"
    if crash:
        return back.send((Answer(), crash, None))
    patterns = islands(answer.suggestion)
    back.send((answer, "", mends(case, patterns) if patterns else None))
