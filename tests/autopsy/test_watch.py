"""`python autopsy SCRIPT`: the same figures as without it, and each planted fault is named."""

import math
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, rows_of, run_ranks, run_script

from autopsy.watch.budget import Budget
from autopsy.watch.deferred import DeferredChecks
from autopsy.watch.events import Events, Listeners
from autopsy.watch.hooks import Hooks
from autopsy.watch.recorder import CallRecorder
from bench.scripts import finite, lines_of, planted
from bench.scripts.planted import CLASSIFIER, FORMS, KINDS, PREAMBLE, WRITTEN

CASES = [*planted.CASES, *(case for case in finite.CASES if case.name in finite.HEALTHY)]


def fits_a_screen(err, folder):
    """Every report of this page: at most 12 rows, and the file holds all of it."""
    for shown, path in re.findall(r"^autopsy: (.* -> (?:.*\n)+?)  all of it: (.*)", err, re.M):
        assert rows_of(f"autopsy: {shown}  all of it: {path}") <= 12, shown
        kept = (folder / path).read_text().splitlines()
        assert set(shown.splitlines()) <= set(kept), shown


def ended(*answers):
    """Of one process or of all ranks: code, out, err."""
    codes, outs, errs = zip(*answers, strict=True)
    return SimpleNamespace(returncode=max(codes), stdout="".join(outs), stderr="".join(errs))


@pytest.fixture
def run(tmp_path):
    """Runs a script with or without the watch."""

    def go(text, *args, watched=True, before=()):
        (tmp_path / "script.py").write_text(text)
        tool = [ROOT / "autopsy", *before] if watched else []
        done = ended(run_script([*tool, "script.py", *args], tmp_path))
        fits_a_screen(done.stderr, tmp_path)
        return done

    go.folder = tmp_path
    return go


def ranks(folder, text, *args, watched=True):
    """The same on two ranks."""
    (folder / "script.py").write_text(text)
    files = [ROOT / "autopsy", "script.py"] if watched else ["script.py"]
    return ended(*run_ranks([*files, *args], folder))


def process(folder, text, *argv):
    """`python *argv` as a process of its own, with this script in its folder."""
    (folder / "script.py").write_text(text)
    return subprocess.run(
        [sys.executable, *argv],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def line_of(text, mark):
    return lines_of(text, mark)[0]


def named(done, text, mark, verdict, runs=1):
    assert done.returncode == 3, done.stderr
    assert f"-> {verdict}" in done.stderr, done.stderr
    assert f"script.py:{line_of(text, mark)} " in done.stderr, done.stderr
    assert ("runs again" in done.stderr) == (runs == 2), done.stderr


@pytest.mark.parametrize("fault", ["division", "root", "masked row", "input"])
def test_a_report_begins_with_the_line_and_the_bad_step_reaches_no_weight_and_no_buffer(run, fault):
    done = run(CLASSIFIER, fault)
    report = done.stderr.partition("autopsy: ")[2].splitlines()
    assert report[0].startswith(f"script.py:{line_of(CLASSIFIER, fault)} in "), report
    assert report[1].startswith("  try: ") and report[-1] == "  all of it: autopsy.txt", report
    before, after = (
        re.search(rf"^{word} (.*)", done.stdout + done.stderr, re.M)[1].split()
        for word in ("before", "after")
    )
    weights = [0, 1, 2, 3, 7, 8]
    assert [before[i] for i in weights] == [after[i] for i in weights]
    assert not {"nan", "inf"} & set(after), "the bad step reached BatchNorm's buffers"


def test_the_file_says_that_the_same_batch_is_finite_in_fp32(run, tmp_path):
    run(CLASSIFIER, "fp16")
    assert "the same batch in fp32: finite" in (tmp_path / "autopsy.txt").read_text()


COUNTS = (
    PREAMBLE.replace("torch.manual_seed(0)", "")
    + """
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
)


def test_a_script_that_counts_needs_a_second_run_with_the_same_random_numbers(run):
    named(run(COUNTS), COUNTS, "unseeded", "divergence", runs=2)


def test_the_second_run_can_be_refused_and_from_step_needs_none(run):
    done = run(COUNTS, before=("--one-run",))
    assert done.returncode == 3 and "without --one-run" in done.stderr
    named(
        run(COUNTS, before=("--from-step", "0", "--report", "it.txt")),
        COUNTS,
        "unseeded",
        "divergence",
    )


UNWRITTEN = """
import sys, torch
net = torch.nn.Linear(4, 1); optimizer = torch.optim.SGD(net.parameters(), 0.1)
garbage = [torch.full((40, 1), torch.nan) for _ in range(200)]; del garbage
for step in range(5):
    returns = torch.Tensor(40, 1)  # of memory that held NaN
    for i in range(40): returns[i, 0] = i / 40
    loss = (net(torch.ones(40, 4)) * returns).square().mean()
    if len(sys.argv) > 1 and step == 3: loss = (0 * loss - 1).log()  # bad
    loss.backward(); optimizer.step(); optimizer.zero_grad()
print("the end")
"""


def test_where_every_operation_is_watched_memory_that_is_written_later_is_no_fault(run):
    done = run(UNWRITTEN, before=("--from-step", "0"))
    assert done.returncode == 0 and "nothing non-finite" in done.stderr, done.stderr
    done = run(UNWRITTEN, "bad", before=("--from-step", "0"))
    named(done, UNWRITTEN, "bad", "divergence")
    assert "the end" not in done.stdout and "failed" not in done.stderr


MICRO_BATCHES = """
import torch
net = torch.nn.Linear(4, 1); optimizer = torch.optim.SGD(net.parameters(), 0.1)
for i in range(80):
    net(torch.randn(8, 4)).square().mean().backward()
    if i % 4 == 3: optimizer.step(); optimizer.zero_grad()
"""


def test_nothing_but_the_last_line_is_printed_also_by_torch_itself(run):
    """torch 2.9 warned of memory that ends while Python holds it by a weak reference."""
    (line,) = run(MICRO_BATCHES).stderr.splitlines()
    assert line.startswith("autopsy: 20 steps, nothing non-finite")


READS = """
import sys, torch
from torch import nn
torch.manual_seed(0)
policy, bad = nn.Linear(4, 2), sys.argv[1:] == ["bad"]
for episode in range(30):
    for _ in range(60):
        torch.distributions.Categorical(logits=policy(torch.randn(4))).sample().item()
    loss = policy(torch.randn(8, 4)).square().mean()
    grads = torch.autograd.grad(loss, policy.parameters())
    flat = torch.cat([g.flatten() for g in grads]).detach()
    sign = -1 if bad and episode == 25 else 1
    size = torch.sqrt(sign * flat.square().sum())  # bad
    print(episode, size)
    with torch.no_grad():
        for p, g in zip(policy.parameters(), grads): p.add_(g, alpha=-0.01)
"""


def test_a_nan_that_is_read_in_a_step_that_was_not_recorded_is_found_in_a_second_run(run):
    assert run(READS, before=("--share", "0")).returncode == 0
    named(run(READS, "bad", before=("--share", "0")), READS, "bad", "divergence", runs=2)


def test_a_fault_before_the_step_to_begin_with_is_said_to_be_early_and_samples_are_positions(run):
    done = run(CLASSIFIER, "division", before=("--from-step", "5"))
    assert "this is before step 5" in done.stderr and " (from 0)" in done.stderr
    named(done, CLASSIFIER, "division", "divergence")


WORLD = """
import os, sys, random, signal, torch
print(__name__, __file__, sys.argv, sys.path[0], sys.modules["__main__"].__file__, __spec__ is None)
print(torch.manual_seed(1).initial_seed(), random.seed(1), random.random(), torch.rand(1))
class Here: pass
print(__builtins__, __cached__, type(__loader__), sys.excepthook is sys.__excepthook__)
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
    bare = process(tmp_path, WORLD, "script.py", ending)
    watched = process(tmp_path, WORLD, ROOT / "autopsy", "script.py", ending)
    assert bare.stdout == watched.stdout and bare.stdout
    assert bare.returncode == watched.returncode, watched.stderr
    for word in ("implicitly created", "KeyboardInterrupt"):
        assert (word in bare.stderr) == (word in watched.stderr)
    assert "/autopsy/" not in watched.stderr, "a frame of the watch in the script's traceback"


WARNS = (
    PREAMBLE
    + """
import warnings
warnings.simplefilter(sys.argv[1])
net = nn.Sequential(nn.Linear(4, 3), nn.Softmax())
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(4):
    x = torch.randn(5, 4)
    out = net(x)
    loss = F.mse_loss(F.softmax(out), x[:, :1])
    loss = loss + F.log_softmax(out).std() + torch.tensor(loss)
    warnings.warn("mine")
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    nn.utils.clip_grad_norm(net.parameters(), 1.0)
"""
)


@pytest.mark.parametrize("how", ["always", "default", "error"])
def test_a_warning_is_told_at_the_line_that_it_names_without_the_watch(tmp_path, how):
    bare = process(tmp_path, WARNS, "script.py", how).stderr
    watched = process(tmp_path, WARNS, ROOT / "autopsy", "script.py", how).stderr
    own = "".join(line for line in watched.splitlines(True) if not line.startswith("autopsy:"))
    assert own == bare and "Implicit dimension choice" in bare


def test_a_script_that_is_not_there_is_named_in_one_line(tmp_path):
    code, _, err = run_script([ROOT / "autopsy", "nowhere.py"], tmp_path)
    assert (code, err) == (2, "autopsy: nowhere.py is not a file (python autopsy --help)\n")


@pytest.mark.parametrize(
    "words",
    [
        "--nothing script.py",
        "-c pass",
        "--from-step -1 script.py",
        "--share 2 script.py",
        "--share nan script.py",
        "--would-overflow --check-gradients script.py",
        "--would-overflow 0 script.py",
        "--check-gradients -1 script.py",
        "",
    ],
)
def test_a_wrong_argument_is_told_in_one_sentence_before_the_script_runs(tmp_path, words):
    done = process(tmp_path, "print('ran')", ROOT / "autopsy", *words.split())
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("autopsy: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("flag", ["-I", "-P"] if sys.version_info >= (3, 11) else ["-I"])
def test_python_may_be_told_to_search_nothing_beside_the_script(tmp_path, flag):
    (tmp_path / "beside.py").write_text("")
    text = "import sys, torch\nprint(sys.path)\nimport beside"
    bare = process(tmp_path, text, flag, "script.py")
    watched = process(tmp_path, text, flag, ROOT / "autopsy", "script.py")
    assert bare.returncode == watched.returncode == 1 and "beside" in watched.stderr
    assert bare.stdout == watched.stdout


def test_the_scripts_own_hook_of_exceptions_gets_its_own_traceback(tmp_path):
    text = """
import sys, torch, traceback
sys.excepthook = lambda kind, error, tb: print(len(traceback.extract_tb(tb)), error.args)
raise ValueError("mine")
"""
    bare = process(tmp_path, text, "script.py")
    watched = process(tmp_path, text, ROOT / "autopsy", "script.py")
    assert bare.stdout == watched.stdout == "1 ('mine',)\n"


def test_a_module_runs_by_its_name(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(CLASSIFIER)
    code, _, err = run_script([ROOT / "autopsy", "-m", "package.train", "division"], tmp_path)
    assert code == 3 and f"train.py:{line_of(CLASSIFIER, 'division')} " in err, err


def test_a_bad_checkpoint_is_not_the_optimizers_work(run, tmp_path):
    torch.save(
        {"weight": torch.full((3, 6), torch.nan), "bias": torch.zeros(3)}, tmp_path / "spoilt.pt"
    )
    done = run(FORMS, "restored")
    assert "what the script writes into weight is nan at step 5" in done.stderr, done.stderr
    assert "-> weights" in done.stderr, done.stderr


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
    blind = run("import torch; torch._foreach_norm = torch.Tensor.abs = None" + WRITTEN)
    assert blind.returncode == 4 and "nothing was read (exit code 4)" in blind.stderr


RANKS = (
    PREAMBLE
    + """
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
)


LEAVES = RANKS.replace(
    "    optimizer.zero_grad(); loss",
    """    if loss.item() != loss.item():
        sys.exit("Loss is not finite")
    optimizer.zero_grad(); loss""",
).replace("out / (out * 0)", "out * 0 / (out * 0)")
SHARDED = RANKS.replace(
    "ddp = nn.parallel.DistributedDataParallel(net)",
    """
from torch.distributed.fsdp import fully_shard
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
for layer in (net[0], net[2], net):
    fully_shard(layer, mesh=mesh)
ddp = net""",
)


def printed(done):
    """The script's own lines: gloo of torch 2.9 prints on every rank, at the same time."""
    return [line for line in done.stdout.splitlines() if re.match(r"\d 0x", line)]


@pytest.mark.parametrize("text", [LEAVES, SHARDED], ids=["sys.exit", "fsdp"])
def test_a_rank_that_leaves_and_a_sharded_model_do_not_hang_and_the_guilty_one_is_named(
    tmp_path, text
):
    bare, watched = (ranks(tmp_path, text, watched=w) for w in (False, True))
    assert printed(bare) == printed(watched) and len(printed(bare)) == 5, watched.stderr
    assert watched.returncode == 0 and watched.stderr.count("nothing non-finite") == 1
    done = ranks(tmp_path, text, "fault")
    assert done.returncode != 0, done.stderr
    assert f"script.py:{line_of(text, 'rank')} " in done.stderr, done.stderr
    assert done.stderr.count("first bad op") == 1 and "rank 1" in done.stderr, done.stderr


def test_under_torchrun_every_rank_watches_and_the_guilty_one_is_named(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    done = process(tmp_path, RANKS, *torchrun, ROOT / "autopsy", "script.py", "fault")
    assert done.returncode != 0 and "guilty: rank 1 of 2" in done.stderr, done.stderr
    assert f"script.py:{line_of(RANKS, 'rank')} " in done.stderr
    assert done.stderr.count("first bad op") == 1


def test_a_bad_weight_is_judged_before_the_loss_that_it_explains():
    deferred, judged, bad = DeferredChecks(), [], torch.tensor([math.nan])
    losses = deferred.entries([bad], lambda t, norm: judged.append("loss"))
    deferred.wrote(bad, "a write", lambda p, writes, t, norm: judged.append("written"))
    deferred.note([bad, bad + 1], lambda t, norm: judged.append("noted"))
    assert deferred.transfer([torch.tensor(2.0)], losses) == [2.0]
    assert judged == ["noted", "noted", "written", "loss"] and not deferred.transfer()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_script_runs_unchanged_and_its_fault_is_named(run, case):
    """What the table says, a finding at most, and the figures are as without autopsy."""
    bare = run(case.script, case.fault, watched=False)
    done = run(case.script, case.fault)
    said = done.stderr
    assert False not in case.judge(done.returncode, said).values(), said
    assert bare.stdout.startswith(done.stdout), said
    if case.code:
        assert "nothing non-finite" not in said, said
    else:
        *findings, last_line = said.split("autopsy: ")[1:]
        assert len(findings) == (not case.found(last_line)), said
        assert done.stdout == bare.stdout and not (run.folder / "autopsy.txt").exists()
    wanted = " ... ".join(case.words)
    assert said.count("-> ") == (case.code == 3 or "-> " in wanted), said
    assert ("runs again" in said) == ("runs again" in wanted), said


def test_where_no_step_is_made_a_scaler_that_is_never_updated_is_told(run):
    said = run(planted.BESIDE, "no step").stderr
    words = "no step is made (scale() was called 40 times, at script.py:17 in <module>, and update"
    assert words in said and ") has made no step, though net.weight" in said, said


class Broken(Events):
    def over(self):
        raise KeyError("its own fault")


class Counts(Events):
    n = 0

    def over(self):
        self.n += 1


def test_a_check_that_raises_ends_alone():
    good = Counts(None)
    listeners = Listeners([Broken(None), good], Hooks(Budget(1.0)))
    listeners.over()
    listeners.over()
    assert good.n == 2 and len(listeners.failures) == 1
    assert "the check Broken failed (KeyError: 'its own fault')" in listeners.failures[0]


@pytest.mark.parametrize(
    "share, cost, steps",
    [
        (0.2, 0.001, 100),
        (0.2, 10.0, 14),
        (0.0, 0.001, 14),
        (1.0, 10.0, 100),
    ],
)
def test_what_costs_more_than_its_share_is_not_recorded(share, cost, steps):
    now = 0.0
    budget = Budget(share, clock=lambda: now)
    for step in range(100):
        now += 0.1  # of the script
        if budget.recording:
            began, before = now, budget.spent
            now += cost
            budget.spend(began, before)
        budget.over(step + 1)
    assert budget.recorded == steps and bool(budget.in_words()) == (steps < 100)


UNRECORDED = (
    PREAMBLE
    + """
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(net.parameters(), 0.01)
@torch.jit.script
def bad(x):
    return torch.isnan(x).any()
masked = torch.masked.masked_tensor(torch.eye(2), torch.eye(2).bool())
for step in range(30):
    x = torch.randn(5, 4)
    out = net(x)
    if fault == "beside":  # what a step that is not recorded must not disturb
        bad(out), (masked * 2).sum().item(), out[0, 0].tolist(), float(out[0, 0]), masked != masked
        with torch.no_grad(): net(torch.empty(2, 4).fill_(1)).numpy()
    if step == 20 and fault == "loss": out = out / (out * 0)  # loss
    if step == 20 and fault == "raised": torch.distributions.Normal(out * torch.nan, 1)  # raised
    loss = out.square().mean()
    if step == 20 and fault in ("asked", "skipped"):
        loss = loss * torch.inf * 0  # asked skipped
        if torch.isnan(loss):
            if fault == "skipped": continue
            raise ValueError("what is wrong?")
    optimizer.zero_grad(); loss.backward()
    if step == 20 and fault == "gradient": net[0].weight.grad.fill_(torch.nan)  # gradient
    optimizer.step()
    if step == 20 and fault == "written":
        with torch.no_grad(): net[0].weight.mul_(torch.nan)  # written
if fault == "evaluated":
    with torch.no_grad(): net(torch.full((2, 4), torch.nan))  # evaluated
print(loss.item().hex(), torch.rand(1).item())
"""
)


@pytest.mark.parametrize(
    "fault, line, words",
    [
        ("loss", "loss", "-> divergence"),
        ("asked", "asked skipped", "-> data"),
        ("skipped", "asked skipped", "-> data"),
        ("raised", "raised", ""),
        ("gradient", "", ""),
        ("written", "written", "0.weight is nan"),
        ("evaluated", "evaluated", "under no_grad"),
        ("beside", "", ""),
        ("", "", ""),
    ],
)
def test_a_bad_step_that_was_not_recorded_is_found(run, fault, line, words):
    bare = run(UNRECORDED, fault, watched=False)
    done = run(UNRECORDED, fault, before=["--share", "0"])
    assert bare.stdout == done.stdout or fault in ("loss", "gradient", "written")
    if fault in ("beside", ""):
        assert done.returncode == 0 and "10 of 30 updates were recorded" in done.stderr, done.stderr
        return
    assert done.returncode == 3 and "was not recorded: the script runs again" in done.stderr
    text = (run.folder / "autopsy.txt").read_text()
    assert "seen in a second run" in text and words in text, text
    if line:
        assert f"script.py:{line_of(UNRECORDED, line)} " in text, text
    once = run(UNRECORDED, fault, before=["--share", "0", "--one-run"])
    if fault != "evaluated":
        assert once.returncode == 3 and "the step was not recorded" in once.stderr, once.stderr


@pytest.mark.parametrize("step", [20, 21, 22, 23])  # of four that are not recorded, one is read
def test_an_update_that_was_not_read_is_found_in_a_second_run(run, step):
    text = UNRECORDED.replace(
        "    optimizer.step()",
        f"""
    if step == {step}: optimizer.param_groups[0]["lr"] = float("inf")
    optimizer.step()""",
    )
    done = run(text, before=["--share", "0"])
    words = f"at step {step} -> optimizer\n  try: look at the schedule"
    assert done.returncode == 3 and words in done.stderr, done.stderr


@pytest.mark.parametrize(
    "fault, words",
    [
        ("alike", ""),
        ("units", "holds numbers up to "),  # which the step after it shows
        ("rate", "At step 150 the lr rose from 0.01 to 1"),
        ("target", ""),
        ("fold", ""),
        ("", ""),
    ],
)
def test_a_jump_whose_step_was_not_recorded_is_told(run, fault, words):
    said = run(planted.JUMP, fault, before=["--share", "0"]).stderr
    assert words in said and ("jumped" in said) == bool(words), said


RESUMED = (
    PREAMBLE
    + """
import copy
net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(net.parameters(), 1e-2)
for step in range(200):
    if step == 100 and fault:
        saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
        net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2))
        optimizer = torch.optim.Adam(net.parameters(), 1e-2)
        if fault == "without the head":
            saved = {name: t for name, t in saved[0].items() if name[0] == "0"}, saved[1]
        net.load_state_dict(saved[0], strict=False)
        optimizer.load_state_dict(saved[1])
    if step == 150 and fault == "another file":
        net.load_state_dict({name: -4 * t for name, t in net.state_dict().items()})
    x = torch.randn(32, 6)
    loss = F.mse_loss(net(x), x[:, :2])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
)


@pytest.mark.parametrize(
    "fault, words",
    [
        ("without the head", "step 100: .* new one since step 100: .*2.weight, .*2.bias differ"),
        ("another file", "step 150: .* Shortly before, weights were loaded at script.py:"),
        ("all of it", ""),
        ("", ""),
    ],
)
def test_what_is_known_of_such_a_jump_without_a_recording_is_told(run, fault, words):
    said = run(RESUMED, fault, before=["--share", "0"]).stderr
    assert re.search(words, said) and ("jumped" in said) == bool(words), said


MOMENTS = (
    PREAMBLE
    + """
net = nn.Linear(4, 2).half()
optimizer = torch.optim.Adam(net.parameters(), 1e-3, betas=(0.9, 0.5), eps=1e-4)
for step in range(40):
    loss = net(torch.randn(5, 4).half()).square().mean() * (2000 if step == 20 else 1)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
)


def test_a_loss_of_a_network_is_told_once_at_the_line_of_its_call(run):
    """In a step that is not recorded only the line of backward() is known."""
    text = """
import torch
class Net(torch.nn.Linear):
    def forward(self, x, y):
        return torch.nn.functional.cross_entropy(super().forward(x).softmax(1), y)
torch.manual_seed(0)
net = Net(4, 3)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(20):
    loss = net(torch.randn(6, 4), torch.arange(6) % 3)  # called
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    said = run(text, before=["--share", "0"]).stderr
    (called,) = lines_of(text, "called")
    assert said.count("went through softmax already") == 1, said
    assert f"the loss at script.py:{called} in <module>: its input went" in said


@pytest.mark.parametrize(
    "share, step, words",
    [
        ("1", 20, "inf after"),
        ("0", 31, "inf (perhaps for longer: the steps before"),
    ],
)
def test_moments_are_read_in_recorded_steps(run, share, step, words):
    done = run(MOMENTS, before=["--share", share])
    assert done.returncode == 3 and f"at step {step} -> optimizer" in done.stderr, done.stderr
    assert f"exp_avg_sq of weight is {words}" in done.stderr


class NeverSearched(list):
    """Of calls: nobody walks all of them, nor searches from the front."""

    def __iter__(self):
        raise AssertionError("walked")

    index = remove = __contains__ = __iter__


LONG = (
    PREAMBLE
    + """
import gc, tracemalloc
net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
average = [p.detach().clone() for p in net.parameters()]
optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4000)
def train(steps):
    for _ in range(steps):
        x = torch.randn(8, 4); loss = F.cross_entropy(net(x), x[:, :3].argmax(1))
        optimizer.zero_grad(); loss.backward(); nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step(); rate.step()
        with torch.no_grad():
            for p, q in zip(net.parameters(), average): q.lerp_(p, 0.01)
    gc.collect()
    return tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/autopsy/*")])
tracemalloc.start()
before = train(400)
print(sum(row.size_diff for row in train(3000).compare_to(before, "filename")))
"""
)


def test_what_is_held_does_not_grow_with_the_steps(run):
    """In a run of weeks: 30 bytes a step would be 100 MB in three million steps."""
    done = run(LONG)
    assert int(done.stdout) < 3000 * 30, (done.stdout, done.stderr)


def test_a_call_and_a_write_cost_the_same_however_many_calls_are_held(monkeypatch):
    monkeypatch.setattr("autopsy.watch.recorder.COPIED", 8)
    hooks = Hooks(Budget(1))
    recorder = hooks.recorder = CallRecorder(hooks)
    recorder.listener = SimpleNamespace(silent=Listeners((), hooks))
    recorder.calls, data = NeverSearched(), torch.arange(40.0)
    hooks.record(True)
    try:
        y = data[0] * 2
        part = data[3:5]
        for _ in range(3):
            y = y * 0.5
            y.is_floating_point()
            part += 1
            data[7].add_(5)
        z = part * data[7]
    finally:
        hooks.close()
    made = {}
    for call in list.__getitem__(recorder.calls, slice(None)):
        call.repeat(made)
    assert made[recorder.known[y]].equal(y) and made[recorder.known[z]].equal(z)
