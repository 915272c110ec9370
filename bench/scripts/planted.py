"""Scripts with faults that we planted, and with none, which look like them.

One script holds several faults: its argument says which is switched on. The guilty line has the
fault's name as its comment, or "here".
"""

import torch

from bench.scripts import Case

CASES = []


def tells(sentence, script, code, rows):
    """The exit code of a script, and for each fault what the report says: words with " ... "
    between them, and after " -- not " what it does not say."""
    for fault, answer in rows.items():
        said, _, unsaid = answer.partition(" -- not ")
        words = tuple(filter(None, said.split(" ... ")))
        CASES.append(Case(f"{sentence}: {fault}", script, code, words, unsaid, fault))


PREAMBLE = """
import sys, torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
fault = sys.argv[1] if len(sys.argv) > 1 else ""
"""
CLASSIFIER = (
    PREAMBLE
    + """
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
    weights = (t.double().sum().item().hex() for t in net.state_dict().values())
    print("after", *weights, file=sys.stderr)
with torch.no_grad():
    net.eval()
    print(net(torch.randn(3, 8)).sum().item().hex())
"""
)


tells(
    "a clean script prints the same bits and one line says what was seen",
    CLASSIFIER,
    0,
    {"": "6 steps, nothing non-finite, largest gradient norm "},
)


tells(
    "a fault in a module is named in the same process",
    CLASSIFIER,
    3,
    {
        "division": "-> divergence ... at step 3",
        "root": "-> divergence ... at step 3",
        "masked row": "-> divergence ... at step 3",
        "evaluation": "-> divergence",
        "input": "-> data ... at step 3",
    },
)
tells(
    "a fault outside of modules is named in the same process",
    CLASSIFIER,
    3,
    {
        "target": "-> data",
        "leaves": "-> data",
        "fp16": "-> precision",
        "bf16": "-> divergence",
    },
)


LEFT_OVER = (
    PREAMBLE
    + """
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
)


tells(
    "kinds that look like another",
    LEFT_OVER,
    3,
    {
        "accumulated": "-> precision ... aten.add_.Tensor outside of any module (backward of "
        "AccumulateGrad) ... in micro-batch 4 of 8 ... the gradient of weight",
        "overwritten": "-> precision",
        "numpy": "first to use a tensor from outside of torch (NumPy, a file) (script.py:26",
        "opaque": "an opaque kernel",
    },
)


OTHERS = (
    PREAMBLE
    + """
import random
kind = fault.removeprefix("bad ")
fault = fault != kind
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
    for x, _ in torch.utils.data.DataLoader(Data(), 4, num_workers=2):
        loss = net(x).square().mean()  # bad loader
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
)


OTHER_LOOPS = ("dict", "closure", "two optimizers", "no optimizer", "compile")
tells(
    "other kinds of loops run unchanged",
    OTHERS,
    0,
    dict.fromkeys((*OTHER_LOOPS, "loader"), "nothing non-finite"),
)
tells(
    "the fault of another kind of loop is named",
    OTHERS,
    3,
    {
        **dict.fromkeys([f"bad {kind}" for kind in OTHER_LOOPS], "-> divergence"),
        "bad loader": "-> data ... samples 3 of",
    },
)


SCALED = (
    PREAMBLE
    + """
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
)


tells(
    "a skip of the loss scaler is calibration",
    SCALED,
    0,
    {
        "": "60 steps,  ...  of them skipped by the loss scaler",
    },
)
tells(
    "skips of the loss scaler that go on are a fault",
    SCALED,
    3,
    {
        "skips": "-> precision ... the loss scale falls under 1",
    },
)


NEVER_SILENT = (
    PREAMBLE
    + """
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
        optimizer.param_groups[0]["lr"] = -1e-3
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
            loss = loss * 0 / 0  # passes over, print
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
)


tells(
    "it is never silent about a bad number",
    NEVER_SILENT,
    3,
    {
        "raises": "-> divergence",
        "raises inside": "-> divergence",
        "passes over": "-> divergence",
        "print": "-> divergence",
        "by hand": "-> divergence",
        "own optimizer": "made by Own ... runs again",
        "eps": "eps=0 is exactly 0",
        "moment": "exp_avg of fc.weight is nan as loaded at script.py",
        "validation": "the script read nan at",
    },
)
tells(
    "it is never silent about a bad number",
    NEVER_SILENT,
    0,
    {
        "half weights": "2 bfloat16 tensors had gradients at every step read and never changed",
        "count": "before any backward pass: passed over ... nothing non-finite",
        "negative": "a learning rate is negative: -0.001",
        "process": "processes, which are not watched ... nothing non-finite",
        "thread": "in another thread -- not nothing non-finite",
    },
)


# finite.py has 20 faulty scripts more.
FINITE = (
    PREAMBLE
    + """
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
)


tells(
    "a finite run that is wrong is told so and is unchanged",
    FINITE,
    0,
    {
        "half": "layers.0.weight ... below half the last bit ... keep the weights in fp32",
        "no rate": "the lr of head.weight, head.bias was 0 at every step",
        "schedule": "was 0 since step 40 of 120",
        "forgotten": "gain got gradients at every step read, are in no optimizer",
        "frozen": "layers.1.weight, layers.1.bias: requires_grad is False",
        "detached": "no gradient has reached layers.0.weight ... the loss depends on them: data at",
        "cleared": "none of its 11 parameters had a gradient ... zero_grad()",
        "rows": "step 90: the loss jumped ... it came back at step  ... Rows 2, 11 of 16 ... 4e+03",
        "whole batch": "step 90: the loss jumped ... the first step to run script.py:",
    },
)
tells(
    "a healthy run is not accused",
    FINITE,
    0,
    dict.fromkeys(["", "frozen beginning", "written by hand"], ""),
)


LOOP = (
    PREAMBLE
    + """
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
)


tells(
    "a loop in a function that is wrong is told so",
    LOOP,
    0,
    {
        "asked": "",
        "no grad": "no gradient has reached body.weight, body.bias ... runs under torch.no_grad()",
        "all frozen": "none of its 4 parameters had a gradient ... requires_grad is False for each",
        "replaced": "head.weight, head.bias got gradients ... holds 2 tensors that no module holds",
        "twice": "Linear.weight, Linear.bias got gradients ... both hold Net.body.weight",
        "no step": "Adam (made at ... has made no step, though body.weight ... does the script "
        "reach step()?",
        "flattened": "step 90: the loss jumped ... Row 3 of 8 (from 0) carries it",
        "label": "step 150: the loss jumped ... Row 5 of 8 ... In int64[8] they hold 0: right?",
        "units": "step 90: the loss jumped ... (the batches read before: up to",
    },
)


ENDS = (
    PREAMBLE
    + """
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
    if fault == "new result":
        loss = loss.detach().requires_grad_() * 2
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
)


tells(
    "where a gradient ends is named",
    ENDS,
    0,
    {
        "": "",
        "zeros": "the gradient of down, up was exactly 0 ... becomes 0 in Mm ... nothing but 0",
        "plain tensor": "shift got gradients ... plain tensors are no parameters: nn.Parameter",
        "dict": "heads.more.weight, heads.more.bias got gradients ... plain Python dict",
        "list of tensors": "gains.0 got gradients ... use nn.ParameterList",
        "compared": "no gradient has reached ... shift ... gt at script.py:",
        "numpy": "no gradient has reached ... shift ... detach at script.py:",
        "sign": "the gradient of  ... it becomes 0 in SignBackward0 of script.py:",
        "softmax of one": "the gradient of  ... it becomes 0 in SoftmaxBackward0 of script.py:",
        "result": "row got gradients ... what their module holds was made of an nn.Parameter",
        "dies": "each gradient of SGD is exactly 0 since step  ... becomes 0 in ReluBackward0",
        "chosen": "no gradient has reached up ... argmax at script.py:",
        "begins to die": (
            "the gradient of down, up,  ... 0 at each step read since  ... ReluBackward0"
        ),
        "fast decay": "no weight of SGD has moved since step  ... once a batch, and not once",
        "attribute": "body.weight, body.bias: requires_grad = True ... theirs is False",
        "attribute in vain": "body.weight, body.bias: requires_grad = False ... theirs is True",
        "new tensor": "had a gradient in any: at script.py: ... begins at a new tensor",
        "new result": "had a gradient in any: the graph of the loss ... ends at a float32",
        "helper": "a parameter float32[16] got gradients ... no module lists them",
        "unfrozen alone": "late got gradients at every step read of late ... add_param_group()",
        "made anew": "a forward makes weights of the shapes [16], [16, 16] anew",
        "empty group": "body.weight, body.bias got gradients ... group of SGD is empty",
        "loads nothing": "has loaded none of 11 tensors ... like module.",
        "by hand": "got gradients in 100 backward passes and never changed ... in place",
    },
)


JUMP = (
    PREAMBLE
    + """
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
)


tells(
    "what a jump came with is told",
    JUMP,
    0,
    {
        "": "",
        "target": "",
        "fold": "",
        "alike": "In int64[32] all hold 1",
        "unfrozen": "gain moved for the first time, with lr 0.01",
        "batch": "The whole batch carries it",
        "line": "the first step to run script.py:",
        "weights": "weights were written at script.py:",
        "mode": "in train() mode, and in eval()",
        "rate": "At step 150 the lr rose from 0.01 to 1",
        "rate, once": "At step 150 the lr rose from 0.01 to 10000",
        "passes": "60 backward passes led to it, 1 to those",
        "units": "holds numbers up to ",
        "term": "% is the term of script.py:",
    },
)


tells(
    "a run that resumes without the state of its optimizer is told so",
    PREAMBLE
    + """
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
""",
    0,
    {"": "since step 95, which began without the state of the one before"},
)


tells(
    "a jump that larger targets bring is not one of the lr of its own step",
    PREAMBLE
    + """
net = nn.Sequential(nn.Linear(6, 48), nn.SiLU(), nn.Linear(48, 1))
optimizer = torch.optim.AdamW(net.parameters(), 3e-3)
restarts = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 120)
for step in range(200):
    x = torch.randn(32, 6)
    y = x[:, :2].sum(1) if step < 120 or not fault else 8 * x[:, :4].sum(1)
    loss = F.huber_loss(net(x).squeeze(1), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    optimizer.step()
    restarts.step()
""",
    0,
    {
        "": "",
        "larger": "step 120: the loss jumped ... larger numbers: float32[32] up to -- not lr was",
    },
)


tells(
    "the statistics of a teacher that was trained before it was frozen move",
    PREAMBLE
    + """
def build(width):
    return nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3))

def fit(net, goal, steps):
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for step in range(steps):
        x = torch.randn(32, 8) + (steps < 100)
        with torch.no_grad():
            wanted = goal(x)
        optimizer.zero_grad()
        F.mse_loss(net(x), wanted).backward()
        optimizer.step()

teacher = build(32)
fit(teacher, lambda x: x[:, :3], 140)
teacher.requires_grad_(False)
if fault != "drifts":
    teacher.eval()
fit(build(8), teacher, 90)
teacher.requires_grad_(fault == "again")
""",
    0,
    {
        "": "",
        "again": "",
        "drifts": "running statistics move at each step (teacher.1.running_mean)",
    },
)


tells(
    "an average that goes into clones of a network is told",
    PREAMBLE
    + """
import copy

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.third = copy.deepcopy(self.key)

    @torch.no_grad()
    def update(self):
        state = {name: t.clone() for name, t in self.key.state_dict().items()}
        for name, p in self.query.named_parameters():
            state[name].mul_(0.9).add_(p, alpha=0.1)
        if fault in ("", "outside"):
            self.key.load_state_dict(state)
        if fault == "another network":
            self.third.load_state_dict(state)
        if fault == "a distance":
            self.far = sum((t - p).norm() for t, p in zip(state.values(), self.key.parameters()))
        if fault == "called":
            torch.func.functional_call(self.third, state, (torch.randn(3, 8),))

    def forward(self, x):
        if not outside:
            self.update()
        with torch.no_grad():
            wanted = self.key(x.flip(0)) + self.third(x)
        return self.query(x), wanted

outside = "outside" in fault
net = Pair()
optimizer = torch.optim.SGD(net.query.parameters(), 0.05)
for step in range(60):
    out, wanted = net(torch.randn(16, 8))
    optimizer.zero_grad()
    F.mse_loss(out, wanted + 1).backward()
    optimizer.step()
    if outside:
        net.update()
""",
    0,
    {
        "": "",
        "outside": "",
        "another network": "",
        "a distance": "",
        "called": "",
        "lost": "key.0.weight, key.0.bias, key.2.weight, key.2.bias never move ... in update",
        "lost outside": "never move ... it is written into clones that nobody uses",
    },
)


tells(
    "a teacher that only grows is told",
    PREAMBLE
    + """
import copy
net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))
teacher = copy.deepcopy(net).requires_grad_(False)
if fault == "a sum":
    with torch.no_grad():
        for p in teacher.parameters():
            p.zero_()
optimizer = torch.optim.SGD(net.parameters(), 0.05)
for step in range(120):
    x = torch.randn(32, 8)
    with torch.no_grad():
        wanted = teacher(x).tanh() + x[:, :3]
    optimizer.zero_grad()
    F.mse_loss(net(x), wanted).backward()
    optimizer.step()
    with torch.no_grad():
        for t, p in zip(teacher.parameters(), net.parameters()):
            if fault == "":
                t.mul_(0.95).add_(p, alpha=0.05)
            elif fault == "in turn":
                t.add_(p, alpha=0.05)
                t.div_(1.05)
            elif fault == "scaled":
                t += 0.05 * p.detach()
            elif fault == "of the way":
                t.add_(p - t, alpha=0.05)
            else:
                t.add_(p, alpha=0.05)
""",
    0,
    {
        "": "",
        "in turn": "",
        "a sum": "",
        "of the way": "",
        "alone": "teacher.0.weight, teacher.2.weight run away ... adds 0.05 of these at each step",
        "scaled": "teacher.0.weight, teacher.2.weight run away ... adds 0.05 of these at each step",
    },
)


tells(
    "a script that builds an optimizer for each task does not wait for the watch",
    PREAMBLE
    + """
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
assert len(searches) < 30
""",
    0,
    {"": ""},
)


tells(
    "a divergence names the tensor whose gradient has grown",
    PREAMBLE
    + """
net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
optimizer = torch.optim.SGD(net.parameters(), float(fault))  # |1 - 2 lr| times a step
for step in range(3000):
    loss = net(torch.zeros(3, 4)).sum() * 0 + sum(p.square().sum() for p in net.parameters())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    3,
    {
        "3": "try: a lower learning rate: the norm of the weights has grown from 2.01 to  ... "
        "the gradient norm has grown:  ... ; of 0.weight: 7.45e+15, ",
        "1.15": "try: a lower learning rate: ... gradient norms, of every 16th step:  ... 0.weight",
    },
)


LARGE = (
    PREAMBLE
    + """
net = nn.Linear(64, 64)
optimizer = torch.optim.SGD(net.parameters(), 1e-25)
for step in range(2):
    x = torch.ones(16, 64)
    if fault == "exp": x[3, 0], x[4, 0] = 95, 70
    loss = net(x).mean() * {"norm": 6.4e19, "element": 1e23}.get(fault, 1.0)
    if fault == "exp":
        loss = loss + x[:, 0].exp().mean()  # exp
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
)


tells(
    "elements are judged, and not norms",
    LARGE,
    0,
    {
        "": "2 steps, nothing non-finite",
        "norm": "2 steps, nothing non-finite",
        "element": (
            "the gradient of weight was 1.56e+21 at step 0 ... finite, but its square is not"
        ),
    },
)
tells("a large finite number names no sample", LARGE, 3, {"exp": "samples 3 of 16"})


SMALL = (
    PREAMBLE
    + """
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
)


tells(
    "samples, columns, scales and metrics",
    SMALL,
    3,
    {
        "drawn": "samples 5 of 8",
        "column": "input holds nan in columns 1 of 3",
    },
)
tells(
    "samples, columns, scales and metrics",
    SMALL,
    0,
    {
        "large moment": "nothing non-finite",
        "scaled, divided by hand": "nothing non-finite",
        "scaled": "Adam steps with gradients 1024 times too large, at script.py: ... : "
        "scaler.step(optimizer)",
        "metric": ": aten.div.Tensor at script.py:",
    },
)


BESIDE = (
    PREAMBLE
    + """
net, probe = nn.Linear(8, 8), nn.Linear(8, 2)
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
other = torch.optim.SGD(probe.parameters(), 0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12)
for step in range(40):
    x = torch.randn(16, 8); out = net(x); loss = (out - x).square().mean()
    optimizer.zero_grad(); other.zero_grad()
    q = F.cross_entropy(probe(out.detach()), (x[:, 0] > 0).long())
    if fault == "both": scaler.scale(loss).add(scaler.scale(q)).backward()
    else: scaler.scale(loss).backward()
    if fault == "": q.backward()
    if fault == "clipped": nn.utils.clip_grad_norm_(net.parameters(), 1e5)
    if fault in ("", "both"): other.step()  # another optimizer, with gradients of its own
    if fault == "by hand":  # a scale that stays as it is
        for p in net.parameters(): p.grad.div_(scaler.get_scale())
    if fault in ("clipped", "by hand"): optimizer.step()
    elif fault == "never updated":
        try: scaler.step(optimizer)
        except RuntimeError: optimizer.step()
    elif fault != "no step": scaler.step(optimizer); scaler.update()
"""
)
tells(
    "plain losses beside a loss scaler",
    BESIDE,
    0,
    {
        "": "40 steps, nothing non-finite -- not too large",
        "by hand": "nothing non-finite -- not too large",
        "both": "SGD steps with gradients 4096 times too large, at script.py:",
        "clipped": "Adam steps with gradients 4096 times too large, at script.py:",
        "never updated": "Adam steps with gradients 4096 times too large, at script.py: ... "
        "(scale() was called 40 times, at script.py: ... and update() never)",
    },
)


EARLY = (
    PREAMBLE
    + """
from torch.optim import lr_scheduler as rates
net = nn.Linear(8, 2)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
if fault == "cosine": schedule = rates.CosineAnnealingLR(optimizer, 6)
elif fault == "warm-up": schedule = rates.LambdaLR(optimizer, lambda n: min(1, n / 4))
elif fault == "inverse": schedule = rates.LambdaLR(optimizer, lambda n: 1 / (1 + n))
else: schedule = rates.StepLR(optimizer, 2 if fault == "second" else 1, gamma=0.5)
first = 0
if fault == "resumed":
    first = 2
    for _ in range(first): schedule.step()
for epoch in range(first, 6):
    if fault != "resumed": schedule.step()  # early
    for step in range(8):
        x = torch.randn(16, 8); loss = (net(x) - x[:, :2]).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    if fault == "resumed": schedule.step()
"""
)
tells(
    "a scheduler that steps before the first update",
    EARLY,
    0,
    {
        "early": "StepLR at script.py: ... steps before the first step of SGD: no update has the "
        "first lr, 0.1: it is 0.05 from the first",
        **dict.fromkeys(
            ["cosine", "warm-up", "inverse", "second", "resumed"],
            "nothing non-finite -- not before the first",
        ),
    },
)


OWN_SCHEDULE = (
    PREAMBLE
    + """
from torch.optim import lr_scheduler as rates
class Wave(rates.LRScheduler):
    def __init__(self, optimizer, warmup, total):
        self.warmup, self.total, self.calls = warmup, total, 0
        super().__init__(optimizer)
    def get_lr(self):
        n, self.calls = self.last_epoch, self.calls + 1
        if self.warmup < 0: return [rate * 0.99 ** n for rate in self.base_lrs]
        left = abs(self.total - n) / (self.total - self.warmup)
        return [rate * min((n + 1) / self.warmup, left) for rate in self.base_lrs]
net = nn.Linear(8, 2)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
micro = 1 if fault in ("each update", "") else 3
updates = 60 * 3 if fault == "micro-batches" else 60
def plan():
    warm = rates.LinearLR(optimizer, start_factor=0.02, total_iters=6)
    after = rates.CosineAnnealingLR(optimizer, 54)
    return rates.SequentialLR(optimizer, [warm, after], [6])
warmup = {"no end": -1, "micro-batches": 60}.get(fault, 6)
kept = plan() if fault == "" else Wave(optimizer, warmup, updates)
for step in range(60):
    for k in range(micro):
        x = torch.randn(16, 8); (net(x) - x[:, :2]).square().mean().div(micro).backward()
        if k == micro - 1: optimizer.step(); optimizer.zero_grad()
        kept.step()
"""
)
tells(
    "schedulers of a class of the script's own, and of several parts",
    OWN_SCHEDULE,
    0,
    {
        "own": "made for 60 updates, and Wave steps 3 times an update, at script.py:",
        **dict.fromkeys(
            ["", "each update", "micro-batches", "no end"], "nothing non-finite -- not is made for"
        ),
    },
)


TWO_LOSSES = (
    PREAMBLE
    + """
code, other = nn.Linear(8, 4), nn.Linear(4, 8)
net = nn.Sequential(code, nn.Tanh(), other)
joint = fault in ("unused", "read", "seldom", "hooked", "own function")
optimizer = torch.optim.Adam(net.parameters() if joint else other.parameters(), 1e-3)
second = torch.optim.Adam(code.parameters(), 1e-3)
class Seen(torch.autograd.Function):  # it looks at gradients
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, grad): return grad
if fault == "hooked": net.register_full_backward_hook(lambda *args: None)
for step in range(40):
    x = torch.randn(16, 8)
    if fault == "input": x.requires_grad_()
    optimizer.zero_grad()
    first = net(Seen.apply(x) if fault == "own function" else x)
    if fault == "own function": first = Seen.apply(first)
    if fault != "seldom" or step % 8 == 0: first.square().mean().backward()
    if fault == "read": print(code.weight.grad.norm().item())
    if fault == "adversarial": second.step()
    optimizer.zero_grad()
    if fault == "input": second.zero_grad(); x = (x + 0.1 * x.grad.sign()).detach()
    F.mse_loss(other(code(x).detach()) if fault == "GAN" else net(x), x).backward()
    optimizer.step()
    if fault in ("GAN", "input"): second.step()
    if not joint: second.zero_grad()
"""
)
tells(
    "a backward pass that is thrown away",
    TWO_LOSSES,
    0,
    {
        "unused": "the backward pass at script.py: ... is thrown away before each step: script.py:",
        **dict.fromkeys(
            ["read", "seldom", "hooked", "own function", "adversarial", "GAN", "input"],
            "nothing non-finite -- not thrown away",
        ),
    },
)


HOLDER = (
    PREAMBLE
    + """
class Agent:
    def __init__(self):
        self.policy, self.critic = nn.Linear(4, 2), nn.Linear(4, 1)
        self.log_alpha = nn.Parameter(torch.zeros(1))
        self.first = torch.optim.Adam(self.policy.parameters(), 1e-3)
        self.second = torch.optim.Adam(self.critic.parameters(), 1e-3)
        self.third = torch.optim.Adam([self.log_alpha], 1e-3)
    def update(self, x):
        out = self.policy(x)
        self.first.zero_grad(); (out - x[:, :2]).square().mean().backward(); self.first.step()
        self.second.zero_grad(); (self.critic(x) - x[:, 2:3]).square().mean().backward()
        if fault != "critic": self.second.step()
        self.third.zero_grad()
        (self.log_alpha.exp() * (out.detach().square().mean() - 0.1)).backward()
        if fault != "number": self.third.step()
agent = Agent()
for step in range(60):
    if fault == "rate":
        for group in agent.second.param_groups:
            group["lr"] = 1e-3 * max(0, 30 - step)  # rate
    agent.update(torch.randn(16, 4))
"""
)
tells(
    "what an object of the script holds has its name",
    HOLDER,
    0,
    {
        "": "nothing non-finite",
        "critic": "no step, though critic.weight, critic.bias, which it holds, got gradients at "
        "every step read (by backward() at script.py:18 in update)",
        "number": "no step, though log_alpha (a parameter float32[1]), which it holds, got "
        "gradients at every step read (by backward() at script.py:21 in update)",
        "rate": "the lr of critic.weight, critic.bias was 0 since step 30 of 60 ... (script.py:"
        " ... sets it, and no scheduler",
    },
)


KINDS = (
    PREAMBLE
    + """
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
)


tells("kinds that were met in other people's scripts", KINDS, 0, {"": "nothing non-finite"})
tells(
    "kinds that were met in other people's scripts",
    KINDS,
    3,
    {
        "cut before": "samples 5 of 8 ",
        "table": "-> divergence",
        "weights": "into 3.weight is nan",
        "metric": "-> divergence",
        "read between": "x / (y + eps), eps = 1e-6 at script.py",
        "scaler by half": "and scaler.update() after it",
    },
)
tells("an exception of a finite step keeps its exit code", KINDS, 1, {"raises finite": "-> error"})


EDGES = (
    PREAMBLE
    + """
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
    limit = 1e9 if fault == "grows" else 1.0
    if fault != "two optimizers":
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
)


tells(
    "kinds at the edges of what is written down",
    EDGES,
    0,
    {
        "": "8 steps, nothing non-finite",
        "norm": "skipped by the loss scaler, nothing non-finite",
    },
)
tells(
    "kinds at the edges of what is written down", EDGES, 1, {"raises": "-> error ... by Own.step()"}
)
tells(
    "kinds at the edges of what is written down",
    EDGES,
    3,
    {
        "made bad": "it went into buffer mean",
        "module writes": "samples 5 of 8 ",
        "script writes": "samples 5 of 8 ",
        "keyword": "index 9 is not in 0..8",
        "fetched ahead": "samples 5 of",
        "forward spoils": "buffer mean is inf at step 3",
        "torch.func": "-> divergence",
        "first written late": "buffer mean is inf at step 6",
        "loaded": "already bad: buffer mean, made at script.py",
        "eps in half": "eps = 1e-4",
        "exp in half": "exp(x.clamp(max=10))",
        "tiny": "as small as 9.81e-45",
        "refreshed": "try: division by zero",
        "rolled back": "buffer mean was written at",
        "number": "it divides by the number 0 ... runs again",
        "array": "-> data",
        "bad number": "bad before torch saw it",
        "never written": "initialise it",
        "own scale": "scale 1.67772e+07) -> calibration",
        "grows": "the gradient norm has grown: ",
        "average": "divides by the number 0",
        "two optimizers": "try: scaler.step(optimizer)",
        "unscaled": "-> calibration",
    },
)


FORMS = (
    PREAMBLE
    + """
def spoilt(out, bad):
    return out + 0.01 * (out.abs() * bad + 1e-3 * bad).log()  # here

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
)


tells(
    "a step of any form is made again",
    FORMS,
    3,
    {
        "custom function": "-> divergence ... samples 3 of ",
        "custom backward": "-> divergence ... samples 3 of ",
        "no module": "-> divergence ... samples 3 of ",
        "functional_call": "-> divergence ... samples 3 of ",
        "time first": "-> divergence ... samples 3 of ",
        "packed": "-> divergence",  # torch 2.9 packs by an operation that is not followed
        "labels": "-> data ... samples 3 of ",
        "in turns": "-> divergence ... samples 3 of ",
        "half": "-> precision ... samples 3 of ",
        "by hand": "-> divergence ... samples 3 of ",
        "scaler": "-> divergence ... samples 3 of ",
        "traced": "-> divergence ... samples 3 of ",
    },
)
tells(
    "good numbers that spoil a weight are not the optimizer's work",
    FORMS,
    3,
    {
        "renormed": "-> divergence ... x / (y + eps)",
        "set": "-> weights",
    },
)


MIXTURE = (
    PREAMBLE
    + """
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
print("the script ends", file=sys.stderr)
"""
)


# A step that is made again between its forward and its backward changes no later number.
tells("what a forward leaves on its module is put back", MIXTURE, 0, {"": "read -inf at"})
tells(
    "what a forward leaves on its module is followed",
    MIXTURE,
    3,
    {
        "left": "-> divergence",
        "metric": "-> divergence ... the script ends",
    },
)


INSIDE = (
    PREAMBLE
    + """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)
    def forward(self, x, mask=None):
        scores = self.q(x) @ self.k(x).transpose(-1, -2)  # here
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
)


tells(
    "half that a forward enters by itself is precision and no hardware",
    INSIDE,
    3,
    {"log": "-> precision ... (bfloat16)  -- not hardware"},
)
tells(
    "all modules of a kind are tried together under the name of their owner",
    INSIDE,
    3,
    dict.fromkeys(
        ("one tensor", "tuple", "keyword"),
        "-> precision ... in model.layers.0 ... "
        "tried: model.layers.* in fp32, result in fp32: finite",
    ),
)


TENSORS = (
    PREAMBLE
    + """
import contextlib
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
    def forward(self, x, other=None):
        return self.b(self.n(self.a(x)))

class Same(nn.Linear):
    def forward(self, x): return x

class Kind(torch.Tensor): pass

def inference():
    with torch.inference_mode(): return torch.eye(4)

OTHER = {
    "meta buffer": lambda: torch.ones(3, device="meta"),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.qint8),
    "fp8": lambda: torch.eye(4).to(torch.float8_e4m3fn),
    "mkldnn": lambda: torch.eye(4).to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "refuses": lambda: torch.eye(4).as_subclass(Refuses),
    "subclass": lambda: torch.eye(4).as_subclass(Kind),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "no value": lambda: torch.zeros(4, 4).to_sparse(),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2, 4)], layout=torch.jagged),
    "complex": lambda: torch.eye(4).cfloat().conj(),
    "empty": lambda: torch.zeros(0, 4),
    "bool": lambda: torch.eye(4).bool(),
    "fp4": lambda: torch.zeros(4, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "expanded": lambda: torch.ones(1).expand(4, 4),
    "inference": inference,
}
def beside(k):
    # Whatever torch can do with such a tensor, in every place.
    weight, held = net.b.weight, k()
    places = [
        lambda: net(torch.ones(3, 4), k()), lambda: net(torch.ones(3, 4), other={"k": [k()]}),
        lambda: Same(1, 1)(k()), torch.no_grad()(lambda: Same(1, 1)(k())),
        lambda: F.mse_loss(net(torch.ones(4, 4)), k()), lambda: k() @ torch.ones(4, 4),
        lambda: k().requires_grad_().sum().backward(), lambda: torch.empty_like(k()),
        lambda: k().sum().item(), lambda: k().tolist(), lambda: k().numpy(), lambda: str(k()),
        lambda: torch.isnan(k()), lambda: held != held, lambda: held.mul_(1),
        lambda: held[1].mul_(1), torch.no_grad()(lambda: weight.add_(0 * k()[:2])),
        lambda: setattr(net, "held", [k()]), lambda: setattr(net.frozen, "data", k()),
        lambda: setattr(net.frozen, "grad", k()), lambda: setattr(weight, "grad", k()),
    ]
    for place in places:
        with contextlib.suppress(Exception): place()
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
with contextlib.suppress(Exception):
    net.frozen = nn.Parameter(OTHER[fault](), requires_grad=False)
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
for step in range(5):
    if fault in OTHER and fault not in ("refuses", "meta buffer"): beside(OTHER[fault])
    h = net(torch.randn(5, 4))
    if step == 3: h = h / (h * 0)  # here
    optimizer.zero_grad(); h.square().mean().backward(); optimizer.step()
"""
)


BLIND = (
    PREAMBLE
    + """
import ctypes
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
"""
)


tells(
    "what outsiders were told wrongly is told rightly",
    BLIND,
    3,
    {
        "scaler clips": "-> calibration -- not x.float()",
        "scaler asserts": "-> calibration -- not x.float()",
        "negative rate": "a learning rate is negative: -0.5, and -- not lower learning",
        "garbage": "never written since script.py: -- not grow",
        "float mask": "torch.where -- not every sample is bad",
        "table": "mend this number where it is made, at script.py: -- not before the watch",
    },
)
tells(
    "what outsiders were told wrongly is told rightly",
    BLIND,
    1,
    {
        "inner name": (
            "-> error ... first bad op: torch.linalg.cholesky -- not _linalg_check_errors"
        ),
    },
)


KINDS_OF_TENSORS = (
    "meta",
    "meta step",
    "meta buffer",
    "lazy",
    "sparse",
    "csr",
    "quantised",
    "fp8",
    "mkldnn",
    "nested",
    "refuses",
    "subclass",
    "bsr",
    "no value",
    "jagged",
    "complex",
    "empty",
    "bool",
    "expanded",
    "inference",
    *["fp4"] * hasattr(torch, "float4_e2m1fn_x2"),
)
AGAIN = {"sparse", "csr", "bsr", "no value", "quantised", "nested", "jagged"}
try:
    torch.zeros(2, dtype=torch.uint8).view(getattr(torch, "float4_e2m1fn_x2", torch.uint8)).clone()
except NotImplementedError:  # torch 2.9 copies none
    AGAIN.add("fp4")
tells(
    "a tensor of any kind beside the fault does not end the watch",
    TENSORS,
    3,
    {
        kind: "runs again ... -> divergence" if kind in AGAIN else "-> divergence"
        for kind in KINDS_OF_TENSORS
    },
)


WRITTEN = (
    PREAMBLE
    + """
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
)


OWN = (
    PREAMBLE
    + """
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
)


tells("an exception that no bad number leads to is the script's own", OWN, 1, {"": ""})
tells(
    "an exception that a bad number leads to is examined",
    OWN,
    3,
    {
        "range": "-> data",
        "asked": "ValueError: a NaN at step 0",
    },
)


tells("a weight that is initialised twice is no fault", WRITTEN, 0, {"": ""})
tells(
    "what is written past a parameter is not blamed on the last initialiser",
    WRITTEN,
    3,
    {
        "item": "-> weights",
        "data": "-> divergence",
        "copy": "-> divergence",
        "outside": (
            "2.bias is nan at step 0 ... what wrote it after that was not seen -- not torch.zero"
        ),
    },
)


# Its memo holds all that; to walk it at each tensor takes quadratic time.
tells(
    "a deep copy keeps nothing of what was copied before",
    PREAMBLE
    + """
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
""",
    3,
    {"fault": "aten.div"},
)


CLOSURES = (
    PREAMBLE
    + """
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
)


tells("a step with a closure counts once", CLOSURES, 0, {"": "6 steps, nothing non-finite"})
tells(
    "what an optimizer writes around its closure is its own",
    CLOSURES,
    3,
    {
        "data": "-> data ... at step 4 ",
        "rate": "-> optimizer ... made by LBFGS (lr=1e+30) ... at step 0 ",
    },
)


LOADED = (
    PREAMBLE
    + """
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
)


tells(
    "what is written or loaded is the cause and not its consequence",
    LOADED,
    3,
    {
        "early": "-> weights ... what the script writes into 0.bias is nan at step 0",
        "file": "-> weights ... what the script writes into 0.bias is nan at step 0",
        "norm": "-> weights ... what the script writes into 0.weight is nan",
        "moment": "-> weights ... exp_avg of 1.weight is inf as loaded at",
    },
)


TABLE = (
    PREAMBLE
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(9, 4, sparse=fault == "sparse")
        self.own = nn.Parameter(torch.randn(9, 4))
        self.last = nn.Linear(4, 2)
    def forward(self, index):
        return self.last(self.emb(index) + self.own[index] * (fault == "own"))  # used

net = Net()
key = "own" if fault == "own" else "emb.weight"
state = {k: t.clone() for k, t in net.state_dict().items()}
state[key][7] = torch.nan
if fault == "before":
    net.emb = nn.Embedding.from_pretrained(state[key], freeze=False)
else:
    net.load_state_dict(state)  # plain, frozen, sparse, own, used
if fault == "frozen":
    net.emb.requires_grad_(False)
if fault == "sparse":
    net.last.requires_grad_(False)
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
)


ROW = "parameter emb.weight holds NaN or inf in rows 7 of 9 ( ... 6 steps, nothing else non-finite"
tells(
    "a bad row that nothing asks for is one line",
    TABLE,
    0,
    {
        "plain": ROW,
        "frozen": ROW,
        "sparse": ROW,
        "before": f"{ROW} ... before the watch",
        "own": ROW.replace("emb.weight", "own"),
    },
)
tells(
    "a bad row that a sample asks for is a verdict with the line that wrote it",
    TABLE,
    3,
    {
        "used": "-> weights ... loss is nan at step 4 ... samples 5 of 6 ... written at script.py:",
    },
)


tells(
    "an optimizer that makes a row bad is named though the gradient is zero",
    PREAMBLE
    + """
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
""",
    3,
    dict.fromkeys(("layer", "table"), "after good gradients at step 0 -> optimizer ... runs again"),
)


BATCHES = (
    PREAMBLE
    + """
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
)


tells(
    "a tensor of the batch has the name of the argument that it is given for",
    BATCHES,
    3,
    {
        "pixels": "pixels holds nan ... samples 2 of",
        "marks": "marks holds nan ... samples 2 of",
        "target": "target holds nan ... samples 2 of",
    },
)


AVERAGED = (
    PREAMBLE
    + """
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
)


# Nothing but the script's own writes shows it.
tells("an average that no module calls is read too", AVERAGED, 0, {"": ""})
tells(
    "an average that no module calls is read too",
    AVERAGED,
    3,
    {
        "counter": "-> divergence",
        "foreach": "-> weights",
        "detach": "-> divergence",
    },
)


SLOTS = (
    PREAMBLE
    + """
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
)


tells(
    "a batch in slots is a batch",
    SLOTS,
    3,
    {"first use": "-> data ... images holds nan ... samples 3 of"},
)


PLANTED = (
    PREAMBLE
    + """
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
)


tells(
    "a number that the script writes into its data is written again",
    PLANTED,
    3,
    dict.fromkeys(("table", "row", "fill"), "-> data ... samples 3 of"),
)


STRANGE = (
    PREAMBLE
    + """
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
)


tells(
    "a warm-up on the memory of empty is no fault",
    STRANGE,
    0,
    dict.fromkeys(
        ("", "inference"), "nothing non-finite ... passed over, its input is what torch.empty found"
    ),
)
tells(
    "a warm-up on memory that somebody writes is one",
    STRANGE,
    3,
    {
        "written": "-> divergence",
        "shape": "-> divergence",
        "out": "-> divergence",
        "lent": "-> data",
    },
)


FILLED = (
    PREAMBLE
    + """
net = nn.Linear(4, 3)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(4):
    with torch.autocast("cpu", torch.float16):
        scores = net(torch.randn(8, 4)) * 1
        if step == 3 and fault == "too large": scores[:, 1] = float(2 ** 30)  # too large
        if step == 3 and fault == "infinite": scores[:, 1] = torch.inf  # infinite
    loss = scores.float().logsumexp(1).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
print(loss.item())
"""
)
tells(
    "a number that fp16 cannot hold is its fault, an inf is the script's",
    FILLED,
    3,
    {"too large": "-> precision ... the number 1.07e+09", "infinite": "-> data ... writes inf"},
)

ACTS = (
    PREAMBLE
    + """
policy, target = nn.Linear(4, 2), nn.Linear(4, 2)
optimizer = torch.optim.Adam(policy.parameters())
for step in range(5):
    if fault == "acts": policy(torch.randn(1, 4)).argmax(dim=1).numpy()
    done, state, after = torch.zeros(16, 1), torch.randn(16, 4), torch.randn(16, 4)
    done[[3, 7]] = 1
    done, state, after = (torch.tensor(t.numpy()) for t in (done, state, after))
    with torch.no_grad():
        goal = 1 + 0.99 * target(after).amax(1) / (1 - done.flatten())  # here
    loss = nn.functional.mse_loss(goal, policy(state).amax(1))
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
)
tells(
    "samples are those of the batch though a policy acts before",
    ACTS,
    3,
    dict.fromkeys(("acts", "alone"), "-> divergence ... samples 3, 7 of 16"),
)

TWICE = (
    PREAMBLE
    + """
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(net.parameters(), 1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12, growth_interval=5)
for step in range(60):
    x, y = torch.randn(32, 16) * 8, torch.randint(0, 4, (32,))
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(net(x), y)  # left over
    scaler.scale(loss).backward()
    scaler.step(optimizer); scaler.update()
    optimizer.step()
"""
)
# the scaler skips step 44, and the second call makes it
tells(
    "the first and the second run tell the same step",
    TWICE,
    3,
    {
        "left over": "step 44. ... runs again ... inf at step 44 (float16 ... -> calibration ... "
        "makes two steps with the gradients of one backward pass -- not step 45"
    },
)

PENALTY = (
    PREAMBLE
    + """
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(6):
    x = torch.randn(8, 4)
    mixed = x * 0.5 + 0.5
    if fault == "attribute": mixed.requires_grad = True
    else: mixed.requires_grad_()
    slope = torch.autograd.grad(net(mixed).sum(), mixed, create_graph=True)[0] * (step < 3)
    penalty = slope.square().sum(1).sqrt().sub(1).square().mean()  # attribute, method
    optimizer.zero_grad(); (net(x).mean() + penalty).backward(); optimizer.step()
"""
)
tells(
    "a penalty on a gradient is made again where the attribute asks for it",
    PENALTY,
    3,
    dict.fromkeys(("attribute", "method"), "-> divergence ... sqrt has no finite slope at 0"),
)

RATES = (
    PREAMBLE
    + """
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
alpha = 9.0 if fault == "alpha" else 0.9
optimizer = torch.optim.RMSprop(net.parameters(), 1e-3, alpha=alpha)
if fault == "rate":
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), 30.0)
for step in range(60):
    x = torch.randn(16, 4)
    y = net(x)
    loss = F.mse_loss(y, x[:, :1])
    optimizer.zero_grad(); loss.backward()
    optimizer.step()  # alpha
"""
)
tells(
    "the setting of an optimizer that made a bad weight",
    RATES,
    3,
    {
        "alpha": "-> optimizer ... alpha must be in 0..1 ... alpha=9 -- not a lower lr",
        "rate": "a lower learning rate: the norm of the weights has grown ... at a rate of 30",
    },
)

FALLING = (
    PREAMBLE
    + """
net = nn.Linear(4, 4)
optimizer = torch.optim.Adam(net.parameters(), 0.5)
for step in range(300):
    x = torch.rand(16, 4) + 1
    loss = -net(x).exp().mean()  # a variance that nothing bounds
    optimizer.zero_grad(); loss.backward()
    optimizer.step()  # sign
"""
)
tells("a loss without a lower bound", FALLING, 3, {"sign": "the loss falls without end"})

RUNAWAY = (
    PREAMBLE
    + """
import copy
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
target = copy.deepcopy(net)
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
for step in range(60):
    x = torch.randn(16, 4)
    with torch.no_grad():
        goal = 0.9 * target(x)
    loss = F.mse_loss(net(x), goal)  # factor
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    for slow, fast in zip(target.parameters(), net.parameters()):
        slow.data.copy_(5 * fast.data - 4 * slow.data)
"""
)
tells(
    "a target network that runs away",
    RUNAWAY,
    3,
    {"factor": "-> divergence ... what ... writes into ... grows: up to"},
)

BY_HAND = (
    PREAMBLE
    + """
net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.3), nn.Linear(16, 1))
def train():
    if fault != "left": net.train()
    for step in range(10):
        x = torch.randn(16, 4)
        F.mse_loss(net(x), x[:, :1]).backward()
        for p in net.parameters():
            p.data.add_(p.grad, alpha=-0.01)
            p.grad = None
for epoch in range(4):
    train()
    net.eval()
    with torch.no_grad(): net(torch.randn(16, 4))
"""
)
tells(
    "eval mode in a loop that updates by hand",
    BY_HAND,
    0,
    {
        "left": "steps train Sequential in eval mode",
        "trained": "nothing non-finite -- not eval mode",
    },
)

CLIPPED = (
    PREAMBLE
    + """
net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
returns, values = torch.randn(256), torch.randn(256)
for step in range(40):
    part = torch.randperm(256)[:64]
    new = net(torch.randn(64, 3))
    if fault == "flat": new = new.view(-1)
    plain = (new - returns[part]) ** 2
    near = values[part] + torch.clamp(new - values[part], -0.2, 0.2)
    loss = 0.5 * torch.max(plain, (near - returns[part]) ** 2).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
)
tells(
    "a clipped loss of a part of the returns",
    CLIPPED,
    0,
    {
        "square": "compares each result with each target: [64, 1] and [64] make a square",
        "flat": "nothing non-finite -- not a square",
    },
)


EXAMINED = (
    PREAMBLE
    + """
import numpy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
class NoSync(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(func)
        return func(*args, **(kwargs or {}))
class Passes(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
variance = torch.zeros(16, 6)
flat = numpy.ones((16, 6), "float32")
for step in range(8):
    x = torch.randn(16, 6)
    if fault == "constant" and step == 3:
        x = torch.from_numpy((flat - flat.min()) / (flat.max() - flat.min()))
    out = net(x)  # constant
    if fault == "masked":
        hidden = torch.ones(4, 4).triu(1) == 0
        out = out.view(4, 4, 6)[..., :4].masked_fill(hidden, -torch.inf).softmax(-1)  # masked
    loss = (out - 1).square().mean()
    if fault == "no variance":
        loss = loss + variance.log().mean()  # no variance
    if fault == "mode":
        with Passes():
            loss = loss + torch.log(torch.zeros(()))  # mode
    with NoSync():
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    if fault == "drawn" and step == 5:
        likely = (1e5 * out.detach()).exp()  # drawn
        torch.multinomial(likely, 1)
"""
)
tells(
    "what strangers' programs showed",
    EXAMINED,
    3,
    {
        "constant": (
            "-> data ... a warning before: script.py: ... invalid value encountered in divide"
        ),
        "masked": "a causal mask that is the wrong way round: each place sees only those after it",
        "no variance": "log of 0, and its argument is 0 in each place",
        "mode": "-> divergence -- not __torch_function__",
        "drawn": "probability tensor contains ... -> divergence ... exp beyond 88 is inf",
    },
)
tells("what strangers' programs showed", EXAMINED, 0, {"": "8 steps, nothing non-finite"})

DRAWS = (
    PREAMBLE
    + """
policy, value = (nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, n)) for n in (3, 1))
both = nn.ModuleList([policy, value])
optimizer = torch.optim.Adam(both.parameters(), 1e-2)
other = torch.optim.Adam((policy if fault == "shared" else value).parameters(), 1e-3)
for step in range(40):
    x = torch.randn(16, 4)
    logits = policy(x)
    if fault == "logits": logits = logits.softmax(-1)
    drawn = torch.distributions.Categorical(logits=logits)
    action = drawn.sample()
    log_p = drawn.log_prob(action)
    if fault == "cut": log_p = log_p.detach()  # cut
    reward = (action == x.argmax(1) % 3).float()
    v = value(x).squeeze(1)
    loss = F.mse_loss(v, reward) - (log_p * (reward - v.detach())).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    other.zero_grad(); F.mse_loss(value(x).squeeze(1), reward).backward(); other.step()
"""
)
tells(
    "draws of a policy",
    DRAWS,
    0,
    {
        "": "nothing non-finite -- not had a gradient in any",
        "logits": "its logits went through softmax already: Categorical(probs=...)",
        "cut": "no gradient has reached ... detach at script.py: -- not multinomial",
        "shared": "nothing non-finite -- not is zero_grad() called",
    },
)

FOLDS = (
    PREAMBLE
    + """
import gc
for fold in range(8):
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    for step in range(10):
        x = torch.randn(8, 64)
        if fault == "sixth" and (fold, step) == (5, 0): x = x / torch.zeros(64)  # sixth
        loss = net(x).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    del net, optimizer, loss
    gc.collect()
    kinds = torch.Tensor, nn.Parameter
    large = sum(type(t) in kinds and t.shape == (64, 64) for t in gc.get_objects())
    assert large <= 12, large  # two models
"""
)
tells("models that come one after the other", FOLDS, 0, {"": "80 steps, nothing non-finite"})
tells("models that come one after the other", FOLDS, 3, {"sixth": "at step 50 -> "})

COPIES = (
    PREAMBLE
    + """
table, rnn, head = nn.Embedding(30, 16), nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 30)
net = nn.ModuleList([table, rnn, head])
optimizer = torch.optim.Adam(net.parameters(), 1e-2)
text = torch.randint(30, (8, 400))
for step in range(20):
    at = 16 * step
    x, y = text[:, at : at + 16], text[:, at + (fault == "") : at + 16 + (fault == "")]
    scores = head(rnn(table(x))[0])
    loss = F.cross_entropy(scores.flatten(0, 1), y.flatten())
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
)
tells(
    "labels of a recurrent network",
    COPIES,
    0,
    {"": "nothing non-finite -- not labels", "copied": "it learns to copy: shift the labels"},
)

WORDS = (
    PREAMBLE
    + """
table, place, head = nn.Embedding(28, 32), nn.Embedding(16, 32), nn.Linear(32, 28)
layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
encoder = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
small, large = nn.Linear(32, 4), nn.Linear(4, 32)
net = nn.ModuleList([table, place, head, layer, encoder, small, large])
optimizer = torch.optim.Adam(net.parameters(), 3e-3)
full = fault in ("summary", "full")  # else 0 is the end of a word and the padding
causal = None if fault in ("open", "full") else nn.Transformer.generate_square_subsequent_mask(16)
for step in range(24):
    word = torch.randint(1, 27, (32, 15))
    if not full: word = word.masked_fill(torch.arange(15) >= torch.randint(4, 12, (32, 1)), 0)
    x = F.pad(word, (1, 0), value=27 if full else 0)
    y = F.pad(word, (0, 1), value=0)
    if not full: y = y.masked_fill(F.pad(y == 0, (1, 0))[:, :-1], -100)
    rows = table(x) + place(torch.arange(16))
    if fault == "summary": rows = rows + large(small(encoder(rows).mean(1)))[:, None]
    scores = head(layer(rows, src_mask=causal))
    loss = F.cross_entropy(scores.transpose(1, 2), y)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
)
tells(
    "words, and what each place sees of them",
    WORDS,
    0,
    {
        "": "nothing non-finite -- not labels",
        "summary": "nothing non-finite -- not labels",
        "open": "are the next ids, and each position sees its own",
        "full": "are the next ids, and each position sees its own",
    },
)

EPISODES = (
    PREAMBLE
    + """
body, policy, value = nn.Linear(4, 32), nn.Linear(32, 2), nn.Linear(32, 1)
net = nn.ModuleList([body, policy, value])
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
for step in range(40):
    x, gain, reward = torch.randn(64, 4), torch.randn(64), torch.randn(64)
    h = body(x).tanh()
    drawn = torch.distributions.Categorical(logits=policy(h))
    v = value(h) if fault == "square" else value(h).squeeze(1)
    ratio = drawn.log_prob(drawn.sample()).exp()
    loss = -torch.min(ratio * gain, gain) + 0.5 * nn.MSELoss()(v, reward) - drawn.entropy() / 99
    optimizer.zero_grad(); loss.mean().backward(); optimizer.step()
"""
)
tells(
    "a loss for each sample, and a mean added",
    EPISODES,
    0,
    {"": "nothing non-finite -- not square", "square": "[64, 1] and [64] make a square"},
)

DECAYS = (
    PREAMBLE
    + """
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(256, 4), torch.randn(256, 1))
net = nn.Linear(4, 1)
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
rate = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
for epoch in range(6):
    for x, y in DataLoader(data, 32, shuffle=True):
        loss = F.mse_loss(net(x), y)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        if fault == "batches": rate.step()  # batches
    if fault == "": rate.step()
"""
)
tells(
    "a rate that falls by a factor",
    DECAYS,
    0,
    {"": "nothing non-finite -- not lr", "batches": "StepLR at ... has let the lr of Adam fall"},
)

RESETS = (
    PREAMBLE
    + """
import copy
net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
target = copy.deepcopy(net)
optimizer = torch.optim.Adam(net.parameters(), 1e-2)
first, fresh = copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict())
for step in range(80):
    x = torch.randn(16, 4)
    loss = F.mse_loss(net(x), x[:, :2] + 0.1 * target(x).detach())
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    if step % 10 < 9: continue
    if fault == "": target.load_state_dict(net.state_dict())
    elif fault == "reversed": net.load_state_dict(target.state_dict())
    elif fault == "itself": target.load_state_dict(target.state_dict())  # itself
    else: net.load_state_dict(first)
    if fault == "folds": optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    if fault == "tasks": optimizer.load_state_dict(fresh)
    if fault == "backtracking": optimizer.param_groups[0]["lr"] /= 2
"""
)
tells(
    "weights that are set back",
    RESETS,
    0,
    {
        "itself": ("target loads its own state_dict() at ... changes nothing (8 times"),
        **dict.fromkeys(["", "reversed", "folds", "tasks", "backtracking"], "nothing non-finite"),
    },
)

AGAIN = (
    PREAMBLE
    + """
import math
net, other = nn.Linear(8, 3), nn.Linear(8, 1)
optimizer = torch.optim.Adam([*net.parameters(), *other.parameters()], 1e-3)
for step in range(16):  # a phase of another loss comes first
    loss = other(torch.randn(16, 8)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
for step in range(24):
    x = torch.randn(16, 8); y, reward = x.argmax(1) % 3, x[:, 0]
    out = net(x)
    if fault == "softmax": out = out.softmax(1)
    over = 0 if fault == "over rows" else 1
    if fault in ("", "over rows"):
        loss = F.nll_loss(out.log_softmax(over)[:12], y[:12])  # over rows
    elif fault == "square":
        loss = F.smooth_l1_loss(other(x), reward + other(x.roll(1, 0)).detach())  # square
    else:
        loss = F.cross_entropy(out, y)  # softmax
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
)
tells(
    "a loss of a later phase",
    AGAIN,
    0,
    {
        "": "nothing non-finite -- not the loss at",
        "softmax": "its input went through softmax already",
        "over rows": "was normalised over dimension 0, and the classes are dimension 1",
        "square": "compares each result with each target: [16, 1] and [16, 16]",
    },
)

WITHIN = (
    PREAMBLE
    + """
import numpy as np
class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        scale = np.linspace(-1, 1, 8) if fault == "numpy" else np.linspace(1, 2, 8)
        scale = np.log(scale).astype("float32")
        self.scale = nn.Parameter(torch.from_numpy(scale))  # numpy
        self.last = nn.Linear(8, 1)
    def forward(self, x):
        total = x.clamp(min=0).sum(1, keepdim=True) * (fault != "assertion")
        shares = x / total if fault == "assertion" else x  # assertion
        assert not torch.isnan(shares / shares).any() or fault != "assertion"
        return self.last(shares * self.scale.exp())
class Meta(nn.Module):  # its forward makes the steps
    def __init__(self):
        super().__init__()
        self.net = Flow()
        self.optimizer = torch.optim.Adam(self.net.parameters(), 1e-3)
    def forward(self, x):
        loss = self.net(x).square().mean()
        if fault != "uncleared": self.optimizer.zero_grad()
        loss.backward(); self.optimizer.step()
        return loss.detach()
meta = Meta()
meta.to("cpu")
for step in range(40): meta(torch.randn(16, 8))
"""
)
tells(
    "what happens within a forward",
    WITHIN,
    0,
    {
        "": "40 steps, nothing non-finite -- not add up",
        "uncleared": "the gradients of 40 steps add up",
    },
)
tells(
    "what happens within a forward",
    WITHIN,
    3,
    {
        "numpy": "net.scale is nan ... look at what made this NumPy array",
        "assertion": "AssertionError",
    },
)

RUNS_AWAY = (
    PREAMBLE
    + """
net = nn.Linear(8, 3)
for step in range(60):
    out = net(1e4 * torch.randn(16, 8))  # here
    loss = out.tanh().mean() + 0 * out.sum()
    net.zero_grad(); loss.backward()
    for p in net.parameters(): p.data.add_(p.grad, alpha=-0.1)
    net.weight.data[:, 0].mul_(30.0)
"""
)
tells(
    "weights run away under updates by hand",
    RUNS_AWAY,
    3,
    {
        "": (
            "-> divergence ... a lower learning rate, or clip_grad_norm_: the "
            "weights that script.py:"
        ),
    },
)

FUTURE = (
    PREAMBLE
    + """
table, head, scale = nn.Embedding(30, 16), nn.Linear(16, 30), 0.25
net = nn.ModuleList([table, head]); optimizer = torch.optim.Adam(net.parameters(), 1e-3)
class Decoder(nn.Module):
    def __init__(self): super().__init__(); self.parts = net
    def forward(self, ids):
        x = table(ids); seen = torch.ones(ids.shape[1], ids.shape[1]).tril().bool()
        hidden = seen if fault else ~seen
        scores = (scale * x @ x.mT).masked_fill(hidden, -1e9)
        return head(scores.softmax(-1) @ x)
decoder = Decoder()
for step in range(12):
    ids = torch.randint(30, (8, 13))
    loss = F.cross_entropy(decoder(ids[:, :-1]).mT, 7 * ids[:, 1:] % 30)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
)
tells(
    "a mask before softmax",
    FUTURE,
    0,
    {
        "": "nothing non-finite -- not a mask of",
    },
)

BEGINNINGS = (
    PREAMBLE
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 64), nn.Linear(64, 4)
        scales = torch.linspace(-1 if fault in ("born", "unmoved") else 1, 2, 64)
        self.scale = nn.Parameter(scales.log())  # here
    def forward(self, x):
        h = torch.tanh(self.body(x)) * self.scale.exp()
        return self.head(h), (self.head(h).square().sum(1) / 1e2).exp()  # leap

net = Net() if fault == "unmoved" else Net().to("cpu"); teacher = nn.Linear(8, 4)
optimizer = torch.optim.Adam(net.parameters(), lr=0.9 if fault == "leap" else 1e-3)
for step in range(9):
    x = torch.randn(16, 8); out, size = net(x)
    with torch.no_grad():
        soft = F.log_softmax(teacher(x), 1) if fault == "target" else F.softmax(teacher(x), 1)
    near = F.kl_div(F.log_softmax(out, 1), soft, reduction="batchmean")  # target
    optimizer.zero_grad(); (near + size.mean()).backward(); optimizer.step()
print(near.item())
"""
)
tells(
    "how a run begins",
    BEGINNINGS,
    3,
    {
        "born": "net.scale is nan at step 0 ... log of a negative number (-1)",
        "unmoved": "script.py ... in __init__, which made it: no step has moved it yet",
        "leap": "a lower learning rate: Adam moves each weight by up to its rate, 0.9, in a step",
        "target": "the target of kl_div is negative ... or log_target=True",
    },
)
tells("how a run begins", BEGINNINGS, 0, {"": "nothing non-finite"})

CARRIES = (
    PREAMBLE
    + """
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.given, self.kept = nn.Linear(4, 4), nn.Linear(4, 4)
    def start(self): self.state, self.past = torch.full((2, 4), 0.5), []
    def forward(self, x=None):
        x = torch.ones(2, 4) if x is None else x
        before = self.past[-1] if fault == "listed" and self.past else self.state
        h = torch.tanh(self.given(x) + self.kept(before))
        self.state = (h if fault else h.square() + 1) ** 1.5  # here
        self.past.append(self.state)
        return torch.sigmoid(h)

cell = Cell(); optimizer = torch.optim.SGD(cell.parameters(), 0.1)
for step in range(3):
    cell.start(); optimizer.zero_grad()
    for x in torch.randn(5, 2, 4): cell(x)
    loss = F.mse_loss(torch.stack([cell() for _ in range(4)]), torch.ones(4, 2, 4))
    loss.backward(); optimizer.step()
"""
)
NEGATIVE_BASE = "-> divergence ... pow of a negative number"
tells(
    "a module carries its state from call to call",
    CARRIES,
    3,
    {"carried": NEGATIVE_BASE, "listed": NEGATIVE_BASE},
)
tells("a module carries its state from call to call", CARRIES, 0, {"": "nothing non-finite"})

ONCE_MORE = (
    PREAMBLE
    + """
net = nn.Sequential(nn.Conv1d(2, 16, 1), nn.ReLU(), nn.Dropout(0.1), nn.Conv1d(16, 3, 1))
class Points(nn.Module):
    def __init__(self): super().__init__(); self.net = net
    def forward(self, x):  # [clouds, 2, points]
        n, _, points = x.shape
        scores = self.net(x) if fault == "mixed" else self.net(x).transpose(1, 2)
        return scores.reshape(-1, 3).log_softmax(1).view(n, points, 3)
model = Points(); optimizer = torch.optim.Adam(net.parameters(), 1e-2)
def batch(n):
    x = torch.randn(n, 2, 20)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0)
X, Y = batch(30)
for step in range(60):
    x, y = batch(6 - (step % 4 == 3)); model.train()
    loss = F.nll_loss(model(x).view(-1, 3), y.view(-1, 1)[:, 0])
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    if step % 12 == 11:
        if fault != "in train mode": model.eval()
        with torch.no_grad(): print((model(X).argmax(2) == Y).float().mean())
"""
)
tells(
    "one batch is evaluated, and classes are viewed twice",
    ONCE_MORE,
    0,
    {
        "": "nothing non-finite -- not whose numbers",
        "in train mode": "Points is evaluated in train mode ... and never in eval mode",
        "mixed": "takes [120, 3], a view of [6, 3, 20] whose numbers stay in their order",
    },
)

TWICE_DERIVED = (
    PREAMBLE
    + """
net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
for step in range(30):
    x = torch.rand(20, 1).requires_grad_(); u = net(x)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=not fault, retain_graph=True)  # here
    wave = F.mse_loss(bend + 9 * u - x.detach().sin(), torch.zeros(20, 1))
    optimizer.zero_grad(); (wave + net(torch.zeros(1, 1)).square().sum()).backward()
    optimizer.step()
"""
)
tells(
    "an equation with a second derivative",
    TWICE_DERIVED,
    0,
    {
        "": "nothing non-finite -- not trains nothing",
        "no graph": "a term of the loss trains nothing: it is made of the gradient that script.py",
    },
)

ODD_NUMBERS = (
    PREAMBLE
    + """
import warnings; warnings.simplefilter("ignore")  # nested tensors are a prototype
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.mole = nn.Linear(6, 3), 6.02e23 if fault == "" else 1.0
        self.unit = nn.Parameter(torch.full((3,), self.mole))
    def forward(self, x):
        if x.is_nested: return torch.stack([row.mean(0) for row in self.layer(x).unbind()])
        return self.layer(x) * (self.unit / self.mole)
net = Net()
rate = 300.0 if fault == "rate" else 1e-3
optimizer = torch.optim.SGD(net.parameters(), lr=rate)
if fault == "tensor": optimizer = torch.optim.Adam(net.parameters(), lr=torch.tensor(0.0))
found = []
def note(module, given, slopes): found.append(slopes[0].norm())
if fault == "hooks": net.layer.register_full_backward_hook(note)
for step in range(40):
    x = torch.randn(16, 6)
    y = x[:, :3].argmax(1)
    if fault == "hooks":
        for part in x.split(4):
            optimizer.zero_grad(); net(part).square().mean().backward()
    if fault == "nested": x = torch.nested.nested_tensor([x[i:i + 1 + i % 3] for i in range(16)])
    out = net(x)
    loss = (out - 1).pow(2).sum() if fault == "rate" else F.cross_entropy(out, y)
    if fault == "nested" and step == 25: loss = loss + (loss.detach() * 0 - 1).log()  # nested
    if fault != "seldom" or step % 10 == 0: optimizer.zero_grad()
    loss.backward(); optimizer.step()
"""
)
tells(
    "numbers of an odd kind",
    ODD_NUMBERS,
    0,
    {
        "": "unit was 6.02e+23 at step 0: finite, but its square is not in float32",
        "hooks": "nothing non-finite -- not thrown away",
        "tensor": "the lr of unit, layer.weight, layer.bias was 0 at every step",
        "seldom": "the gradients of 40 steps add up: those of ... are not cleared before each",
    },
)
tells(
    "numbers of an odd kind",
    ODD_NUMBERS,
    3,
    {
        "nested": "loss is nan at step 25 -> divergence",
        "rate": "a lower learning rate: the norm of the weights has grown ... at a rate of 300",
    },
)

GENERATOR = (
    PREAMBLE
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.spare = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 3)
        self.noise = torch.Generator()
    def forward(self, x):
        h = self.first(x).relu()
        h = h + 0.1 * torch.randn(h.shape, generator=self.noise)
        return self.last(h) + self.spare(h).detach()  # cut: the forward pass is made again for it
net = Net(); optimizer = torch.optim.Adam(net.parameters())
for step in range(20):
    x = torch.randn(16, 8); loss = F.cross_entropy(net(x), x[:, :3].argmax(1))
    optimizer.zero_grad(); loss.backward(); optimizer.step()
print(loss.item(), net.noise.get_state().sum().item())
"""
)
tells("a generator of a module's own", GENERATOR, 0, {"": "no gradient has reached ... detach at"})

GRAPH = (
    PREAMBLE
    + """
N = 40
edges = (torch.rand(N, N) < 0.1).float() + torch.eye(N); edges = edges / edges.sum(1, True)
Y = torch.randint(4, (N,)); X = F.one_hot(Y, 4) + torch.randn(N, 4)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(4, 16), nn.Linear(16, 4), nn.Dropout(0.5)
    def forward(self, edges, x):  # x: (batch, nodes, features)
        return edges @ self.last(self.drop((edges @ self.first(x)).relu()))
net, other = Net(), nn.Linear(4, 1)
optimizer = torch.optim.Adam((other if fault == "both" else net).parameters(), 1e-2)
second = torch.optim.Adam(other.parameters(), 1e-2)
for epoch in range(40):
    net.train()
    x = torch.stack([X + 0.1 * torch.randn(N, 4) for _ in range(6)])
    if fault == "data" and epoch == 20: x.numpy()[2, 3] = float("nan")
    out = net(edges, x)
    loss = F.cross_entropy(out.flatten(0, 1), Y.repeat(6))
    if fault == "half" and epoch == 20: loss = loss + (out.detach().half() / 1e-5).mean()  # half
    if fault == "sum" and epoch == 20:
        loss = loss + (out - 300).exp().sum(-1).log().mean()  # sum
    loss = loss + other(X).square().mean()
    optimizer.zero_grad(); second.zero_grad(); loss.backward(); optimizer.step(); second.step()
    if fault != "in train mode": net.eval()
    with torch.no_grad():
        out = net(edges, X[None])
        seen = F.cross_entropy(out[0], Y), (out[0].argmax(1) == Y).float().mean()
"""
)
tells(
    "a graph network, evaluated after each step",
    GRAPH,
    0,
    {
        "": "nothing non-finite -- not evaluated",
        "in train mode": "Net is evaluated in train mode ... and never in eval mode",
        "both": "first.weight, ... are in no optimizer ... Adam (made at ... and Adam (made at ... "
        "both hold other.weight, other.bias",
    },
)
tells(
    "a graph network, evaluated after each step",
    GRAPH,
    3,
    {
        "data": "runs again ... -> data ... first to use x ... samples 2 of 6",
        "half": "aten.div.Tensor ... of 6 (from 0) -- not its 0 was made by",
        "sum": "log of a sum of exp(x) that is 0 ... torch.logsumexp(x, dim) ... of 6 (from 0)",
    },
)

COMPILED_READ = (
    PREAMBLE
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.layer = nn.Linear(4, 4)
    def forward(self, x):
        loss = self.layer(x).square().mean()
        print(loss.item())
        return loss
net = Net(); compiled = torch.compile(net, backend="eager")
optimizer = torch.optim.SGD(net.parameters(), 0.01)
for step in range(20):
    loss = compiled(torch.randn(8, 4)); optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
)
tells("a number that compiled code reads", COMPILED_READ, 0, {"": "nothing non-finite"})
STRANGE = (
    PREAMBLE
    + """
class Sum(nn.Module):
    def __init__(self):
        super().__init__(); self.weight = nn.Parameter(torch.randn(6, 3))
    def forward(self, x): return x @ self.weight
net = Sum(); optimizer = torch.optim.SGD(net.parameters(), 0.01)
for step in range(12):
    x = torch.randn(10, 6)
    width = x.new(torch.Size([10])).fill_(2.0)
    if fault == "size" and step == 4: width[3] = -0.5
    if fault == "written" and step == 4: net.weight.data.mul_(100.0)
    out = net(x if fault else x.to_sparse()) * width.sqrt()[:, None]  # size
    if fault == "written" and step == 4: out = out / (out.detach() * 0)  # written
    optimizer.zero_grad(); (out * 0.1).square().mean().backward(); optimizer.step()
"""
)
tells("a size, a sparse input", STRANGE, 0, {"": "12 steps, nothing non-finite -- not failed"})
tells(
    "a size, a sparse input",
    STRANGE,
    3,
    {
        "size": "sqrt of a negative number (-0.5) ... samples 3 of 10",
        "written": "division by zero -- not a lower learning rate",
    },
)

PHASES = (
    PREAMBLE
    + """
def mlp(*sizes): return nn.Sequential(nn.Linear(*sizes[:2]), nn.Tanh(), nn.Linear(*sizes[1:]))
source, target, critic = mlp(4, 8, 8), mlp(4, 8, 8), mlp(8, 8, 1)
def fit(net):
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    for i in range(20):
        optimizer.zero_grad(); net(torch.randn(8, 4)).square().mean().backward(); optimizer.step()
def adapt(encoder):
    mine = torch.optim.Adam(encoder.parameters(), 1e-3)  # wrong
    theirs = torch.optim.Adam(critic.parameters(), 1e-3)
    for i in range(20):
        x = torch.randn(8, 4); theirs.zero_grad(); mine.zero_grad()
        told = critic(torch.cat([source(x), target(x)]).detach())
        F.softplus(told).mean().backward(); theirs.step()
        theirs.zero_grad(); F.softplus(-critic(target(x))).mean().backward(); mine.step()
fit(source); adapt(source if fault else target)
"""
)
tells(
    "an optimizer of another phase's network",
    PHASES,
    0,
    {
        "": "steps, nothing non-finite -- not had a gradient",
        "wrong": "Adam (made at ... in adapt) has made 20 steps, and none of its 4 "
        "parameters had a gradient in any",
    },
)

STORAGES = (
    PREAMBLE
    + """
import warnings; warnings.simplefilter("ignore")
G, D = nn.Linear(2, 1), nn.Linear(1, 1)
g, d = torch.optim.SGD(G.parameters(), 0.01), torch.optim.SGD(D.parameters(), 0.01)
for step in range(20):
    fake = G(torch.randn(8, 2)); d.zero_grad(); error = D(fake.detach()).mean(); error.backward()
    d.step(); shown = error.data.storage().tolist()
    fake = fake.detach() if fault else fake  # cut
    g.zero_grad(); error = -D(fake).mean(); error.backward(); g.step()
    shown += error.data.storage().tolist()
"""
)
tells(
    "numbers that are read from a storage",
    STORAGES,
    0,
    {
        "": "20 steps, nothing non-finite",
        "cut": "none of its 2 parameters had a gradient in any: detach at ... gives no gradient",
    },
)

SCALES = (
    PREAMBLE
    + """
net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(400, 3))
optimizer = torch.optim.SGD(net.parameters(), 0.01)
images, labels = torch.rand(80, 3, 12, 12), torch.randint(3, (80,))
def normalised(x): return (x - 0.45) / 0.25
for i in range(8):
    some = slice(8 * (i % 5), 8 * (i % 5) + 8)
    loss = F.cross_entropy(net(normalised(images[some])), labels[some])
    optimizer.zero_grad(); loss.backward(); optimizer.step()
net.eval()
with torch.no_grad():
    net(images[40:] if fault else normalised(images[40:]))
"""
)
tells(
    "one evaluation of a single batch",
    SCALES,
    0,
    {
        "": "8 steps, nothing non-finite -- not Normalize",
        "raw": "does one of both lack a Normalize?",
    },
)
