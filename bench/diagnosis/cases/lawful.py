"""Something lawful looks guilty."""

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

INF, NAN = math.inf, math.nan


@case(
    "lawful",
    "https://github.com/huggingface/transformers/pull/26421",
    "precision",
    module="wo",
    op="mm|linear",
    samples=(2,),
    fix="island:wo",
)
def additive_mask_in_the_batch():
    """The loader adds a mask of -inf to the batch, as it should. Guilty is an overflow after the
    attention.
    """

    def forward(net, x, mask):
        unit = F.normalize(x, dim=-1)
        h = (unit @ unit.transpose(1, 2) + mask).softmax(-1) @ x
        h = net.wo(h)  # <- guilty
        return net.norm(h)

    mask = torch.full((4, 3, 3), -INF).triu(1)
    x = numbers(4, 3, 8)
    x[2] = 9000 + 0.1 * x[2]
    return Step(
        Net(forward, wo=filled(8, 8, 1.0), norm=nn.LayerNorm(8)),
        [(x, mask)],
        weighted,
        torch.float16,
    )


@case(
    "lawful",
    "https://github.com/chemprop/chemprop/issues/960",
    "divergence",
    module="",
    op="sqrt",
    samples=(),
    fix="guard",
)
def missing_targets_masked_rightly():
    """NaN targets are replaced before the subtraction. Guilty is the root of a mean squared error
    of exactly 0.
    """

    def loss(net, x, y):
        known = y.isfinite()
        error = known * (net(x) - torch.where(known, y, 0.0))
        return (error.pow(2).sum() / known.sum()).sqrt()  # <- guilty

    x = numbers(4, 6)
    y = x.clone()
    y[1, 0] = y[3, 2] = NAN
    return Step(identity(6), [(x, y)], loss)


@case(
    "lawful",
    "https://github.com/macrocosm-os/mainframe/pull/185",
    "divergence",
    module="",
    op="log",
    samples=(1,),
    fix="guard",
)
def best_loss_starts_at_inf():
    """A buffer holds the best loss so far, inf at first. Guilty is a log of 0."""

    def forward(net, x):
        p = net.fc(x).relu()
        return torch.log(p)  # <- guilty

    x = numbers(4, 6).abs() + 0.1
    x[1, 3] = 0
    net = Net(forward, fc=identity(6))
    net.register_buffer("best_loss", torch.tensor(INF))
    return Step(net, [(x,)], mean)


@case(
    "lawful",
    "https://github.com/pytorch/vision/issues/1176",
    "divergence",
    module="",
    op="exp",
    samples=(1,),
    fix="guard",
)
def image_id_is_no_label():
    """Detection targets carry integer columns beside the labels: image_id 139 with three classes is
    no fault.
    """

    def loss(net, images, targets):
        out = net(images)
        size = out[:, :3].exp()  # <- guilty
        boxes = F.smooth_l1_loss(size, torch.ones(4, 3))
        return cross(nn.Identity(), out, targets["labels"]) + boxes

    x = numbers(4, 6)
    x[1, 0] = 100
    targets = {"image_id": torch.tensor([139, 285, 632, 724]), "labels": labels()}
    return Step(identity(6), [(x, targets)], loss, num_classes=6)


@case(
    "lawful",
    "https://github.com/pytorch/pytorch/issues/15508",
    "precision",
    module="fc",
    op="mm|linear",
    samples=(0,),
    fix="island:fc",
)
def another_ignore_index():
    """Label 255 means: ignore. Guilty is an overflow in the layer before."""

    def forward(net, x):
        h = net.fc(x)  # <- guilty
        return net.head(net.norm(h))

    x = numbers(4, 6)
    x[0] = 20000 + x[0]
    y = torch.tensor([1, 255, 0, 2])
    return Step(
        Net(forward, fc=filled(6, 6, 1.0), norm=nn.LayerNorm(6), head=nn.Linear(6, 3)),
        [(x, y)],
        lambda net, x, y: F.cross_entropy(net(x).float(), y, ignore_index=255),
        torch.float16,
        num_classes=3,
    )


@case(
    "lawful",
    "https://github.com/pytorch/pytorch/pull/43789",
    "divergence",
    module="",
    op="div",
    samples=(2,),
    fix="guard",
)
def observer_starts_at_inf():
    """A quantisation observer starts with min_val = inf and max_val = -inf. Guilty is a division by
    a range of 0.
    """

    def forward(net, x):
        h = net.observer(net.fc(x))
        low, high = h.amin(-1, keepdim=True), h.amax(-1, keepdim=True)
        return (h - low) / (high - low)  # <- guilty

    x = numbers(4, 6)
    x[2] = 3
    observer = Net(lambda net, x: x)
    observer.register_buffer("min_val", torch.tensor(INF))
    observer.register_buffer("max_val", torch.tensor(-INF))
    return Step(Net(forward, fc=identity(6), observer=observer), [(x,)], weighted)


@case(
    "lawful",
    "https://github.com/pytorch/pytorch/pull/21244",
    "not reproducible",
    samples=(),
    fix="hardware",
)
def nan_that_comes_once():
    """A kernel returns NaN now and then. Run again, all is finite, the causal mask of -inf
    included.
    """

    def forward(net, x):
        calls.append(1)
        h = net.fc(x)
        h = (h @ h.transpose(1, 2) + net.mask).softmax(-1) @ h
        return h * (NAN if len(calls) == 1 else 1.0)

    net, calls = Net(forward, fc=nn.Linear(6, 6)), []
    net.register_buffer("mask", torch.full((3, 3), -INF).triu(1))
    return Step(net, [(numbers(4, 3, 6),)], weighted)


@case(
    "lawful",
    "https://github.com/THUDM/slime/pull/2198",
    "divergence",
    module="",
    op="exp",
    samples=(2,),
    fix="guard",
)
def ratio_beside_a_mask_of_actions():
    """The batch forbids actions by -inf, rightly. Guilty is exp of a log ratio of 100."""

    def loss(net, x, allowed, old):
        log_p = (net(x) + allowed).log_softmax(-1)[:, 0]
        ratio = torch.exp(log_p - old)  # <- guilty
        return -ratio.mean()

    allowed = torch.zeros(4, 6)
    allowed[1, 3] = allowed[2, 5] = -INF
    return Step(identity(6), [(numbers(4, 6), allowed, torch.tensor([-1.0, -2, -100, -1]))], loss)
