"""VLM: padding, masks, counting, positions: closed forms, or the published fault planted."""

import pytest
import torch
import torch.nn.functional as F
from helpers import both_devices, policy_for
from nets import NAMES, build, pictures

from models import vlm


def make(**options):
    return build("vlm-test", **options)


def test_it_learns_by_heart_and_generates_what_its_exact_match_counts():
    net = make()
    images, labels = pictures(60)  # 20 to learn, 40 never seen
    optimizer = torch.optim.AdamW(net.parameters(), lr=6e-3, weight_decay=0.0)

    for _ in range(300):
        loss, _ = net.train()(images[:20], labels[:20])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        with torch.no_grad():
            _, metrics = net.eval()(images, labels)
        exact = metrics["exact_match"] == 100
        if exact[:20].all():
            break

    said = net.generate(images)
    truth = [NAMES[label] for label in labels.tolist()]
    right = [text == name for text, name in zip(said, truth, strict=True)]
    assert right == exact.tolist()
    assert exact[:20].all()
    assert not exact.all()

    line = f"Q: What is it? A: {said[0]} (true: {truth[0]})"
    assert net.show(images[:1], labels[:1]) == [line]


# --- padding and masks ----------------------------------------------------------------------------


@both_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fully_masked_rows_give_no_nan_forward_or_backward(dtype, device):
    net = make().to(device)
    ids = net.sequences[[0, 0]]
    ids[1] = vlm.PAD  # a sample of nothing but padding, beside one that begins with some
    images, _ = pictures(2)

    half = dtype != torch.float32
    with torch.autocast(device, dtype, enabled=half):
        image_tokens = net.image_tokens(images.to(device))
        logits = net.decoder(ids, image_tokens, ids.shape[1])
    assert logits.isfinite().all()

    loss = (logits.float() ** 2).mean()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())


# --- counting -------------------------------------------------------------------------------------


def test_the_loss_counts_only_the_answer_and_each_image_once():
    net = make().eval()
    images, _ = pictures(3)
    labels = torch.tensor([1, 3, 9])

    seen = []
    net.decoder.head.register_forward_hook(lambda module, args, out: seen.extend(out))
    loss, metrics = net(images, labels)

    of_answers = []
    for row, label in zip(seen, labels, strict=True):
        answer = torch.tensor([*NAMES[label].encode(), vlm.EOS])
        of_answers.append(F.cross_entropy(row[-len(answer) :], answer))
    want = torch.stack(of_answers)
    torch.testing.assert_close(metrics["loss"], want, rtol=1e-5, atol=0)
    torch.testing.assert_close(loss, want.mean(), rtol=1e-5, atol=0)


def test_a_sequence_beyond_max_length_loses_its_answer_and_not_the_run(monkeypatch):
    longest = 1 + 4 + len(vlm.QUESTIONS[0]) + len("automobile") + 1
    net = make(max_length=longest)
    long_question = 2 * len(NAMES)  # no room to answer
    monkeypatch.setattr(net, "choose", lambda labels: long_question + labels)

    loss, metrics = net(*pictures(4))
    loss.backward()

    assert loss.item() == 0
    assert not metrics["exact_match"].any()
    assert all(p.grad.isfinite().all() for p in net.parameters())


def test_training_asks_every_question_and_every_answer_is_true():
    net = make()
    labels = torch.arange(len(NAMES)).repeat(60)
    rows = net.sequences[net.choose(labels)]
    image = [vlm.IMAGE] * net.image_length

    asked = set()
    for row, label in zip(rows.tolist(), labels.tolist(), strict=True):
        special = [t for t in row if t > 255 and t != vlm.PAD]
        assert special == [vlm.BOS, *image, vlm.EOS]

        name = NAMES[label]
        text = bytes(t for t in row if t < 256).decode()
        about, _, said = text.removeprefix("Is this a ").partition("? ")
        truth = "yes" if about == name else "no"
        asked.add(said if said == truth else text.removesuffix(name))
    assert asked == {*vlm.QUESTIONS, "yes", "no"}


# --- positions and heads --------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "O2", "O3"])
def test_positions_are_exact_where_half_precision_miscounts(precision):
    policy = policy_for(precision)
    net = policy.prepare(make())
    positions = torch.arange(250, 2100)
    with policy.autocast():
        angles = net.decoder.angles(positions[None])

    frequencies = 10_000.0 ** -(torch.arange(4).double() / 4)
    exact = positions.double()[:, None] * frequencies
    half = positions.to(torch.bfloat16).double()  # what is avoided
    for got, f in zip(angles, (torch.cos, torch.sin), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got[0, 0].double(), f(exact), rtol=0, atol=1e-3)
        error = f(half) - f(exact[:, 0])
        assert error.abs().max() > 0.1


def test_generation_answers_a_long_question_says_no_when_there_is_no_room_and_writes_no_image():
    net = make(max_length=1024).eval()
    images, _ = pictures(2)

    with torch.autocast("cpu", torch.bfloat16):
        answers = net.generate(images, "x" * 600)
        assert len(answers) == 2
        with pytest.raises(ValueError, match="no room to answer"):
            net.generate(images, "x" * 1024)

    image = torch.tensor([vlm.IMAGE])

    def wants_an_image(module, args, logits):
        return logits.index_fill(-1, image, 1e4)

    net.decoder.register_forward_hook(wants_an_image)
    assert len(net.generate(images)) == 2
