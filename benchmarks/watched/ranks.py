"""Two ranks: under torchrun, or spawned by itself."""

import os
import sys

import torch
import torch.distributed as dist
from own import Own
from parts import Pictures, loss_of, small_model
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def train(rank=None, store=None):
    if rank is None:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{store}")
    model = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = Pictures(1600)
    own = Own()
    own.begin()
    for images, targets in DataLoader(data, batch_size=8, sampler=DistributedSampler(data)):
        own.got()
        optimizer.zero_grad()
        loss_of(model(images), targets).backward()
        optimizer.step()
        own.step(len(images))
    own.end()
    if dist.get_rank() == 0:
        own.tell(ranks=2)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "--spawn" in sys.argv:
        torch.multiprocessing.spawn(train, args=(os.path.abspath(sys.argv[-1]),), nprocs=2)
    else:
        train()
