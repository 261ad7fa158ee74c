"""A critic takes two steps on each batch, with samples drawn without gradients, and its generator one."""

import torch
from own import Own
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
generator = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 256))
critic = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
draws, judges = (torch.optim.Adam(model.parameters(), 2e-4) for model in (generator, critic))
own = Own()
own.begin()
for (real,) in DataLoader(TensorDataset(torch.randn(6400, 256)), batch_size=32):
    for _ in range(2):
        with torch.no_grad():
            drawn = generator(torch.randn(32, 16))
        judges.zero_grad()
        (critic(drawn) - critic(real)).mean().backward()
        judges.step()
    draws.zero_grad()
    (-critic(generator(torch.randn(32, 16)))).mean().backward()
    draws.step()
    own.step(32)
own.end()
own.tell()
