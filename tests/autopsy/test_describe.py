"""`--describe`: each fact is told with its line, and the script does what it does without.

What is expected was written down from the scripts, not from what was printed.
"""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from helpers import HIDDEN, ROOT, needs_unix, run_script

from bench.scripts import lines_of

LOOP = """
import sys
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)  # seed

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.again, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.aside = nn.Linear(2, 2)

    def forward(self, x):
        h = self.again(self.again(torch.relu(self.first(x))))
        h = F.dropout(h, 0.1, training=True)  # drop
        return self.head(h)

net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.25)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
loader = DataLoader(TensorDataset(torch.randn(40, 6), torch.arange(40) % 3), batch_size=8)
for epoch in range(4):
    for k, (x, y) in enumerate(loader):  # loader
        logits = net(x)
        other = F.mse_loss(logits.mean(1), logits.new_zeros(8))  # idle
        loss = F.cross_entropy(logits, y) + 0.5 * logits.detach().square().mean()  # loss
        loss.backward()  # backward
        if k % 2:
            nn.utils.clip_grad_norm_(net.parameters(), 100.0)  # clip
            optimizer.step()  # step
            scheduler.step()  # rate
            optimizer.zero_grad()  # clear
    torch.save({"net": net.state_dict(), "epoch": epoch}, "last.pt")  # save
    net.eval()
    with torch.no_grad():
        net(3 * torch.ones(5, 6))  # evaluation
    net.train()
print(float(loss).hex(), torch.rand(1).item())
sys.exit(0)
"""
ATTENTION = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 20)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
        self.rnn = nn.GRU(8, 8, batch_first=True)

    def forward(self, ids):
        h = self.layer(self.emb(ids))
        return self.head(self.rnn(h)[0])

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(4):
    ids = torch.randint(20, (6, 9))
    ids[:, 5:] = 0
    logits = net(ids)
    weights = logits[..., 0] * logits[:, :1, :1]  # wide
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()) + weights.mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


def described(folder, script, *args, through=HIDDEN):
    """(exit code, standard output, the lines of the description without their indentation)"""
    (folder / "script.py").write_text(script)
    command = [*through, ROOT / "autopsy", "--describe", folder / "script.py", *args]
    code, out, err = run_script(command, folder)
    assert "failed" not in err and "Traceback" not in err, err
    _, found, description = err.partition("what this run did, to compare with what was meant\n")
    assert found, err
    return code, out, [line.strip() for line in description.splitlines()]


@pytest.fixture(scope="module")
def loop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loop")
    code, out, lines = described(folder, LOOP)
    assert code == 0
    bare = run_script([*HIDDEN, folder / "script.py"], folder)
    assert bare[0] == 0 and bare[1] == out, "the figures are those without"
    return lines


def at(mark, script=LOOP):
    """The line, as it is told first."""
    return f"script.py{on(mark, script)}"


def on(mark, script=LOOP):
    """The line, after another one of the file."""
    (line,) = lines_of(script, mark)
    return f":{line}"


def test_the_order_of_calls_is_told_with_what_is_left_over(loop):
    """Five batches an epoch, two for a step: one is over, and goes into the next epoch's step."""
    step = f"clip to 100 {on('clip')}, AdamW.step() {on('step')}"
    after = f"CosineAnnealingLR.step() {at('rate')}, zero_grad() {on('clear')}"
    (usual,) = [line for line in loop if line.startswith("4 times, up to a step of AdamW: ")]
    assert usual.endswith(f": {after}, backward() {on('backward')} x 2, {step}")
    (epoch,) = [line for line in loop if line.startswith("3 times, up to a step of AdamW: ")]
    for part in (
        f"torch.save({{net, epoch}}) {on('save')}",
        "eval()",
        "train()",
        f"net (Net) in eval mode without a graph {on('evaluation')}",
        f"iter(DataLoader) {on('loader')}",
    ):
        assert part in epoch
    assert f"backward() {on('backward')} x 3" not in epoch
    (last,) = [line for line in loop if line.startswith("after that: ")]
    assert f"backward() {on('backward')}" in last and "AdamW.step()" not in last
    assert any(f"seed of torch {at('seed')}" in line for line in loop)


def test_the_data_the_rates_and_the_weights_are_told(loop):
    text = "\n".join(loop)
    assert (
        "DataLoader of TensorDataset (40 samples), batches of 8, SequentialSampler, "
        f"drop_last=False, 0 workers; 4 iterators ({at('loader')})"
    ) in text
    assert "net (Net) is called 20 times with a graph in train mode; 5 of 20 inputs differ" in text
    assert "net (Net) is called 4 times without a graph in eval mode; 1 of 4 inputs differ" in text
    assert re.search(rf"AdamW at {at('step')}: 8 steps; 8 weights, weight_decay 0.25, ", text)
    assert re.search(r"lr .*, 0 to 0.1, rises [23] times", text)
    assert "0 of 8 clips cut it" in text
    assert "2 weights have not moved: net.aside.weight, net.aside.bias" in text


def test_a_step_is_told_by_its_terms_and_what_is_in_none(loop):
    text = "\n".join(loop)
    assert f"(cross_entropy at {at('loss')}) + 0.5 * " in text
    assert f"(mean at {at('loss')}) without a gradient" in text
    assert re.search(r"gradient norm of each term: [\d.]+, 0\b", text)
    assert "has weights, and is not called in this step: net.aside" in text
    assert "called in one call of its network: net.again (Linear) 2 times" in text
    assert "linear after linear, with no nonlinearity: net.again -> net.again" in text
    assert f"computed, and in no loss: mse_loss at {at('idle')}, float32[]" in text
    assert f"the graph ends, and its numbers are used: detach at {at('loss')}" in text
    assert "target int64[8], 3 values in 0 .. 2, 0 is 38% of them" in text
    assert "of the result depends on" not in text, "each row on itself"


BY_HAND = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)

    def forward(self, x, hint):
        return self.layer(torch.cat([x, hint], 1))

def make_step(optimizer, loss):
    optimizer.zero_grad(); loss.backward()
    optimizer.step()  # both

torch.manual_seed(0)
net, critic = Net(), torch.nn.Linear(4, 1)
optimizers = [torch.optim.SGD(module.parameters(), 0.1) for module in (net, critic)]
for step in range(4):
    x, y = torch.randn(6, 4), torch.ones(6, 4)
    error = net(x, y) - y
    values = critic(x)
    make_step(optimizers[0], error.square().mean())  # by hand
    loss = torch.nn.functional.smooth_l1_loss(values[:-1], 0.9 * values[1:])  # moving
    make_step(optimizers[1], loss)
"""


def test_what_a_loss_compares_is_told_with_where_it_comes_from(tmp_path):
    lines = described(tmp_path, BY_HAND)[2]
    (by_hand,) = [line for line in lines if line.startswith("mean <- square <- sub of ")]
    assert " <- linear; and float32[6, 4], all 1, which net (Net) is given too" in by_hand
    called = f"smooth_l1_loss at {at('moving', BY_HAND)}"
    (k,) = [k for k, line in enumerate(lines) if line.startswith(called)]
    given, target = lines[k + 1 : k + 3]
    assert given.startswith("input float32[5, 1], ") and given.endswith(" <- linear")
    assert target.startswith("target float32[5, 1], ") and target.endswith(
        " <- mul <- linear, and it has a gradient, too"
    )
    both = f"step 2 (from 0) of SGD at {at('both', BY_HAND)}, made once more"
    assert f"{both} (with net.layer.weight)" in lines
    assert f"{both} (with critic.weight)" in lines


def test_an_evaluation_is_told_by_what_it_is_given_and_what_drops(loop):
    assert f"net (Net) in eval mode at {at('evaluation')} is given float32[5, 6], all 3" in loop
    assert f"it drops in eval mode at {at('drop')}" in loop


def test_rows_places_and_shapes_are_told(tmp_path):
    """The encoder's layer takes dimension 0 for places: so rows of the batch are mixed."""
    text = "\n".join(described(tmp_path, ATTENTION)[2])
    assert "row 1 of the result depends on all 6 rows" in text
    assert "place 4 of 9 in dimension 1 depends on places 0 to 4" in text
    assert "with batch_first=False is given [6, 9, 8]: 9 samples of 6 positions" in text
    assert (
        "net.rnn (GRU) with batch_first=True is given [6, 9, 8]: 6 samples of 9 positions" in text
    )
    wide = f"mul at {at('wide', ATTENTION)} of [6, 9] and [6, 1, 1] is [6, 6, 9]"
    assert f"larger than what it is made of: {wide}" in text
    assert re.search(r"target int64\[54\], \d+ values in 0 .. 1\d, 0 is [45]\d% of them", text)


NEXT = """
import torch

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
text = torch.arange(200).remainder(50)
for step in range(4):
    x = torch.stack([text[k : k + 10] for k in range(8)])
    y = torch.stack([text[k + 1 : k + 11] for k in range(8)])
    loss = torch.nn.functional.cross_entropy(net(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


def test_how_a_target_lies_beside_what_a_network_is_given_is_told(tmp_path):
    text = "\n".join(described(tmp_path, NEXT)[2])
    words = "of the target 100% are the next number of what net (Sequential) is given, 0% the same"
    assert f"{words}, 0% the one before" in text
    others = NEXT.replace("text[k + 1 : k + 11]", "text[k : k + 10]")
    text = "\n".join(described(tmp_path, others)[2])
    assert "of the target 0% are the next number" in text and "given, 100% the same" in text


MIXED = """
import gc
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(1, 6, 6))
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x):
        x = self.body(x) + self.table  # table
        x = x.view(4, 3, 6, 2).reshape(4, 6, 6, 1)  # mixed
        return self.head(x.flatten(2).transpose(1, 2))

torch.manual_seed(0)
net, frozen = Net(), nn.Linear(6, 6).requires_grad_(False)
data = TensorDataset(torch.randn(40, 6, 6), torch.arange(240).view(40, 6) % 4)
optimizer = torch.optim.SGD([{"params": [p]} for p in net.parameters()], 0.1)
for phase in range(2):
    for x, y in DataLoader(Subset(data, range(16)), batch_size=4):  # train
        logits = net(frozen(x))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=0)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    for x, y in DataLoader(Subset(data, range(16, 40)), batch_size=8):  # test
        pass
    del optimizer
    gc.collect()
    optimizer = torch.optim.SGD(net.head.parameters(), 0.1)
"""


def test_dimensions_tables_groups_and_data_sets_are_told(tmp_path):
    text = "\n".join(described(tmp_path, MIXED)[2])
    mixed = f"reshape at {at('mixed', MIXED)} of [4, 3, 6, 2] is [4, 6, 6, 1]"
    assert f"{mixed}, whose dimension 2 is another 6" in text
    table = f"net.table, [1, 6, 6] to [4, 6, 6] ({at('table', MIXED)})"
    assert f"added with broadcasting: {table}" in text
    assert "SGD at" in text and "4 groups of 1 weights" in text
    assert "frozen (Linear) is called 8 times without a graph in train mode" in text
    test, train = at("test", MIXED), at("train", MIXED)
    assert f"2 iterators ({test}, of the data set of {train})" in text
    assert "ignore_index=0 leaves out 6 of 24" in text
    assert "in no optimizer, and not moved: frozen.bias, frozen.weight" in text, (
        "an optimizer that is gone counts"
    )


PENALTY = """
import torch

def sample(actor, critic):
    return actor, critic

def penalty(net, x, share, scale):
    share = torch.rand(len(x), 1)  # hidden
    left, right = sample(1, 2)  # right
    part = x.detach().mean()  # thrown away
    part = x * share
    part.requires_grad = True
    slope = torch.autograd.grad(net(part).sum(), part, create_graph=True)[0]  # slope
    return slope.norm(dim=0).mean() * left  # rows

torch.manual_seed(0)
networks = {name: torch.nn.Linear(4, 1) for name in ("first", "second")}
optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in networks.values()]
for step in range(4):
    x = torch.randn(8, 4)
    losses = [net(x).square().mean() + 2 * penalty(net, x, 0.5, 1.0) for net in networks.values()]
    for optimizer, loss in zip(optimizers, losses):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def test_what_is_never_read_is_told_and_a_loss_of_another_step_is_no_idle_one(tmp_path):
    lines = described(tmp_path, PENALTY)[2]
    text = "\n".join(lines)
    (unread,) = [line for line in lines if line.startswith("set or given, and never read: ")]
    for part in (
        f"the argument share, set anew, in penalty ({at('hidden', PENALTY)})",
        "the argument scale in penalty (script.py:7)",
        f"right in penalty ({at('right', PENALTY)})",
        f"part is set, and set again unread ({at('thrown away', PENALTY)})",
    ):
        assert part in unread
    assert unread.count("; ") == 3, unread
    assert f"autograd.grad(create_graph=True) {on('slope', PENALTY)} x 2" in text
    rows = f"over dimension 0, that of the samples: norm at {at('rows', PENALTY)} of [8, 4]"
    assert text.count(rows) == 2
    assert text.count("2 * ") == 2 and "cannot be made again" not in text
    assert "computed, and in no loss" not in text


TARGETS = """
import sys
import torch
from torch import nn

assert sys.gettrace() is None, "no debugger"

def follow(target, net):
    for a, b in zip(target.parameters(), net.parameters()):
        a.data.lerp_(b.data, 0.1)

class Data:
    def draw(self, n):
        if n < 0:
            raise ValueError(n)
        if n > 100:  # many
            n = 100
        return torch.randn(n, 4)

torch.manual_seed(0)
data = Data()
net, fast, slow = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
for target in (fast, slow):
    target.load_state_dict(net.state_dict())
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(12):
    x = data.draw(6)
    with torch.no_grad():
        goal = fast(x) + slow(x)
    loss = (net(x) - goal).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    if step >= 0:  # always
        follow(fast, net)
    else:
        follow(net, fast)
    while step == 10.5:  # never
        step += 1
    if step / 5 == 2.5:  # divided
        follow(slow, net)
"""


def test_what_never_ran_and_what_never_moved_is_told(tmp_path):
    text = "\n".join(described(tmp_path, TARGETS)[2])
    assert "in no optimizer, and not moved: slow.bias, slow.weight" in text
    assert "in no optimizer: fast.bias, fast.weight" in text
    for mark, words in (
        ("many", "`if n > 100` ({}) was never true, 12 times"),
        ("always", "`if step >= 0` ({}) was always true, 12 times"),
        ("never", "`while step == 10.5` ({}) never began, 12 times"),
        ("divided", "`if step / 5 == 2.5` ({}) was never true, 12 times"),
    ):
        assert words.format(at(mark, TARGETS)) in text
    assert "if n < 0" not in text, "an error that was not raised"


WORKERS = """
import torch
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __init__(self, change=None):
        self.x, self.change = torch.randn(12, 4), change

    def __len__(self):
        return 12

    def __getitem__(self, k):
        row = self.x[k]
        if self.change is not None:  # in workers
            row = self.change(row)
        if k > 100:  # nowhere
            row = -row
        return row

torch.manual_seed(0)
net = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
test = DataLoader(Rows(), batch_size=6)
for x in test:
    net(x)
for x in DataLoader(Rows(torch.neg), batch_size=2, num_workers=2):
    loss = net(x).square().mean() - 5
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


@needs_unix
def test_what_runs_in_workers_alone_is_no_branch_that_never_ran(tmp_path):
    text = "\n".join(described(tmp_path, WORKERS, through=[])[2])
    assert f"`if k > 100` ({at('nowhere', WORKERS)}) was never true, 12 times" in text
    assert at("in workers", WORKERS) not in text


SPAWNED = """
import torch
from torch.utils.data import DataLoader, TensorDataset

def main(**workers):
    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for (x,) in DataLoader(TensorDataset(torch.randn(8, 4)), 2, **workers):
        loss = net(x).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        if loss > 100:
            print(loss)

if __name__ == "__main__":
    main(num_workers=1, multiprocessing_context="spawn")
"""


def test_of_workers_that_are_no_forks_no_branch_is_told(tmp_path):
    assert "was never true" not in "\n".join(described(tmp_path, SPAWNED)[2])
    alone = SPAWNED.replace('num_workers=1, multiprocessing_context="spawn"', "")
    assert "`if loss > 100` (script.py:11) was never true" in "\n".join(
        described(tmp_path, alone)[2]
    )


def test_a_loss_is_told_with_its_sign(tmp_path):
    text = "\n".join(described(tmp_path, WORKERS.replace(", num_workers=2", ""))[2])
    assert re.search(r"loss -4\.\S+ at first, -4\.\S+ at the end, -4\.\S+ to -[34]\.", text)


SAMPLER = """
import torch
net = torch.nn.Bilinear(2, 1, 2)
opt = torch.optim.Adam(net.parameters())
for i in range(6):
    x, t = torch.rand(8, 2), torch.arange(1, 9).view(8, 1) / 8
    opt.zero_grad(); net(x, t).square().mean().backward(); opt.step()
net.eval()
with torch.no_grad():
    net(torch.rand(8, 2), torch.full((8, 1), 8.0))
"""


def test_other_numbers_in_an_evaluation_than_in_training_are_told(tmp_path):
    lines = described(tmp_path, SAMPLER)[2]
    (told,) = [line for line in lines if line.startswith("tensor ")]
    assert told == "tensor 1 (from 0) holds 8; in the step above 0.125 .. 1"


@needs_unix
def test_a_run_that_is_interrupted_is_described(tmp_path):
    (tmp_path / "script.py").write_text(LOOP.replace("range(4)", "range(10**9)"))
    command = [sys.executable, ROOT / "autopsy", "--describe", "script.py"]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as run:
        while not (tmp_path / "last.pt").exists():
            assert run.poll() is None
            time.sleep(0.1)
        run.send_signal(signal.SIGINT)
        _, err = run.communicate()
    assert "KeyboardInterrupt" in err and f"AdamW at {at('step')}: " in err


def test_a_bad_number_is_a_report_as_ever(tmp_path):
    script = LOOP.replace("loss.backward()", "(loss * (nan if epoch else 1.0)).backward()")
    (tmp_path / "script.py").write_text("from math import nan\n" + script)
    code, _, err = run_script([*HIDDEN, ROOT / "autopsy", "--describe", "script.py"], tmp_path)
    assert code == 3 and "what this run did" not in err
