"""Plant a fault, and see the right operation, module and cause named."""

import gc
import math
import random
import struct
import weakref

import pytest
import torch
from helpers import needs_cuda, rows_of, same, snapshot
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as hooks
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from autopsy import Locator, StepRecord, examine
from autopsy.facts import Kind, Outcome, Source, Where
from autopsy.modes import InDtype
from autopsy.report import in_words
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


def expect(report, says="", advice="", cure=(), **fields):
    """Fields of a report, the beginning of its cure, words of it and of what it suggests."""
    found = {name: getattr(report, name) for name in fields}
    assert found == fields, report
    where, *more = report.cure or (Where.EPS,)
    assert (where.value, *more)[: len(cure)] == cure, report
    assert all(part in str(report) for part in says.split(" ... ")), report
    assert advice in report.suggestion, report


FAULTS = []  # see the last test of this file


def tells(
    sentence, between=lambda h: h, batch=(X, Y), half=False, loss_of=F.cross_entropy, **expected
):
    """A step of Net(between), and what its report says: see `expect`."""
    step = between, batch, half, loss_of
    FAULTS.append(pytest.param(step, expected, id=sentence))


# Known to be wrong: the samples of an overflow that the loss scale causes.
DIAGNOSED = [name for name in CASES if name != "loss_scale_too_large_for_one_micro_batch"]


@pytest.mark.parametrize("name", DIAGNOSED)
def test_a_published_failure_is_diagnosed(name):
    """Verdict, module, operation, line, samples, and what the advice speaks of."""
    report = diagnosis.by_autopsy(CASES[name])
    assert rows_of(str(report)) <= 12, "it does not fit a screen"
    assert False not in diagnosis.score(CASES[name], report).values(), report


WRITES = {
    "fill_": lambda h: h + h.clone()[2, 1].fill_(math.nan),
    "masked_fill": lambda h: h + h.masked_fill(torch.eye(8, 5).bool(), math.inf),
    "index_fill": lambda h: h + h.index_fill(0, torch.tensor([2]), math.nan),
    "full": lambda h: h + torch.full((8, 5), math.inf),
    "full_like": lambda h: h + torch.full_like(h, math.nan),
    "new_full": lambda h: h + h.new_full((5,), math.nan),
}
for name, write in WRITES.items():
    tells(
        f"a number that the script writes by {name} is data",
        write,
        verdict="data",
        in_wider_types=(),
        names=(),
        says="writes",
        advice="test_autopsy.py",
    )


def test_an_fp16_overflow_in_a_linear_is_precision_and_names_the_samples():
    net, x = Net(), X.clone()
    x[[2, 5]] = 1e4
    with torch.no_grad():
        net.first.weight.fill_(3.0)
    report = autopsied(net, (x, Y), half=True)
    expect(
        report,
        verdict="precision",
        module="first",
        phase="forward",
        samples=(2, 5),
        op="aten.addmm.default",
        advice="first in fp32",
    )
    headline, what_to_do, *evidence = str(report).splitlines()
    assert headline == f"{report.line}: loss is nan at step 7 (fp16) -> precision"
    assert what_to_do == f"  try: {report.suggestion}"
    assert "  samples 2, 5 of 8 (from 0)" in evidence
    for text in ("the same batch in fp32: finite", "finite in float32", "scale 1, rank 0"):
        assert text in report.full and text not in str(report)  # nobody needs it on a screen


def test_a_bad_scaled_step_that_is_finite_without_the_scale_is_calibration():
    report = autopsied(Net(), half=True, scale=65536.0)  # run_step does not scale
    expect(report, verdict="calibration", op="")


tells(
    "an in-place operation does not hide its own fault",
    lambda h: h.clone().sub_(h).log_(),
    op="aten.log_.default",
    module="",
)


def test_bad_input_is_data_with_its_sample_and_index_though_the_step_has_soiled_batch_norm():
    net, x = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), X.clone()
    x[3, 2] = math.nan
    record = StepRecord(0, net, rank=1)
    record.keep(X, Y, indices=range(8))
    record.keep(x, Y, indices=range(100, 108))
    stepper(net)((x, Y), False)
    assert net[1].running_var.isnan().any()
    report = examine(stepper(net), record, net)
    expect(report, verdict="data", names=("input holds nan",), says="at step 0 (rank 1) -> data")
    expect(report, says="samples 3 of 8 in micro-batch 1 of 2 (in the data set: 103)")
    ignored = autopsied(Net(), (X, Y), (X, Y * 0 - 100))  # of no sample in particular
    expect(ignored, verdict="data", says="\n  in micro-batch 1 of 2 (from 0)")


def test_the_re_run_is_the_same_step_and_leaves_no_trace():
    net = nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.Dropout(0.5), nn.Linear(20, 3))
    seen = []

    def run_step(batch, fp32):
        loss = F.cross_entropy(net(batch[0]) + random.random(), batch[1])
        loss.backward()
        seen.append(loss.item())
        return loss * math.nan

    record, before = StepRecord(0, net), snapshot(net)
    record.keep(X, Y)
    run_step((X, Y), False)
    state = torch.get_rng_state(), random.getstate()
    assert examine(run_step, record, net).verdict == "data"
    assert len(seen) > 1 and len(set(seen)) == 1
    assert same(state, (torch.get_rng_state(), random.getstate()))
    assert same(before, snapshot(net))
    assert all(p.grad is None for p in net.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    assert not torch.is_anomaly_enabled()


# --- What the guilty result descends from


def test_an_embedding_index_out_of_range_is_data():
    net = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(16, 3))
    ids = torch.randint(0, 10, (8, 4))
    ids[6, 1] = 10
    expect(autopsied(net, (ids, Y)), verdict="data", module="0", samples=(6,))


tells(
    "a bug in the code is an error",
    lambda h: h.view(3, 7),
    verdict="error",
    op="aten.view.default",
    says="raised",
)
tells(
    "a bug outside of torch is an error",
    lambda h: [1][5],
    verdict="error",
    op="IndexError",
    says="raised",
)


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
    expect(
        report, verdict="divergence", op="aten.pow.Tensor_Scalar", advice="initialised"
    )  # they have grown before any update
    net.h = torch.full((8, 5), math.inf)
    expect(autopsied(net), names=("attribute h",))


def test_a_bad_weight_is_named_with_its_rows_and_the_operation_that_uses_it_first():
    net = Net()
    net.head.weight.data[1, 1] = math.nan
    moments = {net.first.weight: {"exp_avg_sq": torch.tensor([-1e-9])}}
    report = str(autopsied(net, state=moments))
    assert "first to use parameter head.weight: aten.addmm" in report
    assert "head.weight in rows 1 of 3, optimizer state first.weight.exp_avg_sq (below" in report


def one_row_is_missing(h):
    out = torch.empty_like(h)
    out[:7] = h[:7]
    return out


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        (lambda h: h + torch.empty_like(h), dict(op="aten.empty_like.default")),
        (lambda h: h + torch.empty_like(h).copy_(h), dict(verdict="not reproducible", op="")),
        (one_row_is_missing, dict(samples=(7,))),  # what was written later is good
    ],
)
def test_memory_that_nobody_wrote_is_named_and_memory_that_was_written_is_not(between, expected):
    torch.use_deterministic_algorithms(True)  # torch.empty is then full of NaN
    try:
        expect(autopsied(Net(between)), **expected)
    finally:
        torch.use_deterministic_algorithms(False)


# --- Where it is said to be


def block(h):
    return h + torch.sqrt((h - h.detach()) ** 2)


ROOT = dict(phase="backward", node="SqrtBackward0", cure=("eps", "sqrt"), says="in block: ")
tells(
    "a checkpointed block is named by its own line and the eps is tried in its second forward",
    lambda h: checkpoint(block, h, use_reentrant=False),
    **ROOT,
)
tells(
    "a reentrant checkpoint is named by its own line and the eps is tried in its second forward",
    lambda h: checkpoint(block, h, use_reentrant=True),
    **ROOT,
)


def test_a_module_used_twice_is_told_by_the_number_of_its_call():
    net = Net(lambda h: net.twice(net.twice(h).float() * 1e5))
    net.twice = nn.Linear(5, 5)
    expect(
        autopsied(net, half=True),
        says="in twice, call 2 of this step (forward",
        cure=("module", "twice", True),
    )


def test_a_tensor_that_wraps_another_is_looked_into():
    with Locator() as locator:
        out = TwoTensor(X, X) / 0
    assert locator.origin_of([out.a]).op == "aten.div.Tensor"


tells(
    "sparse numbers are looked at",
    lambda h: torch.log(torch.sparse.mm(torch.eye(8).to_sparse_csr(), h) * 0 - 1),
    verdict="divergence",
    op="aten.log.default",
)
tells(
    "float8 is looked at",
    lambda h: torch.log(h.to(torch.float8_e4m3fn).float() * 0 - 1),
    verdict="divergence",
    op="aten.log.default",
)


# --- Samples


ORDER = torch.tensor([4, 3, 7, 0, 1, 6, 2, 5])
KNOWN = {  # their place in the batch is named, whatever their order is now
    "transposed": lambda h: h.t().sum(0),
    "stack": lambda h: torch.stack([h.sum(1)] * 2),
    "broadcast": lambda h: h.sum(1) * torch.ones(2, 8),
    "mv": lambda h: (h @ h.t()) @ torch.ones(8),
    "reshape": lambda h: h[:, None].expand(8, 4, 5).transpose(0, 1).reshape(32, 5).sum(1),
    "loop": lambda h: torch.stack([row.sum() for row in h]),
    "index": lambda h: h[ORDER],
    "index_select": lambda h: h.index_select(0, ORDER).sum(1),
    "sort": lambda h: h.sum(1).sort().values,
    "topk": lambda h: h.abs().sum(1).topk(3, largest=False)[0],
    "mask": lambda h: h[h.sum(1) < 9e9][:, :2],
    "flip": lambda h: h.flip(0).abs(),
    "twice": lambda h: h[ORDER][ORDER],
    "square": lambda h: h[ORDER] * h[ORDER],
    "second dimension": lambda h: h[None].expand(2, 8, 5)[:, ORDER],
}
UNKNOWN = {
    "sort of columns": lambda h: h.sort(0).values,
    "gather": lambda h: h.gather(0, ORDER[:, None].expand(8, 5)),
    "roll": lambda h: h.roll(1, 0),
    "two orders": lambda h: h[ORDER] * h[ORDER.flip(0)],
}
SUMMED = {
    "sum": lambda h: h.sum(0),
    "mm": lambda h: torch.ones(8, 8) @ h,
    "mv": lambda h: h.t() @ torch.ones(8),
}


def origin_seen(use, *batch):
    with Locator(batch=batch) as locator:
        bad = 1 / use(batch[0])
    return locator.origin_of([bad])


@pytest.mark.parametrize("use", [*KNOWN, *UNKNOWN])
def test_samples_are_named_by_their_place_in_the_batch_or_not_guessed(use):
    def entered(h):
        return nn.Identity()(plain(h))  # a module is no reason to begin anew

    plain = (KNOWN | UNKNOWN)[use]
    h = Net().first(X).detach()
    h[3] = 0
    for seen in (plain, entered):
        origin = origin_seen(seen, h, h[1:], Y)  # as many columns, not as many rows
        assert origin.samples == ((3,) if use in KNOWN else ())
        assert use in KNOWN or "no sample is named" in origin.names[0], origin


@pytest.mark.parametrize("use", SUMMED)
def test_what_is_summed_over_the_batch_has_no_samples(use):
    h = torch.ones(8, 8)
    h[:, 3] = 0
    assert origin_seen(SUMMED[use], h).samples == ()


# --- Cures


class Wide(nn.Linear):
    """Passes 65504 on the way; its result is harmless (gain 1e-6) or is not (gain 1)."""

    def __init__(self, gain):
        super().__init__(5, 5)
        self.gain = gain

    def forward(self, h):
        return super().forward(h * 1e6) * self.gain


def test_the_printed_island_was_tried_and_one_that_overflows_again_is_not_printed():
    net = Net(Wide(1e-6))
    assert autopsied(net, half=True, advice="flags").suggestion == "--keep-fp32 'between'"
    assert not any(vars(m).get("forward") for m in net.modules())  # nothing of the trial stays
    # cast back to half it is inf again
    report = autopsied(Net(Wide(1.0)), half=True, advice="flags")
    expect(report, cure=("module", "between", True))
    assert in_words(report.tried[0]).startswith("between in fp32: still bad")


def test_where_a_module_in_fp32_does_not_help_its_parent_is_tried():
    expect(
        diagnosis.by_autopsy(CASES["vae_with_half_weights"]),
        says="decoder.up in fp32: still bad",
        cure=("module", "decoder", True),
    )


def test_what_no_module_can_mend_is_tried_at_its_line():
    report = autopsied(Net(lambda h: h * 1e6 * 1e-6), half=True)
    expect(report, cure=("line",), says="  try: x.float() before test_autopsy.py")
    assert report.tried[-1].outcome is Outcome.FINITE


tells(
    "an operation that it does not know is repeated in fp64 and gets no advice on the rate",
    lambda h: torch.sinh(h * 0 + 1e3),
    verdict="divergence",
    advice="no finite value at these inputs",
)
tells(
    "an operation that is finite in fp64 is said to be so",
    lambda h: torch.sinh(h * 0 + 100),
    says="inf in float32, finite in float64",
    advice="not for float64",
)
tells(
    "0 * inf needs no trial",
    lambda h: (h * 0) * torch.tensor(-math.inf),
    advice="0 * inf",
    tried=(),
)


@pytest.mark.parametrize("name", ["fp32", "float32", torch.float32, "O0", "no", "bf16"])
def test_every_name_of_fp32_is_understood(name):
    def run_step(batch, fp32):
        loss = F.cross_entropy(net(batch[0]), batch[1]) * (1.0 if fp32 else math.nan)
        loss.backward()
        return loss

    net = Net()
    verdict = "precision" if name == "bf16" else "not reproducible"
    expect(autopsied(net, run_step=run_step, precision=name), verdict=verdict)


def test_a_compiled_step_beside_the_plain_one_is_run_too():
    report = autopsied(Net(), run_compiled=lambda batch, fp32: torch.tensor(math.nan))
    expect(report, verdict="compiler", advice="force_eager")


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
    assert report.op.startswith("aten.full") and "addmm" in report.consumed_by
    assert "write 0 before the sum" in report.suggestion


tells(
    "a value that half cannot hold raises and is precision",
    lambda h: h.masked_fill(h > 9, -1e9),
    half=True,
    verdict="precision",
    result_value="",
)


def test_a_teacher_beside_the_net_has_a_name():
    def run_step(batch, fp32):
        loss = F.cross_entropy(net(batch[0]) + teacher(batch[0]).detach(), batch[1])
        loss.backward()
        return loss

    net, teacher = Net(), nn.Linear(6, 3)
    teacher.weight.data[0, 0] = math.nan
    expect(autopsied(net, run_step=run_step), source=Source(Kind.PARAMETER, "Linear.weight"))


# --- Kinds that were met in other people's code


tells(
    "a determinant below zero is an operation and no number that the script writes",
    lambda h: h + torch.logdet(-torch.eye(3) * (1 + 0 * h.sum())),
    verdict="divergence",
    op="torch.logdet",
    advice="slogdet",
    says="in the model itself",
)


def test_a_number_that_half_has_rounded_to_zero_gets_no_eps_and_no_float_that_comes_too_late():
    def between(h):
        near = 1 - 0 * h - 1e-5
        return h / (1 - near)

    report = autopsied(Net(between), half=True)
    assert report.verdict == "precision" and not report.finite_in
    expect(report, cure=("precision",))
    assert not any("eps" in trial.what for trial in report.tried)
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
    expect(report, verdict="precision", cure=("precision", "bf16"))
    assert "could not be tried (RuntimeError" in in_words(report.tried[0]), report
    net.first.forward = lambda x: F.linear(x, net.first.weight) * 1e5 / 1e5
    net.between = nn.Identity()
    expect(
        autopsied(net, half=True, run_step=run_step),
        advice="first.float(), and then with torch.autocast",
    )


tells(
    "a conversion to half in the script is guilty itself",
    lambda h: (h * 1e5).half().float(),
    half=True,
    verdict="precision",
    op="aten._to_copy.default",
    says="  try: this number does not fit into half",
)


@pytest.mark.parametrize(
    ("train", "value", "name", "advice"),
    [
        (True, math.nan, "buffer 1.running_var", ""),
        (False, -0.5, "buffer 1.running_var is below 0", "a momentum outside of 0..1"),
    ],
    ids=["nan in training, which does not use it", "a variance below zero, and not its root"],
)
def test_a_bad_running_statistic_is_named(train, value, name, advice):
    net = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3).train(train))
    net[1].running_var[0] = value
    expect(autopsied(net), verdict="weights", names=(name,), advice=advice)


def test_a_target_of_binary_cross_entropy_is_no_class():
    net = nn.Sequential(nn.Linear(6, 1), nn.Sigmoid())
    target = torch.tensor([[0.0], [1.0], [-1.7e38], [1.0]])
    report = autopsied(net, (torch.randn(4, 6), target), loss_of=F.binary_cross_entropy)
    expect(
        report, advice="binary_cross_entropy takes targets in 0..1", verdict="data", samples=(2,)
    )
    assert "ignore_index" not in report.suggestion


@pytest.mark.parametrize(("grown", "verdict"), [(False, "weights"), (True, "divergence")])
def test_one_large_number_among_ordinary_ones_is_the_weights_and_growth_is_divergence(
    grown, verdict
):
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    with torch.no_grad():
        if grown:
            net[0].weight.mul_(1e30)
        else:
            net[0].weight[2, 3] = 1e30
    names = () if grown else ("parameter 0.weight holds 1e+30 among smaller ones",)
    expect(autopsied(net, loss_of=lambda out, y: out.square().mean()), verdict=verdict, names=names)


@pytest.mark.parametrize(
    ("moments", "names"),
    [
        ([1e-3, 1e30, 1e-3], ("optimizer state 0.bias.exp_avg holds 1e+30 among smaller ones",)),
        ([1e30, 1e30, 1e30], ()),
    ],
)
def test_one_large_moment_is_named_and_moments_that_are_large_by_right_are_not(moments, names):
    net = nn.Sequential(nn.Linear(6, 3))
    state = {net[0].bias: {"exp_avg": torch.tensor(moments)}}
    expect(autopsied(net, state=state), names=names)


tells(
    "a clamp is no advice where it hides a negative number",
    lambda h: h * (0 * h + torch.linspace(-0.7, 1, 5)).log(),
    cure=("eps",),
    advice="find out why",
)
tells(
    "a clamp is the advice for a zero",
    lambda h: h * (0 * h + torch.linspace(0, 1, 5)).log(),
    cure=("eps",),
    advice="clamp(min=1e-6)",
)


def targets(value):
    target = torch.zeros(8, 3)
    target[5, 1] = value
    return X, target


for loss_of, value, name in (
    (lambda out, y: F.binary_cross_entropy(out.sigmoid(), y), 255, "label 255.0 is not in 0..1"),
    (F.smooth_l1_loss, -math.inf, "target holds -inf"),  # which no softmax takes
    (lambda out, y: F.one_hot(y.long(), 3).sum() * out.sum(), 9, "label 9 is not in 0..2"),
):
    tells(
        f"a number that is no target is data and its sample is named: {name}",
        batch=targets(value),
        loss_of=loss_of,
        verdict="data",
        samples=(5,),
        names=(name,),
    )


OUTSIDE = bytearray(struct.pack("5f", *[math.nan] * 5))
tells(
    "a number from outside of torch is data",
    lambda h: h * torch.frombuffer(OUTSIDE, dtype=torch.float32),
    verdict="data",
    advice="NumPy, a constant",
)


MASK = torch.tensor([[1.0] + [rest] * 4 for rest in (0, 0, 0, 1, 0, 0, 0, 0)]).half()
tells(
    "the samples of a mask that overflows are those that it makes nan",
    lambda h: h * (h.half() * 0 + -1e10 * MASK).softmax(1),
    half=True,
    verdict="precision",
    samples=(3,),
    advice="finfo",
)


tells(
    "a sample that alone overflows is looked at before the learning rate",
    lambda h: torch.exp(h.abs()) ** 3,
    (X * (1 + 9999 * torch.eye(8)[2][:, None]), Y),
    verdict="divergence",
    samples=(2,),
    says="  try: look at these samples, no other does this; else",
)


tells(
    "a cure that was tried in vain is not advised",
    lambda h: torch.exp(h * 0 + 2e3) ** 3,
    advice="learning rate",
    says="  tried: exp(x.clamp(max=40)) at  ... : still bad",
)


def attention(h):
    h = (h * 0 + 1.7e19)[None, None]
    return F.scaled_dot_product_attention(h, h, h)[0, 0]


tells(
    "large numbers whose sum is inf minus inf have grown",
    attention,
    verdict="divergence",
    result_value="nan",
    advice="learning rate",
)


def test_a_cure_covers_the_next_line_that_would_hide_its_inf():
    def loss_of(logits, labels):
        masks = torch.ones(300, 300) @ torch.eye(300)  # half
        shared = masks.sum()
        total = masks.sum() + 1
        return logits.square().mean() + shared / total  # inf / inf, then a finite number / inf

    first = loss_of.__code__.co_firstlineno
    report = autopsied(Net(), half=True, loss_of=loss_of)
    for line in (first + 2, first + 3):
        expect(
            report, verdict="precision", cure=("line",), advice=f"test_autopsy.py:{line} in loss_of"
        )


def test_a_cure_is_tried_at_every_line_that_has_the_same_weak_operation():
    def loss_of(logits, labels):
        first = (logits * 0 + 99).exp()
        return first.mean() + (logits * 0 + 99).exp().mean()

    first = loss_of.__code__.co_firstlineno
    report = autopsied(Net(), loss_of=loss_of)
    for line in (first + 1, first + 2):
        expect(report, cure=("eps",))
        assert f"test_autopsy.py:{line} in loss_of" in report.tried[0].where, report


tells(
    "a batch that is wholly bad is no matter of samples",
    batch=(X / 0, Y),
    verdict="data",
    samples=(0, 1, 2, 3, 4, 5, 6, 7),
    advice="every sample is bad",
)


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


@pytest.mark.parametrize(
    ("loss_of", "advice"),
    [
        (contrast, "exp(x - x.amax(-1, keepdim=True))"),
        (partition, "torch.logsumexp(x, dim)"),
        (unlikely, "log(x.clamp(min=1e-6)) is finite, but another"),
    ],
)
def test_a_cure_is_the_same_step_as_in_float64_or_it_is_told_and_not_advised(loss_of, advice):
    net = Net()
    net.head.weight.data *= 9
    report = autopsied(net, loss_of=loss_of)
    expect(report, verdict="divergence", advice=advice)
    assert (report.cure is None) == (loss_of is unlikely)
    parted = [trial for trial in report.tried if trial.same_step is False]
    assert bool(parted) == (loss_of is not contrast), report


# --- The locator alone, for many steps


def test_entered_for_many_steps_it_forgets_what_is_freed():
    net = Net(
        lambda h: h + torch.where(h > 100, torch.log(h * 0), 0.0)
    )  # log(0), swallowed, at each step
    with Locator(None) as locator:
        for _ in range(40):
            loss = stepper(net)((X, Y), False)
        assert locator.origin_of([loss.detach()]) is None
        assert len(locator.origins) <= 4
        net.between = lambda h: torch.log(h * 0 - 1)
        loss = stepper(net)((X, Y), False)
    origin = locator.origin_of([loss.detach()])
    assert (origin.op, origin.module) == ("aten.log.default", "")
    assert not hooks._global_forward_hooks and not hooks._global_forward_pre_hooks


@needs_cuda  # its backward runs in another thread
@pytest.mark.parametrize(
    ("between", "phase"), [(lambda h: torch.log(h * 0 - 1), "forward"), (block, "backward")]
)
def test_forward_and_backward_faults_are_named_on_cuda(between, phase):
    report = autopsied(Net(between).cuda(), (X.cuda(), Y.cuda()))
    expect(report, verdict="divergence", module="", phase=phase)


@pytest.mark.parametrize(("step", "expected"), FAULTS)
def test_the_report_says_that(step, expected):
    between, batch, half, loss_of = step
    report = autopsied(Net(between), batch, half=half, loss_of=loss_of)
    expect(report, **expected)
    assert not report.op or "test_autopsy.py" in report.line, report
