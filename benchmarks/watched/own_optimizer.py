"""An optimizer that derives from nothing of torch, as research code has them."""

import torch
from own import Own
from parts import Pictures, loss_of, small_model
from torch.utils.data import DataLoader


class Momentum:
    def __init__(self, parameters, lr):
        self.parameters, self.lr = list(parameters), lr
        self.velocity = [torch.zeros_like(one) for one in self.parameters]

    def zero_grad(self):
        for one in self.parameters:
            one.grad = None

    @torch.no_grad()
    def step(self):
        for one, velocity in zip(self.parameters, self.velocity, strict=True):
            velocity.mul_(0.9).add_(one.grad)
            one.sub_(velocity, alpha=self.lr)


model = small_model()
optimizer = Momentum(model.parameters(), lr=0.01)
own = Own()
own.begin()
for images, targets in DataLoader(Pictures(1200), batch_size=8):
    own.got()
    optimizer.zero_grad()
    loss_of(model(images), targets).backward()
    optimizer.step()
    own.step(len(images))
own.end()
own.tell()
