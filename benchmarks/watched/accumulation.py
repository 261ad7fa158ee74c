"""Gradients of three batches per step; the last batch and the last step of an epoch are smaller."""

import torch
from own import Own
from parts import Pictures, loss_of, small_model
from torch.utils.data import DataLoader

EACH = 3
model = small_model()
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(Pictures(813), batch_size=8)
own = Own()
for _ in range(3):
    own.begin()
    samples = 0
    for number, (images, targets) in enumerate(loader, 1):
        own.got()
        (loss_of(model(images), targets) / EACH).backward()
        samples += len(images)
        if number % EACH == 0 or number == len(loader):
            optimizer.step()
            optimizer.zero_grad()
            own.step(samples)
            samples = 0
        own.wants()
    own.end()
own.tell()
