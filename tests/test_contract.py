"""What torch's own tests ask of an optimizer and of a GradScaler, asked of the files to copy.

Inputs and error inputs are those of torch.testing._internal.common_optimizers, which ships with
torch. And each recipe runs with our optimizers in place of its own.
"""

import contextlib
import copy
import io
import pickle
import re
import sys
import types
import unittest
import warnings

import pytest
import torch
from helpers import ROOT, same, snapshot
from test_readme import blocks
from torch import nn

from amp_policy import LossScaler
from extras.muon import Muon
from guards import Guard
from optim import ClippedAdamW

if "expecttest" not in sys.modules:  # torch's module imports it, and what we need of it does not
    stub = types.ModuleType("expecttest")
    stub.TestCase = unittest.TestCase
    sys.modules["expecttest"] = stub
from torch.testing._internal.common_optimizers import OptimizerErrorEnum, optim_db

# That import forbids to switch TF32 in this process.
torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True

OURS = {"AdamW": lambda *args, **kwargs: ClippedAdamW(*args, clip=None, **kwargs), "Muon": Muon}
THEIRS = {info.optim_cls.__name__: info for info in optim_db if info.optim_cls.__name__ in OURS}
DOES_NOT_APPLY = {
    ("AdamW", "foreach"): "refused beside fused=True, in torch too",
    ("Muon", "weight_decay"): "refused: without effect on a constant norm",
    ("Muon", "ns_coefficients"): "refused: they are fixed",
    ("Muon", "adjust_lr_fn"): "refused: lr is an angle",
    ("Muon", "only supports 2D"): "accepted: each filter is a row",
}


def applies(name, kwargs, text=""):
    return not any(n == name and (word in kwargs or word in text) for n, word in DOES_NOT_APPLY)


def inputs():
    for name, info in THEIRS.items():
        for one in info.optim_inputs_func("cpu"):
            if applies(name, one.kwargs):
                yield pytest.param(name, one.kwargs, id=f"{name} {one.desc}")


def errors():
    for name, info in THEIRS.items():
        for one in info.optim_error_inputs_func("cpu", torch.float32):
            given = one.optimizer_error_input
            if applies(name, given.kwargs, one.error_regex):
                yield pytest.param(name, one, id=f"{name} {given.desc}")


@pytest.mark.parametrize("name, kwargs", [*inputs()])
def test_torchs_inputs_train_and_go_through_a_checkpoint(name, kwargs):
    torch.manual_seed(0)
    runs = []
    for make in (OURS[name], OURS[name], THEIRS[name].optim_cls):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(10, 5))
        runs.append([weight, make([weight], **kwargs), []])
    for step in range(8):
        if step == 4:  # one of ours goes on from a checkpoint
            weight, optimizer, _ = runs[1]
            again = OURS[name]([weight], **kwargs)
            again.load_state_dict(optimizer.state_dict())
            runs[1][1] = again
        for weight, optimizer, losses in runs:
            optimizer.zero_grad()
            loss = (weight.mv(torch.ones(5)) - 1).square().sum()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
    (ours, _, losses), (resumed, _, _), (theirs, _, _) = runs
    if kwargs.get("maximize"):
        losses.reverse()
    assert same(ours, resumed) and losses[-1] < losses[0]
    if name == "AdamW":
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("twice", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
@pytest.mark.parametrize("make", [ClippedAdamW, Muon])
def test_a_copy_made_after_a_scheduler_steps_its_own_weights_alone(make, twice):
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = make([weight], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # it hangs a step() on the instance
    twin = twice(optimizer)
    (copied,) = twin.param_groups[0]["params"]
    for one, other, stepped in ((copied, weight, twin), (weight, copied, optimizer)):
        before = snapshot(other)
        one.grad = torch.eye(2)
        other.grad = torch.eye(2)
        stepped.step()
        assert same(before, snapshot(other)) and not same(one, torch.ones(2, 2))


@pytest.mark.parametrize(
    "name, argument", [key for key, why in DOES_NOT_APPLY.items() if why.startswith("refused")]
)
def test_an_argument_that_does_not_apply_is_refused(name, argument):
    with pytest.raises((TypeError, RuntimeError), match=argument):
        OURS[name]([nn.Parameter(torch.ones(2, 2))], **{argument: True})


@pytest.mark.parametrize("name, one", [*errors()])
def test_torchs_error_inputs_are_refused_as_torch_refuses_them(name, one):
    given = one.optimizer_error_input
    params = given.params if given.params is not None else [nn.Parameter(torch.ones(2, 2))]
    warns = issubclass(one.error_type, Warning)
    expected = (pytest.warns if warns else pytest.raises)(one.error_type, match=one.error_regex)
    with expected:
        optimizer = OURS[name](params, **given.kwargs)
        if one.error_on is not OptimizerErrorEnum.CONSTRUCTION_ERROR:
            optimizer.step()


# --- GradScaler

OPTIMIZERS = {
    "SGD": lambda net: torch.optim.SGD(net.parameters(), 0.1, momentum=0.9),
    "AdamW": lambda net: torch.optim.AdamW(net.parameters(), fused=True),
    "ClippedAdamW": lambda net: ClippedAdamW(net.parameters(), clip=None),
    "Muon": lambda net: Muon([p for p in net.parameters() if p.ndim > 1]),
}


def by_hand(optimizer, scaler, guard):
    scaler.step(optimizer)


def unscaled_first(optimizer, scaler, guard):
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)


def guarded(optimizer, scaler, guard):
    guard.step(optimizer, scaler)


def unscaled_and_guarded(optimizer, scaler, guard):
    scaler.unscale_(optimizer)
    guard.step(optimizer, scaler)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, LossScaler])
@pytest.mark.parametrize("enabled", [True, False])
def test_the_guard_and_each_order_of_calls_do_what_the_scaler_does_alone(
    kind, scaler_class, enabled
):
    """Growth, backoff, accumulation, a skipped step, a round trip of the state, disabled."""
    ends = []
    ways = [by_hand, guarded]
    if enabled:
        ways += [unscaled_first, unscaled_and_guarded]
    for way in ways:
        torch.manual_seed(0)
        net = nn.Linear(4, 4)
        optimizer, guard = OPTIMIZERS[kind](net), Guard(net, lag=False)
        options = {
            "init_scale": 128.0,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 2,
            "enabled": enabled,
        }
        scaler, scales = scaler_class("cpu", **options), []
        for step in range(8):
            for micro in range(2):
                loss = net(torch.full((2, 4), 0.5 + step)).square().mean()
                bad = enabled and (step in (3, 4)) and micro
                scaler.scale(loss * (float("inf") if bad else 1.0)).backward()
            way(optimizer, scaler, guard)
            scaler.update()
            optimizer.zero_grad()
            if step == 5:
                state = scaler.state_dict()
                scaler = scaler_class("cpu", **options)
                scaler.load_state_dict(state)
            scales.append(scaler.get_scale())
        ends.append((scales, snapshot(net, optimizer)))
    for scales, end in ends:
        wanted = [128.0, 256.0, 256.0, 128.0, 64.0, 64.0, 128.0, 128.0]
        assert scales == (wanted if enabled else [1.0] * 8)
        assert same(end, ends[0][1])


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("has_guard", [False, True])
def test_accelerate_sees_a_skipped_step_in_fp16_as_the_page_says(kind, has_guard):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=128.0)  # made on a GPU only
    net = nn.Linear(4, 4)
    own = OPTIMIZERS[kind](net)
    if not has_guard:
        own._step_supports_amp_scaling = False
    schedule = torch.optim.lr_scheduler.StepLR(own, 1, 0.5)
    net, optimizer, schedule = accelerator.prepare(net, own, schedule)
    guard = Guard(net, lag=False)
    for step in range(4):
        before, rate = snapshot(net), schedule.get_last_lr()
        bad = step in (0, 2)
        factor = float("inf") if bad else 1.0
        accelerator.backward(net(torch.ones(2, 4)).square().mean() * factor)
        if has_guard:
            rejected = guard.step(optimizer.optimizer, accelerator.scaler, clip=1.0)
            accelerator.scaler.update()
            if not rejected:
                schedule.step()
        else:
            optimizer.step()
            schedule.step()
            assert accelerator.optimizer_step_was_skipped == bad
        optimizer.zero_grad()
        assert same(before, snapshot(net)) == bad == (schedule.get_last_lr() == rate)


# --- Recipes

RECIPES = [
    block
    for block in blocks((ROOT / "docs" / "recipes.md").read_text())
    if re.search(r"torch\.optim\.\w+\(\w+\.parameters|^ *Trainer\(", block, re.M)
]
INSTEAD = {
    "ClippedAdamW": "__import__('optim').ClippedAdamW({})",
    "Muon": "__import__('extras.muon').muon.Muon([p for p in {} if p.ndim > 1])",
}
OPTIMIZER = r"torch\.optim\.\w+\(([\w.]+\.parameters\(\))[^)\n]*\)"


def run(block):
    """What it prints; its networks are finite at the end."""
    printed, names = io.StringIO(), {"__name__": "recipe"}
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(block, "recipe.py", "exec"), names)
    nets = [thing for thing in names.values() if isinstance(thing, nn.Module)]
    assert nets and all(t.isfinite().all() for net in nets for t in net.state_dict().values())
    return printed.getvalue()


@pytest.mark.parametrize("kind", INSTEAD)
@pytest.mark.parametrize("number", range(len(RECIPES)))
def test_each_recipe_runs_with_our_optimizers(number, kind, tmp_path, monkeypatch):
    block = RECIPES[number]
    for package in set(re.findall(r"^(?:from|import) (\w+)", block, re.M)):
        pytest.importorskip(package)
    block = re.sub(OPTIMIZER, lambda found: INSTEAD[kind].format(found[1]), block)
    own = INSTEAD[kind].format("net.parameters()")
    block = block.replace("[callback])", f"[callback], optimizers=({own}, None))")
    assert block != RECIPES[number]
    monkeypatch.chdir(tmp_path)
    assert "skipped" in run(block) or "a bad sample" not in block


@pytest.mark.parametrize("kind", INSTEAD)
def test_the_recipe_of_lightning_runs_in_fp16_with_the_line_of_the_page(
    kind, tmp_path, monkeypatch
):
    pytest.importorskip("lightning")
    block = next(block for block in RECIPES if "lightning.Trainer(" in block)
    block = re.sub(
        "return " + OPTIMIZER,
        lambda found: (
            f"optimizer = {INSTEAD[kind].format(found[1])}; "
            "optimizer._step_supports_amp_scaling = False; return optimizer"
        ),
        block,
    )
    block = block.replace(
        "max_epochs=1,",
        """max_epochs=1, gradient_clip_val=1.0,
        plugins=[lightning.pytorch.plugins.precision.MixedPrecision(
            "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=128.0))],""",
    )
    monkeypatch.chdir(tmp_path)
    assert "1 of 20 steps skipped" in run(block)
