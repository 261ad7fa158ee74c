"""Memory in use over time, from the allocators' events in a trace."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from redline.model.fields import Frozen
from redline.trace.columns import UNKNOWN, Ints, Trace
from redline.trace.intervals import distinct, seconds
from redline.trace.links import Links
from redline.trace.names import label_of

STRETCHES = 240
TOP = 5


class Taken(Frozen):
    """What an operator took of the memory in use at the peak, as far as the trace saw it taken."""

    operator: str
    bytes: int


class MemoryLine(Frozen):
    """One device, or the host, over the recorded time."""

    label: str
    on_device: bool
    device: int
    span_s: float
    allocated: tuple[int, ...]
    """The most in use in each of `STRETCHES` equal parts of the time; counted from 0 where earlier use is not known."""
    reserved: tuple[int, ...]
    """What the allocator held; empty where the trace does not tell."""
    peak_bytes: int
    peak_at_s: float
    at_peak: tuple[Taken, ...]
    """Which operators took what was in use then, the largest first."""


def memory_lines(links: Sequence[Links]) -> list[MemoryLine]:
    return [line for each in links for line in _of_one(each)]


def _of_one(links: Links) -> list[MemoryLine]:
    taken = links.trace.allocations
    found = []
    for on_device in (1, 0):
        for device in distinct(taken.device[taken.on_device == on_device]).tolist():
            rows = np.flatnonzero((taken.on_device == on_device) & (taken.device == device))
            found.append(_line(links, rows[np.argsort(taken.at[rows], kind="stable")], bool(on_device), device))
    return found


def _line(links: Links, rows: Ints, on_device: bool, device: int) -> MemoryLine:
    taken = links.trace.allocations
    at, known = taken.at[rows], taken.allocated[rows]
    used = known if (known >= 0).all() else np.cumsum(taken.bytes[rows])
    used = np.maximum(used, 0)
    held = taken.reserved[rows]
    peak = int(used.argmax())
    begin, end = int(at[0]), int(at[-1])
    name = f"device {device}" if on_device else "host"
    return MemoryLine(
        label=f"{links.trace.label}, {name}",
        on_device=on_device,
        device=device,
        span_s=seconds(end - begin),
        allocated=_stretches(at, used),
        reserved=_stretches(at, held) if (held >= 0).all() and held.any() else (),
        peak_bytes=int(used[peak]),
        peak_at_s=seconds(int(at[peak]) - begin),
        at_peak=_at_peak(links, rows[: peak + 1]),
    )


def _stretches(at: Ints, values: Ints) -> tuple[int, ...]:
    """The largest value in each stretch; where none is written, what held before."""
    edges = np.linspace(int(at[0]), max(int(at[-1]), int(at[0]) + 1), STRETCHES + 1)
    stretch = np.clip(np.searchsorted(edges, at, side="right") - 1, 0, STRETCHES - 1)
    most = np.full(STRETCHES, UNKNOWN, np.int64)
    np.maximum.at(most, stretch, values)
    last = np.searchsorted(stretch, np.arange(STRETCHES), side="left") - 1
    before = np.where(last >= 0, values[np.maximum(last, 0)], 0)
    return tuple(np.maximum(most, np.where(stretch[0] < np.arange(STRETCHES), before, 0)).tolist())


def _at_peak(links: Links, rows: Ints) -> tuple[Taken, ...]:
    """Allocations that were not given back before the peak: each free ends the latest allocation of its size."""
    taken, trace = links.trace.allocations, links.trace
    alive: dict[int, list[int]] = {}
    for row, size in zip(rows.tolist(), taken.bytes[rows].tolist(), strict=True):
        if size > 0:
            alive.setdefault(size, []).append(row)
        elif alive.get(-size):
            alive[-size].pop()
    left = np.array([row for several in alive.values() for row in several], np.int64)
    if not len(left):
        return ()
    owner = links.nesting.around(taken.thread[left], taken.at[left])
    sums: dict[str, int] = {}
    for size, operator in zip(taken.bytes[left].tolist(), owner.tolist(), strict=True):
        name = _owner(trace, links, operator)
        sums[name] = sums.get(name, 0) + size
    largest = sorted(sums.items(), key=lambda item: -item[1])[:TOP]
    return tuple(Taken(operator=label_of(name), bytes=size) for name, size in largest)


_ALLOCATES = ("aten::empty", "aten::resize_", "aten::zeros", "aten::full", "aten::ones")


def _owner(trace: Trace, links: Links, operator: int) -> str:
    """The operator that wanted the memory, not the one that only makes an empty tensor for it."""
    while operator >= 0:
        name: str = trace.names[int(trace.operators.name[operator])]
        above = int(links.nesting.parent[operator])
        if above < 0 or not name.startswith(_ALLOCATES):
            return name
        operator = above
    return "(outside any operator)"
