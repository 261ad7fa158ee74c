"""When a device was busy, and with what: unions over all its streams, never sums."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from redline.spec import Frozen
from redline.trace.classes import class_of
from redline.trace.columns import (
    UNKNOWN,
    DeviceWork,
    Intervals,
    Ints,
    Mask,
    Trace,
    Work,
    gaps,
    joined,
    overlap,
    seconds,
    union,
)

_WITHIN_DEVICE = re.compile(r"DtoD|Device -> Device").search


class Timeline(Frozen):
    """Each the length of a union of intervals; of several devices, the sum over them."""

    span_s: float
    """From the first device event to the end of the last."""
    busy_s: float
    idle_s: float
    compute_s: float
    """Kernels that are not communication."""
    communication_s: float
    exposed_communication_s: float
    """Communication while nothing computes."""
    copy_s: float
    """Copies by the device's copy engines; kernels that copy count as compute."""
    exposed_copy_s: float
    """Copies between host and device while no kernel runs."""


@dataclass(frozen=True)
class DeviceTime:
    """The same in nanoseconds, for one device."""

    span: int
    busy: int
    idle: int
    compute: int
    communication: int
    exposed_communication: int
    copy: int
    exposed_copy: int


def per_device(trace: Trace) -> Iterator[tuple[int, DeviceWork]]:
    """The device numbers in a trace with the work of each."""
    for device in np.unique(trace.work.device).tolist():
        yield device, trace.work.only(trace.work.device == device)


def device_time(trace: Trace, work: DeviceWork) -> DeviceTime:
    communication_rows = is_communication(trace, work)
    kernels = work.kind == Work.KERNEL
    compute = _union(work, kernels & ~communication_rows)
    communication = _union(work, communication_rows)
    both = joined(compute, communication)
    copying = work.kind == Work.COPY
    moving = _union(work, copying & ~_named(trace, work, copying, _WITHIN_DEVICE))
    busy = union(work.start, work.end)
    return DeviceTime(
        span=busy.span,
        busy=busy.total,
        idle=busy.span - busy.total,
        compute=compute.total,
        communication=communication.total,
        exposed_communication=both.total - compute.total,
        copy=_union(work, copying).total,
        exposed_copy=joined(both, moving).total - both.total,
    )


def host_time(trace: Trace) -> DeviceTime:
    """Of a trace without a device, the host is the device: busy while any operator is under way."""
    operators = trace.operators
    names = np.unique(operators.name).tolist()
    collectives = [number for number in names if class_of(trace.names[number]) == "communication"]
    talking = np.isin(operators.name, collectives)
    compute = union(operators.start[~talking], operators.end[~talking])
    communication = union(operators.start[talking], operators.end[talking])
    busy = joined(compute, communication)
    return DeviceTime(
        span=busy.span,
        busy=busy.total,
        idle=busy.span - busy.total,
        compute=compute.total,
        communication=communication.total,
        exposed_communication=busy.total - compute.total,
        copy=0,
        exposed_copy=0,
    )


def timeline_of(times: Sequence[DeviceTime]) -> Timeline:
    sums = {field.name: sum(getattr(time, field.name) for time in times) for field in fields(DeviceTime)}
    return Timeline(**{f"{name}_s": seconds(value) for name, value in sums.items()})


def is_communication(trace: Trace, work: DeviceWork) -> Mask:
    return _named(trace, work, work.kind == Work.KERNEL, lambda name: class_of(name) == "communication")


def _named(trace: Trace, work: DeviceWork, rows: Mask, is_meant: Callable[[str], object]) -> Mask:
    """Of these rows, those whose name is meant; each name is looked at once."""
    numbers = [number for number in np.unique(work.name[rows]).tolist() if is_meant(trace.names[number])]
    found: Mask = np.isin(work.name, numbers) & rows
    return found


def _union(work: DeviceWork, rows: Mask) -> Intervals:
    return union(work.start[rows], work.end[rows])


LAUNCH_GAP_NS = 10_000
"""From one kernel to the next that was already waiting: 1–2 µs on NVIDIA, up to 10 µs on AMD. Longer has a cause."""


class Idle(Frozen):
    """The device's idle time by cause."""

    host_wait_s: float
    """The next work was launched only after the device had run dry: Python, or the loader, was late."""
    launch_gap_s: float
    """The next work was launched in time and the gap is short: the price of one kernel after another."""
    other_s: float
    """Launched in time, yet the gap is long: a dependency between streams, a synchronisation, another process."""
    data_wait_s: float = 0.0
    """Part of the host's waiting that it spent inside a data loader."""


@dataclass(frozen=True)
class IdleTime:
    """The same in nanoseconds, for one device."""

    host_wait: int
    launch_gap: int
    other: int
    data_wait: int


def idle_time(work: DeviceWork, launched_at: Ints, loading: Intervals) -> IdleTime:
    """`loading`: when the host sat in a data loader."""
    idle = gaps(union(work.start, work.end))
    length = idle.end - idle.start
    launched = launched_at[idle.first]
    late = (launched != UNKNOWN) & (launched > idle.start)
    short = ~late & (length <= LAUNCH_GAP_NS)
    waiting = Intervals(idle.start[late], idle.end[late], idle.first[late])
    return IdleTime(
        host_wait=int(length[late].sum()),
        launch_gap=int(length[short].sum()),
        other=int(length[~late & ~short].sum()),
        data_wait=overlap(waiting, loading) if len(loading) and len(waiting) else 0,
    )


def idle_of(times: list[IdleTime]) -> Idle:
    return Idle(
        host_wait_s=seconds(sum(time.host_wait for time in times)),
        launch_gap_s=seconds(sum(time.launch_gap for time in times)),
        other_s=seconds(sum(time.other for time in times)),
        data_wait_s=seconds(sum(time.data_wait for time in times)),
    )


STRETCHES = 240


class Strip(Frozen):
    """Shares between 0 and 1, one per stretch; together no more than 1."""

    label: str
    span_s: float
    compute: tuple[float, ...]
    communication: tuple[float, ...]
    """While nothing computes."""
    copy: tuple[float, ...]
    """While no kernel runs."""


def strips_of(traces: Sequence[Trace], stretches: int = STRETCHES) -> list[Strip]:
    strips = []
    for trace in traces:
        for device, work in per_device(trace):
            everything = union(work.start, work.end)
            edges = np.linspace(int(everything.start[0]), int(everything.end[-1]), stretches + 1)
            talking = is_communication(trace, work)
            computing = (work.kind == Work.KERNEL) & ~talking
            compute = union(work.start[computing], work.end[computing])
            kernels = joined(compute, union(work.start[talking], work.end[talking]))
            busy = [_shares(each, edges) for each in (compute, kernels, everything)]
            rank = f"rank {trace.rank}, " if trace.rank is not None else ""
            strips.append(
                Strip(
                    label=f"{rank}device {device}",
                    span_s=seconds(everything.span),
                    compute=_rounded(busy[0]),
                    communication=_rounded(busy[1] - busy[0]),
                    copy=_rounded(busy[2] - busy[1]),
                )
            )
    return strips


def _shares(busy: Intervals, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """How much of each stretch lies inside the intervals."""
    if not len(busy):
        return np.zeros(len(edges) - 1)
    lengths = (busy.end - busy.start).astype(np.float64)
    before = np.concatenate(([0.0], np.cumsum(lengths)))
    place = np.searchsorted(busy.start, edges, side="right") - 1
    inside = np.clip(edges - busy.start[np.maximum(place, 0)], 0, lengths[np.maximum(place, 0)])
    covered = np.where(place >= 0, before[np.maximum(place, 0)] + inside, 0.0)
    widths = np.maximum(np.diff(edges), 1e-9)
    return np.clip(np.diff(covered) / widths, 0, 1)


def _rounded(shares: NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(np.round(np.clip(shares, 0, 1), 4).tolist())
