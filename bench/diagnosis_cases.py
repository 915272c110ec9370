"""
Faulty training steps rebuilt from other people's published bug reports, with the right diagnosis of
each.

A tool that is tried only on faults of its own author's making is tried on nothing. Each case here
was distilled from a public issue thread (`cite`): small, on the CPU, the guilty operation and the
guilty numbers as reported. What a right diagnosis says was written down from the report before any
tool ran on the case:

    verdict     one of the tool's words; more than one only where two are right
    module      the innermost module that the operation belongs to; "" is the network itself or the
                loss
    op          a part of the operation's aten name, or of the autograd node's name
    line        the line marked `# <- guilty` in the case's source
    samples     which samples of the micro-batch; () = none may be accused; None = not asked
    names       a part of the name of the tensor that was bad before the step
    fix         what the advice must speak of: a key of FIXES in bench/diagnosis.py, or
                "island:MODULE"

What is not given is not asked. diagnosis_more.py holds the second half. Run them with `python
bench/diagnosis.py`.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KINDS = ("backward", "half", "data", "state", "divergence", "lawful", "exotic")
CASES: dict[str, Case] = {}
INF, NAN = math.inf, math.nan


@dataclass
class Step:
    """One training step: `loss(net, *batch)` of every micro-batch, under autocast to `half` if that
    is given.
    """

    net: nn.Module
    batches: list[tuple]
    loss: Callable[..., Tensor]
    half: torch.dtype | None = None
    scale: float = 1.0
    state: Any = None  # nest of optimizer tensors
    num_classes: int | None = None
    pure: bool = False  # the weights themselves are in half

    @property
    def precision(self) -> str:
        return {None: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[self.half]

    def run(self, batch: tuple, fp32: bool) -> Any:
        """Forward and backward of one micro-batch, as autopsy.examine wants it."""
        if self.pure and fp32:
            net = copy.deepcopy(self.net).float()
            loss = self.loss(net, *(x.float() for x in batch))
            loss.backward()
            return loss, {name: p.grad for name, p in net.named_parameters()}
        with torch.autocast("cpu", self.half,
                            enabled=self.half is not None and not fp32 and not self.pure):
            loss = self.loss(self.net, *batch).float()
        (loss * (1.0 if fp32 else self.scale)).backward()
        return loss


@dataclass(frozen=True)
class Case:
    build: Callable[[], Step]
    kind: str
    cite: str
    verdict: tuple[str, ...] | None
    module: tuple[str, ...] | None = None
    op: tuple[str, ...] | None = None
    samples: tuple[int, ...] | None = None
    micro_batch: int | None = None
    names: str | None = None
    fix: tuple[str, ...] | None = None
    lines: tuple[int, ...] = field(default=())
    file: str = ""


def case(kind: str, cite: str, *, verdict: Any, module: Any = None, op: Any = None, fix: Any = None,
         cases: dict[str, Case] = CASES, **more: Any) -> Callable:
    """Enter the decorated builder under its name.

    The guilty lines are found by their marker, never by number.
    """
    def several(words: str | tuple[str, ...] | None) -> tuple[str, ...] | None:
        return (words,) if isinstance(words, str) else words

    def enter(build: Callable[[], Step]) -> Callable[[], Step]:
        source, first = inspect.getsourcelines(build)
        lines = tuple(first + i for i, line in enumerate(source) if "# <- guilty" in line)
        file = inspect.getsourcefile(build) or ""
        cases[build.__name__] = Case(build, kind, cite, several(verdict), several(module),
                                     several(op), fix=several(fix), lines=lines, file=file, **more)
        return build
    return enter


# --- What the cases are made of

class Net(nn.Module):
    """Children by name, and a forward that is written in the case: there stands the guilty line."""

    def __init__(self, body: Callable, **children: nn.Module):
        super().__init__()
        self.body = body
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, *args: Any) -> Any:
        return self.body(self, *args)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def labels(n: int = 4) -> Tensor:
    return torch.arange(n) % 3


def identity(width: int, gain: float = 1.0) -> nn.Linear:
    """y = gain * x: the case says what the next operation gets."""
    layer = nn.Linear(width, width, bias=False)
    layer.weight.data = gain * torch.eye(width)
    return layer


def filled(wide: int, out: int, value: float) -> nn.Linear:
    layer = nn.Linear(wide, out, bias=False)
    layer.weight.data.fill_(value)
    return layer


def mean(net: nn.Module, *batch: Any) -> Tensor:
    return net(*batch).float().mean()


def cross(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net(x).float(), y)


def weighted(net: nn.Module, *batch: Any) -> Tensor:
    """A loss with another slope for every output."""
    out = net(*batch).float()
    return (out * numbers(*out.shape, seed=9)).mean()


# --- A finite loss and a bad backward

@case("backward", "https://github.com/pytorch/pytorch/issues/187297", verdict="divergence",
      module="", op="sqrt", samples=(1,), fix="guard")
def where_does_not_stop_sqrt():
    """The branch that `where` did not take has a backward all the same: 0 / (2 * sqrt(-1)) is NaN.
    """
    def forward(net, x):
        h = net.fc(x)
        root = torch.sqrt(h)  # <- guilty
        return torch.where(h > 0, root, h)

    x = numbers(4, 6).abs() + 0.1
    x[1, 2] = -1
    return Step(Net(forward, fc=identity(6)), [(x,)], mean)


@case("backward", "https://github.com/pytorch/pytorch/issues/68425", verdict="divergence",
      module="", op="exp", samples=(2,), fix="guard")
def where_does_not_stop_exp():
    """exp(100) is inf in the branch not taken; its backward is 0 * inf."""
    def forward(net, x):
        h = net.fc(x)
        return torch.where(h <= 0, torch.exp(h), 1 + h)  # <- guilty

    x = numbers(4, 6)
    x[2, 3] = 100
    return Step(Net(forward, fc=identity(6)), [(x,)], mean)


@case("backward", "https://github.com/pyg-team/pytorch_geometric/pull/2917", verdict="divergence",
      module="norm", op="sqrt", samples=(2,), fix="guard")
def layer_norm_of_a_constant_row():
    """The eps stands outside the root: a constant row has variance 0, and sqrt has no slope there.
    """
    def normed(net, x):
        x = x - x.mean(-1, keepdim=True)
        std = x.pow(2).mean(-1, keepdim=True).sqrt()  # <- guilty
        return x / (std + 1e-5)

    x = numbers(4, 6)
    x[2] = 1
    return Step(Net(lambda net, x: net.norm(net.fc(x)), fc=identity(6), norm=Net(normed)), [(x,)],
                weighted)


@case("backward", "https://github.com/papagina/RotationContinuity/issues/11", verdict="divergence",
      module="", op="acos", samples=(0,), fix="guard")
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


@case("backward", "https://github.com/pytorch/pytorch/issues/22820", verdict="divergence",
      module="", op="div", samples=(3,), fix="guard")
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


@case("backward", "https://github.com/ultralytics/yolov5/issues/13416", verdict="divergence",
      module="", op="div", samples=(2,), fix="guard")
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


@case("backward", "https://github.com/pytorch/pytorch/issues/31829", verdict="divergence",
      module="", op="logsumexp", samples=(1,), fix="guard")
def logsumexp_over_nothing():
    """A state that no path reaches: logsumexp of -inf only is -inf, its slope is exp(-inf - -inf).
    """
    def loss(net, x, reached):
        alpha = net(x) + torch.where(reached, 0.0, -INF)
        total = alpha.logsumexp(-1)  # <- guilty
        return -torch.where(reached.any(-1), total, 0.0).mean()

    reached = torch.ones(4, 6, dtype=torch.bool)
    reached[:, 4:] = reached[1] = False
    return Step(identity(6), [(numbers(4, 6), reached)], loss)


@case("backward", "https://github.com/pytorch/pytorch/issues/49886", verdict="divergence",
      module="whiten", op="eigh", samples=(), fix="eigen")
def whitening_with_equal_eigenvalues():
    """The slope of the eigenvectors divides by the difference of two eigenvalues; a low rank has
    two zeros.
    """
    def whiten(net, h):
        values, vectors = torch.linalg.eigh(h.T @ h)  # <- guilty
        return h @ vectors / (values.clamp(min=0) + 1.0).sqrt()

    x = torch.zeros(4, 6)
    x[range(4), range(4)] = torch.tensor([1.0, 2, 3, 4])
    return Step(Net(lambda net, x: net.whiten(net.fc(x)), fc=identity(6), whiten=Net(whiten)),
                [(x,)], weighted)


@case("backward", "https://github.com/KinWaiCheuk/nnAudio/issues/138", verdict="divergence",
      module="spec", op="sqrt", samples=(1,), fix="guard")
def magnitude_of_silence():
    """A silent clip: real and imaginary part are 0, and so is what sqrt gets."""
    def spectrum(net, x):
        return torch.sqrt(net.real(x).pow(2) + net.imag(x).pow(2))  # <- guilty

    x = numbers(4, 6)
    x[1] = 0
    spec = Net(spectrum, real=nn.Linear(6, 5, bias=False), imag=nn.Linear(6, 5, bias=False))
    return Step(Net(lambda net, x: net.spec(net.fc(x)), fc=identity(6), spec=spec), [(x,)], mean)


@case("backward", "https://github.com/filipradenovic/cnnimageretrieval-pytorch/issues/73",
      verdict="divergence", module="pool", op="pow", samples=(3,), fix="guard")
def gem_pooling_of_dead_features():
    """Generalised-mean pooling without clamp(min=eps): 0 ** (1/3) has no finite slope."""
    def pool(net, x):
        cube = x.pow(3).mean(-1)
        return cube.pow(1 / 3)  # <- guilty

    x = numbers(4, 3, 5).abs()
    x[3] = 0
    return Step(Net(lambda net, x: net.pool(net.fc(x)), fc=identity(5), pool=Net(pool)), [(x,)],
                mean)


@case("backward", "https://github.com/pyro-ppl/numpyro/issues/1696", verdict="divergence",
      module="", op="xlogy", samples=(1,), fix="guard")
def entropy_by_xlogy():
    """xlogy(0, 0) is 0, as wanted, and its slope is 0 / 0."""
    def loss(net, x):
        p = net(x).relu()
        p = p / p.sum(-1, keepdim=True)
        return torch.xlogy(p, p).sum(-1).mean()  # <- guilty

    x = numbers(4, 6).abs() + 0.1
    x[1, 0] = -1
    return Step(identity(6), [(x,)], loss)


@case("backward", "https://github.com/FlyingGiraffe/vnn/pull/4", verdict="divergence", module="bn",
      op="sqrt", samples=(2,), fix="guard")
def length_of_a_zero_vector():
    """The length of a vector neuron by sqrt of a sum; the vector [0, 0, 0] has no direction."""
    def batch_norm(net, v):
        length = torch.sqrt((v * v).sum(-1))  # <- guilty
        return v * (net.bn(length) / (length + 1e-6))[..., None]

    v = numbers(4, 5, 3)
    v[2, 1] = 0
    bn = Net(batch_norm, bn=nn.BatchNorm1d(5))
    return Step(Net(lambda net, v: net.bn(net.fc(v)), fc=identity(3), bn=bn), [(v,)], weighted)


@case("backward", "https://github.com/pytorch/pytorch/issues/17455", verdict="divergence",
      module="", op=("exp", "log"), samples=(1,), fix="guard")
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


@case("backward", "https://github.com/pytorch/pytorch/issues/64305", verdict=("data", "divergence"),
      samples=(1,), fix=("guard", "samples"))
def targets_masked_too_late():
    """A missing target is NaN.

    Masked after the square, its gradient is 0 * NaN; masked before, all is well.
    """
    def loss(net, x, y):
        return torch.square(net(x) - y)[~y.isnan()].sum()

    y = numbers(4, 6, seed=1)
    y[1, 0] = NAN
    return Step(identity(6), [(numbers(4, 6), y)], loss)


@case("backward", "https://github.com/pytorch/pytorch/issues/2534", verdict="divergence", module="",
      op="sqrt", samples=(2,), fix="guard")
def gradient_penalty_at_a_dead_critic():
    """WGAN-GP: the critic's gradient is 0 for one sample, and the penalty differentiates the root
    of its square.
    """
    def loss(net, x):
        x = x.clone().requires_grad_()
        grad, = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        norm = grad.pow(2).sum(-1).sqrt()  # <- guilty
        return ((norm - 1) ** 2).mean()

    x = numbers(4, 6).abs()
    x[2] *= -1
    return Step(Net(lambda net, x: net.out(net.fc(x).relu()), fc=identity(6), out=nn.Linear(6, 1)),
                [(x,)], loss)


# --- fp16 and bf16: overflow and underflow

@case("half", "https://github.com/huggingface/transformers/issues/5651", verdict="precision",
      module="ff.wo", op=("mm", "linear"), samples=(2,), fix=("island:ff.wo", "island:ff"))
def t5_feed_forward():
    """T5's second projection makes 66246 (here 102400) out of ordinary hidden values: inf in fp16,
    fine in fp32.
    """
    def feed_forward(net, x):
        h = net.wi(x).relu()
        return x + net.wo(h)  # <- guilty

    x = numbers(4, 8).abs()
    x[2] = 200
    ff = Net(feed_forward, wi=filled(8, 64, 1.0), wo=filled(64, 8, 1.0))
    net = Net(lambda net, x: net.head(net.norm(net.ff(x))), ff=ff, norm=nn.LayerNorm(8),
              head=nn.Linear(8, 3))
    return Step(net, [(x, labels())], cross, torch.float16)


@case("half", "https://github.com/ultralytics/ultralytics/pull/24990", verdict="precision",
      module="attn", op=("mm", "matmul"), samples=(1,), fix="island:attn")
def attention_scaled_too_late():
    """q @ k passes 65504 before the scale makes it small; softmax of inf is NaN."""
    def attention(net, x):
        q, k = net.q(x), net.k(x)
        scores = q @ k.transpose(1, 2)  # <- guilty
        return (scores * 64**-0.5).softmax(-1) @ x.to(scores.dtype)

    x = numbers(4, 3, 64)
    x[1] = 40
    attn = Net(attention, q=identity(64), k=identity(64))
    return Step(Net(lambda net, x: net.attn(x), attn=attn), [(x,)], weighted, torch.float16)


@case("half", "https://github.com/qubvel-org/segmentation_models.pytorch/issues/463",
      verdict="precision", module="", op="sum", samples=(), fix="fp32")
def dice_over_a_large_image():
    """The intersection counts pixels: 90000 of them do not fit into fp16. The loss is inf / inf."""
    def loss(net, x, y):
        p = net(x).sigmoid()
        y = y.to(p.dtype)
        overlap = torch.sum(p * y)  # <- guilty
        return 1 - 2 * overlap / (p.float().sum() + y.float().sum())

    conv = nn.Conv2d(1, 1, 1)
    conv.weight.data.fill_(20)
    return Step(conv, [(torch.ones(4, 1, 150, 150), torch.ones(4, 1, 150, 150))], loss,
                torch.float16)


@case("half", "https://github.com/pytorch/pytorch/issues/32137", verdict="precision", module="",
      op="div", samples=(0,), fix=("guard", "fp32"))
def normalize_with_an_eps_that_is_zero():
    """F.normalize's eps of 1e-12 is 0 in fp16: a zero vector is divided by 0."""
    def forward(net, x):
        return F.normalize(net.fc(x), dim=-1)  # <- guilty

    x = numbers(4, 6)
    x[0] = 0
    return Step(Net(forward, fc=identity(6)), [(x,)], weighted, torch.float16)


@case("half", "https://github.com/pytorch/pytorch/issues/88474", verdict="precision", module="conv",
      op="conv", samples=(3,), fix="island:conv")
def overflow_that_soils_batch_norm():
    """The convolution overflows; the batch norm after it writes NaN into its running statistics in
    the same step.
    """
    def forward(net, x):
        h = net.conv(x)  # <- guilty
        return net.bn(h.relu())

    conv = nn.Conv1d(3, 16, 3, padding=1, bias=False)
    conv.weight.data.fill_(1.0)
    x = numbers(4, 3, 10)
    x[3] = 20000
    return Step(Net(forward, conv=conv, bn=nn.BatchNorm1d(16)), [(x,)], weighted, torch.float16)


@case("half", "https://github.com/pytorch/pytorch/issues/40497", verdict="precision", module="",
      op="log", samples=(2,), fix=("guard", "fp32"))
def focal_loss_of_a_vanished_probability():
    """sigmoid(-20) is 2e-9, 0 in fp16, and log(0) follows."""
    def loss(net, x, y):
        p = torch.sigmoid(net(x))
        log_p = torch.log(p)  # <- guilty
        return -(y * (1 - p) ** 2 * log_p).mean()

    x = numbers(4, 6)
    x[2, 5] = -20
    return Step(identity(6), [(x, torch.ones(4, 6))], loss, torch.float16)


@case("half", "https://github.com/zylo117/Yet-Another-EfficientDet-Pytorch/issues/502",
      verdict="precision", module="", op="log", samples=(1,), fix=("guard", "fp32"))
def clamp_that_rounds_to_one():
    """1 - 1e-4 is 1 in fp16, so the clamp lets a probability of 1 pass to log(1 - p)."""
    def loss(net, x):
        p = torch.clamp(net(x).sigmoid(), 1e-4, 1.0 - 1e-4)
        return -torch.log(1.0 - p).mean()  # <- guilty

    x = numbers(4, 6)
    x[1, 1] = 12
    return Step(identity(6), [(x,)], loss, torch.float16)


@case("half", "https://github.com/huggingface/transformers/pull/17306", verdict="precision",
      module="attn", op=("add", "softmax"), samples=(0,), fix=("island:attn", "guard", "fp32"))
def smallest_number_plus_a_score():
    """finfo(fp16).min - 40 is -inf.

    A padding row sees padding only: softmax over nothing but -inf is 0 / 0.
    """
    def attention(net, x, see):
        scores = net.q(x) @ net.k(x).transpose(1, 2)
        mask = (1 - see.to(scores.dtype)) * torch.finfo(scores.dtype).min
        scores = scores + mask  # <- guilty
        return scores.softmax(-1) @ x.to(scores.dtype)  # <- guilty

    see = torch.ones(4, 3, 3)
    see[0] = torch.ones(3, 3).tril()
    see[0, :, 0] = 0  # causal, and padded on the left: the first row of sample 0 sees nothing
    x = 3 + 0.1 * numbers(4, 3, 8)
    attn = Net(attention, q=identity(8), k=identity(8, -1.0))
    return Step(Net(lambda net, *batch: net.attn(*batch), attn=attn), [(x, see)], weighted,
                torch.float16)


@case("half", "https://github.com/mit-han-lab/efficientvit/issues/110", verdict="precision",
      module="att", op=("mm", "matmul"), samples=(1,), fix="island:att")
def linear_attention_sums_the_tokens():
    """k^T v adds up over 100 tokens before anything divides by their number."""
    def attention(net, x):
        q, k, v = (net.qkv(x).relu() for _ in range(3))
        kv = k.transpose(1, 2) @ v  # <- guilty
        return (q @ kv) / ((q @ k.transpose(1, 2)).sum(-1, keepdim=True) + 1e-4)

    x = numbers(4, 100, 4)
    x[1] = 30
    return Step(Net(lambda net, x: net.att(x), att=Net(attention, qkv=identity(4))), [(x,)],
                weighted, torch.float16)


@case("half", "https://github.com/open-mmlab/mmdetection/issues/1606", verdict="precision",
      module="head", op="exp", samples=(0,), fix=("island:head", "fp32", "guard"))
def box_decoded_by_exp():
    """FCOS: the distance to a side is exp of the regression, and exp(12) = 162755 is inf in fp16.
    """
    def head(net, x):
        return net.reg(x).exp()  # <- guilty

    x = numbers(4, 4)
    x[0, 3] = 12
    net = Net(lambda net, x: net.head(x), head=Net(head, reg=identity(4)))
    return Step(net, [(x, torch.ones(4, 4))], lambda net, x, y: F.smooth_l1_loss(net(x).float(), y),
                torch.float16)


@case("half", "https://github.com/google-ai-edge/LiteRT/issues/9249", verdict="precision",
      module="se", op="sum", samples=(2,), fix="island:se")
def squeeze_and_excite_by_a_sum():
    """The sum over 256 positions passes 65504 before the division by 256."""
    def excite(net, x):
        pooled = x.sum((2, 3)) / 256  # <- guilty
        return x * net.fc(pooled).sigmoid()[..., None, None]

    x = numbers(4, 3, 16, 16)
    x[2] = 300
    fc = nn.Linear(3, 3)
    fc.weight.data = torch.tensor([[1.0, -1, 1], [1, 1, -1], [-1, 1, 1]])
    conv = nn.Conv2d(3, 3, 1, bias=False)
    conv.weight.data = torch.eye(3)[..., None, None]
    net = Net(lambda net, x: net.se(net.conv(x)), conv=conv, se=Net(excite, fc=fc))
    return Step(net, [(x,)], weighted, torch.float16)


@case("half", "https://github.com/cumulo-autumn/StreamDiffusion/issues/114", verdict="precision",
      module="decoder.up", op="conv", samples=(1,), fix=("island:decoder", "fp32"))
def vae_with_half_weights():
    """The whole decoder in fp16, weights too: its activations grow beyond 65504 and the picture is
    black.
    """
    def decoder(net, x):
        h = net.inp(x)
        h = net.up(h)  # <- guilty
        return net.out(net.norm(h))

    up = nn.Conv1d(8, 8, 3, padding=1)
    up.weight.data.fill_(30)
    inp = nn.Conv1d(4, 8, 1)
    inp.weight.data.fill_(1)
    parts = dict(inp=inp, up=up, norm=nn.GroupNorm(2, 8), out=nn.Conv1d(8, 3, 1))
    x = numbers(4, 4, 6).abs().half()
    x[1] = 100
    return Step(Net(lambda net, x: net.decoder(x), decoder=Net(decoder, **parts)).half(), [(x,)],
                weighted, torch.float16, pure=True)


@case("half", "https://github.com/fastino-ai/GLiNER2/pull/155", verdict="precision", module="",
      op="log1p", samples=(2,), fix=("guard", "fp32"))
def survival_in_bf16():
    """1 - 1e-6 is 1 in bf16. log1p(-1) = -inf is swallowed by exp, so the loss is finite and the
    backward 0 * inf.
    """
    def loss(net, x):
        p = net(x).sigmoid()
        # the clamp of the report; clamp itself has slope 0 at its limit
        p = torch.minimum(p, p.new_tensor(1.0 - 1e-6))
        log_survival = torch.log1p(-p)  # <- guilty
        return (1 - log_survival.sum(-1).exp()).mean()

    x = numbers(4, 6) - 2
    x[2, 0] = 12
    return Step(identity(6), [(x,)], loss, torch.bfloat16)


@case("half", "https://github.com/Lightning-AI/torchmetrics/issues/1380", verdict="precision",
      module="", op="sum", samples=(3,), fix="fp32")
def manhattan_distance_of_long_vectors():
    """The sum of 1024 absolute differences of 100 does not fit into fp16."""
    def loss(net, x):
        a, b = net(x).flatten(1), net(-x).flatten(1)
        return (a - b).abs().sum(-1).mean()  # <- guilty

    x = numbers(4, 128, 8)
    x[3] = 50
    return Step(identity(8), [(x,)], loss, torch.float16)


@case("half", "https://github.com/NVIDIA/apex/issues/318", verdict="calibration", fix="nothing")
def loss_scale_too_large():
    """Nothing is wrong: at a scale of 2**20 the gradient of the logits passes 65504, at scale 1 it
    does not.
    """
    return Step(nn.Linear(6, 3), [(numbers(4, 6), labels())], cross, torch.float16, scale=2.0**20)


@case("half", "https://github.com/deepspeedai/DeepSpeed/issues/931", verdict="calibration",
      micro_batch=1, fix="nothing")
def loss_scale_too_large_for_one_micro_batch():
    """The first steps of a run at the usual 65536: inputs of 100 make the scaled gradient of the
    weight overflow.
    """
    batches = [(numbers(4, 6), labels()), (100 * numbers(4, 6, seed=1).abs(), labels())]
    return Step(nn.Linear(6, 3), batches, lambda net, x, y: 4 * cross(net, x, y), torch.float16,
                scale=2.0**16)
