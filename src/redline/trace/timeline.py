"""When a device was busy, and with what: unions over all its streams, never sums."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from redline.model.fields import Frozen
from redline.trace.columns import Ints, Mask, Trace, Work
from redline.trace.host import compiling, joined_ranges, on_thread, picked
from redline.trace.idle import Cause, IdleTime
from redline.trace.intervals import NEVER, Intervals, distinct, joined, seconds, union, without
from redline.trace.links import Links, matching, where_name
from redline.trace.names import class_of

ANNOTATED = re.compile(r"^(nccl|rccl|gloo|mpi|ucc|xccl):")
"""How torch marks a collective while it is under way."""
_WITHIN_DEVICE = re.compile(r"DtoD|Device -> Device").search


class Timeline(Frozen):
    """Each field is the length of a union of intervals; for several devices it is the sum over them."""

    span_s: float
    """It lasts from the first device event to the end of the last."""
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
    """These are copies between host and device while no kernel runs."""


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


@dataclass(frozen=True)
class DeviceView:
    """One device of a trace: its work and when it was busy with what."""

    links: Links
    device: int
    rows: Ints
    """Its work among that of the trace."""
    busy: Intervals
    """`first` counts within `rows`."""
    compute: Intervals
    communication: Intervals
    copies: Intervals
    moving: Intervals
    """Copies between the host and the device."""


def device_views(links: Links) -> list[DeviceView]:
    work = links.trace.work
    talking = links.is_class("communication")
    kernels = work.kind == Work.KERNEL
    copying = work.kind == Work.COPY
    moving = copying & ~where_name(links.trace, work, lambda name: _WITHIN_DEVICE(name) is not None)
    found = []
    for device in distinct(work.device).tolist():
        mine = work.device == device
        rows = np.flatnonzero(mine)

        def when(which: Mask, mine: Mask = mine) -> Intervals:
            return union(work.start[mine & which], work.end[mine & which])

        found.append(
            DeviceView(
                links=links,
                device=device,
                rows=rows,
                busy=union(work.start[rows], work.end[rows]),
                compute=when(kernels & ~talking),
                communication=when(talking),
                copies=when(copying),
                moving=when(moving),
            )
        )
    return found


def device_time(view: DeviceView, bounds: tuple[int, int] | None = None) -> DeviceTime:
    """`bounds`: from when until when the device is looked at; without, while it had work."""
    start, end = bounds or (int(view.busy.start[0]), int(view.busy.end[-1]))
    both = joined(view.compute, view.communication)
    return DeviceTime(
        span=end - start,
        busy=view.busy.total,
        idle=end - start - view.busy.total,
        compute=view.compute.total,
        communication=view.communication.total,
        exposed_communication=both.total - view.compute.total,
        copy=view.copies.total,
        exposed_copy=joined(both, view.moving).total - both.total,
    )


def host_compute(trace: Trace) -> Intervals:
    """When any operator is under way that is no collective, and whose thread neither waits for one nor compiles."""
    operators = trace.operators
    talking = _collective_operators(trace)
    held = joined_ranges(picked(trace.annotations, matching(trace, trace.annotations, ANNOTATED)), compiling(trace))
    waiting = np.intersect1d(held.thread, operators.thread)
    others = ~talking & ~np.isin(operators.thread, waiting)
    found = [union(operators.start[others], operators.end[others])]
    for thread in waiting.tolist():
        own = ~talking & (operators.thread == thread)
        busy = union(operators.start[own], operators.end[own])
        found.append(without(busy, on_thread(held, thread)))
    return joined(*found)


def _collective_operators(trace: Trace) -> Mask:
    return where_name(trace, trace.operators, lambda name: class_of(name) == "communication")


def host_communication(trace: Trace) -> Intervals:
    """When a collective is under way where the host is the device."""
    operators, talking = trace.operators, _collective_operators(trace)
    # An operator only starts a collective; the library's own mark on another thread lasts as long as it does.
    marks = matching(trace, trace.annotations, ANNOTATED)
    return union(
        np.concatenate([operators.start[talking], trace.annotations.start[marks]]),
        np.concatenate([operators.end[talking], trace.annotations.end[marks]]),
    )


def host_time(trace: Trace, steps: Intervals = NEVER) -> DeviceTime:
    """The time of the host where it is the device: busy while any operator runs. `steps`: on the host, where marked."""
    compute, communication = host_compute(trace), host_communication(trace)
    busy = joined(compute, communication)
    # A step may begin and end with something else than operators.
    span = joined(busy, steps).span
    return DeviceTime(
        span=span,
        busy=busy.total,
        idle=span - busy.total,
        compute=compute.total,
        communication=communication.total,
        exposed_communication=busy.total - compute.total,
        copy=0,
        exposed_copy=0,
    )


def timeline_of(times: Sequence[DeviceTime]) -> Timeline:
    sums = {field.name: sum(getattr(time, field.name) for time in times) for field in fields(DeviceTime)}
    return Timeline(**{f"{name}_s": seconds(value) for name, value in sums.items()})


STRETCHES = 240


class Strip(Frozen):
    """One device over time: shares between 0 and 1, one per stretch; together no more than 1."""

    label: str
    span_s: float
    compute: tuple[float, ...]
    communication: tuple[float, ...]
    """While nothing computes."""
    copy: tuple[float, ...]
    """While no kernel runs."""
    idle: dict[Cause, tuple[float, ...]] = {}
    """It is split by cause; causes that do not occur are left out."""


def strip_of(
    view: DeviceView, bounds: tuple[int, int], idle: IdleTime | None = None, stretches: int = STRETCHES
) -> Strip:
    edges = np.linspace(bounds[0], max(bounds[1], bounds[0] + 1), stretches + 1)
    moments, widths = np.rint(edges).astype(np.int64), np.maximum(np.diff(edges), 1.0)

    def shares(when: Intervals, beside: Intervals = NEVER) -> tuple[float, ...]:
        """Returns how much of each stretch lies inside the intervals and in none of those beside them."""
        inside = without(when, beside).within(moments[:-1], moments[1:]) / widths
        return tuple(np.round(np.clip(inside, 0, 1), 4).tolist())

    return Strip(
        label=f"{view.links.trace.label}, device {view.device}",
        span_s=seconds(bounds[1] - bounds[0]),
        compute=shares(view.compute),
        communication=shares(view.communication, view.compute),
        copy=shares(view.busy, joined(view.compute, view.communication)),
        idle={cause: shares(when) for cause, when in idle.when.items() if len(when)} if idle is not None else {},
    )
