"""A data source has a training part and a held-out part, and each gives batches by index.

Adding one is adding a file in `sources/`. Everything random about a batch is drawn from the batch's own seed, never from
torch's global state, so that neither loader workers nor prefetching change what a training sees.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from redline.model.errors import SpecError, UnknownName
from redline.model.note import Note
from redline.model.registry import Registry
from redline.model.spec import DataSpec, WorkloadSpec

FINGERPRINTED = 64
"""The bytes of this many samples go into the fingerprint. Reading all of them would take as long as an epoch."""


class Samples(ABC):
    """This is one part of a set: 8-bit images and their classes."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def fetch(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns images (N, C, H, W) in 8 bits and classes (N). It is called in the loader's workers."""

    @abstractmethod
    def part(self, rows: Sequence[int]) -> Samples:
        """Returns these samples as a part by themselves."""

    def identity(self) -> bytes:
        """Returns bytes that tell this part from others, without reading all of it."""
        images, classes = self.fetch(range(min(FINGERPRINTED, len(self))))
        return images.numpy().tobytes() + classes.numpy().tobytes()


class InMemory(Samples):
    """This part holds its images in memory."""

    def __init__(self, images: Tensor, classes: Tensor) -> None:
        self.images, self.classes = images, classes

    def __len__(self) -> int:
        return len(self.images)

    def fetch(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.as_tensor(rows, dtype=torch.int64)
        return self.images.index_select(0, chosen), self.classes.index_select(0, chosen)

    def part(self, rows: Sequence[int]) -> Samples:
        return InMemory(*self.fetch(rows))


@dataclass(frozen=True, kw_only=True)
class ImageData:
    """This is a set of pictures with their classes."""

    name: str
    train: Samples
    validation: Samples
    classes: int
    size: int
    """The images have this many pixels per side."""
    mean: tuple[float, ...]
    """This is the mean of each channel, for values from 0 to 1. It is subtracted before the model sees the images."""
    std: tuple[float, ...]
    random_labels: bool = False
    notes: tuple[Note, ...] = ()

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"{self.name} {len(self.train)} {len(self.validation)} {self.classes}".encode())
        for part in (self.train, self.validation):
            digest.update(part.identity())
        return digest.hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class LoaderData:
    """These are two loaders of the user's own. A batch is whatever they give."""

    name: str
    train: Iterable[Any]
    validation: Iterable[Any] | None
    fingerprint: str
    classes: int | None = None
    workers: int = 0
    """The training loader has this many processes."""
    has_workers: bool = False
    """It is true if other processes make the batches. Then a thread may ask for one without drawing from the global random state."""
    queued: int = 0
    """The workers of the training loader keep this many batches ready."""
    notes: tuple[Note, ...] = ()

    @cached_property
    def first(self) -> Any:
        """Returns a batch to look at before anything is trained, or None if there is none."""
        return next(iter(self.train), None)


Data = ImageData | LoaderData


class DataSource(ABC):
    """A data source says where data come from."""

    def check(self, spec: DataSpec, workload: WorkloadSpec) -> None:
        """Raises a `UsageError` if the spec cannot be honoured. It reads no samples."""
        refuse(spec, "folder", "download", why="it is made up here")

    @abstractmethod
    def open(self, spec: DataSpec, workload: WorkloadSpec) -> Data:
        """Returns the whole data of a checked spec. `open_data` then takes the part that was asked for."""


DATA: Registry[DataSource] = Registry("data set", package="redline.bench.data.sources", group="redline.data")

USER = "user"
"""This is the source of names with a colon, such as `file.py:loaders`."""


def data_source(name: str) -> DataSource:
    if ":" in name:
        return DATA.get(USER)
    known = [known_name for known_name in DATA if known_name != USER]
    if name not in known:
        raise UnknownName("data set", name, known, hint=f"{', '.join(known)}, or your own as file.py:loaders")
    return DATA.get(name)


def check_data(spec: DataSpec, workload: WorkloadSpec) -> None:
    data_source(spec.name).check(spec, workload)


def open_data(spec: DataSpec, workload: WorkloadSpec) -> Data:
    """Returns the data a spec asks for, cut to the samples it wants."""
    check_data(spec, workload)
    data = data_source(spec.name).open(spec, workload)
    if isinstance(data, LoaderData):
        return data
    for part, option in (("train", "train_samples"), ("validation", "val_samples")):
        samples, count = getattr(data, part), getattr(spec, option)
        if count is not None and count > len(samples):
            raise SpecError(f"{option} must be {len(samples)} or less for {data.name}, got {count}")
        if count not in (None, len(samples)):
            # The order mixes the classes, because some sets are sorted by class.
            order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))
            data = replace(data, **{part: samples.part(order[:count].tolist())})
    return data


def refuse(spec: DataSpec, *options: str, why: str) -> None:
    """Raises a `SpecError` for the first of these options that has another value than its default."""
    plain = DataSpec(name=spec.name)
    for option in options:
        if getattr(spec, option) != getattr(plain, option):
            raise SpecError(f"{option} {getattr(spec, option)} cannot be honoured for data {spec.name}: {why}")
