"""What watching costs per step: the same small loop with and without it, in turns. Aim: 1 % of a 5 ms step, 50 µs."""

from __future__ import annotations

import tempfile
import time
from statistics import median

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from redline.bench.watch.hooks import install

STEP_S = 5e-3
ROUNDS = 12
STEPS = 400


def block(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader) -> float:
    """The median step of a block, in seconds."""
    taken = []
    mark = time.perf_counter()
    for features, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(features), targets).backward()
        optimizer.step()
        now = time.perf_counter()
        taken.append(now - mark)
        mark = now
    return median(taken)


def main() -> None:
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(STEPS * 4, 8), torch.randint(0, 8, (STEPS * 4,)))
    loader = DataLoader(data, batch_size=4)
    block(model, optimizer, loader)
    costs = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(ROUNDS):
            plain = block(model, optimizer, loader)
            watch = install(folder, "")
            block(model, optimizer, loader)  # its first look at the model
            watched = block(model, optimizer, loader)
            watch.remove()
            costs.append(watched - plain)
    cost = median(costs)
    print(
        f"{cost * 1e6:.1f} µs per step, {cost / STEP_S:.2%} of a 5 ms step ({min(costs) * 1e6:.1f}–{max(costs) * 1e6:.1f} µs)"
    )


if __name__ == "__main__":
    main()
