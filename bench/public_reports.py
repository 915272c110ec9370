"""Public reports of runs that are finite and wrong: what does `python autopsy SCRIPT.py` say?

Each row has the address of a report, a small script of ours with the same fault, and a twin of it
without: one passage is another. The words that autopsy should say were written before its first
run; of the twin it must say nothing. OTHERS are healthy loops that look odd. SILENT are reports
that autopsy still does not name. These 8 and the last 12 of REPORTS were fresh: at first sight it
named 2 of the 20, and 12 after we had written checks for what they show; no twin was accused
(first run: public_reports_fresh-first-cpu.json).

    python bench/public_reports.py [NAME...]      with names: prints their output, writes no file
"""

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.record import arguments, header, write
from bench.scripts import run
from bench.scripts.finite import PRELUDE


class Row(NamedTuple):
    address: str
    kind: str
    words: str  # that should be said: a regular expression
    script: str
    wrong: str  # a passage of the script
    right: str  # the same in the healthy twin

    @property
    def twin(self):
        assert self.script.count(self.wrong) == 1, self.address
        return self.script.replace(self.wrong, self.right)


REPORTS = {
    "micro-batches cleared": Row(
        "github.com/bytetriper/RAE/issues/67", "order",
        r"3 of 4 backward passes .* script.py:\d+ in <module> clears",
        """
net = mlp(); opt = torch.optim.AdamW(net.parameters(), 1e-3)
for i in range(200):
    if i % 1 == 0:
        opt.zero_grad(set_to_none=True)
    x, y = data(i); (F.mse_loss(net(x), y) / 4).backward()
    if i % 4 == 3:
        nn.utils.clip_grad_norm_(net.parameters(), 1.0); opt.step()
""", "i % 1 == 0", "i % 4 == 0"),
    "micro-batches cleared through the network": Row(
        "github.com/tatsu-lab/alpaca_farm/issues/57", "order",
        r"1 of 2 backward passes .* in train clears",
        """
def train(net, opt):
    for i in range(120):
        x, y = data(i); (F.mse_loss(net(x), y) / 2).backward()
        if i % 2: opt.step(); opt.zero_grad()
        net.zero_grad()
net = mlp(); train(net, torch.optim.Adam(net.parameters(), 1e-3))
""", "        net.zero_grad()\n", ""),
    "clipped before unscale_": Row(
        "github.com/milesial/Pytorch-UNet/issues/468", "order",
        r"65536 times too large when they were clipped to 1 at script.py:\d+",
        """
net = mlp(); opt = torch.optim.RMSprop(net.parameters(), 1e-4); s = torch.amp.GradScaler("cpu")
for i in range(60):
    x, y = data(i); opt.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.float16): out = net(x)
    s.scale(F.mse_loss(out.float(), y)).backward()
    pass
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0); s.step(opt); s.update()
""", "    pass\n", "    s.unscale_(opt)\n"),
    "values clipped before unscale_": Row(
        "github.com/k2-fsa/icefall/pull/2081", "order",
        r"1024 times too large when they were clipped to 0.5",
        """
net = mlp(); opt = torch.optim.SGD(net.parameters(), 1e-2)
s = torch.amp.GradScaler("cpu", init_scale=1024.0)
for i in range(60):
    x, y = data(i); opt.zero_grad()
    with torch.autocast("cpu", torch.float16): out = net(x)
    s.scale(F.mse_loss(out.float(), y)).backward()
    nn.utils.clip_grad_value_(net.parameters(), clip_value=0.5)
    s.step(opt); s.update()
""", "clip_value=0.5", "clip_value=0.5 * s.get_scale()"),
    "no zero_grad": Row(
        "github.com/yastrebksv/TennisCourtDetector/issues/7", "order",
        r"the gradients of 90 steps add up: .* script.py:\d+",
        """
net = mlp(); opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(90):
    x, y = data(i); loss = F.mse_loss(net(x), y)
    loss.backward(); opt.step()
""", "loss.backward()", "opt.zero_grad(); loss.backward()"),
    "zero_grad once an epoch": Row(
        "github.com/meta-pytorch/torchforge/pull/71", "order",
        r"gradients of 120 steps add up",
        """
net = mlp(); opt = torch.optim.SGD(net.parameters(), 1e-4)
for epoch in range(4):
    opt.zero_grad()
    for i in range(30):
        x, y = data(i); loss = F.mse_loss(net(x), y)
        loss.backward(); opt.step()
""", "loss.backward()", "[setattr(p, 'grad', None) for p in net.parameters()]; loss.backward()"),
    "zero_grad of the network only": Row(
        "github.com/tenstorrent/tt-blacksmith/pull/711", "order",
        r"nobody clears those of scale.weight, scale.bias before",
        """
net, scale = mlp(), nn.Linear(3, 3)
opt = torch.optim.Adam([*net.parameters(), *scale.parameters()], 1e-3)
for i in range(90):
    x, y = data(i); net.zero_grad()
    F.mse_loss(scale(net(x)), y).backward(); opt.step()
""", "net.zero_grad()", "opt.zero_grad()"),
    "a schedule for updates that moves with micro-batches": Row(
        "github.com/sgl-project/SpecForge/issues/364", "order",
        r"lr of .* was 0 since step \d+ .*LambdaLR steps 4 times an update, at script.py:\d+",
        """
net = mlp(); opt = torch.optim.AdamW(net.parameters(), 1e-3)
rate = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: max(0.0, 1 - k / 60))
for i in range(240):
    x, y = data(i); (F.mse_loss(net(x), y) / 4).backward()
    if i % 4 == 3: opt.step(); opt.zero_grad()
    if i % 1 == 0: rate.step()
""", "i % 1 == 0", "i % 4 == 3"),
    "a cosine that moves with micro-batches": Row(
        "github.com/starVLA/starVLA/pull/210", "order",
        r"made for 100 updates, and CosineAnnealingLR steps 2 times an update",
        """
net = mlp(); opt = torch.optim.AdamW(net.parameters(), 1e-3)
rate = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=100)
for i in range(200):
    x, y = data(i); (F.mse_loss(net(x), y) / 2).backward()
    if i % 2: opt.step(); opt.zero_grad()
    rate.step()
""", "T_max=100", "T_max=200"),
    "optimizers step again after the loss scaler": Row(
        "github.com/IAHispano/Applio/pull/860", "order",
        r"SGD makes two steps .* at script.py:\d+ in <module> and at script.py:\d+ in .*, [78]",
        """
G, D = nn.Linear(4, 8), mlp(1); s = torch.amp.GradScaler("cpu", init_scale=64.0)
g, d = torch.optim.SGD(G.parameters(), 1e-4), torch.optim.Adam(D.parameters(), 1e-4)
for i in range(80):
    x = data(i)[0]; fake = G(torch.randn(16, 4)); d.zero_grad()
    s.scale((F.softplus(-D(x)) + F.softplus(D(fake.detach()))).mean()).backward(); s.step(d)
    g.zero_grad(); s.scale(F.softplus(-D(fake)).mean()).backward(); s.step(g); s.update()
    g.step()
""", "    g.step()\n", ""),
    "a value head that is read with item()": Row(
        "github.com/jsboige/CoursIA/pull/15256", "path",
        r"no gradient has reached .*value.* read as a number at script.py:\d+ in rollout",
        """
class Agent(nn.Module):
    def __init__(self):
        super().__init__(); self.body, self.pi = nn.Linear(8, 16), nn.Linear(16, 3)
        self.value = nn.Linear(16, 1)
    def forward(self, x): h = self.body(x).tanh(); return self.pi(h), self.value(h)
def rollout(net, i):
    logp, values = [], []
    for x in data(i, 5)[0]:
        logits, v = net(x); logp.append(logits.log_softmax(-1)[0]); values.append(v.item())
    return torch.stack(logp), torch.tensor(values)
net = Agent(); opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(60):
    logp, values = rollout(net, i); returns = torch.linspace(1, 0, 5)
    loss = F.mse_loss(values, returns) - (logp * (returns - values.detach())).mean()
    opt.zero_grad(); loss.backward(); opt.step()
""", "values.append(v.item())\n    return torch.stack(logp), torch.tensor(values)",
        "values.append(v[0])\n    return torch.stack(logp), torch.stack(values)"),
    "a head that is read through NumPy": Row(
        "github.com/jsboige/CoursIA/pull/15256", "path",
        r"no gradient has reached head.bias, head.weight.* script.py:\d+",
        """
body, head, aux = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 3)
opt = torch.optim.Adam([*body.parameters(), *head.parameters(), *aux.parameters()], 1e-3)
for i in range(60):
    x, y = data(i); h = body(x).relu()
    out = torch.tensor(head(h).detach().numpy())
    loss = F.mse_loss(out, y) + F.mse_loss(aux(h), y)
    opt.zero_grad(); loss.backward(); opt.step()
""", "torch.tensor(head(h).detach().numpy())", "head(h)"),
    "a soft update that misses its target": Row(
        "github.com/AgileRL/AgileRL/pull/464", "state",
        r"target\.\S+ .*never move, though script.py:\d+ in <module> computes an average",
        """
net = mlp(); target = copy.deepcopy(net).requires_grad_(False)
mine = [p.clone() for p in target.parameters()]
opt = torch.optim.Adam(net.parameters(), 1e-2)
for i in range(60):
    x, y = data(i)
    with torch.no_grad(): y = y + 0.9 * target(x)
    opt.zero_grad(); F.mse_loss(net(x), y).backward(); opt.step()
    with torch.no_grad():
        for a, p in zip(mine, net.parameters()): a.mul_(0.9).add_(p, alpha=0.1)
""", "[p.clone() for p in target.parameters()]", "[*target.parameters()]"),
    "freeze() is undone by train()": Row(
        "github.com/pgniewko/gt-pyg/issues/112", "state",
        r"running statistics move .*encoder.* eval\(\)",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, 3)
    def forward(self, x): return self.head(self.encoder(x))
net = Net(); net.encoder.requires_grad_(False); net.encoder.eval()
opt = torch.optim.Adam(net.head.parameters(), 1e-2)
for epoch in range(3):
    net.train()
    loop(net, opt, 20)
""", "net.train()\n", "net.train(); net.encoder.eval()\n"),
    "a frozen backbone of a projection": Row(
        "github.com/lightly-ai/lightly/issues/1438", "state",
        r"running statistics move",
        """
back, head = nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Flatten()), nn.Linear(24, 3)
for p in back.parameters(): p.requires_grad = False
net = nn.Sequential(back, head); opt = torch.optim.SGD(head.parameters(), 1e-2)
loop(net, opt, 60, batch=lambda i: (data(i)[0][:, None], data(i)[1]))
""", "net = nn.Sequential(back, head)", "net = nn.Sequential(back.eval(), head)"),
    "a resume that loads the moments alone": Row(
        "github.com/msed-Ebrahimi/ARoFace/issues/8", "spike",
        r"step 100: .* jumped .* new one since step 100: .*weight.* differ from those of the one",
        """
net = mlp(); opt = torch.optim.AdamW(net.parameters(), 1e-2)
for i in range(160):
    if i == 100:
        saved = copy.deepcopy((net.state_dict(), opt.state_dict()))
        net = mlp(); opt = torch.optim.AdamW(net.parameters(), 1e-2)
        opt.load_state_dict(saved[1]); pass
    x, y = data(i, 64); loss = F.mse_loss(net(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
""", "pass", "net.load_state_dict(saved[0])"),
    "a row whose gradient is clipped away": Row(
        "github.com/ml-explore/mlx-lm/issues/1658", "spike",
        r"step 60: the gradient norm jumped .* Row 5 of 16 .* they alone hold 7",
        """
emb, head = nn.Embedding(8, 16), nn.Linear(16, 3); emb.weight.data[7] *= 1e-17
params = [*emb.parameters(), *head.parameters()]
opt = torch.optim.AdamW(params, 1e-3, weight_decay=0)
ids = torch.randint(0, 7, (80, 16)); ids[60, 5] = 7
for row in ids:
    e = emb(row); e = e * torch.rsqrt(e.pow(2).mean(-1, keepdim=True) + 1e-12)
    loss = F.cross_entropy(head(e), row % 3); opt.zero_grad(); loss.backward()
    nn.utils.clip_grad_norm_(params, 1.0); opt.step()
""", "1e-17", "0.5"),
    "softmax before cross_entropy": Row(
        "github.com/bkitano/llama-from-scratch/issues/5", "loss",
        r"loss at script.py:\d+ .*: its input went through softmax",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.emb, self.head = nn.Embedding(9, 32), nn.Linear(32, 9)
    def forward(self, ids, targets):
        a = self.head(self.emb(ids)); logits = F.softmax(a, dim=-1)
        return F.cross_entropy(logits.view(-1, 9), targets.view(-1))
net = Net(); opt = torch.optim.Adam(net.parameters(), 1e-2)
for i in range(60):
    ids = torch.randint(9, (8, 5)); opt.zero_grad(); net(ids, (ids + 1) % 9).backward(); opt.step()
""", "logits = F.softmax(a, dim=-1)", "logits = a"),
    "sigmoid before binary_cross_entropy_with_logits": Row(
        "github.com/YXNTU/GeneralDyG/issues/6", "loss",
        r"loss at script.py:\d+ in <module>: its input went through sigmoid",
        """
net = nn.Sequential(mlp(1), nn.Sigmoid()); opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(60):
    x, y = labels(i); out = net(x).squeeze()
    loss = F.binary_cross_entropy_with_logits(out, (y > 0).float(), reduction="none").mean()
    opt.zero_grad(); loss.backward(); opt.step()
""", "nn.Sequential(mlp(1), nn.Sigmoid())", "mlp(1)"),
    "an output layer that starts too large": Row(
        "github.com/PiotrNawrot/nanoT5/issues/25", "loss",
        r"first cross-entropy was \S+, at script.py:\d+ .* 50 classes have ln\(50\)",
        """
emb, head = nn.Embedding(50, 64), nn.Linear(64, 50, bias=False)
nn.init.normal_(head.weight, std=1.0)
opt = torch.optim.AdamW([*emb.parameters(), *head.parameters()], 1e-3)
for i in range(60):
    ids = torch.randint(50, (16,)); ids[0] = -100 if i % 2 else ids[0]
    loss = F.cross_entropy(head(emb(ids.clamp(min=0))), ids); opt.zero_grad()
    loss.backward(); opt.step()
""", "std=1.0", "std=64 ** -0.5"),
    "functional dropout in evaluation": Row(
        "github.com/rixwew/pytorch-fm/issues/21", "evaluation",
        r"dropout at script.py:\d+ in forward drops in eval mode",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 3)
    def forward(self, x): return self.last(F.dropout(self.first(x).relu(), p=0.1))
net = Net(); loop(net, None, 60); net.eval()
with torch.no_grad(): print(net(data(0)[0]).sum())
""", "p=0.1", "p=0.1, training=self.training"),
    "an evaluation before spectral_norm was iterated": Row(
        "github.com/pytorch/pytorch/issues/51800", "evaluation",
        r"0.weight_orig .*spectral_norm were evaluated before the first forward pass in training",
        """
net = nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 32)), nn.ReLU(), nn.Linear(32, 3))
net.eval()
with torch.no_grad(): print(net(data(0)[0]).var())
net.train(); loop(net, None, 60)
""", "net.eval()\n", "net(data(1)[0]); net.eval()\n"),
    "attention over the batch": Row(
        "github.com/aipixel/AEMatter/issues/3", "shape",
        r"the 16 samples of a batch are taken for steps in time by MultiheadAttention",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2); self.head = nn.Linear(8, 3)
    def forward(self, x): return self.head(self.attention(x, x, x)[0].mean(1))
net = Net()
loop(net, None, 60, lambda i: (torch.randn(16, 5, 8), torch.randint(3, (16,))), F.cross_entropy)
""", "nn.MultiheadAttention(8, 2)", "nn.MultiheadAttention(8, 2, batch_first=True)"),
    "a mask that pooling never reads": Row(
        "github.com/tomhosking/torchseq/issues/10", "argument",
        r"Net is given mask and reads nothing of it",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.emb, self.head = nn.Embedding(50, 16), nn.Linear(16, 3)
    def forward(self, ids, mask):
        h = self.emb(ids); weight = torch.ones_like(ids)
        return self.head((h * weight[..., None]).sum(1) / weight.sum(1, keepdim=True))
net = Net(); opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(60):
    mask = torch.arange(12) < torch.randint(1, 13, (16, 1))
    ids = torch.randint(50, (16, 12)) * mask
    loss = F.cross_entropy(net(ids, mask=mask), ids.sum(1) % 3)
    opt.zero_grad(); loss.backward(); opt.step()
""", "torch.ones_like(ids)", "mask.long()"),
    "evaluation mode for ever after the first validation": Row(
        "github.com/wkentaro/pytorch-fcn/issues/57", "mode",
        r"autopsy: .*eval.*train\(\)",
        """
net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2),
                    nn.Linear(32, 3))
opt = torch.optim.Adam(net.parameters(), 1e-3)
def validate():
    net.eval()
    with torch.no_grad(): return F.cross_entropy(net(labels(999)[0]), labels(999)[1]).item()
net.train()
for i in range(120):
    if i % 40 == 20: validate(); pass
    x, y = labels(i); loss = F.cross_entropy(net(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
""", "pass", "net.train()"),
    "a softmax over the batch in attention of one's own": Row(
        "github.com/PetrochukM/PyTorch-NLP/issues/2", "batch",
        r"autopsy: .*samples.*script.py:\d+|autopsy: .*softmax at script.py:\d+.*batch",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.query, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
    def forward(self, x):
        scores = torch.bmm(self.query(x[:, -1:]), x.transpose(1, 2))
        weights = F.softmax(scores, dim=0)
        return self.head(torch.bmm(weights, x)[:, 0])
def batch(i):
    g = torch.Generator().manual_seed(i); x = torch.randn(16, 5, 8, generator=g)
    return x, x[:, 0].argmax(1) % 3
loop(Net(), None, 90, batch, F.cross_entropy)
""", "dim=0", "dim=-1"),
    "an attention whose softmax is over one number": Row(
        "github.com/DEEP-PolyU/KEQA_WSDM19/issues/2", "path",
        r"autopsy: .*attn.*(exactly )?0 .*[Ss]oftmax",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.attn, self.head = nn.Linear(8, 1), nn.Linear(8, 3)
    def forward(self, x):
        B, T, D = x.shape
        scores = self.attn(x.reshape(B * T, D))
        weights = F.softmax(scores, dim=1)
        return self.head((weights.view(B, T, 1) * x).sum(1))
loop(Net(), None, 90, lambda i: (torch.randn(16, 5, 8), torch.randint(3, (16,))), F.cross_entropy)
""", "F.softmax(scores, dim=1)", "F.softmax(scores.view(B, T), dim=1)"),
    "view of a hidden state mixes samples": Row(
        "github.com/timbmg/Sentence-VAE/issues/15", "batch",
        r"autopsy: .*(samples|rows).*script.py:\d+|autopsy: .*script.py:\d+.*(samples|rows)",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(8, 12, bidirectional=True, batch_first=True)
        self.head = nn.Linear(24, 3)
    def forward(self, x):
        hidden = self.rnn(x)[1]
        return self.head(hidden.reshape(len(x), 24))
def batch(i):
    g = torch.Generator().manual_seed(i); x = torch.randn(16, 5, 8, generator=g)
    return x, x[:, 0].argmax(1) % 3
loop(Net(), None, 90, batch, F.cross_entropy)
""", "hidden.reshape(len(x), 24)", "hidden.transpose(0, 1).reshape(len(x), 24)"),
    "mse_loss of (n, 1) and (n,)": Row(
        "github.com/LAMDA-Tabular/TALENT/pull/92", "shape",
        r"autopsy: .*script.py:\d+.*\[16, 1\].*\[16\]|autopsy: .*script.py:\d+.*\[16\].*\[16, 1\]",
        """
net = mlp(1); opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(90):
    x, y = data(i); y = y[:, 0]
    loss = F.mse_loss(net(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
""", "F.mse_loss(net(x), y)", "F.mse_loss(net(x), y[:, None])"),
    "a difference of (n, 1) and (n,) by hand": Row(
        "github.com/benedekrozemberczki/pytorch_geometric_temporal/pull/233", "shape",
        r"autopsy: .*script.py:\d+.*\[20, 1\].*\[20\]|autopsy: .*script.py:\d+.*\[20\].*\[20, 1\]",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.mix, self.head = nn.Linear(8, 16), nn.Linear(16, 1)
    def forward(self, x, edges): return self.head((edges @ self.mix(x)).relu())
net = Net(); opt = torch.optim.Adam(net.parameters(), 1e-2)
edges = torch.eye(20) + (torch.rand(20, 20) < 0.1).float()
for epoch in range(3):
    cost = 0
    for i in range(12):
        x = torch.randn(20, 8); y = (edges @ x)[:, 0]
        guess = net(x, edges)
        cost = cost + torch.mean((guess - y) ** 2)
        if i % 4 == 3:
            (cost / 4).backward(); opt.step(); opt.zero_grad(); cost = 0
""", "guess = net(x, edges)\n", "guess = net(x, edges).squeeze()\n"),
    "an average without the running statistics": Row(
        "github.com/FlyreelAI/sesemi/issues/36", "state",
        r"autopsy: .*running (statistics|mean).*(average|copy|never)|autopsy: .*average.*running",
        """
net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
ema = copy.deepcopy(net).requires_grad_(False).eval()
opt = torch.optim.Adam(net.parameters(), 1e-2)
def follow():
    with torch.no_grad():
        for e, p in zip(ema.parameters(), net.parameters()): e.mul_(0.9).add_(p, alpha=0.1)
        pass
for i in range(120):
    x, y = labels(i); x = 3 * x + 2
    opt.zero_grad(); F.cross_entropy(net(x), y).backward(); opt.step(); follow()
with torch.no_grad(): print((ema(3 * labels(0)[0] + 2).argmax(1) == labels(0)[1]).float().mean())
""", "        pass\n", "        for e, b in zip(ema.buffers(), net.buffers()): e.copy_(b)\n"),
    "the optimizer before the layers are exchanged": Row(
        "github.com/hustzxd/EfficientPyTorch/issues/1", "state",
        r"autopsy: .*\d\.(weight|inner).*in (any|no) optimizer|autopsy: .*other tensors",
        """
class Quantized(nn.Module):
    def __init__(self, layer):
        super().__init__(); self.inner = nn.Linear(layer.in_features, layer.out_features)
    def forward(self, x): return self.inner(x + 0.01 * torch.rand_like(x))
def exchange(net):
    for name, child in net.named_children():
        if isinstance(child, nn.Linear): setattr(net, name, Quantized(child))
net = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 3))
pass
opt = torch.optim.SGD(net.parameters(), 1e-2, momentum=0.9); exchange(net)
loop(net, opt, 90, labels, F.cross_entropy)
""", "pass\nopt = torch.optim.SGD(net.parameters(), 1e-2, momentum=0.9); exchange(net)",
        "exchange(net)\nopt = torch.optim.SGD(net.parameters(), 1e-2, momentum=0.9)"),
    "the first batch of the loader, for ever": Row(
        "github.com/wandb/examples/issues/444", "data",
        r"autopsy: .*same (batch|input|numbers|tensor)",
        """
x, y = labels(0, 256)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 16)
net = mlp(); opt = torch.optim.Adam(net.parameters(), 1e-3)
for epoch in range(6):
    batches = iter(loader)
    for i in range(len(loader)):
        x, y = next(iter(loader))
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad(); loss.backward(); opt.step()
""", "next(iter(loader))", "next(batches)"),
    "a causal mask that is the wrong way round": Row(
        "github.com/rasbt/LLMs-from-scratch/issues/1061", "mask",
        r"autopsy: .*mask.*(future|later|after)",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.emb, self.qkv = nn.Embedding(20, 16), nn.Linear(16, 48)
        self.head = nn.Linear(16, 20)
    def forward(self, ids):
        h = self.emb(ids); q, k, v = self.qkv(h).chunk(3, -1); T = ids.shape[1]
        mask = torch.triu(torch.ones(T, T), diagonal=1).bool()
        return self.head(h + F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
net = Net(); opt = torch.optim.Adam(net.parameters(), 3e-3)
for i in range(90):
    ids = torch.randint(1, 20, (16, 1)) + torch.arange(13); ids = ids % 20
    loss = F.cross_entropy(net(ids[:, :-1]).transpose(1, 2), ids[:, 1:])
    opt.zero_grad(); loss.backward(); opt.step()
""", "attn_mask=mask", "attn_mask=~mask"),
    "a ReLU after the last layer": Row(
        "github.com/pytorch/tutorials/pull/1644", "loss",
        r"autopsy: .*loss at script.py:\d+.*(relu|ReLU)",
        """
net = nn.Sequential(mlp(), nn.ReLU()); loop(net, None, 90, labels, F.cross_entropy)
""", "nn.Sequential(mlp(), nn.ReLU())", "nn.Sequential(mlp(), nn.Identity())"),
    "SGD with a rate for Adam": Row(
        "pypi.org/project/torchtest2 (its gallery, 10)", "state",
        r"autopsy: in \d+ updates SGD has moved no matrix .*its learning rate, 1e-05 .*too small",
        """
net = mlp(); opt = torch.optim.SGD(net.parameters(), lr=1e-5)
loop(net, opt, 200, labels, F.cross_entropy)
""", "lr=1e-5", "lr=1e-1"),
    "the best weights are a reference": Row(
        "github.com/WenjieDu/PyPOTS/issues/667", "state",
        r"autopsy: .*load_state_dict.*script.py:\d+.*(own|same|nothing)",
        """
net = mlp(); opt = torch.optim.Adam(net.parameters(), 3e-2); best = 1e9
for epoch in range(8):
    loop(net, opt, 10)
    with torch.no_grad(): loss = F.mse_loss(net(data(999)[0]), data(999)[1]).item()
    if loss < best: best, state = loss, net.state_dict()
net.load_state_dict(state)
with torch.no_grad(): print(best, F.mse_loss(net(data(999)[0]), data(999)[1]).item())
""", "best, state = loss, net.state_dict()", "best, state = loss, copy.deepcopy(net.state_dict())"),
}

# What it does not say: each may be meant, or nothing that it sees tells the two apart.
SILENT = {
    "view where transpose was meant, of heads": Row(
        "github.com/zhouhaoyi/Informer2020/issues/59", "shape",
        r"autopsy: .*view.*transpose",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 3)
    def forward(self, x):
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 6, 4).split(2, 2)
        q, k, v = (t.reshape(B, 2, T, 4) for t in (q, k, v))
        h = F.scaled_dot_product_attention(q, k, v)
        return self.head(h.transpose(1, 2).reshape(B, T, D).mean(1))
def batch(i):
    g = torch.Generator().manual_seed(i); x = torch.randn(16, 5, 8, generator=g)
    return x, x[:, 0].argmax(1) % 3
loop(Net(), None, 90, batch, F.cross_entropy)
""", "t.reshape(B, 2, T, 4)", "t.transpose(1, 2)"),
    "padding counts in the loss": Row(
        "github.com/lukas-blecher/LaTeX-OCR/issues/305", "loss",
        r"autopsy: .*padding",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.emb, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.rnn = nn.GRU(16, 16, batch_first=True)
    def forward(self, ids): return self.head(self.rnn(self.emb(ids))[0])
net = Net(); opt = torch.optim.Adam(net.parameters(), 3e-3)
for i in range(90):
    ids = torch.randint(1, 20, (16, 13)); ids[torch.arange(13) > torch.randint(3, 12, (16, 1))] = 0
    out = net(ids[:, :-1]).transpose(1, 2)
    loss = F.cross_entropy(out, ids[:, 1:], ignore_index=-100)
    opt.zero_grad(); loss.backward(); opt.step()
""", "ignore_index=-100", "ignore_index=0"),
    "a scheduler built after the optimizer was loaded": Row(
        "github.com/torch-points3d/torch-points3d/pull/630", "state",
        r"autopsy: .*(lr|rate).*(loaded|load_state_dict)",
        """
net = mlp(); opt = torch.optim.SGD(net.parameters(), 0.1)
def plan(): return torch.optim.lr_scheduler.LambdaLR(opt, lambda k: 0.97**k)
rate = plan(); loop(net, opt, 60, after=lambda step: rate.step())
saved = copy.deepcopy((net.state_dict(), opt.state_dict(), rate.state_dict()))
net = mlp(); opt = torch.optim.SGD(net.parameters(), 0.1); net.load_state_dict(saved[0])
opt.load_state_dict(saved[1]); rate = plan()
loop(net, opt, 60, after=lambda step: rate.step())
""", "opt.load_state_dict(saved[1]); rate = plan()",
        "rate = plan(); rate.load_state_dict(saved[2]); opt.load_state_dict(saved[1])"),
    "normalize over tokens in place of features": Row(
        "github.com/gabeur/mmt/issues/1", "shape",
        r"autopsy: .*normalize at script.py:\d+.*dim",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.reduce, self.head = nn.Linear(8, 16), nn.Linear(16, 3)
    def forward(self, x): return self.head(4 * F.normalize(self.reduce(x), dim=1).mean(1))
def batch(i):
    g = torch.Generator().manual_seed(i); x = torch.randn(16, 5, 8, generator=g)
    return x, x.mean(1).argmax(1) % 3
loop(Net(), None, 90, batch, F.cross_entropy)
""", "dim=1).mean(1)", "dim=-1).mean(1)"),
    "the generator's adversarial loss is detached": Row(
        "github.com/nikhilsinghmus/image2reverb/issues/37", "path",
        r"autopsy: .*(term|loss).*script.py:\d+.*(no gradient|detach)",
        """
G, D = mlp(3), nn.Sequential(nn.Linear(11, 32), nn.ReLU(), nn.Linear(32, 1))
g, d = torch.optim.Adam(G.parameters(), 2e-3), torch.optim.Adam(D.parameters(), 2e-3)
for i in range(90):
    x, real = data(i); fake = G(x)
    guess = D(torch.cat([x, fake.detach()], 1))
    adversarial = F.mse_loss(guess, torch.ones(16, 1))
    near = F.l1_loss(fake, real)
    g.zero_grad(); (adversarial + 10 * near).backward(); g.step()
    there, here = D(torch.cat([x, real], 1)), D(torch.cat([x, fake.detach()], 1))
    d.zero_grad(); ((there - 1).square().mean() + here.square().mean()).backward(); d.step()
""", "guess = D(torch.cat([x, fake.detach()], 1))", "guess = D(torch.cat([x, fake], 1))"),
    "one layer, several times in a list": Row(
        "github.com/linkedin/Liger-Kernel/pull/269", "state",
        r"autopsy: .*heads\.0.*same",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.body = nn.Linear(8, 16)
        def head(): return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
        self.heads = nn.ModuleList([head()] * 3)
    def forward(self, x): h = self.body(x).relu(); return torch.stack([f(h) for f in self.heads], 1)
def loss_of(out, y): return sum(F.mse_loss(out[:, k], y.roll(k, 1)) for k in range(3))
loop(Net(), None, 90, data, loss_of)
""", "[head()] * 3", "head() for _ in range(3)"),
    "micro-batches that are summed": Row(
        "github.com/hirofumi0810/neural_sp/issues/168", "order",
        r"autopsy: .*(micro-batches|backward passes).*(sum|divide)",
        """
net = mlp(); opt = torch.optim.SGD(net.parameters(), 0.05)
for i in range(240):
    x, y = data(i); loss = F.mse_loss(net(x), y)
    loss = loss / 1
    loss.backward()
    if i % 8 == 7: opt.step(); opt.zero_grad()
""", "loss / 1", "loss / 8"),
    "a teacher that drops": Row(
        "github.com/yxuansu/TaCL/issues/11", "mode",
        r"autopsy: .*teacher.*(eval|drop)",
        """
student = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
teacher = copy.deepcopy(student); loop(teacher, None, 60)
opt = torch.optim.Adam(student.parameters(), 1e-2); teacher.requires_grad_(False); teacher.train()
for i in range(90):
    x, y = data(i)
    with torch.no_grad(): soft = teacher(x)
    loss = F.mse_loss(student(x), soft); opt.zero_grad(); loss.backward(); opt.step()
""", "teacher.train()", "teacher.eval()"),
}

OTHERS = {
    "dropout in evaluation on purpose, on two lines": """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 3)
        self.drop = nn.Dropout(0.1)
    def forward(self, x):
        h = F.dropout(
            self.first(x).relu(), 0.1, training=True
        )
        return self.last(self.drop(h))
net = Net(); loop(net, None, 60); net.eval(); net.drop.train()
with torch.no_grad(): print(torch.stack([net(data(0)[0]) for _ in range(5)]).var(0).sum())
""",
    "an LSTM with time first, and a sum as the loss": """
class Net(nn.Module):
    def __init__(self, **options):
        super().__init__(); self.lstm = nn.LSTM(8, 16, **options); self.head = nn.Linear(16, 3)
    def forward(self, x): return self.head(self.lstm(x)[0][-1])
net = Net()
loop(net, None, 60, lambda i: (torch.randn(16, 5, 8), torch.randint(3, (5,))),
     lambda out, y: F.cross_entropy(out, y, reduction="sum"))
net = Net(batch_first=True)
loop(net, None, 60, lambda i: (torch.randn(16, 5, 8), torch.randint(3, (5,))),
     lambda out, y: F.cross_entropy(out[:5] if len(out) > 5 else out, y))
""",
    "a mask that only the loss reads, and one of a library of masks": """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.emb, self.head = nn.Embedding(50, 16), nn.Linear(16, 3)
    def forward(self, ids, mask): return self.head(self.emb(ids))
net = Net(); opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(60):
    mask = torch.arange(12) < torch.randint(1, 13, (16, 1))
    ids = torch.randint(50, (16, 12)) * mask
    each = F.cross_entropy(net(ids, mask).transpose(1, 2), ids % 3, reduction="none")
    opt.zero_grad(); (each * mask).sum().div(mask.sum()).backward(); opt.step()
""",
    "logarithms, weights and sums in a loss": """
net = mlp(); opt = torch.optim.Adam(net.parameters(), 1e-3); weight = torch.tensor([9.0, 9.0, 9.0])
for i in range(60):
    x, y = labels(i); out = net(x); hot = F.one_hot(y, 3).float()
    loss = F.nll_loss(out.softmax(1).clamp(min=1e-9).log(), y) + F.nll_loss(out.log_softmax(1), y)
    loss = loss + F.binary_cross_entropy(out.sigmoid(), hot) + F.cross_entropy(out, hot)
    loss = loss + F.cross_entropy(out, y, weight, reduction="sum") / 99
    loss = loss + F.cross_entropy(out.log_softmax(1), y) - out.softmax(1)[range(16), y].mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "a GAN whose step is one function": """
G, D = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 8)), mlp(1)
g, d = torch.optim.Adam(G.parameters(), 2e-3), torch.optim.Adam(D.parameters(), 2e-3)
def step(opt, loss): opt.zero_grad(); loss.backward(); opt.step()
for i in range(90):
    x = data(i)[0] + 2; fake = G(torch.randn(16, 4))
    step(d, (F.softplus(-D(x)) + F.softplus(D(fake.detach()))).mean())
    step(g, F.softplus(-D(fake)).mean())
""",
    "sharpness-aware": """
net = mlp(); opt = torch.optim.SGD(net.parameters(), 1e-2)
def back(i): x, y = data(i); opt.zero_grad(); F.mse_loss(net(x), y).backward()
for i in range(90):
    back(i)
    with torch.no_grad():
        e = [0.05 * p.grad / p.grad.norm().clamp(min=1e-6) for p in net.parameters()]
        for p, d in zip(net.parameters(), e): p.add_(d)
    back(i)
    with torch.no_grad():
        for p, d in zip(net.parameters(), e): p.sub_(d)
    opt.step()
""",
    "adversarial, the last pass is used": """
net = mlp(); opt = torch.optim.SGD(net.parameters(), 1e-2)
for i in range(60):
    x, y = data(i); d = torch.zeros_like(x, requires_grad=True)
    for k in range(3):
        opt.zero_grad(); F.mse_loss(net(x + d), y).backward()
        d = (d + 0.01 * d.grad.sign()).detach().requires_grad_()
    opt.step()
""",
    "gradient surgery": """
net = mlp(); opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(60):
    x, y = data(i); each = []
    for k in range(3):
        opt.zero_grad(); F.mse_loss(net(x)[:, k], y[:, k]).backward()
        each.append([p.grad.clone() for p in net.parameters()])
    for p, *g in zip(net.parameters(), *each): p.grad = sum(g) / 3
    opt.step()
""",
    "actor and critic": """
actor, critic = mlp(2), nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
a, c = torch.optim.Adam(actor.parameters(), 1e-3), torch.optim.Adam(critic.parameters(), 1e-3)
for i in range(90):
    x, y = data(i)
    q = critic(torch.cat([x, actor(x).detach()], 1)); loss = F.mse_loss(q, y[:, :1])
    c.zero_grad(); loss.backward(); c.step()
    a.zero_grad(); (-critic(torch.cat([x, actor(x)], 1)).mean()).backward(); a.step()
""",
    "LBFGS, and two steps with a gradient by hand": """
net = mlp(); opt = torch.optim.LBFGS(net.parameters(), max_iter=4, line_search_fn="strong_wolfe")
for i in range(20):
    x, y = data(i)
    def closure(): opt.zero_grad(); loss = F.mse_loss(net(x), y); loss.backward(); return loss
    opt.step(closure)
opt = torch.optim.SGD(net.parameters(), 1e-3)
for i in range(20):
    x, y = data(i); gs = torch.autograd.grad(F.mse_loss(net(x), y), [*net.parameters()])
    for p, g in zip(net.parameters(), gs): p.grad = g
    opt.step(); opt.step()
""",
    "a loss per head, accumulated, with a loss scaler": """
net = mlp(); opt = torch.optim.SGD(net.parameters(), 1e-2); s = torch.amp.GradScaler("cpu")
rate = torch.optim.lr_scheduler.SequentialLR(opt, [
    torch.optim.lr_scheduler.LinearLR(opt, 0.1, 1.0, 10),
    torch.optim.lr_scheduler.CosineAnnealingLR(opt, 50)], [10])
for i in range(120):
    x, y = data(i)
    with torch.autocast("cpu", torch.float16): out = net(x).float()
    for k in range(3): s.scale(F.mse_loss(out[:, k], y[:, k])).backward(retain_graph=k < 2)
    if i % 2:
        s.unscale_(opt); nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        s.step(opt); s.update(); opt.zero_grad(); rate.step()
""",
    "an average and a plateau": """
net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
slow = copy.deepcopy(net).requires_grad_(False); opt = torch.optim.Adam(net.parameters(), 1e-3)
rate = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=5)
for i in range(90):
    x, y = data(i); opt.zero_grad(); loss = F.mse_loss(net(x), y)
    with torch.no_grad(): more = F.mse_loss(slow(x), net(x))
    (loss + 0 * more).backward(); opt.step()
    with torch.no_grad():
        for a, p in zip(slow.parameters(), net.parameters()): a.lerp_(p, 0.05)
    if i % 10 == 9: rate.step(loss.item())
""",
    "a step within the backward pass": """
net = mlp(); opts = {p: torch.optim.SGD([p], 1e-2) for p in net.parameters()}
def fused(p): opts[p].step(); opts[p].zero_grad()
for p in net.parameters(): p.register_post_accumulate_grad_hook(fused)
for i in range(60): x, y = data(i); F.mse_loss(net(x), y).backward()
""",
    "eval mode on purpose: an attack, a second phase, a frozen norm": """
class Net(nn.Sequential):
    def train(self, mode=True): super().train(mode); self[1].eval(); return self
def body(kind): return kind(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Linear(32, 3))
def validate(net):
    was = net.training; net.eval()
    with torch.no_grad(): net(data(999)[0])
    net.train(was)
def train(net, opt, steps):
    for i in range(steps):
        x, y = labels(i); net.eval(); x.requires_grad_()
        g, = torch.autograd.grad(F.cross_entropy(net(x), y), x); net.train(net.mode)
        loss = F.cross_entropy(net((x + 0.1 * g.sign()).detach()), y)
        opt.zero_grad(); loss.backward(); opt.step()
        if i % 10 == 9: validate(net)
for kind in (Net, nn.Sequential):
    net = body(kind); opt = torch.optim.Adam(net.parameters(), 1e-3)
    net.mode = True; train(net, opt, 30); validate(net)
    net.eval(); net(data(999)[0]); net.eval(); net.mode = False; train(net, opt, 30)
""",
    "softmax over instances, nodes, kernels": """
class Net(nn.Module):
    def __init__(self, kind):
        super().__init__(); self.kind, self.out = kind, nn.Linear(8, 3)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, x):
        if self.kind == "bag":
            weights = F.softmax(self.a(x).view(-1, 2, 4), 0).flatten(1)
            return self.out((weights * x).sum(0, True))
        if self.kind == "nodes":
            q, k, v = self.a(x).view(-1, 2, 4), self.b(x).view(-1, 2, 4), x.view(-1, 2, 4)
            kv = torch.einsum("nhd,nhe->hde", k.softmax(0), v)
            return self.out(torch.einsum("nhd,hde->nhe", q.softmax(-1), kv).flatten(1))
        both = torch.stack([self.a(x).mean(1), self.b(x).mean(1)])
        return self.out((both * F.softmax(both[..., None], dim=0)[..., 0]).sum(0))
for kind in ("bag", "nodes", "kernels"):
    shape, n = (16, 5, 8) if kind == "kernels" else (16, 8), 1 if kind == "bag" else 16
    def batch(i): return torch.randn(shape), torch.randint(3, (n,))
    loop(Net(kind), None, 30, batch, F.cross_entropy)
""",
    "views of hidden states and heads, and masks": """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.one = nn.GRU(8, 8, batch_first=True)
        self.two = nn.LSTM(8, 8, 2, bidirectional=True, batch_first=True)
        self.out, self.qkv = nn.Linear(56, 3), nn.Linear(8, 24)
    def forward(self, x):
        B, T, D = x.shape; h = self.one(x)[1].view(B, 8); _, (s, c) = self.two(x)
        s = s.view(2, 2, B, 8)[-1]; c = torch.cat([c[-2], c[-1]], 1)
        q, k, v = (t.view(B, T, 2, 4).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(T, T).tril().bool())
        p = F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(T, T).triu().bool())
        r = self.qkv(x.transpose(0, 1)).contiguous().view(T, B * 6, 4)[:, :B * 2].transpose(0, 1)
        r = F.scaled_dot_product_attention(r, r, r).transpose(0, 1).reshape(T, B, 8)[-1]
        o = (o + p).transpose(1, 2).reshape(B, T, D).mean(1)
        return self.out(torch.cat([h, s.transpose(0, 1).reshape(B, 16), c, o, r], 1))
for B in (16, 4):
    loop(Net(), None, 30, lambda i: (torch.randn(B, 5, 8), torch.randint(3, (B,))), F.cross_entropy)
""",
    "averages with statistics": """
def body(): return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
def look(net):
    net.eval()
    with torch.no_grad(): return net(data(999)[0])
average = torch.optim.swa_utils.AveragedModel
net = body(); first = body(); second = average(net, use_buffers=True); third = average(net)
with torch.no_grad():
    for a, p in zip(first.parameters(), net.parameters()): a.copy_(p)
look(first); look(net); net.train(); first.train()
def after(i):
    second.update_parameters(net); third.update_parameters(net)
    with torch.no_grad():
        for a, p in zip(first.parameters(), net.parameters()): a.lerp_(p, 0.1)
        first(data(i)[0])
    if i % 20 == 19: look(second); look(first); first.train(); second.train()
loop(net, None, 60, labels, F.cross_entropy, after)
torch.optim.swa_utils.update_bn([data(i)[0] for i in range(9)], third); look(third)
""",
    "one batch on purpose, and loaders that begin anew": """
data_set = torch.utils.data.TensorDataset(*labels(0, 256)); load = torch.utils.data.DataLoader
def train(batches, steps=40, check=None):
    net = mlp(); opt = torch.optim.Adam(net.parameters(), 1e-3)
    for i in range(steps):
        x, y = batches(i); loss = F.cross_entropy(net(x), y)
        opt.zero_grad(); loss.backward(); opt.step()
        if check:
            with torch.no_grad(): x, y = next(iter(check)); net(x)
one = next(iter(load(data_set, 16))); train(lambda i: one)
random = load(data_set, 16, shuffle=True); train(lambda i: next(iter(random)))
whole = load(data_set, 256); train(lambda i: next(iter(whole)))
train(lambda i: labels(i), check=load(data_set, 16)); train(lambda i: one, check=load(data_set, 16))
""",
    "pairs on purpose": """
net = mlp(1); opt = torch.optim.Adam(net.parameters(), 1e-3); bins = torch.linspace(-1, 1, 16)
for i in range(30):
    x, y = data(i); y = y[:, 0]; out = net(x); flat = out[:, 0]
    rank = F.softplus(-(out - flat) * (y[:, None] - y).sign()).mean()
    histogram = torch.exp(-((out - bins) ** 2)).mean(0)
    matched = (out - y).abs()[torch.arange(16), torch.arange(16)].mean()
    kernel = torch.exp(-((out - y) ** 2)).diagonal().mean() + (out - y[:, None]).square().mean()
    spread = (out - flat.detach()).square().mean() + (out * bins.softmax(0)[:, None]).mean()
    spread = spread + (out * bins - torch.eye(16)).abs().mean()
    loss = rank + (histogram - 0.5).square().mean() + matched + kernel + 0 * spread
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "best weights that were copied, and a state that is loaded at once": """
net = mlp(); opt = torch.optim.Adam(net.parameters(), 3e-2); best = 1e9
for epoch in range(4):
    loop(net, opt, 10)
    with torch.no_grad(): loss = F.mse_loss(net(data(999)[0]), data(999)[1]).item()
    if loss < best: best, state = loss, {k: v.clone() for k, v in net.state_dict().items()}
    net.load_state_dict(net.state_dict())
    mine = net.state_dict(); other = mlp(); other.load_state_dict(mine); net.load_state_dict(mine)
net.load_state_dict(state)
""",
    "a ReLU before a pooled classifier": """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.conv, self.last = nn.Conv1d(1, 8, 3), nn.Conv1d(8, 3, 1)
    def forward(self, x): return self.last(self.conv(x[:, None]).relu()).relu().mean(2)
loop(Net(), None, 60, labels, F.cross_entropy)
""",
}


def outcome(name):
    """(is it right, what was said of the fault, and of the twin)"""
    if name in OTHERS:
        code, said = run(PRELUDE + OTHERS[name])
        return code == 0 and "autopsy:" not in said, "", said
    row = (REPORTS | SILENT)[name]
    (code, said), (code_twin, said_twin) = run(PRELUDE + row.script), run(PRELUDE + row.twin)
    right = code == 0 and bool(re.search(row.words, said))
    right &= code_twin == 0 and "autopsy:" not in said_twin  # torch may warn
    return right, said, said_twin


def main():
    parser = arguments(__doc__, "cpu")
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    names = args.names or [*REPORTS, *SILENT, *OTHERS]
    rows = {}
    with ThreadPoolExecutor(2) as pool:
        for name, (right, said, twin) in zip(names, pool.map(outcome, names), strict=True):
            row = (REPORTS | SILENT).get(name)
            about = row._asdict() if row else {"script": OTHERS[name]}
            rows[name] = {"named": right, "said": said, "said of the twin": twin} | about
            print(f"{'right' if right else 'WRONG'}  {name}\n    {said}\n    {twin}")
    counts = {"named, and the twin is not accused": sum(r["named"] for r in rows.values())}
    counts["of"] = len(rows)
    counts["healthy and accused"] = sum("autopsy:" in r["said of the twin"] for r in rows.values())
    args.smoke |= bool(args.names)
    write(header("public_reports", args) | counts | {"rows": rows}, args, ("rows",))


if __name__ == "__main__":
    main()
