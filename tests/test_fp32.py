"""fp32 on request: islands compute in fp32, evaluation is fp32 and nothing else, drift is named."""

import copy
import math
import pickle
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from helpers import both_devices, policy_for, same, snapshot
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from amp_policy import set_tf32
from fp32 import disagreement, fp32_eval, keep_fp32, pinned

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


pytestmark = pytest.mark.usefixtures("clean_switches")


class Hot(nn.Module):
    """Leaves fp16 (and only fp16) on the way: squares of about 1e6, and their square roots."""

    def __init__(self, features=8):
        super().__init__()
        self.fc = nn.Linear(features, features)
        nn.init.constant_(self.fc.weight, 100.0)

    def forward(self, x, scale=1.0):
        self.inside = self.fc(x)
        squares = self.inside * self.inside
        return squares.clamp(min=1e-3).sqrt() * scale / 100.0


@both_devices
def test_an_island_heals_an_overflow_and_returns_what_the_caller_would_have_had(device):
    net = nn.Sequential(nn.Linear(8, 8), Hot()).to(device)
    x = 4 + torch.rand(2, 8, device=device)
    nn.init.ones_(net[0].weight)

    with torch.autocast(device, dtype=F16):
        assert net(x).isinf().any()
        assert keep_fp32(net, ["1"]) == ["1"]
        out = net(x)

    assert net[1].inside.dtype is F32
    assert out.dtype is F16
    assert out.isfinite().all()
    torch.testing.assert_close(out.float(), net(x), rtol=2e-3, atol=0)


@pytest.mark.parametrize(
    "module, given, wanted",
    [
        (nn.Linear(4, 4), F32, BF16),  # autocast would have returned half whatever came in
        (nn.LayerNorm(4), BF16, BF16),
        (nn.Sequential(nn.Linear(4, 4), nn.GELU()), F32, F32),  # a block on an fp32 residual stream
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else None,
)
def test_the_output_dtype_of_an_island(module, given, wanted):
    net = nn.ModuleList([module])
    keep_fp32(net, ["0"])
    x = torch.randn(2, 4).to(given)
    with torch.autocast("cpu", dtype=BF16):
        assert net[0](x).dtype is wanted


class Batch(NamedTuple):
    x: torch.Tensor
    ids: torch.Tensor


def test_an_island_upcasts_nested_keywords_and_lowers_no_scalar_and_no_integer():
    class Reader(nn.Module):
        def forward(self, batch):
            pair = batch["pair"]
            self.inside = pair.x.dtype
            return {"sum": pair.x.sum(), "x": pair.x, "ids": pair.ids}

    reader = Reader()
    keep_fp32(reader, ["Reader"])
    pair = Batch(torch.ones(2, 40000).half(), torch.tensor([2049]))
    out = reader(batch={"pair": pair})
    assert reader.inside is F32
    assert out["sum"].item() == 80000.0  # inf, had it been lowered
    assert out["x"].dtype is F16
    assert out["ids"].tolist() == [2049]


def test_an_island_that_keeps_its_output_saves_what_exceeds_fp16():
    class Big(nn.Module):
        def forward(self, x):
            return x * 1e5

    net = nn.Sequential(nn.Linear(4, 4), Big(), nn.LayerNorm(4))
    x = torch.randn(2, 4)
    with torch.autocast("cpu", dtype=F16):
        keep_fp32(net, ["1"])
        assert net[:2](x).isinf().any()
        assert pinned(net, keep_output=True) == []

        keep_fp32(net, ["1"], keep_output=True)
        assert net(x).isfinite().all()
        assert net[:2](x).dtype is F32
    assert pinned(net) == pinned(net, keep_output=True) == ["1"]


def test_pinning_is_by_name_or_type_idempotent_and_survives_a_checkpoint():
    block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    net = nn.Sequential(nn.Linear(4, 4), block)
    keys = list(net.state_dict())

    assert keep_fp32(net, ["LayerNorm", "1.0"]) == ["1.1", "1.0"]
    assert keep_fp32(net, ["1.*"]) == pinned(net) == ["1.0", "1.1"]
    assert list(net.state_dict()) == keys
    assert keep_fp32(net, nn.Linear) == keep_fp32(net, ["Linear"]) == ["0", "1.0"]
    lazy = nn.Sequential(nn.LazyLinear(2), nn.GELU())
    assert keep_fp32(lazy, [nn.Linear]) == ["0"]  # a subclass

    twin = copy.deepcopy(pickle.loads(pickle.dumps(net)))
    nn.init.zeros_(twin[0].weight)
    assert pinned(twin) == pinned(net)
    (row,) = twin[0](torch.ones(1, 4))
    assert torch.equal(row, twin[0].bias)  # its own weights

    with pytest.raises(ValueError, match=r"no module matches 'blocks\.3'; there are 0, 1"):
        keep_fp32(net, ["blocks.3"])

    net[1].forward = lambda x: x
    with pytest.raises(ValueError, match="already been replaced"):
        keep_fp32(net, ["1"])


def test_a_module_pinned_later_with_half_parameters_has_fp32_inside_and_gradients_outside():
    net = policy_for("O3").prepare(nn.Sequential(nn.Linear(8, 8), Hot(), nn.BatchNorm1d(8)))
    nn.init.ones_(net[0].weight)
    x = (4 + torch.rand(4, 8)).requires_grad_()
    assert net[:2](x).isinf().any()
    keep_fp32(net, ["1", "2"])

    grads = []
    blocks = [partial(checkpoint, net, use_reentrant=reentrant) for reentrant in (False, True)]
    for forward in (net, *blocks):
        net.zero_grad()
        out = forward(x)
        out.float().square().sum().backward()
        grads.append([p.grad for p in net.parameters()])

    assert net[1].inside.dtype is F32
    assert out.dtype is F16
    assert out.isfinite().all()
    assert net[2].running_mean.dtype is F32
    assert net[2].running_mean.any()  # statistics moved, not lost in a copy

    plain, *of_checkpoint = grads
    assert {g.dtype for g in plain} == {F16}
    assert all(g.isfinite().all() for g in plain)
    for recomputed in of_checkpoint:
        assert same(plain, recomputed)


@pytest.mark.parametrize("pinned", [["0"], [""]], ids=["the module", "its owner"])
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_a_half_island_keeps_the_norm_that_a_hook_computes(norm, pinned):
    """It lies in no list of parameters, and spectral_norm multiplies buffers outside of forward."""
    nets = []
    for _ in range(2):  # torch cannot copy it
        torch.manual_seed(0)
        net = nn.Sequential(
            norm(nn.Linear(8, 8)),
            nn.BatchNorm1d(8),
        )
        nets.append(net.bfloat16())
    net, plain = nets
    x = torch.randn(64, 8).bfloat16()

    keep_fp32(net, pinned)
    for _ in range(3):
        out = net(x)
        out.float().square().mean().backward()
        torch.testing.assert_close(out, plain(x), rtol=0.1, atol=0.1)
    assert out.dtype is BF16
    assert all(p.grad is not None for p in net.parameters())


def test_a_module_pinned_after_compile_counts_without_a_graph_break():
    net = nn.Sequential(nn.Linear(8, 8), Hot().half())  # read through fp32 copies
    nn.init.constant_(net[0].weight, 1 / 3)
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    x = 4 + torch.rand(2, 8)

    with torch.autocast("cpu", dtype=F16):
        assert compiled(x).isinf().any()

        assert keep_fp32(compiled, ["1"]) == ["1"]  # the name has no "_orig_mod."
        before = compiled(x)
        assert before.isfinite().all()

        keep_fp32(compiled, ["0"])  # a module of torch's own, which dynamo knows
        out = compiled(x)
        assert torch.equal(out, net(x))
        assert not torch.equal(out, before)

    out.float().sum().backward()
    assert net[1].fc.weight.grad.any()


def test_an_island_pinned_inside_ddp_still_synchronises_every_gradient(one_rank):
    policy = policy_for("O2")
    net = nn.Sequential(nn.Linear(8, 8), Hot())
    ddp = DistributedDataParallel(policy.prepare(net))
    sent = []

    def count(state, bucket):
        sent.extend(bucket.parameters())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, count)
    assert keep_fp32(ddp, ["1"]) == ["1"]  # after the wrapping; the name has no "module."
    for _ in range(2):  # the hooks of DDP outlive the evaluation
        sent.clear()
        with policy.autocast():
            out = ddp(torch.rand(2, 8))
            out.float().sum().backward()
        assert {id(p) for p in sent} == {id(p) for p in ddp.parameters()}
        assert ddp.module[1].inside.dtype is F32

        with fp32_eval(ddp), torch.no_grad():
            assert ddp(torch.rand(2, 8)).dtype is F32


# --- evaluation in fp32


class Inner(nn.Module):
    """One layer, with half precision of its own making, in the ways that vendored code knows."""

    def __init__(self, way):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.way = way

    def forward(self, x):
        return self.way(self.fc, x)


def lowered(function, x, enabled=True):
    with torch.autocast("cpu", dtype=BF16, enabled=enabled):
        return function(x).float()


def checkpointed(layer, x):
    return checkpoint(lowered, lambda x: x @ x.T, x, use_reentrant=False) @ x


class Lowering(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (x.half() @ x.T.half()).float() @ x


def custom_function(layer, x):
    return Lowering.apply(x)


def as_the_caller(layer, x):
    return lowered(layer, x, torch.is_autocast_enabled("cpu"))


@pytest.mark.parametrize("way", [lowered, checkpointed, custom_function])
def test_half_precision_made_inside_fp32_eval_is_an_error_that_names_the_module(way):
    net = nn.Sequential(nn.Linear(8, 8), Inner(way))
    x = torch.randn(4, 8)
    half = net(x)
    # Not `as error`: that is a cycle of this frame, and until it is collected checkpoint()'s hooks
    # on saved tensors stay.
    with pytest.raises(RuntimeError, match=r"fp32_eval: .* in 1(\.fc)?: let"), fp32_eval(net):
        net(x)
    assert torch.equal(net(x), half)  # and afterwards it is free again


def test_half_precision_around_the_network_is_found_only_where_it_concerns_the_network():
    plain = nn.Linear(4, 4)
    x = torch.randn(4, 4)
    inside = pytest.raises(RuntimeError, match="linear ran under autocast in the network itself")
    with inside, fp32_eval(plain):
        lowered(plain, x)

    outside = pytest.raises(RuntimeError, match="in outside of the network")
    with outside, fp32_eval(plain):
        lowered(x.matmul, x)

    with fp32_eval(plain):
        doubled = x.half() * 2
    assert doubled.dtype is F16  # the caller's own numbers are the caller's affair

    half_input = pytest.raises(RuntimeError, match=r"float returned|dtype|returned torch\.float16")
    with half_input, fp32_eval(plain):
        plain(x.half())


@pytest.mark.parametrize("way", [partial(lowered, enabled=False), as_the_caller])
def test_a_module_that_switches_autocast_off_or_follows_its_caller_is_lawful(way):
    net = nn.Sequential(nn.Linear(8, 8), Inner(way))
    x = torch.randn(4, 8)
    want = net(x)
    with torch.autocast("cpu", dtype=BF16), fp32_eval(net):  # an outer autocast does not count
        assert torch.equal(net(x), want)
        out = checkpoint(net, x.requires_grad_(), use_reentrant=False)
        out.sum().backward()
    assert x.grad.isfinite().all()


def test_compiled_code_with_casts_of_its_own_is_bypassed():
    net = nn.Sequential(nn.Linear(8, 8))
    x = torch.randn(4, 8)
    compiled = torch.compile(net, backend="aot_eager")  # with the casts in the graph
    half = torch.autocast("cpu", dtype=BF16)

    with half:
        before = compiled(x)
    with fp32_eval(compiled):
        precise = compiled(x)
    with half:
        again = compiled(x)

    assert before.dtype is BF16
    assert precise.dtype is F32
    assert torch.equal(again, before)


def switches():
    b = torch.backends
    new = [
        b.fp32_precision,
        b.cuda.matmul.fp32_precision,
        b.mkldnn.matmul.fp32_precision,
        b.cudnn.conv.fp32_precision,
        b.cudnn.rnn.fp32_precision,
    ]
    try:
        older = [
            torch.get_float32_matmul_precision(),
            b.cudnn.allow_tf32,
            b.cuda.matmul.allow_tf32,
        ]
    except RuntimeError:
        older = ["unreadable"]
    return new + older


@pytest.mark.parametrize("how", ["default", "on", "newer"])
def test_fp32_eval_turns_tf32_off_and_restores_every_switch(how):
    if how == "on":
        set_tf32(True)
    elif how == "newer":  # the interface after which the older one cannot be read
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        torch.backends.cudnn.conv.fp32_precision = "tf32"
    before = switches()
    net = nn.Linear(2, 2)

    with pytest.raises(KeyError, match="planted"), fp32_eval(net):
        inside = switches()
        raise KeyError("planted")

    assert inside[1:5] == ["ieee"] * 4
    assert inside[5:] == ["highest", False, False]
    assert switches() == before
    with torch.autocast("cpu", dtype=BF16):
        assert net(torch.ones(1, 2)).dtype is BF16


def test_half_weights_are_evaluated_as_their_fp32_copies_or_masters_and_stay_bit_identical():
    net = nn.Sequential(
        nn.Linear(4, 4, bias=False),
        nn.Linear(4, 4, bias=False),
        nn.BatchNorm1d(4),
    )
    net[1].weight = net[0].weight  # tied
    nn.init.constant_(net[2].running_mean, 1 / 3)
    net.half().eval()
    reference = copy.deepcopy(net).float()
    half = net[0].weight
    before = snapshot(net)
    x = torch.randn(2, 4)
    master = half.detach().float() + 1e-5  # below what fp16 resolves

    for masters in ({}, {half: master}):
        with fp32_eval(net, masters):
            out = net(x)
            out.sum().backward()
        assert torch.equal(out, reference(x))
        reference[0].weight.data.copy_(master)

    assert same(before, snapshot(net))
    assert net[0].weight is net[1].weight is half
    assert half.grad is None


# --- disagreement


class Classifier(nn.Module):
    """Returns its loss in one of the ways of other projects."""

    def __init__(self, body, gives="rows"):
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.body = body
        self.head = nn.Linear(8, 4)
        nn.init.ones_(self.stem.weight)
        self.drop = nn.Dropout(0.5)
        self.gives = gives

    def forward(self, images, labels=None):
        features = self.body(self.stem(images))
        logits = self.head(self.drop(features))
        if self.gives == "logits":
            return logits
        rows = F.cross_entropy(logits.float(), labels, reduction="none")
        if self.gives == "mapping":
            return {"loss": rows.mean(), "logits": logits}
        right = logits.argmax(-1) == labels
        metrics = {"loss": rows, "acc1": right.float()}
        return rows.mean(), metrics if self.gives == "rows" else {}


def test_a_finite_drift_is_named_too_and_agreement_is_silent():
    class Cancel(nn.Module):
        def forward(self, x):
            return (x + 2048.0) - 2048.0  # fp16 counts to 2048: the fraction is lost

    policy = policy_for("O2")
    x = torch.randn(64, 8)
    y = torch.randint(4, (64,))
    for body, bias, layer in (
        (Cancel(), 0.0, "body"),
        (nn.Identity(), 0.0, ""),
        (nn.Identity(), math.nan, ""),  # bad weights are not blamed on precision
    ):
        net = policy.prepare(Classifier(body))
        net.head.weight.data.mul_(20)
        net.head.bias.data.fill_(bias)

        state = torch.get_rng_state()
        verdict = disagreement(net, x, y, policy)

        assert torch.equal(torch.get_rng_state(), state)
        assert (verdict.parted, verdict.layer) == (bool(layer), layer)
        assert verdict.nonfinite == verdict.nonfinite_fp32 == math.isnan(bias)
        assert (verdict.changed > 0) >= bool(layer)


X = torch.full((16, 8), 4.5)
X[:12] /= 1e3  # only the last four rows overflow
Y = torch.zeros(16, dtype=torch.long)


@both_devices
@pytest.mark.parametrize(
    "name, gives, inputs, labels, loss, share",
    [
        ("fp16", "rows", X, Y, None, 0.25),
        ("O2", "rows", X, Y, None, 0.25),
        ("fp16", "mapping", {"images": X, "labels": Y}, None, None, 1.0),  # a mean is one number
        ("fp16", "pair", X, Y, None, 1.0),
        ("fp16", "logits", X, Y, nn.CrossEntropyLoss(reduction="none"), 0.25),
        ("fp16", "logits", {"images": X}, Y, F.cross_entropy, 1.0),
    ],
)
def test_the_layer_where_half_and_fp32_part_is_named_whatever_batches_and_outputs_look_like(
    device, name, gives, inputs, labels, loss, share
):
    policy = policy_for(name, device)
    net = policy.prepare(Classifier(Hot(), gives).to(device))
    batch = tree_map_only(torch.Tensor, lambda t: t.to(device), (inputs, labels))

    verdict = disagreement(net, *batch, policy, loss=loss)
    assert verdict.parted
    assert verdict.layer == "body"
    assert (verdict.nonfinite, verdict.nonfinite_fp32) == (share, 0.0)
    assert not math.isfinite(verdict.loss)
    assert math.isfinite(verdict.loss_fp32)
    assert f"{share:.1%} of rows non-finite" in str(verdict)
    assert "part at body" in str(verdict)

    keep_fp32(net, [verdict.layer])
    again = disagreement(net, *batch, policy, loss=loss)
    assert not again.parted
    assert net.training
    assert not nn.modules.module._global_forward_hooks


def test_disagreement_says_that_a_loss_outside_of_the_network_is_to_be_passed():
    half = torch.autocast("cpu", dtype=F16)
    linear = nn.Linear(8, 8)
    with pytest.raises(TypeError, match=r"Linear: too many positional arguments; .* pass loss="):
        disagreement(linear, X, Y, half)
    gives_logits = Classifier(Hot(), "logits")
    with pytest.raises(TypeError, match=r"neither .* for logits pass loss="):
        disagreement(gives_logits, X, None, half)
