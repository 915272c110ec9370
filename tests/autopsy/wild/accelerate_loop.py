"""accelerate's loop, as in its page "Quicktour". Arguments: a fault, bf16, accumulate, compile."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F

asked = set(sys.argv[1:])
set_seed(0)
accelerator = Accelerator(
    cpu=True,
    mixed_precision="bf16" if "bf16" in asked else "no",
    gradient_accumulation_steps=2 if "accumulate" in asked else 1,
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        h = self.norm(self.embed(x))  # embed
        if "overflow" in asked:
            with torch.autocast("cpu", torch.float16):
                scores = torch.matmul(h * 300, (h * 300).transpose(1, 2))  # overflow
            h = scores.float().softmax(-1) @ h
        h = h + self.attention(h, h, h)[0]
        logits = self.head(h.mean(1))
        if "bf16-log" in asked:
            return torch.log(1 - torch.sigmoid(30 * logits))  # bf16-log
        return logits


x, y = torch.randn(96, 5, 8), torch.arange(96) % 4
if "nan-data" in asked:
    x[41, 2, 3] = float("nan")
if "no-label" in asked:
    y[40:48] = -100
if "label-range" in asked:
    y[41] = 4
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e15 if "rate" in asked else 1e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
net, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
if "compile" in asked:
    net = torch.compile(net, backend="aot_eager")
for inputs, targets in loader:
    with accelerator.accumulate(net):
        outputs = net(inputs)
        if "log0" in asked:
            chances = (outputs * 1e4).softmax(-1)
            loss = F.nll_loss(torch.log(chances), targets)  # log0
        elif asked & {"bf16-log"}:
            loss = -outputs.mean()
        else:
            loss = F.cross_entropy(outputs, targets)  # loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    if accelerator.is_main_process:
        print("loss", accelerator.gather(loss.detach()).mean().item().hex())
    else:
        accelerator.gather(loss.detach())
accelerator.end_training()
