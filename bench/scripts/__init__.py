"""Small training scripts, and what `python autopsy SCRIPT.py` should say of each: one table.

| file | rows | read by |
|---|---|---|
| `planted.py` | faults of our own, and look-alikes | `tests/autopsy/test_watch.py` |
| `reported.py` | distilled from public reports | `bench/diagnosis_scripts.py` |
| `finite.py` | healthy, or finite and wrong | `bench/finite_faults.py`, in part the test |

`bench/public_reports.py` has rows of another form: a script, and the passage that makes it healthy.
"""

import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from bench.record import ROOT


def lines_of(script, mark):
    """The lines of a script whose comment is this, or a list that has it."""
    return [
        n
        for n, line in enumerate(script.splitlines(), 1)
        if re.search(rf"# (.*, )?{mark}(,|$)", line)
    ]


class Case(NamedTuple):
    name: str
    script: str
    code: int  # the exit code
    words: tuple[str | re.Pattern, ...]  # what autopsy prints holds each; none: it is silent
    unsaid: str = ""  # what it prints does not hold this
    fault: str = ""  # the argument of the script
    source: str = ""  # the public report

    def found(self, said):
        """Is each of the words there?"""
        return all(
            part.search(said) if isinstance(part, re.Pattern) else part in said
            for part in self.words
        )

    def guilty(self):
        """The lines whose comment is the fault, or else "here"."""
        own = lines_of(self.script, self.fault) if self.fault else []
        return own or (lines_of(self.script, "here") if self.code else [])

    def judge(self, code, said):
        """{"code", "words" and "line": is it right?}"""
        unsaid = self.unsaid and self.unsaid in said
        return {
            "code": code == self.code,
            "words": self.found(said) and not unsaid,
            "line": all(f"script.py:{line} " in said for line in self.guilty()),
        }


def run(script):
    """(exit code, what autopsy says of it: without paths of this machine and the last line)"""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "script.py").write_text(script)
        command = [sys.executable, ROOT / "autopsy", "script.py"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    said = done.stderr
    for path in (folder, ROOT, sys.prefix):
        said = said.replace(f"{path}/", "")
    lines = [line for line in said.splitlines() if "finite, largest gradient" not in line]
    return done.returncode, "\n".join(lines)


def run_all(cases):
    """Each case with what `run` gives, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        answers = pool.map(run, [case.script for case in cases])
        for case, (code, said) in zip(cases, answers, strict=True):
            yield case, code, said
