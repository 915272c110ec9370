"""The folder autopsy/: who imports whom, what can be carried away, and what can be deleted."""

import ast
import json
import os
import py_compile
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import zipapp

import pytest
import torch
from helpers import HIDDEN, ROOT, needs_unix, run_script
from test_house import imported, paste_block, strangers

AUTOPSY = sorted(ROOT.glob("autopsy/**/*.py"))  # carried away together


def test_it_needs_only_torch():
    for path in AUTOPSY:
        assert not strangers(path, {"torch", "autopsy", "."}), path


@needs_unix
def test_the_folder_runs_alone_and_so_does_the_one_file_that_is_packed_of_it(tmp_path):
    shutil.copytree(ROOT / "autopsy", tmp_path / "autopsy")
    (tmp_path / "paste.py").write_text(paste_block(ROOT / "autopsy" / "__init__.py"))
    code, out, err = run_script([*HIDDEN, "paste.py"], tmp_path)
    assert code == 0 and "paste.py:5 in <module>: first bad op: aten.log" in out, err
    code, _, err = run_script([*HIDDEN, "autopsy", "paste.py"], tmp_path)
    assert code == 3 and "aten.log" in err, err
    (tmp_path / "raises.py").write_text("raise ValueError('mine')\n")
    packed = tmp_path / "one" / "autopsy.pyz"
    packed.parent.mkdir()
    subprocess.run(["bash", ROOT / "run.sh", "pack", packed], check=True)
    assert packed.stat().st_size < 340_000
    scripts = ("paste.py", 3, "aten.log"), ("raises.py", 1, "ValueError: mine")
    for tool in ("autopsy", packed):
        for script, code, said in scripts:
            command = [sys.executable, tool, script]
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
            assert done.returncode == code and said in done.stderr, done.stderr
        assert done.stderr.count("File ") == 1, "a frame of ours in the script's traceback"


WINGS = {  # of autopsy/: which other folders each may import; "" is the examination
    "": set(),
    "watch": {"", "silent", "before", "describe"},  # where they are needed, if they are there
    "silent": {"", "watch"},
    "before": {"", "watch"},
    "describe": {"", "watch"},
}


def test_the_examination_never_imports_the_watch_and_wings_only_what_they_may():
    for path in AUTOPSY:
        home, *_ = *path.parent.relative_to(ROOT / "autopsy").parts, ""
        for name in imported(path):
            first, folder, *_ = *name.split("."), ""
            folder = folder if folder in WINGS else ""
            if first == "autopsy" and path.name != "__main__.py":
                assert folder == home or folder in WINGS[home], (path, name)


def report_of(folder, script, *flags):
    code, _, said = run_script([folder / "autopsy", *flags, script], folder)
    assert "Traceback" not in said
    return code, said


WRONG = """import sys
import torch
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(3):
    loss = torch.log(net(torch.ones(8, 4)).abs() - (99 if step == 2 else -1)).mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""


@needs_unix
def test_what_python_runs_runs_under_the_installed_command_too(tmp_path):
    """A file, a module, a folder, an archive, compiled code, standard input; and a traceback."""
    pytest.importorskip("setuptools")
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    shutil.copytree(ROOT / "autopsy", source / "autopsy")
    shutil.copy(ROOT / "pyproject.toml", source)
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        site,
        source,
    ]
    subprocess.run(install, check=True)
    assert all((site / path.relative_to(ROOT)).is_file() for path in AUTOPSY)
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "raises.py").write_text("import torch\nraise ValueError('mine')\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text(WRONG)
    zipapp.create_archive(tmp_path / "folder", tmp_path / "archive.pyz")
    py_compile.compile(tmp_path / "wrong.py", tmp_path / "compiled.pyc")
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    for words in (
        ["wrong.py"],
        ["-m", "wrong"],
        ["folder"],
        ["archive.pyz"],
        ["compiled.pyc"],
        ["-"],
        ["raises.py"],
    ):
        done = subprocess.run(
            [sys.executable, site / "bin" / "autopsy", *words],
            cwd=tmp_path,
            env=environment,
            input=WRONG * (words == ["-"]),
            capture_output=True,
            text=True,
        )
        if words == ["raises.py"]:
            assert done.returncode == 1 and done.stderr.count("File ") == 1, done.stderr
        else:
            assert done.returncode == 3 and ":6 in <module>" in done.stderr, (words, done.stderr)


@pytest.mark.parametrize(
    "beside, name",
    [
        ("torch.py", "torch"),
        ("torch/__init__.py", "torch"),
        ("random.py", "random"),
        ("os.py", ""),
        ("batches.py", ""),
        ("torch/notes.txt", ""),
    ],
)
def test_a_file_beside_the_script_that_python_would_import_is_told(tmp_path, beside, name):
    """os is loaded before Python looks beside the script."""
    (tmp_path / "script.py").write_text("print('ran')\n")
    (tmp_path / beside).parent.mkdir(exist_ok=True)
    (tmp_path / beside).write_text("")
    shutil.copytree(ROOT / "autopsy", tmp_path / "autopsy")
    code, said = report_of(tmp_path, tmp_path / "script.py")
    assert code == 0 and said.count("rename it") == bool(name)
    assert f"{beside} as {name}: rename it" in said or not name


def test_the_report_is_printed_and_overwrites_only_a_report(tmp_path):
    shutil.copytree(ROOT / "autopsy", tmp_path / "autopsy")
    script, target = tmp_path / "wrong.py", tmp_path / "autopsy.txt"
    script.write_text(WRONG)
    whole = report_of(tmp_path, script)
    assert whole[0] == 3 and "all of it: autopsy.txt" in whole[1]
    assert report_of(tmp_path, script) == whole, "a report is written over"
    report = target.read_text()
    kinds = {
        "a link": lambda: target.symlink_to(tmp_path / "precious"),
        "dangling": lambda: target.symlink_to(tmp_path / "nothing"),
        "a pipe": lambda: os.mkfifo(target),
        "a folder": target.mkdir,
        "notes": lambda: target.write_text("my notes\n"),
    }
    (tmp_path / "precious").write_text("mine\n")
    for kind, make in kinds.items():
        target.unlink()
        make()
        code, said = report_of(tmp_path, script)
        assert code == 3 and "not saved" in said and report.splitlines()[-3] in said, kind
        if kind == "a folder":
            target.rmdir()
            target.touch()
    assert (tmp_path / "precious").read_text() == "mine\n" and target.read_text() == "my notes\n"
    assert not (tmp_path / "nothing").exists()
    for place in (script, tmp_path / "no" / "such" / "report.txt"):
        code, said = report_of(tmp_path, script, "--report", place)
        assert code == 3 and "not saved" in said and script.read_text() == WRONG


def test_an_inherited_variable_runs_no_code_and_closed_output_keeps_the_exit_code(tmp_path):
    class Planted:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "planted"),)

    torch.save((0, Planted()), tmp_path / "start")
    (tmp_path / "wrong.py").write_text(WRONG)
    command = [sys.executable, ROOT / "autopsy", "wrong.py"]
    environment = {**os.environ, "AUTOPSY_RERUN": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "unset it" in done.stderr
    assert not (tmp_path / "planted").exists()
    words = " ".join(map(shlex.quote, map(str, command)))
    for closed in ("2>&-", "2>/dev/full"):
        assert subprocess.run(["bash", "-c", f"{words} {closed}"], cwd=tmp_path).returncode == 3


LIMIT = """import signal, ctypes, threading, time, torch
class Limit(Exception): pass
def ring(*_): raise Limit
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=.01)
signal.signal(signal.SIGALRM, ring)
assert signal.getsignal(signal.SIGALRM) is ring
signal.setitimer(signal.ITIMER_REAL, 0.7)
try:
    while True:
        net(torch.randn(8, 4)).pow(2).mean().backward()
        optimizer.step(); optimizer.zero_grad()
except Limit: print("timed out")
"""


@needs_unix
def test_what_a_signal_handler_raises_in_a_hook_is_the_scripts(tmp_path):
    (tmp_path / "script.py").write_text(LIMIT)
    for _ in range(3):
        code, out, said = run_script([ROOT / "autopsy", tmp_path / "script.py"], tmp_path)
        assert code == 0 and out.endswith("timed out\n") and "failed" not in said


def test_the_check_of_the_page_for_contributors_works(tmp_path):
    page = (ROOT / "CONTRIBUTING.md").read_text()
    (check,) = re.findall(r"^    # autopsy/silent/first_loss.py\n((?:    .*\n|\n)+)", page, re.M)
    shutil.copytree(ROOT / "autopsy", tmp_path / "autopsy")
    (tmp_path / "autopsy/silent/first_loss.py").write_text(textwrap.dedent(check))
    for factor, said in ((0, True), (1, False)):
        script = tmp_path / "script.py"
        script.write_text(
            "import torch\nnet = torch.nn.Linear(2, 1)\n"
            "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
            "for _ in range(3):\n"
            f"    (net(torch.ones(4, 2)).square().mean() * {factor}).backward()\n"
            "    optimizer.step()\n    optimizer.zero_grad()\n"
        )
        assert ("the first loss was exactly 0" in report_of(tmp_path, script)[1]) == said


def test_each_wing_can_be_deleted(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(paste_block(ROOT / "autopsy" / "__init__.py"))
    shutil.copytree(ROOT / "autopsy", tmp_path / "autopsy")
    whole = report_of(tmp_path, script)
    assert whole[0] == 3 and "aten.log" in whole[1]
    wings = {"silent": "", "before": "--would-overflow", "describe": "--describe"}
    for name in wings:
        shutil.rmtree(tmp_path / "autopsy" / name)
    assert report_of(tmp_path, script) == whole
    for name, flag in wings.items():
        code, said = report_of(tmp_path, script, flag) if flag else (1, "autopsy/silent/")
        assert code == 1 and f"autopsy/{name}/" in said


SILENT = ROOT / "autopsy" / "silent"
SHARED = SILENT / "shared"


def module_of(path):
    """Its name, as Python has it."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def check_of(path):
    """What one deletes with this file: the file, or its folder if that is one check."""
    tree = ast.parse((path.parent / "__init__.py").read_text())
    is_one = any(isinstance(node, ast.ClassDef) for node in tree.body)
    return path.parent if is_one else path


def test_no_check_imports_another_one_and_what_they_share_imports_none():
    for path in SILENT.rglob("*.py"):
        for name in imported(path):
            if f"{name}.".startswith(f"{module_of(SHARED)}."):
                assert path.parent != SHARED, (path, name)
            elif name.startswith(f"{module_of(SILENT)}."):
                assert name.startswith(f"{module_of(check_of(path))}."), (path, name)


WITHOUT = """import importlib, json, sys
from pathlib import Path
from autopsy.watch.events import find_checks

sys.dont_write_bytecode = False  # to compile each file once

def found():
    importlib.invalidate_caches()
    for name in [name for name in sys.modules if name.startswith("autopsy.silent.")]:
        del sys.modules[name]
    checks, off = find_checks()
    return [(check.__module__, check.__name__) for check in checks], off

all_of_them = {"": found()}
for path in sorted(Path("autopsy/silent").rglob("*.py")):
    away = path.rename(path.with_suffix(".away"))
    all_of_them[path.as_posix()] = found()
    away.rename(path)
print(json.dumps(all_of_them))
"""


def test_each_check_can_be_deleted_and_what_lacks_a_file_is_told(tmp_path):
    """Without a file exactly its own check is missing, or those that import it from shared/."""
    shutil.copytree(ROOT / "autopsy", tmp_path / "autopsy")
    (tmp_path / "without.py").write_text(WITHOUT)
    code, out, err = run_script(["without.py"], tmp_path)
    assert code == 0, err
    found = {
        path: ({tuple(check) for check in checks}, off)
        for path, (checks, off) in json.loads(out).items()
    }
    whole, off = found.pop("")
    assert len(whole) > 50 and not off
    importers = {}  # module: those of the checks that import it
    for path in SILENT.rglob("*.py"):
        for name in imported(path):
            importers.setdefault(name, set()).add(module_of(check_of(path)))
    for path, (checks, off) in found.items():
        file = ROOT / path
        gone, module = {name for name, _ in whole - checks}, module_of(file)
        if file.parent == SHARED and file.stem != "__init__":
            assert gone == importers[module] and len(off) == 1, path
        elif check_of(file) != file or file.stem != "__init__":
            assert gone == {module_of(check_of(file))}, path
            assert len(off) == (module not in gone), path
        assert not off or off[0].endswith(f" off: {module.replace('.', '/')} is not there"), off


def test_a_check_that_lacks_a_file_is_told_at_the_end(tmp_path):
    shutil.copytree(ROOT / "autopsy", tmp_path / "autopsy")
    script = tmp_path / "script.py"
    script.write_text(WRONG.replace("99 if step == 2 else -1", "-1"))
    assert " off: " not in report_of(tmp_path, script)[1]
    (tmp_path / "autopsy/silent/spikes/rows.py").unlink()
    (tmp_path / "autopsy/silent/shared/syntax.py").unlink()
    code, said = report_of(tmp_path, script)
    assert code == 0, said
    assert "the check spikes is off: autopsy/silent/spikes/rows is not there" in said
    assert (
        "the checks data/shuffled_apart, evaluation/left_in_eval, loop/not_called, loop/wrong_way, "
        "network/unused, state/best_is_last, weights/one_in_list are off: "
        "autopsy/silent/shared/syntax is not there"
    ) in said


def test_no_name_crosses_a_room_with_an_underscore():
    ours = set(re.findall(r"(?:self\.|def )(_[a-z]\w*)", "".join(p.read_text() for p in AUTOPSY)))
    for path in AUTOPSY:
        tree = ast.parse(path.read_text())
        taken = [
            a.name
            for n in ast.walk(tree)
            if isinstance(n, ast.ImportFrom)
            for a in n.names
            if n.level
        ]
        attributes = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
        taken += [n.attr for n in attributes if ast.unparse(n.value) != "self" and n.attr in ours]
        assert not [name for name in taken if name.startswith("_")], path.name
