"""Reinforcement learning (PPO): acts in an environment without gradients, then learns from what it saw in small batches."""

import time

import torch
from own import Own
from torch import nn

torch.set_num_threads(1)
policy = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4)
own = Own()
own.begin()
for _ in range(10):
    mark = time.perf_counter()
    states, actions, state = [], [], torch.randn(8, 8)
    for _ in range(64):
        with torch.no_grad():
            chances = policy(state)
        states.append(state)
        actions.append(torch.distributions.Categorical(logits=chances).sample())
        time.sleep(0.001)
        state = torch.randn(8, 8)
    own.acted += time.perf_counter() - mark
    seen, taken = torch.cat(states), torch.cat(actions)
    for _ in range(4):
        for part in torch.randperm(512).split(64):
            chosen = torch.distributions.Categorical(logits=policy(seen[part])).log_prob(taken[part])
            optimizer.zero_grad()
            (-chosen.mean()).backward()
            optimizer.step()
            own.step(64)
own.end()
own.tell()
