"""nanoGPT's loop: a batch from a function between the forward and the backward pass, accumulation, validation now and then."""

import time

import torch
from own import Own
from torch import nn

torch.set_num_threads(1)
data = torch.randint(0, 64, (50_000,))
model = nn.Sequential(nn.Embedding(64, 32), nn.Flatten(), nn.Linear(32 * 32, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def get_batch():
    starts = torch.randint(len(data) - 33, (16,))
    time.sleep(0.002)
    return torch.stack([data[at : at + 32] for at in starts]), data[starts + 32]


@torch.no_grad()
def estimate_loss():
    model.eval()
    for _ in range(30):
        batch, targets = get_batch()
        nn.functional.cross_entropy(model(batch), targets)
    model.train()


def timed_batch():
    own.wants()
    found = get_batch()
    own.got()
    return found


own = Own()
batch, targets = get_batch()
for number in range(120):
    if number % 40 == 0:
        mark = time.perf_counter()
        estimate_loss()
        own.validated += time.perf_counter() - mark
    own.begin()
    for _ in range(2):
        loss = nn.functional.cross_entropy(model(batch), targets) / 2
        batch, targets = timed_batch()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    own.step(32)
    own.end()
own.tell()
