"""The README cannot rot: its step is train.py's, its recipes run, its files and flags exist, its figures have files."""

import hashlib
import itertools
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

import pytest
import torch

import flags
import train

ROOT = Path(train.__file__).parent
README = (ROOT / "README.md").read_text()
RESULTS = (ROOT / "bench" / "RESULTS.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
RECIPE_PAGE = (ROOT / "docs" / "recipes.md").read_text()
PAGES = README + RESULTS + RECIPE_PAGE + (ROOT / "docs" / "metrics.md").read_text() + CONTRIBUTING


def raw(name):
    return json.loads((ROOT / f"bench/results/{name}.json").read_text())


def test_the_planted_faults_and_flips_are_those_of_the_raw_files():
    page = " ".join(README.split())
    cells = [cell for ranks in (1, 2) for cell in raw(f"campaign-{ranks}")["cells"]]
    holds = sum(cell["holds"] == "" for cell in cells)
    exist = sum(not cell["holds"].startswith("n/a") for cell in cells)
    assert f"{holds} of the {exist} combinations that can exist held" in page
    assert f"{holds} of {exist} that can exist | all | {len(cells)}" in RESULTS
    flips = raw("flips-cpu")["flips"]
    named = sum(flip["seen"] and flip["named"] and flip["action"].startswith("repaired") for flip in flips)
    assert f"Of {len(flips)} bits flipped in weights and moments of three ranks, {named} were seen, named and" in page
    shares = [f"{row['share']:.2%}".replace("%", " %") for row in raw("verify_cost-cpu")["models"].values()]
    assert f"{', '.join(shares)} | 0.5 %" in RESULTS


def section(page, title):
    """What stands under a heading, up to the next one."""
    return re.search(rf"^(#+) {re.escape(title)}\n(.*?)(?=^#+ |\Z)", page, re.M | re.S)[2]


def test_the_step_in_the_readme_is_the_step_of_train_py():
    source = (ROOT / "train.py").read_text()
    quoted = source[source.index("    # 1. Every micro-batch"):source.index("\n\ndef check_up")]
    assert textwrap.indent(textwrap.dedent(quoted).strip(), "    ") in README


def test_every_file_the_readme_names_exists():
    for name in re.findall(r"`((?:[a-z_]+/)*[a-z_0-9-]+\.(?:py|sh|jsonl?|md))`", README):
        if name not in ("metrics.jsonl", "my_train.py"):
            assert (ROOT / name).exists(), name
    for name in re.findall(r"`(results/[\w*-]+\.jsonl?)`", RESULTS):
        assert list((ROOT / "bench").glob(name)), name


def test_every_link_of_the_pages_leads_to_a_file_and_a_heading_that_exist():
    def anchors(page):
        titles = re.findall(r"^#+ (.+)", page, re.M)
        return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}

    for folder, page in ((ROOT, README), (ROOT / "bench", RESULTS), (ROOT / "docs", RECIPE_PAGE),
                         (ROOT, CONTRIBUTING)):
        for target in re.findall(r"\]\(((?!https?:)[^)]+)\)", page) + re.findall(r'<img src="([^"]+)"', page):
            name, _, anchor = target.partition("#")
            assert not name or (folder / name).exists(), target
            assert not anchor or anchor in anchors((folder / name).read_text() if name else page), target


def test_every_flag_the_readme_names_exists():
    known = {flag for flag in flags.parse.__code__.co_consts if isinstance(flag, str)}
    for bench in (ROOT / "bench").glob("*.py"):
        if f"python bench/{bench.name}" in re.sub(r"\s+", " ", PAGES):
            known |= set(re.findall(r'add_argument\("(--[a-z-]+)"', bench.read_text()))
    known |= {"--standalone", "--nproc", "--max-restarts", "--help"}  # torchrun's, argparse's
    known |= set(re.findall(r"--[a-z-]+", (ROOT / "autopsy.py").read_text()))
    for flag in set(re.findall(r"(?<![\w-])(--[a-z][a-z0-9-]+)", PAGES)):
        assert flag in known, flag


def test_the_failures_in_the_readme_are_those_of_the_gallery():
    for row in (ROOT / "failures" / "TABLE.md").read_text().splitlines()[2:]:
        name, file = re.match(r"\| \[(.+?)\]\((.+?)\)", row).groups()
        assert f"| [{name}](failures/{file})" in README and row.endswith("| yes |"), name


def test_the_accuracies_in_the_readme_are_those_of_the_raw_files():
    for name in ("bf16", "fp32"):
        lines = [json.loads(line) for line in (ROOT / f"bench/results/cifar10-{name}.jsonl").read_text().splitlines()]
        last = [line for line in lines if "val_acc1" in line][-1]
        assert last["epoch"] == 8 and f"{last['val_acc1']:.2f}" in README
    *_, end = (ROOT / "bench/results/default-cifar10-cpu.jsonl").read_text().splitlines()
    end = json.loads(end)
    assert f"{end['val_acc1']:.1f} % in {end['seconds']:.0f} seconds" in " ".join(README.split())


def test_the_figures_of_the_diagnosis_are_those_of_the_raw_files():
    files = ("diagnosis-before-corrected-cpu", "diagnosis-first-cpu", "diagnosis-cpu", "diagnosis_fresh-cpu")
    before, first, now, fresh = (raw(name)["totals"] for name in files)
    table, page = section(RESULTS, "Diagnosis"), " ".join(README.split())
    for key in ("wholly right", "verdict", "module", "op", "line", "samples", "names", "fix", "islands that mend"):
        assert f"| {key} | " + " | ".join("{} of {}".format(*t[key]) for t in (before, first, now, fresh)) in table, key
    right, cases = now["wholly right"]
    assert f"On {cases} steps" in page and f"advice) on {right}. The version before was right on "\
        f"{before['wholly right'][0]}." in page
    assert f"the end, {fresh['wholly right'][0]} were wholly right" in page
    assert "names the operation in {} of {}".format(*now["anomaly mode"]["op"]) in page
    assert "the module in {} of {}".format(*now["hooks"]["module"]) in page


def test_the_cost_of_watching_is_that_of_the_raw_file():
    ratio = raw("watch_cost-cpu")["watched / alone"]
    low, high = ratio["quartiles"]
    assert f"{ratio['median']:.2f} of a step's time (quartiles {low:.2f} and {high:.2f};" in " ".join(README.split())


def test_the_line_counts_in_the_readme_are_right():
    rows = re.findall(r"^\| `([a-z_0-9/]+\.py)` \| (\d+) \|", README, re.M)
    assert len(rows) > 15  # each file of the folder, and no other
    assert {name for name, _ in rows} == {path.name for path in ROOT.glob("*.py")}
    for name, count in rows:
        assert len((ROOT / name).read_text().splitlines()) == int(count), name


def commands():
    """The commands shown on lines of their own, without their comments."""
    lines = re.findall(r"^    ((?:bash run\.sh|python train\.py|torchrun) ?.*)", README, re.M)
    return [re.sub(r"  +#.*", "", line) for line in lines if "autopsy.py" not in line]


def test_the_commands_of_the_readme_run_as_written_but_shortened(image_folder, tmp_path):
    """Two steps on a few small images, in a folder of their own; whatever else a command asks for stays."""
    assert len(commands()) == 12 and "bash run.sh test" in commands()
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    steps, output = itertools.count(2), {}
    for command in commands():
        if command.split()[2:3] in (["test"], ["failures"], ["bench"], ["gpu"]):
            continue  # minutes, and tests of their own
        words = shlex.split(command.replace("DIR", str(image_folder)))
        if "--inject" not in words:  # those are as short as they can be
            if "--epochs" in words:
                at = words.index("--epochs")
                del words[at : at + 2]
            words += ["--max-steps", str(next(steps)), "--batch-size", "40"]
            words += [] if "--data-dir" in words else ["--data-dir", str(image_folder)]
        program = {"bash": ["bash"], "python": [sys.executable],
                   "torchrun": [sys.executable, "-m", "torch.distributed.run"]}[words[0]]
        words = [str(ROOT / word) if word in ("run.sh", "train.py") else word for word in words[1:]]
        done = subprocess.run(program + words, cwd=tmp_path, env=environment, capture_output=True, text=True,
                              timeout=600)
        assert done.returncode == 0, (command, done.stderr)
        assert json.loads(done.stdout.splitlines()[-1])["status"] == "done", command
        output[command] = done.stdout

    resumed = next(text for command, text in output.items() if "--resume auto" in command)
    assert "resumed from runs/a/last.pt after step 3" in resumed and "resumed" not in output["bash run.sh"]
    weights, divergence = (re.sub(r"\(\w+, scale", "(bf16, scale", text)  # the machine's best precision
                           for command, text in output.items() if "--inject" in command)
    assert "-> weights" in weights
    shown = section(README, "When a step is bad").split("third says:\n")[1].split("\nThe first bad step")[0]
    for line in filter(lambda line: line not in ("", "..."), map(str.strip, shown.splitlines())):
        assert all(part in divergence for part in line.split("inject.py:...")), line

    capsule = next(tmp_path.glob("runs/*/bad_step_20_rank0.pt"))
    best = next(tmp_path.glob("runs/cifarnet-cifar10-*/best.pt"))
    snippet = section(README, "When a run is killed").split("\n\n")[1]
    for program in ([str(ROOT / "train.py"), "--replay", str(capsule)], ["-c", textwrap.dedent(snippet)]):
        done = subprocess.run([sys.executable, *program], cwd=best.parent, env=environment | {"PYTHONPATH": str(ROOT)},
                              capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr


RECIPES = {  # heading: the files beside it, what it prints, the words of its own lines, how many lines name one of them
    "Copy the guards": ("guards.py", "step 7 skipped: ('input',", r"\b[Gg]uard\b|verdict", 8),
    "Autopsy in a loop": ("autopsy.py", "-> precision", r"StepRecord|record\b|examine", 8),
    "GradScaler": ("guards.py", "step 7 skipped: ('input',", r"\b[Gg]uard\b|verdict", 8),
    "The loss scale with a floor": ("amp_policy.py", "scale 1.0", r"LossScaler\(", 1),
    "Accumulation": ("guards.py", "step 7 skipped: ('input',", r"\b[Gg]uard\b|verdict", 8),
    "Scheduler": ("guards.py", "step 7 skipped: ('input',", r"\b[Gg]uard\b|verdict", 8),
    "Two networks": ("guards.py", "step 7 skipped: ('input',", r"\b[Gg]uard\b|verdict", 8),
    "Hugging Face Trainer": ("guards.py", "1 of 20 steps skipped\nall finite: True", "", 0),
    "Lightning": ("guards.py", "1 of 20 steps skipped\nall finite: True", "", 0),
    "The policy": ("amp_policy.py fp32.py", "loss ", "", 0),
    "The optimizer": ("optim.py", "updates 19 of 20\nall finite: True", "ClippedAdamW", 2),
    "Half weights with masters": ("optim.py", "updates 50", "", 0),
}
PACKAGES = {"Hugging Face Trainer": ("transformers", "accelerate"), "Lightning": ("lightning",)}


def recipe(title):
    """The program under a heading: its indented lines."""
    text = section(README if f"\n### {title}\n" in README else RECIPE_PAGE, title)
    return textwrap.dedent("\n".join(line for line in text.splitlines() if not line or line.startswith("    ")))


def test_every_recipe_of_the_pages_is_tested():
    titles = re.findall(r"^## (.+)", RECIPE_PAGE, re.M) + re.findall(r"^### ((?:Copy the|Autopsy in) .+)", README, re.M)
    assert sorted(titles) == sorted(RECIPES)


@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_runs_as_written_in_an_empty_folder_with_its_files_alone(title, tmp_path):
    for package in PACKAGES.get(title, ()):
        pytest.importorskip(package)
    files, expected, *_ = RECIPES[title]
    (tmp_path / "recipe.py").write_text(recipe(title))
    for file in files.split():
        shutil.copy(ROOT / file, tmp_path)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if title not in PACKAGES:
        environment["PYTHONPATH"] = ""
    done = subprocess.run([sys.executable, "recipe.py"], cwd=tmp_path, env=environment, capture_output=True, text=True,
                          timeout=600)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout, done.stdout
    assert title == "Autopsy in a loop" or "nan" not in done.stdout, done.stdout


@pytest.mark.parametrize("title", [title for title, (*_, most) in RECIPES.items() if most])
def test_no_more_lines_of_a_loop_change_than_the_page_says(title):
    *_, words, most = RECIPES[title]
    assert 0 < sum(bool(re.search(words, line)) for line in recipe(title).splitlines()) <= most


@pytest.mark.parametrize("title", [title for title, (files, *_, most) in RECIPES.items() if most and "gua" in files])
def test_a_recipe_without_the_lines_of_its_guard_is_a_plain_loop(title):
    """The lines that name the guard are all that differs: without them the loop runs, and its weights are NaN."""
    step = {"GradScaler": "scaler.step(optimizer)", "Two networks": "slow.step(); fast.step()"}
    source = re.sub(r"guard\.step\([^()]*\)", step.get(title, "optimizer.step()"), recipe(title))
    source = re.sub(r"( *)if \(verdict.*\n.*", "", source)
    source = "\n".join(line for line in source.splitlines() if not re.search(r"\b[Gg]uard\b", line))
    space = {}
    exec(source, space)
    nets = [value for value in space.values() if isinstance(value, torch.nn.Module)]
    assert nets and not all(t.isfinite().all() for net in nets for t in net.state_dict().values())


@pytest.mark.parametrize("title", PACKAGES)
def test_a_callback_is_ten_lines(title):
    body = recipe(title).split("class Guarded")[1].split("\n\n")[0]
    assert len(body.splitlines()) - 1 <= 10  # without the class line


def test_the_transcript_of_the_doctor_is_what_it_prints(tmp_path):
    """The script with its planted overflow stands here; the lines under the command stand in the README."""
    if "YOUR_SCRIPT" not in (ROOT / "autopsy.py").read_text():
        pytest.skip("this autopsy.py runs no scripts")
    shutil.copy(ROOT / "autopsy.py", tmp_path)
    (tmp_path / "my_train.py").write_text(MY_TRAIN)
    done = subprocess.run([sys.executable, "autopsy.py", "my_train.py"], cwd=tmp_path, capture_output=True, text=True,
                          timeout=600, env={**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 3, done.stderr
    shown = section(README, "Your run is NaN: one command").split("$ python autopsy.py my_train.py\n")[1]
    shown = shown.split("\n\n")[0]

    def words(text):  # another CPU rounds otherwise: other samples pass the limit first, and how many, and their sign
        text = re.sub(r"-?\d+(\.\d+)?(e[+-]\d+)?|-?\binf\b", "N", text)
        return [line.strip() for line in re.sub(r"samples N(, N)*( and N more)?", "samples N", text).splitlines()]

    printed = done.stdout + done.stderr
    assert 5 < len(shown.splitlines()) <= 10 and "my_train.py:11 " in shown and "my_train.py:11 " in printed
    said = words(printed)
    for line in words(shown):
        start, _, end = line.partition("...")
        assert any(text.startswith(start) and text.endswith(end) for text in said), (line, said)


MY_TRAIN = """\
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.transpose(1, 2)).softmax(-1) @ v

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 32), Attention(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(60):
    x, y = torch.randn(16, 6, 8) * 1.2**step, torch.randint(4, (16,))
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.cross_entropy(net(x).mean(1), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.3f}")
"""


def test_every_claim_about_ourselves_beside_other_trainers_names_a_test_that_exists():
    sources = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    rows = README.split("## Beside other trainers")[1].split("## ")[0]
    named = re.findall(r"`(test_\w+)`", rows)
    assert len(named) == rows.count("\n| ") - 1 == 11
    for name in named:
        assert f"def {name}(" in sources, name


def test_the_figures_of_the_trained_models_are_those_of_the_raw_files():
    metrics = {"dit": "val_loss", "slat_vae": "val_mse", "vlm": "val_exact_match"}
    for dataset in ("cifar10", "imagefolder"):
        runs = raw(f"train_models-{dataset}-1")["runs"]
        page = section(RESULTS, "One epoch in bf16 and in fp32" if dataset == "cifar10" else "Tiny ImageNet")
        for model, precision in {(run["model"], run["precision"]) for run in runs}:
            ends = [run[metrics.get(model, "val_acc1")] for run in runs
                    if (run["model"], run["precision"]) == (model, precision)]
            cell = f"{statistics.mean(ends):.4g} ({(max(ends) - min(ends)) / 2:.2g})"
            assert re.search(rf"^\| {model} \|.*{re.escape(cell)}", page, re.M), (dataset, model, precision, cell)


def test_the_table_of_what_the_models_reach_is_that_of_the_raw_files():
    metrics, files = {"dit": "val_loss", "slat_vae": "val_mse", "vlm": "val_exact_match"}, list(
        (ROOT / "bench/results/trained").glob("*.json"))
    assert len(files) >= 6
    for run in (json.loads(path.read_text()) for path in files):
        model, end = run["model"], run["end"]
        which = ", Tiny ImageNet" * (run["dataset"] == "imagefolder") + ", fp32" * (run["precision"] == "fp32")
        reached = f"{end[metrics.get(model, 'val_acc1')]:g}"
        row = (rf"^\| {model}{which} \| {run['recipe']['epochs']:g} \| [^|]+ \| {re.escape(reached)} \|.*"
               rf"\| {end['skipped']} \|$")
        assert re.search(row, README, re.M), (model, which, reached)
    for row in raw("recognised-cpu")["rows"].values():
        assert f"{row['recognised']:.1f}" in README


def test_the_table_of_healing_at_length_is_that_of_its_raw_file():
    text = section(README, "Results")
    for run in raw("healed_whole_run-cpu")["runs"]:
        assert f"{run['end']['val_acc1']:.2f}" in text, (run["precision"], run["seed"])
        assert run["precision"] == "fp32" or f"{run['end']['skipped']} " in text


def test_the_costs_of_the_guard_are_those_of_the_raw_files():
    cpu, gpu = section(RESULTS, "What the guard costs, in full").split("On an H200")
    for title, ways in raw("guard_cost-cpu")["ratios"].items():
        row = re.search(rf"^\| {re.escape(title.removesuffix(', bfloat16'))} \|.*", cpu, re.M)[0]
        for way, ratio in ways.items():
            assert way == "bare" or f"| {ratio['median']:.3f}" in row, (title, way)
    gpu_ways = raw("guard_cost-cuda")["ratios"]
    for title, ways in gpu_ways.items():
        row = re.search(rf"^\| {re.escape(title.rsplit(', ', 1)[0])} \|.*", gpu, re.M)[0]
        for way, ratio in ways.items():
            assert way.startswith("bare") or "compiled" in way or f"| {ratio['median']:.3f}" in row, (title, way)
        if "ours, CUDA graph" in ways:
            whole = ways["ours, CUDA graph"]["median"] * ways["bare, CUDA graph"]["median"]
            assert f"| {whole:.2f} |" in row, title
    for device, page in (("cpu", cpu), ("cuda", gpu)):
        growth = raw(f"guard_cost-{device}")["growth"].values()
        for way in ("ours", "stock AMP recipe (clip)"):
            assert " | ".join(f"{ways[way]['median']:.2f}" for ways in growth) in page, (device, way)
    ours, graphs, wholes = zip(*((ways["ours"]["median"], ways["ours, CUDA graph"]["median"],
                                  ways["ours, CUDA graph"]["median"] * ways["bare, CUDA graph"]["median"])
                                 for title, ways in gpu_ways.items() if title.endswith("bfloat16")), strict=True)
    *most, eleven, seventeen = sorted(round(100 * (ratio - 1)) for ratio in graphs)
    said = " ".join(section(README, "Results").split())
    assert f"up to {100 * (max(ours) - 1):.0f} %" in said
    assert f"{min(most)} to {max(most)} %, of the two smallest steps {eleven} and {seventeen} %" in said
    assert f"takes {min(wholes):.2f} to {max(wholes):.2f} of the bare loop" in said


def test_the_other_costs_are_those_of_the_raw_files():
    rows = section(RESULTS, "torch.compile, in full")
    for device in ("cpu", "cuda"):
        for model, row in raw(f"compile_models-{device}")["models"].items():
            cell = f"{row['compiled / eager']['median']:.3f}" if "breaks" in row else "not reached"
            before = r"[\d.]+ \| " if device == "cuda" else ""
            assert re.search(rf"^\| {model} \| {before}{cell}", rows, re.M), (device, model)
        for way, ratio in raw(f"scaling-{device}")["guarded / bare"].items():
            assert f"{ratio['median']:.3f}" in RESULTS, (device, way)
        for tensors, ratios in raw(f"optim_step-{device}")["ratios"].items():
            assert f"| {tensors} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios.values()) in RESULTS, tensors
    for rung, row in raw("precision_ladder-cpu")["rungs"].items():
        assert isinstance(row, str) or f"{row['val_acc1']:.1f} %" in README, rung
    for rung, row in raw("precision_ladder-cuda")["rungs"].items():
        if not isinstance(row, str):
            assert (f"| {rung} | {row['speed / fp32']['median']:.2f} | {row['peak_mb']} | {row['val_acc1']:.2f} "
                    f"({row['half_spread']:.2f}) | {row['skipped']} |") in RESULTS, rung
    for device in ("cpu", "cuda"):
        length = raw(f"scan-{device}")["speedup"]
        for states in (1, 8, 16):
            assert f"{length[f'L 1024, d_state {states}']:.1f}" in RESULTS, (device, states)


def test_the_times_to_accuracy_are_those_of_the_raw_files():
    for run in raw("first_look-cpu")["beside airbench94_muon"]["full widths, in turns"]["runs"]:
        for figure in (f"{run['seconds of training']:.0f} s", f"{run['val_acc1']:.2f}",
                       f"{run['with test-time augmentation']:.2f}"):
            assert figure in RESULTS, figure
    steps = raw("time_to_accuracy_steps-cpu")
    assert f"{steps['ratio']:.2f} of its time" in " ".join(RESULTS.split()) and f"{steps['ratio']:.2f}" in README
    for name in ("cpu", "cpu-earlier", "cuda"):
        for who, seeds in raw(f"time_to_accuracy-{name}")["curves"].items():
            epochs, seconds, plain, tta = (statistics.mean(values) for values in
                                           zip(*(seed[-1] for seed in seeds), strict=True))
            seconds = f"{seconds:.2f} s" if name == "cuda" else f"{seconds:.0f}"
            for figure in (seconds, f"{plain:.2f}", f"{tta:.2f}"):
                assert figure in RESULTS, (name, who, figure)
            row = f"| {epochs:g} | {seconds} | {plain:.2f} % | {tta:.2f} % |"
            assert name != "cpu" or row in README, row
    goals = raw("time_to_accuracy-cpu")["goals"]
    assert all(f"{goal['ratio']:.2f}" in section(README, "Results") for goal in goals.values())


def test_every_picture_was_drawn_from_the_raw_files_as_they_are_and_is_shown():
    pictures = sorted((ROOT / "bench" / "figures").glob("*.svg"))
    assert len(pictures) >= 5
    for picture in pictures:
        assert f"figures/{picture.name})" in PAGES, picture.name
        sources = re.findall(r"([\w-]+\.json) ([0-9a-f]{64})", picture.read_text())
        assert sources, picture.name
        for name, digest in sources:
            found = hashlib.sha256((ROOT / "bench" / "results" / name).read_bytes()).hexdigest()
            assert digest == found, f"{picture.name} is older than {name}: python bench/figures.py"


def test_the_pictures_show_the_raw_numbers_and_the_same_bytes_each_time(tmp_path, monkeypatch, capsys):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    from bench import figures

    drawn = {}
    monkeypatch.setattr(figures.pyplot, "close", lambda figure: drawn.setdefault(len(drawn), figure))
    for folder in ("a", "b"):
        monkeypatch.setattr(figures, "FIGURES", tmp_path / folder)
        figures.main()
    names = [Path(line).name for line in capsys.readouterr().out.splitlines()]
    first = {name: drawn[i] for i, name in enumerate(names[: len(names) // 2])}
    assert set(first) == {path.name for path in (ROOT / "bench" / "figures").glob("*.svg")}
    for name in first:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name

    for axis, device in zip(first["guard_cost.svg"].axes, ("cpu", "cuda"), strict=True):
        rows = [ways for title, ways in raw(f"guard_cost-{device}")["ratios"].items() if title.endswith("bfloat16")]
        lines = {line.get_label(): list(line.get_xdata()) for line in axis.lines}
        assert lines["guarded / bare"] == [ways["ours"]["median"] for ways in rows]
        assert lines["stock AMP recipe / bare"] == [ways["stock AMP recipe (clip)"]["median"] for ways in rows]
        if device == "cuda":
            assert lines["guarded as CUDA graph / bare as CUDA graph"] == [
                ways["ours, CUDA graph"]["median"] for ways in rows]
    for axis, device in zip(first["time_to_accuracy.svg"].axes, ("cpu", "cuda"), strict=True):
        ends = {(line.get_xdata()[-1], line.get_ydata()[-1]) for line in axis.lines}
        curves = raw(f"time_to_accuracy-{device}")["curves"]
        assert ends == {(seed[-1][1], seed[-1][2]) for seeds in curves.values() for seed in seeds}
    pyplot.close("all")
