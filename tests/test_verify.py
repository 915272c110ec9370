"""verify.py: hardware that lies with finite numbers is caught and named; memory that ends on one rank costs no step."""

import json
import os
import random
import socket
import subprocess
import sys

import pytest
import torch
from test_train import DRIVER, ROOT

from rescue import inject, verify


def ranks(count, folder, images, *flags, code=0):
    """The summary, the metrics lines and each rank's weights. Without torchrun, which takes four seconds to start."""
    driver = folder / "driver.py"
    driver.write_text(DRIVER.format(root=str(ROOT)))
    command = [sys.executable, str(driver), str(folder), "--model", "mlp", "--dataset", "cifar10", "--data-dir",
               str(images), "--device", "cpu", "--batch-size", "48", "--precision", "fp32", "--adam-eps", "1e-2",
               "--log-every", "1", "--max-steps", "12", "--out-dir", str(folder / "run"), *map(str, flags)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meet = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **meet}
    processes = [subprocess.Popen(command, env={**environment, "RANK": str(r), "LOCAL_RANK": str(r)}, cwd=folder,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for r in range(count)]
    try:
        printed = [process.communicate(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [code] * count, printed[0][1][-3000:]
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    weights = [torch.load(folder / f"rank{r}.pt", weights_only=True) for r in range(count)]
    return json.loads(printed[0][0].strip().splitlines()[-1]), lines, weights


def events(lines, kind):
    return [line for line in lines if line.get("event") == kind]


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


# ---------------------------------------------------------------------------------------------------------------------
# The checksum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_single_flipped_bit_changes_the_checksum(dtype):
    clean = torch.randn(7, 3).to(dtype)
    before = verify.checksums([clean])
    bits = verify.BITS[clean.itemsize]
    for bit in range(8 * clean.itemsize):
        struck = clean.clone()
        struck[3, 1].view(bits).bitwise_xor_(torch.tensor(1, dtype=bits) << bit)
        assert verify.checksums([struck]) != before, bit
    assert verify.checksums([clean.clone()]) == before
    assert 0 <= int(before) < verify.PRIME == int(torch.tensor(verify.PRIME).float()), "exact in fp32"


def test_a_hundred_flips_in_random_places_are_a_hundred_times_seen():
    random.seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.BatchNorm1d(20), torch.nn.Linear(20, 5))
    before = verify.checksums(net.parameters())
    for _ in range(100):
        p = random.choice(list(net.parameters())).data.view(-1)
        i, bit = random.randrange(len(p)), random.randrange(31)
        flip = torch.tensor(1 << bit, dtype=torch.int32)
        p[i].view(torch.int32).bitwise_xor_(flip)
        assert (verify.checksums(net.parameters()) != before).sum() == 1
        p[i].view(torch.int32).bitwise_xor_(flip)
    assert torch.equal(verify.checksums(net.parameters()), before)


# ---------------------------------------------------------------------------------------------------------------------
# One rank


def test_verification_changes_no_number_of_a_run(run):
    flags = ("--max-steps", 20, "--precision", "bf16")
    run(*flags, "--verify-every", 0, out="alone")
    assert not events(run(*flags, "--verify-every", 2)[3], "cure")
    state = [torch.load(run.folder.parent / out / "last.pt", weights_only=True)["model"] for out in ("run", "alone")]
    assert same(*state)


@pytest.mark.parametrize("where", ["act:groups.1", "grad:head.weight"])
def test_a_pass_that_gives_two_gradients_is_named_and_the_run_goes_on(run, where):
    code, last, _, lines = run("--inject", f"flip:{where}@step=8", "--verify-every", 4)
    cures = events(lines, "cure")
    assert (code, last["updates"], last["skipped"]) == (0, 12, 0)
    assert [(c["verdict"], c["of_step"], c["rank"]) for c in cures] == [("not reproducible", 8, 0)]


def test_the_fifth_time_the_run_ends_with_exit_code_5(run):
    code, last, _, lines = run("--inject", "flip:grad:head.weight@step=1..40", "--verify-every", 1, "--max-steps", 40)
    assert (code, last["status"]) == (5, "suspected hardware")
    assert len(events(lines, "cure")) == 5 and last["steps"] <= 8


def test_hardware_that_fails_on_one_rank_of_two_ends_both_with_exit_code_5(tmp_path, image_folder):
    last, lines, _ = ranks(2, tmp_path, image_folder, "--inject", "flip:grad:1.weight@step=1..12,rank=1",
                           "--verify-every", 1, code=5)
    assert last["status"] == "suspected hardware" and last["steps"] < 12
    assert {(c["verdict"], c["rank"]) for c in events(lines, "cure")} == {("not reproducible", 1)}


def test_a_device_that_is_not_deterministic_is_compared_within_rounding():
    a = [torch.randn(50, generator=torch.Generator().manual_seed(0))]
    near, far = [a[0] * (1 + 1e-4)], [a[0] * 1.1]
    assert verify.within_rounding(a, near) and not verify.within_rounding(a, far)


# ---------------------------------------------------------------------------------------------------------------------
# Several ranks


def test_of_three_ranks_the_one_that_differs_is_named_and_repaired(tmp_path, image_folder):
    last, lines, weights = ranks(3, tmp_path, image_folder, "--inject", "flip:optstate:exp_avg@step=5,rank=2",
                                 "--verify-every", 6)
    cure, = events(lines, "cure")
    assert (cure["verdict"], cure["of_step"], cure["rank"]) == ("not reproducible", 6, 2)
    assert cure["action"] == "repaired from rank 0"
    assert (last["updates"], last["skipped"]) == (12, 0)
    assert same(weights[0], weights[1]) and same(weights[0], weights[2])


def test_of_two_ranks_the_one_with_a_flipped_weight_is_suspected_and_all_go_back(tmp_path, image_folder):
    last, lines, weights = ranks(2, tmp_path, image_folder, "--inject", "flip:param:1.weight@step=9,rank=1",
                                 "--verify-every", 4, "--ckpt-every", 4)
    cure, = events(lines, "cure")
    assert (cure["verdict"], cure["of_step"], cure["rank"]) == ("not reproducible", 12, 1)
    assert "back to the weights of step 8" in cure["action"] and last["status"] == "done"
    assert same(*weights)


def test_without_verification_the_flip_stays(tmp_path, image_folder):
    _, lines, weights = ranks(2, tmp_path, image_folder, "--inject", "flip:param:1.weight@step=9,rank=1",
                              "--verify-every", 0)
    assert not events(lines, "cure") and not same(*weights)


# ---------------------------------------------------------------------------------------------------------------------
# Memory


@pytest.mark.parametrize("spec", ["oom:act:1@step=5,rank=1", "oom:grad:1.weight@step=5,rank=1",
                                  "oom:grad:3.bias@step=1", "oom:grad:1.weight@step=12,rank=0"])
def test_memory_that_ends_on_one_rank_or_both_costs_no_step_and_the_update_stays(tmp_path, image_folder, spec,
                                                                                 tmp_path_factory):
    last, lines, weights = ranks(2, tmp_path, image_folder, "--inject", spec)
    assert (last["status"], last["updates"]) == ("done", 12)
    step = int(spec.partition("step=")[2].split(",")[0])
    told = [line["text"] for line in events(lines, "warning")]
    assert told and told[0].startswith(f"out of memory at step {step}: from now on 2 micro-batches")
    assert same(*weights)
    if "act" in spec:  # the steps come in the same order, so the end is the same within rounding
        clean = ranks(2, tmp_path_factory.mktemp("clean"), image_folder)[2][0]
        for name, tensor in clean.items():
            torch.testing.assert_close(weights[0][name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("spec", ["oom:act:1@step=1", "oom:grad:1.weight@step=7"])
def test_memory_that_ends_alone_halves_the_micro_batch_and_the_update_stays(run, mlp, spec):
    flags = ("--model", "mlp", "--adam-eps", 1e-2)
    clean = run(*flags, out="clean")
    code, last, _, lines = run(*flags, "--inject", spec)
    assert (code, last["updates"], last["skipped"]) == (0, 12, 0)
    assert sum("from now on 2 micro-batches" in line["text"] for line in events(lines, "warning")) == 1
    for (name, tensor), other in zip(mlp[0].state_dict().items(), mlp[1].state_dict().values(), strict=True):
        torch.testing.assert_close(other, tensor, rtol=1e-4, atol=1e-6, msg=name)
    assert last["val_loss"] == pytest.approx(clean[1]["val_loss"], rel=1e-3)
    assert torch.load(run.folder / "last.pt", weights_only=True)["healer"]["accum"] == 2


def test_memory_that_never_suffices_ends_with_the_flags_to_try(run, monkeypatch):
    monkeypatch.setattr(inject.Injector, "_measure", lambda self, net, args: vars(self).update(_size=len(args[0])))
    code, last, err, _ = run("--inject", "oom:act@step=3")
    assert (code, last["status"]) == (1, "failed") and "planted" in err and "--accum-steps" in err


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_memory_that_really_ends_on_cuda_is_survived(run, mlp):
    """Another tenant of the GPU leaves room for half a batch and no more."""
    free, _ = torch.cuda.mem_get_info()
    tenant = torch.empty(max(0, free - (600 << 20)), dtype=torch.uint8, device="cuda")
    try:
        code, last, _, lines = run("--model", "resnet18", "--device", "cuda", "--batch-size", 400, "--image-size", 32,
                                   "--max-steps", 4)
    finally:
        del tenant
        torch.cuda.empty_cache()
    assert code == 0 and last["updates"] == 4
    assert any("out of memory" in line["text"] for line in events(lines, "warning"))
