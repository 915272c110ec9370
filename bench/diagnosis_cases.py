"""
Faulty training steps rebuilt from other people's published bug reports, with the right diagnosis of
each.

A tool that is tried only on faults of its own author's making is tried on nothing. Each case here
was distilled from a public issue thread: small, on the CPU, the guilty operation and the guilty
numbers as reported. It is a text as a user would write it, and leaves a `step`. What a right
diagnosis says was written down from the report before any tool ran on the case ("a|b": either):

    verdict     one of the tool's words; more than one only where two are right
    module      the innermost module that the operation belongs to; "" is the network itself or the
                loss
    op          a part of the operation's aten name, or of the autograd node's name
    samples     which samples of the micro-batch; () = none may be accused
    names       a part of the name of the tensor that was bad before the step
    fix         what the advice must speak of: a key of FIXES in bench/diagnosis.py, or
                "island:MODULE"
    the line    is the one marked `# <- guilty`

What is not given is not asked. Run them with `python bench/diagnosis.py`.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INF, NAN = math.inf, math.nan
SOURCE = Path(__file__).read_text()


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
    state: dict | None = None  # of an optimizer
    num_classes: int | None = None
    pure: bool = False  # the weights themselves are in half

    @property
    def precision(self):
        return {None: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[self.half]

    def run(self, batch, fp32):
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
    kind: str
    cite: str
    verdict: tuple[str, ...]
    text: str
    lines: tuple[int, ...]  # the guilty ones, in this file
    module: tuple[str, ...] | None = None
    op: tuple[str, ...] | None = None
    samples: tuple[int, ...] | None = None
    micro_batch: int | None = None
    names: str | None = None
    fix: tuple[str, ...] | None = None

    def build(self):
        """The step that the text leaves. A traceback through it names lines of this file."""
        names = dict(globals())
        exec(compile(self.text, __file__, "exec"), names)
        return names["step"]


def case(kind, cite, verdict, text, **asked):
    for what in {"module", "op", "fix"} & asked.keys():
        asked[what] = tuple(asked[what].split("|"))
    above = SOURCE[: SOURCE.index(text)].count("\n")
    lines = enumerate(text.splitlines(), above + 1)
    guilty = tuple(number for number, line in lines if line.endswith("# <- guilty"))
    return Case(kind, cite, tuple(verdict.split("|")), "\n" * above + text, guilty, **asked)


# --- What the cases are made of

class Net(nn.Module):
    """Children by name, and a forward that is written in the case: there stands the guilty line."""

    def __init__(self, body, **children):
        super().__init__()
        self.body = body
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, *args):
        return self.body(self, *args)


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def labels(n=4):
    return torch.arange(n) % 3


def identity(width, gain=1.0):
    """y = gain * x: the case says what the next operation gets."""
    layer = nn.Linear(width, width, bias=False)
    layer.weight.data = gain * torch.eye(width)
    return layer


def filled(wide, out, value):
    layer = nn.Linear(wide, out, bias=False)
    layer.weight.data.fill_(value)
    return layer


def mean(net, *batch):
    return net(*batch).float().mean()


def cross(net, x, y):
    return F.cross_entropy(net(x).float(), y)


def weighted(net, *batch):
    """A loss with another slope for every output."""
    out = net(*batch).float()
    return (out * numbers(*out.shape, seed=9)).mean()


CASES = {
    # --- A finite loss and a bad backward
    "where_does_not_stop_sqrt": case(
        "backward", "https://github.com/pytorch/pytorch/issues/187297", "divergence", module="",
        op="sqrt", samples=(1,), fix="guard", text="""
# The branch that `where` did not take has a backward all the same: 0 / (2 * sqrt(-1)) is NaN.
def forward(net, x):
    h = net.fc(x)
    root = torch.sqrt(h)  # <- guilty
    return torch.where(h > 0, root, h)

x = numbers(4, 6).abs() + 0.1
x[1, 2] = -1
step = Step(Net(forward, fc=identity(6)), [(x,)], mean)
"""),
    "where_does_not_stop_exp": case(
        "backward", "https://github.com/pytorch/pytorch/issues/68425", "divergence", module="",
        op="exp", samples=(2,), fix="guard", text="""
# exp(100) is inf in the branch not taken; its backward is 0 * inf.
def forward(net, x):
    h = net.fc(x)
    return torch.where(h <= 0, torch.exp(h), 1 + h)  # <- guilty

x = numbers(4, 6)
x[2, 3] = 100
step = Step(Net(forward, fc=identity(6)), [(x,)], mean)
"""),
    "layer_norm_of_a_constant_row": case(
        "backward", "https://github.com/pyg-team/pytorch_geometric/pull/2917", "divergence",
        module="norm", op="sqrt", samples=(2,), fix="guard", text="""
# The eps stands outside the root: a constant row has variance 0, and sqrt has no slope there.
def normed(net, x):
    x = x - x.mean(-1, keepdim=True)
    std = x.pow(2).mean(-1, keepdim=True).sqrt()  # <- guilty
    return x / (std + 1e-5)

x = numbers(4, 6)
x[2] = 1
step = Step(Net(lambda net, x: net.norm(net.fc(x)), fc=identity(6), norm=Net(normed)), [(x,)],
            weighted)
"""),
    "geodesic_distance_of_equal_rotations": case(
        "backward", "https://github.com/papagina/RotationContinuity/issues/11", "divergence",
        module="", op="acos", samples=(0,), fix="guard", text="""
# acos has no slope at 1; limiting the cosine to 1, not to 0.9999, does not help.
def loss(net, x, target):
    cos = (F.normalize(net(x), dim=-1) * target).sum(-1)
    cos = torch.max(torch.min(cos, torch.ones(4)), -torch.ones(4))
    return torch.acos(cos).mean()  # <- guilty

x = numbers(4, 4)
x[0] = torch.tensor([1.0, 0, 0, 0])
target = F.normalize(numbers(4, 4, seed=1), dim=-1)
target[0] = x[0]
step = Step(identity(4), [(x, target)], loss)
"""),
    "smape_masked_after_the_division": case(
        "backward", "https://github.com/pytorch/pytorch/issues/22820", "divergence", module="",
        op="div", samples=(3,), fix="guard", text="""
# 0 / 0 where prediction and target are 0; the NaN is masked out of the loss but not out of the
# backward.
def loss(net, x, y):
    out = net(x)
    smape = (out - y).abs() / (out.abs() + y.abs())  # <- guilty
    return smape[~smape.isnan()].mean()

x, y = numbers(4, 6), numbers(4, 6, seed=1)
x[3, 1] = y[3, 1] = 0
step = Step(identity(6), [(x, y)], loss)
"""),
    "ciou_of_a_flat_box": case(
        "backward", "https://github.com/ultralytics/yolov5/issues/13416", "divergence", module="",
        op="div", samples=(2,), fix="guard", text="""
# Height 0: w / h is inf, atan(inf) is finite, and the backward of the division is 0 / 0.
def loss(net, x, target):
    w, h = net(x).unbind(-1)
    wide = w / h  # <- guilty
    v = torch.atan(target[:, 0] / target[:, 1]) - torch.atan(wide)
    return (4 / math.pi**2 * v.pow(2)).mean()

x = numbers(4, 2).abs() + 0.5
x[2, 1] = 0
step = Step(identity(2), [(x, numbers(4, 2, seed=1).abs() + 0.5)], loss)
"""),
    "logsumexp_over_nothing": case(
        "backward", "https://github.com/pytorch/pytorch/issues/31829", "divergence", module="",
        op="logsumexp", samples=(1,), fix="guard", text="""
# A state that no path reaches: logsumexp of -inf only is -inf, its slope is exp(-inf - -inf).
def loss(net, x, reached):
    alpha = net(x) + torch.where(reached, 0.0, -INF)
    total = alpha.logsumexp(-1)  # <- guilty
    return -torch.where(reached.any(-1), total, 0.0).mean()

reached = torch.ones(4, 6, dtype=torch.bool)
reached[:, 4:] = reached[1] = False
step = Step(identity(6), [(numbers(4, 6), reached)], loss)
"""),
    "whitening_with_equal_eigenvalues": case(
        "backward", "https://github.com/pytorch/pytorch/issues/49886", "divergence",
        module="whiten", op="eigh", samples=(), fix="eigen", text="""
# The slope of the eigenvectors divides by the difference of two eigenvalues; a low rank has two
# zeros.
def whiten(net, h):
    values, vectors = torch.linalg.eigh(h.T @ h)  # <- guilty
    return h @ vectors / (values.clamp(min=0) + 1.0).sqrt()

x = torch.zeros(4, 6)
x[range(4), range(4)] = torch.tensor([1.0, 2, 3, 4])
step = Step(Net(lambda net, x: net.whiten(net.fc(x)), fc=identity(6), whiten=Net(whiten)),
            [(x,)], weighted)
"""),
    "magnitude_of_silence": case(
        "backward", "https://github.com/KinWaiCheuk/nnAudio/issues/138", "divergence",
        module="spec", op="sqrt", samples=(1,), fix="guard", text="""
# A silent clip: real and imaginary part are 0, and so is what sqrt gets.
def spectrum(net, x):
    return torch.sqrt(net.real(x).pow(2) + net.imag(x).pow(2))  # <- guilty

x = numbers(4, 6)
x[1] = 0
spec = Net(spectrum, real=nn.Linear(6, 5, bias=False), imag=nn.Linear(6, 5, bias=False))
step = Step(Net(lambda net, x: net.spec(net.fc(x)), fc=identity(6), spec=spec), [(x,)], mean)
"""),
    "gem_pooling_of_dead_features": case(
        "backward", "https://github.com/filipradenovic/cnnimageretrieval-pytorch/issues/73",
        "divergence", module="pool", op="pow", samples=(3,), fix="guard", text="""
# Generalised-mean pooling without clamp(min=eps): 0 ** (1/3) has no finite slope.
def pool(net, x):
    cube = x.pow(3).mean(-1)
    return cube.pow(1 / 3)  # <- guilty

x = numbers(4, 3, 5).abs()
x[3] = 0
step = Step(Net(lambda net, x: net.pool(net.fc(x)), fc=identity(5), pool=Net(pool)), [(x,)], mean)
"""),
    "entropy_by_xlogy": case(
        "backward", "https://github.com/pyro-ppl/numpyro/issues/1696", "divergence", module="",
        op="xlogy", samples=(1,), fix="guard", text="""
# xlogy(0, 0) is 0, as wanted, and its slope is 0 / 0.
def loss(net, x):
    p = net(x).relu()
    p = p / p.sum(-1, keepdim=True)
    return torch.xlogy(p, p).sum(-1).mean()  # <- guilty

x = numbers(4, 6).abs() + 0.1
x[1, 0] = -1
step = Step(identity(6), [(x,)], loss)
"""),
    "length_of_a_zero_vector": case(
        "backward", "https://github.com/FlyingGiraffe/vnn/pull/4", "divergence", module="bn",
        op="sqrt", samples=(2,), fix="guard", text="""
# The length of a vector neuron by sqrt of a sum; the vector [0, 0, 0] has no direction.
def batch_norm(net, v):
    length = torch.sqrt((v * v).sum(-1))  # <- guilty
    return v * (net.bn(length) / (length + 1e-6))[..., None]

v = numbers(4, 5, 3)
v[2, 1] = 0
bn = Net(batch_norm, bn=nn.BatchNorm1d(5))
step = Step(Net(lambda net, v: net.bn(net.fc(v)), fc=identity(3), bn=bn), [(v,)], weighted)
"""),
    "overwriting_does_not_stop_the_gradient": case(
        "backward", "https://github.com/pytorch/pytorch/issues/17455", "divergence", module="",
        op="exp|log", samples=(1,), fix="guard", text="""
# log(exp(100) + 1) is inf; writing 0 over it leaves 0 * inf in the backward.
def forward(net, x):
    h = net.fc(x)
    f = torch.log(torch.exp(h) + 1)  # <- guilty
    f[h > 50] = 0
    return f

x = numbers(4, 6)
x[1, 4] = 100
step = Step(Net(forward, fc=identity(6)), [(x,)], mean)
"""),
    "targets_masked_too_late": case(
        "backward", "https://github.com/pytorch/pytorch/issues/64305", "data|divergence",
        samples=(1,), fix="guard|samples", text="""
# A missing target is NaN. Masked after the square, its gradient is 0 * NaN; masked before, all is
# well.
def loss(net, x, y):
    return torch.square(net(x) - y)[~y.isnan()].sum()

y = numbers(4, 6, seed=1)
y[1, 0] = NAN
step = Step(identity(6), [(numbers(4, 6), y)], loss)
"""),
    "gradient_penalty_at_a_dead_critic": case(
        "backward", "https://github.com/pytorch/pytorch/issues/2534", "divergence", module="",
        op="sqrt", samples=(2,), fix="guard", text="""
# WGAN-GP: the critic's gradient is 0 for one sample, and the penalty differentiates the root of
# its square.
def loss(net, x):
    x = x.clone().requires_grad_()
    grad, = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    norm = grad.pow(2).sum(-1).sqrt()  # <- guilty
    return ((norm - 1) ** 2).mean()

x = numbers(4, 6).abs()
x[2] *= -1
step = Step(Net(lambda net, x: net.out(net.fc(x).relu()), fc=identity(6), out=nn.Linear(6, 1)),
            [(x,)], loss)
"""),
    # --- fp16 and bf16: overflow and underflow
    "t5_feed_forward": case(
        "half", "https://github.com/huggingface/transformers/issues/5651", "precision",
        module="ff.wo", op="mm|linear", samples=(2,), fix="island:ff.wo|island:ff", text="""
# T5's second projection makes 66246 (here 102400) out of ordinary hidden values: inf in fp16,
# fine in fp32.
def feed_forward(net, x):
    h = net.wi(x).relu()
    return x + net.wo(h)  # <- guilty

x = numbers(4, 8).abs()
x[2] = 200
ff = Net(feed_forward, wi=filled(8, 64, 1.0), wo=filled(64, 8, 1.0))
net = Net(lambda net, x: net.head(net.norm(net.ff(x))), ff=ff, norm=nn.LayerNorm(8),
          head=nn.Linear(8, 3))
step = Step(net, [(x, labels())], cross, torch.float16)
"""),
    "attention_scaled_too_late": case(
        "half", "https://github.com/ultralytics/ultralytics/pull/24990", "precision",
        module="attn", op="mm|matmul", samples=(1,), fix="island:attn", text="""
# q @ k passes 65504 before the scale makes it small; softmax of inf is NaN.
def attention(net, x):
    q, k = net.q(x), net.k(x)
    scores = q @ k.transpose(1, 2)  # <- guilty
    return (scores * 64**-0.5).softmax(-1) @ x.to(scores.dtype)

x = numbers(4, 3, 64)
x[1] = 40
attn = Net(attention, q=identity(64), k=identity(64))
step = Step(Net(lambda net, x: net.attn(x), attn=attn), [(x,)], weighted, torch.float16)
"""),
    "dice_over_a_large_image": case(
        "half", "https://github.com/qubvel-org/segmentation_models.pytorch/issues/463",
        "precision", module="", op="sum", samples=(), fix="fp32", text="""
# The intersection counts pixels: 90000 of them do not fit into fp16. The loss is inf / inf.
def loss(net, x, y):
    p = net(x).sigmoid()
    y = y.to(p.dtype)
    overlap = torch.sum(p * y)  # <- guilty
    return 1 - 2 * overlap / (p.float().sum() + y.float().sum())

conv = nn.Conv2d(1, 1, 1)
conv.weight.data.fill_(20)
step = Step(conv, [(torch.ones(4, 1, 150, 150), torch.ones(4, 1, 150, 150))], loss, torch.float16)
"""),
    "normalize_with_an_eps_that_is_zero": case(
        "half", "https://github.com/pytorch/pytorch/issues/32137", "precision", module="",
        op="div", samples=(0,), fix="guard|fp32", text="""
# F.normalize's eps of 1e-12 is 0 in fp16: a zero vector is divided by 0.
def forward(net, x):
    return F.normalize(net.fc(x), dim=-1)  # <- guilty

x = numbers(4, 6)
x[0] = 0
step = Step(Net(forward, fc=identity(6)), [(x,)], weighted, torch.float16)
"""),
    "overflow_that_soils_batch_norm": case(
        "half", "https://github.com/pytorch/pytorch/issues/88474", "precision", module="conv",
        op="conv", samples=(3,), fix="island:conv", text="""
# The convolution overflows; the batch norm after it writes NaN into its running statistics in the
# same step.
def forward(net, x):
    h = net.conv(x)  # <- guilty
    return net.bn(h.relu())

conv = nn.Conv1d(3, 16, 3, padding=1, bias=False)
conv.weight.data.fill_(1.0)
x = numbers(4, 3, 10)
x[3] = 20000
step = Step(Net(forward, conv=conv, bn=nn.BatchNorm1d(16)), [(x,)], weighted, torch.float16)
"""),
    "focal_loss_of_a_vanished_probability": case(
        "half", "https://github.com/pytorch/pytorch/issues/40497", "precision", module="",
        op="log", samples=(2,), fix="guard|fp32", text="""
# sigmoid(-20) is 2e-9, 0 in fp16, and log(0) follows.
def loss(net, x, y):
    p = torch.sigmoid(net(x))
    log_p = torch.log(p)  # <- guilty
    return -(y * (1 - p) ** 2 * log_p).mean()

x = numbers(4, 6)
x[2, 5] = -20
step = Step(identity(6), [(x, torch.ones(4, 6))], loss, torch.float16)
"""),
    "clamp_that_rounds_to_one": case(
        "half", "https://github.com/zylo117/Yet-Another-EfficientDet-Pytorch/issues/502",
        "precision", module="", op="log", samples=(1,), fix="guard|fp32", text="""
# 1 - 1e-4 is 1 in fp16, so the clamp lets a probability of 1 pass to log(1 - p).
def loss(net, x):
    p = torch.clamp(net(x).sigmoid(), 1e-4, 1.0 - 1e-4)
    return -torch.log(1.0 - p).mean()  # <- guilty

x = numbers(4, 6)
x[1, 1] = 12
step = Step(identity(6), [(x,)], loss, torch.float16)
"""),
    "smallest_number_plus_a_score": case(
        "half", "https://github.com/huggingface/transformers/pull/17306", "precision",
        module="attn", op="add|softmax", samples=(0,), fix="island:attn|guard|fp32", text="""
# finfo(fp16).min - 40 is -inf. A padding row sees padding only: softmax over nothing but -inf is
# 0 / 0.
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
step = Step(Net(lambda net, *batch: net.attn(*batch), attn=attn), [(x, see)], weighted,
            torch.float16)
"""),
    "linear_attention_sums_the_tokens": case(
        "half", "https://github.com/mit-han-lab/efficientvit/issues/110", "precision",
        module="att", op="mm|matmul", samples=(1,), fix="island:att", text="""
# k^T v adds up over 100 tokens before anything divides by their number.
def attention(net, x):
    q, k, v = (net.qkv(x).relu() for _ in range(3))
    kv = k.transpose(1, 2) @ v  # <- guilty
    return (q @ kv) / ((q @ k.transpose(1, 2)).sum(-1, keepdim=True) + 1e-4)

x = numbers(4, 100, 4)
x[1] = 30
step = Step(Net(lambda net, x: net.att(x), att=Net(attention, qkv=identity(4))), [(x,)],
            weighted, torch.float16)
"""),
    "box_decoded_by_exp": case(
        "half", "https://github.com/open-mmlab/mmdetection/issues/1606", "precision",
        module="head", op="exp", samples=(0,), fix="island:head|fp32|guard", text="""
# FCOS: the distance to a side is exp of the regression, and exp(12) = 162755 is inf in fp16.
def head(net, x):
    return net.reg(x).exp()  # <- guilty

x = numbers(4, 4)
x[0, 3] = 12
net = Net(lambda net, x: net.head(x), head=Net(head, reg=identity(4)))
step = Step(net, [(x, torch.ones(4, 4))], lambda net, x, y: F.smooth_l1_loss(net(x).float(), y),
            torch.float16)
"""),
    "squeeze_and_excite_by_a_sum": case(
        "half", "https://github.com/google-ai-edge/LiteRT/issues/9249", "precision", module="se",
        op="sum", samples=(2,), fix="island:se", text="""
# The sum over 256 positions passes 65504 before the division by 256.
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
step = Step(net, [(x,)], weighted, torch.float16)
"""),
    "vae_with_half_weights": case(
        "half", "https://github.com/cumulo-autumn/StreamDiffusion/issues/114", "precision",
        module="decoder.up", op="conv", samples=(1,), fix="island:decoder|fp32", text="""
# The whole decoder in fp16, weights too: its activations grow beyond 65504 and the picture is
# black.
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
step = Step(Net(lambda net, x: net.decoder(x), decoder=Net(decoder, **parts)).half(), [(x,)],
            weighted, torch.float16, pure=True)
"""),
    "survival_in_bf16": case(
        "half", "https://github.com/fastino-ai/GLiNER2/pull/155", "precision", module="",
        op="log1p", samples=(2,), fix="guard|fp32", text="""
# 1 - 1e-6 is 1 in bf16. log1p(-1) = -inf is swallowed by exp, so the loss is finite and the
# backward 0 * inf.
def loss(net, x):
    p = net(x).sigmoid()
    # the clamp of the report; clamp itself has slope 0 at its limit
    p = torch.minimum(p, p.new_tensor(1.0 - 1e-6))
    log_survival = torch.log1p(-p)  # <- guilty
    return (1 - log_survival.sum(-1).exp()).mean()

x = numbers(4, 6) - 2
x[2, 0] = 12
step = Step(identity(6), [(x,)], loss, torch.bfloat16)
"""),
    "manhattan_distance_of_long_vectors": case(
        "half", "https://github.com/Lightning-AI/torchmetrics/issues/1380", "precision",
        module="", op="sum", samples=(3,), fix="fp32", text="""
# The sum of 1024 absolute differences of 100 does not fit into fp16.
def loss(net, x):
    a, b = net(x).flatten(1), net(-x).flatten(1)
    return (a - b).abs().sum(-1).mean()  # <- guilty

x = numbers(4, 128, 8)
x[3] = 50
step = Step(identity(8), [(x,)], loss, torch.float16)
"""),
    "loss_scale_too_large": case(
        "half", "https://github.com/NVIDIA/apex/issues/318", "calibration", fix="nothing", text="""
# Nothing is wrong: at a scale of 2**20 the gradient of the logits passes 65504, at scale 1 it
# does not.
step = Step(nn.Linear(6, 3), [(numbers(4, 6), labels())], cross, torch.float16, scale=2.0**20)
"""),
    "loss_scale_too_large_for_one_micro_batch": case(
        "half", "https://github.com/deepspeedai/DeepSpeed/issues/931", "calibration",
        micro_batch=1, fix="nothing", text="""
# The first steps of a run at the usual 65536: inputs of 100 make the scaled gradient of the
# weight overflow.
batches = [(numbers(4, 6), labels()), (100 * numbers(4, 6, seed=1).abs(), labels())]
step = Step(nn.Linear(6, 3), batches, lambda net, x, y: 4 * cross(net, x, y), torch.float16,
            scale=2.0**16)
"""),
    # --- Bad data: dicts, targets, one micro-batch of several
    "every_label_ignored": case(
        "data", "https://github.com/pytorch/pytorch/issues/70348", "data", micro_batch=1,
        fix="count", text="""
# The second of three micro-batches has no label but -100: a mean over nothing.
batches = [(numbers(4, 6), labels()), (numbers(4, 6), torch.full((4,), -100)),
           (numbers(4, 6), labels())]
step = Step(nn.Linear(6, 3), batches, cross)
"""),
    "nan_pixel_in_a_dict": case(
        "data", "https://github.com/prs-eth/Marigold/issues/111", "data", samples=(2,),
        fix="samples", text="""
# The batch is one dict, and one picture in it holds a NaN.
x = numbers(4, 6)
x[2, 3] = NAN
step = Step(nn.Linear(6, 3), [({"image": x, "label": labels()},)],
            lambda net, batch: cross(net, batch["image"], batch["label"]))
"""),
    "ground_truth_box_without_height": case(
        "data", "https://github.com/matterport/Mask_RCNN/issues/159", "data|divergence",
        module="", op="log", samples=(1,), fix="guard|samples", text="""
# The regression target is log(height / anchor), and one box has height 0.
def loss(net, anchors, boxes):
    target = torch.log(boxes / anchors)  # <- guilty
    return F.smooth_l1_loss(net(anchors), target)

boxes = numbers(4, 2, seed=1).abs() + 0.5
boxes[1, 1] = 0
step = Step(nn.Linear(2, 2), [(numbers(4, 2).abs() + 0.5, boxes)], loss)
"""),
    "grey_value_for_a_label": case(
        "data", "https://github.com/milesial/Pytorch-UNet/issues/291", "data", samples=(1,),
        fix="samples", text="""
# A mask was stored as grey values: label 192 where there are two classes. Run, it raises
# IndexError.
y = torch.zeros(4, 5, dtype=torch.long)
y[1, 2] = 192
step = Step(nn.Conv1d(1, 2, 1), [(numbers(4, 1, 5), y)], cross, num_classes=2)
"""),
    "label_equal_to_the_number_of_classes": case(
        "data", "https://github.com/TencentGameMate/gnn_cross_lingual/issues/5", "data",
        fix="samples", text="""
# 12 classes and a label 12, and nobody tells the tool the number of classes: the step only
# raises.
step = Step(nn.Linear(6, 12), [(numbers(4, 6), torch.tensor([0, 3, 12, 11]))], cross)
"""),
    "negative_label_in_the_second_dict": case(
        "data", "https://github.com/EricFillion/happy-transformer/issues/248", "data",
        samples=(0,), micro_batch=1, fix="samples", text="""
# Label -1 in a dict with named columns, in the second micro-batch.
batches = [({"text": numbers(4, 6), "labels": labels()},),
           ({"text": numbers(4, 6), "labels": labels() - 1},)]
batches[1][0]["labels"][3] = 2
step = Step(nn.Linear(6, 3), batches,
            lambda net, batch: cross(net, batch["text"], batch["labels"]), num_classes=3)
"""),
    "missing_target_in_the_third_micro_batch": case(
        "data", "https://github.com/Nixtla/neuralforecast/issues/186", "data", samples=(3,),
        micro_batch=2, fix="samples", text="""
# A missing value in column y is NaN, and nobody masks it.
y = numbers(4, 6, seed=3)
y[3, 0] = NAN
batches = [(numbers(4, 6), numbers(4, 6)), (numbers(4, 6), numbers(4, 6)), (numbers(4, 6), y)]
step = Step(nn.Linear(6, 6), batches, lambda net, x, y: F.mse_loss(net(x), y))
"""),
    "ctc_target_longer_than_the_input": case(
        "data", "https://github.com/ypwhs/captcha_break/issues/29", "data|divergence", module="",
        op="ctc", samples=(1,), fix="ctc|samples", text="""
# Time first. Five equal letters need nine frames, there are six: no path, the loss is inf.
def loss(net, x, target):
    log_p = net(x).log_softmax(-1)  # T, N, C
    lengths = torch.tensor([2, 5, 2, 3])
    return F.ctc_loss(log_p, target, torch.full((4,), 6), lengths)  # <- guilty

target = torch.tensor([[1, 2, 0, 0, 0], [3, 3, 3, 3, 3], [2, 1, 0, 0, 0], [1, 2, 3, 0, 0]])
step = Step(nn.Linear(5, 4), [(numbers(6, 4, 5), target)], loss)
"""),
    "empty_micro_batch": case(
        "data", "https://github.com/pytorch/pytorch/issues/50224", "data", samples=(),
        micro_batch=1, fix="count", text="""
# No positive box in the whole micro-batch: the mean over no sample is NaN.
batches = [(numbers(4, 6), labels()), (numbers(0, 6), labels(0))]
step = Step(nn.Linear(6, 3), batches, cross)
"""),
    "si_sdr_of_a_silent_target": case(
        "data", "https://github.com/csteinmetz1/auraloss/issues/25", "data|divergence", module="",
        op="div", samples=(2,), fix="guard|samples", text="""
# The target of one clip is silence: the projection on it divides by its energy, 0.
def loss(net, x, target):
    out = net(x)
    energy = target.pow(2).sum(-1, keepdim=True)
    alpha = (out * target).sum(-1, keepdim=True) / energy  # <- guilty
    noise = out - alpha * target
    ratio = (alpha * target).pow(2).sum(-1) / (noise.pow(2).sum(-1) + 1e-8)
    return -10 * torch.log10(ratio + 1e-8).mean()

target = numbers(4, 6, seed=1)
target[2] = 0
step = Step(nn.Linear(6, 6), [(numbers(4, 6), target)], loss)
"""),
    "missing_value_in_a_dataclass": case(
        "data", "https://github.com/WenjieDu/PyPOTS/issues/232", "data", samples=(1,),
        fix="samples", text="""
# The batch is a dataclass, and the series that should be intact has a gap.
from dataclasses import dataclass

@dataclass
class Imputed:
    intact: Tensor
    target: Tensor

x = numbers(4, 6)
x[1, 4] = NAN
step = Step(nn.Linear(6, 6), [(Imputed(x, numbers(4, 6, seed=1)),)],
            lambda net, batch: F.mse_loss(net(batch.intact), batch.target))
"""),
    "empty_spot_in_a_mapping": case(
        "data", "https://github.com/ratschlab/DeepSpot/issues/9", "data", samples=(0,),
        micro_batch=1, fix="samples", text="""
# An encoding is a UserDict, no dict. An empty spot has features NaN, in the second micro-batch.
from collections import UserDict

x = numbers(4, 6)
x[0] = NAN
batches = [(UserDict(features=h, counts=numbers(4, 6, seed=1)),) for h in (numbers(4, 6), x)]
step = Step(nn.Linear(6, 6), batches,
            lambda net, batch: F.mse_loss(net(batch["features"]), batch["counts"]))
"""),
    # --- Bad state: weights, buffers of BatchNorm, optimizer
    "parameter_never_initialised": case(
        "state", "https://github.com/gordicaleksa/pytorch-GAT/issues/11", "weights",
        names="scoring", fix="state", text="""
# nn.Parameter(torch.Tensor(...)) holds what was in memory: here a NaN.
net = Net(lambda net, x: net.fc(x) * net.scoring, fc=nn.Linear(6, 3))
net.scoring = nn.Parameter(torch.tensor([1.0, NAN, 1.0]))
step = Step(net, [(numbers(4, 6), labels())], cross)
"""),
    "projection_never_initialised": case(
        "state", "https://github.com/openai/CLIP/issues/15", "weights", names="text_projection",
        fix="state", text="""
# torch.empty again; what was in memory reads as 2.7e38, finite and hopeless.
net = Net(lambda net, x: net.fc(x) @ net.text_projection, fc=identity(6))
net.text_projection = nn.Parameter(
    numbers(6, 3).index_put((torch.tensor([2]), torch.tensor([1])), torch.tensor([2.7e38]))
)
step = Step(net, [(numbers(4, 6), labels())], cross)
"""),
    "background_embedding_never_initialised": case(
        "state", "https://github.com/sauradip/STALE/issues/16", "weights", names="bg_embeddings",
        fix="state", text="""
# A parameter that is compared by cosine, left as torch.empty: inf in it, NaN after the
# normalisation.
net = Net(lambda net, x: net.fc(x) @ F.normalize(net.bg_embeddings, dim=-1).T, fc=identity(6))
net.bg_embeddings = nn.Parameter(numbers(3, 6))
net.bg_embeddings.data[0, 0] = INF
step = Step(net, [(numbers(4, 6), labels())], cross)
"""),
    "frozen_batch_norm_with_bad_statistics": case(
        "state", "https://github.com/pytorch/pytorch/issues/96798", "weights",
        names="running_mean", fix="state", text="""
# An overflow of an earlier step left NaN in the running mean; it shows when the layer is used in
# eval mode.
net = Net(lambda net, x: net.head(net.bn(net.fc(x))), fc=identity(6), bn=nn.BatchNorm1d(6),
          head=nn.Linear(6, 3))
net.bn.running_mean[4] = NAN
step = Step(net.eval(), [(numbers(4, 6), labels())], cross)
"""),
    "negative_running_variance": case(
        "state", "https://github.com/VectorInstitute/FL4Health/pull/39", "weights|divergence",
        module="bn", op="batch_norm", fix="state|statistics", text="""
# Averaged like a weight, with momentum, a running variance became negative; its root is NaN.
def forward(net, x):
    h = net.bn(net.fc(x))  # <- guilty
    return net.head(h)

net = Net(forward, fc=identity(6), bn=nn.BatchNorm1d(6), head=nn.Linear(6, 3))
net.bn.running_var[1] = -0.5
step = Step(net.eval(), [(numbers(4, 6), labels())], cross)
"""),
    "optimizer_restored_with_nan": case(
        "state", "https://github.com/NVIDIA-NeMo/RL/issues/3544", "weights", names="exp_avg",
        fix="state", text="""
# Loss and gradients are finite, the restored moments are not: the update would be NaN.
net = nn.Linear(6, 3)
optimizer = torch.optim.AdamW(net.parameters())
cross(net, numbers(4, 6), labels()).backward()
optimizer.step()
optimizer.zero_grad()
optimizer.state[net.weight]["exp_avg"][1, 1] = NAN
step = Step(net, [(numbers(4, 6), labels())], cross, state=optimizer.state_dict())
"""),
    "hidden_state_carried_over": case(
        "state", "https://github.com/ageron/handson-ml2/issues/32", "weights", names="hidden",
        fix="state", text="""
# A stateful RNN keeps the hidden state of the batch before, which had gone to NaN.
def forward(net, x):
    out, hidden = net.rnn(x, net.hidden)
    net.hidden = hidden.detach()
    return net.head(out[:, -1])

net = Net(forward, rnn=nn.GRU(6, 5, batch_first=True), head=nn.Linear(5, 3))
net.register_buffer("hidden", torch.zeros(1, 4, 5))
net.hidden[0, 2] = NAN
step = Step(net, [(numbers(4, 7, 6), labels())], cross)
"""),
    # --- True divergence: bad in fp32 too
    "vae_log_variance": case(
        "divergence", "https://github.com/vanderschaarlab/synthcity/issues/331", "divergence",
        module="", op="exp", samples=(2,), fix="guard", text="""
# An unbounded log variance of 95: exp is inf, and so is the KL term.
def loss(net, x):
    mu, logvar = net(x).chunk(2, -1)
    kl = 1 + logvar - mu.pow(2) - logvar.exp()  # <- guilty
    return -0.5 * kl.sum(-1).mean()

x = numbers(4, 6)
x[2, 4] = 95
step = Step(identity(6), [(x,)], loss)
"""),
    "affine_coupling": case(
        "divergence", "https://github.com/VincentStimper/normalizing-flows/issues/47",
        "divergence", module="flow.coupling", op="exp", samples=(0,), fix="guard", text="""
# RealNVP scales by exp of what a network says: 90 is too much.
def couple(net, z):
    z1, z2 = z.chunk(2, -1)
    return torch.cat([z1, z2 * torch.exp(net.scale(z1))], -1)  # <- guilty

flow = Net(lambda net, z: net.coupling(z), coupling=Net(couple, scale=identity(3)))
z = numbers(4, 6)
z[0, 1] = 90
step = Step(Net(lambda net, z: net.flow(net.fc(z)), flow=flow, fc=identity(6)), [(z,)],
            lambda net, z: net(z).pow(2).mean())
"""),
    "ms_ssim_of_unlike_pictures": case(
        "divergence", "https://github.com/jorge-pessoa/pytorch-msssim/issues/2", "divergence",
        module="", op="pow", samples=(), fix="guard", text="""
# A contrast term may be negative, and a negative number has no power of 0.3.
def loss(net, x, y):
    out = net(x)
    cs = torch.stack([(F.avg_pool1d(out, k) * F.avg_pool1d(y, k)).mean() for k in (1, 2, 4)])
    return 1 - (cs ** torch.tensor([0.3, 0.4, 0.3])).prod()  # <- guilty

x = numbers(4, 1, 8)
step = Step(identity(8), [(x, -x)], loss)
"""),
    "deep_network_without_normalisation": case(
        "divergence", "https://github.com/cvignac/SMP/issues/3", "divergence",
        module="layers.3|layers.7", op="mm|linear", fix="rate", text="""
# Weights grown under too large a rate: every one of eight layers makes its input 1e5 times as
# large.
def forward(net, x):
    h = net.layers(x)  # <- guilty
    return net.head(h)

step = Step(Net(forward, layers=nn.Sequential(*(identity(6, 1e5) for _ in range(8))),
                head=nn.Linear(6, 3)),
            [(numbers(4, 6), labels())], cross)
"""),
    "every_key_is_padding": case(
        "divergence", "https://github.com/pytorch/pytorch/issues/41508", "divergence",
        module="attn", op="softmax", samples=(2,), fix="mask", text="""
# A sample without a key: softmax over nothing but -inf.
def forward(net, x, padding):
    h, _ = net.attn(x, x, x, key_padding_mask=padding, need_weights=True)  # <- guilty
    return h

padding = torch.zeros(4, 3, dtype=torch.bool)
padding[2] = True
net = Net(forward, attn=nn.MultiheadAttention(8, 2, batch_first=True))
step = Step(net, [(numbers(4, 3, 8), padding)], weighted)
"""),
    "entropy_of_a_masked_token": case(
        "divergence", "https://github.com/huggingface/trl/pull/7252", "divergence", module="",
        op="mul", samples=(1,), fix="guard", text="""
# A forbidden token has logit -inf, probability 0 and log probability -inf: 0 * -inf is NaN.
def loss(net, x, forbidden):
    log_p = net(x).masked_fill(forbidden, -INF).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)  # <- guilty
    return entropy.mean()

forbidden = torch.zeros(4, 6, dtype=torch.bool)
forbidden[1, 2] = True
step = Step(identity(6), [(numbers(4, 6), forbidden)], loss)
"""),
    "contrastive_loss_of_a_long_vector": case(
        "divergence", "https://github.com/emadeldeen24/TS-TCC/issues/25", "divergence", module="",
        op="log", samples=(0,), fix="guard", text="""
# All similarities but a sample's own fall 225 below the maximum, exp of them is 0, and so is
# their sum.
def loss(net, x):
    h = net(x)
    logits = h @ h.T
    logits = logits - logits.max(1, keepdim=True).values.detach()
    others = (logits.exp() * (1 - torch.eye(4))).sum(1, keepdim=True)
    return -(logits - torch.log(others)).mean()  # <- guilty

x = F.normalize(numbers(4, 6), dim=-1)
x[:, 0] = 0
x[0] = torch.tensor([15.0, 0, 0, 0, 0, 0])
step = Step(identity(6), [(x,)], loss)
"""),
    "advantage_of_a_single_observation": case(
        "divergence", "https://github.com/DLR-RM/stable-baselines3/issues/325", "divergence|data",
        module="", op="std|var", micro_batch=1, fix="spread", text="""
# The last micro-batch of PPO has one sample: the standard deviation of one number is 0 / 0, eps
# or not.
def loss(net, x):
    advantage = net(x).squeeze(-1)
    spread = advantage.std()  # <- guilty
    return ((advantage - advantage.mean()) / (spread + 1e-8)).pow(2).mean()

step = Step(nn.Linear(6, 1), [(numbers(4, 6),), (numbers(1, 6),)], loss)
"""),
    "picture_of_one_colour": case(
        "divergence", "https://github.com/vanvalenlab/deepcell-tf/issues/445", "divergence",
        module="normalize", op="div", samples=(3,), fix="guard", text="""
# Each picture is divided by its standard deviation, which is 0 for a blank one.
def normalize(net, x):
    return (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)  # <- guilty

x = numbers(4, 6)
x[3] = 2
net = Net(lambda net, x: net.fc(net.normalize(x)), fc=nn.Linear(6, 3), normalize=Net(normalize))
step = Step(net, [(x, labels())], cross)
"""),
    "gumbel_noise_of_zero": case(
        "divergence", "https://github.com/HKUDS/SSLRec/issues/26", "divergence", module="",
        op="log", samples=(0,), fix="guard", text="""
# -log(-log(u)) with u = 0, which torch.rand may draw (here it is made to).
def loss(net, x):
    scores = net(x)
    u = torch.rand(scores.shape)
    u[0, 0] = 0
    gumbel = -torch.log(-torch.log(u))  # <- guilty
    return -(scores + gumbel).mean()

step = Step(identity(6), [(numbers(4, 6),)], loss)
"""),
    # --- Something lawful looks guilty
    "additive_mask_in_the_batch": case(
        "lawful", "https://github.com/huggingface/transformers/pull/26421", "precision",
        module="wo", op="mm|linear", samples=(2,), fix="island:wo", text="""
# The loader adds a mask of -inf to the batch, as it should. Guilty is an overflow after the
# attention.
def forward(net, x, mask):
    unit = F.normalize(x, dim=-1)
    h = (unit @ unit.transpose(1, 2) + mask).softmax(-1) @ x
    h = net.wo(h)  # <- guilty
    return net.norm(h)

mask = torch.full((4, 3, 3), -INF).triu(1)
x = numbers(4, 3, 8)
x[2] = 9000 + 0.1 * x[2]
step = Step(Net(forward, wo=filled(8, 8, 1.0), norm=nn.LayerNorm(8)), [(x, mask)], weighted,
            torch.float16)
"""),
    "missing_targets_masked_rightly": case(
        "lawful", "https://github.com/chemprop/chemprop/issues/960", "divergence", module="",
        op="sqrt", samples=(), fix="guard", text="""
# NaN targets are replaced before the subtraction. Guilty is the root of a mean squared error of
# exactly 0.
def loss(net, x, y):
    known = y.isfinite()
    error = known * (net(x) - torch.where(known, y, 0.0))
    return (error.pow(2).sum() / known.sum()).sqrt()  # <- guilty

x = numbers(4, 6)
y = x.clone()
y[1, 0] = y[3, 2] = NAN
step = Step(identity(6), [(x, y)], loss)
"""),
    "best_loss_starts_at_inf": case(
        "lawful", "https://github.com/macrocosm-os/mainframe/pull/185", "divergence", module="",
        op="log", samples=(1,), fix="guard", text="""
# A buffer holds the best loss so far, inf at first. Guilty is a log of 0.
def forward(net, x):
    p = net.fc(x).relu()
    return torch.log(p)  # <- guilty

x = numbers(4, 6).abs() + 0.1
x[1, 3] = 0
net = Net(forward, fc=identity(6))
net.register_buffer("best_loss", torch.tensor(INF))
step = Step(net, [(x,)], mean)
"""),
    "image_id_is_no_label": case(
        "lawful", "https://github.com/pytorch/vision/issues/1176", "divergence", module="",
        op="exp", samples=(1,), fix="guard", text="""
# Detection targets carry integer columns beside the labels: image_id 139 with three classes is no
# fault.
def loss(net, images, targets):
    out = net(images)
    size = out[:, :3].exp()  # <- guilty
    boxes = F.smooth_l1_loss(size, torch.ones(4, 3))
    return cross(nn.Identity(), out, targets["labels"]) + boxes

x = numbers(4, 6)
x[1, 0] = 100
targets = {"image_id": torch.tensor([139, 285, 632, 724]), "labels": labels()}
step = Step(identity(6), [(x, targets)], loss, num_classes=6)
"""),
    "another_ignore_index": case(
        "lawful", "https://github.com/pytorch/pytorch/issues/15508", "precision", module="fc",
        op="mm|linear", samples=(0,), fix="island:fc", text="""
# Label 255 means: ignore. Guilty is an overflow in the layer before.
def forward(net, x):
    h = net.fc(x)  # <- guilty
    return net.head(net.norm(h))

x = numbers(4, 6)
x[0] = 20000 + x[0]
y = torch.tensor([1, 255, 0, 2])
step = Step(Net(forward, fc=filled(6, 6, 1.0), norm=nn.LayerNorm(6), head=nn.Linear(6, 3)),
            [(x, y)], lambda net, x, y: F.cross_entropy(net(x).float(), y, ignore_index=255),
            torch.float16, num_classes=3)
"""),
    "observer_starts_at_inf": case(
        "lawful", "https://github.com/pytorch/pytorch/pull/43789", "divergence", module="",
        op="div", samples=(2,), fix="guard", text="""
# A quantisation observer starts with min_val = inf and max_val = -inf. Guilty is a division by a
# range of 0.
def forward(net, x):
    h = net.observer(net.fc(x))
    low, high = h.amin(-1, keepdim=True), h.amax(-1, keepdim=True)
    return (h - low) / (high - low)  # <- guilty

x = numbers(4, 6)
x[2] = 3
observer = Net(lambda net, x: x)
observer.register_buffer("min_val", torch.tensor(INF))
observer.register_buffer("max_val", torch.tensor(-INF))
step = Step(Net(forward, fc=identity(6), observer=observer), [(x,)], weighted)
"""),
    "nan_that_comes_once": case(
        "lawful", "https://github.com/pytorch/pytorch/pull/21244", "not reproducible", samples=(),
        fix="hardware", text="""
# A kernel returns NaN now and then. Run again, all is finite, the causal mask of -inf included.
def forward(net, x):
    calls.append(1)
    h = net.fc(x)
    h = (h @ h.transpose(1, 2) + net.mask).softmax(-1) @ h
    return h * (NAN if len(calls) == 1 else 1.0)

net, calls = Net(forward, fc=nn.Linear(6, 6)), []
net.register_buffer("mask", torch.full((3, 3), -INF).triu(1))
step = Step(net, [(numbers(4, 3, 6),)], weighted)
"""),
    "ratio_beside_a_mask_of_actions": case(
        "lawful", "https://github.com/THUDM/slime/pull/2198", "divergence", module="", op="exp",
        samples=(2,), fix="guard", text="""
# The batch forbids actions by -inf, rightly. Guilty is exp of a log ratio of 100.
def loss(net, x, allowed, old):
    log_p = (net(x) + allowed).log_softmax(-1)[:, 0]
    ratio = torch.exp(log_p - old)  # <- guilty
    return -ratio.mean()

allowed = torch.zeros(4, 6)
allowed[1, 3] = allowed[2, 5] = -INF
step = Step(identity(6), [(numbers(4, 6), allowed, torch.tensor([-1.0, -2, -100, -1]))], loss)
"""),
    # --- The exotic
    "complex_spectrum_of_silence": case(
        "exotic", "https://github.com/pytorch/audio/issues/993", "divergence", module="spec",
        op="sqrt", samples=(1,), fix="guard", text="""
# z times its conjugate, whose conjugation is only a bit on the tensor; then the root of 0.
def spectrum(net, x):
    z = torch.fft.rfft(x)
    power = (z * z.conj()).real
    return power.sqrt()  # <- guilty

x = numbers(4, 6)
x[1] = 0
step = Step(Net(lambda net, x: net.spec(net.fc(x)), fc=identity(6), spec=Net(spectrum)), [(x,)],
            mean)
"""),
    "relu_rnn_over_a_long_sequence": case(
        "exotic", "https://github.com/chenxie95/deeplearning_course_sjtu/issues/31", "divergence",
        module="rnn", op="mm|linear|rnn|add", fix="rate", text="""
# An RNN with relu multiplies its state by 4 at each of 80 steps. Time first: the batch is the
# second dimension.
def forward(net, x):
    out, _ = net.rnn(x)  # <- guilty
    return net.head(out[-1])

net = Net(forward, rnn=nn.RNN(6, 6, nonlinearity="relu", bias=False), head=nn.Linear(6, 3))
net.rnn.weight_hh_l0.data = 4 * torch.eye(6)
net.rnn.weight_ih_l0.data = torch.eye(6)
step = Step(net, [(numbers(80, 4, 6).abs(), labels())], cross)
"""),
    "weight_norm_of_a_zero_row": case(
        "exotic", "https://github.com/pytorch/pytorch/issues/19126", "divergence",
        module="fc|fc.parametrizations.weight|fc.parametrizations.weight.0",
        op="weight_norm|norm|div|mul", samples=(), fix="guard|state", text="""
# weight_norm divides a row of the weight by its length; a row set to zero has none.
from torch.nn.utils import parametrizations

def forward(net, x):
    return net.fc(x)  # <- guilty

fc = parametrizations.weight_norm(nn.Linear(6, 3))
fc.parametrizations.weight.original1.data[1] = 0
step = Step(Net(forward, fc=fc), [(numbers(4, 6), labels())], cross)
"""),
    "spectral_norm_of_a_zero_weight": case(
        "exotic", "https://github.com/pytorch/pytorch/issues/20192", "divergence",
        module="fc|fc.parametrizations.weight|fc.parametrizations.weight.0", op="div", samples=(),
        fix="guard|state", text="""
# The largest singular value of a zero weight is 0; the eps of spectral_norm is for its vectors,
# not for this.
from torch.nn.utils import parametrizations

def forward(net, x):
    return net.fc(x)  # <- guilty

fc = parametrizations.spectral_norm(nn.Linear(6, 3))
fc.parametrizations.weight.original.data.zero_()
step = Step(Net(forward, fc=fc), [(numbers(4, 6), labels())], cross)
"""),
    "siamese_network_on_an_equal_pair": case(
        "exotic", "https://github.com/adambielski/siamese-triplet/issues/18", "divergence",
        module="", op="sqrt", samples=(3,), fix="guard", text="""
# One network used twice; a pair of two equal pictures has distance 0, and sqrt no slope there.
def loss(net, a, b):
    square = (net(a) - net(b)).pow(2).sum(-1)
    distance = square.sqrt()  # <- guilty
    return (1 - distance).clamp(min=0).pow(2).mean()

a, b = numbers(4, 6), numbers(4, 6, seed=1)
b[3] = a[3]
step = Step(nn.Linear(6, 5), [(a, b)], loss)
"""),
    "shared_head_in_its_second_call": case(
        "exotic", "https://github.com/Peterande/D-FINE/issues/199", "precision", module="head",
        op="mm|linear", samples=(1,), fix="island:head", text="""
# The decoder uses one head twice. The first call is harmless, the second passes 65504.
def forward(net, x):
    first = net.head(x)
    second = net.head(first)  # <- guilty
    return net.norm(second)

x = numbers(4, 8).abs()
x[1] = 100
step = Step(Net(forward, head=filled(8, 8, 10.0), norm=nn.LayerNorm(8)), [(x,)], weighted,
            torch.float16)
"""),
    "sparse_gradient_of_an_embedding": case(
        "exotic", "https://github.com/keras-team/keras/issues/9269", "divergence", module="",
        op="sqrt", samples=(2,), fix="guard", text="""
# The distance of a word to itself: the loss is finite, the gradient of the embedding sparse and
# NaN.
def loss(net, i, j):
    distance = (net(i) - net(j)).pow(2).sum(-1).sqrt()  # <- guilty
    return distance.mean()

step = Step(nn.Embedding(10, 4, sparse=True),
            [(torch.tensor([1, 2, 3, 4]), torch.tensor([5, 6, 3, 7]))], loss)
"""),
    "sparse_adjacency_with_a_negative_degree": case(
        "exotic", "https://github.com/pyg-team/pytorch_geometric/issues/61", "divergence",
        module="gcn", op="pow", fix="guard", text="""
# A weighted degree may be negative, and then its power of -0.5 is NaN. The batch holds a sparse
# tensor.
def convolve(net, x, adjacency):
    degree = torch.sparse.sum(adjacency, 1).to_dense()
    scale = degree.pow(-0.5)  # <- guilty
    return scale[:, None] * (adjacency @ (scale[:, None] * net.fc(x)))

index = torch.tensor([[0, 1, 2, 3, 0], [1, 0, 3, 2, 2]])
adjacency = torch.sparse_coo_tensor(index, torch.tensor([1.0, 1.0, -0.5, 1.0, 1.0]),
                                    (4, 4)).coalesce()
net = Net(lambda net, *batch: net.gcn(*batch), gcn=Net(convolve, fc=identity(6)))
step = Step(net, [(numbers(4, 6), adjacency)], weighted)
"""),
    "log_of_a_negative_number_in_a_checkpoint": case(
        "exotic", "https://github.com/philtabor/Actor-Critic-Methods-Paper-To-Code/issues/7",
        "divergence", module="actor", op="log", samples=(0,), fix="guard", text="""
# A checkpointed block runs its forward twice. The action is scaled by 2 before log(1 - a**2).
from torch.utils.checkpoint import checkpoint

def actor(net, x):
    action = 2 * net.fc(x).tanh()
    log_p = torch.log(1 - action.pow(2) + 1e-6)  # <- guilty
    return log_p

x = 0.1 * numbers(4, 6)
x[0, 2] = 2
step = Step(Net(lambda net, x: checkpoint(net.actor, x, use_reentrant=False),
                actor=Net(actor, fc=identity(6))),
            [(x,)], mean)
"""),
    "checkpoint_with_a_bad_backward": case(
        "exotic", "https://github.com/speechbrain/speechbrain/issues/181", "divergence",
        module="magnitude", op="pow|sqrt", samples=(1,), fix="guard", text="""
# Spectral magnitude with power 0.5 in a checkpointed block: a silent frame has no slope, the loss
# is finite.
from torch.utils.checkpoint import checkpoint

def magnitude(net, x):
    h = net.fc(x)
    return h.pow(2).sum(-1).pow(0.5)  # <- guilty

x = numbers(4, 5, 6)
x[1, 2] = 0
net = Net(lambda net, x: checkpoint(net.magnitude, net.inp(x), use_reentrant=False),
          inp=identity(6), magnitude=Net(magnitude, fc=identity(6)))
step = Step(net, [(x,)], mean)
"""),
    "custom_function_with_a_bad_backward": case(
        "exotic", "https://github.com/AlexeyAB/darknet/issues/3994", "divergence", module="act",
        op="Mish|exp|div", samples=(1,), fix="guard", text="""
# x * tanh(softplus(x)) with the backward of the first published kernels: inf / inf from x = 30
# on.
class Mish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * F.softplus(x).tanh()

    @staticmethod
    def backward(ctx, grad):
        x, = ctx.saved_tensors
        omega = 4 * (x + 1) + 4 * (2 * x).exp() + (3 * x).exp()  # <- guilty
        omega = omega + (4 * x + 6) * x.exp()  # <- guilty
        delta = 2 * x.exp() + (2 * x).exp() + 2  # <- guilty
        return grad * x.exp() * omega / delta**2  # <- guilty

def activate(net, x):
    return Mish.apply(x)  # <- guilty

x = numbers(4, 6)
x[1, 1] = 60
step = Step(Net(lambda net, x: net.act(net.fc(x)), fc=identity(6), act=Net(activate)), [(x,)],
            weighted)
"""),
    "compiled_code_returns_nan": case(
        "exotic", "https://github.com/pytorch/pytorch/issues/99840", "compiler", samples=(),
        fix="eager", text="""
# Finite in eager mode, NaN compiled: hunting in eager mode finds nothing.
import functools

def broken_backend(graph: torch.fx.GraphModule, inputs: list) -> object:
    # A compiler whose kernel for relu is wrong: NaN where eager mode has none.
    @functools.wraps(graph.forward)
    def run(*args):
        return tuple(out + NAN for out in graph(*args))
    return run

net = Net(lambda net, x: net.fc(x).relu(), fc=nn.Linear(6, 3))
compiled = torch.compile(net, backend=broken_backend)
step = Step(net, [(numbers(4, 6), labels())], lambda net, x, y: F.cross_entropy(compiled(x), y))
"""),
    "compiled_code_is_innocent": case(
        "exotic", "https://github.com/pytorch/pytorch/issues/114109", "divergence", module="",
        op="div", samples=(2,), fix="guard", text="""
# The step is compiled, the compiler was accused, and eager mode divides by 0 all the same.
def forward(net, x):
    h = net.fc(x)
    return h / h.sum(-1, keepdim=True)  # <- guilty

x = numbers(4, 6)
x[2] = 0
net = Net(forward, fc=identity(6))
compiled = torch.compile(net, backend="eager")
step = Step(net, [(x,)], lambda net, x: (compiled(x) * numbers(4, 6, seed=9)).mean())
"""),
}

# --- Ten cases that were held out: other threads than those of the cases the tool was mended on.
# They were run once, at the very end, and that score stands as it came.
FRESH = {
    "logarithm_of_no_rotation": case(
        "backward", "https://github.com/kornia/kornia/issues/3275", "divergence",
        module="log_map", op="sqrt", samples=(2,), fix="guard", text="""
# The angle is the root of a dot product, and `where` keeps the case of angle 0 out of the forward
# only.
def log_map(net, omega):
    theta = (omega * omega).sum(-1, keepdim=True).sqrt()  # <- guilty
    factor = torch.where(theta > 1e-8, (1 - theta.cos()) / theta.clamp(min=1e-8), 0.5 * theta)
    return omega * factor

x = numbers(4, 3)
x[2] = 0
step = Step(Net(lambda net, x: net.log_map(net.fc(x)), fc=identity(3), log_map=Net(log_map)),
            [(x,)], weighted)
"""),
    "scores_without_a_range": case(
        "half", "https://github.com/lightonai/pylate/issues/239", "precision", module="",
        op="div", samples=(1,), fix="guard|fp32", text="""
# Distillation scales each row of scores to 0..1 with an eps of 1e-8, 0 in fp16; equal scores give
# 0 / 0.
def loss(net, x, teacher):
    scores = net(x)
    low, high = scores.amin(-1, keepdim=True), scores.amax(-1, keepdim=True)
    scores = (scores - low) / (high - low + 1e-8)  # <- guilty
    return F.kl_div(scores.float().log_softmax(-1), teacher, reduction="batchmean")

x = numbers(4, 6)
x[1] = 2
step = Step(identity(6), [(x, numbers(4, 6, seed=1).softmax(-1))], loss, torch.float16)
"""),
    "keys_summed_over_the_sequence": case(
        "half", "https://github.com/idiap/fast-transformers/issues/32", "precision",
        module="attention", op="sum", samples=(3,), fix="island:attention|fp32", text="""
# Linear attention sums its keys over the sequence: 512 of them at 200 pass 65504.
def attention(net, x):
    q, k = (F.elu(h) + 1 for h in (net.q(x), net.k(x)))
    total = k.sum(1)  # <- guilty
    return x.to(q.dtype) / ((q * total[:, None]).sum(-1, keepdim=True) + 1e-3)

x = numbers(4, 512, 4)
x[3] = 200
parts = dict(attention=Net(attention, q=identity(4, 0.01), k=identity(4)), out=nn.Linear(4, 2))
step = Step(Net(lambda net, x: net.out(net.attention(x).mean(1)), **parts), [(x,)], weighted,
            torch.float16)
"""),
    "chunked_loss_over_ignored_tokens": case(
        "data", "https://github.com/meta-pytorch/torchtune/issues/2341", "data|divergence",
        module="", op="div", micro_batch=1, fix="count", text="""
# A sum over chunks divided by the number of tokens that count, which is 0 in the second
# micro-batch.
def loss(net, batch):
    out, y = net(batch["tokens"]), batch["labels"]
    total = sum(F.cross_entropy(o, t, reduction="sum")
                for o, t in zip(out.chunk(2), y.chunk(2), strict=True))
    return total / (y != -100).sum()  # <- guilty

batches = [({"tokens": numbers(4, 6), "labels": y},)
           for y in (labels(), torch.full((4,), -100))]
step = Step(nn.Linear(6, 3), batches, loss)
"""),
    "nansum_of_a_gap": case(
        "data", "https://github.com/pytorch/pytorch/issues/67180", "data|divergence",
        samples=(0,), fix="samples|guard", text="""
# nansum passes over the NaN of the loss and not over the NaN in the gradient: a gap of the input
# times 0.
def loss(net, x):
    return torch.nansum(x * net.scale)

x = numbers(4, 6)
x[0, 5] = NAN
net = nn.Module()
net.scale = nn.Parameter(torch.ones(6))
step = Step(net, [(x,)], loss)
"""),
    "transitions_never_initialised": case(
        "state", "https://github.com/kmkurn/pytorch-crf/issues/1", "weights", names="transitions",
        fix="state", text="""
# The transitions of a CRF are torch.Tensor(3, 3), whatever that was: here one is inf.
net = Net(lambda net, x: net.fc(x).logsumexp(-1, keepdim=True) + net.transitions[0],
          fc=nn.Linear(6, 3))
net.transitions = nn.Parameter(numbers(3, 3))
net.transitions.data[0, 1] = INF
step = Step(net, [(numbers(4, 6), labels())], cross)
"""),
    "instance_variance_of_one_pixel": case(
        "divergence", "https://github.com/digantamisra98/EvoNorm/issues/4", "divergence",
        module="evo", op="std|var", fix="spread", text="""
# The variance over a picture of 1 x 1 is 0 / 0, as torch counts n - 1.
def evo(net, x):
    spread = x.var((2, 3), keepdim=True)  # <- guilty
    return x / (spread + 1e-5).sqrt()

net = Net(lambda net, x: net.fc(net.evo(net.conv(x)).flatten(1)), conv=nn.Conv2d(2, 6, 3),
          evo=Net(evo), fc=nn.Linear(6, 3))
step = Step(net, [(numbers(4, 2, 3, 3), labels())], cross)
"""),
    "anchor_without_a_positive": case(
        "divergence", "https://github.com/HobbitLong/SupContrast/issues/141", "divergence",
        module="", op="div", samples=(0, 3), fix="guard|count", text="""
# Supervised contrast: the mean over the positives of a sample whose class occurs once is 0 / 0.
def loss(net, x, y):
    h = F.normalize(net(x), dim=-1)
    log_p = (h @ h.T / 0.8).log_softmax(-1)
    positive = (y[:, None] == y) & ~torch.eye(4, dtype=torch.bool)
    score = (positive * log_p).sum(1) / positive.sum(1)  # <- guilty
    return -score.mean()

step = Step(nn.Linear(6, 5), [(numbers(4, 6), torch.tensor([0, 1, 1, 3]))], loss)
"""),
    "fake_key_beside_masked_gaps": case(
        "lawful", "https://github.com/NVIDIA/kvpress/issues/268", "precision", module="press",
        op="div|mul", samples=(1,), fix="island:press|guard|fp32", text="""
# Gaps of the batch are NaN and rightly replaced. Guilty is a fake key, -1e5 * y / |y|**2, of a
# short vector.
def press(net, x):
    y = net.fc(x)
    fake = -1e5 * y / y.pow(2).sum(-1, keepdim=True)  # <- guilty
    return (x.to(y.dtype) * fake).softmax(-1)

x = 0.4 + 0.02 * numbers(4, 8)
x[0, 1] = x[3, 3] = NAN
x[1] = 0.01
net = Net(lambda net, x: net.press(torch.where(x.isnan(), 0.4, x)),
          press=Net(press, fc=identity(8)))
step = Step(net, [(x,)], weighted, torch.float16)
"""),
    "unsquashed_action_of_one": case(
        "exotic", "https://github.com/ray-project/ray/issues/14878", "divergence",
        module="policy", op="atanh|log", samples=(2,), fix="guard", text="""
# SAC inverts its tanh to get the log probability: an action of exactly 1 has no finite inverse.
def policy(net, x):
    action = net.fc(x).tanh()
    return torch.atanh(action)  # <- guilty

x = numbers(4, 6)
x[2, 0] = 20
step = Step(Net(lambda net, x: net.policy(x), policy=Net(policy, fc=identity(6))), [(x,)],
            lambda net, x: net(x).pow(2).mean())
"""),
}
