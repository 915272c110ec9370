"""Bad state: weights, buffers of BatchNorm, an optimizer."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from bench.diagnosis.step import Net, Step, case, cross, identity, labels, numbers

INF, NAN = math.inf, math.nan


@case(
    "state",
    "https://github.com/gordicaleksa/pytorch-GAT/issues/11",
    "weights",
    names="scoring",
    fix="state",
)
def parameter_never_initialised():
    """nn.Parameter(torch.Tensor(...)) holds what was in memory: here a NaN."""
    net = Net(lambda net, x: net.fc(x) * net.scoring, fc=nn.Linear(6, 3))
    net.scoring = nn.Parameter(torch.tensor([1.0, NAN, 1.0]))
    return Step(net, [(numbers(4, 6), labels())], cross)


@case(
    "state",
    "https://github.com/openai/CLIP/issues/15",
    "weights",
    names="text_projection",
    fix="state",
)
def projection_never_initialised():
    """torch.empty again; what was in memory reads as 2.7e38, finite and hopeless."""
    net = Net(lambda net, x: net.fc(x) @ net.text_projection, fc=identity(6))
    net.text_projection = nn.Parameter(
        numbers(6, 3).index_put((torch.tensor([2]), torch.tensor([1])), torch.tensor([2.7e38]))
    )
    return Step(net, [(numbers(4, 6), labels())], cross)


@case(
    "state",
    "https://github.com/sauradip/STALE/issues/16",
    "weights",
    names="bg_embeddings",
    fix="state",
)
def background_embedding_never_initialised():
    """A parameter that is compared by cosine, left as torch.empty: inf in it, NaN after the
    normalisation.
    """
    net = Net(lambda net, x: net.fc(x) @ F.normalize(net.bg_embeddings, dim=-1).T, fc=identity(6))
    net.bg_embeddings = nn.Parameter(numbers(3, 6))
    net.bg_embeddings.data[0, 0] = INF
    return Step(net, [(numbers(4, 6), labels())], cross)


@case(
    "state",
    "https://github.com/pytorch/pytorch/issues/96798",
    "weights",
    names="running_mean",
    fix="state",
)
def frozen_batch_norm_with_bad_statistics():
    """An overflow of an earlier step left NaN in the running mean; it shows when the layer is used
    in eval mode.
    """
    net = Net(
        lambda net, x: net.head(net.bn(net.fc(x))),
        fc=identity(6),
        bn=nn.BatchNorm1d(6),
        head=nn.Linear(6, 3),
    )
    net.bn.running_mean[4] = NAN
    return Step(net.eval(), [(numbers(4, 6), labels())], cross)


@case(
    "state",
    "https://github.com/VectorInstitute/FL4Health/pull/39",
    "weights|divergence",
    module="bn",
    op="batch_norm",
    fix="state|statistics",
)
def negative_running_variance():
    """Averaged like a weight, with momentum, a running variance is negative; its root is NaN."""

    def forward(net, x):
        h = net.bn(net.fc(x))  # <- guilty
        return net.head(h)

    net = Net(forward, fc=identity(6), bn=nn.BatchNorm1d(6), head=nn.Linear(6, 3))
    net.bn.running_var[1] = -0.5
    return Step(net.eval(), [(numbers(4, 6), labels())], cross)


@case(
    "state",
    "https://github.com/NVIDIA-NeMo/RL/issues/3544",
    "weights",
    names="exp_avg",
    fix="state",
)
def optimizer_restored_with_nan():
    """Loss and gradients are finite, the restored moments are not: the update would be NaN."""
    net = nn.Linear(6, 3)
    optimizer = torch.optim.AdamW(net.parameters())
    cross(net, numbers(4, 6), labels()).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.state[net.weight]["exp_avg"][1, 1] = NAN
    return Step(net, [(numbers(4, 6), labels())], cross, state=optimizer.state_dict())


@case(
    "state",
    "https://github.com/ageron/handson-ml2/issues/32",
    "weights",
    names="hidden",
    fix="state",
)
def hidden_state_carried_over():
    """A stateful RNN keeps the hidden state of the batch before, which had gone to NaN."""

    def forward(net, x):
        out, hidden = net.rnn(x, net.hidden)
        net.hidden = hidden.detach()
        return net.head(out[:, -1])

    net = Net(forward, rnn=nn.GRU(6, 5, batch_first=True), head=nn.Linear(5, 3))
    net.register_buffer("hidden", torch.zeros(1, 4, 5))
    net.hidden[0, 2] = NAN
    return Step(net, [(numbers(4, 7, 6), labels())], cross)
