"""Operators of a trace against what the device can do at most: FLOP/s, bytes/s, and how far from the limit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from redline.analyze.bound import LimitedBy
from redline.analyze.hardware import Hardware
from redline.analyze.roofline import Datasheet
from redline.spec import Frozen
from redline.trace.classes import KernelClass
from redline.trace.links import Links
from redline.trace.operators import self_times
from redline.trace.shapes import OperatorWork, work_of
from redline.work import Ceilings

IN_CACHE = 1.05
"""So much faster than memory allows: what it reads lay in a cache."""


class OperatorLimit(Frozen):
    """All calls of one operator on inputs of one shape."""

    name: str
    kind: KernelClass
    dims: str
    number_format: str
    calls: int
    device_s: float
    """In kernels that it launched itself."""
    flops: int
    """Products of all calls."""
    bytes: int
    flops_per_s: float
    bytes_per_s: float
    intensity: float
    """FLOPs per byte."""
    limited_by: LimitedBy | None
    """None where the device's limits are not known."""
    efficiency: float | None
    """The least time that the device allows over the time it took."""
    in_cache: bool = False
    """Faster than memory allows, which a cache explains; there is no efficiency then."""


def operator_limits(links: Sequence[Links], hardware: Hardware, ceilings: Ceilings | None) -> list[OperatorLimit]:
    """The longest first. Measured ceilings where there are some, else the datasheet of the GPU in the header."""
    sums: defaultdict[tuple[str, str, OperatorWork], list[int]] = defaultdict(lambda: [0, 0])
    for each in links:
        trace, operators = each.trace, each.trace.operators
        if not len(trace.work) or not len(trace.shapes):
            continue
        launched = self_times(each)[1]
        rows = np.flatnonzero((launched > 0) & (operators.shape >= 0))
        group = operators.name[rows].astype(np.int64) * len(trace.shapes) + operators.shape[rows]
        groups, which = np.unique(group, return_inverse=True)
        total, calls = np.zeros(len(groups), np.int64), np.bincount(which, minlength=len(groups))
        np.add.at(total, which, launched[rows])
        for number, ns, count in zip(groups.tolist(), total.tolist(), calls.tolist(), strict=True):
            name, shape = divmod(number, len(trace.shapes))
            work = work_of(trace.names[name], trace.shapes[shape])
            if work is not None:
                key = (trace.names[name], trace.shapes[shape].dims, work)
                sums[key][0] += ns
                sums[key][1] += count
    peaks = _peaks(hardware, ceilings)
    rows_of = [_limit(name, dims, work, ns, count, peaks) for (name, dims, work), (ns, count) in sums.items()]
    return sorted(rows_of, key=lambda row: -row.device_s)


def _peaks(hardware: Hardware, ceilings: Ceilings | None) -> tuple[dict[str, float], float] | None:
    if ceilings is not None:
        return ceilings.flops_per_s, ceilings.copy_bytes_per_s
    sheet = Datasheet.of(hardware.name) if hardware.name else None
    return (sheet.flops_per_s, sheet.bytes_per_s) if sheet is not None else None


def _limit(
    name: str, dims: str, work: OperatorWork, ns: int, calls: int, peaks: tuple[dict[str, float], float] | None
) -> OperatorLimit:
    device_s = ns / 1e9
    flops, moved = work.flops * calls, work.bytes * calls
    compute_s = memory_s = 0.0
    limited_by: LimitedBy | None = None
    if peaks is not None:
        peak = peaks[0].get(work.number_format)
        memory_s = moved / peaks[1]
        compute_s = flops / peak if peak and flops else 0.0
        # Products in a format whose peak is not known may be limited by either.
        limited_by = None if flops and not peak else "compute" if compute_s > memory_s else "memory"
    efficiency = max(compute_s, memory_s) / device_s if limited_by is not None and device_s else None
    in_cache = efficiency is not None and limited_by == "memory" and efficiency > IN_CACHE
    return OperatorLimit(
        name=name,
        kind=work.kind,
        dims=dims,
        number_format=work.number_format,
        calls=calls,
        device_s=device_s,
        flops=flops,
        bytes=moved,
        flops_per_s=flops / device_s if device_s else 0.0,
        bytes_per_s=moved / device_s if device_s else 0.0,
        intensity=flops / moved if moved else 0.0,
        limited_by=limited_by,
        efficiency=None if in_cache else efficiency,
        in_cache=in_cache,
    )
