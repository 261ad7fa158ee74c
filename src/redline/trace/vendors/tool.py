"""What a vendor's profiler is to Redline (`VendorTool`, `TOOLS`), and hardware counters in one vocabulary for all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from redline.model.fields import Frozen
from redline.model.note import Note
from redline.model.registry import Registry
from redline.trace.kernels import NamedTime

CounterName = Literal["bandwidth", "occupancy", "l1_hits", "l2_hits", "compute", "traffic", "lds_conflicts"]
Verdict = Literal["memory-bound", "poor", "high", "fine"]

MEMORY_BOUND = 0.8
POOR_OCCUPANCY = 0.3
POOR_HITS = 0.7
HIGH_COMPUTE = 0.8
MANY_CONFLICTS = 0.05


class Counter(Frozen):
    name: CounterName
    kernel: str | None
    """None: over all kernels, weighted by their time."""
    value: float
    """A share, between 0 and 1; of `traffic`, bytes."""
    verdict: Verdict
    meaning: str
    metric: str
    """The tool's own name for it."""
    unit: Literal["share", "bytes"] = "share"


@dataclass(frozen=True)
class Reading:
    """One value of one counter for one call of a kernel, or for all of them."""

    name: CounterName
    metric: str
    kernel: str
    value: float
    weight: float
    """Nanoseconds, or 1 where the tool gives no time."""


def _bandwidth(value: float) -> tuple[Verdict, str]:
    if value > MEMORY_BOUND:
        return "memory-bound", "device memory is the limit: fuse (compile), use a smaller number format, move less"
    return "fine", "device memory is not the limit"


def _occupancy(value: float) -> tuple[Verdict, str]:
    if value < POOR_OCCUPANCY:
        return "poor", "few threads in flight: small launches, or many registers or much shared memory per thread"
    return "fine", "enough threads in flight to hide latency"


def _hits(value: float) -> tuple[Verdict, str]:
    if value < POOR_HITS:
        return "poor", "poor access pattern, or data used only once: strided or scattered reads, wrong layout"
    return "fine", "most accesses are served by the cache"


def _compute(value: float) -> tuple[Verdict, str]:
    if value > HIGH_COMPUTE:
        return "high", "the arithmetic units are the limit: a faster number format is what is left"
    return "fine", "the arithmetic units are not the limit"


def _lds_conflicts(value: float) -> tuple[Verdict, str]:
    if value > MANY_CONFLICTS:
        return "poor", "shared memory (LDS) waits for bank conflicts: pad or swizzle the tile, or use a library kernel"
    return "fine", "few bank conflicts in shared memory (LDS)"


def _traffic(value: float) -> tuple[Verdict, str]:
    return "fine", "bytes moved to and from device memory"


_RULES: dict[CounterName, Callable[[float], tuple[Verdict, str]]] = {
    "bandwidth": _bandwidth,
    "occupancy": _occupancy,
    "l1_hits": _hits,
    "l2_hits": _hits,
    "compute": _compute,
    "traffic": _traffic,
    "lds_conflicts": _lds_conflicts,
}


def counters_of(readings: Iterable[Reading], kernels: Sequence[str]) -> list[Counter]:
    """Over all kernels first, then for each of `kernels` by itself."""
    gathered = list(readings)
    found = _means(gathered, None)
    for kernel in kernels:
        found += _means([reading for reading in gathered if reading.kernel == kernel], kernel)
    return found


def bandwidth_share(counters: Iterable[Counter]) -> float | None:
    return next((one.value for one in counters if one.name == "bandwidth" and one.kernel is None), None)


def _means(readings: list[Reading], kernel: str | None) -> list[Counter]:
    """Shares weighted by time: a kernel that runs long says more than one that runs often. Bytes are added up."""
    sums: defaultdict[CounterName, list[float]] = defaultdict(lambda: [0.0, 0.0])
    metrics: dict[CounterName, str] = {}
    for reading in readings:
        weight = 1.0 if reading.name == "traffic" else reading.weight
        sums[reading.name][0] += reading.value * weight
        sums[reading.name][1] += weight
        metrics[reading.name] = reading.metric
    found = []
    for name, rule in _RULES.items():
        total, weight = sums.get(name, (0.0, 0.0))
        if weight <= 0:
            continue
        value = total if name == "traffic" else total / weight
        verdict, meaning = rule(value)
        found.append(
            Counter(
                name=name,
                kernel=kernel,
                value=value,
                verdict=verdict,
                meaning=meaning,
                metric=metrics[name],
                unit="bytes" if name == "traffic" else "share",
            )
        )
    return found


@dataclass(frozen=True)
class VendorTable:
    """What a tool told, in Redline's own terms."""

    kernels: Sequence[NamedTime]
    readings: Sequence[Reading] = ()
    notes: tuple[Note, ...] = field(default=())


@dataclass(frozen=True)
class FollowUp:
    """A command to run after the profiled program has ended, and the file that takes what it prints."""

    command: tuple[str, ...]
    output: Path


class VendorTool(ABC):
    name: ClassVar[str]
    devices: ClassVar[tuple[str, ...]]
    """Kinds of device it looks at."""
    how_to_get: ClassVar[str]
    also_in: ClassVar[tuple[str, ...]] = ()
    """Folders, as patterns, where it is often installed without being on the PATH."""
    steps: ClassVar[int] = 3
    """How many steps it is shown."""
    replays: ClassVar[bool] = False
    """Runs its target several times from the beginning, so that no connection to it can be kept."""
    exit_timeout_s: ClassVar[float] = 300.0
    """Until it has written its files once the worker has left."""

    @abstractmethod
    def prefix(self, folder: Path) -> tuple[str, ...]:
        """The words in front of the worker's command; all files go into the folder."""

    def follow_ups(self, folder: Path) -> list[FollowUp]:
        """What turns its own files into readable ones."""
        return []

    @abstractmethod
    def read(self, folder: Path) -> VendorTable:
        """Raises `TraceError` when it wrote nothing of use, with the reason it gave."""


TOOLS: Registry[type[VendorTool]] = Registry("profiler", package="redline.trace.vendors", group="redline.profilers")
"""Those of the house are files beside this one; others register a class under the entry-point group."""
