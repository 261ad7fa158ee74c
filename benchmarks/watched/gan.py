"""Two optimizers in each step."""

import torch
from own import Own
from parts import Pictures
from torch import nn
from torch.utils.data import DataLoader

generator = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 768), nn.Tanh())
critic = nn.Sequential(nn.Linear(768, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4)
of_critic = torch.optim.Adam(critic.parameters(), lr=2e-4)
binary = nn.BCEWithLogitsLoss()
own = Own()
for _ in range(2):
    own.begin()
    for images, _targets in DataLoader(Pictures(800), batch_size=8):
        own.got()
        real = images.flatten(1)
        fake = generator(torch.randn(len(real), 16))
        of_critic.zero_grad()
        loss = binary(critic(real), torch.ones(len(real), 1)) + binary(critic(fake.detach()), torch.zeros(len(real), 1))
        loss.backward()
        of_critic.step()
        of_generator.zero_grad()
        binary(critic(fake), torch.ones(len(real), 1)).backward()
        of_generator.step()
        own.step(len(images))
    own.end()
own.tell()
