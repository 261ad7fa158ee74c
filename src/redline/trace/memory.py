"""Memory in use over time, from the allocators' events in a trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from redline.model.fields import Frozen
from redline.trace.columns import UNKNOWN, Ints
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
    peak_bytes: int
    peak_at_s: float
    at_peak: tuple[Taken, ...]
    """Which operators took what was in use then, the largest first."""


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
