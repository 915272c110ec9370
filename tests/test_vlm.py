"""VLM: padding, masks, counting and positions, each against a closed form or with the published fault planted."""

import math

import pytest
import torch
import torch.nn.functional as F

import amp_policy
from data import synthetic
from models import vlm

NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA's kernels"))


def make(preset="vlm-test", image_size=32, names=NAMES, **more):
    sizes = vlm.PRESETS[preset] | more
    if "grid" in sizes:
        sizes["patch_size"] = image_size // sizes.pop("grid")
    torch.manual_seed(0)
    return vlm.VLM(class_names=names, image_size=image_size, **sizes)


def draw(start, count):
    images, labels = synthetic.draw(start, count, seed=0)
    return images.float() / 128 - 1, labels


@pytest.fixture(scope="module")
def learned():
    """A net after at most 400 steps on 40 images, and its exact match on them."""
    net, (images, labels) = make(), draw(0, 40)
    optimizer = torch.optim.AdamW(net.parameters(), lr=4e-3, weight_decay=0.0)
    for step in range(400):
        loss, _ = net.train()(images, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            with torch.no_grad():
                exact = net.eval()(images, labels)[1]["exact_match"].mean().item()
            if exact == 100:
                break
    return net.eval(), exact


# --- Precision and protocol ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "O2", "O3"])
def test_loss_is_finite_fp32_and_every_parameter_gets_a_finite_gradient_in_every_precision(precision):
    policy = amp_policy.choose_policy(precision, amp_policy.capabilities("cpu"))
    net = policy.prepare(make())
    with policy.autocast():
        loss, metrics = net(torch.randn(8, 3, 32, 32), torch.arange(8))
    assert loss.dtype == torch.float32 and loss.shape == () and torch.isfinite(loss)
    assert {(m.dtype, m.shape) for m in metrics.values()} == {(torch.float32, (8,))}
    assert metrics["loss"].mean().item() == pytest.approx(loss.item(), rel=1e-6) and net.judged_by in metrics
    (loss * 1024).backward()
    for name, p in net.named_parameters():
        assert p.grad is not None and torch.isfinite(p.grad).all() and p.grad.any(), name


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "O2", "O3"])
def test_both_residual_streams_are_fp32_in_every_precision(precision):
    policy, seen = amp_policy.choose_policy(precision, amp_policy.capabilities("cpu")), []
    net = policy.prepare(make())
    for module in net.modules():
        if isinstance(module, vlm.Block):
            module.register_forward_hook(lambda _, inputs, out: seen.extend([inputs[0].dtype, out.dtype]))
    with policy.autocast():
        net(torch.randn(2, 3, 32, 32), torch.arange(2))
    assert set(seen) == {torch.float32} and len(seen) == 6


@pytest.mark.parametrize(("preset", "image_size"), [("vlm", 32), ("vlm", 64), ("nanovlm", 224)])
def test_presets_have_the_sizes_they_promise(preset, image_size):
    with torch.device("meta"):
        net = make(preset, image_size)
    millions = sum(p.numel() for p in net.parameters()) / 1e6
    assert net.image_length == {"vlm": 16, "nanovlm": 49}[preset]
    assert 0.3 < millions < 0.6 if preset == "vlm" else 190 < millions < 200
    assert sum(p.numel() for p in make().parameters()) < 100_000


def test_it_compiles_to_one_graph():
    net = torch.compile(make(), backend="eager", fullgraph=True)
    assert torch.isfinite(net(*draw(0, 4))[0])


def test_a_state_dict_holds_no_table_of_text_and_loads_into_a_net_with_other_names():
    net, other = make(), make(names=["n01443537", "n01629819"])
    assert not {name for name in net.state_dict() if "sequences" in name or "counts" in name}
    for p in net.parameters():
        p.data.add_(1.0)
    other.load_state_dict(net.state_dict())
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), other.parameters(), strict=True))
    assert other.decoder.head.weight is other.decoder.embed.weight


# --- Padding and masks -----------------------------------------------------------------------------------------------


def answer_with_pads(net, pads):
    row = net.sequences[0, -net.eval_width :]
    row = row[row != vlm.PAD]
    ids = torch.cat([torch.full((pads,), vlm.PAD), row])[None]
    with torch.no_grad():
        return net.decoder(ids, net.image_tokens(draw(0, 1)[0]), net.answer_length)


def test_left_padding_does_not_change_the_answer(monkeypatch):
    net = make()
    torch.testing.assert_close(answer_with_pads(net, 20), answer_with_pads(net, 0), rtol=0, atol=1e-5)
    # The planted fault: causal, but blind to padding
    monkeypatch.setattr(vlm, "attention_mask", lambda real: torch.ones(1, 1, *real.shape[1:] * 2).tril().bool())
    assert (answer_with_pads(net, 20) - answer_with_pads(net, 0)).abs().max() > 1e-2


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fully_masked_rows_give_no_nan_forward_or_backward(dtype, device):
    net = make().to(device)
    ids = net.sequences[[0, 0]]
    ids[1] = vlm.PAD  # a sample of nothing but padding, beside one that begins with some
    images = draw(0, 2)[0].to(device)
    with torch.autocast(device, dtype, enabled=dtype != torch.float32):
        logits = net.decoder(ids, net.image_tokens(images), ids.shape[1])
    assert torch.isfinite(logits).all()
    (logits.float() ** 2).mean().backward()
    assert all(torch.isfinite(p.grad).all() for p in net.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_published_mask_is_nan_in_a_plain_softmax_and_the_guarded_one_is_not(dtype):
    real = torch.tensor([[False, False, True, True]])
    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    published = ((~real).float() * torch.finfo(torch.float32).min).to(dtype)
    assert published[0, 0] == -math.inf
    logits = (torch.zeros(4, 4, dtype=dtype) + published).masked_fill(~causal, -math.inf)
    assert logits.softmax(-1)[:2].isnan().all() and not logits.softmax(-1)[2:].isnan().any()
    mask = vlm.attention_mask(real)[0, 0]
    assert not torch.zeros(4, 4, dtype=dtype).masked_fill(~mask, -math.inf).softmax(-1).isnan().any()
    assert mask.tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]


def test_a_future_token_cannot_change_the_past():
    net = make()
    ids = net.sequences[:1, -net.eval_width :]
    ids = ids[:, (ids[0] == vlm.PAD).sum() :]
    other, t = ids.clone(), ids.shape[1] - 5
    other[0, t] = ord("#")
    with torch.no_grad():
        image_tokens = net.image_tokens(draw(0, 1)[0])
        a, b = (net.decoder(x, image_tokens, x.shape[1]) for x in (ids, other))
    torch.testing.assert_close(a[:, :t], b[:, :t], rtol=0, atol=1e-6)
    assert ((a - b)[:, t:].abs().amax(-1) > 1e-4).all()


# --- Counting --------------------------------------------------------------------------------------------------------


def test_the_loss_counts_only_the_answer_and_each_image_once():
    net, (images, _), labels = make().eval(), draw(0, 3), torch.tensor([1, 3, 9])  # automobile, cat, truck
    seen = []
    net.decoder.head.register_forward_hook(lambda module, args, out: seen.append(out))
    loss, metrics = net(images, labels)
    expected = []
    for row, label in zip(seen[0].double(), labels.tolist(), strict=True):
        target = torch.tensor([*NAMES[label].encode(), vlm.EOS])
        expected.append(F.cross_entropy(row[-len(target) :], target))
    torch.testing.assert_close(metrics["loss"], torch.stack(expected).float(), rtol=1e-6, atol=0)
    assert loss.item() == pytest.approx(sum(e.item() for e in expected) / 3, rel=1e-6)


def test_no_token_to_count_gives_loss_0_and_gradient_0_where_a_mean_gives_nan():
    logits = torch.randn(2, 4, vlm.VOCABULARY, requires_grad=True)
    targets, counts = torch.full((2, 4), 65), torch.tensor([0, 2])
    losses, exact = vlm.score(logits, targets, counts)
    assert F.cross_entropy(logits[0], torch.full((4,), vlm.IGNORE)).isnan()  # the published mean
    assert losses[0] == 0 and losses[1] > 0 and exact[0] == 0
    losses.sum().backward()
    assert not logits.grad[0].any() and not logits.grad[1, :2].any() and logits.grad[1, 2:].any()


def test_a_sequence_beyond_max_length_loses_its_answer_and_not_the_run(monkeypatch):
    longest = 1 + 4 + len(vlm.QUESTIONS[0]) + len("automobile") + 1
    with pytest.raises(ValueError, match="raise max_length"):
        make(max_length=longest - 1)
    net = make(max_length=longest)
    monkeypatch.setattr(net, "choose", lambda labels: 2 * len(NAMES) + labels)  # the long question: no room to answer
    loss, metrics = net(*draw(0, 4))
    loss.backward()
    assert loss.item() == 0 and not metrics["exact_match"].any()
    assert all(torch.isfinite(p.grad).all() for p in net.parameters())


def test_training_asks_every_question_and_every_answer_is_true():
    net = make()
    labels = torch.arange(len(NAMES)).repeat(60)
    asked = set()
    for row, label in zip(net.sequences[net.choose(labels)].tolist(), labels.tolist(), strict=True):
        assert [t for t in row if t > 255 and t != vlm.PAD] == [vlm.BOS, *[vlm.IMAGE] * net.image_length, vlm.EOS]
        text = bytes(t for t in row if t < 256).decode()
        question = next((q for q in vlm.QUESTIONS if text.startswith(q)), None)
        if question:
            assert text == question + NAMES[label]
        else:
            question, about, answer = text.partition("? ")[0], *text[len("Is this a ") :].split("? ")
            assert question == f"Is this a {about}" and (answer == "yes") == (about == NAMES[label])
            question = answer
        asked.add(question)
    assert asked == {*vlm.QUESTIONS, "yes", "no"}


# --- Positions and heads ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [5, 300, 2051])
def test_rotated_products_depend_on_the_distance_only_in_float64(m):
    torch.manual_seed(0)
    d, n = 16, m - 3
    q, k = torch.randn(2, 1, 1, 1, d, dtype=torch.float64)
    cos, sin = vlm.RotaryAngles(d)(torch.tensor([[m], [n]]))
    got = (vlm.rotate(q, cos[:1], sin[:1]) * vlm.rotate(k, cos[1:], sin[1:])).sum()
    turn = torch.polar(torch.ones(d // 2).double(), 3.0 * 10_000.0 ** -(torch.arange(d // 2).double() * 2 / d))
    a, b = (torch.complex(*x.flatten().chunk(2)) for x in (q, k))
    assert got.item() == pytest.approx((a * b.conj() * turn).real.sum().item(), abs=1e-3)


@pytest.mark.parametrize("precision", ["bf16", "O2", "O3"])
def test_positions_are_exact_where_half_precision_miscounts(precision):
    policy = amp_policy.choose_policy(precision, amp_policy.capabilities("cpu"))
    net = policy.prepare(make())
    positions = torch.arange(250, 2100)
    with policy.autocast():
        cos, sin = net.decoder.angles(positions[None])
    exact = positions.double()[:, None] * 10_000.0 ** -(torch.arange(4).double() / 4)
    for got, f in ((cos, torch.cos), (sin, torch.sin)):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got[0, 0].double(), f(exact), rtol=0, atol=1e-3)
        for half in (torch.bfloat16, torch.float16):  # what is avoided
            assert (f(positions.to(half).double()) - f(exact[:, 0])).abs().max() > 0.1
    assert torch.tensor(257).bfloat16() == 256 and torch.tensor(2049).half() == 2048


def test_grouped_queries_equal_plain_attention_with_repeated_heads():
    torch.manual_seed(0)
    gqa, mha = vlm.GroupedQueryAttention(32, 4, 2), vlm.GroupedQueryAttention(32, 4, 4)
    q, k, v = gqa.qkv.weight.data.unflatten(0, (8, 8)).split([4, 2, 2])
    mha.qkv.weight.data = torch.cat([q, *(t[[0, 0, 1, 1]] for t in (k, v))]).flatten(0, 1)
    mha.proj.load_state_dict(gqa.proj.state_dict())
    x, mask = torch.randn(2, 9, 32), vlm.attention_mask(torch.ones(2, 9, dtype=torch.bool))
    angles = vlm.RotaryAngles(8)(torch.arange(9)[None])
    torch.testing.assert_close(gqa(x, mask, *angles), mha(x, mask, *angles), rtol=0, atol=1e-5)


def test_a_question_of_600_bytes_is_answered_in_bf16_if_max_length_allows_it():
    net, images = make(max_length=1024).eval(), draw(0, 2)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert len(net.generate(images, "x" * 600)) == 2
        with pytest.raises(ValueError, match="no room to answer"):
            net.generate(images, "x" * 1024)


# --- Learning --------------------------------------------------------------------------------------------------------


def test_it_overfits_40_images(learned):
    assert learned[1] == 100


def test_teacher_forced_exact_match_is_what_greedy_generation_scores(learned):
    net, (images, labels) = learned[0], draw(0, 120)  # 40 learned by heart, 80 never seen
    with torch.no_grad():
        exact = net(images, labels)[1]["exact_match"] == 100
    said = net.generate(images)
    assert [text == NAMES[label] for text, label in zip(said, labels.tolist(), strict=True)] == exact.tolist()
    assert 40 <= exact.sum() < 120
    assert net.show(images[:1], labels[:1]) == [f"Q: What is it? A: {said[0]} (true: {NAMES[labels[0]]})"]


def test_a_net_that_would_answer_with_an_image_still_answers():
    net, (images, _) = make(), draw(0, 2)
    net.eval().decoder.register_forward_hook(
        lambda module, args, logits: logits.index_fill(-1, torch.tensor([vlm.IMAGE]), 1e4))
    assert len(net.generate(images)) == 2
