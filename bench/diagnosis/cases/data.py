"""Bad data: dicts, targets, one micro-batch of several."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.diagnosis.step import Step, case, cross, labels, numbers

NAN = math.nan


@case("data", "https://github.com/pytorch/pytorch/issues/70348", "data", micro_batch=1, fix="count")
def every_label_ignored():
    """The second of three micro-batches has no label but -100: a mean over nothing."""
    batches = [
        (numbers(4, 6), labels()),
        (numbers(4, 6), torch.full((4,), -100)),
        (numbers(4, 6), labels()),
    ]
    return Step(nn.Linear(6, 3), batches, cross)


@case("data", "https://github.com/prs-eth/Marigold/issues/111", "data", samples=(2,), fix="samples")
def nan_pixel_in_a_dict():
    """The batch is one dict, and one picture in it holds a NaN."""
    x = numbers(4, 6)
    x[2, 3] = NAN
    return Step(
        nn.Linear(6, 3),
        [({"image": x, "label": labels()},)],
        lambda net, batch: cross(net, batch["image"], batch["label"]),
    )


@case(
    "data",
    "https://github.com/matterport/Mask_RCNN/issues/159",
    "data|divergence",
    module="",
    op="log",
    samples=(1,),
    fix="guard|samples",
)
def ground_truth_box_without_height():
    """The regression target is log(height / anchor), and one box has height 0."""

    def loss(net, anchors, boxes):
        target = torch.log(boxes / anchors)  # <- guilty
        return F.smooth_l1_loss(net(anchors), target)

    boxes = numbers(4, 2, seed=1).abs() + 0.5
    boxes[1, 1] = 0
    return Step(nn.Linear(2, 2), [(numbers(4, 2).abs() + 0.5, boxes)], loss)


@case(
    "data",
    "https://github.com/milesial/Pytorch-UNet/issues/291",
    "data",
    samples=(1,),
    fix="samples",
)
def grey_value_for_a_label():
    """A mask was stored as grey values: label 192 where there are two classes. It raises
    IndexError.
    """
    y = torch.zeros(4, 5, dtype=torch.long)
    y[1, 2] = 192
    return Step(nn.Conv1d(1, 2, 1), [(numbers(4, 1, 5), y)], cross, num_classes=2)


@case(
    "data", "https://github.com/TencentGameMate/gnn_cross_lingual/issues/5", "data", fix="samples"
)
def label_equal_to_the_number_of_classes():
    """12 classes and a label 12, and nobody tells the tool the number of classes: the step only
    raises.
    """
    return Step(nn.Linear(6, 12), [(numbers(4, 6), torch.tensor([0, 3, 12, 11]))], cross)


@case(
    "data",
    "https://github.com/EricFillion/happy-transformer/issues/248",
    "data",
    samples=(0,),
    micro_batch=1,
    fix="samples",
)
def negative_label_in_the_second_dict():
    """Label -1 in a dict with named columns, in the second micro-batch."""
    batches = [
        ({"text": numbers(4, 6), "labels": labels()},),
        ({"text": numbers(4, 6), "labels": labels() - 1},),
    ]
    batches[1][0]["labels"][3] = 2
    return Step(
        nn.Linear(6, 3),
        batches,
        lambda net, batch: cross(net, batch["text"], batch["labels"]),
        num_classes=3,
    )


@case(
    "data",
    "https://github.com/Nixtla/neuralforecast/issues/186",
    "data",
    samples=(3,),
    micro_batch=2,
    fix="samples",
)
def missing_target_in_the_third_micro_batch():
    """A missing value in column y is NaN, and nobody masks it."""
    y = numbers(4, 6, seed=3)
    y[3, 0] = NAN
    batches = [(numbers(4, 6), numbers(4, 6)), (numbers(4, 6), numbers(4, 6)), (numbers(4, 6), y)]
    return Step(nn.Linear(6, 6), batches, lambda net, x, y: F.mse_loss(net(x), y))


@case(
    "data",
    "https://github.com/ypwhs/captcha_break/issues/29",
    "data|divergence",
    module="",
    op="ctc",
    samples=(1,),
    fix="ctc|samples",
)
def ctc_target_longer_than_the_input():
    """Time first. Five equal letters need nine frames, there are six: no path, the loss is inf."""

    def loss(net, x, target):
        log_p = net(x).log_softmax(-1)  # T, N, C
        lengths = torch.tensor([2, 5, 2, 3])
        return F.ctc_loss(log_p, target, torch.full((4,), 6), lengths)  # <- guilty

    target = torch.tensor([[1, 2, 0, 0, 0], [3, 3, 3, 3, 3], [2, 1, 0, 0, 0], [1, 2, 3, 0, 0]])
    return Step(nn.Linear(5, 4), [(numbers(6, 4, 5), target)], loss)


@case(
    "data",
    "https://github.com/pytorch/pytorch/issues/50224",
    "data",
    samples=(),
    micro_batch=1,
    fix="count",
)
def empty_micro_batch():
    """No positive box in the whole micro-batch: the mean over no sample is NaN."""
    batches = [(numbers(4, 6), labels()), (numbers(0, 6), labels(0))]
    return Step(nn.Linear(6, 3), batches, cross)


@case(
    "data",
    "https://github.com/csteinmetz1/auraloss/issues/25",
    "data|divergence",
    module="",
    op="div",
    samples=(2,),
    fix="guard|samples",
)
def si_sdr_of_a_silent_target():
    """The target of one clip is silence: the projection on it divides by its energy, 0."""

    def loss(net, x, target):
        out = net(x)
        energy = target.pow(2).sum(-1, keepdim=True)
        alpha = (out * target).sum(-1, keepdim=True) / energy  # <- guilty
        noise = out - alpha * target
        ratio = (alpha * target).pow(2).sum(-1) / (noise.pow(2).sum(-1) + 1e-8)
        return -10 * torch.log10(ratio + 1e-8).mean()

    target = numbers(4, 6, seed=1)
    target[2] = 0
    return Step(nn.Linear(6, 6), [(numbers(4, 6), target)], loss)


@case("data", "https://github.com/WenjieDu/PyPOTS/issues/232", "data", samples=(1,), fix="samples")
def missing_value_in_a_dataclass():
    """The batch is a dataclass, and the series that should be intact has a gap."""

    from dataclasses import dataclass

    @dataclass
    class Imputed:
        intact: Tensor
        target: Tensor

    x = numbers(4, 6)
    x[1, 4] = NAN
    return Step(
        nn.Linear(6, 6),
        [(Imputed(x, numbers(4, 6, seed=1)),)],
        lambda net, batch: F.mse_loss(net(batch.intact), batch.target),
    )


@case(
    "data",
    "https://github.com/ratschlab/DeepSpot/issues/9",
    "data",
    samples=(0,),
    micro_batch=1,
    fix="samples",
)
def empty_spot_in_a_mapping():
    """An encoding is a UserDict, no dict. An empty spot has features NaN, in the second micro-
    batch.
    """

    from collections import UserDict

    x = numbers(4, 6)
    x[0] = NAN
    batches = [(UserDict(features=h, counts=numbers(4, 6, seed=1)),) for h in (numbers(4, 6), x)]
    return Step(
        nn.Linear(6, 6),
        batches,
        lambda net, batch: F.mse_loss(net(batch["features"]), batch["counts"]),
    )
