"""This module says when a device was busy, and with what. Times are unions over all its streams, never sums."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from redline.model.fields import Frozen
from redline.trace.columns import Ints, Mask, Trace, Work
from redline.trace.host import compiling, joined_ranges, on_thread, picked, union_of
from redline.trace.intervals import NEVER, Intervals, distinct, joined, seconds, union, without
from redline.trace.links import Links, matching, where_name
from redline.trace.names import class_of

ANNOTATED = re.compile(r"^(nccl|rccl|gloo|mpi|ucc|xccl):")
"""torch marks a collective like this while it is under way."""
_WITHIN_DEVICE = re.compile(r"DtoD|Device -> Device")


class Timeline(Frozen):
    """Each field is the length of a union of intervals; for several devices it is the sum over them."""

    span_s: float
    """It lasts from the first device event to the end of the last."""
    busy_s: float
    idle_s: float
    compute_s: float
    """This is the time of kernels that are not communication."""
    communication_s: float
    exposed_communication_s: float
    """This is communication while nothing computes."""
    copy_s: float
    """This is the time of copies by the device's copy engines. Kernels that copy count as compute."""
    exposed_copy_s: float
    """These are copies between host and device while no kernel runs."""


@dataclass(frozen=True)
class DeviceTime:
    """This holds the same in nanoseconds, for one device."""

    span: int
    busy: int
    idle: int
    compute: int
    communication: int
    exposed_communication: int
    copy: int = 0
    exposed_copy: int = 0


@dataclass(frozen=True)
class DeviceView:
    """This is one device of a trace. It knows its work and when it was busy with what."""

    links: Links
    device: int

    @cached_property
    def rows(self) -> Ints:
        """Returns the indices of its work among that of the trace."""
        return np.flatnonzero(self.links.trace.work.device == self.device)

    def when(self, which: Mask) -> Intervals:
        work, rows = self.links.trace.work, self.rows[which[self.rows]]
        return union(work.start[rows], work.end[rows])

    @cached_property
    def busy(self) -> Intervals:
        """Returns when it was busy. `first` counts within `rows`."""
        return self.when(self.links.trace.work.kind >= 0)

    @cached_property
    def compute(self) -> Intervals:
        kernels = self.links.trace.work.kind == Work.KERNEL
        return self.when(kernels & ~self.links.is_class("communication"))

    @cached_property
    def communication(self) -> Intervals:
        return self.when(self.links.is_class("communication"))

    @cached_property
    def copies(self) -> Intervals:
        return self.when(self.links.trace.work.kind == Work.COPY)

    @cached_property
    def moves(self) -> Mask:
        """The mask is true for rows of the trace that copy between the host and the device."""
        work = self.links.trace.work
        found: Mask = (work.kind == Work.COPY) & ~matching(self.links.trace, work, _WITHIN_DEVICE)
        return found


def device_views(links: Links) -> list[DeviceView]:
    return [DeviceView(links, device) for device in distinct(links.trace.work.device).tolist()]


def device_time(view: DeviceView, bounds: tuple[int, int] | None = None) -> DeviceTime:
    """Returns the times of a device. `bounds` say from when until when it is looked at. Without them it is while it had work."""
    start, end = bounds or (int(view.busy.start[0]), int(view.busy.end[-1]))
    kernels = joined(view.compute, view.communication)
    return DeviceTime(
        span=end - start,
        busy=view.busy.total,
        idle=end - start - view.busy.total,
        compute=view.compute.total,
        communication=view.communication.total,
        exposed_communication=kernels.total - view.compute.total,
        copy=view.copies.total,
        exposed_copy=without(view.when(view.moves), kernels).total,
    )


def host_compute(trace: Trace) -> Intervals:
    """Returns when any operator is under way that is no collective, and whose thread neither waits for one nor compiles."""
    operators = picked(trace.operators, ~_collective_operators(trace))
    marks = picked(trace.annotations, matching(trace, trace.annotations, ANNOTATED))
    held = joined_ranges(marks, compiling(trace))
    threads = distinct(operators.thread).tolist()
    return joined(NEVER, *(without(on_thread(operators, thread), on_thread(held, thread)) for thread in threads))


def _collective_operators(trace: Trace) -> Mask:
    return where_name(trace, trace.operators, lambda name: class_of(name) == "communication")


def host_communication(trace: Trace) -> Intervals:
    """Returns when a collective is under way where the host is the device."""
    # An operator only starts a collective. The library's own mark on another thread lasts as long as the collective does.
    marks = picked(trace.annotations, matching(trace, trace.annotations, ANNOTATED))
    return union_of(joined_ranges(picked(trace.operators, _collective_operators(trace)), marks))


def host_busy(trace: Trace) -> Intervals:
    return joined(host_compute(trace), host_communication(trace))


def host_time(trace: Trace, steps: Intervals = NEVER) -> DeviceTime:
    """Returns the time of the host where it is the device. It is busy while any operator runs. `steps` are on the host, where marked."""
    compute, communication, busy = host_compute(trace), host_communication(trace), host_busy(trace)
    # A step may begin and end with something other than operators.
    span = joined(busy, steps).span
    idle, exposed = span - busy.total, busy.total - compute.total
    return DeviceTime(span, busy.total, idle, compute.total, communication.total, exposed)


def timeline_of(times: Sequence[DeviceTime]) -> Timeline:
    sums = {field.name: sum(getattr(time, field.name) for time in times) for field in fields(DeviceTime)}
    return Timeline(**{f"{name}_s": seconds(value) for name, value in sums.items()})
