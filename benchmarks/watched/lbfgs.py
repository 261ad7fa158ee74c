"""An optimizer that calls a closure several times per step, on one batch without a loader."""

import torch
from own import Own
from parts import loss_of, small_model

model = small_model()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
images, targets = torch.randn(32, 3, 16, 16), torch.randint(0, 10, (32,))
own = Own()
own.begin()
for _ in range(150):

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model(images), targets)
        loss.backward()
        return loss

    optimizer.step(closure)
    own.step(len(images))
own.end()
own.tell()
