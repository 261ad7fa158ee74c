"""This module makes the tables of a trace by name: kernels (like `rocprof --stats`), classes, copies and operators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Literal

import msgspec
import numpy as np

from redline.model.fields import Frozen
from redline.trace.columns import UNKNOWN, Ints, Mask, Trace, Work
from redline.trace.intervals import distinct, seconds, summed
from redline.trace.links import Links
from redline.trace.names import CLASSES, KernelClass, class_of, short_name

# This part is about kernels and classes.


class NamedTime(msgspec.Struct, frozen=True, gc=False):
    """This adds up all calls of one name, in nanoseconds. A field is None if a profiler does not tell."""

    name: str
    calls: int
    total_ns: int
    min_ns: int | None
    max_ns: int | None
    bytes: int | None = None
    """All calls together moved this many bytes. It is None if one of them does not tell."""

    def plus(self, other: NamedTime) -> NamedTime:
        """Returns the calls of both, under the name of the first."""
        lows = [value for value in (self.min_ns, other.min_ns) if value is not None]
        highs = [value for value in (self.max_ns, other.max_ns) if value is not None]
        moved = None if self.bytes is None or other.bytes is None else self.bytes + other.bytes
        calls, total_ns = self.calls + other.calls, self.total_ns + other.total_ns
        return NamedTime(self.name, calls, total_ns, min(lows, default=None), max(highs, default=None), moved)


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
    """This is its share of the time in all kernels."""


class ClassRow(Frozen):
    name: KernelClass
    total_s: float
    share: float
    """This is its share of all device time: kernels, copies and fills."""
    calls: int


class Direction(Frozen):
    """This is the row for copies from one kind of memory to another."""

    name: str
    calls: int
    total_s: float
    share: float
    """This is their share of all device time."""
    bytes: int | None
    bytes_per_s: float | None
    kind: Literal["copy", "fill"] = "copy"
    is_apart: bool = False
    """It is true if all of them ran on streams on which no kernel ran."""


def added_up(times: Iterable[NamedTime]) -> list[NamedTime]:
    """Returns one row for each name, the longest first."""
    sums: dict[str, NamedTime] = {}
    for time in times:
        sums[time.name] = sums[time.name].plus(time) if time.name in sums else time
    return sorted(sums.values(), key=lambda time: (-time.total_ns, time.name))


def times_by_name(traces: Iterable[Trace], *kinds: Work) -> list[NamedTime]:
    """Returns the device work of these kinds, over all traces."""
    return added_up(time for trace in traces for time in _times_of(trace, np.isin(trace.work.kind, kinds)))


def _times_of(trace: Trace, wanted: Mask) -> Iterator[NamedTime]:
    rows = np.flatnonzero(wanted)
    work = trace.work.only(rows[np.argsort(trace.work.name[rows], kind="stable")])
    begins = np.flatnonzero(np.diff(work.name, prepend=UNKNOWN))
    if not len(begins):
        return
    calls = np.diff(np.append(begins, len(work)))
    total, low, high = (reduce.reduceat(work.duration, begins) for reduce in (np.add, np.minimum, np.maximum))
    moved, least = (reduce.reduceat(work.bytes, begins) for reduce in (np.add, np.minimum))
    columns = (work.name[begins], calls, total, low, high, moved, least)
    for name, count, total, low, high, size, smallest in zip(*(column.tolist() for column in columns), strict=True):
        yield NamedTime(trace.names[name], count, total, low, high, size if smallest >= 0 else None)


def kernel_rows(times: Sequence[NamedTime]) -> list[KernelRow]:
    """Returns a row for each kernel, the longest first."""
    whole = sum(time.total_ns for time in times) or 1
    rows = [
        KernelRow(
            name=time.name,
            short_name=short_name(time.name),
            kernel_class=class_of(time.name),
            calls=time.calls,
            total_s=seconds(time.total_ns),
            mean_s=seconds(time.total_ns / max(time.calls, 1)),
            min_s=None if time.min_ns is None else seconds(time.min_ns),
            max_s=None if time.max_ns is None else seconds(time.max_ns),
            share=time.total_ns / whole,
        )
        for time in times
    ]
    return sorted(rows, key=lambda row: -row.total_s)


def class_rows(kernels: Sequence[NamedTime], copies: Sequence[NamedTime] = ()) -> list[ClassRow]:
    """Returns every class that took any time, the longest first. Copies and fills count as copies, whatever their names are."""
    sums = {name: [0, 0] for name in CLASSES}
    for kind, time in (*((class_of(time.name), time) for time in kernels), *(("copy", time) for time in copies)):
        sums[kind] = [sums[kind][0] + time.total_ns, sums[kind][1] + time.calls]
    whole = sum(total for total, _ in sums.values()) or 1
    rows = [
        ClassRow(name=name, total_s=seconds(total), share=total / whole, calls=calls)
        for name, (total, calls) in sums.items()
        if calls
    ]
    return sorted(rows, key=lambda row: -row.total_s)


def most_of_the_time(rows: Sequence[KernelRow], share: float) -> int:
    """Returns how few kernels make up this share of the time. They are those at the top of the table."""
    so_far = accumulate(row.share for row in rows)
    return next((count for count, total in enumerate(so_far, start=1) if total >= share - 1e-12), len(rows))


def copy_rows(traces: Sequence[Trace]) -> list[Direction]:
    """Returns copies and fills by direction. The bandwidth is given if every copy tells its size."""
    device_s = seconds(sum(int(trace.work.duration.sum()) for trace in traces))
    beside_kernels = {name for trace in traces for name in _on_streams_of_kernels(trace)}
    kinds: tuple[tuple[Work, Literal["copy", "fill"]], ...] = ((Work.COPY, "copy"), (Work.FILL, "fill"))
    rows = []
    for kind, label in kinds:
        for time in times_by_name(traces, kind):
            total_s = seconds(time.total_ns)
            rows.append(
                Direction(
                    name=time.name,
                    kind=label,
                    calls=time.calls,
                    total_s=total_s,
                    share=total_s / device_s if device_s else 0.0,
                    bytes=time.bytes,
                    bytes_per_s=time.bytes / total_s if time.bytes is not None and total_s else None,
                    is_apart=time.name not in beside_kernels,
                )
            )
    return sorted(rows, key=lambda row: -row.total_s)


def _on_streams_of_kernels(trace: Trace) -> set[str]:
    """Returns the names of copies and fills that share a stream with kernels."""
    work = trace.work
    queues, kernels = (work.device.astype(np.int64) << 32) ^ work.stream, work.kind == Work.KERNEL
    return {trace.names[name] for name in distinct(work.name[~kernels & np.isin(queues, queues[kernels])]).tolist()}


# This part is about operators.

OperatorSource = Literal["operator", "graph", "no-operator", "no-launch"]
"""`graph` work was replayed by a graph launch, which knows no operators. `no-operator` work was launched outside any
operator. For `no-launch` the file does not say what launched the work."""


class OperatorRow(Frozen):
    name: str
    calls: int
    cpu_self_s: float
    """It ran for this long on the host, without the operators it called."""
    cpu_total_s: float
    """This includes the operators it called. An operator inside its own kind is not counted twice."""
    device_self_s: float
    """This is the device work that it launched itself."""
    device_total_s: float
    cpu_allocated_bytes: int
    device_allocated_bytes: int
    """It and the operators it called took this much from the allocator, given back or not. It is 0 if memory was not recorded."""
    source: OperatorSource = "operator"
    device_share: float = 0.0
    """The work it launched itself has this share of all device time. Over all rows the shares add up to 1."""


Key = tuple[str, OperatorSource]


def operator_rows(links: Sequence[Links]) -> list[OperatorRow]:
    """Returns the operators over all traces. Most device time comes first, then most host time."""
    merged: dict[Key, Any] = {}
    for one in links:
        for key, sums in (*_without_operator(one), *_by_operator(one)):
            merged[key] = merged.get(key, 0) + sums
    whole = int(sum(sums[3] for sums in merged.values())) or 1
    rows = []
    for (name, source), sums in merged.items():
        calls, *times, cpu_bytes, device_bytes = sums.tolist()
        own, total, device_own, device_total = map(seconds, times)
        rows.append(
            OperatorRow(
                name=name,
                calls=calls,
                cpu_self_s=own,
                cpu_total_s=total,
                device_self_s=device_own,
                device_total_s=device_total,
                cpu_allocated_bytes=cpu_bytes,
                device_allocated_bytes=device_bytes,
                source=source,
                device_share=times[2] / whole,
            )
        )
    return sorted(rows, key=lambda row: (-row.device_self_s, -row.cpu_self_s, row.name))


def class_times(links: Sequence[Links]) -> list[NamedTime]:
    """Returns the host time of each operator without those it called. Time by class is based on it if there is no device."""
    rows = [row for row in operator_rows(links) if row.source == "operator"]
    return [NamedTime(row.name, row.calls, round(row.cpu_self_s * 1e9), None, None) for row in rows]


def self_times(links: Links) -> tuple[Ints, Ints]:
    """Returns for every operator its host time without its children, and the device time that it launched itself."""
    operators, known = links.trace.operators, (links.operator >= 0) & ~links.by_graph
    own = np.maximum(operators.duration - links.nesting.children_sum(operators.duration), 0)
    return own, summed(links.operator[known], links.trace.work.duration[known], len(operators))


def _without_operator(links: Links) -> Iterator[tuple[Key, Ints]]:
    """Yields device work that no operator launched. It gets rows of its own, so that the table covers all work."""
    trace, by_graph, launched = links.trace, links.by_graph, links.is_launched
    groups: list[tuple[str, OperatorSource, Mask]] = [
        (f"{trace.names[number]} (replayed graph)", "graph", by_graph & (trace.calls.name[links.call] == number))
        for number in distinct(trace.calls.name[links.call[by_graph]]).tolist()
    ]
    groups.append(("(launched outside any operator)", "no-operator", launched & (links.operator < 0) & ~by_graph))
    groups.append(("(no launch in the file)", "no-launch", ~launched))
    for name, source, rows in groups:
        if rows.any():
            calls = distinct(links.call[rows & launched])
            device, host = int(trace.work.duration[rows].sum()), int(trace.calls.duration[calls].sum())
            yield (name, source), np.array([len(calls) or rows.sum(), host, host, device, device, 0, 0])


def _by_operator(links: Links) -> Iterator[tuple[Key, Ints]]:
    trace, nesting, operators, taken = links.trace, links.nesting, links.trace.operators, links.trace.allocations
    count = len(operators)
    if not count:
        return
    cpu_self, device_self = self_times(links)
    owner = nesting.around(taken.thread, taken.at)
    took = [(taken.bytes > 0) & (owner != UNKNOWN) & side for side in (taken.on_device <= 0, taken.on_device > 0)]
    inside = [device_self, *(summed(owner[rows], taken.bytes[rows], count) for rows in took)]
    outermost = ~nesting.has_namesake_around(operators.name)
    columns = [np.ones(count, np.int64), cpu_self, operators.duration * outermost, device_self]
    columns += [nesting.with_all_inside(values) * outermost for values in inside]
    names, row = np.unique(operators.name, return_inverse=True)
    for name, *own in zip(names.tolist(), *(summed(row, column, len(names)) for column in columns), strict=True):
        yield (trace.names[name], "operator"), np.array(own)


def forward_rows(links: Links) -> tuple[Ints, Ints]:
    """Returns the operators of the backward pass, and for each the forward operator that it belongs to, or UNKNOWN."""
    operators = links.trace.operators
    numbered = operators.sequence >= 0
    forward = np.flatnonzero(numbered & (operators.forward_thread <= 0))
    backward = np.flatnonzero(numbered & (operators.forward_thread > 0))
    if not len(forward):
        return backward, np.full(len(backward), UNKNOWN, np.int64)
    # Operators that make no node carry the number of the next one. The last to carry it is the one that made it.
    order = forward[np.lexsort((operators.start[forward], operators.sequence[forward]))]
    last = np.searchsorted(operators.sequence[order], operators.sequence[backward], side="right") - 1
    found = order[np.maximum(last, 0)]
    return backward, np.where((last >= 0) & (operators.sequence[found] == operators.sequence[backward]), found, UNKNOWN)
