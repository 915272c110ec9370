"""The folder autopsy/: who imports whom, what can be carried away, and what can be deleted."""

import ast
import re
import shutil
import subprocess
import sys
import textwrap

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
    assert packed.stat().st_size < 140_000
    scripts = ("paste.py", 3, "aten.log"), ("raises.py", 1, "ValueError: mine")
    for tool in ("autopsy", packed):
        for script, code, said in scripts:
            command = [sys.executable, tool, script]
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
            assert done.returncode == code and said in done.stderr, done.stderr
        assert done.stderr.count("File ") == 1, "a frame of ours in the script's traceback"


WINGS = {  # of autopsy/: which other folders each may import; "" is the examination
    "": set(),
    "watch": {"", "silent", "before"},  # the last two where they are needed, if they are there
    "silent": {"", "watch"},
    "before": {"", "watch"},
}


def test_the_examination_never_imports_the_watch_and_wings_only_what_they_may():
    for path in AUTOPSY:
        home = path.parent.relative_to(ROOT / "autopsy").name
        for name in imported(path):
            first, folder, *_ = *name.split("."), ""
            folder = folder if folder in WINGS else ""
            if first == "autopsy" and path.name != "__main__.py":
                assert folder == home or folder in WINGS[home], (path, name)


def report_of(folder, script, *flags):
    code, _, said = run_script([folder / "autopsy", *flags, script], folder)
    assert "Traceback" not in said
    return code, said


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


def test_silent_and_before_and_each_check_can_be_deleted(tmp_path):
    script, report = tmp_path / "script.py", ""
    script.write_text(paste_block(ROOT / "autopsy" / "__init__.py"))
    shutil.copytree(ROOT / "autopsy", tmp_path / "autopsy")
    whole = report_of(tmp_path, script)
    assert whole[0] == 3 and "aten.log" in whole[1]
    checks = [p for p in (tmp_path / "autopsy/silent").glob("*.py") if p.stem != "__init__"]
    assert len(checks) > 3
    for path in checks:
        report = path.read_text()
        path.unlink()
        assert report_of(tmp_path, script) == whole, path
        path.write_text(report)
    for name in ("silent", "before"):
        shutil.rmtree(tmp_path / "autopsy" / name)
    assert report_of(tmp_path, script) == whole
    code, said = report_of(tmp_path, script, "--would-overflow")
    assert code == 1 and "autopsy/before/" in said


def test_no_name_crosses_a_room_with_an_underscore():
    ours = set(re.findall(r"(?:self\.|def )(_[a-z]\w*)", "".join(p.read_text() for p in AUTOPSY)))
    for path in AUTOPSY:
        tree = ast.parse(path.read_text())
        taken = [a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names
                 if n.level]
        attributes = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
        taken += [n.attr for n in attributes if ast.unparse(n.value) != "self" and n.attr in ours]
        assert not [name for name in taken if name.startswith("_")], path.name
