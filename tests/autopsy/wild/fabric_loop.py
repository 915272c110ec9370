"""Lightning Fabric's loop, as in its page "Convert PyTorch code to Fabric". Arguments: a fault,
bf16, accumulate."""

import sys

import lightning
import torch
from torch import nn
from torch.nn import functional as F

asked = set(sys.argv[1:])
precision = "bf16-mixed" if "bf16" in asked else "32-true"
fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
fabric.launch()
fabric.seed_everything(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.decoder = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x):
        logits = self.decoder(self.encoder(x))  # net
        if "bf16-log" in asked:
            return torch.log(1 - torch.sigmoid(30 * logits))  # bf16-log
        return logits


x = torch.randn(96, 8)
y = torch.arange(96) % 4
if "nan-data" in asked:
    x[41, 3] = float("nan")
if "no-label" in asked:
    y[40:48] = -100

data = torch.utils.data.TensorDataset(x, y)
loader = torch.utils.data.DataLoader(data, batch_size=8)

net = Net()
rate = 1e15 if "rate" in asked else 0.05
optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9)
net, optimizer = fabric.setup(net, optimizer)
loader = fabric.setup_dataloaders(loader)
if "nan-weight" in asked:
    with torch.no_grad():
        net.decoder[2].weight.data[1, 2] = float("nan")  # nan-weight

every = 2 if "accumulate" in asked else 1
for i, (inputs, targets) in enumerate(loader):
    with fabric.no_backward_sync(net, enabled=(i + 1) % every != 0):
        outputs = net(inputs)
        if "log0" in asked:
            loss = F.nll_loss(torch.log((outputs * 1e4).softmax(-1)), targets)  # log0
        elif "root" in asked:
            loss = torch.sqrt((outputs * 0).square().sum(-1)).mean()  # root
        elif "bf16-log" in asked:
            loss = -outputs.mean()
        else:
            loss = F.cross_entropy(outputs, targets)  # loss
        fabric.backward(loss / every)

    if (i + 1) % every == 0:
        fabric.clip_gradients(net, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    fabric.print("loss", loss.item().hex())
