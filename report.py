# SPDX-License-Identifier: MIT (finite 2.2.0, 2026-11-22)
"""
Report: what a run leaves behind for people and for programs: metrics.jsonl, and curves.png drawn from it.

A run that dies at night is judged by what it wrote. So every line is on the disk the moment it is logged. NaN and inf
are written as the strings "nan" and "inf": JSON has no word for them, and to leave them out would hide what a reader
looks for. A resumed run cuts away the lines after its checkpoint: the file reads as if the run had never died.

    {"args": {...}, "model": "cifarnet", "precision": "bf16", "hardware": "...", ...}       the first line
    {"step": 10, "loss": 1.93, "acc1": 31.2, "grad_norm": 0.41, "lr": 1e-3, "scale": 1.0, "updates": 10, "skipped": 0}
    {"step": 100, "tensors": {"conv1.weight": {"grad_norm": 0.0, ...}, ...}}    those that stand out, every 100 steps
    {"step": 195, "epoch": 1.0, "train_loss": 1.60, "val_loss": 0.98, "val_acc1": 68.2}
    {"event": "skip", "step": 12, "reasons": ["input"], ...}                                events as they happen

    python report.py runs/x          draws runs/x/curves.png again

With `tensorboard=True` the same numbers go to TensorBoard too. Copy this file alone: only drawing needs matplotlib.
"""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any


class MetricsFile:
    """metrics.jsonl: at step 0 a new file that begins with `header`, else cut back to `step`. One rank `speaks`."""

    def __init__(self, folder: Path, header: dict, step: int = 0, tensorboard: bool = False, speaks: bool = True):
        self.board, self.speaks = None, speaks
        self.figures: dict[str, dict[str, float]] = {}  # of all tensors at the last look
        if not speaks:
            return
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # ImportError where the package is missing

            self.board = SummaryWriter(folder, purge_step=step + 1)
        self.path = Path(folder) / "metrics.jsonl"
        lines = [json.dumps(header, default=str)]
        if step and self.path.exists():
            lines = [line for line in self.path.read_text().splitlines() if written_by(line, step)]
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(line + "\n" for line in lines))
        os.replace(temporary, self.path)

    def write(self, **fields: Any) -> None:
        """Append one line and hand it to the operating system: the line survives the death of this process."""
        if not self.speaks:
            return
        fields = json.loads(json.dumps(fields), parse_constant=lambda word: str(float(word)))  # "nan", "inf", "-inf"
        with open(self.path, "a") as file:
            file.write(json.dumps(fields) + "\n")
        if self.board and "event" in fields:
            self.board.add_text(fields["event"], json.dumps(fields), fields.get("step"))
        elif self.board:
            for name in fields.keys() - {"step", "tensors"}:
                self.board.add_scalar(name, float(fields[name]), fields["step"])

    def tensors(self, step: int, figures: dict[str, dict[str, float]]) -> None:
        """A line about the five tensors that stand out most, and about those that jumped. TensorBoard gets all.

        figures: name -> grad_norm, weight_norm, update_ratio. A non-finite norm stands out most, then a 0, then what is
        furthest from the median. A weight norm has to jump: 10 times since the last look, beyond the median change.
        """
        here, before, chosen = decades(figures), self.figures, {}
        for name, figure in sorted(here, key=lambda key: -abs(here[key])):
            if len(chosen) < 5 and (figure != "weight_norm" or here[name, figure] == math.inf):
                chosen.setdefault(name, figure)
        change = decades({name: {f: v / before[name][f] if 0 < before[name][f] < math.inf else math.nan
                                 for f, v in values.items()} for name, values in figures.items() if name in before})
        chosen |= {name: figure for (name, figure), d in change.items() if 1 <= abs(d) < math.inf}
        self.figures = figures
        self.write(step=step, tensors={
            name: {key: float(f"{v:.4g}") for key, v in figures[name].items()}
            | {"figure": f, "decades": here[name, f], "change": change.get((name, f))} for name, f in chosen.items()})
        for name, values in figures.items() if self.board else ():
            for figure, value in values.items():
                self.board.add_scalar(f"{figure}/{name}", value, step)

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the last event, draw the curves, print the summary for people."""
        if not self.speaks:
            return
        self.write(event="end", **summary)
        files = [self.path, *sorted(self.path.parent.glob("*.pt")), *filter(None, [draw_curves(self.path)])]
        print("\n".join(["", *(f"{name:<18} {value}" for name, value in summary.items()), *map(str, files)]))

    def picture(self, path: Path, step: int) -> None:
        """Log a picture or a text that was written beside the metrics."""
        self.write(event="shown", step=step, file=str(path.relative_to(self.path.parent)))
        if self.board and path.suffix == ".png":
            import numpy
            from PIL import Image

            self.board.add_image(path.parent.name, numpy.asarray(Image.open(path)), step, dataformats="HWC")


def commit() -> str:
    """The commit of this file's checkout, with "-dirty" if files were changed since; "" outside of git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def peak_memory_mb(cuda: bool) -> int:
    """Most memory in use so far: that of torch's tensors on the GPU, else that of this process."""
    if cuda:
        import torch

        return round(torch.cuda.max_memory_allocated() / 2**20)
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit)


def decades(figures: dict[str, dict[str, float]]) -> dict[tuple[str, str], float]:
    """(tensor, figure) -> powers of ten above the figure's median over all tensors. Non-finite: inf. 0: -99.
    Left out: the update ratio of weights that are 0; a figure that is 0 or bad in all."""
    out = {}
    for f in ("update_ratio", "grad_norm", "weight_norm"):
        known = {name: values[f] for name, values in figures.items() if f != "update_ratio" or values[f] < math.inf}
        alive = [v for v in known.values() if 0 < v < math.inf]
        median = statistics.median(alive or [1.0])
        out |= {(name, f): round(math.log10(max(v / median, 1e-99)), 3) if v < math.inf else math.inf
                for name, v in known.items() if alive}
    return out


def written_by(line: str, step: int) -> bool:
    """Whether a line belongs to the first `step` steps. A half-written last line does not."""
    try:
        return json.loads(line).get("step", 0) <= step
    except json.JSONDecodeError:
        return False


def holds_a_run(folder: Path) -> bool:
    """Whether there is a checkpoint or a logged step in `folder`. A run that failed earlier leaves only a header."""
    lines = (line for path in folder.glob("metrics.jsonl") for line in path.read_text().splitlines())
    return any(folder.glob("*.pt")) or not all(written_by(line, 0) for line in lines)


def draw_curves(path: Path) -> Path | None:
    """Loss, accuracy, gradient norm, loss scale, tensors that stand out; the path, or None without matplotlib.

    A red line marks each skipped step. A NaN is a gap, and so is a number above 1e38.
    """
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # the first start says that it builds its font cache
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    skipped = [line["step"] for line in lines if line.get("event") == "skip"]
    figure = Figure(figsize=(10, 9), layout="constrained")
    axes = figure.subplot_mosaic("ab;cd;e.")
    judged = next((key[4:] for line in lines for key in line if key.startswith("val_") and key != "val_loss"), "acc1")
    tensors = [(line["step"], f"{name} {entry['figure']}", min(max(-6.0, float(entry["decades"])), 6.0))
               for line in lines for name, entry in line.get("tensors", {}).items()]
    lines += [{"step": step, name: height} for step, name, height in tensors]
    often = [name for name, _ in Counter(name for _, name, _ in tensors).most_common(10)]  # there are ten colours
    panels = (("loss", "val_loss"), (judged, f"val_{judged}"), ("grad_norm",), ("scale",), often)
    for axis, names in zip((axes[key] for key in "abcde"), panels, strict=True):
        values = []
        for name in names:
            points = [(line["step"], float(line[name])) for line in lines if name in line and "event" not in line
                      and abs(float(line[name])) <= 1e38]
            marker, width = ("o", 2) if name.startswith("val_") else (".", 0) if names is often else (None, 1)
            if points:
                axis.plot(*zip(*points, strict=True), label=name, marker=marker, linewidth=width)
            values += [value for _, value in points]
        for step in skipped:
            axis.axvline(step, color="tab:red", linewidth=0.5)
        if names[:1] in (("grad_norm",), ("scale",)) and max(values, default=0) > 0:
            axis.set_yscale("log")
        axis.set(xlabel="step", title=" and ".join(names))
        if len(names) > 1 and values:
            axis.legend()
    axes["e"].set(title="powers of ten above the median (-6: 0, 6: bad)")
    if often:
        axes["e"].legend(title="tensors that stand out", bbox_to_anchor=(1, 1), loc="upper left").set_in_layout(False)
    picture = Path(path).with_name("curves.png")
    figure.savefig(picture, dpi=100)
    return picture


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python report.py RUN_FOLDER")
    print(draw_curves(Path(sys.argv[1]) / "metrics.jsonl") or "matplotlib is not installed: pip install matplotlib")
