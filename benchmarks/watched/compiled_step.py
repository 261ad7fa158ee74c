"""The whole training step is one compiled function, optimizer included."""

import torch
from own import Own
from parts import Pictures, loss_of, small_model
from torch.utils.data import DataLoader

model = small_model()
optimizer = torch.optim.Adam(model.parameters(), capturable=False)


@torch.compile(backend="aot_eager")
def step(images, targets):
    optimizer.zero_grad()
    loss = loss_of(model(images), targets)
    loss.backward()
    optimizer.step()
    return loss


own = Own()
own.skipped = 3
for number, (images, targets) in enumerate(DataLoader(Pictures(1200), batch_size=8)):
    if number == own.skipped:  # the first ones compile
        own.begin()
    elif number > own.skipped:
        own.got()
    step(images, targets)
    if number >= own.skipped:
        own.step(len(images))
own.end()
own.tell()
