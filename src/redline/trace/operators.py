"""Time by operator (calls, host and device time, each without and with what it called, and memory)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np

from redline.model.fields import Frozen
from redline.trace.columns import UNKNOWN, Ints, Mask, Trace
from redline.trace.intervals import distinct, seconds
from redline.trace.kernels import NamedTime
from redline.trace.links import Links

OperatorSource = Literal["operator", "graph", "no-operator", "no-launch"]
"""`graph`: replayed by a graph launch, which knows no operators. `no-operator`: launched outside any operator.
`no-launch`: the file does not say what launched it."""

_NO_OPERATOR = "(launched outside any operator)"
_NO_LAUNCH = "(no launch in the file)"


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


@dataclass
class _Sums:
    calls: int = 0
    cpu_self: int = 0
    cpu_total: int = 0
    device_self: int = 0
    device_total: int = 0
    cpu_bytes: int = 0
    device_bytes: int = 0

    def add(self, other: _Sums) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


Key = tuple[str, str | None, str | None, OperatorSource]


def operator_rows(links: Sequence[Links], *, by_shape: bool = False) -> list[OperatorRow]:
    """Over all traces; most device time first, then most host time."""
    merged: dict[Key, _Sums] = {}
    for each in links:
        for key, sums in _of_one(each, by_shape).items():
            merged.setdefault(key, _Sums()).add(sums)
    whole = sum(sums.device_self for sums in merged.values())
    rows = [
        OperatorRow(
            name=name,
            calls=sums.calls,
            cpu_self_s=seconds(sums.cpu_self),
            cpu_total_s=seconds(sums.cpu_total),
            device_self_s=seconds(sums.device_self),
            device_total_s=seconds(sums.device_total),
            cpu_allocated_bytes=sums.cpu_bytes,
            device_allocated_bytes=sums.device_bytes,
            dims=dims,
            types=types,
            source=source,
            device_share=sums.device_self / whole if whole else 0.0,
        )
        for (name, dims, types, source), sums in merged.items()
    ]
    return sorted(rows, key=lambda row: (-row.device_self_s, -row.cpu_self_s, row.name))


def class_times(links: Sequence[Links]) -> list[NamedTime]:
    """Host time of each operator without those it called: what time by class rests on where there is no device."""
    rows = [row for row in operator_rows(links) if row.source == "operator"]
    return [NamedTime(row.name, row.calls, round(row.cpu_self_s * 1e9), None, None) for row in rows]


def self_times(links: Links) -> tuple[Ints, Ints]:
    """For every operator: host time without its children, and device time that it launched itself."""
    operators, nesting = links.trace.operators, links.nesting
    own = np.maximum(operators.duration - nesting.children_sum(operators.duration), 0)
    launched = np.zeros(len(operators), np.int64)
    known = (links.operator >= 0) & ~links.by_graph
    np.add.at(launched, links.operator[known], links.trace.work.duration[known])
    return own, launched


def _without_operator(links: Links) -> dict[Key, _Sums]:
    """Device work that no operator launched: rows of their own, so that the table covers all of it."""
    trace = links.trace
    by_graph, launched = links.by_graph, links.is_launched
    groups: dict[Key, Mask] = {}
    for number in distinct(trace.calls.name[links.call[by_graph]]).tolist():
        name = f"{trace.names[number]} (replayed graph)"
        groups[(name, None, None, "graph")] = by_graph & (trace.calls.name[links.call] == number)
    groups[(_NO_OPERATOR, None, None, "no-operator")] = launched & (links.operator < 0) & ~by_graph
    groups[(_NO_LAUNCH, None, None, "no-launch")] = ~launched
    found = {}
    for key, rows in groups.items():
        if rows.any():
            calls = distinct(links.call[rows & launched])
            device, host = int(trace.work.duration[rows].sum()), int(trace.calls.duration[calls].sum())
            count = len(calls) or int(rows.sum())
            found[key] = _Sums(count, host, host, device, device)
    return found


def _of_one(links: Links, by_shape: bool) -> dict[Key, _Sums]:
    trace, nesting = links.trace, links.nesting
    operators = trace.operators
    if not len(operators):
        return _without_operator(links)
    cpu_self, device_self = self_times(links)
    device_total = nesting.with_all_inside(device_self)
    group = operators.name.astype(np.int64)
    if by_shape:
        group = group * (len(trace.shapes) + 1) + operators.shape + 1
    groups, row = np.unique(group, return_inverse=True)
    outermost = np.ones(len(operators), np.bool_)
    outermost[nesting.repeats(operators.name)] = False
    cpu_bytes, device_bytes = _allocated(trace, links)

    def summed(values: Ints, rows: Mask | None = None) -> list[int]:
        total = np.zeros(len(groups), np.int64)
        np.add.at(total, row if rows is None else row[rows], values if rows is None else values[rows])
        return total.tolist()

    columns = zip(
        groups.tolist(),
        summed(np.ones(len(operators), np.int64)),
        summed(cpu_self),
        summed(operators.duration, outermost),
        summed(device_self),
        summed(device_total, outermost),
        summed(nesting.with_all_inside(cpu_bytes), outermost),
        summed(nesting.with_all_inside(device_bytes), outermost),
        strict=True,
    )
    found = _without_operator(links)
    for number, *sums in columns:
        # Shapes may differ in values that the table does not show.
        found.setdefault(_key(trace, number, by_shape), _Sums()).add(_Sums(*sums))
    return found


def _key(trace: Trace, group: int, by_shape: bool) -> Key:
    if not by_shape:
        return trace.names[group], None, None, "operator"
    name, shape = divmod(group, len(trace.shapes) + 1)
    if shape == 0:
        return trace.names[name], None, None, "operator"
    found = trace.shapes[shape - 1]
    return trace.names[name], found.dims, found.types, "operator"


def _allocated(trace: Trace, links: Links) -> tuple[Ints, Ints]:
    """Bytes each operator took, on the host and on devices; frees are not counted."""
    taken = trace.allocations
    owner = links.nesting.around(taken.thread, taken.at)
    sizes = []
    for on_device in (0, 1):
        rows = (taken.on_device == on_device) & (taken.bytes > 0) & (owner != UNKNOWN)
        total = np.zeros(len(trace.operators), np.int64)
        np.add.at(total, owner[rows], taken.bytes[rows])
        sizes.append(total)
    return sizes[0], sizes[1]


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
