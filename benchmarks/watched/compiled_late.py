"""A model that is compiled after its optimizer was made, without a loader."""

import torch
from own import Own
from torch import nn

torch.set_num_threads(1)
model: nn.Module = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model = torch.compile(model)


def step(size: int) -> None:
    optimizer.zero_grad()
    model(torch.randn(size, 64)).square().mean().backward()
    optimizer.step()


step(32)  # compiles
own = Own()
own.skipped = 1
own.begin()
for _ in range(400):
    step(32)
    own.step(32)
own.end()
own.tell()
