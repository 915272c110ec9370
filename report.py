# SPDX-License-Identifier: MIT (finite 3.0.0, 2026-11-22)
"""
Report: what a run leaves behind for people and for programs: metrics.jsonl, and curves.png of it.

A run that dies at night is judged by what it wrote. So every line is on the disk the moment it is
logged. NaN and inf are written as the strings "nan" and "inf": JSON has no word for them, and to
leave them out would hide what a reader looks for. A resumed run cuts away the lines after its
checkpoint: the file reads as if the run had never died. A line that a kill cut in two, or that
something else spoilt, is left out. Who reads the output may leave (`| head -2`): the run goes on.

    {"args": {...}, "model": "cifarnet", "precision": "bf16", "hardware": "...", ...}     first line
    {"step": 10, "loss": 1.93, "acc1": 31.2, "grad_norm": 0.41, "lr": 1e-3, "scale": 1.0, ...}
    {"step": 100, "tensors": {"conv1.weight": {"grad_norm": 0.0, ...}, ...}}    that stand out
    {"step": 195, "epoch": 1.0, "train_loss": 1.60, "val_loss": 0.98, "val_acc1": 68.2}
    {"event": "skip", "step": 12, "reasons": ["input"], ...}              events as they happen

    python report.py runs/x          draws runs/x/curves.png again

With `tensorboard=True` the same numbers go to TensorBoard too. Copy this file alone: only drawing
needs matplotlib.

Paste::

    from pathlib import Path
    from report import MetricsFile, print_line, strict_json

    Path("run").mkdir(exist_ok=True)
    log = MetricsFile("run", {"model": "mine"})
    for step in range(1, 101):
        log.write(step=step, loss=1 / step)
    summary = {"status": "done", "val_loss": float("nan")}
    log.finish(summary)
    print_line(strict_json(summary))
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import resource
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

Figures = dict[str, dict[str, float]]  # of each tensor, by its name


class MetricsFile:
    """metrics.jsonl: at step 0 a new file that begins with `header`, else cut back to `step`.

    Create it on every rank; the one that `writes` does so.
    """

    def __init__(self, folder: str | Path, header: dict[str, Any], step: int = 0,
                 tensorboard: bool = False, writes: bool = True):  # fmt: skip
        self.board = None
        self.writes = writes
        self.figures: Figures = {}  # of all tensors, when they were last measured
        if not writes:
            return
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # ImportError where it is missing

            self.board = SummaryWriter(folder, purge_step=step + 1)
        self.path = Path(folder) / "metrics.jsonl"
        lines = [line for line in read_lines(self.path) if line.get("step", 0) <= step]
        if not step or not any("commit" in line for line in lines[:1]):
            lines = [header | {"commit": commit()}, *(lines if step else [])]
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(strict_json(line) + "\n" for line in lines))
        os.replace(temporary, self.path)

    def write(self, **fields: Any) -> None:
        """Append one line and hand it to the operating system: it survives this process."""
        if not self.writes:
            return
        line = strict_json(fields)
        with open(self.path, "a") as file:
            file.write(line + "\n")
        if self.board and "event" in fields:
            self.board.add_text(fields["event"], line, fields.get("step"))
        elif self.board:
            for name in fields.keys() - {"step", "tensors"}:
                self.board.add_scalar(name, float(fields[name]), fields["step"])

    def tensors(self, step: int, figures: Figures) -> None:
        """A line about the five tensors that stand out most, and about those that jumped.

        figures: name -> grad_norm, weight_norm, update_ratio; TensorBoard gets all. A non-finite
        norm stands out most, then a 0, then what is furthest from the median. A weight norm is
        large or small by nature: it has to jump, 10 times against the median change.
        """
        here = decades(figures)
        chosen: dict[str, str] = {}
        for name, figure in sorted(here, key=lambda key: -abs(here[key])):
            by_nature = figure == "weight_norm" and here[name, figure] < math.inf
            if len(chosen) < 5 and not by_nature:
                chosen.setdefault(name, figure)
        change = decades({
            name: {figure: growth(self.figures[name][figure], now) for figure, now in row.items()}
            for name, row in figures.items() if name in self.figures
        })  # fmt: skip
        chosen |= {name: figure for (name, figure), d in change.items() if 1 <= abs(d) < math.inf}
        self.figures = figures
        entries = {}
        for name, figure in chosen.items():
            short = {key: float(f"{value:.4g}") for key, value in figures[name].items()}
            key = name, figure
            found = {"figure": figure, "decades": here[key], "change": change.get(key)}
            entries[name] = short | found
        self.write(step=step, tensors=entries)
        for name, values in figures.items() if self.board else ():
            for figure, value in values.items():
                self.board.add_scalar(f"{figure}/{name}", value, step)

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the last event, draw the curves, print the summary for people."""
        if not self.writes:
            return
        self.write(event="end", **summary)
        files = [self.path, *sorted(self.path.parent.glob("*.pt")), draw_curves(self.path)]
        rows = [f"{name:<18} {value}" for name, value in summary.items()]
        print_line("\n".join(["", *rows, *(str(file) for file in files if file)]))

    def picture(self, path: Path, step: int) -> None:
        """Log a picture or a text that was written beside the metrics."""
        self.write(event="shown", step=step, file=str(path.relative_to(self.path.parent)))


def strict_json(value: Any) -> str:
    """One line that every JSON parser reads: "nan", "inf" and "-inf" are strings."""
    text = json.dumps(value, default=str)
    return json.dumps(json.loads(text, parse_constant=lambda word: str(float(word))))


def print_line(text: str, write: Callable[[str], Any] = print) -> bool:
    """Print and flush. False: nobody reads any more; from now on it goes nowhere."""
    try:
        write(text)
        sys.stdout.flush()
        return True
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        out, err = sys.stdout.fileno(), sys.stderr.fileno()
        if os.path.sameopenfile(out, err):  # 2>&1 | head
            os.dup2(nowhere, err)
        os.dup2(nowhere, out)
        return False


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that are whole; none where there is no such file."""
    lines = []
    for text in path.read_text(errors="replace").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict) and isinstance(line.get("step", 0), int):
                lines.append(line)
    return lines


def holds_a_run(folder: str | Path) -> bool:
    """Whether there is a checkpoint or a logged step. A run that failed earlier leaves neither."""
    folder = Path(folder)
    logged = any(line.get("step", 0) for line in read_lines(folder / "metrics.jsonl"))
    return logged or any(folder.glob("*.pt"))


def commit() -> str:
    """The commit of this file's checkout, "-dirty" if files were changed; "" outside of git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def peak_memory_mb(cuda: bool) -> int:
    """Most memory in use so far: of torch's tensors on the GPU, else of this process."""
    if cuda:
        import torch

        return round(torch.cuda.max_memory_allocated() / 2**20)
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit)


def growth(before: float, now: float) -> float:
    return now / before if 0 < before < math.inf else math.nan


def decades(figures: Figures) -> dict[tuple[str, str], float]:
    """(tensor, figure) -> powers of ten above the median of all tensors. Non-finite: inf. 0: -99.

    Left out: the update ratio of weights that are 0; a figure that is 0 or bad in all.
    """
    powers = {}
    for figure in ("update_ratio", "grad_norm", "weight_norm"):
        values = {name: row[figure] for name, row in figures.items()}
        alive = [value for value in values.values() if 0 < value < math.inf]
        median = statistics.median(alive or [1.0])
        for name, value in values.items() if alive else ():
            if value < math.inf:
                powers[name, figure] = round(math.log10(max(value / median, 1e-99)), 3)
            elif figure != "update_ratio":
                powers[name, figure] = math.inf
    return powers


def draw_curves(path: Path) -> Path | None:
    """Loss, accuracy, gradient norm, loss scale, tensors that stand out, as curves.png.

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
    skipped = [line["step"] for line in events if line.get("event") == "skip"]
    scores = [key[4:] for line in lines for key in line if key.startswith("val_")]
    judged = next((name for name in scores if name != "loss"), "acc1")
    stand_out: Counter[str] = Counter()
    for line in [*lines]:
        for name, entry in line.get("tensors", {}).items():
            label = f"{name} {entry['figure']}"
            power = float(entry["decades"])
            height = max(-6.0, min(power, 6.0)) if abs(power) < 99 else math.copysign(7.0, power)
            lines.append({"step": line["step"], label: height})
            stand_out[label] += 1
    often = [label for label, _ in stand_out.most_common(10)]  # there are ten colours
    figure = Figure(figsize=(10, 9), layout="constrained")
    axes = figure.subplot_mosaic("ab;cd;e.")
    panels = {
        "a": ["loss", "val_loss"], "b": [judged, f"val_{judged}"],
        "c": ["grad_norm"], "d": ["scale"], "e": often,
    }  # fmt: skip
    for key, names in panels.items():
        axis = axes[key]
        axis.set(xlabel="step", title=" and ".join(names))
        for name in names:
            points = [(line["step"], float(line[name])) for line in lines if name in line]
            points = [point for point in points if abs(point[1]) <= 1e38]
            if points:
                axis.plot(*zip(*points, strict=True), "." if key == "e" else ".-", label=name)
                if key in "ab":
                    axis.legend()
            if key in "cd" and any(value > 0 for _, value in points):
                axis.set_yscale("log")
        for step in skipped:
            axis.axvline(step, color="tab:red", linewidth=0.5)
    axes["e"].set(title="powers of ten above the median of all tensors (-99: it is 0)")
    axes["e"].set_yticks([-7, -6, -3, 0, 3, 6, 7], [-99, -6, -3, 0, 3, 6, "inf"])
    if often:
        legend = axes["e"].legend(title="tensors that stand out", bbox_to_anchor=(1, 1))
        legend.set_in_layout(False)
    picture = path.with_name("curves.png")
    figure.savefig(picture, dpi=100)
    return picture


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python report.py RUN_FOLDER")
    drawn = draw_curves(Path(sys.argv[1]) / "metrics.jsonl")
    print(drawn or "matplotlib is not installed: pip install matplotlib")
