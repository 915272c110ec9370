"""rescue/inject.py: where a fault strikes, and where it must not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rescue.inject import Injector, parse_inject


class Judged(nn.Module):
    """A network with its loss: model(images, labels) -> (loss, metrics)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        self.net.register_buffer("temperature", torch.ones(()))

    def forward(self, images, labels):
        logits = self.net(images) * self.net.temperature  # a buffer that the backward needs
        return F.cross_entropy(logits, labels), {"acc1": logits.argmax(1).eq(labels).float()}


def planted(spec, step=2, **about):
    model = Judged()
    injector = Injector(model.net, parse_inject(spec), **about)
    injector.attach(model)
    injector.begin(step)
    return model, injector


IMAGES = torch.ones(8, 3, 2, 2) * torch.arange(8.0).view(8, 1, 1, 1)
LABELS = torch.arange(8) % 3


def buffers_are_finite(model):
    return all(b.isfinite().all() for b in model.net.buffers())


def test_a_loss_fault_strikes_micro_batch_0_and_its_backward_and_nothing_else():
    model, _ = planted("nan:loss@step=2")
    losses = [model(IMAGES, LABELS)[0] for _ in range(3)]
    assert [bool(loss.isfinite()) for loss in losses] == [False, True, True]
    losses[0].backward()
    assert model.net[1].weight.grad.isnan().all()
    assert model(IMAGES, LABELS)[1]["acc1"].shape == (8,), "the metrics pass through"


@pytest.mark.parametrize("about", [dict(step=3), dict(rank=1)])
def test_another_step_and_another_rank_are_left_alone(about):
    model, _ = planted("nan:loss@step=2,rank=0;inf:buffer@step=2,rank=0", **about)
    assert model(IMAGES, LABELS)[0].isfinite() and buffers_are_finite(model)


def test_evaluation_is_left_alone():
    model, _ = planted("nan:loss@step=2;inf:buffer@step=2")
    assert model.eval()(IMAGES, LABELS)[0].isfinite() and buffers_are_finite(model)


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


def test_a_batch_is_struck_in_one_element_of_its_first_sample():
    _, injector = planted("inf:input@step=2;nan:label@step=2")
    images, labels = injector.batch(IMAGES, LABELS)
    assert images[0, 0, 0, 0].isinf() and int(images.isfinite().logical_not().sum()) == 1
    assert labels.tolist() == [torch.iinfo(torch.int64).min, *LABELS.tolist()[1:]]
    assert IMAGES.isfinite().all() and int(LABELS[0]) == 0, "the caller's tensors stay"
    injector.begin(3)
    images, labels = injector.batch(IMAGES, LABELS)
    assert torch.equal(images, IMAGES) and torch.equal(labels, LABELS)


def test_begin_plants_the_state_in_its_own_step():
    spec = "nan:param:1.bias@step=4;inf:optstate:exp_avg_sq@step=4;big:scale@step=4"
    model, injector = planted(spec)
    optimizer, scale = torch.optim.AdamW(model.net.parameters()), torch.tensor(64.0)
    model(IMAGES, LABELS)[0].backward()
    optimizer.step()
    injector.begin(3, [optimizer], scale)
    assert model.net[1].bias.isfinite().all() and scale == 64
    injector.begin(4, [optimizer], scale)
    assert model.net[1].bias[0].isnan() and scale == 1e30
    assert sum(bool(s["exp_avg_sq"].isinf().any()) for s in optimizer.state.values()) == 1
    with pytest.raises(ValueError, match="no loss scale"):
        Injector(model.net, parse_inject("nan:scale@step=1"), scales=False)
