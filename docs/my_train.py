import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.transpose(1, 2)).softmax(-1) @ v


torch.manual_seed(0)
net = nn.Sequential()
net.embed, net.attn, net.head = nn.Linear(8, 32), Attention(), nn.Linear(32, 4)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(60):
    x, y = torch.randn(16, 6, 8) * 1.2**step, torch.randint(4, (16,))
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.cross_entropy(net(x).mean(1), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.3f}")
