"""True divergence: bad in fp32 too."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from bench.diagnosis.step import Net, Step, case, cross, identity, labels, numbers, weighted

INF = math.inf


@case(
    "divergence",
    "https://github.com/vanderschaarlab/synthcity/issues/331",
    "divergence",
    module="",
    op="exp",
    samples=(2,),
    fix="guard",
)
def vae_log_variance():
    """An unbounded log variance of 95: exp is inf, and so is the KL term."""

    def loss(net, x):
        mu, logvar = net(x).chunk(2, -1)
        kl = 1 + logvar - mu.pow(2) - logvar.exp()  # <- guilty
        return -0.5 * kl.sum(-1).mean()

    x = numbers(4, 6)
    x[2, 4] = 95
    return Step(identity(6), [(x,)], loss)


@case(
    "divergence",
    "https://github.com/VincentStimper/normalizing-flows/issues/47",
    "divergence",
    module="flow.coupling",
    op="exp",
    samples=(0,),
    fix="guard",
)
def affine_coupling():
    """RealNVP scales by exp of what a network says: 90 is too much."""

    def couple(net, z):
        z1, z2 = z.chunk(2, -1)
        return torch.cat([z1, z2 * torch.exp(net.scale(z1))], -1)  # <- guilty

    flow = Net(lambda net, z: net.coupling(z), coupling=Net(couple, scale=identity(3)))
    z = numbers(4, 6)
    z[0, 1] = 90
    return Step(
        Net(lambda net, z: net.flow(net.fc(z)), flow=flow, fc=identity(6)),
        [(z,)],
        lambda net, z: net(z).pow(2).mean(),
    )


@case(
    "divergence",
    "https://github.com/jorge-pessoa/pytorch-msssim/issues/2",
    "divergence",
    module="",
    op="pow",
    samples=(),
    fix="guard",
)
def ms_ssim_of_unlike_pictures():
    """A contrast term may be negative, and a negative number has no power of 0.3."""

    def loss(net, x, y):
        out = net(x)
        cs = torch.stack([(F.avg_pool1d(out, k) * F.avg_pool1d(y, k)).mean() for k in (1, 2, 4)])
        return 1 - (cs ** torch.tensor([0.3, 0.4, 0.3])).prod()  # <- guilty

    x = numbers(4, 1, 8)
    return Step(identity(8), [(x, -x)], loss)


@case(
    "divergence",
    "https://github.com/cvignac/SMP/issues/3",
    "divergence",
    module="layers.3|layers.7",
    op="mm|linear",
    fix="rate",
)
def deep_network_without_normalisation():
    """Weights grown under too large a rate: every one of eight layers makes its input 1e5 times as
    large.
    """

    def forward(net, x):
        h = net.layers(x)  # <- guilty
        return net.head(h)

    return Step(
        Net(
            forward,
            layers=nn.Sequential(*(identity(6, 1e5) for _ in range(8))),
            head=nn.Linear(6, 3),
        ),
        [(numbers(4, 6), labels())],
        cross,
    )


@case(
    "divergence",
    "https://github.com/pytorch/pytorch/issues/41508",
    "divergence",
    module="attn",
    op="softmax",
    samples=(2,),
    fix="mask",
)
def every_key_is_padding():
    """A sample without a key: softmax over nothing but -inf."""

    def forward(net, x, padding):
        h, _ = net.attn(x, x, x, key_padding_mask=padding, need_weights=True)  # <- guilty
        return h

    padding = torch.zeros(4, 3, dtype=torch.bool)
    padding[2] = True
    net = Net(forward, attn=nn.MultiheadAttention(8, 2, batch_first=True))
    return Step(net, [(numbers(4, 3, 8), padding)], weighted)


@case(
    "divergence",
    "https://github.com/huggingface/trl/pull/7252",
    "divergence",
    module="",
    op="mul",
    samples=(1,),
    fix="guard",
)
def entropy_of_a_masked_token():
    """A forbidden token has logit -inf, probability 0 and log probability -inf: 0 * -inf is NaN."""

    def loss(net, x, forbidden):
        log_p = net(x).masked_fill(forbidden, -INF).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)  # <- guilty
        return entropy.mean()

    forbidden = torch.zeros(4, 6, dtype=torch.bool)
    forbidden[1, 2] = True
    return Step(identity(6), [(numbers(4, 6), forbidden)], loss)


@case(
    "divergence",
    "https://github.com/emadeldeen24/TS-TCC/issues/25",
    "divergence",
    module="",
    op="log",
    samples=(0,),
    fix="guard",
)
def contrastive_loss_of_a_long_vector():
    """All similarities but a sample's own fall 225 below the maximum, exp of them is 0, and so is
    their sum.
    """

    def loss(net, x):
        h = net(x)
        logits = h @ h.T
        logits = logits - logits.max(1, keepdim=True).values.detach()
        others = (logits.exp() * (1 - torch.eye(4))).sum(1, keepdim=True)
        return -(logits - torch.log(others)).mean()  # <- guilty

    x = F.normalize(numbers(4, 6), dim=-1)
    x[:, 0] = 0
    x[0] = torch.tensor([15.0, 0, 0, 0, 0, 0])
    return Step(identity(6), [(x,)], loss)


@case(
    "divergence",
    "https://github.com/DLR-RM/stable-baselines3/issues/325",
    "divergence|data",
    module="",
    op="std|var",
    micro_batch=1,
    fix="spread",
)
def advantage_of_a_single_observation():
    """The last micro-batch of PPO has one sample: the standard deviation of one number is 0 / 0,
    eps or not.
    """

    def loss(net, x):
        advantage = net(x).squeeze(-1)
        spread = advantage.std()  # <- guilty
        return ((advantage - advantage.mean()) / (spread + 1e-8)).pow(2).mean()

    return Step(nn.Linear(6, 1), [(numbers(4, 6),), (numbers(1, 6),)], loss)


@case(
    "divergence",
    "https://github.com/vanvalenlab/deepcell-tf/issues/445",
    "divergence",
    module="normalize",
    op="div",
    samples=(3,),
    fix="guard",
)
def picture_of_one_colour():
    """Each picture is divided by its standard deviation, which is 0 for a blank one."""

    def normalize(net, x):
        return (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)  # <- guilty

    x = numbers(4, 6)
    x[3] = 2
    net = Net(lambda net, x: net.fc(net.normalize(x)), fc=nn.Linear(6, 3), normalize=Net(normalize))
    return Step(net, [(x, labels())], cross)


@case(
    "divergence",
    "https://github.com/HKUDS/SSLRec/issues/26",
    "divergence",
    module="",
    op="log",
    samples=(0,),
    fix="guard",
)
def gumbel_noise_of_zero():
    """-log(-log(u)) with u = 0, which torch.rand may draw (here it is made to)."""

    def loss(net, x):
        scores = net(x)
        u = torch.rand(scores.shape)
        u[0, 0] = 0
        gumbel = -torch.log(-torch.log(u))  # <- guilty
        return -(scores + gumbel).mean()

    return Step(identity(6), [(numbers(4, 6),)], loss)
