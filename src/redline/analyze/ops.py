"""Timed operators against the roofline of their device."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from redline.analyze.bound import LimitedBy
from redline.spec import Frozen
from redline.work import PRODUCTS, Ceilings, OperatorKind, OperatorTime

OUTSIDE_CACHE = 1.0
"""Times the last cache: below it an operator may read what the one before left there, and beat the copy bandwidth."""


class OperatorRow(Frozen):
    operator: str
    shape: str
    number_format: str
    kind: OperatorKind
    calls: int
    """In one forward of the model, where the shapes came from one."""
    seconds: float | None
    """Median of the bursts, per call."""
    spread: float | None
    """Half of the distance between the fastest and the slowest burst, over the median."""
    flops: int
    bytes: int
    flops_per_s: float | None
    bytes_per_s: float | None
    limited_by: LimitedBy | None
    """None without ceilings."""
    efficiency: float | None
    """Roofline time over measured time; None without ceilings, or where its data fits in the cache."""
    in_cache: bool
    refusal: str | None


def operator_row(timed: OperatorTime, ceilings: Ceilings | None) -> OperatorRow:
    seconds = statistics.median(timed.samples) if timed.samples else None
    limit = _limit(timed, ceilings) if ceilings is not None and seconds else None
    cache = ceilings.cache_bytes if ceilings is not None else None
    in_cache = bool(cache and timed.bytes < OUTSIDE_CACHE * cache)
    is_judged = limit is not None and not (in_cache and limit[1] == "memory")
    return OperatorRow(
        operator=timed.operator,
        shape=timed.shape,
        number_format=timed.number_format,
        kind=timed.kind,
        calls=timed.calls,
        seconds=seconds,
        spread=(max(timed.samples) - min(timed.samples)) / 2 / seconds if seconds else None,
        flops=timed.flops,
        bytes=timed.bytes,
        flops_per_s=timed.flops / seconds if seconds and timed.flops else None,
        bytes_per_s=timed.bytes / seconds if seconds else None,
        limited_by=limit[1] if limit is not None else None,
        efficiency=limit[0] / seconds if limit is not None and seconds and is_judged else None,
        in_cache=in_cache,
        refusal=timed.refusal,
    )


def _limit(timed: OperatorTime, ceilings: Ceilings) -> tuple[float, LimitedBy] | None:
    """The least time it can take; None where the ceiling of its number format is not known."""
    memory_s = timed.bytes / ceilings.copy_bytes_per_s
    if timed.kind not in PRODUCTS or not timed.flops:
        return memory_s, "memory"
    peak = ceilings.flops_per_s.get(timed.number_format)
    if peak is None:
        return None
    compute_s = timed.flops / peak
    return (compute_s, "compute") if compute_s >= memory_s else (memory_s, "memory")


def by_time(rows: Sequence[OperatorRow]) -> list[OperatorRow]:
    """The most time in one forward first; what was refused last."""
    return sorted(rows, key=lambda row: -(row.seconds or 0.0) * row.calls)
