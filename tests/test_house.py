"""The rules of the house: who imports whom, and that each core file runs alone."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = ("amp_policy.py", "fp32.py", "guards.py", "inject.py", "graphs.py", "optim.py", "checkpoint.py", "autopsy.py",
        "report.py")
ALLOWED = {
    **{name: {"torch"} for name in CORE},
    "report.py": {"torch", "matplotlib", "numpy", "PIL"},  # all but the standard library at need only
    "models/[a-z]*.py": {"torch"},
    "data/[a-z]*.py": {"torch", "torchvision", "PIL"},
    "ranks.py": {"torch"},
}


def imported(path):
    """Top-level names of everything a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." if node.level else node.module.split(".")[0]


def strangers(path, allowed):
    return set(imported(path)) - allowed - set(sys.stdlib_module_names)


@pytest.mark.parametrize("pattern", ALLOWED)
def test_a_leaf_imports_nothing_of_ours(pattern):
    paths = sorted(ROOT.glob(pattern))
    assert paths
    for path in paths:
        assert not strangers(path, ALLOWED[pattern]), f"{path.name} could not be copied alone"


def test_a_planted_sibling_import_is_caught(tmp_path):
    for line in ("import guards", "from optim import EMA", "from . import optim", "def f():\n    import data.batches"):
        planted = tmp_path / "planted.py"
        planted.write_text(f"import torch\n{line}\n")
        assert strangers(planted, {"torch"}), line


def test_nobody_imports_train():
    for path in [*ROOT.glob("*.py"), *ROOT.glob("models/*.py"), *ROOT.glob("data/*.py")]:
        assert "train" not in set(imported(path)), path


@pytest.mark.parametrize("name", [name for name in CORE if name not in ("report.py", "graphs.py")])
def test_a_core_file_copied_alone_demonstrates_itself(name, tmp_path):
    shutil.copy(ROOT / name, tmp_path)
    environment = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, name]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 4
