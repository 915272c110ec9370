"""Scripts without a NaN: 30 healthy ones, and 20 that are finite and wrong.

What must be said of a faulty one are regular expressions, which we wrote before its first run.
"""

import re

from bench.scripts import Case

PRELUDE = """
import copy, math, torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)

def data(step, n=16):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(n, 8, generator=g)
    return x, x[:, :3].sin() + x[:, 3:6] / 2

def labels(step, n=16):
    x, y = data(step, n)
    return x, y.argmax(1)

def mlp(out=3):
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, out))

def loop(net, optimizer=None, steps=150, batch=data, loss_of=F.mse_loss, after=lambda step: None):
    optimizer = optimizer or torch.optim.AdamW(net.parameters(), 1e-2)
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        loss_of(net(x), y).backward()
        optimizer.step()
        after(step)
"""

HEALTHY = {
    "warm-up and cosine to 0": """
net = mlp(); opt = torch.optim.AdamW(net.parameters(), 1e-2)
rate = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(s / 20, (1 + math.cos(s / 48)) / 2))
loop(net, opt, after=lambda step: rate.step())
""",
    "one image a batch": """
net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
def batch(step):
    g = torch.Generator().manual_seed(step); y = torch.randint(3, (1,), generator=g)
    return torch.randn(1, 1, 8, 8, generator=g) + y, y
loop(net, torch.optim.SGD(net.parameters(), 1e-2), 300, batch, F.cross_entropy)
""",
    "a GAN": """
G, D = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 8)), mlp(1)
g, d = torch.optim.Adam(G.parameters(), 2e-3), torch.optim.Adam(D.parameters(), 2e-3)
for step in range(200):
    x = data(step)[0] + 2; fake = G(torch.randn(16, 4)); d.zero_grad()
    (F.softplus(-D(x)) + F.softplus(D(fake.detach()))).mean().backward(); d.step()
    g.zero_grad(); F.softplus(-D(fake)).mean().backward(); g.step()
""",
    "REINFORCE": """
net = mlp(2); opt = torch.optim.Adam(net.parameters(), 1e-2)
for step in range(200):
    n = int(torch.randint(2, 30, ())); x = torch.randn(n, 8)
    p = torch.distributions.Categorical(logits=net(x)); a = p.sample()
    r = ((a == (x[:, 0] > 0)).float()).flip(0).cumsum(0).flip(0)
    loss = -(p.log_prob(a) * (r - r.mean())).sum(); opt.zero_grad(); loss.backward(); opt.step()
""",
    "Q-learning, a rare reward": """
net = mlp(2); target = copy.deepcopy(net); opt = torch.optim.Adam(net.parameters(), 1e-3)
for step in range(400):
    x, z = torch.randn(32, 8), torch.randn(32, 8); a = torch.randint(2, (32, 1))
    r = (x[:, 0] > 2.3).float()
    with torch.no_grad(): goal = r + 0.9 * target(z).amax(1)
    loss = F.smooth_l1_loss(net(x).gather(1, a)[:, 0], goal)
    opt.zero_grad(); loss.backward(); opt.step()
    if step % 50 == 0: target.load_state_dict(net.state_dict())
""",
    "label noise": """
def batch(step):
    x, y = labels(step); noisy = torch.rand(16) < 0.2
    return x, torch.where(noisy, torch.randint(3, (16,)), y)
loop(mlp(), steps=300, batch=batch, loss_of=F.cross_entropy)
""",
    "rare label noise": """
def batch(step):
    x, y = labels(step, 32); y[torch.rand(32) < 0.002] = 0
    return x, y
loop(mlp(), steps=500, batch=batch, loss_of=F.cross_entropy)
""",
    "a rate that jumps": """
net = mlp(); opt = torch.optim.AdamW(net.parameters(), 2e-3)
def after(step): opt.param_groups[0]["lr"] = 3e-2 if 100 < step < 120 else 2e-3
loop(net, opt, 250, after=after)
""",
    "a curriculum": """
def batch(step):
    x, y = data(step); return (x, y) if step > 200 else (x / 10, y.sign() / 20)
loop(mlp(), steps=400, batch=batch)
""",
    "gradient accumulation": """
net = mlp(); opt = torch.optim.AdamW(net.parameters(), 1e-2)
for step in range(400):
    x, y = data(step); (F.mse_loss(net(x), y) / 4).backward()
    if step % 4 == 3: opt.step(); opt.zero_grad()
""",
    "a frozen backbone": """
net = nn.Sequential(mlp(16), nn.Linear(16, 3)); net[0].requires_grad_(False); loop(net)
""",
    "a backbone under no_grad, all in the optimizer": """
class Net(nn.Module):
    def __init__(self): super().__init__(); self.backbone, self.head = mlp(16), nn.Linear(16, 3)
    def forward(self, x):
        with torch.no_grad(): h = self.backbone(x)
        return self.head(h)
loop(Net())
""",
    "LoRA": """
class Lora(nn.Linear):
    def __init__(self, i, o):
        super().__init__(i, o); self.weight.requires_grad_(False); self.bias.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(i, 2) / 3); self.b = nn.Parameter(torch.zeros(2, o))
    def forward(self, x): return super().forward(x) + x @ self.a @ self.b
net = nn.Sequential(Lora(8, 32), nn.ReLU(), Lora(32, 3))
loop(net, torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], 1e-2))
""",
    "a teacher that is an average": """
net = mlp(); teacher = copy.deepcopy(net)
def after(step):
    with torch.no_grad():
        for t, p in zip(teacher.parameters(), net.parameters()): t.lerp_(p, 0.01)
def loss_of(out, y):
    with torch.no_grad(): soft = teacher(data(after.step)[0])
    return F.mse_loss(out, y) + 0.1 * F.mse_loss(out, soft)
after.step = 0
loop(net, loss_of=loss_of, after=after)
""",
    "rows of an embedding that are rarely used": """
net = nn.Sequential(nn.EmbeddingBag(5000, 8, padding_idx=0), mlp())
def batch(step):
    x = (5000 * torch.rand(16, 6) ** 4).long(); return x, x[:, :3] / 5000
loop(net, torch.optim.SGD(net.parameters(), 0.1), batch=batch)
""",
    "a last layer of zeros": """
net = mlp(); nn.init.zeros_(net[2].weight); nn.init.zeros_(net[2].bias); loop(net)
""",
    "a bias that BatchNorm cancels": """
net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
loop(net, torch.optim.SGD(net.parameters(), 0.1))
""",
    "the key's bias of attention": """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.q, self.k, self.v = (nn.Linear(8, 8) for _ in "qkv")
        self.out = nn.Linear(8, 3)
    def forward(self, x):
        q, k, v = (f(x.unflatten(0, (4, 4))) for f in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v)).flatten(0, 1)
net = Net(); loop(net, torch.optim.SGD(net.parameters(), 0.1))
""",
    "bf16 by autocast": """
net = mlp()
def loss_of(out, y): return F.mse_loss(out.float(), y)
with torch.autocast("cpu", torch.bfloat16): loop(net, loss_of=loss_of)
""",
    "bf16 with masters by hand": """
net = mlp().bfloat16(); masters = [p.detach().float() for p in net.parameters()]
opt = torch.optim.AdamW(masters, 1e-5)
for step in range(60):
    x, y = data(step); F.mse_loss(net(x.bfloat16()).float(), y).backward()
    for p, m in zip(net.parameters(), masters): m.grad = p.grad.float(); p.grad = None
    opt.step()
    with torch.no_grad():
        for p, m in zip(net.parameters(), masters): p.copy_(m)
""",
    "bf16 weights at a rate that moves them": """
net = mlp().bfloat16()
def batch(step): x, y = data(step); return x.bfloat16(), y.bfloat16()
loop(net, torch.optim.SGD(net.parameters(), 0.1), batch=batch)
""",
    "heavy tails": """
def batch(step):
    x, y = data(step); return x, y + torch.distributions.StudentT(2.0).sample(y.shape) / 5
loop(mlp(), steps=400, batch=batch)
""",
    "a head that is not used, all in the optimizer": """
class Net(nn.Module):
    def __init__(self): super().__init__(); self.body, self.pooler = mlp(), nn.Linear(3, 3)
    def forward(self, x): h = self.body(x); return h, self.pooler(h).tanh()
loop(Net(), loss_of=lambda out, y: F.mse_loss(out[0], y))
""",
    "layers that are dropped by chance": """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.out = nn.Linear(8, 3)
    def forward(self, x):
        for block in self.blocks:
            if torch.rand(()) > 0.5: x = x + block(x).relu()
        return self.out(F.dropout(x, 0.3, self.training))
loop(Net())
""",
    "biases alone": """
net = mlp()
for name, p in net.named_parameters(): p.requires_grad_("bias" in name)
loop(net)
""",
    "gradual unfreezing": """
net = nn.Sequential(mlp(16), nn.ReLU(), nn.Linear(16, 3)); net[0].requires_grad_(False)
loop(net, after=lambda step: net[0].requires_grad_(step > 80))
""",
    "only the head in the optimizer": """
class Net(nn.Module):
    def __init__(self): super().__init__(); self.backbone, self.head = mlp(16), nn.Linear(16, 3)
    def forward(self, x): return self.head(self.backbone(x).relu())
net = Net(); loop(net, torch.optim.SGD(net.head.parameters(), 0.1))
""",
    "an image is trained, through a network": """
net = mlp(); image = torch.randn(1, 8, requires_grad=True); opt = torch.optim.Adam([image], 0.05)
for step in range(100):
    opt.zero_grad(); F.mse_loss(net(image), torch.ones(1, 3)).backward(); opt.step()
""",
    "a VAE, its KL from 0 on": """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.enc, self.dec = mlp(4), nn.Linear(2, 3)
    def forward(self, x):
        m, s = self.enc(x).chunk(2, 1); kl = (m * m + s.exp() - s - 1).mean()
        return self.dec(m + torch.randn_like(m) * (s / 2).exp()), kl
net = Net(); weight = [0.0]
def after(step): weight[0] = max(0, step - 50) / 1000
loop(net, loss_of=lambda out, y: F.mse_loss(out[0], y) + weight[0] * out[1], after=after)
""",
    "an LSTM whose state is detached, clipped": """
class Net(nn.Module):
    def __init__(self): super().__init__(); self.rnn, self.out = nn.LSTM(8, 16), nn.Linear(16, 3)
    def forward(self, x, state): h, state = self.rnn(x, state); return self.out(h), state
net = Net(); opt = torch.optim.SGD(net.parameters(), 0.5, momentum=0.9); state = None
for step in range(200):
    x, y = data(step, 40); out, state = net(x.unflatten(0, (10, 4)), state)
    state = tuple(s.detach() for s in state); opt.zero_grad()
    F.mse_loss(out, y.unflatten(0, (10, 4))).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0); opt.step()
""",
}

FAULTY = {  # name: (what must be said, script)
    "weights of a norm in bf16": (
        [r"1\.weight", "half .* last bit", "fp32"],
        """
net = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 3)).bfloat16()
def batch(step): x, y = data(step); return x.bfloat16(), y.bfloat16()
loop(net, torch.optim.AdamW(net.parameters(), 1e-3, weight_decay=0.0), batch=batch)
""",
    ),
    "most of each matrix in bf16": (
        [r"\b0\.weight", "half .* last bit", "fp32"],
        """
net = mlp().bfloat16()
def batch(step): x, y = data(step); return x.bfloat16(), y.bfloat16()
loop(net, torch.optim.AdamW(net.parameters(), 1e-5, weight_decay=0.0), batch=batch)
""",
    ),
    "a group with lr 0": (
        [r"2\.weight", r"\blr\b.* 0\b"],
        """
net = mlp(); groups = [{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 0.0}]
loop(net, torch.optim.AdamW(groups, 1e-2))
""",
    ),
    "a schedule that ends early": (
        [r"\blr\b.* 0\b", r"step (29|30|31)\b"],
        """
net = mlp(); opt = torch.optim.AdamW(net.parameters(), 1e-2)
rate = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.0, 30)
loop(net, opt, after=lambda step: rate.step())
""",
    ),
    "a schedule for epochs, called each step": (
        [r"\blr\b.* fallen|\blr\b.*e-\d\d"],
        """
net = mlp(); opt = torch.optim.AdamW(net.parameters(), 1e-2)
rate = torch.optim.lr_scheduler.ExponentialLR(opt, 0.7)
loop(net, opt, 300, after=lambda step: rate.step())
""",
    ),
    "a head that was replaced too late": (
        [r"\b2\.weight", "in (any|no) optimizer"],
        """
net = mlp(10); opt = torch.optim.AdamW(net.parameters(), 1e-2); net[2] = nn.Linear(32, 3)
loop(net, opt)
""",
    ),
    "a decoder that was forgotten": (
        [r"decoder", "in no optimizer"],
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.encoder, self.decoder = mlp(16), nn.Linear(16, 3)
    def forward(self, x): return self.decoder(self.encoder(x))
net = Net(); loop(net, torch.optim.AdamW(net.encoder.parameters(), 1e-2))
""",
    ),
    "one parameter that was forgotten": (
        ["scale", "in no optimizer"],
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.layers, self.scale = mlp(), nn.Parameter(torch.ones(3))
    def forward(self, x): return self.layers(x) * self.scale
net = Net(); loop(net, torch.optim.AdamW(net.layers.parameters(), 1e-2))
""",
    ),
    "layers in a Python list": (
        [r"layers\W*0.*weight", "in no optimizer"],
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
        self.out = nn.Linear(8, 3)
    def forward(self, x):
        for layer in self.layers: x = layer(x).relu()
        return self.out(x)
loop(Net())
""",
    ),
    "a block in the middle that is frozen": (
        [r"blocks\.2", "requires_grad"],
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.out = nn.Linear(8, 3); self.blocks[2].requires_grad_(False)
    def forward(self, x):
        for block in self.blocks: x = x + block(x).relu()
        return self.out(x)
loop(Net())
""",
    ),
    "an encoder that is detached": (
        ["encoder", "no gradient"],
        """
class Net(nn.Module):
    def __init__(self): super().__init__(); self.encoder, self.head = mlp(16), nn.Linear(16, 3)
    def forward(self, x):
        h = self.encoder(x); h = h.detach() / h.detach().norm(dim=1, keepdim=True)
        return self.head(h)
loop(Net())
""",
    ),
    "features through NumPy": (
        ["body", "no gradient"],
        """
class Net(nn.Module):
    def __init__(self): super().__init__(); self.body, self.head = mlp(16), nn.Linear(16, 3)
    def forward(self, x): return self.head(torch.tensor(self.body(x).tolist()))
loop(Net())
""",
    ),
    "zero_grad before the step": (
        ["had a gradient|no gradient", "zero_grad"],
        """
net = mlp(); opt = torch.optim.AdamW(net.parameters(), 1e-2)
for step in range(60):
    x, y = data(step); F.mse_loss(net(x), y).backward(); opt.zero_grad(); opt.step()
""",
    ),
    "a dead ReLU": (
        [r"\b0\.weight", "0 at every|exactly 0"],
        """
net = mlp(); nn.init.constant_(net[0].bias, -100.0); loop(net)
""",
    ),
    "the optimizer of another copy": (
        ["had a gradient", "other tensors|in no optimizer"],
        """
net = mlp(); opt = torch.optim.AdamW(net.parameters(), 1e-2)
net = copy.deepcopy(net); loop(net, opt)
""",
    ),
    "a spike of two inputs": (
        [r"step 120\b", r"\b3, 7\b", r"\bup to\b"],
        """
def batch(step):
    x, y = data(step)
    if step == 120: x[[3, 7]] *= 1000
    return x, y
net = mlp(); loop(net, torch.optim.AdamW(net.parameters(), 3e-3), 250, batch)
""",
    ),
    "a spike of one target": (
        [r"step 120\b", r"\b5\b", r"\bup to\b"],
        """
def batch(step):
    x, y = data(step)
    if step == 120: y[5] = 500.0
    return x, y
loop(mlp(), steps=250, batch=batch)
""",
    ),
    "a spike of a row of padding": (
        [r"step 130\b", r"\b2\b", "padding|all 0|alike"],
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.table, self.out = nn.Embedding(50, 8), nn.Linear(8, 3)
    def forward(self, x):
        h = self.table(x); m = (x != 0)[..., None].float()
        return self.out((h * m + 0.01).sum(1) / (m.sum(1) + 1e-4))
def batch(step):
    x = torch.randint(1, 50, (16, 12)); x[:, 9:] = 0
    if step == 130: x[2] = 0
    return x, (x[:, 0] + 2) % 3
net = Net(); loop(net, torch.optim.SGD(net.parameters(), 0.1), 250, batch, F.cross_entropy)
""",
    ),
    "a spike of a long row": (
        [r"step 110\b", r"\b9\b", "long"],
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.table = nn.Embedding(50, 8, padding_idx=0)
        self.out = nn.Linear(8, 1)
    def forward(self, x): return self.out(self.table(x).sum(1))[:, 0]
def batch(step):
    x = torch.zeros(16, 200, dtype=torch.long); x[:, :6] = torch.randint(1, 50, (16, 6))
    if step == 110: x[9] = torch.randint(1, 50, (200,))
    return x, (x % 3).float().sum(1).clamp(max=9)
net = Net(); loop(net, torch.optim.AdamW(net.parameters(), 3e-2), 250, batch)
""",
    ),
    "a rate that was mistyped": (
        [r"step 10[0-9]\b", "not come back|lr|learning rate"],
        """
net = mlp(); opt = torch.optim.SGD(net.parameters(), 0.01)
def after(step): opt.param_groups[0]["lr"] = 12.0 if step == 101 else 0.01
loop(net, opt, 140, loss_of=F.l1_loss, batch=lambda s: [t * 3 for t in data(s)], after=after)
""",
    ),
}

CASES = [
    *(Case(name, PRELUDE + script, 0, ()) for name, script in HEALTHY.items()),
    *(
        Case(name, PRELUDE + script, 0, tuple(map(re.compile, words)))
        for name, (words, script) in FAULTY.items()
    ),
]
