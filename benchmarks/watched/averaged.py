"""Validates an average of the weights for longer than it trains, and saves a checkpoint after each epoch."""

import copy
import os
import tempfile
import time

import torch
from own import Own
from parts import Pictures, loss_of, small_model
from torch.utils.data import DataLoader

model = small_model()
average = copy.deepcopy(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
held_back = DataLoader(Pictures(800), batch_size=16)
own = Own()
for _ in range(3):
    own.begin()
    for images, targets in DataLoader(Pictures(320), batch_size=8):
        own.got()
        optimizer.zero_grad()
        loss_of(model(images), targets).backward()
        optimizer.step()
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
                mean.mul_(0.99).add_(weight, alpha=0.01)
        own.step(len(images))
    own.end()
    mark = time.perf_counter()
    average.eval()
    with torch.no_grad():
        for images, _targets in held_back:
            average(images)
    own.validated += time.perf_counter() - mark
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), os.path.join(folder, "model.pt"))
own.tell()
