"""
A recording of a terminal as an animated SVG:  python docs/record.py     half a minute

my_train.py prints nan, and autopsy names the line. Both commands are run here, in an empty
folder, and docs/autopsy.svg shows what they printed: no line of it is written by hand. Most lines
"step N loss ..." are left out. The animation is CSS in the SVG, so a browser needs no script and no
player. Where animations are off, the last frame stands still.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

DOCS = Path(__file__).resolve().parent
COLUMNS = 94
WIDTH, HEIGHT = 8.4, 20  # of a character and of a line at 14 pixels, in pixels
MARGIN, BAR = 18, 34
HOLD = 6.0  # seconds that the last frame stays
COLOURS = {"command": "#e6edf3", "plain": "#8b949e", "bad": "#ff7b72", "name": "#ffa657",
           "cure": "#7ee787"}  # fmt: skip
BAD = re.compile(r"nan\b")
NAME = re.compile(r"my_train\.py:\d+")


class Line(NamedTuple):
    text: str
    kind: str  # a key of COLOURS
    wait: float  # seconds after the line before


def printed(folder: Path, *words: str) -> list[str]:
    """What a command of this folder prints."""
    alone = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=alone, capture_output=True,
                          text=True)  # fmt: skip
    return (done.stdout + done.stderr).splitlines()


def shortened(lines: list[str]) -> list[str]:
    """Without most steps: the first two, the last finite one, and two that are nan."""
    steps = [line for line in lines if line.startswith("step ")]
    rest = [line for line in lines if not line.startswith("step ")]
    bad = [line for line in steps if BAD.search(line)]
    good = [line for line in steps if line not in bad]
    dots = ["..."] if len(bad) > 2 else []
    return [*good[:2], "...", good[-1], *bad[:2], *dots, *rest]


def kind_of(text: str) -> str:
    if text.startswith("  try:"):
        return "cure"
    if NAME.search(text):
        return "name"
    return "bad" if BAD.search(text) else "plain"


def transcript() -> list[Line]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(DOCS.parent / "autopsy", Path(folder, "autopsy"))
        source = Path(shutil.copy(DOCS / "my_train.py", folder))
        runs = [("my_train.py",), ("autopsy", "my_train.py")]
        screens = [shortened(printed(folder, *words)) for words in runs]
        number = int(NAME.search("\n".join(screens[1])).group().partition(":")[2])
        guilty = source.read_text().splitlines()[number - 1]
    lines = []
    for words, screen in zip(runs, screens, strict=True):
        lines.append(Line(f"$ python {' '.join(words)}", "command", 1.2))
        lines += [Line(text, kind_of(text), 0.6 if kind_of(text) != "plain" else 0.25)
                  for text in screen]  # fmt: skip
    lines[0] = lines[0]._replace(wait=0.0)  # the first frame is not empty
    lines.append(Line(f"$ sed -n {number}p my_train.py", "command", 1.5))
    lines.append(Line(guilty, "name", 0.5))
    return lines


def folded(lines: list[Line]) -> list[Line]:
    """No line longer than the screen."""
    for line in lines:
        text, wait = line.text, line.wait
        while len(text) > COLUMNS:
            cut = text.rfind(" ", 4, COLUMNS)
            yield Line(text[:cut], line.kind, wait)
            text, wait = "    " + text[cut + 1 :], 0.0
        yield Line(text, line.kind, wait)


def svg(lines: list[Line]) -> str:
    """Each line appears at its time and stays until all begin again."""
    total = sum(line.wait for line in lines) + HOLD
    width = 2 * MARGIN + COLUMNS * WIDTH
    height = BAR + len(lines) * HEIGHT + MARGIN
    rules, texts, time = [], [], 0.0
    for i, line in enumerate(lines):
        time += line.wait
        begin = 100 * time / total
        rules.append(f"@keyframes a{i}{{0%{{opacity:0}}{begin:.2f}%{{opacity:1}}}}"
                     f".a{i}{{animation:a{i} {total:.1f}s step-end infinite}}")  # fmt: skip
        y = BAR + (i + 1) * HEIGHT - 5
        place = f'xml:space="preserve" x="{MARGIN}" y="{y}"'
        texts.append(f'<text class="a{i}" {place} fill="{COLOURS[line.kind]}">'
                     f"{escape(line.text)}</text>")  # fmt: skip
    dots = "".join(f'<circle cx="{MARGIN + 4 + 18 * i}" cy="17" r="5" fill="{colour}"/>'
                   for i, colour in enumerate(("#ff5f56", "#ffbd2e", "#27c93f")))  # fmt: skip
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" '
        f'width="{width:.0f}" height="{height}" role="img">',
        "<title>my_train.py prints nan; autopsy names the line that made it</title>",
        "<style>text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',"
        "monospace;white-space:pre}", *rules,
        "@media (prefers-reduced-motion:reduce){text{animation:none!important}}</style>",
        f'<rect width="100%" height="100%" rx="8" fill="#0d1117"/>{dots}', *texts, "</svg>", "",
    ])  # fmt: skip


if __name__ == "__main__":
    (DOCS / "autopsy.svg").write_text(svg([*folded(transcript())]))
    print(DOCS / "autopsy.svg")
