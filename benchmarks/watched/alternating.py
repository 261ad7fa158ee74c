"""Two models that take turns, each with an optimizer of its own."""

import torch
from own import Own
from parts import Pictures, loss_of, small_model
from torch.utils.data import DataLoader

models = [small_model(), small_model(12)]
optimizers = [torch.optim.Adam(model.parameters()) for model in models]
own = Own()
own.begin()
for number, (images, targets) in enumerate(DataLoader(Pictures(1600), batch_size=8)):
    own.got()
    model, optimizer = models[number % 2], optimizers[number % 2]
    optimizer.zero_grad()
    loss_of(model(images), targets).backward()
    optimizer.step()
    own.step(len(images))
own.end()
own.tell()
