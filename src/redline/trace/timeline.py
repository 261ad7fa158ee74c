"""When a device was busy, and with what: unions over all its streams, never sums."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

from redline.spec import Spec
from redline.trace.classes import class_of
from redline.trace.columns import DeviceWork, Mask, Trace, Work, seconds
from redline.trace.intervals import Intervals, joined, union

_WITHIN_DEVICE = re.compile(r"DtoD|Device -> Device").search


class Timeline(Spec):
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
