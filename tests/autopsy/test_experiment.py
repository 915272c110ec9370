"""Experiments on one recorded call of a module: all is as it was afterwards."""

import pytest
from helpers import ROOT, run_script

SCRIPT = """
import random, sys, torch
from torch import nn
torch.manual_seed(0); random.seed(0)
fault = sys.argv[1] == "fault"
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)
        self.norm, self.calls, self.seen = nn.BatchNorm1d(16), 0, []
        self.generator = torch.Generator()
    def forward(self, x, cond):
        self.calls += 1; self.seen.append(random.random()); print("forward")
        noise = torch.randn(16, generator=self.generator)
        h = self.norm(self.first(x)) + nn.functional.dropout(noise, 0.5, self.training)
        return self.last(h + (cond - cond)) if fault else self.last(h + cond)
net = Net(); opt = torch.optim.Adam(net.parameters(), 1e-2)
for i in range(40):
    x = torch.randn(16, 8); opt.zero_grad()
    net(x, torch.randn(16, 1)).square().mean().backward(); opt.step()
print(net.calls, net.seen, net.norm.running_mean.sum().item(), net.last.weight.sum().item())
print(torch.rand(()).item(), random.random(), net.generator.get_state().sum().item())
"""


@pytest.mark.parametrize("kind", ["fault", "healthy"])
def test_a_run_whose_call_is_made_again_ends_bit_by_bit_as_without_autopsy(tmp_path, kind):
    (tmp_path / "script.py").write_text(SCRIPT)
    _, plain, _ = run_script(["script.py", kind], tmp_path)
    code, out, err = run_script([ROOT / "autopsy", "script.py", kind], tmp_path)
    assert code == 0
    assert ("the input cond of Net" in err) is (kind == "fault"), err
    assert out == plain
