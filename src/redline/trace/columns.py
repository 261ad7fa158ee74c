"""What a trace holds, as numpy columns: one row per event, times in whole nanoseconds.

A trace of a gigabyte has millions of events; as columns they take some tens of bytes each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from redline.spec import Frozen

Ints = NDArray[np.int64]
Ids = NDArray[np.int32]
Mask = NDArray[np.bool_]

UNKNOWN = -1
"""Stands in every column of whole numbers for what the file does not say."""


class Work(IntEnum):
    """What a device may be busy with."""

    KERNEL = 0
    COPY = 1
    FILL = 2


@dataclass(frozen=True)
class HostRanges:
    """Stretches of time on host threads. `name` and `thread` index the trace's `names` and `threads`."""

    name: Ids
    start: Ints
    duration: Ints
    thread: Ids

    @property
    def end(self) -> Ints:
        return self.start + self.duration

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True)
class Operators(HostRanges):
    shape: Ids
    """Index into the trace's `shapes`; UNKNOWN where none were recorded."""
    external: Ints
    """The number by which launches name the operator they came from."""
    sequence: Ints
    """Autograd's number of the node that a forward operator made, or that a backward operator evaluates."""
    forward_thread: Ints
    """Above 0 for backward operators."""


@dataclass(frozen=True)
class Calls(HostRanges):
    """Calls of the CUDA or HIP runtime and driver."""

    correlation: Ints
    external: Ints


@dataclass(frozen=True)
class DeviceWork:
    """Kernels, copies and fills."""

    kind: Ids
    name: Ids
    start: Ints
    duration: Ints
    device: Ids
    stream: Ints
    correlation: Ints
    """Shared with the call that launched it; UNKNOWN where the file does not say."""
    bytes: Ints

    @property
    def end(self) -> Ints:
        return self.start + self.duration

    def __len__(self) -> int:
        return len(self.start)

    def only(self, rows: Mask | Ints) -> DeviceWork:
        return DeviceWork(**{name: column[rows] for name, column in vars(self).items()})


@dataclass(frozen=True)
class Allocations:
    """What the allocators took (above 0) and gave back (below 0)."""

    at: Ints
    thread: Ids
    bytes: Ints
    on_device: Ids

    def __len__(self) -> int:
        return len(self.at)


@dataclass(frozen=True)
class Shape:
    """The inputs of an operator, as the file writes them without blanks."""

    dims: str
    types: str


class Lost(Frozen):
    """What a damaged file cost."""

    truncated: bool = False
    bytes: int = 0
    """At the end of the file, after the last whole event: read, but of no use."""
    events: int = 0
    """Left out because they could not be understood."""
    launches: int = 0
    """Of a truncated file: calls that launched work which is not in it."""
    reasons: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.truncated or bool(self.events)


@dataclass(frozen=True)
class Trace:
    """One file, decoded. Events that no table needs (Python frames, flow arrows) are not kept."""

    source: str
    size_bytes: int
    """Uncompressed."""
    events: int
    """In the file, whether kept or not."""
    rank: int | None
    world_size: int | None
    devices: tuple[str, ...]
    names: Sequence[str]
    shapes: Sequence[Shape]
    threads: Sequence[str]
    operators: Operators
    calls: Calls
    annotations: HostRanges
    work: DeviceWork
    allocations: Allocations
    lost: Lost

    @property
    def has_device(self) -> bool:
        return len(self.work) > 0


def seconds(nanoseconds: float) -> float:
    return nanoseconds / 1e9  # divided, not multiplied by 1e-9: the nearest float there is


@dataclass(frozen=True)
class Intervals:
    """In order, and none touches the next."""

    start: Ints
    end: Ints
    first: Ints
    """For each, which of the given intervals began it."""

    def __len__(self) -> int:
        return len(self.start)

    @property
    def total(self) -> int:
        return int((self.end - self.start).sum())

    @property
    def span(self) -> int:
        return int(self.end[-1] - self.start[0]) if len(self) else 0


def union(start: Ints, end: Ints) -> Intervals:
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order]) if len(order) else end
    if not len(order):
        return Intervals(start, reach, order)
    # A new one begins where everything before has ended.
    begins = np.flatnonzero(np.concatenate(([True], start[1:] > reach[:-1])))
    ends = np.concatenate((begins[1:] - 1, [len(order) - 1]))
    return Intervals(start[begins], reach[ends], order[begins])


def joined(*several: Intervals) -> Intervals:
    return union(np.concatenate([each.start for each in several]), np.concatenate([each.end for each in several]))


def overlap(one: Intervals, other: Intervals) -> int:
    """How long both hold."""
    return one.total + other.total - joined(one, other).total


def gaps(busy: Intervals) -> Intervals:
    """What lies between them; `first` then tells which of the given intervals ended each gap."""
    return Intervals(busy.end[:-1], busy.start[1:], busy.first[1:])
