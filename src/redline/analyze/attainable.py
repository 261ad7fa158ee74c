"""The least time that counted work can take on a device with measured ceilings.

Two limits, which are never mixed. The *roofline* of the whole step: all products at the speed of the matrix units, and
the compulsory bytes at the speed of memory, whichever takes longer; no fusion gets below it. The *unfused* time: every
operator by itself, its products or its own bytes; what eager execution must take at least.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from statistics import median
from typing import Literal

from redline.analyze.blocks import timed_blocks
from redline.record import RunRecord
from redline.spec import Spec
from redline.work import PRODUCTS, Ceilings, OperatorKind, OperatorWork, WorkCount

LimitedBy = Literal["compute", "memory"]


class ClassLimit(Spec):
    """Operators of one kind, unfused."""

    name: OperatorKind
    calls: int
    flops: int
    bytes: int
    intensity: float
    """FLOPs per byte."""
    attainable_s: float
    """The sum of what each operator needs by itself."""
    limited_by: LimitedBy
    """What most of that time is spent on."""
    measured_s: float | None = None
    """Of one step, where a profile told; kernels that fuse several kinds count as the one their name tells."""

    @property
    def efficiency(self) -> float | None:
        return self.attainable_s / self.measured_s if self.measured_s else None


class Attainable(Spec):
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
    def limited_by(self) -> LimitedBy:
        return "compute" if self.compute_s >= self.memory_s else "memory"


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


def operator_time(one: OperatorWork, ceilings: Ceilings) -> tuple[float, LimitedBy]:
    """All its calls. Only products are held against the matrix units; everything else is limited by its bytes."""
    memory_s = one.bytes / ceilings.copy_bytes_per_s
    peak = ceilings.flops_per_s.get(one.number_format) if one.kind in PRODUCTS else None
    compute_s = one.flops / peak if peak else 0.0
    return one.calls * max(compute_s, memory_s), "compute" if compute_s >= memory_s and compute_s else "memory"


def step_s(record: RunRecord) -> float | None:
    """The median time of a step, without waiting in between."""
    samples = list(chain.from_iterable(block.samples for block in timed_blocks(record, "throughput")))
    return median(samples) if samples else None


def _class_limit(kind: OperatorKind, operators: Iterable[OperatorWork], ceilings: Ceilings) -> ClassLimit:
    listed = list(operators)
    sides = [operator_time(one, ceilings) for one in listed]
    total = sum(seconds for seconds, _ in sides)
    on_compute = sum(seconds for seconds, side in sides if side == "compute")
    flops, moved = sum(one.flops * one.calls for one in listed), sum(one.bytes * one.calls for one in listed)
    return ClassLimit(
        name=kind,
        calls=sum(one.calls for one in listed),
        flops=flops,
        bytes=moved,
        intensity=flops / moved if moved else 0.0,
        attainable_s=total,
        limited_by="compute" if on_compute > total / 2 else "memory",
    )
