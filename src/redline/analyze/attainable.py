"""The least time that work takes on a device: counted work by class of operator, and single operators that were timed."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Literal

from redline.model.fields import Frozen
from redline.model.work import PRODUCTS, Ceilings, OperatorKind, OperatorTime, OperatorWork, WorkCount

LimitedBy = Literal["compute", "memory"]


class ClassLimit(Frozen):
    """Operators of one kind, unfused."""

    name: OperatorKind
    calls: int
    flops: int
    bytes: int
    intensity: float
    """FLOPs per byte."""
    attainable_s: float
    """The sum of what each operator needs by itself."""
    limited_by: LimitedBy | None
    """What most of that time is spent on; None where a number format has no ceiling, so that its products are not in the time."""
    measured_s: float | None = None
    """For one step, where a profile shows it; kernels that fuse several kinds count as the kind in their name."""

    @property
    def efficiency(self) -> float | None:
        return self.attainable_s / self.measured_s if self.measured_s and self.limited_by is not None else None


class Attainable(Frozen):
    compute_s: float
    """All products of the step, each number format at its own ceiling."""
    memory_s: float
    """The compulsory bytes at the copy bandwidth."""
    unfused_s: float
    unfused_compute_s: float
    """Of that, in operators limited by their products."""
    unfused_memory_s: float
    classes: tuple[ClassLimit, ...]
    without_ceiling: tuple[str, ...] = ()
    """Number formats of which no ceiling is known: their products are missing from `compute_s`."""

    @property
    def limit_s(self) -> float:
        return max(self.compute_s, self.memory_s)

    @property
    def limited_by(self) -> LimitedBy | None:
        """None where products that are missing could make it the other one."""
        return _longer(self.compute_s, self.memory_s, all_known=not self.without_ceiling)


def _longer(compute_s: float, memory_s: float, *, all_known: bool) -> LimitedBy | None:
    if compute_s >= memory_s and compute_s:
        return "compute"
    return "memory" if all_known else None


def attainable(work: WorkCount, ceilings: Ceilings) -> Attainable:
    formats = work.flops_by_format()
    known = {form: flops for form, flops in formats.items() if form in ceilings.flops_per_s}
    classes = [
        _class_limit(kind, [one for one in work.operators if one.kind == kind], ceilings)
        for kind in dict.fromkeys(one.kind for one in work.operators)
    ]
    sides = [operator_time(one, ceilings) for one in work.operators]
    return Attainable(
        compute_s=sum(flops / ceilings.flops_per_s[form] for form, flops in known.items()),
        memory_s=work.compulsory_bytes / ceilings.copy_bytes_per_s,
        unfused_s=sum(seconds for seconds, _ in sides),
        unfused_compute_s=sum(seconds for seconds, side in sides if side == "compute"),
        unfused_memory_s=sum(seconds for seconds, side in sides if side == "memory"),
        classes=tuple(sorted(classes, key=lambda one: -one.attainable_s)),
        without_ceiling=tuple(sorted(form for form, flops in formats.items() if flops and form not in known)),
    )


def operator_time(one: OperatorWork, ceilings: Ceilings) -> tuple[float, LimitedBy | None]:
    """Least time of all its calls, and what limits it. Only products are limited by the matrix units; everything else by its bytes."""
    memory_s = one.bytes / ceilings.copy_bytes_per_s
    has_products = one.kind in PRODUCTS and one.flops > 0
    peak = ceilings.flops_per_s.get(one.number_format) if has_products else None
    compute_s = one.flops / peak if peak else 0.0
    all_known = peak is not None or not has_products
    return one.calls * max(compute_s, memory_s), _longer(compute_s, memory_s, all_known=all_known)


def _class_limit(kind: OperatorKind, operators: Iterable[OperatorWork], ceilings: Ceilings) -> ClassLimit:
    listed = list(operators)
    sides = [operator_time(one, ceilings) for one in listed]
    total = sum(seconds for seconds, _ in sides)
    on_compute = sum(seconds for seconds, side in sides if side == "compute")
    all_known = all(side is not None for _, side in sides)
    flops, moved = sum(one.flops * one.calls for one in listed), sum(one.bytes * one.calls for one in listed)
    return ClassLimit(
        name=kind,
        calls=sum(one.calls for one in listed),
        flops=flops,
        bytes=moved,
        intensity=flops / moved if moved else 0.0,
        attainable_s=total,
        limited_by=("compute" if on_compute > total / 2 else "memory") if all_known else None,
    )


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
    """None where the ceiling of its number format is not known."""
    efficiency: float | None
    """Roofline time over measured time; None without a limit, or where its data fits in the cache."""
    in_cache: bool
    refusal: str | None


def operator_row(timed: OperatorTime, ceilings: Ceilings) -> OperatorRow:
    seconds = statistics.median(timed.samples) if timed.samples else None
    limit = _limit(timed, ceilings) if seconds else None
    in_cache = bool(ceilings.cache_bytes and timed.bytes < OUTSIDE_CACHE * ceilings.cache_bytes)
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
