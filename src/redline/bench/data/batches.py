"""This module makes the batches of a set: their order, the loaders that read them, and what is drawn at random for them.

A batch is known by its rows and a seed. The loader's workers make it from these alone, or this process does, or the device
if the whole set lies there. So a training sees the same batches however they come.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from torchvision.transforms.v2 import functional as F

from redline.bench.data.source import Samples
from redline.model.spec import Augment, DataSpec

SHIFT = 8
"""An image is shifted by up to this fraction of its side: 4 of 32 pixels, as is usual for CIFAR."""
_MIX = 1_000_003
"""This prime mixes the training's seed, the epoch and the batch's number, so that each batch has a seed of its own."""


class Batches(Protocol):
    """A loader gives a part of the data batch by batch."""

    steps: int
    """An epoch has this many steps. It is 0 if the loader does not say."""

    def begin(self, epoch: int) -> Iterator[Any]:
        """Returns the batches of an epoch. It must be called from the main thread, where loader workers are started."""

    def close(self) -> None: ...


class Order(Sampler[tuple[list[int], int]]):
    """This sampler yields the rows and the seed of each batch of an epoch."""

    def __init__(self, count: int, batch: int, *, seed: int, shuffle: bool, drop_last: bool) -> None:
        self._count, self.batch, self._seed, self._shuffle = count, batch, seed, shuffle
        self.epoch, self._steps = 1, count // batch if drop_last else -(-count // batch)

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[tuple[list[int], int]]:
        return ((rows.tolist(), self.seed_of(number)) for number, rows in enumerate(self.rows()))

    def rows(self) -> tuple[Tensor, ...]:
        """Returns the rows of each batch."""
        generator = torch.Generator().manual_seed(self.seed_of(-1))
        rows = torch.randperm(self._count, generator=generator) if self._shuffle else torch.arange(self._count)
        return rows.split(self.batch)[: self._steps]

    def seed_of(self, number: int) -> int:
        return ((self._seed % 2**31 * _MIX + self.epoch) * _MIX + number + 1) % 2**63


class Reader(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """This data set makes a batch from its rows and seed. It lives in the loader's workers."""

    def __init__(self, samples: Samples, augment: Augment) -> None:
        self._samples, self._augment = samples, augment

    def __getitem__(self, key: tuple[list[int], int]) -> tuple[Tensor, Tensor, Tensor]:
        rows, seed = key
        images, classes = self._samples.fetch(rows)
        draws = drawn(len(rows), images.shape[-1], seed) if self._augment != "none" else torch.empty(0)
        if self._augment == "host":
            images, draws = augmented(images, draws), torch.empty(0)
        return images, classes, draws


class LoadedBatches:
    """These batches come from a `DataLoader`."""

    def __init__(
        self, samples: Samples, order: Order, spec: DataSpec, *, augment: Augment, pin: bool, workers: int
    ) -> None:
        self._order, self.steps = order, len(order)
        options: dict[str, Any] = {}
        if workers:
            options = {
                "persistent_workers": spec.persistent_workers,
                "prefetch_factor": spec.prefetch_factor,
                "timeout": spec.loader_timeout_s,
                "multiprocessing_context": "fork",
            }
        self._make = partial(
            DataLoader,
            Reader(samples, augment),
            batch_size=None,
            sampler=order,
            num_workers=workers,
            pin_memory=pin,
            **options,
        )
        self._loader: DataLoader[Any] | None = None

    def begin(self, epoch: int) -> Iterator[Any]:
        self._order.epoch = epoch
        with warnings.catch_warnings():
            # torch warns of more workers than cores. How many are too many is what the caller wants to measure.
            warnings.simplefilter("ignore")
            # The loader gets a generator of its own. Without one every epoch would draw from the global state.
            self._loader = self._loader or self._make(generator=torch.Generator())
            return iter(self._loader)

    def close(self) -> None:
        self._loader = None  # The workers end when the loader is dropped.


class DeviceBatches:
    """The whole part of the set lies on the device. A batch is that part and the rows to take from it."""

    def __init__(self, part: tuple[Tensor, ...], order: Order, *, augment: bool) -> None:
        """`part` holds the images and the classes."""
        self._part, self._order, self._augment = part, order, augment
        self.steps = len(order)

    def begin(self, epoch: int) -> Iterator[Any]:
        self._order.epoch = epoch
        images, batches = self._part[0], self._order.rows()
        sizes = [len(rows) for rows in batches]
        # The rows are copied once for the whole epoch. A copy per step from memory that is not pinned would wait for the device.
        rows = torch.cat(batches).to(images.device).split(sizes)
        draws: Sequence[Tensor] = [torch.empty(0)] * len(sizes)
        if self._augment:
            each = [drawn(size, images.shape[-1], self._order.seed_of(number)) for number, size in enumerate(sizes)]
            draws = torch.cat(each).to(images.device).split(sizes)
        for batch in zip(rows, draws, strict=True):
            yield self._part, *batch

    def close(self) -> None:
        """There is nothing to close, because the set is freed with the object that holds it."""


class UserBatches:
    """These batches come from a loader of the user's own, whose length may be unknown."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        try:
            self.steps = len(loader)
        except TypeError:
            self.steps = 0
        held = [getattr(loader, name, None) for name in ("sampler", "batch_sampler", "dataset")]
        self._parts = [loader, *held, getattr(held[1], "sampler", None)]

    def begin(self, epoch: int) -> Iterator[Any]:
        for part in self._parts:
            if callable(tell := getattr(part, "set_epoch", None)):
                tell(epoch - 1)
        return iter(self._loader)

    def close(self) -> None:
        """The loader belongs to the user, so nothing is closed."""


def drawn(count: int, size: int, seed: int) -> Tensor:
    """Returns for each image where it is cut out and whether it is mirrored. The shape is (count, 3)."""
    generator = torch.Generator().manual_seed(seed)
    reach = 2 * (size // SHIFT) + 1
    shifts = torch.randint(0, reach, (count, 2), generator=generator)
    return torch.cat((shifts, torch.randint(0, 2, (count, 1), generator=generator)), dim=1)


def augmented(images: Tensor, draws: Tensor) -> Tensor:
    """Returns each image shifted and perhaps mirrored as was drawn for it. Black comes in from the border."""
    count, channels, height, width = images.shape
    padded = F.pad(images, [width // SHIFT])
    where = images.device
    rows = draws[:, 0, None] + torch.arange(height, device=where)
    columns = torch.arange(width, device=where).expand(count, width)
    columns = draws[:, 1, None] + torch.where(draws[:, 2, None] == 1, width - 1 - columns, columns)
    image = torch.arange(count, device=where)[:, None, None, None]
    colours = torch.arange(channels, device=where)[None, :, None, None]
    cut: Tensor = padded[image, colours, rows[:, None, :, None], columns[:, None, None, :]]
    return cut
