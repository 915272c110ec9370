"""The lesson: its cells print what it says, its notebook is the page; and the page of the step."""

import contextlib
import io
import re
import sys

from helpers import ROOT

sys.path.insert(0, str(ROOT / "docs"))
import learn

PAGE = (ROOT / "docs" / "learn.md").read_text()


def test_every_cell_prints_what_the_page_says():
    space = {}
    for kind, text in learn.cells(PAGE):
        if kind == "code":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(text, space)
            said = re.findall(r"^# -> (.*)", text, re.M)
            assert said and printed.getvalue().splitlines() == said, text


def test_the_notebook_is_made_from_the_page():
    assert (ROOT / "docs" / "learn.ipynb").read_text() == learn.notebook(PAGE), "docs/learn.py"


def test_the_step_on_its_page_is_that_of_train_py():
    page = (ROOT / "docs" / "step.md").read_text()
    (block,) = re.findall(r"^    # 1\. (?:.*\n)+?(?=\n)", page, re.M)
    assert "# 4. Rejected" in block and block in (ROOT / "train.py").read_text()
