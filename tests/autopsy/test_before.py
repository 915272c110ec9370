"""`--would-overflow` and `--check-gradients`: each planted fault is named, no healthy script is
accused, and the script prints the same bits as without them.

What is expected was written down before either was run on these scripts.
"""

import re
import textwrap

import pytest
import torch
from helpers import needs_unix
from test_watch import run as run  # the fixture
from torch import nn  # noqa: F401 for CALLS
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from autopsy.before.answer import Answer, Measured, Way, decide, in_words
from autopsy.before.autocast_rules import AutocastRules
from autopsy.tensors import flat_tensors
from bench.scripts import lines_of
from bench.scripts.planted import PREAMBLE

BEGINS = (
    PREAMBLE
    + """
import contextlib, copy, math
from torch.utils.checkpoint import checkpoint

class Net(nn.Module):
    def __init__(self, middle=lambda self, h: h, width=16):
        super().__init__()
        self.body, self.head = nn.Linear(8, width), nn.Linear(width, 4)
        self.mix, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.middle = middle

    def forward(self, x):
        return self.head(self.middle(self, self.body(x)))

def data(n=16):
    return torch.randn(n, 8), torch.randint(4, (n,))

def train(net, loss_of=F.cross_entropy, context=contextlib.nullcontext, batch=data, times=1,
          make=torch.optim.SGD):
    optimizer = make(net.parameters(), 1e-2)
    for step in range(4):
        optimizer.zero_grad()
        for micro_batch in range(times):
            x, y = batch()
            with context():
                loss = loss_of(net(x), y)
            (loss / times).backward()
        optimizer.step()
        print(step, loss.item().hex())
    state = [t.double().sum().item().hex() for t in net.state_dict().values()]
    print(*state, torch.rand(1).item().hex())
"""
)
# name: (script, what the first finding holds beside the line marked "# here")
OVERFLOWS = {
    "features that nobody scaled": (
        """
    def middle(self, h):
        return self.mix(h * 1e4) / 1e6  # here
    net = Net(middle)
    net.mix.weight.data.mul_(30)
    train(net)
    """,
        "aten.addmm.*mix.*times the end of fp16",
    ),
    "attention without a scale": (
        """
    def middle(self, h):
        q = h * 300
        return (q @ q.T / 90000).softmax(1) @ h  # here
    train(Net(middle))
    """,
        "aten.mm.*times the end of fp16",
    ),
    "a square by hand": (
        """
    def middle(self, h):
        h = h * 300
        return (h * h).mean(1, keepdim=True).sqrt() + h / 300  # here
    train(Net(middle))
    """,
        "aten.mul.*times the end of fp16",
    ),
    "the log of 1 - p": (
        """
    def loss_of(out, y):
        p = torch.sigmoid(out + 9)
        return -torch.log(1 - p).mean()  # here
    train(Net(), loss_of)
    """,
        "aten.log.*becomes? 0 in (bfloat16|float16)",
    ),
    "an eps that half makes 0": (
        """
    def middle(self, h):
        h = F.relu(h) * (torch.arange(16) > 2)[:, None]
        return h / (h.abs().mean(1, keepdim=True) + 1e-8)  # here
    train(Net(middle))
    """,
        "aten.div.*1e-08 becomes? 0 in fp16",
    ),
    "an eps that half makes 0, whatever p is": (
        """
    def loss_of(out, y):
        return -torch.log(torch.sigmoid(out) + 1e-8).mean()  # here
    train(Net(), loss_of)
    """,
        "aten.log.*1e-08, which is to keep it from 0, is 0 in fp16",
    ),
    "a bound that half makes 1": (
        """
    def loss_of(out, y):
        p = torch.sigmoid(out).clamp(1e-6, 1 - 1e-6)
        return -torch.log(1 - p).mean()  # here
    train(Net(), loss_of)
    """,
        "aten.log.*0.999999, its bound, is 1 in fp16",
    ),
    "x + 1 - 1": (
        """
    def middle(self, h):
        grown = h * 1e-4 + 1
        return h + (grown - 1) * 1e4  # here
    train(Net(middle))
    """,
        "aten.sub.*bfloat16",
    ),
    "a variance as a difference": (
        """
    def middle(self, h):
        h = h + 50
        spread = (h * h).mean(1) - h.mean(1) ** 2  # here
        return h / spread[:, None].clamp(min=1e-3).sqrt()
    train(Net(middle))
    """,
        "aten.sub.*bfloat16",
    ),
    "positions as numbers": (
        """
    table = nn.Linear(1, 16)
    def middle(self, h):
        places = table(torch.arange(1000.0)[:, None])  # here
        return h + places[-len(h):] / 1000
    train(Net(middle))
    """,
        "aten.addmm.*whole numbers up to 999",
    ),
    "a mask of -1e9": (
        """
    def middle(self, h):
        scores = (h @ h.T).masked_fill(torch.eye(16) > 0, -1e9)  # here
        return scores.softmax(1) @ h
    train(Net(middle))
    """,
        "aten.masked_fill.*times the end of fp16",
    ),
    "two types in one operation that torch does not cast": (
        """
    def middle(self, h):
        rows = torch.zeros(4, h.shape[1])
        rows.index_add_(0, torch.arange(len(h)) % 4, self.mix(h))  # here
        return h + rows.repeat(4, 1)
    train(Net(middle))
    """,
        "aten.index_add_.*half and fp32 together",
    ),
    "a decomposition, beside a matrix of the type of another": (
        """
    def middle(self, h):
        gram = h.T @ h
        ridge = torch.eye(len(gram), dtype=gram.dtype)
        return torch.linalg.solve(gram + ridge, self.mix(h).T).T  # here
    train(Net(middle))
    """,
        "linalg_solve.*no kernel for half",
    ),
    "angles from a product in half": (
        """
    def middle(self, h):
        times = torch.arange(len(h)) * 600.0
        angles = torch.einsum("i,j->ij", times, torch.logspace(0, -3, h.shape[1]))
        return h * angles.cos()  # here
    train(Net(middle))
    """,
        "aten.cos.*fp16 rounds angles up to 9e.03 to multiples of 8, bf16 of 64",
    ),
    "gradients that become 0": (
        """
    def loss_of(out, y):
        return F.cross_entropy(out, y) * 1e-9
    train(Net(lambda self, h: self.mix(h)), loss_of)
    """,
        "become 0 in fp16.*GradScaler",
    ),
    "gradients beyond the end": (
        """
    train(Net(lambda self, h: self.mix(h)), lambda out, y: F.cross_entropy(out, y) * 1e8)
    """,
        "backward.*times the end of fp16",
    ),
    "an overflow in fp16 that is there": (
        """
    def middle(self, h):
        return (self.mix(h * 1e4) * 1e2).clamp(-9, 9)  # here
    train(Net(middle), context=lambda: torch.autocast("cpu", torch.float16))
    """,
        "aten.mul.*times the end of fp16",
    ),
}
SQUARE = """
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x
        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0]
    """
# name: (script, words)
WRONG = {
    "a result that is written to behind autograd's back": (
        """
    def middle(self, h):
        h = torch.sigmoid(self.norm(h))  # here
        h.data.mul_(2)
        return h
    train(Net(middle))
    """,
        "SigmoidBackward0 reads a tensor that was written to",
    ),
    "a backward that writes into what it is given": (
        """
    class Swish(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x.sigmoid()
        @staticmethod
        def backward(ctx, g):
            x, s = ctx.saved_tensors[0], ctx.saved_tensors[0].sigmoid()
            return g.mul_(s * (1 + x * (1 - s)))
    train(Net(lambda self, h: h + self.mix(h) + Swish.apply(h)))  # here
    """,
        "the backward of Swish writes into the gradient",
    ),
    "a backward that takes its gradient for contiguous": (
        """
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x
        @staticmethod
        def backward(ctx, g):
            return 2 * g.as_strided(g.shape, (g.shape[1], 1))
    train(Net(lambda self, h: self.mix(Scaled.apply(h).t().contiguous()).t()))  # here
    """,
        "Scaled is given a gradient that is not contiguous",
    ),
    "a hook that writes into what it is given": (
        """
    def watch(g):
        largest.append(float(g.abs_().max()))
    largest = []
    def middle(self, h):
        branch = self.mix(h)
        branch.register_hook(watch)  # here
        return h + branch
    train(Net(middle))
    """,
        "the hook watch writes into the gradient",
    ),
    "a hook outside of modules": (
        """
    net = Net()
    def loss_of(out, y):
        out.register_hook(lambda g: None if g.neg_().any() else None)  # here
        return F.cross_entropy(out, y)
    train(net, loss_of)
    """,
        "<lambda> writes into the gradient",
    ),
    "a penalty without a graph": (
        """
    def loss_of(out, y):
        slope, = torch.autograd.grad(out.square().sum(), net.body.weight, retain_graph=True)
        penalty = (slope.norm() - 1).square()
        return F.cross_entropy(out, y) + 10 * penalty  # here
    net = Net()
    train(net, loss_of)
    """,
        "this term of the loss has no gradient: .* without create_graph=True",
    ),
    "distances of points far away": (
        """
    def loss_of(out, y):
        far = 9e3 + 3 * out
        return torch.cdist(far, far.detach().roll(1, 0)).mean()  # here
    train(Net(), loss_of, batch=lambda: data(32))
    """,
        "_euclidean_dist.*fp32 loses its result",
    ),
    "what ctx holds is written to": (
        """
    class Swish(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.x = x
            return x * x.sigmoid()
        @staticmethod
        def backward(ctx, g):
            s = ctx.x.sigmoid()
            return g * s * (1 + ctx.x * (1 - s))
    def middle(self, h):
        h = h * 1
        wide = self.mix(Swish.apply(h))  # here
        return h.add_(wide)
    train(Net(middle))
    """,
        "Swish keeps ctx.x, to which something writes",
    ),
    "a factor is missing": (
        SQUARE
        + """
    train(Net(lambda self, h: Square.apply(h)))  # here
    """,
        "Square: its backward gives",
    ),
    "the same of data, so that the step does not call it": (
        SQUARE
        + """
    train(Net(lambda self, h: h + Square.apply(torch.ones_like(h))))  # here
    """,
        "Square: its backward gives .*; no argument needs a gradient in this step",
    ),
    "the sign of the second argument": (
        """
    class Fixed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            return x.exp() - y.tanh()
        @staticmethod
        def backward(ctx, g):
            x, y = ctx.saved_tensors
            return g * x.exp(), g * (1 - y.tanh() ** 2)
    train(Net(lambda self, h: Fixed.apply(h / 9, self.mix(h))))  # here
    """,
        "Fixed: its backward gives.*argument 1",
    ),
    "a gradient that is not given": (
        """
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale):
            ctx.save_for_backward(x, scale)
            return x * scale
        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[1], None
    train(Net(lambda self, h: Scaled.apply(h, self.mix.weight.mean(1))))  # here
    """,
        "Scaled: its backward gives 0 for argument 1",
    ),
    "tanh in bf16": (
        """
    class Tanh(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x.tanh()
            ctx.save_for_backward(y)
            return y
        @staticmethod
        def backward(ctx, g):
            return g * (1 - ctx.saved_tensors[0])
    train(Net(lambda self, h: Tanh.apply(h)),  # here
          context=lambda: torch.autocast("cpu", torch.bfloat16))
    """,
        "Tanh: its backward gives",
    ),
    "a kernel that is registered": (
        """
    @torch.library.custom_op("mine::gate", mutates_args=())
    def gate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y.sigmoid()
    def keep(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return g * y.sigmoid(), g * x * y.sigmoid()
    gate.register_autograd(backward, setup_context=keep)
    train(Net(lambda self, h: gate(h, self.mix(h))))  # here
    """,
        "mine.gate.*: its backward gives.*argument 1",
    ),
    "a fused attention": (
        """
    library = torch.library.Library("aten", "IMPL")
    def kernel(g, q, k, v, out, lse, dropout_p, is_causal, *, attn_mask=None, scale=None):
        scale = scale or q.shape[-1] ** -0.5
        p = (q @ k.mT * scale).softmax(-1)
        dp = g @ v.mT
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
        return ds @ k, ds.mT @ q * 1.5, p.mT @ g
    library.impl("_scaled_dot_product_flash_attention_for_cpu_backward", kernel, "CPU")
    def middle(self, h):
        q, k, v = (part(h).view(2, 8, 2, 8).transpose(1, 2) for part in (self.q, self.mix, self.v))
        return h + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(16, 16)
    net = Net(middle)
    net.q, net.v = nn.Linear(16, 16), nn.Linear(16, 16)
    train(net)
    """,
        "gradient of mix.weight: off by",
    ),
    "a compiler": (
        """
    def backend(graph, inputs):
        def compiled(*args):
            out = graph(*args)
            for t in out:
                t.register_hook(lambda g: g * 1.2)
            return out
        return compiled
    net = Net()
    net.mix = torch.compile(net.mix, backend=backend)
    net.middle = lambda self, h: self.mix(h)
    train(net)
    """,
        "gradient of mix.*: off by 0.2",
    ),
    "a checkpoint that draws another dropout": (
        """
    def part(self, h):
        return F.dropout(self.mix(h), 0.5)
    def middle(self, h):
        return h + checkpoint(part, self, h, use_reentrant=False, preserve_rng_state=False)  # here
    train(Net(middle))
    """,
        r"draws other random numbers .*\(dropout at .*preserve_rng_state=False",
    ),
    "fp16 without a scaler": (
        """
    def middle(self, h):
        return self.mix(h)
    train(Net(middle), lambda out, y: F.cross_entropy(out.float(), y) * 1e-7,
          context=lambda: torch.autocast("cpu", torch.float16))
    """,
        "gradient of (head|mix|body).weight: off by.*too small for float16",
    ),
}
HEALTHY = {
    "dropout and BatchNorm": """
    train(Net(lambda self, h: F.dropout(self.norm(h), 0.3)), make=torch.optim.AdamW)
    """,
    "bf16 with accumulation": """
    train(Net(lambda self, h: self.norm(self.mix(h).relu())), times=3,
          context=lambda: torch.autocast("cpu", torch.bfloat16))
    """,
    "a language model": """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(50, 32), nn.Linear(32, 50, bias=False)
            self.head.weight = self.words.weight
            self.block = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True)
        def forward(self, x):
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            return self.head(self.block(self.words(x), mask, is_causal=True))
    def batch():
        words = torch.randint(50, (4, 9))
        return words[:, :-1], words[:, 1:]
    train(Model(), lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()), batch=batch,
          make=torch.optim.AdamW)
    """,
    "GradScaler in fp16": """
    net, scaler = Net(lambda self, h: self.mix(h).relu()), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)
    for step in range(4):
        x, y = data()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(net(x).float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        print(loss.item().hex())
    """,
    "a compiled net": """
    net = Net(lambda self, h: F.dropout(self.norm(self.mix(h)), 0.2))
    train(torch.compile(net, backend="aot_eager"))
    """,
    "a GAN": """
    G, D = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    g, d = torch.optim.Adam(G.parameters(), 2e-3), torch.optim.Adam(D.parameters(), 2e-3)
    for step in range(4):
        x, fake = data()[0], G(torch.randn(16, 4))
        d.zero_grad()
        (F.softplus(-D(x)) + F.softplus(D(fake.detach()))).mean().backward()
        d.step()
        g.zero_grad()
        F.softplus(-D(fake)).mean().backward()
        g.step()
        print(D(x).sum().item().hex())
    """,
    "an LSTM whose gradient is clipped": """
    net, head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)
    params = [*net.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(params)
    for step in range(4):
        x, y = data()
        loss = F.cross_entropy(head(net(x.view(16, 4, 2).repeat(1, 1, 4))[0][:, -1]), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(params, 0.1)
        optimizer.step()
        print(loss.item().hex())
    """,
    "backward passes that are a choice": """
    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.round()
        @staticmethod
        def backward(ctx, g):
            return g
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)
        @staticmethod
        def backward(ctx, g):
            return -g
    class Sign(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sign()
        @staticmethod
        def backward(ctx, g):
            return g * (ctx.saved_tensors[0].abs() < 1)
    train(Net(lambda self, h: Round.apply(h * 3) + Reverse.apply(h) + Sign.apply(h)))
    """,
    "functions of data, which have no backward": """
    class Lookup(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.exp()
        @staticmethod
        def backward(ctx, g):
            raise NotImplementedError
    class Log(Lookup):
        @staticmethod
        def backward(ctx, g):
            return None
    train(Net(lambda self, h: h + Lookup.apply(torch.ones(4)).sum() + Log.apply(torch.ones(1))))
    """,
    "functions whose backward is right": """
    class Swish(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x.sigmoid()
        @staticmethod
        def backward(ctx, g):
            s = ctx.saved_tensors[0].sigmoid()
            return g * s * (1 + ctx.saved_tensors[0] * (1 - s))
    class Clamp(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, low):
            ctx.save_for_backward(x)
            ctx.low = low
            return x.clamp(min=low)
        @staticmethod
        def backward(ctx, g):
            return g * (ctx.saved_tensors[0] > ctx.low), None
    train(Net(lambda self, h: Swish.apply(h) + Clamp.apply(h, 0.1)),
          context=lambda: torch.autocast("cpu", torch.bfloat16))
    """,
    "checkpoints": """
    def part(self, h):
        return F.dropout(self.mix(h), 0.5)
    def middle(self, h):
        h = checkpoint(part, self, h, use_reentrant=False)
        return checkpoint(part, self, h, use_reentrant=True)
    train(Net(middle))
    """,
    "masks and large numbers that stay in fp32": """
    def middle(self, h):
        scores = h @ h.T
        scores = scores.masked_fill(torch.eye(16) > 0, torch.finfo(scores.dtype).min)
        h = scores.softmax(1) @ h
        h = h + (h @ h.T).masked_fill(torch.eye(16) > 0, -torch.inf).softmax(1) @ h
        with torch.autocast("cpu", enabled=False):
            wide = h.float() * 1e4
            h = h + (wide @ wide.T).sum(1, keepdim=True) / 1e12
        return h + (h * 300).square().mean() / 1e7
    train(Net(middle))
    """,
    "autocast that is switched off": """
    half = len(fault) > 99
    def loss_of(out, y):
        return (out.float() * 1e4).square().mean() / 1e8 + torch.log(1 - out.sigmoid() / 2).mean()
    net = Net(lambda self, h: self.norm(h))
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)
    for step in range(4):
        x, y = data()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            out = net(x)
        weights = torch.full((16, 4), 7e4)
        loss = loss_of(out, y) + ((out.float() @ weights.T) @ weights).mean() / 1e12
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item().hex())
    """,
    "a small scale for each branch": """
    def middle(self, h):
        return h + self.mix(h) * self.scale
    net = Net(middle)
    net.scale = nn.Parameter(torch.full((16,), 1e-6))
    train(net, make=torch.optim.AdamW)
    """,
}
# healthy scripts that look like a fault
LOOK_ALIKES = {
    "a data set that computes": """
    class Mel(nn.Module):
        def __init__(self):
            super().__init__()
            n = torch.arange(512.0)
            self.register_buffer("basis", torch.cos(n[:, None] @ n[None] / 512))
            self.register_buffer("bank", torch.rand(512, 8))
        def forward(self, x):
            return (x @ self.basis) ** 2 * 1e3 @ self.bank
    mel = Mel()
    table = torch.arange(1000.0)[:, None] @ torch.arange(1000.0)[None]
    train(Net(), batch=lambda: (mel(torch.randn(16, 512)).log(), torch.randint(4, (16,))))
    """,
    "islands in a run that is in bf16": """
    def middle(self, h):
        with torch.autocast("cpu", enabled=False):
            wide = h.float() * 1e4
            total = (wide @ wide.T).sum(1, keepdim=True) / 1e12
        return h + total + torch.log(1 - h.float().sigmoid() / 2)
    train(Net(middle), context=lambda: torch.autocast("cpu", torch.bfloat16))
    """,
    "a learnt step of a quantiser": """
    class Quantise(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, s):
            ctx.save_for_backward(x, s)
            return (x / s).clamp(-8, 7).round() * s
        @staticmethod
        def backward(ctx, g):
            x, s = ctx.saved_tensors
            q = x / s
            inside = (q > -8) & (q < 7)
            return g * inside, (g * torch.where(inside, q.round() - q, q.clamp(-8, 7))).sum()
    net = Net(lambda self, h: Quantise.apply(h, self.step))
    net.step = nn.Parameter(torch.tensor(0.1))
    train(net)
    """,
    "a norm that casts itself": """
    def middle(self, h):
        kind = h.dtype
        wide = (h * 200).to(torch.float32)
        wide = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)
        return self.mix(wide.to(kind))
    train(Net(middle))
    """,
    "weights by gradients, a hook that observes": """
    def loss_of(out, y):
        out.register_hook(lambda g: seen.append(float(g.abs().max())))
        first, second = F.cross_entropy(out, y), out.square().mean()
        norms = [torch.autograd.grad(t, net.body.weight, retain_graph=True)[0].norm()
                 for t in (first, second)]
        return first + norms[0] / norms[1] * second - 0.5 * out.mean()
    net, seen = Net(), []
    train(net, loss_of)
    """,
    "LBFGS": """
    net, (x, y) = Net(), data()
    optimizer = torch.optim.LBFGS(net.parameters(), 0.1, max_iter=4)
    for step in range(4):
        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            return loss
        print(optimizer.step(closure).item().hex())
    """,
    "a gradient penalty and two optimizers": """
    emb, net = nn.Embedding(50, 8, sparse=True), Net()
    both = torch.optim.SparseAdam(emb.parameters()), torch.optim.Adam(net.parameters())
    for step in range(4):
        x = emb(torch.randint(50, (16, 3))).mean(1)
        out = net(x)
        slope, = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = (slope.norm(dim=1) - 1).square().mean() + out.square().mean()
        for optimizer in both:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in both:
            optimizer.step()
        print(loss.item().hex())
    """,
}
HEALTHY |= LOOK_ALIKES
# of what autocast makes half (h), of a convolution (c), and of what is in fp32: x, w, b, i ...
CALLS = """
h * h; h.square(); h ** 0.5; h.mean(); h.sum(1); h.nansum(); h.softmax(1); F.gelu(h); h.norm(dim=1)
torch.linalg.vector_norm(h); F.mse_loss(h, h * 2); F.l1_loss(h, h * 2); F.smooth_l1_loss(h, h * 2)
F.cross_entropy(h, i); F.binary_cross_entropy_with_logits(h, h.sigmoid())
F.kl_div(h, h, reduction="sum")
F.layer_norm(h, (8,)); F.group_norm(h[:, :, None], 2); F.rms_norm(h, (8,)); h.var(); h.std(1)
F.batch_norm(h, m, m + 1, training=True); F.instance_norm(c); h.cumsum(0); h.prod(); h.sqrt()
h.rsqrt(); 1 / h; h / h; h / 3; h.logsumexp(1); F.normalize(h); F.cosine_similarity(h, h)
torch.cdist(h, h); torch.outer(h[0], h[0]); torch.dot(h[0], h[0]); torch.einsum("i,j->ij", b, b)
torch.bmm(x[None], w[None]); torch.addmm(x, x, w); torch.mv(w, x[0]); F.linear(x, w, b)
F.conv2d(p, k); F.conv_transpose2d(p, k); F.prelu(x, b[:1]); F.embedding(i, w); F.mish(h)
F.scaled_dot_product_attention(q, q, q); F.interpolate(c, scale_factor=2.0, mode="bilinear")
F.interpolate(c, scale_factor=2.0); F.max_pool2d(c, 2); F.avg_pool2d(c, 2); F.dropout(h, 0.5)
F.relu(h); F.softplus(h); F.logsigmoid(h); torch.sigmoid(h); torch.tanh(h); h + x; h + 1; h * b
torch.cat([h, h]); torch.cat([h, x]); torch.where(h > 0, h, 0.0); h.masked_fill(h > 0, -1.0)
h.exp(); h.log(); h.log1p(); h.sin(); h.tan(); h.amax(1); h.topk(2)[0]; h.gather(1, i[:, None])
torch.addcmul(h, h, h); torch.addcmul(x, h, h); torch.tensordot(x, x, 2); F.pad(h, (1, 1)); h[i]
F.grid_sample(c, g, align_corners=False)
F.triplet_margin_loss(h, h, h); F.multi_margin_loss(h, i); h.double() * 2
torch.logaddexp(h, h); h.float().mean(); h.float() * h; x * 2; x.exp() * h; h.mean() * 3 + 1
h.mean() * b; nn.TransformerEncoderLayer(8, 2, 16, 0.0, device=h.device)(x[None])
torch.linalg.multi_dot([x, w, w]); torch.matmul(q, q.mT); torch.ones_like(h) * h; F.glu(h)
"""


class Followed(TorchDispatchMode):
    """Each operation is shown to AutocastRules, as --would-overflow does."""

    def __init__(self, halves):
        super().__init__()
        self.halves = halves

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        given, made = (
            [t for t in flat_tensors(tree) if t.is_floating_point()]
            for tree in ((args, kwargs), out)
        )
        self.halves.runs_in_half(func._schema.name.partition("::")[2].strip("_"), given, made)
        return out


def names(device):
    """What the calls are made of."""

    def weight(*shape):
        return torch.ones(*shape, device=device).requires_grad_()

    x, w, b = weight(4, 8), weight(8, 8), weight(8)
    p, k = weight(2, 3, 8, 8), weight(3, 3, 3, 3)
    q, g = weight(2, 2, 4, 8), weight(2, 4, 4, 2)
    m, i = torch.zeros(8, device=device), torch.zeros(4, dtype=torch.int64, device=device)
    h, c = x @ w, F.conv2d(p, k)
    return globals() | locals()


@pytest.mark.skipif(torch.__version__ < "2.14", reason="2.9 aborts: no GPU for fake tensors")
@pytest.mark.parametrize("call", re.split(r";|\n", CALLS.strip()))
def test_the_rules_are_those_of_autocast_on_cuda(call):
    """Asked of torch itself: fake tensors need no GPU."""
    call = call.strip()
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.float16)
    try:
        with FakeTensorMode():
            real = eval(call, names("cuda")).dtype is torch.float16
    finally:
        torch.set_autocast_enabled("cuda", False)
    halves = AutocastRules()
    with halves, Followed(halves):
        assert halves.is_half(eval(call, names("cpu"))) == real


def script(text):
    return BEGINS + textwrap.dedent(text)


# Healthy scripts that write in place, or draw, within a step: only --check-gradients repeats it.
WRITES = {
    "rows, parts and views of views": """
    def batch(n=16):
        x, y = data(n)
        hot = torch.zeros(n, 8)
        hot[torch.arange(n), torch.randint(8, (n,))] = 1
        part, rest = x.chunk(2)
        part.mul_(3)
        rest[0] = 1
        y.view(4, 4)[1:][0].fill_(2)
        for row in hot.unbind()[:3]:
            row.copy_(torch.randn(8))
        x.T.masked_fill_(torch.rand(8, n) < 0.2, 2.0)
        x.data[:, 3] = 1
        x.detach()[1].add_(1)
        torch.mul(torch.randn(8), 2.0, out=hot[5])
        return x + hot, y
    train(Net(), batch=batch)
    """,
    "a scan, a mask and a table of the script": """
    def middle(self, h):
        out, mask = torch.zeros(len(h), 3, 16), torch.zeros(len(h), 3)
        for t in range(3):
            h = torch.tanh(self.mix(h))
            out[:, t] = h
        for row, n in enumerate(torch.randint(1, 4, (len(h),)).tolist()):
            mask[row, n:] = -torch.inf
        weights = (out.sum(2) + mask).softmax(1)
        return (weights[..., None] * out).sum(1) + self.table
    net = Net(middle)
    net.table = torch.zeros(16)
    net.table[3:5] = 1
    train(net)
    """,
    "a rollout buffer and a state that moves on": """
    net, state = Net(), torch.randn(4, 8)
    seen, rows = torch.zeros(8, 4, 8), torch.zeros(8, 4, dtype=torch.long).unbind()
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)
    for step in range(4):
        early = net(seen.view(-1, 8) * 1.0)
        for t in range(8):
            seen[t] = state
            with torch.no_grad():
                a = torch.distributions.Categorical(logits=net(state)).sample()
            rows[t].copy_(a)
            state[torch.arange(4), a] += 1
            state[:, 5].mul_(0.5)
        chance = torch.distributions.Categorical(logits=net(seen.view(-1, 8)))
        loss = early.square().mean() - chance.log_prob(torch.stack(rows).view(-1)).mean()
        state.view(-1)[:3] = 0
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item().hex())
    """,
    "a cache and a counter in a module": """
    def middle(self, h):
        self.count += 1
        for k in range(4):
            self.cache[:, k] = h.detach() * (k + self.count)
        return h + self.mix(self.cache.clone()).mean(1)
    net = Net(middle)
    net.cache, net.count = torch.zeros(16, 4, 16), torch.zeros(1)
    train(net)
    """,
    "numbers that are drawn like a tensor": """
    def middle(self, h):
        mean, scale = h.chunk(2, 1)
        z = mean + torch.randn_like(mean) * scale.exp() + torch.empty_like(mean).normal_()
        normal = torch.distributions.Normal(mean, F.softplus(scale) + 0.1)
        return torch.cat([z, F.gumbel_softmax(normal.rsample(), 0.5, hard=True)], 1)
    train(Net(middle))
    """,
    "checkpoints without a random number": """
    def middle(self, h):
        again = checkpoint(self.mix, h, use_reentrant=False, preserve_rng_state=False)
        h = F.dropout(again, 0.5)
        return checkpoint(self.mix, h, use_reentrant=True, preserve_rng_state=False)
    train(Net(middle))
    """,
}
QUESTIONS = {"--would-overflow": OVERFLOWS, "--check-gradients": WRONG}
BOTH = pytest.mark.parametrize("question", QUESTIONS)


@needs_unix
@pytest.mark.parametrize(
    ("question", "name"),
    [(question, name) for question, faults in QUESTIONS.items() for name in faults],
)
def test_the_fault_is_named_first_with_its_line_and_its_number(run, question, name):
    text, words = QUESTIONS[question][name]
    text = script(text)
    bare, done = run(text, watched=False), run(text, before=(question,))
    assert done.returncode == 3, done.stderr
    assert bare.returncode == 0 and bare.stdout.startswith(done.stdout) and done.stdout
    first = done.stderr.partition("autopsy: ")[2].splitlines()[1]  # under the heading
    assert re.search(words, first), done.stderr
    assert all(f"script.py:{line} " in first for line in lines_of(text, "here")), done.stderr
    assert len(done.stderr.splitlines()) <= 12, done.stderr


@needs_unix
@pytest.mark.parametrize(
    ("name", "question"),
    [(name, question) for name in HEALTHY for question in QUESTIONS]
    + [(name, "--check-gradients") for name in WRITES],
)
def test_no_healthy_script_is_accused(run, name, question):
    text = script((HEALTHY | WRITES)[name])
    bare, done = run(text, watched=False), run(text, before=(question,))
    assert bare.returncode == 0, bare.stderr
    assert done.returncode == 0, done.stderr
    assert bare.stdout.startswith(done.stdout) and done.stdout


GRADIENT = {"w": torch.ones(2)}
MEASURED = Measured(True, [], "fp64", GRADIENT, GRADIENT, {"w": 0.1})
OFF = {"beyond": ["w"], "way": Way.EAGER}
DECISIONS = [  # what else was measured: the answer, its exit code, the way to look at
    ({}, Answer.RIGHT, 0, None),
    ({"repeats": False}, Answer.OTHER_STEP, 4, None),
    ({"repeats": False, "causes": ["a checkpoint"]}, Answer.WRONG, 3, None),
    (OFF, Answer.WRONG, 3, Way.EAGER),
    ({**OFF, "other_draws": True}, Answer.OTHER_DRAWS, 4, None),
    ({**OFF, "other_draws": True, "unknown": ["f"]}, Answer.OTHER_DRAWS, 4, None),
    ({**OFF, "other_draws": True, "causes": ["a hook"]}, Answer.WRONG, 3, None),
    ({"zeros": ["w"]}, Answer.WRONG, 3, None),
    ({"rounded": ["w"], "unknown": ["f"]}, Answer.WRONG, 3, None),
    ({"unknown": ["f"]}, Answer.UNKNOWN, 4, None),
]


@pytest.mark.parametrize(("changed", "answer", "code", "way"), DECISIONS)
def test_the_answer_follows_from_what_was_measured_and_its_words_from_the_answer(
    changed, answer, code, way
):
    measured = MEASURED._replace(**changed)
    assert decide(measured) == (answer, way) and answer.code == code
    text = in_words(answer, way, measured)
    assert text.startswith("a gradient is wrong") == (code == 3)
    assert ("othing is known" in text) == (code == 4)
    assert ("it is right without compiled code" in text) == (way is Way.EAGER)
    assert all(cause in text for cause in measured.causes)
    assert ("gradient of w: off by" in text) == bool(
        measured.wrong or measured.zeros or measured.rounded
    )


ENDS = script("""
    if fault == "raises":
        raise ValueError("mine")
    if fault == "leaves":
        sys.exit(7)
    if fault == "nan":
        train(Net(lambda self, h: h / (h - h)))
    net = Net()
    print(net(data()[0]).sum().item().hex())
""")


@needs_unix
@BOTH
def test_without_a_step_nothing_is_known_and_a_script_keeps_its_exit_code(run, question, tmp_path):
    done = run(ENDS, before=(question,))
    assert done.returncode == 4 and "nothing is known" in done.stderr
    assert run(ENDS, "leaves", before=(question,)).returncode == 7
    done = run(ENDS, "raises", before=(question,))
    assert done.returncode == 1 and "ValueError: mine" in done.stderr
    assert not (tmp_path / "autopsy.txt").exists()


@needs_unix
def test_a_nan_before_the_step_is_told_and_old_gradients_are_no_fault(run, tmp_path):
    done = run(ENDS, "nan", before=("--check-gradients", "2"))
    assert done.returncode == 3 and "aten.div" in done.stderr
    assert "aten.div" in (tmp_path / "autopsy.txt").read_text()
    text = script("""
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), 1e-2)
        for step in range(4):
            F.cross_entropy(net(data()[0]), data()[1]).backward()
            optimizer.step()
    """)
    done = run(text, before=("--check-gradients",))
    assert done.returncode == 4 and "old ones that were not set to 0" in done.stderr


@needs_unix
@pytest.mark.parametrize("outer", (False, True))
@pytest.mark.parametrize("reentrant", (False, True))
def test_a_checkpoint_that_draws_again_is_named_with_the_dropout(run, reentrant, outer):
    """`outer`: the checkpoint stands outside of all modules."""
    text = script(f"""
        def part(h):
            return F.dropout(net.mix(h), 0.5)
        def again(h):
            return checkpoint(part, h, use_reentrant={reentrant}, preserve_rng_state=False)  # here
        net = Net(lambda self, h: {"h" if outer else "again(h)"})
        train(net, lambda out, y: F.cross_entropy(again(out.repeat(1, 4)) if {outer} else out, y))
    """)
    done = run(text, before=("--check-gradients",))
    [line] = lines_of(text, "here")
    assert done.returncode == 3, done.stderr
    assert f"script.py:{line} in again: in the backward this checkpoint draws" in done.stderr
    assert re.search(r"\(dropout at .* in part\).*preserve_rng_state=False", done.stderr)


@needs_unix
def test_a_function_that_cannot_be_compared_is_no_reassurance(run):
    """Its forward uses weights of its own, of which it gives the gradient."""
    done = run(
        script("""
        class Again(torch.autograd.Function):
            @staticmethod
            def forward(ctx, run, x, *params):
                ctx.run, ctx.params = run, params
                ctx.save_for_backward(x)
                return run(x)
            @staticmethod
            def backward(ctx, g):
                x = ctx.saved_tensors[0].detach().requires_grad_()
                with torch.enable_grad():
                    out = ctx.run(x)
                return None, *torch.autograd.grad(out, (x, *ctx.params), g)
        train(Net(lambda self, h: Again.apply(self.mix, h, *self.mix.parameters())))
    """),
        before=("--check-gradients",),
    )
    assert done.returncode == 4 and "not compared, so that nothing is known: Again" in done.stderr


NOISE = (
    PREAMBLE
    + """
import numpy as np
own = np.random.default_rng(0)

class Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        draw = own.standard_normal if fault == "own" else np.random.standard_normal
        return x + 0.3 * torch.from_numpy(draw(tuple(x.shape))).to(x.dtype)  # noise

    @staticmethod
    def backward(ctx, grad):
        return grad

net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.SGD(net.parameters(), 0.05)
for step in range(6):
    x = torch.randn(16, 8)
    loss = F.cross_entropy(net(Noise.apply(x)), x[:, :3].argmax(1))
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
)


@needs_unix
@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("own", 4, "the forward of Noise (script.py:"),
        ("NumPy's", 0, "the gradients of 4 tensors are those of the step"),
    ],
)
def test_a_function_that_is_not_repeatable_is_named(run, fault, code, words):
    """The state of NumPy's own generator is put back, that of another one is not known."""
    done = run(NOISE, fault, before=["--check-gradients"])
    assert done.returncode == code, done.stderr
    assert words in done.stderr, done.stderr
    assert "changed by hand" not in done.stderr


@needs_unix
def test_the_number_of_steps_stands_before_the_script(run):
    text = script(OVERFLOWS["a square by hand"][0])
    for steps in (1, 2):
        done = run(text, before=("--would-overflow", str(steps)))
        assert f" of {steps} step" in done.stderr and len(done.stdout.splitlines()) == steps - 1
    done = run(text, before=("--check-gradients", "3"))
    assert "step 3: " in done.stderr and len(done.stdout.splitlines()) == 3
