"""Labelled and unlabelled pictures side by side, and validation by a third loader in the middle of the epoch."""

import torch
from own import Own
from parts import Pictures, loss_of, small_model
from torch.utils.data import DataLoader

model = small_model()
optimizer = torch.optim.AdamW(model.parameters())
labelled, unlabelled = DataLoader(Pictures(640), batch_size=4), DataLoader(Pictures(1920), batch_size=12)
held_back = DataLoader(Pictures(80), batch_size=8)
own = Own()
own.begin()
for number, ((images, targets), (others, _)) in enumerate(zip(labelled, unlabelled, strict=True)):
    own.got()
    optimizer.zero_grad()
    told = model(torch.cat([images, others]))
    guessed = told[len(images) :]
    (loss_of(told[: len(images)], targets) + loss_of(guessed, guessed.argmax(1))).backward()
    optimizer.step()
    own.step(len(images) + len(others))
    if number % 40 == 39:
        own.end()
        model.eval()
        with torch.no_grad():
            right = sum(int((model(pictures).argmax(1) == truth).sum()) for pictures, truth in held_back)
        model.train()
        own.begin()
own.end()
own.tell()
