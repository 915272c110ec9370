"""
How often does `python autopsy.py SCRIPT` name the fault of a script?

    python bench/diagnosis_scripts.py                  # a process a script, some seconds each

Each script is distilled from a published report (the address stands beside it): how a training loop
meets a bad number, apart from the operation that made it. It raises, it passes over the batch, its
optimizer makes the NaN, its weights never move. What a right answer is was written down and
committed before the first run: the exit code, words of the report, and the line marked `<- guilty`.
"""
import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bench.record import header, write  # noqa: E402

HEAD = """
import torch, sys
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
def loop(net, loss_of, steps=8, optimizer=None):
    optimizer = optimizer or torch.optim.AdamW(net.parameters(), 1e-3)
    for step in range(steps):
        loss = loss_of(step)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        print(step, loss.item())
class Net(nn.Module):
    def __init__(self, body, *layers):
        super().__init__()
        self.body, self.layers = body, nn.ModuleList(layers)
    def forward(self, *x):
        return self.body(self.layers, *x)
def data(step, n=6, seed=0):
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(100 * seed + step))
"""

# name: (report, exit code, words of the answer, script)
SCRIPTS = {
    "policy_that_raises": ("https://github.com/IDSIA/hhmarl_2D/issues/15", 3, "-> divergence", """
def body(layers, x):
    h = layers[0](x)
    return h / h.detach().abs().amax(1, keepdim=True).sub(bad)  # <- guilty
net = Net(body, nn.Linear(4, 3))
def loss_of(step):
    global bad
    x = data(step)
    with torch.no_grad():
        bad = net.layers[0](x).abs().max() if step == 4 else 100.0
    policy = torch.distributions.Categorical(logits=net(x))
    return -policy.log_prob(torch.zeros(6, dtype=torch.long)).mean()
loop(net, loss_of)
"""),
    "simplex_of_nothing": ("https://github.com/thu-ml/tianshou/issues/823", 3, "-> divergence", """
def body(layers, x):
    h = layers[0](x).relu()
    return h / h.sum(1, keepdim=True)  # <- guilty
net = Net(body, nn.Linear(4, 3))
def loss_of(step):
    x = data(step) if step != 3 else data(step) * 0
    net.layers[0].bias.data.fill_(0.5 if step != 3 else -1)
    policy = torch.distributions.Categorical(net(x))
    return -policy.entropy().mean()
loop(net, loss_of)
"""),
    "mask_too_large_for_half": ("https://github.com/NVIDIA/apex/issues/1052", 3, "-> precision", """
def body(layers, x):
    scores = layers[0](x)
    return scores.masked_fill(x > 2, -1e9).softmax(1)  # <- guilty
net = Net(body, nn.Linear(4, 4))
def loss_of(step):
    with torch.autocast("cpu", torch.float16, enabled=step >= 2):
        out = net(data(step))
    return out.float().square().mean()
loop(net, loss_of)
"""),
    "score_assigned_in_half": ("https://github.com/QwenLM/Qwen/issues/32", 3, "-> precision", """
def body(layers, x):
    scores = layers[0](x)
    if len(x) == 5:
        scores[:, 1] = float(2**30)  # <- guilty
    return scores
net = Net(body, nn.Linear(4, 4))
def loss_of(step):
    with torch.autocast("cpu", torch.float16):
        out = net(data(step, 5 if step == 3 else 6))
    return out.float().square().mean()
loop(net, loss_of)
"""),
    "angle_at_the_origin": ("https://github.com/pytorch/pytorch/issues/98276", 3, "angle at 0", """
def body(layers, x):
    h = layers[0](x)
    return torch.view_as_complex(h).angle()  # <- guilty
net = Net(body, nn.Linear(4, 2, bias=False))
def loss_of(step):
    x = data(step)
    x[2] = 1e-30 if step == 5 else 1
    return net(x).square().mean()
loop(net, loss_of)
"""),
    "node_without_neighbours": ("https://github.com/pyg-team/pytorch_geometric/issues/1129", 3,
                                "no mask", """
def body(layers, x, to):
    index = to[:, None].expand(-1, 4)
    most = torch.full((6, 4), -torch.inf)  # <- guilty
    most = most.scatter_reduce(0, index, layers[0](x), "amax")
    return layers[1](most)
net = Net(body, nn.Linear(4, 4), nn.Linear(4, 3))
def loss_of(step):
    to = torch.arange(6)
    if step == 4:
        to[3] = 2
    return net(data(step), to).square().mean()
loop(net, loss_of)
"""),
    "number_of_neighbours_is_0": ("https://github.com/biomed-AI/Hist2ST/pull/7", 3, "samples 5", """
def body(layers, x, adjacent):
    h = layers[0](x)
    return adjacent @ h / adjacent.sum(1, keepdim=True)  # <- guilty
net = Net(body, nn.Linear(4, 3))
def loss_of(step):
    adjacent = torch.ones(6, 6)
    if step == 4:
        adjacent[5] = 0
    return net(data(step), adjacent).square().mean()
loop(net, loss_of)
"""),
    "batches_passed_over": ("https://github.com/automl/TFM-Playground/pull/20", 3, "-> data", """
net = nn.Linear(4, 1); optimizer = torch.optim.AdamW(net.parameters())
for step in range(30):
    y = data(step, seed=1)[:, :1]
    y[3] = torch.nan if step % 7 == 3 else 0  # the label that is missing
    loss = F.mse_loss(net(data(step)), y)  # <- guilty
    if torch.isnan(loss):
        continue
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""),
    "step_skipped_if_nan": ("https://github.com/karpathy/nanoGPT/pull/227", 3, "-> divergence", """
def body(layers, x):
    h = layers[0](x)
    return h / x.sum(1, keepdim=True)  # <- guilty
net = Net(body, nn.Linear(4, 1)); optimizer = torch.optim.AdamW(net.parameters())
for step in range(9):
    x = data(step)
    if step == 4:
        x[1] = 0
    loss = net(x).square().mean()
    if not loss.isfinite():
        print("skipped"); continue
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""),
    "exit_at_a_nan": ("https://github.com/mlfoundations/open_lm/pull/7", 3, "-> divergence", """
def body(layers, x):
    return (layers[0](x) * x.abs().sum(1, keepdim=True)).log()  # <- guilty
net = Net(body, nn.Linear(4, 1)); optimizer = torch.optim.AdamW(net.parameters())
net.layers[0].weight.data.zero_(); net.layers[0].bias.data.fill_(3)
for step in range(9):
    loss = net(data(step) * (step != 6)).mean()
    if loss.item() != loss.item() or abs(loss.item()) == float("inf"):
        sys.exit("Loss is not finite")
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""),
    "every_label_masked": ("https://github.com/londonaicentre/FLIP/pull/766", 3,
                           "division by zero|max\\(1|-> data", """
net = nn.Linear(4, 3)
def loss_of(step):
    labels = torch.ones(6, 3) if step not in (3, 4) else -torch.ones(6, 3)
    known = labels >= 0
    loss = F.binary_cross_entropy_with_logits(net(data(step)), labels.clamp(min=0),
                                              reduction="none")
    return (loss * known).sum() / known.sum()  # <- guilty
loop(net, loss_of)
"""),
    "validation_of_nothing": ("https://github.com/rasbt/LLMs-from-scratch/pull/124", 3,
                              "read nan at script.py", """
net = nn.Linear(4, 1)
loop(net, lambda step: net(data(step)).square().mean())
with torch.no_grad():
    losses = [net(x).mean() for x in data(0)[6:].split(2)]
    print("validation", float(torch.stack([net(data(0))[6:].mean()]).mean()))  # <- guilty
"""),
    "norm_weights_of_one_in_bf16": ("https://github.com/vllm-project/speculators/pull/765", 0,
                                    "1 bfloat16 tensors had gradients .* never changed", """
net = nn.Sequential(nn.Linear(4, 8, bias=False), nn.RMSNorm(8)).to(torch.bfloat16)
optimizer = torch.optim.AdamW(net.parameters(), 1e-3, weight_decay=0.0)
loop(net, lambda step: net(data(step).bfloat16()).float().square().mean(), 20, optimizer)
"""),
    "no_master_weights": ("https://github.com/workofart/ml-by-hand/pull/85", 0,
                          "2 bfloat16 tensors had gradients .* never changed", """
net = nn.Linear(4, 3).to(torch.bfloat16)
nn.init.ones_(net.weight); nn.init.ones_(net.bias)
optimizer = torch.optim.AdamW(net.parameters(), 6e-4, weight_decay=0.0)
loop(net, lambda step: net(data(step).bfloat16()).float().square().mean(), 20, optimizer)
"""),
    "muon_of_a_zero_gradient": ("https://github.com/microsoft/dion/pull/24", 3, "-> optimizer", """
class NorMuon(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2})
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            u = p.grad
            ratio = u.norm() / u.square().mean(1, keepdim=True).sqrt().norm()  # <- guilty
            p.add_(u * ratio, alpha=-1e-2)
net = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False))
net[1].weight.data.zero_()
loop(net, lambda step: (net(data(step)) - 1).square().mean(), 8, NorMuon(net.parameters()))
"""),
    "neuron_norm_of_an_optimizer": ("https://github.com/kozistr/pytorch_optimizer/issues/120", 3,
                                    "-> optimizer", """
class Nero(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2})
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=1e-2)
            p.div_(p.norm(dim=1, keepdim=True))  # <- guilty
net = nn.Linear(4, 3, bias=False)
net.weight.data[1] = 0
target = torch.tensor([1.0, 0, 1])
loop(net, lambda step: (net(data(step)) - target).square()[:, ::2].mean(), 8,
     Nero(net.parameters()))
"""),
    "loss_weighted_by_its_spread": ("https://github.com/rickgroen/cov-weighting/issues/3", 3,
                                    "-> divergence", """
net = nn.Linear(4, 2)
history = []
def loss_of(step):
    losses = (net(data(step)) * (0 if step >= 4 else 1)).square().mean(0)
    history.append(losses.detach())
    weights = losses.detach() / history[-1]  # <- guilty
    return (weights * losses).sum()
loop(net, loss_of)
"""),
    "a_scale_of_zero": ("https://github.com/huzi96/Coarse2Fine-PyTorch/issues/16", 3,
                        "-> divergence", """
def body(layers, x):
    mean, scale = layers[0](x).chunk(2, 1)
    return (x[:, :2] - mean) / scale.relu()  # <- guilty
net = Net(body, nn.Linear(4, 4))
net.layers[0].bias.data.fill_(5)
def loss_of(step):
    if step == 5:
        net.layers[0].bias.data[3] = -50
    return net(data(step)).tanh().square().mean()
loop(net, loss_of)
"""),
    "attention_mask_in_fp16": ("https://github.com/facebookresearch/fairseq/issues/3575", 3,
                               "-> precision", """
def body(layers, x):
    scores = layers[0](x) @ layers[1](x).T
    hidden = torch.eye(len(x), dtype=torch.bool)
    return scores.masked_fill(hidden, -1e8).softmax(-1) @ x.to(scores.dtype)  # <- guilty
net = Net(body, nn.Linear(4, 4), nn.Linear(4, 4))
def loss_of(step):
    with torch.autocast("cpu", torch.float16):
        return net(data(step)).float().square().mean()
loop(net, loss_of)
"""),
}


def answer(name: str, folder: str) -> dict:
    """What the tool says of one script, and whether that is right."""
    _, code, words, text = SCRIPTS[name]
    text = HEAD + text
    Path(folder, "script.py").write_text(text)
    done = subprocess.run([sys.executable, str(ROOT / "autopsy.py"), "script.py"], cwd=folder,
                          capture_output=True, text=True, timeout=600,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    guilty = [n for n, line in enumerate(text.splitlines(), 1) if "<- guilty" in line]
    lines = [int(n) for n in re.findall(r"script\.py:(\d+) ", done.stderr)]
    said = done.stderr[-1500:]
    right = {"code": done.returncode == code, "words": bool(re.search(words, done.stderr)),
             "line": not guilty or guilty[0] in lines}
    return {"right": right, "whole": all(right.values()), "said": said,
            "second run": "runs again" in done.stderr}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="diagnosis_scripts", help="of the raw file")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    args = parser.parse_args()
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in SCRIPTS:
            rows[name] = answer(name, folder)
            print(f"{name:32} {'right' if rows[name]['whole'] else 'wrong'} {rows[name]['right']}")
    whole = sum(row["whole"] for row in rows.values())
    second = sum(row["second run"] for row in rows.values())
    device = torch.device("cpu")
    record = header(args.name, vars(args), device)
    record |= {"wholly right": [whole, len(rows)], "second runs": second, "cases": rows}
    write(record, args.results, device, ("cases",))


if __name__ == "__main__":
    main()
