"""torch's page "Getting Started with DDP": mp.spawn starts the ranks. Arguments: a fault."""

import sys
import tempfile

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

asked = set(sys.argv[1:])


def train(rank, world_size, meeting):
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
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
    with tempfile.TemporaryDirectory() as folder:  # the page's port is fixed: two runs would meet
        multiprocessing.spawn(train, args=(2, f"file://{folder}/meeting"), nprocs=2)
