"""Run the programs of table.txt bare and under the command, and judge what is reported.

    python tests/wild/run.py             all that is installed; writes docs/frameworks.md
    python tests/wild/run.py trainer     one program: what was expected and what came
"""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TOOL = ROOT / "autopsy" if (ROOT / "autopsy").is_dir() else ROOT / "autopsy.py"
LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"],
    "accelerate": ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2"],
}
FIGURES = r"-?0x[\d.a-fp+-]+|'(?:\w*loss|grad_norm|eval_accuracy)': '?[\d.e+-]+"
INNER = r"_forward_module|_orig_mod|_fsdp_wrapped\w*|\bmodule\.[a-z]\w+|\bself\.[a-z]"


@dataclass
class Row:
    """One run: a program, its arguments, and what was written down before the first try."""

    program: str
    arguments: list
    launcher: str
    verdict: str  # "" = clean
    operation: str
    line: str  # the comment at the guilty line of the program
    says: str
    misses: list = field(default_factory=list)

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
            yield Row(program, arguments, launcher, verdict.replace("clean", ""), operation, where,
                      says)  # fmt: skip


def missing(row):
    """The packages that a row needs and that are not installed."""
    text = (HERE / f"{row.program}.py").read_text()
    names = re.findall(r"^(?:from|import) (\w+)", text, re.M) + row.launcher.split("torchrun")
    return [name for name in names if name and not importlib.util.find_spec(name)]


def run(row, folder, watched=True):
    folder.mkdir()
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": "",
                                "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false",
                                "YOLO_CONFIG_DIR": str(folder)}  # fmt: skip
    shutil.copy(HERE / f"{row.program}.py", folder)
    command = [sys.executable, *LAUNCHERS.get(row.launcher, []), *([TOOL] if watched else [])]
    return subprocess.run([*command, f"{row.program}.py", *row.arguments], cwd=folder, text=True,
                          env=environment, capture_output=True, timeout=600)


def line_of(row):
    lines = (HERE / f"{row.program}.py").read_text().splitlines()
    found = [n for n, line in enumerate(lines, 1) if line.endswith(f"# {row.line}")]
    assert len(found) == 1, f"{row.program}.py has {len(found)} lines with # {row.line}"
    return found[0]


def judge(row, folder):
    """What is wrong with the report; nothing: []."""
    done = run(row, Path(folder) / "watched")
    said = "\n".join(line for line in (done.stdout + done.stderr).splitlines())
    (Path(folder) / "said").write_text(said)
    if not row.verdict:
        bare = run(row, Path(folder) / "bare", watched=False)
        wrong = [f"exit code {done.returncode}, bare {bare.returncode}"]
        wrong = wrong if done.returncode != bare.returncode or bare.returncode else []
        figures = [re.findall(FIGURES, x.stdout) for x in (bare, done)]
        if not figures[0] or figures[0] != figures[1]:
            wrong.append(f"figures {figures[0][-1:]} {figures[1][-1:]}")
        warned = [set(re.findall(r"\w*Warning: .{,60}", x.stderr)) for x in (bare, done)]
        wrong += [f"new: {text}" for text in warned[1] - warned[0]]
        return wrong + [text for text in ("nothing non-finite",) if text not in said]
    wrong = []
    if not row.launcher and done.returncode != 3:
        wrong.append(f"exit code {done.returncode}")
    text = said[said.find("autopsy: "):]
    verdict = re.search(r"at step \d+ \(.*\) -> ([\w ]+)", text)
    if not verdict or verdict[1] != row.verdict:
        wrong.append(f"verdict {verdict and verdict[1]}")
    first = re.search(r"first (?:bad op|to use .*): (.*)", text)
    made = first[1] if first else ""
    if row.operation and not re.search(rf"aten\.({row.operation})\b|^({row.operation})\b", made):
        wrong.append(f"operation {made}")
    if row.line and f"{row.program}.py:{line_of(row)} " not in made:
        wrong.append(f"line {made}, not {row.program}.py:{line_of(row)}")
    wrong += [f"an inner name {x}" for x in sorted(set(re.findall(INNER, text)))]
    wrong += [f"does not say {x}" for x in row.says.split("; ") if x and not re.search(x, text)]
    return wrong


def main():
    wanted = sys.argv[1:]
    for row in table():
        if wanted and not any(word in str(row) for word in wanted):
            continue
        lacking = missing(row)
        if lacking:
            print("skipped", row, lacking)
            continue
        with tempfile.TemporaryDirectory() as folder:
            row.misses = judge(row, folder)
            print("ok  " if not row.misses else "MISS", row, *row.misses, sep="  ", flush=True)
            kept = Path(os.environ.get("KEEP", folder)) / f"{row}.txt"
            kept.write_text((Path(folder) / "said").read_text())


if __name__ == "__main__":
    main()
