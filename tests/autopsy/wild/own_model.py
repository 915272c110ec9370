"""transformers' Trainer with a network of one's own (a forward that returns a dict). Arguments: a
fault, bf16, accumulate."""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments

asked = set(sys.argv[1:])
torch.manual_seed(0)


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        if "overflow" in asked:
            with torch.autocast("cpu", torch.float16):
                scores = (q * 1000) @ (k * 1000).transpose(-1, -2)  # overflow
        else:
            scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        return self.out(scores.float().softmax(-1) @ v.float())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.attention = Attention(16)
        self.head = nn.Linear(16, 1)

    def forward(self, x, labels):
        h = self.embed(x)  # embed
        h = h + self.attention(h)
        logits = self.head(h.mean(1)).squeeze(-1)
        if asked & {"bf16-log", "log-loss"}:
            p = torch.sigmoid(logits * (60 if "bf16-log" in asked else 1))
            loss = -(labels * torch.log(p) + (1 - labels) * torch.log(1 - p)).mean()  # bf16-log
        else:
            loss = F.binary_cross_entropy_with_logits(logits, labels)
        return {"loss": loss, "logits": logits}


rows = [{"x": torch.randn(5, 8), "labels": float(i % 2)} for i in range(48)]
if "nan-data" in asked:
    rows[22]["x"][1, 3] = float("nan")
arguments = TrainingArguments(
    "saved",
    per_device_train_batch_size=4,
    num_train_epochs=1,
    learning_rate=1e-3,
    bf16="bf16" in asked,
    gradient_accumulation_steps=2 if "accumulate" in asked else 1,
    train_sampling_strategy="sequential",
    save_strategy="no",
    logging_steps=2,
    use_cpu=True,
    report_to=[],
)
net = Net()
trainer = Trainer(model=net, args=arguments, train_dataset=rows)
trainer.train()  # train
print("weights", sum(p.double().abs().sum() for p in net.parameters()).item().hex())
