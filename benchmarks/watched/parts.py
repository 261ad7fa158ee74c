"""What the watched scripts share: pictures that take their time, a small model, a rate of steps that ends do not move."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

torch.set_num_threads(1)
CLASSES = 10


def picture(index: int) -> tuple[torch.Tensor, int]:
    time.sleep(0.0004)
    return torch.full((3, 16, 16), index / 1000), index % CLASSES


class Pictures(Dataset):
    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return picture(index)


class Stream(IterableDataset):
    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self):
        return map(picture, range(self._count))


def small_model(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU(), nn.Flatten(), nn.Linear(width * 14 * 14, CLASSES))


loss_of = nn.functional.cross_entropy
