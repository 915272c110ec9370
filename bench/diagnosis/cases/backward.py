"""A finite loss and a bad backward."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from bench.diagnosis.step import Net, Step, case, identity, mean, numbers, weighted

INF, NAN = math.inf, math.nan


@case(
    "backward",
    "https://github.com/pytorch/pytorch/issues/187297",
    "divergence",
    module="",
    op="sqrt",
    samples=(1,),
    fix="guard",
)
def where_does_not_stop_sqrt():
    """The branch that `where` did not take has a backward too: 0 / (2 * sqrt(-1)) is NaN."""

    def forward(net, x):
        h = net.fc(x)
        root = torch.sqrt(h)  # <- guilty
        return torch.where(h > 0, root, h)

    x = numbers(4, 6).abs() + 0.1
    x[1, 2] = -1
    return Step(Net(forward, fc=identity(6)), [(x,)], mean)


@case(
    "backward",
    "https://github.com/pytorch/pytorch/issues/68425",
    "divergence",
    module="",
    op="exp",
    samples=(2,),
    fix="guard",
)
def where_does_not_stop_exp():
    """exp(100) is inf in the branch not taken; its backward is 0 * inf."""

    def forward(net, x):
        h = net.fc(x)
        return torch.where(h <= 0, torch.exp(h), 1 + h)  # <- guilty

    x = numbers(4, 6)
    x[2, 3] = 100
    return Step(Net(forward, fc=identity(6)), [(x,)], mean)


@case(
    "backward",
    "https://github.com/pyg-team/pytorch_geometric/pull/2917",
    "divergence",
    module="norm",
    op="sqrt",
    samples=(2,),
    fix="guard",
)
def layer_norm_of_a_constant_row():
    """The eps is outside the root: a constant row has variance 0, and sqrt has no slope there."""

    def normed(net, x):
        x = x - x.mean(-1, keepdim=True)
        std = x.pow(2).mean(-1, keepdim=True).sqrt()  # <- guilty
        return x / (std + 1e-5)

    x = numbers(4, 6)
    x[2] = 1
    return Step(
        Net(lambda net, x: net.norm(net.fc(x)), fc=identity(6), norm=Net(normed)), [(x,)], weighted
    )


@case(
    "backward",
    "https://github.com/papagina/RotationContinuity/issues/11",
    "divergence",
    module="",
    op="acos",
    samples=(0,),
    fix="guard",
)
def geodesic_distance_of_equal_rotations():
    """acos has no slope at 1; limiting the cosine to 1, not to 0.9999, does not help."""

    def loss(net, x, target):
        cos = (F.normalize(net(x), dim=-1) * target).sum(-1)
        cos = torch.max(torch.min(cos, torch.ones(4)), -torch.ones(4))
        return torch.acos(cos).mean()  # <- guilty

    x = numbers(4, 4)
    x[0] = torch.tensor([1.0, 0, 0, 0])
    target = F.normalize(numbers(4, 4, seed=1), dim=-1)
    target[0] = x[0]
    return Step(identity(4), [(x, target)], loss)


@case(
    "backward",
    "https://github.com/pytorch/pytorch/issues/22820",
    "divergence",
    module="",
    op="div",
    samples=(3,),
    fix="guard",
)
def smape_masked_after_the_division():
    """0 / 0 where prediction and target are 0; the NaN is masked out of the loss but not out of the
    backward.
    """

    def loss(net, x, y):
        out = net(x)
        smape = (out - y).abs() / (out.abs() + y.abs())  # <- guilty
        return smape[~smape.isnan()].mean()

    x, y = numbers(4, 6), numbers(4, 6, seed=1)
    x[3, 1] = y[3, 1] = 0
    return Step(identity(6), [(x, y)], loss)


@case(
    "backward",
    "https://github.com/ultralytics/yolov5/issues/13416",
    "divergence",
    module="",
    op="div",
    samples=(2,),
    fix="guard",
)
def ciou_of_a_flat_box():
    """Height 0: w / h is inf, atan(inf) is finite, and the backward of the division is 0 / 0."""

    def loss(net, x, target):
        w, h = net(x).unbind(-1)
        wide = w / h  # <- guilty
        v = torch.atan(target[:, 0] / target[:, 1]) - torch.atan(wide)
        return (4 / math.pi**2 * v.pow(2)).mean()

    x = numbers(4, 2).abs() + 0.5
    x[2, 1] = 0
    return Step(identity(2), [(x, numbers(4, 2, seed=1).abs() + 0.5)], loss)


@case(
    "backward",
    "https://github.com/pytorch/pytorch/issues/31829",
    "divergence",
    module="",
    op="logsumexp",
    samples=(1,),
    fix="guard",
)
def logsumexp_over_nothing():
    """A state that no path reaches: logsumexp of -inf is -inf, its slope is exp(-inf - -inf)."""

    def loss(net, x, reached):
        alpha = net(x) + torch.where(reached, 0.0, -INF)
        total = alpha.logsumexp(-1)  # <- guilty
        return -torch.where(reached.any(-1), total, 0.0).mean()

    reached = torch.ones(4, 6, dtype=torch.bool)
    reached[:, 4:] = reached[1] = False
    return Step(identity(6), [(numbers(4, 6), reached)], loss)


@case(
    "backward",
    "https://github.com/pytorch/pytorch/issues/49886",
    "divergence",
    module="whiten",
    op="eigh",
    samples=(),
    fix="eigen",
)
def whitening_with_equal_eigenvalues():
    """The slope of the eigenvectors divides by the difference of two eigenvalues; a low rank has
    two zeros.
    """

    def whiten(net, h):
        values, vectors = torch.linalg.eigh(h.T @ h)  # <- guilty
        return h @ vectors / (values.clamp(min=0) + 1.0).sqrt()

    x = torch.zeros(4, 6)
    x[range(4), range(4)] = torch.tensor([1.0, 2, 3, 4])
    return Step(
        Net(lambda net, x: net.whiten(net.fc(x)), fc=identity(6), whiten=Net(whiten)),
        [(x,)],
        weighted,
    )


@case(
    "backward",
    "https://github.com/KinWaiCheuk/nnAudio/issues/138",
    "divergence",
    module="spec",
    op="sqrt",
    samples=(1,),
    fix="guard",
)
def magnitude_of_silence():
    """A silent clip: real and imaginary part are 0, and so is what sqrt gets."""

    def spectrum(net, x):
        return torch.sqrt(net.real(x).pow(2) + net.imag(x).pow(2))  # <- guilty

    x = numbers(4, 6)
    x[1] = 0
    spec = Net(spectrum, real=nn.Linear(6, 5, bias=False), imag=nn.Linear(6, 5, bias=False))
    return Step(Net(lambda net, x: net.spec(net.fc(x)), fc=identity(6), spec=spec), [(x,)], mean)


@case(
    "backward",
    "https://github.com/filipradenovic/cnnimageretrieval-pytorch/issues/73",
    "divergence",
    module="pool",
    op="pow",
    samples=(3,),
    fix="guard",
)
def gem_pooling_of_dead_features():
    """Generalised-mean pooling without clamp(min=eps): 0 ** (1/3) has no finite slope."""

    def pool(net, x):
        cube = x.pow(3).mean(-1)
        return cube.pow(1 / 3)  # <- guilty

    x = numbers(4, 3, 5).abs()
    x[3] = 0
    return Step(
        Net(lambda net, x: net.pool(net.fc(x)), fc=identity(5), pool=Net(pool)), [(x,)], mean
    )


@case(
    "backward",
    "https://github.com/pyro-ppl/numpyro/issues/1696",
    "divergence",
    module="",
    op="xlogy",
    samples=(1,),
    fix="guard",
)
def entropy_by_xlogy():
    """xlogy(0, 0) is 0, as wanted, and its slope is 0 / 0."""

    def loss(net, x):
        p = net(x).relu()
        p = p / p.sum(-1, keepdim=True)
        return torch.xlogy(p, p).sum(-1).mean()  # <- guilty

    x = numbers(4, 6).abs() + 0.1
    x[1, 0] = -1
    return Step(identity(6), [(x,)], loss)


@case(
    "backward",
    "https://github.com/FlyingGiraffe/vnn/pull/4",
    "divergence",
    module="bn",
    op="sqrt",
    samples=(2,),
    fix="guard",
)
def length_of_a_zero_vector():
    """The length of a vector neuron by sqrt of a sum; the vector [0, 0, 0] has no direction."""

    def batch_norm(net, v):
        length = torch.sqrt((v * v).sum(-1))  # <- guilty
        return v * (net.bn(length) / (length + 1e-6))[..., None]

    v = numbers(4, 5, 3)
    v[2, 1] = 0
    bn = Net(batch_norm, bn=nn.BatchNorm1d(5))
    return Step(Net(lambda net, v: net.bn(net.fc(v)), fc=identity(3), bn=bn), [(v,)], weighted)


@case(
    "backward",
    "https://github.com/pytorch/pytorch/issues/17455",
    "divergence",
    module="",
    op="exp|log",
    samples=(1,),
    fix="guard",
)
def overwriting_does_not_stop_the_gradient():
    """log(exp(100) + 1) is inf; writing 0 over it leaves 0 * inf in the backward."""

    def forward(net, x):
        h = net.fc(x)
        f = torch.log(torch.exp(h) + 1)  # <- guilty
        f[h > 50] = 0
        return f

    x = numbers(4, 6)
    x[1, 4] = 100
    return Step(Net(forward, fc=identity(6)), [(x,)], mean)


@case(
    "backward",
    "https://github.com/pytorch/pytorch/issues/64305",
    "data|divergence",
    samples=(1,),
    fix="guard|samples",
)
def targets_masked_too_late():
    """A missing target is NaN. Masked after the square, its gradient is 0 * NaN; masked before, all
    is well.
    """

    def loss(net, x, y):
        return torch.square(net(x) - y)[~y.isnan()].sum()

    y = numbers(4, 6, seed=1)
    y[1, 0] = NAN
    return Step(identity(6), [(numbers(4, 6), y)], loss)


@case(
    "backward",
    "https://github.com/pytorch/pytorch/issues/2534",
    "divergence",
    module="",
    op="sqrt",
    samples=(2,),
    fix="guard",
)
def gradient_penalty_at_a_dead_critic():
    """WGAN-GP: the critic's gradient is 0 for one sample, and the penalty differentiates the root
    of its square.
    """

    def loss(net, x):
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        norm = grad.pow(2).sum(-1).sqrt()  # <- guilty
        return ((norm - 1) ** 2).mean()

    x = numbers(4, 6).abs()
    x[2] *= -1
    return Step(
        Net(lambda net, x: net.out(net.fc(x).relu()), fc=identity(6), out=nn.Linear(6, 1)),
        [(x,)],
        loss,
    )
