"""
Report: what a run leaves behind for people and for programs: metrics.jsonl, and curves.png drawn from it.

A run that dies at night is judged by what it wrote. So every line is on the disk the moment it is logged. NaN and inf
are written as the strings "nan" and "inf": JSON has no word for them, and to leave them out would hide what a reader
looks for. A resumed run cuts away the lines after its checkpoint, and the file reads as if the run had never died.

    {"args": {...}, "model": "cifarnet", "precision": "bf16", "hardware": "...", ...}       the first line
    {"step": 10, "loss": 1.93, "acc1": 31.2, "grad_norm": 0.41, "lr": 1e-3, "scale": 1.0, "updates": 10, "skipped": 0}
    {"step": 195, "epoch": 1.0, "train_loss": 1.60, "val_loss": 0.98, "val_acc1": 68.2}
    {"event": "skip", "step": 12, "reasons": ["input"], ...}                                events as they happen

    python report.py runs/x          draws runs/x/curves.png again

With `tensorboard=True` the same numbers go to TensorBoard too. Copy this file alone: it needs the standard library, and
matplotlib only to draw.
"""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any


class MetricsFile:
    """metrics.jsonl: at step 0 a new file that begins with `header`, else cut back to `step`. One rank `speaks`."""

    def __init__(self, folder: Path, header: dict, step: int = 0, tensorboard: bool = False, speaks: bool = True):
        self.board, self.speaks = None, speaks
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
        fields = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
        with open(self.path, "a") as file:
            file.write(json.dumps(fields) + "\n")
        if self.board and "event" not in fields:
            for name, value in fields.items():
                if name != "step":
                    self.board.add_scalar(name, float(value), fields["step"])
        elif self.board:
            self.board.add_text(fields["event"], json.dumps(fields), fields.get("step"))

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the last event, draw the curves, print the summary for people and, as the last line, for programs."""
        if not self.speaks:
            return
        self.write(event="end", **summary)
        curves = draw_curves(self.path)
        files = [self.path, *sorted(self.path.parent.glob("*.pt")), *([curves] if curves else [])]
        print("\n".join(["", *(f"{name:<18} {value}" for name, value in summary.items()), *map(str, files)]))
        print(json.dumps(summary))

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
    """Draw loss, accuracy, gradient norm and loss scale beside `path`; the picture's path, or None without matplotlib.
    A red line marks each skipped step. A NaN is a gap, and so is a number above 1e38."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # the first start says that it builds its font cache
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    skipped = [line["step"] for line in lines if line.get("event") == "skip"]
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 6), layout="constrained")
    judged = next((key[4:] for line in lines for key in line if key.startswith("val_") and key != "val_loss"), "acc1")
    panels = (("loss", "val_loss"), (judged, f"val_{judged}"), ("grad_norm",), ("scale",))
    for axis, names in zip(axes.flat, panels, strict=True):
        largest = -math.inf
        for name in names:
            points = [(line["step"], float(line[name])) for line in lines if name in line and "event" not in line
                      and abs(float(line[name])) <= 1e38]
            style = dict(marker="o", linewidth=2) if name.startswith("val_") else dict(linewidth=1)
            if points:
                axis.plot(*zip(*points, strict=True), label=name, **style)
            largest = max([largest, *(value for _, value in points)])
        for step in skipped:
            axis.axvline(step, color="tab:red", linewidth=0.5)
        if names[0] in ("grad_norm", "scale") and largest > 0:
            axis.set_yscale("log")
        axis.set(xlabel="step", title=" and ".join(names))
        if len(names) > 1 and largest > -math.inf:
            axis.legend()
    picture = Path(path).with_name("curves.png")
    figure.savefig(picture, dpi=100)
    pyplot.close(figure)
    return picture


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python report.py RUN_FOLDER")
    print(draw_curves(Path(sys.argv[1]) / "metrics.jsonl") or "matplotlib is not installed: pip install matplotlib")
