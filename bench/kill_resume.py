"""
Kill a training run at random moments, a hundred times, and see what comes back.

    python bench/kill_resume.py                # 102 kills, about 10 minutes on 2 cores
    python bench/kill_resume.py --kills 5      # does it run? Below 50 kills it leaves no file

For each precision (fp32, bf16, fp16) and 1 or 2 ranks, one run is left alone and one is killed:
SIGKILL at a random moment of its training, `--resume auto`, SIGKILL, `--resume auto`, ... until it
has had its share of kills and may end. Everything is `python train.py` in processes of its own,
with accumulation, an averaged model and a checkpoint every second step. Every second kill is aimed:
after its random moment it waits for a save to begin (a temporary folder appears), and strikes
within a millisecond. With 2 ranks a third of the kills take only one of them: the other must end by
itself. After each kill every file must be whole; at the end last.pt (weights, moments, average,
loss scale, counters, generators), best.pt and every line of metrics.jsonl must be those of the run
that was left alone, bit for bit.

tests/test_resume.py takes Job, differences and result from here.
"""

import contextlib
import json
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torchvision.transforms.v2.functional import to_pil_image

sys.path.insert(0, str(Path(__file__).parents[1]))
import checkpoint
from bench import record
from data import synthetic

ROOT = record.ROOT
STEPS = {"fp32": 100, "bf16": 100, "fp16": 40}  # fp16 is emulated on most CPUs: ten times slower


def draw_images(folder):
    """120 training and 60 test images as PNG files in one folder a class."""
    images, labels = synthetic.draw(0, 180, seed=3)
    for i, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
        split = "train" if i < 120 else "test"
        target = folder / split / f"class{label}" / f"{i:03d}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        to_pil_image(image).save(target)
    return folder


class Job:
    """One start of `python train.py --resume auto` in `folder`, until its end or its kill."""

    def __init__(self, images, folder, *flags, ranks=1, torchrun=0):
        self.folder = folder
        self.printed = folder.with_name(f"{folder.name}.{time.monotonic_ns()}")
        options = {
            "--model": "cifarnet-tiny",
            "--dataset": "cifar10",
            "--device": "cpu",
            "--data-dir": images,
            "--log-every": 1,
            "--out-dir": folder,
            "--resume": "auto",
        }
        words = [word for pair in options.items() for word in pair]
        launch = (
            [
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--max-restarts=2",
                f"--nproc_per_node={torchrun}",
            ]
            if torchrun
            else []
        )
        command = [sys.executable, *launch, ROOT / "train.py", *words, *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            environment["MASTER_PORT"] = str(free.getsockname()[1])
        self.processes = []
        for rank in range(ranks):
            if ranks > 1:  # as torchrun would set it
                numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
                environment |= {key: str(number) for key, number in numbers.items()}
            out = open(f"{self.printed}.{rank}.out", "w")  # noqa: SIM115
            err = open(f"{self.printed}.{rank}.err", "w")  # noqa: SIM115
            self.processes.append(
                subprocess.Popen(
                    [str(word).replace("{rank}", str(rank)) for word in command],
                    stdout=out,
                    stderr=err,
                    env=environment,
                    cwd=images.parent,  # where .cache lies
                )
            )

    def out(self, rank=0):
        return Path(f"{self.printed}.{rank}.out").read_text()

    def err(self, rank=0):
        return Path(f"{self.printed}.{rank}.err").read_text()

    def until(self, words="", starts=1):
        """Wait for `words` in metrics.jsonl, after set-up: old lines have been cut away then.

        False if it has ended instead.
        """
        metrics = self.folder / "metrics.jsonl"
        while self.out().count("\noutput ") < starts or words not in metrics.read_text():
            if any(process.poll() is not None for process in self.processes):
                return False
            time.sleep(0.002)
        return True

    def kill(self, ranks=None):
        """SIGKILL to these ranks or all (and what torchrun has started); then end()."""
        for i, process in enumerate(self.processes):
            if ranks is None or i in ranks:
                workers = children(process.pid)
                process.kill()
                for worker in workers:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(worker, signal.SIGKILL)
        return self.end()

    def end(self, timeout=300):
        """Exit codes by rank. TimeoutExpired for a rank that outlives the others."""
        try:
            return [process.wait(timeout) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()


def children(pid):
    """Linux: the processes that `pid` has started, in order. [] where it has ended."""
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def differences(a, b, name=""):
    """Names of what is not bit-identical in two nests."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        equal = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        return [] if equal else [name]
    if isinstance(a, (list, tuple)) and type(a) is type(b):
        a, b = dict(enumerate(a)), dict(enumerate(b))
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [d for key in a for d in differences(a[key], b[key], f"{name}.{key}".lstrip("."))]
    return [] if type(a) is type(b) and a == b else [name]


def result(folder):
    """What a finished run leaves behind, which kills must not change."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()][1:]
    lines = [line for line in lines if line.get("event") != "end"]  # holds seconds
    machine = re.compile("(bf16|fp16|tf32|O[123]): ")  # said at each start
    lines = [line for line in lines if not machine.match(line.get("text", ""))]
    last = checkpoint.load(folder / "last.pt")
    for rng in last["rng"]:
        rng.pop("python")  # nobody draws from it
    return {"last": last, "best": checkpoint.load(folder / "best.pt"), "lines": lines}


def lost(folder, before):
    """Checkpoints that a kill has damaged or deleted."""
    names = {path.name for path in folder.glob("*.pt")}
    bad = sorted(before - names)
    for name in sorted(names):
        try:
            checkpoint.load(folder / name)
        except checkpoint.CheckpointError as error:
            bad.append(str(error))
    return bad


def campaign(images, folder, precision, ranks, kills):
    """One run left alone; one killed `kills` times, or several, if it ends too early."""
    draw, counts, failures = random.Random(f"{precision} {ranks}"), Counter(), []
    flags = (
        "--precision",
        precision,
        "--batch-size",
        20,
        "--accum-steps",
        2,
        "--ema",
        0.9,
        "--max-steps",
        STEPS[precision],
        "--ckpt-every",
        2,
    )
    whole = Job(images, folder / "whole", *flags, ranks=ranks)
    assert whole.until(), whole.err()
    start = time.monotonic()
    assert not any(whole.end()), whole.err()
    window = 2 * (time.monotonic() - start) / max(kills, 4)  # a mean life: the run's length / kills
    while not failures and (counts["kills"] < kills or not counts["ends"]):
        killed = folder / f"killed-{counts['ends']}"
        job = Job(images, killed, *flags, ranks=ranks)
        trains = job.until()
        counts["resumes"] += ", resumed from " in job.out()
        codes = [0]
        if trains and counts["kills"] < kills:
            victims = draw.choice([None, None, [counts["kills"] % ranks]])
            time.sleep(draw.uniform(0, window))
            if counts["kills"] % 2:
                deadline = time.monotonic() + 0.5
                while not (killed / "last.pt.tmp").exists() and time.monotonic() < deadline:
                    time.sleep(0.0001)  # it lives for a millisecond or two
                time.sleep(draw.uniform(0, 0.001))
            before = {path.name for path in killed.glob("*.pt")}
            codes = job.kill(victims)
            counts["in a save"] += (killed / "last.pt.tmp").exists()
            counts["one rank only"] += victims is not None and ranks > 1
            failures += lost(killed, before)
        else:
            codes = job.end()
        if -signal.SIGKILL in codes:
            counts["kills"] += 1
        elif any(codes):
            failures.append(f"{codes}: {job.err()[-2000:]}")
        else:
            different = differences(result(folder / "whole"), result(killed))
            counts["ends"] += 1
            counts["identical ends"] += not different
            failures += different[:20]
    return {"precision": precision, "ranks": ranks, "failures": failures, **counts}


def main():
    parser = record.arguments(__doc__, "cpu")
    parser.add_argument("--kills", type=int, default=100)
    args = parser.parse_args()
    cases = [(precision, ranks) for ranks in (1, 2) for precision in STEPS]
    shares = {1: math.ceil(args.kills / 5), 2: math.ceil(args.kills * 2 / 15)}  # two start slowly
    with tempfile.TemporaryDirectory() as name:
        images = draw_images(Path(name) / "images")

        def go(case):
            folder = Path(name) / "-".join(map(str, case))
            folder.mkdir()
            return campaign(images, folder, *case, shares[case[1]])

        with ThreadPoolExecutor(2) as pool:  # a process has one thread
            rows = [*pool.map(go, cases)]
    total = Counter()
    for row in rows:
        print(row)
        total.update({key: n for key, n in row.items() if key not in ("precision", "failures")})
    head = record.header("kill_resume", args)
    args.smoke |= args.kills < 50
    record.write(head | {"n": total["kills"], "total": total, "cases": rows}, args, ("cases",))
    return int(any(row["failures"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
