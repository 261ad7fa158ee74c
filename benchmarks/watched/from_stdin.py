"""Reads how long to train from stdin, and shows its progress with carriage returns; the batch grows half-way."""

import sys

import torch
from own import Own
from parts import Pictures, loss_of, small_model
from torch.utils.data import DataLoader

count = int(sys.stdin.readline())
model = small_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
own = Own()
for batch in (4, 16):
    own.begin()
    for images, targets in DataLoader(Pictures(count), batch_size=batch):
        own.got()
        optimizer.zero_grad()
        loss = loss_of(model(images), targets)
        loss.backward()
        optimizer.step()
        print(f"\rloss {loss.item():.3f}", end="")
        own.step(len(images))
    own.end()
own.tell()
