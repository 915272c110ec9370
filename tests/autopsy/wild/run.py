"""Run the programs of table.txt bare and under the command, and judge what is reported.

    python tests/autopsy/wild/run.py             all that is installed
    python tests/autopsy/wild/run.py trainer     the rows whose name holds that word

What is missing in each report is written to bench/results/frameworks-cpu.json, and
docs/frameworks.md is made of that file. With KEEP=FOLDER all that was printed is kept there.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path += [str(ROOT), str(ROOT / "tests"), str(HERE.parent)]
from helpers import run_together  # noqa: E402

TOOL = ROOT / "autopsy" if (ROOT / "autopsy").is_dir() else ROOT / "autopsy.py"
LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"],
    "accelerate": ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2"],
}
FIGURES = r"-?0x[\d.a-fp+-]+|'(?:\w*loss|grad_norm|eval_accuracy)': '?[\d.e+-]+"
RESULTS = ROOT / "bench" / "results" / "frameworks-cpu.json"
PAGE = ROOT / "docs" / "frameworks.md"
FRAMEWORKS = {
    "transformers": ("trainer", "causal", "vision", "own_model"),
    "accelerate": ("accelerate_loop",),
    "lightning": ("lightning_fit", "fabric_loop"),
    "peft": ("peft_lora",),
    "trl": ("trl_train",),
    "timm": ("timm_train",),
    "diffusers": ("diffusers_train",),
    "sentence-transformers": ("sentence_train",),
    "ultralytics": ("ultralytics_train",),
    "torchao": ("torchao_train",),
    "torch": ("ranks", "spawned"),
}
PUBLIC = "\n## Public programs\n"  # what follows it on the page is not made here
HEAD = """# Programs of other frameworks

We ran the training programs of other frameworks' documentation under `python autopsy`
(`tests/autopsy/wild/`: a tiny model made from a config, made-up data, a CPU). Before the first run
we wrote into `tests/autopsy/wild/table.txt` what each run must show. A clean run must print the
same figures and exit with the same code as without autopsy, and print no new warning. A fault must
be reported with its verdict, its operation, the line of the script (if the operation is in a
package, the line that called it) and its samples. `python tests/autopsy/wild/run.py` makes this
page and its raw file, `bench/results/frameworks-cpu.json`.
"""
INNER = r"_forward_module|_orig_mod|_fsdp_wrapped\w*|\bmodule\.[a-z]\w+"


@dataclass
class Row:
    """One run: a program, its arguments, and what was written down before the first try."""

    program: str
    arguments: list
    launcher: str
    verdict: str  # "" = clean, "none" = the program's own exception
    operation: str
    line: str  # the comment at the guilty line of the program
    says: str

    def __str__(self):
        words = [self.launcher, self.program, *self.arguments]
        return "-".join(word for word in words if word)


def table():
    for line in (HERE / "table.txt").read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            cells = [cell.strip() for cell in line.split("|", 4)]
            command, verdict, operation, where, says = cells + [""] * (5 - len(cells))
            launcher, _, command = command.rpartition(":")
            program, *arguments = command.split()
            yield Row(
                program, arguments, launcher, verdict.replace("clean", ""), operation, where, says
            )


def missing(row):
    """The packages that a row needs and that are not installed."""
    text = (HERE / f"{row.program}.py").read_text()
    names = re.findall(r"^(?:from|import) (\w+)", text, re.M) + row.launcher.split("torchrun")
    return [name for name in names if name and not importlib.util.find_spec(name)]


def run(row, folder, ways):
    """The program bare or under the command, at once: [(exit code, out, err)]."""
    environment = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": "",
    }
    jobs = []
    for way in ways:
        (folder / way).mkdir()
        shutil.copy(HERE / f"{row.program}.py", folder / way)
        script = folder / way / f"{row.program}.py"  # whole, for processes that it starts
        argv = [*([TOOL] if way == "watched" else []), script, *row.arguments]
        jobs.append((argv, folder / way, environment | {"YOLO_CONFIG_DIR": str(folder / way)}))
    if not row.launcher:
        return run_together(jobs, folder)
    ended = []
    for argv, at, more in jobs:
        done = subprocess.run(
            [sys.executable, *LAUNCHERS[row.launcher], *argv],
            cwd=at,
            text=True,
            env=os.environ | more,
            capture_output=True,
            timeout=600,
        )
        ended.append((done.returncode, done.stdout, done.stderr))
    return ended


def line_of(row):
    lines = (HERE / f"{row.program}.py").read_text().splitlines()
    found = [n for n, line in enumerate(lines, 1) if line.endswith(f"# {row.line}")]
    assert len(found) == 1, f"{row.program}.py has {len(found)} lines with # {row.line}"
    return found[0]


def judge(row, folder):
    """What is wrong with the report; nothing: []. Leaves in `folder` what was said."""
    alone = row.verdict not in ("", "none")
    ended = run(row, folder, ["watched"] if alone else ["watched", "bare"])
    code, out, err = ended[0]
    (folder / "said").write_text(out + err)
    at = (out + err).find("autopsy: ")
    text = (out + err)[at:] if at >= 0 else ""
    whole = text + "".join(file.read_text() for file in folder.glob("watched/**/autopsy.txt"))
    wrong = [f"does not say {x}" for x in row.says.split("; ") if x and not re.search(x, whole)]
    if not alone:
        return wrong + same_as_bare(row, *ended)
    wrong += [f"an inner name {x}" for x in sorted(set(re.findall(INNER, text)))]
    if code != 3 and not row.launcher:
        wrong.append(f"exit code {code}")
    verdict = re.search(r"at step \d+.* -> ([\w ]+)", text)
    if not verdict or verdict[1] != row.verdict:
        wrong.append(f"verdict {verdict and verdict[1]}")
    first = re.search(r"first (?:bad op|to use .*): (.*)", text)
    made = first[1] if first else ""
    if row.operation and not re.search(rf"^\w+\.({row.operation})\b|^({row.operation})\b", made):
        wrong.append(f"operation {made}")
    said = text[: first.end()] if first else ""  # its headline names the line
    if row.line and f"{row.program}.py:{line_of(row)} " not in said:
        wrong.append(f"line {said}, not {row.program}.py:{line_of(row)}")
    return wrong


def same_as_bare(row, watched, bare):
    """A run without a fault, or one that raises the program's own exception."""
    wrong = [f"exit code {watched[0]}, bare {bare[0]}"] if watched[0] != bare[0] else []
    figures = [re.findall(FIGURES, out) for _, out, _ in (bare, watched)]
    if figures[0] != figures[1] or not (figures[0] or row.verdict):
        wrong.append(f"figures {figures[0][-1:]} {figures[1][-1:]}")
    warned = [set(re.findall(r"\w*Warning: .{,60}", err)) for _, _, err in (bare, watched)]
    wrong += [f"new: {text}" for text in warned[1] - warned[0]]
    if row.verdict:
        return wrong + [x for x in ("first bad op",) if x in watched[2]]
    wrong += [f"bare: exit code {bare[0]}"] if bare[0] else []
    nothing = () if row.says else ("nothing non-finite",)  # it has words of its own
    return wrong + [f"not {x}" for x in nothing if x not in watched[2]]


def of_framework(name, rows, results):
    """The line of one framework in the table of the page."""
    missed, counts = results["missed"], []
    for clean in (True, False):
        some = [row for row in rows if clean == (row.verdict in ("", "none"))]
        counts.append(f"{sum(not missed[str(row)] for row in some)} of {len(some)}")
    left = ", ".join(str(row) for row in rows if missed[str(row)])
    return f"| {name} {results['versions'][name]} | {' | '.join(counts)} | {left} |"


def page(results):
    """docs/frameworks.md, of the rows that have been run."""
    lines = [HEAD, "| framework | clean | faults | missed |", "|---|---|---|---|"]
    ran = [row for row in table() if str(row) in results["missed"]]
    for name, programs in FRAMEWORKS.items():
        if rows := [row for row in ran if row.program in programs]:
            lines.append(of_framework(name, rows, results))
    lines += ["", "## What was run", "", "| command | expected | came |", "|---|---|---|"]
    for row in ran:
        expected = ", ".join(filter(None, [row.verdict or "clean", row.line and f"# {row.line}"]))
        command = " ".join(filter(None, [row.launcher, row.program, *row.arguments]))
        misses = " ".join("; ".join(results["missed"][str(row)]).replace("|", "/").split())
        lines.append(f"| `{command}` | {expected} | {misses or 'as expected'} |")
    return "\n".join(lines) + "\n"


def keep(row, misses):
    """In the raw file, and the page anew."""
    results = {"missed": {}, "versions": {}}
    if RESULTS.exists():
        results = json.loads(RESULTS.read_text())
    for name in FRAMEWORKS:  # of what is not installed here, what was measured elsewhere stays
        if importlib.util.find_spec(name.replace("-", "_")):
            results["versions"][name] = importlib.metadata.version(name)
    results["missed"][str(row)] = misses
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    _, public, by_hand = PAGE.read_text().partition(PUBLIC)
    PAGE.write_text(page(results) + public + by_hand)


def main():
    wanted = sys.argv[1:]
    for row in table():
        if wanted and not any(word in str(row) for word in wanted):
            continue
        if lacking := missing(row):
            print("skipped", row, lacking)
            continue
        with tempfile.TemporaryDirectory() as folder:
            misses = judge(row, Path(folder))
            print("MISS" if misses else "ok  ", row, *misses, sep="  ", flush=True)
            if "KEEP" in os.environ:  # a folder for all that was printed
                kept = Path(os.environ["KEEP"]) / f"{row}.txt"
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text((Path(folder) / "said").read_text())
        keep(row, misses)


if __name__ == "__main__":
    main()
