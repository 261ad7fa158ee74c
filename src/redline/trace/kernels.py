"""The kernel table and time by class, like `rocprof --stats`, from a trace or from another profiler's rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec
import numpy as np

from redline.model.fields import Frozen
from redline.trace.classes import CLASSES, KernelClass, class_of
from redline.trace.columns import Trace, Work
from redline.trace.intervals import distinct, seconds
from redline.trace.names import short_name

MOST_OF_THE_TIME = 0.8


class NamedTime(msgspec.Struct, frozen=True, gc=False):
    """All calls of one name, in nanoseconds. None where a profiler does not tell."""

    name: str
    calls: int
    total_ns: int
    min_ns: int | None
    max_ns: int | None
    bytes: int | None = None
    """Moved by all of them; None where one does not tell."""

    def plus(self, other: NamedTime) -> NamedTime:
        """The calls of both, under the name of the first."""
        lows = [value for value in (self.min_ns, other.min_ns) if value is not None]
        highs = [value for value in (self.max_ns, other.max_ns) if value is not None]
        return NamedTime(
            name=self.name,
            calls=self.calls + other.calls,
            total_ns=self.total_ns + other.total_ns,
            min_ns=min(lows, default=None),
            max_ns=max(highs, default=None),
            bytes=None if self.bytes is None or other.bytes is None else self.bytes + other.bytes,
        )


class KernelRow(Frozen, gc=False, rename={"kernel_class": "class"}):
    name: str
    short_name: str
    kernel_class: KernelClass
    calls: int
    total_s: float
    mean_s: float
    min_s: float | None
    max_s: float | None
    share: float
    """Of the time in all kernels."""


class ClassRow(Frozen):
    name: KernelClass
    total_s: float
    share: float
    """Of all device time: kernels, copies and fills."""
    calls: int


class Direction(Frozen):
    """Copies from one kind of memory to another."""

    name: str
    calls: int
    total_s: float
    share: float
    """Of all device time."""
    bytes: int | None
    bytes_per_s: float | None
    kind: Literal["copy", "fill"] = "copy"
    is_apart: bool = False
    """All of them ran on streams on which no kernel ran."""


def times_by_name(traces: Sequence[Trace], kinds: Iterable[Work]) -> list[NamedTime]:
    """Over all traces, in the order in which the names were first met: what reads them all goes through memory in order."""
    wanted = [int(kind) for kind in kinds]
    merged: dict[str, NamedTime] = {}
    for trace in traces:
        for found in _of_one(trace, wanted):
            merged[found.name] = merged[found.name].plus(found) if found.name in merged else found
    return list(merged.values())


def _of_one(trace: Trace, kinds: list[int]) -> Iterator[NamedTime]:
    rows = np.flatnonzero(np.isin(trace.work.kind, kinds))
    if not len(rows):
        return
    rows = rows[np.argsort(trace.work.name[rows], kind="stable")]
    name, duration, size = trace.work.name[rows], trace.work.duration[rows], trace.work.bytes[rows]
    begins = np.flatnonzero(np.concatenate(([True], name[1:] != name[:-1])))
    columns = zip(
        name[begins].tolist(),
        np.diff(np.concatenate((begins, [len(name)]))).tolist(),
        np.add.reduceat(duration, begins).tolist(),
        np.minimum.reduceat(duration, begins).tolist(),
        np.maximum.reduceat(duration, begins).tolist(),
        np.add.reduceat(size, begins).tolist(),
        np.minimum.reduceat(size, begins).tolist(),
        strict=True,
    )
    for number, calls, total, shortest, longest, moved, least in columns:
        yield NamedTime(trace.names[number], calls, total, shortest, longest, moved if least >= 0 else None)


def kernel_rows(times: Sequence[NamedTime]) -> list[KernelRow]:
    """Longest first."""
    whole = sum(one.total_ns for one in times) or 1
    rows = [
        KernelRow(
            name=one.name,
            short_name=short_name(one.name),
            kernel_class=class_of(one.name),
            calls=one.calls,
            total_s=seconds(one.total_ns),
            mean_s=seconds(one.total_ns / one.calls) if one.calls else 0.0,
            min_s=None if one.min_ns is None else seconds(one.min_ns),
            max_s=None if one.max_ns is None else seconds(one.max_ns),
            share=one.total_ns / whole,
        )
        for one in times
    ]
    return sorted(rows, key=lambda row: -row.total_s)


def class_rows(kernels: Sequence[NamedTime], copies: Sequence[NamedTime] = ()) -> list[ClassRow]:
    """Every class that took any time, longest first."""
    total: defaultdict[KernelClass, int] = defaultdict(int)
    calls: defaultdict[KernelClass, int] = defaultdict(int)
    for one in kernels:
        kind = class_of(one.name)
        total[kind] += one.total_ns
        calls[kind] += one.calls
    for one in copies:
        total["copy"] += one.total_ns
        calls["copy"] += one.calls
    whole = sum(total.values())
    rows = [
        ClassRow(
            name=name, total_s=seconds(total[name]), share=total[name] / whole if whole else 0.0, calls=calls[name]
        )
        for name in CLASSES
        if calls[name]
    ]
    return sorted(rows, key=lambda row: -row.total_s)


def most_of_the_time(rows: Sequence[KernelRow], share: float = MOST_OF_THE_TIME) -> int:
    """How few kernels make up so much of the time: those at the top of the table."""
    so_far = 0.0
    for count, row in enumerate(rows, start=1):
        so_far += row.share
        if so_far >= share - 1e-12:
            return count
    return len(rows)


def copy_rows(traces: Sequence[Trace]) -> list[Direction]:
    """Copies and fills by direction, with the bandwidth where every copy tells its size."""
    device_ns = sum(int(trace.work.duration.sum()) for trace in traces)
    kinds: tuple[tuple[Work, Literal["copy", "fill"]], ...] = ((Work.COPY, "copy"), (Work.FILL, "fill"))
    beside_kernels = {name for trace in traces for name in _on_streams_of_kernels(trace)}
    rows = [
        Direction(
            name=one.name,
            kind=label,
            calls=one.calls,
            total_s=seconds(one.total_ns),
            share=one.total_ns / device_ns if device_ns else 0.0,
            bytes=one.bytes,
            bytes_per_s=one.bytes / seconds(one.total_ns) if one.bytes is not None and one.total_ns else None,
            is_apart=one.name not in beside_kernels,
        )
        for kind, label in kinds
        for one in times_by_name(traces, [kind])
    ]
    return sorted(rows, key=lambda row: -row.total_s)


def _on_streams_of_kernels(trace: Trace) -> set[str]:
    """Names of copies and fills that share a stream with kernels."""
    work = trace.work
    queues = (work.device.astype(np.int64) << 32) ^ work.stream.astype(np.int64)
    kernels = work.kind == Work.KERNEL
    rows = ~kernels & np.isin(queues, queues[kernels])
    return {trace.names[number] for number in distinct(work.name[rows]).tolist()}
