"""Functions that are timed as they are, and modules that say themselves how they train."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

closed: list[Any] = []
"""What `teardown` was given, for tests in the same process."""


def setup(batch: int = 3) -> tuple[nn.Module, torch.optim.Optimizer, list[Tensor]]:
    model = nn.Linear(4, 2)
    return model, torch.optim.AdamW(model.parameters()), [torch.randn(batch, 4) for _ in range(2)]


def step(state: tuple[nn.Module, torch.optim.Optimizer, list[Tensor]]) -> float:
    """Two accumulated batches and an update."""
    model, optimizer, batches = state
    for batch in batches:
        (model(batch).square().mean() / len(batches)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return 0.0


def teardown(state: Any) -> None:
    closed.append(state)


def alone_step() -> Tensor:
    return torch.ones(8, 8) @ torch.ones(8, 8)


def greedy_step(one: int, two: int) -> None: ...


def model_step() -> Any:
    return nn.Linear(4, 2), torch.randn(3, 4)


class Lit(nn.Module):
    """Built as Lightning's modules are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        return {"loss": nn.functional.cross_entropy(self(x), y)}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


class ByHand(Lit):
    automatic_optimization = False


class Two(Lit):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)], []


def lit(batch: int) -> Any:
    return Lit(), (torch.randn(batch, 4), torch.randint(0, 3, (batch,)))


def by_hand(batch: int) -> Any:
    return ByHand(), lit(batch)[1]


def two_optimizers(batch: int) -> Any:
    return Two(), lit(batch)[1]
