"""Hardware counters in one vocabulary, whichever tool read them, each with a rule that says what its value means."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from redline.spec import Spec

CounterName = Literal["bandwidth", "occupancy", "l1_hits", "l2_hits", "compute", "traffic"]
Verdict = Literal["memory-bound", "poor", "high", "fine"]

MEMORY_BOUND = 0.8
POOR_OCCUPANCY = 0.3
POOR_HITS = 0.7
HIGH_COMPUTE = 0.8


class Counter(Spec):
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


def _traffic(value: float) -> tuple[Verdict, str]:
    return "fine", "bytes moved to and from device memory"


_RULES: dict[CounterName, Callable[[float], tuple[Verdict, str]]] = {
    "bandwidth": _bandwidth,
    "occupancy": _occupancy,
    "l1_hits": _hits,
    "l2_hits": _hits,
    "compute": _compute,
    "traffic": _traffic,
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
