"""bench/time_to_accuracy.py, with a stand-in for the peer: 20 lines of the same form that learn a linear classifier."""

import json
from functools import partial
from math import isnan

import numpy
import pytest
import torch

from bench import time_to_accuracy

PEER = """
import torch
hyp = {"opt": {"train_epochs": 2.0}, "net": {"tta_level": 2}}
dtypes = (torch.half, torch.float)
class CifarLoader:
    def __init__(self, path, train=True, gpu=0):
        data = torch.load(f"{path}/{'train' if train else 'test'}.pt", map_location=torch.device(gpu))
        self.images, self.labels = data["images"].flatten(1), data["labels"]
        self.images = self.images.half() / 255
def evaluate(model, loader, tta_level=0):
    return (model(loader.images).argmax(1) == loader.labels).float().mean().item() if tta_level == 0 else 0.25
def print_training_details(variables, is_final_entry):
    raise AssertionError("the bench listens instead")
def main(run):
    train_loader, test_loader = CifarLoader("cifar10"), CifarLoader("cifar10", train=False)
    net = torch.nn.Linear(3072, 10)
    model = net.half().cuda()
    starter, ender, total_time_seconds = torch.cuda.Event(enable_timing=True), None, 0.0
    for epoch in range(int(hyp["opt"]["train_epochs"])):
        starter.record()
        torch.cuda.synchronize()
        total_time_seconds += 1e-3 * starter.elapsed_time(starter) + 1.5
        val_acc = evaluate(model, test_loader)
        print_training_details(locals(), is_final_entry=False)
    print_training_details(locals(), is_final_entry=True)
"""


@pytest.fixture
def peer(tmp_path):
    path = tmp_path / "airbench" / "legacy" / "airbench94.py"
    path.parent.mkdir(parents=True)
    path.write_text(PEER)
    return path


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


def test_the_bench_runs_both_and_writes_curves_and_goals(peer, image_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(time_to_accuracy.train.report, "draw_curves", lambda path: None)
    monkeypatch.setitem(time_to_accuracy.GOALS, "the JPEG copy", {"plain": 0.0, "tta": 100.1})
    time_to_accuracy.main([
        "--airbench", str(peer.parent.parent), "--data-dir", str(image_folder), "--device", "cpu", "--seeds", "2",
        "--results", str(tmp_path), "--flags", "--model cifarnet-tiny --batch-size 40 --precision fp32 --epochs 1.5",
    ])  # fmt: skip
    raw = json.loads((tmp_path / "time_to_accuracy-cpu.json").read_text())
    assert [[row[:2] for row in curve] for curve in raw["curves"]["airbench94"]] == [[[1, 1.5], [2.0, 3.0]]] * 2
    assert all(curve[-1][3] == 25 for curve in raw["curves"]["airbench94"])
    for (first, last), theirs in zip(raw["curves"]["ours"], raw["curves"]["airbench94"], strict=True):
        assert first[0] == 1 and last[0] == 1.5 and first[1] / last[1] == pytest.approx(10 / 15)
        assert all(0 <= accuracy <= 100 for accuracy in first[2:3] + last[2:] + theirs[-1][2:])
        assert isnan(first[3])  # on a CPU the augmented views wait for the last epoch
    ratios = [a[-1][1] / b[-1][1] for a, b in zip(*raw["curves"].values(), strict=True)]
    assert raw["ratio"]["n"] == 2 and raw["ratio"]["median"] == pytest.approx(sum(ratios) / 2)
    assert [goal["met"] for goal in raw["goals"].values()] == [True, True, False, False]
    assert raw["goals"]["airbench94, 0.0 % plain"]["first"] == [[1, 1.5]] * 2


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


def test_a_peer_that_is_missing_or_has_changed_is_refused(peer):
    cpu = torch.device("cpu")
    with pytest.raises(SystemExit, match=r"git clone https://github\.com/KellerJordan/cifar10-airbench"):
        time_to_accuracy.import_peer(peer.with_name("other.py"), cpu)
    peer.write_text(PEER.replace("net.half().cuda()", "net.to('cuda')"))
    with pytest.raises(SystemExit, match=r"has changed: it does not contain 'net\.half\(\)\.cuda\(\)'"):
        time_to_accuracy.import_peer(peer, cpu)
    peer.write_text(PEER.replace("hyp", "settings"))
    with pytest.raises(SystemExit, match="it has no hyp"):
        time_to_accuracy.import_peer(peer, cpu)
