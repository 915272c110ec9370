"""Plant a fault, and see the right operation, module and cause named."""

import gc
import math
import random
import struct
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as hooks
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from autopsy import Locator, StepRecord, examine
from autopsy.modes import InDtype
from autopsy.tensors import NARROW
from bench import diagnosis
from bench.diagnosis import CASES

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


def stepper(net, half=False, loss_of=F.cross_entropy):
    def run_step(batch, fp32):
        with torch.autocast("cpu", torch.float16, enabled=half and not fp32):
            loss = loss_of(net(batch[0]).float(), batch[1])
        loss.backward()
        return loss

    return run_step


def autopsied(net, *batches, half=False, run_step=None, loss_of=F.cross_entropy, **more):
    record = StepRecord(7, net)
    for batch in batches or [(X, Y)]:
        record.keep(*batch)
    run_step = run_step or stepper(net, half, loss_of)
    precision = "fp16" if half else "fp32"
    return examine(run_step, record, net, **{"num_classes": 3, "precision": precision} | more)


# Known to be wrong: the samples of an overflow that the loss scale causes.
DIAGNOSED = [name for name in CASES if name != "loss_scale_too_large_for_one_micro_batch"]


@pytest.mark.parametrize("name", DIAGNOSED)
def test_a_published_failure_is_diagnosed(name):
    """Verdict, module, operation, line, samples, and what the advice speaks of."""
    report = diagnosis.by_autopsy(CASES[name])
    assert False not in diagnosis.score(CASES[name], report).values(), report


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
def test_a_number_that_the_script_writes_is_data(write):
    report = autopsied(Net(lambda h: h + write(h)))
    assert (report.verdict, report.widened, report.names) == ("data", "", ())
    assert "writes" in str(report) and "test_autopsy.py" in report.suggestion


def test_an_fp16_overflow_in_a_linear_is_precision_and_names_the_samples():
    net, x = Net(), X.clone()
    x[[2, 5]] = 1e4
    with torch.no_grad():
        net.first.weight.fill_(3.0)
    report = autopsied(net, (x, Y), half=True)
    assert (report.verdict, report.module, report.phase) == ("precision", "first", "forward")
    assert report.op == "aten.addmm.default"
    assert report.samples == (2, 5)
    assert "first in fp32" in report.suggestion
    headline, what_to_do, *evidence = str(report).splitlines()
    assert headline == f"{report.line}: loss is nan at step 7 (fp16) -> precision"
    assert what_to_do == f"  try: {report.suggestion}"
    assert "  samples 2, 5 of 8 (from 0)" in evidence
    for text in ("the same batch in fp32: finite", "finite in float32", "scale 1, rank 0"):
        assert text in report.full and text not in str(report)  # nobody needs it on a screen


def test_a_bad_scaled_step_that_is_finite_without_the_scale_is_calibration():
    report = autopsied(Net(), half=True, scale=65536.0)  # run_step does not scale
    assert (report.verdict, report.op) == ("calibration", "")


def test_an_in_place_operation_does_not_hide_its_own_fault():
    report = autopsied(Net(lambda h: h.clone().sub_(h).log_()))
    assert (report.op, report.module) == ("aten.log_.default", "")


def test_bad_input_is_data_with_its_sample_and_index_though_the_step_has_soiled_batch_norm():
    net, x = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), X.clone()
    x[3, 2] = math.nan
    record = StepRecord(0, net, rank=1)
    record.keep(X, Y, indices=range(8))
    record.keep(x, Y, indices=range(100, 108))
    stepper(net)((x, Y), False)
    assert net[1].running_var.isnan().any()
    report = examine(stepper(net), record, net)
    assert (report.verdict, report.names) == ("data", ("input holds nan",))
    assert "at step 0 (rank 1) -> data" in str(report)
    assert "samples 3 of 8 in micro-batch 1 of 2 (in the data set: 103)" in str(report)
    ignored = autopsied(Net(), (X, Y), (X, Y * 0 - 100))  # of no sample in particular
    assert ignored.verdict == "data" and "\n  in micro-batch 1 of 2 (from 0)" in str(ignored)


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
    record.keep(X, Y)
    run_step((X, Y), False)
    state = torch.get_rng_state(), random.getstate()
    assert examine(run_step, record, net).verdict == "data"
    assert len(seen) > 1 and len(set(seen)) == 1
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
    assert all(torch.equal(b, before[n]) for n, b in net.named_buffers())
    assert all(p.grad is None for p in net.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


# --- What the guilty result descends from


def test_an_embedding_index_out_of_range_is_data_and_a_bug_in_the_code_is_an_error():
    net = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(16, 3))
    ids = torch.randint(0, 10, (8, 4))
    ids[6, 1] = 10
    report = autopsied(net, (ids, Y))
    assert (report.verdict, report.module, report.samples) == ("data", "0", (6,))
    for between, op in (
        (lambda h: h.view(3, 7), "aten.view.default"),
        (lambda h: [1][5], "IndexError"),
    ):
        report = autopsied(Net(between))
        assert (report.verdict, report.op) == ("error", op)
        assert "test_autopsy.py" in report.line and "raised" in str(report)


def test_a_hidden_state_that_was_bad_before_is_named_and_one_that_this_step_soils_is_not():
    def between(h):
        net.h = (h + net.h.detach()) * 1e15
        return net.h**3

    net = Net(between)
    net.h, net.norm = torch.ones(8, 5), nn.Identity()
    record = StepRecord(0, net)
    record.keep(X, Y)
    stepper(net)((X, Y), False)
    report = examine(stepper(net), record, net)
    assert (report.verdict, report.op) == ("divergence", "aten.pow.Tensor_Scalar")
    assert "initialised" in report.suggestion  # they have grown before any update
    net.h = torch.full((8, 5), math.inf)
    assert autopsied(net).names == ("attribute h",)


def test_a_bad_weight_is_named_with_its_rows_and_the_operation_that_uses_it_first():
    net = Net()
    net.head.weight.data[1, 1] = math.nan
    moments = {net.first.weight: {"exp_avg_sq": torch.tensor([-1e-9])}}
    report = str(autopsied(net, state=moments))
    assert "first to use parameter head.weight: aten.addmm" in report
    assert "head.weight in rows 1 of 3, optimizer state first.weight.exp_avg_sq (below" in report


def test_memory_that_nobody_wrote_is_named_and_memory_that_was_written_is_not():
    def but_one_row(h):
        out = torch.empty_like(h)
        out[:7] = h[:7]
        return out

    torch.use_deterministic_algorithms(True)  # torch.empty is then full of NaN
    try:
        unwritten = autopsied(Net(lambda h: h + torch.empty_like(h)))
        written = autopsied(Net(lambda h: h + torch.empty_like(h).copy_(h)))
        rows = autopsied(Net(but_one_row))
    finally:
        torch.use_deterministic_algorithms(False)
    assert unwritten.op == "aten.empty_like.default"
    assert rows.samples == (7,), "what was written later is good"
    assert (written.verdict, written.op) == ("not reproducible", "")


# --- Where it is said to be


def test_a_gradient_that_only_the_accumulation_makes_bad_is_found():
    def run_step(batch, fp32):
        loss = net(batch[0].half()).float().sum() * 1000
        loss.backward()
        return loss

    net, x = nn.Linear(6, 3).half(), X.abs() * 5
    report = autopsied(net, (x, Y), (x, Y), half=True, run_step=run_step)
    assert (report.node, report.op, report.micro_batch) == ("AccumulateGrad", "aten.add_.Tensor", 1)
    assert report.symptom == "gradient of weight is inf"


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block_is_named_by_its_own_line_and_the_eps_is_tried_in_its_repeated_forward(
    reentrant,
):
    def block(h):
        return h + torch.sqrt((h - h.detach()) ** 2)

    report = autopsied(Net(lambda h: checkpoint(block, h, use_reentrant=reentrant)))
    assert (report.phase, report.node) == ("backward", "SqrtBackward0")
    assert "in block" in report.line and report.cure == ("eps", "sqrt")


def test_a_module_used_twice_is_told_by_the_number_of_its_call():
    net = Net(lambda h: net.twice(net.twice(h).float() * 1e5))
    net.twice = nn.Linear(5, 5)
    report = autopsied(net, half=True)
    assert "in twice, call 2 of this step (forward" in str(report)
    assert report.cure == ("module, result in fp32", "twice")


def test_a_tensor_that_wraps_another_is_looked_into():
    with Locator() as locator:
        out = TwoTensor(X, X) / 0
    assert locator.blame([out.a]).op == "aten.div.Tensor"


@pytest.mark.parametrize(
    "between",
    [
        lambda h: torch.log(torch.sparse.mm(torch.eye(8).to_sparse_csr(), h) * 0 - 1),
        lambda h: torch.log(h.to(torch.float8_e4m3fn).float() * 0 - 1),
    ],
    ids=["csr", "float8"],
)
def test_sparse_and_tiny_numbers_are_looked_at(between):
    report = autopsied(Net(between))
    assert (report.verdict, report.op) == ("divergence", "aten.log.default")


# --- Samples


@pytest.mark.parametrize("use", [
    lambda h: h.sum(1),
    lambda h: h.t().sum(0),
    lambda h: torch.stack([h.sum(1)] * 2),
    lambda h: h.sum(1) * torch.ones(2, 8),
    lambda h: (h @ h.t()) @ torch.ones(8),
    lambda h: h[:, None].expand(8, 4, 5).transpose(0, 1).reshape(32, 5).sum(1),
    lambda h: torch.stack([row.sum() for row in h]),
], ids=["sum", "transposed", "stack", "broadcast", "mv", "reshape", "loop"])
def test_samples_survive(use):
    h = Net().first(X).detach()
    h[3] = 0
    with Locator(batch=(h, h[1:])) as locator:  # as many columns, not as many rows
        bad = 1 / use(h)
    assert locator.blame([bad]).samples == (3,)


ORDER = torch.tensor([4, 3, 7, 0, 1, 6, 2, 5])


@pytest.mark.parametrize("use", [
    lambda h: h[ORDER],
    lambda h: h[h.abs().sum(1).argsort(descending=True)] * 2,
    lambda h: h.index_select(0, ORDER).sum(1),
    lambda h: h.sum(1).sort().values,
    lambda h: h.abs().sum(1).topk(3, largest=False)[0],
    lambda h: h[h.sum(1) < 9e9][:, :2],
    lambda h: h[h.sum(1) == 0],
    lambda h: h.flip(0).abs(),
    lambda h: h[ORDER][ORDER],
    lambda h: h[ORDER] * h[ORDER],
    lambda h: h[None].expand(2, 8, 5)[:, ORDER],
], ids=["index", "argsort", "index_select", "sort", "topk", "mask", "pick", "flip", "twice",
        "square", "second dimension"])
def test_samples_are_named_by_their_place_in_the_batch_whatever_their_order_is_now(use):
    h = Net().first(X).detach()
    h[3] = 0
    with Locator(batch=(h, Y)) as locator:
        rows = use(h)
        bad = 1 / nn.Identity()(rows)  # a module is no reason to begin anew
    assert locator.blame([bad]).samples == (3,)


@pytest.mark.parametrize("use", [
    lambda h: h.sort(0).values,
    lambda h: h.sort(0).values.relu() * 2,
    lambda h: h.gather(0, ORDER[:, None].expand(8, 5)),
    lambda h: h.roll(1, 0),
    lambda h: h[ORDER] * h[ORDER.flip(0)],
], ids=["sort of columns", "what comes of it", "gather", "roll", "two orders"])
def test_samples_in_an_order_that_is_not_known_are_not_guessed(use):
    h = Net().first(X).detach()
    h[3] = 0
    with Locator(batch=(h, Y)) as locator:
        bad = 1 / nn.Identity()(use(h))
    birth = locator.blame([bad])
    assert birth.samples == () and "no sample is named" in birth.names[0], birth


@pytest.mark.parametrize("use", [
    lambda h: h.sum(0),
    lambda h: torch.ones(8, 8) @ h,
    lambda h: h.t() @ torch.ones(8),
], ids=["sum", "mm", "mv"])
def test_what_is_summed_over_the_batch_has_no_samples(use):
    h = torch.ones(8, 8)
    h[:, 3] = 0
    with Locator(batch=(h,)) as locator:
        bad = 1 / use(h)
    assert locator.blame([bad]).samples == ()


# --- Cures


class Wide(nn.Module):
    """Passes 65504 on the way; its result is harmless (gain 1e-6) or is not (gain 1)."""

    def __init__(self, gain):
        super().__init__()
        self.inner, self.gain = nn.Linear(5, 5), gain

    def forward(self, h):
        return self.inner(h * 1e6) * self.gain


def test_the_printed_island_was_tried_and_one_that_overflows_again_is_not_printed():
    net = Net(Wide(1e-6))
    assert autopsied(net, half=True, advice="flags").suggestion == "--keep-fp32 'between'"
    assert not any(vars(m).get("forward") for m in net.modules())  # nothing of the trial stays
    # cast back to half it is inf again
    report = autopsied(Net(Wide(1.0)), half=True, advice="flags")
    assert report.tried[0].startswith("between in fp32: still bad")
    assert report.cure == ("module, result in fp32", "between")


def test_where_a_module_in_fp32_does_not_help_its_parent_is_tried():
    report = diagnosis.by_autopsy(CASES["vae_with_half_weights"])
    assert "decoder.up in fp32: still bad" in str(report)
    assert report.cure == ("module, result in fp32, half weights", "decoder")


def test_what_no_module_can_mend_is_tried_at_its_line():
    report = autopsied(Net(lambda h: h * 1e6 * 1e-6), half=True)
    assert report.cure[0] == "line" and report.tried[-1].endswith("finite")
    assert report.suggestion.startswith("x.float() before test_autopsy.py")


def test_an_operation_that_it_does_not_know_is_repeated_in_fp64_and_gets_no_advice_on_the_rate():
    report = autopsied(Net(lambda h: torch.sinh(h * 0 + 1e3)))
    assert (report.verdict, report.widened) == ("divergence", "inf in float32, inf in float64")
    assert "no finite value at these inputs" in report.suggestion
    report = autopsied(Net(lambda h: torch.sinh(h * 0 + 100)))
    assert report.widened.startswith("inf in float32, ")
    assert report.widened.endswith("e+43 in float64")
    report = autopsied(Net(lambda h: (h * 0) * torch.tensor(-math.inf)))
    assert "0 * inf" in report.suggestion and not report.tried


@pytest.mark.parametrize("name", ["fp32", "float32", torch.float32, "O0", "no"])
def test_every_name_of_fp32_is_understood(name):
    def run_step(batch, fp32):
        loss = F.cross_entropy(net(batch[0]), batch[1]) * (1.0 if fp32 else math.nan)
        loss.backward()
        return loss

    net = Net()
    assert autopsied(net, run_step=run_step, precision=name).verdict == "not reproducible"
    assert autopsied(net, run_step=run_step, precision="bf16").verdict == "precision"


def test_a_compiled_step_beside_the_plain_one_is_run_too():
    report = autopsied(Net(), run_compiled=lambda batch, fp32: torch.tensor(math.nan))
    assert report.verdict == "compiler" and "force_eager" in report.suggestion


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
    with InDtype(torch.float32, NARROW, net):
        narrow = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        out = torch._scaled_mm(*narrow, one * 100, one, out_dtype=torch.bfloat16)
    assert torch.equal(out, a * 100) and out.dtype is torch.float32


def test_the_examination_lets_go_of_all_that_a_step_has_computed_before_it_raised():
    """What it kept would be stale when a CUDA graph is recorded next."""
    kept = []

    def run_step(batch, fp32):
        out = net(batch[0])
        kept.append(weakref.ref(out))
        try:
            {}["nothing"]
        except KeyError:
            return F.cross_entropy(out.flatten(1), torch.full((len(out),), 99))  # out of range

    net = Net()
    gc.collect()
    gc.disable()
    try:
        report = autopsied(net, run_step=run_step)
        assert report.verdict == "data" and len(kept) >= 1, report
        assert not [ref for ref in kept if ref() is not None]
        assert not [p for p in net.parameters() if p.grad is not None]
    finally:
        gc.enable()


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


def test_a_value_that_half_cannot_hold_raises_and_is_precision():
    report = autopsied(Net(lambda h: h.masked_fill(h > 9, -1e9)), half=True)
    assert (report.verdict, report.made) == ("precision", "")


def test_a_teacher_beside_the_net_and_a_batch_of_plain_objects_have_names():
    def run_step(batch, fp32):
        stored = batch[0]._store
        loss = F.cross_entropy(net(stored["x"]) + teacher(stored["x"]).detach(), stored["y"])
        loss.backward()
        return loss

    net, teacher, x = Net(), nn.Linear(6, 3), X.clone()
    x[2, 2] = math.nan
    graph = SimpleNamespace(_store={"x": x, "y": Y})
    report = autopsied(net, (graph,), run_step=run_step)
    assert (report.verdict, report.samples, report.source) == ("data", (2,), "x")
    x[2, 2] = 0
    teacher.weight.data[0, 0] = math.nan
    assert autopsied(net, (graph,), run_step=run_step).source == "parameter Linear.weight"


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


def test_a_number_that_half_has_rounded_to_zero_gets_no_eps_and_no_float_that_comes_too_late():
    def between(h):
        near = 1 - 0 * h - 1e-5
        return h / (1 - near)

    report = autopsied(Net(between), half=True)
    assert report.verdict == "precision" and "finite" not in report.widened
    assert report.cure[0] == "precision" and not any("eps" in went for went in report.tried)
    assert not report.suggestion.startswith("x.float() before")


def test_a_step_of_half_weights_is_tried_in_bf16_and_a_cure_that_raises_is_not_tried():
    net = Net(lambda h: (h * 0 + 12).exp()).half()

    def run_step(batch, fp32):
        weights = {n: p.float() if fp32 else p for n, p in net.named_parameters()}
        x = batch[0].to(weights["first.weight"].dtype)
        loss = F.cross_entropy(torch.func.functional_call(net, weights, x).float(), batch[1])
        loss.backward()
        return loss

    report = autopsied(net, half=True, run_step=run_step)
    assert report.verdict == "precision" and report.cure == ("precision", "bf16"), report
    assert "could not be tried (RuntimeError" in report.tried[0], report
    net.first.forward = lambda x: F.linear(x, net.first.weight) * 1e5 / 1e5
    net.between = nn.Identity()
    report = autopsied(net, half=True, run_step=run_step)
    assert "first.float(), and then with torch.autocast" in report.suggestion, report


def test_a_conversion_to_half_in_the_script_is_guilty_itself():
    report = autopsied(Net(lambda h: (h * 1e5).half().float()), half=True)
    assert (report.verdict, report.op) == ("precision", "aten._to_copy.default")
    assert report.suggestion.startswith("this number does not fit into half")


def test_a_bad_running_statistic_that_training_does_not_use_is_named():
    net = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    net[1].running_var[0] = math.nan
    report = autopsied(net)
    assert (report.verdict, report.names) == ("weights", ("buffer 1.running_var",))


def test_a_variance_below_zero_in_a_buffer_is_to_blame_and_not_the_root_of_it():
    net = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3).eval())
    net[1].running_var[0] = -0.5
    report = autopsied(net)
    assert (report.verdict, report.names) == ("weights", ("buffer 1.running_var is below 0",))
    assert "set the running statistics back" in report.suggestion


@pytest.mark.parametrize(("lowest", "advice"), [(-0.7, "find out why"), (0.0, "clamp(min=1e-6)")])
def test_a_clamp_is_no_advice_where_it_hides_a_negative_number(lowest, advice):
    report = autopsied(Net(lambda h: h * (0 * h + torch.linspace(lowest, 1, 5)).log()))
    assert report.cure[0] == "eps" and advice in report.suggestion, report


@pytest.mark.parametrize(("loss_of", "value", "name"), [
    (lambda out, y: F.binary_cross_entropy(out.sigmoid(), y), 255, "label 255.0 is not in 0..1"),
    (F.smooth_l1_loss, -math.inf, "target holds -inf"),  # which no softmax takes
    (lambda out, y: F.one_hot(y.long(), 3).sum() * out.sum(), 9, "label 9 is not in 0..2"),
])
def test_a_number_that_is_no_target_is_data_and_its_sample_is_named(loss_of, value, name):
    target = torch.zeros(8, 3)
    target[5, 1] = value
    report = autopsied(Net(), (X, target), loss_of=loss_of)
    assert (report.verdict, report.samples, report.names) == ("data", (5,), (name,))


def test_a_number_from_outside_of_torch_is_data():
    numbers = bytearray(struct.pack("5f", *[math.nan] * 5))
    report = autopsied(Net(lambda h: h * torch.frombuffer(numbers, dtype=torch.float32)))
    assert report.verdict == "data" and "NumPy, a constant" in report.suggestion


def test_the_samples_of_a_mask_that_overflows_are_those_that_it_makes_nan():
    mask = torch.tensor([[1.0, 0, 0, 0, 0]] * 8).half()
    mask[3] = 1
    report = autopsied(Net(lambda h: h * (h.half() * 0 + -1e10 * mask).softmax(1)), half=True)
    assert (report.verdict, report.samples) == ("precision", (3,)), report
    assert "finfo" in report.suggestion


def test_a_sample_that_alone_overflows_is_looked_at_before_the_learning_rate():
    x = X.clone()
    x[2] *= 1e4
    report = autopsied(Net(lambda h: torch.exp(h.abs()) ** 3), (x, Y))
    assert (report.verdict, report.samples) == ("divergence", (2,)), report
    assert report.suggestion.startswith("look at these samples, no other does this; else"), report


def test_a_cure_that_was_tried_in_vain_is_not_advised():
    report = autopsied(Net(lambda h: torch.exp(h * 0 + 2e3) ** 3))
    assert report.tried[0].startswith("exp(x.clamp(max=40))") and "still bad" in report.tried[0]
    assert "learning rate" in report.suggestion


def test_large_numbers_whose_sum_is_inf_minus_inf_have_grown():
    def between(h):
        h = (h * 0 + 1.7e19)[None, None]
        return F.scaled_dot_product_attention(h, h, h)[0, 0]

    report = autopsied(Net(between))
    assert (report.verdict, report.made) == ("divergence", "nan"), report
    assert "learning rate" in report.suggestion, report


def test_a_cure_covers_the_next_line_that_would_hide_its_inf():
    def loss_of(logits, labels):
        masks = torch.ones(300, 300) @ torch.eye(300)  # half
        shared = masks.sum()
        total = masks.sum() + 1
        return logits.square().mean() + shared / total  # inf / inf, then a finite number / inf

    shared, total = (loss_of.__code__.co_firstlineno + k for k in (2, 3))
    report = autopsied(Net(), half=True, loss_of=loss_of)
    assert report.verdict == "precision" and report.cure[0] == "line", report
    assert all(f"test_autopsy.py:{n} in loss_of" in report.suggestion for n in (shared, total))


def test_a_cure_is_tried_at_every_line_that_has_the_same_weak_operation():
    def loss_of(logits, labels):
        first = (logits * 0 + 99).exp()
        return first.mean() + (logits * 0 + 99).exp().mean()

    report = autopsied(Net(), loss_of=loss_of)
    line = loss_of.__code__.co_firstlineno
    assert report.cure[0] == "eps", report
    assert all(f"test_autopsy.py:{line + k} in loss_of" in report.tried[0] for k in (1, 2)), report


def test_a_batch_that_is_wholly_bad_is_no_matter_of_samples():
    report = autopsied(Net(), (X / 0, Y))
    assert report.verdict == "data" and len(report.samples) == 8
    assert "every sample is bad" in report.suggestion


def test_a_column_of_each_sample_is_taken_and_the_samples_are_still_known():
    x = torch.cat([X[:5], X[5:6] * 0, X[6:]])

    def loss_of(logits, labels):
        own = logits[torch.arange(8), labels]
        return (own / own.detach()).mean() + (own / x[:, [2, 0]].sum(1)).mean()

    assert autopsied(Net(), (x, Y), loss_of=loss_of).samples == (5,)


# --- Finite is not cured

def contrast(logits, labels):
    e = (logits * 5 + 100).exp()
    return -(e[range(8), labels] / e.sum(1)).log().mean()


def partition(logits, labels):
    z = logits * 50
    total = z.exp().sum(1)
    return (total.log() - z[range(8), labels]).mean()


def unlikely(logits, labels):
    return -(-50 * logits.abs() - 60).sigmoid().log().mean()


@pytest.mark.parametrize(("loss_of", "advice"), [
    (contrast, "exp(x - x.amax(-1, keepdim=True))"), (partition, "torch.logsumexp(x, dim)"),
    (unlikely, "log(x.clamp(min=1e-6)) is finite, but another")])
def test_a_cure_is_the_same_step_as_in_float64_or_it_is_told_and_not_advised(loss_of, advice):
    net = Net()
    net.head.weight.data *= 9
    report = autopsied(net, loss_of=loss_of)
    assert report.verdict == "divergence" and advice in report.suggestion, report
    assert report.cure[0] == ("" if loss_of is unlikely else "eps")
    parted = [text for text in report.tried if "another step" in text]
    assert bool(parted) == (loss_of is not contrast), report


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
