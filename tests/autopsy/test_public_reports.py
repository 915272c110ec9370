"""Runs that are finite and wrong: public reports, their twins, and ranks with other weights."""

import pytest
import torch
from helpers import ROOT, run_ranks, run_script

from autopsy.silent.state.own_state import _share
from autopsy.tensors import storage_of
from autopsy.watch.calls import Call, ResultRef
from bench import public_reports
from bench.public_reports import OTHERS, PRELUDE, REPORTS, outcome


@pytest.mark.parametrize("name", [*REPORTS, *OTHERS])
def test_the_fault_is_named_and_a_healthy_loop_is_not_accused(name, tmp_path, monkeypatch):
    def run(script):
        """As the bench does, without the seconds of a fresh Python."""
        (tmp_path / "script.py").write_text(PRELUDE + script)
        code, _, err = run_script([ROOT / "autopsy", "script.py"], tmp_path)
        said = [line for line in err.splitlines() if "finite, largest gradient" not in line]
        return code, "\n".join(said)

    monkeypatch.setattr(public_reports, "run", run)
    right, said, of_the_twin = outcome(name)
    assert right, f"{said}\n---\n{of_the_twin}"


RANKS = """
import sys, torch
import torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
fault, rank = sys.argv[1], dist.get_rank()
torch.manual_seed(rank if fault in ("seed", "local", "wrapped") else 0)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
WRAPPED = "wrapped", "loaded", "exchanged", "alone"
wrap = nn.parallel.DistributedDataParallel
model = wrap(net, find_unused_parameters=True) if fault in WRAPPED else net
if fault == "loaded" and rank: nn.init.normal_(net[2].weight)  # after DDP has broadcast
torch.manual_seed(rank)
if fault == "exchanged": net[2].weight = nn.Parameter(torch.randn(1, 16))  # pytorch#12603
opt = torch.optim.SGD(net.parameters(), lr=2e-2 if fault == "rate" and rank else 1e-2)
for step in range(20):
    x = torch.randn(32, 8)
    opt.zero_grad()
    if fault == "alone":  # each rank trains for itself, and now and then they average
        with model.no_sync(): (model(x) - x[:, :1]).pow(2).mean().backward()
    else: (model(x) - x[:, :1]).pow(2).mean().backward()
    for p in net.parameters() if model is net and fault != "local" else ():
        dist.all_reduce(p.grad); p.grad /= 2
    opt.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("seed", "rank 1 holds other weights than rank 0 after step 0, though their gradients are"),
        ("loaded", "2.weight by"),
        ("rate", "they were the same before the first step"),
        ("exchanged", "though DistributedDataParallel has wrapped their network: 2.weight by"),
        ("", ""),
        ("wrapped", ""),
        ("local", ""),
        ("alone", ""),
    ],
)
def test_ranks_with_other_weights_are_named(tmp_path, fault, words):
    (tmp_path / "script.py").write_text(RANKS)
    done = run_ranks([ROOT / "autopsy", "script.py", fault], tmp_path)
    said = "".join(err for _, _, err in done)
    assert [code for code, _, _ in done] == [0, 0], said
    assert (words in said) if words else "holds other weights" not in said


HEAD = """
import sys, torch
import torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
body, head = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 3)
HELD
opt = torch.optim.Adam([*body.parameters(), *head.parameters()], 3e-3)
torch.manual_seed(rank)
for step in range(20):
    x = torch.randn(32, 8)
    opt.zero_grad()
    nn.functional.cross_entropy(head(body(x)), x[:, :3].argmax(1)).backward()
    AVERAGE
    opt.step()
dist.destroy_process_group()
"""
HELD = "body = nn.parallel.DistributedDataParallel(body)"


@pytest.mark.parametrize(
    ("held", "average", "words"),
    [
        (HELD, "pass", "and began with the same: head."),
        (f"{HELD}; personal_head = head", "pass", ""),
        (HELD, "for p in head.parameters(): dist.all_reduce(p.grad); p.grad /= 2", ""),
        (f"{HELD}; head = nn.parallel.DistributedDataParallel(head)", "pass", ""),
        ("pass", "pass", ""),
    ],
)
def test_a_head_that_no_wrapper_holds_is_named(tmp_path, held, average, words):
    text = HEAD.replace("HELD", held).replace("AVERAGE", average)
    (tmp_path / "script.py").write_text(text)
    done = run_ranks([ROOT / "autopsy", "script.py"], tmp_path)
    said = "".join(err for _, _, err in done)
    assert [code for code, _, _ in done] == [0, 0], said
    assert (words in said) if words else "holds other weights" not in said, said


SKIPS = """
import sys, torch
import torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
fault, rank = sys.argv[1], dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.SGD(net.parameters(), 2e-2)
torch.manual_seed(rank)
for step in range(20 if fault != "leaves" or rank == 0 else 5):
    x = torch.randn(32, 8)
    opt.zero_grad()
    (net(x) - x[:, :1]).pow(2).mean().backward()
    for p in net.parameters() if fault != "leaves" else ():
        dist.all_reduce(p.grad); p.grad /= 2
    if step % 3 and (rank == 0 or fault == "both"): opt.step()
    elif step % 3 == 0 and (rank == 1 or fault == "both"): opt.step()
    elif step % 5 == 1: opt.step()
if fault != "leaves": dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("fault", "words"), [("one", "let all ranks decide together"), ("both", ""), ("leaves", "")]
)
def test_a_rank_that_skips_a_step_of_the_others_is_named(tmp_path, fault, words):
    (tmp_path / "script.py").write_text(SKIPS)
    done = run_ranks([ROOT / "autopsy", "script.py", fault], tmp_path)
    said = "".join(err for _, _, err in done)
    assert [code for code, _, _ in done] == [0, 0], said
    assert (words in said) if words else "holds other weights" not in said, said


def test_a_long_chain_of_sums_is_not_followed_to_its_end():
    """w = w + w, forty times: two to the power of forty ways lead back."""
    p = torch.ones(2)
    calls = [Call(torch.add, 0, args=(p, p))]
    calls += [Call(torch.add, n, args=(ResultRef(n - 1, 0),) * 2) for n in range(1, 41)]
    assert _share(ResultRef(40, 0), storage_of(p), calls) is None
    assert _share(ResultRef(1, 0), storage_of(p), calls) == (4.0, 4)
