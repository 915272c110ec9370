"""The README cannot rot: its step is train.py's, its files and flags exist, its figures are in bench/results."""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import flags
import train

ROOT = Path(train.__file__).parent
README = (ROOT / "README.md").read_text()


def test_the_step_in_the_readme_is_the_step_of_train_py():
    source = (ROOT / "train.py").read_text()
    for first, end in (("        # 1. Every micro-batch", "    graph = graphs."),
                       ("            look = step %", "            digest(verdict)\n")):
        quoted = source[source.index(first):source.index(end)]
        assert textwrap.indent(textwrap.dedent(quoted).strip(), "    ") in README


def test_every_file_the_readme_names_exists():
    for name in re.findall(r"`((?:[a-z_]+/)*[a-z_0-9]+\.(?:py|sh|jsonl?|md))`", README):
        if name not in ("metrics.jsonl",):
            assert (ROOT / name).exists(), name


def test_every_flag_the_readme_names_exists():
    known = flags.parse.__code__.co_consts
    elsewhere = {"--standalone", "--nproc", "--max-restarts", "--help",  # torchrun's and a bench's
                 "--rounds", "--models", "--airbench"}
    for flag in set(re.findall(r"(?<![\w-])(--[a-z][a-z0-9-]+)", README)) - elsewhere:
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


def test_the_line_counts_in_the_readme_are_right():
    rows = re.findall(r"^\| `([a-z_/]+\.py)` \| (\d+) \|", README, re.M)
    assert len(rows) > 15
    for name, count in rows:
        assert len((ROOT / name).read_text().splitlines()) == int(count), name


RECIPES = {"guards": "guards.py", "policy": "amp_policy.py", "optimizer": "optim.py"}


@pytest.mark.parametrize("part, file", RECIPES.items())
def test_a_recipe_runs_as_written_in_an_empty_folder_with_its_one_file(part, file, tmp_path):
    text = README.split(f"### Copy the {part}\n")[1].split("\n#")[0]
    (tmp_path / "recipe.py").write_text(textwrap.dedent(text))
    shutil.copy(ROOT / file, tmp_path)
    environment = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "recipe.py"], cwd=tmp_path, env=environment, capture_output=True, text=True,
                          timeout=60)
    assert done.returncode == 0, done.stderr
    expected = {"guards": "step 7 skipped: ('input',", "policy": "loss ", "optimizer": "updates 50"}[part]
    assert expected in done.stdout and "nan" not in done.stdout, done.stdout


def test_every_claim_about_ourselves_beside_other_trainers_names_a_test_that_exists():
    sources = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    rows = README.split("## Beside other trainers")[1].split("## ")[0]
    named = re.findall(r"`(test_\w+)`", rows)
    assert len(named) == rows.count("\n| ") - 1 == 8
    for name in named:
        assert f"def {name}(" in sources, name


def test_the_figures_of_the_trained_models_are_those_of_the_raw_files():
    metrics = {"dit": "val_loss", "slat_vae": "val_mse", "vlm": "val_exact_match"}
    for dataset in ("cifar10", "imagefolder"):
        runs = json.loads((ROOT / f"bench/results/train_models-{dataset}-1.json").read_text())["runs"]
        for model, precision in {(run["model"], run["precision"]) for run in runs}:
            ends = [run[metrics.get(model, "val_acc1")] for run in runs
                    if (run["model"], run["precision"]) == (model, precision)]
            cell = f"{statistics.mean(ends):.4g} ({(max(ends) - min(ends)) / 2:.2g})"
            assert re.search(rf"^\| {model} \|.*{re.escape(cell)}", README, re.M), (dataset, model, precision, cell)


def test_the_costs_in_the_readme_are_those_of_the_raw_files():
    def raw(name):
        return json.loads((ROOT / f"bench/results/{name}-cpu.json").read_text())

    for title, ways in raw("guard_cost")["ratios"].items():
        row = re.search(rf"^\| {re.escape(title.removesuffix(', bfloat16'))} \|.*", README, re.M)[0]
        for way, ratio in ways.items():
            assert way == "bare" or f"| {ratio['median']:.3f}" in row, (title, way)
    for model, row in raw("compile_models")["models"].items():
        assert re.search(rf"{model}\s.{{0,30}}{row['compiled / eager']['median']:.3f}", README, re.S), model
    for way, ratio in raw("scaling")["guarded / bare"].items():
        assert way in ("accumulation 2", "accumulation 4") or f"{ratio['median']:.3f}" in README, way
    for (*_, (epochs, seconds, plain, tta)), in raw("time_to_accuracy")["curves"].values():
        assert f" | {epochs:g} | {seconds:.0f} | {plain:.2f} % | {tta:.2f} % |" in README
    for rung, row in raw("precision_ladder")["rungs"].items():
        assert isinstance(row, str) or f"{row['val_acc1']:.1f} %" in README, rung
    for tensors, ratios in raw("optim_step")["ratios"].items():
        assert f"| {tensors} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios.values()) in README
