"""
The step on a GPU that is not there.

torch's fake tensors have a device and a dtype and no numbers. On "cuda" they take the GPU's
branches (is_cuda, fused kernels, CUDA's autocast) on any machine with a CUDA build of torch. The
step runs on them under a watch that lists every line that a GPU would wait for or refuse in a CUDA
graph: a number asked by Python, a shape that depends on numbers, a copy between host and device, a
tensor of the host in an operation of the device. The watch also counts what would be launched.

An ordinary step may ask nothing. A look at all weights, a sample of the probes, a pass that is run
twice and a validation ask now and then: the lines that may are named here, and no other line may.

What cannot be seen: numbers, time, memory, streams, what is recorded in a graph, the choice of a
kernel inside an operation (cuDNN, attention), errors that only a kernel finds.
"""

import linecache
import sys
import warnings
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import is_ours
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import optim
import train
from amp_policy import LossScaler
from extras.ema import EMA
from extras.muon import Muon
from guards import Guard
from models.classifier import Classifier
from optim import ClippedAdamW, Schedule, master_params, warmup_cosine
from trainer import record, validation

CUDA = torch.device("cuda", 0)
KNOWN = torch.backends.cuda.is_built() and hasattr(torch._C, "_ensureCUDADeviceGuardSet")
pytestmark = [
    pytest.mark.skipif(not KNOWN, reason="wants a CUDA build of torch 2.11 or later, no GPU"),
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor"),
]
aten = torch.ops.aten
ASKS = {aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default}
VIEWS = (
    "detach",
    "empty",
    "alias",
    "select",
    "slice",
    "split",
    "unbind",
    "view",
    "reshape",
    "t",
    "transpose",
    "expand",
    "permute",
    "unsqueeze",
    "squeeze",
    "lift_fresh",
    "promote_types",
    "device",
)


class Watch(TorchDispatchMode):
    """Lists what a GPU would wait for, as "file:line: what", and counts launches.

    A number that is asked for is answered with `answer`."""

    def __init__(self, answer=0):
        super().__init__()
        self.seen, self.answer, self.launches = [], answer, 0
        self.lines = set()  # the source of each line that was seen

    def say(self, what):
        frame = sys._getframe(2)
        # The mode of fp32_eval stands between a line and torch.
        while frame and (
            not is_ours(frame.f_code.co_filename)
            or frame.f_code.co_filename == __file__
            or frame.f_code.co_name == "__torch_function__"
        ):
            frame = frame.f_back
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "a backward"
        self.seen.append(f"{place}: {what}")
        if frame:
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            self.lines.add(f"{Path(frame.f_code.co_filename).name}: {line}")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        devices = {t.device.type for t in tensors}
        name = func.overloadpacket.__name__
        self.launches += devices == {"cuda"} and not name.strip("_").startswith(VIEWS)
        if func in ASKS:
            if "cuda" in devices:
                self.say(f"the host asks for a number ({func})")
            is_float = tensors[0].dtype.is_floating_point
            return float(self.answer) if is_float else self.answer
        if len(devices) > 1:
            self.say(f"{func} of host and device")
        if not func._schema.returns and "_fused_" in func._schema.name:  # it has no fake kernel
            return None
        try:
            out = func(*args, **kwargs)
        except (
            fake_tensor.DynamicOutputShapeException,
            fake_tensor.DataDependentOutputException,
        ):
            self.say(f"the shape of {func} depends on numbers")
            raise
        after = {t.device.type for t in tree_leaves(out) if isinstance(t, torch.Tensor)}
        if devices and after and after != devices:
            self.say(f"{func} goes from {devices} to {after}")
        return out


def backward(root, gradient=None):
    """Tensor.backward() as a walk in Python: autograd's own engine wants a CUDA device."""
    waits, known, stack = defaultdict(int), set(), [root.grad_fn]
    while stack:
        node = stack.pop()
        if node in known:
            continue
        known.add(node)
        for after, _ in node.next_functions:
            if after is not None:
                waits[after] += 1
                stack.append(after)
    given, ready = defaultdict(dict), [root.grad_fn]
    given[root.grad_fn][0] = torch.ones_like(root) if gradient is None else gradient
    while ready:
        node = ready.pop()
        slots = given.pop(node, {})
        out = [None] * len(node.next_functions)  # where nothing reached the node
        if slots:
            is_custom = hasattr(node, "_forward_cls")
            values = [slots.get(i) for i in range(max(slots) + 1)]
            out = node.apply(*values) if is_custom else node(*values)
            out = out if isinstance(out, tuple | list) else [out]
        for (after, slot), value in zip(node.next_functions, out, strict=False):
            if after is None:
                continue
            if value is not None:
                wanted = after._input_metadata[slot]
                value = value.sum_to_size(wanted.shape).to(wanted.dtype)  # as the engine does
                old = given[after].get(slot)
                given[after][slot] = value if old is None else old + value
            waits[after] -= 1
            if not waits[after]:
                ready.append(after)


@pytest.fixture
def gpu(monkeypatch):
    """A fake GPU: enter the mode that it returns."""
    properties = SimpleNamespace(
        name="fake",
        major=9,
        minor=0,
        multi_processor_count=132,
        total_memory=2**37,
        max_threads_per_multi_processor=2048,
        warp_size=32,
    )
    stream = SimpleNamespace(record_event=lambda *a: None)
    for name, value in {
        "is_available": True,
        "current_device": 0,
        "device_count": 1,
        "_lazy_init": None,
        "get_device_properties": properties,
        "get_device_capability": (9, 0),
        "is_bf16_supported": True,
        "current_stream": stream,
        "is_current_stream_capturing": False,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *a, value=value, **k: value)
    monkeypatch.setattr(fake_tensor, "init_gpu_context", lambda *a: None)
    monkeypatch.setattr(FakeTensorMode, "avoid_device_init", True)
    monkeypatch.setattr(optim, "refusal", lambda *a: "")  # it computes with numbers
    no_grad = torch.no_grad()
    monkeypatch.setattr(torch.Tensor, "backward", lambda t, g=None, **_: no_grad(backward)(t, g))
    return FakeTensorMode()


def network():
    """Convolution, BatchNorm and a head, on the fake GPU: half of what the models are made of."""
    with CUDA:
        return nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(32, 10),
        )


def usual(optimizers, scaler=None, clip=1.0, guarded=True, accum=1):
    """A loop in the usual manner: what it takes, as a function of nothing."""
    net = network()
    with Watch(answer=1):  # while things are made, numbers may be asked
        optimizers = optimizers(net)
    guard = Guard(net, num_classes=10)
    scaler = scaler() if scaler else torch.amp.GradScaler("cuda", enabled=False)
    images = torch.empty(4, 3, 8, 8, device=CUDA)
    labels = torch.empty(4, dtype=torch.long, device=CUDA)

    def step():
        if guarded:
            guard.open()
        for _ in range(accum):
            y = guard.see_batch(images, labels) if guarded else labels
            with torch.autocast("cuda", torch.bfloat16):
                loss = F.cross_entropy(net(images), y)
            if guarded:
                guard.see_loss(loss)
            scaler.scale(loss).backward()
        if guarded:
            found_inf = guard.step(optimizers, scaler, clip=clip)
            guard.state = "sent"  # reading a verdict copies to the host, and must
        else:
            found_inf = None
            for o in optimizers:
                scaler.unscale_(o)
                nn.utils.clip_grad_norm_(net.parameters(), clip, foreach=True)
                scaler.step(o)
        scaler.update()
        for o in optimizers:
            o.zero_grad()
        return found_inf

    step.net, step.optimizers, step.guard = net, optimizers, guard
    return step


def fused(net):
    return [torch.optim.AdamW(net.parameters(), fused=True)]


def ours(net):
    matrices = [net[5].weight]
    rest = [p for p in net.parameters() if p is not matrices[0]]
    return [Muon(matrices), ClippedAdamW(rest, clip=None)]


def watched(step):
    """The second step under watch: the first makes state, and may ask."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Watch(answer=0):
            step()
    with Watch() as watch:
        step()
    assert watch.launches > 30
    return watch


@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("scaler", [None, lambda: torch.amp.GradScaler("cuda"), LossScaler])
@pytest.mark.parametrize("optimizers", [fused, ours])
def test_the_guard_in_a_usual_loop_makes_no_gpu_wait(gpu, optimizers, scaler, clip, accum):
    with gpu:
        assert not watched(usual(optimizers, scaler, clip, accum=accum)).seen


# --- train.py on the fake GPU


def clipped(net):
    return [ClippedAdamW(net.parameters(), clip=None)]


def prepared(scales=False, optimizers=ours, ema=0.9, carries=()):
    """The record of a run with what the step, its looks and a validation need, and a batch."""
    policy = SimpleNamespace(
        name="bf16", dtype=torch.bfloat16, autocast=lambda: torch.autocast("cuda", torch.bfloat16)
    )
    args = SimpleNamespace(verify_every=1, eval_precision="fp32", probe_every=0)
    net = network()
    chosen = optimizers(net)
    run = record.Run(
        args=args,
        net=net,
        model=Classifier(net, label_smoothing=0.1),
        policy=policy,
        scaler=LossScaler("cuda", enabled=scales),
        optimizers=chosen,
        guard=Guard(net, num_classes=10, ignore_index=None, carries=carries),
        clip=1.0,
        schedule=Schedule(chosen, warmup_cosine(100, 10)),
        device=CUDA,
        log=SimpleNamespace(write=lambda **_: None, warn=lambda *_: None),
    )
    if ema:
        run.ema = EMA(master_params(chosen).values(), ema)
    images = torch.empty(4, 3, 8, 8, device=CUDA)
    return run, images, torch.empty(4, dtype=torch.long, device=CUDA)


def one_step(run, images, labels, inspect=None):
    run.guard.open()
    train.train_step(run, images, labels, inspect)
    run.guard.state = "sent"  # reading a verdict copies to the host, and must


def evaluate(run, images, labels):
    """A validation of two batches, in fp32 and with the averaged weights."""
    with validation.evaluated_weights(run):
        validation.evaluate(run.model, [(images, labels)] * 2)


def average(run, images, labels):
    """A step of the average, and its weights lent and taken back."""
    weights = list(master_params(run.optimizers).values())
    for _ in range(10):
        run.ema.update(weights, torch.zeros((), device=CUDA))
        with run.ema.swap(weights):
            pass


PATHS = {  # path: what is run, the lines that may ask the device (no other may), and a function
    # that the path calls from a line that may not ask
    "a step": (one_step, set(), (Guard, "close")),
    "the average": (average, set(), (torch, "_fused_sgd_")),
    "validation": (
        evaluate,
        {
            "validation.py: total += table.cpu().double().sum(1)"
            "  # (metrics + 3, B) -> (metrics + 3,)",
        },
        (validation, "in_halves"),
    ),
}


def only_these_lines_ask(gpu, run, batch, path, lines, planted=None):
    """`planted` (owner, attribute): a function that shall ask, too; this must be seen."""
    with gpu, Watch(answer=1):
        one_step(run, *batch)  # the first step makes state, and may ask
        path(run, *batch)
    with pytest.MonkeyPatch.context() as patch:
        if planted:
            owner, attribute = planted
            original = getattr(owner, attribute)

            def asking(*args, **kwargs):
                run.guard._zero.item()
                return original(*args, **kwargs)

            patch.setattr(owner, attribute, asking)
        with gpu, Watch(answer=1) as watch:
            path(run, *batch)
    assert watch.launches > 10
    if planted:
        assert len(watch.lines - lines) == 1
    else:
        assert watch.lines == lines, watch.seen


@pytest.mark.parametrize("plant", [False, True], ids=["as it is", "a question planted"])
@pytest.mark.parametrize("path, lines, planted", PATHS.values(), ids=PATHS)
def test_only_the_lines_that_may_ask_do_ask(gpu, path, lines, planted, plant):
    with gpu, Watch(answer=1):
        run, *batch = prepared(scales=not plant)
    only_these_lines_ask(gpu, run, batch, path, lines, planted if plant else None)


# --- Launches: what the guards cost where every kernel is launched by itself


def test_guard_step_launches_at_most_20_kernels_more_than_clipping(gpu):
    with gpu:
        guarded = watched(usual(fused)).launches
        stock = watched(usual(fused, guarded=False)).launches
    assert 0 < guarded - stock <= 20


def test_train_step_launches_at_most_15_kernels_more_than_the_stock_step(gpu):
    """Autocast, clipping and fused AdamW beside the same network and loss in train_step, whose
    rate of each update comes from a table on the device."""
    with gpu, Watch(answer=1):
        run, *batch = prepared(optimizers=clipped, ema=0)
        stock = fused(run.net)[0]

    def plain():
        with run.policy.autocast():
            loss, metrics = run.model(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(run.net.parameters(), 1.0, foreach=True)
        stock.step()
        stock.zero_grad()
        [value.mean() for value in metrics.values()]  # what a log would show

    with gpu:
        more = watched(lambda: one_step(run, *batch)).launches - watched(plain).launches
    assert 0 < more <= 15


def test_an_optimizer_that_does_not_skip_by_itself_asks_once_a_step(gpu):
    with gpu:
        step = usual(lambda net: [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)])
        seen = watched(step).seen
    assert len(seen) == 1 and "guards.py" in seen[0] and "asks for a number" in seen[0]


FAULTS = {
    "asks for a number": [lambda x: x.item(), lambda x: bool(x > 3), lambda x: float(x)],
    "goes from": [lambda x: x.cpu(), lambda x: torch.tensor([1.0]).to(CUDA)],
    "host and device": [lambda x: x.copy_(torch.ones(())), lambda x: x * torch.ones(())],
    "depends on numbers": [lambda x: x.reshape(1).nonzero()],
}


@pytest.mark.parametrize(
    "what, plant", [(what, plant) for what, plants in FAULTS.items() for plant in plants]
)
def test_the_watch_sees_what_is_planted_in_the_step(gpu, what, plant, monkeypatch):
    with gpu:
        step = usual(fused)
        decide = step.guard.decide

        def planted(*args):
            bad = decide(*args)
            plant(bad)
            return bad

        with Watch(answer=0):
            step()
        monkeypatch.setattr(step.guard, "decide", planted)
        with Watch() as watch:
            try:
                step()
            except fake_tensor.DynamicOutputShapeException:
                assert what == "depends on numbers"
    assert any(what in line for line in watch.seen), watch.seen
