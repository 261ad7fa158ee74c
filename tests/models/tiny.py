"""A network so small that an epoch takes a moment, and loaders of the user's own: sound ones, slow ones, broken ones."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

SIZE, CLASSES = 16, 10


def make() -> tuple[nn.Module, Tensor]:
    """Two convolutions and a linear layer."""
    layers = [nn.Conv2d(3, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES)), torch.randn(
        2, 3, SIZE, SIZE
    )


def _sets(count: int = 96) -> tuple[TensorDataset, TensorDataset]:
    draw = torch.Generator().manual_seed(0)
    parts = [
        TensorDataset(
            torch.randn(each, 3, SIZE, SIZE, generator=draw), torch.randint(0, CLASSES, (each,), generator=draw)
        )
        for each in (count, 32)
    ]
    return parts[0], parts[1]


def loaders(batch: int = 16) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """As people write them: shuffled by torch's global state."""
    train, validation = _sets()
    return DataLoader(train, batch_size=batch, shuffle=True), DataLoader(validation, batch_size=batch)


def bare() -> nn.Module:
    """Without inputs: data bring them."""
    return make()[0]


def as_dicts() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Batches as dicts, with what the model does not take beside."""
    parts = [[{"image": x, "index": number, "label": y} for number, (x, y) in enumerate(each)] for each in loaders()]
    return parts[0], parts[1]


class Failing(Dataset[tuple[Tensor, int]]):
    """Sound for some samples; then something happens."""

    def __init__(self, how: str) -> None:
        self._how = how

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index >= 32:
            if self._how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if self._how == "hang":
                time.sleep(600)
            raise ValueError(f"sample {index} is spoilt\nfor good")
        return torch.randn(3, SIZE, SIZE), index % CLASSES


def _failing(how: str) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Only the training loader has workers, and it has no timeout, as people write it."""
    options: dict[str, Any] = {"batch_size": 8, "num_workers": 1, "multiprocessing_context": "fork"}
    return DataLoader(Failing(how), **options), DataLoader(_sets()[1], batch_size=8)


def dying() -> tuple[DataLoader[Any], DataLoader[Any]]:
    return _failing("die")


def hanging() -> tuple[DataLoader[Any], DataLoader[Any]]:
    return _failing("hang")


def raising() -> tuple[DataLoader[Any], DataLoader[Any]]:
    return _failing("raise")


def one_loader() -> DataLoader[Any]:
    return loaders()[0]


def used_up() -> tuple[Iterator[Any], Iterator[Any]]:
    return iter(loaders()[0]), iter(loaders()[1])


class WithDropout(nn.Sequential):
    """Draws from the global random state in every step."""


def dropping() -> tuple[nn.Module, Tensor]:
    model, inputs = make()
    return WithDropout(*model.children(), nn.Dropout(0.0), nn.Dropout(0.5)), inputs  # type: ignore[union-attr]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """A part of the samples in each worker."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        rows, worker = range(96), get_worker_info()
        if worker is not None:
            rows = rows[worker.id :: worker.num_workers]
        return (_sets()[0][row] for row in rows)


def streamed() -> tuple[DataLoader[Any], None]:
    return DataLoader(Stream(), batch_size=16, num_workers=2, multiprocessing_context="fork"), None


def exploding() -> tuple[nn.Module, Tensor]:
    """Its loss is no number after a few steps."""

    class Exploding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.steps = make()[0], 0

        def forward(self, images: Tensor) -> Tensor:
            self.steps += self.training
            logits: Tensor = self.inner(images)
            return logits * float("nan") if self.steps > 4 else logits

    return Exploding(), torch.randn(2, 3, SIZE, SIZE)


VOCABULARY = 12


class Reads(nn.Module):
    """Returns `(logits, loss)`, as small language models do; without targets only the last position."""

    def __init__(self, shows: str = "logits") -> None:
        super().__init__()
        self.embed, self.head, self._shows = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY), shows

    def forward(self, index: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits = self.head(self.embed(index))
        if targets is None:
            return logits[:, -1:], None
        loss = 2 * nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return (logits if self._shows == "logits" else logits.detach().softmax(-1)), loss


def reads() -> nn.Module:
    return Reads()


def reads_probabilities() -> nn.Module:
    return Reads("probabilities")


def tokens() -> tuple[list[Any], list[Any]]:
    drawn = torch.randint(0, VOCABULARY, (8, 7), generator=torch.Generator().manual_seed(0))
    return [(drawn[:4, :-1], drawn[:4, 1:])] * 3, [(drawn[4:, :-1], drawn[4:, 1:])]


def without_validation() -> tuple[DataLoader[Any], None]:
    return loaders()[0], None


def twice() -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Validates on what it trains on, in part."""
    data = _sets()[0]
    halves = [torch.utils.data.Subset(data, range(64)), torch.utils.data.Subset(data, range(48, 96))]
    return DataLoader(halves[0], batch_size=16), DataLoader(halves[1], batch_size=16)


def spoilt_validation() -> tuple[list[Any], list[Any]]:
    train, validation = (list(each) for each in loaders())
    return train, [validation[0], (torch.full_like(validation[1][0], float("nan")), validation[1][1])]


def one_left_over() -> tuple[DataLoader[Any], DataLoader[Any]]:
    train, validation = _sets(33)
    return DataLoader(train, batch_size=16), DataLoader(validation, batch_size=16)


class Stays(nn.Module):
    """One layer is frozen, one is not used, and dropout stays in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.spare, self.drop = (
            nn.Flatten(),
            nn.LazyLinear(CLASSES),
            nn.Linear(2, 2),
            nn.Dropout(),
        )
        self.head.initialize_parameters(torch.zeros(1, 3 * SIZE * SIZE))
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)
        self.norm = nn.BatchNorm1d(CLASSES)

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.drop.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        return self.norm(self.scale * self.head(self.drop(self.body(images))))


def stays() -> nn.Module:
    return Stays()
