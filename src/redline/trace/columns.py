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
"""This value stands in every column of whole numbers for what the file does not say."""


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
    """These are stretches of time on host threads. `name` and `thread` index the trace's `names` and `threads`."""

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
    """It is the index into the trace's `shapes`. It is UNKNOWN if none were recorded."""


@dataclass(frozen=True)
class Operators(Marks):
    external: Ints
    """By this number launches name the operator that they came from."""
    sequence: Ints
    """Autograd gives this number to the node that a forward operator made, and that a backward operator evaluates."""
    forward_thread: Ints
    """It is above 0 for backward operators."""
    collective: Ids
    """It is the index into the trace's `collectives`. It is UNKNOWN for every other operator."""


@dataclass(frozen=True)
class Calls(HostRanges):
    """These are calls of the CUDA or HIP runtime and driver."""

    correlation: Ints
    external: Ints


@dataclass(frozen=True)
class DeviceWork(Table):
    """These are kernels, copies and fills."""

    kind: Ids
    name: Ids
    start: Ints
    duration: Ints
    device: Ids
    stream: Ints
    correlation: Ints
    """The call that launched it has the same number. It is UNKNOWN if the file does not say."""
    bytes: Ints
    collective: Ids
    """It is the index into the trace's `collectives`. It is UNKNOWN for all other work, and if the file does not describe
    the collective."""

    @property
    def end(self) -> Ints:
        return self.start + self.duration

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True)
class Allocations(Table):
    """These are bytes that the allocators took (above 0) or gave back (below 0)."""

    at: Ints
    thread: Ids
    bytes: Ints
    on_device: Ids
    """It is above 0 for memory of a device."""

    def __len__(self) -> int:
        return len(self.at)


@dataclass(frozen=True)
class Shape:
    """These are the inputs of an operator, as the file writes them, without blanks."""

    dims: str
    types: str
    values: str = ""
    """These are its inputs that are no tensors; they are kept only of operators whose work depends on them."""


@dataclass(frozen=True)
class Collective:
    """This describes what a collective moves, as the process group recorded it."""

    name: str
    dtype: str
    in_elements: int
    out_elements: int
    group_size: int
    """This many ranks take part. It is UNKNOWN if the file does not say."""
    group: str = ""


class DeviceInfo(Frozen):
    """This is a device as the header describes it."""

    index: int | None = None
    name: str = ""
    capability: tuple[int, int] | None = None
    """It is NVIDIA's compute capability. For AMD it is the first two digits of the gfx version."""


class Lost(Frozen):
    """This says what a damaged file cost."""

    truncated: bool = False
    bytes: int = 0
    """This many bytes stand at the end of the file, after the last whole event, and are of no use."""
    events: int = 0
    """This many events were left out because they could not be understood."""
    launches: int = 0
    """If the file was cut off, this many calls launched work which is not in it."""
    reasons: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.truncated or bool(self.events)


@dataclass(frozen=True)
class Trace:
    """This is one process of one file, decoded. Events that no table needs (flow arrows, short Python frames) are not kept."""

    source: str
    events: int
    """The file has this many events, including those that were not kept."""
    rank: int | None
    world_size: int | None
    devices: tuple[DeviceInfo, ...]
    names: Sequence[str]
    shapes: Sequence[Shape]
    collectives: Sequence[Collective]
    threads: Sequence[tuple[int | str, int | str]]
    """These are the process and thread number of each thread."""
    operators: Operators
    calls: Calls
    annotations: Marks
    frames: HostRanges
    """These are Python functions. Only calls of modules, and functions long enough to explain a wait, are kept."""
    work: DeviceWork
    allocations: Allocations
    lost: Lost
    process: str | None = None
    """It names the process if the file holds several."""
    trace_id: str | None = None
    notes: tuple[Note, ...] = ()

    @property
    def has_device(self) -> bool:
        return len(self.work) > 0

    @property
    def label(self) -> str:
        """Returns the rank if it is known, else the name of the file."""
        file = self.source.rpartition("/")[2]
        if self.process is not None:
            return f"{file} (process {self.process})"
        return file if self.rank is None else f"rank {self.rank}"
