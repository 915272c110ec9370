"""Plant a fault, and see the right operation, module and cause named."""
import math
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

import autopsy
from autopsy import Locator, StepRecord, agree, examine
from heal import load_capsule, save_capsule, unpack

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])


class Net(nn.Module):
    """Two Linears, and between them what a test wants."""

    def __init__(self, between=lambda h: h):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.head = nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)
        self.between = between

    def forward(self, x):
        return self.head(self.norm(self.between(self.first(x))))


def stepper(net, half=False, scale=1.0):
    def run_step(batch, fp32):
        with torch.autocast("cpu", torch.float16, enabled=half and not fp32):
            loss = F.cross_entropy(net(batch[0]).float(), batch[1])
        (loss * (1.0 if fp32 else scale)).backward()
        return loss
    return run_step


def autopsied(net, *batches, half=False, scale=1.0, run_step=None, **more):
    record = StepRecord(7, net)
    for batch in batches or [(X, Y)]:
        record.keep(*batch)
    return examine(run_step or stepper(net, half, scale), record, net, num_classes=3, scale=scale,
                   precision="fp16" if half else "fp32", **more)


def test_a_batch_whose_labels_are_all_ignored_is_data_and_a_batch_with_one_label_is_not():
    net, ignored = Net(), torch.full_like(Y, -100)
    report = autopsied(net, (X, Y), (X, ignored))
    assert (report.verdict, report.op, report.micro_batch) == ("data", "aten.nll_loss_forward.default", 1)
    assert "every label is ignored" in str(report)
    ignored[0] = Y[0]
    assert autopsied(net, (X, ignored)).verdict == "not reproducible"


def test_labels_for_every_position_that_are_all_ignored_are_data_too():
    net, labels = Net(), torch.full((2, 4), -100)  # nll_loss2d: 2 rows of 4 positions

    def run_step(batch, fp32):
        loss = F.cross_entropy(net(batch[0]).view(2, 4, 3).transpose(1, 2), batch[1])
        loss.backward()
        return loss

    report = autopsied(net, (X, labels), run_step=run_step)
    assert (report.verdict, report.op) == ("data", "aten.nll_loss2d_forward.default")
    assert "max(1, number of labels)" in report.suggestion


def test_a_constant_that_is_bad_from_the_start_is_told_among_the_inputs():
    constant = torch.tensor([1.0, math.inf, 1.0, 1.0, 1.0])  # no buffer: nobody looked at it before the step
    report = autopsied(Net(lambda h: h * constant))
    assert (report.verdict, report.op, report.module) == ("divergence", "aten.mul.Tensor", "")
    assert "1 .. inf" in str(report)


def test_an_fp16_overflow_in_a_linear_is_precision_and_names_the_samples():
    net, x = Net(), X.clone()
    x[[2, 5]] *= 3e5
    report = autopsied(net, (x, Y), half=True)
    assert (report.verdict, report.module, report.phase) == ("precision", "first", "forward")
    assert report.op in ("aten.addmm.default", "aten._to_copy.default")  # 3e5 itself does not fit into fp16
    x = X.clone()
    x[[2, 5]] = 1e4
    with torch.no_grad():
        net.first.weight.fill_(3.0)
    report = autopsied(net, (x, Y), half=True)
    assert (report.verdict, report.module, report.phase) == ("precision", "first", "forward")
    assert report.op == "aten.addmm.default"
    assert report.samples == (2, 5)
    assert report.made == "inf" or float(report.made) == -math.inf
    assert "first in fp32" in report.suggestion
    text = str(report)
    assert text.splitlines()[0] == "loss is nan at step 7 (fp16, scale 1, rank 0) -> precision"
    assert "the same batch in fp32: finite" in text
    assert "[x] dtype" in text


def test_a_log_between_modules_is_named_and_not_the_linear_after_it():
    report = autopsied(Net(lambda h: torch.log(h * 0 - 1)))
    assert (report.verdict, report.op, report.module, report.phase) == ("divergence", "aten.log.default", "", "forward")
    assert "test_autopsy.py" in report.line
    assert "clamp" in report.suggestion
    assert "[x] division by zero, log, sqrt (log)" in str(report)


def test_a_function_inside_a_nested_module_is_named_with_its_full_name():
    outer = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), Net(lambda h: h / (h - h))))
    report = autopsied(outer)
    assert (report.op, report.module) == ("aten.div.Tensor", "1.1")


def test_sqrt_at_zero_is_found_in_the_backward():
    net = Net(lambda h: h + torch.sqrt((h - h.detach()) ** 2))
    loss = stepper(net)((X, Y), False)
    assert loss.isfinite()
    report = autopsied(net)
    assert (report.verdict, report.phase, report.module) == ("divergence", "backward", "")
    assert (report.op, report.node) == ("aten.div.Tensor", "SqrtBackward0")
    assert "test_autopsy.py" in report.line
    assert "sqrt(x + eps)" in report.suggestion
    assert "gradient of first." in report.symptom


def test_a_backward_inside_a_module_is_named_with_that_module():
    class Distance(nn.Module):
        def forward(self, h):
            return h + (h - h.detach()).pow(2).sum(1, keepdim=True).pow(0.5)

    net = Net(Distance())
    report = autopsied(nn.Sequential(nn.Identity(), net))
    assert (report.phase, report.module, report.node) == ("backward", "1.between", "PowBackward0")


def test_an_overflow_of_the_scaled_gradient_is_precision_in_the_backward():
    report = autopsied(Net(), half=True, scale=2.0**24)
    assert (report.verdict, report.phase) == ("precision", "backward")
    assert report.module == "head" or report.op == "aten._to_copy.default"


class Lawful(nn.Module):
    """Infinities of every legal kind, and nothing wrong."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("mask", torch.full((6, 6), -math.inf).triu(1))
        self.inner = Net()

    def forward(self, x):
        scores = x[:, :, None] * x[:, None, :] + self.mask
        scores = scores.masked_fill(torch.eye(6).bool().roll(1, 0).logical_not().tril().logical_not(), -math.inf)
        scores = torch.where(torch.ones(6, 6).tril().bool(), scores, torch.tensor(-math.inf))
        scores = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), torch.finfo(torch.float32).min)
        x = (scores.softmax(-1) @ x[:, :, None]).squeeze(-1)
        x = F.max_pool1d(F.pad(x[:, None], (1, 1), value=-math.inf), 3, stride=1)[:, 0]
        x = F.scaled_dot_product_attention(x[:, None, None], x[:, None, None], x[:, None, None])[:, 0, 0]
        with torch.no_grad():
            floor = torch.where(x > 0, torch.log(x.clamp(min=0)), 0.0)
        return self.inner(x + 0 * floor)


def test_legal_infinities_are_not_blamed():
    net = Lawful()
    with Locator(net, 8) as locator:
        loss = stepper(net)((X, Y), False)
    assert locator.births  # log(0) behind the `where` is a suspect
    assert locator.blame([loss.detach(), *(p.grad for p in net.parameters())]) is None
    net.inner.between = lambda h: h / (h - h)
    report = autopsied(net)
    assert (report.op, report.module) == ("aten.div.Tensor", "inner")


def test_a_row_that_is_masked_everywhere_is_blamed_on_the_softmax():
    net = Net(lambda h: h.masked_fill(torch.ones(5).bool(), -math.inf).softmax(-1))
    report = autopsied(net)
    assert report.op == "aten._softmax.default"
    assert "masked" in report.suggestion


def test_an_in_place_operation_does_not_hide_its_own_fault():
    report = autopsied(Net(lambda h: h.clone().sub_(h).log_()))
    assert (report.op, report.module) == ("aten.log_.default", "")


def test_bad_input_is_data_and_names_the_sample_and_its_index():
    net, x = Net(), X.clone()
    x[3, 2] = math.nan
    record = StepRecord(0, net, rank=1)
    record.keep(X, Y, indices=range(8))
    record.keep(x, Y, indices=range(100, 108))
    report = examine(stepper(net), record, net, num_classes=3)
    assert (report.verdict, report.micro_batch, report.samples, report.indices) == ("data", 1, (3,), (103,))
    assert "samples 3 of micro-batch 1, rank 1 (in the data set: 103)" in str(report)


def test_a_label_out_of_range_is_data():
    y = Y.clone()
    y[5], y[6] = 3, -100
    report = autopsied(Net(), (X, y), run_step=lambda *a: pytest.fail("it was run"))
    assert (report.verdict, report.samples) == ("data", (5,))
    assert "label 3 is not in 0..2" in str(report)


def test_bad_weights_buffers_and_moments_are_weights():
    net = Net()
    with torch.no_grad():
        net.head.weight[1, 1] = math.nan
    report = autopsied(net)
    assert (report.verdict, report.names) == ("weights", ("parameter head.weight",))
    assert "last_good" in report.suggestion
    net = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    net[1].running_var[0] = -math.inf
    assert autopsied(net).names == ("buffer 1.running_var",)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    stepper(net)((X, Y), True)
    optimizer.step()
    optimizer.state[net.head.bias]["exp_avg_sq"][0] = math.inf
    assert autopsied(net, state=optimizer.state_dict()).names == ("optimizer state state.5.exp_avg_sq",)


def test_what_does_not_come_back_is_not_reproducible():
    class Flaky(nn.Module):
        calls = 0

        def forward(self, h):
            Flaky.calls += 1
            return h / 0 if Flaky.calls == 1 else h

    net = Net(Flaky())
    assert not stepper(net)((X, Y), False).isfinite()
    report = autopsied(net)
    assert (report.verdict, report.op) == ("not reproducible", "")
    assert "hardware" in report.suggestion
    Flaky.calls = 0  # bad in the first re-run, finite in the second, and both in fp32: not the precision's fault
    assert autopsied(net).verdict == "not reproducible"


def test_only_the_bad_micro_batch_is_named():
    x = X.clone()
    x[0] = 0
    net = Net(lambda h: h / h.detach().sum(1, keepdim=True).abs().gt(0))
    with torch.no_grad():
        net.first.bias.zero_()
    report = autopsied(net, (X, Y), (x, Y), (X, Y))
    assert (report.micro_batch, report.samples, report.op) == (1, (0,), "aten.div.Tensor")


def test_the_re_run_is_the_same_step_and_leaves_no_trace():
    net = nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.Dropout(0.5), nn.Linear(20, 3))
    seen = []

    def run_step(batch, fp32):
        loss = F.cross_entropy(net(batch[0]) + random.random(), batch[1])
        loss.backward()
        seen.append(loss.item())
        return loss * math.nan

    record = StepRecord(0, net)
    before = {n: b.clone() for n, b in net.named_buffers()}
    for _ in range(2):
        record.keep(X, Y)
        run_step((X, Y), False)
    first, state = list(seen), (torch.get_rng_state(), random.getstate())
    report = examine(run_step, record, net)
    assert report.verdict == "divergence"
    assert seen[2:] == [first[0], first[0]]
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
    assert all(torch.equal(b, before[n]) for n, b in net.named_buffers())
    assert all(p.grad is None for p in net.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_unused_parameters_and_the_largest_gradients_are_listed():
    net = Net(lambda h: h / (h - h))
    net.register_parameter("spare", nn.Parameter(torch.ones(2)))
    text = str(autopsied(net))
    assert "unused: spare" in text
    assert "largest gradients: " in text


def test_a_capsule_replays_the_verdict_on_another_network_object(tmp_path):
    net, x = Net(), X.clone()
    x[2] *= 1e4
    with torch.no_grad():
        net.first.weight.fill_(3.0)
    record = StepRecord(9, net, rank=1)
    record.keep(x, Y, indices=range(8))
    report = examine(stepper(net, half=True), record, net, precision="fp16")
    path = tmp_path / "capsule.pt"
    save_capsule(path, record, report, args={"model": "net", "lr": 1e-3})
    assert [p.name for p in tmp_path.iterdir()] == ["capsule.pt"]
    capsule = load_capsule(path)
    assert capsule["args"] == {"model": "net", "lr": 1e-3}
    assert capsule["report"]["verdict"] == "precision"
    other = Net()
    again = examine(stepper(other, half=True), unpack(capsule, other), other, precision="fp16")
    assert again == report
    torch.save({"model": 1}, path)
    with pytest.raises(ValueError, match="no capsule"):
        load_capsule(path)


def two_ranks(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    net = Net()
    model = nn.parallel.DistributedDataParallel(net)
    x = X.clone()
    x[4, 0] = math.inf if rank else 1.0
    record = StepRecord(3, net, rank=rank)
    record.keep(x, Y)
    F.cross_entropy(model(x), Y).backward()
    mine = examine(stepper(net), record, net, precision="fp32")  # the bare net: no collective in the re-run
    torch.save((mine.verdict, str(agree(mine))), f"{folder}/rank{rank}.pt")
    F.cross_entropy(model(X), Y).backward()  # DDP still works, and nothing of the autopsy hangs on its graph
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)  # now and then one of gloo's threads aborts the interpreter at its exit; the results are on disk


def test_the_ranks_agree_on_the_report_of_the_guilty_one(tmp_path):
    mp.spawn(two_ranks, (str(tmp_path),), nprocs=2)
    (mine0, told0), (mine1, told1) = (torch.load(tmp_path / f"rank{r}.pt") for r in range(2))
    assert (mine0, mine1) == ("not reproducible", "data")
    assert told0 == told1
    assert "rank 1) -> data" in told0


def test_copied_alone_it_demonstrates_itself(tmp_path):
    shutil.copy(Path(autopsy.__file__), tmp_path / "autopsy.py")
    out = subprocess.run([sys.executable, "autopsy.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert out.returncode == 0, out.stderr
    assert "first bad op: aten.addmm.default in wide" in out.stdout
    assert "healed: wide is an fp32 island\nstep 4: loss" in out.stdout


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: its backward runs in another thread")
def test_forward_and_backward_faults_are_named_on_cuda():
    for between, phase in ((lambda h: torch.log(h * 0 - 1), "forward"),
                           (lambda h: h + torch.sqrt((h - h.detach()) ** 2), "backward")):
        net = Net(between).cuda()
        report = autopsied(net, (X.cuda(), Y.cuda()))
        assert (report.verdict, report.module, report.phase) == ("divergence", "", phase)
