"""fp32 on request: islands compute in fp32, evaluation is fp32 and nothing else, and a drift is named."""

import collections
import copy
import math
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from amp_policy import Capabilities, choose_policy, set_tf32
from fp32 import disagreement, fp32_eval, keep_fp32, pinned
from models import MODELS, wrap

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"))
both_devices = pytest.mark.parametrize("device", ["cpu", CUDA])


def skip_emulated(device, dtype):
    if device == "cuda" and dtype is BF16 and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU only emulates bfloat16")


def policy_for(name, device="cpu"):
    return choose_policy(name, Capabilities(device))


@pytest.fixture(autouse=True)
def clean_switches():
    torch.manual_seed(0)
    yield
    set_tf32(False)
    torch.backends.cudnn.allow_tf32 = True  # torch's default
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cuda")


class Net(nn.Module):
    """conv, BatchNorm, LayerNorm, linear; the call that the check of disagreement expects."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.ln, self.fc = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, images, labels):
        logits = self.fc(self.ln(F.relu(self.bn(self.conv(images))).flatten(2).mean(-1)))
        rows = F.cross_entropy(logits.float(), labels, reduction="none")
        return rows.mean(), {"loss": rows.detach(), "acc1": (logits.argmax(-1) == labels).float()}


def batch(device="cpu"):
    return torch.randn(6, 3, 6, 6, device=device), torch.arange(6, device=device) % 4


class Hot(nn.Module):
    """Leaves fp16 (and only fp16) on the way: a sum of squares of about 1e6, brought back by a square root."""

    def __init__(self, features=8):
        super().__init__()
        self.fc = nn.Linear(features, features)
        nn.init.constant_(self.fc.weight, 100.0)

    def forward(self, x, scale=1.0):
        self.inside = self.fc(x)
        return (self.inside * self.inside).clamp(min=1e-3).sqrt() * scale / 100.0


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
    assert out.dtype is F16 and out.isfinite().all()
    torch.testing.assert_close(out.float(), net(x), rtol=2e-3, atol=0)


@pytest.mark.parametrize(
    ("module", "given", "wanted"),
    [
        (nn.Linear(4, 4), F32, BF16),  # autocast would have returned half whatever came in
        (nn.Conv1d(2, 2, 1), F32, BF16),
        (nn.LayerNorm(4), BF16, BF16),
        (nn.LayerNorm(4), F32, F32),
        (nn.Sequential(nn.Linear(4, 4), nn.GELU()), F32, F32),  # a block on an fp32 residual stream
        (nn.Sequential(nn.Linear(4, 4), nn.GELU()), BF16, BF16),
        (nn.BatchNorm1d(2), BF16, BF16),
        (nn.LSTM(4, 4), BF16, BF16),  # nested outputs
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else None,
)
def test_the_output_dtype_of_an_island(module, given, wanted):
    net = nn.ModuleList([module])
    keep_fp32(net, ["0"])
    with torch.autocast("cpu", dtype=BF16):
        out = net[0](torch.randn(2, 2, 4).to(given))
    leaves = torch.utils._pytree.tree_leaves(out)
    assert {t.dtype for t in leaves} == {wanted}


def test_a_pinned_loss_is_not_lowered_and_integers_and_keywords_pass():
    loss = nn.CrossEntropyLoss(reduction="none")
    keep_fp32(loss, ["CrossEntropyLoss"])
    assert loss(torch.randn(3, 4).half(), torch.tensor([0, 1, 3])).dtype is F32

    class Scalar(nn.Module):
        def forward(self, x):
            return x.sum()

    scalar = Scalar()
    keep_fp32(scalar, ["Scalar"])
    assert scalar(torch.full((2, 40000), 1.0).half()).item() == 80000.0  # inf, had it been lowered
    embedding = nn.Embedding(1000, 4)
    keep_fp32(embedding, ["*"])
    assert torch.equal(embedding(torch.tensor([999]))[0], embedding.weight[999])
    hot = Hot()
    keep_fp32(hot, ["Hot"])
    assert hot(x=torch.ones(1, 8).half(), scale=2.0).dtype is F16


class Batch(NamedTuple):
    x: torch.Tensor
    ids: torch.Tensor


@dataclass
class Record:
    x: torch.Tensor
    ids: torch.Tensor


@pytest.mark.parametrize("wrapped", [
    lambda x, ids: {"batch": Batch(x, ids)}, lambda x, ids: {"batch": Record(x, ids)},
    lambda x, ids: {"batch": collections.UserDict(x=x, ids=ids)}, lambda x, ids: {"batch": {"x": x, "ids": ids}},
], ids=["named tuple", "dataclass", "mapping", "dict"])
def test_an_island_upcasts_keyword_inputs_in_whatever_they_come(wrapped):
    class Reader(nn.Module):
        def forward(self, batch):
            x, ids = (batch["x"], batch["ids"]) if hasattr(batch, "keys") else (batch.x, batch.ids)
            self.inside = x.dtype, ids.dtype
            return type(batch)(x=x * x, ids=ids) if not isinstance(batch, dict) else {"x": x * x, "ids": ids}

    reader = Reader()
    keep_fp32(reader, ["Reader"])
    out = reader(**wrapped(torch.ones(2).half(), torch.tensor([2049])))
    x, ids = (out["x"], out["ids"]) if hasattr(out, "keys") else (out.x, out.ids)
    assert reader.inside == (F32, torch.int64) and type(out) is type(wrapped(x, ids)["batch"])
    assert x.dtype is F16 and ids.tolist() == [2049]


def test_an_island_that_keeps_its_output_saves_what_exceeds_fp16():
    class Big(nn.Module):
        def forward(self, x):
            return x * 1e5

    net, x = nn.Sequential(nn.Linear(4, 4), Big(), nn.LayerNorm(4)), torch.randn(2, 4)
    with torch.autocast("cpu", dtype=F16):
        keep_fp32(net, ["1"])
        assert net[:2](x).isinf().any() and pinned(net, keep_output=True) == []
        keep_fp32(net, ["1"], keep_output=True)
        assert net(x).isfinite().all() and net[:2](x).dtype is F32
    assert pinned(net) == pinned(net, keep_output=True) == ["1"]


def test_pinning_is_by_name_or_type_idempotent_and_survives_a_checkpoint():
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
    keys = list(net.state_dict())
    assert keep_fp32(net, ["LayerNorm", "1.0"]) == ["1.1", "1.0"]
    assert keep_fp32(net, ["1.*"]) == ["1.0", "1.1"]
    assert pinned(net) == ["1.0", "1.1"]
    assert list(net.state_dict()) == keys
    fresh = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
    fresh.load_state_dict(net.state_dict())
    keep_fp32(fresh, pinned(net))
    assert pinned(fresh) == pinned(net)
    with pytest.raises(ValueError, match=r"no module matches 'blocks\.3'; there are 0, 1"):
        keep_fp32(net, ["blocks.3"])
    net[0].forward = lambda x: x
    with pytest.raises(ValueError, match="already been replaced"):
        keep_fp32(net, ["0"])


def test_a_deepcopy_of_an_island_uses_its_own_weights():
    net = nn.Sequential(nn.Linear(2, 2))
    keep_fp32(net, ["0"])
    twin = copy.deepcopy(net)
    with torch.no_grad():
        twin[0].weight.zero_(), twin[0].bias.zero_()
    assert pinned(twin) == ["0"]
    assert not twin(torch.ones(1, 2)).any() and net(torch.ones(1, 2)).any()


@pytest.mark.parametrize("name", ["O2", "O3"])
def test_a_module_pinned_later_with_half_parameters_computes_in_fp32_and_gets_its_gradient(name):
    net = policy_for(name).prepare(nn.Sequential(nn.Linear(8, 8), Hot(), nn.BatchNorm1d(8)))
    nn.init.ones_(net[0].weight)
    params = list(net.parameters())
    x = 4 + torch.rand(4, 8)
    assert net[:2](x).isinf().any()
    keep_fp32(net, ["1", "2"])
    out = net(x)
    assert net[1].inside.dtype is F32 and out.dtype is F16 and out.isfinite().all()
    assert net[2].running_mean.dtype is F32 and net[2].running_mean.any()  # statistics moved, not lost in a copy
    out.float().square().sum().backward()
    assert all(a is b for a, b in zip(params, net.parameters(), strict=True))
    weight = net[1].fc.weight
    assert weight.dtype is weight.grad.dtype is F16 and weight.grad.isfinite().all()


def test_a_module_pinned_before_prepare_keeps_fp32_weights_in_o2():
    net = nn.Sequential(nn.Linear(8, 8), Hot(), nn.Linear(8, 8))
    keep_fp32(net, ["1"])
    policy_for("O2").prepare(net)
    assert [m.weight.dtype for m in (net[0], net[1].fc, net[2])] == [F16, F32, F16]
    assert net(torch.rand(2, 8)).dtype is F16


@pytest.mark.parametrize("level", ["fp32", "bf16", "fp16", "O2"])
def test_islands_compile_without_a_graph_break(level):
    policy = policy_for(level)
    net = nn.Sequential(nn.Linear(8, 8), Hot(), nn.LayerNorm(8))
    policy.prepare(net)  # in O2 the island is pinned after the cast: it reads half parameters through copies
    keep_fp32(net, ["1", "LayerNorm"])
    x = torch.rand(4, 8)
    with policy.autocast():
        want = net(x)
        report = torch._dynamo.explain(net)(x)
        assert (report.graph_count, report.graph_break_count) == (1, 0)
        got = torch.compile(net, backend="eager", fullgraph=True)(x)
    assert got.dtype is want.dtype and torch.equal(got, want)
    got.float().sum().backward()
    assert net[1].fc.weight.grad is not None


def test_a_module_pinned_after_compile_counts():
    net = nn.Sequential(nn.Linear(8, 8), Hot())
    nn.init.constant_(net[0].weight, 1 / 3)
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    x = 4 + torch.rand(2, 8)
    with torch.autocast("cpu", dtype=F16):
        assert compiled(x).isinf().any()
        assert keep_fp32(compiled, ["1"]) == ["1"]  # the name has no "_orig_mod."
        before = compiled(x)
        assert before.isfinite().all()
        keep_fp32(compiled, ["0"])  # a module of torch's own, which dynamo knows
        assert torch.equal(compiled(x), net(x)) and not torch.equal(compiled(x), before)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("level", ["fp16", "O2"])
def test_islands_in_checkpointed_blocks_have_the_same_gradients(level, use_reentrant):
    policy, grads = policy_for(level), []
    for recompute in (False, True):
        torch.manual_seed(0)
        net = policy.prepare(nn.Sequential(nn.Linear(8, 8), Hot(), nn.Linear(8, 8)))
        keep_fp32(net, ["1"])
        x = torch.rand(2, 8, requires_grad=True)
        with policy.autocast():
            y = checkpoint(net, x, use_reentrant=use_reentrant) if recompute else net(x)
        y.float().sum().backward()
        grads.append([p.grad for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert all(g.isfinite().all() for g in grads[0])


@pytest.mark.parametrize("level", ["bf16", "O2"])
def test_an_island_pinned_inside_ddp_still_synchronises_every_gradient(tmp_path, level):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        policy, sent = policy_for(level), []
        ddp = DistributedDataParallel(policy.prepare(nn.Sequential(nn.Linear(8, 8), Hot())))

        def count(state, bucket):
            sent.extend(bucket.parameters())
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        ddp.register_comm_hook(None, count)
        for step in range(2):
            if step == 1:
                assert keep_fp32(ddp, ["1"]) == ["1"]  # healed after the wrapping; the name has no "module."
            sent.clear()
            with policy.autocast():
                ddp(torch.rand(2, 8)).float().sum().backward()
            assert {id(p) for p in sent} == {id(p) for p in ddp.parameters()}
        assert ddp.module[1].inside.dtype is F32
        with fp32_eval(ddp), torch.no_grad():
            assert ddp(torch.rand(2, 8)).dtype is F32
        sent.clear()
        with policy.autocast():
            ddp(torch.rand(2, 8)).float().sum().backward()
        assert {id(p) for p in sent} == {id(p) for p in ddp.parameters()}  # the hooks of DDP outlive the evaluation
    finally:
        torch.distributed.destroy_process_group()


# ---------------------------------------------------------------------------------------------------------------------
# evaluation in fp32


class Inner(nn.Module):
    """One layer, with half precision of its own making, planted in the ways that vendored code knows."""

    def __init__(self, way):
        super().__init__()
        self.fc, self.way, self.kept = nn.Linear(8, 8), way, torch.autocast("cpu", dtype=BF16)

    def forward(self, x):
        device, layer = x.device.type, self.fc
        if self.way == "context":
            with torch.autocast(device, dtype=BF16):
                return layer(x).float()
        if self.way == "a context used again":
            with self.kept:
                return (x @ x.T).float() @ x
        if self.way == "decorator":
            return torch.autocast(device, dtype=BF16)(layer)(x)
        if self.way == "plain function":
            return lowered(x, x.T).float() @ x
        if self.way == "state alone":
            torch.set_autocast_enabled(device, True)
            try:
                return layer(x).float()
            finally:
                torch.set_autocast_enabled(device, False)
        if self.way == "fp32 operations only":
            with torch.autocast(device, dtype=BF16):
                return F.mse_loss(x, x) + x
        if self.way == "checkpoint":
            return checkpoint(lambda x: lowered(x, x.T).float() @ x, x, use_reentrant=False)
        if self.way == "custom function":
            return Lowering.apply(x)
        if self.way == "off":  # this one is lawful
            with torch.autocast(device, enabled=False):
                return layer(x)
        with torch.autocast(device, dtype=BF16, enabled=torch.is_autocast_enabled(device)):  # lawful as well
            return layer(x)


def lowered(a, b):
    with torch.autocast(a.device.type, dtype=BF16, enabled=True):
        return a @ b


class Lowering(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (x.half() @ x.T.half()).float() @ x


WAYS = ("context", "a context used again", "decorator", "plain function", "state alone", "fp32 operations only",
        "checkpoint", "custom function")


@pytest.mark.parametrize("way", WAYS)
def test_half_precision_made_inside_fp32_eval_is_an_error_that_names_the_module(way):
    net, x = nn.Sequential(nn.Linear(8, 8), nn.ModuleDict({"inner": Inner(way)})["inner"]), torch.randn(4, 8)
    half = net(x)
    with pytest.raises(RuntimeError, match=r"fp32_eval: .* in 1(\.fc)? \(.*test_fp32.py:\d+\)") as error:  # noqa: SIM117
        with fp32_eval(net):
            net(x)
    assert "\n" not in str(error.value)
    assert torch.equal(net(x), half)  # and afterwards it is free again


def test_half_precision_between_the_modules_of_the_network_and_around_it_is_found():
    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(lowered(x, x).float())

    net, x = Between(), torch.randn(4, 4)
    with pytest.raises(RuntimeError, match=r"matmul ran under .* in the network itself"), fp32_eval(net):
        net(x)
    plain = nn.Linear(4, 4)
    with pytest.raises(RuntimeError, match="linear ran under"), fp32_eval(plain), torch.autocast("cpu", dtype=BF16):
        plain(x)
    with pytest.raises(RuntimeError, match="in code outside of the network"), fp32_eval(plain):
        lowered(x, x)
    with fp32_eval(plain):
        assert (x.half() * 2).dtype is F16  # the caller's own numbers are the caller's affair
    with pytest.raises(RuntimeError, match=r"float returned|dtype|returned torch\.float16"), fp32_eval(plain):
        plain(x.half())


@pytest.mark.parametrize("way", ["off", "as the caller"])
def test_a_module_that_switches_autocast_off_or_follows_its_caller_is_lawful(way):
    net, x = nn.Sequential(nn.Linear(8, 8), Inner(way)), torch.randn(4, 8)
    want = net.double()(x.double())
    net.float()
    with torch.autocast("cpu", dtype=BF16), fp32_eval(net):  # an outer autocast does not count
        torch.testing.assert_close(net(x).double(), want, rtol=1e-5, atol=1e-6)
        checkpoint(net, x.requires_grad_(), use_reentrant=False).sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("name", ["vit-test", "swin-test", "vmamba-test", "dit-test", "vlm-test", "slat_vae-test"])
def test_fp32_eval_costs_about_one_python_call_an_operation(name):
    build, _ = MODELS[name]
    net = wrap(build([f"class {i}" for i in range(10)], 32)).eval()
    x, y = torch.randn(2, 3, 32, 32), torch.tensor([1, 2])
    seen = collections.Counter()

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen["operations"] += 1
            return func(*args, **(kwargs or {}))

    class Calls(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen["calls"] += 1
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), fp32_eval(net), Calls(), Operations():
        net(x, y)
    assert 0 < seen["calls"] <= 1.5 * seen["operations"]


def test_compiled_code_with_casts_of_its_own_is_bypassed():
    net, x = nn.Sequential(nn.Linear(8, 8)), torch.randn(4, 8)
    compiled = torch.compile(net, backend="aot_eager")  # traces the casts into the graph, as inductor does
    with torch.autocast("cpu", dtype=BF16):
        half = compiled(x)
    with fp32_eval(compiled):
        assert compiled(x).dtype is F32
    with torch.autocast("cpu", dtype=BF16):
        assert half.dtype is BF16 and torch.equal(compiled(x), half)


def switches():
    b = torch.backends
    new = [s.fp32_precision for s in (b, b.cuda.matmul, b.mkldnn.matmul, b.cudnn.conv, b.cudnn.rnn)]
    try:
        return [*new, torch.get_float32_matmul_precision(), b.cudnn.allow_tf32, b.cuda.matmul.allow_tf32]
    except RuntimeError:
        return [*new, "unreadable"]


@pytest.mark.parametrize("how", ["default", "on", "medium", "newer"])
@pytest.mark.parametrize("crash", [False, True])
def test_fp32_eval_turns_tf32_off_and_restores_every_switch(how, crash):
    if how == "on":
        set_tf32(True)
    elif how == "medium":
        torch.set_float32_matmul_precision("medium")
    elif how == "newer":  # the interface after which the older one cannot be read
        torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.conv.fp32_precision = "tf32"
    before, net = switches(), nn.Linear(2, 2)
    try:
        with fp32_eval(net):
            inside = switches()
            if crash:
                raise KeyError("planted")
    except KeyError:
        assert crash
    assert inside[1:5] == ["ieee"] * 4 and inside[5:] == ["highest", False, False]
    assert switches() == before
    with torch.autocast("cpu", dtype=BF16):
        assert net(torch.ones(1, 2)).dtype is BF16


@pytest.mark.parametrize("name", ["O2", "O3"])
def test_half_parameters_are_upcast_for_evaluation_and_left_bit_identical(name):
    net = policy_for(name).prepare(Net()).eval()
    x, y = batch()
    params, before = list(net.parameters()), copy.deepcopy(net.state_dict())
    reference = Net().eval()
    reference.load_state_dict({k: v.float() for k, v in before.items()})
    with fp32_eval(net), torch.no_grad():
        assert {t.dtype for t in (*net.parameters(), *net.buffers()) if t.is_floating_point()} == {F32}
        loss, _ = net(x, y)
    torch.testing.assert_close(loss, reference(x, y)[0], rtol=1e-6, atol=0)
    assert all(a is b for a, b in zip(params, net.parameters(), strict=True))
    after = net.state_dict()
    assert all(after[k].dtype is v.dtype and torch.equal(after[k], v) for k, v in before.items())


def test_masters_are_evaluated_where_they_exist_and_a_backward_inside_leaves_the_gradients_alone():
    net = policy_for("O2").prepare(nn.Sequential(nn.Linear(4, 4)))
    masters = {p: p.detach().float() + 1e-5 for p in net.parameters()}  # below what fp16 resolves
    x = torch.randn(2, 4)
    with fp32_eval(net, masters):
        out = net(x)
        out.sum().backward()
    assert torch.equal(out, F.linear(x, *masters.values()))
    assert net[0].weight.grad is None and net[0].weight.dtype is F16


def test_tied_weights_stay_tied_in_fp32_eval():
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).half()
    net[1].weight = net[0].weight
    with fp32_eval(net):
        assert net(torch.randn(1, 4)).dtype is F32
    assert net[1].weight is net[0].weight and net[0].weight.dtype is F16


# ---------------------------------------------------------------------------------------------------------------------
# disagreement


class Classifier(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(8, 8), body, nn.Linear(8, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, images, labels):
        logits = self.head(self.drop(self.body(self.stem(images))))
        rows = F.cross_entropy(logits.float(), labels, reduction="none")
        return rows.mean(), {"loss": rows, "acc1": (logits.argmax(-1) == labels).float()}


@both_devices
@pytest.mark.parametrize("name", ["fp16", "O2"])
def test_the_layer_where_half_and_fp32_part_is_named(device, name):
    policy = policy_for(name, device)
    net = policy.prepare(Classifier(Hot()).to(device))
    nn.init.ones_(net.stem.weight)
    x, y = 4 + torch.rand(16, 8, device=device), torch.zeros(16, dtype=torch.long, device=device)
    x[:12] /= 1e3  # only the last four rows overflow
    verdict = disagreement(net, x, y, policy)
    assert verdict.parted and verdict.layer == "body"
    assert verdict.nonfinite == 0.25 and verdict.nonfinite_fp32 == 0.0
    assert not math.isfinite(verdict.loss) and math.isfinite(verdict.loss_fp32)
    assert "25.0% of rows non-finite" in str(verdict) and "part at body" in str(verdict)
    keep_fp32(net, [verdict.layer])
    assert not disagreement(net, x, y, policy).parted
    assert net.training and not net.head._forward_hooks


def test_a_finite_drift_is_named_too_and_agreement_is_silent():
    class Cancel(nn.Module):
        def forward(self, x):
            return (x + 2048.0) - 2048.0  # fp16 counts to 2048, so the fraction is lost; nothing overflows

    policy = policy_for("O2")
    net = policy.prepare(Classifier(Cancel()))
    with torch.no_grad():
        net.head.weight.mul_(20)
    x, y = torch.randn(64, 8), torch.randint(4, (64,))
    state = torch.get_rng_state()
    verdict = disagreement(net, x, y, policy)
    assert verdict.parted and verdict.layer == "body" and verdict.nonfinite == 0.0 and verdict.changed > 0
    assert torch.equal(torch.get_rng_state(), state)
    calm = disagreement(policy.prepare(Classifier(nn.Identity())), x, y, policy)
    assert not calm.parted and calm.layer == "" and "part" not in str(calm)


def test_bad_weights_are_not_blamed_on_precision():
    net = Classifier(nn.Identity())
    with torch.no_grad():
        net.head.bias[0] = math.nan
    verdict = disagreement(net, torch.randn(4, 8), torch.zeros(4, dtype=torch.long), policy_for("bf16"))
    assert not verdict.parted and verdict.nonfinite == verdict.nonfinite_fp32 == 1.0


class Output(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


class Tokens(nn.Module):
    """A language model in miniature. fp16 counts to 2048, so token 2049 is another token where ids become floats."""

    def __init__(self, gives):
        super().__init__()
        self.gives, self.table, self.body, self.head = gives, nn.Embedding(4096, 8), Hot(), nn.Linear(8, 8)

    def forward(self, batch=None, labels=None, input_ids=None):
        ids = batch.ids if isinstance(batch, Record) else batch if input_ids is None else input_ids
        labels = batch.ids % 8 if isinstance(batch, Record) else labels
        assert ids.dtype is torch.int64
        logits = self.head(self.body(self.table(ids).abs() + 4))
        if self.gives == "logits":
            return logits
        loss = F.cross_entropy(logits.float(), labels)
        return Output(loss, logits) if self.gives == "output" else (loss, {}) if self.gives == "pair" else loss


def cross_entropy(logits, labels):
    return F.cross_entropy(logits.float(), labels, reduction="none")


IDS = torch.tensor([2049, 4095, 7, 8])


@pytest.mark.parametrize(("gives", "inputs", "labels", "loss"), [
    ("output", {"input_ids": IDS, "labels": IDS % 8}, None, None),
    ("output", collections.UserDict(input_ids=IDS, labels=IDS % 8), None, None),
    ("output", Record(torch.ones(4), IDS), None, None),
    ("pair", IDS, IDS % 8, None),
    ("logits", IDS, IDS % 8, cross_entropy),
    ("logits", {"input_ids": IDS}, IDS % 8, cross_entropy),
], ids=["dict", "mapping", "dataclass", "loss and metrics", "logits", "logits of a dict"])
def test_disagreement_takes_batches_and_outputs_as_other_projects_have_them(gives, inputs, labels, loss):
    net, policy = Tokens(gives), policy_for("fp16")
    verdict = disagreement(net, inputs, labels, policy, loss=loss)
    assert verdict.parted and verdict.layer == "body" and verdict.nonfinite == 1.0 and verdict.nonfinite_fp32 == 0.0
    keep_fp32(net, ["body"])
    assert not disagreement(net, inputs, labels, policy, loss=loss).parted


def test_disagreement_refuses_an_output_that_holds_no_loss():
    with pytest.raises(TypeError, match=r"returned a Tensor, which is neither .*; for logits pass loss=") as error:
        disagreement(Tokens("logits"), IDS, None, policy_for("fp16"))
    assert "\n" not in str(error.value)
