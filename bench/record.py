"""What every bench writes down beside its samples: commit, arguments, hardware, versions."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent


def header(bench: str, arguments: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The head of a raw file. `arguments`: the command line's; folders and other paths are left out."""
    return {
        "bench": bench, "time": datetime.now(timezone.utc).isoformat(timespec="seconds"), "commit": commit(),
        "arguments": {k: v for k, v in arguments.items() if not isinstance(v, Path)}, "hardware": hardware(device),
        "torch": str(torch.__version__), "python": platform.python_version(),
    }


def commit() -> str:
    """HEAD, with "-dirty" if files were changed since; raw files of the bench before don't count."""
    head, changed = (
        subprocess.run(["git", *command.split()], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        for command in ("rev-parse --short HEAD", "diff --name-only HEAD -- . :!bench/results")
    )
    return head + ("-dirty" if changed else "")


def hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    models = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return f"{models[0].split(':')[1].strip() if models else platform.processor()}, {torch.get_num_threads()} threads"


def spread(values: Sequence[float]) -> dict[str, Any]:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else list(values) * 3
    return {"n": len(values), "median": middle, "quartiles": [low, high]}


def write(record: dict[str, Any], folder: Path, device: torch.device, samples: Sequence[str] = ()) -> None:
    """One raw file in `folder`, and the last line of a bench: the record in JSON without its long keys `samples`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record['bench']}-{device.type}.json"
    path.write_text(json.dumps(record) + "\n")
    print(f"\nraw samples: {path}")
    print(json.dumps({k: v for k, v in record.items() if k not in samples}))
