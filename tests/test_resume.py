"""
Kill the training where it stands, start it again: what comes out must be the run that was never killed.

The kills are real: `python train.py` in processes of its own and SIGKILL from outside, at chosen lines of
metrics.jsonl and at random moments. Compared is all of last.pt (weights, moments, average, loss scale, counters,
generators), best.pt and every line of metrics.jsonl. bench/kill_resume.py does the same a hundred times.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import prepare
import train
from data import batches

ROOT = Path(__file__).parent.parent
EPOCH = 6  # steps: 120 images in batches of 20
PACE = ("--batch-size", 20, "--max-steps", 20, "--ckpt-every", 4)  # of 20 steps three end an epoch, one of them saves
LANES = {"bf16": ("--precision", "bf16", "--ema", 0.9),
         "fp16": ("--precision", "fp16", "--accum-steps", 2, "--ema", 0.9)}


@pytest.fixture(scope="session")
def few_images(image_folder, tmp_path_factory):
    """120 training and 60 test images."""
    folder = tmp_path_factory.mktemp("few")
    for path in image_folder.glob("*/*/*.png"):
        if int(path.stem) < 120 or 400 <= int(path.stem) < 460:
            target = folder / path.relative_to(image_folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, target)
    return folder


class Job:
    """`python train.py --resume auto` on `folder`, in one process or `ranks`, under torchrun if asked."""

    def __init__(self, images, folder, *flags, ranks=1, torchrun=False):
        self.folder, self.printed = folder, folder.with_name(f"{folder.name}.{time.monotonic_ns()}")
        command = [sys.executable]
        if torchrun:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "--max-restarts=2"]
        command += [str(ROOT / "train.py"), "--model", "cifarnet-tiny", "--dataset", "cifar10", "--device", "cpu",
                    "--data-dir", str(images), "--log-every", "1", "--out-dir", str(folder), "--resume", "auto",
                    *map(str, flags)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        self.processes = []
        for rank in range(1 if torchrun else ranks):
            if ranks > 1 and not torchrun:  # what torchrun would set; without it a run starts 4 seconds sooner
                environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            with open(f"{self.printed}.out", "a") as out, open(f"{self.printed}.err", "a") as err:
                self.processes.append(subprocess.Popen(command, stdout=out, stderr=err, env=environment,
                                                       cwd=images.parent))  # .cache lies beside the run

    @property
    def out(self):
        return Path(f"{self.printed}.out").read_text()

    @property
    def err(self):
        return Path(f"{self.printed}.err").read_text()

    @property
    def summary(self):
        return json.loads(self.out.strip().splitlines()[-1])

    def until(self, words, *files, starts=1):
        """Wait for files and for `words` in metrics.jsonl after the card was printed, when old lines have been cut."""
        deadline = time.monotonic() + 600
        while (self.out.count("\noutput ") < starts or words not in (self.folder / "metrics.jsonl").read_text()
               or not all(path.exists() for path in files)):
            alive = all(process.poll() is None for process in self.processes)
            if not alive or time.monotonic() > deadline:
                self.kill()  # or torchrun and its workers would live on
                raise AssertionError(f"{'ended' if not alive else 'hung for 600 s'} without {words}:\n"
                                     f"{self.out}\n{self.err}")
            time.sleep(0.002)
        return self

    def workers(self):
        """Process ids of torchrun's workers by rank (Linux)."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == self.processes[0].pid:
                    variables = dict(v.partition("=")[::2] for v in (path / "environ").read_text().split("\0"))
                    if "RANK" in variables:
                        found[int(variables["RANK"])] = int(path.name)
            except OSError:  # it has ended meanwhile
                pass
        return found

    def kill(self):
        """SIGKILL to all its processes; -9 if it was still running, else its exit code."""
        workers = self.workers().values() if Path("/proc").exists() else ()
        for process in self.processes:
            process.kill()
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return self.end()

    def end(self):
        """Wait; the exit code (of the highest rank that failed)."""
        try:
            codes = [process.wait(timeout=600) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
        return next((code for code in reversed(codes) if code), 0)


def differences(a, b, name=""):
    """Names of what is not bit-identical in two nests."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        return [] if same else [name]
    if type(a) is type(b) and isinstance(a, (dict, list, tuple)) and len(a) == len(b):
        keys = a.keys() if isinstance(a, dict) else range(len(a))
        if not isinstance(a, dict) or keys == b.keys():
            return [d for key in keys for d in differences(a[key], b[key], f"{name}.{key}".lstrip("."))]
    return [] if type(a) is type(b) and a == b else [name]


def result(folder):
    """All that a run leaves behind and that its death must not change."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()[1:]]
    lines = [line for line in lines if line.get("event") != "end"]  # it tells seconds
    lines = [line for line in lines if "times as long" not in line.get("text", "")]  # so does this warning
    last, best = (torch.load(folder / f"{name}.pt", weights_only=True) for name in ("last", "best"))
    for rng in last["rng"]:
        del rng["python"]  # seeded by nobody and used by nobody
    return {"last": last, "best": best, "lines": lines}


def test_a_planted_difference_is_seen():
    a = {"last": {"w": torch.tensor([1.0, 0.0]), "n": [1, {"x": 2.0}]}}
    assert not differences(a, {"last": {"w": torch.tensor([1.0, 0.0]), "n": [1, {"x": 2.0}]}})
    b = {"last": {"w": torch.tensor([1.0, 1e-45]), "n": [1, {"x": 2.5}]}}
    assert differences(a, b) == ["last.w", "last.n.1.x"]
    assert differences([1, 2], [1]) and differences({"a": 1}, {"b": 1}) and differences(1, True)


# ---------------------------------------------------------------------------------------------------------------------
# One process


@pytest.fixture(scope="module")
def lanes(few_images, tmp_path_factory):
    """For each precision: the run that was never killed, and one that was killed three times; side by side."""

    def go(name):
        folder, flags = tmp_path_factory.mktemp(name), (*LANES[name], *PACE)
        whole, jobs, codes = Job(few_images, folder / "whole", *flags), [], []
        codes.append(whole.end())
        draw = random.Random(name)
        second = folder / "killed" / "last-1.pt"  # appears when the second file is whole
        for moment in ('"step": 5,', '"epoch": 2.0', draw.uniform(0, 0.5), None):
            if len(jobs) == 1 and name == "bf16":
                last = folder / "killed" / "last.pt"
                os.truncate(last, last.stat().st_size // 2)
            jobs.append(Job(few_images, folder / "killed", *flags))
            if isinstance(moment, str):  # a line in the file: that step is over, the next one is running
                codes.append(jobs[-1].until(moment, second).kill())
            elif moment is not None:
                jobs[-1].until("args")
                time.sleep(moment)
                codes.append(jobs[-1].kill())
            if codes[-1] != -signal.SIGKILL:  # the random moment came after the end
                break
        else:
            codes.append(jobs[-1].end())
        return folder, codes, jobs

    with ThreadPoolExecutor(len(LANES)) as pool:
        return dict(zip(LANES, pool.map(go, LANES), strict=True))


@pytest.mark.xdist_group("lanes")
@pytest.mark.parametrize("lane", LANES)
def test_a_run_killed_again_and_again_ends_bit_for_bit_like_the_one_never_killed(lanes, lane):
    folder, (first, *codes), jobs = lanes[lane]
    assert first == 0 and codes[:2] == [-9, -9] and codes[-1] == 0, [job.err for job in jobs]
    assert all("resumed from" in job.out for job in jobs[1:]) and "resumed from" not in jobs[0].out
    assert differences(result(folder / "whole"), result(folder / "killed")) == []
    lines = result(folder / "killed")["lines"]
    assert [line["step"] for line in lines if "lr" in line] == list(range(1, 21))
    assert [line["epoch"] for line in lines if "epoch" in line] == [1, 2, 3, 20 / EPOCH]
    assert not list((folder / "killed").glob("*.tmp"))


@pytest.mark.xdist_group("lanes")
def test_a_truncated_last_falls_back_to_the_one_before_with_a_warning(lanes):
    _, _, jobs = lanes["bf16"]
    assert "last.pt is damaged or truncated" in jobs[1].err
    assert "falling back to" in jobs[1].err and "last-1.pt after step" in jobs[1].out
    assert "truncated" not in "".join(job.err for job in jobs[2:])


@pytest.mark.xdist_group("lanes")
def test_best_loads_into_the_bare_model_with_torch_alone(lanes, run, few_images, tmp_path):
    run("--precision", "O2", "--data-dir", few_images, "--batch-size", 20, "--max-steps", EPOCH)
    shutil.copy(ROOT / "models" / "cifarnet.py", tmp_path)
    script = """
import sys
import torch
from cifarnet import PRESETS, CifarNet
for path in sys.argv[1:]:
    net = CifarNet(num_classes=10, **PRESETS["cifarnet-tiny"])
    net.load_state_dict(torch.load(path, weights_only=True))
    floats = [t.dtype for t in torch.load(path, weights_only=True).values() if t.is_floating_point()]
    assert len(floats) > 20 and set(floats) == {torch.float32}, floats
    assert net.eval()(torch.ones(2, 3, 32, 32)).isfinite().all()
assert not {"train", "checkpoint", "models", "torchvision"} & sys.modules.keys()
"""
    files = [lanes["bf16"][0] / "killed" / "best.pt", run.folder / "best.pt"]
    done = subprocess.run([sys.executable, "-c", script, *map(str, files)], cwd=tmp_path, capture_output=True,
                          text=True, timeout=600, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# Two ranks


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds torchrun's workers in /proc")
def test_two_ranks_outlive_the_death_of_one_and_of_all(few_images, run, monkeypatch):
    flags = (*LANES["fp16"], *PACE)
    folder = run.folder
    folder.mkdir()
    whole = Job(few_images, folder / "whole", *flags, ranks=2)
    assert whole.end() == 0, whole.err
    job = Job(few_images, folder / "killed", *flags, ranks=2, torchrun=True)
    os.kill(job.until('"step": 9,').workers()[1], signal.SIGKILL)
    job.until('"step": 13,', starts=2)  # torchrun has started both again, and they went on from step 8
    first = int(re.search(r"last\.pt after step (\d+)", job.out)[1])
    assert first in (8, 12)  # the kill may strike later than step 9
    assert job.kill() == -9
    shutil.copytree(folder / "killed", folder / "other")
    job = Job(few_images, folder / "killed", *flags, ranks=2)
    assert job.end() == 0, job.err
    second = int(re.search(r"last\.pt after step (\d+)", job.out)[1])
    assert second in (12, 16) and second >= first
    assert differences(result(folder / "whole"), result(folder / "killed")) == []

    # The same checkpoint, on one rank and in another precision: another run, which says so and goes on.
    said = []
    monkeypatch.setattr(train.tqdm, "write", said.append)
    code, last, _, lines = run("--precision", "bf16", "--ema", 0.9, "--data-dir", few_images, *PACE,
                               "--resume", "auto", out="run/other")
    assert (code, last["precision"], last["steps"], last["updates"]) == (0, "bf16", 20, 20)
    assert [line["step"] for line in lines[1:] if "lr" in line] == list(range(1, 21))
    assert "world_size: 2 -> 1" in " ".join(said) and "precision: fp16 -> bf16" in " ".join(said)


# ---------------------------------------------------------------------------------------------------------------------
# Signals


def test_a_signal_saves_and_leaves_with_its_number_and_a_second_sigint_leaves_at_once(few_images, tmp_path):
    endless = ("--max-steps", 100_000, "--ckpt-every", 100_000, "--precision", "bf16", "--batch-size", 20)
    slow = ("--max-steps", 100_000, "--ckpt-every", 100_000, "--precision", "fp16", "--batch-size", 120)
    jobs = {s: Job(few_images, tmp_path / s.name, *endless) for s in (signal.SIGTERM, signal.SIGUSR1)}
    hasty = Job(few_images, tmp_path / "hasty", *slow)
    for number, job in jobs.items():
        job.until('"step": 3,').processes[0].send_signal(number)
        assert job.end() == 128 + number, job.err
        assert job.summary["status"] == f"stopped by signal {int(number)}"
        assert torch.load(job.folder / "last.pt", weights_only=True)["step"] == job.summary["steps"] >= 4
    hasty.until('"step": 1,')
    while hasty.processes[0].poll() is None:  # two within one long operation arrive as one: so more than two
        hasty.processes[0].send_signal(signal.SIGINT)
        time.sleep(0.001)  # far less than a step: the second signal arrives before the step ends
    assert hasty.end() == 128 + signal.SIGINT
    assert '"status"' not in hasty.out and "Traceback" not in hasty.err
    assert torch.load(hasty.folder / "last.pt", weights_only=True)["step"] == 0


def test_a_signal_to_one_rank_of_two_stops_both_at_the_same_step_with_a_checkpoint(few_images, tmp_path):
    endless = ("--max-steps", 100_000, "--ckpt-every", 100_000, "--precision", "bf16", "--batch-size", 20)
    job = Job(few_images, tmp_path / "job", *endless, ranks=2)
    job.until('"step": 3,').processes[1].send_signal(signal.SIGTERM)
    assert job.end() == 128 + signal.SIGTERM, job.err
    assert [process.returncode for process in job.processes] == [128 + signal.SIGTERM] * 2
    assert job.summary["status"] == f"stopped by signal {int(signal.SIGTERM)}"
    assert torch.load(job.folder / "last.pt", weights_only=True)["step"] == job.summary["steps"] >= 4


@pytest.mark.parametrize("last_step", [6, 12], ids=["of an epoch", "of the run"])
def test_a_signal_on_the_last_step_loses_no_evaluation(run, few_images, monkeypatch, last_step):
    flags = ("--data-dir", few_images, "--batch-size", 20, "--precision", "bf16")
    whole = run(*flags, out="whole")
    healthy = batches.TrainBatches.at

    def interrupted(self, step):
        if step == last_step - 2:  # the verdict comes a step later
            os.kill(os.getpid(), signal.SIGTERM)
        return healthy(self, step)

    monkeypatch.setattr(batches.TrainBatches, "at", interrupted)
    code, last, _, _ = run(*flags)
    assert (code, last["steps"]) == (128 + signal.SIGTERM, last_step)
    monkeypatch.setattr(batches.TrainBatches, "at", healthy)
    resumed = run(*flags, "--resume", "auto")
    assert resumed[0] == 0
    assert resumed[1]["val_acc1"] == whole[1]["val_acc1"]
    assert differences(result(run.folder.with_name("whole")), result(run.folder)) == []


# ---------------------------------------------------------------------------------------------------------------------
# What a resume remembers, says and refuses


def test_what_the_healer_has_done_survives_a_kill(run, few_images, monkeypatch):
    """Two faults, one before the last checkpoint and one after it: the second is examined because of the first."""
    flags = ("--data-dir", few_images, "--batch-size", 20, "--precision", "bf16", "--ckpt-every", 4,
             "--inject", "nan:loss@step=3;nan:loss@step=10")
    whole = run(*flags, out="whole")
    healthy = batches.TrainBatches.at

    class Killed(BaseException):
        pass

    def killed(self, step):
        if step == 8:
            raise Killed
        return healthy(self, step)

    monkeypatch.setattr(batches.TrainBatches, "at", killed)
    with pytest.raises(Killed):
        run(*flags)
    monkeypatch.setattr(batches.TrainBatches, "at", healthy)
    resumed = run(*flags, "--resume", "auto")
    assert any(line.get("event") == "cure" for line in whole[3])
    assert resumed[1]["healed"] == whole[1]["healed"]
    assert differences(result(run.folder.with_name("whole")), result(run.folder)) == []


def test_a_finished_run_started_again_changes_nothing_and_still_reports_its_scores(run, few_images):
    flags = ("--data-dir", few_images, "--batch-size", 20)
    once = run(*flags)
    before = result(run.folder)
    again = run(*flags, "--resume", "auto")
    assert again[0] == 0 and differences(before, result(run.folder)) == []
    assert {k: again[1].get(k) for k in ("steps", "updates", "val_acc1", "val_loss")} == \
        {k: once[1][k] for k in ("steps", "updates", "val_acc1", "val_loss")}


def test_other_data_is_refused_by_name(run, few_images, image_folder, monkeypatch):
    flags = ("--batch-size", 20, "--max-steps", 3)
    run("--data-dir", few_images, *flags)
    code, _, error, _ = run("--data-dir", image_folder, *flags, "--resume", "auto")
    assert code == 2 and "120" in error and "400" in error, "the same layout, other images"
    whole = prepare.load

    def retouched(*args):
        (images, labels), *rest = whole(*args)
        images = images.clone()  # it is the file of the cache
        images[7, 0, 3, 3] ^= 1
        return ((images, labels), *rest)

    with monkeypatch.context() as patch:
        patch.setattr("prepare.load", retouched)
        code, _, error, _ = run("--data-dir", few_images, *flags, "--resume", "auto")
    assert code == 2 and "pixels: " in error, "as many images, one bit of one pixel changed"
    images, labels = torch.zeros(40, 3, 32, 32, dtype=torch.uint8), torch.arange(40) % 10
    monkeypatch.setattr("prepare.load", lambda *_: ((images, labels), (images, labels), [*"abcdefghij"], "synthetic"))
    code, _, error, _ = run("--dataset", "synthetic", *flags, "--resume", "auto")
    assert code == 2 and "dataset: cifar10 -> synthetic" in error


def test_a_file_that_is_no_checkpoint_of_a_run_is_refused_in_one_sentence(run, few_images):
    flags = ("--data-dir", few_images, "--batch-size", 20, "--max-steps", EPOCH)
    run(*flags)
    for file in (run.folder / "best.pt", run.folder / "metrics.jsonl"):
        code, _, error, _ = run(*flags, "--resume", file, out="new")
        assert code == 2 and file.name in error and len(error.strip().splitlines()) == 1
