"""Hardware that lies is caught and named; memory that ends on one rank costs no step."""

import pytest
import torch
from helpers import events, last_state, needs_cuda, same, two_ranks

import train
from rescue import inject, verify

# --- The checksum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_single_flipped_bit_changes_the_checksum(dtype):
    clean = torch.randn(7, 3).to(dtype)
    before = verify.checksums([clean])
    for bit in range(8 * clean.itemsize):
        struck = clean.clone()
        struck.view(torch.uint8)[3, clean.itemsize + bit // 8] ^= 1 << bit % 8
        assert verify.checksums([struck]) != before, bit
    assert verify.checksums([clean.clone()]) == before
    assert 0 <= int(before) < verify.PRIME == int(torch.tensor(verify.PRIME).float()), "exact"


# --- One rank


def test_verification_changes_no_number_of_a_run(run):
    flags = ("--max-steps", 20, "--precision", "bf16")
    run(*flags, "--verify-every", 0, out="alone")
    assert not events(run(*flags, "--verify-every", 2)[3], "cure")
    assert same(last_state(run)["model"], last_state(run, "alone")["model"])


def test_the_fifth_time_on_one_rank_of_two_both_end_with_exit_code_5(tmp_path, image_folder):
    spec = "flip:grad:1.weight@step=1..12,rank=1"
    last, lines, _ = two_ranks(
        tmp_path, image_folder, "--inject", spec, "--verify-every", 1, code=5
    )
    assert last["status"] == "suspected hardware" and last["steps"] <= 8
    cures = [(c["verdict"], c["rank"]) for c in events(lines, "cure")]
    assert cures == [("not reproducible", 1)] * 5


def test_a_parameter_in_no_optimizer_is_no_suspicion_of_the_hardware(run, model):
    def make(classes):
        net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, classes))
        net[1].bias.register_hook(lambda g: g + 1)  # it is never 0
        return net

    nets = model("forgetful", make)
    setup = train.prepare.setup

    def forget(run, step):
        setup(run, step)
        for optimizer in run.optimizers:
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if p is not nets[-1][1].bias]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.prepare, "setup", forget)
        flags = ("--max-steps", 24, "--lr", 1e-3, "--verify-every", 2)
        code, last, _, lines = run("--model", "forgetful", *flags)
    assert (code, events(lines, "cure")) == (0, [])
    assert any("1.bias was in no optimizer" in text for text in last["warnings"])


def test_a_device_that_is_not_deterministic_is_compared_within_rounding():
    a = [torch.randn(50, generator=torch.Generator().manual_seed(0))]
    assert verify.within_rounding(a, [a[0] * (1 + 1e-4)])
    assert not verify.within_rounding(a, [a[0] * 1.1])


# --- Several ranks


def test_of_three_ranks_the_one_that_differs_is_named_and_repaired(tmp_path, image_folder):
    spec = "flip:optstate:exp_avg@step=5,rank=0"  # the first is not always right
    last, lines, weights = two_ranks(
        tmp_path, image_folder, "--inject", spec, "--verify-every", 6, count=3
    )
    (cure,) = events(lines, "cure")
    assert (cure["verdict"], cure["of_step"], cure["rank"]) == ("not reproducible", 5, 0)
    assert cure["action"] == "repaired from rank 1"
    assert (last["updates"], last["skipped"]) == (12, 0)
    assert same(weights[0], weights[1]) and same(weights[0], weights[2])


def test_of_two_ranks_the_one_with_a_flipped_weight_is_suspected_and_all_go_back(
    tmp_path, image_folder
):
    flags = ("--inject", "flip:param:1.weight@step=9,rank=1", "--ckpt-every", 4)
    last, lines, weights = two_ranks(tmp_path, image_folder, *flags, "--verify-every", 4)
    (cure,) = events(lines, "cure")
    assert (cure["verdict"], cure["of_step"], cure["rank"]) == ("not reproducible", 9, 1)
    assert "back to the weights of step 8" in cure["action"] and last["status"] == "done"
    assert same(*weights)


# --- Memory


SPECS = ["oom:act:1@step=5,rank=1", "oom:grad:1.weight@step=5", "oom:grad:3.weight@step=1,rank=1"]


@pytest.mark.parametrize("spec", SPECS)
def test_memory_that_ends_on_one_rank_or_both_costs_no_step_and_the_update_stays(
    tmp_path, image_folder, spec
):
    last, lines, weights = two_ranks(tmp_path, image_folder, "--inject", spec)
    assert (last["status"], last["updates"]) == ("done", 12)
    step = int(spec.partition("step=")[2].split(",")[0])
    warning = events(lines, "warning")[0]["text"]
    assert warning.startswith(f"out of memory at step {step}: from now on 2 micro-batches")
    logged = [line["step"] for line in lines if "grad_norm" in line]  # a retaken step is its own
    assert logged.count(step) == (1 if "act" in spec else 2) and set(logged) == set(range(1, 13))
    assert same(*weights)
    if "act" in spec:  # the steps come in the same order: the same end, within rounding
        clean = two_ranks(tmp_path / "clean", image_folder)[2][0]
        for name, tensor in clean.items():
            torch.testing.assert_close(weights[0][name], tensor, rtol=1e-4, atol=1e-6)


def test_memory_that_never_suffices_ends_with_the_flags_to_try(run, monkeypatch):
    def measure(self, net, args):
        self._size = len(args[0])  # and no room at all

    monkeypatch.setattr(inject.Injector, "_measure", measure)
    code, last, err, _ = run("--inject", "oom:act@step=3")
    assert (code, last["status"]) == (1, "failed") and "planted" in err and "--accum-steps" in err
    assert list(run.folder.glob("last*.pt"))


def test_an_evaluation_that_does_not_fit_is_done_in_halves(run, mlp, monkeypatch):
    plain = run("--model", "mlp", out="plain")[1]
    forward = torch.nn.Flatten.forward

    def small(self, x):
        if len(x) > 40:
            raise torch.OutOfMemoryError("planted")
        return forward(self, x)

    monkeypatch.setattr(torch.nn.Flatten, "forward", small)
    code, last, _, _ = run("--model", "mlp")
    assert code == 0 and last["val_acc1"] == plain["val_acc1"]
    assert last["val_loss"] == pytest.approx(plain["val_loss"], rel=1e-4)


@needs_cuda
def test_memory_that_really_ends_on_cuda_is_survived(run):
    """Another tenant of the GPU leaves room for half a batch and no more."""
    free, _ = torch.cuda.mem_get_info()
    tenant = torch.empty(max(0, free - (600 << 20)), dtype=torch.uint8, device="cuda")
    try:
        code, last, _, lines = run(
            "--model",
            "resnet18",
            "--device",
            "cuda",
            "--batch-size",
            400,
            "--image-size",
            32,
            "--max-steps",
            4,
        )
    finally:
        del tenant
        torch.cuda.empty_cache()
    assert code == 0 and last["updates"] == 4
    assert any("out of memory" in line["text"] for line in events(lines, "warning"))
