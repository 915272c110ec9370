# SPDX-License-Identifier: MIT (finite 4.0.0, 2026-11-28)
"""
Report: what a run leaves behind for people and for programs: metrics.jsonl, and curves.png of it.

You judge a run that died at night by what it wrote. So every line is on the disk the moment it is
logged. NaN and inf are written as the strings "nan" and "inf": JSON has no word for them, and to
leave them out would hide what a reader looks for. A resumed run cuts away the lines after its
checkpoint: the file reads as if the run had never died. Readers skip a line that a kill cut in two,
or that something else spoilt. The reader of the output may leave (`| head -2`), or its disk may be
full: the run goes on. It writes a new file and renames it: no link in the folder leads a write
elsewhere.

    {"args": {...}, "model": "cifarnet", "precision": "bf16", "hardware": "...", ...}     first line
    {"step": 10, "loss": 1.93, "acc1": 31.2, "grad_norm": 0.41, "lr": 1e-3, "scale": 1.0, ...}
    {"step": 100, "tensors": {"conv1.weight": {"grad_norm": 0.0, ...}, ...}}
    {"step": 195, "epoch": 1.0, "train_loss": 1.60, "val_loss": 0.98, "val_acc1": 68.2}
    {"event": "skip", "step": 12, "reasons": ["input"], ...}              events as they happen

    python report.py runs/x          draws runs/x/curves.png and confusion.png again

With `tensorboard=True` the same numbers go to TensorBoard too. Copy this file alone: only drawing
needs matplotlib.

Paste::

    from pathlib import Path
    from report import MetricsFile, print_last

    Path("run").mkdir(exist_ok=True)
    log = MetricsFile("run", {"model": "mine"})
    for step in range(1, 101):
        log.write(step=step, loss=1 / step)
    summary = {"status": "done", "val_loss": float("nan")}
    log.write(event="end", **summary)
    print_last(summary)
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Open through no link, and do not wait for who reads a pipe. (Windows has neither.)
NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
LONGEST = 2**28  # bytes of metrics.jsonl: a million logged steps are 0.2 GB
lost = []  # not empty: standard output cannot be written any more


class MetricsFile:
    """metrics.jsonl: at step 0 a new file that begins with `header`, else cut back to `step`.

    Create it on every rank; only the one with `writes` writes. print_with: for example tqdm.write,
    which leaves its bars whole.
    """

    def __init__(self, folder: str | Path, header: dict[str, Any], step: int = 0,
                 tensorboard: bool = False, writes: bool = True,
                 print_with: Callable[[str], Any] = print):  # fmt: skip
        self.path = Path(folder) / "metrics.jsonl"
        self.writes = writes
        self.print_with = print_with
        self.warnings: list[str] = []
        self.logged: set[tuple] = set()  # (step, text) of the lines that it found
        self.board = None
        if not writes:
            return
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # ImportError where it is missing

            self.board = SummaryWriter(folder, purge_step=step + 1)
        lines = [line for line in read_lines(self.path) if line.get("step", 0) <= step]
        if not step or not any("commit" in line for line in lines[:1]):
            lines = [header | {"commit": commit()}, *(lines if step else [])]
        self.logged = {(line.get("step"), str(line.get("text"))) for line in lines}
        replace_file(self.path, "".join(strict_json(line) + "\n" for line in lines).encode())

    def write(self, **fields: Any) -> None:
        """Append one line and hand it to the operating system: it survives this process."""
        if not self.writes:
            return
        with open(self.path, "a", encoding="utf-8", opener=own_file) as file:
            file.write(strict_json(fields) + "\n")
        if self.board and "event" not in fields:
            for name in fields.keys() - {"step", "tensors"}:
                self.board.add_scalar(name, float(fields[name]), fields["step"])

    def say(self, text: str) -> None:
        """Print a line for people. If it cannot be printed, metrics.jsonl says so."""
        if self.writes and not print_line(text, self.print_with):
            self.write(event="warning", text="standard output is closed or full: the run goes on")

    def warn(self, step: int, text: str) -> None:
        """Print, log and keep a warning. One that a run has logged before it was killed is not
        logged again."""
        self.warnings.append(text)
        if (step, text) not in self.logged:
            self.write(event="warning", step=step, text=text)
        self.say(f"step {step}: {text}")


def replace_file(path: Path, content: bytes) -> None:
    """Write a new file beside `path` and rename it: whole or not at all, and through no link."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    with open(temporary, "xb") as file:
        file.write(content)
    os.replace(temporary, path)


def own_file(path: str, flags: int) -> int:
    """For open(): not through a link."""
    return os.open(path, flags | NO_LINK, 0o666)


def strict_json(value: Any) -> str:
    """One line that every JSON parser reads: "nan", "inf" and "-inf" are strings."""
    text = json.dumps(value, default=number_or_text)
    return json.dumps(json.loads(text, parse_constant=lambda word: str(float(word))))


def number_or_text(value: Any) -> Any:
    """The number of a tensor or NumPy array that holds one; of anything else the text."""
    with contextlib.suppress(AttributeError, RuntimeError, ValueError):
        return value.item()
    return str(value)


def print_line(text: str, write: Callable[[str], Any] = print) -> bool:
    """Print and flush, with control characters written out: names from files may hold some, and a
    terminal obeys them. Returns False if nobody reads any more, or the disk is full; then later
    lines go nowhere."""
    text = "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
    if sys.stdout is None:  # >&-
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        lost.append(text)
    encoding = sys.stdout.encoding or "utf-8"
    try:
        write(text.encode(encoding, "backslashreplace").decode(encoding))  # a folder's odd name
        sys.stdout.flush()
        return True
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        out, err = sys.stdout.fileno(), sys.stderr.fileno()
        if os.path.sameopenfile(out, err):  # 2>&1 | head
            os.dup2(nowhere, err)
        os.dup2(nowhere, out)
        lost.append(text)
        return False


def print_last(summary: dict[str, Any]) -> None:
    """Print one line of JSON, on standard error if standard output is lost."""
    line = strict_json(summary)
    print_line(line)
    if lost:
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl; none if there is no such file. OSError: it is too long to
    be one."""
    lines = []
    if path.is_file() and path.stat().st_size > LONGEST:
        raise OSError(f"{path} has over {LONGEST >> 20} MB: it is not the log of a run")
    for text in path.read_text("utf-8", "replace").splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError, RecursionError):
            line = json.loads(text)
            step = line.get("step", 0) if isinstance(line, dict) else None
            if isinstance(step, int) and abs(step) < 2**53:
                lines.append(line)
    return lines


def holds_a_run(folder: Path) -> bool:
    """Whether there is a checkpoint or a logged step. A run that failed earlier leaves neither."""
    logged = any(line.get("step", 0) for line in read_lines(folder / "metrics.jsonl"))
    return logged or any(folder.glob("*.pt"))


def commit() -> str:
    """The commit of this file's checkout, "-dirty" if files were changed; "" outside of git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def peak_memory_mb(cuda: bool) -> int | None:
    """Most memory in use so far: of torch's tensors on the GPU, else of this process.

    None where the system does not say it: on Windows.
    """
    if cuda:
        import torch

        return round(torch.cuda.max_memory_allocated() / 2**20)
    try:
        import resource
    except ImportError:
        return None
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit)


def draw_curves(path: Path) -> Path | None:
    """Loss, accuracy, gradient norm and loss scale of a metrics.jsonl, as curves.png beside it.

    A red line marks each skipped step. A NaN is a gap, and so is a number above 1e38. None without
    matplotlib.
    """
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # "building the font cache"
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    events = read_lines(path)
    lines = [line for line in events if "event" not in line]
    scores = [key[4:] for line in lines for key in line if key.startswith("val_")]
    judged = next((name for name in scores if name != "loss"), "acc1")
    panels = (["loss", "val_loss"], [judged, f"val_{judged}"], ["grad_norm"], ["scale"])
    figure = Figure(figsize=(10, 6), layout="constrained")
    for axis, names in zip(figure.subplots(2, 2).flat, panels, strict=True):
        axis.set(xlabel="step", title=" and ".join(names))
        for name in names:
            points = [(line.get("step", 0), number(line[name])) for line in lines if name in line]
            points = [point for point in points if abs(point[1]) <= 1e38]
            axis.plot([step for step, _ in points], [y for _, y in points], ".-", label=name)
        if len(names) > 1:
            axis.legend()
        else:  # linear below 0.01: a norm may be 0
            axis.set_yscale("symlog", linthresh=0.01)
        for event in events:
            if event.get("event") == "skip":
                axis.axvline(event.get("step", 0), color="tab:red", linewidth=0.5)
    picture = path.with_name("curves.png")
    content = io.BytesIO()
    figure.savefig(content, dpi=100)
    replace_file(picture, content.getvalue())
    return picture


def draw_confusion(path: Path) -> Path | None:
    """The last confusion matrix of a metrics.jsonl, as confusion.png beside it: a row for each
    class, in shares of it. None without a matrix or without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    known = [line for line in read_lines(path) if "confusion" in line]
    if not known:
        return None
    names, rows = known[-1]["classes"], known[-1]["confusion"]
    shares = [[n / max(1, sum(row)) for n in row] for row in rows]
    side = 3 + 0.4 * len(names)
    figure = Figure(figsize=(side, side), layout="constrained")
    axis = figure.subplots()
    axis.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axis.set(xlabel="guess", ylabel="class", title=f"step {known[-1]['step']}: images")
    labels = [str(name)[:20].replace("$", r"\$") for name in names]  # matplotlib reads $ as maths
    axis.set_xticks(range(len(names)), labels, rotation=90)
    axis.set_yticks(range(len(names)), labels)
    for y, row in enumerate(rows):
        for x, n in enumerate(row):
            if n:
                axis.text(
                    x,
                    y,
                    n,
                    ha="center",
                    va="center",
                    color="white" if shares[y][x] > 0.5 else "black",
                )
    content = io.BytesIO()
    with warnings.catch_warnings():  # a name in letters that its font lacks
        warnings.simplefilter("ignore")
        figure.savefig(content, dpi=100)
    picture = path.with_name("confusion.png")
    replace_file(picture, content.getvalue())
    return picture


def number(value: Any) -> float:
    """NaN for what is none."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        return float(value)
    return math.nan


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python report.py RUN_FOLDER")
    try:
        drawn = draw_curves(Path(sys.argv[1]) / "metrics.jsonl")
        draw_confusion(Path(sys.argv[1]) / "metrics.jsonl")
    except OSError as error:
        sys.exit(f"report.py: {error}")
    print(drawn or "matplotlib is not installed: pip install matplotlib")
