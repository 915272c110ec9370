"""torch's page "Fault-tolerant Distributed Training with torchrun". Arguments: a fault, on rank 1
alone."""

import gc
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

asked = set(sys.argv[1:])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
net = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
for step in range(6):
    x, y = torch.randn(8, 8), torch.arange(8) % 4
    if "nan-data" in asked and rank == 1 and step == 3:
        x[5, 2] = torch.nan  # nan-data
    loss = nn.functional.cross_entropy(net(x), y)  # loss
    if "log0" in asked and rank == 1 and step == 3:
        loss = loss + torch.log(loss * 0)  # log0
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print("loss", loss.item().hex(), flush=True)
del net, optimizer, loss  # the end of a group may abort while a DistributedDataParallel holds it
gc.collect()
dist.destroy_process_group()
