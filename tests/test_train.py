"""train.py from outside: what it does, in which order, and how it says no."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import amp_policy
import flags
import guards
import optim
import report
import train
from data import batches
from extras import ema
from models import RECIPE

ROOT = Path(train.__file__).parent


def parse(argv):
    return flags.parse(argv, "", train.MODELS, train.NAMES)


def weights(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def steps_of(lines):
    return [{k: v for k, v in line.items() if k != "images_per_second"} for line in lines if "step" in line]


# ---------------------------------------------------------------------------------------------------------------------
# The step


def test_the_calls_of_a_step_come_in_the_order_of_the_design(run, monkeypatch):
    calls = []

    def spy(owner, name):
        original = getattr(owner, name)

        def wrapper(self, *args, **kwargs):
            calls.append(f"{owner.__name__}.{name}")
            return original(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, wrapper)

    for owner, names in ((guards.Guard, ("open", "see_batch", "see_loss", "decide", "close", "verdict")),
                         (amp_policy.LossScaler, ("scale", "update")), (optim.ClippedAdamW, ("step", "zero_grad")),
                         (ema.EMA, ("update",))):
        for name in names:
            spy(owner, name)
    assert run("--max-steps", 1, "--accum-steps", 2, "--ema", 0.9)[0] == 0
    micro = ["Guard.see_batch", "Guard.see_loss", "LossScaler.scale"]
    assert calls == ["Guard.open", *micro, *micro, "Guard.decide", "ClippedAdamW.step", "Guard.close",
                     "LossScaler.update", "EMA.update", "ClippedAdamW.zero_grad", "Guard.verdict"]


def test_the_norm_is_measured_after_unscaling_so_fp16_logs_the_same_norm_as_fp32(run):
    norms = [[line["grad_norm"] for line in run("--precision", p, "--max-steps", 3, out=p)[3] if "grad_norm" in line]
             for p in ("fp32", "fp16")]
    assert norms[1] == pytest.approx(norms[0], rel=0.05)  # clipping before unscaling would log 65536 times as much


@pytest.mark.parametrize("uneven", [False, True])
def test_accumulation_gives_the_update_of_the_big_batch(run, mlp, monkeypatch, uneven):
    if uneven:  # 40 images arrive as 35: three micro-batches of 12, 12 and 11
        whole = batches.TrainBatches.at
        monkeypatch.setattr(batches.TrainBatches, "at", lambda self, step: tuple(t[:35] for t in whole(self, step)))
    for accum in (1, 3):
        flags = ("--model", "mlp", "--batch-size", 42, "--accum-steps", accum, "--max-steps", 5, "--adam-eps", 1e-2)
        assert run(*flags, out=str(accum))[0] == 0  # a large eps: rounding near g = 0 stays rounding, not +lr or -lr
    torch.testing.assert_close(weights(mlp[1]), weights(mlp[0]), rtol=1e-4, atol=1e-6)


def test_the_same_seed_gives_the_same_losses_twice_and_another_seed_does_not(run):
    once, twice, other = (steps_of(run("--seed", seed, "--precision", "bf16", out=f"{i}")[3]) for i, seed in
                          enumerate((0, 0, 1)))
    assert once == twice
    assert [line.get("loss") for line in once] != [line.get("loss") for line in other]


def test_no_validation_image_is_compared_in_both_precisions_twice(run, monkeypatch):
    seen, compare = [], train.validation.disagreement
    monkeypatch.setattr(train.validation, "disagreement", lambda model, x, *rest: seen.append(x) or
                        compare(model, x, *rest))  # fmt: skip
    run("--precision", "bf16", "--max-steps", 2)
    assert [len(x) for x in seen] == [100] and len(torch.cat(seen).flatten(1).unique(dim=0)) == 100


def test_evaluation_runs_in_fp32_while_training_runs_in_bf16(run, monkeypatch):
    seen = {True: set(), False: set()}
    same = SimpleNamespace(changed=0.0, nonfinite=0.0, parted=False)
    monkeypatch.setattr(train.validation, "disagreement", lambda *args: same)  # it evaluates in bf16 on purpose
    build, recipe = train.MODELS["cifarnet-tiny"]

    def watched(names, size):
        net = build(names, size)
        for module in net.modules():
            module.register_forward_hook(lambda module, args, out: seen[module.training].add(out.dtype))
        return net

    monkeypatch.setitem(train.MODELS, "cifarnet-tiny", (watched, recipe))
    run("--precision", "bf16", "--max-steps", 2)
    assert torch.bfloat16 in seen[True]
    assert seen[False] == {torch.float32}
    run("--precision", "bf16", "--max-steps", 2, "--eval-precision", "same", out="same")
    assert torch.bfloat16 in seen[False]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "O2"])
def test_a_bad_step_is_skipped_counted_and_leaves_no_trace(run, monkeypatch, precision):
    healthy = batches.TrainBatches.at

    def poisoned(self, step):
        images, labels = healthy(self, step)
        return (images * torch.inf if step == 4 else images), labels

    monkeypatch.setattr(batches.TrainBatches, "at", poisoned)
    code, last, _, lines = run("--precision", precision)
    assert (code, last["status"], last["steps"], last["updates"], last["skipped"]) == (0, "done", 12, 11, 1)
    skip = next(line for line in lines if line.get("event") == "skip")
    assert skip["step"] == 5 and "input" in skip["reasons"]
    state = torch.load(run.folder / "last.pt", weights_only=True)
    assert all(torch.isfinite(t).all() for _, t in guards.named_tensors(state))
    by_step = {line["step"]: line for line in lines if "grad_norm" in line and "event" not in line}
    assert by_step[5]["lr"] == by_step[6]["lr"]  # the schedule counts updates, not steps


def test_steps_that_stay_bad_end_with_exit_code_3_and_keep_the_weights(run, monkeypatch):
    healthy = batches.TrainBatches.at

    def poisoned(self, step):
        images, labels = healthy(self, step)
        return (images * torch.nan if step >= 6 else images), labels

    monkeypatch.setattr(batches.TrainBatches, "at", poisoned)
    code, last, _, _ = run("--max-skips", 3, "--ckpt-every", 5)
    assert (code, last["status"], last["updates"]) == (3, "diverged", 6)
    assert last["skipped"] >= 3
    assert torch.load(run.folder / "last.pt", weights_only=True)["step"] == 5
    assert run("--on-nonfinite", "stop", out="stop")[1]["updates"] == 6


# ---------------------------------------------------------------------------------------------------------------------
# What fails says so: the traceback of a bug on standard error, the summary on standard output


class Buggy(torch.nn.Module):
    """A bug of somebody who forks: in the constructor, or in the forward of the fourth training step."""

    def __init__(self, classes, where):
        super().__init__()
        self.head, self.where, self.calls = torch.nn.Linear(3072, classes), where, 0
        if where == "build":
            _a, _b = (1, 2, 3)

    def forward(self, images):
        self.calls += self.training
        if self.where == "forward" and self.calls == 2 + 4:  # two calls time the step
            _a, _b = (1, 2, 3)
        return self.head(images.flatten(1))


@pytest.mark.parametrize("where", ["build", "forward"])
def test_a_bug_in_a_model_is_a_whole_traceback_and_the_last_line_is_still_the_summary(run, monkeypatch, where):
    monkeypatch.setitem(train.MODELS, "buggy", (lambda names, size: Buggy(len(names), where), RECIPE))
    code, last, error, _ = run("--model", "buggy")
    assert (code, last["status"], last["model"]) == (1, "failed", "buggy")
    assert last["updates"] == (2 if where == "forward" else 0)  # the host knew of step 2 when step 4 failed
    assert "Traceback" in error and "_a, _b = (1, 2, 3)" in error and "too many values to unpack" in error
    assert run("--model", "buggy", "--max-steps", 2, out="short")[0] == (0 if where == "forward" else 1)


def test_a_bug_in_the_loop_is_a_whole_traceback(run, monkeypatch):
    monkeypatch.setattr(train, "digest", lambda run, verdict: 1 / 0)
    code, last, error, _ = run()
    assert (code, last["status"]) == (1, "failed") and "ZeroDivisionError" in error and "Traceback" in error


def test_a_full_disk_ends_with_a_sentence_and_the_summary(run, monkeypatch):
    whole, written = report.MetricsFile.write, []

    def full(self, **fields):
        written.append(fields)
        if len(written) > 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        whole(self, **fields)

    monkeypatch.setattr(report.MetricsFile, "write", full)
    code, last, error, _ = run()
    assert (code, last["status"]) == (1, "failed")
    assert "No space left on device" in error and "metrics.jsonl" in error and "Traceback" not in error


def test_anomaly_mode_that_finds_a_nan_ends_with_its_traceback_and_the_summary(run):
    code, last, error, _ = run("--detect-anomaly", "--inject", "nan:act:groups.1@step=3")
    assert (code, last["status"]) == (1, "failed")
    assert "returned nan values" in error and "Traceback" in error


def test_a_run_that_died_before_its_first_checkpoint_does_not_block_its_folder(run, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(train, "save", lambda run: 1 / 0)
        assert run("--max-steps", 2)[0] == 1
    assert (run.folder / "metrics.jsonl").exists() and not list(run.folder.glob("*.pt"))
    assert run("--max-steps", 2)[0] == 0


# ---------------------------------------------------------------------------------------------------------------------
# Stop and go on


@pytest.mark.parametrize("flags", [("--precision", "fp16", "--accum-steps", 2, "--ema", 0.9), ("--precision", "bf16")])
def test_a_stopped_and_resumed_run_equals_the_run_that_was_never_stopped(run, monkeypatch, flags):
    whole = run(*flags, out="whole")
    healthy = batches.TrainBatches.at

    def interrupted(self, step):
        if step == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return healthy(self, step)

    monkeypatch.setattr(batches.TrainBatches, "at", interrupted)
    code, last, _, _ = run(*flags)
    assert code == 128 + signal.SIGTERM and last["status"] == f"stopped by signal {int(signal.SIGTERM)}"
    assert last["steps"] < 12
    monkeypatch.setattr(batches.TrainBatches, "at", healthy)
    resumed = run(*flags, "--resume", "auto")
    assert (resumed[0], resumed[1]["updates"]) == (0, 12)
    assert steps_of(resumed[3]) == steps_of(whole[3])
    states = [torch.load(run.folder.with_name(name) / "last.pt", weights_only=True) for name in ("whole", "run")]
    for part in ("model", "optimizer", "average"):
        a, b = (dict(guards.named_tensors(state[part] or {})) for state in states)
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a), part


def test_resuming_another_model_is_refused_by_name_and_another_precision_is_not(run):
    run("--max-steps", 4)
    code, _, error, _ = run("--model", "resnet18", "--resume", "auto")
    assert code == 2 and "model: cifarnet-tiny -> resnet18" in error
    code, last, _, _ = run("--precision", "fp16", "--resume", "auto")
    assert (code, last["precision"], last["steps"]) == (0, "fp16", 12)


# ---------------------------------------------------------------------------------------------------------------------
# Two ranks

DRIVER = """
import os, sys
sys.path.insert(0, {root!r})
import torch
import models
import train
from data import batches

nets = []
def build(names, size):
    nets.append(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 32), torch.nn.GELU(),
                                    torch.nn.Linear(32, len(names))))
    return nets[-1]
train.MODELS["mlp"] = build, models.RECIPE | {{"batch_size": 40}}
healthy = batches.TrainBatches.at
def at(self, step):
    images, labels = healthy(self, step)
    bad = os.environ.get("BAD_RANK") == os.environ.get("RANK") and step == 4
    return (images * torch.nan if bad else images), labels
batches.TrainBatches.at = at
code = train.main(sys.argv[2:])
state = {{name: t.clone() for name, t in nets[0].state_dict().items()}} if nets else {{}}
torch.save(state, os.path.join(sys.argv[1], "rank" + os.environ.get("RANK", "0") + ".pt"))
sys.stdout.flush()
os._exit(code)
"""


def two_ranks(tmp_path, image_folder, *flags, **environment):
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER.format(root=str(ROOT)))
    out = tmp_path / "ranks"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(driver),
               str(tmp_path), "--model", "mlp", "--dataset", "cifar10", "--data-dir", str(image_folder),
               "--device", "cpu", "--batch-size", "40", "--precision", "fp32", "--log-every", "1",
               "--out-dir", str(out), *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path,
                          env={**os.environ, "OMP_NUM_THREADS": "1", **environment})
    assert done.returncode == 0, done.stderr[-3000:]
    return done, [torch.load(tmp_path / f"rank{r}.pt", weights_only=True) for r in range(2)]


def test_two_ranks_equal_one_process_on_the_same_global_batch(run, mlp, tmp_path, image_folder):
    flags = ("--max-steps", 8, "--accum-steps", 2, "--adam-eps", 1e-2)
    one = run("--model", "mlp", *flags)
    done, replicas = two_ranks(tmp_path, image_folder, *flags)
    for name, tensor in mlp[0].state_dict().items():
        assert torch.equal(replicas[0][name], replicas[1][name]), f"the replicas differ in {name}"
        torch.testing.assert_close(replicas[0][name], tensor, rtol=1e-4, atol=1e-6)
    summaries = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(summaries) == 1, "rank 0 alone prints"
    two = json.loads(summaries[0])
    assert two["val_acc1"] == one[1]["val_acc1"]  # 100 images over two ranks, each counted once
    assert two["val_loss"] == pytest.approx(one[1]["val_loss"], rel=1e-3)


def test_nan_on_rank_1_is_skipped_on_both_ranks_and_the_replicas_stay_bit_identical(tmp_path, image_folder):
    done, replicas = two_ranks(tmp_path, image_folder, "--max-steps", 8, BAD_RANK="1")
    summary = json.loads(done.stdout.strip().splitlines()[-1])
    assert (summary["steps"], summary["updates"], summary["skipped"]) == (8, 7, 1)
    for name, tensor in replicas[0].items():
        assert torch.isfinite(tensor).all() and torch.equal(tensor, replicas[1][name]), name


# ---------------------------------------------------------------------------------------------------------------------
# Saying no


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--model", "resnet9000"], 2, ["--model resnet9000", "cifarnet"]),
        (["--dataset", "mnist"], 2, ["--dataset mnist", "cifar10"]),
        (["--precision", "fp8"], 2, ["fp8", "bf16"]),
        (["--precision", "bf16", "--disable-amp"], 2, ["--disable-amp", "one of them"]),
        (["--data-dir", "/nowhere/at/all"], 4, ["/nowhere/at/all", "not a folder"]),
        (["--num-classes", "1000"], 2, ["--num-classes 1000", "10 classes"]),
        (["--batch-size", "40", "--accum-steps", "3"], 2, ["--batch-size 40", "multiple of 3"]),
        (["--batch-size", "4000"], 2, ["4000", "400", "--batch-size"]),
        (["--batch-size", "0"], 2, ["--batch-size", "0 is not at least 1"]),
        (["--lr", "-1"], 2, ["--lr", "-1 is not above 0"]),
        (["--lr", "nan"], 2, ["--lr", "nan"]),
        (["--betas", "0.9", "1"], 2, ["--betas", "1 is not below 1"]),
        (["--max-steps", "-5"], 2, ["--max-steps", "at least 1"]),
        (["--epochs", "1", "--max-steps", "5"], 2, ["--max-steps", "not allowed with"]),
        (["--no-such-flag"], 2, ["--no-such-flag", "--help"]),
        (["--device", "tpu"], 2, ["--device tpu", "cuda"]),
        (["--precision", "O3"], 2, ["eps=1e-08 is exactly 0 in torch.float16"]),
        (["--keep-fp32", "nothing.like.it"], 2, ["nothing.like.it"]),
        (["--precision", "O2", "--resume", "/nowhere.pt"], 2, ["/nowhere.pt"]),
    ],
)
def test_bad_input_ends_with_one_sentence_and_writes_nothing(run, flags, code, words):
    got, _, error, lines = run(*flags)
    assert got == code
    for word in words:
        assert word in error
    assert "Traceback" not in error and len(error.strip().splitlines()) == 1
    assert not lines


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, so asking for one is right")
def test_cuda_asked_for_and_absent_is_refused(run):
    code, _, error, _ = run("--device", "cuda")
    assert code == 2 and "sees no GPU" in error


def test_a_folder_that_holds_another_run_is_not_overwritten(run):
    run("--max-steps", 2)
    before = (run.folder / "metrics.jsonl").read_bytes()
    code, _, error, _ = run("--max-steps", 2)
    assert code == 2 and "holds another run" in error and "--resume auto" in error
    assert (run.folder / "metrics.jsonl").read_bytes() == before


def test_bf16_where_it_is_only_emulated_is_warned_about_and_goes_on(run, monkeypatch, capsys):
    monkeypatch.setattr(amp_policy, "capabilities", lambda device: amp_policy.Capabilities("cpu", "old"))
    policy = amp_policy.choose_policy("bf16", amp_policy.capabilities("cpu"))
    assert "emulates bfloat16" in str(policy)
    assert run("--precision", "bf16", "--max-steps", 2)[1]["precision"] == "bf16"
    assert amp_policy.choose_policy("auto", amp_policy.capabilities("cpu")).name == "fp32"


def test_what_was_measured_about_a_precision_is_a_warning_and_changes_no_run_that_goes_on(run, monkeypatch):
    timed, seconds = [], {torch.float32: 1.0, torch.bfloat16: 4.0}

    def stopwatch(device, dtypes, layers):
        timed.append(layers)
        return tuple(seconds[dtype] for dtype in dtypes)

    def warned(lines):
        return [(line["step"], line["text"]) for line in lines if line.get("event") == "warning"]

    monkeypatch.setattr(amp_policy, "stopwatch", stopwatch)
    monkeypatch.setattr(amp_policy, "capabilities", lambda device: amp_policy.Capabilities("cpu", "new", None, True))
    slow = "bf16: it takes 4 times as long as fp32 on this cpu"
    lines = run("--precision", "bf16", "--max-steps", 2, "--lr", 1e-3)[3]
    assert warned(lines) == [(0, slow)]
    assert warned(run("--precision", "bf16", "--max-steps", 4, "--lr", 1e-3, "--resume", "auto")[3]) == warned(lines)
    assert len(timed) == 1  # the largest layers of cifarnet-tiny, at 40 images
    assert timed[0] == (((40, 24, 31, 31), (16, 24, 3, 3), (1, 1), (1, 1), (1, 1), 1), ((40, 32), (10, 32)))
    assert run("--precision", "auto", "--max-steps", 2, "--accum-steps", 2, out="auto")[1]["precision"] == "fp32"
    assert len(timed) == 2 and timed[1][0][0][0] == 20
    seconds[torch.bfloat16] = 0.1
    assert run("--precision", "auto", "--max-steps", 4, "--resume", "auto", out="auto")[1]["precision"] == "fp32"
    assert len(timed) == 2
    _, last, _, lines = run("--precision", "auto", "--max-steps", 2, "--lr", 1e-3, out="quick")
    assert last["precision"] == "bf16" and warned(lines) == []


def test_boolean_flags_work_both_ways_and_abbreviations_do_not():
    assert parse(["--amsgrad"]).amsgrad and not parse(["--no-amsgrad"]).amsgrad
    with pytest.raises(SystemExit):
        parse(["--ams"])


def test_the_spellings_of_the_published_reports_mean_the_same():
    assert parse(["--amp-opt-level", "O1"]).precision == parse(["--amp_opt_level=O1"]).precision == "O1"
    assert parse(["--disable-amp"]).precision == parse(["--disable_amp"]).precision == "fp32"
    assert parse(["--num_classes", "10", "--out_dir=runs/a_b"]).num_classes == 10
    assert parse(["--num_classes", "10", "--out_dir=runs/a_b"]).out_dir == Path("runs/a_b")
    assert parse(["--keep_fp32", "my_head", "--betas", "0.8", "0.95"]).keep_fp32 == ["my_head"]
    assert parse(["--betas", "0.8", "0.95"]).betas == (0.8, 0.95)


def test_betas_and_parameters_without_decay_reach_the_optimizer(run, mlp, monkeypatch):
    seen = []
    whole = optim.ClippedAdamW.__init__

    def watched(self, groups, **options):
        groups = list(groups)
        seen.append((options["betas"], [g["weight_decay"] for g in groups for p in g["params"] if p.ndim == 2]))
        whole(self, groups, **options)

    monkeypatch.setattr(optim.ClippedAdamW, "__init__", watched)
    run("--model", "mlp", "--max-steps", 1, "--betas", 0.8, 0.95, "--no-decay", "1.*", "--weight-decay", 0.1)
    assert seen == [((0.8, 0.95), [0.1, 0.0])] or seen == [((0.8, 0.95), [0.0, 0.1])]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_run_sh_gpu_says_what_it_needs():
    environment = {**os.environ, "PYTHON": sys.executable}
    command = ["bash", str(ROOT / "run.sh"), "gpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 2 and "needs a CUDA device" in done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("graph", ["--cuda-graph", "--no-cuda-graph"])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16", "O2"])
def test_every_precision_trains_on_cuda_without_a_host_sync_in_the_step(run, monkeypatch, precision, graph):
    opened, closed = guards.Guard.open, guards.Guard.verdict

    def open_(self, step):
        torch.cuda.set_sync_debug_mode("error" if step > 5 else "default")  # by then the graph is recorded
        return opened(self, step)

    def verdict(self):
        result = closed(self)
        torch.cuda.set_sync_debug_mode("default")
        return result

    monkeypatch.setattr(guards.Guard, "open", open_)
    monkeypatch.setattr(guards.Guard, "verdict", verdict)
    code, last, _, _ = run("--device", "cuda", "--precision", precision, graph)
    assert (code, last["status"]) == (0, "done")


def test_compiled_training_gives_the_same_losses_and_looks_at_hooked_steps_eagerly(run, monkeypatch):
    compiled = []

    def compile(model, backend=torch.compile):
        compiled.append(model)
        return backend(model, backend="eager")  # the graphs without minutes of C++

    monkeypatch.setattr(torch, "compile", compile)
    flags = ("--probe-every", 5, "--max-steps", 6)
    eager, fast = run(*flags, out="eager")[3], run(*flags, "--compile", out="fast")[3]
    assert len(compiled) == 1
    assert [line.get("loss") for line in steps_of(eager)] == [line.get("loss") for line in steps_of(fast)]


def test_tensorboard_gets_the_scalars_or_a_sentence_says_how_to_install_it(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    code, _, err, _ = run("--tensorboard", out="without")
    assert code == 2 and "pip install tensorboard" in err
    told = []
    pictures = []
    board = SimpleNamespace(add_scalar=lambda *args: told.append(args), add_text=lambda *args: None,
                            add_image=lambda name, image, step, dataformats: pictures.append((image.shape, step)))
    stub = SimpleNamespace(SummaryWriter=lambda folder, purge_step: board)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stub)
    code, last, _, _ = run("--tensorboard", "--max-steps", 3)
    assert code == 0 and ("val_loss", 3) in [(name, step) for name, _, step in told]
    assert last["val_loss"] in [round(value, 4) for name, value, _ in told if name == "val_loss"]
    assert {step for name, _, step in told if name == "loss"} == {1, 2, 3}
    assert run("--tensorboard", "--model", "slat_vae-test", "--max-steps", 2, out="shown")[0] == 0
    assert pictures == [((4 * 33 + 1, 8 * 33 + 1, 3), 2)]


@pytest.mark.parametrize("model, file", [("dit-test", ".png"), ("slat_vae-test", ".png"), ("vlm-test", ".txt")])
def test_models_with_their_own_loss_train_resume_and_show_what_they_made(run, model, file):
    flags = ("--model", model, "--precision", "bf16", "--max-steps", 6, "--ckpt-every", 3)
    code, last, _, lines = run(*flags)
    assert code == 0 and last["updates"] == 6 and "val_loss" in last and "val_acc1" not in last
    shown = [line for line in lines if line.get("event") == "shown"]
    path = run.folder / shown[-1]["file"]
    assert path.suffix == file and path.stat().st_size > 100
    assert not [line for line in lines if line.get("event") == "warning"]
    assert run(*flags, "--max-steps", 4, out="short")[0] == 0


def test_the_best_weights_are_those_with_the_lowest_loss_where_less_is_better(run, monkeypatch):
    import validation

    losses = iter([float("nan"), 1.0, 2.0])
    monkeypatch.setattr(validation, "evaluate", lambda model, split: {"val_loss": next(losses)})
    code, _, _, _ = run("--model", "slat_vae-test", "--max-steps", 30, "--batch-size", 40)
    best = torch.load(run.folder / "last.pt", weights_only=True)["validator"]["best"]
    assert code == 0 and best == -1.0


@pytest.mark.parametrize("model", [name for name in train.MODELS if name.endswith(("-tiny", "-test"))])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "O1", "O2", "O3"])
def test_every_model_makes_guarded_steps_at_every_level(run, model, precision):
    eps = ("--adam-eps", "1e-4") if precision == "O3" else ()  # without it O3 is refused
    code, last, _, _ = run("--model", model, "--precision", precision, "--max-steps", 3, "--lr", 1e-4, *eps)
    assert code == 0 and last["updates"] + last["skipped"] == 3 and last["updates"] > 0
    assert last["val_loss"] == last["val_loss"]


def test_another_batch_size_prints_the_rule_and_scales_nothing(run, monkeypatch):
    said = []
    monkeypatch.setattr(train.tqdm, "write", lambda text, **_: said.append(text))
    lines = run("--batch-size", 128, "--max-steps", 2)[3]
    assert lines[0]["lr"] == train.MODELS["cifarnet-tiny"][1]["lr"] == 2e-2
    assert any("the lr is not scaled, the rule would be lr 0.00716" in text for text in said)


def test_muon_steps_the_matrices_it_is_given(run):
    code, last, _, _ = run("--model", "vit-test", "--muon", "blocks.*", "--max-steps", 20, "--batch-size", 20)
    assert code == 0 and last["updates"] == 20
    state = torch.load(run.folder / "last.pt", weights_only=True)["optimizer"]["state"].values()
    assert 0 < sum("momentum_buffer" in of for of in state) < len(state)


def test_a_poisoned_momentum_of_muon_is_seen_before_it_reaches_a_weight(run):
    code, last, _, lines = run("--max-steps", 101, "--inject", "nan:optstate:momentum_buffer@step=100")
    skips = [line for line in lines if line.get("event") == "skip"]
    assert code == 0 and "optstate" in skips[0]["reasons"] and skips[0]["step"] == 100
    assert last["val_loss"] == last["val_loss"]


def test_image_folders_train_cached_and_streamed_alike_and_name_dirty_files(run, image_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the cache lies beside the run
    folder = tmp_path / "dirty"
    shutil.copytree(image_folder, folder)
    (folder / "train" / "class0" / "broken.jpg").write_text("this is no image")
    flags = ("--dataset", "imagefolder", "--data-dir", folder, "--max-steps", 4)
    code, cached, _, lines = run(*flags, out="cached")
    assert code == 0 and "broken.jpg" in next(line["text"] for line in lines if line.get("event") == "warning")
    code, streamed, _, _ = run(*flags, "--workers", 1, out="streamed")
    assert code == 0 and streamed["val_loss"] == cached["val_loss"]
    code, _, err, _ = run(*flags, "--max-bad-share", 0.0, out="strict")
    assert code == 4 and "broken.jpg" in err and "--max-bad-share" in err


def test_an_image_size_that_does_not_suit_the_model_is_refused(run, image_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ("--model", "vit-test", "--dataset", "imagefolder", "--data-dir", image_folder, "--max-steps", 1)
    code, _, err, _ = run(*flags, "--image-size", 30)
    assert code == 2 and "--image-size 30" in err
    assert run(*flags, "--image-size", 48, out="larger")[0] == 0
