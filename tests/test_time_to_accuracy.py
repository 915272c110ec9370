"""bench/time_to_accuracy.py, with a stand-in for the peer: a file of the same form that learns nothing."""

import json
from functools import partial
from math import isnan

import numpy
import pytest
import torch

from bench import time_to_accuracy

PEER = """
import sys
with open(sys.argv[0]) as f:
    code = f.read()
import torch
@torch.compile
def zeropower(G):
    return G.bfloat16()
class CifarLoader:
    def __init__(self, path, train=True, batch_size=500, aug=None):
        name = f"{path}/{'train' if train else 'test'}.pt"
        data = torch.load(name, map_location=torch.device("cuda"))
        self.images, self.labels = data["images"].flatten(1), data["labels"]
        self.images = self.images.half() / 255
class CifarNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.filter = torch.nn.Linear(3072, 10), torch.nn.Parameter(torch.ones(1, 1, 1, 1))
        for mod in self.modules():
            mod.half()
    def forward(self, images):
        return self.head(images)
def evaluate(model, loader, tta_level=0):
    return (model(loader.images).argmax(1) == loader.labels).float().mean().item() if tta_level == 0 else 0.25
def print_training_details(variables, is_final_entry):
    raise AssertionError("the bench listens instead")
seen = []
def main(run, model):
    train_loader, test_loader = CifarLoader("cifar10", batch_size=2000), CifarLoader("cifar10", train=False)
    seen.append((zeropower(torch.ones(1)).dtype, model.head.weight.dtype, len(train_loader.labels), code[:11]))
    starter, time_seconds, step, total_train_steps = torch.cuda.Event(enable_timing=True), 0.0, 0, 2
    for epoch in range(2):
        starter.record()
        torch.cuda.synchronize()
        time_seconds += 1e-3 * starter.elapsed_time(starter) + 1.5 + epoch
        step += 1
        val_acc = evaluate(model, test_loader)
        print_training_details(locals(), is_final_entry=False)
    tta_val_acc = evaluate(model, test_loader, tta_level=2)
    epoch = "eval"
    print_training_details(locals(), is_final_entry=True)
    return tta_val_acc
"""
OURS = "--model cifarnet-tiny --batch-size 40 --precision fp32 --epochs 1.5"


@pytest.fixture
def peer(tmp_path):
    path = tmp_path / "airbench" / "airbench94_muon.py"
    path.parent.mkdir(parents=True)
    path.write_text(PEER)
    return path


@pytest.fixture
def bench(peer, image_folder, tmp_path, monkeypatch):
    """The bench with these further words, on the stand-in; returns its raw file."""
    monkeypatch.setattr(time_to_accuracy.train.report, "draw_curves", lambda path: None)

    def run(*words, flags=OURS):
        time_to_accuracy.main(["--airbench", str(peer.parent), "--data-dir", str(image_folder), "--device", "cpu",
                               "--results", str(tmp_path), "--flags", flags, *words])  # fmt: skip
        return json.loads(next(tmp_path.glob("*-cpu.json")).read_text())

    return run


def test_the_augmented_views_have_the_peers_weights():
    """A linear network, so that the mean of its logits is its logits of the mean image, drawn here with numpy."""
    torch.manual_seed(0)
    images, net = torch.randn(500, 3, 8, 8), torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 10))
    mean = numpy.zeros((500, 3, 8, 8))
    padded = numpy.pad(images.numpy(), ((0, 0), (0, 0), (1, 1), (1, 1)), mode="reflect")
    for corner, weight in {0: 0.25, 1: 0.5, 2: 0.25}.items():
        view = padded[:, :, corner : corner + 8, corner : corner + 8]
        mean += weight * (view + view[..., ::-1]) / 2
    labels = net(torch.tensor(mean).float()).argmax(1)
    assert time_to_accuracy.tta_accuracy(net, list(zip(images.split(128), labels.split(128), strict=True))) == 100
    assert (net(images).argmax(1) == labels).float().mean() < 0.9  # the plain view alone would not do


def test_the_bench_runs_both_in_turns_and_writes_curves_and_goals(bench):
    raw = bench("--seeds", "2")
    assert raw["bench"] == "time_to_accuracy" and raw["precision"] == "fp32"
    theirs = raw["curves"]["airbench94_muon"]
    assert [[row[:2] for row in curve] for curve in theirs] == [[[1, 1.5], [2, 4.0]]] * 2
    assert all(curve[-1][3] == 25 and isnan(curve[0][3]) for curve in theirs)
    for first, last in raw["curves"]["ours"]:
        assert first[0] == 1 and last[0] == 1.5 and 0 < first[1] < last[1]
        assert all(0 <= accuracy <= 100 for accuracy in first[2:3] + last[2:])
        assert isnan(first[3])  # on a CPU the augmented views wait for the last epoch
    ratios = [a[-1][1] / b[-1][1] for a, b in zip(*raw["curves"].values(), strict=True)]
    assert raw["ratio"]["n"] == 2 and raw["ratio"]["median"] == pytest.approx(sum(ratios) / 2)
    assert raw["goals"]["tta"]["goal"] == 25 and raw["goals"]["tta"]["first"]["airbench94_muon"] == [2, 4.0]
    # The stand-in learns nothing, so it is as good after its first epoch as after its last.
    assert raw["goals"]["plain"]["first"]["airbench94_muon"] == [1, 1.5]


def test_the_goal_is_met_where_the_mean_of_the_seeds_reaches_it_and_the_peers_seconds_are_its_own(capsys):
    ours = [[[1, 2.0, 60.0, float("nan")], [2, 4.0, 91.0, 80.0]], [[1, 3.0, 88.0, float("nan")], [2, 6.0, 89.0, 80.0]]]
    theirs = [[[1, 5.0, 70.0, float("nan")], [2, 10.0, 90.0, 92.0]]] * 2
    goals = time_to_accuracy.report({"ours": ours, "theirs": theirs})["goals"]
    # One seed of ours is below 90 %, and after one epoch their mean is 74: only the mean after two counts.
    assert goals["plain"] == {"goal": 90.0, "first": {"ours": [2, 5.0], "theirs": [2, 10.0]}, "ratio": 0.5}
    assert goals["tta"] == {"goal": 92.0, "first": {"ours": None, "theirs": [2, 10.0]}, "ratio": None}
    said = capsys.readouterr().out
    assert "ours after 2.00 epochs, 5.00 s; theirs after 2.00 epochs, 10.00 s; ratio 0.500" in said
    assert "to 92.00 % tta, where theirs ends: ours MISSES it" in said


def test_the_time_of_a_whole_run_is_the_sum_of_the_medians_of_its_epochs():
    """Round 2 of ours has a slow first epoch, round 3 a slow second one: neither may count."""
    ours = [[[1, 1.0], [2, 3.0]], [[1, 9.0], [2, 11.0]], [[1, 1.0], [2, 8.0]]]
    theirs = [[[1, 2.0], [2, 4.0]]] * 3
    found = time_to_accuracy.report_steps({"ours": ours, "theirs": theirs}, {"ours": 10.0, "theirs": 25.0})
    assert found["whole run"]["ours"] == {"epochs": 2, "seconds": 30.0, "each epoch": [10.0, 20.0]}
    assert found["whole run"]["theirs"]["seconds"] == 100.0 and found["ratio"] == 0.3
    assert found["rounds"]["median"] == 0.8  # whole rounds, slow minutes and all: 0.3, 1.1, 0.8


def test_steps_only_runs_whole_recipes_on_a_few_images_and_writes_a_file_of_its_own(bench, monkeypatch):
    monkeypatch.setattr(time_to_accuracy, "BATCH", 80)  # the folder holds 400 images: 5 batches of 80, 10 of 40
    monkeypatch.setattr(time_to_accuracy, "load", partial(few_images, time_to_accuracy.load))
    raw = bench("--steps-only", "3")
    assert raw["bench"] == "time_to_accuracy_steps" and len(raw["curves"]["ours"]) == 3 and "goals" not in raw
    assert [row[0] for row in raw["curves"]["ours"][0]] == [1, 1.5]  # 2 steps, then 1
    whole = raw["whole run"]
    assert whole["airbench94_muon"]["seconds"] == pytest.approx(4.0 * 5)  # 4 seconds on one batch of five
    ends = [[row[1] for row in curve] for curve in raw["curves"]["ours"]]
    medians = sorted(end[0] for end in ends)[1] + sorted(end[1] - end[0] for end in ends)[1]
    assert whole["ours"]["seconds"] == pytest.approx(medians * 15 / 3)  # 15 steps of a whole run, 3 here
    assert raw["ratio"] == pytest.approx(whole["ours"]["seconds"] / 20)


def few_images(load, folder):
    """What the bench loads, repeated to 400 images to train on."""
    (images, labels), *others = load(folder)
    times = -(-400 // len(labels))
    return (images.repeat(times, 1, 1, 1)[:400], labels.repeat(times)[:400]), *others


@pytest.mark.parametrize("half", [torch.float32, torch.bfloat16])
def test_on_a_cpu_the_peer_computes_in_the_precision_that_was_chosen(peer, half):
    module = time_to_accuracy.import_peer(peer, torch.device("cpu"), half)
    model = time_to_accuracy.peers_model(module, torch.device("cpu"))
    assert {p.dtype for p in model.parameters()} == {half} and module.zeropower(torch.ones(1)).dtype == half


def test_two_runs_change_places_after_every_epoch_with_their_own_random_numbers_and_fail_together():
    cpu, said = torch.device("cpu"), []

    def run(name, epochs, change, fails=False):
        torch.manual_seed(0)
        drawn = []
        for epoch in range(epochs):
            said.append(name)
            drawn.append(torch.rand(1).item())
            if epoch < epochs - 1:
                change()
        if fails:
            raise RuntimeError(f"{name} is out of luck")
        return drawn

    both = time_to_accuracy.in_turns({"a": partial(run, "a", 2), "b": partial(run, "b", 4)}, ["b", "a"], cpu)
    assert "".join(said) == "bababb" and both["a"] == both["b"][:2] and len(set(both["b"])) == 4
    for unlucky in "ab":
        runs = {name: partial(run, name, 2 if name == unlucky else 9, fails=name == unlucky) for name in "ab"}
        with pytest.raises(RuntimeError) as caught:
            time_to_accuracy.in_turns(runs, ["a", "b"], cpu)
        told = {str(error) for error in (caught.value, caught.value.__context__) if error}
        assert f"{unlucky} is out of luck" in told


def test_a_peer_that_is_missing_or_has_changed_is_refused(peer, capsys):
    cpu = torch.device("cpu")
    with pytest.raises(SystemExit, match=r"git clone https://github\.com/KellerJordan/cifar10-airbench"):
        time_to_accuracy.import_peer(peer.with_name("other.py"), cpu)
    peer.write_text(PEER.replace("mod.half()", "mod.to('cuda')"))
    with pytest.raises(SystemExit, match=r"has changed: it does not contain 'mod\.half\(\)'"):
        time_to_accuracy.import_peer(peer, cpu)
    peer.write_text(PEER.replace("CifarNet", "Network"))
    with pytest.raises(SystemExit, match="it has no CifarNet"):
        time_to_accuracy.import_peer(peer, cpu)
    with pytest.raises(SystemExit):
        time_to_accuracy.main(["--airbench", str(peer.parent), "--device", "cuda", "--steps-only", "3"])
    assert "--steps-only is for a CPU" in capsys.readouterr().err
