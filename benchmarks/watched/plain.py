import torch
from own import Own
from parts import Pictures, loss_of, small_model
from torch.utils.data import DataLoader

model = small_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
own = Own()
for _ in range(3):
    own.begin()
    for images, targets in DataLoader(Pictures(640), batch_size=8, shuffle=True):
        own.got()
        optimizer.zero_grad()
        loss = loss_of(model(images), targets)
        loss.backward()
        optimizer.step()
        own.step(len(images))
    own.end()
own.tell()
