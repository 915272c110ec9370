"""bench/time_to_accuracy.py, with stand-ins for the peers: of their form, learning nothing."""

import json
import types
from math import isnan, nan

import pytest
import torch

from bench import time_to_accuracy as bench

CPU = torch.device("cpu")
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
        self.head = torch.nn.Linear(3072, 10)
        for mod in self.modules():
            mod.half()
    def forward(self, images):
        return self.head(images)
def evaluate(model, loader, tta_level=0):
    hits = (model(loader.images).argmax(1) == loader.labels).float().mean().item()
    return hits if tta_level == 0 else 0.25
def print_training_details(variables, is_final_entry):
    raise AssertionError("the bench listens instead")
def main(run, model):
    train_loader, test_loader = CifarLoader("cifar10"), CifarLoader("cifar10", train=False)
    starter, time_seconds = torch.cuda.Event(enable_timing=True), 0.0
    step, total_train_steps = 0, 2
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
# As hiverge's: it prints at its end alone, and its clock counts the views.
HIVERGE = (
    PEER[: PEER.index("def main")]
    + """
@torch.compile(fullgraph=True)
def zeropower(gradients: list[torch.half]):
    return gradients
def main(run, model):
    train_loader, test_loader = CifarLoader("cifar10"), CifarLoader("cifar10", train=False)
    buffer = torch.zeros(2, dtype=torch.half, device='cpu').pin_memory()
    indices = torch.empty(2, device="cuda")
    @torch.compile(mode="max-autotune", fullgraph=True)
    def forward_step(images):
        return model(images.to(buffer.dtype))
    forward_step(train_loader.images[:2])
    step, starter = 3, torch.cuda.Event(enable_timing=True)
    starter.record()
    tta_val_acc = evaluate(model, test_loader, tta_level=2)
    ender = torch.cuda.Event(enable_timing=True)
    ender.record()
    torch.cuda.synchronize()
    time_seconds = 7 + 1e-3 * starter.elapsed_time(ender)
    val_acc = evaluate(model, test_loader)
    print_training_details(locals(), is_final_entry=True)
"""
)
SIZED = """
    def __len__(self):
        return 2
class CifarNet"""
HIVERGE = HIVERGE.replace("\nclass CifarNet", SIZED)


@pytest.fixture
def peer(tmp_path, monkeypatch):
    monkeypatch.setattr(bench.train.report, "draw_curves", lambda path: None)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "peers" / "airbench94_muon.py"
    path.parent.mkdir(parents=True)
    path.write_text(PEER)
    path.with_name("cifar10_speedrun.py").write_text(HIVERGE)
    return path


def test_the_views_have_the_peers_weights_and_hiverges_are_of_the_unsure_quarter():
    """A linear network: the mean of its logits is its logits of the mean image."""
    torch.manual_seed(0)
    images = torch.randn(600, 3, 8, 8)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 10))
    padded = torch.nn.functional.pad(images.double(), [1, 1, 1, 1], mode="reflect")
    views = [padded[..., corner : corner + 8, corner : corner + 8] for corner in range(3)]
    both = [(view + view.flip(3)) / 2 for view in views]
    labels = net((both[0] / 4 + both[1] / 2 + both[2] / 4).float()).argmax(1)
    assert bench.accuracies(net, [(images, labels)])["tta"] == 100

    plain = net(images)
    unsure = plain.softmax(1).amax(1).argsort()[:150]
    labels = plain.argmax(1)
    labels[unsure] = net((sum(both) / 3).float()).argmax(1)[unsure]
    batches = list(zip(images.split(400), labels.split(400), strict=True))
    assert bench.accuracies(net, batches)["gated"] == 100


@pytest.fixture
def raw_file(tmp_path):
    return tmp_path / "time_to_accuracy-cpu.json"


@pytest.fixture
def measure(peer, image_folder, raw_file):
    """measure(seeds, epochs, flag of a peer): a bench of a few steps, and what it writes."""

    def go(seeds, epochs="1", flag="--airbench"):
        bench.main(
            [
                flag,
                str(peer.parent),
                "--data-dir",
                str(image_folder),
                "--device",
                "cpu",
                "--results",
                str(raw_file.parent),
                "--seeds",
                seeds,
                "--epochs",
                epochs,
                "--flags",
                "--model cifarnet-tiny --batch-size 50 --precision fp32",
            ]
        )
        return json.loads(raw_file.read_text())

    return go


def test_the_bench_runs_both_in_turns_and_writes_curves_and_goals(measure):
    raw = measure("2", "1.5")
    theirs = raw["curves"]["airbench"]
    assert [[row[:2] for row in curve] for curve in theirs] == [[[1, 1.5], [2, 4.0]]] * 2
    for first, last in raw["curves"]["ours"]:
        assert first[0] == 1 and last[0] == 1.5 and 0 < first[1] < last[1]
        assert isnan(first[3]) and 0 <= last[3] <= 100  # augmented after the last epoch alone
    beside = raw["beside"]["airbench"]
    assert beside["ratio"]["n"] == 2 and beside["goals"]["tta"]["goal"] == 25
    assert "gated" not in beside["goals"]  # these views are hiverge's
    # The stand-in learns nothing, so it is as good after its first epoch as after its last.
    assert beside["goals"]["plain"]["first"]["airbench"] == [1, 1.5]


def test_hiverges_seconds_are_of_training_alone(measure, peer):
    ended = measure("1", flag="--hiverge")["curves"]["hiverge"][0]
    [[epochs, seconds, plain, tta, gated]] = ended
    assert epochs == 1.5 and seconds == pytest.approx(7, abs=1e-3)  # its clock: and the views
    assert 0 <= plain <= 100 and isnan(tta) and gated == 25


def test_a_bench_that_is_cut_short_keeps_its_runs_and_goes_on(measure, raw_file, monkeypatch):
    run, seeds = bench.run_peer, []

    def stopped(*args):
        seeds.append(args[-1])
        if len(seeds) == limit:
            raise KeyboardInterrupt
        return run(*args)

    monkeypatch.setattr(bench, "run_peer", stopped)
    limit = 3  # the warm-up, then seed 0; seed 1 is the peer's turn first
    with pytest.raises(KeyboardInterrupt):
        measure("2")
    cut = json.loads(raw_file.read_text())
    assert cut["unfinished"]
    assert {name: len(curve) for name, curve in cut["curves"].items()} == {"ours": 1, "airbench": 1}
    assert cut["beside"]["airbench"]["ratio"]["n"] == 1  # a figure of its own
    limit = 0
    seeds.clear()
    whole = measure("2")
    assert seeds == [0, 1]  # the warm-up, and what was missing
    assert whole["curves"]["ours"][0] == cut["curves"]["ours"][0]
    assert whole["beside"]["airbench"]["ratio"]["n"] == 2
    assert "unfinished" not in whole


def test_the_clock_is_read_when_the_device_has_done_its_work(measure, monkeypatch):
    """A device that needs another thousand seconds whenever it is waited for."""
    waits = []

    def now():
        return 1000.0 * len(waits)

    monkeypatch.setattr(bench.record, "wait", waits.append)
    clock = types.SimpleNamespace(perf_counter=now, time=now)
    monkeypatch.setattr(bench.train, "time", clock)
    first, last = measure("1", "2")["curves"]["ours"][0]
    assert first[1] == 1000  # the wait at the end of its epoch
    assert last[1] == 2000


def test_the_goal_is_met_where_the_mean_of_the_seeds_reaches_it(capsys):
    ours = [
        [[1, 2.0, 60.0, nan, nan], [2, 4.0, 91.0, 80.0, 85.0]],
        [[1, 3.0, 88.0, nan, nan], [2, 6.0, 89.0, 80.0, 85.0]],
    ]
    theirs = [[[1, 5.0, 70.0, nan, nan], [2, 10.0, 90.0, 92.0, nan]]] * 2
    goals = bench.report({"ours": ours, "theirs": theirs})["theirs"]["goals"]
    # One seed of ours is below 90 %, and after one epoch their mean is 74.
    first = {"ours": [2, 5.0], "theirs": [2, 10.0]}
    assert goals["plain"] == {"goal": 90.0, "first": first, "ratio": 0.5}
    assert goals["tta"]["first"]["ours"] is None and goals["tta"]["ratio"] is None
    assert "to 92.00 % tta: ours MISSES it" in capsys.readouterr().out


def test_a_peer_computes_in_the_precision_that_was_chosen_and_a_changed_one_is_refused(peer):
    airbench, folder = bench.PEERS["airbench"], peer.parent
    for half in (torch.float32, torch.bfloat16):
        module = bench.import_peer(airbench, folder, CPU, half)
        assert {p.dtype for p in bench.peers_model(module, CPU).parameters()} == {half}
        assert module.zeropower(torch.ones(1)).dtype == half
    with pytest.raises(SystemExit, match="git clone"):
        bench.import_peer(airbench, folder / "other", CPU, half)
    peer.write_text(PEER.replace("mod.half()", "mod.to('cuda')"))
    with pytest.raises(SystemExit, match=r"has changed: without 'mod\.half\(\)'"):
        bench.import_peer(airbench, folder, CPU, half)
