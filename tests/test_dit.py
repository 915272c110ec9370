"""DiT: sampling against closed forms, what half precision may not touch, and fused paths that lie."""

import math
import warnings
from itertools import pairwise

import pytest
import torch

import amp_policy
from data import synthetic
from models import dit
from models.dit import TIMESTEPS, DiT

PRECISIONS = ["fp32", "bf16", "fp16", "O2", "O3"]


def build(seed=0, random=False, **options):
    """A net of preset dit-test; random: every parameter redrawn, since adaLN-Zero's start hides all the rest."""
    torch.manual_seed(seed)
    preset = {**dit.PRESETS["dit-test"], "patch_size": 4}
    del preset["grid"]
    net = DiT(num_classes=7, **{**preset, **options})
    for p in net.parameters() if random else ():
        torch.nn.init.normal_(p, std=0.1)
    return net


def batch(n=6):
    g = torch.Generator().manual_seed(5)
    return torch.randn(n, 3, 32, 32, generator=g), torch.arange(n) % 7


def levels(t):
    """signal^2 = alpha_bar at integer t in Python's float64: the cosine schedule as arXiv 2102.09672 prints it."""
    return math.cos((t / TIMESTEPS + 0.008) / 1.008 * math.pi / 2) ** 2


# --- sampling ---


@pytest.mark.parametrize("steps", [1, 2, 25])
def test_ddim_with_a_perfect_oracle_returns_the_image(steps):
    net = build()
    want = batch()[0].clamp(-2.5, 2.5)

    def oracle(x, t, labels, guidance):
        a = torch.tensor([levels(i) for i in t.tolist()], dtype=torch.float64).view(-1, 1, 1, 1)
        return ((x.double() - a.sqrt() * want) / (1 - a).sqrt()).float()

    net.guided = oracle
    # From t = 999 alone: fp32's rounding of x, near 1e-7, is divided by a signal of 0.0016.
    torch.testing.assert_close(net.sample(torch.zeros(6, dtype=torch.long), steps=steps), want, rtol=0, atol=1e-3)


def test_with_eta_1_every_step_is_ddpm_s_posterior():
    """Mean and variance of q(x_s | x_t, x_0) as arXiv 2006.11239, eq. 7, writes them, in float64."""
    net, seen = build(), []
    want = batch()[0].clamp(-2.5, 2.5)

    def oracle(x, t, labels, guidance):
        seen.append((t[0].item(), x.double()))
        a = levels(t[0].item())
        return ((x.double() - math.sqrt(a) * want) / math.sqrt(1 - a)).float()

    net.guided = oracle
    net.sample(torch.zeros(6, dtype=torch.long), steps=TIMESTEPS, eta=1.0)
    assert [t for t, _ in seen] == list(range(TIMESTEPS))[::-1]
    for (t, x), (s, after) in list(pairwise(seen))[200::150]:
        abar_t, abar_s = levels(t), levels(s)
        alpha = abar_t / abar_s
        beta = 1 - alpha
        mean = math.sqrt(abar_s) * beta / (1 - abar_t) * want + math.sqrt(alpha) * (1 - abar_s) / (1 - abar_t) * x
        drawn = (after - mean) / math.sqrt((1 - abar_s) / (1 - abar_t) * beta)  # N(0, 1) if both are right
        assert abs(drawn.mean()) < 0.03 and abs(drawn.std() - 1) < 0.03, t


def test_guidance_1_is_the_conditional_prediction_0_the_unconditional_and_2_as_far_beyond():
    net, (x, labels) = build(random=True), batch()
    t, none = torch.full((6,), 300), torch.zeros(6, dtype=torch.bool)
    with torch.no_grad():
        with_label, without = net.predict(x, t, labels, none), net.predict(x, t, labels, ~none)
        assert (with_label - without).abs().max() > 0.01
        torch.testing.assert_close(net.guided(x, t, labels, 1.0), with_label)
        torch.testing.assert_close(net.guided(x, t, labels, 0.0), without)
        torch.testing.assert_close(net.guided(x, t, labels, 2.0), 2 * with_label - without)


def test_show_draws_the_labels_the_same_way_each_time_and_stays_in_the_range_of_the_data():
    net, (images, labels) = build(random=True), batch()
    net.init_from_data(images.clamp(-1.5, 1))
    state = torch.get_rng_state()
    first, again, others = net.show(images, labels), net.show(images * 0, labels), net.show(images, (labels + 1) % 7)
    assert torch.equal(torch.get_rng_state(), state)
    assert first.shape == images.shape and first.dtype == torch.float32
    assert torch.equal(first, again) and not torch.equal(first, others)
    assert first.min() == -1.5 and first.max() == 1.0  # a random net runs into both ends, and not through them


# --- the network at its start, the null class, held-out loss ---


def test_zero_init_predicts_exactly_0_and_the_first_loss_is_that_of_predicting_0():
    net, (images, labels) = build(), batch(64)
    t, none = torch.arange(64), torch.zeros(64, dtype=torch.bool)
    assert not net.predict(images, t, labels, none).any()
    assert net(images, labels)[0].item() == pytest.approx(1, abs=0.02)


def test_the_timestep_mlp_begins_with_a_deviation_of_0_02():
    for linear in (build().time.mlp[0], build().time.mlp[2]):
        assert linear.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_a_block_is_the_identity_until_its_gates_open():
    net = build(random=True)
    block, x, condition = net.blocks[0], torch.randn(2, 16, 32), torch.randn(2, 32)
    assert not torch.equal(block(x, condition), x)
    for gate in (2, 5):  # of shift1, scale1, gate1, shift2, scale2, gate2
        rows = slice(gate * 32, gate * 32 + 32)
        torch.nn.init.zeros_(block.adaln.weight[rows])
        torch.nn.init.zeros_(block.adaln.bias[rows])
    assert torch.equal(block(x, condition), x)


@pytest.mark.parametrize("dropout", [0.0, 1.0])
def test_dropped_labels_train_the_null_class_and_nothing_else(dropout):
    net = build(random=True, label_dropout=dropout)
    net(*batch())[0].backward()
    assert bool(net.label.null.weight.grad.any()) == (dropout == 1.0)
    assert bool(net.label.classes.weight.grad.any()) == (dropout == 0.0)


def test_a_tenth_of_the_labels_is_dropped_in_training_and_none_in_evaluation():
    net, dropped = build(image_size=8, patch_size=4), []
    net.label.register_forward_pre_hook(lambda module, args: dropped.append(args[1].float().mean().item()))
    images, labels = torch.zeros(2000, 3, 8, 8), torch.zeros(2000, dtype=torch.long)
    net(images, labels)
    net.eval()(images, labels)
    assert 0.07 < dropped[0] < 0.13 and dropped[1] == 0


@pytest.mark.parametrize("label", [7, 8, -1])
def test_a_label_that_is_no_class_is_an_error_and_not_the_null_class(label):
    with pytest.raises(IndexError):
        build()(batch(1)[0], torch.tensor([label]))


def test_the_held_out_loss_of_an_image_depends_on_the_weights_and_its_place_only():
    net, (images, labels) = build(random=True).eval(), batch()
    state = torch.get_rng_state()
    torch.manual_seed(1)
    first = net(images, labels)[1]["loss"]
    torch.manual_seed(2)
    assert torch.equal(net(images, labels)[1]["loss"], first)
    torch.testing.assert_close(net(images[:4], labels[:4])[1]["loss"], first[:4])  # another batch size
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(net(images, labels)[1]["loss"], first, rtol=0.02, atol=0)
    torch.set_rng_state(state)
    net(images, labels)
    assert torch.equal(torch.get_rng_state(), state)


def test_held_out_timesteps_cover_the_schedule_evenly():
    net, seen = build().eval(), []
    net.time.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    net(*batch(100))
    assert seen[0].dtype == torch.int64
    assert (torch.histc(seen[0].float(), 10, 0, TIMESTEPS) - 10).abs().max() <= 1


# --- precision ---


def prepared(precision, **options):
    policy = amp_policy.choose_policy(precision, amp_policy.capabilities("cpu"))
    return policy.prepare(build(**options)), policy


@pytest.mark.parametrize("precision", PRECISIONS)
def test_loss_and_gradients_are_finite_and_reach_every_parameter(precision):
    net, policy = prepared(precision, random=True, label_dropout=0.5)
    with policy.autocast():
        loss, metrics = net(*batch(12))
    assert loss.dtype == torch.float32 and loss.shape == () and metrics["loss"].shape == (12,)
    assert loss.item() == pytest.approx(metrics["loss"].mean().item())
    (loss * 1024).backward()
    for name, p in net.named_parameters():
        assert torch.isfinite(p.grad).all() and p.grad.any(), name


@pytest.mark.parametrize("precision", PRECISIONS)
def test_timestep_features_and_noise_levels_are_those_of_float64_in_every_precision(precision):
    net, policy = prepared(precision)
    seen = {}
    net.time.mlp.register_forward_pre_hook(lambda module, args: seen.update(features=args[0]))
    net.patch.register_forward_pre_hook(lambda module, args: seen.update(noisy=args[0]), prepend=True)
    net.eval()
    with policy.autocast():
        net(torch.zeros(500, 3, 32, 32), torch.zeros(500, dtype=torch.long))
    t = (torch.arange(500, dtype=torch.float64) + 0.5) * (math.sqrt(5) - 1) / 2 % 1 * TIMESTEPS
    angles = t.floor()[:, None] * 10000.0 ** (-torch.arange(128, dtype=torch.float64) / 128)
    want = torch.cat([angles.cos(), angles.sin()], 1)
    assert seen["features"].dtype == torch.float32
    torch.testing.assert_close(seen["features"].double(), want, rtol=0, atol=1e-4)
    noise = torch.randn(500, 3, 32, 32, generator=torch.Generator().manual_seed(0)).double()
    abar = torch.tensor([levels(i) for i in t.floor().tolist()], dtype=torch.float64)
    sigma = seen["noisy"].double().flatten(1).norm(dim=1) / noise.flatten(1).norm(dim=1)  # of black images: pure noise
    torch.testing.assert_close(sigma, (1 - abar).sqrt(), rtol=1e-5, atol=0)


def test_what_the_essay_says_about_half_precision_is_so():
    t = torch.arange(TIMESTEPS, dtype=torch.float64)
    assert torch.tensor(999.0).bfloat16() == 1000
    assert math.sin(999) == pytest.approx(-0.03, abs=5e-3) and math.sin(1000) == pytest.approx(0.83, abs=5e-3)
    for dtype, least in ((torch.bfloat16, 1.0), (torch.float16, 0.1)):  # the angle in half: noise in the features
        angle = t.to(dtype)[:, None] * (10000.0 ** (-torch.arange(128) / 128)).to(dtype)
        exact = t[:, None] * 10000.0 ** (-torch.arange(128, dtype=torch.float64) / 128)
        assert (angle.double().sin() - exact.sin()).abs().max() > least
    abar = torch.tensor([levels(i) for i in range(TIMESTEPS)], dtype=torch.float64)
    silent = (1 - abar.bfloat16().float()) == 0
    assert silent.sum() == 21 and silent[:21].all() and (1 - abar[20]).sqrt().item() == pytest.approx(0.044, abs=5e-4)
    one = torch.tensor(1.0).bfloat16()
    assert one + torch.tensor(2**-8).bfloat16() == one  # a modulate in bf16 ...
    x = torch.ones(1, 1, 4).bfloat16()
    scaled = dit.modulate(x, torch.zeros(1, 4).bfloat16(), torch.full((1, 4), 2.0**-8).bfloat16())
    assert torch.equal(scaled, torch.full((1, 1, 4), 1 + 2.0**-8))  # ... and this one
    loss = torch.tensor(0.1).bfloat16()
    assert loss + 2e-4 == loss and loss + 5e-4 != loss


# --- fused paths ---


def sample_0_for_all(x, shift, scale):
    """Right for one image, wrong for more, as OpenDiT's kernel was."""
    return x.float() * (1 + scale.float()[:1, None]) + shift.float()[:1, None]


class WrongBackward(torch.autograd.Function):
    """Right forward; the gradient of x forgets the scale."""

    @staticmethod
    def forward(ctx, x, shift, scale):
        ctx.save_for_backward(x)
        return dit.modulate(x, shift, scale)

    @staticmethod
    def backward(ctx, g):
        return g, g.sum(1), (g * ctx.saved_tensors[0]).sum(1)


def broken_compiler(x, shift, scale):
    raise RuntimeError("no working compiler found")


def step(net):
    torch.manual_seed(3)
    loss = net(*batch())[0]
    loss.backward()
    return [loss.detach(), *(p.grad for p in net.parameters())]


@pytest.mark.parametrize("kernel, words", [
    (sample_0_for_all, "its output is off by .*5 samples"),
    (WrongBackward.apply, "its gradient of input 0 is off by"),
    (lambda *inputs: dit.modulate(*inputs) * float("nan"), "its output is off by inf"),
    (lambda *inputs: dit.modulate(*inputs).half(), "its output is torch.float16"),
    (broken_compiler, "RuntimeError: no working compiler found"),
])  # fmt: skip
def test_a_fused_modulate_that_lies_is_refused_with_a_warning_and_the_step_is_unaffected(monkeypatch, kernel, words):
    want = step(build(random=True, fused=()))
    monkeypatch.setitem(dit.FUSED, "modulate", lambda: kernel)
    net = build(random=True, fused=("sdpa", "modulate"))
    with pytest.warns(UserWarning, match="fused modulate is turned off.*" + words) as said:
        got = step(net)
    assert len(said) == 1  # one for five places, and none for sdpa
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_fused_path_that_cannot_be_built_is_refused_too(monkeypatch):
    monkeypatch.setitem(dit.FUSED, "modulate", broken_compiler)  # called without arguments: a TypeError
    with pytest.warns(UserWarning, match="fused modulate is turned off.*it raised TypeError"):
        step(build(fused=("modulate",)))


def test_one_sample_would_have_let_the_kernel_pass():
    one, five = ([torch.randn(n, 16, 32), torch.randn(n, 32), torch.randn(n, 32)] for n in (1, 5))
    assert max(dit.worst_errors(dit.modulate, sample_0_for_all, one).values()) < 1e-6
    assert dit.worst_errors(dit.modulate, sample_0_for_all, five)["output"] > 0.5
    backward = dit.worst_errors(dit.modulate, WrongBackward.apply, five)
    assert backward["output"] == 0 and backward["gradient of input 0"] > 0.1


def test_one_wrong_sample_among_many_is_not_averaged_away():
    def last_wrong(x):
        return torch.cat([x[:-1] * 2, x[-1:] * 3])

    assert dit.worst_errors(lambda x: x * 2, last_wrong, [torch.randn(1000, 8)])["output"] == pytest.approx(0.5)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_sdpa_is_accepted_without_a_word_and_the_check_leaves_the_random_state_alone(precision):
    net, policy = prepared(precision, random=True)
    q = torch.randn(2, 2, 16, 16, dtype=policy.dtype)
    state = torch.get_rng_state()
    with warnings.catch_warnings(), policy.autocast(), torch.no_grad():
        warnings.simplefilter("error")
        net.blocks[0].fused("sdpa", q, q, q)
        net.show(*batch(2))
    assert set(net.blocks[0].fused.chosen.values()) == {torch.nn.functional.scaled_dot_product_attention}
    assert torch.equal(torch.get_rng_state(), state)


def test_plain_attention_survives_logits_beyond_fp16():
    q = torch.full((1, 1, 2, 64), 40.0).half()  # q k^T = 102400 before the division by 8
    v = torch.randn(1, 1, 2, 64).half()
    assert not torch.isfinite(q @ q.transpose(-2, -1)).all()
    torch.testing.assert_close(dit.attention(q, q, v), v.mean(2, keepdim=True).expand_as(v), rtol=2e-3, atol=2e-3)


def test_an_unknown_fused_path_is_refused():
    with pytest.raises(ValueError, match="flash"):
        build(fused=("flash",))


# --- learning, compiling, saving ---


def test_it_learns_forty_images():
    torch.manual_seed(0)
    images, labels = synthetic.draw(0, 40, seed=0)
    images = images.float() / 64 - 2
    net = DiT(num_classes=10, patch_size=4, dim=32, depth=2, heads=2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3, weight_decay=0.0)
    before = net.eval()(images, labels)[0].item()
    net.train()
    for _ in range(150):
        loss, _ = net(images, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert before == pytest.approx(1, abs=0.02)
    assert net.eval()(images, labels)[0].item() < 0.4


@pytest.mark.parametrize("dim, wide", [(32, True), (48, False)])
def test_a_patch_of_48_numbers_passes_by_a_stream_of_32_and_not_of_48(dim, wide):
    net, x = build(dim=dim), torch.randn(2, 64, 48)
    torch.nn.init.ones_(net.final.adaln.bias)
    out = net.final(torch.zeros(2, 64, dim), torch.zeros(2, dim), x)
    assert torch.equal(out, x if wide else torch.zeros_like(x))  # final.linear is still 0


def test_training_compiles_to_one_graph_with_the_checked_attention_inside():
    net = build(random=True)
    eager = step(net)
    net.zero_grad()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = step(torch.compile(net, backend=backend, fullgraph=True))
    assert len(graphs) == 1 and "scaled_dot_product_attention" in graphs[0].code
    for a, b in zip(compiled, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_saved_net_draws_the_same_images():
    net, (images, labels) = build(random=True), batch(2)
    net.init_from_data(images)
    other = build(seed=9)
    other.load_state_dict(net.state_dict())
    assert torch.equal(other.show(images, labels), net.show(images, labels))


@pytest.mark.parametrize("options", [dict(patch_size=5), dict(heads=3), dict(dim=30)])
def test_sizes_that_do_not_divide_are_refused(options):
    with pytest.raises(ValueError, match="not a multiple"):
        build(**options)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA's SDPA and Triton's modulate are other kernels")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_on_cuda_both_fused_paths_are_accepted_in_every_precision(precision):
    policy = amp_policy.choose_policy(precision, amp_policy.capabilities("cuda"))
    net = policy.prepare(build(random=True, fused=("sdpa", "modulate")).cuda())
    images, labels = (t.cuda() for t in batch())
    with warnings.catch_warnings(), policy.autocast():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "The .grad attribute")  # torch.compile's own, in torch 2.11
        loss, _ = net(images, labels)
    (loss * 1024).backward()
    assert all(torch.isfinite(p.grad).all() for p in net.parameters())
    assert {key[0] for key in net.blocks[0].fused.chosen} == {"sdpa", "modulate"}
    assert dit.attention not in net.blocks[0].fused.chosen.values()
