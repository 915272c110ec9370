"""
Kill a training run at random moments, a hundred times, and see what comes back.

    python bench/kill_resume.py                # 100 kills, about 8 minutes on 2 cores
    python bench/kill_resume.py --kills 5      # does it run?

For each precision (fp32, bf16, fp16) and 1 or 2 ranks, one run is left alone and one is killed: SIGKILL at a random
moment of its training, `--resume auto`, SIGKILL, `--resume auto`, ... until it has had its share of kills and may end.
Everything is `python train.py` in processes of its own, with accumulation, an averaged model and a checkpoint every
second step. Every second kill is aimed: after its random moment it waits for a save to begin (a temporary file
appears), and strikes within a millisecond. With 2 ranks a third of the kills take
only one of them: the other has to leave by itself. After each kill every file must be whole (checksums); at the end
last.pt (weights, moments, average, loss scale, counters, generators), best.pt and every line of metrics.jsonl must be
those of the run that was left alone, bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path

import torch
from torchvision.transforms.v2.functional import to_pil_image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import checkpoint  # noqa: E402
from data import synthetic  # noqa: E402

STEPS = {"fp32": 100, "bf16": 100, "fp16": 40}  # fp16 convolutions are emulated on most CPUs: ten times slower


def draw_images(folder: Path) -> None:
    """120 training and 60 test images as PNG files in one folder a class."""
    images, labels = synthetic.draw(0, 180, seed=3)
    for i, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
        target = folder / ("train" if i < 120 else "test") / f"class{label}" / f"{i:03d}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        to_pil_image(image).save(target)


class Life:
    """One start of `python train.py --resume auto` in `folder`, until its end or its kill."""

    def __init__(self, images: Path, folder: Path, precision: str, ranks: int):
        command = [sys.executable, str(ROOT / "train.py"), "--model", "cifarnet-tiny", "--dataset", "cifar10",
                   "--data-dir", str(images), "--device", "cpu", "--precision", precision, "--batch-size", "20",
                   "--accum-steps", "2", "--ema", "0.9", "--max-steps", str(STEPS[precision]), "--ckpt-every", "2",
                   "--log-every", "1", "--out-dir", str(folder), "--resume", "auto"]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        self.printed = folder.with_suffix(".out")
        self.processes = []
        with open(self.printed, "w") as out:
            for rank in range(ranks):
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                if ranks > 1:  # as torchrun would set it
                    environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                self.processes.append(subprocess.Popen(command, stdout=out, stderr=out, env=environment,
                                                       cwd=images.parent))  # .cache lies beside the run

    def trains(self) -> bool:
        """Wait until the card is printed: what comes before is import and decoding. False if it has ended instead."""
        while "\noutput " not in self.printed.read_text():
            if any(process.poll() is not None for process in self.processes):
                return False
            time.sleep(0.002)
        return True

    def end(self, timeout: float = 300) -> list[int | str]:
        """Exit codes by rank; "hung" for a rank that had to be killed after `timeout` seconds."""
        codes: list[int | str] = []
        for process in self.processes:
            try:
                codes.append(process.wait(timeout))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                codes.append("hung")
        return codes


def differences(a, b, name: str = "") -> list[str]:
    """Names of what is not bit-identical in two nests."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return [] if a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) else [name]
    if type(a) is type(b) and isinstance(a, (dict, list, tuple)) and len(a) == len(b):
        keys = a.keys() if isinstance(a, dict) else range(len(a))
        if not isinstance(a, dict) or keys == b.keys():
            return [d for key in keys for d in differences(a[key], b[key], f"{name}.{key}".lstrip("."))]
    return [] if type(a) is type(b) and a == b else [name]


def result(folder: Path) -> dict:
    """What a finished run leaves behind and its death must not change."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()[1:]]
    lines = [line for line in lines if line.get("event") != "end"]  # it tells seconds
    last = checkpoint.load(folder / "last.pt")
    for rng in last["rng"]:
        rng.pop("python")  # nobody draws from it
    return {"last": last, "best": checkpoint.load(folder / "best.pt"), "lines": lines}


def aftermath(folder: Path, before: set[str]) -> dict:
    """What the kill left: damaged or vanished files, unfinished ones, steps done and steps saved."""
    names, saved = {path.name for path in folder.glob("*.pt")}, -1
    lost = sorted(before - names)
    for name in sorted(names):
        try:
            saved = max(saved, checkpoint.load(folder / name).get("step", -1))
        except checkpoint.CheckpointError as error:
            lost.append(str(error))
    done = 0
    with contextlib.suppress(OSError):
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # the last line, cut by the kill
                done = max(done, json.loads(line).get("step", 0))
    return {"lost": lost, "in_a_save": sorted(p.name for p in folder.glob("*.tmp")), "step": done, "saved": saved}


def campaign(images: Path, folder: Path, precision: str, ranks: int, kills: int, seed: int) -> dict:
    """One run left alone; one killed `kills` times (several, one after the other, if it ends too early)."""
    draw = random.Random(f"{seed} {precision} {ranks}")
    whole = Life(images, folder / "whole", precision, ranks)
    assert whole.trains(), whole.printed.read_text()
    start = time.monotonic()
    assert not any(whole.end()), whole.printed.read_text()
    window = 2 * (time.monotonic() - start) / max(kills, 4)  # a mean life is the run's length / kills
    expected = result(folder / "whole")
    report: dict = {"precision": precision, "ranks": ranks, "window": window, "kills": [], "ends": [], "resumes": 0,
                    "failures": []}
    while not report["failures"] and (len(report["kills"]) < kills or not report["ends"]):
        killed = folder / f"killed-{len(report['ends'])}"
        mine = 0
        while True:
            life = Life(images, killed, precision, ranks)
            begun = life.trains()
            report["resumes"] += ", resumed from " in life.printed.read_text()
            if begun and len(report["kills"]) < kills:
                delay = draw.uniform(0, window)
                victims = draw.choice([range(ranks), range(ranks), [ranks - 1 - len(report["kills"]) % ranks]])
                time.sleep(delay)
                if aimed := len(report["kills"]) % 2 == 1:
                    deadline = time.monotonic() + 0.5
                    while not (killed / "last.pt.tmp").exists() and time.monotonic() < deadline:
                        time.sleep(0.0001)  # the file lives for a millisecond or two
                    time.sleep(draw.uniform(0, 0.001))
                before = {path.name for path in killed.glob("*.pt")}
                if all(process.poll() is None for process in life.processes):
                    for rank in victims:
                        life.processes[rank].send_signal(signal.SIGKILL)
                    codes = life.end(90)
                    if "hung" in codes:
                        report["failures"].append(f"a rank outlived the other: {life.printed.read_text()[-2000:]}")
                        break
                    if -signal.SIGKILL in codes:
                        mine += 1
                        report["kills"].append({"chain": len(report["ends"]), "seconds": delay, "aimed": aimed,
                                                "victims": [*victims], "codes": codes, **aftermath(killed, before)})
                        continue
            codes = life.end()
            if any(codes):
                report["failures"].append(f"{codes}: {life.printed.read_text()[-2000:]}")
            break
        if not report["failures"]:
            different = differences(expected, result(killed))
            report["ends"].append({"kills": mine, "identical": not different, "different": different[:20]})
    return report


def hardware() -> str:
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")] \
        if Path("/proc/cpuinfo").exists() else []
    return f"{models[0].split(':')[1].strip() if models else platform.processor()}, {os.cpu_count()} cores"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--precisions", nargs="+", default=[*STEPS], choices=[*STEPS])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results", help="written from 50 kills on")
    args = parser.parse_args()
    start = time.monotonic()
    cases = [(precision, ranks) for ranks in args.ranks for precision in args.precisions]
    weight = [3 if ranks == 1 else 2 for _, ranks in cases]  # a start of two ranks costs more
    share = [args.kills * w // sum(weight) for w in weight]
    share = [n + (i < args.kills - sum(share)) for i, n in enumerate(share)]
    cases = [(*case, kills) for case, kills in zip(cases, share, strict=True) if kills]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        draw_images(folder / "images")

        def go(case):
            precision, ranks, kills = case
            (folder / f"{precision}-{ranks}").mkdir()
            return campaign(folder / "images", folder / f"{precision}-{ranks}", precision, ranks, kills, args.seed)

        with ThreadPoolExecutor(3) as pool:  # a process has one thread: on two cores three runs keep both busy
            reports = [*pool.map(go, [case for case in cases if case[1] == 1])]
        reports += [go(case) for case in cases if case[1] > 1]

    columns = ("kills", "in a save", "one rank only", "resumes", "identical ends", "files lost", "failures")
    print(f"{'':12}" + "".join(f"{column:>16}" for column in columns))
    total = dict.fromkeys(columns, 0) | {"ends": 0}
    for r in reports:
        row = {"kills": len(r["kills"]), "in a save": sum(bool(k["in_a_save"]) for k in r["kills"]),
               "one rank only": sum(len(k["victims"]) < r["ranks"] for k in r["kills"]), "resumes": r["resumes"],
               "identical ends": sum(end["identical"] for end in r["ends"]), "ends": len(r["ends"]),
               "files lost": sum(len(k["lost"]) for k in r["kills"]), "failures": len(r["failures"])}
        total = {column: total[column] + row[column] for column in total}
        r["summary"] = row
        shown = row | {"identical ends": f"{row['identical ends']} of {row['ends']}"}
        print(f"{r['precision']}, {r['ranks']} rank{'s' * (r['ranks'] > 1):4}"
              + "".join(f"{shown[column]!s:>16}" for column in columns))
        for line in [*r["failures"], *(str(end["different"]) for end in r["ends"] if not end["identical"])]:
            print(f"    {line}")
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout
    record = {
        "bench": "kill_resume", "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit.strip(), "arguments": vars(args) | {"results": None}, "hardware": hardware(),
        "torch": str(torch.__version__), "python": platform.python_version(),
        "seconds": round(time.monotonic() - start), "n": total["kills"], "total": total,
    }
    if args.kills >= 50:
        args.results.mkdir(parents=True, exist_ok=True)
        path = args.results / f"kill_resume-cpu-{record['time'].replace(':', '')}.json"
        path.write_text(json.dumps(record | {"cases": reports}) + "\n")
        print(f"raw: {path}")
    print(json.dumps(record))
    return int(total["identical ends"] < total["ends"] or bool(total["failures"] or total["files lost"]))


if __name__ == "__main__":
    sys.exit(main())
