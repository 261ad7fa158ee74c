"""Batches from a generator of one's own."""

import torch
from own import Own
from parts import loss_of, picture, small_model


def batches(count):
    for number in range(count):
        images, targets = zip(*map(picture, range(8 * number, 8 * number + 8)), strict=True)
        yield torch.stack(images), torch.tensor(targets)


model = small_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
own = Own()
own.begin()
for images, targets in batches(200):
    own.got()
    optimizer.zero_grad()
    loss_of(model(images), targets).backward()
    optimizer.step()
    own.step(len(images))
own.end()
own.tell()
