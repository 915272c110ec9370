"""torch's page "Getting Started with DDP": mp.spawn starts the ranks. Arguments: a fault."""

import os
import sys

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

asked = set(sys.argv[1:])


def train(rank, world_size):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "29517"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(rank)
    net = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(6):
        x, y = torch.randn(8, 8), torch.arange(8) % 4
        loss = nn.functional.cross_entropy(net(x), y)
        if "log0" in asked and rank == 1 and step == 3:
            loss = loss + torch.log(loss * 0)  # log0
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print("loss", loss.item().hex(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    multiprocessing.spawn(train, args=(2,), nprocs=2)
