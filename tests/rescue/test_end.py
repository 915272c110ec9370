""" "done" is a claim that is checked: no lost run ends well, and no healthy one is accused."""

import copy
import dataclasses
import json
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from helpers import events, last_state, run_ranks, script
from torch import nn

import checkpoint
import train
from data import Dataset, batches
from rescue import notice


def test_a_run_whose_steps_were_mostly_skipped_did_not_train(run):
    flags = ("--on-nonfinite", "skip", "--inject", "nan:input@step=2..12")
    code, last, _, _ = run(*flags)
    assert (code, last["status"], last["skipped"]) == (3, "diverged", 11)
    assert "11 of 12" in last["reason"]


# --- What is not on the disk is not done


def other_numbers(path):
    state = {name: t + 1 for name, t in torch.load(path, weights_only=True).items()}
    torch.save(state, path)


DAMAGES = {
    "last.pt cut": lambda folder: os.truncate(folder / "last.pt", 5000),
    "last.pt gone": lambda folder: os.remove(folder / "last.pt"),
    "last.pt older": lambda folder: shutil.copy(folder / "last-1.pt", folder / "last.pt"),
    "best.pt gone": lambda folder: os.remove(folder / "best.pt"),
    "best.pt of a stranger": lambda folder: other_numbers(folder / "best.pt"),
    "model.json emptied": lambda folder: (folder / "model.json").write_text(""),
    "model.json a list": lambda folder: (folder / "model.json").write_text("[1]"),
    "model.json nested": lambda folder: (folder / "model.json").write_text("[" * 100_000),
    "model.json gone": lambda folder: os.remove(folder / "model.json"),
    "folder gone": shutil.rmtree,
}


def test_done_is_read_back_from_the_disk(run, monkeypatch, tmp_path):
    conclude, said = train.conclude, {}

    def damaged(run):
        run.checkpoints.wait()
        shutil.copytree(run.folder, tmp_path / "whole")
        for name, damage in DAMAGES.items():
            damage(run.folder)
            try:
                said[name] = str(conclude(run))
            except checkpoint.CheckpointError as error:
                said[name] = str(error)
            shutil.rmtree(run.folder, ignore_errors=True)
            shutil.copytree(tmp_path / "whole", run.folder)
        return conclude(run)

    monkeypatch.setattr(train, "conclude", damaged)
    assert run("--max-steps", 4, "--ckpt-every", 2)[0] == 0
    wrong = {
        name: words
        for name, words in said.items()
        if not words.startswith("not done: ")
        or name.split()[0].replace("folder", "last.pt") not in words
    }
    assert not wrong and len(said) == len(DAMAGES)


WRITTEN = {  # tests/bench/test_bench.py has other weights, moments and averages
    "no average": lambda state, first: {"ema": None},
    "an old schedule": lambda state, first: {"schedule": first["schedule"]},
    "a wrong count": lambda state, first: {"updates": 3},
}


@pytest.mark.parametrize("name", WRITTEN)
def test_done_means_the_network_of_this_run(struck, monkeypatch, name):
    """last.pt is written with something else in it, from the second time on."""
    start, seen = checkpoint.Checkpoints._start, []

    def wrong(self, path, state, *links):
        if path.name == "last.pt":
            seen.append(copy.deepcopy(state))
            if seen[1:]:
                state = state | WRITTEN[name](state, seen[0])
        return start(self, path, state, *links)

    monkeypatch.setattr(checkpoint.Checkpoints, "_start", wrong)
    code, last, _, _ = struck(lambda *_: None, "--max-steps", 20, "--ema", 0.9)
    assert (code, last["status"]) == (1, "failed") and "last.pt" in last["reason"], last["reason"]


@pytest.mark.parametrize("precision", ["bf16", "O2", "O3"])
def test_a_finished_run_that_is_started_again_at_another_precision_is_done(struck, run, precision):
    assert struck(lambda *_: None, "--max-steps", 20)[0] == 0
    again = ("--max-steps", 20, "--resume", "auto", "--precision", precision, "--adam-eps", 1e-6)
    assert run("--model", "struck", *again)[0] == 0


def test_a_run_that_goes_on_elsewhere_or_without_its_best_weights_writes_them(run):
    assert run("--max-steps", 4)[0] == 0
    for name in ("best.pt", "model.json"):
        (run.folder / name).unlink()
    assert run("--max-steps", 4, "--resume", "auto")[0] == 0
    assert run("--max-steps", 4, "--resume", run.folder / "last.pt", out="new")[0] == 0
    for folder in (run.folder, run.folder.with_name("new")):
        assert (folder / "best.pt").exists() and (folder / "model.json").exists()


# --- A run that is lost with finite numbers


class Struck(nn.Module):
    """A small network with BatchNorm. strike(net, step, batch) comes before training step `step`;
    it may return another batch."""

    def __init__(self, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.head = nn.Linear(32, classes)

    def forward(self, images):
        return self.head(self.body(images))


@pytest.fixture
def struck(run, model, monkeypatch):
    """Runs a Struck network on images that it learns within an epoch: struck(strike, *flags)."""
    torch.manual_seed(0)
    labels = torch.arange(500) % 10
    patterns = torch.randint(0, 200, (10, 3, 8, 8))
    images = (patterns[labels] + torch.randint(0, 50, (500, 3, 8, 8))).byte()
    halves = (images[:400], labels[:400]), (images[400:], labels[400:])
    data = Dataset("patterns", *halves, [*"0123456789"])
    monkeypatch.setattr(train.prepare, "load", lambda *_, **__: copy.deepcopy(data))

    def go(strike, *flags):
        nets = model("struck", Struck, augment="flip")
        healthy = batches.TrainBatches.at

        def at(self, step):
            batch = healthy(self, step)
            return strike(nets[-1], step + 1, batch) or batch

        monkeypatch.setattr(batches.TrainBatches, "at", at)
        return run("--model", "struck", "--lr", 3e-3, *flags)

    return go


def before(first, change):
    """change(net) before this training step."""

    def strike(net, step, batch):
        if step == first:
            change(net)

    return strike


def ruin(statistic, value):
    def change(net):
        getattr(net.body[2], statistic).fill_(value)
        net.body[2].momentum = 0.0

    return before(13, change)


TURNED_BACK = {
    "a variance below 0": (ruin("running_var", -1.0), "validation is non-finite", 10),
    "a mean that is far away": (ruin("running_mean", 1e5), "outputs no longer", 10),
    "a head that grows a thousandfold near the end": (
        before(36, lambda net: net.head.weight.data.mul_(-1e3)),
        "",
        30,
    ),
}


@pytest.mark.parametrize("strike", TURNED_BACK)
def test_statistics_that_ruin_the_evaluation_turn_the_run_back(struck, strike):
    strike, reason, good = TURNED_BACK[strike]
    code, last, _, lines = struck(strike, "--max-steps", 40)
    (cure,) = events(lines, "cure")
    assert reason in cure["reason"] and f"back to the weights of step {good}" in cure["action"]
    assert code == 0 and last["val_acc1"] > 90


def shuffle(net, step, batch):
    images, labels = batch
    order = torch.randperm(40, generator=torch.Generator().manual_seed(step))
    return (images, labels[order]) if step > 60 else None


def ignore(net, step, batch):
    if step >= 15:
        net.body[2].bias.data.fill_(-1e9)  # no unit lives: the head's bias alone learns on


LOST = {
    "labels that are shuffled halfway": (
        shuffle,
        "far above",
        ("--max-steps", 120, "--max-cures", 1),
    ),
    "outputs that ignore their input": (ignore, "", ("--max-steps", 40, "--max-cures", 2)),
}


@pytest.mark.parametrize("strike", LOST)
def test_a_run_that_is_lost_never_ends_done(struck, strike):
    strike, reason, flags = LOST[strike]
    code, last, _, _ = struck(strike, *flags)
    assert (code, last["status"]) == (3, "diverged") and reason in last["reason"]


def test_gradient_ascent_never_ends_done_and_last_good_is_not_the_lost_weights(struck, run):
    def ascend(net):
        for p in net.parameters():
            p.register_hook(torch.neg)

    flags = ("--lr", 3e-2, "--max-steps", 100, "--ckpt-every", 5, "--max-cures", 2)
    code, last, _, _ = struck(before(15, ascend), *flags)
    assert (code, last["status"]) == (3, "diverged")
    good = checkpoint.load(run.folder / "last_good.pt")
    assert good["step"] >= 10 and good["scores"]["val_acc1"] > 70


# --- What a run warns of: tests/bench/test_bench.py has more


LIES = {
    "a fifth more": lambda scores: scores | {"val_acc1": scores["val_acc1"] + 20},
    "a fifth less": lambda scores: scores | {"val_acc1": scores["val_acc1"] - 20},
    "the truth": dict,
}


@pytest.mark.parametrize("name", LIES)
def test_a_validation_is_not_believed(struck, monkeypatch, name):
    evaluate = train.validation.evaluate
    monkeypatch.setattr(
        train.validation, "evaluate", lambda *args, **more: LIES[name](evaluate(*args, **more))
    )
    _, last, _, _ = struck(shuffle_half, "--max-steps", 60)
    said = [text for text in last["warnings"] if "counted again" in text]
    assert bool(said) == (name != "the truth"), last


def shuffle_half(net, step, batch):
    """It learns about half."""
    images, labels = batch
    return images * (labels % 2).view(-1, 1, 1, 1), labels


def test_a_run_that_goes_on_with_another_validation_set_warns_and_compares_no_scores(
    struck, run, monkeypatch
):
    load = train.prepare.load

    def other(*args, **more):
        data = load(*args, **more)
        return dataclasses.replace(data, val=tuple(x.flip(0) for x in data.val))

    assert struck(lambda *_: None, "--max-steps", 20)[0] == 0
    monkeypatch.setattr(train.prepare, "load", other)
    code, last, _, _ = run("--model", "struck", "--max-steps", 40, "--resume", "auto")
    assert code == 0 and last["val_acc1"] > 90
    assert any("not those of the start" in text for text in last["warnings"])


def said_of_ranks(losses):
    run = train.Run(world_size=len(losses[0]))
    return [sentence for row in losses if (sentence := notice.parted_rank(run, row))]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_rank_whose_loss_parts_from_the_others_is_named_and_chance_is_not(ranks):
    generator = torch.Generator().manual_seed(0)
    losses = torch.rand(20_000, ranks, generator=generator).double()
    assert not said_of_ranks(losses.tolist())
    assert not said_of_ranks([[0.0] * ranks] * 100)
    losses[100:, 1] += 1
    assert "rank 1 had the highest loss" in said_of_ranks(losses.tolist())[0]


NOISE = """
import torch, train
from data import batches
at = batches.TrainBatches.at
def noise(self, step):
    x, y = at(self, step)
    return (torch.randn_like(x) if os.environ["RANK"] == sys.argv[1] else x), y
batches.TrainBatches.at = noise
code = train.main(sys.argv[2:])
sys.stdout.flush()
os._exit(code)
"""


@pytest.mark.parametrize("rank", ["1", "none"])
def test_a_rank_that_trains_on_noise_is_a_warning_with_its_number(tmp_path, image_folder, rank):
    words = (
        "--model cifarnet-tiny --dataset cifar10 --batch-size 40 --max-steps 150 --device cpu "
        f"--precision fp32 --data-dir {image_folder} --out-dir {tmp_path / 'run'}"
    ).split()
    ended = run_ranks([script(tmp_path, "import os\n" + NOISE), rank, *words], tmp_path)
    assert [code for code, *_ in ended] == [0, 0], ended
    warnings = json.loads(ended[0][1].splitlines()[-1])["warnings"]
    assert any("rank 1 had the highest loss" in text for text in warnings) == (rank == "1")


# --- What must be left alone


def judged(losses, norms=None):
    """Sentences about a run with these losses, and the run."""
    run = train.Run()
    norms = norms or [1.0] * len(losses)
    said = [notice.judge_loss(run, x, g) for x, g in zip(losses, norms, strict=True)]
    return said, run.healing.trend


def test_a_look_logs_both_ends_of_the_gradient_norms():
    lines = []
    run = train.Run(log=SimpleNamespace(write=lambda **line: lines.append(line)))
    rows = {f"t{i}": {"grad_norm": 0.1 + 0.01 * i} for i in range(40)}
    rows["t12"]["grad_norm"], rows["t31"]["grad_norm"] = 0.0, 50.0
    notice.note_figures(run, 100, rows)
    assert [*lines[0]["tensors"]] == ["t12", "t0", "t1", "t38", "t39", "t31"]


LEARNT = [2.3] * 10 + [1.0] * 50


@pytest.mark.parametrize(
    ("losses", "reason"),
    [([80.0] * 20, "far above its past for 20 steps"), ([2.25] * 50, "lost what it learnt")],
)
def test_a_spike_that_recovers_is_left_alone_and_one_that_lasts_is_not(losses, reason):
    said, _ = judged(LEARNT + losses)
    assert not any(said[:-1]) and reason in said[-1]
    said, trend = judged(LEARNT + losses[5:] + [0.9] * 100)
    assert not any(said) and not trend.suspicions


def test_suspicions_are_saved_under_short_names_and_other_names_of_old_begin_again():
    old = "the loss has been far above its past"
    run = train.Run()
    for loss in LEARNT + [80.0] * 15:
        assert not notice.judge_loss(run, loss, 1.0)
    trend = run.healing.trend
    assert trend.suspicions == {"high": 15, "unlearnt": 15}
    trend.suspicions = {old: 19}
    assert not any(notice.judge_loss(run, 80.0, 1.0) for _ in range(19))
    assert trend.suspicions == {"high": 19, "unlearnt": 19}
    assert old in notice.judge_loss(run, 80.0, 1.0)


def test_a_checkpoint_with_suspicions_of_old_names_is_gone_on_from(run):
    assert run("--max-steps", 12)[0] == 0
    state = last_state(run)
    state["healing"]["trend"]["suspicions"] = {"the loss has been far above its past": 3}
    torch.save(state, run.folder / "old.pt")
    again = run("--max-steps", 16, "--resume", run.folder / "old.pt", out="new")
    assert again[0] == 0 and again[1]["updates"] == 16
    assert last_state(run, "new")["healing"]["trend"]["suspicions"] == {}


def test_a_dead_gradient_is_noticed_but_not_now_and_then_nor_where_nothing_is_left_to_learn():
    norms = [1.0] * 12 + ([0.0] * 15 + [1.0]) * 5
    assert not any(judged([1.0] * len(norms), norms)[0])
    assert "below 1e-12 for 20 steps" in judged([1.0] * 30, [1.0] * 10 + [0.0] * 20)[0][-1]
    assert not any(judged([2.3] * 10 + [0.0] * 50, [1.0] * 10 + [0.0] * 50)[0])


def test_what_is_learnt_to_a_loss_of_0_is_no_ignored_input():
    class Judge(nn.Module):
        def forward(self, x, y):
            return x.mean(), {"loss": x.flatten()}

    images = torch.tensor([0.0, 1e-9, 2.0, 0.0, 1e-9, 0.5]).view(6, 1, 1, 1)
    labels = torch.tensor([0, 0, 1, 2, 2, 3])
    scores = train.validation.evaluate(Judge(), [(images, labels)], alone=True)
    assert train.validation.INDEPENDENT not in scores


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adamax, torch.optim.RMSprop])
def test_any_optimizer_moves_weights_without_a_word(struck, monkeypatch, make):
    def adamw(groups, lr, *_, **__):
        return make(groups, lr)

    monkeypatch.setattr(train.prepare.optim, "ClippedAdamW", adamw)
    code, last, _, _ = struck(lambda *_: None, "--max-steps", 60, "--muon")
    assert code == 0 and last["warnings"] == []


def test_images_that_are_the_same_within_a_class_are_no_ignored_input():
    class Judge(nn.Module):
        def __init__(self, looks):
            super().__init__()
            self.looks = looks

        def forward(self, x, y):
            loss = 2.3 + x.flatten() * self.looks
            return loss.mean(), {"loss": loss}

    y = torch.arange(12) // 4
    for looks, noise in ((1, 0.0), (1, 0.1), (0, 0.1)):
        images = (y + noise * torch.rand(12)).view(12, 1, 1, 1)
        scores = train.validation.evaluate(Judge(looks), [(images, y)], alone=True)
        assert (train.validation.INDEPENDENT in scores) == (looks == 0)
