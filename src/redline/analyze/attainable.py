"""This module computes the least time that work takes on a device: counted work by class of operator, and single operators that were
timed."""

from __future__ import annotations

from collections import defaultdict
from typing import Literal

from redline.model.fields import Frozen
from redline.model.work import PRODUCTS, Ceilings, OperatorKind, OperatorTime, OperatorWork, WorkCount

LimitedBy = Literal["compute", "memory"]


class ClassLimit(Frozen):
    """These are operators of one kind, unfused."""

    name: OperatorKind
    calls: int
    flops: int
    bytes: int
    intensity: float
    """This is in FLOPs per byte."""
    attainable_s: float
    """The sum of what each operator needs by itself."""
    limited_by: LimitedBy | None
    """Most of that time is spent on this. It is None where a number format has no ceiling, so that its products are not in the time."""
    measured_s: float | None = None
    """This is for one step, where a profile shows it; kernels that fuse several kinds count as the kind in their name."""

    @property
    def efficiency(self) -> float | None:
        return self.attainable_s / self.measured_s if self.measured_s and self.limited_by is not None else None


class Attainable(Frozen):
    compute_s: float
    """This is for all products of the step, each number format at its own ceiling."""
    memory_s: float
    """It is the time that the compulsory bytes take at the copy bandwidth."""
    unfused_s: float
    unfused_compute_s: float
    """This part of it is in operators limited by their products."""
    unfused_memory_s: float
    classes: tuple[ClassLimit, ...]
    without_ceiling: tuple[str, ...] = ()
    """Number formats of which no ceiling is known: their products are missing from `compute_s`."""

    @property
    def limit_s(self) -> float:
        return max(self.compute_s, self.memory_s)

    @property
    def limited_by(self) -> LimitedBy | None:
        """Returns which of its limits is the higher one, or None where products that are missing could make it the other one."""
        return _longer(self.compute_s, self.memory_s, all_known=not self.without_ceiling)


def _longer(compute_s: float, memory_s: float, *, all_known: bool) -> LimitedBy | None:
    if compute_s >= memory_s and compute_s:
        return "compute"
    return "memory" if all_known else None


Side = tuple[OperatorWork, float, LimitedBy | None]
"""It holds an operator, the least time of all its calls, and what limits it."""


def attainable(work: WorkCount, ceilings: Ceilings) -> Attainable:
    peaks, formats = ceilings.flops_per_s, work.flops_by_format()
    kinds: defaultdict[OperatorKind, list[Side]] = defaultdict(list)
    spent: defaultdict[LimitedBy | None, float] = defaultdict(float)
    for one in work.operators:
        seconds, side = operator_time(one, ceilings)
        spent[side] += one.calls * seconds
        kinds[one.kind].append((one, one.calls * seconds, side))
    classes = (_class_limit(kind, sides) for kind, sides in kinds.items())
    return Attainable(
        compute_s=sum(flops / peaks[form] for form, flops in formats.items() if form in peaks),
        memory_s=work.compulsory_bytes / ceilings.copy_bytes_per_s,
        unfused_s=sum(spent.values()),
        unfused_compute_s=spent["compute"],
        unfused_memory_s=spent["memory"],
        classes=tuple(sorted(classes, key=lambda one: -one.attainable_s)),
        without_ceiling=tuple(sorted(form for form, flops in formats.items() if flops and form not in peaks)),
    )


def operator_time(one: OperatorWork | OperatorTime, ceilings: Ceilings) -> tuple[float, LimitedBy | None]:
    """Returns what is the least time of one call, and what limits it. Only products are limited by the matrix units; everything else by its bytes."""
    memory_s, has_products = one.bytes / ceilings.copy_bytes_per_s, one.kind in PRODUCTS and one.flops > 0
    peak = ceilings.flops_per_s.get(one.number_format) if has_products else None
    compute_s = one.flops / peak if peak else 0.0
    return max(compute_s, memory_s), _longer(compute_s, memory_s, all_known=bool(peak) or not has_products)


def _class_limit(kind: OperatorKind, sides: list[Side]) -> ClassLimit:
    total = sum(seconds for _, seconds, _ in sides)
    on_compute = sum(seconds for _, seconds, side in sides if side == "compute")
    flops, moved = (sum(getattr(one, what) * one.calls for one, _, _ in sides) for what in ("flops", "bytes"))
    all_known = all(side is not None for _, _, side in sides)
    return ClassLimit(
        name=kind,
        calls=sum(one.calls for one, _, _ in sides),
        flops=flops,
        bytes=moved,
        intensity=flops / moved if moved else 0.0,
        attainable_s=total,
        limited_by=("compute" if on_compute > total / 2 else "memory") if all_known else None,
    )
