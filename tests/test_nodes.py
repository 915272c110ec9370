"""Several machines: two torchrun agents are two nodes, each with a folder of its own."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import ROOT, run_ranks, same
from torch.nn.parallel import DistributedDataParallel

import train
from record import End, Run

LINE = ("--model cifarnet-tiny --dataset cifar10 --batch-size 40 --max-steps 40 --log-every 1 "
        "--ckpt-every 4 --precision fp32 --device cpu --resume auto")


class Node:
    """A torchrun agent with a working folder of its own; `out` is what all nodes see."""

    def __init__(self, where, images, out, *launch):
        where.mkdir(exist_ok=True)
        train = [ROOT / "train.py", *LINE.split(), "--data-dir", images, "--out-dir", out]
        self.log = where / "log"
        with open(self.log, "a") as log:
            self.agent = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *launch, *train],
                cwd=where, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    def lose(self):
        """The machine is gone: the agent and its worker."""
        pid = self.agent.pid
        workers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for process in (pid, *map(int, workers)):
            os.kill(process, signal.SIGKILL)
        self.agent.wait()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds torchrun's workers in /proc")
def test_a_run_on_two_nodes_that_are_lost_goes_on_elsewhere_bit_for_bit(image_folder, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        meeting = f"--rdzv-endpoint=localhost:{free.getsockname()[1]}"
    launch = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=1", meeting,
              "--local-addr=localhost")
    nodes = [Node(tmp_path / name, image_folder, tmp_path / "shared", *launch) for name in "ab"]
    metrics, deadline = tmp_path / "shared/metrics.jsonl", time.time() + 240
    while not (metrics.exists() and '"step": 13,' in metrics.read_text()):
        assert time.time() < deadline, [node.log.read_text() for node in nodes]
        time.sleep(0.05)
    for node in nodes:
        node.lose()
    alone = Node(tmp_path / "c", image_folder, tmp_path / "shared", "--standalone",
                 "--nproc-per-node=2")
    script = [ROOT / "train.py", *LINE.split(), "--data-dir", image_folder]
    whole = run_ranks([*script, "--out-dir", tmp_path / "whole"], tmp_path)
    assert [code for code, _, _ in whole] == [0, 0]
    assert alone.agent.wait(240) == 0, alone.log.read_text()
    last = [line for line in alone.log.read_text().splitlines() if line.startswith("{")]
    assert len(last) == 1 and json.loads(last[0])["updates"] == 40
    step = re.search(r"resumed from .* after step (\d+)", alone.log.read_text())[1]
    assert 12 <= int(step) < 40, "else the kill came too late to show anything"
    ends = [torch.load(tmp_path / folder / "last.pt", weights_only=True)["model"]
            for folder in ("shared", "whole")]
    assert same(*ends)


def test_at_the_end_ddp_is_freed_before_its_group(tmp_path, monkeypatch):
    """Freed after it, its end has been seen to wait for ever."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    args = SimpleNamespace(model="own", dataset="own", precision="fp32")
    run, order = Run(args=args, bar=True), []
    run.ddp = run.compiled = DistributedDataParallel(torch.nn.Linear(2, 2))
    weakref.finalize(run.ddp, order.append, "DDP")
    destroy = dist.destroy_process_group
    monkeypatch.setattr(dist, "destroy_process_group", lambda: (order.append("group"), destroy()))
    train.finish(run, End("done", 0))
    assert order == ["DDP", "group"] and not dist.is_initialized()
