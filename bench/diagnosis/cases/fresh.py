"""Ten cases that were held out: other threads than those of the cases the tool was mended on.

autopsy was run on them once, at the very end, and that score stands as it came
(bench/results/diagnosis_fresh-first-cpu.json).
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from bench.diagnosis.step import Net, Step, case, cross, identity, labels, numbers, weighted

INF, NAN = math.inf, math.nan


@case(
    "backward",
    "https://github.com/kornia/kornia/issues/3275",
    "divergence",
    module="log_map",
    op="sqrt",
    samples=(2,),
    fix="guard",
)
def logarithm_of_no_rotation():
    """The angle is the root of a dot product, and `where` keeps the case of angle 0 out of the
    forward only.
    """

    def log_map(net, omega):
        theta = (omega * omega).sum(-1, keepdim=True).sqrt()  # <- guilty
        factor = torch.where(theta > 1e-8, (1 - theta.cos()) / theta.clamp(min=1e-8), 0.5 * theta)
        return omega * factor

    x = numbers(4, 3)
    x[2] = 0
    return Step(
        Net(lambda net, x: net.log_map(net.fc(x)), fc=identity(3), log_map=Net(log_map)),
        [(x,)],
        weighted,
    )


@case(
    "half",
    "https://github.com/lightonai/pylate/issues/239",
    "precision",
    module="",
    op="div",
    samples=(1,),
    fix="guard|fp32",
)
def scores_without_a_range():
    """Distillation scales each row of scores to 0..1 with an eps of 1e-8, 0 in fp16; equal scores
    give 0 / 0.
    """

    def loss(net, x, teacher):
        scores = net(x)
        low, high = scores.amin(-1, keepdim=True), scores.amax(-1, keepdim=True)
        scores = (scores - low) / (high - low + 1e-8)  # <- guilty
        return F.kl_div(scores.float().log_softmax(-1), teacher, reduction="batchmean")

    x = numbers(4, 6)
    x[1] = 2
    return Step(identity(6), [(x, numbers(4, 6, seed=1).softmax(-1))], loss, torch.float16)


@case(
    "half",
    "https://github.com/idiap/fast-transformers/issues/32",
    "precision",
    module="attention",
    op="sum",
    samples=(3,),
    fix="island:attention|fp32",
)
def keys_summed_over_the_sequence():
    """Linear attention sums its keys over the sequence: 512 of them at 200 pass 65504."""

    def attention(net, x):
        q, k = (F.elu(h) + 1 for h in (net.q(x), net.k(x)))
        total = k.sum(1)  # <- guilty
        return x.to(q.dtype) / ((q * total[:, None]).sum(-1, keepdim=True) + 1e-3)

    x = numbers(4, 512, 4)
    x[3] = 200
    parts = dict(attention=Net(attention, q=identity(4, 0.01), k=identity(4)), out=nn.Linear(4, 2))
    return Step(
        Net(lambda net, x: net.out(net.attention(x).mean(1)), **parts),
        [(x,)],
        weighted,
        torch.float16,
    )


@case(
    "data",
    "https://github.com/meta-pytorch/torchtune/issues/2341",
    "data|divergence",
    module="",
    op="div",
    micro_batch=1,
    fix="count",
)
def chunked_loss_over_ignored_tokens():
    """A sum over chunks divided by the number of tokens that count, which is 0 in the second micro-
    batch.
    """

    def loss(net, batch):
        out, y = net(batch["tokens"]), batch["labels"]
        total = sum(
            F.cross_entropy(o, t, reduction="sum")
            for o, t in zip(out.chunk(2), y.chunk(2), strict=True)
        )
        return total / (y != -100).sum()  # <- guilty

    batches = [
        ({"tokens": numbers(4, 6), "labels": y},) for y in (labels(), torch.full((4,), -100))
    ]
    return Step(nn.Linear(6, 3), batches, loss)


@case(
    "data",
    "https://github.com/pytorch/pytorch/issues/67180",
    "data|divergence",
    samples=(0,),
    fix="samples|guard",
)
def nansum_of_a_gap():
    """nansum passes over the NaN of the loss and not over the NaN in the gradient: a gap of the
    input times 0.
    """

    def loss(net, x):
        return torch.nansum(x * net.scale)

    x = numbers(4, 6)
    x[0, 5] = NAN
    net = nn.Module()
    net.scale = nn.Parameter(torch.ones(6))
    return Step(net, [(x,)], loss)


@case(
    "state",
    "https://github.com/kmkurn/pytorch-crf/issues/1",
    "weights",
    names="transitions",
    fix="state",
)
def transitions_never_initialised():
    """The transitions of a CRF are torch.Tensor(3, 3), whatever that was: here one is inf."""
    net = Net(
        lambda net, x: net.fc(x).logsumexp(-1, keepdim=True) + net.transitions[0],
        fc=nn.Linear(6, 3),
    )
    net.transitions = nn.Parameter(numbers(3, 3))
    net.transitions.data[0, 1] = INF
    return Step(net, [(numbers(4, 6), labels())], cross)


@case(
    "divergence",
    "https://github.com/digantamisra98/EvoNorm/issues/4",
    "divergence",
    module="evo",
    op="std|var",
    fix="spread",
)
def instance_variance_of_one_pixel():
    """The variance over a picture of 1 x 1 is 0 / 0, as torch counts n - 1."""

    def evo(net, x):
        spread = x.var((2, 3), keepdim=True)  # <- guilty
        return x / (spread + 1e-5).sqrt()

    net = Net(
        lambda net, x: net.fc(net.evo(net.conv(x)).flatten(1)),
        conv=nn.Conv2d(2, 6, 3),
        evo=Net(evo),
        fc=nn.Linear(6, 3),
    )
    return Step(net, [(numbers(4, 2, 3, 3), labels())], cross)


@case(
    "divergence",
    "https://github.com/HobbitLong/SupContrast/issues/141",
    "divergence",
    module="",
    op="div",
    samples=(0, 3),
    fix="guard|count",
)
def anchor_without_a_positive():
    """Supervised contrast: the mean over the positives of a sample whose class occurs once is 0 /
    0.
    """

    def loss(net, x, y):
        h = F.normalize(net(x), dim=-1)
        log_p = (h @ h.T / 0.8).log_softmax(-1)
        positive = (y[:, None] == y) & ~torch.eye(4, dtype=torch.bool)
        score = (positive * log_p).sum(1) / positive.sum(1)  # <- guilty
        return -score.mean()

    return Step(nn.Linear(6, 5), [(numbers(4, 6), torch.tensor([0, 1, 1, 3]))], loss)


@case(
    "lawful",
    "https://github.com/NVIDIA/kvpress/issues/268",
    "precision",
    module="press",
    op="div|mul",
    samples=(1,),
    fix="island:press|guard|fp32",
)
def fake_key_beside_masked_gaps():
    """Gaps of the batch are NaN and rightly replaced. Guilty is a fake key, -1e5 * y / |y|**2, of a
    short vector.
    """

    def press(net, x):
        y = net.fc(x)
        fake = -1e5 * y / y.pow(2).sum(-1, keepdim=True)  # <- guilty
        return (x.to(y.dtype) * fake).softmax(-1)

    x = 0.4 + 0.02 * numbers(4, 8)
    x[0, 1] = x[3, 3] = NAN
    x[1] = 0.01
    net = Net(
        lambda net, x: net.press(torch.where(x.isnan(), 0.4, x)), press=Net(press, fc=identity(8))
    )
    return Step(net, [(x,)], weighted, torch.float16)


@case(
    "exotic",
    "https://github.com/ray-project/ray/issues/14878",
    "divergence",
    module="policy",
    op="atanh|log",
    samples=(2,),
    fix="guard",
)
def unsquashed_action_of_one():
    """SAC inverts its tanh to get the log probability: an action of exactly 1 has no finite
    inverse.
    """

    def policy(net, x):
        action = net.fc(x).tanh()
        return torch.atanh(action)  # <- guilty

    x = numbers(4, 6)
    x[2, 0] = 20
    return Step(
        Net(lambda net, x: net.policy(x), policy=Net(policy, fc=identity(6))),
        [(x,)],
        lambda net, x: net(x).pow(2).mean(),
    )
