"""The tables of a trace by name: kernels (like `rocprof --stats`), classes, copies, operators, and memory over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Literal

import msgspec
import numpy as np

from redline.model.fields import Frozen
from redline.trace.columns import UNKNOWN, Ints, Mask, Trace, Work
from redline.trace.intervals import distinct, seconds, summed
from redline.trace.links import Links
from redline.trace.names import CLASSES, KernelClass, class_of, label_of, short_name

# Kernels and classes


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
        """Returns the calls of both, under the name of the first."""
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
    """True if all of them ran on streams on which no kernel ran."""


def times_by_name(traces: Sequence[Trace], kinds: Iterable[Work]) -> list[NamedTime]:
    """Over all traces, in the order in which the names were first met: what reads them all goes through memory in order."""
    wanted = [int(kind) for kind in kinds]
    return _added_up(time for trace in traces for time in _times_of(trace, wanted))


def _added_up(times: Iterable[NamedTime]) -> list[NamedTime]:
    sums: dict[str, NamedTime] = {}
    for time in times:
        sums[time.name] = sums[time.name].plus(time) if time.name in sums else time
    return list(sums.values())


def added_up(times: Iterable[NamedTime]) -> list[NamedTime]:
    """One row for each name, longest first."""
    return sorted(_added_up(times), key=lambda time: (-time.total_ns, time.name))


def _times_of(trace: Trace, kinds: list[int]) -> Iterator[NamedTime]:
    rows = np.flatnonzero(np.isin(trace.work.kind, kinds))
    if not len(rows):
        return
    rows = rows[np.argsort(trace.work.name[rows], kind="stable")]
    name, duration, size = trace.work.name[rows], trace.work.duration[rows], trace.work.bytes[rows]
    begins = np.flatnonzero(np.concatenate(([True], name[1:] != name[:-1])))
    columns = [
        name[begins],
        np.diff(np.concatenate((begins, [len(name)]))),
        *(reduce.reduceat(duration, begins) for reduce in (np.add, np.minimum, np.maximum)),
        *(reduce.reduceat(size, begins) for reduce in (np.add, np.minimum)),
    ]
    for number, calls, total, shortest, longest, moved, least in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        yield NamedTime(trace.names[number], calls, total, shortest, longest, moved if least >= 0 else None)


def kernel_rows(times: Sequence[NamedTime]) -> list[KernelRow]:
    """Longest first."""
    whole = sum(time.total_ns for time in times) or 1
    rows = [
        KernelRow(
            name=time.name,
            short_name=short_name(time.name),
            kernel_class=class_of(time.name),
            calls=time.calls,
            total_s=seconds(time.total_ns),
            mean_s=seconds(time.total_ns / time.calls) if time.calls else 0.0,
            min_s=None if time.min_ns is None else seconds(time.min_ns),
            max_s=None if time.max_ns is None else seconds(time.max_ns),
            share=time.total_ns / whole,
        )
        for time in times
    ]
    return sorted(rows, key=lambda row: -row.total_s)


def class_rows(kernels: Sequence[NamedTime], copies: Sequence[NamedTime] = ()) -> list[ClassRow]:
    """Returns every class that took any time, longest first. Copies and fills are copies, whatever their names."""
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
    """How few kernels make up so much of the time: those at the top of the table."""
    so_far = accumulate(row.share for row in rows)
    return next((count for count, total in enumerate(so_far, start=1) if total >= share - 1e-12), len(rows))


def copy_rows(traces: Sequence[Trace]) -> list[Direction]:
    """Copies and fills by direction, with the bandwidth where every copy tells its size."""
    device_ns = sum(int(trace.work.duration.sum()) for trace in traces)
    kinds: tuple[tuple[Work, Literal["copy", "fill"]], ...] = ((Work.COPY, "copy"), (Work.FILL, "fill"))
    beside_kernels = {name for trace in traces for name in _on_streams_of_kernels(trace)}
    rows = [
        Direction(
            name=time.name,
            kind=label,
            calls=time.calls,
            total_s=seconds(time.total_ns),
            share=time.total_ns / device_ns if device_ns else 0.0,
            bytes=time.bytes,
            bytes_per_s=time.bytes / seconds(time.total_ns) if time.bytes is not None and time.total_ns else None,
            is_apart=time.name not in beside_kernels,
        )
        for kind, label in kinds
        for time in times_by_name(traces, [kind])
    ]
    return sorted(rows, key=lambda row: -row.total_s)


def _on_streams_of_kernels(trace: Trace) -> set[str]:
    """Returns the names of copies and fills that share a stream with kernels."""
    work = trace.work
    queues = (work.device.astype(np.int64) << 32) ^ work.stream.astype(np.int64)
    kernels = work.kind == Work.KERNEL
    rows = ~kernels & np.isin(queues, queues[kernels])
    return {trace.names[number] for number in distinct(work.name[rows]).tolist()}


# Operators

OperatorSource = Literal["operator", "graph", "no-operator", "no-launch"]
"""`graph`: replayed by a graph launch, which knows no operators. `no-operator`: launched outside any operator.
`no-launch`: the file does not say what launched it."""


class OperatorRow(Frozen):
    name: str
    calls: int
    cpu_self_s: float
    """It ran so long on the host, without the operators it called."""
    cpu_total_s: float
    """With them; an operator inside its own kind is not counted twice."""
    device_self_s: float
    """Device work that it launched itself."""
    device_total_s: float
    cpu_allocated_bytes: int
    device_allocated_bytes: int
    """It and those it called took so much from the allocator, given back or not; 0 if memory was not recorded."""
    dims: str | None = None
    """Input shapes, in a table by shape."""
    types: str | None = None
    source: OperatorSource = "operator"
    device_share: float = 0.0
    """What it launched itself has this share of all device time; over all rows the shares add up to 1."""


Key = tuple[str, str | None, str | None, OperatorSource]


def operator_rows(links: Sequence[Links], *, by_shape: bool = False) -> list[OperatorRow]:
    """Over all traces; most device time first, then most host time."""
    merged: dict[Key, Ints] = {}
    for each in links:
        for key, sums in (*_without_operator(each), *_by_operator(each, by_shape)):
            merged[key] = merged.get(key, 0) + sums
    whole = int(sum(sums[3] for sums in merged.values())) or 1
    rows = []
    for (name, dims, types, source), sums in merged.items():
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
                dims=dims,
                types=types,
                source=source,
                device_share=times[2] / whole,
            )
        )
    return sorted(rows, key=lambda row: (-row.device_self_s, -row.cpu_self_s, row.name))


def class_times(links: Sequence[Links]) -> list[NamedTime]:
    """Returns the host time of each operator without those it called. Time by class rests on it where there is no device."""
    rows = [row for row in operator_rows(links) if row.source == "operator"]
    return [NamedTime(row.name, row.calls, round(row.cpu_self_s * 1e9), None, None) for row in rows]


def self_times(links: Links) -> tuple[Ints, Ints]:
    """For every operator: host time without its children, and device time that it launched itself."""
    operators, known = links.trace.operators, (links.operator >= 0) & ~links.by_graph
    own = np.maximum(operators.duration - links.nesting.children_sum(operators.duration), 0)
    return own, summed(links.operator[known], links.trace.work.duration[known], len(operators))


def _without_operator(links: Links) -> Iterator[tuple[Key, Ints]]:
    """Device work that no operator launched: rows of their own, so that the table covers all of it."""
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
            yield (name, None, None, source), np.array([len(calls) or rows.sum(), host, host, device, device, 0, 0])


def _by_operator(links: Links, by_shape: bool) -> Iterator[tuple[Key, Ints]]:
    trace, nesting, operators = links.trace, links.nesting, links.trace.operators
    if not len(operators):
        return
    cpu_self, device_self = self_times(links)
    owner = nesting.around(trace.allocations.thread, trace.allocations.at)
    taken = (trace.allocations.bytes > 0) & (owner != UNKNOWN)  # frees are not counted
    took = [taken & (trace.allocations.on_device == on_device) for on_device in (0, 1)]
    sizes = [summed(owner[rows], trace.allocations.bytes[rows], len(operators)) for rows in took]
    outermost = np.ones(len(operators), np.int64)
    outermost[nesting.repeats(operators.name)] = 0
    columns = [np.ones(len(operators), np.int64), cpu_self, operators.duration * outermost, device_self]
    columns += [nesting.with_all_inside(inside) * outermost for inside in (device_self, *sizes)]
    shape = operators.shape.astype(np.int64) + 1 if by_shape else np.zeros(len(operators), np.int64)
    shapes = len(trace.shapes) + 1
    groups, row = np.unique(operators.name.astype(np.int64) * shapes + shape, return_inverse=True)
    sums = np.stack([summed(row, column, len(groups)) for column in columns], axis=1)
    for group, own in zip(groups.tolist(), sums, strict=True):
        name, number = divmod(group, shapes)
        known = trace.shapes[number - 1] if number else None
        dims, types = (known.dims, known.types) if known is not None else (None, None)
        yield (trace.names[name], dims, types, "operator"), own


def forward_rows(links: Links) -> tuple[Ints, Ints]:
    """Returns the operators of the backward pass, and for each the forward operator that it belongs to, or UNKNOWN."""
    operators = links.trace.operators
    numbered = operators.sequence >= 0
    forward = np.flatnonzero(numbered & (operators.forward_thread <= 0))
    backward = np.flatnonzero(numbered & (operators.forward_thread > 0))
    if not len(forward) or not len(backward):
        return backward, np.full(len(backward), UNKNOWN, np.int64)
    # Operators that make no node carry the number of the next one: the last to carry it is the one that made it.
    order = forward[np.lexsort((operators.start[forward], operators.sequence[forward]))]
    numbers = operators.sequence[order]
    last = np.searchsorted(numbers, operators.sequence[backward], side="right") - 1
    matches = (last >= 0) & (numbers[np.maximum(last, 0)] == operators.sequence[backward])
    return backward, np.where(matches, order[np.maximum(last, 0)], UNKNOWN)


# Memory

STRETCHES = 240
TOP = 5


class Taken(Frozen):
    """An operator took so much of the memory in use at the peak, as far as the trace saw it taken."""

    operator: str
    bytes: int


class MemoryLine(Frozen):
    """This is the memory of one device, or of the host, over the recorded time."""

    label: str
    on_device: bool
    device: int
    span_s: float
    allocated: tuple[int, ...]
    """This is the most in use in each of `STRETCHES` equal parts of the time; counted from 0 where earlier use is not known."""
    peak_bytes: int
    peak_at_s: float
    at_peak: tuple[Taken, ...]
    """Says which operators took what was in use then, the largest first."""


def memory_lines(links: Sequence[Links]) -> Iterator[MemoryLine]:
    for each in links:
        taken = each.trace.allocations
        for on_device in (1, 0):
            for device in distinct(taken.device[taken.on_device == on_device]).tolist():
                rows = np.flatnonzero((taken.on_device == on_device) & (taken.device == device))
                yield _line(each, rows[np.argsort(taken.at[rows], kind="stable")], bool(on_device), device)


def _line(links: Links, rows: Ints, on_device: bool, device: int) -> MemoryLine:
    taken = links.trace.allocations
    at, known = taken.at[rows] - taken.at[rows[0]], taken.allocated[rows]
    used = np.maximum(known if (known >= 0).all() else np.cumsum(taken.bytes[rows]), 0)
    peak = int(used.argmax())
    # The most in use in each stretch; where nothing is written, what held before.
    stretch = np.minimum(at * STRETCHES // max(int(at[-1]), 1), STRETCHES - 1)
    last = np.searchsorted(stretch, np.arange(STRETCHES), side="left") - 1
    most = np.where(last >= 0, used[np.maximum(last, 0)], 0)
    np.maximum.at(most, stretch, used)
    return MemoryLine(
        label=f"{links.trace.label}, {f'device {device}' if on_device else 'host'}",
        on_device=on_device,
        device=device,
        span_s=seconds(int(at[-1])),
        allocated=tuple(most.tolist()),
        peak_bytes=int(used[peak]),
        peak_at_s=seconds(int(at[peak])),
        at_peak=_at_peak(links, rows[: peak + 1]),
    )


def _at_peak(links: Links, rows: Ints) -> tuple[Taken, ...]:
    """Allocations that were not given back before the peak: each free ends the latest allocation of its size."""
    taken = links.trace.allocations
    alive: dict[int, list[int]] = {}
    for row, size in zip(rows.tolist(), taken.bytes[rows].tolist(), strict=True):
        if size > 0:
            alive.setdefault(size, []).append(row)
        elif alive.get(-size):
            alive[-size].pop()
    left = np.array([row for several in alive.values() for row in several], np.int64)
    owner = links.nesting.around(taken.thread[left], taken.at[left])
    sums: Counter[str] = Counter()
    for size, operator in zip(taken.bytes[left].tolist(), owner.tolist(), strict=True):
        sums[_owner(links, operator)] += size
    return tuple(Taken(operator=label_of(name), bytes=size) for name, size in sums.most_common(TOP))


_ALLOCATES = ("aten::empty", "aten::resize_", "aten::zeros", "aten::full", "aten::ones")


def _owner(links: Links, operator: int) -> str:
    """The operator that wanted the memory, not the one that only makes an empty tensor for it."""
    names, column, parent = links.trace.names, links.trace.operators.name, links.nesting.parent
    while operator != UNKNOWN and parent[operator] != UNKNOWN and names[column[operator]].startswith(_ALLOCATES):
        operator = int(parent[operator])
    return names[column[operator]] if operator != UNKNOWN else "(outside any operator)"
