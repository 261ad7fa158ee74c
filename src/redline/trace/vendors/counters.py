"""Hardware counters of every vendor in one vocabulary, and what their values mean."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from redline.model.fields import Frozen

CounterName = Literal["bandwidth", "occupancy", "l1_hits", "l2_hits", "compute", "traffic", "lds_conflicts"]
Verdict = Literal["memory-bound", "poor", "high", "fine"]


class Counter(Frozen):
    name: CounterName
    kernel: str | None
    """None means all kernels together, weighted by their time."""
    value: float
    """A share between 0 and 1; for `traffic` it is bytes."""
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


_POOR_HITS: tuple[Verdict, str] = (
    "poor",
    "poor access pattern, or data used only once: strided or scattered reads, wrong layout",
)
_MEANINGS: dict[CounterName, tuple[float, tuple[Verdict, str], tuple[Verdict, str]]] = {
    "bandwidth": (
        0.8,
        ("fine", "device memory is not the limit"),
        ("memory-bound", "device memory is the limit: fuse (compile), use a smaller number format, move less"),
    ),
    "occupancy": (
        0.3,
        ("poor", "few threads in flight: small launches, or many registers or much shared memory per thread"),
        ("fine", "enough threads in flight to hide latency"),
    ),
    "l1_hits": (0.7, _POOR_HITS, ("fine", "most accesses are served by the cache")),
    "l2_hits": (0.7, _POOR_HITS, ("fine", "most accesses are served by the cache")),
    "compute": (
        0.8,
        ("fine", "the arithmetic units are not the limit"),
        ("high", "the arithmetic units are the limit: a faster number format is what is left"),
    ),
    "traffic": (0.0, ("fine", ""), ("fine", "bytes moved to and from device memory")),
    "lds_conflicts": (
        0.05,
        ("fine", "few bank conflicts in shared memory (LDS)"),
        ("poor", "shared memory (LDS) waits for bank conflicts: pad or swizzle the tile, or use a library kernel"),
    ),
}
"""For each counter a threshold, as the vendors' own guides give it, and what values up to it and above it mean."""


def counters_of(readings: Iterable[Reading], kernels: Sequence[str]) -> list[Counter]:
    """The counters over all kernels first, then those of each of `kernels` by itself."""
    gathered = list(readings)
    own = [([one for one in gathered if one.kernel == kernel], kernel) for kernel in kernels]
    return [counter for some, kernel in ((gathered, None), *own) for counter in _means(some, kernel)]


def bandwidth_share(counters: Iterable[Counter]) -> float | None:
    return next((one.value for one in counters if one.name == "bandwidth" and one.kernel is None), None)


def _means(readings: list[Reading], kernel: str | None) -> Iterable[Counter]:
    """Shares are weighted by time: a kernel that runs long says more than one that runs often. Bytes are added up."""
    by_name: defaultdict[CounterName, list[Reading]] = defaultdict(list)
    for reading in readings:
        by_name[reading.name].append(reading)
    for name, (threshold, low, high) in _MEANINGS.items():
        is_sum = name == "traffic"
        weight = sum(1.0 if is_sum else one.weight for one in by_name[name])
        if weight <= 0:
            continue
        value = sum(one.value * (1.0 if is_sum else one.weight / weight) for one in by_name[name])
        verdict, meaning = high if value > threshold else low
        metric = by_name[name][-1].metric
        yield Counter(
            name=name,
            kernel=kernel,
            value=value,
            verdict=verdict,
            meaning=meaning,
            metric=metric,
            unit="bytes" if is_sum else "share",
        )
