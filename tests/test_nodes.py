"""Several machines: two torchrun agents are two nodes, each with a folder of its own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import ROOT, free_port, run_ranks, same, script
from torch.nn.parallel import DistributedDataParallel

import train
from trainer.record import End, Run

LINE = (
    "--model cifarnet-tiny --dataset cifar10 --batch-size 40 --max-steps 40 --log-every 1 "
    "--ckpt-every 4 --precision fp32 --device cpu --resume auto"
)


class Node:
    """A torchrun agent with a working folder of its own; `out` is what all nodes see."""

    def __init__(self, where, images, out, *launch):
        where.mkdir(exist_ok=True)
        train = [ROOT / "train.py", *LINE.split(), "--data-dir", images, "--out-dir", out]
        self.log = where / "log"
        with open(self.log, "a") as log:
            self.agent = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *launch, *train],
                cwd=where,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

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
    meeting = f"--rdzv-endpoint=localhost:{free_port()}"
    launch = (
        "--nnodes=2",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        "--rdzv-id=1",
        meeting,
        "--local-addr=localhost",
    )
    nodes = [Node(tmp_path / name, image_folder, tmp_path / "shared", *launch) for name in "ab"]
    metrics, deadline = tmp_path / "shared/metrics.jsonl", time.time() + 240
    while not (metrics.exists() and '"step": 13,' in metrics.read_text()):
        assert time.time() < deadline, [node.log.read_text() for node in nodes]
        time.sleep(0.05)
    for node in nodes:
        node.lose()
    alone = Node(
        tmp_path / "c", image_folder, tmp_path / "shared", "--standalone", "--nproc-per-node=2"
    )
    script = [ROOT / "train.py", *LINE.split(), "--data-dir", image_folder]
    whole = run_ranks([*script, "--out-dir", tmp_path / "whole"], tmp_path)
    assert [code for code, _, _ in whole] == [0, 0]
    assert alone.agent.wait(240) == 0, alone.log.read_text()
    last = [line for line in alone.log.read_text().splitlines() if line.startswith("{")]
    assert len(last) == 1 and json.loads(last[0])["updates"] == 40
    step = re.search(r"resumed from .* after step (\d+)", alone.log.read_text())[1]
    assert 12 <= int(step) < 40, "else the kill came too late to show anything"
    ends = [
        torch.load(tmp_path / folder / "last.pt", weights_only=True)["model"]
        for folder in ("shared", "whole")
    ]
    assert same(*ends)


@pytest.mark.parametrize("kind", ["sleeps", "is stopped"])
def test_a_rank_that_does_not_come_is_named_before_the_time_out_ends_the_run(tmp_path, kind):
    waits = script(
        tmp_path,
        f"""
import os, signal, subprocess, time
from datetime import timedelta
import torch, torch.distributed as dist
import ranks
ranks.TIMEOUT = timedelta(seconds=12)
own = ranks.join("cpu").rank
ranks.TIMEOUT = timedelta(seconds=3)  # the thread's: a slow machine has nine seconds more
step = 0
ranks.name_missing(lambda: step)
for step in range(3):
    if step == 2 and own == 1 and {kind == "sleeps"}:
        step = 1  # it has not begun the second one
        time.sleep(16)
    if step == 2 and own == 1:
        wake = f"sleep 16; kill -CONT {{os.getpid()}}"
        subprocess.Popen(["sh", "-c", wake])
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(1))
""",
    )
    first, second = run_ranks([waits], tmp_path)
    assert first[0] and "Timed out" in first[2], first[2]
    assert "rank 0 waits in step 2, and the time-out is near: rank 1 is missing" in first[2]
    assert "is missing" not in second[2]


def test_memory_that_ends_while_ranks_average_is_survived_after_any_accumulation(tmp_path):
    """A gradient is then a view of what is sent, whose version counts other gradients, too."""
    ends = script(
        tmp_path,
        """
import torch
from torch import nn
import ranks
own = ranks.join("cpu").rank
class Ends(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.view_as(x))
    @staticmethod
    def backward(ctx, grad):
        if armed:
            raise torch.OutOfMemoryError("planted")
        return grad
class Net(nn.Sequential):
    def forward(self, x):
        return self[1](Ends.apply(self[0](x))).sum()
for accum in range(1, 9):
    net = Net(nn.Linear(3, 3), nn.Linear(3, 3))
    ddp = ranks.parallel(net, torch.device("cpu"))
    assert ddp.gradient_as_bucket_view
    for ends in (0, own, 0):
        vetoed = []
        armed = 0
        with ddp.no_sync():
            for _ in range(accum - 1):
                ddp(torch.ones(2, 3)).backward()
        armed = ends
        ranks.backward(ddp(torch.ones(2, 3)), ddp, lambda: vetoed.append(1))
        assert len(vetoed) == ends
        net.zero_grad()
""",
    )
    for code, _, error in run_ranks([ends], tmp_path):
        assert code == 0, error


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
