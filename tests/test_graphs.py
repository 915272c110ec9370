"""A step as a CUDA graph beside the same step kernel by kernel."""

from types import SimpleNamespace

import pytest
import torch
from helpers import needs_cuda, policy_for, run_script, same, script, snapshot
from torch import nn

import train
from amp_policy import LossScaler
from extras import graphs
from extras.ema import EMA
from extras.muon import Muon
from guards import Guard
from optim import ClippedAdamW, Schedule, master_params, param_groups, warmup_cosine
from trainer.record import Run


def trained(graphed, dtype, device="cuda", steps=12, poisoned=8):
    """All state of a small network and of what trains it, and the verdicts; one batch has a NaN."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Flatten(),
        nn.Linear(288, 10),
    ).to(device)
    muon = Muon([net[0].weight], lr=1e-2)
    adamw = ClippedAdamW(param_groups(net, skip=[net[0].weight]), lr=1e-2, clip=None)
    optimizers = [muon, adamw]
    schedule = Schedule(optimizers, warmup_cosine(steps, 3))
    scaler = LossScaler(device, enabled=dtype is torch.float16, growth_interval=4)
    weights = list(master_params(optimizers).values())
    ema = EMA(weights, 0.9)
    guard = Guard(net, num_classes=10, lag=False)

    def take(images, labels):
        labels = guard.see_batch(images, labels)
        with torch.autocast(device, dtype, enabled=dtype is not torch.float32):
            out = net(images)
        loss = nn.functional.cross_entropy(out.float(), labels)
        guard.see_loss(loss)
        scaler.scale(loss).backward()
        found_inf = guard.step(optimizers, scaler, clip=0.5, lr=schedule.lr)
        scaler.update(found_inf=found_inf)
        schedule.update(found_inf)
        ema.update(weights, found_inf)
        net.zero_grad()

    step = graphs.StepGraph(take) if graphed else take
    verdicts = []
    for n in range(1, steps + 1):
        images = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(n)).to(device)
        if n == poisoned:
            images[3, 0, 0, 0] = torch.nan
        guard.open(n)
        step(images, torch.arange(16, device=device) % 10)
        verdicts.append(guard.verdict())
    assert not graphed or step.graph is not None
    return snapshot(net, *optimizers, schedule, ema, scaler.scale_tensor), verdicts


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_cuda_a_graph_trains_and_rejects_bit_for_bit_like_the_step_it_recorded(dtype):
    plain, verdicts = trained(False, dtype)
    replayed, others = trained(True, dtype)
    assert same(plain, replayed)
    assert str(verdicts) == str(others)  # NaN is not NaN
    assert [v.step for v in others if not v.accepted] == [8] and "input" in others[7].reasons


@needs_cuda
def test_on_cuda_a_step_that_asks_the_device_is_refused_with_advice(tmp_path):
    """In a process of its own: a recording that failed leaves CUDA's state behind."""
    asks = script(
        tmp_path,
        """
import torch, train
from models import RECIPE
class Asks(torch.nn.Sequential):
    def forward(self, x):
        return super().forward(x) if x.sum().item() else x
build = lambda names, *_: Asks(torch.nn.Flatten(), torch.nn.Linear(3072, len(names)))
train.MODELS["asks"] = build, RECIPE
raise SystemExit(train.main(sys.argv[1:]))
""",
    )
    flags = ["--model=asks", "--dataset=synthetic", "--max-steps=12", "--cuda-graph"]
    code, _, err = run_script([asks, *flags], tmp_path)
    assert code == 1 and "reads from the device" in err and "--no-cuda-graph" in err


class Growing(nn.Module):
    """Overflows in fp16 from the 20th accepted step on, and never in fp32."""

    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.n += 1
        return ((x * 2.0 ** self.n.to(x.dtype)) * 2.0 ** -self.n.to(x.dtype)).clamp(-4, 4)


@needs_cuda
def test_on_cuda_a_run_heals_itself_out_of_a_graph_and_goes_on_in_another(run, model, monkeypatch):
    recorded = []
    record = graphs.StepGraph._record

    def watched(self, *batch):
        recorded.append(self.graph)
        record(self, *batch)

    monkeypatch.setattr(graphs.StepGraph, "_record", watched)
    model(
        "grows",
        lambda classes: nn.Sequential(
            nn.Flatten(), nn.Linear(3072, 32), Growing(), nn.Linear(32, classes)
        ),
    )
    code, last, _, _ = run(
        "--model",
        "grows",
        "--device",
        "cuda",
        "--precision",
        "fp16",
        "--cuda-graph",
        "--max-steps",
        120,
    )
    assert (code, last["status"], last["healed"]) == (0, "done", ["2"])
    assert len(recorded) == 2 and last["skipped"] < 20


def test_a_graph_of_one_shape_is_not_replayed_for_another(monkeypatch):
    taken = []

    def record(self, images, labels):
        self.images = images.clone()
        self.labels = labels.clone()
        self.graph = SimpleNamespace(replay=lambda: taken.append(f"graph of {len(self.images)}"))

    monkeypatch.setattr(graphs.StepGraph, "_record", record)
    step = graphs.StepGraph(lambda x, _: taken.append(f"step of {len(x)}"), warm_up=1)
    for size in (4, 4, 4, 2, 2, 2):
        step(torch.zeros(size, 3), torch.zeros(size))
    assert taken == [f"{kind} of {size}" for size in (4, 2) for kind in ("step", "graph", "graph")]


def test_nothing_is_recorded_where_less_than_a_tenth_of_the_memory_would_be_left(monkeypatch):
    taken, free = [], [31, 29]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: taken.append("emptied"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free.pop(0), 100))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 15)  # of one step: 10
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 5)
    step = graphs.StepGraph(lambda *_: taken.append("step"), warm_up=1)
    batch = torch.zeros(4, 3), torch.zeros(4)
    step(*batch)
    with pytest.raises((RuntimeError, AssertionError)):  # it would record, and there is no GPU
        step(*batch)
    taken.clear()
    with pytest.warns(UserWarning, match="too little memory"):
        step(*batch)
    step(*batch)
    assert taken == ["emptied", "step", "step"] and not free


def test_after_memory_has_ended_nothing_is_recorded(run, monkeypatch):
    take, setup, recorded = train.train_step, train.prepare.setup, []

    def small(run, *rest):
        if run.accum == 1 and run.step == 3:
            raise torch.OutOfMemoryError("planted")
        return take(run, *rest)

    def with_graph(run, _):
        setup(run, small)
        run.graph = graphs.StepGraph(lambda *batch: small(run, *batch))

    monkeypatch.setattr(graphs.StepGraph, "_record", lambda self, *_: recorded.append(self.calls))
    monkeypatch.setattr(train.prepare, "setup", with_graph)
    assert run()[0] == 0 and not recorded


def test_a_network_is_compiled_where_that_pays_and_works(monkeypatch):
    net, tried = nn.Linear(2, 2), []
    monkeypatch.setattr(torch, "compile", lambda net, dynamic: ("compiled", net, dynamic))
    choose = graphs.compile_if_it_pays
    few = graphs.PAYS_AFTER - 1
    assert (
        choose(net, few, tried.append)
        == (net, "not compiled: it pays from 12,000 steps a shape on")
        and not tried
    )
    assert choose(net, few + 1, tried.append) == (("compiled", net, False), "compiled")
    assert tried == [("compiled", net, False)]
    broken, why = choose(net, few + 1, lambda net: net.absent)
    assert broken is net and why.startswith("not compiled: AttributeError")


@pytest.mark.parametrize(
    "flag, steps, compiled",
    [("auto", 24_000, True), ("auto", 23_999, False), ("on", 1, True), ("off", 24_000, False)],
)
def test_compile_auto_is_for_long_runs_with_a_graph(monkeypatch, flag, steps, compiled):
    monkeypatch.setattr(torch, "compile", lambda net, dynamic: "compiled")
    monkeypatch.setattr(train.prepare.plan, "seconds_of", lambda *_: 0.01)
    args = SimpleNamespace(
        compile=flag, inject="", batch_size=40, model="cifarnet", recipe=train.MODELS["cifarnet"][1]
    )
    run = Run(args=args, graph=object(), ddp="eager", total_steps=steps, policy=policy_for("bf16"))
    run.compiled = run.ddp
    train.prepare.compilation(run)
    assert run.compiled == ("compiled" if compiled else "eager")


def test_a_cpu_gets_no_graph_and_no_compiled_code_by_itself(run, monkeypatch):
    monkeypatch.setattr(torch, "compile", None)
    monkeypatch.setattr(graphs, "PAYS_AFTER", 0)
    assert run("--cuda-graph", "--max-steps", 2)[0] == 0
