"""Plant a bad gradient, see nothing move; take good ones, compare with torch.optim and float64."""

import copy
import io
import math
from functools import partial

import pytest
import torch
from helpers import Operations, both_devices, ranks_agree, same, snapshot
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from extras.muon import Muon, matrices
from optim import ClippedAdamW, Schedule, param_groups, refusal, warmup_cosine
from trainer.flags import scaled_lr
from trainer.resume import widen

SHAPES = [(7, 5), (5,), (4, 3, 3, 3), (1,), (33,)]
MATRICES = [(64, 32), (8, 12, 3, 3), (64, 32), (16, 48)]


def make_params(dtype=torch.float32, device="cpu", shapes=SHAPES):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=g).to(device, dtype).requires_grad_() for s in shapes]


def set_grads(params, seed, size=1.0):
    g = torch.Generator().manual_seed(1000 + seed)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=g) * size).to(p.device, p.dtype)


def reloaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


VARIANTS = {
    "fp32": {},
    "amsgrad": dict(amsgrad=True),
    "no clip": dict(clip=None),
    "fp16 masters": dict(masters=True, dtype=torch.float16),
    "bf16 masters": dict(masters=True, dtype=torch.bfloat16),
    "half state": dict(masters=False, dtype=torch.float16),
    "Muon": {},
    "Muon, bf16 masters": dict(dtype=torch.bfloat16),
}


def grouped(params):
    return [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.1, "lr_scale": 0.5}]


def build(variant, device="cpu"):
    options = dict(VARIANTS[variant])
    is_muon = variant.startswith("Muon")
    shapes = MATRICES if is_muon else SHAPES
    params = make_params(options.pop("dtype", torch.float32), device, shapes)
    if is_muon:  # the gradients of the filter have another memory layout
        params[1].data = params[1].data.to(memory_format=torch.channels_last)
        optimizer = Muon(params, lr=5e-3, momentum=0.6, masters=True)
    else:
        optimizer = ClippedAdamW(grouped(params), lr=1e-2, **options)
    return params, optimizer, Schedule([optimizer], warmup_cosine(20, 5))


@both_devices
@pytest.mark.parametrize("amsgrad", [False, True])
def test_twenty_steps_equal_unscale_clip_and_adamw_in_float64(device, amsgrad):
    params = make_params(device=device)
    ours = ClippedAdamW(grouped(params), 1e-2, amsgrad=amsgrad, clip=5.0)
    exact = [p.detach().cpu().double().requires_grad_() for p in params]
    reference = torch.optim.AdamW(grouped(exact), 1e-2, amsgrad=amsgrad, foreach=False)
    clipped = 0
    for i in range(20):
        scale = 2.0 ** (16 - i % 3)
        set_grads(params, i, scale if i % 2 else scale / 10)
        for p, q in zip(params, exact, strict=True):
            q.grad = p.grad.cpu().double() / scale
        result = ours.step(grad_scale=torch.tensor(scale, device=device))
        norm = nn.utils.clip_grad_norm_(exact, 5.0).item()
        reference.step()
        assert result.grad_norm.item() == pytest.approx(norm, rel=1e-6)
        left = nn.utils.get_total_norm([p.grad for p in params]).item()  # of what was used
        assert left == pytest.approx(min(norm, 5.0), rel=1e-5)
        clipped += norm > 5
    assert 5 < clipped < 15  # both sides of the threshold were taken
    close = {"rtol": 2e-6, "atol": 2e-6, "check_dtype": False, "check_device": False}
    torch.testing.assert_close(params, exact, **close)


def everything(params, optimizer, schedule):
    """Muon has its own order of states."""
    states = [optimizer.state[p] for p in params]
    return snapshot(params, states, [*optimizer.masters.values()], schedule)


FAULTS = [  # a number in the gradient, found_inf, grad_scale
    (math.nan, 0.0, 1.0),
    (math.inf, 0.0, 1.0),
    (1.0, 1.0, 1.0),
    (1.0, 0.0, 0.0),
    (1e20, 0.0, 1.0),  # its square overflows
]


@both_devices
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_with_rejected_steps_that_is_resumed_is_the_run_without_them(variant, device):
    (good, clean, rates), (bad, dirty, dirty_rates) = build(variant, device), build(variant, device)
    for i, (number, found_inf, scale) in enumerate(FAULTS):
        if i == 3:
            weights, *states = reloaded([bad, dirty.state_dict(), dirty_rates.state_dict()])
            kept = snapshot(states)
            bad, dirty, dirty_rates = build(variant, device)
            torch._foreach_copy_([p.detach() for p in bad], weights)
            dirty.load_state_dict(states[0])
            dirty_rates.load_state_dict(states[1])
        if i == 4:
            bad, dirty, dirty_rates = copy.deepcopy((bad, dirty, dirty_rates))
        set_grads(bad, i)
        bad[2].grad.view(-1)[1] = torch.tensor(number)
        decided = variant.startswith("Muon")  # by a guard
        if found_inf or decided:
            dirty.found_inf = torch.ones((), device=device)
        dirty.grad_scale = torch.tensor(scale, device=device)
        result = dirty.step()
        assert decided or result.found_inf == 1
        dirty_rates.update(torch.ones((), device=device))
        vars(dirty).pop("found_inf", None)
        del dirty.grad_scale
        for params, optimizer, schedule in ((good, clean, rates), (bad, dirty, dirty_rates)):
            set_grads(params, i)
            result = optimizer.step()
            schedule.update(torch.zeros((), device=device) if decided else result.found_inf)
    assert rates.updates == len(FAULTS)
    assert same(everything(good, clean, rates), everything(bad, dirty, dirty_rates))
    assert same(kept, snapshot(states)), "the checkpoint is as it was"
    assert all(torch.equal(p, master.to(p.dtype)) for p, master in dirty.masters.items())
    dtypes = {t.dtype for state in dirty.state.values() for t in state.values()}
    assert dtypes == {torch.float32} or variant == "half state"


def test_masters_train_as_fp32_weights_do_and_so_do_half_weights_once_widened():
    half, optimizer, _ = build("bf16 masters")
    straight = [p.detach().float().requires_grad_() for p in half]
    reference = ClippedAdamW(grouped(straight))
    for g, other in zip(reference.param_groups, optimizer.param_groups, strict=True):
        g["lr"] = other["lr"]
    for i in range(4):
        set_grads(half, i)
        set_grads(straight, i)
        if i < 2:  # what a half gradient keeps
            for p in straight:
                p.grad = p.grad.bfloat16().float()
        reference.step()
        optimizer.step()
        if i == 1:
            assert same([p.bfloat16() for p in straight], half)
            widen([optimizer])
    assert not optimizer.masters and same(snapshot(straight), snapshot(half))


def test_what_has_no_gradient_stays_and_it_is_said_once_if_nothing_ever_had_one(recwarn):
    params, optimizer, _ = build("fp16 masters")
    for _ in range(4):
        before = snapshot(params, optimizer)
        optimizer.grad_scale = torch.tensor(2.0)
        result = optimizer.step()
        assert result.found_inf == result.grad_norm == 0
        assert optimizer.step(lambda: "the loss") == "the loss"
        assert same(before, snapshot(params, optimizer))
    [warning] = recwarn
    assert warning.filename == __file__ and "no parameter of this optimizer" in str(warning.message)
    for i in range(2):
        set_grads(params, i)
        params[0].grad = params[1].grad = None
        [before] = snapshot(optimizer.masters)
        optimizer.step()
        moved = [not torch.equal(before[p], master) for p, master in optimizer.masters.items()]
        assert moved == [False, False, True, True, True]
    optimizer.zero_grad()
    optimizer.step()
    assert len(recwarn) == 1


@both_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_norm_is_accumulated_in_fp32_and_exact_over_large_tensors(dtype, device):
    p = (100 * torch.randn(5_000_000)).to(device, dtype)
    p.grad = p.clone()
    exact = p.double().square().sum().sqrt().item()
    assert exact > 65504  # an fp16 norm would be inf
    norm = ClippedAdamW([p], masters=True).step().grad_norm
    assert norm.item() == pytest.approx(exact, rel=2e-4)  # of 5 million


def test_the_schedule_has_its_closed_form():
    s = warmup_cosine(100, 10, final=0.1)
    assert s.dtype == torch.float32 and len(s) == 101
    assert s[[0, 9, 10, 55, 100]].tolist() == pytest.approx([0.1, 1, 1, 0.55, 0.1])
    assert warmup_cosine(100, 10, 0.2, "linear")[55].item() == pytest.approx(0.6)
    assert warmup_cosine(100, 10, kind="constant")[[10, 55, 100]].tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="unknown kind 'cosin': choose from cosine, linear, const"):
        warmup_cosine(100, 10, kind="cosin")
    lr, sentence = scaled_lr(1e-3, 1024, 256, "sqrt")
    assert lr == pytest.approx(2e-3) and "1024 / 256" in sentence and "sqrt" in sentence


@pytest.mark.parametrize("make", [torch.optim.SGD, ClippedAdamW])
def test_a_schedule_moves_any_optimizer_by_accepted_updates_and_resumes(make):
    def start():
        first, second, *_ = make_params()
        groups = [{"params": [first]}, {"params": [second], "lr_scale": 0.5}]
        optimizer = make(groups, torch.tensor(1.0))
        return optimizer, Schedule([optimizer], warmup_cosine(2, final=0.25))

    optimizer, schedule = start()
    rates = []
    for rejected in (0.0, 1.0, 0.0, 0.0, 0.0):
        rates.append(schedule.lr.item())
        assert [float(g["lr"]) for g in optimizer.param_groups] == [rates[-1], rates[-1] / 2]
        set_grads([p for g in optimizer.param_groups for p in g["params"]], 0)
        optimizer.step()
        schedule.update(torch.tensor(rejected))
    assert rates == pytest.approx([1, 0.625, 0.625, 0.25, 0.25])  # the last one goes on
    schedule.slow_down(0.5)
    other, _ = start()
    other.load_state_dict(reloaded(optimizer.state_dict()))
    resumed = Schedule([other], warmup_cosine(2, final=0.25))  # the peaks are of the start
    resumed.load_state_dict(reloaded(schedule.state_dict()))
    resumed.slow_down(0.5)
    assert [float(g["lr"]) for g in other.param_groups] == pytest.approx([0.0625, 0.03125])
    assert resumed.updates == 4


def test_multipliers_that_are_whole_numbers_leave_the_rates_as_they_are():
    optimizer = torch.optim.SGD(make_params(), 0.1)
    schedule = Schedule([optimizer], torch.tensor([1, 2]))
    rates = [schedule.lr.item()]
    schedule.update(torch.zeros(()))
    rates.append(optimizer.param_groups[0]["lr"].item())
    assert rates == pytest.approx([0.1, 0.2])


@both_devices
def test_a_group_that_is_added_between_two_steps_trains_as_if_it_had_been_there(device):
    """Unfreezing step by step."""

    def start(added):
        params = make_params(torch.float16, device)
        groups = [params[:2], params[2:]]
        first = ClippedAdamW(groups[0], 1e-2, masters=True)
        second = torch.optim.SGD(make_params(device=device), 0.1, momentum=0.9)
        group = {"params": groups[1], "lr": 3e-3, "lr_scale": 0.5}
        if not added:
            first.add_param_group(group)
        schedule = Schedule([first, second], warmup_cosine(8, 2))
        return params, first, second, schedule, group

    runs = start(False), start(True)
    for i in range(6):
        for params, first, second, schedule, group in runs:
            if i == 3 and len(first.param_groups) == 1:
                first.add_param_group(group)
                schedule.slow_down(1)
            set_grads(params if i >= 3 else params[:2], i)
            set_grads(second.param_groups[0]["params"], i)
            second.step()
            schedule.update(first.step().found_inf)
    there, joined = (
        snapshot(
            params,
            [*first.masters.values()],
            [g["lr"] for o in (first, second) for g in o.param_groups],
            schedule.lr,
        )
        for params, first, second, schedule, _ in runs
    )
    assert same(there, joined)


class Scan(nn.Module):
    def __init__(self):
        super().__init__()
        self.A_log = nn.Parameter(torch.ones(4, 8))
        self.proj = nn.Linear(4, 8)
        self.norm = nn.LayerNorm((2, 4))

    def no_weight_decay(self):
        return {"A_log", "a name of another model"}


def test_groups_by_shape_by_type_by_pattern_and_by_the_models_own_list():
    net = nn.ModuleDict(
        {
            "embed": nn.Embedding(9, 4),
            "block": Scan(),
            "conv": nn.Conv2d(3, 4, 3),
            "frozen": nn.Linear(2, 2).requires_grad_(False),
            "head": nn.Linear(4, 2),
        }
    )
    groups = param_groups(net, 0.1, ["head.w*"], {"block.*": 0.5}, skip=[net["conv"].weight])
    names = {p: name for name, p in net.named_parameters()}
    split = {(g["weight_decay"], g["lr_scale"]): {names[p] for p in g["params"]} for g in groups}
    assert split == {
        (0.0, 1.0): {"embed.weight", "conv.bias", "head.weight", "head.bias"},
        (0.0, 0.5): {"block.A_log", "block.proj.bias", "block.norm.weight", "block.norm.bias"},
        (0.1, 0.5): {"block.proj.weight"},
    }


def test_a_pattern_that_matches_no_name_is_refused():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    net[2].weight = net[0].weight  # tied
    net[0].requires_grad_(False)
    for there in ("0.bias", "1.running_mean", "2.weight"):
        assert param_groups(net, no_decay=[there], lr_scale={there: 0.1}, skip=[net[0].bias])
    for options in ({"no_decay": ["1.*", "hed.*"]}, {"lr_scale": {"1.*": 0.1, "hed.*": 0.1}}):
        with pytest.raises(ValueError, match=r"matches 'hed\.\*'; there are 0\.weight, 0\.bias"):
            param_groups(net, **options)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_checkpoints_go_to_torchs_adamw_and_back_bit_for_bit(amsgrad):
    theirs = partial(torch.optim.AdamW, lr=2.0**-7, amsgrad=amsgrad, fused=True)
    straight, params = make_params(), make_params()
    reference, optimizer = theirs(straight), theirs(params)
    for i in range(9):
        if i in (3, 6):
            state = reloaded(optimizer.state_dict())
            ours = ClippedAdamW(params, clip=None, amsgrad=amsgrad)
            optimizer = ours if i == 3 else theirs(params)
            optimizer.load_state_dict(state)
        for some, o in ((straight, reference), (params, optimizer)):
            set_grads(some, i)
            o.step()
    assert optimizer.param_groups[0]["lr"] == 2.0**-7
    torch.testing.assert_close(straight, params, rtol=1e-6, atol=1e-7)
    assert [optimizer.state[p]["step"] for p in params] == [9] * len(params)


@both_devices
@pytest.mark.parametrize("amsgrad", [False, True])
def test_a_filter_whose_memory_format_changes_keeps_its_own_moments(device, amsgrad):
    params = make_params(device=device)
    exact = [p.detach().clone().requires_grad_() for p in params]
    ours = ClippedAdamW(params, 1e-2, clip=None, amsgrad=amsgrad)
    reference = torch.optim.AdamW(exact, 1e-2, amsgrad=amsgrad, foreach=False)
    for i in range(9):
        if i == 3:
            ours.load_state_dict(reloaded(ours.state_dict()))
            params[2].data = params[2].data.to(memory_format=torch.channels_last)
        if i == 6:
            params[2].data = params[2].data.contiguous()
        for some, o in ((exact, reference), (params, ours)):
            set_grads(some, i)
            o.step()
    torch.testing.assert_close(params, exact, rtol=1e-6, atol=1e-6, check_stride=False)


@pytest.mark.parametrize("variant", ["fp32", "bf16 masters", "half state"])
@pytest.mark.parametrize(
    "form",
    [
        int,
        float,
        torch.Tensor.long,
        torch.Tensor.half,
        torch.Tensor.bfloat16,
        lambda t: t.reshape(1),
    ],
)
def test_a_step_counter_of_any_form_counts_on_in_fp32(form, variant):
    params, optimizer, _ = build(variant)
    set_grads(params, 0)
    optimizer.step()
    state = optimizer.state_dict()
    for some in state["state"].values():
        some["step"] = form(torch.tensor(255.0))
    _, resumed, _ = build(variant)
    resumed.load_state_dict(reloaded(state))
    params = [p for g in resumed.param_groups for p in g["params"]]
    for i in range(3):
        set_grads(params, i)
        resumed.step()
    for p in params:
        step = resumed.state[p]["step"]
        assert (step.item(), step.dtype, step.shape) == (258, torch.float32, ())


@pytest.mark.parametrize("variant", ["fp32", "fp16 masters"])
def test_gradscaler_steps_it_as_grad_scale_does_and_skips_what_overflows(variant):
    params, ours, _ = build(variant)
    others, theirs, _ = build(variant)
    scale = 2.0**8
    idle = build(variant)[1]  # never has a gradient
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
    for i in range(6):
        scaler.scale(torch.ones(()))
        for some in (params, others):
            set_grads(some, i, scale / (100 if i % 2 else 10))  # every other step is clipped
            if i == 3:
                some[1].grad[0] = math.inf
        if i > 3 and variant == "fp32":
            scaler.unscale_(ours)
        scaler.step(ours)
        assert scaler.step(idle).found_inf == 0
        scaler.update()
        theirs.step(grad_scale=torch.tensor(scale))
        if i == 3:
            scale /= 2
            assert scaler.get_scale() == scale
    assert same(snapshot(params, ours), snapshot(others, theirs))


@pytest.mark.parametrize(
    "options", [{}, {"maximize": True}, {"fused": False}, {"foreach": False}, {"capturable": True}]
)
def test_beside_torchs_adamw_it_obeys_a_scheduler_and_every_option_but_the_kernel(options):
    runs = []
    kernel = {"fused": True, "foreach": None}
    for kind, own in ((ClippedAdamW, {"clip": None}), (torch.optim.AdamW, kernel)):
        params = make_params()
        if kind is ClippedAdamW:  # its gradient has another memory layout
            params[2].data = params[2].data.to(memory_format=torch.channels_last)
        second = {"params": params[2:], "lr": torch.tensor(2.0**-8), "betas": (0.8, 0.99)}
        optimizer = kind([{"params": params[:2]}, second], 2.0**-7, **(options | own))
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, 8)  # moves the betas too
        for i in range(7):
            set_grads(params, i)
            optimizer.step()
            scheduler.step()
        rates = [(float(g["lr"]), g["betas"]) for g in optimizer.param_groups]
        runs.append((rates, params))
    (rates, ours), (others, theirs) = runs
    assert rates == others
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "dtype, options, words",
    [
        (torch.float16, {}, "eps=1e-08 is exactly 0"),
        (torch.bfloat16, {}, "never decays with beta2=0.999"),
        (torch.bfloat16, {"betas": (0.9, 0.99)}, "lose small updates"),
        (torch.float32, {"eps": 0.0}, "eps=0 is exactly 0"),
        (torch.float32, {"lr": -1.0}, "learning rate"),
        (torch.float32, {"clip": math.nan}, "above 0"),
    ],
)
def test_the_traps_are_refused_in_one_sentence(dtype, options, words):
    params = make_params(dtype)
    set_grads(params, 0)
    frozen = torch.ones(3, dtype=torch.bfloat16)  # trains nothing, is no reason to refuse
    with pytest.raises((ValueError, RuntimeError), match=words) as caught:
        ClippedAdamW([frozen, *params], **options).step()
    assert "\n" not in str(caught.value)
    if dtype is not torch.float32:
        assert "masters=True" in str(caught.value)


def test_what_cannot_be_sharded_and_slices_are_refused_in_one_sentence(one_rank):
    p = distribute_tensor(torch.ones(4, 4).half(), init_device_mesh("cpu", (1,)), [Shard(0)])
    with pytest.raises(ValueError, match="keep the parameters in fp32"):
        ClippedAdamW([p.requires_grad_()], masters=True)
    with pytest.raises(ValueError, match="gaps in memory"):
        ClippedAdamW([torch.ones(4, 4)[:, :1].requires_grad_()])


SHARDED = """
import copy, math, os
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from guards import Guard
from helpers import same
from optim import ClippedAdamW, total_norm

rank = int(os.environ["RANK"])
mesh = init_device_mesh("cpu", (2,))
KINDS = {
    "ours": lambda params: ClippedAdamW(params, lr=1e-2, clip=0.5),
    "guarded": lambda params: ClippedAdamW(params, lr=1e-2, clip=None),
    "torch's": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
}

def build(kind):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1))  # rank 1 has none of the last
    for module in (net[0], net[2], net):
        fully_shard(module)
    return net, KINDS[kind](net.parameters())

def local(net, optimizer):
    states = [sorted(optimizer.state[p].items()) for p in net.parameters()]
    tensors = [*net.parameters(), *(t for state in states for _, t in state)]
    return [(t.to_local() if hasattr(t, "to_local") else t).detach().clone() for t in tensors]

def train(kind, net, optimizer, steps):
    guard = Guard(net)
    for step in steps:
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(2 * step + rank))
        bad = step in (2, 5)
        x[0] *= math.nan if bad and rank else 3.0  # on one rank only
        net(x).square().mean().backward()
        before = local(net, optimizer)
        if kind == "ours":
            with CommDebugMode() as seen:
                rejected = optimizer.step().found_inf
            assert seen.get_total_counts() == 1
        elif kind == "guarded":
            rejected = guard.step(optimizer, clip=0.5)
        else:
            norm = nn.utils.clip_grad_norm_(net.parameters(), 0.5).full_tensor()
            rejected = not norm.isfinite()
            rejected or optimizer.step()
        assert bool(rejected) == bad and same(before, local(net, optimizer)) == bad
        optimizer.zero_grad()
    return local(net, optimizer)

runs = {kind: (kind, *build(kind)) for kind in KINDS}
first = {kind: train(*run, range(7)) for kind, run in runs.items()}
model, optim = get_state_dict(*runs["ours"][1:])
dcp.save({"model": model, "optim": optim}, checkpoint_id="checkpoint")
for kind in ("ours", "torch's"):
    net, optimizer = build(kind)
    model, optim = get_state_dict(net, optimizer)
    dcp.load({"model": model, "optim": optim}, checkpoint_id="checkpoint")
    set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=optim)
    assert [t.tolist() for t in local(net, optimizer)] == [t.tolist() for t in first["ours"]]
    runs["from " + kind] = kind, net, optimizer
last = {kind: train(*run, range(7, 10)) for kind, run in runs.items()}
assert same(last["from ours"], last["ours"])
for others in (first, last):
    for kind, tensors in others.items():
        torch.testing.assert_close(tensors, others["torch's"], rtol=1e-5, atol=1e-6)

whole = [torch.randn(5, 4, generator=torch.Generator().manual_seed(i)) for i in range(4)]
parts = [distribute_tensor(t, mesh, [place]) for t, place in
         zip(whole, [Shard(0), Shard(1), Replicate()])]
torch.testing.assert_close(total_norm([*parts, whole[3]]), torch.cat(whole).norm())
print("agreed", flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_shards_train_beside_torchs_are_skipped_together_and_go_through_its_checkpoints(tmp_path):
    ranks_agree(tmp_path, SHARDED)


SHARED = """
import os, torch, torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from guards import Guard
from optim import ClippedAdamW

dist.init_process_group("gloo")
runs = []
for share in (False, True):
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    if share:
        for make in (ClippedAdamW, lambda *args, **kwargs: ClippedAdamW(*args, **kwargs)):
            try:
                ZeroRedundancyOptimizer(net.parameters(), optimizer_class=make, lr=1e-2)
            except ValueError as error:
                assert "one rank's share" in str(error)
            else:
                raise AssertionError("not refused")
        optimizer = ZeroRedundancyOptimizer(
            net.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-2)
    else:
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    guard = Guard(net, lag=False)
    for step in range(5):
        before = [p.clone() for p in net.parameters()]
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        net(x).square().mean().backward()
        if step == 3 and dist.get_rank() == 1:
            net[0].weight.grad[0, 0] = torch.nan
        assert guard.step(optimizer, clip=0.1) == (step == 3)
        moved = [not torch.equal(p, old) for p, old in zip(net.parameters(), before)]
        assert moved == [step != 3] * 6
        optimizer.zero_grad()
    runs.append([*net.parameters()])
assert all(torch.equal(p, q) for p, q in zip(*runs))
print("agreed", flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_a_share_of_the_parameters_is_refused_and_the_way_that_is_named_works(tmp_path):
    ranks_agree(tmp_path, SHARED)


@pytest.mark.parametrize(
    "make",
    [lambda net: ClippedAdamW(net.parameters(), 1e-2), lambda net: Muon([net.weight, net.other])],
)
def test_a_state_whose_parameters_have_names_is_loaded_whole(make):
    """torch.distributed.checkpoint's, with one process too."""
    runs = []
    for _ in range(2):
        net = nn.Linear(3, 4, bias=False)
        net.other = nn.Parameter(torch.ones(2, 2))
        runs.append((net, make(net)))
    (net, optimizer), (other, resumed) = runs
    for seed in range(3):
        set_grads(net.parameters(), seed)
        optimizer.step()
    model, state = get_state_dict(net, optimizer)
    set_state_dict(other, resumed, model_state_dict=model, optim_state_dict=reloaded(state))
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert optimizer.state[p] and same(optimizer.state[p], resumed.state[q])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_beta2_limit_is_where_a_half_number_stops_decaying(dtype):
    unit = torch.finfo(dtype).eps
    limit = 1 - unit / (2 + 2 * unit)
    v = (1 + torch.arange(round(1 / unit)) * unit).to(dtype)  # every number of [1, 2)
    for beta2, refused in ((1 - (1 - limit) * 1.001, False), (1 - (1 - limit) * 0.999, True)):
        stuck = (v * beta2 >= v).any().item()
        assert stuck is refused is ("never decays" in refusal(dtype, 1.0, beta2))


def test_a_closure_works_as_torchs_do():
    p = torch.ones(3, requires_grad=True)
    optimizer = ClippedAdamW([p], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3 > optimizer.step(closure).item()


def test_the_first_skipped_step_and_ten_in_a_row_are_said_and_nothing_under_a_guard(recwarn):
    params, optimizer, _ = build("fp32")
    said = {}
    for i in range(30):
        bad = i in (2, 4) or i > 6
        set_grads(params, i, math.nan if bad else 1.0)
        optimizer.step()
        for warning in recwarn:
            assert warning.filename == __file__
            said.setdefault(str(warning.message), i)
    assert [*said.values()] == [2, 16] and "10 in a row" in [*said][1]


@pytest.mark.parametrize(
    "make, dtype, most",
    [
        (partial(ClippedAdamW, clip=None), torch.float32, 5),
        (partial(ClippedAdamW, clip=1.0), torch.float32, 14),
        (partial(ClippedAdamW, clip=None), torch.bfloat16, 7),
        (partial(Muon, ns_steps=3), torch.float32, 40),
    ],
)
def test_a_step_costs_few_operations_however_many_tensors(make, dtype, most):
    counts = []
    for number in (2, 50):
        filters = [torch.randn(8, 4, 3, 3).to(dtype) for _ in range(number)]
        params = [p.to(memory_format=torch.channels_last).requires_grad_() for p in filters]
        optimizer = make(params, masters=True)
        optimizer.found_inf = torch.zeros(())  # a guard has measured and decided
        for _ in range(2):
            for p in params:
                p.grad = torch.randn_like(p)
            with Operations() as seen:
                optimizer.step()
        counts.append(seen.count)
    assert counts[0] == counts[1] <= most


# --- Muon


def test_muon_turns_each_matrix_towards_torchs_direction_and_keeps_its_norm():
    params, optimizer, schedule = build("Muon")
    directions = [torch.zeros(p.flatten(1).shape) for p in params]
    torchs = torch.optim.Muon(directions, lr=1.0, momentum=0.6, weight_decay=0.0)
    norms = [p.detach().norm() for p in params]
    for i in range(20):
        before = snapshot(params)[0]
        scale = 1024.0 if i % 2 else 2.0  # a scale that never changes would turn nothing
        set_grads(params, i, scale)
        for d, p in zip(directions, params, strict=True):
            d.zero_().grad = p.grad.flatten(1) / scale
        optimizer.grad_scale = torch.tensor(scale)
        optimizer.step()
        torchs.step()
        for p, old, d, norm in zip(params, before, directions, norms, strict=True):
            rate = 10 * schedule.lr * norm / math.sqrt(len(d))
            moved = old + rate * d.view(p.shape)
            wanted = moved * norm / moved.norm()
            # A rounding of the direction to bf16 is up to 2e-4 of a weight, a turn about 2e-2.
            torch.testing.assert_close(p.detach(), wanted, rtol=1e-4, atol=5e-4)


def test_what_muon_gets_and_what_it_refuses():
    linears = [nn.Linear(4, 4) for _ in range(3)]
    net = nn.Sequential(*linears, nn.Embedding(4, 4), Scan())
    nn.init.zeros_(net[1].weight)
    net[2].requires_grad_(False)
    assert matrices(net, ["[0-9].*"]) == [net[0].weight, net[4].proj.weight]
    assert matrices(net, ["0"]) == []
    for p in (net[1].weight, net[0].bias):
        with pytest.raises(ValueError, match="leave it to AdamW"):
            Muon([nn.Parameter(torch.ones(2, 2))]).add_param_group({"params": [p]})
    with pytest.raises(ValueError, match="masters=True"):
        Muon(net[0].half().parameters())


def test_float64_weights_train_as_torchs_do_and_a_bad_step_leaves_them():
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(5, 3, dtype=torch.float64)) for _ in range(2))
    single = nn.Parameter(torch.ones(2))  # its gradient is beside it in one norm
    mine = ClippedAdamW([ours, single], lr=1e-2, clip=None)
    plain = torch.optim.AdamW([theirs], lr=1e-2)
    for _ in range(4):
        ours.grad = torch.randn_like(ours)
        single.grad = torch.ones(2)
        theirs.grad = ours.grad.clone()
        plain.step()
        result = mine.step()
        total = theirs.grad.square().sum() + 2
        torch.testing.assert_close(result.grad_norm, total.sqrt().float())
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    before = ours.clone()
    ours.grad[0, 0] = float("nan")
    with pytest.warns(UserWarning, match="1 steps skipped"):
        assert mine.step().found_inf == 1
    assert torch.equal(ours, before)


@pytest.mark.parametrize("options", [{"dtype": torch.complex64}, {"device": "meta"}])
def test_what_the_fused_kernel_cannot_take_is_refused_at_the_start(options):
    with pytest.raises(RuntimeError, match="`fused=True` requires all the params to be floating"):
        ClippedAdamW([nn.Parameter(torch.ones(2, **options))])
