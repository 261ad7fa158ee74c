"""An IterableDataset, loaded by two workers."""

import torch
from own import Own
from parts import Stream, loss_of, small_model
from torch.utils.data import DataLoader

model = small_model()
optimizer = torch.optim.RMSprop(model.parameters())
own = Own()
own.begin()
for images, targets in DataLoader(Stream(900), batch_size=8, num_workers=2):
    own.got()
    optimizer.zero_grad()
    loss_of(model(images), targets).backward()
    optimizer.step()
    own.step(len(images))
    del (
        images,
        targets,
    )  # the workers' shared memory: giving it back takes as long as a step's tenth, and nobody waits for a batch
    own.wants()
own.end()
own.tell()
