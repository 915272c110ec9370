"""train.py from outside: what it does, in which order, and how it says no."""

import errno
import itertools
import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import events, last_state, mlp, needs_cuda, needs_rescue, refused, same, two_ranks

import guards
import report
import train
from data import batches
from extras.ema import EMA
from models import RECIPE
from trainer import flags, plan, record, validation

SMALL = [name for name in train.MODELS if name.endswith(("-tiny", "-test"))]


def weights(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def steps_of(lines):
    return [line for line in lines if "step" in line and line.get("event") != "end"]


# --- The step


@pytest.mark.parametrize("uneven", [False, True])
def test_accumulation_gives_the_update_of_the_big_batch(run, mlp, monkeypatch, uneven):
    whole = batches.TrainBatches.at

    def fewer(self, step):
        images, labels = whole(self, step)
        return images[:35], labels[:35]

    if uneven:  # 40 images arrive as 35: three micro-batches of 12, 12 and 11
        monkeypatch.setattr(batches.TrainBatches, "at", fewer)
    # a large eps: rounding near g = 0 stays rounding, not +lr or -lr
    flags = ("--model", "mlp", "--batch-size", 42, "--max-steps", 5, "--adam-eps", 1e-2)
    for accum in (1, 3):
        code, *_ = run(*flags, "--accum-steps", accum, out=str(accum))
        assert code == 0
    at_once, in_three = mlp
    torch.testing.assert_close(weights(in_three), weights(at_once), rtol=1e-4, atol=1e-6)


@needs_rescue
def test_sgd_in_place_of_clipped_adamw_is_a_change_of_one_line(run, monkeypatch):
    made = []

    def sgd(groups, lr, *_, **__):
        made.append(torch.optim.SGD(groups, lr=lr, momentum=0.9, fused=True))
        return made[-1]

    monkeypatch.setattr(train.prepare.optim, "ClippedAdamW", sgd)
    flags = ("--muon", "--lr", 0.3, "--max-steps", 40)
    code, last, _, lines = run(*flags, "--inject", "nan:grad:head.weight@step=9")

    assert (code, last["updates"], last["skipped"]) == (0, 39, 1)
    assert len(made) == 1
    losses = [line["loss"] for line in lines if "loss" in line and "event" not in line]
    assert sum(losses[-5:]) < sum(losses[:5])


def test_evaluation_runs_in_fp32_while_training_runs_in_bf16(run, monkeypatch):
    seen = {True: set(), False: set()}
    compared = []

    def compare(model, x, *_):  # the real one evaluates in bf16 on purpose
        compared.extend(x.flatten(1))
        return SimpleNamespace(changed=0.0, nonfinite=0.0, parted=False)

    def watch(module, args, out):
        seen[module.training].add(getattr(out, "dtype", None))

    monkeypatch.setattr(validation, "disagreement", compare)
    with torch.nn.modules.module.register_module_forward_hook(watch):
        flags = ("--model", "vit-test", "--precision", "bf16", "--max-steps", 2)
        run(*flags)
        assert torch.bfloat16 in seen[True]
        assert torch.bfloat16 not in seen[False]
        assert len(torch.stack(compared).unique(dim=0)) == 100, "each image once"

        run(*flags, "--eval-precision", "same", out="same")
        assert torch.bfloat16 in seen[False]


def test_steps_that_stay_bad_end_with_exit_code_3_and_keep_the_weights(run, monkeypatch):
    healthy = batches.TrainBatches.at

    def poisoned(self, step):
        images, labels = healthy(self, step)
        return (images if step < 6 else images * torch.nan), labels

    monkeypatch.setattr(batches.TrainBatches, "at", poisoned)
    code, last, _, _ = run("--max-skips", 3, "--ckpt-every", 5)
    assert (code, last["status"], last["updates"]) == (3, "diverged", 6)
    assert last["skipped"] >= 3
    assert "rejected" in last["reason"]
    assert last_state(run)["step"] == 5

    _, stopped, _, _ = run("--on-nonfinite", "stop", out="stop")
    assert stopped["updates"] == 6


@needs_rescue
def test_an_ordinary_step_runs_two_files_of_rescue_and_no_more_functions_than_it_needs(
    run, monkeypatch
):
    seen = set()
    end_of_step = train.end_of_step
    wing = Path(train.__file__).with_name("rescue")

    def note(frame, event, arg):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.parent == wing and frame.f_code.co_name[0] != "<":
            seen.add((path.name, frame.f_code.co_qualname))

    def profiled(run, end, began):
        sys.setprofile(None)
        ended = end_of_step(run, end, began)
        if run.step == 12:  # a look is at each fourth step, a pass is run twice at each tenth
            sys.setprofile(note)
        return ended

    monkeypatch.setattr(train, "end_of_step", profiled)
    assert run("--max-steps", 40)[0] == 0
    assert {name for name, _ in seen} == {"__init__.py", "notice.py"}
    assert len(seen) <= 8, seen


def test_the_clock_counts_the_last_step_of_an_epoch(run, monkeypatch):
    """Its verdict is a step late, and a GPU works on when the host has given it all."""
    now = [0.0]
    flush = guards.Guard.flush

    def waits(self):
        now[0] += 1.0
        return flush(self)

    monkeypatch.setattr(train.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(guards.Guard, "flush", waits)
    last = run("--ckpt-every", 5)[1]  # steps 5, 10 and 12, of 40 images each
    assert last["images_per_second"] == pytest.approx(12 * 40 / 3)


def test_another_answer_to_trouble_says_which_verdicts_are_read_at_once(run, monkeypatch):
    """train.py asks run.rescue, and knows nothing of healing."""
    assert "healing" not in Path(train.__file__).read_text()
    late = {}

    class FromStepSix(record.Plain):
        def reads_at_once(self, run):
            return run.step >= 6

        def findings(self, run, verdict):
            late[verdict.step] = run.step - verdict.step
            return super().findings(run, verdict)

    monkeypatch.setattr(train.prepare, "rescuer", FromStepSix)
    assert run("--max-steps", 9)[0] == 0
    assert late == {step: 1 if step < 6 else 0 for step in range(1, 10)}


# --- What fails says so: the traceback of a bug, and the summary all the same


@pytest.mark.parametrize("where", ["build", "forward"])
def test_a_bug_in_a_model_is_a_whole_traceback_and_the_last_line_is_the_summary(run, model, where):
    def buggy(classes):
        net = mlp(classes)
        calls = []

        def bug(*_):
            calls.append("forward")
            if where == "build" or len(calls) == 9:
                _a, _b = (1, 2, 3)

        net.register_forward_pre_hook(bug)
        if where == "build":
            bug()
        return net

    model("buggy", buggy)
    code, last, error, _ = run("--model", "buggy")
    assert (code, last["status"], last["model"]) == (1, "failed", "buggy")
    assert "Traceback" in error
    assert "_a, _b = (1, 2, 3)" in error


def test_a_full_disk_ends_with_a_sentence_and_the_summary(run, monkeypatch):
    written = []

    def full(self, **fields):
        written.append(fields)
        if len(written) > 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    monkeypatch.setattr(report.MetricsFile, "write", full)
    code, last, error, _ = run()

    assert (code, last["status"]) == (1, "failed")
    assert "No space left on device" in error
    assert "metrics.jsonl" in error
    assert "Traceback" not in error


@needs_rescue
def test_anomaly_mode_that_finds_a_nan_ends_with_its_traceback_and_the_summary(run):
    code, last, error, _ = run("--detect-anomaly", "--inject", "nan:act:groups.1@step=3")
    assert (code, last["status"]) == (1, "failed")
    assert "returned nan values" in error
    assert "--detect-anomaly ends a run at its first NaN" in error


def test_a_run_that_died_before_its_first_checkpoint_does_not_block_its_folder(run, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(train, "save", lambda run, good: 1 / 0)
        code, _, error, _ = run("--max-steps", 2)
    assert code == 1
    assert "ZeroDivisionError" in error, "a bug in the loop is a traceback too"
    assert (run.folder / "metrics.jsonl").exists()
    assert not list(run.folder.glob("*.pt"))

    code, *_ = run("--max-steps", 2)
    assert code == 0


# --- Two ranks


def test_two_ranks_equal_one_process_on_the_same_global_batch(run, mlp, tmp_path, image_folder):
    flags = ("--max-steps", 8, "--accum-steps", 2, "--adam-eps", 1e-2, "--batch-size", 40)
    _, one, _, _ = run("--model", "mlp", *flags, out="one")
    two, _, replicas = two_ranks(tmp_path, image_folder, *flags)

    assert same(*replicas), "the replicas differ"
    for name, tensor in mlp[0].state_dict().items():
        torch.testing.assert_close(replicas[0][name], tensor, rtol=1e-4, atol=1e-6)
    assert two["val_acc1"] == one["val_acc1"]  # 100 images over two ranks, each counted once
    assert two["val_loss"] == pytest.approx(one["val_loss"], rel=1e-3)


# --- Saying no


REFUSED = [
    ("--model resnet9000", ["--model", "resnet9000", "cifarnet"]),
    ("--precision bf16 --disable-amp", ["--disable-amp", "not allowed with"]),
    ("--data-dir /nowhere/at/all", ["/nowhere/at/all", "not a folder"]),
    ("--num-classes 1000", ["--num-classes 1000", "10 classes"]),
    ("--batch-size 40 --accum-steps 3", ["--batch-size 40", "multiple of 3"]),
    ("--batch-size 4000", ["4000", "all 400", "it will be 64", "at most 400"]),
    ("--batch-size 0", ["--batch-size", "0 is not at least 1"]),
    ("--lr 0", ["--lr", "0 is not above 0"]),
    ("--lr nan", ["--lr", "nan"]),
    ("--betas 0.9 1", ["--betas", "1 is not", "below 1"]),
    ("--ema 1.5", ["--ema", "below"]),
    ("--seed 100000000000000000000", ["--seed", "below"]),
    ("--max-steps 100000000000000000000", ["--max-steps", "below"]),
    ("--epochs 1 --max-steps 5", ["--max-steps", "not allowed with"]),
    ("--no-such-flag", ["--no-such-flag", "--help"]),
    ("--ams", ["--ams", "--help"]),  # no abbreviations
    pytest.param(
        "--device cuda",
        ["sees no GPU"],
        marks=pytest.mark.skipif(
            torch.cuda.is_available(), reason="this machine has a GPU: asking is right"
        ),
    ),
    ("--precision O3", ["eps=1e-08 is exactly 0 in torch.float16"]),
    ("--keep-fp32 nothing.like.it", ["nothing.like.it"]),
    ("--no-decay ü", ["matches no parameter"]),
    ("--cutout 64", ["--cutout 64"]),
    ("--model vit-test --dataset imagefolder --image-size 30", ["not of 30"]),
    ("--model swin-t", ["swin-t takes images of 224, 448 or other multiples of 224", "not of 32"]),
    ("--precision O2 --resume /nowhere.pt", ["/nowhere.pt"]),
    ("--out-dir ", ["empty"]),
    (f"--out-dir {'x' * 300}", ["255"]),
]


@pytest.mark.parametrize("flags, words", REFUSED)
def test_what_cannot_work_is_refused_in_one_sentence_and_writes_nothing(run, flags, words):
    refused(run(*flags.split(" ")), *words)
    assert not run.folder.exists()


def test_a_folder_that_holds_another_run_is_not_overwritten(run):
    run("--max-steps", 2)
    before = (run.folder / "metrics.jsonl").read_bytes()
    refused(run("--max-steps", 2), "holds another run", "--resume auto")
    assert (run.folder / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    "words, name, meant",
    [
        ("--amsgrad", "amsgrad", True),
        ("--no-amsgrad", "amsgrad", False),
        ("", "compile", "auto"),
        ("--compile", "compile", "on"),
        ("--no-compile", "compile", "off"),
        ("--amp-opt-level O1", "precision", "O1"),
        ("--amp_opt_level=O1", "precision", "O1"),
        ("--disable-amp", "precision", "fp32"),
        ("--disable_amp", "precision", "fp32"),
        ("--out_dir=runs/a_b", "out_dir", Path("runs/a_b")),
        ("--keep_fp32 my_head", "keep_fp32", ["my_head"]),
        ("--betas 0.8 0.95", "betas", (0.8, 0.95)),
    ],
)
def test_boolean_flags_and_published_spellings_work(words, name, meant):
    args = flags.parse(words.split(), "", train.MODELS, train.NAMES)
    assert getattr(args, name) == meant


def test_flags_of_the_optimizer_reach_it_and_count_in_a_run_that_goes_on(run, mlp):
    flags = ("--model", "mlp", "--no-decay", "1.*")
    for steps, decay, betas in ((1, 0.1, (0.8, 0.95)), (2, 0.3, (0.7, 0.9))):
        more = ("--max-steps", steps, "--weight-decay", decay, "--betas", *betas)
        code, *_ = run(*flags, *more, "--resume", "auto")
        assert code == 0

        groups = last_state(run)["optimizers"][0]["param_groups"]
        assert all(tuple(group["betas"]) == betas for group in groups)
        decayed = [len(group["params"]) for group in groups if group["weight_decay"] == decay]
        assert decayed == [1], "of two matrices one is named by --no-decay"
    refused(run(*flags, *more, "--amsgrad", "--resume", "auto"), "amsgrad: False -> True")


# --- Options


def test_compiled_training_gives_the_same_losses_and_looks_at_hooked_steps_eagerly(
    run, monkeypatch
):
    compiled = []

    def compile(model, dynamic, backend=torch.compile):
        compiled.append(model)
        assert dynamic is False  # else a second image size is compiled for all sizes, in the run
        return backend(model, backend="eager")  # the graphs without minutes of C++

    monkeypatch.setattr(torch, "compile", compile)
    flags = ("--probe-every", 5, "--max-steps", 6)
    _, _, _, eager = run(*flags, out="eager")
    _, _, _, fast = run(*flags, "--compile", out="fast")

    assert len(compiled) == 1
    losses = [line.get("loss") for line in steps_of(eager)]
    assert losses == [line.get("loss") for line in steps_of(fast)]


def test_tensorboard_gets_the_scalars_or_a_sentence_says_how_to_install_it(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    refused(run("--tensorboard", out="without"), "pip install tensorboard")

    scalars = []
    board = SimpleNamespace(add_scalar=lambda name, value, step: scalars.append((name, step)))
    stub = SimpleNamespace(SummaryWriter=lambda folder, purge_step: board)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stub)
    assert run("--tensorboard", "--model", "slat_vae-test", "--max-steps", 2)[0] == 0
    assert {("loss", 1), ("loss", 2), ("val_loss", 2)} <= {*scalars}


@needs_rescue
def test_the_best_weights_are_those_with_the_lowest_loss_where_less_is_better(run, monkeypatch):
    losses = iter([1.1, 1.0, 1.2, 1.0])  # at the end best.pt is scored again
    monkeypatch.setattr(validation, "evaluate", lambda *_, **__: {"val_loss": next(losses)})
    monkeypatch.setattr("rescue.notice.sample_is_sound", lambda run: True)
    assert run("--model", "slat_vae-test", "--max-steps", 30, "--batch-size", 40)[0] == 0
    assert last_state(run)["best"] == [-1.0, -1.0]


@needs_rescue
def test_among_equal_accuracies_the_lowest_loss_is_the_best(run, monkeypatch):
    pairs = iter([(50, 1.1), (60, 0.9), (60, 0.7), (60, 0.8), (40, 0.1), (60, 0.7)])

    def evaluate(*_, **__):
        acc1, loss = next(pairs)
        return {"val_acc1": acc1, "val_loss": loss}

    monkeypatch.setattr(validation, "evaluate", evaluate)
    monkeypatch.setattr("rescue.notice.sample_is_sound", lambda run: True)
    assert run("--max-steps", 45)[0] == 0
    kept = json.loads((run.folder / "model.json").read_text())["evaluated"]
    assert (kept["step"], kept["val_loss"]) == (30, 0.7)
    assert last_state(run)["best"] == [60, -0.7]


LEVELS = [*zip(SMALL, itertools.cycle(["bf16", "O2"])), ("cifarnet-tiny", "O3"), ("dit-test", "O1")]


@pytest.mark.parametrize("model, precision", LEVELS)
def test_every_model_makes_guarded_steps_and_shows_what_it_made(run, model, precision):
    eps = ("--adam-eps", "1e-4") if precision == "O3" else ()  # without it O3 is refused
    flags = ("--model", model, "--precision", precision, "--max-steps", 4, "--lr", 1e-4)
    code, last, _, lines = run(*flags, *eps)
    assert code == 0
    assert last["updates"] + last["skipped"] == 4
    assert last["updates"] > 2
    assert last["val_loss"] == last["val_loss"]

    shown = {"dit-test": ".png", "slat_vae-test": ".png", "vlm-test": ".txt"}.get(model)
    assert ("val_acc1" in last) != bool(shown)
    files = [run.folder / line["file"] for line in events(lines, "shown")]
    assert [file.suffix for file in files][-1:] == ([shown] if shown else [])
    assert all(file.stat().st_size > 100 for file in files)


def test_another_batch_size_scales_the_rate_by_the_recipes_rule_and_says_so(run, monkeypatch):
    said = []
    monkeypatch.setattr(train.prepare.tqdm, "write", lambda text, **_: said.append(text))
    flags = ("--batch-size", 250, "--max-steps", 2)

    _, _, _, lines = run(*flags, "--muon", out="small")
    _, recipe = train.MODELS["cifarnet-tiny"]
    assert lines[0]["lr"] == pytest.approx(recipe["lr"] * (250 / 1000) ** 0.5)
    assert any("sqrt rule" in text for text in said)

    _, _, _, lines = run(*flags, "--lr", 0.003)
    assert lines[0]["lr"] == 0.003


@pytest.mark.parametrize(
    "images, recipe, pieces, batch",
    [
        (51, 1000, 1, 16),
        (60, 256, 2, 16),
        (400, 256, 1, 64),
        (51, 256, 12, 12),
        (5, 256, 2, 4),
        (1, 256, 1, 1),
        (1_100, 1000, 1, 256),
        (4_100, 1000, 1, 1000),
        (50_000, 128, 1, 128),
    ],
)
def test_a_batch_suits_the_set_and_is_the_recipes_for_a_large_one(images, recipe, pieces, batch):
    args = SimpleNamespace(
        batch_size=None,
        lr=None,
        accum_steps=pieces,
        recipe=RECIPE | {"batch_size": recipe},
    )
    data = SimpleNamespace(train=(None, range(images)))

    plan.choose_batch(record.Run(args=args, data=data))

    assert args.batch_size == batch
    assert args.lr == pytest.approx(1e-3 * (batch / recipe) ** 0.5)
    assert (f"not {recipe}, for {images:,} images" in args.lr_reason) == (batch != recipe)


@pytest.mark.parametrize(
    "images, asked, left, rate",
    [
        (51, ["a*"], [], 1e-3 * (16 / 64) ** 0.5),
        (51, ["b*"], ["b*"], 8e-3 * (16 / 256) ** 0.5),
        (400, ["a*"], ["a*"], 8e-3 * (64 / 256) ** 0.5),
    ],
)
def test_few_images_take_adamw_because_muon_would_take_longer_than_they(images, asked, left, rate):
    recipe = RECIPE | {"batch_size": 256, "lr": 8e-3, "muon": ["a*"]}
    args = SimpleNamespace(batch_size=None, lr=None, accum_steps=1, recipe=recipe, muon=asked)
    data = SimpleNamespace(train=(None, range(images)))
    plan.choose_batch(record.Run(args=args, data=data))
    assert args.muon == left
    assert args.lr == pytest.approx(rate)
    assert ("AdamW alone" in args.lr_reason) == (not left)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("batch_size", [None, 16])
def test_a_run_that_goes_on_gives_muon_what_it_had_whether_or_not_the_batch_is_named(
    batch_size, alone
):
    recipe = RECIPE | {"batch_size": 256, "lr": 8e-3, "muon": ["a*"]}
    muon = [] if alone else ["a*"]
    args = SimpleNamespace(
        batch_size=batch_size, lr=None, accum_steps=1, recipe=recipe, muon=["a*"]
    )
    data = SimpleNamespace(train=(None, range(51)))
    plan.choose_batch(record.Run(args=args, data=data), {"identity": {"muon": muon}})
    rate = 1e-3 * (16 / 64) ** 0.5 if alone else 8e-3 * (16 / 256) ** 0.5
    assert (args.batch_size, args.muon, args.lr) == (16, muon, pytest.approx(rate))


@pytest.mark.parametrize(
    "epoch_steps, seconds, given, steps, validations, warns",
    [
        (4, 0.1, {}, 300, 25, False),  # 60 pictures
        (4, 1.2, {}, 100, 25, True),  # what two minutes allow
        (4, 0.1, {"epochs": 10}, 40, 10, True),
        (4, 0.1, {"epochs": 75}, 300, 25, False),
        (4, 0.1, {"max_steps": 10}, 10, 3, False),  # as many updates as were asked for
        (1, 0.1, {}, 300, 20, False),
        (50, 0.1, {}, 500, 10, False),
        (50, 0.5, {}, 240, 5, False),  # 240,000 images
        (5000, None, {}, 50_000, 10, False),
    ],
)
def test_a_run_is_long_enough_in_updates_or_a_warning_names_it(
    epoch_steps, seconds, given, steps, validations, warns
):
    args = SimpleNamespace(
        recipe=RECIPE | {"epochs": 10},
        max_steps=None,
        epochs=None,
        verify_every=None,
        warmup_updates=None,
        batch_size=16 if epoch_steps < 50 else 1000,
    )
    args.__dict__.update(given)
    stream = SimpleNamespace(steps_per_epoch=epoch_steps, start_small=lambda steps: None)
    device = torch.device("cpu" if seconds else "cuda")
    run = record.Run(args=args, stream=stream, device=device)

    _, warning = plan.length(run, None, seconds)

    assert run.total_steps == steps
    assert -(-steps // run.validate_every) == validations
    assert bool(warning) == warns
    assert ("--epochs 75" in warning) == warns


@pytest.mark.parametrize("sign", [1, -3])
def test_an_average_that_runs_away_from_its_weights_is_a_warning(run, monkeypatch, sign):
    update = EMA.update

    def turned(self, params, found_inf):
        pairs = zip(self.average, params, strict=True)
        away = [a + sign * (p.detach() - a) for a, p in pairs]
        update(self, away, 0.0)

    monkeypatch.setattr(EMA, "update", turned)
    _, last, _, lines = run("--ema", 0.9, "--max-steps", 20)
    said = [text for text in last["warnings"] if "no longer follows" in text]
    distance = events(lines, "average")[-1]["distance"]
    assert bool(said) == (distance > 1) == (sign < 0)


@needs_rescue
def test_muon_steps_its_matrices_and_a_poisoned_momentum_reaches_no_weight(run, monkeypatch):
    monkeypatch.setattr("rescue.notice.CHECK_EVERY", 5)
    code, last, _, lines = run("--inject", "nan:optstate:momentum_buffer@step=10")

    assert code == 0
    skip, *_ = events(lines, "skip")
    assert "optstate" in skip["reasons"]
    assert skip["step"] == 10
    assert last["val_loss"] == last["val_loss"]
    _, muon = last_state(run)["optimizers"]
    assert muon["state"]
    assert all("momentum_buffer" in of for of in muon["state"].values())


def test_an_image_folder_is_streamed_and_its_dirty_files_are_named(run, image_folder, tmp_path):
    folder = tmp_path / "dirty"
    shutil.copytree(image_folder, folder)
    (folder / "train" / "class0" / "broken.jpg").write_text("this is no image")
    flags = ("--dataset", "imagefolder", "--data-dir", folder, "--max-steps", 4, "--workers", 1)

    code, last, _, _ = run(*flags)
    assert code == 0
    assert any("broken.jpg" in text for text in last["warnings"])

    code, _, error, _ = run(*flags, "--max-bad-share", 0.0, out="strict")
    assert code == 4
    assert "broken.jpg" in error
    assert "--max-bad-share" in error


# --- CUDA


@needs_cuda
@pytest.mark.parametrize("graph", ["--cuda-graph", "--no-cuda-graph"])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16", "O2"])
def test_every_precision_trains_on_cuda_without_a_host_sync_in_the_step(
    run, monkeypatch, precision, graph
):
    opened = guards.Guard.open
    closed = guards.Guard.verdict

    def open_(self, step):
        torch.cuda.set_sync_debug_mode("error" if 5 < step < 12 else "default")  # recorded by then
        return opened(self, step)

    def verdict(self):
        result = closed(self)
        torch.cuda.set_sync_debug_mode("default")
        return result

    monkeypatch.setattr(guards.Guard, "open", open_)
    monkeypatch.setattr(guards.Guard, "verdict", verdict)
    code, last, _, _ = run("--device", "cuda", "--precision", precision, graph)
    assert (code, last["status"]) == (0, "done")
