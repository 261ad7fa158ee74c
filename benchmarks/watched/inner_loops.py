"""Meta-learning: inner steps by torch.autograd.grad on a copy of the weights, one outer step of an optimizer per task."""

import torch
from own import Own
from parts import Pictures, loss_of, small_model
from torch.func import functional_call
from torch.utils.data import DataLoader

model = small_model()
optimizer = torch.optim.Adam(model.parameters())
own = Own()
own.begin()
for images, targets in DataLoader(Pictures(1200), batch_size=8):
    own.got()
    weights = dict(model.named_parameters())
    for _ in range(2):
        inner = loss_of(functional_call(model, weights, (images[:4],)), targets[:4])
        gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        weights = {name: one - 0.01 * change for (name, one), change in zip(weights.items(), gradients, strict=True)}
    optimizer.zero_grad()
    loss_of(functional_call(model, weights, (images[4:],)), targets[4:]).backward()
    optimizer.step()
    own.step(len(images))
own.end()
own.tell()
