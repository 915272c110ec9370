"""The exotic: complex numbers, RNNs, hooks, checkpointing, compiled code."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from bench.diagnosis.step import (
    Net,
    Step,
    case,
    cross,
    filled,
    identity,
    labels,
    mean,
    numbers,
    weighted,
)

NAN = math.nan


@case(
    "exotic",
    "https://github.com/pytorch/audio/issues/993",
    "divergence",
    module="spec",
    op="sqrt",
    samples=(1,),
    fix="guard",
)
def complex_spectrum_of_silence():
    """z times its conjugate, whose conjugation is only a bit on the tensor; then the root of 0."""

    def spectrum(net, x):
        z = torch.fft.rfft(x)
        power = (z * z.conj()).real
        return power.sqrt()  # <- guilty

    x = numbers(4, 6)
    x[1] = 0
    return Step(
        Net(lambda net, x: net.spec(net.fc(x)), fc=identity(6), spec=Net(spectrum)), [(x,)], mean
    )


@case(
    "exotic",
    "https://github.com/chenxie95/deeplearning_course_sjtu/issues/31",
    "divergence",
    module="rnn",
    op="mm|linear|rnn|add",
    fix="rate",
)
def relu_rnn_over_a_long_sequence():
    """An RNN with relu multiplies its state by 4 at each of 80 steps. Time first: the batch is the
    second dimension.
    """

    def forward(net, x):
        out, _ = net.rnn(x)  # <- guilty
        return net.head(out[-1])

    net = Net(forward, rnn=nn.RNN(6, 6, nonlinearity="relu", bias=False), head=nn.Linear(6, 3))
    net.rnn.weight_hh_l0.data = 4 * torch.eye(6)
    net.rnn.weight_ih_l0.data = torch.eye(6)
    return Step(net, [(numbers(80, 4, 6).abs(), labels())], cross)


@case(
    "exotic",
    "https://github.com/pytorch/pytorch/issues/19126",
    "divergence",
    module="fc|fc.parametrizations.weight|fc.parametrizations.weight.0",
    op="weight_norm|norm|div|mul",
    samples=(),
    fix="guard|state",
)
def weight_norm_of_a_zero_row():
    """weight_norm divides a row of the weight by its length; a row set to zero has none."""

    from torch.nn.utils import parametrizations

    def forward(net, x):
        return net.fc(x)  # <- guilty

    fc = parametrizations.weight_norm(nn.Linear(6, 3))
    fc.parametrizations.weight.original1.data[1] = 0
    return Step(Net(forward, fc=fc), [(numbers(4, 6), labels())], cross)


@case(
    "exotic",
    "https://github.com/pytorch/pytorch/issues/20192",
    "divergence",
    module="fc|fc.parametrizations.weight|fc.parametrizations.weight.0",
    op="div",
    samples=(),
    fix="guard|state",
)
def spectral_norm_of_a_zero_weight():
    """The largest singular value of a zero weight is 0; the eps of spectral_norm is for its
    vectors, not for this.
    """

    from torch.nn.utils import parametrizations

    def forward(net, x):
        return net.fc(x)  # <- guilty

    fc = parametrizations.spectral_norm(nn.Linear(6, 3))
    fc.parametrizations.weight.original.data.zero_()
    return Step(Net(forward, fc=fc), [(numbers(4, 6), labels())], cross)


@case(
    "exotic",
    "https://github.com/adambielski/siamese-triplet/issues/18",
    "divergence",
    module="",
    op="sqrt",
    samples=(3,),
    fix="guard",
)
def siamese_network_on_an_equal_pair():
    """One network used twice; two equal pictures have distance 0, and sqrt has no slope there."""

    def loss(net, a, b):
        square = (net(a) - net(b)).pow(2).sum(-1)
        distance = square.sqrt()  # <- guilty
        return (1 - distance).clamp(min=0).pow(2).mean()

    a, b = numbers(4, 6), numbers(4, 6, seed=1)
    b[3] = a[3]
    return Step(nn.Linear(6, 5), [(a, b)], loss)


@case(
    "exotic",
    "https://github.com/Peterande/D-FINE/issues/199",
    "precision",
    module="head",
    op="mm|linear",
    samples=(1,),
    fix="island:head",
)
def shared_head_in_its_second_call():
    """The decoder uses one head twice. The first call is harmless, the second passes 65504."""

    def forward(net, x):
        first = net.head(x)
        second = net.head(first)  # <- guilty
        return net.norm(second)

    x = numbers(4, 8).abs()
    x[1] = 100
    return Step(
        Net(forward, head=filled(8, 8, 10.0), norm=nn.LayerNorm(8)), [(x,)], weighted, torch.float16
    )


@case(
    "exotic",
    "https://github.com/keras-team/keras/issues/9269",
    "divergence",
    module="",
    op="sqrt",
    samples=(2,),
    fix="guard",
)
def sparse_gradient_of_an_embedding():
    """The distance of a word to itself: the loss is finite, the gradient of the embedding sparse
    and NaN.
    """

    def loss(net, i, j):
        distance = (net(i) - net(j)).pow(2).sum(-1).sqrt()  # <- guilty
        return distance.mean()

    return Step(
        nn.Embedding(10, 4, sparse=True),
        [(torch.tensor([1, 2, 3, 4]), torch.tensor([5, 6, 3, 7]))],
        loss,
    )


@case(
    "exotic",
    "https://github.com/pyg-team/pytorch_geometric/issues/61",
    "divergence",
    module="gcn",
    op="pow",
    fix="guard",
)
def sparse_adjacency_with_a_negative_degree():
    """A weighted degree may be negative, and then its power of -0.5 is NaN. The batch holds a
    sparse tensor.
    """

    def convolve(net, x, adjacency):
        degree = torch.sparse.sum(adjacency, 1).to_dense()
        scale = degree.pow(-0.5)  # <- guilty
        return scale[:, None] * (adjacency @ (scale[:, None] * net.fc(x)))

    index = torch.tensor([[0, 1, 2, 3, 0], [1, 0, 3, 2, 2]])
    adjacency = torch.sparse_coo_tensor(
        index, torch.tensor([1.0, 1.0, -0.5, 1.0, 1.0]), (4, 4)
    ).coalesce()
    net = Net(lambda net, *batch: net.gcn(*batch), gcn=Net(convolve, fc=identity(6)))
    return Step(net, [(numbers(4, 6), adjacency)], weighted)


@case(
    "exotic",
    "https://github.com/philtabor/Actor-Critic-Methods-Paper-To-Code/issues/7",
    "divergence",
    module="actor",
    op="log",
    samples=(0,),
    fix="guard",
)
def log_of_a_negative_number_in_a_checkpoint():
    """A checkpointed block runs its forward twice. The action is doubled before log(1 - a**2)."""

    from torch.utils.checkpoint import checkpoint

    def actor(net, x):
        action = 2 * net.fc(x).tanh()
        log_p = torch.log(1 - action.pow(2) + 1e-6)  # <- guilty
        return log_p

    x = 0.1 * numbers(4, 6)
    x[0, 2] = 2
    return Step(
        Net(
            lambda net, x: checkpoint(net.actor, x, use_reentrant=False),
            actor=Net(actor, fc=identity(6)),
        ),
        [(x,)],
        mean,
    )


@case(
    "exotic",
    "https://github.com/speechbrain/speechbrain/issues/181",
    "divergence",
    module="magnitude",
    op="pow|sqrt",
    samples=(1,),
    fix="guard",
)
def checkpoint_with_a_bad_backward():
    """Spectral magnitude with power 0.5 in a checkpointed block: a silent frame has no slope, the
    loss is finite.
    """

    from torch.utils.checkpoint import checkpoint

    def magnitude(net, x):
        h = net.fc(x)
        return h.pow(2).sum(-1).pow(0.5)  # <- guilty

    x = numbers(4, 5, 6)
    x[1, 2] = 0
    net = Net(
        lambda net, x: checkpoint(net.magnitude, net.inp(x), use_reentrant=False),
        inp=identity(6),
        magnitude=Net(magnitude, fc=identity(6)),
    )
    return Step(net, [(x,)], mean)


@case(
    "exotic",
    "https://github.com/AlexeyAB/darknet/issues/3994",
    "divergence",
    module="act",
    op="Mish|exp|div",
    samples=(1,),
    fix="guard",
)
def custom_function_with_a_bad_backward():
    """x * tanh(softplus(x)) with the backward of the first published kernels: inf / inf from x = 30
    on.
    """

    class Mish(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * F.softplus(x).tanh()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            omega = 4 * (x + 1) + 4 * (2 * x).exp() + (3 * x).exp()  # <- guilty
            omega = omega + (4 * x + 6) * x.exp()  # <- guilty
            delta = 2 * x.exp() + (2 * x).exp() + 2  # <- guilty
            return grad * x.exp() * omega / delta**2  # <- guilty

    def activate(net, x):
        return Mish.apply(x)  # <- guilty

    x = numbers(4, 6)
    x[1, 1] = 60
    return Step(
        Net(lambda net, x: net.act(net.fc(x)), fc=identity(6), act=Net(activate)), [(x,)], weighted
    )


@case(
    "exotic", "https://github.com/pytorch/pytorch/issues/99840", "compiler", samples=(), fix="eager"
)
def compiled_code_returns_nan():
    """Finite in eager mode, NaN compiled: hunting in eager mode finds nothing."""

    import functools

    def broken_backend(graph: torch.fx.GraphModule, inputs: list) -> object:
        # A compiler whose kernel for relu is wrong: NaN where eager mode has none.
        @functools.wraps(graph.forward)
        def run(*args):
            return tuple(out + NAN for out in graph(*args))

        return run

    net = Net(lambda net, x: net.fc(x).relu(), fc=nn.Linear(6, 3))
    compiled = torch.compile(net, backend=broken_backend)
    return Step(net, [(numbers(4, 6), labels())], lambda net, x, y: F.cross_entropy(compiled(x), y))


@case(
    "exotic",
    "https://github.com/pytorch/pytorch/issues/114109",
    "divergence",
    module="",
    op="div",
    samples=(2,),
    fix="guard",
)
def compiled_code_is_innocent():
    """The step is compiled, the compiler was accused, and eager mode divides by 0 all the same."""

    def forward(net, x):
        h = net.fc(x)
        return h / h.sum(-1, keepdim=True)  # <- guilty

    x = numbers(4, 6)
    x[2] = 0
    net = Net(forward, fc=identity(6))
    compiled = torch.compile(net, backend="eager")
    return Step(net, [(x,)], lambda net, x: (compiled(x) * numbers(4, 6, seed=9)).mean())
