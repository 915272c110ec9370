"""Plant a fault, and see the right operation, module and cause named."""

import copy
import math
import os
import random
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import autopsy
from autopsy import Locator, StepRecord, agree, examine

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
    return examine(
        run_step or stepper(net, half, scale),
        record,
        net,
        num_classes=3,
        scale=scale,
        precision="fp16" if half else "fp32",
        **more,
    )


def test_a_batch_whose_labels_are_all_ignored_is_data_and_a_batch_with_one_label_is_not():
    net, ignored = Net(), torch.full_like(Y, -100)
    report = autopsied(net, (X, Y), (X, ignored))
    assert (report.verdict, report.op, report.micro_batch) == (
        "data",
        "aten.nll_loss_forward.default",
        1,
    )
    assert "every label is ignored" in str(report)
    ignored[0] = Y[0]
    assert autopsied(net, (X, ignored)).verdict == "not reproducible"


@pytest.mark.parametrize(
    "write",
    [
        lambda h: h.clone()[2, 1].fill_(math.nan),
        lambda h: h.masked_fill(torch.eye(8, 5).bool(), math.inf),
        lambda h: h.index_fill(0, torch.tensor([2]), math.nan),
        lambda h: torch.full((8, 5), math.inf),
        lambda h: torch.full_like(h, math.nan),
        lambda h: h.new_full((5,), math.nan),
    ],
    ids=["fill_", "masked_fill", "index_fill", "full", "full_like", "new_full"],
)
def test_a_number_that_the_script_writes_is_data_and_a_mask_of_minus_infinity_is_nobodys_fault(
    write,
):
    report = autopsied(Net(lambda h: h + write(h)))
    assert (report.verdict, report.again, report.names) == ("data", "", ())
    assert "writes" in str(report) and "test_autopsy.py" in report.suggestion
    masked = autopsied(Net(lambda h: torch.full((8, 5), -math.inf).triu(1).add(h).softmax(-1)))
    assert masked.verdict == "not reproducible"


def per_sample(out, y):
    weight = torch.rand(len(y))
    return {
        "transposed": (out.t() * weight).mean(),
        "cdist": (torch.cdist(out, out[:5]).t() * weight).mean(),
        "stacked": torch.stack([out.mean(1), weight]).mean(),
        "squeezed": (out.sum(1) * out.t()).mean(),
    }


@pytest.mark.parametrize("kind", ["transposed", "cdist", "stacked", "squeezed"])
def test_following_samples_never_raises_into_the_step(kind):
    def run_step(batch, fp32):
        loss = per_sample(net(batch[0]), batch[1])[kind] / 0
        loss.backward()
        return loss

    net = Net()
    report = autopsied(net, run_step=run_step)
    assert (report.verdict, report.op) == ("divergence", "aten.div.Tensor")


def test_an_fp16_overflow_in_a_linear_is_precision_and_names_the_samples():
    net, x = Net(), X.clone()
    x[[2, 5]] *= 3e5
    report = autopsied(net, (x, Y), half=True)
    assert (report.verdict, report.module, report.phase) == ("precision", "first", "forward")
    assert report.op in (
        "aten.addmm.default",
        "aten._to_copy.default",
    )  # 3e5 itself does not fit into fp16
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


def test_a_log_between_modules_is_named_and_not_the_linear_after_it():
    report = autopsied(Net(lambda h: torch.log(h * 0 - 1)))
    assert (report.verdict, report.op, report.module, report.phase) == (
        "divergence",
        "aten.log.default",
        "",
        "forward",
    )
    assert "test_autopsy.py" in report.line
    assert "clamp" in report.suggestion


def test_sqrt_at_zero_is_found_in_the_backward():
    net = Net(lambda h: h + torch.sqrt((h - h.detach()) ** 2))
    loss = stepper(net)((X, Y), False)
    assert loss.isfinite()
    report = autopsied(net)
    assert (report.verdict, report.phase, report.module) == ("divergence", "backward", "")
    assert (report.op, report.node) == ("aten.div.Tensor", "SqrtBackward0")
    assert "test_autopsy.py" in report.line
    assert "sqrt(x.clamp(min=1e-6))" in report.suggestion and report.tried[-1].endswith(": finite")
    assert "gradient of first." in report.symptom


def test_an_overflow_that_only_the_loss_scale_causes_is_calibration_whoever_scales():
    report = autopsied(Net(), half=True, scale=2.0**24)  # run_step scales by itself
    assert (report.verdict, report.phase, report.tried) == (
        "calibration",
        "backward",
        ("loss scale 1: finite",),
    )
    net = Net()
    record = StepRecord(7, net)
    record.keep(X, Y)
    report = examine(
        stepper(net, half=True), record, net, precision="fp16", scale=65536.0
    )  # run_step does not scale
    assert (report.verdict, report.op) == ("calibration", "")
    report = autopsied(
        Net(lambda h: h * 1e6 * 1e-6), half=True, scale=1024.0
    )  # bad at any loss scale
    assert (report.verdict, report.op) == ("precision", "aten.mul.Tensor")


class Lawful(nn.Module):
    """Infinities of every legal kind, and nothing wrong."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("mask", torch.full((6, 6), -math.inf).triu(1))
        self.inner = Net()

    def forward(self, x):
        scores = x[:, :, None] * x[:, None, :] + self.mask
        scores = scores.masked_fill(
            torch.eye(6).bool().roll(1, 0).logical_not().tril().logical_not(), -math.inf
        )
        scores = torch.where(torch.ones(6, 6).tril().bool(), scores, torch.tensor(-math.inf))
        scores = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), torch.finfo(torch.float32).min)
        x = (scores.softmax(-1) @ x[:, :, None]).squeeze(-1)
        x = F.max_pool1d(F.pad(x[:, None], (1, 1), value=-math.inf), 3, stride=1)[:, 0]
        x = F.scaled_dot_product_attention(x[:, None, None], x[:, None, None], x[:, None, None])[
            :, 0, 0
        ]
        with torch.no_grad():
            floor = torch.where(x > 0, torch.log(x.clamp(min=0)), 0.0)
        return self.inner(x + 0 * floor)


def test_legal_infinities_are_not_blamed():
    net = Lawful()
    with Locator(net, (X, Y)) as locator:
        loss = stepper(net)((X, Y), False)
    assert next(locator._clock) > 0  # log(0) behind the `where` is a suspect
    assert locator.blame([loss.detach(), *(p.grad for p in net.parameters())]) is None
    net.inner.between = lambda h: h / (h - h)
    report = autopsied(net)
    assert (report.op, report.module) == ("aten.div.Tensor", "inner")


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
    assert (report.verdict, report.micro_batch, report.samples, report.indices) == (
        "data",
        1,
        (3,),
        (103,),
    )
    assert "samples 3 of micro-batch 1, rank 1 (in the data set: 103)" in str(report)


def test_a_label_out_of_range_is_data():
    y = Y.clone()
    y[5], y[6] = 3, -100
    report = autopsied(Net(), (X, y))
    assert (report.verdict, report.samples, report.op) == (
        "data",
        (5,),
        "aten.nll_loss_forward.default",
    )
    assert "label 3 is not in 0..2" in str(report) and "leave them out" in report.suggestion


def test_bad_weights_buffers_and_moments_are_weights():
    net = Net()
    with torch.no_grad():
        net.head.weight[1, 1] = math.nan
    report = autopsied(net, advice="flags")
    assert (report.verdict, report.names) == ("weights", ("parameter head.weight",))
    assert (
        "last_good" in report.suggestion
        and "first to use parameter head.weight: aten.addmm" in str(report)
    )
    net = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    net[1].running_var[0] = -math.inf
    assert autopsied(net).names == ("buffer 1.running_var",)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    stepper(net)((X, Y), True)
    optimizer.step()
    optimizer.state[net.head.bias]["exp_avg_sq"][0] = math.inf
    assert autopsied(net, state=optimizer.state_dict()).names == (
        "optimizer state state.5.exp_avg_sq",
    )


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
    Flaky.calls = 0  # bad in the first re-run, finite in the second and in fp32
    assert autopsied(net).verdict == "not reproducible"


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


def two_ranks(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2
    )
    net = Net()
    model = nn.parallel.DistributedDataParallel(net)
    x = X.clone()
    x[4, 0] = math.inf if rank else 1.0
    record = StepRecord(3, net, rank=rank)
    record.keep(x, Y)
    F.cross_entropy(model(x), Y).backward()
    mine = examine(
        stepper(net), record, net, precision="fp32"
    )  # the bare net: no collective in the re-run
    torch.save((mine.verdict, str(agree(mine))), f"{folder}/rank{rank}.pt")
    F.cross_entropy(
        model(X), Y
    ).backward()  # DDP still works, and nothing of the autopsy hangs on its graph
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(
        0
    )  # one of gloo's threads may abort the interpreter at its exit


def test_the_ranks_agree_on_the_report_of_the_guilty_one(tmp_path):
    mp.spawn(two_ranks, (str(tmp_path),), nprocs=2)
    (mine0, told0), (mine1, told1) = (torch.load(tmp_path / f"rank{r}.pt") for r in range(2))
    assert (mine0, mine1) == ("not reproducible", "data")
    assert told0 == told1
    assert "rank 1) -> data" in told0


def test_copied_alone_it_demonstrates_itself(tmp_path):
    shutil.copy(Path(autopsy.__file__), tmp_path / "autopsy.py")
    out = subprocess.run(
        [sys.executable, "autopsy.py"], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert out.returncode == 0, out.stderr
    assert "first bad op: aten.log.default outside of any module" in out.stdout
    assert "in demo) made nan" in out.stdout and "try: log of 0 or less: log(x.clamp" in out.stdout


# --- What the guilty result descends from


def test_batch_norm_that_the_bad_step_soiled_is_put_back_before_it_is_judged():
    net, x = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), X.clone()
    x[3, 1] = math.nan
    record = StepRecord(1, net)
    record.keep(x, Y, indices=range(100, 108))
    stepper(net)((x, Y), False)
    assert net[1].running_var.isnan().any()
    report = examine(stepper(net), record, net)
    assert (report.verdict, report.names, report.indices) == ("data", ("input holds nan",), (103,))


def test_an_embedding_index_out_of_range_is_data_and_a_bug_in_the_code_is_an_error():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 3)

        def forward(self, ids):
            return self.head(self.table(ids).mean(1))

    net, ids = Words(), torch.randint(0, 10, (8, 4))
    ids[6, 1] = 10
    report = autopsied(net, (ids, Y))
    assert (report.verdict, report.module, report.samples) == ("data", "table", (6,))
    for between, op in (
        (lambda h: h.view(3, 7), "aten.view.default"),
        (lambda h: [1][5], "IndexError"),
    ):
        report = autopsied(Net(between))
        assert (report.verdict, report.op) == ("error", op)
        assert "test_autopsy.py" in report.line and "raised" in str(report)


def test_a_hidden_state_that_was_bad_before_is_named_and_one_that_this_step_soils_is_not():
    class Carrying(nn.Module):
        def __init__(self):
            super().__init__()
            self.h, self.cell, self.head = torch.ones(8, 5), nn.RNNCell(6, 5), nn.Linear(5, 3)

        def forward(self, x):
            self.h = self.cell(x, self.h.detach()) * 1e15
            return self.head(self.h) ** 3

    net = Carrying()
    record = StepRecord(1, net)
    record.keep(X, Y)
    stepper(net)((X, Y), False)
    report = examine(stepper(net), record, net)
    assert (report.verdict, report.op) == ("divergence", "aten.pow.Tensor_Scalar")
    assert "learning rate" in report.suggestion  # the numbers have grown
    net.h = torch.full((8, 5), math.inf)
    assert autopsied(net).names == ("attribute h",)


def test_memory_that_nobody_wrote_is_named_and_memory_that_was_written_is_not():
    def garbage(h):
        e = torch.empty_like(h)
        e.untyped_storage().copy_(
            torch.full_like(h, math.nan).untyped_storage()
        )  # what empty may find
        return e

    class Buffer(TorchDispatchMode):  # torch.empty finds NaN
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **kwargs or {})
            return garbage(out) if func is torch.ops.aten.empty_like.default else out

    def between(written):
        def run(h):
            room = torch.empty_like(h)
            if written:
                room.copy_(h)
            return h + room

        return run

    for written, op in ((False, "aten.empty_like.default"), (True, "")):
        with Buffer():
            report = autopsied(Net(between(written)))
        assert report.op == op
    assert report.verdict == "not reproducible"


# --- Where it is said to be


def test_a_gradient_that_only_the_accumulation_makes_bad_is_found():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(6, 3, dtype=torch.float16))

        def forward(self, x):
            return (x.to(self.w.dtype) @ self.w).float()

    net = Half()

    def run_step(batch, fp32):
        loss = (batch[0] @ net.w.float() if fp32 else net(batch[0])).sum() * 1000
        if fp32:
            return loss, {"w": torch.autograd.grad(loss, net.w)[0].float()}
        loss.backward()
        return loss

    x = X.abs() * 5
    report = autopsied(net, (x, Y), (x, Y), half=True, run_step=run_step)
    assert (report.node, report.op, report.micro_batch) == ("AccumulateGrad", "aten.add_.Tensor", 1)
    assert report.symptom == "gradient of w is inf"


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block_is_named_by_its_own_line_and_the_eps_is_tried_in_its_repeated_forward(
    reentrant,
):
    def block(h):
        return h + torch.sqrt((h - h.detach()) ** 2)

    report = autopsied(Net(lambda h: checkpoint(block, h, use_reentrant=reentrant)))
    assert (report.phase, report.node) == ("backward", "SqrtBackward0")
    assert "in block" in report.line and report.cure == ("eps", "sqrt")


def test_a_custom_function_is_named_by_the_line_of_its_backward():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad / (x - x)

    report = autopsied(Net(Twice.apply))
    assert (report.node, report.op, report.phase) == (
        "TwiceBackward",
        "aten.div.Tensor",
        "backward",
    )
    assert "in backward" in report.line and report.cure == ("eps", "div")


def test_a_module_used_twice_is_told_by_the_line_and_the_number_of_its_call():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x):
            h = self.body(x)
            h = self.body(h.float() * 1e5)
            return self.head(h * 1e-3)

    report = autopsied(Shared(), half=True)
    assert (report.module, report.call) == ("body", 2)
    here = Path(__file__).read_text().splitlines()
    line = next(
        k
        for k, text in enumerate(here, 1)
        if "self.body(h.float() * 1e5)" in text and "next" not in text
    )
    assert "in body, call 2 of this step (forward" in str(report)
    assert report.line == f"test_autopsy.py:{line} in forward"
    assert report.cure == ("module, result in fp32", "body")


class Wrapped(
    torch.Tensor
):  # as sharded and quantised tensors do: operations see the tensor inside
    @staticmethod
    def __new__(cls, inside):
        return torch.Tensor._make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype)

    def __init__(self, inside):
        self.inside = inside

    def __tensor_flatten__(self):
        return ["inside"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def bare(v):
            return v.inside if isinstance(v, Wrapped) else v

        return torch.utils._pytree.tree_map(
            lambda v: Wrapped(v) if isinstance(v, torch.Tensor) else v,
            func(*map(bare, args), **kwargs or {}),
        )


def test_a_tensor_that_wraps_another_is_looked_into():
    with Locator() as locator:
        out = Wrapped(X) / 0
    assert locator.blame([out.inside]).op == "aten.div.Tensor"


@pytest.mark.parametrize(
    "between",
    [
        lambda h: torch.vmap(lambda row: torch.log(row * 0 - 1))(h),
        lambda h: torch.log(
            torch.nested.nested_tensor([h[:3], h[3:]], layout=torch.jagged).values() * 0 - 1
        ),
        lambda h: torch.log(torch.sparse.mm(torch.eye(8).to_sparse_csr(), h) * 0 - 1),
        lambda h: torch.log(h.to(torch.float8_e4m3fn).float() * 0 - 1),
    ],
    ids=["vmap", "nested", "csr", "float8"],
)
def test_tensors_of_every_layout_are_looked_at(between):
    report = autopsied(Net(between))
    assert (report.verdict, report.op) == ("divergence", "aten.log.default")


# --- Samples


def test_time_first_batches_name_the_second_dimension():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.LSTM(4, 5), nn.Linear(5, 3)

        def forward(self, x):
            return self.head(self.rnn(x)[0][-1] / x.detach().abs().sum((0, 2)).gt(0)[:, None])

    x = torch.randn(9, 8, 4)
    x[:, 5] = 0
    report = autopsied(Recurrent(), (x, Y))
    assert (report.op, report.samples) == ("aten.div.Tensor", (5,))
    x[3, 2] = math.nan
    report = autopsied(Recurrent(), (x, Y))
    assert (report.verdict, report.samples, report.module) == ("data", (2,), "rnn")


def test_the_row_of_a_weight_is_no_sample():
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.head = nn.Parameter(torch.randn(8, 6)), nn.Linear(8, 3)

        def forward(self, x):
            norm = torch.ones(8, 1)
            norm[2] = 0
            return self.head(x @ (self.w / norm).T)  # 8 rows, and 8 samples

    report = autopsied(Rows())
    assert (report.op, report.samples) == ("aten.div.Tensor", ())


def test_samples_survive_reshapes_and_a_change_of_the_dimensions_order():
    def between(h):
        n = (h.detach().sum(1, keepdim=True) != 0).float()
        tokens = h[:, None].expand(8, 4, 5).transpose(0, 1).contiguous()  # 4, 8, 5
        flat = (tokens * 2).reshape(32, 5) / n.repeat(4, 1)
        return flat.reshape(4, 8, 5).permute(1, 0, 2).mean(1)

    x, net = X.clone(), Net(between)
    with torch.no_grad():
        net.first.bias.zero_()
    x[6] = 0
    assert autopsied(net, (x, Y)).samples == (6,)


# --- Cures


class Wide(nn.Module):
    """Passes 65504 on the way; its result is harmless (gain 1e-6) or is not (gain 1)."""

    def __init__(self, gain):
        super().__init__()
        self.inner, self.gain = nn.Linear(5, 5), gain

    def forward(self, h):
        return self.inner(h * 1e6) * self.gain


def test_the_printed_island_was_tried_and_one_that_overflows_again_is_not_printed():
    assert (
        autopsied(Net(Wide(1e-6)), half=True, advice="flags").suggestion == "--keep-fp32 'between'"
    )
    report = autopsied(
        Net(Wide(1.0)), half=True, advice="flags"
    )  # cast back to half it is inf again
    assert report.tried[0].startswith("between in fp32: still bad")
    assert (report.tried[1], report.cure) == (
        "between in fp32, result in fp32: finite",
        ("module, result in fp32", "between"),
    )

    class Outer(
        nn.Module
    ):  # fp16 weights: an fp32 result does not fit the next Linear, but the parent's does
        def __init__(self):
            super().__init__()
            self.wide = Wide(1.0)

        def forward(self, h):
            return self.wide(h).float().mul(1e-6).to(h.dtype)

    net = Net(Outer()).half()

    def run_step(batch, fp32):
        if fp32:
            full = copy.deepcopy(net).float()
            loss = F.cross_entropy(full(batch[0]), batch[1])
            loss.backward()
            return loss, {n: p.grad for n, p in full.named_parameters()}
        loss = F.cross_entropy(net(batch[0].half()).float(), batch[1])
        loss.backward()
        return loss

    report = autopsied(net, run_step=run_step, half=True, advice="flags")
    assert report.cure[1] in ("between.wide", "between") and report.tried[-1].endswith("finite")
    assert not any(vars(m).get("forward") for m in net.modules())  # nothing of the trial stays


def test_what_no_module_can_mend_is_tried_in_bf16():
    report = autopsied(Net(lambda h: h * 1e6 * 1e-6), half=True)
    assert report.cure[0] == "line" and report.tried[-1].endswith("finite")
    assert report.suggestion.startswith("x.float() before test_autopsy.py")


def test_an_operation_that_it_does_not_know_is_repeated_in_fp64_and_gets_no_advice_on_the_rate():
    report = autopsied(Net(lambda h: torch.sinh(h * 0 + 1e3)))
    assert (report.verdict, report.again) == ("divergence", "inf in float32, inf in float64")
    assert "no finite value at these inputs" in report.suggestion
    report = autopsied(Net(lambda h: torch.sinh(h * 0 + 100)))
    assert report.again.startswith("inf in float32, ") and report.again.endswith("e+43 in float64")
    report = autopsied(Net(lambda h: (h * 0) * torch.tensor(-math.inf)))
    assert "0 * inf" in report.suggestion and not report.tried


@pytest.mark.parametrize("name", ["fp32", "float32", torch.float32, "O0", "no"])
def test_every_name_of_fp32_is_understood(name):
    net, runs = Net(), []

    def run_step(batch, fp32):
        runs.append(fp32)
        loss = F.cross_entropy(net(batch[0]), batch[1]) * (1.0 if fp32 else math.nan)
        loss.backward()
        return loss

    record = StepRecord(0, net)
    record.keep(X, Y)
    assert examine(run_step, record, net, precision=name).verdict == "not reproducible"
    assert examine(run_step, record, net, precision="bf16", try_cures=False).verdict == "precision"
    assert True in runs


def test_a_step_that_only_the_compiler_makes_bad_is_the_compilers():
    def miscompiled(graph, inputs):
        return lambda *args: [o * math.nan if o.is_floating_point() else o for o in graph(*args)]

    net = Net()
    compiled = torch.compile(net, backend=miscompiled)

    def run_step(batch, fp32):
        loss = F.cross_entropy(compiled(batch[0]), batch[1])
        loss.backward()
        return loss

    try:
        assert not run_step((X, Y), False).isfinite()
        report = autopsied(net, run_step=run_step)
        assert (report.verdict, report.tried[-1]) == ("compiler", "in eager mode: finite")
        record = StepRecord(0, net)
        record.keep(X, Y)
        report = examine(stepper(net), record, net, run_compiled=run_step)
        assert report.verdict == "compiler" and "force_eager" in report.suggestion
        net.between = lambda h: h / (h - h)  # bad in eager mode too: the compiler is innocent
        report = autopsied(net, run_step=run_step)
        assert (report.verdict, report.op) == ("divergence", "aten.div.Tensor")
    finally:
        torch.compiler.reset()


def test_the_step_in_fp32_uses_the_plain_mathematics_of_half_only_kernels():
    seen = []

    def run_step(batch, fp32):
        fused = torch.backends.cuda.flash_sdp_enabled()
        seen.append((fp32, fused))
        loss = net(batch[0]).sum() * (1.0 if fp32 and not fused else math.nan)
        loss.backward()
        return loss

    net = Net()
    assert autopsied(net, half=True, run_step=run_step).verdict == "precision"
    assert (False, True) in seen and (True, False) in seen and (True, True) not in seen
    a, b, one = torch.full((16, 16), 400.0), torch.eye(16), torch.ones(())
    with autopsy.InDtype(torch.float32, autopsy.NARROW):
        narrow = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        out = torch._scaled_mm(*narrow, one * 100, one, out_dtype=torch.bfloat16)
    assert torch.equal(out, a * 100) and out.dtype is torch.float32


# --- Beside the operation


def test_minus_infinity_is_lawful_only_while_it_is_a_mask():
    def between(h):
        most = torch.full((8, 5), -math.inf)  # sample 3 has no entry
        rows = torch.arange(8)[torch.arange(8) != 3][:, None].expand(-1, 5)
        return most.scatter_reduce(0, rows, h[:7], "amax")

    net = Net(between)
    net.norm = nn.Identity()
    report = autopsied(net)
    assert report.op.startswith("aten.full") and "addmm" in report.entered
    assert "write 0 before the sum" in report.suggestion


def test_a_mean_over_nothing_and_an_angle_at_zero_have_their_own_advice():
    assert "mean over nothing" in autopsied(Net(lambda h: h + h[8:].mean())).suggestion
    angle = autopsied(Net(lambda h: h + torch.complex(h * 1e-30, h * 0).angle()))
    assert (angle.phase, angle.weak) == ("backward", "angle") and "angle at 0" in angle.suggestion


def test_float_before_the_line_is_not_advised_where_the_operand_is_rounded_already():
    def between(h):
        p = (h * 0 + 12).sigmoid()  # 1 in half
        return h + p.logit()

    report = autopsied(Net(between), half=True)
    assert report.verdict == "precision" and any("still bad" in went for went in report.tried)
    assert not report.suggestion.startswith("x.float() before")


def test_a_value_that_half_cannot_hold_raises_and_is_precision():
    report = autopsied(Net(lambda h: h.masked_fill(h > 9, -1e9)), half=True)
    assert (report.verdict, report.made) == ("precision", "")


def test_a_teacher_beside_the_net_and_a_batch_of_plain_objects_have_names():
    class Graph:
        def __init__(self, x):
            self._store = {"x": x, "y": Y}

    net, teacher = Net(), nn.Linear(6, 3)
    teacher.weight.data[0, 0] = math.nan

    def run_step(batch, fp32):
        stored = batch[0]._store
        loss = F.cross_entropy(net(stored["x"]), stored["y"])
        loss = loss + teacher(stored["x"]).mean().detach() if x is X else loss
        loss.backward()
        return loss

    x = X
    assert autopsied(net, (Graph(X),), run_step=run_step).source == "parameter Linear.weight"
    x = X.clone()
    x[2, 2] = math.nan
    report = autopsied(net, (Graph(x),), run_step=run_step)
    assert (report.verdict, report.samples, report.source) == ("data", (2,), "x")


def test_three_lines_in_a_notebook():
    net = Net(lambda h: torch.log(h * 0 - 1))
    with Locator(net) as where:
        loss = F.cross_entropy(net(X), Y)
        loss.backward()
    text = str(where.blame([loss]))
    assert "first bad op: aten.log.default in the model itself" in text
    assert "test_autopsy.py" in text and not torch.is_anomaly_enabled()


# --- Kinds that were met in other people's code


def test_a_determinant_below_zero_is_an_operation_and_no_number_that_the_script_writes():
    report = autopsied(Net(lambda h: h + torch.logdet(-torch.eye(3) * (1 + 0 * h.sum()))))
    assert (report.verdict, report.op) == ("divergence", "torch.logdet")
    assert "slogdet" in report.suggestion and "test_autopsy.py" in report.line


def test_a_number_that_half_has_rounded_to_zero_gets_no_eps():
    def between(h):
        near = 1 - 0 * h - 1e-5
        return h / (1 - near)

    report = autopsied(Net(between), half=True)
    assert report.verdict == "precision" and "finite" not in report.again
    assert report.cure[0] == "precision" and not any("eps" in went for went in report.tried)


def test_a_conversion_to_half_in_the_script_is_guilty_itself():
    def run_step(batch, fp32):
        x = batch[0] * 1e5
        loss = F.cross_entropy(net((x if fp32 else x.half()).float()), batch[1])
        loss.backward()
        return loss

    net = Net()
    report = autopsied(net, half=True, run_step=run_step)
    assert (report.verdict, report.op) == ("precision", "aten._to_copy.default")
    assert report.suggestion.startswith("this number does not fit into half")


def test_a_bad_running_statistic_is_used_by_the_net_and_not_by_the_tool():
    net = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).eval()
    net[1].running_var[0] = math.nan
    report = autopsied(net)
    assert (report.verdict, report.module) == ("weights", "1") and "batch_norm" in report.op


def test_a_target_out_of_range_is_data_and_its_sample_is_named():
    def run_step(batch, fp32):
        loss = F.binary_cross_entropy(net(batch[0]).sigmoid(), batch[1])
        loss.backward()
        return loss

    net, target = Net(), torch.zeros(8, 3)
    target[5, 1] = 255
    report = autopsied(net, (X, target), run_step=run_step)
    assert (report.verdict, report.samples) == ("data", (5,))
    assert report.names == ("label 255.0 is not in 0..1",)


def test_samples_survive_a_matrix_vector_product():
    def between(h):
        kernel = (h @ h.t()).detach()
        kernel[3] = 0
        return h / (kernel @ torch.ones(8))[:, None]

    assert autopsied(Net(between)).samples == (3,)


def test_a_number_from_outside_of_torch_is_data():
    numbers = bytearray(struct.pack("5f", *[math.nan] * 5))
    report = autopsied(Net(lambda h: h * torch.frombuffer(numbers, dtype=torch.float32)))
    assert report.verdict == "data" and "NumPy, a constant" in report.suggestion


def test_an_infinite_number_of_the_batch_that_no_softmax_takes_is_data():
    def run_step(batch, fp32):
        loss = F.smooth_l1_loss(net(batch[0]), batch[1])
        loss.backward()
        return loss

    net, target = Net(), torch.zeros(8, 3)
    target[5, 1] = -math.inf
    report = autopsied(net, (X, target), run_step=run_step)
    assert (report.verdict, report.samples) == ("data", (5,))
    assert report.names == ("target holds -inf",)


def test_samples_survive_a_loop_over_them():
    def between(h):
        return torch.stack([row * row[k == 3:].mean() / row[:3 * (k != 3)].mean()
                            for k, row in enumerate(h)])

    assert autopsied(Net(between)).samples == (3,)


def test_a_cure_that_was_tried_in_vain_is_not_advised():
    report = autopsied(Net(lambda h: torch.exp(h * 0 + 2e3) ** 3))
    assert report.tried[0].startswith("exp(x.clamp(max=40))") and "still bad" in report.tried[0]
    assert "learning rate" in report.suggestion


# --- The locator alone, for many steps


def test_entered_for_many_steps_it_forgets_what_is_freed():
    net = Net(
        lambda h: h + torch.where(h > 100, torch.log(h * 0), 0.0)
    )  # log(0), swallowed, at each step
    with Locator(None) as locator:
        for _ in range(40):
            loss = stepper(net)((X, Y), False)
        assert locator.blame([loss.detach()]) is None
        assert len(locator.causes) <= 4
        numbers = bytearray(struct.pack("4f", *[math.nan] * 4))
        bad = torch.frombuffer(numbers, dtype=torch.float32)  # no operation made it
        assert locator.blame([bad * 2]).op == "aten.mul.Tensor"
        net.between = lambda h: torch.log(h * 0 - 1)
        loss = stepper(net)((X, Y), False)
    birth = locator.blame([loss.detach()])
    assert (birth.op, birth.module) == ("aten.log.default", "")
    assert not hooks._global_forward_hooks and not hooks._global_forward_pre_hooks


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: its backward runs in another thread"
)
def test_forward_and_backward_faults_are_named_on_cuda():
    for between, phase in (
        (lambda h: torch.log(h * 0 - 1), "forward"),
        (lambda h: h + torch.sqrt((h - h.detach()) ** 2), "backward"),
    ):
        net = Net(between).cuda()
        report = autopsied(net, (X.cuda(), Y.cuda()))
        assert (report.verdict, report.module, report.phase) == ("divergence", "", phase)
