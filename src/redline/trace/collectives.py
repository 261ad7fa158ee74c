"""Collectives: what they move and how fast, how much of their time is waiting for other ranks, and who is late.

Bandwidths follow NCCL's own tests. The *algorithm bandwidth* is the message over the time; the *bus bandwidth* counts what
must cross the slowest link whatever the number of ranks, and can be held against the hardware.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from redline.model.fields import Frozen
from redline.trace.columns import UNKNOWN, Collective, Ints, Shape
from redline.trace.intervals import seconds
from redline.trace.links import Links, Nesting, matching
from redline.trace.shapes import bytes_of_type, tensors_of
from redline.trace.timeline import ANNOTATED, DeviceView, host_compute

_KINDS = ("allreduce", "allgather", "reducescatter", "alltoall", "broadcast", "scatter", "gather", "reduce", "sendrecv",
          "send", "recv", "barrier")  # fmt: skip
_OUTPUT_COUNTS = frozenset(("allgather", "gather"))
"""The message is what comes out; of all others, what goes in."""


class CollectiveRow(Frozen):
    """This is the row for all calls of one collective with one message size, those of several ranks together."""

    name: str
    dtype: str
    message_bytes: int | None
    """Per call, on one rank."""
    group_size: int | None
    """Ranks that take part."""
    calls: int
    total_s: float
    mean_s: float
    min_s: float
    max_s: float
    hidden_s: float
    """While something computes on the same device."""
    wait_s: float | None
    """It waits from its own arrival to that of the last rank: against the other ranks, where their traces are given, else
    against the fastest call of the same size. None where neither is known."""
    transfer_s: float | None
    """The rest."""
    algorithm_bytes_per_s: float | None
    """Message over transfer time, or over the whole time where the waiting is not known."""
    bus_bytes_per_s: float | None


class Straggler(Frozen):
    """A rank that the others waited for."""

    label: str
    last: int
    """How often it came last."""
    collectives: int
    waited_s: float
    """The other ranks waited so long for it, on average over them."""


@dataclass(frozen=True)
class Calls:
    """This holds the collectives of one device, in order of their start."""

    label: str
    rows: Ints
    kinds: list[Collective]
    start: Ints
    end: Ints
    hidden: Ints

    def __len__(self) -> int:
        return len(self.rows)


def calls_of(view: DeviceView) -> Calls:
    links, work = view.links, view.links.trace.work
    talking = links.is_class("communication")[view.rows]
    rows = view.rows[talking]
    rows = rows[np.argsort(work.start[rows], kind="stable")]
    start, end = work.start[rows], work.end[rows]
    return Calls(
        label=f"{links.trace.label}, device {view.device}",
        rows=rows,
        kinds=_described(links, rows),
        start=start,
        end=end,
        hidden=view.compute.within(start, end),
    )


def host_calls(links: Links) -> Calls:
    """Returns the collectives of a trace without a device, as the library that runs them marks them."""
    trace = links.trace
    marks = np.flatnonzero(matching(trace, trace.annotations, ANNOTATED))
    marks = marks[np.argsort(trace.annotations.start[marks], kind="stable")]
    start, end = trace.annotations.start[marks], trace.annotations.end[marks]
    return Calls(
        label=trace.label,
        rows=marks,
        kinds=[_of_mark(links, int(mark)) for mark in marks],
        start=start,
        end=end,
        hidden=host_compute(trace).within(start, end),
    )


def _described(links: Links, rows: Ints) -> list[Collective]:
    """Returns what the kernel itself says of each, else the operator that describes it, else the annotation around its launch."""
    trace, table, parent = links.trace, links.trace.annotations, links.nesting.parent
    number, operator = trace.work.collective[rows], links.operator[rows]
    while ((operator >= 0) & (number < 0)).any():
        unknown = (operator >= 0) & (number < 0)
        number = np.where(unknown, trace.operators.collective[operator], number)
        operator = np.where(unknown, parent[operator], UNKNOWN)
    marks, calls = np.flatnonzero(matching(trace, table, ANNOTATED)), links.call[rows]
    nesting = Nesting(table.thread[marks], table.start[marks], table.end[marks])
    around, known = np.full(len(rows), UNKNOWN, np.int64), calls >= 0
    around[known] = nesting.around(trace.calls.thread[calls[known]], trace.calls.start[calls[known]])
    return [
        trace.collectives[described]
        if described >= 0
        else _of_mark(links, int(marks[mark]))
        if mark >= 0
        else Collective(_kind_by_names(links, row), "", UNKNOWN, UNKNOWN, UNKNOWN)
        for row, described, mark in zip(rows.tolist(), number.tolist(), around.tolist(), strict=True)
    ]


def _kind_by_names(links: Links, row: int) -> str:
    """Returns what the kernel's name tells. Kernels that send and receive serve several collectives, and there the operator's name tells."""
    trace, operator = links.trace, int(links.operator[row])
    kind = kind_of(trace.names[trace.work.name[row]])
    told = kind_of(trace.names[trace.operators.name[operator]]) if operator >= 0 else "other"
    return told if kind in ("sendrecv", "other") and told != "other" else kind


def _of_mark(links: Links, mark: int) -> Collective:
    trace = links.trace
    number = int(trace.annotations.shape[mark])
    shape = trace.shapes[number] if number >= 0 else Shape("[]", "[]")
    tensors = tensors_of(shape)
    elements = sum(tensor.elements for tensor in tensors) if tensors else UNKNOWN
    dtype = tensors[0].dtype if tensors else ""
    kind = kind_of(trace.names[trace.annotations.name[mark]])
    size = trace.world_size or UNKNOWN
    whole = elements * size if kind == "allgather" and min(elements, size) > 0 else elements
    return Collective(kind, dtype, elements, whole, size)


@lru_cache(maxsize=4096)
def kind_of(name: str) -> str:
    """`nccl:_all_gather_base`, `_allgather_base` and `ncclDevKernel_AllGather_RING` are all `allgather`."""
    letters = re.sub(r"[^a-z]", "", name.lower()[:200])
    return next((kind for kind in _KINDS if kind in letters), "other")


def message_bytes(one: Collective) -> int | None:
    kind = kind_of(one.name)
    elements = one.out_elements if kind in _OUTPUT_COUNTS and one.out_elements > 0 else one.in_elements
    size = bytes_of_type(one.dtype)
    return elements * size if elements > 0 and size else None


def bus_factor(kind: str, ranks: int) -> float:
    """Bus over algorithm bandwidth."""
    if ranks < 2:
        return 1.0
    share = (ranks - 1) / ranks
    return {"allreduce": 2 * share, "allgather": share, "reducescatter": share, "alltoall": share}.get(kind, 1.0)


@dataclass(frozen=True)
class Waiting:
    """Says how long each device waited for others in each of its collectives; NaN where that is not known."""

    waits: list[NDArray[np.float64]]
    late: int
    """How much earlier the steps of each device would end, had no rank been later than the first: by the longest
    exposed wait of any rank in each collective, since all of them go on together."""
    from_ranks: bool
    stragglers: list[Straggler]


def waiting_of(all_calls: Sequence[Calls]) -> Waiting:
    """Compares with the other ranks where they took part in the same collectives, else with the fastest call of the same size."""
    groups = matched(all_calls) if len(all_calls) > 1 else []
    if not groups:
        return Waiting([_against_fastest(calls) for calls in all_calls], 0, False, [])
    offsets = clock_offsets(all_calls, groups)
    waits = [np.full(len(calls), np.nan) for calls in all_calls]
    last: defaultdict[int, list[float]] = defaultdict(list)
    late = 0
    for group in groups:
        arrived = {device: int(all_calls[device].start[index]) - offsets[device] for device, index in group.items()}
        latest = max(arrived, key=lambda device: arrived[device])
        for device, index in group.items():
            length = int(all_calls[device].end[index] - all_calls[device].start[index])
            # No rank waits in a collective for longer than it takes: more means that these are not the same one.
            waits[device][index] = min(max(arrived[latest] - arrived[device], 0), length)
        waited = [float(waits[device][index]) for device, index in group.items() if device != latest]
        last[latest].append(float(np.mean(waited)))
        exposed = [waits[device][index] - all_calls[device].hidden[index] for device, index in group.items()]
        late += max(int(max(exposed)), 0)
    found = [
        Straggler(
            label=all_calls[device].label,
            last=len(waited),
            collectives=len(groups),
            waited_s=seconds(sum(waited)),
        )
        for device, waited in last.items()
    ]
    return Waiting(waits, late, True, sorted(found, key=lambda one: -one.waited_s))


def matched(all_calls: Sequence[Calls]) -> list[dict[int, int]]:
    """The same collective on each device: the n-th of its kind and size in its group. Device to index of the call."""
    indices: defaultdict[tuple[str, str, int, int], dict[int, int]] = defaultdict(dict)
    for device, calls in enumerate(all_calls):
        seen: defaultdict[tuple[str, str, int], int] = defaultdict(int)
        for index, one in enumerate(calls.kinds):
            kind = kind_of(one.name)
            if kind in ("send", "recv", "sendrecv"):
                continue
            # Sizes of an uneven all-to-all differ between ranks: only its kind and order tell.
            key = (kind, one.group, one.in_elements if kind not in ("alltoall", "allgather") else 0)
            indices[(*key, seen[key])][device] = index
            seen[key] += 1
    return [group for group in indices.values() if len(group) == len(all_calls)]


def clock_offsets(all_calls: Sequence[Calls], groups: list[dict[int, int]]) -> list[int]:
    """How far each device's clock is ahead of the first one's: a collective ends everywhere at about the same time."""
    ends = np.array(
        [[int(all_calls[device].end[group[device]]) for device in range(len(all_calls))] for group in groups]
    )
    return [int(offset) for offset in np.median(ends - ends[:, :1], axis=0).tolist()]


def _against_fastest(calls: Calls) -> NDArray[np.float64]:
    length = (calls.end - calls.start).astype(np.float64)
    groups: defaultdict[tuple[str, str, int], list[int]] = defaultdict(list)
    for index, one in enumerate(calls.kinds):
        groups[(kind_of(one.name), one.dtype, message_bytes(one) or UNKNOWN)].append(index)
    waits = np.full(len(calls), np.nan)
    for (_, _, size), members in groups.items():
        if len(members) > 1 and size > 0:
            waits[members] = length[members] - length[members].min()
    return waits


def collective_rows(all_calls: Sequence[Calls], waiting: Waiting) -> list[CollectiveRow]:
    groups: defaultdict[tuple[str, str, int | None, int | None], list[tuple[int, float, int]]] = defaultdict(list)
    for calls, waits in zip(all_calls, waiting.waits, strict=True):
        lengths = (calls.end - calls.start).tolist()
        for one, *times in zip(calls.kinds, lengths, waits.tolist(), calls.hidden.tolist(), strict=True):
            ranks = one.group_size if one.group_size > 0 else None
            groups[kind_of(one.name), one.dtype, message_bytes(one), ranks].append((times[0], times[1], times[2]))
    rows = []
    for (name, dtype, size, ranks), members in groups.items():
        took, waiting_ns, hidden = zip(*members, strict=True)
        total, waited = float(sum(took)), float(sum(waiting_ns))
        is_known = not math.isnan(waited)
        over = (total - waited if is_known else total) or total
        speed = size * len(members) / seconds(over) if size and over else None
        rows.append(
            CollectiveRow(
                name=name,
                dtype=dtype,
                message_bytes=size,
                group_size=ranks,
                calls=len(members),
                total_s=seconds(total),
                mean_s=seconds(total / len(members)),
                min_s=seconds(min(took)),
                max_s=seconds(max(took)),
                hidden_s=seconds(sum(hidden)),
                wait_s=seconds(waited) if is_known else None,
                transfer_s=seconds(total - waited) if is_known else None,
                algorithm_bytes_per_s=speed,
                bus_bytes_per_s=speed * bus_factor(name, ranks) if speed and ranks else None,
            )
        )
    return sorted(rows, key=lambda row: -row.total_s)
