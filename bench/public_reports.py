"""Public reports of runs that are finite and wrong: what does `python autopsy SCRIPT.py` say?

Each row has the address of a report, a small script of ours with the same fault, and a twin of it
without: one passage is another. The words that autopsy should say were written before its first
run; of the twin it must say nothing. OTHERS are healthy loops that look odd. SILENT are reports
that autopsy still does not name. Those of public_reports_fresh-first-cpu.json were fresh: at first
sight it named 2 of the 20, and 12 after we had written checks for what they show; no twin was
accused.

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
        "github.com/bytetriper/RAE/issues/67",
        "order",
        r"3 of 4 backward passes .* script.py:\d+ in <module> clears",
        """
net = mlp(); opt = torch.optim.AdamW(net.parameters(), 1e-3)
for i in range(200):
    if i % 1 == 0:
        opt.zero_grad(set_to_none=True)
    x, y = data(i); (F.mse_loss(net(x), y) / 4).backward()
    if i % 4 == 3:
        nn.utils.clip_grad_norm_(net.parameters(), 1.0); opt.step()
""",
        "i % 1 == 0",
        "i % 4 == 0",
    ),
    "a milestone that is used up before the first update": Row(
        "github.com/pytorch/pytorch/issues/20124",
        "schedule",
        r"MultiStepLR at script.py:\d+ in <module> steps before the first step of SGD: no update",
        """
net = mlp(); opt = torch.optim.SGD(net.parameters(), 0.1)
rate = torch.optim.lr_scheduler.MultiStepLR(opt, [1, 3], gamma=0.1)
early = True
for epoch in range(5):
    if early: rate.step()
    for i in range(12):
        x, y = data(12 * epoch + i)
        loss = F.mse_loss(net(x), y)
        opt.zero_grad(); loss.backward(); opt.step()
    if not early: rate.step()
""",
        "early = True",
        "early = False",
    ),
    "micro-batches cleared through the network": Row(
        "github.com/tatsu-lab/alpaca_farm/issues/57",
        "order",
        r"1 of 2 backward passes .* in train clears",
        """
def train(net, opt):
    for i in range(120):
        x, y = data(i); (F.mse_loss(net(x), y) / 2).backward()
        if i % 2: opt.step(); opt.zero_grad()
        net.zero_grad()
net = mlp(); train(net, torch.optim.Adam(net.parameters(), 1e-3))
""",
        "        net.zero_grad()\n",
        "",
    ),
    "a backward pass of the last micro-batch only": Row(
        "github.com/hanjanghoon/BERT_FP/issues/2",
        "order",
        r"3 of 4 losses at script.py:\d+ .* thrown away before each step: .* script.py:\d+",
        """
net = mlp(); opt = torch.optim.AdamW(net.parameters(), 1e-3); every = 4
for i in range(160):
    x, y = data(i); loss = F.mse_loss(net(x), y) / every
    if (i + 1) % every == 0: loss.backward()
    if (i + 1) % every == 0: opt.step(); opt.zero_grad()
""",
        "if (i + 1) % every == 0: loss.backward()",
        "loss.backward()",
    ),
    "a schedule that waits for an accuracy to fall": Row(
        "github.com/md-mohaiminul/ViS4mer/issues/4",
        "schedule",
        r"waits for `acc` to fall, at script.py:\d+ .*mode=.max",
        """
net = mlp(); opt = torch.optim.AdamW(net.parameters(), 1e-3)
rate = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, mode="min", patience=1)
for epoch in range(8):
    loop(net, opt, 12)
    x, y = data(99, 64); acc = (net(x).argmax(1) == y.argmax(1)).float().mean()
    rate.step(acc)
""",
        'mode="min"',
        'mode="max"',
    ),
    "a clip of a generator that was used up": Row(
        "github.com/pytorch/pytorch/issues/148259",
        "order",
        r"script.py:\d+ in <module> clips the gradients of no parameter, before \d+ steps",
        """
net = mlp(); params = net.parameters()
print(sum(p.numel() for p in params))
opt = torch.optim.SGD(net.parameters(), 1e-2)
for i in range(60):
    x, y = data(i); opt.zero_grad(); F.mse_loss(net(x), y).backward()
    nn.utils.clip_grad_norm_(params, 0.5); opt.step()
""",
        "params = net.parameters()",
        "params = [*net.parameters()]",
    ),
    "a sampler with a weight for each class": Row(
        "github.com/deep-voice/soundbay/pull/49",
        "data",
        r"loader at script.py:\d+ .* has 3 weights for 240 samples, and draws none but the first 3",
        """
X = torch.randn(240, 8); Y = (X @ torch.randn(8, 3)).argmax(1)
weights = 1 / Y.bincount(minlength=3)
sampler = torch.utils.data.WeightedRandomSampler(weights, 240)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), 16, sampler=sampler)
net = mlp(); opt = torch.optim.Adam(net.parameters(), 1e-3)
for epoch in range(4):
    for x, y in loader:
        opt.zero_grad(); F.cross_entropy(net(x), y).backward(); opt.step()
""",
        "Sampler(weights, 240)",
        "Sampler(weights[Y], 240)",
    ),
    "a best model that trains on": Row(
        "github.com/MedMNIST/experiments/issues/8",
        "state",
        r"script.py:\d+ keeps no copy: best_model is net itself, which trained on",
        """
def score(net):
    with torch.no_grad(): x, y = data(99, 64); return -F.mse_loss(net(x), y).item()
def train():
    net = mlp(); opt = torch.optim.Adam(net.parameters(), 1e-2); best = -math.inf
    for epoch in range(8):
        loop(net, opt, 10)
        if score(net) > best:
            best, best_model = score(net), None
            best_model = net
    return best_model
print(score(train()))
""",
        "best_model = net\n",
        "best_model = copy.deepcopy(net)\n",
    ),
    "the first step of the way back": Row(
        "github.com/yunjey/pytorch-tutorial/issues/149",
        "path",
        r"the gradient of rnn.weight_hh_l0_reverse was exactly 0 .* take h_n",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.rnn = nn.LSTM(4, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 3)
    def forward(self, x):
        out, (h, _) = self.rnn(x)
        return self.head(out[:, -1])
net = Net(); opt = torch.optim.Adam(net.parameters(), 1e-2)
for i in range(60):
    x = torch.randn(16, 6, 4); y = x[:, 1].argmax(1) % 3
    opt.zero_grad(); F.cross_entropy(net(x), y).backward(); opt.step()
""",
        "out[:, -1]",
        "torch.cat([h[0], h[1]], 1)",
    ),
    "shares that are made integers": Row(
        "github.com/srinidhiPY/SSL_CR_Histo/issues/5",
        "loss",
        r"target of the loss at script.py:\d+ .* is 0 everywhere: script.py:\d+ .*integers",
        """
net = mlp(1); opt = torch.optim.Adam(net.parameters(), 1e-3)
for epoch in range(6):
    for i in range(10):
        x = data(i)[0]; share = x.mean(1).sigmoid()
        opt.zero_grad(); F.mse_loss(net(x)[:, 0], share).backward(); opt.step()
    with torch.no_grad():
        x = data(99, 64)[0]; share = x.mean(1).sigmoid()
        share = share.long()
        print(F.mse_loss(net(x)[:, 0], share).item())
""",
        "share.long()",
        "share.double().float()",
    ),
    "one of two targets that is never updated": Row(
        "github.com/kakaoenterprise/JORLDY/issues/120",
        "state",
        r"target_actor never moves, and target_critic does",
        """
actor, critic = nn.Linear(4, 1), nn.Linear(5, 1)
target_actor, target_critic = copy.deepcopy(actor), copy.deepcopy(critic)
a = torch.optim.Adam(actor.parameters(), 1e-3); c = torch.optim.Adam(critic.parameters(), 1e-3)
def soft(net, target):
    for p, t in zip(net.parameters(), target.parameters()): t.data.lerp_(p.data, 0.05)
for i in range(90):
    s, s2, act, r = torch.randn(16, 4), torch.randn(16, 4), torch.randn(16, 1), torch.randn(16, 1)
    with torch.no_grad(): y = r + 0.9 * target_critic(torch.cat([s2, target_actor(s2)], 1))
    c.zero_grad(); F.mse_loss(critic(torch.cat([s, act], 1)), y).backward(); c.step()
    a.zero_grad(); (-critic(torch.cat([s, actor(s)], 1)).mean()).backward(); a.step()
    soft(critic, target_critic)
    pass
""",
        "    pass\n",
        "    soft(actor, target_actor)\n",
    ),
    "a sum without keepdim, between samples": Row(
        "github.com/MarcoForte/FBA_Matting/issues/7",
        "experiment",
        r"Net at script.py:\d+ .*mixes the samples of a batch, .* first after add at "
        r"script.py:\d+ in forward: dim=0 is the batch",
        """
from torch.utils.data import DataLoader, TensorDataset
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.body = nn.Conv2d(3, 4, 3, padding=1)
    def forward(self, images):
        out = self.body(images); alpha, front = out[:, :1].sigmoid(), out[:, 1:]
        many = torch.sum((images - front) * front, 1)
        alpha = alpha * 0.1 + many
        return torch.cat([alpha, front], 1)[:, :1]
images = torch.rand(256, 3, 6, 6); goal = images.mean(1, keepdim=True)
net = Net(); opt = torch.optim.Adam(net.parameters(), 1e-3)
for epoch in range(3):
    for x, y in DataLoader(TensorDataset(images, goal), 16, shuffle=True):
        opt.zero_grad(); F.mse_loss(net(x), y).backward(); opt.step()
""",
        "* front, 1)",
        "* front, 1, keepdim=True)",
    ),
    "a sum over samples for one over times": Row(
        "github.com/rish-16/aft-pytorch/issues/1",
        "experiment",
        r"Net at script.py:\d+ .*mixes the samples of a batch",
        """
from torch.utils.data import DataLoader, TensorDataset
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.qkv, self.out = nn.Linear(2, 24), nn.Linear(32, 3)
    def forward(self, x):
        q, k, v = self.qkv(x.unflatten(1, (4, 2))).chunk(3, -1)
        weights = k.exp(); dim = 0
        h = q.sigmoid() * (weights * v).sum(dim, True) / weights.sum(dim, True)
        return self.out(h.flatten(1))
net = Net(); opt = torch.optim.Adam(net.parameters(), 1e-3)
x, y = data(0, 256)
for epoch in range(3):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True):
        opt.zero_grad(); F.mse_loss(net(a), b).backward(); opt.step()
""",
        "dim = 0",
        "dim = 1",
    ),
    "one layer, several times in a list": Row(
        "github.com/linkedin/Liger-Kernel/pull/269",
        "state",
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
""",
        "[head()] * 3",
        "head() for _ in range(3)",
    ),
    "one block, several times in a Sequential": Row(
        "github.com/acids-ircam/ddsp_pytorch/issues/37",
        "state",
        r"autopsy: 1 and 2 more of its list are the same Sequential: .* at script.py:\d+ in stack",
        """
def block(d): return nn.Sequential(nn.Linear(d, d), nn.LayerNorm(d), nn.Tanh())
def stack(d, n):
    return nn.Sequential(
        nn.Linear(8, d),
        *([block(d)] * n),
        nn.Linear(d, 3))
loop(stack(16, 3), None, 60, labels, F.cross_entropy)
""",
        "*([block(d)] * n)",
        "*[block(d) for _ in range(n)]",
    ),
    "an Adam for each step": Row(
        "github.com/tensorflow/tensorflow/issues/29675",
        "state",
        r"Adam \(made at script.py:\d+ in train\) is made anew for each step, 60 times",
        """
net = mlp(); kept = torch.optim.Adam(net.parameters(), 1e-3)
def train(x, y):
    opt = torch.optim.Adam(net.parameters(), 1e-3)
    opt.zero_grad(); F.mse_loss(net(x), y).backward(); opt.step()
for i in range(60): train(*data(i))
""",
        "    opt = torch.optim.Adam(net.parameters(), 1e-3)\n",
        "    opt = kept\n",
    ),
    "clipped before unscale_": Row(
        "github.com/milesial/Pytorch-UNet/issues/468",
        "order",
        r"65536 times too large when they were clipped to 1 at script.py:\d+",
        """
net = mlp(); opt = torch.optim.RMSprop(net.parameters(), 1e-4); s = torch.amp.GradScaler("cpu")
for i in range(60):
    x, y = data(i); opt.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.float16): out = net(x)
    s.scale(F.mse_loss(out.float(), y)).backward()
    pass
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0); s.step(opt); s.update()
""",
        "    pass\n",
        "    s.unscale_(opt)\n",
    ),
    "values clipped before unscale_": Row(
        "github.com/k2-fsa/icefall/pull/2081",
        "order",
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
""",
        "clip_value=0.5",
        "clip_value=0.5 * s.get_scale()",
    ),
    "no zero_grad": Row(
        "github.com/yastrebksv/TennisCourtDetector/issues/7",
        "order",
        r"the gradients of 90 steps add up: .* script.py:\d+",
        """
net = mlp(); opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(90):
    x, y = data(i); loss = F.mse_loss(net(x), y)
    loss.backward(); opt.step()
""",
        "loss.backward()",
        "opt.zero_grad(); loss.backward()",
    ),
    "zero_grad without parentheses": Row(
        "lightning.ai/docs/pytorch/stable/common/lightning_module.html#on-before-zero-grad",
        "order",
        r"script.py:\d+ names a method and does not call it: write `opt.zero_grad\(\)`",
        """
net = mlp(); opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(90):
    x, y = data(i); loss = F.mse_loss(net(x), y)
    loss.backward(); opt.step()
    opt.zero_grad
""",
        "    opt.zero_grad\n",
        "    opt.zero_grad()\n",
    ),
    "two permutations, of inputs and of labels": Row(
        "github.com/xudonmao/VMT/issues/1",
        "data",
        r"script.py:\d+ bring x, y into two different orders",
        """
net = mlp(); opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(90):
    x, y = data(i); share = 0.7
    perm = torch.randperm(len(x))
    other_x, other_y = x[torch.randperm(len(x))], y[torch.randperm(len(x))]
    loss = F.mse_loss(net(share * x + (1 - share) * other_x), share * y + (1 - share) * other_y)
    opt.zero_grad(); loss.backward(); opt.step()
""",
        "x[torch.randperm(len(x))], y[torch.randperm(len(x))]",
        "x[perm], y[perm]",
    ),
    "zero_grad once an epoch": Row(
        "github.com/meta-pytorch/torchforge/pull/71",
        "order",
        r"gradients of 120 steps add up",
        """
net = mlp(); opt = torch.optim.SGD(net.parameters(), 1e-4)
for epoch in range(4):
    opt.zero_grad()
    for i in range(30):
        x, y = data(i); loss = F.mse_loss(net(x), y)
        loss.backward(); opt.step()
""",
        "loss.backward()",
        "[setattr(p, 'grad', None) for p in net.parameters()]; loss.backward()",
    ),
    "zero_grad of the network only": Row(
        "github.com/tenstorrent/tt-blacksmith/pull/711",
        "order",
        r"nobody clears those of scale.weight, scale.bias before",
        """
net, scale = mlp(), nn.Linear(3, 3)
opt = torch.optim.Adam([*net.parameters(), *scale.parameters()], 1e-3)
for i in range(90):
    x, y = data(i); net.zero_grad()
    F.mse_loss(scale(net(x)), y).backward(); opt.step()
""",
        "net.zero_grad()",
        "opt.zero_grad()",
    ),
    "a schedule for updates that moves with micro-batches": Row(
        "github.com/sgl-project/SpecForge/issues/364",
        "order",
        r"lr of .* was 0 since step \d+ .*LambdaLR steps 4 times an update, at script.py:\d+",
        """
net = mlp(); opt = torch.optim.AdamW(net.parameters(), 1e-3)
rate = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: max(0.0, 1 - k / 60))
for i in range(240):
    x, y = data(i); (F.mse_loss(net(x), y) / 4).backward()
    if i % 4 == 3: opt.step(); opt.zero_grad()
    if i % 1 == 0: rate.step()
""",
        "i % 1 == 0",
        "i % 4 == 3",
    ),
    "a cosine that moves with micro-batches": Row(
        "github.com/starVLA/starVLA/pull/210",
        "order",
        r"made for 100 updates, and CosineAnnealingLR steps 2 times an update",
        """
net = mlp(); opt = torch.optim.AdamW(net.parameters(), 1e-3)
rate = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=100)
for i in range(200):
    x, y = data(i); (F.mse_loss(net(x), y) / 2).backward()
    if i % 2: opt.step(); opt.zero_grad()
    rate.step()
""",
        "T_max=100",
        "T_max=200",
    ),
    "optimizers step again after the loss scaler": Row(
        "github.com/IAHispano/Applio/pull/860",
        "order",
        r"SGD makes two steps .* at script.py:\d+ in <module> and at .*, at least \d\d times",
        """
G, D = nn.Linear(4, 8), mlp(1); s = torch.amp.GradScaler("cpu", init_scale=64.0)
g, d = torch.optim.SGD(G.parameters(), 1e-4), torch.optim.Adam(D.parameters(), 1e-4)
for i in range(80):
    x = data(i)[0]; fake = G(torch.randn(16, 4)); d.zero_grad()
    s.scale((F.softplus(-D(x)) + F.softplus(D(fake.detach()))).mean()).backward(); s.step(d)
    g.zero_grad(); s.scale(F.softplus(-D(fake)).mean()).backward(); s.step(g); s.update()
    g.step()
""",
        "    g.step()\n",
        "",
    ),
    "a value head that is read with item()": Row(
        "github.com/jsboige/CoursIA/pull/15256",
        "path",
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
""",
        "values.append(v.item())\n    return torch.stack(logp), torch.tensor(values)",
        "values.append(v[0])\n    return torch.stack(logp), torch.stack(values)",
    ),
    "a head that is read through NumPy": Row(
        "github.com/jsboige/CoursIA/pull/15256",
        "path",
        r"no gradient has reached head.bias, head.weight.* script.py:\d+",
        """
body, head, aux = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 3)
opt = torch.optim.Adam([*body.parameters(), *head.parameters(), *aux.parameters()], 1e-3)
for i in range(60):
    x, y = data(i); h = body(x).relu()
    out = torch.tensor(head(h).detach().numpy())
    loss = F.mse_loss(out, y) + F.mse_loss(aux(h), y)
    opt.zero_grad(); loss.backward(); opt.step()
""",
        "torch.tensor(head(h).detach().numpy())",
        "head(h)",
    ),
    "a soft update that misses its target": Row(
        "github.com/AgileRL/AgileRL/pull/464",
        "state",
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
""",
        "[p.clone() for p in target.parameters()]",
        "[*target.parameters()]",
    ),
    "freeze() is undone by train()": Row(
        "github.com/pgniewko/gt-pyg/issues/112",
        "state",
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
""",
        "net.train()\n",
        "net.train(); net.encoder.eval()\n",
    ),
    "a frozen backbone of a projection": Row(
        "github.com/lightly-ai/lightly/issues/1438",
        "state",
        r"running statistics move",
        """
back, head = nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Flatten()), nn.Linear(24, 3)
for p in back.parameters(): p.requires_grad = False
net = nn.Sequential(back, head); opt = torch.optim.SGD(head.parameters(), 1e-2)
loop(net, opt, 60, batch=lambda i: (data(i)[0][:, None], data(i)[1]))
""",
        "net = nn.Sequential(back, head)",
        "net = nn.Sequential(back.eval(), head)",
    ),
    "a resume that loads the moments alone": Row(
        "github.com/msed-Ebrahimi/ARoFace/issues/8",
        "spike",
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
""",
        "pass",
        "net.load_state_dict(saved[0])",
    ),
    "a row whose gradient is clipped away": Row(
        "github.com/ml-explore/mlx-lm/issues/1658",
        "spike",
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
""",
        "1e-17",
        "0.5",
    ),
    "softmax before cross_entropy": Row(
        "github.com/bkitano/llama-from-scratch/issues/5",
        "loss",
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
""",
        "logits = F.softmax(a, dim=-1)",
        "logits = a",
    ),
    "sigmoid before binary_cross_entropy_with_logits": Row(
        "github.com/YXNTU/GeneralDyG/issues/6",
        "loss",
        r"loss at script.py:\d+ in <module>: its input went through sigmoid",
        """
net = nn.Sequential(mlp(1), nn.Sigmoid()); opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(60):
    x, y = labels(i); out = net(x).squeeze()
    loss = F.binary_cross_entropy_with_logits(out, (y > 0).float(), reduction="none").mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
        "nn.Sequential(mlp(1), nn.Sigmoid())",
        "mlp(1)",
    ),
    "an output layer that starts too large": Row(
        "github.com/PiotrNawrot/nanoT5/issues/25",
        "loss",
        r"first cross-entropy was \S+, at script.py:\d+ .* 50 classes have ln\(50\)",
        """
emb, head = nn.Embedding(50, 64), nn.Linear(64, 50, bias=False)
nn.init.normal_(head.weight, std=1.0)
opt = torch.optim.AdamW([*emb.parameters(), *head.parameters()], 1e-3)
for i in range(60):
    ids = torch.randint(50, (16,)); ids[0] = -100 if i % 2 else ids[0]
    loss = F.cross_entropy(head(emb(ids.clamp(min=0))), ids); opt.zero_grad()
    loss.backward(); opt.step()
""",
        "std=1.0",
        "std=64 ** -0.5",
    ),
    "a condition that is projected and then left out": Row(
        "github.com/lucidrains/e2-tts-pytorch/issues/28",
        "experiment",
        r"the input cond of Net at script.py:\d+ .*has no influence on the loss: .*"
        r"script.py:\d+ in forward reads it first",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.proj, self.time = nn.Linear(4, 16), nn.Linear(1, 16)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)
    def forward(self, x, times, cond):
        h = self.first(x)
        cond = self.proj(cond)
        h = h + self.time(times)
        return self.last(h.relu())
net = Net(); opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(60):
    x, y = data(i); opt.zero_grad()
    loss = F.mse_loss(net(x, torch.rand(16, 1), cond=torch.randn(16, 4)), y)
    loss.backward(); opt.step()
""",
        "h = h + self.time(times)",
        "h = h + self.time(times) + cond",
    ),
    "a mask that hides scores which nobody uses": Row(
        "github.com/lucidrains/flamingo-pytorch/issues/10",
        "experiment",
        r"the input mask of Net at script.py:\d+ .*has no influence on the loss",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.emb, self.out = nn.Embedding(30, 16), nn.Linear(16, 3)
        self.q = nn.Linear(16, 16)
    def forward(self, ids, mask):
        h = self.emb(ids); scores = self.q(h) @ h.transpose(1, 2)
        hidden = scores.masked_fill(~mask[:, None], -1e9)
        return self.out((scores.softmax(-1) @ h)[:, 0])
net = Net(); opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(60):
    mask = torch.arange(9) < torch.randint(4, 10, (16, 1))
    ids = torch.randint(1, 30, (16, 9)) * mask
    loss = F.cross_entropy(net(ids, mask), ids[:, 1] % 3)
    opt.zero_grad(); loss.backward(); opt.step()
""",
        "(scores.softmax",
        "(hidden.softmax",
    ),
    "attention that drops in evaluation": Row(
        "github.com/coleygroup/ms-pred/issues/38",
        "evaluation",
        r"scaled_dot_product_attention at script.py:\d+ in forward drops in eval mode",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.dropout = 0.1
        self.qkv, self.out = nn.Linear(2, 24), nn.Linear(32, 3)
    def forward(self, x):
        q, k, v = self.qkv(x.unflatten(1, (4, 2))).chunk(3, -1)
        p = self.dropout
        return self.out(F.scaled_dot_product_attention(q, k, v, dropout_p=p).flatten(1))
net = Net(); opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(90):
    x, y = data(i); opt.zero_grad(); F.mse_loss(net(x), y).backward(); opt.step()
    if i % 30 == 29:
        net.eval()
        with torch.no_grad(): print(F.mse_loss(net(data(99)[0]), data(99)[1]).item())
        net.train()
""",
        "p = self.dropout",
        "p = self.dropout if self.training else 0.0",
    ),
    "functional dropout in evaluation": Row(
        "github.com/rixwew/pytorch-fm/issues/21",
        "evaluation",
        r"dropout at script.py:\d+ in forward drops in eval mode",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 3)
    def forward(self, x): return self.last(F.dropout(self.first(x).relu(), p=0.1))
net = Net(); loop(net, None, 60); net.eval()
with torch.no_grad(): print(net(data(0)[0]).sum())
""",
        "p=0.1",
        "p=0.1, training=self.training",
    ),
    "an evaluation before spectral_norm was iterated": Row(
        "github.com/pytorch/pytorch/issues/51800",
        "evaluation",
        r"0.weight_orig .*spectral_norm were evaluated before the first forward pass in training",
        """
net = nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 32)), nn.ReLU(), nn.Linear(32, 3))
net.eval()
with torch.no_grad(): print(net(data(0)[0]).var())
net.train(); loop(net, None, 60)
""",
        "net.eval()\n",
        "net(data(1)[0]); net.eval()\n",
    ),
    "attention over the batch": Row(
        "github.com/aipixel/AEMatter/issues/3",
        "shape",
        r"the 16 samples of a batch are taken for steps in time by MultiheadAttention",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2); self.head = nn.Linear(8, 3)
    def forward(self, x): return self.head(self.attention(x, x, x)[0].mean(1))
net = Net(); rows = [(torch.randn(5, 8), k % 3) for k in range(64)]
opt = torch.optim.Adam(net.parameters(), 1e-2)
for epoch in range(15):
    for x, y in torch.utils.data.DataLoader(rows, 16, shuffle=True):
        opt.zero_grad(); F.cross_entropy(net(x), y).backward(); opt.step()
""",
        "nn.MultiheadAttention(8, 2)",
        "nn.MultiheadAttention(8, 2, batch_first=True)",
    ),
    "a mask that pooling never reads": Row(
        "github.com/tomhosking/torchseq/issues/10",
        "argument",
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
""",
        "torch.ones_like(ids)",
        "mask.long()",
    ),
    "evaluation mode for ever after the first validation": Row(
        "github.com/wkentaro/pytorch-fcn/issues/57",
        "mode",
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
""",
        "pass",
        "net.train()",
    ),
    "a softmax over the batch in attention of one's own": Row(
        "github.com/PetrochukM/PyTorch-NLP/issues/2",
        "batch",
        r"autopsy: .*samples.*script.py:\d+|autopsy: .*softmax at script.py:\d+.*batch",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.query, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
    def forward(self, x):
        scores = torch.bmm(self.query(x[:, -1:]), x.transpose(1, 2))
        weights = F.softmax(scores, dim=0)
        return self.head(torch.bmm(weights, x)[:, 0])
net, x = Net(), torch.randn(96, 5, 8); opt = torch.optim.Adam(net.parameters(), 1e-2)
rows = [*zip(x, x[:, 0].argmax(1) % 3)]
for epoch in range(15):
    for x, y in torch.utils.data.DataLoader(rows, 16, shuffle=True):
        opt.zero_grad(); F.cross_entropy(net(x), y).backward(); opt.step()
""",
        "dim=0",
        "dim=-1",
    ),
    "an attention whose softmax is over one number": Row(
        "github.com/DEEP-PolyU/KEQA_WSDM19/issues/2",
        "path",
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
""",
        "F.softmax(scores, dim=1)",
        "F.softmax(scores.view(B, T), dim=1)",
    ),
    "view of a hidden state mixes samples": Row(
        "github.com/timbmg/Sentence-VAE/issues/15",
        "batch",
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
""",
        "hidden.reshape(len(x), 24)",
        "hidden.transpose(0, 1).reshape(len(x), 24)",
    ),
    "mse_loss of (n, 1) and (n,)": Row(
        "github.com/LAMDA-Tabular/TALENT/pull/92",
        "shape",
        r"autopsy: .*script.py:\d+.*\[16, 1\].*\[16\]|autopsy: .*script.py:\d+.*\[16\].*\[16, 1\]",
        """
net = mlp(1); opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(90):
    x, y = data(i); y = y[:, 0]
    loss = F.mse_loss(net(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
""",
        "F.mse_loss(net(x), y)",
        "F.mse_loss(net(x), y[:, None])",
    ),
    "a difference of (n, 1) and (n,) by hand": Row(
        "github.com/benedekrozemberczki/pytorch_geometric_temporal/pull/233",
        "shape",
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
""",
        "guess = net(x, edges)\n",
        "guess = net(x, edges).squeeze()\n",
    ),
    "an average without the running statistics": Row(
        "github.com/FlyreelAI/sesemi/issues/36",
        "state",
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
""",
        "        pass\n",
        "        for e, b in zip(ema.buffers(), net.buffers()): e.copy_(b)\n",
    ),
    "an average within a wrapper, without the running statistics": Row(
        "github.com/lucidrains/ema-pytorch/issues/8",
        "state",
        r"average of weights is evaluated at script.py:\d+ in validate .*slow.body.1.running_mean",
        """
class Slow(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.fast, self.body = [net], copy.deepcopy(net).requires_grad_(False)
    @torch.no_grad()
    def follow(self):
        for s, p in zip(self.body.parameters(), self.fast[0].parameters()): s.lerp_(p, 0.1)
        for s, b in zip(self.body.buffers(), self.fast[0].parameters()): pass
    def forward(self, x): return self.body(x)
def validate(*nets):
    x, y = labels(999, 200)
    for net in nets:
        net.eval()
        with torch.no_grad(): print((net(3 * x + 2).argmax(1) == y).float().mean())
net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
slow = Slow(net); opt = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
for epoch in range(4):
    net.train()
    for i in range(30):
        x, y = labels(30 * epoch + i); loss = F.cross_entropy(net(3 * x + 2), y)
        opt.zero_grad(); loss.backward(); opt.step(); slow.follow()
    validate(net, slow)
""",
        "self.fast[0].parameters()): pass",
        "self.fast[0].buffers()): s.copy_(b)",
    ),
    "the optimizer before the layers are exchanged": Row(
        "github.com/hustzxd/EfficientPyTorch/issues/1",
        "state",
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
""",
        "pass\nopt = torch.optim.SGD(net.parameters(), 1e-2, momentum=0.9); exchange(net)",
        "exchange(net)\nopt = torch.optim.SGD(net.parameters(), 1e-2, momentum=0.9)",
    ),
    "the first batch of the loader, for ever": Row(
        "github.com/wandb/examples/issues/444",
        "data",
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
""",
        "next(iter(loader))",
        "next(batches)",
    ),
    "a causal mask that is the wrong way round": Row(
        "github.com/rasbt/LLMs-from-scratch/issues/1061",
        "mask",
        r"autopsy: .*(mask.*(future|after)|each position sees its own: .*a causal mask)",
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
""",
        "attn_mask=mask",
        "attn_mask=~mask",
    ),
    "a ReLU after the last layer": Row(
        "github.com/pytorch/tutorials/pull/1644",
        "loss",
        r"autopsy: .*loss at script.py:\d+.*(relu|ReLU)",
        """
net = nn.Sequential(mlp(), nn.ReLU()); loop(net, None, 90, labels, F.cross_entropy)
""",
        "nn.Sequential(mlp(), nn.ReLU())",
        "nn.Sequential(mlp(), nn.Identity())",
    ),
    "SGD with a rate for Adam": Row(
        "pypi.org/project/torchtest2 (its gallery, 10)",
        "state",
        r"autopsy: in \d+ updates SGD has moved no matrix .*its learning rate, 1e-05 .*too small",
        """
net = mlp(); opt = torch.optim.SGD(net.parameters(), lr=1e-5)
loop(net, opt, 200, labels, F.cross_entropy)
""",
        "lr=1e-5",
        "lr=1e-1",
    ),
    "the best weights are a reference": Row(
        "github.com/WenjieDu/PyPOTS/issues/667",
        "state",
        r"autopsy: .*load_state_dict.*script.py:\d+.*(own|same|nothing)",
        """
net = mlp(); opt = torch.optim.Adam(net.parameters(), 3e-2); best = 1e9
for epoch in range(8):
    loop(net, opt, 10)
    with torch.no_grad(): loss = F.mse_loss(net(data(999)[0]), data(999)[1]).item()
    if loss < best: best, state = loss, net.state_dict()
net.load_state_dict(state)
with torch.no_grad(): print(best, F.mse_loss(net(data(999)[0]), data(999)[1]).item())
""",
        "best, state = loss, net.state_dict()",
        "best, state = loss, copy.deepcopy(net.state_dict())",
    ),
    "clipped after the step": Row(
        "github.com/awslabs/graphstorm/pull/1382",
        "order",
        r"clipped to 1 at script.py:\d+ .*step of Adam at script.py:\d+ .*seen 1\d\d times",
        """
net = mlp(); opt = torch.optim.Adam(net.parameters(), 1e-2)
def clip(): nn.utils.clip_grad_norm_(net.parameters(), max_norm=1.0)
for i in range(120):
    x, y = data(i); opt.zero_grad(); F.mse_loss(net(x), y).backward()
    opt.step(); clip()
""",
        "opt.step(); clip()",
        "clip(); opt.step()",
    ),
    "the target network is the network itself": Row(
        "github.com/datawhalechina/easy-rl/pull/117",
        "state",
        r"target is no copy of .*net: .*load_state_dict\(\) at script.py:\d+ .*deepcopy",
        """
class Agent:
    def __init__(self):
        self.net = mlp(2); self.opt = torch.optim.Adam(self.net.parameters(), 1e-3)
        self.target = self.net
    def learn(self, i):
        x, y = data(i); q = self.net(x).gather(1, (y[:, :1] > 0).long())
        with torch.no_grad(): best = self.target(x.roll(1, 0)).max(1, keepdim=True).values
        loss = F.smooth_l1_loss(q, y[:, 1:2] + 0.9 * best)
        self.opt.zero_grad(); loss.backward(); self.opt.step()
agent = Agent()
for i in range(100):
    agent.learn(i)
    if i % 20 == 0: agent.target.load_state_dict(agent.net.state_dict())
""",
        "self.target = self.net",
        "self.target = copy.deepcopy(self.net)",
    ),
    "the target network loads itself": Row(
        "github.com/thesouther/MARL/issues/8",
        "state",
        r"target loads its own state_dict\(\) at script.py:\d+ .*changes nothing",
        """
net = mlp(2); target = copy.deepcopy(net); opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(100):
    x, y = data(i); q = net(x).gather(1, (y[:, :1] > 0).long())
    with torch.no_grad(): best = target(x.roll(1, 0)).max(1, keepdim=True).values
    loss = F.smooth_l1_loss(q, y[:, 1:2] + 0.9 * best)
    opt.zero_grad(); loss.backward(); opt.step()
    if i % 20 == 0: target.load_state_dict(target.state_dict())
""",
        "(target.state_dict())",
        "(net.state_dict())",
    ),
    "a distributed sampler without set_epoch": Row(
        "github.com/kan-bayashi/ParallelWaveGAN/issues/177",
        "data",
        r"each of \d passes over the loader at script.py:\d+ .*order of the first: .*set_epoch",
        """
x = torch.randn(320, 8); data_set = torch.utils.data.TensorDataset(x, x.cumsum(1)[:, :3])
sampler = torch.utils.data.DistributedSampler(data_set, num_replicas=1, rank=0)
loader = torch.utils.data.DataLoader(data_set, 32, sampler=sampler)
held_out = torch.utils.data.DistributedSampler(data_set, num_replicas=1, rank=0)
net = mlp(); opt = torch.optim.Adam(net.parameters(), 1e-3)
for epoch in range(6):
    pass
    for x, y in loader:
        loss = F.mse_loss(net(x), y); opt.zero_grad(); loss.backward(); opt.step()
    with torch.no_grad():
        for x, y in torch.utils.data.DataLoader(data_set, 64, sampler=held_out): net(x)
""",
        "    pass\n",
        "    sampler.set_epoch(epoch)\n",
    ),
    "padding in the loss of a language model": Row(
        "github.com/EleutherAI/aria/pull/40",
        "loss",
        r"cross-entropy at script.py:\d+ .*counts padding: \d\d% of its labels are 0.*ignore_index",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.rnn = nn.Embedding(40, 32), nn.GRU(32, 32, batch_first=True)
        self.head = nn.Linear(32, 40)
    def forward(self, ids): return self.head(self.rnn(self.table(ids))[0])
net = Net(); opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(40):
    lengths = torch.randint(4, 16, (16, 1)); ids = torch.randint(1, 40, (16, 21))
    ids = ids * (torch.arange(21) < lengths)
    out = net(ids[:, :-1]).transpose(1, 2)
    loss = F.cross_entropy(out, ids[:, 1:])
    opt.zero_grad(); loss.backward(); opt.step()
""",
        "ids[:, 1:])",
        "ids[:, 1:], ignore_index=0)",
    ),
    "padding counts in the loss": Row(
        "github.com/lukas-blecher/LaTeX-OCR/issues/305",
        "loss",
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
""",
        "ignore_index=-100",
        "ignore_index=0",
    ),
    "a mask that hides all but the padding": Row(
        "github.com/neuro-galaxy/torch_brain/pull/74",
        "mask",
        r"gradient of .*unit.weight.*becomes 0 .* only its padding_idx is reached",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.unit = nn.Embedding(24, 16, padding_idx=0)
        self.query = nn.Parameter(torch.randn(4, 16))
        self.key, self.head = nn.Linear(16, 16), nn.Linear(16, 3)
    def forward(self, ids):
        x = self.key(self.unit(ids)); hidden = ids != 0
        bias = torch.zeros(ids.shape).masked_fill(hidden, -1e30)[:, None]
        return self.head((self.query @ x.mT + bias).softmax(-1) @ x).mean(1)
net = Net(); opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(40):
    ids = torch.randint(1, 24, (16, 12)) * (torch.arange(12) < torch.randint(3, 11, (16, 1)))
    loss = F.mse_loss(net(ids), torch.stack([ids.float().mean(1) / 9] * 3, 1))
    opt.zero_grad(); loss.backward(); opt.step()
""",
        "hidden = ids != 0",
        "hidden = ids == 0",
    ),
    "test images that are not normalised": Row(
        "github.com/JeasunLok/ResNet-pytorch/issues/1",
        "data",
        r"trained with images of -1\S+ .*, and evaluated at script.py:\d+ .*lack a Normalize",
        """
images = torch.rand(64, 3, 12, 12) ** 2; y = torch.randint(3, (64,))
def normalised(x): return (x - 0.33) / 0.3
net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(800, 3))
opt = torch.optim.Adam(net.parameters(), 1e-3)
for epoch in range(5):
    net.train()
    for x, t in zip(images.split(16), y.split(16)):
        loss = F.cross_entropy(net(normalised(x)), t)
        opt.zero_grad(); loss.backward(); opt.step()
    net.eval()
    with torch.no_grad():
        for x in images.flip(0).split(32): net(x)
""",
        "net(x)\n",
        "net(normalised(x))\n",
    ),
    "workers that are seeded alike in each epoch": Row(
        "github.com/Lightning-AI/pytorch-lightning/issues/20412",
        "data",
        r"workers .* same random numbers in each pass: script.py:\d+ in seed seeds them alike",
        """
class Noisy(torch.utils.data.Dataset):
    def __len__(self): return 96
    def __getitem__(self, i): x, y = data(i, 1); return x[0] + 0.1 * torch.randn(8), y[0]
def seed(worker):
    torch.manual_seed(7 + worker)
load = torch.utils.data.DataLoader(Noisy(), 16, num_workers=2, worker_init_fn=seed)
net = mlp(); opt = torch.optim.Adam(net.parameters(), 1e-2)
for epoch in range(4):
    for x, y in load:
        loss = F.mse_loss(net(x), y); opt.zero_grad(); loss.backward(); opt.step()
""",
        "torch.manual_seed(7 + worker)",
        "torch.manual_seed(torch.initial_seed() + worker)",
    ),
    "a seed for pictures before each epoch": Row(
        "github.com/huggingface/diffusers/issues/175",
        "data",
        r"pass .*script.py:\d+ in <module> .*same random numbers: torch.manual_seed\(\) at script",
        """
data_set = torch.utils.data.TensorDataset(*data(0, 96))
load = torch.utils.data.DataLoader(data_set, 16, shuffle=True)
net = mlp(); opt = torch.optim.Adam(net.parameters(), 1e-2)
def look(net):
    torch.manual_seed(0); x = torch.randn(16, 8)
    with torch.no_grad(): return net(x).mean()
for epoch in range(5):
    for x, y in load:
        loss = F.mse_loss(net(x), y); opt.zero_grad(); loss.backward(); opt.step()
    look(net)
""",
        "    torch.manual_seed(0); x = torch.randn(16, 8)",
        "    x = torch.randn(16, 8)",
    ),
    "labels shifted in the data, and in the loss": Row(
        "github.com/huggingface/transformers/issues/47394",
        "loss",
        r"autopsy: the labels of the loss at script.py:\d+ in forward are .*(two|twice)",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.emb, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.rnn = nn.GRU(16, 16, batch_first=True)
    def forward(self, ids, labels):
        logits = self.head(self.rnn(self.emb(ids))[0])[:, :-1]
        return F.cross_entropy(logits.reshape(-1, 20), labels[:, 1:].reshape(-1))
net = Net(); opt = torch.optim.AdamW(net.parameters(), 3e-3)
for i in range(60):
    text = torch.randint(20, (8, 14)); ids, labels = text[:, :-1], text[:, 1:]
    loss = net(ids, labels); opt.zero_grad(); loss.backward(); opt.step()
""",
        "labels = text[:, :-1], text[:, 1:]",
        "labels = text[:, :-1], text[:, :-1]",
    ),
    "labels that are not shifted, under a causal mask": Row(
        "github.com/macrocosm-os/pretraining/pull/64",
        "loss",
        r"autopsy: the labels of the loss at script.py:\d+ .*(copy|itself|sees)",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.emb, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.layer(self.emb(ids), src_mask=mask, is_causal=True))
net = Net(); opt = torch.optim.AdamW(net.parameters(), 3e-3)
for i in range(60):
    text = torch.randint(20, (4, 14))
    ids, labels = text[:, :-1], text[:, :-1]
    loss = F.cross_entropy(net(ids).transpose(1, 2), labels)
    opt.zero_grad(); loss.backward(); opt.step()
""",
        "text[:, :-1], text[:, :-1]",
        "text[:, :-1], text[:, 1:]",
    ),
    "images that are divided by 255 twice": Row(
        "github.com/4uiiurz1/pytorch-nested-unet/issues/62",
        "data",
        r"autopsy: BatchNorm2d conv.1 .*variance.* script.py:\d+ .*(twice|scaled)",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.head = nn.Linear(8, 3)
        self.conv = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    def forward(self, x): return self.head(self.conv(x - 0.5).mean((2, 3)))
def batch(i):
    g = torch.Generator().manual_seed(i); x = torch.randint(0, 256, (16, 3, 12, 12), generator=g)
    return x.float() / 255 / 255, (x[:, 0].float().mean((1, 2)) > 127).long()
loop(Net(), None, 60, batch, F.cross_entropy)
""",
        "/ 255 / 255",
        "/ 255",
    ),
    "a ratio [n] times advantages [n, 1]": Row(
        "github.com/RITCHIEHuang/DeepRL_Algorithms/issues/13",
        "shape",
        r"autopsy: the product at script.py:\d+ in surrogate .* \[32\] and \[32, 1\] make a square",
        """
net = mlp(2); opt = torch.optim.Adam(net.parameters(), 1e-3)
def surrogate(ratio, advantage, clip=0.2):
    bounded = ratio.clamp(1 - clip, 1 + clip) * advantage
    return -torch.min(ratio * advantage, bounded).mean()
for i in range(30):
    x, y = data(i, 32); policy = torch.distributions.Categorical(logits=net(x))
    with torch.no_grad(): action = policy.sample(); old = policy.log_prob(action)
    advantage = y[:, :1]
    for _ in range(2):
        policy = torch.distributions.Categorical(logits=net(x))
        loss = surrogate((policy.log_prob(action) - old).exp(), advantage)
        loss = loss - 0.01 * policy.entropy().mean()
        opt.zero_grad(); loss.backward(); opt.step()
""",
        "y[:, :1]",
        "y[:, 0]",
    ),
    "an error of a target under no_grad, by hand": Row(
        "github.com/RITCHIEHuang/DeepRL_Algorithms/issues/13",
        "shape",
        r"autopsy: the loss at script.py:\d+ .* each result with each target: \[20\] and \[20, 1\]",
        """
q, slow = mlp(2), mlp(2); opt = torch.optim.Adam(q.parameters(), 1e-3)
for i in range(60):
    x, y = data(i, 20); action = torch.randint(2, (20, 1)); after = data(i + 1, 20)[0]
    with torch.no_grad(): best = slow(after).max(1, keepdim=True).values
    goal = y[:, :1] + 0.9 * best
    error = q(x).gather(1, action)[:, 0] - goal
    loss = error.pow(2).mean(); opt.zero_grad(); loss.backward(); opt.step()
    if i % 10 == 0: slow.load_state_dict(q.state_dict())
""",
        "q(x).gather(1, action)[:, 0] - goal",
        "q(x).gather(1, action) - goal",
    ),
    "a teacher distilled into itself": Row(
        "github.com/labmlai/annotated_deep_learning_paper_implementations/issues/66",
        "path",
        r"autopsy: a term of the loss trains nothing: kl_div at script.py:\d+ in distill compares",
        """
teacher, student = mlp(), mlp(); loop(teacher, None, 40, labels, F.cross_entropy)
opt = torch.optim.Adam(student.parameters(), 1e-3); teacher.eval()
def distill(x, y, T=4.0):
    with torch.no_grad(): known = teacher(x)
    out = student(x); soft = (known / T).softmax(1); mine = (known / T).log_softmax(1)
    return 10 * F.kl_div(mine, soft, reduction="batchmean") + F.cross_entropy(out, y)
for i in range(40):
    loss = distill(*labels(i)); opt.zero_grad(); loss.backward(); opt.step()
""",
        "mine = (known / T)",
        "mine = (out / T)",
    ),
    "a term of what was detached": Row(
        "github.com/nikhilsinghmus/image2reverb/issues/37",
        "path",
        r"a term of the loss trains nothing: l1_loss at script.py:\d+ .* detach at script.py:\d+",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 3)
    def forward(self, x, y):
        h = self.body(x).tanh(); few = h.detach()
        terms = {"error": F.mse_loss(self.head(h), y), "few": F.l1_loss(few, torch.zeros_like(h))}
        return sum(terms.values())
net = Net(); opt = torch.optim.SGD(net.parameters(), 0.1)
for i in range(60): loss = net(*data(i)); opt.zero_grad(); loss.backward(); opt.step()
""",
        "few = h.detach()",
        "few = h",
    ),
    "probabilities in kl_div": Row(
        "github.com/microsoft/ProDA/issues/43",
        "loss",
        r"kl_div at script.py:\d+ in <module> takes log-probabilities",
        """
teacher, net = mlp(), mlp(); opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(40):
    x, y = labels(i)
    with torch.no_grad(): soft = F.softmax(teacher(x), 1)
    out = net(x); student = F.softmax(out, 1)
    near = F.kl_div(student, soft, reduction="none"); loss = F.cross_entropy(out, y) + near.mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
        "student = F.softmax(out, 1)",
        "student = F.log_softmax(out, 1)",
    ),
    "logits in ctc_loss": Row(
        "github.com/gwx314/STARS/issues/9",
        "loss",
        r"ctc_loss at script.py:\d+ in <module> takes log-probabilities",
        """
rnn, head = nn.GRU(8, 32, batch_first=True), nn.Linear(32, 10)
opt = torch.optim.Adam([*rnn.parameters(), *head.parameters()], 1e-3); ctc = nn.CTCLoss()
for i in range(40):
    out = head(rnn(torch.randn(16, 30, 8))[0]).transpose(0, 1); y = torch.randint(1, 10, (16, 6))
    loss = ctc(out, y, torch.full((16,), 30), torch.full((16,), 6))
    opt.zero_grad(); loss.backward(); opt.step()
""",
        "ctc(out,",
        "ctc(out.log_softmax(-1),",
    ),
    "pairs that are labelled 0 and 1": Row(
        "github.com/pytorch/pytorch/issues/23782",
        "loss",
        r"cosine_embedding_loss at script.py:\d+ in <module> takes 1 and -1, .* holds 0 and 1",
        """
net = mlp(16); opt = torch.optim.Adam(net.parameters(), 1e-3); near = nn.CosineEmbeddingLoss(0.2)
for i in range(40):
    x, _ = data(i); same = (torch.rand(16) > 0.5).float(); y = same
    other = torch.where(same[:, None] > 0, x + torch.randn(16, 8) / 9, torch.randn(16, 8))
    opt.zero_grad(); near(net(x), net(other), y).backward(); opt.step()
""",
        "y = same",
        "y = 2 * same - 1",
    ),
    "masks as they are stored": Row(
        "github.com/milesial/Pytorch-UNet/issues/78",
        "loss",
        r"binary_cross_entropy_with_logits at script.py:\d+ in <module> takes targets in 0..1",
        """
net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1))
opt = torch.optim.RMSprop(net.parameters(), 1e-5); loss_of = nn.BCEWithLogitsLoss()
for i in range(40):
    mask = (torch.rand(4, 1, 8, 8) > 0.5) * 255.0; x = mask / 255 + torch.randn(4, 1, 8, 8)
    opt.zero_grad(); loss_of(net(x), mask).backward(); opt.step()
""",
        "loss_of(net(x), mask)",
        "loss_of(net(x), mask / 255)",
    ),
    "a single class": Row(
        "github.com/cnulab/RealNet/issues/101",
        "loss",
        r"cross_entropy at script.py:\d+ in <module> over one class is 0 whatever the network",
        """
net = mlp(1); opt = torch.optim.AdamW(net.parameters(), 1e-3)
for i in range(40):
    x, y = labels(i); out = net(x); good = y == 0
    loss = F.cross_entropy(out, torch.zeros(16).long())
    opt.zero_grad(); loss.backward(); opt.step()
""",
        "F.cross_entropy(out, torch.zeros(16).long())",
        "F.binary_cross_entropy_with_logits(out[:, 0], good.float())",
    ),
    "a float mask of ones": Row(
        "github.com/pytorch/pytorch/issues/21518",
        "mask",
        r"multi_head_attention_forward at script.py:\d+ in forward adds a float mask to",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.att = nn.MultiheadAttention(8, 2); self.head = nn.Linear(8, 3)
    def forward(self, x):
        ones = torch.ones(len(x), len(x)); mask = ones.tril()
        return self.head(self.att(x, x, x, attn_mask=mask)[0].mean(0))
def batch(i): return torch.randn(10, 16, 8), torch.randint(3, (16,))
loop(Net(), None, 40, batch, F.cross_entropy)
""",
        "mask = ones.tril()",
        "mask = ones.triu(1).bool()",
    ),
    "padding is shown and words are hidden": Row(
        "github.com/InseeFrLab/torchTextClassifiers/pull/92",
        "mask",
        r"the attention at script.py:\d+ in forward hides each id but the padding: .* wrong way",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.emb, self.ask = nn.Embedding(50, 16), nn.Linear(16, 16)
        self.labels, self.head = nn.Parameter(torch.randn(4, 16)), nn.Linear(64, 4)
    def forward(self, ids, hidden):
        h = self.emb(ids)[:, None]; q = self.labels.expand(len(ids), 1, 4, 16)
        h = F.scaled_dot_product_attention(q, self.ask(h), h, attn_mask=hidden[:, None, None])
        return self.head(h.flatten(1))
net = Net(); opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(40):
    ids, n = torch.randint(1, 50, (32, 12)), torch.randint(4, 12, (32, 1)); y = ids[:, 0] % 4
    ids[torch.arange(12) >= n] = 0; loss = F.cross_entropy(net(ids, ids == 0), y)
    opt.zero_grad(); loss.backward(); opt.step()
""",
        "net(ids, ids == 0)",
        "net(ids, ids != 0)",
    ),
    "nobody calls eval()": Row(
        "github.com/wolny/pytorch-3dunet/issues/53",
        "evaluation",
        r"Sequential is evaluated in train mode, at script.py:\d+ in test, .* BatchNorm1d",
        """
net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
opt = torch.optim.Adam(net.parameters(), 1e-3); loss_of = nn.CrossEntropyLoss()
def test(total=0):
    pass
    with torch.no_grad():
        for x, y in map(labels, range(6)): total += loss_of(net(x), y).item()
    return total
for epoch in range(4):
    net.train()
    for i in range(10):
        x, y = labels(10 * epoch + i); loss = loss_of(net(x), y)
        opt.zero_grad(); loss.backward(); opt.step()
    print(test())
""",
        "    pass\n",
        "    net.eval()\n",
    ),
    "logits above 0.5": Row(
        "github.com/FenTechSolutions/CausalDiscoveryToolbox/issues/38",
        "evaluation",
        r"script.py:\d+ in test compares the logits of Sequential with 0.5, .* threshold is 0",
        """
net = mlp(1); opt = torch.optim.Adam(net.parameters(), 0.05); loss_of = nn.BCEWithLogitsLoss()
def test():
    x, y = data(99, 200); out = net(x)
    return ((out.squeeze(1) > 0.5) == (y[:, 0] > 0)).float().mean().item()
for i in range(120):
    x, y = data(i); loss = loss_of(net(x).squeeze(1), (y[:, 0] > 0).float())
    opt.zero_grad(); loss.backward(); opt.step()
    if i % 30 == 29: print(test())
""",
        "out = net(x)\n",
        "out = net(x).sigmoid()\n",
    ),
    "a penalty without a graph": Row(
        "github.com/facebookresearch/DomainBed/issues/50",
        "path",
        r"a term of the loss trains nothing: it is made of the gradient that script.py:\d+",
        """
net = mlp(); opt = torch.optim.Adam(net.parameters(), 1e-3)
def slopes(loss):
    return torch.autograd.grad(loss, net.parameters(), retain_graph=True)
for i in range(40):
    losses = [F.cross_entropy(net(x), y) for x, y in map(labels, (2 * i, 2 * i + 1))]
    mean = sum(losses) / 2; penalty = 0; middle = slopes(mean)
    for loss in losses:
        for one, other in zip(slopes(loss), middle): penalty += (one - other).pow(2).sum()
    opt.zero_grad(); (mean + 10 * penalty).backward(); opt.step()
""",
        "retain_graph=True)",
        "create_graph=True)",
    ),
    "a derivative without a graph that is fitted": Row(
        "github.com/pytorch/pytorch/issues/31984",
        "path",
        r"a term of the loss trains nothing: it is made of the gradient that script.py:\d+",
        """
net = nn.Sequential(nn.Linear(3, 30), nn.ReLU(), nn.Linear(30, 1))
opt = torch.optim.Adam(net.parameters(), 3e-3)
for i in range(40):
    x = torch.randn(64, 3).requires_grad_(); opt.zero_grad(); out = net(x)
    y, z = x.detach().sin().sum(1, keepdim=True), x.detach().cos().sum(1, keepdim=True)
    slope = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
    loss = nn.MSELoss()(out, y) + nn.MSELoss()(slope.sum(-1).unsqueeze(-1), z)
    loss.backward(); opt.step()
""",
        "retain_graph=True)",
        "create_graph=True)",
    ),
    "a warm-up that begins at 0 and moves once a pass": Row(
        "github.com/meta-pytorch/torchtune/issues/2010",
        "order",
        r"the lr of SGD was 0 in its first 20 steps, of 80: .*LambdaLR at script.py:\d+",
        """
net = mlp(); opt = torch.optim.SGD(net.parameters(), 1e-2)
rate = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: min(k / 8, 1.0))
for i in range(80):
    x, y = labels(i); opt.zero_grad(); F.cross_entropy(net(x), y).backward(); opt.step()
    if i % 20 == 19: rate.step()
""",
        "    if i % 20 == 19: rate.step()\n",
        "    rate.step()\n",
    ),
    "frames flattened before the classes": Row(
        "github.com/weirme/FCSN/issues/32",
        "shape",
        r"the loss at script.py:\d+ .* takes \[320, 2\], a view of \[16, 2, 20\] whose",
        """
net = nn.Sequential(nn.Conv1d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv1d(16, 2, 1))
opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(40):
    x = torch.randn(16, 8, 20); y = (x[:, 0] > 0).long(); out = torch.log_softmax(net(x), dim=1)
    loss = F.nll_loss(out.reshape(-1, 2), y.view(-1))
    opt.zero_grad(); loss.backward(); opt.step()
""",
        "out.reshape",
        "out.permute(0, 2, 1).reshape",
    ),
    "probabilities over the batch": Row(
        "github.com/DeepReinforcementLearning/DeepReinforcementLearningInAction/issues/32",
        "loss",
        r"autopsy: the loss at script.py:\d+ .*: its input was normalised over dimension 0, and",
        """
net = nn.Sequential(mlp(2), nn.Softmax(dim=0)); opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(60):
    x, y = data(i); policy = torch.distributions.Categorical(net(x)); action = policy.sample()
    reward = (action == (y[:, 0] > 0)).float() - 0.5
    loss = -(policy.log_prob(action) * reward).mean(); opt.zero_grad(); loss.backward(); opt.step()
""",
        "nn.Softmax(dim=0)",
        "nn.Softmax(dim=1)",
    ),
    "a sigmoid before cross_entropy": Row(
        "github.com/eriklindernoren/PyTorch-YOLOv3/issues/108",
        "loss",
        r"the loss at script.py:\d+ .*: a sigmoid keeps each logit in 0..1 before it",
        """
net = mlp(); opt = torch.optim.Adam(net.parameters(), 1e-3); loss_of = nn.CrossEntropyLoss()
for i in range(40):
    x, y = labels(i); out = torch.sigmoid(net(x)); loss = loss_of(out, y)
    opt.zero_grad(); loss.backward(); opt.step()
""",
        "torch.sigmoid(net(x))",
        "net(x)",
    ),
    "colours last, viewed as first": Row(
        "github.com/Selen-Suyue/DensePolicy2D/issues/3",
        "shape",
        r"\[16, 12, 12, 3\] is viewed as \[16, 3, 12, 12\] at script.py:\d+ .* movedim",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 3)
    def forward(self, x):
        x = x.reshape(-1, 3, 12, 12)
        return self.head(self.conv(x).relu().mean((2, 3)))
def batch(i): return torch.rand(16, 12, 12, 3), torch.randint(3, (16,))
loop(Net(), None, 40, batch, F.cross_entropy)
""",
        "x.reshape(-1, 3, 12, 12)",
        "x.permute(0, 3, 1, 2)",
    ),
    "train() undoes eval()": Row(
        "github.com/pliang279/MultiBench/issues/26",
        "evaluation",
        r"in train mode, at script.py:\d+ in test: train\(\) at script.py:\d+ in test undoes",
        """
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 3))
opt = torch.optim.RMSprop(net.parameters(), 1e-3); loss_of = nn.CrossEntropyLoss()
def test(total=0):
    net.eval()
    with torch.no_grad():
        for x, y in map(labels, range(6)):
            net.train()
            total += loss_of(net(x), y).item()
    return total
for epoch in range(4):
    net.train()
    for i in range(10):
        x, y = labels(10 * epoch + i); loss = loss_of(net(x), y)
        opt.zero_grad(); loss.backward(); opt.step()
    print(test())
net.eval(); print(net(labels(99)[0]).argmax(1))
""",
        "            net.train()\n",
        "",
    ),
    "a sum that is not assigned": Row(
        "github.com/Lightning-AI/pytorch-lightning/issues/19138",
        "path",
        r"nothing uses what script.py:\d+ in forward computes, which is only `x \+ self.pe`",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.emb, self.head = nn.Embedding(20, 16), nn.Linear(160, 3)
        self.register_buffer("pe", torch.randn(10, 16))
    def encode(self, x): return x.relu()
    def forward(self, ids):
        x = self.emb(ids)
        x + self.pe
        return self.head(self.encode(x).flatten(1))
loop(Net(), None, 40, lambda i: (torch.randint(20, (16, 10)), torch.randint(3, (16,))),
     F.cross_entropy)
""",
        "        x + self.pe\n",
        "        x = x + self.pe\n",
    ),
    "a sigmoid in eval mode alone": Row(
        "github.com/wolny/pytorch-3dunet/issues/45",
        "evaluation",
        r"the loss at script.py:\d+ in test, in an evaluation: its input went through sigmoid",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.body = mlp(1)
    def forward(self, x):
        x = self.body(x)
        return x if self.training else torch.sigmoid(x)
net = Net(); opt = torch.optim.Adam(net.parameters(), 1e-3); loss_of = nn.BCEWithLogitsLoss()
def test(total=0):
    net.eval()
    with torch.no_grad():
        for i in range(90, 96):
            x, y = data(i); out = net(x)
            total += loss_of(out, (y[:, :1] > 0).float()).item()
    return total
for epoch in range(3):
    net.train()
    for i in range(20):
        x, y = data(i); loss = loss_of(net(x), (y[:, :1] > 0).float())
        opt.zero_grad(); loss.backward(); opt.step()
    print(test())
""",
        "out = net(x)\n",
        "out = net.body(x)\n",
    ),
    "a cosine for batches that moves by epoch": Row(
        "github.com/sthalles/SimCLR/issues/8",
        "schedule",
        r"CosineAnnealingLR at script.py:\d+ in <module> has T_max=30, .* made 8 steps, one a",
        """
from torch.utils.data import DataLoader, TensorDataset
net = mlp(); opt = torch.optim.Adam(net.parameters(), 1e-2); epochs = 8
loader = DataLoader(TensorDataset(*labels(0, 480)), 16, shuffle=True)
rate = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=len(loader), eta_min=0)
for epoch in range(epochs):
    for x, y in loader:
        loss = F.cross_entropy(net(x), y); opt.zero_grad(); loss.backward(); opt.step()
    rate.step()
""",
        "T_max=len(loader)",
        "T_max=epochs",
    ),
    "weights that are initialised after the load": Row(
        "github.com/ImCharlesY/AdaInt/issues/12",
        "state",
        r"all 2 matrices that load_state_dict\(\) at script.py:\d+ in .* overwritten at script.py",
        """
saved = copy.deepcopy(mlp(16).state_dict())
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.backbone, self.head = mlp(16), nn.Linear(16, 3)
        self.backbone.load_state_dict(saved)
        self.apply(self.begin)
    def begin(self, m):
        if isinstance(m, nn.Linear): nn.init.xavier_normal_(m.weight); nn.init.zeros_(m.bias)
    def forward(self, x): return self.head(self.backbone(x))
loop(Net(), None, 40)
""",
        "        self.backbone.load_state_dict(saved)\n        self.apply(self.begin)\n",
        "        self.apply(self.begin)\n        self.backbone.load_state_dict(saved)\n",
    ),
    "a mixture over the batch": Row(
        "github.com/ctallec/world-models/issues/10",
        "shape",
        r"log_softmax at script.py:\d+ in forward is over the 32 samples of the batch \(dim=1",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.rnn, self.out = nn.LSTM(4, 32), nn.Linear(32, 15)
    def forward(self, x):
        mean, size, pi = self.out(self.rnn(x)[0]).chunk(3, -1)
        return mean, size.exp(), F.log_softmax(pi, dim=-2)
def far(out, y):
    mean, size, pi = out
    return -(torch.distributions.Normal(mean, size).log_prob(y) + pi).logsumexp(-1).mean()
def batch(i): x = torch.randn(17, 32, 4); return x[:-1], x[1:, :, :1]
loop(Net(), None, 60, batch, far)
""",
        "dim=-2",
        "dim=-1",
    ),
    "advantages that are a square": Row(
        "github.com/PacktPublishing/Deep-Reinforcement-Learning-Hands-On/issues/74",
        "shape",
        r"the product at script.py:\d+ .* all pairs: \[16\] and \[16, 1\] make a square",
        """
net = mlp(4); opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(60):
    x, y = data(i); out = net(x); value = out[:, 3:]; goal = y[:, 0]
    log_prob = F.log_softmax(out[:, :3], 1)[range(16), y.argmax(1)]
    advantage = goal - value.detach()
    policy = advantage * log_prob; loss = F.mse_loss(value.squeeze(-1), goal) - policy.mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
        "value.detach()",
        "value.detach().squeeze(-1)",
    ),
    "a test that overlaps the training": Row(
        "github.com/sarpaykent/GotenNet/issues/10",
        "data",
        r"of the 80 samples that are evaluated at script.py:\d+ .* are trained on before, at",
        """
from torch.utils.data import DataLoader, Subset, TensorDataset
both = TensorDataset(*labels(0, 400)); order = torch.randperm(400)
train, test = order[:200], order[200:280]
inner = torch.randperm(200)[:150]
rows = inner
net = mlp(); opt = torch.optim.Adam(net.parameters(), 1e-3)
for epoch in range(3):
    net.train()
    for x, y in DataLoader(Subset(both, rows.tolist()), 16):
        loss = F.cross_entropy(net(x), y); opt.zero_grad(); loss.backward(); opt.step()
net.eval()
for x, y in DataLoader(Subset(both, test.tolist()), 40):
    with torch.no_grad(): print(net(x).argmax(1).eq(y).float().mean())
""",
        "rows = inner\n",
        "rows = train[inner]\n",
    ),
    "labels of one class": Row(
        "github.com/liuruijin17/LSTR/issues/50",
        "loss",
        r"each label seen with which head.weight was trained is 1, in \d+ losses, though it has 2",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.body, self.head = mlp(16), nn.Linear(16, 2)
        self.box = nn.Linear(16, 3)
    def forward(self, x): h = self.body(x).relu(); return self.head(h), self.box(h)
net = Net(); opt = torch.optim.Adam(net.parameters(), 1e-3); lane = 1
for i in range(300):
    x, y = data(i); kind, box = net(x); found = y[:, 0] > 0
    goal = torch.full((16,), 1); goal[found] = lane
    loss = F.cross_entropy(kind, goal) + F.l1_loss(box[found], y[found])
    opt.zero_grad(); loss.backward(); opt.step()
""",
        "lane = 1",
        "lane = 0",
    ),
    "heads exchanged by view": Row(
        "github.com/zhouhaoyi/Informer2020/issues/59",
        "shape",
        r"autopsy: \[16, 10, 2, 4\] is viewed as \[16, 2, 10, 4\] at script.py:\d+ in <genexpr>",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 3)
    def forward(self, x):
        q, k, v = (t.reshape(16, 10, 2, 4).contiguous() for t in self.qkv(x).chunk(3, -1))
        q, k, v = (t.view(16, 2, 10, 4) for t in (q, k, v))
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head(h.mean(1))
loop(Net(), None, 40, lambda i: (torch.randn(16, 10, 8), torch.randint(3, (16,))), F.cross_entropy)
""",
        "t.view(16, 2, 10, 4)",
        "t.transpose(1, 2)",
    ),
    "time and batch exchanged by view": Row(
        "github.com/hunkim/PyTorchZeroToAll/issues/15",
        "shape",
        r"autopsy: \[16, 10, 8\] is viewed as \[10, 16, 8\] at script.py:\d+ in batch",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.rnn, self.head = nn.GRU(8, 16), nn.Linear(16, 3)
    def forward(self, x): return self.head(self.rnn(x)[0][-1])
def batch(i):
    y = torch.randint(3, (16,)); x = torch.randn(16, 1, 10, 8) + y.view(16, 1, 1, 1)
    return x.squeeze(1).view(10, 16, 8), y
loop(Net(), None, 40, batch, F.cross_entropy)
""",
        "view(10, 16, 8)",
        "transpose(0, 1)",
    ),
    "classes one after the other": Row(
        "github.com/Deci-AI/super-gradients/issues/416",
        "data",
        r"autopsy: the first 12 batches of the loader at script.py:\d+ in <module> hold 2 of 10 ",
        """
from torch.utils.data import DataLoader, TensorDataset
y = torch.arange(10).repeat_interleave(60); x = torch.randn(600, 8) + y[:, None] / 5
net = mlp(10); opt = torch.optim.Adam(net.parameters(), 1e-3); both = TensorDataset(x, y)
for epoch in range(2):
    for a, b in DataLoader(both, 32):
        opt.zero_grad(); F.cross_entropy(net(a), b).backward(); opt.step()
""",
        "DataLoader(both, 32)",
        "DataLoader(both, 32, shuffle=True)",
    ),
    "a name that is nearly requires_grad": Row(
        "github.com/udacity/deep-learning-v2-pytorch/issues/12",
        "frozen",
        r"0.weight, 0.bias: require_grad = False .* PyTorch does not read",
        """
net = mlp()
for p in net[0].parameters(): p.require_grad = False
loop(net, torch.optim.Adam(net.parameters(), 1e-3), 60)
""",
        "p.require_grad = False",
        "p.requires_grad = False",
    ),
    "a cosine for the epochs that moves with each batch": Row(
        "github.com/ivadomed/ivadomed/pull/55",
        "schedule",
        r"CosineAnnealingLR at script.py:\d+ in train has T_max=6, as many as .* 60 steps",
        """
from torch.utils.data import DataLoader, TensorDataset
def train(epochs):
    net, loader = mlp(), DataLoader(TensorDataset(*data(1, 160)), 16, shuffle=True)
    opt = torch.optim.Adam(net.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, epochs)
    for epoch in range(epochs):
        for x, y in loader:
            loss = F.mse_loss(net(x), y)
            opt.zero_grad(); loss.backward(); opt.step()
            schedule.step()
train(6)
""",
        "            schedule.step()",
        "        schedule.step()",
    ),
    "a language model without a causal mask": Row(
        "github.com/pytorch/tutorials/issues/2478",
        "mask",
        r"labels of the loss at script.py:\d+ .* are the next ids, and each position sees its own",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.emb, self.head = nn.Embedding(24, 32), nn.Linear(32, 24)
        layer = nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    def forward(self, ids, mask): return self.head(self.body(self.emb(ids), mask))
net = Net(); opt = torch.optim.Adam(net.parameters(), 3e-3)
later = nn.Transformer.generate_square_subsequent_mask(12)
for i in range(60):
    ids = torch.randint(24, (16, 13)); out = net(ids[:, :-1], None)
    loss = F.cross_entropy(out.reshape(-1, 24), ids[:, 1:].reshape(-1))
    opt.zero_grad(); loss.backward(); opt.step()
""",
        "net(ids[:, :-1], None)",
        "net(ids[:, :-1], later)",
    ),
    "an advantage that trains the critic": Row(
        "github.com/astariul/encode-attend-navigate-pytorch/issues/2",
        "path",
        r"the product at script.py:\d+ in <module> trains the critic, too",
        """
actor, critic = mlp(), mlp(1)
opt = torch.optim.Adam([*actor.parameters(), *critic.parameters()], 1e-3)
for i in range(90):
    x, y = data(i); guess = critic(x).squeeze(1)
    policy = torch.distributions.Categorical(logits=actor(x)); action = policy.sample()
    reward = y.gather(1, action[:, None]).squeeze(1)
    loss = -((reward - guess) * policy.log_prob(action)).mean()
    loss = loss + F.mse_loss(guess, reward)
    opt.zero_grad(); loss.backward(); opt.step()
""",
        "(reward - guess) *",
        "(reward - guess.detach()) *",
    ),
    "the last place of padded sequences": Row(
        "github.com/allenai/allennlp/issues/1713",
        "padding",
        r"script.py:\d+ in forward takes the last place .* padding in \d+ of 16 sequences",
        """
rnn = nn.utils.rnn
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.gru, self.head = nn.GRU(3, 16, batch_first=True), nn.Linear(16, 3)
    def forward(self, x, lengths):
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        return self.head(out[:, -1])
def batch(i):
    g = torch.Generator().manual_seed(i); x = torch.randn(16, 7, 3, generator=g)
    return x, torch.randint(3, 8, (16,), generator=g), x[:, 0].argmax(1)
net = Net(); opt = torch.optim.Adam(net.parameters(), 1e-2)
for i in range(60):
    x, lengths, y = batch(i); loss = F.cross_entropy(net(x, lengths), y)
    opt.zero_grad(); loss.backward(); opt.step()
""",
        "out[:, -1]",
        "out[torch.arange(len(out)), lengths - 1]",
    ),
    "state_dict() for load_state_dict()": Row(
        "github.com/facebookresearch/mbrl-lib/issues/98",
        "state",
        r"script.py:\d+ loads nothing, `net.state_dict\(best\)`: write load_state_dict\(\)",
        """
net, best, lowest = mlp(), None, math.inf; opt = torch.optim.Adam(net.parameters(), 1e-2)
for i in range(60):
    x, y = data(i); loss = F.mse_loss(net(x), y); opt.zero_grad(); loss.backward(); opt.step()
    if loss < lowest: lowest, best = loss.item(), copy.deepcopy(net.state_dict())
net.state_dict(best)
""",
        "net.state_dict(best)",
        "net.load_state_dict(best)",
    ),
    "log-probabilities that are detached, beside a number that trains": Row(
        "github.com/alexhernandezgarcia/gflownet/pull/251",
        "path",
        r"no gradient has reached 0.weight, .*detach at script.py:\d+ in logprobs",
        """
policy, logZ = mlp(), nn.Parameter(torch.zeros(()))
groups = [{"params": policy.parameters()}, {"params": [logZ], "lr": 0.1}]
opt = torch.optim.Adam(groups, 1e-2)
def logprobs(outputs, actions):
    logits = outputs.clone().detach()
    return logits.log_softmax(1).gather(1, actions).squeeze(1)
for i in range(60):
    x, y = data(i); actions = y.argmax(1, keepdim=True)
    loss = (logZ + logprobs(policy(x), actions) - y.amax(1)).square().mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
        "outputs.clone().detach()",
        "outputs.clone()",
    ),
}

# What it does not say: each may be meant, or nothing that it sees tells the two apart.
SILENT = {
    # Told until 1 December 2026. Each is done on purpose, too, and nothing tells the two apart.
    "a temporal difference that trains its target": Row(
        "github.com/mingen-pan/Reinforcement-Learning-Q-learning-Gridworld-Pytorch/pull/2",
        "path",
        r"the target of the loss at script.py:\d+ in <module> has a gradient: 0.9 times",
        """
q, gamma = mlp(), 0.9; opt = torch.optim.RMSprop(q.parameters(), 1e-3)
for i in range(150):
    (state, _), (later, _) = data(i), data(i + 1)
    action, reward = state[:, :3].argmax(1, keepdim=True), state[:, 0]
    later_value = q(later).max(1)[0]
    target = reward + (reward > -1).float() * gamma * later_value
    loss = nn.MSELoss()(q(state).gather(1, action).squeeze(1), target)
    opt.zero_grad(); loss.backward(); opt.step()
""",
        "q(later).max(1)[0]",
        "q(later).max(1)[0].detach()",
    ),
    "an accuracy of all pairs": Row(
        "github.com/935963004/LaBraM/issues/15",
        "evaluation",
        r"script.py:\d+ in <module> compares each prediction with each label, \[16\]",
        """
net = mlp(); opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(40):
    x, y = labels(i); y = y[:, None]; out = net(x); loss = F.cross_entropy(out, y.squeeze())
    accuracy = (out.max(-1)[-1] == y).float().mean()
    opt.zero_grad(); loss.backward(); opt.step()
print(accuracy)
""",
        "[-1] == y)",
        "[-1] == y.squeeze())",
    ),
    "a momentum of another framework": Row(
        "github.com/r9y9/tacotron_pytorch/issues/19",
        "state",
        r"BatchNorm1d 1 of Sequential has momentum 0.99, .* statistics of the last batch",
        """
net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32, momentum=0.99, eps=1e-3), nn.Linear(32, 3))
opt = torch.optim.Adam(net.parameters(), 1e-3)
for epoch in range(3):
    net.train()
    for i in range(20):
        x, y = labels(i); opt.zero_grad(); F.cross_entropy(net(x), y).backward(); opt.step()
    net.eval()
    with torch.no_grad(): print(net(labels(99)[0]).argmax(1).eq(labels(99)[1]).float().mean())
""",
        "momentum=0.99",
        "momentum=0.01",
    ),
    "a softmax over the queries of attention": Row(
        "github.com/labmlai/annotated_deep_learning_paper_implementations/issues/146",
        "shape",
        r"autopsy: softmax at script.py:\d+ in forward .*dimension 1 of .*script.py:\d+.*dim=-1",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.first, self.head = nn.Linear(8, 16), nn.Linear(16, 3)
        self.key, self.query, self.value = (nn.Linear(16, 16) for _ in range(3))
    def forward(self, x):
        h = self.first(x); scores = self.query(h) @ self.key(h).transpose(-2, -1) / 4
        scores = scores.masked_fill(torch.ones(5, 5).triu(1) == 1, float("-inf"))
        weights = F.dropout(F.softmax(scores, dim=1), 0.1, self.training)
        return self.head((h + weights @ self.value(h)).mean(1))
loop(Net(), None, 60, lambda i: (torch.randn(16, 5, 8), torch.randint(3, (16,))), F.cross_entropy)
""",
        "dim=1)",
        "dim=2)",
    ),
    # Told on 30 November 2026; each check was for one report, and no other one asked for it.
    "a mask of 0 and 255 in an overlap": Row(
        "github.com/mateuszbuda/brain-segmentation-pytorch/issues/36",
        "loss",
        r"the loss at script.py:\d+ in <module> .*mask of 0 and 255: .*divide the mask by 255",
        """
def masks(i):
    g = torch.Generator().manual_seed(i)
    inside = torch.rand(8, 2, 12, 12, generator=g).cumsum(2) > 4
    noise = torch.randn(8, 2, 12, 12, generator=g)
    return inside.float() + noise / 2, inside.to(torch.uint8) * 255
def read(mask): return mask.float()
def overlap(p, mask):
    both = (p * mask).flatten(2).sum(-1)
    whole = p.flatten(2).sum(-1) + mask.flatten(2).sum(-1)
    return (2 * both + 1) / (whole + 1)
net = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1), nn.Sigmoid())
opt = torch.optim.Adam(net.parameters(), 1e-2)
for i in range(80):
    x, mask = masks(i)
    loss = (1 - overlap(net(x), read(mask))).mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
        "return mask.float()",
        "return mask.float() / 255",
    ),
    "positions counted along the batch": Row(
        "github.com/cmu-l3/anlp-fall2025-code/issues/1",
        "shape",
        r"autopsy: the positions at script.py:\d+ in forward number the 16 samples of the batch",
        """
class Net(nn.Module):
    def __init__(self, d=16):
        super().__init__(); self.emb, self.places = nn.Embedding(20, d), nn.Embedding(64, d)
        self.norm, self.qkv, self.out = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, 20)
    def forward(self, ids, goal):
        places = torch.arange(ids.size(0))[:, None]
        h = self.emb(ids) + self.places(places)
        q, k, v = self.qkv(self.norm(h)).chunk(3, -1)
        weights = (q @ k.transpose(1, 2) / 4).softmax(-1); h = self.out(h + weights @ v)
        return h, F.cross_entropy(h.transpose(1, 2), goal)
net = Net(); opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(40):
    ids = torch.randint(20, (16, 8)); loss = net(ids[:, :-1], ids[:, 1:])[1]
    opt.zero_grad(); loss.backward(); opt.step()
""",
        "torch.arange(ids.size(0))[:, None]",
        "torch.arange(ids.size(1))[None]",
    ),
    "a table of waves cut along the batch": Row(
        "github.com/cmu-l3/anlp-fall2025-code/issues/1",
        "shape",
        r"autopsy: the positions at script.py:\d+ in forward number the 16 samples of the batch",
        """
class Waves(nn.Module):
    def __init__(self, d, most=90):
        super().__init__(); pe = torch.zeros(most, 1, d); k = torch.arange(most)[:, None]
        pe[:, 0, ::2] = torch.sin(k * torch.exp(torch.arange(0, d, 2) * (-math.log(1e4) / d)))
        self.register_buffer("pe", pe)
    def forward(self, x): return x + self.pe[:x.size(0)]
class Net(nn.Module):
    def __init__(self, d=16):
        super().__init__(); self.emb, self.waves = nn.Embedding(20, d), Waves(d)
        layer = nn.TransformerEncoderLayer(d, 2, 32, batch_first=True)
        self.body, self.out = nn.TransformerEncoder(layer, 1), nn.Linear(d, 3)
    def forward(self, ids): return self.out(self.body(self.waves(self.emb(ids))).mean(1))
def batch(i): ids = torch.randint(20, (16, 5 + i % 4)); return ids, ids[:, 0] % 3
loop(Net(), None, 30, batch, F.cross_entropy)
""",
        "self.pe[:x.size(0)]",
        "self.pe[:x.size(1)].transpose(0, 1)",
    ),
    "a padding mask of the queries": Row(
        "github.com/hyunwoongko/transformer/pull/40",
        "path",
        r"the mask at script.py:\d+ in forward hides whole queries, and no key: softmax at ",
        """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
    def forward(self, x, mask):
        q, k, v = (f(x).view(16, 12, 2, 8).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.transpose(-2, -1) / 8**0.5
        scores = scores.masked_fill(mask == 0, -1e4)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.place = nn.Embedding(30, 16), nn.Parameter(0.02 * torch.randn(12, 16))
        self.layers, self.head = nn.ModuleList([Attention(), Attention()]), nn.Linear(16, 3)
    def forward(self, ids):
        mask = (ids != 0)[:, None, :, None]
        x = self.emb(ids) + self.place
        for layer in self.layers: x = x + layer(x, mask)
        return self.head(x[:, 0])
def batch(step):
    y = torch.randint(3, (16,)); ids = 10 * y[:, None] + torch.randint(1, 10, (16, 12))
    return ids.masked_fill(torch.arange(12) >= torch.randint(3, 13, (16, 1)), 0), y
loop(Net(), None, 40, batch, F.cross_entropy)
""",
        "[:, None, :, None]",
        "[:, None, None, :]",
    ),
    "a padding mask of ones": Row(
        "github.com/yg211/bert_nli/pull/3",
        "mask",
        r"autopsy: .*mask.*script.py:\d+ in <module>.*(hides nothing|ones).*padding",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.emb, self.head = nn.Embedding(50, 16), nn.Linear(16, 3)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    def forward(self, ids, mask):
        return self.head(self.layer(self.emb(ids), src_key_padding_mask=mask == 0)[:, 0])
net = Net(); opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(60):
    rows = [torch.randint(1, 50, (n,)) for n in torch.randint(4, 14, (16,)).tolist()]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True); mask = torch.ones_like(ids)
    loss = F.cross_entropy(net(ids, mask), ids[:, 0] % 3)
    opt.zero_grad(); loss.backward(); opt.step()
""",
        "torch.ones_like(ids)",
        "(ids != 0).long()",
    ),
    "a warm-up that begins anew in each epoch": Row(
        "github.com/Vision-CAIR/MiniGPT-4/pull/263",
        "order",
        r"rate of AdamW begins anew .*script.py:\d+ in <module>.*first value, 1e-05, 5 times",
        """
data_set = torch.utils.data.TensorDataset(*data(0, 320))
loader = torch.utils.data.DataLoader(data_set, 16, shuffle=True)
net = mlp(); opt = torch.optim.AdamW(net.parameters(), 1e-2)
def set_rate(step):
    for group in opt.param_groups: group["lr"] = 1e-5 + (1e-2 - 1e-5) * min(1.0, step / 15)
for epoch in range(6):
    for k, (x, y) in enumerate(loader):
        set_rate(k)
        loss = F.mse_loss(net(x), y); opt.zero_grad(); loss.backward(); opt.step()
""",
        "set_rate(k)",
        "set_rate(k + epoch * len(loader))",
    ),
    "a schedule that steps for each micro-batch of one update": Row(
        "github.com/amoudgl/pygoturn/issues/16",
        "schedule",
        r"StepLR at script.py:\d+ in <module> steps 4 times in a row, .* 3 times: the lr of SGD",
        """
net = mlp(); opt = torch.optim.SGD(net.parameters(), 0.1)
rate = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.2)
updates, whole = 0, []
for i in range(480):
    whole.append(data(i, 4))
    ready = len(whole) == 4
    if ready:
        x, y = (torch.cat(part) for part in zip(*whole)); whole = []
        loss = F.mse_loss(net(x), y)
        opt.zero_grad(); loss.backward(); opt.step(); updates += 1
    if updates and updates % 30 == 0:
        rate.step()
""",
        "if updates and updates",
        "if ready and updates",
    ),
    "steps where a remainder is left": Row(
        "github.com/eriklindernoren/PyTorch-YOLOv3/pull/313",
        "order",
        r"Adam at script.py:\d+ in <module> steps after 3 of 4 backward passes, .* `done % n == 0`",
        """
from torch.utils.data import DataLoader, TensorDataset
x, y = data(0, 256); n = 4
loader = DataLoader(TensorDataset(x, y), 8, shuffle=True)
net = mlp(); opt = torch.optim.Adam(net.parameters(), 1e-3)
for epoch in range(4):
    net.train()
    for k, (a, b) in enumerate(loader):
        done = epoch * len(loader) + k
        loss = F.mse_loss(net(a), b)
        loss.backward()
        if done % n:
            opt.step()
            opt.zero_grad()
    with torch.no_grad(): print(epoch, F.mse_loss(net(x), y).item())
""",
        "if done % n:",
        "if done % n == 0:",
    ),
    "a generator that each worker copies": Row(
        "github.com/albumentations-team/AlbumentationsX/issues/266",
        "data",
        r"each worker of .* script.py:\d+ .*same copy of Moved.dataset.change.steps\[1\].r, and",
        """
import random
from torch.utils.data import DataLoader, Dataset, Subset
class Jitter:
    def __init__(self, seed): self.r = random.Random(seed)
    def __call__(self, x): return x * self.r.uniform(0.8, 1.2) + self.r.choice([-0.1, 0.1])
class Steps:
    def __init__(self, *steps): self.steps = steps
    def __call__(self, x):
        for step in self.steps: x = step(x)
        return x
class Pairs(Dataset):
    def __init__(self, change): self.change, (self.x, self.y) = change, data(0, 120)
    def __len__(self): return 120
    def __getitem__(self, i): return self.change(self.x[i]), self.y[i]
class Moved(Subset): pass
def begin(worker): pass
train = Moved(Pairs(Steps(torch.clone, Jitter(1))), range(96))
load = DataLoader(train, 12, shuffle=True, num_workers=2, worker_init_fn=begin)
net = mlp(); opt = torch.optim.Adam(net.parameters(), 1e-2)
for epoch in range(4):
    for x, y in load:
        loss = F.mse_loss(net(x), y); opt.zero_grad(); loss.backward(); opt.step()
""",
        "def begin(worker): pass",
        "def begin(worker): train.dataset.change.steps[1].r.seed(torch.initial_seed())",
    ),
    "the generator's adversarial loss is detached": Row(
        "github.com/nikhilsinghmus/image2reverb/issues/37",
        "path",
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
""",
        "guess = D(torch.cat([x, fake.detach()], 1))",
        "guess = D(torch.cat([x, fake], 1))",
    ),
    "an adversarial term of what was made for the discriminator": Row(
        "github.com/nikhilsinghmus/image2reverb/issues/37",
        "path",
        r"a term of the loss at script.py:\d+ in step trains nothing: .*D.* detach at script.py:",
        """
G, D = mlp(), nn.Sequential(nn.Linear(11, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
g, d = torch.optim.RMSprop(G.parameters(), 1e-3), torch.optim.RMSprop(D.parameters(), 1e-3)
def judge(x, y): return D(torch.cat([x, y], 1))
def step(x, y):
    g.zero_grad(); d.zero_grad(); out = G(x); fake = out.detach()
    (F.relu(1 - judge(x, y)).mean() + F.relu(1 + judge(x, fake)).mean()).backward(); d.step()
    adversarial = -judge(x, fake).mean()
    (0.1 * adversarial + 10 * F.l1_loss(out, y)).backward(); g.step()
for i in range(60): step(*data(i))
""",
        "-judge(x, fake)",
        "-judge(x, out)",
    ),
    "features normalised over the batch": Row(
        "github.com/alireza-nasiri/SoundCLR/issues/4",
        "shape",
        r"autopsy: the loss at script.py:\d+ .* features \[16, 32\] .* normalize with dim=1",
        """
net = mlp(32); opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(40):
    x, _ = data(i)
    h = torch.cat([F.normalize(net(x + 0.1 * torch.randn(16, 8)), dim=0) for _ in range(2)])
    near = h @ h.T / 0.5 - 1e9 * torch.eye(32)
    loss = F.cross_entropy(near, torch.arange(32).roll(16))
    opt.zero_grad(); loss.backward(); opt.step()
""",
        "dim=0",
        "dim=1",
    ),
    "view where transpose was meant, of heads": Row(
        "github.com/zhouhaoyi/Informer2020/issues/59",
        "shape",
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
""",
        "t.reshape(B, 2, T, 4)",
        "t.transpose(1, 2)",
    ),
    "a scheduler built after the optimizer was loaded": Row(
        "github.com/torch-points3d/torch-points3d/pull/630",
        "state",
        r"autopsy: .*(lr|rate).*(loaded|load_state_dict)",
        """
net = mlp(); opt = torch.optim.SGD(net.parameters(), 0.1)
def plan(): return torch.optim.lr_scheduler.LambdaLR(opt, lambda k: 0.97**k)
rate = plan(); loop(net, opt, 60, after=lambda step: rate.step())
saved = copy.deepcopy((net.state_dict(), opt.state_dict(), rate.state_dict()))
net = mlp(); opt = torch.optim.SGD(net.parameters(), 0.1); net.load_state_dict(saved[0])
opt.load_state_dict(saved[1]); rate = plan()
loop(net, opt, 60, after=lambda step: rate.step())
""",
        "opt.load_state_dict(saved[1]); rate = plan()",
        "rate = plan(); rate.load_state_dict(saved[2]); opt.load_state_dict(saved[1])",
    ),
    "normalize over tokens in place of features": Row(
        "github.com/gabeur/mmt/issues/1",
        "shape",
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
""",
        "dim=1).mean(1)",
        "dim=-1).mean(1)",
    ),
    "micro-batches that are summed": Row(
        "github.com/hirofumi0810/neural_sp/issues/168",
        "order",
        r"autopsy: .*(micro-batches|backward passes).*(sum|divide)",
        """
net = mlp(); opt = torch.optim.SGD(net.parameters(), 0.05)
for i in range(240):
    x, y = data(i); loss = F.mse_loss(net(x), y)
    loss = loss / 1
    loss.backward()
    if i % 8 == 7: opt.step(); opt.zero_grad()
""",
        "loss / 1",
        "loss / 8",
    ),
    "a teacher that drops": Row(
        "github.com/yxuansu/TaCL/issues/11",
        "mode",
        r"autopsy: .*teacher.*(eval|drop)",
        """
student = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
teacher = copy.deepcopy(student); loop(teacher, None, 60)
opt = torch.optim.Adam(student.parameters(), 1e-2); teacher.requires_grad_(False); teacher.train()
for i in range(90):
    x, y = data(i)
    with torch.no_grad(): soft = teacher(x)
    loss = F.mse_loss(student(x), soft); opt.zero_grad(); loss.backward(); opt.step()
""",
        "teacher.train()",
        "teacher.eval()",
    ),
}

OTHERS = {
    "padded places one by one, a mask after the step, branches and terms that are off": """
rnn, F_ = nn.utils.rnn, F.cross_entropy
class Masked(nn.Linear):
    def __init__(self):
        super().__init__(8, 8); self.register_buffer("mask", (self.weight > -0.1).float())
    def prune(self): self.weight.data.mul_(self.mask)
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.emb, self.side = nn.Embedding(20, 8, 0), nn.Linear(4, 8)
        self.gru, self.deep, self.alpha = nn.GRU(8, 8, batch_first=True), Masked(), 0.0
        self.heads = nn.ModuleList(nn.Linear(8, n) for n in (20, 1, 3))
    def forward(self, ids, style):
        return self.deep(self.emb(ids).sum(1)).tanh() + self.alpha * self.side(style)
net = Net(); opt = torch.optim.Adam(net.parameters(), 1e-3); weights = torch.tensor([1.0, 0.5, 0])
for i in range(100):
    if i == 80: net.alpha = 1.0
    n = torch.randint(3, 8, (16,)); y = torch.randint(3, (16,))
    ids = torch.randint(1, 20, (16, int(n.max()))) * (torch.arange(int(n.max())) < n[:, None])
    packed = rnn.pack_padded_sequence(net.emb(ids), n, batch_first=True, enforce_sorted=False)
    out = rnn.pad_packed_sequence(net.gru(packed)[0], batch_first=True)[0]
    h = net(ids, out[:, 0, :4])
    places = [net.heads[0](out[:, t]) for t in range(out.shape[1])]
    seen = [(F_(p, ids[:, t], reduction="none") * (t < n)).mean() for t, p in enumerate(places)]
    one, three = [F_(net.heads[k](h), y * (k - 1)) for k in (1, 2)]
    loss = one + (weights * torch.stack([sum(seen), h.var(), three])).sum()
    opt.zero_grad(); loss.backward(); opt.step(); net.deep.prune()
""",
    "rates that fall or turn on purpose, a list of losses that a notebook shows": """
from torch.utils.data import DataLoader, TensorDataset
rates = torch.optim.lr_scheduler
class Trainer:
    def __init__(self): self.update = []
net, trainer = mlp(), Trainer(); opt = torch.optim.Adam(net.parameters(), 1e-2)
halves, free = rates.StepLR(opt, 20, 0.5), [*net[0].parameters()]
for i in range(300):
    x, y = data(0); loss = F.mse_loss(net(x), y)
    net.zero_grad(); loss.backward(); opt.step(); halves.step(); trainer.update.append(loss.item())
trainer.update
half, rows = 8, TensorDataset(*data(1, 160)); sgd = torch.optim.SGD(free, 0.05)
cycle = rates.CosineAnnealingLR(sgd, T_max=half)
for part in range(8):
    for x, y in DataLoader(rows, 16, shuffle=True):
        sgd.zero_grad(); F.mse_loss(net(x), y).backward(); sgd.step(); cycle.step()
""",
    "samples that meet, time first, a text from its end": """
from torch.utils.data import DataLoader, TensorDataset
class Former(nn.Module):
    def __init__(self):
        super().__init__(); self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)
        self.rows = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    def forward(self, x): return self.last(self.rows(self.first(x)[None])[0])  # rows attend to rows
class Time(nn.Module):
    def __init__(self):
        super().__init__(); self.rnn, self.out = nn.LSTM(2, 8), nn.Linear(8, 3)
    def forward(self, x): return self.out(self.rnn(x)[0].mean(1))
class Text(nn.Module):
    def __init__(self):
        super().__init__(); self.emb, self.out = nn.Embedding(30, 16), nn.Linear(16, 30)
        self.layer, self.qkv = nn.Linear(16, 16), nn.Linear(16, 48)
    def forward(self, ids):
        q, k, v = self.qkv(self.emb(ids)).chunk(3, -1); n = ids.shape[1]
        seen = torch.ones(n, n, dtype=torch.bool).triu()
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        h = h + (k @ q.mT).softmax(1) @ v
        return self.out(self.layer(h).relu())
nets = rows, time, text = nn.ModuleList([Former(), Time(), Text()])
opt = torch.optim.Adam(nets.parameters(), 1e-3)
for epoch in range(4):
    for x, y in DataLoader(TensorDataset(*labels(0, 256)), 16, shuffle=True):
        ids = torch.randint(30, (8, 9)); sensors = x[:12].view(12, 4, 2)
        opt.zero_grad(); F.cross_entropy(time(sensors), y[:12]).backward()
        loss = F.cross_entropy(rows(x), y) + F.cross_entropy(text(ids[:, 1:]).mT, ids[:, :-1])
        loss.backward(); opt.step()
""",
    "averages with the start, a weighted sum, sums of gradients in a buffer": """
class Dual(torch.optim.Optimizer):
    def __init__(self, params): super().__init__(params, {"lr": 0.01}); self.t = 0
    @torch.no_grad()
    def step(self):
        self.t += 1
        for p in self.param_groups[0]["params"]:
            start = self.state[p].setdefault("start", p.clone())
            p.copy_(start - 0.01 / self.t**0.5 * p.grad)
net, norm = mlp(), nn.BatchNorm1d(8, momentum=0.95)
start = copy.deepcopy(net).requires_grad_(False)
total = copy.deepcopy(net); start(data(0)[0]); opt = torch.optim.Adam(net.parameters(), 1e-2)
deep = nn.Sequential(norm, *(nn.Linear(8, 8) for _ in range(3)))
second = torch.optim.SGD([p for p in deep.parameters() if p.requires_grad], 1e-2)
dual, own, flat, at = mlp(), mlp(), torch.zeros(387), 0; sums = Dual(dual.parameters())
for p in own.parameters(): p.grad = flat[at : at + p.numel()].view_as(p); at += p.numel()
all_of = torch.optim.SGD(own.parameters(), 1e-2)
for i in range(80):
    x, y = data(i); opt.zero_grad(); F.mse_loss(net(x), y).backward(); opt.step()
    F.mse_loss(dual(x), y).backward(); sums.step()
    second.zero_grad(); F.mse_loss(deep.train()(x)[:, :3], y).backward(); second.step()
    with torch.no_grad():
        deep.eval()(x); pairs = [*zip(start.parameters(), net.parameters())]
        between = [0.5 * a + 0.5 * p for a, p in pairs]; print(sum(p.norm() for p in between))
        for t, p in zip(total.parameters(), net.parameters()): t.add_(p, alpha=0.5)
    both = torch.zeros_like(flat)
    for k in range(2):
        all_of.zero_grad(set_to_none=False); F.mse_loss(own(x)[:, k], y[:, k]).backward()
        both += flat / flat.norm()
    flat.copy_(both); all_of.step()
""",
    "a critic whose gradients of the policy's loss are cleared; the ends of padded sequences": """
actor, critic, gamma = mlp(), mlp(1), 0.9; gru = nn.GRU(8, 8)
a = torch.optim.Adam([*actor.parameters(), *gru.parameters()])
c = torch.optim.Adam(critic.parameters())
for i in range(60):
    x, y = data(i); guess = critic(x)[:, 0]
    policy = torch.distributions.Categorical(logits=actor(x)); action = policy.sample()
    reward = y.gather(1, action[:, None])[:, 0]
    packed = nn.utils.rnn.pack_padded_sequence(x[None].repeat(5, 1, 1), torch.tensor([5] * 16))
    out, lengths = nn.utils.rnn.pad_packed_sequence(gru(packed)[0])
    loss = -(policy.log_prob(action) * (reward - guess)).mean() + 0.1 * out[-1].square().mean()
    a.zero_grad(); loss.backward(retain_graph=True); a.step()
    c.zero_grad(); F.mse_loss(guess, reward).backward(); c.step()
""",
    "a residual gradient, and values that a reward does not name": """
v, opt = mlp(1), None
for discount in (0.9, 1.0):
    opt = torch.optim.Adam(v.parameters(), 1e-3)
    for i in range(60):
        (x, y), (later, _) = data(i), data(i + 1)
        residual = y[:, :1] + discount * v(later) - v(x)
        opt.zero_grad(); residual.pow(2).mean().backward(); opt.step()
""",
    "critics whose targets have no graph, a model of rewards that has one": """
gamma, v, model = 0.95, mlp(1), mlp(1); old = copy.deepcopy(v).requires_grad_(False)
opt = torch.optim.Adam([*v.parameters(), *model.parameters()], 1e-3)
for i in range(90):
    (x, y), (later, _) = data(i), data(i + 1); reward = y[:, :1]
    goal = reward + gamma * (v if i % 2 else old)(later).detach()
    loss = F.mse_loss(v(x), goal) + F.mse_loss(model(x), reward + 0 * y[:, 1:2])
    loss = loss + 0.1 * F.mse_loss(v(x), 0.5 * v(x + 0.01 * later) + 0.5 * v(x))
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "an average that takes the place of the weights for a while": """
net = mlp(); opt = torch.optim.Adam(net.parameters(), 1e-2); backup = {}
shadow = {name: p.detach().clone() for name, p in net.named_parameters()}
def keep_and_apply():
    for name, p in net.named_parameters():
        backup[name] = p.data.clone()
        p.data.copy_(shadow[name])
def restore():
    for name, p in net.named_parameters(): p.data.copy_(backup[name])
for i in range(60):
    x, y = data(i); opt.zero_grad(); F.mse_loss(net(x), y).backward(); opt.step()
    for name, p in net.named_parameters(): shadow[name] = 0.9 * shadow[name] + 0.1 * p.detach()
    if i % 10 == 9:
        keep_and_apply(); net.eval()
        with torch.no_grad(): print(F.mse_loss(net(x), y))
        restore(); net.train()
""",
    "MC dropout and statistics that are made again": """
net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Linear(32, 3))
loop(net, torch.optim.SGD(net.parameters(), 0.05), 60, labels, F.cross_entropy)
x, y = labels(99)
with torch.no_grad():
    for i in range(6): net(labels(i)[0])  # BatchNorm again, as swa_utils.update_bn() does
    print(sum(F.cross_entropy(net(x), y) for _ in range(6)) / 6)  # Monte Carlo
""",
    "folds of one data set": """
from torch.utils.data import DataLoader, Subset, TensorDataset
both = TensorDataset(*labels(0, 200))
for fold in range(3):
    net = mlp(); opt = torch.optim.Adam(net.parameters(), 1e-2)
    test = torch.randperm(200)[:50].tolist(); train = sorted({*range(200)} - {*test})
    for epoch in range(3):
        for x, y in DataLoader(Subset(both, train), 16, shuffle=True):
            loss = F.cross_entropy(net(x), y); opt.zero_grad(); loss.backward(); opt.step()
        net.eval()
        for x, y in DataLoader(Subset(both, test), 50):
            with torch.no_grad(): print(net(x).argmax(1).eq(y).float().mean())
        net.train()
""",
    "two optimizers that take turns with one encoder": """
enc, heads = mlp(16), [nn.Linear(16, 3), nn.Linear(16, 3)]
opts = [torch.optim.Adam([*enc.parameters(), *head.parameters()], 1e-3) for head in heads]
for i in range(60):
    x, y = data(i); opt = opts[i % 2]; opt.zero_grad()
    F.mse_loss(heads[i % 2](enc(x)), y).backward(); opt.step()
""",
    "one step of Adam from a start, for each task": """
start = mlp(); outer = torch.optim.SGD(start.parameters(), 0.1)
for i in range(40):
    x, y = data(i); net = copy.deepcopy(start); opt = torch.optim.Adam(net.parameters(), 1e-2)
    opt.zero_grad(); F.mse_loss(net(x), y).backward(); opt.step()
    outer.zero_grad()
    for p, q in zip(start.parameters(), net.parameters()): p.grad = (p - q).detach()
    outer.step()
""",
    "a penalty on the weights' own gradient, and a first-order step": """
net = mlp(); opt = torch.optim.Adam(net.parameters(), 1e-3)
names = [name for name, _ in net.named_parameters()]
for i in range(40):
    x, y = data(i); x.requires_grad_(); first = F.mse_loss(net(x), y)
    (slope,) = torch.autograd.grad(first, x, create_graph=True)
    slopes = torch.autograd.grad(first, [*net.parameters()], retain_graph=True)
    fast = {n: p - 0.1 * g for n, p, g in zip(names, net.parameters(), slopes)}
    after = F.mse_loss(torch.func.functional_call(net, fast, (x,)), y)
    loss = first + slope.square().sum() + after + slopes[0].norm() * first * 0
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "edges of a graph that are added to the scores, and a mask of padding": """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.emb, self.head = nn.Embedding(20, 16, 0), nn.Linear(16, 3)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    def forward(self, ids, edges):
        h = self.emb(ids)[:, None]
        h = h + F.scaled_dot_product_attention(h, h, h, attn_mask=edges[:, None])
        return self.head(self.layer(h[:, 0], src_key_padding_mask=ids == 0).mean(1))
net = Net(); opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(40):
    ids, n = torch.randint(1, 20, (16, 12)), torch.randint(4, 12, (16, 1)); y = ids[:, 0] % 3
    ids[torch.arange(12) >= n] = 0; edges = (torch.rand(16, 12, 12) > 0.5).float()
    loss = F.cross_entropy(net(ids, edges), y); opt.zero_grad(); loss.backward(); opt.step()
""",
    "losses that take what looks odd": """
net = mlp(2); opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(60):
    x, y = data(i); out = net(x); p = out.sigmoid(); q = (y[:, :2] > 0).float() * 0.8 + 0.1
    loss = F.kl_div(p.log(), q) + F.kl_div((1 - p).log(), 1 - q)  # of two outcomes each
    loss = loss + F.kl_div(out.log_softmax(1), y[:, :2].log_softmax(1), log_target=True)
    loss = loss + F.margin_ranking_loss(out[:, 0], out[:, 1], (y[:, 0] > 0).float())
    loss = loss + F.binary_cross_entropy_with_logits(out, 0.7 + 0.5 * torch.rand(16, 2))
    real, fake = torch.zeros(16).long(), torch.ones(16).long()
    loss = loss + F.cross_entropy(net(x), real) + F.cross_entropy(net(-x), fake)
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "sums over several lines, and a head that begins anew": """
saved = copy.deepcopy(mlp(16).state_dict())
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.body, self.head = mlp(16), nn.Linear(16, 3)
        self.body.load_state_dict(saved); nn.init.normal_(self.head.weight, std=0.01)
    def forward(self, x):
        h = self.body(x)
        h.sum()  # a number for nobody
        return self.head(F.relu(
            h + 0.1
        ))
net = Net(); loop(net, None, 60)
""",
    "inputs that matter rarely, elsewhere, or only in their sum": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(8, 16), nn.Linear(4, 16), nn.Linear(16, 3)
        self.gate = nn.Parameter(torch.zeros(16)); self.register_buffer("bank", torch.zeros(64, 16))
    def forward(self, x, cond, text, weight, rows, sizes, zeros):
        h = self.a(x) + self.gate * self.b(cond)
        if torch.rand(()) < 0.5: h = h + self.b(text)  # modality dropout
        self.bank[rows] = h.detach()
        if not self.training: return self.out(h) * sizes[:, None]
        return self.out(h.relu()) * weight.mean()
net = Net(); opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(70):
    x, y = data(i); opt.zero_grad(); weight = torch.rand(16)
    out = net(x, torch.randn(16, 4), torch.randn(16, 4), weight, torch.randperm(64)[:16],
              torch.rand(16), torch.zeros(16, 2))
    F.mse_loss(out, y).backward(); opt.step()
""",
    "inputs for another network, the loss, a result that is not used, or nobody": """
class MLP(nn.Module):
    def __init__(self):
        super().__init__(); self.net = mlp()
    def forward(self, x, adj, lengths): return self.net(x)
class Graph(nn.Module):
    def __init__(self):
        super().__init__(); self.net = mlp()
    def forward(self, x, adj, lengths):
        h = adj @ x / lengths[:, None]
        return self.net(x + h)
class Heads(nn.Module):
    def __init__(self):
        super().__init__(); self.net, self.state = mlp(), None
    def forward(self, x, extra, gold, more, seen):
        hidden = (gold * 2).sum()  # for a debugger
        self.state = more.mean(1)
        return self.net(x), extra.mean(1), seen.sum().item()
nets = [MLP(), Graph(), Heads()]; log = []
opt = torch.optim.Adam([p for net in nets for p in net.parameters()], 1e-3)
for i in range(70):
    x, y = data(i); opt.zero_grad(); adj, lengths = torch.rand(16, 16), torch.randint(1, 9, (16,))
    loss = F.mse_loss(nets[0](x, adj, lengths), y) + F.mse_loss(nets[1](x, adj, lengths), y)
    out, extra, seen = nets[2](x, torch.rand(16, 4), y, torch.rand(16, 4), torch.rand(16))
    loss = loss + F.mse_loss(out, y); log.append(extra.sum().item())
    loss.backward(); opt.step()
""",
    "samples that may meet": """
from torch.utils.data import DataLoader, TensorDataset
class Former(nn.Module):
    def __init__(self):
        super().__init__(); self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32)
    def forward(self, x):
        h = self.first(x)
        if self.training: h = h + self.layer(h[:, None])[:, 0]
        return self.last(h)
class Sets(nn.Module):
    def __init__(self):
        super().__init__(); self.net = mlp()
    def forward(self, x): return self.net(x - x.mean(0))  # all of them are one set
class Both(nn.Module):
    def __init__(self):
        super().__init__(); self.a, self.b = mlp(), mlp()
    def forward(self, x): return self.a(x) @ self.b(x).T
class Largest(nn.Module):
    def __init__(self):
        super().__init__(); self.net = mlp()
    def forward(self, x): return self.net(x / x.norm(dim=1).max())
x, y = data(0, 256)
nets = [Former(), Sets(), Largest(), Both()]
opt = torch.optim.Adam([p for net in nets for p in net.parameters()], 1e-3)
for epoch in range(3):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True):
        loss = sum(F.mse_loss(net(a), b) for net in nets[:3])
        loss = loss + F.cross_entropy(nets[3](a), torch.arange(16))
        opt.zero_grad(); loss.backward(); opt.step()
""",
    "samples that are apart, in rows that know each other": """
from torch.utils.data import DataLoader, TensorDataset
class Times(nn.Module):
    def __init__(self):
        super().__init__(); self.lstm, self.last = nn.LSTM(2, 16), nn.Linear(16, 3)
        self.hidden, self.norm, self.drop = None, nn.BatchNorm1d(8), nn.Dropout(0.1)
    def forward(self, x):
        x = self.drop(self.norm(x)).unflatten(1, (4, 2))
        out, self.hidden = self.lstm(x.transpose(0, 1), self.hidden)
        self.hidden = tuple(h.detach() for h in self.hidden)
        return self.last(out[-1])
class Ordered(nn.Module):
    def __init__(self):
        super().__init__(); self.net = mlp()
    def forward(self, x): return self.net(x.cumsum(0))
x, y = data(0, 256); net, walk = Times(), Ordered()
opt = torch.optim.Adam([*net.parameters(), *walk.parameters()], 1e-3)
for epoch in range(3):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True):
        opt.zero_grad(); F.mse_loss(net(a), b).backward(); opt.step()
for a, b in DataLoader(TensorDataset(x, y), batch_size=16):
    opt.zero_grad(); F.mse_loss(walk(a), b).backward(); opt.step()
""",
    "attention that drops on purpose, and modules that know the mode": """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.samples = False
        self.qkv, self.out = nn.Linear(2, 24), nn.Linear(32, 3)
        self.mix = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
    def forward(self, x):
        q, k, v = self.qkv(x.unflatten(1, (4, 2))).chunk(3, -1)
        p = 0.1  # MC dropout: the spread of several passes is the uncertainty
        h = F.scaled_dot_product_attention(q, k, v, None, p)
        h = F.scaled_dot_product_attention(h, k, v, dropout_p=p * (self.training or self.samples))
        return self.out(self.mix(h, h, h)[0].flatten(1))
net = Net(); opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(60):
    x, y = data(i); opt.zero_grad(); F.mse_loss(net(x), y).backward(); opt.step()
    if i % 30 == 29:
        net.eval()
        with torch.no_grad(): print(net(data(99)[0]).std().item())
        net.samples = True
        with torch.no_grad(): print(net(data(98)[0]).std().item())
        net.train(); net.samples = False
""",
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
    "a clip after the step: for its norm, for another optimizer, with closures, of a few": """
def run(make, after):
    net = mlp(); opts = make(net)
    for i in range(30):
        x, y = data(i); [o.zero_grad() for o in opts]; F.mse_loss(net(x), y).backward()
        opts[0].step(); after(net); [o.step() for o in opts[1:]]
clip, adam = nn.utils.clip_grad_norm_, torch.optim.Adam
def two(net): return adam(net[0].parameters(), 1e-3), torch.optim.SGD(net[2].parameters(), 1e-2)
def both(net): return adam(net.parameters(), 1e-3), torch.optim.SGD(net.parameters(), 1e-2)
run(lambda net: [adam(net.parameters())], lambda net: clip(net.parameters(), math.inf))
run(lambda net: [adam(net.parameters())], lambda net: clip(net.parameters(), 1e6))
for make in (two, both): run(make, lambda net: clip(net.parameters(), 0.1))
def sent(net): clip(net.parameters(), 0.1); print(sum(p.grad.abs().sum() for p in net.parameters()))
run(lambda net: [adam(net.parameters())], sent)
net = mlp(); opt = torch.optim.LBFGS(net.parameters(), max_iter=3)
for i in range(20):
    x, y = data(i)
    def closure():
        opt.zero_grad(); loss = F.mse_loss(net(x), y); loss.backward()
        clip(net.parameters(), 0.5); return loss
    opt.step(closure)
""",
    "clips of all networks before each step, and of micro-batches": """
G, D = mlp(), nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 1))
every = [*G.parameters(), *D.parameters()]
g, d = torch.optim.Adam(G.parameters(), 1e-3), torch.optim.Adam(D.parameters(), 1e-3)
def step(opt, loss):
    opt.zero_grad(); loss.backward(); nn.utils.clip_grad_norm_(every, 1.0); opt.step()
for i in range(60):
    x, y = data(i); fake = G(x)
    step(d, (F.softplus(-D(y)) + F.softplus(D(fake.detach()))).mean())
    step(g, F.softplus(-D(fake)).mean())
net = mlp(); opt = torch.optim.SGD(net.parameters(), 1e-2); opt.zero_grad()
for i in range(60):
    x, y = data(i); (F.mse_loss(net(x), y) / 4).backward()
    if i % 4 == 3: opt.step(); opt.zero_grad()
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
""",
    "rates that come back on purpose: periods, folds, range tests, a merge": """
data_set = torch.utils.data.TensorDataset(*data(0, 320)); S = torch.optim.lr_scheduler
loader = torch.utils.data.DataLoader(data_set, 16, shuffle=True); n = len(loader)
def train(net, opt, epochs, rate=None, set_rate=None, after=lambda net, opt: None):
    for epoch in range(epochs):
        for k, (x, y) in enumerate(loader):
            if set_rate:
                for group in opt.param_groups: group["lr"] = set_rate(k)
            loss = F.mse_loss(net(x), y); opt.zero_grad(); loss.backward(); opt.step()
            if rate: rate.step()
        after(net, opt)
def new(): net = mlp(); return net, torch.optim.Adam(net.parameters(), 1e-2)
def warm(k): return 1e-5 + 1e-3 * min(1, k / 9)
for make in (
    lambda opt: S.CyclicLR(opt, 1e-5, 1e-2, n - 1, 1), lambda opt: S.OneCycleLR(opt, 1e-2, 5 * n),
    lambda opt: S.CyclicLR(opt, 1e-5, 1e-2, n // 2),
    lambda opt: S.CosineAnnealingWarmRestarts(opt, n),
    lambda opt: S.LambdaLR(opt, lambda step: (1 + step % n) / n),
): net, opt = new(); train(net, opt, 5, make(opt))
for fold in range(5): net, opt = new(); train(net, opt, 1, None, warm)
net, opt = new(); saved = copy.deepcopy((net.state_dict(), opt.state_dict()))
def reset(net, opt): net.load_state_dict(saved[0]); opt.load_state_dict(saved[1])
train(net, opt, 5, None, lambda k: 1e-6 * 1.8**k, reset)
def merge(net, opt):
    with torch.no_grad(): nn.init.zeros_(net[2].weight)
    opt.state.clear()
net, opt = new(); train(net, opt, 5, None, warm, merge)
""",
    "a warm-up over epochs, a rate per epoch, a head that trains first": """
data_set = torch.utils.data.TensorDataset(*data(0, 320)); S = torch.optim.lr_scheduler
loader = torch.utils.data.DataLoader(data_set, 16)
def train(net, opt, epochs, set_rate):
    for epoch in range(epochs):
        for k, (x, y) in enumerate(loader):
            for group in opt.param_groups: group["lr"] = set_rate(epoch, k)
            loss = F.mse_loss(net(x), y); opt.zero_grad(); loss.backward(); opt.step()
        with torch.no_grad(): sum(F.mse_loss(net(x), y) for x, y in loader)
net = mlp(); opt = torch.optim.SGD(net.parameters(), 1e-2, 0.9)
train(net, opt, 6, lambda epoch, k: 1e-4 * min(80, epoch * 20 + k + 1))
train(net, opt, 6, lambda epoch, k: 1e-2 * 0.9**epoch)
train(net, opt, 6, lambda epoch, k: 1e-2 * (1 - k / 20))
net = mlp(); opt = torch.optim.Adam(net.parameters(), 1e-3)
for layers in ((2,), (0, 2), (0,)):
    for k in (0, 2): net[k].requires_grad_(k in layers)
    train(net, opt, 1, lambda epoch, k: 1e-5 + 1e-3 * min(1, k / 9))
net = mlp(); opt = torch.optim.Adam(net.parameters(), 1e-3)
for task in range(5):
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data(task, 320)), 16)
    train(net, opt, 1, lambda epoch, k: 1e-5 + 1e-3 * min(1, k / 9))
""",
    "clean images are evaluated, noisy or mixed ones trained": """
images = torch.rand(64, 3, 12, 12) ** 2; y = torch.randint(3, (64,))
def train(spoil):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(800, 3))
    opt = torch.optim.Adam(net.parameters(), 1e-3)
    for epoch in range(5):
        net.train()
        for x, t in zip(images.split(16), y.split(16)):
            loss = F.cross_entropy(net(spoil(x)), t)
            opt.zero_grad(); loss.backward(); opt.step()
        net.eval()
        with torch.no_grad(): [net(x) for x in images.split(32)]
train(lambda x: x + 0.3 * torch.randn_like(x))
""",
    "padding that is ignored, weighed, left out, or a label elsewhere too": """
table, rnn, head = nn.Embedding(40, 32), nn.GRU(32, 32, batch_first=True), nn.Linear(32, 40)
net = nn.ModuleList([table, rnn, head]); opt = torch.optim.Adam(net.parameters(), 1e-3)
weight = (torch.arange(40) > 0).float()
for i in range(40):
    lengths = torch.randint(4, 16, (16, 1)); ids = torch.randint(1, 40, (16, 21))
    ids = ids * (torch.arange(21) < lengths); there = ids[:, 1:] > 0
    out, y = head(rnn(table(ids[:, :-1]))[0]), ids[:, 1:]
    loss = F.cross_entropy(out.mT, y, ignore_index=0) + F.cross_entropy(out.mT, y, weight)
    loss = loss + F.cross_entropy(out[there], y[there])
    loss = loss + (F.cross_entropy(out.mT, y, reduction="none") * there).sum() / there.sum()
    loss = loss + F.cross_entropy(out.mT, y.masked_fill(~there, -100))
    loss = loss + F.cross_entropy(out.mT, y % 3)  # a tag for each id
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "one network under two names: checked once, wrapped, loaded from itself": """
net = mlp(); opt = torch.optim.Adam(net.parameters(), 1e-3); old = net
old.load_state_dict(net.state_dict())
with torch.no_grad():
    for a, b in zip(old.parameters(), net.parameters()): a.copy_(b)
class Wrap(nn.Module):
    def __init__(self, module): super().__init__(); self.module = module
    def forward(self, x): return self.module(x)
wrapped = Wrap(net); best = wrapped
for epoch in range(6):
    loop(wrapped, opt, 8)
    for one in (net, old): one.load_state_dict(wrapped.module.state_dict())
    old.load_state_dict(wrapped.module.state_dict())
    state = net.state_dict(); net.load_state_dict(state)
    wrapped.load_state_dict(wrapped.state_dict())
    with torch.no_grad():
        for a, b in zip(wrapped.parameters(), net.parameters()): a.copy_(b)
""",
    "targets that share a part, and weights that are mixed with themselves": """
class Net(nn.Module):
    def __init__(self, first): super().__init__(); self.first, self.last = first, nn.Linear(32, 3)
    def forward(self, x): return self.last(self.first(x).relu())
net = Net(nn.Linear(8, 32)); target = Net(net.first); slow = copy.deepcopy(net)
opt = torch.optim.Adam(net.parameters(), 1e-3)
def after(i):
    for tp, p in zip(target.parameters(), net.parameters()): tp.data.copy_(0.1 * p + 0.9 * tp.data)
    with torch.no_grad():
        for tp, p in zip(slow.parameters(), net.parameters()): tp.mul_(0.9); tp.add_(p, alpha=0.1)
        net.last.weight.copy_(net.last.weight / net.last.weight.norm(dim=1, keepdim=True))
        net.first.weight.mul_(0.999); net.first.bias.lerp_(torch.zeros(32), 0.01)
        net.last.bias.copy_(net.last.bias - net.last.bias.mean())
        net.last.bias.add_(net.last.bias, alpha=-0.01)
        if i % 10 == 0: net.first.weight.copy_(net.first.weight.clamp(-1, 1))
    state, mine = slow.state_dict(), net.state_dict()
    slow.load_state_dict({k: 0.9 * state[k] + 0.1 * mine[k] for k in state})
loop(net, opt, 60, after=after)
""",
    "seeds on purpose: of a part, for each sample, for each run, for what draws nothing": """
import random; load = torch.utils.data.DataLoader; data_set = torch.utils.data.TensorDataset
def run(loader, before=None, after=None, net=None, epochs=5):
    net = net or mlp(); opt = torch.optim.Adam(net.parameters(), 1e-3)
    for epoch in range(epochs):
        if before: before(epoch)
        for x, y in loader:
            loss = F.mse_loss(net(x), y); opt.zero_grad(); loss.backward(); opt.step()
        if after: after(net)
plain, mixed = (load(data_set(*data(0, 96)), 16, shuffle=mix) for mix in (False, True))
def pictures(net):
    with torch.random.fork_rng(), torch.no_grad(): torch.manual_seed(0); net(torch.randn(4, 8))
    with torch.no_grad(): net(torch.randn(4, 8, generator=torch.Generator().manual_seed(0)))
run(mixed, after=pictures); run(mixed, lambda epoch: torch.manual_seed(epoch))
run(plain, lambda epoch: torch.manual_seed(0)); run(mixed, lambda epoch: random.seed(0))
run(load(data_set(*data(0, 16)), 16, shuffle=True), lambda epoch: torch.manual_seed(0))
class Own(torch.utils.data.Dataset):
    def __len__(self): return 96
    def __getitem__(self, i):
        torch.manual_seed(i); random.seed(i); x, y = data(i, 1)
        return x[0] + torch.randn(8) * random.random(), y[0]
run(load(Own(), 16)); run(load(Own(), 16), lambda epoch: torch.manual_seed(0))
for rate in range(4): torch.manual_seed(5); run(mixed, epochs=1)
for rate in range(3): torch.manual_seed(5); run(mixed, epochs=2)
def validate(net):
    torch.manual_seed(0); net.eval(); state = torch.get_rng_state()
    with torch.no_grad(): [net(x + torch.randn_like(x)) for x, y in plain]
    net.train(); torch.manual_seed(int(state[9]) + validate.calls); validate.calls += 1
validate.calls = 0; run(mixed, after=validate)
""",
    "workers with seeds: their own, for a validation, for what draws nothing, for each sample": """
import random; load = torch.utils.data.DataLoader
class Data(torch.utils.data.Dataset):
    def __init__(self, noise): self.noise = noise
    def __len__(self): return 64
    def __getitem__(self, i):
        x, y = data(i, 1)
        if self.noise == "sample": torch.manual_seed(i); random.seed(i)
        return x[0] + (0.1 * torch.randn(8) * random.random() if self.noise else 0), y[0]
def same(worker): torch.manual_seed(worker); random.seed(worker)
def other(worker): random.seed(torch.initial_seed() % 2**32)
def run(train, check=None):
    net = mlp(); opt = torch.optim.Adam(net.parameters(), 1e-3)
    for epoch in range(4):
        for x, y in train:
            loss = F.mse_loss(net(x), y); opt.zero_grad(); loss.backward(); opt.step()
        net.eval()
        with torch.no_grad(): [net(x) for x, y in check or ()]
        net.train()
run(load(Data(True), 16, num_workers=2, worker_init_fn=other))
run(load(Data(False), 16, num_workers=2, worker_init_fn=same))
run(load(Data("sample"), 16, num_workers=2, worker_init_fn=same))
run(load(Data(True), 16, num_workers=2, worker_init_fn=same, persistent_workers=True))
run(load(Data(False), 16), load(Data(True), 16, num_workers=2, worker_init_fn=same))
""",
    "softmax over what is not summed, on purpose": """
class Net(nn.Module):
    def __init__(self, kind):
        super().__init__(); self.kind, self.first = kind, nn.Linear(8, 16)
        self.q, self.k, self.v, self.out = *(nn.Linear(16, 16) for _ in range(3)), nn.Linear(16, 3)
        self.slots, self.nodes = nn.Parameter(torch.randn(5, 16)), nn.Parameter(torch.randn(5, 4))
    def forward(self, x):
        h = self.first(x); q, k, v = self.q(h), self.k(h), self.v(h); s = q @ k.mT / 4
        if self.kind == "offset":
            a = s.softmax(-1); a = a / (1e-9 + a.sum(1, keepdim=True)); y = (v.mT @ a).mT
        if self.kind == "slots":
            y = (k @ self.q(self.slots).mT).softmax(-1).mT @ v
        if self.kind == "transitions":
            y = (h.mean(2, keepdim=True).mT.softmax(-1) @ s.softmax(-1) @ s.softmax(-1)).mT * v
        if self.kind == "diffusion":
            y = h + s.softmax(-1).mT @ h
        if self.kind == "graph":
            a = (self.nodes @ self.nodes.T).relu().softmax(1); y = torch.einsum("bnc,nm->bmc", v, a)
        if self.kind == "both":
            y = (s.softmax(1) * s.softmax(2)) @ v + s.softmax(1) @ v
        if self.kind == "linear":
            y = q.softmax(-1) @ (k.softmax(1).mT @ v)
        if self.kind == "sinkhorn":
            for _ in range(3): s = s.softmax(-1); s = s / s.sum(1, keepdim=True)
            y = s @ v
        return self.out(y.mean(1))
def batch(i): return torch.randn(16, 5, 8), torch.randint(3, (16,))
for kind in ("offset", "slots", "transitions", "diffusion", "graph", "both", "linear", "sinkhorn"):
    loop(Net(kind), None, 12, batch, F.cross_entropy)
""",
    "keys first, channels, time first, and values without a graph": """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 3)
    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        a = (k @ q.mT).softmax(1); y = a.mT @ v
        c = (q.mT @ k).softmax(-1); y = y + (c @ v.mT).mT
        t = torch.einsum("bid,bjd->ijb", q, k).softmax(1)
        y = y + torch.einsum("ijb,bjd->bid", t, v)
        return self.out((y + (q @ k.mT).detach().softmax(2) @ v.detach()).mean(1))
loop(Net(), None, 30, lambda i: (torch.randn(16, 5, 8), torch.randint(3, (16,))), F.cross_entropy)
""",
    "labels that are the ids: an echo, taggers, autoencoders, a start within the network": """
class Net(nn.Module):
    def __init__(self, kind):
        super().__init__(); self.emb, self.kind, two = nn.Embedding(21, 16), kind, kind == "both"
        self.rnn = nn.GRU(16, 16, batch_first=True, bidirectional=two)
        self.head = nn.Linear(16 * (1 + two), 20); self.start = nn.Parameter(torch.zeros(1, 1, 16))
        self.image = nn.Linear(5, 16)
    def forward(self, ids):
        h = self.emb(ids)
        if self.kind == "start": h = torch.cat([self.start.expand(len(h), 1, 16), h[:, :-1]], 1)
        if self.kind == "image": h = torch.cat([self.image(torch.randn(8, 4, 5)), h], 1)
        return self.head(self.rnn(h)[0])
for kind in ("both", "echo", "late", "tags", "masked", "start", "image"):
    net = Net(kind); opt = torch.optim.Adam(net.parameters(), 1e-3)
    for i in range(16):
        ids = torch.randint(20, (8, 13)); labels = ids; given = ids
        if kind == "late": labels = ids.roll(3, 1)
        if kind == "tags": labels = ids % 5
        if kind == "masked": given = ids.masked_fill(torch.rand(8, 13) < 0.2, 20)
        if kind == "image": labels = torch.cat([torch.full((8, 3), -100), ids, ids[:, :1]], 1)
        loss = F.cross_entropy(net(given).transpose(1, 2), labels)
        opt.zero_grad(); loss.backward(); opt.step()
""",
    "heads for the next ids": """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.emb, self.rnn = nn.Embedding(20, 16), nn.GRU(16, 16)
        self.heads = nn.ModuleList(nn.Linear(16, 20) for _ in range(3))
    def forward(self, ids): h = self.rnn(self.emb(ids))[0]; return [head(h) for head in self.heads]
net = Net(); opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(30):
    text = torch.randint(20, (16, 8)); loss = 0
    for k, logits in enumerate(net(text[:13]), 1):
        if (i + k) % 3: loss = loss + F.cross_entropy(logits.flatten(0, 1), text[k:][:13].flatten())
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "a label that is two ahead, as the script says": """
emb, rnn, head = nn.Embedding(20, 16), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 20)
opt = torch.optim.Adam([*emb.parameters(), *rnn.parameters(), *head.parameters()], 1e-3)
for i in range(30):
    text = torch.randint(20, (8, 15)); logits = head(rnn(emb(text[:, :-2]))[0])
    loss = F.cross_entropy(logits.transpose(1, 2), text[:, 2:])
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "norms of numbers that vary little at first, or on purpose": """
def net(change=lambda conv, norm: None):
    conv, norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8); change(conv, norm)
    return nn.Sequential(conv, norm, nn.GELU(), nn.Flatten(), nn.Linear(800, 3))
images = torch.randint(0, 256, (40, 16, 3, 12, 12)) / 255
def label(): return torch.randint(3, (16,))
def batch(i): return images[i], label()
loop(net(lambda conv, norm: nn.init.zeros_(conv.weight)), None, 40, batch, F.cross_entropy)
loop(net(lambda conv, norm: nn.init.normal_(conv.weight, std=1e-5)), None, 40, batch,
     F.cross_entropy)
loop(net(lambda conv, norm: nn.init.zeros_(norm.weight)), None, 40, batch, F.cross_entropy)
loop(net(lambda conv, norm: setattr(norm, "eps", 0.8)), None, 40, batch, F.cross_entropy)
loop(net(), None, 40, lambda i: (images[i] * min(1, i**4 * 1e-6), label()), F.cross_entropy)
loop(net(), None, 40, lambda i: (images[i] / 255 if i % 8 else images[i], label()), F.cross_entropy)
loop(net(), None, 40, lambda i: (0 * images[i], label()), F.cross_entropy)
emb = nn.Embedding(20, 16); emb.weight.data.uniform_(-1e-4, 1e-4)
loop(nn.Sequential(emb, nn.LayerNorm(16), nn.Linear(16, 3)), None, 40,
     lambda i: (torch.randint(20, (16,)), label()), F.cross_entropy)
""",
    "shares of words before a norm, and a GAN that begins with small images": """
def shares(i): x = torch.rand(16, 500); return x / x.sum(1, keepdim=True), torch.randint(3, (16,))
loop(nn.Sequential(nn.Linear(500, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3)), None, 40,
     shares, F.cross_entropy)
G, D = nn.Linear(4, 108), nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.LeakyReLU(0.2),
                                        nn.Flatten(), nn.Linear(128, 1))
G.weight.data.mul_(1e-3); G.bias.data.zero_()
g, d = torch.optim.Adam(G.parameters(), 1e-3), torch.optim.Adam(D.parameters(), 1e-3)
for i in range(40):
    x = torch.rand(16, 3, 6, 6); fake = G(torch.randn(16, 4)).view(16, 3, 6, 6); d.zero_grad()
    (F.softplus(D(fake.detach())) + F.softplus(-D(x))).mean().backward(); d.step()
    g.zero_grad(); F.softplus(-D(fake)).mean().backward(); g.step()
""",
    "masks of ones: full rows, segments, a causal network, padding that is hidden elsewhere": """
class Net(nn.Module):
    def __init__(self, kind):
        super().__init__(); self.emb, self.head = nn.Embedding(50, 16), nn.Linear(16, 3)
        self.layer, self.kind = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), kind
    def forward(self, ids, mask):
        options = dict(src_key_padding_mask=mask == 0)
        if self.kind == "hidden": options = dict(src_key_padding_mask=ids == 0)
        if self.kind == "causal":
            options = dict(src_mask=nn.Transformer.generate_square_subsequent_mask(14))
        h = self.layer(self.emb(ids), **options)
        if self.kind == "labels": return self.head(h).transpose(1, 2)
        return self.head(h[torch.arange(16), (ids != 0).sum(1) - 1])
for kind in ("full", "hidden", "causal", "segments", "labels", "blanks", "sometimes"):
    net = Net(kind); opt = torch.optim.Adam(net.parameters(), 1e-3)
    for i in range(12):
        ids = torch.randint(1, 50, (16, 14))
        if kind == "segments": ids = torch.randint(0, 2, (16, 14)).cumsum(1).clamp(max=11)
        if kind == "blanks": ids[torch.rand(16, 14) < 0.2] = 0
        if kind not in ("full", "segments"):
            ids[torch.arange(14) >= torch.randint(4, 15, (16, 1))] = 0
        mask = torch.ones_like(ids) if kind != "sometimes" or i != 3 else (ids != 0).long()
        labels = ids % 3 if kind == "labels" else ids[:, 0] % 3
        loss = F.cross_entropy(net(ids, mask), labels)
        opt.zero_grad(); loss.backward(); opt.step()
""",
    "other masks of ones, and no mask": """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.emb, self.head = nn.Embedding(50, 16), nn.Linear(16, 3)
        self.rnn = nn.GRU(16, 16, batch_first=True)
    def forward(self, ids, loss_mask, head_mask=None):
        return self.head(self.rnn(self.emb(ids))[0].mean(1)) * loss_mask[:, :1]
net = Net(); opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(12):
    ids = torch.randint(1, 50, (16, 14)); ids[torch.arange(14) >= torch.randint(4, 15, (16, 1))] = 0
    loss = F.cross_entropy(net(ids, torch.ones(16, 14), torch.ones(16, 4)), ids[:, 0] % 3)
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "one layer several times, on purpose": """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.mid, layer = nn.Linear(8, 8), nn.Linear(8, 8)
        self.all = nn.ModuleList([self.mid] * 3 + [layer] * 2 + [nn.Dropout(0.1)] * 2)
        self.more = nn.Sequential(*[nn.PReLU()] * 3, *(self.mid for _ in range(2)))
        self.out = nn.Linear(8, 3)
    def forward(self, x):
        for f in self.all: x = x + f(x).tanh()
        return self.out(self.more(x))
loop(Net(), None, 30)
""",
    "one layer several times, as the source says": """
class Universal(nn.Module):
    def __init__(self, n=3): super().__init__(); self.steps = nn.ModuleList([nn.Linear(8, 8)] * n)
    def forward(self, x):
        for f in self.steps: x = x + f(x).tanh()
        return x[:, :3]
class Net(nn.Module):
    def __init__(self, n_loops=3):
        super().__init__()
        self.cells = nn.Sequential(*[nn.Linear(8, 8)] * n_loops, nn.Linear(8, 3))
    def forward(self, x): return self.cells(x)
loop(Universal(), None, 30); loop(Net(), None, 30)
# the three layers share their weights
net = nn.Sequential(*[nn.Linear(8, 8)] * 3, nn.Linear(8, 3)); loop(net, None, 30); loop(net[1:])
""",
    "products of all pairs on purpose": """
net = mlp(1); opt = torch.optim.Adam(net.parameters(), 1e-3); grid = torch.linspace(-1, 1, 16)
weights = torch.randn(16, 1)
for i in range(30):
    x, y = data(i); y = y[:, 0]; out = net(x); flat = out[:, 0]
    near = torch.cdist(x, x).neg().exp(); spread = (near * (flat[:, None] - flat) ** 2).mean()
    kernel = ((-((flat[:, None] - flat) ** 2)).exp() * (-((y[:, None] - y) ** 2)).exp()).mean()
    asked = (flat[:, None] * y).mean() + (flat.unsqueeze(1) * y).clamp(min=0).mean()
    fixed = (flat * weights).mean() + (out * grid).neg().mean() + (out * grid).mean(0).norm()
    own = -(out * flat.detach()).mean() + (out * y - torch.outer(y, y)).square().mean()
    loss = F.mse_loss(flat, y) + 0.1 * spread + kernel + 0.01 * (asked + fixed + own)
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "weights of samples, and a policy gradient of several shapes": """
net = mlp(16); opt = torch.optim.Adam(net.parameters(), 1e-3); value = mlp(1)
for i in range(30):
    x, y = data(i); out = net(x); p = out.softmax(-1); each = (out[:, :3] - y).square()
    chosen = torch.randint(16, (16, 1)); log_p = p.log().gather(1, chosen)
    with torch.no_grad(): gain = y[:, :1] - value(x)
    loss = (each.mean(1) * torch.rand(16)).mean() + (each * torch.rand(16, 1)).mean()
    loss = loss - (log_p * gain).mean() - (log_p[:, 0] * gain[:, 0]).mean() + (p * gain).mean()
    loss = loss + torch.min(p * gain, p.clamp(0.1, 0.9) * gain).mean() + (p @ out.t()).mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "constants in a loss, a phase, and a term that is only shown": """
teacher, net = mlp().requires_grad_(False), mlp(); opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(60):
    x, y = labels(i); out, known = net(x), teacher(x); soft = known.softmax(1)
    kl = F.cross_entropy(out, soft) - F.cross_entropy(known, soft)
    base, entropy = F.cross_entropy(known, y), -(soft * soft.log()).sum(1).mean()
    later = F.mse_loss(out if i >= 30 else out.detach(), soft)
    shown = F.l1_loss(out.detach(), soft)
    loss = kl + F.cross_entropy(out, y) + 0.1 * entropy + 0.1 * base + later + 0.0 * shown + 3
    (loss + shown).item(); opt.zero_grad(); loss.backward(); opt.step()
""",
    "averaged codes and alternating parts": """
class Net(nn.Module):
    def __init__(self, mode):
        super().__init__(); self.a, self.b, self.mode = nn.Linear(8, 4), nn.Linear(4, 8), mode
        self.register_buffer("code", torch.randn(6, 4))
    def forward(self, x):
        z = self.a(x); flat = z.detach() if self.mode == 1 else z
        with torch.set_grad_enabled(self.mode != 2): k = torch.cdist(flat, self.code).argmin(1)
        q = self.code[k] if self.mode else F.one_hot(k, 6).float() @ self.code
        with torch.no_grad(): self.code[k] = 0.9 * self.code[k] + 0.1 * z
        loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(q.detach(), z)
        return F.mse_loss(self.b(z + (q - z).detach()), x) + loss
for mode in range(3):
    net = Net(mode); opt = torch.optim.Adam(net.parameters(), 1e-3)
    for i in range(20): loss = net(data(i)[0]); opt.zero_grad(); loss.backward(); opt.step()
A, B = nn.Parameter(torch.randn(16, 4)), nn.Parameter(torch.randn(4, 8)); opt = torch.optim.SGD
for pair in ([opt([A, B], 0.01)] * 2, [opt([A], 0.01), opt([B], 0.01)]):
    for i in range(40):
        x = data(0)[0]; a, b = (A, B.detach()) if i % 2 == 0 else (A.detach(), B)
        small = [0.01 * F.l1_loss(t, torch.zeros_like(t)) for t in (a, b)]
        loss = F.mse_loss(a @ b, x) + small[0] + small[1]
        pair[i % 2].zero_grad(); loss.backward(); pair[i % 2].step()
""",
    "two networks in one loss, one of which steps later or rarely": """
G, D = nn.Linear(4, 8), mlp(1); bce = F.binary_cross_entropy_with_logits
g, d = torch.optim.Adam(G.parameters(), 1e-3), torch.optim.Adam(D.parameters(), 1e-3)
one, zero = torch.ones(16, 1), torch.zeros(16, 1)
for i in range(40):
    x = data(i)[0]; fake = G(torch.randn(16, 4))
    known = bce(D(x), one) + bce(D(fake.detach()), zero)
    g.zero_grad(); (bce(D(fake), one) + known + 0.1 * fake.norm()).backward(); g.step()
    d.zero_grad(); (bce(D(x), one) + bce(D(fake.detach()), zero)).backward(); d.step()
for k in (1, 7, 30):
    A, B = mlp(), mlp(); a = torch.optim.Adam(A.parameters(), 1e-3)
    b = torch.optim.Adam(B.parameters(), 1e-3)
    for i in range(60):
        x, y = data(i); a.zero_grad(); b.zero_grad(); out = A(x)
        (F.mse_loss(out, y) + F.mse_loss(B(x), out.detach())).backward(); a.step()
        if i % k == 0: b.step()
""",
    "an actor whose loss has a detached part": """
actor, critic = mlp(2), nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
a, c = torch.optim.Adam(actor.parameters(), 1e-3), torch.optim.Adam(critic.parameters(), 1e-3)
alpha = nn.Parameter(torch.zeros(())); t = torch.optim.Adam([alpha], 1e-3)
for i in range(60):
    x, y = data(i); chosen = y[:, :2]
    loss = F.mse_loss(critic(torch.cat([x, chosen], 1)), y[:, 2:])
    c.zero_grad(); loss.backward(); c.step()
    act = actor(x); loss = -critic(torch.cat([x, act], 1)).mean() + F.mse_loss(act, chosen)
    loss = loss + alpha.exp().detach() * act.square().mean()
    a.zero_grad(); loss.backward(); a.step()
    t.zero_grad(); (alpha.exp() * act.detach().mean()).backward(); t.step()
""",
    "positions of what comes time first": """
class Net(nn.Module):
    def __init__(self, d=16):
        super().__init__(); self.emb = nn.Embedding(20, d)
        self.pe = nn.Parameter(torch.randn(64, 1, d))
        self.body = nn.TransformerEncoder(nn.TransformerEncoderLayer(d, 2, 32), 1)
        self.last, self.out = nn.MultiheadAttention(d, 2, batch_first=True), nn.Linear(d, 3)
    def forward(self, ids):
        h = self.body(self.emb(ids) + self.pe[:ids.size(0)]).transpose(0, 1)
        return self.out(self.last(h, h, h)[0].mean(1))
def batch(i): return torch.randint(20, (7, 16)), torch.randint(3, (16,))
loop(Net(), None, 20, batch, F.cross_entropy)
""",
    "positions of the sentences of a text": """
class Net(nn.Module):
    def __init__(self, d=16):
        super().__init__(); self.emb, self.place = nn.Embedding(20, d), nn.Embedding(64, d)
        self.words = nn.TransformerEncoderLayer(d, 2, 32, batch_first=True)
        self.sentences = nn.MultiheadAttention(d, 2, batch_first=True); self.out = nn.Linear(d, 3)
    def forward(self, ids):
        h = self.words(self.emb(ids) + self.place(torch.arange(len(ids)))[:, None]).mean(1)[None]
        return self.out(self.sentences(h, h, h)[0][0])
def batch(i): return torch.randint(20, (12, 7)), torch.randint(3, (12,))
loop(Net(), None, 20, batch, F.cross_entropy)
""",
    "an embedding for each agent": """
class Net(nn.Module):
    def __init__(self, d=16):
        super().__init__(); self.emb, self.agent = nn.Linear(8, d), nn.Embedding(12, d)
        self.time = nn.TransformerEncoderLayer(d, 2, 32, batch_first=True)
        self.out = nn.Linear(d, 3)
    def forward(self, x):
        return self.out(self.time(self.emb(x) + self.agent(torch.arange(len(x)))[:, None]).mean(1))
loop(Net(), None, 20, lambda i: (torch.randn(12, 7, 8), torch.randint(3, (12,))), F.cross_entropy)
""",
    "a cosine of short waves, and weights with a note": """
from torch.utils.data import DataLoader, TensorDataset
net, loader = mlp(), DataLoader(TensorDataset(*data(1, 160)), 16, shuffle=True)
for p in net.parameters(): p.requires_grad_reduction, p.needs_grad = False, False
opt = torch.optim.Adam(net.parameters(), 3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)  # up and down once in two epochs
for epoch in range(6):
    for x, y in loader:
        loss = F.mse_loss(net(x), y)
        opt.zero_grad(); loss.backward(); opt.step(); schedule.step()
""",
    "an encoder sees the ids that a decoder learns": """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.emb, self.head = nn.Embedding(24, 32), nn.Linear(32, 24)
        self.encoder = nn.GRU(32, 32, batch_first=True)
        self.decoder = nn.GRU(56, 32, batch_first=True)
    def forward(self, ids):
        code = self.encoder(self.emb(ids))[1].transpose(0, 1).expand(-1, 12, -1)
        before = F.one_hot(ids[:, :-1], 24).float()
        return self.head(self.decoder(torch.cat([code, before], 2))[0])
net = Net(); opt = torch.optim.Adam(net.parameters(), 3e-3)
for i in range(60):
    ids = torch.randint(24, (16, 13))
    loss = F.cross_entropy(net(ids).reshape(-1, 24), ids[:, 1:].reshape(-1))
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "a translator with one table for both languages, which are one": """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.emb, self.head = nn.Embedding(24, 32), nn.Linear(32, 24)
        self.body = nn.Transformer(32, 2, 1, 1, 64, 0.0, batch_first=True)
        self.register_buffer("later", nn.Transformer.generate_square_subsequent_mask(12))
    def forward(self, ids):
        return self.head(self.body(self.emb(ids), self.emb(ids[:, :-1]), tgt_mask=self.later))
net = Net(); opt = torch.optim.Adam(net.parameters(), 3e-3)
for i in range(60):
    ids = torch.randint(24, (16, 13))
    loss = F.cross_entropy(net(ids).reshape(-1, 24), ids[:, 1:].reshape(-1))
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "penalties over frozen weights, and norms without any": """
class Features(nn.Module):
    def __init__(self):
        super().__init__(); self.w = nn.Linear(8, 64).requires_grad_(False)
        self.norm = nn.BatchNorm1d(64, affine=False)
    def forward(self, x): return self.norm(self.w(x).cos())
net = nn.Sequential(Features(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 3))
start = [p.detach().clone() for p in net.parameters()]
def near(out, y):
    far = sum(((p - q) ** 2).sum() for p, q in zip(net.parameters(), start))
    return F.cross_entropy(out, y) + 1e-2 * far
params = [p for p in net.parameters() if p.requires_grad]
loop(net, torch.optim.Adam(params, 1e-3), 80, labels, near)
""",
    "dropout that is asked for, and averaged over": """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.a, self.b, self.more = nn.Linear(8, 64), nn.Linear(64, 3), False
    def forward(self, x, sample=False):
        h = F.dropout(self.a(x).relu(), 0.1, sample or self.training)
        if self.training or self.more:
            h = F.dropout(h, 0.1)
        return self.b(h)
net = Net(); opt = torch.optim.Adam(net.parameters(), 3e-3)
for epoch in range(6):
    net.train(); loop(net, opt, 10); net.eval(); net.more, x = True, data(epoch)[0]
    with torch.no_grad(): print(torch.stack([net(x, sample=True) for _ in range(5)]).std(0).sum())
    net.more = False
""",
    "the last epochs with frozen statistics": """
net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
opt = torch.optim.Adam(net.parameters(), 1e-3)
for epoch in range(8):
    if epoch < 4: net.train()
    for i in range(10):
        x, y = data(i); loss = F.mse_loss(net(x), y)
        opt.zero_grad(); loss.backward(); opt.step()
    net.eval()
    with torch.no_grad(): print(net(data(0)[0]).sum())
""",
    "pairs found both ways, a margin, half a cross-entropy, an energy distance": """
a, b = mlp(8), nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 8))
opt = torch.optim.Adam([*a.parameters(), *b.parameters()], 1e-3)
for i in range(30):
    x, y = data(i); near = F.normalize(a(x)) @ F.normalize(b(y)).T / 0.07; pair = torch.arange(16)
    loss = F.nll_loss(near.log_softmax(1), pair) + F.nll_loss(near.log_softmax(0), pair)
    opt.zero_grad(); loss.backward(); opt.step()
centres = nn.Parameter(torch.randn(3, 8)); net = mlp(8)
opt = torch.optim.SGD([*net.parameters(), centres], 0.02)
for i in range(60):
    x, y = labels(i); cosine = F.normalize(net(x)) @ F.normalize(centres).T
    cosine = cosine.clamp(-0.999, 0.999); ours = F.one_hot(y, 3).bool()
    logits = 64 * torch.where(ours, (cosine.acos() + 0.5).cos(), cosine)
    opt.zero_grad(); F.cross_entropy(logits, y).backward(); opt.step()
def halves(out, y):
    z = out.logsumexp(1)
    return F.nll_loss(out, y) + z.mean() + 1e-3 * z.square().mean()
loop(mlp(), None, 60, labels, halves)
def energy(fake, real):
    return 2 * (fake - real[:, 0]).abs().mean() - (fake - fake.T).abs().mean()
loop(mlp(1), None, 60, data, energy)
""",
    "masks that nothing needs": """
class Net(nn.Module):
    def __init__(self, causal):
        super().__init__(); self.emb, self.head = nn.Embedding(30, 16), nn.Linear(16, 30)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.rnn, self.causal = nn.LSTM(16, 16, batch_first=True), causal
    def forward(self, ids, mask, lengths):
        h = self.emb(ids)
        if self.causal:
            later = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
            return self.head(self.layer(h, src_mask=later, is_causal=True))
        packed = nn.utils.rnn.pack_padded_sequence(
            h, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.rnn(packed)[1][0][-1])
nets = Net(True), Net(False); opts = [torch.optim.Adam(net.parameters(), 1e-3) for net in nets]
for i in range(30):
    for net, opt, causal in zip(nets, opts, (True, False)):
        lengths = torch.randint(4, 13, (16,)); mask = torch.arange(12) < lengths[:, None]
        ids = torch.randint(1, 30, (16, 12)) * mask
        later = ids[:, 1:].masked_fill(~mask[:, 1:], -100); out = net(ids, mask, lengths)
        loss = (F.cross_entropy(out[:, :-1].transpose(1, 2), later) if causal
                else F.cross_entropy(out, ids.sum(1) % 30))
        opt.zero_grad(); loss.backward(); opt.step()
""",
    "prefixes that are tried, a flag that is read, one block at every depth": """
class Frozen(nn.Module):
    def __init__(self):
        super().__init__(); self.body = nn.Linear(8, 32); self.requires_grad = False
    def forward(self, x):
        with torch.set_grad_enabled(self.requires_grad): return self.body(x).tanh()
class Deep(nn.Module):  # the same weights at every depth
    def __init__(self):
        super().__init__(); self.first, self.last = Frozen(), nn.Linear(32, 3)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh())] * 4)
    def forward(self, x): return self.last(self.blocks(self.first(x)))
net = Deep(); saved = {f"module.{name}": t.clone() for name, t in net.state_dict().items()}
for prefix in ("", "backbone.", "module."):
    found = {name.removeprefix(prefix): t for name, t in saved.items()}
    if not net.load_state_dict(found, strict=False).missing_keys: break
loop(net, torch.optim.Adam([*net.blocks.parameters(), *net.last.parameters()], 1e-3), 60)
""",
    "attention among rows": """
class Rows(nn.Module):
    def __init__(self):
        super().__init__(); self.w = nn.Parameter(torch.randn(8, 16)); self.head = nn.Linear(128, 3)
        self.columns = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.rows = nn.MultiheadAttention(16, 2)
    def forward(self, x):
        h = self.columns(x[:, :, None] * self.w)
        return self.head((h + self.rows(h, h, h, need_weights=False)[0]).flatten(1))
net = Rows(); loop(net, None, 20, lambda i: labels(i, 24), F.cross_entropy)
""",
    "frames of one clip": """
class Frames(nn.Module):
    def __init__(self):
        super().__init__(); self.over_time, self.head = nn.LSTM(3, 16), nn.Linear(16, 4)
    def forward(self, x): return self.head(self.over_time(x)[0].mean(1))
def clip(i):
    y = torch.randint(4, (4,)).repeat_interleave(10)
    return (torch.arange(40) * (y + 1) * 0.3).sin()[:, None, None] + torch.randn(40, 9, 3) / 9, y
net = Frames(); loop(net, None, 20, clip, F.cross_entropy)
""",
    "nodes of a graph": """
class Nodes(nn.Module):
    def __init__(self):
        super().__init__(); self.score, self.head = nn.Linear(4, 1), nn.Linear(8, 2)
    def forward(self, x):
        all = (torch.softmax(self.score(x), dim=0) * x).sum(0, keepdim=True).expand_as(x)
        return self.head(torch.cat([x, all], -1).mean(1))
x, y = torch.randn(50, 12, 4), torch.randint(2, (50,))
net = Nodes(); loop(net, None, 20, lambda i: (x, y), F.cross_entropy)
""",
    "targets within a module, a hidden network, layers frozen one by one": """
class Agent(nn.Module):
    def __init__(self):
        super().__init__(); self.q, self.target = mlp(), mlp()
    def forward(self, x): return self.q(x), self.target(x).detach()
    def novelty(self, x):
        out, far = self(x)
        return (out - far).square().mean().item()
net = Agent(); opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(40):
    x, _ = data(i); net.novelty(x); out, far = net(x)
    opt.zero_grad(); F.mse_loss(out, far).backward(); opt.step()
class Perceptual(nn.Module):
    def __init__(self):
        super().__init__(); self.net = mlp()
        self._seen = [nn.Linear(3, 8).requires_grad_(False)]
    def forward(self, x): return self._seen[0](self.net(x))
loop(Perceptual(), None, 40, lambda i: (data(i)[0], torch.ones(16, 8)))
layers = [nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)]
opt = torch.optim.SGD([{"params": layer.parameters()} for layer in layers], 0.1)
rate = torch.optim.lr_scheduler.LambdaLR(
    opt, [lambda s, n=n: max(0.0, 1 - s / n) for n in (40, 60, 80)])
loop(nn.Sequential(*layers), opt, 80, after=lambda i: rate.step())
""",
    "what has converged, and schedules of longer runs": """
x, y = torch.randn(300, 8), torch.randint(2, (300,)).float()
net = nn.Linear(8, 1); lbfgs = torch.optim.LBFGS(net.parameters(), line_search_fn="strong_wolfe")
def closure():
    lbfgs.zero_grad(); loss = F.binary_cross_entropy_with_logits(net(x)[:, 0], y)
    loss = loss + 1e-3 * net.weight.square().sum(); loss.backward(); return loss
for i in range(10): lbfgs.step(closure)
line = nn.Linear(8, 1); sgd = torch.optim.SGD(line.parameters(), 0.2)
for i in range(900): sgd.zero_grad(); F.mse_loss(line(x)[:, 0], y).backward(); sgd.step()
other = mlp(); opt = torch.optim.Adam(other.parameters(), 1e-3)
decay = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
for i in range(120):
    loop(other, opt, 1)
    if i % 1000 == 999: decay.step()
""",
    "remainders around a step: else, not, continue, two optimizers, a clear each time": """
def step(net, opt, i):
    x, y = data(i); (F.mse_loss(net(x), y) / 4).backward()
net = mlp(); opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(120):
    step(net, opt, i)
    if not i % 4: opt.step(); opt.zero_grad()
for i in range(120):
    step(net, opt, i)
    if (i + 1) % 4: continue
    opt.step(); opt.zero_grad()
for i in range(120):
    step(net, opt, i)
    if i % 4 == 3: opt.step(); opt.zero_grad()
    if i % 10: print(i)
a, b = mlp(), mlp(); of_a = torch.optim.SGD(a.parameters(), 0.1)
of_b = torch.optim.SGD(b.parameters(), 0.1)
for i in range(120):
    step(a, of_a, i); of_a.step(); of_a.zero_grad(); of_b.zero_grad(); step(b, of_b, i)
    if i % 5: of_b.step()
net = mlp(); opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(120):
    if i % 8: step(net, opt, i); opt.step(); opt.zero_grad()
    else:
        with torch.no_grad(): print(F.mse_loss(net(data(0)[0]), data(0)[1]))
""",
    "masks of queries: beside one of keys, after softmax, across two inputs of one length": """
class Attention(nn.Module):
    def __init__(self, kind):
        super().__init__(); self.kind = kind
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
    def forward(self, x, other, keep):
        q, k, v = self.q(x), self.k(other), self.v(other); scores = q @ k.mT / 4
        hides = ~keep[:, :, None], ~keep[:, None]
        if self.kind == "both": scores = scores.masked_fill(hides[1], -1e9)
        if self.kind == "product":
            return self.out(scores.masked_fill(hides[0] | hides[1], -1e9).softmax(-1) @ v)
        weights = scores.masked_fill(hides[0], -1e9).softmax(-1)
        if self.kind == "after": weights = weights * keep[:, None]
        return self.out(weights @ (v * keep[..., None] if self.kind == "values" else v))
class Net(nn.Module):
    def __init__(self, kind):
        super().__init__(); self.emb, self.memory = nn.Embedding(30, 16), nn.Embedding(12, 16)
        self.layer, self.head, self.kind = Attention(kind), nn.Linear(16, 3), kind
    def forward(self, ids):
        x = self.emb(ids); other = self.memory(torch.arange(12)).expand_as(x)
        x = x + self.layer(x, other if self.kind == "across" else x, ids != 0)
        return self.head(x[:, 0])
def batch(step):
    y = torch.randint(3, (16,)); ids = 10 * y[:, None] + torch.randint(1, 10, (16, 12))
    return ids.masked_fill(torch.arange(12) >= torch.randint(3, 13, (16, 1)), 0), y
for kind in ("both", "product", "after", "values", "across"):
    loop(Net(kind), None, 20, batch, F.cross_entropy)
""",
    "names that are used again: states, a part under an if, one whose gate alone is trained": """
class Gated(nn.Module):
    def __init__(self):
        super().__init__(); self.gate, self.w = nn.Linear(8, 2), nn.Linear(8, 8)
    def forward(self, x):
        self.spread = self.gate(x).softmax(-1).var(0).sum()
        return self.w(x)
class Net(nn.Module):
    def __init__(self, kind):
        super().__init__(); self.kind, self.parts = kind, nn.ModuleList([Gated(), Gated()])
        self.rnn, self.next = (nn.GRU(8, 8, batch_first=True) for _ in range(2))
        self.a, self.b, self.head, self.probe = (nn.Linear(8, 8) for _ in range(4))
    def forward(self, x):
        out, state = self.rnn(x[:, None]); out, state = self.next(out)
        h = self.a(out[:, 0])
        if self.kind == "b":
            h = self.b(out[:, 0])
        _ = self.probe(h)
        x = self.parts[0](h)
        x = self.parts[1](h)
        h = self.head(x)  # to debug: without relu
        h = self.head(x.relu())
        return h[:, :3]
net = Net("b"); opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(40):
    x, y = data(i); out = net(x); out = net(x)
    loss = F.mse_loss(out, y) + 0.1 * sum(part.spread for part in net.parts)
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "workers of a federation, tasks that begin anew, codes of a fixed length": """
import copy
net = mlp(); worker = copy.deepcopy(net); opt = torch.optim.SGD(worker.parameters(), 0.1, 0.5)
for i in range(5):
    states = []
    for k in range(8):
        worker.load_state_dict(net.state_dict()); net(data(k)[0]); loop(worker, opt, 4)
        states.append(copy.deepcopy(worker.state_dict()))
    net.load_state_dict({k: sum(s[k] for s in states) / 8 for k in states[0]})
net = mlp(); opt = torch.optim.Adam(net.parameters(), 1e-3); loop(net, opt, 30)
saved = copy.deepcopy(net.state_dict())
for i in range(10): net.load_state_dict(saved); loop(net, opt, 5)
emb, body = nn.Embedding(30, 8), nn.Sequential(nn.Flatten(), nn.Linear(128, 32), nn.ReLU())
net = nn.Sequential(emb, body, nn.Linear(32, 16 * 30), nn.Unflatten(1, (30, 16)))
def texts(i):
    ids = torch.randint(1, 30, (32, 16)); end = torch.randint(4, 17, (32, 1))
    return (ids.masked_fill(torch.arange(16) >= end, 0),) * 2
loop(net, None, 20, texts, F.cross_entropy)
""",
    "views that are meant: a shift, rows of one size, sorted labels of two tasks": """
from torch.utils.data import DataLoader, TensorDataset
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.w, self.head = nn.Linear(8, 9), nn.Linear(9, 3)
    def rel_shift(self, x):
        a, b = x.shape[:2]
        return F.pad(x, (0, 0, 1, 0)).view(b + 1, a, -1)[1:].reshape(x.shape)
    def forward(self, x): return self.head(self.rel_shift(self.w(x)).mean(1))
loop(Net(), None, 20, lambda i: (torch.randn(16, 10, 8), torch.randint(3, (16,))), F.cross_entropy)
both = nn.Linear(8, 4); opt = torch.optim.Adam(both.parameters(), 1e-3)
for task in range(2):
    y = torch.randint(2 * task, 2 * task + 2, (640,)); x = torch.randn(640, 8)
    for a, b in DataLoader(TensorDataset(x, y), 32):
        opt.zero_grad(); F.cross_entropy(both(a), b).backward(); opt.step()
""",
    "features in columns, a fixed layer, a term with the factor 0, orders of one's own": """
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
class Own(DistributedSampler):
    passes = 0
    def __iter__(self):
        self.passes += 1; g = torch.Generator().manual_seed(self.passes)
        return iter(torch.randperm(len(self.dataset), generator=g).tolist())
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.first, self.fixed, self.last = (nn.Linear(8, 8) for _ in range(3))
        self.aux = nn.Linear(8, 3); self.fixed.requires_grad_(False)
    def forward(self, x): return self.last(self.fixed(self.first(x)).tanh()), self.aux(x)
net = Net(); opt = torch.optim.Adam(net.parameters(), 1e-3)
both = TensorDataset(torch.randn(128, 8), torch.randint(3, (128,)))
loader = DataLoader(both, 16, sampler=Own(both, 1, 0))
for epoch in range(5):
    for x, y in loader:
        h, extra = net(torch.cat([x, x + 0.1 * torch.randn_like(x)])); z = F.normalize(h.T, dim=0)
        near = z.T @ z / 0.5 - 1e9 * torch.eye(32)
        loss = F.cross_entropy(near, torch.arange(32).roll(16))
        loss = loss + 0.0 * F.cross_entropy(extra[:16], y)
        opt.zero_grad(); loss.backward(); opt.step()
""",
    "copies, samplers, plateaus, casts and ways that are meant": """
X = torch.randn(96, 8); Y = (X @ torch.randn(8, 3)).argmax(1); best, best_model = math.inf, None
sampler = torch.utils.data.WeightedRandomSampler((1 / Y.bincount(minlength=3))[Y], 96)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), 16, sampler=sampler)
for rate in (1e-3, 3e-3, 1e-2):  # the best of several networks
    net = mlp(); opt = torch.optim.Adam(net.parameters(), rate)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=1)
    best_net, lowest = net, math.inf
    for epoch in range(4):
        for x, y in loader:
            loss = F.cross_entropy(net(x), y); opt.zero_grad(); loss.backward()
            nn.utils.clip_grad_norm_((p for p in net.parameters()), 1.0); opt.step()
        acc = (net(X).argmax(1) == Y).float().mean().item()
        plateau.step(-acc); plateau.step(1 - acc)
        if loss.item() < lowest: lowest, best_net = loss.item(), copy.deepcopy(net)
    if lowest < best:
        best = lowest
        best_model = net
print(F.cross_entropy(best_model(X), Y).item(), F.cross_entropy(best_net(X), Y).item())
rnn, head = nn.GRU(4, 8, batch_first=True, bidirectional=True), nn.Linear(16, 3)
target, predictor = nn.Linear(4, 3), nn.Linear(4, 3)  # a random one, to be predicted
q = nn.Linear(4, 3); q_target = copy.deepcopy(q)
opt = torch.optim.Adam([*rnn.parameters(), *head.parameters(), *predictor.parameters(),
                        *q.parameters()], 1e-2)
for i in range(90):
    x = torch.randn(16, 6, 4); out, _ = rnn(x); z = torch.cat([out[:, -1, :8], out[:, 0, 8:]], 1)
    with torch.no_grad(): goal, later = target(x[:, 0]), q_target(x[:, 1])
    pixels = (torch.rand(16, 3) * 256).long(); seen = (x[:, 0, :3].sigmoid() + 0.4).long()
    loss = F.mse_loss(predictor(x[:, 0]), goal) + F.mse_loss(q(x[:, 0]), 0.9 * later)
    loss = loss + F.cross_entropy(head(z), x[:, 1].argmax(1) % 3) + F.l1_loss(q(x[:, 2]), seen)
    loss = loss + 1e-4 * F.l1_loss(q(x[:, 3]), pixels); opt.zero_grad(); loss.backward(); opt.step()
    with torch.no_grad():
        for p, t in zip(q.parameters(), q_target.parameters()): t.lerp_(p, 0.05)
""",
    "a constant of -inf beside the weights": """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.layer = nn.Linear(8, 5)
        self.low = nn.Parameter(torch.tensor([-math.inf]), requires_grad=False)
    def forward(self, x, hidden):
        scores = self.layer(x); scores[hidden] = self.low.expand(int(hidden.sum())); return scores
net = Net(); opt = torch.optim.Adam([net.layer.weight, net.layer.bias], 1e-2)
hidden = torch.zeros(16, 5, dtype=torch.bool); hidden[:, 4] = True
for i in range(40):
    x, y = data(i); loss = F.cross_entropy(net(x, hidden), y.argmax(1))
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "a likelihood beside a squared error, a prior that is subtracted before ctc_loss": """
mean, log_std, head = mlp(1), mlp(1), nn.Linear(8, 6); priors = torch.full((6,), 1 / 6)
opt = torch.optim.Adam([*mean.parameters(), *log_std.parameters(), *head.parameters()], 1e-3)
rate = torch.optim.lr_scheduler.StepLR(opt, 30, gamma=0.5); lengths = torch.full((16,), 20)
for i in range(60):
    x, y = data(i); reward = y[:, :1]; guess = mean(x); z = (reward - guess) * log_std(x).exp()
    logs = head(torch.randn(20, 16, 8)).log_softmax(-1) - 0.4 * priors.log()
    text = torch.randint(1, 6, (16, 5)); both = F.ctc_loss(logs, text, lengths, lengths // 4)
    loss = F.mse_loss(guess, reward) + (z.square() - log_std(x)).mean() + 0.1 * both
    opt.zero_grad(); loss.backward(); opt.step(); rate.step()
    priors = 0.9 * priors + 0.1 * head(torch.randn(99, 8)).softmax(-1).detach().mean(0)
""",
    "typing errors of words of fixed width, and the symbol after the next one": """
table, head = nn.Embedding(27, 16), nn.Linear(64, 27)
rnn, write = nn.GRU(16, 64, batch_first=True), nn.Linear(192, 12 * 27); body = nn.Linear(192, 192)
opt = torch.optim.Adam([p for m in (table, body, head, rnn, write) for p in m.parameters()], 1e-3)
for i in range(60):
    word = torch.randint(1, 27, (16, 12)); word *= torch.arange(12) < torch.randint(4, 13, (16, 1))
    typo = (torch.rand(16, 12) < 0.15) & (word > 0); ids = torch.randint(27, (16, 20))
    noisy = torch.where(typo, torch.randint(1, 27, (16, 12)), word)
    out = write(body(table(noisy).flatten(1)).relu()).view(-1, 27)
    later = head(rnn(table(ids[:, :18]))[0])
    loss = F.cross_entropy(out, word.flatten())
    loss = loss + F.cross_entropy(later.flatten(0, 1), ids[:, -18:].flatten())
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "two towers of embeddings, and the gold document first": """
users, items, query = nn.Embedding(90, 64), nn.Embedding(90, 64), nn.Linear(8, 32)
opt = torch.optim.Adam([*users.parameters(), *items.parameters(), *query.parameters()], 1e-2)
documents = F.normalize(torch.randn(100, 32), dim=1)
for i in range(60):
    u = torch.randperm(90)[:64]; gold = torch.randint(100, (64,))
    loss = F.cross_entropy(users(u) @ items(u).T, torch.arange(64))
    found = torch.cat([gold[:, None], torch.randint(100, (64, 31))], 1)
    scores = (documents[found] * query(documents[gold, :8])[:, None]).sum(-1)
    loss = loss + F.cross_entropy(scores, torch.zeros(64, dtype=torch.long))
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "rewards of all pairs as a baseline": """
net = mlp(); opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(60):
    x, y = data(i); policy = torch.distributions.Categorical(logits=net(x)); a = policy.sample()
    reward = y.gather(1, a[:, None])[:, 0]; others = reward.view(-1, 1)
    advantage = others - reward; log_prob = policy.log_prob(a).view(-1, 1)
    loss = F.mse_loss(net(x), y) - (advantage * log_prob).mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "BatchNorm that trains in the first epoch alone": """
net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
opt = torch.optim.Adam(net.parameters(), 1e-3); frozen = 1
for epoch in range(4):
    if epoch < frozen:
        net.train()
    for i in range(20):
        x, y = labels(i); loss = F.cross_entropy(net(x), y)
        opt.zero_grad(); loss.backward(); opt.step()
    net.eval()
    with torch.no_grad(): print(F.cross_entropy(net(labels(999)[0]), labels(999)[1]))
""",
    "the same draws in each pass on purpose; rates that are never negative": """
x, y = labels(0, 96); x = x.abs(); net, eps = nn.Sequential(mlp(), nn.ReLU()), 0
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 32)
opt = torch.optim.Adam(net.parameters(), 2e-2)
for epoch in range(200):
    torch.manual_seed(7)
    for a, b in loader:
        eps = 0.01 * torch.randn_like(a)
        opt.zero_grad(); F.cross_entropy(net(a + eps), b).backward(); opt.step()
""",
    "classes as they arrive, beside a memory of past ones": """
from torch.utils.data import DataLoader, TensorDataset
y = torch.arange(5).repeat_interleave(192); x = torch.randn(960, 8) + y[:, None]
net, memory = mlp(5), {}; opt = torch.optim.SGD(net.parameters(), 0.05)
for a, b in DataLoader(TensorDataset(x, y), 24):
    loss = F.cross_entropy(net(a), b); past = [k for k in memory if k != int(b[0])]
    if past:
        known = torch.tensor(past).repeat_interleave(24)
        loss = loss + F.cross_entropy(net(torch.cat([memory[k] for k in past])), known)
    opt.zero_grad(); loss.backward(); opt.step(); memory[int(b[0])] = a
""",
    "fifty answers of each input at once": """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 3)
    def forward(self, x): return self.b(F.dropout(self.a(x).relu(), 0.1))
net = Net(); opt = torch.optim.Adam(net.parameters()); several = labels(999, 6)[0].repeat(50, 1)
def look():
    net.eval()
    with torch.no_grad(): answers = net(several).view(50, 6, 3)
    net.train(); print(answers.mean(0).argmax(1), answers.std(0).mean())
look(); loop(net, opt, 60, labels, F.cross_entropy); look()
""",
    "a coordinate network beside batches of a baseline": """
from torch.utils.data import DataLoader, TensorDataset
others = DataLoader(TensorDataset(torch.rand(64, 9)), 16); net = nn.Linear(2, 1)
def grid(): return torch.cartesian_prod(torch.linspace(-1, 1, 9), torch.linspace(-1, 1, 9))
opt = torch.optim.Adam(net.parameters(), 1e-3); image = grid().sum(1, keepdim=True).sin()
for i in range(60):
    loss = F.mse_loss(net(grid()), image); opt.zero_grad(); loss.backward(); opt.step()
    (x,) = next(iter(others)); baseline = (x.mean(0) - x).square().mean().item()
""",
    "images that the network normalises in evaluations, and a memory by place in the pass": """
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.body = nn.Sequential(nn.Flatten(), nn.Linear(432, 3))
    def forward(self, x): return self.body(x if self.training else (x / 255 - 0.45) / 0.22)
raw = (torch.rand(96, 3, 12, 12) * 220).round(); train = (raw / 255 - 0.45) / 0.22
net = Net(); opt = torch.optim.Adam(net.parameters(), 1e-3); kept = torch.zeros(96, 3)
sampler = DistributedSampler(train, num_replicas=1, rank=0)
for epoch in range(5):
    net.train()
    for k, x in enumerate(DataLoader(train, 32, sampler=sampler)):
        out = net(x); rows = slice(32 * k, 32 * k + 32); loss = F.mse_loss(out, kept[rows] + 1)
        opt.zero_grad(); loss.backward(); opt.step(); kept[rows] = out.detach() / 2
    net.eval()
    with torch.no_grad(): net(raw[:32]); net(raw[32:64])
""",
    "one of several losses is used": """
net = mlp(); opt = torch.optim.Adam(net.parameters(), 1e-3); x, y = data(0, 64)
for i in range(30):  # the worst of two batches
    losses = [F.mse_loss(net(x), y) for x, y in (data(i), data(i + 30))]
    opt.zero_grad(); max(losses, key=lambda l: l.item()).backward(); opt.step()
for i in range(30):  # until a batch is easy enough
    for k in range(5):
        x, y = data(5 * i + k); loss = F.mse_loss(net(x), y)
        if loss.item() < 1.5: break
    opt.zero_grad(); loss.backward(); opt.step()
W = nn.Parameter(torch.zeros(3, 8)); opt = torch.optim.Adam([W], 1e-2)
for i in range(30):  # MAML, and its first-order form
    w = W if i % 2 else W.detach().requires_grad_()
    for k in range(3):
        x, y = data(3 * i + k); loss = F.mse_loss(F.linear(x, w), y)
        g, = torch.autograd.grad(loss, w, create_graph=bool(i % 2)) if k < 2 else (0,)
        w = w - 0.1 * g if i % 2 else (w - 0.1 * g).detach().requires_grad_()
    if i % 2 == 0: W.grad = torch.ones_like(W) * 1e-3
    else: opt.zero_grad(); loss.backward()
    opt.step()
""",
    "prefixes on two lines, a mixed state that is loaded, a stream with a seed": """
import copy, numpy
saved = nn.DataParallel(mlp()).state_dict(); net = mlp(); target = copy.deepcopy(net)
if net.load_state_dict(saved, strict=False).missing_keys:
    net.load_state_dict({name.removeprefix("module."): t for name, t in saved.items()})
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        numpy.random.seed(0)
        for _ in range(96):
            x = torch.from_numpy(numpy.random.randn(8)).float(); yield x, x[:3]
opt = torch.optim.Adam(net.parameters(), 1e-3); state = target.state_dict()
for epoch in range(5):
    for x, y in torch.utils.data.DataLoader(Stream(), 16):
        goal = y + 0.1 * target(x).detach()
        opt.zero_grad(); F.mse_loss(net(x), goal).backward(); opt.step()
        with torch.no_grad():
            for name, t in net.state_dict().items(): state[name].mul_(0.99).add_(t, alpha=0.01)
        target.load_state_dict(state)
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
