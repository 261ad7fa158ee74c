"""A trace is held as numpy columns, with one row per event and times in whole nanoseconds.

A trace of a gigabyte has millions of events; as columns they take some tens of bytes each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

import numpy as np
from numpy.typing import NDArray

from redline.model.fields import Frozen
from redline.model.note import Note

Ints = NDArray[np.int64]
Ids = NDArray[np.int32]
Mask = NDArray[np.bool_]

UNKNOWN = -1
"""Stands in every column of whole numbers for what the file does not say."""


class Work(IntEnum):
    """A device may be busy with these."""

    KERNEL = 0
    COPY = 1
    FILL = 2


class Table:
    """A table holds one column per field."""

    def only(self, rows: Mask | Ints) -> Self:
        return type(self)(**{name: column[rows] for name, column in vars(self).items()})


@dataclass(frozen=True)
class HostRanges(Table):
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
class Marks(HostRanges):
    """These ranges were annotated by the program or by torch itself."""

    shape: Ids
    """Index into the trace's `shapes`; UNKNOWN where none were recorded."""


@dataclass(frozen=True)
class Operators(Marks):
    external: Ints
    """Launches name the operator that they came from by this number."""
    sequence: Ints
    """Autograd gives this number to the node that a forward operator made, and that a backward operator evaluates."""
    forward_thread: Ints
    """Above 0 for backward operators."""
    collective: Ids
    """Index into the trace's `collectives`; UNKNOWN for every other operator."""


@dataclass(frozen=True)
class Calls(HostRanges):
    """These are calls of the CUDA or HIP runtime and driver."""

    correlation: Ints
    external: Ints


@dataclass(frozen=True)
class DeviceWork(Table):
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
    collective: Ids
    """Index into the trace's `collectives`; UNKNOWN for all other work, and where the file does not describe it."""

    @property
    def end(self) -> Ints:
        return self.start + self.duration

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True)
class Allocations(Table):
    """The allocators took these bytes (above 0) or gave them back (below 0)."""

    at: Ints
    thread: Ids
    bytes: Ints
    on_device: Ids
    """Above 0 for memory of a device."""

    def __len__(self) -> int:
        return len(self.at)


@dataclass(frozen=True)
class Shape:
    """The inputs of an operator, as the file writes them without blanks."""

    dims: str
    types: str
    values: str = ""
    """These are its inputs that are no tensors; they are kept only of operators whose work depends on them."""


@dataclass(frozen=True)
class Collective:
    """The process group describes so what a collective moves."""

    name: str
    dtype: str
    in_elements: int
    out_elements: int
    group_size: int
    """Ranks that take part; UNKNOWN where the file does not say."""
    group: str = ""


class DeviceInfo(Frozen):
    """A device as the header describes it."""

    index: int | None = None
    name: str = ""
    capability: tuple[int, int] | None = None
    """NVIDIA's compute capability; of AMD, the first two digits of the gfx version."""


class Lost(Frozen):
    """This says what a damaged file cost."""

    truncated: bool = False
    bytes: int = 0
    """So much stands at the end of the file, after the last whole event, and is of no use."""
    events: int = 0
    """So many were left out because they could not be understood."""
    launches: int = 0
    """For a truncated file: calls that launched work which is not in it."""
    reasons: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.truncated or bool(self.events)


@dataclass(frozen=True)
class Trace:
    """One process of one file, decoded. Events that no table needs (flow arrows, short Python frames) are not kept."""

    source: str
    events: int
    """In the file, whether kept or not."""
    rank: int | None
    world_size: int | None
    devices: tuple[DeviceInfo, ...]
    names: Sequence[str]
    shapes: Sequence[Shape]
    collectives: Sequence[Collective]
    threads: Sequence[tuple[int | str, int | str]]
    """Process and thread number of each."""
    operators: Operators
    calls: Calls
    annotations: Marks
    frames: HostRanges
    """Python functions: calls of modules, and those long enough to explain a wait."""
    work: DeviceWork
    allocations: Allocations
    lost: Lost
    process: str | None = None
    """Names the process where the file holds several."""
    trace_id: str | None = None
    notes: tuple[Note, ...] = ()

    @property
    def has_device(self) -> bool:
        return len(self.work) > 0

    @property
    def label(self) -> str:
        """The rank where it is known, else the file."""
        file = self.source.rpartition("/")[2]
        if self.process is not None:
            return f"{file} (process {self.process})"
        return file if self.rank is None else f"rank {self.rank}"
