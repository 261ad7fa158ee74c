"""Asks whether torch can be found before anybody imports it, as libraries do; AMP with GradScaler."""

import importlib.util

assert importlib.util.find_spec("torch") is not None

import torch  # noqa: E402
from own import Own  # noqa: E402
from parts import Pictures, loss_of, small_model  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

model = small_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu")
own = Own()
own.begin()
for images, targets in DataLoader(Pictures(1600), batch_size=8):
    own.got()
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model(images), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    own.step(len(images))
own.end()
own.tell()
