"""What the probes say before a number is non-finite, and the figures of each tensor."""

import math

import pytest
import torch
from torch import nn

from rescue.probes import Probes, TensorFigures, first_step_checks


def test_the_first_step_says_what_will_go_wrong():
    net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    net.register_parameter("forgotten", nn.Parameter(torch.ones(3)))
    net(torch.randn(2, 4)).square().sum().backward()
    unused = "1 parameter(s) got no gradient (unused, or detached): forgotten"
    assert first_step_checks(net) == [unused]

    with torch.no_grad():
        net[0].weight[0, 0] = 3e7
        net[3].bias[1] = math.nan
        net[2].weight.zero_()
        net[2].weight.grad.zero_()
    text = "\n".join(first_step_checks(net))
    for sentence in (
        unused,
        "0.weight looks uninitialised",
        "3.bias looks uninitialised",
        "2.weight is all zero and its gradient is zero too",
    ):
        assert sentence in text


@pytest.fixture
def net():
    """The first of its two layers takes 200 to 40000; fp16 ends at 65504."""
    net = nn.Sequential(
        nn.Linear(2, 2, bias=False),
        nn.ReLU(),
        nn.Linear(2, 2, bias=False),
    )
    net[0].weight.data = torch.tensor([200.0, 1.0]).diag()
    nn.init.constant_(net[2].weight, 1e-3)
    return net


half = torch.autocast("cpu", torch.float16)


def test_probes_report_headroom_before_anything_overflows(net):
    probes = Probes(net)
    with probes, half:
        out = net(torch.tensor([[200.0, 1.0], [-2.0, 1.0]]))
        (out.float() * 1e-3).sum().backward()

    first = probes.read()[0]  # 1e-3 * 1e-3 = 1e-6 is below 6.1e-5
    assert first == ("0", torch.float16, 40000.0, 40000.0 / 65504, 1.0)
    text = "\n".join(probes.warnings(loss_scale=1.0))
    assert "0: activations reach 4e+04, 61% of float16's maximum; try --keep-fp32 '0'" in text
    assert "more scale" in text
    assert not net[0]._forward_hooks


@pytest.mark.parametrize("bad", [400.0, math.nan])
def test_what_overflows_or_is_nan_has_no_headroom(net, bad):
    probes = Probes(net)
    with probes, half:
        net(torch.tensor([[bad, 1.0]]))
    assert probes.read()[0].headroom == math.inf


def test_probes_say_nothing_of_small_numbers(net):
    probes = Probes(net)
    with probes:
        net(torch.tensor([[1.0, 1.0]])).sum().backward()
    assert probes.warnings() == []


def test_attached_before_compiling_the_probes_break_no_graph():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    probes = Probes(net).attach()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)  # a break is an error
    out = compiled(torch.ones(2, 4))
    _, last = probes.read()
    assert last.name == "1"
    assert last.amax == pytest.approx(out.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_figures_of_each_tensor_equal_those_computed_in_float64(dtype):
    torch.manual_seed(0)
    named = {name: nn.Parameter(torch.randn(45).to(dtype)) for name in ("a", "b", "unused")}
    a, b, unused = named.values()
    for p in (a, b):
        p.grad = (8.0 * torch.randn(45)).to(dtype)
    b.grad[2] = math.inf
    masters = {p: p.detach().float() for p in (a, b)} if dtype is torch.float16 else {}
    weight = masters.get(a, a).detach()
    old = weight.double()

    figures = TensorFigures(named, masters, scale=torch.tensor(8.0))
    weight -= 1e-4 * torch.randn(45)  # "b" is left out, as a rejected step does
    rows = figures.read()

    update = weight.double() - old
    wanted = {
        "grad_norm": a.grad.double().norm().item() / 8,
        "weight_norm": old.norm().item(),
        "update_ratio": (update.norm() / old.norm()).item(),
    }
    assert rows.keys() == {"a", "b"}
    assert rows["a"] == pytest.approx(wanted, rel=2e-3)
    assert rows["b"]["grad_norm"] == math.inf
    assert rows["b"]["update_ratio"] == 0.0

    of_unused = TensorFigures({"unused": unused})
    assert of_unused.read() == {}


@pytest.mark.parametrize("update, ratio", [(0.0, 0.0), (1.0, math.inf)])
def test_a_bias_of_zeros_that_stands_still_has_the_ratio_0(update, ratio):
    bias = nn.Parameter(torch.zeros(3))
    bias.grad = torch.ones(3)
    figures = TensorFigures({"bias": bias})
    bias.data += update
    assert figures.read()["bias"]["update_ratio"] == ratio
