"""`python autopsy SCRIPT`: the same figures as without it, and each planted fault is named."""
import math
import os
import re
import subprocess
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import rows_of, run_ranks

from autopsy import script as tool
from autopsy.ledger import Ledger
from bench import finite_faults

ROOT = Path(__file__).parent.parent
PREAMBLE = """
import sys, torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
fault = sys.argv[1] if len(sys.argv) > 1 else ""
"""
CLASSIFIER = PREAMBLE + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        h = self.body(x)  # the first layer
        if fault == "root" and step == 3:
            h = h + (h * 0).sqrt()  # root
        if fault == "division" and step == 3:
            h = h / (h * 0)  # division
        if fault == "masked row" and step == 3:
            scores = h.masked_fill(torch.arange(len(h))[:, None] == 2, -torch.inf)
            h = h * scores.softmax(1)  # masked row
        if fault == "evaluation" and not self.training:
            h = h.log()  # evaluation
        return self.head(h)

net = Net()
half = torch.float16 if fault == "fp16" else torch.bfloat16
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=0 if fault == "eps" else 1e-8)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
losses, targets = [], torch.randn(6, 4)
try:
    for step in range(6):
        for micro_batch in range(2):
            x = torch.randn(6, 8)
            if fault == "eps":
                x[:, 0] = 0
            if fault == "target" and step == 3:
                targets = targets.clone(); targets[4] = torch.nan  # target
            if fault == "input" and step == 3:
                x[2, 1] = torch.nan  # input
            with torch.autocast("cpu", half, enabled=fault in ("fp16", "bf16")):
                if fault == "fp16" and step == 3:
                    out = net.head(F.linear(net.body(x), torch.eye(16) * 6e4))  # fp16
                elif fault == "bf16" and step == 3:
                    out = net.head((net.body(x).bfloat16() + 1) * 1e30).square()  # bf16
                else:
                    out = net(x)
            loss = F.mse_loss(out.float(), targets)  # the loss
            if fault == "leaves" and step == 3:
                loss = loss.log1p() * torch.inf  # leaves
                if not torch.isfinite(torch.tensor(loss.item())):
                    sys.exit("Loss is not finite, stopping training")
            (loss / 2).backward()
        if step == 3 and fault:
            print("before", *(t.double().sum().item().hex() for t in net.state_dict().values()))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        print(step, loss.item().hex())
finally:
    print("after", *(t.double().sum().item().hex() for t in net.state_dict().values()))
with torch.no_grad():
    net.eval()
    print(net(torch.randn(3, 8)).sum().item().hex())
"""


def fits_a_screen(err, folder):
    """Every report of this page: at most 12 rows, and the file holds all of it."""
    for shown, path in re.findall(r"^autopsy: (.* -> (?:.*\n)+?)  all of it: (.*)", err, re.M):
        assert rows_of(f"autopsy: {shown}  all of it: {path}") <= 12, shown
        kept = (folder / path).read_text().splitlines()
        assert set(shown.splitlines()) <= set(kept), shown


@pytest.fixture
def run(tmp_path):
    """Runs a script with and without the watch: code, out, err. A fork needs no import of torch."""
    def go(text, *args, watched=True, before=()):
        (tmp_path / "script.py").write_text(text)
        argv = ["script.py", *map(str, args)]
        if (child := os.fork()) == 0:
            code = 70
            try:
                os.chdir(tmp_path)
                for number, name in ((1, "out"), (2, "err")):
                    sys.stdout.flush()
                    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                    os.dup2(file, number)
                sys.stdout = os.fdopen(1, "w", closefd=False)
                sys.stderr = os.fdopen(2, "w", closefd=False)
                sys.path.insert(0, str(tmp_path))
                torch.set_num_threads(1)
                sys.argv = ["autopsy", *before, *argv]
                sys.orig_argv = [sys.executable, str(ROOT / "autopsy"), *before, *argv]
                code = tool.main() if watched else tool.run_script(argv) or 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1 if end.code else 0
            except BaseException:
                code = 1
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out, err = ((tmp_path / name).read_text() for name in ("out", "err"))
        fits_a_screen(err, tmp_path)
        return SimpleNamespace(returncode=code, stdout=out, stderr=err)

    return go


def ranks(folder, text, *args, watched=True):
    """The same on two ranks."""
    (folder / "script.py").write_text(text)
    files = [ROOT / "autopsy", "script.py"] if watched else ["script.py"]
    codes, outs, errs = zip(*run_ranks([*files, *args], folder), strict=True)
    return SimpleNamespace(returncode=max(codes), stdout="".join(outs), stderr="".join(errs))


def process(folder, text, *args, launcher=(), watched=True, name="script.py"):
    """The same as a process of its own."""
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    module = ["-m", name.removesuffix(".py").replace("/", ".")]
    command = [sys.executable, *launcher, *([str(ROOT / "autopsy")] if watched else []),
               *(module if "/" in name else [name]), *args]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})


def line_of(text, mark):
    return next(n for n, line in enumerate(text.splitlines(), 1) if re.search(f"# .*{mark}", line))


def named(done, text, mark, verdict, runs=1):
    assert done.returncode == 3, done.stderr
    assert f"-> {verdict}" in done.stderr, done.stderr
    assert f"script.py:{line_of(text, mark)} " in done.stderr, done.stderr
    assert ("runs again" in done.stderr) == (runs == 2), done.stderr


def test_a_clean_script_prints_the_same_bits_and_one_line_says_what_was_seen(run, tmp_path):
    bare, watched = run(CLASSIFIER, watched=False), run(CLASSIFIER)
    assert bare.returncode == watched.returncode == 0, watched.stderr
    assert bare.stdout == watched.stdout and len(bare.stdout.splitlines()) == 8
    assert re.search(r"6 steps, nothing non-finite, largest gradient norm [\d.]+", watched.stderr)
    assert not (tmp_path / "autopsy.txt").exists()


@pytest.mark.parametrize(("fault", "verdict"), [
    ("division", "divergence"), ("root", "divergence"), ("masked row", "divergence"),
    ("evaluation", "divergence"), ("input", "data")])
def test_a_fault_in_a_module_is_named_in_the_same_process(run, tmp_path, fault, verdict):
    done = run(CLASSIFIER, fault)
    named(done, CLASSIFIER, fault, verdict)
    report = done.stderr.partition("autopsy: ")[2].splitlines()
    assert report[0].startswith(f"script.py:{line_of(CLASSIFIER, fault)} in "), report
    assert report[1].startswith("  try: ") and report[-1] == "  all of it: autopsy.txt", report
    if fault != "evaluation":
        assert "at step 3" in done.stderr
        before, after = (next(line for line in done.stdout.splitlines() if line.startswith(word))
                         .split()[1:] for word in ("before", "after"))
        weights = [0, 1, 2, 3, 7, 8]
        assert [before[i] for i in weights] == [after[i] for i in weights]
        assert not {"nan", "inf"} & set(after), "the bad step reached BatchNorm's buffers"


@pytest.mark.parametrize(("fault", "verdict"), [
    ("target", "data"), ("leaves", "data"), ("fp16", "precision"), ("bf16", "divergence")])
def test_so_is_a_fault_outside_of_modules(run, tmp_path, fault, verdict):
    done = run(CLASSIFIER, fault)
    named(done, CLASSIFIER, fault, verdict)
    if fault == "fp16":
        assert "the same batch in fp32: finite" in (tmp_path / "autopsy.txt").read_text()


COUNTS = PREAMBLE.replace("torch.manual_seed(0)", "") + """
import random
class Counts(nn.Linear):
    def forward(self, x):
        calls.append(0)
        x = super().forward(x)
        return x / (x - x if len(calls) == bad else 1)  # unseeded

net, calls = Counts(4, 1), []; optimizer = torch.optim.SGD(net.parameters(), 0.1)
bad = random.randrange(2, 9)
for step in range(9):
    loss = net(torch.randn(9, 4)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


def test_a_script_that_counts_needs_a_second_run_with_the_same_random_numbers(run):
    named(run(COUNTS), COUNTS, "unseeded", "divergence", runs=2)


def test_the_second_run_can_be_refused_and_from_step_needs_none(run):
    done = run(COUNTS, before=("--one-run",))
    assert done.returncode == 3 and "without --one-run" in done.stderr
    named(run(COUNTS, before=("--from-step", "0", "--report", "it.txt")), COUNTS, "unseeded",
          "divergence")


LEFT_OVER = PREAMBLE + """
import ctypes, numpy
net = nn.Linear(4, 3)
if fault == "accumulated":
    net = net.half()
optimizer = torch.optim.SGD(net.parameters(), 1e-6)
for step in range(6):
    x, bad = torch.randn(6, 4), step == 3
    optimizer.zero_grad()
    if fault == "accumulated":
        for micro_batch in range(8):
            (net(x.half().fill_(1)).float().sum() * (2500 if bad else 1)).backward()
    elif fault == "overwritten":
        x[2] = 1e4 if bad else 1
        with torch.autocast("cpu", torch.float16):
            out = net(x) * 8  # overwritten
        x.zero_()
        out.float().square().mean().backward()
    elif fault == "numpy":
        weight = torch.from_numpy(numpy.float32([1, 1, numpy.inf if bad else 1]))
        (net(x).square() * weight).mean().backward()  # numpy
    elif fault == "opaque":
        room = torch.empty_like(net.weight[0])
        values = (ctypes.c_float * 4)(*[float("nan") if bad else 1.0] * 4)
        ctypes.memmove(room.data_ptr(), values, 16)  # as a kernel of C++ writes
        net(x + room).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("fault", "words"), [
    ("accumulated", "-> precision"), ("overwritten", "-> precision"),
    ("numpy", "first to use a tensor before this step (script.py:26"),
    ("opaque", "an opaque kernel")])
def test_kinds_that_look_like_another(run, fault, words):
    bare, done = run(LEFT_OVER, "", watched=False), run(LEFT_OVER, fault)
    assert bare.returncode == 0 and done.returncode == 3 and words in done.stderr, done.stderr
    if f"# {fault}" in LEFT_OVER:
        assert f"script.py:{line_of(LEFT_OVER, fault)} " in done.stderr, done.stderr


def test_a_fault_before_the_step_to_begin_with_is_said_to_be_early_and_samples_are_positions(run):
    done = run(CLASSIFIER, "division", before=("--from-step", "5"))
    assert "this is before step 5" in done.stderr and " (from 0)" in done.stderr
    named(done, CLASSIFIER, "division", "divergence")


WORLD = """
import os, sys, random, signal, torch
print(__name__, __file__, sys.argv, sys.path[0], sys.modules["__main__"].__file__, __spec__ is None)
print(torch.manual_seed(1).initial_seed(), random.seed(1), random.random(), torch.rand(1))
class Here: pass
print(Here.__module__, getattr(sys.modules["__main__"], "Here") is Here)
if sys.argv[1:] == ["interrupt"]:
    signal.signal(2, signal.default_int_handler)  # in the background it is ignored
    os.kill(os.getpid(), 2)
    while True: pass
if sys.argv[1:] == ["exit"]:
    sys.exit(7)
if sys.argv[1:] == ["raise"]:
    torch.ones(2, requires_grad=True).backward()
"""


def test_the_exit_code_of_the_script_passes_through(run):
    assert run(WORLD, "exit").returncode == 7


@pytest.mark.parametrize("ending", ["raise", "interrupt"])
def test_a_script_sees_what_python_shows_it_and_its_ending_passes_through(tmp_path, ending):
    bare, watched = (process(tmp_path, WORLD, ending, watched=w) for w in (False, True))
    assert bare.stdout == watched.stdout and bare.stdout
    assert bare.returncode == watched.returncode, watched.stderr
    for word in ("implicitly created", "KeyboardInterrupt"):
        assert (word in bare.stderr) == (word in watched.stderr)
    assert "/autopsy/" not in watched.stderr, "a frame of the watch in the script's traceback"


def test_a_script_that_is_not_there_is_named_in_one_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["autopsy", "nowhere.py"])
    with pytest.raises(SystemExit, match=r"autopsy: nowhere\.py is not a file"):
        tool.main()


def test_a_module_runs_by_its_name(tmp_path):
    done = process(tmp_path, CLASSIFIER, "division", name="package/train.py")
    at = f"train.py:{line_of(CLASSIFIER, 'division')} "
    assert done.returncode == 3 and at in done.stderr, done.stderr


OTHERS = PREAMBLE + """
import random
def bad(t):
    return t / (t * 0) if here else t  # here

here, step = False, 0
def ticks(n):
    global here, step
    for step in range(n):
        here = bool(fault) and step == 2
        yield step

class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(5, 7), nn.Linear(7, 3)

    def forward(self, *, batch):
        out, _ = self.lstm(batch["words"])
        return {"logits": bad(self.head(out[-1]))}

kind = sys.argv[2]
if kind == "dict":
    net = Reader(); optimizer = torch.optim.Adam(net.parameters())
    for _ in ticks(4):
        out = net(batch={"words": torch.randn(6, 4, 5)})
        loss = F.cross_entropy(out["logits"], torch.tensor([0, 1, 2, 0]))
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        print(loss.item().hex())
elif kind == "closure":
    net = nn.Linear(4, 1); optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)
    x = torch.randn(9, 4)
    for _ in ticks(4):
        def closure():
            optimizer.zero_grad()
            loss = bad(net(x)).square().mean() + net.weight.square().sum()
            loss.backward()
            return loss
        print(optimizer.step(closure).item().hex())
elif kind == "two optimizers":
    maker, judge = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    makes, judges = (torch.optim.Adam(n.parameters(), betas=(0.5, 0.99)) for n in (maker, judge))
    for _ in ticks(4):
        fake = maker(torch.randn(5, 3))
        loss = F.softplus(judge(fake.detach())).mean()
        loss = loss + F.softplus(-judge(torch.randn(5, 4))).mean()
        judges.zero_grad(); loss.backward(); judges.step()
        made = F.softplus(-bad(judge(fake))).mean()
        makes.zero_grad(); made.backward(); makes.step()
        print(loss.item().hex(), made.item().hex())
elif kind == "no optimizer":
    net = nn.Linear(4, 1)
    for _ in ticks(40):
        net.zero_grad()
        loss = net(torch.randn(9, 4)).square().mean() + bad((net.weight * 0).sum() + 1).log()
        loss.backward()
        for p in net.parameters():
            p.data.add_(p.grad, alpha=-0.01)
        print(loss.item().hex())
elif kind == "loader":
    class Data(torch.utils.data.Dataset):
        def __len__(self): return 16
        def __getitem__(self, i):
            assert not hasattr(torch.autograd.backward, "__wrapped__"), "a worker is watched"
            with torch.no_grad():
                nn.Linear(1, 1)(torch.tensor([torch.nan]))
            return torch.randn(4) * (torch.nan if fault and i == 11 else 1), random.random()
    net = nn.Linear(4, 1); optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for x, _ in torch.utils.data.DataLoader(Data(), 4, num_workers=2):  # loader
        loss = net(x).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        print(loss.item().hex())
elif kind == "compile":
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x / 2
        @staticmethod
        def backward(ctx, slope):
            return slope / 2
    net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 1))
    half = torch.compile(lambda x: Half.apply(net(x)), backend="aot_eager", fullgraph=True)
    net = torch.compile(net, backend="eager")
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in ticks(4):
        loss = bad(net(torch.randn(9, 4)) + half(torch.ones(9, 4))).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        print(loss.item().hex())
"""


@pytest.mark.parametrize("kind", ["dict", "closure", "two optimizers", "no optimizer", "loader",
                                  "compile"])
def test_other_kinds_of_loops_run_unchanged_and_their_fault_is_named(run, kind):
    bare, watched = run(OTHERS, "", kind, watched=False), run(OTHERS, "", kind)
    assert bare.returncode == watched.returncode == 0, watched.stderr
    assert bare.stdout == watched.stdout and bare.stdout and "nothing non-fin" in watched.stderr
    done = run(OTHERS, "fault", kind)
    assert done.returncode == 3, done.stderr
    if kind == "loader":  # met where it is first used
        assert "-> data" in done.stderr and "samples 3 of" in done.stderr, done.stderr
    else:
        assert f"script.py:{line_of(OTHERS, 'here')} " in done.stderr, done.stderr


SCALED = PREAMBLE + """
net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 20)
for step in range(60):
    with torch.autocast("cpu", torch.float16):
        out = net(torch.randn(16, 8))
        if fault == "skips" and step >= 10:
            out = out * torch.tensor(6e4, dtype=torch.float16)  # skips
    loss = (out.float() ** 2).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(step, loss.item().hex(), scaler.get_scale())
"""


def test_a_skip_of_the_loss_scaler_is_calibration_until_it_goes_on(run):
    bare, watched = run(SCALED, watched=False), run(SCALED)
    assert bare.stdout == watched.stdout and watched.returncode == 0, watched.stderr
    skipped = re.search(r"60 steps, (\d+) of them skipped by the loss scaler", watched.stderr)
    assert skipped and int(skipped[1]) > 0, watched.stderr
    done = run(SCALED, "skips")
    assert re.search("in a row|falls under 1", done.stderr), done.stderr
    named(done, SCALED, "skips", "precision")


NEVER_SILENT = PREAMBLE + """
import threading
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)
    def forward(self, x):
        out = self.fc(x) / (0 if fault == "raises" and step == 3 else 1)  # raises
        if fault == "raises inside":
            out = out.softmax(1) * (step != 3)
            torch.distributions.Categorical(out / out.sum(1, keepdim=True))  # raises inside
        return out

class Own(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad / (0 if step == 2 else 1))  # own optimizer

def train():
    global step
    step, net = 0, Net()
    if fault == "half weights":
        net = net.bfloat16()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-7, eps=0 if fault == "eps" else 1e-8)
    if fault == "negative":
        optimizer.param_groups[0]["lr"] = -1e-7
    if fault == "process":
        import multiprocessing
        child = multiprocessing.get_context("fork").Process(target=abs, args=(1,))
        child.start(); child.join()
    if fault == "own optimizer":
        optimizer = Own(net.parameters())
    if fault == "moment":
        net(torch.ones(1, 4)).sum().backward(); optimizer.step(); optimizer.zero_grad()
        state = optimizer.state_dict()
        state["state"][0]["exp_avg"][0, 0] = torch.nan
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-7); optimizer.load_state_dict(state)
    if fault == "count":
        with torch.no_grad():
            net(torch.full((2, 4), torch.nan))
    if fault == "print":
        import builtins
        builtins.print = lambda *words: None
    for step in range(9):
        out = net(torch.randn(5, 4).to(net.fc.weight.dtype)).float()
        if fault == "raises":
            torch.distributions.Categorical(logits=out)
        if fault == "eps":
            out = out * torch.tensor([0, 1, 1])
        loss = out.square().mean()
        if fault in ("passes over", "print") and step % 3 == 1:
            loss = loss * 0 / 0  # passes over print
            if not torch.isfinite(loss): continue
        loss.backward()
        if fault == "by hand":
            with torch.no_grad():
                for p in net.parameters():
                    p.sub_(p.grad / (0 if step == 8 else 9))  # by hand
        else:
            optimizer.step()
        net.zero_grad()
    if fault == "validation":
        print(float((out * 0 / 0).mean().detach()))  # validation

if fault == "thread":
    thread = threading.Thread(target=train); thread.start(); thread.join()
else:
    train()
"""


@pytest.mark.parametrize(("fault", "code", "words"), [
    ("raises", 3, "-> divergence"), ("passes over", 3, "-> divergence"),
    ("raises inside", 3, "-> divergence"),
    ("print", 3, "-> divergence"), ("by hand", 3, "-> divergence"),
    ("own optimizer", 3, "made by Own"), ("eps", 3, "eps=0 is exactly 0"),
    ("moment", 3, "exp_avg of fc.weight is nan as loaded at script.py"),
    ("half weights", 0, "2 bfloat16 tensors had gradients at every step read and never changed"),
    ("count", 0, "before any backward pass: passed over"), ("thread", 0, "in another thread"),
    ("negative", 0, "a learning rate is negative: -1e-07"),
    ("process", 0, "processes, which are not watched"),
    ("validation", 3, "the script read nan at"), ])
def test_it_is_never_silent_about_a_bad_number(run, fault, code, words):
    done = run(NEVER_SILENT, fault)
    assert done.returncode == code and words in done.stderr, done.stderr
    assert ("nothing non-finite" in done.stderr) == (code == 0 and fault != "thread")
    if f"# {fault}" in NEVER_SILENT or fault in ("print", "own optimizer"):
        assert f"script.py:{line_of(NEVER_SILENT, fault)} " in done.stderr, done.stderr


@pytest.mark.parametrize("name", finite_faults.HEALTHY)
def test_no_healthy_script_of_the_bench_is_accused(run, name):
    done = run(finite_faults.PRELUDE + finite_faults.HEALTHY[name])
    assert done.returncode == 0 and done.stderr.count("autopsy: ") == 1, done.stderr


# bench/finite_faults.py has 20 faulty scripts more.
FINITE = PREAMBLE + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.gain = nn.Parameter(torch.ones(2))
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        for k, layer in enumerate(self.layers):
            x = x + layer(x).tanh()
            if k == 1 and fault == "detached":
                x = x.data * 1.0
        return self.head(x) * self.gain

net = Net()
rate = 1e-2
if fault == "half":
    net, rate = net.bfloat16(), 1e-6
if fault == "frozen":
    net.layers[1].requires_grad_(False)
if fault == "frozen beginning":
    net.layers[:2].requires_grad_(False)
params = dict(net.named_parameters())
if fault in ("forgotten", "written by hand"):
    gain = params.pop("gain")
groups = [{"params": params.values()}]
if fault == "no rate":
    heads = [params.pop("head.weight"), params.pop("head.bias")]
    groups.append({"params": heads, "lr": 0.0})
optimizer = torch.optim.Adam(groups, rate)
drop = 40 if fault == "schedule" else 10**9
schedule = torch.optim.lr_scheduler.StepLR(optimizer, drop, gamma=0.0)
for step in range(120):
    x = torch.randn(16, 6)
    y = x[:, :2].sin() + x[:, 2:4]
    if step == 90 and fault == "rows":
        y[[2, 11]] = 4e3
    if step == 90 and fault == "whole batch":
        y *= 4
    optimizer.zero_grad()
    dtype = net.head.weight.dtype
    F.mse_loss(net(x.to(dtype)), y.to(dtype)).backward()
    if fault == "cleared":
        optimizer.zero_grad()
    optimizer.step()
    schedule.step()
    if fault == "written by hand":
        gain.data -= 1e-2 * gain.grad
        gain.grad = None
print([p.double().sum().item() for p in net.parameters()], torch.rand(()))
"""


@pytest.mark.parametrize(("fault", "words"), [
    ("half", ["layers.0.weight", "below half the last bit", "keep the weights in fp32"]),
    ("no rate", ["the lr of head.weight, head.bias was 0 at every step"]),
    ("schedule", ["was 0 since step 40 of 120"]),
    ("forgotten", ["gain got gradients at every step read, are in no optimizer"]),
    ("frozen", ["layers.1.weight, layers.1.bias: requires_grad is False"]),
    ("detached", ["no gradient has reached layers.0.weight", "the loss depends on them: data at"]),
    ("cleared", ["none of its 11 parameters had a gradient", "zero_grad()"]),
    ("rows", ["step 90: the loss jumped", "it came back at step ", "Rows 2, 11 of 16", "4e+03"]),
    ("whole batch", ["step 90: the loss jumped", "the first step to run script.py:"]),
])
def test_a_finite_run_that_is_wrong_is_told_so_and_is_unchanged(run, fault, words):
    done = run(FINITE, fault)
    assert done.returncode == 0 and all(word in done.stderr for word in words), done.stderr
    assert done.stdout == run(FINITE, fault, watched=False).stdout
    assert done.stderr.count("autopsy: ") == 2, "one sentence, and the last line"


@pytest.mark.parametrize("fault", ["", "frozen beginning", "written by hand"])
def test_a_healthy_run_is_not_accused(run, fault):
    done = run(FINITE, fault)
    assert done.returncode == 0 and done.stderr.count("autopsy: ") == 1, done.stderr


LOOP = PREAMBLE + """
class Body(nn.Linear):
    def forward(self, x):
        with torch.set_grad_enabled(fault != "no grad" and torch.is_grad_enabled()):
            return super().forward(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = Body(6, 16), nn.Linear(16, 3)

    def forward(self, x):
        with torch.set_grad_enabled(fault != "asked"):
            x = self.body(x)
        return self.head(x.relu())

def main():
    net, critic = Net(), nn.Linear(6, 3)
    if fault == "all frozen":
        net.requires_grad_(False)
    optimizer = torch.optim.Adam(net.parameters(), 3e-2)
    second = torch.optim.Adam((net if fault == "twice" else critic).parameters(), 1e-2)
    if fault == "replaced":
        net.head = nn.Linear(16, 3)
    truth = torch.randn(6, 3)
    for step in range(160):
        x = torch.randn(8, torch.randint(5, 9, ()), 6)
        y = x @ truth
        if step == 90 and fault == "flattened":
            y[3] *= 1e3
        if step == 90 and fault == "units":
            x *= 1e4
        if fault == "twice":
            second.zero_grad()
            F.mse_loss(critic(x), y).backward()
            second.step()
        optimizer.zero_grad()
        loss = F.mse_loss(net(x).flatten(0, 1), y.flatten(0, 1))
        if fault == "label":
            kind = torch.arange(8) % 3
            x[torch.arange(8), :, kind] += 4  # easy to tell, and learnt long ago
            kind[5] += step == 150
            loss = F.cross_entropy(net(x).mean(1), kind % 3)
        (loss.requires_grad_() if fault == "all frozen" else loss).backward()
        if fault != "no step":
            optimizer.step()

main()
"""


@pytest.mark.parametrize(("fault", "words"), [
    ("asked", []),
    ("no grad", ["no gradient has reached body.weight, body.bias", "runs under torch.no_grad()"]),
    ("all frozen", ["none of its 4 parameters had a gradient", "requires_grad is False for each"]),
    ("replaced", ["head.weight, head.bias got gradients", "holds 2 tensors that no module holds"]),
    ("twice", ["Linear.weight, Linear.bias got gradients", "two optimizers hold Net.body.weight"]),
    ("no step", ["Adam has made no step, though body.weight", "does the script reach step()?"]),
    ("flattened", ["step 90: the loss jumped", "Row 3 of 8 (from 0) carries it"]),
    ("label", ["step 150: the loss jumped", "Row 5 of 8", "In int64[8] they hold 0: right?"]),
    ("units", ["step 90: the loss jumped", "(the batches read before: up to"]),
])
def test_a_loop_in_a_function_that_is_wrong_is_told_so(run, fault, words):
    done = run(LOOP, fault)
    assert done.returncode == 0 and all(word in done.stderr for word in words), done.stderr
    assert done.stderr.count("autopsy: ") == 1 + bool(words), "one sentence, and the last line"


ENDS = PREAMBLE + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 1)
        self.down = nn.Parameter(torch.zeros(2, 6))
        self.up = nn.Parameter(torch.zeros(16, 2) if fault == "zeros" else torch.randn(16, 2))
        shift = torch.zeros(16)
        self.shift = shift.requires_grad_() if fault == "plain tensor" else nn.Parameter(shift)
        row = nn.Parameter(torch.zeros(16))
        self.row = row.unsqueeze(0) if fault == "result" else row
        more = nn.Linear(16, 1)
        self.heads = {"more": more} if fault == "dict" else nn.ModuleDict({"more": more})
        if fault == "unfrozen alone":
            self.late = nn.Parameter(torch.ones(16), requires_grad=False)
        self.gains = [nn.Parameter(torch.ones(1))]
        if fault != "list of tensors":
            self.gains = nn.ParameterList(self.gains)

    def forward(self, x):
        up = torch.ones(16, 2) if fault == "chosen" else self.up
        h = self.body(x) + self.shift + self.row + x @ self.down.T @ up.T
        if fault == "begins to die":
            h = (h + 5 - step).relu()
        if fault == "compared":
            h = (h > 0) * 1.0
        if fault == "numpy":
            h = torch.from_numpy(h.detach().numpy() + 0.5)
        if fault == "sign":
            h = h.sign()
        if fault == "helper":
            h = h * tables.scale
        if fault == "unfrozen alone" and step > 20:
            h = h * self.late.requires_grad_()
        if fault == "made anew":
            h = nn.Linear(16, 16)(h)
        h = self.head(h.tanh()) + self.heads["more"](h.tanh())
        if fault == "dies":
            h = (h + 9 - step).relu()
        if fault == "chosen":
            h = h * (1 + (self.up[:3, 0] * x[0, 0]).argmax())
        return self.gains[0] * (h.softmax(1) if fault == "softmax of one" else h)

net = Net()
if fault == "attribute":
    net.body.requires_grad_(False)
    net.body.requires_grad = True
if fault == "attribute in vain":
    net.body.requires_grad = False
class Tables:
    def __init__(self):
        self.scale = nn.Parameter(torch.ones(16))
tables = Tables()
held = [p for name, p in net.named_parameters() if "body" not in name or fault != "empty group"]
body = net.body.parameters()
groups = [{"params": [p for p in held if p.requires_grad]}]
if fault == "empty group":
    print(sum(p.numel() for p in body))
    groups += [{"params": body}]
optimizer = None if fault == "by hand" else torch.optim.SGD(groups, 1e-2)
if fault == "loads nothing":
    saved = {f"module.{name}": t for name, t in net.state_dict().items()}
    net.load_state_dict(saved, strict=False)
for step in range(100):
    net.train()
    x = torch.randn(16, 6)
    loss = (net(x) - x[:, :1]).square().mean()
    if fault == "new tensor":
        loss = torch.tensor(loss.item(), requires_grad=True)
    net.zero_grad()
    loss.backward()
    if optimizer:
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.6 if fault == "fast decay" else 1
    else:
        for p in net.parameters():
            p = p - 1e-2 * p.grad
    net.eval()
"""


@pytest.mark.parametrize(("fault", "words"), [
    ("", []),
    ("zeros", ["the gradient of down, up was exactly 0", "becomes 0 in Mm", "nothing but 0"]),
    ("plain tensor", ["shift got gradients", "plain tensors are no parameters: nn.Parameter"]),
    ("dict", ["heads.more.weight, heads.more.bias got gradients", "plain Python dict"]),
    ("list of tensors", ["gains.0 got gradients", "use nn.ParameterList"]),
    ("compared", ["no gradient has reached", "shift", "gt at script.py:"]),
    ("numpy", ["no gradient has reached", "shift", "detach at script.py:"]),
    ("sign", ["the gradient of ", "it becomes 0 in SignBackward0 of script.py:"]),
    ("softmax of one", ["the gradient of ", "it becomes 0 in SoftmaxBackward0 of script.py:"]),
    ("result", ["row got gradients", "what their module holds was made of an nn.Parameter"]),
    ("dies", ["each gradient of SGD is exactly 0 since step ", "becomes 0 in ReluBackward0"]),
    ("chosen", ["no gradient has reached up", "argmax at script.py:"]),
    ("begins to die", ["the gradient of down, up, ", "0 since step ", "ReluBackward0"]),
    ("fast decay", ["no weight of SGD has moved since step ", "once a batch, and not once"]),
    ("attribute", ["body.weight, body.bias: requires_grad = True", "theirs is False"]),
    ("attribute in vain", ["body.weight, body.bias: requires_grad = False", "theirs is True"]),
    ("new tensor", ["had a gradient in any: at script.py:", "begins at a new tensor"]),
    ("helper", ["a parameter float32[16] got gradients", "no module lists them"]),
    ("unfrozen alone", ["late got gradients at every step read of late", "add_param_group()"]),
    ("made anew", ["a forward makes weights of the shapes [16], [16, 16] anew"]),
    ("empty group", ["body.weight, body.bias got gradients", "group of SGD is empty"]),
    ("loads nothing", ["has loaded none of 11 tensors", "like module."]),
    ("by hand", ["got gradients in 100 backward passes and never changed", "in place"]),
])
def test_where_a_gradient_ends_is_named(run, fault, words):
    done = run(ENDS, fault)
    assert done.returncode == 0 and all(word in done.stderr for word in words), done.stderr
    assert done.stderr.count("autopsy: ") == 1 + bool(words), done.stderr


JUMP = PREAMBLE + """
import copy
net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.9 if fault == "mode" else 0.0),
                    nn.Linear(32, 3))
optimizer = torch.optim.Adam(net.parameters(), 1e-2)
truth = torch.randn(6, 3)
if fault == "mode":
    net.eval()
target = copy.deepcopy(net)
gain = net.gain = nn.Parameter(torch.zeros(()), requires_grad=False)
for step in range(200):
    x = torch.randn(32, 6)
    y = (x @ truth).argmax(1)
    x = x + 2 * truth.T[y]
    now = step == 150
    if fault == "batch":
        y = torch.where(torch.tensor(now), (y + 1) % 3, y)
    if now and fault == "line":
        y = (y + 1) % 3  # line
    if now and fault == "weights":
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(-2)  # weights
    if now and fault == "mode":
        net.train()
    if step == 148 and fault == "unfrozen":
        optimizer.add_param_group({"params": [gain.requires_grad_()]})
    if now and fault == "fold":
        for layer in (net[0], net[3]):
            layer.reset_parameters()
        optimizer = torch.optim.Adam([*net[0].parameters(), *net[3].parameters()], 1e-2)
    if fault == "alike":
        y = torch.full_like(y, now)
        x = x * 0 + 1
    if now and fault == "rate":
        optimizer.param_groups[0]["lr"] = 1.0
    if fault == "rate, once":
        optimizer.param_groups[0]["lr"] = 1e4 if now else 1e-2
    if fault == "units" and step > 149:
        x[:, 1:] *= -255
    optimizer.zero_grad()
    for again in range(60 if now and fault == "passes" else 1):
        weight = 3e3 * (fault == "term" and step > 149)
        penalty = net[0].weight.square().mean()
        loss = F.cross_entropy(net(x) + torch.eye(3)[0] * gain * 1e4, y) + weight * penalty
        if fault == "fold":
            loss = F.mse_loss(net(x), x @ truth)
        if fault == "target":
            with torch.no_grad():
                wanted = target(x)
            loss = F.mse_loss(net(x), wanted + 1)
        loss.backward()
    optimizer.step()
    if now and fault == "target":
        with torch.no_grad():
            for p in target.parameters():
                p.mul_(9)
"""


@pytest.mark.parametrize(("fault", "words"), [
    ("", ""), ("target", ""), ("fold", ""), ("alike", "In int64[32] all hold 1"),
    ("unfrozen", "gain moved for the first time, with lr 0.01"),
    ("batch", "The whole batch carries it"), ("line", "the first step to run script.py:"),
    ("weights", "weights were written at script.py:"), ("mode", "in train() mode, and in eval()"),
    ("rate", "At step 150 the lr rose from 0.01 to 1"),
    ("rate, once", "At step 150 the lr rose from 0.01 to 10000"),
    ("passes", "60 backward passes led to it, 1 to those"),
    ("units", "holds numbers up to "), ("term", "% is the term of script.py:"),
])
def test_what_a_jump_came_with_is_told(run, fault, words):
    done = run(JUMP, fault)
    assert done.returncode == 0 and words in done.stderr, done.stderr
    assert done.stderr.count("autopsy: ") == 1 + bool(words), done.stderr


def test_a_run_that_resumes_without_the_state_of_its_optimizer_is_told_so(run):
    done = run(PREAMBLE + """
def build():
    optimizer = torch.optim.AdamW(net.parameters(), 3e-2)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)

teacher, net = (nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)) for _ in range(2))
optimizer, schedule = build()
for step in range(120):
    if step == 95:
        optimizer, schedule = build()
    x = torch.randn(64, 8)
    loss = F.mse_loss(net(x), teacher(x).detach())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
""")
    assert "since step 95, which began without the state of the one before" in done.stderr
    assert "autopsy: 120 steps" in done.stderr and done.returncode == 0, done.stderr


def test_a_script_that_builds_an_optimizer_for_each_task_does_not_wait_for_the_watch(run):
    done = run(PREAMBLE + """
import copy, gc
searches, search = [], gc.get_objects
gc.get_objects = lambda *args: searches.append(1) or search(*args)
net = nn.Linear(4, 1)
for task in range(40):
    fast = copy.deepcopy(net)
    inner = torch.optim.SGD(fast.parameters(), 1e-2)
    for _ in range(6):
        inner.zero_grad()
        fast(torch.randn(8, 4)).square().mean().backward()
        inner.step()
print(len(searches))
""")
    assert int(done.stdout) < 30 and done.stderr.count("autopsy: ") == 1, done.stderr


@pytest.mark.parametrize(("rate", "words"), [
    (3, "the gradient norm has grown: "), (1.15, "gradient norms, of every 16th step: ")])
def test_a_divergence_names_the_tensor_whose_gradient_has_grown(run, rate, words):
    script = PREAMBLE + """
net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
optimizer = torch.optim.SGD(net.parameters(), float(fault))  # |1 - 2 lr| times a step
for step in range(3000):
    loss = net(torch.zeros(3, 4)).sum() * 0 + sum(p.square().sum() for p in net.parameters())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    done = run(script, rate)
    assert done.returncode == 3, done.stderr
    assert re.search(words + r".*; of \d\.weight: \d", done.stderr), done.stderr


SMALL = PREAMBLE + """
net = nn.Linear(3, 2)
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
table = torch.linspace(1, 0, 50)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(40):
    x = torch.randn(8, 3)
    drawn = torch.randint(0, 49, (8,))
    if fault == "drawn" and step == 3:
        drawn[5] = 49
    if fault == "column":
        rows = x.numpy()
        rows[:, 1] = float("nan")  # not by torch
        x = torch.from_numpy(rows)
    factor = table[drawn] / table[drawn]
    loss = (factor * net(x).square().mean(1)).mean()
    if fault == "large moment" and step == 3:
        loss = loss * 3e12
    optimizer.zero_grad()
    (scaler.scale(loss) if fault.startswith("scaled") else loss).backward()
    if fault == "scaled, divided by hand":
        for p in net.parameters():
            p.grad.div_(scaler.get_scale())
    optimizer.step()
with torch.no_grad():
    target = net(x).abs().sum(1)
    target[6] *= fault != "metric"
    print(((net(x).sum(1) - target) / target).abs().mean().item())  # metric
"""


@pytest.mark.parametrize(("fault", "code", "words"), [
    ("drawn", 3, "samples 5 of 8"), ("column", 3, "input holds nan in columns 1 of 3"),
    ("large moment", 0, "nothing non-finite"), ("scaled, divided by hand", 0, "nothing non-finite"),
    ("scaled", 0, "Adam steps with gradients 1024 times too large: scaler.step(optimizer)"),
    ("metric", 0, ": aten.div.Tensor at script.py:"), ])
def test_samples_columns_scales_and_metrics(run, fault, code, words):
    done = run(SMALL, fault)
    assert done.returncode == code and words in done.stderr, done.stderr
    if code == 0:
        assert done.stderr.count("autopsy: ") == 1 + (fault in ("scaled", "metric")), done.stderr


KINDS = PREAMBLE + """
net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(net.parameters(), 1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 13)
table = torch.arange(9.0) / torch.arange(9.0)  # table
data = torch.randn(64, 6)
if fault == "cut before":
    data[61] = torch.nan
total, count = torch.zeros(2, 16), torch.tensor(0.0)
for step, x in enumerate(data.split(8)):
    out = net(x)
    if fault == "raises finite" and step == 4:
        net(x[:, :3])
    loss = out.square().mean()
    if fault == "table":
        loss = loss * table[8 - step - (step == 7)]
    if step > 5:
        loss = loss + total.mean()
    optimizer.zero_grad()
    if fault == "scaler by half":
        scaler.scale(loss * 1e16).backward()
    else:
        loss.backward()
    if fault == "read between" and step == 4:
        net(x).mean().backward()
        print(((out > 9).sum() / (out > 9).sum()).item())  # read between
    optimizer.step()
    if step == 4:
        with torch.no_grad():
            net[3].bias[out.argmax(1).eq(9)[:2]] = out.sum() * 0  # by an index: nothing is wrong
            if fault == "weights":
                net[3].weight.copy_(total / count)  # weights
            if fault == "metric":
                print(((out > 9).sum() / (out > 9).sum()).item())  # metric
            if fault == "carried":
                total = total / count  # carried
"""


@pytest.mark.parametrize(("fault", "code", "words"), [
    ("cut before", 3, "samples 5 of 8 "), ("table", 3, "-> divergence"),
    ("weights", 3, "into 3.weight is nan"), ("metric", 3, "-> divergence"),
    ("read between", 3, "x / (y + eps), eps = 1e-6 at script.py"),
    ("raises finite", 1, "-> error"), ("scaler by half", 3, "and scaler.update() after it")])
def test_kinds_that_were_met_in_other_peoples_scripts(run, fault, code, words):
    bare, done = run(KINDS, watched=False), run(KINDS, fault)
    assert bare.returncode == 0 and done.returncode == code and words in done.stderr, done.stderr
    if f"# {fault}" in KINDS:
        assert f"script.py:{line_of(KINDS, fault)} " in done.stderr, done.stderr


EDGES = PREAMBLE + """
import copy
import numpy
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Embedding(9, 6), nn.Linear(6, 2)
        self.register_buffer("mean", torch.zeros(6) / float(fault != "made bad"))  # made bad

    def forward(self, x, index=None):
        if fault == "module writes":
            x.div_(x.std(1, keepdim=True))  # module writes
        out = self.last(x + self.table(index) + self.mean)
        if fault == "never written" and step > 5:
            out = out + self.late.sum()
        if fault == "forward spoils" and step > 1:
            self.mean.data.copy_(x.detach().sum(0) / (x > 3 * step - 9).sum(0))  # forward spoils
        if fault == "first written late" and step == 7:
            self.mean.copy_(x.detach().sum(0) / (x > 9).sum(0))  # first written late
        return out

class Own(torch.optim.Optimizer):
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.data -= 1e-3 * p.grad / (1 - 0.9 ** (step % 5))  # number
            if fault == "raises" and step == 4:
                p.data.add_(p.grad, alpha=1j)  # raises

def fetched_ahead(batches):
    ready = None
    for x, index in batches:
        following = x.double().float(), index
        if ready:
            yield ready
        ready = following
    yield ready

net = Net()
if fault == "loaded":
    torch.save(net.state_dict() | {"mean": torch.full((6,), torch.inf)}, "mean.pt")
    net.load_state_dict(torch.load("mean.pt"))  # loaded
own = fault in ("number", "raises")
optimizer = Own(net.parameters(), {"lr": 1e-2}) if own else torch.optim.SGD(net.parameters(), 1e-2)
if fault == "two optimizers":
    optimizer, plain = (torch.optim.SGD(m.parameters(), 1e-2) for m in (net.table, net.last))
if fault == "average":
    average = copy.deepcopy(net).requires_grad_(False)
    with torch.no_grad():
        for p, q in zip(average.parameters(), net.parameters()):
            p.add_((q - p) / (1 - 0.9 ** 0))  # average
data, index = torch.randn(64, 6), torch.arange(64) % 9
if "writes" in fault:
    data[29] = 2.0
if fault == "fetched ahead":
    data[29, 2] = torch.nan
if fault == "keyword":
    index[29] = 9
scales = fault in ("norm", "two optimizers", "unscaled")
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 30, enabled=scales)
half = torch.autocast("cpu", torch.float16, enabled=fault in ("norm", "own scale", "unscaled"))
batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data, index), 8)
if fault == "fetched ahead":
    batches = fetched_ahead(batches)
if fault == "script writes":
    batches = ((data[i:i + 8], index[i:i + 8]) for i in range(0, 64, 8))
step = 0
net.last(torch.randn(4, 6)).square().mean().backward()
torch.optim.SGD(net.parameters(), 1e-3).step()  # once, before the training
optimizer.zero_grad()
for step, (x, i) in enumerate(batches, start=1):
    if fault == "script writes":
        x /= x.std(1, keepdim=True)  # script writes
    if fault == "refreshed" and step == 4:
        with torch.no_grad():
            net.mean.copy_(x.sum(0) / (x > 9).sum(0))  # refreshed
    if fault == "rolled back" and step == 4:
        net(x, index=i)
        torch.save(net.state_dict() | {"mean": torch.full((6,), -torch.inf)}, "mean.pt")
        net.load_state_dict(torch.load("mean.pt"))  # rolled back
    with half:
        loss = net(x, index=i).float().square().mean()  # own scale
    if fault == "loaded":
        loss = loss + net.mean.sum()
    if fault == "own scale":
        loss = loss * 2.0 ** 24
    if fault == "eps in half" and step == 4:
        h = x.half() * (torch.arange(8)[:, None] != 5)
        h = h / (h.abs().amax(1, keepdim=True) + 1e-8)  # eps in half
        loss = loss + 0 * h.float().sum()
    if fault == "exp in half" and step == 4:
        loss = loss + (0 * x.half() + 105).exp().log().float().sum()  # exp in half
    if fault == "tiny" and step == 4:
        loss = loss + (0 * net.last.bias.sum() + 1e-44).log()  # tiny
    if fault == "never written" and step == 5:
        torch.use_deterministic_algorithms(True)  # so that there is NaN in it
        net.late = nn.Parameter(torch.empty(3))  # never written
    if fault == "array" and step == 2:
        array = torch.from_numpy(numpy.full((1, 1), numpy.inf, "float32"))  # array
    if fault == "array" and step == 5:
        loss = loss + (array - array).sum()
    if fault == "bad number" and step == 4:
        loss = float("nan") * loss  # bad number
    if fault == "grows":
        loss = loss * 10.0 ** step if step < 5 else (loss * 0).log()  # grows
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    limit = 1e9 if fault in ("grows", "two optimizers") else 1.0
    print(torch.nn.utils.clip_grad_norm_(net.parameters(), limit).item())
    if fault == "unscaled":
        optimizer.step()
    else:
        scaler.step(optimizer)
    if fault == "two optimizers":
        plain.step()
    scaler.update()
    optimizer.zero_grad()
if fault == "torch.func":
    def loss_of(p, x):
        return (torch.func.functional_call(net.last, p, (x,)) * 0).log().mul(0).sum()  # torch.func
    losses = torch.func.vmap(torch.func.grad_and_value(loss_of), (None, 0))
    print(losses(dict(net.last.named_parameters()), x)[1].sum().item())
"""


@pytest.mark.parametrize(("fault", "code", "words"), [
    ("", 0, "8 steps, nothing non-finite"), ("made bad", 3, "it went into buffer mean"),
    ("module writes", 3, "samples 5 of 8 "),
    ("script writes", 3, "samples 5 of 8 "),
    ("keyword", 3, "index 9 is not in 0..8"), ("fetched ahead", 3, "samples 5 of"),
    ("forward spoils", 3, "buffer mean is inf at step 3"), ("torch.func", 3, "-> divergence"),
    ("first written late", 3, "buffer mean is inf at step 6"),
    ("norm", 0, "skipped by the loss scaler, nothing non-finite"), ("raises", 1, "by Own.step()"),
    ("loaded", 3, "already bad: buffer mean, made at script.py"),
    ("eps in half", 3, "eps = 1e-4"), ("exp in half", 3, "exp(x.clamp(max=10))"),
    ("tiny", 3, "as small as 9.81e-45"), ("refreshed", 3, "try: division by zero"),
    ("rolled back", 3, "buffer mean was written at"),
    ("number", 3, "it divides by the number 0"), ("array", 3, "-> data"),
    ("bad number", 3, "bad before torch saw it"), ("never written", 3, "initialise it"),
    ("own scale", 3, "scale 1.67772e+07) -> calibration"),
    ("grows", 3, "the gradient norm has grown: "), ("average", 3, "divides by the number 0"),
    ("two optimizers", 3, "try: scaler.step(optimizer)"),
    ("unscaled", 3, "-> calibration")])
def test_kinds_at_the_edges_of_what_is_written_down(run, fault, code, words):
    bare, done = run(EDGES, fault, watched=False), run(EDGES, fault)
    assert done.returncode == code and words in done.stderr, done.stderr
    assert bare.stdout.startswith(done.stdout)  # up to the fault
    if f"# {fault}\n" in EDGES:
        assert f"script.py:{line_of(EDGES, fault)} " in done.stderr, done.stderr


FORMS = PREAMBLE + """
def spoilt(out, bad):
    return out + 0.01 * (out.abs() * bad + 1e-3 * bad).log()  # guilty

class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clamp(-3, 3)
    @staticmethod
    def backward(ctx, slope):
        if fault == "custom backward":
            return slope / bad  # custom backward
        return slope

net, other, lstm = nn.Linear(6, 3), nn.Linear(3, 1), nn.LSTM(6, 3)
weight = nn.Parameter(torch.randn(6, 3))
params = [*net.parameters(), *other.parameters(), *lstm.parameters(), weight]
optimizer, second = torch.optim.SGD(params, 1e-2), torch.optim.SGD(other.parameters(), 1e-2)
scaler = torch.amp.GradScaler("cpu", enabled=fault == "scaler")
labels, state = torch.arange(96) % 3, None
if fault == "traced":
    net = torch.jit.trace(net, torch.randn(8, 6))
if fault == "labels":
    labels[8 * 5 + 3] = 7
for step in range(9):
    x, bad = torch.randn(8, 6), torch.ones(8, 1)
    bad[3] = 0 if step == 5 and fault not in ("renormed", "set", "restored") else 1
    if fault == "no module":
        loss = spoilt(x @ weight, bad).square().mean()
    elif fault == "functional_call":
        fast = dict(net.named_parameters())
        inner = torch.func.functional_call(net, fast, (x,)).square().mean()
        slopes = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(fast.items(), slopes)}
        loss = spoilt(torch.func.functional_call(net, fast, (x,)), bad).square().mean()
    elif fault == "time first":
        out, state = lstm(torch.randn(4, 8, 6), state)
        state = tuple(t.detach() for t in state)
        loss = spoilt(out, bad).square().mean()
    elif fault == "packed":
        out, _ = lstm(nn.utils.rnn.pack_sequence(list(x[:, None].unbind(0))))
        loss = spoilt(nn.utils.rnn.pad_packed_sequence(out)[0][0], bad).square().mean()
    elif fault == "labels":
        loss = F.cross_entropy(net(x), labels[8 * step:8 * step + 8])  # labels
    elif fault == "in turns":
        second.zero_grad(); other(net(x)).mean().backward(); second.step()
        loss = spoilt(net(x), bad).square().mean()
    elif fault == "half":
        with torch.autocast("cpu", torch.float16):
            out = net(x)
        loss = (out.float() * torch.where(bad == 0, 1e7, 1.0)).sin().sum()  # half
    elif fault == "custom backward":
        loss = Clip.apply(net(x)).square().mean()
    else:
        loss = spoilt(Clip.apply(net(x)), bad).square().mean()
    if fault == "by hand":
        slopes = torch.autograd.grad(loss, list(net.parameters()))
        with torch.no_grad():
            for p, slope in zip(net.parameters(), slopes):
                p.sub_(slope, alpha=1e-2)
        continue
    optimizer.zero_grad(); scaler.scale(loss).backward()
    if fault == "renormed" and step == 5:
        with torch.no_grad():
            net.weight /= net.weight.norm() * 0  # renormed
    if fault == "set" and step == 5:
        with torch.no_grad():
            net.weight[0, 0] = torch.nan  # set
    if fault == "restored" and step == 5:
        net.load_state_dict(torch.load("spoilt.pt"))
    if fault == "half":
        print(torch.nn.utils.clip_grad_norm_(params, 1.0).item())
    scaler.step(optimizer); scaler.update()
"""


@pytest.mark.parametrize("form", [
    "custom function", "custom backward", "no module", "functional_call", "time first", "packed",
    "labels", "in turns", "half", "by hand", "scaler", "traced"])
def test_a_step_of_any_form_is_made_again(run, form):
    done = run(FORMS, form)
    verdict = {"labels": "data", "half": "precision"}.get(form, "divergence")
    own_line = form in ("labels", "half", "custom backward")
    named(done, FORMS, form if own_line else "guilty", verdict)
    if form != "packed":  # torch 2.9 packs by an operation that is not followed
        assert "samples 3 of " in done.stderr, done.stderr
    assert len(re.findall("-> ", done.stderr)) == 1, done.stderr


def test_good_numbers_that_spoil_a_weight_and_a_bad_checkpoint_are_not_the_optimizers_work(
        run, tmp_path):
    done = run(FORMS, "renormed")
    named(done, FORMS, "renormed", "divergence")
    assert "x / (y + eps)" in done.stderr, done.stderr
    named(run(FORMS, "set"), FORMS, "set", "weights")
    torch.save({"weight": torch.full((3, 6), torch.nan), "bias": torch.zeros(3)},
               tmp_path / "spoilt.pt")
    done = run(FORMS, "restored")
    assert "what the script writes into weight is nan at step 5" in done.stderr, done.stderr
    assert "-> weights" in done.stderr, done.stderr


MIXTURE = PREAMBLE + """
class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.norm, self.calls, self.losses = nn.Linear(6, 3), nn.BatchNorm1d(3), 0, []

    def forward(self, x):
        self.calls += 1
        out = self.norm(self.gate(x))
        chosen = out[out > (99 if fault == "left" and self.calls == 6 else -99)]
        self.losses.append(chosen.mean())  # left
        return out

net = Mixture()
optimizer = torch.optim.SGD(net.parameters(), 1e-2)
for step in range(8):
    out = net(torch.randn(8, 6))
    lowest = out.masked_fill(out < 0, -torch.inf).min().item()
    if fault == "metric":
        recall = (out.mean() / (net.calls == 3 or torch.zeros(()))).item()  # metric
    loss = out.square().mean() + sum(net.losses)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    net.losses.clear()
    print(step, loss.item().hex(), net.calls, net.norm.running_var.sum().item().hex())
"""


def test_what_a_forward_leaves_on_its_module_is_followed_and_put_back(run):
    """A step that is made again between its forward and its backward changes no later number."""
    done = run(MIXTURE)
    assert done.returncode == 0 and "read -inf at" in done.stderr, done.stderr
    named(run(MIXTURE, "left"), MIXTURE, "left", "divergence")
    done = run(MIXTURE, "metric")
    named(done, MIXTURE, "metric", "divergence")
    assert done.stdout == run(MIXTURE, "metric", watched=False).stdout


def test_what_an_earlier_step_has_made_is_named_where_every_operation_is_watched(run):
    done = run(KINDS, "carried")
    assert "a tensor of an earlier step" in done.stderr and "--from-step 0" in done.stderr
    done = run(KINDS, "carried", before=("--from-step", "0"))
    assert "first bad op: aten.div" in done.stderr, done.stderr
    assert f"script.py:{line_of(KINDS, 'carried')} " in done.stderr, done.stderr


def test_a_watch_that_fails_says_so_at_the_end_and_ends_with_4_and_the_script_goes_on(run):
    text = CLASSIFIER.replace("net = Net()", "net = Net(); torch.Tensor.is_inference = None")
    text = text.replace("x = torch.randn(6, 8)", "x = torch.randn(6, 8) * torch.nan")
    bare, watched = run(text, watched=False), run(text)
    assert bare.stdout == watched.stdout and bare.returncode == 0 and watched.returncode == 4
    assert "from step 0 on nothing was read (exit code 4)" in watched.stderr, watched.stderr
    assert "nothing non-finite" not in watched.stderr
    blind = run("import torch; torch._foreach_norm = None" + WRITTEN)
    assert blind.returncode == 4 and "nothing was read (exit code 4)" in blind.stderr


INSIDE = PREAMBLE + """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)
    def forward(self, x, mask=None):
        scores = self.q(x) @ self.k(x).transpose(-1, -2)  # overflow
        weights = (scores.float() / scores.float().abs().amax()).softmax(-1).to(scores.dtype)
        return (weights @ x, weights) if fault == "tuple" else weights @ x

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 16), nn.Linear(16, 10)
        self.layers = nn.ModuleList(Attention() for _ in range(3))
    def forward(self, ids):
        with torch.autocast("cpu", torch.bfloat16 if fault == "log" else torch.float16):
            x = self.embed(ids)
            for layer in self.layers:
                h = layer(x, mask=None) if fault == "keyword" else layer(x)
                x = F.layer_norm(x + (h[0] if fault == "tuple" else h), (16,))
            return self.head(x)

class Owner(nn.Module):  # as a LightningModule: it is not called itself
    def __init__(self):
        super().__init__()
        self.model = Model()
    def training_step(self, ids):
        return self.model(ids)

def main():
    net = Owner()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    for step in range(5):
        ids = torch.randint(10, (4, 5))
        if step == 3 and fault != "log":
            with torch.no_grad():
                for layer in net.model.layers:
                    layer.q.weight.mul_(3000); layer.k.weight.mul_(3000)
        out = net.training_step(ids)
        if step == 3 and fault == "log":
            p = (out * 0 + 9).sigmoid()
            out = out - (1 - p).log()  # log
        loss = F.cross_entropy(out.float().flatten(0, 1), ids.flatten())
        optimizer.zero_grad(); loss.backward(); optimizer.step()
main()
"""


def test_half_that_a_forward_enters_by_itself_is_precision_and_no_hardware(run):
    done = run(INSIDE, "log")
    named(done, INSIDE, "log", "precision")
    assert "(bfloat16) " in done.stderr and "hardware" not in done.stderr, done.stderr


@pytest.mark.parametrize("kind", ["one tensor", "tuple", "keyword"])
def test_all_modules_of_a_kind_are_tried_together_under_the_name_of_their_owner(run, kind):
    done = run(INSIDE, kind)
    named(done, INSIDE, "overflow", "precision")
    assert "in model.layers.0" in done.stderr, done.stderr
    assert "tried: model.layers.* in fp32, result in fp32: finite" in done.stderr, done.stderr


TENSORS = PREAMBLE + """
class Refuses(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if "norm" in str(func): raise NotImplementedError(str(func))
        return super().__torch_function__(func, types, args, kwargs)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.LazyLinear(8) if fault == "lazy" else nn.Linear(4, 8)
        self.n, self.b = nn.LayerNorm(8), nn.Linear(8, 2)
        self.register_buffer("other", OTHER.get(fault, lambda: None)())
    def forward(self, x):
        return self.b(self.n(self.a(x)))

OTHER = {
    "meta buffer": lambda: torch.ones(3, device="meta"),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.qint8),
    "fp8": lambda: torch.eye(4).to(torch.float8_e4m3fn),
    "mkldnn": lambda: torch.eye(4).to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "refuses": lambda: torch.eye(4).as_subclass(Refuses),
}
with torch.device("meta" if fault == "meta" else "cpu"):
    net = Net()
if fault == "meta":  # as from_pretrained does
    net.to_empty(device="cpu")
    for module in net.children(): module.reset_parameters()
if fault == "meta step":
    with torch.device("meta"):
        other = nn.Linear(3, 3)
        other(torch.ones(2, 3)).sum().backward()
        torch.optim.SGD(other.parameters(), 0.1).step()
net(torch.ones(3, 4))
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
for step in range(5):
    h = net(torch.randn(5, 4))
    if step == 3: h = h / (h * 0)  # here
    optimizer.zero_grad(); h.square().mean().backward(); optimizer.step()
"""


BLIND = PREAMBLE + """
import ctypes, warnings
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
if fault == "garbage":
    net[2].weight = nn.Parameter(torch.empty(4, 16))  # garbage
    held = (ctypes.c_float * 64)(*(k * 1e17 for k in range(64)))
    ctypes.memmove(net[2].weight.untyped_storage().data_ptr(), held, 256)
rate = -0.5 if fault == "negative rate" else 1e-3
optimizer = torch.optim.SGD(net.parameters(), 1e-3)
optimizer.param_groups[0]["lr"] = rate
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, enabled=fault.startswith("scaler"))
masks = torch.zeros(8, 4).index_fill(1, torch.tensor([3]), -torch.inf)
table = torch.tensor([[1.0] * 8] * 7 + [[float("nan")] * 8])  # table
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 8), masks), 8)
for step in range(80):
    ((x, mask),) = loader
    if fault == "table":
        x = table[torch.arange(8)]
    if fault == "warning":
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            F.mse_loss(x, x[:, :1])  # warning
        print(seen[0].filename[-9:] + f":{seen[0].lineno}", file=sys.stderr)
    with torch.autocast("cpu", torch.float16, enabled=fault.startswith("scaler")):
        out = net(x)
        if fault == "float mask":
            logp = (out + mask).log_softmax(1)
            out = logp.exp() * logp  # float mask
        loss = F.mse_loss(out, torch.ones(8, 4))
    if fault == "inner name":
        loss = loss + torch.linalg.cholesky(torch.eye(3) * -loss.detach()).sum()  # inner name
    scaler.scale(loss).backward()
    if fault.startswith("scaler"):
        scaler.unscale_(optimizer)
        raises = fault == "scaler clips"
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=raises)  # clip
        assert norm.isfinite()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if step == 2 and fault in ("warning", "clean"):
        break
"""


@pytest.mark.parametrize(("fault", "words", "unsaid"), [
    ("scaler clips", "-> calibration", "x.float()"),
    ("scaler asserts", "-> calibration", "x.float()"),
    ("negative rate", "a learning rate is negative: -0.5, and", "lower learning"),
    ("garbage", "never written since script.py:", "grow"),
    ("float mask", "torch.where", "every sample is bad"),
    ("table", "mend this number where it is made, at script.py:", "before the watch"),
    ("inner name", "first bad op: torch.linalg.cholesky", "_linalg_check_errors"),
    ("warning", "script.py:", "tape.py")])
def test_what_outsiders_were_told_wrongly_is_told_rightly(run, fault, words, unsaid):
    done = run(BLIND, fault)
    assert words in done.stderr and unsaid not in done.stderr, done.stderr
    if fault in ("garbage", "float mask", "table", "inner name", "warning"):
        assert f"script.py:{line_of(BLIND, fault)}" in done.stderr, done.stderr


@pytest.mark.parametrize("kind", [
    "meta", "meta step", "meta buffer", "lazy", "sparse", "csr", "quantised", "fp8", "mkldnn",
    "nested", "refuses"])
def test_a_tensor_of_any_kind_beside_the_fault_does_not_end_the_watch(run, kind):
    named(run(TENSORS, kind), TENSORS, "here", "divergence")


WRITTEN = PREAMBLE + """
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
bias = net[2].bias
nn.init.ones_(bias); nn.init.zeros_(bias)
nothing = torch.zeros(2)
if fault == "item": bias.data[0] = torch.nan  # item
if fault == "data": bias.data = nothing / nothing  # data
if fault == "copy": bias.data.copy_(nothing / nothing)  # copy
if fault == "outside": bias.detach().numpy()[0] = float("nan")
if fault in ("item", "copy"): nn.init.ones_(net[0].bias)
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
for step in range(3):
    optimizer.zero_grad(); net(torch.randn(5, 4)).square().mean().backward(); optimizer.step()
"""


OWN = PREAMBLE + """
net = nn.Linear(4, 3)
with torch.no_grad():
    net(torch.full((2, 4), torch.nan))  # a count of operations, say: nobody reads it
if fault == "range":
    x, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    (-net(x).log_softmax(-1).gather(-1, y[:, None]).mean()).backward()  # range
if fault == "asked" and torch.isnan(net(torch.full((2, 4), torch.nan))).any():
    raise ValueError("a NaN")
raise ValueError("lr0=1e30 is not valid")
"""


def test_an_exception_that_no_bad_number_leads_to_is_the_scripts_own(run):
    done = run(OWN)
    assert done.returncode == 1 and "->" not in done.stderr, done.stderr
    named(run(OWN, "range"), OWN, "range", "data")
    asked = run(OWN, "asked")
    assert asked.returncode == 3 and "ValueError: a NaN at step 0" in asked.stderr, asked.stderr


def test_what_is_written_past_a_parameter_is_not_blamed_on_the_last_initialiser(run):
    assert run(WRITTEN).returncode == 0
    named(run(WRITTEN, "item"), WRITTEN, "item", "weights")
    for fault in ("data", "copy"):
        named(run(WRITTEN, fault), WRITTEN, fault, "divergence")
    done = run(WRITTEN, "outside")
    assert done.returncode == 3 and "2.bias is nan at step 0" in done.stderr, done.stderr
    assert "what wrote it after that was not seen" in done.stderr
    assert "torch.zero" not in done.stderr


def test_a_deep_copy_keeps_nothing_of_what_was_copied_before(run):
    """Its memo holds all that; to walk it at each tensor takes quadratic time."""
    done = run(PREAMBLE + """
import copy
class Memo(dict):
    walks = 0
    def items(self):
        Memo.walks += 1
        return super().items()
h = torch.ones(3) * 2
h = h / (h * 0) if fault else h  # here
copied = copy.deepcopy([h, *nn.Linear(3, 3).parameters()], Memo())
assert not Memo.walks, Memo.walks
w = torch.ones(3, requires_grad=True)
(w * copied[0]).sum().backward()
torch.optim.SGD([w], 0.1).step()
""", "fault")
    assert done.returncode == 3 and "aten.div" in done.stderr, done.stderr


RANKS = PREAMBLE + """
import gc, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
ddp = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(ddp.parameters())
torch.manual_seed(rank)
for step in range(5):
    out = ddp(torch.randn(6, 8))
    if fault and step == 3 and rank == 1:
        out = out / (out * 0)  # rank
    loss = out.square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    if rank == 0: print(step, loss.item().hex())
del ddp, net, optimizer, out, loss  # see leave() in ranks.py
gc.collect()
dist.destroy_process_group()
"""


LEAVES = RANKS.replace("    optimizer.zero_grad(); loss", """    if loss.item() != loss.item():
        sys.exit("Loss is not finite")
    optimizer.zero_grad(); loss""").replace("out / (out * 0)", "out * 0 / (out * 0)")
SHARDED = RANKS.replace("ddp = nn.parallel.DistributedDataParallel(net)", """
from torch.distributed.fsdp import fully_shard
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
for layer in (net[0], net[2], net):
    fully_shard(layer, mesh=mesh)
ddp = net""")


def printed(done):
    """The script's own lines: gloo of torch 2.9 prints on every rank, at the same time."""
    return [line for line in done.stdout.splitlines() if re.match(r"\d 0x", line)]


@pytest.mark.parametrize("text", [LEAVES, SHARDED], ids=["sys.exit", "fsdp"])
def test_a_rank_that_leaves_and_a_sharded_model_do_not_hang_and_the_guilty_one_is_named(
        tmp_path, text):
    bare, watched = (ranks(tmp_path, text, watched=w) for w in (False, True))
    assert printed(bare) == printed(watched) and len(printed(bare)) == 5, watched.stderr
    done = ranks(tmp_path, text, "fault")
    assert done.returncode != 0, done.stderr
    assert f"script.py:{line_of(text, 'rank')} " in done.stderr, done.stderr
    assert done.stderr.count("first bad op") == 1 and "rank 1" in done.stderr, done.stderr


def test_under_torchrun_every_rank_watches_and_the_guilty_one_is_named(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    bare, watched = (ranks(tmp_path, RANKS, watched=w) for w in (False, True))
    assert printed(bare) == printed(watched) and len(printed(bare)) == 5, watched.stderr
    assert watched.returncode == 0 and watched.stderr.count("nothing non-finite") == 1
    done = process(tmp_path, RANKS, "fault", launcher=torchrun)
    assert done.returncode != 0 and "guilty: rank 1 of 2" in done.stderr, done.stderr
    assert f"script.py:{line_of(RANKS, 'rank')} " in done.stderr
    assert done.stderr.count("first bad op") == 1


CLOSURES = PREAMBLE + """
maker, judge = nn.Linear(3, 4), nn.Linear(4, 1)
rate = 1e30 if fault == "rate" else 0.1
makes = torch.optim.SGD(maker.parameters(), 0.1)
judges = torch.optim.LBFGS(judge.parameters(), lr=rate, max_iter=3)
for step in range(6):
    x = torch.randn(9, 3)
    if fault == "data" and step == 4: x[5] = torch.nan  # data
    def closure():
        judges.zero_grad()
        loss = (judge(maker(x).detach()) - 1).square().mean()
        loss.backward()
        return loss
    print(judges.step(closure).item().hex())  # rate
    makes.zero_grad(); judge(maker(x)).square().mean().backward()
    makes.step(lambda: None)
"""


def test_what_an_optimizer_writes_around_its_closure_is_its_own_and_counts_once(run):
    bare, done = run(CLOSURES, watched=False), run(CLOSURES)
    assert done.returncode == 0 and "6 steps, nothing non-finite" in done.stderr, done.stderr
    assert bare.stdout == done.stdout
    done = run(CLOSURES, "data")
    named(done, CLOSURES, "data", "data")
    assert "at step 4 " in done.stderr, done.stderr
    done = run(CLOSURES, "rate")
    named(done, CLOSURES, "rate", "optimizer")
    assert "made by LBFGS (lr=1e+30)" in done.stderr and "at step 0 " in done.stderr, done.stderr


LOADED = PREAMBLE + """
import numpy
net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
if fault == "early":
    state = net.state_dict(); state["0.bias"] = torch.full((8,), torch.nan)  # early
    net.load_state_dict(state)
if fault == "file":
    numbers = torch.from_numpy(numpy.full(8, numpy.nan)).float()
    net.load_state_dict({**net.state_dict(), "0.bias": numbers})  # file
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
for step in range(6):
    optimizer.zero_grad(); net(torch.randn(5, 4)).square().mean().backward(); optimizer.step()
    if fault == "norm" and step == 3:
        with torch.no_grad(): net[0].weight[0] = torch.nan  # norm
    if fault == "moment" and step == 3:
        state = optimizer.state_dict()
        state["state"][2]["exp_avg"] = torch.full((8,), torch.inf)
        optimizer.load_state_dict(state)  # moment
"""


@pytest.mark.parametrize(("fault", "symptom"), [
    ("early", "what the script writes into 0.bias is nan at step 0"),
    ("file", "what the script writes into 0.bias is nan at step 0"),
    ("norm", "what the script writes into 0.weight is nan"),
    ("moment", "exp_avg of 1.weight is inf as loaded at")])
def test_what_is_written_or_loaded_is_the_cause_and_not_its_consequence(run, fault, symptom):
    done = run(LOADED, fault)
    named(done, LOADED, fault, "weights")
    assert symptom in done.stderr and done.stderr.count("->") == 1, done.stderr


TABLE = PREAMBLE + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(9, 4, sparse=fault == "sparse")
        self.own = nn.Parameter(torch.randn(9, 4))
        self.last = nn.Linear(4, 2)
    def forward(self, index):
        return self.last(self.emb(index) + self.own[index] * (fault == "own"))  # asked

net = Net()
key = "own" if fault == "own" else "emb.weight"
state = {k: t.clone() for k, t in net.state_dict().items()}
state[key][7] = torch.nan
if fault == "before":
    net.emb = nn.Embedding.from_pretrained(state[key], freeze=False)
else:
    net.load_state_dict(state)  # loaded
if fault == "frozen":
    net.emb.requires_grad_(False)
kind = torch.optim.SparseAdam if fault == "sparse" else torch.optim.Adam
params = net.emb.parameters() if fault == "sparse" else net.parameters()
optimizer = kind([p for p in params if p.requires_grad], 1e-2)
for step in range(6):
    index = torch.arange(6)
    if step == 4 and fault == "used":
        index = index + 2
    loss = net(index).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    print(loss.item())
"""


@pytest.mark.parametrize("fault", ["", "own", "frozen", "sparse", "before"])
def test_a_bad_row_that_nothing_asks_for_is_one_line(run, fault):
    bare, done = run(TABLE, fault, watched=False), run(TABLE, fault)
    assert done.returncode == 0 and bare.stdout == done.stdout, done.stderr
    name = "own" if fault == "own" else "emb.weight"
    assert f"parameter {name} holds NaN or inf in rows 7 of 9 (" in done.stderr, done.stderr
    where = "before the watch" if fault == "before" else f"script.py:{line_of(TABLE, 'loaded')} in "
    assert where in done.stderr and "6 steps, nothing else non-finite" in done.stderr, done.stderr


@pytest.mark.parametrize("kind", ["layer", "table"])
def test_an_optimizer_that_makes_a_row_bad_is_named_though_the_gradient_is_zero(run, kind):
    done = run(PREAMBLE + """
class Own(torch.optim.SGD):
    def step(self):
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad / p.grad.norm(dim=1, keepdim=True))
net = nn.Embedding(4, 3) if fault == "table" else nn.Linear(4, 3, bias=False)
optimizer = Own(net.parameters(), 0.1)
for step in range(3):
    loss = net(torch.arange(3) if fault == "table" else torch.randn(8, 4))[:, :2].square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
""", kind)
    assert done.returncode == 3 and "after good gradients at step 0 -> optimizer" in done.stderr


def test_a_bad_row_that_a_sample_asks_for_is_a_verdict_with_the_line_that_wrote_it(run):
    done = run(TABLE, "used")
    named(done, TABLE, "asked", "weights")
    assert "loss is nan at step 4" in done.stderr and "samples 5 of 6" in done.stderr, done.stderr
    assert f"written at script.py:{line_of(TABLE, 'loaded')} in " in done.stderr, done.stderr


BATCHES = PREAMBLE + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
    def forward(self, noise, pixels, marks=None):
        out = self.layer(pixels + 0 * noise)[:, 0]
        return out, None if marks is None else F.l1_loss(out, marks)
class Batch(dict):
    def to(self, *there):
        return Batch({k: v.to(*there) for k, v in self.items()})

net = Net()
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
x, y = torch.randn(40, 4).numpy(), torch.randn(40).numpy()
if fault == "pixels": x[22, 1] = float("nan")
if fault in ("marks", "target"): y[22] = float("nan")
for i in range(0, 40, 5):
    batch = Batch(pixels=torch.from_numpy(x[i:i + 5]), marks=torch.from_numpy(y[i:i + 5]))
    batch = batch.to("cpu", torch.float32)
    if fault == "target":
        loss = F.mse_loss(net(torch.randn(5, 4), batch["pixels"])[0], batch["marks"])
    else:
        loss = net(torch.randn(5, 4), **batch)[1]
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


@pytest.mark.parametrize("name", ["pixels", "marks", "target"])
def test_a_tensor_of_the_batch_has_the_name_of_the_argument_that_it_is_given_for(run, name):
    done = run(BATCHES, name)
    assert f"{name} holds nan" in done.stderr and "samples 2 of" in done.stderr, done.stderr


AVERAGED = PREAMBLE + """
import copy
from torch.optim.swa_utils import AveragedModel
def count(mean, new, n):
    return mean + (new - mean) / (n - 1)  # counter
net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 1e-2)
swa = AveragedModel(net, avg_fn=count if fault == "counter" else None)
ema, mine = copy.deepcopy(net), copy.deepcopy(net)
ours, theirs = list(ema.parameters()), list(net.parameters())
for step in range(4):
    optimizer.zero_grad(); net(torch.randn(5, 4)).square().mean().backward(); optimizer.step()
    swa.update_parameters(net)
    bad = fault if step == 2 else ""
    with torch.no_grad():
        torch._foreach_lerp_(ours, theirs, float("inf") if bad == "foreach" else 0.1)  # foreach
        for a, b in zip(mine.parameters(), theirs):
            a.detach().copy_(b / (b * (bad != "detach")))  # detach
"""


@pytest.mark.parametrize("fault", ["counter", "foreach", "detach"])
def test_an_average_that_no_module_calls_is_read_too(run, fault):
    """Nothing but the script's own writes shows it."""
    assert run(AVERAGED).returncode == 0
    named(run(AVERAGED, fault), AVERAGED, fault, "weights" if fault == "foreach" else "divergence")


SLOTS = PREAMBLE + """
from dataclasses import dataclass
@dataclass(slots=True)
class Batch:
    images: torch.Tensor
    targets: torch.Tensor
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 1)
    def forward(self, batch):
        return (self.body(batch.images) - batch.targets).square().mean()  # first use
net = Net()
optimizer = torch.optim.SGD(net.parameters(), 1e-2)
for step in range(4):
    x = torch.randn(5, 4)
    if fault and step == 2: x[3] = torch.nan
    optimizer.zero_grad(); net(Batch(x, torch.randn(5, 1))).backward(); optimizer.step()
"""


def test_a_batch_in_slots_is_a_batch(run):
    done = run(SLOTS, "fault")
    named(done, SLOTS, "first use", "data")
    assert "images holds nan" in done.stderr and "samples 3 of" in done.stderr, done.stderr


PLANTED = PREAMBLE + """
net = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
x = torch.randn(40, 4)
if fault == "table": x[23, 1] = torch.nan  # table
for i in range(0, 40, 5):
    batch = x[i:i + 5] * 1
    with torch.no_grad():
        if fault == "row" and i == 20: batch[3][1] = torch.inf  # row
        if fault == "fill" and i == 20: batch[3].fill_(torch.nan)  # fill
    optimizer.zero_grad(); net(batch).square().mean().backward(); optimizer.step()
"""


@pytest.mark.parametrize("fault", ["table", "row", "fill"])
def test_a_number_that_the_script_writes_into_its_data_is_written_again(run, fault):
    done = run(PLANTED, fault)
    named(done, PLANTED, fault, "data")
    assert "samples 3 of" in done.stderr, done.stderr


STRANGE = PREAMBLE + """
import copy
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
torch.use_deterministic_algorithms(True)  # torch.empty holds NaN
for step in range(4):
    optimizer.zero_grad(); net(torch.randn(5, 4)).square().mean().backward(); optimizer.step()
    with torch.inference_mode(fault == "inference"):
        room = torch.empty(5, 4)
    if fault == "written": room.div_(room.zero_())  # written
    if fault == "out": torch.log(torch.zeros(5, 4) - 1, out=room)  # out
    if fault == "lent": room.numpy()[2] = float("nan")
    x = torch.zeros_like(room) / 0 if fault == "shape" else room.double().float()  # shape
    with torch.no_grad(), torch.device("cpu"):
        copy.deepcopy(net)(room if fault == "inference" else x)  # lent
"""


@pytest.mark.parametrize("fault", ["", "inference", "written", "lent", "shape", "out"])
def test_a_warm_up_on_the_memory_of_empty_is_no_fault_until_somebody_writes_it(run, fault):
    done = run(STRANGE, fault)
    if fault not in ("", "inference"):
        named(done, STRANGE, fault, "data" if fault == "lent" else "divergence")
    else:
        assert done.returncode == 0 and "nothing non-finite" in done.stderr, done.stderr
        assert "passed over, its input is what torch.empty found" in done.stderr, done.stderr


def test_a_bad_weight_is_judged_before_the_loss_that_it_explains():
    ledger, judged, bad = Ledger(), [], torch.tensor([math.nan])
    losses = ledger.entries([bad], lambda t, norm: judged.append("loss"))
    ledger.wrote(bad, "a write", lambda p, writes, t, norm: judged.append("written"))
    ledger.note([bad, bad + 1], lambda t, norm: judged.append("noted"))
    assert ledger.transfer([torch.tensor(2.0)], losses) == [2.0]
    assert judged == ["noted", "noted", "written", "loss"] and not ledger.transfer()


QUIET = PREAMBLE + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)
        self.register_buffer("mask", torch.zeros(8, 8).masked_fill(torch.eye(8) > 0, -torch.inf))

    def forward(self, x):
        h = self.first(x)
        late = 1e4 if step == 5 else 1.0
        half = h.half()
        if fault == "ratio":
            length = (half * late).square().sum(1, keepdim=True)  # ratio
            h = h + half / (length + 1)
        if fault == "exp":
            h = h + (-(half * late).square().sum(1, keepdim=True)).exp()  # exp
        if fault == "clamp":
            h = h + (half * late * 99.0).clamp(-1, 1)  # clamp
        if fault == "minimum":
            h = h + torch.minimum((half * late).square(), half)  # minimum
        if fault == "cast":
            h = h + (h * late * 99).half().sigmoid()  # cast
        if fault == "masks":
            scores = half @ half.T
            h = h + scores.add(self.mask.half()).softmax(1) @ half
            h = h + scores.masked_fill(torch.eye(8) > 0, -torch.inf).softmax(1) @ half
            least = torch.finfo(torch.float16).min * torch.eye(8).half()
            h = h + (scores + least).softmax(1) @ half
            h = h + (scores + (torch.eye(8) * -1e9).half()).softmax(1) @ half
            h = h + torch.where(torch.eye(8) > 0, scores, float("-inf")).softmax(1) @ half
        if fault == "nearest":
            d = torch.cdist(h, h).half().masked_fill(torch.eye(8) > 0, torch.inf)
            h = h + half[d.argmin(1)] + half[(d + (torch.eye(8) * 1e9).half()).argmin(1)]
            h = h + d.amin(1, keepdim=True)
        if fault == "constants":
            best = torch.full((8, 8), torch.inf, dtype=torch.float16)
            h = h + torch.minimum(best, half) + (half.relu().log().exp() + 0.1).log() * 0
        return self.last(h)

net = Net()
optimizer = torch.optim.SGD(net.parameters(), 1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 30, enabled=fault == "skipped")
for step in range(9):
    with torch.autocast("cpu", torch.float16, enabled=fault == "skipped"):
        out = net(torch.randn(8, 8))
    if fault == "outside" and step == 5:
        out = out + 1 / (out.half() * 1e4).square().float()  # outside
    loss = out.float().square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(loss.item())
"""


@pytest.mark.parametrize("fault", ["ratio", "exp", "clamp", "minimum", "cast", "outside"])
def test_an_inf_of_fp16_that_is_swallowed_is_one_line_and_no_finding(run, fault):
    bare, done = run(QUIET, fault, watched=False), run(QUIET, fault)
    assert done.returncode == 0 and done.stdout == bare.stdout, done.stderr
    line = f"script.py:{line_of(QUIET, fault)} in "
    said = [text for text in done.stderr.splitlines() if "made inf in float16" in text]
    assert len(said) == 1 and line in said[0] and "step 5" in said[0], done.stderr


@pytest.mark.parametrize("fault", ["", "masks", "nearest", "constants", "skipped"])
def test_an_inf_of_fp16_that_is_meant_is_none(run, fault):
    bare, done = run(QUIET, fault, watched=False), run(QUIET, fault)
    assert done.returncode == 0 and done.stdout == bare.stdout, done.stderr
    assert done.stderr.startswith("autopsy: ") and done.stderr.count("\n") == 1, done.stderr
    assert ("skipped by the loss scaler" in done.stderr) == (fault == "skipped")
