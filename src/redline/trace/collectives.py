"""This module reads collectives: what they move and how fast, how much of their time is waiting for other ranks, and who is late.

The bandwidth follows NCCL's own tests: it counts what must cross the slowest link, however many ranks there are, so that it
can be compared with the hardware.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from redline.model.fields import Frozen
from redline.trace.columns import UNKNOWN, Collective, Ints, Shape
from redline.trace.host import HostView, picked
from redline.trace.intervals import Intervals, seconds
from redline.trace.links import Links, Nesting, matching
from redline.trace.shapes import bytes_of_type, tensors_of
from redline.trace.timeline import ANNOTATED, DeviceView, host_compute

_KINDS = ("allreduce", "allgather", "reducescatter", "alltoall", "broadcast", "scatter", "gather", "reduce", "sendrecv",
          "send", "recv", "barrier")  # fmt: skip
_BUS_SHARES = {"allreduce": 2, "allgather": 1, "reducescatter": 1, "alltoall": 1}
"""Each byte of a message crosses the bus this many times. Of the message, (n − 1)/n leave each of n ranks."""


class CollectiveRow(Frozen):
    """This is the row for all calls of one collective with one message size. Calls of several ranks are added up."""

    name: str
    dtype: str
    message_bytes: int | None
    """One call moves this many bytes on one rank."""
    group_size: int | None
    """This many ranks take part."""
    calls: int
    total_s: float
    mean_s: float
    min_s: float
    max_s: float
    hidden_s: float
    """This is the part of the time in which something computes on the same device."""
    wait_s: float | None
    """This is the wait from its own arrival to that of the last rank. It is None if the traces of the other ranks are not given."""
    transfer_s: float | None
    """This is the time that is left without the waiting."""
    bus_bytes_per_s: float | None
    """This is the rate over the transfer time, or over the whole time if the waiting is not known."""


class Straggler(Frozen):
    """This is a rank that the others waited for."""

    label: str
    last: int
    """The rank came last this often."""
    collectives: int
    waited_s: float
    """The other ranks waited this long for it, on average over them."""


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


def _calls(label: str, rows: Ints, kinds: list[Collective], start: Ints, end: Ints, compute: Intervals) -> Calls:
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    return Calls(label, rows[order], [kinds[at] for at in order.tolist()], start, end, compute.within(start, end))


def calls_of(view: DeviceView) -> Calls:
    links, work = view.links, view.links.trace.work
    rows = view.rows[links.is_class("communication")[view.rows]]
    label = f"{links.trace.label}, device {view.device}"
    return _calls(label, rows, _described(links, rows), work.start[rows], work.end[rows], view.compute)


def host_calls(links: Links) -> Calls:
    """Returns the collectives of a trace without a device. The library that runs them marks them."""
    trace, marks = links.trace, links.trace.annotations
    rows = np.flatnonzero(matching(trace, marks, ANNOTATED))
    kinds = [_of_mark(links, row) for row in rows.tolist()]
    return _calls(trace.label, rows, kinds, marks.start[rows], marks.end[rows], host_compute(trace))


def _described(links: Links, rows: Ints) -> list[Collective]:
    """Returns a description of each collective: what the kernel itself says, else the operator that describes it, else
    the annotation around its launch."""
    trace, table, parent = links.trace, links.trace.annotations, links.nesting.parent
    number, operator = trace.work.collective[rows], links.operator[rows]
    while (unknown := (operator >= 0) & (number < 0)).any():
        number = np.where(unknown, trace.operators.collective[operator], number)
        operator = np.where(unknown, parent[operator], UNKNOWN)
    marks, calls = np.flatnonzero(matching(trace, table, ANNOTATED)), links.call[rows]
    around, known = np.full(len(rows), UNKNOWN, np.int64), calls >= 0
    around[known] = Nesting(picked(table, marks)).around(
        trace.calls.thread[calls[known]], trace.calls.start[calls[known]]
    )
    return [
        trace.collectives[described]
        if described >= 0
        else _of_mark(links, int(marks[mark]))
        if mark >= 0
        else Collective(_kind_by_names(links, row), "", UNKNOWN, UNKNOWN, UNKNOWN)
        for row, described, mark in zip(rows.tolist(), number.tolist(), around.tolist(), strict=True)
    ]


def _kind_by_names(links: Links, row: int) -> str:
    """Returns the kind that the kernel's name tells. Kernels that send and receive serve several collectives, and there the
    operator's name tells."""
    trace, operator = links.trace, int(links.operator[row])
    kind = kind_of(trace.names[trace.work.name[row]])
    told = kind_of(trace.names[trace.operators.name[operator]]) if operator >= 0 else "other"
    return told if kind in ("sendrecv", "other") and told != "other" else kind


def _of_mark(links: Links, mark: int) -> Collective:
    trace, marks = links.trace, links.trace.annotations
    number = int(marks.shape[mark])
    tensors = tensors_of(trace.shapes[number] if number >= 0 else Shape("[]", "[]"))
    elements = sum(tensor.elements for tensor in tensors) if tensors else UNKNOWN
    kind, size = kind_of(trace.names[marks.name[mark]]), trace.world_size or UNKNOWN
    whole = elements * size if kind == "allgather" and min(elements, size) > 0 else elements
    return Collective(kind, tensors[0].dtype if tensors else "", elements, whole, size)


@lru_cache(maxsize=4096)
def kind_of(name: str) -> str:
    """Returns the kind of a collective. `nccl:_all_gather_base`, `_allgather_base` and `ncclDevKernel_AllGather_RING` are
    all `allgather`."""
    letters = re.sub(r"[^a-z]", "", name.lower()[:200])
    return next((kind for kind in _KINDS if kind in letters), "other")


def message_bytes(one: Collective) -> int | None:
    """Returns the bytes of a message. It is what comes out of a collective that gathers, and what goes into any other one."""
    is_gathered = kind_of(one.name) in ("allgather", "gather") and one.out_elements > 0
    elements, size = one.out_elements if is_gathered else one.in_elements, bytes_of_type(one.dtype)
    return elements * size if elements > 0 and size else None


@dataclass(frozen=True)
class Waiting:
    """It says how long each device waited for others in each of its collectives. The time is NaN if that is not known."""

    waits: list[NDArray[np.float64]]
    stragglers: list[Straggler]
    """It is empty if the traces of the other ranks are not given."""


def waiting_of(all_calls: Sequence[Calls]) -> Waiting:
    """Returns the waiting, by comparing ranks that took part in the same collectives."""
    groups = matched(all_calls) if len(all_calls) > 1 else []
    waits = [np.full(len(calls), np.nan) for calls in all_calls]
    offsets = clock_offsets(all_calls, groups) if groups else []
    last: defaultdict[int, list[float]] = defaultdict(list)
    for group in groups:
        arrived = {device: int(all_calls[device].start[index]) - offsets[device] for device, index in group.items()}
        latest = max(arrived, key=lambda device: arrived[device])
        for device, index in group.items():
            length = int(all_calls[device].end[index] - all_calls[device].start[index])
            # No rank waits in a collective for longer than it takes. A longer time means that these are not the same one.
            waits[device][index] = min(max(arrived[latest] - arrived[device], 0), length)
        last[latest].append(float(np.mean([waits[device][at] for device, at in group.items() if device != latest])))
    found = [
        Straggler(
            label=all_calls[device].label, last=len(waited), collectives=len(groups), waited_s=seconds(sum(waited))
        )
        for device, waited in last.items()
    ]
    return Waiting(waits, sorted(found, key=lambda one: -one.waited_s))


def matched(all_calls: Sequence[Calls]) -> list[dict[int, int]]:
    """Returns each collective that all devices took part in, as a map from device to index of the call. It is the n-th of
    its kind and size in its group."""
    indices: defaultdict[tuple[str, str, int, int], dict[int, int]] = defaultdict(dict)
    for device, calls in enumerate(all_calls):
        seen: defaultdict[tuple[str, str, int], int] = defaultdict(int)
        for index, one in enumerate(calls.kinds):
            kind = kind_of(one.name)
            if kind not in ("send", "recv", "sendrecv"):
                # Sizes of an uneven all-to-all differ between ranks, so only its kind and order tell.
                key = (kind, one.group, one.in_elements if kind not in ("alltoall", "allgather") else 0)
                indices[(*key, seen[key])][device] = index
                seen[key] += 1
    return [group for group in indices.values() if len(group) == len(all_calls)]


def clock_offsets(all_calls: Sequence[Calls], groups: list[dict[int, int]]) -> list[int]:
    """Returns how far each device's clock is ahead of the first one's. A collective ends everywhere at about the same time."""
    ends = np.array([[calls.end[group[device]] for device, calls in enumerate(all_calls)] for group in groups])
    return [int(offset) for offset in np.median(ends - ends[:, :1], axis=0).tolist()]


def collective_rows(all_calls: Sequence[Calls], waiting: Waiting) -> list[CollectiveRow]:
    groups: defaultdict[tuple[str, str, int | None, int | None], list[tuple[int, float, int]]] = defaultdict(list)
    for calls, waits in zip(all_calls, waiting.waits, strict=True):
        columns = ((calls.end - calls.start).tolist(), waits.tolist(), calls.hidden.tolist())
        for one, *times in zip(calls.kinds, *columns, strict=True):
            ranks = one.group_size if one.group_size > 0 else None
            groups[kind_of(one.name), one.dtype, message_bytes(one), ranks].append(tuple(times))
    rows = []
    for (name, dtype, size, ranks), members in groups.items():
        lengths, waits_ns, hidden = np.array(members, np.float64).T
        total, waited = float(lengths.sum()), float(waits_ns.sum())
        is_known = not np.isnan(waited)
        over = (total - waited if is_known else total) or total
        factor = _BUS_SHARES.get(name, 0) * (ranks - 1) / ranks if ranks and ranks > 1 else 0
        moved = (size or 0) * len(members) * (factor or 1)
        rows.append(
            CollectiveRow(
                name=name,
                dtype=dtype,
                message_bytes=size,
                group_size=ranks,
                calls=len(members),
                total_s=seconds(total),
                mean_s=seconds(total / len(members)),
                min_s=seconds(float(lengths.min())),
                max_s=seconds(float(lengths.max())),
                hidden_s=seconds(float(hidden.sum())),
                wait_s=seconds(waited) if is_known else None,
                transfer_s=seconds(total - waited) if is_known else None,
                bus_bytes_per_s=moved / seconds(over) if moved and over and ranks else None,
            )
        )
    return sorted(rows, key=lambda row: -row.total_s)


_UPDATE = re.compile(r"^Optimizer\.step#")


def gradient_reductions(view: HostView, calls: Calls) -> int | None:
    """Returns how often gradients are reduced for each step of the optimizer. It is more than once if accumulation reduces
    in every pass."""
    trace, links = view.trace, view.links
    updates = max(int(matching(trace, marks, _UPDATE).sum()) for marks in (trace.annotations, trace.operators))
    reduces = np.array([kind_of(one.name) in ("allreduce", "reducescatter") for one in calls.kinds], np.bool_)
    call = links.call[calls.rows[reduces]]
    call = call[call >= 0]
    call = call[trace.calls.thread[call] != view.main_thread]
    if not updates or not len(call):
        return None
    # A backward pass reduces in one go. Between two passes the main thread launches a forward, so the number of its
    # launches before tells which pass a call belongs to.
    forward = np.sort(trace.calls.start[view.launching[trace.calls.thread[view.launching] == view.main_thread]])
    return max(round(len(np.unique(np.searchsorted(forward, trace.calls.start[call]))) / updates), 1)
