"""The pages cannot rot: their commands and recipes run, files, links and flags exist, and each
figure is that of the raw file it names."""

import functools
import hashlib
import html
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import textwrap
from pathlib import Path

import torch
from helpers import ROOT, run_script
from torch.utils._pytree import tree_map

PAGES = {
    path: path.read_text()
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "bench" / "RESULTS.md",
        ROOT / "bench" / "diagnosis" / "README.md",
        ROOT / "models" / "README.md",
        *sorted(ROOT.glob("docs/*.md")),
    )
    if path.exists()
}
README = PAGES[ROOT / "README.md"]
ALL = "\n".join(PAGES.values())
USERS = (  # files that a page speaks of: made by a run, by you, by others, or by nobody
    "metrics.jsonl",
    "model.json",
    "mine.py",
    "NAME.py",
    "more_NAME.py",
    "utils.py",
    "airbench94_muon.py",
    "cifar10_speedrun.py",
    "mixup.py",
)


def blocks(page):
    """Indented blocks of code, dedented."""
    found = re.findall(r"(?:^|\n\n)((?: {4}.*\n+)+)", page)
    return [textwrap.dedent(block).strip() + "\n" for block in found]


def anchors(page):
    titles = re.findall(r"^#+ (.+)", page, re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(path, page):
    outside = r"(?!https?:|\.\./\.\./actions)"  # the badge of the workflow, on the site
    for target in re.findall(rf"\]\(({outside}[^)]+)\)|<img src=\"([^\"]+)\"", page):
        name, _, anchor = "".join(target).partition("#")
        there = path.parent / name
        leads = there.exists()
        if leads and anchor:
            leads = anchor in anchors(there.read_text() if name else page)
        if not leads:
            yield "".join(target)


def missing_files(path, page):
    for name in re.findall(r"`((?:[\w-]+/)*[\w*-]+\.(?:py|sh|jsonl?|md))`", page):
        places = ROOT, path.parent
        if Path(name).name not in USERS and not any([*place.glob(name)] for place in places):
            yield name


def test_every_link_file_flag_and_test_of_the_pages_exists():
    known = {
        "--standalone",
        "--nproc_per_node",
        "--nproc-per-node",
        "--max-restarts",
        "--help",
        "--nnodes",
        "--rdzv-backend",
        "--rdzv-id",
        "--rdzv-endpoint",
        "--local-addr",
    }
    for path in (
        *ROOT.glob("*.py"),
        *ROOT.glob("bench/**/*.py"),
        *ROOT.glob("autopsy/**/*.py"),
        *ROOT.glob("trainer/*.py"),
        ROOT / "run.sh",
    ):
        known |= set(re.findall(r"--[a-z][a-z0-9_-]+", path.read_text()))
    tests = "".join(path.read_text() for path in ROOT.glob("tests/**/test_*.py"))
    for path, page in PAGES.items():
        assert [*broken_links(path, page)] == [], path
        assert [*missing_files(path, page)] == [], path
        # an underscore is as good as a dash, and --no-x is the other side of --x
        flags = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]+", page))
        ways = {flag: {flag, flag.replace("_", "-"), flag.replace("--no-", "--")} for flag in flags}
        assert not [flag for flag, way in ways.items() if not way & known], path
        named = re.findall(r"`(test_\w+)`", page)
        assert not [name for name in named if f"def {name}(" not in tests], path


def test_a_planted_dead_link_and_a_planted_missing_file_are_seen(tmp_path):
    page = "# Title\n\n[a](#title) [b](#titel) [c](none.md) `guards.py` `gaurds.py`\n"
    assert [*broken_links(tmp_path / "page.md", page)] == ["#titel", "none.md"]
    assert [*missing_files(tmp_path / "page.md", page)] == ["gaurds.py"]


# Recipes: each block that imports torch is a script of its own


def recipes():
    for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))):
        for number, block in enumerate(blocks(PAGES[path])):
            alone = "best.pt" not in block and "from ." not in block  # else part of a whole
            if alone and re.search(r"^import torch", block, re.M):
                yield f"{path.stem}-{number}", block


OURS = {
    path.stem: path
    for path in (*ROOT.glob("*.py"), *ROOT.glob("extras/*.py"), *ROOT.glob("rescue/*.py"))
}
OURS["autopsy"] = ROOT / "autopsy"


def imports(block):
    return set(re.findall(r"^(?:from|import) (\w+)", block, re.M))


def test_each_recipe_runs_in_an_empty_folder_with_its_files_alone(tmp_path):
    ran = 0
    for name, block in recipes():
        try:
            [__import__(package) for package in imports(block) - OURS.keys()]
        except ImportError:
            continue  # a trainer that is not installed here
        folder = tmp_path / name
        folder.mkdir()
        for module in imports(block) & OURS.keys():
            copy = shutil.copytree if OURS[module].is_dir() else shutil.copy
            copy(OURS[module], folder / OURS[module].name)
        (folder / "recipe.py").write_text(block)
        code, out, err = run_script(["recipe.py"], folder)
        assert code == 0, (name, err)
        assert "inf  #" not in block or "skipped" in out or "all finite: True" in out, (name, out)
        assert "examine" in block or "nan" not in out, (name, out)
        ran += 1
    assert ran >= 5


# Commands


def commands(page):
    lines = re.findall(r"^    ((?:bash run\.sh|python train\.py|torchrun) ?.*)", page, re.M)
    shown = [re.sub(r"  +#.*", "", line) for line in lines]
    minutes = (
        "run.sh test",
        "run.sh failures",
        "run.sh bench",
        "run.sh gpu",
        "autopsy",
        "--replay",
        "predict",
        "bench/",
    )
    return [line for line in shown if not any(word in line for word in minutes)]


def test_the_commands_of_the_readme_run_as_written_but_shortened(image_folder, tmp_path):
    """A few steps on small images; whatever else a command asks for stays."""
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    programs = {
        "torchrun": [sys.executable, "-m", "torch.distributed.run"],
        "run.sh": [ROOT / "run.sh"],
        "train.py": [ROOT / "train.py"],
    }
    found = commands(README)
    for steps, command in enumerate(found, 2):
        words = shlex.split(command.replace("DIR", str(image_folder)))
        words += ["--max-steps", str(steps), "--batch-size", "16"]
        if "--data-dir" not in words:
            words += ["--data-dir", image_folder]
        argv = [part for word in words for part in programs.get(word, [word])]
        done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (words, done.stderr)
        assert json.loads(done.stdout.splitlines()[-1])["status"] == "done", words
        assert "auto" not in words or "resumed from" in done.stdout
    assert len(found) > 3


def check_transcript(block, folder):
    """Run the command of a block "$ python ...". It prints the block, other numbers allowed:
    another machine rounds otherwise and names other samples."""
    command, _, shown = block.partition("\n")
    done = subprocess.run(
        [sys.executable, *shlex.split(command)[2:]],
        cwd=folder,
        text=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": ""},
        timeout=600,
    )
    printed = done.stdout + done.stderr
    assert done.returncode == (3 if "->" in shown else 0), printed
    places = re.findall(r"\w+\.py:\d+", shown)
    assert all(place in printed for place in places), printed

    def words(text):
        number = r"-?\d+(\.\d+)?(e[+-]\d+)?(, \d+)*"
        return [re.sub(number, "N", line.strip()) for line in text.splitlines()]

    said = words(printed)
    for line in words(shown):
        start, _, end = line.partition("...")
        assert any(text.startswith(start) and text.endswith(end) for text in said), (line, printed)
    return printed


def test_the_transcript_of_the_doctor_is_what_it_prints(tmp_path):
    (shown,) = [
        block for block in blocks(README) if block.startswith("$ python autopsy my_train.py\n")
    ]
    shutil.copytree(ROOT / "autopsy", tmp_path / "autopsy")
    shutil.copy(ROOT / "docs" / "my_train.py", tmp_path)
    assert "my_train.py:12 " in check_transcript(shown, tmp_path)
    drawn = "\n".join(re.findall(r">([^<>]+)</text>", (ROOT / "docs" / "autopsy.svg").read_text()))
    _, said = html.unescape(drawn).replace("\n    ", " ").split("$ python autopsy")
    recorded = "$ python autopsy" + said.partition("\n$")[0]
    printed = check_transcript(recorded, tmp_path)
    reports = [re.sub(r"^(step .*|\.\.\.)\n", "", text, flags=re.M) for text in (recorded, printed)]
    assert reports[0].count("\n") == reports[1].strip().count("\n") + 1, "python docs/record.py"


def test_each_block_of_the_story_runs_in_its_order(tmp_path):
    """Files are written, commands print what is shown, and the mended line is mended."""
    shutil.copytree(ROOT / "autopsy", tmp_path / "autopsy")
    (tmp_path / "pumps").mkdir()
    before, diff, after = re.split(r"```(?:diff\n)?", PAGES[ROOT / "docs" / "story.md"])
    ran = 0
    for part, change in ((before, diff), (after, "")):
        for block in blocks(part):
            if file := re.match(r"# (pumps/\w+\.py)\n", block):
                (tmp_path / file[1]).write_text(block)
            else:
                check_transcript(block, tmp_path)
                ran += 1
        if change:
            bad, good = (line[1:] for line in change.splitlines())
            model = tmp_path / "pumps" / "model.py"
            assert model.read_text().count(bad) == 1
            model.write_text(model.read_text().replace(bad, good))
    saved = torch.load(tmp_path / "pumps.pt")
    assert ran == 4 and all(weight.isfinite().all() for weight in saved.values())


# Figures


def numbers(x):
    """All numbers of a raw file; of a long list of samples the mean alone; means of equal parts."""
    if isinstance(x, dict):
        for value in x.values():
            yield from numbers(value)
    elif isinstance(x, list):
        if len(x) <= 12 or not isinstance(x[0], int | float):
            for value in x:
                yield from numbers(value)
        yield from numbers(mean(x)) if len(x) > 1 else ()
    elif isinstance(x, int | float) and not isinstance(x, bool):
        yield x


def mean(parts):
    """Number by number; None where the parts are of different forms."""

    def of_numbers(*values):
        if all(isinstance(value, int | float) for value in values):
            return statistics.mean(values)

    try:
        return tree_map(of_numbers, *parts)
    except ValueError:
        return None


@functools.cache
def raw_numbers(name):
    """Of a raw file, or of all raw files in a folder."""
    found = set()
    for path in ROOT.glob(f"bench/{name}*.json*" if name.endswith("/") else f"bench/{name}"):
        text = path.read_text()
        parts = text.splitlines() if path.suffix == ".jsonl" else [text]
        found |= {number for part in parts for number in numbers(json.loads(part))}
    return found


def claims(page):
    """(raw files, text) of each row and paragraph that names raw files, or whose heading does."""
    files = []
    for paragraph in page.split("\n\n"):
        if re.match(r" {4}|#", paragraph):
            continue
        table = paragraph.startswith("|")
        named = re.findall(r"results/[\w-]+(?:/|\.jsonl?)?", paragraph)
        for row in paragraph.splitlines() if table else [paragraph]:
            own = re.findall(r"results/[\w*-]+(?:\.jsonl?|/)?", row)
            yield own or (files if table else []), row
        files = named if not table else []


def unproved(page):
    """Figures with a decimal point that stand in no raw file that is named beside them."""
    for files, text in claims(page):
        files = [name if "." in name else name.rstrip("/") + "/" for name in files]
        known = set().union(*(raw_numbers(name) for name in files))
        text = re.sub(r"(goals?:?|torch|Python|at least|at most)\s[\d.]+(,\s[\d.]+)*", "", text)
        if text.startswith("|") and text.count("|") > 5:  # the column of the goal
            cells = text.split("|")
            text = "|".join(cells[:3] + cells[4:]) if "results/" in text else text
        for figure in re.findall(r"(?<![\w.])\d+\.\d+(?![\w.])", text) if files else ():
            places = len(figure.partition(".")[2])
            if not any(
                abs(times * value - float(figure)) <= 0.50001 * 10**-places
                for value in known
                for times in (1, 100)
            ):
                yield figure, files


def test_each_figure_stands_in_the_raw_file_that_is_named_beside_it():
    for path in (ROOT / "README.md", ROOT / "bench" / "RESULTS.md"):
        assert [*unproved(PAGES[path])] == [], path.name


def test_a_planted_wrong_figure_is_seen():
    page = PAGES[ROOT / "bench" / "RESULTS.md"]
    for right, wrong in (("| 49.6 |", "| 46.9 |"), ("90.93 (90.77)", "90.39 (90.77)")):
        assert right in page
        assert len([*unproved(page.replace(right, wrong))]) == 1, right


def test_every_picture_was_drawn_from_the_raw_files_as_they_are_and_is_shown():
    pictures = sorted(ROOT.glob("bench/figures/*.svg"))
    assert pictures
    for picture in pictures:
        assert f"figures/{picture.name})" in ALL, picture.name
        sources = re.findall(r"([\w-]+\.json) ([0-9a-f]{64})", picture.read_text())
        assert sources, picture.name
        for name, digest in sources:
            content = (ROOT / "bench" / "results" / name).read_bytes()
            assert digest == hashlib.sha256(content).hexdigest(), f"{name}: bench/figures.py"
