"""torchao: an 8-bit optimizer, weights that are fake-quantised in training, or float8 training.
Arguments: a fault, qat."""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
from torchao.quantization.qat import QATConfig

asked = set(sys.argv[1:])
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(64, 128),
    nn.LayerNorm(128),
    nn.GELU(),
    nn.Linear(128, 128),
    nn.GELU(),
    nn.Linear(128, 4),
)
if "qat" in asked:
    base = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4)
    quantize_(model, QATConfig(base, step="prepare"))

kind = {"4bit": AdamW4bit, "fp8": AdamWFp8}
chosen = [kind[name] for name in asked & kind.keys()] or [AdamW8bit]
rate = 1e15 if "rate" in asked else 1e-3
optimizer = chosen[0](model.parameters(), lr=rate)

x = torch.randn(96, 64)
y = torch.arange(96) % 4
if "nan-data" in asked:
    x[41, 3] = float("nan")  # nan-data
if "no-label" in asked:
    y[40:48] = -100

for i in range(0, 96, 8):
    output = model(x[i : i + 8])  # model
    if "log0" in asked:
        loss = F.nll_loss(torch.log((output * 1e4).softmax(-1)), y[i : i + 8])  # log0
    else:
        loss = F.cross_entropy(output, y[i : i + 8])  # loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item().hex())
