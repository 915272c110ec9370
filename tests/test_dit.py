"""DiT: sampling against closed forms, what half precision may not touch, fused paths that lie."""

import math

import pytest
import torch
from helpers import needs_cuda, policy_for
from nets import PRECISIONS, build, shake

from models import dit
from models.dit import TIMESTEPS


def awake(**options):
    """A net of patches of 4 with every parameter moved: adaLN-Zero's start hides all the rest."""
    return shake(build("dit-test", grid=8, num_classes=7, **options))


def batch(n=6):
    g = torch.Generator().manual_seed(5)
    images = torch.randn(n, 3, 32, 32, generator=g)
    labels = torch.arange(n) % 7
    return images, labels


def alpha_bar(t):
    """Of integer t, in Python's float64, as arXiv 2102.09672 prints the cosine schedule."""
    return math.cos((t / TIMESTEPS + 0.008) / 1.008 * math.pi / 2) ** 2


# --- sampling -------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 25])
def test_ddim_with_a_perfect_oracle_returns_the_image(steps):
    net = awake()
    want = batch()[0].clamp(-2.5, 2.5)

    def oracle(x, t, labels, guidance):
        of_each = [alpha_bar(i) for i in t.tolist()]
        a = torch.tensor(of_each, dtype=torch.float64).view(-1, 1, 1, 1)
        noise = x.double() - a.sqrt() * want
        return (noise / (1 - a).sqrt()).float()

    net.guided = oracle
    # From t = 999 alone, fp32's rounding of x, near 1e-7, is divided by a signal of 0.0016.
    out = net.sample(torch.zeros(6).long(), steps=steps)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-3)


@torch.no_grad()
def test_guidance_0_is_without_label_1_with_it_and_2_as_far_beyond():
    net = awake()
    x, labels = batch()
    t = torch.full((6,), 300)
    none = torch.zeros(6, dtype=torch.bool)

    given = net.predict(x, t, labels, none)
    without = net.predict(x, t, labels, ~none)
    difference = given - without
    assert difference.abs().max() > 0.01

    beyond = 2 * given - without
    for guidance, want in ((0.0, without), (1.0, given), (2.0, beyond)):
        got = net.guided(x, t, labels, guidance)
        torch.testing.assert_close(got, want)


def test_show_draws_the_labels_alike_each_time_within_the_range_of_the_data_and_after_a_reload():
    net = awake()
    images, labels = batch()
    net.init_from_data(images.clamp(-1.5, 1))
    other = build("dit-test", grid=8, num_classes=7)
    other.load_state_dict(net.state_dict())

    state = torch.get_rng_state()
    first = net.show(images, labels)
    again = other.show(images * 0, labels)
    of_others = net.show(images, (labels + 1) % 7)

    assert torch.equal(again, first)
    assert not torch.equal(of_others, first)
    assert torch.equal(torch.get_rng_state(), state)
    assert first.min() == -1.5  # a shaken net runs into both ends
    assert first.max() == 1.0


# --- start, labels, held-out loss -----------------------------------------------------------------


def test_the_first_prediction_is_exactly_0_and_the_timestep_mlp_begins_as_published():
    net = build("dit-test")
    images, labels = batch(64)
    t = torch.arange(64)
    none = torch.zeros(64).bool()

    prediction = net.predict(images, t, labels, none)
    assert not prediction.any()

    for linear in (net.time.mlp[0], net.time.mlp[2]):
        assert linear.weight.std().item() == pytest.approx(0.02, rel=0.1)
    for block in net.blocks:
        assert not block.adaln.weight.any()
        assert not block.adaln.bias.any()


def test_a_tenth_of_the_labels_is_dropped_in_training_and_none_in_evaluation():
    net = awake(image_size=8, patch_size=4)
    dropped = []
    net.label.register_forward_pre_hook(lambda module, args: dropped.append(args[1].float().mean()))
    images = torch.zeros(2000, 3, 8, 8)
    labels = torch.zeros(2000).long()

    net(images, labels)
    net.eval()(images, labels)

    training, evaluation = dropped
    assert 0.07 < training < 0.13
    assert evaluation == 0


def test_a_label_that_is_no_class_is_an_error_and_not_the_null_class():
    net = awake()
    image, _ = batch(1)
    for label in (7, -1):
        with pytest.raises(IndexError):
            net(image, torch.tensor([label]))


# --- precision ------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
def test_held_out_timesteps_and_noise_levels_are_those_of_float64_in_every_precision(precision):
    policy = policy_for(precision)
    seen = {}
    net = policy.prepare(awake()).eval()
    net.time.mlp.register_forward_pre_hook(lambda module, args: seen.update(features=args[0]))
    net.patch.register_forward_pre_hook(lambda _, args: seen.update(noisy=args[0]), prepend=True)
    black = torch.zeros(500, 3, 32, 32)
    with policy.autocast():
        net(black, torch.zeros(500).long())

    t = (torch.arange(500).double() + 0.5) * (math.sqrt(5) - 1) / 2 % 1 * TIMESTEPS
    of_each_tenth = torch.histc(t, 10, 0, TIMESTEPS)
    assert (of_each_tenth - 50).abs().max() <= 1  # the whole schedule, evenly

    frequencies = 10000.0 ** (-torch.arange(128).double() / 128)
    angles = t.floor()[:, None] * frequencies
    want = torch.cat([angles.cos(), angles.sin()], 1).float()
    torch.testing.assert_close(seen["features"], want, rtol=0, atol=1e-4)

    seeded = torch.Generator().manual_seed(0)
    noise = torch.randn(500, 3, 32, 32, generator=seeded)
    sigma = [math.sqrt(1 - alpha_bar(i)) for i in t.floor().tolist()]
    silent = seen["noisy"].flatten(1).norm(dim=1) / noise.flatten(1).norm(dim=1)
    torch.testing.assert_close(silent, torch.tensor(sigma), rtol=2e-5, atol=0)


def test_modulate_keeps_a_scale_that_bf16_would_lose():
    one = torch.ones(1, 1).bfloat16()
    scale = torch.full((1, 1), 2.0**-8).bfloat16()
    assert one + scale == 1
    modulated = dit.modulate(one[None], 0 * one, scale)
    assert modulated.item() == 1 + 2.0**-8


def test_plain_attention_survives_products_beyond_fp16():
    q = torch.full((1, 1, 2, 64), 40.0).half()
    v = torch.randn(1, 1, 2, 64).half()
    products = q @ q.transpose(-2, -1)  # 102400, before the division by 8
    assert not products.isfinite().all()
    want = v.mean(2, keepdim=True).expand_as(v)
    got = dit.attention(q, q, v)
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


# --- fused paths ----------------------------------------------------------------------------------


def sample_0_for_all(x, shift, scale):
    """Right for one image, wrong for more, as OpenDiT's kernel was."""
    first_scale = scale.float()[:1, None]
    first_shift = shift.float()[:1, None]
    return x.float() * (1 + first_scale) + first_shift


def last_wrong(x, shift, scale):
    """One wrong sample among many, which an average would hide."""
    right = dit.modulate(x, shift, scale)
    return torch.cat([right[:-1], right[-1:] * 1.5])


class WrongBackward(torch.autograd.Function):
    """Right forward; the gradient of x forgets the scale."""

    @staticmethod
    def forward(ctx, x, shift, scale):
        ctx.save_for_backward(x)
        return dit.modulate(x, shift, scale)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        of_shift = g.sum(1)
        of_scale = (g * x).sum(1)
        return g, of_shift, of_scale


def broken_compiler(x, shift, scale):
    raise RuntimeError("no working compiler found")


def step(net):
    torch.manual_seed(3)
    loss, _ = net(*batch())
    loss.backward()
    gradients = [p.grad for p in net.parameters()]
    return [loss.detach(), *gradients]


@pytest.mark.parametrize(
    "kernel, words",
    [
        (sample_0_for_all, "its output is off by .*5 samples"),
        (last_wrong, "its output is off by"),
        (WrongBackward.apply, "its gradient of input 0 is off by"),
        (lambda *inputs: dit.modulate(*inputs) * float("nan"), "its output is off by inf"),
        (lambda *inputs: dit.modulate(*inputs).half(), "its output is torch.float16"),
        (broken_compiler, "RuntimeError: no working compiler found"),
    ],
)
def test_a_fused_path_that_lies_is_refused_once_and_the_step_is_unaffected(
    monkeypatch, kernel, words
):
    want = step(awake(fused=()))

    monkeypatch.setitem(dit.FUSED, "modulate", lambda: kernel)
    with pytest.warns(UserWarning, match="fused modulate is turned off.*" + words) as said:
        got = step(awake(fused=("sdpa", "modulate")))

    assert len(said) == 1  # one for five places, and none for sdpa
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "device, fused",
    [("cpu", ["sdpa"]), pytest.param("cuda", ["sdpa", "modulate"], marks=needs_cuda)],
)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.filterwarnings("error::UserWarning")
def test_good_fused_paths_are_accepted_without_a_warning(precision, device, fused):
    policy = policy_for(precision, device)
    net = policy.prepare(awake(fused=fused).to(device))
    images, labels = batch(2)

    state = torch.get_rng_state()
    with policy.autocast(), torch.no_grad():
        net.show(images.to(device), labels.to(device))

    chosen = net.blocks[0].fused.chosen
    assert {key[0] for key in chosen} == set(fused)
    assert dit.attention not in chosen.values()
    assert torch.equal(torch.get_rng_state(), state)  # the check has a generator of its own
