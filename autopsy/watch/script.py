"""
Script: run somebody's script under the watch, from its first line to the exit code.

It also starts a second, quiet run if a step cannot be repeated.
"""

import argparse
import builtins
import gc
import os
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.machinery import BuiltinImporter, SourceFileLoader, SourcelessFileLoader
from math import inf
from pathlib import Path
from types import ModuleType

import torch

from ..advice import Advice, Verdict, names_bad_number, on_exception
from ..frames import HERE, PACK, TORCH, first_line_of, frames_in, line_of
from ..report import ROWS, Report, on_screen
from ..step import rng_states, set_rng_states
from ..tensors import running_statistics
from .beside import hidden_by_us
from .budget import SHARE
from .files import MARK, save
from .findings import Seen
from .hooks import without_us, write_error
from .watch import Watch

USAGE = """python autopsy [--from-step N] [--one-run] [--share F] [--describe] [--report FILE]
                      SCRIPT.py ARGS...
(or: -m package.module ARGS...; a folder or archive with a __main__.py, a .pyc, - for standard
input; before any: --would-overflow [STEPS], --check-gradients [STEP])
Runs the script as it is and reads losses, gradients, weights, evaluation outputs and the numbers
that the script reads. It draws no random number. What a step computes is written down: the calls of
modules, and of torch's functions outside of modules. At the first bad step they are made again,
here and now, with every operation watched, then in fp32: the report names the operation, and the
script ends. Only what cannot be made again (an optimizer of your own, a counter outside of the
modules) needs a second, quiet run of the script (files that it writes are written again); --one-run
refuses that. Where to record would take more than its share of the time (--share 0.05), only some
steps are recorded, the others are read, and a bad one of these needs the second run; --share 1
records all. --from-step N watches every operation from optimizer step N on. Exit code 3: the
report is in FILE (autopsy.txt), and the first 12 lines are printed. 0: nothing that was read was
NaN. 4: the watch failed and was switched off, so that nothing is known. Any other exit code is the
script's.
--describe tells what the run did at its end, or at Ctrl-C, each fact with its line: the order of
calls, rates, data, what a step computes and which of it is in the loss. It records all steps.
Two questions that end the script with their answer (3: a finding, 0: none, 4: nothing is known):
--would-overflow reads 3 steps, as they are, and says what would leave fp16 or be lost in half.
--check-gradients makes step 1 (from 0) again, without compiled code, fused attention and
checkpoints, and in wider types, and compares the gradients; those of custom functions it compares
with central differences."""
UNWATCHED = 4
UNRECORDED = "the step was not recorded, because to record takes long here: --share 1 records all"
# -I, -P: Python searches nothing beside the script.
IS_SAFE = getattr(sys.flags, "safe_path", sys.flags.isolated)
RERUN = "AUTOPSY_RERUN"  # set for the second run: the folder with its start, and for its report


class Parser(argparse.ArgumentParser):
    """The usage is long: of a wrong argument one sentence is printed."""

    def error(self, message):
        self.exit(2, f"autopsy: {message} (python autopsy --help)\n")


def main():
    parser = Parser(usage=USAGE)
    parser.add_argument("--report", default="autopsy.txt")
    parser.add_argument("--from-step", type=int)
    for switch in ("--one-run", "--describe", "--would-overflow", "--check-gradients"):
        parser.add_argument(switch, action="store_true")
    parser.add_argument("--share", type=float, default=os.environ.get("AUTOPSY_SHARE"))
    parser.add_argument("-c", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument("-m", nargs=argparse.REMAINDER, default=[])
    parser.add_argument("script", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    argv, ask = ["-m", *args.m] if args.m else args.script, None
    if args.would_overflow and args.check_gradients:
        parser.error("--would-overflow and --check-gradients each end the script: ask one")
    if args.would_overflow or args.check_gradients:
        at = [int(argv.pop(0))] if argv and argv[0].lstrip("-").isdigit() else []
        if at and at[0] < args.would_overflow:
            wants = "--would-overflow takes steps from 1 on, --check-gradients a step from 0 on"
            parser.error(f"{at[0]}: {wants}")
        ask = partial(question(args.would_overflow), *at)
    if (args.from_step or 0) < 0:
        parser.error(f"--from-step {args.from_step}: steps are counted from 0")
    if args.share is not None and not 0 <= args.share <= 1:
        parser.error(f"--share {args.share}: give a share of the time, 0 to 1")
    if args.c:
        parser.error("-c is not known: give the code on standard input, with -")
    if not args.report:
        parser.error("--report needs the name of a file")
    if not argv:
        parser.error("name a script")
    if not (argv[0] in ("-m", "-") or os.path.exists(argv[0])):
        parser.error(f"{argv[0]} is not a file")
    begin, path = args.from_step, args.report
    folder = os.environ.pop(RERUN, "")
    if folder:
        path = os.path.join(folder, "report")
        try:
            begin, states = torch.load(os.path.join(folder, "start"), weights_only=True)
            set_rng_states(states, "cpu")
        except Exception as error:
            why = first_line_of(error)
            sys.exit(f"autopsy: {RERUN} is for its own second run only: unset it ({why})")
    path = os.path.abspath(path)
    start = Start(args.one_run, argv)
    if ask:
        return answered(start, path, ask())
    share, description = SHARE if args.share is None else args.share, None
    if args.describe:
        share = 1.0 if args.share is None else share
        with missing("describe"):
            from ..describe.description import Description as description
    return watched(start, path, Watch(begin, bool(folder), share, description))


def question(would_overflow):
    """What to ask before anything is bad: the folder before/ has both, and may be missing."""
    with missing("before"):
        if would_overflow:
            from ..before.overflow import Overflow

            return Overflow
        from ..before.gradients import GradientCheck

        return GradientCheck


@contextmanager
def missing(folder):
    """A folder of autopsy may have been left out of a copy."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != f"autopsy.{folder}":
            raise
        sys.exit(f"autopsy: this needs the folder autopsy/{folder}/, which is not here")


def watched(start, path, watch):
    """Return the exit code: 3 for a finding, else 0. The script's own exit code and exceptions
    pass."""
    findings, failure, strange = watch.findings, None, None
    rank = watch.hooks.rank
    with suppress(SystemExit), watch:
        try:
            run_script(start)
        except BaseException as error:
            failure = error
        watch.hooks.safely(last_look, watch, failure)
        strange = watch.hooks.safely(remarks, watch)
        description = watch.description and watch.hooks.safely(str, watch.description)
    if isinstance(failure, SystemExit) and not failure.code:
        failure = None  # sys.exit(main()) is an end like any other
    if isinstance(failure, Exception) and findings.symptom:
        sys.excepthook(type(failure), failure, failure.__traceback__)
    elif failure and not findings.symptom:
        if isinstance(failure, SystemExit | KeyboardInterrupt):
            summary(watch, strange or (), description)
        raise failure
    text = findings.text
    if findings.symptom and findings.step < (watch.begin or 0):
        watch.hooks.say(f"this is before step {watch.begin}, from which every operation is watched")
    if findings.symptom and not text:
        unseen = f"{findings.symptom} -> not reproducible"
        text = unseen if watch.is_second_run else start.second_run(findings, watch.hooks.say)
    if not text:
        summary(watch, strange or (), description)
        if watch.hooks.failure or watch.deferred.blind:
            return UNWATCHED
        bad = [read for read in findings.reads if read.made == "nan" and not read.is_array]
        return 3 if bad else 0
    if rank == findings.rank_of_origin or watch.is_second_run:
        if not watch.is_second_run:
            watch.hooks.say(on_screen(text, ROWS - 1), every=True)
        not_saved = save(path, text)
        if not watch.is_second_run:
            where = f"  all of it: {path.removeprefix(os.path.join(start.home, ''))}"
            if not_saved:
                where = f"  not saved ({not_saved}); all of it:\n{text}"
            write_error(where)
    time.sleep(3 * (rank != findings.rank_of_origin))  # torchrun ends all ranks as soon as one has
    return 3


def answered(start, path, question):
    """Return the exit code: 3, 0, or 4 without an answer. The script ends with the answer; its
    exceptions pass."""
    ended = None
    try:
        with question:
            run_script(start)
    except SystemExit as end:
        ended = end
    if int(os.environ.get("RANK", 0)) == 0:
        write_error(f"autopsy: {question.text}")
        if question.code == 3 and (not_saved := save(path, question.text)):
            write_error(f"  not saved ({not_saved})")
    if ended and ended.code and question.code == UNWATCHED:
        raise ended
    return question.code


def run_script(start):
    """Do in this process what `python SCRIPT.py ARGS` or `python -m MODULE ARGS` does."""
    try:
        begin(start, start.argv[0])
    except BaseException:  # the script's own hook, too, is given the script's traceback
        sys.excepthook = partial(without_our_frames, sys.excepthook)
        raise


def begin(start, name):
    is_program = os.path.isdir(name) or zipfile.is_zipfile(name)
    sys.argv = ["-m", *start.argv[2:]] if name == "-m" else start.argv
    main = sys.modules["__main__"] = ModuleType("__main__")
    if IS_SAFE:
        del sys.path[: sys.path[0] == PACK]
        sys.path[:0] = [start.path] * is_program
    elif name == "-m":
        sys.path[0] = os.getcwd()
    elif is_program:
        sys.path[0] = start.path
    else:
        sys.path[0] = "" if name == "-" else os.path.dirname(os.path.realpath(name))
    if name == "-m" or is_program:  # what Python itself calls then
        runpy._run_module_as_main("__main__" if is_program else start.argv[1], name == "-m")
        return

    path, kind = start.path, SourceFileLoader
    if path.endswith(".pyc"):
        kind = SourcelessFileLoader
    loader = BuiltinImporter if name == "-" else kind("__main__", path)
    known = {"__builtins__": builtins, "__file__": path, "__cached__": None, "__loader__": loader}
    vars(main).update(known)
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    for beside, taken in hidden_by_us(sys.path[0]) if name != "-" and not IS_SAFE else ():
        write_error(f"autopsy: without autopsy, Python imports {beside} as {taken}: rename it")
    exec(start.code(), vars(main))


def last_look(watch, failure):
    """At the end of the script, read what is pending and all that the script leaves."""
    findings, steps = watch.findings, watch.recorder.steps
    watch.transfer()
    for root in list(watch.names.roots) if not getattr(failure, "code", failure) else ():
        left = [*root.parameters(), *running_statistics(root).values()]
        watch.deferred.note(left, watch.checks.bad_at_the_end)
    watch.transfer()
    if not isinstance(failure, Exception):
        return
    raised = first_line_of(failure)
    if watch.optimizer:
        rate = watch.optimizer.param_groups[0].get("lr")
        report = Report(
            Verdict.ERROR,
            op=type(failure).__name__,
            phase="optimizer",
            line=line_of(frames_in(traceback.format_tb(failure.__traceback__))),
            names=(f"raised by {type(watch.optimizer).__name__}.step() (lr={rate})",),
        )
    else:  # whatever the step has made is examined
        calls = watch.recorder.calls
        computed = [c.number for c in calls if c.uses() or c.given()]  # no mere table
        report = findings.explain(computed, raised=raised)
        if not watch.recorder.is_complete and names_bad_number(failure):
            findings.found(raised, None, seen=Seen.RAISED)
        *_, innermost = traceback.walk_tb(failure.__traceback__)
        by_torch = innermost[0].f_code.co_filename.startswith(TORCH)
        by_torch |= bool(calls) and calls[-1].raised and isinstance(failure, RuntimeError)
        knew = by_torch or findings.knows == steps or names_bad_number(failure)
        # the operation raised when it was made again, too
        raises = report and not report.result_value
        if report and not (knew or raises):
            report = None  # the script's own affair
        files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(failure.__traceback__)]
        in_backward = by_torch and any(file == torch.autograd.graph.__file__ for file in files)
        if in_backward and not (report and report.result_value):  # the graph itself is at fault
            line = line_of(frames_in(traceback.format_tb(failure.__traceback__)))
            known = on_exception(failure).fix
            fix = Advice(known) if known else None
            report = Report(Verdict.ERROR, type(failure).__name__, line=line, fix=fix)
    if report and report.verdict is Verdict.ERROR:
        about = {"symptom": raised, "step": steps, "rank": watch.hooks.rank}
        watch.hooks.say(str(replace(report, **about)), every=True)
    elif report:
        findings.found(raised, report, seen=Seen.RAISED)


def remarks(watch):
    """Sentences on what is finite and still looks wrong."""
    parts = watch.findings, watch.history, watch.scaling, watch.silent
    told = [text for part in parts for text in part.sentences()]
    return [*told, *watch.silent.failures]


def summary(watch, strange, description):
    """Print the last lines of a script in which nothing was found."""
    say, steps, skipped = watch.hooks.say, watch.recorder.steps, watch.scaling.skipped
    for text in watch.hooks.unwatched:
        say(text)
    for kind, why in watch.deferred.unread.items():
        say(f"numbers of this kind could not be read: {kind} ({why})")
    for text in (*watch.findings.about_reads(), *strange):
        say(text)
    if failure := watch.hooks.failure or watch.deferred.blind:
        say(f"{failure}: from step {steps} on nothing was read (exit code {UNWATCHED})")
        return
    if watch.recorder.first == inf and not watch.recorder.steps_of:
        say("I saw no training (no backward pass in this thread and process)")
        return
    by_scaler = f", {skipped} of them skipped by the loss scaler" if skipped else ""
    norm = f", largest gradient norm {watch.history.largest:.3g}" if watch.recorder.steps_of else ""
    if id(None) in watch.recorder.steps_of and not watch.history.largest:
        norm = ""  # the script updates by hand, with gradients that nobody saw
    bad = {
        "no gradient or weight": watch.findings.reads,
        "nothing else": watch.findings.unasked,
    }
    nothing = next((word for word, some in bad.items() if some), "nothing") + " non-finite"
    say(f"{steps} steps{by_scaler}, {nothing}{norm}{watch.budget.in_words()}")
    if description:
        say(description)


class Start:
    """How this process was started, before the script can change it; for a second run."""

    def __init__(self, one_run, argv):
        self.one_run, self.argv = one_run, argv
        self.source = sys.stdin.buffer.read() if argv[0] == "-" else None
        self.path = os.path.join(os.getcwd(), argv[0]) if argv[0] != "-" else "<stdin>"
        self.home, self.environment = os.getcwd(), dict(os.environ)
        self.rng = rng_states("cpu")

    def code(self):
        """The compiled script: of standard input, of a .pyc, of a file."""
        name = self.argv[0]
        if name == "-":
            return compile(self.source, "stdin", "exec", dont_inherit=True)
        if name.endswith(".pyc"):
            return SourcelessFileLoader("__main__", name).get_code("__main__")
        source = Path(name).read_bytes()
        return compile(source, self.path, "exec", dont_inherit=True)

    def second_run(self, findings, say):
        """Run the script again, quietly, and watch every operation of the bad step. Return the
        report's text."""
        at, recorded = max(0, findings.step - 1), findings.recorded
        if self.one_run:
            return (
                f"{findings.symptom} -> not reproducible\n"
                f"  try: --from-step {at}, or without --one-run\n"
                f"  {'the step was made again, and it was finite' if recorded else UNRECORDED}"
            )
        say(
            f"{findings.symptom}. Last resort, because the step "
            f"{'cannot be made again' if recorded else 'was not recorded'}: the script runs again, "
            "quietly, up to that step (--one-run refuses this)"
        )
        main = vars(sys.modules["__main__"])
        ours = str(main.get("__file__", "")).startswith(HERE)  # as it is with -m
        if torch.cuda.is_initialized() and not ours:
            main.clear()  # the second run needs the memory
            gc.collect()
            torch.cuda.empty_cache()
        environment = self.environment
        if "MASTER_PORT" in environment:  # a meeting place of its own
            port = str(1024 + (int(environment["MASTER_PORT"]) + 7919) % 60000)
            environment |= {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "False"}
        with tempfile.TemporaryDirectory() as folder:
            torch.save((at, self.rng), os.path.join(folder, "start"))
            environment[RERUN] = folder
            done = subprocess.run(
                [sys.executable, *sys.orig_argv[1:]],
                env=environment,
                cwd=self.home,
                encoding="utf-8",
                errors="replace",
                input=(self.source or b"").decode("utf-8", "replace"),
                capture_output=True,
            )
            report = Path(folder, "report")
            if report.exists():
                text = report.read_text(encoding="utf-8").rstrip()
                text = text[: -len(MARK)] if text[-len(MARK) :] == MARK else text
                return text.rstrip() + "\n  (seen in a second run)"
        last = (done.stderr.strip().splitlines() or ["no error output"])[-1]
        return (
            f"{findings.symptom} -> not reproducible\n"
            f"  try: seeds and a fixed order, or --from-step {at}\n"
            f"  the second run met no bad step; its exit code was {done.returncode} ({last})"
        )


def without_our_frames(original, kind, error, tb):
    """Print the traceback that the script has without the watch (for sys.excepthook)."""
    ours = tb
    while ours and not ours.tb_frame.f_code.co_filename.startswith(HERE):
        ours = ours.tb_next  # what stands around autopsy: its installed command
    tb, frames = ours or tb, []
    while tb:
        frames.append(tb)
        tb = tb.tb_next
    kept = {*without_us([entry.tb_frame for entry in reversed(frames)])}
    for entry in reversed(frames):
        file = entry.tb_frame.f_code.co_filename
        if entry.tb_frame in kept and file not in (runpy.__file__, "<frozen runpy>"):
            entry.tb_next, tb = tb, entry
    original(kind, error.with_traceback(tb), tb)
