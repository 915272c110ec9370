"""
What several benches share: a raw file that is written while it grows, timing in turns, a run of
train.py.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import io
import json
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


def arguments(doc: str, device: str | None = None) -> argparse.ArgumentParser:
    """A parser with the three options that every bench has. `device`: the default one."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    best = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device or best, choices=["cpu", "cuda"])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--smoke", action="store_true", help="does it run? Seconds, and no file")
    return parser


def header(bench: str, args: argparse.Namespace) -> dict[str, Any]:
    """The head of a raw file, without the paths among the arguments."""
    return {
        "bench": bench,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "code": code(),
        "arguments": {k: v for k, v in vars(args).items() if not isinstance(v, Path)},
        "hardware": hardware(torch.device(args.device)),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def commit() -> str:
    """HEAD, with "-dirty" if files other than raw ones have changed; "" without git."""
    if not shutil.which("git"):
        return ""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    changed = git("diff", "--name-only", "HEAD", "--", ".", ":!bench/results")
    return git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")


def code() -> str:
    """A digest of all code: a folder may be a copy without git, or have been changed since."""
    digest = hashlib.sha256()
    folders = "*.py", "[a-z]*/**/*.py"
    for path in sorted(path for folder in folders for path in ROOT.glob(folder)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {torch.get_num_threads()} threads"


def spread(values: Sequence[float]) -> dict[str, Any]:
    low = middle = high = values[0]
    if len(values) > 1:
        low, middle, high = statistics.quantiles(values, n=4)
    return {"n": len(values), "median": middle, "quartiles": [low, high]}


def ratio(rounds: Sequence[dict[str, float]], a: str, b: str) -> dict[str, Any]:
    """The spread of a / b within the rounds that have both."""
    return spread([row[a] / row[b] for row in rounds if a in row and b in row])


def wait(device: torch.device) -> None:
    """Wait until the device has done its work; call it before you read a clock."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(step: Callable[[], Any], device: torch.device, block: int = 1) -> float:
    """Milliseconds a step, over a block of steps."""
    wait(device)
    start = time.perf_counter()
    for _ in range(block):
        step()
    wait(device)
    return (time.perf_counter() - start) * 1e3 / block


def in_turns(
    steps: dict[str, Callable[[], Any]],
    device: torch.device,
    go_on: Callable[[int], bool],
    block: int = 1,
    rare: Sequence[str] = (),
) -> list[dict[str, float]]:
    """Rounds of {name: milliseconds a step}, each in a new random order, while go_on(rounds).

    `rare`: these are timed in every fourth round only.
    """
    rounds: list[dict[str, float]] = []
    while go_on(len(rounds)):
        order = [name for name in steps if name not in rare or len(rounds) % 4 == 0]
        random.Random(len(rounds)).shuffle(order)
        row = {name: timed(steps[name], device, block) for name in order}
        rounds.append({name: row[name] for name in steps if name in row})
    return rounds


def draw_few() -> None:
    """For --smoke: drawing 22,000 images and validating on 2,000 takes seconds."""
    from data import synthetic

    synthetic.load = functools.cache(functools.partial(synthetic.load, 200, 100))


def train_run(flags: dict[str, Any], *more: str) -> tuple[int, dict, list[dict]]:
    """train.py in this process: exit code, its last line, the lines of metrics.jsonl.

    It leaves out a flag whose value is None. A refusal is {"refused": its sentence}.
    """
    import train
    from data import synthetic

    if not hasattr(synthetic.load, "cache_info"):  # drawing its images takes seconds
        synthetic.load = functools.cache(synthetic.load)
    out, err = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        flags = {"out-dir": f"{folder}/run"} | flags
        argv = [f"--{name}={value}" for name, value in flags.items() if value is not None]
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = train.main([*argv, *more])
        except SystemExit as end:
            return end.code, {"refused": err.getvalue().strip().removeprefix("train.py: ")}, []
        lines = (Path(flags["out-dir"]) / "metrics.jsonl").read_text().splitlines()
    if code == 1:
        print(err.getvalue(), file=sys.stderr)
    printed = out.getvalue().splitlines()
    summary = json.loads(printed[-1]) if printed else {}  # rank 0 alone prints
    return code, summary, [json.loads(line) for line in lines]


# --- The raw file


def raw_file(record: dict[str, Any], args: argparse.Namespace) -> Path:
    return args.results / f"{record['bench']}-{args.device}.json"


def begin(bench: str, args: argparse.Namespace, *tables: str, **more: Any) -> dict[str, Any]:
    """A raw file's head, with empty `tables`; or the raw file of the same measurement, if that was
    cut short.

    "Same" means code, arguments, machine, versions and `more`. A complete file is made anew.
    """
    head = header(bench, args) | more
    path = raw_file(head, args)
    before = json.loads(path.read_text()) if path.exists() and not args.smoke else {}
    same = all(before.get(key) == head[key] for key in head.keys() - {"time", "commit"})
    if not (same and before.pop("unfinished", False)):
        return head | {table: {} for table in tables}
    print(f"{path}: goes on where it was cut short")
    return before


def keep(record: dict[str, Any], args: argparse.Namespace, complete: bool = False) -> None:
    """Write the raw file as far as it has come: after each round."""
    if args.smoke:
        return
    path = raw_file(record, args)
    path.parent.mkdir(parents=True, exist_ok=True)
    mark = {} if complete else {"unfinished": True}
    whole = path.with_suffix(".tmp")  # a kill here leaves the file of the round before
    whole.write_text(json.dumps(record | mark) + "\n")
    whole.replace(path)


def write(record: dict[str, Any], args: argparse.Namespace, samples: Sequence[str] = ()) -> None:
    """The complete raw file, and as a bench's last line the record without its `samples`."""
    keep(record, args, complete=True)
    if not args.smoke:
        print(f"\nraw samples: {raw_file(record, args)}")
    print(json.dumps({k: v for k, v in record.items() if k not in samples}))
