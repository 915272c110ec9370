import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import train
from amp_policy import LossScaler, capabilities, choose_policy
from extras import graphs
from extras.ema import EMA
from guards import Guard
from models import RECIPE
from models.classifier import Classifier
from optim import ClippedAdamW, param_groups

ROOT = Path(__file__).resolve().parent.parent
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def trained(graphed, dtype, steps=12, poisoned=8):
    """A small network trained by train.py's step; one batch holds a NaN. Returns all state, and the verdicts."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Dropout(0.1), nn.Flatten(),
                        nn.Linear(288, 10))
    net, name = net.cuda(), {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    optimizer = ClippedAdamW(param_groups(net), lr=1e-2, clip=0.5)
    scaler = LossScaler("cuda", enabled=dtype is torch.float16, growth_interval=4)
    ema = EMA(optimizer.params, 0.9)
    run = train.Run(net=net, model=Classifier(net), policy=choose_policy(name, capabilities("cuda"), None, None),
                    scaler=scaler, guard=Guard(net, num_classes=10, device="cuda", lag=False), optimizer=optimizer,
                    average=ema)
    take = partial(train.train_step, run)
    step = graphs.StepGraph(take) if graphed else take
    verdicts = []
    torch.cuda.manual_seed(1)
    for n in range(1, steps + 1):
        images = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(n)).cuda()
        if n == poisoned:
            images[3, 0, 0, 0] = torch.nan
        run.guard.open(n)
        step(images, torch.arange(16, device="cuda") % 10)
        verdicts.append(run.guard.verdict())
    assert not graphed or step.graph is not None
    state = [*net.state_dict().values(), *ema.average, scaler.scale_tensor, scaler.good_steps]
    state += [t for s in optimizer.state.values() for t in s.values()]
    return [t.detach().cpu().clone() for t in state], verdicts


@CUDA
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_cuda_a_graph_trains_and_rejects_bit_for_bit_like_the_step_it_recorded(dtype):
    (plain, told), (replayed, retold) = trained(False, dtype), trained(True, dtype)
    assert all(torch.equal(a, b) for a, b in zip(plain, replayed, strict=True))
    assert str(told) == str(retold)  # NaN is not NaN
    assert [v.step for v in retold if not v.accepted] == [8] and "input" in retold[7].reasons


@CUDA
def test_on_cuda_a_step_that_asks_the_device_is_refused_with_advice():
    """In a process of its own: a recording that failed leaves CUDA's state behind."""
    code = """
import torch, train
from models import RECIPE
from models.classifier import Classifier
class Asks(torch.nn.Sequential):
    def forward(self, x):
        return super().forward(x) if x.sum().item() else x
build = lambda names, size: Asks(torch.nn.Flatten(), torch.nn.Linear(3072, len(names)))
train.MODELS["asks"] = build, RECIPE
flags = "--model asks --dataset synthetic --max-steps 12 --cuda-graph --out-dir"
raise SystemExit(train.main([*flags.split(), OUT]))
"""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, "-c", f"OUT = {folder + '/run'!r}\n{code}"], cwd=ROOT,
                              capture_output=True, text=True, timeout=600)
    assert done.returncode == 1 and "asks the device a question" in done.stderr
    assert "--no-cuda-graph" in done.stderr


class Growing(nn.Module):
    """Overflows in fp16 from the 20th accepted step on, and never in fp32."""

    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.n += 1
        return ((x * 2.0 ** self.n.to(x.dtype)) * 2.0 ** -self.n.to(x.dtype)).clamp(-4, 4)


@CUDA
def test_on_cuda_a_run_heals_itself_out_of_a_graph_and_goes_on_in_another(run, monkeypatch):
    recorded, record = [], graphs.StepGraph._record

    def watched(self, *batch):
        recorded.append(self.graph)
        record(self, *batch)

    monkeypatch.setattr(graphs.StepGraph, "_record", watched)
    monkeypatch.setitem(train.MODELS, "grows", (
        lambda names, size: nn.Sequential(nn.Flatten(), nn.Linear(3072, 32), Growing(), nn.Linear(32, len(names))),
        RECIPE | {"batch_size": 40},
    ))
    code, last, _, lines = run("--model", "grows", "--device", "cuda", "--precision", "fp16", "--cuda-graph",
                               "--max-steps", 120)
    assert (code, last["status"], last["healed"]) == (0, "done", ["2"])
    assert len(recorded) == 2 and last["skipped"] < 20
    assert [line["module"] for line in lines if line.get("event") == "cure"] == ["2"]


@CUDA
def test_on_cuda_train_py_ends_at_the_same_numbers_with_and_without_a_graph(run):
    ends = [run("--device", "cuda", "--precision", "bf16", "--max-steps", 20, flag, out=flag.strip("-"))[1]
            for flag in ("--cuda-graph", "--no-cuda-graph")]
    assert ends[0]["val_loss"] == pytest.approx(ends[1]["val_loss"], rel=0.02)


def test_a_graph_of_one_shape_is_not_replayed_for_another(monkeypatch):
    taken = []

    def record(self, images, labels):
        self.images, self.labels = images.clone(), labels.clone()
        self.graph = SimpleNamespace(replay=lambda: taken.append(f"graph of {len(self.images)}"))

    monkeypatch.setattr(graphs.StepGraph, "_record", record)
    step = graphs.StepGraph(lambda images, labels: taken.append(f"step of {len(images)}"), warm_up=1)
    for size in (4, 4, 4, 2, 2, 2):
        step(torch.zeros(size, 3), torch.zeros(size))
    assert taken == [f"{kind} of {size}" for size in (4, 2) for kind in ("step", "graph", "graph")]


def test_no_graph_is_asked_for_on_a_cpu(run, capsys):
    assert run("--cuda-graph", "--max-steps", 2)[0] == 0
