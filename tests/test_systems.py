"""Windows and MPS, imitated: names are hidden; kernels ignore what they are told."""

import contextlib
import json
import math
import pickle
import sys

import pytest
import torch
from helpers import HIDDEN, ROOT, is_ours, needs_unix, run_script, same, snapshot
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from amp_policy import LossScaler
from data import batches, decode
from extras.ema import EMA
from extras.muon import Muon
from guards import Guard
from models.cifarnet import CifarNet
from optim import ClippedAdamW, Schedule, warmup_cosine

RATES = warmup_cosine(9, 2)


@pytest.mark.slow
def test_train_and_predict_run_without_what_windows_lacks(tmp_path, image_folder):
    flags = {
        "--dataset": "imagefolder",
        "--data-dir": image_folder,
        "--image-size": 32,
        "--model": "cifarnet-tiny",
        "--batch-size": 40,
        "--max-steps": 3,
        "--device": "cpu",
        "--precision": "fp32",
        "--out-dir": "run",
    }
    words = [word for pair in flags.items() for word in pair]
    code, out, err = run_script([*HIDDEN, ROOT / "train.py", *words], tmp_path)
    assert code == 0, err
    summary = json.loads(out.splitlines()[-1])
    assert summary["status"] == "done"
    assert summary["peak_memory_mb"] is None  # only `resource` knows it
    image = next(image_folder.glob("test/class7/*"))
    code, out, err = run_script([*HIDDEN, ROOT / "predict.py", "run", image], tmp_path)
    assert code == 0 and f"{image}: class" in out, err


def test_images_that_are_decoded_at_each_access_can_be_sent_to_a_new_process():
    files = decode.Files(["a.png"], decode.Crop(8, 8))
    assert pickle.loads(pickle.dumps(files)).shape == files.shape


@needs_unix
@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        "import resource",
        "os.register_at_fork()",
        "signal.SIGHUP",
        "open('here', 'w')",
        "file = open('new', 'wb'); os.replace(sys.argv[0], 'new')",
        "file = open('new', 'wb'); os.replace('new', 'other')",
        "os.fsync(os.open(sys.argv[0], os.O_RDONLY))",
    ],
)
def test_what_windows_lacks_fails_in_the_imitation(tmp_path, fault):
    lines = "import os, signal, sys\nprint('ran')\n"
    (tmp_path / "fault.py").write_text(lines + fault, encoding="utf-8")
    code, out, _ = run_script([*HIDDEN, "fault.py"], tmp_path)
    assert (code, out) == (1, "ran\n")


class NoFloat64(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, out)):
            if isinstance(x, torch.Tensor) and x.dtype is torch.float64:
                raise TypeError(f"{func}: the device has no float64")
        return out


@contextlib.contextmanager
def like_mps():
    """The CPU with the habits of MPS: no float64; fused kernels know neither found_inf nor
    grad_scale; a copy that does not wait would read or leave anything."""

    def obstinate(kernel):
        return lambda *args, found_inf=None, grad_scale=None, **kwargs: kernel(*args, **kwargs)

    def patient(copies):
        def call(*args, non_blocking=False, **kwargs):
            ours = is_ours(sys._getframe(1).f_code.co_filename)
            assert not (ours and non_blocking), "it does not wait"
            return copies(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch, NoFloat64():
        for name, value in (("is_cpu", False), ("is_mps", True)):
            patch.setattr(torch.Tensor, name, value)
        patch.setattr(torch.Tensor, "double", torch.Tensor.float)  # GradScaler asks for mps:0
        for name in ("_fused_adamw_", "_fused_sgd_"):
            patch.setattr(torch, name, obstinate(getattr(torch, name)))
        for name in ("to", "copy_"):
            patch.setattr(torch.Tensor, name, patient(getattr(torch.Tensor, name)))
        yield


OPTIMIZERS = {
    "ours": lambda net: [ClippedAdamW(net.parameters(), 1e-2, clip=None)],
    "torch's": lambda net: [torch.optim.AdamW(net.parameters(), 1e-2, fused=True)],
    "with muon": lambda net: [Muon([net[0].weight]), ClippedAdamW(net[1:].parameters(), 1e-2)],
}


def trained(make):
    """Five steps of the whole step, the third one with a NaN; weights, moments, average."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizers = make(net)
    schedule = Schedule(optimizers, RATES)
    guard = Guard(net, num_classes=3)
    scaler = LossScaler("cpu", init_scale=64.0)
    ema = EMA(net.parameters(), 0.9)
    for step in range(5):
        x, y = torch.randn(9, 6), torch.arange(9) % 3
        x[0, 0] = math.nan if step == 2 else 1.0
        before = snapshot(net, ema, *optimizers)
        guard.open()
        y = batches.send(guard.see_batch(x, y), x.device)
        loss = nn.functional.cross_entropy(net(x), y)
        guard.see_loss(loss)
        scaler.scale(loss).backward()
        bad = guard.step(optimizers, scaler, clip=0.1)
        ema.update(net.parameters(), bad)
        assert bad == (step == 2)
        if bad:
            assert same(before, snapshot(net, ema, *optimizers))
        schedule.update(bad)
        scaler.update(found_inf=bad)
        net.zero_grad()
        guard.verdict()
    assert guard.flush().accepted
    return snapshot(net, ema, *optimizers, schedule, scaler)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_device_that_is_like_mps_trains_as_the_cpu_and_skips_as_the_cpu(kind):
    wanted = trained(OPTIMIZERS[kind])
    with like_mps():
        got = trained(OPTIMIZERS[kind])
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_without_a_guard_the_optimizer_divides_and_skips_where_the_kernel_does_neither():
    runs = []
    for imitated in (False, True):
        p = torch.linspace(-1, 1, 8).requires_grad_()
        with like_mps() if imitated else contextlib.nullcontext():
            optimizer = ClippedAdamW([p], 1e-2, clip=0.5)
            for size in (8.0, math.inf, 0.1, 3.0):
                p.grad = torch.full((8,), size)
                optimizer.step(grad_scale=torch.tensor(4.0))
        runs.append(snapshot(p, optimizer))
    torch.testing.assert_close(*runs, rtol=1e-6, atol=1e-7)


class OnMPS(torch.Tensor):
    """What is made of it is there too; cpu() takes it away."""

    is_mps = True

    def double(self):
        raise TypeError("MPS has no float64")

    def cpu(self):
        return self.as_subclass(torch.Tensor)


def test_whitening_is_computed_where_float64_is():
    images = torch.randn(20, 3, 8, 8)
    nets = CifarNet(), CifarNet()
    for net, given in zip(nets, (images, images.as_subclass(OnMPS)), strict=True):
        net.init_from_data(given)
    assert torch.equal(nets[0].whiten.weight, nets[1].whiten.weight)
