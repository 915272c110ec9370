"""
The lesson's other two forms:  python docs/learn.py      (matplotlib)

docs/learn.ipynb is made from docs/learn.md, cell by cell, so the two cannot differ.
docs/numbers.svg is the number line of fp16, bf16 and fp32.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent
FENCE = re.compile(r"^```python\n(.*?)^```\n", re.M | re.S)


def cells(page: str) -> list[tuple[str, str]]:
    """("markdown" or "code", text) of every cell."""
    parts = FENCE.split(page)  # text, code, text, code, ..., text
    kinds = ["markdown", "code"] * len(parts)
    return [(kind, text.strip()) for kind, text in zip(kinds, parts, strict=False) if text.strip()]


def notebook(page: str) -> str:
    """A Jupyter notebook, format 4.5, without outputs."""
    written = []
    for number, (kind, text) in enumerate(cells(page)):
        source = text.splitlines(keepends=True)
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": source}
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        written.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": written, "metadata": {"kernelspec": kernel}, "nbformat": 4,
             "nbformat_minor": 5}  # fmt: skip
    return json.dumps(whole, indent=1) + "\n"


def draw(path: Path) -> None:
    """How far each format reaches, on a line of powers of ten."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    grey, blue, orange, red = "#768390", "#4184e4", "#cc8a1e", "#e5534b"
    # powers of 2: the smallest subnormal and normal number, the largest exponent
    formats = {"fp32": (149, 126, 127), "bf16": (133, 126, 127), "fp16": (24, 14, 15)}
    marks = [("Adam's eps: 1e-8", 1e-8, "right"), ("6.1e-5: subnormal below", 2.0**-14, "right"),
             ("1", 1.0, "left"), ("65504: inf above", 65504.0, "left")]  # fmt: skip
    style = {"text.color": grey, "xtick.color": grey, "axes.edgecolor": grey, "ytick.color": grey,
             "axes.labelcolor": grey, "svg.hashsalt": "finite"}  # fmt: skip
    with pyplot.rc_context(style):
        figure, axis = pyplot.subplots(figsize=(9, 2.8), layout="constrained")
        for row, (tiniest, normal, largest) in enumerate(formats.values()):
            powers = (-tiniest, -normal, largest + 1)
            low, middle, high = (power * math.log10(2) for power in powers)
            first, second = ("subnormal numbers", "normal numbers") if row == 0 else (None, None)
            axis.barh(row, middle - low, left=low, height=0.5, color=orange, label=first)
            axis.barh(row, high - middle, left=middle, height=0.5, color=blue, label=second)
        for number, (text, value, side) in enumerate(marks):
            place, gap = math.log10(value), 0.5 if side == "left" else -0.5
            height = 2.5 + 0.35 * (number % 2)
            axis.vlines(place, -0.5, height + 0.25, color=red, linewidth=0.8)
            axis.text(place + gap, height, text, color=red, ha=side)
        axis.set(yticks=range(3), yticklabels=formats, ylim=(-0.5, 3.2), xlabel="powers of ten")
        axis.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside upper center", ncols=2, frameon=False)
        figure.savefig(path, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    page = (DOCS / "learn.md").read_text()
    (DOCS / "learn.ipynb").write_text(notebook(page))
    draw(DOCS / "numbers.svg")
    print(DOCS / "learn.ipynb", DOCS / "numbers.svg")
