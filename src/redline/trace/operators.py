"""Time by operator (calls, host and device time, each without and with what it called, and memory)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from redline.model.fields import Frozen
from redline.trace.columns import UNKNOWN, Ints, Mask
from redline.trace.intervals import distinct, seconds, summed
from redline.trace.kernels import NamedTime
from redline.trace.links import Links

OperatorSource = Literal["operator", "graph", "no-operator", "no-launch"]
"""`graph`: replayed by a graph launch, which knows no operators. `no-operator`: launched outside any operator.
`no-launch`: the file does not say what launched it."""


class OperatorRow(Frozen):
    name: str
    calls: int
    cpu_self_s: float
    """On the host, without the operators it called."""
    cpu_total_s: float
    """With them; an operator inside its own kind is not counted twice."""
    device_self_s: float
    """Device work that it launched itself."""
    device_total_s: float
    cpu_allocated_bytes: int
    device_allocated_bytes: int
    """What it and those it called took from the allocator, given back or not; 0 when memory was not recorded."""
    dims: str | None = None
    """Input shapes, in a table by shape."""
    types: str | None = None
    source: OperatorSource = "operator"
    device_share: float = 0.0
    """Share of all device time, by what it launched itself; over all rows this adds up to 1."""


Key = tuple[str, str | None, str | None, OperatorSource]


def operator_rows(links: Sequence[Links], *, by_shape: bool = False) -> list[OperatorRow]:
    """Over all traces; most device time first, then most host time."""
    merged: dict[Key, Ints] = {}
    for each in links:
        for key, sums in (*_without_operator(each), *_of_one(each, by_shape)):
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
    """Host time of each operator without those it called: what time by class rests on where there is no device."""
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


def _of_one(links: Links, by_shape: bool) -> Iterator[tuple[Key, Ints]]:
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
    """The operators of the backward pass, and for each the forward operator that it belongs to, or UNKNOWN."""
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
