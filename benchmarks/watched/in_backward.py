"""One optimizer per parameter, called by hooks in the backward pass: gradients are freed as soon as they are used."""

import torch
from own import Own
from parts import Pictures, loss_of, small_model
from torch.utils.data import DataLoader

model = small_model()
optimizers = {parameter: torch.optim.SGD([parameter], lr=0.01) for parameter in model.parameters()}


def update(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(update)
own = Own()
own.begin()
for images, targets in DataLoader(Pictures(1200), batch_size=8):
    own.got()
    loss_of(model(images), targets).backward()
    own.step(len(images))
own.end()
own.tell()
