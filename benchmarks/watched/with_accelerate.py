"""`accelerate launch`."""

import torch
from accelerate import Accelerator
from own import Own
from parts import Pictures, loss_of, small_model
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)
model = small_model()
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Pictures(1600), batch_size=8))
own = Own()
own.begin()
for images, targets in loader:
    own.got()
    optimizer.zero_grad()
    accelerator.backward(loss_of(model(images), targets))
    optimizer.step()
    own.step(len(images))
own.end()
own.tell()
