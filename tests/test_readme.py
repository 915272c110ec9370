"""The README cannot rot: its step is train.py's, its files and flags exist, its figures are in bench/results."""

import json
import re
import textwrap
from pathlib import Path

import flags
import train

ROOT = Path(train.__file__).parent
README = (ROOT / "README.md").read_text()


def test_the_step_in_the_readme_is_the_step_of_train_py():
    source = (ROOT / "train.py").read_text()
    start, end = source.index("            # 1. Every micro-batch"), source.index("            digest(verdict)\n")
    assert textwrap.indent(textwrap.dedent(source[start:end]).strip(), "    ") in README


def test_every_file_the_readme_names_exists():
    for name in re.findall(r"`((?:[a-z_]+/)*[a-z_0-9]+\.(?:py|sh|jsonl?|md))`", README):
        if name not in ("metrics.jsonl",):
            assert (ROOT / name).exists(), name


def test_every_flag_the_readme_names_exists():
    known = flags.parse.__code__.co_consts
    elsewhere = {"--standalone", "--nproc", "--max-restarts", "--help", "--rounds"}  # torchrun's, argparse's, a bench's
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
