"""The rules of the house: who imports whom, what is copied alone, which version it is."""

import ast
import re
import shutil
import sys

import pytest
from helpers import HIDDEN, ROOT, run_script

COPIED = [  # carried away one by one
    *(
        ROOT / f"{name}.py"
        for name in ("amp_policy", "fp32", "guards", "optim", "checkpoint", "ranks", "report")
    ),
    *(ROOT / "extras" / f"{name}.py" for name in ("muon", "ema", "graphs")),
    *(path for name in ("inject", "probes") for path in ROOT.glob(f"rescue/{name}.py")),
    *(ROOT / "data" / f"{name}.py" for name in ("decode", "decoded_cache")),
    *sorted(path for path in ROOT.glob("models/*.py") if path.stem != "__init__"),
]
AT_NEED = {
    "report.py": {"matplotlib", "numpy", "PIL", "tensorboard"},
    "decode.py": {"PIL"},
    "decoded_cache.py": {"PIL"},
}
FOLDERS = ("autopsy", "rescue", "trainer", "extras", "models", "data")
OURS = [
    path
    for path in ROOT.glob("**/*.py")
    if path.relative_to(ROOT).parts[0] in FOLDERS or path.parent == ROOT
]


def imported(path):
    """Dotted names of everything that a file imports, wherever in the file."""
    home = path.relative_to(ROOT).parent.parts if path.is_relative_to(ROOT) else ()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = home[: len(home) - node.level + 1] if node.level else ()
            base = ".".join(filter(None, (*package, node.module)))
            yield base or "."
            yield from (f"{base}.{alias.name}" for alias in node.names)


def strangers(path, allowed):
    names = {name.split(".")[0] for name in imported(path)}
    return names - allowed - set(sys.stdlib_module_names)


def test_a_copied_file_imports_nothing_of_ours_and_data_adds_torchvision():
    for path in COPIED:
        assert not strangers(path, {"torch"} | AT_NEED.get(path.name, set())), path
    for path in ROOT.glob("data/*.py"):
        assert not strangers(path, {"torch", "torchvision", "PIL", "data", "."}), path


def test_the_page_of_the_files_names_each_of_them():
    named = re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / "files.md").read_text())
    unnamed = {path.relative_to(ROOT).as_posix() for path in OURS}.difference(named)
    assert not [name for name in unnamed if not name.endswith("__init__.py")]


def test_nobody_imports_what_is_only_run():
    for path in OURS:
        run_alone = {"train", "bench", "failures", "tests"}
        assert not strangers(path, set()) & run_alone, path


def test_a_planted_sibling_import_is_seen(tmp_path):
    planted = tmp_path / "planted.py"
    for line in (
        "import guards",
        "from optim import EMA",
        "from . import optim",
        "def f():\n    import data.batches",
    ):
        planted.write_text(f"import torch\n{line}\n")
        assert strangers(planted, {"torch"}), line


def paste_block(path):
    """The code under "Paste::" in the docstring of a file, or None."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    block = re.search(r"^Paste::\n\n((?: {4}.*\n?|\n)+)", text, re.M)
    return block and re.sub(r"^ {4}", "", block[1], flags=re.M).strip() + "\n"


@pytest.mark.slow
def test_each_copied_file_runs_alone_and_so_does_the_block_in_its_docstring(tmp_path):
    """Without the names that Windows lacks, too."""
    for path in COPIED:
        folder = tmp_path / path.stem
        folder.mkdir()
        shutil.copy(path, folder)
        block = paste_block(path)
        assert block, f"{path.name}: no block under Paste::"
        assert len(block.splitlines()) <= 12, path.name
        (folder / "paste.py").write_text(block)
        (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
        draws = ["."] if path.name == "report.py" else []  # what a run has written
        for command in ([path.name, *draws], ["paste.py"]):
            code, _, err = run_script([*HIDDEN, *command], folder)
            assert code == 0, (path.name, command, err)


def test_a_copied_file_says_its_licence_and_the_version_that_the_changelog_begins_with():
    version = re.search(r"^## (\S+) ", (ROOT / "CHANGELOG.md").read_text(), re.M)[1]
    line = rf"# SPDX-License-Identifier: MIT \(finite {re.escape(version)}, \d{{4}}-\d\d-\d\d\)\n"
    files = [*COPIED, *ROOT.glob("autopsy/__init__.py")]
    assert not [path.name for path in files if not re.match(line, path.read_text())]


def test_what_stands_in_several_copied_files_is_the_same_in_all():
    """Functions and constants at the top level, docstrings left out."""
    first = {}
    for path in (path for path in COPIED if path.parent.name != "models"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name != "main":
                name = node.name
                node.body = node.body[ast.get_docstring(node) is not None :]
            elif isinstance(node, ast.Assign):
                name = ast.unparse(node.targets[0])
            else:
                continue
            meaning = ast.dump(node)
            assert first.setdefault(name, meaning) == meaning, (path.name, name)
