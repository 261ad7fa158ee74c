"""An agent that learns after each episode (REINFORCE): its policy is fed one state at a time, without a batch."""

import torch
from own import Own
from torch import nn

torch.set_num_threads(1)
policy = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
own = Own()
own.begin()
for episode in range(200):
    chances, length = [], 10 + episode % 7
    for _ in range(length):
        chances.append(policy(torch.randn(4)).log_softmax(-1)[0])
    optimizer.zero_grad()
    (-torch.stack(chances).sum()).backward()
    optimizer.step()
    own.step(length)
own.end()
own.tell()
