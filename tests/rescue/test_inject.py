"""rescue/inject.py: where a fault strikes, and where it must not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rescue.inject import Injector


class WithLoss(nn.Module):
    """A network with its loss: model(images, labels) -> (loss, metrics)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        self.net.register_buffer("temperature", torch.ones(()))

    def forward(self, images, labels):
        logits = self.net(images) * self.net.temperature  # a buffer that the backward needs
        return F.cross_entropy(logits, labels), {"acc1": logits.argmax(1).eq(labels).float()}


def planted(spec):
    model = WithLoss()
    injector = Injector(model.net, spec, model)
    injector.begin(2)
    return model, injector


IMAGES = torch.ones(8, 3, 2, 2) * torch.arange(8.0).view(8, 1, 1, 1)
LABELS = torch.arange(8) % 3


def test_a_loss_fault_strikes_micro_batch_0_and_its_backward_and_nothing_else():
    model, _ = planted("nan:loss@step=2")
    assert model.eval()(IMAGES, LABELS)[0].isfinite(), "evaluation is left alone"
    model.train()
    losses = [model(IMAGES, LABELS)[0] for _ in range(3)]
    assert [bool(loss.isfinite()) for loss in losses] == [False, True, True]
    losses[0].backward()
    assert model.net[1].weight.grad.isnan().all()
    assert model(IMAGES, LABELS)[1]["acc1"].shape == (8,), "the metrics pass through"


def test_a_fault_of_an_activation_strikes_micro_batch_0_of_training():
    model, _ = planted("nan:act:1@step=2")
    assert model.eval()(IMAGES, LABELS)[0].isfinite()
    model.train()
    losses = [model(IMAGES, LABELS)[0] for _ in range(3)]
    assert [bool(loss.isfinite()) for loss in losses] == [False, True, True]


def test_a_buffer_fault_stays_through_later_micro_batches_and_breaks_no_backward():
    model, _ = planted("nan:buffer:2.running_mean@step=2;inf:buffer:temperature@step=2")
    loss, _ = model(IMAGES, LABELS)
    loss.backward()  # temperature was saved for it: autograd must not see an in-place change
    model(IMAGES, LABELS)
    assert model.net[2].running_mean[0].isnan() and model.net[2].running_mean[1:].isfinite().all()
    assert model.net.temperature.isinf()


def test_a_repeated_micro_batch_meets_its_loss_fault_again_and_no_buffer_fault():
    model, injector = planted("nan:loss@step=2;inf:buffer:temperature@step=2")
    for micro, finite in ((0, False), (0, False), (1, True), (0, False)):
        injector.repeat(micro)
        for _ in range(2):  # taken in two pieces
            assert bool(model(IMAGES, LABELS)[0].isfinite()) == finite
    assert model.net.temperature == 1
    injector.begin(2)
    model(IMAGES, LABELS)
    assert model.net.temperature.isinf(), "after begin() it is a step again"


@pytest.mark.parametrize(
    "spec",
    [
        "nan",
        "nan:grad",
        "nan:grad@step=",
        "odd:grad@step=1",
        "nan:sky@step=1",
        "nan:grad@step=5..3",
        "nan:grad@step=1,rank=x",
        "nan:grad@step=-1",
        "nan:grad:of.nothing@step=1",
    ],
)
def test_a_wrong_inject_spec_is_refused_in_one_sentence(spec):
    with pytest.raises(ValueError, match="--inject") as caught:
        Injector(WithLoss(), spec)
    assert "\n" not in str(caught.value)
