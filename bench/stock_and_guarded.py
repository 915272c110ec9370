"""
One bad batch: what PyTorch's own AMP recipe keeps of it, and what the guarded loop keeps.

    python bench/stock_and_guarded.py        a few seconds on a CPU; then python bench/figures.py

A small convnet with BatchNorm trains in fp16. The batch of step 20 is in the wrong units: finite,
and too large for fp16. Both loops skip that step. The stock loop is that of PyTorch's AMP tutorial:
autocast, GradScaler, unscale_, clip_grad_norm_. Same start, same batches. After every step both
are evaluated in fp32.
"""

import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench import record
from failures.loops import images
from guards import Guard

STEPS, BAD_STEP = 40, 20
WRONG_UNITS = 6e4  # times a pixel of about 1: 65504 is fp16's largest


def network():
    return nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
                         nn.Linear(8 * 64, 10))  # fmt: skip


def batch(step):
    """Sixteen images around the same ten patterns; those of the bad step in the wrong units."""
    x, y = images(16)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(step))
    x = x + 0.5 * noise
    return (x * WRONG_UNITS if step == BAD_STEP else x), y


@torch.no_grad()
def evaluated(net):
    x, y = batch(0)
    loss = F.cross_entropy(net.eval()(x), y).item()
    net.train()
    return loss


def number(x):
    """JSON has no NaN."""
    return x if math.isfinite(x) else None


def run(guarded, device):
    """The curves of one loop, and which of its tensors are not finite at the end."""
    torch.manual_seed(0)
    net = network().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    guard = Guard(net)
    train, evaluations = [], []
    for step in range(1, STEPS + 1):
        x, y = (t.to(device) for t in batch(step))
        with torch.autocast(device.type, torch.float16):
            logits = net(x)
        loss = F.cross_entropy(logits.float(), y)
        scaler.scale(loss).backward()
        if guarded:
            guard.step(optimizer, scaler, clip=1.0)
        else:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        train.append(number(loss.item()))
        evaluations.append(number(evaluated(net)))
    bad = [name for name, t in net.state_dict().items() if not t.isfinite().all()]
    return {"train": train, "evaluation": evaluations, "not finite": bad}


def main(argv=None):
    parser = record.arguments(__doc__)
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    head = record.header("stock_and_guarded", args) | {"bad step": BAD_STEP}
    head |= {"stock": run(False, device), "guarded": run(True, device)}
    for name in ("stock", "guarded"):
        last, bad = head[name]["evaluation"][-1], head[name]["not finite"]
        print(f"{name}: evaluation {last} after {STEPS} steps, not finite: {bad}")
    record.write(head, args, samples=("stock", "guarded"))


if __name__ == "__main__":
    main()
